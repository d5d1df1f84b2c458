"""Reads any safetensors file without quantized weights."""

from .._files import Files
from ._item import Item, plain_arrays


NAME = "safetensors"


def recognizes(files: Files) -> bool:
    return files.container == "safetensors"


def items(files: Files) -> dict[str, Item]:
    return plain_arrays(files)
