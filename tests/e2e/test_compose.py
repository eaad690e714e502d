"""deploy/compose.yaml: its services as processes, with a tenant who is served while a replica is stopped."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import ok, start
from composed import Composed, interpolated, seconds
from raw_peers import eventually
from transformers import StoppingCriteriaList

import tenant_sdk

DEPLOY = Path(__file__).parents[2] / "deploy"
FILE = DEPLOY / "compose.yaml"
DOCUMENT = DEPLOY.parent / "docs" / "how-to" / "operations.md"
HAPROXY, COMPOSE = shutil.which("haproxy"), shutil.which("docker-compose")
REPLICAS = ("provider-1", "provider-2")
EXECUTORS = (*REPLICAS, "mask-source")


@pytest.fixture
def composed(tmp_path: Path, checkpoint: Callable[[str], Path]) -> Iterator[Composed]:
    """With secrets of two operators in ``tmp_path/deploy/secrets``, made by the steps of the document."""
    (steps,) = re.findall(r"(?s)```\n(symbiosis-provider certs deploy/.*?)```", DOCUMENT.read_text())
    made = tmp_path / "deploy" / "secrets"
    names = {"MODEL": str(checkpoint("llama")), "THREADS": "1"}
    names |= {"PROVIDER_SECRETS": f"{made}/provider", "MASK_SECRETS": f"{made}/mask-source"}
    with Composed(FILE, names, tmp_path) as it:
        for line in steps.splitlines():
            line = line.replace("executor.example", it.address["proxy"])
            program, *words = line.replace("masks.other.example", it.address["mask-source"]).split()
            if program == "symbiosis-provider":
                told, _ = ok(start("provider.cli", *words, cwd=tmp_path))
                if words[0] == "token":
                    (tmp_path / words[words.index("--token-file") + 1]).with_name("token").write_text(told)
        yield it


def asked(composed: Composed, service: str, port: int, path: str) -> tuple[int, str]:
    """Status and text of a page; 0 if nobody answers. A service that has ended is an error."""
    assert composed.processes[service].poll() is None, composed.log(service)
    try:
        with urllib.request.urlopen(f"http://{composed.address[service]}:{port}{path}", timeout=800) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""
    except OSError:
        return 0, ""


def ready(composed: Composed, service: str) -> bool:
    """What its health check asks, without a process."""
    return asked(composed, service, 9190, "/readyz")[0] == 200


def sessions(composed: Composed, service: str) -> int:
    """How many sessions an executor has."""
    (count,) = re.findall(r"(?m)^symbiosis_connections (\S+)", asked(composed, service, 9190, "/metrics")[1])
    return int(float(count))


@contextmanager
def forwarding(composed: Composed) -> Iterator[None]:
    """What the proxy does, where there is no HAProxy: bytes to the first replica that listens."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def forward(tenant: socket.socket) -> None:
        with tenant:
            for name in REPLICAS:
                with suppress(OSError), socket.create_connection((composed.address[name], 8765)) as replica:
                    back = threading.Thread(target=pump, args=(replica, tenant))
                    back.start()
                    pump(tenant, replica)
                    back.join()
                    return

    def serve() -> None:
        with suppress(OSError):
            while True:
                threads.append(threading.Thread(target=forward, args=listener.accept()[:1]))
                threads[-1].start()

    with socket.create_server((composed.address["proxy"], 8765)) as listener:
        threads = [threading.Thread(target=serve)]
        threads[0].start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(800)


@contextmanager
def proxy(composed: Composed) -> Iterator[Callable[[], bool]]:
    """HAProxy with the file's configuration, or what stands in for it; yields whether a replica is ready."""
    if HAPROXY is None:
        with forwarding(composed):
            yield lambda: True
        return
    port, path = re.findall(
        r"127\.0\.0\.1:(\d+)(/.*)", composed.services["proxy"]["healthcheck"]["test"][-1]
    )[0]

    def status() -> int:
        return asked(composed, "proxy", int(port), path)[0]

    composed.start("proxy")
    eventually(lambda: status() == 503, 60)
    yield lambda: status() == 200


def test_a_tenant_goes_on_when_a_replica_is_stopped(composed: Composed, tmp_path: Path) -> None:
    """In the middle of a generation under one-time masks, which ends with the same text."""
    with proxy(composed) as has_replicas:
        for service in EXECUTORS:
            # The mask source listens on the loopback, which in its container is its own.
            composed.start(service, f"--admin-host={composed.address[service]}")
        assert not composed.healthy("provider-1")
        eventually(lambda: all(ready(composed, service) for service in EXECUTORS), 120)
        assert all(composed.healthy(service) for service in EXECUTORS)
        eventually(has_replicas, 60)
        generate_while_one_stops(composed, tmp_path / "deploy" / "secrets")
        for service, process in composed.processes.items():
            if service in EXECUTORS and process.returncode is None:
                assert composed.stop(service) == 0, composed.log(service)
    for service in EXECUTORS:
        assert '"message": "draining"' in composed.log(service)  # and as JSON


