"""Mixtures of experts whose experts are multiplied by the provider, against the local model.

Tolerances, relative L2: float32 in another order of additions, 1e-5 after two blocks. On the ring, where a
layer is off by up to 2e-4, 1e-3 for logits and 3e-3 for all gradients of adapters taken as one vector. A
router compares, which rounding may decide otherwise: not for these tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from conftest import LLAMA_LIKE, RING, Executor, relative_error
from parity import fixed_result, gradients, load_local, token_ids, total_error
from ring_sessions import captured_requests, one_time
from torch import nn

import tenant_sdk
from shared.wire import messages
from shared.wire.header import Operation
from tenant_sdk.connection import remote
from tenant_sdk.model.experts import RemoteExperts
from tenant_sdk.model.mixtures import own_projections

FLOAT = 1e-5
LOGITS, GRADIENTS = 1e-3, 3e-3
SETTINGS = ("local", "padded", "routed")
_SMALL: dict[str, Any] = {**LLAMA_LIKE, "num_experts_per_tok": 2, "head_dim": 16}
TABLE: dict[str, tuple[str, str, dict[str, Any]]] = {
    # Two tensors for each expert become one parameter.
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_SMALL, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**_SMALL, "num_experts": 6, "moe_intermediate_size": 48},
    ),
    # Stored as it is, with the inputs first; biases, and a gate that takes turns.
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_SMALL, "num_local_experts": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    # All tokens are multiplied by every expert, as zeros by those that they do not go to.
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**_SMALL, "num_experts_per_tok": 1, "num_local_experts": 4, "intermediate_size_mlp": 96},
    ),
}
Folder = Callable[[str], Path]
Pair = Callable[[str], tuple[Executor, Executor]]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Folder of a saved tiny model with experts that differ: ``mixture("mixtral")``; made once."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            class_name, config_name, options = TABLE[architecture]
            torch.manual_seed(0)
            model = getattr(transformers, class_name)(getattr(transformers, config_name)(**options))
            for name, parameter in model.named_parameters():
                if "norm" not in name:
                    nn.init.normal_(parameter, std=0.1)
            made[architecture] = tmp_path_factory.mktemp(architecture)
            model.save_pretrained(made[architecture])
        return made[architecture]

    return make


@pytest.fixture(scope="module")
def pair(serve: Callable[..., Executor], mixture: Folder) -> Pair:
    """A provider and a mask source on the ring."""
    made: dict[str, tuple[Executor, Executor]] = {}

    def get(architecture: str) -> tuple[Executor, Executor]:
        if architecture not in made:
            folder = mixture(architecture)
            made[architecture] = serve(folder, numerics=RING), serve(folder, numerics=RING)
        return made[architecture]

    return get


def adapted(model: nn.Module) -> nn.Module:
    """LoRA on attention, and on the experts' own parameters."""
    torch.manual_seed(7)
    config = peft.LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False,
    )
    return peft.get_peft_model(model, config)


