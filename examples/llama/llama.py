"""Language models of the Llama family in plain Equinox: no line of the model mentions quantization.

Llama, Mistral, Qwen2 and 3, Gemma 1 and 2, Phi-3, Mixtral and the mixtures of Qwen3 differ in a few fields of `Config`.
The paths of the arrays are those of `eqq.io.names`, so that a model loads from every file that `eqq.io.open` reads.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from configuration import Config, config_of
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray

import eqquant as eqq


class Cache(eqx.Module):
    """The keys and values of all tokens so far. Everything that knows how they are stored is in this class."""

    keys: Float[Array, "layers batch context kv_heads size"]
    values: Float[Array, "layers batch context kv_heads size"]

    @staticmethod
    def empty(config: Config, batch: int, context: int, dtype: DTypeLike = jnp.float32) -> "Cache":
        shape = (config.layers, batch, context, config.kv_heads, config.head_size)
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @property
    def context(self) -> int:
        return self.keys.shape[2]

    def write(
        self,
        layer: int | Int[Array, ""],
        positions: Int[Array, "batch length"],
        keys: Float[Array, "batch length kv_heads size"],
        values: Float[Array, "batch length kv_heads size"],
    ) -> "Cache":
        at = (layer, jnp.arange(len(positions))[:, None], positions)
        put = lambda old, new: old.at[at].set(new.astype(old.dtype))
        return Cache(put(self.keys, keys), put(self.values, values))

    def read(
        self, layer: int | Int[Array, ""]
    ) -> tuple[Float[Array, "batch context kv_heads size"], Float[Array, "batch context kv_heads size"]]:
        return self.keys[layer], self.values[layer]


class RMSNorm(eqx.Module):
    """Divides by the root of the mean square, in float32. Gemma stores its weights less one."""

    weight: Float[Array, " size"]
    eps: float = eqx.field(static=True)
    offset: float = eqx.field(static=True)

    def __init__(self, size: int, config: Config, dtype: DTypeLike) -> None:
        self.weight = jnp.ones(size, dtype) - jnp.asarray(config.offset, dtype)
        self.eps, self.offset = config.eps, config.offset

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + self.eps)
        return (y * (self.weight.astype(jnp.float32) + self.offset)).astype(x.dtype)


def per_token(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return jax.vmap(jax.vmap(f))


class Rotation(eqx.Module):
    """Rotary embeddings: turns the halves of each head, pair by pair, by angles that grow with the position."""

    cos: Float[Array, "batch length 1 half"]
    sin: Float[Array, "batch length 1 half"]

    def __init__(self, config: Config, positions: Int[Array, "batch length"]) -> None:
        angles = positions[..., None, None].astype(jnp.float32) * jnp.asarray(config.frequencies())
        self.cos, self.sin = jnp.cos(angles), jnp.sin(angles)

    def __call__(self, x: Float[Array, "batch length heads size"]) -> Float[Array, "batch length heads size"]:
        half = self.cos.shape[-1]
        y = x.astype(jnp.float32)
        a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        turned = [a * self.cos - b * self.sin, b * self.cos + a * self.sin, rest]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Attention(eqx.Module):
    """Attention of each token to itself and those before it. Several heads of `q` share one of `k` and `v`."""

    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    output: eqx.nn.Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, dtype: DTypeLike, key: PRNGKeyArray) -> None:
        keys = jr.split(key, 4)
        rows, kv_rows = config.heads * config.head_size, config.kv_heads * config.head_size
        self.q = eqx.nn.Linear(config.hidden, rows, config.qkv_bias, dtype, key=keys[0])
        self.k = eqx.nn.Linear(config.hidden, kv_rows, config.qkv_bias, dtype, key=keys[1])
        self.v = eqx.nn.Linear(config.hidden, kv_rows, config.qkv_bias, dtype, key=keys[2])
        self.output = eqx.nn.Linear(rows, config.hidden, config.output_bias, dtype, key=keys[3])
        norm = lambda: RMSNorm(config.head_size, config, dtype) if config.qk_norm else None
        self.q_norm, self.k_norm = norm(), norm()
        self.config = config

    def __call__(
        self,
        x: Float[Array, "batch length hidden"],
        layer: int | Int[Array, ""],
        positions: Int[Array, "batch length"],
        rotation: Rotation,
        window: int | Int[Array, ""],
        cache: Cache,
    ) -> tuple[Float[Array, "batch length hidden"], Cache]:
        config = self.config
        q, k, v = (per_token(f)(x).reshape(*x.shape[:2], -1, config.head_size) for f in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cache = cache.write(layer, positions, rotation(k), v)
        keys, values = cache.read(layer)
        # Heads that share keys are one group.
        q = rotation(q).reshape(*x.shape[:2], config.kv_heads, -1, config.head_size)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, keys.astype(q.dtype)).astype(jnp.float32) * config.query_scale
        if config.attention_cap:
            scores = config.attention_cap * jnp.tanh(scores / config.attention_cap)
        # A position of the cache is a position of the text. Behind the last one there are zeros, or padding.
        back = positions[:, :, None] - jnp.arange(cache.context)
        seen = (back >= 0) & ((window == 0) | (back < window))
        shares = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1).astype(x.dtype)
        mixed = jnp.einsum("bkgts,bskd->btkgd", shares, values.astype(x.dtype))
        return per_token(self.output)(mixed.reshape(*x.shape[:2], -1)), cache


class MLP(eqx.Module):
    """`down(activation(gate(x)) * up(x))`: SwiGLU, or GeGLU in Gemma."""

    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)

    def __init__(self, config: Config, dtype: DTypeLike, key: PRNGKeyArray) -> None:
        keys = jr.split(key, 3)
        hidden, intermediate = config.hidden, config.intermediate
        self.gate = eqx.nn.Linear(hidden, intermediate, config.mlp_bias, dtype, key=keys[0])
        self.up = eqx.nn.Linear(hidden, intermediate, config.mlp_bias, dtype, key=keys[1])
        self.down = eqx.nn.Linear(intermediate, hidden, config.mlp_bias, dtype, key=keys[2])
        self.activation = config.activation

    def __call__(self, x: Float[Array, " hidden"]) -> Float[Array, " hidden"]:
        activation = jax.nn.silu if self.activation == "silu" else jax.nn.gelu
        return self.down(activation(self.gate(x)) * self.up(x))


def mixture(
    router: eqx.nn.Linear, experts: MLP, config: Config, x: Float[Array, "tokens hidden"]
) -> Float[Array, "tokens hidden"]:
    """The sum of the few experts that the router chooses for each token, by its shares."""
    shares = jax.nn.softmax(jax.vmap(router)(x).astype(jnp.float32), axis=-1)
    best, chosen = jax.lax.top_k(shares, config.experts_per_token)
    if config.sum_to_one:
        best = best / jnp.sum(best, axis=-1, keepdims=True)
    shares = jnp.zeros_like(shares).at[jnp.arange(len(x))[:, None], chosen].set(best).astype(x.dtype)

    def add(total: Array, n: Array) -> tuple[Array, None]:
        def of_expert() -> Array:
            # Selected here, so that an expert that no token chose is not even read.
            return shares[:, n, None] * jax.vmap(eqq.select(experts, n))(x)

        used = jnp.any(shares[:, n] > 0)
        return total + jax.lax.cond(used, of_expert, lambda: jnp.zeros_like(x)), None

    return jax.lax.scan(add, jnp.zeros_like(x), jnp.arange(config.experts))[0]


class Layer(eqx.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`. Gemma 2 has a norm behind each, too."""

    attention_norm: RMSNorm
    attention: Attention
    attention_post_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: MLP | None
    router: eqx.nn.Linear | None
    experts: MLP | None
    mlp_post_norm: RMSNorm | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, dtype: DTypeLike, key: PRNGKeyArray) -> None:
        attention, mlp, router = jr.split(key, 3)
        norm = lambda: RMSNorm(config.hidden, config, dtype)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_post_norm, self.mlp_post_norm = (norm(), norm()) if config.post_norms else (None, None)
        self.attention = Attention(config, dtype, attention)
        self.mlp = self.router = self.experts = None
        if config.experts:
            self.router = eqx.nn.Linear(config.hidden, config.experts, False, dtype, key=router)
            self.experts = eqx.filter_vmap(lambda k: MLP(config, dtype, k))(jr.split(mlp, config.experts))
        else:
            self.mlp = MLP(config, dtype, mlp)
        self.config = config

    def __call__(
        self, x: Float[Array, "batch length hidden"], *attention_arguments: Any
    ) -> tuple[Float[Array, "batch length hidden"], Cache]:
        y, cache = self.attention(self.attention_norm(x), *attention_arguments)
        x = x + (y if self.attention_post_norm is None else self.attention_post_norm(y))
        y = self.mlp_norm(x)
        if self.mlp is not None:
            y = per_token(self.mlp)(y)
        else:
            y = mixture(self.router, self.experts, self.config, y.reshape(-1, y.shape[-1])).reshape(y.shape)
        return x + (y if self.mlp_post_norm is None else self.mlp_post_norm(y)), cache


