"""Conversations: what is sent of them, how answers end, and the command."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from commands import BASE_MODEL, SECONDS, at, here, ok_here, start
from conftest import Executor
from drafting import guessing
from transformers import AutoTokenizer

from shared.errors import ConfigurationError, OptionText
from tenant_sdk.command_line.answers import _run_command
from tenant_sdk.sequences.contexts import LongContext
from tenant_sdk.session.session import Session
from tenant_sdk.tuning.chat import Chat, Thought, answer_of, thought_of
from tenant_sdk.tuning.data import chat_prompt
from tenant_sdk.tuning.generation import GenerationOutput, stream
from tenant_sdk.tuning.sampling import Sampling

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SHORT = Sampling(8, allow_loops=True)


@pytest.fixture(scope="module")
def talkative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small model's tokenizer, and a chat template."""
    folder = tmp_path_factory.mktemp("talkative")
    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(serve: Callable[..., Executor]) -> Executor:
    return serve(BASE_MODEL)


@pytest.fixture(scope="module")
def session(served: Executor) -> Iterator[Session]:
    with served.connect() as opened:
        yield opened


@pytest.fixture(scope="module")
def model(session: Session) -> Any:
    loaded = session.load_model(progress=False)
    loaded.generation_config.eos_token_id = None  # it would end answers at any time
    return loaded


@pytest.fixture(scope="module")
def tokenizer(talkative: Path) -> Any:
    made = AutoTokenizer.from_pretrained(talkative)
    made.eos_token = None
    return made


def talk(model: Any, tokenizer: Any, session: Session, kv: str, **options: Any) -> Chat:
    resumed = partial(LongContext(kv).resumed, model, session.manifest.groups)
    return Chat(model, tokenizer, SHORT, resumed=resumed, **options)


def test_a_draft_writes_the_same_conversation(model: Any, tokenizer: Any, session: Session) -> None:
    """Its passes go on from the keys and values of the turns before."""
    draft = guessing(model)
    for kv in ("device", "host", "disk"):
        plain, drafted = talk(model, tokenizer, session, kv), talk(model, tokenizer, session, kv, draft=draft)
        for said in ("In the beginning", "And then?", "Why?"):
            assert drafted.ask(said).text == plain.ask(said).text
        assert drafted.messages == plain.messages
    assert draft.passes


def rows(session: Session, ask: Callable[[], Any]) -> int:
    """Of a forward pass, which the groups all have alike."""
    before = session.stats.rows
    ask()
    return (session.stats.rows - before) // len(session.manifest.groups)


@pytest.mark.parametrize("kv", ["device", "host", "disk"])
def test_each_token_is_sent_once(model: Any, tokenizer: Any, session: Session, kv: str) -> None:
    chat = talk(model, tokenizer, session, kv)
    opened = rows(session, lambda: chat.ask("In the beginning"))
    went_on = rows(session, lambda: chat.ask("And then?"))
    written = chat_prompt(tokenizer, chat.messages[:3])
    first = len(chat_prompt(tokenizer, chat.messages[:1]))
    assert opened == first + 8 - 1
    # The answer's end is encoded anew, perhaps in other tokens.
    assert went_on <= len(written) - first + 8
    assert went_on < len(written)
    fresh = stream(model, tokenizer, written, SHORT)
    assert fresh.text == chat.messages[3]["content"]


def test_a_conversation_begins_anew(model: Any, tokenizer: Any, session: Session) -> None:
    chat = talk(model, tokenizer, session, "host", opening=[{"role": "system", "content": "Be brief."}])
    first = chat.ask("Who built it?").text
    chat.ask("And who broke it?")
    chat.clear()
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    assert chat.ask("Who built it?").text == first


def test_an_interrupted_answer_counts_as_far_as_it_went(model: Any, tokenizer: Any, session: Session) -> None:
    chat = talk(model, tokenizer, session, "host")
    asked = iter([False, False, True])
    written = chat.ask("In the beginning", lambda: next(asked))
    assert (written.tokens, str(written.end), written.ended) == (3, "interrupted", False)
    assert chat.messages[1] == {"role": "assistant", "content": written.text, "weight": 0}
    tokens = chat_prompt(tokenizer, [*chat.messages, {"role": "user", "content": "Go on"}])
    assert chat.ask("Go on").text == stream(model, tokenizer, tokens, SHORT).text


