"""Chooses and runs the implementation of a quantized matmul.

`IMPLEMENTATIONS` lists all of them, and `_PREFERENCES` the order of choice. Formats and kernels meet only here: a
kernel takes a `PackedWeight` and the value of each code, so it works for every format.
"""

import dataclasses
import functools as ft
import importlib
import math
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, Float32

from .. import _compat
from .._array.array import QuantizedArray
from .._array.dequantize import as_scale_bits, as_stored, dequantize_rows, split_row_scale
from .._formats import Int8
from .._formats.base import has_zero_points
from .._native import library
from .._native.weight import StoredWeight
from .._numerics.scale_bits import scale_to_bits
from .kernels import scaled_matmul, xla, xla_codes, xla_cpu
from .kernels.packed import as_integers, decode_bytes, PackedWeight
from .problem import MatmulProblem, TargetDevice
from .rows import AbstractRows, Activations, StaticRows
from .selected import SelectedArray


class _Needs(NamedTuple):
    """What an implementation needs, whatever the product."""

    platform: str = ""  # "" for any
    exported: str | None = None  # why an exported program cannot hold it
    backend: str = ""  # the backend of Pallas
    jax: tuple[int, int] = (0, 0)  # the first release of JAX with which it works
    capabilities: tuple[float, float] = (0.0, math.inf)  # of NVIDIA GPUs: the least, and the first that is too new

    def refusal(self, target: TargetDevice) -> str | None:
        """Returns what is missing, or `None`."""
        least, too_new = self.capabilities
        if self.platform not in ("", target.platform):
            return f"it is for {self.platform}, and this is {target.platform}"
        if self.platform and target.kernel_refusal is not None:
            return target.kernel_refusal
        if target.exported and self.exported is not None:
            return self.exported
        if target.platform == "cuda" and not least <= target.capability < too_new:
            needed = f"{least}" if too_new == math.inf else f"{least} or newer, and older than {too_new}"
            return f"the GPU has compute capability {target.capability}, and the kernel needs {needed}"
        if jax.__version_info__ < self.jax:
            return f"it needs JAX {self.jax[0]}.{self.jax[1]} or newer, and this is {jax.__version__}"
        return self.missing_backend()

    def missing_backend(self) -> str | None:
        """Returns that this release of JAX does not have the backend, or `None` if it has."""
        if self.backend and _compat.pallas_backend(self.backend) is None:
            return f"JAX {jax.__version__} has no `jax.experimental.pallas.{self.backend}`"
        return None


class _Implementation(NamedTuple):
    needs: _Needs
    refusal: Callable[[MatmulProblem, TargetDevice], str | None]  # why it cannot take the product, or `None`
    run: Callable[..., Array]  # takes `x`, `w`, the problem and the target
    # Whether it multiplies the codes of quantized activations. Otherwise it gets their values.
    multiplies_codes: Callable[[MatmulProblem, TargetDevice], bool] = lambda problem, target: False
    reads_stack: bool = False  # whether it reads selected arrays in the stack, without a copy


def _wrap_kernel(load: Callable[[], ModuleType], needs: _Needs, *, takes_stored: bool = False) -> _Implementation:
    """Returns the implementation of a kernel module, which is imported at first use.

    The module has the functions `refusal` and `matmul`. `matmul` takes matrices; with `takes_stored` it also takes
    leading batch axes, matrices by rows or by columns, arrays as they are stored, and selections from a stack.
    """

    def refusal(problem: MatmulProblem, target: TargetDevice) -> str | None:
        precision = _precision(problem)
        if precision is None:
            return f"the precision is {problem.precision}, and it supports only the default and the highest"
        options = {"transpose": problem.transpose, "precision": precision, "target": target}
        return load().refusal(problem.layout, problem.m, problem.n, problem.dtype, **options)

    def run(x: Array, w: Any, problem: MatmulProblem, target: TargetDevice) -> Array:
        product = ft.partial(
            load().matmul,
            layout=problem.layout,
            transpose=problem.transpose,
            precision=_precision(problem),
            target=target,
            **({"column_major": problem.column_major} if takes_stored else {}),
        )
        if takes_stored:
            return product(x, as_stored_weight(w))
        batch, weight = x.shape[:-2], as_packed_weight(w)
        if not batch:
            return product(x, weight)
        flat = jtu.tree_map(lambda a: a.reshape(math.prod(batch), *a.shape[-2:]), (x, weight))
        y = jax.vmap(product)(*flat)
        return y.reshape(*batch, *y.shape[1:])

    return _Implementation(needs, refusal, run, reads_stack=takes_stored)


