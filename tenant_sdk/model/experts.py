"""Mixtures of experts whose weights stay with the executor: a group for each expert, all asked at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import grouped_mm_experts_forward

from shared.compat import transforms_run
from shared.errors import ConfigurationError
from shared.wire.header import Direction, RequestClass
from tenant_sdk.connection.remote import LazyResult
from tenant_sdk.model.recording import answered
from tenant_sdk.model.remote_weight import RemoteWeight
from tenant_sdk.model.virtual import RemoteGroup, check_values, request_class_for, requires_autograd
from tenant_sdk.products.products import pad_with_zeros

log = logging.getLogger(__name__)

IMPLEMENTATION = "symbiosis"  # generate() replaces transformers' own by one that copies weights
MIN_BUCKET = 4  # rows
FEW_TOKENS = 16  # whose routes shall not show at all where experts are padded
FIRST_AT_ONCE = 16
_tokens: ContextVar[int] = ContextVar("tokens", default=0)  # of the mixture that is being passed
_PRODUCTS = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


def bucket(counts: Sequence[int], tokens: int) -> int:
    """How many rows each expert gets where they are padded, and the tokens need so many.

    Few tokens could all go to one expert, and equal ones do: so it has room for all of them, and says
    nothing that the attention's rows do not say.

    Args:
        tokens: how many there are.
    """
    largest = max(tokens if tokens <= FEW_TOKENS else 0, *counts, MIN_BUCKET)
    return int(1 << (largest - 1).bit_length())


class Padding:
    """Gives all experts of a projection equally many rows; says once what that costs."""

    def __init__(self) -> None:
        self._told = False

    def rows(self, counts: Sequence[int], tokens: int) -> int:
        """See ``bucket``."""
        padded = bucket(counts, tokens)
        if not self._told:
            self._told, sent, needed = True, padded * len(counts), sum(counts)
            log.warning(
                "padded experts: each of %d experts gets as many rows as the one with the most, rounded up "
                "to a power of two; at first %d rows are sent where %d are needed, %.1f times as many",
                *(len(counts), sent, needed, sent / needed),
            )
        return padded


class Experts:
    """One projection of a mixture's experts, at the executor.

    Args:
        name: of the parameter, below the base model.
        groups: of one member each, in the order of the experts.
        padding: None: each expert is asked for its tokens alone.
        skips: whether, where each expert gets equally many rows, those of zeros are not asked for.
    """

    def __init__(
        self, name: str, groups: Sequence[RemoteGroup], padding: Padding | None, *, skips: bool = False
    ) -> None:
        self.name, self.groups, self._padding, self.skips = name, groups, padding, skips
        self._known: set[tuple[Direction, int]] = set()  # kinds that were asked for before
        self._inputs, self._outputs = groups[0].info.inputs, groups[0].info.members[0].outputs

    def differentiable(
        self,
        direction: Direction,
        rows: torch.Tensor,
        counts: Sequence[int],
        request_class: RequestClass,
        tokens: int = 0,
    ) -> torch.Tensor:
        """``product`` with a graph where something needs one."""
        if transforms_run()() or requires_autograd(rows):
            out: torch.Tensor = _ExpertProduct.apply(  # type: ignore[no-untyped-call]
                self, direction, counts, request_class, tokens, rows
            )
            return out
        return self.product(direction, rows, counts, request_class, tokens)

    def product(
        self,
        direction: Direction,
        rows: torch.Tensor,
        counts: Sequence[int],
        request_class: RequestClass,
        tokens: int = 0,
    ) -> torch.Tensor:
        """Each expert's product of its rows: all are asked before the first answer is waited for.

        Args:
            rows: [T, I] forward, [T, O] backward; any float dtype.
            counts: of the rows, how many are whose, in the order of the experts.
            tokens: that these are rows of; 0: that is not known.

        Returns:
            [T, O] forward, [T, I] backward.

        Raises:
            NonFiniteError: NaN or infinity, before anything is sent; or rows of one expert that are too
                large once they are scaled, of which nothing is sent.
            ConfigurationError: the number of tokens is not known, and routes are to be hidden.
        """
        width = self._outputs if direction == Direction.FORWARD else self._inputs
        if not len(rows):
            return rows.new_empty((0, width))
        rows = rows.detach()
        check_values(rows, direction, [self.name])
        if self._padding and not tokens:
            raise ConfigurationError(
                "{}: how many tokens these rows are of is not known, so {experts} could not hide where "
                "they go; set_experts_implementation({!r}) tells it",
                self.name,
                IMPLEMENTATION,
                experts="padded",
            )
        each = self._padding.rows(counts, tokens) if self._padding else 0
        privacy = self.groups[0].privacy
        parts = [pad_with_zeros(part, each, privacy) for part in rows.split(list(counts))]
        request = (self, direction, tuple(counts))
        return answered(request, [rows], lambda: [self._ask(direction, parts, counts, request_class)])[0]

    def _ask(
        self, direction: Direction, parts: list[torch.Tensor], counts: Sequence[int], urgency: RequestClass
    ) -> torch.Tensor:
        busy = [expert for expert, part in enumerate(parts) if len(part)]

        def submit(expert: int) -> LazyResult:
            return self.groups[expert].submit(direction, 1, [parts[expert]], urgency)

        kinds = {(direction, expert) for expert in busy}
        if kinds <= self._known:
            pending = [submit(expert) for expert in busy]
        else:  # what the first request of a kind waits for is fetched for all together
            with ThreadPoolExecutor(FIRST_AT_ONCE, thread_name_prefix="symbiosis-experts") as pool:
                pending = list(pool.map(submit, busy))
            self._known |= kinds
        return torch.cat(
            [product.result()[0][: counts[expert]] for expert, product in zip(busy, pending, strict=True)]
        )


class _ExpertProduct(torch.autograd.Function):
    """``y = x W_e^T`` for each expert's rows, or backward ``gx = gy W_e``: each is the other's adjoint."""

    @staticmethod
    def forward(
        experts: Experts,
        direction: Direction,
        counts: Sequence[int],
        request_class: RequestClass,
        tokens: int,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        return experts.product(direction, rows, counts, request_class, tokens)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.experts, ctx.direction, ctx.counts, ctx.request_class, ctx.tokens, _ = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = Direction.BACKWARD if ctx.direction == Direction.FORWARD else Direction.FORWARD
        gradient = ctx.experts.differentiable(back, grad, ctx.counts, RequestClass.FINETUNING, ctx.tokens)
        return None, None, None, None, None, gradient

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return ctx.experts.differentiable(  # type: ignore[no-any-return]
            ctx.direction, tangents[-1], ctx.counts, ctx.request_class, ctx.tokens
        )


class _Term(NamedTuple):
    """``scale`` times the product of an expert's factors is added to its weight: an adapter."""

    factors: tuple[torch.Tensor, ...]  # [E, first axis, r] and [E, r, second axis], or the product itself
    scale: float = 1.0


