"""vLLM's llguidance, with limits on a grammar's resources: to compile, and in one step.

What all grammars of a client take while sequences go on, ``scheduler`` bounds.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from vllm.v1.structured_output.backend_guidance import GuidanceBackend, GuidanceGrammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions

from tenant_sdk.gateway.client_locks import FairThreadPool, current_client
from tenant_sdk.gateway.constraints import Constraint
from tenant_sdk.gateway.grammars import compiled
from tenant_sdk.gateway.reservations import eviction_victim

MAX_COMPILED = 64  # constraints that are kept, of all clients; each has some MiB of its lexer's states
MAX_COMPILED_OF_A_CLIENT = 8
ANSWER_SECONDS = 2.0  # of a processor, for all of an answer
SHARED = 16  # sequences that have one compiled; they share the states of its lexer, which have a limit
_asking: ContextVar[str] = ContextVar("asking", default="")  # the client whose constraint is compiled
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
        text: bytes of its text, of each of which the matcher keeps what it found.
        fresh: nothing was computed for it yet.
    """

    ended, seconds, _taken, text, fresh = "", 0.0, 0.0, 0, True

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sizes = array("L")  # of its tokens, in bytes

    def fill_bitmask(self, bitmask: torch.Tensor, idx: int) -> None:
        """See vLLM."""
        began, self.fresh = time.thread_time(), False  # not what others took meanwhile
        super().fill_bitmask(bitmask, idx)
        self._count(began)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See vLLM; False ends the sequence with an error."""
        if self.ended:
            return False
        began = time.thread_time()
        accepted: bool = super().accept_tokens(request_id, tokens)
        self._count(began)
        sizes = array("L", (len(self.ll_tokenizer.decode_bytes([each])) for each in tokens))
        self._sizes += sizes
        self.text += sum(sizes)
        return accepted and not self.ended

    def rollback(self, num_tokens: int) -> None:
        """See vLLM: guesses that were wrong."""
        super().rollback(num_tokens)
        kept = max(0, len(self._sizes) - num_tokens)
        self.text -= sum(self._sizes[kept:])
        del self._sizes[kept:]

    def _count(self, began: float) -> None:
        seconds = time.thread_time() - began
        self.seconds += seconds
        self._taken += seconds
        if self._taken > ANSWER_SECONDS and not self.ended:
            self.ended = "computing what the constraint of this answer allows takes too long"

    def check_error(self) -> None:
        """Remember it; vLLM would write it down, and end the text as if it were complete."""
        if self.ll_matcher.is_error() and not self.ended:
            self.ended = (
                "the text cannot go on: what the constraint allows became too large to compute, or other "
                "fields of the request forbid all of it"
            )


class LimitedGuidance(GuidanceBackend):  # type: ignore[misc]
    """See vLLM's ``StructuredOutputBackend``; some sequences of a client share a compiled constraint.

    One request may be for many, whose compiling would keep constraints of other clients waiting. What one
    client's texts make of a lexer's states is no matter of the others'.
    """

    def __post_init__(self) -> None:
        """See vLLM."""
        super().__post_init__()
        self._kept: OrderedDict[tuple[str, Constraint], tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: Any = None
    ) -> LimitedGrammar:
        """See vLLM; it was tried before, in a process of its own.

        Raises:
            ValueError: it cannot be compiled after all.
        """
        matcher = self._matcher(_asking.get(), Constraint(_KINDS[request_type], grammar_spec))
        return LimitedGrammar(ll_matcher=matcher, ll_tokenizer=self.ll_tokenizer, vocab_size=self.vocab_size)

    def _matcher(self, client: str, constraint: Constraint) -> Any:
        """One for a sequence of a client."""
        with self._lock:
            matcher, uses = self._kept.pop((client, constraint), (None, 0))
        if matcher is None or uses >= SHARED or _is_used_up(matcher):
            matcher, uses = compiled(self.ll_tokenizer, constraint), 0
        with self._lock:
            self._kept[client, constraint] = matcher, uses + 1
            of_client = [each for each in self._kept if each[0] == client]
            if len(of_client) > MAX_COMPILED_OF_A_CLIENT:
                del self._kept[of_client[0]]
            elif len(self._kept) > MAX_COMPILED:
                del self._kept[eviction_victim(self._kept)]
        return matcher.deep_copy()


def _is_used_up(matcher: Any) -> bool:
    """Whether earlier sequences left no states for another one."""
    probe = matcher.deep_copy()
    probe.compute_logit_bias()
    return bool(probe.is_error())


def compile_by_client(manager: Any, client_of: Callable[[str], str]) -> None:
    """Have vLLM's manager compile constraints of one client after another, and none whose request has ended.

    Its own thread would compile in the order of arrival, also for clients that have hung up.
    """
    create, begin = manager._create_grammar, manager.grammar_init
    manager.executor = FairThreadPool(1)

    def created(request: Any) -> Any:
        if request.is_finished():
            return None  # nobody reads it
        _asking.set(client_of(request.request_id))
        return create(request)

    def begun(request: Any) -> None:
        current_client.set(client_of(request.request_id))  # for ``FairThreadPool``
        begin(request)

    manager._create_grammar, manager.grammar_init = created, begun
