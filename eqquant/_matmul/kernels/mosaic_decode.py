"""Decodes codes in the registers of NVIDIA GPUs, for Pallas-Mosaic kernels.

- Integers of at most four bits become the last bits of a 16-bit float with a unit in the last place of 1: 2**7 in
  bfloat16, 2**10 in float16. An `fma` subtracts that float.
- Other codes of at most four bits are looked up two at a time, in a table of all pairs in shared memory. Each lane of a
  warp reads its own copy, in a bank of its own.
- Integers of eight bits become the last bits of such a float too. Bfloat16 has seven of them; the eighth is a float of
  its own, to subtract.
- 8-bit floats are converted by Mosaic.

Pallas cannot express the first three, so they are inline assembly. It cannot interpret that either: with `interpret`,
`decode` computes the same in JAX, and the tests run the assembly in an emulator.
"""

import functools as ft
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, DTypeLike, Float, UInt8, UInt32

from ... import _compat
from ..._native.weight import Layout
from .packed import look_up


plgpu: Any = _compat.pallas_backend("mosaic_gpu")  # whose types differ between releases
mosaic: Any = importlib.import_module("jax.experimental.mosaic.gpu")
_LANES = 32  # of a warp: as many as shared memory has banks, of four bytes


_FLOATS = {"bfloat16": ("bf16x2", 2**7), "float16": ("f16x2", 2**10)}  # the name in PTX; a float whose last bit is 1


def _twice(value: int, dtype: DTypeLike) -> str:
    return f"{int(np.asarray(value, dtype).view(np.uint16)) * 0x10001:#x}"


def small_integer_asm(layout: Layout, dtype: DTypeLike) -> str:
    """Returns PTX that converts four bytes of codes of at most four bits, plane by plane.

    Each plane has two outputs: of the even bytes, and of the odd ones.
    """
    name, unit = _FLOATS[jnp.dtype(dtype).name]
    word, mask = f"${2 * layout.planes}", f"{(2**layout.bits - 1) * 0x10001:#x}"
    lines = [".reg .b32 codes, one, rest;", f"mov.b32 one, {_twice(1, dtype)};"]
    lines += [f"mov.b32 rest, {_twice(layout.lowest - unit, dtype)};"]
    for plane in range(layout.planes):
        for odd in range(2):
            lines += [f"shr.u32 codes, {word}, {layout.bits * plane + 8 * odd};"]
            lines += [f"lop3.b32 codes, codes, {mask}, {_twice(unit, dtype)}, 0xea;"]  # (codes & mask) | unit
            lines += [f"fma.rn.{name} ${2 * plane + odd}, codes, one, rest;"]
    return "{ " + " ".join(lines) + " }"


def integer_asm(layout: Layout, dtype: DTypeLike) -> str:
    """Returns PTX that converts four bytes of codes of eight bits.

    It has two outputs: of the first two bytes, and of the others.
    """
    name, unit = _FLOATS[jnp.dtype(dtype).name]
    mask, rest = (255, layout.lowest - unit) if name == "f16x2" else (127, layout.lowest + 128)
    lines = [".reg .b32 codes, high, one, less, rest;", f"mov.b32 one, {_twice(1, dtype)};"]
    lines += [f"mov.b32 less, {_twice(-1, dtype)};", f"mov.b32 rest, {_twice(rest, dtype)};"]
    for out, pick in (("$0", "0x4140"), ("$1", "0x4342")):
        lines += [f"prmt.b32 codes, $2, 0, {pick};"]  # two bytes, with zeros above
        if name == "bf16x2":
            lines += ["lop3.b32 high, codes, 0x00800080, 0x43804380, 0x6a;"]  # (codes & 128) ^ 256.0: 128.0 or 256.0
        lines += [f"lop3.b32 codes, codes, {mask * 0x10001:#x}, {_twice(unit, dtype)}, 0xea;"]  # (codes & mask) | unit
        if name == "bf16x2":
            lines += [f"fma.rn.{name} codes, high, less, codes;"]
        lines += [f"fma.rn.{name} {out}, codes, one, rest;" if rest else f"mov.b32 {out}, codes;"]
    return "{ " + " ".join(lines) + " }"


