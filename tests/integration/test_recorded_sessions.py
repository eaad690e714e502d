"""Sessions of released versions of the protocol, as bytes: executors answer the same for ever.

``tests/vectors/session-v4.json`` was recorded once, with RECORD_SESSION=yes. Do not record it again: if an
answer changes, raise the version of the protocol, and record a session of that.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import RING, Executor
from raw_peers import BACKWARD, ERROR, FETCH, FORWARD, HELLO, INT32, PRODUCT, WELCOME, header, open_raw
from transformers import LlamaConfig, LlamaForCausalLM

from shared.wire.header import PROTOCOL_VERSION
from shared.wire.messages import Manifest, decode
from shared.wire.protocol import validate_manifest

VECTORS = Path(__file__).parents[1] / "vectors"
SEED_EFFECT = 8
ROWS = 3
HEADER_BYTES = 32


@pytest.fixture(scope="module")
def executor(serve: Callable[..., Executor], tmp_path_factory: pytest.TempPathFactory) -> Executor:
    """Of a Llama of one block, whose numbers are written here and not drawn."""
    options = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**options, num_attention_heads=4, num_key_value_heads=2))
    with torch.no_grad():
        for at, (_, parameter) in enumerate(sorted(model.named_parameters())):
            numbers = (torch.arange(parameter.numel()) * 7 + 13 * at) % 31 - 15
            parameter.copy_((numbers / 64).view(parameter.shape))
    folder = tmp_path_factory.mktemp("written")
    model.save_pretrained(folder)
    return serve(folder, numerics=RING)


def requests(groups: list[dict[str, Any]]) -> Iterator[bytes]:
    """What a tenant sends after HELLO: each kind of request, of each group, and some that are refused."""
    number = 1
    for at, group in enumerate(groups):
        outputs = [member["outputs"] for member in group["members"]]
        for direction, columns in ((FORWARD, group["inputs"]), (BACKWARD, sum(outputs))):
            for bits in (32, 24, 16):
                fields = {"direction": direction, "dtype": INT32, "group": at, "rows": ROWS}
                fields |= {"members": (1 << len(outputs)) - 1, "columns": columns, "answer_bits": bits}
                numbers = [7919 * n * n % (1 << 32) for n in range(at, at + ROWS * columns)]
                rows = struct.pack(f"<{len(numbers)}I", *numbers)
                yield header(PRODUCT, request_id=number + 1, **fields) + rows
                yield header(SEED_EFFECT, request_id=number + 2, **fields) + bytes(range(HEADER_BYTES))
                number += 2
    width = sum(member["outputs"] for member in groups[0]["members"])
    for kind, name, stop in (
        ("scales", "0", width),
        ("parameter", "model.norm.weight", 16),
        ("file", "?", 1),
    ):
        number += 1
        body = json.dumps({"kind": kind, "name": name, "start": 0, "stop": stop}).encode()
        yield header(FETCH, request_id=number, rows=1, columns=len(body)) + body
    for group, columns in ((99, 16), (0, 15)):
        number += 1
        fields = {"direction": FORWARD, "dtype": INT32, "members": 1, "rows": 1, "columns": columns}
        yield header(PRODUCT, request_id=number, group=group, **fields) + bytes(4 * columns)


def comparable(answer: bytes) -> str:
    """An answer; of an error its kind and code: its words are for people."""
    if answer[1] != ERROR:
        return answer.hex()
    return f"error {int.from_bytes(answer[8:12], 'little')} {json.loads(answer[HEADER_BYTES:])['code']}"


def played(executor: Executor, sent: Iterator[bytes] | None = None) -> dict[str, Any]:
    """What the executor answers to these requests, or to those that are recorded now."""
    with open_raw(executor) as peer:
        welcome = peer.hello()
        exchange = []
        for request in sent or requests(welcome["groups"]):
            peer.send(peer.frame(request))
            _, answer = peer.receive_frame()
            exchange.append({"sent": request.hex(), "received": comparable(answer)})
    return {"welcome": welcome, "exchange": exchange}


def recorded() -> list[Path]:
    """Of all versions."""
    return sorted(VECTORS.glob("session-v*.json"))


def test_a_session_of_this_version_is_recorded(executor: Executor) -> None:
    path = VECTORS / f"session-v{PROTOCOL_VERSION}.json"
    if os.environ.get("RECORD_SESSION") == "yes" and not path.exists():
        path.write_text(json.dumps(played(executor), indent=0) + "\n")
    assert path.exists(), "run this test once with RECORD_SESSION=yes"


@pytest.mark.parametrize("path", recorded(), ids=lambda path: path.stem)
def test_the_answers_are_the_recorded_ones(executor: Executor, path: Path) -> None:
    """So tenants of an earlier release work with this executor."""
    session = json.loads(path.read_text())
    sent = [bytes.fromhex(each["sent"]) for each in session["exchange"]]
    assert played(executor, iter(sent))["exchange"] == session["exchange"]
    errors = [each for each in session["exchange"] if each["received"].startswith("error")]
    assert 0 < len(errors) < len(session["exchange"])


@pytest.mark.parametrize("path", recorded(), ids=lambda path: path.stem)
def test_a_manifest_has_what_earlier_tenants_read(executor: Executor, path: Path) -> None:
    """All that there was, of the same type; there may be more."""

    def check(old: Any, new: Any, where: str) -> None:
        assert type(old) is type(new), where
        if isinstance(old, dict):
            assert old.keys() <= new.keys(), where
            for key in old:
                check(old[key], new[key], f"{where}.{key}")
        elif isinstance(old, list):
            for at, (one, other) in enumerate(zip(old, new, strict=False)):
                check(one, other, f"{where}[{at}]")

    with open_raw(executor) as peer:
        check(json.loads(path.read_text())["welcome"], peer.hello(), "welcome")


@pytest.mark.parametrize("path", recorded(), ids=lambda path: path.stem)
def test_tenants_read_the_manifests_of_earlier_executors(path: Path) -> None:
    welcome = json.dumps(json.loads(path.read_text())["welcome"]).encode()
    validate_manifest(decode(welcome, Manifest))


@pytest.mark.parametrize("version", [1, 2, 3, 5, 255])
def test_another_version_is_refused_with_a_reason(executor: Executor, version: int) -> None:
    with open_raw(executor) as peer:
        body = json.dumps({"client": "another"}).encode()
        peer.message(header(HELLO, version=version, rows=1, columns=len(body)), body)
        fields, answer = peer.receive()
        assert fields.operation == ERROR != WELCOME
        assert json.loads(answer)["code"] == "protocol_version"
