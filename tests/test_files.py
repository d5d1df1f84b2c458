"""Our own files: loaded trees equal saved trees to the bit, or an error tells the difference."""

import functools as ft
import json
import os
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from safetensors.numpy import save_file

import eqquant as eqq
from eqquant._numerics.packing import pack, packed_length
from eqquant._wrappers.permuted import PermutedArray
from eqquant._wrappers.rotated import RotatedArray
from eqquant._wrappers.scaled import ScaledArray
from eqquant.io import _atomic
from eqquant.io._bits import pack_codes, pack_columns, unpack_columns, unpack_low_first
from eqquant.io._convert import convert_into
from eqquant.io._writers import gguf
from eqquant.reference import integer_format

from .helpers import arrays, FORMATS, KINDS, loss, mlp, weights


def deep_mlp(key):
    return eqx.nn.MLP(20, 3, 40, 2, key=key)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def assert_equal_trees(actual, expected):
    """The same structure, types, dtypes and bits."""
    assert jtu.tree_structure(actual) == jtu.tree_structure(expected)
    for a, e in zip(jtu.tree_leaves(actual), jtu.tree_leaves(expected), strict=True):
        if not eqx.is_array(e) and not isinstance(e, (np.ndarray, np.generic)):
            assert (type(a), repr(a)) == (type(e), repr(e))
            continue
        assert isinstance(a, jax.Array) == isinstance(e, jax.Array) and a.dtype == e.dtype and a.shape == e.shape
        if jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jr.key_data(a), jr.key_data(e)
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def skeleton(tree):
    """The template without values."""
    return jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, tree)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in (*KINDS, "codebook") else pytest.mark.slow) for n in FORMATS]
)
def test_every_format(getkey, path, name):
    tree = {"w": eqq.quantize(weights(getkey(), (6, 200)), FORMATS[name].format), "b": jnp.ones(6)}
    eqq.save(path, tree)
    for like in (None, tree, skeleton(tree), {"w": jnp.zeros((6, 200)), "b": jnp.zeros(6)}):
        assert_equal_trees(eqq.load(path, like), tree)


def test_every_kind_of_leaf(path):
    tree = {
        "f16": jnp.arange(5, dtype=jnp.float16),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "bool": jnp.array([True, False]),
        "i4": jnp.arange(-3, 4).astype(jnp.int4),
        "u2": jnp.arange(4).astype(jnp.uint2),
        "f4": jnp.arange(6.0).astype(jnp.float4_e2m1fn),
        "f4_odd": jnp.arange(3.0).astype(jnp.float4_e2m1fn),
        "e8m0": jnp.array([1.0, 2.0]).astype(jnp.float8_e8m0fnu),
        "fp8": jnp.arange(6.0).astype(jnp.float8_e4m3fn).reshape(2, 3),
        "fp8_other": jnp.arange(6.0).astype(jnp.float8_e4m3b11fnuz),
        "c64": jnp.array([1 + 2j]),
        "nan": jnp.array([jnp.nan, -jnp.inf, -0.0]),
        "numpy": np.arange(3, dtype=np.float64),
        "c128": np.array([1 - 2j]),
        "big_endian": np.arange(3, dtype=">f4"),
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "generic": np.float32(3),
        "scalar": jnp.float32(2.5),
        "key": jr.key(1),
        "keys": jr.split(jr.key(2, impl="rbg"), 3),
        "raw_key": jr.PRNGKey(3),
        "none": None,
        "int": 2**70,
        "negative": -3,
        "float": 0.1,
        "inf": float("-inf"),
        "bool_": True,
        "complex": 1 - 0.5j,
        "text": 'a "name" \u00fc',
        "list": [jnp.ones(2), (1, jnp.zeros(1))],
    }
    eqq.save(path, tree)
    expected = {**tree, "big_endian": np.arange(3, dtype=np.float32)}
    assert_equal_trees(eqq.load(path, tree), expected)
    loaded = eqq.load(path)
    assert loaded.keys() == tree.keys() - {"none"} and loaded["list"].keys() == {"0", "1"}
    assert type(loaded["text"]) is str and type(loaded["generic"]) is np.float32
    assert_equal_trees(eqq.io.assign(tree, loaded), expected)


