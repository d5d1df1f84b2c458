"""The table of formats that the contract is tested over, and what the tests share."""

import functools as ft
import importlib
import itertools as it
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from rich.console import Console

import eqquant as eqq
from eqquant._formats.base import AbstractVectorFormat, has_offsets
from eqquant._numerics.packing import widths


class Row(NamedTuple):
    """A format, what it costs, and what it is worth.

    `bits` are per weight, scales included, for rows of 4096 values. `sqnr` is the least signal-to-noise ratio in dB on
    normally distributed weights.
    """

    format: eqq.extend.AbstractFormat
    bits: float
    sqnr: float


# Names its format in test ids. Add a row, and a format is held to the whole contract.
FORMATS = {
    "nf4": Row(eqq.NF4(), 4.5, 20.5),
    "nf4_double": Row(eqq.NF4(double_quant=True), 4 + 8 / 64 + 32 / 4096, 20.4),
    "nf4_channel": Row(eqq.NF4(block_size=None), 4 + 32 / 4096, 17.0),
    "nf4_tensor": Row(eqq.NF4(block_size="tensor"), 4 + 32 / 4096, 16.0),
    "int8": Row(eqq.Int8(), 8 + 32 / 4096, 38.0),
    "int8_tensor": Row(eqq.Int8(block_size="tensor"), 8 + 32 / 4096, 36.0),
    "int8_affine": Row(eqq.Int8(symmetric=False), 8 + 40 / 4096, 38.0),
    "int8_block": Row(eqq.Int8(block_size=128), 8.25, 42.0),
    "int4": Row(eqq.Int4(), 4.5, 19.0),
    "int4_affine": Row(eqq.Int4(symmetric=False), 4 + 36 / 64, 20.0),
    "int4_channel": Row(eqq.Int4(block_size=None), 4 + 32 / 4096, 13.0),
    "int8_bfloat16": Row(eqq.Int8(64, scale_dtype="bfloat16"), 8.25, 40.0),
    "int4_float16": Row(eqq.Int4(scale_dtype="float16"), 4.25, 19.0),
    "int4_affine_bfloat16": Row(eqq.Int4(symmetric=False, scale_dtype="bfloat16"), 4 + 20 / 64, 20.0),
    "nf4_float16": Row(eqq.NF4(scale_dtype="float16"), 4.25, 20.5),
    "int6": Row(eqq.Int6(), 6.5, 31.0),
    "int5": Row(eqq.Int5(), 5.5, 25.0),
    "int5_affine": Row(eqq.Int5(symmetric=False), 5 + 37 / 64, 26.5),
    "int3": Row(eqq.Int3(), 3.5, 13.0),
    "int3_affine": Row(eqq.Int3(symmetric=False), 3 + 35 / 64, 13.5),
    "int3_channel": Row(eqq.Int3(block_size=None), 3 + 32 / 4096, 9.0),
    "int2": Row(eqq.Int2(), 2.5, 7.5),
    "int2_affine": Row(eqq.Int2(symmetric=False), 2 + 34 / 64, 6.0),
    "ternary": Row(eqq.Ternary(), 2 + 32 / 4096, 5.5),
    "ternary_block": Row(eqq.Ternary(block_size=64), 2.5, 5.5),
    "binary": Row(eqq.Binary(), 1 + 32 / 4096, 4.2),
    "binary_block": Row(eqq.Binary(block_size=64), 1.5, 4.2),
    "fp8_e4m3": Row(eqq.FP8(), 8 + 32 / 4096, 31.0),
    "fp8_e5m2": Row(eqq.FP8("e5m2"), 8 + 32 / 4096, 25.0),
    "mxfp8": Row(eqq.MXFP8(), 8.25, 29.0),
    "mxfp8_e5m2": Row(eqq.MXFP8("e5m2"), 8.25, 23.5),
    "mxfp4": Row(eqq.MXFP4(), 4.25, 18.0),
    "nvfp4": Row(eqq.NVFP4(), 4.5 + 32 / 4096, 20.0),
    "q4_0": Row(eqq.formats.Q4_0(), 4.5, 20.5),
    "q8_0": Row(eqq.formats.Q8_0(), 8.5, 44.0),
    "q4_1": Row(eqq.formats.Q4_1(), 5, 20.0),
    "q5_0": Row(eqq.formats.Q5_0(), 5.5, 26.5),
    "q5_1": Row(eqq.formats.Q5_1(), 6, 26.5),
    "q1_0": Row(eqq.formats.Q1_0(), 1.125, 4.2),
    "q2_0": Row(eqq.formats.Q2_0(), 2.25, 1.0),
    "q2_k": Row(eqq.formats.Q2_K(), 2.625, 8.0),
    "q3_k": Row(eqq.formats.Q3_K(), 3.4375, 14.0),
    "q4_k": Row(eqq.formats.Q4_K(), 4.5, 20.0),
    "q5_k": Row(eqq.formats.Q5_K(), 5.5, 26.0),
    "q6_k": Row(eqq.formats.Q6_K(), 6.5625, 32.0),
    "iq4_nl": Row(eqq.formats.IQ4_NL(), 4.5, 20.0),
    "iq4_xs": Row(eqq.formats.IQ4_XS(), 4.25, 20.0),
    "tq2_0": Row(eqq.formats.TQ2_0(), 2.0625, 1.0),
    "iq3_s": Row(eqq.formats.IQ3_S(), 3.4375, 16.4),
    "iq3_xxs": Row(eqq.formats.IQ3_XXS(), 3.0625, 13.9),
    "iq2_s": Row(eqq.formats.IQ2_S(), 2.5625, 11.5),
    "iq2_xs": Row(eqq.formats.IQ2_XS(), 2.3125, 10.0),
    "iq2_xxs": Row(eqq.formats.IQ2_XXS(), 2.0625, 9.0),
    "iq1_m": Row(eqq.formats.IQ1_M(), 1.75, 7.0),
    "iq1_s": Row(eqq.formats.IQ1_S(), 1.5625, 6.6),
    "trellis2": Row(eqq.formats.Trellis(2), 2 + 16 / 4096, 11.2),
    "trellis3": Row(eqq.formats.Trellis(3, block_size=256), 3 + 16 / 256, 17.0),
    "mlx": Row(eqq.formats.MLX(), 4.5, 19.0),
    "mlx_3_bits": Row(eqq.formats.MLX(3, scale_dtype="float32"), 4, 12.0),
    "mlx_channel": Row(eqq.formats.MLX(8, None, "bfloat16"), 8 + 32 / 4096, 38.0),
    "dynamic8": Row(eqq.Dynamic8(), 8 + 32 / 256, 36.0),
    "codebook": Row(eqq.Codebook([-1, -0.5, -0.25, 0, 0.25, 0.5, 1]), 3.5, 12.0),
    "codebook_16": Row(eqq.Codebook([*range(-7, 8)], scale_dtype="bfloat16"), 4.25, 19.0),
    "codebook_256": Row(eqq.Codebook(np.linspace(-1, 1, 255), block_size=None), 8 + 32 / 4096, 38.0),
}

