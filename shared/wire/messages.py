"""The control messages: typed, strict JSON (``shared/PROTOCOL.md``, "Control messages")."""

from __future__ import annotations

import hashlib
import math
from typing import TypeVar

import msgspec

from shared.encoded import UNREADABLE
from shared.errors import WireError
from shared.wire.header import DTYPE_NAMES

# The files of a checkpoint folder that a tenant may ask for, and the most bytes that each may have.
# Both sides check names against this list, so neither a curious tenant nor a hostile executor can
# name any other path.
TENANT_FILES = {
    "config.json": 1 << 20,
    "generation_config.json": 1 << 16,
    "tokenizer.json": 64 << 20,
    "tokenizer_config.json": 8 << 20,
    "special_tokens_map.json": 1 << 20,
    "chat_template.jinja": 1 << 20,
}


MAX_ROW_BYTES = 4 << 20  # of a parameter's row, where its axes allow that


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all control messages."""


class Hello(Message, frozen=True):
    """First message of a tenant."""

    client: str  # name and version, for the log


class Member(Message, frozen=True, omit_defaults=True):
    """One frozen layer: ``y = x W^T`` with W of shape [outputs, inputs of the group]."""

    name: str  # module path below the base model, e.g. "layers.0.self_attn.q_proj"
    outputs: int
    tensor: str  # name of the weight in the checkpoint's safetensors files; made: of the parameter
    # True: stored, or made, as [inputs, outputs] (Conv1D). What a factory makes is sent though it is usual.
    transposed: bool = msgspec.field(default_factory=bool)
    made: bool = False  # transformers converts tensors of the checkpoint to it: merges, cuts, dequantises
    expert: int | None = None  # the weight is this one along the first of three axes


class GroupInfo(Message, frozen=True):
    """Layers that receive the same tensor. The group's id is its position in the manifest."""

    inputs: int
    members: tuple[Member, ...]
    head: bool = False  # the output head, which a tenant uses only with offload_head=True
    # Ring numerics: ``Bounds`` of all members together, so that rows fit their products. None: elsewhere.
    bounds: tuple[int, int] | None = None

    @property
    def of_expert(self) -> bool:
        """Whether it is one expert of a mixture, which has no other member (``validate_manifest``)."""
        return self.members[0].expert is not None


class ParameterInfo(Message, frozen=True):
    """A parameter or persistent buffer that the tenant holds."""

    name: str  # full name in the transformers model's state_dict
    shape: tuple[int, ...]
    dtype: str  # a name in DTYPE_NAMES: the checkpoint's own
    sha256: str  # of its dtype and shape, and its bytes as the checkpoint stores them, or as they are made

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return math.prod(self.shape) * DTYPE_NAMES[self.dtype].itemsize

    @property
    def rows(self) -> tuple[int, int]:
        """How many rows it is fetched by, and how many numbers each has.

        These are rows of the first axis; or of the first axes, if a row would have more than
        ``MAX_ROW_BYTES``, as those of experts do.
        """
        size, axes = DTYPE_NAMES[self.dtype].itemsize, 1
        while axes < len(self.shape) - 1 and math.prod(self.shape[axes:]) * size > MAX_ROW_BYTES:
            axes += 1
        return math.prod(self.shape[:axes]), math.prod(self.shape[axes:])


class FileInfo(Message, frozen=True):
    """A file of the checkpoint folder; ``name`` is one of TENANT_FILES."""

    name: str
    size: int
    sha256: str


class Limits(Message, frozen=True):
    """What this executor accepts; the SDK splits larger requests."""

    max_message_bytes: int  # payload of any message, either way
    max_rows: int  # rows of one product
    max_in_flight: int = 16  # requests of one session in flight; further ones wait to be read


class Manifest(Message, frozen=True, omit_defaults=True):
    """Everything a tenant needs to know about an executor; the payload of WELCOME."""

    server: str
    model: str
    architecture: str  # transformers class name
    base_prefix: str  # prefix of the base model in that class, e.g. "model"
    weights: str  # SHA-256 over the served weights, see Checkpoint.weights_digest
    digest: str  # SHA-256 over those and all that tenants download, see ``digest_of``
    numerics: str
    wire_dtypes: tuple[str, ...]
    limits: Limits
    groups: tuple[GroupInfo, ...]
    parameters: tuple[ParameterInfo, ...]
    unavailable: tuple[str, ...]  # tenant-side parameters that this executor cannot supply
    files: tuple[FileInfo, ...]
    recorded: bool = False  # what tenants send is written to a transcript, for an audit
    part: tuple[int, int] | None = None  # only groups [first, stop) are served here, the others elsewhere

    def serves(self, group: int) -> bool:
        """Returns whether a group's products are computed here."""
        first, stop = self.part or (0, len(self.groups))
        return first <= group < stop


def digest_of(manifest: Manifest) -> str:
    """Returns the SHA-256 over what makes two models the same.

    This is weights, layers, parameters, files and architecture: a pinned digest pins every byte that a tenant
    downloads. It does not depend on numerics, limits, the head, or the part of the groups that is served.
    """
    what = (
        manifest.weights,
        manifest.architecture,
        manifest.base_prefix,
        sorted(
            member_identity(member, group.inputs)
            for group in manifest.groups
            if not group.head
            for member in group.members
        ),
        sorted((each.name, each.dtype, each.shape, each.sha256) for each in manifest.parameters),
        sorted((each.name, each.size, each.sha256) for each in manifest.files),
    )
    return hashlib.sha256(msgspec.json.encode(what)).hexdigest()


def member_identity(member: Member, inputs: int) -> tuple[str | bool | int, ...]:
    """Returns what makes two layers the same: name, shape, and how the checkpoint gives the weight."""
    stored = (member.name, member.tensor, member.transposed, inputs, member.outputs)
    if not member.made and member.expert is None:
        return stored
    return *stored, member.made, -1 if member.expert is None else member.expert


class Fetch(Message, frozen=True):
    """Asks for rows [start, stop): of a parameter (``ParameterInfo.rows``), of scales, or bytes of a file."""

    kind: str  # "parameter" | "scales" | "file"
    name: str  # of scales: the group's id in decimal
    start: int
    stop: int


class ErrorInfo(Message, frozen=True):
    """The payload of ERROR."""

    code: str
    message: str
    retry_after: float | None = None


M = TypeVar("M", bound=Message)


def encode(message: Message) -> bytes:
    """Returns a control message as UTF-8 JSON."""
    return msgspec.json.encode(message)


def decode(data: bytes | bytearray | memoryview, kind: type[M]) -> M:
    """Parse a control message strictly.

    Raises:
        WireError: ``control_message``, if it is not JSON or not exactly of this kind.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        # Cut, because it may quote the peer's own field names, which are as long as the peer likes.
        reason = str(error)[:200]
        raise WireError("control_message", f"not a valid {kind.__name__} message: {reason}") from error
