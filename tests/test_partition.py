"""The quantized matmul on a mesh: its collectives, read from the compiled program, and its values."""

import functools as ft
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq

from .helpers import assert_close, mark_slow, weights


M, N, K = 16, 256, 1024
SIZES = {"f32": 4, "u32": 4, "s32": 4, "f16": 2, "bf16": 2, "u16": 2, "u8": 1, "s8": 1, "pred": 1}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def put(x, mesh, spec):
    sharding = NamedSharding(mesh, spec)
    return x.with_sharding(sharding) if eqq.is_quantized(x) else jax.device_put(x, sharding)


def compile(f, *args, **kwargs):
    """The compiled program, and the name, dtype and bytes of each of its transfers."""
    program = jax.jit(f, **kwargs).lower(*args).compile()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= (\w+)\[([\d,]*)\]\S* ({kinds})\(", program.as_text())
    return program, [(kind, d, SIZES[d] * math.prod(int(n) for n in dims.split(",") if n)) for d, dims, kind in found]


def collectives(f, *args, **kwargs):
    return compile(f, *args, **kwargs)[1]


def product(x, q):
    return x @ q.T


FORMATS = ["nf4", "int8", eqq.Int4(symmetric=False), eqq.NF4(double_quant=True), "ternary", "mxfp8", "q4_k", "nvfp4"]
each_format = pytest.mark.parametrize("format", mark_slow(2, FORMATS), ids=str)


@each_format
def test_tensor_parallel(getkey, mesh, format):
    q, x = eqq.quantize(weights(getkey(), (N, K)), format), weights(getkey(), (M, K))
    expected = product(x, q)
    column = put(x, mesh, P("data")), put(q, mesh, P("model"))
    assert collectives(product, *column) == []
    assert product(*column).sharding.spec == P("data", "model")
    assert_close(product(*column), expected)
    # The partial sums meet, and nothing else.
    for spec in (P("data"), P("data", "model")):
        row = put(x, mesh, spec), put(q, mesh, P(None, "model"))
        program, found = compile(product, *row)
        assert found == [("all-reduce", "f32", 4 * M // 2 * N)]
        assert_close(program(*row), expected)


def test_the_sum_is_scattered_where_the_result_is_divided(getkey, mesh):
    q, x = eqq.quantize(weights(getkey(), (N, K)), "nf4"), weights(getkey(), (M, K))
    row = put(x, mesh, P("data", "model")), put(q, mesh, P(None, "model"))
    for spec, parts in ((P("data", "model"), 8), (P(("data", "model")), 8)):
        program, [(kind, _, nbytes)] = compile(product, *row, out_shardings=NamedSharding(mesh, spec))
        assert kind == "reduce-scatter" and nbytes == 4 * M * N // parts
        assert_close(program(*row), product(x, q))


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=str)
@each_format
def test_fully_sharded_gathers_packed_weights(getkey, mesh, format, spec):
    # As many examples as in training: more bytes than the weight has.
    q, x = eqq.quantize(weights(getkey(), (N, K)), format), weights(getkey(), (2048, K))
    sharded = put(x, mesh, P("data")), put(q, mesh, spec)
    where = NamedSharding(mesh, P("data"))
    program, found = compile(product, *sharded, out_shardings=where)
    assert found and {kind for kind, _, _ in found} == {"all-gather"}
    assert sum(nbytes for *_, nbytes in found) <= q.nbytes
    assert ("all-gather", "u8", q.codes.nbytes) in found
    assert_close(program(*sharded), product(x, q))


def test_both_operands_sharded(getkey, mesh):
    q, x = eqq.quantize(weights(getkey(), (N, K)), "nf4"), weights(getkey(), (M, K))
    sharded = put(x, mesh, P("data")), put(q, mesh, P("model", "data"))
    found = collectives(product, *sharded, out_shardings=NamedSharding(mesh, P("data", "model")))
    assert sum(nbytes for *_, nbytes in found) == q.nbytes // 4 and {kind for kind, *_ in found} == {"all-gather"}


@pytest.mark.long
@each_format
def test_gradients(getkey, mesh, format):
    q, x = eqq.quantize(weights(getkey(), (N, K)), format), weights(getkey(), (M, K))
    loss = lambda x, q: jnp.sum(jnp.sin(x @ q.T))
    x_grad, q_grad = jax.jit(jax.grad(loss))(x, q), jax.jit(eqq.filter_grad(lambda q: loss(x, q)))(q)
    tangent = jax.jvp(lambda x: loss(x, q), (x,), (x,))[1]
    for on_x, on_q in ((P("data"), P("model")), (P("data", "model"), P(None, "model")), (P("data"), P("data"))):
        xs, qs = put(x, mesh, on_x), put(q, mesh, on_q)
        assert_close(jax.jit(jax.grad(loss))(xs, qs), x_grad, tol=1e-4)
        assert_close(jax.jit(lambda q, x=xs: eqq.filter_grad(lambda q: loss(x, q))(q))(qs), q_grad, tol=1e-4)
        assert_close(jax.jit(lambda x, q=qs: jax.jvp(lambda x: loss(x, q), (x,), (x,))[1])(xs), tangent, tol=1e-2)
    # The gradient of a column parallel product is a row parallel one.
    dy = put(weights(getkey(), (M, N)), mesh, P("data", "model"))
    [(kind, dtype, _)] = collectives(lambda dy, q: dy @ q, dy, put(q, mesh, P("model")))
    assert (kind, dtype) == ("all-reduce", "f32")


def test_scales_of_scales_that_cover_more_than_one_device(getkey, mesh):
    # 448 blocks have two scales of scales, and each of four devices 112 blocks: as in a model of 70 billion parameters.
    q = eqq.quantize(weights(getkey(), (8, 448 * 64)), eqq.NF4(double_quant=True))
    x = weights(getkey(), (2, 448 * 64))
    assert q.scale_bits.scale_bits.shape == (8, 2)
    row = put(x, mesh, P(None, "model")), put(q, mesh, P(None, "model"))
    program, found = compile(product, *row)
    assert [kind for kind, *_ in found] == ["all-reduce"]
    assert_close(program(*row), product(x, q))


def test_parts_that_would_end_within_a_block_are_gathered(getkey, mesh):
    q, x = eqq.quantize(weights(getkey(), (N, 128)), "nf4"), weights(getkey(), (M, 128))
    # Nobody asked for it: the compiler divided `x` along the quantized axis.
    y = jax.jit(product)(put(x, mesh, P(None, "model")), put(q, mesh, P()))
    assert_close(y, product(x, q))
    ragged = eqq.quantize(weights(getkey(), (N, 100)), "nf4")
    x = weights(getkey(), (M, 100))
    assert_close(jax.jit(product)(put(x, mesh, P(None, "model")), put(ragged, mesh, P("model"))), product(x, ragged))


@pytest.mark.long
def test_stacked_weights(getkey, mesh):
    q, x = eqq.quantize(weights(getkey(), (3, N, K)), "nf4"), weights(getkey(), (3, M, K))
    expected = jnp.stack([x[i] @ q[i].T for i in range(3)])
    xs, qs = put(x, mesh, P(None, "data")), put(q, mesh, P(None, "model"))
    batched = lambda x, q: x @ q.mT
    assert collectives(batched, xs, qs) == []
    assert_close(batched(xs, qs), expected)
    assert_close(jax.jit(jax.vmap(lambda x, q: x @ q.T))(xs, qs), expected)
    scanned = jax.jit(lambda x, q: jax.lax.scan(lambda _, xq: (None, xq[0] @ xq[1].T), None, (x, q))[1])
    assert_close(scanned(xs, qs), expected)
    assert collectives(scanned, xs, qs) == []
    for format in ("q4_k", eqq.NF4(double_quant=True)):  # scales of scales, which devices share or not
        q = eqq.quantize(weights(getkey(), (3, N, K)), format)
        row = put(x, mesh, P(None, "data", "model")), put(q, mesh, P(None, None, "model"))
        program, found = compile(batched, *row)
        assert [kind for kind, *_ in found] == ["all-reduce"]
        assert_close(program(*row), batched(x, q))
        dy = weights(getkey(), (3, M, N))
        assert_close(put(dy, mesh, P(None, "data")) @ row[1], dy @ q)


def test_a_batch_of_vectors_is_one_product(getkey, mesh):
    q, x = eqq.quantize(weights(getkey(), (N, K)), "nf4"), weights(getkey(), (M, K))
    f = jax.vmap(lambda x, q: q @ x, in_axes=(0, None))
    sharded = put(x, mesh, P("data")), put(q, mesh, P("model"))
    assert collectives(f, *sharded) == []
    assert_close(f(*sharded), product(x, q))


@pytest.mark.long
def test_memory_of_a_part(getkey, mesh):
    # 64 MiB of float32, of which a device decodes its quarter a few rows at a time: 2 MiB for each of two planes.
    q, x = eqq.quantize(weights(getkey(), (4096, 4096)), "nf4"), weights(getkey(), (M, 4096))
    for on_q in (P("model"), P(None, "model")):
        sharded = put(x, mesh, P()), put(q, mesh, on_q)
        assert jax.jit(product).lower(*sharded).compile().memory_analysis().temp_size_in_bytes < 3 * 2**21


@pytest.mark.long
@each_format
def test_explicit_meshes(getkey, format):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    q, x = eqq.quantize(weights(getkey(), (N, K)), format), weights(getkey(), (4, M, K))
    expected = product(x, q)
    for on_q, spec in ((P("model"), P("data", None, "model")), (P(None, "model"), P("data", None, None))):
        xs, qs = put(x, mesh, P("data")), put(q, mesh, on_q)
        for f in (product, jax.jit(product)):
            y = f(xs, qs)
            assert jax.typeof(y).sharding.spec == spec
            assert_close(y, expected)
        loss = lambda x, q: jnp.sum(jnp.sin(x @ q.T))
        assert_close(jax.jit(jax.grad(loss))(xs, qs), jax.jit(jax.grad(loss))(x, q), tol=1e-4)
        grads = jax.jit(lambda q, x=xs: eqq.filter_grad(lambda q: loss(x, q))(q))(qs)
        assert_close(grads, jax.jit(eqq.filter_grad(lambda q: loss(x, q)))(q), tol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
@each_format
def test_inside_shard_map(getkey, mesh, format, check_vma):
    q, x = eqq.quantize(weights(getkey(), (N, K)), format), weights(getkey(), (M, K)) / 8
    f = lambda x, q: jnp.sin(x @ q.T)
    whole = lambda x, q: jnp.sum(f(x, q) ** 2)
    shard = ft.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
    for on_q, out in ((P(), P("data")), (P("model"), P("data", "model"))):
        mapped = shard(f, in_specs=(P("data"), on_q), out_specs=out)
        # Products of up to a dozen, of which XLA may add the parts in another order: their sine differs by 2e-5.
        assert_close(jax.jit(mapped)(x, q), f(x, q), tol=1e-4)
        loss = lambda x, q, mapped=mapped: jnp.sum(mapped(x, q) ** 2)
        assert_close(jax.jit(jax.grad(loss))(x, q), jax.jit(jax.grad(whole))(x, q), tol=1e-4)
        assert_close(
            jax.jit(eqq.filter_grad(lambda q: loss(x, q)))(q),
            jax.jit(eqq.filter_grad(lambda q: whole(x, q)))(q),
            tol=1e-4,
        )
    assert "quantized_matmul" in str(jax.make_jaxpr(mapped)(x, q))


def test_exported_and_on_one_device(getkey, mesh):
    q, x = eqq.quantize(weights(getkey(), (N, K)), "nf4"), weights(getkey(), (M, K))
    leaves, treedef = jax.tree_util.tree_flatten(q)
    exported = jax.export.export(jax.jit(lambda x, *q: product(x, jax.tree_util.tree_unflatten(treedef, q))))(
        x, *leaves
    )
    assert_close(exported.call(x, *leaves), product(x, q))
    alone = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,))
    assert_close(product(put(x, alone, P("one")), put(q, alone, P("one"))), product(x, q))
    np.testing.assert_array_equal(len(mesh.devices.flat), 8)


@pytest.mark.parametrize("count", [1, 2])
def test_kernels_of_one_tpu(count):
    """The compiler for TPUs divides no kernel among devices."""
    mesh = jax.make_mesh((count,), ("all",), axis_types=(AxisType.Auto,), devices=jax.devices()[:count])
    q, x = eqq.quantize(jnp.ones((N, K), jnp.bfloat16), "nf4"), jnp.ones((4, K), jnp.bfloat16)
    traced = jax.jit(product).trace(put(x, mesh, P()), put(q, mesh, P("all")))
    assert ("tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()) == (count == 1)


@pytest.fixture(scope="module")
def eight():
    return jax.make_mesh((8,), ("all",), axis_types=(AxisType.Auto,))


def test_more_devices_than_blocks(getkey, eight):
    # 512 codes of four bits are four parts. The compiler would divide them by half of the axis of eight.
    w, x = weights(getkey(), (64, 512)), weights(getkey(), (4, 512))
    q, xs = eqq.quantize(w, "nf4"), put(x, eight, P(None, "all"))
    expected = product(x, q)
    whole = put(eqq.quantize(jnp.stack([w, w]), "nf4"), eight, P())
    assert_close(jax.jit(lambda x: x @ q.T)(xs), expected)
    assert_close(jax.jit(lambda x, q: x @ jax.tree.map(lambda a: a[0], q).T)(xs, whole), expected)
    assert_close(jax.jit(lambda x, w: x @ eqq.quantize(w, "nf4").T)(xs, put(w, eight, P())), expected)
    scanned = jax.jit(lambda x, q: jax.lax.scan(lambda _, q: (None, x @ q.T), None, q)[1])
    assert_close(scanned(xs, whole), jnp.stack([expected, expected]))


@pytest.mark.parametrize("on_q", [P("model"), P(None, "model")], ids=str)
def test_the_explicit_mesh_of_the_context(getkey, on_q):
    """Both products, of which one sums over devices."""
    q = eqq.quantize(weights(getkey(), (64, K)), "nf4")
    x, t = weights(getkey(), (8, K)), weights(getkey(), (8, 64))
    both = lambda q, x, t: (product(x, q), t @ q)
    expected = both(q, x, t)
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        for f in (both, jax.jit(both)):
            for y, wanted in zip(f(q.with_sharding(on_q), put(x, mesh, P()), put(t, mesh, P())), expected, strict=True):
                assert_close(y, wanted)


@pytest.mark.parametrize("spec", [P(None, "data"), P(None, ("data", "model")), P(None, "data", "model")], ids=str)
def test_explicit_and_divided_along_the_sequence(getkey, spec):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    q, x = eqq.quantize(weights(getkey(), (64, K)), "nf4"), weights(getkey(), (2, 8, K))
    xs, qs = put(x, mesh, spec), put(q, mesh, P())
    for f in (product, jax.jit(product)):
        y = f(xs, qs)
        assert jax.typeof(y).sharding.spec == P(*spec[:2], None)
        assert_close(y, product(x, q))


def test_shard_map_over_some_axes_of_an_explicit_mesh(getkey):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    q, x = eqq.quantize(weights(getkey(), (64, K)), "nf4"), weights(getkey(), (8, K))
    f = jax.shard_map(product, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    assert_close(jax.jit(f)(put(x, mesh, P("data")), put(q, mesh, P("model"))), product(x, q))


@pytest.mark.parametrize("f", [lambda x, q: x @ q.T, lambda x, q: q.dequantize()], ids=["product", "dequantize"])
def test_shard_map_over_some_axes_divides_along_the_others(getkey, mesh, f):
    q, x = eqq.quantize(weights(getkey(), (64, K)), "nf4"), weights(getkey(), (8, K))
    rows = P("data") if f(x, q).shape[0] == 8 else P()
    local = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=rows, axis_names={"data"}))
    xs, qs = put(x, mesh, P("data")), put(q, mesh, P("model"))
    assert_close(local(xs, qs), f(x, q))
    assert "all-gather" not in local.lower(xs, qs).compile().as_text()


def test_the_quantized_axis_is_whole_inside_shard_map(getkey, mesh):
    q = put(eqq.quantize(weights(getkey(), (64, K)), "nf4"), mesh, P(None, "model"))
    f = jax.shard_map(product, mesh=mesh, in_specs=(P(None, "model"), P(None, "model")), out_specs=P())
    with pytest.raises(ValueError, match="quantized axis must be whole inside `shard_map`"):
        f(weights(getkey(), (8, K)), q)


def test_no_inputs(getkey, mesh):
    q = put(eqq.quantize(jnp.zeros((8, 0)), "nf4"), mesh, P("data"))
    np.testing.assert_array_equal(np.asarray(jnp.ones((8, 0)) @ q.T), np.zeros((8, 8)))
