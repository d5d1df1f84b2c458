"""`eqq.load` and `eqq.io.assign`: from a file, or a dictionary, into a model."""

import dataclasses
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._array.array import QuantizedArray
from .._array.sharding import leaf_shardings
from .._errors import name_type
from .._formats.base import AbstractFormat
from .._mesh import full_spec
from .._tree.leaves import Leaf, named_leaves, replace_leaves
from .._tree.placement import resolve_shardings, Shardings
from .._types import PyTree
from .._wrappers.permuted import PermutedArray
from ._entry import describe_leaf, Entry, is_packed, named_parts
from ._files import find_files
from ._manifest import from_stored, KEY, read_manifest, SavedLeaf
from ._memory import to_jax
from ._tensors import MappedFile, StoredTensor


def load(
    path: str | os.PathLike[str],
    like: PyTree | None = None,
    *,
    formats: Iterable[type[AbstractFormat]] = (),
    shardings: Shardings | None = None,
) -> PyTree:
    """Loads a file of [`eqquant.save`][].

    !!! Example

        ```python
        model = eqq.load("model.safetensors", make_model())                 # quantized as it was saved
        model = eqq.load("model.safetensors", eqx.filter_eval_shape(make_model))
        arrays = eqq.load("model.safetensors")                              # {"layers": {"0": {"weight": ...
        ```

    Leaves load one after another, from a memory map: at its peak this takes the result and one more leaf. A file never
    causes an import.

    **Arguments:**

    - `path`: the file, the folder that `save(..., shard_nbytes=)` wrote, or its `index.json`.
    - `like`: a template, of arrays or of `jax.ShapeDtypeStruct`s, which gives the structure and every leaf that is not
        saved. Where it has a float array, the file may have a quantized one of the same shape and dtype. Where it has a
        quantized array, the file must have the same format. Arrays take the shardings of the template. By default,
        returns a nested dictionary with the keys of the tree, as strings.
    - `formats`: classes of formats besides the defined ones: all of eqquant's, and every one whose module was imported.
    - `shardings`: the shardings of the logical arrays, as for [`eqquant.quantize_tree`][]. Each device reads its own
        part of the file.

    **Returns:**

    The tree. A leaf that was a NumPy array is one again, and so is an array of a dtype that JAX is not set to hold,
    such as float64 without `jax_enable_x64`.

    **Raises:**

    `ValueError` if the file is damaged, or was not written by [`eqquant.save`][], or does not fit the template: another
    format, shape or dtype, a missing or an additional leaf. The message names the file and the leaf, with both sides.
    Nothing is read before this is known.
    """
    files = find_files(path)
    if not isinstance(text := files.metadata.get(KEY), str):
        files.file.fail(
            "must be written by `eqq.save`. Got another file. `eqq.io.open` reads files of other libraries."
        )
    saved = {leaf.path: leaf for leaf in read_manifest(text, files.tensors, files.file, formats)}
    if like is None:
        return _load_nested(saved, files.file, shardings)
    return _load_into(like, saved, f"`like` must fit the file {Path(path)}", shardings)


def _load_nested(saved: Mapping[str, SavedLeaf[StoredTensor]], file: MappedFile, shardings: Shardings | None) -> PyTree:
    skeleton = nest((leaf.keys, _stand_in(leaf.entry)) for leaf in saved.values())
    if skeleton is None:
        file.fail("must have keys that nest. Got a leaf under the same keys as another.")
    shown = list(named_leaves(skeleton))
    targets = resolve_shardings(skeleton, shown, shardings)
    to = {tuple(key.key for key in leaf.keys): sharding for leaf, sharding in zip(shown, targets, strict=True)}
    done: dict[Hashable, PyTree] = {}
    return nest((leaf.keys, read_leaf(leaf, to.get(leaf.keys), done=done)) for leaf in saved.values())


