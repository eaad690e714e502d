"""Executors that serve a part of the layers each: a tenant asks the one that has what it needs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RING, Executor

import tenant_sdk
from provider.catalog.discovery import part_of
from shared.errors import ConfigurationError, ModelMismatch, SymbiosisError
from shared.wire.messages import GroupInfo, Member

Serve = Callable[..., Executor]


@pytest.fixture(scope="module")
def parts(serve: Serve, checkpoint: Callable[[str], Path]) -> list[Executor]:
    """Two of a provider, and in front of them one more that serves the first part too."""
    return [serve(checkpoint("llama"), numerics=RING, part=(k, 2)) for k in (1, 1, 2)]


def connect(executors: list[Executor], **options: Any) -> tenant_sdk.Session:
    own = {"privacy": "plain", "verify": "off", "allow_same": {"authority", "token"}} | options
    return tenant_sdk.connect(
        [each.url for each in executors],
        token=executors[0].token,
        ca=executors[0].ca,
        patience=0.0,
        **own,
    )


def logits(session: tenant_sdk.Session) -> torch.Tensor:
    with torch.no_grad():
        return session.load_model(progress=False)(torch.arange(20).view(1, -1)).logits


@pytest.mark.parametrize("privacy", ["plain", "one-time"])
def test_parts_together_are_the_whole(
    serve: Serve, parts: list[Executor], checkpoint: Callable[[str], Path], privacy: str
) -> None:
    """The same manifest and the same bits; masks' effects from parts of a mask source, answers verified."""
    whole = serve(checkpoint("llama"), numerics=RING)
    sources = [serve(checkpoint("llama"), numerics=RING, part=(k, 3)) for k in (3, 1, 2)]
    options: dict[str, Any] = {"privacy": privacy}
    if privacy == "one-time":
        options |= {"mask_sources": [[each.url for each in sources]], "verify": "always"}
        options |= {"mask_source_token": sources[0].token, "mask_source_ca": sources[0].ca}
        options["allow_same"] = {"host", "address", "key", "machine", "authority", "token"}
    with connect([whole]) as alone, connect(parts, **options) as session:
        assert session.manifest == alone.manifest
        assert torch.equal(logits(session), logits(alone)) or privacy == "one-time"
        torch.testing.assert_close(logits(session), logits(alone), rtol=1e-3, atol=1e-3)
        assert bool(session.stats.verified_rows) == (privacy == "one-time")


def test_gradients_travel_back_through_the_parts(parts: list[Executor]) -> None:
    with connect(parts) as session:
        model = session.load_model(progress=False)
        embedded = model.get_input_embeddings()(torch.arange(9).view(1, -1)).detach().requires_grad_()
        model(inputs_embeds=embedded).logits.square().mean().backward()
        assert embedded.grad is not None
        assert embedded.grad.abs().sum() > 0


def test_a_part_that_nobody_serves_is_told(parts: list[Executor]) -> None:
    with pytest.raises(SymbiosisError, match="nobody there serves group 4 of 8; name all executors"):
        connect(parts[:1])


def test_parts_must_compute_alike(
    serve: Serve, parts: list[Executor], checkpoint: Callable[[str], Path]
) -> None:
    other = serve(checkpoint("llama"), numerics="float32", part=(2, 2))
    with pytest.raises(ModelMismatch, match="compute in float32 and ring"):
        connect([parts[0], other])


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_group_is_in_one_part(count: int) -> None:
    groups = [GroupInfo(8, (Member(str(i), 1 + 7 * (i == 0), "t"),)) for i in range(5)]
    cuts = [part_of(groups, index, count) for index in range(1, count + 1)]
    assert [group for cut in cuts for group in range(*cut)] == list(range(5))
    assert all(first < stop for first, stop in cuts)


def test_more_parts_than_groups_cannot_be() -> None:
    with pytest.raises(ConfigurationError, match="part='1/3'"):
        part_of([GroupInfo(8, (Member("a", 1, "t"),))] * 2, 1, 3)
