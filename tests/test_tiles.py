"""Tiles: one scale for each block of rows and columns. `test_contract` holds them to every promise of an array."""

import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from safetensors.numpy import save_file

import eqquant as eqq

from .helpers import assert_close, assert_same, weights


TILES = eqq.FP8(block_size=(32, 64))


def spread(scale, shape, tile):
    rows = np.repeat(np.repeat(np.asarray(scale), tile[0], -2), tile[1], -1)
    return rows[..., : shape[-2], : shape[-1]]


def largest(w, tile):
    """The amax of each tile, of which the last may be shorter."""
    height, width = tile
    rows, columns = w.shape
    return np.array(
        [
            [np.abs(w[i : i + height, j : j + width]).max() for j in range(0, columns, width)]
            for i in range(0, rows, height)
        ]
    )


@pytest.mark.parametrize("shape", [(64, 128), (70, 130), (5, 7)])
def test_scales_of_amax(shape, getkey):
    w = weights(getkey(), shape)
    q = eqq.quantize(w, TILES)
    amax = largest(np.asarray(w), (32, 64))
    assert q.scale_bits.shape == amax.shape and q.codes.shape == shape
    np.testing.assert_array_equal(q.scale_bits.view(jnp.float32), amax / np.float32(448))
    np.testing.assert_array_equal(q.scale, np.repeat(q.scale_bits.view(jnp.float32), 32, 0)[: shape[0]])
    # As with these scales in each row.
    rows = eqq.quantize(w, eqq.FP8(block_size=64), scale=q.scale)
    np.testing.assert_array_equal(q.codes, rows.codes)
    assert_same(eqq.quantize(w, TILES, scale=q.scale_bits.view(jnp.float32)), q)


@pytest.mark.parametrize("format", [eqq.NVFP4((16, 16)), eqq.FP8(block_size=(16, 16))], ids=str)
def test_the_transpose_has_the_same_codes_and_scales(format, getkey):
    w = weights(getkey(), (40, 72))
    q, t = eqq.quantize(w, format), eqq.quantize(w.T, format)
    np.testing.assert_array_equal(eqq.unpack(t), eqq.unpack(q).T)
    np.testing.assert_array_equal(t.dequantize(), q.dequantize().T)
    floats = lambda q: np.asarray(q.scale_bits.dequantize() if format.bits == 4 else q.scale_bits)
    np.testing.assert_array_equal(floats(t), floats(q).T)
    x = weights(getkey(), (3, 40))
    np.testing.assert_allclose(x @ q, x @ t.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["mse", "hqq", "joint_mse", "learned", "gptq"])
def test_methods(method, getkey):
    """Every method keeps one scale for a tile, and its error is not larger."""
    w, x = weights(getkey(), (24, 64)), weights(getkey(), (200, 64))
    stats = eqq.calibrate.collect_stats({"w": w}, [x], apply=lambda m, x: x @ m["w"].T, gram=True)
    made = {"gptq": lambda: eqq.GPTQ(stats["w"]), "learned": lambda: eqq.LearnedRounding(stats["w"])}
    method = made.get(method, lambda: method)()
    format = eqq.Int4((8, 16))
    q = eqq.quantize(w, format, method=method)
    assert q.scale_bits.shape == (3, 4)
    own, plain = (jnp.sum((x @ (a.dequantize() - w).T) ** 2) for a in (q, eqq.quantize(w, format)))
    assert own < 1.05 * plain
    scale = spread(q.scale_bits.view(jnp.float32), w.shape, (8, 16))
    np.testing.assert_array_equal(q.dequantize(), (eqq.unpack(q).astype(jnp.float32) - 8) * scale)


