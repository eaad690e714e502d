"""A chat as the provider reads it, in each privacy mode, with the attack known-mask subtraction.

    python examples/what_the_provider_reads.py MODEL [--text TEXT] [--output FILE.png]

MODEL is the folder of a causal language model, such as out/models/SmolLM2-135M-Instruct of `make demo`. One
executor in this process serves it and records what it receives. The attack subtracts the masks that the
provider knows, and looks each row of the first layer up among the inputs that the public model has for its
tokens. Prints what it finds, and draws it.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer, logging

import tenant_sdk
from provider.executor.base import BaseExecutor
from provider.inprocess import InprocessExecutor
from provider.observe.transcript import TranscriptWriter
from provider.session.tenant import Service
from security.attacks.tokens import KnownMaskSubtraction
from security.recordings.transcript import read_transcript
from security.views.adversaries import provider_view
from security.views.public_model import PublicModel
from shared.wire.header import PRODUCTS

logging.set_verbosity_error()
logging.disable_progress_bar()
MODES = {
    "plain": "plain: no masks",
    "noise-bank": "noise-bank: masks whose effects the provider computes",
    "one-time": "one-time: a fresh mask for every row",
}
SAID = (
    "Patient Anna Berg, born 4 May 1961, has had a dry cough for three weeks and takes lisinopril. "
    "Please write to her insurance that an X-ray is needed."
)


def read_in(mode: str, model: Path, ids: torch.Tensor) -> torch.Tensor:
    """The token ids that the provider guesses, in the order of the rows that it received."""
    base = BaseExecutor(model, numerics="ring", recorded=True)
    with tempfile.TemporaryDirectory() as folder:
        recording = TranscriptWriter(folder, base.manifest)
        options = {"mask_sources": [f"local:{model}"]} if mode == "one-time" else {}
        with (
            InprocessExecutor(Service.of(base, recording)) as executor,
            tenant_sdk.connect(
                executor, privacy=mode, verify="off", allow_transcript=True, **options
            ) as session,
            torch.no_grad(),
        ):
            session.load_model(progress=False)(input_ids=ids)
        recording.close()
        requests = [
            one for one in read_transcript(recording.path).requests if one.header.operation in PRODUCTS
        ]
        view = provider_view(PublicModel(model, base.manifest), requests)
        return KnownMaskSubtraction().attack(view, np.random.default_rng(0)).tokens


def draw(read: dict[str, list[str]], said: list[str], path: Path) -> None:
    """The text in each mode, a token right or wrong in its colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, places = plt.subplots(len(read), 1, figsize=(9, 0.95 * len(read)), layout="constrained")
    for place, (mode, tokens) in zip(places, read.items(), strict=True):
        right = sum(a == b for a, b in zip(tokens, said, strict=True))
        place.set_title(f"{MODES[mode]}: {right} of {len(said)} tokens read", loc="left", fontsize=11)
        text = "".join(tokens).replace("\n", " ")
        shown = "".join(each if each.isprintable() else "·" for each in text)
        place.text(
            0, 0.95, textwrap.fill(shown, 105), va="top", family="monospace", fontsize=9,
            color="#b00020" if right > len(said) / 2 else "#555555",
        )  # fmt: skip
        place.set_axis_off()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Read one chat in every mode."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", default=SAID)
    parser.add_argument("--output", type=Path, default=Path("out/what_the_provider_reads.png"))
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = tokenizer(options.text, return_tensors="pt")["input_ids"]
    said, read = [tokenizer.decode([each]) for each in ids[0].tolist()], dict[str, list[str]]()
    for mode, title in MODES.items():
        read[mode] = [tokenizer.decode([each]) for each in read_in(mode, options.model, ids).tolist()]
        print(f"{title}\n{textwrap.indent(textwrap.fill(''.join(read[mode]), 100), '    ')}\n", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    draw(read, said, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
