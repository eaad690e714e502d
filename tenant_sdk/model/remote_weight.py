"""What stands where a frozen weight was: its shape, dtype and device, and no values."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from shared.errors import RemoteWeightUnavailable

SUM = "a sum with the base weight (DoRA's weight norm, or merging)"
# What reads the values, by the operation that it begins with.
_NEEDS = {
    "_linalg_svd": "a singular value decomposition of the base weight (PiSSA, CorDA, MiLoRA)",
    "linalg_qr": "a QR decomposition of the base weight (OLoRA)",
    "linalg_vector_norm": "the norm of the base weight's rows (DoRA)",
    "add": SUM,
    "mm": "a product with the base weight itself (PiSSA by iteration, HRA, or merging)",
    "mul": "scaling the base weight (merging an adapter)",
    "t": "the base weight transposed (merging an adapter)",
    "clone": "a copy of the base weight (SHiRA, or merging an adapter)",
    "add_": "writing the adapter into the base weight (merging)",
    "copy_": "writing into the base weight (merging)",
}
_INSTEAD = (
    "Use a method that needs only the layer's output: LoRA, rsLoRA, AdaLoRA, IA3, VeRA, LoHa, LoKr, "
    "prefix, prompt or P-tuning; and instead of merging, keep the adapter beside the base model. If the "
    "model itself reads the weight, keep the layer local: exclude=[...] of session.load_model or "
    "session.attach."
)
_SAVING = "Save the adapter alone: `save_pretrained` of the PEFT model, or `peft.get_peft_model_state_dict`."


class RemoteWeight(torch.Tensor):
    """A tensor without storage whose values may not be read.

    PEFT asks a layer's weight for shape, dtype and device, and moves adapters to that device; so a
    ``meta`` tensor or zeros would be silently wrong. Moving and detaching give another
    RemoteWeight, and so does adding an adapter of the same shape, which the virtual layer multiplies apart:
    PEFT's ``target_parameters`` do. Everything else raises.

    Attributes:
        layer: whose weight it is.
        added: to the weight, [O, D] as it lies; None: nothing.
    """

    layer: str
    added: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        layer: str,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        added: torch.Tensor | None = None,
    ) -> RemoteWeight:
        """A stand-in for ``layer``'s weight of the given shape."""
        self: RemoteWeight = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.layer, self.added = layer, added
        return self

    def __init__(self, *args: object) -> None:
        """All is done in ``__new__``."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Sums, here where autograd still sees them; all else is as for any tensor."""
        weight, other, *_ = (*args, None, None)
        is_sum = getattr(func, "__name__", "") == "add" and isinstance(weight, cls) and not kwargs
        if is_sum and isinstance(other, torch.Tensor) and not isinstance(other, RemoteWeight):
            return weight.sum_with(other)
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Allow what keeps the values untouched, refuse the rest."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        weight = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, cls))
        if name in ("detach", "alias"):
            return weight.like(weight.dtype, weight.device)
        if name == "_to_copy":
            return weight.like(
                kwargs.get("dtype") or weight.dtype, torch.device(kwargs.get("device") or weight.device)
            )
        if name == "set_" and len(args) == 2:  # to itself, as ``torch.nn.utils.parametrize`` does
            to, of = args
            if isinstance(to, cls) and isinstance(of, cls) and to.is_same(of):
                return to
        raise weight._unavailable(_NEEDS.get(name, f"the operation {name} on the base weight"))

    def like(self, dtype: torch.dtype, device: torch.device) -> RemoteWeight:
        """A stand-in for the same weight."""
        return RemoteWeight(self.layer, self.shape, dtype, device, self.added)

    def is_same(self, other: RemoteWeight) -> bool:
        """Whether another stands for the same weight with the same added."""
        return self.layer == other.layer and self.shape == other.shape and self.added is other.added

    def sum_with(self, delta: torch.Tensor) -> RemoteWeight:
        """With an adapter added.

        Raises:
            RemoteWeightUnavailable: it has another shape.
        """
        if delta.shape != self.shape:
            raise self._unavailable(SUM)
        added = delta if self.added is None else self.added + delta
        return RemoteWeight(self.layer, self.shape, self.dtype, self.device, added)

    def _unavailable(self, need: str, instead: str = _INSTEAD) -> RemoteWeightUnavailable:
        return RemoteWeightUnavailable(
            f"the weight of {self.layer} stays with the provider, and something here needs {need}. {instead}"
        )

    # What reads memory without an operation that could be dispatched; some of it would crash.

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Refuse."""
        raise self._unavailable("its values as an array")

    def tolist(self) -> NoReturn:
        """Refuse."""
        raise self._unavailable("its values as a list")

    def apply_(self, *args: Any) -> NoReturn:
        """Refuse."""
        raise self._unavailable("its values one by one")

    def untyped_storage(self) -> NoReturn:
        """Refuse."""
        raise self._unavailable("its bytes, to save or to share them", _SAVING)

    def storage(self) -> NoReturn:
        """Refuse."""
        raise self._unavailable("its bytes, to save or to share them", _SAVING)

    def share_memory_(self) -> NoReturn:
        """Refuse."""
        raise self._unavailable("its bytes, to share them with another process", _SAVING)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._unavailable("its memory")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise self._unavailable("its bytes, to pickle them", _SAVING)

    def __deepcopy__(self, memo: dict[int, Any]) -> RemoteWeight:
        """A copy of the stand-in; as a Parameter if it is one."""
        copy = self.like(self.dtype, self.device)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=False)  # type: ignore[assignment]
        memo[id(self)] = copy
        return copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and owner; there are no values to show."""
        return f"RemoteWeight({self.layer!r}, shape={list(self.shape)}, dtype={self.dtype})"
