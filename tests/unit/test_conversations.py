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
from tenant_sdk.tuning.conversations import IGNORED, Conversations, Example
from tenant_sdk.tuning.data import Reader

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
    assert all(b in (IGNORED, a) for a, b in zip(example["input_ids"], example["labels"], strict=True))
    learned = [False, *(label != IGNORED for label in example["labels"]), False]
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


@functools.cache
def around(name: str, family: str, turns: int) -> list[list[str]]:
    """What is learned before and after what each answer says."""
    tokenizer, ends = tokenizer_of(name, family, all_parts=True)
    messages = [{"role": role, "content": "zinc"} for _ in range(turns) for role in ("user", "assistant")]
    return [plain(tokenizer, text).split("zinc") for text in written(tokenizer, ends, messages)]


def said_in(message: dict[str, Any], *, opened: bool) -> str:
    """What a template of all parts writes for an answer; ``opened``: the prompt already opens a thought."""
    begin = "" if opened else "<think>"
    reasoning = f"{begin}{message['reasoning']}</think>" if "reasoning" in message else ""
    calls = [json.dumps(each["function"], ensure_ascii=False) for each in message.get("tool_calls", ())]
    return reasoning + message["content"] + "".join(f"<call>{each}</call>" for each in calls)


@given(
    st.sampled_from(NAMES),
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.tuples(TEXTS, ANSWERS), min_size=1, max_size=3),
)
@settings(max_examples=1000, deadline=None)
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
        said = said_in(answered, opened=family == "deepseek-r1")
        assert "".join(learned.split()) == before + plain(tokenizer, said) + after
        assert name not in EXACT or said in learned or said.strip() in learned
    if any(answered.keys() & {"reasoning"} or answered.get("tool_calls") for _, answered in turns):
        content_alone, _ = tokenizer_of(name, family)
        with pytest.raises(ConfigurationError, match="does not write the whole answer"):
            Conversations(content_alone, ends).examples(messages, None, "here")


