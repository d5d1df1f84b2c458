"""Chooses the implementation of a quantized matmul. The only place where formats and kernels meet.

`IMPLEMENTATIONS` lists all of them, and `_PREFERENCES` the order of choice. Kernels know no formats: they take a
`Packed` weight and a table of values, made by decoding every code of the format. So they take any format.
"""

import dataclasses
import functools as ft
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Float32

from .._array.array import QuantizedArray
from .._array.dequantize import dense_rows, plain_bits, split_scales, stored_codes
from .._formats import Int8
from .._formats.base import has_zero_points
from .._native import library
from .._native.layout import Stored
from .._numerics.scale_bits import scale_to_bits
from .kernels import codes, xla, xla_cpu
from .kernels.packed import decode_bytes, Packed
from .problem import MatmulProblem, TargetDevice
from .rows import AbstractRows, Activations, StaticRows
from .selected import SelectedArray


class _Implementation(NamedTuple):
    platforms: tuple[str, ...]  # () for all
    supports: Callable[[MatmulProblem, TargetDevice], str | None]  # the reason why not, or None
    compute: Callable[..., Array]  # of `x`, `w`, the problem and the target
    # Whether it multiplies codes of activations. Otherwise it gets their values.
    takes_codes: Callable[[MatmulProblem, TargetDevice], bool] = lambda problem, target: False
    selects: bool = False  # whether it reads arrays of a stack where they lie


def _kernel(
    platform: str, load: Callable[[], ModuleType], *, any_layout: bool = False, **more: object
) -> _Implementation:
    """Returns the implementation of a kernel, which takes raw arrays. Imports its module at first use.

    The module has the functions `supports` and `matmul`. `matmul` takes operands of two dimensions; if `any_layout`,
    with any number of leading batch axes, matrices by rows or by columns, all arrays as they are stored, and selections
    from a stack.
    """

    def supports(problem: MatmulProblem, target: TargetDevice) -> str | None:
        precision = _precision(problem)
        if precision is None:
            return f"the precision is {problem.precision}, and it supports only the default and the highest"
        options = {"transpose": problem.transpose, "precision": precision, "target": target}
        return load().supports(problem.layout, problem.m, problem.n, problem.dtype, **options)

    def compute(x: Array, w: Any, problem: MatmulProblem, target: TargetDevice) -> Array:
        product = ft.partial(
            load().matmul,
            layout=problem.layout,
            transpose=problem.transpose,
            precision=_precision(problem),
            target=target,
            **more,
            **({"by_columns": problem.by_columns} if any_layout else {}),
        )
        batch = x.shape[:-2]
        if math.prod(batch) == 0:
            return _xla(x, w, problem, target)
        if any_layout:
            return product(x, stored_arrays(w))
        weight = pack_arrays(w)
        if not batch:
            return product(x, weight)
        one_batch = jtu.tree_map(lambda a: a.reshape(math.prod(batch), *a.shape[-2:]), (x, weight))
        y = jax.vmap(product)(*one_batch)
        return y.reshape(*batch, *y.shape[1:])

    return _Implementation((platform,), supports, compute, selects=any_layout)


def _xla(x: Any, w: QuantizedArray, problem: MatmulProblem, target: TargetDevice) -> Array:
    kind = kind_of_codes(problem, target)
    if kind is not None:
        looped = target.platform == "cpu" and target.no_kernels is None
        x = as_codes(x)
        y = codes.matmul(pack_arrays(x), pack_arrays(w), problem.layout_of_x, problem.layout, kind, looped=looped)
        return y.astype(problem.dtype)
    layout, transpose, precision = problem.layout, problem.transpose, problem.precision
    if target.platform == "cpu" and layout.has_vectors:
        dtype = w.dtype if w.dtype.itemsize < x.dtype.itemsize else xla.accumulator(x.dtype)
        rows, options = dataclasses.replace(w, logical_dtype=dtype), {"transpose": transpose, "precision": precision}
        return xla_cpu.matmul_vectors(x, rows, dense_rows, layout.length, **options)
    if target.platform == "cpu":
        return xla_cpu.matmul(x, pack_arrays(w), layout, w.dtype, transpose=transpose, precision=precision)
    if _has_plain_bytes(problem):
        # The scale of a row can scale the results, or with `transpose` the operand. The weight is then a single
        # conversion, which XLA fuses with the product.
        decode = ft.partial(decode_bytes, layout=layout, dtype=x.dtype)
        return xla.dense_scaled(x, pack_arrays(w), decode, w.scale[..., 0], transpose=transpose, precision=precision)
    return xla.dense(x, w, QuantizedArray.dequantize, transpose=transpose, precision=precision)