def test_a_context_that_is_full(model: Any, tokenizer: Any, session: Session) -> None:
    chat = talk(model, tokenizer, session, "host")
    chat.ask("In the beginning")
    messages = list(chat.messages)
    with pytest.raises(ConfigurationError, match=r"and the model's context \d+: /clear begins a new one"):
        chat.ask("word " * model.config.max_position_embeddings)
    assert chat.messages == messages
    chat.ask("And then?")


def test_keys_and_values_of_half_an_answer_are_not_used(model: Any, tokenizer: Any, session: Session) -> None:
    chat = talk(model, tokenizer, session, "host")

    def fails() -> bool:
        raise OSError("as a broken connection does")

    chat.ask("In the beginning")
    with pytest.raises(OSError, match="broken"):
        chat.ask("And then?", fails)
    tokens = chat_prompt(tokenizer, [*chat.messages, {"role": "user", "content": "And then?"}])
    assert chat.ask("And then?").text == stream(model, tokenizer, tokens, SHORT).text


def test_without_a_chat_template(model: Any, session: Session) -> None:
    plain = AutoTokenizer.from_pretrained(BASE_MODEL)
    with pytest.raises(ConfigurationError, match="a chat needs a chat template and this tokenizer has none"):
        talk(model, plain, session, "host")


def test_generate_answers_messages_if_there_is_a_template(served: Executor, talkative: Path) -> None:
    def out(*more: object) -> str:
        given = ("--tokenizer", talkative, "--privacy", "plain", "--max-new-tokens", 6, "--quiet")
        return ok_here("generate", served, *given, *more)[0]

    by_hand = out("--raw", "--prompt", "user: Whence?\nassistant: ")
    assert out("--prompt", "Whence?") == by_hand
    assert out("--raw", "--prompt", "Whence?") != by_hand
    with_system = out("--raw", "--prompt", "system: Brief.\nuser: Whence?\nassistant: ")
    assert out("--system", "Brief.", "--prompt", "Whence?") == with_system


def test_many_prompts_are_answered_as_each_alone(served: Executor, talkative: Path, tmp_path: Path) -> None:
    given = ("--tokenizer", talkative, "--privacy", "plain", "--max-new-tokens", 6, "--system", "Brief.")
    prompts = ["Whence?", "Who is he, and whose is the horse?", "No", "A fourth", "And a fifth"]
    lines, objects = tmp_path / "lines.txt", tmp_path / "objects.jsonl"
    lines.write_text("\n\n".join(prompts) + "\n")
    objects.write_text("\n".join(json.dumps({"prompt": prompt, "id": 1}) for prompt in prompts))
    said = [
        ok_here("generate", served, *given, "--quiet", "--prompt", each)[0].rstrip("\n") for each in prompts
    ]
    for file in (lines, objects):
        out, err = ok_here("generate", served, *given, "--prompts", file)
        found = [json.loads(line) for line in out.splitlines()]
        assert [each["prompt"] for each in found] == prompts
        assert [each["answer"] for each in found] == [each.strip() for each in said]
        assert "answering: 5 prompts" in err
        assert re.search(r"5 prompts in [\d.]+ s", err)
    refused = here("generate", served, *given, "--prompts", lines, "--prompt", "Whence?")
    assert "give one of --prompt, --prompt-file and --prompts" in str(refused.exception)
    refused = here("generate", served, *given, "--prompts", lines, "--max-new-tokens", 100_000)
    assert "prompt 1 has " in str(refused.exception)


def test_system_messages_need_a_template(served: Executor) -> None:
    given = ("--privacy", "plain", "--system", "Brief.", "--prompt", "Whence?")
    refused = here("generate", served, *given)
    assert "or use `generate` without --system" in str(refused.exception)
    refused = here("generate", served, *given, "--raw")
    assert "--system needs the chat template: leave out --raw" in str(refused.exception)


def test_a_piped_conversation(served: Executor, talkative: Path, tmp_path: Path) -> None:
    """What is piped may be anybody's, so that no line of it is a command."""
    process = start(
        "tenant_sdk.command_line.main",
        *("chat", *at(served), "--tokenizer", talkative, "--privacy", "plain", "--max-new-tokens", 5),
        token=served.token,
        stdin=subprocess.PIPE,
    )
    out, err = process.communicate(
        f'Whence?\n"""Two\nlines"""\n/save {tmp_path / "x.jsonl"}\n"""Without an end\n'
    )
    assert process.returncode == 0, err
    assert len(out.rstrip("\n").split("\n")) >= 3
    assert re.search(r"session: [\d,]+ requests", err)
    assert 'the last message has no """ at its end, and is left out' in err
    assert list(tmp_path.iterdir()) == []


