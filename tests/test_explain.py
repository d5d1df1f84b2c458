"""`eqq.explain`: how a call uses each weight."""

import contextlib
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import eqquant as eqq

from .helpers import FORMATS, weights


class Net(eqx.Module):
    embedding: eqx.nn.Embedding
    position: jax.Array
    mlp: eqx.nn.MLP
    mix: jax.Array
    unused: jax.Array
    decay: jax.Array

    def __call__(self, ids):
        x = jax.vmap(self.embedding)(ids) + self.position
        x = jax.vmap(self.mlp)(x)
        x = jnp.einsum("td,od->to", x, self.mix)
        return x * jnp.exp(self.decay)


def net():
    normal = lambda *shape: weights(jr.key(0), shape)
    mlp = eqx.nn.MLP(64, 64, 64, 1, key=jr.key(1))
    return Net(
        eqx.nn.Embedding(99, 64, key=jr.key(2)), normal(8, 64), mlp, normal(64, 64), normal(64, 64), normal(8, 64)
    )


IDS = np.arange(8, dtype=np.int32)
EVERYTHING = {"*": "nf4"}


def roles(explanation):
    return {weight.path: weight.roles for weight in explanation.weights}


@pytest.mark.long
def test_floats():
    found = roles(eqq.explain(net(), IDS))
    assert found == {
        "embedding.weight": ("looked up",),
        "position": ("added",),
        "mlp.layers.0.weight": ("multiplied",),
        "mlp.layers.1.weight": ("multiplied",),
        "mix": ("multiplied",),
        "unused": (),
        "decay": ("used by exp",),
    }


def quantize_net():
    leaves = ("embedding.weight", "position", "mlp.layers.0.weight", "mlp.layers.1.weight", "mix", "unused", "decay")
    return eqq.quantize_tree(net(), {**dict.fromkeys(leaves, "nf4"), "*": None})


def test_packed_decoded_and_looked_up():
    model = quantize_net()
    explanation = eqq.explain(model, IDS)
    found = {weight.path: weight for weight in explanation.weights}
    assert [weight.path for weight in explanation.decoded] == ["position", "mix", "decay"]
    assert found["embedding.weight"].roles == ("looked up",)
    assert found["mlp.layers.0.weight"].roles == ("packed",) and len(found["mlp.layers.0.weight"].implementations) == 1
    mix = found["mix"]
    assert mix.roles == ("decoded", "multiplied") and mix.decoded_nbytes == 64 * 64 * 4 and "quaxify" in mix.remedy
    assert mix.nbytes == model.mix.nbytes and mix.format == repr(model.mix.format)
    line = f"test_explain.py:{Net.__call__.__code__.co_firstlineno + 3} (dot_general)"
    assert len(mix.lines) == 1 and mix.lines[0].endswith(line)
    assert "'decay': None" in found["decay"].remedy and found["unused"].roles == ()


def test_quaxify_keeps_products_packed():
    model = quantize_net()
    explanation = eqq.explain(eqq.quaxify(lambda model, ids: model(ids)), model, IDS)
    assert roles(explanation)["mix"] == ("packed",)


def test_uses_inside_loops_and_branches():
    stack = eqq.quantize(weights(jr.key(0), (3, 64, 64)), "int8")
    loop = lambda w, x: jax.lax.scan(lambda x, w: (w @ x, None), x, w)[0]
    assert eqq.explain(loop, stack, jnp.ones(64)).weights[0].roles == ("packed",)
    branch = lambda w, x: jax.lax.cond(x[0] > 0, lambda: w[0] @ x, lambda: w[1] @ x)
    decodes = eqq.explain(branch, stack, jnp.ones(64)).weights[0]
    assert decodes.roles == ("decoded", "multiplied")  # `w[0]` is a dense array
    dense = lambda w, x: jax.lax.cond(x[0] > 0, lambda: jnp.sum(w) * x, lambda: x)
    assert eqq.explain(dense, stack, jnp.ones(64)).decoded


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format):
    w = eqq.quantize(weights(jr.key(0), (6, 200)), FORMATS[format].format)
    rows = eqq.explain(lambda w, x: w @ x, w, jnp.ones(200)).weights[0]
    assert rows.roles == ("packed",) and not rows.remedy
    dense = eqq.explain(lambda w, x: jnp.einsum("oi,i->o", w, x), w, jnp.ones(200)).weights[0]
    assert dense.roles == ("decoded", "multiplied") and dense.decoded_nbytes == 6 * 200 * 4
    looked_up = eqq.explain(lambda w, n: w[n] * 2, w, jnp.asarray(3)).weights[0]
    assert looked_up.roles == ("looked up",)


def linear_call(q, x):
    return jax.custom_derivatives.linear_call(lambda q, x: q @ x, lambda q, x: q.T @ x, q, x)


