"""Imports of libraries that take seconds."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Import within the block without looking for garbage, of which torch and transformers leave none.

    Python would look through their million objects again and again, for a sixth of the time that the
    imports take. Nor will it look through them later. Without effect where torch is there already: then
    others have objects of their own.
    """
    if "torch" in sys.modules:
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()
