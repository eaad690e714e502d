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

    ``connect`` opens a session. ``close``, or the end of a ``with`` block, closes it.

    Attributes:
        products: Object from which the layers of models request products. It hides rows as the privacy mode
            requires.
        executor: Connection to the executor. It does not hide the data of requests that you make directly.
        groups: Groups of the manifest, in the form that layers use to request products.
        privacy: Privacy mode: ``one-time``, ``noise-bank`` or ``plain``.
        experts: Place where experts are multiplied: ``local``, ``padded`` or ``routed``. See ``connect``.
        kept: Groups whose products this machine computes, with measurements. None: ``keep_gib`` was not
            given.
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
            training: Count forward and backward passes through all layers. Default: count only the forward
                pass, as in decoding.
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
            dtype: Element type of the tenant's parameters, and so of activations: a ``torch.dtype`` or its
                name, such as ``bfloat16``.
            offload_head: Let the executor compute the output head too. The executor must serve the head.
            exclude: Layers that this machine computes. An entry is the name of a layer, or parts of names,
                such as ``o_proj``, ``layers.0`` or ``mlp.experts``. The session gets the weights of such a
                layer through products, with one row for each input of the layer. So they are the weights that
                the executor multiplies with, as exact as the session's products. For experts, give the name
                of their parameter; the session downloads their weights.
            model_class: Another transformers class around the same base model, such as
                ``AutoModelForSequenceClassification``. Default: the class of the checkpoint.
            base: Place of the base model that adapters record, apart from any executor: a folder, or
                ``hub:NAME[@REVISION]``. The session compares the weights in a folder with those of the
                executor. Default: the provider's name for the model, if it is the name of a model on a hub.
                ``""``: adapters record no place. PEFT's ``save_pretrained`` sends requests to the hub if the
                place is a name there. ``save_adapter`` sends none.
            progress: Show a progress bar.
            config_overrides: Changes to the configuration as in ``AutoConfig.from_pretrained``, such as
                ``num_labels=3``.

        Returns:
            A ``PreTrainedModel`` in evaluation mode.

        Raises:
            ModelMismatch: The installed version of transformers builds another model than the executor
                serves, or ``base`` is another model.
            ConfigurationError: ``offload_head`` is true and the executor does not serve its head, an entry of
                ``exclude`` matches no layer, or ``base`` is neither a folder nor the name of a model on a
                hub.
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
            ConfigurationError: The executor serves no tokenizer.
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

        Embeddings, norms, biases and the head stay in ``model.parameters()``. They are trained unless they
        are frozen; ``peft.get_peft_model`` freezes them. If they are trained, one warning is logged.

        Args:
            model: Model of transformers, or a PEFT model around one. It is changed in place.
            offload_head: Replace the output head too.
            exclude: Layers that stay local. See ``load_model``.
            probe: Before replacing layers, send one random row for each layer, and compare the executor's
                answers with the model's. This detects another checkpoint of the same shape if the answers
                differ by more than 5 % in norm in any layer. Smaller differences may be rounding, as in a
                copy with another precision, so they are accepted. For example, weights that are all 3 % too
                large are not detected. ``detach``, and ``--model`` of the command line, compare the
                checkpoint's digest instead.

        Returns:
            The same model.

        Raises:
            ModelMismatch: Layers, shapes or weights differ. The model is unchanged.
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
            checkpoint: Folder of the checkpoint. Default: the folder from which the model was loaded.

        Raises:
            CheckpointError: There is no such folder.
            ModelMismatch: The folder holds other weights than the executor serves. The model is unchanged.
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

        The arguments are for one text. They hold its keys and values, so that a later call can continue the
        text. For another text, ``generate`` raises ConfigurationError. The memory is free again when no
        references to the arguments are left. The generated tokens are the same as without these arguments.

        Args:
            model: Model of this session, or a PEFT model around it.
            kv: Place of keys and values. ``device``: the model's device, as in transformers. ``host``: the
                host's memory, in buffers that grow. ``disk``: an encrypted file without a name; the memory
                then holds only the keys and values of as many layers as fit into ``kv_memory_gib``, and of
                two more layers. Layers with a sliding window or a state of fixed size do not change.
            kv_memory_gib: Memory for keys and values in GiB, if ``kv`` is ``disk``.
            kv_folder: Folder of the file, on a fast disk. Default: ``TMPDIR``, else ``/var/tmp``.
            memory_gib: Memory in GiB for one chunk of the prompt, without keys and values. The model reads a
                prompt in chunks that fit. Default: 1 GiB, and the copies of keys and values that attention
                makes for every head. Models with recurrent layers, and assisted decoding, read a prompt at
                once.
            context: Maximum number of tokens of prompt and answer together. Default: the model's maximum.
            batch_size: Number of prompts in a call, times ``num_beams`` or ``num_return_sequences``.

        Raises:
            ConfigurationError: The memory is not enough for 16 tokens, or the model is not supported. Models
                are not supported if they have an encoder or an adapter like prompt tuning, or with ``disk``,
                if layers share keys and values.
            StorageError: The folder is not writable.
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

        The speed of arithmetic limits reading. The speed of the memory that holds keys and values limits
        continuing. So the tenant's part of the model can read on an accelerator, and then continue on the CPU
        next to this memory.

        Args:
            input_ids: Prompts, int64 ``[B, T]``, of at least two tokens. Give ``generate`` the same tokens
                and mask.
            attention_mask: Mask ``[B, T]``, 0 for padding. Default: the mask that ``generate`` infers.
            copies: Number of sequences that ``generate`` will make of each prompt, with ``num_beams`` or
                ``num_return_sequences``. The model reads each prompt once.
            decode_on: Device to which the model moves after reading. Keys and values move there too, except
                with ``host`` and ``disk``.
            dtype: Element type of the model, keys and values after reading. Default: the same as before.
            options: Arguments of ``generate_options``. Default of ``batch_size``: the number of prompts.

        Returns:
            Keyword arguments of ``generate`` for this prompt and its continuations.

        Raises:
            ConfigurationError: ``generate_options`` raises it, or the prompt cannot be read before
                ``generate``.
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

        In a forked child, this method does nothing, because the session belongs to the parent.
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
