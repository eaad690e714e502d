"""How urgent a request is: declared by whoever knows, read where the request is sent.

In between lie the privacy modes, and, for effects, threads of a pool; neither has a say in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shared.wire.header import RequestClass

_declared = ContextVar("symbiosis_request_class", default=RequestClass.UNDECLARED)


@contextmanager
def nobody_waits() -> Iterator[None]:
    """What is asked for within is training, or fetched ahead: executors serve waiting people first."""
    before = _declared.set(RequestClass.FINETUNING)
    try:
        yield
    finally:
        _declared.reset(before)


def declared() -> RequestClass:
    """The class of what is asked for now. Undeclared: executors tell decode from prefill by its rows."""
    return _declared.get()
