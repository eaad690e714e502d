"""VirtLinear: a linear layer whose product is computed by the executor (Symbiosis §3.2, VirtLayer)."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from transformers.pytorch_utils import Conv1D

from shared.compat import is_traced, transforms_run
from shared.devices import to_device, to_host
from shared.errors import ConfigurationError, ModelMismatch, NonFiniteError, RemoteWeightUnavailable
from shared.ring.rows import all_finite_below
from shared.wire.header import Direction, RequestClass, member_indices
from shared.wire.incoming import own
from shared.wire.messages import GroupInfo, Member
from tenant_sdk.connection.remote import LazyResult
from tenant_sdk.model.recording import answered
from tenant_sdk.model.remote_weight import RemoteWeight
from tenant_sdk.products.modes import Privacy
from tenant_sdk.products.products import Products

DRAFT_TOKENS = 16  # assisted decoding looks at as many of one sequence at once; more are a prompt


_Context = tuple[int, bool, bool, torch.dtype]  # version, whether autograd and torch.func follow, dtype


@dataclass
class _Last:
    """The last request of a group in one thread, and the outputs of it that nobody took yet."""

    input: weakref.ref[torch.Tensor]
    context: _Context
    values: torch.Tensor | None  # a copy of an input that counts no versions
    members: set[int]  # asked for with this input
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    def is_for(self, x: torch.Tensor, context: _Context) -> bool:
        if self.input() is not x or self.context != context:
            return False
        return self.values is None or torch.equal(self.values, x)


class RemoteGroup:
    """Layers that receive the same tensor: asked for together, with one request.

    Who is asked for along with whom is learned while the model runs. All are at first; members whose
    outputs were fetched but not used part from the others, because an adapter changes their input (IA3
    on a feed-forward layer) or they are not called; a member that turns out to get the same tensor as
    others joins them again.
    """

    def __init__(self, index: int, info: GroupInfo, products: Products, model: str = "") -> None:
        self.index = index
        self.info = info
        self.model = model  # the executor's digest
        self._products = products
        self._together: list[set[int]] = []  # whom to ask for along with a member; not before it is asked for
        self._threads = threading.local()
        self._outputs: dict[int, list[int]] = {}  # widths of members
        self.handle = next(_handles)
        _groups[self.handle] = self

    @property
    def privacy(self) -> Privacy:
        """The mode that hides its rows."""
        return self._products.privacy

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteGroup:
        """Copies of a model share the session."""
        return self

    def output(self, member: int, x: torch.Tensor) -> torch.Tensor:
        """The member's bias-free output for x [..., D]: fresh, writable, [..., O], x's dtype."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if len(self.info.members) == 1:
            return self._request(1, x, dtype)[0]
        # Tensors made in inference mode have no version that would tell of writing in place.
        version = -1 if x.is_inference() else x._version
        context = (version, x.requires_grad and torch.is_grad_enabled(), transforms_run()(), dtype)
        last: _Last | None = getattr(self._threads, "last", None)
        if last is not None and last.is_for(x, context):
            if member in last.outputs:
                return last.outputs.pop(member)
            if member not in last.members:  # it gets the same tensor after all
                last.members.add(member)
                for other in last.members:
                    self._together[other] |= last.members
                return self._request(1 << member, x, dtype)[0]
        if not self._together:
            everyone = range(len(self.info.members))
            self._together = [set(everyone) for _ in everyone]
        if last is not None:
            self._separate_members(last)
        wanted = set(self._together[member])
        member_bits = sum(1 << i for i in wanted)
        outputs = dict(zip(member_indices(member_bits), self._request(member_bits, x, dtype), strict=True))
        wanted_output = outputs.pop(member)
        values = x.clone() if x.is_inference() else None
        self._threads.last = _Last(weakref.ref(x), context, values, wanted, outputs)
        return wanted_output

    def _separate_members(self, last: _Last) -> None:
        """Members whose outputs nobody took get another tensor than those whose were."""
        unused = last.outputs.keys()
        used = last.members - unused
        for member in used:
            self._together[member] -= unused
        for member in unused:
            self._together[member] -= used

    def forget(self) -> None:
        """Take nothing from this thread's last request, and learn nothing of who took what."""
        self._threads.last = None

    def _request(self, member_bits: int, x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        attended, rows = _tokens.get(), x.to(dtype)
        request_class = request_class_for(x.shape[-2] if x.dim() > 1 else 1)
        if attended is None or attended.shape != x.shape[:-1]:
            return self.differentiable(Direction.FORWARD, member_bits, (rows,), request_class)
        answers = self.differentiable(Direction.FORWARD, member_bits, (rows[attended],), request_class)
        return tuple(
            answer.new_zeros((*attended.shape, answer.shape[-1])).index_put((attended,), answer)
            for answer in answers
        )

    def differentiable(
        self,
        direction: Direction,
        member_bits: int,
        tensors: tuple[torch.Tensor, ...],
        request_class: RequestClass = RequestClass.FINETUNING,
    ) -> tuple[torch.Tensor, ...]:
        """``product`` of tensors [..., W] of one leading shape, with a graph where something needs one."""
        if transforms_run()() or any(map(requires_autograd, tensors)):
            outputs: tuple[torch.Tensor, ...] = _GroupProduct.apply(  # type: ignore[no-untyped-call]
                self, direction, member_bits, request_class, *tensors
            )
            return outputs
        # Nothing to differentiate: decoding does not pay for the graph.
        return self.plain_product(direction, member_bits, tensors, request_class)

    def plain_product(
        self,
        direction: Direction,
        member_bits: int,
        tensors: tuple[torch.Tensor, ...],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> tuple[torch.Tensor, ...]:
        """The same outside autograd."""
        leading = tensors[0].shape[:-1]
        rows = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
        rows = [tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() != 2 else tensor for tensor in rows]
        answers = self._ask(direction, member_bits, rows, request_class)
        if is_traced():
            return tuple(answer.view(*leading, answer.shape[-1]) for answer in answers)
        return tuple(own(answer, (*leading, answer.shape[-1])) for answer in answers)

    def _ask(
        self, direction: Direction, member_bits: int, tensors: list[torch.Tensor], request_class: RequestClass
    ) -> list[torch.Tensor]:
        """``product``, what a recording has of it, or what stands for it in a graph that is being made."""
        if is_traced():
            token = _traced.set(True)
            try:
                answers: list[torch.Tensor] = _products(
                    tensors, self.handle, direction, member_bits, request_class
                )
            finally:
                _traced.reset(token)
            return answers
        return answered(
            (self, direction, member_bits),
            tensors,
            lambda: self.product(direction, member_bits, tensors, request_class),
        )

    def product(
        self,
        direction: Direction,
        member_bits: int,
        tensors: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> list[torch.Tensor]:
        """What ``submit`` gives, waited for."""
        return self.submit(direction, member_bits, tensors, request_class).result()

    def submit(
        self,
        direction: Direction,
        member_bits: int,
        tensors: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> LazyResult:
        """Tensors of any float dtype through the privacy mode, which works in float32 on the CPU.

        Raises:
            NonFiniteError: before anything is sent.
            ConfigurationError: tensors without values of their own.
            ModelMismatch: the model's own configuration makes rows that do not fit these layers.
        """
        outputs = self.widths(member_bits)
        widths = [self.info.inputs] if direction == Direction.FORWARD else outputs
        if [tensor.shape[-1] for tensor in tensors] != widths:
            names = ", ".join(member.name for member in self._members(member_bits))
            tensor_widths = [tensor.shape[-1] for tensor in tensors]
            raise ModelMismatch(
                f"{names} takes rows of {widths} numbers, but the model makes rows of {tensor_widths}: its "
                "configuration does not fit the weights"
            )
        first = tensors[0]
        if not len(first):  # an empty batch: nothing to ask for
            tensor_widths = outputs if direction == Direction.FORWARD else [self.info.inputs]
            return LazyResult(lambda: [first.new_empty((0, width)) for width in tensor_widths])
        for tensor in tensors:
            check_values(tensor, direction, (member.name for member in self.info.members))
        if first.dtype == torch.float32 and first.device.type == "cpu":
            return self._products.submit(self.index, direction, member_bits, tensors, request_class)
        here = to_host(tensors, torch.float32)
        pending = self._products.submit(self.index, direction, member_bits, here, request_class)
        return LazyResult(lambda: to_device(pending.result(), first.device, first.dtype))

    def widths(self, member_bits: int) -> list[int]:
        """Outputs of the members."""
        outputs = self._outputs.get(member_bits)
        if outputs is None:
            outputs = self._outputs[member_bits] = [m.outputs for m in self._members(member_bits)]
        return outputs

    def _members(self, member_bits: int) -> list[Member]:
        return [self.info.members[i] for i in member_indices(member_bits)]


def check_values(tensor: torch.Tensor, direction: Direction, names: Iterable[str]) -> None:
    """Refuse rows that cannot be sent, of layers of these names.

    Raises:
        NonFiniteError: NaN or infinity.
        ConfigurationError: what stands for several tensors in a way that no product can be asked for.
    """
    try:
        tensor.data_ptr()
    except RuntimeError as error:
        raise ConfigurationError(
            "the rows of a remote product have no values here, as with is_grads_batched=True and "
            "vectorize=True of torch.autograd; use torch.func (vmap, jacrev, jacfwd, hessian), which remote "
            "products know"
        ) from error
    if all_finite_below(tensor):
        return
    if direction == Direction.FORWARD:
        raise NonFiniteError(
            f"the input of {', '.join(names)} holds NaN or infinity; nothing was sent. Look at the layers "
            "and adapters before it, or lower the learning rate"
        )
    raise NonFiniteError(
        f"the output gradient of {', '.join(names)} holds NaN or infinity; nothing was sent. Lower the "
        "learning rate or the loss scale"
    )


# -- inside torch.compile --------------------------------------------------------------------------
#
# Dynamo looks into a model, and must not look into this: what it would see depends on addresses, counters
# and sockets. It takes ``_traced_output`` as it is; that runs while the graph is made, once for each layer,
# which puts one ``symbiosis::products`` into it for all members with the same input, forward and backward.

_traced: ContextVar[bool] = ContextVar("traced", default=False)  # a graph is made of what is computed now
_handles = itertools.count()
_groups: weakref.WeakValueDictionary[int, RemoteGroup] = weakref.WeakValueDictionary()


@torch.library.custom_op("symbiosis::products", mutates_args=())
def _products(
    tensors: list[torch.Tensor], handle: int, direction: int, member_bits: int, request_class: int
) -> list[torch.Tensor]:
    group = _groups[handle]
    try:
        results = group.product(Direction(direction), member_bits, tensors, RequestClass(request_class))
    except NonFiniteError:
        if not _traced.get():
            raise
        # ``torch.func.linearize`` makes its graph with rows that nobody has written.
        return [answer.fill_(torch.nan) for answer in _unwritten(group, direction, member_bits, tensors[0])]
    # Answers of several members may lie in one block of memory, which operators must not give.
    return results if len(results) == 1 else [result.clone() for result in results]


@_products.register_fake
def _(
    tensors: list[torch.Tensor], handle: int, direction: int, member_bits: int, request_class: int
) -> list[torch.Tensor]:
    return _unwritten(_groups[handle], direction, member_bits, tensors[0])


def _unwritten(
    group: RemoteGroup, direction: int, member_bits: int, rows: torch.Tensor
) -> list[torch.Tensor]:
    """Tensors as answers to rows are, without values."""
    widths = group.widths(member_bits) if direction == Direction.FORWARD else [group.info.inputs]
    return [rows.new_empty((rows.shape[0], width)) for width in widths]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _traced_output(x: torch.Tensor, handle: int, member: int) -> torch.Tensor:
    return _groups[handle].output(member, x)


_OPTIONS = 4  # of ``_GroupProduct``, before the tensors


class _GroupProduct(torch.autograd.Function):
    """``y_m = x W_m^T`` for some members, or backward ``gx = sum_m gy_m W_m``: each is the other's adjoint.

    Nothing is saved: the gradient needs the weight alone (Symbiosis §3.6). Both are linear, so a tangent goes
    the way of the rows themselves, and rows of a batch are rows like others (``torch.func``).
    """

    @staticmethod
    def forward(
        group: RemoteGroup,
        direction: Direction,
        member_bits: int,
        request_class: RequestClass,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return group.plain_product(direction, member_bits, tensors, request_class)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        ctx.group, ctx.direction, ctx.members, ctx.request_class, *tensors = inputs
        ctx.count = len(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        nothing: tuple[None, ...] = (None,) * (_OPTIONS + ctx.count)
        if ctx.direction == Direction.BACKWARD:
            (gradient,) = grads
            if gradient is None:
                return nothing
            outputs = ctx.group.differentiable(Direction.FORWARD, ctx.members, (gradient,))
            return (*nothing[:_OPTIONS], *outputs)
        # A backward may reach only some members (their adapters are trained, others' are not).
        member_bits, tensors = _reached(ctx.members, grads)
        if not tensors:
            return nothing
        gradients = ctx.group.differentiable(Direction.BACKWARD, member_bits, tensors)
        return (*nothing[:_OPTIONS], *gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        rows = tangents[_OPTIONS:]
        if ctx.direction == Direction.FORWARD:
            member_bits, tensors = ctx.members, tuple(each for each in rows if each is not None)
        else:
            member_bits, tensors = _reached(ctx.members, rows)
        return ctx.group.differentiable(  # type: ignore[no-any-return]
            ctx.direction, member_bits, tensors, ctx.request_class
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *inputs: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        options, tensors = inputs[:_OPTIONS], inputs[_OPTIONS:]
        batched = tuple(
            tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            for tensor, dim in zip(tensors, in_dims[_OPTIONS:], strict=True)
        )
        outputs = _GroupProduct.apply(*options, *batched)  # type: ignore[no-untyped-call]
        return outputs, (0,) * len(outputs)


def _reached(
    member_bits: int, tensors: Sequence[torch.Tensor | None]
) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Of some members' tensors those that are there, and whose they are."""
    reached = [
        (index, tensor)
        for index, tensor in zip(member_indices(member_bits), tensors, strict=True)
        if tensor is not None
    ]
    return sum(1 << index for index, _ in reached), tuple(tensor for _, tensor in reached)


def requires_autograd(x: torch.Tensor) -> bool:
    """Whether autograd follows what is made of this tensor: for gradients, or with a tangent."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return forward_ad.unpack_dual(x).tangent is not None


_training_forward: ContextVar[bool] = ContextVar("training_forward", default=False)


@contextmanager
def training_forward() -> Iterator[None]:
    """What is computed here is a training's forward, though it has no graph: nobody waits for its tokens."""
    token = _training_forward.set(True)
    try:
        yield
    finally:
        _training_forward.reset(token)


_tokens: ContextVar[torch.Tensor | None] = ContextVar("tokens", default=None)


@contextmanager
def without_padding(attended: torch.Tensor) -> Iterator[None]:
    """Of inputs [B, T, D] only the rows of these tokens are sent; a product with another row is 0.

    Args:
        attended: bool [B, T].
    """
    token = _tokens.set(attended)
    try:
        yield
    finally:
        _tokens.reset(token)


def request_class_for(tokens: int) -> RequestClass:
    """Of a request for so many tokens of a sequence: for the next tokens, a prompt, or training."""
    # Nothing is generated with gradients; below the first adapter inputs have none.
    if torch.is_grad_enabled() or _training_forward.get():
        return RequestClass.FINETUNING
    return RequestClass.DECODE if tokens <= DRAFT_TOKENS else RequestClass.PREFILL


class _Virtual(nn.Module):
    """What VirtLinear and VirtConv1D share."""

    weight: Any  # a RemoteWeight in a Parameter
    bias: Any  # nn.Parameter or None; the two base classes disagree

    def _setup(self, group: RemoteGroup, member: int, original: nn.Module) -> None:
        nn.Module.__init__(self)
        self._group, self._member = group, member
        name = group.info.members[member].name
        weight = original.weight
        bias = getattr(original, "bias", None)
        device = torch.device("cpu") if weight.is_meta else weight.device
        placeholder = RemoteWeight(name, weight.shape, weight.dtype, device, model=group.model)
        self.weight = nn.Parameter(placeholder, requires_grad=False)
        self.register_parameter("bias", bias)
        self.train(original.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x W^T + b`` for x [..., D]: [..., O] in x's dtype."""
        parameters = self._parameters  # not by attribute, which a module looks up at length
        weight, added = parameters.get("weight"), None
        if weight is None:  # PEFT's ``target_parameters`` put a property in its place
            weight = self.weight
            added = weight.added
        if weight.requires_grad:
            raise RemoteWeightUnavailable(
                f"{self._group.info.members[self._member].name} is to be trained in full, but its weight "
                "stays with the provider; train an adapter, or keep the layer local with exclude="
            )
        bias, compiling = parameters["bias"], torch.compiler.is_compiling()
        out: torch.Tensor
        if compiling:
            out = _traced_output(x, self._group.handle, self._member)
        else:
            out = self._group.output(self._member, x)
        if added is not None:
            out = out + x @ (added if isinstance(self, Conv1D) else added.T)
        if bias is None:
            return out
        if compiling or transforms_run()() or is_traced():  # a batch of biases fits into no output
            return out + bias
        return out.add_(bias)


class VirtLinear(_Virtual, nn.Linear):
    """An ``nn.Linear`` without its weight."""

    def __init__(self, group: RemoteGroup, member: int, original: nn.Linear) -> None:
        """Stand in for ``original``, taking over its bias."""
        self._setup(group, member, original)
        self.in_features, self.out_features = original.in_features, original.out_features


class VirtConv1D(_Virtual, Conv1D):
    """A GPT-2-style ``Conv1D`` (weight stored as [D, O]) without its weight."""

    def __init__(self, group: RemoteGroup, member: int, original: Conv1D) -> None:
        """Stand in for ``original``, taking over its bias."""
        self._setup(group, member, original)
        self.nx, self.nf = original.nx, original.nf


def virtual_layer(group: RemoteGroup, member: int, original: nn.Module) -> VirtLinear | VirtConv1D:
    """The virtual layer of the right kind for a linear layer."""
    if isinstance(original, Conv1D):
        return VirtConv1D(group, member, original)
    if isinstance(original, nn.Linear):
        return VirtLinear(group, member, original)
    raise TypeError(f"not a linear layer: {type(original).__name__}")
