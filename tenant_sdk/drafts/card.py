"""The card in a draft's folder, which is read before anything large is loaded."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shared.encoded import UNREADABLE, decode_json, read_within
from shared.errors import ConfigurationError, ModelMismatch, OptionText
from tenant_sdk.drafts.options import CARD, MAX_GUESSES
from tenant_sdk.drafts.repeats import LONGEST
from tenant_sdk.storage import ADAPTER_CONFIG

log = logging.getLogger(__name__)

_CARD_BYTES = 64 << 10


class DraftCard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``draft.json``.

    ``weights`` is the manifest's digest of the base's linear layers, and ``adapter`` that of the adapter's
    parameters (``adapter_digest``), or empty. ``acceptance``: of the first, second, ... guess: the share of
    places in held-out text where this guess and all before it were right. ``repeats``: see ``Guesser``.
    """

    symbiosis: str  # version of this SDK
    model: str
    weights: str
    adapter: str
    width: int
    hidden: int
    acceptance: tuple[float, ...]
    repeats: tuple[float, ...] = ()
    learned_tokens: int
    held_out_tokens: int


def draft_folders(folder: Path) -> Sequence[Path]:
    """The drafts of a folder, itself or those below it, by name; hidden ones are being written."""
    if _has_card(folder):
        return [folder]
    try:
        below = sorted(folder.iterdir())
    except OSError:
        return []
    return [each for each in below if not each.name.startswith(".") and _has_card(each)]


def _has_card(folder: Path) -> bool:
    try:
        return (folder / CARD).is_file()
    except OSError as error:  # the folder is another user's
        log.warning("no draft is looked for in %s: %s", folder, error.strerror)
        return False


def read_card(folder: Path) -> DraftCard:
    """The card of a folder.

    Raises:
        ConfigurationError: there is none, it is damaged, or it says what cannot be.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"there is no such folder: {folder}; give the one that `draft` wrote")
    try:
        if (folder / ADAPTER_CONFIG).exists() and not (folder / CARD).exists():
            raise ConfigurationError(
                OptionText("{} holds an adapter and no draft: give it with {adapter}", str(folder))
            )
        card = decode_json(read_within(folder / CARD, _CARD_BYTES), DraftCard)
    except FileNotFoundError as error:
        raise ConfigurationError(f"{folder} holds no draft: there is no {CARD} in it") from error
    except (OSError, *UNREADABLE) as error:
        raise ConfigurationError(f"{folder / CARD} is damaged: {error}. Train the draft again") from error
    shares = card.acceptance
    if len(shares) > MAX_GUESSES or not all(0 <= share <= 1 for share in (*shares, *card.repeats)):
        raise ConfigurationError(
            f"{folder / CARD} is damaged: `acceptance` has at most {MAX_GUESSES} shares, and shares are "
            "from 0 to 1. Train the draft again"
        )
    if len(card.repeats) not in (0, LONGEST):
        raise ConfigurationError(
            f"{folder / CARD} is damaged: `repeats` has {LONGEST} shares, or none. Train the draft again"
        )
    return card


def check_adapter(card: DraftCard, folder: Path, *, adapted: bool) -> None:
    """Refuse a draft of the base alone for an adapter, and the reverse.

    Raises:
        ModelMismatch: it is one.
    """
    if card.adapter and not adapted:
        raise ModelMismatch(
            OptionText(
                "the draft in {} is for an adapter, and none is used: give that with {adapter}, or leave out "
                "{draft}",
                str(folder),
            )
        )
    if adapted and not card.adapter:
        raise ModelMismatch(
            OptionText(
                "the draft in {} is for the base model, and an adapter is used: train one with `draft "
                "--adapter`, or leave out {draft}",
                str(folder),
            )
        )