def conjugate_gradients(q, x):
    return jax.scipy.sparse.linalg.cg(lambda v: v + q @ v, x)[0]


def custom_vmap(q, x):
    multiply = jax.custom_batching.custom_vmap(lambda x: q @ x)
    multiply.def_vmap(lambda size, batched, x: (x @ q.T, True))
    return multiply(x)


def loop(step, q, x, count=0):
    """A loop whose carry holds the weight."""
    return jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, *step(*c[1:])), (count, q, x))[2]


def shard_map(q, x):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(lambda q, x: q @ x, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)(q, x)


def pure_callback(q, x):
    return q @ x + jax.pure_callback(lambda codes: x, jax.ShapeDtypeStruct(x.shape, x.dtype), q.codes)


step, dense_step = lambda q, x: (q, q @ x), lambda q, x: (q, q.dequantize() @ x)
# Programs of a weight, or a stack of three, and a vector: they multiply packed, unless their names say "dense".
PROGRAMS = {
    "linear_call": linear_call,
    "its transpose": lambda q, x: jax.linear_transpose(lambda x: linear_call(q, x), x)(x),
    "its tangent": lambda q, x: jax.jvp(lambda x: linear_call(q, x), (x,), (x,)),
    "linear solve": conjugate_gradients,
    "linear solve, vmap": lambda q, x: jax.vmap(lambda x: conjugate_gradients(q, x))(jnp.stack([x, x])),
    "linear solve, dense": lambda q, x: conjugate_gradients(q.dequantize(), x),
    "custom_vmap": custom_vmap,
    "loop, jit": lambda q, x: loop(jax.jit(step), q, x),
    "loop, remat": lambda q, x: loop(jax.checkpoint(step), q, x),
    "loop, dense": lambda q, x: loop(jax.jit(dense_step), q, x),
    "loop, vmap": lambda q, x: jax.vmap(lambda n: loop(step, q, x, n))(jnp.arange(2)),
    "loop, vmap, dense": lambda q, x: jax.vmap(lambda n: loop(dense_step, q, x, n))(jnp.arange(2)),
    "branches": lambda q, x: jax.lax.cond(x[0] > 0, step, lambda q, x: (q, x), q, x)[0] @ x,
    "error_if": lambda q, x: eqx.error_if(q, x[0] > 9, "large") @ x,
    "device_put": lambda q, x: jax.device_put(q) @ x,
    "select": lambda q, x: jax.tree.map(lambda a: jnp.where(x[0] > 0, a, a + 1), q) @ x,
    "shard_map": shard_map,
    "pure_callback": pure_callback,
    "layer of a stack": lambda w, x: eqq.take_layer(w, jnp.argmax(x)) @ x,
    "layer of a stack, dense": lambda w, x: w[jnp.argmax(x)] @ x,
    "experts of a stack, dense": lambda w, x: w[x.astype(int)[:2]] @ x,
    "row of a matrix": lambda q, x: q[jnp.argmax(x)] * 2,
    "row of decoded floats, dense": lambda q, x: q.dequantize()[jnp.argmax(x)],
}


