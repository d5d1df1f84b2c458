"""Prints the tables of the documentation, as Markdown, each with the markers around it in its page.

`--check` fails if a page differs from the output; `--write` updates the pages.
"""

import argparse
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jaxtyping import Array, Float32

import eqquant as eqq
from eqquant._formats.base import AbstractVectorFormat


DOCS = pathlib.Path(__file__).parent

_NF4 = "[QLoRA](https://arxiv.org/abs/2305.14314)"
_FP8 = "[FP8 Formats](https://arxiv.org/abs/2209.05433)"
_MX = "[OCP MX 1.0](https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf)"
_NVFP4 = (
    "[NVIDIA](https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference/)"
)
_GGUF = "[ggml](https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c)"
_QTIP = "[QTIP](https://arxiv.org/abs/2406.11235)"
_MLX = "[MLX](https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html)"
_TERNARY = "[BitNet b1.58](https://arxiv.org/abs/2402.17764)"
_DYNAMIC = "[8-bit Optimizers](https://arxiv.org/abs/2110.02861)"
_BINARY = "[XNOR-Net](https://arxiv.org/abs/1603.05279)"

# What it is, what it does, and where it comes from.
FORMATS: Sequence[tuple[eqq.extend.AbstractFormat, str, str]] = (
    (eqq.Int8(), r"$s = a / 127$, codes $-127 \ldots 127$", "common"),
    (eqq.Int8(symmetric=False), r"$s = r / 255$, codes $0 \ldots 255$", "common"),
    (eqq.FP8(), r"$s = a / 448$, e4m3", _FP8),
    (eqq.FP8("e5m2"), r"$s = a / 57344$, e5m2", _FP8),
    (eqq.MXFP8(), r"$s = 2^{\lfloor \log_2 a \rfloor - 8}$, e4m3", _MX),
    (eqq.MXFP8("e5m2"), r"$s = 2^{\lfloor \log_2 a \rfloor - 15}$, e5m2", _MX),
    (eqq.Dynamic8(), r"$s = a$, seven decades of levels", _DYNAMIC),
    (eqq.formats.Q8_0(), r"$s = a / 127$ in float16, codes $-127 \ldots 127$", _GGUF),
    (eqq.Int6(), r"$s = a / 31$, codes $-31 \ldots 31$", "common"),
    (eqq.Int5(), r"$s = a / 15$, codes $-15 \ldots 15$", "common"),
    (eqq.formats.Q6_K(), r"$s = m / {-32}$ in eight bits, codes $-32 \ldots 31$", _GGUF),
    (eqq.formats.Q5_0(), r"$s = m / {-16}$ in float16, codes $-16 \ldots 15$", _GGUF),
    (eqq.formats.Q5_1(), r"$s = (\max x - \min x) / 31$, offset $\min x$, in float16", _GGUF),
    (eqq.formats.Q5_K(), r"$s = r / 31$, offset $\min x$, in six bits", _GGUF),
    (eqq.NF4(), r"$s = a$, 16 levels of equal probability", _NF4),
    (eqq.NF4(double_quant=True), r"$s = a$ in eight bits, the same levels", _NF4),
    (eqq.Int4(), r"$s = a / 7$, codes $-7 \ldots 7$", "common"),
    (eqq.Int4(symmetric=False), r"$s = r / 15$, codes $0 \ldots 15$", "common"),
    (eqq.formats.Q4_0(), r"$s = m / {-8}$ in float16, codes $-8 \ldots 7$", _GGUF),
    (eqq.formats.Q4_1(), r"$s = (\max x - \min x) / 15$, offset $\min x$, in float16", _GGUF),
    (eqq.formats.Q4_K(), r"$s = r / 15$, offset $\min x$, in six bits", _GGUF),
    (eqq.formats.IQ4_NL(), r"$s = m / {-127}$ in float16, 16 levels, none zero", _GGUF),
    (eqq.formats.IQ4_XS(), r"$s = m / {-127}$ in six bits, 16 levels, none zero", _GGUF),
    (eqq.formats.MLX(), r"$s = (\max x - \min x) / 15$, the extreme as offset", _MLX),
    (eqq.MXFP4(), r"$s = 2^{\lfloor \log_2 a \rfloor - 2}$, e2m1", _MX),
    (eqq.NVFP4(), r"$s = a / 6$ in e4m3, e2m1", _NVFP4),
    (eqq.Int3(), r"$s = m / {-4}$, codes $-4 \ldots 3$", "[design](design.md#two-bits)"),
    (eqq.formats.Q3_K(), r"$s = m / {-4}$ in six bits, codes $-4 \ldots 3$", _GGUF),
    (eqq.Int2(), r"$s = m / {-2}$, codes $-2 \ldots 1$", "[design](design.md#two-bits)"),
    (eqq.Int2(symmetric=False), r"$s = r / 3$, codes $0 \ldots 3$", "common"),
    (eqq.formats.Q2_K(), r"$s = r / 3$, offset $\min x$, in four bits", _GGUF),
    (eqq.formats.IQ3_S(), "512 vectors of 4", _GGUF),
    (eqq.formats.IQ3_XXS(), "256 vectors of 4", _GGUF),
    (eqq.formats.IQ2_S(), "1024 vectors of 8", _GGUF),
    (eqq.formats.IQ2_XS(), "512 vectors of 8", _GGUF),
    (eqq.formats.IQ2_XXS(), "256 vectors of 8", _GGUF),
    (eqq.formats.IQ1_M(), "2048 vectors of 8", _GGUF),
    (eqq.formats.IQ1_S(), "2048 vectors of 8", _GGUF),
    (eqq.formats.Trellis(4), "hashes of 12 bits", _QTIP),
    (eqq.formats.Trellis(3), "hashes of 12 bits", _QTIP),
    (eqq.formats.Trellis(2), "hashes of 12 bits", _QTIP),
    (eqq.formats.Q2_0(), r"$s = a$ in float16, codes $-1 \ldots 2$", _GGUF),
    (eqq.formats.TQ2_0(), r"$s = a$ in float16, codes $-1, 0, 1$", _GGUF),
    (eqq.Ternary(), r"$s = \bar a$, codes $-1, 0, 1$", _TERNARY),
    (eqq.formats.Q1_0(), r"$s = \bar a$ in float16, codes $-1, 1$, none zero", _GGUF),
    (eqq.Binary(), r"$s = \bar a$, codes $-1, 1$, none zero", _BINARY),
)