def kind_of_codes(problem: MatmulProblem, target: TargetDevice) -> codes.Kind | None:
    """Returns the type in which `xla` multiplies codes with codes, or `None` if it multiplies values."""
    if problem.activations is None or problem.transpose or problem.dtype.itemsize > 4:
        return None
    if problem.layout.has_vectors or problem.layout_of_x.has_vectors:
        return None
    return codes.kind_of(problem.layout_of_x, problem.layout, target)


def decode_activations(problem: MatmulProblem, target: TargetDevice) -> MatmulProblem:
    """Returns the product of the values of the activations, as floats that hold them."""
    if problem.activations is None:
        return problem
    enough = problem.dtype == jnp.bfloat16 and kind_of_codes(problem, target) == "bfloat16"
    wide = problem.dtype if enough or problem.dtype.itemsize > 4 else jnp.dtype(jnp.float32)
    return problem._replace(activations=None, dtype=wide)


def _without_factor(q: QuantizedArray) -> tuple[QuantizedArray, Float32[Array, "*batch rows 1"] | None]:
    """Returns rows without the factor of each, which may need all bits of a float32, and the factor."""
    scale = q.scale_bits
    if isinstance(scale, QuantizedArray):
        inner, factor = _without_factor(scale)
        return dataclasses.replace(q, scale_bits=inner), factor
    if scale.shape[-1] > 1:
        return q, None
    ones = scale_to_bits(jnp.ones(scale.shape, jnp.float32), q.format.scale_dtype)
    return dataclasses.replace(q, scale_bits=ones), q.scale


def as_codes(x: Activations) -> QuantizedArray:
    """Returns quantized activations."""
    x = x.quantized() if isinstance(x, AbstractRows) else x
    return dataclasses.replace(x, gradient_of=None)  # pyright: ignore[reportReturnType, reportArgumentType]


def _cpu_int8_supports(problem: MatmulProblem, target: TargetDevice) -> str | None:
    if problem.activations is None:
        return "it multiplies codes with codes, and one operand is in float"
    if problem.transpose:
        return "the sum runs across the blocks of the weight"
    layout = problem.layout_of_x
    if layout.kind != "integer" or layout.bits != 8 or not layout.one_scale or not -255 <= layout.offset <= 0:
        return f"it takes eight-bit integers with one scale for each row of activations, not {problem.activations!r}"
    return _cpu_int8_kernel().supports(problem.layout, problem.m, problem.n, problem.dtype, target=target)


def _cpu_int8_product(
    x: Activations, w: QuantizedArray | SelectedArray, problem: MatmulProblem, target: TargetDevice
) -> Array:
    del target
    product = ft.partial(_cpu_int8_kernel().matmul, layout=problem.layout, by_columns=problem.by_columns)
    weight = stored_arrays(w)
    if isinstance(x, AbstractRows) and x.format in _ROWS_INSIDE:
        given = {"x_scale": x.scale, "x_zero": x.zero_point} if isinstance(x, StaticRows) else {}
        return product(x.rows, weight, affine=has_zero_points(x.format), **given)
    q = as_codes(x)
    x, scale, zero, offset = q.codes, q.scale, q.zero_point, problem.layout_of_x.offset
    if zero is None and offset != -128:
        zero = jnp.full(scale.shape, -offset, jnp.uint8)
    return product(x, weight, x_scale=scale, x_zero=zero, dtype=problem.dtype)


# What the kernel quantizes rows of floats to.
_ROWS_INSIDE = tuple(Int8(size, symmetric=symmetric) for size in (None, "tensor") for symmetric in (True, False))


def _has_plain_bytes(p: MatmulProblem) -> bool:
    """Returns whether a weight decodes by one conversion of bytes (to integers or small floats) and a scale per row."""
    layout = p.layout
    # The transposed product scales `x` first, which might underflow in float16.
    scalable = not (p.transpose and p.dtype == jnp.float16)
    plain = layout.kind != "table" and not layout.zero_points and not layout.offsets
    return scalable and layout.one_scale and layout.bits == 8 and plain


def _always(problem: MatmulProblem, target: TargetDevice) -> None:
    del problem, target


# Importing Pallas takes as long as importing JAX, so import these at first use.


def _cpu() -> ModuleType:
    from .kernels import cpu

    return cpu


def _cpu_int8_kernel() -> ModuleType:
    from .kernels import cpu_int8

    return cpu_int8


def _pallas_gpu() -> ModuleType:
    from .kernels import pallas_gpu

    return pallas_gpu


def _pallas_tpu() -> ModuleType:
    from .kernels import pallas_tpu

    return pallas_tpu


IMPLEMENTATIONS = {
    "cpu": _kernel("cpu", _cpu, any_layout=True),
    "cpu_int8": _Implementation(
        ("cpu",), _cpu_int8_supports, _cpu_int8_product, takes_codes=lambda problem, target: True, selects=True
    ),
    "pallas_gpu": _kernel("cuda", _pallas_gpu),
    "pallas_tpu": _kernel("tpu", _pallas_tpu),
    "xla": _Implementation((), _always, _xla, lambda problem, target: kind_of_codes(problem, target) is not None),
}


