"""The whole audit: tenants at work in every privacy mode, every attack on every view, claims."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tenant_sdk
from provider.executor.base import BaseExecutor
from provider.observe.metrics import Metrics
from provider.serve.server import Server, server_context
from provider.serve.tokens import TokenFile
from provider.session.tenant import Service
from security.attacks.active import (
    CoTenantTiming,
    CrossTalk,
    LyingProvider,
    Poison,
    WeightExtraction,
    canaries,
)
from security.recordings import capture
from security.recordings.capture import ELSEWHERE, MODES, ONE_TIME, PLAIN, RING_BANK, CapturedSession, Parties
from security.recordings.executors import AuditError, ExecutorProcess
from security.recordings.workload import GroundTruth, blocks_of, generate, tune, watch
from security.report import environment
from security.trials.context import Trials
from security.trials.gateway import Gateways
from security.trials.hostile import HostileProvider
from security.trials.passive import Evidence, PassiveAttacks
from security.trials.request_routing import Routes
from security.trials.supply_chain import SupplyAttacks
from security.verdicts.findings import Finding
from security.verdicts.judges import STATISTICAL
from security.verdicts.plan import PROVIDER, SOURCE, AuditPlan, AuditResult, Stage
from security.verdicts.statistics import rate
from security.views.adversaries import mask_source_view, operations_of, products_of, requests_of, whole
from security.views.public_model import PublicModel
from shared.errors import ConnectionLost
from shared.wire.header import Direction, Operation
from shared.wire.messages import Limits
from tenant_sdk import NoiseBankOptions
from tenant_sdk.connection.keys import ProductKey

PROCESS_REPLIES = 50_000  # fewer are here sooner than another process has imported torch


class Audit:
    """One audit.

    Args:
        model: checkpoint folder.
        text: lines of real text for the tenants.
        plan: how much.
        stage: shows progress, ``with stage("what"):``.
        seed: of everything random but masks, which are the operating system's.
        workers: processes that share the layers of each executor; 0: none.
        gateway: runs ``symbiosis-tenant`` where vLLM is; None: there is none.
        answers: ``exact`` or ``half``, of tenants with one-time masks.
    """

    def __init__(
        self,
        model: Path,
        text: list[str],
        plan: AuditPlan,
        stage: Stage,
        seed: int = 0,
        workers: int = 0,
        gateway: list[str] | None = None,
        answers: str = "exact",
    ) -> None:
        self.answers = answers
        self.model, self.text, self.plan, self.stage, self.seed = model, text, plan, stage, seed
        self.workers, self.gateway = workers, gateway
        self.rng = np.random.default_rng(seed)
        self.confidence = 1 - plan.family_error / STATISTICAL
        self.planted = self.rng.bytes(16).hex()
        self.result = AuditResult()
        self.captured: dict[str, CapturedSession] = {}
        self.games: dict[str, capture.Game] = {}

    def run(self, folder: Path) -> AuditResult:
        """Capture, attack, and return what was found.

        Args:
            folder: an empty one for certificates, logs and transcripts.

        Raises:
            SymbiosisError: the audit could not be done; an attack that fails is not passed over.
        """
        started = time.time()
        with self.executors(folder) as parties:
            with capture.everything_logged() as self.book:
                self._plant(parties)
                self.work(parties)
                self.active(parties)
                trials = Trials(parties, folder, self.plan, self.text, self.rng, self.confidence)
                HostileProvider(trials).run(self.result, self.stage)
                SupplyAttacks(trials).run(self.result, self.stage)
                Routes(trials).run(self.result, self.stage)
                Gateways(trials, self.gateway).run(self.result, self.stage)
            texts = self.texts(parties)
        evidence = self.collect(parties)
        passive = PassiveAttacks(evidence, self.plan, self.result, self.rng, self.confidence, self.stage)
        passive.attack()
        passive.search(texts, parties.tokens, self.planted)
        self.result.about |= {
            "model": evidence.public.manifest.model,
            "digest": evidence.public.manifest.digest,
            "architecture": type(evidence.public.model).__name__,
            "parameters": f"{evidence.public.model.num_parameters():,}",
            "layers": evidence.public.model.config.num_hidden_layers,
            "width": evidence.public.first_inputs.shape[1],
            "vocabulary": f"{evidence.public.vocabulary:,}",
            "card": environment.card(self.model),
            "text_lines": len(self.text),
            "seed": self.seed,
            "workers": self.workers,
            "gateway": self.gateway is not None,
            "answers": self.answers,
            "plan": asdict(self.plan.size) | {"game_rows": self.plan.game_rows, "lies": self.plan.lies},
            "confidence_of_one_interval": self.confidence,
            "family_error": self.plan.family_error,
            "resolution": self.plan.resolution,
            "seconds": time.time() - started,
            "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            "program": environment.program(),
            "machine": environment.machine(),
            "versions": environment.versions(),
        }
        return self.result

    # -- capture ----------------------------------------------------------------------------------

    @contextmanager
    def executors(self, folder: Path) -> Iterator[Parties]:
        """Three executors, each a process with certificates of its own; stopped at the end."""
        servers = [
            ExecutorProcess(folder / name, self.model, numerics, self.workers)
            for name, numerics in (("floats", "float32"), ("ring", "ring"), ("source", "ring"))
        ]
        try:
            with self.stage("starting three executors"):
                for executor in servers:
                    executor.token("nobody")  # an executor wants a token file
                    executor.launch()
                for executor in servers:
                    executor.await_ready()
            yield Parties(servers[0], servers[1], servers[2], self.model, answers=self.answers)
        finally:
            for executor in servers:
                executor.stop()

    def work(self, parties: Parties) -> None:
        """All modes' workloads, the distinguishing game, and what is needed for plots."""
        plan = self.plan
        self.printed = ""
        for mode in plan.modes:
            with self.stage(f"a tenant at work: {mode}"):
                truth, printed = capture.workload(
                    parties, mode, self.text, plan.size, self.seed, self.planted
                )
                self.captured[mode] = CapturedSession(mode, truth)
                self.printed += printed
        for mode in plan.modes:
            with self.stage(f"distinguishing game: {mode}"):
                rows = plan.game_rows if mode == ONE_TIME else min(plan.game_rows, 16_384)
                with parties.connect(mode, f"game-{MODES.index(mode)}") as session:
                    group = self._game_group(session)
                    answer = capture.play(session, group, rows, self.rng)
                self.games[mode] = capture.Game(torch.empty(0), answer)
        with self.stage("a mask source that crashes in the middle of a pass"):
            self._crash(parties)
        with self.stage("traffic with and without padded rows"):
            self._traffic(parties)
        for masks in plan.curve_masks:
            with self.stage(f"prompts under {masks} masks"):
                self._bank(parties, masks)

    def _plant(self, parties: Parties) -> None:
        """What the search of everything written must find: in the tenant's log and, as a name, in theirs."""
        logging.getLogger("tenant_sdk.planted").debug("planted %s", self.planted)
        for mode in sorted({PLAIN, ONE_TIME}.intersection(self.plan.modes)):
            parties.connect(mode, f"planted-{self.planted}").close()

    @staticmethod
    def _game_group(session: tenant_sdk.Session) -> int:
        groups = session.manifest.groups
        return min(
            range(len(groups)), key=lambda g: groups[g].inputs + sum(m.outputs for m in groups[g].members)
        )

    def _crash(self, parties: Parties) -> None:
        """The source dies with a mask's effect in flight; the session goes on, and then there is another."""
        for crash in (True, False):
            with parties.connect(ONE_TIME, "crash", mask_budget_mib=0) as session:
                model = session.load_model(progress=False)
                tokenizer = session.load_tokenizer()
                prompt = torch.tensor([[0, *tokenizer(self.text[0], add_special_tokens=False)["input_ids"]]])
                generate(model, prompt, 2, GroundTruth())
                if crash:
                    self._crash_at(parties.source, session, request=10)
                    try:
                        generate(model, prompt, 2, GroundTruth())
                    except ConnectionLost:
                        pass  # the rows have been sent, and their mask's effect is lost
                    else:
                        raise AuditError("a session went on without the effect of a mask")
                    generate(model, prompt, 2, GroundTruth())

    @staticmethod
    def _crash_at(source: ExecutorProcess, session: tenant_sdk.Session, request: int) -> None:
        masks: Any = session.products._masks  # type: ignore[attr-defined]
        take, left = masks.take, request

        def dying(key: ProductKey, rows: int, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left:
                return take(key, rows, **options)
            source.pause()
            mask = take(key, rows, **options)
            source.crash()
            return mask

        masks.take = dying

    def _traffic(self, parties: Parties) -> None:
        self.lengths: dict[str, list[int]] = {}
        for name, options in {"rows-as-they-are": {}, "rows-padded": {"pad_rows": 32}}.items():
            with parties.connect(ONE_TIME, name, **options) as session:
                model = session.load_model(progress=False)
                tokenizer = session.load_tokenizer()
                lengths = []
                for i, line in enumerate(self.text[: self.plan.traffic_prompts]):
                    ids = tokenizer(line, add_special_tokens=False)["input_ids"][: 6 + i % 23]
                    prompt = torch.tensor([[0, *ids]])
                    generate(model, prompt, 2, GroundTruth())
                    lengths.append(prompt.shape[1])
                self.lengths[name] = lengths

        for rank in (2, 32):
            with parties.connect(ONE_TIME, f"rank-{rank}", mask_budget_mib=0) as session:
                model = session.load_model(progress=False)
                tokenizer = session.load_tokenizer()
                ids = [
                    t
                    for line in self.text[:8]
                    for t in tokenizer(line, add_special_tokens=False)["input_ids"]
                ]
                tune(model, blocks_of(ids, 32, 0), 1, GroundTruth(), rank=rank)

    def _bank(self, parties: Parties, masks: int) -> None:
        """Messages of 12 tokens through the first group alone, for the curve of mask reuse."""
        truth, name = GroundTruth(), f"bank-{masks}"
        with parties.connect(ELSEWHERE, name, noise_bank=NoiseBankOptions(masks=masks)) as session:
            watch(session, truth)
            public = PublicModel(self.model, session.manifest)
            tokenizer = session.load_tokenizer()
            lines = self.text * 8
            stream = [t for line in lines for t in tokenizer(line, add_special_tokens=False)["input_ids"]]
            member_bits = (1 << len(session.manifest.groups[0].members)) - 1
            for message in blocks_of(stream, 12, 0)[:768]:
                with truth.doing("prompt", message):
                    rows = public.first_inputs[message]
                    session.products.submit(0, Direction.FORWARD, member_bits, [rows]).result()
        self.captured[name] = CapturedSession(ELSEWHERE, truth)

    # -- active attacks ---------------------------------------------------------------------------

    def active(self, parties: Parties) -> None:
        """Attacks that send or answer."""
        with self.stage("wrong answers, checked and unchecked"):
            self._lies(parties)
        with self.stage("weights copied by a tenant"):
            for mode in {PLAIN, ONE_TIME}.intersection(self.plan.modes):
                with parties.connect(mode, f"copy-{MODES.index(mode)}") as session:
                    group = self._game_group(session)
                    copy = WeightExtraction(group).attack(session, self.rng)
                    real = PublicModel(self.model, session.manifest).weight(group)
                self.result.figures[f"weight extraction, {mode}"] = float((copy - real).norm() / real.norm())
        with self.stage(f"canaries of many tenants in {self.plan.replies:,} replies"):
            canaries = [asdict(each) for each in self._canaries()]
            self.result.figures["canaries"] = {
                key: sum(each[key] for each in canaries) for key in canaries[0]
            }
        with self.stage("one tenant times another"):
            self._timing(parties)

    def _canaries(self) -> list[CrossTalk]:
        """On floats and on the ring."""
        numerics, each = ("float32", "ring"), self.plan.replies // 2
        if each < PROCESS_REPLIES:
            return [canaries(self.model, kind, each) for kind in numerics]
        # In processes of their own, at the same time: the threads of one queue for Python's lock.
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as processes:
            return list(processes.map(partial(canaries, self.model, replies=each), numerics))

    def _lies(self, parties: Parties) -> None:
        """By the provider, checked and unchecked, and by the mask source.

        Of half answers, lies as small as their rounding are told to a tenant that asks for all again.
        """
        base = BaseExecutor(self.model, numerics="ring", recorded=True, limits=Limits(64 << 20, 65536))
        for executor, operation, role, verify in (
            (parties.ring, Operation.PRODUCT, "provider", "always"),
            (parties.ring, Operation.PRODUCT, "provider", "off"),
            (parties.source, Operation.SEED_EFFECT, "mask source", "always"),
        ):
            liar = LyingProvider.of(base)
            liar.operation = operation
            server = Server(
                Service(base, liar, Metrics()),
                context=server_context(executor.folder / "tls"),
                tokens=TokenFile(executor.folder / "tokens.json"),
                port=0,
            )
            options: Any = {"provider": server.url} if role == "provider" else {"mask_sources": [server.url]}
            try:
                self._lie(parties, liar, role, verify=verify, mask_budget_mib=0, **options)
                if parties.answers == "half" and verify == "always":
                    options |= {"repeat_rate": 1.0, "mask_budget_mib": 0}
                    self._lie(parties, liar, role, Poison.SMALL_LIES, verify=verify, **options)
            finally:
                server.drain(1.0)

    def _lie(
        self,
        parties: Parties,
        liar: LyingProvider,
        role: str,
        kinds: tuple[str, ...] = Poison.LIES,
        **options: Any,
    ) -> None:
        """Every kind of lie, in both directions of two groups, and in every bit in turn."""
        noticed: dict[str, list[bool]] = {kind: [] for kind in kinds}
        for i, kind in itertools.product(range(self.plan.lies), kinds):
            with parties.connect(ONE_TIME, "lied-to", **options) as session:
                where = (i + i // 4) % 4  # so that even and odd bits meet both directions
                group = 0 if where < 2 else self._game_group(session)
                poison = Poison(liar, group, Direction.BACKWARD if where % 2 else Direction.FORWARD)
                noticed[kind].append(poison.attack(session, kind, 31 - i % 32, self.rng))
        every = [each for found in noticed.values() for each in found]
        self.result.findings.append(
            Finding(
                Poison.name + (", asked for again" if kinds is Poison.SMALL_LIES else ""),
                f"{ONE_TIME}, verify={options['verify']}",
                f"malicious {role}",
                Poison.metric,
                rate(sum(every), len(every), self.confidence),
                None,
                ", ".join(f"{kind}: {sum(found)} of {len(found)}" for kind, found in noticed.items()),
            )
        )

    def _timing(self, parties: Parties) -> None:
        with (
            parties.connect(PLAIN, "watcher") as watcher,
            parties.connect(PLAIN, "watched") as watched,
        ):
            width = watcher.manifest.groups[0].inputs
            member_bits = (1 << len(watcher.manifest.groups[0].members)) - 1

            def send(session: tenant_sdk.Session, rows: int) -> Callable[[], Any]:
                tensor = torch.ones(rows, width)
                return lambda: session.products.submit(0, Direction.FORWARD, member_bits, [tensor]).result()

            attack = CoTenantTiming(send(watcher, 1), send(watched, 512), self.plan.timing_moments)
            idle, busy = attack.attack(None, self.rng)
        pairs = (busy[:, None] > idle[None, :]).mean() + 0.5 * (busy[:, None] == idle[None, :]).mean()
        self.result.figures["co-tenant timing"] = {
            "told_apart": float(pairs),
            "times": len(idle),
            "median_idle_seconds": float(np.median(idle)),
            "median_busy_seconds": float(np.median(busy)),
        }

    # -- what was written ---------------------------------------------------------------------------

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

    def collect(self, parties: Parties) -> Evidence:
        """Read the transcripts."""
        with self.stage("reading transcripts"):
            floats, ring, source = (executor.transcripts() for executor in parties.all())
            for name, captured in self.captured.items():
                tenant = capture.tenant_of(name) if name in MODES else name
                on_ring = captured.mode in (RING_BANK, ONE_TIME)
                captured.provider = whole(requests_of(ring if on_ring else floats, tenant), captured.truth)
                captured.source = requests_of(source, tenant)
            for mode, game in self.games.items():
                tenant = f"game-{MODES.index(mode)}"
                requests = requests_of(ring if mode in (RING_BANK, ONE_TIME) else floats, tenant)
                self.games[mode] = capture.game_of(products_of(requests), game.answer)
            return Evidence(
                PublicModel(self.model, floats[0].manifest),
                PublicModel(self.model, ring[0].manifest),
                self.captured,
                self.games,
                products_of(requests_of(ring, "crash")),
                products_of(requests_of(ring, f"game-{MODES.index(ONE_TIME)}")),
                {name: requests_of(ring, name) for name in (*self.lengths, "rank-2", "rank-32")},
                self.lengths,
                {PROVIDER: operations_of(ring), SOURCE: operations_of(source)},
                mask_source_view([request for each in source for request in each.requests]),
            )
