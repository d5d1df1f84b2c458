"""Reduces every product with a quantized array to `x(*batch, m, k) . w(*batch, n, k)^T`.

`@` and `jnp.matmul` become an einsum, with a name for each axis; so does `jax.lax.dot_general`, in
`_quax/products.py`. Which operands have a name decides the role of its axis. Only this file rearranges shapes: a
class of arrays implements one product of matrices, `AbstractOperand.linear`.
"""

import abc
import functools as ft
import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.lax import PrecisionLike
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, DTypeLike, Float, Inexact

from .. import _compat
from .._mesh import as_spec, explicit_mesh, in_auto_mode, Names, names_in


Axes = Sequence[Hashable]  # the names of the axes of an array
Length: TypeAlias = Any  # the length of an axis: an integer, or a symbol in an exported program


class Dequantizable(Protocol):
    """Rows of activations that a product quantizes, which also have values."""

    def dequantize(self) -> Array: ...


class Options(NamedTuple):
    """The options of a product."""

    precision: PrecisionLike = None
    implementation: str | None = None
    quantize_x: "Callable[[Array], Dequantizable] | None" = None  # quantizes rows of activations
    column_major: tuple[bool, bool] = (False, False)  # whether memory holds `x`, and the result, by columns


class Constraints(NamedTuple):
    """The axes of a weight that a product may not merge freely."""

    # The axes along which codes are packed, in memory order. Together they become the rows of matrices, or the columns.
    # `None` if no codes are packed.
    packed_axes: tuple[int, ...] | None
    stack: int = 0  # how many leading axes always stay batch axes
    unmerged: tuple[int, ...] = ()  # axes that become rows or columns on their own


class MatrixAxes(NamedTuple):
    """The axes of an array that become `(*front, rows, columns)`. Other axes have length one."""

    front: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def shape(self, shape: Sequence[Length]) -> tuple[Length, ...]:
        """Returns the shape of the matrices."""
        sizes = lambda axes: [shape[axis] for axis in axes]
        return (*sizes(self.front), math.prod(sizes(self.rows)), math.prod(sizes(self.columns)))

    def order(self, ndim: int) -> tuple[int, ...]:
        """Returns all axes in the order of the matrices, axes of length one first."""
        chosen = (*self.front, *self.rows, *self.columns)
        return (*(axis for axis in range(ndim) if axis not in chosen), *chosen)


class AbstractOperand(eqx.Module):
    """The interface of arrays that `contract` multiplies.

    `linear` multiplies matrices `(*batch, n, k)`, as `as_matrices` returns them.
    """

    holds_codes: ClassVar[bool] = False  # whether products can multiply it as `x` by its codes
    # What the dense array of a wrapper would lose, for warnings: "its products add no bias". If set, a product that
    # cannot stay packed decodes the wrapped weight alone and keeps the effect.
    lost_in_jax: ClassVar[str] = ""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The logical shape."""

    @property
    @abc.abstractmethod
    def ndim(self) -> int:
        """The number of logical axes."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype:
        """The logical dtype: the dtype of `dequantize()`."""

    @abc.abstractmethod
    def dequantize(self) -> Float[Array, "..."]:
        """Returns the dense array, of `shape` and `dtype`."""

    @abc.abstractmethod
    def astype(self, dtype: DTypeLike) -> "AbstractOperand | Array":
        """Changes the logical dtype."""

    @property
    @abc.abstractmethod
    def constraints(self) -> Constraints:
        """The axes that a product may not merge freely."""

    @abc.abstractmethod
    def as_matrices(self, axes: MatrixAxes) -> "AbstractOperand | Array":
        """Returns the array as `(*front, rows, columns)`. `axes` satisfies the constraints."""

    @abc.abstractmethod
    def linear(self, x: "Array | AbstractOperand", options: Options) -> Float[Array, "*batch m n"]:
        """Returns `x(*batch, m, k) . self(*batch, n, k)^T`, for the matrices of `as_matrices`."""


Operand: TypeAlias = Array | AbstractOperand