class _Preference(NamedTuple):
    platform: str  # "" for any
    implementation: str
    when: Callable[[MatmulProblem, TargetDevice], bool]
    reason: str


_FUSED = "XLA fuses the one conversion of the weight with the product; scales of rows stay outside"
_FEW_ROWS = "few rows: the packed weight is decoded on the chip, where XLA would write a dense one to memory"
_PLAIN = "of the native kernels only those in plain C++ run here, and XLA's vectors are faster"
_MANY_ROWS = "many rows: decoding to a dense weight in memory, once, costs less than decoding for every tile of rows"

_INTEGERS = "integers times integers, in registers: sums are exact, and rows of floats are quantized inside"
_SMALL = "codes times codes in a small type, which the platform multiplies faster than floats"


def _codes(problem: MatmulProblem) -> bool:
    both = (problem.layout_of_x, problem.layout) if problem.activations is not None else ()
    return bool(both) and all(map(codes.is_integer, both))


# The first row that applies wins, unless its implementation cannot take the product.
_PREFERENCES = (
    _Preference("cpu", "cpu_int8", lambda p, _: _codes(p) and library.isa() != "generic", _INTEGERS),
    _Preference("", "xla", lambda p, target: kind_of_codes(p, target) in ("int8", "float8"), _SMALL),
    _Preference("cuda", "xla", lambda p, _: _has_plain_bytes(p), _FUSED),
    _Preference("cuda", "pallas_gpu", lambda p, _: p.m <= 256, _FEW_ROWS),
    _Preference("cuda", "xla", lambda p, _: True, _MANY_ROWS),
    _Preference("tpu", "xla", lambda p, _: _has_plain_bytes(p), _FUSED),
    _Preference("tpu", "pallas_tpu", lambda p, _: p.m <= (256 if p.layout.one_scale else 64), _FEW_ROWS),
    _Preference("tpu", "xla", lambda p, _: True, _MANY_ROWS),
    _Preference("cpu", "xla", lambda p, _: library.isa() == "generic", _PLAIN),
    _Preference("cpu", "cpu", lambda p, _: True, "the packed weight is decoded in registers and in the cache"),
    _Preference(
        "cpu",
        "xla",
        lambda p, _: True,
        "XLA on CPU never fuses a decode, so the weight is decoded a few rows at a time, plane by plane",
    ),
    _Preference("", "xla", lambda p, _: True, "XLA fuses what it can of the decode into the product"),
)


def choose(target: TargetDevice, problem: MatmulProblem, forced: str | None) -> tuple[str, str]:
    """Returns the name of the chosen implementation, and the reason.

    **Raises:**

    `ValueError` if the implementation `forced` is unknown or cannot take the product.
    """
    if forced is not None:
        refusal = refusal_of(target, problem, forced)
        if refusal is not None:
            raise ValueError(f'`implementation={forced!r}` cannot take this product: {refusal}. Use "xla", or None.')
        return forced, "forced"
    rules = [r for r in _PREFERENCES if r.platform in ("", target.platform)]
    if not isinstance(problem.m, int):  # the program is exported for any number of rows
        rules = [r for r in rules if r.implementation == "xla"]
    preferred = [r for r in rules if r.when(problem, target)]
    refusals = [refusal_of(target, problem, rule.implementation) for rule in preferred]
    taken = refusals.index(None)
    if taken > 0:
        return preferred[taken].implementation, f"{preferred[0].implementation} would be better, but: {refusals[0]}"
    return preferred[0].implementation, preferred[0].reason


def compute(
    x: Activations, w: QuantizedArray | SelectedArray, problem: MatmulProblem, target: TargetDevice, forced: str | None
) -> Float[Array, "*batch rows outer"]:
    """Computes a product with the implementation `forced`, or the one to choose.

    `x` is also codes, or rows to quantize. An implementation that does not take codes gets their values.
    """
    name, _ = choose(target, problem, forced)
    implementation = IMPLEMENTATIONS[name]
    if isinstance(w, SelectedArray) and not implementation.selects:
        if w.index.size > w.stack.shape[0]:
            return _one_by_one(x, w, problem, target, name)
        w = w.taken()
    if problem.activations is None or implementation.takes_codes(problem, target):
        return implementation.compute(x, w, problem, target)
    on_values, q, factor = decode_activations(problem, target), as_codes(x), None
    if kind_of_codes(problem, target) == "bfloat16":
        # Then values are exact in the few bits that the platform multiplies.
        q, factor = _without_factor(q)
    values = dataclasses.replace(q, logical_dtype=on_values.dtype).dequantize()
    y = implementation.compute(values, w, on_values, target)
    if factor is not None:
        y = y.astype(jnp.float32) * jnp.broadcast_to(factor, y.shape)
    return y.astype(problem.dtype)


