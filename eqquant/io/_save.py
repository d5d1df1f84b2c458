"""`eqq.save`: saves a model, or any tree, in a file that describes its leaves."""

import collections
import contextlib
import dataclasses
import functools as ft
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import jax
import jax.core
import jax.random as jr
import jax.tree_util as jtu
import numpy as np

from .._tree.leaves import identity_key, key_name, Leaf, named_leaves
from .._types import PyTree
from ._atomic import replace
from ._entry import describe_leaf, Entry, is_packed, named_parts
from ._files import check_place, FILE, INDEX
from ._lazy import keep_latest, LazyArray
from ._manifest import KEY, leaf_to_json, MAX_KEYS, SavedLeaf, Scalar, stored_as, to_stored, VERSION
from ._safetensors import split, width, write
from ._tensors import NewTensor, Tensor


def save(path: str | os.PathLike[str], tree: PyTree, *, shard_nbytes: int | None = None) -> None:
    """Saves a model, quantized or not, or any other pytree.

    [`eqquant.load`][] loads it, with or without a template.

    The file is a safetensors file, which other programs can read too. Its metadata describes every leaf: the format of
    a quantized array, its axis, its logical shape and dtype.

    !!! Example

        ```python
        eqq.save("model.safetensors", model)
        eqq.save("checkpoint.safetensors", (model, optimizer_state, step))
        ```

    The file holds arrays, quantized arrays, PRNG keys, and Python numbers, booleans and strings. Other leaves, such as
    activation functions, come from the template, as with `equinox.tree_serialise_leaves`. An array that stands in
    several places is saved once. A method, such as `eqq.MSE()`, is not part of an array.

    A process that dies while saving leaves the old file as it was, if there was one, and a hidden folder, which the
    next save removes.

    **Arguments:**

    - `path`: the file to write; with `shard_nbytes`, a folder.
    - `tree`: any pytree.
    - `shard_nbytes`: divides the tensors among files of at most this size, as far as single tensors allow, with a
        `model.safetensors.index.json` that lists them.

    **Returns:**

    Nothing.

    **Raises:**

    `TypeError` for a leaf without values (a `jax.ShapeDtypeStruct`, or a traced array), for an array of objects or with
    a mask, or for a format whose fields JSON cannot hold. `ValueError` for a quantized array that is not whole, a
    deleted array, or one of which this process holds only a part; the message names the leaf. `ValueError` too if
    `path` is a file and `shard_nbytes` needs a folder, or if a folder holds other weights, which would be read in
    place of these. `OSError` if `path` is not a file, its folder does not exist, or the disk is full. In all these
    cases nothing is written.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"`path` must be a path. Got {type(path)}. Pass the path first, then the tree.")
    path, (tensors, manifest) = Path(path), describe_tree(tree)
    if shard_nbytes is not None:
        write_folder(path, tensors, shard_nbytes, head_metadata=manifest)
        return
    with replace_weights(path) as new:
        write(new, tensors, manifest)


def describe_tree(tree: PyTree) -> tuple[list[NewTensor], dict[str, str]]:
    """Returns the tensors to write, and the metadata that describes the leaves.

    Raises before anything is written.
    """
    leaves = [(leaf, entry) for leaf in named_leaves(tree, is_packed) if (entry := checked_entry(leaf)) is not None]
    # Names of tensors are names of leaves, or start with them; "codes" of one might be another leaf.
    taken = {"__metadata__", *(leaf.path for leaf, _ in leaves)}
    saved, tensors, seen = [], [], {}
    read_parts: Callable[[LazyArray], dict[str, PyTree]] = keep_latest(lambda lazy: _parts(lazy.read()))
    for (leaf, entry), keys in zip(leaves, _nested_keys([leaf for leaf, _ in leaves]), strict=True):
        x, same = leaf.value, identity_key(leaf.value)
        if entry.kind != "scalar" and same in seen:
            first = seen[same]
            tied = dataclasses.replace(first.entry, within=entry.within)  # another array of ours may be around it here
            saved.append(dataclasses.replace(first, path=leaf.path, keys=keys, entry=tied, tied_to=first.path))
            continue
        parts, found = ft.partial(read_parts, x) if isinstance(x, LazyArray) else ft.partial(_parts, x), {}
        struct: PyTree = x.struct if isinstance(x, LazyArray) else x
        for part, (dtype, shape) in stored_as(entry, struct).items():
            name = _free(f"{leaf.path}.{part}" if part else leaf.path, taken, own=not part)
            found[part] = NewTensor(name, dtype, shape, ft.partial(_read, parts, part))
        tensors += sorted(found.values(), key=lambda t: -width(t))
        impl = str(jr.key_impl(struct)) if entry.kind == "key" else None
        value = x if isinstance(x, Scalar) else None
        seen[same] = SavedLeaf(leaf.path, keys, entry, found, value, impl)
        saved.append(seen[same])
    manifest = json.dumps({"version": VERSION, "leaves": list(map(leaf_to_json, saved))}, separators=(",", ":"))
    return tensors, {KEY: manifest}


def _parts(x: PyTree) -> dict[str, PyTree]:
    return named_parts(x) if is_packed(x) else {"": x}


def _read(parts: Callable[[], dict[str, PyTree]], part: str) -> np.ndarray:
    found = parts()[part]
    is_key = isinstance(found, jax.Array) and jax.numpy.issubdtype(found.dtype, jax.dtypes.prng_key)
    values = np.asarray(jr.key_data(found) if is_key else found)
    return to_stored(values.astype(values.dtype.newbyteorder("="), copy=False))


def checked_entry(leaf: Leaf) -> Entry | None:
    """Describes a leaf that is to be saved. Raises if its values are not here."""
    if isinstance(leaf.value, LazyArray):
        return describe_leaf(dataclasses.replace(leaf, value=leaf.value.struct))
    for x in jtu.tree_leaves(leaf.value):
        if isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)):
            kind = "a traced array: save outside of `jit`" if isinstance(x, jax.core.Tracer) else "a ShapeDtypeStruct"
            raise TypeError(f"{leaf.path} must have values. Got {kind}.")
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            raise ValueError(
                f"{leaf.path} must be on devices of this process. Got an array that others hold too. Gather it, or "
                "save with a library for many processes, such as orbax."
            )
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(f"{leaf.path} must have values. Got an array that was deleted, or donated to a `jit`.")
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{leaf.path} must be an array without a mask, which a file cannot hold. Got {type(x)}.")
    if len(leaf.keys) > MAX_KEYS:
        raise ValueError(f"{leaf.path[:80]}... must be within at most {MAX_KEYS} nodes. Got {len(leaf.keys)}.")
    return describe_leaf(leaf)


def _nested_keys(leaves: Sequence[Leaf]) -> list[tuple[str, ...]]:
    """Returns the keys of each leaf in a nested dictionary.

    Its path alone if another leaf stands in the way.
    """
    keys = [tuple(key_name(key) for key in leaf.keys) for leaf in leaves]
    inner, count = {k[:n] for k in keys for n in range(len(k))}, collections.Counter(keys)
    return [(leaf.path,) if k in inner or count[k] > 1 else k for leaf, k in zip(leaves, keys, strict=True)]


def _free(name: str, taken: set[str], own: bool) -> str:
    while name in taken and not (own and name != "__metadata__"):
        name += "_"
    taken.add(name)
    return name


def write_folder(
    folder: Path,
    tensors: Sequence[Tensor],
    shard_nbytes: int | None,
    *,
    metadata: Mapping[str, str] = MappingProxyType({}),
    head_metadata: Mapping[str, str] = MappingProxyType({}),
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Writes tensors into a folder, as one file, or as shards and their index.

    - `metadata`: of each file.
    - `head_metadata`: of the one file, or of the index.
    - `files`: the contents of other files, by their names.
    """
    with replace_weights(folder, find_head(shard_nbytes, is_folder=True)) as new:
        for name, content in files.items():
            (new / name).write_bytes(content)
        if shard_nbytes is None:
            write(new / FILE, tensors, {**metadata, **head_metadata})
            return
        shards, token, where = split(tensors, shard_nbytes), secrets.token_hex(4), {}
        for n, shard in enumerate(shards, 1):
            name = f"model-{n:05}-of-{len(shards):05}-{token}.safetensors"
            write(new / name, shard, metadata)
            where |= {t.name: name for t in shard}
        total = sum(t.nbytes for t in tensors)
        index = {"metadata": {"total_size": total, **head_metadata}, "weight_map": where}
        (new / INDEX).write_text(json.dumps(index))


def find_head(shard_nbytes: int | None, is_folder: bool) -> str | None:
    """Returns the file of a folder that a reader opens first, or `None` for no folder."""
    if shard_nbytes is None:
        return FILE if is_folder else None
    if isinstance(shard_nbytes, bool | str) or not shard_nbytes >= 1:
        raise ValueError(
            f"`shard_nbytes` must be a number of at least 1. Got {shard_nbytes!r}. `None` writes one file."
        )
    return INDEX


def replace_weights(path: Path, head: str | None = None) -> contextlib.AbstractContextManager[Path]:
    """As `replace`, where no other weights would be read."""
    return replace(path, head, ft.partial(check_place, path, head))
