"""Products with quantized weights on this machine's CPU, against JAX's float32 and, where installed, other libraries.

    python benchmarks/cpu_matmul.py [--smoke] [--isa avx2] [--rows 1 16 128] [--formats nf4 int8] [--peers]
    python benchmarks/cpu_matmul.py --isa avx2 --formats nf4 --save results.json  # a slice of the tables
    python benchmarks/cpu_matmul.py --show results.json                           # all slices

Each figure is the time relative to the float32 product of the same shape, in one process, in turns: the median of the
rounds' ratios. Cold, every call takes the next of so many copies of the weight that they fill half a GB; warm, the same
one was used just before. The last column is the bytes of the packed weight per second, cold, beside those that a copy
reads and writes. Every instruction set of the machine runs in a process of its own. `int8 x int4` and the like quantize
`x` inside the time. `--dtype bfloat16` and `--precision tensorfloat32` are for quantized products; the float32 product
does not change.
"""

import argparse
import functools as ft
import itertools as it
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from rich.console import Console
from rich.table import Table
from timing import machine

import eqquant as eqq
from eqquant._formats.layout import make_layout
from eqquant._matmul import dispatch
from eqquant._matmul.kernels import cpu_int8
from eqquant._native import library as native


FORMATS = {
    "nf4": eqq.NF4(),
    "int4": eqq.Int4(),
    "q4_0": eqq.formats.Q4_0(),
    "q4_k": eqq.formats.Q4_K(),
    "q5_k": eqq.formats.Q5_K(),
    "q6_k": eqq.formats.Q6_K(),
    "mxfp4": eqq.MXFP4(),
    "nvfp4": eqq.NVFP4(),
    "int2": eqq.Int2(),
    "iq3_s": eqq.formats.IQ3_S(),
    "iq2_xxs": eqq.formats.IQ2_XXS(),
    "trellis2": eqq.formats.Trellis(2),
    "ternary": eqq.Ternary(),
    "binary": eqq.Binary(),
    "int8": eqq.Int8(),
    "fp8": eqq.FP8(),
    "fp8_e5m2": eqq.FP8(kind="e5m2"),
    "mxfp8": eqq.MXFP8(),
    "int8_affine": eqq.Int8(symmetric=False),
    "dynamic8": eqq.Dynamic8(),
    "int8 x int8": eqq.Int8(),
    "int8 x int4": eqq.Int4(),
    "int8 x ternary": eqq.Ternary(),
}
COLD_BYTES = 2**29


#
# Timing
#


class Variant:
    """A product, and the copies of the weight that its calls take in turn."""

    def __init__(self, run: Callable[[Any], Any], copies: Sequence[Any]) -> None:
        self.run, self.next, self.last = run, it.cycle(copies), copies[0]

    def seconds(self, *, cold: bool) -> float:
        if cold:
            self.last = next(self.next)
        else:
            jax.block_until_ready(self.run(self.last))
        start = time.perf_counter()
        jax.block_until_ready(self.run(self.last))
        return time.perf_counter() - start


