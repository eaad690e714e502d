"""A gateway's paths besides vLLM's: adapters, health, a page (``vllm.endpoint_plugins``)."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import time
from argparse import Namespace
from collections import deque
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import prometheus_client
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from vllm.entrypoints.generate.base.protocol import DeltaMessage
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.parser import ParserManager, abstract_parser
from vllm.parser.harmony import HarmonyParser
from vllm.v1.structured_output import backend_guidance
from vllm.v1.structured_output.backend_guidance import GuidanceBackend

from shared.encoded import UNREADABLE
from shared.errors import ConfigurationError, SymbiosisError
from shared.whole import write_whole
from tenant_sdk.gateway.adapters import Adapter, folders_in, mark_of, take
from tenant_sdk.gateway.admission import MAX_ADAPTERS, Authenticator, Queue, Refusal
from tenant_sdk.gateway.client_fairness import Reservations
from tenant_sdk.gateway.constraint_checks import ConstraintChecker
from tenant_sdk.gateway.http_frontend import GENERATES, TOKENIZES, HttpFrontend, Served
from tenant_sdk.gateway.log_redaction import redact_library_logs
from tenant_sdk.gateway.metrics import Collector, rates
from tenant_sdk.gateway.parsing import RequestParser
from tenant_sdk.gateway.round_robin import (
    TOKENIZING_THREADS,
    CachedAnswer,
    FairLock,
    FairThreadPool,
    current_client,
)
from tenant_sdk.gateway.status import Status
from tenant_sdk.gateway.tool_calls import JSON_CALLS, bounded_parser

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

    from shared.wire.messages import Manifest

SAMPLES, SAMPLE_SECONDS = 120, 1.0
LOOK_SECONDS, LOOKS_AGAIN = 1.0, 60  # between looks at the folder of adapters, and at refused ones
_NAMED = 20  # models in an error
FIGURES_SECONDS = 1.0  # for which metrics and the status are good
# Of vLLM's paths those that a gateway is for; the others would only be there to be attacked.
KEPT = GENERATES | TOKENIZES | {"/health", "/version"}
# vLLM's counters and gauges that the page shows.
_SHOWN = {
    "vllm:generation_tokens_total": "tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_used",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}


@dataclass(kw_only=True)
class Gateway:
    """What the server of this process serves; ``tenant_sdk.gateway.serving`` sets it.

    Attributes:
        folder: private: the model's folder with the worker's status, and ``adapters`` with copies.
        manifest: of the provider.
        adapters: folder that is watched, if any.
        most_rank: of adapters.
        allow_other_base: serve adapters that say they were made for another base.
        authenticator, queue: see ``HttpFrontend``.
        retry_after: seconds in which a provider that is away may be back.
        about: what the page says at the top.
        address: host and port on which it listens.
        say: shows a line to who started it.
        structured_outputs: take constraints on answers.
        tool_parser: how calls of tools are read from answers, as vLLM calls it; empty: they are not.
        content_format: in which templates get the contents of messages, as vLLM calls it.
        ready_file: where the URL is written when it answers.
    """

    folder: Path
    manifest: Manifest
    adapters: Path | None
    most_rank: int
    allow_other_base: bool
    authenticator: Authenticator
    queue: Queue
    retry_after: int
    about: str
    address: tuple[str, int]
    say: Callable[[str], None]
    structured_outputs: bool = True
    content_format: str = "auto"
    tool_parser: str = ""
    ready_file: Path | None = None
    served: dict[str, Adapter] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # folders that hold none, and why
    engine: Any = None  # vLLM's client of it
    parser: RequestParser = field(default_factory=RequestParser)
    constraint_checker: ConstraintChecker | None = None  # of constraints, if it takes any
    samples: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=SAMPLES))

    @property
    def engine_died(self) -> bool:
        """Whether vLLM's engine ended before it was asked to."""
        if self.engine.engine_core.resources.engine_manager.failed_proc_name is not None:
            return True
        handler = self.engine.output_handler  # ends by itself only when the engine does
        return handler is not None and handler.done() and not handler.cancelled()


serving: Gateway | None = None