def test_parts_of_an_array(getkey):
    """Whatever takes an array apart gives the values of the dense one; a stack keeps its tiles."""
    w = weights(getkey(), (3, 64, 128))
    q = eqq.quantize(w, TILES)
    dense = q.dequantize()
    for f in (
        lambda a: a[1],
        lambda a: a[1, 3:40, 5],
        lambda a: a[:, jnp.array([0, 63, 5])],
        lambda a: jnp.concatenate([a, a], 1),
        lambda a: jnp.concatenate([a, a], 2),
        lambda a: a[:2, ::2],
        lambda a: jnp.swapaxes(a, 0, 1),
        lambda a: a.reshape(192, 128),
        lambda a: a[None, :, None],
        lambda a: jnp.stack([a, a]),
        lambda a: jnp.flip(a, 1),
        lambda a: jnp.pad(a, ((0, 0), (0, 3), (0, 0))),
        lambda a: jnp.broadcast_to(a[:1], (4, 64, 128)),
    ):
        found = jax.jit(lambda a, f=f: eqq.dequantize(eqq.quaxify(f)(a)))(q)
        np.testing.assert_array_equal(found, f(dense))
        direct = f(q)
        np.testing.assert_array_equal(eqq.dequantize(direct), f(dense))
    assert eqq.quaxify(lambda a: a[1:])(q).format == TILES
    assert eqq.quaxify(lambda a: a[jnp.array([2, 0])])(q).format == TILES
    x = weights(getkey(), (9, 128))
    run = eqq.quaxify(lambda x, w: jax.lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), jnp.array([4, 0, 5])))
    assert_close(run(x, q), run(x, dense))
    taken = jax.jit(lambda n: eqq.take_layer(q, n) @ x[0])(jnp.int32(2))
    assert_close(taken, dense[2] @ x[0])
    with pytest.raises(ValueError, match="Tiles need two axes"):
        jtu.tree_map(lambda leaf: leaf[0], eqq.quantize(w[0], TILES)).dequantize()


def test_training(getkey):
    """Masters and simulation give the quantized masters, bit for bit."""
    model = eqx.nn.Linear(128, 64, key=getkey())
    x = weights(getkey(), (4, 128))
    loss = lambda model: jnp.mean(jax.vmap(model)(x) ** 2)
    q = eqq.quantize_tree(model, TILES)
    optim = eqq.float_masters(optax.sgd(0.1), masters=model)
    state = optim.init(q)

    @eqx.filter_jit
    def step(q, state):
        updates, state = optim.update(eqq.filter_grad(loss)(q), state, q)
        return eqq.apply_updates(q, updates), state

    after, state = step(q, state)
    assert_same(after.weight, eqq.quantize(state.masters.weight, TILES))
    assert (after.weight.codes != q.weight.codes).any()
    simulated = eqq.quantize_tree(model, TILES, simulate=True)
    assert_same(eqq.finalize(simulated).weight, q.weight)
    assert eqq.summary(q).leaves[0].format == TILES
    assert eqq.summary(q).leaves[0].nbytes == 64 * 128 + 4 * 4


