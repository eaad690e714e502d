"""A mixture's experts shared out among workers of a provider, processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from conftest import Executor, relative_error
from parity import fixed_result, load_local, token_ids


def test_workers_have_different_experts(
    serve_process: Callable[..., Executor], checkpoint: Callable[[str], Path]
) -> None:
    """Requests of one layer go to both at once; what comes of it is what one process computes."""
    folder = checkpoint("mixtral")
    options = {"privacy": "one-time", "mask_sources": [f"local:{folder}"], "experts": "padded"}
    executor = serve_process(folder, "--numerics", "ring", "--workers", "2")
    with executor.connect(**options) as session:
        model = session.load_model(progress=False)
        got = fixed_result(model, token_ids())
        assert session.stats.verified_rows == session.stats.rows > 0
        texts = [
            each.generate(input_ids=token_ids(1, 5), max_new_tokens=8, do_sample=False)
            for each in (model, load_local(folder))
        ]
    # The ring's rounding, see tests/integration/test_experts.py.
    assert relative_error(got, fixed_result(load_local(folder), token_ids())) < 1e-3
    assert torch.equal(*texts)
