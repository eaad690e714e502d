"""What a provider refuses before it imports or loads anything."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import BASE_MODEL, finish, start
from safetensors.numpy import save_file

from provider.config import ServeConfig
from provider.serve.preflight import check_inputs, check_outputs, remove_ready_file
from provider.serve.tokens import TokenFile
from shared.errors import CheckpointError, ConfigurationError

NOW = datetime.datetime.now(datetime.UTC)


def config(folder: Path, **options: Any) -> ServeConfig:
    return ServeConfig(
        **{"model_dir": BASE_MODEL, "tls_dir": folder, "token_file": folder / "tokens.json"} | options
    )


def test_an_expired_certificate_is_not_served(tmp_path: Path, tls_dir: Path) -> None:
    TokenFile(tmp_path / "tokens.json").add("alice")
    check_inputs(config(tmp_path, tls_dir=tls_dir), NOW)
    with pytest.raises(ConfigurationError, match=r"the certificate for localhost.* expired at"):
        check_inputs(config(tmp_path, tls_dir=tls_dir), NOW + datetime.timedelta(days=91))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="never read; convert with"):
        check_inputs(config(tmp_path, model_dir=tmp_path), NOW)


def test_a_checkpoint_that_was_quantised_otherwise(tmp_path: Path) -> None:
    """Its tensors decide: what made them dense may have left the configuration as it was."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "hqq"}}')
    dev = ServeConfig(model_dir=folder, dev=True, dev_dir=tmp_path / "dev")
    save_file({"a": np.zeros(2, np.float16)}, folder / "model.safetensors")
    check_inputs(dev, NOW)
    save_file({"a": np.zeros(2, np.float16), "b": np.zeros(2, np.uint8)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="was quantised by hqq, which is not served"):
        check_inputs(dev, NOW)


def test_an_admin_port_in_use(tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigurationError, match=f"cannot listen on .*:{port}.*another admin_port=NUMBER"
        ):
            check_outputs(config(tmp_path, admin_port=port), NOW)
    check_outputs(config(tmp_path, admin_port=port), NOW)


@pytest.mark.parametrize(
    ("name", "path", "wrong"),
    [
        ("ready_file", "none/ready", "none does not exist"),
        ("ready_file", "file/ready", "file is not a folder"),
        ("ready_file", "folder", "cannot remove the ready file"),
        ("usage_file", "none/usage.csv", "none does not exist"),
        ("usage_file", "folder", "folder cannot be written"),
        ("transcript", "file", "file is not a folder"),
        ("transcript", "file/deeper/still", "file is not a folder"),
    ],
)
def test_files_that_cannot_be_written(tmp_path: Path, name: str, path: str, wrong: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigurationError, match=wrong):
        check_outputs(config(tmp_path, **{name: tmp_path / path}), NOW)


@pytest.mark.parametrize("name", ["ready_file", "usage_file", "transcript"])
def test_folders_that_are_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigurationError, match=f"{tmp_path} is not writable by this user"):
        check_outputs(config(tmp_path, **{name: tmp_path / "out"}), NOW)


def test_files_that_can_be_written_are_not_made_yet(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    names = {"ready_file": "ready", "usage_file": "usage-%Y", "transcript": "a/b"}
    check_outputs(config(tmp_path, **{name: tmp_path / "out" / at for name, at in names.items()}), NOW)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_ready_file_of_another_is_left_alone(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    ready.write_text(json.dumps({"pid": os.getpid() + 1}))
    remove_ready_file(ready, os.getpid())
    assert ready.exists()
    ready.write_text(json.dumps({"pid": os.getpid()}))
    remove_ready_file(ready, os.getpid())
    remove_ready_file(ready, os.getpid())
    assert not ready.exists()
    ready.write_text("of another program")
    remove_ready_file(ready, os.getpid())
    assert ready.exists()
    check_outputs(config(tmp_path, ready_file=ready), NOW)
    assert not ready.exists()


def test_all_of_it_comes_before_torch(tmp_path: Path, tls_dir: Path) -> None:
    """And an old ready file is gone, though nothing was served."""
    TokenFile(tmp_path / "tokens.json").add("alice")
    (tmp_path / "ready").write_text("{}")
    serve = ("serve", BASE_MODEL, "--tls-dir", tls_dir, "--token-file", tmp_path / "tokens.json", "--port", 0)
    status, _, said = finish(
        start(
            "provider.cli", *serve, "--ready-file", tmp_path / "ready", "--usage-file", tmp_path / "a" / "u"
        )
    )
    assert status == 78
    assert "error: --usage-file" in said
    assert "loading" not in said
    assert not (tmp_path / "ready").exists()
