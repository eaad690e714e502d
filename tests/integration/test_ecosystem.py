"""Things that users of transformers, PEFT and accelerate do with a model besides plain training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from commands import BASE_MODEL
from conftest import Executor, relative_error
from parity import add_lora, fixed_result, gradients, load_local, token_ids, virtual_layers, worst_error
from torch import distributed
from torch.nn.utils import parametrizations, prune
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

import tenant_sdk

# float32 in another order of additions.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture
def remote(session: tenant_sdk.Session) -> PreTrainedModel:
    return session.load_model(progress=False)


@pytest.fixture
def local(folder: Path) -> PreTrainedModel:
    return load_local(folder)


class Rows(Dataset):  # type: ignore[type-arg]
    """Eight rows of tokens to be repeated."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = token_ids(rows=1, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def trainer(model: Any, folder: Path, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }
    arguments = TrainingArguments(str(folder), **(defaults | options))
    return Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows())


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """Accelerate keeps the precision of the last Trainer for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    "options", [{"cache_implementation": "static"}, {"max_length": 128, "eos_token_id": 2}]
)
def test_other_caches_and_ends(
    options: dict[str, Any], remote: PreTrainedModel, local: PreTrainedModel
) -> None:
    ids = token_ids()
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    ways = {"do_sample": False} | options
    if "max_length" not in options:
        ways["max_new_tokens"] = 8
    got, expected = (model.generate(**inputs, **ways) for model in (remote, local))
    assert torch.equal(got, expected)


def test_assisted_generation(
    session: tenant_sdk.Session, remote: PreTrainedModel, local: PreTrainedModel
) -> None:
    """A tenant's adapter drafts for the base model: two models of one session, in turn."""
    ids = token_ids(rows=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8}
    assistant = session.load_model(progress=False)
    got = remote.generate(**inputs, do_sample=False, assistant_model=assistant)
    assert torch.equal(got, local.generate(**inputs, do_sample=False))


def test_changing_precision_there_and_back(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    twin = copy.deepcopy(remote).to(torch.bfloat16)
    # 8 bits in every activation of two blocks.
    assert relative_error(fixed_result(twin, token_ids()).float(), fixed_result(local, token_ids())) < 0.02
    assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}
    assert relative_error(fixed_result(remote, token_ids()), fixed_result(local, token_ids())) < TOLERANCE
    wide = remote.double()
    assert fixed_result(wide, token_ids()).dtype == torch.float64
    assert relative_error(fixed_result(wide, token_ids()), fixed_result(local, token_ids())) < TOLERANCE


def test_preparing_a_narrow_model_for_training(session: tenant_sdk.Session) -> None:
    model = session.load_model(dtype=torch.bfloat16, progress=False)
    prepared = peft.prepare_model_for_kbit_training(model)
    assert {p.dtype for p in prepared.parameters()} == {torch.float32}
    assert len(virtual_layers(prepared)) == 14
    assert fixed_result(prepared, token_ids()).dtype == torch.float32


