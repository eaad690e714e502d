"""In the gateway's environment: a model's own config.json opens no session, and so runs no program."""

from __future__ import annotations

import json
import os
from typing import Any

from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.plugins import load_general_plugins

from shared.errors import ConfigurationError
from tenant_sdk.gateway.folder import MARK, METHOD
from tenant_sdk.gateway.plugin import register

os.environ.pop(MARK, None)
load_general_plugins()
known = [METHOD in QUANTIZATION_METHODS]  # in vLLM without `symbiosis-tenant serve`
os.environ[MARK] = "0123"
register()
known.append(METHOD in QUANTIZATION_METHODS)

from tenant_sdk.gateway.linear import RemoteConfig  # noqa: E402 - it registers itself


def is_taken(config: dict[str, Any]) -> bool:
    """Whether a folder's ``quantization_config`` is used."""
    try:
        RemoteConfig.from_config({"quant_method": METHOD, "session": {}, **config})
    except ConfigurationError:
        return False
    return True


marks: list[dict[str, Any]] = [{}, {"mark": ""}, {"mark": "0124"}, {"mark": None}, {"mark": ["0123"]}]
foreign = [is_taken(each) for each in marks]
own = is_taken({"mark": "0123"})
del os.environ[MARK]
print(json.dumps({"known": known, "foreign": foreign, "own": own, "without": is_taken({"mark": ""})}))
