"""The permitted content of a peer's ``config.json`` and ``generation_config.json``.

Numbers and words. What is counted, padded or multiplied without memory of its own is bounded here; how wide
anything is, the shapes of parameters say, which ``loading`` compares with the manifest before any memory is
taken. Nothing that transformers would open, fetch, import or run: no path, URL, class, kernel or code. How
text is generated is the tenant's own affair; of the peer's generation configuration only token ids and
lengths are taken.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, GenerationConfig, LevitConfig, PreTrainedConfig

from shared.configuration import (
    BACKBONES,
    FETCHING,
    LABELS,
    MAX_DEPTH,
    harmless,
    infinite,
    keeps,
    label,
    number,
)
from shared.encoded import UNREADABLE, decode_json
from shared.errors import ConfigurationError, ModelMismatch
from shared.options import closest
from shared.wire.messages import Manifest
from tenant_sdk.connection.remote import RemoteExecutor

# Numbers that no layer accounts for: places in a text, how far a token sees, and ids of tokens. Nothing is
# made of as many.
_PLACES = re.compile(
    r"position|rotary_emb(edding)?_base|context|n_ctx|max_seq|model_max_len|theta|_id$|_ids$|sliding_window|"
    r"(attention|speech_encoder)_chunk_size|attention_window_size|keep_window_size|max_inference_chunksize",
    re.IGNORECASE,
)
# Other windows and chunks, to whose multiples a short text is padded too, and tokens that are put before it.
# Sound is padded by dilations.
_CHUNKS = re.compile(
    r"window|chunk|block_(size|len)|local_(attention|radius)|prompt_length|dilation", re.IGNORECASE
)
_IMAGES = re.compile(r"image_size|img_size|crop_size|pinpoints", re.IGNORECASE)  # an image's sides, in pixels
_PAD_TOGETHER = re.compile(r"attn_chunk_length$", re.IGNORECASE)  # to what all of these divide
# Which fill a table in a Python loop as long as their configuration says, before any shape can be compared.
_LOOPING = ("videomae",)
# Which fill a table of positions in a Python loop: so long that it takes a few seconds.
_FILLING, _FILLED = ("distilbert", "flaubert", "marian", "pegasus", "roformer", "xlm"), 1 << 13
# Of configuration classes themselves: they would give one key's value to another.
_OF_CLASSES = ("attribute_map", "sub_configs", "model_type_map")
# Of ``Session.load_model``, but for overrides.
ARGUMENTS = ("dtype", "offload_head", "exclude", "model_class", "base", "progress")
_LARGEST = 1 << 24
_PIXELS = 4096
_FEW = 1024  # of anything is no matter, and defaults may be larger than a small model
# A width, a rate, a scale. A vocabulary is as wide, however narrow the rest of a model is; so a manifest of
# few numbers always could account for it.
_WIDE = 1 << 18
_LEVIT_PATCHES = 32  # along a side: a list of these to the power of four is made
TOKENS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)
LENGTHS = ("max_length", "min_length", "max_new_tokens", "min_new_tokens")
_OF_GENERATION = frozenset(GenerationConfig().to_dict()) - {*TOKENS, "use_cache"}


def model_configuration(data: bytes, manifest: Manifest, overrides: Mapping[str, Any]) -> Any:
    """A peer's ``config.json`` as transformers' own configuration class.

    Args:
        data: the file.
        manifest: bounds its numbers.
        overrides: the tenant's own, as in ``AutoConfig.from_pretrained``.

    Raises:
        ModelMismatch: it says what no configuration of these layers says, or transformers cannot read it.
        ConfigurationError: it has no key that an override names, or cannot have its value.
    """
    raw = _object(data, "config.json")
    # How long a spectrogram is has the name of an option of generation.
    model_fields = {"max_length"} if raw.get("model_type") == "audio-spectrogram-transformer" else set()
    fields = {key: value for key, value in raw.items() if key not in _OF_GENERATION - model_fields}
    fields = {key: value for key, value in fields.items() if key not in _OF_CLASSES}
    clean = _clean(fields, _Limits(manifest), "config.json", 0)
    with tempfile.TemporaryDirectory(prefix="symbiosis-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(clean))
        # Every configuration class refuses nonsense in a way of its own.
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        except Exception as error:
            reason = str(error).replace(folder, "config.json")
            raise ModelMismatch(
                f"transformers {transformers.__version__} cannot read the executor's configuration "
                f"({reason[:200]}); install the version that the provider runs"
            ) from error
        _check_overrides(config, overrides)
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False, **overrides)
        except Exception as error:
            shown = ", ".join(f"{key}={value!r:.80}" for key, value in overrides.items())
            raise ConfigurationError(
                f"a {type(config).__name__} cannot have {shown}: {str(error)[:200]}"
            ) from error
    if getattr(config, "backbone", None) is not None or not _is_built(
        getattr(config, "backbone_config", None)
    ):
        raise ModelMismatch("a model around a backbone loads that from elsewhere; it is not built for a peer")
    for part in _parts(config):
        _check_strides(part)
        _check_patches(part)
        _check_places(part)
    config.name_or_path = ""  # libraries look a name up at the public model hub, or on this disk
    return config


def _check_overrides(config: Any, overrides: Mapping[str, Any]) -> None:
    """Refuse what transformers would drop, or keep as a key that no model reads.

    Raises:
        ConfigurationError: the configuration has no such key.
    """
    kind = type(config)
    keys = {
        *vars(config),
        *config.attribute_map,
        *(n for n in dir(kind) if isinstance(getattr(kind, n), property)),
    }
    keys = {key.removeprefix("_") for key in keys} - {*ARGUMENTS, "torch_dtype"}
    for key in overrides:
        if key not in keys:
            raise ConfigurationError(
                f"load_model({key}=...): there is no such argument, and a {kind.__name__} has no such key; "
                + (closest(key, [*ARGUMENTS, *keys]) or f"the arguments are {', '.join(ARGUMENTS)}")
            )


def generation_configuration(
    data: bytes | None, config: Any, whose: str = "the executor's "
) -> GenerationConfig:
    """Token ids and lengths of a ``generation_config.json``, or the configuration's token ids.

    How text is generated stays out: guesses, say, would make the number of rows depend on the text.

    Args:
        data: the file; None: there is none.
        whose: it is, for errors.

    Raises:
        ModelMismatch: they are no ids and lengths.
    """
    if data is None:
        values = {name: _of(config, name) for name in TOKENS}
    else:
        raw = _object(data, "generation_config.json", whose)
        values = {name: raw.get(name) for name in (*TOKENS, *LENGTHS)}
    for name, value in values.items():
        several = value if isinstance(value, list) and name in TOKENS else [value]
        for each in several:
            if each is not None and (type(each) is not int or not 0 <= each < 1 << 31):
                raise ModelMismatch(f"{whose}generation_config.json: {name} cannot be {each!r:.40}")
    return GenerationConfig(**{name: value for name, value in values.items() if value is not None})


def download_files(remote: RemoteExecutor, names: Iterable[str]) -> dict[str, bytes]:
    """Those of the named files that the executor has; only names of ``TENANT_FILES`` are in a manifest."""
    wanted = set(names)
    return {info.name: remote.file(info) for info in remote.manifest.files if info.name in wanted}


def read_configuration(
    remote: RemoteExecutor, overrides: Mapping[str, Any] | None = None
) -> tuple[Any, GenerationConfig]:
    """The executor's model configuration with ``overrides``, and how it generates.

    Raises:
        ModelMismatch: they are refused (``tenant_sdk.model.configuration``).
    """
    files = download_files(remote, ("config.json", "generation_config.json"))
    config = model_configuration(files.get("config.json", b""), remote.manifest, overrides or {})
    return config, generation_configuration(files.get("generation_config.json"), config)


class _Limits:
    """The largest numbers that a configuration of a manifest's layers can hold."""

    def __init__(self, manifest: Manifest) -> None:
        members = [member for group in manifest.groups for member in group.members]
        axes = [axis for parameter in manifest.parameters for axis in parameter.shape]
        self.names = len(members) + len(manifest.parameters)
        self.widest = max(
            self.names,
            *(group.inputs for group in manifest.groups),
            *(member.outputs for member in members),
            *axes,
            1,
        )

    @property
    def many(self) -> int:
        """How often anything may be there."""
        return max(self.names, _FEW)

    def of(self, key: str) -> int:
        """Of the number under a key: what is counted, or as wide as a layer, is all in the manifest."""
        if "layer" in key.lower() or key == "num_labels":
            return self.many
        if _PLACES.search(key):
            return _LARGEST
        if _IMAGES.search(key):
            return _PIXELS
        return _FEW if _CHUNKS.search(key) else max(self.widest, _WIDE)


