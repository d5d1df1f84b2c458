"""Shardings of quantized arrays: specs of logical arrays and of their leaves."""

import dataclasses
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq

from .helpers import assert_close, FORMATS, KINDS, mark_slow, weights


AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def make_mesh(kind=AUTO):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


@pytest.fixture(params=[AUTO, EXPLICIT], ids=["auto", "explicit"])
def mesh(request):
    return make_mesh(request.param)


def list_specs(q):
    """The spec of every leaf, with `None` for each axis that is not divided."""
    padded = lambda a: (*a.sharding.spec, *[None] * (a.ndim - len(a.sharding.spec)))
    return [padded(leaf) for leaf in jtu.tree_leaves(q)]


def assert_same_bits(a, b):
    for x, y in zip(jtu.tree_leaves(a), jtu.tree_leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# Quantizing


@pytest.mark.parametrize("spec", [P("model", None), P(None, "model"), P("data", "model"), P(("data", "model")), P()])
@pytest.mark.parametrize("format", mark_slow(2, ["nf4", "int8", "int2", "q8_0", "mxfp4"]))
def test_each_device_quantizes_its_part(getkey, mesh, format, spec):
    w = weights(getkey(), (16, 1024))
    expected = eqq.quantize(w, format)
    sharded = jax.device_put(w, NamedSharding(mesh, spec))
    for q in (eqq.quantize(sharded, format), expected.with_sharding(NamedSharding(mesh, spec))):
        assert_same_bits(q, expected)
        assert q.sharding.is_equivalent_to(sharded.sharding, 2)
        assert list_specs(q)[0] == (*spec, *[None] * (2 - len(spec)))
        np.testing.assert_array_equal(np.asarray(q.dequantize()), np.asarray(expected.dequantize()))
    # Under `jit` the compiler knows.
    traced = jax.jit(lambda w: eqq.quantize(w, format))(sharded)
    assert_same_bits(traced, expected)
    assert traced.codes.sharding.is_equivalent_to(q.codes.sharding, 2)


@pytest.mark.long
def test_scales_follow_codes(getkey, mesh):
    place = lambda format, spec: list_specs(
        eqq.quantize(weights(getkey(), (8, 2048)), format).with_sharding(on(mesh, spec))
    )
    assert place(eqq.NF4(), P("data", "model")) == [("data", "model"), ("data", "model")]
    assert place(eqq.Int8(), P("data", "model")) == [("data", "model"), ("data", None)]  # one scale for the channel
    # Zero points are cut between packed segments, of 128 of four bits. Where that does not fit, all devices have all.
    assert place(eqq.Int4(symmetric=False), P(None, "model")) == [(None, "model")] * 2 + [(None, None)]
    assert place(eqq.Int4(4, symmetric=False), P(None, "model")) == [(None, "model")] * 3
    # Four blocks of scales of scales, of which each device has one; and one block, which all have.
    nested = eqq.NF4(block_size=2, double_quant=True)
    assert place(nested, P("data", "model")) == [("data", "model")] * 3
    assert place(eqq.NF4(double_quant=True), P("data", "model")) == [("data", "model")] * 2 + [("data", None)]


def test_packed_scales_are_cut_between_segments(getkey):
    """Four devices divide the codes of 2048 values, but not their 64 packed scales of six bits."""
    q = eqq.quantize(weights(getkey(), (8, 2048)), "q4_k").with_sharding(on(make_mesh(), P("data", "model")))
    assert list_specs(q) == [("data", "model")] + [("data", None)] * 4


def on(mesh, spec):
    return NamedSharding(mesh, spec)


def collectives(f, *args):
    text = jax.jit(f).lower(*args).compile().as_text()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return re.findall(rf"= (\S+?)(?:\{{\S*)? ({kinds})\(", text)


@pytest.mark.long
def test_quantizing_gathers_nothing(getkey):
    mesh, w = make_mesh(), weights(getkey(), (64, 1024))
    for spec in (P("model"), P(None, "model"), P("data", "model")):
        sharded = jax.device_put(w, on(mesh, spec))
        for format in ("nf4", "int4", "mxfp4", "q8_0"):
            assert collectives(lambda w, f=format: eqq.quantize(w, f), sharded) == []
        # Scales that have a scale in common meet. Nothing else does.
        found = collectives(lambda w: eqq.quantize(w, eqq.NF4(double_quant=True)), sharded)
        assert all(math.prod(map(int, shape.split("[")[1].strip("]").split(","))) <= 64 * 16 for shape, _ in found)
    # One scale for a channel that is divided: the largest magnitudes meet, one number a row.
    [(shape, kind)] = collectives(lambda w: eqq.quantize(w, "int8"), jax.device_put(w, on(mesh, P("data", "model"))))
    assert kind == "all-reduce" and shape in ("f32[32]", "f32[32,1]")


def test_quantizing_takes_the_memory_of_a_part(getkey):
    mesh, n = make_mesh(), 1024
    w = jax.device_put(weights(getkey(), (n, n)), on(mesh, P("data", "model")))
    compiled = jax.jit(lambda w: eqq.quantize(w, "nf4")).lower(w).compile().memory_analysis()
    part = 4 * n * n // 8
    assert compiled.argument_size_in_bytes == part
    assert compiled.output_size_in_bytes <= part / 7
    assert compiled.temp_size_in_bytes <= part


# The interface


def test_with_sharding_of_each_kind(getkey):
    mesh = make_mesh()
    q = eqq.quantize(weights(getkey(), (16, 512)), "nf4")
    assert q.sharding is None and not q.is_sharded
    named = q.with_sharding(on(mesh, P("model")))
    assert named.is_sharded and named.sharding == on(mesh, P("model", None))
    assert named.reshard(P(None, "model")).sharding == on(mesh, P(None, "model"))  # on the mesh that it is on
    with jax.set_mesh(mesh):
        assert q.with_sharding(P("data")).sharding.spec == P("data", None)
    pairs = {"model": P("model", None), ("data", "model"): P("data", "model"), None: P(None, None)}
    for entry, spec in pairs.items():
        moved = q.with_mesh_and_axis((mesh, entry))
        assert moved.sharding == on(mesh, spec) and moved.is_sharded == (entry is not None)
        assert_same_bits(moved, q)
    assert q.with_mesh_and_axis((mesh, P("data"))).sharding.spec == P("data", None)
    forgotten = named.with_sharding(None)
    assert forgotten.logical_sharding is None and forgotten.codes.sharding == named.codes.sharding


def test_within_jit_it_is_a_constraint(getkey, mesh):
    q = eqq.quantize(weights(getkey(), (16, 512)), "nf4").with_sharding(on(mesh, P("model")))
    moved = jax.jit(lambda q: q.with_sharding(P(None, "model")))(q)
    assert list_specs(moved) == [(None, "model")] * 2
    assert_same_bits(moved, q)


def test_quantized_arrays_can_be_deleted():
    q = eqq.quantize(jnp.ones((4, 64)), "nf4")
    q.delete()
    assert all(leaf.is_deleted() for leaf in jtu.tree_leaves(q))


# What changes the shape


def test_the_spec_follows_operations(getkey, mesh):
    w = weights(getkey(), (3, 16, 512))
    q = eqq.quantize(w, "nf4").with_sharding(on(mesh, P(None, "data", "model")))
    assert q.mT.sharding.spec == P(None, "model", "data")
    assert q.transpose(1, 0, 2).sharding.spec == P("data", None, "model")
    assert q.astype(jnp.bfloat16).sharding.spec == P(None, "data", "model")
    one = jtu.tree_map(lambda a: a[1], q)
    assert one.sharding.spec == P("data", "model")
    assert_same_bits(one, eqq.quantize(w[1], "nf4"))
    stacked = jtu.tree_map(lambda *a: jnp.stack(a), one, one)
    assert stacked.sharding.spec == P(None, "data", "model")
    seen = []

    def body(total, layer):
        seen.append(layer.sharding.spec)
        return total + layer.dequantize(), None

    start = jax.device_put(jnp.zeros((16, 512)), on(mesh, P("data", "model")))
    total, _ = jax.jit(lambda q, start: jax.lax.scan(body, start, q))(q, start)
    assert_close(total, np.asarray(q.dequantize()).sum(0))
    jax.jit(jax.vmap(lambda q: body(0.0, q)[0]))(q)
    assert seen and all(spec == P("data", "model") for spec in seen)


# Trees


def mlp(key):
    return eqx.nn.MLP(128, 64, 512, 1, key=key)


RULES = {"layers.0.weight": P("model"), "layers.0.bias": P("model"), "layers.1.weight": P(None, "model")}


@pytest.mark.long
def test_rules_trees_and_functions(getkey):
    mesh, model = make_mesh(), mlp(getkey())
    with jax.set_mesh(mesh):
        by_rules = eqq.quantize_tree(model, "nf4", shardings=RULES)
        by_function = eqq.quantize_tree(model, "nf4", shardings=lambda path, leaf: RULES.get(path))
        by_layer = eqq.quantize_tree(
            model, "nf4", shardings={"layers.0": P("model"), "layers.1.weight": P(None, "model")}
        )
    assert_same_bits(eqx.filter(by_layer, eqx.is_array), eqx.filter(by_rules, eqx.is_array))
    assert by_layer.layers[0].bias.sharding.spec == P("model")
    tree = jtu.tree_map(lambda _: None, model, is_leaf=eqx.is_array)
    tree = eqx.tree_at(lambda m: m.layers[0].weight, tree, on(mesh, P("model")), is_leaf=lambda x: x is None)
    by_tree = eqq.quantize_tree(model, "nf4", shardings=tree)
    assert_same_bits(eqx.filter(by_rules, eqx.is_array), eqx.filter(by_function, eqx.is_array))
    first, second = by_rules.layers
    assert first.weight.sharding.spec == P("model", None) and first.bias.sharding.spec == P("model")
    assert second.weight.sharding.spec == P(None, "model") and len(second.bias.devices()) == 1
    assert by_tree.layers[0].weight.sharding == on(mesh, P("model", None)) and not by_tree.layers[1].weight.is_sharded
    assert_same_bits(first.weight, eqq.quantize(model.layers[0].weight, "nf4"))


def test_tree_shardings(getkey):
    mesh, model = make_mesh(), mlp(getkey())
    rules = {path: on(mesh, spec) for path, spec in RULES.items()}
    sharded = eqq.quantize_tree(model, "nf4", shardings=rules)
    arrays, static = eqx.partition(eqq.quantize_tree(model, "nf4"), eqx.is_array)
    wanted = eqq.tree_shardings(arrays, {**rules, "*": on(mesh, P())})
    with pytest.warns(UserWarning, match="`shardings` should stand before wider ones"):
        eqq.tree_shardings(arrays, {"*": on(mesh, P()), **rules})
    moved = jax.device_put(arrays, wanted)
    for x, s in zip(jtu.tree_leaves(moved), jtu.tree_leaves(wanted), strict=True):
        assert x.sharding.is_equivalent_to(s, x.ndim)
    # Those that a model has; and of shapes, for a checkpoint.
    for x, s in zip(*map(jtu.tree_leaves, (sharded, eqq.tree_shardings(sharded))), strict=False):
        assert not eqx.is_array(x) or x.sharding == s
    shapes = eqx.filter_eval_shape(lambda: eqq.quantize_tree(model, "nf4"))
    shardings = eqq.tree_shardings(shapes, rules).layers[0].weight
    assert [s.spec for s in jtu.tree_leaves(shardings)] == [P("model", None)] * 2
    # `jit` takes them.
    same = jax.jit(lambda a: a, in_shardings=(wanted,), out_shardings=wanted)(moved)
    assert_same_bits(same, arrays)
    assert jtu.tree_structure(static) is not None


def test_a_sharded_model_keeps_its_sharding(getkey):
    mesh, model = make_mesh(), mlp(getkey())
    where = lambda m: (m.layers[0].weight, m.layers[1].weight)
    placed = jax.device_put(where(model), (on(mesh, P("model")), on(mesh, P(None, "model"))))
    q = eqq.quantize_tree(eqx.tree_at(where, model, placed), "nf4")
    assert [w.sharding.spec for w in where(q)] == [P("model", None), P(None, "model")]
    expected = eqq.quantize_tree(model, "nf4")
    assert_same_bits(where(q), where(expected))


# Bad input


@pytest.mark.parametrize(
    ("format", "shape", "spec", "message"),
    [
        ("nf4", (16, 512), P(None, None, "model"), "2 dimensions.*must not have more"),
        ("nf4", (6, 512), P("model"), r"axis 0, of length 6, by the mesh axes 'model' \(4\): 6 is not a multiple"),
        ("nf4", (16, 192), P(None, "model"), "axis 1, of length 192.*of 192 values in NF4.*128 are packed together"),
        ("int8", (16, 6), P(None, "model"), "6 is not a multiple of 4"),
        (eqq.Binary(), (16, 512), P(None, "model"), "512 are packed together"),
    ],
)
def test_specs_that_do_not_fit(getkey, format, shape, spec, message):
    mesh = make_mesh()
    q = eqq.quantize(weights(getkey(), shape), format)
    with pytest.raises(ValueError, match=message):
        q.with_sharding(NamedSharding(mesh, spec))


def test_a_convolution_is_divided_by_its_first_input_axis(getkey):
    mesh, conv = make_mesh(), eqx.nn.Conv2d(64, 16, 4, key=getkey())
    q = eqq.quantize_tree(conv, "nf4").weight
    assert q.with_sharding(on(mesh, P("data", "model"))).codes.sharding.spec == P("data", "model")
    with pytest.raises(ValueError, match="only the first of its quantized axes"):
        q.with_sharding(on(mesh, P(None, None, "model")))


def test_errors_name_the_leaf(getkey):
    mesh, model = make_mesh(), mlp(getkey())
    other = jax.make_mesh((8,), ("all",), axis_types=(AUTO,))
    with pytest.raises(ValueError, match=r"layers\.0\.weight needs a mesh"):
        eqq.quantize_tree(model, "nf4", shardings={"layers.0.weight": P("model")})
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"layers\.0\.weight must name axes.*'data', 'model'.*'no'"),
    ):
        eqq.quantize_tree(model, "nf4", shardings={"layers.0.weight": P("no")})
    with pytest.raises(ValueError, match=r"layers\.0\.weight.*are packed together"):
        eqq.quantize_tree(model, "nf4", shardings={"layers.0.weight": on(mesh, P(None, "model"))})
    with pytest.raises(ValueError, match=r"one mesh.*layers\.0\.weight and .*layers\.1\.weight"):
        specs = {"layers.0.weight": on(mesh, P("model")), "layers.1.weight": on(other, P("all"))}
        eqq.quantize_tree(model, "nf4", shardings=specs)
    with pytest.raises(ValueError, match="must match a leaf.*'nothing'"):
        eqq.tree_shardings(model, {"nothing": on(mesh, P())})
    with pytest.raises(ValueError, match=r"layers\.0\.bias, of shape \(512,\)"):
        eqq.tree_shardings(model, {"*.bias": on(other, P(None, "all"))})
    with pytest.raises(TypeError, match=r"layers\.0\.bias must have a NamedSharding"):
        eqq.tree_shardings(model, lambda path, leaf: "model" if path == "layers.0.bias" else None)


