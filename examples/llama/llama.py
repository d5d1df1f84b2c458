"""Language models of the Llama family in plain Equinox: no line of the model mentions quantization.

Llama, Mistral, Qwen2 and 3, Gemma 1 to 3, Phi-3, Mixtral and the mixtures of Qwen2 and 3 differ in a few fields of
`Config`.
The paths of the arrays come from `eqq.io.names`, so that a model loads from every file that `eqq.io.open` reads.
"""

import dataclasses
import itertools as it
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
from command import check_memory
from configuration import Config, config_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray

import eqquant as eqq


class Cache(eqx.Module):
    """The keys and values of all tokens so far, for each layer: one cache each, or with `stacked` one for all."""

    layers: tuple[eqq.QuantizedCache, ...] | eqq.QuantizedCache
    context: int = eqx.field(static=True)  # how long texts may be
    ahead: int = eqx.field(static=True)

    @staticmethod
    def empty(
        config: Config,
        batch: int,
        context: int,
        dtype: DTypeLike = jnp.float32,
        *,
        format: eqq.extend.AbstractFormat | str | None = None,
        values: eqq.extend.AbstractFormat | str | None = None,
        rotate: bool | None = None,
        per_channel: bool = False,
        stacked: bool = False,
        ahead: int | None = None,
    ) -> "Cache":
        """`stacked`: as the layers of the model. `format`: `None` for floats. `values`: the format of values.

        `rotate`: by default where it matters, at four bits and fewer. `ahead`: layers with a window hold that, and so
        many tokens more, which may be taken back; by default the whole text.
        """
        shape = (batch, config.kv_heads, context, config.head_size)
        if rotate is None:
            rotate = format is not None and not per_channel and eqq.QuantConfig(format).format.bits <= 4
        layout = {"rotate": rotate, "per_channel": per_channel, "dtype": dtype}

        def make(window: int) -> eqq.QuantizedCache:
            ring = None if ahead is None or not window else window + ahead
            return eqq.QuantizedCache.empty(shape, format, values, ring=ring, **layout)

        if stacked:
            window = min(config.windows) if len({*config.windows}) == 1 else 0
            layers = eqx.filter_vmap(lambda: make(window), axis_size=config.layers)()
        else:
            layers = tuple(map(make, config.windows))
        return Cache(layers, context, ahead or 0)

    @property
    def length(self) -> Int[Array, " batch"]:
        """How many tokens each row has."""
        return self.layers[0].length if isinstance(self.layers, tuple) else self.layers.length[0]

    def on_mesh(self, mesh: Mesh) -> "Cache":
        """Divides heads among the devices."""
        ahead = 1 if isinstance(self.layers, tuple) else 2  # layers and batch
        sharding = NamedSharding(mesh, P(*[None] * ahead, "model"))
        return self._each(lambda cache: cache.with_sharding(sharding))

    def truncate(self, length: Int[Array, " batch"] | int) -> "Cache":
        """Keeps the first tokens of each row."""
        return self._each(lambda cache: cache.truncate(jnp.broadcast_to(length, cache.length.shape)))

    def holds(self, length: int) -> bool:
        """Whether tokens can follow the first so many, of which layers with a window hold only the last."""
        layers = self.layers if isinstance(self.layers, tuple) else (self.layers,)
        rings = [(cache.start, cache.ring - self.ahead) for cache in layers if cache.start is not None]
        return all(bool((start <= max(length + 1 - window, 0)).all()) for start, window in rings)

    def _each(self, change: Callable[[eqq.QuantizedCache], eqq.QuantizedCache]) -> "Cache":
        layers = tuple(map(change, self.layers)) if isinstance(self.layers, tuple) else change(self.layers)
        return dataclasses.replace(self, layers=layers)

    def of(self, layer: int | Int[Array, ""]) -> eqq.QuantizedCache:
        if isinstance(self.layers, tuple):
            return self.layers[layer]
        return jtu.tree_map(lambda leaf: leaf[layer], self.layers)

    def having(self, layer: int | Int[Array, ""], new: eqq.QuantizedCache) -> "Cache":
        """The cache with another one for a layer."""
        if isinstance(self.layers, tuple):
            layers = (*self.layers[:layer], new, *self.layers[layer + 1 :])
        else:
            layers = jtu.tree_map(lambda old, new: old.at[layer].set(new), self.layers, new)
        return dataclasses.replace(self, layers=layers)


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


