"""Chat templates of real models: what is learned is what they write, to the letter, or it is refused."""

from __future__ import annotations

import copy
import functools
import json
import re
from datetime import date
from typing import Any

import pytest
from chat_templates import real_families
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from real_tokenizers import real_tokenizer
from test_conversations import CHAT, TEXTS, TOOL, answer, call, learned

from shared.errors import ConfigurationError, OptionText
from tenant_sdk.tuning.chat import answer_of, thought_of
from tenant_sdk.tuning.conversations import IGNORE_INDEX, Conversations, Example, TemplateDate
from tenant_sdk.tuning.generation import GenerationOutput
from tenant_sdk.tuning.message_parts import REASONING

# Their prompts open a thought that the conversation does not have, or they want content as a list.
REFUSED_REAL = {
    name + kind
    for name in ("deepseek_r1_distill", "deepseekv3", "idefics3", "llava_next", "smolvlm")
    for kind in ("", "_training")
}
REASONS = (
    "the chat template does not write the whole conversation: it (leaves out|changes) ",
    "the chat template begins the answer of message \\d+ otherwise than it asks for it: the prompt ends with",
    "the chat template does not take the messages: ",
    "the chat template marks parts with {% generation %}, but no part of an answer",
)


@functools.cache
def real_family_tokenizer() -> Any:
    tokenizer = copy.deepcopy(real_tokenizer("smollm2"))
    families = real_families().values()
    markers = {marker for family in families for marker in (*family.markers, family.eos, *family.ends)}
    tokenizer.add_special_tokens({"extra_special_tokens": sorted(markers)})
    return tokenizer


def of_real_family(name: str) -> tuple[Any, tuple[int, ...]]:
    """The one tokenizer with a real family's template, and the tokens at which `generate` would stop."""
    tokenizer, family = real_family_tokenizer(), real_families()[name]
    tokenizer.eos_token, tokenizer.chat_template = family.eos, family.template
    return tokenizer, tuple(tokenizer.convert_tokens_to_ids([family.eos, *family.ends]))


def check_exact(
    tokenizer: Any, ends: tuple[int, ...], messages: list[Any], tools: Any, last: Example
) -> None:
    """The last answer: inference sends the prompt, and the rest is what the template writes, up to an end."""

    def text(upto: list[Any], **options: Any) -> str:
        return str(tokenizer.apply_chat_template(upto, tools=tools, tokenize=False, **options))

    prompt, answered = text(messages[:-1], add_generation_prompt=True), text(messages)
    sent = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids, labels = last["input_ids"], last["labels"]
    assert ids[: len(sent)] == sent
    rest = tokenizer.decode(ids[len(sent) :], clean_up_tokenization_spaces=False)
    if not answered.startswith(prompt):  # the prompt opens a thought with white space
        assert prompt.rstrip().endswith("<think>")
        assert rest.startswith("</think>")
        prompt = prompt.rstrip()
    end = tokenizer.decode(ids[-1:])
    if not answered.startswith(prompt + rest):  # an end that begins the next turn
        assert answered == prompt + rest.removesuffix(end)
    assert ids[-1] in ends
    assert {*labels[: len(sent)][-1:]} <= {IGNORE_INDEX}
    own = tokenizer.decode([label for label in labels[len(sent) :] if label != IGNORE_INDEX])
    assert messages[-1]["content"].rpartition("</think>")[2].strip() in own
    if "generation %}" not in tokenizer.chat_template:  # else it may leave out the end
        assert labels[len(sent) :] == ids[len(sent) :]


PLAIN = [
    {"role": "assistant" if at % 2 else "user", "content": said}
    for at, said in enumerate(("Q-one", "Zinc", "Q-two", "def f():\n    return 1"))
]


@pytest.mark.parametrize("family", sorted(real_families()))
def test_plain_chats_are_taken_by_real_templates_but_for_some(family: str) -> None:
    tokenizer, ends = of_real_family(family)
    if family in REFUSED_REAL:
        with pytest.raises(ConfigurationError, match="|".join(REASONS)):
            Conversations(tokenizer, ends).examples(PLAIN, None, "here")
    else:
        for upto in (2, 4):
            examples = Conversations(tokenizer, ends).examples(PLAIN[:upto], None, "here")
            check_exact(tokenizer, ends, PLAIN[:upto], None, examples[-1])