def test_more_tokens(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    """New rows of embeddings and head are the tenant's own matter."""
    for model in (remote, local):
        torch.manual_seed(0)
        model.resize_token_embeddings(136, mean_resizing=False)
    got, expected = (fixed_result(model, token_ids()) for model in (remote, local))
    assert got.shape[-1] == 136
    assert relative_error(got, expected) < TOLERANCE


def test_accelerate(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    expected = fixed_result(local, token_ids())
    prepared = accelerate.Accelerator(cpu=True).prepare(remote)
    assert relative_error(fixed_result(prepared, token_ids()), expected) < TOLERANCE
    dispatched = accelerate.dispatch_model(remote, {"": "cpu"})
    assert relative_error(fixed_result(dispatched, token_ids()), expected) < TOLERANCE


def test_offloading_to_the_host(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    """It moves what is here; of a frozen weight nothing is."""
    accelerate.cpu_offload(remote, execution_device="cpu")
    assert remote.lm_head.weight.is_meta
    assert relative_error(fixed_result(remote, token_ids()), fixed_result(local, token_ids())) < TOLERANCE


def test_its_own_state_can_be_loaded_again(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    before = copy.deepcopy(remote.state_dict())
    with torch.no_grad():
        remote.model.norm.weight.fill_(2)
    remote.load_state_dict(before)
    assert relative_error(fixed_result(remote, token_ids()), fixed_result(local, token_ids())) < TOLERANCE


SKIP = "skip parameters that do not require gradients"
REFUSED: list[tuple[str, Callable[[PreTrainedModel, Path], Any]]] = [
    ("nothing to offload", lambda m, folder: accelerate.disk_offload(m, folder, execution_device="cpu")),
    ("Save the adapter alone", lambda m, _: m.share_memory()),
    ("Save the adapter alone", lambda m, folder: accelerate.Accelerator(cpu=True).save_model(m, folder)),
    (SKIP, lambda m, _: torch.nn.utils.get_total_norm(list(m.parameters()))),
    (SKIP, lambda m, _: torch.stack([p.norm() for p in m.parameters()])),
    (SKIP, lambda m, _: torch._foreach_norm(list(m.parameters()))),
    (SKIP, lambda m, _: all(p.isfinite().all() for p in m.parameters())),
    (SKIP, lambda m, _: torch.nn.utils.parameters_to_vector(m.parameters())),
    (SKIP, lambda m, _: torch.nn.utils.vector_to_parameters(torch.zeros(1 << 17), m.parameters())),
    (SKIP, lambda m, _: m.apply(m._init_weights)),
    (SKIP, lambda m, _: m.to_empty(device="cpu")),
    (SKIP, lambda m, _: averaged(m)),
    (SKIP, lambda m, _: averaged(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))),
    (SKIP, lambda m, _: {name: p.clone() for name, p in m.named_parameters()}),
    ("keep the layer local", lambda m, _: prune.l1_unstructured(_layer(m), "weight", amount=0.2)),
    ("keep the layer local", lambda m, _: parametrizations.weight_norm(_layer(m))),
    ("keep the layer local", lambda m, _: parametrizations.spectral_norm(_layer(m))),
]


def _layer(model: PreTrainedModel) -> torch.nn.Module:
    layer: torch.nn.Module = model.model.layers[0].mlp.up_proj
    return layer


def averaged(model: PreTrainedModel, **options: Any) -> None:
    average = torch.optim.swa_utils.AveragedModel(model, **options)
    average.update_parameters(model)
    average.update_parameters(model)


def test_what_goes_through_all_parameters_is_told_to_skip_the_frozen(
    remote: PreTrainedModel, tmp_path: Path
) -> None:
    for words, use in REFUSED:
        with pytest.raises(tenant_sdk.RemoteWeightUnavailable, match=words):
            use(copy.deepcopy(remote), tmp_path)


def test_data_parallel_training(remote: PreTrainedModel, local: PreTrainedModel, tmp_path: Path) -> None:
    """As the refusal says: without sending all parameters around first."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        adapted = add_lora(remote)
        with pytest.raises(tenant_sdk.RemoteWeightUnavailable, match="init_sync=False"):
            torch.nn.parallel.DistributedDataParallel(adapted)
        model = torch.nn.parallel.DistributedDataParallel(adapted, init_sync=False)
        got, expected = gradients(model, token_ids()), gradients(add_lora(local), token_ids())
        got = {name.removeprefix("module."): gradient for name, gradient in got.items()}
        assert worst_error(got, expected) < TOLERANCE
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("method", ["DPO", "KTO"])
def test_a_reference_that_is_computed_before(
    method: str, serve: Callable[..., Executor], tmp_path: Path
) -> None:
    """TRL keeps it under a hash of all weights, which are not here; the refusal says which option that is."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    datasets = pytest.importorskip("datasets")
    columns: dict[str, list[Any]] = {"prompt": ["Mon", "Tue"]}
    if method == "DPO":
        columns |= {"chosen": [" 6 January", " 4 March"], "rejected": [" a", " b"]}
    else:
        columns |= {"completion": [" 6 January", " 4 March"], "label": [True, False]}
    with serve(BASE_MODEL).connect() as session:
        tokenizer = session.load_tokenizer()

        def trainer(**options: Any) -> Any:
            arguments = getattr(trl, f"{method}Config")(
                *(str(tmp_path),),
                max_steps=1,
                per_device_train_batch_size=2,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                **options,
            )
            model = add_lora(session.load_model(progress=False), task_type="CAUSAL_LM")
            data = datasets.Dataset.from_dict(columns)
            return getattr(trl, f"{method}Trainer")(
                model=model, args=arguments, train_dataset=data, processing_class=tokenizer
            )

        with pytest.raises(
            tenant_sdk.RemoteWeightUnavailable, match="precompute_ref_log_probs=True: leave it"
        ):
            trainer(precompute_ref_log_probs=True)
        assert trainer().train().training_loss > 0


def test_the_whole_state_cannot_be_loaded(remote: PreTrainedModel, local: PreTrainedModel) -> None:
    """It would silently be lost."""
    with pytest.raises(RuntimeError, match="stays with the provider"):
        remote.load_state_dict(local.state_dict())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_trainer_with_checkpointed_activations(
    precision: str, remote: PreTrainedModel, local: PreTrainedModel, tmp_path: Path
) -> None:
    curves = []
    for model in (remote, local):
        run = trainer(
            add_lora(model, task_type="CAUSAL_LM"),
            tmp_path,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            bf16=precision == "bfloat16",
        )
        run.train()
        curves.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
    # Four AdamW steps; in bfloat16 the local side rounds its weights to 8 bits as well.
    assert curves[0] == pytest.approx(curves[1], abs=1e-3 if precision == "float32" else 0.05)
    assert len(curves[0]) == 4


def test_trainer_goes_back_to_its_best_adapter(remote: PreTrainedModel, tmp_path: Path) -> None:
    run = trainer(
        add_lora(remote, task_type="CAUSAL_LM"),
        tmp_path,
        learning_rate=0.3,  # gets worse
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    run.train()
    evaluations = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 4
    assert run.evaluate()["eval_loss"] == pytest.approx(min(evaluations), abs=1e-4)


def test_trainer_without_an_adapter_cannot_save(remote: PreTrainedModel, tmp_path: Path) -> None:
    """Norms and embeddings can be trained, but a checkpoint of the whole model cannot be written."""
    run = trainer(remote, tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
    with pytest.raises(tenant_sdk.RemoteWeightUnavailable, match="Save the adapter alone"):
        run.train()