def _one_by_one(x: Any, w: SelectedArray, problem: MatmulProblem, target: TargetDevice, name: str) -> Array:
    """Computes the products with selected arrays in a loop, since copies of them would be larger than the stack."""
    batch = w.index.shape
    flat = jtu.tree_map(lambda a: a.reshape(w.index.size, *a.shape[len(batch) :]), (x, w.index))

    def one(operands: tuple[Any, Array]) -> Array:
        x, index = operands
        return compute(x, dataclasses.replace(w, index=index).taken(), problem, target, name)

    y = jax.lax.map(one, flat)
    return y.reshape(*batch, *y.shape[1:])


def refusal_of(target: TargetDevice, problem: MatmulProblem, name: str) -> str | None:
    """Returns why the implementation `name` cannot take the product, or `None` if it can.

    **Raises:**

    `ValueError` if `name` is unknown.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"`implementation` must be one of {', '.join(IMPLEMENTATIONS)}, or None. Got {name!r}.")
    implementation = IMPLEMENTATIONS[name]
    if implementation.platforms and target.platform not in implementation.platforms:
        return f"it is for {', '.join(implementation.platforms)}, and this is {target.platform}"
    if implementation.platforms and target.no_kernels is not None:
        return target.no_kernels
    if implementation.platforms and not isinstance(problem.m, int):
        return "the number of rows is symbolic"
    if implementation.platforms and problem.layout.has_vectors:
        return f"it looks each code up in a table, and a code of {problem.format!r} stands for several values"
    takes_codes = implementation.takes_codes(problem, target)
    return implementation.supports(problem if takes_codes else decode_activations(problem, target), target)


def multiplied_types(problem: MatmulProblem, target: TargetDevice, name: str) -> str:
    """Returns what an implementation multiplies with what, and the type of its sums, for a reader."""
    kind = "int8" if name == "cpu_int8" else kind_of_codes(problem, target) if name == "xla" else None
    if kind == "int8":
        return "int8 x int8, sums in int32"
    if kind is not None:
        types = [problem.layout_of_x.kind, problem.layout.kind] if kind == "float8" else [kind, kind]
        return f"{' x '.join(types)}, sums in float32"
    wide = decode_activations(problem, target).dtype
    sums = "float64" if wide.itemsize > 4 else "float32"
    return f"{wide} x {wide} (decoded), sums in {sums}"


def why_decoded(problem: MatmulProblem, target: TargetDevice, name: str) -> str | None:
    """Returns why an implementation takes values of activations instead of codes, or `None` if it takes codes."""
    if problem.activations is None or IMPLEMENTATIONS[name].takes_codes(problem, target):
        return None
    if problem.transpose or problem.dtype.itemsize > 4:
        return "the sum runs across the blocks of the weight" if problem.transpose else "float64 holds more than codes"
    sides = ((problem.format, problem.layout), (problem.activations, problem.layout_of_x))
    odd = [repr(format) for format, layout in sides if not codes.is_integer(layout)]
    if odd:
        levels = f"the levels of {' and '.join(odd)} are not integers"
        return f"{target.platform} has no type that multiplies the codes of both: {levels}"
    return "too few codes share both scales"


def pack_arrays(w: QuantizedArray) -> Packed:
    """Returns the arrays of a weight for a kernel: unpacks zero points, decodes offsets and scales that are codes."""
    scale, row_scale = split_scales(w)
    return Packed(w.codes, plain_bits(scale), row_scale, w.zero_point, w.offset)


def stored_arrays(w: QuantizedArray | SelectedArray) -> Stored:
    """Returns the arrays of a weight for `cpu`, as they are stored."""
    if isinstance(w, SelectedArray):
        return stored_codes(w.stack)._replace(selected=w.index)
    return stored_codes(w)


def _precision(problem: MatmulProblem) -> str | None:
    """Returns the precision in the terms of a kernel: "fastest", "default", "highest", or `None` if kernels lack it.

    "default" is what the platform takes for float32: tfloat32 or bfloat16 where it has units for them, float32 on CPU.
    "fastest" allows those everywhere.
    """
    name = problem.precision
    if isinstance(name, tuple) and len(set(name)) == 1:
        name = name[0]
    name = name.name if isinstance(name, jax.lax.Precision) else name
    name = name.lower() if isinstance(name, str) else name
    if name in (None, "default"):
        return "default"
    if name in ("fastest", "bfloat16", "tensorfloat32"):
        return "fastest"
    if name in ("high", "highest", "float32", "bfloat16_3x"):
        # Products of 16 bits are exact in float32 already.
        return "default" if jnp.dtype(problem.dtype).itemsize < 4 else "highest"
    return None
