"""Replaces what is no public interface of vLLM. When vLLM is upgraded, look at each function here.

Compare it with vLLM's source:

- Does vLLM have what is replaced, with the same arguments, and does it look it up under this name when it
  uses it? If not, the assignment has no effect, and there is no error.
- Is the reason in the docstring still true? If not, remove the function.

vLLM's server, and its engine with the worker, are two processes. A patch works in the process that applies
it, and in those that are forked from it later. Functions import what they replace themselves: each process
needs another part of vLLM. ``scheduler``, ``structured`` and ``worker`` also change objects that vLLM gives
to them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from tenant_sdk.gateway.tool_calls import JSON_CALLS, bounded_parser

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.datastructures import State
    from vllm.engine.protocol import EngineClient

_SERVER_FIRST_SECONDS = 0.2

log = logging.getLogger(__name__)

# -- in the server's process -----------------------------------------------------------------------


def read_responses_as_chats() -> None:
    """Before vLLM's application is built.

    vLLM puts a token before a response's prompt that begins a text, which chat templates write. It compares
    each item with some 25 types, in the event loop; ``requests`` has read the items already.
    """
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    build = ResponsesRequest.build_tok_params

    def built(request: Any, config: Any) -> Any:
        return dataclasses.replace(build(request, config), add_special_tokens=False)

    ResponsesRequest.build_tok_params = built
    ResponsesRequest.model_fields["input"].annotation = str | list[Any]
    ResponsesRequest.model_rebuild(force=True)


def run_no_scripts_of_hosts() -> None:
    """Before vLLM's application is built: it would run ``/opt/ml/model/model.py``, and what variables name.

    These hooks are for a host that runs customers' containers. Here they would see all secrets.
    """
    from vllm.entrypoints.launchers import app

    app.sagemaker_standards_bootstrap = lambda made: made


def end_while_starting(end: Callable[[int, Any], None]) -> None:
    """Before vLLM's server is run: until that answers requests, this ends it.

    vLLM's own handler raises an error while the thread waits for the engine's process, which gets lost.

    Args:
        end: a handler of signals.
    """
    from vllm.entrypoints.launchers.api_server import entry

    setup = entry.setup_server

    def set_up(*arguments: Any, **options: Any) -> Any:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, end)
        return setup(*arguments, **options)

    entry.setup_server = set_up


def report_end(engine: EngineClient, ending: Callable[[], None]) -> None:
    """Before the server ends: vLLM ends its engine first, and then takes requests for a moment."""
    end: Callable[..., None] = engine.shutdown

    def shutdown(*arguments: Any, **options: Any) -> None:
        ending()
        end(*arguments, **options)

    engine.shutdown = shutdown


def refuse_unknown_tokens(engine: EngineClient) -> None:
    """vLLM lets tokens pass that the tokenizer knows and the embeddings do not; one would end the engine."""
    from vllm.exceptions import VLLMValidationError

    renderer, count = engine.renderer, engine.model_config.get_vocab_size()
    check = renderer.validate_token_ids

    def checked(tokens: Sequence[int], *, parameter: str | None = None) -> None:
        check(tokens, parameter=parameter)
        if (largest := max(tokens, default=0)) >= count:
            raise VLLMValidationError(f"Token id {largest} is out of vocabulary", parameter=parameter)

    renderer.validate_token_ids = checked


def count_no_combinations(engine: EngineClient) -> None:
    """vLLM keeps a metric of each combination of adapters that there ever was, and they have no end."""
    import prometheus_client

    for each in engine.logger_manager.stat_loggers:
        if (gauge := getattr(each, "gauge_lora_info", None)) is not None:
            prometheus_client.REGISTRY.unregister(gauge)
            each.gauge_lora_info = None


def bound_parsers(state: State) -> None:
    """Have calls read as ``tool_calls`` says; HarmonyParser looks at each token once, and at no text."""
    from vllm.entrypoints.generate.base.protocol import DeltaMessage
    from vllm.parser import ParserManager
    from vllm.parser.harmony import HarmonyParser

    forced = ParserManager.get_parser(JSON_CALLS, enable_auto_tools=True)
    holders = [(state.online_renderer, "parser"), (state.openai_serving_chat, "parser_cls")]
    for holder, name in (*holders, (state.openai_serving_responses, "parser")):
        reads = getattr(holder, name)
        tools = reads.tool_parser_cls
        if not issubclass(reads, HarmonyParser):
            collects = tools.engine_based_streaming or tools is forced.tool_parser_cls
            setattr(holder, name, bounded_parser(reads, forced, DeltaMessage, collects=collects))


def tokenize_fairly(engine: EngineClient) -> None:
    """vLLM's threads would tokenize texts in the order in which they come, whoever sends most of them."""
    from tenant_sdk.gateway.client_locks import TOKENIZING_THREADS, FairThreadPool

    engine.renderer._executor._inner = FairThreadPool(TOKENIZING_THREADS)


