"""Fine-tune on private notes under one-time masks, generate, save a standard adapter."""

import os
from pathlib import Path

import peft
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

import tenant_sdk

# The executors' addresses, and where the tokens are. `symbiosis-provider serve MODEL --dev` makes this file.
profile = os.environ.get("SYMBIOSIS_PROFILE", "symbiosis-dev/symbiosis.toml")
with tenant_sdk.connect(profile=profile) as session:
    tokenizer = session.load_tokenizer()
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(session.load_model(), lora)  # the frozen layers stay with the executor
    notes = Path("examples/data/clinic_notes_train.txt").read_text().split("\n\n")
    arguments = TrainingArguments("out/quickstart", max_steps=10, learning_rate=1e-3, report_to="none")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model, arguments, collator, [tokenizer(note) for note in notes]).train()
    answer = model.generate(**tokenizer("Plan:", return_tensors="pt"), max_new_tokens=20)
    print(tokenizer.decode(answer[0]), session.stats, sep="\n")
    tenant_sdk.save_adapter(model, "out/quickstart/adapter", session)
