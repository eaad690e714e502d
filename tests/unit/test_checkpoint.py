"""Checkpoint folders: what is read, what is refused, and that the digest covers."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_model
from safetensors.torch import save_file

from provider.catalog.discovery import discover
from provider.executor.base import BaseExecutor
from shared import recipes
from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError, ConfigurationError
from shared.hub import own_file
from shared.recipes import meta_model
from shared.wire.messages import Fetch, digest_of
from tenant_sdk.tuning.local_model import local_tokenizer


def test_a_missing_folder_says_what_a_checkpoint_is(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json.*save_pretrained"):
        Checkpoint(tmp_path / "nowhere")


def test_pickles_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="never read; convert with"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("damage", [b"", b"not safetensors at all", b"\xff" * 64])
def test_a_damaged_file_is_named(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("limited", [True, False])
def test_a_file_too_large_to_be_mapped_is_named(tmp_path: Path, limited: bool) -> None:
    """By the limit on address space; or by the machine, which torch alone finds then."""
    size = 1 << 40
    header = json.dumps({"a": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)  # sparse
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if limited:
        resource.setrlimit(resource.RLIMIT_AS, (size, hard))
    elif Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "0":
        pytest.skip("this machine refuses no mapping for its size")
    try:
        with pytest.raises(CheckpointError, match=r"cannot be mapped.*max_shard_size"):
            Checkpoint(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "tokenizer.json", "bpe.codes"]
)
def test_a_hole_is_not_read_into_memory(name: str, tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    with (folder / name).open("ab") as file:
        file.truncate(65 << 20)
    with pytest.raises(ConfigurationError, match=f"{name} is larger than 67,108,864 bytes"):
        Checkpoint(folder)
    with pytest.raises(ConfigurationError, match=f"{name} is larger than 67,108,864 bytes"):
        local_tokenizer(folder)


def test_a_large_file_beside_it_that_nobody_reads(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    (folder / "train.jsonl").write_bytes(bytes(1 << 20) * 65)
    assert Checkpoint(folder).names()


def test_a_name_that_would_take_hours_is_refused(tmp_path: Path) -> None:
    """Transformers searches names for patterns with ``.*``."""
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    save_file({".experts" * 100: torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="a name of 800 characters; 500 are the most"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_named(tmp_path: Path, index: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        Checkpoint(tmp_path)


def test_an_index_cannot_leave_the_folder(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    shutil.copy(checkpoint("llama") / "model.safetensors", tmp_path / "outside.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {"a": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError):
        Checkpoint(folder)


def test_shards_hold_what_one_file_holds(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    make_model("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, sharded = Checkpoint(checkpoint("llama")), Checkpoint(tmp_path)
    assert whole.names() == sharded.names()
    for name in whole.names():
        assert torch.equal(whole.read(name), sharded.read(name))
    groups = discover(whole).groups
    assert whole.weights_digest(groups) == sharded.weights_digest(discover(sharded).groups)


def test_rows_are_read_without_the_rest(checkpoint: Callable[[str], Path]) -> None:
    source = Checkpoint(checkpoint("llama"))
    name = "model.embed_tokens.weight"
    assert torch.equal(source.read(name, slice(3, 7)), source.read(name)[3:7])
    assert source.layout(name) == ((128, 64), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_located_rows_are_the_same_and_parse_nothing(
    dtype: torch.dtype, checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors reads the names of all tensors of a file, under Python's lock."""
    shutil.copy(checkpoint("llama") / "config.json", tmp_path)
    tensors = {
        "matrix": torch.randn(7, 5).to(dtype),
        "cube": torch.randn(3, 2, 4).to(dtype),
        "vector": torch.randn(6).to(dtype),
        "number": torch.tensor(3.5, dtype=dtype),
        "nothing": torch.empty(0, 3, dtype=dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    opened = Checkpoint(tmp_path)
    opened.locate(tensors)
    monkeypatch.setattr("shared.checkpoint.safe_open", None)
    for name in ("matrix", "cube", "vector", "nothing"):
        for rows in (slice(0, 1), slice(1, 3), slice(2, None), slice(None), slice(5, 5)):
            assert torch.equal(opened.read(name, rows), tensors[name][rows])
    for name, tensor in tensors.items():
        assert torch.equal(opened.read(name), tensor)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 1)
    last = max(opened._places.values(), key=lambda place: place.begin if 0 not in place.shape else -1)
    with pytest.raises(CheckpointError, match="has become shorter"):
        last.read(slice(None))


@pytest.mark.parametrize("architecture", ["llama", "mixtral"])
def test_downloads_parse_no_names(
    architecture: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of experts, a parameter is made of tensors of its own for each of them."""
    executor = BaseExecutor(checkpoint(architecture), numerics="ring")
    monkeypatch.setattr("shared.checkpoint.safe_open", None)
    for info in executor.manifest.parameters:
        _, read = executor.catalog.fetch(Fetch("parameter", info.name, 0, info.rows[0]), 1)
        assert read().numel() == info.rows[0] * info.rows[1]


def test_the_digest_changes_with_one_bit_of_one_served_weight(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    original = Checkpoint(checkpoint("llama"))
    model = make_model("llama")
    with torch.no_grad():
        weight = model.model.layers[1].mlp.down_proj.weight
        weight[5, 7] = torch.nextafter(weight[5, 7], torch.tensor(1.0))
    model.save_pretrained(tmp_path)
    changed = Checkpoint(tmp_path)
    assert original.weights_digest(discover(original).groups) != changed.weights_digest(
        discover(changed).groups
    )


def test_the_digest_covers_what_tenants_download(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    original = BaseExecutor(checkpoint("llama"), numerics="float32").manifest
    model = make_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight += 1
    model.save_pretrained(tmp_path)
    changed = BaseExecutor(tmp_path, numerics="float32").manifest
    assert original.weights == changed.weights
    assert original.digest != changed.digest
    assert digest_of(changed) == changed.digest
    (tmp_path / "generation_config.json").write_text("{}")
    assert BaseExecutor(tmp_path, numerics="float32").manifest.digest not in (original.digest, changed.digest)


@pytest.mark.parametrize("shard", ["model\0.safetensors", "\ud800.safetensors"])
def test_a_shard_that_no_file_can_be_called(
    shard: str, tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), folder)
    index = json.dumps({"weight_map": {"x": shard}})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="no file can be called"):
        Checkpoint(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "config.json", "model.safetensors"])
def test_links_out_of_the_folder_are_refused(
    name: str, tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    """Tenants download what a folder holds, and an archive may hold links to anything of the provider's."""
    folder, elsewhere = tmp_path / "model", tmp_path / "secret"
    shutil.copytree(checkpoint("llama"), folder)
    shutil.copy(folder / "config.json", folder / "chat_template.jinja")
    (folder / name).rename(elsewhere)
    (folder / name).symlink_to("../secret")
    with pytest.raises(
        CheckpointError, match=rf"{name} is a link to \S+/secret, which is not in that folder"
    ):
        BaseExecutor(folder, numerics="float32")


def test_a_link_that_leads_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model2.safetensors").symlink_to("model2.safetensors")
    with pytest.raises(CheckpointError, match=r"model2\.safetensors is a link that leads to itself"):
        own_file(tmp_path, "model2.safetensors")


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "detr", "backbone": "org/name"},
        {"parts": [{"backbone": "org/name"}]},
        {"backbone": "", "encoder": {"backbone": "org/name"}},
    ],
)
def test_a_configuration_does_not_name_what_is_elsewhere(config: dict[str, Any], tmp_path: Path) -> None:
    """transformers would ask a hub for it, although the folder was named."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DetrModel"]} | config))
    with pytest.raises(CheckpointError, match="the backbone 'org/name'"):
        meta_model(tmp_path, torch.float32)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "timm_wrapper", "model_args": {"checkpoint_path": "x"}}, "fetch code or weights"),
        ({"model_type": "llama", "a": {"model_type": "rwkv"}}, "fetch code or weights"),
        ({"model_type": "llama", "a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}, "nested too deeply"),
    ],
)
def test_a_configuration_that_would_load_something_is_refused(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(CheckpointError, match=said):
        meta_model(tmp_path, torch.float32)


def test_nobody_is_asked_whether_code_is_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks at a terminal if a part of a configuration names code, whatever it was told."""
    part = {"model_type": "bert", "auto_map": {"AutoConfig": "evil.Evil"}}
    config = {"model_type": "encoder-decoder", "encoder": part, "decoder": part}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["EncoderDecoderModel"]}))
    (tmp_path / "evil.py").write_text("raise SystemExit(7)")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    assert not hasattr(recipes.config_in(tmp_path).encoder, "auto_map")


