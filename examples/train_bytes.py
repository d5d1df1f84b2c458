"""A byte-level transformer on real text: quantized after training, trained quantized, and finetuned through QLoRA.

With `--low-precision` it is trained from scratch instead, by products of eight bits forward and backward: `int8`,
`fp8`, or `fp8-delayed`, whose scales follow from earlier steps; `mxfp8`; or of four bits, `nvfp4`.

The text is Python's own: the help pages of `pydoc` to train on, the source of its standard library to finetune on. The
last tenth of both is held out. The measure is bits per byte, the size of the text if the model compressed it.
"""

# %% Imports
import argparse
import importlib
import inspect
import time
from pydoc_data.topics import topics

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, UInt8
from rich.console import Console
from rich.table import Table

import eqquant as eqq


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--smoke", action="store_true", help="a smaller model, and fewer steps")
parser.add_argument("--low-precision", nargs="*", metavar="FORMAT", help="only train in float and in these formats")
parser.add_argument("--seed", type=int, default=0, help="of the initial weights, with `--low-precision`")
parser.add_argument("--steps", type=int, help="of training from the start; 900, or 120 with `--smoke`")
args = parser.parse_args()
depth, width, heads, context, batch_size = (2, 64, 2, 64, 8) if args.smoke else (4, 128, 4, 128, 16)
steps, more_steps = (120, 30) if args.smoke else (900, 250)
steps = args.steps or steps
formats = ("nf4", "ternary") if args.smoke else ("nf4", "int4", "ternary")
console = Console(width=120)


# %% Data: a few hundred thousand bytes, and every byte is a token
def split(text: str) -> tuple[UInt8[Array, " train"], UInt8[Array, " held_out"]]:
    # Help pages repeat each other, and no paragraph may be in both parts.
    paragraphs = dict.fromkeys(text.split("\n\n"))
    tokens = jnp.asarray(np.frombuffer("\n\n".join(paragraphs).encode(), np.uint8))
    return tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]


modules = ("argparse", "ast", "collections", "dataclasses", "difflib", "enum", "functools", "inspect", "textwrap")
english, english_held_out = split("\n\n".join(topics.values()))
code, code_held_out = split("\n\n".join(inspect.getsource(importlib.import_module(name)) for name in modules))
print(f"English: {len(english):,} bytes to train on, and {len(english_held_out):,} held out.")
print(f"Code: {len(code):,} bytes to finetune on, and {len(code_held_out):,} held out.")


# %% The transformer: plain Equinox
class Block(eqx.Module):
    """Causal attention, then a dense network on each byte; both normalized first, both residual."""

    attention_norm: eqx.nn.RMSNorm
    attention_in: eqx.nn.Linear
    attention_out: eqx.nn.Linear
    dense_norm: eqx.nn.RMSNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray) -> None:
        keys = jr.split(key, 4)
        self.attention_norm = eqx.nn.RMSNorm(width)
        self.attention_in = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.attention_out = eqx.nn.Linear(width, width, key=keys[1])
        self.dense_norm = eqx.nn.RMSNorm(width)
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[2])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[3])

    def attention(self, x: Float[Array, "length width"]) -> Float[Array, "length width"]:
        qkv = jax.vmap(self.attention_in)(x).reshape(len(x), 3, heads, -1)
        mixed = jax.nn.dot_product_attention(qkv[:, 0], qkv[:, 1], qkv[:, 2], is_causal=True)
        return jax.vmap(self.attention_out)(mixed.reshape(x.shape))

    def dense(self, x: Float[Array, " width"]) -> Float[Array, " width"]:
        return self.down(jax.nn.gelu(self.up(x)))

    def __call__(self, x: Float[Array, "length width"]) -> Float[Array, "length width"]:
        x = x + self.attention(jax.vmap(self.attention_norm)(x))
        return x + jax.vmap(self.dense)(jax.vmap(self.dense_norm)(x))


