"""Provider and mask sources must be different operators, as far as a tenant can see."""

from __future__ import annotations

import datetime
import itertools
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import RING, Executor
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from parity import fixed_result, load_local, token_ids
from ring_sessions import ExecutorFactory

import tenant_sdk
from provider.config import ServeConfig
from provider.serve.certificates import write_certificates
from provider.serve.provider import Provider
from provider.serve.tokens import TokenFile
from shared.errors import ConfigurationError
from tenant_sdk.trust.operators import SIGNS, Operators, own_authorities

pytest_plugins = ("ring_fixtures",)


class Socket:
    """What is known of a connection's other end."""

    def __init__(self, address: str, certificate: bytes) -> None:
        self._address, self._certificate = address, certificate

    def getpeername(self) -> tuple[str, int]:
        if not self._address:
            raise OSError("not connected")
        return self._address, 1

    def getsockname(self) -> tuple[str, int]:
        return "10.0.0.99", 1

    def getpeercert(self, binary_form: bool) -> bytes:
        assert binary_form
        return self._certificate


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Of two keys."""
    made = []
    for name in ("one", "other"):
        folder = tmp_path_factory.mktemp(name)
        write_certificates(folder, now=datetime.datetime.now(datetime.UTC))
        pem = (folder / "server.pem").read_bytes()
        made.append(x509.load_pem_x509_certificate(pem).public_bytes(Encoding.DER))
    return made


def meet(operators: Operators, url: str, address: str, certificate: bytes, party: Any = None) -> None:
    operators.check_distinct(url, Socket(address, certificate), party)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "address", "key", "what"),
    [
        ("wss://a.example:1", "10.0.0.2", 1, "host"),
        ("wss://A.Example:2/", "10.0.0.2", 1, "host"),
        ("wss://b.example:1", "10.0.0.1", 1, "address"),
        ("wss://b.example:1", "10.0.0.2", 0, "certificate key"),
        ("wss://a.example:2", "10.0.0.1", 0, "host, address, certificate key"),
        ("wss://a.example.:1", "10.0.0.2", 1, "host"),
        ("wss://b.example:1", "::ffff:10.0.0.1", 1, "address"),
    ],
)
def test_each_sign_alone_is_enough(
    url: str, address: str, key: int, what: str, certificates: list[bytes]
) -> None:
    operators = Operators(())
    meet(operators, "wss://a.example:9", "10.0.0.1", certificates[0])
    with pytest.raises(ConfigurationError, match=f"have the same {what}: provider and mask sources"):
        meet(operators, url, address, certificates[key])
    noted = Operators(SIGNS)
    meet(noted, "wss://a.example:9", "10.0.0.1", certificates[0])
    meet(noted, url, address, certificates[key])
    assert noted.same == f"{url} and wss://a.example:9 have the same {what}"
    words = {word: sign for sign, word in SIGNS.items()}
    allowed = {words[word] for word in what.split(", ")}
    for some in (allowed, allowed | {"machine"}):
        waived = Operators(some)
        meet(waived, "wss://a.example:9", "10.0.0.1", certificates[0])
        meet(waived, url, address, certificates[key])
    for sign in allowed:
        other = Operators(SIGNS.keys() - {sign})
        meet(other, "wss://a.example:9", "10.0.0.1", certificates[0])
        with pytest.raises(ConfigurationError, match=f"allow_same=.'{sign}'"):
            meet(other, url, address, certificates[key])


def test_who_cannot_be_reached_has_a_name_still(certificates: list[bytes]) -> None:
    """As one of several replicas: the others' certificates are looked at, and of this one the host."""
    operators = Operators(())
    meet(operators, "wss://a.example:1", "10.0.0.1", certificates[0], "provider")
    operators.check_named("wss://b.example:1", "provider")
    operators.check_named("ipc:///b.example", "source")
    meet(operators, "wss://c.example:1", "10.0.0.3", certificates[1], "source")
    with pytest.raises(ConfigurationError, match="have the same host"):
        operators.check_named("wss://B.example:2", "source")
    with pytest.raises(ConfigurationError, match="have the same host"):
        operators.check_named("wss://c.example:2", "provider")


