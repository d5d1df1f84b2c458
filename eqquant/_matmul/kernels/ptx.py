"""Decodes codes in the registers of NVIDIA GPUs, for Pallas-Triton kernels.

- Codes of at most four bits become 16-bit values by `prmt`, the byte permutation of NVIDIA GPUs. Four nibbles of packed
  codes *are* its selectors, so it looks four codes up in a table of eight bytes. Two lookups and a selection make a
  table of sixteen. The low and the high bytes of the values have a table each. This takes two instructions per weight.
- Integers of eight bits become the low mantissa bits of the float32 2**23, which is then subtracted: less than three
  fast instructions, instead of a slow conversion.
- Float32 values and tables of 256 are loaded from a table in memory.

Triton cannot express the first two, so they are inline assembly. Pallas cannot interpret that: `interpret` looks values
up in the table instead, and the tests run the assembly in an emulator.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, DTypeLike, Float, Int32, UInt8

from ..._compat import pallas_triton as plt
from ..._native.weight import Layout


def lookup_asm(bits: int, plane: int) -> str:
    """Returns PTX that decodes a plane of four bytes, `$2`, to 16-bit values in `$0` and `$1`.

    The table is in every fourth operand from `$3` on, since inline assembly has an operand per byte: first the low
    bytes of the values, four to a word, then the high bytes.
    """
    shift, high = bits * plane % 4, bits * plane // 4
    table = [f"${3 + 4 * i}" for i in range(2 * _table_words(bits))]
    lines = [".reg .b32 low, high, index, sign, a, b;"]
    for half, out in ((0, "$0"), (16, "$1")):
        if bits == 4:
            # Three bits of a nibble select within half a table, the fourth between the halves.
            lines += [f"shr.u32 index, $2, {half};", "shr.u32 sign, index, 1;", "and.b32 index, index, 0x77777777;"]
            lines += ["and.b32 sign, sign, 0x44444444;", "or.b32 sign, sign, 0x32103210;"]
            for name, words in (("low", table[:4]), ("high", table[4:])):
                lines += [f"prmt.b32 a, {words[0]}, {words[1]}, index;", f"prmt.b32 b, {words[2]}, {words[3]}, index;"]
                lines += [f"prmt.b32 {name}, a, b, sign;"]
        else:
            mask = "0x33333333" if bits == 2 else "0x11111111"
            lines += [f"shr.u32 index, $2, {half + shift};", f"and.b32 index, index, {mask};"]
            lines += [f"prmt.b32 low, {table[0]}, {table[0]}, index;", f"prmt.b32 high, {table[1]}, {table[1]}, index;"]
        # Two 16-bit values, from the nibbles of this plane: the low or the high nibble of both bytes.
        lines += [f"prmt.b32 {out}, low, high, {'0x7351' if high else '0x6240'};"]
    return "{ " + " ".join(lines) + " }"


def integer_asm(dtype: DTypeLike) -> str:
    """Returns PTX that converts four bytes to `dtype` and subtracts an operand from each.

    Results are in the operands from `$0` on; then come the bytes, then the four numbers to subtract.
    """
    name = {"bfloat16": "bf16", "float16": "f16", "float32": ""}[jnp.dtype(dtype).name]
    first = 2 if name else 4
    out = ["a", "b", "c", "d"] if name else ["$0", "$1", "$2", "$3"]
    lines = [".reg .f32 a, b, c, d;", ".reg .b32 bits;"]
    for i, value in enumerate(out):
        # `code 0 0 0x4b` are the bytes of a float of exponent 23, whose last bits count units.
        lines += [f"prmt.b32 bits, ${first}, 0x4b000000, 0x744{i};", f"mov.b32 {value}, bits;"]
        lines += [f"sub.f32 {value}, {value}, ${first + 1 + i};"]
    if name:
        lines += [f"cvt.rn.{name}x2.f32 $0, b, a;", f"cvt.rn.{name}x2.f32 $1, d, c;"]
    return "{ " + " ".join(lines) + " }"


def _table_words(bits: int) -> int:
    return 4 if bits == 4 else 1


def _looks_up_by_permutation(layout: Layout, dtype: DTypeLike) -> bool:
    """Returns whether `prmt` looks codes up."""
    return layout.bits <= 4 and jnp.dtype(dtype).itemsize == 2


def make_table(layout: Layout, dtype: DTypeLike, interpret: bool) -> Array:
    """Returns the stretched table for `decode`: the values, or their bytes for `prmt`."""
    values = (np.asarray(layout.table) * layout.stretch(dtype)).astype(dtype)
    if interpret or not _looks_up_by_permutation(layout, dtype):
        return jnp.asarray(values)
    entries = np.zeros(4 * _table_words(layout.bits), np.uint16)
    entries[: len(values)] = values.view(np.uint16)
    return jnp.asarray(np.concatenate([entries & 255, entries >> 8]).astype(np.uint8).view("<i4"))


def _asm(asm: str, args: list[Array], dtype: DTypeLike) -> Array:
    """Runs PTX on four elements at a time, which share registers if smaller than 32 bits."""
    constraint = lambda kind, itemsize: ",".join([kind] * itemsize)
    outputs = constraint("=r" if jnp.dtype(dtype).itemsize == 2 else "=f", jnp.dtype(dtype).itemsize)
    inputs = [constraint("f" if a.dtype == jnp.float32 else "r", a.dtype.itemsize) for a in args]
    (values,) = plt.elementwise_inline_asm(
        asm,
        args=args,
        constraints=",".join([outputs, *inputs]),
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
    )
    return values


def decode(
    codes: UInt8[Array, "rows run"],
    zero: Int32[Array, " rows"] | None,
    plane: int,
    layout: Layout,
    table: jax.Ref | Array,
    dtype: DTypeLike,
    interpret: bool,
) -> Float[Array, "rows run"]:
    """Returns the values of one plane, minus the zero point of each row."""
    if layout.bits == 8 and layout.kind == "integer":
        offset = jnp.int32(layout.offset) if zero is None else (layout.offset - zero)[:, None]
        offset = jnp.broadcast_to(offset, codes.shape)
        if interpret:
            return (codes.astype(jnp.int32) + offset).astype(dtype)
        return _asm(integer_asm(dtype), [codes, (2**23 - offset).astype(jnp.float32)], dtype)
    if layout.kind in ("float8_e4m3fn", "float8_e5m2"):
        return jax.lax.bitcast_convert_type(codes, jnp.dtype(layout.kind)).astype(dtype)
    if _looks_up_by_permutation(layout, dtype) and not interpret:
        words = [jnp.broadcast_to(table[i], codes.shape) for i in range(2 * _table_words(layout.bits))]
        values = _asm(lookup_asm(layout.bits, plane), [codes, *words], dtype)
    else:
        index = codes.astype(jnp.int32) >> (layout.bits * plane)
        values = table[index & (2**layout.bits - 1)]
    return values if zero is None else values - jnp.broadcast_to(zero.astype(dtype)[:, None], values.shape)
