"""The placeholder has a weight's shape, dtype and device, and nothing can read values that are not there."""

from __future__ import annotations

import copy
import inspect
import io
import multiprocessing
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Executor
from parity import add_lora, fixed_result, gradients, load_local, token_ids, virtual_layers, worst_error
from peft import get_peft_model_state_dict
from safetensors.torch import save as safetensors_save
from torch import nn
from torch.overrides import get_testing_overrides, resolve_name

from shared.errors import RemoteWeightUnavailable
from tenant_sdk.model.remote_weight import RemoteWeight


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(
        RemoteWeight("layers.0.q_proj", (4, 8), torch.float32, torch.device("cpu")), requires_grad=False
    )


def test_looks_like_a_weight(weight: nn.Parameter) -> None:
    assert isinstance(weight, nn.Parameter)
    assert isinstance(weight, RemoteWeight)
    assert weight.shape == (4, 8)
    assert (weight.dtype, weight.device) == (torch.float32, torch.device("cpu"))
    assert (weight.dim(), weight.numel(), weight.element_size()) == (2, 32, 4)
    assert not weight.is_meta
    assert weight.is_floating_point()
    assert weight.is_contiguous()
    assert weight.data_ptr() == 0
    assert repr(weight) == "RemoteWeight('layers.0.q_proj', shape=[4, 8], dtype=torch.float32)"


@pytest.mark.parametrize(
    "move",
    [
        lambda w: w.detach(),
        lambda w: w.data,
        lambda w: w.to(torch.bfloat16),
        lambda w: w.half().float(),
        lambda w: w.cpu(),
        lambda w: w.to("meta"),
        lambda w: w.contiguous(),
        copy.deepcopy,
        copy.copy,
    ],
)
def test_moves_and_casts(weight: nn.Parameter, move: Callable[[Any], Any]) -> None:
    moved = move(weight)
    assert isinstance(moved, RemoteWeight)
    assert moved.layer == "layers.0.q_proj"
    assert moved.shape == (4, 8)


def test_casts_tell_their_dtype_and_device(weight: nn.Parameter) -> None:
    assert weight.to(torch.bfloat16).dtype == torch.bfloat16
    assert weight.double().dtype == torch.float64
    assert weight.to("meta").device == torch.device("meta")


def test_modules_move_and_copy(weight: nn.Parameter) -> None:
    layer = nn.Linear(8, 4)
    layer.weight = weight
    other = copy.deepcopy(layer).to(torch.bfloat16)
    assert isinstance(other.weight, RemoteWeight)
    assert isinstance(other.weight, nn.Parameter)
    assert not other.weight.requires_grad
    assert other.weight.dtype == other.bias.dtype == torch.bfloat16
    assert layer.weight.dtype == torch.float32


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "matmul": lambda w: torch.ones(2, 8) @ w.T,
    "linear": lambda w: nn.functional.linear(torch.ones(2, 8), w),
    "add": lambda w: w + 1,
    "add another shape": lambda w: w + torch.ones(8),
    "add left": lambda w: torch.ones(4, 8) + w,
    "scale": lambda w: 2 * w,
    "in place": lambda w: w.data.add_(1),
    "copy into": lambda w: w.data.copy_(torch.ones(4, 8)),
    "copy out": lambda w: torch.ones(4, 8).copy_(w),
    "fill": lambda w: nn.init.normal_(w),
    "zero": lambda w: w.data.zero_(),
    "clone": lambda w: w.clone(),
    "norm": lambda w: torch.linalg.norm(w, dim=1),
    "svd": lambda w: torch.linalg.svd(w.data, full_matrices=False),
    "qr": lambda w: torch.linalg.qr(w.data),
    "sum": lambda w: w.sum(),
    "compare": lambda w: torch.equal(w, w),
    "finite": lambda w: w.isfinite(),
    "index": lambda w: w[0],
    "iterate": lambda w: list(w),
    "reshape": lambda w: w.reshape(-1),
    "like": lambda w: torch.zeros_like(w),
    "stack": lambda w: torch.stack([torch.ones(4, 8), w]),
    "list": lambda w: w.tolist(),
    "numpy": lambda w: w.numpy(),
    "asarray": lambda w: np.asarray(w),
    "from_dlpack": lambda w: np.from_dlpack(w),
    "apply": lambda w: w.apply_(lambda value: value),
    "storage": lambda w: w.untyped_storage(),
    "typed storage": lambda w: w.storage(),
    "share": lambda w: w.share_memory_(),
    "pickle": lambda w: pickle.dumps(w),
    "torch.save": lambda w: torch.save({"weight": w}, io.BytesIO()),
    "safetensors": lambda w: safetensors_save({"weight": w}),
    "norm of all": lambda w: torch.nn.utils.get_total_norm([torch.ones(2), w]),
    "largest": lambda w: w.abs().max(),
    "average": lambda w: torch.ones(4, 8).lerp_(w, 0.1),
    "like, elsewhere": lambda w: torch.empty_like(w, device="meta"),
    "cast": lambda w: w.to(torch.int8),
    "replace": lambda w: setattr(w, "data", torch.ones(4, 8)),
    "replace by another": lambda w: setattr(w, "data", RemoteWeight("a", (4, 8), w.dtype, w.device)),
    "vector": lambda w: nn.utils.parameters_to_vector([torch.ones(2), w]),
    "new": lambda w: w.new(3),
}


