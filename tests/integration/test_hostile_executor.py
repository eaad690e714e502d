"""What an executor that lies, or that runs other versions, may not do to a tenant."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from conftest import Executor, make_model

import tenant_sdk
from provider.executor.base import BaseExecutor
from shared.errors import CheckpointError, RequestRefused, WireError, peer_text
from shared.wire.header import Direction
from shared.wire.messages import FileInfo
from shared.wire.protocol import validate_manifest
from tenant_sdk.connection.handshake import client_context, open_tcp
from tenant_sdk.connection.urls import split_url


@pytest.fixture
def altered(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Callable[..., Path]:
    """A copy of the tiny Llama whose config.json says other things: ``altered(num_attention_heads=0)``."""

    def alter(**changes: Any) -> Path:
        folder = tmp_path / "altered"
        shutil.copytree(checkpoint("llama"), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return folder

    return alter


def test_a_configuration_cannot_choose_code_or_kernels(
    serve: Callable[..., Executor], altered: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = altered(
        attn_implementation="kernels-community/flash-attn3", auto_map={"AutoModelForCausalLM": "evil.Model"}
    )
    with serve(folder).connect() as session:
        said = json.loads((folder / "config.json").read_text())
        said["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}  # not served
        file = session.executor.file

        def hostile(info: FileInfo) -> bytes:
            return json.dumps(said).encode() if info.name == "config.json" else file(info)

        monkeypatch.setattr(session.executor, "file", hostile)
        model = session.load_model(progress=False)
        assert type(model) is transformers.LlamaForCausalLM
        assert model.config._attn_implementation == "sdpa"
        assert not hasattr(model.config, "auto_map")
        with pytest.raises(tenant_sdk.ConfigurationError, match="never run"):
            session.load_model(trust_remote_code=True, progress=False)


@pytest.mark.parametrize(
    "architecture", ["AutoModel", "PreTrainedModel", "BertModel", "pipeline", "os", "__doc__"]
)
def test_an_architecture_must_be_a_model_class_of_the_configuration(
    architecture: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    with serve(checkpoint("llama")).connect() as session:
        session.executor.manifest = msgspec.structs.replace(session.manifest, architecture=architecture)
        with pytest.raises(tenant_sdk.ModelMismatch, match="no model class"):
            session.load_model(progress=False)


def test_an_unknown_model_type_names_the_version(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(checkpoint("llama")).connect() as session:
        monkeypatch.setattr(session.executor, "file", lambda info: b'{"model_type": "of-tomorrow"}')
        with pytest.raises(tenant_sdk.ModelMismatch, match="install the version that the provider runs"):
            session.load_model(progress=False)


def test_missing_blocks_are_never_filled_with_noise(
    llama: Executor, altered: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointError, match="fewer blocks"):
        BaseExecutor(altered(num_hidden_layers=3), numerics="float32")
    with llama.connect() as session:
        kept = tuple(p for p in session.manifest.parameters if "layers.1.input" not in p.name)
        session.executor.manifest = msgspec.structs.replace(session.manifest, parameters=kept)
        with pytest.raises(tenant_sdk.ModelMismatch, match=r"layers\.1\.input_layernorm"):
            session.load_model(progress=False)
        kept = tuple(p for p in session.manifest.parameters if "lm_head" not in p.name)
        session.executor.manifest = msgspec.structs.replace(session.manifest, parameters=kept)
        with pytest.raises(tenant_sdk.ModelMismatch):
            session.load_model(progress=False)


@pytest.mark.parametrize("changes", [{"num_attention_heads": 0}, {"hidden_size": "x"}, {"hidden_act": "zzz"}])
def test_a_configuration_that_makes_no_sense_is_a_checkpoint_error(
    changes: dict[str, Any], altered: Callable[..., Path]
) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json cannot be used"):
        BaseExecutor(altered(**changes), numerics="float32")


def test_another_class_than_the_models_is_a_mismatch(llama: Executor) -> None:
    with llama.connect() as session, pytest.raises(tenant_sdk.ModelMismatch):
        session.load_model(model_class=transformers.BertModel, progress=False)


def test_excluding_a_layer_that_is_not_there_is_noticed(llama: Executor) -> None:
    model = make_model("llama")
    with llama.connect() as session:
        with pytest.raises(tenant_sdk.ConfigurationError, match="q_prooj"):
            session.attach(model, exclude=["q_prooj"])
        with pytest.raises(tenant_sdk.ConfigurationError, match="fits no served layer"):
            session.attach(model, exclude=["proj"])  # half a name


@pytest.mark.parametrize("url", ["wss://[::1", "wss://host:99999", "http://host", "wss://", "ws://host"])
def test_urls_that_make_no_sense_are_configuration_errors(url: str) -> None:
    with pytest.raises(tenant_sdk.ConfigurationError):
        split_url(url)


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example"])
def test_names_that_cannot_be_are_connect_errors(host: str) -> None:
    with pytest.raises(tenant_sdk.ConnectError, match="cannot resolve"):
        open_tcp(host, 1, 1.0)


def test_the_right_certificate_file_is_blamed(tls_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(tenant_sdk.ConfigurationError, match=r"none\.pem"):
        client_context(tls_dir / "ca.pem", (tmp_path / "none.pem", tmp_path / "none.key"))
    with pytest.raises(tenant_sdk.ConfigurationError, match=r"authority.*none\.pem"):
        client_context(tmp_path / "none.pem")


def test_errors_keep_their_fields_when_pickled() -> None:
    fatal = pickle.loads(pickle.dumps(WireError("frame", "x", fatal=True)))
    assert (fatal.code, fatal.message, fatal.fatal) == ("frame", "x", True)
    refused = pickle.loads(pickle.dumps(RequestRefused("overloaded", "y", retry_after=2.0)))
    assert (refused.code, refused.retry_after) == ("overloaded", 2.0)


def test_options_that_cannot_be_are_refused(llama: Executor) -> None:
    for options in ({"timeout": 0}, {"mask_sources": "local:x", "privacy": "noise-bank"}):
        with pytest.raises(tenant_sdk.ConfigurationError):
            llama.connect(**options)


def test_stats_count_the_mask_source_too(
    llama: Executor, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    other = serve(checkpoint("llama"))
    with llama.connect(privacy="noise-bank", mask_sources=[other.url]) as session:
        session.load_model(progress=False)(input_ids=torch.arange(6).view(1, 6))
        assert session.stats.effect_requests == len(session.manifest.groups)


def test_the_head_stays_with_the_tenant_whatever_the_manifest_says(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    with serve(checkpoint("llama"), serve_head=True).connect() as session:
        for group in session.groups:
            group.info = msgspec.structs.replace(group.info, head=False)
        with pytest.raises(
            tenant_sdk.ModelMismatch, match="lm_head is no output head, and here it is the output head"
        ):
            session.load_model(progress=False)


def test_what_a_peer_writes_is_fit_for_a_terminal() -> None:
    assert peer_text("\x1b]0;owned\x07" + "a" * 1000) == "?]0;owned?" + "a" * 490


def test_errors_of_a_broken_session_are_raised_afresh(llama: Executor) -> None:
    session = llama.connect()
    session.close()
    caught = []
    for _ in range(2):
        with pytest.raises(tenant_sdk.ConnectionLost) as info:
            session.executor.connection.last_channel.ping()
        caught.append(info.value)
    # One object raised again and again would keep every caller's tensors alive.
    assert caught[0] is not caught[1]


def test_a_configuration_that_makes_rows_of_another_width(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """As with architectures whose attention is not as wide as its output projection says."""
    with serve(checkpoint("llama")).connect() as session:
        group = session.groups[0]
        for width in (1, group.info.inputs - 1, group.info.inputs + 1, 10 * group.info.inputs):
            with pytest.raises(tenant_sdk.ModelMismatch, match="does not fit the weights"):
                group.product(Direction.FORWARD, 1, [torch.ones(3, width)])
        assert session.stats.requests == 0
        with pytest.raises(tenant_sdk.ModelMismatch, match="does not fit the weights"):
            group.product(Direction.BACKWARD, 1, [torch.ones(3, group.info.members[0].outputs + 1)])


def test_a_layer_cannot_be_passed_off_as_its_transpose(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """Of a square weight neither shape nor digest would show it."""
    with serve(checkpoint("llama")).connect() as session:
        for group in session.groups:
            members = tuple(msgspec.structs.replace(m, transposed=True) for m in group.info.members)
            group.info = msgspec.structs.replace(group.info, members=members)
        with pytest.raises(tenant_sdk.ModelMismatch, match="another kind of layer"):
            session.load_model(progress=False)


def test_a_layer_is_named_once(llama: Executor) -> None:
    with llama.connect() as session:
        manifest = session.manifest
    twice = msgspec.structs.replace(manifest, groups=(*manifest.groups, manifest.groups[0]))
    with pytest.raises(WireError, match="names a layer twice"):
        validate_manifest(twice)
