"""Implementations of the quantized matmul. They know no formats: only arrays, and the value of each code."""
