"""A model hub on this machine: as much of its HTTP interface as a download asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"


@dataclass
class Hub:
    """``models``: a folder by name. All have one commit, which is also the branch ``main``."""

    url: str
    models: dict[str, Path]
    gated: set[str] = field(default_factory=set)
    fetched: list[str] = field(default_factory=list)


@contextmanager
def hub(models: dict[str, Path], gated: set[str] | None = None) -> Iterator[Hub]:
    """Serve folders as a hub serves repositories."""
    state = Hub("", models, gated or set())

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            api = parts[:2] == ["api", "models"]
            name = "/".join(parts[2:4] if api else parts[:2])
            rest = parts[4:] if api else parts[2:]
            what, revision = rest[:2] or ("", "main")
            if name not in state.models:
                return self.reply(404, error="RepoNotFound")
            if what and revision not in ("main", COMMIT):
                return self.reply(404, error="RevisionNotFound")
            folder = state.models[name]
            if api and what != "tree":
                return self.reply(200, json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
            if api:
                files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
                tree = [
                    {
                        "type": "file",
                        "path": str(each.relative_to(folder)),
                        "size": each.stat().st_size,
                        "oid": hashlib.sha1(each.read_bytes()).hexdigest(),
                    }
                    for each in files
                ]
                return self.reply(200, json.dumps(tree).encode())
            if name in state.gated:
                return self.reply(403, error="GatedRepo")
            file = "/".join(rest[2:])
            if self.command == "GET":
                state.fetched.append(file)
            return self.reply(200, (folder / file).read_bytes(), etag=True)

        def reply(self, status: int, body: bytes = b"", error: str = "", etag: bool = False) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            if error:
                self.send_header("X-Error-Code", error)
            if etag:
                self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
