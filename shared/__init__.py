"""The wire contract between tenant and provider: messages, framing, errors, checkpoints."""

DISTRIBUTION = "symbiosis-executor"
