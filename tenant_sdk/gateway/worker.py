"""vLLM's worker, for which a lost provider is the failure of a step and not of the engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.outputs import ModelRunnerOutput

from shared.errors import SymbiosisError
from shared.wire.header import RequestClass
from tenant_sdk.gateway.linear import asking_as

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Base
else:
    from vllm.v1.worker.gpu_worker import Worker as Base

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

log = logging.getLogger(__name__)


@dataclass
class FailedStep(ModelRunnerOutput):  # type: ignore[misc]
    """The output of a step that came to nothing.

    Attributes:
        error: class and message of what the session raised.
    """

    error: str = ""


class Worker(Base):  # type: ignore[misc]
    """Runs the tenant's part of the model."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """See vLLM; a step whose products fail gives a ``FailedStep``."""
        try:
            with asking_as(self._urgency(scheduler_output)):
                return super().execute_model(scheduler_output)
        except SymbiosisError as error:
            log.warning("a step failed: %s", error)
            requests = list(scheduler_output.num_scheduled_tokens)
            return FailedStep(
                req_ids=requests,
                req_id_to_index={request: at for at, request in enumerate(requests)},
                sampled_token_ids=[[] for _ in requests],
                error=f"{type(error).__name__}: {error}",
            )

    @staticmethod
    def _urgency(scheduled: SchedulerOutput) -> RequestClass:
        """Of a step: somebody waits for a next token, or for first tokens alone."""
        new = {request.req_id for request in scheduled.scheduled_new_reqs}
        return RequestClass.DECODE if scheduled.num_scheduled_tokens.keys() - new else RequestClass.PREFILL
