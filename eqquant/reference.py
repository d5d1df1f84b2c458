"""Reproduces figures of other systems, the reference values of the tests.

No module of the library uses it, and `import eqquant` does not load it: write `import eqquant.reference`.
"""

import math
from collections.abc import Iterator
from numbers import Integral
from typing import Literal, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, UInt8

from ._array.array import QuantizedArray
from ._formats.base import AbstractAffineFormat, AbstractFormat
from ._formats.integer import Int2, Int3, Int4, Int5, Int6, Int8
from ._numerics.blocks import absmax, BlockSize, divide, minmax
from ._numerics.integers import affine_scale, affine_zero_point, decode_integer, encode_integer, symmetric_scale
from ._numerics.packing import num_planes
from ._numerics.rounding import round_half_away
from .analysis._comparison import Benchmark, Comparison, run_benchmark
from .analysis._error import align_rows, list_levels, quantization_mse, Real, Values
from .analysis._outliers import outlier_impact as outlier_impact, OutlierImpact as OutlierImpact


# Integers of any width


def integer_format(
    bits: int,
    *,
    block_size: BlockSize = "tensor",
    symmetric: bool = True,
    rounding: Literal["half_even", "half_away"] = "half_even",
) -> AbstractFormat:
    r"""Returns an integer format of two to eight bits.

    Symmetric: $s = \max|x| / (2^{b-1} - 1)$. Affine: $s = (\max x - \min x) / (2^b - 1)$ over a range that includes
    zero. Returns [`eqquant.Int8`][] or a related class where one has these levels. In others, a code takes a byte if
    blocks of packed codes would not fill bytes.

    !!! Example

        ```python
        from eqquant.reference import integer_format

        q = eqq.quantize(w, integer_format(8, block_size=32, rounding="half_away"))
        eqq.analysis.compare_formats(w, [integer_format(bits) for bits in range(2, 9)])
        eqq.calibrate.MinMax(integer_format(7, symmetric=False)).update(x).result()
        ```

    **Arguments:**

    - `bits`: the width of a code, from 2 to 8.
    - `block_size`: the number of values that share a scale; `None` for per-channel, `"tensor"` for per-tensor.
    - `symmetric`: whether zero is always the middle code. Otherwise each block has a zero point.
    - `rounding`: how to round ties: `"half_even"`, as everywhere in JAX, or `"half_away"` from zero, as in C.

    **Returns:**

    A format.

    **Raises:**

    `ValueError` if `bits` is not an integer from 2 to 8, if `symmetric` is not a boolean, or if `rounding` is unknown.
    """
    if isinstance(bits, bool) or not isinstance(bits, Integral) or not 2 <= bits <= 8:
        raise ValueError(f"`bits` must be an integer from 2 to 8. Got {bits!r}. One bit has no zero: see `eqq.Binary`.")
    if not isinstance(symmetric, bool):
        raise ValueError(f"`symmetric` must be True or False. Got {symmetric!r}.")
    if rounding not in ("half_even", "half_away"):
        raise ValueError(f'`rounding` must be "half_even" or "half_away". Got {rounding!r}.')
    format_class = {8: Int8, 6: Int6, 5: Int5, 4: Int4, 3: Int3, 2: Int2}.get(int(bits))
    # Symmetric Int2 and Int3 use all levels, unlike the rule above.
    has_equal_levels = rounding == "half_even" and (bits > 3 or not symmetric)
    if format_class is not None and has_equal_levels and _fills_bytes(int(bits), block_size):
        return format_class(block_size=block_size, symmetric=symmetric)
    return _Integer(width=int(bits), block_size=block_size, symmetric=symmetric, rounding=rounding)


def _fills_bytes(bits: int, block_size: BlockSize) -> bool:
    return not isinstance(block_size, int) or block_size % num_planes(bits) == 0


