"""The placeholder for a frozen weight: its shape, dtype and device, and no values."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shared.errors import RemoteWeightUnavailable

_METHOD = (
    "Use a method that needs only the layer's output: LoRA, rsLoRA, AdaLoRA, IA3, VeRA, LoHa, LoKr, "
    "prefix, prompt or P-tuning; and instead of merging, keep the adapter beside the base model. "
)
_SKIP = (
    "Where all parameters are gone through (norms, checks, moving averages, hashes), skip parameters that do "
    "not require gradients: `if parameter.requires_grad`. "
)
_LOCAL = (
    "If the model itself reads the weight, keep the layer local: exclude=[...] of session.load_model or "
    "session.attach. "
)
_SAVE = "Save the adapter alone: `save_pretrained` of the PEFT model, or `peft.get_peft_model_state_dict`. "
_LOAD = "Load the adapter alone: `tenant_sdk.load_adapter`, or `peft.set_peft_model_state_dict`. "
_STAY = "It takes no memory here: there is nothing to offload, to share, to pin or to make narrower. "
_TRL = (
    "TRL's DPO and KTO hash all values for precompute_ref_log_probs=True: leave it False, which computes the "
    "reference at each step. "
)
_NEW = "Make one of the same kind: torch.zeros(weight.shape, dtype=weight.dtype). "
# What something needs, and what to do instead, by the operation that it begins with. Other operations need
# themselves, ``_SKIP`` and ``_LOCAL``.
_DISPATCHED = {
    "_linalg_svd": ("a singular value decomposition of the base weight (PiSSA, CorDA, MiLoRA)", _METHOD),
    "linalg_qr": ("a QR decomposition of the base weight (OLoRA)", _METHOD),
    "norm of rows": ("the norm of the base weight's rows (DoRA)", _METHOD),
    "add": ("a sum with the base weight (DoRA's weight norm, or merging)", _METHOD + _SKIP),
    "sub": ("a difference with the base weight (merging, or a moving average)", _METHOD + _SKIP),
    "mul": ("to scale the base weight (merging an adapter, or a moving average)", _METHOD + _SKIP),
    "clone": ("a copy of the base weight (SHiRA, merging, or a moving average)", _METHOD + _SKIP),
    **dict.fromkeys(
        ("mm", "addmm", "bmm", "mv"),
        ("a product with the base weight itself (PiSSA by iteration, HRA, or merging)", _METHOD + _LOCAL),
    ),
    **dict.fromkeys(
        ("t", "transpose", "permute"),
        ("the base weight transposed (a product with it, or merging)", _METHOD + _LOCAL),
    ),
    "add_": ("to write the adapter into the base weight (merging)", _METHOD + _SKIP),
    "sub_": ("to take the adapter out of the base weight (merging)", _METHOD + _SKIP),
    "copy_": ("to read all of its values, or to write them", _LOAD + _SKIP),
    "view": (
        "its values in a row (parameters_to_vector, or DistributedDataParallel)",
        _SKIP + "Give DistributedDataParallel init_sync=False. " + _LOCAL,
    ),
    "split": (
        "its values in parts (fully_shard)",
        "Give fully_shard ignored_params={the parameters that do not require gradients}. " + _LOCAL,
    ),
    "_to_copy": ("its values as another kind of numbers", _STAY + _LOCAL),
    "pin_memory": ("its bytes, to pin them", _STAY + _SKIP),
}
_OF_ITS_KIND = ("a new tensor of its kind", _NEW + _SKIP + _LOCAL)
_DISPATCHED |= dict.fromkeys(
    (
        "new_empty",
        *(f"{kind}_like" for kind in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")),
    ),
    _OF_ITS_KIND,
)
# What reads memory without an operation that could be dispatched; some of it would crash.
_UNDISPATCHED = {
    **dict.fromkeys(("numpy", "__array__"), ("its values as an array", _STAY + _SKIP + _TRL)),
    "tolist": ("its values as a list", _SKIP),
    **dict.fromkeys(("apply_", "map_", "map2_"), ("its values one by one", _SKIP)),
    **dict.fromkeys(("storage", "untyped_storage"), ("its bytes, to save or to share them", _SAVE)),
    "share_memory_": ("its bytes, to share them with another process", _STAY + _SAVE),
    "__reduce_ex__": ("its bytes, to pickle them", _SAVE),
    "__dlpack__": ("its memory", _SKIP),
    "new": _OF_ITS_KIND,
}
_NO_STORAGE = "data is not allocated"  # torch's words, where compiled code asks for memory


class _OfWeights(torch._C._TensorMeta):
    """Lets libraries that move a parameter make one of its own class again, as of ``nn.Parameter``."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a placeholder, or a parameter of one."""
        if not args or not isinstance(args[0], torch.Tensor):
            return super().__call__(*args, **kwargs)
        if not isinstance(args[0], RemoteWeight):
            raise RemoteWeightUnavailable(
                f"values cannot take a frozen weight's place. {_LOAD}{_LOCAL}".rstrip()
            )
        return torch.nn.Parameter(args[0], kwargs.get("requires_grad", False))


