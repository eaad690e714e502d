"""Fingerprint files: what a tenant keeps of a checkpoint that it trusts, to check executors with."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RING, Executor
from cryptography.fernet import Fernet
from intercepting_proxy import InterceptingProxy
from parity import add_lora, fixed_result, gradients, load_local, token_ids
from ring_sessions import ExecutorFactory, one_time, other_layers
from safetensors.torch import load_file, save, save_file

import tenant_sdk
from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError, ConfigurationError, ModelMismatch, VerificationError
from shared.wire.header import Direction
from tenant_sdk.products.fingerprints import StoredFingerprints, checkpoint_layers, write_fingerprints

pytest_plugins = ("ring_fixtures",)

Proxy = Callable[[Executor], InterceptingProxy]
BASE_MODEL = Path(__file__).parents[2] / "examples" / "base_model"


class Trusted:
    """A fingerprint file and its key, as options of ``connect``."""

    def __init__(self, folder: Path, path: Path) -> None:
        self.path = path
        self.key = write_fingerprints(folder, path, numerics=RING)

    @property
    def options(self) -> dict[str, Any]:
        return {"fingerprints": self.path, "fingerprint_key": self.key}


@pytest.fixture(scope="session")
def trusted(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Trusted]:
    """Of a tiny model: ``trusted("llama")``; made once."""
    made: dict[str, Trusted] = {}

    def get(architecture: str) -> Trusted:
        if architecture not in made:
            path = tmp_path_factory.mktemp("fingerprints") / architecture
            made[architecture] = Trusted(checkpoint(architecture), path)
        return made[architecture]

    return get


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights in its linear layers."""
    path = tmp_path_factory.mktemp("stranger")
    other_layers(path)
    return path


# -- honest executors -----------------------------------------------------------------------------


