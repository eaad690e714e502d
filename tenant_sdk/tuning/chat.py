"""A conversation with a model, of which each answer is written to standard output as it is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shared.errors import ConfigurationError, OptionText
from tenant_sdk.tuning.data import chat_prompt
from tenant_sdk.tuning.generation import Decoder, GenerationOutput, context_length, stream
from tenant_sdk.tuning.message_parts import REASONING
from tenant_sdk.tuning.sampling import Sampling

_PROMPT_END = 32  # tokens, at whose end a template may open a thought
ANSWER = 1000  # tokens of an answer, unless another number is given


@dataclass(frozen=True)
class Thought:
    """What stands before and behind reasoning. ``begin`` is empty if the prompt holds it.

    ``unseen``: it is empty since nothing stands there, and reasoning begins as an answer does.
    """

    begin: str
    end: str
    unseen: bool = False


# Of templates that write no reasoning.
_THOUGHTS = (
    Thought("<think>", "</think>"),
    Thought("[THINK]", "[/THINK]"),
    Thought("◁think▷", "◁/think▷"),
    *(Thought(f"<{name}>", f"</{name}>") for name in ("thinking", "thought", "seed:think", "mm:think")),
    Thought("Here is my thought process:", "Here is my response:"),
)
_CODE = re.compile(r"```.*?(?:```|$)|`[^`\n]*`", re.DOTALL)


class Chat:
    """Messages, and the keys and values of their tokens, which are sent once.

    Args:
        sampling: an answer is also cut where the model's context ends.
        opening: messages before the user's first one, such as a system message.
        resumed: gets the ids of a prompt ``[1, T]``, the number of tokens with the answer, and what it
            returned for the last prompt; returns what ``generate`` gets. See ``LongContext.resumed``.
        draft: see ``stream``.

    Attributes:
        messages: of the conversation; an answer that was interrupted counts as far as it went, and one
            without text not at all.

    Raises:
        ConfigurationError: the tokenizer has no chat template, or it does not take the opening.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        sampling: Sampling,
        *,
        opening: Sequence[dict[str, str]] = (),
        resumed: Callable[[Tensor, int, dict[str, Any]], dict[str, Any]] | None = None,
        draft: Decoder | None = None,
    ) -> None:
        self._model, self._tokenizer, self._sampling = model, tokenizer, sampling
        self._opening, self._resumed, self._draft = [*opening], resumed, draft
        self._thought = thought_of(tokenizer)
        self.clear()
        chat_prompt(tokenizer, [*opening, {"role": "user", "content": "?"}])

    def clear(self) -> None:
        """Forget the conversation, all but its opening."""
        self.messages: list[dict[str, Any]] = [*self._opening]
        self._options = dict[str, Any]()

    def ask(self, text: str, interrupted: Callable[[], bool] = lambda: False) -> GenerationOutput:
        """Have a user's message answered; it stays in the conversation if it was.

        Raises:
            ConfigurationError: the conversation does not fit into the model's context; or see ``answer_of``.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = chat_prompt(self._tokenizer, messages)
        remaining = context_length(self._model) - len(tokens)
        if remaining < 1:
            raise ConfigurationError(
                OptionText(
                    "the conversation has {} tokens, and the model's context {}: /clear begins a new one",
                    *(len(tokens), context_length(self._model)),
                )
            )
        max_tokens = min(self._sampling.max_new_tokens or ANSWER, remaining)
        sampling = replace(self._sampling, max_new_tokens=max_tokens)
        # If this fails, keys and values are of half a text, and of no more use.
        before, self._options = self._options, {}
        options = {}
        if self._resumed is not None:
            ids = torch.tensor([tokens], device=self._model.device)
            options = self._resumed(ids, len(tokens) + max_tokens, before)
        written = stream(
            self._model,
            self._tokenizer,
            tokens,
            sampling,
            options=options,
            interrupted=interrupted,
            draft=self._draft,
        )
        self._options = options
        prompt = self._tokenizer.decode(tokens[-_PROMPT_END:])
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        special = [str(token) for token in added if token.special]
        said = answer_of(prompt, written, special, self._thought)
        if said is None:
            raise ConfigurationError(
                OptionText("the answer ended within its reasoning and is not kept: raise {max_new_tokens}")
            )
        # What was cut is no answer to learn.
        message: dict[str, Any] = {"role": "assistant", "content": said} | (
            {} if written.ended else {"weight": 0}
        )
        if said.strip():  # templates and `finetune` refuse an answer that says nothing
            self.messages = [*messages, message]
        return written


def thought_of(tokenizer: Any) -> Thought | None:
    """How a chat template writes reasoning; None: it writes none, or not behind what begins an answer."""
    question, reasoning, said = ({"role": "user", "content": "?"}, "part5r81c0e", "part5r81c1e")
    plain = {"role": "assistant", "content": said}
    answer = {**plain, **dict.fromkeys(REASONING, reasoning)}
    try:
        prompt = tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([question, answer], tokenize=False)
        without = tokenizer.apply_chat_template([question, plain], tokenize=False)
    except Exception:  # templates raise whatever they like
        return None
    head, found, _ = whole.partition(reasoning)
    end = whole.partition(said)[0].rpartition(reasoning)[2].strip()
    begins = prompt.rstrip()  # a template may write other white space behind what opens a thought
    if not found or not end or not head.startswith(begins):
        return None
    begin = head.removeprefix(begins).strip()
    # A prompt that opens a thought does not stand before an answer without one.
    return Thought(begin, end, unseen=not begin and without.partition(said)[0].rstrip() == begins)


def answer_of(
    prompt: str, written: GenerationOutput, special: Sequence[str], known: Thought | None
) -> str | None:
    """An answer without the reasoning before it, which templates leave out of earlier turns.

    Args:
        prompt: its end, which may open a thought.
        special: tokens that are no text.
        known: how the chat template writes reasoning.

    Returns:
        None: it is reasoning alone.

    Raises:
        ConfigurationError: it may hold reasoning, and it is not known where that ends.
    """
    raw = written.raw.lstrip()
    if "<|channel|>" in raw:  # harmony's
        _, found, final = raw.rpartition("<|channel|>final<|message|>")
        return re.split(r"<\|(?:end|return|call|start)\|>", final)[0].strip() if found else None
    for thought in (known, *_THOUGHTS):
        if thought is None:
            continue
        opened = prompt.rstrip().endswith(thought.begin)  # also if nothing is left to begin it
        if opened or raw.startswith(thought.begin):
            # A thought has one end; the answer may speak of others.
            _, found, said = raw.partition(thought.end)
            if thought.unseen and not found:
                raise ConfigurationError(
                    "the answer may be reasoning, since the chat template does not show where reasoning "
                    "begins: the answer is not kept"
                )
            _check_within(said, known)
            for token in special:
                said = said.replace(token, "")
            return said.strip() if found else None
    # Special tokens within a text, or in front of one that goes on, may be those of a thought.
    text = written.text.strip()
    if not (text in raw if written.ended else raw.startswith(text)):
        raise ConfigurationError(
            "the answer contains special tokens, which may be those of reasoning, and the chat template does "
            "not show where reasoning ends: the answer is not kept"
        )
    _check_within(raw, known)
    return written.text


def _check_within(answer: str, known: Thought | None) -> None:
    """Refuse an answer with reasoning behind its first words; in code, it is spoken of.

    Raises:
        ConfigurationError: there is some.
    """
    plain = _CODE.sub("", answer)
    for thought in (known, *_THOUGHTS):
        if thought is not None and thought.begin and thought.end in plain.partition(thought.begin)[2]:
            raise ConfigurationError(
                "the answer contains reasoning, which later turns would repeat: the answer is not kept"
            )