class _Integer(AbstractAffineFormat):
    block_size: BlockSize = eqx.field(static=True)
    width: int = eqx.field(static=True)
    symmetric: bool = eqx.field(static=True)
    rounding: Literal["half_even", "half_away"] = eqx.field(static=True)

    @property
    def bits(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.width if _fills_bytes(self.width, self.block_size) else 8

    @property
    def has_zero_points(self) -> bool:
        return not self.symmetric

    def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        if self.symmetric:
            return symmetric_scale(absmax(blocks), self.width)
        return affine_scale(*minmax(blocks), self.width)

    def choose_zero_point(
        self, blocks: Float32[Array, "*batch blocks block"], scale: Float32[Array, "*batch blocks"]
    ) -> UInt8[Array, "*batch blocks"]:
        return affine_zero_point(minmax(blocks)[0], scale, self.width)

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        round = round_half_away if self.rounding == "half_away" else jnp.round
        return encode_integer(round(values), self.width, self.symmetric)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return decode_integer(codes, self.width, self.symmetric)

    def __repr__(self) -> str:
        block, rounding = f"block_size={self.block_size!r}", f"rounding={self.rounding!r}"
        return f"integer_format({self.width}, {block}, symmetric={self.symmetric}, {rounding})"


# Weights that are easy to generate in any language


def lcg_gaussian(size: int, mean: Real = 0.0, std: Real = 1.0, *, seed: int) -> Float[np.ndarray, " size"]:
    r"""Returns normally distributed values, reproducible in any language.

    They are equal up to the rounding of `log` and `cos`. The state starts at `seed` and follows $s \leftarrow
    (1103515245\, s + 12345) \bmod 2^{31}$, with $u = s / 2^{31}$. Two draws give a value: $\sqrt{-2 \ln u_1} \cos 2 \pi
    u_2$, in float32.

    !!! Example

        ```python
        w = eqquant.reference.lcg_gaussian(4096, seed=42)
        ```

    **Arguments:**

    - `size`: the number of values.
    - `mean`: their mean.
    - `std`: their standard deviation.
    - `seed`: the first state.

    **Returns:**

    A float32 array.
    """
    u = _uniform(seed, 2 * size)
    radius = np.sqrt(-2 * np.log(np.maximum(u[0::2], np.float32(1e-10))))
    return np.float32(mean) + np.float32(std) * (radius * np.cos(np.float32(2 * np.pi) * u[1::2]))


def lcg_uniform(size: int, low: Real = -1.0, high: Real = 1.0, *, seed: int) -> Float[np.ndarray, " size"]:
    """Returns uniform values from the generator of [`eqquant.reference.lcg_gaussian`][].

    !!! Example

        ```python
        w = eqquant.reference.lcg_uniform(4096, -2.0, 2.0, seed=43)
        ```

    **Arguments:**

    - `size`: the number of values.
    - `low`: the smallest value.
    - `high`: the largest value.
    - `seed`: the first state.

    **Returns:**

    A float32 array.
    """
    return np.float32(low) + _uniform(seed, size) * np.float32(high - low)


def lcg_outliers(size: int, rate: Real = 0.01, magnitude: Real = 10.0, *, seed: int) -> Float[np.ndarray, " size"]:
    """Returns values of [`eqquant.reference.lcg_gaussian`][], with some outliers.

    A second sequence, from `seed + 12345` on, gives the index and the sign of each outlier: plus if the state is even.

    !!! Example

        ```python
        w = eqquant.reference.lcg_outliers(4096, rate=0.01, seed=44)
        ```

    **Arguments:**

    - `size`: the number of values.
    - `rate`: the share of outliers.
    - `magnitude`: the magnitude of an outlier.
    - `seed`: the first state.

    **Returns:**

    A float32 array.
    """
    values, states = lcg_gaussian(size, seed=seed), _states(seed + 12345)
    for _ in range(int(size * rate)):
        index = next(states) % size
        values[index] = magnitude if next(states) % 2 == 0 else -magnitude
    return values


def lcg_channels(channels: int, size: int, spread: Real = 5.0, *, seed: int) -> Float[np.ndarray, "channels size"]:
    """Returns channels of growing spread, each seeded by a state of the sequence from `seed`.

    !!! Example

        ```python
        w = eqquant.reference.lcg_channels(16, 256, seed=45)  # (16, 256)
        ```

    **Arguments:**

    - `channels`: the number of channels.
    - `size`: their length.
    - `spread`: the range of the standard deviations, which grow evenly from 1 to almost `1 + spread`.
    - `seed`: the first state.

    **Returns:**

    A float32 array with a channel of [`eqquant.reference.lcg_gaussian`][] in each row.
    """
    seeds = _states(seed)
    return np.stack([lcg_gaussian(size, 0.0, 1 + c / channels * spread, seed=next(seeds)) for c in range(channels)])


def _states(seed: int) -> Iterator[int]:
    """Yields the states of a linear congruential generator."""
    while True:
        seed = (1103515245 * seed + 12345) % 2**31
        yield seed


def _uniform(seed: int, size: int) -> Float32[np.ndarray, " size"]:
    states = _states(seed)
    return np.array([next(states) for _ in range(size)]).astype(np.float32) / np.float32(2**31)


# The benchmark suite


def run_suite(size: int = 4096) -> Comparison:
    """Returns eleven benchmarks of symmetric integers, the same on every machine.

    Four and eight bits on normally distributed values; eight bits on uniform values, on values with outliers and on
    sixteen channels of growing spread; per tensor, per channel, and per group of 32. An array of `n` values has
    channels of about the length of its square root, and the last may be shorter. Ties round away from zero.

    !!! Example

        ```python
        report = eqquant.reference.run_suite(4096)
        report.best_by_sqnr.name, report["gaussian, 4 bits, group"].error.sqnr_db
        ```

    **Arguments:**

    - `size`: the number of values of each array.

    **Returns:**

    A report with a row for each benchmark, like the report of [`eqquant.analysis.compare_formats`][].

    **Raises:**

    `ValueError` for a size below 256.
    """
    if size < 256:
        raise ValueError(f"`size` must be at least 256, sixteen channels of sixteen values. Got {size}.")
    data = {
        "gaussian": lcg_gaussian(size, seed=42),
        "uniform": lcg_uniform(size, seed=43),
        "outliers": lcg_outliers(size, seed=44),
        "channels": lcg_channels(16, size // 16, seed=45).ravel(),
    }
    sizes: dict[str, BlockSize] = {"tensor": "tensor", "channel": size // math.isqrt(size), "group": 32}

    def row(name: str, bits: int, kind: str) -> Benchmark:
        format = integer_format(bits, block_size=sizes[kind], rounding="half_away")
        return run_benchmark(data[name], format, name=f"{name}, {bits} bits, {kind}", threshold=0.1)

    others = (
        ("uniform", "tensor"),
        *(("outliers", "tensor"), ("outliers", "group")),
        *(("channels", "tensor"), ("channels", "channel")),
    )
    gaussian = [row("gaussian", bits, kind) for bits in (4, 8) for kind in sizes]
    return Comparison((*gaussian, *(row(name, 8, kind) for name, kind in others)))


# Theory


def theoretical_sqnr(bits: int, signal: Literal["uniform", "sine"] = "uniform") -> float:
    r"""Returns the theoretical SQNR, in dB, of integers with exactly the range of the signal.

    Two formulas are common: $6.02\,b$ for uniformly distributed values, and $6.02\,b + 1.76$ for a sine, which spends
    more time near its peaks. Real weights have tails, and a lower ratio than both.

    !!! Example

        ```python
        eqquant.reference.theoretical_sqnr(8)  # 48.16 dB
        ```

    **Arguments:**

    - `bits`: the width of a code.
    - `signal`: `"uniform"` or `"sine"`.

    **Returns:**

    The ratio in decibels.

    **Raises:**

    `ValueError` if `bits` is below 1, or for an unknown `signal`.

    ??? cite

        [Spectra of Quantized Signals](https://doi.org/10.1002/j.1538-7305.1948.tb01340.x)
    """
    if isinstance(bits, bool) or not isinstance(bits, Integral) or bits < 1:
        raise ValueError(f"`bits` must be an integer, at least 1. Got {bits!r}.")
    if signal not in ("uniform", "sine"):
        raise ValueError(f'`signal` must be "uniform" or "sine". Got {signal!r}.')
    return 6.02 * bits + (1.76 if signal == "sine" else 0.0)


def theoretical_max_error(q: QuantizedArray) -> float:
    """Returns the largest possible rounding error: half the widest step, scaled.

    The bound holds for formats whose levels span the range of their block: Int8, Int4, NF4 and every affine format.
    Formats that clip, such as Int2, Ternary and Binary, may exceed it.

    !!! Example

        ```python
        bound = eqquant.reference.theoretical_max_error(eqq.quantize(w, "int8"))
        ```

    **Arguments:**

    - `q`: a quantized array.

    **Returns:**

    The bound, as an absolute error.
    """
    steps = np.diff(list_levels(q.format))
    return float(steps.max(initial=0) / 2 * np.abs(np.asarray(q.scale)).max(initial=0))


def accuracy_retention(before: Real, after: Real) -> float:
    """Returns the ratio of two errors or losses in percent: the smaller over the larger.

    100 means no change.

    !!! Example

        ```python
        eqquant.reference.accuracy_retention(0.5, 0.4)  # 80.0
        ```

    **Arguments:**

    - `before`: an error or a loss, not negative.
    - `after`: the same, after a change.

    **Returns:**

    A percentage from 0 to 100.

    **Raises:**

    `ValueError` if either is negative.
    """
    if not (before >= 0 and after >= 0):
        raise ValueError(f"`before` and `after` must not be negative. Got {before} and {after}. Give errors or losses.")
    largest = max(before, after)
    return 100.0 if largest == 0 else 100.0 * min(before, after) / largest


class ScaleSensitivity(NamedTuple):
    """How the error changes with the scales, from [`eqquant.reference.scale_sensitivity`][].

    - `mse`, `changed_mse`: the mean squared error before and after all scales change.
    - `sensitivity`: its relative change per change of the scales.
    """

    mse: float
    changed_mse: float
    sensitivity: float


def scale_sensitivity(x: Values, q: QuantizedArray, change: Real = 0.1) -> ScaleSensitivity:
    r"""Returns how the error changes if all scales are slightly too large or too small.

    With mean squared errors $e_0$ before and $e_1$ after, the sensitivity is $|e_1 - e_0| / (|\delta| e_0)$.

    !!! Example

        ```python
        eqquant.reference.scale_sensitivity(w, eqq.quantize(w, "int8"), 0.1).sensitivity
        ```

    **Arguments:**

    - `x`: the original values.
    - `q`: their quantized array, whose format and scales are used.
    - `change`: the share $\delta$ by which all scales change: above -1, and not zero.

    **Returns:**

    `mse`, `changed_mse` and `sensitivity`.

    **Raises:**

    `ValueError` if `change` is zero or not above -1, and as [`eqquant.analysis.analyze_error`][].
    """
    if not (-1 < change < math.inf) or change == 0:
        raise ValueError(f"`change` must be above -1 and not zero. Got {change}. It is a share: 0.1 for 10 % more.")
    before = quantization_mse(x, q)
    rows, scale, zero = align_rows(x, q)
    scale = scale * (1 + change)
    codes = q.format.encode(divide(rows, scale) + zero)
    after = quantization_mse(rows, ((q.format.decode(codes) - zero) * scale).astype(q.dtype))
    growth = abs(after - before) / abs(change)
    return ScaleSensitivity(before, after, growth / before if before > 0 else (math.inf if growth > 0 else 0.0))
