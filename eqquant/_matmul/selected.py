"""`take_layer`: layers or experts of a stack, whose weights products read in place."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import wadler_lindig as wl
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Int32

from .._array.array import is_quantized, QuantizedArray
from .._array.codes import check_leaves, spread_tiles, spread_tiles_along
from .._array.contraction import AbstractOperand, Constraints, MatrixAxes, Options
from .._array.moves import Move
from .._array.primitive import bind_matmul
from .._array.value import AbstractArrayValue, as_permutation, Index
from .._formats.base import AbstractFormat
from .._numerics.axes import as_axes
from .._types import PyTree


class SelectedArray(AbstractArrayValue):
    """A view of `stack[index]`, which products on CPU read without a copy.

    Behaves as the quantized array `gather()`. With a native kernel `q @ x` and `x @ q` copy nothing; everything else
    gathers the selected arrays first.

    **Arguments:**

    - `stack`: arrays stacked along a first axis.
    - `index`: integers of any shape, at least 0 and below the length of the stack.
    """

    quantized_as = "gather()"

    stack: QuantizedArray
    index: Int32[Array, "..."]
    # Detects a `vmap` over a selection, which would map over the stack instead of the index.
    stack_ndim: int = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        if self.stack.ndim != self.stack_ndim:
            raise ValueError(
                f"`vmap` and `scan` must map over the index of a selection, not over the selection. Got a stack of "
                f"{self.stack.ndim} dimensions instead of {self.stack_ndim}. Call `take_layer` inside the mapped "
                f"function."
            )
        return (*self.index.shape, *self.stack.shape[1:])

    @property
    def ndim(self) -> int:
        return self.index.ndim + self.stack_ndim - 1

    @property
    def dtype(self) -> np.dtype:
        return self.stack.dtype

    @property
    def format(self) -> AbstractFormat:
        """The format of the stack."""
        return self.stack.format

    def gather(self) -> QuantizedArray:
        """Returns a copy of the selected arrays."""
        check_leaves(self.stack)
        return jtu.tree_map(lambda leaf: leaf[self.index], self.stack)

    def dequantize(self) -> Float[Array, "..."]:
        return self.gather().dequantize()

    def transpose(self, *axes: int | Sequence[int] | None) -> "SelectedArray | QuantizedArray":
        """Permutes the logical axes. Gathers the selected arrays if that moves axes of the index."""
        order, front = as_permutation(axes, self.ndim), self.index.ndim
        if order[:front] != list(range(front)):
            return self.gather().transpose(order)
        return dataclasses.replace(self, stack=self.stack.transpose((0, *(axis - front + 1 for axis in order[front:]))))

    def astype(self, dtype: DTypeLike) -> "SelectedArray | Array":
        """Changes the logical dtype. Returns a dense array if `dtype` is not floating point."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return self.dequantize().astype(dtype)
        return dataclasses.replace(self, stack=self.stack.astype(dtype))

    def reshape(self, *shape: int | Sequence[int], **kwargs: Any) -> "QuantizedArray | Array":
        """Gathers the selected arrays, and reshapes the copy."""
        return self.gather().reshape(*shape, **kwargs)

    def __getitem__(self, index: Index) -> Array:
        """Returns dense values at an index."""
        return self.gather()[index]

    @property
    def constraints(self) -> Constraints:
        """For products: the axes of the index stay, and the quantized axes stay whole."""
        memory = tuple(axis % self.ndim for axis in as_axes(self.stack.axis))
        return Constraints(memory, self.index.ndim if self.ndim == self.index.ndim + 2 else 0)

    def as_matrices(self, axes: MatrixAxes) -> "SelectedArray | QuantizedArray":
        """For products: the selection as matrices of the stack, or else a gathered copy."""
        front = axes.shape(self.shape)[:-2]
        if self.ndim != self.index.ndim + 2 or any(axis >= self.index.ndim for axis in axes.front):
            return self.gather().as_matrices(axes)
        contracts_blocks = axes.columns == self.constraints.packed_axes
        stack = dataclasses.replace(self.stack, axis=-1 if contracts_blocks else -2)
        return dataclasses.replace(self, stack=stack, index=self.index.reshape(front))

    def linear(self, x: Array | AbstractOperand, options: Options) -> Float[Array, "*batch m n"]:
        """For products: `x . self^T` of matrices, by the primitive."""
        w = dataclasses.replace(self, stack=dataclasses.replace(spread_tiles(self.stack), axis=-1))
        return bind_matmul(x, w, options, transpose=self.stack.axis == -2)

    def move(self, spec: Move, *others: "SelectedArray") -> AbstractArrayValue:
        return self.gather().move(spec, *(other.gather() for other in others))

    def __pdoc__(self, **kwargs: object) -> wl.AbstractDoc:
        return wl.TextDoc(f"SelectedArray({wl.pformat(self.stack)}, index={list(self.index.shape)})")


