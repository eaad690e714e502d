"""What the commands `finetune` and `generate` do, and several adapters trained in one batch."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tenant_sdk.tuning.multi_adapter import MultiAdapter

__all__ = ["MultiAdapter"]


def __getattr__(name: str) -> Any:
    """See PEP 562; what it needs, torch and peft, takes seconds to import."""
    if name != "MultiAdapter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tenant_sdk.tuning.multi_adapter import MultiAdapter

    return MultiAdapter
