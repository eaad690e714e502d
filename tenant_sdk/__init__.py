"""The tenant's side: ordinary transformers and PEFT code whose frozen layers run on an executor."""

from typing import TYPE_CHECKING

from symbiosis_executor import NAME, check_package, published

DISTRIBUTION = NAME
check_package("shared")

from shared.user_folders import keep_compiled_code  # noqa: E402
from tenant_sdk.spinning import before_torch  # noqa: E402 - of this project, which is checked before

keep_compiled_code()
before_torch()

from shared.errors import (  # noqa: E402
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
    from tenant_sdk.connection.stats import Stats
    from tenant_sdk.drafts.decoding import Draft, DraftPace
    from tenant_sdk.drafts.folder import load_draft
    from tenant_sdk.products.bank_options import NoiseBankOptions
    from tenant_sdk.products.fingerprints import write_fingerprints
    from tenant_sdk.session.opening import connect
    from tenant_sdk.session.session import Session
    from tenant_sdk.tuning.folders import load_adapter, save_adapter
    from tenant_sdk.tuning.long_sequences import LongTuning, long_tuning
    from tenant_sdk.tuning.multi_adapter import MultiAdapter
    from tenant_sdk.tuning.resuming import ExactResume

__all__ = [
    "AuthenticationError",
    "CheckpointError",
    "ConfigurationError",
    "ConnectError",
    "ConnectionLost",
    "Draft",
    "DraftPace",
    "ExactResume",
    "LongTuning",
    "ModelMismatch",
    "MultiAdapter",
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
    "load_draft",
    "long_tuning",
    "save_adapter",
    "write_fingerprints",
]

__getattr__, __dir__ = published(
    __name__,
    {
        "Draft": "tenant_sdk.drafts.decoding",
        "DraftPace": "tenant_sdk.drafts.decoding",
        "ExactResume": "tenant_sdk.tuning.resuming",
        "LongTuning": "tenant_sdk.tuning.long_sequences",
        "MultiAdapter": "tenant_sdk.tuning.multi_adapter",
        "NoiseBankOptions": "tenant_sdk.products.bank_options",
        "Secret": "shared.secrets",
        "Session": "tenant_sdk.session.session",
        "Stats": "tenant_sdk.connection.stats",
        "connect": "tenant_sdk.session.opening",
        "load_adapter": "tenant_sdk.tuning.folders",
        "load_draft": "tenant_sdk.drafts.folder",
        "long_tuning": "tenant_sdk.tuning.long_sequences",
        "save_adapter": "tenant_sdk.tuning.folders",
        "write_fingerprints": "tenant_sdk.products.fingerprints",
    },
)
