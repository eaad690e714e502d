"""Options from a dataclass and from a file, and configurations that check themselves."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from provider.cli import app
from provider.config import ServeConfig
from provider.engine.scheduler import POLICIES
from provider.executor.loading import NUMERICS
from shared.errors import ConfigurationError
from shared.options import fields_of
from shared.secrets import text_of
from tenant_sdk.command_line.main import app as tenant_app
from tenant_sdk.session.options import SessionConfig
from tenant_sdk.tuning.options import TrainingOptions
from tenant_sdk.tuning.sampling import Sampling

REQUIRED: dict[str, Any] = {"model_dir": Path("m"), "tls_dir": Path("t"), "token_file": Path("f")}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """What the command would serve."""
    configs: list[ServeConfig] = []

    def provider(config: ServeConfig, **_: Any) -> Any:
        configs.append(config)
        raise ConfigurationError("enough")

    monkeypatch.setattr("provider.serve.provider.Provider", provider)
    monkeypatch.setattr("provider.cli.log_to_console", lambda log_format: None)
    monkeypatch.setattr("provider.cli.keep_freed_memory", lambda: None)
    for check in ("check_inputs", "check_outputs"):
        monkeypatch.setattr(f"provider.cli.{check}", lambda *_: None)
    monkeypatch.setattr("provider.cli.bound", lambda *_: nullcontext())
    return configs


def serve(*arguments: object) -> str:
    """What it says at the end."""
    result = CliRunner().invoke(app, ["serve", *map(str, arguments)])
    return str(result.exception) if isinstance(result.exception, ConfigurationError) else result.output


def test_the_choices_are_those_that_there_are() -> None:
    for name in NUMERICS:
        ServeConfig(**REQUIRED, numerics=name)
    for name in POLICIES:
        ServeConfig(**REQUIRED, batching=name)
    for option, known in (("numerics", NUMERICS), ("batching", POLICIES)):
        assert set(fields_of(ServeConfig)[option].option.choices) == set(known)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("numerics", "float8", "numerics='float8' must be one of float32, bfloat16, ring"),
        ("batching", "some", "batching='some' must be one of opportunistic, none, lockstep"),
        ("log_format", "xml", "log_format='xml' must be one of text, json"),
        ("port", 65536, "port=65536 must be at least 0 and at most 65535"),
        ("admin_port", -1, "admin_port=-1"),
        ("max_connections", 0, "max_connections=0 must be at least 1"),
        ("drain_seconds", math.nan, "drain_seconds=nan"),
        ("tenant_requests", math.inf, "tenant_requests=inf"),
        ("tls_dir", None, "tls_dir=PATH is missing"),
        ("token_file", None, "or try it all out on one machine with dev=True"),
        (
            "dev",
            True,
            "dev=True makes certificates and tokens in dev_dir='symbiosis-dev': leave out tls_dir='t'",
        ),
        ("decode_objective_ms", 0.5, "decode_objective_ms=0.5 must be at least 1"),
    ],
)
def test_a_provider_that_cannot_be(option: str, value: object, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ServeConfig(**{**REQUIRED, option: value})
    assert message in str(caught.value)


def test_floats_are_tried_without_masks() -> None:
    with pytest.raises(
        ConfigurationError, match=r"leave out numerics='float32'; .* give tenants --privacy p"
    ):
        ServeConfig(model_dir=Path("m"), dev=True, numerics="float32")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 9000, "admin_port": 9000}, "port=9000 and admin_port=9000 are the same"),
        (
            {"tenant_mib": 600, "total_mib": 500},
            "tenant_mib=600 is too much: all tenants together have total_mib=500",
        ),
        ({"tenant_connections": 65, "max_connections": 64}, "tenant_connections=65 is too much"),
        ({"usage_seconds": 60}, "usage_seconds=60 has no effect without usage_file=FILE"),
        ({"local_mib": 60}, "local_mib=60 has no effect without local_dir=FOLDER"),
        ({"dev_dir": Path("d")}, "dev_dir='d' has no effect without dev=True"),
        ({"part": "0/2"}, "part='0/2' must be written k/n"),
        ({"part": "3/2"}, "part='3/2' must be one of 2 parts, and there is no number 3"),
        ({"fsdp": True}, "fsdp=True has no effect without workers=N"),
        ({"fsdp": True, "workers": 2}, "numerics='ring' has none: choose float32 or bfloat16, or"),
        ({"fsdp": True, "workers": 2, "numerics": "ring-fine"}, "numerics='ring-fine' has none: choose"),
        ({"fsdp": True, "workers": 2, "stripes": 2, "numerics": "float32"}, "leave out stripes=2"),
        (
            {"fsdp": True, "workers": 2, "device": "cuda:1", "numerics": "float32"},
            "replace device='cuda:1' by device='cuda'",
        ),
        ({"fsdp": True, "workers": 2, "numerics": "bfloat16"}, ""),
        ({"launcher": "ray"}, "launcher='ray' has no effect without workers=N"),
        ({"launcher": "ray", "workers": 2, "stripes": 2}, "one worker: leave out stripes=2"),
        ({"launcher": "ray", "workers": 2, "device": "cuda:1"}, "replace device='cuda:1' by device='cuda'"),
        (
            {"launcher": "ray", "workers": 2, "numerics": "float32", "fsdp": True},
            "one worker: leave out fsdp",
        ),
        ({"launcher": "ray", "workers": 2, "device": "cuda"}, ""),
        ({"devices": "cpu,cpu", "workers": 2}, "a worker for each device it names: leave out workers=2"),
        (
            {"devices": "cuda:0", "device": "cuda"},
            "a worker for each device it names: leave out device='cuda'",
        ),
        ({"devices": "cpu,"}, "devices='cpu,' lacks a name between two commas or at an end"),
        ({"devices": "cpu,cpu,cpu", "stripes": 2}, "devices='cpu,cpu,cpu' cannot be divided into stripes=2"),
        ({"stripes": 2}, "stripes=2 has no effect without workers=N or devices=NAME,NAME"),
        ({"json": True}, "json=True has no effect without plan=True"),
        ({"plan": True, "part": "1/2"}, "plan=True covers all layers: leave out part='1/2'"),
        ({"plan": True, "fsdp": True, "workers": 2, "numerics": "float32"}, "and stripes: leave out fsdp"),
        ({"devices": "cpu,cpu", "stripes": 2}, ""),
        ({"port": 0, "admin_port": 0}, ""),
        ({"tenant_mib": 600, "total_mib": 0}, ""),
        ({"total_mib": 100}, ""),  # the default of one tenant is no wish
        ({"max_connections": 10}, ""),
        ({"usage_seconds": 60, "usage_file": Path("u")}, ""),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    if not message:
        ServeConfig(**REQUIRED, **options)
        return
    with pytest.raises(ConfigurationError) as caught:
        ServeConfig(**REQUIRED, **options)
    assert message in str(caught.value)


def test_every_option_arrives_at_the_provider(served: list[ServeConfig]) -> None:
    """Each with another value than its default."""
    given: dict[str, Any] = {
        field.name: {bool: True, int: 3, float: 4.5, str: "x"}.get(type(field.default), Path(field.name))
        for field in dataclasses.fields(ServeConfig)
    } | {"batching": "none", "log_format": "json", "dev": False, "admin_port": 4}
    given["part"] = "2/3"
    given |= {"devices": "", "plan": False, "json": False}  # instead of workers and part
    given["dev_dir"] = ServeConfig.dev_dir  # which goes with dev alone
    given["stripes"] = 1  # which does not go with fsdp
    given["numerics"] = "float32"
    given["launcher"] = ServeConfig.launcher  # the other one goes neither with stripes nor with every device
    words = ["model_dir"]
    for name, value in given.items():
        if name not in ("model_dir", "dev", "dev_dir", "devices", "plan", "json"):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    assert serve(*words) == "enough"
    assert [dataclasses.asdict(config) for config in served] == [given]


def test_a_file_has_options_and_the_command_line_wins(served: list[ServeConfig], tmp_path: Path) -> None:
    file = tmp_path / "provider.toml"
    file.write_text(
        'model_dir = "m"\ntls_dir = "t"\ntoken_file = "f"\nport = 1\nserve_head = true\nbatch_wait_ms = 2\n'
    )
    assert serve("--config", file, "--port", 2) == "enough"
    assert served == [ServeConfig(**REQUIRED, port=2, serve_head=True, batch_wait_ms=2.0)]


@pytest.mark.parametrize(
    ("text", "key", "wrong"),
    [
        ('prot = 1\nport = "x"', "prot", "no such option; did you mean port?"),
        ("max-connections = 1", "max-connections", "no such option; did you mean max_connections?"),
        ("max_connections = 0", "max_connections", "greater than or equal to 1"),
        ('port = "1"', "port", "Expected `int`"),
        ("host = 1", "host", "Expected `str`"),
        ("serve_head = 1", "serve_head", "Expected `bool`"),
        ('[limits]\nport = "1"', "limits", "no such option; the keys are admin_host, admin_port"),
        ('config = "other.toml"', "config", "no such option"),
    ],
)
def test_a_file_with_mistakes(text: str, key: str, wrong: str, served: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "provider.toml"
    file.write_text(text)
    said = serve("--config", file, "m")
    assert said.startswith(f"{file}: {key}: ")
    assert wrong in said
    assert ("the keys are" in said) == ("the keys are" in wrong or key == "config")
    assert not served


@pytest.mark.parametrize(("data", "wrong"), [(b"port 1", "is not TOML"), (b"\xff", "is not TOML")])
def test_a_file_that_is_none(data: bytes, wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "provider.toml"
    assert f"cannot read {file}: No such file" in serve("--config", file)
    file.write_bytes(data)
    assert f"{file} {wrong}" in serve("--config", file)


def test_a_tenants_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what ``connect`` takes and of the command's own; tokens are named, not given."""
    monkeypatch.setenv("A_TOKEN", "t0k3n")
    opened: list[SessionConfig] = []

    def open_session(config: SessionConfig) -> None:
        opened.append(dataclasses.replace(config, token=text_of(config.token)))
        raise ConfigurationError("enough")

    monkeypatch.setattr("tenant_sdk.session.opening.open_session", open_session)
    file = tmp_path / "tenant.toml"
    text = """
        provider = "wss://a.example"
        token_env = "A_TOKEN"
        mask_source = ["local:a", "local:b"]
        allow_transcript = true
        timeout = 3
        temperature = 0.5
        prompt = "x"
    """
    file.write_text(text)
    CliRunner().invoke(tenant_app, ["generate", "--config", str(file), "--mask-source", "local:c"])
    common: dict[str, Any] = {"provider": "wss://a.example", "token": "t0k3n", "allow_transcript": True}
    assert opened == [SessionConfig(**common, mask_sources=["local:c"], timeout=3.0)]
    CliRunner().invoke(tenant_app, ["generate", "--config", str(file)])
    assert opened[1:] == [SessionConfig(**common, mask_sources=["local:a", "local:b"], timeout=3.0)]
    for command, change, message in (
        (
            "generate",
            'token = "t0k3n"',
            "token: there is no such option; secrets are not kept here: use token_env",
        ),
        ("generate", "digest = 1", "digest: Expected `str`"),
        ("doctor", "", "temperature: there is no such option; "),
    ):
        file.write_text(f"{text}\n{change}")
        said = str(CliRunner().invoke(tenant_app, [command, "--config", str(file)]).exception)
        assert f"{file}: {message}" in said
    file.write_text('mask_source = "local:a"')
    said = str(CliRunner().invoke(tenant_app, ["generate", "--config", str(file)]).exception)
    assert "mask_source: Expected `array`, got `str`" in said


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Sampling(seed=-1), "seed=-1 must be at least 0"),
        (lambda: Sampling(temperature=1e-40), "temperature=1e-40 must be 0 or at least 0.001"),
        (lambda: Sampling(temperature=math.nan), "temperature=nan must be at least 0"),
        (
            lambda: TrainingOptions(data=[Path("b")], output=Path("a"), memory_gib=math.nan),
            "memory_gib=nan must be more",
        ),
    ],
)
def test_numbers_that_libraries_do_not_take(make: Callable[[], object], why: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        make()
