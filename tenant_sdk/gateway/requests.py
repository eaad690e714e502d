"""The permitted requests of clients: fields of each path, with bounds; all others are refused. No I/O.

A request is read with these types and written again from them, so that vLLM reads nothing else.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shared.encoded import DIGITS, UNREADABLE, numbers_fit
from tenant_sdk.gateway.admission import Refusal
from tenant_sdk.gateway.constraints import (
    Constraint,
    ConstraintRefused,
    call_of,
    constraint,
    one_call_of,
)

INT32 = 2**31 - 1
Count = Annotated[int, Meta(ge=0, le=INT32)]
Token = Annotated[int, Meta(ge=0, le=INT32)]
Tokens = Annotated[list[Token], Meta(max_length=128)]
Biases = Annotated[
    dict[Annotated[str, Meta(pattern=r"\A[0-9]{1,7}\Z")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=300),
]
Likeliest = Annotated[int, Meta(ge=0, le=20)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[Stop], Meta(max_length=4)]  # as many as vLLM takes
Short = Annotated[str, Meta(max_length=256)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Plain = str | bool | int | float | None
MESSAGES = 1024
PARTS = 4096  # of all messages of a chat
TOOLS_BYTES = 64 << 10
PROMPTS = 32  # of a request
PROMPT_TOKENS = 16_384  # of all its prompts, or twice as many as a sequence may have
SETTINGS = 16_384  # biases and stops of a request, for all its sequences: vLLM has them for each
ANSWER_BYTES = 4 << 20
LIKELY_BYTES = 160  # of an answer, for each log-probability
ID_BYTES = 8  # of an answer, for each token's id
TOKEN_BYTES = 16  # of a text, for each token that it may have
FIELDS_BYTES = 4 << 10  # beside
# OpenAI's that clients send as a matter of course, and that change nothing here.
IGNORED = frozenset(
    {
        "best_of",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
RESPONSES = "/v1/responses"
# Of a response's request: what it needs that an earlier one left behind, or leaves behind itself.
_KEPT = ("background", "conversation", "previous_response_id", "prompt", "store")
_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class StreamOptions(Struct):
    """Of a stream."""

    include_usage: bool | UnsetType | None = UNSET
    continuous_usage_stats: bool | UnsetType | None = UNSET


class Extent(NamedTuple):
    """How much a request is.

    Attributes:
        prompts: how many.
        tokens: of all prompts, at most.
        repeated: bytes of each answer to all prompts that repeat them.
        written: tokens of each sequence's answer, at most.
        likeliest: log-probabilities of each token.
    """

    prompts: int
    tokens: int
    repeated: int
    written: int
    likeliest: int


class Sampling(Struct, kw_only=True):
    """What completions and chats have in common; ``UNSET`` and null are not the same to vLLM."""

    model: Short | UnsetType | None = UNSET
    frequency_penalty: Penalty | UnsetType | None = UNSET
    logit_bias: Biases | UnsetType | None = UNSET
    max_tokens: Count | UnsetType | None = UNSET
    n: Annotated[int, Meta(ge=1, le=INT32)] | UnsetType | None = UNSET
    presence_penalty: Penalty | UnsetType | None = UNSET
    seed: Seed | UnsetType | None = UNSET
    stop: Stop | StopStrings | UnsetType | None = UNSET
    stream: bool | UnsetType | None = UNSET
    stream_options: StreamOptions | UnsetType | None = UNSET
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType | None = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType | None = UNSET
    top_k: Annotated[int, Meta(ge=-1, le=INT32)] | UnsetType | None = UNSET
    min_p: Annotated[float, Meta(ge=0, le=1)] | UnsetType | None = UNSET
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | UnsetType | None = UNSET
    stop_token_ids: Tokens | UnsetType | None = UNSET
    include_stop_str_in_output: bool | UnsetType = UNSET
    ignore_eos: bool | UnsetType = UNSET
    min_tokens: Count | UnsetType = UNSET
    skip_special_tokens: bool | UnsetType = UNSET
    spaces_between_special_tokens: bool | UnsetType = UNSET
    add_special_tokens: bool | UnsetType = UNSET
    return_tokens_as_token_ids: bool | UnsetType | None = UNSET
    return_token_ids: bool | UnsetType | None = UNSET
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | UnsetType | None = UNSET
    response_format: Any = UNSET
    structured_outputs: Any = UNSET

    def extent(self, context: int) -> Extent:
        """See ``Extent``; ``context``: the most tokens of a sequence."""
        raise NotImplementedError

    def too_much(self, context: int) -> str:
        """What goes beyond the budget of a request, in which products count; empty: nothing."""
        extent, answers = self.extent(context), _given(self.n) or 1
        if extent.prompts > PROMPTS:
            return f"{extent.prompts} prompts; a request here has {PROMPTS} at most"
        if extent.tokens > (max_tokens := max(2 * context, PROMPT_TOKENS)):
            return f"prompts of up to {extent.tokens} tokens; those of a request have {max_tokens} at most"
        stops = 1 if isinstance(self.stop, str) else len(_given(self.stop) or ())
        settings = stops + len(_given(self.logit_bias) or ()) + len(_given(self.stop_token_ids) or ())
        if (entries := settings * extent.prompts * answers) > SETTINGS:
            return (
                f"{settings} entries of logit_bias, stop and stop_token_ids for {extent.prompts * answers} "
                f"sequences are {entries}, and {SETTINGS} are the most: ask for fewer, in several requests"
            )
        ids = ID_BYTES if self.return_token_ids is True else 0
        each = TOKEN_BYTES + LIKELY_BYTES * extent.likeliest + ids
        size = extent.repeated + ids * extent.tokens
        size += 0 if self.stream is True else extent.written * extent.prompts * each
        if answers * size > ANSWER_BYTES:
            return (
                f"its answer may have {answers * size} bytes, and {ANSWER_BYTES} are the most: ask for fewer "
                "answers or log-probabilities, set max_tokens, or have it streamed, which counts echo alone"
            )
        return ""

    @property
    def sequences(self) -> int:
        """How many it is for at once: ``n`` answers to each prompt."""
        return self.extent(0).prompts * (_given(self.n) or 1)

    @property
    def may_call(self) -> bool:
        """Whether calls of tools are looked for in what the model writes."""
        return False

    def constraint(self) -> Constraint | None:
        """See ``constraints.constraint``; the request has it in one field afterwards."""
        limit = constraint(_given(self.response_format), _given(self.structured_outputs))
        self.response_format, self.structured_outputs = UNSET, limit.as_field() if limit else UNSET
        return limit


class Completion(Sampling, kw_only=True):
    """``/v1/completions``."""

    prompt: str | list[str | Token | list[Token]]
    echo: bool | UnsetType | None = UNSET
    logprobs: Likeliest | UnsetType | None = UNSET

    def check(self, context: int) -> str:
        """What is wrong with it that types do not say; empty: nothing."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if len({type(each) for each in prompts}) != 1:
            return "a list of prompts has texts, or tokens, or lists of tokens, and is not empty"
        if [] in prompts:
            return "a prompt has no tokens"
        several = self.stream is True and (_given(self.n) or 1) > 1
        if self.echo is True and several and _given(self.logprobs) is not None:
            return "echo with logprobs is streamed for one answer only: leave one of them out, or set n to 1"
        if self.echo is True and "" in prompts:
            return "an empty prompt cannot be repeated: leave echo out"
        texts, lists = self._sizes
        return (
            _too_long(max(lists, default=0), context)
            or _too_large(max(texts, default=0), context)
            or self.too_much(context)
        )

    @property
    def _sizes(self) -> tuple[list[int], list[int]]:
        """Bytes of the prompts that are texts, as JSON has them, and tokens of the others."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if one else self.prompt
        texts = [len(msgspec.json.encode(each)) - 2 for each in prompts if isinstance(each, str)]
        return texts, [len(each) for each in prompts if isinstance(each, list)]

    def extent(self, context: int) -> Extent:
        """See ``Extent``; a text counts as a token for two bytes, which are seldom less."""
        texts, lists = self._sizes
        tokens = sum(min(context, each) for each in ([size // 2 + 1 for size in texts] or lists))
        written = min(context, 16 if _given(self.max_tokens) is None else _given(self.max_tokens))
        likeliest, repeated = _likeliest(self.logprobs), 0
        if self.echo is True:
            repeated = (sum(texts) or TOKEN_BYTES * tokens) + LIKELY_BYTES * likeliest * tokens
        return Extent(len(texts or lists), tokens, repeated, written, likeliest)


class Function(Struct):
    """Of a tool, as templates show it to a model."""

    name: Short
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class Tool(Struct):
    """Which a template may show, and a model may call."""

    function: Function
    type: Literal["function"] = "function"


class ToolName(Struct):
    """Of the function that an answer must call."""

    name: Short


class ChosenTool(Struct):
    """See ``ToolName``."""

    function: ToolName
    type: Literal["function"] = "function"


class Called(Struct):
    """A function that an earlier answer called."""

    name: Short
    arguments: str


class Call(Struct):
    """See ``Called``."""

    id: Short
    function: Called
    type: Literal["function"] = "function"


class ContentPart(Struct):
    """Of a message: text alone."""

    text: str
    type: Literal["text"] = "text"


class ChatMessage(Struct):
    """Of a chat; what else clients put into one is left out."""

    role: Short
    content: str | Annotated[list[ContentPart], Meta(max_length=MESSAGES)] | UnsetType | None = UNSET
    name: Short | UnsetType | None = UNSET
    tool_calls: Annotated[list[Call], Meta(max_length=64)] | UnsetType | None = UNSET
    tool_call_id: Short | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES)]
Tools = Annotated[list[Tool], Meta(max_length=64)]
ForTemplate = Annotated[dict[Short, Plain], Meta(max_length=16)]
# vLLM and transformers take these beside a template's variables; `padding` to any length takes all memory.
NO_VARIABLES = frozenset(
    {
        "model_config",
        "tokenizer",
        "self",
        "conversation",
        "messages",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "kwargs",
    }
)
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Chat(Sampling, kw_only=True):
    """``/v1/chat/completions``."""

    messages: Messages
    tools: Tools | UnsetType | None = UNSET
    add_generation_prompt: bool | UnsetType = UNSET
    continue_final_message: bool | UnsetType = UNSET
    chat_template_kwargs: ForTemplate | UnsetType | None = UNSET
    logprobs: bool | UnsetType | None = UNSET
    top_logprobs: Likeliest | UnsetType | None = UNSET
    max_completion_tokens: Count | UnsetType | None = UNSET
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    reasoning_effort: Effort | UnsetType | None = UNSET
    include_reasoning: bool | UnsetType = UNSET

    def check(self, context: int) -> str:
        """See ``Completion``."""
        return (
            _wrong(self.messages, self.tools, self.chat_template_kwargs)
            or self._wrong_choice()
            or _too_large(len(msgspec.json.encode(self.messages)), context)
            or self.too_much(context)
        )

    def _wrong_choice(self) -> str:
        """Why no tool can be chosen so; empty: it can."""
        choice, names = _given(self.tool_choice), [each.function.name for each in _given(self.tools) or ()]
        if choice in ("auto", "required") and not names:
            return "tool_choice needs tools"
        if isinstance(choice, ChosenTool) and choice.function.name not in names:
            return "tool_choice names a function that is not in tools"
        return "two tools have the same name" if len(set(names)) < len(names) else ""

    @property
    def may_call(self) -> bool:
        """See ``Sampling.may_call``."""
        return bool(_given(self.tools)) and _given(self.tool_choice) in (None, "auto")

    def constraint(self) -> Constraint | None:
        """See ``constraints.constraint``; a call that must be made fixes the answer's form, too.

        vLLM makes the same schema of the tools (``tool_calls``), so that the request has no constraint of its
        own.
        """
        limit, choice = super().constraint(), _given(self.tool_choice)
        if self.may_call and limit is not None and limit.kind not in ("json", "choice"):
            raise ConstraintRefused(
                f"a {limit.kind} beside tools would form the text in which calls are looked for: leave one "
                "of them out, or set tool_choice to none"
            )
        if choice in (None, "none", "auto"):
            return limit
        if limit is not None:
            raise ConstraintRefused(
                "tool_choice fixes the form of the answer: leave out response_format and structured_outputs"
            )
        functions = {each.function.name: _given(each.function.parameters) for each in _given(self.tools)}
        if isinstance(choice, ChosenTool):
            return call_of(functions[choice.function.name])
        return one_call_of(functions)

    def extent(self, context: int) -> Extent:
        """See ``Extent``; of its prompt an answer has nothing."""
        written = [each for each in (self.max_tokens, self.max_completion_tokens) if isinstance(each, int)]
        likeliest = max(1, _likeliest(self.top_logprobs)) if self.logprobs is True else 0
        return Extent(1, 0, 0, min([context, *written]), likeliest)


class ItemPart(Struct):
    """Of an item: text alone."""

    text: str
    type: Literal["input_text", "output_text"] = "input_text"


ItemText = str | Annotated[list[ItemPart], Meta(max_length=PARTS)]


class Item(Struct):
    """Of a response's input: a message, a call of a function, or what a function returned."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | UnsetType = UNSET
    content: ItemText | UnsetType = UNSET
    call_id: Short | UnsetType = UNSET
    name: Short | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    output: ItemText | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Keep what its type has, with texts in one part, as templates get them.

        Raises:
            ValueError: something is missing.
        """
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            value = getattr(self, name)
            if name not in _ITEMS[self.type]:
                value = UNSET
            elif value is UNSET:
                raise ValueError(f"a {self.type} has {' and '.join(_ITEMS[self.type])}")
            setattr(self, name, "\n".join(each.text for each in value) if isinstance(value, list) else value)
        if self.role == "developer":  # templates of other models do not know it
            self.role = "system"

    @property
    def message(self) -> ChatMessage:
        """The same in a chat."""
        if self.type == "function_call":
            call: Any = {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}
            return ChatMessage("assistant", tool_calls=[msgspec.convert(call, Call)])
        if self.type == "function_call_output":
            return ChatMessage("tool", _given(self.output), tool_call_id=self.call_id)
        return ChatMessage(_given(self.role), _given(self.content))


class FlatTool(Function):
    """See ``Tool``; a response's request has the function's fields beside the type."""

    type: Literal["function"] = "function"


class FlatChoice(Struct):
    """See ``ChosenTool``."""

    name: Short
    type: Literal["function"] = "function"


class TextOptions(Struct):
    """Of a response's text."""

    format: Any = UNSET


