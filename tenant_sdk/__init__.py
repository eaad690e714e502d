"""The tenant's side: ordinary transformers and PEFT code whose frozen layers run on an executor."""

import os

# OpenMP threads that spin while a request is under way take the processor from an executor on the
# same machine. Works if this package is imported before torch, whose runtime reads it once.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from shared.errors import (
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
from tenant_sdk.connection.remote import Stats
from tenant_sdk.opening import connect
from tenant_sdk.products.fingerprints import write_fingerprints
from tenant_sdk.products.noise_bank import NoiseBankOptions
from tenant_sdk.session import Session

__all__ = [
    "AuthenticationError",
    "CheckpointError",
    "ConfigurationError",
    "ConnectError",
    "ConnectionLost",
    "ModelMismatch",
    "NoiseBankOptions",
    "NonFiniteError",
    "ProtocolVersionError",
    "RemoteWeightUnavailable",
    "RequestRefused",
    "RequestTimeout",
    "Session",
    "Stats",
    "StorageError",
    "SymbiosisError",
    "TlsError",
    "VerificationError",
    "WireError",
    "connect",
    "write_fingerprints",
]
