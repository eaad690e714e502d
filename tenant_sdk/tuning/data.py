"""Training data made into token ids and labels: text files and JSONL records.

A text file becomes blocks of equal length; what a record may be is in ``tenant_sdk.tuning.records``. Of
`text` all is learned, of `prompt` and `completion` the latter, of `messages` what assistants say
(``tenant_sdk.tuning.conversations``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from shared.errors import ConfigurationError, OptionText, counted, peer_text
from tenant_sdk.tuning.characters import lost_characters_text, note_first_lines
from tenant_sdk.tuning.conversations import (
    IGNORE_INDEX,
    Conversations,
    Example,
    Messages,
    TemplateDate,
    chat_template,
    encode,
    encode_continuation,
    fully_learned,
    generation_prompt,
)
from tenant_sdk.tuning.options import ReadingOptions
from tenant_sdk.tuning.records import Record, holds_records, read_text, records_of, where
from tenant_sdk.tuning.sampling import ends_of

Blocks = list[list[int]]
Collate = Callable[[Sequence[Example]], dict[str, Tensor]]
Notify = Callable[[str], None]


def pack(tokens: Sequence[int], length: int, *, keep_tail: bool) -> Blocks:
    """Consecutive blocks of ``length`` tokens.

    Args:
        keep_tail: add what is left at the end as a shorter block. A token that is left alone has the one
            before it again, since nothing predicts the first of a block. A text shorter than one block is
            always one block.
    """
    blocks = [list(tokens[at : at + length]) for at in range(0, len(tokens), length)]
    if len(blocks) > 1 and len(blocks[-1]) < length and not keep_tail:
        blocks.pop()
    elif len(blocks) > 1 and len(blocks[-1]) == 1:
        blocks[-1] = list(tokens[-2:])
    return blocks


def learned_tokens(example: Example) -> int:
    """How many tokens of an example the model is asked to predict; nothing predicts the first."""
    return sum(label != IGNORE_INDEX for label in example["labels"][1:])


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch: ``input_ids``, ``attention_mask`` and ``labels``, int64 ``[B, longest]``, padded at the end.

    What stands in padding is never attended to and never learned, so that any token will do.
    """
    ids, labels, attended = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding)
        for rows, padding in (
            ([each["input_ids"] for each in examples], 0),
            ([each["labels"] for each in examples], IGNORE_INDEX),
            ([[1] * len(each["input_ids"]) for each in examples], 0),
        )
    )
    return {"input_ids": ids, "attention_mask": attended, "labels": labels}


