"""Profiles: what they hold, where secrets come from, and who wins."""

from __future__ import annotations

import dataclasses
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tenant_sdk
from shared.errors import ConfigurationError
from shared.secrets import Secret, text_of
from tenant_sdk.command_line.main import app
from tenant_sdk.connection.urls import replicas_of
from tenant_sdk.session.options import SessionConfig
from tenant_sdk.session.profiles import KINDS, merged, profile_here, profile_path, read_profile

PROFILE = """
provider = "wss://a.example"
ca = "a.pem"
token_env = "A_TOKEN"
client_certificate = ["client.pem", "/etc/client.key"]
privacy = "one-time"
allow_same = ["machine"]
pad_rows = 8
timeout = 3
fingerprints = "prints"
fingerprint_key_env = "KEY"

[[mask_sources]]
url = "wss://b.example"
ca = "b.pem"
token_file = "b.token"

[[mask_sources]]
url = "local:weights"

[[mask_sources]]
url = "wss://c.example"
ca = "system"
token_command = ["printf", "%s", "c t0k3n"]
"""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[SessionConfig]:
    """What would be connected to."""
    found: list[SessionConfig] = []

    def open_session(config: SessionConfig) -> None:
        found.append(revealed(config))
        raise ConfigurationError("enough")

    monkeypatch.setattr("tenant_sdk.session.opening.open_session", open_session)
    monkeypatch.setattr(SessionConfig, "credentials", None)  # which reads the files of authorities
    monkeypatch.setenv("A_TOKEN", "a")
    monkeypatch.setenv("OTHER", "other")
    monkeypatch.setenv("KEY", "k3y")
    (tmp_path / "b.token").write_text("b\n")
    (tmp_path / "b.token").chmod(0o600)
    (tmp_path / "symbiosis.toml").write_text(PROFILE)
    return found


def revealed(config: SessionConfig) -> SessionConfig:
    """With its secrets read, and without the name of the profile that it came from."""
    several = config.mask_source_token
    tokens = [text_of(each) for each in several] if isinstance(several, list) else text_of(several)  # type: ignore[arg-type]
    return dataclasses.replace(
        config,
        profile=None,
        token=text_of(config.token),
        mask_source_token=tokens,
        fingerprint_key=text_of(config.fingerprint_key),
    )


