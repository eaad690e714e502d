"""Experts at an executor: who is asked for what and when, the placeholder's algebra, and what it refuses."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import grouped_mm

from provider.catalog.experts import with_experts
from shared.errors import ConfigurationError, ModelMismatch, NonFiniteError, RemoteWeightUnavailable
from shared.experts import projections
from shared.wire.header import Direction, RequestClass
from shared.wire.messages import GroupInfo, Member
from shared.wire.protocol import MAX_GROUPS
from tenant_sdk.connection.remote import LazyResult
from tenant_sdk.model.experts import Experts, Padding, RemoteExperts, _tokens
from tenant_sdk.model.mixtures import plan_experts
from tenant_sdk.model.virtual import DRAFT_TOKENS, RemoteGroup
from tenant_sdk.products.modes import Privacy

EXPERTS, INPUTS, OUTPUTS = 4, 6, 5
CPU = torch.device("cpu")
COUNTS = [3, 0, 1, 5]


class Memory:
    """A privacy mode without an executor: multiplies here and remembers what happened in which order."""

    def __init__(self, weights: torch.Tensor) -> None:
        self.weights, self.privacy = weights, Privacy.ONE_TIME  # [E, O, I]
        self.events: list[tuple[Any, ...]] = []

    def submit(
        self,
        group: int,
        direction: Direction,
        members: int,
        tensors: list[torch.Tensor],
        request_class: RequestClass = RequestClass.UNDECLARED,
    ) -> LazyResult:
        (rows,) = tensors
        self.events.append(("asked", group, len(rows), direction, request_class))

        def finish() -> list[torch.Tensor]:
            self.events.append(("waited for", group))
            weight = self.weights[group]
            return [rows @ (weight.T if direction == Direction.FORWARD else weight)]

        return LazyResult(finish)

    def close(self) -> None:
        """Nothing to do."""

    def asked(self) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == "asked"]


class Mixture:
    """A projection whose weights are elsewhere, and the weights."""

    def __init__(self, padding: Padding | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn((EXPERTS, OUTPUTS, INPUTS), generator=generator)
        self.memory = Memory(self.weight)
        members = [Member(f"mlp.experts.up_proj.{e}", OUTPUTS, "", expert=e) for e in range(EXPERTS)]
        groups = [
            RemoteGroup(e, GroupInfo(INPUTS, (member,)), self.memory) for e, member in enumerate(members)
        ]
        self.experts = Experts("mlp.experts.up_proj", groups, padding)
        self.placeholder = RemoteExperts(self.experts, self.weight.shape, torch.float32, CPU, False)
        self.x = torch.randn((sum(COUNTS), INPUTS), generator=generator)
        self.ends = torch.tensor(COUNTS).cumsum(0).int()

    def local(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [T, I] to [T, O], by the weights themselves."""
        weights = self.weight if weight is None else weight
        return torch.cat([part @ w.T for part, w in zip(x.split(COUNTS), weights, strict=True)])

    def remote(self, x: torch.Tensor, placeholder: torch.Tensor | None = None) -> torch.Tensor:
        """The same as transformers asks for it."""
        before = _tokens.set(sum(COUNTS))  # as ``experts_forward`` does
        try:
            weight = self.placeholder if placeholder is None else placeholder
            return grouped_mm(x, weight.transpose(-2, -1), offs=self.ends)
        finally:
            _tokens.reset(before)


@pytest.fixture
def mixture() -> Mixture:
    return Mixture()


# -- who is asked ----------------------------------------------------------------------------------


def test_all_are_asked_before_the_first_is_waited_for(mixture: Mixture) -> None:
    torch.testing.assert_close(mixture.remote(mixture.x), mixture.local(mixture.x))
    kinds = [event[0] for event in mixture.memory.events]
    assert kinds == ["asked"] * 3 + ["waited for"] * 3  # nobody asks for nothing


