"""The places of a tuning step's tensors with long sequences: a choice from figures, without I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from shared.errors import ConfigurationError, Metavar, OptionText

WINDOWS = (8192, 4096, 2048, 1024, 512, 256, 128)  # tokens of all sequences of a batch together
FEW = 1024  # from as many on a window costs hardly more than the whole
LOGITS = 3  # times a batch's logits: they, their logarithms, their gradient
ATTENDED = 4  # times a layer's keys and values: they, their gradients so far, those of a window
REPEATED = 2  # times those repeated for more heads: they, their gradients
HIDDEN = 3  # times what one layer is given: that, what it gives, a gradient
ASKED = 4  # times the answers of one layer: they, on their way, decrypted, in other layouts
# What allocators and libraries take on top, with tensors of the whole and with those of windows (measured:
# benchmarks/long_tuning.py).
WHOLE_SLACK, SLACK = 1.4, 1.2
GIB = 2**30


class StorageTier(Enum):
    """Where something is kept."""

    MEMORY = "in memory"
    DISK = "on disk"
    NOWHERE = "nowhere: they are asked for again"


@dataclass(frozen=True)
class Shapes:
    """Bytes of a model's step for one token.

    Attributes:
        saved: what autograd keeps of one layer.
        answers: what the executor answers to one layer.
        hidden: what one layer is given.
        attended: a layer's keys and values.
        logits: in float32.
        repeats: how many heads share keys and values.
        pair: what attention keeps for a token and one that it attends to; 0 if it makes no such table.
        chunk: a chunk of the loss, as a whole.
    """

    layers: int
    saved: int
    answers: int
    hidden: int
    attended: int
    logits: int
    repeats: int = 1
    pair: int = 0
    chunk: int = 256 << 20


@dataclass(frozen=True)
class MemoryPlan:
    """How a batch is tuned with.

    Attributes:
        chunked_loss: the loss is made by chunks.
        checkpointed: a layer's activations are made again.
        window: tokens of each sequence that are computed at once; None: all.
        answers: where the executor's answers are kept.
        states: where what layers were given, keys and values are kept.
        memory: bytes that the step takes, by estimate.
        disk: bytes on the disk.
    """

    chunked_loss: bool = False
    checkpointed: bool = False
    window: int | None = None
    answers: StorageTier = StorageTier.MEMORY
    states: StorageTier = StorageTier.MEMORY
    memory: int = 0
    disk: int = 0

    def sentence(self, length: int, batch: int = 1) -> str:
        """The plan in words, with figures."""
        of = f"{batch} x {length:,} tokens" if batch > 1 else f"{length:,} tokens"
        takes = f"about {self.memory / GIB:.1f} GiB of memory"
        if self.disk:
            takes += f" and {self.disk / GIB:.1f} GiB of disk"
        if self.window is not None:
            how = f"windows of {self.window:,} tokens; the executor's answers are kept {self.answers.value}"
            if self.answers != self.states:
                how += f", the layers' states {self.states.value}"
        elif self.checkpointed:
            how = f"activations are made again; the executor's answers are kept {self.answers.value}"
        elif self.chunked_loss:
            how = "the loss is made by chunks"
        else:
            how = "nothing special is needed"
        return f"{of}: {how}; a step takes {takes}"


def plan_step(
    shapes: Shapes,
    length: int,
    batch: int,
    memory: int,
    disk: int,
    *,
    window: int | None = None,
    packed: bool = False,
    budget: float | None = None,
) -> MemoryPlan:
    """The fastest way for a batch in so much memory.

    Args:
        length: tokens of the longest sequence.
        batch: sequences.
        memory: bytes for the step, on top of what is taken already.
        disk: bytes that are free.
        window: tokens; not chosen here, but windows are.
        packed: there are no windows.
        budget: GiB that somebody said the process may have in all. Without, memory is a guess, as a step's
            is: where there is no way, the one that takes least is tried.

    Raises:
        ConfigurationError: there is no way in what was given.
    """
    if packed and window:
        raise ConfigurationError(
            "packed rows cannot be cut into windows: put each sequence in a row of its own"
        )
    every = [plan for plan in _plans(shapes, length, batch, window) if not packed or plan.window is None]
    plans = [plan for plan in every if plan.disk <= disk]  # without the disk there are some too
    for plan in plans:
        if plan.memory <= memory:
            return plan
    least = min(plans, key=lambda plan: plan.memory)
    if budget is None:
        return least
    enough = budget + (least.memory - memory) / GIB
    error = OptionText(
        "{} x {:,} tokens take {:.2f} GiB of memory at least, on top of the {:.2f} GiB that this process has "
        "already: give {memory_gib} or more, shorter sequences, or fewer at once",
        *(batch, length, least.memory / GIB, budget - memory / GIB),
        memory_gib=Metavar(f"{math.ceil(100 * enough) / 100:g}"),
    )
    if (more := next((plan for plan in every if plan.memory <= memory), None)) is not None:
        error += f"; or {more.disk / GIB:.1f} GiB of disk, where {disk / GIB:.1f} may be used"
    if packed:
        error += "; each sequence in a row of its own could be cut into windows"
    raise ConfigurationError(error)


def _plans(shapes: Shapes, length: int, batch: int, window: int | None) -> list[MemoryPlan]:
    """All ways, the fastest first."""
    tokens, layers = length * batch, shapes.layers
    state_bytes = tokens * layers * (shapes.hidden + shapes.attended)
    answers = tokens * layers * shapes.answers
    whole = tokens * (shapes.saved + length * shapes.pair)  # a layer's activations
    plans: list[MemoryPlan] = []

    def add(slack: float, memory: int, **options: object) -> None:
        plans.append(MemoryPlan(memory=int(slack * memory), **options))  # type: ignore[arg-type]

    if window is None:
        answer_bytes = ASKED * tokens * shapes.answers
        add(WHOLE_SLACK, tokens * shapes.logits * LOGITS + layers * whole + answer_bytes)
        loss = shapes.chunk + HIDDEN * tokens * shapes.hidden
        add(WHOLE_SLACK, loss + layers * whole + answer_bytes, chunked_loss=True)
        checkpointed = loss + tokens * layers * shapes.hidden + 2 * whole + answer_bytes
        add(WHOLE_SLACK, checkpointed + answers, chunked_loss=True, checkpointed=True)
    sizes = [window * batch] if window else [size for size in WINDOWS if size < tokens] or [tokens]
    for size in sizes:
        if size == FEW // 2 and window is None:
            # Smaller windows cost more than the disk; without them there may be room.
            on_disk = {"answers": StorageTier.DISK, "disk": answers}
            add(WHOLE_SLACK, checkpointed, chunked_loss=True, checkpointed=True, **on_disk)
        each = max(1, size // batch)
        copies = ATTENDED + (REPEATED * shapes.repeats if shapes.repeats > 1 else 0)
        at_once = shapes.chunk + tokens * (HIDDEN * shapes.hidden + copies * shapes.attended)
        at_once += 2 * each * batch * (shapes.saved + length * (shapes.pair + 8))  # 8: a mask
        for where, states in (
            (StorageTier.MEMORY, StorageTier.MEMORY),
            (StorageTier.DISK, StorageTier.MEMORY),
            (StorageTier.DISK, StorageTier.DISK),
            (StorageTier.NOWHERE, StorageTier.DISK),
        ):
            disk = answers * (where == StorageTier.DISK) + state_bytes * (states == StorageTier.DISK)
            here = answers * (where == StorageTier.MEMORY) + state_bytes * (states == StorageTier.MEMORY)
            options = {"window": each, "answers": where, "states": states, "disk": disk}
            add(SLACK, at_once + here, chunked_loss=True, **options)
    return plans
