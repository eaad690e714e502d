"""How the engine's outputs become answers, in one thread for all clients: bounded, and each alone. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

CORRECTIONS = 512  # of a message: tokens that are parts of characters; each takes some decodings


class TokenTexts:
    """The text of each token alone, which is made once: a message may have 26,000 log-probabilities.

    Args:
        text_of: makes it.
    """

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self._text_of = text_of
        self._texts: dict[int, str] = {}  # as many as the vocabulary has

    def __call__(self, _tokenizer: object, ids: Sequence[int]) -> list[str]:
        """As vLLM's ``convert_ids_list_to_tokens``."""
        return [self._texts[each] if each in self._texts else self._make(each) for each in ids]

    def _make(self, token: int) -> str:
        text = self._texts[token] = self._text_of(token)
        return text


def bounded_corrections(correct: Callable[..., str], update: Callable[..., None]) -> tuple[Any, Any]:
    """Of vLLM's ``LogprobsProcessor`` two methods, of which the first is called seldom enough.

    It looks for a character that a token ends, from the tokens before. Behind ``CORRECTIONS`` of a message
    such tokens have no text, as those have that end none.
    """

    def corrected(self: Any, *arguments: Any) -> str:
        self.corrections += 1
        return correct(self, *arguments) if self.corrections <= CORRECTIONS else ""

    def updated(self: Any, output: Any) -> None:
        self.corrections = 0
        update(self, output)

    return corrected, updated


def each_alone(processor: Any, failed: Callable[[Exception], None]) -> Callable[..., Any]:
    """vLLM's ``process_outputs``, which ends one request with an error, where vLLM would end all.

    Args:
        processor: vLLM's ``OutputProcessor``.
        failed: called with an error.
    """
    process = processor.process_outputs

    def processed(outputs: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        result = process([], *arguments, **options)
        for output in outputs:
            state = processor.request_states.get(output.request_id)
            try:
                found = process([output], *arguments, **options)
            except Exception as error:
                if state is None or state.queue is None:
                    raise
                failed(error)
                state.queue.put(error)  # what comes to the queue later does not replace it
                with suppress(Exception):  # it forgets the request first, and then writes a last answer
                    processor.abort_requests([output.request_id], internal=True)
                result.reqs_to_abort.append(output.request_id)
            else:
                result.request_outputs += found.request_outputs
                result.reqs_to_abort += found.reqs_to_abort
        return result

    return processed
