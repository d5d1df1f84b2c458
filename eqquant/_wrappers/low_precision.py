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
from .._array.contraction import AbstractOperand, as_floats, as_matrices, Constraints, MatrixAxes, Options
from .._array.moves import Axes
from .._array.straight_through import value_of
from .._array.value import AbstractArrayValue, as_permutation
from .._formats import NVFP4
from .._formats.base import AbstractFormat, check_no_tiles
from .._formats.names import as_format
from .._matmul.rounded import bind_rounded_matmul, GRADIENT_AMAX, Rounding, W_AMAX, X_AMAX
from .._types import PyTree
from .base import AbstractMatmulOverride, check_field


class LowPrecisionArray(AbstractMatmulOverride):
    r"""A float weight whose products are computed in low precision, forward and backward.

    [`eqquant.low_precision_training`][] makes it. It trains like the float array that it holds, which the
    optimizer changes. Each of the three products of a layer rounds both operands, along the axis that it sums over, and
    multiplies codes by codes:

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
    - `amax`: with [delayed scaling][eqquant.delayed_scaling], the amax of $x$, $W$ and $\mathrm d y$ that scales
        follow from: floats `(*stack, 3)`, zeros at first.
    """

    array: PyTree
    forward: AbstractFormat
    gradient: AbstractFormat
    stochastic: bool = eqx.field(static=True)
    amax: Float[Array, "*stack 3"] | None

    def __init__(
        self,
        array: PyTree,
        forward: AbstractFormat | str,
        gradient: AbstractFormat | str,
        stochastic: bool = True,
        amax: Float[Array, "*stack 3"] | None = None,
    ) -> None:
        self.array = array
        self.forward = check_no_tiles(as_format(forward, "forward"), "forward")
        self.gradient = check_no_tiles(as_format(gradient, "gradient"), "gradient")
        self.stochastic = stochastic
        self.amax = amax

    @property
    def weight_format(self) -> AbstractFormat:
        """The format of the weight: `forward`, or for NVFP4 tiles.

        So both products of a weight see the same values.
        """
        return NVFP4((16, 16)) if isinstance(self.forward, NVFP4) else self.forward

    @property
    def products(self) -> str:
        """What its products do, for reports."""
        delayed = "" if self.amax is None else ", by delayed scales"
        same = self.weight_format == self.forward
        forward = f"both operands to {self.forward!r}" if same else f"inputs to {self.forward!r}, the weight in tiles"
        return f"round {forward}, and gradients to {self.gradient!r}{delayed}"

    def transpose(self, *axes: int | Sequence[int] | None) -> Array | AbstractArrayValue:
        """Permutes the logical axes of the weight."""
        self._check_amax()
        order = as_permutation(axes, self.ndim)
        out = self._rewrap(self.array.transpose(order))
        return out if order[: self.ndim - 2] == list(range(self.ndim - 2)) else out._share_amax()  # pyright: ignore[reportAttributeAccessIssue]

    def reshape(self, *shape: int | Sequence[int], **kwargs: Any) -> Array | AbstractArrayValue:
        """Reshapes the weight."""
        return self._rewrap(self.array.reshape(*shape, **kwargs))._share_amax()  # pyright: ignore[reportAttributeAccessIssue]

    def _rewrap(self, array: PyTree) -> Array | AbstractArrayValue:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        return dataclasses.replace(self, array=array)

    def _check_amax(self) -> None:
        if self.amax is not None:
            stack = self.shape[: min(self.amax.ndim - 1, self.ndim - 2)]
            check_field(self, "amax", self.amax, ((*stack, 3),), jnp.floating)

    def _share_amax(self) -> "LowPrecisionArray":
        """Returns the array with one delayed scale for all arrays of a stack."""
        if self.amax is None or self.amax.ndim == 1:
            return self
        amax = self.amax.reshape(-1, 3)
        # The gradient of `amax` carries the current amax of each array of the stack.
        shared = value_of(jnp.max(amax, axis=0), gradient_of=jnp.sum(amax, axis=0))
        return dataclasses.replace(self, amax=shared)

    @property
    def constraints(self) -> Constraints:
        """For products: a stack whose arrays have amax values of their own stays one."""
        return Constraints(None, 0 if self.amax is None else self.amax.ndim - 1)

    def as_matrices(self, axes: MatrixAxes) -> "LowPrecisionArray":
        """For products: the weight as matrices."""
        self._check_amax()
        out = self if len(axes.front) == self.constraints.stack else self._share_amax()
        if out.amax is not None and out.amax.ndim > 1:
            out = dataclasses.replace(out, amax=out.amax.reshape(*axes.shape(self.shape)[:-2], 3))
        return dataclasses.replace(out, array=as_matrices(self.dequantize(), axes))

    def linear(self, x: Array | AbstractOperand, options: Options) -> Float[Array, "*batch m n"]:
        """For products: rounds both operands along the sum, and later the gradient of the result."""
        delayed = self.amax is not None
        rounding = lambda format, place, stochastic=False: Rounding(format, stochastic, place if delayed else None)
        x, w = as_floats(x), self.array
        x, w = _compat.vary_alike((x, w.astype(x.dtype)))
        return bind_rounded_matmul(
            x,
            w,
            self.amax.astype(jnp.float32) if self.amax is not None else None,
            x_rounding=rounding(self.forward, X_AMAX),
            w_rounding=rounding(self.weight_format, W_AMAX),
            gradient_rounding=rounding(self.gradient, GRADIENT_AMAX, self.stochastic)._replace(
                rotates=isinstance(self.gradient, NVFP4)
            ),
            precision=options.precision,
            implementation=options.implementation,
        )

    def leaf_axes(self, leaf: Array) -> Axes:
        return (*range(leaf.ndim - 1), None)  # `amax` holds three values for each array of a stack

    def __pdoc__(self, **kwargs: object) -> wl.AbstractDoc:
        rounding = ", rounded to nearest" * (not self.stochastic)
        delayed = ", delayed scales" * (self.amax is not None)
        formats = f"{self.forward!r}, gradient={self.gradient!r}"
        return wl.TextDoc(f"LowPrecisionArray({wl.pformat(self.array)}, {formats}{rounding}{delayed})")


def map_amax(function: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """Applies a function to every `amax` of delayed scaling in a tree."""

    def map_leaf(x: PyTree) -> PyTree:
        if not isinstance(x, LowPrecisionArray) or x.amax is None:
            return x
        return eqx.tree_at(lambda w: w.amax, x, function(x.amax))  # `function` may return no array

    return jtu.tree_map(map_leaf, tree, is_leaf=lambda x: isinstance(x, LowPrecisionArray))
