"""Attacks on a gateway's traffic: many sequences, of many adapters, in each request to the provider."""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

from security.attacks.batches import (
    AdapterOfRows,
    AdaptersInStep,
    ByteSearch,
    CachedPrefix,
    SequenceBoundary,
    StepCounts,
)
from security.attacks.masking import Uniformity
from security.attacks.streams import SpeculationWatch, Stream
from security.attacks.tokens import NoiseAware, SubspaceProjection, VocabularyMatching
from security.recordings.gateway_process import NO_GATEWAY, Gateway, Work, gateway, write_adapters
from security.recordings.workload import GroundTruth, SentRequest
from security.trials.context import Trials, sequences
from security.verdicts.findings import Finding, HostileFinding, NothingToScore, able, finding_of, of_guess
from security.verdicts.plan import (
    BLIND_RUNS,
    BOTH,
    GATEWAY,
    GATEWAY_LOOKUP,
    GATEWAY_PADDED,
    PROVIDER,
    SOURCE,
    AuditResult,
    Stage,
)
from security.verdicts.statistics import Estimate, rate
from security.views.adversaries import View, collusion_view, products_of, provider_view, requests_of
from security.views.public_model import PublicModel
from shared.wire.header import Direction

BASE = "base"  # what clients call the model without an adapter
TOGETHER = 4  # sequences of a burst
WAVE = 6  # sequences that come one by one
PAIR, LEAST = 24, 4  # rows of two prompts in one request, and of the shorter one
PROMPT, PHRASE, ANSWER = 24, 4, 24  # tokens: of a prompt that may repeat itself, of what it repeats, after it
LONG = 270  # tokens of a prompt that the cache of prefixes keeps a part of, in blocks of 128 or fewer
PADDED = 32
SPECULATION = "speculation of a gateway"
NOTHING = Estimate(0.0, 0.0, 0.0, 0)  # was measured, and no claim holds by that


