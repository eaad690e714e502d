"""The permitted rules of a peer's ``tokenizer.json``, none of which makes a text much longer.

The format is that of the ``tokenizers`` library. A file is parsed strictly, so that every rule in it is one
of the tables below with fields of the right types, and only what was parsed is written out again for the
library. Whoever writes a tokenizer decides how many tokens a text has; that a file is the right one is
shown by comparing it (``tenant_sdk.trust.attestation``), here is only seen to it that it cannot exhaust
memory.
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Iterable
from os.path import commonprefix
from typing import Annotated, Any, TypeVar, Union

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from shared.encoded import UNREADABLE, decode_json
from shared.errors import ModelMismatch

# How many characters, and in the end tokens, one character of text may become. Of the tokenizers in use
# XLNet's could do the most, 648.
MAX_GROWTH = 1024
MAX_TOKEN = 4096  # characters of one token: what decoding one token can yield
# What loading takes time and memory for, with the largest in use that we know of.
MAX_RULES = 64  # one after the other
MAX_PATTERN = 4096  # characters of all expressions together; those of known tokenizers have a few hundred
MAX_ENTRIES = 1 << 20  # of a vocabulary, 901,629, and merges, 580,604
MAX_TRIE_NODES = 1 << 22  # of a Unigram vocabulary, half a kilobyte each
MAX_EXTRA = 1 << 15  # added tokens, 28,672
MAX_LETTERS = 1 << 20  # characters of all added tokens together
MAX_ADDED = 64  # special tokens around a text
# Ids without a token, beside as many as there are tokens: the library lists each when it writes a tokenizer.
MAX_HOLES = 1 << 16
BYTES_OF_CHARACTER = 4

# Unicode's normal forms and lower case: the longest that any character becomes, over all of Unicode.
_FORMS = {"NFKC": 18, "NFKD": 18, "NFC": 4, "NFD": 4, "Lowercase": 4, "BertNormalizer": 4}
_KEEPS_FORM = ("Strip", "StripAccents")  # they only take characters away


T = TypeVar("T")
_Few = Annotated[list[T], msgspec.Meta(max_length=MAX_RULES)]
_Entries = msgspec.Meta(max_length=MAX_ENTRIES)
_Vocabulary = Annotated[dict[str, int], _Entries]

# A pattern that may replace something is a choice of these in a row: an end of the text, or a character or
# class, and how often. The library panics where a replacement's pattern matches no character.
_PART = re.compile(
    r"[\^$]|(?P<one>\\[pP]\{\^?\w+\}|\\[sSdDwWnrt]|\\[^\w<>`']|\[\^?(?:\\.|[^\[\]\\])+\]|[^\\\[\](){}?*+^$|])"
    r"(?P<times>[?*+]|\{\d+(?:,\d*)?\})?",
    re.DOTALL,
)
_ONCE_OR_MORE = re.compile(r"|\+|\{[1-9]\d*(,([1-9]\d*)?)?\}")


def _structs(kind: str, table: dict[str, dict[str, Any]]) -> Any:
    """A union of strict structs, told apart by their field ``type``."""
    return Union[  # noqa: UP007 - made of a tuple
        tuple(
            msgspec.defstruct(
                f"{kind}{name}",
                [(field, type_ | UnsetType, UNSET) for field, type_ in fields.items()],
                tag_field="type",
                tag=name,
                forbid_unknown_fields=True,
                frozen=True,
            )
            for name, fields in table.items()
        )
    ]


def _with_sequence(kind: str, field: str, table: dict[str, dict[str, Any]]) -> Any:
    """The rules of a table, or a list of them; lists in lists are not used by anybody."""
    single = _structs(kind, table)
    several = _structs(kind, {"Sequence": {field: _Few[single]}})  # type: ignore[valid-type]
    return single | several


class _Pattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of the two; they cannot be told apart by a tag."""

    String: str | UnsetType = UNSET
    Regex: str | UnsetType = UNSET


