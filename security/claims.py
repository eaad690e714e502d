"""The claims of ``CLAIMS.md``, each with the figure that would refute it.

Controls are claims too: an audit whose attacks fail where they must succeed is blind, and proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from security.capture import ELSEWHERE, ONE_TIME, PLAIN, RING_BANK, SAME
from security.judges import (
    IMPRINTS,
    LEARNING_ATTACKS,
    ON_RING,
    TOKEN_ATTACKS,
    WITH_MASKS,
    all_succeed,
    at_chance,
    controlled,
    no_cross_talk,
    none_noticed,
    none_succeed,
    planted_found,
    repeats_found,
    resolved,
    reuse_counted,
    same_for_all,
    seeds_fresh,
    separated,
    silent,
    stolen,
    succeeds,
    uniform,
    weak,
)
from security.plan import BOTH, MALICIOUS, PROVIDER, SOURCE, AuditResult


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds, with the figure that says so.

    ``weak``: a control that holds, but in so few trials that it could by chance.
    """

    identity: str
    holds: bool
    figure: str
    weak: bool = False

    @property
    def word(self) -> str:
        """For readers."""
        return "REFUTED" if not self.holds else "weak" if self.weak else "holds"


@dataclass(frozen=True)
class Claim:
    """One line of ``CLAIMS.md``; ``judge`` gives whether it holds and the figure."""

    identity: str
    text: str
    mode: str
    attack: str
    bound: str
    judge: Callable[[AuditResult], tuple[bool, str]]

    def verdict(self, result: AuditResult) -> Verdict:
        """Of one audit. What was not measured does not hold."""
        holds, figure = self.judge(result)
        control = self.identity.startswith("control")
        return Verdict(
            self.identity, holds, figure, holds and control and weak(result, self.attack.split(", "))
        )