def _object(data: bytes, name: str, whose: str = "the executor's ") -> dict[str, Any]:
    try:
        return decode_json(data, dict[str, Any])
    except UNREADABLE as error:
        raise ModelMismatch(f"{whose}{name} is refused: {str(error)[:200]}") from error


def _clean(value: Any, limits: _Limits, key: str, depth: int, lists: int = 0) -> Any:
    """A value without what transformers would load, and without strings that are no word.

    Raises:
        ModelMismatch: a number that no layer accounts for, or nested too deeply.
    """
    if depth > MAX_DEPTH:
        raise ModelMismatch(f"the executor's configuration: {key[:80]} is nested too deeply")
    if infinite(value):
        return value
    if isinstance(value, dict):
        return {
            name: label(name, each) if key in LABELS else _clean(each, limits, name, depth + 1)
            for name, each in value.items()
            if keeps(key, name, each)
        }
    if key == "model_type" and isinstance(value, str) and value in FETCHING:
        raise ModelMismatch(
            f"{value} models fetch code when they are built or run; they are not built for a peer"
        )
    if key == "model_type" and value in _LOOPING:
        raise ModelMismatch(
            f"{value} models take as long to build as their configuration says; they are not built for a "
            "peer. Load the checkpoint with transformers and use session.attach"
        )
    if isinstance(value, list):
        if len(value) > limits.many:
            raise ModelMismatch(f"the executor's configuration: {key[:80]} lists {len(value)} things")
        if (
            lists
            and sum(each for each in value if isinstance(each, int)) * len(str(value)) > 64 * limits.many
        ):
            raise ModelMismatch(f"the executor's configuration: {key[:80]} repeats too much")
        # An empty word keeps the places of what follows it.
        kept = [each for each in value if each == "" or harmless(each)]
        return [_clean(each, limits, key, depth + 1, lists + 1) for each in kept]
    if isinstance(value, int) and _PAD_TOGETHER.search(key) and abs(value) & abs(value) - 1:
        raise ModelMismatch(
            f"the executor's configuration: {key[:80]} is {value:.6g}, which is no power of two"
        )
    # In lists of lists numbers say how often the rest is repeated.
    if isinstance(value, int) and abs(value) > (
        bound := limits.many if lists > 1 and not _IMAGES.search(key) else limits.of(key)
    ):
        raise ModelMismatch(
            f"the executor's configuration: {key[:80]} is {value:.6g}; with its manifest, {bound} is the "
            "most that is taken"
        )
    return value