@pytest.mark.parametrize("read", READS)
def test_reading_raises(weight: nn.Parameter, read: str) -> None:
    with pytest.raises(RemoteWeightUnavailable, match=r"layers\.0\.q_proj stays with the provider"):
        READS[read](weight)


METHOD, SKIP = "Use a method that needs only", "skip parameters that do not require gradients"
SAVE, LOAD = "Save the adapter alone", "Load the adapter alone"
LOCAL, STAY = r"exclude=\[", "nothing to offload"
FITS = {
    "matmul": ("merging", METHOD, LOCAL),
    "linear": ("merging", METHOD, LOCAL),
    "add": ("DoRA", METHOD, SKIP),
    "scale": ("merging", METHOD, SKIP),
    "in place": ("merging", METHOD),
    "clone": ("SHiRA", METHOD, SKIP),
    "norm": ("DoRA", METHOD),
    "svd": ("PiSSA", METHOD),
    "qr": ("OLoRA", METHOD),
    **dict.fromkeys(("norm of all", "largest", "sum", "compare", "finite", "average"), (SKIP,)),
    **dict.fromkeys(("fill", "zero", "list", "from_dlpack", "apply"), (SKIP,)),
    **dict.fromkeys(("numpy", "asarray"), (SKIP, STAY)),
    **dict.fromkeys(("copy into", "copy out", "replace", "replace by another"), (LOAD, SKIP)),
    **dict.fromkeys(("like", "like, elsewhere", "new"), ("torch.zeros", SKIP, LOCAL)),
    "vector": ("parameters_to_vector", SKIP, "init_sync=False"),
    **dict.fromkeys(("storage", "typed storage", "share", "pickle", "torch.save", "safetensors"), (SAVE,)),
    "cast": (STAY, LOCAL),
    "index": (LOCAL,),
}


@pytest.mark.parametrize("read", FITS)
def test_the_message_fits_who_likely_reads_it(weight: nn.Parameter, read: str) -> None:
    with pytest.raises(RemoteWeightUnavailable) as caught:
        READS[read](weight)
    for words in FITS[read]:
        assert re.search(words, str(caught.value))
    assert METHOD in FITS[read] or "merging" not in str(caught.value)


def test_nothing_crashes_the_interpreter(weight: nn.Parameter) -> None:
    """Reads without memory behind them end in an exception, not in a signal: tried in a child process."""
    child = multiprocessing.get_context("fork").Process(target=_read_everything, args=(weight,))
    child.start()
    child.join(800)
    assert child.exitcode == 0


def _read_everything(weight: torch.Tensor) -> None:
    for read in READS.values():
        try:
            read(weight)
        except RemoteWeightUnavailable:
            pass


def test_a_parameter_is_made_again_of_its_class(weight: nn.Parameter) -> None:
    """As accelerate does when it moves one."""
    again = type(weight)(weight.to("meta"), requires_grad=False)
    assert isinstance(again, nn.Parameter)
    assert isinstance(again, RemoteWeight)
    assert again.device.type == "meta"
    with pytest.raises(RemoteWeightUnavailable, match="values cannot take a frozen weight's place"):
        type(weight)(torch.ones(4, 8), requires_grad=False)


@pytest.mark.parametrize("model", ["", "another"])
def test_only_the_same_weight_can_be_copied_into_it(weight: nn.Parameter, model: str) -> None:
    """A whole state dict that was read from the model can be loaded again, and no other."""
    layer = nn.Linear(8, 4, bias=False)
    layer.weight = weight
    other = RemoteWeight("layers.0.q_proj", (4, 8), torch.float32, torch.device("cpu"), model=model)
    if model:
        with pytest.raises(RuntimeError, match="Load the adapter alone"):
            layer.load_state_dict({"weight": other})
    else:
        layer.load_state_dict({"weight": other})
    assert layer.weight is weight


# -- every function of torch ----------------------------------------------------------------------

LONG = torch.zeros(4, 4, dtype=torch.long)
ONES = torch.ones(4, 4)
# What other arguments may be, tried until any tensor is taken with them.
OTHERS: list[Any] = [
    ONES,
    1,
    0,
    (0, 1),
    (4, 4),
    LONG,
    [ONES, ONES],
    0.5,
    True,
    "mean",
    torch.float64,
    ONES[0],
]
UNCHECKED = {"torch.embedding_bag"}  # writes where it should not, with any tensors that do not fit
# 0, as of meta tensors; and the address of the object itself.
ADDRESSES = {f"torch.Tensor.{name}" for name in ("data_ptr", "const_data_ptr", "_cdata.__get__")}


