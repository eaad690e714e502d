"""The function that vLLM calls in each of its processes (entry point group ``vllm.general_plugins``)."""

import os

from tenant_sdk.gateway.folder import MARK


def register() -> None:
    """Make ``quantization_config = {"quant_method": "symbiosis"}`` of a tenant's folder known.

    vLLM calls this wherever it is installed together with this package. It does nothing in processes that
    `symbiosis-tenant serve` did not start.
    """
    if os.environ.get(MARK):
        from tenant_sdk.gateway import linear  # noqa: F401 - registers itself
