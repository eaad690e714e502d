"""vLLM's linear layers, computed by the executor (Symbiosis §3.2): a "quantization" that keeps no weight.

vLLM asks a quantization for the method of each of its linear layers; ours answers with one that sends the
rows away. Its layers are fused as the executor's groups are (query, key and value; gate and up), and its LoRA
layers add their segmented product (Punica §4) to whatever the method returns.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    QKVParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from shared.errors import ConfigurationError, ModelMismatch, OptionText, SymbiosisError
from shared.ring.rows import all_finite_below
from shared.wire.header import Direction, RequestClass
from tenant_sdk.gateway.connection import open_here, session_here
from tenant_sdk.gateway.folder import MARK, METHOD
from tenant_sdk.model.virtual import RemoteGroup
from tenant_sdk.products.products import pad_with_zeros

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.model_executor.models.utils import WeightsMapper


class RequestOptions(NamedTuple):
    """How the products of a step are asked for.

    Attributes:
        request_class: how urgent they are.
        rows: that each has at least; zeros, under masks of their own, make up for what is missing.
    """

    request_class: RequestClass
    rows: int


# Whose checkpoints have query, key and value in one layer, one behind the other as vLLM splits them. Others
# mix them, head by head, which vLLM undoes where it loads a weight.
_IN_ORDER = frozenset({"GPT2LMHeadModel", "Phi3ForCausalLM"})
# Not all of vLLM's models say what their layers are made of; these names are the same in all.
_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
MAX_NUMBER = 1e30  # the size of a number that float32 can still multiply and add up
_USUAL = RequestOptions(RequestClass.PREFILL, 0)
_options: ContextVar[RequestOptions] = ContextVar("request_options", default=_USUAL)


@contextmanager
def request_options(how: RequestOptions) -> Iterator[None]:
    """Ask for products like this in this block."""
    before = _options.set(how)
    try:
        yield
    finally:
        _options.reset(before)


class NonFiniteRows:
    """Rows of a step with NaN, infinity or numbers too large to go on with; an adapter makes them.

    They go on as zeros, so that the other rows do, and there are as many as before; the sequences that they
    belong to end with an error (``worker``).

    Attributes:
        rows: bool [T] of the step; None: there are none.
    """

    def __init__(self) -> None:
        self.rows: torch.Tensor | None = None

    def without(self, values: torch.Tensor) -> torch.Tensor:
        """Returns [T, D] with zeros in the rows that are not finite, which are remembered."""
        if all_finite_below(values, MAX_NUMBER):
            return values
        non_finite = ~(values.abs().amax(-1) < MAX_NUMBER)  # NaN is not less either
        self.rows = non_finite if self.rows is None else self.rows | non_finite
        return values.masked_fill(non_finite.unsqueeze(-1), 0.0)


non_finite_rows = NonFiniteRows()


class GroupMembers(NamedTuple):
    """Members of one group, whose outputs lie one behind the other in a layer's output."""

    group: RemoteGroup
    members: int


_failed: list[GroupMembers] = []  # of the last layer whose products did


def probe() -> None:
    """Ask for what failed last, with one random row, to see whether executors are there.

    Raises:
        SymbiosisError: one is not.
    """
    for each in list(_failed) or [GroupMembers(session_here().groups[0], 1)]:
        row = torch.randn(1, each.group.info.inputs)
        each.group.product(Direction.FORWARD, each.members, [row], RequestClass.PREFILL)


class RemoteLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """``y = x W^T + b`` with W at the executor.

    Args:
        groups: that have the layer's outputs, in their order.
        name: of the layer.

    Attributes:
        meanwhile: done with the rows while the answer is in flight.
    """

    def __init__(self, groups: list[GroupMembers], name: str) -> None:
        self._groups, self._name = groups, name
        self.meanwhile: Callable[[torch.Tensor], None] | None = None

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        """A weight without numbers, of the right type and on the right device.

        Raises:
            ModelMismatch: the executor's layer has another shape.
        """
        widths = [width for each in self._groups for width in each.group.widths(each.members)]
        inputs = self._groups[0].group.info.inputs
        if (sum(widths), inputs) != (sum(output_partition_sizes), input_size_per_partition):
            raise ModelMismatch(
                f"{self._name} has shape {[sum(output_partition_sizes), input_size_per_partition]} here and "
                f"{[sum(widths), inputs]} at the executor"
            )
        layer.register_parameter("weight", nn.Parameter(torch.empty(0, dtype=params_dtype), False))

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Rows [..., D] to [..., O].

        Raises:
            SymbiosisError: the executor, the connection, a mask source, or a wrong answer.
        """
        rows = x.reshape(-1, x.shape[-1])
        if is_forward_context_available() and get_forward_context().attn_metadata is None:
            # A run that measures memory or warms up: nobody's rows, so nothing is sent.
            width = sum(sum(each.group.widths(each.members)) for each in self._groups)
            return x.new_zeros((*x.shape[:-1], width))
        rows = non_finite_rows.without(rows)
        how, count = _options.get(), len(rows)
        rows = pad_with_zeros(rows, how.rows, self._groups[0].group.privacy)
        try:
            pending = [
                each.group.submit(Direction.FORWARD, each.members, [rows], how.request_class)
                for each in self._groups
            ]
            if self.meanwhile is not None:
                self.meanwhile(x)
            answers = [answer[:count] for each in pending for answer in each.result()]
        except SymbiosisError:
            _failed[:] = self._groups
            raise
        out = answers[0] if len(answers) == 1 else torch.cat(answers, dim=-1)
        if bias is not None:
            out = out + bias
        return out.view(*x.shape[:-1], out.shape[-1])


def check_adaptable(model: nn.Module) -> None:
    """Whether every layer of the executor's takes adapters in vLLM, which leaves out what is for others.

    Raises:
        ModelMismatch: some do not.
    """
    adapted = [each for each in model.modules() if isinstance(each, BaseLayerWithLoRA)]
    fine = {id(each) for layer in adapted for each in layer.modules()}
    for name, layer in model.named_modules():
        if isinstance(getattr(layer, "quant_method", None), RemoteLinearMethod) and id(layer) not in fine:
            raise ModelMismatch(
                OptionText("vLLM takes no adapters on {}; start the gateway without {adapters}", name)
            )


@register_quantization_config(METHOD)
class RemoteConfig(QuantizationConfig):  # type: ignore[misc]
    """What ``quantization_config`` of a tenant's folder is read as.

    Args:
        session: the options of the session, as ``tenant_sdk.gateway.folder`` wrote them.
    """

    def __init__(self, session: Mapping[str, Any]) -> None:
        super().__init__()
        self._options = session
        self._mapper: WeightsMapper | None = None
        self._members: dict[str, tuple[RemoteGroup, int]] | None = None
        self._missing: set[str] = set()

    def get_name(self) -> str:
        """See QuantizationConfig."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """All that a session takes; the wire has its own."""
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        """Any device."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None besides the model's own."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> RemoteConfig:
        """See QuantizationConfig.

        Raises:
            ConfigurationError: this process's gateway did not write the folder.
        """
        mark = os.environ.get(MARK, "")
        if not mark or not hmac.compare_digest(str(config.get("mark", "")).encode(), mark.encode()):
            raise ConfigurationError(
                "this model's config.json names executors and secrets, and `symbiosis-tenant serve` did not "
                "write it: it is not loaded"
            )
        return cls(config["session"])

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Learn what vLLM calls the checkpoint's modules."""
        self._mapper = hf_to_vllm_mapper

    def get_quant_method(self, layer: nn.Module, prefix: str) -> LinearMethodBase | None:
        """The executor's product for layers that it serves; others are computed here.

        Raises:
            ConfigurationError, ConnectError: no session.
            ModelMismatch: it serves a part of a fused layer.
        """
        if isinstance(layer, RoutedExperts):
            # Adapters are beside them (``serving``), and with adapters on them they do not run on processors.
            layer.moe_config.is_lora_enabled = False
        if not isinstance(layer, LinearBase):
            return None
        members = self._served()
        leaf = prefix.rpartition(".")[2]
        names = [prefix]
        if prefix not in members and (parts := (_FUSED | self.packed_modules_mapping).get(leaf)):
            names = [prefix.removesuffix(leaf) + each for each in parts]
        found = [members.get(name) for name in names]
        if not any(found):
            return UnquantizedLinearMethod()
        if not all(found):
            raise ModelMismatch(f"the executor serves a part of {prefix}, which is one layer here")
        architecture = session_here().manifest.architecture
        if isinstance(layer, QKVParallelLinear) and len(found) == 1 and architecture not in _IN_ORDER:
            raise ModelMismatch(
                f"{prefix} of {architecture} has queries, keys and values in one layer, in an order that "
                "may be another than vLLM's; the gateway cannot serve this architecture. `generate` can"
            )
        self._missing -= set(names)
        return RemoteLinearMethod(_grouped([each for each in found if each]), prefix)

    def check_complete(self) -> None:
        """Whether every layer that the executor serves has its place in the model.

        Raises:
            ModelMismatch: some have none; the model here would compute with weights that nobody gave it.
        """
        if self._missing:
            raise ModelMismatch(
                f"vLLM's model has no place for {len(self._missing)} of the layers that the executor serves, "
                f"such as {min(self._missing)}; the gateway cannot serve this architecture. `generate` can"
            )

    def _served(self) -> dict[str, tuple[RemoteGroup, int]]:
        """Group and member of every layer that the executor serves, by the names that vLLM gives them."""
        if self._members is None:
            self._members = {}
            session = open_here(self._options)
            prefix = session.manifest.base_prefix
            for group in session.groups:
                for index, member in enumerate(group.info.members):
                    if group.info.head or member.expert is not None:
                        continue  # they stay here
                    names = [".".join(filter(None, (prefix, member.name, "weight")))]
                    if self._mapper is not None:
                        names = self._mapper.apply_list(names)
                    for name in names:
                        self._members[name.removesuffix(".weight")] = (group, index)
            self._missing = set(self._members)
        return self._members


def _grouped(members: list[tuple[RemoteGroup, int]]) -> list[GroupMembers]:
    """Neighbours of one group, in its order, are asked for together."""
    groups: list[GroupMembers] = []
    last = -1
    for group, index in members:
        if groups and groups[-1].group is group and index > last:
            groups[-1] = GroupMembers(group, groups[-1].members | 1 << index)
        else:
            groups.append(GroupMembers(group, 1 << index))
        last = index
    return groups
