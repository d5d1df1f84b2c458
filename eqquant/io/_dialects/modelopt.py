"""Reads checkpoints of ModelOpt (NVIDIA): layouts of `scaled_tensors.py`."""

import functools as ft

from . import scaled_tensors


NAME = "modelopt"
items, recognizes = scaled_tensors.items, ft.partial(scaled_tensors.recognizes, method=NAME)
