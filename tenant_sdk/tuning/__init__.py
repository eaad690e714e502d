"""What the commands `finetune` and `generate` do; several adapters in one batch; resuming a training."""
