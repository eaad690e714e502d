"""Several adapters in one batch: each is trained as it would be alone, and none sees another's data.

Tolerances. In one batch the same sums are made with more rows at once, and float32 rounds them in another
order: 1e-5 of a loss, which is 5. With one-time masks each row becomes integers by itself, and another last
bit gives the next integer here and there: 1e-5 too, and 2e-4 of gradients, whose rows differ more. Optimizers
that divide gradients by their size let the smallest one's rounding through: 1e-3 of weights where four steps
go up to 4e-2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from conftest import RING, Executor, relative_error
from parity import load_local, token_ids
from peft import LoraConfig
from ring_sessions import one_time
from torch import nn

import tenant_sdk
import tenant_sdk.tuning
from shared.errors import ConfigurationError, NonFiniteError
from tenant_sdk import MultiAdapter

# PEFT finds the short names of these tests in the prefix of its parameters.
pytestmark = pytest.mark.filterwarnings("ignore:Adapter name")
Batch = dict[str, Any]
Open = Callable[[str, str], tenant_sdk.Session]
SEEDS = {"notes": 1, "letters": 2, "plans": 3}
RATES = {"notes": 1e-2, "letters": 3e-3, "plans": 1e-3}
LOSSES, WEIGHTS, GRADIENTS = 1e-5, 1e-3, {"plain": 1e-5, "one-time": 2e-4}


@pytest.fixture(scope="module")
def session_of(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> Iterator[Open]:
    opened: dict[tuple[str, str], tenant_sdk.Session] = {}
    with ExitStack() as stack:

        def of(architecture: str, mode: str = "plain") -> tenant_sdk.Session:
            if (architecture, mode) not in opened:
                folder = checkpoint(architecture)
                if mode == "plain":
                    session = serve(folder).connect()
                else:
                    session = one_time(*(serve(folder, numerics=RING) for _ in range(2)))
                opened[architecture, mode] = stack.enter_context(session)
            return opened[architecture, mode]

        yield of


def configs(architecture: str = "llama", dropout: float = 0.2) -> dict[str, LoraConfig]:
    """Of other ranks, scales, layers, and shares of dropout."""
    transposed = architecture == "gpt2"
    some = ["c_attn"] if transposed else ["q_proj", "v_proj", "down_proj"]
    given = {"fan_in_fan_out": transposed, "task_type": "CAUSAL_LM"}
    return {
        "notes": LoraConfig(r=8, target_modules="all-linear", lora_dropout=dropout, **given),
        "letters": LoraConfig(r=3, lora_alpha=32, use_rslora=True, target_modules=some, **given),
        "plans": LoraConfig(
            r=1, target_modules="all-linear", lora_dropout=dropout / 2, init_lora_weights="gaussian", **given
        ),
    }


def batch(rows: int, columns: int, seed: int) -> Batch:
    """The last sequence is shorter, if there are two."""
    ids = token_ids(rows, columns, seed)
    attended, labels = torch.ones_like(ids), ids.clone()
    if rows > 1:
        attended[-1, -2:], labels[-1, -2:] = 0, -100
    return {"input_ids": ids, "attention_mask": attended, "labels": labels}


def batches(steps: int = 4) -> dict[str, list[Batch]]:
    """Of other sizes, and one adapter has fewer."""
    return {
        "notes": [batch(2, 9, seed) for seed in range(steps)],
        "letters": [batch(1, 17, 10 + seed) for seed in range(steps)],
        "plans": [batch(3, 5, 20 + seed) for seed in range(steps - 2)],
    }


def load(session: tenant_sdk.Session) -> Any:
    """The model to train, without dropout of its own, which all adapters would draw together."""
    model = session.load_model(progress=False).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif "dropout" in vars(module):
            module.dropout = 0.0
    return model


def train_alone(
    session: tenant_sdk.Session, config: LoraConfig, seed: int, rate: float, data: list[Batch]
) -> tuple[list[float], list[torch.Tensor]]:
    model = load(session)
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, config)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(parameters, lr=rate), []
    for each in data:
        loss = model(**each).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, parameters


def train_together(
    multi: MultiAdapter, data: dict[str, list[Batch]], rates: dict[str, float]
) -> dict[str, list[float]]:
    optimizers = {name: torch.optim.AdamW(multi.parameters(name), lr=rates[name]) for name in multi.names}
    losses: dict[str, list[float]] = {name: [] for name in data}
    for step in range(max(map(len, data.values()))):
        got = multi.losses({name: each[step] for name, each in data.items() if step < len(each)})
        sum(got.values()).backward()  # type: ignore[union-attr]
        for name, loss in got.items():
            optimizers[name].step()
            optimizers[name].zero_grad()
            losses[name].append(loss.item())
    return losses


@pytest.mark.parametrize("mode", ["plain", "one-time"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_each_is_trained_as_alone(architecture: str, mode: str, session_of: Open) -> None:
    session, chosen = session_of(architecture, mode), configs(architecture)
    multi = MultiAdapter(load(session), chosen, seeds=SEEDS)
    before = session.stats
    losses = train_together(multi, batches(), RATES)
    between = session.stats
    for name, data in batches().items():
        alone, weights = train_alone(session, chosen[name], SEEDS[name], RATES[name], data)
        assert losses[name] == pytest.approx(alone, abs=LOSSES, rel=0)
        for mine, theirs in zip(multi.parameters(name), weights, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=WEIGHTS)
    after = session.stats
    # Four steps, not ten; though one alone asks for less if it adapts few layers.
    assert between.requests - before.requests < 0.7 * (after.requests - between.requests)


def test_rows_of_padding_are_not_sent(session_of: Open) -> None:
    session = session_of("llama", "plain")
    multi = MultiAdapter(load(session), configs(dropout=0.0), seeds=SEEDS)
    given = {"notes": batch(2, 9, 0), "letters": batch(1, 17, 1)}
    with torch.no_grad():
        multi.logits(given)  # learns who is asked for together
        before = session.stats
        multi.logits(given)
    groups = 2 * 4
    assert session.stats.requests - before.requests == groups
    assert session.stats.rows - before.rows == groups * (9 + 7 + 17)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_that_predicts_something(side: str, session_of: Open) -> None:
    """What is in front of a text predicts its first token, and labels may want padding itself."""
    multi = MultiAdapter(load(session_of("llama", "plain")), configs(dropout=0.0), seeds=SEEDS)
    with torch.no_grad():
        for parameter in multi.parameters("notes"):
            parameter.add_(0.02)
    given = batch(2, 9, 0)
    given["attention_mask"] = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    given["labels"] = given["input_ids"].clone()
    if side == "left":
        given["attention_mask"] = given["attention_mask"].flip(1)
        given["labels"][given["attention_mask"] == 0] = -100
    got = multi.losses({"letters": batch(2, 17, 1), "notes": given})["notes"].item()
    with multi.use("notes") as model:
        assert got == pytest.approx(model(**given).loss.item(), abs=1e-5)


def test_sweeps_begin_with_the_same_values(session_of: Open) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    multi = MultiAdapter(
        load(session_of("llama", "plain")), {"x": config, "y": config}, seeds={"x": 5, "y": 5}
    )
    for mine, theirs in zip(multi.parameters("x"), multi.parameters("y"), strict=True):
        assert torch.equal(mine, theirs)
        assert mine is not theirs
    other = MultiAdapter(load(session_of("llama", "plain")), {"x": config, "y": config})
    assert not torch.equal(other.parameters("x")[0], other.parameters("y")[0])
    assert config.target_modules == {"q_proj"}


@pytest.mark.parametrize("mode", ["plain", "one-time"])
def test_no_gradient_depends_on_another_s_data(mode: str, session_of: Open) -> None:
    """To the bit where the shapes are the same, for no sum has rows of two; else to rounding."""
    multi = MultiAdapter(load(session_of("llama", mode)), configs(dropout=0.0), seeds=SEEDS)
    gradients = []
    for other in (batch(2, 11, 1), batch(2, 11, 2), batch(5, 23, 3)):
        losses = multi.losses({"notes": batch(2, 9, 0), "letters": other})
        (losses["notes"] + 7 * losses["letters"]).backward()
        assert all(parameter.grad is None for parameter in multi.parameters("plans"))
        gradients.append([p.grad.clone() for p in multi.parameters("notes") if p.grad is not None])
        for name in multi.names:
            for parameter in multi.parameters(name):
                parameter.grad = None
    first, same, longer = gradients
    assert len(first) == len(multi.parameters("notes"))
    assert all(map(torch.equal, first, same))
    for mine, theirs in zip(first, longer, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=GRADIENTS[mode])


def test_dropout_does_not_depend_on_who_else_is_there(session_of: Open) -> None:
    losses = []
    for others in ({}, {"letters": batch(2, 21, 5)}):
        multi = MultiAdapter(load(session_of("llama", "plain")), configs(dropout=0.5), seeds=SEEDS)
        with torch.no_grad():  # first values give nothing
            for parameter in multi.parameters("notes"):
                parameter.fill_(0.05)
        losses.append(multi.losses({"notes": batch(2, 9, 0)} | others)["notes"].item())
        again = multi.losses({"notes": batch(2, 9, 0)} | others)["notes"].item()
        assert abs(again - losses[-1]) > 1e-4
        multi.model.eval()
        quiet = [multi.losses({"notes": batch(2, 9, 0)})["notes"].item() for _ in range(2)]
        assert quiet[0] == quiet[1]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_gradients_are_accumulated(session_of: Open) -> None:
    """Four batches of one sequence, divided by the tokens of all, are one batch of four."""
    multi = MultiAdapter(load(session_of("llama", "plain")), configs(dropout=0.0), seeds=SEEDS)
    names, ids = ("notes", "letters"), token_ids(4, 9)
    sum(multi.losses({name: {"input_ids": ids, "labels": ids} for name in names}).values()).backward()
    whole = [p.grad.clone() for name in names for p in multi.parameters(name) if p.grad is not None]
    for name in names:
        for parameter in multi.parameters(name):
            parameter.grad = None
    for row in ids.split(1):
        part = {"input_ids": row, "labels": row, "num_items_in_batch": 4 * 8}
        sum(multi.losses(dict.fromkeys(names, part)).values()).backward()
    parts = [p.grad for name in names for p in multi.parameters(name) if p.grad is not None]
    for mine, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16(autocast: bool, session_of: Open) -> None:
    """Of products, or of the adapters' own values: as alone, to its eight bits."""
    session = session_of("llama", "plain")
    multi, each = MultiAdapter(load(session), configs(dropout=0.0), seeds=SEEDS), batch(2, 9, 0)
    with torch.no_grad():
        for name in SEEDS:
            for parameter in multi.parameters(name):
                parameter.add_(0.02)
                parameter.data = parameter.data if autocast else parameter.data.bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        loss = multi.losses({"notes": each, "letters": batch(1, 5, 3)})["notes"]
        with multi.use("notes") as model:
            alone = model(**each).loss
    loss.backward()
    assert loss.item() == pytest.approx(alone.item(), abs=1e-2)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in multi.parameters("notes"))