def test_others_are_accepted_and_may_come_back(certificates: list[bytes]) -> None:
    operators = Operators(())
    for _ in range(2):  # the second time after a connection broke, perhaps at another address
        meet(operators, "wss://a.example:1", "10.0.0.1", certificates[0])
        meet(operators, "wss://b.example:1", "10.0.0.2", certificates[1])
    meet(operators, "wss://a.example:1", "10.0.0.3", certificates[0])
    assert not operators.same


def test_one_who_comes_back_as_another_is_refused(certificates: list[bytes]) -> None:
    """A name that now leads to the provider's machine."""
    operators = Operators(())
    meet(operators, "wss://a.example:1", "10.0.0.1", certificates[0])
    meet(operators, "wss://b.example:1", "10.0.0.2", certificates[1])
    with pytest.raises(ConfigurationError, match="same address"):
        meet(operators, "wss://b.example:1", "10.0.0.1", certificates[1])


def test_what_a_party_was_before_counts_too(certificates: list[bytes]) -> None:
    """A provider that changes its address, and a source that then appears at the old one."""
    operators = Operators(())
    meet(operators, "wss://a.example:1", "10.0.0.1", certificates[0], "provider")
    meet(operators, "wss://a.example:1", "10.0.0.3", certificates[0], "provider")
    with pytest.raises(ConfigurationError, match="same address"):
        meet(operators, "wss://b.example:1", "10.0.0.1", certificates[1], "source")


def test_two_addresses_of_this_machine_are_one_machine(certificates: list[bytes]) -> None:
    for first, second in itertools.combinations(("127.0.0.1", "127.0.0.2", "::1", "10.0.0.99"), 2):
        operators = Operators(())
        meet(operators, "wss://a.example:1", first, certificates[0])
        with pytest.raises(ConfigurationError, match=r"have the same machine: .*allow_same=.'machine'"):
            meet(operators, "wss://b.example:1", second, certificates[1])
        waived = Operators({"machine"})
        meet(waived, "wss://a.example:1", first, certificates[0])
        meet(waived, "wss://b.example:1", second, certificates[1])


