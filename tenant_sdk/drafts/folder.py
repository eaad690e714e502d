"""A draft's folder: its weights, and a card that says for which model and adapter it is.

The folder may be anybody's. A wrong draft cannot change a text, since each token is the model's own choice;
it can only be slow, so one that was made for another model or adapter is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import load, save_file
from torch import Tensor

from shared.command_line import version
from shared.encoded import read_within
from shared.errors import ConfigurationError, ModelMismatch, OptionText
from shared.wire.messages import Manifest
from tenant_sdk.drafts.card import DraftCard, check_adapter, read_card
from tenant_sdk.drafts.decoding import Draft, DraftPace
from tenant_sdk.drafts.head import MAX_VOCABULARY, WIDENING, DraftHead, Guesser, Vocabulary, head_of
from tenant_sdk.drafts.length import DraftLength
from tenant_sdk.drafts.options import CARD
from tenant_sdk.drafts.passes import check_supported
from tenant_sdk.model.naming import plain_name
from tenant_sdk.session.session import Session
from tenant_sdk.storage import TENSORS_HEADER_BYTES, UNREADABLE_TENSORS
from tenant_sdk.trust.attestation import base_model

WEIGHTS = "draft.safetensors"
_WIDEST = 2 * WIDENING  # of the layer between, in widths of the model
_TOKENS = "tokens"  # the tensor of ids, beside those of the network


def adapter_digest(model: Any) -> str:
    """SHA-256 of an adapter's parameters as float32 numbers, by their names; empty: there is no adapter.

    Raises:
        ConfigurationError: several adapters are active.
    """
    if not getattr(model, "peft_config", None):
        return ""
    active = [*getattr(model, "active_adapters", [model.active_adapter])]
    if len(active) != 1:
        raise ConfigurationError(f"a draft is for one adapter, and {len(active)} are active")
    return digest_of_tensors(
        get_peft_model_state_dict(model, adapter_name=active[0], save_embedding_layers=False)
    )


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The same of an adapter's tensors, by the names that they have in a file."""
    digest = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        digest.update(f"{name} {list(values.shape)} ".encode())
        digest.update(values.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def save_draft(
    folder: Path,
    guesser: Guesser,
    model: Any,
    session: Session,
    *,
    acceptance: tuple[float, ...],
    learned_tokens: int,
    held_out_tokens: int,
) -> None:
    """Write a draft into a folder that exists.

    Args:
        model: that it was trained for, with its adapter.
    """
    head, tokens = guesser.head, guesser.vocabulary.tokens
    card = DraftCard(
        symbiosis=version(),
        model=plain_name(session.manifest.model),
        weights=plain_name(session.manifest.weights),
        adapter=adapter_digest(model),
        width=head.width,
        hidden=head.hidden,
        acceptance=tuple(round(share, 4) for share in acceptance),
        repeats=tuple(round(share, 4) for share in guesser.repeats),
        learned_tokens=learned_tokens,
        held_out_tokens=held_out_tokens,
    )
    tensors = {name: each.cpu().contiguous() for name, each in head.state_dict().items()}
    save_file({**tensors, _TOKENS: tokens.cpu().contiguous()}, folder / WEIGHTS)
    (folder / CARD).write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=2) + b"\n")


