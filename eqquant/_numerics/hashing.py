"""Random numbers by a hash of two multiplications, for rounding.

There speed counts, and statistics hardly do.

JAX's own generator, Threefry, takes longer than the rest of rounding together.
"""

import math
from collections.abc import Sequence

import jax
import jax.extend.random
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray, UInt, UInt32


# Odd numbers, whose multiples modulo 2**32 are all different; the first is 2**32 over the golden ratio.
_STEP, _FIRST, _SECOND = np.uint32(0x9E3779B9), np.uint32(0x21F0AAAD), np.uint32(0x735A2D97)


def make_hash_key(seed: UInt32[Array, ""]) -> PRNGKeyArray:
    """Returns a key for `jax.random` whose numbers are a hash of `seed` and of their place."""
    return jr.key(seed, impl=_IMPLEMENTATION)


def _mix(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    # Constants of C. Wellons' `hash-prospector`: each bit of the input flips each bit of the output half of the time.
    x = (x ^ (x >> np.uint32(16))) * _FIRST
    x = (x ^ (x >> np.uint32(15))) * _SECOND
    return x ^ (x >> np.uint32(15))


def hash_values(x: Float[Array, "m k"]) -> UInt32[Array, ""]:
    """Returns a hash of the values of a matrix, each with its place.

    The transpose has another hash.

    The sum is one of integers, so it does not depend on the order, nor on how devices divide `x`.
    """
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) for axis in (0, 1))
    return jnp.sum(_mix(bits + row * _STEP + column * _SECOND), dtype=jnp.uint32)


def _make_key(seed: Array) -> UInt32[Array, "1"]:
    return _mix(seed.astype(jnp.uint32) + _STEP).reshape(1)


def _hash_counters(key: UInt32[Array, "1"], count: int) -> UInt32[Array, " count"]:
    return _mix(jnp.arange(count, dtype=jnp.uint32) * _STEP + key)


def _split(key: UInt32[Array, "1"], shape: Sequence[int]) -> UInt32[Array, "*shape 1"]:
    return _hash_counters(_mix(~key), math.prod(shape)).reshape(*shape, 1)


def _fold_in(key: UInt32[Array, "1"], data: Array | int) -> UInt32[Array, "1"]:
    return _mix(key ^ _mix(jnp.asarray(data).astype(jnp.uint32) + _STEP))


def _random_bits(key: UInt32[Array, "1"], bit_width: int, shape: Sequence[int]) -> UInt[Array, "*shape"]:
    dtype = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}[bit_width]
    return (_hash_counters(key, math.prod(shape)) >> np.uint32(32 - bit_width)).astype(dtype).reshape(*shape)


_IMPLEMENTATION = jax.extend.random.define_prng_impl(
    key_shape=(1,),
    seed=_make_key,
    split=_split,
    random_bits=_random_bits,
    fold_in=_fold_in,
    name="eqquant_hash",
    tag="eqh",
)
