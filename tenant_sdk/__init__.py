"""The tenant's side: ordinary transformers and PEFT code whose frozen layers run on an executor."""

import importlib
import os
from typing import TYPE_CHECKING, Any

from symbiosis_executor import NAME, check_package

DISTRIBUTION = NAME
check_package("shared")

# OpenMP threads that spin while a request is under way take the processor from an executor on the
# same machine. Works if this package is imported before torch, whose runtime reads it once.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Where torch.compile keeps code. torch's default is a name in /tmp, which another user may take first.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "symbiosis", "compiled"),
)

from shared.errors import (  # noqa: E402 - of this project, which is checked before
    AuthenticationError,
    CheckpointError,
    ConfigurationError,
    ConnectError,
    ConnectionLost,
    ModelMismatch,
    NonFiniteError,
    ProtocolVersionError,
    RemoteWeightUnavailable,
    RequestRefused,
    RequestTimeout,
    StorageError,
    SymbiosisError,
    TlsError,
    VerificationError,
    WireError,
)

if TYPE_CHECKING:
    from shared.secrets import Secret
    from tenant_sdk.composition import connect
    from tenant_sdk.connection.stats import Stats
    from tenant_sdk.products.bank_options import NoiseBankOptions
    from tenant_sdk.products.fingerprints import write_fingerprints
    from tenant_sdk.sequences.tuning import LongTuning, long_tuning
    from tenant_sdk.session import Session
    from tenant_sdk.tuning.folders import load_adapter, save_adapter

__all__ = [
    "AuthenticationError",
    "CheckpointError",
    "ConfigurationError",
    "ConnectError",
    "ConnectionLost",
    "LongTuning",
    "ModelMismatch",
    "NoiseBankOptions",
    "NonFiniteError",
    "ProtocolVersionError",
    "RemoteWeightUnavailable",
    "RequestRefused",
    "RequestTimeout",
    "Secret",
    "Session",
    "Stats",
    "StorageError",
    "SymbiosisError",
    "TlsError",
    "VerificationError",
    "WireError",
    "connect",
    "load_adapter",
    "long_tuning",
    "save_adapter",
    "write_fingerprints",
]

# What needs torch and transformers, which take seconds to import: imported when it is first used.
_LAZY = {
    "LongTuning": "tenant_sdk.sequences.tuning",
    "NoiseBankOptions": "tenant_sdk.products.bank_options",
    "Secret": "shared.secrets",
    "Session": "tenant_sdk.session",
    "Stats": "tenant_sdk.connection.stats",
    "connect": "tenant_sdk.composition",
    "load_adapter": "tenant_sdk.tuning.folders",
    "long_tuning": "tenant_sdk.sequences.tuning",
    "save_adapter": "tenant_sdk.tuning.folders",
    "write_fingerprints": "tenant_sdk.products.fingerprints",
}


def __getattr__(name: str) -> Any:
    """See PEP 562."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """See PEP 562."""
    return sorted({*globals(), *__all__})
