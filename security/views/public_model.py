"""Data of every adversary: the base model itself, which is public or licensed to its tenants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from shared.checkpoint import Checkpoint
from shared.compat import cache_name
from shared.errors import ConfigurationError
from shared.ring.fixed_point import Planes
from shared.ring.product import group_planes
from shared.wire.header import RINGS
from shared.wire.messages import Manifest


class PublicModel:
    """The adversary's copy of the checkpoint that the executor serves.

    Args:
        folder: Folder of the checkpoint.
        manifest: Manifest of the executor, which defines the groups.

    Raises:
        ConfigurationError: The model is not a decoder whose first layers get inputs that depend only on the
            token.
    """

    def __init__(self, folder: str | Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._checkpoint = Checkpoint(folder)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        self._base = self.model.get_submodule(manifest.base_prefix) if manifest.base_prefix else self.model
        self._prefix = f"{manifest.base_prefix}." if manifest.base_prefix else ""
        self.vocabulary = int(self.model.config.vocab_size)

    def group_of(self, layer: str) -> int:
        """The id of the group with a member whose name ends with ``layer``, as ``layers.0.mlp.up_proj``."""
        for identity, group in enumerate(self.manifest.groups):
            if any(f".{member.name}".endswith(f".{layer}") for member in group.members):
                return identity
        raise ConfigurationError(f"the executor serves no layer {layer}")

    def weight(self, group: int) -> torch.Tensor:
        """The weights of all members of a group, one below the other: float32 [O, D]."""
        members = self.manifest.groups[group].members
        return torch.cat([self._checkpoint.member_weight(member).float() for member in members])

    def parameter(self, name: str) -> torch.Tensor:
        """A parameter of the base model, such as ``norm.weight``."""
        value: torch.Tensor = self._base.get_parameter(name)
        return value

    def scales(self, group: int) -> torch.Tensor:
        """The scales of a group's planes, float32 [O]. Tenants multiply backward rows by them."""
        return self.planes(group).scales

    @cache  # noqa: B019 - of one model, for as long as it lives
    def planes(self, group: int) -> Planes:
        """A group's planes, in the numerics of the manifest; ``ring`` if those are floats."""
        count = RINGS.get(self.manifest.numerics, RINGS["ring"])
        return group_planes(self._checkpoint, self.manifest.groups[group], count)

    @contextmanager
    def watching(self, groups: list[int], *, stop: bool = False) -> Iterator[dict[int, torch.Tensor]]:
        """Records inputs [batch, sequence, D] of groups while the model runs. ``stop``: end at the first."""
        seen: dict[int, torch.Tensor] = {}
        modules = dict(self.model.named_modules())

        def keep(group: int) -> Any:
            def hook(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> None:
                seen[group] = arguments[0].detach()
                if stop:
                    raise _Enough

            return hook

        handles = [
            modules[self._prefix + self.manifest.groups[g].members[0].name].register_forward_pre_hook(keep(g))
            for g in groups
        ]
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()

    @cached_property
    def first_inputs(self) -> torch.Tensor:
        """The input of the first group for each token of the vocabulary: [V, D]."""
        tokens = torch.arange(self.vocabulary)[:, None]
        tables = []
        for position in (0, 1):
            with self.watching([0], stop=True) as seen, torch.inference_mode(), suppress(_Enough):
                self._base(input_ids=tokens, position_ids=torch.full_like(tokens, position), use_cache=False)
            tables.append(seen[0][:, 0].clone())
        if not torch.allclose(tables[0], tables[1], rtol=1e-4):
            raise ConfigurationError(
                "this model adds positions to its embeddings; the attacks know models with rotary positions"
            )
        return tables[0]

    def own_text(self, seed: int, texts: int = 64, length: int = 32) -> torch.Tensor:
        """Tokens [texts, length] that the model samples without a prompt: a public sample of text."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            first = torch.full((texts, 1), int(self.model.config.bos_token_id or 0))
            limits = {"max_new_tokens": length, "min_new_tokens": length}
            written = self.model.generate(
                first,
                attention_mask=torch.ones_like(first),
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                **limits,
            )
        return torch.as_tensor(written[:, 1:])

    def predictions(self, tokens: torch.Tensor, changes: dict[str, torch.Tensor]) -> torch.Tensor:
        """The likeliest next tokens [N, S] at each place of sequences [N, S], with some weights changed."""
        for name, change in changes.items():
            self.parameter(name).add_(change)
        with torch.inference_mode():
            likeliest: torch.Tensor = self.model(input_ids=tokens, use_cache=False).logits.argmax(-1)
        for name, change in changes.items():
            self.parameter(name).sub_(change)
        return likeliest

    def next_inputs(self, group: int, prefix: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """The inputs [K, D] of a group for each of the tokens [K] after a prefix."""
        cache: Any = transformers.DynamicCache(config=self.model.config)
        with torch.inference_mode(), self.watching([group], stop=True) as seen:
            with suppress(_Enough):  # so that only the layers in front are kept for every candidate
                self._base(input_ids=torch.tensor([[*prefix]]), **{cache_name(): cache})
            for layer in cache.layers:
                if layer.is_initialized:
                    layer.batch_repeat_interleave(len(tokens))
            with suppress(_Enough):
                self._base(input_ids=tokens[:, None], **{cache_name(): cache})
        return seen[group][:, -1].clone()


class _Enough(Exception):
    """The input that was wanted is there, and the rest of the model need not run."""