def _outputs(x: Array, *layers: eqx.nn.Linear | None) -> Array:
    """The outputs of layers that take the same input, end to end."""
    one = lambda f: f(x) if x.ndim == 1 else per_token(f)(x)
    return jnp.concatenate([one(f) for f in layers if f is not None], axis=-1)


class Rotation(eqx.Module):
    """Rotary embeddings: turns the halves of each head, pair by pair, by angles that grow with the position."""

    cos: Float[Array, "batch length 1 half"]
    sin: Float[Array, "batch length 1 half"]

    def __init__(
        self, config: Config, positions: Int[Array, "batch length"], context: int, *, local: bool = False
    ) -> None:
        frequencies = jnp.asarray(config.frequencies(context, local=local))
        angles = positions[..., None, None].astype(jnp.float32) * frequencies
        factor = 1.0 if local else config.rotary_factor
        self.cos, self.sin = factor * jnp.cos(angles), factor * jnp.sin(angles)

    def __call__(self, x: Float[Array, "batch length heads size"]) -> Float[Array, "batch length heads size"]:
        half = self.cos.shape[-1]
        y = x.astype(jnp.float32)
        a, b, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        turned = [a * self.cos - b * self.sin, b * self.cos + a * self.sin, rest]
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class Attention(eqx.Module):
    """Causal attention. Several heads of `q` share one head of `k` and `v`."""

    q: eqx.nn.Linear
    k: eqx.nn.Linear | None  # `None` if joined with `q`; `v` if joined with `q` or `k`
    v: eqx.nn.Linear | None
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
        rotation: Rotation,
        window: int | Int[Array, ""],
        count: Int[Array, " batch"] | int,
        cache: Cache,
    ) -> tuple[Float[Array, "batch length hidden"], Cache]:
        config = self.config
        sizes = [heads * config.head_size for heads in (config.heads, config.kv_heads)]
        q, k, v = jnp.split(_outputs(x, self.q, self.k, self.v), [sizes[0], sum(sizes)], axis=-1)
        q, k, v = (y.reshape(*x.shape[:2], -1, config.head_size) for y in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        heads_first = lambda y: jnp.swapaxes(y, 1, 2)
        mixed, layer_cache = cache.of(layer).append_and_attend(
            heads_first(rotation(q)),
            heads_first(rotation(k)),
            heads_first(v),
            count,
            scale=config.query_scale,
            sliding_window=window,
            soft_cap=config.attention_cap or None,
        )
        y = per_token(self.output)(heads_first(mixed).reshape(*x.shape[:2], -1))
        return y, cache.having(layer, layer_cache)


class MLP(eqx.Module):
    """`down(activation(gate(x)) * up(x))`: SwiGLU, or GeGLU in Gemma."""

    gate: eqx.nn.Linear
    up: eqx.nn.Linear | None  # in `gate`, if they are joined
    down: eqx.nn.Linear
    activation: str = eqx.field(static=True)

    def __init__(self, config: Config, intermediate: int, dtype: DTypeLike, key: PRNGKeyArray) -> None:
        keys = jr.split(key, 3)
        hidden = config.hidden
        self.gate = eqx.nn.Linear(hidden, intermediate, config.mlp_bias, dtype, key=keys[0])
        self.up = eqx.nn.Linear(hidden, intermediate, config.mlp_bias, dtype, key=keys[1])
        self.down = eqx.nn.Linear(intermediate, hidden, config.mlp_bias, dtype, key=keys[2])
        self.activation = config.activation

    def __call__(self, x: Float[Array, " hidden"]) -> Float[Array, " hidden"]:
        activation = jax.nn.silu if self.activation == "silu" else jax.nn.gelu
        gate, up = jnp.split(_outputs(x, self.gate, self.up), 2, axis=-1)
        return self.down(activation(gate) * up)


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
        def compute_expert() -> Array:
            # Selected here, so that an expert that no token chose is not even read.
            return shares[:, n, None] * jax.vmap(eqq.take_layer(experts, n))(x)

        used = jnp.any(shares[:, n] > 0)
        return total + jax.lax.cond(used, compute_expert, lambda: jnp.zeros_like(x)), None

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
    shared: MLP | None
    shared_gate: eqx.nn.Linear | None
    mlp_post_norm: RMSNorm | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, dtype: DTypeLike, key: PRNGKeyArray) -> None:
        attention, mlp, router, shared, gate = jr.split(key, 5)
        norm = lambda: RMSNorm(config.hidden, config, dtype)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_post_norm, self.mlp_post_norm = (norm(), norm()) if config.post_norms else (None, None)
        self.attention = Attention(config, dtype, attention)
        make = lambda k: MLP(config, config.intermediate, dtype, k)
        self.mlp = self.router = self.experts = self.shared = self.shared_gate = None
        if config.experts:
            self.router = eqx.nn.Linear(config.hidden, config.experts, False, dtype, key=router)
            self.experts = eqx.filter_vmap(make)(jr.split(mlp, config.experts))
        else:
            self.mlp = make(mlp)
        if config.shared:
            self.shared = MLP(config, config.shared, dtype, shared)
            self.shared_gate = eqx.nn.Linear(config.hidden, 1, False, dtype, key=gate)
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
            mixed = mixture(self.router, self.experts, self.config, y.reshape(-1, y.shape[-1])).reshape(y.shape)
            if self.shared is not None and self.shared_gate is not None:  # Qwen2's expert of every token
                mixed = mixed + jax.nn.sigmoid(per_token(self.shared_gate)(y)) * per_token(self.shared)(y)
            y = mixed
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
        self, ids: Int[Array, "batch length"], cache: Cache, count: Int[Array, " batch"] | None = None
    ) -> tuple[Float[Array, "batch length hidden"], Cache]:
        """The hidden state of each token after the last layer. Tokens follow the tokens of the cache.

        `count`: how many of each row are text; padding follows.
        """
        positions = cache.length[:, None] + jnp.arange(ids.shape[1])
        row_counts = jnp.full(len(ids), ids.shape[1]) if count is None else count
        rotation = local = Rotation(self.config, positions, cache.context)
        if self.config.local_theta:
            local = Rotation(self.config, positions, cache.context, local=True)
        x = self.embedding.weight[ids]
        x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        # In float32, layers one by one take less than half the time on a CPU: XLA copies each float weight that a loop
        # takes out of a stack. Quantized ones are read where they lie, but the loop compiles faster.
        if isinstance(self.layers, list):
            for n, layer in enumerate(self.layers):
                window = self.config.windows[n]
                x, cache = layer(x, n, local if window else rotation, window, row_counts, cache)
            return self.norm(x), cache

        def step(carry: tuple[Array, Cache], layer_inputs: tuple[Array, Array]) -> tuple[tuple[Array, Cache], None]:
            (x, cache), (n, window) = carry, layer_inputs
            turned = jtu.tree_map(lambda a, b: jnp.where(window > 0, b, a), rotation, local)
            return eqq.take_layer(self.layers, n)(x, n, turned, window, row_counts, cache), None

        numbers = (jnp.arange(self.config.layers), jnp.asarray(self.config.windows))
        (x, cache), _ = jax.lax.scan(step, (x, cache), numbers)
        return self.norm(x), cache

    def logits(self, x: Float[Array, "batch length hidden"]) -> Float[Array, "batch length vocabulary"]:
        # A tied head is the embedding.
        weight = self.embedding.weight if self.head is None else self.head.weight
        y = per_token(lambda x: weight @ x)(x).astype(jnp.float32)
        cap = self.config.logit_cap
        return cap * jnp.tanh(y / cap) if cap else y

    def __call__(
        self, ids: Int[Array, "batch length"], cache: Cache, count: Int[Array, " batch"] | None = None
    ) -> tuple[Float[Array, "batch length vocabulary"], Cache]:
        x, cache = self.hidden(ids, cache, count)
        return self.logits(x), cache


