"""Weights whose products are computed in low precision, forward and backward."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import wadler_lindig as wl
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from .. import _compat
from .._formats.base import AbstractFormat, as_format
from .._mesh import as_spec, explicit_mesh, in_auto_mode, names_in
from .._types import PyTree
from .primitive import bind_rounded_matmul, OF_GRADIENT, OF_W, OF_X, Rounding
from .straight_through import value_of
from .value import as_permutation, multiply
from .wrapped import AbstractWrappedArray


class LowPrecisionArray(AbstractWrappedArray):
    r"""A float weight whose products are computed in low precision, forward and backward.

    [`eqquant.low_precision`][] makes it. It trains like the float array that it holds: that is what the optimizer
    changes. Each of the three products of a layer rounds both operands, along the axis that it sums over, and
    multiplies codes with codes:

    $$y = x W^\top, \quad \mathrm d x = \mathrm d y\, W, \quad \mathrm d W = \mathrm d y^\top x$$

    Apart from products it behaves as the float array.

    !!! Example

        ```python
        w = eqq.LowPrecisionArray(w, "fp8", eqq.FP8("e5m2"))
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

    array: Any
    forward: AbstractFormat
    gradient: AbstractFormat
    stochastic: bool = eqx.field(static=True)
    largest: Float[Array, "*stack 3"] | None

    def __init__(
        self,
        array: Any,
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

    def transpose(self, *axes: Any) -> Any:
        """Permutes the logical axes of the weight."""
        order = as_permutation(axes, self.ndim)
        moved = self._around(self.array.transpose(order))
        return moved if order[: self.ndim - 2] == list(range(self.ndim - 2)) else moved._sharing()

    def reshape(self, *shape: Any, **kwargs: Any) -> Any:
        """Reshapes the weight."""
        return self._around(self.array.reshape(*shape, **kwargs))._sharing()

    def _around(self, array: Any) -> Any:
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array
        return dataclasses.replace(self, array=array)

    def _sharing(self) -> "LowPrecisionArray":
        """Returns the array with one scale for all of a stack, if scales are delayed."""
        if self.largest is None or self.largest.ndim == 1:
            return self
        of_each = self.largest.reshape(-1, 3)
        # What the products see are magnitudes of each.
        one = value_of(jnp.max(of_each, axis=0), gradient_of=jnp.sum(of_each, axis=0))
        return dataclasses.replace(self, largest=one)

    def _matmul(self, other: Any, *, left: bool, **options: Any) -> Array:
        x, w = jnp.asarray(other), self.dequantize()
        if x.ndim == 0 or w.ndim < 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            return multiply(w, x, left=left, **options)
        of_w, of_x = (w.ndim - 1 if left else w.ndim - 2), (-1 if x.ndim == 1 or not left else -2)
        if w.ndim == 2:
            y = self.dot_general(x, w, (((of_x % x.ndim,), (of_w,)), ((), ())), **options)
            return jnp.swapaxes(y, -1, -2) if left and x.ndim > 1 else y
        vector = x.ndim == 1
        matrices = ("(n,k)", "(k)" if vector else "(k,m)") if left else ("(k)" if vector else "(m,k)", "(k,n)")
        result = f"({'' if vector or left else 'm,'}n{'' if vector or not left else ',m'})"
        of_each = self.largest is not None and self.largest.ndim > 1

        def one(a: Array, b: Array, *largest: Array) -> Array:
            own = dataclasses.replace(self, array=a if left else b, largest=largest[0] if largest else self.largest)
            return own._matmul(b if left else a, left=left, **options)

        product = jnp.vectorize(one, signature=f"{','.join((*matrices, *['(s)'] * of_each))}->{result}")
        # Of as many batch axes, since ranks may not promote themselves.
        ahead = (x.ndim - min(x.ndim, 2)) - (w.ndim - 2)
        lead = lambda a, count: a.reshape(*[1] * count, *a.shape)
        x, w, largest = lead(x, -ahead), lead(w, ahead), [lead(self.largest, ahead)] if of_each else []
        return product(w, x, *largest) if left else product(x, w, *largest)

    def dot_general(
        self,
        x: Float[Array, "..."],
        w: Float[Array, "..."],
        numbers: lax.DotDimensionNumbers,
        *,
        left: bool = False,
        precision: Any = None,
        implementation: str | None = None,
    ) -> Float[Array, "..."]:
        """As `jax.lax.dot_general(x, w, numbers)`, rounded as products with this array are.

        !!! Example

            ```python
            y = w.dot_general(x, w.array, (((1,), (1,)), ((), ())))     # x @ w.T
            ```

        **Arguments:**

        - `x`, `w`: floats, the operands.
        - `numbers`: the axes that the sum runs along, and those of a batch, as in `jax.lax.dot_general`.
        - `left`: whether the first operand is the weight. Only delayed scales depend on it.
        - `precision`, `implementation`: as in [`eqquant.matmul`][].

        **Returns:**

        The product, of dtype `jnp.result_type(x, w)`.

        **Raises:**

        `ValueError` if lengths along the sum or of a batch differ.
        """
        lengths = [[a.shape[axis] for pair in numbers for axis in pair[n]] for n, a in enumerate((x, w))]
        if lengths[0] != lengths[1]:
            raise ValueError(
                f"A product sums along axes of equal length. Got lengths {lengths[0]} and {lengths[1]}, from shapes "
                f"{x.shape} and {w.shape}. Transpose one of them."
            )
        dtype = jnp.result_type(x, w)
        x, w = _compat.vary_alike((x.astype(dtype), w.astype(dtype)))
        largest = self._sharing().largest
        of_x, of_w, of_gradient = (OF_W, OF_X, OF_GRADIENT) if left else (OF_X, OF_W, OF_GRADIENT)
        delayed = lambda rounding, place: rounding if largest is None else rounding._replace(largest=place)

        def product(x: Array, w: Array, *largest: Array) -> Array:
            x_rows, (batch, free_of_x) = _as_rows(x, *(pair[0] for pair in numbers))
            w_rows, (_, free_of_w) = _as_rows(w, *(pair[1] for pair in numbers))
            y = bind_rounded_matmul(
                x_rows,
                w_rows,
                *largest,
                of_x=delayed(Rounding(self.forward), of_x),
                of_w=delayed(Rounding(self.forward), of_w),
                of_gradient=delayed(Rounding(self.gradient, self.stochastic), of_gradient),
                precision=precision,
                implementation=implementation,
            )
            return y.reshape(*batch, *free_of_x, *free_of_w)

        mesh = explicit_mesh(x, w)
        if mesh is not None:
            product = in_auto_mode(product, NamedSharding(mesh, _result_spec(x, w, numbers)))
        return product(x, w, *([] if largest is None else [largest.astype(jnp.float32)]))

    def __pdoc__(self, **kwargs: Any) -> wl.AbstractDoc:
        rounding = ", rounded to nearest" * (not self.stochastic)
        delayed = ", delayed scales" * (self.largest is not None)
        formats = f"{self.forward!r}, gradient={self.gradient!r}"
        return wl.TextDoc(f"LowPrecisionArray({wl.pformat(self.array)}, {formats}{rounding}{delayed})")


def map_largest(function: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Applies a function to the largest magnitudes that scales follow from, wherever a tree has them."""

    def mapped(x: Any) -> Any:
        if not isinstance(x, LowPrecisionArray) or x.largest is None:
            return x
        return eqx.tree_at(lambda w: w.largest, x, function(x.largest))  # what takes their place may be no array

    return jtu.tree_map(mapped, tree, is_leaf=lambda x: isinstance(x, LowPrecisionArray))


def _as_rows(
    x: Float[Array, "..."], contract: Sequence[int], batch: Sequence[int]
) -> tuple[Float[Array, "*batch rows inner"], tuple[list[int], list[int]]]:
    """Returns an operand of `dot_general` as matrices, whose rows the sum runs along, and its batch and free shapes."""
    free = [axis for axis in range(x.ndim) if axis not in (*contract, *batch)]
    of = lambda axes: [x.shape[axis] for axis in axes]
    rows = x.transpose(*batch, *free, *contract).reshape(*of(batch), math.prod(of(free)), math.prod(of(contract)))
    return rows, (of(batch), of(free))


def _result_spec(x: Array, w: Array, numbers: Any) -> jax.sharding.PartitionSpec:
    """Returns the spec of a product on an explicit mesh: the axes that divide `x`, then the remaining ones of `w`."""
    contract, batch = numbers
    of_x, of_w = (names_in(jax.typeof(a).sharding.spec, a.ndim) for a in (x, w))
    divided = [of_x[axis] for axis in batch[0]]
    divided += [of_x[axis] for axis in range(x.ndim) if axis not in (*contract[0], *batch[0])]
    taken = {name for by in divided for name in by}
    rest = [of_w[axis] for axis in range(w.ndim) if axis not in (*contract[1], *batch[1])]
    return as_spec([*divided, *(tuple(name for name in by if name not in taken) for by in rest)])