CHAT = [
    {"role": "assistant" if at % 2 else "user", "content": said}
    for at, said in enumerate(("hi", "Hello", "secret question", "fine"))
]
BARE_TAGS = (
    "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def with_template(template: str, name: str = "smollm2") -> Any:
    tokenizer = copy.deepcopy(real_tokenizer(name))
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
        assert [label for label in example["labels"] if label != IGNORED][-1] == ends[0]
        ((begin, end),) = regions(example)
        assert plain(tokenizer, tokenizer.decode(example["input_ids"][begin : end - 1])) == answer


def test_only_what_a_template_marks_is_learned() -> None:
    tokenizer = with_template(BARE_TAGS)
    assert learned(tokenizer, (tokenizer.eos_token_id,), CHAT) in ([["Hello", "fine"]], [["Hello"], ["fine"]])


def test_all_that_a_template_marks_in_an_answer_is_learned_though_the_prompt_begins_otherwise() -> None:
    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    tokenizer = copy.copy(tokenizer)
    said = (
        "{% generation %}<think>{{ m.reasoning }}{% endgeneration %}</think>"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    )
    tokenizer.chat_template = chatml(said).replace("assistant\n{% endif", "assistant\n<tool>{% endif")
    messages = [CHAT[0], answer("Yes", reasoning="Why"), CHAT[2], answer("No", reasoning="How")]
    assert learned(tokenizer, ends, messages) == [
        ["<think>Why", "Yes<|im_end|>"],
        ["<think>How", "No<|im_end|>"],
    ]


def test_an_answer_of_which_a_template_marks_nothing_is_refused() -> None:
    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = chatml("{% generation %}{{ m.content }}{% endgeneration %}" + CALLS + END)
    messages = [*CHAT[:2], CHAT[2], answer(tool_calls=[call("f", a="b")])]
    with pytest.raises(ConfigurationError, match=r"here: the chat template marks .* nothing of an answer"):
        Conversations(tokenizer, ends).examples(messages, None, "here")


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
    Reader(tokenizer, 64, say=said.append).read([path])
    assert "2 of 2 records end without a token that stops `generate`" in said[1]
    marked = with_template(BARE_TAGS)
    Reader(marked, 64, say=said.append).read([path])
    assert "1 of 2 records end without a token that stops `generate`" in said[3]


def test_an_answer_that_the_template_drops_is_refused() -> None:
    tokenizer = with_template(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'].split('</think>')[-1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ConfigurationError, match="line 7: the chat template does not write the whole answer"):
        Conversations(tokenizer, (2,)).examples([CHAT[0], answer("<think>two</think>4")], None, "line 7")
    answered = answer(tool_calls=[call("look_up")])
    with pytest.raises(ConfigurationError, match="it leaves out the call of the tool `look_up`"):
        Conversations(tokenizer, (2,)).examples([CHAT[0], answered], None, "here")


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


def calls(written: str) -> str:
    return f"{{% for c in m.tool_calls or [] %}}<call>{written}</call>{{% endfor %}}"


CONTENT, END = "{{ m.content }}", "<|im_end|>"
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
CALLS = calls("{{ c.function.name }} {{ c.function.arguments | tojson }}")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_reasoning_that_a_template_leaves_out_is_refused(family: str, key: str) -> None:
    tokenizer, ends = tokenizer_of("smollm2", family)
    with pytest.raises(ConfigurationError, match=f"line 7: .* leaves out `{key}`.* or remove it from the"):
        Conversations(tokenizer, ends).examples([CHAT[0], answer("Yes", **{key: "Yes"})], None, "line 7")


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(
    ("said", "answered", "named"),
    [
        (CONTENT + END, answer("Let me search.", tool_calls=[call("search", q="x")]), "of the tool `search`"),
        (CONTENT + END, answer("I am", tool_calls=[call("a", q="x")]), "the call of the tool `a`"),
        (
            CONTENT + calls("{{ c.function.name }}") + END,
            answer(tool_calls=[call("write", text="w")]),
            "an argument of a call of the tool `write`",
        ),
        (
            CONTENT + calls("{{ c.function.name }}{{ c.function.arguments.q }}") + END,
            answer(tool_calls=[call("write", q="w", more={"deep": [1, True]})]),
            "an argument of a call of the tool `write`",
        ),
        (
            CONTENT + "{% set c = m.tool_calls[0] %}{{ c.function.name }}{{ c.function.arguments.q }}" + END,
            answer(tool_calls=[call("get", q="Paris"), call("get", q="Paris")]),
            "the call of the tool `get` and an argument",
        ),
        (CONTENT + "{{ m.reasoning | length }}" + END, answer("Yes", reasoning="12"), "`reasoning`"),
        (CONTENT + "{{ m.reasoning[-9:] }}" + END, answer("what I think", reasoning="what I think"), "`reas"),
        (THOUGHT + CONTENT + END, answer("Yes", reasoning="Why", reasoning_content="How"), "`reasoning`"),
        (
            "{% generation %}" + CONTENT + END + "{% endgeneration %}",
            answer("Yes", reasoning_content="Why"),
            "`reasoning_content`",
        ),
    ],
)
def test_parts_that_a_template_leaves_out_are_refused(
    said: str, answered: dict[str, Any], named: str, everything: bool
) -> None:
    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = chatml(said)
    chats = Conversations(tokenizer, ends)
    with pytest.raises(ConfigurationError, match=f"it leaves out .*{named}"):
        (chats.everything if everything else chats.examples)([CHAT[0], answered], None, "here")


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
    example = Conversations(tokenizer, ends).everything(CHAT, None, "here")
    assert example["labels"] == example["input_ids"]
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(example["input_ids"]) == text.rstrip("\n")
    asked = Conversations(tokenizer, ends).everything(CHAT[:3], None, "here")
    assert tokenizer.decode(asked["input_ids"]).endswith("secret question<|im_end|>\n")
