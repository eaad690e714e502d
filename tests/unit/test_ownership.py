"""Files that say whom to trust are refused if others could have written them."""

from __future__ import annotations

import datetime
import grp
import os
import pwd
import stat
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from provider.cli import app as provider_app
from provider.config import ServeConfig
from provider.dev import Development
from provider.serve.certificates import DEFAULT_HOSTS, own_certificate, write_certificates
from provider.serve.tokens import TokenFile
from shared.errors import ConfigurationError
from shared.ownership import check_own, check_secret, check_tree
from tenant_sdk.command_line.main import app
from tenant_sdk.connection.handshake import client_context
from tenant_sdk.products.fingerprints import StoredFingerprints
from tenant_sdk.session.profiles import Secret, read_profile
from tenant_sdk.tuning.checkpoints import TrainingCheckpoints

OTHER = 54321  # a user and group that nobody has
NOBODY = 0xFFFFFFFF  # of an entry that names no user


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Have a file belong to somebody else: only root can, so others become somebody else themselves."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, OTHER, -1, follow_symlinks=False)
        else:
            monkeypatch.setattr("os.geteuid", lambda: OTHER)

    return give


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (folder / "file").write_text("x")
    return folder / "file"


def test_a_file_of_ones_own(file: Path) -> None:
    check_own(file)
    (file.parent / "link").symlink_to("../b/file")
    check_own(file.parent / "link")
    check_own(file.parent / ".." / "b" / "file")
    check_own(file.parent / "none")  # its reader says so
    check_own("/etc/passwd")
    reading, writing = os.pipe()
    check_own(f"/dev/fd/{reading}")
    os.close(reading)
    os.close(writing)


def test_a_file_that_others_can_make_before_it_is_read(tmp_path: Path) -> None:
    """Its reader would find theirs."""
    tmp_path.joinpath("open").mkdir()
    tmp_path.joinpath("open").chmod(0o1777)
    (tmp_path / "link").symlink_to("open/file")
    for missing in (tmp_path / "open" / "file", tmp_path / "open" / "folder" / "file", tmp_path / "link"):
        with pytest.raises(ConfigurationError, match="others can make one"):
            check_own(missing)
    check_tree(tmp_path / "open" / "folder")


@pytest.mark.parametrize("part", ["a", "a/b", "a/b/file"])
def test_somebody_elses(part: str, file: Path, tmp_path: Path, give_away: Callable[[Path], None]) -> None:
    give_away(tmp_path / part)
    with pytest.raises(ConfigurationError, match=r"is refused: \S+ belongs to user \d+|belongs to \w+, who"):
        check_own(file)


