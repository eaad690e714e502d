"""``symbiosis-tenant generate`` and ``chat``: a model's answers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from shared.errors import OptionText, SymbiosisError, counted
from tenant_sdk.command_line import options
from tenant_sdk.command_line.context_options import AnswerOptions, ContextOptions, PromptOptions
from tenant_sdk.command_line.opened import opened_model
from tenant_sdk.command_line.output import (
    RESULTS,
    STATUS,
    bars,
    loading,
    print_stats,
    shown,
)
from tenant_sdk.drafts.card import check_adapter, read_card
from tenant_sdk.session.options import SessionConfig
from tenant_sdk.terminal import json_line
from tenant_sdk.tuning.options import ModelOptions
from tenant_sdk.tuning.records import prompts_of
from tenant_sdk.tuning.sampling import Sampling

if TYPE_CHECKING:
    from tenant_sdk.drafts.decoding import Draft
    from tenant_sdk.sequences.contexts import LongContext
    from tenant_sdk.session.session import Session
    from tenant_sdk.tuning.chat import Chat
    from tenant_sdk.tuning.generation import GenerationOutput

_HELP = """/clear      begin a new conversation
/save FILE  write the conversation to a new file, as training data for finetune
/bye        leave; so does Ctrl-D
Ctrl-C      end an answer, but not the chat
\"\"\"         before and after a message of several lines"""
_QUOTES = '"""'


@dataclass(frozen=True)
class _LoadedModel:
    """A model with its adapter, and what it needs to answer."""

    session: Session
    model: Any
    tokenizer: Any
    place: LongContext
    draft: Draft | None


@contextmanager
def _loaded_model(
    answer: AnswerOptions, context: ContextOptions, local: ModelOptions, config: SessionConfig
) -> Iterator[_LoadedModel]:
    """Around answers: the session."""
    from tenant_sdk.storage import check_adapter_folder

    if answer.adapter is not None:
        check_adapter_folder(answer.adapter)
    if answer.draft is not None:
        check_adapter(read_card(answer.draft), answer.draft, adapted=answer.adapter is not None)
    with loading():
        from tenant_sdk.drafts.decoding import DraftPace
        from tenant_sdk.drafts.folder import load_draft
        from tenant_sdk.sequences.contexts import LongContext, default_place

    place = LongContext(context.kv or "host", context.kv_memory_gib, context.kv_folder, context.memory_gib)
    with opened_model(answer, local, config) as (session, model, tokenizer):
        if context.kv is None:
            place = replace(place, kv=default_place(model))
        draft = None
        if answer.draft is not None:
            pace = None if answer.pace is None else DraftPace(answer.pace)
            draft = load_draft(answer.draft, model, session, pace=pace)
        yield _LoadedModel(session, model, tokenizer, place, draft)


@options.command_line.takes
def generate(
    prompting: PromptOptions,
    sampling: Sampling,
    context: ContextOptions,
    local: ModelOptions,
    connection: options.SessionOptions,
) -> None:
    """Answer or continue prompts, with or without an adapter.

    Prompts, texts and adapters stay on this machine.
    """
    file = prompting.prompts
    texts = [prompting.text()] if file is None else prompts_of(file)
    config = connection.session()
    with _loaded_model(prompting, context, local, config) as ready:
        from tenant_sdk.tuning.data import chat_prompt, has_chat_template, prompt_tokens

        chats = not prompting.raw and (has_chat_template(ready.tokenizer) or prompting.system is not None)
        if chats:
            asked = ([*prompting.opening, {"role": "user", "content": text}] for text in texts)
            tokens = [chat_prompt(ready.tokenizer, messages) for messages in asked]
        else:
            tokens = [prompt_tokens(ready.tokenizer, text) for text in texts]
        if file is None:
            said = _answer_one(ready, tokens[0], sampling, chats=chats)
        else:
            said = _answer_all(ready, texts, tokens, sampling)
    if prompting.quiet:
        return
    STATUS.print(said)
    if ready.draft is not None:
        STATUS.print(str(ready.draft))
    print_stats(ready.session, config, STATUS)


def _answer_one(ready: _LoadedModel, tokens: list[int], sampling: Sampling, *, chats: bool) -> str:
    """Write the answer, word by word; returns a line of statistics."""
    from tenant_sdk.tuning.data import has_chat_template
    from tenant_sdk.tuning.generation import stream

    groups, length = ready.session.manifest.groups, len(tokens) + sampling.most_tokens
    more = ready.place.fitting(ready.model, groups, length)
    written = stream(ready.model, ready.tokenizer, tokens, sampling, options=more, draft=ready.draft)
    if not written.text.strip():
        STATUS.print(escape(shown(_empty_answer_advice(chats, has_chat_template(ready.tokenizer)))))
    return (
        f"{counted(written.tokens, 'token')} in {written.seconds:.1f} s, "
        f"{written.tokens / written.seconds:.1f} tokens/s; ended by: {shown(written.end)}"
    )


def _answer_all(ready: _LoadedModel, texts: list[str], tokens: list[list[int]], sampling: Sampling) -> str:
    """Write a line of JSON for each prompt, several at once; returns a line of statistics."""
    from tenant_sdk.tuning.generation import answer_prompts

    groups, started = ready.session.manifest.groups, time.perf_counter()

    def more(prompts: int, length: int) -> dict[str, Any]:
        place = replace(ready.place, batch_size=prompts)
        drafting = {} if ready.draft is None else {"custom_generate": ready.draft}
        return place.fitting(ready.model, groups, length) | drafting

    answers = answer_prompts(ready.model, ready.tokenizer, tokens, sampling, more)
    with bars({"answering": "prompt"}) as show:
        for done, (text, answer) in enumerate(zip(texts, answers, strict=True), 1):
            line = json_line({"prompt": text, "answer": answer})
            RESULTS.print(line, markup=False)
            show("answering", done, len(texts))
    return f"{counted(len(texts), 'prompt')} in {time.perf_counter() - started:.1f} s"


