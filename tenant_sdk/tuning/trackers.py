"""Trackers, to which a training reports: each has a configuration of its own.

Some read files of the folder in which they run. Whoever wrote such a file, perhaps as a part of an archive,
chooses the server that gets the reports, and the user's key with them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)

from shared.errors import ConfigurationError, OptionReference, OptionText
from tenant_sdk.session.profiles import check_approved

_DVC = (".dvc/config", ".dvc/config.local")
# Of each tracker whose files are known: those of the working directory that it reads.
_FILES: dict[str, tuple[str, ...]] = {
    "wandb": ("wandb/settings", ".wandb/settings"),
    "comet_ml": (".comet.config", ".env", ".git/config"),  # by a library that runs its filters
    "swanlab": (
        *(
            ".env",
            "swanlab.yaml",
            "swanlab.yml",
            ".swanlab/config.yaml",
            ".swanlab/config.yml",
            ".swanlab/.netrc",
        ),
    ),
    "codecarbon": (".codecarbon.config",),
    "dvclive": _DVC,
    "dagshub": (*_DVC, ".git/config"),
    "clearml": (".hg/hgrc",),
    **dict.fromkeys(("azure_ml", "kubeflow", "mlflow", "neptune", "tensorboard", "trackio"), ()),
}
_IN_PARENTS = (*_DVC, ".git/config", ".hg/hgrc")  # which are looked for in the folders above, too
# Variables that name the server.
_SERVERS = {
    "wandb": "WANDB_BASE_URL",
    "comet_ml": "COMET_URL_OVERRIDE",
    "swanlab": "SWANLAB_API_HOST",
    "codecarbon": "CODECARBON_API_ENDPOINT",
    "dvclive": "DVC_STUDIO_URL",
    "mlflow": "MLFLOW_TRACKING_URI",
    "clearml": "CLEARML_API_HOST",
}


def check_reports(names: Sequence[str]) -> None:
    """Refuse what the Trainer cannot report to.

    Raises:
        ConfigurationError: it knows no such thing, or its package is not installed.
    """
    for name in names:
        argument = OptionReference("report_to", name)
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigurationError("{} must be one of {}", argument, ", ".join(INTEGRATION_TO_CALLBACK))
        # Before its package is imported, which looks for its files.
        check_trackers([name])
        keep_from_git([name])
        if name not in get_available_reporting_integrations():
            raise ConfigurationError(
                "{} needs its package, which is not installed: `pip install {}`", argument, name
            )


def check_trackers(names: Sequence[str]) -> None:
    """Refuse a tracker that would read a file which its user has not approved.

    Raises:
        ConfigurationError: there is one; or it is not known what the tracker reads.
    """
    for name in names:
        argument = OptionReference("report_to", name)
        if name not in _FILES:
            raise ConfigurationError(
                "{}: this tracker may read files in this folder, and their author could choose where reports "
                "go; choose from {}",
                *(argument, ", ".join(_FILES)),
            )
        for file in _existing_files(name):
            check_approved(
                file,
                f"{name} reads it, and it can choose the server that gets the reports and your key",
                OptionText("leave out {}", argument),
            )


def keep_from_git(names: Sequence[str]) -> None:
    """Have trackers find no repository: git and Mercurial run programs that its configuration names.

    A ``GIT_DIR`` that the user has set stays. Trackers whose file is approved may read it.
    """
    if any(".git/config" not in _FILES[name] for name in set(names) - {"tensorboard"}):
        os.environ.setdefault("GIT_DIR", os.devnull)
        os.environ.setdefault("HGRCSKIPREPO", "1")


def where_reports_go(names: Sequence[str]) -> Iterator[str]:
    """A line for each tracker."""
    for name in names:
        variable = _SERVERS.get(name, "")
        said = [f"{variable}={os.environ[variable]}"] if os.environ.get(variable) else []
        said += [f"{file} (approved)" for file in _existing_files(name)]
        where = (
            f"{' and '.join(said)} says" if said else f"{name} is configured to, by nothing in this folder"
        )
        yield f"{name} reports to where {where}"


def _existing_files(name: str) -> Iterator[Path]:
    """The files that a tracker would read, relative to the working directory."""
    here = Path.cwd()
    for file in _FILES[name]:
        folders = (here, *here.parents) if file in _IN_PARENTS else (here,)
        for folder in folders:
            if file == ".git/config" and (folder / ".git").is_file():  # says where the repository is
                yield Path(os.path.relpath(folder / ".git", here))
            elif os.path.lexists(folder / file):
                yield Path(os.path.relpath(folder / file, here))
