"""A draft's folder in the gateway: which tokens it may guess."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from shared.errors import ConfigurationError
from tenant_sdk.drafts.card import DraftCard
from tenant_sdk.drafts.folder import WEIGHTS
from tenant_sdk.drafts.head import DraftHead
from tenant_sdk.drafts.options import CARD
from tenant_sdk.gateway.draft_proposer import FOLDER, Proposer

KNOWN, ROWS, WIDTH = 2000, 2048, 8  # tokens of the model, and rows of vLLM's head, which fills up a block


def proposer(folder: Path, token: int) -> Proposer:
    head = DraftHead(WIDTH, WIDTH)
    save_file(head.state_dict() | {"tokens": torch.tensor([5, token])}, folder / WEIGHTS)
    card = DraftCard(
        symbiosis="0",
        model="m",
        weights="w",
        adapter="",
        width=WIDTH,
        hidden=WIDTH,
        acceptance=(0.5,),
        learned_tokens=1,
        held_out_tokens=1,
    )
    (folder / CARD).write_bytes(msgspec.json.encode(card))
    config: Any = SimpleNamespace(
        additional_config={FOLDER: str(folder)},
        speculative_config=SimpleNamespace(num_speculative_tokens=2),
        model_config=SimpleNamespace(get_vocab_size=lambda: KNOWN),
    )
    return Proposer(config)


def test_tokens_of_the_padding_are_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's sampler would take their probabilities from the next sequence's row."""
    session = SimpleNamespace(manifest=SimpleNamespace(weights="w", model="m"))
    monkeypatch.setattr("tenant_sdk.gateway.draft_proposer.session_here", lambda: session)
    model: Any = SimpleNamespace(
        lm_head=SimpleNamespace(weight=torch.zeros(ROWS, WIDTH), bias=None),
        embed_input_ids=nn.Embedding(ROWS, WIDTH),
        compute_logits=lambda hidden: hidden,
    )
    proposer(tmp_path, KNOWN - 1).load_model(model)
    with pytest.raises(ConfigurationError, match="ids that the model does not have"):
        proposer(tmp_path, KNOWN).load_model(model)