def test_reasoning_is_no_part_of_what_stays_of_an_answer() -> None:
    asked = {"role": "user", "content": "Q"}
    answered = {"role": "assistant", "content": "Zinc.", **dict.fromkeys(REASONING, "Secret")}
    kept = {}
    for name in real_families():
        tokenizer, _ = of_real_family(name)
        text = functools.partial(tokenizer.apply_chat_template, tokenize=False)
        try:
            prompt, whole = text([asked], add_generation_prompt=True).rstrip(), text([asked, answered])
        except TemplateError:  # it wants other messages
            continue
        if "Secret" in whole and whole.startswith(prompt):
            ids = tokenizer(whole.removeprefix(prompt), add_special_tokens=False)["input_ids"]
            plain, raw = (tokenizer.decode(ids, skip_special_tokens=skip) for skip in (True, False))
            written = GenerationOutput(plain, raw, len(ids), 1.0, OptionText("x"), True)
            special = tokenizer.all_special_tokens
            kept[name] = answer_of(prompt, written, special, thought_of(tokenizer))
    assert len(kept) > 20
    assert {*kept.values()} == {"Zinc."}, kept


ASKED: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict, role=st.sampled_from(("user", "user", "system", "developer", "tool")), content=TEXTS
)
ANSWERED = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXTS | st.just("<think>\nWhy\n</think>\n\nYes")},
    optional={
        "reasoning_content": TEXTS,
        "tool_calls": st.lists(st.builds(call, st.just("look_up"), q=TEXTS), min_size=1, max_size=2),
    },
)


@given(
    st.sampled_from(sorted(real_families())),
    st.lists(
        st.tuples(ASKED, ANSWERED | st.builds(dict, role=st.just("assistant"), content=TEXTS)), max_size=2
    ),
    TEXTS,
    ANSWERED | st.builds(dict, role=st.just("assistant"), content=TEXTS),
    st.booleans(),
)
@settings(max_examples=1000, deadline=None)
def test_real_templates_are_learned_to_the_letter_or_refused(
    family: str, turns: list[Any], asked: str, answered: dict[str, Any], tools: bool
) -> None:
    tokenizer, ends = of_real_family(family)
    messages = [
        *(message for turn in turns for message in turn),
        {"role": "user", "content": asked},
        answered,
    ]
    described = [TOOL] if tools else None
    try:
        examples = Conversations(tokenizer, ends).examples(messages, described, "here")
    except ConfigurationError as refusal:
        error = refusal.message
    else:
        error = ""
        check_exact(tokenizer, ends, messages, described, examples[-1])
        sent = tokenizer.decode(examples[-1]["input_ids"])
        for message in messages[:-1]:
            said = message["content"].rpartition("</think>")[2]  # templates take thoughts out
            assert said.strip() in sent or json.dumps(said, ensure_ascii=False)[1:-1].strip() in sent
    assert not error or re.match(f"here: ({'|'.join(REASONS)})", error)


def test_a_call_ends_as_the_next_turn_of_the_record_begins() -> None:
    tokenizer, _ = of_real_family("glm4moe")
    ends = tuple(tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"]))
    result = {"role": "tool", "content": "R-one"}
    messages: list[dict[str, Any]] = [
        CHAT[0],
        answer(tool_calls=[call("look_up", q="x")]),
        result,
        answer("Yes"),
        *CHAT[:2],
    ]
    learnt = [text for example in learned(tokenizer, ends, messages) for text in example]
    assert [text[text.rfind("<|") :] for text in learnt] == ["<|observation|>", "<|user|>", "<|user|>"]


@pytest.mark.parametrize(
    ("name", "written"), [("llama3_2", "03 Feb 2001"), ("gptoss", "2001-02-03"), ("qwen3", None)]
)
def test_the_date_is_the_day_that_is_given(name: str, written: str | None) -> None:
    tokenizer, ends = of_real_family(name)
    day = TemplateDate(date(2001, 2, 3))
    (example,) = Conversations(tokenizer, ends, day=day).examples(CHAT[:2], None, "here")
    own = tokenizer.chat_template
    assert day.written == (written is not None)
    assert (written or "Hello") in tokenizer.decode(example["input_ids"])
    assert tokenizer.chat_template == own
