"""`eqq.io.load_into`: loads a checkpoint into a model that names its leaves differently."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .._array.value import AbstractArrayValue
from .._errors import did_you_mean
from .._tree.leaves import abbreviate_list, named_leaves, replace_leaves
from .._tree.placement import move, resolve_shardings, Shardings
from .._tree.select import check_patterns, matches, Pattern, widen_pattern
from .._types import PyTree
from .._wrappers.concatenate import concatenate, split, stack
from .._wrappers.permuted import PermutedArray
from ._checkpoint import Checkpoint, open as open_checkpoint
from ._dialects._item import Item
from ._entry import describe, describe_leaf, Entry, is_packed
from ._lazy import LazyArray
from ._load import own_sharding
from ._load_plan import LoadPlan, LoadRow
from ._memory import to_jax
from ._names import detect
from ._rules import match_names, Matched, NameRules, Recipe


Layers = Sequence[Sequence[PyTree]]  # the arrays of a recipe, by layer and part


def load_into(
    model: PyTree,
    checkpoint: Checkpoint | Mapping[str, object] | str | os.PathLike[str],
    names: NameRules | None = None,
    *,
    dequantize: bool = False,
    keep: Sequence[Pattern] = (),
    shardings: Shardings | None = None,
) -> PyTree:
    """Loads a checkpoint of any library into a model. Quantized weights stay packed.

    !!! Example

        ```python
        names = {
            "model.embed_tokens.weight": "embedding.weight",
            "model.layers.{n}.self_attn.{x:q|k|v}_proj.{p}": "layers.{n}.attention.{x}.{p}",
            "model.layers.{n}.self_attn.o_proj.{p}": "layers.{n}.attention.output.{p}",
            "model.layers.{n}.mlp.{x}_proj.{p}": "layers.{n}.mlp.{x}.{p}",
            "model.layers.{n}.{x:input|post_attention}_layernorm.weight": "layers.{n}.{x}_norm.weight",
            "model.norm.weight": "norm.weight",
            "lm_head.weight": "head.weight",
            "*.rotary_emb.inv_freq": None,                                  # leave it out
        }
        skeleton = eqx.filter_eval_shape(Llama, config, key=key)            # takes no memory
        print(eqq.io.plan_load(skeleton, "llama-awq", names))               # a table; reads no array
        model = eqq.io.load_into(skeleton, "llama-awq", names)
        ```

    Names of arrays are matched as a whole, and the first rule that matches holds. In the name of an array:

    - `{n}` is any text without dots. The path of the leaf takes it up: `{n}`.
    - `{x:q|k|v}` is one of these.
    - `*` is any text.
    - A compiled regular expression does the same with named groups, such as `(?P<n>[0-9]+)`.

    The target of the array:

    - The path of a leaf: it takes that place.
    - A path that lacks a group, such as `"layers.mlp.{x}.{p}"` above: all arrays that differ in it are stacked along a
        new first axis, by its index. So layers become a stack for `scan`, and experts one array.
    - A tuple of paths: the array is divided among these leaves, along the first axis. A tuple of *names* as the key
        does the opposite: it joins these arrays.
    - An [`eqquant.io.Target`][] also transposes, or applies a function.
    - `None`: the array is left out.

    This moves packed codes and scales, and computes nothing. An inexact step, such as joining parts in different
    formats, is an error, unless `dequantize=True`. Floats and dequantized values take the dtype of the leaf. Axes of
    length one are added or removed where leaf and array differ in nothing else.

    **Arguments:**

    - `model`: a template: the model, or a skeleton that takes no memory, as from `eqx.filter_eval_shape`. It gives the
        structure, the dtypes, and all leaves that are not arrays. A quantized array may take the place of a float one.
    - `checkpoint`: the result of [`eqquant.io.open`][], or a path to open; or any dictionary of arrays.
    - `names`: rules as above, or a function from the name of an array to its target. By default
        [`eqquant.io.names.detect`][], which knows the names of some families of models.
    - `dequantize`: whether every array becomes dense when it is read.
    - `keep`: globs or regular expressions for leaves that keep the values of the model.
    - `shardings`: the shardings of the logical arrays, as for [`eqquant.quantize_tree`][]. By default the
        shardings of the model.

    **Returns:**

    The model with these arrays. They are read one leaf at a time: at its peak this takes the result and one more leaf
    of the model, with its source arrays.

    **Raises:**

    `ValueError` if a leaf gets no array, or an array no leaf, or if shapes or formats do not fit. The message names
    the leaf and the array, with both sides. Nothing is read before this is known.
    """
    plan = _Plan(model, checkpoint, names, dequantize, keep)
    if plan.problems:
        idle = f" No array matches {abbreviate_list(plan.matched.idle)}." if plan.matched.idle else ""
        raise ValueError(
            f"`names` must give every leaf of the model an array of {plan.where}, and every array a leaf that fits. "
            f"Got {abbreviate_list(plan.problems, '; ')}.{idle} `eqq.io.plan_load` shows all leaves. A rule to `None` "
            "leaves an array out, and `keep=` leaves a leaf as it is."
        )
    return plan.load(shardings)


def plan_load(
    model: PyTree,
    checkpoint: Checkpoint | Mapping[str, object] | str | os.PathLike[str],
    names: NameRules | None = None,
    *,
    dequantize: bool = False,
    keep: Sequence[Pattern] = (),
) -> LoadPlan:
    """Plans [`eqquant.io.load_into`][] without reading an array.

    !!! Example

        ```python
        print(eqq.io.plan_load(skeleton, "llama-awq", names))
        ```

    **Arguments:**

    - `model`, `checkpoint`, `names`, `dequantize`, `keep`: as for [`eqquant.io.load_into`][].

    **Returns:**

    A report, which prints as a table. It has

    - `rows`: for each leaf, in the order of the model, its `path`, `shape`, `dtype`, `format` (`None` for floats), the
        `sources` (names of arrays), `how` these change, and the `problem`, or `None`.
    - `problems`: why the checkpoint cannot be loaded; empty if it can.
    - `unused`: arrays that no rule names, which is a problem; `left_out`: arrays that a rule leaves out, with `None`.
    - `kept`: leaves that keep the values of the model.
    - `idle`: rules that match no array. Ready names have rules for arrays of some models only, so it is no problem.
    - `.to_dict()`, `.to_json(indent=None)`: the same as plain Python, and as JSON.
    """
    return _Plan(model, checkpoint, names, dequantize, keep).report()


def _sources(checkpoint: Checkpoint | PyTree) -> Mapping[str, Item | LazyArray]:
    if isinstance(checkpoint, Checkpoint):
        return checkpoint.items_by_name
    leaves = named_leaves(checkpoint, is_packed)
    struct = lambda x: jtu.tree_map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), x)
    return {leaf.path: LazyArray(struct(leaf.value), lambda x=leaf.value: x) for leaf in leaves}


class _Plan:
    """The leaf of each array, and everything that does not fit."""

    def __init__(
        self, model: PyTree, checkpoint: PyTree, names: NameRules | None, dequantize: bool, keep: Sequence[Pattern]
    ) -> None:
        if isinstance(checkpoint, str | os.PathLike):
            checkpoint = open_checkpoint(checkpoint)
        self.where = checkpoint.path if isinstance(checkpoint, Checkpoint) else "`checkpoint`"
        self.model, self.dequantize = model, dequantize
        self.leaves = list(named_leaves(model, is_packed))
        self.sources = _sources(checkpoint)
        keep = [widen_pattern(pattern, self.leaves) for pattern in keep]
        check_patterns(keep, self.leaves, "keep")
        entries = {leaf.path: describe_leaf(leaf) for leaf in self.leaves}
        self.places = {path: e for path, e in entries.items() if e is not None and e.kind not in ("scalar", "key")}
        self.kept = tuple(
            leaf.path for leaf in self.leaves if leaf.path in self.places and any(matches(p, leaf) for p in keep)
        )
        self.matched: Matched = match_names(detect(checkpoint) if names is None else names, tuple(self.sources))
        self.recipes: dict[str, Recipe] = {}
        self.made: dict[str, PyTree] = {}  # the arrays of the result, without values
        self.problems_by_path: dict[str, str] = {}
        self.problems = [*self.matched.problems]
        for recipe in self.matched.recipes:
            self._check(recipe)
        for leaf in self.leaves:
            path, place = leaf.path, self.places.get(leaf.path)
            if path in self.kept and any(isinstance(x, jax.ShapeDtypeStruct) for x in jtu.tree_leaves(leaf.value)):
                self._wrong(path, "it keeps the value of the model, which has none")
            elif place is not None and path not in (*self.recipes, *self.kept, *self.problems_by_path):
                self._wrong(path, f"{place} in the model, and no array for it")
        self.problems += [f"{name}: {self._describe(name)}, and no rule for it" for name in self.matched.unknown]

    def _wrong(self, path: str, problem: str) -> None:
        self.problems_by_path.setdefault(path, problem)
        self.problems.append(f"{path}: {problem}")

    def _describe(self, name: str) -> str:
        return str(_entry(self.sources[name].struct, name))

    def _check(self, recipe: Recipe) -> None:
        """Computes the leaves of a recipe without values, and notes the ones that do not fit."""
        names = [name for layer in recipe.sources for name in layer]
        shown = f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}"
        for path in recipe.paths:
            if path in self.recipes:
                return self._wrong(path, f"both {self.recipes[path].sources[0][0]} and {names[0]}")
            if path not in self.places:
                near = f". {hint[:-1]}" if (hint := did_you_mean(path, self.places)) else ""
                return self._wrong(path, f"{shown}, {self._describe(names[0])}, and no such array in the model{near}")
            if path in self.kept:
                return self._wrong(path, f"{shown}, and `keep`, which leaves it as it is")
            self.recipes[path] = recipe
        for name in names:
            if (problem := self.sources[name].problem) is not None:
                return self._wrong(recipe.paths[0], f"{name} cannot be read: {problem}")
        structs = [[self.sources[name].struct for name in layer] for layer in recipe.sources]
        try:
            made = self._make(recipe, structs, abstract=True)
        except Exception as e:  # also whatever `apply` raises
            formats = ", ".join(f"{name}: {self._describe(name)}" for name in names[:4])
            self._wrong(recipe.paths[0], f"{e} ({formats}). `dequantize=True` of `eqq.io.Target` makes them dense")
            return
        for path, x in made.items():
            entry = _entry(x, path)
            if entry is None or not entry.goes_into(self.places[path]):
                told = f"{shown}: " if len(names) == 1 else f"{shown}, made into "
                self._wrong(path, f"{self.places[path]} in the model; {told}{entry}")
            self.made[path] = x

    def _make(self, recipe: Recipe, layers: Layers, abstract: bool = False) -> dict[str, PyTree]:
        """Makes the leaves of a recipe from its arrays, given by layer and part."""
        to, places = recipe.to, [self.places[path] for path in recipe.paths]
        plain = not (to.transpose or to.apply or recipe.stacked)
        plain &= len(recipe.paths) == len(layers[0]) == 1 or to.tied

        def make(layers: Layers) -> list[PyTree]:
            outs = [self._make_layer(recipe, places, parts) for parts in layers]
            columns = zip(*outs, strict=True)
            return [_cast(_stack(list(c), recipe.stacked), p) for c, p in zip(columns, places, strict=True)]

        if plain and not isinstance(layers[0][0], AbstractArrayValue):  # also dtypes that JAX is not set to hold
            x = layers[0][0]
            return {path: _cast(x, place) for path, place in zip(recipe.paths, places, strict=True)}
        out = jax.eval_shape(make, layers) if abstract else make(layers)
        if to.tied:
            out = [out[0]] * len(out)
        return dict(zip(recipe.paths, out, strict=True))

    def _make_layer(self, recipe: Recipe, places: Sequence[Entry], parts: Sequence[PyTree]) -> list[PyTree]:
        to, parts = recipe.to, list(parts)
        for n, x in enumerate(parts):
            if (to.dequantize or self.dequantize) and isinstance(x, AbstractArrayValue):
                x = x.dequantize()
            if to.transpose and len(x.shape) > 1:
                x = x.swapaxes(-1, -2) if isinstance(x, AbstractArrayValue) else jnp.swapaxes(x, -1, -2)
            parts[n] = x if to.apply is None else to.apply(x)
        whole = concatenate(parts, to.axis)
        if to.tied or len(places) == 1:
            return [whole] * len(places)
        axis = to.axis % len(whole.shape)
        sizes = [place.shape[axis + len(recipe.stacked)] for place in places]
        return split(whole, sizes, axis)

    def load(self, shardings: Shardings | None) -> PyTree:
        if shardings is None:
            targets = [own_sharding(leaf.value) for leaf in self.leaves]
        else:
            # Rules see one leaf, whatever it is made of.
            one = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, PermutedArray) else x
            shown = [one(self.made.get(leaf.path, leaf.value)) for leaf in self.leaves]
            skeleton = replace_leaves(self.model, shown, is_packed)
            targets = resolve_shardings(skeleton, list(named_leaves(skeleton, is_packed)), shardings)
        targets_by_path = {leaf.path: target for leaf, target in zip(self.leaves, targets, strict=True)}
        done: dict[str, PyTree] = {}
        for leaf in self.leaves:
            recipe = self.recipes.get(leaf.path)
            if recipe is None or leaf.path in done:
                continue
            divided = any(targets_by_path[path] is not None for path in recipe.paths)
            with _on_host() if divided else contextlib.nullcontext():
                layers = [[self.sources[name].read() for name in layer] for layer in recipe.sources]
                made = self._make(recipe, layers)
            del layers
            placed: dict[Hashable, PyTree] = {}  # a tied array is one array in each of its places
            for path, x in made.items():
                numpy = self.places[path].kind == "numpy"
                same = (id(x), numpy, targets_by_path[path])
                if same not in placed:
                    x = np.asarray(x) if numpy else to_jax(x) if isinstance(x, np.ndarray) else x
                    placed[same] = _move(x, targets_by_path[path])
                done[path] = placed[same]
        return replace_leaves(self.model, [done.get(leaf.path, leaf.value) for leaf in self.leaves], is_packed)

    def report(self) -> LoadPlan:
        rows = []
        for path, place in self.places.items():
            if path in self.kept:
                continue
            recipe, made = self.recipes.get(path), self.made.get(path)
            entry = place if made is None else _entry(made, path) or place
            sources = () if recipe is None else tuple(name for layer in recipe.sources for name in layer)
            how = "" if recipe is None else self._how(recipe, place)
            format = entry.format
            rows.append(LoadRow(path, place.shape, entry.dtype, format, sources, how, self.problems_by_path.get(path)))
        found = self.matched
        return LoadPlan(tuple(rows), found.left_out, found.unknown, self.kept, tuple(self.problems), found.idle)

    def _how(self, recipe: Recipe, place: Entry) -> str:
        to, first = recipe.to, self.sources[recipe.sources[0][0]].struct
        said = {
            "dequantized": (to.dequantize or self.dequantize) and isinstance(first, AbstractArrayValue),
            "inputs reordered": isinstance(first, PermutedArray),
            "transposed": to.transpose and len(first.shape) > 1,
            f"by {getattr(to.apply, '__name__', 'a function')}": to.apply is not None,
            f"{len(recipe.sources[0])} joined": len(recipe.sources[0]) > 1,
            "tied": to.tied,
            f"one of {len(recipe.paths)} parts": len(recipe.paths) > 1 and not to.tied,
            f"{' x '.join(map(str, recipe.stacked))} stacked": bool(recipe.stacked),
            f"from {np.dtype(first.dtype).name}": np.dtype(first.dtype).name != place.dtype,
        }
        return ", ".join(what for what, holds in said.items() if holds)


def _entry(x: PyTree, path: str) -> Entry | None:
    if isinstance(x, PermutedArray) and not is_packed(x):
        # With low-rank factors it is no array of a file, but fits where one does.
        return Entry("array", x.dtype.name, x.shape)
    return describe(x, path)


def _move(x: PyTree, sharding: NamedSharding | None) -> PyTree:
    if sharding is None or not isinstance(x, PermutedArray):
        return move(x, sharding)
    everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    return dataclasses.replace(x, array=move(x.array, sharding), order=move(x.order, everywhere))


def _stack(arrays: list[PyTree], lengths: tuple[int, ...]) -> PyTree:
    if not lengths:
        return arrays[0]
    x = stack(arrays)
    return x if len(lengths) == 1 else jtu.tree_map(lambda leaf: leaf.reshape(*lengths, *leaf.shape[1:]), x)


def _cast(x: PyTree, place: Entry) -> PyTree:
    """Gives an array the dtype of its leaf, and its axes of length one."""
    dtype = jnp.dtype(place.dtype)
    if isinstance(x, AbstractArrayValue):
        return x.astype(dtype) if jnp.issubdtype(dtype, jnp.floating) else x
    complex_to_real = jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating)
    both = jnp.issubdtype(x.dtype, jnp.inexact) and jnp.issubdtype(dtype, jnp.inexact) and not complex_to_real
    ones = lambda shape: [n for n in shape if n != 1]
    shape = place.shape if ones(x.shape) == ones(place.shape) else x.shape
    to = dtype if both else x.dtype
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, to)
    x = x if x.dtype == to else x.astype(to)
    return x if x.shape == shape else x.reshape(shape)


def _on_host() -> AbstractContextManager[object]:
    """So that no single device must hold an array that is divided among several."""
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # `JAX_PLATFORMS` may leave it out
        return contextlib.nullcontext()