class Gateways:
    """Runs gateways and the attacks on what the provider recorded of them.

    Args:
        trials: with what.
        command: that runs ``symbiosis-tenant``; None: there is none.
    """

    def __init__(self, trials: Trials, command: list[str] | None) -> None:
        self.trials, self.parties, self.plan, self.rng = trials, trials.parties, trials.plan, trials.rng
        self.command, self.confidence = command, trials.confidence
        self.folder = trials.folder / "gateways"
        self.key = secrets.token_urlsafe(24)
        self.names = [f"adapter-{secrets.token_hex(8)}" for _ in range(TOGETHER)]

    def run(self, result: AuditResult, stage: Stage) -> None:
        """Add what was found, or that nothing was looked for.

        Raises:
            AuditError: a gateway does not start.
        """
        if self.command is None:
            result.skipped[GATEWAY] = NO_GATEWAY
            return
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.parties.model)
        lines = self.trials.text * 8
        self.stream = [t for each in lines for t in tokenizer(each, add_special_tokens=False)["input_ids"]]
        write_adapters(self.parties.model, self.folder / "adapters", self.names)
        with stage("a gateway at work"):
            usual = self._usual(result)
        with (
            stage("a gateway that pads rows"),
            self._serving("gateway-padded", "--pad-rows", PADDED) as served,
        ):
            waves = self._waves(served)
        self._counts(result, GATEWAY_PADDED, "gateway-padded", *waves)
        with (
            stage("a gateway that speculates"),
            self._serving("gateway-lookup", "--speculate", "prompt-lookup") as served,
        ):
            kinds, works = self._repeating(served)
        self._speculation(result, usual, self._streams("gateway-lookup", works), kinds)

    @contextmanager
    def _serving(self, tenant: str, *more: Any) -> Iterator[Gateway]:
        """A gateway of a tenant's name, which has answered once: fingerprints come before that."""
        ring, source = self.parties.ring, self.parties.source
        tokens = {"GATEWAY_PROVIDER": ring.token(tenant), "GATEWAY_SOURCE": source.token(tenant)}
        self.parties.tokens.extend([*tokens.values(), self.key, *self.names])
        options = {
            "--provider": ring.url,
            "--ca": ring.ca,
            "--token-env": "GATEWAY_PROVIDER",
            "--mask-source": source.url,
            "--mask-source-ca": source.ca,
            "--mask-source-token-env": "GATEWAY_SOURCE",
            "--adapters": self.folder / "adapters",
            "--name": BASE,
            "--max-sequences": 2 * TOGETHER,
            "--kv-memory-gib": 0.25,
        }
        words = [word for option in options.items() for word in option]
        words += ["--privacy", "one-time", "--allow-same", "all", "--allow-transcript", *more]
        assert self.command is not None
        with gateway(self.command, words, tokens, self.key, self.folder / f"{tenant}.log") as served:
            served.ask([(BASE, self.stream[:4], 2)])
            yield served

    # -- what clients do ---------------------------------------------------------------------------

    def _bursts(self, served: Gateway) -> tuple[list[int], list[Work]]:
        """One prompt by four clients at once: all with one adapter (0), another (1), or each another (2)."""
        kinds = [int(k) for _ in range(self.plan.gateway_trials) for k in self.rng.permutation(3)]
        prompt = self.trials.text[0][:32]  # as text: what a client really sends
        works = []
        for kind in kinds:
            names = self.names if kind == 2 else [self.names[kind]] * TOGETHER
            works.append(served.ask([(name, prompt, 3) for name in names]))
        return kinds, works

    def _pairs(self, served: Gateway) -> tuple[list[int], list[Work]]:
        """Two prompts, each of one word, that come while an answer is in flight: lengths of the first."""
        lengths = [int(n) for n in self.rng.integers(LEAST, PAIR - LEAST + 1, 2 * self.plan.gateway_trials)]
        vocabulary = len(set(self.stream))
        words, works = sorted(set(self.stream)), []
        # Requests that come while a step is computed are in the next one together.
        with served.open(BASE, self.stream[:4], 8 * len(lengths), stream=True) as busy:
            busy.readline()
            for length in lengths:
                one, other = (words[int(i)] for i in self.rng.choice(vocabulary, 2, replace=False))
                prompts = [[one] * length, [other] * (PAIR - length)]
                works.append(served.ask([(BASE, prompts, 1)]))
            busy.read()
        return lengths, works

    def _waves(self, served: Gateway) -> tuple[list[list[int]], list[Work]]:
        """Prompts that come one by one, and answers of different lengths: lengths of the prompts."""
        lengths, works = [], []
        for _ in range(max(2, self.plan.gateway_trials // 4)):
            lengths.append([int(n) for n in self.rng.integers(5, 60, WAVE)])
            starts = self.rng.integers(0, len(self.stream) - 60, WAVE)
            prompts = [self.stream[at : at + n] for at, n in zip(starts, lengths[-1], strict=True)]
            requests = [(self.names[i % TOGETHER], p, 60 - 4 * i) for i, p in enumerate(prompts)]
            works.append(served.come_one_by_one(requests))
        return lengths, works

    def _repeating(self, served: Gateway) -> tuple[list[int], list[Work]]:
        """Prompts of one length, of which every second one repeats a phrase."""
        kinds, works = [0, 1] * self.plan.speculated_prompts, []
        for i, kind in enumerate(kinds):
            distinct = list(dict.fromkeys(self.stream[i * PROMPT :]))[:PROMPT]
            prompt = distinct if not kind else (distinct[:PHRASE] * PROMPT)[:PROMPT]
            works.append(served.ask([(BASE, prompt, ANSWER)]))
        return kinds, works

    def _again(self, served: Gateway) -> tuple[list[int], list[Work]]:
        """Long prompts: new ones (0), the same again (1), or the same with another adapter (0)."""
        kinds, works = list[int](), list[Work]()
        for i in range(self.plan.gateway_trials):
            prompt = self.stream[i * LONG : (i + 1) * LONG]
            first, again = (served.ask([(self.names[0], prompt, 1)]) for _ in range(2))
            other = served.ask([(self.names[1], prompt, 1)]) if i % 2 else first
            kinds, works = [*kinds, 0, 1], [*works, other, again]
        return kinds, works

    # -- what is made of it ------------------------------------------------------------------------

    def _usual(self, result: AuditResult) -> list[Stream]:
        """A gateway as it is by default; the streams of prompts that may repeat themselves."""
        executors = {PROVIDER: self.parties.ring, SOURCE: self.parties.source}
        before = {party: executor.newest.stat().st_size for party, executor in executors.items()}
        with self._serving("gateway", "--prefix-cache") as served:
            bursts, pairs, waves = self._bursts(served), self._pairs(served), self._waves(served)
            repeating, again = self._repeating(served), self._again(served)
        recorded = {party: executor.so_far() for party, executor in executors.items()}
        requests, masks = (requests_of([recorded[party]], "gateway") for party in executors)
        public = PublicModel(self.parties.model, recorded[PROVIDER].manifest)
        result.randomness[GATEWAY] = Uniformity().attack(provider_view(public, requests), self.rng)
        behind = public.group_of("layers.0.mlp.down_proj")  # its rows are what adapters changed first
        sent, known = ([r for r in each if r.header.group in (0, behind)] for each in (requests, masks))
        views: dict[str, View] = {
            PROVIDER: provider_view(public, sent),
            BOTH: collusion_view(public, sent, known),
        }
        result.findings += self._tokens(views, bursts[1] + repeating[1])
        for sees, view in views.items():
            result.findings += self._adapters(sees, view, behind, *bursts)
            result.findings.append(self._boundaries(sees, view, *pairs))
        self._counts(result, GATEWAY, "gateway", *waves)
        kinds, works = again
        rows = [during(views[PROVIDER], [work]).of(0)[0].count for work in works]
        guesses = CachedPrefix().attack((rows, kinds[: len(kinds) // 2]), self.rng)
        result.findings.append(self.trials.score_guesses(CachedPrefix, GATEWAY, guesses, kinds, PROVIDER))
        data = {party: _since(executor.newest, before[party]) for party, executor in executors.items()}
        result.figures["gateway, secrets found"] = ByteSearch(self._sought(public, bursts[1])).attack(
            data, self.rng
        )
        found = ByteSearch({b"gateway": "the tenant's name"}).attack(data, self.rng)
        result.figures["gateway, planted found"] = len(found) == len(data)
        result.figures["gateway, bytes searched"] = sum(map(len, data.values()))
        return self._streams("gateway", repeating[1])

    def _tokens(self, views: dict[str, View], works: list[Work]) -> list[Finding]:
        """What each row stands for: guessed by the provider, and read where masks are known."""
        view = during(views[PROVIDER], works)
        truth, read = self._truth(views[BOTH], works)
        findings = [finding_of(VocabularyMatching, GATEWAY, BOTH, read, None)]
        attacks: list[Any] = [VocabularyMatching(), SubspaceProjection(), NoiseAware()]
        for attack in attacks:
            blind = torch.cat(
                [attack.attack(view.blind(self.rng, {0}), self.rng).tokens for _ in range(BLIND_RUNS)]
            )
            try:
                success, chance = of_guess(attack.attack(view, self.rng), truth, blind, self.confidence)
                may = able(chance, success.trials, self.confidence, self.plan.resolution)
            except NothingToScore:  # the control fails too
                success, chance, may = NOTHING, 0.0, {}
            findings.append(finding_of(attack, GATEWAY, PROVIDER, success, chance, **may))
        return findings

    def _truth(self, both: View, works: list[Work]) -> tuple[GroundTruth, Estimate]:
        """Which token each row stands for, and how many of those that clients know of were read.

        In which order a gateway puts sequences into a request, its clients do not know. What is read without
        masks says it, where that is all that they sent and nothing else.
        """
        truth, right, sent = GroundTruth(), 0, 0
        for work in works:
            tokens = VocabularyMatching().attack(during(both, [work]), self.rng).tokens
            hits = (Counter(tokens.tolist()) & Counter(work.sent)).total()
            right, sent = right + hits, sent + len(work.sent)
            if not hits == len(work.sent) == len(tokens):
                tokens = torch.full_like(tokens, -1)
            truth.sent.append(SentRequest(0, Direction.FORWARD, len(tokens), tokens=tokens))
        return truth, rate(right, sent, self.confidence)

    def _adapters(
        self, sees: str, view: View, behind: int, kinds: list[int], works: list[Work]
    ) -> list[Finding]:
        """Which adapter, and whether it is one."""
        rows = [torch.cat([seen.raw for seen in during(view, [work]).of(behind)]) for work in works]

        def side(of: tuple[int, int]) -> tuple[list[torch.Tensor], list[int]]:
            chosen = [(each, of.index(kind)) for each, kind in zip(rows, kinds, strict=True) if kind in of]
            return [each for each, _ in chosen], [kind for _, kind in chosen]

        blocks, which = side((0, 1))
        answer = torch.tensor([kind for each, kind in zip(blocks, which, strict=True) for _ in each]).bool()
        half = sum(map(len, blocks[: len(blocks) // 2]))
        guesses = AdapterOfRows().attack((torch.cat(blocks), answer[:half]), self.rng)
        right, trials = int((guesses == answer[half:]).sum()), len(answer) - half
        may = able(0.5, trials, self.confidence, self.plan.resolution)
        score = rate(right, trials, self.confidence)
        of_rows = finding_of(AdapterOfRows, GATEWAY, sees, score, 0.5, **may)
        blocks, several = side((0, 2))
        guess = AdaptersInStep().attack((blocks, several[: len(several) // 2]), self.rng)
        return [of_rows, self.trials.score_guesses(AdaptersInStep, GATEWAY, guess, several, sees)]

    def _boundaries(self, sees: str, view: View, lengths: list[int], works: list[Work]) -> Finding:
        """Where one prompt ends and the next begins, of those that were computed in one request."""
        pairs = [
            (seen.raw[-PAIR:], length)
            for length, work in zip(lengths, works, strict=True)
            for seen in during(view, [work]).of(0)
            if seen.count in (PAIR, PAIR + 1)  # beside it the answer that is in flight, whose row is first
        ]
        guesses = SequenceBoundary(LEAST).attack([rows for rows, _ in pairs], self.rng)
        right = int((guesses == torch.tensor([length for _, length in pairs])).sum()) if pairs else 0
        return finding_of(
            SequenceBoundary,
            GATEWAY,
            sees,
            rate(right, len(pairs), self.confidence) if pairs else NOTHING,
            1 / (PAIR - 2 * LEAST + 1),
            f"{len(pairs)} of {len(works)} pairs came into one request",
        )

    def _counts(
        self, result: AuditResult, mode: str, tenant: str, lengths: list[list[int]], works: list[Work]
    ) -> None:
        """What numbers of rows say of sequences that come and go."""
        seen = [StepCounts().attack(list(each.rows), self.rng) for each in self._streams(tenant, works)]
        right = sum(
            a == b for s, own in zip(seen, lengths, strict=True) for a, b in zip(s.prompts, own, strict=False)
        )
        waves = len(lengths)
        guesses = (
            f"in {sum(s.most == WAVE for s in seen)} of {waves} waves the {WAVE} sequences that were "
            f"computed at once were counted, in {sum(s.ended == WAVE for s in seen)} all ends"
        )
        estimate = rate(right, WAVE * waves, self.confidence)
        result.findings.append(finding_of(StepCounts, mode, PROVIDER, estimate, None, guesses))
        result.figures[f"{StepCounts.name}, {mode}"] = guesses

    def _streams(self, tenant: str, works: list[Work]) -> list[Stream]:
        """Rows and times of the steps of each work, as the provider has them."""
        products = products_of(requests_of([self.parties.ring.so_far()], tenant))
        steps = [r for r in products if (r.header.group, r.header.direction) == (0, Direction.FORWARD)]
        of_works = [[r for r in steps if work.begin <= r.arrived <= work.end] for work in works]
        return [
            Stream(tuple(r.header.rows for r in each), tuple(r.arrived for r in each)) for each in of_works
        ]

    def _speculation(
        self, result: AuditResult, usual: list[Stream], lookup: list[Stream], kinds: list[int]
    ) -> None:
        """Whether a text repeats itself, by the numbers of a gateway that guesses, and of the usual one."""
        both = []
        for mode, streams in ((GATEWAY, usual), (GATEWAY_LOOKUP, lookup)):
            guesses = SpeculationWatch().attack((streams, kinds[: len(kinds) // 2]), self.rng)
            both.append(self.trials.score_guesses(SpeculationWatch, mode, guesses, kinds, PROVIDER))
        defended, control = both
        steps = [[len(s.rows) for s, kind in zip(lookup, kinds, strict=True) if kind == k] for k in (0, 1)]
        later = sorted({rows for stream in lookup for rows in stream.rows[1:]})
        result.figures["gateway, rows of a step that checks guesses"] = later
        result.figures["gateway, steps by text"] = {"ordinary": steps[0], "repeating": steps[1]}
        result.hostile.append(
            HostileFinding(
                SPECULATION,
                "one row a step for each sequence, unless --speculate is given",
                f"{len(kinds)} prompts of {PROMPT} tokens, half of which repeat a phrase, and {ANSWER} "
                f"tokens after each: by default {sequences({s.rows for s in usual})} of numbers of rows, "
                f"whatever the prompt. With --speculate prompt-lookup every later step has {later} rows, and "
                f"an ordinary prompt takes {np.mean(steps[0]):.1f} steps in the mean, a repeating one "
                f"{np.mean(steps[1]):.1f}: {control.hits} of {control.success.trials} were told apart.",
                defended,
                control,
                same=len({s.rows for s in usual}) == 1,
            )
        )
        result.findings += both

    def _sought(self, public: PublicModel, works: list[Work]) -> dict[bytes, str]:
        """What the provider must not be sent as it is."""
        text = self.trials.text[0][:32].encode()
        patterns = {name.encode(): "an adapter's name" for name in self.names}
        patterns |= {self.key.encode(): "an API key"}
        patterns |= {text[at : at + 8]: "text of a prompt" for at in range(0, len(text) - 8, 8)}
        tokens = works[0].sent
        for at in range(0, len(tokens) - 4, 4):
            patterns |= {
                np.array(tokens[at : at + 4], kind).tobytes(): "token ids" for kind in ("<i4", "<i8")
            }
        for row in public.first_inputs[torch.tensor(tokens)]:
            patterns[row.numpy().tobytes()[:24]] = "a row without its mask"
        for name in self.names:
            weights = load_file(self.folder / "adapters" / name / "adapter_model.safetensors")
            patterns |= {w.numpy().tobytes()[:24]: "an adapter's weights" for w in weights.values()}
        return patterns


def _since(file: Path, start: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(start)
        return opened.read()


def during(view: View, works: list[Work]) -> View:
    """Of what was seen what came while some work was done."""
    moments = [(work.begin, work.end) for work in works]
    return dataclasses.replace(
        view,
        requests=[
            seen for seen in view.requests if any(begin <= seen.arrived <= end for begin, end in moments)
        ],
    )
