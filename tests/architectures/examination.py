"""One architecture end to end: saved, served, loaded by a tenant, and compared with itself run locally.

Tolerance: 1e-5, relative L2 distance, float32 on both sides. They multiply the same numbers and may add them
in another order; 1e-5 is a hundred roundings of 2^-24. A tensor that is next to nothing beside the others is
measured against a thousandth of the largest. Some models lose more than that to float32 by themselves: where
the tolerance is not kept, the local model is run in float64 too, and twice what its float32 is off is
allowed, in its own order of sums or in another.
"""

from __future__ import annotations

import copy
import logging
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from tiny import NotBuilt, candidates, inputs_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

import provider
import tenant_sdk
from shared.errors import SymbiosisError
from tenant_sdk.model.remote_weight import RemoteWeight

TOLERANCE = 1e-5
SECONDS = 15.0  # of the processor, to find a configuration and inputs that fit each other
SHARE = 0.8  # of the frozen linear parameters, at least, are to be at the provider
# PEFT refuses these layers of state spaces, which bypass the layer's forward.
NO_LORA = {name: ["out_proj"] for name in ("mamba", "falcon_mamba", "mamba2", "falcon_h1", "nemotron_h")}
VERSIONS = ", ".join(f"{name} {version(name)}" for name in ("transformers", "peft", "torch"))
_PRODUCTS = re.compile(r"(^|_)(mm|addmm|bmm|baddbmm|mv|addmv|linear|matmul|mm_fallback)$")
_LINEAR_FORWARDS = (nn.Linear.forward, Conv1D.forward)
Targets = str | list[str]  # of an adapter, as PEFT takes them


@dataclass
class Result:
    """What came of one architecture.

    Attributes:
        kind: ``causal`` or ``base``.
        stage: how far it came: ``build``, ``local``, ``serve``, ``load``, ``forward``, ``backward``, or
            ``done``; where it stayed, ``said`` has the error. ``linear``: it runs, and has no weight that a
            provider could multiply by.
        refused: the error is one of this project's own.
        share: of the frozen linear parameters, those that the provider has.
        tenants: names of the others, a few.
        error: of the outputs.
        gradient: error of an adapter's gradients; None: not compared, and ``said`` has the reason.
        rounding: of the local model's own float32, if it is not equal: how far float64 is from it, in outputs
            and gradients, whichever of two orders of sums is farther.
        requests: of one forward pass.
        seconds: it took.
        versions: of the libraries that it was found with.
    """

    kind: str
    model_type: str
    class_name: str
    stage: str = "build"
    said: str = ""
    refused: bool = False
    share: float | None = None
    tenants: list[str] = field(default_factory=list)
    error: float | None = None
    gradient: float | None = None
    rounding: float | None = None
    requests: int = 0
    seconds: float = 0.0
    versions: str = VERSIONS

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, model type and class."""
        return self.kind, self.model_type, self.class_name

    @property
    def ran(self) -> bool:
        """Whether local transformers ran the tiny model, so that there is something to compare with."""
        return self.stage not in ("build", "local", "linear")

    @property
    def worst(self) -> float:
        """The larger error, of outputs and of gradients where they were compared; both are finite."""
        return max(self.error or 0.0, self.gradient or 0.0)

    @property
    def within(self) -> bool:
        """Whether the tolerance is kept."""
        return self.stage == "done" and self.worst <= TOLERANCE

    @property
    def equal(self) -> bool:
        """The same, or what float32 loses in this model is as large."""
        return self.within or (self.stage == "done" and self.worst <= 2 * (self.rounding or 0.0))

    @property
    def good(self) -> bool:
        """What is promised: equal, and most of the frozen parameters at the provider."""
        return self.equal and self.share is not None and self.share >= SHARE


def examine(
    kind: str, model_type: str, class_name: str, tell: Callable[[str], None] = lambda stage: None
) -> Result:
    """Take one architecture from its configuration to gradients; errors are in the result.

    Args:
        kind: ``causal`` or ``base``.
        model_type: as transformers names it.
        class_name: of ``transformers``.
        tell: is called with each stage after ``build`` when it begins.
    """
    result = Result(kind, model_type, class_name)

    def reach(stage: str) -> None:
        result.stage = stage
        tell(stage)

    with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="symbiosis-") as folder:
        warnings.simplefilter("ignore")  # of hundreds of models, and none of them ours
        logging.disable(logging.ERROR)
        transformers.utils.logging.disable_progress_bar()
        try:
            _examine(result, Path(folder), reach)
        except Exception as error:
            result.said = _sentence(error)
            result.refused = isinstance(error, SymbiosisError)
        finally:
            logging.disable(logging.NOTSET)
    return result


def _examine(result: Result, folder: Path, reach: Callable[[str], None]) -> None:
    local, inputs, expected = _local(result, folder, reach)
    linear = _linear_parameters(local, inputs)
    if not linear:
        reach("linear")
        result.said = "it has no linear layers"
        return
    reach("serve")
    with (
        provider.serve_in_process(folder, numerics="float32") as endpoint,
        tenant_sdk.connect(endpoint, privacy="plain", patience=0.0) as session,
    ):
        reach("load")
        remote = session.load_model(progress=False)
        _count(result, linear, remote)
        reach("forward")
        before = session.stats.requests
        got = _outputs(remote, inputs)
        result.requests = session.stats.requests - before
        result.error = _worst(got, expected)
        reach("backward")
        targets = _compare_gradients(result, local, remote, inputs)
        if result.worst > TOLERANCE:
            result.rounding = _rounding(type(local).from_pretrained(folder).eval(), inputs, targets)
        reach("done")


# -- the model here --------------------------------------------------------------------------------


def _local(
    result: Result, folder: Path, reach: Callable[[str], None]
) -> tuple[PreTrainedModel, dict[str, torch.Tensor], list[torch.Tensor]]:
    """The checkpoint as transformers loads it, inputs that it takes, and what it makes of them."""
    said, until = "", time.process_time() + SECONDS
    for model in candidates(result.model_type, result.class_name):
        reach("local")
        torch.manual_seed(0)
        made = _with_values(type(model)._from_config(model.config)).eval()
        for inputs in inputs_of(made):
            if time.process_time() > until:
                raise NotBuilt(said)
            try:
                outputs = _outputs(made, inputs)
            except Exception as error:
                if not said or "missing" in said:
                    said = _sentence(error)
                continue
            if not any(each.numel() for each in outputs):
                said = said or "its output has no numbers"
                continue
            if not all(each.isfinite().all() for each in outputs):
                said = said or "its output is not finite"
                continue
            made.save_pretrained(folder)
            local = type(made).from_pretrained(folder).eval()
            expected = _outputs(local, inputs)
            if _worst(_outputs(local, inputs), expected) > TOLERANCE:
                raise NotBuilt("two passes of it differ: it draws random numbers that no seed fixes")
            return local, inputs, expected
    raise NotBuilt(said or "no input of its kind is known")


def _with_values(model: PreTrainedModel) -> PreTrainedModel:
    """With biases that are not zero, and values where transformers leaves none."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.is_floating_point():
                continue
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif not parameter.isfinite().all() or parameter.abs().max() > 1e4:
                parameter.normal_(std=0.02)
    return model


