"""Our own files. Scalars are no arrays, so only `eqq.load` returns them."""

from .._files import Files
from .._load import read_leaf
from .._manifest import KEY, read_manifest, SavedLeaf
from ._item import Item


NAME = "eqquant"


def recognizes(files: Files) -> bool:
    return files.container == "safetensors" and isinstance(files.metadata.get(KEY), str)


def items(files: Files) -> dict[str, Item]:
    leaves = read_manifest(str(files.metadata[KEY]), files.tensors, files.file, ())
    return {leaf.path: _item(leaf) for leaf in leaves if leaf.entry.kind != "scalar"}


def _item(leaf: SavedLeaf) -> Item:
    tensors = tuple(leaf.tensors.values())
    stored_as = "quantized" if leaf.entry.format is not None else tensors[0].dtype
    return Item(leaf.entry, stored_as, () if leaf.tied_to is not None else tensors, lambda: read_leaf(leaf))
