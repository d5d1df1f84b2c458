"""Which implementation computes a quantized matmul, and why. The only place where formats and kernels meet.

`_IMPLEMENTATIONS` says what there is, and `_PREFERENCES` what is taken where. A kernel is handed a `Packed` weight: a
table of what codes stand for, which it gets by asking the format to decode every code there is. So it takes any format.
"""

import functools as ft
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float
from rich.table import Table

from . import _scaling
from ._array import AbstractFormat, QuantizedArray
from ._display import as_text
from ._formats import FP8
from ._kernels import xla
from ._kernels.packed import decode_bytes, Layout, Packed, ScaleKind
from ._quantize import is_quantized


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
    precision: Any = None

    @property
    def layout(self) -> Layout:
        """What the bits of the weight mean, without the arrays."""
        return _layout(self.format, self.k)


class Target(NamedTuple):
    """What a product is compiled for. What is not known is assumed to be new enough."""

    platform: str  # "cpu", "cuda", "rocm", "tpu"
    device: str = ""  # its name
    capability: float = 9.0  # of an NVIDIA GPU
    no_kernels: str | None = None  # why it takes none


#
# What there is
#


class _Implementation(NamedTuple):
    platforms: tuple[str, ...]  # () for all
    supports: Callable[[MatmulProblem], str | None]  # the reason why not, or None
    run: Callable[[Array, QuantizedArray, MatmulProblem, Target], Array]


def _kernel(platform: str, load: Callable[[], Any], **options: Any) -> _Implementation:
    """An implementation that is a kernel for two-dimensional operands. Its module is imported when it is needed."""

    def supports(problem: MatmulProblem) -> str | None:
        precision = _precision(problem)
        if precision is None:
            return f"the precision is {problem.precision}, and it knows the default and the highest"
        m, n, _, dtype, _, transpose, _ = problem
        return load().supports(problem.layout, m, n, dtype, transpose=transpose, precision=precision)

    def run(x: Array, w: QuantizedArray, problem: MatmulProblem, target: Target) -> Array:
        product = ft.partial(
            load().matmul,
            layout=problem.layout,
            transpose=problem.transpose,
            precision=_precision(problem),
            device=target.device,
            **options,
        )
        weight, batch = _pack(w), x.shape[:-2]
        if not batch:
            return product(x, weight)
        if math.prod(batch) == 0:
            return _xla(x, w, problem, target)
        one_batch = jtu.tree_map(lambda a: a.reshape(math.prod(batch), *a.shape[-2:]), (x, weight))
        y = jax.vmap(product)(*one_batch)
        return y.reshape(*batch, *y.shape[1:])

    return _Implementation((platform,), supports, run)


def _xla(x: Array, w: QuantizedArray, problem: MatmulProblem, target: Target) -> Array:
    transpose, precision = problem.transpose, problem.precision
    if target.platform == "cpu":
        return xla.by_rows(x, w, QuantizedArray.dequantize, transpose=transpose, precision=precision)
    layout = problem.layout
    if _of_bytes(problem):
        # A scale of a row is one of results, or of what the row is multiplied by. Without it one conversion is left of
        # the weight, which XLA fuses with the product.
        decode = ft.partial(decode_bytes, layout=layout, dtype=x.dtype)
        return xla.dense_scaled(x, _pack(w), decode, w.scale[..., 0], transpose=transpose, precision=precision)
    return xla.dense(x, w, QuantizedArray.dequantize, transpose=transpose, precision=precision)


def _of_bytes(p: MatmulProblem) -> bool:
    """Whether a weight is one conversion of bytes, to integers or small floats, and one scale per row."""
    layout = p.layout
    # What a transposed product is multiplied by is scaled before it, and in float16 that might underflow.
    scalable = not (p.transpose and p.dtype == jnp.float16)
    return scalable and layout.one_scale and layout.bits == 8 and layout.kind != "table" and not layout.zero_points


def _always(problem: MatmulProblem) -> None:
    del problem


# Importing Pallas takes as long as importing JAX, so these wait until there is a use for them.


def _pallas_gpu() -> Any:
    from ._kernels import pallas_gpu

    return pallas_gpu


def _pallas_tpu() -> Any:
    from ._kernels import pallas_tpu

    return pallas_tpu


