"""Training data made into token ids and labels: text files and JSONL records.

A text file becomes blocks of equal length; what a record may be is in ``tenant_sdk.tuning.records``. Of
`text` all is learned, of `prompt` and `completion` the latter. `messages` go through the tokenizer's chat
template, and what assistants say is learned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shared.errors import ConfigurationError
from tenant_sdk.tuning.records import Record, holds_records, read_text, records_of

IGNORED = -100  # a label that takes no part in the loss
Blocks = list[list[int]]
Example = dict[str, list[int]]  # input_ids and, as long, labels: the same ids, or IGNORED
Collate = Callable[[Sequence[Example]], dict[str, Tensor]]
Say = Callable[[str], None]

# How transformers itself looks for it, before it asks for assistants' tokens.
_MARKED = re.compile(r"\{\%-?\s*generation\s*-?\%\}")


def pack(tokens: Sequence[int], length: int, *, keep_tail: bool) -> Blocks:
    """Consecutive blocks of ``length`` tokens.

    Args:
        keep_tail: add what is left at the end as a shorter block, if it has two tokens or more.
            A text shorter than one block is always one block.
    """
    blocks = [list(tokens[at : at + length]) for at in range(0, len(tokens), length)]
    if len(blocks) > 1 and len(blocks[-1]) < (2 if keep_tail else length):
        blocks.pop()
    return blocks


def whole(tokens: Sequence[int]) -> Example:
    """An example all of which is learned."""
    return {"input_ids": list(tokens), "labels": list(tokens)}


def trained_tokens(example: Example) -> int:
    """How many tokens of an example the model is asked to predict; nothing predicts the first."""
    return sum(label != IGNORED for label in example["labels"][1:])


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch: ``input_ids``, ``attention_mask`` and ``labels``, int64 ``[B, longest]``, padded at the end.

    What stands in padding is never attended to and never learned, so that any token will do.
    """
    ids, labels, attended = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding)
        for rows, padding in (
            ([each["input_ids"] for each in examples], 0),
            ([each["labels"] for each in examples], IGNORED),
            ([[1] * len(each["input_ids"]) for each in examples], 0),
        )
    )
    return {"input_ids": ids, "attention_mask": attended, "labels": labels}


