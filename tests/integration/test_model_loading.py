"""Models from an executor alone: parameters that are tied, missing, split or of another class."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from conftest import Executor, make_model, relative_error
from parity import fixed_result, load_local, token_ids, virtual_layers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaModel, T5Config, T5ForConditionalGeneration

import tenant_sdk.connection.remote
from shared.errors import ConfigurationError, ModelMismatch, WireError
from tenant_sdk.model.configuration import ARGUMENTS
from tenant_sdk.model.loading import check_causal

# float32 in another order of additions.
TOLERANCE = 1e-5


def rewritten(
    source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None], **config: Any
) -> Path:
    """A copy of a checkpoint with other tensors or configuration."""
    settings = json.loads((source / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def check_parity(executor: Executor, folder: Path, **options: Any) -> Any:
    with executor.connect() as session:
        model = session.load_model(progress=False, **options)
        got = fixed_result(model, token_ids())
    assert relative_error(got, fixed_result(load_local(folder), token_ids())) < TOLERANCE
    return model


# -- tied embeddings ------------------------------------------------------------------------------


def _only_head(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.embed_tokens.weight"]


def _only_embedding(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]


def _both(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def _both_but_different(tensors: dict[str, torch.Tensor]) -> None:
    """As after training the head alone; transformers warns and does not tie."""


@pytest.mark.parametrize("serve_head", [False, True])
@pytest.mark.parametrize("stored", [_only_head, _only_embedding, _both, _both_but_different])
def test_tied_embeddings_however_they_are_stored(
    stored: Callable[[dict[str, torch.Tensor]], None],
    serve_head: bool,
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = rewritten(checkpoint("llama"), tmp_path, stored, tie_word_embeddings=True)
    executor = serve(folder, serve_head=serve_head)
    model = check_parity(executor, folder)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (stored is not _both_but_different)
    with executor.connect() as session:
        sizes = [info.shape for info in session.manifest.parameters]
    assert sizes.count((128, 64)) == (1 if tied else 2)
    if serve_head:
        offloaded = check_parity(executor, folder, offload_head=True)
        assert "lm_head" in virtual_layers(offloaded)


def test_a_head_that_is_served_is_not_downloaded(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    parameter = tenant_sdk.connection.remote.RemoteExecutor.parameter

    def watched(self: Any, info: Any) -> Any:
        fetched.append(info.name)
        return parameter(self, info)

    monkeypatch.setattr(tenant_sdk.connection.remote.RemoteExecutor, "parameter", watched)
    with serve(checkpoint("llama"), serve_head=True).connect() as session:
        session.load_model(progress=False, offload_head=True)
        assert "lm_head.weight" not in fetched
        session.load_model(progress=False)
        assert "lm_head.weight" in fetched


# -- missing parameters ---------------------------------------------------------------------------


def test_parameters_that_the_checkpoint_lacks_start_as_in_transformers(
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A bias beside a weight that is there, and one of a layer that is served."""
    missing = {"encoder.layer.0.output.LayerNorm.bias", "encoder.layer.1.attention.self.query.bias"}

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        # Beside something unlike any initial value, so that starting over would be noticed.
        tensors["encoder.layer.0.output.LayerNorm.weight"].fill_(1.7)
        for name in missing:
            del tensors[name]

    folder = rewritten(checkpoint("bert"), tmp_path, drop)
    executor = serve(folder)
    assert all(name in caplog.text for name in missing)  # the provider is told
    caplog.clear()
    model = check_parity(executor, folder)
    assert all(name in caplog.text for name in missing)  # and so is the tenant
    parameters = dict(model.named_parameters())
    assert not any(bool(parameters[name].any()) for name in missing)
    assert bool((parameters["encoder.layer.0.output.LayerNorm.weight"] == 1.7).all())


def test_a_base_model_alone(serve: Callable[..., Executor], tmp_path: Path) -> None:
    """Saved without its head, so under names without the prefix; with a head it is another class."""
    make_model("llama").model.save_pretrained(tmp_path)
    executor = serve(tmp_path)
    model = check_parity(executor, tmp_path)
    assert type(model) is LlamaModel
    with executor.connect() as session:
        torch.manual_seed(0)
        with_head = session.load_model(progress=False, model_class=AutoModelForCausalLM)
        hidden = with_head(input_ids=token_ids(), output_hidden_states=True).hidden_states[-1]
    local = fixed_result(load_local(tmp_path), token_ids())
    assert relative_error(hidden.detach(), local) < TOLERANCE


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("excldue", "did you mean exclude?"),
        ("torch_dtype", "did you mean dtype?"),
        ("modle_class", "did you mean model_class?"),
        ("num_lables", "did you mean num_labels?"),
        ("attn_implementaton", "did you mean attn_implementation?"),
        ("device_map", "the arguments are dtype, offload_head"),
        ("revision", "the arguments are"),  # transformers takes it, to look into a hub
        ("to_dict", "did you mean"),
    ],
)
def test_an_override_that_the_configuration_does_not_have(key: str, meant: str, llama: Executor) -> None:
    with llama.connect() as session, pytest.raises(ConfigurationError) as caught:
        session.load_model(progress=False, **{key: ["o_proj"]})
    assert f"load_model({key}=...): there is no such argument" in str(caught.value)
    assert meant in str(caught.value)


