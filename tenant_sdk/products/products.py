"""Products of an executor's groups: the seam between virtual layers, or other callers, and privacy modes."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from shared.wire.header import Direction, Operation, RequestClass
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import LazyResult, RemoteExecutor
from tenant_sdk.products.modes import Privacy


class Products(ABC):
    """Products without showing the executor more than the privacy mode must. ``session.products``."""

    @abstractmethod
    def submit(
        self,
        group: int,
        direction: Direction,
        member_bits: int,
        rows: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> LazyResult:
        """Ask for a product of some members of a group; several may be in flight at once.

        Returns when the request is on its way, or waits for the connection to take it. The first request of
        a kind also waits for what checking needs.

        Args:
            group: id in the manifest.
            direction: forward, ``x W_m^T`` for each member; backward, ``sum_m g_m W_m``.
            member_bits: bit mask of members.
            rows: finite float32 on the CPU: one [T, D] forward; backward one [T, O_m] for each member. They
                must not change until the result is here.
            request_class: how urgent it is.

        Returns:
            Whose result are float32 tensors that nobody else holds: one [T, O_m] for each member forward,
            one [T, D] backward.

        Raises:
            ValueError: rows of other shapes, or none.
            NonFiniteError: rows that the ring cannot hold; nothing was sent.
            SymbiosisError: also from ``result``: the connection, the executor, a mask source, or a wrong
                answer.
        """

    @property
    @abstractmethod
    def privacy(self) -> Privacy:
        """The privacy mode."""

    @property
    def rows_ahead(self) -> int:
        """Rows of masks, of all kinds, whose effects are in store or in flight; 0: none are fetched ahead."""
        return 0

    def fill(self, budget_bytes: int, timeout: float, chunk_rows: int = 0) -> None:
        """See ``MaskGenerator.fill``."""
        return  # by default nothing is fetched ahead

    def verifying_everything(self) -> Products:
        """Returns the same with exact answers, all of which are checked if any are."""
        return self  # by default answers are exact, and none are checked

    def close(self) -> None:
        """Stop background work."""
        return  # by default there is nothing to do


class PlainProducts(Products):
    """No mask: the executor sees every activation. The baseline for speed, no protection at all."""

    privacy = Privacy.PLAIN

    def __init__(self, remote: RemoteExecutor) -> None:
        self._remote = remote

    def submit(
        self,
        group: int,
        direction: Direction,
        member_bits: int,
        rows: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> LazyResult:
        """See Products."""
        key = ProductKey(group, direction, member_bits)
        return self._remote.submit(Operation.PRODUCT, key, rows, request_class)


class WrappedProducts(Products):
    """Base of products that wrap others: what they forward to them."""

    def __init__(self, inner: Products) -> None:
        self._inner = inner

    @property
    def privacy(self) -> Privacy:
        """See Products."""
        return self._inner.privacy

    @property
    def rows_ahead(self) -> int:
        """See Products."""
        return self._inner.rows_ahead

    def fill(self, budget_bytes: int, timeout: float, chunk_rows: int = 0) -> None:
        """See Products."""
        self._inner.fill(budget_bytes, timeout, chunk_rows)

    def verifying_everything(self) -> Products:
        """See Products; those inside, without this wrapper."""
        return self._inner.verifying_everything()

    def close(self) -> None:
        """See Products."""
        self._inner.close()


class PaddedProducts(WrappedProducts):
    """Adds rows of zeros to the requests of others until their number is a power of two.

    Args:
        inner: what hides and sends them.
        min_rows: the smallest number of rows sent.
    """

    def __init__(self, inner: Products, min_rows: int) -> None:
        super().__init__(inner)
        self._min_rows = min_rows

    def submit(
        self,
        group: int,
        direction: Direction,
        member_bits: int,
        rows: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> LazyResult:
        """See Products."""
        count = rows[0].shape[0]
        padded_count = 1 << (max(count, self._min_rows) - 1).bit_length()
        sent = [pad_with_zeros(tensor, padded_count, self.privacy) for tensor in rows]
        pending = self._inner.submit(group, direction, member_bits, sent, request_class)
        return LazyResult(lambda: [result[:count] for result in pending.result()])


def pad_with_zeros(rows: torch.Tensor, count: int, privacy: Privacy) -> torch.Tensor:
    """Returns rows [T, D] with rows of zeros behind them until there are ``count``.

    Raises:
        RuntimeError: the executor would recognise the zeros.
    """
    if count <= len(rows):
        return rows
    if not privacy.hides_zeros:
        raise RuntimeError(f"rows of zeros are about to be sent, which privacy mode {privacy} does not hide")
    return torch.nn.functional.pad(rows, (0, 0, 0, count - len(rows)))


def padded(products: Products, pad_rows: int) -> Products:
    """Returns products that hide row numbers too, if ``pad_rows`` is not 0; see ``connect``."""
    return PaddedProducts(products, pad_rows) if pad_rows else products