def _outputs(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """All floating tensors that it gives, without a graph; random numbers are the same at every call."""
    torch.manual_seed(3)
    with torch.no_grad():
        given = model(**{name: each.clone() for name, each in inputs.items()})
    return _floats(given)


def _floats(given: Any) -> list[torch.Tensor]:
    values = list(given.values()) if isinstance(given, dict) else given
    leaves = tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


class _Multiplied(TorchDispatchMode):
    """Sees which memory takes part in products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _PRODUCTS.search(func.overloadpacket.__name__):
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.memory |= {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return func(*args, **(kwargs or {}))


def _linear_parameters(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, int]:
    """Numbers in each weight of a product: of linear layers, and all others that a pass multiplies by.

    Without the output head and embeddings, which are the tenant's on purpose.
    """
    with _Multiplied() as watch:
        _outputs(model, inputs)
    head = model.get_output_embeddings()
    apart = [each for each in model.modules() if isinstance(each, nn.Embedding)] + [head] * (head is not None)
    apart_at = {parameter.data_ptr() for module in apart for parameter in module.parameters()}
    layers = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | Conv1D)}
    return {
        name: parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.data_ptr() not in apart_at
        and parameter.dim() > 1
        and (id(parameter) in layers or parameter.untyped_storage().data_ptr() in watch.memory)
    }


# -- the model there -------------------------------------------------------------------------------


def _count(result: Result, linear: dict[str, int], remote: nn.Module) -> None:
    held = {
        name for name, each in remote.named_parameters() if not isinstance(each.data, RemoteWeight)
    }  # a tied one has its first name, as it has here
    total = sum(linear.values())
    result.tenants = sorted((n for n in linear if n in held), key=lambda n: -linear[n])[:4]
    result.share = sum(size for name, size in linear.items() if name not in held) / total if total else 0.0


def _worst(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest relative distance of two tensors, in float64.

    Raises:
        AssertionError: the shapes differ, or a number is not finite, which would be equal to anything.
    """
    if [each.shape for each in got] != [each.shape for each in expected]:
        raise AssertionError("the outputs have other shapes")
    if not all(bool(each.isfinite().all()) for each in (*got, *expected)):
        raise AssertionError("a number is not finite")
    got, expected = ([each.double() for each in of] for of in (got, expected))
    floor = 1e-3 * max((float(each.norm()) for each in expected if each.numel()), default=1.0)
    errors = [
        float((a - b).norm()) / max(float(b.norm()), floor, 1e-30)
        for a, b in zip(got, expected, strict=True)
        if b.numel()
    ]
    return max(errors, default=0.0)


def _compare_gradients(
    result: Result, local: PreTrainedModel, remote: PreTrainedModel, inputs: dict[str, torch.Tensor]
) -> Targets:
    """Of a LoRA on every linear layer, or on those that LoRA can be on; where they are is returned.

    ``result.gradient`` stays None if PEFT or the model has none locally.
    """
    # A layer with a forward of its own, as of a router that gives two tensors, is none that LoRA can be on.
    plain = [name for name, each in local.named_modules() if type(each).forward in _LINEAR_FORWARDS]
    said = ""
    for targets in ("all-linear", plain):
        try:
            expected = _gradients(copy.deepcopy(local), inputs, targets)
            break
        except Exception as error:
            said = said or _sentence(error)
    else:
        result.said = f"without gradients locally: {said}"
        return targets
    got = _gradients(remote, inputs, targets)
    names = sorted(expected)
    if got.keys() != expected.keys():
        raise AssertionError(f"gradients of {sorted(got.keys() ^ expected.keys())[:3]} are on one side alone")
    result.gradient = _worst([got[name] for name in names], [expected[name] for name in names])
    return targets


def _in_halves(model: PreTrainedModel) -> PreTrainedModel:
    """With linear layers that multiply two halves of their inputs apart: another order of the same sums."""

    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        (first, second), (left, right) = (each.tensor_split(2, dim=-1) for each in (x, layer.weight))
        out = first @ left.T + second @ right.T
        return out if layer.bias is None else out + layer.bias

    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(forward, module)
    return model


def _rounding(local: PreTrainedModel, inputs: dict[str, torch.Tensor], targets: Targets) -> float | None:
    """How far the model's float64 is from its float32, in either of two orders of sums; None: it has none."""
    orders = copy.deepcopy(local), _in_halves(copy.deepcopy(local))
    wide = local.double()
    inputs64 = {name: each.double() if each.is_floating_point() else each for name, each in inputs.items()}
    try:
        outputs, gradients = _outputs(wide, inputs64), _gradients(wide, inputs64, targets)
        exact = [gradients[name] for name in sorted(gradients)]
        worst = [_worst(_outputs(narrow, inputs), outputs) for narrow in orders]
        for narrow in orders:
            found = _gradients(narrow, inputs, targets)
            worst.append(_worst([found[name] for name in sorted(gradients)], exact))
    except Exception:  # of a kind for each architecture
        return None
    return max(worst)


def _gradients(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], targets: Targets
) -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    conv1d = any(isinstance(module, Conv1D) for module in model.modules())
    lora = peft.LoraConfig(
        r=4,
        target_modules=targets,
        exclude_modules=NO_LORA.get(model.config.model_type),
        init_lora_weights=False,
        fan_in_fan_out=conv1d,
    )
    adapted = peft.get_peft_model(model, lora)
    torch.manual_seed(3)
    out = _floats(adapted.base_model.model(**{name: each.clone() for name, each in inputs.items()}))[0]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))
    (out * weights).mean().backward()
    found = {name: p.grad.clone() for name, p in adapted.named_parameters() if p.grad is not None}
    if not any(bool(each.any()) for each in found.values()):
        raise ValueError("no gradient reaches the adapter")
    if not all(bool(each.isfinite().all()) for each in found.values()):
        raise ValueError("a gradient is not finite")
    return found


def _sentence(error: BaseException) -> str:
    said = " ".join(str(error).split())[:400]
    return said if isinstance(error, SymbiosisError | NotBuilt) else f"{type(error).__name__}: {said}"