class Llama(eqx.Module):
    """From tokens to the logits of the token that follows each.

    `layers` is a list, or with `stacked` one module whose arrays have a first axis for the layers, for `scan`.
    """

    embedding: eqx.nn.Embedding
    layers: list[Layer] | Layer
    norm: RMSNorm
    head: eqx.nn.Linear | None
    config: Config = eqx.field(static=True)

    def __init__(
        self, config: Config, dtype: DTypeLike = jnp.float32, *, stacked: bool = False, key: PRNGKeyArray
    ) -> None:
        embedding, layers, head = jr.split(key, 3)
        make, keys = lambda k: Layer(config, dtype, k), jr.split(layers, config.layers)
        self.embedding = eqx.nn.Embedding(config.vocabulary, config.hidden, dtype=dtype, key=embedding)
        self.layers = eqx.filter_vmap(make)(keys) if stacked else [make(k) for k in keys]
        self.norm = RMSNorm(config.hidden, config, dtype)
        self.head = None if config.tied else eqx.nn.Linear(config.hidden, config.vocabulary, False, dtype, key=head)
        self.config = config

    def hidden(
        self, ids: Int[Array, "batch length"], cache: Cache, start: Int[Array, " batch"]
    ) -> tuple[Float[Array, "batch length hidden"], Cache]:
        """What each token has become after the last layer. The first token of row `b` has the position `start[b]`."""
        positions = start[:, None] + jnp.arange(ids.shape[1])
        rotation, windows = Rotation(self.config, positions), jnp.asarray(self.config.windows)
        x = self.embedding.weight[ids]
        x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        # In float32, layers one by one take less than half the time on a CPU: XLA copies each float weight that a loop
        # takes out of a stack. Quantized ones are read where they lie, but the loop compiles faster.
        if isinstance(self.layers, list):
            for n, layer in enumerate(self.layers):
                x, cache = layer(x, n, positions, rotation, self.config.windows[n], cache)
            return self.norm(x), cache

        def step(carry: tuple[Array, Cache], of_layer: tuple[Array, Array]) -> tuple[tuple[Array, Cache], None]:
            (x, cache), (n, window) = carry, of_layer
            return eqq.select(self.layers, n)(x, n, positions, rotation, window, cache), None

        (x, cache), _ = jax.lax.scan(step, (x, cache), (jnp.arange(self.config.layers), windows))
        return self.norm(x), cache

    def logits(self, x: Float[Array, "batch length hidden"]) -> Float[Array, "batch length vocabulary"]:
        # A tied head is the embedding.
        weight = self.embedding.weight if self.head is None else self.head.weight
        y = per_token(lambda x: weight @ x)(x).astype(jnp.float32)
        cap = self.config.logit_cap
        return cap * jnp.tanh(y / cap) if cap else y

    def __call__(
        self, ids: Int[Array, "batch length"], cache: Cache, start: Int[Array, " batch"]
    ) -> tuple[Float[Array, "batch length vocabulary"], Cache]:
        x, cache = self.hidden(ids, cache, start)
        return self.logits(x), cache


def load(checkpoint: eqq.io.Checkpoint, dtype: DTypeLike = jnp.float32, *, stacked: bool = False) -> Llama:
    """Loads a model from a checkpoint of any library. Weights that are quantized stay as they are, packed."""
    config = config_of(checkpoint)
    heads = ("lm_head.weight", "output.weight")
    names = eqq.io.names.of(checkpoint, dict.fromkeys(heads) if config.tied else None)
    if stacked:
        names = eqq.io.names.rename(names, {"layers.{n}": "layers"})
    skeleton = eqx.filter_eval_shape(Llama, config, dtype, stacked=stacked, key=jr.key(0))
    return eqq.io.load_into(skeleton, checkpoint, names)