def _run_xla(x: Any, w: QuantizedArray, problem: MatmulProblem, target: TargetDevice) -> Array:
    operand_type = xla_operand_type(problem, target)
    if operand_type is not None:
        looped = target.platform == "cpu" and target.kernel_refusal is None and not target.exported
        x = as_quantized(x)
        y = xla_codes.matmul(
            as_packed_weight(x), as_packed_weight(w), problem.x_layout, problem.layout, operand_type, looped=looped
        )
        return y.astype(problem.dtype)
    layout, transpose, precision = problem.layout, problem.transpose, problem.precision
    if target.platform == "cpu" and layout.has_vectors:
        dtype = w.dtype if w.dtype.itemsize < x.dtype.itemsize else xla.accumulator(x.dtype)
        rows, options = dataclasses.replace(w, logical_dtype=dtype), {"transpose": transpose, "precision": precision}
        return xla_cpu.matmul_vectors(x, rows, dequantize_rows, layout.length, **options)
    if target.platform == "cpu":
        return xla_cpu.matmul(x, as_packed_weight(w), layout, w.dtype, transpose=transpose, precision=precision)
    if _is_eight_bit_per_channel(problem):
        # Per-channel scales multiply the results, or with `transpose` the operand. Decoding the weight is then a single
        # conversion, which XLA fuses into the product.
        decode = ft.partial(decode_bytes, layout=layout, dtype=x.dtype)
        return xla.multiply_scaled(
            x, as_packed_weight(w), decode, w.scale[..., 0], transpose=transpose, precision=precision
        )
    return xla.multiply_decoded(x, w, QuantizedArray.dequantize, transpose=transpose, precision=precision)


def xla_operand_type(problem: MatmulProblem, target: TargetDevice) -> xla_codes.OperandType | None:
    """Returns the type in which `xla` multiplies codes by codes, or `None` if it decodes them."""
    if problem.activations is None or problem.transpose or problem.dtype.itemsize > 4:
        return None
    if problem.layout.has_vectors or problem.x_layout.has_vectors:
        return None
    return xla_codes.choose_operand_type(problem.x_layout, problem.layout, target)


def decode_activations(problem: MatmulProblem, target: TargetDevice) -> MatmulProblem:
    """Returns the problem with decoded activations, in a float dtype that holds them exactly."""
    if problem.activations is None:
        return problem
    is_exact = problem.dtype == jnp.bfloat16 and xla_operand_type(problem, target) == "bfloat16"
    wide = problem.dtype if is_exact or problem.dtype.itemsize > 4 else jnp.dtype(jnp.float32)
    return problem._replace(activations=None, dtype=wide)


def _factor_out_row_scale(q: QuantizedArray) -> tuple[QuantizedArray, Float32[Array, "*batch rows 1"] | None]:
    """Splits the float32 factor of each row from its scales."""
    scale = q.scale_bits
    if isinstance(scale, QuantizedArray):
        inner, factor = _factor_out_row_scale(scale)
        return dataclasses.replace(q, scale_bits=inner), factor
    if scale.shape[-1] > 1:
        return q, None
    ones = scale_to_bits(jnp.ones(scale.shape, jnp.float32), q.format.scale_dtype)
    return dataclasses.replace(q, scale_bits=ones), q.scale