# Models and training


def layers(key):
    return eqx.filter_vmap(lambda k: eqx.nn.Linear(64, 64, key=k))(jr.split(key, 3))


@pytest.mark.long
def test_models(getkey, path):
    conv = eqx.nn.Conv2d(3, 8, 3, key=getkey())
    model = {"conv": conv, "stack": layers(getkey()), "norm": eqx.nn.LayerNorm(4), "act": jax.nn.relu}
    quantized = eqq.quantize_tree(model, {"conv.*": "int4", "*": eqq.NF4(double_quant=True)})
    assert isinstance(quantized["conv"].weight.axis, tuple)
    eqq.save(path, quantized)
    for like in (model, quantized, eqx.filter_eval_shape(lambda: model)):
        assert_equal_trees(eqq.load(path, like), quantized)
    assert_equal_trees(eqq.io.assign(model, eqq.load(path)), quantized)
    assert_equal_trees(eqq.io.assign(model, dict(eqq.io.open(path))), quantized)  # names are paths
    transposed = quantized["stack"].weight.swapaxes(-1, -2)
    eqq.save(path, transposed)
    assert_equal_trees(eqq.load(path), transposed)


@pytest.mark.long
def test_training_resumes(getkey, path):
    model, x = eqq.quantize_tree(mlp(getkey()), "int4"), weights(getkey(), (8, 20))
    optim = eqq.float_masters(eqq.quantize_state(optax.adamw(1e-2), min_size=16), key=getkey())

    @eqx.filter_jit
    def step(model, state):
        grads = eqq.filter_grad(loss)(model, x)
        with jax.numpy_dtype_promotion("standard"):  # which optax needs
            updates, state = optim.update(grads, state, model)
        return eqq.apply_updates(model, updates), state

    now = step(model, optim.init(model))
    eqq.save(path, now)
    resumed = eqq.load(path, (model, optim.init(model)))
    assert_equal_trees(resumed, now)
    assert_equal_trees(step(*resumed), step(*now))


@pytest.mark.long
def test_adapters_simulation_and_gradients(getkey, path):
    model = mlp(getkey())
    lora = eqq.loraify(eqq.quantize_tree(model, "nf4"), rank=2, key=getkey())
    simulated = eqq.quantize_tree(model, "int4", simulate=True)
    q = eqq.quantize(weights(getkey(), (2, 64)), "int8")
    given = eqx.tree_at(lambda q: q.gradient_of, q, jnp.ones((2, 64)), is_leaf=lambda x: x is None)
    for tree in (lora, simulated, given, arrays(lora)):
        eqq.save(path, tree)
        assert_equal_trees(eqq.load(path, tree), tree)


def test_wrappers_must_equal_the_template(getkey, path):
    model = mlp(getkey())
    base = eqq.quantize_tree(model, "nf4")
    simulate = lambda format, **kw: eqq.quantize_tree(model, format, simulate=True, **kw)
    adapt = lambda alpha: eqq.loraify(base, rank=2, alpha=alpha, key=jr.key(0))
    for tree, other, message in [
        (simulate("int4"), simulate("int8"), r"format=Int4\(block_size=64.* in the file, .*format=Int8\("),
        (simulate("int4"), simulate("int4", method=eqq.MSE()), r"AbsMax\(\)\) in the file, .*method=MSE\("),
        (adapt(16.0), adapt(3.0), r"alpha=16.0, in_ndim=1\) in the file, .*alpha=3.0"),
    ]:
        eqq.save(path, tree)
        assert_equal_trees(eqq.load(path, eqx.filter_eval_shape(lambda tree=tree: tree)), tree)
        assert_equal_trees(eqq.io.assign(tree, eqq.load(path)), tree)
        with pytest.raises(ValueError, match=message):
            eqq.load(path, other)
        with pytest.raises(ValueError, match="must fit the model"):
            eqq.io.assign({"model": other}, {"model": tree})


