"""The provider's side: a stateless base executor that serves frozen linear layers over TLS."""

from typing import TYPE_CHECKING

from symbiosis_executor import NAME, check_package, published

DISTRIBUTION = NAME

check_package("shared")

from shared.user_folders import keep_compiled_code  # noqa: E402 - of this project, which is checked before

keep_compiled_code()

if TYPE_CHECKING:
    from provider.config import ServeConfig
    from provider.inprocess import serve_in_process
    from provider.serve.certificates import write_certificates
    from provider.serve.provider import Provider
    from provider.serve.tokens import TokenFile

__all__ = ["Provider", "ServeConfig", "TokenFile", "serve_in_process", "write_certificates"]

__getattr__, __dir__ = published(
    __name__,
    {
        "Provider": "provider.serve.provider",
        "ServeConfig": "provider.config",
        "TokenFile": "provider.serve.tokens",
        "serve_in_process": "provider.inprocess",
        "write_certificates": "provider.serve.certificates",
    },
)
