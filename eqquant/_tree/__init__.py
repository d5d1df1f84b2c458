"""Whole models: which leaves are quantized, to what, where they are, and reports of that."""
