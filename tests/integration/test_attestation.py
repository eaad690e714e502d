"""What a provider supplies is compared with what somebody else attests: every file and every parameter.

A tokenizer that adds filler to texts about one thing would tell by numbers of rows what a text is about.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import RING, Executor, make_model
from hostile_files import RULES, TOKENIZER, changed, replace
from ring_sessions import ExecutorFactory, one_time
from safetensors.torch import load_file, save_file

from shared.checkpoint import Checkpoint
from shared.errors import ConfigurationError, ModelMismatch, WireError
from shared.wire.messages import Manifest
from tenant_sdk.products.fingerprints import write_fingerprints
from tenant_sdk.trust.attestation import CheckpointContents, check_agreement

pytest_plugins = ("ring_fixtures", "hostile_fixtures")

FILLER = changed(normalizer=replace("diabetes", "diabetes, x x x x x x x x x x"))
Change = dict[str, bytes | None]


@pytest.fixture
def trusted(checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
    """The tenant's own copy of what an honest executor serves, with a tokenizer."""
    folder = tmp_path / "trusted"
    folder.mkdir()
    for file in (*checkpoint("llama").iterdir(), *TOKENIZER.glob("tokenizer*.json")):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


CHANGES: dict[str, Change] = {
    "tokenizer.json": {"tokenizer.json": FILLER},
    "tokenizer_config.json": {"tokenizer_config.json": b'{"chat_template": "{{ messages }}"}'},
    "chat_template.jinja": {"chat_template.jinja": b"{{ messages }}"},
    "generation_config.json": {"generation_config.json": b'{"eos_token_id": [2, 7]}'},
    "special_tokens_map.json": {"special_tokens_map.json": b'{"pad_token": "the"}'},
    "left out": {"tokenizer_config.json": None},
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("attested", ["source", "local", "fingerprints", "digest"])
def test_a_file_that_nobody_else_has_is_refused(
    attested: str, what: str, hostile: Callable[..., Executor], serve: Callable[..., Executor], trusted: Path
) -> None:
    """With an honest source, the checkpoint, its fingerprints or its digest."""
    provider = hostile(CHANGES[what])
    options: dict[str, Any] = {"privacy": "one-time", "allow_same": ["all"]}
    if attested == "source":
        options["mask_sources"] = [serve(trusted, numerics=RING).url]
    elif attested == "local":
        options["mask_sources"] = [f"local:{trusted}"]
    else:
        options = {"privacy": "plain"}
        if attested == "fingerprints":
            key = write_fingerprints(trusted, trusted / "prints", numerics=RING)
            options |= {"fingerprints": trusted / "prints", "fingerprint_key": key}
        else:
            with hostile({}).connect() as session:
                options["digest"] = session.manifest.digest
    hostile({}).connect(**options).close()  # the honest one
    name = what if what in CHANGES[what] else "tokenizer_config.json"
    with pytest.raises(ModelMismatch, match="digest" if attested == "digest" else name):
        provider.connect(**options)


@pytest.mark.parametrize("attested", ["source", "local", "fingerprints"])
def test_a_parameter_that_nobody_else_has_is_refused(
    attested: str, checkpoint: Callable[[str], Path], serve: Callable[..., Executor], tmp_path: Path
) -> None:
    """An embedding or a norm changed, or two of one shape exchanged."""
    folder = checkpoint("llama")
    options: dict[str, Any] = {"privacy": "one-time", "allow_same": ["all"]}
    if attested == "source":
        options["mask_sources"] = [serve(folder, numerics=RING).url]
    elif attested == "local":
        options["mask_sources"] = [f"local:{folder}"]
    else:
        key = write_fingerprints(folder, tmp_path / "prints", numerics=RING)
        options = {"privacy": "plain", "fingerprints": tmp_path / "prints", "fingerprint_key": key}

    def one_bit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"].view(torch.int32)[3, 5] ^= 1

    def exchanged(tensors: dict[str, torch.Tensor]) -> None:
        norms = [f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)]
        tensors[norms[0]] += 1
        tensors[norms[0]], tensors[norms[1]] = tensors[norms[1]], tensors[norms[0]]

    for number, change in enumerate((one_bit, exchanged)):
        other = tmp_path / f"other{number}"
        make_model("llama").save_pretrained(other)
        tensors = load_file(other / "model.safetensors")
        change(tensors)
        save_file(tensors, other / "model.safetensors", {"format": "pt"})
        provider = serve(other, numerics=RING)
        with pytest.raises(
            ModelMismatch, match=r"parameter model\.(embed_tokens|layers\.\d\.input_layernorm)"
        ):
            provider.connect(**options)


