"""vLLM's worker, for which a lost provider is the failure of a step and not of the engine."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.outputs import ModelRunnerOutput

from shared.errors import SymbiosisError
from shared.options import in_options
from shared.wire.header import RequestClass
from tenant_sdk.cli_options import NAMES
from tenant_sdk.gateway.connection import session_here
from tenant_sdk.gateway.doorkeeper import Failure
from tenant_sdk.gateway.linear import Asking, asking, check_adaptable, probe
from tenant_sdk.gateway.status import Status

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Base
else:
    from vllm.v1.worker.gpu_worker import Worker as Base

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


log = logging.getLogger(__name__)

TELL_SECONDS = 0.5  # between two states of ``Status``
PROBE_SECONDS = 2.0  # between two looks at a provider that was away


@dataclass
class FailedStep(ModelRunnerOutput):  # type: ignore[misc]
    """The output of a step that came to nothing."""


class Worker(Base):  # type: ignore[misc]
    """Runs the tenant's part of the model, and says how it goes."""

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """See vLLM.

        What is wrong with the model or the executor is told in ``Status``, and ends the process.
        """
        if current_platform.is_cpu():
            name = "tenant_sdk.gateway.segmented.SegmentedLora"
            type(current_platform).get_punica_wrapper = classmethod(lambda _: name)
        try:
            super().load_model(*arguments, **options)
            self.vllm_config.quant_config.check_complete()
            if self.vllm_config.lora_config is not None:
                check_adaptable(self.model_runner.model)
        except (SymbiosisError, ValueError) as error:
            ours = isinstance(error, SymbiosisError)
            why = in_options(str(error), NAMES) if ours else f"vLLM does not take this: {error}"
            Status(error=why).write(Path(self.vllm_config.model_config.model))
            raise SystemExit(1) from error  # without pages on how it came there
        if current_platform.is_cpu():
            from tenant_sdk.gateway.segmented import multiply_meanwhile

            multiply_meanwhile(self.model_runner.model)
        config = self.vllm_config
        self._folder, self._status = Path(config.model_config.model), Status()
        self._telling = threading.Lock()
        speculation = config.speculative_config
        self._draft = speculation.num_speculative_tokens if speculation else 0
        threading.Thread(target=self._tell, name="symbiosis-status", daemon=True).start()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """See vLLM; a step whose products fail gives a ``FailedStep``."""
        scheduled, status = scheduler_output.num_scheduled_tokens, self._status
        if not scheduled:  # it says who has ended; nothing is asked for, so it does not show who is back
            return super().execute_model(scheduler_output)
        status.steps += 1
        status.sequences += len(scheduled)
        try:
            with asking(self._asking(scheduler_output)):
                output = super().execute_model(scheduler_output)
            if status.failing:
                self._write(failing=False)
            return output
        except SymbiosisError as error:
            log.warning("a step failed: %s", error)
            status.failed_steps += 1
            status.failure, status.error = Failure.of(error), in_options(str(error), NAMES)
            status.failed_at = time.monotonic()
            self._write(failing=True)  # before the clients are told
            requests = list(scheduled)
            return FailedStep(
                req_ids=requests,
                req_id_to_index={request: at for at, request in enumerate(requests)},
                sampled_token_ids=[[] for _ in requests],
            )

    def _asking(self, scheduled: SchedulerOutput) -> Asking:
        """How a step's products are asked for: as somebody waits, with drafts of constant length."""
        cached = scheduled.scheduled_cached_reqs  # of which some still read their prompt
        going_on = any(
            not cached.is_context_phase(each) and each not in cached.resumed_req_ids
            for each in cached.req_ids
        )
        urgency = RequestClass.DECODE if going_on else RequestClass.PREFILL
        if not self._draft:
            return Asking(urgency, 0)
        # What is found to draft depends on the text; how many rows there are does not.
        rows = sum(max(count, 1 + self._draft) for count in scheduled.num_scheduled_tokens.values())
        return Asking(urgency, rows)

    # -- what the server in front is told ----------------------------------------------------------

    def _tell(self) -> None:
        waited = 0.0
        pause = threading.Event()
        while True:
            self._write()
            pause.wait(TELL_SECONDS)
            waited += TELL_SECONDS
            status = self._status
            if status.failing and status.failure != Failure.WRONG and waited >= PROBE_SECONDS:
                waited, failed_at = 0.0, status.failed_at
                try:
                    probe()
                except SymbiosisError as error:  # which may be another: back with another model, say
                    status.failure, status.error = Failure.of(error), in_options(str(error), NAMES)
                    continue
                except Exception:  # or nobody would look again, and all would be refused
                    log.exception("cannot look whether the executor is back")
                    continue
                if status.failed_at == failed_at:
                    self._write(failing=False)

    def _write(self, failing: bool | None = None) -> None:
        """Tell the counters, and whether steps fail if that has changed. Two threads do."""
        with self._telling:
            stats, status = session_here().stats, self._status
            if failing is not None:
                status.failing = failing
            status.products, status.rows = stats.requests, stats.rows
            status.rows_ahead = getattr(session_here().products, "rows_ahead", 0)
            status.bytes_sent, status.bytes_received = stats.bytes_sent, stats.bytes_received
            status.seconds_waiting = stats.seconds_waiting + stats.seconds_waiting_for_effects
            try:
                status.write(self._folder)
            except OSError as error:
                log.warning("cannot write to %s: %s", self._folder, error.strerror)
