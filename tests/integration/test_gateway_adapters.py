"""Which adapters a gateway takes, and what it keeps of them; without vLLM."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from conftest import Executor
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

import tenant_sdk
from shared.errors import ConfigurationError, ModelMismatch
from shared.wire.messages import Manifest
from tenant_sdk.gateway.adapters import CONFIG, folders_in, import_adapter, largest_rank
from tenant_sdk.gateway.folder import METHOD, _drop_unknown_ends, write_folder
from tenant_sdk.storage import ADAPTER_WEIGHTS as WEIGHTS
from tenant_sdk.tuning.provenance import RECORD


@pytest.fixture(scope="module")
def manifest(session: tenant_sdk.Session) -> Manifest:
    return session.manifest


@pytest.fixture(scope="module")
def saved(session: tenant_sdk.Session, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter of this base, as the SDK saves it."""
    folder = tmp_path_factory.mktemp("saved") / "notes"
    torch.manual_seed(0)
    model = peft.get_peft_model(
        session.load_model(progress=False),
        peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    tenant_sdk.save_adapter(model, folder, session)
    return folder


@pytest.fixture
def own(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "watched" / "notes"))


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    (tmp_path / "copies").mkdir()
    return tmp_path / "copies"


def change(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | fields))


def test_an_adapter_is_copied(own: Path, copies: Path, manifest: Manifest) -> None:
    adapter = import_adapter(own, copies, manifest)
    assert (adapter.name, adapter.rank, adapter.notes) == ("notes", 4, "")
    assert (adapter.folder / WEIGHTS).read_bytes() == (own / WEIGHTS).read_bytes()
    assert import_adapter(own, copies, manifest).folder == adapter.folder  # the same content


def test_other_content_is_another_copy(own: Path, copies: Path, manifest: Manifest) -> None:
    """Or prefixes that were computed with the one would be used with the other."""
    before = import_adapter(own, copies, manifest)
    change(own, lora_alpha=64)
    after = import_adapter(own, copies, manifest)
    assert before.folder != after.folder
    assert before.folder.is_dir()


def test_weights_of_the_base_are_refused(own: Path, copies: Path, manifest: Manifest) -> None:
    """Zeros were taken for those of the base's stubs."""
    group = manifest.groups[0]
    name = f"base_model.model.{manifest.base_prefix}.{group.members[0].name}.weight".replace("..", ".")
    weight = torch.zeros(group.members[0].outputs, group.inputs)
    save_file(load_file(own / WEIGHTS) | {name: weight}, own / WEIGHTS)
    with pytest.raises(ConfigurationError, match="no part of the adapter"):
        import_adapter(own, copies, manifest)


def test_a_file_is_as_large_as_an_adapter(own: Path, copies: Path, manifest: Manifest) -> None:
    """It could have a size that only a copy of the base's weights has, which are not here."""
    numbers = sum(group.inputs * member.outputs for group in manifest.groups for member in group.members)
    save_file(load_file(own / WEIGHTS) | {"x": torch.zeros(numbers, dtype=torch.float64)}, own / WEIGHTS)
    with pytest.raises(ConfigurationError, match=r"has more than \d+ bytes"):
        import_adapter(own, copies, manifest)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "ADALORA", "r": 8, "total_step": 9}, "LoRA alone"),
        ({"use_dora": True}, "use_dora: True"),
        ({"init_lora_weights": "pissa"}, "changes to the base's weights"),
        ({"init_lora_weights": "olora"}, "changes to the base's weights"),
        ({"arrow_config": {"top_k": 1}}, "arrow_config"),
        ({"kasa_config": {"x": 1}}, "kasa_config"),
        ({"what_a_later_peft_reads": True}, "what_a_later_peft_reads"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"use_rslora": "yes"}, "use_rslora"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 0}, "`r`"),
        ({"r": "8"}, "r is '8'"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"r": 32}, "max_rank=32"),
        ({"rank_pattern": {"q_proj": 300}}, "max_rank=320"),
    ],
)
def test_what_is_not_computed_is_refused(
    own: Path, copies: Path, manifest: Manifest, fields: dict[str, Any], message: str
) -> None:
    change(own, **fields)
    with pytest.raises(ConfigurationError, match=message) as caught:
        import_adapter(own, copies, manifest, most_rank=16)
    assert str(own) in str(caught.value)  # and not its copy
    assert str(copies) not in str(caught.value)
    assert not list(copies.iterdir())