def linear(w: Operand, x: Operand, options: Options) -> Float[Array, "*batch m n"]:
    """Returns `x(*batch, m, k) . w(*batch, n, k)^T`, for floats or an `AbstractOperand`."""
    if isinstance(w, AbstractOperand):
        return w.linear(x, options)
    if options.implementation is not None:
        raise ValueError(
            f"`implementation` is for quantized operands. Got {options.implementation!r}, and none is quantized."
        )
    if options.quantize_x is not None and not isinstance(x, AbstractOperand):
        x = options.quantize_x(x).dequantize()
    return jnp.matmul(as_floats(x), jnp.swapaxes(w, -1, -2), precision=options.precision)


def as_floats(x: ArrayLike | AbstractOperand) -> Array:
    """Returns an operand as floats."""
    return x.dequantize() if isinstance(x, AbstractOperand) else jnp.asarray(x)


def as_matrices(w: Operand, axes: MatrixAxes) -> Operand:
    """Returns floats or an `AbstractOperand` as `(*front, rows, columns)`."""
    if isinstance(w, AbstractOperand):
        return w.as_matrices(axes)
    return jnp.transpose(w, axes.order(w.ndim)).reshape(axes.shape(w.shape))


def get_constraints(w: Operand) -> Constraints:
    """Returns the constraints of an operand; floats have none."""
    return w.constraints if isinstance(w, AbstractOperand) else Constraints(None)


def matmul(
    x: ArrayLike | AbstractOperand,
    w: ArrayLike | AbstractOperand,
    *,
    implementation: str | None = None,
    precision: PrecisionLike = None,
) -> Array:
    """Computes `x @ w`, where either operand may be quantized.

    `q @ x` and `x @ q` call this function with the defaults.

    !!! Example

        ```python
        y = eqq.matmul(x, q.T, implementation="xla")
        ```

    **Arguments:**

    - `x`, `w`: arrays or quantized arrays, of the shapes that `jnp.matmul` takes. If both are quantized along the axis
        that the sum runs along, multiplies codes with codes; otherwise dequantizes `x`. Also dequantizes an operand if
        the sum runs along only part of its quantized axis.
    - `implementation`: the name of an implementation, or `None` to choose the best for the platform, the shapes and
        the format. [`eqquant.explain_matmul`][] lists them.
    - `precision`: as in `jnp.matmul`; `None` takes `jax.default_matmul_precision`. Sums are float32 (float64 for
        float64 operands).

    **Returns:**

    An array of dtype `jnp.result_type(x, w)`.

    **Raises:**

    `ValueError` if the contracted lengths differ, or if the implementation is unknown, is for another platform, or
    cannot take the product.
    """
    return matmul_with(x, w, Options(precision, implementation))


def matmul_with(x: ArrayLike | AbstractOperand, w: ArrayLike | AbstractOperand, options: Options = Options()) -> Array:
    """Computes `x @ w` with all options."""
    first, second = (a if isinstance(a, AbstractOperand) else jnp.asarray(a) for a in (x, w))
    weight, other = (second, first) if isinstance(second, AbstractOperand) else (first, second)
    name = options.implementation
    if isinstance(weight, AbstractOperand) and other.ndim > 0 and _lengths_agree(first, second, weight):
        _check_closure(weight, other)
        batch = jnp.broadcast_shapes(first.shape[:-2], second.shape[:-2])
        # Batch axes broadcast from the end, so negative numbers are their names.
        name_axes = lambda ndim, last: (*range(-ndim, -2), *last) if ndim > 1 else ("k",)
        first_axes, second_axes = name_axes(first.ndim, "mk"), name_axes(second.ndim, "kn")
        out_axes = (*range(-len(batch) - 2, -2), *(axis for axis in "mn" if axis in (*first_axes, *second_axes)))
        x_axes, w_axes = (second_axes, first_axes) if weight is first else (first_axes, second_axes)
        y = contract(other, weight, x_axes, w_axes, out_axes, options)
        if y is not None:
            return y
        if name is not None and weight.constraints.packed_axes is not None:
            raise ValueError(
                "`implementation` is for products over or along the quantized axis. Got "
                f"{name!r}, {weight!r} and {other.dtype}{list(other.shape)}. Without it the product is dense."
            )
    if name is not None:
        raise ValueError(f"`implementation` is for quantized operands. Got {name!r}, and none is quantized.")
    return jnp.matmul(as_floats(first), as_floats(second), precision=options.precision)


