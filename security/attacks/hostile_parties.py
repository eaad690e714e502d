"""Active attacks on masks: a provider in the mask source's place, and a copy of the tenant's process."""

from __future__ import annotations

import datetime
import ipaddress
import os
import signal
import warnings
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from security.attacks.base import TokenGuess
from security.attacks.tokens import VocabularyMatching
from security.recordings.executors import AuditError
from security.recordings.transcript import RecordedRequest
from security.views.adversaries import collusion_view
from security.views.public_model import PublicModel
from shared import forks

CHILD_SECONDS = 60  # a child that takes longer hangs, and is killed


class Authority:
    """A private certificate authority of one operator, who keeps its key and signs for any address."""

    def __init__(self, now: datetime.datetime) -> None:
        self._key, self._name = ec.generate_private_key(ec.SECP256R1()), _name("an operator's authority")
        self._from, self._to = now - datetime.timedelta(hours=1), now + datetime.timedelta(days=1)
        basic = x509.BasicConstraints(ca=True, path_length=0)
        builder = self._builder(self._name, self._key.public_key()).add_extension(basic, critical=True)
        self.certificate = builder.add_extension(_signs(certificates=True), critical=True).sign(
            self._key, hashes.SHA256()
        )

    def certify(self, folder: Path) -> None:
        """Write what a server at 127.0.0.1 needs: ``ca.pem``, ``server.pem`` and ``server.key``."""
        folder.mkdir(parents=True)
        key = ec.generate_private_key(ec.SECP256R1())
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        certificate = (
            self._builder(_name("a server"), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_signs(certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(issuer, critical=False)
            .add_extension(here, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        (folder / "ca.pem").write_bytes(self.certificate.public_bytes(Encoding.PEM))
        (folder / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        (folder / "server.key").touch(mode=0o600)
        (folder / "server.key").write_bytes(private)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._from)
            .not_valid_after(self._to)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _signs(*, certificates: bool) -> x509.KeyUsage:
    others = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    return x509.KeyUsage(digital_signature=True, key_cert_sign=certificates, crl_sign=certificates, **others)


class SubstitutedSource:
    """Answer at the mask source's address, certified by an authority that vouches for both: seeds and rows.

    Args:
        public: the model, on which rows without masks are looked up.
    """

    name: ClassVar[str] = "substituted mask source"
    goal: ClassVar[str] = "tokens, from rows and seeds"
    sees: ClassVar[str] = "rows; and what the tenant sends to whoever answers in the mask source's place"
    metric: ClassVar[str] = "tokens right (top 1)"
    source: ClassVar[str] = "Soghoian and Stamm, Certified Lies, 2011: authorities that vouch for others"

    def __init__(self, public: PublicModel) -> None:
        self.public = public

    def attack(
        self, view: tuple[list[RecordedRequest], list[RecordedRequest]], rng: np.random.Generator
    ) -> TokenGuess:
        """What each row stands for that was sent to the first group.

        Args:
            view: what it was asked for as provider, and in the mask source's place.
        """
        rows, seeds = view
        return VocabularyMatching().attack(collusion_view(self.public, rows, seeds), rng)


class MaskServedTwice:
    """Look for two rows under one mask, of a forked child and its parent: their difference is small."""

    name: ClassVar[str] = "a forked child's masks"
    goal: ClassVar[str] = "the difference of two rows"
    sees: ClassVar[str] = "rows of the tenant's process and of its copy"
    metric: ClassVar[str] = "differences of rows read exactly"
    source: ClassVar[str] = "two-time masks, such as those of Project Venona; Ristenpart and Yilek, 2010"

    def attack(self, view: list[torch.Tensor], rng: np.random.Generator) -> list[torch.Tensor]:
        """The differences that are small, int32 [n, C] for each two requests with rows under one mask.

        Args:
            view: requests for one kind of product, int32 [T, C] as sent.
        """
        guesses = []
        for one, other in combinations(view, 2):
            apart = (one[:, None] - other[None]).flatten(0, 1)
            small = apart[apart.float().abs().mean(1) < 2.0**28]
            if len(small):
                guesses.append(small)
        return guesses


def in_copy(action: Callable[[], object]) -> str:
    """Do something in a forked child that has its parent's process id, as process 1 of a new namespace.

    Returns:
        The name of what it ended with, or nothing.

    Raises:
        AuditError: it did not end by itself.
    """
    read, write = os.pipe()
    parent, getpid = os.getpid(), os.getpid
    os.getpid = lambda: parent
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads
            child = os.fork()
        if child == 0:
            signal.alarm(CHILD_SECONDS)
            try:
                action()
            except BaseException as error:
                os.write(write, type(error).__name__.encode())
            finally:
                os._exit(0)
    finally:
        os.getpid = getpid
        os.close(write)
    with os.fdopen(read, "rb") as pipe:
        name = pipe.read().decode()
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        raise AuditError("a forked child was killed, or did not end as it should")
    return name


def unguarded(masks: Any, action: Callable[[], object]) -> str:
    """The same without what keeps a child from its parent's masks; its connections it loses all the same."""
    in_child, check = forks.ForkGuard.in_child, forks.ForkGuard.check
    forks._owners.discard(masks)
    forks.ForkGuard.in_child = property(lambda self: False)  # type: ignore[method-assign, assignment]
    forks.ForkGuard.check = lambda self: None  # type: ignore[method-assign]
    try:
        return in_copy(action)
    finally:
        forks.ForkGuard.in_child, forks.ForkGuard.check = in_child, check  # type: ignore[method-assign]
        forks.register_for_fork(masks)