@pytest.mark.parametrize(
    "name", ["lm_head.lora_A", "embed_tokens.lora_embedding_A", "layers.0.q_proj.lora_magnitude"]
)
def test_tensors_that_would_be_left_out_are_refused(
    own: Path, copies: Path, manifest: Manifest, name: str
) -> None:
    tensors = load_file(own / WEIGHTS) | {f"base_model.model.{name}.weight": torch.zeros(2)}
    save_file(tensors, own / WEIGHTS)
    with pytest.raises(ConfigurationError, match="would be left out"):
        import_adapter(own, copies, manifest)


def spoiled(name: str, tensor: torch.Tensor, how: str) -> dict[str, torch.Tensor]:
    if how == "half":
        return {}
    if how == "narrow":  # as of a smaller model, whose numbers would fit into the place of these
        return {name: tensor[..., :-4].contiguous() if ".lora_A." in name else tensor}
    if how == "low":
        return {name: tensor[:1].contiguous() if ".lora_B." in name else tensor}
    if how == "of other numbers":
        return {name: tensor.to(torch.float8_e4m3fn)}
    return {name: torch.full_like(tensor, float("nan"))}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("half", "lacks"),
        ("narrow", "shape"),
        ("low", "shape"),
        ("nan", "NaN"),
        ("of other numbers", "plain floats"),
    ],
)
def test_matrices_that_do_not_fit(
    own: Path, copies: Path, manifest: Manifest, how: str, message: str
) -> None:
    """Or they would be taken for a part of what fits, or end the steps of everybody."""
    tensors = load_file(own / WEIGHTS)
    name = next(each for each in tensors if (".lora_B." if how == "low" else ".lora_A.") in each)
    save_file(
        {k: v for k, v in tensors.items() if k != name} | spoiled(name, tensors[name], how), own / WEIGHTS
    )
    with pytest.raises(ConfigurationError, match=message):
        import_adapter(own, copies, manifest)
    assert not list(copies.iterdir())


def test_the_layers_of_gpt2(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], tmp_path: Path, copies: Path
) -> None:
    """They lie the other way round."""
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    with serve(checkpoint("gpt2")).connect() as session:
        model = peft.get_peft_model(session.load_model(progress=False), config)
        tenant_sdk.save_adapter(model, tmp_path / "gpt2", session)
        assert import_adapter(tmp_path / "gpt2", copies, session.manifest).rank == 2


def test_empty_lists_are_as_none(own: Path, copies: Path, manifest: Manifest) -> None:
    """PEFT writes one for attention of a mixture of experts."""
    change(own, target_parameters=[], modules_to_save=[])
    assert import_adapter(own, copies, manifest).rank == 4


