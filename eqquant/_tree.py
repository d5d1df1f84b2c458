"""Whole models: which leaves are quantized, to what, and what that costs."""

import fnmatch
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import DTypeLike, PRNGKeyArray, PyTree
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ._array import AbstractFormat, as_format, QuantizedArray
from ._quantize import all_finite, check_dtype, check_quantizable, encode_array, is_quantized, not_finite_message


FormatLike = AbstractFormat | str
Pattern = str | re.Pattern[str]
# The key of a mapping is invariant to a type checker, so each kind is named.
Rules = (
    FormatLike
    | Mapping[str, FormatLike | None]
    | Mapping[re.Pattern[str], FormatLike | None]
    | Mapping[Pattern, FormatLike | None]
    | Callable[[str, Any], FormatLike | None]
)
Where = Callable[[PyTree], Any]


#
# Reports
#


class LeafReport(NamedTuple):
    """What happens, or happened, to one leaf of a tree.

    `format` is `None` for a leaf that stays as it is, and `reason` says why. `nbytes` are the bytes that are stored,
    `dense_nbytes` what the same leaf takes in its logical dtype. `bits` are per value, scales included.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: AbstractFormat | None
    axis: int | tuple[int, ...] | None
    reason: str
    nbytes: int
    dense_nbytes: int

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / max(math.prod(self.shape), 1)

    def to_dict(self) -> dict[str, Any]:
        shown = None if self.format is None else repr(self.format)
        return {**self._asdict(), "format": shown, "bits": self.bits}


class TreeReport(NamedTuple):
    """What [`eqquant.plan_tree`][] would do, or [`eqquant.summary`][] found: a row per array. Prints as a table."""

    leaves: tuple[LeafReport, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @property
    def dense_nbytes(self) -> int:
        return sum(leaf.dense_nbytes for leaf in self.leaves)

    @property
    def params(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in self.leaves)

    @property
    def bits(self) -> float:
        """Bits per value, over the whole tree."""
        return 8 * self.nbytes / max(self.params, 1)

    def to_dict(self) -> dict[str, Any]:
        return {
            "leaves": [leaf.to_dict() for leaf in self.leaves],
            "nbytes": self.nbytes,
            "dense_nbytes": self.dense_nbytes,
            "params": self.params,
            "bits": self.bits,
        }

    def __rich__(self) -> Table:
        table = Table("leaf", "shape", "stored as", "bits", "bytes", "of", show_footer=True)
        for column in table.columns[3:]:
            column.justify = "right"
        for leaf in self.leaves:
            stored = repr(leaf.format) if leaf.format is not None else f"{leaf.dtype}: {leaf.reason}"
            shape = " x ".join(map(str, leaf.shape)) or "scalar"
            share = f"{leaf.nbytes / max(leaf.dense_nbytes, 1):.1%}"
            style = None if leaf.format is not None else "dim"
            table.add_row(leaf.path, shape, stored, f"{leaf.bits:.2f}", f"{leaf.nbytes:,}", share, style=style)
        quantized = sum(leaf.format is not None for leaf in self.leaves)
        footers = (
            f"{quantized} of {len(self.leaves)} quantized",
            f"{self.params:,} values",
            "",
            f"{self.bits:.2f}",
            f"{self.nbytes:,}",
            f"{self.nbytes / max(self.dense_nbytes, 1):.1%}",
        )
        for column, footer in zip(table.columns, footers, strict=True):
            column.footer = footer
        return table

    def __str__(self) -> str:
        console = Console(width=140)
        with console.capture() as capture:
            console.print(self)
        return capture.get().rstrip()

    __repr__ = __str__


#
# Planning
#


class _Leaf(NamedTuple):
    path: str
    value: Any
    parent: Any  # the module, list or dict that holds it


class _Decision(NamedTuple):
    leaf: _Leaf
    format: AbstractFormat | None
    axes: tuple[int, ...]
    reason: str


def _decide(tree: PyTree, format: Rules, where: Where | None, axis: Any) -> list[_Decision]:
    """One decision per leaf; or an error, before anything is quantized."""
    leaves = list(_named_leaves(tree))
    chosen = None if where is None else _selected(tree, where, leaves)
    choose = _chooser(format, leaves)
    decisions = []
    for n, leaf in enumerate(leaves):
        selected = chosen is not None and chosen[n]
        if chosen is not None and not selected:
            decisions.append(_Decision(leaf, None, (), _why_never(leaf.value) or "not selected by `where`"))
            continue
        refusal = _why_never(leaf.value) or (None if selected else _why_not(leaf))
        if selected and refusal is not None:
            raise TypeError(
                f"`where` must select floating point arrays. Got {leaf.path}: {refusal}. Select its weights alone."
            )
        picked, reason = (None, refusal) if refusal is not None else choose(leaf)
        if picked is None:
            decisions.append(_Decision(leaf, None, (), reason or "no format"))
            continue
        wanted = _default_axis(leaf) if axis is None else axis
        _, axes = check_quantizable(_struct(leaf.value), wanted, leaf.path)
        decisions.append(_Decision(leaf, picked, axes, reason or ""))
    if not any(d.format is not None for d in decisions):
        raise ValueError(_nothing_message(decisions))
    return decisions


def _chooser(format: Rules, leaves: Sequence[_Leaf]) -> Callable[[_Leaf], tuple[AbstractFormat | None, str]]:
    """A function from an eligible leaf to its format, or to `None` and the reason."""
    if isinstance(format, Mapping):
        rules = [(pattern, None if f is None else as_format(f)) for pattern, f in format.items()]
        for pattern, _ in rules:
            matched = [leaf for leaf in leaves if _matches(pattern, leaf.path)]
            if not matched:
                raise ValueError(
                    f"Each pattern must match a leaf. Got {_show(pattern)!r}, which matches none of: "
                    f"{_some(leaf.path for leaf in leaves)}."
                )

        def by_pattern(leaf: _Leaf) -> tuple[AbstractFormat | None, str]:
            for pattern, picked in rules:
                if _matches(pattern, leaf.path):
                    return picked, f"rule {_show(pattern)!r}"
            return None, "no rule matches"

        return by_pattern
    if callable(format) and not isinstance(format, (AbstractFormat, str, type)):

        def by_function(leaf: _Leaf) -> tuple[AbstractFormat | None, str]:
            picked = format(leaf.path, leaf.value)
            if picked is None:
                return None, "the format function returned None"
            try:
                return as_format(picked), "the format function"
            except (TypeError, ValueError) as e:
                raise type(e)(f"{leaf.path}: {e}") from None

        return by_function
    one = as_format(format)  # pyright: ignore[reportArgumentType]
    return lambda leaf: (one, "a weight")


def _matches(pattern: Pattern, path: str) -> bool:
    if isinstance(pattern, re.Pattern):
        return pattern.search(path) is not None
    return fnmatch.fnmatchcase(path, pattern)


def _show(pattern: Pattern) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


def _why_never(x: Any) -> str | None:
    """Why a leaf cannot be quantized, whatever the rules say, or `None`."""
    if is_quantized(x):
        return f"already quantized, to {x.format!r}"
    dtype = getattr(x, "dtype", None)
    if not isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) or dtype is None:
        return "not an array"
    if not jnp.issubdtype(dtype, jnp.floating):
        return "not floating point"
    return "a scalar" if x.ndim == 0 else None


def _why_not(leaf: _Leaf) -> str | None:
    """Why a leaf is left alone by default, or `None` for a weight."""
    if _is_norm(leaf.parent):
        return "a parameter of a normalisation layer"
    if leaf.path.rpartition(".")[2].startswith("bias"):
        return "a bias"  # whatever its shape: those of stacked layers have two dimensions
    if sum(length > 1 for length in leaf.value.shape) < 2:
        return "fewer than two dimensions longer than one"
    return None


def _is_norm(module: Any) -> bool:
    # Equinox's, and anybody's own: but not the wrappers, whose names end the same and which hold real weights.
    if isinstance(module, (eqx.nn.SpectralNorm, eqx.nn.WeightNorm)):
        return False
    return isinstance(module, eqx.Module) and type(module).__name__.endswith("Norm")


def _default_axis(leaf: _Leaf) -> int | tuple[int, ...]:
    """The input axis of a weight: all but the first axis of a convolution's, the last of any other."""
    if isinstance(leaf.parent, (eqx.nn.Conv, eqx.nn.ConvTranspose)):
        return tuple(range(-leaf.parent.num_spatial_dims - 1, 0))
    return -1