def frozen() -> nn.Parameter:
    placeholder = RemoteWeight("layers.0.q_proj", (4, 4), torch.float32, torch.device("cpu"))
    return nn.Parameter(placeholder, requires_grad=False)


def calls(function: Callable[..., Any], like: Callable[..., Any]) -> Iterator[Callable[[Any], Any]]:
    """Ways to call a function of torch with a tensor: its first argument, alone or in a list, or its last."""
    parameters = inspect.signature(like).parameters.values()
    count = sum(each.default is each.empty and each.kind < each.VAR_POSITIONAL for each in parameters)
    for other in OTHERS if count > 1 else OTHERS[:1]:
        rest = [other] * (count - 1)
        yield lambda tensor, rest=rest: function(tensor, *rest)  # type: ignore[misc]
        yield lambda tensor, rest=rest: function([tensor, tensor], *rest)  # type: ignore[misc]
    if count > 1:
        yield lambda tensor: function(*[ONES] * (count - 1), tensor)


def outcome(call: Callable[[Any], Any], tensor: torch.Tensor) -> Any:
    """What it gives, or the error that it raises."""
    torch.default_generator.manual_seed(0)  # without notes for accelerators, which take long
    try:
        return call(tensor)
    except Exception as error:
        return error


def differs(got: Any, expected: Any) -> bool:
    """Whether it is not the refusal, and not what any frozen weight of the shape gives."""
    if isinstance(got, RemoteWeightUnavailable):
        return False
    if isinstance(got, tuple | list) and isinstance(expected, tuple | list):
        return len(got) != len(expected) or any(map(differs, got, expected))
    if isinstance(got, RemoteWeight):
        like = isinstance(expected, torch.Tensor) and (got.shape, got.dtype) == (
            expected.shape,
            expected.dtype,
        )
        return not like or vars(got).get("layer") != "layers.0.q_proj"
    if isinstance(got, Exception) or isinstance(expected, Exception):
        return type(got) is not type(expected)
    return type(got) is not type(expected) or str(got) != str(expected)


def _sweep(to: Any) -> None:
    """Send the name of each function, and how it ends if that is wrong; to be run where it may crash."""
    warnings.simplefilter("ignore")  # many functions are deprecated
    for function, like in get_testing_overrides().items():
        name = resolve_name(function) or getattr(function, "__name__", "")
        to.send((name, None))
        if name in UNCHECKED | ADDRESSES:
            continue
        for call in calls(function, like):
            expected = outcome(call, nn.Parameter(torch.ones(4, 4), requires_grad=False))
            if not isinstance(expected, Exception):
                got = outcome(call, frozen())
                to.send((name, f"{got!r} and not {expected!r}" if differs(got, expected) else ""))
    to.send(("", None))


def test_every_function_of_torch_gives_what_is_right_or_refuses() -> None:
    """Shape, dtype and the like are those of any weight; nothing else is given, and nothing crashes."""
    ours, its = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_sweep, args=(its,))
    child.start()
    its.close()
    name, tried, wrong = "nothing", set(), {}
    try:
        while name:
            name, end = ours.recv()
            if end is not None:
                tried.add(name)
            if end:
                wrong[name] = end
    except EOFError:
        wrong[name] = "crashed"
    child.join()
    assert not wrong
    assert len(tried) > 1000


def test_saving_the_whole_model_is_refused_and_the_adapter_alone_works(
    llama: Executor, tmp_path: Path
) -> None:
    with llama.connect() as session:
        model = session.load_model(progress=False)
        with pytest.raises(RemoteWeightUnavailable, match="Save the adapter alone"):
            model.save_pretrained(tmp_path / "model")
        with pytest.raises(RemoteWeightUnavailable, match="Save the adapter alone"):
            torch.save(model.state_dict(), tmp_path / "model.pt")
        adapted = add_lora(model)
        state = get_peft_model_state_dict(adapted)
        torch.save(state, tmp_path / "adapter.pt")
        assert not any(isinstance(tensor, RemoteWeight) for tensor in state.values())
        # A copy of the model is a model of the same session.
        twin = copy.deepcopy(adapted)
        assert len(virtual_layers(twin)) == len(virtual_layers(adapted)) == 14
        assert torch.equal(twin(token_ids()).logits, adapted(token_ids()).logits)


def test_an_adapter_of_the_weight_itself(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    """PEFT's ``target_parameters`` add to the weight, as it does by itself to routers of some mixtures."""
    options = {"target_modules": ["v_proj"], "target_parameters": ["q_proj.weight", "down_proj.weight"]}
    local = add_lora(load_local(checkpoint("llama")), **options)
    expected = fixed_result(local, token_ids()), gradients(local, token_ids())
    with llama.connect() as session:
        remote = add_lora(session.load_model(progress=False), **options)
        got = fixed_result(remote, token_ids()), gradients(remote, token_ids())
        torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
        assert worst_error(got[1], expected[1]) < 1e-5
        assert sum("q_proj" in name for name in expected[1]) == 4
        with pytest.raises(RemoteWeightUnavailable, match="merging"):
            remote.merge_and_unload()
