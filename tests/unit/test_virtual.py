"""Virtual layers: grouping learned as the model runs, autograd, and outputs that behave like a layer's.

The layers here get their products from memory, which counts requests; the tests at the end run a
tiny model through an executor.
"""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Executor, relative_error
from parity import add_lora, fixed_result, gradients, load_local, loss_of, result, token_ids, worst_error
from torch import nn
from torch.utils.checkpoint import checkpoint as checkpointed
from transformers.pytorch_utils import Conv1D

from shared.errors import ConnectionLost, NonFiniteError, RemoteWeightUnavailable
from shared.wire.header import Direction, RequestClass, member_indices
from shared.wire.messages import GroupInfo, Member
from tenant_sdk.connection.remote import LazyResult
from tenant_sdk.model.virtual import RemoteGroup, VirtConv1D, VirtLinear, virtual_layer

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
INPUTS, WIDTHS = 6, (4, 3, 5)
ALL = 0b111


class Memory:
    """A privacy mode without an executor: multiplies here and remembers what was asked."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self.weights = weights
        self.asked: list[tuple[Direction, int]] = []

    def submit(
        self,
        group: int,
        direction: Direction,
        members: int,
        tensors: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> LazyResult:
        return LazyResult(lambda: self._product(direction, members, tensors))

    def _product(self, direction: Direction, members: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        assert all(tensor.dtype == torch.float32 for tensor in tensors)
        self.asked.append((direction, members))
        weights = [self.weights[i] for i in member_indices(members)]
        if direction == FORWARD:
            rows = len(tensors[0])
            # As an answer arrives: tensors in one piece of memory.
            flat = torch.cat([(tensors[0] @ weight.T).flatten() for weight in weights])
            parts = flat.split([rows * len(weight) for weight in weights])
            return [part.view(rows, -1) for part in parts]
        return [torch.stack([b @ w for b, w in zip(tensors, weights, strict=True)]).sum(0)]

    def close(self) -> None:
        """Nothing to do."""


class QkvLayers:
    """Three virtual layers of one group, as q, k and v are, and the real layers beside them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.real = [nn.Linear(INPUTS, width) for width in WIDTHS]
        self.memory = Memory([layer.weight.detach() for layer in self.real])
        members = tuple(Member(f"layer.{i}", width, f"w{i}") for i, width in enumerate(WIDTHS))
        self.group = RemoteGroup(0, GroupInfo(INPUTS, members), self.memory)
        self.layers = [virtual_layer(self.group, i, layer) for i, layer in enumerate(self.real)]

    def asked(self) -> list[tuple[Direction, int]]:
        """What was asked since the last look."""
        asked, self.memory.asked = self.memory.asked, []
        return asked

    def check(self, member: int, x: torch.Tensor) -> torch.Tensor:
        """The virtual layer's output, checked against the real one's."""
        out = self.layers[member](x)
        torch.testing.assert_close(out, self.real[member](x))
        return out


@pytest.fixture
def qkv() -> QkvLayers:
    return QkvLayers()


def rows(*shape: int, grad: bool = False) -> torch.Tensor:
    return torch.randn(*(shape or (2, 7)), INPUTS, requires_grad=grad)


# -- grouping -------------------------------------------------------------------------------------


def test_one_tensor_one_request_each_way(qkv: QkvLayers) -> None:
    x = rows(grad=True)
    outputs = [qkv.check(i, x) for i in range(3)]
    assert qkv.asked() == [(FORWARD, ALL)]
    sum(out.square().sum() for out in outputs).backward()
    assert qkv.asked() == [(BACKWARD, ALL)]
    got, x.grad = x.grad, None
    sum(layer(x).square().sum() for layer in qkv.real).backward()
    torch.testing.assert_close(got, x.grad)


