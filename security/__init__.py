"""The auditor: attacks on what a provider or a mask source sees, and the claims that they try to refute."""

from symbiosis_executor import NAME, check_package

DISTRIBUTION = NAME

check_package("shared")