def _named_leaves(tree: PyTree) -> Iterator[_Leaf]:
    flat, _ = jtu.tree_flatten_with_path(tree, is_leaf=is_quantized)
    for path, value in flat:
        name = jtu.keystr(path, simple=True, separator=".") or "the array"
        yield _Leaf(name, value, _follow(tree, path[:-1]))


def _follow(tree: PyTree, path: Sequence[Any]) -> Any:
    """The node at `path`, or `None` where a custom node has no such thing as a name for its children."""
    for key in path:
        if isinstance(key, jtu.GetAttrKey):
            tree = getattr(tree, key.name, None)
        elif isinstance(key, jtu.SequenceKey):
            tree = tree[key.idx]
        elif isinstance(key, jtu.DictKey):
            tree = tree[key.key]
        else:
            return None
    return tree


def _selected(tree: PyTree, where: Where, leaves: Sequence[_Leaf]) -> list[bool]:
    """For each leaf, whether `where` selects it or a node above it."""
    structure = jtu.tree_structure(tree, is_leaf=is_quantized)
    unmarked = jtu.tree_unflatten(structure, [False] * len(leaves))
    mark = lambda node: jtu.tree_map(lambda _: True, node)
    try:
        marked = eqx.tree_at(where, unmarked, replace_fn=mark)
    except Exception as e:
        raise ValueError(
            "`where` must return leaves or nodes of the tree that it is given, as for `eqx.tree_at`. Got "
            f"{type(e).__name__}: {e}"
        ) from e
    return jtu.tree_leaves(marked)