def as_quantized(x: Activations) -> QuantizedArray:
    """Returns activations as codes, without a gradient. Quantizes rows of floats."""
    x = x.quantize() if isinstance(x, AbstractRows) else x
    return dataclasses.replace(x, gradient_of=None)  # pyright: ignore[reportReturnType, reportArgumentType]


def _codes_refusal(problem: MatmulProblem) -> str | None:
    """Returns why codes cannot be multiplied with codes, or `None` if they can."""
    if problem.activations is None:
        return "it multiplies codes with codes, and one operand is in float"
    return "the sum runs across the blocks of the weight" if problem.transpose else None


def _scaled_matmul_refusal(problem: MatmulProblem, target: TargetDevice) -> str | None:
    del target
    return _codes_refusal(problem) or scaled_matmul.refusal(problem.x_layout, problem.layout)


def _run_scaled_matmul(x: Activations, w: QuantizedArray, problem: MatmulProblem, target: TargetDevice) -> Array:
    del target
    operands = as_packed_weight(as_quantized(x)), as_packed_weight(w)
    return scaled_matmul.matmul(*operands, problem.x_layout, problem.layout).astype(problem.dtype)


def _cpu_int8_refusal(problem: MatmulProblem, target: TargetDevice) -> str | None:
    if (why := _codes_refusal(problem)) is not None:
        return why
    layout = problem.x_layout
    if layout.kind != "integer" or layout.bits != 8 or not layout.per_channel or not -255 <= layout.lowest <= 0:
        return f"it takes eight-bit integers with one scale for each row of activations, not {problem.activations!r}"
    return import_kernel("cpu_int8").refusal(problem.layout, problem.m, problem.n, problem.dtype, target=target)


def _run_cpu_int8(
    x: Activations, w: QuantizedArray | SelectedArray, problem: MatmulProblem, target: TargetDevice
) -> Array:
    del target
    product = ft.partial(import_kernel("cpu_int8").matmul, layout=problem.layout, column_major=problem.column_major)
    weight = as_stored_weight(w)
    if isinstance(x, AbstractRows) and x.format in _QUANTIZED_IN_KERNEL:
        static = {"x_scale": x.scale, "x_zero": x.zero_point} if isinstance(x, StaticRows) else {}
        return product(x.rows, weight, affine=has_zero_points(x.format), **static)
    q = as_quantized(x)
    x, scale, zero, offset = q.codes, q.scale, q.zero_point, problem.x_layout.lowest
    if zero is None and offset != -128:
        zero = jnp.full(scale.shape, -offset, jnp.uint8)
    return product(x, weight, x_scale=scale, x_zero=zero, dtype=problem.dtype)


# The formats to which the kernel itself quantizes rows of activations, per token.
_QUANTIZED_IN_KERNEL = tuple(
    Int8(size, symmetric=symmetric) for size in (None, "tensor") for symmetric in (True, False)
)


def _is_eight_bit_per_channel(p: MatmulProblem) -> bool:
    """Returns whether the weight is int8 or float8 with per-channel scales, and nothing else."""
    layout = p.layout
    # The transposed product multiplies `x` by the scales first, which might underflow in float16.
    can_scale = not (p.transpose and p.dtype == jnp.float16)
    plain = layout.kind != "table" and not (layout.zero_points or layout.offsets or layout.has_vectors)
    return can_scale and layout.per_channel and layout.bits == 8 and plain


def _never_refuse(problem: MatmulProblem, target: TargetDevice) -> None:
    del problem, target


def import_kernel(name: str) -> ModuleType:
    """Imports a module of `kernels/`.

    Call it at first use: importing Pallas takes as long as importing JAX.
    """
    return importlib.import_module(f".kernels.{name}", __package__)


_LIBRARY = _Needs("cpu", "an exported program may not call a library that the machine it runs on may lack")
# https://github.com/jax-ml/jax/issues/25196
_GPU = _Needs("cuda", "an exported program may not hold kernels for GPUs, which JAX does not promise to keep")

