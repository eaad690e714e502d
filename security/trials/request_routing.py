"""Attacks on a mixture's routing, scored in each of the ways to place its experts."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from security.attacks.routing import Routing, RoutingView
from security.recordings.capture import ONE_TIME
from security.recordings.executors import AuditError
from security.recordings.transcript import RecordedRequest
from security.trials.context import Trials
from security.verdicts.findings import Finding, HostileFinding, finding_of
from security.verdicts.plan import PROVIDER, AuditResult, Stage
from security.verdicts.statistics import rate
from security.views.adversaries import products_of
from security.views.public_model import PublicModel
from shared.experts import projections
from shared.wire.header import EXACT, Direction
from shared.wire.messages import Manifest
from tenant_sdk.model.experts import FEW_TOKENS, bucket

SHORT, LONG = FEW_TOKENS, 96  # of a prompt: so few that padded experts have room for all of them, and more
SETTINGS = ("local", "padded", "routed")
EXPERTS: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "hidden_size": 64,
}


class Routes:
    """Runs the attack.

    Args:
        trials: with what.
    """

    def __init__(self, trials: Trials) -> None:
        self.trials, self.parties, self.plan, self.rng = trials, trials.parties, trials.plan, trials.rng

    def run(self, result: AuditResult, stage: Stage) -> None:
        """Add what was found."""
        with stage("experts of a mixture"):
            hostile, findings = self.routes()
        result.hostile += hostile
        result.findings += findings

    def routes(self) -> tuple[list[HostileFinding], list[Finding]]:
        """The same prompts in every setting, of a few tokens and of many."""
        folder = mixture(self.parties.model, self.trials.folder / "mixture")
        outcomes = {setting: self._recognised(folder, setting) for setting in SETTINGS}
        hostile = [
            HostileFinding(
                f"{Routing.name}, {setting} experts",
                defence,
                f"{self.plan.routed_prompts} prompts of {SHORT} tokens, all of which the provider knows: by "
                f'rows of experts it recognised {outcomes[setting][SHORT][0].hits} with experts="{setting}", '
                f'and {outcomes["routed"][SHORT][0].hits} with experts="routed".',
                outcomes[setting][SHORT][0],
                outcomes["routed"][SHORT][0],
                same=outcomes[setting][SHORT][1] == 1,
            )
            for setting, defence in (
                ("local", "experts stay with the tenant"),
                ("padded", f"up to {FEW_TOKENS} tokens each expert gets room for all of them"),
            )
        ]
        # Of many tokens the bucket says something, and nothing is claimed.
        return hostile, [outcomes[setting][length][0] for setting in SETTINGS for length in (SHORT, LONG)]

    def _recognised(self, folder: Path, setting: str) -> dict[int, tuple[Finding, int]]:
        """By length of the prompts what the attack finds, and how many different counts there were."""
        tenant, limit = f"routes-{setting}", self.plan.routed_prompts
        with ExitStack() as open_:
            host = open_.enter_context(self.trials.hosted(self.parties.ring, folder))
            source = open_.enter_context(self.trials.hosted(self.parties.source, folder))
            options: dict[str, Any] = {"provider": host.url, "mask_sources": [source.url], "experts": setting}
            with self.parties.connect(ONE_TIME, tenant, **options) as session:
                model: Any = session.load_model(progress=False)
                tokenizer = session.load_tokenizer()
                prompts = {length: self._prompts(tokenizer, length) for length in (SHORT, LONG)}
                for prompt in [texts[:1] for texts in prompts.values()] + list(prompts.values()):
                    for ids in prompt:  # the first of each once more: fingerprints come with it
                        with torch.inference_mode():
                            model(input_ids=ids[None], use_cache=False)
        seen = rows_of_experts(host.requests(tenant), host.manifest)[len(prompts) :]
        public, found = PublicModel(folder, host.manifest), {}
        for at, (length, texts) in enumerate(prompts.items()):
            counted = seen[at * limit : (at + 1) * limit]
            known = np.array([self._expected(public, ids, setting) for ids in texts])
            guesses = Routing().attack(RoutingView(counted, known), self.rng)
            right = int((guesses == torch.arange(limit)).sum())
            mode = f"{ONE_TIME}, experts {setting}, {length} tokens"
            success = rate(right, limit, self.trials.confidence)
            finding = finding_of(Routing, mode, PROVIDER, success, 1 / limit)
            found[length] = finding, len(np.unique(counted, axis=0))
        return found

    def _prompts(self, tokenizer: Any, length: int) -> torch.Tensor:
        """Prompts [N, length] of the tenant's text, all different."""
        lines, count = self.trials.text, self.plan.routed_prompts
        stream = [t for line in lines for t in tokenizer(line, add_special_tokens=False)["input_ids"]]
        if len(stream) < count * length:
            raise AuditError(f"the tenant's text has {len(stream)} tokens, and {count * length} are needed")
        return torch.tensor(stream[: count * length]).view(count, length)

    @staticmethod
    def _expected(public: PublicModel, ids: torch.Tensor, setting: str) -> list[int]:
        """Rows that each expert of each projection should get for a text, by the program's own rules."""
        counts: dict[str, list[int]] = {}

        def note(path: str, experts: int) -> Any:
            def hook(_: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
                chosen = options["top_k_index"] if "top_k_index" in options else arguments[1]
                counts[path] = torch.bincount(chosen.flatten(), minlength=experts).tolist()

            return hook

        names = list(projections(public.model))
        modules = {each.path: each for each in names}
        handles = [
            each.module.register_forward_pre_hook(note(path, each.axes[0]), with_kwargs=True)
            for path, each in modules.items()
        ]
        with torch.inference_mode():
            public.model(input_ids=ids[None], use_cache=False)
        for handle in handles:
            handle.remove()
        expected: list[int] = []
        for each in names:
            rows = counts[each.path]
            if setting == "local":
                rows = [0] * len(rows)
            elif setting == "padded":
                rows = [bucket(rows, len(ids))] * len(rows)
            expected += rows
        return expected


def rows_of_experts(requests: list[RecordedRequest], manifest: Manifest) -> np.ndarray:
    """How many rows each expert of each projection got in each forward pass: [passes, E]."""
    columns = [i for i, group in enumerate(manifest.groups) if group.of_expert]
    passes, met = list[list[int]](), set[int]()
    headers = [request.header for request in products_of(requests)]
    half = any(0 < header.answer_bits < EXACT for header in headers)
    for header in headers:
        if header.direction != Direction.FORWARD or (half and header.answer_bits == EXACT):
            continue  # of half answers, all fingerprints are made of exact ones
        if header.group not in met and not half:  # a fingerprint is made first, of rows that are no text's
            met.add(header.group)
            continue
        if header.group == 0:
            passes.append([0] * len(columns))
        if header.group in columns:
            passes[-1][columns.index(header.group)] += header.rows
    return np.array(passes)


def mixture(like: Path, into: Path) -> Path:
    """The audited model if its experts' rows are sorted, or one of random weights, with its tokenizer."""
    config = transformers.AutoConfig.from_pretrained(like)
    with torch.device("meta"):
        names = list(projections(transformers.AutoModelForCausalLM.from_config(config)))
        if names and not any(each.batched for each in names):  # those show what padded ones do
            return like
    small = transformers.MixtralConfig(
        vocab_size=config.vocab_size,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=config.bos_token_id,
        **EXPERTS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.MixtralForCausalLM(small)
        for name, parameter in model.named_parameters():
            if name.endswith("gate.weight"):
                torch.nn.init.normal_(parameter)  # as it is first, all experts are nearly as good
    model.save_pretrained(into)
    for file in like.glob("tokenizer*"):
        shutil.copy(file, into)
    return into
