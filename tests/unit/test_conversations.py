"""What is learned of conversations, with real tokenizers, many families' templates and awkward texts."""

from __future__ import annotations

import copy
import functools
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chat_templates import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import NAMES, real_tokenizer

from shared.errors import ConfigurationError
from tenant_sdk.tuning.conversations import IGNORE_INDEX, Conversations, Example
from tenant_sdk.tuning.data import Reader
from tenant_sdk.tuning.message_parts import TemplateProbe

EXACT = ("smollm2", "base_model")  # decoding gives what was encoded, to the letter
MARKERS = sorted({marker for family in FAMILIES.values() for marker in (*family.markers, family.eos)})
PIECES = (
    *("yes", "Ruth", "Zinc green.", "3.14", "a", "I'm", "\u00e9t\u00e9", "e\u0301", "\u00df", "na\u00efve"),
    *(
        "\u4f60\u597d\u3002",
        "\u65e5\u672c\u8a9e",
        "\u0645\u0631\u062d\u0628\u0627",
        "\U0001f600",
        "\U0001f469\u200d\U0001f52c",
        "\ufb01",
    ),
    *(" ", "  ", "\n", "\n\n", "\t", ":", ".", "?!", '"', "{", "</s>", "<|im_end|>", "assistant: "),
)
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join)


# Reasoning and calls as parts of what is said, for templates that write content alone.
SAID = "{% set said = m['content'] %}"
ALL_SAID = (
    "{% set said %}{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}{% endset %}"
)


@functools.cache
def tokenizer_of(name: str, family: str, *, all_parts: bool = False) -> tuple[Any, tuple[int, ...]]:
    """A real tokenizer with a family's markers, and the tokens at which `generate` would stop.

    ``all_parts``: the template also writes reasoning and calls.
    """
    chosen = FAMILIES[family]
    tokenizer = copy.deepcopy(real_tokenizer(name))
    tokenizer.add_special_tokens({"extra_special_tokens": MARKERS})
    tokenizer.eos_token, tokenizer.chat_template = chosen.eos, chosen.template
    if all_parts:
        tokenizer.chat_template = chosen.template.replace(SAID, ALL_SAID)
    tokenizer.bos_token = tokenizer.bos_token or chosen.eos
    return tokenizer, tuple(tokenizer.convert_tokens_to_ids([chosen.eos, *chosen.ends]))


def regions(example: Example) -> list[tuple[int, int]]:
    """Where learned tokens begin and end."""
    assert len(example["labels"]) == len(example["input_ids"])
    assert all(b in (IGNORE_INDEX, a) for a, b in zip(example["input_ids"], example["labels"], strict=True))
    learned = [False, *(label != IGNORE_INDEX for label in example["labels"]), False]
    edges = [at for at, (a, b) in enumerate(pairwise(learned)) if a != b]
    return list(zip(edges[::2], edges[1::2], strict=True))


