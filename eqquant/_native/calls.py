"""The FFI calls of `eqquant-cpu`, on raw arrays. `native/src/ffi` is the other side."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Float32, Int32, Shaped, UInt8

from . import library
from .encoding import Scaling, Steps
from .weight import Layout, StoredWeight


DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
CacheRows = tuple[StoredWeight, Layout] | Float[Array, "*batch heads places size"]  # keys or values
_SCALES = ("float32", "float16", "bfloat16", "e8m0", "e4m3", "e5m2", "ue4m4")
_RULES = ("steps", "even", "up")
_CODECS = ("trellis", "grid")
_REDUCTIONS = ("amax", "signed_amax", "low", "high")


def multiply(
    name: str,
    x: Shaped[Array, "*batch m columns"],
    weight: StoredWeight,
    layout: Layout,
    outer: int,
    dtype: DTypeLike,
    column_major: tuple[bool, bool],
    *more: Array,
    **attributes: bool,
) -> Float[Array, "*batch m outer"]:
    """Calls a product, `MATMUL` or `MATMUL_INT8`.

    `more` operands and `attributes` belong to one of the two.

    `column_major`: whether memory holds `x`, and the result, by columns. The kernel then reads or writes the transpose,
    so that the transposes of its caller cancel.
    """
    transpose_if = lambda column_major, a: jnp.swapaxes(a, -1, -2) if column_major else a
    m, (x_by_columns, y_by_columns) = x.shape[-2], column_major
    shape = (outer, m) if y_by_columns else (m, outer)
    call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((*x.shape[:-2], *shape), dtype), vmap_method="broadcast_all")
    y = call(
        transpose_if(x_by_columns, x),
        *_arrays(weight),
        *more,
        **_attributes(weight, layout),
        x_transposed=x_by_columns,
        y_transposed=y_by_columns,
        **attributes,
    )
    return transpose_if(y_by_columns, y)


def why_not_decode(layout: Layout, dtype: DTypeLike) -> str | None:
    """Returns why `decode` cannot return values of this dtype, or `None` if it can."""
    if jnp.dtype(dtype) not in DTYPES:
        return f"it decodes to float32, bfloat16 and float16, not {jnp.dtype(dtype)}"
    if layout.offsets:
        return "it adds no offsets of blocks"
    if not layout.table:
        return "it looks each code up in a table, and these codes stand for several values"
    return "there is nothing to decode" if layout.length == 0 else library.refusal()


def decode(weight: StoredWeight, layout: Layout, dtype: DTypeLike, *, clip: bool) -> Float[Array, "*batch k"]:
    """Decodes to a dense weight, with the same bits as XLA, unless `why_not_decode`.

    The weight may have a single row without an axis for it. With `clip`, clips to the finite range of `dtype`.
    """
    shape = (*weight.codes.shape[:-1], layout.length)
    rows = [a.reshape(-1, a.shape[-1]) if a.ndim < 2 else a for a in _arrays(weight)]
    result = jax.ShapeDtypeStruct((*rows[0].shape[:-1], layout.length), dtype)
    call = jax.ffi.ffi_call(library.DECODE, result, vmap_method="broadcast_all")
    return call(*rows, **_attributes(weight, layout), clip=clip).reshape(shape)


def why_not_encode(rows: Float[Array, "*batch length"], bits: int) -> str | None:
    """Returns why `encode` cannot take values to codes of so many bits, or `None` if it can."""
    if rows.dtype not in DTYPES or rows.size == 0:
        return "it encodes float32, bfloat16 and float16, and at least one value"
    return "XLA is as fast at eight bits" if bits == 8 else library.refusal()


def encode(
    rows: Float[Array, "*batch length"],
    scaling: Scaling,
    steps: Steps,
    bits: int,
    block_size: int,
    packed_length: int,
) -> UInt8[Array, "*batch bytes"]:
    """Returns the packed codes of the scaled values, unless `why_not_encode`.

    The kernel compares floats with the thresholds between codes, so it serves every format. Results have the bits of
    XLA's operations, except where a scale is NaN, and for the sign of zeros.
    """
    *batch, _ = rows.shape
    blocks = [a for a in scaling if a is not None]
    as_rows = lambda a: a.reshape(-1, a.shape[-1])
    by_rule = steps.rule != "steps"
    result = jax.ShapeDtypeStruct((as_rows(rows).shape[0], packed_length), jnp.uint8)
    packed = jax.ffi.ffi_call(library.ENCODE, result)(
        *map(as_rows, (rows, *blocks)),
        bits=np.int32(bits),
        block_size=np.int64(block_size),
        factor=scaling.factor is not None,
        offset=scaling.offset is not None,
        shift=scaling.shift is not None,
        rule=np.int32(_RULES.index(steps.rule)),
        bias=np.float32(steps.bias),
        nan=np.int32(steps.nan),
        steps=steps.thresholds[:0] if by_rule else steps.thresholds,
        codes=steps.codes[:1] if by_rule else steps.codes,
    )
    return packed.reshape(*batch, packed_length)


def encode_trellis(
    values: Float32[Array, "*batch rows length"],
    weights: Float32[Array, "*batch rows length"],
    feedback: Float32[Array, "*batch length length"] | None,
    bits: int,
    multipliers: int,
    packed_length: int,
) -> UInt8[Array, "*batch rows bytes"]:
    """Returns the packed codes of the best sequences, unless `why_not_encode`.

    As `_numerics/trellis.py` says; another sequence of nearly the same error may be found.
    """
    result = jax.ShapeDtypeStruct((*values.shape[:-1], packed_length), jnp.uint8)
    more = () if feedback is None else (feedback,)
    call = jax.ffi.ffi_call(library.ENCODE_TRELLIS, result)
    return call(values, weights, *more, bits=np.int32(bits), multipliers=np.int64(multipliers))


def why_not_reduce(blocks: Float[Array, "*batch blocks block"]) -> str | None:
    """Returns why `reduce` cannot take blocks, or `None` if it can."""
    if blocks.dtype != jnp.float32 or blocks.size == 0:
        return "it reduces float32, and at least one value"
    return library.refusal()


def reduce(blocks: Float32[Array, "*batch blocks block"], kind: str) -> Float32[Array, "*batch blocks 1"]:
    """Reduces blocks as `_numerics/reduce.py` says, unless `why_not_reduce`."""
    *batch, length = blocks.shape
    if kind == "not_finite":
        return reduce(blocks, "amax") * 0
    count = blocks.size // length
    call = jax.ffi.ffi_call(library.REDUCE, jax.ShapeDtypeStruct((count,), jnp.float32))
    return call(blocks.reshape(count, length), kind=np.int32(_REDUCTIONS.index(kind))).reshape(*batch, 1)


def why_not_attend(queries: Float[Array, "*batch heads rows size"]) -> str | None:
    """Returns why `attend` cannot take these queries, or `None` if it can."""
    if queries.dtype not in DTYPES or queries.size == 0:
        return "it attends with float32, bfloat16 and float16, and at least one query"
    return library.refusal()


def attend(
    queries: Float[Array, "*batch heads rows size"],
    positions: Int32[Array, "*batch tokens"],
    length: Int32[Array, "*batch"],
    window: Int32[Array, "*batch"],
    keys: CacheRows,
    values: CacheRows,
    *,
    scale: float,
    cap: float,
) -> Float[Array, "*batch heads rows size"]:
    """Computes attention to the filled places of a cache, unless `why_not_attend`.

    Row `r` of a head belongs to token `r % tokens`. `native/src/attention` says more.
    """
    arrays: list[Array] = []
    attributes: dict[str, np.ndarray] = {}
    for name, rows in (("key", keys), ("value", values)):
        arrays += _arrays(rows[0]) if isinstance(rows, tuple) else [rows]
        described = _attributes(*rows) if isinstance(rows, tuple) else _NO_WEIGHT
        attributes |= {f"{name}_{attribute}": value for attribute, value in described.items()}
    call = jax.ffi.ffi_call(library.ATTENTION, jax.ShapeDtypeStruct(queries.shape, queries.dtype))
    return call(queries, positions, length, window, *arrays, **attributes, scale=np.float32(scale), cap=np.float32(cap))


def has_byte_codes(layout: Layout) -> bool:
    """Returns whether kernels read a byte for each code: of eight bits, or unpacked from parts."""
    return layout.bits not in (1, 2, 4)


def _arrays(weight: StoredWeight) -> list[Array]:
    return [a for a in weight if a is not None]


def _attributes(weight: StoredWeight, layout: Layout) -> dict[str, np.ndarray]:
    """Returns the attributes that describe a weight: `WeightAttr` in `native/src/ffi`."""
    nested, codec = layout.nested, layout.codec
    codes = (layout.bits, layout.length, layout.block_size)
    scales = (0, 0) if nested is None else (nested.bits, nested.block_size)
    present = [a is not None for a in weight[2:]]
    fields = (*codes, _SCALES.index((nested or layout).scale), _decode_kind(layout), *scales, *present)
    return {
        "table": np.asarray(layout.table, np.float32),
        "scale_table": np.asarray(() if nested is None else nested.table, np.float32),
        "weight": np.asarray(fields, np.int64),
        "codec": np.asarray(() if codec is None else (_CODECS.index(codec.kind), *codec.parameters), np.int64),
        "vectors": np.frombuffer(b"" if codec is None else codec.vectors, np.int8),
    }


# In place of the attributes of a weight.
_NO_WEIGHT = {
    **dict.fromkeys(("table", "scale_table"), np.zeros(0, np.float32)),
    **dict.fromkeys(("weight", "codec"), np.zeros(0, np.int64)),
    "vectors": np.zeros(0, np.int8),
}


def _decode_kind(layout: Layout) -> int:
    """Returns how to decode codes of eight bits, as a number of the C++ interface."""
    return ("table", "integer", "float8_e4m3fn", "float8_e5m2").index(layout.kind) if has_byte_codes(layout) else 0
