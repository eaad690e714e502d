"""Files of training data as people have them, read without a tokenizer: text, JSONL, or a table.

A line of a JSONL file is a record, one of::

    {"text": "..."}
    {"prompt": "...", "completion": "..."}
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
    {"instruction": "...", "input": "...", "output": "..."}

The last two are ShareGPT's and Alpaca's forms, and are read as `messages`. A row of a table is a record whose
keys are the columns (``tenant_sdk.tuning.tables``). A JSON file may also be one list of records.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from shared.encoded import decode_json
from shared.errors import ConfigurationError, peer_text
from tenant_sdk.tuning.message_parts import REASONING
from tenant_sdk.tuning.parquet import parquet_records
from tenant_sdk.tuning.tables import csv_records, is_table

_RECORD_SUFFIXES = (".jsonl", ".ndjson", ".json")
# A record needs one of these.
_KEYS = ("text", "prompt", "completion", "messages", "conversations", "instruction", "output")
_FORMS = (*({"text"}, {"prompt", "completion"}, {"messages"}, {"conversations"}, {"instruction", "output"}),)
_MAX_KEYS, _LONGEST_KEY = 8, 40  # in a message
_MAX_DEPTH = 64  # lists and objects within each other, in a call's arguments
# Keys of a message that are read. The chat template is given others too.
_READ_KEYS = {"role", "content", "weight", "tool_calls", "tool_call_id", "name", *REASONING}
# Other tools' keys for what is learned, and keys that hold what was said.
_MASK_KEYS = (
    *("train", "train_detail", "training", "training_detail", "trainable"),
    *("loss", "loss_mask", "loss_weight", "mask", "masked"),
)
# Keys of a record that say the same, unless they are 1 or true; a grade must be above 0.
_WEIGHT_KEYS, _GRADE_KEYS, _PREFERENCE_KEYS = (
    ("weight", "label", *_MASK_KEYS),
    ("score", "reward"),
    ("chosen", "rejected"),
)
_UNREAD_CONTENT = {
    "function_call": "write it as `tool_calls`",
    "refusal": "write it as `content`",
    "audio": "sound is not read; remove it",
}
_LONGEST_HEADER = 1000  # characters
_CHUNK_BYTES = 1 << 20  # bytes that are read at once
# What holds text, but is none.
_BINARY_SUFFIXES = (".arrow", ".pdf", ".docx", ".odt", ".xlsx", ".zip", ".gz")


# ShareGPT's names of roles, and the field's.
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
}


# Roles of messages: those that chat templates know.
_KNOWN_ROLES = (
    *("system", "developer", "user", "assistant", "tool"),
    *("function", "ipython", "environment", "document"),
)


class Record(msgspec.Struct, frozen=True):
    """A line of a JSONL file.

    ``messages``: each has a ``role``, and its ``content`` as one text. ``tools``: a template may describe
    them. ``conversations``, ``system``, and ``instruction``, ``input`` and ``output`` are read as
    ``messages``. ``unread``: names of other keys.
    ``passed``: names of other keys of messages, which the chat template is given.
    """

    text: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | str | None = None
    conversations: list[dict[str, Any]] | None = None
    system: str | None = None
    instruction: str | None = None
    input: str | None = None
    output: str | None = None
    unread: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()

    def characters(self) -> set[str]:
        """Those of all its texts, and of names within calls and tools."""
        used: set[str] = set()
        left: list[Any] = [self.text, self.prompt, self.completion, self.tools]
        left += [value for message in self.messages or () for value in message.values()]
        while left:
            value = left.pop()
            if isinstance(value, str):
                used.update(value)
            elif isinstance(value, dict):
                left += [*value, *value.values()]
            elif isinstance(value, list):
                left += value
        return used


_USED = {*Record.__struct_fields__, *_WEIGHT_KEYS, *_GRADE_KEYS, *_PREFERENCE_KEYS} - {"unread", "passed"}


def check_data(paths: Sequence[Path]) -> None:
    """Read files and decode their records: what is wrong with them is told before anything takes time.

    A pipe is left alone, since it can be read only once.

    Raises:
        ConfigurationError: a file or a record is wrong; the message names file and line.
    """
    for path in paths:
        if path.is_file() or path.is_dir() or not path.exists():
            text = read_text(path)
            if holds_records(path, text):
                for _ in records_of(path, text):
                    pass
            elif not text.strip():
                raise ConfigurationError(f"{path} holds no text to learn from")


def find_conversations(paths: Sequence[Path]) -> tuple[bool, str]:
    """Whether files hold conversations, and the system message that all of them have; or an empty text."""
    systems = set[str]()
    talks = False
    for path in paths:
        if not (path.is_file() and holds_records(path, text := read_text(path))):
            continue
        for _, record in records_of(path, text):
            if record.messages is not None:
                first, talks = record.messages[0], True
                systems.add(first["content"] if first["role"] == "system" else "")
    return talks, systems.pop() if len(systems) == 1 else ""


def read_text(path: Path) -> str:
    """A file's text, in UTF-8, with or without a byte order mark; a table's, or a JSON list's, as JSONL.

    Raises:
        ConfigurationError: it cannot be read.
    """
    if path.suffix.lower() in _BINARY_SUFFIXES:
        raise ConfigurationError(
            f"{path} is not plain text: {path.suffix} files are not read. Make plain text of it, or JSONL "
            "with a record in each line"
        )
    if path.suffix.lower() == ".parquet":
        return parquet_records(path, _KEYS, _USED)
    text = _plain_text(path)
    if is_table(path):
        return csv_records(path, text, _KEYS)
    if re.match(r"\s*\[\s*[{\]]", text):
        return _listed_records(path, text)
    first = text[:_LONGEST_HEADER].partition("\n")[0]
    columns = {cell.strip(' "').lower() for cell in re.split("[,;\t]", first)}
    if any(form <= columns <= _USED for form in _FORMS if len(columns) > 1):
        raise ConfigurationError(
            f"{path}: the first line names the columns of a table ({', '.join(sorted(columns))}). Name the "
            "file .csv, or .tsv if tabs separate the columns. If it is text to learn, add an empty line "
            "before it"
        )
    return text


def _listed_records(path: Path, text: str) -> str:
    """JSONL of a JSON list of objects, each in the line where it begins if no two begin in one."""
    try:
        records = [
            str(memoryview(each), "utf-8") for each in msgspec.json.decode(text, type=list[msgspec.Raw])
        ]
    except (msgspec.DecodeError, RecursionError) as error:
        if path.suffix.lower() in _RECORD_SUFFIXES:
            raise ConfigurationError(f"{path} begins as a list of records, but {error}") from None
        return text
    lines, line, at = list[str](), 0, 0
    for record in records:
        begin = text.index(record, at)
        line += text.count("\n", at, begin)
        lines += [""] * (line - len(lines))
        lines.append(record.replace("\n", " "))  # an end of a line within a string is written otherwise
        at = begin + len(record)
        line += record.count("\n")
    return "\n".join(lines)


def _plain_text(path: Path) -> str:
    try:
        parts = list[bytes]()
        with path.open("rb") as file:
            while part := file.read(_CHUNK_BYTES):
                if 0 in part:  # also a hole, which may be of any size
                    raise ConfigurationError(f"{path} is not plain text: it has bytes that are zero")
                parts.append(part)
        return b"".join(parts).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{path} is not plain text in UTF-8: {error.reason} in byte {error.start}"
        ) from None  # the error itself holds the whole text
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error


def holds_records(path: Path, text: str) -> bool:
    """Whether a file's name says so, or the first line of its text is a JSON object."""
    if path.suffix.lower() in _RECORD_SUFFIXES or is_table(path):
        return True
    first = text.lstrip().split("\n", 1)[0]
    try:
        return isinstance(decode_json(first), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


class _Prompt(msgspec.Struct, frozen=True):
    """A line of a JSONL file of prompts."""

    prompt: str


def prompts_of(path: Path) -> list[str]:
    """The prompts of a file: one a line, or `prompt` of each record.

    Raises:
        ConfigurationError: it cannot be read, or holds no prompt; the message names file and line.
    """
    text = read_text(path)
    records, found = holds_records(path, text), list[str]()
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=_Prompt).prompt if records else line.strip())
        except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:  # which quote no value
            raise ConfigurationError(
                f"{where(path, number)}: {error}; a file of prompts has one a line, or JSON objects that "
                "have `prompt`"
            ) from None
    if not found:
        raise ConfigurationError(f"{path} holds no prompt")
    return found


