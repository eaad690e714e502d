"""In the gateway's environment: a client that hangs up within a step owes what its constraint took."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

from tenant_sdk.gateway.client_fairness import TimeBudget
from tenant_sdk.gateway.scheduler import Base, Scheduler
from tenant_sdk.gateway.status import SequenceErrors, request_name
from tenant_sdk.gateway.structured import LimitedGrammar

NAME = "cmpl-" + request_name("1", "ab" * 16)


def owing(*, hangs_up: bool) -> list[str]:
    """Clients that owe time after one step, in which a constraint took two seconds."""
    scheduler: Any = object.__new__(Scheduler)
    grammar = object.__new__(LimitedGrammar)
    grammar.seconds, grammar.ended, grammar.text = 2.0, "", 0
    request = SimpleNamespace(request_id=NAME, structured_output_request=SimpleNamespace(grammar=grammar))
    scheduler.requests = {NAME: request}
    scheduler._grammars = scheduler._grammars_of([NAME])
    scheduler.kv_cache_manager = SimpleNamespace(evict_blocks=lambda _: None)
    scheduler._time_budget, scheduler._written = TimeBudget(0.2, 0.01), {}
    scheduler._ended, scheduler._folder = SequenceErrors(), Path(mkdtemp())
    scheduler.finish_requests = lambda *_: []
    if hangs_up:  # as the engine's core does directly before the step's end
        scheduler.requests.clear()
    step = SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={NAME: 1})
    scheduler.update_from_output(step, None)
    return sorted(scheduler._time_budget.overdrawn())


Base.update_from_output = lambda *_: {}
print(json.dumps([owing(hangs_up=hangs_up) for hangs_up in (False, True)]))
