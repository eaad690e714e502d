"""The options of a training, and of the model that it is of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from shared.errors import ConfigurationError, OptionText
from shared.options import Option, check_fields
from tenant_sdk.tuning.adapters import find_method

_DATA, _ADAPTER, _TRAINING, _MODEL = "Data", "Adapter", "Training", "Model"
LENGTH = 256  # tokens of an example, unless another number is given
MAX_ANSWER_TOKENS = 64  # tokens of an answer that is compared


@dataclass(frozen=True)
class TrainingOption(Option):
    """An option of a training, of an adapter or of a draft.

    Attributes:
        may_change: a resumed training may have another value; ``resume_settings_of`` has two exceptions.
    """

    may_change: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """How files become examples.

    Raises:
        ConfigurationError: a value is out of bounds.
    """

    sequence_length: Annotated[
        int,
        Option(
            _DATA,
            "Tokens in a block of plain text, and maximum number of tokens in a record. Longer records with "
            "`text` are split, and other longer records are left out; both are reported.",
            minimum=2,
            unit="TOKENS",
        ),
    ] = LENGTH
    train_on_prompt: Annotated[bool, Option(_DATA, "Learn whole records, not only their answers.")] = False

    def __post_init__(self) -> None:
        """Refuse values out of bounds."""
        check_fields(self)


@dataclass(frozen=True)
class TrainingOptions(ReadingOptions):
    """Options of a training.

    Raises:
        ConfigurationError: a value is out of bounds, or does not fit the others.
    """

    data: Annotated[
        Sequence[Path],
        Option(
            _DATA,
            "Training data: plain text, JSONL, a JSON list, CSV with a header, or Parquet. A record has "
            "`text`, or `prompt` and `completion`, or `messages`, or ShareGPT's or Alpaca's keys. "
            "`symbiosis-tenant data` shows the learned tokens, which count in the loss.",
            unit="FILE",
            cli_singular="data",
        ),
    ]
    output: Annotated[
        Path,
        TrainingOption(
            _ADAPTER, "New folder for the adapter, in PEFT's format.", unit="FOLDER", may_change=True
        ),
    ]
    _: KW_ONLY
    held_out: Annotated[
        Sequence[Path],
        TrainingOption(
            _DATA,
            "Data that is not learned. The loss on it is measured before, during and after the training. At "
            "the end, the base model and the adapter answer some of its prompts.",
            unit="FILE",
            cli_singular="held_out",
            may_change=True,
        ),
    ] = ()
    method: Annotated[
        str,
        Option(
            _ADAPTER,
            "PEFT method: lora, rslora, adalora, ia3, vera, loha, lokr, prefix, prompt or p-tuning.",
            unit="NAME",
        ),
    ] = "lora"
    rank: Annotated[int, Option(_ADAPTER, "Rank of the low-rank methods.", minimum=1)] = 8
    target_modules: Annotated[
        str,
        Option(
            _ADAPTER,
            "Layers that low-rank methods adapt: module names separated by commas, or all-linear.",
            unit="NAMES",
        ),
    ] = "all-linear"
    alpha: Annotated[
        float | None,
        Option(
            _ADAPTER,
            "Scale of lora, rslora and adalora. It is divided by the rank, or, for rslora, by the square "
            "root of the rank. Default: twice the rank.",
            minimum=0,
            exclusive_minimum=True,
            unit="NUMBER",
        ),
    ] = None
    dropout: Annotated[
        float,
        Option(_ADAPTER, "Dropout of lora, rslora and adalora.", minimum=0, maximum=0.99, unit="SHARE"),
    ] = 0.0
    adapter: Annotated[
        Path | None,
        Option(
            _ADAPTER,
            "Folder of an adapter to train further, instead of a new one. Method and rank are then those of "
            "this adapter.",
            unit="FOLDER",
        ),
    ] = None
    virtual_tokens: Annotated[
        int,
        Option(_ADAPTER, "Number of virtual tokens of the methods prefix, prompt and p-tuning.", minimum=1),
    ] = 20
    learning_rate: Annotated[
        float | None,
        Option(
            _TRAINING,
            "Learning rate. The default depends on the method and on the model's width: 0.001 for lora up to "
            "a width of 824, less for wider models.",
            minimum=0,
            exclusive_minimum=True,
            unit="RATE",
        ),
    ] = None
    schedule: Annotated[
        str,
        Option(
            _TRAINING,
            "Schedule of the learning rate after the warm-up: linear or cosine (both fall), or constant.",
            choices=("linear", "cosine", "constant"),
            unit="NAME",
        ),
    ] = "linear"
    warmup_steps: Annotated[
        int | None,
        Option(
            _TRAINING,
            "Steps in which the learning rate rises. Default: a tenth of all steps, 10 at most.",
            minimum=0,
            unit="STEPS",
        ),
    ] = None
    weight_decay: Annotated[
        float, Option(_TRAINING, "Weight decay of the optimizer, AdamW.", minimum=0, unit="NUMBER")
    ] = 0.0
    steps: Annotated[
        int | None, Option(_TRAINING, "Number of optimizer steps, instead of {epochs}.", minimum=1)
    ] = None
    epochs: Annotated[
        float,
        # The number of steps may not change.
        TrainingOption(_TRAINING, "Passes over the data.", unit="COUNT", may_change=True),
    ] = 3.0
    batch_size: Annotated[
        int, Option(_TRAINING, "Blocks or records that are computed at once.", minimum=1)
    ] = 8
    gradient_accumulation: Annotated[
        int, Option(_TRAINING, "Batches in a step.", minimum=1, unit="COUNT")
    ] = 1
    eval_steps: Annotated[
        int | None,
        TrainingOption(
            _TRAINING,
            "Steps between measurements of the held-out loss. Default: a fifth of all steps.",
            minimum=1,
            unit="STEPS",
            may_change=True,
        ),
    ] = None
    early_stopping: Annotated[
        int | None,
        Option(
            _TRAINING,
            "End the training if this many measurements of the held-out loss in a row are not below the "
            "lowest loss so far. The saved adapter is the one with the lowest loss. The measurement before "
            "the training does not count.",
            minimum=1,
            unit="COUNT",
        ),
    ] = None
    samples: Annotated[
        int,
        TrainingOption(
            _DATA,
            "Number of held-out prompts that base and adapter answer at the end. Only prompts whose held-out "
            "answer has at most 64 tokens are used. Three are shown, and the right answers are counted.",
            minimum=0,
            unit="COUNT",
            may_change=True,
        ),
    ] = 20
    memory_gib: Annotated[
        float | None,
        TrainingOption(
            _TRAINING,
            "Memory that this process may use. If it is short, long sequences are computed in windows (parts "
            "of a sequence). Default: the memory in use when the training begins, plus 80 % of the free "
            "memory.",
            minimum=0,
            exclusive_minimum=True,
            unit="GIB",
            may_change=True,
        ),
    ] = None
    packing: Annotated[
        bool,
        Option(
            _TRAINING,
            "Join a step's records into one sequence instead of padding them. This sends fewer bytes.",
        ),
    ] = False
    seed: Annotated[
        int,
        Option(_TRAINING, "Seed of everything random except masks.", minimum=0, unit="NUMBER"),
    ] = 0
    save_steps: Annotated[
        int, TrainingOption(_TRAINING, "Steps between checkpoints.", minimum=1, may_change=True)
    ] = 50
    resume: Annotated[
        bool, TrainingOption(_TRAINING, "Continue an interrupted training run.", may_change=True)
    ] = False
    report_to: Annotated[
        Sequence[str],
        TrainingOption(
            _TRAINING,
            "Tracker: tensorboard (files in OUTPUT.runs), wandb or another of transformers' Trainer. The "
            "tracker gets losses, options and the model's configuration, but no text.",
            unit="NAME",
            cli_singular="report_to",
            may_change=True,
        ),
    ] = ()
    with_draft: Annotated[
        Path | None,
        TrainingOption(
            _ADAPTER,
            "New folder for a draft: a small network that guesses the next tokens, so that one run of the "
            "model can yield several (docs/how-to/distance.md). It is trained at the end, while the adapted "
            "model reads the training data once more.",
            unit="FOLDER",
            may_change=True,
        ),
    ] = None
    base: Annotated[
        str | None,
        TrainingOption(
            _ADAPTER,
            "Base model that the adapter's configuration names. Other programs load the adapter with this "
            "model.",
            unit="FOLDER|FILE.gguf|hub:NAME[@REVISION]",
            may_change=True,
        ),
    ] = None

    def __post_init__(self) -> None:
        """Refuse values out of bounds, and what cannot be packed."""
        super().__post_init__()
        if self.adapter is not None:
            ruled = ("method", "rank", "target_modules", "alpha", "dropout")
            fields = type(self).__dataclass_fields__
            if any(getattr(self, name) != fields[name].default for name in ruled):
                raise ConfigurationError(
                    OptionText(
                        "{adapter} decides these: leave out {method}, {rank}, {target_modules}, {alpha} and "
                        "{dropout}"
                    )
                )
        if self.early_stopping and not self.held_out:
            raise ConfigurationError(OptionText("{early_stopping} needs {held_out}"))
        if find_method(self.method).prompt_like and self.packing:
            raise ConfigurationError(
                "{packing} does not go with {method}: its virtual tokens stand before a row, not before "
                "each record in it",
                method=self.method,
            )
        if find_method(self.method).prompt_like and self.with_draft is not None:
            raise ConfigurationError(
                "{with_draft} does not go with {method}: behind virtual tokens, a pass computes one token",
                method=self.method,
            )

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of ``target_modules``."""
        return tuple(name.strip() for name in self.target_modules.split(","))


