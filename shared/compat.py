"""Private names of other libraries and of Python that this project uses, and their replacements.

Each function here finds one such thing, tries it once on a small example, and gives whatever computes the
same with public interfaces if it is missing, raises or is wrong: another version of the library makes this
package slower, or less able, not wrong. One line of the log says so.
"""

from __future__ import annotations

import atexit
import dataclasses
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

log = logging.getLogger(__name__)

T = TypeVar("T")
WebsocketMask = Callable[[bytes | bytearray | memoryview, bytes], bytes]
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Grouped = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
MultiplyAndAdd = tuple[Multiply, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]]


def _tried(
    name: str,
    find: Callable[[], T],
    right: Callable[[T], bool],
    otherwise: str = "what replaces it is slower",
) -> T | None:
    """What is found, if it is right; else the log says why not."""
    try:
        found = find()
        if right(found):
            return found
        reason = "its results are wrong"
    except Exception as error:  # whatever another version does
        reason = str(error).partition("\n")[0] or repr(error)
    log.warning("%s cannot be used with these versions, %s: %s", name, otherwise, reason)
    return None


# -- accelerate ------------------------------------------------------------------------------------

_building = threading.Lock()


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Put parameters that this thread makes on the meta device; buffers stay real.

    accelerate does so for all threads of the process (``init_empty_weights``): a model that another builds
    meanwhile, or its adapter, would lose its values. One thread at a time may be inside.
    """
    with _building:
        register, thread = nn.Module.register_parameter, threading.get_ident()

        def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            register(module, name, parameter)
            if parameter is not None and threading.get_ident() == thread:
                on_meta = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                on_meta.__dict__.update(parameter.__dict__)
                module._parameters[name] = on_meta

        nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


# -- websockets ------------------------------------------------------------------------------------


def plain_mask(data: bytes | bytearray | memoryview, mask: bytes) -> bytes:
    """``data[i] ^ mask[i % 4]`` for every byte (RFC 6455 §5.3)."""
    repeated = (mask * (len(data) // 4 + 1))[: len(data)]
    return (int.from_bytes(data, "big") ^ int.from_bytes(repeated, "big")).to_bytes(len(data), "big")


def apply_mask(data: bytes | bytearray | memoryview, mask: bytes) -> bytes:
    """``plain_mask``, as fast as can be."""
    return websocket_mask()(data, mask)


@cache
def websocket_mask() -> WebsocketMask:
    """The websocket library's, in C if that was built; or ``plain_mask``."""

    def find() -> WebsocketMask:
        from websockets import frames

        found: WebsocketMask = frames.apply_mask  # type: ignore[attr-defined]
        return found

    def right(mask: WebsocketMask) -> bool:
        data, key = bytes(range(255)), b"\x00\x7f\x80\xff"
        return all(
            mask(kind(data[:count]), key) == plain_mask(data[:count], key)
            for kind in (bytes, bytearray, memoryview)
            for count in (0, 1, 7, 8, 255)
        )

    return _tried("websockets.frames.apply_mask", find, right) or plain_mask


# -- torch -----------------------------------------------------------------------------------------


def plain_int8_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int8 [T, K] times int8 [K, N], int32; sums of less than 2^39 such products are exact in float64."""
    return (rows.double() @ weight.double()).long().to(torch.int32)


@cache
def int8_product(device: torch.device) -> Multiply:
    """torch's for int8 rows and weight, with int32 sums; or ``plain_int8_product``."""

    def find() -> Multiply:
        found: Multiply = torch._int_mm
        return found

    def right(multiply: Multiply) -> bool:
        # Of a size that cuBLAS takes; sums that saturate in 16 bits; either layout of the weight.
        rows = (torch.arange(32 * 16, device=device) * 37).to(torch.int8).view(32, 16)
        weight = (torch.arange(16 * 8, device=device) * 91).to(torch.int8).view(16, 8)
        rows[0], weight[:, 0] = -128, -128
        wanted = plain_int8_product(rows, weight)
        return all(torch.equal(multiply(rows, each), wanted) for each in (weight, weight.T.contiguous().T))

    return _tried("torch._int_mm", find, right) or plain_int8_product


def _linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    torch.get_num_threads()  # sets what was chosen for this thread too, which oneDNN would not ask for
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight.T, None, "none", [], "")
    return out


def _linear_add(total: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, total, weight.T, None, "add")
    return out


