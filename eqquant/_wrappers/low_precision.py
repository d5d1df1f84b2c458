"""Weights whose products are computed in low precision, forward and backward."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
import wadler_lindig as wl
from jaxtyping import Array, Float

from .. import _compat
from .._array.contraction import AbstractOperand, as_floats, as_matrices, Constraints, Matrices, Options
from .._array.primitive import bind_rounded_matmul, GRADIENT_PLACE, Rounding, W_PLACE, X_PLACE
from .._array.straight_through import value_of
from .._array.value import AbstractArrayValue, as_permutation
from .._formats.base import AbstractFormat, as_format
from .._types import PyTree
from .base import AbstractWrappedArray


class LowPrecisionArray(AbstractWrappedArray):
    r"""A float weight whose products are computed in low precision, forward and backward.

    [`eqquant.low_precision_training`][] makes it. It trains like the float array that it holds: that is what the
    optimizer changes. Each of the three products of a layer rounds both operands, along the axis that it sums over, and
    multiplies codes with codes:

    $$y = x W^\top, \quad \mathrm d x = \mathrm d y\, W, \quad \mathrm d W = \mathrm d y^\top x$$

    Apart from products it behaves as the float array.

    !!! Example

        ```python
        w = LowPrecisionArray(w, "fp8", eqq.FP8("e5m2"))
        y = x @ w.T                                                  # both operands are rounded to e4m3
        dx = jax.grad(lambda x: jnp.sum(jnp.sin(x @ w.T)))(x)        # rounds the gradient of `y` to e5m2
        ```

    **Arguments:**

    - `array`: the weight, floats or another array of this library, which is dequantized first.
    - `forward`: the format of $x$ and $W$, or its lower-case name.
    - `gradient`: the format of $\mathrm d y$.
    - `stochastic`: whether $\mathrm d y$ is rounded at random, so that the mean is the value.
    - `largest`: with [delayed scaling][eqquant.delayed_scaling], the largest magnitudes of $x$, $W$ and
        $\mathrm d y$ that scales follow from: floats `(*stack, 3)`, zeros at first.
    """

    array: PyTree
    forward: AbstractFormat
    gradient: AbstractFormat
    stochastic: bool = eqx.field(static=True)
    largest: Float[Array, "*stack 3"] | None

    def __init__(
        self,
        array: PyTree,
        forward: AbstractFormat | str,
        gradient: AbstractFormat | str,
        stochastic: bool = True,
        largest: Float[Array, "*stack 3"] | None = None,
    ) -> None:
        self.array = array
        self.forward = as_format(forward, "forward")
        self.gradient = as_format(gradient, "gradient")
        self.stochastic = stochastic
        self.largest = largest

    def transpose(self, *axes: int | Sequence[int] | None) -> Array | AbstractArrayValue:
        """Permutes the logical axes of the weight."""
        order = as_permutation(axes, self.ndim)
        moved = self._around(self.array.transpose(order))
        return moved if order[: self.ndim - 2] == list(range(self.ndim - 2)) else moved._sharing()  # pyright: ignore[reportAttributeAccessIssue]

    def reshape(self, *shape: int | Sequence[int], **kwargs: Any) -> Array | AbstractArrayValue:
        """Reshapes the weight."""
        return self._around(self.array.reshape(*shape, **kwargs))._sharing()  # pyright: ignore[reportAttributeAccessIssue]

    def _around(self, array: PyTree) -> Array | AbstractArrayValue:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        return dataclasses.replace(self, array=array)

    def _sharing(self) -> "LowPrecisionArray":
        """Returns the array with one scale for all of a stack, if scales are delayed."""
        if self.largest is None or self.largest.ndim == 1:
            return self
        each = self.largest.reshape(-1, 3)
        # What the products see are magnitudes of each.
        one = value_of(jnp.max(each, axis=0), gradient_of=jnp.sum(each, axis=0))
        return dataclasses.replace(self, largest=one)

    @property
    def constraints(self) -> Constraints:
        """For products: a stack whose arrays have amax values of their own stays one."""
        return Constraints(None, 0 if self.largest is None else self.largest.ndim - 1)

    def as_matrices(self, axes: Matrices) -> "LowPrecisionArray":
        """For products: the weight as matrices."""
        out = self if len(axes.front) == self.constraints.stack else self._sharing()
        if out.largest is not None and out.largest.ndim > 1:
            out = dataclasses.replace(out, largest=out.largest.reshape(*axes.shape(self.shape)[:-2], 3))
        return dataclasses.replace(out, array=as_matrices(self.dequantize(), axes))

    def linear(self, x: Array | AbstractOperand, options: Options) -> Float[Array, "*batch m n"]:
        """For products: rounds both operands along the sum, and later the gradient of the result."""
        delayed = self.largest is not None
        rounding = lambda format, place, stochastic=False: Rounding(format, stochastic, place if delayed else None)
        x, w = as_floats(x), self.array
        x, w = _compat.vary_alike((x, w.astype(x.dtype)))
        return bind_rounded_matmul(
            x,
            w,
            self.largest.astype(jnp.float32) if self.largest is not None else None,
            x_rounding=rounding(self.forward, X_PLACE),
            w_rounding=rounding(self.forward, W_PLACE),
            gradient_rounding=rounding(self.gradient, GRADIENT_PLACE, self.stochastic),
            precision=options.precision,
            implementation=options.implementation,
        )

    def with_dense_weight(self) -> None:
        """For products: the weight is dense."""

    def __pdoc__(self, **kwargs: object) -> wl.AbstractDoc:
        rounding = ", rounded to nearest" * (not self.stochastic)
        delayed = ", delayed scales" * (self.largest is not None)
        formats = f"{self.forward!r}, gradient={self.gradient!r}"
        return wl.TextDoc(f"LowPrecisionArray({wl.pformat(self.array)}, {formats}{rounding}{delayed})")


def map_largest(function: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Applies a function to the largest magnitudes that scales follow from, wherever a tree has them."""

    def mapped(x: PyTree) -> PyTree:
        if not isinstance(x, LowPrecisionArray) or x.largest is None:
            return x
        return eqx.tree_at(lambda w: w.largest, x, function(x.largest))  # what takes their place may be no array

    return jtu.tree_map(mapped, tree, is_leaf=lambda x: isinstance(x, LowPrecisionArray))