IMPLEMENTATIONS = {
    "cpu": _wrap_kernel(ft.partial(import_kernel, "cpu"), _LIBRARY, takes_stored=True),
    "cpu_int8": _Implementation(
        _LIBRARY, _cpu_int8_refusal, _run_cpu_int8, multiplies_codes=lambda problem, target: True, reads_stack=True
    ),
    "mosaic_gpu": _wrap_kernel(
        ft.partial(import_kernel, "mosaic_gpu"),
        _GPU._replace(backend="mosaic_gpu", jax=(0, 12), capabilities=(9.0, 11.0)),
    ),
    "pallas_gpu": _wrap_kernel(
        ft.partial(import_kernel, "triton.product"), _GPU._replace(backend="triton", capabilities=(8.0, math.inf))
    ),
    "pallas_tpu": _wrap_kernel(ft.partial(import_kernel, "pallas_tpu"), _Needs("tpu", backend="tpu")),
    "scaled_matmul": _Implementation(
        _GPU._replace(capabilities=(10.0, math.inf)),
        _scaled_matmul_refusal,
        _run_scaled_matmul,
        multiplies_codes=lambda problem, target: True,
    ),
    "xla": _Implementation(
        _Needs(), _never_refuse, _run_xla, lambda problem, target: xla_operand_type(problem, target) is not None
    ),
}


class _Preference(NamedTuple):
    platform: str  # "" for any
    implementation: str
    when: Callable[[MatmulProblem, TargetDevice], bool]
    reason: str


_FUSED = "XLA fuses the one conversion of the weight into the product; per-channel scales multiply the results"
_FEW_ROWS = "few rows: the packed weight is decoded on the chip, where XLA would write a dense one to memory"
_GENERIC_ISA = "only the native kernels in plain C++ run here, and XLA is faster: it uses vector instructions"
_MANY_ROWS = "many rows: decoding to a dense weight in memory, once, costs less than decoding for every tile of rows"

_INTEGERS = "integers times integers: sums are exact, and rows of floats are quantized inside the kernel"
_SMALL = "codes times codes in a small type, which the platform multiplies faster than floats"


def _both_integer(problem: MatmulProblem) -> bool:
    if problem.activations is None:
        return False
    return xla_codes.is_integer(problem.x_layout) and xla_codes.is_integer(as_integers(problem.layout)[0])


_SLOW = 2**20  # weights of at least so many values warn if there are no kernels

# The first preference that applies wins, unless its implementation refuses the product.
_PREFERENCES = (
    _Preference("cpu", "cpu_int8", lambda p, _: _both_integer(p) and library.isa() != "generic", _INTEGERS),
    _Preference("", "xla", lambda p, target: xla_operand_type(p, target) in ("int8", "float8"), _SMALL),
    _Preference("cuda", "xla", lambda p, _: _is_eight_bit_per_channel(p), _FUSED),
    _Preference("cuda", "pallas_gpu", lambda p, _: p.m <= 256, _FEW_ROWS),
    _Preference("cuda", "xla", lambda p, _: True, _MANY_ROWS),
    _Preference("tpu", "xla", lambda p, _: _is_eight_bit_per_channel(p), _FUSED),
    _Preference("tpu", "pallas_tpu", lambda p, _: p.m <= (256 if p.layout.per_channel else 64), _FEW_ROWS),
    _Preference("tpu", "xla", lambda p, _: True, _MANY_ROWS),
    _Preference("cpu", "xla", lambda p, _: library.isa() == "generic", _GENERIC_ISA),
    _Preference("cpu", "cpu", lambda p, _: True, "the packed weight is decoded in registers and in the cache"),
    _Preference(
        "cpu",
        "xla",
        lambda p, _: True,
        "XLA on CPU never fuses a decode, so the weight is decoded a few rows at a time, plane by plane",
    ),
    _Preference("", "xla", lambda p, _: True, "XLA fuses the decode into the product where it can"),
)