@pytest.mark.parametrize("format", ["nf4", "int8"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_verdicts_are_those_of_no_dense(name, format):
    """And of the name: `explain` follows codes through every call, loop and solver to where they are decoded."""
    w, x = eqq.quantize(weights(jr.key(0), (3, 64, 64) if "stack" in name else (64, 64)), format), jnp.ones(64)
    [use] = eqq.explain(PROGRAMS[name], w, x).weights
    assert ("decoded" in use.roles) == ("dense" in name), use
    assert bool(use.remedy) == ("dense" in name) and ("row" in name or {"packed", "multiplied"} & {*use.roles})
    with pytest.raises(RuntimeError, match="no whole weight") if "dense" in name else contextlib.nullcontext():
        with eqq.no_dense():
            jax.make_jaxpr(PROGRAMS[name])(w, x)


def test_any_pytree():
    """Float or quantized; the first tree is the model, and a lone array is data."""
    x, w = jnp.ones((2, 64)), weights(jr.key(0), (64, 128))
    for params, f in (({"w": w}, lambda p, x: x @ p["w"]), ([w, x[0]], lambda p, x: x @ p[0])):
        rules = eqq.explain(f, params, x).rules("int8")
        assert list(rules.values()) == [eqq.QuantConfig("int8", axis=-2)]
        assert roles(eqq.explain(f, eqq.quantize_tree(params, rules), x)) == dict.fromkeys(rules, ("packed",))
        assert eqq.explain(lambda x, *, p, f=f: f(p, x), x, p=params).rules("int8") == rules
    jitted = eqq.explain(eqx.filter_jit(lambda p, x: x @ p["w"]), {"w": w}, x)  # a module without weights
    assert roles(jitted) == {"w": ("multiplied",)}


def test_names_tell_the_argument():
    model = eqx.nn.Linear(4, 4, key=jr.key(0))
    two = eqq.explain(lambda a, b, x: a(b(x)), model, model, jnp.ones(4))
    assert [weight.path for weight in two.weights] == ["args[0].weight", "args[1].weight"]
    by_name = eqq.explain(lambda x, *, model: model(x), jnp.ones(4), model=model)
    assert roles(by_name) == {"weight": ("multiplied",)}


def test_shapes_are_enough_and_reports_print():
    model = quantize_net()
    explanation = eqq.explain(model, jax.ShapeDtypeStruct((8,), jnp.int32))
    assert "quaxify" in str(explanation)
    assert json.loads(explanation.to_json())["weights"][0]["path"] == "embedding.weight"


def test_rules_follow_from_the_call():
    class Both(eqx.Module):
        out_first: jax.Array
        in_first: jax.Array
        table: jax.Array

        def __call__(self, x):
            return jnp.tanh(self.out_first @ x + self.table[0]) @ self.in_first + self.table.sum()

    keys = jr.split(jr.key(0), 3)
    model = Both(*(weights(k, shape) for k, shape in zip(keys, ((48, 32), (48, 16), (4, 48)), strict=True)))
    rules = eqq.explain(model, jnp.ones(32)).rules("int8")
    assert rules == {
        "out_first": eqq.QuantConfig("int8", axis=-1),
        "in_first": eqq.QuantConfig("int8", axis=-2),
        "table": None,
    }
    q = eqq.quantize_tree(model, rules)
    assert (q.out_first.axis, q.in_first.axis, eqq.is_quantized(q.table)) == (-1, -2, False)
    found = eqq.explain(net(), IDS).rules()
    assert [path for path, use in found.items() if use is None] == ["position", "unused", "decay"]


def test_errors():
    with pytest.raises(ValueError, match="needs a tree with weights.*Pass the model"):
        eqq.explain(lambda x: x, jnp.ones((4, 4)))
    with pytest.raises(ValueError, match="contract|equal length"):
        eqq.explain(eqq.quantize_tree(eqx.nn.Linear(64, 64, key=jr.key(0)), "int8"), jnp.ones(63))


@pytest.mark.long
def test_remedies_of_convolutions(getkey):
    """`quaxify` packs those of one position; of others it packs those of codes alone."""
    kernels = {"one": (8, 8, 1, 1), "several": (8, 8, 3, 3), "groups": (8, 2, 1, 1)}
    model = {name: eqq.quantize(weights(getkey(), shape), "int8", axis=(-3, -2, -1)) for name, shape in kernels.items()}

    def call(model, x):
        convolve = lambda w, groups=1: jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=groups)
        return convolve(model["one"]), convolve(model["several"]), convolve(model["groups"], 4)

    x = jnp.ones((1, 8, 6, 6))
    plain = {weight.path: weight for weight in eqq.explain(call, model, x).weights}
    assert "eqq.quaxify(f)`; if you already do" in plain["one"].remedy and not plain["one"].windowed
    run = eqq.quaxify(call)
    found = {weight.path: weight for weight in eqq.explain(run, model, x).weights}
    assert found["one"].roles == ("packed",) and not found["one"].remedy
    for name in ("several", "groups"):
        assert found[name].windowed and found[name].remedy == plain[name].remedy
        assert f"{{'{name}': None, '*': ...}}" in found[name].remedy and "activations" in found[name].remedy
    with_activations = {**model, "several": eqq.arrays.ActivationQuantizedArray(model["several"], "int8")}
    with eqq.no_dense():
        run({**with_activations, "groups": jnp.ones((8, 2, 1, 1))}, x)


def test_inside_of_linear_solves():
    lx = pytest.importorskip("lineax")
    w = eqq.quantize(jnp.eye(64), "int8")

    def solve(w, x):
        operator = lx.FunctionLinearOperator(lambda v: w @ v, jax.eval_shape(lambda: x), lx.positive_semidefinite_tag)
        return lx.linear_solve(operator, x, lx.CG(rtol=1e-3, atol=1e-3)).value

    assert eqq.explain(solve, w, jnp.ones(64)).weights[0].roles == ("packed",)
    for f in (jax.vmap(solve, (None, 0)), lambda w, b: jax.grad(lambda b: jax.vmap(solve, (None, 0))(w, b).sum())(b)):
        assert eqq.explain(f, w, jnp.ones((2, 64))).weights[0].roles == ("packed",)
    dense = lambda w, x: lx.linear_solve(lx.MatrixLinearOperator(w.dequantize()), x).value
    assert "decoded" in eqq.explain(dense, w, jnp.ones(64)).weights[0].roles
