"""The function that vLLM calls in each of its processes (entry point group ``vllm.general_plugins``)."""


def register() -> None:
    """Make ``quantization_config = {"quant_method": "symbiosis"}`` of a tenant's folder known."""
    from tenant_sdk.gateway import linear  # noqa: F401 - registers itself