def test_an_address_of_this_machine_that_connections_do_not_leave_by(certificates: list[bytes]) -> None:
    """A second address of an interface: the other end of a connection to it is the first."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("198.51.100.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine has no address but those of itself")
        address = asking.getsockname()[0]
    for first, second in itertools.combinations((address, "127.0.0.1"), 2):
        operators = Operators(())
        meet(operators, "wss://a.example:1", first, certificates[0])
        with pytest.raises(ConfigurationError, match="have the same machine"):
            meet(operators, "wss://b.example:1", second, certificates[1])


def test_connections_that_have_ended_already(certificates: list[bytes]) -> None:
    """They have no address any more, and are of no use to anybody; what ended them is said by others."""
    operators = Operators(())
    meet(operators, "wss://a.example:1", "", certificates[0])
    meet(operators, "wss://b.example:1", "", certificates[1])
    with pytest.raises(ConfigurationError, match="same certificate key"):
        meet(operators, "wss://c.example:1", "", certificates[1])


def test_two_parties_under_one_url(certificates: list[bytes]) -> None:
    operators = Operators(())
    provider, source = object(), object()
    for _ in range(2):
        meet(operators, "wss://a.example:1", "10.0.0.1", certificates[0], provider)
    with pytest.raises(ConfigurationError, match="have the same host, address, certificate key"):
        meet(operators, "wss://a.example:1", "10.0.0.1", certificates[0], source)


# -- sessions -------------------------------------------------------------------------------------


class Elsewhere:
    """A second operator: another address, key, authority and token."""

    def __init__(self, folder: Path, at: Path) -> None:
        write_certificates(at, ["127.0.0.2"], now=datetime.datetime.now(datetime.UTC))
        self.ca, tokens = at / "ca.pem", at / "tokens.json"
        self.token = TokenFile(tokens).add("alice")
        self.provider = Provider(
            ServeConfig(
                model_dir=folder, numerics=RING, tls_dir=at, token_file=tokens, host="127.0.0.2", port=0
            )
        )


@pytest.fixture(scope="module")
def elsewhere(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Elsewhere]:
    made = Elsewhere(checkpoint("llama"), tmp_path_factory.mktemp("elsewhere"))
    with made.provider:
        yield made


def connect(provider: Executor, *sources: str, **options: Any) -> tenant_sdk.Session:
    """With all defaults: one-time masks from other operators, and every answer checked."""
    return tenant_sdk.connect(
        provider.url, token=provider.token, ca=provider.ca, mask_sources=sources, **options
    )


def test_another_operator_with_its_own_token_and_authority(
    executors: ExecutorFactory,
    elsewhere: Elsewhere,
    checkpoint: Callable[[str], Path],
    caplog: Any,
) -> None:
    with (
        caplog.at_level(logging.INFO),
        connect(
            executors("llama")[0],
            elsewhere.provider.url,
            mask_source_token=elsewhere.token,
            mask_source_ca=elsewhere.ca,
            allow_same={"machine"},
        ) as session,
    ):
        got = fixed_result(session.load_model(progress=False), token_ids())
        assert session.stats.verified_rows > 0
    said = [each.getMessage() for each in caplog.records if each.name == "tenant_sdk.session.opening"]
    assert any("have the same machine, which was allowed" in each for each in said)
    expected = fixed_result(load_local(checkpoint("llama")), token_ids())
    assert float((got - expected).norm() / expected.norm()) < 3e-4


def test_lists_of_tokens_and_authorities(
    executors: ExecutorFactory, elsewhere: Elsewhere, checkpoint: Callable[[str], Path]
) -> None:
    """One for each source, also for those that need none."""
    with connect(
        executors("llama")[0],
        elsewhere.provider.url,
        f"local:{checkpoint('llama')}",
        mask_source_token=[elsewhere.token, ""],
        mask_source_ca=[elsewhere.ca, ""],
        allow_same={"machine"},
    ) as session:
        fixed_result(session.load_model(progress=False), token_ids())


@pytest.mark.parametrize("option", ["mask_source_token", "mask_source_ca"])
@pytest.mark.parametrize("count", [1, 3])
def test_lists_of_the_wrong_length(option: str, count: int, executors: ExecutorFactory) -> None:
    provider, *others = executors("llama")
    with pytest.raises(ConfigurationError, match=f"{option}: give one for all"):
        connect(provider, *[other.url for other in others], **{option: ["x"] * count})


def test_the_same_machine_is_refused(executors: ExecutorFactory, elsewhere: Elsewhere) -> None:
    provider, other, _ = executors("llama")
    with pytest.raises(ConfigurationError, match=r"allow_same=\['all'\]"):
        connect(provider, other.url, allow_same={"authority", "token"})
    own: dict[str, Any] = {"mask_source_token": elsewhere.token, "mask_source_ca": elsewhere.ca}
    with pytest.raises(ConfigurationError, match="have the same machine"):
        connect(provider, elsewhere.provider.url, **own)


@pytest.mark.parametrize("privacy", ["one-time", "noise-bank"])
def test_nothing_is_shared_by_default(
    privacy: str, executors: ExecutorFactory, elsewhere: Elsewhere, tmp_path: Path
) -> None:
    """Neither token nor authority reach another operator unless somebody says so by name, and nobody is
    connected to before that is clear."""
    provider = executors("llama")[0]
    both = tmp_path / "both.pem"
    both.write_bytes(provider.ca.read_bytes() + elsewhere.ca.read_bytes())
    own: dict[str, Any] = {"mask_source_token": elsewhere.token, "mask_source_ca": elsewhere.ca}
    own |= {"privacy": privacy, "allow_same": {"machine"}}
    for change, message in (
        ({"mask_source_token": None}, "give the mask source's own token"),
        ({"mask_source_token": ""}, "give the mask source's own token"),
        ({"mask_source_token": provider.token}, "have the same token"),
        ({"mask_source_ca": None}, "give the mask source's own authority"),
        ({"mask_source_ca": provider.ca}, "hold the same certificate authority"),
        ({"mask_source_ca": both}, "hold the same certificate authority"),
        ({"mask_source_ca": provider.server and tmp_path / "none.pem"}, "cannot use the authority's"),
        ({"allow_same": "machine"}, "must be some of host"),
        ({"allow_same": {"every"}}, "must be some of host"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            connect(provider, elsewhere.provider.url, **(own | change))
    if privacy == "one-time":  # the other takes one source
        two = [elsewhere.provider.url, f"{elsewhere.provider.url}/"]
        with pytest.raises(ConfigurationError, match="hold the same certificate authority"):
            connect(provider, *two, **own | {"mask_source_token": ["a", "b"]})
    with pytest.raises(tenant_sdk.AuthenticationError):
        connect(
            provider, elsewhere.provider.url, **own | {"mask_source_token": None, "allow_same": {"token"}}
        )
    with pytest.raises(tenant_sdk.TlsError):  # known to the operating system this authority is not
        connect(provider, elsewhere.provider.url, **own | {"mask_source_ca": "system"})
    connect(provider, elsewhere.provider.url, **own).close()


@pytest.mark.parametrize("where", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
@pytest.mark.parametrize("again", [False, True])
def test_an_authority_that_the_operating_system_trusts_too(
    again: bool, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the same certificate or another one of the same key, in OpenSSL's file or in its directories."""
    key = ec.generate_private_key(ec.SECP256R1())
    (tmp_path / "certs").mkdir()
    mine, known, unrelated = (tmp_path / name for name in ("ca.pem", "certs/0123abcd.0", "certs/README"))
    mine.write_bytes(_signed_by_itself(key))
    known.write_bytes(_signed_by_itself(key) if again else mine.read_bytes())
    unrelated.write_text("no certificate")
    for variable in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
    assert own_authorities(mine, ["system"], ()) == [None]
    monkeypatch.setenv(where, str(known) if where == "SSL_CERT_FILE" else f"{tmp_path}/none:{known.parent}")
    with pytest.raises(ConfigurationError, match="the same certificate authority"):
        own_authorities(mine, ["system"], ())


