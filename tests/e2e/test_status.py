"""The status page: what it samples, and what a browser without a network makes of it."""

from __future__ import annotations

import http.client
import re
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from browsers import browser, dumped

from provider.engine.engine import Completion
from provider.observe.admin import AdminServer
from provider.observe.metrics import Metrics
from provider.observe.status import PAGE, StatusHistory
from provider.workers.state import WorkerState
from shared.errors import ConfigurationError
from shared.wire.header import Direction, Header, Operation, RequestClass


def counted() -> Metrics:
    """Metrics of an executor that did some work."""
    metrics = Metrics()
    metrics.watch(lambda: 3, lambda: 1 << 20, lambda: (98, 2))
    return metrics


def work(metrics: Metrics) -> None:
    """Two requests of two tenants in one product of 40 rows."""
    metrics.batch(40, 0.25, 0.2)
    for tenant, rows in (("alice", 30), ("bob", 10)):
        request = Header(Operation.PRODUCT, Direction.FORWARD, 1, 0, 1, rows, 64, 1)
        answer = request._replace(operation=Operation.REPLY)
        metrics.answered(tenant, request, answer, Completion([], RequestClass.DECODE, 0.001, 0.002, 0.1))


def crew() -> list[WorkerState]:
    """A worker that multiplies, and one that cannot come back."""
    up = WorkerState(
        name="0",
        pid=1,
        up=True,
        since=time.time() - 7200,
        why="",
        device="cpu",
        groups=24,
        stripe="",
        restarts=0,
        products=1200,
        rows=48000,
        seconds=12.34,
        batches=2,
        waiting=5,
        resident_bytes=400 << 20,
        weight_bytes=90 << 20,
    )
    why = "worker 1 cannot load its share: there is no <i>model</i>"
    gone = up._replace(name="1", up=False, since=time.time() - 70, why=why, restarts=4)
    return [up, gone._replace(batches=0, resident_bytes=0, stripe="2 of 2")]


@contextmanager
def shown(status: StatusHistory, metrics: Metrics) -> Iterator[AdminServer]:
    admin = AdminServer(metrics, 0, SimpleNamespace(alive=lambda: True, not_ready=lambda: ""), status)
    try:
        yield admin
    finally:
        admin.close()
        status.close()


def test_a_sample_is_what_happened_since_the_last() -> None:
    metrics = counted()
    status = StatusHistory(metrics, {"model": "m"})
    status.close()
    work(metrics)
    status.sample(1000.0, 0.5)
    status.sample(1001.0, 1.0)
    first, second = status.report()["samples"][-2:]
    assert first == {
        "time": 1000.0,
        "rows_per_second": 80.0,
        "requests_per_second": 4.0,
        "rows_per_product": 40.0,
        "busy": 0.5,
        "waiting": 3.0,
        "sessions": 0.0,
        "met": -1.0,  # no token since
        "refused": 0.0,
    }
    assert second["rows_per_second"] == second["busy"] == 0.0
    assert status.report()["tenants"] == [
        {
            "name": name,
            "requests": 1,
            "rows": rows,
            "received_bytes": rows * 64 * 4,
            "sent_bytes": rows * 64 * 4,
            "product_seconds": 0.1,
        }
        for name, rows in (("alice", 30), ("bob", 10))
    ]


def test_tokens_of_an_interval() -> None:
    counts = [90, 10]
    metrics = Metrics()
    metrics.watch(lambda: 0, lambda: 0, lambda: (counts[0], counts[1]))
    status = StatusHistory(metrics, {})
    status.close()
    counts[:] = [99, 11]
    status.sample(0.0, 1.0)
    assert status.report()["samples"][-1]["met"] == pytest.approx(0.9)


def get(admin: AdminServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", admin.port, timeout=800)) as client:
        client.request("GET", path, headers=headers)
        answer = client.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def test_the_page_needs_no_network_and_no_other_site_reads_it() -> None:
    assert not re.search(rb"https?://(?!www\.w3\.org)|@import|url\(|<link|<img|<script src", PAGE)
    metrics = counted()
    with shown(StatusHistory(metrics, {"model": "m"}), metrics) as admin:
        code, headers, body = get(admin, "/")
        assert (code, body) == (200, PAGE)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert get(admin, "/status.json")[0] == 200
        assert get(admin, "/", Host="evil.example")[0] == 403
        assert get(admin, "/metrics", Host=f"evil.example:{admin.port}")[0] == 403
        assert get(admin, "/metrics", Host="localhost")[0] == 200
        for here in ("127.0.0.1", f"10.0.0.7:{admin.port}", "[fd00::7]:9190"):  # as probes in a cluster ask
            assert get(admin, "/readyz", Host=here)[0] == 200
        for name in ("127.0.0.1.evil.example", "[fd00::7", "a@b", "", "localhost.evil"):
            assert get(admin, "/readyz", Host=name)[0] == 403


def test_nothing_is_changed_there() -> None:
    metrics = counted()
    with shown(StatusHistory(metrics, {}), metrics) as admin:
        for path in ("/readyz", "/metrics", "/"):
            for method in ("POST", "PUT", "DELETE"):
                with closing(http.client.HTTPConnection("127.0.0.1", admin.port, timeout=800)) as client:
                    client.request(method, path)
                    answer = client.getresponse()
                    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("host", "url", "open_to_others"),
    [
        ("127.0.0.1", "http://127.0.0.1:", False),
        ("0.0.0.0", "http://127.0.0.1:", True),
        ("::1", "http://[::1]:", False),
        ("::", "http://[::1]:", True),
        ("127.0.0.2", "http://127.0.0.2:", False),
    ],
)
def test_the_admin_port_is_where_it_was_told(
    host: str, url: str, open_to_others: bool, caplog: pytest.LogCaptureFixture
) -> None:
    health = SimpleNamespace(alive=lambda: True, not_ready=lambda: "")
    admin = AdminServer(Metrics(), 0, health, host=host)
    try:
        assert admin.url == f"{url}{admin.port}"
        assert urllib.request.urlopen(admin.url + "/readyz", timeout=800).read() == b"ready\n"
        assert ("may read the admin pages" in caplog.text) == open_to_others
    finally:
        admin.close()


