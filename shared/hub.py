"""Models by the names that a hub has for them: ``hub:organisation/name``, or with ``@revision``.

A name without ``hub:`` in front is a folder, so that a folder that is not there is no download. Only weights
in safetensors and text files are fetched, once, into the cache of huggingface_hub, which also reads
``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and who is logged in.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from shared.errors import CheckpointError
from shared.gguf import folder_of, is_gguf

log = logging.getLogger(__name__)

HUB = "hub:"  # in front of a name that is looked up at a hub
# A part never looks like a path: it begins with a letter or digit, and what is absolute has three parts.
_PART = r"[A-Za-z0-9](?:\w|-(?!-)|\.(?!\.)){0,95}"
_ID = re.compile(rf"({_PART}/{_PART})(?:@({_PART}(?:/{_PART}){{0,3}}))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt"]
# Folders hold other formats; some repositories hold their weights twice, or an adapter beside the model.
_UNWANTED = ["*/*", "consolidated*", "adapter_*"]


class HubId(NamedTuple):
    """A model of a hub; ``revision`` None: the newest."""

    name: str
    revision: str | None = None

    def __str__(self) -> str:
        return f"{self.name}@{self.revision}" if self.revision else self.name

    @property
    def commit(self) -> str | None:
        """The revision, if it is one that cannot change."""
        return self.revision if _COMMIT.fullmatch(self.revision or "") else None


def hub_id(text: str | Path) -> HubId | None:
    """What a text without ``hub:`` names at a hub, if it could be a name there; nothing is asked."""
    match = _ID.fullmatch(str(text))
    return HubId(*match.groups()) if match else None


def id_of_snapshot(folder: str | Path) -> HubId | None:
    """The model and commit of a folder in a hub's cache, None of any other."""
    snapshot = Path(folder).absolute()
    if snapshot.parent.name != "snapshots" or not _COMMIT.fullmatch(snapshot.name):
        return None
    name = snapshot.parents[1].name.removeprefix("models--").replace("--", "/", 1)
    return hub_id(f"{name}@{snapshot.name}")


def lies_within(folder: Path, path: Path) -> bool:
    """Whether a file lies in a folder, links followed; of a hub's snapshot, also among that hub's files."""
    try:
        folder, path = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):  # a link that leads to itself; the latter before Python 3.13
        return False
    blobs = folder.parents[1] / "blobs" if id_of_snapshot(folder) else folder
    return path.is_relative_to(folder) or path.is_relative_to(blobs)


def own_file(folder: Path, name: str) -> Path:
    """Where a file of a checkpoint lies, without links, which may have come with an archive.

    Raises:
        CheckpointError: it lies elsewhere. What a provider reads, its tenants can read.
    """
    try:
        path = (folder / name).resolve()
    except (OSError, RuntimeError) as error:  # the latter before Python 3.13
        raise CheckpointError(f"{folder / name} is a link that leads to itself") from error
    if not lies_within(folder, path):
        raise CheckpointError(
            f"{folder / name} is a link to {path}, which is not in that folder, and tenants would get what "
            "is there. If that is what you want, put a copy into the folder"
        )
    return path


def parse_hub_name(name: str | Path) -> HubId | None:
    """The model of a hub that a user names, or None: it is a folder. Nothing is asked.

    Raises:
        CheckpointError: it is no name at a hub; or it would be one with ``hub:``, and is no folder.
    """
    text = str(name)
    if text.startswith(HUB):
        if wanted := hub_id(text.removeprefix(HUB)):
            return wanted
        raise CheckpointError(
            f"{text!r} is no name at a hub: that is {HUB}ORGANISATION/NAME, or with @REVISION"
        )
    if hub_id(text) and not Path(text).exists():
        raise CheckpointError(f"there is no folder {text} here; a model of a hub is named {HUB}{text}")
    return None


def checkpoint_folder(name: str | Path) -> Path:
    """The folder of a checkpoint that is given as one, as a model of a hub or as a GGUF file.

    A model of a hub is downloaded once, and a file is made into a folder once.

    Raises:
        CheckpointError: see ``parse_hub_name`` and ``shared.gguf.folder_of``; the hub has no such model, or
            none that can be used, or cannot be asked.
    """
    wanted = parse_hub_name(name)
    if wanted is None:
        return folder_of(Path(name)) if is_gguf(Path(name)) else Path(name)
    folder = _download(wanted)
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{wanted} has no weights in safetensors at the hub, and other formats (pickle .bin files) are "
            f"never read. Name a revision that has them ({HUB}NAME@REVISION), or convert it where you trust "
            "it: `AutoModelForCausalLM.from_pretrained(NAME).save_pretrained(FOLDER)`, and give FOLDER"
        )
    found = HubId(wanted.name, folder.name)
    if wanted.commit:
        log.info("%s is in %s", found, folder)
    else:
        log.warning("%s is %s today, in %s; name it so to get the same again", wanted, found, folder)
    return folder


def pinned(wanted: HubId) -> HubId:
    """With the commit that it is today; as it is, if the hub cannot be asked. Nothing is downloaded.

    Raises:
        CheckpointError: the hub can be asked, and has no such model or revision.
    """
    from huggingface_hub import HfApi, errors

    if wanted.commit:
        return wanted
    try:
        with _explained(wanted):
            return HubId(wanted.name, HfApi().model_info(wanted.name, revision=wanted.revision).sha)
    except CheckpointError as error:
        if isinstance(error.__cause__, (errors.RepositoryNotFoundError, errors.RevisionNotFoundError)):
            raise
        reason = _first_line(error.__cause__)
        log.warning("%s is taken as it is, the hub cannot be asked: %s", wanted, reason)
        return wanted


def _download(wanted: HubId) -> Path:
    """The folder of a snapshot in the cache, whose name is its commit."""
    from huggingface_hub import snapshot_download

    with _explained(wanted):
        folder: str = snapshot_download(
            wanted.name, revision=wanted.revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    return Path(folder)


@contextmanager
def _explained(wanted: HubId) -> Iterator[None]:
    """Turn what huggingface_hub raises into a CheckpointError that says what to do."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"{wanted.name} is gated: accept its conditions on its page at the hub, log in with `hf auth "
            "login` or set HF_TOKEN, and run again; or give a folder that holds it"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{wanted.name} is not a model of the hub that you may see: look at the "
            "spelling; if it is private, log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(
            f"the hub has {wanted.name}, but not the revision {wanted.revision}: give a branch, a tag or a "
            "commit that its page lists"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{wanted} is not (or not whole) in the cache, and the hub cannot be asked: "
            f"{_first_line(error.__cause__ or error)}. Connect to the network, unset HF_HUB_OFFLINE if it is "
            "set, or give a folder that holds the checkpoint"
        ) from error
    except Exception as error:  # of whichever HTTP library, or of the disk
        raise CheckpointError(
            f"{wanted} cannot be downloaded: {_first_line(error)}. Try again later, or give a folder that "
            "holds the checkpoint"
        ) from error


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
