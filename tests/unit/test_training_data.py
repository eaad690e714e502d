"""Text files and JSONL records as examples: what is learned of them, what is said, and what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from shared.errors import ConfigurationError
from tenant_sdk.tuning.conversations import IGNORE_INDEX, Example
from tenant_sdk.tuning.data import (
    Reader,
    chat_prompt,
    collate,
    collate_packed,
    learned_tokens,
    prompt_tokens,
)
from tenant_sdk.tuning.records import check_data

BASE_MODEL = Path(__file__).parents[2] / "examples" / "base_model"
Write = Callable[..., Path]

# Each message between words of its own, and an end after answers.
TURNS = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
    "{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %} {{ m.content }}{% endif %}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Only the last answer keeps what was thought before it.
THINKING = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% if m.role == 'assistant' and loop.last %} so:{% endif %} {{ m.content }}{{ '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
OPENED = TURNS.replace("%}[assistant]{%", "%}[assistant] <think>{%")
SILENT = "{% for m in messages %}[{{ m.role }}]{% endfor %}"
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with user') }}{% endif %}" + TURNS
QUOTING = "{{ raise_exception('bad: ' + messages[0].content) }}"

CHAT = [
    {"role": "user", "content": "Who came?"},
    {"role": "assistant", "content": "Ruth came."},
    {"role": "user", "content": "And then?"},
    {"role": "assistant", "content": "She went up."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BASE_MODEL)


@pytest.fixture
def chat(tokenizer: Any) -> Callable[[str], Any]:
    def with_template(template: str) -> Any:
        own = AutoTokenizer.from_pretrained(BASE_MODEL)
        own.chat_template = template
        return own

    return with_template


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def records(*lines: Any, name: str = "data.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return records


def learned(example: Example, tokenizer: Any) -> str:
    assert len(example["labels"]) == len(example["input_ids"])
    pairs = zip(example["input_ids"], example["labels"], strict=True)
    assert all(label in (IGNORE_INDEX, token) for token, label in pairs)
    return str(tokenizer.decode([label for label in example["labels"] if label != IGNORE_INDEX]))


def test_completions_are_learned_and_end(tokenizer: Any, write: Write) -> None:
    path = write({"prompt": "Who came?\nAnswer:", "completion": " Ruth came.", "id": 7})
    (example,) = Reader(tokenizer, 64).read([path])
    assert tokenizer.decode(example["input_ids"]) == "<s>Who came?\nAnswer: Ruth came.</s>"
    assert learned(example, tokenizer) == " Ruth came.</s>"
    (example,) = Reader(tokenizer, 64, train_on_prompt=True).read([path])
    assert example["labels"] == example["input_ids"]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "<s>In the", "completion": " beginning</s>"},
        {"text": "<s>In the beginning</s>"},
        {"text": "In the beginning"},
    ],
)
def test_the_token_that_begins_a_text_is_there_once(record: Any, tokenizer: Any, write: Write) -> None:
    """Many data sets write it, and the tokenizer adds it."""
    (example,) = Reader(tokenizer, 64).read([write(record)])
    assert tokenizer.decode(example["input_ids"]) == "<s>In the beginning</s>"
    assert prompt_tokens(tokenizer, "<s>In the") == prompt_tokens(tokenizer, "In the")


def test_an_answer_follows_the_prompt_as_generate_has_it(tokenizer: Any, write: Write) -> None:
    """Together both halves of the word are other tokens."""
    (example,) = Reader(tokenizer, 64).read([write({"prompt": "and the L", "completion": "ORD"})])
    prompt = tokenizer("and the L")["input_ids"]
    assert tokenizer("and the LORD")["input_ids"][: len(prompt)] != prompt
    assert example["input_ids"][: len(prompt)] == prompt
    assert learned(example, tokenizer) == "ORD</s>"


def test_texts_are_learned_whole_and_long_ones_split(tokenizer: Any, write: Write) -> None:
    said: list[str] = []
    path = write({"text": "In the beginning"}, "", {"text": "and it was so " * 10}, name="notes.ndjson")
    examples = Reader(tokenizer, 16, notify=said.append).read([path])
    assert learned(examples[0], tokenizer) == "<s>In the beginning</s>"
    assert "".join(learned(each, tokenizer) for each in examples[1:]) == f"<s>{'and it was so ' * 10}</s>"
    assert all(len(each["input_ids"]) <= 16 for each in examples)
    assert (
        said[-1] == f"{path}: 1 of 2 records are longer than 16 tokens and were split: all of them is learned"
    )


def test_the_end_of_a_long_text_is_learned_though_it_would_be_alone(tokenizer: Any, write: Write) -> None:
    said: list[str] = []
    text = "and it was so " * 10
    tokens = len(tokenizer(text)["input_ids"])  # with the end of text
    for length in (2, 3, tokens - 1, *(n for n in range(4, tokens) if tokens % n == 1)):
        examples = Reader(tokenizer, length, notify=said.append).read([write({"text": text})])
        assert examples[-1]["labels"][-1] == tokenizer.eos_token_id
        assert all(2 <= len(each["input_ids"]) <= length for each in examples)
        assert said[-1].endswith(
            f"of 1 records are longer than {length} tokens and were split: all of them is learned"
        )


def test_long_answers_are_left_out_and_counted(tokenizer: Any, write: Write) -> None:
    said: list[str] = []
    short, long = ({"prompt": "Say:", "completion": " so" * n} for n in (2, 40))
    path = write(short, long, short)
    assert len(Reader(tokenizer, 16, notify=said.append).read([path])) == 2
    assert f"{path}: 1 of 3 records are longer than 16 tokens (the longest has" in said[-1]
    assert "left out; sequence_length" in said[-1]
    with pytest.raises(ConfigurationError, match="all are longer than 16 tokens"):
        Reader(tokenizer, 16).read([write(long)])


@pytest.mark.parametrize("template", [TURNS, MARKED])
def test_what_assistants_say_is_learned(template: str, chat: Callable[[str], Any], write: Write) -> None:
    tokenizer = chat(template)
    (example,) = Reader(tokenizer, 128).read([write({"messages": CHAT})])
    text = "<s>[user] Who came?\n[assistant] Ruth came.</s>\n[user] And then?\n[assistant] She went up.</s>"
    assert tokenizer.decode(example["input_ids"]) == text
    assert learned(example, tokenizer) == " Ruth came.</s> She went up.</s>"
    (example,) = Reader(tokenizer, 128, train_on_prompt=True).read([write({"messages": CHAT})])
    assert example["labels"] == example["input_ids"]


def test_answers_that_are_written_otherwise_later_are_examples_of_their_own(
    chat: Callable[[str], Any], write: Write
) -> None:
    tokenizer = chat(THINKING)
    examples = Reader(tokenizer, 128).read([write({"messages": CHAT})])
    assert [learned(each, tokenizer) for each in examples] == [" so: Ruth came.</s>", " so: She went up.</s>"]
    assert "[assistant] Ruth came." in tokenizer.decode(examples[1]["input_ids"])


PARTS = [{"type": "text", "text": "Zinc"}, {"type": "text", "text": "green."}]
CALL = {"type": "function", "function": {"name": "look_up", "arguments": '{"word": "zinc"}'}}


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"messages": [CHAT[0], {"role": "assistant", "content": PARTS}]}, "Who came?|Zinc\ngreen."),
        (
            {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Ruth."}]},
            "Who?|Ruth.",
        ),
        ({"conversations": CHAT[:2], "system": "Be short."}, "Be short.|Who came?|Ruth came."),
        ({"instruction": "Who came?", "input": "", "output": "Ruth."}, "Who came?|Ruth."),
        (
            {"instruction": "Say it", "input": "at once", "output": "So.", "system": "Be short."},
            "Be short.|Say it\nat once|So.",
        ),
        (
            {"messages": [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [CALL]}]},
            "Who came?|look_up(zinc)",
        ),
    ],
)
def test_other_forms_of_conversations(
    record: Any, text: str, chat: Callable[[str], Any], write: Write
) -> None:
    said: list[str] = []
    tokenizer = chat(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
        "({{ c.function.arguments.word }}){% endfor %}{{ '|' if not loop.last or add_generation_prompt }}"
        "{% endfor %}"
    )
    (example,) = Reader(tokenizer, 64, notify=said.append).read([write({**record, "id": 3})])
    assert tokenizer.decode(example["input_ids"]) == f"{text}</s>"
    assert learned(example, tokenizer) == text.rpartition("|")[2] + "</s>"
    assert said[-1].endswith("data.jsonl: these keys of its records are not read: id")
    assert "chat template" not in "".join(said)


def test_records_without_messages_for_a_model_with_a_chat_template(
    chat: Callable[[str], Any], write: Write
) -> None:
    said: list[str] = []
    reader = Reader(chat("{% for m in messages %}{{ m.content }}{% endfor %}"), 64, notify=said.append)
    reader.read([write({"prompt": "Who?", "completion": " I."})])
    assert "without the model's chat template" in said[-1]


ALL = (
    "{% for m in messages %}{{ m.reasoning }}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({{ c.function.arguments.word }}){% endfor %}"
    "{{ '|' if not loop.last or add_generation_prompt }}{% endfor %}"
)


def test_turns_of_sharegpt_keep_their_other_keys(chat: Callable[[str], Any], write: Write) -> None:
    tokenizer = chat(ALL)
    turns = [
        TURN,
        {"from": "gpt", "value": "Zinc.", "weight": 0},
        TURN,
        {"from": "gpt", "value": "Ruth.", "weight": 1, "reasoning": "Why", "tool_calls": [CALL]},
    ]
    (example,) = Reader(tokenizer, 64).read([write({"conversations": turns})])
    assert learned(example, tokenizer) == "WhyRuth.look_up(zinc)</s>"


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_keys_of_messages_that_are_not_read_are_named(
    key: str, chat: Callable[[str], Any], write: Write
) -> None:
    said: list[str] = []
    other = {"time": 3, "refusal": None, "audio": None, "function_call": None, "train": None, "name": "Ruth"}
    path = write(
        {key: [CHAT[0], {**CHAT[1], **other}, {"role": "tool", "content": "x", "tool_call_id": "a"}]}
    )
    Reader(chat(TURNS), 64, notify=said.append).read([path])
    assert (
        said[-1] == f"{path}: these keys of its messages are read by the chat template alone, if at all: time"
    )


def test_what_is_not_to_be_learned_contradicts_training_on_the_prompt(
    chat: Callable[[str], Any], write: Write
) -> None:
    path = write({"messages": [*CHAT[:2], CHAT[2], {**CHAT[3], "weight": 0}]})
    with pytest.raises(
        ConfigurationError, match=r"line 1: `weight`: 0 .* remove it, or train on answers alone"
    ):
        Reader(chat(TURNS), 64, train_on_prompt=True).read([path])


def test_tokens_that_the_model_does_not_know_are_refused(tokenizer: Any, write: Write) -> None:
    known = len(tokenizer)
    own = AutoTokenizer.from_pretrained(BASE_MODEL)
    own.add_tokens(["<new>"])
    fine, other = {"text": "a b c"}, {"text": "a <new> c"}
    assert len(Reader(own, 64, embeddings=known).read([write(fine)])) == 1
    with pytest.raises(ConfigurationError, match=f"line 2: the tokenizer makes <new> the token {known}, and"):
        Reader(own, 64, embeddings=known).read([write(fine, other)])


def test_a_prompt_in_the_chat_template(chat: Callable[[str], Any], tokenizer: Any) -> None:
    with_one = chat(TURNS)
    asked = [{"role": "user", "content": "Who?"}]
    assert with_one.decode(chat_prompt(with_one, asked)) == "<s>[user] Who?\n[assistant]"
    with pytest.raises(ConfigurationError, match="one with tokenizer=FOLDER, or use `generate` without"):
        chat_prompt(tokenizer, asked)


def test_files_are_told_apart_by_name_or_content(tokenizer: Any, write: Write) -> None:
    said: list[str] = []
    named = write(
        {"text": "a b c\u2028d"}, name="a.jsonl"
    )  # which other ways to take lines apart would break
    marked = write("\ufeff" + json.dumps({"text": "a b c"}), name="b.txt")
    plain = write('{"text": cut off', *["and so on"] * 20, name="c.txt")
    examples = Reader(tokenizer, 16, notify=said.append).read([named, marked, plain])
    assert [" 1 record, " in line for line in said] == [True, True, False]
    assert tokenizer.decode(examples[0]["input_ids"]) == "<s>a b c\u2028d</s>"
    assert said[2].startswith(f"{plain}: read as plain text, ")


SECRET = "Rex has the mange"
TURN = {"from": "human", "value": "Who came?"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f'{{"text": "{SECRET}', "truncated"),
        (f'"{SECRET}"', "Expected `object`, got `str`"),
        ({"text": [SECRET]}, r"Expected `str \| null`, got `array` - at `\$.text`"),
        ({"text": SECRET, "prompt": SECRET}, "this one has prompt and text"),
        ({"prompt": SECRET}, "this one has prompt$"),
        ({"prompt": "", "text": None}, "this one has prompt$"),
        ({"note": SECRET}, "this one has note$"),
        ({}, "this one has none of them$"),
        (
            {"promt": SECRET, "completion": SECRET},
            r"this one has completion and promt; did you mean `prompt`\?$",
        ),
        ({"Text": SECRET, "mesages": SECRET}, r"did you mean `messages` and `text`\?$"),
        ({"x" * 99 + str(n): 1 for n in range(9)}, f"this one has {'x' * 40} and .* and 1 more$"),
        ({"\x1b": 1, "prompt": SECRET}, r"this one has \? and prompt$"),
        ({"prompt": SECRET, "completion": ""}, "the completion is empty"),
        ({"text": ""}, "the text is empty"),
        ('{"text": "\\ud800x' + SECRET + '"}', "a line holds one record"),
        ("[" * 100_000, "a line holds one record"),
        ({"messages": []}, "not empty"),
        ({"messages": [{"content": SECRET}]}, "have a `role`"),
        ({"messages": CHAT[:1]}, "no turn of the role assistant"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": ""}]}, "an assistant's turn is empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, CHAT[1]]}, "images and sound are"),
        (
            {"messages": [{"role": "user", "content": {"a": SECRET}}, CHAT[1]]},
            "`content` must be a text, or a",
        ),
        *(
            (
                {"messages": [{"role": "user", "content": content}, CHAT[1]]},
                "`content` must be a text, or a list",
            )
            for content in (0, False, {}, None)
        ),
        ({"messages": [{"role": "user"}, CHAT[1]]}, "`content` must be a text, or a list of"),
        *(
            (
                {"messages": [CHAT[0], CHAT[1] | {"content": [{"type": "text", "text": SECRET} | part]}]},
                f"`{name}` of a part of",
            )
            for name, part in (("train", {"train": False}), ("weight", {"weight": 0}), ("mask", {"mask": 2}))
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": SECRET}]}, CHAT[1]]},
            "`content` must be a text, or a list of parts of the type `text`",
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "content": [{"type": "text"}]}]},
            "`content` must be a text, or a",
        ),
        (
            {"messages": [*CHAT, {**CHAT[1], "role": "Assistant"}]},
            r"`Assistant` .*did you mean `assistant`\?",
        ),
        ({"messages": [*CHAT, {**CHAT[1], "role": "asistant"}]}, r"`asistant` .*did you mean `assistant`\?"),
        ({"messages": [*CHAT, {**CHAT[1], "role": "gpt"}]}, r"`gpt` .*did you mean `assistant`\?"),
        ({"messages": [*CHAT, {**CHAT[1], "role": "narrator"}]}, "`narrator` is not known: it is one of"),
        ({"conversations": [{**CHAT[0], "role": "Human"}, CHAT[1]]}, r"`Human` .*did you mean `user`\?"),
        ({"conversations": [TURN, {"from": "GPT", "value": SECRET}]}, r"did you mean `gpt`\?"),
        (
            {"messages": [CHAT[0], {**CHAT[1], "tool_calls": [SECRET]}]},
            "`tool_calls` must be a list of objects",
        ),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0.5}]}, "`weight` of a message must be 1"),
        ({"messages": [CHAT[0], {**CHAT[1], "weight": 0}]}, "nothing to learn"),
        ({"conversations": [{"from": "narrator", "value": SECRET}]}, "a turn of `conversations` has `from`"),
        ({"messages": CHAT[1:]}, "no turn of the role assistant answers another turn"),
        (
            {"conversations": [TURN, {"from": "gpt", "value": SECRET, "weight": 7}]},
            "`weight` of a message must be",
        ),
        ({"conversations": [TURN, {"from": "gpt", "value": SECRET, "role": "user"}]}, "a turn of `conv"),
        ({"conversations": [TURN, {"from": "gpt", "value": SECRET, "train": False}]}, "`train` .* `weight`"),
        *(
            ({"messages": [CHAT[0], {**CHAT[1], name: False}]}, f"`{name}` .* `weight`: 0")
            for name in ("train", "training", "trainable", "loss", "loss_mask", "mask", "masked")
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "function_call": {"name": SECRET}}]},
            "`function_call` of a mess",
        ),
        ({"messages": [CHAT[0], {**CHAT[1], "refusal": SECRET}]}, "`refusal` of a message is not read"),
        ({"messages": [CHAT[0], {**CHAT[1], "audio": {"id": SECRET}}]}, "`audio` of a message is not read"),
        (
            {"messages": [CHAT[0], {**CHAT[1], "reasoning": [SECRET]}]},
            "each of `reasoning_content`, .* must be a text",
        ),
        (
            {"messages": [CHAT[0], {**CHAT[1], "tool_calls": [{"function": {}}]}]},
            "`tool_calls` must be a list of",
        ),
        *(
            ({"prompt": "a", "completion": SECRET, name: value}, f"`{name}` of a record is not obeyed")
            for name, value in (
                *(("label", False), ("label", "bad"), ("weight", 0), ("weight", 0.5), ("weight", [SECRET])),
                *(("train", False), ("loss_mask", [0, 1]), ("score", 0), ("score", SECRET), ("reward", -0.5)),
                *(("rejected", SECRET), ("chosen", [])),
            )
        ),
        ({"messages": CHAT, "weight": 0}, "`weight` of a record is not obeyed"),
    ],
)
def test_what_is_wrong_with_a_record(
    line: Any, message: str, chat: Callable[[str], Any], write: Write
) -> None:
    said: list[str] = []
    path = write({"text": "fine"}, "", line)
    with pytest.raises(ConfigurationError, match=message) as caught:
        Reader(chat(TURNS), 64, notify=said.append).read([path])
    assert f"{path}, line 3: " in str(caught.value)
    assert SECRET not in str(caught.value) + str(said)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (None, CHAT, "give a tokenizer that has one with tokenizer=FOLDER"),
        (STRICT, [{"role": "system", "content": SECRET}, *CHAT], "take the messages: begin with user"),
        (QUOTING, [{"role": "user", "content": SECRET}, CHAT[1]], "take the messages: TemplateError"),
        (SILENT, CHAT, "does not write the whole conversation"),
    ],
)
def test_templates_that_do_not_do(
    template: str | None,
    messages: Any,
    message: str,
    chat: Callable[[str], Any],
    write: Write,
    tokenizer: Any,
) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        Reader(chat(template) if template else tokenizer, 64).read([write({"messages": messages})])
    assert "data.jsonl, line 1: " in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("lines", [[""], ["", ""]])
def test_a_file_without_records(lines: list[str], tokenizer: Any, write: Write) -> None:
    with pytest.raises(ConfigurationError, match=r"data.jsonl holds no record to learn from: it is empty"):
        Reader(tokenizer, 64).read([write(*lines)])


def test_a_file_of_a_kind_that_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x.PDF").write_text("text all the same")
    with pytest.raises(ConfigurationError, match=r"PDF files are not read. Make plain text of it, or JSONL"):
        check_data([tmp_path / "x.PDF"])


@pytest.mark.parametrize(
    ("lines", "name", "message"),
    [
        (["", " "], "x.txt", "x.txt holds no text to learn from"),
        (["", " "], "x.jsonl", "x.jsonl holds no record to learn from: it is empty"),
        ([{"text": "fine"}, {"promt": 1}], "x.txt", r"x.txt, line 2: .*`prompt`\?"),
    ],
)
def test_what_shows_without_a_tokenizer(lines: list[Any], name: str, message: str, write: Write) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_data([write({"text": "fine"}), write(*lines, name=name)])


def test_a_pipe_is_not_read_before_its_time(tokenizer: Any) -> None:
    """It can be read once only, as a shell's ``<(...)`` is."""
    out, into = os.pipe()
    os.write(into, b'{"text": "a b c"}')
    os.close(into)
    path = Path(f"/dev/fd/{out}")
    check_data([path])
    assert len(Reader(tokenizer, 16).read([path])) == 1
    os.close(out)


