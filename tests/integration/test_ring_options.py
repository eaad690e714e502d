"""Options of ``connect`` that do not fit each other or the provider, and what is said about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Executor
from ring_sessions import ExecutorFactory, one_time

import tenant_sdk
from shared.errors import ConfigurationError
from shared.wire.header import Direction

pytest_plugins = ("ring_fixtures",)


def connect(executor: Executor, **options: Any) -> tenant_sdk.Session:
    return tenant_sdk.connect(executor.url, token=executor.token, ca=executor.ca, **options)


def test_one_time_is_the_default_and_names_the_choices(executors: ExecutorFactory) -> None:
    with pytest.raises(ConfigurationError) as caught:
        connect(executors("llama")[0])
    for choice in ("mask_sources=['wss://", "local:FOLDER", "noise-bank", "plain"):
        assert choice in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"privacy": "one-time", "mask_sources": []}, "needs a mask source"),
        ({"mask_sources": "wss://a:1"}, "must be a list"),
        ({"mask_sources": ["wss://a:1", "wss://a:1"]}, "named twice"),
        ({"mask_sources": ["local:a", "local:a"]}, "named twice"),
        ({"privacy": "plain", "mask_sources": ["wss://a:1"]}, "uses no masks"),
        ({"privacy": "noise-bank", "mask_sources": ["wss://a:1", "wss://b:1"]}, "one mask source"),
        ({"privacy": "none"}, "privacy='none' must be one of one-time, noise-bank, plain"),
        ({"verify": "never"}, "verify='never' must be one of always, sampled, off"),
        ({"verify_rate": 0.0}, "verify_rate"),
        ({"verify_rate": 1.5}, "verify_rate"),
        ({"verify_rate": -0.1}, "verify_rate"),
        ({"verify_rate": float("nan")}, "verify_rate"),
        ({"mask_budget_mib": -1.0}, "mask_budget_mib"),
        ({"mask_budget_mib": float("nan")}, "mask_budget_mib"),
        ({"mask_budget_mib": float("inf")}, "mask_budget_mib"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"wire_dtype": "int32"}, "wire_dtype='int32' must be one of float32, bfloat16"),
        ({"fingerprints": "file"}, "give the mask source's own token"),
        ({"fingerprints": "file", "allow_same": ["all"]}, "is encrypted: give fingerprint_key"),
        ({"fingerprint_key": "x"}, "fingerprints="),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str, executors: ExecutorFactory) -> None:
    """Refused before anybody is connected to."""
    defaults: dict[str, Any] = {"mask_sources": ["wss://127.0.0.1:1"]}
    if options.get("privacy") in ("plain", "noise-bank"):
        defaults = {}
    nobody = Executor("wss://127.0.0.1:1", "token", executors("llama")[0].ca)
    with pytest.raises(ConfigurationError, match=message):
        connect(nobody, **(defaults | options))


@pytest.mark.parametrize("numerics", ["float32", "bfloat16"])
def test_a_float_executor_cannot_do_it(
    numerics: str, serve: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    executor = serve(checkpoint("llama"), numerics=numerics)
    with pytest.raises(ConfigurationError, match=f"computes in {numerics}.*--numerics ring.*noise-bank"):
        connect(executor, mask_sources=[f"local:{checkpoint('llama')}"])
    for verify in ("always", "sampled"):
        for privacy in ("plain", "noise-bank"):
            with pytest.raises(ConfigurationError, match="nothing to verify"):
                connect(executor, privacy=privacy, verify=verify)


@pytest.mark.parametrize("privacy", ["plain", "noise-bank"])
@pytest.mark.parametrize("verify", ["always", "sampled"])
def test_verification_without_masks_needs_fingerprints(
    privacy: str, verify: str, executors: ExecutorFactory
) -> None:
    with pytest.raises(ConfigurationError, match=r"needs fingerprints.*fingerprint CHECKPOINT"):
        connect(executors("llama")[0], privacy=privacy, verify=verify)


def test_a_bank_from_a_local_checkpoint_can_be_verified_with_it(
    executors: ExecutorFactory, checkpoint: Callable[[str], Path]
) -> None:
    local = f"local:{checkpoint('llama')}"
    with connect(
        executors("llama")[0], privacy="noise-bank", mask_sources=[local], verify="always"
    ) as session:
        session.groups[0].plain_product(Direction.FORWARD, 1, (torch.ones((2, 64)),))
        assert session.stats.verified_rows == 2


def test_bfloat16_on_the_wire_is_of_floats_alone(executors: ExecutorFactory) -> None:
    with pytest.raises(ConfigurationError, match="takes int32 on the wire"):
        connect(executors("llama")[0], privacy="plain", wire_dtype="bfloat16")


def test_a_refused_session_leaves_nothing_open(
    executors: ExecutorFactory, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """No connection and no thread, whatever was opened before the reason was found."""
    import gc
    import threading

    from raw_peers import eventually, metric

    provider, source, _ = executors("llama")

    def nothing_open() -> bool:
        gc.collect()  # what was tested before may have left sessions that nobody closed
        return not any(t.name.startswith("symbiosis") for t in threading.enumerate()) and not any(
            metric(executor, "symbiosis_connections") for executor in (provider, source)
        )

    eventually(nothing_open)  # nor of what was tested before
    for sources in (
        [source.url],  # the same operator
        [f"local:{tmp_path}"],
        [f"local:{checkpoint('gpt2')}"],
        [executors("qwen2")[0].url],
    ):
        with pytest.raises(ConfigurationError):
            connect(provider, mask_sources=sources)
    eventually(nothing_open)


def test_padded_rows_change_nothing_but_their_number(executors: ExecutorFactory) -> None:
    provider, source, _ = executors("llama")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    results, sent = [], []
    for pad_rows in (0, 1, 16):
        with one_time(provider, source, pad_rows=pad_rows, verify="off") as session:
            results.append(session.products.submit(5, Direction.FORWARD, 1, [x]).result())
            sent.append(session.stats.rows)
    assert sent == [5, 8, 16]
    for (result,) in results:
        assert torch.equal(result, results[0][0])


@pytest.mark.parametrize("privacy", ["plain", "noise-bank"])
def test_padding_would_show_other_modes_masks(privacy: str, executors: ExecutorFactory) -> None:
    with pytest.raises(ConfigurationError, match="pad_rows"):
        connect(executors("llama")[0], privacy=privacy, pad_rows=8)
