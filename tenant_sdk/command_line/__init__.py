"""The commands of ``symbiosis-tenant``."""