def test_what_first_requests_wait_for_is_waited_for_together(mixture: Mixture) -> None:
    """Such as fingerprints: a round trip for each of hundreds of experts, one after the other, takes long."""
    together, submit = threading.Barrier(3), mixture.memory.submit

    def first(*arguments: Any) -> LazyResult:
        together.wait(800)  # passed only when all three are here
        return submit(*arguments)

    mixture.memory.submit = first  # type: ignore[method-assign]
    torch.testing.assert_close(mixture.remote(mixture.x), mixture.local(mixture.x))
    mixture.memory.submit = submit  # type: ignore[method-assign]
    mixture.memory.events.clear()
    torch.testing.assert_close(mixture.remote(mixture.x), mixture.local(mixture.x))
    assert [group for group, *_ in mixture.memory.asked()] == [0, 2, 3]  # in order from now on


def test_back_the_same_experts_are_asked(mixture: Mixture) -> None:
    x = mixture.x.clone().requires_grad_()
    mixture.remote(x).square().sum().backward()
    got, x.grad = x.grad, None
    mixture.local(x).square().sum().backward()
    torch.testing.assert_close(got, x.grad)
    tuning = RequestClass.FINETUNING
    asked = mixture.memory.asked()
    assert sorted(asked[:3]) + sorted(asked[3:]) == [
        (group, count, direction, tuning)
        for direction in (Direction.FORWARD, Direction.BACKWARD)
        for group, count in ((0, 3), (2, 1), (3, 5))
    ]


def test_few_rows_without_gradients_are_urgent(mixture: Mixture) -> None:
    with torch.no_grad():
        mixture.remote(mixture.x)
    assert {request_class for *_, request_class in mixture.memory.asked()} == {RequestClass.DECODE}


def test_padded_everybody_is_asked_for_as_much(caplog: pytest.LogCaptureFixture) -> None:
    mixture = Mixture(Padding())
    x = mixture.x.clone().requires_grad_()
    out = mixture.remote(x)
    torch.testing.assert_close(out, mixture.local(x))
    out.sum().backward()
    asked = [(group, count) for group, count, *_ in mixture.memory.asked()]
    assert sorted(asked[:4]) == sorted(asked[4:]) == [(e, 16) for e in range(4)]  # of nine tokens
    assert [record.getMessage().count("7.1 times") for record in caplog.records] == [1]


@pytest.mark.parametrize("privacy", [Privacy.NOISE_BANK, Privacy.PLAIN])
def test_nothing_is_padded_where_zeros_show(privacy: Privacy) -> None:
    mixture = Mixture(Padding())
    mixture.memory.privacy = privacy
    with pytest.raises(RuntimeError, match=f"mode {privacy} does not hide"):
        mixture.remote(mixture.x)
    assert not mixture.memory.events


@pytest.mark.parametrize(("most", "bucket"), [(1, 4), (4, 4), (5, 8), (8, 8), (9, 16), (1000, 1024)])
def test_buckets_are_powers_of_two(most: int, bucket: int) -> None:
    assert Padding().rows([0, most, 1], 2000) == bucket


def test_padded_tokens_that_are_not_known_are_refused() -> None:
    """As when transformers' own implementation multiplies: their number hides where few of them go."""
    mixture = Mixture(Padding())
    with pytest.raises(ConfigurationError, match=r"set_experts_implementation\('symbiosis'\)"):
        grouped_mm(mixture.x, mixture.placeholder.transpose(1, 2), offs=mixture.ends)
    assert not mixture.memory.events


@pytest.mark.parametrize("tokens", [DRAFT_TOKENS, DRAFT_TOKENS + 1])
def test_the_class_says_how_many_tokens_and_not_where_they_go(tokens: int) -> None:
    for counts in ([tokens, 0, 0, 0], [tokens - 3, 1, 1, 1]):
        mixture = Mixture(Padding())
        ends, before = torch.tensor(counts).cumsum(0).int(), _tokens.set(tokens)
        with torch.no_grad():
            grouped_mm(torch.ones(tokens, INPUTS), mixture.placeholder.transpose(1, 2), offs=ends)
        _tokens.reset(before)
        expected = RequestClass.DECODE if tokens == DRAFT_TOKENS else RequestClass.PREFILL
        assert {request_class for *_, request_class in mixture.memory.asked()} == {expected}