class RemoteWeight(torch.Tensor, metaclass=_OfWeights):
    """A tensor without storage whose values may not be read.

    PEFT asks a layer's weight for shape, dtype and device, and moves adapters to that device; so a
    ``meta`` tensor or zeros would be silently wrong. Moving and detaching give another
    RemoteWeight, and so does adding an adapter of the same shape, which the virtual layer multiplies apart:
    PEFT's ``target_parameters`` do. Everything else raises.

    Attributes:
        layer: whose weight it is.
        added: to the weight, [O, D] as it lies; None: nothing.
        model: digest of the model that has the layer.
    """

    layer: str
    added: torch.Tensor | None
    model: str

    @staticmethod
    def __new__(
        cls,
        layer: str,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        added: torch.Tensor | None = None,
        model: str = "",
    ) -> RemoteWeight:
        """A placeholder for ``layer``'s weight of the given shape."""
        self: RemoteWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.layer, self.added, self.model = layer, added, model
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        """All is done in ``__new__``."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Sums, here where autograd still sees them; what reads memory; all else is as for any tensor."""
        weight, other, *_ = (*args, None, None)
        name = getattr(func, "__name__", "")
        is_sum = name == "add" and isinstance(weight, cls) and not kwargs
        if is_sum and isinstance(other, torch.Tensor) and not isinstance(other, RemoteWeight):
            return weight.sum_with(other)
        replaces = func == torch.Tensor.data.__set__  # type: ignore[attr-defined]
        if replaces and not _same(weight, other):
            raise _first(args, kwargs).unavailable(*_DISPATCHED["copy_"])
        if name in _UNDISPATCHED:
            raise _first(args, kwargs).unavailable(*_UNDISPATCHED[name])
        try:
            with torch._C.DisableTorchFunctionSubclass():  # a result with values is an ordinary tensor
                return func(*args, **(kwargs or {}))
        except RuntimeError as error:
            if _NO_STORAGE not in str(error):
                raise
            raise _first(args, kwargs).unavailable(*_any_other(name)) from error

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow what keeps the values untouched, refuse the rest."""
        kwargs = kwargs or {}
        name, weight = func.overloadpacket.__name__, _first(args, kwargs)
        to, of, *_ = (*args, None, None)
        dtype = kwargs.get("dtype") or weight.dtype
        if name in ("detach", "alias"):
            return weight.like(weight.dtype, weight.device)
        if name == "_to_copy" and dtype.is_floating_point:
            return weight.like(dtype, torch.device(kwargs.get("device") or weight.device))
        # To itself, as ``torch.nn.utils.parametrize`` and ``load_state_dict`` do.
        if name in ("set_", "copy_") and _same(to, of):
            return to
        if name == "is_pinned":
            return False
        if name == "linalg_vector_norm" and len(args) > 2 and args[2]:
            name = "norm of rows"
        raise weight.unavailable(*(_DISPATCHED.get(name) or _any_other(name)))

    def like(self, dtype: torch.dtype, device: torch.device) -> RemoteWeight:
        """A placeholder for the same weight."""
        return RemoteWeight(self.layer, self.shape, dtype, device, self.added, self.model)

    def is_same(self, other: RemoteWeight) -> bool:
        """Whether another stands for the same weight with the same added."""
        mine, its = (self.model, self.layer, self.shape), (other.model, other.layer, other.shape)
        return mine == its and self.added is other.added

    def sum_with(self, delta: torch.Tensor) -> RemoteWeight:
        """With an adapter added.

        Raises:
            RemoteWeightUnavailable: it has another shape.
        """
        if delta.shape != self.shape:
            raise self.no_sum()
        added = delta if self.added is None else self.added + delta
        return RemoteWeight(self.layer, self.shape, self.dtype, self.device, added, self.model)

    def unavailable(self, need: str, instead: str) -> RemoteWeightUnavailable:
        """The error for what something needs of it, and what to do instead."""
        return RemoteWeightUnavailable(
            f"the weight of {self.layer} stays with the provider, and something here needs {need}. "
            f"{instead.rstrip()}"
        )

    def no_sum(self) -> RemoteWeightUnavailable:
        """The error for a sum with what is no adapter of its shape."""
        return self.unavailable(*_DISPATCHED["add"])

    def __copy__(self) -> RemoteWeight:
        """As ``__deepcopy__``: there is no memory that copies could share."""
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteWeight:
        """A copy of the placeholder; as a Parameter if it is one."""
        copy = self.like(self.dtype, self.device)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=False)  # type: ignore[assignment]
        memo[id(self)] = copy
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and owner; there are no values to show."""
        return f"RemoteWeight({self.layer!r}, shape={list(self.shape)}, dtype={self.dtype})"


def _any_other(name: str) -> tuple[str, str]:
    return f"the operation {name} on the base weight", _SKIP + _LOCAL


def _same(one: Any, other: Any) -> bool:
    """Whether both stand for the same weight."""
    return isinstance(one, RemoteWeight) and isinstance(other, RemoteWeight) and one.is_same(other)


def _first(args: Any, kwargs: Any) -> RemoteWeight:
    """The first placeholder among a function's arguments."""
    return next(each for each in tree_leaves((args, kwargs)) if isinstance(each, RemoteWeight))