def test_a_configuration_does_not_name_another_file(tmp_path: Path) -> None:
    """transformers would read that one, which nobody has looked at."""
    (tmp_path / "config.json").write_text(json.dumps({"configuration_files": ["config.4.0.0.json"]}))
    with pytest.raises(CheckpointError, match="configuration_files"):
        meta_model(tmp_path, torch.float32)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "videomae", "architectures": ["VideoMAEModel"], "num_frames": 10**7},
        {"model_type": "levit", "architectures": ["LevitModel"], "image_size": 4096},
    ],
)
def test_a_model_that_takes_hours_to_build_is_refused(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tables are filled in loops of Python, as long as the configuration says."""
    monkeypatch.setattr(recipes, "BUILD_SECONDS", 0.5)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="to build"):
        meta_model(tmp_path, torch.float32, 10)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 30_000}, "num_hidden_layers is 30000, and its tensors hold 1024 at most"),
        ({"num_hidden_layers": 1_000}, "many more layers than its 21 tensors hold"),
        ({"text_config": {"encoder_layers": 10**9}}, r"encoder_layers is 1e\+09"),
        ({"depths": [2, 10**6]}, r"depths is 1e\+06"),
        ({"num_local_experts": 10**6}, r"num_local_experts is 1e\+06"),
        ({"num_labels": 10**9}, r"num_labels is 1e\+09"),
    ],
)
def test_a_configuration_says_no_more_than_its_tensors_hold(
    fields: dict[str, Any], said: str, tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    """Or a kilobyte takes hours and all memory, before any tensor is looked at."""
    folder = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(CheckpointError, match=said):
        list(Checkpoint(folder).stored.layers())
    with pytest.raises(CheckpointError, match=said):
        discover(Checkpoint(folder))


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool.jinja"])
def test_links_out_of_a_tokenizers_folder_are_refused(
    name: str, tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    """It is saved beside adapters, which people pass on."""
    folder, elsewhere = tmp_path / "tokenizer", tmp_path / "secret"
    shutil.copytree(Path("examples/base_model"), folder)
    elsewhere.write_text("a key")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match=r"is a link to .*/secret"):
        local_tokenizer(folder)
    (folder / name).unlink()
    (folder / "pytorch_model.bin").symlink_to(elsewhere)  # is not read
    local_tokenizer(folder)


@pytest.mark.parametrize("kind", ["Esm", "CTRL", "ProphetNet", "Tapas", "Phobert", "Bertweet", "BioGpt"])
def test_a_tokenizers_folder_without_the_files_of_its_class(kind: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{kind}Tokenizer"}))
    with pytest.raises(ConfigurationError, match=f"no tokenizer in {tmp_path}"):
        local_tokenizer(tmp_path)


def test_links_of_a_hubs_cache_are_followed(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    folder, blobs = tmp_path / "models--a--b" / "snapshots" / ("0" * 40), tmp_path / "models--a--b" / "blobs"
    shutil.copytree(checkpoint("llama"), blobs)
    folder.mkdir(parents=True)
    for blob in blobs.iterdir():
        (folder / blob.name).symlink_to(f"../../blobs/{blob.name}")
    assert Checkpoint(folder).tenant_files() == Checkpoint(blobs).tenant_files()


def test_files_are_served_as_they_were_when_they_were_listed(
    tmp_path: Path, checkpoint: Callable[[str], Path]
) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    catalog = BaseExecutor(tmp_path, numerics="float32").catalog
    before = (tmp_path / "config.json").read_bytes()
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/etc/passwd")
    _, read = catalog.fetch(Fetch(kind="file", name="config.json", start=0, stop=len(before)), 1)
    assert bytes(read().tolist()) == before


def test_a_file_that_no_tenant_takes_is_not_served(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    shutil.copytree(checkpoint("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(" " * (1 << 16) + "{}")
    with pytest.raises(CheckpointError, match="more than 65536 bytes"):
        BaseExecutor(tmp_path, numerics="float32")
