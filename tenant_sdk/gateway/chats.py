"""The fields of ``/v1/chat/completions``: messages and tools. No I/O."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shared.encoded import UNREADABLE, decode_json
from tenant_sdk.gateway.completions import GenerationRequest, RequestSize
from tenant_sdk.gateway.constraints import (
    Constraint,
    ConstraintRefused,
    tool_arguments_constraint,
    tool_calls_constraint,
)
from tenant_sdk.gateway.request_limits import (
    FIELDS_BYTES,
    MESSAGES,
    PARTS,
    TOOLS_BYTES,
    Count,
    Scalar,
    ShortText,
    TopLogprobs,
    given,
    logprobs_of_token,
    too_large,
)


class Function(Struct):
    """Of a tool, as templates show it to a model."""

    name: ShortText
    description: str | UnsetType | None = UNSET
    parameters: dict[str, Any] | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class Tool(Struct):
    """Which a template may show, and a model may call."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(Struct):
    """Of the function that an answer must call."""

    name: ShortText


class ChosenTool(Struct):
    """See ``FunctionName``."""

    function: FunctionName
    type: Literal["function"] = "function"


class FunctionCall(Struct):
    """A function that an earlier answer called."""

    name: ShortText
    arguments: str


class ToolCall(Struct):
    """See ``FunctionCall``."""

    id: ShortText
    function: FunctionCall
    type: Literal["function"] = "function"


class ContentPart(Struct):
    """Of a message: text alone."""

    text: str
    type: Literal["text"] = "text"


class ChatMessage(Struct):
    """Of a chat; what else clients put into one is left out."""

    role: ShortText
    content: str | Annotated[list[ContentPart], Meta(max_length=MESSAGES)] | UnsetType | None = UNSET
    name: ShortText | UnsetType | None = UNSET
    tool_calls: Annotated[list[ToolCall], Meta(max_length=64)] | UnsetType | None = UNSET
    tool_call_id: ShortText | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES)]
Tools = Annotated[list[Tool], Meta(max_length=64)]
TemplateVariables = Annotated[dict[ShortText, Scalar], Meta(max_length=16)]
# vLLM and transformers take these beside a template's variables; `padding` to any length takes all memory.
RESERVED_VARIABLES = frozenset(
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
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(GenerationRequest, kw_only=True):
    """``/v1/chat/completions``."""

    messages: Messages
    tools: Tools | UnsetType | None = UNSET
    add_generation_prompt: bool | UnsetType = UNSET
    continue_final_message: bool | UnsetType = UNSET
    chat_template_kwargs: TemplateVariables | UnsetType | None = UNSET
    logprobs: bool | UnsetType | None = UNSET
    top_logprobs: TopLogprobs | UnsetType | None = UNSET
    max_completion_tokens: Count | UnsetType | None = UNSET
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    reasoning_effort: ReasoningEffort | UnsetType | None = UNSET
    include_reasoning: bool | UnsetType = UNSET

    def invalid_reason(self, context: int) -> str:
        """See ``CompletionRequest``."""
        return (
            invalid_chat_reason(self.messages, self.tools, self.chat_template_kwargs)
            or self._invalid_choice_reason()
            or too_large(len(msgspec.json.encode((self.messages, given(self.tools) or []))), context)
            or self.over_budget(context)
        )

    def _invalid_choice_reason(self) -> str:
        """Why no tool can be chosen so; empty: it can."""
        choice, names = given(self.tool_choice), [each.function.name for each in given(self.tools) or ()]
        if choice in ("auto", "required") and not names:
            return "tool_choice needs tools"
        if isinstance(choice, ChosenTool) and choice.function.name not in names:
            return "tool_choice names a function that is not in tools"
        return "two tools have the same name" if len(set(names)) < len(names) else ""

    @property
    def may_call(self) -> bool:
        """See ``GenerationRequest.may_call``."""
        return bool(given(self.tools)) and given(self.tool_choice) in (None, "auto")

    def unify_constraint(self) -> Constraint | None:
        """See ``constraints.constraint``; a call that must be made fixes the answer's form, too.

        vLLM makes the same schema of the tools (``tool_calls``), so that the request has no constraint of its
        own.
        """
        limit, choice = super().unify_constraint(), given(self.tool_choice)
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
        functions = {each.function.name: given(each.function.parameters) for each in given(self.tools)}
        if isinstance(choice, ChosenTool):
            return tool_arguments_constraint(functions[choice.function.name])
        return tool_calls_constraint(functions)

    def size(self, context: int) -> RequestSize:
        """See ``RequestSize``; of its prompt an answer has nothing."""
        limits = [each for each in (self.max_tokens, self.max_completion_tokens) if isinstance(each, int)]
        logprobs = max(1, logprobs_of_token(self.top_logprobs)) if self.logprobs is True else 0
        return RequestSize(1, 0, 0, min([context, *limits]), logprobs)


def invalid_chat_reason(
    messages: list[ChatMessage],
    tools: list[Tool] | UnsetType | None,
    options: TemplateVariables | UnsetType | None,
) -> str:
    """What templates and vLLM would fail at, or take long for."""
    if sum(len(each.content) for each in messages if isinstance(each.content, list)) > PARTS:
        return f"messages of a chat have {PARTS} parts at most"
    if len(msgspec.json.encode(given(tools))) > TOOLS_BYTES:
        return f"tools have {TOOLS_BYTES} bytes at most"
    if len(msgspec.json.encode(given(options))) > FIELDS_BYTES:
        return f"chat_template_kwargs have {FIELDS_BYTES} bytes at most"
    if named := RESERVED_VARIABLES & given(options or {}).keys():
        return f"chat_template_kwargs: {min(named)} is no variable of a template"
    for message in messages:
        for call in given(message.tool_calls) or []:
            try:
                arguments = decode_json(call.function.arguments or "{}")
            except UNREADABLE:
                arguments = None
            if not isinstance(arguments, dict):
                return "arguments of a tool call are an object in JSON"
    return ""