def write_tiles(folder, codes, scale):
    folder.mkdir()
    tensors = {"l.weight": codes.view(jnp.float8_e4m3fn), "l.weight_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors")
    about = '{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}'
    (folder / "config.json").write_text(about)
    return eqq.io.open(folder)


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (2, 256, 128), (64, 128)])
def test_a_checkpoint_in_tiles(tmp_path, shape):
    """Scales take as many bytes as in the file, and are written as they were."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 120, shape).astype(np.uint8)
    scale = rng.random((*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))).astype(np.float32)
    q = write_tiles(tmp_path / "theirs", codes, scale)["l.weight"]
    assert q.format == eqq.FP8(block_size=(128, 128)) and q.nbytes == codes.nbytes + scale.nbytes
    expected = codes.view(jnp.float8_e4m3fn).astype(np.float32) * spread(scale, shape, (128, 128))
    np.testing.assert_array_equal(q.dequantize(), expected)
    eqq.save(tmp_path / "ours.safetensors", {"w": q})
    assert_same(eqq.load(tmp_path / "ours.safetensors")["w"], q)
    if len(shape) == 3:
        return
    eqq.io.write(tmp_path / "out", {"l.weight": q}, "compressed-tensors")
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : (start := 8 + int.from_bytes(raw[:8], "little"))])
    for part, values in (("", codes), ("_scale", scale)):
        first, last = header[f"l.weight{part}"]["data_offsets"]
        assert raw[start + first : start + last] == values.tobytes()
    assert_same(eqq.io.open(tmp_path / "out")["l.weight"], q)
    if shape[1] % 16:
        return
    # Libraries without tiles get the scales of rows, with the same values.
    tiled = eqq.quantize(jnp.asarray(expected), eqq.NVFP4((16, 16)))
    eqq.io.write(tmp_path / "rows", {"l.weight": tiled}, "compressed-tensors")
    rows = eqq.io.open(tmp_path / "rows")["l.weight"]
    assert rows.format == eqq.NVFP4()
    np.testing.assert_array_equal(rows.scale_bits.codes, jnp.repeat(tiled.scale_bits.codes, 16, 0)[: shape[0]])


@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_bad_scale_in_a_file(tmp_path, scale):
    checkpoint = write_tiles(tmp_path / "model", np.ones((256, 128), np.uint8), np.array([[1], [scale]], np.float32))
    with pytest.raises(ValueError, match=r"'l.weight': Got a scale that is not finite. Quantize it again from floats."):
        checkpoint["l.weight"]


def test_on_a_mesh(getkey):
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=jax.devices()[:4])
    q = eqq.quantize(weights(getkey(), (128, 256)), TILES)
    for spec in (P("a"), P(None, "b"), P("a", "b"), P(("a", "b"))):
        placed = q.with_sharding(NamedSharding(mesh, spec))
        assert placed.scale_bits.sharding.spec == placed.codes.sharding.spec
        np.testing.assert_array_equal(placed.dequantize(), q.dequantize())
        x = weights(getkey(), (3, 256))
        assert_close(jax.jit(lambda x, w: x @ w.T)(x, placed), x @ q.dequantize().T)
    with pytest.raises(ValueError, match=r"along axis 0, of length 96,.* tiles have 32 rows each.*Divide another axis"):
        eqq.quantize(weights(getkey(), (96, 256)), TILES).with_sharding(NamedSharding(mesh, P("a")))
    with pytest.raises(ValueError, match=r"^w, of shape \(64, 128\), .*'a' \(2\) and 'b' \(2\)"):
        eqq.tree_shardings({"w": eqq.quantize(weights(getkey(), (64, 128)), TILES)}, NamedSharding(mesh, P(("a", "b"))))


def test_bad_tiles(getkey):
    for size in ((0, 16), (16, 0), (16, 3), (True, 16)):
        with pytest.raises(ValueError, match=r"the rows and the columns of a tile, `\(128, 128\)`. Got"):
            eqq.Int4(size)
    with pytest.raises(ValueError, match=re.escape("`block_size` of NVFP4 must be 16 or (16, 16). Got 32.")):
        eqq.NVFP4(32)
    with pytest.raises(ValueError, match="along the quantized axis alone"):
        eqq.formats.Trellis(2, block_size=(128, 128))
    w = weights(getkey(), (64, 128))
    with pytest.raises(ValueError, match=r"`scale` must broadcast to \(2, 2\)"):
        eqq.quantize(w, TILES, scale=jnp.ones((64, 2)))
    refused = r"must have scales of their own for each row. Got FP8.*Take `block_size=64`"
    with pytest.raises(ValueError, match=f"`activations` {refused}"):
        eqq.quantize_tree({"w": w}, "int8", activations=TILES)
    with pytest.raises(ValueError, match=f"`keys` {refused}"):
        eqq.QuantizedCache.empty((1, 2, 64, 64), TILES)
    with pytest.raises(ValueError, match=f"`format` {refused}"):
        eqq.quantize_state(optax.adam(1e-3), TILES)
    with pytest.raises(ValueError, match="must be finite"):
        eqq.quantize(w.at[3, 3].set(jnp.nan), TILES)
    spoilt = jax.jit(lambda w: eqq.quantize(w, TILES).dequantize())(w.at[3, 3].set(jnp.nan))
    np.testing.assert_array_equal(np.isnan(spoilt), spread([[1, 0], [0, 0]], w.shape, (32, 64)) == 1)