@pytest.mark.parametrize("privacy", ["plain", "noise-bank", "one-time"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt", "bert", "gemma2"])
def test_honest_executors_pass_in_every_mode(
    architecture: str,
    privacy: str,
    executors: ExecutorFactory,
    trusted: Callable[[str], Trusted],
) -> None:
    """Forward and backward, whole groups; gpt2 stores its weights the other way round."""
    provider, source, _ = executors(architecture)
    options = trusted(architecture).options
    with (
        one_time(provider, source, **options)
        if privacy == "one-time"
        else provider.connect(privacy=privacy, **options)
    ) as session:
        gradients(add_lora(session.load_model(progress=False)), token_ids())
        # Every row is checked, and nothing else is asked for: the fingerprints are there.
        assert session.stats.verified_rows == session.stats.rows > 0


@pytest.mark.parametrize("members", range(1, 8))
@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_any_members_of_a_group(
    members: int,
    direction: Direction,
    executors: ExecutorFactory,
    trusted: Callable[[str], Trusted],
) -> None:
    with executors("llama")[0].connect(**trusted("llama").options) as session:
        group = session.groups[0]
        widths = [m.outputs for i, m in enumerate(group.info.members) if members >> i & 1]
        widths = [group.info.inputs] if direction == Direction.FORWARD else widths
        generator = torch.Generator().manual_seed(members)
        tensors = [torch.randn((5, width), generator=generator) for width in widths]
        group.product(direction, members, tensors)
        assert session.stats.verified_rows == 5


@pytest.mark.parametrize("model", ["untied", "tied"])
def test_an_offloaded_head(
    model: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Also one that is tied to the embeddings, and so stored under their name."""
    folder = checkpoint("llama") if model == "untied" else BASE_MODEL
    executor = serve(folder, numerics=RING, serve_head=True)
    file = Trusted(folder, tmp_path / "file")
    with executor.connect(**file.options) as session:
        loaded = session.load_model(offload_head=True, progress=False)
        loaded(input_ids=token_ids(1, 4))
        assert session.stats.verified_rows == session.stats.rows > 0


def test_names_and_layers(checkpoint: Callable[[str], Path]) -> None:
    for architecture in ("llama", "gpt2", "bert", "mixtral"):
        layers = checkpoint_layers(Checkpoint(checkpoint(architecture)))
        assert len({layer.name for layer in layers}) == len(layers)
        assert all(
            layer.transposed == (architecture == "gpt2" and "lm_head" not in layer.name) for layer in layers
        )
    tied = {layer.name: layer.tensor for layer in checkpoint_layers(Checkpoint(BASE_MODEL))}
    assert tied["lm_head"] == "model.embed_tokens.weight"


# -- dishonest executors --------------------------------------------------------------------------


def test_executors_that_agree_on_other_weights_are_noticed(
    executors: ExecutorFactory,
    trusted: Callable[[str], Trusted],
    serve: Callable[..., Executor],
    stranger: Path,
    proxy: Proxy,
) -> None:
    """Both multiply with the same wrong weights from the beginning, under the right name, bounds and
    scales. That, nothing but knowledge of the right weights can show; without it nothing is noticed."""
    honest = executors("llama")[0]
    liars = []
    for _ in range(2):
        middle = proxy(serve(stranger, numerics=RING))
        middle.claim(honest)
        liars.append(middle.executor)
    with one_time(*liars) as session:
        wrong = fixed_result(session.load_model(progress=False), token_ids())
        assert session.stats.verified_rows > 0
    with honest.connect() as session:
        right = fixed_result(session.load_model(progress=False), token_ids())
    assert float((wrong - right).norm() / right.norm()) > 0.1
    with one_time(*liars, **trusted("llama").options) as session:
        model = session.load_model(progress=False)
        with pytest.raises(VerificationError, match=r"layers\.0\.self_attn\.q_proj"):
            fixed_result(model, token_ids())


def exchanged(folder: Path, to: Path, one: str, other: str) -> Path:
    """A copy of a checkpoint in which two tensors have changed places."""
    load_local(folder).save_pretrained(to)
    tensors = load_file(to / "model.safetensors")
    tensors[one], tensors[other] = tensors[other], tensors[one]
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("knows", ["fingerprints", "local"])
@pytest.mark.parametrize("says", ["layers", "tensors"])
def test_layers_that_changed_places_are_noticed(
    says: str,
    knows: str,
    trusted: Callable[[str], Trusted],
    executors: ExecutorFactory,
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    proxy: Proxy,
) -> None:
    """An executor puts one block's weight into another block, and either keeps still about it or says
    that this is where the tensor belongs: then all that it multiplies with is in the right checkpoint, and
    even the digest is."""
    one, other = (f"model.layers.{i}.mlp.down_proj.weight" for i in range(2))
    honest = executors("llama")[0]
    middle = proxy(serve(exchanged(checkpoint("llama"), tmp_path / "exchanged", one, other), numerics=RING))
    with honest.connect() as session:
        weights = session.manifest.weights

    def lie(manifest: dict[str, Any]) -> dict[str, Any]:
        names = {one: other, other: one} if says == "tensors" else {}
        for group in manifest["groups"]:
            for member in group["members"]:
                member["tensor"] = names.get(member["tensor"], member["tensor"])
        return {**manifest, "weights": weights}

    middle.manifest = lie
    options: dict[str, Any] = {"mask_sources": [f"local:{checkpoint('llama')}"]}
    if knows == "fingerprints":
        options = {"privacy": "plain", **trusted("llama").options}
    with (
        pytest.raises((ModelMismatch, VerificationError)),
        middle.executor.connect(**({"privacy": "one-time"} | options)) as session,
    ):
        fixed_result(session.load_model(progress=False), token_ids())


def test_wrong_scales_and_bounds_are_noticed(
    executors: ExecutorFactory, trusted: Callable[[str], Trusted], proxy: Proxy
) -> None:
    options = trusted("llama").options
    middle = proxy(executors("llama")[0])
    middle.scales = lambda _, body: bytes(len(body))
    with (
        middle.executor.connect(**options) as session,
        pytest.raises(ModelMismatch, match="the weights that"),
    ):
        fixed_result(session.load_model(progress=False), token_ids())
    for change in (-1, 1):
        for at in range(2):

            def lie(manifest: dict[str, Any], at: int = at, change: int = change) -> dict[str, Any]:
                manifest["groups"][3]["bounds"][at] += change
                return manifest

            middle.manifest = lie
            with pytest.raises(
                ModelMismatch, match=r"other weights than the executor claims for layers\.0\.mlp"
            ):
                middle.executor.connect(**options)


# -- files ----------------------------------------------------------------------------------------


def test_the_file_of_another_model(
    executors: ExecutorFactory,
    trusted: Callable[[str], Trusted],
    stranger: Path,
    tmp_path: Path,
) -> None:
    provider = executors("llama")[0]
    with pytest.raises(ModelMismatch, match=r"do not have layers\.0\.self_attn\.q_proj"):
        provider.connect(**trusted("gpt2").options)
    with pytest.raises(ModelMismatch, match="of other weights than the executor claims"):
        provider.connect(**Trusted(stranger, tmp_path / "stranger").options)


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_file(keep: int, trusted: Callable[[str], Trusted], tmp_path: Path) -> None:
    file = trusted("llama")
    (tmp_path / "file").write_bytes(file.path.read_bytes()[:keep])
    with pytest.raises(ConfigurationError, match="truncated or was changed"):
        StoredFingerprints(tmp_path / "file", file.key)


@pytest.mark.parametrize("at", [0, 1, 9, 50, 5000, -1, -20, -60])
def test_a_changed_byte(at: int, trusted: Callable[[str], Trusted], tmp_path: Path) -> None:
    """Version, time, initial vector, text, authentication: nothing can be changed."""
    file = trusted("llama")
    data = bytearray(file.path.read_bytes())
    data[at] = ord("A") if data[at] != ord("A") else ord("B")
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ConfigurationError, match="changed since; make it again"):
        StoredFingerprints(tmp_path / "file", file.key)


def test_wrong_keys(trusted: Callable[[str], Trusted]) -> None:
    path = trusted("llama").path
    with pytest.raises(ConfigurationError, match="not written under this key"):
        StoredFingerprints(path, Fernet.generate_key().decode())
    for key in (None, ""):
        with pytest.raises(ConfigurationError, match="is encrypted: give fingerprint_key"):
            StoredFingerprints(path, key)
    for key in ("x", "x" * 44, "ä" * 44, trusted("llama").key[:-1]):
        with pytest.raises(ConfigurationError, match="44 characters") as caught:
            StoredFingerprints(path, key)
        assert key not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    key = Fernet.generate_key().decode()
    with pytest.raises(ConfigurationError, match=r"cannot read the fingerprints .*No such file"):
        StoredFingerprints(tmp_path / "none", key)
    with pytest.raises(ConfigurationError, match=r"cannot read the fingerprints .*directory"):
        StoredFingerprints(tmp_path, key)


@pytest.mark.parametrize(
    "content",
    [b"", b"anything", save({"x": torch.ones(1)}), save({}, {"format": "symbiosis-fingerprints-0"})],
)
def test_what_is_no_fingerprint_under_the_right_key(content: bytes, tmp_path: Path) -> None:
    key = Fernet.generate_key()
    (tmp_path / "file").write_bytes(Fernet(key).encrypt(content))
    with pytest.raises(ConfigurationError, match="make it again"):
        StoredFingerprints(tmp_path / "file", key.decode())


def test_only_its_owner_may_read_it_and_it_does_not_hold_its_key(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("an older one that everybody may read")
    path.chmod(0o644)
    umask = os.umask(0)
    try:
        key = write_fingerprints(checkpoint("gpt2"), path, numerics=RING)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    data = path.read_bytes()
    assert key.encode() not in data
    assert Fernet(key).decrypt(data)
    assert b"challenge" not in data
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_challenges_are_drawn_afresh(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Under the same key, too: whoever learns one file learns nothing about the next."""
    key = Fernet.generate_key().decode()
    made = []
    for name in ("one", "other"):
        assert write_fingerprints(checkpoint("gpt2"), tmp_path / name, key=key, numerics=RING) == key
        made.append(StoredFingerprints(tmp_path / name, key)._tensors)
    challenges = [name for name in made[0] if name.endswith("challenge")]
    assert len(challenges) == 9 + 2  # one for each layer's outputs, one for each width of inputs
    for name in challenges:
        assert not torch.equal(made[0][name], made[1][name])
        assert len(made[0][name].unique()) == made[0][name].numel()  # 32 bits each
    for name in set(made[0]) - set(challenges):
        same = torch.equal(made[0][name], made[1][name])
        assert same == name.endswith(("scales", "row bound", "column squares")), name


def test_places_that_cannot_be_written(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    folder = checkpoint("gpt2")
    for key in ("", None):
        write_fingerprints(folder, tmp_path / "new folder" / "file", key=key, numerics=RING)
    with pytest.raises(ConfigurationError, match="cannot be a file"):
        write_fingerprints(folder, tmp_path, numerics=RING)
    with pytest.raises(ConfigurationError, match="cannot be a file"):
        write_fingerprints(folder, tmp_path / "new folder" / "file" / "below", numerics=RING)
    with pytest.raises(ConfigurationError, match="44 characters"):
        write_fingerprints(folder, tmp_path / "file", key="too short", numerics=RING)
    assert {path.name for path in tmp_path.iterdir()} == {"new folder"}


def test_folders_that_are_no_checkpoint(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        write_fingerprints(tmp_path, tmp_path / "file", numerics=RING)
    load_local(checkpoint("llama")).save_pretrained(tmp_path / "folder")
    config = tmp_path / "folder" / "config.json"
    for changes, message in (
        ({"architectures": ["Nothing"]}, "names no architecture"),
        ({"architectures": None}, "names no architecture"),
        ({"hidden_act": "zzz"}, "cannot be used"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "of no linear layer"),
    ):
        original = json.loads(config.read_text())
        config.write_text(json.dumps({**original, **changes}))
        with pytest.raises(CheckpointError, match=message):
            write_fingerprints(tmp_path / "folder", tmp_path / "file", numerics=RING)
        config.write_text(json.dumps(original))
    assert not (tmp_path / "file").exists()


def test_a_float_executor_has_no_use_for_it(llama: Executor, trusted: Callable[[str], Trusted]) -> None:
    with pytest.raises(ConfigurationError, match="fingerprints, need an executor with"):
        llama.connect(**trusted("llama").options)


def test_it_is_used_unless_told_otherwise(
    executors: ExecutorFactory, trusted: Callable[[str], Trusted]
) -> None:
    for verify, rows in ((None, 2), ("always", 2), ("off", 0)):
        with executors("llama")[0].connect(verify=verify, **trusted("llama").options) as session:
            session.groups[0].plain_product(Direction.FORWARD, 1, (torch.ones((2, 64)),))
            assert session.stats.verified_rows == rows


def test_the_error_is_part_of_the_package() -> None:
    assert issubclass(VerificationError, tenant_sdk.SymbiosisError)


def test_the_file_of_other_numerics(
    serve: Callable[..., Executor], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their integers are others, which the file says before any answer would be found wrong."""
    (other,) = {"ring", "ring-fine"} - {RING}
    key = write_fingerprints(checkpoint("llama"), tmp_path / "prints", numerics=other)
    executor = serve(checkpoint("llama"), numerics=RING)
    with pytest.raises(ConfigurationError, match=f"fingerprint --numerics {RING}"):
        executor.connect(fingerprints=tmp_path / "prints", fingerprint_key=key)
    with pytest.raises(ConfigurationError, match="'float32' cannot be checked"):
        write_fingerprints(checkpoint("llama"), tmp_path / "prints", numerics="float32")