# A scale for each tile of rows and columns: the contract holds, but for rows alone. Bits are of three rows.
TILES = {
    "fp8_tiles": Row(eqq.FP8(block_size=(128, 128)), 8 + 32 * 32 / (3 * 4096), 31.0),
    "nvfp4_tiles": Row(eqq.NVFP4((16, 16)), 4 + (256 * 8 + 32) / (3 * 4096), 18.0),
    "int4_tiles": Row(eqq.Int4((2, 64), symmetric=False), 4 + 2 * 64 * 36 / (3 * 4096), 19.0),
}

# One for each kind of scale and of code, for what does not depend on the rest of a format.
KINDS = (
    *("nf4_double", "int8_tensor", "int4_affine", "ternary_block", "binary"),
    *("fp8_e4m3", "mxfp4", "nvfp4", "q4_0", "dynamic8", "q5_k"),
)

# Those whose codes stand for several values, and the others.
VECTORS = [name for name, row in FORMATS.items() if isinstance(row.format, AbstractVectorFormat)]
SCALARS = [name for name in FORMATS if name not in VECTORS]

# Those that kernels in Pallas read: codes that lie in one byte, without offsets.
IN_KERNELS = [name for name in SCALARS if len(widths(FORMATS[name].format.bits)) == 1]
IN_KERNELS = [name for name in IN_KERNELS if not has_offsets(FORMATS[name].format)]
KINDS_IN_KERNELS = [name for name in KINDS if name in IN_KERNELS]

NEWEST = jax.__version_info__ >= (0, 11)


def kernel_cases(without: Sequence[str] = ()) -> list[Any]:
    """Formats and numbers of rows to try a kernel on: two numbers for each format, and all of NF4.

    Pallas interprets slowly, so most of them are slow.
    """
    rows = (1, 7, 16, 64, 300)
    quick = {*it.product(KINDS, (16,)), *it.product(("nf4",), rows)}
    some = {(name, rows[(i + j) % len(rows)]) for i, name in enumerate(IN_KERNELS) for j in (0, 2)}
    cases = [c for c in it.product(IN_KERNELS, rows) if c in quick | some and c[0] not in without]
    return [pytest.param(*case, marks=() if case in quick else pytest.mark.slow) for case in cases]


