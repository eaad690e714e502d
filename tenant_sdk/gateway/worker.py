"""vLLM's worker, for which an unavailable provider is the failure of a step and not of the engine."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.platforms import current_platform
from vllm.v1.outputs import ModelRunnerOutput

from shared.errors import ConfigurationError, SymbiosisError
from shared.listeners import groups_without_listeners
from shared.log_rate_limit import LogRateLimiter
from shared.options import flags_of
from shared.wire.header import RequestClass
from tenant_sdk.gateway import vllm_patches
from tenant_sdk.gateway.admission import StepFailure
from tenant_sdk.gateway.connection import session_here
from tenant_sdk.gateway.draft_proposer import Proposer
from tenant_sdk.gateway.linear import RequestOptions, check_adaptable, non_finite_rows, probe, request_options
from tenant_sdk.gateway.log_redaction import redact_library_logs, redacted
from tenant_sdk.gateway.options import GatewayOptions
from tenant_sdk.gateway.status import REMIND_SECONDS, GatewayStatus, StepHealth
from tenant_sdk.session.options import SessionConfig

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Base
else:
    from vllm.v1.worker.gpu_worker import Worker as Base

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.sched.output import SchedulerOutput


log = logging.getLogger(__name__)

STATUS_SECONDS = 0.5  # between two states of ``GatewayStatus``
MAX_OUTPUT = 1e6  # of what an adapter adds to a layer's output, for inputs about 1
TRIED_ROWS = 8
PROBE_SECONDS = 2.0  # between two probes of a provider that was unavailable


@dataclass
class FailedStep(ModelRunnerOutput):  # type: ignore[misc]
    """The output of a step that came to nothing."""


@dataclass
class PartlyFailed(ModelRunnerOutput):  # type: ignore[misc]
    """The output of a step that came to nothing for some sequences.

    Attributes:
        non_finite: these sequences, whose rows had NaN or infinity, and why.
    """

    non_finite: dict[str, str] = field(default_factory=dict)


class _ExecutorsUnavailableError(Exception):
    """Executors are known to be unavailable: nothing is asked of them."""


class Worker(Base):  # type: ignore[misc]
    """Runs the tenant's part of the model, and reports how it goes."""

    def init_device(self) -> None:
        """See vLLM; what then listens in this process is for members of a group that has no others."""
        with groups_without_listeners():
            super().init_device()

    def load_model(self, *arguments: Any, **options: Any) -> None:
        """See vLLM.

        What is wrong with the model or the executor is reported in ``GatewayStatus``, and ends the process.
        """
        vllm_patches.multiply_adapters_in_segments()
        try:
            super().load_model(*arguments, **options)
            self.vllm_config.quant_config.check_complete()
            _check_positions(self.model_runner.model, self.vllm_config.model_config.max_model_len)
            if self.vllm_config.lora_config is not None:
                check_adaptable(self.model_runner.model)
                vllm_patches.include_every_version()
        except (SymbiosisError, ValueError) as error:
            why = (
                _error_for_user(error)
                if isinstance(error, SymbiosisError)
                else f"vLLM does not take this: {error}"
            )
            GatewayStatus(error=why).write(Path(self.vllm_config.model_config.model))
            raise SystemExit(1) from error  # without pages on how it came there
        if current_platform.is_cpu():
            from tenant_sdk.gateway.segmented import multiply_meanwhile

            multiply_meanwhile(self.model_runner.model)
        self.model_runner.model.register_forward_pre_hook(self._refuse_while_unavailable)
        self.model_runner.model.register_forward_hook(_zero_non_finite_rows)
        vllm_patches.patch_sampling()
        self._non_finite, self._in_step = dict[str, str](), list[str]()
        config = self.vllm_config
        self._folder, self._health = Path(config.model_config.model), StepHealth()
        self._unwritten = LogRateLimiter(REMIND_SECONDS)
        speculation = config.speculative_config
        self._draft = speculation.num_speculative_tokens if speculation else 0
        threading.Thread(target=self._report_status, name="symbiosis-status", daemon=True).start()

    def compile_or_warm_up_model(self) -> Any:
        """See vLLM; it is the last that comes before requests."""
        done = super().compile_or_warm_up_model()
        redact_library_logs()
        vllm_patches.end_engine_without_answers()
        return done

    def add_lora(self, lora_request: Any) -> bool:
        """See vLLM; its matrices are multiplied once before any sequence has them.

        Raises:
            ValueError: what they make of ordinary numbers is absurd.
        """
        added: bool = super().add_lora(lora_request)
        adapter = self.model_runner.lora_manager._adapter_manager.get_adapter(lora_request.lora_int_id)
        for name, layer in adapter.loras.items():
            downs, ups = (each if isinstance(each, list) else [each] for each in (layer.lora_a, layer.lora_b))
            for down, up in zip(downs, ups, strict=True):
                if down is not None and not _has_ordinary_size(down, up):
                    self.remove_lora(lora_request.lora_int_id)
                    raise ValueError(
                        f"at {name} it makes numbers above {MAX_OUTPUT:g} of numbers about 1, or none at "
                        "all; its training diverged, or lora_alpha is not what it was trained with"
                    )
        return added

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        """See vLLM; a step that fails gives a ``FailedStep``, whatever it fails with."""
        scheduled, status = scheduler_output.num_scheduled_tokens, self._health.status
        if not scheduled:  # it says who has ended; nothing is asked for, so it does not show who is back
            return super().execute_model(scheduler_output)
        non_finite_rows.rows, self._non_finite, self._in_step = None, {}, list(scheduled)
        status.steps += 1
        status.sequences += len(scheduled)
        drafter = getattr(self.model_runner, "drafter", None)
        if isinstance(drafter, Proposer):
            drafter.begin(self.model_runner, scheduler_output.scheduled_spec_decode_tokens)
        try:
            with request_options(self._request_options(scheduler_output)):
                output = super().execute_model(scheduler_output)
            if self._health.step_done():
                self._write_status()
            self._non_finite = self._non_finite_sequences(scheduled)
            return output
        except _ExecutorsUnavailableError:
            return self._failed_step()
        except Exception as error:
            return self._failed(error)

    def _refuse_while_unavailable(self, *_: object) -> None:
        """End what waited while a step failed: each further step would retry for as long again."""
        if self._health.unavailable:
            raise _ExecutorsUnavailableError

    def _failed(self, error: Exception) -> FailedStep:
        """The output of a step that failed; what a library says of it may be a client's words."""
        ours = isinstance(error, (SymbiosisError, LoRAAdapterNotFoundError))
        log.warning("a step failed: %s", error if ours else redacted(error))
        why = _error_for_user(error) if ours else ""
        self._health.step_failed(StepFailure.of(error), why, time.monotonic())
        self._write_status()  # before the clients get errors
        return self._failed_step()

    def _failed_step(self) -> FailedStep:
        return FailedStep(
            req_ids=self._in_step,
            req_id_to_index={request: at for at, request in enumerate(self._in_step)},
            sampled_token_ids=[[] for _ in self._in_step],
        )

    def sample_tokens(self, grammar_output: Any) -> Any:
        """See vLLM; sequences with rows that are not finite get no token."""
        try:
            with _keep_generators(self.model_runner):
                output = super().sample_tokens(grammar_output)
        except Exception as error:
            return self._failed(error)
        if not self._non_finite or not isinstance(output, ModelRunnerOutput):
            return output
        for sequence in self._non_finite:
            output.sampled_token_ids[output.req_id_to_index[sequence]] = []
            output.prompt_logprobs_dict.pop(sequence, None)  # which vLLM expects beside a token alone
        log.warning("%d of %d sequences of a step were lost", len(self._non_finite), len(output.req_ids))
        return PartlyFailed(**vars(output), non_finite=self._non_finite)

    def _non_finite_sequences(self, scheduled: dict[str, int]) -> dict[str, str]:
        """Returns the sequences of a step with rows that are not finite, and why."""
        if non_finite_rows.rows is None:
            return {}
        sequences = self.model_runner.input_batch.req_ids  # in the order of the rows
        counts = [scheduled[each] for each in sequences]
        parts = non_finite_rows.rows[: sum(counts)].split(counts)
        found = [sequence for sequence, part in zip(sequences, parts, strict=True) if part.any()]
        return {sequence: self._non_finite_explanation(sequence) for sequence in found}

    def _non_finite_explanation(self, sequence: str) -> str:
        adapter = self.model_runner.requests[sequence].lora_request
        maker = "the model" if adapter is None else f"the adapter {adapter.lora_name}"
        return f"{maker} made NaN, infinity or absurdly large numbers of this text; other requests went on"

    def _request_options(self, scheduled: SchedulerOutput) -> RequestOptions:
        """How a step's products are asked for: as somebody waits, with drafts of constant length."""
        cached = scheduled.scheduled_cached_reqs  # of which some still read their prompt
        going_on = any(
            not cached.is_context_phase(each) and each not in cached.resumed_req_ids
            for each in cached.req_ids
        )
        urgency = RequestClass.DECODE if going_on else RequestClass.PREFILL
        if not self._draft:
            return RequestOptions(urgency, 0)
        # What is found to draft depends on the text; how many rows there are does not.
        rows = sum(max(count, 1 + self._draft) for count in scheduled.num_scheduled_tokens.values())
        return RequestOptions(urgency, rows)

    # -- reports to the server in front ------------------------------------------------------------

    def _report_status(self) -> None:
        waited, server = 0.0, os.getppid()
        pause = threading.Event()
        while True:
            if os.getppid() != server:  # it was killed, and nobody ends this process
                os._exit(1)
            self._write_status()
            pause.wait(STATUS_SECONDS)
            waited += STATUS_SECONDS
            failed_at = self._health.probeable
            if failed_at is not None and waited >= PROBE_SECONDS:
                waited = 0.0
                try:
                    probe()
                except SymbiosisError as error:  # which may be another: back with another model, say
                    self._health.probed(failed_at, StepFailure.of(error), _error_for_user(error))
                except Exception:  # or nobody would probe again, and all would be refused
                    log.exception("cannot probe whether the executor is back")
                else:
                    if self._health.probed(failed_at):
                        self._write_status()

    def _write_status(self) -> None:
        """Tell the server in front how steps go, and the counts."""
        session = session_here()
        stats = session.stats
        counts = {
            "products": stats.requests,
            "rows": stats.rows,
            "rows_ahead": session.products.rows_ahead,
            "bytes_sent": stats.bytes_sent,
            "bytes_received": stats.bytes_received,
            "seconds_waiting": stats.seconds_waiting + stats.seconds_waiting_for_effects,
        }
        try:
            self._health.write(self._folder, counts)
        except OSError as error:
            if self._unwritten.due(time.monotonic()):
                more = self._unwritten.more()
                log.warning("cannot write to %s: %s%s", self._folder, error.strerror, more)


