"""Passes before the first step of a training; they also show the layers whose weights cannot be trained."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shared.errors import ConfigurationError, OptionText, peer_text
from tenant_sdk.tuning.conversations import Example
from tenant_sdk.tuning.data import Notify, collate
from tenant_sdk.tuning.evaluation import check_loss, loss_of_tokens

_LAYER = re.compile(r"(.*?)\.(lora|hada|lokr|vera|ia3)_")  # of a part of its adapter
_EXPERT = re.compile(r"\.experts\.\d+\.")


def warm_up(model: Any, examples: Sequence[Example]) -> dict[str, bool]:
    """Compute one pass, in which the groups learn which layers share an input; its gradients are dropped.

    So the first step is like those after it, also in a training that is resumed. If layers have no gradient
    other than 0, there are more passes.

    Args:
        examples: one for each pass.

    Returns:
        By the name of each layer with a part of the adapter, whether it had a gradient other than 0.

    Raises:
        ConfigurationError: see ``check_loss``.
    """
    model.train()
    any_gradient = dict[str, bool]()
    for example in examples:
        batch = {name: tensor.to(model.device) for name, tensor in collate([example]).items()}
        with loss_of_tokens(model) as more:
            outputs = model(**batch, **more)
        check_loss(model, outputs, batch["labels"])
        outputs.loss.backward()
        for name, each in model.named_parameters():
            if each.grad is not None:  # None: the model does not use it
                # Experts count as one, since no token may reach some.
                match = _LAYER.match(_EXPERT.sub(".experts.", name))
                layer = match[1] if match else "other parameters"
                any_gradient[layer] = any_gradient.get(layer, False) or bool(each.grad.any())
        model.zero_grad()
        if any_gradient and all(any_gradient.values()):
            break
    return any_gradient


def check_gradients(any_gradient: Mapping[str, bool], notify: Notify) -> None:
    """Name the layers that cannot be trained.

    Args:
        any_gradient: see ``warm_up``.

    Raises:
        ConfigurationError: it is all of them.
    """
    if not any(any_gradient.values()):
        raise ConfigurationError(
            OptionText(
                "the adapter would learn nothing: all its gradients are 0, perhaps because its weights are. "
                "Leave out {adapter} to train a new one"
            )
        )
    if dead := [layer for layer, found in any_gradient.items() if not found]:
        notify(
            f"{len(dead)} of {len(any_gradient)} layers of the adapter learn nothing, such as "
            f"{peer_text(dead[0])}: all their gradients are 0, as they are if their weights are"
        )