def test_an_address_that_is_not_here() -> None:
    with pytest.raises(ConfigurationError, match=r"admin port 0 of admin_host=192\.0\.2\.1: Cannot assign"):
        AdminServer(Metrics(), 0, SimpleNamespace(), host="192.0.2.1")


@browser
def test_a_browser_shows_the_figures(tmp_path: Path) -> None:
    metrics = counted()
    status = StatusHistory(
        metrics, {"model": "<b>a model</b>", "summary": "LlamaForCausalLM, ring, 48 groups"}
    )
    status.close()  # only the samples that are taken here
    for second in range(30):
        work(metrics)
        status.sample(1000.0 + second, 1.0)
    with shown(status, metrics) as admin:
        page = dumped(f"http://127.0.0.1:{admin.port}/", tmp_path)
    assert "&lt;b&gt;a model&lt;/b&gt;" in page
    assert re.search(r'id="rows_per_second">40<', page)
    assert re.search(r'id="rows_per_product">40\.0<', page)
    assert re.search(r'id="busy">25 %<', page)
    assert re.search(r'id="met">none decoded<', page)
    assert re.search(
        r"<td>alice</td><td>30</td><td>900</td><td>0\.2 MiB</td><td>0\.2 MiB</td><td>3\.0 s</td>", page
    )
    assert page.count("last 29 s") == 8
    assert len(re.findall(r'<path d="M0\.00 ', page)) >= 6
    assert re.search(r'<section class="wide" hidden="">\s*<h2>Workers', page)


def test_busy_is_the_mean_of_workers() -> None:
    """Not the time of batches, of which each worker has two at once."""
    metrics, states = counted(), crew()
    metrics.workers = lambda: states
    status = StatusHistory(metrics, {})
    status.close()
    work(metrics)
    states[0] = states[0]._replace(seconds=states[0].seconds + 0.6)
    status.sample(0.0, 1.0)
    assert status.report()["samples"][-1]["busy"] == pytest.approx(0.3)


def test_metrics_by_worker() -> None:
    metrics = Metrics()
    assert metrics.by_label("symbiosis_worker_up", "worker") == {}
    metrics.workers = crew
    expected = {
        "up": (1, 0),
        "restarts_total": (0, 4),
        "products_total": (1200, 1200),
        "rows_total": (48000, 48000),
        "busy_seconds_total": (12.34, 12.34),
        "batches": (2, 0),
        "waiting_requests": (5, 5),
        "groups": (24, 24),
        "weight_bytes": (90 << 20, 90 << 20),
        "resident_bytes": (400 << 20, 0),
    }
    found = {name: metrics.by_label(f"symbiosis_worker_{name}", "worker") for name in expected}
    assert found == {name: {"0": first, "1": second} for name, (first, second) in expected.items()}
    labels = {"worker": "1", "device": "cpu", "stripe": "2 of 2"}
    assert metrics.registry.get_sample_value("symbiosis_worker_info", labels) == 1


@browser
def test_a_browser_shows_workers_where_there_are_some(tmp_path: Path) -> None:
    metrics = counted()
    metrics.workers = crew
    with shown(StatusHistory(metrics, {"model": "m", "summary": "ring"}), metrics) as admin:
        page = dumped(f"http://127.0.0.1:{admin.port}/", tmp_path)
    assert re.search(
        r"<td>0 on cpu</td><td>1</td><td[^>]*>up for 2 h</td><td>24</td><td>1,200</td><td>48,000</td>"
        r"<td>12\.3 s</td><td>2</td><td>5</td><td>90\.0 MiB</td><td>400\.0 MiB</td><td>0</td>",
        page,
    )
    assert re.search(
        r'<td class="away">being started again for 7\d s</td><td>24, stripe 2 of 2</td>.*'
        r"<td>none</td><td>4</td>",
        page,
    )
    assert "there is no &lt;i&gt;model&lt;/i&gt;" in page
