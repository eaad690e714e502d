"""How calls of tools are read from answers: by vLLM's parsers, in the thread that serves all clients.

For each token they look at all that there is of an answer, whose text clients can choose.
"""

from __future__ import annotations

from typing import Any

MAX_CHARACTERS = 64 << 10  # of an answer, in which calls are looked for
GROWTH = 8
HARMONY_CALLS = "openai"  # the only one that vLLM takes for gpt-oss
JSON_CALLS = "hermes"  # vLLM's parser for calls that must be made, in which it looks for JSON and no marks


def bounded_parser(automatic: Any, required: Any, message: Any, *, collects: bool) -> Any:
    """A parser of vLLM's that looks at less, see ``vllm.parser.Parser``.

    It looks again at a call that has grown by an eighth, so that all its looks at an answer together cost
    some nine times as much as the last. Text before a call is passed on at once. Text beyond
    ``MAX_CHARACTERS`` is passed on as it is.

    Args:
        automatic: vLLM's parser for answers that may have calls.
        required: the one for answers that must be calls, for which not every parser has a constraint.
        message: of a stream, as vLLM calls it: ``DeltaMessage``.
        collects: whether ``automatic`` finds the same in long parts of a stream as in its tokens.
    """

    class BoundedParser(automatic):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._forced = required(*arguments, **options)
            self._text, self._tokens = "", list[int]()  # that it has not looked at
            self._seen = self._content = 0  # characters that it has, and those of them before a call
            self._full = False

        def _parser(self, request: Any) -> Any:
            return self._forced if _must_call(request) else super()

        def adjust_request(self, request: Any) -> Any:
            return self._parser(request).adjust_request(request)

        def parse(self, model_output: str, request: Any, *arguments: Any, **options: Any) -> Any:
            text, rest = model_output[:MAX_CHARACTERS], model_output[MAX_CHARACTERS:]
            reasoning, content, calls = self._parser(request).parse(text, request, *arguments, **options)
            return reasoning, (content or "") + rest if rest else content, calls

        def parse_delta(
            self,
            delta_text: str,
            delta_token_ids: list[int],
            request: Any,
            prompt_token_ids: list[int] | None = None,
            *,
            finished: bool,
        ) -> Any:
            if self._full:
                return message(content=delta_text)
            self._full = self._seen + len(self._text) + len(delta_text) > MAX_CHARACTERS
            if not self._full:
                self._text += delta_text
                self._tokens += delta_token_ids
                waits = len(self._text) * GROWTH < self._seen - self._content
                if waits and not finished and (collects or _must_call(request)):
                    return None
            text, tokens, self._text, self._tokens = self._text, self._tokens, "", []
            found = self._parser(request).parse_delta(
                text, tokens, request, prompt_token_ids, finished=finished or self._full
            )
            self._seen += len(text)
            if found is not None and found.content and not found.tool_calls:
                self._content = self._seen
            if self._full:
                found = found or message()
                found.content = (found.content or "") + delta_text
            return found

    return BoundedParser


def _must_call(request: Any) -> bool:
    return request.tool_choice not in (None, "none", "auto")
