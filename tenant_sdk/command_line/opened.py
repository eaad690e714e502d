"""The model of a command: a session, and in it the model with the adapter that the user chose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from tenant_sdk.command_line.output import STATUS, loading, say_connecting, say_kept, shown
from tenant_sdk.session.options import SessionConfig
from tenant_sdk.tuning.options import AdapterChoice, ModelOptions

if TYPE_CHECKING:
    from tenant_sdk.session.session import Session


@contextmanager
def opened_model(
    choice: AdapterChoice, local: ModelOptions, config: SessionConfig
) -> Iterator[tuple[Session, Any, Any]]:
    """Open a session and load the model; yields both, and the tokenizer.

    Raises:
        ConfigurationError: the adapter's folder is none, which is told before anything is loaded; or see
            ``load`` and ``load_adapter``.
        SymbiosisError: the session cannot be opened.
    """
    from tenant_sdk.storage import check_adapter_folder

    if choice.adapter is not None:
        check_adapter_folder(choice.adapter)
    with loading():
        from tenant_sdk.session.opening import open_session
        from tenant_sdk.tuning.folders import load_adapter
        from tenant_sdk.tuning.local_model import load, tokenizer_ignored_message, tokenizer_in

    say_connecting(config)
    if local.tokenizer is None and choice.adapter is not None and tokenizer_in(choice.adapter):
        STATUS.print(escape(shown(tokenizer_ignored_message(choice.adapter))))
    with open_session(config) as session:
        say_kept(session)
        model, tokenizer = load(session, local.tokenizer, local.model, bars=STATUS.is_terminal)
        if choice.adapter is not None:
            model = load_adapter(model, choice.adapter, session, allow_other_base=choice.allow_other_base)
        yield session, model, tokenizer