@dataclass(frozen=True, kw_only=True)
class AdapterChoice:
    """The adapter that a command uses."""

    adapter: Annotated[
        Path | None,
        Option(
            _ADAPTER,
            "Folder of an adapter, for example the output of `symbiosis-tenant finetune`. Default: the base "
            "model alone.",
            unit="FOLDER",
        ),
    ] = None
    allow_other_base: Annotated[
        bool,
        TrainingOption(
            _ADAPTER, "Do not refuse an adapter that was made for another model.", may_change=True
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(AdapterChoice, ReadingOptions):
    """Options of `symbiosis-tenant evaluate`.

    Raises:
        ConfigurationError: a value is out of bounds.
    """

    train_on_prompt: Annotated[
        bool, Option(_DATA, "Measure the loss on whole records, not only on their answers.")
    ] = False
    answer_tokens: Annotated[
        int,
        Option(
            _DATA,
            "The model answers the prompts whose answers in the data have at most this many tokens.",
            minimum=0,
            unit="TOKENS",
        ),
    ] = MAX_ANSWER_TOKENS
    batch_size: Annotated[int, Option(_DATA, "Records that are computed at once.", minimum=1)] = 8
    output: Annotated[
        Path | None,
        Option(
            _DATA,
            "New file for all answers. Each line is a JSON object: prompt, expected, base, adapter.",
            unit="FILE.jsonl",
        ),
    ] = None


@dataclass(frozen=True)
class ModelOptions:
    """What of the model is a tenant's own."""

    tokenizer: Annotated[
        Path | None,
        Option(
            _MODEL,
            "Folder of a tokenizer that you trust. Default: that of {model}, or the executor's.",
            unit="FOLDER",
        ),
    ] = None
    model: Annotated[
        str | None,
        Option(
            _MODEL,
            "Your own copy of the model. All parameters are taken from it, except the weights of the layers "
            "that the executor multiplies.",
            unit="FOLDER|FILE.gguf|hub:NAME[@REVISION]",
        ),
    ] = None
