"""Reads fp8 checkpoints of Hugging Face: layouts of `scaled_tensors.py`."""

from .._files import Files
from . import scaled_tensors
from ._settings import find_settings


NAME = "fp8"
items = scaled_tensors.items


def recognizes(files: Files) -> bool:
    return find_settings(files).get("quant_method") == NAME and scaled_tensors.recognizes(files)