def test_what_vllm_is_told(own: Path, copies: Path, manifest: Manifest) -> None:
    change(own, target_modules=".*_proj", alpha_pattern={"layers.0.*": 4})
    said = json.loads((import_adapter(own, copies, manifest).folder / CONFIG).read_text())
    assert said.keys() == {
        *("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "rank_pattern", "alpha_pattern")
    }
    assert all(name.startswith("model.layers.") for name in said["target_modules"])
    ((pattern, value),) = said["alpha_pattern"].items()
    assert value == 4
    assert re.match(pattern, "model.layers.0.mlp.up_proj")
    assert not re.match(pattern, "model.layers.1.mlp.up_proj")


def test_of_another_base(own: Path, copies: Path, manifest: Manifest) -> None:
    record = json.loads((own / "symbiosis.json").read_text())
    (own / "symbiosis.json").write_text(json.dumps(record | {"weights": "0" * 64}))
    with pytest.raises(ModelMismatch, match="allow_other_base=True"):
        import_adapter(own, copies, manifest)
    assert import_adapter(own, copies, manifest, allow_other_base=True).rank == 4


@pytest.mark.parametrize(
    "damage",
    [
        "config",
        "weights",
        "record",
        "missing",
        "deep",
        "deep record",
        "large",
        "large config",
        "large record",
        "pipe",
    ],
)
def test_damaged_ones(own: Path, copies: Path, manifest: Manifest, damage: str) -> None:
    if damage == "missing":
        (own / WEIGHTS).unlink()
    elif damage == "deep":
        (own / CONFIG).write_text("[" * 100_000)
    elif damage == "deep record":
        (own / RECORD).write_text('{"x": ' + "[" * 100_000)
    elif damage == "large":
        os.truncate(own / WEIGHTS, 3 << 30)  # sparse; it is not read
    elif damage.startswith("large "):
        os.truncate(own / (CONFIG if damage == "large config" else RECORD), 60 << 30)
    elif damage == "pipe":  # nobody writes to it
        (own / RECORD).unlink()
        os.mkfifo(own / RECORD)
    else:
        (own / {"config": CONFIG, "weights": WEIGHTS, "record": RECORD}[damage]).write_bytes(b"\x80\x02}q")
    with pytest.raises(ConfigurationError) as caught:
        import_adapter(own, copies, manifest)
    assert str(own) in str(caught.value)
    assert str(copies) not in str(caught.value)
    assert not list(copies.iterdir())


@pytest.mark.parametrize("name", ["../up", "", "a b", "-x", "a/b", "x" * 300])
def test_names(own: Path, copies: Path, manifest: Manifest, name: str) -> None:
    if not name:
        assert import_adapter(own, copies, manifest, name=name).name == "notes"
        return
    with pytest.raises(ConfigurationError, match="no name"):
        import_adapter(own, copies, manifest, name=name)


def test_a_folder_that_cannot_be_looked_into_keeps_no_other_from_being_served(
    own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``import_adapter`` tells why it is refused. Tests may run as root, which may look everywhere."""
    theirs, is_file = own.parent / "another users", Path.is_file
    theirs.mkdir()

    def closed(path: Path) -> bool:
        if theirs in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", closed)
    assert [path.name for path in folders_in(own.parent)] == ["another users", "notes"]
    assert largest_rank(own.parent) == 16


def test_a_folder_of_them(own: Path) -> None:
    watched = own.parent
    (watched / ".notes.partial-1").mkdir()
    (watched / ".notes.partial-1" / CONFIG).write_text("{}")
    (watched / "text.txt").write_text("no adapter")
    (watched / "broken").mkdir()
    (watched / "broken" / CONFIG).write_text("{")
    assert [path.name for path in folders_in(watched)] == ["broken", "notes"]

    os.truncate(watched / "broken" / CONFIG, 60 << 30)  # sparse; it is not read
    assert largest_rank(watched) == 16  # as most adapters have
    change(own, r=40)
    assert largest_rank(watched) == 64


def test_the_folder_of_the_model(llama: Executor, tmp_path: Path) -> None:
    """What the executor has is not in it, nor is any secret; what the tenant has is."""
    with llama.connect() as session:
        session.load_tokenizer = lambda: _NoTokenizer()  # type: ignore[method-assign]
        write_folder(session, {"token_env": "TOKEN"}, "a1b2", tmp_path, "float32")
        held = {info.name for info in session.manifest.parameters}
        served = {member.name for group in session.groups for member in group.info.members}
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names <= held
    assert not any(name.removeprefix("model.").removesuffix(".weight") in served for name in names)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": METHOD,
        "mark": "a1b2",
        "session": {"token_env": "TOKEN"},
    }
    assert "auto_map" not in config


def test_ends_that_the_model_does_not_have_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """In vLLM, one request with `min_tokens` would end the sequences of all clients."""
    config, generation = {"eos_token_id": 2050}, SimpleNamespace(eos_token_id=[1, 2050])
    tokenizer = SimpleNamespace(eos_token_id=2049, eos_token="</s>")
    _drop_unknown_ends(config, generation, tokenizer, 2048)
    assert (config, generation.eos_token_id, tokenizer.eos_token) == ({"eos_token_id": None}, [1], None)
    assert "left out" in caplog.text
    config, generation = {"eos_token_id": [2, 3]}, SimpleNamespace(eos_token_id=2)
    tokenizer = SimpleNamespace(eos_token_id=2, eos_token="</s>")
    caplog.clear()
    _drop_unknown_ends(config, generation, tokenizer, 2048)
    assert (config, generation.eos_token_id, tokenizer.eos_token) == ({"eos_token_id": [2, 3]}, 2, "</s>")
    assert not caplog.text


class _NoTokenizer:
    backend_tokenizer = Tokenizer(BPE())

    def save_pretrained(self, folder: Path) -> None:
        """The tiny model has none."""


@pytest.mark.parametrize("what", ["the folder", CONFIG, WEIGHTS, "symbiosis.json"])
def test_links_out_of_the_folder_are_refused_whoever_asks(
    what: str, saved: Path, own: Path, copies: Path, manifest: Manifest
) -> None:
    """The watcher finds them, and the management interface is asked for them."""
    watched = own.parent
    (watched / "inside").symlink_to("notes")
    assert import_adapter(watched / "inside", copies, manifest, within=watched).name == "inside"
    if what == "the folder":
        shutil.rmtree(own)
        own.symlink_to(saved)
    else:
        (own / what).unlink()
        (own / what).symlink_to(saved / what)
    with pytest.raises(ConfigurationError, match=r"from below \S+/watched alone, and \S+ leads out of it"):
        import_adapter(own, copies, manifest, within=watched)
    with pytest.raises(ConfigurationError, match="alone"):
        import_adapter(watched / ".." / ".." / saved.name, copies, manifest, within=watched)
    assert len(list(copies.iterdir())) == 1