def _check_positions(model: torch.nn.Module, context: int) -> None:
    """Refuse a context for which vLLM's tables of positions are too short: its kernel reads what lies behind.

    Raises:
        ConfigurationError: there are fewer positions.
    """
    tables = [getattr(each, "cos_sin_cache", None) for each in model.modules()]
    tensors = [each for each in tables if isinstance(each, torch.Tensor) and each.dim() == 2]
    rows = min(map(len, tensors), default=context)
    if rows < context:
        raise ConfigurationError("{context}: vLLM has {} positions for this model", rows, context=context)


def _error_for_user(error: Exception) -> str:
    """Its message for the user of the command line."""
    if isinstance(error, SymbiosisError):
        error.show_options(flags_of(SessionConfig) | flags_of(GatewayOptions))
    return str(error)


@contextmanager
def _keep_generators(runner: Any) -> Iterator[None]:
    """Leave the generators of sequences that still read their prompt alone in this block.

    vLLM draws a token for these too, and sets their generators back, which those of a processor cannot be.
    """
    generators = runner.input_batch.generators
    reading = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
    kept = {int(at): generators.pop(int(at)) for at in reading if int(at) in generators}
    try:
        yield
    finally:
        generators.update(kept)


def _zero_non_finite_rows(_: Any, __: Any, hidden: Any) -> Any:
    """What a model makes last is looked at by no layer behind it; see ``NonFiniteRows``."""
    return non_finite_rows.without(hidden) if isinstance(hidden, torch.Tensor) else hidden


def _has_ordinary_size(down: torch.Tensor, up: torch.Tensor) -> bool:
    """Whether ``x A^T B^T`` is of an ordinary size; the scale is in B."""
    generator = torch.Generator()
    generator.seed()  # its author must not know the rows
    x = torch.randn(TRIED_ROWS, down.shape[1], generator=generator)
    product = x @ down.cpu().float().T @ up.cpu().float().T
    return bool((product.abs() < MAX_OUTPUT).all())
