"""``torch.func`` and gradients of gradients through remote products, against the same of the local model.

Tolerances, relative L2: float32 in another order of additions, 1e-5 for each derivative. On the ring a layer
is off by up to 2e-4 and three of them by less than 1e-3, in first derivatives and in second ones. Among each
other the modes on the ring are exact, as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RING, Executor, relative_error
from parity import add_lora, load_local, loss_of, token_ids
from ring_sessions import MASKINGS, ExecutorFactory, session_in
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap

import tenant_sdk
from shared.errors import NonFiniteError

pytest_plugins = ("ring_fixtures",)
# ``linearize`` of torch itself, for any model.
pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")

FLOAT, ON_RING = 1e-5, {"ring": 1e-3, "ring-fine": 3e-4}[RING]
Layer = Callable[[torch.Tensor], torch.Tensor]


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = seeded(3, 64)
TANGENT, COTANGENT = seeded(3, 64, seed=1), seeded(3, 64, seed=2)


def size(layer: Layer) -> Layer:
    """A scalar that no derivative of which is zero."""
    return lambda x: layer(x).tanh().square().sum()


def twice(layer: Layer) -> torch.Tensor:
    """A penalty for large gradients, differentiated."""
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(size(layer)(x), x, create_graph=True)
    (result,) = torch.autograd.grad(slope.pow(3).sum(), x)
    return result


def dual(layer: Layer) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(layer(forward_ad.make_dual(X, TANGENT))).tangent


TRANSFORMS: dict[str, Callable[[Layer], torch.Tensor]] = {
    "grad": lambda layer: grad(size(layer))(X),
    "vjp": lambda layer: vjp(layer, X)[1](COTANGENT)[0],
    "jvp": lambda layer: jvp(layer, (X,), (TANGENT,))[1],
    "vmap": lambda layer: vmap(layer)(X),
    "vmap over columns": lambda layer: vmap(layer, in_dims=1, out_dims=1)(X.T),
    "gradients of each sample": lambda layer: vmap(grad(size(layer)))(X),
    "jacrev": lambda layer: jacrev(layer)(X[0]),
    "jacfwd": lambda layer: jacfwd(layer)(X[0]),
    "hessian": lambda layer: hessian(size(layer))(X[0]),
    "linearize": lambda layer: linearize(layer, X)[1](TANGENT),
    "forward mode": dual,
    "gradients of gradients": twice,
}


def results(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of a block's feed-forward part: two layers with one input, and one after them."""
    layer = model.model.layers[0].mlp.requires_grad_(False)
    return {name: transform(layer) for name, transform in TRANSFORMS.items()}


@pytest.fixture(scope="module")
def local(checkpoint: Callable[[str], Path]) -> dict[str, torch.Tensor]:
    return results(load_local(checkpoint("llama")))


def assert_near(
    got: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], tolerance: float
) -> None:
    assert got.keys() == expected.keys()
    errors = {name: relative_error(got[name], each) for name, each in expected.items()}
    assert max(errors.values()) < tolerance, errors


@pytest.mark.parametrize("privacy", ["plain", "noise-bank"])
def test_on_floats(privacy: str, llama: Executor, local: dict[str, torch.Tensor]) -> None:
    """A mask of the noise bank is as large as a row, so half a digit goes to its rounding."""
    with llama.connect(privacy=privacy) as session:
        got = results(session.load_model(progress=False))
    assert_near(got, local, FLOAT if privacy == "plain" else 10 * FLOAT)


def test_a_graph_is_made_with_rows_that_nobody_has_written(
    llama: Executor, local: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `linearize` does: such memory may hold NaN. Rows of the user are refused as ever."""
    new_empty = torch.Tensor.new_empty

    def unwritten(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        return new_empty(self, *size, **options).fill_(torch.nan)

    with llama.connect(privacy="plain") as session:
        layer = session.load_model(progress=False).model.layers[0].mlp.requires_grad_(False)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", unwritten)
            _, derivative = linearize(layer, X)
        assert_near({"linearize": derivative(TANGENT)}, {"linearize": local["linearize"]}, FLOAT)
        with pytest.raises(NonFiniteError):
            derivative(TANGENT * torch.nan)


@pytest.fixture(scope="module")
def plain(executors: ExecutorFactory, checkpoint: Callable[[str], Path]) -> dict[str, torch.Tensor]:
    with session_in("plain", executors("llama"), checkpoint("llama")) as session:
        return results(session.load_model(progress=False))


def test_on_the_ring(plain: dict[str, torch.Tensor], local: dict[str, torch.Tensor]) -> None:
    assert_near(plain, local, ON_RING)


@pytest.mark.parametrize("masking", MASKINGS[1:])
def test_every_mode_of_masks(
    masking: str,
    executors: ExecutorFactory,
    checkpoint: Callable[[str], Path],
    plain: dict[str, torch.Tensor],
) -> None:
    with session_in(masking, executors("llama"), checkpoint("llama")) as session:
        got = results(session.load_model(progress=False))
        assert (session.stats.verified_rows > 0) == (masking not in ("plain", "noise-bank"))
    for name, each in plain.items():
        assert torch.equal(got[name], each), name


def gradients_of_each_sample(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of an adapter's parameters [3, ...], for three texts."""
    adapted = add_lora(model)
    trained = {name: p.detach() for name, p in adapted.named_parameters() if p.requires_grad}

    def loss(parameters: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        def call(input_ids: torch.Tensor) -> Any:
            return functional_call(adapted, parameters, kwargs={"input_ids": input_ids, "use_cache": False})

        return loss_of(call, ids[None])  # type: ignore[arg-type]

    return vmap(grad(loss), in_dims=(None, 0))(trained, token_ids(rows=3))  # type: ignore[no-any-return]


def test_gradients_of_each_sample_of_a_model(llama: Executor, checkpoint: Callable[[str], Path]) -> None:
    """As private learning needs them; all samples travel in the same requests."""
    expected = gradients_of_each_sample(load_local(checkpoint("llama"), attn_implementation="eager"))
    with llama.connect() as session:
        model = session.load_model(progress=False, attn_implementation="eager")
        before = session.stats.requests
        got = gradients_of_each_sample(model)
        # Forward, and back to where the first adapter is: once for all samples.
        assert session.stats.requests - before == 8 + 7
    assert_near(got, expected, FLOAT)


def test_a_batch_of_biases(llama: Executor) -> None:
    """What a tenant holds may be batched where the rows are not."""
    with llama.connect() as session:
        layer = session.load_model(progress=False).model.layers[0].mlp.down_proj
        layer.bias, rows = nn.Parameter(torch.zeros(64)), seeded(2, 96)
        biases = seeded(3, 64)
        got = vmap(lambda bias: functional_call(layer, {"bias": bias}, (rows,)))(biases)
        assert torch.equal(got, layer(rows) + biases[:, None])


@pytest.mark.parametrize(
    "ask",
    [
        lambda layer: torch.autograd.functional.jacobian(layer, X, vectorize=True),
        lambda layer: torch.autograd.grad(
            layer(x := X.clone().requires_grad_()), x, torch.ones(2, 3, 64), is_grads_batched=True
        ),
    ],
)
def test_the_older_batches_of_autograd_are_refused(ask: Callable[[Layer], Any], llama: Executor) -> None:
    with llama.connect() as session:
        layer = session.load_model(progress=False).model.layers[0].mlp.down_proj
        with pytest.raises(tenant_sdk.ConfigurationError, match=r"is_grads_batched.*use torch\.func"):
            ask(lambda x: layer(torch.cat([x, x[:, :32]], 1)))