class Endpoints:
    """See ``vllm.plugins.endpoint_plugins.interface``."""

    name = "symbiosis"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        if serving is None:
            raise ConfigurationError("start the gateway with `symbiosis-tenant serve`")
        self._gateway = serving
        self._changing = FairLock()
        # Names of each client, and of the folder if it is watched; and whose each is.
        authenticator = self._gateway.authenticator
        self._names = Reservations.one_each(MAX_ADAPTERS, authenticator.clients + bool(authenticator.keys))
        self._owners = dict[str, str]()
        self._metrics_text = CachedAnswer(prometheus_client.generate_latest, FIGURES_SECONDS)
        self._status_text = CachedAnswer(self._status_now, FIGURES_SECONDS)
        self._last_id, self._began = 0, int(time.time())
        # Of each folder below --adapters: its files when it was taken, and when it was last looked at.
        self._seen, self._marks = dict[str, object](), dict[str, object]()
        self._tasks: list[asyncio.Task[None]] = []

    def attach_router(self, app: FastAPI) -> None:
        """Take vLLM's other paths away, and add ours."""
        app.router.routes[:] = [route for route in app.routes if getattr(route, "path", "") in KEPT]
        gateway = self._gateway
        prometheus_client.REGISTRY.register(Collector(gateway))
        app.add_middleware(
            HttpFrontend,
            authenticator=gateway.authenticator,
            queue=gateway.queue,
            folder=gateway.folder,
            retry_after=gateway.retry_after,
            served=Served(
                context=lambda: gateway.engine.model_config.max_model_len,
                parser=gateway.parser,
                constraint_checker=lambda: gateway.constraint_checker,
                unserved=self._unserved,
                calls=bool(gateway.tool_parser),
            ),
        )
        app.get("/metrics", include_in_schema=False)(self._metrics)
        app.get("/status.json", include_in_schema=False)(self._status)
        app.get("/v1/models")(self._list_models)
        app.get("/v1/models/{name:path}")(self._model)
        app.get("/v1/adapters")(self._list)
        app.post("/v1/adapters")(self._add)
        app.delete("/v1/adapters/{name}")(self._remove)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        """Serve what lies in the folder of adapters, and look at it from now on."""
        assert engine_client is not None  # noqa: S101 - required_tasks says so
        self._engine, self._models = engine_client, state.openai_serving_models
        self._gateway.engine = engine_client
        _refuse_unknown_tokens(engine_client)
        _count_no_combinations(engine_client)
        _bound_parsers(state)
        engine_client.renderer._executor._inner = FairThreadPool(TOKENIZING_THREADS)
        await self._try_constraints(engine_client)
        redact_library_logs()  # requests come from now on
        if self._gateway.adapters is not None:
            await self._look(self._gateway.adapters, begins=True)
            self._tasks.append(asyncio.create_task(self._watch(self._gateway.adapters)))
        self._tasks += [asyncio.create_task(self._sample()), asyncio.create_task(self._announce())]

    async def _try_constraints(self, engine: EngineClient) -> None:
        """Have constraints tried before vLLM has them, which then need not be looked at in this process."""
        gateway, tokenizer = self._gateway, engine.renderer.get_tokenizer()
        if not gateway.structured_outputs:
            return
        if not GuidanceBackend.is_tokenizer_supported(tokenizer) or tokenizer.eos_token_id is None:
            gateway.say("this model's tokenizer takes no structured outputs; requests for them are refused")
            return
        # vLLM makes of each constraint a tag that includes the channels of such a model, which was not tried.
        if engine.model_config.hf_config.model_type == "gpt_oss":
            gateway.say("models of this kind take no structured outputs here; requests for them are refused")
            return
        rules, file = copy(tokenizer.backend_tokenizer), gateway.folder / "grammars.json"
        rules.no_padding()
        rules.no_truncation()
        file.write_text(rules.to_str())
        tokens = max(engine.model_config.get_vocab_size(), len(tokenizer))
        gateway.constraint_checker = ConstraintChecker(file, tokens, tokenizer.eos_token_id)
        await gateway.constraint_checker.start()
        leave_constraints_alone()

    async def _announce(self) -> None:
        """Say so when requests are answered."""
        gateway = self._gateway
        host, port = gateway.address
        while True:
            try:
                _, writer = await asyncio.open_connection(host, port)
                break
            except OSError:
                await asyncio.sleep(0.05)
        writer.close()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        names = ", ".join([self._models.model_name(), *gateway.served])
        gateway.say(f"serving {names} at {url}/v1; {url}/ shows how it goes")
        if gateway.ready_file is not None:
            write_whole(gateway.ready_file, url.encode(), 0o644)

    # -- adapters ----------------------------------------------------------------------------------

    def _unserved(self, name: str) -> str:
        """Why a model of this name is not served; empty: it is."""
        if not name or name in self._gateway.served or self._models.is_base_model(name):
            return ""
        names = [self._models.model_name(), *self._gateway.served]
        others = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return self._gateway.refused.get(name, f"the models here are {', '.join(names[:_NAMED])}{others}")

    async def add(self, folder: Path, name: str = "") -> Adapter:
        """Serve an adapter, in place of the one of this name if its content is another.

        Raises:
            SymbiosisError: see ``tenant_sdk.gateway.adapters.take``.
        """
        gateway = self._gateway
        async with self._changing.turn(current_client.get()):
            adapter = await asyncio.to_thread(
                take,
                folder,
                gateway.folder / "adapters",
                gateway.manifest,
                name=name,
                most_rank=gateway.most_rank,
                allow_other_base=gateway.allow_other_base,
                within=gateway.adapters,
            )
            if self._models.is_base_model(adapter.name):
                raise ConfigurationError(f"{adapter.name} is the base model's name; give the adapter another")
            before = gateway.served.get(adapter.name)
            if before is not None and before.folder == adapter.folder:
                return before
            owner = self._owners.get(adapter.name, current_client.get())
            if adapter.name not in self._owners and not self._names.take(owner, 1):
                mine = self._names.taken.get(owner, 0)
                raise ConfigurationError(
                    f"{mine} adapters are yours, and of {MAX_ADAPTERS} a part is kept for others; remove one"
                )
            self._owners[adapter.name] = owner
            # The path is part of what its prefixes are cached under, and no other content has it.
            request = LoRARequest(adapter.name, self._id_of(adapter.folder), str(adapter.folder))
            try:
                await self._engine.add_lora(request)
            except Exception as error:
                if before is None:
                    self._disown(adapter.name)
                why = str(error).removeprefix("Call to add_lora method failed: ")
                why = why.replace(str(adapter.folder), str(folder))
                raise ConfigurationError(f"the adapter in {folder} cannot be loaded: {why}") from error
            # Without a moment in which nobody has the name.
            old = self._models.lora_requests.get(adapter.name)
            self._models.lora_requests[adapter.name], gateway.served[adapter.name] = request, adapter
            await self._unload(old)
            gateway.say(f"adapter {adapter.name}: rank {adapter.rank}, of {folder}")
            if adapter.notes:
                gateway.say(adapter.notes)
            return adapter

    async def remove(self, name: str) -> bool:
        """Serve it no more; sequences that use it go on. Whether it was served."""
        async with self._changing.turn(current_client.get()):
            return await self._forget(name)

    async def _forget(self, name: str) -> bool:
        # Its copy stays until ``_tidy``: the worker may load it again for sequences that use it.
        request = self._models.lora_requests.pop(name, None)
        gone = self._gateway.served.pop(name, None)
        self._disown(name)
        if request is not None:
            await self._unload(request)
            self._gateway.say(f"adapter {name} is served no more")
        return gone is not None

    def _id_of(self, folder: Path) -> int:
        """What the worker knows a content by, of which it has one in memory, whatever names it has."""
        for request in self._models.lora_requests.values():
            if request.lora_path == str(folder):
                return int(request.lora_int_id)
        self._last_id += 1
        return self._last_id

    async def _unload(self, request: LoRARequest | None) -> None:
        """Take it from memory if no name has its content any more."""
        if request is not None and all(
            other.lora_int_id != request.lora_int_id for other in self._models.lora_requests.values()
        ):
            await self._engine.remove_lora(request.lora_int_id)

    def _disown(self, name: str) -> None:
        if (owner := self._owners.pop(name, None)) is not None:
            self._names.give_back(owner, 1)

    async def _tidy(self) -> None:
        """Remove copies of what was served before; nobody has been using any for a while."""
        async with self._changing.turn(current_client.get()):
            # While the lock was waited for, a request may have come for an adapter that was deleted then.
            if self._gateway.queue.under_way:
                return
            used = {adapter.folder for adapter in self._gateway.served.values()}
            for copy in (self._gateway.folder / "adapters").iterdir():
                if copy not in used:
                    await asyncio.to_thread(shutil.rmtree, copy, ignore_errors=True)

    async def _look(self, folder: Path, *, begins: bool = False, again: bool = False) -> None:
        """Serve what is in the folder, and no more what was in it.

        Args:
            begins: all that is there is complete; later a folder may still be written until two looks see the
                same.
            again: also look at those that were refused, whose reason may have gone.
        """
        gateway = self._gateway
        marks = await asyncio.to_thread(lambda: {path.name: mark_of(path) for path in folders_in(folder)})
        last, self._marks = marks if begins else self._marks, marks
        gateway.refused = {name: why for name, why in gateway.refused.items() if name in marks}
        for name, adapter in list(gateway.served.items()):
            if adapter.source.parent == folder and adapter.source.name not in marks:
                await self.remove(name)
        self._seen = {name: mark for name, mark in self._seen.items() if name in marks}
        for name, mark in marks.items():
            # As it was; nor is one that was deleted by request served again.
            known = self._seen.get(name) == mark and not (again and name in gateway.refused)
            if known or last.get(name) != mark:
                continue
            self._seen[name] = mark
            try:
                await self.add(folder / name)
                gateway.refused.pop(name, None)
            except Exception as error:  # whatever it is, the other folders are served
                if gateway.refused.get(name) != str(error):
                    gateway.say(str(error))
                gateway.refused[name] = str(error)

    async def _watch(self, folder: Path) -> None:
        """Look again and again. Libraries that are told of changes follow links out of the folder."""
        said = ""
        for look in count(1):
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look(folder, again=look % LOOKS_AGAIN == 0)
                said = ""
            except Exception as error:  # the next look may be a better one
                if said != str(error):
                    said = str(error)
                    self._gateway.say(f"cannot look into {folder}: {error}")

    # -- paths -------------------------------------------------------------------------------------

    def _cards(self) -> list[dict[str, Any]]:
        base, length = self._models.model_name(), self._engine.model_config.max_model_len
        card = {"object": "model", "created": self._began, "owned_by": "symbiosis", "max_model_len": length}
        adapters = [card | {"id": name, "root": name, "parent": base} for name in self._gateway.served]
        return [card | {"id": base, "root": base, "parent": None}, *adapters]

    async def _list_models(self) -> Response:
        whole = {"object": "list", "data": self._cards()}
        return Response(msgspec.json.encode(whole), media_type="application/json")

    async def _model(self, name: str) -> Response:
        card = next((each for each in self._cards() if each["id"] == name), None)
        if card is None:
            return _answer(
                Refusal(404, "not_found_error", f"{name[:200]} is not served: {self._unserved(name)}")
            )
        return Response(msgspec.json.encode(card), media_type="application/json")

    async def _list(self) -> Response:
        whole = {"data": self._shown(), "refused": self._gateway.refused}
        return Response(msgspec.json.encode(whole), media_type="application/json")

    async def _add(self, request: Request) -> JSONResponse:
        try:
            request_fields = msgspec.json.decode(await request.body(), type=_Asked)
            folder = self._gateway.adapters
            if folder is None:
                raise ConfigurationError("this gateway was started without adapters, so it takes none")
            if Path(request_fields.path).name != request_fields.path or request_fields.path == "..":
                raise ConfigurationError(
                    f"adapters are taken from below {folder} alone: path is a folder's name there"
                )
            path = folder / request_fields.path
            adapter = await self.add(path, request_fields.name or path.name)
        except (SymbiosisError, OSError, ValueError, *UNREADABLE) as error:
            return _answer(Refusal(400, "invalid_request_error", str(error)))
        return JSONResponse(_shown(adapter), 201)

    async def _remove(self, name: str) -> JSONResponse:
        if not await self.remove(name):
            return _answer(Refusal(404, "not_found_error", f"there is no adapter {name[:200]}"))
        return JSONResponse({"id": name, "deleted": True})

    async def _metrics(self) -> Response:
        return Response(await self._metrics_text(), media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def _status(self) -> Response:
        return Response(await self._status_text(), media_type="application/json")

    def _status_now(self) -> bytes:
        gateway, status = self._gateway, Status.read(self._gateway.folder)
        return msgspec.json.encode(
            {
                "about": gateway.about,
                "model": self._models.model_name(),
                "adapters": self._shown(),
                "refused": gateway.refused,
                "failing": status.failing,
                "failure": status.failure if status.failing else "",
                "error": status.error if status.failing else "",
                "samples": list(gateway.samples),
            }
        )

    def _shown(self) -> list[dict[str, Any]]:
        return [_shown(adapter) for adapter in list(self._gateway.served.values())]

    async def _sample(self) -> None:
        """One more point of every line of the page, each second."""
        before: dict[str, float] = {}
        while True:
            now = {"time": time.time(), "under_way": float(self._gateway.queue.under_way)}
            now |= await asyncio.to_thread(self._counts)
            if before:
                self._gateway.samples.append(rates(before, now))
            if not now["under_way"] and not before.get("under_way", 1.0):
                await self._tidy()
            before = now
            await asyncio.sleep(SAMPLE_SECONDS)

    def _counts(self) -> dict[str, float]:
        counts = dict.fromkeys(_SHOWN.values(), 0.0)
        for metric in prometheus_client.REGISTRY.collect():
            for sample in metric.samples:
                if sample.name in _SHOWN:
                    counts[_SHOWN[sample.name]] += sample.value
        with suppress(OSError, msgspec.DecodeError):
            status = Status.read(self._gateway.folder)
            names = ("steps", "sequences", "products", "rows", "rows_ahead", "seconds_waiting")
            counts |= {name: float(getattr(status, name)) for name in names}
        return counts


def _refuse_unknown_tokens(engine: EngineClient) -> None:
    """vLLM lets tokens pass that the tokenizer knows and the embeddings do not; one would end the engine."""
    renderer, count = engine.renderer, engine.model_config.get_vocab_size()
    check = renderer.validate_token_ids

    def checked(tokens: Sequence[int], *, parameter: str | None = None) -> None:
        check(tokens, parameter=parameter)
        if (largest := max(tokens, default=0)) >= count:
            raise VLLMValidationError(f"Token id {largest} is out of vocabulary", parameter=parameter)

    renderer.validate_token_ids = checked


def read_responses_as_chats() -> None:
    """Before vLLM's application is built.

    vLLM puts a token before a response's prompt that begins a text, which chat templates write. It compares
    each item with some 25 types, in the thread of all clients; ``requests`` has read the items already.
    """
    build = ResponsesRequest.build_tok_params

    def built(request: Any, config: Any) -> Any:
        return dataclasses.replace(build(request, config), add_special_tokens=False)

    ResponsesRequest.build_tok_params = built
    ResponsesRequest.model_fields["input"].annotation = str | list[Any]
    ResponsesRequest.model_rebuild(force=True)


def _bound_parsers(state: State) -> None:
    """Have calls read as ``tool_calls`` says; HarmonyParser looks at each token once, and at no text."""
    forced = ParserManager.get_parser(JSON_CALLS, enable_auto_tools=True)
    holders = [(state.online_renderer, "parser"), (state.openai_serving_chat, "parser_cls")]
    for holder, name in (*holders, (state.openai_serving_responses, "parser")):
        reads = getattr(holder, name)
        tools = reads.tool_parser_cls
        if not issubclass(reads, HarmonyParser):
            collects = tools.engine_based_streaming or tools is forced.tool_parser_cls
            setattr(holder, name, bounded_parser(reads, forced, DeltaMessage, collects=collects))


def leave_constraints_alone() -> None:
    """Have vLLM look at no constraint in the thread of all clients, which may take minutes.

    Beside strict tools, it asks whether xgrammar supports the constraint. The answer matters for constraints
    on calls alone, which ``serving`` turns off.
    """
    backend_guidance.validate_guidance_grammar = lambda *_, **__: None
    abstract_parser._xgrammar_supports = lambda *_: False


def _count_no_combinations(engine: EngineClient) -> None:
    """vLLM keeps a metric of each combination of adapters that there ever was, and they have no end."""
    for each in engine.logger_manager.stat_loggers:
        if (gauge := getattr(each, "gauge_lora_info", None)) is not None:
            prometheus_client.REGISTRY.unregister(gauge)
            each.gauge_lora_info = None


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    path: Annotated[str, msgspec.Meta(max_length=1024)]
    name: Annotated[str, msgspec.Meta(max_length=200)] = ""


def _shown(adapter: Adapter) -> dict[str, Any]:
    return {"id": adapter.name, "path": str(adapter.source), "rank": adapter.rank, "notes": adapter.notes}


def _answer(refusal: Refusal) -> JSONResponse:
    headers = {"retry-after": str(refusal.retry_after)} if refusal.retry_after else {}
    return JSONResponse(refusal.body(), refusal.status, headers)