_METASPACE: dict[str, Any] = {
    "replacement": str,
    "add_prefix_space": bool,
    "prepend_scheme": str,
    "split": bool,
    "str_rep": str,
}
_BYTE_LEVEL: dict[str, Any] = {"add_prefix_space": bool, "trim_offsets": bool, "use_regex": bool}
_Normalizer: Any = _with_sequence(
    "Normalizer",
    "normalizers",
    {
        "BertNormalizer": {
            "clean_text": bool,
            "handle_chinese_chars": bool,
            "strip_accents": bool | None,
            "lowercase": bool,
        },
        "ByteLevel": {},
        "Lowercase": {},
        "NFC": {},
        "NFD": {},
        "NFKC": {},
        "NFKD": {},
        "Nmt": {},
        "Precompiled": {"precompiled_charsmap": str},
        "Prepend": {"prepend": str},
        "Replace": {"pattern": _Pattern, "content": str},
        "Strip": {"strip_left": bool, "strip_right": bool},
        "StripAccents": {},
    },
)
_PreTokenizer: Any = _with_sequence(
    "PreTokenizer",
    "pretokenizers",
    {
        "BertPreTokenizer": {},
        "ByteLevel": _BYTE_LEVEL,
        "CharDelimiterSplit": {"delimiter": str},
        "Digits": {"individual_digits": bool},
        "FixedLength": {"length": int},
        "Metaspace": _METASPACE,
        "Punctuation": {"behavior": str},
        "Split": {"pattern": _Pattern, "behavior": str, "invert": bool},
        "UnicodeScripts": {},
        "Whitespace": {},
        "WhitespaceSplit": {},
    },
)


class _Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    type_id: int