def normal_weights() -> Float32[Array, "4096 4096"]:
    return jr.normal(jr.key(0), (4096, 4096))


def heavy_tailed_weights() -> Float32[Array, "4096 4096"]:
    """Student's t distribution of three degrees of freedom."""
    squares = sum(jr.normal(key, (4096, 4096)) ** 2 for key in jr.split(jr.key(1), 3))
    return normal_weights() / jnp.sqrt(squares / 3)


@jax.jit
def relative_mse(x: Float32[Array, "*shape"], y: Float32[Array, "*shape"]) -> Float32[Array, ""]:
    return jnp.mean((y - x) ** 2) / jnp.mean(x**2)


def decibel(mse: float) -> str:
    return f"{-10 * math.log10(mse):.2f}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table. A header that ends in a colon aligns its column to the right."""
    rule = ["---:" if title.endswith(":") else "---" for title in header]
    titles = [title.removesuffix(":") for title in header]
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, rule, *rows))


#
# The tables
#


def formats() -> str:
    """Every format, on weights with thin and with heavy tails."""
    normal, heavy = normal_weights(), heavy_tailed_weights()
    rows = []
    for format, formula, source in FORMATS:
        # Without native kernels the searches of vectors and of a trellis take too long for more rows.
        searched = 16 if isinstance(format, eqq.formats.Trellis) else 256
        tables = [w[:searched] if isinstance(format, AbstractVectorFormat) else w for w in (normal, heavy)]
        q = eqq.quantize(tables[0], format)
        mse, mse_heavy = (float(relative_mse(w, eqq.quantize(w, format).dequantize())) for w in tables)
        block = {None: "channel", "tensor": "tensor"}.get(q.block_size, str(q.block_size))
        numbers = (f"{8 * q.nbytes / q.size:.3f}", decibel(mse), decibel(mse_heavy))
        rows.append((f"`{format!r}`", formula, block, *numbers, source))
    numeric = ("Bits per weight:", "SQNR, dB:", "SQNR with heavy tails, dB:")
    return markdown(("Format", "Scale and codes", "Block", *numeric, "Source"), rows)


def two_bits() -> str:
    """`Int2` beside the rule that `Int4` and `Int8` follow."""

    class _Absmax(eqq.Int2):
        def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
            return jnp.max(jnp.abs(blocks), axis=-1)

    w = normal_weights()
    rules = {r"$s = m / {-2}$, levels $-2 \ldots 1$": eqq.Int2(), r"$s = a$, levels $-1 \ldots 1$": _Absmax()}
    rows = [(rule, decibel(float(relative_mse(w, eqq.quantize(w, f).dequantize())))) for rule, f in rules.items()]
    return markdown(("Rule", "SQNR, dB:"), rows)


