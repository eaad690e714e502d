"""The claims about a gateway's traffic; those of ``security.verdicts.claims`` are about one session's."""

from __future__ import annotations

from functools import partial

from security.verdicts.claim import Claim
from security.verdicts.judges import (
    GATEWAY_ADAPTERS,
    GATEWAY_READ,
    GATEWAY_TOKENS,
    all_succeed,
    at_chance,
    same_for_all,
    sent_nothing_plain,
    steps_vary,
    succeeds,
    uniform,
)
from security.verdicts.plan import BOTH, GATEWAY, GATEWAY_LOOKUP, PROVIDER

CLAIMS = (
    Claim(
        "gateway-tokens",
        "Of sequences that share a gateway's requests no token is told from rows but by guessing",
        GATEWAY,
        ", ".join(GATEWAY_TOKENS),
        "every interval holds chance",
        at_chance(GATEWAY, PROVIDER, GATEWAY_TOKENS),
    ),
    Claim(
        "gateway-adapters",
        "Rows do not say which adapter a sequence has, nor whether sequences have the same one",
        GATEWAY,
        ", ".join(GATEWAY_ADAPTERS),
        "every interval holds chance",
        at_chance(GATEWAY, PROVIDER, GATEWAY_ADAPTERS),
    ),
    Claim(
        "gateway-sequences",
        "Rows do not say where in a request one sequence ends and the next begins",
        GATEWAY,
        "boundary of sequences",
        "the interval holds chance",
        at_chance(GATEWAY, PROVIDER, ("boundary of sequences",)),
    ),
    Claim(
        "gateway-uniform",
        "Every byte of a gateway's rows is uniform, and no mask serves twice, for whatever sequence",
        GATEWAY,
        "uniformity and independence",
        "smallest p above its level; no block of 16 bytes, no run of the top bytes of 8 numbers comes again",
        partial(uniform, mode=GATEWAY),
    ),
    Claim(
        "gateway-transcript",
        "Adapters' names and weights, API keys, prompts and rows without masks are sent to no executor",
        GATEWAY,
        "transcript search",
        "0 found in what both executors recorded, where the tenant's name is found",
        sent_nothing_plain,
    ),
    Claim(
        "gateway-no-speculation",
        "Without --speculate a gateway's numbers of rows do not say whether a text repeats itself",
        GATEWAY,
        "speculation of a gateway",
        "the same numbers for every prompt of a length; the interval holds chance",
        same_for_all("speculation of a gateway"),
    ),
)

CONTROLS = (
    Claim(
        "control-gateway",
        "Provider and mask source together read all of that off a gateway's requests",
        f"{GATEWAY}, {BOTH}",
        ", ".join(GATEWAY_READ),
        ", ".join(f"{attack} at least {least:g}" for attack, least in GATEWAY_READ.items()),
        all_succeed(GATEWAY, BOTH, GATEWAY_READ),
    ),
    Claim(
        "control-gateway-counts",
        "Numbers of rows say when sequences come and go, and how long each prompt is",
        GATEWAY,
        "traffic analysis, gateway",
        "at least 75 % of prompts' lengths",
        succeeds(GATEWAY, PROVIDER, "traffic analysis, gateway", 0.75),
    ),
    Claim(
        "control-gateway-cache",
        "With --prefix-cache row counts say whether a prompt begins as one before, of the same adapter",
        GATEWAY,
        "cached prefix",
        "at least 95 %",
        succeeds(GATEWAY, PROVIDER, "cached prefix", 0.95),
    ),
    Claim(
        "control-gateway-speculation",
        "With --speculate a gateway's number of steps depends on the text",
        GATEWAY_LOOKUP,
        "numbers of steps",
        "more than one number of steps for prompts and answers of one length",
        steps_vary,
    ),
)
