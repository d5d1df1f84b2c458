"""Fingerprints of weights: sums by which statistics recognize their weight."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from .statistics import InputsError, LeafStats


# The more sums, the better they tell how far two weights are apart: to within 1 / sqrt(2 SUMS) of the distance.
SUMS = 16
# A copy in bfloat16 is 0.2 % away and one in eight-bit floats 3 %; a rotated or smoothed weight is far away.
_FAR = 0.05


def fingerprint(x: Array | np.ndarray) -> np.ndarray | None:
    """Returns sums of the values of a weight, with random signs.

    `None` for a weight without values.

    Random signs keep lengths: the distance of two fingerprints is about the distance of the weights, times the square
    root of the number of sums. The signs are products of one for each axis, so that the sums are one product with few
    columns, and small ones.
    """
    if isinstance(x, jax.core.Tracer) or not jnp.issubdtype(x.dtype, jnp.floating):
        return None
    # JAX refuses some dtypes of NumPy's, and masked arrays.
    return np.asarray(_sum_with_signs(np.asarray(x, np.float32) if isinstance(x, np.ndarray) else x))


@jax.jit
def _sum_with_signs(x: Array) -> Float32[Array, " sums"]:
    sums = jnp.matmul(x.astype(jnp.float32), _signs(x.shape[-1], x.ndim), precision=jax.lax.Precision.HIGHEST)
    for axis in reversed(range(x.ndim - 1)):
        sums = jnp.einsum("...ns,ns->...s", sums, _signs(x.shape[axis], axis), precision=jax.lax.Precision.HIGHEST)
    return sums


def _signs(length: int, seed: int) -> Float32[Array, "length sums"]:
    """Returns signs that look random: bits of a hash of the index."""
    n = jnp.arange(length, dtype=jnp.uint32) + jnp.uint32((seed + 1) * 0x9E3779B9 % 2**32)
    for multiplier in (0x7FEB352D, 0x846CA68B):
        n = (n ^ (n >> 16)) * jnp.uint32(multiplier)
    bits = (n[:, None] >> (jnp.arange(SUMS, dtype=jnp.uint32)[None] + 16)) & 1
    return 1 - 2 * bits.astype(jnp.float32)


def check_same_weight(inputs: object, what: str, leaf: str, x: object) -> None:
    """Raises if the statistics `inputs` were collected with other values of the weight `x`.

    Errors call the statistics `what`.

    Statistics without a fingerprint pass: those made by hand, or after `without_fingerprints`. So do weights without
    values.
    """
    if not isinstance(inputs, LeafStats) or not isinstance(x, (jax.Array, np.ndarray)):
        return
    if tuple(inputs.shape) != x.shape or (known := inputs.fingerprint) is None or (found := fingerprint(x)) is None:
        return
    distance = np.linalg.norm(found - known) / max(np.linalg.norm(found), np.linalg.norm(known), 1e-30)
    if distance > _FAR:
        raise InputsError(
            f"{what} must be statistics of this model as it is now",
            f"statistics of other values of {leaf}, which has changed by about {min(distance, 1):.0%} since",
            "Collect them on this model, after `rotate`, `smooth` and training. If its inputs are as before, pass "
            "`stats.without_fingerprints()`.",
        )
