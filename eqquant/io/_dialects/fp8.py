"""Reads fp8 checkpoints of Hugging Face: layouts of `scaled_tensors.py`."""

import functools as ft

from . import scaled_tensors


NAME = "fp8"
items, recognizes = scaled_tensors.items, ft.partial(scaled_tensors.recognizes, method=NAME)