class Transformer(eqx.Module):
    """Bytes to the logits of the byte that follows each. The blocks are one module with stacked weights."""

    byte: eqx.nn.Embedding
    position: eqx.nn.Embedding
    blocks: Block
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, *, key: PRNGKeyArray) -> None:
        keys = jr.split(key, 4)
        self.byte = eqx.nn.Embedding(256, width, key=keys[0])
        self.position = eqx.nn.Embedding(context, width, key=keys[1])
        self.blocks = eqx.filter_vmap(lambda key: Block(key=key))(jr.split(keys[2], depth))
        self.norm = eqx.nn.RMSNorm(width)
        self.head = eqx.nn.Linear(width, 256, key=keys[3])

    def __call__(self, text: UInt8[Array, " length"]) -> Float[Array, "length 256"]:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def block(x: Float[Array, "length width"], arrays: Block) -> tuple[Float[Array, "length width"], None]:
            return eqx.combine(arrays, static)(x), None

        x = jax.vmap(self.byte)(text) + jax.vmap(self.position)(jnp.arange(len(text)))
        x, _ = jax.lax.scan(block, x, arrays)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


# %% One loss, one training loop, one evaluation: for float, quantized and adapted models alike
def loss(model: Transformer, windows: UInt8[Array, "batch length"]) -> Float[Array, ""]:
    logits = jax.vmap(model)(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:].astype(int)).mean() / jnp.log(2)