def double_quant() -> str:
    """Ways to quantize the scales of NF4, where blocks are alike and where they are not."""
    nf4, block = eqq.NF4(), 64
    through = lambda format: lambda scale: eqq.quantize(scale, format).dequantize()

    def e4m3_about_the_mean(scale: Float32[Array, "rows blocks"]) -> Float32[Array, "rows blocks"]:
        return through(eqq.FP8("e4m3", block_size=256))(scale - scale.mean()) + scale.mean()

    rules: dict[str, Callable[[Array], Array]] = {
        "float32, not quantized": lambda scale: scale,
        "ue4m4 (ours)": through(eqq.FP8("ue4m4", block_size=256)),
        "e4m3": through(eqq.FP8("e4m3", block_size=256)),
        "e4m3 about the mean (the paper)": e4m3_about_the_mean,
        "uint8, even steps": through(eqq.Int8(block_size=256, symmetric=False)),
    }

    @jax.jit
    def mse_of_blocks(w: Float32[Array, "rows columns"], scale: Float32[Array, "rows blocks"]) -> Array:
        scale = jnp.repeat(scale, block, axis=-1)
        values = nf4.decode(nf4.encode(jnp.where(scale == 0, 0, w / scale))) * scale
        norms = lambda x: jnp.sum(x.reshape(*x.shape[:-1], -1, block) ** 2, axis=-1)
        return norms(values - w) / norms(w)

    alike = normal_weights()
    factors = jnp.exp(jr.uniform(jr.key(1), (4096, 4096 // block), maxval=math.log(1000)))
    spread = alike * jnp.repeat(factors, block, axis=-1)
    rows = []
    for name, rule in rules.items():
        mse, mse_spread = (mse_of_blocks(w, rule(eqq.quantize(w, nf4).scale)) for w in (alike, spread))
        lost = jnp.mean(mse_spread > 0.99)
        rows.append((name, decibel(float(mse.mean())), decibel(float(mse_spread.mean())), f"{lost:.2%}"))
    return markdown(("Scales", "Alike, dB:", "Spread, dB:", "Spread, lost:"), rows)


def training_memory() -> str:
    """Bytes per parameter of a square weight in training with Adam: what a loop holds between and within steps."""
    n, adam = 1024, optax.adam(1e-3)
    w = jr.normal(jr.key(0), (n, n))
    nf4 = eqq.quantize_tree({"w": w}, eqq.NF4())
    simulated = eqq.quantize_tree({"w": w}, eqq.NF4(), simulate=True)
    lora = eqq.loraify(eqq.quantize_tree({"w": w}, eqq.NF4(double_quant=True)), rank=8, key=jr.key(1))
    eight_bits = eqq.quantize_state(adam)
    setups = {
        "float32, Adam": ({"w": w}, adam),
        "float32, 8-bit Adam": ({"w": w}, eight_bits),
        "QAT to NF4: `float_masters(adam)`": (nf4, eqq.float_masters(adam)),
        "QAT to NF4: `float_masters(quantize_state(adam))`": (nf4, eqq.float_masters(eight_bits)),
        "QAT to NF4: `simulate=True`, Adam": (simulated, adam),
        "QLoRA: NF4 with double quantization, rank 8, Adam": (lora, eqq.train_only(adam, eqq.trainable_mask(lora))),
    }
    rows = []
    for name, (model, optim) in setups.items():
        state = optim.init(model)
        masters = eqq.tree_nbytes(getattr(state, "masters", ()))
        grads = eqq.filter_grad(lambda model: jnp.sum(model["w"] @ jnp.ones(n)))(model)
        weights, grads, moments = (eqq.tree_nbytes(x) for x in (model, grads, state))
        parts = (weights, grads, masters, moments - masters)
        rows.append((name, *(f"{part / n**2:.2f}" for part in (*parts, sum(parts)))))
    return markdown(("Training", "Weights:", "Gradients:", "Masters:", "Moments:", "Sum:"), rows)


def methods() -> str:
    """What searching for scales gains, by format and method."""
    weights = [w[:1024] for w in (normal_weights(), heavy_tailed_weights())]
    formats = (eqq.Int2(), eqq.Int4(), eqq.NF4(), eqq.MXFP4())

    @jax.jit
    def robust(x: Float32[Array, "*shape"], y: Float32[Array, "*shape"]) -> Float32[Array, ""]:
        return jnp.mean(jnp.abs(y - x) ** 0.7)

    rows = []
    for format in formats:
        absmax_error = 1.0
        for method in (eqq.AbsMax(), eqq.MSE(), eqq.HQQ()):
            dense = [eqq.quantize(w, format, method=method).dequantize() for w in weights]
            sqnr = [decibel(float(relative_mse(w, y))) for w, y in zip(weights, dense, strict=True)]
            error = float(robust(weights[1], dense[1]))
            absmax_error = error if method == eqq.AbsMax() else absmax_error
            rows.append((f"`{format!r}`", f"`{method!r}`", *sqnr, f"{error / absmax_error:.1%}"))
    return markdown(("Format", "Method", "SQNR, dB:", "SQNR with heavy tails, dB:", "HQQ's measure:"), rows)


# What the mixes of `benchmarks/accuracy.py` are: linear layers, those with more bits, and words.
MIXES = {
    "trellis 2.04": "trellis2, words too; rotated; GPTQ with gradients",
    "trellis 3.04": "trellis3, the same",
    "trellis 4.04": "trellis4, the same",
    "2.57": "3 bits; words 2, weighed",
    "3.30": "NF4, value and output 5; words 2, weighed",
    "3.78": "NF4, value and output 5; words 3",
    "4.13, no data": "5 bits, value 6; words 3; no data",
    "4.25": "5 bits, value and output 6; words 3",
    "4.80": "5 bits, value and output 6; words 4",
    "W8A8 per token": "8 bits x 8 bits, a scale and a zero point for each token",
    "W8A8 per token, rotated": "the same, rotated",
    "W8A8 static": "8 bits x 8 bits, scales from calibration",
    "W4A4 per token, rotated": "4 bits x 4 bits, a scale and a zero point for each token, rotated; words 8",
}


def accuracy() -> str:
    """What `benchmarks/accuracy.py` measured: each mix before and after training, for each seed."""
    results = json.loads((DOCS.parent / "benchmarks" / "accuracy.json").read_text())
    rows = []
    for name, what in MIXES.items():
        keys = [f"{name}, seed {seed}" for seed in range(2)]
        seeds = [results["recipes"][key] for key in keys if key in results["recipes"]]
        if not seeds:
            continue
        first, peers = seeds[0], results["peers"].get(name)
        of = lambda key, digits, n, seeds=seeds: " / ".join(f"{r[n][key]:.{digits}f}" for r in seeds if len(r) > n)
        rows.append(
            (
                what,
                f"{first[0]['bits']:.2f}",
                of("cosine", 4, 0),
                of("nearest", 3, 0),
                of("cosine", 4, 1),
                of("nearest", 3, 1),
                "" if peers is None else f"{peers:g}",
                " + ".join(f"{row['seconds']:.0f}" for row in first),
            )
        )
    header = ("Weights", "Bits:", "Cosine:", "Same 10:", "Trained:", "Same 10:", "Others:", "Seconds:")
    return markdown(header, rows)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "formats": ("formats.md", formats),
    "two-bits": ("design.md", two_bits),
    "double-quant": ("design.md", double_quant),
    "methods": ("calibrate.md", methods),
    "accuracy": ("calibrate.md", accuracy),
    "training-memory": ("training.md", training_memory),
}


#
# The pages
#


def update_pages(tables: Mapping[str, tuple[str, Callable[[], str]]], *, check: bool, write: bool, script: str) -> int:
    """Prints tables, and compares them with those of their pages or puts them there. Returns how many are wrong."""
    stale = []
    for name, (page, table) in tables.items():
        path, text = DOCS / page, f"<!-- table:{name} -->\n\n{table()}\n\n<!-- end -->"
        print(text, end="\n\n")
        if not (check or write):
            continue
        old = path.read_text()
        pattern = rf"<!-- table:{name} -->.*?<!-- end -->"
        new, found = re.subn(pattern, lambda _, text=text: text, old, flags=re.DOTALL)
        if found != 1:
            stale.append(f"docs/{page} must have the markers of the table {name!r} once. Got them {found} times.")
        elif new != old and check:
            stale.append(f"docs/{page}: the table {name!r} differs. Run `python docs/{script} --write`.")
        elif new != old:
            path.write_text(new)
    print("\n".join(stale), file=sys.stderr, end="\n" if stale else "")
    return len(stale)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if a page differs")
    parser.add_argument("--write", action="store_true", help="bring the pages up to date")
    args = parser.parse_args()
    return update_pages(TABLES, check=args.check, write=args.write, script="format_table.py")


if __name__ == "__main__":
    sys.exit(main())