def connect(**arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        tenant_sdk.connect(**arguments)
    return str(caught.value)


def generate(*words: object) -> tuple[str, str]:
    """The error, and what was said."""
    result = CliRunner().invoke(app, ["generate", "--prompt", "x", *map(str, words)])
    return str(result.exception), result.output


def trust(*words: object) -> None:
    result = CliRunner().invoke(app, ["trust", *map(str, words)])
    assert result.exit_code == 0, result.exception


def of_the_profile(folder: Path) -> dict[str, Any]:
    return {
        "provider": "wss://a.example",
        "ca": folder / "a.pem",
        "token": "a",
        "client_certificate": (folder / "client.pem", Path("/etc/client.key")),
        "privacy": "one-time",
        "allow_same": ["machine"],
        "pad_rows": 8,
        "timeout": 3,
        "fingerprints": folder / "prints",
        "fingerprint_key": "k3y",
        "mask_sources": ["wss://b.example", f"local:{folder / 'weights'}", "wss://c.example"],
        "mask_source_token": ["b", "", "c t0k3n"],
        "mask_source_ca": [folder / "b.pem", None, "system"],
    }


def test_every_argument_of_connect_can_be_in_it() -> None:
    secrets = {f"{name}_{way}" for name in ("token", "fingerprint_key") for way in ("env", "file", "command")}
    fields = {field.name for field in dataclasses.fields(SessionConfig)}
    python_only = {"profile", "token", "fingerprint_key", "mask_source_token", "mask_source_ca", "noise_bank"}
    assert KINDS.keys() == fields - python_only | secrets


def test_what_it_says(opened: list[SessionConfig], tmp_path: Path) -> None:
    expected = SessionConfig(**of_the_profile(tmp_path))
    assert connect(profile=tmp_path / "symbiosis.toml") == "enough"
    assert generate("--profile", tmp_path / "symbiosis.toml")[0] == "enough"
    assert opened == [expected, expected]


def test_replicas_are_a_list_or_have_commas_in_between(opened: list[SessionConfig], tmp_path: Path) -> None:
    (tmp_path / "list.toml").write_text(
        'provider = ["wss://a.example", "wss://a2.example"]\ntoken_env = "A_TOKEN"\n'
        '[[mask_sources]]\nurl = ["wss://b.example", "wss://b2.example"]\nca = "system"\n'
        'token_env = "OTHER"\n'
    )
    for arguments in ((), ("--provider", "wss://x.example,wss://y.example", "--token-env", "A_TOKEN")):
        assert generate("--profile", tmp_path / "list.toml", *arguments)[0] == "enough"
    assert opened[0].provider == ["wss://a.example", "wss://a2.example"]
    assert opened[0].mask_sources == [["wss://b.example", "wss://b2.example"]]
    assert opened[0].mask_source_token == ["other"]
    assert replicas_of(opened[1].provider) == ("wss://x.example", "wss://y.example")
    (tmp_path / "list.toml").write_text("provider = [1]\n")
    assert "list.toml: provider: Expected" in connect(profile=tmp_path / "list.toml")


def test_what_is_given_wins(opened: list[SessionConfig], tmp_path: Path) -> None:
    """Also if it is the default; and a party's token and authority go with it."""
    file, said = str(tmp_path / "symbiosis.toml"), of_the_profile(tmp_path)
    masks = {"mask_sources": ["local:w"], "mask_source_token": "", "mask_source_ca": None}
    party = {"provider": "wss://x", "token": "other", "ca": None, "client_certificate": None}
    pairs: list[tuple[dict[str, Any], list[object], dict[str, Any]]] = [
        ({"pad_rows": 0}, ["--pad-rows", 0], {"pad_rows": 0}),
        ({"experts": "routed"}, ["--experts", "routed"], {"experts": "routed"}),
        ({"fill_masks": True}, ["--fill-masks"], {"fill_masks": True}),
        ({"timeout": 60.0}, ["--timeout", 60], {"timeout": 60.0}),
        ({"token": "other"}, ["--token-env", "OTHER"], {"token": "other"}),
        ({"mask_sources": ["local:w"]}, ["--mask-source", "local:w"], masks),
        ({"provider": "wss://x", "token": "other"}, ["--provider", "wss://x", "--token-env", "OTHER"], party),
        (
            {"privacy": "plain", "pad_rows": 0},
            ["--privacy", "plain", "--pad-rows", 0],
            {**masks, "mask_sources": (), "privacy": "plain", "pad_rows": 0},
        ),
    ]
    for given, words, changed in pairs:
        assert connect(profile=file, **given) == "enough"
        assert generate("--profile", file, *words)[0] == "enough"
        assert opened[-2:] == [SessionConfig(**(said | changed))] * 2, words
    assert "token=TOKEN" not in connect(profile=file, provider="wss://x")
    assert opened[-1].token == ""  # of the other provider, nothing is shown to this one
    error = generate("--profile", file, "--provider", "wss://x")[0]
    assert "--token-env VAR is missing" in error
    assert "a profile's token is not sent to another" in error


@pytest.mark.parametrize(
    ("change", "words", "message"),
    [
        ({"verify_rate": 2}, [], "`verify_rate = 2` in p.toml must be more than 0"),
        ({"verify_rate": 2}, ["--verify-rate", 3], "--verify-rate 3.0 must be more than 0 and at most 1"),
        ({"privacy": "rot13"}, [], "`privacy = 'rot13'` in p.toml must be one of one-time"),
        ({}, [], "there for those of the operating system. The provider's, `ca` in p.toml, could"),
        ({"allow_same": ["key"]}, [], "if that is meant, `allow_same = ['authority', 'key']` in p.toml; to"),
        ({}, [], "own authority: `ca` of the mask source in p.toml, or the word"),
        ({}, ["--mask-source", "wss://c"], "own token: --mask-source-token-env VAR. The"),
    ],
)
def test_errors_name_keys_of_the_profile(
    change: dict[str, Any], words: list[object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN", "a")
    monkeypatch.setenv("B_TOKEN", "b")
    lines = {"provider": "wss://a", "ca": "a.pem", "token_env": "A_TOKEN", "privacy": "one-time"} | change
    text = "\n".join(f"{key} = {value!r}" for key, value in lines.items())
    (tmp_path / "p.toml").write_text(f'{text}\n[[mask_sources]]\nurl = "wss://b"\ntoken_env = "B_TOKEN"')
    assert message in generate("--profile", tmp_path / "p.toml", *words)[0]


def test_a_secret_in_the_place_of_its_variable(tmp_path: Path) -> None:
    """It is not shown, and the error says which option or key it was."""
    pasted = "x" * 43
    (tmp_path / "p.toml").write_text(f'provider = "wss://a"\ntoken_env = "{pasted}"')
    for words, name in (
        (["--provider", "wss://a", "--token-env", pasted], "--token-env"),
        (["--profile", tmp_path / "p.toml"], "`token_env` in p.toml"),
    ):
        error = generate(*words)[0]
        assert error.startswith(f"{name} takes the name of an environment variable")
        assert pasted not in error


def test_which_file_it_is(
    opened: list[SessionConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert profile_path("clinic") == Path("/home/me/.config/symbiosis/clinic.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/configuration")
    assert profile_path("clinic") == Path("/configuration/symbiosis/clinic.toml")
    for path in ("clinic.toml", "./clinic", "/a/clinic"):
        assert profile_path(path) == Path(path)
    assert "cannot read /configuration/symbiosis/clinic.toml" in connect(profile="clinic")
    monkeypatch.chdir(tmp_path)
    error = generate("--profile", "symbiosis")[0]
    assert "cannot read /configuration/symbiosis/symbiosis.toml: No such file or directory; for the " in error
    assert error.endswith("for the file in this folder, give --profile ./symbiosis.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    trust("symbiosis.toml")
    error, said = generate()
    assert (error, "using symbiosis.toml of this folder" in said) == ("enough", True)
    error, said = generate("--provider", "wss://x", "--token-env", "OTHER", "--privacy", "plain")
    assert (error, opened[-1].provider, "using" in said) == ("enough", "wss://x", False)
    (tmp_path / "options.toml").write_text('profile = "./symbiosis.toml"\npad_rows = 16')
    assert generate("--config", "options.toml")[0] == "enough"
    assert (opened[-1].pad_rows, opened[-1].timeout) == (16, 3)
    (tmp_path / "symbiosis.toml").unlink()
    assert "which executor? Give --provider URL, or --profile FILE" in generate()[0]
    assert "Give provider=URL, or profile=FILE" in connect()


def test_a_file_that_nobody_has_named_is_not_used_before_it_is_approved(
    opened: list[SessionConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have come with an archive: its command does not run, its variable goes nowhere."""
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    file = unpacked / "symbiosis.toml"
    file.write_text(
        'provider = "wss://evil"\nprivacy = "plain"\ntoken_command = ["sh", "-c", "echo t | tee ran"]'
    )
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    monkeypatch.chdir(unpacked)
    for words in ((), ("--token-env", "OTHER"), ("--pad-rows", 0)):
        error, said = generate(*words)
        assert f"{file} was not approved by you, and no option names this file" in error
        assert "`symbiosis-tenant trust symbiosis.toml`; or name another: --profile FILE" in error
        assert "using" not in said
    result = CliRunner().invoke(app, ["doctor"])
    assert "was not approved by you" in str(result.exception)
    assert not opened
    assert not (unpacked / "ran").exists()

    assert generate("--profile", "./symbiosis.toml")[0] == "enough"  # named, so its user means it
    assert opened.pop().token == "t"
    trust(file)
    approved = tmp_path / "configuration" / "symbiosis" / "approved.json"
    assert stat.S_IMODE(approved.stat().st_mode) == 0o600
    assert generate()[0] == "enough"
    file.write_text(file.read_text() + "\npad_rows = 0\n")
    assert "has changed since you approved it" in generate()[0]
    trust(file)
    assert generate()[0] == "enough"
    # The same file elsewhere may have another program beside it.
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    Path("symbiosis.toml").write_text(file.read_text())
    assert "was not approved by you" in generate()[0]
    Path("symbiosis.toml").unlink()
    Path("symbiosis.toml").symlink_to(file)  # which an archive may hold as well
    assert "is a link to" in generate()[0]


def test_an_approved_file_that_others_can_write_is_refused(
    opened: list[SessionConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "symbiosis.toml"
    trust(file)
    approved = tmp_path / "configuration" / "symbiosis" / "approved.json"
    for path in (file, approved, tmp_path):
        before = path.stat().st_mode
        path.chmod(before | 0o002)
        assert f"others can write to {path}" in generate()[0]
        path.chmod(before)
    assert generate()[0] == "enough"
    for content in (b"{", b"[]", b'{"a": 1}', b"\xff"):
        approved.write_bytes(content)
        assert "approved.json cannot be used" in generate()[0]


def test_what_is_no_profile_is_not_approved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    (tmp_path / "symbiosis.toml").write_text("prvider = 1")
    for name, message in (("symbiosis.toml", "did you mean provider?"), ("none.toml", "No such file")):
        result = CliRunner().invoke(app, ["trust", str(tmp_path / name)])
        assert message in str(result.exception)
    assert not (tmp_path / "configuration").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('prvider = "x"', "prvider: there is no such option; did you mean provider?"),
        ("xyz = 1", "xyz: there is no such option; the keys are allow_same, allow_transcript"),
        ('token = "t0k3n"', "secrets are not kept here: use token_env or token_file or token_command"),
        ("pad_rows = true", "pad_rows: Expected `int`"),
        ('client_certificate = ["a"]', "client_certificate: Expected `array` of length 2"),
        ('token_command = "get it"', "token_command: Expected `array`"),
        ("token_command = []", "token_command is empty"),
        ('token_env = "A"\ntoken_file = "b"', "in one way, not by token_env and token_file"),
        (
            '[[mask_sources]]\nurl = "wss://b"\ntoken = "t"',
            "mask source 1: token: there is no such option; secrets",
        ),
        ("[[mask_sources]]", "mask source 1: `url` is missing"),
        ('mask_sources = ["wss://b"]', "mask_sources: Expected `object`"),
        ("provider", "is not TOML"),
    ],
)
def test_mistakes(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        read_profile(tmp_path / "p.toml")
    assert message in str(caught.value)
    assert "t0k3n" not in str(caught.value).removeprefix(str(tmp_path))


def test_a_secret_that_others_can_read(tmp_path: Path) -> None:
    file = tmp_path / "token"
    for mode in (0o640, 0o604, 0o620):
        file.write_text("t0k3n")
        file.chmod(mode)
        with pytest.raises(ConfigurationError, match=r"others can (read|write to) .*`chmod (600|go-w) "):
            Secret("the token", file=file).read()
    file.chmod(0o600)
    assert Secret("the token", file=file).read() == "t0k3n"
    file.write_text("\n")
    with pytest.raises(ConfigurationError, match="is empty"):
        Secret("the token", file=file).read()
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="no text"):
        Secret("the token", file=file).read()
    with pytest.raises(ConfigurationError, match="No such file"):
        Secret("the token", file=tmp_path / "none").read()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; print('t0k3n'); sys.exit(3)", "exit status 3"),
        ("pass", "exit status 0, and nothing on standard output"),
        ("import sys; sys.stdout.buffer.write(b't0k3n\\xff')", "what it prints is no text"),
        ("import threading; threading.Event().wait()", "did not give the token within 0 s"),
    ],
)
def test_a_command_that_fails(program: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.secrets.COMMAND_SECONDS", 0.3 if "wait" in program else 60.0)
    with pytest.raises(ConfigurationError) as caught:
        Secret("the token", command=(sys.executable, "-c", program)).read()
    assert message in str(caught.value)
    assert "t0k3n" not in str(caught.value)


def test_no_shell_sees_a_command(tmp_path: Path) -> None:
    """And it runs in the folder of the profile."""
    assert Secret("x", command=("echo", "$HOME;", "`id`")).read() == "$HOME; `id`"
    assert Secret("x", command=("pwd",), folder=tmp_path).read() == str(tmp_path)
    with pytest.raises(ConfigurationError, match="no-such-program cannot give x: No such file"):
        Secret("x", command=("no-such-program",)).read()


def test_secrets_are_not_read_before_they_are_needed(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('provider = "wss://a"\ntoken_env = "NOT_SET_ANYWHERE"')
    given = merged(read_profile(tmp_path / "p.toml"), {"token": "t"})
    assert given == {"provider": "wss://a", "token": "t"}
    secret = read_profile(tmp_path / "p.toml")["token"]
    with pytest.raises(
        ConfigurationError, match="NOT_SET_ANYWHERE is not set: put the provider's token there"
    ):
        secret.read()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x." * 101 + "x = 1", "line 1 has more than 100 dots"),
        ("# " + "x" * (1 << 16), "larger than 65,536 bytes"),
    ],
)
def test_a_profile_is_small(content: str, message: str, tmp_path: Path) -> None:
    """Else a file of another person takes memory, or minutes."""
    file = tmp_path / "profile.toml"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=message):
        read_profile(file)


def test_a_hole_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a terabyte takes no bytes of an archive."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    with Path("symbiosis.toml").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ConfigurationError, match="larger than 1,048,576 bytes"):
        profile_here()
