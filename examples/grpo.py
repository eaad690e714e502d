"""Reinforcement with TRL's GRPO: an adapter learns to write the fields of a note, from a reward alone.

`pip install trl` and run sft.py first; executors and tokens come from a profile, as in quickstart.py. The
reward counts the fields of an answer that are right. Texts are sampled here, through the same executors.
"""

import os
import sys

import datasets
import peft
from trl import GRPOConfig, GRPOTrainer

import tenant_sdk

# `symbiosis-provider serve examples/base_model --dev` makes this file.
PROFILE = os.environ.get("SYMBIOSIS_PROFILE", "symbiosis-dev/symbiosis.toml")
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 10


def right_fields(completions: list[str], fields: list[str], **_: object) -> list[float]:
    """The share of fields that are in the answer to the letter."""
    wanted = [each.split(";") for each in fields]
    return [
        sum(one in text for one in each) / len(each) for text, each in zip(completions, wanted, strict=True)
    ]


with tenant_sdk.connect(profile=PROFILE) as session:
    tokenizer = session.load_tokenizer()
    notes = datasets.Dataset.from_json("examples/data/note_fields_train.jsonl")
    model = peft.PeftModel.from_pretrained(session.load_model(), "out/sft/adapter", is_trainable=True)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=right_fields,
        args=GRPOConfig(
            "out/grpo",
            max_steps=STEPS,
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=32,
            learning_rate=1e-4,
            gradient_checkpointing=False,  # these texts are short: all fits
            bf16=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=notes.rename_column("completion", "fields"),
        processing_class=tokenizer,
    )
    trainer.train()
    rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
    print(f"reward: {rewards[0]:.3f} at the start, {rewards[-1]:.3f} at the end", session.stats)
    trainer.save_model("out/grpo/adapter")
