"""Faults that are found before slow imports, and before weights are loaded."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

from provider.config import ServeConfig
from provider.serve.certificates import certificate_of, check_dates, own_certificate
from provider.serve.listening import bound
from provider.serve.tokens import TokenFile
from provider.workers.actors import check_ray
from shared.command_line import check_model_folder
from shared.configuration import check_quantisation
from shared.errors import ConfigurationError, OptionReference
from shared.gguf import check_gguf, is_gguf
from shared.hub import own_file, parse_hub_name


def check_inputs(config: ServeConfig, now: datetime.datetime) -> None:
    """Refuse a checkpoint, certificate or token file that cannot be used, and a launcher that is not here.

    Raises:
        ConfigurationError: which, and what to do.
    """
    if config.launcher == "ray":
        check_ray()
    if is_gguf(config.model_dir):
        check_gguf(config.model_dir)
    elif parse_hub_name(config.model_dir) is None:
        check_model_folder(config.model_dir)
        for file in ("config.json", *(path.name for path in config.model_dir.glob("model*.safetensors*"))):
            own_file(config.model_dir, file)
        check_quantisation(config.model_dir)
    if not config.dev:
        own_certificate(config.certificates, config.client_ca)
        check_dates(certificate_of(config.certificates), now)
        TokenFile(config.tokens).check_readable()


def check_outputs(config: ServeConfig, now: datetime.datetime) -> None:
    """Refuse an admin port that is taken, or a file that cannot be written; remove an old ready file.

    Raises:
        ConfigurationError: which, and why.
    """
    if config.admin_port:
        bound(config.admin_host, config.admin_port, "admin_port").close()
    if config.ready_file is not None:
        _check_folder("ready_file", config.ready_file, config.ready_file.parent)
        remove_ready_file(config.ready_file)
    if config.usage_file is not None:
        file = Path(now.strftime(str(config.usage_file)))
        _check_folder("usage_file", config.usage_file, file.parent)
        if file.exists() and not (file.is_file() and os.access(file, os.R_OK | os.W_OK)):
            raise ConfigurationError(
                "{usage_file}: {} cannot be written", str(file), usage_file=config.usage_file
            )
    if config.transcript is not None:
        folder = config.transcript
        while not folder.exists() and folder != folder.parent:  # what is missing is made
            folder = folder.parent
        _check_folder("transcript", config.transcript, folder)


def _check_folder(name: str, path: Path, folder: Path) -> None:
    if not folder.is_dir():
        reason = "is not a folder" if folder.exists() else "does not exist"
    elif not os.access(folder, os.W_OK | os.X_OK):
        reason = "is not writable by this user"
    else:
        return
    raise ConfigurationError("{} cannot be used: {} {}", OptionReference(name, path), str(folder), reason)


def remove_ready_file(ready_file: Path, pid: int | None = None) -> None:
    """Remove a ready file, so that nobody takes it for this process's.

    Args:
        pid: remove only this process's file; another executor may have written its own since.

    Raises:
        ConfigurationError: the file cannot be removed.
    """
    try:
        if pid is None or json.loads(ready_file.read_bytes())["pid"] == pid:
            ready_file.unlink(missing_ok=True)
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError):
        pass  # nobody's that this program wrote
    except OSError as error:
        raise ConfigurationError(f"cannot remove the ready file {ready_file}: {error.strerror}") from error


def check_world(config: ServeConfig) -> None:
    """Refuse what does not go together with workers that others start.

    Raises:
        ConfigurationError: such an option was given.
    """
    for name in ("workers", "devices", "dev"):
        if getattr(config, name):
            raise ConfigurationError(
                "{} does not go with torchrun, which starts a worker for each of its processes; leave it "
                "out, or start with python",
                OptionReference(name, getattr(config, name)),
            )
