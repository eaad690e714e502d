"""vLLM's llguidance, with limits on what a grammar may take: to compile, and in one step.

What all grammars of a client take while sequences go on, ``scheduler`` bounds.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from tenant_sdk.gateway.constraints import Constraint
from tenant_sdk.gateway.grammars import compiled

REMEMBERED = 16  # compiled constraints; more than ``trials`` lets pass without a trial
_KINDS = {
    StructuredOutputOptions.JSON: "json",
    StructuredOutputOptions.REGEX: "regex",
    StructuredOutputOptions.CHOICE: "choice",
    StructuredOutputOptions.GRAMMAR: "grammar",
}


class LimitedGrammar(GuidanceGrammar):  # type: ignore[misc]
    """Of one sequence, which ends when it takes too much.

    Attributes:
        ended: why it does not go on; or empty.
        seconds: of a processor that it took and that are not counted yet.
    """

    ended, seconds = "", 0.0

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """See vLLM."""
        began = time.thread_time()  # not what others took meanwhile
        super().fill_bitmask(bitmask, idx)
        self.seconds += time.thread_time() - began

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See vLLM; False ends the sequence with an error."""
        if self.ended:
            return False
        began = time.thread_time()
        accepted: bool = super().accept_tokens(request_id, tokens)
        self.seconds += time.thread_time() - began
        return accepted and not self.ended

    def check_error(self) -> None:
        """Remember it; vLLM would write it down, and end the text as if it were complete."""
        if self.ll_matcher.is_error() and not self.ended:
            self.ended = (
                "the text cannot go on: what the constraint allows became too large to compute, or other "
                "fields of the request forbid all of it"
            )


class LimitedGuidance(GuidanceBackend):  # type: ignore[misc]
    """See vLLM's ``StructuredOutputBackend``; sequences with the same constraint have it compiled once.

    One request may be for many, whose compiling would keep constraints of other clients waiting.
    """

    def __post_init__(self) -> None:
        """See vLLM."""
        super().__post_init__()
        self._compiled = functools.lru_cache(REMEMBERED)(functools.partial(compiled, self.ll_tokenizer))

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: Any = None
    ) -> LimitedGrammar:
        """See vLLM; it was tried before, in a process of its own.

        Raises:
            ValueError: it cannot be compiled after all.
        """
        matcher = self._compiled(Constraint(_KINDS[request_type], grammar_spec)).deep_copy()
        return LimitedGrammar(ll_matcher=matcher, ll_tokenizer=self.ll_tokenizer, vocab_size=self.vocab_size)
