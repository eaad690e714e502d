"""The whole audit: tenants at work in every privacy mode, every attack on every view, claims."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import tenant_sdk
from provider.executor import BaseExecutor
from provider.metrics import Metrics
from provider.server import Server, server_context
from provider.tokens import TokenFile
from security import capture, findings
from security.attacks.active import CanaryRows, CoTenantTiming, LyingProvider, Poison, WeightExtraction
from security.attacks.base import TokenGuess
from security.attacks.extraction import AdapterExtraction, StolenAdapter
from security.attacks.gradients import LabelRecovery, SpanCheck
from security.attacks.logs import LogScan, Secrets
from security.attacks.masking import DistinguishingGame, Randomness, Uniformity
from security.attacks.tokens import (
    Averaging,
    DeepMatching,
    KnownMaskSubtraction,
    MaskReuse,
    NoiseAware,
    SubspaceProjection,
    VocabularyMatching,
)
from security.attacks.traffic import TrafficAnalysis
from security.capture import ELSEWHERE, MODES, ONE_TIME, PLAIN, RING_BANK, SAME, Captured, Parties
from security.executors import AuditError, Executor
from security.findings import Finding, NothingToScore
from security.public_model import PublicModel
from security.statistics import Estimate, rate
from security.transcript import Request
from security.views import (
    View,
    collusion_view,
    mask_source_view,
    products_of,
    provider_view,
    requests_of,
)
from security.workload import FULL, QUICK, Sent, Size, Truth, blocks_of, generate, watch
from shared.header import Direction, Operation
from shared.messages import Limits
from tenant_sdk import NoiseBankOptions

PROVIDER, SOURCE, BOTH = "provider", "mask source", "provider and mask source"


@dataclass(frozen=True)
class Plan:
    """How much an audit does.

    ``family_error`` is the probability that chance alone makes any of the ``one-time`` rows look broken;
    each interval is widened accordingly (Bonferroni).
    """

    size: Size
    game_rows: int
    deep_places: int
    layers: int  # whose adapters are stolen
    replies: int
    lies: int
    timing_moments: int
    curve_masks: tuple[int, ...]
    family_error: float
    modes: tuple[str, ...] = MODES


FULL_PLAN = Plan(FULL, 290_000, 48, 6, 1_000_000, 25, 40, (4, 16, 64, 256), 0.01)
QUICK_PLAN = Plan(QUICK, 16_384, 16, 1, 20_000, 5, 8, (), 1e-4)


@dataclass
class Result:
    """Everything that the report shows."""

    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    randomness: dict[str, Randomness] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)


Stage = Callable[[str], Any]  # a context manager that shows what is being done


class Audit:
    """One audit.

    Args:
        model: checkpoint folder.
        text: lines of real text for the tenants.
        plan: how much.
        stage: shows progress, ``with stage("what"):``.
        seed: of everything random but masks, which are the operating system's.
    """

    def __init__(self, model: Path, text: list[str], plan: Plan, stage: Stage, seed: int = 0) -> None:
        self.model, self.text, self.plan, self.stage, self.seed = model, text, plan, stage, seed
        self.rng = np.random.default_rng(seed)
        # For the provider and for a mask source: 9 attacks, adapters of some layers; and one game.
        self.confidence = 1 - plan.family_error / (2 * (9 + plan.layers) + 1)
        self.result = Result()
        self.captured: dict[str, Captured] = {}
        self.games: dict[str, capture.Game] = {}
        self.stolen: dict[tuple[str, str, int], StolenAdapter] = {}

    def run(self, folder: Path) -> Result:
        """Capture, attack, and return what was found.

        Args:
            folder: an empty one for certificates, logs and transcripts.

        Raises:
            SymbiosisError: the audit could not be done; an attack that fails is not passed over.
        """
        started = time.time()
        with self.executors(folder) as parties:
            with capture.everything_logged() as self.book:
                self.capture(parties)
                self.active(parties)
            texts = self.texts(parties)
            self.tokens = parties.tokens
        self.collect(parties)
        self.passive()
        self.logs(texts)
        self.result.about |= {
            "model": self.public.manifest.model,
            "digest": self.public.manifest.digest,
            "seed": self.seed,
            "confidence_of_one_interval": self.confidence,
            "family_error": self.plan.family_error,
            "seconds": time.time() - started,
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "versions": {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
        }
        return self.result

    # -- capture ----------------------------------------------------------------------------------

    @contextmanager
    def executors(self, folder: Path) -> Iterator[Parties]:
        """Three executors, each a process with certificates of its own; stopped at the end."""
        made = [
            Executor(folder / name, self.model, numerics)
            for name, numerics in (("floats", "float32"), ("ring", "ring"), ("source", "ring"))
        ]
        try:
            with self.stage("starting three executors"):
                for executor in made:
                    executor.token("nobody")  # an executor wants a token file
                    executor.launch()
                for executor in made:
                    executor.await_ready()
            yield Parties(made[0], made[1], made[2], self.model)
        finally:
            for executor in made:
                executor.stop()

    def capture(self, parties: Parties) -> None:
        """All modes' workloads, the distinguishing game, and what is needed for plots."""
        plan = self.plan
        self.printed = ""
        for mode in plan.modes:
            with self.stage(f"a tenant at work: {mode}"):
                truth = capture.workload(parties, mode, self.text, plan.size, self.seed)
                self.captured[mode] = Captured(mode, truth)
        for mode in plan.modes:
            with self.stage(f"distinguishing game: {mode}"):
                rows = plan.game_rows if mode == ONE_TIME else min(plan.game_rows, 16_384)
                with parties.connect(mode, f"game-{MODES.index(mode)}") as session:
                    group = self._game_group(session)
                    answer = capture.play(session, group, rows, self.rng)
                    self.printed += capture.printed(session)
                self.games[mode] = capture.Game(torch.empty(0), answer)
        with self.stage("a mask source that crashes, and a reconnection"):
            self._crash(parties)
        with self.stage("traffic with and without padded rows"):
            self._traffic(parties)
        for masks in plan.curve_masks:
            with self.stage(f"prompts under {masks} masks"):
                self._bank(parties, masks)

    @staticmethod
    def _game_group(session: tenant_sdk.Session) -> int:
        groups = session.manifest.groups
        return min(
            range(len(groups)), key=lambda g: groups[g].inputs + sum(m.outputs for m in groups[g].members)
        )

    def _crash(self, parties: Parties) -> None:
        for crash in (True, False):
            with parties.connect(ONE_TIME, "crash") as session:
                truth = Truth()
                model = session.load_model(progress=False)
                tokenizer = session.load_tokenizer()
                prompt = torch.tensor([[0, *tokenizer(self.text[0], add_special_tokens=False)["input_ids"]]])
                generate(model, prompt, 2, truth)
            if crash:
                parties.source.restart(crash=True)

    def _traffic(self, parties: Parties) -> None:
        self.lengths: dict[str, list[int]] = {}
        for name, options in {"rows-as-they-are": {}, "rows-padded": {"pad_rows": 32}}.items():
            with parties.connect(ONE_TIME, name, **options) as session:
                model = session.load_model(progress=False)
                tokenizer = session.load_tokenizer()
                lengths = []
                for i, line in enumerate(self.text[:24]):
                    ids = tokenizer(line, add_special_tokens=False)["input_ids"][: 6 + i % 23]
                    prompt = torch.tensor([[0, *ids]])
                    generate(model, prompt, 2, Truth())
                    lengths.append(prompt.shape[1])
                self.lengths[name] = lengths

    def _bank(self, parties: Parties, masks: int) -> None:
        """Messages of 12 tokens through the first group alone, for the curve of mask reuse."""
        truth, name = Truth(), f"bank-{masks}"
        with parties.connect(ELSEWHERE, name, noise_bank=NoiseBankOptions(masks=masks)) as session:
            watch(session, truth)
            public = PublicModel(self.model, session.manifest)
            tokenizer = session.load_tokenizer()
            lines = self.text * 8
            stream = [t for line in lines for t in tokenizer(line, add_special_tokens=False)["input_ids"]]
            members = (1 << len(session.manifest.groups[0].members)) - 1
            for message in blocks_of(stream, 12, 0)[:768]:
                with truth.doing("prompt", message):
                    rows = public.first_inputs[message]
                    session._privacy.product(0, Direction.FORWARD, members, [rows])
        self.captured[name] = Captured(ELSEWHERE, truth)

    # -- active attacks ---------------------------------------------------------------------------

    def active(self, parties: Parties) -> None:
        """Attacks that send or answer."""
        with self.stage("answers that lie, checked and unchecked"):
            self._lies(parties)
        with self.stage("weights copied by a tenant"):
            for mode in {PLAIN, ONE_TIME}.intersection(self.plan.modes):
                with parties.connect(mode, f"copy-{MODES.index(mode)}") as session:
                    group = self._game_group(session)
                    copy = WeightExtraction(group).attack(session, self.rng)
                    real = PublicModel(self.model, session.manifest).weight(group)
                self.result.figures[f"weight extraction, {mode}"] = float((copy - real).norm() / real.norm())
        with self.stage(f"canaries of four tenants in {self.plan.replies:,} replies"):
            executor = BaseExecutor(self.model, numerics="ring")
            found = CanaryRows(2, self.plan.replies).attack(executor, self.rng)
            self.result.figures["canaries"] = {"wrong": found.wrong, "replies": found.replies}
        with self.stage("one tenant times another"):
            self._timing(parties)

    def _lies(self, parties: Parties) -> None:
        base = BaseExecutor(self.model, numerics="ring", recorded=True, limits=Limits(64 << 20, 65536))
        liar = LyingProvider(base)
        here = parties.ring.folder
        tokens = TokenFile(here / "tokens.json")
        server = Server(
            base, liar, context=server_context(here / "tls"), tokens=tokens, metrics=Metrics(), port=0
        )
        try:
            for verify in ("always", "off"):
                noticed: dict[str, list[bool]] = {kind: [] for kind in Poison.LIES}
                with parties.connect(ONE_TIME, "lied-to", verify=verify, provider=server.url) as session:
                    poison = Poison(liar, self._game_group(session), rows=8)
                    for _ in range(self.plan.lies):
                        for kind in Poison.LIES:
                            noticed[kind].append(poison.attack(session, kind, self.rng))
                every = [each for found in noticed.values() for each in found]
                self.result.findings.append(
                    Finding(
                        Poison.name,
                        f"{ONE_TIME}, verify={verify}",
                        "malicious provider",
                        Poison.metric,
                        rate(sum(every), len(every), self.confidence),
                        0.0,
                        ", ".join(f"{kind}: {sum(found)} of {len(found)}" for kind, found in noticed.items()),
                    )
                )
        finally:
            server.drain(1.0)

    def _timing(self, parties: Parties) -> None:
        with (
            parties.connect(PLAIN, "watcher") as watcher,
            parties.connect(PLAIN, "watched") as watched,
        ):
            width = watcher.manifest.groups[0].inputs
            members = (1 << len(watcher.manifest.groups[0].members)) - 1

            def send(session: tenant_sdk.Session, rows: int) -> Callable[[], Any]:
                block = torch.ones(rows, width)
                return lambda: session._privacy.product(0, Direction.FORWARD, members, [block])

            attack = CoTenantTiming(send(watcher, 1), send(watched, 512), self.plan.timing_moments)
            idle, busy = attack.attack(None, self.rng)
        pairs = (busy[:, None] > idle[None, :]).mean() + 0.5 * (busy[:, None] == idle[None, :]).mean()
        self.result.figures["co-tenant timing"] = {
            "told_apart": float(pairs),
            "median_idle_seconds": float(np.median(idle)),
            "median_busy_seconds": float(np.median(busy)),
        }

    # -- passive attacks --------------------------------------------------------------------------

    def texts(self, parties: Parties) -> dict[str, str]:
        """What all programs wrote, while the executors still show their metrics."""
        return {
            "the tenant's log": self.book.text,
            "the tenant's objects, printed": self.printed,
            **{f"metrics of executor {e.folder.name}": capture.metrics_page(e) for e in parties.all()},
            **{
                f"the log of executor {e.folder.name}": e.log.read_text(errors="replace")
                for e in parties.all()
            },
        }

    def collect(self, parties: Parties) -> None:
        """Read the transcripts."""
        with self.stage("reading transcripts"):
            floats, ring, source = (executor.transcripts() for executor in parties.all())
            self.public = PublicModel(self.model, floats[0].manifest)
            self.ring_public = PublicModel(self.model, ring[0].manifest)
            for name, captured in self.captured.items():
                tenant = capture.tenant_of(name) if name in MODES else name
                on_ring = captured.mode in (RING_BANK, ONE_TIME)
                captured.provider = requests_of(ring if on_ring else floats, tenant)
                captured.source = requests_of(source, tenant)
            for mode, game in self.games.items():
                tenant = f"game-{MODES.index(mode)}"
                requests = requests_of(ring if mode in (RING_BANK, ONE_TIME) else floats, tenant)
                self.games[mode] = capture.game_of(products_of(requests), game.answer)
            self.crash = products_of(requests_of(ring, "crash"))
            self.game_requests = products_of(requests_of(ring, f"game-{MODES.index(ONE_TIME)}"))
            self.traffic = {name: requests_of(ring, name) for name in self.lengths}

    def passive(self) -> None:
        """Every attack on every view of every mode."""
        middle = self.public.model.config.num_hidden_layers // 2
        self._deep = DeepMatching(
            self.public.group_of(f"layers.{middle}.self_attn.q_proj"), {}, self.plan.deep_places
        )
        for mode in self.plan.modes:
            captured = self.captured[mode]
            public = self.ring_public if mode in (RING_BANK, ONE_TIME) else self.public
            with self.stage(f"attacks on {mode}"):
                view = provider_view(public, captured.provider)
                self._check_aligned(view, captured)
                self._on(mode, PROVIDER, view, captured.truth)
                if mode == ONE_TIME:
                    source = mask_source_view(public, captured.source)
                    self._on(mode, SOURCE, source, captured.truth)
                    both = collusion_view(public, captured.provider, captured.source)
                    self._on(mode, BOTH, both, captured.truth)
        for mode, game in self.games.items():
            with self.stage(f"distinguishing: {mode}"):
                self._distinguish(mode, game)
        for mode in {RING_BANK, ONE_TIME}.intersection(self.plan.modes):
            with self.stage(f"uniformity of bytes: {mode}"):
                requests = products_of(self.captured[mode].provider)
                if mode == ONE_TIME:
                    requests = requests + self.crash + self.game_requests
                self.result.randomness[mode] = Uniformity().attack(
                    provider_view(self.ring_public, requests), self.rng
                )
        with self.stage("curves"):
            self._curves()
        self._read_traffic()

    def _check_aligned(self, view: View, captured: Captured) -> None:
        rows = sum(sent.rows for sent in captured.truth.of(0))
        if rows != len(view.first):
            raise AuditError(
                f"the transcript of {captured.mode} holds {len(view.first)} rows of the first group, but the "
                f"tenant sent {rows}: the attacks could not be scored"
            )

    def _on(self, mode: str, sees: str, view: View, truth: Truth) -> None:
        repeats: dict[str, list[int]] = {}
        for i, sent in self._repeated(truth, 0).items():
            repeats.setdefault(sent.phase, []).append(i)
        attacks = (
            VocabularyMatching(),
            KnownMaskSubtraction(),
            MaskReuse(),
            SubspaceProjection(),
            NoiseAware(),
            Averaging(list(repeats.values())),
        )
        for attack in attacks:
            guess: TokenGuess = attack.attack(view, self.rng)
            self._found(attack, mode, sees, lambda g=guess: findings.of_guess(g, truth, self.confidence))
        deep = self._deep_attack(truth)
        guesses, wanted = deep.attack(view, self.rng)
        self._found(deep, mode, sees, lambda: findings.of_tokens(guesses, wanted, self.confidence))
        labels = LabelRecovery()
        last = view.public.group_of(f"layers.{view.public.model.config.num_hidden_layers - 1}.mlp.down_proj")
        guessed = labels.attack(view, self.rng)
        self._found(labels, mode, sees, lambda: findings.of_labels(guessed, truth, last, self.confidence))
        span = SpanCheck()
        ranked = span.attack(view, self.rng)
        self._found(span, mode, sees, lambda: findings.of_spans(ranked, truth, span.rows, self.confidence))
        for layer in range(self.plan.layers):
            self._steal(mode, sees, view, truth, layer)

    def _found(
        self, attack: Any, mode: str, sees: str, score: Callable[[], tuple[Estimate, float]], detail: str = ""
    ) -> None:
        try:
            success, chance = score()
        except NothingToScore:
            # The view holds nothing of the kind: as good as a guess, and said so.
            success, chance, detail = Estimate(0.0, 0.0, 0.0, 0), 0.0, "this party sees nothing of the kind"
        self.result.findings.append(Finding(attack.name, mode, sees, attack.metric, success, chance, detail))

    def _repeated(self, truth: Truth, group: int) -> dict[int, Sent]:
        """Requests of a group for prompts that were sent again and again, by their place."""
        return {i: sent for i, sent in enumerate(truth.of(group)) if sent.phase.startswith("repeat")}

    def _deep_attack(self, truth: Truth) -> DeepMatching:
        # The same for all modes, since prompts are the same, and so the tables of candidates are.
        group = self._deep.group
        self._deep.prompts = {
            i: sent.tokens for i, sent in self._repeated(truth, group).items() if sent.tokens is not None
        }
        return self._deep

    def _steal(self, mode: str, sees: str, view: View, truth: Truth, layer: int) -> None:
        attack = AdapterExtraction(layer)
        stolen = attack.attack(view, self.rng)
        real = truth.adapter[f"{layer}.mlp.up_proj"]
        try:
            success, more = findings.of_adapter(stolen, real, self.confidence, self.rng)
        except NothingToScore:
            self._found(attack, mode, sees, _nothing)
            return
        detail = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in more.items())
        self.result.findings.append(
            Finding(f"{attack.name}, layer {layer}", mode, sees, attack.metric, success, 0.0, detail)
        )
        self.result.figures[f"adapter extraction, layer {layer}, {mode}, {sees}"] = more
        self.stolen[mode, sees, layer] = stolen

    def _distinguish(self, mode: str, game: capture.Game) -> None:
        half = len(game.answer) // 2
        guesses = DistinguishingGame().attack((game.rows, game.answer[:half]), self.rng)
        success = findings.advantage(guesses, game.answer[half:], self.confidence)
        self.result.findings.append(
            Finding(DistinguishingGame.name, mode, PROVIDER, DistinguishingGame.metric, success, 0.0)
        )

    def _curves(self) -> None:
        """Recovery against messages for each number of masks; stolen adapters against tokens."""
        reuse: dict[str, list[tuple[int, float]]] = {}
        for name, captured in self.captured.items():
            if captured.mode not in (ELSEWHERE, RING_BANK) or (
                name in MODES and self.plan.curve_masks and captured.mode == ELSEWHERE
            ):
                continue
            view = provider_view(
                self.public if captured.mode == ELSEWHERE else self.ring_public, captured.provider
            )
            messages = sum(len(seen.rows) > 1 for seen in view.of(0))
            points = []
            for count in [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768) if n <= messages]:
                guess = MaskReuse(count).attack(view, self.rng)
                points.append((count, findings.of_guess(guess, captured.truth, self.confidence)[0].value))
            label = captured.mode if name in MODES else f"{name.removeprefix('bank-')} masks"
            reuse[label] = points
        self.result.figures["mask reuse"] = reuse
        self.result.figures["broken after messages"] = {
            label: next((count for count, value in points if value >= 0.95), None)
            for label, points in reuse.items()
        }
        if PLAIN not in self.captured:
            return
        curve = []
        captured = self.captured[PLAIN]
        view = provider_view(self.public, captured.provider)
        real = captured.truth.adapter["0.mlp.up_proj"]
        for tokens in [n for n in (64, 128, 256, 384, 512, 1024, 2048, 4096) if n <= self.plan.size.tokens]:
            stolen = AdapterExtraction(0, tokens).attack(view, self.rng)
            curve.append((tokens, float((stolen.delta - real).norm() / real.norm())))
        self.result.figures["adapter error by tokens"] = curve

    def _read_traffic(self) -> None:
        """What headers say about prompts, with and without padded rows, and about training."""
        for name, lengths in self.lengths.items():
            inferred = TrafficAnalysis().attack(self.traffic[name], self.rng)
            right = sum(a == b for a, b in zip(inferred.prompts, lengths, strict=False))
            self.result.findings.append(
                Finding(
                    TrafficAnalysis.name,
                    f"{ONE_TIME}, {name.replace('-', ' ')}",
                    PROVIDER,
                    TrafficAnalysis.metric,
                    rate(right, len(lengths), self.confidence),
                    0.0,
                    f"{len(inferred.prompts)} prompts seen of {len(lengths)}",
                )
            )
        seen = TrafficAnalysis().attack(self.captured[ONE_TIME].provider, self.rng)
        self.result.figures["traffic"] = {
            "training noticed": seen.training,
            "lowest group with gradients": seen.lowest,
            "rows and seconds": [
                (request.header.rows, request.seconds)
                for request in products_of(self.captured[ONE_TIME].provider)
                if request.header.group == 0
            ][:2000],
        }

    def logs(self, texts: dict[str, str]) -> None:
        """Search everything that was written for what was secret."""
        with self.stage("searching logs, metrics and printed objects"):
            truth = self.captured[ONE_TIME].truth
            varied = [b for sent in truth.sent for b in sent.blocks or [] if len(b[0].unique()) > 3]
            requests = self.captured[ONE_TIME].provider
            secrets = Secrets(
                tensors=varied[:200]
                + [r.rows for r in products_of(requests)[:200]]
                + list(truth.adapter.values()),
                seeds=[
                    bytes(r.payload)
                    for r in self.captured[ONE_TIME].source
                    if r.header.operation == Operation.SEED_EFFECT
                ],
                token_ids=[int(t) for t in truth.first_tokens()[:400] if t >= 0],
                text=truth.text,
                passwords=self.tokens,
            )
            self.result.figures["secrets in logs"] = LogScan(secrets).attack(texts, self.rng)
            self.result.figures["log characters searched"] = {
                where: len(text) for where, text in texts.items()
            }


def _nothing() -> tuple[Estimate, float]:
    raise NothingToScore
