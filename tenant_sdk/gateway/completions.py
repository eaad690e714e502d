"""The fields of ``/v1/completions``, and those that chats have as well. No I/O."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tenant_sdk.gateway.constraints import Constraint, read_constraint
from tenant_sdk.gateway.request_limits import (
    ANSWER_BYTES,
    ID_BYTES,
    INT32,
    LOGPROB_BYTES,
    PROMPT_TOKENS,
    PROMPTS,
    SETTINGS,
    TOKEN_BYTES,
    Count,
    LogitBias,
    Penalty,
    Seed,
    ShortText,
    Stop,
    StopStrings,
    Token,
    Tokens,
    TopLogprobs,
    given,
    logprobs_of_token,
    too_large,
    too_long,
)


class StreamOptions(Struct):
    """Of a stream."""

    include_usage: bool | UnsetType | None = UNSET
    continuous_usage_stats: bool | UnsetType | None = UNSET


class RequestSize(NamedTuple):
    """How much a request is.

    Attributes:
        prompts: how many.
        prompt_tokens: of all prompts, at most.
        echoed: bytes of all prompts, if each answer repeats its own.
        answer_tokens: of each sequence, at most.
        logprobs: log-probabilities of each token.
    """

    prompts: int
    prompt_tokens: int
    echoed: int
    answer_tokens: int
    logprobs: int


class GenerationRequest(Struct, kw_only=True):
    """What completions and chats have in common; ``UNSET`` and null are not the same to vLLM."""

    model: ShortText | UnsetType | None = UNSET
    frequency_penalty: Penalty | UnsetType | None = UNSET
    logit_bias: LogitBias | UnsetType | None = UNSET
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

    def size(self, context: int) -> RequestSize:
        """See ``RequestSize``; ``context``: the most tokens of a sequence."""
        raise NotImplementedError

    def over_budget(self, context: int) -> str:
        """What goes beyond the budget of a request, in which products count; empty: nothing."""
        size, answers = self.size(context), given(self.n) or 1
        if size.prompt_tokens > (max_tokens := max(2 * context, PROMPT_TOKENS)):
            return (
                f"prompts of up to {size.prompt_tokens} tokens; those of a request have {max_tokens} at most"
            )
        stops = 1 if isinstance(self.stop, str) else len(given(self.stop) or ())
        settings = stops + len(given(self.logit_bias) or ()) + len(given(self.stop_token_ids) or ())
        if (entries := settings * size.prompts * answers) > SETTINGS:
            return (
                f"{settings} entries of logit_bias, stop and stop_token_ids for {size.prompts * answers} "
                f"sequences are {entries}, and {SETTINGS} are the most: ask for fewer, in several requests"
            )
        ids = ID_BYTES if self.return_token_ids is True else 0
        each = TOKEN_BYTES + LOGPROB_BYTES * size.logprobs + ids
        total = size.echoed + ids * size.prompt_tokens
        total += 0 if self.stream is True else size.answer_tokens * size.prompts * each
        if answers * total > ANSWER_BYTES:
            return (
                f"its answer may have {answers * total} bytes, and {ANSWER_BYTES} are the most: ask for "
                "fewer answers or log-probabilities, set max_tokens, or have it streamed, which counts echo "
                "alone"
            )
        return ""

    @property
    def sequences(self) -> int:
        """How many it is for at once: ``n`` answers to each prompt."""
        return self.size(0).prompts * (given(self.n) or 1)

    @property
    def may_call(self) -> bool:
        """Whether calls of tools are looked for in what the model writes."""
        return False

    def unify_constraint(self) -> Constraint | None:
        """See ``constraints.read_constraint``; the request has it in one field afterwards."""
        limit = read_constraint(given(self.response_format), given(self.structured_outputs))
        self.response_format, self.structured_outputs = UNSET, limit.as_field() if limit else UNSET
        return limit


class CompletionRequest(GenerationRequest, kw_only=True):
    """``/v1/completions``."""

    prompt: str | list[str | Token | list[Token]]
    echo: bool | UnsetType | None = UNSET
    logprobs: TopLogprobs | UnsetType | None = UNSET

    def invalid_reason(self, context: int) -> str:
        """What is wrong with it that types do not say; empty: nothing."""
        prompts = [self.prompt] if isinstance(self.prompt, str) else self.prompt
        if len(prompts) > PROMPTS and not isinstance(prompts[0], int):  # before anything that takes time
            return f"{len(prompts)} prompts; a request here has {PROMPTS} at most"
        if len({type(each) for each in prompts}) != 1:
            return "a list of prompts has texts, or tokens, or lists of tokens, and is not empty"
        if [] in prompts:
            return "a prompt has no tokens"
        several = self.stream is True and (given(self.n) or 1) > 1
        if self.echo is True and several and given(self.logprobs) is not None:
            return "echo with logprobs is streamed for one answer only: leave one of them out, or set n to 1"
        if self.echo is True and "" in prompts:
            return "an empty prompt cannot be repeated: leave echo out"
        texts, lists = self._sizes
        return (
            too_long(max(lists, default=0), context)
            or too_large(max(texts, default=0), context)
            or self.over_budget(context)
        )

    @property
    def _sizes(self) -> tuple[list[int], list[int]]:
        """Bytes of the prompts that are texts, as JSON has them, and tokens of the others."""
        one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: Any = [self.prompt] if one else self.prompt
        texts = [len(msgspec.json.encode(each)) - 2 for each in prompts if isinstance(each, str)]
        return texts, [len(each) for each in prompts if isinstance(each, list)]

    def size(self, context: int) -> RequestSize:
        """See ``RequestSize``; a text counts as a token for two bytes, which are seldom less."""
        texts, lists = self._sizes
        tokens = sum(min(context, each) for each in ([size // 2 + 1 for size in texts] or lists))
        answer = min(context, 16 if given(self.max_tokens) is None else given(self.max_tokens))
        logprobs, echoed = logprobs_of_token(self.logprobs), 0
        if self.echo is True:
            echoed = (sum(texts) or TOKEN_BYTES * tokens) + LOGPROB_BYTES * logprobs * tokens
        return RequestSize(len(texts or lists), tokens, echoed, answer, logprobs)
