"""Models by name: what is fetched of a hub, what is pinned, and what every failure says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hubs import COMMIT, hub

from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError
from shared.hub import checkpoint_folder, hub_id, id_of_snapshot
from tenant_sdk.session.profiles import read_profile

ROOT = Path(__file__).parents[2]
ASK = """
import logging, sys
from shared.errors import CheckpointError
from shared.hub import checkpoint_folder, hub_id, pinned
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(name)s %(message)s")
for name in sys.argv[2:]:
    try:
        found = checkpoint_folder(f"hub:{name}") if sys.argv[1] == "download" else pinned(hub_id(name))
        print("FOUND", found)
    except CheckpointError as error:
        print("ERROR", error)
"""


def ask(url: str, cache: Path, how: str, *names: str, **more: str) -> list[str]:
    """What a process whose hub is at the URL answers to each name; its log lines are among them."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_ENDPOINT": url, "HF_HOME": str(cache)}
    environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"} | more
    done = subprocess.run(
        [sys.executable, "-c", ASK, how, *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(("FOUND", "ERROR", "shared.hub"))]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("clinic/tiny", ("clinic/tiny", None)),
        ("clinic/tiny-2.1@refs/pr/3", ("clinic/tiny-2.1", "refs/pr/3")),
        (f"clinic/tiny@{COMMIT}", ("clinic/tiny", COMMIT)),
        *(
            (path, None)
            for path in ("tiny", "/a/b", "./a", "../a", "~/a", "a/b/c", "a/..", "a/b/", "a/b@", "")
        ),
        *((path, None) for path in ("a/b@../c", "a--b/c", "a/b c", "-a/b", "a/b\n")),
    ],
)
def test_names(text: str, found: tuple[str, str | None] | None) -> None:
    assert hub_id(text) == found


def test_folders_of_a_cache_have_the_hubs_name(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    folder = tmp_path / "models--clinic--tiny" / "snapshots" / COMMIT
    shutil.copytree(checkpoint("llama"), folder)
    assert Checkpoint(folder).name == f"clinic/tiny@{COMMIT}"
    assert Checkpoint(checkpoint("llama")).name == checkpoint("llama").name
    assert id_of_snapshot(tmp_path / "snapshots" / COMMIT) is None


def test_a_folder_and_a_name_are_never_mistaken_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_download: None
) -> None:
    """A folder that is mistyped, or not mounted, is not replaced by what a stranger uploads."""
    monkeypatch.chdir(tmp_path)
    said = "there is no folder clinic/tiny here; a model of a hub is named hub:clinic/tiny"
    for given in ("clinic/tiny", Path("clinic/tiny")):
        with pytest.raises(CheckpointError, match=said):
            checkpoint_folder(given)
    source = profile_source(tmp_path, "local:hub:clinic/tiny@v1")
    assert source == "local:hub:clinic/tiny@v1"
    for place in ("local:clinic/tiny", "local:./clinic/tiny"):
        with pytest.raises(CheckpointError, match="not a checkpoint folder"):
            Checkpoint(profile_source(tmp_path, place).removeprefix("local:"))
    for name in ("hub:", "hub:tiny", "hub:/a/b", "hub:a/b/c", "hub:../b", "hub:a/b@"):
        with pytest.raises(CheckpointError, match="is no name at a hub: that is hub:ORGANISATION/NAME"):
            checkpoint_folder(name)
    (tmp_path / "clinic" / "tiny").mkdir(parents=True)
    assert checkpoint_folder("clinic/tiny") == Path("clinic/tiny")
    with pytest.raises(AssertionError, match="downloaded clinic/tiny"):
        checkpoint_folder("hub:clinic/tiny")


@pytest.fixture
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever downloads fails the test."""

    def downloaded(name: str, **_: object) -> None:
        raise AssertionError(f"downloaded {name}")

    monkeypatch.setattr("shared.hub._download", lambda wanted: downloaded(wanted.name))


def profile_source(folder: Path, url: str) -> str:
    (folder / "p.toml").write_text(f'provider = "wss://a"\n[[mask_sources]]\nurl = "{url}"\n')
    (source,) = read_profile(folder / "p.toml")["mask_sources"]
    return str(source)


def test_a_model_is_fetched_once_and_pinned(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    shutil.copytree(checkpoint("llama"), model)
    (model / "onnx").mkdir()
    for name in ("pytorch_model.bin", "onnx/model.safetensors", "consolidated.safetensors", "code.py"):
        (model / name).write_bytes(b"never read")
    with hub({"clinic/tiny": model}) as served:
        said, found = ask(served.url, cache, "download", "clinic/tiny")
        folder = Path(found.removeprefix("FOUND "))
        assert f"clinic/tiny is clinic/tiny@{COMMIT} today" in said
        assert folder.name == COMMIT
        assert {path.name for path in folder.iterdir()} == {
            *("config.json", "generation_config.json", "model.safetensors")
        }
        count = len(served.fetched)
        pinned = ask(served.url, cache, "download", f"clinic/tiny@{COMMIT}")
        assert pinned[-1] == found
        assert len(served.fetched) == count
        assert ask(served.url, cache, "pin", "clinic/tiny@main") == [f"FOUND clinic/tiny@{COMMIT}"]
    # From the cache, without a hub: in offline mode, or because there is nobody.
    offline = ask("http://127.0.0.1:1", cache, "download", f"clinic/tiny@{COMMIT}", HF_HUB_OFFLINE="1")
    assert offline[-1] == found
    assert ask("http://127.0.0.1:1", cache, "download", "clinic/tiny")[-1] == found


def test_every_failure_says_what_to_do(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    shutil.copy(checkpoint("llama") / "config.json", pickles)
    (pickles / "pytorch_model.bin").write_bytes(b"never read")
    models = {"clinic/tiny": checkpoint("llama"), "clinic/gated": checkpoint("llama"), "clinic/old": pickles}
    names = ("clinic/nothing", "clinic/tiny@v9", "clinic/gated", "clinic/old")
    with hub(models, gated={"clinic/gated"}) as served:
        nothing, revision, gated, old = ask(served.url, tmp_path / "cache", "download", *names)
        unpinned = ask(served.url, tmp_path / "cache", "pin", "clinic/nothing")
    assert "clinic/nothing is not a model of the hub that you may see" in nothing
    assert "the hub has clinic/tiny, but not the revision v9" in revision
    assert "clinic/gated is gated: accept its conditions" in gated
    assert "clinic/old has no weights in safetensors at the hub" in old
    assert "save_pretrained(FOLDER)" in old
    assert unpinned[0].startswith("ERROR clinic/nothing is not a model")
    (offline,) = ask(served.url, tmp_path / "cache", "download", "clinic/other", HF_HUB_OFFLINE="1")
    assert "unset HF_HUB_OFFLINE" in offline
    (nobody,) = ask(served.url, tmp_path / "cache", "download", "clinic/other")
    assert "the hub cannot be asked" in nobody
    taken = ask(served.url, tmp_path / "cache", "pin", "clinic/other@main")
    assert "the hub cannot be asked" in taken[0]
    assert taken[1] == "FOUND clinic/other@main"
