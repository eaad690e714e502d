"""Kept weights on disk: what was written, for the same executors alone, by nobody else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from shared import ownership
from shared.errors import ConfigurationError
from shared.wire.messages import GroupInfo, Member
from tenant_sdk.session.keeping import _trust_options
from tenant_sdk.session.options import SessionConfig
from tenant_sdk.session.weight_cache import WeightCache

GROUP = GroupInfo(4, (Member("0.k", 3, "0.k.weight"), Member("0.v", 3, "0.v.weight")))
OTHER = GroupInfo(4, (Member("1.k", 3, "1.k.weight"), Member("1.v", 3, "1.v.weight")))


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return [torch.randn(member.outputs, GROUP.inputs) for member in GROUP.members]


def test_what_was_written_is_read(weights: list[torch.Tensor], tmp_path: Path) -> None:
    cache = WeightCache(["digest", "ring", "wss://a"])
    assert cache.read(GROUP, torch.float32) is None
    cache.write(GROUP, weights)
    for again in (cache, WeightCache(["digest", "ring", "wss://a"])):
        read = again.read(GROUP, torch.float32)
        assert read is not None
        assert all(map(torch.equal, read, weights))
    assert WeightCache(["digest", "ring", "wss://b"]).read(GROUP, torch.float32) is None
    assert cache.read(OTHER, torch.float32) is None
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {folder.stat().st_mode & 0o777 for folder in folders} == {0o700}
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 1


def test_layers_are_told_apart_by_what_they_are(weights: list[torch.Tensor]) -> None:
    """An executor chooses the order of its groups, and of members of one shape."""
    cache = WeightCache(["digest"])
    cache.write(GROUP, weights)
    assert cache.read(GroupInfo(4, GROUP.members[::-1]), torch.float32) is None
    assert cache.read(GroupInfo(4, GROUP.members, bounds=(3, 4)), torch.float32) is not None


def test_a_group_of_ones_own_may_write(
    weights: list[torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some systems give each user a group, and a umask that lets it write."""
    monkeypatch.setattr(ownership, "_is_private", lambda _: True)
    (tmp_path / "symbiosis").mkdir()
    (tmp_path / "symbiosis").chmod(0o775)
    WeightCache(["digest"]).write(GROUP, weights)
    assert WeightCache(["another"]).read(GROUP, torch.float32) is None
    (tmp_path / "symbiosis" / "kept").chmod(0o777)
    with pytest.raises(ConfigurationError, match="others can write"):
        WeightCache(["another"]).read(GROUP, torch.float32)


def test_what_does_not_fit_is_not_used(weights: list[torch.Tensor], tmp_path: Path) -> None:
    cache = WeightCache(["digest"])
    cache.write(GROUP, weights)
    assert cache.read(GROUP, torch.bfloat16) is None
    short = GroupInfo(4, (msgspec.structs.replace(GROUP.members[0], outputs=2), GROUP.members[1]))
    cache.write(short, weights)
    assert cache.read(short, torch.float32) is None
    for path in tmp_path.rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    assert cache.read(GROUP, torch.float32) is None


def test_a_file_that_others_may_change_is_refused(weights: list[torch.Tensor], tmp_path: Path) -> None:
    cache = WeightCache(["digest"])
    cache.write(GROUP, weights)
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.chmod(0o666)
    with pytest.raises(ConfigurationError, match="safetensors"):
        cache.read(GROUP, torch.float32)


def test_a_disk_that_takes_none(
    weights: list[torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "symbiosis").write_text("a file where a folder is wanted")
    WeightCache(["digest"]).write(GROUP, weights)
    assert "kept weights are not written" in caplog.text


def test_what_decides_trust_is_told_apart(tmp_path: Path) -> None:
    """By what files hold, and by which party is whose replica."""

    def trust(provider: list[str], sources: list[str], file: str, content: str) -> tuple[str, ...]:
        (tmp_path / file).write_text(content)
        config = SessionConfig(provider, mask_sources=sources, ca=tmp_path / file, mask_source_ca="system")
        return tuple(_trust_options(config))

    first = trust(["wss://a", "wss://b"], ["wss://c"], "ca.pem", "one")
    assert trust(["wss://a", "wss://b"], ["wss://c"], "moved.pem", "one") == first
    others = {
        trust(["wss://a", "wss://b"], ["wss://c"], "ca.pem", "two"),
        trust(["wss://a"], ["wss://b", "wss://c"], "ca.pem", "one"),
    }
    assert len(others - {first}) == 2
