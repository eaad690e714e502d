"""The checkpoints of a training run, from which it goes on after a crash."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.atomic import write_atomically
from shared.encoded import read_within
from shared.errors import ConfigurationError, OptionText
from shared.ownership import check_tree
from tenant_sdk.storage import disk_errors

log = logging.getLogger(__name__)
_PREFIX = "checkpoint-"  # of the Trainer's folders, before the step
_LARGEST_STATE = 256 << 20  # the Trainer's, with the losses of a million steps


class TrainingCheckpoints:
    """The folder beside an output where a training leaves what it needs to go on after a crash.

    Args:
        output: of the training; the folder is its sibling ``NAME.checkpoints``.
        settings: what must be the same when a training is resumed.
        parts: patterns of the names of other files that are kept for a resumed training.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any], *, parts: Sequence[str] = ()) -> None:
        self.folder = output.with_name(output.name + ".checkpoints")
        self._settings_file = self.folder / "settings.json"
        self._settings, self._parts = dict(settings), parts
        self._resumed = False
        self._lock: int | None = None

    def check(self, *, resume: bool) -> None:
        """Whether a training can begin, or go on, so far as that shows without its settings.

        Raises:
            ConfigurationError: an interrupted training would be overwritten, or there is none to resume; or
                the folder is not this user's alone.
        """
        check_tree(self.folder)
        if self.folder.is_dir():
            os.close(self._locked())
        if not resume and (self._whole() or any(any(self.folder.glob(part)) for part in self._parts)):
            raise ConfigurationError(
                "{} holds an interrupted training; go on with {resume}, or remove it first",
                str(self.folder),
                resume=True,
            )
        if resume and not self._settings_file.is_file():
            raise ConfigurationError(
                "there is nothing to resume: no {}; leave out {resume}", str(self._settings_file)
            )

    def _locked(self) -> int:
        """A descriptor that keeps other trainings out of the folder until it is closed."""
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ConfigurationError(
                "another training is in progress with {}; wait until it ends, or choose another {output}",
                str(self.folder),
            ) from None
        except OSError as error:  # some file systems of clusters have no locks, and trainings run there too
            log.info("%s cannot be locked: %s", self.folder, error.strerror)
        return descriptor

    def kept(self, name: str) -> Any:
        """A setting of the interrupted training; None: there is none."""
        return (_read_json(self._settings_file) or {}).get(name)

    def keep(self, name: str, value: Any) -> None:
        """Note a figure that a resumed training need not measure again."""
        settings = {**(_read_json(self._settings_file) or {}), name: value}
        with disk_errors(self.folder, "a figure", "Then run again."):
            self._write(settings)

    def _write(self, settings: Mapping[str, Any]) -> None:
        write_atomically(self._settings_file, json.dumps(settings, indent=1).encode())

    def begin(self, *, resume: bool) -> Path | None:
        """Make the folder, or look into the one of an interrupted training; in the block of ``resumable``.

        Until that block ends, no other training can begin with this folder.

        Returns:
            The checkpoint to resume from; None to start at the beginning.

        Raises:
            ConfigurationError: an interrupted training would be overwritten, or there is none to
                resume, or it had other settings, or another training is in progress.
        """
        self.check(resume=resume)
        self._resumed = resume
        with disk_errors(self.folder, "checkpoints", "Then run again."):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            check_tree(self.folder)  # somebody else may have made it just now
            self._lock = self._locked()
        if not resume:
            with disk_errors(self.folder, "checkpoints", "Then run again."):
                self._write(self._settings)
            return None
        before = _read_json(self._settings_file)
        if before is None:
            raise ConfigurationError(
                "{} cannot be read; remove {} and leave out {resume}",
                *(str(self._settings_file), str(self.folder)),
            )
        other = [name for name, value in self._settings.items() if before.get(name) != value]
        if other:
            changes = (f"{name} was {before.get(name)}, now {self._settings[name]}" for name in other)
            counted = "; steps follow from {epochs}, {batch_size} and the data" if "steps" in other else ""
            raise ConfigurationError(
                "{resume} needs the options of the interrupted training; these differ: {}" + counted,
                ", ".join(changes),
                resume=True,
            )
        return self._newest()

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Let others have the folder after the block, and note with an error how the training can go on.

        Not with an error that a file or an option is to blame for: it would end the same command again.
        """
        try:
            yield
        except ConfigurationError:
            raise
        except BaseException as error:
            if newest := self._newest():
                how = OptionText("run the same training again")
                if not self._resumed:
                    how = OptionText("run the same training with {resume}", resume=True)
                what = "step {} is kept in {}; to go on from it, {}"
                error.add_note(OptionText(what, step_of(newest), str(self.folder), how))
            raise
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _newest(self) -> Path | None:
        return max(self._whole(), key=step_of, default=None)

    def _whole(self) -> list[Path]:
        """The checkpoints that are complete: the Trainer writes its state last."""
        folders = [path for path in self.folder.glob(f"{_PREFIX}*") if is_checkpoint(path)]
        states = [(path, _read_json(path / "trainer_state.json") or {}) for path in folders]
        return [path for path, state in states if state.get("global_step") == step_of(path)]

    def remove(self) -> None:
        """The training is complete: its checkpoints are of no more use."""
        shutil.rmtree(self.folder, ignore_errors=True)


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has the name of one of the Trainer's checkpoints."""
    return re.fullmatch(rf"{_PREFIX}[0-9]+", folder.name) is not None


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def checkpoint_after(folder: Path, step: int) -> Path:
    """Where the Trainer writes the checkpoint of a step."""
    return folder / f"{_PREFIX}{step}"


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(read_within(path, _LARGEST_STATE))
    except (ConfigurationError, OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
