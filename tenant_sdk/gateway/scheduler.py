"""vLLM's scheduler, which ends the requests that a step failed for, and goes on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler as Base
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_guidance import GuidanceBackend

from shared.latency import Line
from tenant_sdk.gateway.doorkeeper import Allowance
from tenant_sdk.gateway.fairness import Seen, Wanted, in_turn, resting, rows_of_step
from tenant_sdk.gateway.grammars import ENGINE_STACK
from tenant_sdk.gateway.status import Ended, client_of
from tenant_sdk.gateway.structured import LimitedGrammar, LimitedGuidance
from tenant_sdk.gateway.worker import FailedStep

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


GUESSED_LINE = 0.02, 0.0005  # seconds of a step, and more for each row; what is seen corrects them
# Of a processor, for the constraints of one client's sequences. The first masks take longer than the others.
GRACE_SECONDS, STEP_SECONDS = 0.2, 0.01


class Scheduler(Base):  # type: ignore[misc]
    """See vLLM's."""

    running: list[Request]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        threading.stack_size(ENGINE_STACK)  # of threads that compile constraints, which begin later
        super().__init__(*arguments, **options)
        self._line, self._seen = Line(*GUESSED_LINE), Seen()
        self._most_rows: int = self.scheduler_config.max_num_batched_tokens
        self._allowance = Allowance(GRACE_SECONDS, STEP_SECONDS)
        self._folder, self._ended = Path(self.vllm_config.model_config.model), Ended()
        manager = self.structured_output_manager
        if GuidanceBackend.is_tokenizer_supported(manager.tokenizer):  # else the server refuses constraints
            vocabulary = self.vllm_config.model_config.get_vocab_size()
            manager.backend = LimitedGuidance(
                self.vllm_config, tokenizer=manager.tokenizer, vocab_size=vocabulary
            )

    def schedule(self, *arguments: Any, **options: Any) -> SchedulerOutput:
        """See vLLM; clients take turns. Blocks that a step writes are remembered, since clients hang up."""
        # A sequence that is written needs one row; prompts get what is left.
        self.running.sort(key=_reads)
        several = self._pace()
        waiting = {each.request_id: each for each in sorted(self.waiting, key=lambda each: each.arrival_time)}
        begin = in_turn(
            [_wanted(each, _reads(each)) for each in self.running],
            [_wanted(each) for each in waiting.values()],
            self.max_num_running_reqs,
            self.lora_config.max_loras if self.lora_config else 0,
            self.vllm_config.additional_config["clients"],
            several=several,
        )
        self.waiting.clear()
        self.waiting.extend(waiting.pop(name) for name in begin)
        rest = self._resting() if several else []
        self.running = [each for each in self.running if each not in rest]
        scheduled = super().schedule(*arguments, **options)
        self.running = rest + self.running  # so that they come first in the next step
        self.waiting.extend(waiting.values())
        self._began = time.monotonic()
        cached = self.cache_config.enable_prefix_caching  # else nobody finds them
        self._written = {
            request: [block for blocks in self.kv_cache_manager.get_block_ids(request) for block in blocks]
            for request in (scheduled.num_scheduled_tokens if cached else ())
        }
        return scheduled

    def _resting(self) -> list[Request]:
        sorting = [(each.request_id, client_of(each.request_id)) for each in self.running if _sorts(each)]
        names = resting(sorting, self.vllm_config.model_config.get_vocab_size())
        return [each for each in self.running if each.request_id in names]

    def _pace(self) -> bool:
        """Have prompts of one client leave a part of each step to the others; whether there are any."""
        there = {client_of(each.request_id) for each in (*self.running, *self.waiting)}
        several = self._seen.count(there, time.monotonic()) > 1
        written = sum(not _reads(each) for each in self.running) * (1 + self.num_spec_tokens)
        readers = {client_of(each.request_id) for each in self.running if _reads(each)}
        readers |= {client_of(each.request_id) for each in self.waiting}
        rows, beside = self._most_rows, len(there) > 1
        if several:
            rows = rows_of_step(self._line, written, self._most_rows, beside=beside)
        self.max_num_scheduled_tokens = rows
        # What has begun comes first in vLLM, and would take all rows.
        self.scheduler_config.long_prefill_token_threshold = (
            max(1, (rows - written) // len(readers)) if len(readers) > 1 else 0
        )
        return several

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See vLLM; what failed ends with an error, and nothing of it stays in the cache of prefixes."""
        rows = scheduler_output.total_num_scheduled_tokens
        if rows and not isinstance(model_runner_output, FailedStep):
            # Prompts are in every step as long as a client sends them: what they add is theirs.
            prompts = rows > len(scheduler_output.num_scheduled_tokens) * (1 + self.num_spec_tokens)
            self._line.observe(rows, time.monotonic() - self._began, fixed=not prompts)
        scheduled = scheduler_output.num_scheduled_tokens.keys()
        lost: dict[str, str] = getattr(model_runner_output, "lost", {})
        failed = scheduled if isinstance(model_runner_output, FailedStep) else lost.keys()
        # They are in the cache since they were scheduled, and hold nothing.
        self.kv_cache_manager.evict_blocks(
            {block for each in failed for block in self._written.get(each, ())}
        )
        grammars = {each: self._grammar(each) for each in scheduled & self.requests.keys()}
        self._allowance.step()
        for name, grammar in grammars.items():
            if grammar is not None:
                if not self._allowance.spend(client_of(name), grammar.seconds) and not grammar.ended:
                    grammar.ended = "computing what the constraints of your key allow takes too long"
                grammar.seconds = 0.0
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        spent = {name: each.ended for name, each in grammars.items() if each is not None and each.ended}
        if lost or spent:
            self._ended.add(self._folder, lost | spent)  # before the clients are told
        for request in self.finish_requests(failed & self.requests.keys(), RequestStatus.FINISHED_ERROR):
            ended = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(ended)
        return outputs

    def _grammar(self, request: str) -> LimitedGrammar | None:
        constrained = self.requests[request].structured_output_request
        grammar = constrained.grammar if constrained is not None else None
        return grammar if isinstance(grammar, LimitedGrammar) else None


def _reads(request: Request) -> bool:
    """Whether not all of its prompt is read."""
    return bool(request.num_computed_tokens < request.num_prompt_tokens)


def _sorts(request: Request) -> bool:
    """Whether all tokens are looked at, and not only the likeliest is looked for."""
    asked = request.sampling_params
    penalties = (asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty)
    sorts = asked.top_p < 1 or asked.top_k > 0 or penalties != (0, 0, 1) or asked.logprobs is not None
    return not _reads(request) and bool(sorts)


def _wanted(request: Request, reading: bool = False) -> Wanted:
    adapter = request.lora_request.lora_int_id if request.lora_request else 0
    return Wanted(request.request_id, client_of(request.request_id), adapter, reading)
