"""Decodes codes in the registers of NVIDIA GPUs, for Pallas-Triton kernels.

- Codes of at most four bits become 16-bit values by `prmt`, the byte permutation of NVIDIA GPUs. Four nibbles of packed
  codes *are* its selectors, so one `prmt` looks up four codes in a table of eight bytes. Two lookups and a selection
  make a table of sixteen. The low and the high bytes of the values have a table each. This takes about three
  instructions per weight of four bits.
- Integers of at most four bits become the last bits of a 16-bit float with a unit in the last place of 1: 2**7 in
  bfloat16, 2**10 in float16. An `fma` subtracts that float: less than two instructions per weight.
- Integers of eight bits become the last bits of the float32 2**23, which is then subtracted: less than three fast
  instructions, instead of a slow conversion.
- 8-bit floats are converted by Triton.
- Others are loaded from a table in memory: tables of 256 values, and for float32 all codes of at most four bits.

Triton cannot express the first three, so they are inline assembly. Pallas cannot interpret that: with `interpret`,
`decode` looks values up in the table instead, and the tests run the assembly in an emulator.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, DTypeLike, Float, Int32, UInt8

from ...._native.weight import Layout


def lookup_asm(bits: int, plane: int) -> str:
    """Returns PTX that decodes a plane of four bytes, `$2`, to 16-bit values in `$0` and `$1`.

    The words of `make_table` are in every fourth operand from `$3` on: the assembly decodes four bytes at a time, and
    gets each word once for each of them.
    """
    shift, high = bits * plane % 4, bits * plane // 4
    table = [f"${3 + 4 * i}" for i in range(2 * _table_words(bits))]
    lines = [".reg .b32 low, high, index, sign, a, b;"]
    for half, out in ((0, "$0"), (16, "$1")):
        if bits == 4:
            # Three bits of a nibble select within half a table, the fourth between the halves.
            lines += [f"shr.u32 index, $2, {half};", "shr.u32 sign, index, 1;", "and.b32 index, index, 0x77777777;"]
            lines += [f"and.b32 sign, sign, ${3 + 4 * len(table)};", "or.b32 sign, sign, 0x32103210;"]
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


def small_integer_asm(bits: int, plane: int, offset: int, dtype: DTypeLike) -> str:
    """Returns PTX that converts a plane of four bytes, `$2`, to 16-bit floats in `$0` and `$1`.

    They are the codes plus `offset`. `$3` is the word of `make_table`: two copies of the float with a unit in the last
    place of 1. Codes replace its last bits.
    """
    name, unit = {"bfloat16": ("bf16x2", 2**7), "float16": ("f16x2", 2**10)}[jnp.dtype(dtype).name]
    twice = lambda value: int(np.asarray(value, dtype).view(np.uint16)) * 0x10001
    # Ampere has no addition of two bfloat16 pairs, only `fma`.
    lines = [".reg .b32 codes, one, rest;", f"mov.b32 one, {twice(1):#x};", f"mov.b32 rest, {twice(offset - unit):#x};"]
    for out, pick in (("$0", "0x4140"), ("$1", "0x4342")):
        lines += [f"prmt.b32 codes, $2, 0, {pick};", f"shr.u32 codes, codes, {bits * plane};"]
        lines += [f"and.b32 codes, codes, {(2**bits - 1) * 0x10001:#x};", "or.b32 codes, codes, $3;"]
        lines += [f"fma.rn.{name} {out}, codes, one, rest;"]
    return "{ " + " ".join(lines) + " }"


def small_code_asm(layout: Layout, plane: int, dtype: DTypeLike) -> str:
    """Returns the PTX that decodes a plane of four bytes of codes of at most four bits."""
    if _is_small_integer(layout, dtype):
        return small_integer_asm(layout.bits, plane, int(layout.lowest), dtype)
    return lookup_asm(layout.bits, plane)


def integer_asm(dtype: DTypeLike) -> str:
    """Returns PTX that converts four bytes to `dtype` and subtracts an operand from each.

    Results are in the operands from `$0` on; then come the bytes, then the four numbers to subtract.
    """
    name = {"bfloat16": "bf16", "float16": "f16", "float32": ""}[jnp.dtype(dtype).name]
    first = 2 if name else 4
    out = ["a", "b", "c", "d"] if name else ["$0", "$1", "$2", "$3"]
    lines = [".reg .f32 a, b, c, d;", ".reg .b32 bits;"]
    for i, value in enumerate(out):
        # The bytes `code, 0, 0, 0x4b` are the float32 2**23 + code.
        lines += [f"prmt.b32 bits, ${first}, 0x4b000000, 0x744{i};", f"mov.b32 {value}, bits;"]
        lines += [f"sub.f32 {value}, {value}, ${first + 1 + i};"]
    if name:
        lines += [f"cvt.rn.{name}x2.f32 $0, b, a;", f"cvt.rn.{name}x2.f32 $1, d, c;"]
    return "{ " + " ".join(lines) + " }"


def _table_words(bits: int) -> int:
    return 4 if bits == 4 else 1


def _is_in_registers(layout: Layout, dtype: DTypeLike) -> bool:
    """Returns whether assembly decodes the codes, with the words of `make_table` in registers."""
    return layout.bits <= 4 and jnp.dtype(dtype).itemsize == 2


def _is_small_integer(layout: Layout, dtype: DTypeLike) -> bool:
    return layout.kind == "integer" and _is_in_registers(layout, dtype)


def make_table(layout: Layout, dtype: DTypeLike, interpret: bool) -> Array:
    """Returns the table for `load_table`: stretched values, or words for the assembly.

    Values are multiplied by `Layout.stretch`. Words are int32: for `prmt` the low bytes of the values, four to a word,
    then the high bytes, and a mask.
    """
    values = (np.asarray(layout.table) * layout.stretch(dtype)).astype(dtype)
    if interpret or not _is_in_registers(layout, dtype):
        return jnp.asarray(values)
    if _is_small_integer(layout, dtype):
        return jnp.asarray(np.asarray([2 ** jnp.finfo(dtype).nmant] * 2, dtype).view("<i4"))
    entries = np.zeros(4 * _table_words(layout.bits), np.uint16)
    entries[: len(values)] = values.view(np.uint16)
    words = np.concatenate([entries & 255, entries >> 8]).astype(np.uint8).view("<i4")
    return jnp.asarray(np.append(words, np.int32(0x44444444)))


# What `load_table` returns: a table in memory, or words in registers.
Table = jax.Ref | Array | list[Array]


def load_table(table: jax.Ref | Array, layout: Layout, dtype: DTypeLike, interpret: bool) -> Table:
    """Loads the words of a table, once per program.

    All threads have the same words, so the compiler would keep them in uniform registers, and copy them at each use.
    The assembly prevents this: it combines each word with a zero that the compiler takes for a value of the thread.
    """
    if interpret or not _is_in_registers(layout, dtype):
        return table
    asm = "{ .reg .b32 a, b; mov.u32 a, %lanemask_lt; mov.u32 b, %lanemask_gt; and.b32 a, a, b; or.b32 $0, $1, a; }"
    word = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return [
        plt.elementwise_inline_asm(
            asm,
            args=[jnp.broadcast_to(table[i], word.shape)],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[word],
        )[0]
        for i in range(table.shape[0])
    ]


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
    table: Table,
    dtype: DTypeLike,
    interpret: bool,
) -> Float[Array, "rows run"]:
    """Returns the values of one plane, minus the zero point of each row.

    `table` is the result of `load_table`.
    """
    if layout.bits == 8 and layout.kind == "integer":
        offset = jnp.int32(layout.lowest) if zero is None else (layout.lowest - zero)[:, None]
        offset = jnp.broadcast_to(offset, codes.shape)
        if interpret:
            return (codes.astype(jnp.int32) + offset).astype(dtype)
        return _asm(integer_asm(dtype), [codes, (2**23 - offset).astype(jnp.float32)], dtype)
    if layout.kind in ("float8_e4m3fn", "float8_e5m2"):
        return jax.lax.bitcast_convert_type(codes, jnp.dtype(layout.kind)).astype(dtype)
    if isinstance(table, list):
        words = [jnp.broadcast_to(word, codes.shape) for word in table]
        values = _asm(small_code_asm(layout, plane, dtype), [codes, *words], dtype)
    else:
        index = codes.astype(jnp.int32) >> (layout.bits * plane)
        values = table[index & (2**layout.bits - 1)]
    return values if zero is None else values - jnp.broadcast_to(zero.astype(dtype)[:, None], values.shape)


def multiply_add(a: Array, b: Array, c: Array, interpret: bool) -> Array:
    """Returns `a * b + c` in float32, rounded once."""
    if interpret:
        return a * b + c
    out = jax.ShapeDtypeStruct(c.shape, jnp.float32)
    args = [a, jnp.broadcast_to(b, a.shape), c]
    return plt.elementwise_inline_asm(
        "fma.rn.f32 $0, $1, $2, $3;", args=args, constraints="=f,f,f,f", pack=1, result_shape_dtypes=[out]
    )[0]


# Ampere multiplies pairs of bfloat16 only by `fma`. Adding -0 changes no product, not even the sign of a zero.
PRODUCT_ASM = "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }"


def multiply_pairs(a: Array, b: Array, interpret: bool) -> Array:
    """Returns `a * b` in bfloat16, two at a time."""
    b = jnp.broadcast_to(b, a.shape)
    if interpret:
        return a * b
    out = jax.ShapeDtypeStruct(a.shape, a.dtype)
    return plt.elementwise_inline_asm(
        PRODUCT_ASM, args=[a, b], constraints="=r,r,r", pack=2, result_shape_dtypes=[out]
    )[0]