class Reasoning(Struct):
    """Of a response."""

    effort: Effort | UnsetType | None = UNSET


class Response(Struct, kw_only=True):
    """``/v1/responses``: a chat in other words, by whose rules it is checked."""

    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MESSAGES)]
    model: Short | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    max_output_tokens: Annotated[int, Meta(ge=1, le=INT32)] | UnsetType | None = UNSET
    stream: bool | UnsetType | None = UNSET
    stream_options: Any = UNSET  # whether its events are padded
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType | None = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType | None = UNSET
    top_k: Annotated[int, Meta(ge=-1, le=INT32)] | UnsetType | None = UNSET
    seed: Seed | UnsetType | None = UNSET
    tools: Annotated[list[FlatTool], Meta(max_length=64)] | UnsetType | None = UNSET
    tool_choice: Literal["none", "auto", "required"] | FlatChoice | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    text: TextOptions | UnsetType | None = UNSET
    structured_outputs: Any = UNSET
    reasoning: Reasoning | UnsetType | None = UNSET
    truncation: Literal["disabled"] | UnsetType | None = UNSET
    include: Annotated[list[Any], Meta(max_length=0)] | UnsetType | None = UNSET
    chat_template_kwargs: ForTemplate | UnsetType | None = UNSET
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | UnsetType | None = UNSET
    background: Any = UNSET
    conversation: Any = UNSET
    previous_response_id: Any = UNSET
    prompt: Any = UNSET
    store: Any = UNSET

    def __post_init__(self) -> None:
        """Put instructions and a text into messages, as vLLM does; null is as if it were not there.

        Raises:
            ValueError: it needs what an earlier request left behind, or leaves something behind.
        """
        if kept := [name for name in _KEPT if _given(getattr(self, name))]:
            raise ValueError(
                f"{kept[0]}: this gateway keeps neither answers nor other texts; send all that was said "
                "before in input"
            )
        for name in self.__struct_fields__:
            if getattr(self, name) is None or name in (*_KEPT, "stream_options"):
                setattr(self, name, UNSET)
        self.store = False
        items = [Item(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        if instructions := _given(self.instructions):
            items = [Item(role="system", content=instructions), *items]
        self.input, self.instructions = items, UNSET

    @property
    def _chat(self) -> Chat:
        """What it asks; never a stream, since that of a response repeats the whole text at its end."""
        choice, form = self.tool_choice, self.text.format if isinstance(self.text, TextOptions) else UNSET
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        return Chat(
            messages=[each.message for each in self.input if isinstance(each, Item)],
            max_tokens=self.max_output_tokens,
            tools=[Tool(each) for each in _given(self.tools) or ()] or UNSET,
            tool_choice=ChosenTool(ToolName(choice.name)) if isinstance(choice, FlatChoice) else choice,
            response_format=form,
            structured_outputs=self.structured_outputs,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def check(self, context: int) -> str:
        """See ``Completion``."""
        return self._chat.check(context)

    @property
    def sequences(self) -> int:
        """See ``Sampling.sequences``."""
        return 1

    @property
    def may_call(self) -> bool:
        """See ``Sampling.may_call``."""
        return self._chat.may_call

    def constraint(self) -> Constraint | None:
        """See ``Sampling.constraint``."""
        chat = self._chat
        limit = chat.constraint()
        self.text, self.structured_outputs = UNSET, chat.structured_outputs
        return limit


class Tokenizing(Struct, kw_only=True):
    """What both kinds of ``/tokenize`` have in common."""

    model: Short | UnsetType | None = UNSET
    add_special_tokens: bool | UnsetType = UNSET
    return_token_strs: bool | UnsetType | None = UNSET


class TokenizeText(Tokenizing, kw_only=True):
    """``/tokenize`` of a text."""

    prompt: str

    def check(self, context: int) -> str:
        """See ``Completion``."""
        return ""


class TokenizeChat(Tokenizing, kw_only=True):
    """``/tokenize`` of a chat; a structure has one base, so the fields of ``Chat`` stand here again."""

    messages: Messages
    tools: Tools | UnsetType | None = UNSET
    add_generation_prompt: bool | UnsetType = UNSET
    continue_final_message: bool | UnsetType = UNSET
    chat_template_kwargs: ForTemplate | UnsetType | None = UNSET

    def check(self, context: int) -> str:
        """See ``Completion``."""
        return _wrong(self.messages, self.tools, self.chat_template_kwargs)


class Detokenize(Struct, kw_only=True):
    """``/detokenize``."""

    tokens: list[Token]
    model: Short | UnsetType | None = UNSET

    def check(self, context: int) -> str:
        """See ``Completion``."""
        return _too_long(len(self.tokens), context)


Generating = Completion | Chat | Response
Kind = type[Generating] | type[TokenizeText] | type[TokenizeChat] | type[Detokenize]


class ParsedRequest(msgspec.Struct):
    """A request that may go on.

    Attributes:
        model: that it is for; empty: the base model.
        sequences: see ``Sampling.sequences``.
        constraint: on its answers.
        may_call: see ``Sampling.may_call``.
        body: it, with the fields of this module alone.
    """

    model: str
    sequences: int
    constraint: Constraint | None
    may_call: bool
    body: bytes


def parse_request(path: str, body: bytes, context: int) -> ParsedRequest | Refusal:
    """What a request is for; refused if it is not JSON to the letter, or has what its path does not take.

    Args:
        context: the most tokens of a sequence.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        kind = _kind(path, fields.keys())
        known = {each.encode_name for each in msgspec.structs.fields(kind)} | IGNORED
        if others := [
            name for name, value in fields.items() if name not in known and bytes(value) != b"null"
        ]:
            return _refused(f"this gateway does not take the field {min(others)[:80]!r} at {path}")
        if not numbers_fit(body):
            return _refused(f"a number of the body has more than {DIGITS} digits in a row")
        request = msgspec.json.decode(body, type=kind)
        if wrong := request.check(context):
            return _refused(wrong)
        wanted, sequences, may_call = None, 1, False
        if isinstance(request, Generating):
            may_call, sequences, wanted = request.may_call, request.sequences, request.constraint()
    except ConstraintRefused as error:
        return _refused(str(error))
    except (UnicodeError, *UNREADABLE) as error:
        return _refused(f"the body is not as it should be: {error}")
    model, encoded = _given(request.model) or "", msgspec.json.encode(request)
    return ParsedRequest(model, sequences, wanted, may_call, encoded)


def _kind(path: str, fields: Any) -> Kind:
    if path == "/v1/completions":
        return Completion
    if path == "/v1/chat/completions":
        return Chat
    if path == RESPONSES:
        return Response
    if path == "/detokenize":
        return Detokenize
    return TokenizeChat if "messages" in fields else TokenizeText


def _given(value: Any) -> Any:
    return None if value is UNSET else value


def _likeliest(count: int | UnsetType | None) -> int:
    """Log-probabilities of a token: so many, and its own."""
    number = _given(count)
    return 0 if number is None else number + 1


def _too_long(tokens: int, context: int) -> str:
    return f"{tokens} tokens; a sequence here has {context} at most" if tokens > context else ""


def text_bytes(context: int) -> int:
    """The most bytes of a text, or of a chat's messages, as JSON has them."""
    return FIELDS_BYTES + TOKEN_BYTES * context


def _too_large(size: int, context: int) -> str:
    max_bytes = text_bytes(context)
    return f"a text of {size} bytes; {max_bytes} are the most here" if size > max_bytes else ""


def _wrong(
    messages: list[ChatMessage],
    tools: list[Tool] | UnsetType | None,
    options: ForTemplate | UnsetType | None,
) -> str:
    """What templates and vLLM would fail at, or take long for."""
    if sum(len(each.content) for each in messages if isinstance(each.content, list)) > PARTS:
        return f"messages of a chat have {PARTS} parts at most"
    if len(msgspec.json.encode(_given(tools))) > TOOLS_BYTES:
        return f"tools have {TOOLS_BYTES} bytes at most"
    if len(msgspec.json.encode(_given(options))) > FIELDS_BYTES:
        return f"chat_template_kwargs have {FIELDS_BYTES} bytes at most"
    if named := NO_VARIABLES & _given(options or {}).keys():
        return f"chat_template_kwargs: {min(named)} is no variable of a template"
    for message in messages:
        for call in _given(message.tool_calls) or []:
            try:
                arguments = msgspec.json.decode(call.function.arguments or "{}")
            except UNREADABLE:
                arguments = None
            if not isinstance(arguments, dict):
                return "arguments of a tool call are an object in JSON"
    return ""


def _refused(why: str) -> Refusal:
    return Refusal(400, "invalid_request_error", why)
