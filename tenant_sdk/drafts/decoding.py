"""Text from a model with a draft: ``model.generate(ids, custom_generate=draft)``.

A pass computes the last token and the guesses behind it. Then a token is chosen at each place from the
model's own distribution, as ``generate`` does without a draft, up to the first one that differs from its
guess. So greedy text is the same, and sampled text has the same distribution: each of its tokens was drawn
from the model's distribution after the tokens before it. The guesses decide only how many places of a pass
are used.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from shared.errors import ConfigurationError
from tenant_sdk.drafts.head import Guesser, backbones_of
from tenant_sdk.drafts.length import DraftLength
from tenant_sdk.drafts.passes import Passes
from tenant_sdk.drafts.repeats import WINDOW

_RECENT_PASSES = 5  # passes whose time is kept
_LATE_SHARE = 0.1  # of the time between two passes


@dataclass(frozen=True)
class DraftPace:
    """A constant rate of passes, and a multiple for their number, which then says little about the text.

    Attributes:
        seconds: Time from the beginning of one pass to the beginning of the next, in seconds.
        multiple: The number of passes of each answer is a multiple of this number. The SDK discards the
            results of passes after the end of an answer.
    """

    seconds: float
    multiple: int = 32


class Draft:
    """A draft for one model: the value of ``custom_generate`` of ``generate``.

    A pass adds the same number of tokens to each sequence of a batch. It uses only guesses that are right in
    all sequences.

    Args:
        guesser: Source of the guesses.
        length: Rule for the number of guesses in each pass.
        pace: Pace of the passes. Default: each pass begins at once, and the text decides the number of
            passes.
        clock: Function that returns a time in seconds. The draft uses only differences of these times.
        sleep: Function that waits for the given number of seconds.

    Attributes:
        passes: Number of passes of the model so far, without those that read prompts.
        tokens: Number of tokens that these passes added to each sequence.
        late: Number of passes that began later than the pace requires, because the pass before took too long.
    """

    def __init__(
        self,
        guesser: Guesser,
        length: DraftLength,
        *,
        pace: DraftPace | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._guesser, self._length = guesser, length
        self._pace, self._clock, self._sleep = pace, clock, sleep
        self.passes = self.tokens = self.late = self._fillers = 0
        self._due = 0.0  # when the next pass shall begin
        self._seconds = deque[float](maxlen=_RECENT_PASSES)

    @property
    def seconds_a_pass(self) -> float:
        """The median time of the newest passes, in seconds, including the time to guess."""
        return median(self._seconds)

    def __str__(self) -> str:
        """A line about the passes so far."""
        if not self.passes:
            return "draft: no pass of the model yet"
        each = self.tokens / max(1, self.passes - self._fillers)
        late = f"; {self.late} of them began later than the pace wants" if self.late else ""
        passes = f"{self.passes} pass{'es'[: 2 * (self.passes != 1)]}"
        return f"draft: {each:.2f} tokens a pass, in {passes} of the model after prompts{late}"

    def streaming(self, streamer: BaseStreamer) -> Callable[..., Any]:
        """Returns a ``custom_generate`` that also gives each token to a streamer, as soon as it is certain.

        ``generate`` of transformers does not give its argument ``streamer`` to such functions.
        """

        def decode(
            model: Any,
            input_ids: Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> Any:
            streamer.put(input_ids.cpu())
            written = self(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                streamer,
                **model_kwargs,
            )
            streamer.end()
            return written

        return decode

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """One call of ``generate``, with the arguments that it prepares.

        Raises:
            ConfigurationError: beams, or outputs of layers, are asked for, or the model has an encoder.
        """
        _check_supported(model, generation_config)
        text = _GeneratedText(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        with _last_hidden(model) as hidden:
            passes = Passes(model, model_kwargs)
            text.accept(passes.prompt(input_ids, generation_config)[:, -1:], None)
            state, before = hidden()[:, -1], self.passes
            self._due = self._clock()
            while not text.ended:
                state = self._pass(text, passes, state, hidden)
            while self._pace is not None and (self.passes - before) % self._pace.multiple:
                self._filler_pass(text, passes, state)
        return text.output(passes.cache)

    def _pass(
        self, text: _GeneratedText, passes: Passes, state: Tensor, hidden: Callable[[], Tensor]
    ) -> Tensor:
        """Guess, check, and go on; returns the hidden state before the newest token."""
        began, size = self._clock(), min(self._length.next, passes.max_guesses)
        guesses = self._guess(state, text.ids, size)
        guessing = self._clock() - began  # depends on the text, so it is over when the pass begins
        self._keep_pace()
        started = self._clock() - guessing
        logits = passes.logits(torch.cat([text.ids, guesses], 1), size + 1)
        taken = text.accept(logits, guesses)
        passes.keep(taken)
        seconds = self._clock() - started
        self._length.observe(size, seconds)
        self._seconds.append(seconds)
        self.passes, self.tokens = self.passes + 1, self.tokens + taken
        return hidden()[:, taken - 1]

    def _filler_pass(self, text: _GeneratedText, passes: Passes, state: Tensor) -> None:
        """A pass after the end of a text, which looks like those before."""
        size = min(self._length.next, passes.max_guesses)
        guesses = self._guess(state, text.ids, size)
        self._keep_pace()
        started = self._clock()
        passes.logits(torch.cat([text.ids, guesses], 1), size + 1)
        passes.keep(0)
        # While the number of guesses is chosen, it changes from pass to pass, also behind a text.
        self._length.observe(size, self._clock() - started)
        self.passes, self._fillers = self.passes + 1, self._fillers + 1

    def _keep_pace(self) -> None:
        """Wait until the next pass is due."""
        if self._pace is None:
            return
        left = self._due - self._clock()
        if left > 0:
            self._sleep(left)
        elif left < -_LATE_SHARE * self._pace.seconds:
            self.late += 1
            self._due = self._clock()
        self._due += self._pace.seconds

    def _guess(self, state: Tensor, ids: Tensor, size: int) -> Tensor:
        return self._guesser(state, list(ids[:, -WINDOW:].cpu().numpy()), size)


class _GeneratedText:
    """What is written, and how its next token is chosen; the same steps as in ``generate``."""

    def __init__(
        self,
        ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> None:
        self.ids, self.ended = ids, False
        self._processors, self._criteria = processors, criteria
        self._config, self._streamer = config, streamer
        self._open = torch.ones(len(ids), dtype=torch.bool, device=ids.device)  # sequences that go on
        self._pads = any(hasattr(each, "eos_token_id") for each in criteria)
        self._scores, self._logits = list[Tensor](), list[Tensor]()

    def accept(self, logits: Tensor, guesses: Tensor | None) -> int:
        """Choose tokens from ``[B, T, vocabulary]``, as far as they are the guesses ``[B, T - 1]``.

        Returns:
            How many.
        """
        for at in range(logits.shape[1]):
            tokens = self._choose(logits[:, at].to(copy=True, dtype=torch.float32, device=self.ids.device))
            self.ids = torch.cat([self.ids, tokens[:, None]], 1)
            if self._streamer is not None:
                self._streamer.put(tokens.cpu())
            scores = tuple(self._scores) if self._config.output_scores else None
            active = self._open
            self._open = active & ~self._criteria(self.ids, scores)
            self.ended = not self._open.any()
            wrong = guesses is None or at == guesses.shape[1] or ((tokens != guesses[:, at]) & active).any()
            if self.ended or wrong:
                break
        return at + 1

    def _choose(self, logits: Tensor) -> Tensor:
        ids: Any = self.ids
        scores = self._processors(ids, logits.clone() if self._config.output_logits else logits)
        if self._config.output_scores:
            self._scores.append(scores)
        if self._config.output_logits:
            self._logits.append(logits)
        if self._config.do_sample:
            tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
        else:
            tokens = scores.argmax(-1)
        if self._pads:
            tokens = torch.where(self._open, tokens, self._config.pad_token_id or 0)
        return tokens

    def output(self, cache: Any) -> Tensor | GenerateDecoderOnlyOutput:
        """What ``generate`` returns."""
        if not self._config.return_dict_in_generate:
            return self.ids
        scores = tuple(self._scores) if self._config.output_scores else None
        logits = tuple(self._logits) if self._config.output_logits else None
        return GenerateDecoderOnlyOutput(
            sequences=self.ids,  # type: ignore[arg-type]
            scores=scores,  # type: ignore[arg-type]
            logits=logits,  # type: ignore[arg-type]
            past_key_values=cache,
        )


def _check_supported(model: Any, config: GenerationConfig) -> None:
    """Refuse what goes another way than one token after the other.

    Raises:
        ConfigurationError: it does.
    """
    if config.num_beams and config.num_beams > 1:
        raise ConfigurationError("a draft does not go with beams: leave out num_beams, or custom_generate")
    if config.output_attentions or config.output_hidden_states:
        raise ConfigurationError(
            "a draft does not return attentions or hidden states: leave these out, or custom_generate"
        )
    if model.config.is_encoder_decoder:
        raise ConfigurationError("a draft does not go with a model that has an encoder and a decoder")


@contextmanager
def _last_hidden(model: Any) -> Iterator[Callable[[], Tensor]]:
    """Around passes: what returns the last hidden states ``[B, T, width]`` of the newest one."""
    states: list[Tensor] = []

    def keep(_module: Any, _inputs: Any, outputs: Any) -> None:
        states[:] = [outputs[0] if isinstance(outputs, tuple) else outputs.last_hidden_state]

    hooks = [each.register_forward_hook(keep) for each in backbones_of(model)]
    try:
        yield lambda: states[0]
    finally:
        for hook in hooks:
            hook.remove()
