"""Fine-tune on private notes under one-time masks, generate, save a standard adapter."""

import os
from pathlib import Path

import peft
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

import tenant_sdk

with tenant_sdk.connect(
    os.environ["SYMBIOSIS_URL"],
    token=os.environ["SYMBIOSIS_TOKEN"],
    ca=os.environ["SYMBIOSIS_CA"],
    mask_sources=[os.environ["SYMBIOSIS_MASK_SOURCE"]],  # of another operator; or local:FOLDER
    mask_source_token=os.environ.get("SYMBIOSIS_MASK_TOKEN"),  # its own: operators share neither tokens
    mask_source_ca=os.environ.get("SYMBIOSIS_MASK_CA"),  # nor authorities
) as session:
    tokenizer = session.load_tokenizer()
    lora = peft.LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(session.load_model(), lora)  # the frozen layers stay with the executor
    notes = Path("examples/data/clinic_notes_train.txt").read_text().split("\n\n")
    arguments = TrainingArguments("out/quickstart", max_steps=10, learning_rate=1e-3, report_to="none")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    Trainer(model, arguments, collator, [tokenizer(note) for note in notes]).train()
    answer = model.generate(**tokenizer("Plan:", return_tensors="pt"), max_new_tokens=20)
    print(tokenizer.decode(answer[0]), session.stats, sep="\n")
    model.save_pretrained("out/quickstart/adapter")
