"""Links between documents, and from programs to documents, lead somewhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *("docs", "security", "shared", "examples", "provider", "tenant_sdk"),
    *("deploy", "benchmarks", "tests"),
)
TEXTS = {".md", ".py", ".jinja", ".html", ".toml", ".yml", ".yaml", ".service", ""}
DOCUMENTS = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
_LINK = re.compile(r'\]\(([^)\s]+)\)|(?:src|srcset)="([^"]+)"')


def prose(document: Path) -> str:
    """The text of a document without its blocks of code."""
    return re.sub(r"(?ms)^```.*?^```", "", document.read_text())


def links(document: Path) -> list[str]:
    return [one or other for one, other in _LINK.findall(prose(document))]


def anchors(document: Path) -> set[str]:
    """The names that a host of repositories gives to the headings of a document."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"(?m)^#+ (.*)$", prose(document)):
        name = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower())
        name = name.strip().replace(" ", "-")
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(document: Path) -> None:
    for link in links(document):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_document_is_in_the_list() -> None:
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link).resolve() for link in links(index)}
    assert {*(ROOT / "docs").rglob("*.md")} - {index} <= listed


def named() -> Iterator[tuple[Path, str]]:
    """The documents in docs that any text of the project names."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    for path in (*files, *ROOT.iterdir()):
        if path.is_file() and path.suffix in TEXTS:
            for name in re.findall(r"docs/[\w/-]+\.(?:md|png)", path.read_text(errors="replace")):
                yield path, name


def test_documents_that_are_named_exist() -> None:
    there = [*named()]
    assert len(there) > 30
    assert not [(str(path), name) for path, name in there if not (ROOT / name).exists()]
