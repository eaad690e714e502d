"""In the gateway's environment: the blocks of a sequence, if most of a model's layers have a window."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

from tenant_sdk.gateway.client_fairness import Memory
from tenant_sdk.gateway.scheduler import Scheduler, log

BLOCK, WINDOW, STEP, CONTEXT = 16, 32, 64, 4096
form: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
groups = [
    KVCacheGroupSpec(["0"], FullAttentionSpec(**form)),
    *(KVCacheGroupSpec([str(at)], SlidingWindowSpec(sliding_window=WINDOW, **form)) for at in (1, 2, 3)),
]
pool = KVCacheConfig(num_blocks=300, kv_cache_tensors=[], kv_cache_groups=groups)
manager = KVCacheManager(pool, CONTEXT, BLOCK, BLOCK, max_in_flight_tokens=STEP, enable_caching=False)
request = Request("all.1", [1] * 3900, SamplingParams(max_tokens=9), None)
this: Any = SimpleNamespace(kv_cache_manager=manager, num_spec_tokens=0, max_model_len=CONTEXT)
told = [Scheduler._sequence_info(this, request)]
while request.num_computed_tokens < 3900:
    rows = min(STEP, 3900 - request.num_computed_tokens)
    assert manager.allocate_slots(request, rows) is not None
    request.num_computed_tokens += rows
    told.append(Scheduler._sequence_info(this, request))
free = manager.block_pool.get_num_free_blocks()
parallel = SimpleNamespace(
    decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
)
sizes = {
    "model_config": SimpleNamespace(max_model_len=CONTEXT),
    "scheduler_config": SimpleNamespace(max_num_batched_tokens=STEP),
    "parallel_config": parallel,
    "speculative_config": None,
    "max_in_flight_tokens": STEP,
}
warnings = list[str]()
for keys in (1, 2):
    records = list[logging.LogRecord]()
    log.addFilter(handler := lambda record, records=records: records.append(record) or False)
    this.vllm_config = SimpleNamespace(additional_config={"clients": keys}, **sizes)
    this.kv_cache_config, this._memory = pool, lambda: Memory(299, free)
    Scheduler._warn_of_little_memory(this)
    log.removeFilter(handler)
    warnings.append("".join(each.getMessage() for each in records))
print(
    json.dumps(
        {
            "blocks": [each.blocks for each in told],
            "more": [each.blocks_needed for each in told],
            "free": free,
            "warnings": warnings,
        }
    )
)