def plain(tokenizer: Any, text: str) -> str:
    """What a tokenizer keeps of a text, without white space."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return "".join(tokenizer.decode(ids).split())


def written(tokenizer: Any, ends: tuple[int, ...], messages: list[dict[str, Any]]) -> list[str]:
    """What is learned of each answer, after a check that inference sends what stands before it."""
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    found = []
    for example in Conversations(tokenizer, ends).examples(messages, None, "here"):
        for begin, end in regions(example):
            sent = tokenizer.apply_chat_template(
                messages[: answers[len(found)]], add_generation_prompt=True, return_dict=False
            )
            assert example["input_ids"][:begin] == sent
            assert example["input_ids"][end - 1] in ends
            found.append(tokenizer.decode(example["input_ids"][begin:end]))
    assert len(found) == len(answers)
    return found


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ANSWERS = st.fixed_dictionaries(
    {"content": TEXTS},
    optional={
        "reasoning": TEXTS,
        "tool_calls": st.lists(
            st.builds(
                call,
                st.sampled_from(("a", "yes", "look_up")),
                a=TEXTS | st.integers() | st.booleans() | st.none() | st.lists(TEXTS, max_size=2),
            ),
            max_size=2,
        ),
    },
)


# Its prompt opens a thought that the conversation does not have.
REFUSED = {"deepseek-r1"}


@functools.cache
def around(name: str, family: str, turns: int) -> list[list[str]]:
    """What is learned before and after what each answer says."""
    tokenizer, ends = tokenizer_of(name, family, all_parts=True)
    messages = [{"role": role, "content": "zinc"} for _ in range(turns) for role in ("user", "assistant")]
    return [plain(tokenizer, text).split("zinc") for text in written(tokenizer, ends, messages)]


def said_in(message: dict[str, Any]) -> str:
    """What a template of all parts writes for an answer."""
    reasoning = f"<think>{message['reasoning']}</think>" if "reasoning" in message else ""
    calls = [json.dumps(each["function"], ensure_ascii=False) for each in message.get("tool_calls", ())]
    return reasoning + message["content"] + "".join(f"<call>{each}</call>" for each in calls)


@given(
    st.sampled_from(NAMES),
    st.sampled_from(sorted(FAMILIES.keys() - REFUSED)),
    st.lists(st.tuples(TEXTS, ANSWERS), min_size=1, max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_learned_tokens_are_the_answers_after_what_inference_sends(
    name: str, family: str, turns: list[tuple[str, dict[str, Any]]]
) -> None:
    tokenizer, ends = tokenizer_of(name, family, all_parts=True)
    messages = [
        {"role": role, **said}
        for asked, answered in turns
        for role, said in (("user", {"content": asked}), ("assistant", answered))
    ]
    found = written(tokenizer, ends, messages)
    for (_, answered), learned, (before, after) in zip(
        turns, found, around(name, family, len(turns)), strict=True
    ):
        said = said_in(answered)
        assert "".join(learned.split()) == before + plain(tokenizer, said) + after
        assert name not in EXACT or said in learned or said.strip() in learned
    if any(answered.keys() & {"reasoning"} or answered.get("tool_calls") for _, answered in turns):
        content_alone, _ = tokenizer_of(name, family)
        with pytest.raises(ConfigurationError, match="does not write the whole conversation"):
            Conversations(content_alone, ends).examples(messages, None, "here")


TOOL = {"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {}}}
CHAT = [
    {"role": "assistant" if at % 2 else "user", "content": said}
    for at, said in enumerate(("hi", "Hello", "secret question", "fine"))
]
BARE_TAGS = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def with_template(template: str) -> Any:
    tokenizer = copy.deepcopy(real_tokenizer("smollm2"))
    tokenizer.chat_template = template
    return tokenizer


def learned(tokenizer: Any, ends: tuple[int, ...], messages: list[dict[str, Any]]) -> list[list[str]]:
    """Of each example the texts that are learned."""
    return [
        [tokenizer.decode(example["input_ids"][begin:end]) for begin, end in regions(example)]
        for example in Conversations(tokenizer, ends).examples(messages, None, "here")
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("answer", ["yes", "no"])
def test_a_short_answer_is_learned_as_after_a_prompt(name: str, answer: str, tmp_path: Path) -> None:
    """A token could begin in the header and end in the answer: the first is what inference sends."""
    tokenizer, ends = tokenizer_of(name, "bare")
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": answer}]
    (chat,) = Conversations(tokenizer, ends).examples(messages, None, "here")
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "user: Is it?\nassistant: ", "completion": answer}))
    (record,) = Reader(tokenizer, 64, ends=ends).read([path])
    for example in (chat, record):
        assert [label for label in example["labels"] if label != IGNORE_INDEX][-1] == ends[0]
        ((begin, end),) = regions(example)
        assert plain(tokenizer, tokenizer.decode(example["input_ids"][begin : end - 1])) == answer


def test_only_what_a_template_marks_is_learned() -> None:
    tokenizer = with_template(BARE_TAGS)
    assert learned(tokenizer, (tokenizer.eos_token_id,), CHAT) in ([["Hello", "fine"]], [["Hello"], ["fine"]])


def test_all_that_a_template_marks_in_an_answer_is_learned() -> None:
    said = (
        "{% generation %}<think>{{ m.reasoning }}{% endgeneration %}</think>"
        "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    )
    tokenizer, ends = with_answers(said)
    messages = [CHAT[0], answer("Yes", reasoning="Why"), CHAT[2], answer("No", reasoning="How")]
    assert learned(tokenizer, ends, messages) == [
        ["<think>Why", "Yes<|im_end|>", "<think>How", "No<|im_end|>"]
    ]


@pytest.mark.parametrize(
    ("reasoning", "text"),
    [("Why", "Why\n</think>\nYes<|im_end|>"), ("", "</think>Yes<|im_end|>")],
)
def test_a_thought_that_the_prompt_opens_is_closed(reasoning: str, text: str) -> None:
    """A template may write an empty thought without the white space that the prompt has in it."""
    said = "<think>{% if m.reasoning %}{{ '\n' + m.reasoning }}\n</think>\n{% else %}</think>{% endif %}"
    tokenizer, ends = with_answers(said + CONTENT + END, opens="<think>\n")
    assert learned(tokenizer, ends, [CHAT[0], answer("Yes", reasoning=reasoning)]) == [[text]]


@pytest.mark.parametrize(
    "template",
    [
        "{% macro say(m) %}MESSAGE{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{% for m in messages %}{% set x %}MESSAGE{% endset %}{{ x }}{% endfor %}",
        "{% macro out() %}{{ caller() }}{% endmacro %}"
        "{% for m in messages %}{% call out() %}MESSAGE{% endcall %}{% endfor %}",
    ],
)
def test_marks_within_macros_and_blocks_are_found(template: str) -> None:
    message = (
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{%- generation -%} {{ m.content }}<|im_end|>"
        " {%- endgeneration -%}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    )
    tokenizer, ends = with_answers("")
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer.chat_template = "{# {% generation %} #}" + template.replace("MESSAGE", message) + prompt
    said = "The answer is long enough to see a cut: one two three"
    assert learned(tokenizer, ends, [CHAT[0], answer(said)]) == [[said + "<|im_end|>"]]


@pytest.mark.parametrize(
    ("family", "end"), [("glm-4", "<|user|>"), ("alpaca", "</s>"), ("olmo-2", "</s>"), ("falcon", "</s>")]
)
def test_the_end_is_learned_though_the_template_does_not_write_it(family: str, end: str) -> None:
    tokenizer, ends = tokenizer_of("smollm2", family)
    texts = [text for example in learned(tokenizer, ends, CHAT) for text in example]
    assert [text.strip() for text in texts] == [f"{said}{end}" for said in ("Hello", "fine")]


def test_no_end_is_told(tmp_path: Path) -> None:
    tokenizer = with_template(FAMILIES["alpaca"].template)
    tokenizer.eos_token = None
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n" + json.dumps({"prompt": "a", "completion": " b"}))
    said: list[str] = []
    Reader(tokenizer, 64, notify=said.append).read([path])
    assert "2 of 2 records end without a token that stops `generate`" in said[1]
    marked = with_template(BARE_TAGS)
    Reader(marked, 64, notify=said.append).read([path])
    assert "1 of 2 records end without a token that stops `generate`" in said[4]


def answer(content: str = "", **other: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **other}


def chatml(said: str) -> str:
    """A template whose assistants say ``said``, in ChatML."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        + said
        + "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def with_answers(said: str, opens: str = "") -> tuple[Any, tuple[int, ...]]:
    """A tokenizer whose template writes ``said`` for answers, and asks for them with ``opens``."""
    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = chatml(said).replace("assistant\n{% endif", f"assistant\n{opens}{{% endif")
    return tokenizer, ends


