"""The tenant's work in an audit, and a record of the real events, to score the attacks with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import peft
import torch

from shared.compat import cache_name
from shared.wire.header import Direction, Operation, RequestClass
from tenant_sdk.connection.channel import Channel
from tenant_sdk.connection.keys import ProductKey
from tenant_sdk.connection.remote import LazyResult
from tenant_sdk.session.session import Session

ADAPTED = ("up_proj",)
LORA_RANK, LORA_ALPHA = 8, 16


@dataclass(frozen=True)
class WorkloadSize:
    """How much a tenant does: more rows narrow the intervals."""

    prompts: int
    new_tokens: int
    repeated: int  # prompts that are sent again and again
    repeats: int  # how often
    steps: int  # of fine-tuning, with 4 x 64 tokens each
    tokens: int  # sent through the finished adapter, or ROWS_A_NUMBER times the model's width if that is more


FULL = WorkloadSize(prompts=40, new_tokens=2, repeated=5, repeats=9, steps=16, tokens=2048)
QUICK = WorkloadSize(prompts=60, new_tokens=0, repeated=1, repeats=10, steps=2, tokens=1024)
REPEATED_TOKENS = 250
ADAPTER_TOKENS = 128
ROWS_A_NUMBER = 4  # an adapter is solved from equations with as many unknowns as a row has numbers
SAMPLES = 200


@dataclass
class SentRequest:
    """One product request of the tenant.

    ``tokens`` [T] are what the rows stand for, None for those that fingerprints are made with, ``labels`` [T]
    what the model was to predict (-1: nothing).
    """

    group: int
    direction: int
    rows: int
    phase: str = ""
    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None

    @property
    def count(self) -> int:
        """How many rows."""
        return self.rows


@dataclass
class GroundTruth:
    """What no adversary gets: products in the order in which they were sent, and the adapter.

    ``samples`` are the first ``SAMPLES`` tensors of rows that vary, as they were before they were hidden.
    """

    sent: list[SentRequest] = field(default_factory=list)
    samples: list[torch.Tensor] = field(default_factory=list)
    phase: str = ""
    tokens: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    adapter: dict[str, torch.Tensor] = field(default_factory=dict)  # B A times its scale, by layer
    text: list[str] = field(default_factory=list)

    def of(self, group: int, direction: int = Direction.FORWARD) -> list[SentRequest]:
        """Requests of one group and direction."""
        return [sent for sent in self.sent if (sent.group, sent.direction) == (group, direction)]

    def first_tokens(self) -> torch.Tensor:
        """What each row of the first group stood for; -1: nothing."""
        parts = [torch.full((sent.rows,), -1) if sent.tokens is None else sent.tokens for sent in self.of(0)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    @contextmanager
    def doing(self, phase: str, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> Iterator[None]:
        """What is sent meanwhile belongs to a phase of the workload and stands for tokens [B, S]."""
        self.phase, self.tokens = phase, tokens.flatten()
        if labels is not None:
            ahead = torch.full_like(labels, -1)
            ahead[:, :-1] = labels[:, 1:]
            self.labels = ahead.flatten()
        try:
            yield
        finally:
            self.phase, self.tokens, self.labels = "", None, None


def watch(session: Session, truth: GroundTruth) -> None:
    """Note every product of a session, as the model asked for it and as it was sent."""
    products, executor = session.products, session.executor
    ask, send = products.submit, executor.submit_piece

    def asking(
        group: int, direction: Direction, member_bits: int, rows: list[torch.Tensor], *options: Any
    ) -> LazyResult:
        if len(truth.samples) < SAMPLES:
            truth.samples += [tensor.detach().clone() for tensor in rows if len(tensor[0].unique()) > 3]
        pending = ask(group, direction, member_bits, rows, *options)
        # Fingerprints of a group are made before its first request, so its pieces are the last.
        pieces = len(rows[0])
        while pieces > 0:
            pieces -= truth.sent.pop().rows
        truth.sent.append(
            SentRequest(group, direction, len(rows[0]), truth.phase, truth.tokens, truth.labels)
        )
        return pending

    def sending(
        channel: Channel,
        operation: Operation,
        key: ProductKey,
        rows: list[torch.Tensor],
        request_class: RequestClass,
    ) -> LazyResult:
        if operation == Operation.PRODUCT:
            truth.sent.append(SentRequest(key.group, key.direction, len(rows[0])))
        return send(channel, operation, key, rows, request_class)

    products.submit, executor.submit_piece = asking, sending  # type: ignore[method-assign, assignment]


def run_workload(
    session: Session, text: list[str], size: WorkloadSize, truth: GroundTruth, seed: int
) -> None:
    """Prompts, a prompt again and again, fine-tuning, and text through the tuned adapter.

    Args:
        text: lines of real text.
        size: how much of it.
        truth: filled as it goes.
    """
    watch(session, truth)
    torch.manual_seed(seed)
    model: Any = session.load_model(progress=False)
    tokenizer = session.load_tokenizer()
    first = tokenizer.bos_token_id or 0
    stream = [token for line in text for token in tokenizer(line, add_special_tokens=False)["input_ids"]]
    prompts = [
        torch.tensor([[first, *tokenizer(line, add_special_tokens=False)["input_ids"][: 8 + i % 17]]])
        for i, line in enumerate(text[: size.prompts])
    ]
    truth.text = text[: size.prompts]
    for prompt in prompts:
        generate(model, prompt, size.new_tokens, truth)
    for i in range(size.repeated):
        # Of different lengths, so that they can be told apart.
        prompt = blocks_of(stream, REPEATED_TOKENS + i, first)[i : i + 1]
        for _ in range(size.repeats):
            with truth.doing(f"repeat {i}", prompt), torch.inference_mode():
                model(input_ids=prompt, use_cache=False)
    fine_tuned = tune(model, blocks_of(stream, 64, first), size.steps, truth)
    for layer, module in fine_tuned.named_modules():
        if isinstance(module, peft.tuners.lora.Linear):
            truth.adapter[layer.split("layers.")[-1]] = module.get_delta_weight("default").detach()
    count = max(size.tokens, ROWS_A_NUMBER * model.config.get_text_config().hidden_size)
    rows = blocks_of(stream, ADAPTER_TOKENS, first)[-(count // ADAPTER_TOKENS) :]
    for block in rows.split(8):
        with truth.doing("adapter", block), torch.inference_mode():
            fine_tuned(input_ids=block, use_cache=False)


def blocks_of(stream: list[int], length: int, first: int) -> torch.Tensor:
    """Sequences [N, length] that begin with the token that every sequence begins with."""
    whole = len(stream) // (length - 1)
    body = torch.tensor(stream[: whole * (length - 1)]).view(whole, length - 1)
    return torch.cat([torch.full((whole, 1), first), body], 1)


def generate(model: Any, prompt: torch.Tensor, new_tokens: int, truth: GroundTruth) -> None:
    """Greedy generation with a cache, token by token, noting which token each request was for."""
    tokens, cache = prompt, None
    for _ in range(new_tokens + 1):
        with truth.doing("prompt" if cache is None else "decode", tokens), torch.inference_mode():
            out = model(input_ids=tokens, **{cache_name(): cache}, use_cache=True)
        tokens, cache = out.logits[:, -1:].argmax(-1), getattr(out, cache_name())


def tune(model: Any, blocks: torch.Tensor, steps: int, truth: GroundTruth, rank: int = LORA_RANK) -> Any:
    """Fine-tune an adapter on sequences of tokens [N, S], four at a time; the tuned model."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=LORA_ALPHA, target_modules=list(ADAPTED), task_type="CAUSAL_LM"
    )
    tuned = peft.get_peft_model(model, config).train()
    tuned.enable_input_require_grads()  # as gradient checkpointing does: then the first layer has some too
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=5e-3)
    for step in range(steps):
        batch = blocks[4 * step : 4 * step + 4]
        with truth.doing("train", batch, batch):
            tuned(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return tuned.eval()