@pytest.mark.parametrize("skips", [False, True])
def test_equally_many_rows_for_each(skips: bool) -> None:
    """As Llama 4 (rows of zeros are tokens of other experts) and Inkling (they are rows like others)."""
    mixture = Mixture()
    mixture.experts.skips = skips
    x = torch.randn((EXPERTS, 3, INPUTS), generator=torch.Generator().manual_seed(1))
    x[1, :2], x[2] = 0, 0
    x.requires_grad_()
    out = torch.bmm(x, mixture.placeholder.transpose(1, 2))
    torch.testing.assert_close(out, x @ mixture.weight.mT)
    asked = {group: count for group, count, *_ in mixture.memory.asked()}  # first requests: in any order
    assert asked == ({0: 3, 1: 1, 3: 3} if skips else dict.fromkeys(range(EXPERTS), 3))
    (out * x.detach().ne(0).any(-1, keepdim=True)).sum().backward()
    expected = mixture.weight.sum(1)[:, None].expand_as(x) * x.detach().ne(0).any(-1, keepdim=True)
    torch.testing.assert_close(x.grad, expected)


def test_no_rows_at_all_ask_for_nothing(mixture: Mixture) -> None:
    nobody = torch.zeros(EXPERTS, dtype=torch.int32)
    for padded in (mixture, Mixture(Padding())):
        out = grouped_mm(torch.empty(0, INPUTS), padded.placeholder.transpose(1, 2), offs=nobody)
        assert out.shape == (0, OUTPUTS)
        assert not padded.memory.events


def test_what_is_not_finite_is_not_sent(mixture: Mixture) -> None:
    """Not even to those experts whose rows are good."""
    mixture.x[-1, 0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"input of mlp\.experts\.up_proj holds NaN.*nothing was sent"):
        mixture.remote(mixture.x)
    assert not mixture.memory.events


# -- algebra ---------------------------------------------------------------------------------------


def test_stored_with_the_inputs_first(mixture: Mixture) -> None:
    placeholder = RemoteExperts(mixture.experts, (EXPERTS, INPUTS, OUTPUTS), torch.float32, CPU, True)
    got = grouped_mm(mixture.x, placeholder, offs=mixture.ends)
    torch.testing.assert_close(got, mixture.local(mixture.x))
    assert placeholder.transpose(1, 2).transpose(-1, -2).shape == placeholder.shape


@pytest.mark.parametrize("product", ["grouped_mm", "_grouped_mm", "grouped_mm_fallback"])
def test_each_product_that_transformers_may_choose(mixture: Mixture, product: str) -> None:
    calls = {"grouped_mm": torch.nn.functional.grouped_mm, "_grouped_mm": torch._grouped_mm}
    call = calls.get(product) or torch.ops.transformers.grouped_mm_fallback
    got = call(mixture.x, mixture.placeholder.transpose(-2, -1), offs=mixture.ends)
    torch.testing.assert_close(got, mixture.local(mixture.x))


@pytest.mark.parametrize("again", [False, True])
def test_an_adapter_on_the_weight(mixture: Mixture, again: bool) -> None:
    """As PEFT adds it; gradients reach it, also of experts without rows."""
    left, right = torch.randn(EXPERTS, OUTPUTS, 2), torch.randn(EXPERTS, 2, INPUTS)
    left.requires_grad_(), right.requires_grad_()
    placeholder = torch.baddbmm(mixture.placeholder, left, right, alpha=0.5)
    weight = torch.baddbmm(mixture.weight, left, right, alpha=0.5)
    if again:
        placeholder, weight = torch.baddbmm(placeholder, left, right), torch.baddbmm(weight, left, right)
    results = []
    for out in (mixture.remote(mixture.x, placeholder), mixture.local(mixture.x, weight)):
        results.append((out, *torch.autograd.grad(out.square().sum(), (left, right))))
    for got, expected in zip(*results, strict=True):  # sums of up to some hundreds, in another order
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)


