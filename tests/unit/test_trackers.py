"""Trackers read files of the working directory: none that its user has not approved."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from shared.errors import ConfigurationError
from tenant_sdk.session.profiles import approve
from tenant_sdk.tuning.trackers import check_reports, check_trackers, keep_from_git, where_reports_go


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, below another folder."""
    folder = tmp_path / "above" / "here"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    return folder


@pytest.mark.parametrize(
    ("tracker", "name"),
    [
        ("wandb", "wandb/settings"),
        ("wandb", ".wandb/settings"),
        ("comet_ml", ".comet.config"),
        ("comet_ml", ".env"),
        ("swanlab", "swanlab.yaml"),
        ("swanlab", ".swanlab/.netrc"),
        ("codecarbon", ".codecarbon.config"),
        ("dvclive", "../.dvc/config"),
        ("dagshub", "../.git/config"),
        ("comet_ml", "../.git/config"),
        ("comet_ml", ".git"),
        ("clearml", "../.hg/hgrc"),
    ],
)
def test_a_file_that_nobody_has_named_is_refused_until_it_is_approved(
    tracker: str, name: str, here: Path
) -> None:
    check_trackers([tracker])
    file = here / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("[default]\nbase_url = http://127.0.0.1:9911\n")
    with pytest.raises(ConfigurationError, match=r"was not approved by you.*your key.*leave out report_to="):
        check_trackers(["tensorboard", tracker])
    with pytest.raises(ConfigurationError, match="was not approved by you"):
        check_reports([tracker])  # whether it is installed or not
    approve(Path(name))
    check_trackers([tracker])
    assert f"{name} (approved)" in next(where_reports_go([tracker]))
    file.write_text("[default]\nbase_url = http://127.0.0.1:9912\n")
    with pytest.raises(ConfigurationError, match="has changed since you approved it"):
        check_trackers([tracker])
    check_trackers(["tensorboard"])


def test_a_link_to_an_approved_file_is_another_file(here: Path, tmp_path: Path) -> None:
    settings = tmp_path / "own" / "settings"
    settings.parent.mkdir()
    settings.write_text("")
    approve(settings)
    (here / "wandb").symlink_to(settings.parent)
    with pytest.raises(ConfigurationError, match=r"wandb/settings is a link to \S+/own/settings"):
        check_trackers(["wandb"])


def test_a_tracker_of_which_nothing_is_known(here: Path) -> None:
    with pytest.raises(ConfigurationError, match="may read files in this folder"):
        check_trackers(["paper"])
    for name in INTEGRATION_TO_CALLBACK.keys() - {"flyte"}:
        check_trackers([name])
    assert not list(here.iterdir())


def test_where_reports_go(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert here.is_dir()
    monkeypatch.setenv("WANDB_BASE_URL", "https://reports.example")
    (line,) = where_reports_go(["wandb"])
    assert line == "wandb reports to where WANDB_BASE_URL=https://reports.example says"
    (line,) = where_reports_go(["tensorboard"])
    assert "by nothing in this folder" in line


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "dagshub", "tensorboard"])
def test_git_runs_no_program_of_this_folder(
    tracker: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trackers call it for the state of the code; what a diff is made with, its configuration says."""
    ours = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "HGRCSKIPREPO")}
    monkeypatch.setattr(os, "environ", ours)
    git = ["git", "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init", "-q"], check=True, env=ours)
    subprocess.run([*git, "config", "diff.external", f"touch {here}/ran; true"], check=True, env=ours)
    subprocess.run([*git, "config", "core.fsmonitor", f"touch {here}/ran; true"], check=True, env=ours)
    keep_from_git([tracker])
    subprocess.run(["git", "diff", "HEAD"], env=os.environ, check=False, capture_output=True)
    subprocess.run(["git", "status"], env=os.environ, check=False, capture_output=True)
    assert (here / "ran").exists() == (tracker in ("dagshub", "tensorboard"))
