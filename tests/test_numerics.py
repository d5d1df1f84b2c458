"""The numerics that formats share, and the layouts of formats, where results are known."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._formats import base
from eqquant._formats.base import find_levels, is_ours, spans_rows
from eqquant._formats.layout import make_layout
from eqquant._formats.names import as_format
from eqquant._formats.steps import find_steps
from eqquant._native.encoding import float_order, order_to_float
from eqquant._numerics import batching, blocks, integers, minifloats, primitives, reduce, rounding, scale_bits


X = np.array([[1, -4, 4, 2], [0, -0.5, 0, 0.25], [-1, -2, -3, -3], [0, 0, 0, 0]], np.float32)
REDUCED = {
    "amax": [4, 0.5, 3, 0],
    "signed_amax": [-4, -0.5, -3, 0],
    "low": [-4, -0.5, -3, 0],
    "high": [4, 0.25, 0, 0],
    "not_finite": [0, 0, 0, 0],
}


@jax.jit
def reduce_all(x):
    return {kind: (reduce.reduce_blocks(x, kind), reduce.by_xla(x, kind=kind)[..., 0]) for kind in REDUCED}


def test_reductions():
    for kind, results in reduce_all(X).items():
        assert [y.tolist() for y in results] == [REDUCED[kind]] * 2
    for results in reduce_all(X[:, :0]).values():
        assert [y.tolist() for y in results] == [[0, 0, 0, 0]] * 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("length", [4, 2**16 + 1])
def test_reductions_know_what_is_not_finite(bad, length):
    x = np.zeros((3, length), np.float32)
    x[1, -2], x[2, 0] = bad, 3e38
    for kind in ("amax", "not_finite"):
        y = np.asarray(reduce.by_xla(jnp.asarray(x), kind=kind))[:, 0]
        assert np.isnan(y).tolist() == [False, True, False]
        assert y[[0, 2]].tolist() == ([0, np.float32(3e38)] if kind == "amax" else [0, 0])


def test_reductions_under_transformations():
    stacked = jnp.asarray(np.stack([X, 2 * X], axis=1))
    assert jax.vmap(blocks.absmax, in_axes=1)(stacked).tolist() == [REDUCED["amax"], [8, 1, 6, 0]]
    x = jnp.asarray(X)
    high, tangent = jax.jvp(lambda x: blocks.minmax(x)[1], (x[:2],), (x[:2] + 10,))
    assert high.tolist() == [4, 0.25] and tangent.tolist() == [14, 10.25]
    scaled = lambda y: jnp.sum(y * blocks.absmax(jax.lax.stop_gradient(y * x[:1])))
    assert jax.jit(jax.grad(scaled))(2.0) == 8
    with jax.disable_jit():
        assert blocks.absmax(x).tolist() == REDUCED["amax"]


def test_ends_and_means():
    x = jnp.asarray(X)
    assert [y.tolist() for y in blocks.ends(x)] == [[-4, -0.5, -3, 0], [4, 0.25, -1, 0]]
    assert [y.tolist() for y in blocks.ends(x[:, :0])] == [[0] * 4] * 2
    assert blocks.absmean(x).tolist() == [2.75, 0.1875, 2.25, 0] and blocks.absmean(x[:, :0]).tolist() == [0] * 4
    assert float(blocks.absmean(jnp.full((1, 4), 3e38))[0]) == np.float32(3e38)


def test_blocks_of_parameters():
    values, scale = jnp.array([[1.0, 2, 3, 4, 5]]), jnp.array([[2.0, 3, -1]])
    zero, offset = jnp.array([[1, 0, 2]], jnp.uint8), jnp.array([[0.5, -1, 0]])
    for with_zero, with_offset, expected in (
        (zero, offset, [0.5, 2.5, 8, 11, -3]),
        (None, offset, [2.5, 4.5, 8, 11, -5]),
        (zero, None, [0, 2, 9, 12, -3]),
    ):
        assert blocks.dequantize_blocks(values, scale, with_zero, with_offset, 2).tolist() == [expected]
    assert blocks.dequantize_values(values, None, None, None) is values
    assert blocks.divide(jnp.array([6.0, 6, 0]), jnp.array([-2.0, 0, 0])).tolist() == [-3, 0, 0]
    assert (blocks.num_blocks(5, 2), blocks.num_blocks(5, None), blocks.num_blocks(5, "tensor")) == (3, 1, 1)


@pytest.mark.parametrize("chunk", [None, 7, 3])
def test_functions_of_chunks_of_rows(chunk):
    """The last chunk overlaps the one before."""
    x, other = jnp.arange(14.0).reshape(1, 7, 2), {"y": jnp.arange(7.0).reshape(1, 7, 1)}
    rows = set()

    def function(first, x, other):
        rows.add(x.size // 2)
        flat = x.reshape(-1, 2)
        y = 100 * (first + jnp.arange(len(flat))).astype(x.dtype)[:, None] + flat + other["y"].reshape(-1, 1)
        return y.reshape(x.shape), x.astype(jnp.int32)

    y, same = batching.map_chunks(function, chunk, x, other)
    assert y.tolist() == (x + 101 * other["y"]).tolist() and same.tolist() == x.tolist() and rows == {chunk or 7}


def test_axes_of_batches():
    a, b = jnp.arange(6.0).reshape(2, 3), jnp.arange(3.0)
    assert batching.vmap_leading(lambda x, y: x + y.sum(), 2)(a, a[..., None]).tolist() == (2 * a).tolist()
    assert batching.vmap_leading(lambda x: x.shape, 0)(a) == (2, 3)
    assert primitives.batch_axis_size((b, a), (None, 1)) == 3 and primitives.batch_axis_size((a,), (0,)) == 2
    assert primitives.move_batch_axis(a, 1, 3).tolist() == a.T.tolist()
    assert primitives.move_batch_axis(a[None], 2, 3, to=1).shape == (1, 3, 2)
    assert primitives.move_batch_axis(b, None, 2).tolist() == [b.tolist()] * 2
    assert primitives.move_batch_axis(a, None, 4, to=-1).shape == (2, 3, 4)


# Scales


def test_bits_of_scales():
    tiny, most = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    scale = jnp.array([np.nan, np.inf, -np.inf, 1 / 3, most])
    for dtype, limit in (("float32", most), ("float16", 65504), ("bfloat16", float(jnp.finfo("bfloat16").max))):
        expected = np.array([np.nan, limit, -limit, jnp.asarray(1 / 3, dtype), limit], np.float32)
        stored = scale_bits.bits_to_scale(scale_bits.scale_to_bits(scale, dtype), dtype)
        np.testing.assert_array_equal(np.asarray(stored), expected)
        if dtype != "float32":
            np.testing.assert_array_equal(np.asarray(scale_bits.round_scale(scale, dtype)), expected)
        small = jnp.array([tiny, -tiny, 0, 1]) * (2.0**102 if dtype == "float16" else 1)
        assert scale_bits.round_up_from_zero(small, dtype).tolist() == small.tolist()
    up = scale_bits.round_up_from_zero(jnp.array([2.0**-30, -(2.0**-25), 0]), "float16")
    assert up.tolist() == [2.0**-24, -(2.0**-24), 0]
    assert scale_bits.round_up_from_zero(jnp.array([2.0**-120]), "e8m0").tolist() == [2.0**-120]
    assert scale_bits.scale_to_bits(jnp.array([2.0, 0]), "e8m0").tolist() == [128, 0]


def test_powers_of_two():
    exponents = np.array([-126, -1, 0, 1, 127])
    powers = np.exp2(exponents).astype(np.float32)
    assert minifloats.floor_log2(jnp.asarray(np.append(powers, powers * np.float32(1.9)))).tolist() == [*exponents] * 2
    assert minifloats.exp2(jnp.asarray(exponents)).tolist() == powers.tolist()
    assert float(minifloats.decode_e8m0(jnp.array([0], jnp.uint8))[0]) in (0, 2.0**-127)  # which may be flushed
    assert [m.max_exponent for m in (minifloats.E4M3, minifloats.E5M2, minifloats.E2M1)] == [8, 15, 2]


def test_quotients_are_rounded_as_in_c():
    x = np.arange(1, 2000, dtype=np.float32)
    y = jax.jit(rounding.divide_as_c, static_argnums=1)(x, 63)
    np.testing.assert_array_equal(np.asarray(y), x / np.float32(63))
    assert np.isnan(np.asarray(rounding.divide_as_c(jnp.array([np.inf]), 3))).all()


def test_scales_of_integers():
    assert float(integers.symmetric_scale(jnp.float32(7), 4)) == 1
    assert float(integers.affine_scale(jnp.float32(-5), jnp.float32(10), 4)) == 1
    assert np.isfinite(float(integers.affine_scale(jnp.float32(-3e38), jnp.float32(3e38), 2)))


# Rules of formats


SIDES, ABOVE = [-3.0, 1.0, 0.5, 6.0], [1.0, 2.0, 6.0, 3.0]


@pytest.mark.parametrize(
    "name, sides, above, first, last, nested",
    [
        # The scale and the offset of either block, the values of both ends, the bits and the block size of scales.
        ("q4_0", (6 / -8, None), (6 / -8, None), -8, 7, None),
        ("q5_0", (6 / -16, None), (6 / -16, None), -16, 15, None),
        ("q8_0", (6 / 127, None), (6 / 127, None), -128, 127, None),
        ("q4_1", (9 / 15, -3), (5 / 15, 1), 0, 15, None),
        ("q5_1", (9 / 31, -3), (5 / 31, 1), 0, 31, None),
        ("tq2_0", (6, None), (6, None), -1, 1, None),
        ("q1_0", (2.625, None), (3, None), -1, 1, None),
        ("q2_0", (6, None), (6, None), -1, 2, None),
        ("q2_k", (9 / 3, -3), (6 / 3, 0), 0, 3, (4, 16)),
        ("q3_k", (6 / -4, None), (6 / -4, None), -4, 3, (6, 16)),
        ("q4_k", (9 / 15, -3), (6 / 15, 0), 0, 15, (6, 8)),
        ("q5_k", (9 / 31, -3), (6 / 31, 0), 0, 31, (6, 8)),
        ("q6_k", (6 / -32, None), (6 / -32, None), -32, 31, (8, 16)),
        ("iq4_nl", (6 / -127, None), (6 / -127, None), -127, 113, None),
        ("iq4_xs", (6 / -127, None), (6 / -127, None), -127, 113, (6, 8)),
        ("ternary", (2.625, None), (3, None), -1, 1, None),
        ("binary", (2.625, None), (3, None), -1, 1, None),
        ("nvfp4", (1, None), (1, None), -6, 6, (8, "tensor")),
        ("dynamic8", (6, None), (6, None), np.float32(-0.99296875), 1, None),
    ],
)
def test_rules_of_formats(name, sides, above, first, last, nested):
    format = as_format(name)
    for block, (scale, offset) in ((SIDES, sides), (ABOVE, above)):
        found = format.choose_scale(jnp.array([block]))
        np.testing.assert_allclose(np.asarray(found), [scale], rtol=2e-7)
        if offset is not None:
            assert format.choose_offset(jnp.array([block]), found).tolist() == [offset]
    ends = format.decode(format.encode(jnp.array([-1e30, 1e30])))
    np.testing.assert_allclose(np.asarray(ends), [first, last], rtol=1e-6)
    levels, used = find_levels(format)
    codes = np.flatnonzero(used & np.isfinite(levels)).astype(np.uint8)
    np.testing.assert_array_equal(np.asarray(format.encode(jnp.asarray(levels[codes]))), codes)
    scales = format.scale_format
    assert nested == (None if scales is None else (scales.bits, scales.block_size))


def test_ranges_that_overflow():
    ends = jnp.array([[-3e38, 3e38]])
    for name in ("q4_1", "q4_k", "mlx", "int4"):
        assert np.isfinite(np.asarray(as_format(name).choose_scale(ends))).all()


def test_scales_of_scales_do_not_vanish():
    scales = eqq.formats.Q4_K().scale_format
    assert scales.choose_scale(jnp.array([[1e-9, 2e-9], [-63.0, 3], [0, 0]])).tolist() == [2.0**-24, -1, 0]
    assert scales.encode(jnp.array([-1.0, 0.6, 62.4, 64])).tolist() == [0, 1, 62, 63]
    assert scales.decode(jnp.array([0, 63], jnp.uint8)).tolist() == [0, 63]


def test_ties_of_formats():
    x = jnp.array([-1.5, -0.5, 0.5, 1.5, 2.5])
    for name, expected in (
        ("q4_0", [-1, 0, 1, 2, 3]),
        ("q8_0", [-2, -1, 1, 2, 3]),
        ("q4_1", [0, 0, 1, 2, 3]),
        ("mlx", [0, 0, 0, 2, 2]),
        ("int4", [-2, 0, 0, 2, 2]),
        ("ternary", [-1, 0, 0, 1, 1]),
        ("tq2_0", [-1, -1, 1, 1, 1]),
        ("q2_0", [-1, -1, 1, 2, 2]),
    ):
        format = as_format(name)
        assert format.decode(format.encode(x)).tolist() == expected


# Layouts


class _DoubledFP8(eqq.FP8):
    def decode(self, codes):
        return 2 * eqq.FP8.decode(self, codes)


class _Nested(eqq.NF4):
    @property
    def scale_format(self):
        return _DoubledFP8("e4m3")


@pytest.mark.parametrize(
    "format, length, expected",
    [
        (eqq.NF4(), 100, (4, 64, "float32", False, False, None)),
        (eqq.NF4(), 40, (4, 40, "float32", False, False, None)),
        (eqq.NF4(None, scale_dtype="float16"), 100, (4, 100, "float16", False, False, None)),
        (eqq.Int8("tensor"), 0, (8, 1, "float32", False, False, None)),
        (eqq.Int4(32, symmetric=False, scale_dtype="bfloat16"), 64, (4, 32, "bfloat16", True, False, None)),
        (eqq.NF4(double_quant=True), 64 * 256, (4, 64, "ue4m4", False, False, None)),
        (eqq.NF4(double_quant=True), 64 * 257, (4, 64, "float32", False, False, (8, 256))),
        (eqq.NVFP4(), 64, (4, 16, "e4m3", False, False, None)),
        (_Nested(), 128, (4, 64, "float32", False, False, (8, 2))),
        (eqq.MXFP4(), 64, (4, 32, "e8m0", False, False, None)),
        (eqq.formats.MLX(3, 32), 64, (3, 32, "float16", False, True, None)),
        (eqq.formats.Q6_K(), 512, (6, 16, "float32", False, False, (8, 16))),
        (eqq.formats.Trellis(2), 256, (8, 256, "bfloat16", False, False, None)),
    ],
    ids=repr,
)
def test_layouts(format, length, expected):
    layout = make_layout(format, length)
    nested = None if layout.nested is None else (layout.nested.bits, layout.nested.block_size)
    found = (layout.bits, layout.block_size, layout.scale, layout.zero_points, layout.offsets, nested)
    assert found == expected and layout.length == length
    decoded = make_layout(format, length, True)
    assert decoded.nested is None and decoded.scale == (format.scale_dtype if expected[5] is None else "float32")
    assert (layout.codec is not None) == isinstance(format, eqq.formats.Trellis)
    if layout.codec is None:
        np.testing.assert_array_equal(
            np.float32(layout.table), format.decode(jnp.arange(2**format.bits, dtype="uint8"))
        )
    else:
        assert layout.table == tuple(range(-123, 133))


class _Own(eqq.Int4):
    def encode(self, values):
        return eqq.Int4.encode(self, values)


def test_what_formats_are():
    assert is_ours(eqq.Int4(), "encode", "decode") and not is_ours(_Own(), "encode") and is_ours(_Own(), "decode")
    assert is_ours(eqq.Int4(), "no_such_method")
    spanning = [eqq.Int4("tensor"), eqq.NVFP4()], [eqq.Int4(), eqq.Int4(None), eqq.NF4(double_quant=True)]
    assert [[spans_rows(format) for format in side] for side in spanning] == [[True] * 2, [False] * 3]
    single = [eqq.Int8(), eqq.Int4("tensor")], [eqq.Int4(), eqq.NVFP4(), eqq.NF4(None, double_quant=True)]
    assert [[base.has_one_scale(format) for format in side] for side in single] == [[True] * 2, [False] * 3]
    levels, used = find_levels(eqq.Ternary())
    assert levels.tolist() == [-1, 0, 1, 2] and used.tolist() == [True, True, True, False]
    assert find_levels(eqq.FP8())[1].sum() == 254


@pytest.mark.parametrize(
    "format, rule, bias",
    [
        (eqq.Int3(), "even", 4),
        (eqq.Int2(symmetric=False), "even", 0),
        (eqq.formats.Q4_0(), "up", 8.5),
        (eqq.Ternary(), "steps", 0),
        (eqq.Binary(), "steps", 0),
        (eqq.NF4(), "steps", 0),
    ],
    ids=repr,
)
def test_steps_of_codes(format, rule, bias):
    steps = find_steps(format)
    assert (steps.rule, steps.bias) == (rule, bias)
    around = order_to_float((steps.thresholds[:, None] + np.arange(-1, 2, dtype=np.int32)).ravel())
    x = np.concatenate([around, np.random.default_rng(0).normal(size=200).astype(np.float32) * 8, [-1e30, 1e30]])
    codes = steps.codes[np.searchsorted(steps.thresholds, float_order(x.astype(np.float32)), "right")]
    np.testing.assert_array_equal(codes, np.asarray(format.encode(jnp.asarray(x, jnp.float32))))
    assert steps.nan == int(format.encode(jnp.array([np.nan]))[0])


def test_formats_without_steps():
    assert find_steps(_Own()) is None and find_steps(_Pairs()) is None


class _Pairs(base.AbstractVectorFormat):
    """A byte is two bits, minus and plus one."""

    block_size: int | None = eqx.field(static=True, default=None)
    bits = 4
    segment = 2
    levels = (-1.0, 1.0)
    codec = None

    def choose_scale(self, blocks):
        return blocks.max(axis=-1)

    def packed_length(self, length):
        return -(-length // 2)

    def decode_row(self, packed, length):
        signs = jnp.stack([packed & 1, packed >> 1], axis=-1).reshape(*packed.shape[:-1], -1)
        return signs[..., :length].astype(jnp.float32) * 2 - 1

    def encode_row(self, values, weights=None):
        signs = (values > 0).astype(jnp.uint8)
        return signs[..., ::2] | signs[..., 1::2] << 1


def test_formats_of_vectors():
    format, x = _Pairs(), jnp.array([[0.5, -2, 3, 4], [-1, -1, -1, 1]])
    codes = format.encode_row(x)
    assert base.round_to_levels(format, x).tolist() == [[1, -1, 1, 1], [-1, -1, -1, 1]]
    assert base.decode_packed(format, codes, 3).tolist() == [[1, -1, 1], [-1, -1, -1]]
    assert base.pack_codes(format, codes) is codes
    assert (base.packed_length(format, 5), base.segment_length(format)) == (3, 2)
    assert (base.packed_length(eqq.Int4(), 5), base.segment_length(eqq.Int4())) == (3, 128)
    assert [y.tolist() for y in find_levels(format)] == [[-1, 1], [True, True]]
    assert make_layout(format, 4).table == ()
    for use, values in ((format.encode, x), (format.decode, codes)):
        with pytest.raises(ValueError, match=r"^`format` must have a code for each value.*Got _Pairs"):
            use(values)
    with pytest.raises(ValueError, match=r"^layer: `format` must"):
        format.refuse("layer")


def test_long_codebooks_are_shown_in_part():
    assert repr(eqq.Codebook(range(8), 32)) == "Codebook([0, 1, 2, 3, 4, 5, 6, 7], block_size=32)"
    assert repr(eqq.Codebook(range(9), scale_dtype="float16")) == "Codebook([0, 1, 2, ..., 8], scale_dtype='float16')"


def test_dynamic_levels():
    signed, unsigned = eqq.Dynamic8().codebook, eqq.Dynamic8(False).codebook
    assert len(set(signed)) == len(set(unsigned)) == 256
    np.testing.assert_allclose(signed[126:130], [-5.5e-7, 0, 5.5e-7, 3.25e-6], rtol=1e-6)
    np.testing.assert_allclose(unsigned[:4], np.square([0, 3.25e-7, 7.75e-7, 2.125e-6]), rtol=1e-6)
    assert eqq.Dynamic8(False).encode(jnp.array([-1, 0, 1e-30])).tolist() == [0, 0, 1]


def test_names_with_bits():
    assert as_format("trellis2") == eqq.formats.Trellis(2) and as_format("mlx3") == eqq.formats.MLX(3)
    with pytest.raises(ValueError, match=r"Construct it: `Trellis\(...\)`, or name its bits: 'trellis2'"):
        as_format("trellis")
    for name in ("int42", "nf44"):
        with pytest.raises(ValueError, match="`argument` must be one of"):
            as_format(name, "argument")