CLAIMS = (
    Claim(
        "one-time-tokens",
        "An honest-but-curious provider cannot tell any token from rows but by guessing",
        ONE_TIME,
        ", ".join(TOKEN_ATTACKS),
        "every interval holds chance",
        at_chance(ONE_TIME, PROVIDER, TOKEN_ATTACKS, WITH_MASKS),
    ),
    Claim(
        "one-time-training",
        "An honest-but-curious provider cannot tell labels or a batch's tokens from rows but by guessing",
        ONE_TIME,
        ", ".join(LEARNING_ATTACKS),
        "every interval holds chance",
        at_chance(ONE_TIME, PROVIDER, LEARNING_ATTACKS),
    ),
    Claim(
        "one-time-adapter",
        "An honest-but-curious provider cannot copy the adapter, or its negative, from rows",
        ONE_TIME,
        "adapter extraction",
        "the interval holds cosine 0",
        at_chance(ONE_TIME, PROVIDER, ("adapter extraction",)),
    ),
    Claim(
        "one-time-indistinguishable",
        "Rows of two inputs that the provider chose itself look the same to it",
        ONE_TIME,
        "distinguishing game",
        "the interval holds advantage 0",
        at_chance(ONE_TIME, PROVIDER, ("distinguishing game",)),
    ),
    Claim(
        "one-time-uniform",
        "Every byte of products' rows is uniform, and no mask serves twice, for whatever product",
        ONE_TIME,
        "uniformity and independence",
        "smallest p above its level; no block of 16 bytes, no run of the top bytes of 8 numbers comes again",
        uniform,
    ),
    Claim(
        "one-time-separation",
        "The provider is sent rows and neither masks nor seeds, a mask source seeds and no rows",
        ONE_TIME,
        "operations in both transcripts",
        "provider: requests to multiply rows only; mask source: seeds only; some of each",
        separated,
    ),
    Claim(
        "one-time-mask-source",
        "What a mask source gets are fresh random seeds, which have nothing to do with any row",
        f"{ONE_TIME}, {SOURCE}",
        "seed prediction",
        "32 bytes each, none twice, smallest p above its level",
        seeds_fresh,
    ),
    Claim(
        "verified",
        "A wrong product is noticed",
        f"{ONE_TIME}, verify=always",
        "altered answers",
        "every lie",
        succeeds(f"{ONE_TIME}, verify=always", "malicious provider", "altered answers", 1.0),
    ),
    Claim(
        "verified-effects",
        "A wrong effect of a mask is noticed",
        f"{ONE_TIME}, verify=always",
        "altered answers",
        "every lie of a mask source",
        succeeds(f"{ONE_TIME}, verify=always", "malicious mask source", "altered answers", 1.0),
    ),
    Claim(
        "abort-oracle",
        "Whether a session stops at a wrong product does not depend on its rows",
        f"{ONE_TIME}, verify=always",
        "abort oracle",
        "as many requests follow every lie; the interval holds chance",
        same_for_all("abort oracle"),
    ),
    Claim(
        "imprinted-parameters",
        "Embeddings and head that the provider crafted do not make rows tell tokens or labels",
        ONE_TIME,
        ", ".join(IMPRINTS),
        "every interval holds chance",
        at_chance(ONE_TIME, MALICIOUS, IMPRINTS),
    ),
    Claim(
        "no-speculation",
        "Unless the tenant asks for speculation, numbers of rows do not say whether a text repeats itself",
        ONE_TIME,
        "speculation",
        "the same numbers for every prompt of a length; the interval holds chance",
        same_for_all("speculation"),
    ),
    Claim(
        "local-experts",
        "Where a mixture's experts stay with the tenant, nothing about them is seen",
        f"{ONE_TIME}, experts local",
        "routing, local experts",
        "the same numbers of rows for every prompt of a length; the interval holds chance",
        same_for_all("routing, local experts"),
    ),
    Claim(
        "padded-experts",
        "Of up to 16 tokens padded experts do not show which experts they go to",
        f"{ONE_TIME}, experts padded",
        "routing, padded experts",
        "the same numbers of rows for every prompt of a length; the interval holds chance",
        same_for_all("routing, padded experts"),
    ),
    Claim(
        "hostile-tokenizer",
        "A tokenizer of the provider reads no file of the tenant",
        PLAIN,
        "a file of the tenant's as vocabulary",
        "the file is never found",
        none_succeed("a file of the tenant's as vocabulary"),
    ),
    Claim(
        "hostile-filler",
        "A tokenizer that adds filler to some texts is refused before a row is sent, if a source attests",
        ONE_TIME,
        "filler",
        "the same number of rows, none, for every prompt; the interval holds chance",
        same_for_all("filler"),
    ),
    Claim(
        "hostile-generation",
        "A provider's files do not make a tenant speculate",
        PLAIN,
        "speculation that the provider asks for",
        "the same numbers for every prompt of a length; the interval holds chance",
        same_for_all("speculation that the provider asks for"),
    ),
    Claim(
        "hostile-sizes",
        "Sizes in a provider's files end in a typed error before they take memory",
        PLAIN,
        "sizes without bounds",
        "every load ends so, and takes 64 MiB at most",
        none_succeed("sizes without bounds"),
    ),
    Claim(
        "substituted-source",
        "A provider with the authority of the mask source gets no seed in its place",
        ONE_TIME,
        "substituted mask source",
        "no token",
        none_succeed("substituted mask source"),
    ),
    Claim(
        "forked-child",
        "A forked child with its parent's process id uses no mask of its parent's",
        ONE_TIME,
        "a forked child's masks",
        "no difference",
        none_succeed("a forked child's masks"),
    ),
    Claim(
        "no-cross-talk",
        "A tenant gets its own answers only from the executor's scheduler",
        "at the scheduler, not over sockets",
        "co-tenant canaries",
        "0 wrong replies, 2 or more in a product",
        no_cross_talk,
    ),
    Claim(
        "silent",
        "Nothing secret is found in logs, metrics and printed objects",
        "any",
        "log scan",
        "0 found (nothing is planted in metrics, so a search there is not controlled)",
        silent,
    ),
    Claim(
        "control-planted",
        "What is planted in logs and among printed objects is found",
        "any",
        "log scan",
        "in every place",
        planted_found,
    ),
    Claim(
        "control-clear",
        "In the clear the provider reads the tokens",
        PLAIN,
        "vocabulary matching",
        "at least 95 %",
        succeeds(PLAIN, PROVIDER, "vocabulary matching", 0.95),
    ),
    Claim(
        "control-deep",
        "In the clear it reads them in the middle of the model too",
        PLAIN,
        "search in hidden states",
        "at least 95 %",
        succeeds(PLAIN, PROVIDER, "search in hidden states", 0.95),
    ),
    Claim(
        "control-labels",
        "In the clear it reads what fine-tuning teaches",
        PLAIN,
        "label recovery",
        "at least 50 %",
        succeeds(PLAIN, PROVIDER, "label recovery", 0.5),
    ),
    Claim(
        "control-adapter",
        "In the clear it copies the adapter",
        PLAIN,
        "adapter extraction",
        "relative error below 1e-2",
        stolen,
    ),
    Claim(
        "control-game",
        "In the clear it tells chosen inputs apart",
        PLAIN,
        "distinguishing game",
        "advantage at least 0.99",
        succeeds(PLAIN, PROVIDER, "distinguishing game", 0.99),
    ),
    Claim(
        "control-same-executor",
        "The paper's scheme hides no token from the executor that computes its noise effects",
        SAME,
        "known-mask subtraction",
        "at least 95 %",
        succeeds(SAME, PROVIDER, "known-mask subtraction", 0.95),
    ),
    Claim(
        "control-reuse",
        "A bank of masks is broken by reuse, wherever its effects come from",
        f"{ELSEWHERE}; {RING_BANK}",
        "mask reuse",
        "at least 95 % after some messages, for every bank",
        reuse_counted,
    ),
    Claim(
        "control-repetition",
        "Masks that serve again under other rows are seen by their top bytes",
        RING_BANK,
        "uniformity and independence",
        "some runs of the top bytes of 8 numbers come again",
        repeats_found,
    ),
    Claim(
        "control-collusion",
        "Provider and mask source together read the tokens",
        f"{ONE_TIME}, {BOTH}",
        "vocabulary matching",
        "at least 95 %",
        succeeds(ONE_TIME, BOTH, "vocabulary matching", 0.95),
    ),
    Claim(
        "control-ring",
        "Together they also read hidden states, labels, batches and the adapter, so attacks work on a ring",
        f"{ONE_TIME}, {BOTH}",
        ", ".join(ON_RING),
        ", ".join(f"{attack} at least {least:g}" for attack, least in ON_RING.items()),
        all_succeed(ONE_TIME, BOTH, ON_RING),
    ),
    Claim(
        "control-resolution",
        "In every attack on one-time a score a little away from chance would have counted",
        ONE_TIME,
        "all attacks on the provider's view",
        "an observed score 1 point of 100 above chance counts (in a quick audit 10); below, where any can",
        resolved,
    ),
    Claim(
        "control-unverified",
        "Without verification lies go unnoticed",
        f"{ONE_TIME}, verify=off",
        "altered answers",
        "none noticed",
        none_noticed,
    ),
    Claim(
        "control-abort-oracle",
        "A check that tolerates small errors tells two rows apart by who stops",
        f"{ONE_TIME}, verify=off, checked with a tolerance",
        "abort oracle",
        "at least 95 %",
        controlled({"abort oracle": 0.95}),
    ),
    Claim(
        "control-imprinted",
        "In the clear the provider reads tokens and labels off rows of its own parameters",
        PLAIN,
        ", ".join(IMPRINTS),
        "imprinted embeddings at least 0.95, imprinted head at least 0.9",
        controlled({"imprinted embeddings": 0.95, "imprinted head": 0.9}),
    ),
    Claim(
        "control-speculation",
        "With prompt lookup numbers of rows say whether a text repeats itself",
        f"{ONE_TIME}, prompt lookup",
        "speculation",
        "at least 75 %",
        controlled({"speculation": 0.75}),
    ),
    Claim(
        "control-routing",
        "Where experts are routed, the provider recognises prompts that it knows",
        f"{ONE_TIME}, experts routed",
        "routing, padded experts",
        "the control of routing, padded experts: at least 95 %",
        controlled({"routing, padded experts": 0.95}),
    ),
    Claim(
        "control-hostile-tokenizer",
        "What transformers makes of the same files holds a file of the tenant",
        f"{PLAIN}, loaded by transformers",
        "a file of the tenant's as vocabulary",
        "all",
        controlled({"a file of the tenant's as vocabulary": 1.0}),
    ),
    Claim(
        "control-hostile-filler",
        "Where nobody attests, filler says which texts name the word",
        f"{PLAIN}, nobody attests",
        "filler",
        "at least 95 %",
        controlled({"filler": 0.95}),
    ),
    Claim(
        "control-hostile-generation",
        "Generated as transformers reads such a file, numbers of rows say whether a text repeats itself",
        f"{PLAIN}, loaded by transformers",
        "speculation that the provider asks for",
        "at least 75 %",
        controlled({"speculation that the provider asks for": 0.75}),
    ),
    Claim(
        "control-hostile-sizes",
        "Loaded by transformers, such files take memory or end in any error",
        f"{PLAIN}, loaded by transformers",
        "sizes without bounds",
        "all",
        controlled({"sizes without bounds": 1.0}),
    ),
    Claim(
        "control-substituted-source",
        "Where the tenant waives the sign, the provider in the place of the mask source reads the tokens",
        f"{ONE_TIME}, allow_same authority",
        "substituted mask source",
        "all",
        controlled({"substituted mask source": 1.0}),
    ),
    Claim(
        "control-forked-child",
        "Without the guard the provider reads the difference of a child's row and its parent's",
        f"{ONE_TIME}, children go on",
        "a forked child's masks",
        "all",
        controlled({"a forked child's masks": 1.0}),
    ),
)


def judge(result: AuditResult) -> list[Verdict]:
    """Every claim, in the order of ``CLAIMS.md``."""
    return [claim.verdict(result) for claim in CLAIMS]
