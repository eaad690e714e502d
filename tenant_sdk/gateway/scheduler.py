"""vLLM's scheduler, which ends the requests that a step failed for, and goes on."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config
from vllm.v1.core.sched.scheduler import Scheduler as Base
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_guidance import GuidanceBackend

from shared.latency import LinearLatency
from shared.log_rate_limit import LogRateLimiter
from tenant_sdk.gateway.client_fairness import (
    AttentionTimeDebt,
    Memory,
    RecentClients,
    SequenceInfo,
    TimeBudget,
    next_admissions,
    next_preemptions,
    paused_constraints,
    paused_sampling,
    rows_per_client,
    second_prompts,
    too_long,
)
from tenant_sdk.gateway.grammars import ENGINE_STACK
from tenant_sdk.gateway.status import REMIND_SECONDS, SequenceErrors, client_of
from tenant_sdk.gateway.step_latency import StepLatency
from tenant_sdk.gateway.structured import LimitedGrammar, LimitedGuidance, compile_by_client
from tenant_sdk.gateway.worker import FailedStep

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


# Seconds of a step, for each row, and for each token that a row attends to; what is seen corrects them.
GUESSED_LINE, GUESSED_TOKEN = (0.02, 0.0005), 1e-6
# Of a processor, for the constraints of one client's sequences. The first masks take longer than the others.
GRACE_SECONDS, STEP_SECONDS = 0.2, 0.01
# Bytes of texts with a constraint, of one and of all of a client's. A matcher keeps up to half a KiB for each
# of them, also while its sequence has given up its keys and values.
TEXT_BYTES, TEXTS_BYTES = 256 << 10, 1 << 20


class Scheduler(Base):  # type: ignore[misc]
    """See vLLM's."""

    running: list[Request]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        threading.stack_size(ENGINE_STACK)  # of threads that compile constraints, which begin later
        super().__init__(*arguments, **options)
        self._latency = StepLatency(LinearLatency(*GUESSED_LINE), GUESSED_TOKEN)
        self._recent_clients = RecentClients()
        self._attention_debt, self._attended = AttentionTimeDebt(), 0
        self._most_rows: int = self.scheduler_config.max_num_batched_tokens
        self._time_budget = TimeBudget(GRACE_SECONDS, STEP_SECONDS)
        self._folder, self._ended = Path(self.vllm_config.model_config.model), SequenceErrors()
        self._unwritten = LogRateLimiter(REMIND_SECONDS)
        manager = self.structured_output_manager
        if GuidanceBackend.is_tokenizer_supported(manager.tokenizer):  # else the server refuses constraints
            vocabulary = self.vllm_config.model_config.get_vocab_size()
            manager.backend = LimitedGuidance(
                self.vllm_config, tokenizer=manager.tokenizer, vocab_size=vocabulary
            )
            compile_by_client(manager, client_of)
        self._warn_of_little_memory()

    def schedule(self, *arguments: Any, **options: Any) -> SchedulerOutput:
        """See vLLM; clients share the step. What it does is remembered, since clients hang up."""
        clients = Counter({client_of(each.request_id): 0 for each in (*self.running, *self.waiting)})
        contended = self._recent_clients.count(clients, time.monotonic()) > 1
        constrained = self._paused_constraints() if contended else set[str]()
        if contended:
            self._preempt_over_share(constrained)
        # A decoding sequence needs one row; prompts get the others.
        self.running.sort(key=lambda each: (_prefilling(each), _arrived(each) if _prefilling(each) else 0.0))
        waiting = {each.request_id: each for each in sorted(self.waiting, key=_arrived)}
        running = [self._sequence_info(each) for each in self.running]
        self.max_num_scheduled_tokens, self._for_prompts = self._most_rows, 0
        paused = self._share_step(running, clients) | constrained if contended else set[str]()
        admitted = self._admissions(
            running,
            [self._sequence_info(each) for name, each in waiting.items() if name not in constrained],
            contended=contended,
            memory=self._memory(),
        )
        # Running sequences come first in vLLM, and would take all rows.
        self.scheduler_config.long_prefill_token_threshold = (
            rows_per_client(self._for_prompts, running, map(client_of, admitted)) if contended else 0
        )
        self.waiting.clear()
        self.waiting.extend(waiting.pop(name) for name in admitted)
        paused_requests = [each for each in self.running if each.request_id in paused]
        self.running = [each for each in self.running if each.request_id not in paused]
        scheduled = super().schedule(*arguments, **options)
        self.running = paused_requests + self.running  # so that they come first in the next step
        self.waiting.extend(waiting.values())
        self._attended = sum(
            each.tokens
            for each in running
            if not each.prefilling and each.name in scheduled.num_scheduled_tokens
        )
        self._grammars = self._grammars_of(scheduled.num_scheduled_tokens)
        self._began = time.monotonic()
        cached = self.cache_config.enable_prefix_caching  # else nobody finds them
        self._written = {
            request: [block for blocks in self.kv_cache_manager.get_block_ids(request) for block in blocks]
            for request in (scheduled.num_scheduled_tokens if cached else ())
        }
        return scheduled

    def _admissions(
        self, running: list[SequenceInfo], waiting: list[SequenceInfo], **options: Any
    ) -> list[str]:
        max_adapters = self.lora_config.max_loras if self.lora_config else 0
        clients = self.vllm_config.additional_config["clients"]
        return next_admissions(running, waiting, self.max_num_running_reqs, max_adapters, clients, **options)

    def _paused_constraints(self) -> set[str]:
        requests = (*self.running, *self.waiting)
        sequences = [each for each in requests if each.structured_output_request is not None]
        grammars = [self._grammar(each.request_id) for each in sequences]
        return paused_constraints(
            [
                (each.request_id, client_of(each.request_id), grammar is None or grammar.fresh)
                for each, grammar in zip(sequences, grammars, strict=True)
            ],
            self._time_budget.overdrawn(),
        )

    def _memory(self) -> Memory:
        pool = self.kv_cache_manager.block_pool
        return Memory(pool.num_gpu_blocks - 1, pool.get_num_free_blocks())  # one holds nothing

    def _warn_of_little_memory(self) -> None:
        config = self.kv_cache_config
        longest = config.num_blocks / get_max_concurrency_for_kv_cache_config(self.vllm_config, config)
        fitting, clients = self._memory().blocks / longest, self.vllm_config.additional_config["clients"]
        if fitting < clients > 1:
            log.warning(
                "the memory for keys and values holds %.1f sequences of the whole context, and there are %d "
                "keys: clients with long sequences may wait for others. Provide more memory, or a shorter "
                "context",
                fitting,
                clients,
            )

    def _preempt_over_share(self, constrained: set[str]) -> None:
        """Take memory from clients that have more than their share, if others wait for it."""
        running, waiting = (
            [self._sequence_info(each) for each in sorted(several, key=_arrived)]
            for several in (self.running, self.waiting)
        )
        able = [each for each in waiting if each.name not in constrained]
        admissible = self._admissions(running, able)
        for name in next_preemptions(running, waiting, self._memory(), admissible):
            request = self.requests[name]
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())

    def _share_step(self, running: list[SequenceInfo], attended: Counter[str]) -> set[str]:
        """Have each client leave a part of each step to the others; names of sequences that wait."""
        needs_sorting = [
            (each.name, each.client)
            for each in running
            if not each.prefilling and _sorts(self.requests[each.name])
        ]
        vocabulary = self.vllm_config.model_config.get_vocab_size()
        paused = paused_sampling(needs_sorting, vocabulary) | second_prompts(running)
        runnable = [each for each in running if each.name not in paused]
        for each in runnable:
            attended[each.client] += each.tokens
        busy, rows = len(attended) > 1, 1 + self.num_spec_tokens
        least_attending = min(attended, key=attended.__getitem__) if busy else None
        count = rows * sum(not each.prefilling for each in runnable)
        least = attended[least_attending] if least_attending is not None else 0
        max_seconds = self._latency.max_seconds(count, least, busy=busy)
        spare = max_seconds - self._latency.seconds(count, least)
        paused |= self._attention_debt.paused(
            runnable, self._latency, spare, clients=max(1, len(attended)), least_attending=least_attending
        )
        decoding = [each for each in runnable if not each.prefilling and each.name not in paused]
        # A client whose prompt is read pays with its rows for what else it attends to.
        clients = {each.client for each in running if each.prefilling}
        count, tokens = len(decoding) * rows, sum(each.tokens for each in decoding if each.client in clients)
        self.max_num_scheduled_tokens = self._latency.rows(count, tokens, max_seconds, self._most_rows)
        self._for_prompts = self.max_num_scheduled_tokens - count
        return paused

    def _sequence_info(self, request: Request) -> SequenceInfo:
        name, computed = request.request_id, request.num_computed_tokens
        tokens = min(request.num_tokens + 1 + self.num_spec_tokens, self.max_model_len)
        blocks = blocks_needed = 0
        for group in self.kv_cache_manager.coordinator.single_type_managers:
            allocated = sum(not block.is_null for block in group.req_to_blocks.get(name, ()))
            # A window's layers give up what has left it, and so need no more than it and a step.
            left = max(0, group.get_num_skipped_tokens(computed)) // group.block_size
            most = group.max_admission_blocks_per_request
            required = min(-(-tokens // group.block_size) - left, math.inf if most is None else most)
            blocks, blocks_needed = blocks + allocated, blocks_needed + max(0, int(required) - allocated)
        return SequenceInfo(
            name,
            client_of(name),
            request.lora_request.lora_int_id if request.lora_request else 0,
            blocks > 0 and _prefilling(request),
            computed,
            blocks,
            blocks_needed,
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See vLLM; what failed ends with an error, and nothing of it stays in the cache of prefixes."""
        rows = scheduler_output.total_num_scheduled_tokens
        if rows and not isinstance(model_runner_output, FailedStep):
            prompts = rows > len(scheduler_output.num_scheduled_tokens) * (1 + self.num_spec_tokens)
            self._latency.observe(rows, self._attended, time.monotonic() - self._began, prompts=prompts)
        scheduled = scheduler_output.num_scheduled_tokens.keys()
        non_finite: dict[str, str] = getattr(model_runner_output, "non_finite", {})
        failed = scheduled if isinstance(model_runner_output, FailedStep) else non_finite.keys()
        # They are in the cache since they were scheduled, and hold nothing.
        self.kv_cache_manager.evict_blocks(
            {block for each in failed for block in self._written.get(each, ())}
        )
        self._time_budget.step()
        for name, grammar in self._grammars.items():
            if not self._time_budget.spend(client_of(name), grammar.seconds) and not grammar.ended:
                grammar.ended = "computing what the constraints of your key allow takes too long"
            grammar.seconds = 0.0
        waited_for = self._grammars.keys() & self.requests.keys()  # by clients that have not hung up
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
            scheduler_output, model_runner_output
        )
        spent = {name: ended for name in waited_for if (ended := self._grammars[name].ended)}
        kept = self._grammars_of(self.requests)
        texts = {name: (client_of(name), each.text) for name, each in kept.items()}
        long = too_long(texts, TEXT_BYTES, TEXTS_BYTES)
        spent |= dict.fromkeys(
            long, "texts with a constraint, of this answer or of your key, became too long"
        )
        if non_finite or spent:
            why = self._ended.add(self._folder, non_finite | spent)  # before the clients get errors
            if why and self._unwritten.due(time.monotonic()):
                log.warning(
                    "errors of clients do not name why sequences ended: %s%s", why, self._unwritten.more()
                )
        ends = (failed | long) & self.requests.keys()
        for request in self.finish_requests(ends, RequestStatus.FINISHED_ERROR):
            ended = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(ended)
        return outputs

    def _grammars_of(self, requests: Iterable[str]) -> dict[str, LimitedGrammar]:
        """Returns the grammars of those requests that have one."""
        return {name: found for name in requests if (found := self._grammar(name)) is not None}

    def _grammar(self, request: str) -> LimitedGrammar | None:
        constrained = self.requests[request].structured_output_request
        grammar = constrained.grammar if constrained is not None else None
        return grammar if isinstance(grammar, LimitedGrammar) else None


def _prefilling(request: Request) -> bool:
    """Whether not all of its prompt is read, or read again."""
    return bool(request.num_computed_tokens < max(request.num_prompt_tokens, request.num_tokens - 1))


def _sorts(request: Request) -> bool:
    """Whether all tokens are looked at, and not only the likeliest is looked for."""
    sampling = request.sampling_params
    penalties = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty)
    sorts = (
        sampling.top_p < 1 or sampling.top_k > 0 or penalties != (0, 0, 1) or sampling.logprobs is not None
    )
    return not _prefilling(request) and bool(sorts)


def _arrived(request: Request) -> float:
    return float(request.arrival_time)