def _load_into(
    like: PyTree, saved: Mapping[str, SavedLeaf[StoredTensor]], rule: str, shardings: Shardings | None
) -> PyTree:
    entries = {path: leaf.entry for path, leaf in saved.items()}
    places = check_fits(list(named_leaves(like, is_packed)), entries, rule, ("in the file", "in `like`"))
    if shardings is None:
        targets = [own_sharding(leaf.value) if place is not None else None for leaf, place in places]
    else:
        structs = [leaf.value if place is None else _stand_in(entries[leaf.path], leaf.value) for leaf, place in places]
        skeleton = replace_leaves(like, structs, is_packed)
        targets = resolve_shardings(skeleton, list(named_leaves(skeleton)), shardings)
    done: dict[Hashable, PyTree] = {}
    values = []
    for (leaf, place), sharding in zip(places, targets, strict=True):
        x = leaf.value if place is None else read_leaf(saved[leaf.path], sharding, place, done)
        if place is not None and shardings is None and is_packed(leaf.value) and is_packed(x):
            told = leaf.value.array if isinstance(leaf.value, PermutedArray) else leaf.value
            x = _change_array(x, lambda q: dataclasses.replace(q, logical_sharding=told.logical_sharding))
        values.append(x)
    return replace_leaves(like, values, is_packed)


def assign(model: PyTree, arrays: Mapping[str, PyTree]) -> PyTree:
    """Puts arrays, by name, into the places of a model.

    !!! Example

        ```python
        model = eqq.io.assign(model, eqq.load("model.safetensors"))
        ```

    **Arguments:**

    - `model`: a template: any pytree of arrays, quantized arrays or `jax.ShapeDtypeStruct`s.
    - `arrays`: a dictionary, nested like the model or with paths such as `layers.0.weight` as keys. It must have every
        array of the model and no others.

    **Returns:**

    The model with these arrays. A quantized array may take the place of a float one.

    **Raises:**

    `ValueError` if an array is missing, left over, or of another format, shape or dtype. The message names the leaf,
    with both sides.
    """
    shown = list(named_leaves(arrays, is_packed))
    given = {leaf.path: leaf.value for leaf in shown}
    entries = {leaf.path: entry for leaf in shown if (entry := describe_leaf(leaf)) is not None}
    leaves = list(named_leaves(model, is_packed))
    places = check_fits(leaves, entries, "`arrays` must fit the model", ("in `arrays`", "in the model"))
    values = [leaf.value if place is None else given[leaf.path] for leaf, place in places]
    return replace_leaves(model, values, is_packed)


def check_fits(
    leaves: Sequence[Leaf], entries: Mapping[str, Entry], rule: str, names: tuple[str, str]
) -> list[tuple[Leaf, Entry | None]]:
    """Returns the leaves of a template with the entry of each, `None` if it is not saved.

    Raises a `ValueError` unless every other leaf has exactly one entry that fits.
    """
    saved_side, template_side = names
    places = [(leaf, describe_leaf(leaf)) for leaf in leaves]
    known = {leaf.path for leaf in leaves}
    wrapped = _find_wrapped(entries, known)
    wrong = []
    for leaf, place in places:
        saved = entries.get(leaf.path, wrapped.get(leaf.path))
        if place is None and saved is None:
            continue
        if saved is None or place is None or leaf.path in wrapped or not saved.goes_into(place):
            sides = f"{saved or 'nothing'} {saved_side}, {place or name_type(leaf.value)} {template_side}"
            wrong.append(f"{leaf.path}: {sides}")
    inside = tuple(f"{path}." for path in wrapped)
    wrong += [
        f"{path}: {entry} {saved_side}, nothing {template_side}"
        for path, entry in entries.items()
        if path not in known and not (entry.within is not None and path.startswith(inside))
    ]
    if wrong:
        more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        hint = (
            " The template must have the same wrappers: `eqx.filter_eval_shape(make)`, where `make` quantizes, rotates "
            "or adds factors as you did before you saved, gives one that takes no memory."
        )
        raise ValueError(f"{rule}. Got {'; '.join(wrong[:10])}{more}.{hint if wrapped else ''}")
    return places


def _find_wrapped(entries: Mapping[str, Entry], known: Set[str]) -> dict[str, Entry]:
    """Returns the entries that the file holds within a wrapper in the place of a leaf."""
    found: dict[str, Entry] = {}
    for path, entry in entries.items():
        around = path.rpartition(".")[0] if entry.within is not None and path not in known else ""
        while around and around not in known:
            around = around.rpartition(".")[0]
        if around:
            found.setdefault(around, entry)
    return found