@pytest.mark.parametrize("wrap", ["activations", "factors"])
def test_a_template_without_the_wrappers(getkey, tmp_path, wrap):
    model, key = mlp(getkey()), getkey()
    if wrap == "activations":
        make = lambda: eqq.quantize_tree(model, "int8", activations="int8")
    else:
        make = lambda: eqq.loraify(eqq.quantize_tree(model, "nf4"), rank=2, key=key)
    path = tmp_path / "model.safetensors"
    eqq.save(path, made := make())
    assert_equal_trees(eqq.load(path, eqx.filter_eval_shape(make)), made)
    with pytest.raises(ValueError, match=r"within \w+Array\(.* in `like`. The template must have the same") as raised:
        eqq.load(path, model)
    assert "nothing" not in str(raised.value)


def test_only_the_adapters(getkey, path):
    lora = eqq.loraify(eqq.quantize_tree(mlp(getkey()), "nf4"), rank=2, key=getkey())
    adapters, rest = eqx.partition(lora, eqq.trainable_mask(lora))
    eqq.save(path, (adapters, optax.adam(1e-3).init(adapters)))
    loaded, _ = eqq.load(path, (adapters, optax.adam(1e-3).init(adapters)))
    assert_equal_trees(eqx.combine(loaded, rest), lora)
    q = eqx.tree_at(lambda q: q.codes, eqq.quantize(jnp.ones((2, 64)), "nf4"), None)
    with pytest.raises(ValueError, match="w must be a whole quantized array"):
        eqq.save(path, {"w": q})


def test_unserializable_values_are_an_error(path):
    gone = jnp.ones(3)
    gone.delete()
    deep = ft.reduce(lambda inner, _: {"k": inner}, range(501), jnp.ones(1))
    for x, error, message in [
        (gone, ValueError, "a.x must have values. Got an array that was deleted"),
        (np.ma.array([1, 2], mask=[0, 1]), TypeError, "a.x must be an array without a mask"),
        (deep, ValueError, "at most 500 nodes"),
    ]:
        with pytest.raises(error, match=message):
            eqq.save(path, {"a": {"x": x}})
    assert not path.exists()
    eqq.save(path, deep["k"])
    assert_equal_trees(eqq.load(path), deep["k"])
    assert_equal_trees(eqq.load(path, deep["k"]), deep["k"])


@pytest.mark.skipif(os.name != "posix", reason="permissions and pipes")
def test_odd_paths(tmp_path, path):
    tree = {"a": jnp.ones(1)}
    for odd, message in [
        (tmp_path, "must be a file. Got a folder, which only `shard_nbytes`"),
        (tmp_path / "no" / "file", "must be in a folder that exists. Got .*no, which does not"),
        ("/dev/null", "must be a file. Got a device"),
    ]:
        with pytest.raises(OSError, match=message):
            eqq.save(odd, tree)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    with pytest.raises(ValueError, match="index.json must name files of its own folder"):
        eqq.io.open(index)
    index.unlink()
    os.mkfifo(tmp_path / "pipe")
    for read in (eqq.load, eqq.io.open):
        with pytest.raises(ValueError, match="pipe must be a file. Got a folder, a device or a pipe"):
            read(tmp_path / "pipe")
    for wrong in (0, -1, True):
        with pytest.raises(ValueError, match="at least 1"):
            eqq.save(path, tree, shard_nbytes=wrong)
    eqq.save(path, tree)
    path.chmod(0o600)
    eqq.save(path, tree)
    assert path.stat().st_mode & 0o777 == 0o600
    for name in ("x" * 255, "model.pt"):  # the content of a file tells its layout
        eqq.save(tmp_path / name, tree)
        assert_equal_trees(eqq.load(tmp_path / name), tree)
    with pytest.raises(ValueError, match="must be a file of all tensors. Got .*, which is the name of an index"):
        eqq.save(index, tree)
    link, index = tmp_path / "link", tmp_path / "target" / index.name
    link.symlink_to(index.parent)
    eqq.save(link, tree, shard_nbytes=100)
    assert link.is_symlink() and index.is_file()


