"""Fingerprint files: data for verification from a checkpoint that the tenant trusts.

A file holds, for every linear layer, secret random challenges, their products with the layer's integer
planes, its scales, and what bounds depend on; of everything else that a tenant downloads the SHA-256.
Whoever knows the challenges can forge answers, so the file is encrypted and authenticated (Fernet) under a
key that is shown once and kept elsewhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch
from cryptography.fernet import Fernet, InvalidToken
from safetensors import SafetensorError
from safetensors.torch import load, save

from shared.atomic import write_atomically
from shared.checkpoint import Checkpoint
from shared.errors import CheckpointError, ConfigurationError, Metavar, ModelMismatch
from shared.ownership import check_own
from shared.ring.fixed_point import Bounds, quantize_weight, squared_norms
from shared.ring.product import PlaneProducts
from shared.wire.header import RINGS, Direction, member_indices
from shared.wire.messages import GroupInfo, Manifest, Member
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.products.verification import (
    Fingerprint,
    IntegerProduct,
    draw_challenge,
    multiply_challenge,
)
from tenant_sdk.storage import disk_errors
from tenant_sdk.trust.attestation import CheckpointContents

_FORMAT = "symbiosis-fingerprints-3"


class StoredFingerprints:
    """The fingerprints of a file.

    Args:
        path: the file.
        key: as ``write_fingerprints`` returned it.

    Raises:
        ConfigurationError: no such file, no key, or a file that this key did not write: another one's,
            truncated, or changed by somebody; or one that others could change.
    """

    def __init__(self, path: str | Path, key: str | None) -> None:
        if not key:
            raise ConfigurationError(
                "{} is encrypted: give {fingerprint_key}, as `symbiosis-tenant fingerprint` printed it",
                str(path),
                fingerprint_key=Metavar("KEY"),
            )
        check_own(path)
        try:
            data = _fernet(key).decrypt(Path(path).read_bytes())
            self._tensors = load(data)
        except OSError as error:
            raise ConfigurationError(f"cannot read the fingerprints {path}: {error.strerror}") from error
        except (InvalidToken, SafetensorError) as error:
            raise ConfigurationError(
                f"{path} was not written under this key, or is truncated or was changed since; make it again "
                "with `symbiosis-tenant fingerprint` from the checkpoint"
            ) from error
        if _metadata(data).get("format") != _FORMAT:
            raise ConfigurationError(
                f"{path} holds no fingerprints, or those of another version; make it again with "
                "`symbiosis-tenant fingerprint` from the checkpoint"
            )
        self._path = path
        self._trusted = msgspec.json.decode(_metadata(data)["trusted"], type=CheckpointContents)
        self._numerics = _metadata(data)["numerics"]
        self._groups: tuple[GroupInfo, ...] = ()
        self._made: dict[ProductKey, Fingerprint] = {}

    def fit(self, manifest: Manifest) -> None:
        """Use the fingerprints for an executor.

        Raises:
            ConfigurationError: they were made for other numerics.
            ModelMismatch: they were made from other weights, parameters or files than it claims to serve.
        """
        if manifest.numerics != self._numerics:
            raise ConfigurationError(
                f"the fingerprints {self._path} are for {self._numerics} numerics, and the executor "
                f"computes in {manifest.numerics}; make others with `symbiosis-tenant fingerprint --numerics "
                f"{manifest.numerics}`"
            )
        for group in manifest.groups:
            for member in group.members:
                self._check(group, member)
            squares = torch.stack([self._of(m, "column squares") for m in group.members]).sum(0)
            bound = Bounds(max(int(self._of(m, "row bound")) for m in group.members), int(squares.max()))
            if tuple(bound) != group.bounds:
                raise self._mismatch(group.members[0])
        self.attest(manifest)
        self._groups = manifest.groups

    def attest(self, manifest: Manifest) -> None:
        """Compare everything that is downloaded with the checkpoint from which the fingerprints were made.

        Raises:
            ModelMismatch: an executor lists something else.
        """
        self._trusted.check(manifest, f"the checkpoint of {self._path}")

    def _check(self, group: GroupInfo, member: Member) -> None:
        scales = self._tensors.get(f"{member.name}/scales")
        projection = self._tensors.get(f"{member.name}/forward")
        if scales is None or projection is None:
            raise ModelMismatch(
                f"the fingerprints {self._path} do not have {member.name}, which the executor serves: they "
                "are of another model"
            )
        if scales.shape != (member.outputs,) or projection.shape != (group.inputs,):
            raise self._mismatch(member)

    def _mismatch(self, member: Member) -> ModelMismatch:
        return ModelMismatch(
            f"the fingerprints {self._path} are of other weights than the executor claims for "
            f"{member.name}: of another model, or the executor does not serve the model that it should"
        )

    def _of(self, member: Member, what: str) -> torch.Tensor:
        # By the layer's name, not by its tensor's: which tensor a layer has is not for executors to say.
        return self._tensors[f"{member.name}/{what}"]

    def scales(self, group: int) -> torch.Tensor:
        """Returns the scales of all members of a group: float32 [O]."""
        return torch.cat([self._of(member, "scales") for member in self._groups[group].members])

    def get(self, key: ProductKey, product: IntegerProduct) -> Fingerprint:
        """See ``tenant_sdk.products.verification.Fingerprints``."""
        fingerprint = self._made.get(key)
        if fingerprint is None:
            fingerprint = self._made[key] = self._make(key)
        return fingerprint

    def _make(self, key: ProductKey) -> Fingerprint:
        info = self._groups[key.group]
        members = [info.members[i] for i in member_indices(key.member_bits)]
        if key.direction == Direction.FORWARD:
            challenge = torch.cat([self._of(member, "challenge") for member in members], 1)
            projection = torch.stack([self._of(member, "forward") for member in members]).sum(0)
        else:
            challenge = self._tensors[f"{info.inputs}/challenge"]
            projection = torch.cat([self._of(member, "backward") for member in members])
        return Fingerprint(challenge.reshape(-1), projection)


def write_fingerprints(
    folder: str | Path,
    output: str | Path,
    *,
    key: str | None = None,
    numerics: str = "ring",
    progress: Callable[[Iterable[Any], str], Iterable[Any]] = lambda items, _: items,
) -> str:
    """Make the fingerprints of a checkpoint that the tenant trusts.

    Args:
        folder: Folder of the checkpoint, or ``hub:NAME[@REVISION]``.
        output: File for the fingerprints. Only its owner gets access. An existing file is replaced.
        key: Key that encrypts the file. Default: a new key.
        numerics: Numerics of the executors whose answers will be checked: ``ring`` or ``ring-fine``.
        progress: Function that takes the layers and a title, and returns the layers while it shows progress.

    Returns:
        The key. The file is useless without it. A person with both can forge answers, so keep them apart.

    Raises:
        CheckpointError: The folder is no checkpoint, or has no linear layers.
        ConfigurationError: The key is not valid, the output is a folder, or answers in these numerics cannot
            be checked.
        StorageError: The file cannot be written.
    """
    output = Path(output)
    if output.is_dir() or not (output.parent.is_dir() or not output.parent.exists()):
        raise ConfigurationError(f"{output} cannot be a file; name one, in a folder, for the fingerprints")
    if numerics not in RINGS:
        raise ConfigurationError(f"answers in {numerics!r} cannot be checked; choose from {', '.join(RINGS)}")
    key = key or Fernet.generate_key().decode()
    cipher = _fernet(key)
    checkpoint = Checkpoint(folder)
    tensors: dict[str, torch.Tensor] = {}
    for member in progress(checkpoint_layers(checkpoint), "fingerprints"):
        _add(tensors, member.name, checkpoint.member_weight(member), RINGS[numerics])
    trusted = msgspec.json.encode(CheckpointContents.of(checkpoint)).decode()
    data = cipher.encrypt(save(tensors, {"format": _FORMAT, "numerics": numerics, "trusted": trusted}))
    with disk_errors(output, "the fingerprints", "Then run again."):
        output.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(output, data)
    return key


def _add(tensors: dict[str, torch.Tensor], name: str, weight: torch.Tensor, count: int) -> None:
    """Add the entries of one layer's weight [O, D]."""
    outputs, inputs = weight.shape
    planes, scales = quantize_weight(weight, count)
    products = PlaneProducts(planes, [outputs])

    def product(direction: Direction, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def multiply(rows: torch.Tensor) -> torch.Tensor:
            out = torch.empty((len(rows), count * width), dtype=torch.int32)
            products.matmul(direction, 1, rows, out)
            return out

        return multiply

    # Gradients of several layers with the same input are summed, so those share a challenge.
    common = f"{inputs}/challenge"
    if common not in tensors:
        tensors[common] = draw_challenge(os.urandom, count, inputs)
    challenge = draw_challenge(os.urandom, count, outputs)
    longest, columns = squared_norms(planes)
    tensors |= {
        f"{name}/challenge": challenge,
        f"{name}/forward": multiply_challenge(challenge, product(Direction.BACKWARD, inputs)),
        f"{name}/backward": multiply_challenge(tensors[common], product(Direction.FORWARD, outputs)),
        f"{name}/scales": scales,
        f"{name}/row bound": torch.tensor(longest),
        f"{name}/column squares": columns,
    }


def _metadata(data: bytes) -> dict[str, str]:
    """Returns what a safetensors file says of itself."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return header.get("__metadata__") or {}


def checkpoint_layers(checkpoint: Checkpoint) -> list[Member]:
    """Returns the linear layers whose weights a checkpoint holds, with the head, even if it is a tied one.

    Raises:
        CheckpointError: transformers does not know the model, or it has no linear layers.
    """
    found = [member for member, _ in checkpoint.stored.layers()]
    if not found:
        name = type(checkpoint.stored.model).__name__
        raise CheckpointError(f"{checkpoint.folder} holds the weights of no linear layer of {name}")
    return found


def _fernet(key: str) -> Fernet:
    """Returns the cipher of a key.

    Raises:
        ConfigurationError: it is none.
    """
    try:
        return Fernet(key.encode())
    except ValueError as error:
        raise ConfigurationError(
            "the fingerprint key is not one: it has 44 characters, as `symbiosis-tenant fingerprint` "
            "printed it"
        ) from error