class Answers:
    """A conversation that was had."""

    messages: ClassVar[list[Any]] = [
        {"role": "user", "content": "Whence?"},
        {"role": "assistant", "content": "Cut", "weight": 0},
    ]

    def clear(self) -> None:
        self.messages.clear()


def test_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation: Any = Answers()
    kept = tmp_path / "kept.jsonl"
    for command, said in (
        (f"/save {kept}", "learns its answers"),
        (f"/save {kept}", "exists already: name a new file"),
        (f"/save {tmp_path / '.bash_profile'}", "name a file that ends in .jsonl"),
        ("/save ~nobody-of-this-name/x.jsonl", "cannot write"),
        ("/save \0.jsonl", "cannot write"),
        ("/save", "/save needs a file: /save FILE.jsonl"),
        ("/help", "/clear      begin"),
        ("/nothing", "/nothing: there is no such command"),
    ):
        assert not _run_command(command, conversation)
        assert said in capsys.readouterr().err
    assert kept.stat().st_mode & 0o777 == 0o600
    assert json.loads(kept.read_text())["messages"] == Answers.messages
    assert [path.name for path in tmp_path.iterdir()] == ["kept.jsonl"]
    assert not _run_command("/clear", conversation)
    assert conversation.messages == []
    assert _run_command("/bye", conversation)


@pytest.mark.parametrize(
    ("prompt", "raw", "said"),
    [
        ("user: a", "Nine.</s>", "Nine."),
        ("<think>\n", "why</think>\n\nNine.</s>", "Nine."),
        ("<think>\n", "why and", None),
        ("<think>\n\n</think>\n", "Nine.</s>", "Nine."),
        ("user: a", "<think>why</think>Nine.</s>", "Nine."),
        ("user: a", "<think>why", None),
        (
            "user: a",
            "<|channel|>analysis<|message|>why<|end|><|channel|>final<|message|>Nine.<|return|>",
            "Nine.",
        ),
        ("user: a", "<|channel|>analysis<|message|>why", None),
        ("user: what is <think>?\nassistant: ", "It opens a thought.</s>", "It opens a thought."),
        ("user: a", "Write <think> first.</s>", "Write <think> first."),
        ("user: a", "The tag </think> closes it.</s>", "The tag </think> closes it."),
        ("user: a", "<think>why</think>Write </think> last.</s>", "Write </think> last."),
        ("user: a", "Between `<think>` and `</think>`.</s>", "Between `<think>` and `</think>`."),
        ("user: a", "```\n<think>x</think>\n```</s>", "```\n<think>x</think>\n```"),
        ("user: a", "<thought>why</thought>Nine.</s>", "Nine."),
        ("user: a", "<seed:think>why</seed:think>Nine.</s>", "Nine."),
        ("user: a", "<mm:think>why</mm:think>Nine.</s>", "Nine."),
        ("user: a", "<thinking>why</thinking>Nine.</s>", "Nine."),
        ("user: a", "Here is my thought process: why Here is my response: Nine.</s>", "Nine."),
    ],
)
def test_reasoning_is_no_part_of_the_answer(prompt: str, raw: str, said: str | None) -> None:
    written = GenerationOutput(raw.removesuffix("</s>"), raw, 3, 1.0, OptionText("x"), True)
    assert answer_of(prompt, written, ["</s>"], None) == said


@pytest.mark.parametrize(
    ("raw", "known"),
    [
        ("Okay! <think>why</think>Nine.</s>", None),
        ("Okay! <think>why</think>Nine.</s>", Thought("<think>", "</think>")),
        ("<think>why</think>Nine.<think>why</think>Ten.</s>", None),
        ("Okay! <hm>why</hm>Nine.</s>", Thought("<hm>", "</hm>")),
        ("<|on>why<off|>Nine.<|on>why<off|>Ten.</s>", Thought("<|on>", "<off|>")),
    ],
)
def test_reasoning_within_an_answer_is_not_kept(raw: str, known: Thought | None) -> None:
    written = GenerationOutput(raw.removesuffix("</s>"), raw, 3, 1.0, OptionText("x"), True)
    with pytest.raises(ConfigurationError, match=r"contains reasoning, .* is not kept"):
        answer_of("assistant: ", written, ["</s>", "<|on>", "<off|>"], known)


