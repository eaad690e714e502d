"""The gateway's page: what a browser makes of figures, of foreign text in them, and of a locked door."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import browsers
import pytest
from browsers import browser

from tenant_sdk.gateway.status_page import HEADERS, PAGE

KEY = "key-of-0123456789"


def sample(second: float, **others: float) -> dict[str, float]:
    """A second in which two sequences gained three tokens in each of ten steps."""
    return {
        "time": 1000.0 + second,
        "tokens": 30.0,
        "prompt_tokens": 12345.0,
        "batch": 2.0,
        "tokens_a_step": 3.0,
        "steps": 10.0,
        "round_trips": 240.0,
        "milliseconds": 1.25,
        "waiting": 5.0,
        "running": 2.0,
        "kv_used": 0.31,
        **others,
    }


def idle(second: float) -> dict[str, float]:
    """A second without a step."""
    return dict.fromkeys(sample(0), 0.0) | {"time": 1000.0 + second}


def status(**others: Any) -> dict[str, Any]:
    """What ``status.json`` says of a gateway at work."""
    return {
        "about": "base_model, one-time masks",
        "model": "<b>a model</b>",
        "adapters": [],
        "refused": {},
        "failing": False,
        "failure": "",
        "error": "",
        "samples": [sample(second) for second in range(30)],
        **others,
    }


@contextmanager
def served(told: dict[str, Any], page: str = PAGE, key: str = "") -> Iterator[tuple[str, list[str]]]:
    """A server of the page and of these figures, for who has the key; its URL, and what was given as keys."""
    given: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/":
                html = {"Content-Type": "text/html; charset=utf-8"}
                return self._answer(200, page.encode(), HEADERS | html)
            if self.path != "/status.json":
                return self._answer(404, b"", {})
            given.append(self.headers.get("Authorization", ""))
            if key and given[-1] != f"Bearer {key}":
                return self._answer(401, b"{}", {"WWW-Authenticate": "Bearer"})
            return self._answer(200, json.dumps(told).encode(), {"Content-Type": "application/json"})

        def _answer(self, code: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/", given
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def dumped(url: str, folder: Path) -> str:
    """What a browser makes of the page, without its script."""
    return re.sub("<script>.*</script>", "", browsers.dumped(url, folder), flags=re.DOTALL)


def shown(told: dict[str, Any], folder: Path) -> str:
    with served(told) as (url, _):
        return dumped(url, folder)


def now(page: str) -> dict[str, str]:
    """Of every chart: its last value and what is beside it."""
    found = re.findall(r'<span id="(\w+)">([^<]*)</span><small>([^<]*)</small>', page)
    return {name: f"{value}; {beside}" if beside else value for name, value, beside in found}


def test_the_page_needs_no_network_and_runs_nothing_else() -> None:
    elsewhere = r"https?://(?!www\.w3\.org)|@import|url\(|<link|<img|<script src"
    as_markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval| on\w+=| style="
    kept = r"localStorage|sessionStorage|cookie"
    assert not re.search(f"{elsewhere}|{as_markup}|{kept}", PAGE)
    policy = HEADERS["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


@browser
def test_a_browser_shows_the_figures(tmp_path: Path) -> None:
    page = shown(status(), tmp_path)
    assert "&lt;b&gt;a model&lt;/b&gt;" in page
    assert "base_model, one-time masks" in page
    assert now(page) == {
        "tokens": "30; and 12.3 k of prompts",
        "batch": "2.0",
        "tokens_a_step": "3.0; 1.50 a sequence",
        "steps": "10",
        "round_trips": "240",
        "milliseconds": "1.3",
        "running": "2; 5 waiting",
        "kv_used": "31 %",
    }
    assert page.count("last 29 s") == 8
    assert len(re.findall(r'<path d="M0\.00 ', page)) == 8
    assert re.search(r'<section id="banner" role="alert" hidden="">', page)
    assert re.search(r'<form id="door" hidden="">', page)
    assert re.search(r'<section class="wide" hidden="">\s*<h2>Folders that are not served', page)
    assert "none is served" in page


@browser
def test_seconds_without_a_step_have_no_mean(tmp_path: Path) -> None:
    """Lines of means have a gap there, and others fall to 0."""
    samples = [idle(0), sample(1), sample(2), idle(3), sample(4), idle(5)]
    page = shown(status(samples=samples), tmp_path)
    found = now(page)
    assert (found["batch"], found["tokens_a_step"], found["milliseconds"]) == ("none", "none", "none")
    assert (found["tokens"], found["steps"], found["running"]) == ("0.0", "0.0", "0; 0 waiting")
    assert page.count('d="M20.00 2.00L40.00 2.00M80.00 2.00"') == 3


@browser
def test_tokens_and_steps_may_be_counted_in_different_seconds(tmp_path: Path) -> None:
    """The gain of a step is that of ten seconds."""
    samples = [sample(s, tokens=40.0 if s % 2 else 20.0, steps=5.0 if s % 2 else 15.0) for s in range(30)]
    found = now(shown(status(samples=samples), tmp_path))
    assert found["tokens"] == "40; and 12.3 k of prompts"
    assert found["tokens_a_step"] == "3.0; 1.50 a sequence"


@browser
def test_a_gateway_that_has_just_begun(tmp_path: Path) -> None:
    page = shown(status(samples=[]), tmp_path)
    assert set(now(page).values()) == {""}
    assert "&lt;b&gt;a model&lt;/b&gt;" in page


@browser
def test_names_paths_and_errors_are_text(tmp_path: Path) -> None:
    evil = "<img src=x onerror=\"document.title='gone'\">"
    told = status(
        adapters=[
            {"id": "clinic", "path": "/data/clinic", "rank": 16, "notes": ""},
            {"id": f"a{evil}", "path": f"b{evil}", "rank": 8, "notes": f"c{evil}"},
        ],
        refused={f"d{evil}": f"e{evil}", "__proto__": "f"},
        failing=True,
        failure="away",
        error=f"g{evil}",
        about=f"h{evil}",
    )
    page = shown(told, tmp_path)
    assert "<img" not in page
    text = evil.replace("<", "&lt;").replace(">", "&gt;")
    assert "<tr><td>clinic</td><td>16</td><td>/data/clinic</td><td></td></tr>" in page
    assert f"<tr><td>a{text}</td><td>8</td><td>b{text}</td><td>c{text}</td></tr>" in page
    assert f"<tr><td>d{text}</td><td>e{text}</td></tr><tr><td>__proto__</td><td>f</td></tr>" in page
    assert f'<div id="error">g{text}</div>' in page
    assert f"h{text}" in page
    assert "<title>&lt;b&gt;a model&lt;/b&gt;, gateway</title>" in page


@browser
@pytest.mark.parametrize(
    ("failure", "what"), [("away", "answered with 503"), ("wrong", "answered with 502"), ("here", "failed")]
)
def test_a_banner_says_what_is_wrong(failure: str, what: str, tmp_path: Path) -> None:
    page = shown(status(failing=True, failure=failure, error="lost 192.0.2.7"), tmp_path)
    assert re.search(rf'<section id="banner" role="alert"><h2 id="what">[^<]*{what}', page)
    assert '<div id="error">lost 192.0.2.7</div>' in page


@browser
def test_a_locked_gateway_asks_for_a_key(tmp_path: Path) -> None:
    with served(status(), key=KEY) as (url, given):
        page = dumped(url, tmp_path)
    assert '<form id="door">' in page
    assert '<main id="charts" hidden="">' in page
    assert set(given) == {""}


# What a reader would do, as a script that the policy of the page would not let run: it is a part of the page.
TYPES = """
const types = text => { at("key").value = text; at("door").requestSubmit() };
setTimeout(() => types("%s"), 500);
poll();
"""


@browser
@pytest.mark.parametrize(("typed", "opens"), [(f" {KEY} ", True), ("another", False), ("clé", False)])
def test_a_key_that_is_given_opens(
    typed: str, opens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(HEADERS, "Content-Security-Policy")
    with served(status(), PAGE.replace("\npoll();\n", TYPES % typed), KEY) as (url, given):
        page = dumped(url, tmp_path)
    assert ('<form id="door" hidden="">' in page) == opens
    assert ('<main id="charts" hidden="">' in page) == (not opens)
    assert (now(page)["steps"] == "10") == opens
    assert KEY not in page
    wrong = {"another": "That is none of its keys.", "clé": "A key is of ASCII characters."}.get(typed)
    assert (f'<span id="wrong" role="status">{wrong}</span>' in page) == (wrong is not None)
    assert given.count("Bearer another") == (typed == "another")
