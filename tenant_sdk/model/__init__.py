"""A transformers model whose frozen layers are elsewhere."""
