"""Options of a draft's training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from shared.errors import ConfigurationError, OptionText
from shared.options import Option
from tenant_sdk.tuning.options import AdapterChoice, ReadingOptions, TrainingOption

_TEXT, _DRAFT = "Text", "Draft"
ANSWER_TOKENS = 256
CARD = "draft.json"  # in a draft's folder
MAX_GUESSES = 16  # at once, of any draft; one that is made here guesses ``training.GUESSES``
VIRTUAL_TOKENS = OptionText(
    "a draft does not go with adapters of virtual tokens (methods prompt, p-tuning and prefix): leave out "
    "the draft"
)
KEPT_PARTS = ("features-*", "answers-*")  # files that an interrupted training leaves


@dataclass(frozen=True)
class DraftOptions(AdapterChoice, ReadingOptions):
    """Options of `symbiosis-tenant draft`.

    Raises:
        ConfigurationError: a value is out of bounds, or there is no text.
    """

    output: Annotated[
        Path, TrainingOption(_DRAFT, "New folder for the draft.", unit="FOLDER", may_change=True)
    ]
    _: KW_ONLY
    data: Annotated[
        Sequence[Path],
        Option(
            _TEXT,
            "Text that the draft learns to guess, in the forms of `finetune --data`. Answers "
            "that the model wrote itself are best.",
            unit="FILE",
            cli_singular="data",
        ),
    ] = ()
    prompts: Annotated[
        Sequence[Path],
        TrainingOption(
            _TEXT,
            "Files with one prompt a line, or with JSON objects that have `prompt`. The model answers the "
            "prompts, and the draft learns these answers.",
            unit="FILE",
            cli_singular="prompts",
            may_change=True,  # their texts may not
        ),
    ] = ()
    answer_tokens: Annotated[
        int,
        Option(_TEXT, "Maximum number of tokens in an answer to one of {prompts}.", minimum=8, unit="TOKENS"),
    ] = ANSWER_TOKENS
    epochs: Annotated[
        int | None,
        TrainingOption(
            _DRAFT,
            "Passes of the draft's training over the text, all on this machine. Default: 1 for long "
            "texts, and more for shorter ones, up to 200 for a few lines.",
            minimum=1,
            unit="COUNT",
            may_change=True,
        ),
    ] = None
    batch_size: Annotated[int, Option(_TEXT, "Texts that the model computes at once.", minimum=1)] = 8
    seed: Annotated[
        int, Option(_DRAFT, "Seed of everything random except masks.", minimum=0, unit="NUMBER")
    ] = 0
    resume: Annotated[
        bool,
        TrainingOption(
            _DRAFT,
            "Continue after an interruption. The model does not compute a part of the text twice.",
            may_change=True,
        ),
    ] = False

    def __post_init__(self) -> None:
        """Refuse values out of bounds."""
        super().__post_init__()
        if not self.data and not self.prompts:
            raise ConfigurationError(OptionText("a draft is trained on text: give {data} or {prompts}"))
