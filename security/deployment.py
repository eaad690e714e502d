"""The passive attacks on a transcript from a real deployment, where nobody knows the truth."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.markup import escape
from rich.table import Table
from scipy import stats

from provider.executor.memory_check import available_memory, gib
from security.attacks.base import TokenGuess
from security.attacks.gradients import LabelRecovery
from security.attacks.masking import Randomness, Uniformity
from security.attacks.seeds import SeedPrediction
from security.attacks.tokens import (
    Averaging,
    KnownMaskSubtraction,
    MaskReuse,
    NoiseAware,
    SubspaceProjection,
    VocabularyMatching,
)
from security.attacks.traffic import TrafficAnalysis
from security.recordings.transcript import RecordedRequest, Transcript, TranscriptError
from security.verdicts.plan import BLIND_RUNS
from security.views.adversaries import (
    MaskSourceView,
    View,
    collusion_view,
    mask_source_view,
    products_of,
    provider_view,
    requests_of,
)
from security.views.public_model import PublicModel
from shared.time_limit import TimeLimitExceeded, time_limit
from shared.wire.header import PRODUCTS, Operation

LEVEL = 1e-6  # of every test: so rarely a session under one-time masks is called something else
BETTER = 0.02  # of a cosine: by how much an attack that reads is better than on uniform rows, at least,
SPREADS = 3  # and how often by as much as its runs on those differ
FEW_RUNS = 5  # on uniform rows, of an attack that has many
MIN_NUMBERS = 5 * 256  # so that each value of a byte is expected five times; fewer show nothing
MIN_SEEDS = 64
MEMORY_SHARE = 0.8  # of what is free, which attacks on one session may take
PAIRS = 2.0**65  # of runs or blocks, among which one is expected to be equal by chance


@dataclass(frozen=True)
class SessionVerdict:
    """What an auditor has to know of a session, or of several: one sentence, and whether they leak.

    ``leaks`` is None if the attacks did not end, so that nothing is known.
    """

    text: str
    leaks: bool | None


@dataclass
class TranscriptReport:
    """What was read out of a transcript: sessions that were passed over, and verdicts."""

    notes: list[str] = field(default_factory=list)
    verdicts: list[SessionVerdict] = field(default_factory=list)

    @property
    def leaks(self) -> bool:
        """Whether any session does."""
        return any(verdict.leaks for verdict in self.verdicts)

    @property
    def complete(self) -> bool:
        """Whether every session has a verdict."""
        return all(verdict.leaks is not None for verdict in self.verdicts)


@dataclass
class TranscriptAudit:
    """Attacks on recordings. ``docs/how-to/auditing.md`` explains the output.

    Args:
        model: Folder of the checkpoint that the executor served.
        show: Number of guessed tokens to show for each attack.
        seed: Seed of all random numbers.
        stage: Function that takes the name of a stage and returns a context manager, which shows progress.
        shows: Function that takes the table of each session as soon as the table is complete.
        minutes: Minutes of processor time for the attacks on all sessions of one tenant.
    """

    model: Path
    show: int
    seed: int
    stage: Callable[[str], Any]
    shows: Callable[[Table], Any]
    minutes: float = 60.0
    _used: dict[str, float] = field(default_factory=dict, init=False)  # seconds, by tenant

    def provider(self, recorded: Transcript, source: Transcript | None = None) -> TranscriptReport:
        """Attack a provider's recording, session by session.

        Args:
            recorded: Recording of the provider.
            source: Recording of the mask source. If it is given, both collude, and the audit subtracts the
                masks.

        Raises:
            TranscriptError: The recording holds no rows.
        """
        reading, sessions = _sessions(recorded)
        with self.stage("loading the model"):
            public = PublicModel(self.model, recorded.manifest)
            _ = public.first_inputs  # that a model has none is no session's fault
            tokenizer = _tokenizer(self.model)
        uniform: dict[str, list[int]] = {}
        for session, requests in sessions.items():
            if not products_of(requests):
                continue
            tenant = recorded.tenants[session]
            name = f"session {session} (tenant {tenant})"
            with self.stage(f"attacks on {name}"), self._alone(reading, tenant, name) as has_time:
                if not has_time:
                    continue
                rng = np.random.default_rng(self.seed)
                if source is not None:
                    masks = [requests_of([source], each) for each in sorted(set(source.tenants.values()))]
                    view: View = collusion_view(public, requests, *masks)
                    table, verdict = self._attack(name, view, tokenizer, rng)
                else:
                    known = [r for s, each in sessions.items() if recorded.tenants[s] == tenant for r in each]
                    known = [r for r in known if r.header.operation != Operation.PRODUCT]
                    view = provider_view(public, known + products_of(requests))
                    table, verdict = self._attack(name, view, tokenizer, rng, Uniformity().attack(view, rng))
                table.caption = _traffic(requests, rng)
                self.shows(table)
                reading.verdicts.append(verdict)
            if reading.verdicts[-1].leaks is False:
                uniform.setdefault(tenant, []).append(session)
        for tenant, several in uniform.items():
            if source is None and len(several) > 1:
                pooled = [r for session in several for r in products_of(sessions[session])]
                name = f"sessions {', '.join(map(str, several))} together (tenant {tenant})"
                with (
                    self.stage(f"all sessions of tenant {tenant} together"),
                    self._alone(reading, tenant, name) as has_time,
                ):
                    if has_time:
                        reading.verdicts.append(self._together(name, provider_view(public, pooled)))
        if not reading.verdicts:
            raise _nothing(reading, "rows", "provider", "mask-source")
        return reading

    def mask_source(self, recorded: Transcript) -> TranscriptReport:
        """Test the seeds of each tenant in a mask source's recording, all sessions of a tenant together.

        Raises:
            TranscriptError: The recording holds no seeds.
        """
        reading, sessions = _sessions(recorded)
        for tenant in dict.fromkeys(recorded.tenants[session] for session in sessions):
            theirs = [r for s, each in sessions.items() if recorded.tenants[s] == tenant for r in each]
            seen = mask_source_view(theirs)
            if seen.seeds:
                with self._alone(reading, tenant, f"tenant {tenant}") as has_time:
                    if has_time:
                        reading.verdicts.append(self._predict(tenant, seen))
        if not reading.verdicts:
            raise _nothing(reading, "seeds", "mask-source", "provider")
        return reading

    def _predict(self, tenant: str, seen: MaskSourceView) -> SessionVerdict:
        found = SeedPrediction().attack(seen, np.random.default_rng(self.seed))
        finding = (
            f"p = {found.p_value:.3g} ({found.worst}); {found.repeated} repeated of {found.count:,} seeds"
        )
        table = Table(title=escape(f"tenant {tenant}, as {seen.sees} sees it"))
        for column in ("attack", "found"):
            table.add_column(column, overflow="fold")
        table.add_row(SeedPrediction.name, f"{finding}; {found.others} other requests")
        self.shows(table)
        if found.repeated or found.p_value < LEVEL:
            return SessionVerdict(
                f"tenant {tenant}: these seeds are NOT fresh and random: {finding}", leaks=True
            )
        if found.count < MIN_SEEDS:
            return SessionVerdict(f"tenant {tenant}: {found.count} seeds are too few to tell", leaks=False)
        return SessionVerdict(f"tenant {tenant}: nothing was found in {found.count:,} seeds", leaks=False)

    def _attack(
        self,
        name: str,
        view: View,
        tokenizer: Any,
        rng: np.random.Generator,
        bytes_found: Randomness | None = None,
    ) -> tuple[Table, SessionVerdict]:
        """Every attack on one session; without ``bytes_found`` its masks have been subtracted."""
        table = Table(title=escape(f"{name}, as {view.sees} sees it"))
        for column in ("attack", "n", "match", "random rows", "best guesses"):
            table.add_column(column, overflow="fold")
        read = []
        tried = sum(map(len, view.masks.values()))
        some = f"of {view.mask_count:,} masks {tried:,} were tried" if tried < view.mask_count else ""
        for attack in _token_attacks(view):
            guess: TokenGuess = attack.attack(view, rng)
            if not len(guess.tokens):
                table.add_row(attack.name, "0", "-", "-", "nothing of the kind")
                continue
            blind = _blind(attack, view, rng, FEW_RUNS if len(guess.tokens) >= MIN_NUMBERS else BLIND_RUNS)
            words = repr(_words(tokenizer, _best(guess, self.show)))
            match, random = float(guess.match.mean()), float(torch.cat(blind).mean())
            partly = f" ({some})" if some and isinstance(attack, KnownMaskSubtraction) else ""
            table.add_row(
                attack.name + partly, f"{len(guess.tokens):,}", f"{match:.3f}", f"{random:.3f}", escape(words)
            )
            if _is_better(guess.match, blind):
                read.append(
                    (match - random, f"{attack.name} reads {words} ({match:.3f} against {random:.3f})")
                )
        labels = LabelRecovery().attack(view, rng)
        if labels:
            count = sum(len(each) for each in labels)
            words = repr(_words(tokenizer, labels[0][: self.show]))
            table.add_row(LabelRecovery.name, f"{count:,}", "", "", escape(f"first batch: {words}"))
        wrong = None
        if bytes_found is not None:
            wrong = _not_uniform(view, bytes_found)
            table.add_row(Uniformity.name, f"{bytes_found.bytes_tested:,} bytes", "", "", _told(bytes_found))
        parts = []
        if wrong:
            parts.append(f"these rows are NOT uniform: they are not under one-time masks ({wrong})")
        if read:
            parts.append(max(read)[1])
        elif not wrong and bytes_found is not None and bytes_found.bytes_tested < 4 * MIN_NUMBERS:
            parts.append(f"{bytes_found.bytes_tested // 4} numbers are too few to tell")
        elif not wrong:
            like = "rows look uniform, and " if bytes_found is not None else ""
            parts.append(f"{like}nothing did better than on random rows")
        if some:
            parts.append(some)
        return table, SessionVerdict(f"{name}: {'; '.join(parts)}", leaks=bool(wrong or read))

    def _together(self, name: str, view: View) -> SessionVerdict:
        """Whether masks serve in several sessions, each of which looks uniform."""
        randomness = Uniformity().attack(view, np.random.default_rng(self.seed))
        wrong = _not_uniform(view, randomness)
        if wrong:
            return SessionVerdict(
                f"{name}: these rows are NOT uniform, as if masks served again ({wrong})", leaks=True
            )
        return SessionVerdict(f"{name}: uniform, and no mask of one serves in another", leaks=False)

    @contextmanager
    def _alone(self, reading: TranscriptReport, tenant: str, name: str) -> Iterator[bool]:
        """Whether the tenant has time left. Say why there is no verdict if attacks fail, and go on.

        They may need too much memory or time. Any tenant can send what makes them do so, and others must not
        be without a verdict for that.
        """
        left, began = 60 * self.minutes - self._used.get(tenant, 0.0), time.process_time()
        why = ""
        try:
            with time_limit(left), _memory_limit() as limit:
                yield left > 0
        except TimeLimitExceeded:
            left = 0
        except Exception as error:
            told = " ".join(str(error).split())
            if isinstance(error, MemoryError) or "can't allocate memory" in told:  # as torch has it
                why = f"attacks on it need more memory than {gib(limit)}"
            else:
                why = f"an attack on it failed: {type(error).__name__}: {told[:200]}"
        self._used[tenant] = self._used.get(tenant, 0.0) + time.process_time() - began
        if left <= 0:
            self._used[tenant] = 60 * self.minutes
            why = f"attacks on this tenant's sessions took {self.minutes:g} minutes of a processor"
        if why:
            reading.verdicts.append(SessionVerdict(f"{name}: no verdict, for {why}", leaks=None))


@contextmanager
def _memory_limit() -> Iterator[float]:
    """Bound the memory of this process in the block: by so many bytes more than it has now, if any number."""
    limit, before = MEMORY_SHARE * available_memory()[0], resource.getrlimit(resource.RLIMIT_AS)
    try:
        if math.isfinite(limit):
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = int(pages * resource.getpagesize() + limit)
            soft = most if before[0] == resource.RLIM_INFINITY else min(most, before[0])
            resource.setrlimit(resource.RLIMIT_AS, (soft, before[1]))
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _sessions(recorded: Transcript) -> tuple[TranscriptReport, dict[int, list[RecordedRequest]]]:
    """Requests by session, without the sessions that only measure, which are noted.

    ``symbiosis-tenant doctor`` has rows of noise multiplied as if they were masks, and asks for no product
    of a model: there is nothing of a tenant's in such a session, and nothing under those "masks".
    """
    reading, sessions = TranscriptReport(), dict[int, list[RecordedRequest]]()
    for request in recorded.requests:
        if request.header.operation in PRODUCTS:
            sessions.setdefault(request.session, []).append(request)
    for session, requests in list(sessions.items()):
        if {r.header.operation for r in requests} == {Operation.EFFECT}:
            del sessions[session]
            reading.notes.append(
                f"session {session} (tenant {recorded.tenants[session]}) is left out: {len(requests)} "
                "effects and nothing else, as `symbiosis-tenant doctor` asks for"
            )
    return reading, sessions


def _nothing(reading: TranscriptReport, wanted: str, view: str, other: str) -> TranscriptError:
    noted = f" ({'; '.join(reading.notes)})" if reading.notes else ""
    return TranscriptError(
        f"the transcript holds no {wanted}, so there is nothing to attack as {view}{noted}; if tenants used "
        f"this executor as something else: --view {other}"
    )


def _token_attacks(view: View) -> list[Any]:
    known = [KnownMaskSubtraction()] if view.masks else []  # else this party knows none to subtract
    return [VocabularyMatching(), *known, MaskReuse(), SubspaceProjection(), NoiseAware(), Averaging()]


def _blind(attack: Any, view: View, rng: np.random.Generator, runs: int) -> list[torch.Tensor]:
    """How well guesses match where rows are uniform, of the shape of the session's, in each run."""
    findings = []
    for _ in range(runs):
        blind = view.blind(rng, {0})
        blind.masks = view.masks
        findings.append(attack.attack(blind, rng).match)
    return findings


