"""Integers modulo 2^32: weights and rows as integers, their products, masks."""
