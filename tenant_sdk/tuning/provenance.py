"""The notes in an adapter's folder beside PEFT's own files: its base, and its origin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shared.command_line import version
from shared.encoded import UNREADABLE, decode_json
from shared.errors import ConfigurationError, ModelMismatch, OptionText
from tenant_sdk.model.naming import Base, plain_name

if TYPE_CHECKING:
    from shared.wire.messages import Manifest
    from tenant_sdk.session.session import Session

RECORD = "symbiosis.json"
_AUTO_CLASSES = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}


class Provenance(msgspec.Struct, frozen=True, kw_only=True):
    """``symbiosis.json``; the fields of the manifest of the session in which the adapter was saved.

    ``weights`` decides whether another model is the same base: it covers the layers that adapters change, and
    is the same whatever tokenizer there is and whatever a tenant keeps. ``digest`` covers tokenizer,
    configuration, embeddings and norms as well.
    """

    symbiosis: str  # version of this SDK
    model: str
    architecture: str
    weights: str
    digest: str
    numerics: str
    privacy: str
    training: dict[str, Any] = {}

    @classmethod
    def of(cls, session: Session, training: Mapping[str, Any]) -> Provenance:
        """Of an adapter that is saved now; of figures four digits are kept."""
        manifest = session.manifest
        return cls(
            symbiosis=version(),
            model=plain_name(manifest.model),
            architecture=plain_name(manifest.architecture),
            weights=plain_name(manifest.weights),
            digest=plain_name(manifest.digest),
            numerics=plain_name(manifest.numerics),
            privacy=session.privacy,
            training={
                name: float(f"{value:.4g}") if isinstance(value, float) else value
                for name, value in training.items()
            },
        )

    @classmethod
    def read(cls, folder: Path, source: Path | None = None) -> Provenance | None:
        """Of a folder; None if it was made without this SDK.

        Args:
            source: what errors call the folder; default: its path.

        Raises:
            ConfigurationError: the file is damaged.
        """
        try:
            return decode_json((folder / RECORD).read_bytes(), cls)
        except FileNotFoundError:
            return None
        except (OSError, *UNREADABLE) as error:
            raise ConfigurationError(
                f"{(source or folder) / RECORD} is damaged: {error}. Restore it, or remove it to load the "
                "adapter as one that says nothing of its base"
            ) from error

    def write(self, folder: Path) -> None:
        """Into a folder."""
        (folder / RECORD).write_bytes(
            msgspec.json.format(msgspec.json.encode(self, enc_hook=str), indent=2) + b"\n"
        )

    def check(self, manifest: Manifest, folder: Path) -> str:
        """Hold the base of the adapter in a folder against that of a session's manifest.

        Returns:
            What differs although the weights are the same; empty: nothing.

        Raises:
            ModelMismatch: the session's base has other weights.
        """
        if self.weights != manifest.weights:
            raise ModelMismatch(
                OptionText(
                    "the adapter in {} was made for {} (weights {}), but this session's base is {} "
                    "(weights {}). Connect to an executor of that base; if both are the same model, "
                    "for example in another precision, use {allow_other_base}",
                    str(folder),
                    *(plain_name(self.model), plain_name(self.weights[:16])),
                    *(plain_name(manifest.model), manifest.weights[:16]),
                    allow_other_base=True,
                )
            )
        if self.digest != manifest.digest:
            return (
                f"the adapter in {folder} was made with another tokenizer, configuration or embeddings than "
                f"this session's (digest {plain_name(self.digest[:16])}, here {manifest.digest[:16]}); the "
                "weights are the same"
            )
        return ""


def training_of(trainer: Any) -> dict[str, Any]:
    """Figures of a ``transformers.Trainer`` that has trained: how far, losses, what was chosen."""
    state, chosen = trainer.state, trainer.args
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    held_out = [entry["eval_loss"] for entry in state.log_history if "eval_loss" in entry]
    entries = {
        "steps": state.global_step,
        "epochs": state.epoch,
        "tokens": state.num_input_tokens_seen or None,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "held_out_loss": held_out[-1] if held_out else None,
        "learning_rate": chosen.learning_rate,
        "schedule": str(getattr(chosen.lr_scheduler_type, "value", chosen.lr_scheduler_type)),
        "batch_size": chosen.per_device_train_batch_size * chosen.gradient_accumulation_steps,
        "weight_decay": chosen.weight_decay,
        "seed": chosen.seed,
    }
    return {name: value for name, value in entries.items() if value is not None}


def write_card(folder: Path, record: Provenance, base: Base, config: Any) -> None:
    """The folder's README.md, as model hubs show it.

    Args:
        base: where it is found; what a provider calls its folder is no such place.
        config: PEFT's, of the adapter.
    """
    from huggingface_hub import ModelCard, ModelCardData

    method = str(getattr(config.peft_type, "value", config.peft_type))
    data = ModelCardData(
        library_name="peft",
        base_model=str(base.name) if base.hub else None,
        pipeline_tag="text-generation" if config.task_type == "CAUSAL_LM" else None,
        tags=sorted({"symbiosis", method.lower()}),
    )
    rows = {
        "architecture": record.architecture,
        "base": (base.name or record.model) + (f" at revision {base.revision}" if base.revision else ""),
        "SHA-256 of the base's linear weights": record.weights,
        "numerics": record.numerics,
        "privacy mode": record.privacy,
        "Symbiosis": record.symbiosis,
    }
    training = f"\n## Training\n\n{_table(record.training)}" if record.training else ""
    kind = _AUTO_CLASSES.get(str(config.task_type), "AutoModel")
    more = f", revision={base.revision!r}" if base.hub and base.revision else ""
    text = _CARD.format(
        method=method,
        title=base.name or record.model,
        rows=_table(rows),
        named=base.name or _NO_BASE,
        unknown="" if base.name else f", `{_NO_BASE}` that of the base model",
        kind=kind,
        more=more,
        training=training,
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}").save(folder / "README.md")


def _table(rows: Mapping[str, Any]) -> str:
    cells = ((str(each).replace("|", r"\|").replace("\n", " ") for each in row) for row in rows.items())
    return "".join(f"| {name} | {value} |\n" for name, value in (("", ""), ("---", "---"), *cells))


_NO_BASE = "FOLDER_OF_THE_BASE"
_CARD = """\
# Adapter for {title} ({method})

Trained with Symbiosis: an executor computed the products of the base model's frozen layers, while text,
adapter, gradients and optimizer stayed on the tenant's machine. The files are those of PEFT; `symbiosis.json`
says which base they belong to.

{rows}
## How to use it

With PEFT, without any executor (`ADAPTER` is this folder{unknown}):

```python
from peft import PeftModel
from transformers import {kind}

base = {kind}.from_pretrained({named!r}{more})
model = PeftModel.from_pretrained(base, "ADAPTER")
```

With an executor of the same base:

```python
import tenant_sdk

with tenant_sdk.connect(...) as session:
    model = tenant_sdk.load_adapter(session.load_model(), "ADAPTER", session)
```
{training}"""
