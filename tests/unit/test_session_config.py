"""The options of a session as one object: those of ``connect``, and none of its secrets shown."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from option_reference import reference

import tenant_sdk
from shared.command_line import CommandLine
from shared.errors import ConfigurationError
from shared.options import secret_reference_keys
from shared.secrets import Secret
from tenant_sdk.connection.urls import is_local, party_name, replicas_of
from tenant_sdk.gateway.connection import read, written
from tenant_sdk.gateway.options import GatewayOptions
from tenant_sdk.products.bank_options import NoiseBankOptions
from tenant_sdk.session.options import EXECUTORS, TRUST, WIRE_DTYPES, SessionConfig, SessionOption
from tenant_sdk.session.profiles import BELONGINGS, FIELDS, SOURCE_KINDS, SOURCE_NAMES

HERE = {"provider": "wss://a.example:1", "token": "t0k3n", "mask_sources": ["local:folder"]}


def test_they_are_the_parameters_of_connect() -> None:
    """With the same types and defaults, and what each is stands in its documentation."""
    fields = inspect.signature(SessionConfig).parameters
    assert inspect.signature(tenant_sdk.connect).parameters == fields
    assert tenant_sdk.connect.__doc__ is not None
    assert all(f"\n        {name}: " in tenant_sdk.connect.__doc__ for name in fields)


def test_all_parameters_of_connect_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[SessionConfig] = []
    monkeypatch.setattr("tenant_sdk.session.opening.open_session", opened.append)
    given = HERE | {"timeout": 3.0, "noise_bank": NoiseBankOptions(masks=2), "digest": "d", "pad_rows": 4}
    tenant_sdk.connect(**given)  # type: ignore[arg-type]
    assert opened == [SessionConfig(**given)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({}, "local"),
        ({"experts": "padded"}, "padded"),
        ({"experts": "routed"}, "routed"),
        ({"privacy": "noise-bank"}, "routed"),
        ({"privacy": "plain", "mask_sources": []}, "routed"),
        ({"privacy": "plain", "mask_sources": [], "experts": "local"}, "local"),
    ],
)
def test_where_experts_are(options: dict[str, object], where: str) -> None:
    """What shows how many tokens each gets has to be asked for where masks promise more."""
    assert SessionConfig(**(HERE | options)).where_experts == where  # type: ignore[arg-type]


def test_secrets_are_not_shown() -> None:
    secrets = {"token": "t0k3n", "mask_source_token": "s0urc3", "fingerprint_key": "k3y"}
    config = SessionConfig(**(HERE | secrets), fingerprints="file")  # type: ignore[arg-type]
    assert dataclasses.asdict(config).items() >= secrets.items()
    assert "a.example" in repr(config)
    assert not any(secret in repr(config) for secret in secrets.values())


def test_it_cannot_be_changed() -> None:
    config = SessionConfig(**HERE)  # type: ignore[arg-type]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.privacy = "plain"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "when"),
    [
        ({}, "always"),
        ({"verify": "off"}, "off"),
        ({"privacy": "plain", "mask_sources": []}, "off"),
        ({"privacy": "plain", "mask_sources": [], "fingerprints": "file"}, "always"),
        ({"privacy": "noise-bank", "verify": "sampled"}, "sampled"),
    ],
)
def test_when_answers_are_checked(options: dict[str, object], when: str) -> None:
    assert SessionConfig(**(HERE | options)).when_verified == when  # type: ignore[arg-type]


def test_each_mask_source_has_its_own_credentials() -> None:
    sources = ["wss://b.example:1", "local:folder", "ipc:///directory"]
    config = SessionConfig(
        **HERE | {"mask_sources": sources},  # type: ignore[arg-type]
        mask_source_token=["b", "", "c"],
        mask_source_ca="system",
    )
    assert config.credentials == [("b", None), ("", "system"), ("c", "system")]
    shared = dataclasses.replace(config, mask_source_token=["b", "", "t0k3n"])
    with pytest.raises(ConfigurationError, match="have the same token"):
        shared.credentials  # noqa: B018


@pytest.mark.parametrize("option", ["ca", "mask_source_ca", "client_certificate"])
def test_certificates_without_tls_are_refused(option: str) -> None:
    options = HERE | {"provider": "ipc:///directory", "mask_sources": ["ipc:///other"], option: "file"}
    with pytest.raises(ConfigurationError, match=f"{option}=FILE is for TLS"):
        SessionConfig(**options)  # type: ignore[arg-type]


def test_every_wire_dtype_can_be_asked_for() -> None:
    for name in WIRE_DTYPES:
        assert SessionConfig(**HERE, wire_dtype=name).wire_dtype == name  # type: ignore[arg-type]


def test_parties_may_have_replicas() -> None:
    several = HERE | {"provider": ["wss://a.example:1", "wss://b.example"], "ca": "ca.pem"}
    several |= {"mask_sources": [["wss://c.example", "wss://d.example"], "local:/a,wss://b"]}
    config = SessionConfig(**several, mask_source_ca="system")  # type: ignore[arg-type]
    assert party_name(config.provider) == "wss://a.example:1 or wss://b.example"
    assert is_local(config.mask_sources[1])
    assert replicas_of("ipc:///a,b,wss://c , wss://d") == ("ipc:///a,b", "wss://c", "wss://d")


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"provider": []}, "which executor"),
        ({"provider": ["wss://a.example", "ws://b.example"]}, "everything would travel in the clear"),
        ({"provider": ["wss://a.example", "local:folder"]}, "is not an executor's URL"),
        ({"provider": "wss://a.example,wss://a.example"}, "a replica is named twice"),
        ({"mask_sources": [["wss://a.example"], "wss://a.example"]}, "a mask source is named twice"),
        ({"provider": ["ipc:///a", "ipc:///b"], "ca": "ca.pem"}, "does not use TLS"),
    ],
)
def test_replicas_that_cannot_be(options: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        SessionConfig(**(HERE | options))  # type: ignore[arg-type]


NEW_OPTION = """
import dataclasses, sys
from typing import Annotated
from shared.options import Option
import tenant_sdk.session.options as config

