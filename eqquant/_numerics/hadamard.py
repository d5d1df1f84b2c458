"""Randomized Hadamard transforms: orthogonal, fast, with entries of equal magnitude.

Without a Hadamard matrix for a size, magnitudes are only about equal.

A transform of `K` values is the Kronecker product of small matrices, after random signs. With a power of two they are
Hadamard matrices of Sylvester. Another `K` has an odd divisor: together with a few powers of two that is the order of a
Hadamard matrix of Paley if there is one; otherwise each prime factor has a matrix of Hartley.
"""

import functools as ft
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


# The order of a factor: larger ones compute more, smaller ones pass over memory more often.
_RADIX = 16
# A dense factor of this order still costs little beside the product that follows.
_LARGEST_PALEY = 256


def rotate(x: Float[Array, "..."], axis: int, seed: int, *, back: bool = False) -> Float[Array, "..."]:
    """Multiplies `x` along an axis by the orthogonal matrix of a seed.

    With `back`, by its transpose.

    It is computed in float32, or in float64 for such an `x`, and rounded to the dtype of `x` at the end.
    """
    size = x.shape[axis]
    dtype = x.dtype if x.dtype.itemsize > 4 else jnp.float32
    y = jnp.moveaxis(x, axis, -1).astype(dtype)
    # The norm of all factors, applied once: entries of Hadamard matrices are then whole numbers.
    signs = jnp.asarray(random_signs(size, seed) / math.sqrt(size), dtype).reshape(*[1] * (x.ndim - 1), size)
    rows = y.shape[:-1]  # not merged, since a mesh may divide some
    y = y if back else y * signs
    for factor in factors(size):
        # The first of the remaining axes is multiplied, and becomes the last: after all factors they are in order.
        y = y.reshape(*rows, len(factor), size // len(factor))
        y = jnp.einsum(
            "...ab,ca->...bc", y, jnp.asarray(factor.T if back else factor, dtype), precision=jax.lax.Precision.HIGHEST
        )
    y = y.reshape(*rows, size)
    y = y * signs if back else y
    return jnp.moveaxis(y, -1, axis).astype(x.dtype)


def rotate_blocks(x: Float[Array, "*batch length"]) -> Float[Array, "*batch padded"]:
    """Multiplies each block of 16 values of the last axis by one orthogonal matrix.

    A shorter last one is padded with zeros. Products of two such arrays along that axis stay as they are, and an
    outlier becomes 16 values of its size over four.
    """
    *batch, length = x.shape
    padded = jnp.pad(x, [(0, 0)] * len(batch) + [(0, -length % _RADIX)])
    return rotate(padded.reshape(*batch, -(-length // _RADIX), _RADIX), -1, seed=0).reshape(padded.shape)


def random_signs(size: int, seed: int) -> np.ndarray:
    """Returns `size` random signs, the same for a seed on every machine and version."""
    # The bits of PCG64 are specified. The bits of `jax.random` depend on options, and NumPy's functions may change.
    bits = np.random.PCG64(seed).random_raw(-(-size // 64)).astype("<u8").view(np.uint8)
    return 1.0 - 2.0 * np.unpackbits(bits, count=size)


@ft.lru_cache(maxsize=32)
def factors(size: int) -> tuple[np.ndarray, ...]:
    """Returns matrices whose orders multiply to `size`.

    Each is orthogonal but for a factor, the root of its order.
    """
    powers = (size & -size).bit_length() - 1
    odd, found = size >> powers, []
    if odd > 1:
        for taken in range(2, powers + 1):
            if (matrix := _paley(odd << taken)) is not None:
                found, powers = [matrix], powers - taken
                break
        else:
            found = [_hartley(prime) for prime in _primes(odd)]
    while powers:
        taken = min(powers, _RADIX.bit_length() - 1)
        found.append(_sylvester(taken))
        powers -= taken
    return tuple(found)


def _sylvester(powers: int) -> np.ndarray:
    matrix = np.ones((1, 1))
    for _ in range(powers):
        matrix = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix


def _paley(order: int) -> np.ndarray | None:
    """Returns a Hadamard matrix, if one of Paley's two constructions over a prime gives one."""
    if order > _LARGEST_PALEY:
        return None
    if _is_prime(order - 1) and order % 4 == 0:
        cross = _jacobsthal(order - 1)
        border = np.ones(order - 1)
        skew = np.block([[np.zeros((1, 1)), border[None]], [-border[:, None], cross]])
        matrix = skew + np.eye(order)
    elif order % 4 == 0 and _is_prime(half := order // 2 - 1) and half % 4 == 1:
        border = np.ones(half)
        conference = np.block([[np.zeros((1, 1)), border[None]], [border[:, None], _jacobsthal(half)]])
        matrix = np.kron(conference, np.array([[1.0, 1.0], [1.0, -1.0]])) + np.kron(
            np.eye(half + 1), np.array([[1.0, -1.0], [-1.0, -1.0]])
        )
    else:
        return None
    return matrix


def _jacobsthal(prime: int) -> np.ndarray:
    """Returns the quadratic characters modulo a prime of row minus column.

    1 for a square, -1 for no square, 0 for zero.
    """
    squares = np.full(prime, -1.0)
    squares[np.arange(1, prime) ** 2 % prime] = 1
    squares[0] = 0
    index = np.arange(prime)
    return squares[(index[:, None] - index[None, :]) % prime]


def _hartley(size: int) -> np.ndarray:
    angles = 2 * np.pi * np.outer(np.arange(size), np.arange(size)) / size
    return np.cos(angles) + np.sin(angles)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _primes(n: int) -> list[int]:
    found, d = [], 2
    while n > 1:
        while n % d == 0:
            found.append(d)
            n //= d
        d = d + 1 if d * d <= n else n
    return found
