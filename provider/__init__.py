"""The provider's side: a stateless base executor that serves frozen linear layers over TLS."""
