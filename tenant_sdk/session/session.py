"""A tenant's session with an executor: the object that ``tenant_sdk.connect`` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shared.errors import ConfigurationError
from shared.forks import ForkGuard
from shared.wire.header import EXACT, Direction
from shared.wire.messages import Manifest
from shared.wire.traffic import TokenBytes, token_bytes
from tenant_sdk.connection.remote import RemoteExecutor
from tenant_sdk.connection.stats import Stats
from tenant_sdk.model import loading as model_loading
from tenant_sdk.model.experts import Padding
from tenant_sdk.model.layer_replacement import attach_layers, detach_layers, warn_if_trained
from tenant_sdk.model.mixtures import ExpertPlacement
from tenant_sdk.model.naming import base_of_peer, find_base, name_model
from tenant_sdk.model.virtual import RemoteGroup
from tenant_sdk.products.products import Products
from tenant_sdk.sequences.contexts import LongContext, prefill
from tenant_sdk.session.keeping import Kept


class Session:
    """A session with an executor, which multiplies the frozen layers of models.

    ``connect`` opens it; ``close`` or ``with`` ends it.

    Attributes:
        products: of the executor's groups, hidden as the privacy mode says; what the models' layers ask.
        executor: the connection: what is asked of it directly, it sees as it is.
        groups: the manifest's, as layers ask for their products.
        privacy: the privacy mode.
        experts: where experts are multiplied: ``local``, ``padded`` or ``routed``, see ``connect``.
        kept: the groups whose products are computed here, if ``keep_gib`` was given.
    """

    def __init__(
        self,
        executor: RemoteExecutor,
        products: Products,
        privacy: str,
        experts: str,
        *,
        answer_bits: int = EXACT,
        remote_sources: int = 0,
        kept: Kept | None = None,
    ) -> None:
        self._answer_bits, self._remote_sources, self.kept = answer_bits, remote_sources, kept
        self.executor, self.products, self.privacy, self._fork_guard = (
            executor,
            products,
            privacy,
            ForkGuard(),
        )
        self.experts, self._padding = experts, Padding() if experts == "padded" else None
        manifest = executor.manifest
        self.groups = [
            RemoteGroup(at, info, products, manifest.digest) for at, info in enumerate(manifest.groups)
        ]

    @property
    def manifest(self) -> Manifest:
        """The executor's list of groups, parameters and files."""
        return self.executor.manifest

    @property
    def stats(self) -> Stats:
        """A copy of the session's counters."""
        stats = self.executor.stats
        return dataclasses.replace(
            stats, key_exchange=dict(stats.key_exchange), replicas=dict(stats.replicas)
        )

    def token_bytes(self, *, training: bool = False) -> TokenBytes:
        """Payload bytes for one token, computed from the shapes of the groups, without experts.

        Args:
            training: forward and backward through all layers; default: forward, as in decoding.
        """
        directions = (Direction.FORWARD, Direction.BACKWARD) if training else (Direction.FORWARD,)
        kept = self.kept.groups if self.kept else ()
        passed = [
            at
            for at, group in enumerate(self.manifest.groups)
            if not group.head and not group.of_expert and at not in kept
        ]
        return token_bytes(
            [self.executor.shapes[at] for at in passed],
            directions,
            itemsize=self.executor.wire_dtype.itemsize,
            answer_bits=self._answer_bits,
            sources=self._remote_sources,
        )

    def load_model(
        self,
        *,
        dtype: torch.dtype | str = torch.float32,
        offload_head: bool = False,
        exclude: Sequence[str] = (),
        model_class: type[Any] | None = None,
        base: str | Path | None = None,
        progress: bool = True,
        **config_overrides: Any,
    ) -> PreTrainedModel:
        """Returns the executor's model. Its frozen linear layers stay there; the session downloads the rest.

        Args:
            dtype: of the parameters that the tenant holds, and so of activations; or its name, ``bfloat16``.
            offload_head: let the executor compute the output head as well, if it serves it.
            exclude: layers that one of these fits are local: a name, or parts of names, such as ``o_proj``,
                ``layers.0`` or ``mlp.experts``. Their weights are asked for with one
                row for each of a layer's inputs, and are what the executor multiplies with, as exact as the
                session's products. Experts, which go by the name of their parameter, are downloaded.
            model_class: another transformers class around the same base model, such as
                ``AutoModelForSequenceClassification``; default: the checkpoint's own.
            base: where the base model is found without any executor, which adapters will say: a folder, whose
                weights are then compared, or ``hub:NAME[@REVISION]``. Default: the provider's word, if
                that is a name at a hub; ``""``: nothing. PEFT's ``save_pretrained`` asks the hub about such a
                name; ``save_adapter`` asks nobody.
            progress: show a progress bar.
            config_overrides: as in ``AutoConfig.from_pretrained``, such as ``num_labels=3``.

        Returns:
            A ``PreTrainedModel`` in evaluation mode.

        Raises:
            ModelMismatch: this transformers builds another model than the executor serves.
            ConfigurationError: ``offload_head`` with an executor that does not serve its head; an entry of
                ``exclude`` fits no layer; ``base`` is neither a folder nor a name, or another model.
        """
        self._check_head(offload_head)
        named_base = None if base is None else find_base(base, self.manifest)
        model = model_loading.load_model(
            self.executor,
            self.groups,
            self._placement,
            dtype=dtype,
            offload_head=offload_head,
            exclude=exclude,
            progress=progress,
            model_class=model_class,
            **config_overrides,
        )
        name_model(model, base_of_peer(self.manifest) if named_base is None else named_base)
        return model

    def load_tokenizer(self) -> Any:
        """Returns the executor's tokenizer.

        Raises:
            ConfigurationError: it serves none.
        """
        return model_loading.load_tokenizer(self.executor)

    def attach(
        self,
        model: nn.Module,
        *,
        offload_head: bool = False,
        exclude: Sequence[str] = (),
        probe: bool = True,
    ) -> nn.Module:
        """Replace frozen linear layers of a model that you loaded by virtual ones, and free their weights.

        All else stays yours: embeddings, norms, biases and the head are in ``model.parameters()``, and train
        unless they are frozen, as ``peft.get_peft_model`` does. If they do train, a warning says so once.

        Args:
            model: a transformers model, or a PEFT model around one; changed in place.
            offload_head: swap the output head too.
            exclude: see ``load_model``; such layers stay local.
            probe: before swapping, send one random row per layer and compare, so that another
                checkpoint of the same shape is noticed: one whose answers differ by more than 5 % in norm in
                any layer. Less is taken for rounding, such as a copy in another precision; weights that are
                all 3 % too large pass too. ``detach`` and ``--model`` of the command line compare the
                checkpoint's digest instead.

        Returns:
            The same model.

        Raises:
            ModelMismatch: layers, shapes or weights differ; the model is unchanged.
        """
        self._check_head(offload_head)
        attach_layers(
            model,
            self.groups,
            offload_head=offload_head,
            exclude=exclude,
            probe=probe,
            held=self.manifest.parameters,
            placement=self._placement,
        )
        warn_if_trained(model)
        return model

    def detach(self, model: nn.Module, checkpoint: str | Path | None = None) -> nn.Module:
        """Undo ``attach``: restore the real layers, with weights from the checkpoint's folder.

        Args:
            checkpoint: folder; default the one that the model was loaded from.

        Raises:
            CheckpointError: there is no such folder.
            ModelMismatch: it holds other weights than the executor serves; the model is unchanged.
        """
        detach_layers(model, self.manifest, checkpoint)
        return model

    def generate_options(
        self,
        model: nn.Module,
        *,
        kv: str = "host",
        kv_memory_gib: float = 0.0,
        kv_folder: str | Path | None = None,
        memory_gib: float | None = None,
        context: int | None = None,
        batch_size: int = 1,
    ) -> dict[str, Any]:
        """Returns arguments that make a long context fit into memory: ``model.generate(ids, **options)``.

        They are for one text: keys and values of it are in them, so that a later call can go on from there;
        ``generate`` raises ConfigurationError for another text. They take no space any more once nobody
        refers to them. Tokens are those of ``generate`` without them.

        Args:
            model: of this session, or a PEFT model around it.
            kv: where keys and values lie. ``device``: with the model, as transformers does it. ``host``: in
                the host's memory, in buffers that are appended to. ``disk``: in an encrypted file without a
                name; in memory are those of as many layers as fit into ``kv_memory_gib``, and of two more.
                Layers with a sliding window, or a state of fixed size, stay as they are.
            kv_folder: for the file, on a disk that is fast; default ``TMPDIR``, else ``/var/tmp``.
            memory_gib: for a chunk of the prompt, which is read in chunks, besides keys and values; default
                1, and what attention copies of them for every head. Models with recurrent layers, and
                assisted decoding, read a prompt at once.
            context: tokens of prompt and answer at most; default: as many as the model takes.
            batch_size: prompts at once, times ``num_beams`` or ``num_return_sequences``.

        Raises:
            ConfigurationError: the memory is not enough for 16 tokens; or not for this model: the adapter is
                of prompt tuning's kind, there is an encoder, or layers share keys (``disk``).
            StorageError: the folder cannot be written to.
        """
        place = LongContext(kv, kv_memory_gib, kv_folder, memory_gib, context, batch_size)
        return place.options(model, self.manifest.groups)

    def prefill(
        self,
        model: nn.Module,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        copies: int = 1,
        decode_on: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Read a prompt. Then ``model.generate(input_ids, **prefilled)`` continues it.

        Reading is limited by arithmetic, continuing by the memory that keys and values are read from. So the
        tenant's part of the model can read on an accelerator, and continue on the CPU, where they lie.

        Args:
            input_ids: int64 ``[B, T]``, at least two tokens; give ``generate`` the same, and the same mask.
            attention_mask: ``[B, T]``, 0 for padding; default as ``generate`` infers it.
            copies: sequences of each prompt that ``generate`` will make with ``num_beams`` or
                ``num_return_sequences``; it is read once.
            decode_on: device that the model and, but for ``host`` and ``disk``, keys and values move to.
            dtype: that they then have; default the same.
            options: of ``generate_options``; ``batch_size`` is by default the number of prompts.

        Returns:
            Keyword arguments for ``generate`` of this prompt, and of what follows it.

        Raises:
            ConfigurationError: as ``generate_options``.
        """
        options.setdefault("batch_size", len(input_ids))  # whatever copies is: they are made afterwards
        generation = self.generate_options(model, **options)
        return prefill(
            model, input_ids, attention_mask, generation, copies=copies, decode_on=decode_on, dtype=dtype
        )

    @property
    def _placement(self) -> ExpertPlacement:
        return ExpertPlacement(self.experts != "local", self._padding)

    def _check_head(self, offload_head: bool) -> None:
        if offload_head and not any(group.head for group in self.manifest.groups):
            raise ConfigurationError(
                "this executor does not serve the output head; leave offload_head=False, or ask the "
                "provider to run `serve --serve-head`"
            )

    def close(self) -> None:
        """End the session. Models that use it then raise ConnectionLost.

        In a forked child, nothing: the session is the parent's.
        """
        if self._fork_guard.in_child:
            return
        self.products.close()
        self.executor.close()

    def __enter__(self) -> Session:
        """The session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()