def tell_of_requests(engine: EngineClient) -> None:
    """Have ``given_to_engine`` called when vLLM's engine has a request."""
    from tenant_sdk.gateway.client_locks import given_to_engine

    add: Callable[..., Awaitable[Any]] = engine.add_request

    async def add_request(*arguments: Any, **options: Any) -> Any:
        added = await add(*arguments, **options)
        given_to_engine.get()()
        return added

    engine.add_request = add_request


def answer_each_alone(engine: EngineClient) -> None:
    """An error in one answer would end all requests, and log-probabilities would stop all for seconds."""
    from vllm.v1.engine import logprobs

    from tenant_sdk.gateway.outputs import TokenTexts, bounded_corrections, each_alone

    tokenizer, convert = engine.renderer.get_tokenizer(), logprobs.convert_ids_list_to_tokens

    def text_of(token: int) -> str:
        # A model may have more tokens than its tokenizer.
        known = tokenizer.convert_ids_to_tokens(token) is not None
        return convert(tokenizer, [token])[0] if known else ""

    def failed(error: Exception) -> None:
        log.error("an answer could not be made: %s", type(error).__name__)

    logprobs.convert_ids_list_to_tokens = TokenTexts(text_of)
    kind, processor = logprobs.LogprobsProcessor, engine.output_processor
    kind._correct_decoded_token, kind.update_from_output = bounded_corrections(
        kind._correct_decoded_token, kind.update_from_output
    )
    processor.process_outputs = each_alone(processor, failed)


def leave_constraints_alone() -> None:
    """Have vLLM look at no constraint in the event loop, which may take minutes.

    Beside strict tools, it asks whether xgrammar supports the constraint. The answer matters for constraints
    on calls alone, which ``serving`` turns off.
    """
    from vllm.parser import abstract_parser
    from vllm.v1.structured_output import backend_guidance

    backend_guidance.validate_guidance_grammar = lambda *_, **__: None
    abstract_parser._xgrammar_supports = lambda *_: False


# -- in the engine's process, by the worker --------------------------------------------------------


def end_engine_without_answers() -> None:
    """When the engine is ready. On SIGTERM, vLLM would answer all clients with what is written by then.

    Such an answer looks complete. The server, which sends SIGTERM too, reports that the gateway ends. A
    signal for the whole group of processes comes here as well, so this gives the server a moment.
    """

    def end(number: int, _: Any) -> None:
        time.sleep(_SERVER_FIRST_SECONDS)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    for number in (signal.SIGINT, signal.SIGHUP):  # the server has them too, and sends SIGTERM
        signal.signal(number, signal.SIG_IGN)


def multiply_adapters_in_segments() -> None:
    """On processors, before the model is loaded: have ``SegmentedLora`` multiply by adapters."""
    if current_platform.is_cpu():
        name = "tenant_sdk.gateway.segmented.SegmentedLora"
        type(current_platform).get_punica_wrapper = classmethod(lambda _: name)


def include_every_version() -> None:
    """Have ``_versions`` list a step's adapters."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    InputBatch.make_lora_inputs = functools.partialmethod(_versions, InputBatch.make_lora_inputs)


def patch_sampling() -> None:
    """Let a step have no drafts. On processors, sort only where a row asks for it, and do without Triton."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    constraints = rejection_sampler.apply_sampling_constraints
    rejection_sampler.apply_sampling_constraints = functools.partial(if_rows, constraints)
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = for_each_draft
        sort = functools.partial(sort_where_asked, topk_topp_sampler.apply_top_k_top_p)
        topk_topp_sampler.apply_top_k_top_p = rejection_sampler.apply_top_k_top_p = sort


def _versions(batch: Any, make: Callable[..., tuple[Any, Any, Any]], *arguments: Any) -> tuple[Any, Any, Any]:
    """What a step's adapters are, with every version of each: vLLM's set has one of those with the same name.

    Args:
        batch: the sequences of the step.
        make: vLLM's function.
        arguments: its arguments.
    """
    prompts, tokens, _ = make(batch, *arguments)
    return prompts, tokens, list(batch.lora_id_to_lora_request.values())


def if_rows(constraints: Callable[..., torch.Tensor], logits: torch.Tensor, *more: Any) -> torch.Tensor:
    """vLLM's top_k of drafts, which fails if a step has none."""
    return constraints(logits, *more) if len(logits) else logits


def sort_where_asked(
    apply: Callable[..., torch.Tensor], logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
) -> torch.Tensor:
    """vLLM's ``apply_top_k_top_p`` of [T, V], which sorts all rows if one asks: of those that ask alone."""
    asks = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if k is not None:
        asks |= k < logits.shape[1]
    if p is not None:
        asks |= p < 1
    rows = asks.nonzero().flatten()
    if len(rows) == len(logits):
        return apply(logits, k, p)
    if len(rows):
        few = (None if each is None else each[rows] for each in (k, p))
        logits[rows] = apply(logits[rows], *few)
    return logits


def for_each_draft(
    values: torch.Tensor, ends: torch.Tensor, count: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """vLLM's ``expand_batch_to_tokens``: the value of each sequence for each of its drafts."""
    replaced = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return replaced.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=count)