def calls(written: str) -> str:
    return f"{{% for c in m.tool_calls or [] %}}<call>{written}</call>{{% endfor %}}"


CONTENT, END = "{{ m.content }}", "<|im_end|>"
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
CALLS = calls("{{ c.function.name }} {{ c.function.arguments | tojson }}")


@pytest.mark.parametrize(
    ("said", "answered", "text"),
    [
        (
            THOUGHT + CONTENT + CALLS,
            answer("Yes", reasoning="Yes", reasoning_content="Yes", tool_calls=[call("Yes", Yes="Yes")]),
            '<think>Yes</think>Yes<call>Yes {"Yes": "Yes"}</call>',
        ),
        (
            CONTENT + CALLS,
            answer(tool_calls=[call("f", a=' "\u00e9\n" ', b=[1, None, True, 2.5, {"c": "<&'>"}])]),
            '<call>f {"a": " \\"\u00e9\\n\\" ", "b": [1, null, true, 2.5, {"c": "<&\'>"}]}</call>',
        ),
        (
            CONTENT + calls("{{ c.function.name }}{{ c.function.arguments }}"),
            answer(tool_calls=[call("f", a="it's", b=True)]),
            "<call>f{'a': \"it's\", 'b': True}</call>",
        ),
    ],
)
def test_all_parts_of_an_answer_are_learned(said: str, answered: dict[str, Any], text: str) -> None:
    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = chatml(said + END)
    assert learned(tokenizer, ends, [CHAT[0], answered]) == [[text + END]]


def test_a_thought_within_the_content_may_be_taken_out_of_it() -> None:
    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = chatml(
        "{% set parts = m.content.split('</think>') %}{% if parts | length > 1 %}<think>\n"
        "{{ parts[0].split('<think>')[-1] | trim }}\n</think>\n{% else %}<think>\n</think>\n{% endif %}"
        "{{ parts[-1] | trim }}" + CALLS + END
    )
    messages = [CHAT[0], answer("<think>Why</think>Yes", tool_calls=[call("f", a="b")])]
    text = '<think>\nWhy\n</think>\nYes<call>f {"a": "b"}</call><|im_end|>'
    assert learned(tokenizer, ends, messages) == [[text]]


def test_turns_of_no_weight_are_not_learned() -> None:
    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    messages = [CHAT[0], {**CHAT[1], "weight": 0}, *CHAT[2:]]
    assert learned(tokenizer, ends, messages) == [["fine<|im_end|>"]]


