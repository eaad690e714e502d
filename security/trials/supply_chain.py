"""Hostile files, a substituted mask source, forked children: each defended, and with its defence off."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers

from security.attacks import hostile_files
from security.attacks.hostile_files import (
    Filler,
    LoadOutcome,
    MemoryBomb,
    ServedSpeculation,
    VocabularyPath,
    download,
    measured,
    told_by_tokenizer,
)
from security.attacks.hostile_parties import Authority, MaskServedTwice, SubstitutedSource, in_copy, unguarded
from security.attacks.streams import Stream
from security.recordings.capture import ONE_TIME, PLAIN
from security.recordings.executors import AuditError
from security.recordings.transcript import RecordedRequest
from security.recordings.workload import GroundTruth, watch
from security.trials.context import PROMPT, HostedExecutor, Trials, sequences
from security.verdicts.findings import Finding, HostileFinding, finding_of
from security.verdicts.plan import MALICIOUS, PROVIDER, AuditResult, Stage
from security.verdicts.statistics import rate
from security.views.adversaries import products_of, requests_of
from security.views.public_model import PublicModel
from shared.errors import ConfigurationError, ConnectionLost, ModelMismatch
from shared.ring.fixed_point import max_row_norm
from shared.ring.rows import quantize_and_mask
from shared.wire.header import Direction
from shared.wire.messages import Manifest
from tenant_sdk.session.session import Session

WORD, OTHER = "diabetes", "arthritis"  # what the provider wants to know of, and what may stand there instead
WORDS = 12  # of a prompt
SUBSTITUTED_TOKENS = 96
NEW = 4  # tokens generated
FORKED_ROWS, FORKS = 9, 2  # of a request, since fingerprints have other numbers; processes that are copied
BEFORE, AFTER = 3, 2  # requests of the parent, the first of which its store of masks is filled for
FILL_BYTES, FILL_SECONDS = 8 << 20, 60.0
OWN_LOADING = "loaded by transformers"


@dataclass(frozen=True)
class _Passes:
    """Rows of the first group's requests of one tenant, in order, where it asked for products of it."""

    rows: list[int]

    @classmethod
    def of(cls, requests: list[RecordedRequest]) -> _Passes:
        headers = [request.header for request in products_of(requests)]
        return cls([h.rows for h in headers if (h.group, h.direction) == (0, Direction.FORWARD)])