_IMPLEMENTATIONS = {
    "pallas_gpu": _kernel("cuda", _pallas_gpu),
    "pallas_tpu": _kernel("tpu", _pallas_tpu),
    "xla": _Implementation((), _always, _xla),
}


#
# What is taken where
#


class _Preference(NamedTuple):
    platform: str  # "" for any
    implementation: str
    when: Callable[[MatmulProblem], bool]
    reason: str


_FUSED = "XLA fuses the one conversion of the weight with the product; scales of rows stay outside"
_FEW_ROWS = "few rows: the packed weight is decoded on the chip, where XLA would write a dense one to memory"
_MANY_ROWS = "many rows: decoding to a dense weight in memory, once, costs less than decoding for every tile of rows"

# The first that holds is taken, unless the implementation cannot take the product.
_PREFERENCES = (
    _Preference("cuda", "xla", _of_bytes, _FUSED),
    _Preference("cuda", "pallas_gpu", lambda p: p.m <= 256, _FEW_ROWS),
    _Preference("cuda", "xla", lambda p: True, _MANY_ROWS),
    _Preference("tpu", "xla", _of_bytes, _FUSED),
    _Preference("tpu", "pallas_tpu", lambda p: p.m <= (256 if p.layout.one_scale else 64), _FEW_ROWS),
    _Preference("tpu", "xla", lambda p: True, _MANY_ROWS),
    _Preference(
        "cpu",
        "xla",
        lambda p: True,
        "XLA on CPU never fuses a decode, so the weight is decoded a few rows at a time",
    ),
    _Preference("", "xla", lambda p: True, "XLA fuses what it can of the decode into the product"),
)


def choose(target: Target, problem: MatmulProblem, forced: str | None) -> tuple[str, str]:
    """The name of the implementation that is taken, and the reason.

    **Raises:**

    `ValueError` if there is no implementation `forced`, or if it cannot take the product.
    """
    if forced is not None:
        refusal = _refusal(target, problem, forced)
        if refusal is not None:
            raise ValueError(f'`implementation={forced!r}` cannot take this product: {refusal}. Use "xla", or None.')
        return forced, "forced"
    rules = [r for r in _PREFERENCES if r.platform in ("", target.platform)]
    if not isinstance(problem.m, int):  # in a program that is exported for any number of rows
        rules = [r for r in rules if r.implementation == "xla"]
    preferred = [r for r in rules if r.when(problem)]
    refusals = [_refusal(target, problem, rule.implementation) for rule in preferred]
    taken = refusals.index(None)
    if taken > 0:
        return preferred[taken].implementation, f"{preferred[0].implementation} would be better, but: {refusals[0]}"
    return preferred[0].implementation, preferred[0].reason


def run(
    x: Float[Array, "*batch rows inner"], w: QuantizedArray, problem: MatmulProblem, target: Target, name: str
) -> Float[Array, "*batch rows outer"]:
    """Computes a product with the implementation of that name."""
    return _IMPLEMENTATIONS[name].run(x, w, problem, target)


def _refusal(target: Target, problem: MatmulProblem, name: str) -> str | None:
    """Why the implementation of that name cannot take the product, or `None`.

    **Raises:**

    `ValueError` if there is none of that name.
    """
    if name not in _IMPLEMENTATIONS:
        raise ValueError(f"`implementation` must be one of {', '.join(_IMPLEMENTATIONS)}, or None. Got {name!r}.")
    implementation = _IMPLEMENTATIONS[name]
    if implementation.platforms and target.platform not in implementation.platforms:
        return f"it is for {', '.join(implementation.platforms)}, and this is {target.platform}"
    if implementation.platforms and target.no_kernels is not None:
        return target.no_kernels
    if implementation.platforms and not isinstance(problem.m, int):
        return "the number of rows is symbolic"
    if name == "pallas_gpu" and target.capability < 8.9 and problem.layout.kind.startswith("float8"):
        return f"GPUs of compute capability {target.capability} have no floats of 8 bits"
    return implementation.supports(problem)


#
# Formats, as kernels see them
#


@ft.lru_cache(256)
def _layout(format: AbstractFormat, length: int) -> Layout:
    with jax.ensure_compile_time_eval():
        table = np.asarray(format.decode(jnp.arange(2**format.bits, dtype=jnp.uint8)), np.float32)
    size = length if format.block_size in (None, "tensor") else format.block_size
    nested = _nested_kind(format, length)
    return Layout(
        length,
        format.bits,
        max(min(size, length), 1),
        tuple(table.tolist()),
        nested or ("float32" if format.scale_format is not None else format.scale_dtype),
        _has_zero_points(format),
    )


