"""Supervised fine-tuning with TRL: learn to write a note's fields, under one-time masks.

`pip install trl` first; executors and tokens come from a profile, as in quickstart.py.
"""

import os
import sys

import datasets
import peft
from trl import SFTConfig, SFTTrainer

import tenant_sdk

# `symbiosis-provider serve examples/base_model --dev` makes this file.
PROFILE = os.environ.get("SYMBIOSIS_PROFILE", "symbiosis-dev/symbiosis.toml")
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 120

with tenant_sdk.connect(profile=PROFILE) as session:
    tokenizer = session.load_tokenizer()
    # Prompts and completions: the loss is on the completions alone.
    records = datasets.Dataset.from_json("examples/data/note_fields_train.jsonl")
    trainer = SFTTrainer(
        model=session.load_model(),
        args=SFTConfig(
            "out/sft",
            max_steps=STEPS,
            per_device_train_batch_size=8,
            learning_rate=5e-3,
            gradient_checkpointing=False,  # these texts are short: all fits
            bf16=False,
            dataloader_pin_memory=False,
            save_strategy="no",
            logging_steps=max(1, STEPS // 10),
            report_to="none",
        ),
        train_dataset=records,
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    trainer.train()
    prompt = tokenizer(records[0]["prompt"], return_tensors="pt")
    answer = trainer.model.eval().generate(**prompt, max_new_tokens=40, do_sample=False)
    print(tokenizer.decode(answer[0], skip_special_tokens=True), session.stats, sep="\n")
    trainer.save_model("out/sft/adapter")