@cache
def onednn_products() -> MultiplyAndAdd | None:
    """oneDNN's ``mm`` and ``addmm`` of float32 on the CPU, which torch's compiler calls for linear layers.

    None where torch's own are as good or these cannot be used: without oneDNN, or without MKL, which torch
    would take instead of it.
    """
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return None

    def right(products: MultiplyAndAdd) -> bool:
        multiply, multiply_add = products
        for count in (1, 4):  # small integers: exact in any order
            rows = (torch.arange(count * 6.0) % 5 - 2).view(count, 6)
            for weight in (torch.arange(18.0).view(6, 3), torch.arange(18.0).view(3, 6).T):
                expected = (rows.double() @ weight.double()).float()
                got = multiply(rows, weight)
                if not torch.equal(got, expected):
                    return False
                if not torch.equal(multiply_add(got, rows, weight), 2 * expected):
                    return False
        return True

    return _tried("torch.ops.mkldnn._linear_pointwise", lambda: (_linear, _linear_add), right)


GROUPED_BYTES = 16  # rows of what torch's product of groups takes are a multiple of as many bytes


def plain_grouped_product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows [T, K] in groups, times weights [G, K, N] of the groups: [T, N].

    ``ends`` [G], int32: where each group's rows end; the last is T.
    """
    parts: tuple[torch.Tensor, ...] = torch.tensor_split(rows, ends[:-1].tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights, strict=True)])


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The same with torch's, which is public but young, where it takes these widths, and with gradients."""
    unit = GROUPED_BYTES // rows.element_size()
    if any(width % unit for width in weights.shape[1:]):
        return plain_grouped_product(rows, weights, ends)
    return torch_grouped_product(rows.device, rows.dtype)(rows, weights, ends)


@cache
def torch_grouped_product(device: torch.device, dtype: torch.dtype) -> Grouped:
    """torch's product of groups, or ``plain_grouped_product``."""

    def find() -> Grouped:
        found: Any = torch.nn.functional.grouped_mm
        return lambda rows, weights, ends: found(rows, weights, offs=ends)

    def right(multiply: Grouped) -> bool:
        # Integers, small enough for any dtype and order; a group without rows; weights as they are used.
        rows = (torch.arange(7 * 16, device=device) % 5 - 2).to(dtype).view(7, 16)
        weights = (torch.arange(3 * 8 * 16, device=device) % 3 - 1).to(dtype).view(3, 8, 16).transpose(1, 2)
        ends = torch.tensor([3, 3, 7], dtype=torch.int32, device=device)
        results = []
        for each in (plain_grouped_product, multiply):
            operands = rows.clone().requires_grad_(), weights.clone().requires_grad_()
            out = each(*operands, ends)
            results.append((out, *torch.autograd.grad(out, operands, out.detach().sign())))
        return all(map(torch.equal, *results))

    # Whatever the caller does just now.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        return _tried("torch.nn.functional.grouped_mm", find, right) or plain_grouped_product


@cache
def transforms_run() -> Callable[[], bool]:
    """Whether a transform of ``torch.func`` runs in this thread; yes, where that cannot be known."""

    def find() -> Callable[[], bool]:
        found: Callable[[], bool] = torch._C._are_functorch_transforms_active
        return found

    def right(running: Callable[[], bool]) -> bool:
        inside = torch.func.vmap(lambda x: x * running())(torch.ones(1))
        return bool(inside == 1)

    return _tried("torch._C._are_functorch_transforms_active", find, right) or (lambda: True)


def is_traced() -> bool:
    """Whether what is computed now is written down, as ``torch.compile`` and ``torch.func.linearize`` do."""
    modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
    return torch.compiler.is_compiling() or modes() > 0


# -- transformers ----------------------------------------------------------------------------------

OLD_CACHE_NAME = "past_key_values"


@cache
def cache_name() -> str:
    """What transformers calls a ``Cache``: an argument of models and of ``generate``, a field of outputs.

    It is the name of the one field of this type in what ``generate`` gives; else that of earlier versions.
    """

    def find() -> str:
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        fields = dataclasses.fields(GenerateDecoderOnlyOutput)
        (found,) = (each.name for each in fields if "Cache" in str(each.type))
        return found

    def right(name: str) -> bool:
        from transformers import GenerationMixin

        return name in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters

    otherwise = "models keep their keys and values to themselves"
    return _tried("the cache of transformers' generate", find, right, otherwise) or OLD_CACHE_NAME


class Conversions(NamedTuple):
    """How transformers makes parameters of a checkpoint's tensors: it publishes the result alone.

    Attributes:
        rules: of a model and a quantizer: what is renamed, and what is converted.
        rename: a tensor's name, to the parameter's and to the pattern of the converter that takes it.
        order: of the tensors that are merged.
        Renaming, Converter: the two kinds of rules.
    """

    rules: Callable[..., list[Any]]
    rename: Callable[..., tuple[str, str | None]]
    order: Callable[[str], Any]
    Renaming: type[Any]
    Converter: type[Any]