def contract(
    x: Operand,
    w: AbstractOperand,
    x_axes: Axes,
    w_axes: Axes,
    out_axes: Axes,
    options: Options = Options(),
) -> Inexact[Array, "..."] | None:
    """Contracts the axes that `out_axes` leaves out, as a product of matrices.

    **Arguments:**

    - `x`: a dense array, or an `AbstractOperand`, which is dequantized unless its blocks run along the sum.
    - `w`: an `AbstractOperand`.
    - `x_axes`, `w_axes`, `out_axes`: the names of the axes of each and of the result. Axes of length one are broadcast.

    **Returns:**

    An array; or `None` if the product must be dense: the sum runs over only part of the quantized axes, or over no
    axis.
    """
    form = _find_form(x, w, x_axes, w_axes, out_axes)
    if form is None:
        if not w.lost_in_jax:
            return None
        # The product has an effect besides that of the weight: decode the weight alone.
        wrapper: Any = w
        w = eqx.tree_at(lambda w: w.array, wrapper, w.dequantize(), is_leaf=lambda part: part is wrapper.array)
        if (form := _find_form(x, w, x_axes, w_axes, out_axes)) is None:
            return None
    if isinstance(x, AbstractOperand) and not (x.holds_codes and form.matches_codes(x)):
        x = x.dequantize()
    if not isinstance(x, AbstractOperand) and jnp.iscomplexobj(x):  # quantize its two parts separately
        parts = (contract(part, w, x_axes, w_axes, out_axes, options) for part in (jnp.real(x), jnp.imag(x)))
        return jax.lax.complex(*parts)  # pyright: ignore[reportArgumentType]
    x = x.astype(jnp.result_type(x.dtype, w.dtype))
    product = ft.partial(_product, form, options)
    mesh = explicit_mesh(x, w)
    if mesh is not None:
        product = in_auto_mode(product, NamedSharding(mesh, _find_result_spec(form, x, w)))
    return product(x, w)


class _MatmulForm(NamedTuple):
    """The axes of a contraction by their role in `x(*front, m, k) . w(*front, n, k)^T`."""

    x_axes: Axes
    w_axes: Axes
    out_axes: Axes
    size: Mapping[Hashable, Length]
    front: Axes  # batch axes of the weight, the axes of a stack first
    m: Axes  # axes of `x` alone
    n: Axes  # axes of the weight alone
    k: Axes  # contracted axes
    summed: Axes  # axes of `front` over which the result is summed

    def sizes(self, names: Iterable[Hashable]) -> list[Length]:
        return [self.size[name] for name in names]

    def matrices(self, axes: Axes, rows: Axes) -> MatrixAxes:
        """Returns the axes of an operand that become axes of its matrices."""
        find = lambda names: tuple(list(axes).index(name) for name in names if name in axes)
        return MatrixAxes(find(self.front), find(rows), find(self.k))

    def matches_codes(self, x: AbstractOperand) -> bool:
        """Returns whether the sum runs along the blocks of `x`, with a matrix for each weight."""
        packed = [self.x_axes[axis] for axis in x.constraints.packed_axes or ()]
        return packed == list(self.k) and all(name in self.x_axes for name in self.front)


