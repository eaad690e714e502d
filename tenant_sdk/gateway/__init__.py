"""A server with OpenAI's interface on the tenant's premises: vLLM, with the frozen layers remote."""
