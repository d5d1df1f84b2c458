"""`take_layer`: layers and experts of a stack, whose weights products read where they lie."""

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
from .._array.contraction import AbstractOperand, Constraints, Matrices, Options
from .._array.primitive import bind_matmul
from .._array.value import AbstractArrayValue, as_permutation, Index
from .._formats.base import AbstractFormat
from .._numerics.axes import as_axes
from .._types import PyTree


class SelectedArray(AbstractArrayValue):
    """`stack[index]`, where products on CPU read the stack. [`eqquant.take_layer`][] makes it.

    Behaves as the quantized array `taken()`. With a native kernel `q @ x` and `x @ q` copy nothing; everything else
    takes the selected arrays out of the stack first.

    **Arguments:**

    - `stack`: arrays stacked along a first axis.
    - `index`: integers of any shape, at least 0 and below the length of the stack.
    """

    quantized_as = "taken()"

    stack: QuantizedArray
    index: Int32[Array, "..."]
    # `vmap` over a selection would map over the stack instead of the index; this shows it.
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

    def taken(self) -> QuantizedArray:
        """Returns a copy of the selected arrays."""
        return jtu.tree_map(lambda leaf: leaf[self.index], self.stack)

    def dequantize(self) -> Float[Array, "..."]:
        return self.taken().dequantize()

    def transpose(self, *axes: int | Sequence[int] | None) -> "SelectedArray | QuantizedArray":
        """Permutes the logical axes. Copies what is selected if that moves the axes of the index."""
        order, front = as_permutation(axes, self.ndim), self.index.ndim
        if order[:front] != list(range(front)):
            return self.taken().transpose(order)
        return dataclasses.replace(self, stack=self.stack.transpose((0, *(axis - front + 1 for axis in order[front:]))))

    def astype(self, dtype: DTypeLike) -> "SelectedArray | Array":
        """Changes the logical dtype. Returns a dense array if `dtype` is not floating point."""
        if not jnp.issubdtype(dtype, jnp.floating):
            return self.dequantize().astype(dtype)
        return dataclasses.replace(self, stack=self.stack.astype(dtype))

    def reshape(self, *shape: int | Sequence[int], **kwargs: Any) -> "QuantizedArray | Array":
        """Copies what is selected, and reshapes the copy."""
        return self.taken().reshape(*shape, **kwargs)

    def __getitem__(self, index: Index) -> Array:
        """Returns dense values at an index."""
        return self.taken()[index]

    @property
    def constraints(self) -> Constraints:
        """For products: the axes of the index stay, and the quantized axes stay whole."""
        memory = tuple(axis % self.ndim for axis in as_axes(self.stack.axis))
        return Constraints(memory, self.index.ndim if self.ndim == self.index.ndim + 2 else 0)

    def as_matrices(self, axes: Matrices) -> "SelectedArray | QuantizedArray":
        """For products: the stack with matrices that lie in memory by rows, or a copy of the selected arrays."""
        front = axes.shape(self.shape)[:-2]
        if self.ndim != self.index.ndim + 2 or any(axis >= self.index.ndim for axis in axes.front):
            return self.taken().as_matrices(axes)
        along = axes.columns == self.constraints.memory
        stack = dataclasses.replace(self.stack, axis=-1 if along else -2)
        return dataclasses.replace(self, stack=stack, index=self.index.reshape(front))

    def linear(self, x: Array | AbstractOperand, options: Options) -> Float[Array, "*batch m n"]:
        """For products: `x . self^T` of matrices, by the primitive, which reads the stack where it lies."""
        w = dataclasses.replace(self, stack=dataclasses.replace(self.stack, axis=-1))
        return bind_matmul(x, w, options, transpose=self.stack.axis == -2)

    def with_dense_weight(self) -> None:
        """For products: dense ones are plain."""

    def __pdoc__(self, **kwargs: object) -> wl.AbstractDoc:
        return wl.TextDoc(f"SelectedArray({wl.pformat(self.stack)}, index={list(self.index.shape)})")


def take_layer(tree: PyTree, index: ArrayLike) -> PyTree:
    """Selects a layer of stacked layers, or experts of many, without a copy of their quantized weights.

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

    To train stacked layers, `scan` over the layers themselves. In a `scan` over numbers, each step adds gradients of
    the size of the whole stack.

    **Arguments:**

    - `tree`: a module, or any PyTree, whose arrays all have a first axis for the layers. What is no array is kept.
    - `index`: an integer, or an array of integers of any shape, traced or not. Negative ones count from the end. A
        traced one that is out of bounds takes the nearest, as in JAX.

    **Returns:**

    The same tree. Instead of a [`eqquant.QuantizedArray`][] it has an array that behaves like it and reads the stack;
    its `.taken()` is a copy. Inside a function that [`eqquant.filter_grad`][] differentiates, quantized arrays are
    copied, since gradients go to the arrays themselves.

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
        return _entry(leaf, index) if eqx.is_array(leaf) else leaf
    if leaf.ndim + min(as_axes(leaf.axis)) < 1:
        raise ValueError(
            f"`take_layer` needs a first axis, before the quantized one. Got an array of shape {leaf.shape}."
        )
    leaf = dataclasses.replace(leaf, logical_sharding=None)
    if leaf.gradient_of is not None:
        return jtu.tree_map(lambda a: _entry(a, index), leaf)
    return SelectedArray(leaf, _within(index, leaf.codes.shape[0]), leaf.ndim)


def _select_again(q: SelectedArray, index: Array | np.ndarray) -> SelectedArray:
    """Selects from what is selected. With one entry, its arrays become the entries: `(layers * experts, ...)`."""
    count = q.shape[0]
    if q.index.ndim > 0:
        return dataclasses.replace(q, index=_entry(q.index, index))
    if q.ndim + min(as_axes(q.stack.axis)) < 1:
        raise ValueError(f"`take_layer` needs a first axis, before the quantized one. Got an array of shape {q.shape}.")
    stack = jtu.tree_map(lambda a: a.reshape(-1, *a.shape[2:]), q.stack)
    return SelectedArray(stack, q.index * count + _within(index, count), stack.ndim)


def _entry(a: Array, index: Array | np.ndarray) -> Array:
    if a.ndim == 0:
        raise ValueError("`take_layer` needs arrays with a first axis. Got a scalar.")
    return jnp.asarray(a)[_within(index, a.shape[0])]


def _within(index: Array | np.ndarray, length: int) -> Int32[Array, "..."]:
    if not isinstance(index, jax.core.Tracer):
        known = np.asarray(index)
        outside = known[(known < -length) | (known >= length)]
        if outside.size:
            raise IndexError(
                f"`index` must be at least -{length} and below {length}, the length of the stack. Got "
                f"{outside.flat[0]}."
            )
    can = jnp.iinfo(index.dtype)  # bounds that its dtype cannot hold would wrap around
    index = jnp.clip(index, max(-length, int(can.min)), min(length - 1, int(can.max))).astype(jnp.int32)
    return jnp.where(index < 0, index + length, index)
