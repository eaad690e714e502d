"""Conversations as token ids and labels: for each answer, the tokens before it at inference and those after.

There is one rule. The prompt is what the chat template writes of the messages before an answer, with what
begins an answer: inference sends this. What the template writes of the messages up to the answer must begin
with the prompt. The rest is learned, up to the first end behind the answer's last part. A record is refused
if it does not begin so, or if the template leaves out or changes a part of the conversation.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from shared.errors import ConfigurationError, Metavar
from tenant_sdk.tuning.message_parts import MessagePart, TemplateProbe

IGNORE_INDEX = -100  # a label that takes no part in the loss
Example = dict[str, list[int]]  # input_ids and, as long, labels: the same ids, or IGNORE_INDEX
Messages = Sequence[dict[str, Any]]
Tools = list[dict[str, Any]] | None

# Marks of what assistants say, as transformers looks for them.
_GENERATION, _GENERATION_END = (
    re.compile(rf"\{{%(-?)\s*{name}\s*(-?)%\}}") for name in ("generation", "endgeneration")
)
_BEGIN, _END = "\ue0b1", "\ue0b2"  # characters that stand for them in a text
_MARKERS = re.compile(f"([{_BEGIN}{_END}])")
_NOW = re.compile(r"""\bstrftime_now\(\s*(["'])([^"'\n]{,64})\1\s*\)""")
_OPENED = re.compile(r"<(\w+)>\s+$")  # the end of a prompt that opens a thought
_MAX_ANSWERS = 256  # of a record: for each, all that is before it is rendered
_SHOWN = 30  # characters of what a template writes, in an error


def fully_learned(tokens: Sequence[int]) -> Example:
    """An example all of which is learned."""
    return {"input_ids": list(tokens), "labels": list(tokens)}


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text as it is, without tokens that the tokenizer adds by itself."""
    # verbose=False: a text longer than the model's context is no mistake here.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_continuation(
    tokenizer: Any, text: str, ids: list[int], more: str, *, special: bool = False
) -> list[int]:
    """Token ids of ``more`` where it follows ``text``, whose ``ids`` are given and stay as they are.

    Args:
        special: ``ids`` have what the tokenizer adds before and after a text.
    """
    together = list(tokenizer(text + more, add_special_tokens=special, verbose=False)["input_ids"])
    if together[: len(ids)] == ids:
        return together[len(ids) :]
    # A token would be part of both. After a line's end SentencePiece adds no space before a text.
    newline, alone = encode(tokenizer, "\n"), encode(tokenizer, "\n" + more)
    return alone[len(newline) :] if alone[: len(newline)] == newline else encode(tokenizer, more)


def chat_template(
    tokenizer: Any, where: str, instead: str = "use a prompt (and completion) instead", tools: Tools = None
) -> str:
    """The tokenizer's chat template, which may be another one where there are tools.

    Raises:
        ConfigurationError: it has none.
    """
    try:
        return str(tokenizer.get_chat_template(tools=tools))
    except (ValueError, AttributeError):  # none, or several and none of them the default
        raise _template_error(
            "{}: a chat needs a chat template and this tokenizer has none; give a tokenizer that has one "
            "with {tokenizer}, or {}",
            *(where, instead),
        ) from None


def _template_error(template: str, *values: object) -> ConfigurationError:
    """An error that names the tokenizer's option; see ``Message``."""
    return ConfigurationError(template, *values, tokenizer=Metavar("FOLDER"))


def generation_prompt(
    tokenizer: Any, messages: Messages, tools: Tools, where: str, day: TemplateDate | None = None
) -> str:
    """Messages as the chat template writes them, with what begins the next answer: what inference sends.

    Raises:
        ConfigurationError: there is no chat template, or it does not take the messages.
    """
    return _render(tokenizer, messages, tools, where, day, add_generation_prompt=True)


class TemplateDate:
    """A day that chat templates write as today's.

    Attributes:
        written: one does.
    """

    def __init__(self, day: date) -> None:
        self.day, self.written = day, False

    def fixed(self, template: str) -> str:
        """A template with the day, as it asks for it, in place of calls that ask for the date."""
        # As text: transformers gives templates no functions but its own.
        fixed, calls = _NOW.subn(lambda call: f"{call[1]}{self.day.strftime(call[2])}{call[1]}", template)
        self.written |= calls > 0
        return fixed


@dataclass(frozen=True)
class Conversations:
    """Makes examples of conversations.

    Args:
        tokenizer: has a chat template.
        ends: ids of the tokens at which `generate` stops. The first is learned if a template ends an answer
            without any of them.
        length: tokens of an example at most.
        day: that templates write as today's; default: it is.
    """

    tokenizer: Any
    ends: Sequence[int]
    length: int = sys.maxsize
    day: TemplateDate | None = None

    def examples(self, messages: Messages, tools: Tools, where: str) -> list[Example]:
        """What assistants say is learned, but for turns with ``weight`` 0.

        Answers share an example as long as each prompt begins with what is there already. A template that
        writes earlier turns otherwise than the last, without their reasoning for example, makes several.
        The first prompt that is too long ends the work: the last example is then the whole conversation.

        Raises:
            ConfigurationError: the template does not take the messages, leaves out or changes a part, or
                begins an answer otherwise than it asks for it; or no answer is to be learned.
        """
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or answers[0] == 0:
            raise ConfigurationError(
                f"{where}: in `messages`, no turn of the role assistant answers another turn; add an answer"
            )
        chat = _RenderedConversation(self, messages, tools, where)
        learned: list[Example] = []
        for count, at in enumerate(at for at in answers if messages[at].get("weight") != 0):
            before = chat.generation_prompt(at)
            prompt = encode(self.tokenizer, before)
            if fits := len(prompt) <= self.length:
                if count == _MAX_ANSWERS:
                    raise ConfigurationError(
                        f"{where}: the record has more than {_MAX_ANSWERS} answers within "
                        f"{self.length:,} tokens: make several records of it"
                    )
                answer, labels = chat.answer(at, before, prompt)
            else:
                everything = encode(self.tokenizer, chat.rendered(chat.messages))
                prompt, answer, labels = max(prompt, everything, key=len), [], []
            earlier = learned[-1] if learned else {"input_ids": [], "labels": []}
            if prompt[: len(earlier["input_ids"])] == earlier["input_ids"]:
                labels = earlier["labels"] + [IGNORE_INDEX] * (len(prompt) - len(earlier["labels"])) + labels
                learned[-1:] = [{"input_ids": prompt + answer, "labels": labels}]
            else:
                learned.append(
                    {"input_ids": prompt + answer, "labels": [IGNORE_INDEX] * len(prompt) + labels}
                )
            if not fits:
                break
        return learned

    def whole_conversation(self, messages: Messages, tools: Tools, where: str) -> Example:
        """The whole conversation is learned, also what is asked.

        Raises:
            ConfigurationError: the template does not take the messages, or leaves out or changes a part; or
                a turn has ``weight`` 0.
        """
        if any(message.get("weight") == 0 for message in messages):
            raise ConfigurationError(
                f"{where}: `weight`: 0 of a message says that it is not learned, and training on the prompt "
                "learns everything; remove it, or train on answers alone"
            )
        chat = _RenderedConversation(self, messages, tools, where)
        text = chat.rendered(chat.messages)
        chat.check(chat.placeholder_rendering(len(messages)), text, lambda part: True)
        last = len(messages) - 1
        if last == 0 or messages[last]["role"] != "assistant":
            return fully_learned(encode(self.tokenizer, text))
        before = chat.generation_prompt(last)
        prompt = encode(self.tokenizer, before)
        return fully_learned(prompt + chat.answer(last, before, prompt)[0])


class _RenderedConversation:
    """A record's conversation, as the chat template writes it."""

    def __init__(self, of: Conversations, messages: Messages, tools: Tools, where: str) -> None:
        self.tokenizer, self.day, self.where = of.tokenizer, of.day, where
        self.tools = tools or None  # a template may write that there are tools, though the list is empty
        self.messages = self._with_supported_arguments(messages)
        self.probe = TemplateProbe(self.messages, self.tools)
        self.ends = [end for end in map(of.tokenizer.decode, of.ends) if end]

    def generation_prompt(self, at: int) -> str:
        """What inference sends before the answer ``at``."""
        return self.rendered(self.messages[:at], add_generation_prompt=True)

    def rendered(self, messages: Messages, **options: Any) -> str:
        return _render(self.tokenizer, messages, self.tools, self.where, self.day, **options)

    def placeholder_rendering(self, until: int, **options: Any) -> str:
        """As the template writes the messages ``until`` one, with placeholders for their parts."""
        messages, tools = self.probe.messages[:until], self.probe.tools
        return _render(self.tokenizer, messages, tools, self.where, self.day, **options)

    def check(self, rendering: str, text: str, needed: Callable[[MessagePart], bool]) -> int:
        """Where the last part ends in a text: the rendering with the parts in the placeholders' places.

        Raises:
            ConfigurationError: a part is not in it as it was given; the message names it.
        """
        end, changed = 0, ""
        lost = self.probe.missing_parts(rendering, needed)
        if not lost:
            end, changed = self.probe.end(rendering, text)
        if lost or changed:
            raise _template_error(
                "{}: the chat template does not write the whole conversation: it {} {}. Use a tokenizer "
                "whose template writes it ({tokenizer}), or remove it from the record, or write the record "
                "with `prompt` and `completion`. Some templates leave parts out of earlier answers only: "
                "then train on answers alone",
                *(self.where, "leaves out" if lost else "changes", lost or changed),
            )
        return end

    def answer(self, at: int, before: str, prompt: list[int]) -> tuple[list[int], list[int]]:
        """The ids of the answer ``at`` and their labels.

        Args:
            before: what inference sends before it.
            prompt: its ids.
        """
        probe = self.probe
        rendering = self.placeholder_rendering(at, add_generation_prompt=True)
        self.check(rendering, before, lambda part: part.at < at and not part.thought)
        answered = self.rendered(self.messages[: at + 1])
        with_placeholders = self.rendered([*self.messages[:at], probe.messages[at]])
        begin, ahead = _answer_start(before, answered), _answer_start(before, with_placeholders)
        if begin is None or ahead is None:
            raise self._other_beginning_error(at, rendering)
        end = begin + self.check(with_placeholders[ahead:], answered[begin:], lambda part: part.at == at)
        ids: list[int] = []
        labels: list[int] = []
        for piece, learned in self._learned_pieces(at, answered, begin, end):
            more = encode_continuation(self.tokenizer, before, prompt + ids, piece)
            before, ids = before + piece, ids + more
            labels += more if learned else [IGNORE_INDEX] * len(more)
        if all(label == IGNORE_INDEX for label in labels):
            raise _template_error(
                "{}: the chat template marks parts with {{% generation %}}, but no part of an answer. Use a "
                "tokenizer whose template marks it ({tokenizer}), or write `weight`: 0 if it is not to be "
                "learned",
                self.where,
            )
        return ids, labels

    def _other_beginning_error(self, at: int, rendering: str) -> ConfigurationError:
        """``rendering``: the prompt with placeholders, so that the message shows no text of the data."""
        probe = self.probe
        prompt, text = probe.redacted(rendering), probe.redacted(self.placeholder_rendering(at + 1))
        pairs = enumerate(zip(prompt, text, strict=False))
        same = next((n for n, (one, other) in pairs if one != other), min(len(prompt), len(text)))
        same = max(prompt.rfind(">", 0, same) + 1, same - _SHOWN)  # not in the middle of a marker
        return _template_error(
            "{}: the chat template begins the answer of message {} otherwise than it asks for it: the prompt "
            "ends with {!r}, and the conversation has {!r} where the prompt has {!r}. Give the answer a "
            "`reasoning_content` if the prompt opens a thought, or none if the prompt closes it; or use a "
            "tokenizer with another template ({tokenizer}); or write the record with `prompt` and "
            "`completion`",
            *(self.where, at + 1, prompt[-_SHOWN:]),
            *(text[same : same + _SHOWN], prompt[same : same + _SHOWN]),
        )

    def _learned_pieces(self, at: int, answered: str, begin: int, end: int) -> list[tuple[str, bool]]:
        """An answer up to the first end behind its last part, in pieces, each with whether it is learned.

        Args:
            answered: the conversation up to the answer, which has its ``begin`` and its last part's ``end``.
        """
        stop = _end_of_answer(answered[end:], self.ends)
        template = chat_template(self.tokenizer, self.where, tools=self.tools)
        if _GENERATION.search(template):
            until = end + stop if stop else len(answered)
            return self._marked_pieces(at, _with_markers(template), answered[begin:until], begin)
        if stop:
            return [(answered[begin : end + stop], True)]
        turns = [*self.messages[:at], self.probe.messages[at], self.probe.next_turn(at)]
        try:
            behind = self.probe.text_after(self.rendered(turns), at)
        except ConfigurationError:  # some want another order of roles
            behind = ""
        if stop := _end_of_answer(behind, self.ends):
            return [(answered[begin:end] + behind[:stop], True)]
        return [(answered[begin:end] + answered[end:].rstrip() + "".join(self.ends[:1]), True)]

    def _marked_pieces(self, at: int, template: str, answer: str, begin: int) -> list[tuple[str, bool]]:
        """Pieces of an answer that begins at ``begin``; the template marks those that are learned."""
        text = self.rendered(self.messages[: at + 1], chat_template=template)
        marked, place, learned = [], 0, False
        for piece in _MARKERS.split(text):
            if piece in (_BEGIN, _END):
                learned = piece == _BEGIN
                continue
            overlap = piece[max(begin - place, 0) : max(begin + len(answer) - place, 0)]
            marked += [(overlap, learned)] if overlap else []
            place += len(piece)
        if "".join(overlap for overlap, _ in marked) != answer:
            raise _template_error(
                "{}: the parts that the chat template marks with {{% generation %}} cannot be found: with "
                "signs in place of the marks, the template writes another text. Use a tokenizer whose "
                "template marks less, or nothing ({tokenizer})",
                self.where,
            )
        return marked

    def _with_supported_arguments(self, messages: Messages) -> Messages:
        """Messages with the arguments of calls as objects, or as texts of JSON if the template wants that."""
        at = next((at for at, message in enumerate(messages) if message.get("tool_calls")), None)
        if at is not None:
            for form in (messages, [_with_json_arguments(message) for message in messages]):
                probe = TemplateProbe(form, None)
                try:
                    rendering = self.rendered([*form[:at], probe.messages[at]])
                except ConfigurationError:
                    continue
                if not probe.missing_parts(rendering, lambda part: part.at == at):
                    return form
        return messages


def _with_json_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not (calls := message.get("tool_calls")):
        return message
    functions = [call["function"] for call in calls]
    texts = [json.dumps(function["arguments"], ensure_ascii=False) for function in functions]
    rewritten = zip(calls, functions, texts, strict=True)
    return {
        **message,
        "tool_calls": [{**call, "function": {**each, "arguments": text}} for call, each, text in rewritten],
    }


def _answer_start(before: str, answered: str) -> int | None:
    """Where an answer begins in a conversation, behind what inference sends; None: it has something else.

    One difference is none to a model: a prompt may open a thought with white space that the template does not
    write in an empty one (``<think>`` and a line's end; ``<think></think>``). Inference sends the white
    space, and what closes the thought is the first that the model must write.
    """
    if answered.startswith(before):
        return len(before)
    if opened := _OPENED.search(before):
        begin = opened.end(1) + 1
        if answered.startswith(f"{before[:begin]}</{opened[1]}>"):
            return begin
    return None


def _end_of_answer(text: str, ends: Sequence[str]) -> int:
    """Where the first end of an answer ends in a text; 0: there is none."""
    first = min(((text.find(each), -len(each)) for each in ends if each in text), default=(0, 0))
    return first[0] - first[1]


def _with_markers(template: str) -> str:
    """A template that writes signs where it marks what assistants say.

    An empty condition trims the white space that the mark trimmed.
    """
    begin = rf'{{%\1 generation %}}{{{{ "{_BEGIN}" }}}}{{% if 0 %}}{{% endif \2%}}'
    end = rf'{{%\1 if 0 %}}{{% endif %}}{{{{ "{_END}" }}}}{{% endgeneration \2%}}'
    return _GENERATION_END.sub(end, _GENERATION.sub(begin, template))


def _render(
    tokenizer: Any,
    messages: Messages,
    tools: Tools,
    where: str,
    day: TemplateDate | None = None,
    **options: Any,
) -> str:
    """Messages as the chat template writes them; ``options`` are those of transformers."""
    template = options.get("chat_template") or chat_template(tokenizer, where, tools=tools)
    described: Any = tools
    try:
        if day is not None:
            options["chat_template"] = day.fixed(template)
        return str(tokenizer.apply_chat_template(list(messages), tools=described, tokenize=False, **options))
    except Exception as error:  # whatever a template does; its own words, not those that it was given
        words = str(error) if str(error) and str(error) in template else type(error).__name__
        raise ConfigurationError(f"{where}: the chat template does not take the messages: {words}") from None
