"""A tenant's session with an executor: the object that ``tenant_sdk.connect`` returns."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shared.errors import ConfigurationError, ModelMismatch
from shared.messages import Manifest
from tenant_sdk import model_loading
from tenant_sdk.channel import Channel
from tenant_sdk.connect import client_context, open_connection, split_url
from tenant_sdk.mask_sources import ExecutorSource, LocalSource, MaskSource
from tenant_sdk.noise_bank import NoiseBank, NoiseBankOptions
from tenant_sdk.privacy import Plain, Privacy
from tenant_sdk.remote import RemoteExecutor, Stats
from tenant_sdk.surgery import attach_layers, detach_layers
from tenant_sdk.virtual import Group

log = logging.getLogger(__name__)

PRIVACY_MODES = ("plain", "noise-bank")
_WIRE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Session:
    """Models whose frozen layers run on an executor. Make one with ``connect``; close it or use ``with``."""

    def __init__(self, remote: RemoteExecutor, privacy: Privacy) -> None:
        self._remote, self._privacy = remote, privacy
        self._groups = [
            Group(identity, info, privacy) for identity, info in enumerate(remote.manifest.groups)
        ]

    @property
    def manifest(self) -> Manifest:
        """What the executor serves."""
        return self._remote.manifest

    @property
    def stats(self) -> Stats:
        """A copy of the session's counters."""
        return dataclasses.replace(self._remote.stats)

    def load_model(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        offload_head: bool = False,
        model_class: type[Any] | None = None,
        progress: bool = True,
        **config_overrides: Any,
    ) -> PreTrainedModel:
        """The executor's model; its frozen linear layers stay there, the rest is downloaded.

        Args:
            dtype: of the parameters that the tenant holds, and so of activations.
            offload_head: let the executor compute the output head as well, if it serves it.
            model_class: another transformers class around the same base model, such as
                ``AutoModelForSequenceClassification``; default: the checkpoint's own.
            progress: show a progress bar.
            config_overrides: as in ``AutoConfig.from_pretrained``, such as ``num_labels=3``.

        Returns:
            A ``PreTrainedModel`` in evaluation mode.

        Raises:
            ModelMismatch: this transformers builds another model than the executor serves.
            ConfigurationError: ``offload_head`` with an executor that does not serve its head.
        """
        self._check_head(offload_head)
        return model_loading.load_model(
            self._remote,
            self._groups,
            dtype=dtype,
            offload_head=offload_head,
            progress=progress,
            model_class=model_class,
            config_overrides=config_overrides,
        )

    def load_tokenizer(self) -> Any:
        """The executor's tokenizer.

        Raises:
            ConfigurationError: it serves none.
        """
        return model_loading.load_tokenizer(self._remote)

    def attach(
        self,
        model: nn.Module,
        *,
        offload_head: bool = False,
        exclude: Sequence[str] = (),
        probe: bool = True,
    ) -> nn.Module:
        """Swap the frozen linear layers of a model that you loaded; their weights are given up.

        Args:
            model: a transformers model, or a PEFT model around one; changed in place.
            offload_head: swap the output head too.
            exclude: layers whose names end with one of these stay local.
            probe: before swapping, send one random row per layer and compare, so that another
                checkpoint of the same shape is noticed.

        Returns:
            The same model.

        Raises:
            ModelMismatch: layers, shapes or weights differ; the model is unchanged.
        """
        self._check_head(offload_head)
        attach_layers(model, self._groups, offload_head=offload_head, exclude=exclude, probe=probe)
        return model

    def detach(self, model: nn.Module, checkpoint: str | Path | None = None) -> nn.Module:
        """Undo ``attach``: put real layers back, their weights read from the checkpoint's folder.

        Args:
            checkpoint: folder; default the one that the model was loaded from.

        Raises:
            CheckpointError: there is no such folder.
            ModelMismatch: it holds other weights than the executor serves; the model is unchanged.
        """
        detach_layers(model, self.manifest, checkpoint)
        return model

    def _check_head(self, offload_head: bool) -> None:
        if offload_head and not any(group.head for group in self.manifest.groups):
            raise ConfigurationError(
                "this executor does not serve the output head; leave offload_head=False, or ask the "
                "provider to run `serve --serve-head`"
            )

    def close(self) -> None:
        """End the session; models that use it raise ConnectionLost from now on."""
        self._privacy.close()
        self._remote.close()

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


