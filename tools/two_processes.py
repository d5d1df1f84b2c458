"""What `tests/test_processes.py` runs in one process and in two: a transformer, quantized and trained on a mesh."""

import json
import sys

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq


WIDTH, LENGTH, BATCH, VOCABULARY = 128, 8, 16, 64


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.RMSNorm

    def __init__(self, *, key):
        keys = jr.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(4, WIDTH, key=keys[0])
        self.up = eqx.nn.Linear(WIDTH, 512, key=keys[1])
        self.down = eqx.nn.Linear(512, WIDTH, key=keys[2])
        self.norm = eqx.nn.RMSNorm(WIDTH)

    def __call__(self, x):
        y = jax.vmap(self.norm)(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(lambda y: self.down(jax.nn.gelu(self.up(self.norm(y)))))(x)


class Transformer(eqx.Module):
    embedding: eqx.nn.Embedding
    block: Block
    head: eqx.nn.Linear

    def __init__(self, *, key):
        keys = jr.split(key, 3)
        self.embedding = eqx.nn.Embedding(VOCABULARY, WIDTH, key=keys[0])
        self.block = Block(key=keys[1])
        self.head = eqx.nn.Linear(WIDTH, VOCABULARY, key=keys[2])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        return jax.vmap(self.head)(self.block(x))


# Column parallel, then row parallel; the heads of attention are divided, too.
RULES = {
    "*.up.weight": P("model"),
    "*.up.bias": P("model"),
    "*.down.weight": P(None, "model"),
    "*.query_proj.weight": P("model"),
    "*.key_proj.weight": P("model"),
    "*.value_proj.weight": P("model"),
    "*": P(),
}


def run(mesh):
    """Losses of the float model, of the quantized one, in training, and after it."""
    model = Transformer(key=jr.key(0))
    tokens = np.asarray(jr.randint(jr.key(1), (BATCH, LENGTH + 1), 0, VOCABULARY))
    on = lambda spec: NamedSharding(mesh, spec)
    batch = jax.device_put(tokens, on(P("data")))

    def loss(model, batch):
        logits = jax.vmap(model)(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    where = {pattern: on(spec) for pattern, spec in RULES.items()}
    formats = {"*.down.weight": eqq.NF4(double_quant=True), "*.weight": "nf4"}
    q = eqq.quantize_tree(model, formats, shardings=where)
    losses = [float(eqx.filter_jit(loss)(q, batch))]
    optim = eqq.float_masters(optax.adam(3e-3), masters=model)
    state = optim.init(q)

    @eqx.filter_jit
    def step(model, state, batch):
        value, grads = eqq.filter_value_and_grad(loss)(model, batch)
        updates, state = optim.update(grads, state, model)
        return eqq.apply_updates(model, updates), state, value

    for _ in range(4):
        q, state, value = step(q, state, batch)
        losses.append(float(value))
    up, master = q.block.up.weight, state.masters.block.up.weight
    specs = [[*x.sharding.spec, None][:2] for x in (up, master, q.block.down.weight)]
    return {"losses": losses, "specs": specs, "local_codes": up.codes.addressable_shards[0].data.shape}


def main(rank, port, path):
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank, initialization_timeout=60)
    assert len(jax.devices()) == 8 and len(jax.local_devices()) == 4
    done = run(jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto)))
    if rank == 0:
        with open(path, "w") as file:
            json.dump(done, file)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
