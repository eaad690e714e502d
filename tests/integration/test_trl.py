"""TRL's trainers, unmodified, with a remote model: the losses are those of local training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from commands import BASE_MODEL
from conftest import Executor
from ring_sessions import one_time
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, set_seed

trl = pytest.importorskip("trl", reason="trl is not installed")
datasets = pytest.importorskip("datasets")

# Products on the ring differ by some 1e-3 of a layer's output; three steps of AdamW.
TOLERANCE = 2e-3
NOTES = [
    "Jonah, mare, sick since noon",
    "Ruth, tabby, limps",
    "Boaz, ram, will not eat",
    "Leah, beagle, itches",
]
PAIRS = {"prompt": NOTES, "chosen": [" horse", " cat", " sheep", " dog"], "rejected": [" cat", " dog"] * 2}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
)
CHATS = [
    [{"role": "user", "content": note}, {"role": "assistant", "content": answer}]
    for note, answer in zip(NOTES, PAIRS["chosen"], strict=True)
]


def reward(completions: list[str], **_: object) -> list[float]:
    """Longer words are better."""
    return [len(text) / 10 for text in completions]


SAMPLED = {"num_generations": 2, "max_completion_length": 6, "learning_rate": 1e-3}
# Name of the trainer, what it is given besides, and its data.
TRAININGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sft, packed": ("SFT", {"packing": True, "max_length": 16}, {"text": NOTES}),
    "sft, assistant only": ("SFT", {"assistant_only_loss": True}, {"messages": CHATS}),
    "dpo": ("DPO", {}, PAIRS),
    "kto": ("KTO", {}, {"prompt": NOTES, "completion": PAIRS["chosen"], "label": [True, False] * 2}),
    "reward": ("Reward", {}, PAIRS),
    "rloo": ("RLOO", SAMPLED, {"prompt": NOTES}),
    "grpo": ("GRPO", SAMPLED, {"prompt": NOTES}),
}


def losses(name: str, model: Any, folder: Path) -> list[float]:
    """Of three steps of a trainer, with LoRA on all linear layers."""
    kind, options, data = TRAININGS[name]
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    set_seed(0)
    task = "SEQ_CLS" if kind == "Reward" else "CAUSAL_LM"
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type=task))
    arguments = getattr(trl, f"{kind}Config")(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    sampled = {"reward_funcs": reward} if options is SAMPLED else {}
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model,
        args=arguments,
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer,
        **sampled,
    )
    trainer.train()
    history = trainer.state.log_history
    return [entry[key] for entry in history for key in ("loss", "reward", "grad_norm") if key in entry]


@pytest.mark.parametrize("name", TRAININGS)
def test_losses_are_those_of_local_training(
    name: str, serve: Callable[..., Executor], tmp_path: Path
) -> None:
    classifies = TRAININGS[name][0] == "Reward"
    kind = AutoModelForSequenceClassification if classifies else AutoModelForCausalLM
    more = {"num_labels": 1} if classifies else {}
    local = kind.from_pretrained(BASE_MODEL, dtype=torch.float32, **more)
    head = copy.deepcopy(local.score.state_dict()) if classifies else {}
    expected = losses(name, local, tmp_path / "local")
    assert len(expected) >= 6
    with one_time(*(serve(BASE_MODEL, numerics="ring") for _ in range(2))) as session:
        if classifies:  # its head is new, and not the executor's
            remote = kind.from_pretrained(BASE_MODEL, dtype=torch.float32, **more)
            remote.score.load_state_dict(head)
            session.attach(remote)
        else:
            remote = session.load_model(progress=False)
        got = losses(name, remote, tmp_path / "remote")
    assert got == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)
