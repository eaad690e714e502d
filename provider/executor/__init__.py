"""The base executor: frozen weights, and their products in each numerics."""
