"""The size of an audit, and its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from security.attacks.masking import Randomness
from security.attacks.seeds import SeedStatistics
from security.recordings.capture import MODES, ONE_TIME, PLAIN
from security.recordings.workload import FULL, QUICK, WorkloadSize
from security.verdicts.findings import Finding, HostileFinding

PROVIDER, SOURCE, BOTH = "provider", "mask source", "provider and mask source"
NETWORK, MALICIOUS = "network observer", "malicious provider"
GATEWAY = f"{ONE_TIME}, gateway"
GATEWAY_PADDED, GATEWAY_LOOKUP = f"{GATEWAY}, rows padded", f"{GATEWAY}, prompt lookup"
BLIND_RUNS = 4  # of each attack without the tenant's rows, from which its chance is known


@dataclass(frozen=True)
class AuditPlan:
    """The size of an audit.

    ``family_error`` is the probability that chance alone makes any of the ``one-time`` rows look broken;
    each interval is widened accordingly (Bonferroni).
    """

    size: WorkloadSize
    game_rows: int
    deep_places: int
    layers: dict[tuple[str, str], int]  # by mode and party, from how many adapters are stolen; else one
    replies: int
    lies: int
    traffic_prompts: int
    timing_moments: int
    curve_masks: tuple[int, ...]
    family_error: float
    resolution: float  # what every line about one-time must be able to show
    curve_messages: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768)
    curve_tokens: tuple[int, ...] = (64, 128, 256, 384, 512, 1024, 2048)
    oracle_lies: int = 24  # of each kind, half of them told about; fewer than 12 right guesses could be luck
    imprinted_steps: int = 5
    speculated_prompts: int = 16  # of each kind
    known_texts: int = 32
    topic_prompts: int = 30  # of each topic
    filler_prompts: int = 16  # of each kind
    served_prompts: int = 16  # of each kind
    routed_prompts: int = 32  # of each length
    gateway_trials: int = 8  # of each kind
    modes: tuple[str, ...] = MODES


STOLEN = {(PLAIN, PROVIDER): 6, (ONE_TIME, PROVIDER): 3}
FULL_PLAN = AuditPlan(
    size=FULL,
    game_rows=600_000,
    deep_places=24,
    layers=STOLEN,
    replies=1_000_000,
    lies=32,
    traffic_prompts=24,
    timing_moments=40,
    curve_masks=(4, 16, 64, 256),
    family_error=0.01,
    resolution=0.01,
    gateway_trials=24,
)
QUICK_PLAN = AuditPlan(
    size=QUICK,
    game_rows=16_384,
    deep_places=16,
    layers={},
    replies=20_000,
    lies=5,
    traffic_prompts=8,
    timing_moments=8,
    curve_masks=(),
    family_error=1e-4,
    resolution=0.1,
    curve_messages=(1, 16, 64),
    curve_tokens=(256, 512, 1024),
    oracle_lies=8,
    imprinted_steps=2,
    speculated_prompts=8,
    known_texts=8,
    topic_prompts=8,
    filler_prompts=8,
    served_prompts=4,
    routed_prompts=16,
)


@dataclass
class AuditResult:
    """The results of an audit: everything that the report shows.

    ``skipped`` says of modes that this audit did not run why, and what it takes.
    """

    findings: list[Finding] = field(default_factory=list)
    hostile: list[HostileFinding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    randomness: dict[str, Randomness] = field(default_factory=dict)
    seeds: SeedStatistics | None = None
    about: dict[str, Any] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)


Stage = Callable[[str], Any]  # a context manager that shows what is being done
