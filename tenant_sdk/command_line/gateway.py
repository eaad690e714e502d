"""``symbiosis-tenant serve``."""

from __future__ import annotations

import dataclasses

import typer

from shared import imports
from tenant_sdk.command_line import options
from tenant_sdk.gateway.options import GatewayOptions


@options.command_line.takes
def serve(gateway: GatewayOptions, connection: options.SessionOptions) -> None:
    """Serve the model and adapters with OpenAI's interface. Text, adapters, keys and values stay here."""
    from tenant_sdk.gateway.serving import PATIENCE, check_installed
    from tenant_sdk.gateway.serving import serve as run

    check_installed()
    config = connection.session()
    if "patience" not in connection.arguments:
        config = dataclasses.replace(config, patience=PATIENCE)
    if gateway.adapters is not None:
        gateway = dataclasses.replace(gateway, adapters=gateway.adapters.resolve())
    _say("loading torch, transformers and vLLM, which takes a while")
    with imports.at_once():
        import torch  # noqa: F401
        import transformers  # noqa: F401
    run(gateway, config, _say)


def _say(line: str) -> None:
    typer.echo(line, err=True)
