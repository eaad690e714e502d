"""Active attacks by the provider: tokenizer, configuration and generation settings of its own choice."""

from __future__ import annotations

import gc
import json
import logging
import resource
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

import tenant_sdk
from security.attacks.streams import SpeculationWatch, guess_from_labelled
from shared.errors import SymbiosisError
from shared.wire.messages import ParameterInfo
from tenant_sdk.session.session import Session


class VocabularyPath:
    """Name a file of the tenant's as the tokenizer's vocabulary, and have it saved with the adapter.

    Args:
        canary: a line of that file.
    """

    name: ClassVar[str] = "a file of the tenant's as vocabulary"
    goal: ClassVar[str] = "a file of the tenant's, by its path"
    sees: ClassVar[str] = "what the tenant saves, and how it splits texts"
    metric: ClassVar[str] = "files in which the canary is found"
    source: ClassVar[str] = "path traversal (CWE-22) through tokenizer_config.json"

    CLASSES = ("BertTokenizer", "BertTokenizerFast")

    def __init__(self, canary: str) -> None:
        self.canary = canary

    def files(self, path: Path) -> list[dict[str, bytes | None]]:
        """What to serve: without the rules that would make a vocabulary needless, and with them."""
        tokens = [
            json.dumps({"tokenizer_class": each, "vocab": str(path), "vocab_file": str(path)}).encode()
            for each in self.CLASSES
        ]
        return [{"tokenizer.json": None, "tokenizer_config.json": each} for each in tokens] + [
            {"tokenizer_config.json": each} for each in tokens
        ]

    def attack(self, view: str, rng: np.random.Generator) -> bool:
        """Whether the file was read.

        Args:
            view: all that a tokenizer knows and wrote.
        """
        return self.canary in view


def with_rules(rules: bytes, *replaced: tuple[str, str]) -> bytes:
    """A ``tokenizer.json`` whose normalizer replaces strings, one pair after the other."""
    changes = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in replaced]
    return json.dumps(
        json.loads(rules) | {"normalizer": {"type": "Sequence", "normalizers": changes}}
    ).encode()


class Filler:
    """Serve a tokenizer that adds filler to texts that name a word, and count rows.

    Args:
        word: what the provider wants to know of.
    """

    name: ClassVar[str] = "filler"
    goal: ClassVar[str] = "whether a text names a word"
    sees: ClassVar[str] = "rows of each prompt; for half of the prompts also the answer"
    metric: ClassVar[str] = "prompts told apart by numbers of rows"
    source: ClassVar[str] = (
        "lengths as a channel: Weiss et al., arXiv 2403.09751; here the provider makes them"
    )

    ROWS = 20  # about as many more

    def __init__(self, word: str) -> None:
        self.word = word

    def rules(self, honest: bytes) -> bytes:
        """A ``tokenizer.json`` that does so."""
        return with_rules(honest, (self.word, self.word + " x" * self.ROWS))

    def attack(self, view: tuple[list[int], list[int]], rng: np.random.Generator) -> torch.Tensor:
        """Guesses for the prompts of which it was not told.

        Args:
            view: rows of each prompt, and which of the first ones name the word.
        """
        rows, labels = view
        return guess_from_labelled([float(each) for each in rows], [""] * len(rows), labels)


class ServedSpeculation(SpeculationWatch):
    """Serve a generation configuration that asks for prompt lookup, and watch numbers of rows."""

    name: ClassVar[str] = "speculation that the provider asks for"

    LOOKED_UP = 8  # tokens that are guessed from the prompt at once

    @classmethod
    def files(cls, folder: Path) -> dict[str, bytes]:
        """What to serve: the setting is read from either file."""
        generation = {"prompt_lookup_num_tokens": cls.LOOKED_UP}
        names = ("config.json", "generation_config.json")
        return {
            name: json.dumps(json.loads((folder / name).read_bytes()) | generation).encode() for name in names
        }


