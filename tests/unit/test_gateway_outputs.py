"""Answers of a gateway are made in one thread: an error, or the work, of one is not that of all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tenant_sdk.gateway.outputs import CORRECTIONS, TokenTexts, bounded_corrections, each_alone


class Processor:
    """As vLLM's: it forgets a request that is aborted, and writes a last answer to its queue."""

    def __init__(self, *names: str) -> None:
        self.put: dict[str, list[Any]] = {name: [] for name in names}
        self.request_states = {
            name: SimpleNamespace(queue=SimpleNamespace(put=put.append)) for name, put in self.put.items()
        }

    def process_outputs(self, outputs: list[Any], *_: Any, **__: Any) -> Any:
        for output in outputs:
            if output.request_id in self.request_states:
                self.put[output.request_id].append(output.text / 1)
        aborted = [each.request_id for each in outputs if each.request_id == "stopped"]
        return SimpleNamespace(request_outputs=[], reqs_to_abort=aborted)

    def abort_requests(self, names: list[str], *, internal: bool) -> None:
        assert internal
        for name in names:
            self.request_states.pop(name)
            raise RuntimeError("no last answer")


def test_an_error_ends_one_request() -> None:
    processor, told = Processor("a", "b", "stopped", "c"), list[Exception]()
    process = each_alone(processor, told.append)
    outputs = [SimpleNamespace(request_id=name, text=1) for name in ("a", "stopped", "gone", "c")]
    outputs.insert(1, SimpleNamespace(request_id="b", text="no number"))
    result = process(outputs, 0.0, weight_version=None)
    assert result.reqs_to_abort == ["b", "stopped"]
    assert [*processor.request_states] == ["a", "stopped", "c"]
    assert processor.put["a"] == processor.put["stopped"] == processor.put["c"] == [1]
    assert processor.put["b"] == told
    assert isinstance(told[0], TypeError)


def test_an_error_that_belongs_to_no_request_is_raised() -> None:
    def process(outputs: list[Any]) -> Any:
        if outputs:
            raise LookupError
        return SimpleNamespace(reqs_to_abort=[])

    processor: Any = SimpleNamespace(request_states={}, process_outputs=process)
    with pytest.raises(LookupError):
        each_alone(processor, lambda _: None)([SimpleNamespace(request_id="gone")])


def test_a_token_is_decoded_once() -> None:
    decoded = list[int]()

    def text_of(token: int) -> str:
        decoded.append(token)
        return chr(token)

    texts = TokenTexts(text_of)
    assert texts(None, [65, 66, 65]) == ["A", "B", "A"]
    assert texts(None, [66]) == ["B"]
    assert decoded == [65, 66]


def test_parts_of_characters_are_put_together_in_a_part_of_a_message() -> None:
    class Processor:
        def correct(self, token: int) -> str:
            return chr(token)

        def update(self, tokens: list[int]) -> None:
            self.texts = [self.correct(token) for token in tokens]

    kind: Any = Processor
    kind.correct, kind.update = bounded_corrections(kind.correct, kind.update)
    processor = kind()
    for _ in range(2):  # each message anew
        processor.update([65] * (CORRECTIONS + 3))
        assert processor.texts == ["A"] * CORRECTIONS + [""] * 3
