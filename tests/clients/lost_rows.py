"""In the gateway's environment: rows that one adapter spoils go on as zeros, and end their sequence alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import ModelRunnerOutput

from shared.wire.header import RequestClass
from tenant_sdk.gateway import worker
from tenant_sdk.gateway.linear import RemoteLinearMethod, RequestOptions, non_finite_rows, request_options
from tenant_sdk.gateway.segmented import SegmentedLora
from tenant_sdk.gateway.status import GatewayStatus
from tenant_sdk.gateway.vllm_patches import for_each_draft, if_rows, sort_where_asked
from tenant_sdk.products.modes import Privacy
from tenant_sdk.tuning.segmented_lora import Segments

INFINITY = float("inf")
sent: list[torch.Tensor] = []


class Products:
    """A group whose product is its input, and which takes finite rows alone, as an executor's."""

    info, privacy = SimpleNamespace(inputs=16), Privacy.PLAIN

    def submit(self, direction: object, members: int, tensors: list[torch.Tensor], urgency: object) -> Any:
        """Remember what would be sent."""
        assert tensors[0].isfinite().all()
        sent.append(tensors[0])
        return SimpleNamespace(result=lambda: [tensors[0].clone()])


torch.manual_seed(0)
x = torch.randn(5, 16)  # two rows of the first sequence, one of the second, two of the third
a, b = torch.randn(3, 1, 8, 16), torch.randn(3, 1, 16, 8)
a[1] *= 1e19
b[1] *= 1e19
lora = SegmentedLora.__new__(SegmentedLora)
lora._segments, lora._made = Segments(torch.tensor([0, 0, 1, -1, -1]), 3), None
y = torch.randn(5, 16)
others, expected = [0, 1, 3, 4], y.clone()
expected[:2] += x[:2] @ a[0, 0].T @ b[0, 0].T
lora.add_lora_linear(y, x, (a,), (b,), 1.0, (16,))
torch.testing.assert_close(y[others], expected[others])
assert y[2].eq(0).all()
assert non_finite_rows.rows.tolist() == [False, False, True, False, False]

# What makes NaN between two layers is seen at the second, and there are as many rows as before.
method = RemoteLinearMethod([SimpleNamespace(group=Products(), members=1)], "layer")
rows = x.clone()
rows[4, 3], rows[3, 0] = float("nan"), -INFINITY
out = method.apply(torch.nn.Identity(), rows)
assert sent[0].shape == rows.shape
torch.testing.assert_close(out[:3], x[:3])
assert out[3:].eq(0).all()
assert worker._zero_non_finite_rows(None, None, rows)[3:].eq(0).all()

# Rows of zeros are added where they look like all others, and nowhere else.
for privacy in Privacy:
    sent.clear()
    Products.privacy = privacy
    try:
        with request_options(RequestOptions(RequestClass.DECODE, 8)):
            assert method.apply(torch.nn.Identity(), x).shape == x.shape
    except RuntimeError:
        assert not privacy.hides_zeros
    assert [len(each) for each in sent] == ([8] if privacy.hides_zeros else [])

# A sequence that reads its prompt keeps its generator as it is, and no error of a sampler ends the engine.
batch = ["first", "second", "third"]
generators = {at: torch.Generator().manual_seed(at) for at in range(2)}
seen: list[Any] = []


def sample(given: Any) -> ModelRunnerOutput:
    """Whatever is raised, or a token for each sequence."""
    seen.append(set(generators))
    if given is not None:
        raise given
    output = ModelRunnerOutput(batch, {n: i for i, n in enumerate(batch)}, [[1], [2], [3]])
    output.prompt_logprobs_dict = dict.fromkeys(batch, "of its prompt")
    return output


this = worker.Worker.__new__(worker.Worker)
lora_request = SimpleNamespace(lora_name="spoiled")
this.model_runner = SimpleNamespace(
    input_batch=SimpleNamespace(req_ids=batch, num_reqs=3, generators=generators),
    discard_request_mask=SimpleNamespace(np=np.array([False, True, True, True])),
    requests={each: SimpleNamespace(lora_request=lora_request) for each in batch},
    sample_tokens=sample,
)
this._non_finite = this._non_finite_sequences({"second": 1, "third": 2, "first": 2})
output = this.sample_tokens(None)
assert output.sampled_token_ids == [[1], [], []]
assert set(output.prompt_logprobs_dict) == {"first"}  # vLLM ends if a sequence has them and no token
assert set(output.non_finite) == {"second", "third"}
assert "adapter spoiled" in output.non_finite["second"]
this._non_finite = {}
assert this.sample_tokens(None).sampled_token_ids == [[1], [2], [3]]
this._status, this._in_step, this._write_status = GatewayStatus(), batch, lambda failing: None
failed = this.sample_tokens(RuntimeError("a client's word"))
assert isinstance(failed, worker.FailedStep)
assert failed.sampled_token_ids == [[], [], []]
assert (this._status.failed_steps, this._status.error) == (1, "")
assert seen == [{0}, {0}, {0}]
assert set(generators) == {0, 1}
empty = if_rows(lambda *_: torch.empty(0).max(), torch.empty(0, 4), None)
assert empty.shape == (0, 4)
ends = torch.tensor([2, 2, 5], dtype=torch.int32)
assert for_each_draft(torch.tensor([7, 8, 9]), ends, 5).tolist() == [7, 7, 9, 9, 9]
assert for_each_draft(torch.tensor([0.0, 1.0, 0.5]), ends, 5, 0, 1).tolist() == [1, 1, 0.5, 0.5, 0.5]

# Of the rows of a step, those are sorted that ask for it.
sorted_rows: list[int] = []


def apply(logits: torch.Tensor, k: Any, p: Any) -> torch.Tensor:
    """Note how many rows are sorted, and change them."""
    sorted_rows.append(len(logits))
    assert len(logits) == len(p)
    return logits + 100


logits, p = torch.zeros(4, 8), torch.tensor([1.0, 0.5, 1.0, 1.0])
k = torch.tensor([8, 8, 8, 3])
assert sort_where_asked(apply, logits.clone(), None, p)[:, 0].tolist() == [0, 100, 0, 0]
assert sort_where_asked(apply, logits.clone(), k, p)[:, 0].tolist() == [0, 100, 0, 100]
assert sort_where_asked(apply, logits.clone(), k[:1].repeat(4), p[:1].repeat(4)).eq(0).all()
assert sort_where_asked(apply, logits.clone(), None, p[1:2].repeat(4)).eq(100).all()
assert sorted_rows == [1, 2, 4]

# An adapter is tried when it is added.
assert worker._has_ordinary_size(torch.randn(8, 16), torch.randn(16, 8))
for down, up in ((1e19, 1.0), (1.0, 1e30), (1e19, 1e19), (INFINITY, 1.0)):
    assert not worker._has_ordinary_size(torch.randn(8, 16) * down, torch.randn(16, 8) * up)
print(json.dumps({"lost": non_finite_rows.rows.tolist()}))
