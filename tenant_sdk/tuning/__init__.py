"""The commands `finetune` and `generate`; several adapters in one batch; resuming a training."""