def test_a_whole_adapter_on_the_weight(mixture: Mixture) -> None:
    """As PEFT adds several adapters, or one to a mixture of one expert, without an axis for it."""
    delta = torch.randn(EXPERTS, OUTPUTS, INPUTS, requires_grad=True)
    results = []
    for out in (
        mixture.remote(mixture.x, mixture.placeholder + delta),
        mixture.local(mixture.x, mixture.weight + delta),
    ):
        results.append((out, *torch.autograd.grad(out.square().sum(), delta)))
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-4)
    with pytest.raises(RemoteWeightUnavailable, match="a sum with the base weight"):
        mixture.placeholder + delta[0]
    alone = RemoteExperts(mixture.experts, (1, OUTPUTS, INPUTS), torch.float32, CPU, False)
    assert isinstance(alone + delta[0], RemoteExperts)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(lambda x: f(x).tanh().sum())(x),
        lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
        lambda f, x: torch.func.vjp(f, x)[1](f(x).cos())[0],
        lambda f, x: torch.autograd.functional.hvp(lambda x: f(x).tanh().sum(), x, x.cos())[1],
    ],
)
def test_derivatives(mixture: Mixture, transform: Callable[..., torch.Tensor]) -> None:
    torch.testing.assert_close(transform(mixture.remote, mixture.x), transform(mixture.local, mixture.x))


def test_a_batch_of_routes_is_refused(mixture: Mixture) -> None:
    batch, ends = torch.stack([mixture.x, mixture.x]), torch.stack([mixture.ends, mixture.ends])
    placeholder = mixture.placeholder.transpose(1, 2)
    with pytest.raises(ConfigurationError, match=r"torch\.func\.vmap.*experts='local'"):
        torch.func.vmap(lambda x, offs: grouped_mm(x, placeholder, offs=offs))(batch, ends)
    assert not mixture.memory.events


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2**-7), (torch.float64, 1e-6)])
def test_other_dtypes(mixture: Mixture, dtype: torch.dtype, tolerance: float) -> None:
    got = mixture.remote(mixture.x.to(dtype), mixture.placeholder.to(dtype))
    expected = mixture.local(mixture.x.to(dtype).float())
    assert got.dtype == dtype
    assert (got.float() - expected).norm() < tolerance * expected.norm()


def test_copies_share_the_session(mixture: Mixture) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(mixture.placeholder, requires_grad=False)
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, nn.Parameter)
    torch.testing.assert_close(mixture.remote(mixture.x, twin.weight), mixture.local(mixture.x))


