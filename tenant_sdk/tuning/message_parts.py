"""The parts of a conversation, and whether a chat template writes them.

A placeholder of its own is put in the place of each part, and the conversation is rendered once more: that is
the rendering with placeholders. If it has no placeholder of a part, the template does not write the part.
Where it has the placeholder, the conversation itself must hold the part.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shared.errors import peer_text

REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of a message that templates may write
_LONGEST_KEY = 40  # of an argument's name in an error
_MAX_NAMES = 3  # in an error
# They stay the same when they are trimmed, escaped or written as JSON. What is no text becomes a number.
_TEXT, _NUMBER = "part5r81c{}e", 581_274_903_000_000
_PLACEHOLDERS = re.compile(r"part5r81c\d+e|581274903\d{6}")
_THOUGHT = re.compile(r"(</?think>)")  # templates take thoughts out of what is said
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class MessagePart:
    """Something that a message says, or a tool's name.

    ``at``: which message, from 0; -1: a tool. ``thought``: templates may leave it out of earlier answers.
    """

    at: int
    name: str
    value: Any
    thought: bool = False

    @cached_property
    def forms(self) -> list[str]:
        """How a template may write it: as it is, or escaped; trimmed. The longest is first."""
        if isinstance(self.value, str):
            escaped = (json.dumps(self.value, ensure_ascii=ascii)[1:-1] for ascii in (False, True))
            forms = {self.value, *escaped, repr(self.value)[1:-1], html.escape(self.value)}
        else:
            forms = {str(self.value), json.dumps(self.value)}
        return sorted({form.strip() for form in forms}, key=len, reverse=True)


class TemplateProbe:
    """A conversation with placeholders for its parts: ``messages``, ``tools``.

    A part is the content of a message, and of an assistant's also the reasoning, and each call's name and
    arguments. Of a tool it is the name.
    """

    def __init__(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> None:
        self._parts: dict[str, MessagePart] = {}  # by its placeholder
        self._roles = [message["role"] for message in messages]
        self.tools = [self._tool(tool) for tool in tools] if tools else None
        self.messages = [self._message(at, message) for at, message in enumerate(messages)]

    def next_turn(self, at: int) -> dict[str, Any]:
        """The message behind the message ``at``, or a user's, so that a template begins a turn."""
        if at + 1 < len(self.messages):
            return self.messages[at + 1]
        return {"role": "user", "content": _TEXT.format(len(self._parts))}

    def missing_parts(self, rendering: str, needed: Callable[[MessagePart], bool]) -> str:
        """Names of the parts of the first message of which the template leaves some out; or empty."""
        marks = {found[0] for found in _PLACEHOLDERS.finditer(rendering)}
        lost = [part for mark, part in self._parts.items() if needed(part) and mark not in marks]
        return self._named([part for part in lost if part.at == lost[0].at])

    def end(self, rendering: str, text: str) -> tuple[int, str]:
        """Where the last part ends in a text, and the name of a part that is not there as it was given.

        The text must be the rendering with the parts in the placeholders' places. White space may differ at
        their beginnings and ends alone, which templates trim.
        """
        at = end = done = 0
        part = None
        for placeholder in _PLACEHOLDERS.finditer(rendering):
            if placeholder[0] in self._parts:
                part, ahead = self._parts[placeholder[0]], rendering[done : placeholder.start()].strip()
                done = placeholder.end()
                end = _after(text, _after(text, at, [ahead]), part.forms)
                if end < 0 and ahead[-1:] == "'" == rendering[done : done + 1]:  # Python quotes otherwise
                    done += 1
                    end = _after(text, _after(text, at, [ahead[:-1]]), [repr(part.value)])
                if end < 0:
                    return end, self._named([part])
                at = end
        behind = rendering[done:]
        if _after(text, _after(text, at, [behind.strip()]), [""]) != len(text) and part is not None:
            return end, self._named([part])
        # White space behind the part is the part's own, but for what the rendering has too.
        return max(end, len(text) - len(behind)) if text.endswith(behind) else end, ""

    def text_after(self, rendering: str, at: int) -> str:
        """What stands between the last part of the message ``at`` and the next placeholder."""
        marks = [*_PLACEHOLDERS.finditer(rendering)]
        of_message = [
            n for n, each in enumerate(marks) if each[0] in self._parts and self._parts[each[0]].at == at
        ]
        after = marks[of_message[-1] + 1 :] if of_message else []
        return rendering[marks[of_message[-1]].end() : after[0].start()] if after else ""

    def redacted(self, text: str) -> str:
        """A text with dots in the places of its placeholders."""
        return _PLACEHOLDERS.sub("...", text)

    def _named(self, parts: Sequence[MessagePart]) -> str:
        names = list(dict.fromkeys(part.name for part in parts))
        more = len(names) - _MAX_NAMES
        named = " and ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
        if not parts or parts[0].at < 0:
            return named
        return f"{named} of message {parts[0].at + 1} (role `{self._roles[parts[0].at]}`)"

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        inner = tool.get("function")
        named = inner if isinstance(inner, dict) else tool
        if not isinstance(name := named.get("name"), str):
            return tool
        placeholder = self._placeholder(-1, f"the tool `{peer_text(name, _LONGEST_KEY)}`", name)
        replaced = {**named, "name": placeholder}
        return {**tool, "function": replaced} if named is inner else replaced

    def _message(self, at: int, message: dict[str, Any]) -> dict[str, Any]:
        replaced, content = dict(message), message["content"]
        if message["role"] != "assistant":
            return {**replaced, "content": self._placeholder(at, "`content`", content)}
        thoughts: dict[str, str] = {}  # reasoning under several keys is one part if it is the same
        for key in REASONING:
            if text := message.get(key):
                thoughts[text] = thoughts.get(text) or self._placeholder(at, f"`{key}`", text, thought=True)
                replaced[key] = thoughts[text]
        if calls := message.get("tool_calls"):
            replaced["tool_calls"] = [self._call(at, call) for call in calls]
        if content or not (thoughts or calls):
            replaced["content"] = self._content(at, content)
        return replaced

    def _content(self, at: int, content: str) -> str:
        pieces = _THOUGHT.split(content)
        said = [n for n in range(0, len(pieces), 2) if pieces[n].strip()]
        if not said:
            return str(self._placeholder(at, "`content`", content))
        last_end = max((n for n, piece in enumerate(pieces) if piece == "</think>"), default=-1)
        for n in said:
            placeholder = self._placeholder(at, "`content`", pieces[n], thought=n < last_end)
            # A prompt may hold the white space behind what opens a thought.
            pieces[n] = pieces[n].replace(pieces[n].strip(), placeholder) if len(pieces) > 1 else placeholder
        return "".join(pieces)

    def _call(self, at: int, call: dict[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        name = f"of the tool `{peer_text(str(function.get('name')), _LONGEST_KEY)}`"
        function["name"] = self._placeholder(at, f"the call {name}", function.get("name"))
        if arguments := function.get("arguments"):
            function["arguments"] = self._within(at, arguments, f"an argument of a call {name}")
        return {**call, "function": function}

    def _within(self, at: int, value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: self._within(at, each, name) for key, each in value.items()}
        if isinstance(value, list):
            return [self._within(at, each, name) for each in value]
        return self._placeholder(at, name, value)

    def _placeholder(self, at: int, name: str, value: Any, *, thought: bool = False) -> Any:
        number = len(self._parts)
        placeholder: Any = _TEXT.format(number) if isinstance(value, str) else _NUMBER + number
        self._parts[str(placeholder)] = MessagePart(at, name, value, thought)
        return placeholder


def _after(text: str, at: int, literals: Iterable[str]) -> int:
    """Where the first of the literals that stands at a place, behind white space, ends; -1: none does."""
    if at < 0 or (space := _SPACE.match(text, at)) is None:
        return -1
    begin = space.end()
    return next((begin + len(each) for each in literals if text.startswith(each, begin)), -1)
