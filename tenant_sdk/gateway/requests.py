"""The permitted requests of clients: fields of each path, with bounds; all others are refused. No I/O.

A request is read with these types and written again from them, so that vLLM reads nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from shared.encoded import UNFIT, UNREADABLE, numbers_fit
from tenant_sdk.gateway.admission import Refusal
from tenant_sdk.gateway.chats import ChatRequest, Messages, TemplateVariables, Tools, invalid_chat_reason
from tenant_sdk.gateway.completions import CompletionRequest
from tenant_sdk.gateway.constraints import Constraint, ConstraintRefused
from tenant_sdk.gateway.request_limits import ShortText, Token, given, too_long
from tenant_sdk.gateway.responses import ResponseRequest

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
STRINGS_BYTES = 64 << 10  # of a text whose tokens are also reported as texts, which takes vLLM far longer


class Tokenizing(Struct, kw_only=True):
    """What both kinds of ``/tokenize`` have in common."""

    model: ShortText | UnsetType | None = UNSET
    add_special_tokens: bool | UnsetType = UNSET
    return_token_strs: bool | UnsetType | None = UNSET


class TokenizeText(Tokenizing, kw_only=True):
    """``/tokenize`` of a text."""

    prompt: str

    def invalid_reason(self, context: int) -> str:
        """See ``CompletionRequest``."""
        return ""


class TokenizeChat(Tokenizing, kw_only=True):
    """``/tokenize`` of a chat; a structure has one base, so fields of ``ChatRequest`` stand here again."""

    messages: Messages
    tools: Tools | UnsetType | None = UNSET
    add_generation_prompt: bool | UnsetType = UNSET
    continue_final_message: bool | UnsetType = UNSET
    chat_template_kwargs: TemplateVariables | UnsetType | None = UNSET

    def invalid_reason(self, context: int) -> str:
        """See ``CompletionRequest``."""
        return invalid_chat_reason(self.messages, self.tools, self.chat_template_kwargs)


class Detokenize(Struct, kw_only=True):
    """``/detokenize``."""

    tokens: list[Token]
    model: ShortText | UnsetType | None = UNSET

    def invalid_reason(self, context: int) -> str:
        """See ``CompletionRequest``."""
        return too_long(len(self.tokens), context)


Generating = CompletionRequest | ChatRequest | ResponseRequest
RequestType = type[Generating] | type[TokenizeText] | type[TokenizeChat] | type[Detokenize]


class ParsedRequest(msgspec.Struct):
    """A request that may go on.

    Attributes:
        model: that it is for; empty: the base model.
        sequences: see ``GenerationRequest.sequences``.
        constraint: on its answers.
        may_call: see ``GenerationRequest.may_call``.
        body: it, with the permitted fields alone.
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
        kind = _request_type(path, fields.keys())
        known = IGNORED.union(kind.__struct_encode_fields__)
        if others := [
            name for name, value in fields.items() if name not in known and bytes(value) != b"null"
        ]:
            return _refused(f"this gateway does not take the field {min(others)[:80]!r} at {path}")
        if not numbers_fit(body):
            return _refused(f"the body is not taken: {UNFIT}")
        request = msgspec.json.decode(body, type=kind)
        if wrong := request.invalid_reason(context):
            return _refused(wrong)
        strings = isinstance(request, Tokenizing) and request.return_token_strs is True
        if strings and len(body) > STRINGS_BYTES:
            return _refused(f"return_token_strs is for bodies of up to {STRINGS_BYTES} bytes; leave it out")
        wanted, sequences, may_call = None, 1, False
        if isinstance(request, Generating):
            may_call, sequences, wanted = request.may_call, request.sequences, request.unify_constraint()
    except ConstraintRefused as error:
        return _refused(str(error))
    except (UnicodeError, *UNREADABLE) as error:
        return _refused(f"the body is not as it should be: {error}")
    model, encoded = given(request.model) or "", msgspec.json.encode(request)
    return ParsedRequest(model, sequences, wanted, may_call, encoded)


def _request_type(path: str, fields: Any) -> RequestType:
    if path == "/v1/completions":
        return CompletionRequest
    if path == "/v1/chat/completions":
        return ChatRequest
    if path == RESPONSES:
        return ResponseRequest
    if path == "/detokenize":
        return Detokenize
    return TokenizeChat if "messages" in fields else TokenizeText


def _refused(why: str) -> Refusal:
    return Refusal(400, "invalid_request_error", why)
