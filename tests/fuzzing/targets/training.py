"""Files of the tenant's: profiles, data to train on, and folders of adapters that others have made."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fuzzing.oracle import SEPARATOR, Finding, Target, parts_of
from fuzzing.targets.files import folder, written
from shared.encoded import UNREADABLE
from tenant_sdk.session.profiles import names_in, read_profile
from tenant_sdk.storage import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tenant_sdk.tuning.adapter_config import read_adapter_config
from tenant_sdk.tuning.conversations import IGNORE_INDEX, Conversations
from tenant_sdk.tuning.patterns import without_patterns
from tenant_sdk.tuning.records import check_data, find_conversations, read_text, records_of
from tenant_sdk.tuning.untrusted_adapter import copy_and_check


def profile(data: bytes) -> None:
    """A profile, and how messages name its options."""
    path = written("x.toml", data)
    path.chmod(0o600)
    found = read_profile(path)
    for name, show in names_in(path, found, {}).items():
        show(found.get(name))


def records(data: bytes) -> None:
    """JSONL or text."""
    _data(written("x.jsonl" if data[:1] < b"\x80" else "x.txt", data[1:]))


def table(data: bytes) -> None:
    """CSV, or with tabs."""
    _data(written("x.csv" if data[:1] < b"\x80" else "x.tsv", data[1:]))


def parquet(data: bytes) -> None:
    """A Parquet file, which a process of its own reads; so no coverage guides it."""
    _data(written("x.parquet", data))


def _data(path: Path) -> None:
    check_data([path])
    find_conversations([path])


def conversation(data: bytes) -> None:
    """Tokens of a record, by several templates: what is learned is a part of what is there."""
    path = written("chat.jsonl", data)
    for place, record in records_of(path, read_text(path)):
        if record.messages is None:
            record.characters()
            continue
        for template in _TEMPLATES:
            tokenizer = _tokenizer()
            tokenizer.chat_template = template
            made = Conversations(tokenizer, ends=[1], length=512)
            for example in made.examples(record.messages, record.tools or None, f"line {place}"):  # type: ignore[arg-type]
                pairs = zip(example["input_ids"], example["labels"], strict=True)
                if any(label not in (IGNORE_INDEX, token) for token, label in pairs):
                    raise Finding("another token is learned than is there")


_TEMPLATES = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}",
)


@cache
def _tokenizer() -> Any:
    """A tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate(("<unk>", "</s>", *alphabet))}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", unk_token="<unk>")


@cache
def _model() -> Any:
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def adapter_config(data: bytes) -> None:
    """The configuration in an adapter's folder."""
    read_adapter_config(written(f"config/{ADAPTER_CONFIG}", data).parent, _model())


def adapter(data: bytes) -> None:
    """The folder of an adapter: refused, or it fits, and the model is as it was."""
    config, weights = parts_of(data, 2)
    source = written(f"adapter/{ADAPTER_CONFIG}", config).parent
    written(f"adapter/{ADAPTER_WEIGHTS}", weights)
    copy = folder() / "received"
    copy.mkdir(exist_ok=True)
    for left in copy.iterdir():
        left.unlink()
    model = _model()
    before = [name for name, _ in model.named_modules()]
    try:
        copy_and_check(source, copy, model)
    finally:
        if before != [name for name, _ in model.named_modules()] or hasattr(model, "peft_config"):
            raise Finding("the model has changed")


def patterns(data: bytes) -> None:
    """Patterns of an adapter's; time stands still, so that none takes too long."""
    try:
        given = msgspec.json.decode(data, type=_Patterns)
    except UNREADABLE:
        return
    names = [name for name, _ in _model().named_modules()]
    found = {key: value for key, value in msgspec.structs.asdict(given).items() if value is not None}
    made = without_patterns(found, names, Path("x"))
    again = without_patterns(made, names, Path("x"))
    if again.keys() != made.keys():
        raise Finding("a configuration without patterns has other keys")


class _Patterns(msgspec.Struct):
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    layers_pattern: str | list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None


# -- seeds -----------------------------------------------------------------------------------------