def test_a_member_with_another_tensor_leaves_and_rejoins(qkv: QkvLayers) -> None:
    for expected in ([ALL, 0b100], [0b011, 0b100]):  # noticed at the first pass, known at the second
        x, other = rows(), rows()
        qkv.check(0, x), qkv.check(1, x), qkv.check(2, other)
        assert qkv.asked() == [(FORWARD, members) for members in expected]
    for expected in ([0b011, 0b100], [ALL]):  # its adapter is gone: the same, the other way round
        x = rows()
        qkv.check(0, x), qkv.check(1, x), qkv.check(2, x)
        assert qkv.asked() == [(FORWARD, members) for members in expected]


def test_the_first_member_may_be_the_odd_one(qkv: QkvLayers) -> None:
    for _ in range(3):
        other, x = rows(), rows()
        qkv.check(0, other), qkv.check(1, x), qkv.check(2, x)
    qkv.asked()
    other, x = rows(), rows()
    qkv.check(0, other), qkv.check(1, x), qkv.check(2, x)
    assert qkv.asked() == [(FORWARD, 0b001), (FORWARD, 0b110)]


def test_an_unused_member_is_no_longer_asked_for(qkv: QkvLayers) -> None:
    for expected in (ALL, 0b011, 0b011):
        x = rows()
        qkv.check(0, x), qkv.check(1, x)
        assert qkv.asked() == [(FORWARD, expected)]
    x = rows()
    qkv.check(0, x), qkv.check(2, x), qkv.check(1, x)  # and back, in another order
    assert qkv.asked() == [(FORWARD, 0b011), (FORWARD, 0b100)]


def test_the_same_tensor_twice(qkv: QkvLayers) -> None:
    """As activation checkpointing does with layers that get a block's own input."""
    x = rows()
    for _ in range(2):
        for member in range(3):
            qkv.check(member, x)
    assert qkv.asked() == [(FORWARD, ALL), (FORWARD, ALL)]


def test_an_input_written_in_place_is_another_input(qkv: QkvLayers) -> None:
    x = rows()
    qkv.check(0, x)
    x.mul_(3)
    qkv.check(1, x)
    qkv.check(2, x)


def test_an_input_written_in_place_in_inference_mode(qkv: QkvLayers) -> None:
    with torch.inference_mode():
        x = rows() + 1  # an inference tensor: it counts no versions
        qkv.check(0, x)
        qkv.check(1, x)
        assert qkv.asked() == [(FORWARD, ALL)]
        x.mul_(3)
        qkv.check(2, x)
        assert len(qkv.asked()) == 1


def test_outputs_without_a_graph_are_not_used_with_one(qkv: QkvLayers) -> None:
    x = rows(grad=True)
    with torch.no_grad():
        assert not qkv.layers[0](x).requires_grad
    out = qkv.check(1, x)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, qkv.real[1].weight.sum(0).expand_as(x))
    with torch.no_grad():
        assert qkv.layers[2](x).grad_fn is None


def test_an_input_that_becomes_differentiable(qkv: QkvLayers) -> None:
    x = rows()
    qkv.check(0, x)
    x.requires_grad_()
    assert qkv.layers[1](x).grad_fn is not None