def layers_are_alike(checkpoint: eqq.io.Checkpoint, *, packed: bool) -> bool:
    """Whether layers can be stacked: all store each weight alike (`packed`: none in float)."""
    kinds: dict[str, set[Any]] = {}
    for row in checkpoint.rows:
        if (name := re.sub(r"\d+", "{n}", row.name)) != row.name and len(row.shape) > 1:
            kinds.setdefault(name, set()).add(row.format if packed or row.format is not None else row.dtype)
    return bool(kinds) and all(len(kind) == 1 and not (packed and None in kind) for kind in kinds.values())


def load(checkpoint: eqq.io.Checkpoint, dtype: DTypeLike = jnp.float32, *, stacked: bool = False) -> Llama:
    """Loads a model from a checkpoint of any library. Weights that are quantized stay as they are, packed."""
    config = config_of(checkpoint)
    # Packed arrays take as much memory as in the file, others as much as floats of `dtype`.
    nbytes = [
        jnp.dtype(dtype).itemsize * math.prod(row.shape) if row.format is None else row.nbytes
        for row in checkpoint.rows
    ]
    check_memory("The weights", sum(nbytes), "Quantize them first, one at a time, by `eqquant quantize`.")
    heads = ("lm_head.weight", "output.weight")
    names = eqq.io.names.detect(checkpoint, dict.fromkeys(heads) if config.tied else None)
    if stacked:
        names = eqq.io.names.rename(names, {"layers.{n}": "layers"})
    skeleton = eqx.filter_eval_shape(Llama, config, dtype, stacked=stacked, key=jr.key(0))
    return eqq.io.load_into(skeleton, checkpoint, names)