def lookup_asm(layout: Layout) -> str:
    """Returns PTX that looks up four bytes, plane by plane, in the table of `make_pairs`.

    Each plane has two outputs: of the first two bytes, and of the others. The last operand is the address of the
    table plus that of the lane in an entry.
    """
    word, lane = f"${2 * layout.planes}", f"${2 * layout.planes + 1}"
    entry = 4 * _LANES
    lines = [".reg .b32 codes, a, b, c, d;"]
    for pair in range(layout.planes // 2):
        source = word
        if layout.bits < 4:
            lines += [f"shr.u32 codes, {word}, {2 * layout.bits * pair};"]
            lines += [f"and.b32 codes, codes, {(4**layout.bits - 1) * 0x1010101:#x};"]
            source = "codes"
        for i, name in enumerate("abcd"):  # a scalar product with one byte is its product, plus the address
            lines += [
                f"dp4a.u32.u32 {name}, {source}, {entry << 8 * i:#x}, {lane};",
                f"ld.shared.b32 {name}, [{name}];",
            ]
        for plane, pick in ((2 * pair, "0x5410"), (2 * pair + 1, "0x7632")):
            lines += [f"prmt.b32 ${2 * plane}, a, b, {pick};", f"prmt.b32 ${2 * plane + 1}, c, d, {pick};"]
    return "{ " + " ".join(lines) + " }"


def needs_pairs(layout: Layout) -> bool:
    """Returns whether codes are looked up in a table of pairs."""
    return layout.bits <= 4 and layout.kind != "integer"


def make_pairs(layout: Layout, dtype: DTypeLike) -> UInt32[np.ndarray, "pairs lanes"]:
    """Returns the values of all pairs of codes in neighboring planes, once for each lane."""
    values = np.asarray(layout.table).astype(dtype).view(np.uint16).astype(np.uint32)
    values = np.pad(values, (0, 2**layout.bits - len(values)))
    pairs = values[None, :] | values[:, None] << 16
    return np.repeat(pairs.reshape(-1, 1), _LANES, axis=1)


def decode(
    codes: UInt8[Array, "rows bytes"], pairs: Any, layout: Layout, dtype: DTypeLike, registers: Any, interpret: bool
) -> list[Float[Array, "rows bytes"]]:
    """Returns the values of each plane of a segment.

    They lie in `registers` of threads as the codes do, by which each holds pairs of neighbors.
    """
    if layout.kind in ("float8_e4m3fn", "float8_e5m2"):
        values = jax.lax.bitcast_convert_type(codes, jnp.dtype(layout.kind)).astype(jnp.float16)  # exactly
        return [values if dtype == jnp.float16 else values.astype(jnp.float32).astype(dtype)]
    if interpret and pairs is not None:
        table, width = pairs[:, 0], 2 * layout.bits
        found = [table[codes >> jnp.uint8(width * i) & jnp.uint8(2**width - 1)] for i in range(layout.planes // 2)]
        words = [(pair >> jnp.uint32(16 * high)).astype(jnp.uint16) for pair in found for high in range(2)]
        return [jax.lax.bitcast_convert_type(word, dtype) for word in words]
    if interpret:
        mask = jnp.uint8(2**layout.bits - 1)
        planes = [codes >> jnp.uint8(layout.bits * plane) & mask for plane in range(layout.planes)]
        return [look_up(plane, layout).astype(dtype) for plane in planes]
    out = plgpu.ShapeDtypeStruct(codes.shape, dtype, layout=registers)
    tables, types = ([], []) if pairs is None else ([pairs], [plgpu.RefType()])
    inline = plgpu.inline_mgpu(arg_types=(registers, *types), return_type=(out,) * layout.planes)
    return list(inline(lambda context, *args: _decode_registers(*args, layout=layout, dtype=dtype))(codes, *tables))


def _decode_registers(codes: Any, *pairs: ir.Value, layout: Layout, dtype: DTypeLike) -> tuple[Any, ...]:
    """Builds the program of a thread, whose registers hold two neighboring codes each."""
    i32 = ir.IntegerType.get_signless(32)
    element = {"bfloat16": ir.BF16Type, "float16": ir.F16Type}[jnp.dtype(dtype).name].get()
    outputs, operands = 2 * layout.planes, []
    if pairs:
        asm, address = lookup_asm(layout), llvm.ptrtoint(i32, mosaic.utils.memref_ptr(pairs[0]))
        lane = arith.andi(mosaic.thread_idx(), mosaic.c(_LANES - 1, i32))
        operands = [arith.addi(address, arith.muli(lane, mosaic.c(4, i32)))]
    else:
        asm = (integer_asm if layout.bits == 8 else small_integer_asm)(layout, dtype)
    constraints = ",".join(["=r"] * outputs + ["r"] * (1 + len(operands)))
    planes = [np.empty(codes.registers.size, object) for _ in range(layout.planes)]
    for i in range(0, codes.registers.size, 2):
        # The assembly for small integers separates even and odd bytes, so interleave them.
        order = [0, 1, 2, 3] if pairs or layout.bits == 8 else [0, 2, 1, 3]
        four = vector.shuffle(codes.registers.flat[i], codes.registers.flat[i + 1], order)
        words = [mosaic.utils.bitcast(four, i32), *operands]
        done: Any = llvm.inline_asm(llvm.StructType.get_literal([i32] * outputs), words, asm, constraints)
        for output in range(outputs):
            bits = llvm.extractvalue(i32, done, [output])
            planes[output // 2][i + output % 2] = mosaic.utils.bitcast(bits, ir.VectorType.get((2,), element))
    as_array = ft.partial(mosaic.FragmentedArray, _layout=codes.layout, _is_signed=None)
    return tuple(as_array(_registers=plane.reshape(codes.registers.shape)) for plane in planes)