class _Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Of a template: a special token or one of the texts."""

    SpecialToken: _Place | UnsetType = UNSET
    Sequence: _Place | UnsetType = UNSET


class _SpecialToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    ids: list[int]
    tokens: list[str]


_PostProcessor: Any = _with_sequence(
    "PostProcessor",
    "processors",
    {
        "BertProcessing": {"sep": tuple[str, int], "cls": tuple[str, int]},
        "ByteLevel": _BYTE_LEVEL,
        "RobertaProcessing": {
            "sep": tuple[str, int],
            "cls": tuple[str, int],
            "trim_offsets": bool,
            "add_prefix_space": bool,
        },
        "TemplateProcessing": {
            "single": _Few[_Piece],
            "pair": _Few[_Piece],
            "special_tokens": dict[str, _SpecialToken],
        },
    },
)
_Decoder: Any = _with_sequence(
    "Decoder",
    "decoders",
    {
        "BPEDecoder": {"suffix": str},
        "ByteFallback": {},
        "ByteLevel": _BYTE_LEVEL,
        "CTC": {"pad_token": str, "word_delimiter_token": str, "cleanup": bool},
        "Fuse": {},
        "Metaspace": _METASPACE,
        "Replace": {"pattern": _Pattern, "content": str},
        "Strip": {"content": str, "start": int, "stop": int},
        "WordPiece": {"prefix": str, "cleanup": bool},
    },
)
_Model: Any = _structs(
    "Model",
    {
        "BPE": {
            "dropout": float | None,
            "unk_token": str | None,
            "continuing_subword_prefix": str | None,
            "end_of_word_suffix": str | None,
            "fuse_unk": bool,
            "byte_fallback": bool,
            "ignore_merges": bool,
            "vocab": _Vocabulary,
            "merges": Annotated[list[str | tuple[str, str]], _Entries],
        },
        "Unigram": {
            "unk_id": int | None,
            "vocab": Annotated[list[tuple[str, float]], _Entries],
            "byte_fallback": bool,
        },
        "WordLevel": {"vocab": _Vocabulary, "unk_token": str},
        "WordPiece": {
            "unk_token": str,
            "continuing_subword_prefix": str,
            "max_input_chars_per_word": int,
            "vocab": _Vocabulary,
        },
    },
)


class _AddedToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


_NULL = msgspec.Raw(b"null")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: _Model
    version: str = "1.0"
    # Read so that files which have them parse, and left out: a call says itself whether it pads or truncates.
    truncation: msgspec.Raw = _NULL
    padding: msgspec.Raw = _NULL
    added_tokens: Annotated[list[_AddedToken], msgspec.Meta(max_length=MAX_EXTRA)] = []
    normalizer: _Normalizer | None = None
    pre_tokenizer: _PreTokenizer | None = None
    post_processor: _PostProcessor | None = None
    decoder: _Decoder | None = None


def safe_tokenizer(data: bytes) -> str:
    """A peer's ``tokenizer.json`` with what is known and bounded, for ``tokenizers.Tokenizer.from_str``.

    Raises:
        ModelMismatch: it holds an unknown rule or field, one that makes texts more than ``MAX_GROWTH`` times
            longer, or one that is random.
    """
    try:
        file = decode_json(_with_model_type(data), _File)
    except UNREADABLE as error:
        raise _refused(str(error)[:200]) from error
    _check_vocabulary(file)
    _check_patterns(file)
    growth = _growth(_list(file.normalizer, "normalizers")) * _growth(
        _list(file.pre_tokenizer, "pretokenizers")
    )
    if getattr(file.model, "byte_fallback", False) is True:
        growth *= BYTES_OF_CHARACTER
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):  # which go into the bytes as well
            growth *= 1 + len((getattr(file.model, name, None) or "").encode())
    if growth > MAX_GROWTH:
        raise _refused(f"its rules can make a text {growth:.0f} times longer; {MAX_GROWTH} is the limit")
    decoded = _growth(_list(file.decoder, "decoders"))
    if decoded > MAX_GROWTH:
        raise _refused(f"its decoder can make a text {decoded:.0f} times longer; {MAX_GROWTH} is the limit")
    for rule in _list(file.pre_tokenizer, "pretokenizers"):
        if type(rule).__struct_config__.tag == "FixedLength" and not (rule.length or 0) > 0:
            raise _refused("it cuts a text into pieces of no length")
    added = sum(_added(rule) for rule in _list(file.post_processor, "processors"))
    if added > MAX_ADDED:
        raise _refused(f"it puts {added} special tokens around a text; {MAX_ADDED} is the limit")
    return msgspec.json.encode(msgspec.structs.replace(file, truncation=_NULL, padding=_NULL)).decode()


def _refused(why: str) -> ModelMismatch:
    return ModelMismatch(
        f"the executor's tokenizer.json is refused: {why}. Load a tokenizer that you trust with "
        "AutoTokenizer.from_pretrained"
    )


def _with_model_type(data: bytes) -> bytes:
    """Files of early versions do not say that their model is BPE."""
    raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(raw.get("model", b"{}"), type=dict[str, msgspec.Raw])
    if "type" in model or "merges" not in model:
        return data
    model["type"] = msgspec.Raw(b'"BPE"')
    raw["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(raw)


def _check_vocabulary(file: _File) -> None:
    vocabulary = file.model.vocab
    if vocabulary is UNSET:
        raise _refused("it has no vocabulary")
    tokens: Iterable[str] = vocabulary if isinstance(vocabulary, dict) else (token for token, _ in vocabulary)
    identities = [
        *(vocabulary.values() if isinstance(vocabulary, dict) else ()),
        *(token.id for token in file.added_tokens),
    ]
    longest = max(map(len, (*tokens, *(token.content for token in file.added_tokens))), default=0)
    if longest > MAX_TOKEN:
        raise _refused(f"a token of {longest} characters; {MAX_TOKEN} is the limit")
    check_letters(token.content for token in file.added_tokens)
    if not isinstance(vocabulary, dict) and _trie_nodes(token for token, _ in vocabulary) > MAX_TRIE_NODES:
        raise _refused("its vocabulary's tokens are long and have little in common")
    max_identity = 2 * (len(vocabulary) + len(file.added_tokens)) + MAX_HOLES
    if not 0 <= min(identities, default=0) <= max(identities, default=0) <= max_identity:
        raise _refused(f"its tokens' ids have holes: one is not from 0 to {max_identity}")
    _check_merges(file.model)
    for rule in _list(file.decoder, "decoders"):
        if type(rule).__struct_config__.tag == "Strip" and not 0 <= (rule.start or 0) + (rule.stop or 0) <= 1:
            raise _refused("its decoder cuts more off a token than it may have")
    if getattr(file.model, "dropout", None) not in (None, UNSET, 0.0):
        raise _refused("its dropout makes tokens random")


def _check_patterns(file: _File) -> None:
    """Refuse expressions that are long: the library compiles some 5,000 times as many bytes."""
    rules = [
        *_list(file.normalizer, "normalizers"),
        *_list(file.pre_tokenizer, "pretokenizers"),
        *_list(file.decoder, "decoders"),
    ]
    patterns = (getattr(rule, "pattern", UNSET) for rule in rules)
    length = sum(len(each.Regex or "") for each in patterns if isinstance(each, _Pattern))
    if length > MAX_PATTERN:
        raise _refused(f"its regular expressions have {length} characters; {MAX_PATTERN} is the limit")


def check_letters(tokens: Iterable[str]) -> None:
    """Refuse special tokens that are too long together: searching for them takes a table of all letters.

    Raises:
        ModelMismatch: they are.
    """
    letters = sum(map(len, tokens))
    if letters > MAX_LETTERS:
        raise _refused(f"its special tokens have {letters} characters; {MAX_LETTERS} is the limit")


def _trie_nodes(tokens: Iterable[str]) -> int:
    """How many beginnings tokens have, each counted once."""
    ordered = sorted(token.encode() for token in tokens)
    # Letter by letter is what is wanted here.
    shared = (len(commonprefix(pair)) for pair in itertools.pairwise(ordered))  # noqa: RUF071
    return sum(map(len, ordered)) - sum(shared)


def _check_merges(model: Any) -> None:
    """The library cuts a prefix off the second half of a merge unchecked, also through a letter.

    Raises:
        ModelMismatch: a half that does not begin with it.
    """
    prefix = getattr(model, "continuing_subword_prefix", None)
    if not isinstance(prefix, str) or not prefix:
        return
    for merge in getattr(model, "merges", None) or ():
        second = merge[1] if isinstance(merge, tuple) else merge.partition(" ")[2]
        if not second.startswith(prefix):
            raise _refused("a merge whose second half does not begin with the prefix of such")


def _list(rule: Any, field: str) -> list[Any]:
    """The rules of a sequence, or the single one."""
    if rule is None:
        return []
    several = getattr(rule, field, None)
    return [rule] if several is None else [] if several is UNSET else several


def _growth(rules: list[Any]) -> float:
    """How many times longer rules can make a text, one after the other."""
    growth, form = 1.0, 1
    for rule in rules:
        kind = type(rule).__struct_config__.tag
        if kind in _FORMS:
            # One after the other they come to a form that stays, so only the largest counts.
            growth *= max(1.0, _FORMS[kind] / form)
            form = max(form, _FORMS[kind])
        elif kind not in _KEEPS_FORM:
            form = 1  # it may put in characters that are in no form
        if kind == "BertNormalizer":
            growth *= 3  # it puts spaces around characters, every time
        elif kind == "ByteLevel":
            growth *= BYTES_OF_CHARACTER + (getattr(rule, "add_prefix_space", False) is True)
        elif kind == "Precompiled":
            growth *= _longest_of_charsmap(rule.precompiled_charsmap)
        elif kind == "Prepend":
            if not rule.prepend:
                raise _refused("a rule of it would match nothing")
            growth *= 1 + len(rule.prepend)
        elif kind == "Metaspace":
            growth *= 1 + max(len(getattr(rule, name) or "") for name in ("replacement", "str_rep"))
        elif kind == "Replace":
            growth *= _growth_of_replace(rule)
        elif kind == "BPEDecoder":
            growth *= 1 if rule.suffix else 2
        elif kind == "WordPiece":
            growth *= 2
        elif kind == "CTC":
            growth *= 1 if rule.word_delimiter_token and rule.pad_token else 2
    return growth


def _growth_of_replace(rule: Any) -> float:
    pattern, content = rule.pattern or _Pattern(), rule.content or ""
    if not pattern.String if pattern.Regex is UNSET else not _consumes(pattern.Regex):
        raise _refused(f"a rule of it may match nothing, or cannot be told to: {pattern.Regex or ''!r:.80}")
    return max(1.0, len(content) / len(pattern.String or "x"))


def _consumes(pattern: str) -> bool:
    """Whether a regular expression is one of the simple ones that match at least one character."""
    for branch in pattern.split("|"):
        parts = list(_PART.finditer(branch))
        if "".join(part[0] for part in parts) != branch or not any(
            part["one"] and _ONCE_OR_MORE.fullmatch(part["times"] or "") for part in parts
        ):
            return False
    return True


def _longest_of_charsmap(encoded: Any) -> int:
    """The longest replacement in SentencePiece's table: a trie's size, the trie, strings that end with 0.

    Raises:
        ModelMismatch: following the trie would leave it, or the strings, which the library does not check.
    """
    try:
        blob = base64.b64decode(encoded or "", validate=True)
        size = int.from_bytes(blob[:4], "little")
        trie, strings = np.frombuffer(blob[4 : 4 + size], "<u4").astype(np.int64), blob[4 + size :]
        text = strings.decode()
    except ValueError as error:
        raise _refused(f"its table of characters is damaged: {error}") from error
    # A double array: from unit i a byte c leads to unit i ^ offset ^ c, and a word's end to i ^ offset, which
    # holds where its replacement begins. Units with the highest bit hold such places and lead nowhere.
    at, units = np.flatnonzero(trie < 1 << 31), trie[trie < 1 << 31]
    bases = at ^ (units >> 10 << ((units & 1 << 9) >> 6))
    ends = bases[units >> 8 & 1 == 1]
    if not len(trie) or trie[0] >= 1 << 31 or (bases | 255).max(initial=0) >= len(trie):
        raise _refused("its table of characters leads out of itself")
    starts = np.array([*np.flatnonzero(np.frombuffer(strings, np.uint8) & 0xC0 != 0x80), len(strings)])
    if not np.isin(trie[ends] & (1 << 31) - 1, starts).all():
        raise _refused("its table of characters leads out of its strings")
    return max(map(len, (*text.split("\0"), " ")))


def _added(rule: Any) -> int:
    """How many special tokens a post-processor puts around two texts.

    Raises:
        ModelMismatch: it leaves a text out or repeats it.
    """
    kind = type(rule).__struct_config__.tag
    if kind != "TemplateProcessing":
        return 4
    special = {name: len(token.ids) for name, token in (rule.special_tokens or {}).items()}
    for pieces, texts in ((rule.single or [], ["A"]), (rule.pair or [], ["A", "B"])):
        if sorted(piece.Sequence.id for piece in pieces if piece.Sequence is not UNSET) != texts:
            raise _refused("its template does not hold each text once")
    pieces = [*(rule.single or []), *(rule.pair or [])]
    named = [piece.SpecialToken.id for piece in pieces if piece.SpecialToken is not UNSET]
    if not special.keys() >= set(named):
        raise _refused("its template names a special token that it does not have")
    return sum(special[name] for name in named)
