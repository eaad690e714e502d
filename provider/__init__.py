"""The provider's side: a stateless base executor that serves frozen linear layers over TLS."""

from symbiosis_executor import NAME, check_package

DISTRIBUTION = NAME

check_package("shared")
