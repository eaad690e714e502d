"""The folder of a model whose frozen layers the executor has, for vLLM to load."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shared.errors import ConfigurationError

if TYPE_CHECKING:
    from tenant_sdk.session.session import Session

log = logging.getLogger(__name__)

# What templates write where a tool is called, and how vLLM names that; the first that fits counts.
_CALLS = (
    (("<|tool_call_start|>",), "lfm2"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|python_tag|>",), "llama3_json"),
    (("<tool_call>", "<function="), "qwen3_xml"),
    (("<tool_call>",), "hermes"),
    (("functools[",), "phi4_mini_json"),
    (("<start_function_call>",), "functiongemma"),
)
# Of these, the parsers whose time for an answer is linear, and a microsecond for a character at most: all
# clients wait meanwhile.
QUICK = frozenset({"hermes"})
WORD = "zinc"  # in no template
METHOD = "symbiosis"  # of ``quantization_config``
# Set by `symbiosis-tenant serve` to a random value, which stands in the folder that it writes too. Options
# of a session say what programs are run and where secrets are, so no model's file may bring its own.
MARK = "SYMBIOSIS_GATEWAY"


class HeldModel(NamedTuple):
    """What this side holds of a model.

    Attributes:
        tokenizer: transformers'.
        positions: that the model has; None: its configuration does not say.
        rope_stable_length: see ``tenant_sdk.sequences.positions``.
        model_type: as transformers calls it.
    """

    tokenizer: Any
    positions: int | None
    rope_stable_length: int | None
    model_type: str = ""

    def context(self, asked: int | None) -> int | None:
        """The most tokens of a sequence; None: vLLM finds it.

        vLLM would take more positions than the model has if its frequencies are scaled, and for dynamic ones
        it reads beyond its table.

        Raises:
            ConfigurationError: the model has not so many positions.
        """
        if asked is None:
            return min((each for each in (self.positions, self.rope_stable_length) if each), default=None)
        if self.positions is not None and asked > self.positions:
            raise ConfigurationError(
                "{context}: this model takes {} tokens at most", self.positions, context=asked
            )
        return asked


def write_folder(
    session: Session, options: Mapping[str, Any], mark: str, folder: Path, dtype: str
) -> HeldModel:
    """Write what the tenant holds of the executor's model (all but frozen layers), and the tokenizer.

    Args:
        session: with the executor.
        options: with which the worker opens its own, see ``tenant_sdk.gateway.connection.written``.
        mark: that of ``MARK``.
        folder: to write to; it exists.
        dtype: of the parameters and activations, such as ``float32``.

    Raises:
        ModelMismatch: see ``session.load_model``.
        ConfigurationError: the executor serves no tokenizer.
        StorageError: the disk is full.
    """
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    from tenant_sdk.model.loading import check_causal
    from tenant_sdk.model.remote_weight import RemoteWeight
    from tenant_sdk.sequences.positions import rope_stable_length
    from tenant_sdk.storage import disk_errors

    check_causal(session.executor)
    model = session.load_model(dtype=dtype, progress=False)
    kept = {
        name: each
        for name, each in model.state_dict(keep_vars=True).items()
        if not isinstance(each.data, RemoteWeight) and name not in model.all_tied_weights_keys
    }
    if any(member.expert is not None for group in session.manifest.groups for member in group.members):
        # transformers has all experts of a layer in one tensor; vLLM reads them one by one.
        kept = revert_weight_conversion(model, kept)
    with disk_errors(folder, "what this side holds of the model", "TMPDIR names another place."):
        save_file(
            {name: each.detach().contiguous() for name, each in kept.items()},
            folder / "model.safetensors",
            {"format": "pt"},
        )
    # What transformers does not know of might mean something to vLLM, and it is a peer's.
    known = type(model.config)().to_dict()
    config = {name: value for name, value in model.config.to_dict().items() if name in known}
    config["quantization_config"] = {"quant_method": METHOD, "mark": mark, "session": dict(options)}
    config["architectures"] = [type(model).__name__]
    tokenizer = without_end_token(session.load_tokenizer())
    text_config = model.config.get_text_config(decoder=True)
    vocabulary = text_config.vocab_size
    _drop_unknown_ends(config, model.generation_config, tokenizer, vocabulary)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    positions = getattr(text_config, "max_position_embeddings", None)
    return HeldModel(tokenizer, positions, rope_stable_length(model), model.config.model_type)


def _drop_unknown_ends(config: dict[str, Any], generation: Any, tokenizer: Any, vocabulary: int) -> None:
    """Leave out tokens that end a text and that the model does not have.

    vLLM takes them for columns of the logits, and all sequences of a step would fail.
    """

    def known(ids: Any) -> Any:
        if isinstance(ids, list):
            return [each for each in ids if 0 <= each < vocabulary] or None
        return ids if ids is None or 0 <= ids < vocabulary else None

    before = [config.get("eos_token_id"), generation.eos_token_id, getattr(tokenizer, "eos_token_id", None)]
    config["eos_token_id"], generation.eos_token_id, end = map(known, before)
    if end != before[2]:
        tokenizer.eos_token = None
    if [config["eos_token_id"], generation.eos_token_id, end] != before:
        log.warning(
            "the model names tokens that end a text, and has none of %d or above: left out", vocabulary
        )


def without_end_token(tokenizer: Any) -> Any:
    """The tokenizer, which from now on adds nothing behind a text: an answer follows it, as in training."""
    from tokenizers import Tokenizer

    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    processor = rules["post_processor"] or {}
    for each in processor.get("processors", [processor]):
        single = each.get("single", [])
        while single and "SpecialToken" in single[-1]:
            single.pop()
    tokenizer.backend_tokenizer.post_processor = Tokenizer.from_str(json.dumps(rules)).post_processor
    return tokenizer


def tool_parser(tokenizer: Any, template: Path | None) -> str:
    """How a template writes calls of tools, as vLLM names it; empty: it writes none, or in an unknown form.

    Args:
        tokenizer: with the model's template.
        template: file of another, if users gave one.
    """
    text = _template(tokenizer, template)
    return next((name for marks, name in _CALLS if all(mark in text for mark in marks)), "")


def shows_tools(tokenizer: Any, template: Path | None) -> bool:
    """Whether a template writes the tools of a request."""
    return "tools" in _template(tokenizer, template)


def _template(tokenizer: Any, template: Path | None) -> str:
    try:
        return template.read_text() if template is not None else str(tokenizer.get_chat_template(tools=[{}]))
    except (OSError, ValueError):
        return ""


def content_format(tokenizer: Any, template: Path | None) -> str:
    """How a template gets a message's content: ``string``, as in training, if it writes that; else ``auto``.

    vLLM guesses otherwise: a list of parts, if there is a loop over any message's content. Templates write a
    system message's list as Python does, or lose a part.

    Args:
        tokenizer: with the model's template.
        template: file of another, if users gave one.
    """
    try:
        source = None if template is None else template.read_text()
        messages = [{"role": "user", "content": WORD}]
        text = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False)
    except Exception:
        return "auto"
    return "string" if WORD in text else "auto"
