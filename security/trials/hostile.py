"""Attacks of an active provider: each one where it should fail, and with its defence off."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from security.attacks.hostile_provider import AbortOracle, ImprintedEmbeddings, ImprintedHead, craft
from security.attacks.streams import (
    KnownTexts,
    LabelledStreams,
    SpeculationWatch,
    Stream,
    TopicFromTraffic,
)
from security.recordings.capture import ONE_TIME, PLAIN
from security.recordings.executors import AuditError
from security.recordings.workload import GroundTruth, blocks_of, tune, watch
from security.trials.context import PROMPT, HostedExecutor, Trials, sequences
from security.verdicts import findings
from security.verdicts.findings import Finding, HostileFinding
from security.verdicts.plan import BLIND_RUNS, MALICIOUS, PROVIDER, AuditResult, Stage
from security.verdicts.statistics import rate
from security.views.adversaries import check_aligned, products_of, provider_view, requests_of, whole
from security.views.public_model import PublicModel
from shared.errors import VerificationError
from shared.wire.header import Direction
from tenant_sdk.connection.remote import LazyResult
from tenant_sdk.drafts.decoding import DraftPace
from tenant_sdk.drafts.folder import load_draft
from tenant_sdk.drafts.making import DraftCallbacks, make_draft
from tenant_sdk.drafts.options import DraftOptions
from tenant_sdk.session.session import Session

TOLERANCE = 1.0  # of the control's tenant, far above what rounding does to the oracle's rows
NEW = 5  # tokens that are generated
LOOKED_UP = 8  # tokens that are guessed from the prompt at once
ANSWER = 6  # tokens at most that follow a prompt on a topic
WRITTEN = 24  # tokens of a known text
TIMES = 3  # that each known text is written; the last time is the one to recognise
GUESSED = 4  # tokens that a draft guesses at once
DRAFT_LINES = 80  # of text that a draft learns
PACE = 2.0  # of what a pass takes; a shorter pace could not be kept
HowToGenerate = Callable[[Session, Any], dict[str, Any]]
CLAUSE = re.compile(r"[.:;,!?\n]\s*")


class HostileProvider:
    """Runs the attacks of a provider; ``trials``: with what."""

    def __init__(self, trials: Trials) -> None:
        self.trials, self.parties, self.plan, self.rng = trials, trials.parties, trials.plan, trials.rng
        self._streamed = 0

    def run(self, result: AuditResult, stage: Stage) -> None:
        """Add what was found; to add an attack, add its method here."""
        self.trials.perform(
            {
                "wrong answers to watch who stops": self.abort_oracle,
                "parameters made to give tokens away": self.imprints,
                "numbers of rows with and without speculation": self.speculation,
                "passes of known texts, with a draft": self.known_texts,
            },
            result,
            stage,
        )
        with stage("topics from traffic"):
            result.findings += self.topics()

    # -- abort oracle -----------------------------------------------------------------------------

    def abort_oracle(self) -> list[HostileFinding]:
        """Lies about chosen rows, to a tenant that checks all, and to one that tolerates small errors."""
        with self.trials.hosted(self.parties.ring) as host:
            public = PublicModel(self.parties.model, host.manifest)
            widths = [info.inputs + sum(m.outputs for m in info.members) for info in host.manifest.groups]
            group = widths.index(min(widths))
            oracle = AbortOracle(host.liar, group, public, TOLERANCE)
            always = self._oracle(host, oracle, AbortOracle.LIES, "always", lambda session: None)
            weight = public.weight(group)
            tolerated = self._oracle(
                host,
                oracle,
                AbortOracle.LIES[:1],
                "off",
                lambda session: _check_with_tolerance(session, group, weight),
            )
        defended, observed = always
        control, observed_control = tolerated
        stopped, stopped_control = (
            sum(not after for _, after in each) for each in (observed, observed_control)
        )
        again = len(observed) - stopped
        followed = f", and {again} times a half answer was asked for again" if again else ""
        return [
            HostileFinding(
                AbortOracle.name,
                "every product is checked as integers, and a wrong one always stops the session",
                f"{len(observed)} wrong answers to one of two rows that the provider chose, or in "
                f"a fingerprint while it was made: {stopped} times nothing followed{followed}. "
                f"Of a tenant that checks after rounding, with a tolerance, {stopped_control} of "
                f"{len(observed_control)} sessions stopped, and {control.hits} of "
                f"{control.success.trials} rows were told by it.",
                defended,
                control,
                same=len(set(observed)) == len(AbortOracle.LIES),  # for each lie, which the provider chooses
            )
        ]

    def _oracle(
        self,
        host: HostedExecutor,
        oracle: AbortOracle,
        lies: tuple[str, ...],
        verify: str,
        weaken: Callable[[Session], None],
    ) -> tuple[Finding, list[tuple[str, int]]]:
        observed, secrets = [], []
        for _ in ("told", "guessed"):
            for kind in lies:
                for secret in [0, 1] * (self.plan.oracle_lies // 4):
                    options: dict[str, Any] = {"provider": host.url, "verify": verify, "mask_budget_mib": 0}
                    with self.parties.connect(ONE_TIME, "oracle", **options) as session:
                        weaken(session)
                        observed.append((kind, oracle.lie(session, kind, secret)))
                    secrets.append(secret)
        half = len(secrets) // 2
        guesses = oracle.attack((observed, secrets[:half]), self.rng)
        mode = f"{ONE_TIME}, verify={verify}" + (", checked with a tolerance" if verify == "off" else "")
        return self.trials.score_guesses(AbortOracle, mode, guesses, secrets), observed

    # -- crafted parameters -----------------------------------------------------------------------

    def imprints(self) -> list[HostileFinding]:
        """Embeddings and head that carry tokens, read from rows under masks and in the clear."""
        crafted = self.trials.folder / "crafted"
        with self.trials.hosted(self.parties.ring) as host:
            honest = PublicModel(self.parties.model, host.manifest)
        code = craft(honest, self.parties.model, crafted, self.rng)
        imprinted = {mode: self._imprinted(mode, crafted, code) for mode in (ONE_TIME, PLAIN)}
        said = {
            ImprintedEmbeddings.name: "Embeddings that carry each token's number through all layers",
            ImprintedHead.name: "A head in which each label has a direction of its own",
        }
        return [
            HostileFinding(
                attack,
                "rows are uniform under one-time masks, whatever the parameters make of them",
                f"{what}, served to a tenant that fine-tuned with them: under one-time "
                f"{defended.hits} of {defended.success.trials:,} guesses were right, in the clear "
                f"{control.hits:,} of {control.success.trials:,}.",
                defended,
                control,
            )
            for (attack, what), defended, control in zip(
                said.items(), imprinted[ONE_TIME], imprinted[PLAIN], strict=True
            )
        ]

    def _imprinted(self, mode: str, crafted: Path, code: torch.Tensor) -> list[Finding]:
        truth, tenant = GroundTruth(), f"imprinted-{mode}"
        # The mask source serves the crafted checkpoint as well: parameters that differ may be refused.
        provider = self.parties.ring if mode == ONE_TIME else self.parties.floats
        with (
            self.trials.hosted(provider, crafted) as host,
            self.trials.hosted(self.parties.source, crafted) as source,
        ):
            options: dict[str, Any] = {"provider": host.url}
            if mode == ONE_TIME:
                options["mask_sources"] = [source.url]
            with self.parties.connect(mode, tenant, **options) as session:
                watch(session, truth)
                model = session.load_model(progress=False)
                tune(model, blocks_of(self.trials.tokens(session), 64, 0), self.plan.imprinted_steps, truth)
        public = PublicModel(crafted, host.manifest)
        view = provider_view(public, whole(host.requests(tenant), truth))
        check_aligned(view, truth, tenant)
        middle = public.model.config.num_hidden_layers // 2
        group = public.group_of(f"layers.{middle}.self_attn.q_proj")
        reader = ImprintedEmbeddings(code, group, public.parameter(f"layers.{middle}.input_layernorm.weight"))
        head = ImprintedHead()
        last = head.group(public)
        blind = [view.blind(self.rng, {group, last}) for _ in range(BLIND_RUNS)]
        tokens = torch.cat(
            [torch.full((sent.rows,), -1) if sent.tokens is None else sent.tokens for sent in truth.of(group)]
        )
        read = findings.of_tokens(
            reader.attack(view, self.rng),
            tokens,
            torch.cat([reader.attack(each, self.rng) for each in blind]),
            self.trials.confidence,
        )
        labels = findings.of_labels(
            head.attack(view, self.rng),
            truth,
            last,
            torch.cat([part for each in blind for part in head.attack(each, self.rng)]),
            self.trials.confidence,
        )
        return [
            findings.finding_of(
                attack,
                mode,
                MALICIOUS,
                success,
                chance,
                **findings.able(chance, success.trials, self.trials.confidence, self.plan.resolution),
            )
            for attack, (success, chance) in ((reader, read), (head, labels))
        ]

    # -- streams ----------------------------------------------------------------------------------

    def speculation(self) -> list[HostileFinding]:
        """Prompts that repeat themselves and prompts that do not, one row a step and with prompt lookup."""
        secrets = [0, 1] * self.plan.speculated_prompts
        settings: dict[str, dict[str, Any]] = {
            ONE_TIME: {},
            f"{ONE_TIME}, prompt lookup": {"prompt_lookup_num_tokens": LOOKED_UP},
        }

        def prompts(session: Session) -> list[list[int]]:
            return self.trials.repeating(session, secrets)

        outcomes = []
        for mode, how in settings.items():
            limits = {"max_new_tokens": NEW, "min_new_tokens": NEW}
            streams = self._streams(prompts, limits | how)
            view: LabelledStreams = (streams, secrets[: len(secrets) // 2])
            guesses = SpeculationWatch().attack(view, self.rng)
            finding = self.trials.score_guesses(SpeculationWatch, mode, guesses, secrets, PROVIDER)
            outcomes.append((finding, {stream.rows for stream in streams}))
        (defended, seen), (control, seen_control) = outcomes
        return [
            HostileFinding(
                SpeculationWatch.name,
                "one row a step, unless the tenant asks for more",
                f"{len(secrets)} prompts of {PROMPT} tokens, half of which repeat a phrase: with the "
                f"defaults {sequences(seen)} of numbers of rows, whatever the prompt; with prompt lookup, "
                f"which a tenant has to ask for, {sequences(seen_control)}, by which {control.hits} of "
                f"{control.success.trials} were told apart.",
                defended,
                control,
                same=len(seen) == 1,
            )
        ]

    def known_texts(self) -> list[HostileFinding]:
        """Which of several texts is written: without guesses, with prompt lookup, a draft, and a pace."""
        folder, count = self._train_draft(), self.plan.known_texts

        def prompts(session: Session) -> list[list[int]]:
            stream = self.trials.tokens(session)
            starts = [at * (len(stream) - PROMPT) // count for at in range(count)]
            return [[0, *stream[at : at + PROMPT - 1]] for at in starts] * TIMES

        def drafted(session: Session, model: Any) -> dict[str, Any]:
            return {"custom_generate": load_draft(folder, model, session, guesses=GUESSED)}

        def paced(session: Session, model: Any) -> dict[str, Any]:
            pace = DraftPace(PACE * apart, WRITTEN)
            return {"custom_generate": load_draft(folder, model, session, guesses=GUESSED, pace=pace)}

        ways: dict[str, HowToGenerate] = {
            ONE_TIME: lambda *_: {},
            f"{ONE_TIME}, prompt lookup": lambda *_: {"prompt_lookup_num_tokens": LOOKED_UP},
            f"{ONE_TIME}, draft": drafted,
            f"{ONE_TIME}, draft with --pace": paced,
        }
        found, seen, apart = dict[str, Finding](), set[tuple[int, ...]](), 0.0
        for mode, how in ways.items():
            limits = {"max_new_tokens": WRITTEN, "min_new_tokens": WRITTEN}
            streams = self._streams(prompts, limits, how)
            times = [streams[at : at + count] for at in range(0, len(streams), count)]
            known = [list(text) for text in zip(*times[:-1], strict=True)]
            guesses = KnownTexts().attack((known, times[-1]), self.rng)
            right = int((guesses == torch.arange(count)).sum())
            success = rate(right, count, self.trials.confidence)
            found[mode] = findings.finding_of(KnownTexts, mode, PROVIDER, success, 1 / count)
            seen = {stream.rows for stream in streams}
            apart = float(np.median(np.concatenate([np.diff(stream.arrived) for stream in streams])))
        told = ", ".join(f"{each.hits} under {mode}" for mode, each in found.items())
        _, control, _, defended = found.values()
        return [
            HostileFinding(
                KnownTexts.name,
                "with a pace, passes are begun at a constant rate, and their number is a multiple",
                f"{count} texts of {WRITTEN} tokens that the provider has seen written {TIMES - 1} times: "
                f"recognised were {told} (chance: 1). With pace, {sequences(seen)} of numbers of rows.",
                defended,
                control,
                same=len(seen) == 1,
            )
        ]

    def _train_draft(self) -> Path:
        """The folder of a draft that has learned lines of the tenant's text."""
        lines, folder = self.trials.folder / "draft-lines.txt", self.trials.folder / "draft"
        lines.write_text("".join(f"{line}\n" for line in self.trials.text[:DRAFT_LINES]), encoding="utf-8")
        with self.parties.connect(ONE_TIME, "drafting") as session:
            model = session.load_model(progress=False)
            options = DraftOptions(folder, data=[lines], epochs=8)
            make_draft(options, model, session.load_tokenizer(), session, DraftCallbacks())
        return folder

    def topics(self) -> list[Finding]:
        """Clauses of the tenant's text and of the public model's own: told apart by rows and times."""
        secrets = [0, 1] * self.plan.topic_prompts

        def prompts(session: Session) -> list[list[int]]:
            tokenizer = session.load_tokenizer()
            public = PublicModel(self.parties.model, session.manifest)
            texts = tokenizer.batch_decode(public.own_text(1), skip_special_tokens=True)
            clauses = [
                [part for line in lines for part in CLAUSE.split(line)[1:-1] if len(part.split()) > 2]
                for lines in (self.trials.text, texts)
            ]
            if not all(clauses):
                raise AuditError("the tenant's text or the model's own has no clauses to tell topics by")
            return [
                [
                    0,
                    *tokenizer(clauses[topic][i // 2 % len(clauses[topic])], add_special_tokens=False)[
                        "input_ids"
                    ],
                ]
                for i, topic in enumerate(secrets)
            ]

        outcomes = []
        for name, options in (("rows as they are", {}), ("rows padded", {"pad_rows": 32})):
            mode = f"{ONE_TIME}, {name}"
            streams = self._streams(prompts, {"max_new_tokens": ANSWER}, options=options)
            guesses = TopicFromTraffic().attack((streams, secrets[: len(secrets) // 2]), self.rng)
            outcomes.append(self.trials.score_guesses(TopicFromTraffic, mode, guesses, secrets, PROVIDER))
        return outcomes

    def _streams(
        self,
        prompts: Callable[[Session], list[list[int]]],
        limits: dict[str, Any],
        how: HowToGenerate = lambda *_: {},
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[Stream]:
        """What the provider sees of each prompt; it knows where one begins, as from its own pauses.

        Args:
            prompts: made with a session's tokenizer.
            limits, how: arguments of ``generate``; ``how`` makes them for a session and its model.
            options: of the session.
        """
        self._streamed += 1
        tenant, truth, ends = f"streams-{self._streamed}", GroundTruth(), []
        with self.parties.connect(ONE_TIME, tenant, **options) as session:
            model: Any = session.load_model(progress=False)
            watch(session, truth)
            chosen, arguments = prompts(session), limits | how(session, model)
            for ids in chosen[:1] + chosen:  # the first once more: fingerprints come with it
                tokens = torch.tensor([ids])
                model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    do_sample=False,
                    pad_token_id=0,
                    **arguments,
                )
                ends.append(len(truth.of(0)))
        passes = [
            (request.header.rows, request.arrived)
            for request in products_of(requests_of([self.parties.ring.so_far()], tenant))
            if (request.header.group, request.header.direction) == (0, Direction.FORWARD)
        ]
        return [Stream(*zip(*passes[start:end], strict=True)) for start, end in pairwise(ends)]


def _check_with_tolerance(session: Session, group: int, weight: torch.Tensor) -> None:
    """Make a session check after rounding, and accept what is nearly right."""
    products: Any = session.products
    submit = products.submit

    def checked(*arguments: Any) -> LazyResult:
        pending = submit(*arguments)

        def result() -> list[torch.Tensor]:
            out = pending.result()
            if (
                arguments[0] == group
                and float((torch.cat(out, 1) - arguments[3][0] @ weight.T).abs().max()) > TOLERANCE
            ):
                raise VerificationError("a wrong answer, as far as a tolerance tells")
            return list(out)

        return LazyResult(result)

    products.submit = checked
