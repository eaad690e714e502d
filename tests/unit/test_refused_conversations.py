"""Conversations of which a chat template writes less, or otherwise than it asks: they are refused."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
from chat_templates import FAMILIES
from test_conversations import (
    CALLS,
    CHAT,
    CONTENT,
    END,
    REFUSED,
    THOUGHT,
    TOOL,
    answer,
    call,
    calls,
    chatml,
    tokenizer_of,
    with_answers,
    with_template,
)

from shared.errors import ConfigurationError
from tenant_sdk.tuning.conversations import Conversations


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_a_prompt_that_opens_a_thought_that_the_answer_does_not_close_is_refused(family: str) -> None:
    tokenizer, ends = tokenizer_of("smollm2", family)
    with pytest.raises(ConfigurationError, match="begins the answer of message 2 otherwise than it asks"):
        Conversations(tokenizer, ends).examples(CHAT, None, "here")


@pytest.mark.parametrize("mark", ["{}", "{{% generation %}}{}{{% endgeneration %}}"])
@pytest.mark.parametrize(
    ("opens", "said", "named"),
    [
        # The prompt closes the thought that the answer has.
        (
            "<think>\n\n</think>\n\n",
            "<think>\n{{ m.reasoning }}\n</think>\n\n",
            "'.*<think>\\\\n\\\\n</think>",
        ),
        # It opens one that the answer has not.
        ("<think>\n", "{{ m.reasoning and '' }}", r"<think>\\n', and the conversation has '.*\.\.\.<"),
        ("<tool>", "<think>{{ m.reasoning }}</think>", "<tool>'"),
    ],
)
def test_an_answer_that_begins_otherwise_than_the_prompt_is_refused(
    opens: str, said: str, named: str, mark: str
) -> None:
    tokenizer, ends = with_answers(mark.format(said + CONTENT + END), opens)
    messages = [CHAT[0], answer("Secret", reasoning="Secret")]
    if "and ''" in said:
        del messages[1]["reasoning"]
    with pytest.raises(ConfigurationError, match=r"of message 2 otherwise .*: the prompt ends") as caught:
        Conversations(tokenizer, ends).examples(messages, None, "here")
    assert re.search(named, caught.value.message)
    assert "Secret" not in caught.value.message


def test_marks_that_cannot_be_found_are_refused() -> None:
    marked = "{% set x %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"
    tokenizer, ends = with_answers(marked + "{{ '' if x[0].isalpha() else '-' }}{{ x }}" + END)
    with pytest.raises(ConfigurationError, match=r"template marks .* cannot be found"):
        Conversations(tokenizer, ends).examples([CHAT[0], answer("Yes")], None, "here")


def test_an_answer_of_which_a_template_marks_nothing_is_refused() -> None:
    tokenizer, ends = tokenizer_of("smollm2", "chatml")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = chatml("{% generation %}{{ m.content }}{% endgeneration %}" + CALLS + END)
    messages = [*CHAT[:2], CHAT[2], answer(tool_calls=[call("f", a="b")])]
    with pytest.raises(ConfigurationError, match=r"here: the chat template marks .* no part of an answer"):
        Conversations(tokenizer, ends).examples(messages, None, "here")


def test_an_answer_that_the_template_drops_is_refused() -> None:
    tokenizer = with_template(
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'].split('</think>')[-1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(ConfigurationError, match="line 7: the chat template does not write the whole"):
        Conversations(tokenizer, (2,)).examples([CHAT[0], answer("<think>two</think>4")], None, "line 7")
    answered = answer(tool_calls=[call("look_up")])
    with pytest.raises(ConfigurationError, match="it leaves out the call of the tool `look_up`"):
        Conversations(tokenizer, (2,)).examples([CHAT[0], answered], None, "here")


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - REFUSED))
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
        (chats.whole_conversation if everything else chats.examples)([CHAT[0], answered], None, "here")


SYSTEM = {"role": "system", "content": "Be short."}
USERS = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ SAID }}"
    "<|im_end|>{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("everything", [False, True])
@pytest.mark.parametrize(
    ("said", "messages", "named"),
    [
        ("m.content", [SYSTEM, *CHAT], r"leaves out `content` of message 1 \(role `system`\)"),
        ("m.content", [*CHAT[:2], {**SYSTEM, "role": "tool"}, CHAT[3]], r"of message 3 \(role `tool`\)"),
        ("m.content[:12]", CHAT, r"changes `content` of message 3 \(role `user`\)"),
        ("m.content.split() | join(' ')", [CHAT[0], answer("a\n    b")], r"changes `content` of message 2"),
        ("m.content.split() | join(' ')", [{**CHAT[0], "content": "a\n    b"}, CHAT[1]], "of message 1"),
    ],
)
def test_messages_that_a_template_leaves_out_or_changes_are_refused(
    said: str, messages: list[dict[str, Any]], named: str, everything: bool
) -> None:
    tokenizer, ends = with_answers("")
    tokenizer.chat_template = USERS.replace("SAID", said)
    chats = Conversations(tokenizer, ends)
    with pytest.raises(ConfigurationError, match=named):
        (chats.whole_conversation if everything else chats.examples)(messages, None, "here")


def test_tools_that_a_template_leaves_out_are_refused() -> None:
    tokenizer, ends = with_answers(CONTENT + END)
    chats = Conversations(tokenizer, ends)
    with pytest.raises(ConfigurationError, match="leaves out the tool `look_up`"):
        chats.examples(CHAT, [TOOL], "here")
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + tokenizer.chat_template
    (example,) = chats.examples(CHAT, [TOOL], "here")
    assert "look_up" in tokenizer.decode(example["input_ids"])
