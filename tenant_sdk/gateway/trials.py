"""Tries constraints in a process beside the server, one at a time, and clients take turns."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tenant_sdk.gateway.beside import Beside
from tenant_sdk.gateway.constraints import Constraint
from tenant_sdk.gateway.turns import Turns


class Trials(Beside):
    """See ``tenant_sdk.gateway.grammars``.

    Args:
        tokenizer: file of the tokenizer, as Hugging Face's tokenizers write it.
        tokens: of the model.
        end: the token that ends a text.
    """

    def __init__(self, tokenizer: Path, tokens: int, end: int) -> None:
        super().__init__("tenant_sdk.gateway.grammars", str(tokenizer), str(tokens), str(end))
        self._turns = Turns()

    async def refusal(self, client: str, given: Constraint) -> str:
        """Why a constraint is refused, or an empty text. A client that leaves has this cancelled."""
        async with self._turns.taken(client):
            told = await self.ask(msgspec.json.encode(given))
            return "it could not be tried; try again" if told is None else told.decode()
