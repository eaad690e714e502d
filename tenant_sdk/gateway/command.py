"""``symbiosis-tenant serve``."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from shared import imports
from shared.errors import ConfigurationError
from tenant_sdk import cli_options as options

_SERVER, _MODEL = "Server", "Model and adapters"


def _option(panel: str, text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


@options.command_line.takes
def serve(
    connection: options.SessionOptions,
    adapters: Annotated[
        Optional[Path],  # noqa: UP045
        _option(
            _MODEL,
            "Folder with the folders of LoRA adapters: each is a model of its name. What is put there or "
            "taken away later is too.",
        ),
    ] = None,
    host: Annotated[
        str, _option(_SERVER, "Address to listen on. Others than this machine's own need --api-key-env.")
    ] = "127.0.0.1",
    port: Annotated[int, _option(_SERVER, "Port to listen on.", min=1, max=65535)] = 8000,
    api_key_env: Annotated[
        Optional[str],  # noqa: UP045
        _option(
            _SERVER,
            "Environment variable with the API keys that clients need, with spaces in between.",
            metavar="VAR",
        ),
    ] = None,
    name: Annotated[
        Optional[str],  # noqa: UP045
        _option(_MODEL, "What clients call the model without an adapter. Default: as the provider does."),
    ] = None,
    allow_other_base: Annotated[
        bool,
        _option(_MODEL, "Serve adapters that were made for another model.", "--allow-other-base"),
    ] = False,
    chat_template: Annotated[
        Optional[Path],  # noqa: UP045
        _option(_MODEL, "Jinja file for chats. Default: the template of the tokenizer, if it has one."),
    ] = None,
    context: Annotated[
        Optional[int],  # noqa: UP045
        _option(_MODEL, "Tokens of prompt and answer at most. Default: as many as the model takes.", min=2),
    ] = None,
    dtype: Annotated[
        str, _option(_MODEL, "Of activations, keys and values: float32 or bfloat16.")
    ] = "float32",
    max_sequences: Annotated[int, _option(_SERVER, "Computed in one step.", min=1)] = 32,
    max_waiting: Annotated[
        int, _option(_SERVER, "Sequences that may wait; more are told to come back (429).", min=0)
    ] = 64,
    kv_memory_gib: Annotated[
        float, _option(_MODEL, "Memory for keys and values of all sequences.", metavar="GIB")
    ] = 1.0,
    max_adapters: Annotated[
        int, _option(_MODEL, "Different adapters in one step; each takes memory in all layers.", min=1)
    ] = 16,
    max_rank: Annotated[
        Optional[int],  # noqa: UP045
        _option(_MODEL, "Of adapters that come later. Default: of those that are there.", metavar="RANK"),
    ] = None,
    no_constraints: Annotated[
        bool,
        _option(
            _MODEL,
            "Refuse structured outputs: JSON schemas, patterns, choices and grammars for answers.",
            "--no-constraints",
        ),
    ] = False,
    prefix_cache: Annotated[
        bool,
        _option(
            _MODEL,
            "Keep keys and values of how prompts begin, for others that begin alike. Fewer rows then show "
            "the provider that one does, and shorter waits show it to other clients.",
            "--prefix-cache",
        ),
    ] = False,
    speculate: Annotated[
        Optional[str],  # noqa: UP045
        _option(
            _MODEL,
            "Guess several tokens and check them in one round trip: prompt-lookup, or the folder of a small "
            "model. How many steps a text takes then depends on the text (docs/how-to/gateway.md).",
            metavar="prompt-lookup|FOLDER",
        ),
    ] = None,
    draft_tokens: Annotated[
        Optional[int],  # noqa: UP045
        _option(_MODEL, "Guessed at once. Default: 4.", min=1, max=16),
    ] = None,
    ready_file: Annotated[
        Optional[Path],  # noqa: UP045
        _option(_SERVER, "File that gets the URL when requests are answered."),
    ] = None,
) -> None:
    """Serve the model and adapters to OpenAI's clients; text, adapters and keys and values stay here."""
    from tenant_sdk.gateway.serving import PATIENCE, GatewayOptions, check_installed
    from tenant_sdk.gateway.serving import serve as run

    check_installed()
    config = connection.session()
    if "patience" not in connection.arguments:
        config = dataclasses.replace(config, patience=PATIENCE)
    chosen = GatewayOptions(
        host=host,
        port=port,
        keys=_keys(api_key_env),
        name=name or "",
        adapters=adapters and adapters.resolve(),
        allow_other_base=allow_other_base,
        context=context,
        dtype=dtype,
        max_sequences=max_sequences,
        max_waiting=max_waiting,
        kv_memory_gib=kv_memory_gib,
        max_adapters=max_adapters,
        max_rank=max_rank,
        structured_outputs=not no_constraints,
        prefix_cache=prefix_cache,
        speculate=speculate or "",
        draft_tokens=draft_tokens,
        chat_template=chat_template,
        ready_file=ready_file,
    )
    _say("loading torch, transformers and vLLM, which takes a while")
    with imports.at_once():
        import torch  # noqa: F401
        import transformers  # noqa: F401
    run(chosen, config, _say)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _keys(variable: str | None) -> tuple[str, ...]:
    if variable is None:
        return ()
    keys = tuple(os.environ.get(variable, "").split())
    if not keys:
        raise ConfigurationError(f"the environment variable {variable} is not set: put an API key there")
    return keys