def _is_better(match: torch.Tensor, blind: list[torch.Tensor]) -> bool:
    """Welch's test, and so large a difference that what the rows of one run have in common is not it.

    That is much for an attack that learns from all rows together: its runs differ as a whole.
    """
    means = [float(run.mean()) for run in blind]
    least = max(BETTER, SPREADS * (max(means) - min(means)))
    if len(match) < 2 or float(match.mean()) - max(means) < least:
        return False
    sides = [(float(m.mean()), float(m.std()), len(m)) for m in (match.double(), torch.cat(blind).double())]
    if not sides[0][1] + sides[1][1]:
        return True
    test = stats.ttest_ind_from_stats(*sides[0], *sides[1], equal_var=False, alternative="greater")
    return bool(test.pvalue < LEVEL)


def _best(guess: TokenGuess, count: int) -> torch.Tensor:
    """Of all runs of guesses for consecutive rows the one that matches best: [count], or all."""
    if len(guess.tokens) <= count:
        return guess.tokens
    sums = torch.cat([torch.zeros(1).double(), guess.match.double().cumsum(0)])
    first = int((sums[count:] - sums[:-count]).argmax())
    return guess.tokens[first : first + count]


def _not_uniform(view: View, randomness: Randomness) -> str | None:
    """Why these are no rows under one-time masks; None if nothing speaks against it."""
    if view.requests[0].raw.dtype != torch.int32:  # all of an executor's are of one kind
        return "they are floats"
    numbers, reasons = randomness.bytes_tested // 4, []
    if randomness.p_value < LEVEL and numbers >= MIN_NUMBERS:
        reasons.append(f"p = {randomness.p_value:.3g}: {randomness.worst}")
    for count, size, what in (
        (randomness.repeated_tops, 8, "runs of top bytes come again"),
        (randomness.repeated_blocks, 4, "blocks of 16 bytes come again"),
    ):
        if count and stats.poisson.sf(count - 1, (numbers / size) ** 2 / PAIRS) < LEVEL:
            reasons.append(f"{count:,} {what}")
    return "; ".join(reasons) or None


def _told(randomness: Randomness) -> str:
    return (
        f"p = {randomness.p_value:.3g} ({randomness.worst}); {randomness.repeated_blocks} repeated blocks, "
        f"{randomness.repeated_tops} repeated runs of top bytes"
    )


def _traffic(requests: list[RecordedRequest], rng: np.random.Generator) -> str:
    traffic = TrafficAnalysis().attack(requests, rng)
    lengths = ", ".join(map(str, traffic.prompts[:20])) or "none"
    return f"{len(products_of(requests)):,} products; passes of more rows than a decode step: {lengths}; " + (
        f"trains; gradients end at group {traffic.lowest}" if traffic.training else "does not train"
    )


def _tokenizer(model: Path) -> Any:
    try:
        return transformers.AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        return None  # the checkpoint has none: ids are shown


def _words(tokenizer: Any, tokens: torch.Tensor) -> str:
    ids = tokens.tolist()
    return str(tokenizer.decode(ids)) if tokenizer is not None else " ".join(map(str, ids))