def load_draft(
    folder: str | Path,
    model: Any,
    session: Session,
    *,
    guesses: int | None = None,
    pace: DraftPace | None = None,
) -> Draft:
    """Returns a draft for a model: the value of ``custom_generate`` of ``generate``.

    Args:
        folder: Folder that `symbiosis-tenant draft` or ``save_draft`` wrote. It is checked, because anybody
            may have changed it.
        model: Model of the session, with the adapter that the draft was trained with, if any.
        session: Session of the model.
        guesses: Number of guesses that each pass checks, besides the token that is known. Default: the draft
            chooses it from measured times, and from the shares of right guesses in the draft's card.
        pace: Pace of the passes. Default: each pass begins at once.

    Raises:
        ConfigurationError: The folder has no draft, the draft is damaged, the output head is not on this
            machine, or the model is not suitable (``check_supported``).
        ModelMismatch: The draft was made for another model or another adapter.
    """
    check_supported(model)
    folder = Path(folder)
    card = read_card(folder)
    check_fits(card, folder, session.manifest, adapter_digest(model))
    weight, _ = head_of(base_model(model))
    head, tokens = read_weights(folder, card, *weight.shape)
    most = len(card.acceptance)
    if guesses is not None and not 0 <= guesses <= most:
        raise ConfigurationError(f"guesses={guesses}: this draft makes from 0 to {most}")
    length = DraftLength(card.acceptance, most, guesses)
    vocabulary = Vocabulary.of(base_model(model), tokens)
    return Draft(Guesser(head.to(weight.device), vocabulary, card.repeats), length, pace=pace)


def check_fits(card: DraftCard, folder: Path, manifest: Manifest, digest: str) -> None:
    """Refuse a draft of another base or adapter.

    Args:
        digest: of the adapter that answers; empty: the base answers.

    Raises:
        ModelMismatch: it is one.
    """
    check_base(card, folder, manifest)
    check_adapter(card, folder, adapted=bool(digest))
    if card.adapter != digest:
        raise ModelMismatch(
            OptionText(
                "the draft in {} is for another adapter: train one with `draft --adapter`, or leave out "
                "{draft}",
                str(folder),
            )
        )


def check_base(card: DraftCard, folder: Path, manifest: Manifest) -> None:
    """Refuse a draft of another base.

    Raises:
        ModelMismatch: it is one.
    """
    if card.weights != manifest.weights:
        raise ModelMismatch(
            OptionText(
                "the draft in {} was made for {} (weights {}), but this session's base is {} (weights {})",
                *(str(folder), plain_name(card.model), plain_name(card.weights[:16])),
                *(plain_name(manifest.model), manifest.weights[:16]),
            )
        )


def read_weights(folder: Path, card: DraftCard, vocabulary: int, width: int) -> tuple[DraftHead, Tensor]:
    """The network and the ids that it guesses.

    Args:
        vocabulary: tokens of the model.
        width: of its hidden states.

    Raises:
        ConfigurationError: they are not those that the card describes.
    """
    file = folder / WEIGHTS
    if card.width != width or not 1 <= card.hidden <= _WIDEST * width:
        raise _damaged(file, f"the card says width {card.width} and {card.hidden}, and the model has {width}")
    with torch.device("meta"):
        head = DraftHead(width, card.hidden)
    expected = head.state_dict()
    most = 4 * sum(each.numel() for each in expected.values()) + 8 * MAX_VOCABULARY + TENSORS_HEADER_BYTES
    try:
        tensors = load(read_within(file, most))
    except UNREADABLE_TENSORS as error:
        raise _damaged(file, str(error)) from error
    tokens = tensors.pop(_TOKENS, torch.empty(0))
    if {name: each.shape for name, each in tensors.items()} != {
        name: each.shape for name, each in expected.items()
    }:
        raise _damaged(file, "it holds other tensors than the card describes")
    if not all(each.dtype == torch.float32 and each.isfinite().all() for each in tensors.values()):
        raise _damaged(file, "its numbers are not finite ones of type float32")
    if tokens.dtype != torch.int64 or tokens.dim() != 1 or not 1 <= len(tokens) <= MAX_VOCABULARY:
        raise _damaged(file, f"`{_TOKENS}` is no list of at most {MAX_VOCABULARY} token ids")
    if tokens.min() < 0 or tokens.max() >= vocabulary or len(tokens.unique()) != len(tokens):
        raise _damaged(file, f"`{_TOKENS}` holds ids that the model does not have, or one twice")
    head.load_state_dict(tensors, assign=True)
    return head.eval().requires_grad_(False), tokens


def _damaged(file: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(f"{file} is damaged: {reason}. Train the draft again")
