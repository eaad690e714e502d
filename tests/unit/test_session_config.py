"""The options of a session as one object: those of ``connect``, and none of its secrets shown."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import tenant_sdk
from shared.errors import ConfigurationError
from tenant_sdk.config import WIRE_DTYPES, SessionConfig
from tenant_sdk.connection.urls import is_local, party_name, replicas_of
from tenant_sdk.products.noise_bank import NoiseBankOptions

HERE = {"provider": "wss://a.example:1", "token": "t0k3n", "mask_sources": ["local:folder"]}


def test_they_are_the_parameters_of_connect() -> None:
    """With the same defaults, and the profile that others come from."""
    fields = {
        field.name: inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(SessionConfig)
    }
    parameters = inspect.signature(tenant_sdk.connect).parameters.values()
    assert {each.name: each.default for each in parameters} == fields | {"profile": None}


def test_all_parameters_of_connect_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[SessionConfig] = []
    monkeypatch.setattr("tenant_sdk.composition.open_session", opened.append)
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
        ({"provider": ["ipc:///a", "ipc:///b"], "ca": "ca.pem"}, "reached without it"),
    ],
)
def test_replicas_that_cannot_be(options: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        SessionConfig(**(HERE | options))  # type: ignore[arg-type]