def with_activations(model: Llama, format: eqq.extend.AbstractFormat | str) -> Llama:
    """Quantizes the activations of products with packed weights, also of a tied head."""
    model = eqq.quantize_activations(model, format)
    weight = model.embedding.weight
    if model.head is not None or not eqq.is_quantized(weight):
        return model
    return eqx.tree_at(lambda m: m.embedding.weight, model, eqq.arrays.ActivationQuantizedArray(weight, format))


def joined(model: Llama) -> Llama:
    """One product instead of several where their inputs are the same: `q`, `k` and `v`; `gate` and `up`.

    Rows are put below each other, packed as they are. What differs in format stays apart, and so does what is float: of
    349M parameters on a CPU, a token took 0.85 of the time in NF4, and in float32 1.2 times as long.
    """

    def kind(layer: eqx.nn.Linear) -> Any:
        """Equal for layers that can be joined."""
        weight, activations = layer.weight, None
        if isinstance(weight, eqq.arrays.ActivationQuantizedArray) and weight.scale is None:
            weight, activations = weight.array, weight.activations
        if not eqq.is_quantized(weight) or layer.bias is not None:
            return id(layer)
        return weight.format, weight.dtype, weight.ndim, weight.shape[-1], activations

    def join_alike(layers: Sequence[eqx.nn.Linear]) -> eqx.nn.Linear:
        if len(layers) == 1:
            return layers[0]
        activations, weights = kind(layers[0])[-1], [f.weight for f in layers]
        if activations is not None:
            weights = [w.array for w in weights]
        weight = eqq.quaxify(lambda *w: jnp.concatenate(w, axis=-2))(*weights)
        if activations is not None:
            weight = eqq.arrays.ActivationQuantizedArray(weight, activations)
        rows = sum(f.out_features for f in layers)
        skeleton = eqx.filter_eval_shape(eqx.nn.Linear, layers[0].in_features, rows, False, key=jr.key(0))
        return eqx.tree_at(lambda f: f.weight, skeleton, weight)

    def join(*layers: eqx.nn.Linear) -> list[eqx.nn.Linear | None]:
        """Joins each run of layers of one kind into the first; the others become `None`."""
        alike = [list(group) for _, group in it.groupby(layers, kind)]
        return [f for group in alike for f in (join_alike(group), *[None] * (len(group) - 1))]

    def join_layer(layer: Layer) -> Layer:
        for where in (
            lambda x: (x.attention.q, x.attention.k, x.attention.v),
            lambda x: () if x.mlp is None else (x.mlp.gate, x.mlp.up),
            lambda x: () if x.experts is None else (x.experts.gate, x.experts.up),
            lambda x: () if x.shared is None else (x.shared.gate, x.shared.up),
        ):
            if (layers := where(layer)) and None not in layers:
                layer = eqx.tree_at(where, layer, join(*layers))
        return layer

    layers = [join_layer(x) for x in model.layers] if isinstance(model.layers, list) else join_layer(model.layers)
    return eqx.tree_at(lambda m: m.layers, model, layers)


def on_mesh(model: Llama, mesh: Mesh) -> Llama:
    """Divides the model among the devices of the mesh axis `"model"`: heads of attention, and rows of the MLP.

    So a layer has two sums over devices: of the products with `output` and with `down`.
    """
    if model.config.kv_heads % mesh.shape["model"]:
        raise ValueError(f"The {model.config.kv_heads} heads of keys must divide among {mesh.shape['model']} devices.")

    def sharding(path: str, leaf: Any) -> NamedSharding:
        name = path.split(".")[-2] if "." in path else ""
        ahead = [None] * (leaf.ndim - (1 if path.endswith("bias") else 2))  # stacked layers, and experts
        if name in ("q", "k", "v", "gate", "up", "head"):
            return NamedSharding(mesh, P(*ahead, "model"))
        if name in ("output", "down") and path.endswith("weight"):
            return NamedSharding(mesh, P(*ahead, None, "model"))
        return NamedSharding(mesh, P())

    arrays, static = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, eqq.tree_shardings(arrays, sharding)), static)