def _signed_by_itself(key: ec.EllipticCurvePrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "An authority")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(1))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


@pytest.mark.parametrize("spelling", ["{}", "{}/", "wss://localhost:{port}"])
def test_the_provider_itself_is_refused(spelling: str, executors: ExecutorFactory) -> None:
    provider = executors("llama")[0]
    url = spelling.format(provider.url, port=provider.url.rpartition(":")[2])
    with pytest.raises(ConfigurationError, match="operators that do not collude"):
        connect(provider, url, allow_same={"authority", "token"})


def test_two_sources_of_one_operator_are_refused(executors: ExecutorFactory, elsewhere: Elsewhere) -> None:
    """They add nothing to each other, which whoever names two does not expect."""
    url = elsewhere.provider.url
    with pytest.raises(ConfigurationError, match="operators that do not collude"):
        connect(
            executors("llama")[0],
            url,
            f"{url}/",
            mask_source_token=elsewhere.token,
            mask_source_ca=elsewhere.ca,
            allow_same={"machine", "authority", "token"},
        )


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("here", [True, False])
def test_allowing_it_says_what_it_is_worth(
    same: bool,
    here: bool,
    executors: ExecutorFactory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It warns, unless all parties are on this machine: that is a trial."""
    if not here:
        monkeypatch.setattr(Operators, "all_here", False)
    provider, other, _ = executors("llama")
    with caplog.at_level(logging.INFO):
        connect(provider, (provider if same else other).url, allow_same=["all"]).close()
    said = "which was allowed: if that is one operator, these masks hide nothing"
    (record,) = (each for each in caplog.records if said in each.message)
    assert record.levelno == (logging.INFO if here else logging.WARNING)


def test_a_bank_from_the_provider_itself_says_so(
    executors: ExecutorFactory, caplog: pytest.LogCaptureFixture
) -> None:
    provider = executors("llama")[0]
    for sources in ((), (provider.url,)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            connect(provider, *sources, privacy="noise-bank", allow_same={"authority", "token"}).close()
        assert "multiplies the masks itself" in caplog.text


def test_a_bank_from_elsewhere_does_not_accuse_the_provider(
    executors: ExecutorFactory,
    checkpoint: Callable[[str], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider = executors("llama")[0]
    with caplog.at_level(logging.WARNING):
        connect(provider, f"local:{checkpoint('llama')}", privacy="noise-bank").close()
    assert "multiplies" not in caplog.text
    assert "each mask serves many rows" in caplog.text