def _find_form(x: Operand, w: AbstractOperand, x_axes: Axes, w_axes: Axes, out_axes: Axes) -> _MatmulForm | None:
    """Finds the role of each axis, by where its name occurs.

    Returns `None` if the product must be dense.

    | in `w` | in `x` | in the result | role |
    | --- | --- | --- | --- |
    | yes | yes | yes | `front`, a batch axis |
    | yes | yes | no | `k`, contracted; `front` and `summed` for an axis of a stack, or of matrices beside packed axes |
    | yes | no | yes | `n`, rows of the weight; `front`, with copies of `x`, if another axis is packed and not summed |
    | no | yes | yes | `m`, rows of `x` |

    An axis of length one that may be dropped gets no role; the axis of `x` that it broadcasts against becomes rows.
    """
    packed_axes, stack, unmerged_axes = w.constraints
    size = _find_lengths(zip(w_axes, w.shape, strict=True), zip(x_axes, x.shape, strict=True))
    unmerged = [w_axes[axis] for axis in unmerged_axes]
    packed = [w_axes[axis] for axis in packed_axes or ()]
    w_long = [name for name, n in zip(w_axes, w.shape, strict=True) if n != 1 or name in packed or name in unmerged]
    x_long = [name for name, n in zip(x_axes, x.shape, strict=True) if n == size[name]]

    contracted = [name for name in w_long if name in x_axes and name not in out_axes]
    stacked = [name for name in w_axes[:stack] if name in w_long]
    shared = [n for n in w_long if n in x_axes and n in out_axes and n in x_long and n not in stacked]
    front = [*stacked, *shared]
    summed = [name for name in stacked if name in contracted]
    k = [name for name in contracted if name not in front]
    n = [name for name in w_long if name not in front and name not in k]
    m = [name for name in x_long if name in out_axes and name not in front and name not in n]

    if packed_axes is None:
        if not k or w.ndim < 2:
            return None
    elif packed and set(packed) <= set(k):  # the sum runs along the blocks
        matrices = [name for name in k if name not in packed]  # and over matrices, such as experts: a product for each
        front, summed, k = [*front, *matrices], [*summed, *matrices], packed
    elif set(packed) != set(k):  # the sum runs across the blocks
        contracts = any(name in x_axes and name not in out_axes for name in w_axes)
        copied = [name for name in n if name not in packed]
        if not contracts or not all(name in n for name in packed):
            return None
        if copied and _multiply_lengths(size, m) > _multiply_lengths(size, packed):
            return None  # the copies of `x` would take more memory than a dense weight
        front, n = [*front, *copied], packed
    if not all([name] in (n, k) for name in unmerged):
        return None
    return _MatmulForm(x_axes, w_axes, out_axes, size, front, m, n, k, summed)


def _find_lengths(*operands: Iterable[tuple[Hashable, Length]]) -> dict[Hashable, Length]:
    """Returns the length of each axis by its name; axes of length one are broadcast."""
    size: dict[Hashable, Length] = {}
    for name, length in itertools.chain(*operands):
        size[name] = length if size.get(name, 1) == 1 else size[name]
    return size


def _multiply_lengths(size: Mapping[Hashable, Length], names: Axes) -> int:
    lengths = [size[name] for name in names]
    return math.prod(lengths) if all(isinstance(n, int) for n in lengths) else 0  # symbolic lengths


def _product(form: _MatmulForm, options: Options, x: Operand, w: AbstractOperand) -> Float[Array, "..."]:
    front, m, k = form.sizes(form.front), math.prod(form.sizes(form.m)), math.prod(form.sizes(form.k))
    # A matrix that memory holds by columns is transposed by one `swapaxes`, which XLA can cancel against another.
    sides = (*form.m, *form.k, *form.n)
    last = lambda axes: next((name for name in reversed(axes) if name in sides), None)
    x_is_quantized = isinstance(x, AbstractOperand)
    x_by_columns, y_by_columns = not x_is_quantized and last(form.x_axes) in form.m, last(form.out_axes) in form.m
    transpose_if = lambda column_major, a: jnp.swapaxes(a, -1, -2) if column_major else a

    if x_is_quantized:
        x = x.as_matrices(form.matrices(form.x_axes, form.m))
    else:
        inner, shape = ((*form.k, *form.m), (k, m)) if x_by_columns else ((*form.m, *form.k), (m, k))
        lengths = dict(zip(form.x_axes, x.shape, strict=True))
        x_front = [lengths.get(name, 1) for name in form.front]
        x = _reshape(_permute(x, form.x_axes, (*form.front, *inner)), (*x_front, *shape))
        x = transpose_if(x_by_columns, x)
        x = x if x_front == front else jnp.broadcast_to(x, (*front, m, k))

    weight = w.as_matrices(form.matrices(form.w_axes, form.n))
    product = weight.linear if isinstance(weight, AbstractOperand) else ft.partial(linear, weight)
    y = product(x, options._replace(column_major=(x_by_columns, y_by_columns)))
    y = transpose_if(y_by_columns, y)
    y_axes = (*form.front, *((*form.n, *form.m) if y_by_columns else (*form.m, *form.n)))
    y = _reshape(y, form.sizes(y_axes))
    if form.summed:
        y = jnp.sum(y, axis=[y_axes.index(name) for name in form.summed])
        y_axes = tuple(name for name in y_axes if name not in form.summed)
    return _reshape(_permute(y, y_axes, form.out_axes), form.sizes(form.out_axes))


