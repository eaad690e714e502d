"""Where caches and settings of a user are."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.user_folders import cache_home, configuration_home


@pytest.mark.parametrize(
    ("named", "cache", "configuration"),
    [
        (None, "/home/me/.cache", "/home/me/.config"),
        ("", "/home/me/.cache", "/home/me/.config"),
        ("/elsewhere", "/elsewhere", "/elsewhere"),
        ("here", "/home/me/.cache", "/home/me/.config"),
    ],
)
def test_a_relative_path_is_ignored(
    named: str | None, cache: str, configuration: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for variable in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
        if named is not None:
            monkeypatch.setenv(variable, named)
    assert (cache_home(), configuration_home()) == (Path(cache), Path(configuration))
