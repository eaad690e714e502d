"""The bounds of clients' requests, and types of fields that have them. No I/O."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

INT32 = 2**31 - 1
Count = Annotated[int, Meta(ge=0, le=INT32)]
Token = Annotated[int, Meta(ge=0, le=INT32)]
Tokens = Annotated[list[Token], Meta(max_length=128)]
LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern=r"\A[0-9]{1,7}\Z")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=300),
]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
StopStrings = Annotated[list[Stop], Meta(max_length=4)]  # as many as vLLM takes
ShortText = Annotated[str, Meta(max_length=256)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Scalar = str | bool | int | float | None
MESSAGES = 1024
PARTS = 4096  # of all messages of a chat
TOOLS_BYTES = 64 << 10
PROMPTS = 32  # of a request
PROMPT_TOKENS = 16_384  # of all its prompts, or twice as many as a sequence may have
SETTINGS = 16_384  # biases and stops of a request, for all its sequences: vLLM has them for each
ANSWER_BYTES = 4 << 20
LOGPROB_BYTES = 160  # of an answer, for each log-probability
ID_BYTES = 8  # of an answer, for each token's id
TOKEN_BYTES = 16  # of a text, for each token that it may have
FIELDS_BYTES = 4 << 10  # beside


def given(value: Any) -> Any:
    """The value of a field; None: a request has none."""
    return None if value is UNSET else value


def logprobs_of_token(count: int | UnsetType | None) -> int:
    """Log-probabilities of a token: so many, and its own."""
    number = given(count)
    return 0 if number is None else number + 1


def too_long(tokens: int, context: int) -> str:
    """Why a prompt of so many tokens is refused; empty: it is not."""
    return f"{tokens} tokens; a sequence here has {context} at most" if tokens > context else ""


def text_bytes(context: int) -> int:
    """The most bytes of a text, or of a chat's messages, as JSON has them."""
    return FIELDS_BYTES + TOKEN_BYTES * context


def too_large(size: int, context: int) -> str:
    """Why a text of so many bytes, as JSON has it, is refused; empty: it is not."""
    max_bytes = text_bytes(context)
    return f"a text of {size} bytes; {max_bytes} are the most here" if size > max_bytes else ""
