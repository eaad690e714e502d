"""Tries constraints in a process beside the server, one at a time."""

from __future__ import annotations

from pathlib import Path

import msgspec

from tenant_sdk.gateway.constraints import Constraint
from tenant_sdk.gateway.helper_process import HelperProcess

REMEMBERED = 8  # constraints of a client


class ConstraintChecker(HelperProcess):
    """See ``tenant_sdk.gateway.grammars``.

    Args:
        tokenizer: file of the tokenizer, as Hugging Face's tokenizers write it.
        tokens: of the model.
        end: the token that ends a text.
    """

    def __init__(self, tokenizer: Path, tokens: int, end: int) -> None:
        super().__init__("tenant_sdk.gateway.grammars", str(tokenizer), str(tokens), str(end))
        # Of each client, the last used last; what has passed once need not pass another time.
        self._passed: dict[str, dict[Constraint, None]] = {}

    async def refusal(self, client: str, constraint: Constraint) -> str:
        """Why a constraint is refused, or an empty text. A client that leaves has this cancelled."""
        passed = self._passed.setdefault(client, {})
        if constraint not in passed:
            reason = await self.ask(client, msgspec.json.encode(constraint))
        else:
            reason = b""
        if reason is None:
            return "it could not be tried; try again"
        if not reason:
            passed.pop(constraint, None)
            passed[constraint] = None
            if len(passed) > REMEMBERED:
                del passed[next(iter(passed))]
        return reason.decode()
