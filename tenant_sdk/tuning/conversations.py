"""Conversations as token ids and labels: for each answer, what inference sends before it and what follows.

Labels are made of token ids. The conversation up to an answer is rendered with the generation prompt and
tokenized, as `generate` and the gateway do. What the template writes for the answer goes on from these ids.
So an adapter learns just the tokens that the model must write when it is asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.errors import ConfigurationError, Message, Word
from tenant_sdk.tuning.parts import Parts, Sample

IGNORED = -100  # a label that takes no part in the loss
Example = dict[str, list[int]]  # input_ids and, as long, labels: the same ids, or IGNORED
Messages = Sequence[dict[str, Any]]
Tools = list[dict[str, Any]] | None

# How transformers itself looks for marks of what assistants say.
_MARKED = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
_PROBE = "Go on."  # a user's next turn, to see how a template begins it
_MOST_PARTS = 3  # named in an error


def whole(tokens: Sequence[int]) -> Example:
    """An example all of which is learned."""
    return {"input_ids": list(tokens), "labels": list(tokens)}


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text as it is, without tokens that the tokenizer adds by itself."""
    # verbose=False: a text longer than the model's context is no mistake here.
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def continued(tokenizer: Any, text: str, ids: list[int], more: str, *, special: bool = False) -> list[int]:
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


def chat_template(tokenizer: Any, where: str, instead: str = "use a prompt (and completion) instead") -> str:
    """The tokenizer's chat template.

    Raises:
        ConfigurationError: it has none.
    """
    try:
        return str(tokenizer.get_chat_template())
    except (ValueError, AttributeError):  # none, or several and none of them the default
        raise ConfigurationError(
            Message(
                "{}: a chat needs a chat template and this tokenizer has none; give a tokenizer that has one "
                "with {tokenizer}, or {}",
                *(where, instead),
                tokenizer=Word("FOLDER"),
            )
        ) from None


def asked(tokenizer: Any, messages: Messages, tools: Tools, where: str) -> str:
    """Messages as the chat template writes them, with what begins the next answer: what inference sends.

    Raises:
        ConfigurationError: there is no chat template, or it does not take the messages.
    """
    return _render(tokenizer, messages, tools, where, answer=True)[0]


