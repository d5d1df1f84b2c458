"""Every layer of `eqx.nn`: quantized, it has the outputs of its dequantized copy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import pytest
from equinox import nn

import eqquant as eqq

from .helpers import assert_close, assert_same, primitives, weights


class LayerCase:
    """A layer, one example of its input, and how many of its leaves are quantized."""

    def __init__(self, make, *shapes, count=1, call=None, tol=1e-5):
        self.make, self.shapes, self.count, self.tol = make, shapes, count, tol
        self.call = call or (lambda layer, *x: layer(*x))


def sequential(key):
    k1, k2 = jax.random.split(key)
    return nn.Sequential([nn.Linear(8, 16, key=k1), nn.LayerNorm(16), nn.Lambda(jax.nn.relu), nn.Linear(16, 4, key=k2)])


def convnet(key):
    k1, k2, k3 = jax.random.split(key, 3)
    return nn.Sequential(
        [
            nn.Conv2d(3, 8, 3, padding=1, key=k1),
            nn.GroupNorm(4, 8),
            nn.MaxPool2d(2, 2),
            nn.Lambda(jnp.ravel),
            nn.Linear(8 * 16, 9, key=k2),
            nn.Dropout(inference=True),
            nn.MLP(9, 4, 8, 1, key=k3),
        ]
    )


attention = lambda layer, x: layer(x, x, x)
masked = lambda layer, x: layer(x, x, x, mask=jnp.tril(jnp.ones((5, 5), bool)))
CASES = {
    "linear": LayerCase(lambda key: nn.Linear(8, 4, key=key), (8,)),
    "linear_no_bias": LayerCase(lambda key: nn.Linear(70, 4, use_bias=False, key=key), (70,)),
    "conv1d": LayerCase(lambda key: nn.Conv1d(3, 4, 3, key=key), (3, 9)),
    "conv2d": LayerCase(lambda key: nn.Conv2d(3, 4, 3, padding="SAME", key=key), (3, 8, 8)),
    "conv2d_groups": LayerCase(lambda key: nn.Conv2d(4, 8, 3, stride=2, groups=2, key=key), (4, 8, 8)),
    "conv2d_depthwise": LayerCase(lambda key: nn.Conv2d(4, 4, 3, dilation=2, groups=4, key=key), (4, 8, 8)),
    "conv2d_circular": LayerCase(
        lambda key: nn.Conv2d(3, 4, 3, padding=1, padding_mode="CIRCULAR", key=key), (3, 8, 8)
    ),
    "conv3d": LayerCase(lambda key: nn.Conv3d(2, 4, 3, use_bias=False, key=key), (2, 5, 5, 5)),
    "conv_transpose1d": LayerCase(lambda key: nn.ConvTranspose1d(3, 4, 3, key=key), (3, 9)),
    "conv_transpose2d": LayerCase(lambda key: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, key=key), (4, 5, 5)),
    "conv_transpose3d": LayerCase(lambda key: nn.ConvTranspose3d(2, 4, 2, key=key), (2, 4, 4, 4)),
    "gru": LayerCase(lambda key: nn.GRUCell(8, 9, key=key), (8,), (9,), count=2),
    "lstm": LayerCase(
        lambda key: nn.LSTMCell(8, 9, key=key), (8,), (9,), (9,), count=2, call=lambda c, x, h, s: c(x, (h, s))
    ),
    "attention": LayerCase(lambda key: nn.MultiheadAttention(2, 8, key=key), (5, 8), count=4, call=attention),
    "attention_masked": LayerCase(
        lambda key: nn.MultiheadAttention(2, 8, use_query_bias=True, key=key), (5, 8), count=4, call=masked
    ),
    "mlp": LayerCase(lambda key: nn.MLP(8, 4, 16, 3, key=key), (8,), count=4),
    "mlp_scalar_out": LayerCase(lambda key: nn.MLP(8, "scalar", 16, 1, key=key), (8,)),
    "weight_norm": LayerCase(lambda key: nn.WeightNorm(nn.Linear(8, 4, key=key), "weight"), (8,)),
    "sequential": LayerCase(sequential, (8,), count=2),
    "convnet": LayerCase(convnet, (3, 8, 8), count=4),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture
def layer(case, getkey):
    return case.make(getkey())


@pytest.fixture
def quantized(layer):
    return eqq.quantize_tree(layer, "int8")


@pytest.fixture
def dense(quantized):
    return eqq.dequantize_tree(quantized)


def is_module(x):
    return isinstance(x, eqx.Module) and not eqq.is_quantized(x)


def classes(tree):
    """The class of every module in the tree, by its path."""
    found = {}

    def visit(node, path):
        if is_module(node):
            found[path] = type(node)
        for key, child in jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]:
            if not eqq.is_quantized(child) and child is not node:
                visit(child, path + jtu.keystr(key))

    visit(tree, "")
    return found


def quantized_leaves(tree):
    return [x for x in jtu.tree_leaves(tree, is_leaf=eqq.is_quantized) if eqq.is_quantized(x)]


def inputs(case, getkey, *batch):
    return [weights(getkey(), (*batch, *shape)) for shape in case.shapes]


def test_structure_is_unchanged(case, layer, quantized, dense, getkey):
    assert len(quantized_leaves(quantized)) == case.count
    assert classes(quantized) == classes(layer) == classes(dense) and classes(layer)
    assert jtu.tree_structure(quantized, is_leaf=eqq.is_quantized) == jtu.tree_structure(layer)
    before = jtu.tree_map(lambda x: x, quantized)
    case.call(quantized, *inputs(case, getkey))
    assert_same(eqx.filter(quantized, eqx.is_array), eqx.filter(before, eqx.is_array))
    assert len(quantized_leaves(quantized)) == case.count


def test_outputs_equal_the_dense_model(case, quantized, dense, getkey):
    x = inputs(case, getkey)
    expected = eqx.filter_jit(case.call)(dense, *x)
    assert_close(case.call(quantized, *x), expected, tol=case.tol)
    assert_close(eqx.filter_jit(case.call)(quantized, *x), expected, tol=case.tol)


def test_vmap(case, quantized, dense, getkey):
    xs = inputs(case, getkey, 3)
    run = lambda model: jax.vmap(lambda *x: case.call(model, *x))(*xs)
    assert_close(eqx.filter_jit(run)(quantized), eqx.filter_jit(run)(dense), tol=case.tol)


def test_gradients(case, quantized, dense, getkey):
    x = inputs(case, getkey)
    total = lambda y: sum(jnp.sum(jnp.sin(leaf)) for leaf in jtu.tree_leaves(y))
    loss = lambda both: total(case.call(both[1], *both[0]))
    grad = eqx.filter_jit(eqx.filter_grad(loss))
    (dx, dmodel), (expected, full) = grad((x, quantized)), grad((x, dense))
    assert_close(dx, expected, tol=case.tol)
    remat = jax.checkpoint(lambda *x: total(case.call(quantized, *x)))
    assert_close(jax.jit(jax.grad(remat, tuple(range(len(x)))))(*x), expected, tol=case.tol)
    # Gradients of float leaves do not change, and quantized leaves have none.
    kept = jtu.tree_map(lambda q, g: None if eqq.is_quantized(q) else g, quantized, full, is_leaf=eqq.is_quantized)
    assert_close(jtu.tree_leaves(dmodel), jtu.tree_leaves(kept), tol=case.tol)


def test_weights_on_the_quantized_matmul(getkey):
    for make, shape in ((lambda key: nn.Linear(8, 4, key=key), (8,)), (lambda key: nn.GRUCell(8, 9, key=key), (8,))):
        layer = eqq.quantize_tree(make(getkey()), "int8")
        args = (jnp.ones(shape),) if isinstance(layer, nn.Linear) else (jnp.ones(shape), jnp.ones(9))
        names = primitives(lambda layer, *args: layer(*args), layer, *args)
        assert "quantized_matmul" in names and "dot_general" not in names


def test_convolution_weights(getkey):
    layer = eqq.quantize_tree(nn.Conv2d(4, 6, 3, groups=2, key=getkey()), "int8")
    assert layer.weight.axis == (-3, -2, -1) and layer.weight.scale.shape == (6, 1)
    assert isinstance(layer.bias, jax.Array)
    layer(jnp.ones((4, 8, 8)))
    assert eqq.is_quantized(layer.weight) and layer.weight.shape == (6, 2, 3, 3)


@pytest.mark.parametrize("kernel_size", [(3, 5), 5])
def test_convolution_weights_of_other_libraries(kernel_size, getkey):
    """A layer is a convolution by its `kernel_size`, not by its class."""

    class Convolution(eqx.Module):
        weight: jax.Array
        kernel_size: object = eqx.field(static=True)

    shape = (6, 4, *(kernel_size if isinstance(kernel_size, tuple) else (5, 5)))
    layer = Convolution(weights(getkey(), shape), kernel_size)
    assert eqq.quantize_tree(layer, "int8").weight.axis == (-3, -2, -1)
    assert eqq.quantize_tree(Convolution(weights(getkey(), (6, 40)), kernel_size), "int8").weight.axis == -1


def test_embedding(getkey):
    layer = eqq.quantize_tree(nn.Embedding(20, 70, key=getkey()), "int8")
    table = eqq.dequantize_tree(layer).weight
    ids = jnp.array([3, 19, 3])
    assert type(layer) is nn.Embedding and eqq.is_quantized(layer.weight)
    assert_close(layer(ids[0]), table[3], tol=0)
    assert_close(jax.vmap(layer)(ids), table[ids], tol=0)
    assert_close(eqx.filter_jit(lambda layer, ids: jax.vmap(layer)(ids))(layer, ids), table[ids], tol=0)


@pytest.mark.parametrize(
    "layer, arguments, shape",
    [
        (nn.LayerNorm, [(3, 8)], (3, 8)),
        (nn.GroupNorm, [2, 4], (4, 5)),
        (nn.RMSNorm, [(3, 8)], (3, 8)),
        (nn.PReLU, [0.1], (3, 8)),
    ],
)
def test_biases_and_norms_are_left_alone(layer, arguments, shape, getkey):
    norm = layer(*arguments)
    tree = {"norm": norm, "linear": nn.Linear(8, 8, key=getkey())}
    out = eqq.quantize_tree(tree, "int8")
    assert quantized_leaves(out["norm"]) == [] and eqq.is_quantized(out["linear"].weight)
    assert jtu.tree_structure(out["norm"]) == jtu.tree_structure(norm)
    x = weights(getkey(), shape)
    assert_close(out["norm"](x), norm(x), tol=0)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_batch_norm(getkey, mode):
    def make(key):
        k1, k2 = jax.random.split(key)
        return nn.Sequential([nn.Linear(8, 9, key=k1), nn.BatchNorm(9, "batch", mode=mode), nn.Linear(9, 2, key=k2)])

    model, state = nn.make_with_state(make)(getkey())
    q = eqq.quantize_tree(model, "int8")
    assert len(quantized_leaves(q)) == 2 and quantized_leaves(q[1]) == []
    xs = weights(getkey(), (5, 8))

    def run(model, state):
        return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(xs, state)

    y, new = eqx.filter_jit(run)(q, state)
    expected, expected_new = run(eqq.dequantize_tree(q), state)
    assert_close(y, expected, tol=1e-4)
    assert_close(new, expected_new, tol=1e-4)
    y, _ = jax.vmap(nn.inference_mode(q), axis_name="batch", in_axes=(0, None))(xs, new)
    expected, _ = jax.vmap(nn.inference_mode(eqq.dequantize_tree(q)), axis_name="batch", in_axes=(0, None))(xs, new)
    assert_close(y, expected, tol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_spectral_norm(getkey, kind):
    inner = nn.Linear(8, 4, key=getkey()) if kind == "linear" else nn.Conv1d(3, 4, 3, key=getkey())
    x = weights(getkey(), (8,) if kind == "linear" else (3, 9))
    layer, state = nn.make_with_state(nn.SpectralNorm)(inner, "weight", key=getkey())
    q = eqq.quantize_tree(layer, "int8")
    assert type(q) is nn.SpectralNorm and len(quantized_leaves(q)) >= 1
    y, new = eqx.filter_jit(lambda layer, x, state: layer(x, state))(q, x, state)
    expected, expected_new = eqq.dequantize_tree(q)(x, state)
    assert_close(y, expected, tol=1e-4)
    assert_close(new, expected_new, tol=1e-4)


# Stacks of layers


@pytest.mark.long
@pytest.mark.parametrize("quantize_first", [False, True])
def test_scan_over_stacked_layers(getkey, quantize_first):
    keys = jax.random.split(getkey(), 3)
    make = lambda key: nn.MLP(8, 8, 16, 1, key=key)
    if quantize_first:
        layers = eqx.filter_vmap(lambda key: eqq.quantize_tree(make(key), "int8"))(keys)
    else:
        layers = eqq.quantize_tree(eqx.filter_vmap(make)(keys), "int8")
    assert layers.layers[0].weight.shape == (3, 16, 8) and len(quantized_leaves(layers)) == 2
    x = weights(getkey(), (8,))

    def forward(layers, x):
        dynamic, static = eqx.partition(layers, eqx.is_array)
        step = lambda x, layer: (x + eqx.combine(layer, static)(x), None)
        return jax.lax.scan(jax.checkpoint(step), x, dynamic)[0]

    expected = eqx.filter_jit(forward)(eqq.dequantize_tree(layers), x)
    assert_close(eqx.filter_jit(forward)(layers, x), expected)
    assert "quantized_matmul" in primitives(forward, layers, x)
    each = x
    for i in range(3):
        layer = jtu.tree_map(lambda a: a[i] if eqx.is_array(a) else a, layers)
        each = each + layer(each)
    assert_close(each, expected)
    grad = eqx.filter_jit(eqx.filter_grad(lambda x, layers: jnp.sum(forward(layers, x) ** 2)))
    assert_close(grad(x, layers), grad(x, eqq.dequantize_tree(layers)))


def test_ensemble(getkey):
    layers = eqx.filter_vmap(lambda key: nn.Conv2d(3, 4, 3, key=key))(jax.random.split(getkey(), 3))
    q = eqq.quantize_tree(layers, "int8")
    assert q.weight.shape == (3, 4, 3, 3, 3) and q.weight.axis == (-3, -2, -1)
    x = weights(getkey(), (3, 8, 8))
    run = eqx.filter_vmap(lambda layer, x: layer(x), in_axes=(eqx.if_array(0), None))
    assert_close(run(q, x), run(eqq.dequantize_tree(q), x))