def test_tied_weights_are_saved_once_and_stay_tied(getkey, path):
    w = eqq.quantize(weights(getkey(), (64, 64)), "int8")
    tree = {"embed": w, "head": w, "b": jnp.ones(3), "c": jnp.ones(3)}
    eqq.save(path, tree)
    for loaded in (eqq.load(path), eqq.load(path, tree)):
        assert_equal_trees(loaded, tree)
        assert loaded["embed"].codes is loaded["head"].codes and loaded["b"] is not loaded["c"]
    assert path.stat().st_size < 1.5 * w.nbytes + 3000


def test_one_array_within_different_ones(getkey, path):
    q, order = eqq.quantize(weights(getkey(), (4, 64)), "int4"), jnp.arange(64, dtype=jnp.uint32)
    tree = {
        "a": RotatedArray(q),
        "b": q,
        "c": ScaledArray(q, jnp.ones(64)),
        "d": PermutedArray(RotatedArray(q, 1), order),
    }
    eqq.save(path, tree)
    loaded = eqq.load(path, skeleton(tree))
    assert_equal_trees(loaded, tree)
    assert loaded["a"].array.codes is loaded["c"].array.codes
    with pytest.raises(ValueError, match=r"d.array.array: .* within RotatedArray\(seed=1.*seed=2"):
        eqq.load(path, {**tree, "d": PermutedArray(RotatedArray(q, 2), order)})


def test_colliding_names_stay_distinct(path):
    trees = [
        {"a.b": jnp.zeros(1), "a": {"b": jnp.ones(1)}},
        {"w": eqq.quantize(jnp.ones((2, 64)), "int8"), "w.codes": jnp.ones(2), "__metadata__": jnp.zeros(2)},
        {0: jnp.zeros(1), 1: {0: jnp.ones(1), 1: jnp.ones(2)}},
        jnp.arange(3),
        3,
        {},
        {"": {"": jnp.ones(1)}, "x": {}},
    ]
    for tree in trees:
        eqq.save(path, tree)
        assert_equal_trees(eqq.load(path, tree), tree)
    eqq.save(path, trees[0])
    assert_equal_trees(eqq.load(path), trees[0])


# What does not fit


FOUR = "float32\\[4\\] in the file"
NF4 = r"float32\[4, 64\] in NF4\(block_size=64, double_quant=False, scale_dtype='float32'\), axis=-1 in the file"


@pytest.mark.parametrize(
    "like, message",
    [
        (lambda q: {"w": eqq.quantize(jnp.ones((4, 64)), "int4"), "b": jnp.ones(4)}, f"w: {NF4}, .* in Int4\\("),
        (lambda q: {"w": q.T, "b": jnp.ones(4)}, rf"{NF4}, float32\[64, 4\] in NF4.*axis=-2 in `like`"),
        (lambda q: {"w": q.astype(jnp.bfloat16), "b": jnp.ones(4)}, f"{NF4}, bfloat16"),
        (lambda q: {"w": jnp.ones((4, 65)), "b": jnp.ones(4)}, rf"w: {NF4}, float32\[4, 65\] in `like`"),
        (lambda q: {"w": q, "b": eqq.quantize(jnp.ones(4), "int8")}, rf"b: {FOUR}, .*Int8\("),
        (lambda q: {"w": q, "b": jnp.ones(4, jnp.int32)}, rf"b: {FOUR}, int32\[4\] in `like`"),
        (lambda q: {"w": q, "b": 1.0}, f"b: {FOUR}, a Python float in `like`"),
        (lambda q: {"w": q, "b": jax.nn.relu}, rf"b: {FOUR}, a \w+ in `like`"),
        (lambda q: {"w": q}, f"b: {FOUR}, nothing in `like`"),
        (lambda q: {"w": q, "b": jnp.ones(4), "c": jr.key(0)}, r"c: nothing in the file, PRNG keys key<fry>\[\]"),
    ],
)
def test_mismatches(getkey, path, like, message):
    q = eqq.quantize(weights(getkey(), (4, 64)), "nf4")
    eqq.save(path, {"w": q, "b": jnp.ones(4)})
    with pytest.raises(ValueError, match=rf"`like` must fit the file .*model.safetensors\. Got .*{message}"):
        eqq.load(path, like(q))
    with pytest.raises(ValueError, match="`arrays` must fit the model. Got "):
        eqq.io.assign(like(q), eqq.load(path))