def generate_while_one_stops(composed: Composed, secrets: Path) -> None:
    """A tenant generates twice; the second time, its replica is stopped at the fourth token."""
    prompt, stopped = torch.tensor([[1, 5, 9]]), list[str]()

    def stop(ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        if ids.shape[1] == prompt.shape[1] + 4:
            (victim,) = (name for name in REPLICAS if sessions(composed, name))
            stopped.append(victim)
            assert composed.stop(victim) == 0, composed.log(victim)
        return torch.zeros(len(ids), dtype=torch.bool)

    options: dict[str, Any] = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}
    with tenant_sdk.connect(
        f"wss://{composed.address['proxy']}:8765",
        token=(secrets / "provider" / "token").read_text().strip(),
        ca=secrets / "provider" / "tls" / "ca.pem",
        mask_sources=[f"wss://{composed.address['mask-source']}:8765"],
        mask_source_token=(secrets / "mask-source" / "token").read_text().strip(),
        mask_source_ca=secrets / "mask-source" / "tls" / "ca.pem",
        allow_same={"machine"},  # and nothing else
        patience=60.0,
    ) as session:
        model = session.load_model(progress=False)
        whole = model.generate(prompt, **options)
        assert session.stats.reconnections == 0
        disturbed = model.generate(prompt, **options, stopping_criteria=StoppingCriteriaList([stop]))
        assert torch.equal(whole, disturbed)
        assert session.stats.reconnections == 1
        (left,) = set(REPLICAS) - set(stopped)
        assert sessions(composed, left) == sessions(composed, "mask-source") == 1


@pytest.mark.skipif(HAPROXY is None, reason="haproxy is not installed (Debian package haproxy)")
def test_haproxy_understands_its_configuration() -> None:
    assert HAPROXY is not None
    done = subprocess.run(
        [HAPROXY, "-c", "-f", DEPLOY / "haproxy.cfg"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    warnings = [line for line in done.stderr.splitlines() if "WARNING" in line]
    assert all("could not resolve address 'provider-" in line for line in warnings), warnings


@pytest.mark.skipif(COMPOSE is None, reason="Compose is not installed (Debian package docker-compose)")
def test_compose_understands_its_file_as_the_tests_do(tmp_path: Path) -> None:
    assert COMPOSE is not None
    variables, text = {"MODEL": "/checkpoint"}, FILE.read_text()
    file = tmp_path / "deploy" / FILE.name
    file.parent.mkdir()
    file.write_text(re.sub(r"(?m)^name: .*$", "", text))  # the first version of Compose does not know it
    command = [COMPOSE, "--file", file, "config"]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    theirs, ours = yaml.safe_load(done.stdout), yaml.safe_load(interpolated(text, variables))
    assert theirs["services"].keys() == ours["services"].keys()
    for name, service in ours["services"].items():
        for part in ("command", "environment", "user", "read_only", "stop_grace_period"):
            assert theirs["services"][name].get(part) == service.get(part), (name, part)
        assert theirs["services"][name]["healthcheck"]["test"] == service["healthcheck"]["test"]


def test_services_may_do_no_more_than_they_need() -> None:
    document = yaml.safe_load(interpolated(FILE.read_text(), {"MODEL": "/checkpoint"}))
    services = document["services"]
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service["user"].startswith("0"), name
        assert service["healthcheck"]["start_period"], name
        assert all(volume.endswith(":ro") for volume in service["volumes"]), name
    for name in EXECUTORS:
        (drained,) = (
            w.partition("=")[2] for w in services[name]["command"] if w.startswith("--drain-seconds")
        )
        assert seconds(services[name]["stop_grace_period"]) >= float(drained) + 10, name
        assert not re.search(r"(?i)token=|password|secret", str(services[name].get("environment"))), name
    # Replicas, whose admin port has no password, are reached through the proxy alone.
    assert document["networks"]["executors"] == {"internal": True}
    for name in REPLICAS:
        assert services[name]["networks"] == ["executors"], name
        assert "ports" not in services[name], name
    # The mask source has nothing in common with the provider but the checkpoint.
    masks = services["mask-source"]
    assert not set(masks["networks"]) & set(services["proxy"]["networks"])
    assert not any(word.startswith("--admin-host") for word in masks["command"])
    assert set(masks["volumes"]) & set(services["provider-1"]["volumes"]) == {"/checkpoint:/model:ro"}


def test_what_the_file_needs_is_said() -> None:
    with pytest.raises(KeyError, match="MODEL: the folder with the checkpoint"):
        interpolated(FILE.read_text(), {})
