"""Small files that would take much memory or time, and texts that would end the process."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hostile_files import RULES, changed

from shared.errors import ModelMismatch
from tenant_sdk.tokenizer import build_tokenizer

BPE = json.loads(RULES)["model"]


# -- the tokenizer's vocabulary ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {**BPE, "vocab": {**BPE["vocab"], "zz": (1 << 31) - 1}}},
        {"model": {**BPE, "vocab": {**BPE["vocab"], "zz": 1 << 17}}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "zz": 1 << 30}, "unk_token": "a"}},
        {"model": {"type": "WordPiece", "vocab": {"a": 0, "zz": 1 << 30}, "unk_token": "a"}},
        {"added_tokens": [{"id": 1 << 30, "content": "zz"}]},
        {
            "model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0]], "byte_fallback": False},
            "added_tokens": [{"id": 1 << 30, "content": "zz"}],
        },
    ],
)
def test_ids_with_holes_between_them(parts: dict[str, Any]) -> None:
    """The library lists every id that has no token, two thousand million of them."""
    with pytest.raises(ModelMismatch, match="ids have holes"):
        build_tokenizer({"tokenizer.json": changed(**parts)})


def test_some_holes_are_in_use() -> None:
    """Vocabularies are padded, and special tokens put behind the padding."""
    size = len(BPE["vocab"])
    added = [{"id": 2 * size, "content": "<later>", "special": True}]
    assert build_tokenizer({"tokenizer.json": changed(added_tokens=added)})("<later>")["input_ids"]