class RemoteExperts(RemoteWeight):
    """What stands where the weights of experts were: it is multiplied with, and nothing else.

    transformers multiplies rows that are sorted by expert (``grouped_mm``), or equally many for each
    (``bmm``), by the weight or its transpose. PEFT adds an adapter of low rank to the weight first
    (``baddbmm``, or ``add`` where there is one expert or several adapters); that is multiplied apart, so the
    sum, which nobody has, is never made.
    """

    experts: Experts
    forwards: bool  # as it is it stands for [E, I, O], with which rows are multiplied from the left
    terms: tuple[_Term, ...]

    @staticmethod
    def __new__(
        cls,
        experts: Experts,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        forwards: bool,
        terms: tuple[_Term, ...] = (),
    ) -> RemoteExperts:
        """A placeholder for the weights of the given shape."""
        model = experts.groups[0].model
        self: RemoteExperts = RemoteWeight.__new__(cls, experts.name, shape, dtype, device, model=model)  # type: ignore[assignment]
        self.experts, self.forwards, self.terms = experts, forwards, terms
        return self

    def like(self, dtype: torch.dtype, device: torch.device) -> RemoteExperts:
        """A placeholder for the same weights."""
        return RemoteExperts(self.experts, self.shape, dtype, device, self.forwards, self.terms)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Products, and what prepares them; all else is as for any tensor."""
        options = {key: value for key, value in (kwargs or {}).items() if value is not None}
        match getattr(func, "__name__", ""), args:
            case product, (rows, cls() as weight, *ends) if product in _PRODUCTS:
                ends += [options.pop("offs")] if "offs" in options else []
                if len(ends) == 1 and not options:
                    return cls.grouped_product(weight, rows, ends[0])
            case "bmm", (rows, cls() as weight) if not options:
                return weight.batched_product(rows)
            case "baddbmm", (cls() as weight, left, right) if options.keys() <= {"alpha"}:
                return weight.plus_low_rank(left, right, **options)
            case "transpose", (cls() as weight, int() as one, int() as other):
                if {one % 3, other % 3} == {1, 2}:
                    return weight.transposed()
        return super().__torch_function__(func, types, args, kwargs)

    def is_same(self, other: RemoteWeight) -> bool:
        """Whether another stands for the same weights with the same added."""
        return (
            isinstance(other, RemoteExperts) and self.experts is other.experts and self.terms is other.terms
        )

    def sum_with(self, delta: torch.Tensor) -> RemoteExperts:
        """With adapters added: [E, first axis, second axis], or without the first if there is one expert.

        Raises:
            RemoteWeightUnavailable: they have another shape.
        """
        if delta.shape not in (self.shape, self.shape[1:] if len(self) == 1 else self.shape):
            raise self.no_sum()
        return self._with(_Term((delta.reshape(self.shape),)))

    def transposed(self) -> RemoteExperts:
        """With the last two axes exchanged."""
        experts, first, second = self.shape
        terms = tuple(
            _Term(tuple(each.transpose(1, 2) for each in reversed(term.factors)), term.scale)
            for term in self.terms
        )
        return RemoteExperts(
            self.experts, (experts, second, first), self.dtype, self.device, not self.forwards, terms
        )

    def plus_low_rank(self, left: torch.Tensor, right: torch.Tensor, alpha: float = 1.0) -> RemoteExperts:
        """With a product of low rank added."""
        return self._with(_Term((left, right), alpha))

    def _with(self, term: _Term) -> RemoteExperts:
        terms = (*self.terms, term)
        return RemoteExperts(self.experts, self.shape, self.dtype, self.device, self.forwards, terms)

    def grouped_product(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Rows [T, first axis] of all experts in order, times each one's weight: [T, second axis].

        Args:
            ends: [E] behind whose last row each expert's rows end.

        Raises:
            ConfigurationError: they have no values, in a transform over several texts.
        """
        stops = self._numbers(ends)
        out: torch.Tensor = self._product(
            rows, [stop - start for start, stop in zip([0, *stops], stops, strict=False)]
        )
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def batched_product(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [E, T, first axis] times each one's weight: [E, T, second axis].

        Where the provider may see how many tokens go to each expert, rows of zeros are left out: they are
        tokens that do not, and the model multiplies their gradients by zero.
        """
        experts, count, width = rows.shape
        flat = rows.reshape(-1, width)
        out: torch.Tensor
        if not self.experts.skips:
            out = self._product(flat, [count] * experts)
            return out.view(experts, count, -1)
        needed = flat.ne(0).any(1)
        counts = self._numbers(needed.view(experts, count).sum(1))
        out = flat.new_zeros((len(flat), self.shape[2]))
        return out.index_put((needed.nonzero()[:, 0],), self._product(flat[needed], counts)).view(
            experts, count, -1
        )

    def _numbers(self, counted: torch.Tensor) -> list[int]:
        """What says which rows are whose, as numbers."""
        try:
            numbers: list[int] = counted.tolist()
        except RuntimeError as error:
            raise ConfigurationError(
                "which rows of {} are whose is not known here, as under torch.func.vmap: each element "
                "goes to other experts. Loop over them, or keep experts here: {experts}",
                self.layer,
                experts="local",
            ) from error
        return numbers

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _product(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows of all experts in order, ``counts`` of each."""
        direction, tokens = Direction.FORWARD if self.forwards else Direction.BACKWARD, _tokens.get()
        # Not of how many rows an expert has: where experts are padded, that must not show.
        request_class = request_class_for(tokens or max(counts))
        out = self.experts.differentiable(direction, rows, counts, request_class, tokens)
        for term in self.terms:
            # Apart for each expert: few of them may have rows, and strides are such as no kernel takes.
            added = [
                reduce(torch.matmul, factors, part)
                for part, *factors in zip(rows.split(counts), *term.factors, strict=True)
                if len(part)
            ]
            if added:
                out = out + term.scale * torch.cat(added)
        return out


@torch.compiler.disable  # type: ignore[untyped-decorator]
def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """transformers' own for rows that are sorted by expert; notes how many tokens they are of.

    Not within a graph: how many rows each expert has is not known to any.
    """
    before = _tokens.set(len(hidden_states))
    try:
        out: torch.Tensor = grouped_mm_experts_forward(module, hidden_states, *args, **kwargs)
    finally:
        _tokens.reset(before)
    return out
