"""Our own files. Scalars are no arrays, so only `eqq.load` returns them."""

from .._files import Files
from .._load import read_leaf
from .._manifest import KEY, read_manifest
from .item import Item


NAME = "eqquant"


def recognizes(files: Files) -> bool:
    return files.container == "safetensors" and isinstance(files.metadata.get(KEY), str)


def items(files: Files) -> dict[str, Item]:
    found = {}
    for leaf in read_manifest(files.metadata[KEY], files.tensors, files.file, ()):
        entry = leaf.entry
        if entry.kind != "scalar":
            stored = "quantized" if entry.format is not None else next(iter(leaf.tensors.values())).dtype
            tensors = () if leaf.tied_to is not None else tuple(leaf.tensors.values())
            read = lambda leaf=leaf: read_leaf(leaf)
            axes = entry.axes or (-1,)
            told = entry.structure() if entry.format is not None else None
            found[leaf.path] = Item(entry.shape, entry.dtype, entry.format, stored, tensors, read, axes=axes, told=told)
    return found