def test_another_dtype_of_autocast_is_another_request(qkv: QkvLayers) -> None:
    x = rows()
    assert qkv.layers[0](x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert qkv.layers[1](x).dtype == torch.bfloat16
    assert qkv.layers[2](x).dtype == torch.float32


def test_an_input_is_not_kept_alive(qkv: QkvLayers) -> None:
    x = rows()
    qkv.check(0, x)
    gone = weakref.ref(x)
    del x
    gc.collect()
    assert gone() is None


def test_a_new_tensor_at_an_old_address(qkv: QkvLayers) -> None:
    """Tensors are told apart by identity, not by where their memory is."""
    for _ in range(50):
        x = rows(1)
        qkv.check(0, x)
        del x
        qkv.check(1, rows(1))


def test_threads_do_not_disturb_each_others_grouping(qkv: QkvLayers) -> None:
    x, other = rows(), rows()
    qkv.check(0, x)
    thread = threading.Thread(target=lambda: [qkv.check(i, other) for i in range(3)])
    thread.start()
    thread.join(800)
    qkv.check(1, x), qkv.check(2, x)
    assert qkv.asked() == [(FORWARD, ALL), (FORWARD, ALL)]


def test_threads_do_not_see_each_others_outputs(qkv: QkvLayers) -> None:
    barrier = threading.Barrier(3)
    failures: list[BaseException] = []

    def run(order: tuple[int, ...], odd: int | None) -> None:
        try:
            for _ in range(100):
                x, other = rows(3, grad=True), rows(3)
                barrier.wait(800)
                total = sum(qkv.check(i, other if i == odd else x).sum() for i in order)
                total.backward()
                reached = sum(qkv.real[i].weight.detach().sum(0) for i in order if i != odd)
                torch.testing.assert_close(x.grad, reached.expand_as(x))
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [
        threading.Thread(target=run, args=arguments)
        for arguments in (((0, 1, 2), None), ((2, 0), None), ((1, 0, 2), 2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(800)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)


def test_copies_share_the_session(qkv: QkvLayers) -> None:
    twins = copy.deepcopy(nn.ModuleList(qkv.layers))
    x = rows()
    for twin, real in zip(twins, qkv.real, strict=True):
        assert twin.bias is not real.bias
        torch.testing.assert_close(twin(x), real(x))
    assert qkv.asked() == [(FORWARD, ALL)]


# -- autograd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [(0,), (2,), (0, 2), (1, 2)])
def test_backward_sends_only_the_members_it_reaches(qkv: QkvLayers, used: tuple[int, ...]) -> None:
    x = rows(grad=True)
    outputs = [qkv.check(i, x) for i in range(3)]
    qkv.asked()
    sum(outputs[i].sum() for i in used).backward()
    assert qkv.asked() == [(BACKWARD, sum(1 << i for i in used))]
    expected = sum(qkv.real[i].weight.detach().sum(0) for i in used)
    torch.testing.assert_close(x.grad, expected.expand_as(x))


def test_nothing_to_differentiate_sends_nothing_back(qkv: QkvLayers) -> None:
    out = qkv.check(0, rows())
    assert out.requires_grad  # because of the bias alone
    qkv.asked()
    out.sum().backward()
    assert qkv.asked() == []
    torch.testing.assert_close(qkv.layers[0].bias.grad, torch.full((4,), 14.0))


def test_gradients_numerically(qkv: QkvLayers) -> None:
    """float64 inputs travel as float32, so the differences are taken wide."""
    x = torch.randn(2, INPUTS, dtype=torch.float64, requires_grad=True)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(x) for layer in qkv.layers)

    assert torch.autograd.gradcheck(function, (x,), eps=1e-1, atol=1e-4, nondet_tol=1e-6)


def second(layers: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """A gradient of a gradient, which reaches the outputs of two of three layers."""
    outputs = [layer(x).tanh().square().sum() for layer in layers]
    (gradient,) = torch.autograd.grad(outputs[0] * outputs[2], x, create_graph=True)
    (found,) = torch.autograd.grad(gradient.square().sum(), x)
    return found


def test_differentiating_twice(qkv: QkvLayers) -> None:
    """A request each way for each derivative; ``tests/integration/test_func.py`` has the rest."""
    x = rows(grad=True)
    torch.testing.assert_close(second(qkv.layers, x), second(qkv.real, x))
    assert qkv.asked() == [(FORWARD, ALL), (BACKWARD, 0b101), (FORWARD, 0b101), (BACKWARD, 0b101)]


def test_a_layer_outside_of_a_transform_takes_nothing_from_within(qkv: QkvLayers) -> None:
    x, weights = rows(2, 7), torch.randn(4)
    torch.func.grad(lambda w: (qkv.layers[0](x) * w).sum())(weights)
    out = qkv.check(1, x)  # the same tensor, which no transform follows
    assert not torch._C._functorch.is_functorch_wrapped_tensor(out)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(qkv: QkvLayers, reentrant: bool) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        return sum((layer(x).tanh().sum(-1, keepdim=True) for layer in qkv.layers), torch.zeros(()))

    x = rows(grad=True)
    checkpointed(block, x, use_reentrant=reentrant).sum().backward()
    got, x.grad = x.grad, None
    assert qkv.asked() == [(FORWARD, ALL), (FORWARD, ALL), (BACKWARD, ALL)]
    sum(layer(x).tanh().sum() for layer in qkv.real).backward()
    torch.testing.assert_close(got, x.grad)


# -- outputs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
def test_outputs_are_fresh_and_writable(qkv: QkvLayers, grad: bool) -> None:
    x = rows(grad=grad)
    first, second = qkv.layers[0](x), qkv.layers[1](x)
    assert not any(out._is_view() for out in (first, second))
    kept = second.clone()
    first.add_(1.0)[0, 0] = 7.0
    assert torch.equal(second, kept)
    qkv.check(0, x)
    if grad:
        (first.square().sum() + second.sum()).backward()
        assert x.grad is not None


@pytest.mark.parametrize("shape", [(), (1,), (2, 7), (2, 3, 5), (0,), (2, 0), (0, 4)])
def test_any_leading_shape(qkv: QkvLayers, shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, INPUTS, requires_grad=True)
    outputs = [qkv.check(i, x) for i in range(3)]
    assert [tuple(out.shape) for out in outputs] == [(*shape, width) for width in WIDTHS]
    sum(out.sum() for out in outputs).backward()
    expected = sum(layer.weight.detach().sum(0) for layer in qkv.real)
    torch.testing.assert_close(x.grad, expected.expand_as(x))
    if 0 in shape:  # an executor refuses products without rows
        assert qkv.asked() == []


def test_strided_inputs_and_gradients(qkv: QkvLayers) -> None:
    x = torch.randn(INPUTS, 7, 2).permute(2, 1, 0).requires_grad_()
    out = qkv.check(0, x).transpose(0, 1)
    out.backward(torch.ones(1, 1, 1).expand(7, 2, 4))
    torch.testing.assert_close(x.grad, qkv.real[0].weight.detach().sum(0).expand(2, 7, INPUTS))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float64, 1e-6)])
