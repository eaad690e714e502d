"""vLLM's scheduler, which ends the requests of a step that failed and goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.scheduler import Scheduler as Base
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from tenant_sdk.gateway.worker import FailedStep

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


class Scheduler(Base):  # type: ignore[misc]
    """See vLLM's."""

    def schedule(self, *arguments: Any, **options: Any) -> SchedulerOutput:
        """See vLLM; whose blocks a step writes is remembered, as who hangs up is forgotten during it."""
        scheduled = super().schedule(*arguments, **options)
        cached = self.cache_config.enable_prefix_caching  # else nobody finds them
        self._written = {
            block
            for request in (scheduled.num_scheduled_tokens if cached else ())
            for blocks in self.kv_cache_manager.get_block_ids(request)
            for block in blocks
        }
        return scheduled

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """See vLLM; requests of a ``FailedStep`` end with an error, and nothing of it stays in the cache."""
        if not isinstance(model_runner_output, FailedStep):
            outputs: dict[int, EngineCoreOutputs] = super().update_from_output(
                scheduler_output, model_runner_output
            )
            return outputs
        under_way = scheduler_output.num_scheduled_tokens.keys() & self.requests.keys()
        # They are in the cache of prefixes since they were scheduled, and hold nothing.
        self.kv_cache_manager.evict_blocks(self._written)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request in self.finish_requests(under_way, RequestStatus.FINISHED_ERROR):
            ended = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
            )
            outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(ended)
        return outputs
