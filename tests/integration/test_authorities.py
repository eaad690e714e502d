"""A certificate that is refused: which authority was given, if any, and for whom."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import RING, Executor
from typer.testing import CliRunner

import tenant_sdk
from provider.serve.certificates import write_certificates
from shared.errors import SymbiosisError, TlsError
from tenant_sdk.command_line.main import app
from tenant_sdk.command_line.options import NAMES


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Another authority, of the same name."""
    write_certificates(tmp_path, now=datetime.datetime.now(datetime.UTC))
    return tmp_path / "ca.pem"


def test_authorities_of_a_profile_go_by_its_keys(other: Path, llama: Executor, tmp_path: Path) -> None:
    """For both kinds of users; nobody typed an option."""
    token, profile = tmp_path / "token", tmp_path / "clinic.toml"
    token.write_text(llama.token)
    token.chmod(0o600)
    (tmp_path / "deep").mkdir()

    def errors(ca: str) -> str:
        text = f'provider = "{llama.url}"\nca = "{ca}"\ntoken_file = "token"\nprivacy = "plain"'
        profile.write_text(text)
        with pytest.raises(SymbiosisError) as caught:
            tenant_sdk.connect(profile=profile)
        typed = CliRunner().invoke(app, ["generate", "--prompt", "x", "--profile", str(profile)])
        assert str(typed.exception) == str(caught.value)
        return str(caught.value)

    assert "than that in `ca` in clinic.toml; ask its operator" in errors(str(other))
    missing = errors("deep/../none.pem")
    assert f"certificate file {tmp_path.resolve()}/none.pem (`ca` in clinic.toml): [Errno 2]" in missing


@pytest.mark.parametrize("source", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_a_wrong_authority_and_none(
    source: bool,
    given: bool,
    other: Path,
    serve: Callable[..., Executor],
    checkpoint: Callable[[str], Path],
) -> None:
    executor = serve(checkpoint("llama"), numerics=RING)
    option = "mask_source_ca" if source else "ca"
    options: dict[str, Any] = {option: other if given else "system" if source else None}
    if source:
        url = executor.url.replace("127.0.0.1", "localhost")
        options |= {"privacy": "one-time", "mask_sources": [url], "allow_same": ["all"]}
    with pytest.raises(TlsError) as caught:
        executor.connect(**options)
    error = str(caught.value)
    assert caught.value.untrusted
    assert error.startswith("mask source wss://localhost" if source else "the certificate of 127.0.0.1")
    said = f"than that in {option}={str(other)!r}; ask" if given else f"{option}=FILE was not given, and no"
    assert said in error
    assert (
        f"--{option.replace('_', '-')} {other if given else 'FILE'}"
        in caught.value.structured_message.shown(NAMES)
    )