@dataclasses.dataclass(frozen=True)
class Extended(config.SessionConfig):
    chatter: Annotated[int, Option(config.MASKS, "Requests that say nothing.", minimum=0, unit="COUNT")] = 0

config.SessionConfig = Extended
from typer.testing import CliRunner
import tenant_sdk
from tenant_sdk.command_line import main as cli
from tenant_sdk.session import opening
from shared.errors import ConfigurationError

opened = []
def open_session(config):
    opened.append(config.chatter)
    raise ConfigurationError("enough")
opening.open_session = open_session

profile, tests = sys.argv[1:]
sys.path.append(tests)
from option_reference import reference
common = ["--profile", profile, "--prompt", "x"]
print([str(CliRunner().invoke(cli.app, ["generate", *common, *more]).exception) for more in (
    [], ["--chatter", "3"], ["--chatter", "-1"])])
for given in ({}, {"chatter": 4}):
    try:
        tenant_sdk.connect(profile=profile, **given)
    except ConfigurationError as error:
        print(error)
print(opened, "`--chatter COUNT`" in reference())
"""


def test_a_new_option_is_one_field(tmp_path: Path) -> None:
    """It is on the command line, in profiles, in ``connect`` and in the reference."""
    profile = tmp_path / "p.toml"
    profile.write_text(
        'provider = "wss://a"\ntoken_command = ["echo", "t"]\nprivacy = "plain"\nchatter = 2\n'
    )
    said = subprocess.run(
        [sys.executable, "-c", NEW_OPTION, str(profile), str(Path(__file__).parents[1])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.splitlines() == [
        "['enough', 'enough', '--chatter -1 must be at least 0']",
        "enough",
        "enough",
        "[2, 3, 2, 4] True",
    ]


def test_the_reference_is_that_of_the_fields() -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "options.md"
    assert page.read_text() == reference(), f"python tests/option_reference.py > {page}"


def test_options_that_matter_to_parties_say_whose_they_are() -> None:
    undeclared = [
        name
        for name, field in FIELDS.items()
        if (
            field.option.group in (EXECUTORS, TRUST)
            or field.option.confidential
            or field.option.unit in ("FILE", "URL")
        )
        and not isinstance(field.option, SessionOption)
    ]
    assert not undeclared, "declare them with SessionOption: whose they are, and whether they decide trust"
    assert BELONGINGS == {
        "provider": ["provider", "token", "ca", "client_certificate"],
        "mask_sources": ["mask_sources", "mask_source_token", "mask_source_ca"],
    }
    assert set(SOURCE_KINDS) == {
        key
        for name, key in SOURCE_NAMES.items()
        for key in (secret_reference_keys(key) if FIELDS[name].option.confidential else [key])
    }


def test_a_gateways_worker_is_given_all_but_secrets(tmp_path: Path) -> None:
    token = Secret("the provider's token", command=("printf", "%s%s", "t0k", "3n"), folder=tmp_path)
    assert token.read() == "t0k3n"
    config = SessionConfig(
        ["wss://a.example", "wss://b.example"],
        token=token,
        mask_sources=["wss://c.example", "local:folder"],
        mask_source_token=[Secret("the mask source's token", "C_TOKEN"), None],
        mask_source_ca=[Path("system"), None],
        ca=Path("a.pem"),
        pad_rows=8,
        allow_same={"host"},
    )
    table = json.dumps(written(config))
    assert "t0k3n" not in table
    here = Path.cwd()  # which a gateway leaves
    sources = ["wss://c.example", f"local:{here}/folder"]
    expected = dataclasses.replace(
        config, ca=f"{here}/a.pem", mask_sources=sources, mask_source_ca=["system", None]
    )
    assert read(json.loads(table)) == dataclasses.replace(expected, allow_same=["host"])
    with pytest.raises(ConfigurationError, match="where its secrets are"):
        written(dataclasses.replace(config, token="t0k3n"))


def test_a_secret_that_nobody_names_is_not_given() -> None:
    line = CommandLine(typer.Option, typer.Argument)
    (key,) = [each for each in line.parameters(GatewayOptions) if each.name == "api_key_env"]
    assert key.default is None