def rounds_for(m: int, rounds: int) -> int:
    """Fewer of products that take long: their times vary less."""
    return max(min(5, rounds), rounds // (1 + m // 16))


def ratios(variants: dict[str, Variant], rounds: int) -> dict[str, dict[str, float]]:
    """Of each variant to the first one; and the milliseconds of that, under its own name."""
    found: dict[str, dict[str, float]] = {name: {} for name in variants}
    first = next(iter(variants))
    for label, cold in (("cold", True), ("warm", False)):
        for variant in variants.values():
            variant.seconds(cold=cold)  # compiles
        times = [{name: v.seconds(cold=cold) for name, v in variants.items()} for _ in range(rounds)]
        for name in variants:
            ratio = np.median([t[name] / t[first] for t in times])
            found[name][label] = float(1e3 * np.median([t[first] for t in times]) if name == first else ratio)
    return found


def copies(tree: Any, smoke: bool) -> list[Any]:
    size = sum(a.nbytes for a in jax.tree_util.tree_leaves(tree))
    count = 2 if smoke else max(2, -(-COLD_BYTES // size))
    return [jax.tree_util.tree_map(jnp.copy, tree) for _ in range(count)]


#
# Other libraries, if they are here
#


def peers(w: np.ndarray, x: np.ndarray) -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for make in (_onnxruntime, _bitsandbytes, _torch):
        try:
            found |= make(w, x)
        except ImportError as error:
            print(f"left out: {error}", file=sys.stderr)
    return found


def _onnxruntime(w: np.ndarray, x: np.ndarray) -> dict[str, Variant]:
    import onnx  # pyright: ignore[reportMissingImports]
    import onnxruntime as ort  # pyright: ignore[reportMissingImports]

    (n, k), block = w.shape, 64
    blocks = w.reshape(n, -1, block)
    scale = np.abs(blocks).max(-1) / 7
    codes = np.clip(np.round(blocks / scale[..., None]) + 8, 0, 15).astype(np.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4

    def session(level: int) -> Any:
        options = {"K": k, "N": n, "bits": 4, "block_size": block, "accuracy_level": level}
        node = onnx.helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", **options)
        kind = onnx.TensorProto.FLOAT
        graph = onnx.helper.make_graph(
            [node],
            "product",
            [onnx.helper.make_tensor_value_info("x", kind, list(x.shape))],
            [onnx.helper.make_tensor_value_info("y", kind, [x.shape[0], n])],
            [onnx.numpy_helper.from_array(packed, "w"), onnx.numpy_helper.from_array(scale.reshape(-1), "s")],
        )
        opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=9)
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = os.cpu_count() or 1
        return ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])

    run = lambda s: s.run(None, {"x": x})
    return {f"onnxruntime int4, level {a}": Variant(run, [session(a) for _ in range(8)]) for a in (0, 4)}


def _bitsandbytes(w: np.ndarray, x: np.ndarray) -> dict[str, Variant]:
    import bitsandbytes.functional as bnb  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(os.cpu_count() or 1)
    weight, rows = torch.from_numpy(w), torch.from_numpy(x)
    weights = [bnb.quantize_4bit(weight.clone(), blocksize=64, quant_type="nf4") for _ in range(8)]
    run = lambda pair: torch.nn.functional.linear(rows, bnb.dequantize_4bit(pair[0], pair[1]))
    try:
        import bitsandbytes as root  # pyright: ignore[reportMissingImports]

        root.matmul_4bit(rows, weights[0][0].t(), weights[0][1])
        run = lambda pair: root.matmul_4bit(rows, pair[0].t(), pair[1])
    except Exception as error:
        print(f"bitsandbytes.matmul_4bit does not run here ({error}); it dequantizes, then multiplies")
    return {"bitsandbytes nf4": Variant(run, weights)}


def _torch(w: np.ndarray, x: np.ndarray) -> dict[str, Variant]:
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(os.cpu_count() or 1)
    rows = torch.from_numpy(x).to(torch.bfloat16)
    scale = torch.from_numpy(np.abs(w).max(1) / 127)
    codes = (torch.from_numpy(w) / scale[:, None]).round().to(torch.int8)
    weights = [(codes.clone(), scale.to(torch.bfloat16)) for _ in range(8)]
    int8 = lambda pair: torch.ops.aten._weight_int8pack_mm(rows, pair[0], pair[1])

    # Four bits: the product of each group is `(code - 8) * scale + zero`.
    group = torch.from_numpy(w).reshape(w.shape[0], -1, 64)
    group_scale = group.abs().amax(-1, keepdim=True) / 7
    four = ((group / group_scale).round() + 8).clamp(0, 15).to(torch.int32).reshape(w.shape)
    scale_zero = torch.stack([group_scale[..., 0], torch.zeros_like(group_scale[..., 0])], -1).transpose(0, 1)
    scale_zero = scale_zero.contiguous().to(torch.bfloat16)
    found = {}
    try:
        int8(weights[0])
        found["torch int8, bfloat16 x"] = Variant(int8, weights)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(four, 1)
        packed_copies = [(packed.clone(), scale_zero.clone()) for _ in range(8)]
        int4 = lambda pair: torch.ops.aten._weight_int4pack_mm_for_cpu(rows, pair[0], 64, pair[1])
        int4(packed_copies[0])
        found["torch int4, bfloat16 x"] = Variant(int4, packed_copies)
    except Exception as error:
        print(f"left out: torch's product does not run here ({error})", file=sys.stderr)
    return found


#
# One process
#


@ft.partial(jax.jit, static_argnames="precision")
def floats(q: eqq.QuantizedArray, x: Any, precision: str | None) -> Any:
    return eqq.matmul(x, q.T, implementation="cpu", precision=precision)


@jax.jit
def integers(q: eqq.QuantizedArray, x: Any) -> Any:
    return cpu_int8.matmul(x, dispatch.as_stored_weight(q), make_layout(q.format, q.shape[-1]))


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    dot = jax.jit(lambda w, x: w @ x)
    for n, k in arguments.sizes:
        w = jr.normal(jr.key(0), (n, k))
        dense = copies(w, arguments.smoke)
        for name in arguments.formats:
            rowwise = integers if name.startswith("int8 x") else ft.partial(floats, precision=arguments.precision)
            quantized = copies(eqq.quantize(w.astype(arguments.dtype), FORMATS[name]), arguments.smoke)
            for m in arguments.rows:
                x = jr.normal(jr.key(1), (m, k))
                column = x[0] if m == 1 else x.T  # XLA is slow at `x @ w.T`
                variants = {
                    "float32": Variant(lambda w, x=column: dot(w, x), dense),
                    name: Variant(lambda q, x=x.astype(arguments.dtype), rowwise=rowwise: rowwise(q, x), quantized),
                }
                if arguments.peers and name == arguments.formats[0]:
                    variants |= peers(np.array(w), np.array(x))
                timed = ratios(variants, rounds_for(m, arguments.rounds))
                seconds = timed["float32"]["cold"] * timed[name]["cold"] / 1e3
                timed[name]["bytes per s"] = eqq.tree_nbytes(quantized[0]) / seconds
                for label, found in timed.items():
                    if label != "float32" or name == arguments.formats[0]:
                        results.append({"n": n, "k": k, "m": m, "name": label, **found})
            del quantized
        del dense
    return results


def copy_bandwidth(smoke: bool) -> float:
    """Bytes per second that all cores read and write in a copy."""
    x = jnp.zeros(2**20 if smoke else 2**26)
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: a new array would cost its page faults
    x = jax.block_until_ready(copy(x))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        x = jax.block_until_ready(copy(x))
        times.append(time.perf_counter() - start)
    return 2 * x.nbytes / float(np.median(times))


def show_all(console: Console, results: list[dict[str, Any]]) -> None:
    """A table for each instruction set; of results that were measured twice, the last."""
    for isa in dict.fromkeys(r["isa"] for r in results):
        by_key = {(r["n"], r["k"], r["name"], r["m"]): r for r in results if r["isa"] == isa}
        rows = sorted({m for *_, m in by_key})
        columns = [f"M = {m}, {c}" for m in rows for c in ("cold", "warm")]
        table = Table("W", "weight", *columns, "bandwidth, M = 1", title=f"time relative to float32, {isa}")
        for n, k, name in dict.fromkeys(
            key[:3] for key in sorted(by_key, key=lambda key: (key[:2], key[2] != "float32"))
        ):
            cells = []
            for m in rows:
                found = by_key.get((n, k, name, m))
                unit = "{:.2f} ms" if name == "float32" else "{:.2f}"
                cells += [unit.format(found[c]) if found else "" for c in ("cold", "warm")]
            one = by_key.get((n, k, name, 1), {})
            cells.append(f"{one['bytes per s'] / one['bandwidth']:.0%}" if "bytes per s" in one else "")
            table.add_row(f"{n} x {k}", name, *cells)
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes and few rounds")
    parser.add_argument("--rounds", type=int, default=21, help="of products with one row of x; of others fewer")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--sizes", nargs="+", default=["4096x4096", "4096x14336"])
    parser.add_argument("--dtype", default="float32", help="of x and of the result")
    parser.add_argument("--precision", help="such as tensorfloat32: products may be less exact than float32")
    parser.add_argument("--isa", nargs="+", help="instruction sets; all that this machine has unless given")
    parser.add_argument("--peers", action="store_true", help="other libraries too, where they are installed")
    parser.add_argument("--save", type=pathlib.Path, help="a file to add the results to")
    parser.add_argument("--show", type=pathlib.Path, help="print the results of such a file, and measure nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.sizes = [tuple(map(int, s.split("x"))) for s in arguments.sizes]
    if arguments.smoke:
        arguments.sizes, arguments.rounds = [(256, 512)], 2
    if arguments.worker:
        print(json.dumps(measure(arguments)))
        return
    console = Console(width=150)
    if arguments.show is not None:
        saved = json.loads(arguments.show.read_text())
        console.print(saved["machine"])
        show_all(console, saved["results"])
        return
    console.print(machine())
    if native.refusal() is not None:
        console.print(f"[red]{native.refusal()}")
        sys.exit(1)
    bandwidth = copy_bandwidth(arguments.smoke)
    console.print(f"copying reads and writes {bandwidth / 1e9:.1f} GB/s")
    results = []
    for isa in arguments.isa or native.instruction_sets():
        env = {**os.environ, "EQQUANT_CPU_ISA": isa}
        command = [sys.executable, __file__, "--worker", *sys.argv[1:]]
        out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
        results += [{"isa": isa, "bandwidth": bandwidth, **r} for r in json.loads(out.splitlines()[-1])]
    show_all(console, results)
    if arguments.save is not None:
        before = json.loads(arguments.save.read_text())["results"] if arguments.save.exists() else []
        arguments.save.write_text(json.dumps({"machine": machine(), "results": before + results}))


if __name__ == "__main__":
    main()
