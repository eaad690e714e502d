"""A gateway's paths besides vLLM's: adapters, health, a page (``vllm.endpoint_plugins``)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from argparse import Namespace
from collections import deque
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import prometheus_client
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from vllm.v1.structured_output.backend_guidance import GuidanceBackend

from shared.atomic import write_atomically
from shared.encoded import UNREADABLE, path_text
from shared.errors import ConfigurationError, SymbiosisError
from shared.hosts import in_url
from shared.log_rate_limit import LogRateLimiter
from tenant_sdk.gateway import vllm_patches
from tenant_sdk.gateway.adapter_registry import AdapterRegistry
from tenant_sdk.gateway.adapters import Adapter
from tenant_sdk.gateway.admission import Authenticator, Refusal, SequenceLimit
from tenant_sdk.gateway.constraint_checks import ConstraintChecker
from tenant_sdk.gateway.http_frontend import (
    GENERATION_PATHS,
    TOKENIZING_PATHS,
    FrontendDependencies,
    HttpFrontend,
)
from tenant_sdk.gateway.log_redaction import redact_library_logs
from tenant_sdk.gateway.metrics import CachedAnswer, Collector, rates
from tenant_sdk.gateway.parsing import RequestParser
from tenant_sdk.gateway.status import REMIND_SECONDS, GatewayStatus

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

    from shared.wire.messages import Manifest

log = logging.getLogger(__name__)
SAMPLES, SAMPLE_SECONDS = 120, 1.0
METRICS_SECONDS = 1.0  # for which metrics and the status are good
# Of vLLM's paths those that a gateway is for; the others would only be there to be attacked.
KEPT_ROUTES = GENERATION_PATHS | TOKENIZING_PATHS | {"/health", "/version"}
# vLLM's counters and gauges that the page shows.
_PAGE_METRICS = {
    "vllm:generation_tokens_total": "tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_used",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    """What the server of this process serves, and how.

    Attributes:
        folder: private: the model's folder with the worker's status, and ``adapters`` with copies.
        manifest: of the provider.
        adapters: folder that is watched, if any.
        most_rank: of adapters.
        allow_other_base: serve adapters that say they were made for another base.
        authenticator: see ``HttpFrontend``.
        max_in_flight: sequences in flight at once, computed or waiting.
        retry_after: seconds in which an unavailable provider may be back.
        about: what the page says at the top.
        address: host and port on which it listens.
        notify: shows a line to who started it.
        structured_outputs: take constraints on answers.
        tool_parser: how calls of tools are read from answers, as vLLM calls it; empty: they are not.
        required_parser: the same for calls that must be made.
        content_format: in which templates get the contents of messages, as vLLM calls it.
        ready_file: where the URL is written when it answers.
        context: the most tokens of a sequence; None: vLLM finds it.
    """

    folder: Path
    manifest: Manifest
    adapters: Path | None
    most_rank: int
    allow_other_base: bool
    authenticator: Authenticator
    max_in_flight: int
    retry_after: int
    about: str
    address: tuple[str, int]
    notify: Callable[[str], None]
    structured_outputs: bool
    content_format: str
    tool_parser: str
    required_parser: str
    ready_file: Path | None
    context: int | None


class Endpoints:
    """See ``vllm.plugins.endpoint_plugins.interface``. vLLM makes the object, and gives it no arguments.

    Attributes:
        settings: ``tenant_sdk.gateway.serving`` sets them before.
        engine: vLLM's client of it, once it has started.
    """

    name = "symbiosis"
    required_tasks = ("generate",)
    settings: ClassVar[GatewaySettings | None] = None
    engine: ClassVar[Any] = None

    def __init__(self) -> None:
        if self.settings is None:
            raise ConfigurationError("start the gateway with `symbiosis-tenant serve`")
        self._settings = self.settings
        self._sequence_limit = SequenceLimit(
            self._settings.max_in_flight, self._settings.authenticator.clients
        )
        self._parser = RequestParser()
        self._constraint_checker: ConstraintChecker | None = None
        self._samples: deque[dict[str, float]] = deque(maxlen=SAMPLES)
        self._metrics_text = CachedAnswer(prometheus_client.generate_latest, METRICS_SECONDS)
        self._status_text = CachedAnswer(self._status_now, METRICS_SECONDS)
        self._began = int(time.time())
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = threading.Event()

    @classmethod
    def engine_died(cls) -> bool:
        """Whether vLLM's engine ended before it was asked to."""
        if cls.engine.engine_core.resources.engine_manager.failed_proc_name is not None:
            return True
        handler = cls.engine.output_handler  # ends by itself only when the engine does
        return handler is not None and handler.done() and not handler.cancelled()

    def attach_router(self, app: FastAPI) -> None:
        """Take vLLM's other paths away, and add ours."""
        app.router.routes[:] = [route for route in app.routes if getattr(route, "path", "") in KEPT_ROUTES]
        settings = self._settings
        app.add_middleware(
            HttpFrontend,
            authenticator=settings.authenticator,
            sequence_limit=self._sequence_limit,
            folder=settings.folder,
            retry_after=settings.retry_after,
            served=FrontendDependencies(
                context=lambda: self.engine.model_config.max_model_len,
                parser=self._parser,
                constraint_checker=lambda: self._constraint_checker,
                unserved=lambda name: self._adapters.unserved(name),
                calls=bool(settings.tool_parser),
                ending=self._ending.is_set,
            ),
        )
        app.get("/metrics", include_in_schema=False)(self._metrics)
        app.get("/status.json", include_in_schema=False)(self._status)
        app.get("/v1/models")(self._list_models)
        app.get("/v1/models/{name:path}")(self._model)
        app.get("/v1/adapters")(self._list)
        app.post("/v1/adapters")(self._add)
        app.delete("/v1/adapters/{name:path}")(self._remove)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Serve what lies in the folder of adapters, and look at it from now on."""
        assert engine_client is not None  # noqa: S101 - required_tasks says so
        Endpoints.engine, self._models = engine_client, state.openai_serving_models
        self._adapters = AdapterRegistry(self._settings, engine_client, self._models, self._sequence_limit)
        prometheus_client.REGISTRY.register(
            Collector(self._settings.folder, self._sequence_limit, self._adapters)
        )
        vllm_patches.report_end(engine_client, self._ending.set)
        vllm_patches.refuse_unknown_tokens(engine_client)
        vllm_patches.count_no_combinations(engine_client)
        vllm_patches.bound_parsers(state)
        vllm_patches.tokenize_fairly(engine_client)
        vllm_patches.tell_of_requests(engine_client)
        vllm_patches.answer_each_alone(engine_client)
        await self._try_constraints(engine_client)
        redact_library_logs()  # requests come from now on
        if self._settings.adapters is not None:
            await self._adapters.scan(self._settings.adapters, begins=True)
            self._tasks.append(asyncio.create_task(self._adapters.watch(self._settings.adapters)))
        self._tasks += [asyncio.create_task(self._sample()), asyncio.create_task(self._announce())]

    async def _try_constraints(self, engine: EngineClient) -> None:
        """Have constraints tried before vLLM has them, which then need not be looked at in this process."""
        settings, tokenizer = self._settings, engine.renderer.get_tokenizer()
        if not settings.structured_outputs:
            return
        if not GuidanceBackend.is_tokenizer_supported(tokenizer) or tokenizer.eos_token_id is None:
            settings.notify(
                "this model's tokenizer takes no structured outputs; requests for them are refused"
            )
            return
        # vLLM makes of each constraint a tag that includes the channels of such a model, which was not tried.
        if engine.model_config.hf_config.model_type == "gpt_oss":
            settings.notify(
                "models of this kind take no structured outputs here; requests for them are refused"
            )
            return
        rules, file = copy(tokenizer.backend_tokenizer), settings.folder / "grammars.json"
        rules.no_padding()
        rules.no_truncation()
        file.write_text(rules.to_str())
        tokens = max(engine.model_config.get_vocab_size(), len(tokenizer))
        self._constraint_checker = ConstraintChecker(file, tokens, tokenizer.eos_token_id)
        await self._constraint_checker.start()
        vllm_patches.leave_constraints_alone()

    async def _announce(self) -> None:
        """Say so when requests are answered."""
        settings = self._settings
        host, port = settings.address
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
                break
            except OSError:
                await asyncio.sleep(0.05)
        writer.close()
        url = f"http://{in_url(host)}:{port}"
        names = ", ".join([self._models.model_name(), *self._adapters.served])
        settings.notify(f"serving {names} at {url}/v1; {url}/ shows how it goes")
        if settings.ready_file is not None:
            try:
                write_atomically(settings.ready_file, url.encode(), 0o644)
            except OSError as error:
                settings.notify(f"cannot write {settings.ready_file}: {error.strerror}")

    def _card(self, name: str) -> dict[str, Any]:
        base, length = self._models.model_name(), self.engine.model_config.max_model_len
        card = {"object": "model", "created": self._began, "owned_by": "symbiosis", "max_model_len": length}
        return card | {"id": name, "root": name, "parent": None if name == base else base}

    async def _list_models(self) -> Response:
        names = [self._models.model_name(), *self._adapters.served]
        whole = {"object": "list", "data": [self._card(name) for name in names]}
        return Response(msgspec.json.encode(whole), media_type="application/json")

    async def _model(self, name: str) -> Response:
        if name != self._models.model_name() and name not in self._adapters.served:
            return _answer(
                Refusal(
                    404, "not_found_error", f"{name[:200]} is not served: {self._adapters.unserved(name)}"
                )
            )
        return Response(msgspec.json.encode(self._card(name)), media_type="application/json")

    async def _list(self) -> Response:
        whole = {"data": self._adapter_entries(), "refused": self._refused_folders()}
        return Response(msgspec.json.encode(whole), media_type="application/json")

    async def _add(self, request: Request) -> JSONResponse:
        try:
            request_fields = msgspec.json.decode(await request.body(), type=_AdapterRequest)
            folder = self._settings.adapters
            if folder is None:
                raise ConfigurationError("this gateway was started without adapters, so it takes none")
            if Path(request_fields.path).name != request_fields.path or request_fields.path.startswith("."):
                raise ConfigurationError(
                    f"adapters are taken from below {folder} alone: path is a folder's name there, and "
                    "begins with no dot"
                )
            path = folder / request_fields.path
            adapter = await self._adapters.add(path, request_fields.name or path.name)
        except (SymbiosisError, OSError, ValueError, *UNREADABLE) as error:
            return _answer(Refusal(400, "invalid_request_error", str(error)))
        return JSONResponse(_adapter_entry(adapter), 201)

    async def _remove(self, name: str) -> JSONResponse:
        if not await self._adapters.remove(name):
            return _answer(Refusal(404, "not_found_error", f"there is no adapter {name[:200]}"))
        return JSONResponse({"id": name, "deleted": True})

    async def _metrics(self) -> Response:
        return Response(await self._metrics_text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def _status(self) -> Response:
        return Response(await self._status_text(), media_type="application/json")

    def _status_now(self) -> bytes:
        status = GatewayStatus.read(self._settings.folder)
        return msgspec.json.encode(
            {
                "about": self._settings.about,
                "model": self._models.model_name(),
                "adapters": self._adapter_entries(),
                "refused": self._refused_folders(),
                "failing": status.failing,
                "failure": status.failure if status.failing else "",
                "error": status.error if status.failing else "",
                "samples": list(self._samples),
            }
        )

    def _adapter_entries(self) -> list[dict[str, Any]]:
        return [_adapter_entry(adapter) for adapter in list(self._adapters.served.values())]

    def _refused_folders(self) -> dict[str, str]:
        return {path_text(name): path_text(why) for name, why in list(self._adapters.refused.items())}

    async def _sample(self) -> None:
        """One more point of every line of the page, each second."""
        before, limiter = dict[str, float](), LogRateLimiter(REMIND_SECONDS)
        while True:
            now = {"time": time.time()}
            try:
                now |= await asyncio.to_thread(self._counts)
                if before:
                    self._samples.append(rates(before, now))
                await self._adapters.remove_unused_copies()
            except OSError as error:  # the disk, or file descriptors: they may be there again
                if limiter.due(time.monotonic()):
                    log.warning("no metrics for the page: %s%s", error.strerror, limiter.more())
            except Exception:  # whatever it is, there may be some in the next second
                if limiter.due(time.monotonic()):
                    log.exception("no metrics for the page%s", limiter.more())
            before = now
            await asyncio.sleep(SAMPLE_SECONDS)

    def _counts(self) -> dict[str, float]:
        counts = dict.fromkeys(_PAGE_METRICS.values(), 0.0)
        for metric in prometheus_client.REGISTRY.collect():
            for sample in metric.samples:
                if sample.name in _PAGE_METRICS:
                    counts[_PAGE_METRICS[sample.name]] += sample.value
        with suppress(OSError, msgspec.DecodeError):
            status = GatewayStatus.read(self._settings.folder)
            names = ("steps", "sequences", "products", "rows", "rows_ahead", "seconds_waiting")
            counts |= {name: float(getattr(status, name)) for name in names}
        return counts


class _AdapterRequest(msgspec.Struct, forbid_unknown_fields=True):
    path: Annotated[str, msgspec.Meta(max_length=1024)]
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""


def _adapter_entry(adapter: Adapter) -> dict[str, Any]:
    return {
        "id": adapter.name,
        "path": path_text(adapter.source),
        "rank": adapter.rank,
        "notes": adapter.notes,
    }


def _answer(refusal: Refusal) -> JSONResponse:
    headers = {"retry-after": str(refusal.retry_after)} if refusal.retry_after else {}
    return JSONResponse(refusal.body(), refusal.status, headers)
