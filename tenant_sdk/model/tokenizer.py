"""A tokenizer from a peer's files: its rules, and of its options those that name tokens and lengths.

Nothing in these files is a path, a class or a URL, whatever a peer writes: other keys than those below are
not read. The rules say what is added before and behind a text, also to transformers, which does not read
``add_bos_token`` and ``add_eos_token`` where there are rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from shared.encoded import UNREADABLE, decode_json
from shared.errors import ModelMismatch
from tenant_sdk.model.tokenizer_file import MAX_TOKEN, check_letters, safe_tokenizer

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_SPECIAL = 10_000  # that the options name; transformers takes time with the square of their number
LONGEST = 10**30  # what tokenizers without a limit say


_Content = Annotated[str, msgspec.Meta(max_length=MAX_TOKEN)]


class _Token(msgspec.Struct, frozen=True):
    content: _Content
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True


class _Template(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")]  # a file's, when it is saved
    template: str


class _SpecialTokens(msgspec.Struct, frozen=True):
    """``special_tokens_map.json``; unknown keys are not read."""

    bos_token: _Content | _Token | None = None
    eos_token: _Content | _Token | None = None
    unk_token: _Content | _Token | None = None
    sep_token: _Content | _Token | None = None
    pad_token: _Content | _Token | None = None
    cls_token: _Content | _Token | None = None
    mask_token: _Content | _Token | None = None
    additional_special_tokens: list[_Content | _Token] | None = None


class _Options(_SpecialTokens, frozen=True):
    """``tokenizer_config.json``; unknown keys are not read."""

    extra_special_tokens: list[_Content | _Token] | dict[str, _Content | _Token] | None = None
    model_max_length: float | None = None
    padding_side: Literal["left", "right"] | None = None
    truncation_side: Literal["left", "right"] | None = None
    clean_up_tokenization_spaces: bool | None = None
    model_input_names: list[Literal["input_ids", "token_type_ids", "attention_mask"]] | None = None
    chat_template: str | list[_Template] | None = None


S = TypeVar("S", bound=msgspec.Struct)


def build_tokenizer(files: Mapping[str, bytes]) -> Any:
    """A ``PreTrainedTokenizerFast`` from the files that a peer sent, by name; ``tokenizer.json`` is needed.

    Raises:
        ModelMismatch: a rule or a value that is not allowed (``tenant_sdk.model.tokenizer_file``).
    """
    rules = safe_tokenizer(files["tokenizer.json"])
    options = _read(files, "tokenizer_config.json", _Options)
    older = _read(files, "special_tokens_map.json", _SpecialTokens)
    chosen: dict[str, Any] = {
        name: _token(value)
        for name in NAMED_TOKENS
        if (value := getattr(options, name) or getattr(older, name)) is not None
    }
    extra = options.extra_special_tokens
    more = [
        *(options.additional_special_tokens or older.additional_special_tokens or ()),
        *(extra.values() if isinstance(extra, dict) else extra or ()),
    ]
    if len(more) > MAX_SPECIAL:
        raise ModelMismatch(f"the executor's tokenizer names {len(more)} special tokens")
    check_letters(each if isinstance(each, str) else each.content for each in more)
    if more:
        chosen["extra_special_tokens"] = [_token(each) for each in more]
    if options.model_max_length is not None:
        if not 0 < options.model_max_length <= 10 * LONGEST:
            raise ModelMismatch("the executor's tokenizer_config.json: model_max_length is no length")
        chosen["model_max_length"] = int(min(options.model_max_length, LONGEST))
    for name in (
        "padding_side",
        "truncation_side",
        "clean_up_tokenization_spaces",
        "model_input_names",
    ):
        if getattr(options, name) is not None:
            chosen[name] = getattr(options, name)
    template = options.chat_template
    if "chat_template.jinja" in files:
        template = _text(files, "chat_template.jinja")
    if template is not None:
        chosen["chat_template"] = (
            template if isinstance(template, str) else {each.name: each.template for each in template}
        )
    # Models without such an input refuse it; those that have one tell two texts apart, and have a token
    # that stands for a whole text.
    if options.model_input_names is None:
        types = ["token_type_ids"] if chosen.get("cls_token") and '"type_id":1' in rules else []
        chosen["model_input_names"] = ["input_ids", *types, "attention_mask"]
    try:
        return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(rules), **chosen)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # what its compiled part cannot use may also end in a panic
        raise ModelMismatch(f"the executor's tokenizer cannot be used: {str(error)[:200]}") from error


def _read(files: Mapping[str, bytes], name: str, kind: type[S]) -> S:
    try:
        return decode_json(files.get(name, b"{}"), kind)
    except UNREADABLE as error:
        raise ModelMismatch(f"the executor's {name} is refused: {str(error)[:200]}") from error


def _text(files: Mapping[str, bytes], name: str) -> str:
    try:
        return files[name].decode()
    except UnicodeDecodeError as error:
        raise ModelMismatch(f"the executor's {name} is not text in UTF-8") from error


def _token(token: str | _Token) -> str | AddedToken:
    if isinstance(token, str):
        return token
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