def test_a_value_that_the_configuration_cannot_have(llama: Executor) -> None:
    """It is this side's mistake, not that of the provider's configuration."""
    with llama.connect() as session, pytest.raises(ConfigurationError, match="num_labels='three'") as caught:
        session.load_model(progress=False, num_labels="three")
    assert not isinstance(caught.value, ModelMismatch)


def test_overrides(llama: Executor) -> None:
    given = {"attn_implementation": "eager", "num_labels": 3, "attention_dropout": 0.5, "use_cache": False}
    with llama.connect() as session:
        config = session.load_model(progress=False, **given).config
    assert (config._attn_implementation, config.num_labels) == ("eager", 3)
    assert (config.attention_dropout, config.use_cache) == (0.5, False)


def test_the_arguments_of_load_model_are_known() -> None:
    parameters = inspect.signature(tenant_sdk.Session.load_model).parameters
    assert set(parameters) == {"self", *ARGUMENTS, "config_overrides"}


def test_one_name_is_no_list(llama: Executor) -> None:
    with llama.connect() as session, pytest.raises(ConfigurationError, match=r"write exclude=\['o_proj'\]"):
        session.load_model(progress=False, exclude="o_proj")


def test_configuration_overrides(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    with llama.connect() as session:
        model = session.load_model(progress=False, attn_implementation="eager")
        assert model.config._attn_implementation == "eager"
        got = fixed_result(model, token_ids())
        # Of another size than what is served, or than what is downloaded.
        with pytest.raises(ModelMismatch, match=r"gate_proj has shape \[80, 64\] here"):
            session.load_model(progress=False, intermediate_size=80)
        with pytest.raises(ModelMismatch, match=r"embed_tokens\.weight has shape \[64, 64\] here"):
            session.load_model(progress=False, vocab_size=64)
    expected = fixed_result(load_local(checkpoint("llama")), token_ids())
    assert relative_error(got, expected) < TOLERANCE


def test_the_generation_configuration_comes_along(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    given = {"top_k": 7, "eos_token_id": [2, 5], "max_length": 9, "prompt_lookup_num_tokens": 4}
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    with serve(tmp_path).connect() as session:
        model = session.load_model(progress=False)
    changed = model.generation_config.to_diff_dict().keys()
    assert changed <= {"eos_token_id", "max_length", "transformers_version"}
    assert (model.generation_config.eos_token_id, model.generation_config.max_length) == ([2, 5], 9)


def test_the_model_is_ready_to_use(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    local = load_local(checkpoint("llama"))
    with llama.connect() as session:
        model = session.load_model(progress=False)
    assert not model.training
    assert not any(p.is_meta for p in model.parameters())
    assert model.name_or_path == ""  # a folder's name would be looked up at the public model hub
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in local.named_parameters()]
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == {
        n: tuple(p.shape) for n, p in local.named_parameters()
    }
    assert model.num_parameters() == local.num_parameters()


def test_parameters_come_in_pieces(
    llama: Executor, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tenant_sdk.connection.remote, "FETCH_BYTES", 1000)  # three rows of the embeddings
    check_parity(llama, checkpoint("llama"))


@pytest.mark.parametrize(
    ("model_class", "message"),
    [
        (None, r"no model class 'FutureForCausalLM'.*model_class="),
        (torch.nn.Linear, "is not a transformers model class"),
    ],
)
def test_a_class_that_transformers_does_not_have(
    model_class: type | None, message: str, llama: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with llama.connect() as session:
        remote = session.executor
        changed = msgspec.structs.replace(remote.manifest, architecture="FutureForCausalLM")
        monkeypatch.setattr(remote, "manifest", changed)
        with pytest.raises(ModelMismatch, match=message):
            session.load_model(progress=False, model_class=model_class)


@pytest.mark.parametrize("dtype", ["bfloat16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_by_its_name(dtype: Any, llama: Executor) -> None:
    with llama.connect() as session:
        model = session.load_model(dtype=dtype, progress=False)
    assert model.dtype == model.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["auto", "int8", "nn", torch.int8, None])
def test_what_is_no_dtype_of_activations(dtype: Any, llama: Executor) -> None:
    with llama.connect() as session, pytest.raises(ConfigurationError, match=r"takes torch\.float32, torch"):
        session.load_model(dtype=dtype, progress=False)


def test_what_the_command_line_neither_tunes_nor_generates_with(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 128}
    T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(tmp_path)
    for folder, name in ((checkpoint("bert"), "BertModel"), (tmp_path, "T5ForConditionalGeneration")):
        with (
            serve(folder).connect() as session,
            pytest.raises(ConfigurationError, match=f"^{name} is not a causal language model: the command"),
        ):
            check_causal(session.executor)


def test_causal_language_models_are_taken(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    for architecture in ("llama", "gpt2", "mixtral"):
        with serve(checkpoint(architecture)).connect() as session:
            check_causal(session.executor)


# -- files ----------------------------------------------------------------------------------------


def test_another_file_than_the_manifest_lists_is_refused(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    executor = serve(checkpoint("llama"))
    assert executor.server is not None
    files = executor.server.service.executor.catalog.checkpoint.files
    files["config.json"] = files["config.json"].replace(b'"llama"', b'"LLAMA"')
    with executor.connect() as session, pytest.raises(WireError, match="not the file that the executor"):
        session.load_model(progress=False)
