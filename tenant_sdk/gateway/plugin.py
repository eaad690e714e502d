"""The function that vLLM calls in each of its processes (entry point group ``vllm.general_plugins``)."""

import os

# Set by `symbiosis-tenant serve` to a random value, which stands in the folder that it writes too. Options
# of a session say what programs are run and where secrets are, so no model's file may bring its own.
MARK = "SYMBIOSIS_GATEWAY"


def register() -> None:
    """Make ``quantization_config = {"quant_method": "symbiosis"}`` of a tenant's folder known.

    vLLM calls this wherever it is installed together with this package. It does nothing in processes that
    `symbiosis-tenant serve` did not start.
    """
    if os.environ.get(MARK):
        from tenant_sdk.gateway import linear  # noqa: F401 - registers itself
