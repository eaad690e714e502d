"""What an adversary found around the allow-lists and the attested lists."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import RING, Executor
from hostile_files import changed, config_of
from safetensors.torch import load_file

from provider.executor.base import BaseExecutor
from shared.checkpoint import Checkpoint
from shared.errors import ModelMismatch, RequestRefused, SymbiosisError, WireError
from shared.stored import bytes_of, parameter_hash
from tenant_sdk.command_line.checks import CheckResult
from tenant_sdk.model.configuration import model_configuration
from tenant_sdk.model.tokenizer import build_tokenizer
from tenant_sdk.products.fingerprints import write_fingerprints
from tenant_sdk.trust.attestation import CheckpointContents, check_agreement
from tenant_sdk.trust.operators import own_authorities

pytest_plugins = ("hostile_fixtures",)

# -- what is attested ------------------------------------------------------------------------------


def test_the_same_bytes_of_another_type_are_another_parameter(
    checkpoint: Callable[[str], Path],
) -> None:
    """Otherwise a provider calls bfloat16 float16, or gives a matrix another shape, under the same hash."""
    trusted = CheckpointContents.of(Checkpoint(checkpoint("llama")))
    manifest = BaseExecutor(checkpoint("llama"), numerics="float32").manifest
    tensors = load_file(checkpoint("llama") / "model.safetensors")
    name = "model.norm.weight"
    for number, other in enumerate((tensors[name].view(torch.int32), tensors[name].view(1, -1))):
        hashed = parameter_hash(str(other.dtype).removeprefix("torch."), other.shape)
        hashed.update(bytes_of(other))
        info = next(each for each in manifest.parameters if each.name == name)
        lie = msgspec.structs.replace(info, sha256=hashed.hexdigest())
        parameters = tuple(lie if each is info else each for each in manifest.parameters)
        with pytest.raises(ModelMismatch, match=r"parameter model\.norm\.weight"):
            trusted.check(msgspec.structs.replace(manifest, parameters=parameters), f"copy {number}")


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_a_manifest_that_gives_a_parameter_another_form(
    what: str, hostile: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """It is noticed at the latest when the parameter is there."""
    with hostile({}).connect() as session:
        remote = session.executor
        info = next(each for each in remote.manifest.parameters if each.name == "lm_head.weight")
        other = {"dtype": "int32"} if what == "dtype" else {"shape": info.shape[::-1]}
        with pytest.raises(WireError):
            list(remote.parameter(msgspec.structs.replace(info, **other)))


def test_fingerprints_attest_also_where_nothing_is_verified(
    hostile: Callable[..., Executor], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The provider says what it computes in; that must not decide whether its files are looked at."""
    key = write_fingerprints(checkpoint("llama"), tmp_path / "prints", numerics=RING)
    options = {"fingerprints": tmp_path / "prints", "fingerprint_key": key, "verify": "off"}
    for numerics in (RING, "float32"):
        executor = hostile({"tokenizer_config.json": b"{}"}, numerics=numerics)
        with pytest.raises(ModelMismatch, match=r"tokenizer(_config)?\.json is not that of"):
            executor.connect(**options)


def test_another_order_is_a_typed_disagreement(llama: Executor) -> None:
    _, manifest = config_of(llama)
    turned = msgspec.structs.replace(manifest, parameters=manifest.parameters[::-1])
    with pytest.raises(ModelMismatch, match="another order of parameters"):
        check_agreement("wss://a", turned, manifest)


def test_one_authority_in_another_dress(tls_dir: Path, tmp_path: Path) -> None:
    """OpenSSL trusts the same certificate in a form that other readers pass over."""
    pem = (tls_dir / "ca.pem").read_text()
    other = tmp_path / "trusted.pem"
    other.write_text(
        pem.replace("BEGIN CERTIFICATE", "BEGIN TRUSTED CERTIFICATE").replace(
            "END CERTIFICATE", "END TRUSTED CERTIFICATE"
        )
    )
    with pytest.raises(SymbiosisError, match="hold the same certificate authority"):
        own_authorities(tls_dir / "ca.pem", [other], ())