def test_a_file_that_is_no_text(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "\xff"}')
    with pytest.raises(ConfigurationError, match="not plain text in UTF-8: invalid start byte in byte 10"):
        Reader(tokenizer, 64).read([tmp_path / "x.jsonl"])


def test_batches_are_padded_and_masked() -> None:
    short: Example = {"input_ids": [5, 6], "labels": [IGNORE_INDEX, 6]}
    long: Example = {"input_ids": [7, 8, 9], "labels": [7, 8, 9]}
    batch = collate([short, long])
    assert batch["input_ids"].tolist() == [[5, 6, 0], [7, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 6, IGNORE_INDEX], [7, 8, 9]]
    assert [learned_tokens(each) for each in (short, long)] == [1, 2]


def test_packed_batches_have_no_padding_and_positions_of_their_own() -> None:
    batch = collate_packed(
        [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [7, 8, 9], "labels": [IGNORE_INDEX, 8, 9]}]
    )
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[5, 6, 7, 8, 9]],
        "labels": [[IGNORE_INDEX, 6, IGNORE_INDEX, 8, 9]],
        "position_ids": [[0, 1, 0, 1, 2]],
    }


def test_records_that_say_that_they_are_good_are_learned(tokenizer: Any, write: Write) -> None:
    said: list[str] = []
    marks = {"label": True, "weight": 1, "score": 0.7, "rejected": None}
    path = write({"prompt": "Who came?", "completion": " Ruth.", **marks})
    assert len(Reader(tokenizer, 64, notify=said.append).read([path])) == 1
    assert said[-1].endswith("not read: label, rejected, score, weight")