def connect(
    provider: str,
    *,
    token: str,
    ca: str | Path | None = None,
    client_certificate: tuple[str | Path, str | Path] | None = None,
    privacy: str = "noise-bank",
    mask_sources: Sequence[str] = (),
    mask_source_token: str | None = None,
    mask_source_ca: str | Path | None = None,
    wire_dtype: str = "float32",
    noise_bank: NoiseBankOptions | None = None,
    digest: str | None = None,
    timeout: float = 60.0,
) -> Session:
    """Open a session with an executor.

    Args:
        provider: its URL, ``wss://host:port``.
        token: as the provider printed it.
        ca: PEM file of the provider's certificate authority; default: the operating system's.
        client_certificate: PEM files of certificate and key, if the executor asks for one.
        privacy: ``noise-bank`` or ``plain``; SECURITY.md says what each is worth, which is little.
        mask_sources: for ``noise-bank``, who computes the effects of masks: ``wss://`` URL of another
            executor or ``local:FOLDER`` with the checkpoint. Default: the provider itself, as in the
            paper, which therefore sees every mask.
        mask_source_token: for the mask source; default: the same as ``token``, which then both
            operators know.
        mask_source_ca: PEM file of the mask source's authority; default: the same as ``ca``.
        wire_dtype: ``float32`` or ``bfloat16`` (half the bytes, three digits).
        noise_bank: size and life of a bank.
        digest: refuse an executor that does not claim these weights (``manifest.digest``). It notices
            mistakes, not lies.
        timeout: seconds without progress after which connecting or a request fails.

    Raises:
        ConfigurationError: an option is wrong.
        ConnectError: no session, with the reason; see ``shared.errors``.
        ModelMismatch: other weights than ``digest`` or than the mask source's.
    """
    if privacy not in PRIVACY_MODES:
        raise ConfigurationError(f"unknown privacy mode {privacy!r}; choose from {', '.join(PRIVACY_MODES)}")
    if wire_dtype not in _WIRE_DTYPES:
        raise ConfigurationError(f"wire_dtype is float32 or bfloat16, not {wire_dtype!r}")
    if mask_sources and privacy == "plain":
        raise ConfigurationError("privacy='plain' uses no masks, so mask_sources must be empty")
    if isinstance(mask_sources, str):
        raise ConfigurationError(f"mask_sources is a list: write [{mask_sources!r}]")
    if len(mask_sources) > 1:
        raise ConfigurationError("noise-bank takes one mask source")
    if timeout <= 0:
        raise ConfigurationError("timeout is in seconds and more than 0")
    stats = Stats()

    def open_remote(url: str, token: str, ca: str | Path | None) -> RemoteExecutor:
        sock = open_connection(url, token, client_context(ca, client_certificate), timeout)
        channel = Channel(sock, url, timeout=timeout, entropy=os.urandom)
        try:
            return RemoteExecutor(channel, _WIRE_DTYPES[wire_dtype], stats)
        except BaseException:
            channel.close()
            raise

    remote = open_remote(provider, token, ca)
    try:
        if digest is not None and digest != remote.manifest.digest:
            raise ModelMismatch(
                f"{provider} serves weights with digest {remote.manifest.digest}, not {digest}"
            )
        if privacy == "plain":
            log.warning("privacy 'plain': %s sees every activation (SECURITY.md)", provider)
            return Session(remote, Plain(remote))
        if not mask_sources or _same_endpoint(mask_sources[0], provider):
            log.warning(
                "privacy 'noise-bank': %s multiplies the masks itself, so it can subtract them (SECURITY.md)",
                provider,
            )
        source: MaskSource = ExecutorSource(remote, owned=False)
        if mask_sources and mask_sources[0].startswith("local:"):
            source = LocalSource(mask_sources[0].removeprefix("local:"), remote.manifest)
        elif mask_sources:
            other = open_remote(mask_sources[0], mask_source_token or token, mask_source_ca or ca)
            source = _other_executor(mask_sources[0], other, remote.manifest)
        options = noise_bank or NoiseBankOptions()
        return Session(remote, NoiseBank(remote, source, options, entropy=os.urandom))
    except BaseException:
        remote.close()
        raise


def _same_endpoint(source: str, provider: str) -> bool:
    return not source.startswith("local:") and split_url(source) == split_url(provider)


def _other_executor(url: str, other: RemoteExecutor, manifest: Manifest) -> ExecutorSource:
    if (other.manifest.digest, other.manifest.numerics) != (manifest.digest, manifest.numerics):
        other.close()
        raise ModelMismatch(f"the mask source {url} does not serve the provider's weights and numerics")
    return ExecutorSource(other, owned=True)
