"""``symbiosis-tenant doctor`` as its users run it."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from commands import finish, here, tenant
from conftest import RING, Executor
from typer.testing import CliRunner

from provider.serve.certificates import write_certificates
from shared.launching import free_port
from tenant_sdk.command_line.main import app

LIMITS = ("--timeout", 20, "--wait", 0)
PROMPT = ("--prompt", "x")
WAIVED = ("--allow-same", "token", "--allow-same", "authority")


@pytest.fixture(scope="module")
def examined(
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[int, str]]:
    """Exit status, and what doctor says in several situations; of what is well a process says it."""
    executor = serve(checkpoint("llama"))
    well = tenant("doctor", executor, *LIMITS)
    other = tmp_path_factory.mktemp("other")
    write_certificates(other, now=datetime.datetime.now(datetime.UTC))
    wrong = {
        "port": replace(executor, url=f"wss://127.0.0.1:{free_port()}"),
        "authority": replace(executor, ca=other / "ca.pem"),
        "token": replace(executor, token="x" * 43),
        "host": replace(executor, url="wss://no-such-host.invalid:8765"),
        "variable": replace(executor, token=""),
    }
    said = {name: here("doctor", each, *LIMITS) for name, each in wrong.items()}
    assert {type(each.exception) for each in said.values()} == {SystemExit}  # it has said all
    status, out, err = finish(well)
    return {"well": (status, out + err)} | {
        name: (each.exit_code, each.output) for name, each in said.items()
    }


def test_doctor_finds_nothing(examined: dict[str, tuple[int, str]]) -> None:
    status, out = examined["well"]
    assert status == 0, out
    assert "✗" not in out
    steps = ("url", "dns", "tcp", "tls", "certificate", "token", "protocol", "manifest", "digest")
    for step in (*steps, "layers", "round trip", "upload", "download"):
        assert f"✓ {step}" in out
    assert "TLSv1.3" in out
    assert "LlamaForCausalLM" in out


@pytest.mark.parametrize(
    ("situation", "step", "wrong", "remedy"),
    [
        ("port", "tcp", "Connection refused", "compare --provider with the URL that `serve` printed"),
        (
            "authority",
            "tls",
            "another authority signed the certificate than that in --ca /",
            "ask its operator for the ca.pem",
        ),
        ("token", "token", "refused the token", "symbiosis-provider token add"),
        ("host", "dns", "cannot resolve the host name 'no-such-host.invalid'", "typing error"),
        ("variable", "token", "TENANT_TOKEN is not set", "export TENANT_TOKEN="),
    ],
)
def test_doctor_says_what_is_wrong_and_what_to_do(
    examined: dict[str, tuple[int, str]], situation: str, step: str, wrong: str, remedy: str
) -> None:
    status, out = examined[situation]
    assert status == 1, out
    finding, arrow = out.splitlines()[-2:]
    assert finding.startswith(f"✗ {step}")
    assert wrong in finding
    assert arrow.strip().startswith("→")
    assert remedy in arrow
    assert out.count("✗") == 1


@pytest.fixture(scope="module")
def ring(serve: Callable[..., Executor], checkpoint: Callable[[str], Path]) -> Executor:
    return serve(checkpoint("llama"), numerics=RING)


def doctor_says(status: int, *arguments: object) -> str:
    result = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.output


def test_doctor_examines_mask_sources_too(
    llama: Executor, ring: Executor, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENANT_TOKEN", ring.token)
    monkeypatch.setenv("SOURCE_TOKEN", "x" * 43)
    where = ("--provider", ring.url, "--ca", ring.ca, "--token-env", "TENANT_TOKEN")
    other = ring.url.replace("127.0.0.1", "localhost")
    source = ("--mask-source", other, "--mask-source", f"local:{checkpoint('llama')}")

    said = doctor_says(0, *where)
    assert "✓ numerics     ring" in said
    assert "! mask source  none given; one-time masks, the default, need one" in said
    assert "✗ authorities  give the mask source's own authority" in doctor_says(1, *where, *source)
    said = doctor_says(0, *where, *source, "--allow-same", "all")
    assert said.count("✓ download") == 2
    assert f"{other} lists the same files and parameters as the provider" in said
    assert f"local:{checkpoint('llama')} has the weights that the provider claims" in said
    assert "✓ operators    " in said
    assert "have the same address, certificate key, machine: allowed by --allow-same;" in said

    token = ("--mask-source-token-env", "SOURCE_TOKEN")
    waived = (*WAIVED, "--allow-same", "key", "--mask-source-ca", ring.ca)
    seen = ("--allow-same", "address", "--allow-same", "machine")
    said = doctor_says(1, *where, *source, *token, *waived)
    assert said.count("✓ manifest") == said.count("✗ token") == 1
    each = ("--mask-source-token-env", "TENANT_TOKEN", *token)
    said = doctor_says(0, *where, *source, *each, *waived, *seen)
    assert "✗" not in said  # one for each
    assert "have the same address, certificate key, machine: allowed by --allow-same;" in said
    said = doctor_says(1, *where, *source, *each, *waived)
    assert said.count("✗") == 1
    session = CliRunner().invoke(app, [*map(str, ("generate", *where, *source, *each, *waived, *PROMPT))])
    refused = str(session.exception)
    asked = ("address", "machine", "key", "authority", "token")  # with those that are allowed already
    assert f"if that is meant, --allow-same {' --allow-same '.join(asked)}; to try it out" in refused
    assert f"✗ operators    {refused}" in said
    said = doctor_says(1, *where, *source, "--mask-source-token-env", "TENANT_TOKEN", *waived[2:])
    assert "✗ tokens       provider and mask sources have the same token" in said
    result = CliRunner().invoke(app, [*map(str, ("doctor", *where, *source)), *token * 3])
    assert "--mask-source-token-env VAR: give one for all mask sources, or one" in str(result.exception)


def test_doctor_says_that_one_time_masks_will_not_work(
    llama: Executor, ring: Executor, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENANT_TOKEN", ring.token)
    common = ("--ca", ring.ca, "--token-env", "TENANT_TOKEN", *WAIVED, "--mask-source")
    said = doctor_says(1, "--provider", llama.url, *common, ring.url)
    assert "! numerics     float32: no one-time masks, nothing to verify" in said
    assert "serve --numerics ring" in said
    assert "✗ weights" in said
    assert "do not serve the same: other numerics" in said
    for folder, message in (("nowhere", "not a checkpoint folder"), (checkpoint("gpt2"), "does not hold")):
        said = doctor_says(1, "--provider", ring.url, *common, f"local:{folder}")
        assert re.search(f"✗ weights .*{message}", said)