def _preferences(target: TargetDevice, problem: MatmulProblem) -> list[_Preference]:
    """Returns the rows of the table that apply, the best first."""
    rules = [r for r in _PREFERENCES if r.platform in ("", target.platform)]
    if not isinstance(problem.m, int):  # exported for any number of rows
        rules = [r for r in rules if r.implementation == "xla"]
    return [r for r in rules if r.when(problem, target)]


def choose(target: TargetDevice, problem: MatmulProblem, forced: str | None) -> tuple[str, str]:
    """Returns the name of the implementation to run, and the reason.

    **Raises:**

    `ValueError` if the implementation `forced` is unknown or refuses the product.
    """
    if forced is not None:
        refusal = find_refusal(target, problem, forced)
        if refusal is not None:
            raise ValueError(f'`implementation={forced!r}` cannot take this product: {refusal}. Use "xla", or None.')
        return forced, "forced"
    preferred = _preferences(target, problem)
    refusals = [find_refusal(target, problem, rule.implementation) for rule in preferred]
    accepted = refusals.index(None)
    if accepted > 0:
        return preferred[accepted].implementation, f"{preferred[0].implementation} would be better, but: {refusals[0]}"
    return preferred[0].implementation, preferred[0].reason


def run_implementation(
    x: Activations, w: QuantizedArray | SelectedArray, problem: MatmulProblem, target: TargetDevice, forced: str | None
) -> Float[Array, "*batch rows outer"]:
    """Computes a product with the implementation `forced`, or else with the one to `choose`.

    `x` may be floats, codes, or rows to quantize. An implementation that cannot multiply codes gets their values.
    """
    name, _ = choose(target, problem, forced)
    implementation = IMPLEMENTATIONS[name]
    size = problem.n * problem.k  # unknown in some exported programs
    if forced is None and isinstance(size, int) and size >= _SLOW:
        _warn_of_missing_kernels(target, problem)
    if isinstance(w, SelectedArray) and not implementation.reads_stack:
        if w.index.size > w.stack.shape[0]:
            return _multiply_in_loop(x, w, problem, target, name)
        w = w.gather()
    if problem.activations is None or implementation.multiplies_codes(problem, target):
        return implementation.run(x, w, problem, target)
    float_problem, q, factor = decode_activations(problem, target), as_quantized(x), None
    if xla_operand_type(problem, target) == "bfloat16":
        # Without the factor of its row, every value is exact in bfloat16.
        q, factor = _factor_out_row_scale(q)
    values = dataclasses.replace(q, logical_dtype=float_problem.dtype).dequantize()
    y = implementation.run(values, w, float_problem, target)
    if factor is not None:
        y = y.astype(jnp.float32) * jnp.broadcast_to(factor, y.shape)
    return y.astype(problem.dtype)


def _warn_of_missing_kernels(target: TargetDevice, problem: MatmulProblem) -> None:
    """Warns, once in a process, if XLA computes a product for lack of a kernel."""
    if find_refusal(target, problem, "cpu") == library.MISSING:
        library.warn_of_slow_products()
    best = _preferences(target, problem)[0].implementation
    missing = IMPLEMENTATIONS[best].needs.missing_backend()
    if missing is not None and find_refusal(target, problem, best) == missing:
        needs = {name: each.needs for name, each in IMPLEMENTATIONS.items() if each.needs.platform == target.platform}
        others = [name for name, each in needs.items() if each.refusal(target) is None]
        _warn_of_missing_backend(missing, "".join(f", or use `implementation={name!r}`" for name in others))


@ft.cache
def _warn_of_missing_backend(missing: str, instead: str) -> None:
    remedy = f"Install a release of JAX that has it{instead}."
    warnings.warn(f"Products with quantized weights are slow on this device: {missing}. {remedy}", stacklevel=2)