def test_an_end_that_an_answer_holds_itself_is_part_of_it() -> None:
    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    messages = [CHAT[0], {"role": "assistant", "content": "It is <|im_end|>."}]
    assert learned(tokenizer, ends, messages) == [["It is <|im_end|>.<|im_end|>"]]


@pytest.mark.parametrize(
    ("said", "answered", "text"),
    [
        (
            THOUGHT + CONTENT + CALLS + END,
            answer("Yes", reasoning_content="It is <|im_end|>."),
            "<think>It is <|im_end|>.</think>Yes<|im_end|>",
        ),
        (
            THOUGHT + CONTENT + CALLS + END,
            answer(tool_calls=[call("write", text="a<|im_end|>"), call("run", n=1)]),
            '<call>write {"text": "a<|im_end|>"}</call><call>run {"n": 1}</call><|im_end|>',
        ),
        (
            CONTENT + END + CALLS.replace("<call>", "\n<|im_start|>assistant\n<call>") + END,
            answer("See", tool_calls=[call("find", q="x"), call("look", q="y")]),
            'See<|im_end|><|im_start|>assistant\n<call>find {"q": "x"}</call><|im_start|>assistant\n'
            '<call>look {"q": "y"}</call><|im_end|>',
        ),
        # What a template writes behind the end of the answer is not part of it.
        (CONTENT + END + "{% if loop.last %}<|im_end|>{% endif %}", answer("Yes"), "Yes<|im_end|>"),
    ],
)
def test_an_answer_is_learned_up_to_the_end_behind_its_last_part(
    said: str, answered: dict[str, Any], text: str
) -> None:
    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = chatml(said)
    assert learned(tokenizer, ends, [CHAT[0], answered]) == [[text]]


def test_with_the_prompt_everything_is_learned() -> None:
    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    example = Conversations(tokenizer, ends).whole_conversation(CHAT, None, "here")
    assert example["labels"] == example["input_ids"]
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(example["input_ids"]) == text.rstrip("\n")
    asked = Conversations(tokenizer, ends).whole_conversation(CHAT[:3], None, "here")
    assert tokenizer.decode(asked["input_ids"]).endswith("secret question<|im_end|>\n")


def test_no_tools_are_an_empty_list_too_and_tools_have_a_template_of_their_own() -> None:
    tokenizer, ends = with_answers("{% generation %}" + CONTENT + END + "{% endgeneration %}")
    default = "{{ 'NONE' if tools is not none else '' }}" + tokenizer.chat_template
    tokenizer.chat_template = {
        "default": default,
        "tool_use": "{{ tools | tojson }}" + tokenizer.chat_template,
    }
    chats = Conversations(tokenizer, ends)
    for tools in ([], None, [TOOL]):
        (example,) = chats.examples(CHAT[:2], tools, "here")
        sent = tokenizer.apply_chat_template(CHAT[:1], tools=tools or None, add_generation_prompt=True)
        assert example["input_ids"][: len(sent["input_ids"])] == sent["input_ids"]


@pytest.mark.parametrize("written", ["{{ '' + c.function.arguments }}", "{{ c.function.arguments.q.z }}"])
def test_arguments_are_texts_where_a_template_wants_texts(written: str) -> None:
    tokenizer, ends = with_answers(calls("{{ c.function.name }} " + written) + END)
    messages = [CHAT[0], answer(tool_calls=[call("f", q={"z": "it's"})])]
    text = '{"q": {"z": "it\'s"}}' if "+" in written else "it's"
    assert learned(tokenizer, ends, messages) == [[f"<call>f {text}</call><|im_end|>"]]


def test_long_records_are_read_up_to_the_first_prompt_that_is_too_long() -> None:
    class Counting:
        def __init__(self, tokenizer: Any) -> None:
            self.tokenizer, self.rendered = tokenizer, 0

        def __getattr__(self, name: str) -> Any:
            return getattr(self.tokenizer, name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            return self.tokenizer(*args, **options)

        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            self.rendered += len(messages)
            return self.tokenizer.apply_chat_template(messages, **options)

    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    counting = Counting(tokenizer)
    (example,) = Conversations(counting, ends, 128).examples(CHAT * 300, None, "here")
    assert len(example["input_ids"]) == len(tokenizer.apply_chat_template(CHAT * 300, return_dict=False))
    assert counting.rendered < 2 * len(CHAT * 300)
    with pytest.raises(ConfigurationError, match="more than 256 answers within 100,000 tokens: make several"):
        Conversations(tokenizer, ends, 100_000).examples(CHAT * 130, None, "here")


def test_many_marks_of_thoughts_take_no_longer_than_their_text() -> None:
    """With the square of their number, these would take half an hour."""
    content = "<think>a" * 500_000
    probe = TemplateProbe([{"role": "assistant", "content": content}], None)
    assert len(probe.messages[0]["content"]) > len(content)