@pytest.mark.parametrize(
    ("template", "raw", "said"),
    [
        ("<|on>thought\n{}<off|>", "<|on>thought\nwhy<off|>Nine.</s>", "Nine."),
        ("<|on>thought\n{}<off|>", "<|on>thought\nwhy", None),
        ("<|on>thought\n{}<off|>", "Nine <off|> ten.</s>", ConfigurationError),
        ("<seed:think>{}</seed:think>", "<seed:think>why</seed:think>Nine.</s>", "Nine."),
        ("", "<|on>why<off|>Nine.</s>", ConfigurationError),
        ("", "<|on>why", ConfigurationError),
        ("", "<|on>Nine.</s>", "Nine."),
        ("", "[THINK]why[/THINK]Nine.</s>", "Nine."),
        ("{}</think>", "why</think>Nine.</s>", "Nine."),
        ("{}</think>", "Nine.</s>", "may be reasoning"),
    ],
)
def test_the_template_says_how_reasoning_ends(template: str, raw: str, said: Any, talkative: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(talkative)
    written_as = template.replace("{}", "{{ m.thinking }}")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.thinking %}" + written_as + "{% endif %}{{ m.content }}"
        "\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    text = raw
    for token in ("<|on>", "<off|>", "</s>"):
        text = text.replace(token, "")
    written = GenerationOutput(text, raw, 3, 1.0, OptionText("x"), raw.endswith("</s>"))
    known = thought_of(tokenizer)
    assert (known is None) == (not template)
    if said is ConfigurationError or said == "may be reasoning":
        with pytest.raises(ConfigurationError, match=r"may be (those of )?reasoning, .* is not kept"):
            answer_of("assistant: ", written, ["</s>"], known)
    else:
        assert answer_of("assistant: ", written, ["</s>"], known) == said


@pytest.mark.parametrize(("raw", "said"), [("why</think>Nine.</s>", "Nine."), ("Nine.</s>", None)])
def test_a_prompt_that_opens_a_thought(raw: str, said: str | None, talkative: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(talkative)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.thinking %}<think>\n{{ m.thinking }}</think>{% endif %}"
        "{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: <think>\n{% endif %}"
    )
    known = thought_of(tokenizer)
    assert known == Thought("", "</think>")
    written = GenerationOutput(raw.removesuffix("</s>"), raw, 3, 1.0, OptionText("x"), True)
    assert answer_of("assistant: <think>\n", written, ["</s>"], known) == said


def test_an_answer_that_says_nothing_is_no_part_of_a_conversation(
    model: Any, tokenizer: Any, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = talk(model, tokenizer, session, "host")
    nothing = GenerationOutput("", "", 0, 1.0, OptionText("interrupted"), False)
    monkeypatch.setattr("tenant_sdk.tuning.chat.stream", lambda *_, **__: nothing)
    assert chat.ask("Whence?") == nothing
    assert chat.messages == []


def test_ctrl_c_ends_an_answer_and_not_the_chat(served: Executor, talkative: Path) -> None:
    """On a terminal; its answer would have 1,000 tokens."""
    ours, theirs = pty.openpty()
    process = start(
        "tenant_sdk.command_line.main",
        *("chat", *at(served), "--tokenizer", talkative, "--privacy", "plain", "--allow-loops"),
        token=served.token,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        secrets={"TERM": "dumb"},  # no codes between the words
    )
    os.close(theirs)
    screen = Screen(ours)
    screen.until(">>> ")
    screen.type("Whence?\n")
    screen.until(r"Whence\?\s+\S+\s+\S+\s+\S+\s")  # the answer has begun
    process.send_signal(signal.SIGINT)
    screen.until(r"\(interrupted\)[^>]*>>> ")
    while not screen.shows("Use Ctrl-D or /bye to leave"):
        # readline misses a signal that comes between its prompt and its wait for a key.
        process.send_signal(signal.SIGINT)
    screen.type("/bye\n")
    screen.until("session: ")
    assert process.wait(800) == 0
    os.close(ours)


class Screen:
    """What a program writes on a terminal."""

    def __init__(self, terminal: int) -> None:
        self._terminal, self._seen = terminal, ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def until(self, pattern: str) -> None:
        """Wait until this is there, and forget it."""
        assert self.shows(pattern, SECONDS), f"{pattern} did not come after {self._seen!r}"

    def shows(self, pattern: str, seconds: float = 1.0) -> bool:
        """Whether this comes, each part of it within so many seconds; it is forgotten then."""
        while not (found := re.search(pattern, self._seen)):
            ready, _, _ = select.select([self._terminal], [], [], seconds)
            if not ready:
                return False
            self._seen += os.read(self._terminal, 4096).decode(errors="replace")
        self._seen = self._seen[found.end() :]
        return True
