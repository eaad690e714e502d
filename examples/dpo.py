"""Preference tuning with TRL: prefer a note's own fields to those of another note, under one-time masks.

`pip install trl` first; the environment variables are those of quickstart.py. An adapter that was made by
sft.py is a good start: name its folder in SYMBIOSIS_ADAPTER.
"""

import os
import sys

import datasets
import peft
from trl import DPOConfig, DPOTrainer

import tenant_sdk

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 30

with tenant_sdk.connect(
    os.environ["SYMBIOSIS_URL"],
    token=os.environ["SYMBIOSIS_TOKEN"],
    ca=os.environ["SYMBIOSIS_CA"],
    mask_sources=[os.environ["SYMBIOSIS_MASK_SOURCE"]],
    mask_source_token=os.environ.get("SYMBIOSIS_MASK_TOKEN"),
    mask_source_ca=os.environ.get("SYMBIOSIS_MASK_CA"),
) as session:
    tokenizer = session.load_tokenizer()
    notes = datasets.Dataset.from_json("examples/data/note_fields_train.jsonl")
    prompts, fields = notes["prompt"][:], notes["completion"][:]
    pairs = datasets.Dataset.from_dict(
        {"prompt": prompts, "chosen": fields, "rejected": [*fields[1:], fields[0]]}
    )
    model = session.load_model()
    if folder := os.environ.get("SYMBIOSIS_ADAPTER"):
        model = peft.PeftModel.from_pretrained(model, folder, is_trainable=True)
    else:
        lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, lora)
    trainer = DPOTrainer(
        model=model,  # and the same without the new adapter, or with the old one, is the reference
        args=DPOConfig(
            "out/dpo",
            max_steps=STEPS,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            gradient_checkpointing=False,  # which would ask the executor for every product twice
            bf16=False,
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