@pytest.mark.parametrize(
    "read",
    [
        lambda w: w + 1,
        lambda w: w[0],
        lambda w: w.transpose(0, 1),
        lambda w: torch.baddbmm(w, torch.ones(4, 5, 1), torch.ones(4, 1, 6), beta=0.5),
        lambda w: torch.bmm(w, torch.ones(4, 6, 1)),
        lambda w: torch.bmm(torch.ones(4, 1, 5), w, out_dtype=torch.float32),
        lambda w: grouped_mm(torch.ones(4, 5), w, offs=torch.arange(4).int(), out_dtype=torch.bfloat16),
        lambda w: grouped_mm(torch.ones(4, 5), w),
        lambda w: w.transpose(dim0=0, dim1=1),
        lambda w: w.clone(),
        lambda w: w.data.set_(torch.ones(4, 5, 6)),
        lambda w: w.tolist(),
    ],
)
def test_reading_raises(mixture: Mixture, read: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(RemoteWeightUnavailable, match=r"mlp\.experts\.up_proj stays with the provider"):
        read(mixture.placeholder)


# -- in a model ------------------------------------------------------------------------------------


def test_projections_are_found_by_what_transformers_gives_them() -> None:
    module = nn.Module()
    module.num_experts, module.has_gate, module.is_transposed = 4, False, True
    module.up_proj, module.down_proj = nn.Parameter(torch.ones(4, 2, 3)), nn.Parameter(torch.ones(4, 3, 2))
    module.other = nn.Parameter(torch.ones(4, 2, 3))
    model = nn.ModuleDict({"mlp": module, "norm": nn.LayerNorm(2)})
    found = list(projections(model))
    assert [each.name for each in found] == ["mlp.up_proj", "mlp.down_proj"]
    assert [each.axes for each in found] == [(4, 3, 2), (4, 2, 3)]


def served(expert: int, **other: Any) -> GroupInfo:
    """As a provider lists the experts of ``mixed``."""
    options = {
        "inputs": 6,
        "name": f"mlp.down_proj.{expert}",
        "outputs": 5,
        "head": False,
        "transposed": False,
    }
    options |= other
    member = Member(options["name"], options["outputs"], "w", options["transposed"], expert=expert)
    return GroupInfo(options["inputs"], (member,), head=options["head"])


def mixed() -> nn.Module:
    module = nn.Module()
    module.num_experts, module.has_gate, module.is_transposed = 2, False, False
    module.down_proj = nn.Parameter(torch.ones(2, 5, 6))
    return nn.ModuleDict({"mlp": module})


@pytest.mark.parametrize(
    "infos",
    [
        [served(0)],
        [served(1), served(0)],
        [served(0), served(1), served(2)],
        [served(0), served(1, inputs=7)],
        [served(0), served(1, outputs=6)],
        [served(0, transposed=True), served(1, transposed=True)],
        [served(0), served(1, head=True)],  # whose weights no digest covers
        [served(0), served(1, name="mlp.down_proj.0")],
        [served(0, name="mlp.up_proj.0"), served(1, name="mlp.up_proj.1")],
    ],
)
def test_experts_that_are_not_the_models_are_refused(infos: list[GroupInfo]) -> None:
    groups = [RemoteGroup(at, info, Memory(torch.empty(0))) for at, info in enumerate(infos)]
    with pytest.raises(ModelMismatch, match=r"at the executor|does not have"):
        plan_experts(mixed(), groups)
    many = mixed()
    many["mlp"].num_experts = 1 << 40  # as many as a peer says that a model has, before anything is allocated
    many["mlp"].down_proj = nn.Parameter(torch.empty((1 << 40, 5, 6), device="meta"))
    with pytest.raises(ModelMismatch, match=r"has 1099511627776 experts|does not have"):
        plan_experts(many, groups)
    right = [RemoteGroup(at, served(at), Memory(torch.empty(0))) for at in range(2)]
    assert [each.groups for each in plan_experts(mixed(), right)] == [right]
    assert not plan_experts(mixed(), right, exclude=["mlp.down_proj"])


def group(name: str, expert: int | None = None) -> GroupInfo:
    return GroupInfo(2, (Member(name, 3, "", expert=expert),))


def test_experts_follow_their_block() -> None:
    names = ["embed", "layers.0.q", "layers.0.o", "layers.1.q", "norm"]
    experts = [f"layers.{block}.mlp.up.{e}" for block in range(2) for e in range(2)] + ["mlp.up.0"]
    found = with_experts([group(name) for name in names], [(group(n, 0).members[0], 2) for n in experts])
    assert [each.members[0].name for each in found] == [
        *(names[:3] + experts[:2]),
        *(names[3:4] + experts[2:4]),
        *(names[4:] + experts[4:]),
    ]


def test_more_groups_than_tenants_take_are_not_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    experts = [(group(f"layers.0.up.{e}", e).members[0], 2) for e in range(MAX_GROUPS)]
    assert len(with_experts([group("layers.0.q")], experts)) == 1
    assert "tenants download the experts' weights" in caplog.text
    assert len(with_experts([group("layers.0.q")], experts[1:])) == MAX_GROUPS
    long = [(group(f"{'x' * 200}.{e}", e).members[0], 2) for e in range(MAX_GROUPS - 1)]
    assert len(with_experts([group("layers.0.q")], long)) == 1  # too many bytes for a WELCOME


def test_few_tokens_have_room_for_all_with_any_expert() -> None:
    """Or eight texts that agree would show, since all of them go to the same experts."""
    padding = Padding()
    alike, different = [8, 8, 0, 0], [4, 4, 4, 4]
    assert padding.rows(alike, 8) == padding.rows(different, 8) == 8
    assert padding.rows([1, 1, 0, 0], 1) == 4
    assert (padding.rows([40, 3, 0, 0], 40), padding.rows([20, 20, 0, 3], 40)) == (64, 32)