def test_unsupported_leaves_are_an_error(path):
    for bad, message in [
        (jax.ShapeDtypeStruct((2,), jnp.float32), "w must have values. Got a ShapeDtypeStruct"),
        (np.array([None]), "w must hold numbers, booleans or PRNG keys. Got an array of object"),
        (np.array(["x"]), "w must hold numbers"),
        (np.zeros(2, np.longdouble), "w must hold numbers"),
    ]:
        with pytest.raises(TypeError, match=message):
            eqq.save(path, {"w": bad})
        assert not path.exists()
    q = eqq.quantize(jnp.ones((2, 64)), "int8")
    with pytest.raises(ValueError, match="w must be a whole quantized array. .*scale_bits"):
        eqq.save(path, {"w": eqx.tree_at(lambda q: q.scale_bits, q, jnp.ones((3, 1), jnp.uint32))})
    with pytest.raises(TypeError, match="a traced array: save outside of `jit`"):
        jax.jit(lambda x: eqq.save(path, x))(jnp.ones(2))


class Halves(eqq.extend.AbstractFormat):
    """Multiples of a half."""

    block_size: int | None = eqx.field(static=True, default=32)
    step: float = eqx.field(static=True, default=0.5)
    bits = 8

    def choose_scale(self, blocks):
        return jnp.max(jnp.abs(blocks), axis=-1, initial=0) / 60

    def encode(self, values):
        return (jnp.clip(jnp.round(values / self.step), -128, 127) + 128).astype(jnp.uint8)

    def decode(self, codes):
        return (codes.astype(jnp.float32) - 128) * self.step


def test_formats_defined_by_users(getkey, path, monkeypatch):
    q = eqq.quantize(weights(getkey(), (2, 64)), Halves(step=0.25))
    eqq.save(path, q)
    assert_equal_trees(eqq.load(path), q)
    monkeypatch.delitem(eqq._formats.base.FORMATS, "halves")
    with pytest.raises(ValueError, match=r"format 'Halves', which is not defined.*pass its class as `formats="):
        eqq.load(path)
    assert_equal_trees(eqq.load(path, formats=[Halves]), q)

    class Halves2(Halves):
        other: int = eqx.field(static=True, default=1)

    Halves2.__name__ = "Halves"
    with pytest.raises(ValueError, match="which made .*'other': 1.* Another version of the class"):
        eqq.load(path, formats=[Halves2])
    three_bits = eqq.quantize(jnp.ones((2, 64)), integer_format(3))
    eqq.save(path, three_bits)
    with pytest.raises(ValueError, match="'_Integer', which is not defined"):
        eqq.load(path)
    assert_equal_trees(eqq.load(path, formats=[type(three_bits.format)]), three_bits)


# Meshes


def test_shardings(getkey, path):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    on = lambda *spec: NamedSharding(mesh, P(*spec))
    model = eqq.quantize_tree(deep_mlp(getkey()), {"layers.1.*": eqq.NF4(double_quant=True)})
    eqq.save(path, model)
    rules = {"layers.1.weight": on("x", None), "*": on()}
    sharded = eqq.quantize_tree(deep_mlp(getkey()), {"layers.1.*": eqq.NF4(double_quant=True)}, shardings=rules)
    placed = jtu.tree_map(lambda x: x.sharding, arrays(sharded))
    by_rules = eqq.load(path, eqx.filter_eval_shape(lambda: model), shardings=rules)
    by_template = eqq.load(path, sharded)
    for loaded in (by_rules, by_template):
        assert jtu.tree_structure(loaded) == jtu.tree_structure(sharded)
        assert jtu.tree_map(lambda x: x.sharding, arrays(loaded)) == placed
        assert loaded.layers[1].weight.sharding == on("x", None)
        for a, e in zip(jtu.tree_leaves(arrays(loaded)), jtu.tree_leaves(arrays(model)), strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(e))
    named = eqq.load(path, shardings={"layers.1.weight": on("x"), "*": on()})
    assert named["layers"]["1"]["weight"].sharding == on("x", None)
    eqq.save(path, sharded)
    assert_equal_trees(arrays(eqq.load(path, sharded)), arrays(sharded))
    with pytest.raises(ValueError, match="layers.1.weight, of shape .*cannot be divided along axis 1"):
        eqq.load(path, model, shardings={"layers.1.weight": on(None, "x"), "*": on()})


