"""Models that quantize inputs: rules, training, transforms, factors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

import eqquant as eqq
from eqquant._matmul.rows import DynamicRows
from eqquant._wrappers.permuted import PermutedArray
from eqquant._wrappers.rotated import RotatedArray
from eqquant._wrappers.scaled import ScaledArray

from .helpers import outputs, relative_error, weights


@pytest.fixture
def model(getkey):
    return eqx.nn.MLP(32, 8, 64, 2, key=getkey())


@pytest.mark.long
def test_a_whole_model(getkey, model, tmp_path):
    x = weights(getkey(), (16, 32))
    q = eqq.quantize_tree(model, "int8", activations="int8")
    y = eqx.filter_jit(lambda q, x: jax.vmap(q)(x))(q, x)
    assert 0 < relative_error(y, outputs(model, x)) < 0.03
    assert relative_error(jax.vmap(eqq.quantize_tree(model, "int8"))(x), y) > 1e-4
    row = eqq.summary(q).leaves[0]
    assert (row.path, row.format, row.activations) == ("layers.0.weight", eqq.Int8(), eqq.Int8())
    assert "Int8() x Int8()" in str(eqq.summary(q))
    planned = eqq.plan_tree(model, {"layers.0.*": eqq.QuantConfig("int4", activations="fp8"), "*": "int8"}).leaves
    assert [row.activations for row in planned if row.format] == [eqq.FP8(), None, None]
    dense = eqq.dequantize_tree(q).layers[0].weight
    np.testing.assert_array_equal(dense, q.layers[0].weight.dequantize())
    eqq.save(tmp_path / "model.safetensors", q)
    loaded = eqq.load(tmp_path / "model.safetensors", like=eqx.filter_eval_shape(lambda: q))
    np.testing.assert_array_equal(outputs(loaded, x), outputs(q, x))
    with pytest.raises(ValueError, match="activations"):  # another format of activations
        eqq.load(tmp_path / "model.safetensors", like=eqq.quantize_tree(model, "int8", activations="fp8"))


def test_weights_without_products_get_no_activations(getkey):
    table = eqx.nn.Embedding(16, 32, key=getkey())
    q = eqq.quantize_tree([table, eqx.nn.Linear(32, 8, key=getkey())], "int8", activations="int8")
    assert eqq.is_quantized(q[0].weight) and isinstance(q[1].weight, eqq.arrays.ActivationQuantizedArray)
    plan = eqq.plan_tree([table, eqx.nn.Linear(8, 4, key=getkey())], {"*": eqq.QuantConfig("int8", activations="int8")})
    assert "no activations" in plan.leaves[0].reason
    with pytest.raises(ValueError, match="looked up"):
        eqq.quantize_tree(table, "int8", activations="int8")
    with pytest.raises(ValueError, match="must be one of"):
        eqq.quantize_tree(table, "int8", activations="int88")


@pytest.mark.long
def test_bad_activations(getkey, model):
    for bad in ("int7", "float16"):
        for make in (
            lambda bad: eqq.quantize_tree(model, "int8", activations=bad),
            lambda bad: eqq.QuantConfig("int8", activations=bad),
            lambda bad: eqq.arrays.ActivationQuantizedArray(eqq.quantize(model.layers[0].weight), bad),
        ):
            with pytest.raises(ValueError, match="^`activations` must be one of"):
                make(bad)
    for bad in ({}, {"layers.0.*": "int8"}, {"*": eqq.Int8()}, {"*": eqq.QuantConfig("int8")}):
        with pytest.raises(
            TypeError, match=r'^`activations` must be one format.*Got \{.*eqq.QuantConfig\("int8", activations='
        ):
            eqq.quantize_tree(model, "int8", activations=bad)
    with pytest.raises(ValueError, match=r"no scales from calibration in formats with blocks: take `eqq.Int8\("):
        eqq.calibrate.collect_stats(model, [jnp.ones((4, 32))], calibrator=eqq.calibrate.MinMax("mxfp8"))
    for format in (eqq.Int8("tensor"), eqq.FP8()):  # the formats that the message suggests
        eqq.calibrate.collect_stats(model, [jnp.ones((4, 32))], calibrator=eqq.calibrate.MinMax(format))
    conv = eqq.quantize_tree(eqx.nn.Conv2d(3, 8, 3, key=getkey()), "int8", activations="int8")
    for w in (conv.weight, conv.weight.array):
        with pytest.raises(ValueError, match=r"matmuls alone.*\(4, 3, 16, 16\) @ \(8, 3, 3, 3\).*quaxify\(layer\)"):
            eqq.explain_matmul(jnp.ones((4, 3, 16, 16)), w)
    assert "conv_general_dilated" in str(jax.make_jaxpr(eqq.quaxify(conv))(jnp.ones((3, 16, 16))))


@pytest.mark.long
def test_a_model_that_is_quantized_already(getkey, model):
    x, tree = weights(getkey(), (16, 32)), {"mlp": model, "table": eqx.nn.Embedding(16, 32, key=getkey())}
    stats = eqq.calibrate.collect_stats(tree, [x], gram=True, apply=lambda m, x: jax.vmap(m["mlp"])(x))
    codes = eqq.quantize_tree(
        tree, {"mlp.layers.2.*": None, "table.*": "int8", "*": eqq.QuantConfig("int4", eqq.GPTQ(stats))}
    )
    for activations in ("int8", stats):
        q = eqq.quantize_activations(codes, activations)
        first, rest = q["mlp"].layers[0].weight, (q["mlp"].layers[2].weight, q["table"].weight)
        assert isinstance(first, eqq.arrays.ActivationQuantizedArray) and (first.scale is None) == (
            activations == "int8"
        )
        assert eqx.tree_equal(first.array, codes["mlp"].layers[0].weight)
        assert eqx.tree_equal(rest, (codes["mlp"].layers[2].weight, codes["table"].weight))
        assert 0 < relative_error(jax.vmap(q["mlp"])(x), jax.vmap(codes["mlp"])(x)) < 0.05
    planned = {row.path: row.activations for row in eqq.plan_tree(codes, None, activations="int8").leaves}
    assert planned["mlp.layers.0.weight"] == eqq.Int8() and planned["table.weight"] is None
    one = eqq.quantize_activations(codes, "fp8", where=lambda m: m["mlp"].layers[1].weight)
    two = eqq.quantize_activations(one, "int8")["mlp"].layers  # those that have activations keep them
    assert (two[0].weight.activations, two[1].weight.activations) == (eqq.Int8(), eqq.FP8())
    rotated = eqq.quantize_activations(eqq.quantize_tree(eqq.transforms.rotate(model), "int8"))
    assert isinstance(rotated.layers[0].weight.array, eqq.arrays.ActivationQuantizedArray)
    for tree_, message in (
        (model, r"Got none to take them \(layers.0.weight: not quantized.*Give a format"),
        (q["mlp"], r"layers.0.weight.array: part of an ActivationQuantizedArray.*QuantizedArray\(w.array, \"fp8\""),
        (eqq.loraify(codes["mlp"], key=getkey()), "part of a LoraArray.*before they are wrapped"),
        (codes["table"], "weights that products use. Got none among weight .*looked up"),
    ):
        with pytest.raises(ValueError, match=message):
            eqq.quantize_activations(tree_, "int8")
    with pytest.raises(TypeError, match="`where` must select quantized arrays"):
        eqq.quantize_activations(codes, "int8", where=lambda m: m["mlp"].layers[2].weight)
    whole = eqq.quantize_tree(model, "int8")
    with pytest.raises(ValueError, match=r"To quantize activations alone: `eqq.quantize_activations\(model, "):
        eqq.quantize_tree(whole, "int8", activations="int8")


def test_rules_that_reach_no_product(getkey, model):
    w8a8, linear = eqq.QuantConfig("int8", activations="int8"), eqx.nn.Linear(32, 8, key=getkey())
    tables, tree = (
        eqx.nn.Embedding(16, 32, key=getkey()),
        {"table": eqx.nn.Embedding(16, 32, key=getkey()), "x": linear},
    )
    for quantize in (eqq.quantize_tree, eqq.plan_tree):
        for tree_, rules, named in (
            (tables, w8a8, "weight .*looked up"),
            (tree, {"table.*": w8a8, "*": "int8"}, "table.weight .*looked up"),
            (tree, {"table.*": w8a8, "*": w8a8}, "table.weight .*looked up"),
            (tree, {"x.*": None, "*": w8a8}, "table.weight .*looked up"),
            (tables, lambda path, leaf: eqq.QuantConfig("int8", activations="int8"), "weight .*looked up"),
        ):
            with pytest.raises(ValueError, match=f"weights that products use. Got none among {named}.*wrap it"):
                quantize(tree_, rules)
    norms = {"norm": eqx.nn.LayerNorm((4, 32)), "x": linear}
    for tree_, where, named in (
        (model, lambda m: [m.layers[0].bias], r"layers.0.bias .*a bias"),
        (norms, lambda m: m["norm"].weight, r"norm.weight .*normalization"),
    ):
        for arguments, options in ((("int8",), {"activations": "int8"}), ((w8a8,), {})):
            with pytest.raises(ValueError, match=f"Got none among {named}"):
                eqq.quantize_tree(tree_, *arguments, where=where, **options)
    # One product is enough for a rule, and for the whole call.
    wrapped = lambda q: isinstance(q, eqq.arrays.ActivationQuantizedArray)
    for rules, options in (
        (w8a8, {}),
        ({"*": w8a8}, {}),
        ({"table.*": "int8", "*": w8a8}, {"activations": "fp8"}),
        ({"table.*": None, "*": "int8"}, {"activations": "int8"}),
        (lambda path, leaf: eqq.QuantConfig("int8", activations="int8"), {}),
    ):
        q = eqq.quantize_tree(tree, rules, **options)
        assert wrapped(q["x"].weight) and not wrapped(q["table"].weight)
    q = eqq.quantize_tree(model, "int8", activations="int8", where=lambda m: [m.layers[0].weight, m.layers[0].bias])
    assert wrapped(q.layers[0].weight) and eqq.is_quantized(q.layers[0].bias)


@pytest.mark.long
def test_training(getkey, model):
    x, loss = weights(getkey(), (16, 32)), lambda m, x: jnp.mean(jnp.square(jax.vmap(m)(x) - 1))
    simulated = eqq.quantize_tree(model, "int4", activations="int8", simulate=True)
    q = eqq.finalize(simulated)
    np.testing.assert_allclose(outputs(simulated, x), outputs(q, x), rtol=1e-5, atol=1e-6)
    master_grad = eqx.filter_jit(eqx.filter_grad(loss))(simulated, x).layers[0].weight.array.master
    np.testing.assert_allclose(
        master_grad, eqx.filter_jit(eqq.filter_grad(loss))(q, x).layers[0].weight.array, rtol=1e-4, atol=1e-6
    )
    optim = eqq.float_masters(optax.sgd(0.1))
    state, start = optim.init(q), loss(q, x)

    @eqx.filter_jit
    def step(q, state):
        updates, state = optim.update(eqq.filter_grad(loss)(q, x), state, q)
        return eqq.apply_updates(q, updates), state

    for _ in range(10):
        q, state = step(q, state)
    assert isinstance(q.layers[0].weight, eqq.arrays.ActivationQuantizedArray)
    assert loss(q, x) < 0.7 * start


@pytest.mark.long
def test_low_rank_factors_on_top(getkey, model):
    x = weights(getkey(), (16, 32))
    q = eqq.quantize_tree(model, "int8", activations="int8")
    adapted = eqq.loraify(q, 4, key=getkey())
    np.testing.assert_allclose(outputs(adapted, x), outputs(q, x), rtol=1e-6)
    grads = eqx.filter_jit(eqq.filter_grad(lambda m: jnp.sum(jnp.square(jax.vmap(m)(x)))))(adapted)
    shapes = {leaf.shape for leaf in jax.tree.leaves(grads.layers[0])}
    assert shapes == {(64, 4), (4, 32)}  # only the factors
    assert isinstance(eqq.merge_lora(adapted).layers[0].weight, eqq.arrays.ActivationQuantizedArray)
    outside = eqq.arrays.LoraArray(q.layers[0].weight, jnp.ones((4, 32)), jnp.ones((64, 4)), 4.0, 1)
    expected = q.layers[0].weight @ x[0] + jnp.ones((64, 4)) @ (jnp.ones((4, 32)) @ x[0])
    np.testing.assert_allclose(outside @ x[0], expected, rtol=1e-5)


@pytest.mark.long
def test_dense_products_keep_their_options(getkey):
    """Of a float base, of a stack of maps, and of factors of a convolution."""
    w, x = weights(getkey(), (2, 24, 32)), weights(getkey(), (5, 32))
    conv = eqq.arrays.LoraArray(
        weights(getkey(), (4, 3, 32)), weights(getkey(), (2, 3, 32)), weights(getkey(), (4, 2)), 1.0, 2
    )
    arrays = {
        "base": eqq.arrays.LoraArray(w[0], weights(getkey(), (4, 32)), weights(getkey(), (24, 4)), 4.0, 1),
        "map": RotatedArray.of(w[0]),
        "maps": ScaledArray(w, 1 + jnp.abs(w[:, 0])),
        "convolution": conv,
    }
    steps = lambda rows: DynamicRows(rows, eqq.Int4())
    for name, array in arrays.items():
        with pytest.raises(ValueError, match="`implementation` is for quantized operands. Got 'xla'"):
            eqq.matmul(array, x.T, implementation="xla")
        text = str(jax.make_jaxpr(lambda array: eqq.matmul(array, x.T, precision="highest"))(array))
        dots = text.count("dot_general[")
        assert dots and text.count("Precision.HIGHEST, Precision.HIGHEST") + (name == "convolution") == dots
        is_map = name.startswith("map")
        x_mapped = array.map_inputs(jnp.broadcast_to(x.T, (*array.shape[:-2], 32, 5)), -2) if is_map else x.T
        rounded = steps(x_mapped.mT).dequantize().mT
        quantizing = eqq.arrays.ActivationQuantizedArray(array, "int4")
        y = quantizing @ x.T
        stored = array.array if is_map else array.base if name == "base" else array.dequantize()
        low = array.scaling * array.b @ (array.a @ x.T) if name == "base" else 0
        np.testing.assert_allclose(y, stored @ rounded + low, rtol=1e-4, atol=1e-4)
        flipped = quantizing @ x.T[:, 0]
        np.testing.assert_allclose(flipped, y[..., 0], rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_functions_of_quax_round_both_operands(getkey, model):
    """Also where the weight is simulated, has factors, maps its inputs, or has a scale for each layer."""
    x, w = weights(getkey(), (6, 32)), weights(getkey(), (8, 32))
    simulated = eqq.quantize_tree({"w": w}, "int4", simulate=True)["w"]
    factors = eqq.arrays.LoraArray(w, jnp.ones((2, 32)), jnp.ones((8, 2)), 1.0, 1)
    dense = jax.jit(eqq.quaxify(lambda w: jnp.einsum("oi,bi->bo", w, x)))
    transposed = jax.jit(eqq.quaxify(lambda w: jnp.matmul(x, w.T)))
    for inner in (eqq.quantize(w, "int4"), simulated, factors, RotatedArray.of(w)):
        a = eqq.arrays.ActivationQuantizedArray(inner, "int4")
        expected = DynamicRows(x, eqq.Int4()).dequantize() @ a.dequantize().T
        if isinstance(inner, (eqq.arrays.LoraArray, RotatedArray)):  # rounded as the weight within sees them
            expected = x @ a.T
        for product in (dense, transposed):
            np.testing.assert_allclose(product(a), expected, rtol=1e-4, atol=1e-4)
    loss = lambda m: jnp.mean(jnp.square(jax.vmap(m)(x)))
    trained = eqq.quantize_tree(model, "int4", activations="int8", simulate=True)
    grads, dense_grads = (eqx.filter_jit(eqx.filter_grad(f))(trained) for f in (eqq.quaxify(loss), loss))
    for quax_grad, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(dense_grads), strict=True):
        np.testing.assert_allclose(quax_grad, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("kind", [RotatedArray, ScaledArray, PermutedArray])
def test_input_transforms_keep_integer_products(getkey, kind):
    """The other operand is mapped, then quantized: by `@`, by functions of Quax, and in stacks."""
    q, x = eqq.quantize(weights(getkey(), (2, 24, 32)), "int8"), weights(getkey(), (5, 32))
    order, scale = (
        jnp.stack([jr.permutation(getkey(), 32)] * 2).astype(jnp.uint32),
        1 + jnp.abs(weights(getkey(), (2, 32))),
    )
    of = {ScaledArray: scale, PermutedArray: order}
    make = lambda n: kind(jax.tree.map(lambda a: a[n], q), *((of[kind][n],) if kind in of else ()))
    layers = [eqq.arrays.ActivationQuantizedArray(make(n), "int8") for n in range(2)]
    stack = eqq.arrays.ActivationQuantizedArray(make(slice(None)), "int8")
    expected = jnp.stack([layer @ x.T for layer in layers])
    dense = jnp.stack([layer.dequantize() @ x.T for layer in layers])
    assert relative_error(expected, dense) < 0.02
    einsum = eqq.quaxify(lambda w, x: jnp.einsum("bi,oi->ob", x, w))
    np.testing.assert_allclose(einsum(layers[0], x), expected[0], rtol=1e-5, atol=1e-5)
    xs = jnp.broadcast_to(x.T, (2, 32, 5))
    for found in (stack @ x.T, stack @ xs, jnp.moveaxis(stack.swapaxes(1, 2).__rmatmul__(x), 1, 2)):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(stack @ x[0], expected[..., 0], rtol=1e-5, atol=1e-5)
    for f, w in ((einsum, layers[0]), (lambda w, x: w @ x.T, stack)):
        program = jax.jit(f).trace(w, x).lower(lowering_platforms=("cuda",)).as_text()
        dots = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
        assert any("xi8>" in line and "xi32>" in line for line in dots)


def test_low_rank_factors_are_not_merged(getkey):
    """Factors dequantize as around a plain weight: also inside other wrappers, in any dtype."""
    w, factors = weights(getkey(), (8, 32)), (weights(getkey(), (2, 32)), weights(getkey(), (8, 2)))
    bare = eqq.arrays.LoraArray(eqq.quantize(w, "int8"), *factors, 1.0, 1)
    quantizing = eqq.arrays.ActivationQuantizedArray(bare, "int8")
    found = eqq.dequantize_tree([bare, quantizing], "bfloat16")
    mapped = eqq.dequantize_tree([RotatedArray(bare), RotatedArray(quantizing)], "bfloat16")
    for x in (*found, *(array.array for array in mapped)):
        assert isinstance(x, eqq.arrays.LoraArray) and x.base.dtype == jnp.bfloat16 and x.a.dtype == jnp.float32
        np.testing.assert_array_equal(x.base, bare.base.dequantize().astype("bfloat16"))
    plain = eqq.dequantize_tree(eqq.arrays.ActivationQuantizedArray(bare.base, "int8"), "bfloat16")
    np.testing.assert_array_equal(plain, found[0].base)


@pytest.mark.long
@pytest.mark.parametrize("static", [False, True])
def test_paths_equal_the_float_model(getkey, static):
    """The weights have the paths that they have in the float model."""
    model, x = eqx.nn.MLP(32, 8, 64, 1, key=getkey()), [weights(getkey(), (16, 32)) for _ in range(5)]
    activations = eqq.calibrate.collect_stats(model, x) if static else "int8"
    q = eqq.quantize_tree(model, eqq.Int2(), activations=activations)
    rows = eqq.analysis.compare_trees(model, q).leaves
    assert [row.path for row in rows] == ["layers.0.weight", "layers.1.weight"]
    plain = eqq.analysis.compare_trees(model, eqq.quantize_tree(model, eqq.Int2())).leaves
    assert [row.error for row in rows] == [row.error for row in plain]

    optimizer = optax.adam(3e-3)
    found = eqq.distill(q, model, x, held_out=x, train="codes", passes=3, optimizer=optimizer, progress=False)
    wanted = outputs(model, x[0])
    assert relative_error(outputs(found, x[0]), wanted) < 0.95 * relative_error(outputs(q, x[0]), wanted)
    assert jax.tree.structure(found) == jax.tree.structure(q)
    if static:
        np.testing.assert_array_equal(found.layers[0].weight.scale, q.layers[0].weight.scale)
    blocks = [(lambda m, n=n: m.layers[n], lambda layer, x: jax.vmap(layer)(x)) for n in range(2)]
    by_blocks = eqq.distill_blocks(q, model, x, blocks, passes=1, progress=False)
    assert jax.tree.structure(by_blocks) == jax.tree.structure(q)

    masters = eqq.float_masters(optax.sgd(0.1), masters=model).init(q).masters
    np.testing.assert_array_equal(masters.layers[1].weight.array, model.layers[1].weight)
    on_mesh = jax.sharding.NamedSharding(jax.make_mesh((1,), ("d",)), jax.sharding.PartitionSpec())
    given = eqq.tree_shardings(eqx.filter(q, eqx.is_array), {"*.weight": on_mesh})
    assert given.layers[0].weight.array.codes.mesh == on_mesh.mesh


def test_distillation_rounds_both_operands(getkey):
    """The initial loss is the loss of the model, though floats replace its weights."""
    model, x = eqx.nn.Linear(32, 8, key=getkey()), [weights(getkey(), (16, 32)) for _ in range(2)]
    q = eqq.quantize_tree(model, "int8", activations="int2")
    losses = []

    def apply(m, x):
        y = x @ m.weight.T
        jax.debug.callback(losses.append, y)
        return y

    eqq.distill(q, model, x[:1], held_out=x[1:], apply=apply, passes=1, optimizer=optax.sgd(0.0), progress=False)
    jax.effects_barrier()
    expected = x[1] @ q.weight.T
    assert any(np.allclose(y, expected, rtol=1e-4, atol=1e-4) for y in losses)
    assert not np.allclose(expected, x[1] @ q.weight.dequantize().T, rtol=1e-2, atol=1e-2)


@pytest.mark.long
def test_quantize_sequentially_with_activations(getkey, model):
    x = weights(getkey(), (64, 32))
    q = eqq.quantize_sequentially(model, [x], "int4", eqq.GPTQ(), activations="int8")
    assert isinstance(q.layers[2].weight, eqq.arrays.ActivationQuantizedArray)
    assert relative_error(outputs(q, x), outputs(model, x)) < 0.2