def collate_packed(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch as one row without padding: ``input_ids``, ``labels``, ``position_ids``, int64 ``[1, tokens]``.

    Positions begin anew with each example, by which transformers tells them apart and lets none attend to
    another; it looks for that where there is neither an attention mask nor a cache.
    """
    labels = [[IGNORE_INDEX, *each["labels"][1:]] for each in examples]  # nothing predicts an example's first
    return {
        "input_ids": torch.tensor([[token for each in examples for token in each["input_ids"]]]),
        "labels": torch.tensor([[label for each in labels for label in each]]),
        "position_ids": torch.tensor([[at for each in labels for at in range(len(each))]]),
    }


def text_tokens(path: Path, text: str, tokenizer: Any) -> list[int]:
    """Token ids of a whole text.

    Raises:
        ConfigurationError: it holds next to nothing.
    """
    # verbose=False: a text longer than the model's context is no mistake here.
    tokens: list[int] = tokenizer(text, verbose=False)["input_ids"]
    if len(tokens) < 2:
        raise ConfigurationError(f"{path} holds no text to learn from")
    return tokens


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a text that something will follow: not its end, which some tokenizers add."""
    ids = list(tokenizer(without_second_bos(tokenizer, prompt), verbose=False)["input_ids"])
    end = getattr(tokenizer, "eos_token_id", None)
    if ids and ids[-1] == end and not prompt.endswith(tokenizer.eos_token):
        ids.pop()
    return ids


def without_second_bos(tokenizer: Any, text: str) -> str:
    """A text without the token that begins one, if it is written there and the tokenizer adds it as well."""
    begin = getattr(tokenizer, "bos_token", None)
    if not begin or not text.startswith(begin):
        return text
    ids = tokenizer(text, verbose=False)["input_ids"]
    return text.removeprefix(begin) if ids[:2] == [tokenizer.bos_token_id] * 2 else text


def has_chat_template(tokenizer: Any) -> bool:
    """Whether a conversation can be written without naming a template."""
    try:
        return bool(tokenizer.get_chat_template())
    except (ValueError, AttributeError):  # none, or several and none of them the default
        return False


def notify_template_day(day: TemplateDate, notify: Notify) -> None:
    """Notify that records have a date, if a chat template wrote it."""
    if day.written:
        notify(
            f"the chat template writes the date: {day.day} in each record, and at inference that of the day"
        )


def chat_prompt(tokenizer: Any, messages: Messages, day: TemplateDate | None = None) -> list[int]:
    """Token ids of a conversation and of what begins the answer, by the tokenizer's chat template.

    Args:
        day: see ``Conversations``.

    Raises:
        ConfigurationError: the tokenizer has no chat template, or it does not take the messages.
    """
    chat_template(tokenizer, "the prompt", OptionText("use `generate` without {system}"))
    return encode(tokenizer, generation_prompt(tokenizer, messages, None, "the prompt", day))


def check_token_ids(tokenizer: Any, ids: Sequence[int], embeddings: int | None, place: str) -> None:
    """Refuse tokens that the tokenizer has and the model has not.

    Args:
        embeddings: how many tokens the model knows; None: not known here.

    Raises:
        ConfigurationError: there is such a token; the message names it.
    """
    if embeddings is not None and max(ids, default=0) >= embeddings:
        token = peer_text(str(tokenizer.convert_ids_to_tokens(max(ids))), 40)
        raise ConfigurationError(
            f"{place}: the tokenizer makes {token} the token {max(ids)}, and the model has embeddings for "
            f"{embeddings} tokens only. Use the model's own tokenizer, or one without added tokens"
        )


@dataclass(frozen=True)
class Entry:
    """An example of a file.

    ``line``: where its record is; None in a plain text. ``pieces``: into how many examples the record was
    split. ``left_out``: it is too long, and not learned. ``ended``: the last learned token stops `generate`.
    """

    line: int | None
    example: Example
    pieces: int = 1
    left_out: bool = False
    ended: bool = True


@dataclass(frozen=True)
class ReadFile:
    """The examples of a file.

    ``unread``: names of its records' keys that are not read. ``passed``: names of its messages' keys that the
    chat template alone may read. ``tokens``: of a plain text, with a last block that is too short. ``lost``:
    characters that the tokenizer does not keep, in words. ``as_is``: the model has a chat template, and there
    are records that are learned without it.
    """

    path: Path
    entries: tuple[Entry, ...]
    unread: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    tokens: int = 0
    lost: str = ""
    as_is: bool = False

    @property
    def examples(self) -> list[Example]:
        """Those that are learned from."""
        return [entry.example for entry in self.entries if not entry.left_out]

    def summary(self, length: int) -> list[str]:
        """Lines about it for its user; of the data's text they name lost characters alone.

        Args:
            length: tokens of an example at most.
        """
        examples = self.examples
        sizes = [len(example["input_ids"]) for example in examples]
        lost = [f"{self.path}: {self.lost}"] if self.lost else []
        if self.entries[0].line is None:
            return [
                f"{self.path}: read as plain text, {counted(self.tokens, 'token')} in "
                f"{counted(len(sizes), 'block')} of {sizes[0]}",
                *lost,
            ]
        records = len({entry.line for entry in self.entries})
        learned = sum(map(learned_tokens, examples))
        lines = [
            f"{self.path}: {counted(records, 'record')}, {counted(sum(sizes), 'token')}, {learned:,} "
            "of them to learn"
        ]
        longer = f"of {records} records are longer than {length} tokens"
        if split := {entry.line for entry in self.entries if entry.pieces > 1}:
            lines.append(f"{self.path}: {len(split)} {longer} and were split: all of them is learned")
        if long := [entry for entry in self.entries if entry.left_out]:
            longest = max(len(entry.example["input_ids"]) for entry in long)
            lines.append(
                OptionText(
                    "{}: {} {} (the longest has {}) and were left out; {sequence_length} says how long "
                    "they may be",
                    *(str(self.path), len({entry.line for entry in long}), longer, longest),
                )
            )
        if endless := {entry.line for entry in self.entries if not entry.ended}:
            lines.append(
                f"{self.path}: {len(endless)} of {records} records end without a token that stops "
                "`generate`, so that the adapter does not learn when to stop: the tokenizer names no such "
                "token, or the chat template leaves it out of what it marks as the answer"
            )
        lines += lost
        if self.as_is:
            lines.append(
                OptionText(
                    "{}: records without `messages` are learned as they are, without the model's chat "
                    "template. Ask with {raw} then, or write the records as `messages`",
                    str(self.path),
                    raw=True,
                )
            )
        if self.unread:
            lines.append(f"{self.path}: these keys of its records are not read: {', '.join(self.unread)}")
        if self.passed:
            lines.append(
                f"{self.path}: these keys of its messages are read by the chat template alone, if at all: "
                f"{', '.join(self.passed)}"
            )
        return lines


@dataclass(frozen=True)
class Reader:
    """Makes examples of files.

    Args:
        tokenizer: of the model.
        length: tokens of an example at most.
        train_on_prompt: learn all tokens of a record, not the answers alone.
        keep_tail: of text files, see ``pack``.
        ends: ids of the tokens at which `generate` stops, as ``ends_of`` has them; default: the tokenizer's.
        embeddings: how many tokens the model knows; None: not known.
        notify: called with lines about each file; of the data's text they name lost characters alone.
        day: see ``Conversations``.
    """

    tokenizer: Any
    length: int
    train_on_prompt: bool = False
    keep_tail: bool = False
    ends: tuple[int, ...] = ()
    embeddings: int | None = None
    notify: Notify = lambda _: None
    day: TemplateDate | None = None

    @classmethod
    def of_model(
        cls, model: Any, tokenizer: Any, length: int, options: ReadingOptions, **more: Any
    ) -> Reader:
        """Returns a reader for a model; ``more``: further fields."""
        return cls(
            tokenizer,
            length,
            options.train_on_prompt,
            ends=ends_of(model.generation_config, tokenizer),
            embeddings=model.get_input_embeddings().weight.shape[0],
            **more,
        )

    def read(self, paths: Sequence[Path]) -> list[Example]:
        """The examples of all files in order.

        Raises:
            ConfigurationError: a file or a record is wrong; the message names file and line.
        """
        examples = []
        for path in paths:
            file = self.file(path)
            if not file.examples:
                raise ConfigurationError(
                    f"{path} holds no record to learn from: all are longer than {self.length} tokens. "
                    "Shorten them, or allow longer sequences"
                )
            for line in file.summary(self.length):
                self.notify(line)
            examples += file.examples
        return examples

    def file(self, path: Path) -> ReadFile:
        """The examples of a file, also those that are too long.

        Raises:
            ConfigurationError: the file or a record is wrong; the message names file and line.
        """
        text = read_text(path)
        entries: list[Entry] = []
        first: dict[str, int] = {}
        if not holds_records(path, text):
            tokens = text_tokens(path, text, self.tokenizer)
            check_token_ids(self.tokenizer, tokens, self.embeddings, str(path))
            blocks = pack(tokens, self.length, keep_tail=self.keep_tail)
            for line, words in enumerate(text.split("\n"), 1):
                note_first_lines(first, set(words), line)
            lost = lost_characters_text(self.tokenizer, first)
            entries += (Entry(None, fully_learned(block)) for block in blocks)
            return ReadFile(path, tuple(entries), tokens=len(tokens), lost=lost)
        unread: set[str] = set()
        passed: set[str] = set()
        as_is = False
        for line, record in records_of(path, text):
            as_is |= record.messages is None and has_chat_template(self.tokenizer)
            unread |= {*record.unread}
            passed |= {*record.passed}
            note_first_lines(first, record.characters(), line)
            examples = self._encode(record, where(path, line))
            fitting = [each for each in examples if len(each["input_ids"]) <= self.length]
            if not examples or not all(map(learned_tokens, fitting)):
                raise ConfigurationError(
                    f"{where(path, line)}: there is nothing to learn: no answer follows other text"
                )
            for example in examples:
                check_token_ids(self.tokenizer, example["input_ids"], self.embeddings, where(path, line))
                entries += self._fit_length(example, line)
        lost = lost_characters_text(self.tokenizer, first)
        return ReadFile(
            path, tuple(entries), tuple(sorted(unread)), tuple(sorted(passed)), lost=lost, as_is=as_is
        )

    def _fit_length(self, example: Example, line: int) -> list[Entry]:
        learned = [label for label in example["labels"] if label != IGNORE_INDEX]
        ended = not learned or learned[-1] in self._end_tokens
        if len(example["input_ids"]) <= self.length:
            return [Entry(line, example, ended=ended)]
        if example["labels"] == example["input_ids"]:
            pieces = pack(example["input_ids"], self.length, keep_tail=True)
            return [Entry(line, fully_learned(piece), len(pieces), ended=ended) for piece in pieces]
        return [Entry(line, example, left_out=True, ended=ended)]

    def _encode(self, record: Record, place: str) -> list[Example]:
        """Usually one example; what is too long is the caller's matter."""
        if record.messages is not None:
            chats = Conversations(self.tokenizer, self._end_tokens, self.length, self.day)
            tools = record.tools if isinstance(record.tools, list) else None
            if self.train_on_prompt:
                return [chats.whole_conversation(record.messages, tools, place)]
            return chats.examples(record.messages, tools, place)
        if record.text is not None:
            text = without_second_bos(self.tokenizer, record.text)
            return [fully_learned(self._with_end(self.tokenizer(text, verbose=False)["input_ids"]))]
        prompt, completion = without_second_bos(self.tokenizer, record.prompt or ""), record.completion or ""
        start = prompt_tokens(self.tokenizer, prompt)
        if not start:
            raise ConfigurationError(
                f"{place}: the prompt is empty and the tokenizer begins no text with a token, so that "
                "nothing predicts the completion's first token: write a prompt, or the whole as `text`"
            )
        answer = self._with_end(encode_continuation(self.tokenizer, prompt, start, completion, special=True))
        if self.train_on_prompt:
            return [fully_learned(start + answer)]
        return [{"input_ids": start + answer, "labels": [IGNORE_INDEX] * len(start) + answer}]

    @property
    def _end_tokens(self) -> tuple[int, ...]:
        end = getattr(self.tokenizer, "eos_token_id", None)
        return self.ends or (() if end is None else (end,))

    def _with_end(self, ids: Sequence[int]) -> list[int]:
        """With the end of text, by which `generate` knows that a record is complete."""
        ended = not self._end_tokens or (ids and ids[-1] in self._end_tokens)
        return [*ids] if ended else [*ids, self._end_tokens[0]]
