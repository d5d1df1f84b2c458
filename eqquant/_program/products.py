"""Products of weights in a traced program, of any primitive: rows of inputs, by layer."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jaxtyping import Array, Bool, Int32, Shaped

from .views import Concatenated, Digit, Digits, find_inputs, Inputs, View


class LayerInputs(NamedTuple):
    """The inputs of a product, by layer of a stack.

    - `rows`: one input vector per row.
    - `layer`: the index of the layer in the stack.
    - `row_mask`: which rows reach the layer; `None` if all do.
    """

    rows: Shaped[Array, "*batch rows features"]
    layer: Int32[Array, "*batch"]
    row_mask: Bool[Array, "*batch rows"] | None


class Product(NamedTuple):
    """A product of a weight.

    - `view`: the part of the weight that is multiplied.
    - `inputs`: the axes of the weight along which it sums.
    - `x`: the other operand, unchanged.
    - `rows`: `x` as rows, with the features in the order of the weight.
    - `batch`: the digits along each batch axis of both operands.
    - `row_mask`: which rows each entry of the first batch axis sees, if not all; then `rows` has no batch axis.
    """

    view: View
    inputs: Inputs
    x: Array
    rows: Shaped[Array, "*batch rows features"]
    batch: tuple[Digits, ...]
    row_mask: Bool[Array, "group rows"] | None = None

    def stack_axes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the axes of the weight that are a stack of layers, each with its own inputs.

        These are the first of the axes that are not summed over.
        """
        others = [axis for axis in range(len(shape)) if axis not in self.inputs.axes]
        batch = [digit for digits in self.batch for digit in digits or ()]
        separate = {axis for axis in others if math.prod(d.length for d in batch if d.axis == axis) == shape[axis]}
        chosen = [*self.view.fixed, *(d for digits in self.view.axes for d in digits or () if d.is_traced)]
        separate |= {digit.axis for digit in chosen if digit.axis in others[:-1]}
        return tuple(others[: max(map(others.index, separate), default=-1) + 1])

    def split_by_layer(self, stack: Sequence[int], shape: Sequence[int]) -> LayerInputs | None:
        """Returns the inputs by layer of a stack; `None` if the layer of an input is unknown."""
        kept = [n for n, digits in enumerate(self.batch) if any(d.axis in stack for d in digits or ())]
        pooled = [n for n in range(len(self.batch)) if n not in kept]
        rows, row_mask = self.rows, self.row_mask
        if row_mask is None:
            rows = jnp.transpose(rows, (*kept, *pooled, len(self.batch), len(self.batch) + 1))
            rows = rows.reshape(*rows.shape[: len(kept)], -1, rows.shape[-1])
        sizes = [len(self.row_mask)] if self.row_mask is not None else list(rows.shape[: len(kept)])
        # Layers that are not along a batch axis get all rows.
        given = {digit.axis for n in kept for digit in self.batch[n] or ()} | {d.axis for d in self.view.fixed}
        free = [
            digits
            for digits in self.view.axes
            if digits and digits[0].axis in stack and digits[0].axis not in given and digits[0].is_traced
        ]
        given |= {digit.axis for digits in free for digit in digits}
        free += [(Digit(axis, shape[axis]),) for axis in stack if axis not in given]
        axes = [*free, *(self.batch[n] for n in kept)]
        lengths = [math.prod(d.size for d in digits) for digits in free] + sizes
        layer = jnp.zeros(lengths, jnp.int32)
        for axis in stack:
            at = _index_along(axis, axes, self.view.fixed, shape[axis])
            if at is None:
                return None
            layer = layer * shape[axis] + at
        rows = jnp.broadcast_to(rows, (*(lengths if row_mask is None else lengths[: len(free)]), *rows.shape[-2:]))
        return LayerInputs(rows, layer, row_mask)


def _index_along(axis: int, axes: Sequence[Digits], fixed: Sequence[Digit], length: int) -> Any:
    """Returns the index along one axis of the weight for each entry of an array, by digits."""
    covered, total = 1, jnp.zeros([1] * len(axes), jnp.int32)
    for digit in fixed:
        if digit.axis == axis:
            if digit.at is None:
                return None
            covered, total = covered * digit.length, total + jnp.asarray(digit.at, jnp.int32) * digit.stride
    for n, digits in enumerate(axes):
        inner = 1
        for digit in reversed(digits or ()):
            if digit.axis == axis:
                position = np.arange(math.prod(d.size for d in digits or ())) // inner % digit.size
                values = jnp.asarray(digit.values, jnp.int32)[position] * digit.stride
                covered *= digit.length
                total += values.reshape([-1 if m == n else 1 for m in range(len(axes))])
            inner *= digit.size
    return total if covered == length else None


