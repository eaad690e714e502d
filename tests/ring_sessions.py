"""Sessions with ring executors in every privacy mode, and what leaves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import Executor, make_model

import tenant_sdk
from shared.wire.header import Operation
from shared.wire.incoming import tensor_bytes
from tenant_sdk.connection.channel import Channel, ResponseFuture
from tenant_sdk.trust.attestation import linear_layers

Executors = tuple[Executor, Executor, Executor]  # a provider and two mask sources of the same weights
ExecutorFactory = Callable[[str], Executors]  # by the name of a tiny model
MASKINGS = ("plain", "noise-bank", "one source", "two sources", "local")


def one_time(provider: Executor, *sources: Executor | Path, **options: Any) -> tenant_sdk.Session:
    """A session with one-time masks. Everything runs on one machine, so its operators are the same."""
    urls = [s.url if isinstance(s, Executor) else f"local:{s}" for s in sources]
    return provider.connect(
        **({"privacy": "one-time", "mask_sources": urls, "allow_same": ["all"]} | options)
    )


def session_in(masking: str, executors: Executors, folder: Path, **options: Any) -> tenant_sdk.Session:
    """A session in one of MASKINGS."""
    provider, first, second = executors
    sources: dict[str, tuple[Executor | Path, ...]] = {
        "one source": (first,),
        "two sources": (first, second),
        "local": (folder,),
    }
    if masking in sources:
        return one_time(provider, *sources[masking], **options)
    return provider.connect(privacy=masking, **options)


def other_layers(folder: Path) -> None:
    """Save the tiny Llama with other weights in its linear layers, and all else as it is."""
    model, other = make_model("llama"), make_model("llama", seed=1)
    weights = {f"model.{name}.weight": layer.weight for name, layer in linear_layers(other.model).items()}
    model.load_state_dict(weights, strict=False)
    model.save_pretrained(folder)


class Sent(NamedTuple):
    """A request as it left."""

    url: str
    operation: int
    direction: int
    body: bytes
    group: int = 0
    rows: int = 0


@contextmanager
def captured_requests() -> Iterator[list[Sent]]:
    """Every message of every channel while the block lasts, before TLS."""
    sent: list[Sent] = []
    submit = Channel.submit

    def watched(
        self: Channel, header_of: Callable[..., Any], tensors: list[torch.Tensor] | bytes
    ) -> ResponseFuture:
        def noted(protocol: Any) -> Any:
            header = header_of(protocol)
            body = (
                tensors if isinstance(tensors, bytes) else b"".join(bytes(tensor_bytes(b)) for b in tensors)
            )
            sent.append(Sent(self.peer, header.operation, header.direction, body, header.group, header.rows))
            return header

        return submit(self, noted, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "submit", watched)
        yield sent


def products(sent: list[Sent]) -> list[bytes]:
    return [message.body for message in sent if message.operation == Operation.PRODUCT]


def seeds(sent: list[Sent]) -> list[bytes]:
    return [message.body for message in sent if message.operation == Operation.SEED_EFFECT]


def assert_no_block_repeats(bodies: Iterable[bytes]) -> None:
    """No 16 bytes, as AES makes them and as they lie in requests and seeds, are there twice."""
    blocks = [body[at : at + 16] for body in bodies for at in range(0, len(body) - 15, 16)]
    assert len(set(blocks)) == len(blocks) > 0