def results(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Logits, logits with an adapter, gradients of it."""
    plain = fixed_result(model, token_ids())
    model = adapted(model)
    return plain, fixed_result(model, token_ids()), gradients(model, token_ids())


def assert_near(got: Any, expected: Any, logits: float, all_gradients: float) -> None:
    assert relative_error(got[0], expected[0]) < logits
    assert relative_error(got[1], expected[1]) < logits
    assert total_error(got[2], expected[2]) < all_gradients
    assert sum("experts" in name for name in expected[2]) == 2 * 2 * 2  # blocks, projections, A and B


def placeholders(model: nn.Module) -> int:
    return sum(isinstance(each.weight, RemoteExperts) for each in own_projections(model).values())


@pytest.mark.parametrize("architecture", TABLE)
def test_equals_local_on_floats(architecture: str, serve: Callable[..., Executor], mixture: Folder) -> None:
    folder = mixture(architecture)
    expected = results(load_local(folder))
    with serve(folder).connect() as session:
        loaded = session.load_model(progress=False)
        assert placeholders(loaded) == 4
        assert_near(results(loaded), expected, FLOAT, 10 * FLOAT)
        attached = session.attach(load_local(folder))
        assert placeholders(attached) == 4
        assert_near(results(attached), expected, FLOAT, 10 * FLOAT)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("architecture", TABLE)
def test_equals_local_under_one_time_masks(
    architecture: str, setting: str, pair: Pair, mixture: Folder
) -> None:
    expected = results(load_local(mixture(architecture)))
    with one_time(*pair(architecture), experts=setting) as session:
        model = session.load_model(progress=False)
        assert placeholders(model) == (0 if setting == "local" else 4)
        assert_near(results(model), expected, LOGITS, GRADIENTS)
        assert session.stats.verified_rows > 0


@pytest.mark.parametrize("setting", SETTINGS)
def test_text(setting: str, pair: Pair, mixture: Folder) -> None:
    """Token by token, with the adapter too."""
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    texts = []
    with one_time(*pair("mixtral"), experts=setting) as session:
        for model in (load_local(mixture("mixtral")), session.load_model(progress=False)):
            for each in (model, adapted(model)):
                texts.append(each.generate(input_ids=token_ids(1, 5), **options))
    assert torch.equal(texts[2], texts[0])
    assert torch.equal(texts[3], texts[1])


def test_inference_mode(pair: Pair, mixture: Folder) -> None:
    """Whose tensors other threads must not write into."""
    with one_time(*pair("mixtral"), experts="padded") as session, torch.inference_mode():
        got = session.load_model(progress=False)(token_ids()).logits
        assert relative_error(got, load_local(mixture("mixtral"))(token_ids()).logits) < LOGITS


@pytest.mark.parametrize("setting", SETTINGS)
def test_tuned_and_then_written_with(setting: str, pair: Pair, mixture: Folder) -> None:
    """Adapters on attention and experts learn a text as they do locally, and then write it."""
    ids, losses, written = token_ids(1, 14), list[list[float]](), []
    with one_time(*pair("mixtral"), experts=setting) as session:
        for base in (load_local(mixture("mixtral")), session.load_model(progress=False)):
            model = adapted(base)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
            losses.append([])
            for _ in range(24):
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(float(loss.detach()))
            options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
            written.append(model.generate(input_ids=ids[:, :6], **options))
    # Later a router may decide otherwise for what was rounded otherwise, and steps multiply that.
    assert losses[1][:5] == pytest.approx(losses[0][:5], rel=1e-2)
    assert all(torch.equal(each, ids) for each in written)


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss", "llama4"])
def test_with_a_checkpoint_of_ones_own(architecture: str, pair: Pair, mixture: Folder) -> None:
    """It computes effects, and says which weight is whose; and gives weights back."""
    folder = mixture(architecture)
    local = load_local(folder)
    expected = fixed_result(local, token_ids())
    with one_time(pair(architecture)[0], folder, experts="routed") as session:
        model = session.attach(load_local(folder))
        assert relative_error(fixed_result(model, token_ids()), expected) < LOGITS
        with pytest.raises(tenant_sdk.ModelMismatch, match="attached already"):
            session.attach(model)
        session.detach(model, folder)
    assert placeholders(model) == 0
    assert model.get_experts_implementation() == local.get_experts_implementation()
    for name, parameter in local.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert torch.equal(fixed_result(model, token_ids()), expected)


@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_experts_that_are_longer_than_a_piece_are_downloaded(
    architecture: str, serve: Callable[..., Executor], mixture: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expert of a large model is more than a message may be: its rows come then, of several at a time."""
    monkeypatch.setattr(messages, "MAX_ROW_BYTES", 1 << 10)
    monkeypatch.setattr(remote, "FETCH_BYTES", 5 << 10)
    local = load_local(mixture(architecture))
    with serve(mixture(architecture)).connect(experts="local") as session:
        model = session.load_model(progress=False)
        assert any(
            len(info.shape) == 3 and info.rows[0] > info.shape[0] for info in session.manifest.parameters
        )
    for name, parameter in local.named_parameters():
        if "experts" in name:
            assert torch.equal(parameter, model.get_parameter(name)), name


# -- what the provider sees ------------------------------------------------------------------------


def rows_of_experts(session: tenant_sdk.Session, ids: torch.Tensor) -> list[list[int]]:
    """How many rows each expert of each projection was sent, in order, in a pass forward."""
    model = session.load_model(progress=False)
    experts = {at: group.members[0] for at, group in enumerate(session.manifest.groups) if group.of_expert}
    seen: dict[str, list[int]] = {}
    with captured_requests() as sent:
        fixed_result(model, ids)
    for message in sent:
        if message.operation == Operation.PRODUCT and message.group in experts:
            name = experts[message.group].name.rpartition(".")[0]
            seen.setdefault(name, []).append(message.rows)
    return list(seen.values())


def test_padded_shows_no_more_than_a_bucket(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with one_time(*pair("qwen3_moe"), experts="padded", verify="off") as session:
        for tokens, buckets in ((1, {4}), (18, {8, 16})):
            seen = rows_of_experts(session, token_ids(1, tokens))
            assert len(seen) == 4  # two blocks, two projections
            for counts in seen:
                assert len(counts) == 6
                assert set(counts) < buckets | {0}
                assert len(set(counts)) == 1
    (told,) = [record.getMessage() for record in caplog.records if "padded" in record.getMessage()]
    assert "each of 6 experts" in told
    assert "24 rows are sent where 2 are needed, 12.0 times as many" in told


def test_routed_shows_how_many_tokens_each_expert_gets(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    with one_time(*pair("qwen3_moe"), experts="routed", verify="off") as session:
        assert "sees how many tokens each expert gets" in caplog.text
        for counts in rows_of_experts(session, token_ids(1, 18)):
            assert sum(counts) == 18 * 2
            assert len(set(counts)) > 1


def test_experts_that_get_all_tokens_show_nothing_unless_routed(pair: Pair) -> None:
    """Llama 4 multiplies zeros where a token does not go; only where routes may be seen they are left out."""
    with one_time(*pair("llama4"), experts="padded", verify="off") as session:
        assert rows_of_experts(session, token_ids(1, 18)) == [[18] * 4] * 4
    with one_time(*pair("llama4"), experts="routed", verify="off") as session:
        for counts in rows_of_experts(session, token_ids(1, 18)):
            assert sum(counts) == 18
            assert len(set(counts)) > 1


def test_nothing_said_keeps_experts_here_and_says_what_they_take(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    with one_time(*pair("mixtral")) as session:
        assert rows_of_experts(session, token_ids()) == []
    assert "stay in this machine's memory, 0.6 MiB: experts are local" in caplog.text
    caplog.clear()
    with pair("mixtral")[0].connect() as session:  # 'plain' shows everything anyway
        assert rows_of_experts(session, token_ids())
    assert "experts" not in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"experts": "mine"}, "experts='mine' must be one of local, padded, routed"),
        ({"experts": "padded"}, r"rows of zeros, which privacy='plain' would show.*experts='routed'"),
    ],
)
def test_what_cannot_be(options: dict[str, Any], words: str, pair: Pair) -> None:
    with pytest.raises(tenant_sdk.ConfigurationError, match=words):
        pair("mixtral")[0].connect(**options)