def arrange(
    equation: JaxprEqn,
    values: Sequence[Array],
    n: int,
    weight: View | Concatenated,
    shapes: Sequence[tuple[int, ...]],
) -> list[Product]:
    """Returns the products that a primitive computes with operand `n`.

    An empty list if the inputs are unknown. Each weight in a concatenated operand has its own product.
    """
    arranged = _ARRANGE[equation.primitive.name](equation.params, values, n)
    if arranged is None:
        return []
    rows, contracted, batch, row_mask = arranged
    products, start = [], 0
    parts = weight.parts if isinstance(weight, Concatenated) else ((weight, 0),)
    for view, length in parts:
        own = rows
        if isinstance(weight, Concatenated) and weight.axis in contracted:
            axis = rows.ndim - len(contracted) + list(contracted).index(weight.axis)
            own = jax.lax.slice_in_dim(rows, start, start + length, axis=axis)
        start += length
        if view is None or (isinstance(weight, Concatenated) and weight.axis in batch):
            continue
        inputs = find_inputs(view, contracted, own.shape[own.ndim - len(contracted) :], shapes[view.weight])
        if inputs is not None:
            own = _order_features(own.reshape(*own.shape[: own.ndim - len(contracted)], -1), inputs)
            digits = tuple(view.axes[axis] for axis in batch)
            products += [Product(term, inputs, values[1 - n], own, digits, row_mask) for term in view.terms]
    return products


def _order_features(rows: Shaped[Array, "*batch rows summed"], inputs: Inputs) -> Shaped[Array, "*batch rows features"]:
    """Returns rows with features in the order of the weight; zero for features not used."""
    features = inputs.features.ravel()
    if np.array_equal(features, np.arange(inputs.total)):
        return rows
    return jnp.zeros((*rows.shape[:-1], inputs.total), rows.dtype).at[..., features].set(rows)


# Rows with one axis per contracted axis; the contracted axes and the batch axes of the weight; and the mask of the rows
# for each entry of the batch, or `None`.
Arranged = tuple[Array, Sequence[int], Sequence[int], Array | None]


def _arrange_dot(params: dict[str, Any], values: Sequence[Array], n: int) -> Arranged:
    contracted, batch = params["dimension_numbers"]
    x, x_index = values[1 - n], 1 - n
    free = [axis for axis in range(x.ndim) if axis not in (*contracted[x_index], *batch[x_index])]
    rows = jnp.transpose(x, (*batch[x_index], *free, *contracted[x_index]))
    lengths = lambda axes: [x.shape[axis] for axis in axes]
    m = math.prod(lengths(free))
    return rows.reshape(*lengths(batch[x_index]), m, *lengths(contracted[x_index])), contracted[n], batch[n], None


def _arrange_convolution(params: dict[str, Any], values: Sequence[Array], n: int) -> Arranged | None:
    """Arranges the patch under each position of the kernel as a row. All groups share the rows."""
    if n != 1 or params["batch_group_count"] != 1:
        return None
    dnums, groups = params["dimension_numbers"], params["feature_group_count"]
    x, inputs = values[0], [values[1].shape[axis] for axis in dnums.rhs_spec[1:]]
    features = math.prod(inputs)
    # One-hot kernels extract patches, with the strides, padding and dilation of the program.
    kernel = jnp.eye(features, dtype=x.dtype).reshape(features, *inputs)
    kernel = jnp.moveaxis(jnp.tile(kernel, (groups, *[1] * len(inputs))), range(kernel.ndim), dnums.rhs_spec)
    exact = {**params, "precision": (jax.lax.Precision.HIGHEST,) * 2, "preferred_element_type": None}
    patches = jnp.moveaxis(jax.lax.conv_general_dilated_p.bind(x, kernel, **exact), dnums.out_spec[1], 0)
    rows = jnp.swapaxes(patches.reshape(groups, features, -1), -1, -2)
    return rows.reshape(-1, *inputs), dnums.rhs_spec[1:], (), None


def _arrange_ragged(params: dict[str, Any], values: Sequence[Array], n: int) -> Arranged | None:
    """Arranges the rows, with the mask of the rows of each group."""
    dnums = params["ragged_dot_dimension_numbers"]
    contracted, batch = dnums.dot_dimension_numbers
    groups = list(dnums.rhs_group_dimensions)
    x, sizes = values[0], values[2]
    plain = n == 1 and not batch[0] and len(groups) == 1 and x.ndim == 1 + len(contracted[0]) and sizes.ndim == 1
    if not plain:
        return None
    stops = jnp.cumsum(sizes)[:, None]
    row = jnp.arange(x.shape[dnums.lhs_ragged_dimensions[0]])[None]
    row_mask = (row < stops) & (row >= stops - sizes[:, None])
    return jnp.transpose(x, (*dnums.lhs_ragged_dimensions, *contracted[0])), contracted[1], groups, row_mask


_ARRANGE = {
    "dot_general": _arrange_dot,
    "conv_general_dilated": _arrange_convolution,
    "ragged_dot_general": _arrange_ragged,
}
