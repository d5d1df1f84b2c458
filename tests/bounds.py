"""How far a product may be from float64, by counting roundings: `native/tests/bounds.h` derives what is used here.

A rounding to float32 changes a number by at most `UNIT` of it. If each term of a sum passes through `r` roundings, the
error is at most `r * UNIT` times the sum of the magnitudes of the terms. Where `x` is random with mean zero, an error
beyond `SURE * sqrt(r) * UNIT` times the root of the sum of squares has a probability of 2e-14.
"""

import numpy as np

from eqquant._formats.base import find_levels
from eqquant._formats.layout import make_layout
from eqquant._native import library as native


UNIT = 2.0**-24
SURE = 6
# For each term: the zero point is subtracted, the scale is multiplied by the scale of the row, the code or x by that, x
# by the code, and an offset is added. The dense weight, the reference of the comparison, was rounded as often.
PER_TERM = 10
PER_LANES = 8  # sums of lanes are added up, and what few vectors were summed apart


def _parts(count, part):
    """The roundings of a sum where `part` numbers are added one after the other, and then what they add up to."""
    return min(count, part) + -(-count // part)


def _roundings(implementation, layout, inner, transpose):
    """The roundings of a term of a product that adds up `inner` terms."""
    if implementation == "xla":  # adds in any order: at worst all terms one after the other
        return PER_TERM + inner + PER_LANES
    lanes = {"avx2": 8, "generic": 4, "neon": 4, "dotprod": 4}.get(native.isa(), 16)
    total = _parts(inner, 64) if transpose else max(-(-inner // lanes), _parts(inner, 512))
    if layout.offsets:
        per_block = max(-(-layout.block_size // 16) + 15, _parts(layout.block_size, 64))
        blocks = -(-layout.length // layout.block_size)
        total = max(total, _parts(inner, 64) if transpose else per_block + -(-blocks // 16) + 15) + 3
    return PER_TERM + total + PER_LANES


def _integer_error(implementation, layout, inner, transpose):
    """The root mean square error of kernels that take numbers as integers of 24 bits, relative to the largest terms."""
    has_slices = implementation == "cpu" and native.isa() in ("amx", "avx512vnni", "avx512vbmi")
    return 0.5 / 8355000 * (5 * inner / 3) ** 0.5 if has_slices and not transpose else 0.0


def _largest_value(q, layout):
    values = find_levels(q.format)[0]
    return np.abs(values[np.isfinite(values)]).max() + (2**layout.bits - 1) * layout.zero_points


def assert_within_bounds(product, y, x, q, implementation, *, transpose):
    """Asserts that `y` is `product(x, w)` for a dense `w`, which is `q` or `q.mT`, in float64.

    `product` must be linear in both operands, and add up products of their numbers.
    """
    dense, x = np.asarray(q.dequantize(), np.float64), np.asarray(x, np.float64)
    layout = make_layout(q.format, q.shape[-1])
    turn = (lambda w: w) if transpose else (lambda w: w.mT)
    by_block = lambda a: np.repeat(np.asarray(a, np.float64), layout.block_size, -1)[..., : layout.length]
    scale, largest, size = by_block(np.abs(q.scale)), _largest_value(q, layout), np.abs(dense)
    if layout.offsets:  # a product of their own
        size = largest * scale + by_block(np.abs(q.offset))
    inner = dense.shape[-2] if transpose else layout.length
    r = _roundings(implementation, layout, inner, transpose)
    expected, most = product(x, turn(dense)), product(np.abs(x), turn(size))
    squares = product(x * x, turn(size * size))
    bound = np.minimum(UNIT * r * most, SURE * UNIT * np.sqrt(r * squares))
    if integers := _integer_error(implementation, layout, inner, transpose):
        row_scale = np.broadcast_to(largest * scale.max(-1, keepdims=True), dense.shape) / inner
        amax = np.broadcast_to(np.abs(x).max(), x.shape)
        bound = bound + SURE * integers * product(amax, turn(row_scale))
    y = np.asarray(y, np.float64)
    assert y.shape == expected.shape
    worst = np.max(np.abs(y - expected) / (bound + 1e-30), initial=0)
    assert worst <= 1, f"an error is {worst:.3g} times its bound"