def take_layer(tree: PyTree, index: ArrayLike) -> PyTree:
    """Selects a layer or experts from a stack, without copying quantized weights.

    The same as `jax.tree_util.tree_map(lambda a: a[index], tree)`, but a product with a weight of the result reads the
    stack where it lies, if a native kernel for CPU computes it. A `scan` over the stack itself copies the weights of
    each layer before it multiplies. On other platforms, and for everything but products, the weights of the selected
    layer are copied.

    !!! Example

        ```python
        @eqx.filter_jit
        def forward(layers, x):                          # layers: one module, made by `eqx.filter_vmap`
            step = lambda x, n: (jax.vmap(eqq.take_layer(layers, n))(x), None)
            return jax.lax.scan(step, x, jnp.arange(depth))[0]

        # Experts: each token has one of its own.
        y = jax.vmap(lambda n, x: eqq.take_layer(experts, n)(x))(chosen, tokens)
        ```

    To train stacked layers, `scan` over the layers themselves. In a `scan` over indices, each step adds gradients of
    the size of the whole stack.

    **Arguments:**

    - `tree`: a module, or any PyTree, whose arrays all have a first axis for the layers. Other leaves stay.
    - `index`: an integer, or an array of integers of any shape, traced or not. Negative ones count from the end. A
        traced one that is out of bounds takes the nearest, as in JAX.

    **Returns:**

    The same tree. Instead of a [`eqquant.QuantizedArray`][] it has an array that behaves like it and reads the stack;
    its `.gather()` is a copy. Inside a function that [`eqquant.filter_grad`][] differentiates, quantized arrays are
    copied, since gradients go to the arrays themselves; so are arrays in tiles.

    **Raises:**

    `TypeError` if the index is no integer, `IndexError` if it is known and out of bounds, and `ValueError` if an array
    has no axis to select from.
    """
    # Integers of Python and NumPy stay as they are: under `jit`, `jnp.asarray` would make their values unknown.
    index = index if isinstance(index, np.ndarray | jax.Array) else np.asarray(index)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"`index` must be integers. Got {index.dtype}.")
    is_leaf = lambda x: isinstance(x, (QuantizedArray, SelectedArray))
    return jtu.tree_map(lambda leaf: _select(leaf, index), tree, is_leaf=is_leaf)


def _select(leaf: PyTree, index: Array | np.ndarray) -> PyTree:
    if isinstance(leaf, SelectedArray):
        return _select_again(leaf, index)
    if not is_quantized(leaf):
        return _gather_entry(leaf, index) if eqx.is_array(leaf) else leaf
    if leaf.ndim + min(as_axes(leaf.axis)) < 1:
        raise ValueError(
            f"`take_layer` needs a first axis, before the quantized one. Got an array of shape {leaf.shape}."
        )
    leaf = dataclasses.replace(spread_tiles_along(leaf, 0), logical_sharding=None)
    if leaf.gradient_of is not None or isinstance(leaf.block_size, tuple):
        return jtu.tree_map(lambda a: _gather_entry(a, index), leaf)
    return SelectedArray(leaf, _normalize_index(index, leaf.codes.shape[0]), leaf.ndim)


def _select_again(q: SelectedArray, index: Array | np.ndarray) -> SelectedArray:
    """Selects from a selection. With a scalar one, the stack becomes `(layers * experts, ...)`."""
    count = q.shape[0]
    if q.index.ndim > 0:
        return dataclasses.replace(q, index=_gather_entry(q.index, index))
    if q.ndim + min(as_axes(q.stack.axis)) < 1:
        raise ValueError(f"`take_layer` needs a first axis, before the quantized one. Got an array of shape {q.shape}.")
    stack = jtu.tree_map(lambda a: a.reshape(-1, *a.shape[2:]), q.stack)
    return SelectedArray(stack, q.index * count + _normalize_index(index, count), stack.ndim)


def _gather_entry(a: Array, index: Array | np.ndarray) -> Array:
    if a.ndim == 0:
        raise ValueError("`take_layer` needs arrays with a first axis. Got a scalar.")
    return jnp.asarray(a)[_normalize_index(index, a.shape[0])]


def _normalize_index(index: Array | np.ndarray, length: int) -> Int32[Array, "..."]:
    if not isinstance(index, jax.core.Tracer):
        values = np.asarray(index)
        outside = values[(values < -length) | (values >= length)]
        if outside.size:
            raise IndexError(
                f"`index` must be at least -{length} and below {length}, the length of the stack. Got "
                f"{outside.flat[0]}."
            )
    limits = jnp.iinfo(index.dtype)  # bounds beyond them would wrap around
    index = jnp.clip(index, max(-length, int(limits.min)), min(length - 1, int(limits.max))).astype(jnp.int32)
    return jnp.where(index < 0, index + length, index)