def test_folders(session_of: Open, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Each adapter by itself, for `load_adapter` and for PEFT alone; and it generates here as there."""
    session = session_of("llama", "plain")
    multi, ids = MultiAdapter(load(session), configs(), seeds=SEEDS), token_ids()
    train_together(multi, batches(), dict.fromkeys(SEEDS, 0.05))
    multi.model.eval()
    found = multi.logits({name: {"input_ids": ids} for name in SEEDS})
    for name in SEEDS:
        multi.save(name, tmp_path / name, session, training={"steps": 4})
        names = {path.name for path in (tmp_path / name).iterdir()}
        assert names == {"README.md", "symbiosis.json", "adapter_config.json", "adapter_model.safetensors"}
        record = json.loads((tmp_path / name / "symbiosis.json").read_text())
        assert (record["weights"], record["training"]) == (session.manifest.weights, {"steps": 4})
        loaded = tenant_sdk.load_adapter(session.load_model(progress=False), tmp_path / name, session)
        local = peft.PeftModel.from_pretrained(load_local(checkpoint("llama")), tmp_path / name)
        with torch.no_grad():
            for model in (loaded, local):
                assert relative_error(model.eval()(input_ids=ids).logits, found[name]) < 1e-5
            with multi.use(name) as alone:
                assert relative_error(alone(input_ids=ids).logits, found[name]) < 1e-5
                tokens = alone.generate(input_ids=ids, max_new_tokens=4, do_sample=False)
        assert torch.equal(tokens, loaded.generate(input_ids=ids, max_new_tokens=4, do_sample=False))
    assert len({float(logits.detach().sum()) for logits in found.values()}) == 3
    assert all(p.requires_grad for name in SEEDS for p in multi.parameters(name))


def test_folders_of_other_names(session_of: Open, tmp_path: Path) -> None:
    session = session_of("llama", "plain")
    multi = MultiAdapter(load(session), {"default": LoraConfig(target_modules=["q_proj"])})
    multi.save("default", tmp_path / "deep" / "one", session)
    tenant_sdk.load_adapter(session.load_model(progress=False), tmp_path / "deep" / "one", session)
    with pytest.raises(ConfigurationError, match="adapter='other': the model has default"):
        tenant_sdk.save_adapter(multi.model, tmp_path / "two", session, adapter="other")


def test_what_diverges_is_named_and_the_others_go_on(session_of: Open) -> None:
    multi = MultiAdapter(load(session_of("llama", "plain")), configs(dropout=0.0), seeds=SEEDS)
    with torch.no_grad():
        multi.parameters("letters")[1].fill_(torch.nan)
    given = {name: batch(2, 9, 0) for name in SEEDS}
    for each in (given, {"letters": given["letters"]}):
        with pytest.raises(NonFiniteError, match="adapter letters") as caught:
            multi.losses(each)
        assert caught.value.adapters == ("letters",)
    del given["letters"]
    assert multi.losses(given).keys() == {"notes", "plans"}
    given["plans"]["num_items_in_batch"] = 0
    with pytest.raises(NonFiniteError, match="the loss of adapter plans") as caught:
        multi.losses(given)
    assert caught.value.adapters == ("plans",)


class Other(LoraConfig):
    """Another kind."""


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(target_modules=["q_proj"], use_dora=True), "use_dora=True"),
        (LoraConfig(target_modules=["q_proj"], bias="all"), "bias='all'"),
        (LoraConfig(target_modules=["q_proj"], lora_bias=True), "lora_bias=True"),
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]), "modules_to_save"),
        (LoraConfig(target_modules=["q_proj"], layer_replication=[(0, 2), (1, 2)]), "layer_replication"),
        (LoraConfig(target_modules=["q_proj"], inference_mode=True), "inference_mode=True"),
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "'pissa' reads base weights"),
        (peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[]), "IA3Config is no LoraConfig"),
        (Other(target_modules=["q_proj"]), "a Other is no LoraConfig"),
        (LoraConfig(target_modules=["embed_tokens"]), "embed_tokens is no linear layer"),
        (LoraConfig(target_modules=["no_such_layer"]), "LlamaForCausalLM does not take the adapters"),
    ],
)
def test_what_is_no_plain_lora_is_refused(config: Any, message: str, session_of: Open) -> None:
    model = session_of("llama", "plain").load_model(progress=False)
    names = [name for name, _ in model.named_modules()]
    fine = LoraConfig(target_modules=["v_proj"])
    for given in ({"fine": fine, "other": config}, {"other": config, "fine": fine}):
        with pytest.raises(ConfigurationError, match=message):
            MultiAdapter(model, given)
        assert [name for name, _ in model.named_modules()] == names
    # The model is as it was, and takes others.
    assert MultiAdapter(model, {"fine": LoraConfig(target_modules=["v_proj"])}).names == ("fine",)


def test_experts_are_refused(session_of: Open) -> None:
    config = LoraConfig(target_parameters=["mlp.experts.down_proj"], target_modules=[])
    with pytest.raises(ConfigurationError, match="target_parameters"):
        MultiAdapter(session_of("mixtral", "plain").load_model(progress=False), {"one": config})


def test_wrong_calls(session_of: Open) -> None:
    model, fine, ids = load(session_of("llama", "plain")), batch(2, 9, 0), token_ids()
    lora = LoraConfig(target_modules=["q_proj"])
    for arguments, message in (
        (({},), "give a LoraConfig for each"),
        (({"one": lora}, {"two": 1}), r"seeds=\['two'\]: no such"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            MultiAdapter(model, arguments[0], seeds=dict(*arguments[1:]))
    multi = MultiAdapter(model, {"one": lora})
    for given, message in (
        ({"two": fine}, "no adapter 'two'; there are one"),
        ({}, "there is no batch"),
        ({"one": {"input_ids": ids}}, "adapter one has no labels"),
        ({"one": fine | {"position_ids": ids}}, "has position_ids; possible are attention_mask"),
        ({"one": fine | {"labels": ids[:1]}}, "labels like them"),
        ({"one": {"input_ids": ids[:0], "labels": ids[:0]}}, "needs input_ids"),
        ({"one": {"labels": ids}}, "needs input_ids"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            multi.losses(given)  # type: ignore[arg-type]
    for call in (
        multi.parameters,
        lambda name: multi.use(name).__enter__(),
        lambda name: multi.save(name, "x", session_of("llama", "plain")),
    ):
        with pytest.raises(ConfigurationError, match="no adapter 'two'"):
            call("two")
    with pytest.raises(ConfigurationError, match="has adapters already"):
        MultiAdapter(multi.model, {"one": lora})
    model.gradient_checkpointing_enable()
    with pytest.raises(ConfigurationError, match="gradient_checkpointing_disable"):
        multi.losses({"one": fine})
    model.gradient_checkpointing_disable()
    model.loss_function = lambda logits, labels, **_: logits.sum()
    with pytest.raises(ConfigurationError, match="a loss of its own"):
        multi.losses({"one": fine})
    del model._loss_function
    model.config.output_router_logits = True
    with pytest.raises(ConfigurationError, match="a loss of its own"):
        multi.losses({"one": fine})
    assert multi.logits({"one": fine})["one"].shape == (2, 9, 128)


def test_the_document_s_example(
    serve: Callable[..., Executor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    root = Path(__file__).parents[2]
    document = (root / "docs" / "how-to" / "multi-adapter.md").read_text()
    _, program, _ = re.split("```(?:python)?\n", document)[:3]
    session = serve(root / "examples" / "base_model").connect()
    monkeypatch.setattr(tenant_sdk, "connect", lambda profile: session)
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    assert len(capsys.readouterr().out.splitlines()) == 2 * 4
    assert {path.name for path in (tmp_path / "out" / "multi").iterdir()} == {"small", "large"}


def test_the_name_is_there_when_it_is_asked_for() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        tenant_sdk.tuning.Nothing  # noqa: B018