def train(
    name: str,
    model: Transformer,
    optim: optax.GradientTransformation,
    text: UInt8[Array, " train"],
    steps: int,
) -> Transformer:
    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)  # an update must not change the structure of anything
    def step(
        model: Transformer, state: PyTree, text: UInt8[Array, " train"], key: PRNGKeyArray
    ) -> tuple[Transformer, PyTree, Float[Array, ""]]:
        starts = jr.randint(key, (batch_size, 1), 0, len(text) - context)
        value, grads = eqq.filter_value_and_grad(loss)(model, text[starts + jnp.arange(context + 1)])
        updates, state = optim.update(grads, state, model)
        return eqq.apply_updates(model, updates), state, value

    began, values, state = time.perf_counter(), [], optim.init(model)
    for key in jr.split(jr.key(1), steps):  # the same windows for every model
        model, state, value = step(model, state, text, key)
        values.append(value)
    seen = jnp.stack(values[-steps // 10 :]).mean()
    print(f"{name:30} {steps:4} steps, {time.perf_counter() - began:4.0f} s, {seen:.3f} bits per byte at the end")
    return model


@eqx.filter_jit
def bits_per_byte(model: Transformer, text: UInt8[Array, " held_out"]) -> Float[Array, ""]:
    starts = jnp.arange(0, len(text) - context, context)[:, None]
    return loss(model, text[starts + jnp.arange(context + 1)])


def adamw(peak: float, steps: int) -> optax.GradientTransformation:
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, peak, steps // 10, steps))


# %% Training in low precision, from scratch: the same steps on the same windows
def train_in_low_precision(formats: tuple[str, ...]) -> dict[str, float]:
    untrained, found = Transformer(key=jr.key(args.seed)), {}
    for name in ("float32", *formats):
        format, delayed, _ = name.partition("-delayed")
        candidate = (
            eqq.low_precision_training(untrained, format, delayed=bool(delayed)) if name != "float32" else untrained
        )
        optim = eqq.delayed_scaling(adamw(3e-3, steps)) if delayed else adamw(3e-3, steps)
        trained = train(name, candidate, optim, english, steps)
        # Evaluated as it trains, and with the same weights in float.
        as_trained, dense = (bits_per_byte(m, english_held_out) for m in (trained, eqq.dequantize_tree(trained)))
        found[name] = float(as_trained)
        difference = found[name] / found["float32"] - 1
        print(f"{name}: {as_trained:.4f} bits per byte ({difference:+.2%}), in float {dense:.4f}", flush=True)
    return found


if args.low_precision is not None:
    found = train_in_low_precision(tuple(args.low_precision) or ("int8", "fp8"))
    assert not args.smoke or all(value < 1.05 * found["float32"] for value in found.values())
    raise SystemExit

# %% Training in float, with float moments and with moments of eight bits
untrained = Transformer(key=jr.key(0))
optim = adamw(3e-3, steps)
model = train("float", untrained, optim, english, steps)
model_8bit = train("float, 8-bit Adam", untrained, eqq.quantize_state(optim), english, steps)
in_float = bits_per_byte(model, english_held_out)
in_float_8bit = bits_per_byte(model_8bit, english_held_out)

table = Table("optimizer", "bits per byte", "optimizer state", title="Adam in eight bits")
for name, value, state in (
    ("adamw", in_float, optim.init(untrained)),
    ("quantize_state(adamw)", in_float_8bit, eqq.quantize_state(optim).init(untrained)),
):
    table.add_row(name, f"{value:.3f}", f"{eqq.tree_nbytes(state):,} bytes")
console.print(table)

# %% Quantization after training, and quantization-aware training
# Masters start from the float model. It gets as many steps more, so that no format wins by having seen more text.
quantized = {name: eqq.quantize_tree(model, name) for name in formats}
optim = adamw(1e-3, more_steps)
trained = {"float32": train("float, more steps", model, optim, english, more_steps)}
for name, candidate in quantized.items():
    masters = eqq.float_masters(optim, masters=model)
    trained[name] = train(f"QAT, {name}", candidate, masters, english, more_steps)

# %% Bits per byte, and bytes
before = {name: bits_per_byte(m, english_held_out) for name, m in {"float32": model, **quantized}.items()}
after = {name: bits_per_byte(m, english_held_out) for name, m in trained.items()}
table = Table("weights", "after training", f"{more_steps} steps more", "bytes", "of float32", title="Bits per byte")
for name, candidate in trained.items():
    nbytes = eqq.tree_nbytes(candidate)
    share = f"{nbytes / eqq.tree_nbytes(model):.1%}"
    table.add_row(name, f"{before[name]:.3f}", f"{after[name]:.3f}", f"{nbytes:,}", share)
console.print(table)

# %% QLoRA: a frozen base in four bits, and small factors that learn to read code
base = eqq.quantize_tree(model, eqq.NF4(double_quant=True))
adapted = eqq.loraify(base, rank=8, key=jr.key(2))
mask = eqq.trainable_mask(adapted)
finetuned = train("QLoRA, code", adapted, eqq.train_only(adamw(3e-3, more_steps), mask), code, more_steps)
all_float = train("float, code", model, adamw(1e-3, more_steps), code, more_steps)

models = {
    "float": model,
    "quantized": base,
    "quantized, QLoRA": finetuned,
    "the same, merged": eqq.merge_lora(finetuned),
    "the same, merged, dense": eqq.merge_lora(finetuned, dense=True),
    "float, finetuned whole": all_float,
}
code_bits = {name: bits_per_byte(m, code_held_out) for name, m in models.items()}
table = Table("model", "bits per byte", "bytes", title="From English to code")
for name, candidate in models.items():
    table.add_row(name, f"{code_bits[name]:.3f}", f"{eqq.tree_nbytes(candidate):,}")
console.print(table)

# %% Memory: the bytes that each way to train holds between steps, and its gradients
gradients = eqx.filter_jit(eqq.filter_grad(loss))
ways = {
    "float": (model, optim),
    "QAT": (quantized["nf4"], eqq.float_masters(optim, masters=model)),
    "QAT, 8-bit Adam": (quantized["nf4"], eqq.float_masters(eqq.quantize_state(optim), masters=model)),
    "QLoRA": (adapted, eqq.train_only(optim, mask)),
}
held = {}
for name, (candidate, way) in ways.items():
    held[name] = candidate, gradients(candidate, english[None, : context + 1]), way.init(candidate)
table = Table("training", "weights", "gradients", "optimizer state", "total", title="Memory in bytes")
for name, trees in held.items():
    nbytes = [eqq.tree_nbytes(tree) for tree in trees]
    table.add_row(name, *(f"{n:,}" for n in (*nbytes, sum(nbytes))))
console.print(table)

# %% Checks
assert abs(in_float_8bit - in_float) < 0.02
assert all(after[name] < before[name] for name in formats)
assert code_bits["quantized, QLoRA"] < code_bits["quantized"] - (0.02 if args.smoke else 0.5)
assert (
    abs(code_bits["the same, merged, dense"] - code_bits["quantized, QLoRA"]) < 0.001
)  # the same sum, in another order
# Only factors have gradients and optimizer state; everything else keeps its bits.
_, grads, state = held["QLoRA"]
factors = eqx.filter(adapted, mask)
assert {jtu.keystr(path[-1:], simple=True) for path, _ in jtu.tree_leaves_with_path(grads)} == {"a", "b"}
assert eqq.tree_nbytes(grads) == eqq.tree_nbytes(factors)
assert eqq.tree_nbytes(state) == 2 * eqq.tree_nbytes(factors) + 8  # two moments, and two counts
assert eqx.tree_equal(eqx.filter(finetuned, mask, inverse=True), eqx.filter(adapted, mask, inverse=True))
