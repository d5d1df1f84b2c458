"""Train a small Llama on Python's documentation, and write it as a folder of Hugging Face's layout.

python train.py FOLDER                   # config.json, model.safetensors and tokenizer.json: some minutes on two cores
python generate.py FOLDER "A function is"
python train.py FOLDER --four-bits       # goes on in four bits, by QAT and QAD: how far from floats, beside rounding

A run that was stopped goes on where it was: the state of training is in FOLDER/training.safetensors. The last tenth of
the text is held out. The measure is bits per byte, the size of that text if the model compressed it.
"""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from configuration import from_json
from export import write_folder
from jaxtyping import Array, Float, Int, PyTree
from llama import Cache, Llama, load
from tokenizers import decoders, models, pre_tokenizers, Tokenizer, trainers

import eqquant as eqq


@dataclasses.dataclass(frozen=True)
class Size:
    """What a run is: the model, the tokenizer, and how long it is trained."""

    vocabulary: int = 1024
    hidden: int = 256
    intermediate: int = 768
    layers: int = 4
    heads: int = 4
    context: int = 256
    batch: int = 8
    steps: int = 225
    peak: float = 2e-3

    def config(self) -> dict[str, Any]:
        """The `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads // 2,
            "head_dim": self.hidden // self.heads,
            "max_position_embeddings": 2 * self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "eos_token_id": 0,
            "bos_token_id": 0,
        }


SMALL = Size()
SMOKE = Size(vocabulary=320, hidden=64, intermediate=128, layers=2, heads=2, context=32, batch=4, steps=20)


def texts() -> tuple[str, str]:
    """Python's help pages, to train on and held out. They repeat each other, and no paragraph may be in both parts."""
    paragraphs = list(dict.fromkeys("\n\n".join(topics.values()).split("\n\n")))
    cut = len(paragraphs) * 9 // 10
    return "\n\n".join(paragraphs[:cut]), "\n\n".join(paragraphs[cut:])


