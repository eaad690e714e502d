"""A hostile tokenizer: it reads no file of the tenant's, and makes no text much longer."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from conftest import Executor
from hostile_files import (
    BYTE_LEVEL,
    RULES,
    SECRET,
    TEXT,
    changed,
    charsmap,
    nothing_opens,
    replace,
    sequence,
    template,
)
from real_tokenizers import real_tokenizer

from shared.errors import ConfigurationError, ModelMismatch
from tenant_sdk.model import tokenizer_file
from tenant_sdk.model.tokenizer import build_tokenizer
from tenant_sdk.model.tokenizer_file import MAX_GROWTH, safe_tokenizer

pytest_plugins = ("hostile_fixtures",)

Hostile = Callable[..., Executor]


# -- the tokenizer ----------------------------------------------------------------------------------


def test_an_executor_reads_no_file_of_the_tenant(hostile: Hostile, secret: Path, tmp_path: Path) -> None:
    """What a vocabulary file may be called, in place of a tokenizer.json."""
    evil = {"tokenizer_class": "BertTokenizer", "vocab": str(secret), "vocab_file": str(secret)}
    executor = hostile({"tokenizer.json": None, "tokenizer_config.json": json.dumps(evil).encode()})
    with (
        executor.connect() as session,
        nothing_opens(secret),
        pytest.raises(ConfigurationError, match=r"without tokenizer\.json"),
    ):
        session.load_tokenizer()
    executor = hostile({"tokenizer_config.json": json.dumps(evil).encode()})
    with executor.connect() as session, nothing_opens(secret):
        session.load_tokenizer().save_pretrained(tmp_path / "checkpoint-1")
    for file in (tmp_path / "checkpoint-1").iterdir():
        assert SECRET not in file.read_text()


def option_names() -> list[str]:
    """Every name that a tokenizer of transformers takes, and what its loader looks for."""
    import inspect

    names = {"tokenizer_class", "auto_map", "name_or_path", "init_inputs", "_commit_hash", "backend", "vocab"}
    names |= {
        "tokenizer_object",
        "tokenizer_file",
        "gguf_file",
        "added_tokens_file",
        "special_tokens_map_file",
    }
    names |= {"tokenizer_config_file", "chat_template_file", "post_processor", "_spm_precompiled_charsmap"}
    names |= {"_json_truncation", "_json_padding", "tokenizer_truncation", "tokenizer_padding", "use_fast"}
    names |= {
        "trust_remote_code",
        "fast_tokenizer_files",
        "processor_class",
        "added_tokens_decoder",
        "dropout",
    }
    for name in ("BertTokenizer", "GPT2Tokenizer", "LlamaTokenizer", "T5Tokenizer", "XLMRobertaTokenizer"):
        kind = getattr(transformers, name)
        names |= set(inspect.signature(kind.__init__).parameters) | set(kind.vocab_files_names)
    for kind in (transformers.PreTrainedTokenizerBase, transformers.PreTrainedTokenizerFast):
        names |= {name for name in vars(kind) if not name.startswith("__")}
    return sorted(names - {"self", "args", "kwargs"})


@pytest.mark.parametrize("kind", ["path", "dictionary", "list", "number", "switch"])
def test_every_option_of_every_tokenizer(kind: str, secret: Path) -> None:
    """None opens a file, and none changes what a text becomes."""
    value = {
        "path": str(secret),
        "dictionary": {"0": {"content": str(secret)}},
        "list": [[str(secret), str(secret)]],
        "number": 10**9,
        "switch": True,
    }[kind]
    expected = build_tokenizer({"tokenizer.json": RULES})(TEXT)["input_ids"]
    names = option_names()
    assert len(names) > 100
    refused = set()
    for name in names:
        with nothing_opens(secret):
            try:
                tokenizer = build_tokenizer(
                    {"tokenizer.json": RULES, "tokenizer_config.json": json.dumps({name: value}).encode()}
                )
                got = tokenizer(TEXT)["input_ids"]
            except (ModelMismatch, ValueError):
                refused.add(name)
                continue
        assert SECRET not in tokenizer.backend_tokenizer.to_str()
        assert got == expected, name
    assert len(refused) < 30


@pytest.mark.parametrize("name", ["smollm2", "mistral-v3", "base_model"])
@pytest.mark.parametrize("given", [True, False, None])
def test_what_is_added_to_a_text_is_as_transformers_reads_the_folder(
    name: str, given: bool | None, tmp_path: Path
) -> None:
    """The rules say it, also where options disagree."""
    real_tokenizer(name).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"add_bos_token": given, "add_eos_token": given})
    )
    ours = build_tokenizer({each.name: each.read_bytes() for each in tmp_path.iterdir()})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "", "Dose: 5"):
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]


def test_options_that_are_allowed_arrive() -> None:
    options = {
        "bos_token": "<s>",
        "pad_token": {"__type": "AddedToken", "content": "<pad>", "lstrip": False},
        "additional_special_tokens": ["<a>", {"content": "<b>"}],
        "model_max_length": 1000000000000000019884624838656,
        "padding_side": "left",
        "truncation_side": "left",
        "model_input_names": ["input_ids"],
        "chat_template": "{{ messages[0]['content'] }}!",
        "tokenizer_class": "LlamaTokenizerFast",
    }
    files = {"tokenizer.json": RULES, "tokenizer_config.json": json.dumps(options).encode()}
    tokenizer = build_tokenizer(files)
    assert (tokenizer.bos_token, tokenizer.pad_token) == ("<s>", "<pad>")
    assert tokenizer.extra_special_tokens == ["<a>", "<b>"]
    assert (tokenizer.padding_side, tokenizer.truncation_side) == ("left", "left")
    assert list(tokenizer("x")) == ["input_ids"]
    message = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(message, tokenize=False) == "hello!"
    files["chat_template.jinja"] = b"{{ messages[0]['role'] }}?"
    assert build_tokenizer(files).apply_chat_template(message, tokenize=False) == "user?"
    older = {"tokenizer.json": RULES, "special_tokens_map.json": b'{"eos_token": "</s>"}'}
    assert build_tokenizer(older).eos_token == "</s>"
    assert type(tokenizer).__name__ in dir(transformers)  # or what is saved could not be loaded


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer_config.json", b'{"padding_side": "middle"}'),
        ("tokenizer_config.json", b'{"model_max_length": -1}'),
        ("tokenizer_config.json", b'{"bos_token": 3}'),
        ("tokenizer_config.json", b'{"model_input_names": ["__class__"]}'),
        ("tokenizer_config.json", b"[" * 100_000),
        ("tokenizer_config.json", b"\xff"),
        ("special_tokens_map.json", b'{"eos_token": []}'),
        ("chat_template.jinja", b"\xff"),
        ("tokenizer.json", b""),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b'{"model": 3}'),
        ("tokenizer.json", b'{"model": {"type": "BPE"}}'),
        ("tokenizer.json", changed(normalizer={"type": "Custom"})),
        ("tokenizer.json", changed(normalizer={"type": "NFC", "path": "/etc/passwd"})),
        ("tokenizer.json", changed(path="/etc/passwd")),
        ("tokenizer.json", changed(normalizer={"type": "Precompiled", "precompiled_charsmap": "!"})),
        (
            "tokenizer.json",
            changed(pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "invert": False}),
        ),
        (  # the library compiles 20 kB for each class
            "tokenizer.json",
            changed(
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": r"\p{L}" * 1000},
                    "behavior": "Isolated",
                    "invert": False,
                }
            ),
        ),
    ],
)
def test_nonsense_is_a_mismatch(name: str, data: bytes) -> None:
    with pytest.raises(ModelMismatch):
        build_tokenizer({"tokenizer.json": RULES} | {name: data})


@pytest.mark.parametrize(
    "options",
    [
        {"pad_token": "x" * 5000},
        {"eos_token": {"content": "x" * 5000}},
        {"additional_special_tokens": ["x" * 5000]},
        {"chat_template": [{"name": "../../../x", "template": "x"}]},
        {"chat_template": [{"name": "x\x1b[31m", "template": "x"}]},
        {"chat_template": [{"name": "x" * 300, "template": "x"}]},
        {"chat_template": [{"name": "evil\n", "template": "x"}]},  # a name ends where it ends
    ],
)
def test_options_that_are_long_or_name_files(options: dict[str, Any]) -> None:
    with pytest.raises(ModelMismatch, match=r"tokenizer_config\.json is refused"):
        build_tokenizer({"tokenizer.json": RULES, "tokenizer_config.json": json.dumps(options).encode()})


# -- rules without bounds ---------------------------------------------------------------------------

LONG_FORM = "\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}"


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence(*[replace("a", "aa"), replace("b", "bb")] * 11)},
        {"normalizer": replace("a", "a" * 2000)},
        {"normalizer": replace("", "a" * 2000)},
        {"normalizer": sequence(*[replace("(?=.)", "x", "Regex")] * 22)},
        {"normalizer": sequence(*[{"type": "Prepend", "prepend": "ab"}] * 22)},
        {"normalizer": charsmap(b"x" * 2000)},
        {"normalizer": sequence(*[charsmap(b"xyz")] * 8)},
        {"normalizer": sequence(*[{"type": "ByteLevel"}] * 22)},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL] * 22}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "str_rep": "x" * 2000}},
        {"decoder": {"type": "Sequence", "decoders": [replace("a", "aa")] * 22}},
        {"decoder": replace("", "x" * 2000)},
        {"post_processor": template(*[("Sequence", "A")] * 2)},
        {"post_processor": template(("SpecialToken", "<s>"))},
        {"post_processor": template(("Sequence", "A"), *[("SpecialToken", "<s>")] * 100)},
        {"post_processor": template(("SpecialToken", "<s>"), ("Sequence", "A"), tokens=1000)},
        {
            "post_processor": {
                "type": "Sequence",
                "processors": [template(("Sequence", "A"))] * 2
                + [{"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]}] * 30,
            }
        },
        {"added_tokens": [{"id": 0, "content": "x" * 5000}]},
        {"added_tokens": [{"id": 1 << 40, "content": "x"}]},
        {"model": {"type": "WordLevel", "vocab": {"x" * 5000: 0}, "unk_token": "x"}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "dropout": 0.5}},
        # These grow only in company.
        {"normalizer": sequence({"type": "NFKD"}, *[replace("a", LONG_FORM), {"type": "NFKD"}] * 3)},
        {"normalizer": sequence(*[{"type": "BertNormalizer"}] * 7)},
        {"decoder": {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 24}},
        {
            "decoder": {
                "type": "Sequence",
                "decoders": [{"type": "CTC", "pad_token": "x", "word_delimiter_token": "", "cleanup": False}]
                * 24,
            }
        },
        {
            "model": {
                "type": "BPE",
                "vocab": {"a": 0},
                "merges": [],
                "byte_fallback": True,
                "continuing_subword_prefix": "x" * 2000,
            }
        },
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTE_LEVEL, {"type": "FixedLength"}]}},
        {
            "post_processor": {
                "type": "TemplateProcessing",
                "pair": [],
                "single": [
                    {"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}},
                ],
                "special_tokens": {},
            }
        },
        # These end the process, or were counted too low.
        {
            "model": {
                "type": "BPE",
                "vocab": {"a": 0, "é": 1},
                "merges": [["a", "é"]],
                "continuing_subword_prefix": "#",
            }
        },
        {
            "decoder": {
                "type": "Sequence",
                "decoders": [{"type": "WordPiece", "prefix": "z", "cleanup": False}] * 11,
            }
        },
        {"decoder": {"type": "Strip", "content": "a", "start": 1, "stop": 1}},
        {"normalizer": replace("", "x" * 1023, "Regex")},
        {"normalizer": replace("", "x" * 1023)},
    ],
)
def test_rules_that_grow_are_random_or_end_the_process_are_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(ModelMismatch, match=r"tokenizer\.json is refused"):
        build_tokenizer({"tokenizer.json": changed(**parts)})


def test_a_text_of_seven_characters_stays_short(hostile: Hostile) -> None:
    """22 rules made millions of tokens of it."""
    bomb = sequence(*[replace("a", "aa")] * 22)
    with (
        hostile({"tokenizer.json": changed(normalizer=bomb)}).connect() as session,
        pytest.raises(ModelMismatch, match="16777216 times longer; 1024 is the limit"),
    ):
        session.load_tokenizer()


def test_padding_and_truncation_are_the_callers() -> None:
    """A fixed padding would make a row of every request what a provider likes."""
    padding = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": 10**6, "pad_id": 0}
    padding |= {"pad_type_id": 0, "pad_token": "<pad>"}
    truncation = {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    data = changed(padding=padding, truncation=truncation)
    tokenizer = build_tokenizer({"tokenizer.json": data, "tokenizer_config.json": b'{"pad_token": "<pad>"}'})
    expected = build_tokenizer({"tokenizer.json": RULES})(TEXT)["input_ids"]
    assert tokenizer(TEXT)["input_ids"] == tokenizer(TEXT, padding=True)["input_ids"] == expected
    assert tokenizer.backend_tokenizer.encode(TEXT).ids == expected


def unit(label: int = 0, offset: int = 0, *, leaf: bool = False) -> int:
    return offset << 10 | leaf << 8 | label


@pytest.mark.parametrize(
    ("trie", "strings", "refused"),
    [
        ({}, b"x\0", False),
        ({0: unit(offset=1), 96: unit(97, 2, leaf=True), 98: 1 << 31}, b"x\0", False),  # a becomes x
        ({0: unit(offset=1), 96: unit(97, 2, leaf=True), 98: 1 << 31 | 1}, b"\xc3\xa9\0", True),
        (
            {0: unit(offset=1), 96: unit(97, 2, leaf=True), 98: 1 << 31 | 9},
            b"x\0",
            True,
        ),  # behind them
        ({0: unit(offset=1), 96: unit(97, 1 << 12)}, b"x\0", True),  # out of the trie
        ({0: unit(offset=256)}, b"x\0", True),
        ({0: 1 << 31 | unit(offset=1)}, b"x\0", True),  # a root that says it is the end of a word
        ({}, b"\xff\0", True),
    ],
)
def test_a_compiled_table_cannot_lead_out_of_itself(
    trie: dict[int, int], strings: bytes, refused: bool
) -> None:
    """The library follows it unchecked, and what is not there ends the process."""
    units = [trie.get(at, 0) for at in range(256)]
    rule = charsmap(strings.rstrip(b"\0"), trie=struct.pack("<256I", *units))
    files = {"tokenizer.json": changed(normalizer=rule)}
    if refused:
        with pytest.raises(ModelMismatch, match="its table of characters"):
            build_tokenizer(files)
    else:
        normalized = build_tokenizer(files).backend_tokenizer.normalizer.normalize_str("banana")
        assert normalized == ("bxnxnx" if trie else "banana")


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_unicode_makes_no_character_longer_than_is_counted(form: str) -> None:
    """All of Unicode, with lower case before and after: the bound that all forms together are given."""
    from tokenizers import normalizers

    lower, shape = normalizers.Lowercase(), getattr(normalizers, form)()
    both = normalizers.Sequence([lower, shape, lower, shape])
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    # Between letters, so that lengths add up: no form joins these across a line's end.
    found = both.normalize_str("\n".join(characters)).split("\n")
    assert max(map(len, found)) <= tokenizer_file._FORMS[form]


# What tokenizers of known families hold; their vocabularies do not matter here.
_ADDED = {
    "id": 0,
    "content": "<s>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama 2": {
        "normalizer": sequence({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
        "decoder": {
            "type": "Sequence",
            "decoders": [
                replace("▁", " "),
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {"<unk>": 0},
            "merges": [],
        },
    },
    "llama 3": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": "(?i:'s|'t)|\\p{N}{1,3}"},
                    "behavior": "Isolated",
                    "invert": False,
                },
                BYTE_LEVEL,
            ],
        },
        "post_processor": {
            "type": "Sequence",
            "processors": [BYTE_LEVEL, template(("SpecialToken", "<s>"), ("Sequence", "A"))],
        },
        "decoder": BYTE_LEVEL,
    },
    "qwen": {"normalizer": {"type": "NFC"}, "post_processor": BYTE_LEVEL},
    "gemma": {
        "normalizer": replace(" ", "▁"),
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
    },
    "t5": {
        "normalizer": sequence(charsmap(b"ffi", b" "), replace(" {2,}", "▁", "Regex")),
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "vocab": [["<unk>", 0.0], ["▁a", -1.5]],
            "byte_fallback": False,
        },
    },
    "xlnet": {
        "normalizer": sequence(
            replace("``", '"'),
            replace("''", '"'),
            {"type": "NFKD"},
            {"type": "StripAccents"},
            {"type": "Lowercase"},
            charsmap("صلى الله عليه وسلم".encode()),
            replace(" {2,}", " ", "Regex"),
        ),
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True},
    },
    "clip": {
        "normalizer": sequence({"type": "NFC"}, replace("\\s+", " ", "Regex"), {"type": "Lowercase"}),
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": ["</s>", 1],
            "cls": ["<s>", 0],
            "trim_offsets": False,
            "add_prefix_space": False,
        },
        "model": {
            "dropout": None,
            "unk_token": "a",
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "</w>",
            "fuse_unk": False,
            "vocab": {"a": 0, "b": 1, "ab": 2},
            "merges": ["a b"],
        },
    },
    "bert": {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {"[UNK]": 0},
        },
    },
    "marian": {"added_tokens": [_ADDED], "normalizer": None},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizers_in_use_are_accepted(family: str) -> None:
    data = changed(**FAMILIES[family])
    theirs, ours = (tokenizers.Tokenizer.from_str(text) for text in (data.decode(), safe_tokenizer(data)))
    assert (
        ours.encode(TEXT, add_special_tokens=False).ids == theirs.encode(TEXT, add_special_tokens=False).ids
    )
    assert ours.to_str() == theirs.to_str()


def test_every_rule_of_the_library_is_known_as_it_writes_it() -> None:
    """A version that adds a rule or a field fails here, and somebody looks at what it does."""
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    arguments: dict[str, tuple[Any, ...]] = {
        "Replace": ("a", "b"),
        "Prepend": ("▁",),
        "CharDelimiterSplit": (" ",),
        "Split": (" ", "isolated"),
        "BertProcessing": (("</s>", 1), ("<s>", 0)),
        "RobertaProcessing": (("</s>", 1), ("<s>", 0)),
        "Strip": (),
    }
    count = 0
    for part, module, base in (
        ("normalizer", normalizers, normalizers.Normalizer),
        ("pre_tokenizer", pre_tokenizers, pre_tokenizers.PreTokenizer),
        ("post_processor", processors, processors.PostProcessor),
        ("decoder", decoders, decoders.Decoder),
    ):
        for name, kind in vars(module).items():
            if not (isinstance(kind, type) and issubclass(kind, base)) or kind is base:
                continue
            if name in ("Sequence", "Precompiled"):
                continue
            tokenizer = tokenizers.Tokenizer(models.WordLevel({"a": 0}, "a"))
            setattr(tokenizer, part, kind(*arguments.get(name, ())))
            if name == "TemplateProcessing":
                tokenizer.post_processor = kind(single="$A", pair="$A $B", special_tokens=[])
            assert tokenizers.Tokenizer.from_str(safe_tokenizer(tokenizer.to_str().encode())).to_str() == (
                tokenizer.to_str()
            )
            count += 1
    assert count > 30


def test_how_often_a_rule_may_be_stacked_is_bounded_at_all() -> None:
    """The limit is on the product, so it is met by some number of any rule that makes texts longer."""
    for rule in (replace("a", "ab"), {"type": "Prepend", "prepend": "x"}, {"type": "ByteLevel"}):
        for count in itertools.count(1):
            try:
                safe_tokenizer(changed(normalizer=sequence(*[rule] * count)))
            except ModelMismatch:
                assert 2 ** (count - 1) <= MAX_GROWTH
                break