def where(path: Path, line: int) -> str:
    """How errors name the place of a record."""
    return f"{path}, line {line}"


def records_of(path: Path, text: str) -> Iterator[tuple[int, Record]]:
    """The records of a file, each with its line.

    Raises:
        ConfigurationError: one is wrong, or there is none.
    """
    empty = True
    # Not splitlines(): JSON may hold other ends of lines as they are.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            empty = False
            yield number, _decode(line, where(path, number))
    if empty:
        raise ConfigurationError(f"{path} holds no record to learn from: it is empty")


def _describe_keys(record: dict[str, Any]) -> str:
    """The keys that a record has instead, and those that may be meant."""
    keys = [key for key, value in record.items() if value is not None]
    shown = [peer_text(key, _LONGEST_KEY) for key in sorted(keys)[:_MAX_KEYS]]
    close = [get_close_matches(key.lower(), _KEYS, n=1) for key in shown if key not in _KEYS]
    meant = {f"`{name}`" for found in close for name in found if name not in keys}
    return (
        f"this one has {' and '.join(shown) or 'none of them'}"
        + (f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else "")
        + (f"; did you mean {' and '.join(sorted(meant))}?" if meant else "")
    )


def _decode(line: str, place: str) -> Record:
    try:
        fields = decode_json(line, dict[str, Any])
        record = msgspec.convert(fields, Record)
        if isinstance(record.tools, str):
            tools = decode_json(record.tools or "[]", list[dict[str, Any]])
            record = replace(record, tools=tools)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError) as error:  # which quote no value
        raise ConfigurationError(f"{place}: {error}; a line holds one record, a JSON object") from None
    keys = {name for name in _KEYS if getattr(record, name) is not None}
    if keys not in _FORMS:
        raise ConfigurationError(
            f"{place}: a record has `text`, or `prompt` and `completion`, or `messages`, or `instruction` "
            f"and `output`; {_describe_keys(fields)}"
        )
    _check_not_weighted(fields, place)
    read = {*keys, "tools"} if keys & {"messages", "conversations"} else keys
    messages = record.messages
    if record.conversations is not None:
        read.add("system")
        messages = _shared_conversation(record.conversations, record.system, place)
    elif record.instruction is not None:
        read |= {"input", "system"}
        messages = _instruction(record)
    elif messages is None and not (record.text or record.completion):
        raise ConfigurationError(f"{place}: the {'completion' if record.text is None else 'text'} is empty")
    if messages is not None:
        if not messages or not all(isinstance(each.get("role"), str) for each in messages):
            raise ConfigurationError(
                f"{place}: `messages` must be a list of objects that have a `role`, not empty"
            )
        messages = [_message(each, place) for each in messages]
    others = {key for each in messages or () for key, value in each.items() if value is not None} - _READ_KEYS
    return replace(record, messages=messages, unread=_names(fields.keys() - read), passed=_names(others))


