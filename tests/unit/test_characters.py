"""Characters that a tokenizer does not keep are told, and others are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from real_tokenizers import real_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tenant_sdk.tuning.data import Reader

ASCII = "".join(map(chr, range(33, 127)))
CANNOT = "which the model can neither learn nor write; "


def own_tokenizer(unknown: str | None = None, normalizer: Any = None, known: str = ASCII) -> Any:
    """A tokenizer that knows a few characters, and no bytes."""
    rules = Tokenizer(models.BPE(unk_token=unknown))
    rules.pre_tokenizer, rules.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    if normalizer:
        rules.normalizer = normalizer
    special = ["</s>", *([unknown] if unknown else [])]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=list(known), vocab_size=128)
    rules.train_from_iterator([known], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rules, eos_token="</s>", unk_token=unknown)
    tokenizer.chat_template = (
        "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_calls }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    return tokenizer


def told(tmp_path: Path, tokenizer: Any, *records: dict[str, Any] | str) -> str:
    """What a reader says of these characters in a file, behind the file's name; empty: nothing."""
    said: list[str] = []
    path = tmp_path / "data"
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in records))
    Reader(tokenizer, 512, notify=said.append).read([path])
    lines = [line.removeprefix(f"{path}: ") for line in said if "does not keep" in line]
    assert len(lines) < 2
    return "".join(lines)


def test_characters_without_a_token_are_told(tmp_path: Path) -> None:
    records = {"text": "5 g"}, {"prompt": "Dose:", "completion": "5 µg ☃ not 50 µg, Größe ≤ 3\x1b"}
    lost = "'\\x1b', 'µ', 'ß', 'ö', '≤', '☃' (first in line 2)"
    start = f"of 20 different characters the tokenizer does not keep 6, {CANNOT}these "
    assert told(tmp_path, own_tokenizer(), *records) == f"{start}are left out: {lost}"
    assert told(tmp_path, own_tokenizer("<unk>"), *records) == f"{start}become <unk>: {lost}"


def test_only_some_are_named_and_each_line_where_they_begin(tmp_path: Path) -> None:
    cyrillic = "".join(map(chr, range(0x430, 0x430 + 11)))
    shown = ", ".join(map(repr, cyrillic[:8]))
    line = told(tmp_path, own_tokenizer("<unk>", normalizers.NFKC()), "5 g", "x²", "", f"{cyrillic} <unk>")
    assert line == (
        f"of 20 different characters the tokenizer does not keep 12, {CANNOT}these are changed: '²' to '2' "
        f"(first in line 2); these become <unk>: {shown} and 3 more (first in line 4)"
    )


def test_a_tokenizer_may_know_few_letters(tmp_path: Path) -> None:
    line = told(tmp_path, own_tokenizer(known="где"), "где где", "где?")
    assert line == (
        f"of 4 different characters the tokenizer does not keep 1, {CANNOT}these are left out: '?' (first in "
        "line 2)"
    )


def test_all_of_a_conversation_is_looked_at(tmp_path: Path) -> None:
    function = {"name": "look_up", "arguments": {"µ": ["ö", {"x": "≤"}], "y": 3}}
    messages = [
        {"role": "user", "content": "ß"},
        {"role": "assistant", "content": "§", "tool_calls": [{"type": "function", "function": function}]},
    ]
    tools = [{"type": "function", "function": {"name": "look_up", "description": "№"}}]
    line = told(tmp_path, own_tokenizer(), {"messages": messages, "tools": tools, "note": "not read: ☃"})
    assert f"does not keep 6, {CANNOT}these are left out: '§', 'µ', 'ß', 'ö', '№', '≤' (" in line


@pytest.mark.parametrize("name", ["smollm2", "mistral-v1", "mistral-v3", "base_model"])
def test_tokenizers_of_bytes_keep_all(name: str, tmp_path: Path) -> None:
    kept = "5 µg Größe ≤ 3, 日本語 ☃ 👩‍👩 \u0301 \ufeff \u202e e\u0301 a\u0301"
    assert told(tmp_path, real_tokenizer(name), kept) == ""


def test_white_space_and_other_forms_of_a_character_are_not_told(tmp_path: Path) -> None:
    normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("\u00a0", " ")])
    tokenizer = own_tokenizer(normalizer=normalizer, known=ASCII + "Åé")
    assert told(tmp_path, tokenizer, "5\u00a0g\t\u2003x \u212b") == ""
