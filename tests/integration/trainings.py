"""Small trainings, and what they learn from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tenant_sdk
from tenant_sdk.tuning.finetuning import TrainingCallbacks, TrainingReport, finetune
from tenant_sdk.tuning.options import TrainingOptions


class Letters:
    """A tokenizer: one token a letter, within the tiny models' vocabulary."""

    eos_token_id, eos_token = 2, "."

    def __call__(
        self, text: str, verbose: bool = True, add_special_tokens: bool = True
    ) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % 100 for letter in text]}

    def decode(self, ids: list[int], clean_up_tokenization_spaces: bool) -> str:
        return "".join(chr(each - 3 if each - 3 >= 32 else each + 97) for each in ids)

    def batch_decode(self, rows: Any, skip_special_tokens: bool) -> list[str]:
        return [self.decode([int(each) for each in row if each != self.eos_token_id], False) for row in rows]


def train(
    session: tenant_sdk.Session,
    training: TrainingOptions,
    show: Callable[..., None] = lambda *_: None,
    tokenizer: Any = None,
    **more: Any,
) -> tuple[TrainingReport, list[str]]:
    said: list[str] = []
    model = session.load_model(progress=False)
    report = finetune(
        training, model, tokenizer or Letters(), session, TrainingCallbacks(said.append, show), **more
    )
    return report, said


def options(text: Path, name: str, **more: Any) -> TrainingOptions:
    small: dict[str, Any] = {"steps": 4, "batch_size": 2, "sequence_length": 16, "save_steps": 2, "rank": 2}
    return TrainingOptions((text,), text.parent / name, **(small | more))


def records(folder: Path, count: int = 12) -> Path:
    path = folder / "records.jsonl"
    lines = [{"prompt": "Rex, terrier" + "." * (n % 3), "completion": f" dog {n % 2}"} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


LONGER = {"sequence_length": 32}


def learned_record(folder: Path) -> Path:
    """One record many times, which is soon learned by heart."""
    path = folder / "one.jsonl"
    path.write_text("\n".join([json.dumps({"prompt": "Rex, terrier", "completion": "d"})] * 4))
    return path
