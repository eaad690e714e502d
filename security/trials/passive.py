"""The attacks on recordings: every one on every view of every mode, scored."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from security.attacks.base import TokenGuess
from security.attacks.extraction import AdapterExtraction
from security.attacks.gradients import LabelRecovery, SpanCheck
from security.attacks.logs import PLANTED, LogScan, Secrets
from security.attacks.masking import DistinguishingGame, Uniformity
from security.attacks.seeds import SeedPrediction
from security.attacks.tokens import (
    Averaging,
    DeepMatching,
    KnownMaskSubtraction,
    MaskReuse,
    NoiseAware,
    SubspaceProjection,
    VocabularyMatching,
)
from security.attacks.traffic import TrafficAnalysis, TrafficAnalysisOutside, network_view
from security.recordings.capture import ELSEWHERE, MODES, ONE_TIME, PLAIN, RING_BANK, CapturedSession, Game
from security.recordings.transcript import RecordedRequest
from security.recordings.workload import ADAPTER_TOKENS, GroundTruth, SentRequest
from security.verdicts import findings
from security.verdicts.findings import NothingToScore
from security.verdicts.plan import BLIND_RUNS, BOTH, NETWORK, PROVIDER, AuditPlan, AuditResult, Stage
from security.verdicts.statistics import POWER, Estimate, rate
from security.views.adversaries import (
    MaskSourceView,
    View,
    check_aligned,
    collusion_view,
    mask_source_view,
    products_of,
    provider_view,
)
from security.views.public_model import PublicModel

CURVE_ROWS = 500  # that the curves of mask reuse are drawn from


@dataclass(frozen=True)
class Evidence:
    """What was recorded. By mode, or by the name of the session: ``captured``, ``games``, ``traffic``.

    ``public`` and ``ring_public`` are the base model with the manifests of a float and of a ring executor;
    ``crash`` and ``game_requests`` further one-time requests; ``lengths`` the prompts of ``traffic``.
    ``operations`` says how often which operation was asked of ``PROVIDER`` and ``SOURCE``, on the ring and
    in all sessions; ``seeds`` are all that the mask source was sent.
    """

    public: PublicModel
    ring_public: PublicModel
    captured: dict[str, CapturedSession]
    games: dict[str, Game]
    crash: list[RecordedRequest]
    game_requests: list[RecordedRequest]
    traffic: dict[str, list[RecordedRequest]]
    lengths: dict[str, list[int]]
    operations: dict[str, dict[str, int]]
    seeds: MaskSourceView


class PassiveAttacks:
    """Runs them and adds what they found to a result.

    Args:
        confidence: of each interval.
    """

    def __init__(
        self,
        evidence: Evidence,
        plan: AuditPlan,
        result: AuditResult,
        rng: np.random.Generator,
        confidence: float,
        stage: Stage,
    ) -> None:
        self.evidence, self.plan, self.result = evidence, plan, result
        self.rng, self.confidence, self.stage = rng, confidence, stage

    def prepare(self) -> None:
        """What attacks on several modes share."""
        middle = self.evidence.public.model.config.num_hidden_layers // 2
        self._deep = DeepMatching(
            self.evidence.public.group_of(f"layers.{middle}.self_attn.q_proj"), {}, self.plan.deep_places
        )
        with self.stage("the same attacks without rows"):
            captured = self.evidence.captured[ONE_TIME]
            view = provider_view(self.evidence.ring_public, captured.provider)
            self._guess_blindly(view, captured.truth)

    def attack(self) -> None:
        """Every attack on every view of every mode."""
        self.prepare()
        for mode in self.plan.modes:
            captured = self.evidence.captured[mode]
            public = self.evidence.ring_public if mode in (RING_BANK, ONE_TIME) else self.evidence.public
            with self.stage(f"attacks on {mode}"):
                view = provider_view(public, captured.provider)
                check_aligned(view, captured.truth, mode)
                self._on(mode, PROVIDER, view, captured.truth)
                if mode == ONE_TIME:
                    both = collusion_view(public, captured.provider, captured.source)
                    self._on(mode, BOTH, both, captured.truth)
        for mode, game in self.evidence.games.items():
            with self.stage(f"distinguishing: {mode}"):
                self._distinguish(mode, game)
        self.structure()
        with self.stage("curves"):
            self._curves()
        self._read_traffic()

    def structure(self) -> None:
        """What was sent to whom, and whether masks and seeds are random and served once."""
        for mode in sorted({RING_BANK, ONE_TIME}.intersection(self.plan.modes)):
            with self.stage(f"uniformity of bytes: {mode}"):
                requests = products_of(self.evidence.captured[mode].provider)
                if mode == ONE_TIME:
                    requests = requests + self.evidence.crash + self.evidence.game_requests
                self.result.randomness[mode] = Uniformity().attack(
                    provider_view(self.evidence.ring_public, requests), self.rng
                )
        self.result.figures["operations"] = self.evidence.operations
        self.result.seeds = SeedPrediction().attack(self.evidence.seeds, self.rng)

    def _token_attacks(self, truth: GroundTruth) -> list[Any]:
        repeats: dict[str, list[int]] = {}
        for i, sent in self._repeated(truth, 0).items():
            repeats.setdefault(sent.phase, []).append(i)
        return [
            VocabularyMatching(),
            KnownMaskSubtraction(),
            MaskReuse(),
            SubspaceProjection(),
            NoiseAware(),
            Averaging(list(repeats.values())),
        ]

    def _guess_blindly(self, view: View, truth: GroundTruth) -> None:
        """What every attack guesses without the tenant's rows, and who does not even attack."""
        deep, labels, span = self._deep_attack(truth), LabelRecovery(), SpanCheck()
        pooled: dict[str, list[torch.Tensor]] = {}
        for _ in range(BLIND_RUNS):
            blind = view.blind(self.rng, {0, deep.group, labels.group(view.public)})
            tokens_by_attack = {
                each.name: [each.attack(blind, self.rng).tokens] for each in self._token_attacks(truth)
            }
            tokens_by_attack[deep.name] = [deep.attack(blind, self.rng)[0]]
            tokens_by_attack[labels.name] = labels.attack(blind, self.rng)
            tokens_by_attack[span.name] = [part for parts in span.attack(blind, self.rng) for part in parts]
            for name, guesses in tokens_by_attack.items():
                pooled.setdefault(name, []).extend(guesses)
        self._blind_parts = pooled.pop(span.name)
        self._blind = {name: torch.cat([torch.empty(0).long(), *each]) for name, each in pooled.items()}
        known = truth.first_tokens()
        commonest = int(view.public.own_text(0).flatten().bincount().argmax())
        self.result.figures["right without any row"] = float((known[known >= 0] == commonest).float().mean())

    def _on(self, mode: str, sees: str, view: View, truth: GroundTruth) -> None:
        for attack in self._token_attacks(truth):
            if isinstance(attack, KnownMaskSubtraction) and not view.masks:
                continue  # nothing to subtract: vocabulary matching once more
            guess: TokenGuess = attack.attack(view, self.rng)
            self._found(
                attack, mode, sees, partial(findings.of_guess, guess, truth, self._blind[attack.name])
            )
        deep = self._deep_attack(truth)
        guesses, wanted = deep.attack(view, self.rng)
        self._found(deep, mode, sees, partial(findings.of_tokens, guesses, wanted, self._blind[deep.name]))
        labels = LabelRecovery()
        guessed = labels.attack(view, self.rng)
        score = partial(
            findings.of_labels, guessed, truth, labels.group(view.public), self._blind[labels.name]
        )
        self._found(labels, mode, sees, score)
        span = SpanCheck()
        ranked = span.attack(view, self.rng)
        self._found(span, mode, sees, partial(findings.of_spans, ranked, truth, span.ROWS, self._blind_parts))
        self._steal(mode, sees, view, truth)

    def _found(
        self,
        attack: Any,
        mode: str,
        sees: str,
        score: Callable[[float], tuple[Estimate, float]],
        detail: str = "",
    ) -> None:
        able: dict[str, float | None] = {}
        try:
            success, chance = score(self.confidence)
            if attack is AdapterExtraction:
                # Found is a cosine whose noise, on the side of chance, stays within what is left.
                width, noise = (each.value - each.low for each in (success, score(2 * POWER - 1)[0]))
                able = {"resolution": width, "below": width, "detectable": width + noise}
            else:
                able = findings.able(chance, success.trials, self.confidence, self.plan.resolution)
        except NothingToScore:
            # The view holds nothing of the kind: as good as a guess, and said so.
            success, chance, detail = Estimate(0.0, 0.0, 0.0, 0), 0.0, "this party sees nothing of the kind"
        self.result.findings.append(findings.finding_of(attack, mode, sees, success, chance, detail, **able))

    def _repeated(self, truth: GroundTruth, group: int) -> dict[int, SentRequest]:
        """Requests of a group for prompts that were sent again and again, by their place."""
        return {i: sent for i, sent in enumerate(truth.of(group)) if sent.phase.startswith("repeat")}

    def _deep_attack(self, truth: GroundTruth) -> DeepMatching:
        # The same for all modes, since prompts are the same, and so the tables of candidates are.
        group = self._deep.group
        self._deep.prompts = {
            i: sent.tokens for i, sent in self._repeated(truth, group).items() if sent.tokens is not None
        }
        return self._deep

    def _compare_models(
        self, stolen: dict[int, torch.Tensor], truth: GroundTruth, public: PublicModel
    ) -> None:
        """How often the stolen model predicts what the tenant's does, and how often the base model."""
        parts = [sent.tokens for sent in truth.of(0) if sent.phase == "adapter" and sent.tokens is not None]
        tokens = torch.cat(parts).view(-1, ADAPTER_TOKENS)[:16]
        real = {f"layers.{name}.weight": delta for name, delta in truth.adapter.items()}
        copied = {f"layers.{layer}.mlp.up_proj.weight": delta for layer, delta in stolen.items()}
        theirs = public.predictions(tokens, real)
        self.result.figures["agreement with the tenant's model"] = {
            name: float((public.predictions(tokens, changes) == theirs).float().mean())
            for name, changes in (("stolen", copied), ("base", {}))
        } | {"places": tokens.numel()}

    def _steal(self, mode: str, sees: str, view: View, truth: GroundTruth) -> None:
        layers = self.plan.layers.get((mode, sees), 1)
        stolen = {layer: AdapterExtraction(layer).attack(view, self.rng) for layer in range(layers)}
        pairs = [(copy, truth.adapter[f"{layer}.mlp.up_proj"]) for layer, copy in stolen.items()]
        errors = []
        for layer, (copy, real) in enumerate(pairs):
            if copy.tokens:
                more = findings.of_copy(copy, real)
                self.result.figures[f"adapter extraction, layer {layer}, {mode}, {sees}"] = more
                errors.append(f"layer {layer}: relative error {more['relative_error']:.2g}")
        score = partial(findings.of_adapters, pairs)
        self._found(AdapterExtraction, mode, sees, score, "; ".join(errors))
        if layers == len(truth.adapter):
            self._compare_models({layer: copy.delta for layer, copy in stolen.items()}, truth, view.public)

    def _distinguish(self, mode: str, game: Game) -> None:
        half = len(game.answer) // 2
        guesses = DistinguishingGame().attack((game.rows, game.answer[:half]), self.rng)
        success = findings.advantage(guesses, game.answer[half:], self.confidence)
        able = findings.able(0.5, success.trials, self.confidence, self.plan.resolution, scale=2)
        self.result.findings.append(
            findings.finding_of(DistinguishingGame, mode, PROVIDER, success, 0.0, **able)
        )

    def _curves(self) -> None:
        """Recovery against messages for each number of masks; stolen adapters against tokens."""
        reuse: dict[str, list[tuple[int, float]]] = {}
        for name, captured in self.evidence.captured.items():
            if captured.mode not in (ELSEWHERE, RING_BANK) or (
                name in MODES and self.plan.curve_masks and captured.mode == ELSEWHERE
            ):
                continue
            view = provider_view(
                self.evidence.public if captured.mode == ELSEWHERE else self.evidence.ring_public,
                captured.provider,
            )
            check_aligned(view, captured.truth, name)
            messages = sum(seen.count > 1 for seen in view.of(0))
            points = []
            for count in [n for n in self.plan.curve_messages if n <= messages]:
                guess = MaskReuse(count, CURVE_ROWS).attack(view, self.rng)
                blind = self._blind[MaskReuse.name]
                score = findings.of_guess(guess, captured.truth, blind, self.confidence)[0]
                points.append((count, score.value))
            label = captured.mode if name in MODES else f"{name.removeprefix('bank-')} masks"
            reuse[label] = points
        self.result.figures["mask reuse"] = reuse
        self.result.figures["broken after messages"] = {
            label: _from(points, 0.95) for label, points in reuse.items()
        }
        if PLAIN not in self.evidence.captured:
            return
        curve = []
        captured = self.evidence.captured[PLAIN]
        view = provider_view(self.evidence.public, captured.provider)
        real = captured.truth.adapter["0.mlp.up_proj"]
        for tokens in [n for n in self.plan.curve_tokens if n <= self.plan.size.tokens]:
            stolen = AdapterExtraction(0, tokens).attack(view, self.rng)
            curve.append((tokens, float((stolen.delta - real).norm() / real.norm())))
        self.result.figures["adapter error by tokens"] = curve

    def _read_traffic(self) -> None:
        """What headers say about prompts, with and without padded rows, and about training."""
        for name, lengths in self.evidence.lengths.items():
            manifest = self.evidence.ring_public.manifest
            first = manifest.groups[0].inputs * 4
            outside = TrafficAnalysisOutside(first, sum(not group.head for group in manifest.groups))
            requests = products_of(self.evidence.traffic[name])
            for attack, sees, prompts in (
                (TrafficAnalysis, PROVIDER, TrafficAnalysis().attack(requests, self.rng).prompts),
                (TrafficAnalysisOutside, NETWORK, outside.attack(network_view(requests), self.rng)),
            ):
                # What comes first are the rows that fingerprints are tried with, of a number that is known.
                right = sum(a == b for a, b in zip(prompts[-len(lengths) :], lengths, strict=False))
                mode = f"{ONE_TIME}, {name.replace('-', ' ')}"
                success = rate(right, len(lengths), self.confidence)
                self.result.findings.append(findings.finding_of(attack, mode, sees, success, None))
        ranks = [
            [request.header._replace(request_id=0) for request in self.evidence.traffic[name]]
            for name in self.evidence.traffic
            if name.startswith("rank-")
        ]
        seen = TrafficAnalysis().attack(self.evidence.captured[ONE_TIME].provider, self.rng)
        self.result.figures["traffic"] = {
            "training noticed": seen.training,
            "rank changes headers": any(headers != ranks[0] for headers in ranks),
            "lowest group with gradients": seen.lowest,
            "rows and seconds": [
                (request.header.rows, request.seconds)
                for request in products_of(self.evidence.captured[ONE_TIME].provider)
                if request.header.group == 0 and not math.isnan(request.seconds)
            ][:2000],
        }

    def search(self, texts: dict[str, str], passwords: list[str], planted: str) -> None:
        """Search everything that was written for what was secret, and for what was planted there."""
        with self.stage("searching logs, metrics and printed objects"):
            truth = self.evidence.captured[ONE_TIME].truth
            requests = self.evidence.captured[ONE_TIME].provider
            secrets = Secrets(
                tensors=truth.samples
                + [r.rows for r in products_of(requests)[:200]]
                + list(truth.adapter.values()),
                seeds=mask_source_view(self.evidence.captured[ONE_TIME].source).seeds,
                token_ids=[int(t) for t in truth.first_tokens()[:400] if t >= 0],
                text=truth.text,
                passwords=passwords,
                planted=planted,
            )
            secrets_found = LogScan(secrets).attack(texts, self.rng)
            control = {where: f"{PLANTED} in {where}" for where in texts}
            self.result.figures["secrets in logs"] = [
                each for each in secrets_found if each not in control.values()
            ]
            self.result.figures["planted secret found"] = {
                where: each in secrets_found
                for where, each in control.items()
                if not where.startswith("metrics")
            }
            self.result.figures["log characters searched"] = {
                where: len(text) for where, text in texts.items()
            }


def _from(points: list[tuple[int, float]], least: float) -> int | None:
    """The first count from which on the value is at least so large."""
    first = None
    for count, value in reversed(points):
        if value < least:
            break
        first = count
    return first