def test_outputs_have_the_inputs_dtype(qkv: QkvLayers, dtype: torch.dtype, tolerance: float) -> None:
    # The product itself is done in float32 with the weight in float32; only the result is rounded.
    layer = copy.deepcopy(qkv.layers[0]).to(dtype)
    x = rows().to(dtype).requires_grad_()
    out = layer(x)
    out.sum().backward()
    assert (out.dtype, x.grad.dtype) == (dtype, dtype)
    assert relative_error(out.detach().float(), qkv.real[0](x.detach().float()).detach()) < tolerance


def test_conv1d_is_a_conv1d() -> None:
    torch.manual_seed(0)
    real = Conv1D(5, INPUTS)
    memory = Memory([real.weight.detach().T])
    member = Member("c_attn", 5, "c_attn.weight", transposed=True)
    layer = virtual_layer(RemoteGroup(0, GroupInfo(INPUTS, (member,)), memory), 0, real)
    assert isinstance(layer, VirtConv1D)
    assert (layer.nx, layer.nf, layer.weight.shape) == (INPUTS, 5, (INPUTS, 5))
    x = rows()
    torch.testing.assert_close(layer(x), real(x))


def test_linear_is_a_linear(qkv: QkvLayers) -> None:
    layer = qkv.layers[0]
    assert isinstance(layer, VirtLinear)
    assert (layer.in_features, layer.out_features, layer.weight.shape) == (INPUTS, 4, (4, INPUTS))
    assert layer.bias is qkv.real[0].bias
    with pytest.raises(TypeError, match="not a linear layer: Conv1d"):
        virtual_layer(qkv.group, 0, nn.Conv1d(1, 1, 1))


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_input_is_not_sent(qkv: QkvLayers, bad: float) -> None:
    x = rows()
    x[1, 3, 2] = bad
    with pytest.raises(
        NonFiniteError, match=r"the input of layer\.0, layer\.1, layer\.2 holds NaN"
    ) as caught:
        qkv.layers[0](x)
    assert "nothing was sent" in str(caught.value)
    assert qkv.asked() == []
    qkv.check(0, rows())  # the layer is as good as before


