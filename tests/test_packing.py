"""Codes <-> bytes, and an axis <-> its blocks."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqquant._numerics import axes, blocks, packing, scale_bits


pack = jax.jit(packing.pack, static_argnums=1)  # one program for each shape
unpack = jax.jit(packing.unpack, static_argnums=(1, 2))


def reference(codes, bits):
    """The layout of the module's docstring, one code at a time."""
    parts = [width for width in (4, 2, 1) if bits & width]
    if len(parts) > 1:
        out, size = [], 64 * (8 // parts[-1])
        for start in range(0, len(codes), size):
            done = 0
            for width in parts:
                out += reference([c >> done & (2**width - 1) for c in codes[start : start + size]], width).tolist()
                done += width
        return np.array(out, np.uint8)
    planes = 8 // bits
    out = []
    for start in range(0, len(codes), 64 * planes):
        segment = codes[start : start + 64 * planes]
        plane = -(-len(segment) // planes)
        words = [0] * plane
        for n, code in enumerate(segment):
            words[n % plane] |= int(code) << (bits * (n // plane))
        out += words
    return np.array(out, np.uint8)


@pytest.mark.long
@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(bits=st.integers(1, 8), length=st.integers(0, 600), seed=st.integers(0, 99))
@hypothesis.example(bits=4, length=0, seed=0)
@hypothesis.example(bits=1, length=1, seed=0)
@hypothesis.example(bits=1, length=513, seed=0)
@hypothesis.example(bits=2, length=256, seed=0)
@hypothesis.example(bits=3, length=0, seed=0)
@hypothesis.example(bits=3, length=511, seed=0)
@hypothesis.example(bits=5, length=1030, seed=0)
@hypothesis.example(bits=6, length=512, seed=0)
def test_round_trip(bits, length, seed):
    codes = np.random.default_rng(seed).integers(0, 2**bits, (2, length)).astype(np.uint8)
    words = pack(codes, bits)
    assert words.dtype == jnp.uint8 and words.shape == (2, packing.packed_length(length, bits))
    np.testing.assert_array_equal(np.asarray(words[1]), reference(codes[1], bits) if bits < 8 else codes[1])
    np.testing.assert_array_equal(np.asarray(unpack(words, bits, length)), codes)


@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_length(bits):
    spare = 0 if bits in (1, 2, 4, 8) else 1 if bits != 7 else 2
    for length in range(600):
        least = int(np.ceil(length * bits / 8))
        assert least <= packing.packed_length(length, bits) <= least + spare
    assert packing.packed_length(512, bits) == 64 * bits


@pytest.mark.parametrize("bits", range(1, 8))
def test_planes_of_segments(bits):
    segment, planes = packing.segment_length(bits), packing.num_planes(bits)
    codes = np.random.default_rng(0).integers(0, 2**bits, (2, 3 * segment)).astype(np.uint8)
    packed = packing.pack(jnp.asarray(codes), bits).reshape(2, 3, -1, 2, 32)
    for plane in range(planes):
        plane_codes = np.asarray(packing.unpack_plane(packed, plane, bits)).reshape(2, 3, 64)
        np.testing.assert_array_equal(plane_codes, codes.reshape(2, 3, planes, 64)[:, :, plane])


def test_lengths_of_segments():
    """At multiples of these a row can be cut; bytes stand alone."""
    assert [packing.segment_length(bits) for bits in range(1, 9)] == [512, 256, 512, 128, 512, 256, 512, 1]


def test_layout_of_a_segment():
    codes = np.random.default_rng(0).integers(0, 16, 128).astype(np.uint8)
    words = np.asarray(packing.pack(jnp.asarray(codes), 4))
    for j in range(64):
        assert words[j] == codes[j] | codes[j + 64] << 4


def test_layout_of_a_shorter_last_segment():
    codes = jnp.array([1, 2, 3, 4, 5], jnp.uint8)
    assert packing.pack(codes, 4).tolist() == [1 | 4 << 4, 2 | 5 << 4, 3]
    assert packing.pack(codes & 1, 1).tolist() == [0b10101]


@pytest.mark.parametrize("block_size", [8, 16, None, "tensor"])
@pytest.mark.parametrize("shape", [(40,), (3, 32), (2, 3, 7), (2, 0), (0, 16)])
def test_blocks(block_size, shape):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1
    parts = blocks.split_blocks(jnp.asarray(x), block_size)
    assert parts  # also of no values
    if block_size == "tensor":
        (part,) = parts
        assert part.shape == (*shape[:-2], *[1] * len(shape[-2:-1]), 1, np.prod(shape[-2:]))
    else:
        # Every value once, in order, and never padding.
        flat = [np.asarray(part).reshape(*shape[:-1], -1) for part in parts if part.size > 0]
        np.testing.assert_array_equal(np.concatenate(flat, axis=-1) if flat else x, x)
        assert sum(part.shape[-2] for part in parts) == blocks.num_blocks(shape[-1], block_size)
        assert all(part.shape[-1] in (block_size or shape[-1], shape[-1] % (block_size or 1)) for part in parts)


@pytest.mark.parametrize("moved", [(-1,), (-2,), (-3, -1)])
def test_memory_order(moved):
    x = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    rows = axes.memory_order(jnp.asarray(x), moved)
    lengths = tuple(x.shape[axis] for axis in moved)
    expected = np.moveaxis(x, moved, range(-len(moved), 0))
    np.testing.assert_array_equal(np.asarray(rows), expected.reshape(*expected.shape[: -len(moved)], -1))
    np.testing.assert_array_equal(np.asarray(axes.logical_order(rows, moved, lengths)), x)
    assert axes.as_axis(moved) == (moved[0] if len(moved) == 1 else moved)
    assert axes.as_axes(axes.as_axis(moved)) == moved


@pytest.mark.parametrize("length, block_size", [(40, 8), (37, 8), (5, 8), (40, None), (40, "tensor"), (0, 8)])
def test_expand(length, block_size):
    count = blocks.num_blocks(length, block_size)
    values = jnp.arange(2.0 * count).reshape(2, count)
    expanded = blocks.expand(values, block_size, length)
    assert expanded.shape == (2, length)
    index = np.arange(length) // (block_size if isinstance(block_size, int) else max(length, 1))
    np.testing.assert_array_equal(np.asarray(expanded), np.asarray(values)[:, index])


def test_scale_rules_ignore_what_follows_the_end():
    x = jnp.array([[1.0, -4.0, 2.0, 3.0, -6.0]])
    whole, last = blocks.split_blocks(x, 4)
    assert [blocks.absmax(p).tolist() for p in (whole, last)] == [[[4.0]], [[6.0]]]
    assert [blocks.signed_absmax(p).tolist() for p in (whole, last)] == [[[-4.0]], [[-6.0]]]
    assert [blocks.absmean(p).tolist() for p in (whole, last)] == [[[2.5]], [[6.0]]]
    low, high = blocks.minmax(last)
    assert low.tolist() == [[-6.0]] and high.tolist() == [[0.0]]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "e8m0"])
def test_scales_are_stored_as_bits(dtype):
    scale = jnp.array([[0.5, 2.0, 1.0, 256.0]])
    bits = scale_bits.scale_to_bits(scale, dtype)
    assert bits.dtype == {"float32": jnp.uint32, "e8m0": jnp.uint8}.get(dtype, jnp.uint16)
    np.testing.assert_array_equal(np.asarray(scale_bits.bits_to_scale(bits, dtype)), np.asarray(scale))
    if dtype != "e8m0":
        rounded = scale_bits.round_scale(scale / 3, dtype)
        np.testing.assert_array_equal(np.asarray(rounded), np.asarray((scale / 3).astype(dtype), np.float32))


def test_float16_scales_do_not_vanish():
    scale = scale_bits.round_up_from_zero(jnp.array([2.0**-25, -(2.0**-26), 0.0, 2.0**-23, 1.0]), "float16")
    assert scale.tolist() == [2.0**-24, -(2.0**-24), 0.0, 2.0**-23, 1.0]


def test_float16_scales_saturate():
    bits = scale_bits.scale_to_bits(jnp.array([[1e9, -1e9]]), "float16")
    assert scale_bits.bits_to_scale(bits, "float16").tolist() == [[65504.0, -65504.0]]