def collate_packed(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch as one row without padding: ``input_ids``, ``labels``, ``position_ids``, int64 ``[1, tokens]``.

    Positions begin anew with each example, by which transformers tells them apart and lets none attend to
    another; it looks for that where there is neither an attention mask nor a cache.
    """
    labels = [[IGNORED, *each["labels"][1:]] for each in examples]  # nothing predicts an example's first
    return {
        "input_ids": torch.tensor([[token for each in examples for token in each["input_ids"]]]),
        "labels": torch.tensor([[label for each in labels for label in each]]),
        "position_ids": torch.tensor([[at for each in labels for at in range(len(each))]]),
    }


def read_tokens(path: Path, tokenizer: Any) -> list[int]:
    """Token ids of a whole UTF-8 text file.

    Raises:
        ConfigurationError: it cannot be read or holds next to nothing.
    """
    return _text_tokens(path, read_text(path), tokenizer)


def _text_tokens(path: Path, text: str, tokenizer: Any) -> list[int]:
    # verbose=False: a text longer than the model's context is no mistake here.
    tokens: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if len(tokens) < 2:
        raise ConfigurationError(f"{path} holds no text to learn from")
    return tokens


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a text that something will follow: not its end, which some tokenizers add."""
    ids = list(tokenizer(prompt, verbose=False)["input_ids"])
    end = getattr(tokenizer, "eos_token_id", None)
    if ids and ids[-1] == end and not prompt.endswith(tokenizer.eos_token):
        ids.pop()
    return ids


def chat_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a user's message and of what begins the answer, by the tokenizer's chat template.

    Raises:
        ConfigurationError: the tokenizer has no chat template, or it takes no such message.
    """
    _template(tokenizer, "the prompt", "leave out --chat")
    text = _render(tokenizer, [{"role": "user", "content": prompt}], "the prompt", answer=True)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


@dataclass(frozen=True)
class Reader:
    """Makes examples of files.

    Args:
        tokenizer: of the model.
        length: tokens of an example at most.
        train_on_prompt: learn all tokens of a record, not the answers alone.
        keep_tail: of text files, see ``pack``.
        say: called with a line about each file; no text of the data is in it.
    """

    tokenizer: Any
    length: int
    train_on_prompt: bool = False
    keep_tail: bool = False
    say: Say = lambda _: None

    def read(self, paths: Sequence[Path]) -> list[Example]:
        """The examples of all files in order.

        Raises:
            ConfigurationError: a file or a record is wrong; the message names file and line.
        """
        return [example for path in paths for example in self._file(path)]

    def _file(self, path: Path) -> list[Example]:
        text = read_text(path)
        if holds_records(path, text):
            return self._records(path, text)
        tokens = _text_tokens(path, text, self.tokenizer)
        blocks = pack(tokens, self.length, keep_tail=self.keep_tail)
        self.say(
            f"{path}: read as plain text, {len(tokens)} tokens in {len(blocks)} blocks of {len(blocks[0])}"
        )
        return [whole(block) for block in blocks]

    def _records(self, path: Path, text: str) -> list[Example]:
        examples: list[Example] = []
        records, split, left_out = 0, 0, []
        for where, record in records_of(path, text):
            records += 1
            for example in self._encode(record, where):
                if not trained_tokens(example):
                    raise ConfigurationError(
                        f"{where}: there is nothing to learn: no answer that follows something"
                    )
                if len(example["input_ids"]) <= self.length:
                    examples.append(example)
                elif example["labels"] == example["input_ids"]:
                    split += 1
                    examples += map(whole, pack(example["input_ids"], self.length, keep_tail=True))
                else:
                    left_out.append(len(example["input_ids"]))
        if not examples:
            raise ConfigurationError(
                f"{path} holds no record to learn from: all are longer than {self.length} tokens"
            )
        tokens, trained = sum(len(e["input_ids"]) for e in examples), sum(map(trained_tokens, examples))
        self.say(f"{path}: {records} records, {tokens} tokens, {trained} of them to learn")
        longer = f"of {records} records are longer than {self.length} tokens"
        if split:
            self.say(f"{path}: {split} {longer} and were split: all of them is learned")
        if left_out:
            self.say(
                f"{path}: {len(left_out)} {longer} (the longest has {max(left_out)}) and were left out; "
                "--sequence-length says how long they may be"
            )
        return examples

    def _encode(self, record: Record, where: str) -> list[Example]:
        """Usually one example; what is too long is the caller's matter."""
        if record.messages is not None:
            return self._chat(record.messages, record.tools, where)
        if record.text is not None:
            return [whole(self._ended(self.tokenizer(record.text, verbose=False)["input_ids"]))]
        prompt, completion = record.prompt or "", record.completion or ""
        start = prompt_tokens(self.tokenizer, prompt)
        ids = list(self.tokenizer(prompt + completion, verbose=False)["input_ids"])
        if ids[: len(start)] != start:
            # A token would be part of both; what is learned must follow the prompt as `generate` has it.
            ids = start + self.tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"]
        ids = self._ended(ids)
        if self.train_on_prompt:
            return [whole(ids)]
        return [{"input_ids": ids, "labels": [IGNORED] * len(start) + ids[len(start) :]}]

    def _ended(self, ids: Sequence[int]) -> list[int]:
        """With the tokenizer's end of text, by which `generate` knows that a record is complete."""
        end = getattr(self.tokenizer, "eos_token_id", None)
        return [*ids] if end is None or (ids and ids[-1] == end) else [*ids, end]

    def _chat(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, where: str
    ) -> list[Example]:
        """Assistants' turns are learned.

        A template that marks them (``{% generation %}``) says itself which tokens are theirs. For others an
        answer is what the template adds to the conversation before it, ended by what begins an answer: what
        the model is given and what it shall write when it is used. Where a template writes earlier turns
        otherwise than the last (without their reasoning, say), each answer is an example of its own.
        """
        tokenizer = self.tokenizer

        def render(until: int, *, answer: bool = False) -> str:
            return _render(tokenizer, messages[:until], where, tools, answer=answer)

        if self.train_on_prompt:
            return [self._spans(render(len(messages)), [(0, None)])]
        if (template := _template(tokenizer, where)) and _MARKED.search(template):
            render(len(messages))  # for what it says if it refuses them
            encoded = tokenizer.apply_chat_template(
                messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
            )
            pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
            labels = [token if learned else IGNORED for token, learned in pairs]
            return [{"input_ids": list(encoded["input_ids"]), "labels": labels}]
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers or answers[0] == 0:
            raise ConfigurationError(
                f"{where}: `messages` has no turn of the role assistant that answers one"
            )
        turns = [(render(at, answer=True), render(at + 1)) for at in answers]
        if not all(answered.startswith(asked) for asked, answered in turns):
            raise ConfigurationError(
                f"{where}: the chat template begins an answer otherwise than it writes one, so that answers "
                "cannot be told from prompts; give a tokenizer whose template has {% generation %} markers "
                "with --tokenizer, or --train-on-prompt"
            )
        last = turns[-1][1]
        if all(last.startswith(answered) for _, answered in turns):
            return [self._spans(last, [(len(asked), len(answered)) for asked, answered in turns])]
        return [self._spans(answered, [(len(asked), len(answered))]) for asked, answered in turns]

    def _spans(self, text: str, spans: Sequence[tuple[int, int | None]]) -> Example:
        """A rendered text, of which the tokens that begin in a span of characters are learned."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ids = list(encoded["input_ids"])
        begins = [begin for begin, _ in encoded["offset_mapping"]]
        learned = [any(a <= begin < (len(text) if b is None else b) for a, b in spans) for begin in begins]
        return {
            "input_ids": ids,
            "labels": [token if yes else IGNORED for token, yes in zip(ids, learned, strict=True)],
        }


def _template(tokenizer: Any, where: str, instead: str = "use a prompt (and completion) instead") -> str:
    try:
        return str(tokenizer.get_chat_template())
    except (ValueError, AttributeError):  # none, or several and none of them the default
        raise ConfigurationError(
            f"{where}: a chat needs a chat template and this tokenizer has none; give a tokenizer that has "
            f"one with --tokenizer FOLDER, or {instead}"
        ) from None


def _render(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    where: str,
    tools: list[dict[str, Any]] | None = None,
    *,
    answer: bool = False,
) -> str:
    """Messages as the chat template writes them; ``answer``: with what begins the next answer."""
    template = _template(tokenizer, where)
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=answer
        )
    except Exception as error:  # whatever a template does; its own words, not those that it was given
        words = str(error) if str(error) and str(error) in template else type(error).__name__
        raise ConfigurationError(f"{where}: the chat template does not take the messages: {words}") from None
    return text
