"""The parts of an answer, and whether a chat template writes them.

A word of its own is put in the place of each part, and the conversation is rendered once more. If the
template does not write a word, it does not write the part. The words also show where an answer ends.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shared.errors import peer_text

REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message that templates may write
_LONGEST_KEY = 40  # of an argument's name in an error
# Words stay the same when they are trimmed, escaped or written as JSON. What is no text becomes a number.
_TEXT, _NUMBER = "part5r81c{}e", 581_274_903_000_000
_WORDS = re.compile(r"part5r81c\d+e|581274903\d{6}")


@dataclass
class Parts:
    """What an assistant's message says: its content, its reasoning, and its calls' names and arguments.

    ``said``: by the word in its place, a part's name for errors and its value. ``sample``: the message with
    the words.
    """

    message: dict[str, Any]
    said: dict[str, tuple[str, Any]] = field(default_factory=dict)
    sample: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sample.update(self.message)
        words: dict[str, str] = {}  # reasoning under several keys is one part if it is the same
        for key in REASONING:
            if text := self.message.get(key):
                words[text] = words.get(text) or self._word(text, f"`{key}`")
                self.sample[key] = words[text]
        if calls := self.message.get("tool_calls"):
            self.sample["tool_calls"] = [self._call(call) for call in calls]
        if self.message["content"] or not self.said:
            self.sample["content"] = self._word(self.message["content"], "`content`")

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        name = peer_text(str(function.get("name")), _LONGEST_KEY)
        function["name"] = self._word(function.get("name"), f"the call of the tool `{name}`")
        if arguments := function.get("arguments"):
            function["arguments"] = self._within(arguments, f"an argument of a call of the tool `{name}`")
        return {**call, "function": function}

    def _within(self, value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: self._within(each, name) for key, each in value.items()}
        if isinstance(value, list):
            return [self._within(each, name) for each in value]
        return self._word(value, name)

    def _word(self, value: Any, name: str) -> Any:
        at = len(self.said)
        word: Any = _TEXT.format(at) if isinstance(value, str) else _NUMBER + at
        self.said[str(word)] = (name, value)
        return word


@dataclass(frozen=True)
class Sample:
    """A conversation as the template writes it with words in the place of an answer's parts."""

    parts: Parts
    text: str

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        return [word.span() for word in _WORDS.finditer(self.text) if word[0] in self.parts.said]

    @property
    def ahead(self) -> str:
        """What stands before the first part."""
        return self.text[: self._spans[0][0]] if self._spans else self.text

    @property
    def behind(self) -> str:
        """What stands behind the last part."""
        return self.text[self._spans[-1][1] :] if self._spans else ""

    def filled(self, before: str) -> str:
        """The answer up to the end of its last part.

        It begins behind ``before``, or behind ``ahead`` if the template writes other text before an answer.
        """
        begin = len(before) if self.text.startswith(before) else len(self.ahead)
        answer = self.text[begin : len(self.text) - len(self.behind)]
        said = self.parts.said
        return _WORDS.sub(lambda word: str(said[word[0]][1]) if word[0] in said else word[0], answer)

    def left_out(self, answered: str, written: str) -> list[str]:
        """Names of the parts that the template does not write.

        Args:
            answered: the conversation as the template writes it.
            written: of it, what the template writes for the answer.
        """
        there = {self.text[begin:end] for begin, end in self._spans}
        missing = [name for word, (name, _) in self.parts.said.items() if word not in there]
        if not missing and not self._fits(answered):
            missing = list(self._lost(written))
        return list(dict.fromkeys(missing))

    def _fits(self, answered: str) -> bool:
        """Whether the conversation is the sample with the parts in the words' places."""
        text, at, done = _squeezed(answered), 0, 0
        for begin, end in [*self._spans, (len(self.text), len(self.text))]:
            around = _squeezed(self.text[done:begin])
            forms = _forms(self.parts.said[self.text[begin:end]][1]) if begin < end else [""]
            found = next((form for form in forms if text.startswith(around + form, at)), None)
            if found is None:
                return False
            at, done = at + len(around + found), end
        return at == len(text)

    def _lost(self, written: str) -> Iterator[str]:
        """Parts that have no place of their own in an answer that the template takes apart.

        Some templates look for a thought in the content, for example. The longest part is looked for first.
        """
        text = _squeezed(written)
        texts = [(name, value) for name, value in self.parts.said.values() if isinstance(value, str)]
        for name, value in sorted(texts, key=lambda part: -len(part[1])):
            form = next((form for form in _forms(value) if form in text), None)
            if form is None:
                yield name
            elif form:
                text = text.replace(form, "\n", 1)


def _squeezed(text: str) -> str:
    """Without white space: templates may put other white space between an answer's parts."""
    return "".join(text.split())


def _forms(value: Any) -> list[str]:
    """How a template may write a value: as it is, or escaped. The longest is first."""
    if isinstance(value, str):
        escaped = (json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
        forms = {value, *escaped, repr(value)[1:-1], html.escape(value)}
    else:
        forms = {str(value), json.dumps(value)}
    return sorted(map(_squeezed, forms), key=len, reverse=True)