def _struct(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))


def _nothing_message(decisions: Sequence[_Decision]) -> str:
    arrays = [d for d in decisions if d.reason != "not an array"]
    quantized = [d for d in arrays if is_quantized(d.leaf.value)]
    reasons = _some(f"{d.leaf.path}: {d.reason}" for d in arrays)
    if quantized:
        return (
            "The tree must hold something to quantize. Got one that is already quantized, with no other weights in "
            f"float ({reasons}). To quantize it anew, call `dequantize_tree` first."
        )
    return (
        f"The tree must hold something to quantize. Got none among its {len(arrays)} arrays ({reasons or 'none'}). "
        "`plan_tree` shows each; `where=` selects leaves that are left alone by default."
    )


def _some(items: Any) -> str:
    items = list(items)
    return ", ".join(items[:10]) + (f", and {len(items) - 10} more" if len(items) > 10 else "")


#
# What users call
#


_SHARED_ARGUMENTS = """
    - `tree`: any pytree: an Equinox model, a dictionary of parameters, one array.
    - `format`: what to quantize to. One format or its lower-case name for every weight; or a mapping
        `{pattern: format or None}`, where the first pattern that matches the leaf's path wins and `None` leaves the
        leaf in float; or a function `(path, leaf) -> format or None`. A path reads `layers.0.weight`; a pattern is a
        glob (`"*.attention.*"`) or a compiled regular expression, which is searched for. A leaf that no pattern
        matches stays in float.
    - `where`: selects leaves or whole nodes, as in `equinox.tree_at`; only these are quantized, and all of them, biases
        too. Without it, every floating point array with two or more dimensions longer than one is a weight, except
        biases and the parameters of normalisation layers.
    - `axis`: the axis (or axes, quantized as one) along which blocks run, for every selected leaf. By default all input
        axes of a convolution, and the last axis of everything else, which is the input axis of every Equinox layer;
        `-2` suits weights that are used as `x @ w`.
    - `dtype`: the dtype that the leaves dequantize to. Their own unless given.
"""


