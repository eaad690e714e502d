"""Mixtures of experts whose weights stay with the executor: a group for each expert, all asked at once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from shared.checkpoint import Checkpoint
from shared.compat import transforms_run
from shared.errors import ConfigurationError, ModelMismatch
from shared.experts import Projection, projections
from shared.recipes import below
from shared.wire.header import Direction, RequestClass
from shared.wire.messages import GroupInfo, Manifest, Member
from tenant_sdk.connection.remote import PendingProduct
from tenant_sdk.model.remote_weight import SUM, RemoteWeight
from tenant_sdk.model.virtual import DRAFT_TOKENS, Group, check_values, followed
from tenant_sdk.trust.attestation import base_model

log = logging.getLogger(__name__)

IMPLEMENTATION = "symbiosis"  # generate() replaces transformers' own by one that copies weights
LEAST_BUCKET = 4  # rows
FEW_TOKENS = 16  # whose routes shall not show at all where experts are padded
FIRST_AT_ONCE = 16
_tokens: ContextVar[int] = ContextVar("tokens", default=0)  # of the mixture that is being passed
_PRODUCTS = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")


def bucket(counts: Sequence[int], tokens: int = 0) -> int:
    """How many rows each expert gets where they are padded, and the tokens need so many.

    Few tokens could all go to one expert, and equal ones do: so it has room for all of them, and says
    nothing that the attention's rows do not say.

    Args:
        tokens: how many there are; 0: that is not known.
    """
    most = max(tokens if tokens <= FEW_TOKENS else 0, *counts, LEAST_BUCKET)
    return int(1 << (most - 1).bit_length())


class Padding:
    """Gives all experts of a projection equally many rows; says once what that costs."""

    def __init__(self) -> None:
        self._told = False

    def rows(self, counts: Sequence[int], tokens: int = 0) -> int:
        """See ``bucket``."""
        most = bucket(counts, tokens)
        if not self._told:
            self._told, sent, needed = True, most * len(counts), sum(counts)
            log.warning(
                "experts='padded': each of %d experts gets as many rows as the one with the most, rounded up "
                "to a power of two; at first %d rows are sent where %d are needed, %.1f times as many",
                *(len(counts), sent, needed, sent / needed),
            )
        return most


class Experts:
    """One projection of a mixture's experts, at the executor.

    Args:
        name: of the parameter, below the base model.
        groups: of one member each, in the order of the experts.
        padding: None: each expert is asked for its tokens alone.
        skips: whether, where each expert gets equally many rows, those of zeros are not asked for.
    """

    def __init__(
        self, name: str, groups: Sequence[Group], padding: Padding | None, *, skips: bool = False
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
        if transforms_run()() or followed(rows):
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
            tokens: see ``Padding.rows``.

        Returns:
            [T, O] forward, [T, I] backward.

        Raises:
            NonFiniteError: NaN or infinity, before anything is sent; or rows of one expert that are too
                large once they are scaled, of which nothing is sent.
        """
        width = self._outputs if direction == Direction.FORWARD else self._inputs
        if not len(rows):
            return rows.new_empty((0, width))
        rows = rows.detach()
        check_values(rows, direction, [self.name])
        each = self._padding.rows(counts, tokens) if self._padding else 0
        parts = [
            nn.functional.pad(part, (0, 0, 0, each - len(part))) if each else part
            for part in rows.split(list(counts))
        ]
        asked = [expert for expert, part in enumerate(parts) if len(part)]

        def submit(expert: int) -> PendingProduct:
            return self.groups[expert].submit(direction, 1, [parts[expert]], request_class)

        kinds = {(direction, expert) for expert in asked}
        if kinds <= self._known:
            pending = [submit(expert) for expert in asked]
        else:  # what the first request of a kind waits for is fetched for all together
            with ThreadPoolExecutor(FIRST_AT_ONCE, thread_name_prefix="symbiosis-experts") as pool:
                pending = list(pool.map(submit, asked))
            self._known |= kinds
        return torch.cat(
            [product.result()[0][: counts[expert]] for expert, product in zip(asked, pending, strict=True)]
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
        """A stand-in for the weights of the given shape."""
        self: RemoteExperts = RemoteWeight.__new__(cls, experts.name, shape, dtype, device)  # type: ignore[assignment]
        self.experts, self.forwards, self.terms = experts, forwards, terms
        return self

    def like(self, dtype: torch.dtype, device: torch.device) -> RemoteExperts:
        """A stand-in for the same weights."""
        return RemoteExperts(self.experts, self.shape, dtype, device, self.forwards, self.terms)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Products, and what prepares them; all else is as for any tensor."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        first = args[0] if args else None
        if name in _PRODUCTS and len(args) > 1 and isinstance(args[1], cls):
            return args[1].grouped_product(args[0], args[2] if len(args) > 2 else kwargs["offs"])
        if name == "bmm" and len(args) > 1 and isinstance(args[1], cls):
            return args[1].batched_product(args[0])
        if isinstance(first, cls) and name == "baddbmm" and kwargs.keys() <= {"alpha"}:
            return first.plus(*args[1:], **kwargs)
        if isinstance(first, cls) and name == "transpose" and {args[1] % 3, args[2] % 3} == {1, 2}:
            return first.turned()
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
            raise self._unavailable(SUM)
        return self._with(_Term((delta.reshape(self.shape),)))

    def turned(self) -> RemoteExperts:
        """With the last two axes exchanged."""
        experts, first, second = self.shape
        terms = tuple(
            _Term(tuple(each.transpose(1, 2) for each in reversed(term.factors)), term.scale)
            for term in self.terms
        )
        return RemoteExperts(
            self.experts, (experts, second, first), self.dtype, self.device, not self.forwards, terms
        )

    def plus(self, left: torch.Tensor, right: torch.Tensor, alpha: float = 1.0) -> RemoteExperts:
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
        try:
            stops = ends.tolist()
        except RuntimeError as error:
            raise ConfigurationError(
                f"which rows of {self.layer} are whose is not known here, as under torch.func.vmap: each "
                "element goes to other experts. Loop over them, or keep experts here: experts='local'"
            ) from error
        return self._product(rows, [stop - start for start, stop in zip([0, *stops], stops, strict=False)])

    def batched_product(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [E, T, first axis] times each one's weight: [E, T, second axis].

        Where the provider may see how many tokens go to each expert, rows of zeros are left out: they are
        tokens that do not, and the model multiplies their gradients by zero.
        """
        experts, count, width = rows.shape
        flat = rows.reshape(-1, width)
        if not self.experts.skips:
            return self._product(flat, [count] * experts).view(experts, count, -1)
        needed = flat.ne(0).any(1)
        counts = needed.view(experts, count).sum(1).tolist()
        out = flat.new_zeros((len(flat), self.shape[2]))
        return out.index_put((needed.nonzero()[:, 0],), self._product(flat[needed], counts)).view(
            experts, count, -1
        )

    def _product(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows of all experts in order, ``counts`` of each."""
        direction = Direction.FORWARD if self.forwards else Direction.BACKWARD
        out = self.experts.differentiable(direction, rows, counts, _urgency(counts), _tokens.get())
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


def _urgency(counts: Sequence[int]) -> RequestClass:
    """What rows of experts are for: each token comes to an expert once, so few rows are few tokens."""
    if torch.is_grad_enabled():
        return RequestClass.FINETUNING
    return RequestClass.DECODE if max(counts) <= DRAFT_TOKENS else RequestClass.PREFILL


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(module: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Not within a graph: how many rows each expert has is not known to any."""
    before = _tokens.set(len(hidden_states))
    try:
        out: torch.Tensor = grouped_mm_experts_forward(module, hidden_states, *args, **kwargs)
    finally:
        _tokens.reset(before)
    return out


# -- in a model ------------------------------------------------------------------------------------


class Placement(NamedTuple):
    """Where experts are multiplied: at the executor or here, and there with which padding."""

    remote: bool = True
    padding: Padding | None = None


class Planned(NamedTuple):
    """A projection that is to be swapped, and the groups of its experts."""

    projection: Projection
    name: str  # below the base model, as manifests name it
    groups: list[Group]


def plan_experts(model: nn.Module, groups: Sequence[Group], exclude: Sequence[str] = ()) -> list[Planned]:
    """Which projections of a model an executor serves.

    Args:
        exclude: see ``attach_layers``; names of experts are without their number.

    Raises:
        ModelMismatch: one is not here, has another shape, or not all of its experts are served.
    """
    served: dict[str, list[Group]] = {}
    for group in groups:
        if group.info.members[0].expert is not None:
            name = group.info.members[0].name.rpartition(".")[0]
            if not any(f".{name}".endswith(f".{entry}") for entry in exclude):
                served.setdefault(name, []).append(group)
    here = own_projections(model)
    for name, found in served.items():
        _check(name, here.get(name), [group.info for group in found])
    return [Planned(here[name], name, found) for name, found in served.items()]


def own_projections(model: nn.Module) -> dict[str, Projection]:
    """The projections of a model, whatever is in their place, by their names below the base model."""
    inner = base_model(model)
    prefix = getattr(inner, "base_model_prefix", "")
    prefix = prefix if hasattr(inner, prefix) else ""
    # PEFT puts a wrapper around the module for each parameter that it adapts.
    return {below(each.name.replace(".base_layer", ""), prefix): each for each in projections(inner)}


def _check(name: str, here: Projection | None, infos: Sequence[GroupInfo]) -> None:
    if here is None:
        raise ModelMismatch(
            f"the executor serves {name[:80]}, which this model does not have; attach a model of the "
            "architecture that the executor serves"
        )
    if isinstance(here.weight, RemoteExperts):
        raise ModelMismatch(f"{name} is attached already; detach the model first")
    count, outputs, inputs = here.axes
    expected = [
        GroupInfo(inputs, (Member(f"{name}.{at}", outputs, "", here.transposed, expert=at),))
        for at in range(count)
    ]
    # Not what a checkpoint calls it. No digest covers what is said to be the head.
    told = [
        GroupInfo(
            info.inputs,
            tuple(Member(m.name, m.outputs, "", m.transposed, expert=m.expert) for m in info.members),
            head=info.head,
        )
        for info in infos
    ]
    if told != expected:
        raise ModelMismatch(
            f"{name} has {count} experts of {outputs} outputs and {inputs} inputs here, and others at the "
            "executor"
        )


def attach_experts(model: nn.Module, plan: Iterable[Planned], padding: Padding | None) -> int:
    """Swap projections for stand-ins; how many."""
    count, sorts = 0, False
    for projection, name, groups in plan:
        weight = projection.weight
        device = torch.device("cpu") if weight.is_meta else weight.device
        experts = Experts(
            name,
            groups,
            None if projection.batched else padding,  # they get equally many rows anyway
            skips=projection.zeros and padding is None,
        )
        stand_in = RemoteExperts(experts, weight.shape, weight.dtype, device, projection.transposed)
        projection.module._parameters[projection.parameter] = nn.Parameter(stand_in, requires_grad=False)
        sorts = sorts or not projection.batched
        count += 1
    if sorts:
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)
        base_model(model).set_experts_implementation(IMPLEMENTATION)  # type: ignore[operator]
    return count


def probe_experts(planned: Planned, tolerance: float) -> None:
    """Compare one random row for each expert with the executor's answer.

    Raises:
        ModelMismatch: another weight is there than here.
    """
    projection, name, groups = planned
    count, _, inputs = projection.axes
    rows = torch.randn((count, inputs), generator=torch.Generator().manual_seed(0))
    got = Experts(name, groups, None).product(Direction.FORWARD, rows, [1] * count, RequestClass.UNDECLARED)
    for at, (row, answer) in enumerate(zip(rows, got, strict=True)):
        weight = projection.weight[at].detach().float().cpu()
        expected = row @ (weight if projection.transposed else weight.T)
        if (answer - expected).norm() > tolerance * expected.norm():
            raise ModelMismatch(
                f"{name}.{at} has other weights here than at the executor; "
                "attach the very checkpoint that the executor serves"
            )


def detach_experts(model: nn.Module, manifest: Manifest, source: Checkpoint) -> int:
    """Put real weights back; how many projections."""
    members: dict[str, list[Member]] = {}
    for group in manifest.groups:
        for member in group.members:
            if member.expert is not None:
                members.setdefault(member.name.rpartition(".")[0], []).append(member)
    count, sorts = 0, False
    for name, projection in own_projections(model).items():
        module, parameter = projection.module, projection.parameter
        stand_in = module._parameters[parameter]
        if isinstance(stand_in, RemoteExperts):
            weights = [source.member_weight(member) for member in members[name]]
            real = torch.stack(
                [w.T if m.transposed else w for w, m in zip(weights, members[name], strict=True)]
            )
            real = real.to(stand_in.device, stand_in.dtype)
            module._parameters[parameter] = nn.Parameter(real, requires_grad=False)
            sorts = sorts or not projection.batched
            count += 1
    if sorts:
        inner: Any = base_model(model)
        inner.set_experts_implementation(inner.get_correct_experts_implementation(None))
    return count


def expert_parameters(manifest: Manifest, exclude: Sequence[str] = ()) -> set[str]:
    """The full names of a manifest's parameters that hold the weights of experts that are swapped."""
    names = {m.name.rpartition(".")[0] for g in manifest.groups for m in g.members if m.expert is not None}
    names = {name for name in names if not any(f".{name}".endswith(f".{entry}") for entry in exclude)}
    return {info.name for info in manifest.parameters if below(info.name, manifest.base_prefix) in names}