def _empty_answer_advice(chats: bool, could_chat: bool) -> OptionText:
    """What to do about an answer without text."""
    if chats:
        return OptionText(
            "the answer is empty. If the adapter was trained on text and not on chats, use {raw}; else ask "
            "in other words",
            raw=True,
        )
    if could_chat:
        return OptionText("nothing follows the prompt. Leave out {raw} to have it answered", raw=True)
    return OptionText("nothing follows the prompt: give the beginning of a text that goes on")


@options.command_line.takes
def chat(
    answer: AnswerOptions,
    sampling: Sampling,
    context: ContextOptions,
    local: ModelOptions,
    connection: options.SessionOptions,
) -> None:
    """Talk to a chat model, with or without an adapter; the conversation stays on this machine."""
    config = connection.session()
    with _loaded_model(answer, context, local, config) as ready:
        from tenant_sdk.tuning.chat import Chat

        groups = ready.session.manifest.groups
        resumed = partial(ready.place.resumed, ready.model, groups)
        conversation = Chat(
            ready.model, ready.tokenizer, sampling, opening=answer.opening, resumed=resumed, draft=ready.draft
        )
        if sys.stdin.isatty():
            STATUS.print("Ask something; /help lists commands.")
        for line, typed in _lines():
            if typed and line.startswith("/"):
                if _run_command(line, conversation):
                    break
            elif line.strip():
                if line.startswith("/"):
                    STATUS.print(f"{escape(line)} is sent as a message: commands are read on a terminal")
                _ask(line, conversation)
        if ready.draft is not None:
            STATUS.print(str(ready.draft))
        print_stats(ready.session, config, STATUS)


def _lines() -> Iterator[tuple[str, bool]]:
    """Messages, one a line or between triple quotes, until the input ends; and whether each may be a command.

    Commands are typed on a terminal: what comes from a file may be anybody's.
    """
    typed = sys.stdin.isatty()
    if typed:
        import readline  # noqa: F401 - with it, input() knows the arrow keys
    while True:
        lines: list[str] = []
        try:
            line = input(">>> " if typed else "")
            if line.startswith(_QUOTES):
                lines = [line.removeprefix(_QUOTES)]
                while not lines[-1].rstrip().endswith(_QUOTES):
                    lines.append(input("... " if typed else ""))
                yield "\n".join(lines).rstrip().removesuffix(_QUOTES), False
                continue
        except EOFError:
            if lines:
                STATUS.print(f"the last message has no {_QUOTES} at its end, and is left out")
            return
        except KeyboardInterrupt:
            STATUS.print("\nUse Ctrl-D or /bye to leave.")
            continue
        yield line, typed


def _run_command(line: str, conversation: Chat) -> bool:
    """Do what a command says; True: it ends the chat."""
    command, _, rest = line.partition(" ")
    if command == "/bye":
        return True
    if command == "/help":
        STATUS.print(escape(_HELP))
    elif command == "/clear":
        conversation.clear()
        STATUS.print("a new conversation")
    elif command == "/save" and not rest.strip():
        STATUS.print("/save needs a file: /save FILE.jsonl")
    elif command == "/save":
        _save(rest.strip(), conversation)
    else:
        STATUS.print(
            f"{escape(line)}: there is no such command. /help lists them; a space before a message sends it"
        )
    return False


def _save(name: str, conversation: Chat) -> None:
    """Write the conversation as a record of training data, for its user's eyes alone."""
    record = json_line({"messages": conversation.messages})
    if not name.endswith(".jsonl"):  # what is pasted cannot make files that programs run
        STATUS.print("name a file that ends in .jsonl")
        return
    try:
        file = Path(name).expanduser()
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
            out.write(record + "\n")
    except FileExistsError:
        STATUS.print(f"{escape(name)} exists already: name a new file")
    except (OSError, ValueError, RuntimeError) as error:
        STATUS.print(f"cannot write {escape(name)}: {escape(str(error))}")
    else:
        STATUS.print(f"saved; `symbiosis-tenant finetune --data {escape(str(file))}` learns its answers")


def _ask(text: str, conversation: Chat) -> None:
    try:
        with _interruptible() as interrupted:
            written = conversation.ask(text, interrupted)
    except SymbiosisError as error:
        STATUS.print(f"[bold red]error:[/] {escape(str(error))}")
        return
    if remark := _note_on_ending(written):
        STATUS.print(f"[dim]({escape(shown(remark))})[/]")


def _note_on_ending(written: GenerationOutput) -> OptionText | None:
    """What to say of an answer that did not end by itself, or is none."""
    if not written.text.strip():
        return _empty_answer_advice(True, True)
    if written.ended:
        return None
    cut = written.end == OptionText("{max_new_tokens}")
    return OptionText("cut off after {} tokens: {max_new_tokens}", written.tokens) if cut else written.end


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Around an answer: whether Ctrl-C was pressed. Pressed again, it interrupts whatever is done."""
    pressed = threading.Event()

    def press(*_: object) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, press)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
