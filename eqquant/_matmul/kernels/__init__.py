"""Implementations of the quantized matmul, on raw arrays and a table of values."""