def test_keys_of_messages_that_hold_nothing_are_not_there(chat: Callable[[str], Any], write: Write) -> None:
    """Templates ask whether a message has a key."""
    template = TURNS.replace("{{ m.content }}", "{{ m.keys() | sort | join('+') }}: {{ m.content }}")
    nothing = {"tool_calls": [], "name": None, "function_call": None}
    tokenizer = chat(template.replace("{{ bos", "{{ 'tools' if tools is not none else '' }}{{ bos"))
    for tools in ([], "[]", "", None):
        path = write({"messages": [CHAT[0], {**CHAT[1], **nothing}], "tools": tools})
        (example,) = Reader(tokenizer, 128).read([path])
        assert learned(example, tokenizer) == " content+role: Ruth came.</s>"
        assert "tools" not in tokenizer.decode(example["input_ids"])


def test_values_may_be_deep_but_not_without_end(chat: Callable[[str], Any], write: Write) -> None:
    tokenizer = chat("{{ tools | tojson if tools else '' }}" + ALL)

    def path(depth: int) -> Path:
        value: Any = "zinc"
        tool: Any = {"name": "look_up"}
        for _ in range(depth):
            value, tool = [value], {"function": tool}
        function = {"name": "look_up", "arguments": {"word": value}}
        called = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        return write({"messages": [CHAT[0], called], "tools": [tool]})

    (example,) = Reader(tokenizer, 4096).read([path(60)])
    assert "zinc" in learned(example, tokenizer)
    with pytest.raises(ConfigurationError, match=r"line 1: `arguments` .* more than 64 deep"):
        Reader(tokenizer, 4096).read([path(300)])