def nest(items: Iterable[tuple[tuple[str, ...], object]]) -> PyTree:
    """Returns nested dictionaries of values by their keys, in time linear in the keys.

    `None` if a value stands under the same keys as another, or within it.
    """
    top: dict[str, object] = {}
    for keys, value in items:
        node = top
        *around, last = ("", *keys)
        for key in around:
            inner = node.setdefault(key, {})
            if not isinstance(inner, dict):
                return None
            node = inner
        if last in node:
            return None
        node[last] = value
    return top.get("", {})


def _stand_in(entry: Entry, template: PyTree = None) -> PyTree:
    """Returns a stand-in for a leaf, for the rules of shardings to look at."""
    if entry.kind in ("scalar", "key"):
        return 0
    known = getattr(template, "sharding", None)
    known = known if isinstance(known, NamedSharding) else None
    if entry.kind == "quantized" and entry.order is None:
        return entry.packed_struct(known)
    return jax.ShapeDtypeStruct(entry.shape, jnp.dtype(entry.dtype), sharding=known)


def own_sharding(x: PyTree) -> NamedSharding | None:
    sharding = getattr(x.array if isinstance(x, PermutedArray) else x, "sharding", None)
    return full_spec(sharding, x.ndim) if isinstance(sharding, NamedSharding) else None


def read_leaf(
    saved: SavedLeaf[StoredTensor],
    sharding: NamedSharding | None = None,
    place: Entry | None = None,
    done: dict[Hashable, PyTree] | None = None,
) -> PyTree:
    """Reads one leaf.

    If a leaf that it is tied to is `done`, with the same sharding, the two are the same array.
    """
    entry, done = saved.entry, {} if done is None else done
    if entry.kind == "scalar":
        return saved.value
    kind = entry.kind if place is None or entry.kind in ("quantized", "key") else place.kind
    same = (saved.tied_to or saved.path, sharding, kind)
    if same not in done:
        done[same] = _read_quantized(saved, sharding) if kind == "quantized" else _read_array(saved, kind, sharding)
    return done[same]


def _change_array(
    x: QuantizedArray | PermutedArray, change: Callable[[QuantizedArray], QuantizedArray]
) -> QuantizedArray | PermutedArray:
    return dataclasses.replace(x, array=change(x.array)) if isinstance(x, PermutedArray) else change(x)


def _read_quantized(saved: SavedLeaf[StoredTensor], sharding: NamedSharding | None) -> QuantizedArray | PermutedArray:
    like: PyTree = saved.entry.struct
    to = {} if sharding is None else _find_shardings(like, sharding, saved.path)
    leaves = [
        to_jax(from_stored(saved.tensors[part].array(), struct.dtype, struct.shape), to.get(part))
        for part, struct in named_parts(like).items()
    ]
    if saved.entry.order is not None:
        order = saved.tensors["order"]
        if not np.array_equal(np.sort(order.array()), np.broadcast_to(np.arange(order.shape[-1]), order.shape)):
            order.fail("It must have every index once.")
    q = jtu.tree_unflatten(jtu.tree_structure(like), leaves)
    return q if sharding is None else _change_array(q, lambda q: dataclasses.replace(q, logical_sharding=sharding))


def _read_array(saved: SavedLeaf[StoredTensor], kind: str, sharding: NamedSharding | None) -> PyTree:
    stored = saved.tensors[""].array()
    if kind == "key":
        keys = jr.wrap_key_data(jnp.array(stored), impl=saved.impl)
        return keys if sharding is None else jax.device_put(keys, sharding)
    view = from_stored(stored, jnp.dtype(saved.entry.dtype), saved.entry.shape)
    return view[()] if kind == "generic" else np.array(view) if kind == "numpy" else to_jax(view, sharding)


def _find_shardings(q: QuantizedArray | PermutedArray, sharding: NamedSharding, path: str) -> dict[str, NamedSharding]:
    """Returns the sharding of each part of an array. Every device has the order of inputs."""
    if not isinstance(q, PermutedArray):
        return named_parts(leaf_shardings(q, sharding, path))
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    return {"order": everywhere} | {
        f"array.{name}": to for name, to in _find_shardings(q.array, sharding, path).items()
    }