def test_a_sharded_weight_whose_parts_end_within_a_block(getkey):
    w = jax.device_put(weights(getkey(), (8, 128)), on(make_mesh(), P(None, "model")))
    with pytest.raises(ValueError, match="into fewer parts"):
        eqq.quantize(w, "nf4")
    with pytest.raises(ValueError, match=r"^w, of shape"):
        eqq.quantize_tree({"w": w}, "nf4")


@pytest.mark.parametrize("name", [*KINDS, "iq2_xs"])
def test_every_format_is_divided(getkey, name):
    mesh, format = make_mesh(), FORMATS[name].format
    q = eqq.quantize(weights(getkey(), (8, 2048)), format)
    for spec in (P("model"), P(None, "data")):
        moved = q.with_sharding(on(mesh, spec))
        assert list_specs(moved)[0] == (*spec, *[None] * (2 - len(spec)))
        assert_same_bits(moved, q)
        np.testing.assert_array_equal(np.asarray(moved.dequantize()), np.asarray(q.dequantize()))
    assert dataclasses.replace(moved, logical_sharding=None).sharding == moved.sharding  # from where the codes are


@pytest.mark.parametrize("format", ["nvfp4", eqq.Int8(block_size="tensor"), "dynamic8", "q4_0", "iq2_xs"], ids=str)
def test_explicit_arrays_in_any_format(getkey, format):
    w = weights(getkey(), (16, 512))
    sharded = jax.device_put(w, on(make_mesh(EXPLICIT), P("data")))
    for q in (eqq.quantize(sharded, format), jax.jit(lambda w: eqq.quantize(w, format))(sharded)):
        assert_same_bits(q, eqq.quantize(w, format))
    with pytest.raises(ValueError, match="are packed together"):
        eqq.quantize(jax.device_put(w[:, :256], on(make_mesh(EXPLICIT), P(None, "model"))), "nf4")