@pytest.mark.parametrize("train_on_prompt", [False, True])
def test_a_completion_whose_first_token_nothing_predicts_is_refused(
    train_on_prompt: bool, write: Write
) -> None:
    own = AutoTokenizer.from_pretrained(BASE_MODEL)
    path = write({"prompt": "", "completion": "Yes"})
    assert len(Reader(own, 64, train_on_prompt=train_on_prompt).read([path])) == 1  # behind the first token
    own.add_bos_token = False
    with pytest.raises(ConfigurationError, match=r"line 1: the prompt is empty .*: write a prompt"):
        Reader(own, 64, train_on_prompt=train_on_prompt).read([path])


def test_an_end_with_white_space_behind_it_is_an_end(chat: Callable[[str], Any], write: Write) -> None:
    said: list[str] = []
    template = MARKED.replace("{{ eos_token }}", "{{ eos_token }}{{ '\n' }}")
    tokenizer = chat(template)
    (example,) = Reader(tokenizer, 128, notify=said.append).read([write({"messages": CHAT[:2]})])
    assert learned(example, tokenizer) == " Ruth came.</s>"
    assert len(said) == 1


def test_conversations_that_are_too_long_are_left_out(chat: Callable[[str], Any], write: Write) -> None:
    said: list[str] = []
    long, short = {"messages": CHAT * 9}, {"messages": CHAT[:2]}
    for template in (TURNS, THINKING):
        tokenizer = chat(template)
        examples = Reader(tokenizer, 40, notify=said.append).read([write(long, short)])
        tokens = len(tokenizer.apply_chat_template(CHAT * 9, return_dict=False))
        assert all(len(each["input_ids"]) <= 40 for each in examples)
        assert learned(examples[-1], tokenizer).endswith("Ruth came.</s>")
        assert abs(int(said[-1].partition("the longest has ")[2].partition(")")[0]) - tokens) < 3