def test_shards_need_a_folder(tmp_path):
    path = tmp_path / "model.safetensors"
    eqq.save(path, {"w": jnp.ones(2)})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"`path` must be a folder, which gets .*index.json.*Got .*model.safetensors"):
        eqq.save(path, {"w": jnp.zeros(2)}, shard_nbytes=100)
    assert path.read_bytes() == before


def write_gguf_parts(folder, tree):
    for n in range(2):
        part = {"split.no": np.uint16(n), "split.count": np.uint16(2), "split.tensors.count": np.int32(len(tree))}
        arrays = {name: x for i, (name, x) in enumerate(tree.items()) if i % 2 == n}
        with _atomic.replace(folder / f"model-{n + 1:05}-of-00002.gguf") as new:
            gguf.write(new, [gguf.layout(name, x).tensors[0] for name, x in arrays.items()], part)


def write_shards_of_others(folder, tree):
    for name, x in tree.items():
        save_file({name: x}, folder / f"{name}.safetensors")
    index = {"weight_map": {name: f"{name}.safetensors" for name in tree}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def convert_after(write):
    """Writes a tree by a conversion of a file elsewhere."""

    def converted(folder, tree):
        source = folder.with_name("source.safetensors")
        eqq.save(source, tree)
        write(eqq.io.open(source), folder)

    return converted


OUTPUTS = {
    "file": lambda folder, tree: eqq.save(folder / "model.safetensors", tree),
    "another file": lambda folder, tree: eqq.save(folder / "a.safetensors", tree),
    "a shard": lambda folder, tree: eqq.save(folder / "v.safetensors", tree),
    "shards": lambda folder, tree: eqq.save(folder, tree, shard_nbytes=8),
    "mlx": lambda folder, tree: eqq.io.write(folder, tree, "mlx"),
    "mlx shards": lambda folder, tree: eqq.io.write(folder, tree, "mlx", shard_nbytes=8),
    "gguf": lambda folder, tree: eqq.io.write(folder / "model.gguf", tree, "gguf"),
    "convert": convert_after(lambda source, folder: eqq.io.convert(source, folder / "model.safetensors")),
    "convert to mlx": convert_after(lambda source, folder: eqq.io.convert(source, folder, dialect="mlx")),
    "convert into": convert_after(convert_into),
}
THERE = {"shards of others": write_shards_of_others, "gguf parts": write_gguf_parts, **OUTPUTS}


@pytest.mark.parametrize("there", THERE)
@pytest.mark.parametrize("output", OUTPUTS)
def test_what_is_written_in_a_folder_is_what_is_read_from_it(tmp_path, there, output):
    """Or it is refused, or the folder is ambiguous, which is an error."""
    folder = tmp_path / "folder"
    folder.mkdir()
    old, new = ({"v": np.full(2, n, np.float32), "w": np.full(3, n, np.float32)} for n in (1, 2))
    THERE[there](folder, old)
    before = {p: p.read_bytes() for p in folder.iterdir()}
    try:
        OUTPUTS[output](folder, new)
    except ValueError as e:
        assert re.search("must hold no other weights|must be in a folder without an index", str(e))
        assert {p: p.read_bytes() for p in folder.iterdir()} == before
        assert there != output and {there, output} != {"convert", "file"}
        return
    try:
        found = eqq.io.open(folder)
    except ValueError as e:
        assert "Open one of them" in str(e) and before.items() <= {p: p.read_bytes() for p in folder.iterdir()}.items()
    else:
        assert {name: found[name].tolist() for name in found} == {name: x.tolist() for name, x in new.items()}
        assert not [p for p in folder.glob("model-*.safetensors") if there != "shards" and "shards" not in output]


def test_a_file_with_the_name_of_a_part_is_refused(tmp_path):
    tree = {"w": np.ones(2, np.float32)}
    with pytest.raises(ValueError, match="must be a file of all tensors. Got .*, which is the name of one of sever"):
        eqq.save(tmp_path / "model-00001-of-00002.safetensors", tree)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_in_numpy(bits):
    rng = np.random.default_rng(0)
    for length in (1, 7, 64, 127, 130, 512, 513, 640, 1500):
        codes = rng.integers(0, 2**bits, (2, length)).astype(np.uint8)
        out = np.empty((2, packed_length(length, bits)), np.uint8)
        pack_codes(codes, bits, out)
        np.testing.assert_array_equal(out, pack(jnp.asarray(codes), bits))
        dense = (codes[..., None] >> np.arange(bits) & 1).reshape(2, -1)  # the first code in the low bits
        packed = np.packbits(dense, axis=-1, bitorder="little")
        np.testing.assert_array_equal(unpack_low_first(packed, bits)[:, :length], codes)
        columns = np.empty_like(out)
        pack_columns(np.ascontiguousarray(codes.T), bits, columns)
        np.testing.assert_array_equal(columns, out)
        if length % 32 == 0:
            words, order = np.ascontiguousarray(packed.view(np.int32).T), rng.permutation(length)
            np.testing.assert_array_equal(unpack_columns(words, bits, order), codes.T[order])


def test_a_loaded_array_can_be_donated(tmp_path):
    eqq.save(tmp_path / "model.safetensors", {"w": np.arange(2**21, dtype=np.float32)})
    w = eqq.io.open(tmp_path / "model.safetensors")["w"]
    double = jax.jit(lambda x: 2 * x, donate_argnums=0)
    np.testing.assert_array_equal(double(w), 2 * np.arange(2**21, dtype=np.float32))
    # The file's memory is not the array's.
    np.testing.assert_array_equal(eqq.load(tmp_path / "model.safetensors")["w"], np.arange(2**21, dtype=np.float32))


# The page


@pytest.mark.long
def test_the_code_of_the_page_runs():
    page = (Path(__file__).parents[1] / "docs" / "files.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    names = {}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(compile(block.replace("512", "64"), "files.md", "exec"), names)
    assert names["step"] == 100 and names["w"].format == eqq.NF4() and len(blocks) == 10


# Shards


def test_shards(getkey, tmp_path):
    model = eqq.quantize_tree(deep_mlp(getkey()), "int8")
    folder = tmp_path / "model"
    for nbytes in (1, 1500, 10**9):
        eqq.save(folder, model, shard_nbytes=nbytes)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        names = {p.name for p in folder.iterdir() if p.suffix == ".safetensors"}
        assert set(index["weight_map"].values()) == names
        assert len(names) == {1: len(index["weight_map"]), 1500: 3, 10**9: 1}[nbytes]
        for where in (folder, folder / "model.safetensors.index.json"):
            assert_equal_trees(eqq.load(where, model), model)
    for shard in (0, -1, True):
        with pytest.raises(ValueError, match="`shard_nbytes` must be a number of at least 1"):
            eqq.save(folder, model, shard_nbytes=shard)


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "", "..", "a/b", 3, "gone.safetensors", "..\\x", "\ud800", "a\0b"]
)
def test_an_index_stays_in_its_folder(tmp_path, shard):
    eqq.save(tmp_path / "x.safetensors", {"w": jnp.ones(2)})
    folder = tmp_path / "model"
    eqq.save(folder, {"w": jnp.ones(2)}, shard_nbytes=100)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "weight_map": {"w": shard}}))
    with pytest.raises(ValueError, match=r"index.json (must name files of its own folder|lists the file)"):
        eqq.load(folder)
