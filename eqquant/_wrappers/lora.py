"""A frozen weight with trainable low-rank factors."""

import dataclasses
import functools as ft
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl
from jaxtyping import Array, DTypeLike, Float

from .._array.contraction import (
    AbstractOperand,
    as_floats,
    as_matrices,
    Constraints,
    get_constraints,
    linear,
    MatrixAxes,
    Options,
)
from .._array.moves import Axes, CannotMove, Move
from .._array.value import AbstractArrayValue, as_permutation, Index, move
from .base import check_field


class LoraArray(AbstractArrayValue):
    r"""A frozen weight plus trainable low-rank factors: $W + \frac{\alpha}{r} B A$.

    [`eqquant.loraify`][] makes these. A matmul multiplies by the base (with the quantized matmul, if it is quantized)
    and by the two factors, and never computes the dense sum. Every other operation does.

    !!! Example

        ```python
        model = eqq.loraify(model, rank=8, key=key)
        isinstance(model.layers[0].weight, eqq.arrays.LoraArray)
        ```

    ??? cite

        [LoRA: Low-Rank Adaptation of Large Language Models](https://arxiv.org/abs/2106.09685)

    **Arguments:**

    - `base`: the frozen weight, an array, a [`eqquant.QuantizedArray`][] or a wrapper around one, of shape
        `(*batch, out, *in)`.
    - `a`: the factor on the input side, `(*batch, rank, *in)`.
    - `b`: the factor on the output side, `(*batch, out, rank)`.
    - `alpha`: the numerator of the scale.
    - `in_ndim`: the number of axes of `in`: one, or for a convolution all but the first.
    """

    base: Float[Array, "..."] | AbstractArrayValue
    a: Float[Array, "..."]
    b: Float[Array, "*batch out rank"]
    alpha: float = eqx.field(static=True)
    in_ndim: int = eqx.field(static=True)

    frozen: ClassVar[tuple[str, ...]] = ("base",)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.base.shape)

    @property
    def ndim(self) -> int:
        return self.base.ndim

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.base.dtype)

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def _check_fields(self) -> None:
        *outer, rank = self.b.shape
        inputs = self.shape[self.ndim - self.in_ndim :]
        check_field(self, "base", self.base, ((*outer, *inputs),), jnp.floating)
        check_field(self, "a", self.a, ((*outer[:-1], rank, *inputs),), jnp.floating)
        check_field(self, "b", self.b, (self.b.shape,), jnp.floating)

    def dequantize(self) -> Float[Array, "..."]:
        """Returns the base plus the product of the factors, as a dense array."""
        self._check_fields()
        base, delta = self._frozen_base(), self.delta()
        dense = base.dequantize() if isinstance(base, AbstractArrayValue) else base
        return dense + delta.astype(dense.dtype)

    def delta(self) -> Float[Array, "..."]:
        """Returns the scaled product of the factors, in their dtype."""
        inputs = self.a.shape[-self.in_ndim :]
        a = self.a.reshape(*self.b.shape[:-2], self.rank, math.prod(inputs))
        return self.scaling * jnp.matmul(self.b, a).reshape(*self.b.shape[:-1], *inputs)

    def transpose(self, *axes: int | Sequence[int] | None) -> "LoraArray | Array":
        """Swaps the last two axes, and the factors. Any other permutation returns a dense array."""
        order = as_permutation(axes, self.ndim)
        swap = [*range(self.ndim - 2), self.ndim - 1, self.ndim - 2]
        if self.in_ndim != 1 or order != swap:
            return self.dequantize().transpose(order)
        return dataclasses.replace(self, base=self.base.mT, a=self.b.mT, b=self.a.mT)

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns a dense array of another dtype."""
        return self.dequantize().astype(dtype)

    def reshape(self, *shape: int | Sequence[int], **kwargs: Any) -> Array:
        """Returns a dense array of another shape."""
        return self.dequantize().reshape(*shape, **kwargs)

    def __getitem__(self, index: Index) -> Array:
        """Returns a dense array. An embedding lookup computes only the rows that it takes."""
        if self.in_ndim != 1 or self.ndim != 2 or isinstance(index, tuple) or index is None or index is Ellipsis:
            return self.dequantize()[index]
        rows = self._frozen_base()[index]
        return rows + (self.scaling * jnp.matmul(self.b[index], self.a)).astype(rows.dtype)

    @property
    def constraints(self) -> Constraints:
        """For products: the constraints of the base; outputs, inputs and a stack stay apart."""
        batch, last = self.ndim - 1 - self.in_ndim, tuple(range(self.ndim))[-2:]
        if self.in_ndim != 1:  # a convolution, whose products are dense
            return Constraints(None, 0, tuple(range(self.ndim)))
        packed_axes = get_constraints(self.base).packed_axes
        return Constraints(last[1:] if packed_axes is None else packed_axes, batch, last)

    def as_matrices(self, axes: MatrixAxes) -> "LoraArray":
        """For products: the base and the factors as matrices."""
        self._check_fields()
        front = axes.shape(self.shape)[:-2]
        a, b = (leaf.reshape(*front, *leaf.shape[-2:]) for leaf in (self.a, self.b))
        if axes.columns != (self.ndim - 1,):
            a, b = b.mT, a.mT
        return dataclasses.replace(self, base=as_matrices(self._frozen_base(), axes), a=a, b=b)

    def linear(self, x: Array | AbstractOperand, options: Options) -> Float[Array, "*batch m n"]:
        """For products: the product of the base, plus the product of the factors."""
        y = linear(self.base, x, options)
        product = ft.partial(jnp.matmul, precision=options.precision)
        low = product(product(as_floats(x).astype(y.dtype), self.a.mT.astype(y.dtype)), self.b.mT.astype(y.dtype))
        return y + self.scaling * low

    def move(self, spec: Move, *others: "LoraArray") -> "LoraArray":
        stack, loras = self.ndim - 1 - self.in_ndim, (self, *others)
        if any(lora.rank != self.rank for lora in others):
            raise CannotMove
        inputs = tuple(range(stack + 1, self.ndim))
        kept = [axis for axis in inputs if axis in spec.source_axes]
        if not kept:
            raise CannotMove
        spec.check_last(stack, *kept)

        def move_factor(axes: Axes, *factors: Array) -> Array:
            unchanged = spec.keeps(axes, self.ndim)
            if unchanged and not all(factor is factors[0] for factor in factors):
                raise CannotMove  # the other factor differs
            return factors[0] if unchanged else spec.move_leaf(axes, *factors)

        return dataclasses.replace(
            self,
            base=move(self.base, spec, *(other.base for other in others)),
            a=move_factor((*range(stack), None, *inputs), *(lora.a for lora in loras)),
            b=move_factor((*range(stack + 1), None), *(lora.b for lora in loras)),
            in_ndim=len(kept),
        )

    def _frozen_base(self) -> Array | AbstractArrayValue:
        return self.base if isinstance(self.base, AbstractArrayValue) else jax.lax.stop_gradient(self.base)

    def __pdoc__(self, **kwargs: object) -> wl.AbstractDoc:
        shape = getattr(self.b, "shape", ())  # a mask holds booleans
        rank = shape[-1] if shape else self.b
        return wl.TextDoc(f"LoraArray({wl.pformat(self.base)}, rank={rank}, alpha={self.alpha})")