def _is_built(backbone: Any) -> bool:
    """Whether a model has no backbone, or one that is built of the peer's configuration."""
    return backbone is None or getattr(backbone, "model_type", None) in BACKBONES


def _parts(config: PreTrainedConfig) -> Iterator[Any]:
    """A configuration, and those of the model's parts in it."""
    yield config
    for part in vars(config).values():
        if isinstance(part, PreTrainedConfig):
            yield from _parts(part)


def _check_patches(config: Any) -> None:
    """LeViT lists every pair of patches when it is built.

    Raises:
        ModelMismatch: there are more than images in use have.
    """
    if not isinstance(config, LevitConfig):
        return
    side, patch = config.image_size, config.patch_size
    if not (isinstance(side, int) and isinstance(patch, int) and 0 < side <= _LEVIT_PATCHES * patch):
        raise ModelMismatch(
            f"the executor's configuration: image_size {side!s:.40} with patch_size {patch!s:.40} is more "
            f"than {_LEVIT_PATCHES} patches along a side"
        )


def _check_places(config: Any) -> None:
    """Some models compute their positions in a Python loop when they are built.

    Raises:
        ModelMismatch: there are more than such models have in use.
    """
    places = _of(config, "max_position_embeddings", 0)
    if config.model_type in _FILLING and not (isinstance(places, int) and places <= _FILLED):
        raise ModelMismatch(
            f"the executor's configuration: max_position_embeddings is {places!s:.40}; {_FILLED} is the most "
            f"that is taken of {config.model_type}, which computes them one by one"
        )


def _check_strides(config: Any) -> None:
    """A second of sound is as many rows as convolutions take steps, which no parameter's shape says.

    Raises:
        ModelMismatch: steps that are shorter than half of what is seen at once.
    """
    kernels, strides = _of(config, "conv_kernel"), _of(config, "conv_stride")
    if not (isinstance(kernels, list | tuple) and isinstance(strides, list | tuple)):
        return
    if not all(map(number, strides)) or any(2 * step < k for k, step in zip(kernels, strides, strict=False)):
        raise ModelMismatch(
            f"the executor's configuration: conv_stride {str(strides)[:80]} is too short for conv_kernel "
            f"{str(kernels)[:80]}; it would make more rows of the same sound"
        )


def _of(config: Any, name: str, default: Any = None) -> Any:
    try:
        return getattr(config, name, default)
    except RuntimeError as error:  # layers have one each, and transformers refuses to choose
        raise ModelMismatch(f"the executor's configuration has several {name}: {str(error)[:200]}") from error
