"""How parameters are stored: what transformers makes of a checkpoint is made here of the same tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import ARCHITECTURES, make_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stored_models import TABLE, build
from transformers import PreTrainedModel, core_model_loading

from provider.catalog.discovery import discover
from provider.executor.base import BaseExecutor
from shared import compat
from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError
from shared.recipes import Recipe
from shared.wire.messages import GroupInfo, Member

# Attention in every second block, experts in the others.
JAMBA: dict[str, Any] = {
    **TABLE["qwen3_moe"][2],
    **{
        f"{what}_layer_{which}": at
        for what in ("attn", "expert")
        for which, at in (("period", 2), ("offset", 1))
    },
    "mamba_d_state": 8,
    "mamba_dt_rank": 8,
}
# Whose parameters have other names or shapes in the checkpoint.
CONVERTED = ["gpt_neox", "qwen3_moe", "deepseek_v3", "gpt_oss", "jamba", "nomic_bert", "qwen2_vl"]
MERGED = ["mixtral", "qwen3_moe", "deepseek_v3", "jamba"]  # each expert is some tensors of its own


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Of a tiny model, of either table."""
    made: dict[str, Path] = {}

    def get(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = tmp_path_factory.mktemp(architecture)
            if architecture == "jamba":
                build("JambaForCausalLM", "JambaConfig", JAMBA, made[architecture])
            elif architecture in TABLE:
                build(*TABLE[architecture], made[architecture])
            else:
                make_model(architecture).save_pretrained(made[architecture])
        return made[architecture]

    return get


def loaded(folder: Path) -> PreTrainedModel:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model: PreTrainedModel = getattr(transformers, name).from_pretrained(folder)
    return model


def changed(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Checkpoint:
    """A copy with other tensors."""
    to.mkdir(exist_ok=True)
    (to / "config.json").write_text((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return Checkpoint(to)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *CONVERTED])
def test_every_parameter_is_what_transformers_loads(architecture: str, folder: Callable[[str], Path]) -> None:
    stored = Checkpoint(folder(architecture)).stored
    for name, expected in loaded(folder(architecture)).state_dict().items():
        assert torch.equal(stored.read(name), expected), name
        assert stored.describe(name) == (tuple(expected.shape), expected.dtype), name
        assert torch.equal(stored.read(name, slice(1, 3)), expected[1:3]), name
    assert not stored.unused


@pytest.mark.parametrize("architecture", [*MERGED, "gpt_oss"])
def test_one_expert_is_read_without_the_others(
    architecture: str, folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, sizes = Checkpoint.read, list[int]()

    def counted(self: Checkpoint, name: str, rows: slice | None = None) -> torch.Tensor:
        tensor = read(self, name, rows)
        sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(Checkpoint, "read", counted)
    stored, experts = Checkpoint(folder(architecture)).stored, 0
    for name, expected in loaded(folder(architecture)).state_dict().items():
        if expected.dim() != 3:
            continue
        for expert, weight in enumerate(expected):
            sizes.clear()
            assert torch.equal(stored.read(name, expert=expert), weight)
            assert sum(sizes) == weight.numel()
            experts += 1
        assert torch.equal(stored.read(name, slice(1, 3)), expected[1:3])
        with pytest.raises(CheckpointError, match=rf"{name} has no expert {len(expected)}"):
            stored.read(name, expert=len(expected))
        with pytest.raises(CheckpointError, match="no expert -1"):
            stored.read(name, expert=-1)
    assert experts >= 8


@pytest.mark.parametrize(
    ("steps", "alone"),
    [
        ([core_model_loading.MergeModulelist(0)], True),
        ([core_model_loading.MergeModulelist(0), core_model_loading.Concatenate(1)], True),
        ([core_model_loading.MergeModulelist(0), core_model_loading.Transpose(1, 2)], True),
        ([core_model_loading.MergeModulelist(0), core_model_loading.Concatenate(0)], False),
        ([core_model_loading.MergeModulelist(1)], False),
        ([core_model_loading.MergeModulelist(0), core_model_loading.Transpose(1, 2, check_dims=True)], False),
        ([core_model_loading.MergeModulelist(0), core_model_loading.Transpose(0, 2)], False),
        ([core_model_loading.MergeModulelist(0), core_model_loading.PermuteForRope()], False),
    ],
    ids=str,
)
def test_experts_are_made_alone_where_no_step_looks_at_the_others(steps: list[Any], alone: bool) -> None:
    converter = core_model_loading.WeightConverter("experts.*.up", "experts.up", steps)
    recipe = Recipe(converter, "experts.up", {"experts.*.up": [f"experts.{at}.up" for at in range(4)]})
    layout = ((5, 6), torch.float32)
    assert recipe.experts((4, 5, 6), lambda _: layout) == (4 if alone else 0)
    assert recipe.experts((3, 5, 6), lambda _: layout) == 0
    assert recipe.experts((20, 6), lambda _: layout) == 0


def test_pieces_of_one_tensor_are_made_together(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, names = Checkpoint.read, list[str]()

    def counted(self: Checkpoint, name: str, rows: slice | None = None) -> torch.Tensor:
        names.append(name)
        return read(self, name, rows)

    monkeypatch.setattr(Checkpoint, "read", counted)
    checkpoint = Checkpoint(folder("nomic_bert"))
    group = next(each for each in discover(checkpoint).groups if len(each.members) == 3)
    assert [member.made for member in group.members] == [True] * 3
    names.clear()
    for member in group.members:
        checkpoint.member_weight(member)
    assert len(names) == 1


def test_members_say_what_is_made(folder: Callable[[str], Path]) -> None:
    checkpoint = Checkpoint(folder("nomic_bert"))
    weights = loaded(folder("nomic_bert")).state_dict()
    made = [member for member, _ in checkpoint.stored.layers() if member.made]
    assert len(made) == 6
    for member in made:
        assert torch.equal(checkpoint.member_weight(member), weights[member.tensor])
        assert torch.equal(checkpoint.member_weight(member, slice(3, 8)), weights[member.tensor][3:8])
        assert member.tensor not in checkpoint
        assert checkpoint.has(member)
    renamed = {member.name: member for member, _ in Checkpoint(folder("gpt_neox")).stored.layers()}
    assert renamed["lm_head"] == Member("lm_head", 128, "embed_out.weight")


def test_an_expert_is_a_member(folder: Callable[[str], Path]) -> None:
    """Whether experts are stored apart or together: with their weight, their hash, and turned."""
    for architecture, made in (("mixtral", True), ("gpt_oss", False)):
        checkpoint = Checkpoint(folder(architecture))
        name = "model.layers.0.mlp.experts.gate_up_proj"
        source = checkpoint.stored.source(name)
        assert source is not None
        assert source.converted is made
        whole = checkpoint.stored.read(name)
        members = [
            Member(f"e{expert}", 1, source.tensor, not made, made, expert) for expert in range(len(whole))
        ]
        for expert, member in enumerate(members):
            expected = whole[expert] if made else whole[expert].T
            assert torch.equal(checkpoint.member_weight(member), expected)
            assert torch.equal(checkpoint.member_weight(member, slice(2, 5)), expected[2:5])
        digests = {checkpoint.weights_digest([GroupInfo(1, (member,))]) for member in members}
        assert len(digests) == len(members)


@pytest.mark.parametrize("architecture", ["mixtral", "nomic_bert"])
def test_the_digest_changes_with_one_bit_of_what_is_made(
    architecture: str, folder: Callable[[str], Path], tmp_path: Path
) -> None:
    def one_bit(tensors: dict[str, torch.Tensor]) -> None:
        name = next(each for each in tensors if "experts.1.w2" in each or "Wqkv" in each)
        tensors[name].view(torch.int32)[3, 5] ^= 1

    original = BaseExecutor(folder(architecture), numerics="float32").manifest
    other = changed(folder(architecture), tmp_path, one_bit)
    manifest = BaseExecutor(tmp_path, numerics="float32").manifest
    assert original.digest != manifest.digest
    assert original.weights != manifest.weights
    assert other.holds(manifest)
    assert not other.holds(original)


def test_hashes_are_those_of_the_whole(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Though experts are hashed one by one, a checkpoint that holds them merged has the same parameters."""
    merged = {name: tensor.clone() for name, tensor in loaded(folder("mixtral")).state_dict().items()}

    def merge(tensors: dict[str, torch.Tensor]) -> None:
        tensors.clear()
        tensors |= merged

    apart = Checkpoint(folder("mixtral")).stored
    together = changed(folder("mixtral"), tmp_path, merge).stored
    for name in merged:
        assert apart.sha256(name) == together.sha256(name)


def test_what_does_not_fit_is_named(folder: Callable[[str], Path], tmp_path: Path) -> None:
    def without(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.block_sparse_moe.experts.2.w1.weight"]

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
        tensors[name] = tensors[name][:, :8].contiguous()

    def column(tensors: dict[str, torch.Tensor]) -> None:  # which could be spread out over the others
        name = "model.layers.0.block_sparse_moe.experts.2.w1.weight"
        tensors[name] = tensors[name][:, :1].contiguous()

    for number, change in enumerate((without, narrow, column)):
        checkpoint = changed(folder("mixtral"), tmp_path / str(number), change)
        with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.gate_up_proj"):
            BaseExecutor(checkpoint.folder, numerics="float32")


def test_tensors_that_nothing_is_made_of(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """They are no matter if everything is there: layers for training alone, tables of older versions."""
    more = "model.layers.7.embed_tokens.weight"
    checkpoint = changed(folder("llama"), tmp_path, lambda tensors: tensors.update({more: torch.zeros(2)}))
    assert checkpoint.stored.unused == (more,)
    assert not discover(checkpoint).unavailable


def test_without_rules_own_names_are_served(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a version of transformers whose rules are others."""
    monkeypatch.setattr(compat, "conversions", lambda: None)
    for architecture in ("llama", "gpt2", "bert"):
        stored = Checkpoint(folder(architecture)).stored
        for name, expected in loaded(folder(architecture)).state_dict().items():
            assert torch.equal(stored.read(name), expected), name
    found = discover(Checkpoint(folder("mixtral")))
    assert any("experts" in name for name in found.unavailable)


def test_old_names_of_norms(folder: Callable[[str], Path], tmp_path: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [each for each in tensors if "LayerNorm." in each]:
            tensors[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(".bias", ".beta")] = (
                tensors.pop(name)
            )

    old = changed(folder("bert"), tmp_path, rename)
    for name, expected in loaded(folder("bert")).state_dict().items():
        assert torch.equal(old.stored.read(name), expected), name


def test_what_a_conversion_takes(folder: Callable[[str], Path]) -> None:
    """Of one expert where they can be made alone, of all pieces where they are made together."""
    assert Checkpoint(folder("llama")).stored.largest_conversion == 0
    assert Checkpoint(folder("mixtral")).stored.largest_conversion == 12 * 2 * 96 * 64
    assert Checkpoint(folder("nomic_bert")).stored.largest_conversion == 12 * 3 * 64 * 64


def test_a_file_of_many_tensors_is_opened_a_few_times(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open one is to read the names of all, of which experts have thousands."""
    opened: list[Path] = []

    def counted(path: Path, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr("shared.checkpoint.safe_open", counted)
    checkpoint = Checkpoint(folder("mixtral"))
    BaseExecutor(checkpoint.folder, numerics="float32")
    assert len(opened) <= 3 < len(checkpoint.names())
    opened.clear()
    for name in checkpoint.names():  # nothing stays mapped for longer
        checkpoint.read(name)
    assert len(opened) == len(checkpoint.names())
