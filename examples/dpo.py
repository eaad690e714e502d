"""Preference tuning with TRL: sft.py's adapter learns to prefer a note's own fields to another note's.

`pip install trl` and run sft.py first; executors and tokens come from a profile, as in quickstart.py.
"""

import os
import sys

import datasets
import peft
from trl import DPOConfig, DPOTrainer

import tenant_sdk

# `symbiosis-provider serve examples/base_model --dev` makes this file.
PROFILE = os.environ.get("SYMBIOSIS_PROFILE", "symbiosis-dev/symbiosis.toml")
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 30

with tenant_sdk.connect(profile=PROFILE) as session:
    tokenizer = session.load_tokenizer()
    notes = datasets.Dataset.from_json("examples/data/note_fields_train.jsonl")
    fields = notes["completion"][:]
    pairs = notes.rename_column("completion", "chosen").add_column("rejected", [*fields[1:], fields[0]])
    base = session.load_model()
    model = peft.PeftModel.from_pretrained(base, "out/sft/adapter", is_trainable=True)
    trainer = DPOTrainer(
        model=model,  # the reference is a copy of its adapter on the same base model
        args=DPOConfig(
            "out/dpo",
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            gradient_checkpointing=False,  # these texts are short: all fits
            bf16=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=pairs,
        processing_class=tokenizer,
    )
    trainer.train()
    rewards = [log["rewards/margins"] for log in trainer.state.log_history if "rewards/margins" in log]
    print(f"margins of rewards: {rewards[0]:.3f} at the start, {rewards[-1]:.3f} at the end", session.stats)
    trainer.save_model("out/dpo/adapter")
