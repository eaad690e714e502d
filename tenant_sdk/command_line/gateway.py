"""``symbiosis-tenant serve``."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect

import typer

from shared import imports
from shared.command_line import CommandLine
from tenant_sdk.command_line import options
from tenant_sdk.gateway.options import DECIDED, DEFAULT_PATIENCE, GatewayOptions
from tenant_sdk.session.options import SessionConfig


class _Session(options.SessionOptions):
    """Its default of ``patience`` is shorter, and two options are the gateway's own affair."""

    @staticmethod
    def parameters(command_line: CommandLine) -> list[inspect.Parameter]:
        """See SessionOptions."""
        shown = command_line.parameters(SessionConfig, defaults=False, own={"patience": DEFAULT_PATIENCE})
        return [each for each in shown if each.name not in DECIDED]


@options.command_line.takes
def serve(gateway: GatewayOptions, connection: _Session) -> None:
    """Serve the model and adapters with OpenAI's interface.

    Text, adapters and KV cache stay on this machine.
    """
    from tenant_sdk.gateway.serving import check_installed
    from tenant_sdk.gateway.serving import serve as run

    check_installed()
    config = connection.session()
    if "patience" not in connection.arguments:
        config = dataclasses.replace(config, patience=DEFAULT_PATIENCE)
    if gateway.adapters is not None:
        gateway = dataclasses.replace(gateway, adapters=gateway.adapters.resolve())
    _notify("loading torch, transformers and vLLM, which takes a while")
    with imports.without_gc():
        import torch  # noqa: F401
        import transformers  # noqa: F401
    run(gateway, config, _notify)


def _notify(line: str) -> None:
    """Tell the operator; a gateway goes on if nobody reads it any more, or the disk with the log is full."""
    with contextlib.suppress(OSError, ValueError):  # the latter: it is closed
        typer.echo(line, err=True)
