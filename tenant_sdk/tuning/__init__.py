"""What the commands `finetune` and `generate` do."""
