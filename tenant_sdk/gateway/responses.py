"""The fields of ``/v1/responses``, which become those of a chat. No I/O."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tenant_sdk.gateway.chats import (
    ChatMessage,
    ChatRequest,
    ChosenTool,
    Function,
    FunctionName,
    ReasoningEffort,
    TemplateVariables,
    Tool,
    ToolCall,
)
from tenant_sdk.gateway.constraints import Constraint
from tenant_sdk.gateway.request_limits import INT32, MESSAGES, PARTS, Seed, ShortText, given

# Of a response's request: what it needs that an earlier one left behind, or leaves behind itself.
_STORED = ("background", "conversation", "previous_response_id", "prompt", "store")
_FIELDS_OF_ITEMS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}


class InputPart(Struct):
    """Of an item: text alone."""

    text: str
    type: Literal["input_text", "output_text"] = "input_text"


InputText = str | Annotated[list[InputPart], Meta(max_length=PARTS)]


class InputItem(Struct):
    """Of a response's input: a message, a call of a function, or what a function returned."""

    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | UnsetType = UNSET
    content: InputText | UnsetType = UNSET
    call_id: ShortText | UnsetType = UNSET
    name: ShortText | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    output: InputText | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Keep what its type has, with texts in one part, as templates get them.

        Raises:
            ValueError: something is missing.
        """
        for name in ("role", "content", "call_id", "name", "arguments", "output"):
            value = getattr(self, name)
            if name not in _FIELDS_OF_ITEMS[self.type]:
                value = UNSET
            elif value is UNSET:
                raise ValueError(f"a {self.type} has {' and '.join(_FIELDS_OF_ITEMS[self.type])}")
            setattr(self, name, "\n".join(each.text for each in value) if isinstance(value, list) else value)
        if self.role == "developer":  # templates of other models do not know it
            self.role = "system"

    @property
    def message(self) -> ChatMessage:
        """The same in a chat."""
        if self.type == "function_call":
            call: Any = {"id": self.call_id, "function": {"name": self.name, "arguments": self.arguments}}
            return ChatMessage("assistant", tool_calls=[msgspec.convert(call, ToolCall)])
        if self.type == "function_call_output":
            return ChatMessage("tool", given(self.output), tool_call_id=self.call_id)
        return ChatMessage(given(self.role), given(self.content))


class FlatTool(Function):
    """See ``Tool``; a response's request has the function's fields beside the type."""

    type: Literal["function"] = "function"


class FlatChosenTool(Struct):
    """See ``ChosenTool``."""

    name: ShortText
    type: Literal["function"] = "function"


class TextOptions(Struct):
    """Of a response's text."""

    format: Any = UNSET


class Reasoning(Struct):
    """Of a response."""

    effort: ReasoningEffort | UnsetType | None = UNSET


class ResponseRequest(Struct, kw_only=True):
    """``/v1/responses``: a chat in other words, by whose rules it is checked."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MESSAGES)]
    model: ShortText | UnsetType | None = UNSET
    instructions: str | UnsetType | None = UNSET
    max_output_tokens: Annotated[int, Meta(ge=1, le=INT32)] | UnsetType | None = UNSET
    stream: bool | UnsetType | None = UNSET
    stream_options: Any = UNSET  # whether its events are padded
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType | None = UNSET
    top_p: Annotated[float, Meta(gt=0, le=1)] | UnsetType | None = UNSET
    top_k: Annotated[int, Meta(ge=-1, le=INT32)] | UnsetType | None = UNSET
    seed: Seed | UnsetType | None = UNSET
    tools: Annotated[list[FlatTool], Meta(max_length=64)] | UnsetType | None = UNSET
    tool_choice: Literal["none", "auto", "required"] | FlatChosenTool | UnsetType | None = UNSET
    parallel_tool_calls: bool | UnsetType | None = UNSET
    text: TextOptions | UnsetType | None = UNSET
    structured_outputs: Any = UNSET
    reasoning: Reasoning | UnsetType | None = UNSET
    truncation: Literal["disabled"] | UnsetType | None = UNSET
    include: Annotated[list[Any], Meta(max_length=0)] | UnsetType | None = UNSET
    chat_template_kwargs: TemplateVariables | UnsetType | None = UNSET
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
        if kept := [name for name in _STORED if given(getattr(self, name))]:
            raise ValueError(
                f"{kept[0]}: this gateway keeps neither answers nor other texts; send all that was said "
                "before in input"
            )
        for name in self.__struct_fields__:
            if getattr(self, name) is None or name in (*_STORED, "stream_options"):
                setattr(self, name, UNSET)
        self.store = False
        items = [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        if instructions := given(self.instructions):
            items = [InputItem(role="system", content=instructions), *items]
        self.input, self.instructions = items, UNSET

    @property
    def _chat(self) -> ChatRequest:
        """What it asks; never a stream, since that of a response repeats the whole text at its end."""
        choice, form = self.tool_choice, self.text.format if isinstance(self.text, TextOptions) else UNSET
        if isinstance(form, dict) and form.get("type") == "json_schema":
            form = {"type": "json_schema", "json_schema": form}
        return ChatRequest(
            messages=[each.message for each in self.input if isinstance(each, InputItem)],
            max_tokens=self.max_output_tokens,
            tools=[Tool(each) for each in given(self.tools) or ()] or UNSET,
            tool_choice=ChosenTool(FunctionName(choice.name))
            if isinstance(choice, FlatChosenTool)
            else choice,
            response_format=form,
            structured_outputs=self.structured_outputs,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def invalid_reason(self, context: int) -> str:
        """See ``CompletionRequest``."""
        return self._chat.invalid_reason(context)

    @property
    def sequences(self) -> int:
        """See ``GenerationRequest.sequences``."""
        return 1

    @property
    def may_call(self) -> bool:
        """See ``GenerationRequest.may_call``."""
        return self._chat.may_call

    def unify_constraint(self) -> Constraint | None:
        """See ``GenerationRequest.unify_constraint``."""
        chat = self._chat
        limit = chat.unify_constraint()
        self.text, self.structured_outputs = UNSET, chat.structured_outputs
        return limit