def mark_slow(n: int, cases: Iterable[Any]) -> list[Any]:
    """One case in `n`, the others only in a sweep. A case that is a tuple has a value for each argument."""
    as_tuple = lambda case: case if isinstance(case, tuple) else (case,)
    return [pytest.param(*as_tuple(c), marks=pytest.mark.slow if i % n else ()) for i, c in enumerate(cases)]


# Every format, most of them only in a sweep: for what takes long, and what the contract covers in part.
_QUICK = (*KINDS, "iq2_xs", "iq3_s")
SWEPT_FORMATS = [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in FORMATS]
SWEPT_SCALARS = [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in SCALARS]


def sqnr(x: Any, y: Any) -> float:
    """Signal-to-noise ratio in dB."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    noise = ((x - y) ** 2).mean()
    return float(10 * np.log10((x**2).mean() / noise)) if noise > 0 else float("inf")


def assert_close(actual: Any, expected: Any, tol: float = 1e-5) -> None:
    """Every pair of leaves agrees to `tol`, relative to the largest magnitude of the expected leaf."""
    actual, expected = jtu.tree_leaves(actual), jtu.tree_leaves(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, (a.shape, e.shape)
        scale = np.abs(e[np.isfinite(e)]).max(initial=1e-30)
        np.testing.assert_allclose(a, e, rtol=0, atol=tol * scale)


def assert_same(actual: Any, expected: Any) -> None:
    """Two quantized arrays have the same structure and the same bits."""
    assert jtu.tree_structure(actual) == jtu.tree_structure(expected)
    for a, e in zip(jtu.tree_leaves(actual), jtu.tree_leaves(expected), strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(e))


def relative_error(y: Any, expected: np.ndarray) -> float:
    """Relative L2."""
    return float(np.linalg.norm(np.asarray(y, np.float64) - expected) / np.linalg.norm(expected))


def report(table: Any, failures: list[str]) -> int:
    """Prints what a check of compiled kernels found. The exit status."""
    console = Console(width=140)
    console.print(table)
    for failure in failures:
        console.print(f"[red]{failure}")
    return 1 if failures else 0


def interpreted(load: Callable[[], Any]) -> Callable[[], Any]:
    """A module of kernels, as `dispatch` imports it, whose kernels Pallas interprets."""
    return lambda: SimpleNamespace(refusal=load().refusal, matmul=ft.partial(load().matmul, interpret=True))


def equations(f: Callable[..., Any], *args: Any) -> Iterator[Any]:
    """The equations that `f` is traced to, those inside of loops and calls included."""

    def visit(jaxpr: Any) -> Iterator[Any]:
        for eqn in jaxpr.eqns:
            yield eqn
            for inner in jtu.tree_leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from visit(inner)

    yield from visit(eqx.filter_make_jaxpr(f)(*args)[0].jaxpr)


def primitives(f: Callable[..., Any], *args: Any) -> list[str]:
    """The names of the primitives of `equations`."""
    return [eqn.primitive.name for eqn in equations(f, *args)]


def temp_bytes(f: Callable[..., Any], *args: Any) -> int:
    """The temporary memory that the compiled `f` needs."""
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


def weights(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Normally distributed values. NumPy draws them: of all programs, random ones take longest to compile."""
    draw = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    return jax.device_put(draw.standard_normal(shape, np.float32).astype(dtype))  # `asarray` compiles a program


def heavy_tailed(shape: tuple[int, ...], seed: int = 0, freedom: float = 3.0) -> jax.Array:
    """Draws from a t distribution, in NumPy: the program of `jax.random.t` takes a second to compile."""
    return jax.device_put(np.random.default_rng(seed).standard_t(freedom, shape).astype(np.float32))


@eqx.filter_jit
def outputs(model: Any, xs: Any) -> Any:
    """The outputs for a batch: one program, where JAX compiles one for each operation outside of `jit`."""
    return jax.vmap(model)(xs)


# A model to train with float masters, its loss, and what of it optax takes.


def mlp(key: Any) -> eqx.nn.MLP:
    return eqx.nn.MLP(20, 3, 40, 1, key=key)


@eqx.filter_jit
def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - jnp.sin(x[:, :3])) ** 2)


def import_example(folder: str, name: str) -> Any:
    """Imports a module of a folder of `examples`, as a program in that folder does."""
    path = str(Path(__file__).parents[1] / "examples" / folder)
    sys.path.insert(0, path)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(path)


def arrays(model: Any) -> Any:
    return eqx.filter(model, eqx.is_array)


class Halved(eqq.extend.AbstractScaleMethod):
    """A method that halves the scales, so that the largest values clip."""

    def choose_scales(self, blocks, format):
        return eqq.AbsMax().choose_scales(blocks, format)[0] / 2, None