def quantize_tree(
    tree: PyTree,
    format: Rules = "nf4",
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
    key: PRNGKeyArray | None = None,
    progress: bool = False,
) -> PyTree:
    """Quantizes the weights of a model, which stays the same model otherwise.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, eqq.NF4())
        model = eqq.quantize_tree(model, {"layers.0.*": None, "*": "int4"})
        model = eqq.quantize_tree(model, "int8", where=lambda m: m.layers[1].weight)
        ```

    **Arguments:**

    {shared}
    - `key`: rounds stochastically.
    - `progress`: shows a progress bar.

    **Returns:**

    A tree of the same classes, in which each weight is a [`eqquant.QuantizedArray`][]. One array that stands in several
    places of the tree still does. Weights are quantized one at a time, so the memory needed at the peak is that of the
    result and of one more leaf. If anything is wrong with any leaf, an error names it and nothing is quantized.

    **Raises:**

    `ValueError` if nothing is selected, if a pattern matches nothing, for an unknown format name, an axis out of range,
    or values that are not finite; `TypeError` if `where` selects something that is not a floating point array.
    """
    check_dtype(dtype)
    decisions = _decide(tree, format, where, axis)
    work = [n for n, d in enumerate(decisions) if d.format is not None]
    values = [d.leaf.value for d in decisions]
    keys = dict(zip(work, [None] * len(work) if key is None else jr.split(key, max(len(work), 1)), strict=True))
    done: dict[Any, QuantizedArray] = {}  # one array in two places stays one
    for n in track(work, "Quantizing") if progress else work:
        leaf, picked, axes, _ = decisions[n]
        same = (id(leaf.value), picked, axes)
        if same not in done:
            done[same] = _quantize_leaf(leaf, picked, axes, dtype, keys[n])  # pyright: ignore[reportArgumentType]
        values[n] = done[same]
    return jtu.tree_unflatten(jtu.tree_structure(tree, is_leaf=is_quantized), values)


def _quantize_leaf(
    leaf: _Leaf, format: AbstractFormat, axes: tuple[int, ...], dtype: DTypeLike | None, key: Any
) -> QuantizedArray:
    if isinstance(leaf.value, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda x: encode_array(x, format, axes, dtype, key), leaf.value)
    x = jnp.asarray(leaf.value)
    if not isinstance(x, jax.core.Tracer) and not all_finite(x):
        raise ValueError(not_finite_message(leaf.path))
    q = encode_array(x, format, axes, dtype, key)
    # Leaf by leaf: waiting keeps the temporaries of one leaf from overlapping those of the next.
    return jax.block_until_ready(q)


def plan_tree(
    tree: PyTree,
    format: Rules = "nf4",
    *,
    where: Where | None = None,
    axis: int | Sequence[int] | None = None,
    dtype: DTypeLike | None = None,
) -> TreeReport:
    """What [`eqquant.quantize_tree`][] would do with the same arguments: a dry run, which computes nothing.

    !!! Example

        ```python
        print(eqq.plan_tree(model, "int4"))
        ```

    **Arguments:**

    {shared}
    **Returns:**

    A report with a row for each array of the tree: format, bytes, bits per value, or the reason why it is left alone.
    It prints as a table and has `.to_dict()`. The leaves may be `jax.ShapeDtypeStruct`s.

    **Raises:**

    The errors of [`eqquant.quantize_tree`][], except for values that are not finite.
    """
    rows = []
    for leaf, picked, axes, reason in _decide(tree, format, where, axis):
        if picked is None:
            rows.extend(_row(leaf, reason))
            continue
        x = _struct(leaf.value)
        q = jax.eval_shape(lambda x, f=picked, a=axes: encode_array(x, f, a, dtype, None), x)
        rows.append(_quantized_row(leaf.path, q, reason, math.prod(x.shape) * x.dtype.itemsize))
    return TreeReport(tuple(rows))


