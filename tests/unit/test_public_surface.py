"""The names that users import, with their signatures, change only with the page that lists them."""

from __future__ import annotations

from pathlib import Path

from public_surface import page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "python.md"


def test_the_page_lists_the_public_names_as_they_are() -> None:
    assert PAGE.read_text() == page(), "python tests/public_surface.py > docs/reference/python.md"