def _profiles() -> list[bytes]:
    whole = b"""provider = "wss://localhost:8765"
ca = "certs/ca.pem"
token_env = "TOKEN"
privacy = "masked"
timeout = 5.0
client_certificate = ["a.pem", "b.pem"]
[[mask_sources]]
url = "wss://other:8765"
token_command = ["pass", "x"]
[[mask_sources]]
url = "local:checkpoint"
ca = "system"
"""
    return [
        whole,
        b'provider = ["wss://a", "wss://b"]\ntoken_file = "x"\n',
        b'mask_sources = [{url = "wss://a"}]\n',
    ]


_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1]}}}
_CHAT: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "Ruth.", "weight": 1},
    {"role": "user", "content": [{"type": "text", "text": "When?"}]},
    {"role": "assistant", "tool_calls": [_CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "1", "name": "f"},
    {"role": "assistant", "content": "Now.", "reasoning_content": "x"},
]
_TURNS = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Ruth."}]
_TOOLS = [{"type": "function", "function": {"name": "f"}}]
_RECORDS: list[Any] = [
    {"text": "x"},
    {"prompt": "a", "completion": "b", "score": 1},
    {"messages": _CHAT, "tools": json.dumps(_TOOLS)},
    {"conversations": _TURNS, "system": "x"},
    {"instruction": "a", "input": "b", "output": "c"},
]


def _records() -> list[bytes]:
    lines = [json.dumps(each).encode() for each in _RECORDS]
    return [b"\0" + line for line in lines] + [b"\xff" + b"\n".join(lines), b"\xffPlain text.\r\n"]


def _tables() -> list[bytes]:
    cell = json.dumps(_TURNS).replace('"', '""')
    return [
        b'\0\xef\xbb\xbfprompt, completion ,note\n"a, b",c,\n\n"two\nlines","say ""so""",x\n',
        f'\0conversations,system\n"{cell}",x\n'.encode(),
        b"\0instruction,input,output\nWho?,,Ruth.\n",
        b"\xffprompt\tcompletion\na, b\tc\n",
    ]


@cache
def _parquets() -> list[bytes]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        return [b"PAR1"]
    found = []
    for rows in ([{"text": "a"}, {"text": None}], [{"messages": _CHAT[1:3]}]):
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, store_schema=False)
        found.append(sink.getvalue())
    return found


def _conversations() -> list[bytes]:
    plain = [message for message in _CHAT if message["role"] != "tool" and "tool_calls" not in message]
    found: list[Any] = [{"messages": plain[:3]}, {"messages": _CHAT[1:6]}, {"conversations": _TURNS}]
    found += [{"messages": _CHAT, "tools": _TOOLS}]
    return [json.dumps(each).encode() for each in found]