# -- refusals --------------------------------------------------------------------------------------


def test_other_experts_are_noticed(pair: Pair, mixture: Folder) -> None:
    with pair("gpt_oss")[0].connect() as session:
        model = load_local(mixture("gpt_oss"))
        with torch.no_grad():
            model.model.layers[1].mlp.experts.down_proj[2] *= 1.2
        with pytest.raises(
            tenant_sdk.ModelMismatch, match=r"layers\.1\.mlp\.experts\.down_proj\.2 has other"
        ):
            session.attach(model)
        assert placeholders(model) == 0
        session.attach(model, exclude=["layers.1.mlp.experts.down_proj"])
        assert placeholders(model) == 3


def test_experts_that_the_executor_does_not_serve_are_named(
    serve: Callable[..., Executor],
    mixture: Folder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("provider.catalog.experts.MAX_GROUPS", 8)
    with serve(mixture("mixtral")).connect() as session:
        assert placeholders(session.load_model(progress=False)) == 0
    assert "does not serve the experts layers.0.mlp.experts.gate_up_proj, " in caplog.text


def test_whatever_sets_transformers_own_implementation_shows_no_routes(pair: Pair) -> None:
    with one_time(*pair("mixtral"), experts="padded", verify="off") as session:
        model = session.load_model(progress=False)
        model.set_experts_implementation("grouped_mm")
        with pytest.raises(tenant_sdk.ConfigurationError, match="set_experts_implementation"):
            fixed_result(model, token_ids())


def test_several_adapters_at_once(pair: Pair, mixture: Folder) -> None:
    """PEFT adds a product of full size to the weight then, which is multiplied apart."""
    found = []
    with pair("mixtral")[0].connect() as session:
        for base in (load_local(mixture("mixtral")), session.load_model(progress=False)):
            model = adapted(base)
            model.add_adapter("other", model.peft_config["default"])
            model.base_model.set_adapter(["default", "other"])
            found.append(fixed_result(model, token_ids()))
    assert relative_error(found[1], found[0]) < LOGITS