@pytest.mark.parametrize("part", ["a", "a/b", "a/b/file"])
@pytest.mark.parametrize("mode", [0o666, 0o664, 0o777, 0o775])
def test_where_others_can_write(part: str, mode: int, file: Path, tmp_path: Path) -> None:
    place = tmp_path / part
    if os.geteuid() == 0:
        os.chown(place, -1, OTHER)  # no group that is the user's own
    elif not mode & stat.S_IWOTH:
        pytest.skip("only root gives a file to another group")
    place.chmod(mode | (0o111 if place.is_dir() else 0))
    with pytest.raises(ConfigurationError, match=f"others can write to {place}.*`chmod go-w {place}`"):
        check_own(file)
    (tmp_path / "link").symlink_to(file)
    with pytest.raises(ConfigurationError, match="others can write to"):
        check_own(tmp_path / "link")
    if place.is_dir():  # as /tmp: nobody takes away what is another's
        place.chmod(0o1777)
        check_own(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a link away")
def test_a_link_of_somebody_else(file: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a")
    os.chown(tmp_path / "link", OTHER, -1, follow_symlinks=False)
    with pytest.raises(ConfigurationError, match=r"/link belongs to "):
        check_own(tmp_path / "link" / "b" / "file")
    with pytest.raises(ConfigurationError, match=r"/link belongs to "):
        check_own(tmp_path / "link" / ".." / "a" / "b" / "file")


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    check_own(tmp_path / "one")  # its reader says so


def test_a_way_that_cannot_be_looked_at_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name from the root on; from the working directory its reader finds it."""
    monkeypatch.chdir(tmp_path)
    for _ in range(25):  # deeper than the system takes in one name
        os.mkdir("x" * 200)
        os.chdir("x" * 200)
    Path("profile.toml").write_text("")
    with pytest.raises(ConfigurationError, match="cannot be looked at"):
        check_own("profile.toml")


def test_the_users_own_group(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some systems give each user a group, and let it write everywhere."""
    user = pwd.getpwuid(os.geteuid())
    file.chmod(0o664)
    os.chown(file, -1, user.pw_gid)
    group = grp.struct_group((user.pw_name, "x", user.pw_gid, []))
    monkeypatch.setattr("grp.getgrgid", lambda number: group)
    check_own(file)
    group = grp.struct_group((user.pw_name, "x", user.pw_gid, [user.pw_name, "mallory"]))
    with pytest.raises(ConfigurationError, match="others can write"):
        check_own(file)
    group = grp.struct_group(("staff", "x", user.pw_gid, []))
    with pytest.raises(ConfigurationError, match="others can write"):
        check_own(file)


def test_lists_of_access_rights_are_seen(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one the bits of a group are those of all that the list names."""
    user = pwd.getpwuid(os.geteuid())
    os.chown(file, -1, user.pw_gid)
    group = grp.struct_group((user.pw_name, "x", user.pw_gid, []))
    monkeypatch.setattr("grp.getgrgid", lambda number: group)
    entries = ((0x01, 6, NOBODY), (0x02, 6, OTHER), (0x04, 4, NOBODY), (0x10, 6, NOBODY), (0x20, 4, NOBODY))
    listed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(file, "system.posix_acl_access", listed)
    except OSError:
        pytest.skip("this file system has no lists of access rights")
    with pytest.raises(ConfigurationError, match="others can write"):
        check_own(file)


def test_a_group_that_is_somebody_elses_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = pwd.getpwuid(os.geteuid())
    file.chmod(0o664)
    os.chown(file, -1, user.pw_gid)
    group = grp.struct_group((user.pw_name, "x", user.pw_gid, []))
    other = pwd.struct_passwd(("mallory", "x", OTHER, user.pw_gid, "", "/", "/bin/sh"))
    monkeypatch.setattr("grp.getgrgid", lambda number: group)
    monkeypatch.setattr("pwd.getpwall", lambda: [user, other])
    with pytest.raises(ConfigurationError, match="others can write"):
        check_own(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of the system")
def test_secrets_as_kubernetes_mounts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of root, for a group that the process is in, behind a link that is replaced as a whole."""
    (tmp_path / "..2030").mkdir()
    (tmp_path / "..data").symlink_to("..2030")
    (tmp_path / "token").symlink_to("..data/token")
    (tmp_path / "..2030" / "token").write_text("t0k3n")
    (tmp_path / "..2030" / "token").chmod(0o440)
    tmp_path.chmod(0o1777)
    monkeypatch.setattr("os.geteuid", lambda: 10001)
    assert Secret("the token", file=tmp_path / "token").read() == "t0k3n"
    (tmp_path / "..2030" / "token").chmod(0o444)
    with pytest.raises(ConfigurationError, match="others can read"):
        check_secret(tmp_path / "token", "the token", group=True)


# -- what it is asked of --------------------------------------------------------------------------


def fingerprints(path: Path) -> None:
    StoredFingerprints(path, "k" * 43 + "=")


def provider_options(path: Path) -> None:
    raise_it(CliRunner().invoke(provider_app, ["serve", "model", "--config", str(path)]).exception)


def tenant_options(path: Path) -> None:
    words = ["generate", "--prompt", "x", "--config", str(path)]
    raise_it(CliRunner().invoke(app, words).exception)


def development(path: Path) -> None:
    config = ServeConfig(model_dir=path, dev=True, dev_dir=path.parent, port=0)
    with Development(config):
        pytest.fail("it started")


def raise_it(error: BaseException | None) -> None:
    assert error is not None
    raise error


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("profile.toml", read_profile),
        ("provider.toml", provider_options),
        ("tenant.toml", tenant_options),
        ("token", lambda path: Secret("the token", file=path).read()),
        ("tokens.json", lambda path: TokenFile(path).check_readable()),
        ("tokens.json", lambda path: TokenFile(path).tenant_of("t")),
        ("ca.pem", client_context),
        ("ca.pem", lambda path: own_certificate(path.parent, path)),
        ("server.key", lambda path: own_certificate(path.parent)),
        ("server.pem", lambda path: own_certificate(path.parent)),
        ("client.key", lambda path: client_context(None, (path.with_name("client.pem"), path))),
        ("client.pem", lambda path: client_context(None, (path, path.with_name("client.key")))),
        ("prints", fingerprints),
        ("symbiosis.toml", development),
    ],
)
def test_every_file_that_says_whom_to_trust(
    name: str, read: Callable[[Path], object], tmp_path: Path
) -> None:
    write_certificates(tmp_path, DEFAULT_HOSTS, now=datetime.datetime.now(datetime.UTC))
    path = tmp_path / name
    if not path.exists():
        path.write_text("")
    path.chmod(0o602)
    with pytest.raises(ConfigurationError, match=rf"{name} is refused: others can write to "):
        read(path)


def test_a_clients_key_that_everybody_can_read(tls_dir: Path, tmp_path: Path) -> None:
    for name in ("client.pem", "client.key"):
        (tmp_path / name).write_bytes((tls_dir / name).read_bytes())
    pair = tmp_path / "client.pem", tmp_path / "client.key"
    pair[1].chmod(0o644)
    with pytest.raises(
        ConfigurationError, match=r"others can read .*client\.key, which holds the private key"
    ):
        client_context(None, pair)
    pair[1].chmod(0o640)
    client_context(None, pair)


def test_a_folder_that_is_written_into_holds_no_links(tmp_path: Path) -> None:
    folder, other = tmp_path / "run.checkpoints", tmp_path / "other"
    other.write_text("mine")
    check_tree(folder)  # not there yet
    (folder / "checkpoint-2").mkdir(parents=True)
    check_tree(folder)
    for place in (folder / "settings.json", folder / "checkpoint-2" / "README.md"):
        place.symlink_to(other)
        with pytest.raises(ConfigurationError, match=f"{place} is a link"):
            TrainingCheckpoints(tmp_path / "run", {}).begin(resume=False)
        place.unlink()
    assert other.read_text() == "mine"
    (folder / "checkpoint-2").chmod(0o777)
    with pytest.raises(ConfigurationError, match="others can write to"):
        TrainingCheckpoints(tmp_path / "run", {}).begin(resume=False)


def test_a_folder_of_development_out_of_an_archive_holds_no_links(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / "dev" / "masks").mkdir(parents=True)
    (tmp_path / "dev" / "masks" / "log").symlink_to(other)
    config = ServeConfig(model_dir=tmp_path, dev=True, dev_dir=tmp_path / "dev")
    with pytest.raises(ConfigurationError, match="log is a link"):
        Development(config).__enter__()
    assert other.read_text() == "mine"


def test_a_folder_of_development_out_of_an_archive_keeps_no_keys(tmp_path: Path) -> None:
    """Its author has them too, and may have added tenants."""
    write_certificates(tmp_path / "dev" / "provider", now=datetime.datetime.now(datetime.UTC))
    TokenFile(tmp_path / "dev" / "provider" / "tokens.json").add("mallory")
    config = ServeConfig(model_dir=tmp_path, dev=True, dev_dir=tmp_path / "dev")
    with pytest.raises(ConfigurationError, match="were not made here"):
        Development(config).__enter__()
    (tmp_path / "dev" / "made-here").write_text("1 2")
    with pytest.raises(ConfigurationError, match="were not made here"):
        Development(config).__enter__()