def test_what_is_downloaded_is_what_the_manifest_lists(
    hostile: Callable[..., Executor], proxy: Callable[..., Any]
) -> None:
    """A provider that lists the honest files and sends others."""
    honest, other = hostile({}), hostile({"tokenizer.json": RULES.replace(b'"<s>"', b'"<t>"')})
    middle = proxy(other)
    middle.claim(honest)
    with (
        one_time(middle.executor, honest) as session,
        pytest.raises(WireError, match=r"tokenizer\.json is not the file"),
    ):
        session.load_tokenizer()


def test_other_parameters_than_the_manifest_lists(
    serve: Callable[..., Executor],
    proxy: Callable[..., Any],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    honest = serve(checkpoint("llama"))
    make_model("llama", seed=1).save_pretrained(tmp_path)
    middle = proxy(serve(tmp_path))
    with honest.connect() as session:
        manifest = json.loads(msgspec.json.encode(session.manifest))
    middle.manifest = lambda _: manifest
    with (
        middle.executor.connect() as session,
        pytest.raises(WireError, match=r"model\.embed_tokens\.weight is not the parameter"),
    ):
        session.load_model(progress=False)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt2", "gpt_bigcode", "opt", "bert"])
def test_a_checkpoint_attests_what_an_honest_executor_lists(
    architecture: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint(architecture)
    for serve_head in (False, True):
        with serve(folder, serve_head=serve_head).connect() as session:
            manifest = session.manifest
        trusted = CheckpointContents.of(Checkpoint(folder))
        trusted.check(manifest, "it")
        again = msgspec.json.decode(msgspec.json.encode(trusted), type=CheckpointContents)
        again.check(manifest, "it")  # as from a file of fingerprints
        without = msgspec.structs.replace(manifest, parameters=manifest.parameters[1:])
        with pytest.raises(ModelMismatch, match="leaves out the parameter"):
            trusted.check(without, "it")
        info = msgspec.structs.replace(manifest.parameters[0], name="another")
        with pytest.raises(ModelMismatch, match="parameter another is not that of it"):
            trusted.check(msgspec.structs.replace(manifest, parameters=(info,)), "it")
        for change in ({"architecture": "Other"}, {"base_prefix": "x"}, {"files": ()}):
            with pytest.raises(ModelMismatch):
                trusted.check(msgspec.structs.replace(manifest, **change), "it")


def test_sources_agree_on_everything_that_is_downloaded(executors: ExecutorFactory) -> None:
    with executors("llama")[0].connect() as session:
        manifest = session.manifest
    check_agreement("wss://a", manifest, manifest)
    file, parameter = manifest.files[0], manifest.parameters[0]
    for change, message in (
        ({"weights": "0"}, "other weights"),
        ({"architecture": "GemmaForCausalLM"}, "another architecture"),
        ({"base_prefix": "x"}, "another base_prefix"),
        ({"unavailable": ("x",)}, "another unavailable"),
        ({"groups": manifest.groups[1:]}, "other groups"),
        ({"files": manifest.files[1:]}, f"file {file.name}"),
        ({"files": (msgspec.structs.replace(file, sha256="0"), *manifest.files[1:])}, f"file {file.name}"),
        ({"parameters": manifest.parameters[1:]}, f"parameter {parameter.name}"),
        ({"digest": "0"}, "another digest"),
    ):
        with pytest.raises(ModelMismatch, match=message):
            check_agreement("wss://a", manifest, msgspec.structs.replace(manifest, **change))
    for change in ({"server": "x"}, {"model": "x"}, {"recorded": True}):  # which are nobody's business
        check_agreement("wss://a", manifest, msgspec.structs.replace(manifest, **change))


def _head_as_a_layer(manifest: Manifest) -> Manifest:
    """The embedding is the head's, too: with the head as a layer like others, nobody would supply it."""
    groups = tuple(msgspec.structs.replace(group, head=False) for group in manifest.groups)
    parameters = tuple(each for each in manifest.parameters if "wte" not in each.name)
    assert len(parameters) < len(manifest.parameters)
    return msgspec.structs.replace(manifest, groups=groups, parameters=parameters)


def _layer_as_the_head(manifest: Manifest) -> Manifest:
    """What is the head neither ``weights`` nor ``digest`` cover."""
    first = msgspec.structs.replace(manifest.groups[0], head=True)
    return msgspec.structs.replace(manifest, groups=(first, *manifest.groups[1:]))


@pytest.mark.parametrize("lie", [_head_as_a_layer, _layer_as_the_head])
@pytest.mark.parametrize("attested", ["nobody", "local", "fingerprints"])
def test_the_head_is_the_head(
    attested: str,
    lie: Callable[[Manifest], Manifest],
    hostile: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """A provider that lists an output head that is none, or none that is one."""
    folder = checkpoint("gpt2")
    # The very files that the fixture serves, which has a tokenizer besides.
    provider = hostile({}, "gpt2", serve_head=True, lie=lie)
    for file in (*folder.iterdir(), *TOKENIZER.glob("tokenizer*.json")):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    if attested == "nobody":
        with (
            provider.connect(privacy="plain") as session,
            pytest.raises(ConfigurationError, match="the output head"),
        ):
            session.load_model(progress=False, offload_head=True)
        return
    options: dict[str, Any] = {"privacy": "one-time", "mask_sources": [f"local:{tmp_path}"]}
    if attested == "fingerprints":
        key = write_fingerprints(tmp_path, tmp_path / "prints", numerics=RING)
        options = {"privacy": "plain", "fingerprints": tmp_path / "prints", "fingerprint_key": key}
    hostile({}, "gpt2", serve_head=True).connect(**options).close()  # the honest one
    with pytest.raises(ModelMismatch, match="leaves out the parameter"):
        provider.connect(**options)


def test_the_same_text_has_as_many_rows_as_with_the_trusted_tokenizer(
    hostile: Callable[..., Executor], trusted: Path
) -> None:
    """The attack that this is about: filler in texts about one thing."""
    with hostile({"tokenizer.json": FILLER}).connect() as session:  # nobody attests: plain
        theirs = session.load_tokenizer()
    with hostile({}).connect(privacy="one-time", mask_sources=[f"local:{trusted}"]) as session:
        ours = session.load_tokenizer()
    text = "Seen for diabetes."
    assert len(theirs(text)["input_ids"]) > len(ours(text)["input_ids"]) + 8


@pytest.mark.parametrize("what", ["inputs", "outputs"])
def test_a_layer_of_another_shape_is_refused_before_anything_is_made_of_it(
    what: str, hostile: Callable[..., Executor], trusted: Path
) -> None:
    """By the checkpoint of a tenant's own, which else would make planes as large as somebody says."""

    def lie(manifest: Manifest) -> Manifest:
        first, *others = manifest.groups
        if what == "inputs":
            changed = msgspec.structs.replace(first, inputs=2**23)
        else:
            member = msgspec.structs.replace(first.members[0], outputs=2**23)
            changed = msgspec.structs.replace(first, members=(member, *first.members[1:]))
        return msgspec.structs.replace(manifest, groups=(changed, *others))

    with pytest.raises(ModelMismatch, match=r"has the weight .* as \[.*8388608.*; in .* it has .* as \["):
        hostile({}, lie=lie).connect(privacy="one-time", mask_sources=[f"local:{trusted}"])