def _check_not_weighted(fields: dict[str, Any], place: str) -> None:
    """Refuse a record that says of itself that it is not to be learned, or not as it is.

    Raises:
        ConfigurationError: it does; the message names the key.
    """
    bad = [name for name in _PREFERENCE_KEYS if fields.get(name) is not None]
    bad += [name for name in _WEIGHT_KEYS if fields.get(name) not in (None, 1)]
    for name in _GRADE_KEYS:
        grade = fields.get(name)
        if grade is not None and not (isinstance(grade, int | float) and grade > 0):
            bad.append(name)
    if bad:
        raise ConfigurationError(
            f"{place}: `{bad[0]}` of a record is not obeyed: all records are learned alike. Remove the "
            f"record if it is not to be learned, or else remove `{bad[0]}`"
        )


def _names(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(peer_text(key, _LONGEST_KEY) for key in keys))


def _shared_conversation(turns: list[dict[str, Any]], system: str | None, place: str) -> list[dict[str, Any]]:
    """ShareGPT's turns as messages; turns that are messages already stay as they are."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        other = {key: value for key, value in turn.items() if key not in ("from", "value")}
        speaker = turn.get("from")
        if other.keys() == turn.keys() and "role" in turn:
            messages.append(turn)
        elif isinstance(speaker, str) and speaker in _ROLES and not turn.keys() & {"role", "content"}:
            messages.append({"role": _ROLES[speaker], "content": turn.get("value"), **other})
        else:
            raise ConfigurationError(
                f"{place}: a turn of `conversations` has `from`, one of {', '.join(_ROLES)}, and `value`. "
                "Write others as `messages`, with `role` and `content`" + _closest_role(speaker, _ROLES)
            )
    return messages


def _instruction(record: Record) -> list[dict[str, Any]]:
    """Alpaca's record as messages: the input stands below the instruction."""
    prompt = "\n".join(filter(None, (record.instruction, record.input)))
    said = (("system", record.system), ("user", prompt), ("assistant", record.output))
    return [{"role": role, "content": text} for role, text in said if text or role == "assistant"]