def _permute(x: Array, names: Axes, wanted: Axes) -> Array:
    """Permutes axes to the order `wanted`, after unwanted axes, which have length one."""
    names, wanted = list(names), list(wanted)
    order = [axis for axis, name in enumerate(names) if name not in wanted]
    order += [names.index(name) for name in wanted if name in names]
    return x if order == sorted(order) else jnp.transpose(x, order)


def _reshape(x: Array, shape: Sequence[Length]) -> Array:
    """Reshapes only if the shape changes: tracing any reshape takes long."""
    return x if x.shape == tuple(shape) else jax.lax.reshape(x, shape)


def _find_result_spec(form: _MatmulForm, x: Operand, w: AbstractOperand) -> PartitionSpec:
    """Returns the spec of the result on an explicit mesh: of `x` first, then of `w`."""
    x_names, w_names = (_mesh_axes(a) for a in (x, w))
    divided = {name: by for name, by in zip(form.x_axes, x_names, strict=True) if name in form.out_axes}
    used = {axis for by in divided.values() for axis in by}
    for name, by in zip(form.w_axes, w_names, strict=True):
        if not divided.get(name):
            divided[name] = tuple(axis for axis in by if axis not in used)
    return as_spec([divided[name] for name in form.out_axes])


def _mesh_axes(a: Operand) -> Sequence[Names]:
    """Returns the mesh axes that divide each axis of an operand, on an explicit mesh."""
    dense = jax.eval_shape(lambda a: a.dequantize(), a) if isinstance(a, AbstractOperand) else jax.typeof(a)
    return names_in(() if dense.sharding is None else dense.sharding.spec, a.ndim)


def _lengths_agree(first: Operand, second: Operand, weight: AbstractOperand) -> bool:
    """Returns whether contracted lengths agree; raises if they differ for a quantized array."""
    left, right = first.shape[-1:], second.shape[-2:-1] or second.shape[-1:]
    if left == right:
        return True
    if weight.ndim == 0:
        return False
    flipped, is_first = "q.T" if weight.ndim == 2 else "q.mT", weight is first
    fits = weight.ndim > 1 and (weight.shape[-2:-1] == right if is_first else weight.shape[-1:] == left)
    remedy = f" `{f'{flipped} @ x' if is_first else f'x @ {flipped}'}` fits." if fits else ""
    raise ValueError(
        f"`matmul` contracts axes of equal length. Got lengths {left[0]} and {right[0]}, from {tuple(first.shape)} @ "
        f"{tuple(second.shape)}.{remedy}"
    )


def _check_closure(q: AbstractOperand, x: Operand) -> None:
    """Warns if a traced function closes over a stack of weights that one vector multiplies.

    Usually a `scan` whose `xs` lack the codes.
    """
    leaf = jtu.tree_leaves(q)[0]
    if isinstance(x, jax.Array) and x.ndim == 1 and q.ndim > 2 and _compat.is_constant_of_trace(leaf, x):
        warnings.warn(
            f"A stack of quantized weights, of shape {q.shape}, is multiplied by one vector inside a function "
            "that closes over the stack. If a `scan` was to take it layer by layer, split the model with "
            "`eqx.partition(model, eqx.is_array)`: codes are integers, and `eqx.is_inexact_array` leaves them "
            "behind. If the product with the whole stack is what you want, pass the stack as an argument.",
            stacklevel=4,
        )