@cache
def conversions() -> Conversions | None:
    """transformers' own; None: checkpoints are used whose tensors are the model's parameters."""

    def find() -> Conversions:
        from transformers import conversion_mapping, core_model_loading

        return Conversions(
            conversion_mapping.get_model_conversion_mapping,
            core_model_loading.rename_source_key,
            core_model_loading.dot_natural_key,
            core_model_loading.WeightRenaming,
            core_model_loading.WeightConverter,
        )

    def right(candidate: Conversions) -> bool:
        # Eleven experts of two layers each become one parameter.
        from transformers.core_model_loading import Concatenate, MergeModulelist

        sources = ["experts.*.up", "experts.*.gate"]
        experts = candidate.Converter(sources, "experts.both", [MergeModulelist(dim=0), Concatenate(dim=1)])
        state = {"model.mlp.experts.both": torch.empty(11, 4, 3)}
        tensors = {
            f"old.experts.{at}.{part}": torch.full((2, 3), 2.0 * at + (part == "up"))
            for at in range(11)
            for part in ("gate", "up")
        }
        for key in sorted(tensors, key=candidate.order):
            name, pattern = candidate.rename(
                key, [candidate.Renaming("old", "mlp")], [experts], "model", state
            )
            if name not in state or pattern not in sources:
                return False
            experts.add_tensor(name, key, pattern, partial(tensors.__getitem__, key))
        converted = experts.convert(name, model=None, config=None)
        gates, ups = torch.arange(0.0, 22, 2), torch.arange(1.0, 22, 2)
        wanted = torch.stack([ups, gates], 1).repeat_interleave(2, 1).unsqueeze(2).expand(11, 4, 3)
        return list(converted) == [name] and torch.equal(converted[name], wanted)

    return _tried(
        "transformers.core_model_loading", find, right, "checkpoints that it converts cannot be served"
    )


class GenerationSteps(NamedTuple):
    """Two steps of transformers' ``generate``, which functions for ``custom_generate`` take from it.

    Attributes:
        prompt: of a model, ids, a configuration and the model's arguments: its outputs for the prompt.
        extend: of a model, its outputs, its arguments and ``num_new_tokens``: arguments for so many more.
    """

    prompt: Callable[..., Any]
    extend: Callable[..., dict[str, Any]]


@cache
def generation_steps() -> GenerationSteps | None:
    """transformers' own; None: tokens cannot be checked several at once."""

    def find() -> GenerationSteps:
        from transformers import GenerationMixin

        return GenerationSteps(GenerationMixin._prefill, GenerationMixin._update_model_kwargs_for_generation)

    def right(steps: GenerationSteps) -> bool:
        from transformers.utils.generic import ModelOutput

        mask = torch.ones(1, 3)
        extended = steps.extend(None, ModelOutput(), {"attention_mask": mask}, False, num_new_tokens=2)
        taken = list(inspect.signature(steps.prompt).parameters)[1:4]
        return extended["attention_mask"].shape == (1, 5) and taken == [
            "input_ids",
            "generation_config",
            "model_kwargs",
        ]

    return _tried("the steps of transformers' generate", find, right, "there are no drafts")


# -- Python ----------------------------------------------------------------------------------------


def before_threads_are_joined(call: Callable[[], None]) -> None:
    """Have this called at the program's end, before Python waits for threads; who comes last is first.

    Where that cannot be had, after it: the program then ends as late as its threads.
    """
    register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
    register(call)


# -- transformers' reader of GGUF files ------------------------------------------------------------


@contextmanager
def without_ggml_kernels() -> Iterator[None]:
    """Have GGUF files read without compiled code from a hub, which transformers asks for.

    It does so for some architectures if the package ``kernels`` is installed, also without remote code.
    """
    try:
        from transformers.integrations.gguf import kernels
    except ImportError:  # before 5.20 there were none
        yield
        return
    before = kernels._gguf_kernel, kernels.kernelize_ggml_layers
    hidden: Any = kernels
    hidden._gguf_kernel, hidden.kernelize_ggml_layers = False, lambda model: None
    try:
        yield
    finally:
        hidden._gguf_kernel, hidden.kernelize_ggml_layers = before


def gguf_tensor_names(model: nn.Module, architecture: str) -> set[str] | None:
    """Names of the tensors that transformers takes from a GGUF file, or None if it does not say.

    Args:
        model: that the file's configuration makes, also without memory.
        architecture: as the file has it.
    """
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        if is_gguf_arch_supported(architecture):  # read in another way, with a list of conversions
            return None
    except ImportError:
        pass
    try:
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )
    except ImportError:
        return None
    processor: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    processor = processor(config={})
    return set(get_gguf_hf_weights_map(model, processor))