def _configs() -> list[dict[str, Any]]:
    lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4}
    lora |= {"target_modules": ["q_proj", "v_proj"], "bias": "none", "rank_pattern": {"v_proj": 1}}
    ia3 = {
        "peft_type": "IA3",
        "task_type": "CAUSAL_LM",
        "target_modules": "all-linear",
        "feedforward_modules": [],
    }
    prompt = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 2}
    prefix = {"peft_type": "PREFIX_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 2}
    oft = {"peft_type": "OFT", "oft_block_size": 4, "r": 0, "target_modules": ["q_proj"]}
    lokr = {"peft_type": "LOKR", "r": 2, "target_modules": r".*\.q_proj", "decompose_factor": 2}
    ada = {"peft_type": "ADALORA", "init_r": 2, "target_r": 1, "target_modules": ["q_proj"], "total_step": 9}
    vera = {"peft_type": "VERA", "r": 2, "target_modules": ["q_proj"], "save_projection": True}
    return [lora, ia3, prompt, prefix, oft, lokr, ada, vera]


def _adapter_configs() -> list[bytes]:
    return [json.dumps(each).encode() for each in _configs()]


@cache
def _adapters() -> list[bytes]:
    config = {key: value for key, value in _configs()[0].items() if key != "rank_pattern"}
    with _unchanged():
        plain = {key: value for key, value in config.items() if key not in ("peft_type",)}
        model: Any = get_peft_model(_model(), LoraConfig(**plain))
        from peft import get_peft_model_state_dict

        state = {name: each.detach().clone() for name, each in get_peft_model_state_dict(model).items()}
        model.unload()
    weights = save(state, {"format": "pt"})
    soft = save({"prompt_embeddings": torch.zeros(2, 8)})
    given = [(config, weights), (_configs()[2], soft), (_configs()[1], weights)]
    return [json.dumps(each).encode() + SEPARATOR + tensors for each, tensors in given]


@contextmanager
def _unchanged() -> Any:
    model = _model()
    yield
    vars(model).pop("peft_config", None)
    model.requires_grad_(True)


def _pattern_seeds() -> list[bytes]:
    found: list[Any] = [
        {"target_modules": r".*\.(q|v)_proj", "exclude_modules": ["lm_head"]},
        {"rank_pattern": {r"layers\.\d\..*": 2, "q_proj": 4, "^mod.*v_.*": 1}, "layers_pattern": "layers"},
        {"target_modules": "all-linear", "trainable_token_indices": {"embed_tokens": [1, 2]}},
    ]
    return [json.dumps(each).encode() for each in found]


_TOML = (
    b"[[mask_sources]]",
    b"= [",
    b'"""',
    b"\n",
    b"token_env",
    b"ca = ",
    b"inf",
    b"nan",
    b"1979-05-27",
    b"'\\u0000'",
)
_TOML += (
    b'"~root/x"',
    b'"\\u0000"',
    b'"~x\\u0000"',
    b"[privacy]",
    b"a.b.c = 1",
    b"profile = ",
    b'url = ""',
    b"..",
)
_DATA = (
    b"role",
    b"content",
    b"weight",
    b"tool_calls",
    b"arguments",
    b"function",
    b"name",
    b"messages",
    b"text",
    b"tools",
)
_DATA += (
    b"reasoning",
    b"thinking",
    b"user",
    b"assistant",
    b"system",
    b"tool",
    b"function_call",
    b"chosen",
    b"loss",
)
_CELLS = (
    b'"',
    b'""',
    b",",
    b"\t",
    b"\r",
    b"\n",
    b"\xef\xbb\xbf",
    b"messages",
    b"text",
    b"conversations",
    b"[]",
    b"{",
)
_PEFT = (
    b"LORA",
    b"LOHA",
    b"P_TUNING",
    b"modules_to_save",
    b"lm_head",
    b"embed_tokens",
    b"target_parameters",
    b"use_dora",
)
_PEFT += (
    b"layers_to_transform",
    b"layers_pattern",
    b"SEQ_CLS",
    b"encoder_hidden_size",
    b"lora_only",
    b"all",
    b"model",
)
_PEFT += (
    b"exclude_modules",
    b"alora_invocation_tokens",
    b"trainable_token_indices",
    b"init_lora_weights",
    b"eva",
    b"(?i)x",
)
_RECEIVED = (
    "tenant_sdk/tuning/received.py",
    "tenant_sdk/tuning/adapter_config.py",
    "tenant_sdk/tuning/patterns.py",
)
_RECORDS_OF = ("tenant_sdk/tuning/records.py", "tenant_sdk/tuning/tables.py")
TARGETS: Sequence[Target] = (
    Target(
        *("profile", profile, _profiles, ("tenant_sdk/session/profiles.py", "shared/options.py")),
        words=_TOML,
    ),
    Target("records", records, _records, _RECORDS_OF[:1], words=_DATA),
    Target("table", table, _tables, _RECORDS_OF, words=_CELLS),
    Target("parquet", parquet, _parquets, (*_RECORDS_OF, "tenant_sdk/tuning/parquet.py")),
    Target(
        *("conversation", conversation, _conversations),
        ("tenant_sdk/tuning/conversations.py", "tenant_sdk/tuning/message_parts.py"),
        words=_DATA,
    ),
    Target("adapter_config", adapter_config, _adapter_configs, _RECEIVED[1:], words=_PEFT),
    Target("adapter", adapter, _adapters, _RECEIVED, words=_PEFT, divided=True),
    Target("patterns", patterns, _pattern_seeds, _RECEIVED[2:], words=_PEFT),
)
