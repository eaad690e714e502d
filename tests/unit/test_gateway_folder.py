"""The folder that vLLM loads, and the options of its session: prompts as training has them, whole paths."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from chat_templates import real_families
from commands import BASE_MODEL
from real_tokenizers import real_tokenizer
from test_real_templates import of_real_family
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from tenant_sdk.gateway import serving
from tenant_sdk.gateway.connection import read, written
from tenant_sdk.gateway.folder import WORD, content_format, tool_parser, without_end_token
from tenant_sdk.gateway.options import GatewayOptions
from tenant_sdk.session.options import SessionConfig

LISTS = ("idefics3", "llava_next", "smolvlm")  # write no content that is a text


@pytest.mark.parametrize("name", real_families())
def test_templates_get_contents_as_training_gives_them(name: str) -> None:
    """vLLM would give lists to templates that loop over contents, which some write as Python does."""
    tokenizer, _ = of_real_family(name)
    lists = name.removesuffix("_training") in LISTS
    assert content_format(tokenizer, None) == ("auto" if lists else "string")


def test_another_template_counts(tmp_path: Path) -> None:
    tokenizer, _ = of_real_family("smolvlm")
    (tmp_path / "other.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert content_format(tokenizer, tmp_path / "other.jinja") == "string"


@pytest.mark.parametrize("nested", [False, True])
def test_nothing_is_added_behind_a_text(nested: bool) -> None:
    """Some tokenizers end a text; an answer follows a prompt."""
    tokenizer = copy.deepcopy(real_tokenizer("smollm2"))
    begin, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    rules: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    special = [{"SpecialToken": {"id": token, "type_id": 0}} for token in ("<|im_start|>", "<|im_end|>")]
    text = [{"Sequence": {"id": each, "type_id": 0}} for each in "AB"]
    ids = {"<|im_start|>": begin, "<|im_end|>": end}
    processor: dict[str, Any] = {
        "type": "TemplateProcessing",
        "single": [special[0], text[0], special[1]],
        "pair": text,
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for name, i in ids.items()},
    }
    if nested:
        processor = {"type": "Sequence", "processors": [processor]}
    rules["post_processor"] = processor
    tokenizer.backend_tokenizer.post_processor = Tokenizer.from_str(json.dumps(rules)).post_processor
    whole = tokenizer(WORD)["input_ids"]
    assert (whole[0], whole[-1]) == (begin, end)
    assert without_end_token(tokenizer)(WORD)["input_ids"] == whole[:-1]


def test_a_tokenizer_without_such_rules_stays() -> None:
    tokenizer = copy.deepcopy(real_tokenizer("smollm2"))
    ids = tokenizer(WORD)["input_ids"]
    assert without_end_token(tokenizer)(WORD)["input_ids"] == ids


def test_paths_hold_in_another_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway leaves the directory in which it was started: others may have put files there."""
    monkeypatch.chdir(tmp_path)
    config = SessionConfig(
        provider="wss://a.example",
        ca="ca.pem",
        client_certificate=("client.pem", Path("client.key")),
        mask_sources=["local:model", "local:hub:a/b", "wss://b.example"],
        mask_source_ca=[None, None, "system"],
        fingerprints="prints",
    )
    here = os.getcwd()
    found = read(written(config))
    assert str(found.ca) == f"{here}/ca.pem"
    assert list(map(str, found.client_certificate or ())) == [f"{here}/client.pem", f"{here}/client.key"]
    assert list(found.mask_sources) == [f"local:{here}/model", "local:hub:a/b", "wss://b.example"]
    assert list(found.mask_source_ca or ()) == [None, None, "system"]  # type: ignore[arg-type]
    assert str(found.fingerprints) == f"{here}/prints"


@pytest.mark.parametrize("given", ["", ":", "/somewhere:"])
def test_no_process_looks_into_the_working_directory(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenCV, which vLLM imports, adds a colon and the old value to LD_LIBRARY_PATH."""
    monkeypatch.setattr(os, "environ", {**os.environ, "LD_LIBRARY_PATH": given})
    serving._set_environment(GatewayOptions(), tmp_path)
    assert os.environ["LD_LIBRARY_PATH"] == ("/somewhere" if "/" in given else str(tmp_path))
    assert os.environ["PYTHONSAFEPATH"] == "1"


def test_chats_wait_for_a_thread_without_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When vLLM's limit is over, it takes our threads, and with them the fair sharing, away."""
    monkeypatch.setattr(os, "environ", {**os.environ, "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT": "30"})
    serving._set_environment(GatewayOptions(), tmp_path)
    assert os.environ["VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT"] == "0"


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ messages }}", ""),
        ("<tool_call>{{ call | tojson }}</tool_call>", "hermes"),
        ("<tool_call><function={{ name }}>", "qwen3_xml"),
        ("<|python_tag|>{{ call }}", "llama3_json"),
        ("[TOOL_CALLS]{{ calls }}", "mistral"),
    ],
)
def test_how_a_template_writes_calls(template: str, parser: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    assert tool_parser(tokenizer, None) == ""  # it has no template
    (tmp_path / "t.jinja").write_text(template)
    assert tool_parser(tokenizer, tmp_path / "t.jinja") == parser
    tokenizer.chat_template = template
    assert tool_parser(tokenizer, None) == parser


@pytest.mark.parametrize(
    ("template", "parser"), [("<tool_call>{{ tools }}", "hermes"), ("<|python_tag|>{{ tools }}", "")]
)
def test_a_parser_that_takes_long_is_chosen_by_operators_alone(
    template: str, parser: str, tmp_path: Path
) -> None:
    """All clients wait for it."""
    (tmp_path / "t.jinja").write_text(template)
    said = list[str]()
    options = GatewayOptions(chat_template=tmp_path / "t.jinja")
    assert serving._tool_parser(options, AutoTokenizer.from_pretrained(BASE_MODEL), said.append) == parser
    assert any("parser llama3_json" in each for each in said) is (not parser)