# -- what grows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        {"model_type": "gpt_neo", "attention_types": [[["global"], 1 << 24]], "num_layers": 2},
        {"model_type": "gpt_neo", "attention_types": [[["global"], 9]] * 5000, "num_layers": 2},
        # Each list and each number is small; only their product is large.
        {"model_type": "gpt_neo", "attention_types": [[["global"] * 500, 900]] * 20, "num_layers": 2},
        {"model_type": "llama", "first_k_dense_replace": 1 << 40},
        {"model_type": "llama", "max_position_embeddings": 1 << 30},
    ],
)
def test_numbers_that_repeat_something(raw: dict[str, Any], llama: Executor) -> None:
    _, manifest = config_of(llama)
    started = time.thread_time()
    with pytest.raises(ModelMismatch):
        model_configuration(json.dumps(raw).encode(), manifest, {})
    assert time.thread_time() - started < 30  # of the processor, however busy the machine is


def test_a_configuration_cannot_rename_its_keys(llama: Executor) -> None:
    raw, manifest = config_of(llama)
    raw |= {"attribute_map": {"num_hidden_layers": "max_position_embeddings"}}
    config = model_configuration(json.dumps(raw).encode(), manifest, {})
    assert config.num_hidden_layers == raw["num_hidden_layers"]


# -- what is shown ---------------------------------------------------------------------------------

ESCAPE = "\x1b[2J\x1b[H\x9b31mowned\x07"


def test_no_message_holds_control_characters(llama: Executor) -> None:
    raw, manifest = config_of(llama)
    hidden = json.dumps(raw | {"x": {"num_" + ESCAPE: 1 << 50, "num_x": 1 << 50}}).encode()

    def unknown(**parts: Any) -> None:
        build_tokenizer({"tokenizer.json": changed(**parts)})

    for make in (
        lambda: unknown(normalizer={"type": ESCAPE}),
        lambda: unknown(**{ESCAPE: 1}),
        lambda: model_configuration(hidden, manifest, {}),
        lambda: check_agreement("wss://a", manifest, msgspec.structs.replace(manifest, digest=ESCAPE)),
    ):
        with pytest.raises(SymbiosisError) as caught:
            make()
        assert not {"\x1b", "\x9b", "\x07"} & set(str(caught.value) + caught.value.message)
    assert str(SymbiosisError(f"a peer wrote {ESCAPE}")) == "a peer wrote ?[2J?[H?31mowned?"
    # Nor a second line, which a log would take for an entry of its own.
    assert str(SymbiosisError("one\ntwo")) == "one two"
    assert str(RequestRefused("x\ny\x1b", "z\r\n")) == "[x?y?] z? "
    assert CheckResult("tls", False, f"CN={ESCAPE}").detail == "CN=?[2J?[H?31mowned?"


# -- parameters that nobody supplies ---------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_only_what_nobody_supplies_counts_as_made_here(
    tied: bool, hostile: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied head is its embedding, of whatever size; an embedding that is left out is not."""
    monkeypatch.setattr("tenant_sdk.model.loading.MAX_BUFFERS", 1 << 14)  # the embedding has twice as many
    with hostile({}).connect() as session:
        remote = session.executor
        raw, manifest = config_of(hostile({}))
        config = json.dumps(raw | {"tie_word_embeddings": tied}).encode()
        kept = tuple(each for each in manifest.parameters if each.name != "lm_head.weight")
        remote.manifest = msgspec.structs.replace(manifest, parameters=kept)
        remote.file = lambda info: config if info.name == "config.json" else b"{}"  # type: ignore[method-assign]
        if tied:
            session.load_model(progress=False)
        else:
            with pytest.raises(ModelMismatch, match="lists no values for parameters"):
                session.load_model(progress=False)


def test_labels_are_counted_like_layers(llama: Executor) -> None:
    raw, manifest = config_of(llama)
    wide = msgspec.structs.replace(manifest.parameters[0], name="junk", shape=(1 << 30,))
    lied = msgspec.structs.replace(manifest, parameters=(*manifest.parameters, wide))
    with pytest.raises(ModelMismatch, match="num_labels"):
        model_configuration(json.dumps(raw | {"num_labels": 1 << 30}).encode(), lied, {})