class SupplyAttacks:
    """Runs the attacks.

    Args:
        trials: with what.
    """

    def __init__(self, trials: Trials) -> None:
        self.trials, self.parties, self.plan, self.rng = trials, trials.parties, trials.plan, trials.rng
        self._folders = 0

    def run(self, result: AuditResult, stage: Stage) -> None:
        """Add what was found."""
        attacks: dict[str, Callable[[], list[HostileFinding]]] = {
            "a tokenizer that names a file of the tenant's": self.paths,
            "a tokenizer that adds filler": self.filler,
            "generation settings that ask for speculation": self.generation,
            "configurations and rules without bounds": self.bombs,
            "a provider in the mask source's place": self.substituted,
            "forked children": self.forks,
        }
        self.trials.perform(attacks, result, stage)

    # -- files ------------------------------------------------------------------------------------

    def paths(self) -> list[HostileFinding]:
        """A vocabulary's path leads to a file of the tenant's: the SDK, and transformers itself."""
        attack = VocabularyPath(f"canary-{self.rng.bytes(8).hex()}")
        path = self._folder() / "words"
        path.write_text(f"{attack.canary}\n[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\n")
        ours, theirs = [], []
        for files in attack.files(path):
            with (
                self.trials.hosted(self.parties.floats, files=files) as host,
                self.parties.connect(PLAIN, "vocabulary", provider=host.url) as session,
            ):
                ours.append(
                    attack.attack(told_by_tokenizer(session.load_tokenizer, self._folder()), self.rng)
                )
                if None in files.values():  # else transformers takes the rules, and no vocabulary
                    served = download(session, self._folder() / "served")
                    theirs.append(
                        attack.attack(told_by_tokenizer(_tokenizer_of(served), self._folder()), self.rng)
                    )
        return [
            HostileFinding(
                attack.name,
                "a tokenizer is built from tokenizer.json alone, and nothing in a file is a path",
                f"A tokenizer_config.json that names a file as the vocabulary of a BertTokenizer, with rules "
                f"and without: a line of that file was in the SDK's tokenizer, or in what it saved, "
                f"{sum(ours)} of {len(ours)} times; in what AutoTokenizer makes of the same files without "
                f"rules, {sum(theirs)} of {len(theirs)} times.",
                self._counted(attack, PLAIN, ours),
                self._counted(attack, f"{PLAIN}, {OWN_LOADING}", theirs),
            )
        ]

    def filler(self) -> list[HostileFinding]:
        """Prompts that name a word and prompts that do not: with a source that attests, and with none."""
        attack = Filler(WORD)
        words = [w for line in self.trials.text for w in line.split() if WORD not in w and OTHER not in w]
        secrets = [0, 1] * self.plan.filler_prompts
        prompts = []
        for i, secret in enumerate(secrets):
            words_of_text = words[i * WORDS : (i + 1) * WORDS]
            prompts.append(
                " ".join([*words_of_text[: WORDS // 2], (OTHER, WORD)[secret], *words_of_text[WORDS // 2 :]])
            )
        files = {"tokenizer.json": attack.rules((self.parties.model / "tokenizer.json").read_bytes())}
        findings, seen = [], []
        for mode, like in ((ONE_TIME, self.parties.ring), (PLAIN, self.parties.floats)):
            with self.trials.hosted(like, files=files) as host:
                ends = self._prompted(host, mode, prompts)
            passes = _Passes.of(host.requests("filler")).rows
            rows = [sum(passes[start:end]) for start, end in pairwise(ends)]
            guesses = attack.attack((rows, secrets[: len(secrets) // 2]), self.rng)
            where = mode if mode == ONE_TIME else f"{PLAIN}, nobody attests"
            findings.append(self.trials.score_guesses(attack, where, guesses, secrets))
            seen.append(rows)
        defended, control = findings
        return [
            HostileFinding(
                attack.name,
                "files that the mask source does not list are refused before any row is sent",
                "A tokenizer that adds filler (tokens without meaning) to texts with the word "
                f"“{WORD}”, and {len(secrets)} prompts, half of them with it. A tenant with an honest mask "
                f"source, which lists another tokenizer, sent {sum(seen[0])} rows of them. In {PLAIN}, where "
                "nobody attests files, "
                f"{control.hits} of {control.success.trials} were told by their rows.",
                defended,
                control,
                same=len(set(seen[0])) == 1,
            )
        ]

    def _prompted(self, host: HostedExecutor, mode: str, prompts: list[str]) -> list[int]:
        """Send prompts; how many requests for the first group there had been before each, and after all."""
        truth = GroundTruth()
        ends = [0] * (len(prompts) + 1)
        try:
            session = self.parties.connect(mode, "filler", provider=host.url)
        except ModelMismatch as error:
            if "tokenizer.json" not in str(error):  # else this tried something else
                raise
            return ends
        with session:
            model: Any = session.load_model(progress=False)
            tokenizer = session.load_tokenizer()
            watch(session, truth)
            model(**tokenizer(OTHER, return_tensors="pt"))  # fingerprints come with it
            ends[0] = len(truth.of(0))
            for i, prompt in enumerate(prompts):
                model(**tokenizer(prompt, return_tensors="pt"))
                ends[i + 1] = len(truth.of(0))
        return ends

    def generation(self) -> list[HostileFinding]:
        """Prompts that repeat themselves and prompts that do not, generated as the provider's files say."""
        secrets = [0, 1] * self.plan.served_prompts
        files = ServedSpeculation.files(self.parties.model)
        findings, seen = [], []
        with self.trials.hosted(self.parties.floats, files=files) as host:
            ends = {
                tenant: self._generated(host, tenant, secrets, own)
                for tenant, own in (("served", False), ("served-own", True))
            }
        for tenant, mode in (("served", PLAIN), ("served-own", f"{PLAIN}, {OWN_LOADING}")):
            passes = _Passes.of(host.requests(tenant)).rows
            streams = [
                Stream(tuple(passes[start:end]), tuple(map(float, range(start, end))))
                for start, end in pairwise(ends[tenant])
            ]
            guesses = ServedSpeculation().attack((streams, secrets[: len(secrets) // 2]), self.rng)
            findings.append(self.trials.score_guesses(ServedSpeculation, mode, guesses, secrets, PROVIDER))
            seen.append({stream.rows for stream in streams})
        defended, control = findings
        return [
            HostileFinding(
                ServedSpeculation.name,
                "of a provider's generation configuration only token ids and lengths are taken",
                f"Files that ask for prompt lookup, and {len(secrets)} prompts of {PROMPT} tokens, half of "
                f"which repeat a phrase. With the SDK's model: {sequences(seen[0])} of numbers of rows, "
                f"whatever the prompt; with the same file as transformers reads it {sequences(seen[1])}, by "
                f"which {control.hits} of {control.success.trials} were told apart.",
                defended,
                control,
                same=len(seen[0]) == 1,
            )
        ]

    def _generated(self, host: HostedExecutor, tenant: str, secrets: list[int], own_token: bool) -> list[int]:
        """Generate; how many requests for the first group there had been before each prompt, and after all.

        Args:
            own_token: configure generation as transformers does.
        """
        truth, ends = GroundTruth(), [0]
        with self.parties.connect(PLAIN, tenant, provider=host.url) as session:
            model: Any = session.load_model(progress=False)
            if own_token:
                served = download(session, self._folder() / "served")
                model.generation_config = transformers.GenerationConfig.from_pretrained(served)
            watch(session, truth)
            for ids in self.trials.repeating(session, secrets):
                tokens, limits = torch.tensor([ids]), {"max_new_tokens": NEW, "min_new_tokens": NEW}
                model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, **limits)
                ends.append(len(truth.of(0)))
        return ends

    def bombs(self) -> list[HostileFinding]:
        """Sizes without bounds, loaded in a process of its own with little memory."""
        attack, model, floats = MemoryBomb(), self.parties.model, self.parties.floats
        token = floats.token("loads")
        self.parties.tokens.append(token)
        fewer = {}
        for what, files in attack.files(model, attack.FEWER_RULES).items():
            fewer[what] = self._folder()
            for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
                if (model / name).is_file():
                    shutil.copy(model / name, fewer[what])
            for name, data in files.items():
                (fewer[what] / name).write_bytes(data)
        with ExitStack() as stack:
            cases = attack.files(model, attack.RULES)
            hosts = {
                what: stack.enter_context(self.trials.hosted(floats, files=files))
                for what, files in cases.items()
            }
            jobs: list[tuple[Callable[..., None], str, Path]] = [
                (hostile_files.load_as_tenant, floats.url, model),  # so that what follows takes nothing new
                *((hostile_files.load_as_tenant, host.url, host.folder) for host in hosts.values()),
                *((hostile_files.load_as_transformers, "", folder) for folder in fewer.values()),
            ]
            memory_limit = attack.memory_limit(hosts["many layers"].manifest.parameters)
            loads = _loaded(
                [(load, memory_limit, url, token, floats.ca, folder) for load, url, folder in jobs]
            )
        if loads[0].error:
            raise AuditError(f"an honest executor's files could not be loaded: {loads[0].error}")
        ours, theirs = loads[1 : 1 + len(hosts)], loads[1 + len(hosts) :]
        grown = max(load.grown_mib for load in ours)
        refused = sum(load.typed and bool(load.error) for load in ours)
        return [
            HostileFinding(
                attack.name,
                "no larger number than the manifest accounts for, and no rules that make a text much longer",
                f"{', '.join(cases)}: with the SDK {refused} of {len(ours)} loads ended with a typed error, "
                f"and took {grown:.0f} MiB at most. Loaded by transformers, with "
                f"{memory_limit >> 20} MiB to be had and of {attack.RULES} rules {attack.FEWER_RULES}: "
                + "; ".join(f"{what}: {_ended(load)}" for what, load in zip(cases, theirs, strict=True))
                + ".",
                self._counted(attack, PLAIN, attack.attack(ours, self.rng)),
                self._counted(attack, f"{PLAIN}, {OWN_LOADING}", attack.attack(theirs, self.rng)),
            )
        ]

    # -- parties ----------------------------------------------------------------------------------

    def substituted(self) -> list[HostileFinding]:
        """A provider with the key of the authority of the mask source, at the source's address."""
        authority, folder = Authority(datetime.datetime.now(datetime.UTC)), self._folder()
        for name in ("provider", "between"):
            authority.certify(folder / name)
        shared = folder / "provider" / "ca.pem"
        both = folder / "both.pem"
        both.write_bytes(self.parties.source.ca.read_bytes() + shared.read_bytes())
        with (
            self.trials.hosted(self.parties.ring, tls=folder / "provider") as host,
            self.trials.hosted(self.parties.source, tls=folder / "between") as between,
        ):
            public = PublicModel(self.parties.model, host.manifest)
            attack = SubstitutedSource(public)
            tokens = torch.from_numpy(self.rng.integers(0, public.vocabulary, SUBSTITUTED_TOKENS))
            options: dict[str, Any] = {
                "provider": host.url,
                "ca": shared,
                "mask_sources": [between.url],
                "allow_same": {"host", "address", "machine"},  # which elsewhere they would not have in common
            }
            truths = {
                "same-authority": self._sent(
                    public, "same-authority", tokens, options | {"mask_source_ca": shared}
                ),
                "among-others": self._sent(
                    public, "among-others", tokens, options | {"mask_source_ca": both}
                ),
            }
            options["allow_same"] = options["allow_same"] | {"authority"}
            truth = self._sent(public, "waived", tokens, options | {"mask_source_ca": shared})
        sessions = sum(end.sessions(tenant) for end in (host, between) for tenant in truths)

        def read(tenant: str, truth: GroundTruth) -> int:
            """How many tokens the provider reads of one tenant's."""
            rows = host.requests(tenant)
            if not products_of(rows):
                return 0
            guess = attack.attack((rows, between.requests(tenant)), self.rng)
            return int((guess.tokens == truth.first_tokens()[guess.rows]).sum())

        hits = sum(read(tenant, truth) for tenant, truth in truths.items())
        defended, control = (
            finding_of(attack, mode, MALICIOUS, success, None)
            for mode, success in (
                (ONE_TIME, rate(hits, len(tokens) * len(truths), self.trials.confidence)),
                (
                    f"{ONE_TIME}, allow_same authority",
                    rate(read("waived", truth), len(tokens), self.trials.confidence),
                ),
            )
        )
        return [
            HostileFinding(
                attack.name,
                "provider and mask sources whose certificates one private authority vouches for are refused",
                f"A provider with the key of an authority that also vouches for the mask source answered at "
                f"the source's address, with a certificate of its own: {sessions} sessions were opened with "
                f"it in either role. Where the tenant waives the sign, it read {control.hits} of "
                f"{control.success.trials} tokens.",
                defended,
                control,
                same=sessions == 0,
            )
        ]

    def _sent(
        self, public: PublicModel, tenant: str, tokens: torch.Tensor, options: dict[str, Any]
    ) -> GroundTruth:
        """What a tenant sent for some tokens: nothing, if it was not let connect."""
        truth = GroundTruth()
        try:
            session = self.parties.connect(ONE_TIME, tenant, **options)
        except ConfigurationError as error:
            if "authority" not in str(error):  # else this tried something else
                raise
            return truth
        with session:
            watch(session, truth)
            for part in tokens.split(PROMPT):
                with truth.doing("prompt", part):
                    _ask(session, public.first_inputs[part])
        return truth

    def forks(self) -> list[HostileFinding]:
        """A copy of the tenant's process asks too: does the provider see the difference of two rows?"""
        found: dict[str, tuple[Finding, int, set[str]]] = {}
        for mode, copy in (
            (ONE_TIME, lambda masks, action: in_copy(action)),
            (f"{ONE_TIME}, children go on", unguarded),
        ):
            hits = copies = 0
            ended: set[str] = set()
            for number in range(FORKS):
                tenant = f"forked-{len(found)}-{number}"
                with self.parties.connect(ONE_TIME, tenant) as session:
                    expected, how = self._forked(session, copy)
                ended |= {how} - {""}
                view = [
                    request.rows
                    for request in products_of(requests_of([self.parties.ring.so_far()], tenant))
                    if (request.header.group, request.header.rows) == (0, FORKED_ROWS)
                ]
                copies += len(view) - BEFORE - AFTER
                read = [row for rows in MaskServedTwice().attack(view, self.rng) for row in rows]
                hits += sum(any(torch.equal(row, each) for each in read) for row in expected)
            success = rate(hits, FORKS * FORKED_ROWS, self.trials.confidence)
            found[mode] = (
                finding_of(MaskServedTwice, mode, MALICIOUS, success, None),
                copies,
                ended,
            )
        (defended, sent, ended), (control, sent_control, _) = found.values()
        return [
            HostileFinding(
                MaskServedTwice.name,
                "a forked child loses its copies of masks and connections, and every use of them refuses",
                f"{FORKS} copies of the tenant's process, with its process id, asked for products beside it: "
                f"they sent {sent} requests, and ended with {', '.join(sorted(ended)) or 'no error'}. "
                f"Without the guard they sent {sent_control}, and the provider read {control.hits} of "
                f"{control.success.trials} differences of a child's row and its parent's.",
                defended,
                control,
                same=sent == 0,
            )
        ]

    def _forked(
        self, session: Session, copy: Callable[[Any, Callable[[], object]], str]
    ) -> tuple[torch.Tensor, str]:
        """Parent and child ask twice each; the differences of their last rows, and how the child ended."""
        info = session.manifest.groups[0]
        rows = torch.from_numpy(self.rng.standard_normal((3, FORKED_ROWS, info.inputs))).float()
        for _ in range(BEFORE):
            _ask(session, rows[0])
        masks: Any = session.products._masks  # type: ignore[attr-defined]
        session.products.fill(FILL_BYTES, FILL_SECONDS)

        def child() -> None:
            with suppress(ConnectionLost):  # its copy of the connection is closed; it opens another
                _ask(session, rows[1])
            _ask(session, rows[1])

        how = copy(masks, child)
        for _ in range(AFTER):
            _ask(session, rows[2])
        return _integers(session.manifest, rows[1]) - _integers(session.manifest, rows[2]), how

    # -- what several need ------------------------------------------------------------------------

    def _counted(self, attack: Any, mode: str, succeeded: list[bool]) -> Finding:
        success = rate(sum(succeeded), len(succeeded), self.trials.confidence)
        return finding_of(attack, mode, MALICIOUS, success, None)

    def _folder(self) -> Path:
        self._folders += 1
        path = self.trials.folder / f"supplies-{self._folders}"
        path.mkdir()
        return path


def _ask(session: Session, rows: torch.Tensor) -> None:
    member_bits = (1 << len(session.manifest.groups[0].members)) - 1
    session.products.submit(0, Direction.FORWARD, member_bits, [rows]).result()


def _integers(manifest: Manifest, rows: torch.Tensor) -> torch.Tensor:
    """What rows of the first group are on the ring, before a mask is added: int32 [T, C]."""
    info = manifest.groups[0]
    assert info.bounds is not None
    integers = torch.zeros(rows.shape, dtype=torch.int32)
    quantize_and_mask([rows], None, max_row_norm(info.bounds[0], info.inputs), integers, None)
    return integers


def _tokenizer_of(folder: Path) -> Callable[[], Any]:
    return lambda: transformers.AutoTokenizer.from_pretrained(folder)


def _ended(load: LoadOutcome) -> str:
    return f"{load.error or 'no error'}, {load.grown_mib:.0f} MiB"


def _loaded(jobs: list[tuple[Any, ...]]) -> list[LoadOutcome]:
    """Each load, one after the other in a process of its own.

    Raises:
        AuditError: one ended that process.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        try:
            return [process.submit(measured, *job).result() for job in jobs]
        except BrokenProcessPool as error:
            raise AuditError("what a provider serves ended the process that loaded it") from error