def _multiply_in_loop(x: Any, w: SelectedArray, problem: MatmulProblem, target: TargetDevice, name: str) -> Array:
    """Multiplies selected arrays one at a time: copies of all would exceed the stack."""
    batch = w.index.shape
    flat = jtu.tree_map(lambda a: a.reshape(w.index.size, *a.shape[len(batch) :]), (x, w.index))

    def multiply_one(operands: tuple[Any, Array]) -> Array:
        x, index = operands
        return run_implementation(x, dataclasses.replace(w, index=index).gather(), problem, target, name)

    y = jax.lax.map(multiply_one, flat)
    return y.reshape(*batch, *y.shape[1:])


def find_refusal(target: TargetDevice, problem: MatmulProblem, name: str) -> str | None:
    """Returns why the implementation `name` cannot take the product, or `None` if it can.

    **Raises:**

    `ValueError` if `name` is unknown.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"`implementation` must be one of {', '.join(IMPLEMENTATIONS)}, or None. Got {name!r}.")
    implementation = IMPLEMENTATIONS[name]
    if (missing := implementation.needs.refusal(target)) is not None:
        return missing
    is_kernel, layout = bool(implementation.needs.platform), problem.layout
    if is_kernel and not isinstance(problem.m, int):
        return "the number of rows is symbolic"
    if is_kernel and layout.has_vectors and (target.platform != "cpu" or not layout.table):
        return f"it looks each code up in a table, and a code of {problem.format!r} stands for several values"
    multiplies_codes = implementation.multiplies_codes(problem, target)
    return implementation.refusal(problem if multiplies_codes else decode_activations(problem, target), target)


def describe_types(problem: MatmulProblem, target: TargetDevice, name: str) -> str:
    """Describes the types that an implementation multiplies, and the type of its sums."""
    by_xla = xla_operand_type(problem, target) if name == "xla" else None
    operand_type = "int8" if name == "cpu_int8" else by_xla
    if operand_type == "int8":
        return "int8 x int8, sums in int32"
    if operand_type is not None:
        kinds = [problem.x_layout.kind, problem.layout.kind]
        types = kinds if operand_type == "float8" else [operand_type] * 2
        return f"{' x '.join(types)}, sums in float32"
    wide = decode_activations(problem, target).dtype
    sums = "float64" if wide.itemsize > 4 else "float32"
    return f"{wide} x {wide} (decoded), sums in {sums}"


def decode_reason(problem: MatmulProblem, target: TargetDevice, name: str) -> str | None:
    """Returns why an implementation decodes activations, `None` if it multiplies codes."""
    if problem.activations is None or IMPLEMENTATIONS[name].multiplies_codes(problem, target):
        return None
    if problem.transpose or problem.dtype.itemsize > 4:
        return "the sum runs across the blocks of the weight" if problem.transpose else "float64 holds more than codes"
    sides = ((problem.format, problem.layout), (problem.activations, problem.x_layout))
    non_integer = [repr(format) for format, layout in sides if layout.has_vectors or not xla_codes.is_integer(layout)]
    if non_integer:
        levels = f"the levels of {' and '.join(non_integer)} are not integers"
        return f"{target.platform} has no type that multiplies the codes of both: {levels}"
    return "too few codes share both scales"


def as_packed_weight(w: QuantizedArray) -> PackedWeight:
    """Returns the arrays of a weight for XLA and Pallas, with zero points unpacked."""
    scale, row_scale = split_row_scale(w)
    return PackedWeight(w.codes, as_scale_bits(scale), row_scale, w.zero_point, w.offset)


def as_stored_weight(w: QuantizedArray | SelectedArray) -> StoredWeight:
    """Returns the arrays of a weight as they are stored, for native kernels."""
    if isinstance(w, SelectedArray):
        return as_stored(w.stack)._replace(selected=w.index)
    return as_stored(w)


def _precision(problem: MatmulProblem) -> str | None:
    """Returns a kernel's precision: "fastest", "default" or "highest", `None` for any other.

    "default" is the platform's own choice for float32: tfloat32 or bfloat16 where it has units for them, float32 on
    CPU. "fastest" allows lower precision on CPU too.
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
