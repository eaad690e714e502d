"""In the gateway's environment: a server that ends while clients wait, and how they hear of it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from typing import Any

import uvicorn

from tenant_sdk.gateway.admission import Authenticator
from tenant_sdk.gateway.connection_limits import ConnectionLimits

PATHS = ("/waits", "/v1/chat/completions", "/v1/responses", "/partly")
begun = threading.Semaphore(0)
hung_up = list[str]()


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Writes a part of an answer or nothing, and no more until the client hangs up."""
    headers = [(b"content-length", b"5")] if scope["path"] == "/partly" else []
    if scope["path"] != "/waits":
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data", "more_body": True})
    begun.release()
    while (await receive())["type"] != "http.disconnect":
        pass
    hung_up.append(scope["path"])


sockets = [socket.create_server(("127.0.0.1", 0))]
config = uvicorn.Config(
    application,
    http=ConnectionLimits.at(Authenticator(())).protocol(),
    ws="none",
    lifespan="off",
    log_level="critical",
    timeout_graceful_shutdown=600,
)
server = uvicorn.Server(config)
thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=sockets)))
thread.start()
clients = [socket.create_connection(sockets[0].getsockname()) for _ in PATHS]
for client, path in zip(clients, PATHS, strict=True):
    client.settimeout(600)
    client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    begun.acquire()
server.should_exit = True
answers = list[str]()
for client in clients:
    answer = b""
    while part := client.recv(10_000):
        answer += part
    answers.append(answer.decode())
thread.join()
print(json.dumps([answers, sorted(hung_up)]))