def make_tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """A byte-pair tokenizer: every text has tokens, and every list of tokens gives its text back."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    return tokenizer


def windows(ids: Int[np.ndarray, " tokens"], length: int) -> Int[np.ndarray, "windows length"]:
    """Cuts a text into windows that overlap by one token: each token but the first is predicted once."""
    count = (len(ids) - 1) // length
    return np.stack([ids[n * length : (n + 1) * length + 1] for n in range(count)])


def compute_logits(model: Llama, windows: Int[Array, "batch length"]) -> Float[Array, "batch tokens vocabulary"]:
    batch, length = windows.shape
    return model(windows[:, :-1], Cache.empty(model.config, batch, length - 1))[0]


def log_likelihood(model: Llama, windows: Int[Array, "batch length"]) -> Float[Array, "batch tokens"]:
    """The base-two logarithm of the probability of each token, given the tokens before it."""
    logits = compute_logits(model, windows)
    return -optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]) / jnp.log(2)


def loss(model: Llama, windows: Int[Array, "batch length"]) -> Float[Array, ""]:
    return -jnp.mean(log_likelihood(model, windows))


def optimizer(size: Size) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0.0, size.peak, size.steps // 10, size.steps, size.peak / 10)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))


def train(folder: Path, size: Size, seconds: float = float("inf")) -> float | None:
    """Trains, writes the folder, and returns the bits per byte of the text held out; `None` if time was not enough."""
    folder.mkdir(parents=True, exist_ok=True)
    text, held_out = texts()
    tokenizer = make_tokenizer(text, size.vocabulary)
    ids = jnp.asarray(tokenizer.encode(text).ids, jnp.int32)
    optim = optimizer(size)
    model = Llama(from_json(size.config(), head=False), key=jr.key(0))
    # The embedding is the head too: with it at its own size, the first logits would be far too sure.
    model = eqx.tree_at(lambda m: m.embedding.weight, model, model.embedding.weight / size.hidden**0.5)
    state = optim.init(eqx.filter(model, eqx.is_inexact_array))
    done, kept = 0, folder / "training.safetensors"
    if kept.exists():
        model, state, done = eqq.load(kept, (model, state, done))

    @eqx.filter_jit(donate="all-except-first")
    def step(ids: Array, model: Llama, state: PyTree, key: Array) -> tuple[Llama, PyTree, Array]:
        starts = jr.randint(key, (size.batch, 1), 0, len(ids) - size.context)
        value, grads = eqx.filter_value_and_grad(loss)(model, ids[starts + jnp.arange(size.context + 1)])
        updates, state = optim.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, value

    count = sum(x.size for x in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
    print(f"{count:,} parameters, {len(text):,} bytes in {len(ids):,} tokens, {size.steps} steps", flush=True)
    began, values = time.perf_counter(), []
    for n in range(done, size.steps):
        model, state, value = step(ids, model, state, jr.fold_in(jr.key(1), n))
        values.append(value)
        if (n + 1) % 25 == 0:
            mean, values = float(jnp.stack(values).mean()), []
            print(f"step {n + 1}: {mean:.3f} bits per token, {time.perf_counter() - began:.0f} s", flush=True)
            eqq.save(kept, (model, state, n + 1))
            if time.perf_counter() - began > seconds and n + 1 < size.steps:
                print(f"stopped after step {n + 1} of {size.steps}: run it again to go on", flush=True)
                return None
    write_folder(folder, model, size.config(), tokenizer)
    kept.unlink(missing_ok=True)
    bits = bits_per_byte(model, tokenizer, held_out, size.context)
    print(f"{bits:.3f} bits per byte of the text held out")
    return bits


def train_four_bits(folder: Path, size: Size) -> None:
    """Trains the model of a folder in MXFP4, with activations in MXFP8: on the text (QAT), or on its floats (QAD).

    Prints the divergence of the next token from floats, over the text held out, and how large it is beside that of
    rounding these floats. For QAT they are floats that were trained for as many more steps.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = [np.asarray(tokenizer.encode(text).ids, np.int32) for text in texts()]
    inside, held_out = (windows(ids, size.context) for ids in tokens)
    batches = np.array_split(np.random.default_rng(0).permutation(inside), len(inside) // size.batch)
    batches, passes = [jnp.asarray(batch[: size.batch]) for batch in batches[: size.steps]], 2
    optim = optax.adam(optax.cosine_decay_schedule(1e-4, passes * len(batches)))

    @eqx.filter_jit
    def step(model: Llama, state: PyTree, batch: Array) -> tuple[Llama, PyTree]:
        updates, state = optim.update(eqx.filter_grad(loss)(model, batch), state)
        return eqx.apply_updates(model, updates), state

    def train_on(model: Llama) -> Llama:
        state = optim.init(eqx.filter(model, eqx.is_inexact_array))
        for batch in passes * batches:
            model, state = step(model, state, batch)
        return model

    simulate = lambda model: eqq.quantize_tree(model, "mxfp4", activations="mxfp8", simulate=True)
    model = load(eqq.io.open(folder))
    qad = eqq.distill(
        simulate(model), model, batches[1:], loss="kl", apply=compute_logits, held_out=batches[:1], passes=3 * passes
    )
    for name, floats, trained in (("QAT", train_on(model), train_on(simulate(model))), ("QAD", model, qad)):
        rounding, report = (
            eqq.analysis.output_divergence(floats, eqq.finalize(q), held_out, apply=compute_logits)
            for q in (simulate(floats), trained)
        )
        share, error = report.kl / rounding.kl, report.kls.std() / report.outputs**0.5
        print(f"{name}: {report.kl:.4f} ± {error:.4f} nats, {share:.2f} of rounding ({rounding.kl:.4f})")


def bits_per_byte(model: Llama, tokenizer: Tokenizer, text: str, context: int, at_once: int = 8) -> float:
    """Of a text, as far as it fills batches of windows."""
    ids = np.asarray(tokenizer.encode(text).ids, np.int32)
    inside = windows(ids, context)
    batches = inside[: len(inside) // at_once * at_once].reshape(-1, at_once, context + 1)
    measure = eqx.filter_jit(log_likelihood)
    bits = -sum(float(measure(model, jnp.asarray(batch)).sum()) for batch in batches)
    return bits / len(tokenizer.decode(ids[1 : batches.shape[0] * at_once * context + 1].tolist()).encode())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="where the model is written")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stops after so long; run again to go on")
    parser.add_argument("--four-bits", action="store_true", help="goes on with the model in FOLDER, in four bits")
    parser.add_argument("--smoke", action="store_true", help="tries everything with a tiny model")
    options = parser.parse_args(arguments)
    if options.smoke:
        with tempfile.TemporaryDirectory() as folder:
            train(options.folder or Path(folder), SMOKE)
            train_four_bits(options.folder or Path(folder), SMOKE)
        return
    if options.folder is None:
        parser.error("FOLDER must be where the model is written. Got none.")
    if options.four_bits:
        train_four_bits(options.folder, SMALL)
    else:
        train(options.folder, SMALL, options.seconds)


if __name__ == "__main__":
    main()
