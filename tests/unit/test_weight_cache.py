"""Kept weights on disk: what was written, for the same executors alone, by nobody else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shared.errors import ConfigurationError
from tenant_sdk.session.weight_cache import WeightCache

SHAPES = [(3, 4), (2, 4)]


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return [torch.randn(shape) for shape in SHAPES]


def test_what_was_written_is_read(weights: list[torch.Tensor], tmp_path: Path) -> None:
    cache = WeightCache(["digest", "ring", "wss://a"])
    assert cache.read(7, SHAPES, torch.float32) is None
    cache.write(7, weights)
    for again in (cache, WeightCache(["digest", "ring", "wss://a"])):
        read = again.read(7, SHAPES, torch.float32)
        assert read is not None
        assert all(map(torch.equal, read, weights))
    assert WeightCache(["digest", "ring", "wss://b"]).read(7, SHAPES, torch.float32) is None
    assert cache.read(8, SHAPES, torch.float32) is None
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert folders[-1].stat().st_mode & 0o777 == 0o700
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["7.safetensors"]


def test_what_does_not_fit_is_not_used(weights: list[torch.Tensor], tmp_path: Path) -> None:
    cache = WeightCache(["digest"])
    cache.write(7, weights)
    assert cache.read(7, SHAPES, torch.bfloat16) is None
    assert cache.read(7, SHAPES[:1], torch.float32) is not None
    assert cache.read(7, [*SHAPES, (1, 4)], torch.float32) is None
    assert cache.read(7, SHAPES[::-1], torch.float32) is None
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.write_bytes(file.read_bytes()[:-1])
    assert cache.read(7, SHAPES, torch.float32) is None


def test_a_file_that_others_may_change_is_refused(weights: list[torch.Tensor], tmp_path: Path) -> None:
    cache = WeightCache(["digest"])
    cache.write(7, weights)
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    file.chmod(0o666)
    with pytest.raises(ConfigurationError, match=r"7\.safetensors"):
        cache.read(7, SHAPES, torch.float32)


def test_a_disk_that_takes_none(
    weights: list[torch.Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "symbiosis").write_text("a file where a folder is wanted")
    WeightCache(["digest"]).write(7, weights)
    assert "kept weights are not written" in caplog.text
