"""An emulator of the PTX in which kernels for GPUs decode codes."""

import functools as ft
import operator
import re

import jax.numpy as jnp
import numpy as np


def emulate(asm, inputs, outputs, memory=()):
    """Runs PTX of the instructions that the kernels use. `inputs` maps the number of an operand to its 32 bits.

    `memory` holds the words of shared memory.
    """
    registers = {f"${i}": int(value) for i, value in inputs.items()}
    value = lambda name: int(name, 0) if name[0].isdigit() else registers[name]
    as_float = lambda bits: np.uint32(bits).view(np.float32)
    for line in asm.strip("{} ").split(";"):
        opcode, *rest = re.split(r"[\s,]+", line.strip())
        if opcode in ("", ".reg"):
            continue
        out, args = rest[0], [value(name.strip("[]")) for name in rest[1:]]
        if opcode == "shr.u32":
            result = args[0] >> args[1]
        elif opcode == "and.b32":
            result = args[0] & args[1]
        elif opcode == "or.b32":
            result = args[0] | args[1]
        elif opcode == "mov.b32":
            result = args[0]
        elif opcode == "lop3.b32":
            cases = [i for i in range(8) if args[3] >> i & 1]  # the bits of three operands for which the result is 1
            pick = lambda i, case: args[i] if case >> (2 - i) & 1 else ~args[i]
            result = ft.reduce(operator.or_, (pick(0, c) & pick(1, c) & pick(2, c) for c in cases), 0)
        elif opcode == "dp4a.u32.u32":
            result = args[2] + sum((args[0] >> 8 * i & 255) * (args[1] >> 8 * i & 255) for i in range(4))
        elif opcode == "ld.shared.b32":
            result = int(memory[args[0] // 4])
        elif opcode == "sub.f32":
            result = int((as_float(args[0]) - as_float(args[1])).view(np.uint32))
        elif opcode in ("fma.rn.bf16x2", "fma.rn.f16x2"):
            dtype = jnp.bfloat16 if "bf16" in opcode else jnp.float16
            a, b, c = (np.array([arg], np.uint32).view(dtype).astype(np.float64) for arg in args)
            result = int((a * b + c).astype(dtype).view(np.uint32)[0])
        elif opcode == "prmt.b32":
            both = args[0] | args[1] << 32
            picks = [args[2] >> 4 * i & 15 for i in range(4)]
            assert all(pick < 8 for pick in picks)  # with the highest bit it would replicate a sign
            result = sum((both >> 8 * pick & 255) << 8 * i for i, pick in enumerate(picks))
        elif opcode in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
            dtype = jnp.bfloat16 if "bf16" in opcode else jnp.float16
            high, low = (int(as_float(a).astype(dtype).view(np.uint16)) for a in args)
            result = high << 16 | low
        else:
            raise NotImplementedError(opcode)
        registers[out] = result & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(outputs)]


def halves(words, dtype):
    return np.array(words, np.uint32).view(np.uint16).view(dtype)


def groups_of_bytes():
    every = np.random.default_rng(0).permutation(np.repeat(np.arange(256), 4)).astype(np.uint8)
    return every.reshape(-1, 4)