@dataclass(frozen=True)
class LoadOutcome:
    """How loading ended: an error's name or nothing, whether it is one of the SDK's, and MiB that it took."""

    error: str
    typed: bool
    grown_mib: float


class MemoryBomb:
    """Serve files that describe endless layers, or make seven characters endless."""

    name: ClassVar[str] = "sizes without bounds"
    goal: ClassVar[str] = "the tenant's memory"
    sees: ClassVar[str] = "whether the tenant goes on"
    metric: ClassVar[str] = "loads that took too much memory or ended without a typed error"
    source: ClassVar[str] = "uncontrolled resource consumption (CWE-400)"

    TEXT = "banana!"
    RULES, FEWER_RULES = 22, 18  # each makes every a two; the control's are fewer, to stay quick
    TOO_MUCH_MIB = 64

    @staticmethod
    def memory_limit(parameters: Iterable[ParameterInfo]) -> int:
        """Bytes of address space that a load may take at most: several copies of all that it downloads."""
        return (512 << 20) + 8 * sum(each.nbytes for each in parameters)

    def files(self, folder: Path, rules: int) -> dict[str, dict[str, bytes]]:
        """What to serve, by what it is."""
        config = json.loads((folder / "config.json").read_bytes())
        honest = (folder / "tokenizer.json").read_bytes()
        return {  # the largest last: what a process has freed it may take again without growing
            "wide heads": {"config.json": json.dumps(config | {"head_dim": 2 * 10**9}).encode()},
            "rules that double": {"tokenizer.json": with_rules(honest, *[("a", "aa")] * rules)},
            "many layers": {"config.json": json.dumps(config | {"num_hidden_layers": 10**9}).encode()},
        }

    def attack(self, view: list[LoadOutcome], rng: np.random.Generator) -> list[bool]:
        """Which of the loads did what the provider wants."""
        return [load.grown_mib > self.TOO_MUCH_MIB or not load.typed for load in view]


def load_as_tenant(url: str, token: str, ca: Path, folder: Path) -> None:
    """What a tenant does with what is served; ``folder`` holds the same files."""
    with tenant_sdk.connect(
        url, token=token, ca=ca, privacy="plain", allow_transcript=True, patience=0.0
    ) as session:
        session.load_tokenizer()(MemoryBomb.TEXT)
        session.load_model(progress=False)


def load_as_transformers(url: str, token: str, ca: Path, folder: Path) -> None:
    """The same with nothing but transformers."""
    import transformers

    transformers.AutoTokenizer.from_pretrained(folder)(MemoryBomb.TEXT)
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))


def measured(load: Callable[..., None], memory_limit: int, *arguments: Any) -> LoadOutcome:
    """Run a load that may take so many bytes; for a process of its own, whose address space it bounds."""
    logging.disable()  # what a session says here it says to nobody
    gc.collect()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # native code may end the process
    with suppress(OSError):  # where that is not allowed, growth beyond the former peak is measured
        Path("/proc/self/clear_refs").write_text("5")
    before, limits = _memory("VmHWM"), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory("VmSize") + memory_limit, limits[1]))
    error: BaseException | None = None
    try:
        load(*arguments)
    except BaseException as raised:  # also a panic of compiled parts: how loading ends is what is measured
        error = raised
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    grown = (_memory("VmHWM") - before) / 2**20
    typed = error is None or isinstance(error, SymbiosisError)
    return LoadOutcome("" if error is None else type(error).__name__, typed, grown)


def _memory(name: str) -> int:
    """Of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def told_by_tokenizer(load: Callable[[], Any], into: Path) -> str:
    """All that a tokenizer knows, and what it writes; nothing, if there is none."""
    try:
        tokenizer = load()
    except SymbiosisError:
        return ""
    tokenizer.save_pretrained(into)
    return " ".join([*tokenizer.get_vocab(), *(file.read_text() for file in into.iterdir())])


def download(session: Session, into: Path) -> Path:
    """The files that an executor serves, as they come."""
    into.mkdir()
    for info in session.manifest.files:
        (into / info.name).write_bytes(session.executor.file(info))
    return into
