"""Active attacks by the provider: wrong answers, and parameters made to give tokens away."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from security.attacks.active import LyingProvider
from security.attacks.base import nearest
from security.attacks.gradients import LabelRecovery
from security.attacks.streams import guess_from_labelled
from security.attacks.traffic import FINGERPRINT_ROWS
from security.recordings.executors import AuditError
from security.views.adversaries import View
from security.views.public_model import PublicModel
from shared.errors import VerificationError
from shared.ring.fixed_point import exponents, max_row_norm, steps
from shared.wire.header import Direction, Header
from tenant_sdk.session.session import Session

ORACLE_ROWS = 9  # of a request that is lied about; fingerprints are made and tried with other numbers


class AbortOracle:
    """Answer wrongly on purpose and watch who goes on: does it depend on the row whether a lie is noticed?

    Two rows are the adversary's own, large and small, so that a check that rounds or tolerates anything
    treats them differently. Lies are told about the answer, or about a fingerprint while it is made.

    Args:
        provider: who lies.
        group: about which products.
        public: from which the size of a lie is worked out.
        tolerance: absolute, of a tenant that accepts answers so near to the right one; what lies aim at.
    """

    name: ClassVar[str] = "abort oracle"
    goal: ClassVar[str] = "which of two chosen rows a request hides"
    sees: ClassVar[str] = "how many requests follow a wrong answer; for half of these answers also the row"
    metric: ClassVar[str] = "rows told apart by who stops"
    source: ClassVar[str] = "Bleichenbacher, 1998; Vaudenay, 2002: padding oracles, reaction attacks"

    LIES = ("a small number", "the highest bit", "a fingerprint while it is made")

    def __init__(self, provider: LyingProvider, group: int, public: PublicModel, tolerance: float) -> None:
        self.provider, self.group, self.tolerance = provider, group, tolerance
        info = public.manifest.groups[group]
        assert info.bounds is not None
        self.rows = torch.full((2, info.inputs), 3.0)
        self.rows[1] *= 100
        self.rows[1, 0] = 0.0  # of which a fingerprint that is wrong there says nothing
        max_norm = max_row_norm(info.bounds[0], info.inputs)
        sizes = steps(exponents(self.rows.double().norm(dim=1), max_norm)).log2()
        # In between: too small to be noticed under one row's step, and large enough under the other's.
        wanted = math.log2(tolerance / float(public.scales(group)[0])) - float(sizes.mean())
        self._bit = min(max(round(wanted), 0), 30)

    def lie(self, session: Session, kind: str, secret: int) -> int:
        """Tell one lie to a tenant who asks twice; how many of its requests follow.

        Args:
            session: a new one.
            kind: of LIES.
            secret: which of ``rows`` it sends.

        Raises:
            AuditError: it was not told.
        """
        tensor = self.rows[secret].expand(ORACLE_ROWS, -1).contiguous()
        member_bits = (1 << len(session.manifest.groups[self.group].members)) - 1
        lies = self.provider.lies
        after = 0

        def answer(header: Header, honest: torch.Tensor) -> torch.Tensor | None:
            nonlocal after
            fingerprint = kind == self.LIES[2]
            after += self.provider.lies > lies and header.rows == ORACLE_ROWS
            rows = FINGERPRINT_ROWS[0] if fingerprint else ORACLE_ROWS
            direction = Direction.BACKWARD if fingerprint else Direction.FORWARD
            wanted = (self.group, direction, rows)
            if self.provider.lies > lies or (header.group, header.direction, header.rows) != wanted:
                return None
            lie = honest.clone()
            cut = 16 if lie.dtype == torch.int16 else 0  # bits of each number that are not there
            small = 1 if fingerprint else 1 << max(0, self._bit - cut)
            lie[0] += -(1 << 31 - cut) if kind == self.LIES[1] else small
            return lie

        self.provider.lie = answer
        try:
            for _ in range(2):
                session.products.submit(self.group, Direction.FORWARD, member_bits, [tensor]).result()
        except VerificationError:
            pass  # which the provider knows from what does not follow
        finally:
            self.provider.lie = lambda header, answer: None
        if self.provider.lies != lies + 1:
            raise AuditError(f"a lie ({kind}) was to be told once, not {self.provider.lies - lies} times")
        return after

    def attack(self, view: tuple[list[tuple[str, int]], list[int]], rng: np.random.Generator) -> torch.Tensor:
        """Guesses for the lies of which it was not told.

        Args:
            view: for each lie its kind and what followed; and the secrets of the first of them.
        """
        observed, labels = view
        return guess_from_labelled(
            [float(after) for _, after in observed], [kind for kind, _ in observed], labels
        )


def craft(public: PublicModel, folder: Path, into: Path, rng: np.random.Generator) -> torch.Tensor:
    """A checkpoint whose embeddings carry each token's number through all layers, and its code [V, D].

    The code is so large beside what layers add that rows everywhere point along it. A head is crafted alike,
    and makes gradients that point away from the label's code. The frozen linear layers stay as they are.
    """
    shutil.copytree(folder, into)
    model = public.model
    crafted = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    names = {n for n, p in model.named_parameters(remove_duplicate=False) if any(p is c for c in crafted)}
    code = torch.from_numpy(rng.choice((-1.0, 1.0), tuple(crafted[0].shape)).astype(np.float32))
    for file in into.glob("*.safetensors"):
        tensors = load_file(file)
        for name in names & tensors.keys():
            tensors[name] = (IMPRINT * code).to(tensors[name].dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    return code


# What each number of an embedding is, up to its sign. Up to the middle, the layers of the examples' model add
# numbers near 1, and those of SmolLM2-135M-Instruct add numbers near 6.
IMPRINT = 64.0


class ImprintedEmbeddings:
    """Serve embeddings that carry each token's number, and read it in any row of any layer.

    Args:
        code: [V, D], from ``craft``.
        group: whose inputs are read, behind a norm.
        gain: of that norm, [D].
    """

    name: ClassVar[str] = "imprinted embeddings"
    goal: ClassVar[str] = "tokens, from any layer, without their prefix"
    sees: ClassVar[str] = "rows; it has made the embeddings itself"
    metric: ClassVar[str] = "tokens right (top 1)"
    source: ClassVar[str] = "Fowl et al., Robbing the Fed, arXiv 2110.13057; Decepticons, arXiv 2201.12675"

    def __init__(self, code: torch.Tensor, group: int, gain: torch.Tensor) -> None:
        self.group, self._table = group, code * gain

    def attack(self, view: View, rng: np.random.Generator) -> torch.Tensor:
        """The token of each row of the group."""
        rows = [seen.rows for seen in view.of(self.group)]
        return nearest(torch.cat(rows), self._table) if rows else torch.empty(0, dtype=torch.int64)


class ImprintedHead(LabelRecovery):
    """Serve a head in which every label's direction is its own, and read it in the last gradients."""

    name: ClassVar[str] = "imprinted head"
    sees: ClassVar[str] = "rows of the last layer's backward products; it has made the head itself"
    source: ClassVar[str] = ImprintedEmbeddings.source