@pytest.mark.long
def test_a_mesh_with_axes_of_both_types(getkey):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AUTO, EXPLICIT))
    w = weights(getkey(), (16, 512))
    expected = eqq.quantize(w, "nf4")
    for spec in (P("data"), P("data", "model"), P(None, "model")):
        placed = expected.with_sharding(on(mesh, spec))
        for q in (placed, eqq.quantize(jax.device_put(w, on(mesh, spec)), "nf4")):
            np.testing.assert_array_equal(np.asarray(q.dequantize()), np.asarray(expected.dequantize()))


def test_other_objects_as_shardings_are_an_error(getkey):
    mesh, q = make_mesh(), eqq.quantize(weights(getkey(), (16, 512)), "nf4")
    for wrong in ("model", ("model", None), 42, mesh):
        with pytest.raises(TypeError, match="must be a NamedSharding or a PartitionSpec"):
            q.with_sharding(wrong)
    with pytest.raises(ValueError, match="abstract"):
        q.with_sharding(on(mesh.abstract_mesh, P("model")))
    with pytest.raises(ValueError, match="names of mesh axes"):
        q.with_mesh_and_axis((mesh, 3))
    with pytest.raises(TypeError, match="a pair"):
        q.with_mesh_and_axis(mesh)
    with pytest.raises(TypeError, match="`shardings` must be rules"):
        eqq.quantize_tree({"w": jnp.ones((4, 64))}, "nf4", shardings=mesh)


def test_arrays_in_host_memory_are_quantized_on_their_devices(getkey):
    w = weights(getkey(), (16, 128))
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    for sharding in (one, NamedSharding(mesh, P("model"), memory_kind="pinned_host")):
        host = jax.device_put(w, sharding)
        assert host.sharding.memory_kind == "pinned_host"
        by_tree = eqq.quantize_tree({"w": host}, "int4")["w"]
        for q in (eqq.quantize(host, "int4"), by_tree, jax.jit(lambda x: eqq.quantize(x, "int4"))(host)):
            assert q.codes.sharding.memory_kind == "device"
            assert len(q.codes.sharding.device_set) == len(sharding.device_set)
            np.testing.assert_array_equal(q.codes, eqq.quantize(w, "int4").codes)
