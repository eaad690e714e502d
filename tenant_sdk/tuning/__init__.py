"""What the commands `finetune` and `generate` do; several adapters in one batch; resuming a training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenant_sdk.tuning.multi_adapter import MultiAdapter
    from tenant_sdk.tuning.resuming import ExactResume

__all__ = ["ExactResume", "MultiAdapter"]

_LAZY = {"ExactResume": "tenant_sdk.tuning.resuming", "MultiAdapter": "tenant_sdk.tuning.multi_adapter"}


def __getattr__(name: str) -> Any:
    """See PEP 562; what they need, torch and peft, takes seconds to import."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