def test_a_non_finite_gradient_is_not_sent(qkv: QkvLayers) -> None:
    out = qkv.check(1, rows(grad=True))
    qkv.asked()
    with pytest.raises(NonFiniteError, match=r"the output gradient of .*layer\.1.*holds NaN"):
        (out * torch.tensor(float("inf"))).sum().backward()
    assert qkv.asked() == []


def test_large_but_finite_inputs_are_sent(qkv: QkvLayers) -> None:
    """The sum that is looked at first overflows, the values do not."""
    x = torch.full((4, INPUTS), 3e38)
    with torch.no_grad():
        qkv.layers[0](x)
    assert qkv.asked() == [(FORWARD, ALL)]


def test_training_the_weight_is_refused(qkv: QkvLayers) -> None:
    qkv.layers[0].weight.requires_grad_(True)
    with pytest.raises(RemoteWeightUnavailable, match=r"layer\.0 is to be trained in full.*exclude="):
        qkv.layers[0](rows())


# -- a model --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_of_a_model(
    reentrant: bool, llama: Executor, checkpoint: Callable[[str], Path]
) -> None:
    expected = gradients(add_lora(load_local(checkpoint("llama"))).train(), token_ids())
    with llama.connect() as session:
        model = add_lora(session.load_model(progress=False)).train()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        before = session.stats.requests
        got = gradients(model, token_ids())
        assert session.stats.requests - before == 2 * 8  # forward, backward
    assert worst_error(got, expected) < 1e-5  # float32: the order of additions


def test_autocast_of_a_model(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    # Both sides round activations to 8 bits at the same places; the local side rounds its weights
    # too, which is 2^-9 more in each of eight products.
    outcome = []
    with llama.connect() as session:
        for model in (load_local(checkpoint("llama")), session.load_model(progress=False)):
            adapted = add_lora(model)
            with torch.autocast("cpu", torch.bfloat16):
                logits = result(adapted, token_ids())
                assert logits.dtype == torch.bfloat16
                loss_of(adapted, token_ids()).backward()
            flat = [p.grad.flatten() for p in adapted.parameters() if p.grad is not None]
            outcome.append((logits.detach().float(), torch.cat(flat)))
    assert relative_error(outcome[1][0], outcome[0][0]) < 0.03
    assert relative_error(outcome[1][1], outcome[0][1]) < 0.06


def test_two_threads_use_one_model(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    local = load_local(checkpoint("llama"))
    expected = [fixed_result(local, token_ids(seed=seed)) for seed in range(12)]
    errors = [1.0] * len(expected)
    with llama.connect() as session:
        model = session.load_model(progress=False)

        def run(seeds: range) -> None:
            for seed in seeds:
                errors[seed] = relative_error(fixed_result(model, token_ids(seed=seed)), expected[seed])

        threads = [threading.Thread(target=run, args=(range(at, 12, 2),)) for at in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(800)
    assert max(errors) < 1e-5  # float32: the order of additions


def test_a_closed_session_says_so(llama: Executor) -> None:
    with llama.connect() as session:
        model = session.load_model(progress=False)
    with pytest.raises(ConnectionLost, match="the session is closed"):
        fixed_result(model, token_ids())