def _nested_kind(format: AbstractFormat, length: int) -> ScaleKind | None:
    """What quantized scales are, if they are small floats under one scale for each row: then kernels read them so."""
    scales = format.scale_format
    if type(scales) is not FP8:  # a class derived from it may decode in another way
        return None
    blocks = _scaling.num_blocks(length, format.block_size)
    return scales.kind if _scaling.num_blocks(blocks, scales.block_size) == 1 else None


def _has_zero_points(format: AbstractFormat) -> bool:
    blocks = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
    scale = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return jax.eval_shape(format.choose_zero_point, blocks, scale) is not None


def _pack(w: QuantizedArray) -> Packed:
    scale, row_scale = w.stored_scale, None
    if isinstance(scale, QuantizedArray):
        if _nested_kind(w.format, w._length) is None:
            scale = _scaling.scale_to_bits(scale.dequantize(), "float32")
        else:
            scale, row_scale = scale.codes, scale.scale
    return Packed(w.codes, scale, row_scale, w.zero_point)


def _precision(problem: MatmulProblem) -> str | None:
    """Of the precisions that there are, the one that a kernel understands: "default", "highest", or `None`."""
    name = problem.precision
    if isinstance(name, tuple) and len(set(name)) == 1:
        name = name[0]
    name = name.name if isinstance(name, jax.lax.Precision) else name
    name = name.lower() if isinstance(name, str) else name
    if name in (None, "default", "fastest", "bfloat16", "tensorfloat32"):
        return "default"
    if name in ("high", "highest", "float32", "bfloat16_3x"):
        # Products of 16 bits are exact in float32 already.
        return "default" if jnp.dtype(problem.dtype).itemsize < 4 else "highest"
    return None


#
# Asking
#


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
    - `platform`: `"cpu"`, `"cuda"`, `"tpu"` or `"rocm"`; the default backend's unless given. One device of it is meant:
        on several TPUs, outside of `shard_map`, products are for `"xla"`.

    **Returns:**

    An object with `.implementation`, `.verdicts` (one per implementation) and `.to_dict()`, that prints as a table.

    **Raises:**

    `TypeError` if nothing is quantized, `ValueError` if contracted lengths differ or there is no such platform.
    """
    left = not is_quantized(w)
    q, other = (x, w) if left else (w, x)
    if not is_quantized(q):
        raise TypeError("`explain_matmul` needs a quantized operand. Got none. Quantize `x` or `w` first.")
    platform = _platform(platform)
    other = other if isinstance(other, jax.ShapeDtypeStruct) or is_quantized(other) else jnp.asarray(other)
    dtype = jnp.dtype(jnp.result_type(other.dtype, q.dtype))
    shape = (1, *other.shape) if len(other.shape) == 1 else other.shape
    if not q._multiplies or len(shape) < 2:
        why = "it has one dimension" if q.ndim < 2 else f"the quantized axis {q.axis} is not one of the last two"
        why = "the other operand is a scalar" if len(shape) < 2 else why
        problem = MatmulProblem(1, math.prod(q.shape[:-1]), q.shape[-1], dtype, q.format, False)
        return MatmulExplanation(problem, platform, "dense", {"dense": f"{why}: dequantize, then multiply"})
    contracted = q._contracted(other.shape, left=left)
    m = shape[-1] if left and len(other.shape) > 1 else shape[-2]
    rows = q._memory_order()
    if rows.ndim == 2:
        m *= math.prod(shape[:-2])
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    problem = MatmulProblem(m, rows.shape[-2], rows.shape[-1], dtype, q.format, q._axes != (contracted,), precision)
    target = Target(platform)
    name, reason = choose(target, problem, None)
    verdicts = {other_name: _refusal(target, problem, other_name) or "possible" for other_name in _IMPLEMENTATIONS}
    return MatmulExplanation(problem, platform, name, {**verdicts, name: f"chosen: {reason}"})


def _platform(name: str | None) -> str:
    name = name or jax.default_backend()
    name = {"gpu": "cuda"}.get(name, name)
    if name not in ("cpu", "cuda", "rocm", "tpu"):
        raise ValueError(f"`platform` must be one of cpu, cuda, rocm, tpu. Got {name!r}.")
    return name
