"""Misuse: an error or a warning with a remedy."""

import inspect
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import jaxtyping
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Float, jaxtyped

import eqquant as eqq
from eqquant import reference

from .helpers import assert_same, FORMATS, SWEPT_FORMATS, weights


@pytest.fixture(autouse=True)
def unchecked(request):
    """What users get who do not check types: only this suite checks every annotation of the package."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", request.node.originalname != "test_annotations_accept_every_array")
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


# Codes that stopped being integers


USES = {
    "shape": lambda q: q.shape,
    "scale": lambda q: q.scale,
    "dequantize": lambda q: q.dequantize(),
    "unpack": eqq.unpack,
    "matmul": lambda q: q @ jnp.ones(q.codes.shape[-1]),
    "rmatmul": lambda q: eqq.matmul(jnp.ones(8), q),
    "jit": jax.jit(lambda q: q + 1),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["nf4", "int8", "int8_affine", "nf4_double", "mxfp8"])
def test_averaged_codes(getkey, name, use):
    a, b = (eqq.quantize(weights(getkey(), (8, 128)), FORMATS[name].format) for _ in "ab")
    average = jtu.tree_map(lambda x, y: jnp.float32(0.9) * x.astype(jnp.float32) + y.astype(jnp.float32), a, b)
    signed = jtu.tree_map(lambda x: x.astype(jnp.int32), a)
    for broken in (average, signed):
        with pytest.raises(TypeError, match="must be unsigned integers. Got codes of .*averaged or cast.*float model"):
            USES[use](broken)
        assert "codes=" in repr(broken)


def test_averaged_scales_and_zero_points(getkey):
    q = eqq.quantize(weights(getkey(), (8, 64)), eqq.NF4(double_quant=True))
    for where in (lambda q: q.scale_bits.codes, lambda q: q.scale_bits.scale_bits):
        broken = eqx.tree_at(where, q, replace_fn=lambda x: x.astype(jnp.float32))
        with pytest.raises(TypeError, match="must be unsigned integers. Got (codes|scale) of float32"):
            broken.dequantize()
    q = eqq.quantize(weights(getkey(), (8, 64)), eqq.Int8(symmetric=False))
    with pytest.raises(TypeError, match="Got zero point of float32"):
        eqx.tree_at(lambda q: q.zero_point_bits, q, replace_fn=lambda x: x.astype(jnp.float32)).dequantize()


def test_incremental_update(getkey):
    optax = pytest.importorskip("optax")
    a, b = (eqq.quantize(weights(getkey(), (8, 64)), "int8") for _ in "ab")
    with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match="averaged or cast"):
        optax.incremental_update(a, b, 0.1).dequantize()


# Collectives see leaves


def test_a_mean_over_devices_is_refused(getkey):
    q = eqq.quantize(weights(getkey(), (3, 8, 64)), "int8")
    with jax.numpy_dtype_promotion("standard"), pytest.raises(TypeError, match="averaged or cast"):
        jax.vmap(lambda q: jax.lax.pmean(q, "i").dequantize(), axis_name="i")(q)


def test_collectives_on_the_dense_array(getkey):
    q = eqq.quantize(weights(getkey(), (3, 8, 64)), "int8")
    expected = np.asarray(q.dequantize()).sum(0)
    for psum in (lambda q: jax.lax.psum(q.dequantize(), "i"), eqq.quaxify(lambda q: jax.lax.psum(q, "i"))):
        total = jax.vmap(psum, axis_name="i")(q)[0]
        np.testing.assert_allclose(np.asarray(total), expected, rtol=1e-6, atol=1e-6)


REFUSED = {
    "expand_dims": lambda q: jax.lax.expand_dims(q, [0]),
    "broadcast": lambda q: jax.lax.broadcast(q, (2,)),
    "broadcast_in_dim": lambda q: jax.lax.broadcast_in_dim(q, (2, *q.shape), (1, 2)),
    "reduce": lambda q: jax.lax.reduce(q, 0.0, jax.lax.add, (0,)),
    "split": lambda q: jax.lax.split(q, [4, 4]),
    "associative_scan": lambda q: jax.lax.associative_scan(jnp.add, q),
}


@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_lax_refuses(getkey, name):
    assert f"`{name}`" in eqq.QuantizedArray.__doc__
    with pytest.raises((TypeError, ValueError)):
        REFUSED[name](eqq.quantize(weights(getkey(), (8, 64))))


# A stack that a scan does not take apart


def scan(stack, x, is_leaf_of_step):
    mapped, rest = eqx.partition(stack, is_leaf_of_step)
    return jax.lax.scan(lambda x, layer: (jnp.tanh(eqx.combine(layer, rest)(x)), None), x, mapped)[0]


@pytest.mark.parametrize("wrap", [lambda f: f, eqx.filter_jit])
def test_a_stack_split_by_is_inexact_array(getkey, wrap):
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))
    stack, x = eqq.quantize_tree(make(jr.split(getkey(), 4)), "int8"), weights(getkey(), (16,))
    run = lambda filter: wrap(lambda stack, x: jnp.sum(scan(stack, x, filter)))(stack, x)
    run(eqx.is_array)
    with (
        jax.numpy_rank_promotion("allow"),
        pytest.warns(UserWarning, match=r"of shape \(4, 16, 16\).*`eqx.partition\(model, eqx.is_array\)`"),
        pytest.raises(TypeError, match="carry"),
    ):
        run(eqx.is_inexact_array)


def test_the_gradient_of_a_stack_split_by_is_inexact_array(getkey):
    make = eqx.filter_vmap(lambda key: eqx.nn.Linear(16, 16, key=key))
    stack, x = eqq.quantize_tree(make(jr.split(getkey(), 4)), "int8"), weights(getkey(), (16,))
    gradient = lambda filter: eqx.filter_jit(eqq.filter_grad(lambda stack: jnp.sum(scan(stack, x, filter))))(stack)
    assert gradient(eqx.is_array).weight.shape == (4, 16, 16)
    with pytest.raises(ValueError, match=r"`eqx.partition\(model, eqx.is_array\)`"):
        gradient(eqx.is_inexact_array)


def test_a_product_with_a_whole_stack_does_not_warn(getkey):
    stack, x = eqq.quantize(weights(getkey(), (4, 8, 16)), "int8"), weights(getkey(), (16,))
    expected = stack @ x
    dot = lambda stack, x: stack @ x
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for f in (jax.jit(dot), jax.jit(jax.checkpoint(dot)), jax.vmap(dot, in_axes=(0, None))):
            np.testing.assert_allclose(np.asarray(f(stack, x)), np.asarray(expected), rtol=1e-5, atol=1e-5)
        jax.vmap(lambda x: stack @ x)(x[None])
        jax.grad(lambda x: jnp.sum(stack @ x))(x)
        jax.jit(lambda stack, x: jax.lax.cond(x[0] > 0, lambda: stack @ x, lambda: stack @ x))(stack, x)


# Arguments


@pytest.mark.parametrize("axis", [None, "x", [[]], {}])
def test_an_axis_that_is_none(getkey, axis):
    with pytest.raises((TypeError, ValueError), match="`axis` must name different axes of `x`.*Got `axis="):
        eqq.quantize(weights(getkey(), (8, 64)), axis=axis)


def test_no_axis_is_not_one_scale(getkey):
    with pytest.raises(TypeError, match='`block_size="tensor"`'):
        eqq.quantize(weights(getkey(), (8, 64)), axis=None)


def test_a_struct_has_no_values():
    struct = jax.ShapeDtypeStruct((4, 64), jnp.float32)
    with pytest.raises(TypeError, match="`x` must have values. Got a ShapeDtypeStruct.*`jax.eval_shape"):
        eqq.quantize(struct)
    assert jax.eval_shape(eqq.quantize, struct).shape == (4, 64)


def test_a_model_is_not_an_array(getkey):
    model = eqx.nn.MLP(2, 2, 2, 2, key=getkey())
    with pytest.raises(TypeError, match="`x` must be one array. Got a pytree of 6 arrays, of type MLP.*quantize_tree"):
        eqq.quantize(model)
    with pytest.raises(TypeError, match="`q` must be one array. Got a pytree of 6 arrays.*`eqq.dequantize_tree`"):
        eqq.dequantize(model)
    with pytest.raises(TypeError, match="`x` must be one array. Got a str"):
        eqq.quantize("weights")


def test_unpack_and_requantize_of_a_wrapper():
    q = eqq.quantize(jnp.ones((2, 3, 64)), "int4")
    with pytest.raises(TypeError, match=r"Got a SelectedArray. Its `.gather\(\)` is one"):
        eqq.unpack(eqq.take_layer(q, 0))
    with pytest.raises(TypeError, match=r"Got a LoraArray. Its `.base` is one"):
        eqq.requantize(eqq.loraify({"w": q}, 2, key=jr.key(0))["w"], jnp.ones(q.shape))


def test_unpack_of_a_dense_array():
    with pytest.raises(TypeError, match=r"`q` must be a quantized array. Got a dense array, float32\[3\]"):
        eqq.unpack(jnp.ones(3))


@pytest.mark.parametrize("name", ["bits", "group_size", "block_size", "symmetric", "dim"])
def test_arguments_that_have_another_name(getkey, name):
    with pytest.raises(TypeError, match=f"`quantize` has no argument `{name}`. "):
        eqq.quantize(weights(getkey(), (8, 64)), **{name: 4})


def test_a_format_by_the_words_of_others(getkey):
    w = weights(getkey(), (8, 64))
    with pytest.raises(TypeError, match=r"write `eqq.Int4\(block_size=64\)`"):
        eqq.quantize(w, bits=4, group_size=64)
    with pytest.raises(TypeError, match=r"write `eqq.Int3\(block_size=32, symmetric=False\)`"):
        eqq.quantize_tree([w], num_bits=3, block_size=32, sym=False)


@pytest.mark.parametrize(
    "format, given, says",
    [
        (eqq.NF4, {"group_size": 32}, "`NF4` has no argument `group_size`. It is called `block_size`"),
        (eqq.Int4, {"sym": False}, "It is called `symmetric`"),
        (eqq.Int4, {"symetric": False}, "Did you mean 'symmetric'"),
        (eqq.NF4, {"num_bits": 4}, "It takes block_size, double_quant, scale_dtype"),
        (eqq.MXFP4, {"block_size": 32}, "It takes no arguments"),
    ],
)
def test_fields_that_have_another_name(format, given, says):
    with pytest.raises(TypeError, match=says):
        format(**given)


def test_swapaxes(getkey):
    q = eqq.quantize(weights(getkey(), (8, 64)))
    with pytest.raises(ValueError, match=r"`axis2` must be one of the 2 axes of \(8, 64\). Got 5"):
        q.swapaxes(0, 5)


def test_a_product_the_wrong_way_round(getkey):
    q = eqq.quantize(weights(getkey(), (8, 64)))
    with pytest.raises(ValueError, match=r"Got lengths 64 and 8.*`x @ q.T` fits"):
        jnp.ones((3, 64)) @ q
    with pytest.raises(ValueError, match=r"Got lengths 64 and 8.*`q.T @ x` fits"):
        q @ jnp.ones(8)
    with pytest.raises(ValueError, match=r"\(3, 5\) @ \(8, 64\)\.$"):
        jnp.ones((3, 5)) @ q
    stack = eqq.quantize(weights(getkey(), (2, 8, 64)))
    with pytest.raises(ValueError, match=r"`x @ q.mT` fits"):
        jnp.ones((2, 3, 64)) @ stack


# Quantizing again


@pytest.mark.parametrize("name", SWEPT_FORMATS)
def test_requantize(getkey, name):
    w = weights(getkey(), (6, 200))
    for axis in (-1, 0):
        q = eqq.quantize(w, FORMATS[name].format, axis=axis, dtype=jnp.bfloat16)
        assert_same(eqq.requantize(q, w), q)
        for again, same in ((jax.jit(eqq.requantize)(q, w), q), (eqq.requantize(q.T, w.T), q.T)):
            assert jtu.tree_structure(again) == jtu.tree_structure(same)
            # Means are summed in another order.
            np.testing.assert_allclose(np.asarray(again.scale), np.asarray(same.scale), rtol=1e-6)


def test_requantize_refuses(getkey):
    w = weights(getkey(), (8, 64))
    q = eqq.quantize(w)
    with pytest.raises(ValueError, match=r"`x` must have the shape of `q`, \(8, 64\). Got \(8, 32\)"):
        eqq.requantize(q, w[:, :32])
    with pytest.raises(ValueError, match="`x` must be finite"):
        eqq.requantize(q, w.at[0, 0].set(jnp.nan))
    with pytest.raises(TypeError, match="`q` must be a quantized array"):
        eqq.requantize(w, w)


# Looking at it


def test_annotations_accept_every_array(getkey):
    beartype = pytest.importorskip("beartype")

    @jaxtyped(typechecker=beartype.beartype)
    def f(w: Float[eqq.ArrayOrQuantized, "out in"]):
        return w.shape

    q = eqq.quantize(weights(getkey(), (8, 64)))
    assert f(q) == f(q.dequantize()) == (8, 64)
    tree = {"w": q.dequantize()}
    for wrapped in (
        *(eqq.quantize_tree(tree, "int8", activations="int8"), eqq.quantize_tree(tree, "int8", simulate=True)),
        *(eqq.loraify(tree, rank=2, key=getkey()), eqq.low_precision_training(tree), eqq.transforms.rotate(tree)),
        eqq.take_layer(eqq.quantize_tree({"w": weights(getkey(), (3, 8, 64))}), 1),
    ):
        assert f(wrapped["w"]) == (8, 64)
    for wrong in (q.codes, q.dequantize()[0]):
        with pytest.raises(Exception, match="Type-check error"):
            f(wrong)

    @jaxtyped(typechecker=beartype.beartype)
    def dense_only(w: Float[jax.Array, "out in"]):
        return w.shape

    with pytest.raises(Exception, match="Type-check error"):
        dense_only(q)


def test_dir_lists_public_names(getkey):
    q = eqq.quantize(weights(getkey(), (8, 64)))
    names = dir(q)
    assert {"shape", "codes", "scale", "dequantize", "with_sharding", "sum", "T", "format"} <= set(names)
    assert not [n for n in names if n.startswith("_")] and not {"reshard", "aval", "materialise"} & set(names)
    assert all(inspect.getattr_static(q, n, None) is not None or hasattr(q, n) for n in names)
    assert "importlib" not in dir(eqq) and "quantize_tree" in eqq.__doc__


def test_arrays_display_in_notebooks(getkey):
    q = eqq.quantize(weights(getkey(), (8, 64)))
    html = q._repr_html_()
    assert "QuantizedArray(float32[8,64], NF4(), axis=-1)" in html and "4.50 bits per value" in html
    assert np.array2string(np.asarray(q)[0, 0], precision=4) in html and html.count("...") >= 4
    assert "<pre>" not in jax.eval_shape(eqq.quantize, jax.ShapeDtypeStruct((4, 64), jnp.float32))._repr_html_()
    assert "&lt;" in jtu.tree_map(lambda _: "<", q)._repr_html_()


# Arguments that are none of those that a function takes


def shard_unevenly():
    mesh = jax.make_mesh((4,), ("x",))
    return eqq.tree_shardings({"w": jnp.ones(6)}, {"w": NamedSharding(mesh, PartitionSpec("x"))})


def codes():
    return eqq.quantize(jnp.ones((4, 64)), "int8")


def eight_bit_adam():
    return eqq.quantize_state(optax.adam(1e-3))


ARGUMENTS = {
    "symmetric": (lambda: eqq.Int8(symmetric=1), "`symmetric` of Int8 must be True or False. Got 1"),
    "index": (lambda: eqq.take_layer(codes(), 1.5), "`index` must be integers. Got float64"),
    "train": (
        lambda: eqq.distill(codes(), jnp.ones((4, 64)), [], train="all"),
        "must be .scales. or .codes.. Got 'all'",
    ),
    "lower": (lambda: eqq.calibrate.Percentile(lower=50, upper=20), "percentiles, 0 <= lower < upper <= 100"),
    "optimizer": (lambda: eqq.quantize_state(eight_bit_adam()).init(jnp.ones(4096)), "Wrap the optimizer once"),
    "params": (lambda: eight_bit_adam().init(codes()), "an optimizer whose state is float.*which need masters"),
    "shardings": (shard_unevenly, "w, of shape .6,., cannot be sharded like this"),
    "rounding": (lambda: reference.integer_format(4, rounding="up"), "must be .half_even. or .half_away.. Got 'up'"),
    "signal": (lambda: reference.theoretical_sqnr(8, "square"), "must be .uniform. or .sine.. Got 'square'"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_are_refused(name):
    call, message = ARGUMENTS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        call()
