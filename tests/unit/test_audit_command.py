"""The audit without the packages of its extra."""

from __future__ import annotations

import pytest

from security import cli
from shared.errors import ConfigurationError


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name in ("scipy", "jinja2") else name)
    with pytest.raises(ConfigurationError, match=r"needs scipy and jinja2: pip install '\.\[audit\]'"):
        cli._check_packages()