def _closest_role(role: Any, known: Iterable[str]) -> str:
    """The known role that may be meant, as a question; empty: there is none."""
    name = role[:_LONGEST_KEY].strip().lower() if isinstance(role, str) else ""
    near = get_close_matches(name, known, n=1)
    meant = near[0] if near else _ROLES.get(name)
    return f"; did you mean `{meant}`?" if meant else ""


def _message(raw: dict[str, Any], place: str) -> dict[str, Any]:
    """A message with its content as one text and its calls' arguments as objects, as servers do it (vLLM).

    Raises:
        ConfigurationError: it holds something else, or an assistant says nothing.
    """
    _check_keys(raw, place)
    content = raw.get("content")
    if content is None and raw["role"] == "assistant":
        content = ""  # beside a call of a tool
    # Templates ask whether a key is there: None and no calls are nothing.
    present = {
        key: value for key, value in raw.items() if value is not None and (key != "tool_calls" or value)
    }
    message = {**present, "content": _content(content, place)}
    if message.get("weight", 1) not in (0, 1):
        raise ConfigurationError(f"{place}: `weight` of a message must be 1, or 0 if it is not to be learned")
    calls = message.get("tool_calls") or []
    try:
        functions = [msgspec.convert(call, _Call).function for call in calls]
        for function in functions:
            msgspec.convert(function.get("name"), str)
        arguments = [_arguments(function.get("arguments")) for function in functions]
    except (msgspec.MsgspecError, TypeError, RecursionError):
        raise ConfigurationError(
            f"{place}: `tool_calls` must be a list of objects whose `function` has a `name` and "
            "`arguments`, a JSON object"
        ) from None
    if any(_is_deeper(each, _MAX_DEPTH) for each in arguments):
        raise ConfigurationError(f"{place}: `arguments` of a call are nested more than {_MAX_DEPTH} deep")
    if calls:
        message["tool_calls"] = [
            {**call, "function": {**function, "arguments": each}}
            for call, function, each in zip(calls, functions, arguments, strict=True)
        ]
    if any(not isinstance(message.get(name) or "", str) for name in REASONING):
        names = ", ".join(f"`{name}`" for name in REASONING)
        raise ConfigurationError(f"{place}: each of {names} must be a text")
    said = (*REASONING, "tool_calls", "content")
    if message["role"] == "assistant" and not any(message.get(name) for name in said):
        raise ConfigurationError(f"{place}: an assistant's turn is empty")
    return message


def _check_keys(message: dict[str, Any], place: str) -> None:
    """Refuse an unknown role, and keys that say what is learned or said and are not read.

    Raises:
        ConfigurationError: there is one; the message names it.
    """
    if message["role"] not in _KNOWN_ROLES:
        raise ConfigurationError(
            f"{place}: the role `{peer_text(message['role'], _LONGEST_KEY)}` is not known: it is one of "
            f"{', '.join(_KNOWN_ROLES)}" + _closest_role(message["role"], _KNOWN_ROLES)
        )
    for name in (name for name in _MASK_KEYS if message.get(name) is not None):
        raise ConfigurationError(
            f"{place}: `{name}` of a message is not read. Write `weight`: 0 for an answer that is not to be "
            "learned, and remove it from others"
        )
    for name, instead in _UNREAD_CONTENT.items():
        if message.get(name) is not None:
            raise ConfigurationError(f"{place}: `{name}` of a message is not read: {instead}")


def _content(content: Any, place: str) -> str:
    """One text; parts of text are joined by ends of lines."""
    parts = content if isinstance(content, list) else [content]
    for part in (part for part in parts if isinstance(part, dict)):
        judged = [name for name in ("weight", *_MASK_KEYS) if part.get(name) not in (None, 1)]
        if judged:
            raise ConfigurationError(
                f"{place}: `{judged[0]}` of a part of `content` is not read: an answer is learned whole, or "
                "not at all, by `weight` of its message"
            )
    texts: list[Any] = [
        part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part for part in parts
    ]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigurationError(
            f"{place}: `content` must be a text, or a list of parts of the type `text`; images and sound "
            "are not read"
        )
    return "\n".join(texts)


class _Call(msgspec.Struct):
    """A call of a tool, as an assistant makes it."""

    function: dict[str, Any]


def _arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of a call, which may be written as JSON."""
    decoded = decode_json(arguments) if isinstance(arguments, str) and arguments else arguments or {}
    return msgspec.convert(decoded, dict[str, Any])


def _is_deeper(value: Any, max_depth: int) -> bool:
    """Whether a value has more than so many lists and objects within each other."""
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return within is not None and (max_depth == 0 or any(_is_deeper(each, max_depth - 1) for each in within))