@dataclass(frozen=True)
class Conversations:
    """Makes examples of conversations.

    Args:
        tokenizer: has a chat template.
        ends: ids of the tokens at which `generate` stops. The first is learned if a template ends an answer
            without any of them.
    """

    tokenizer: Any
    ends: Sequence[int]

    def examples(self, messages: Messages, tools: Tools, where: str) -> list[Example]:
        """What assistants say is learned, but for turns with ``weight`` 0.

        Answers share an example as long as each prompt begins with what is there already. A template that
        writes earlier turns otherwise than the last, without their reasoning for example, makes several.

        Raises:
            ConfigurationError: the template does not take the messages, or does not write an answer; or no
                answer is to be learned.
        """
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or answers[0] == 0:
            raise ConfigurationError(
                f"{where}: `messages` has no turn of the role assistant that answers one"
            )
        found: list[Example] = []
        for at in answers:
            if messages[at].get("weight") == 0:
                continue
            prompt, answer, labels = _Turn(self, messages[: at + 1], tools, where).tokens()
            if all(label == IGNORED for label in labels):
                raise ConfigurationError(
                    Message(
                        "{}: the chat template marks parts with {{% generation %}}, and nothing of an "
                        "answer. Use a tokenizer whose template marks it ({tokenizer}), or write `weight`: "
                        "0 if it is not to be learned",
                        where,
                        tokenizer=Word("FOLDER"),
                    )
                )
            before = found[-1] if found else {"input_ids": [], "labels": []}
            shared = len(before["input_ids"])
            if prompt[:shared] == before["input_ids"]:
                labels = before["labels"] + [IGNORED] * (len(prompt) - shared) + labels
                found[-1:] = [{"input_ids": prompt + answer, "labels": labels}]
            else:
                found.append({"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + labels})
        return found

    def everything(self, messages: Messages, tools: Tools, where: str) -> Example:
        """The whole conversation is learned, also what is asked.

        Raises:
            ConfigurationError: the template does not take the messages, or does not write an answer; or a
                turn has ``weight`` 0.
        """
        if any(message.get("weight") == 0 for message in messages):
            raise ConfigurationError(
                f"{where}: `weight`: 0 of a message says that it is not learned, and training on the prompt "
                "learns everything; remove it, or train on answers alone"
            )
        text, _ = _render(self.tokenizer, messages, tools, where)
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                _check(self.sample(messages, at, tools, where), text, text, where)
        if messages[-1]["role"] == "assistant" and len(messages) > 1:
            prompt, answer, _ = _Turn(self, messages, tools, where).tokens()
            return whole(prompt + answer)
        return whole(encode(self.tokenizer, text))

    def sample(self, messages: Messages, at: int, tools: Tools, where: str) -> Sample:
        """Messages as the template writes them with words in the place of the parts of the answer ``at``."""
        parts = Parts(messages[at])
        with_words = [*messages[:at], parts.sample, *messages[at + 1 :]]
        return Sample(parts, _render(self.tokenizer, with_words, tools, where)[0])


@dataclass(frozen=True)
class _Turn:
    """An answer, which is the last of ``messages``."""

    of: Conversations
    messages: Messages
    tools: Tools
    where: str

    def tokens(self) -> tuple[list[int], list[int], list[int]]:
        """The ids that inference sends before the answer, the answer's ids, and their labels."""
        before = asked(self.of.tokenizer, self.messages[:-1], self.tools, self.where)
        prompt = encode(self.of.tokenizer, before)
        answered, marks = self._rendered(self.messages)
        sample = self.of.sample(self.messages, len(self.messages) - 1, self.tools, self.where)
        written = _written(sample, before, answered)
        _check(sample, answered, written, self.where)
        if marks is None:
            answer = self._answer(before, prompt, written, sample)
            return prompt, answer, answer
        answer, labels = [], []
        begin = len(before)
        if not answered.startswith(before):
            # The prompt opens the answer otherwise: it begins with the first mark that is its own.
            _, earlier = self._rendered(self.messages[:-1])
            begin = min((first for first, _ in sorted(marks)[len(earlier or ()) :]), default=len(answered))
        for piece, learned in _marked(begin, answered, marks):
            ids = continued(self.of.tokenizer, before, prompt + answer, piece)
            before, answer = before + piece, answer + ids
            labels += ids if learned else [IGNORED] * len(ids)
        return prompt, answer, labels

    def _rendered(self, messages: Messages) -> tuple[str, list[tuple[int, int]] | None]:
        return _render(self.of.tokenizer, messages, self.tools, self.where)

    def _answer(self, before: str, prompt: list[int], written: str, sample: Sample) -> list[int]:
        """The ids of an answer and of its end."""
        tokenizer, ends = self.of.tokenizer, self.of.ends
        own = sum(token in ends for token in encode(tokenizer, sample.filled(before)))

        def to_its_end(text: str) -> list[int]:
            """Up to the first end behind the answer's last part; empty: there is none."""
            ids = continued(tokenizer, before, prompt, text)
            stops = [at for at, token in enumerate(ids) if token in ends]
            return ids[: stops[own] + 1] if own < len(stops) else []

        ended = to_its_end(written) or (ends and to_its_end(self._with_next_turn(before, written)))
        if ended:
            return list(ended)
        # Without the white space that the template writes behind the answer.
        kept = len(written) - len(sample.behind) if written.endswith(sample.behind) else len(written)
        text = written[:kept] + written[kept:].rstrip()
        return continued(tokenizer, before, prompt, text) + list(ends[:1])

    def _with_next_turn(self, before: str, written: str) -> str:
        """The answer and what begins a user's next turn, which is the end of an answer in some families."""
        try:
            longer, _ = self._rendered([*self.messages, {"role": "user", "content": _PROBE}])
        except ConfigurationError:  # some want another order of roles
            return written
        end = longer.rfind(_PROBE)
        at = len(before) if longer.startswith(before + written) else longer.rfind(written, 0, end)
        return longer[at:end] if at >= 0 else written


def _written(sample: Sample, before: str, answered: str) -> str:
    """What the template writes for an answer, after what inference sends."""
    if answered.startswith(before):
        return answered[len(before) :]
    # The prompt opens the answer otherwise than the conversation keeps it, with a thought perhaps.
    return answered[len(sample.ahead) :] if answered.startswith(sample.ahead) else ""


def _check(sample: Sample, answered: str, written: str, where: str) -> None:
    """Refuse a template that leaves out a part of an answer.

    Raises:
        ConfigurationError: it does; the message names the part.
    """
    if missing := sample.left_out(answered, written):
        more = len(missing) - _MOST_PARTS
        named = " and ".join(missing[:_MOST_PARTS]) + (f" and {more} more" if more > 0 else "")
        raise ConfigurationError(
            Message(
                "{}: the chat template does not write the whole answer: it leaves out {}, or begins an "
                "answer otherwise than it asks for one. Use a tokenizer whose template writes it "
                "({tokenizer}), or remove it from the record, or write the record with `prompt` and "
                "`completion`. Some templates leave it out of earlier answers only: then train on answers "
                "alone",
                *(where, named),
                tokenizer=Word("FOLDER"),
            )
        )


def _marked(begin: int, answered: str, marks: Sequence[tuple[int, int]]) -> list[tuple[str, bool]]:
    """The pieces of an answer from ``begin``, each with whether the template marks it as an assistant's."""
    pieces = []
    for first, last in sorted(marks):
        if last > begin:
            first = max(first, begin)
            pieces += [(answered[begin:first], False), (answered[first:last], True)]
            begin = last
    return [(text, learned) for text, learned in pieces if text]


def _render(
    tokenizer: Any, messages: Messages, tools: Tools, where: str, *, answer: bool = False
) -> tuple[str, list[tuple[int, int]] | None]:
    """Messages as the chat template writes them, and the spans that it marks as assistants', if it does.

    ``answer``: with what begins the next answer.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    template = chat_template(tokenizer, where)
    described: Any = tools
    marks = None
    try:
        if _MARKED.search(template):
            rendered: Any = render_jinja_template(
                [list(messages)],
                tools=described,
                chat_template=template,
                add_generation_prompt=answer,
                return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
            )
            (text,), (marks,) = rendered
        else:
            text = tokenizer.apply_chat_template(
                list(messages), tools=described, tokenize=False, add_generation_prompt=answer
            )
    except Exception as error:  # whatever a template does; its own words, not those that it was given
        words = str(error) if str(error) and str(error) in template else type(error).__name__
        raise ConfigurationError(f"{where}: the chat template does not take the messages: {words}") from None
    return text, marks
