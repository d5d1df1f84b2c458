"""The quantized matmul: the rules of the primitive, and which implementation computes it.

One primitive, `x(*batch, m, k) . w(*batch, n, k)^T`, where `x` is float and `w` quantized; with `transpose`,
`x(*batch, m, n) . w(*batch, n, k)`. It is linear in `x`, so its tangent is itself and its transpose is itself with the
flag flipped; a `custom_vjp` would give up forward mode. This is the only place where formats and kernels meet.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, ArrayLike, Float
from rich.table import Table

from . import _compat
from ._array import AbstractFormat, QuantizedArray
from ._display import as_text
from ._kernels import xla
from ._partition import partitioned
from ._primitive import quantized_matmul_p
from ._quantize import is_quantized


#
# Implementations
#


class MatmulProblem(NamedTuple):
    """One quantized matmul, as far as choosing an implementation needs to know it.

    `m` rows of activations of type `dtype`, times a weight of `n` rows of `k` values in `format`; `transpose` if `n`
    is contracted and not `k`.
    """

    m: int
    n: int
    k: int
    dtype: Any
    format: AbstractFormat
    transpose: bool


class _Implementation(NamedTuple):
    """A way to compute the product."""

    platforms: tuple[str, ...]  # () for all
    supports: Callable[[MatmulProblem], str | None]  # the reason why not, or None
    run: Callable[..., Array]  # (x, w, decode, *, transpose, precision)
    reason: str  # why it is chosen where it can be


def _always(problem: MatmulProblem) -> None:
    del problem


# The first that supports the problem runs. `xla` stands last: it takes everything.
_IMPLEMENTATIONS: dict[str, _Implementation] = {
    "xla": _Implementation((), _always, xla.dense, "XLA fuses what it can of the decode into the product"),
}
# What `xla` means on one platform.
_XLA_ON = {
    "cpu": _Implementation(
        ("cpu",),
        _always,
        xla.by_rows,
        "XLA on CPU never fuses a decode, so the weight is decoded a few rows at a time",
    ),
}


def _candidates(platform: str) -> dict[str, _Implementation]:
    here = {n: i for n, i in _IMPLEMENTATIONS.items() if i.platforms == () or platform in i.platforms}
    here["xla"] = _XLA_ON.get(platform, here["xla"])
    return here


def _choose(platform: str, problem: MatmulProblem, forced: str | None) -> tuple[str, _Implementation]:
    candidates = _candidates(platform)
    if forced is not None:
        if forced not in candidates:
            raise ValueError(f"`implementation` must be one of {', '.join(candidates)} on {platform}. Got {forced!r}.")
        refusal = candidates[forced].supports(problem)
        if refusal is not None:
            raise ValueError(f'`implementation={forced!r}` cannot take this product: {refusal}. Use "xla", or None.')
        return forced, candidates[forced]
    return next((name, i) for name, i in candidates.items() if i.supports(problem) is None)


#
# The primitive
#


def _abstract(x: Any, *leaves: Any, treedef: Any, transpose: bool, **params: Any) -> jax.core.ShapedArray:
    del params
    *batch, n, k = jtu.tree_unflatten(treedef, leaves).shape
    if x.shape[-1] != (n if transpose else k) or list(x.shape[:-2]) != batch:
        raise ValueError(f"quantized_matmul: shapes {x.shape} and {(*batch, n, k)} do not fit ({transpose=}).")
    return x.update(shape=(*x.shape[:-1], k if transpose else n))


def _problem(x: Any, w: QuantizedArray, transpose: bool) -> MatmulProblem:
    return MatmulProblem(x.shape[-2], w.shape[-2], w.shape[-1], jnp.dtype(x.dtype), w.format, transpose)


def _run(
    platform: str,
    x: Array,
    *leaves: Array,
    treedef: Any,
    transpose: bool,
    precision: Any,
    implementation: str | None,
    devices: int = 1,
) -> Array:
    def run(x: Array, w: QuantizedArray) -> Array:
        _, chosen = _choose(platform, _problem(x, w, transpose), implementation)
        return chosen.run(x, w, QuantizedArray.dequantize, transpose=transpose, precision=precision)

    # A master is where gradients go. It has no part in the value.
    w = dataclasses.replace(jtu.tree_unflatten(treedef, leaves), master=None)
    return run(x, w) if devices == 1 else partitioned(run, x, w, transpose=transpose)


def _lower(platform: str, context: Any, *args: Any, **params: Any) -> Any:
    # The compiler for TPUs does not call back to ask how an operation is divided. There XLA divides what it sees, and
    # `xla`, the one implementation, is all operations that it knows.
    devices = 1 if platform == "tpu" else _compat.num_devices(context)
    run = ft.partial(_run, platform, devices=devices)
    return mlir.lower_fun(run, multiple_results=False)(context, *args, **params)


@ft.cache
def _jitted(**params: Any) -> Callable[..., Array]:
    return jax.jit(ft.partial(quantized_matmul_p.bind, **params))


def _impl(*args: Array, **params: Any) -> Array:
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        platform = next(iter(args[0].devices())).platform
        return _run("cuda" if platform == "gpu" else str(platform), *args, **params)
    return _jitted(**params)(*args)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (x, *leaves), (dx, *d_leaves) = primals, tangents
    bind = ft.partial(quantized_matmul_p.bind, **params)
    y = bind(x, *leaves)
    dys = [] if type(dx) is ad.Zero else [bind(dx, *leaves)]
    # Of the weight only a master has a tangent; every other leaf is an unsigned integer.
    d_master = jtu.tree_unflatten(params["treedef"], d_leaves).master
    if d_master is not None and type(d_master) is not ad.Zero:
        dw = d_master.astype(x.dtype)
        dw = dw if params["transpose"] else jnp.swapaxes(dw, -1, -2)
        dys.append(jnp.matmul(x, dw, precision=params["precision"]))
    if not dys:
        return y, ad.Zero.from_primal_value(y)  # pyright: ignore[reportAttributeAccessIssue]
    return y, ft.reduce(ad.add_jaxvals, dys)


def _transpose(dy: Any, x: Any, *leaves: Any, transpose: bool, **params: Any) -> list[Any]:
    del x
    nothing = [None] * len(leaves)
    if type(dy) is ad.Zero:
        return [None, *nothing]
    return [quantized_matmul_p.bind(dy, *leaves, transpose=not transpose, **params), *nothing]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, treedef: Any, transpose: bool, **params: Any) -> Any:
    (x, *leaves), (x_dim, *leaf_dims) = args, dims
    bind = ft.partial(quantized_matmul_p.bind, treedef=treedef, transpose=transpose, **params)
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    if all(d is None for d in leaf_dims):
        # One weight for the whole batch: its examples become rows. A `vmap` of a matvec is one matmul.
        x = jnp.moveaxis(x, x_dim, -3)
        *batch, _, m, inner = x.shape
        y = bind(x.reshape(*batch, size * m, inner), *leaves)
        return y.reshape(*batch, size, m, y.shape[-1]), len(batch)
    leaves = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(leaves, leaf_dims, strict=True)
    ]
    if x_dim is None and x.ndim == 2 and not transpose:
        # One input for many weights: their rows become the rows of one weight.
        y = bind(x, *(a.reshape(-1, a.shape[-1]) for a in leaves))
        return y.reshape(x.shape[0], size, y.shape[1] // size if size else 0), 1
    x = jnp.broadcast_to(x, (size, *x.shape)) if x_dim is None else jnp.moveaxis(x, x_dim, 0)
    return bind(x, *leaves), 0


quantized_matmul_p.def_abstract_eval(_abstract)
quantized_matmul_p.def_impl(_impl)
ad.primitive_jvps[quantized_matmul_p] = _jvp
ad.primitive_transposes[quantized_matmul_p] = _transpose
batching.primitive_batchers[quantized_matmul_p] = _batch
_compat.lower_with_devices(quantized_matmul_p)
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(quantized_matmul_p, ft.partial(_lower, _platform), platform=_platform)
mlir.register_lowering(quantized_matmul_p, ft.partial(_lower, "default"))


#
# What users call
#


def matmul(
    x: Float[ArrayLike | QuantizedArray, "..."],
    w: Float[ArrayLike | QuantizedArray, "..."],
    *,
    implementation: str | None = None,
    precision: Any = None,
) -> Array:
    """`x @ w`, where either operand may be quantized, with a choice of implementation.

    `q @ x` and `x @ q` are this function with the defaults.

    !!! Example

        ```python
        y = eqq.matmul(x, q.T, implementation="xla")
        ```

    **Arguments:**

    - `x`, `w`: arrays or quantized arrays, of the shapes that `jnp.matmul` takes. If both are quantized, `x` is
        dequantized. The product is quantized where the quantized axis is one of the last two; otherwise the operand is
        dequantized.
    - `implementation`: the name of one, or `None` for the best that this platform has for the shapes and the format.
        See [`eqquant.explain_matmul`][].
    - `precision`: as in `jnp.matmul`; `None` takes `jax.default_matmul_precision`. Sums are float32 (float64 for
        float64 operands).

    **Returns:**

    An array of dtype `jnp.result_type(x, w)`.

    **Raises:**

    `ValueError` if the contracted lengths differ, or if the implementation is unknown on this platform or cannot take
    the product.
    """
    if is_quantized(w):
        x = x.dequantize() if is_quantized(x) else x  # pyright: ignore
        return w._matmul(x, left=False, implementation=implementation, precision=precision)  # pyright: ignore
    if is_quantized(x):
        return x._matmul(w, left=True, implementation=implementation, precision=precision)  # pyright: ignore
    return jnp.matmul(jnp.asarray(x), jnp.asarray(w), precision=precision)


class MatmulExplanation(NamedTuple):
    """Which implementation a product would take, and why. Prints as a table."""

    problem: MatmulProblem
    platform: str
    implementation: str
    verdicts: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        problem = {**self.problem._asdict(), "dtype": str(self.problem.dtype), "format": repr(self.problem.format)}
        return {**self._asdict(), "problem": problem}

    def __rich__(self) -> Table:
        p = self.problem
        weight = f"({p.m}, {p.n}) . W({p.n}, {p.k})" if p.transpose else f"({p.m}, {p.k}) . W({p.n}, {p.k})^T"
        table = Table("implementation", "verdict", title=f"{p.dtype}{weight}, {p.format!r}, on {self.platform}")
        for name, verdict in self.verdicts.items():
            table.add_row(name, verdict, style="bold" if name == self.implementation else None)
        return table

    def __str__(self) -> str:
        return as_text(self, 120)

    __repr__ = __str__


def explain_matmul(x: Any, w: Any, *, platform: str | None = None) -> MatmulExplanation:
    """Says which implementation `x @ w` would take, and why not the others.

    !!! Example

        ```python
        print(eqq.explain_matmul(x, q.T))
        ```

    **Arguments:**

    - `x`, `w`: as for [`eqquant.matmul`][], one of them quantized. Arrays of any kind, or `jax.ShapeDtypeStruct`s.
    - `platform`: `"cpu"`, `"cuda"`, `"tpu"` or `"rocm"`; the default backend's unless given.

    **Returns:**

    An object with `.implementation`, `.verdicts` (one per implementation) and `.to_dict()`, that prints as a table.
    """
    left = not is_quantized(w)
    q, other = (x, w) if left else (w, x)
    if not is_quantized(q):
        raise TypeError("`explain_matmul` needs a quantized operand. Got none. Quantize `x` or `w` first.")
    contracted = -1 if left else -2
    platform = platform or {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    dtype = jnp.result_type(other.dtype, q.dtype)
    shape = (1, *other.shape) if len(other.shape) == 1 else other.shape
    m = shape[-1] if left and len(other.shape) > 1 else shape[-2]
    transposed = q._axes != (contracted,)
    rows = q._memory_order()
    batch = jnp.broadcast_shapes(rows.shape[:-2], shape[:-2])
    if rows.ndim == 2:
        m *= int(jnp.prod(jnp.array(batch))) if batch else 1
    problem = MatmulProblem(m, rows.shape[-2], rows.shape[-1], jnp.dtype(dtype), q.format, transposed)
    if q.ndim < 2 or len(q._axes) != 1 or q.axis < -2:
        why = f"the quantized axis {q.axis} is not one of the last two: dequantize, then multiply"
        return MatmulExplanation(problem, platform, "dense", {"dense": why})
    name, chosen = _choose(platform, problem, None)
    verdicts = {}
    for other_name, candidate in _candidates(platform).items():
        refusal = candidate.supports(problem)
        verdicts[other_name] = refusal or ("possible" if other_name != name else f"chosen: {chosen.reason}")
    return MatmulExplanation(problem, platform, name, verdicts)