for _function in (quantize_tree, plan_tree):
    _function.__doc__ = (_function.__doc__ or "").replace("{shared}", _SHARED_ARGUMENTS.strip())


def summary(tree: PyTree) -> TreeReport:
    """What a tree holds: what is quantized, and to what; what is not, and why; bytes, and bits per value.

    !!! Example

        ```python
        print(eqq.summary(model))
        ```

    **Arguments:**

    - `tree`: any pytree.

    **Returns:**

    A report with a row for each array. It prints as a table and has `.to_dict()`.
    """
    rows = []
    for leaf in _named_leaves(tree):
        if is_quantized(leaf.value):
            rows.append(_quantized_row(leaf.path, leaf.value, "quantized", leaf.value.size * leaf.value.dtype.itemsize))
        else:
            rows.extend(_row(leaf, _why_never(leaf.value) or _why_not(leaf) or "left in float"))
    return TreeReport(tuple(rows))


def _row(leaf: _Leaf, reason: str) -> list[LeafReport]:
    x = leaf.value
    if is_quantized(x):
        return [_quantized_row(leaf.path, x, reason, x.size * x.dtype.itemsize)]
    if not isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return []
    nbytes = _array_nbytes(x)
    return [LeafReport(leaf.path, tuple(x.shape), str(x.dtype), None, None, reason, nbytes, nbytes)]


def _quantized_row(path: str, q: QuantizedArray, reason: str, dense_nbytes: int) -> LeafReport:
    return LeafReport(path, q.shape, str(q.dtype), q.format, q.axis, reason, q.nbytes, dense_nbytes)


def dequantize_tree(tree: PyTree, dtype: DTypeLike | None = None) -> PyTree:
    """Turns every quantized array of a tree back into a dense one. The inverse of [`eqquant.quantize_tree`][], up to
    rounding.

    **Arguments:**

    - `tree`: any pytree.
    - `dtype`: the dtype of the dense arrays; their logical dtype unless given.

    **Returns:**

    The tree, with `jax.Array`s in the place of quantized arrays.
    """

    def dense(x: Any) -> Any:
        if not is_quantized(x):
            return x
        x = x.dequantize()
        return x if dtype is None else x.astype(dtype)

    return jtu.tree_map(dense, tree, is_leaf=is_quantized)


def tree_nbytes(tree: PyTree) -> int:
    """The bytes that the arrays of a tree take. Packed codes count as what they are; an array that stands in several
    places counts once.

    **Arguments:**

    - `tree`: any pytree, quantized or not.

    **Returns:**

    A number of bytes.
    """
    leaves = {id(x): x for x in jtu.tree_leaves(tree) if isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct))}
    return sum(_array_nbytes(x) for x in leaves.values())


def _array_nbytes(x: Any) -> int:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):  # PRNG keys
        return x.nbytes if isinstance(x, jax.Array) else 0
    bits = jnp.iinfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.integer) else 8 * x.dtype.itemsize
    return math.ceil(math.prod(x.shape) * bits / 8)


def count_params(tree: PyTree) -> int:
    """How many floating point parameters a tree has. A quantized array counts its logical size.

    **Arguments:**

    - `tree`: any pytree, quantized or not.

    **Returns:**

    The number of values in its floating point and quantized arrays. An array that stands in several places counts once.
    """
    seen: dict[int, int] = {}
    for x in jtu.tree_leaves(tree, is_leaf=is_quantized):
        if is_quantized(x):
            seen[id(x.codes)] = x.size
        elif _why_never(x) in (None, "a scalar"):
            seen[id(x)] = math.prod(x.shape)
    return sum(seen.values())
