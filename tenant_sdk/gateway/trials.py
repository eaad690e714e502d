"""Tries constraints in a process beside the server, one at a time, and clients take turns."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tenant_sdk.gateway.constraints import Constraint
from tenant_sdk.gateway.helper_process import HelperProcess
from tenant_sdk.gateway.turns import Turns

REMEMBERED = 8  # constraints; fewer than the engine has compiled, which takes them without turns otherwise


class ConstraintChecker(HelperProcess):
    """See ``tenant_sdk.gateway.grammars``.

    Args:
        tokenizer: file of the tokenizer, as Hugging Face's tokenizers write it.
        tokens: of the model.
        end: the token that ends a text.
    """

    def __init__(self, tokenizer: Path, tokens: int, end: int) -> None:
        super().__init__("tenant_sdk.gateway.grammars", str(tokenizer), str(tokens), str(end))
        self._turns = Turns()
        self._passed: dict[Constraint, None] = {}  # the last used last; another may pass another time

    async def refusal(self, client: str, given: Constraint) -> str:
        """Why a constraint is refused, or an empty text. A client that leaves has this cancelled."""
        if given not in self._passed:
            async with self._turns.taken(client):
                told = await self.ask(msgspec.json.encode(given))
        else:
            told = b""
        if told is None:
            return "it could not be tried; try again"
        if not told:
            self._passed.pop(given, None)
            self._passed[given] = None
            if len(self._passed) > REMEMBERED:
                del self._passed[next(iter(self._passed))]
        return told.decode()
