"""Formats whose codes index a table of real values: NF4, Dynamic8 and your own tables."""

import abc
import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from .._numerics.blocks import absmax, BlockSize, signed_absmax
from .._numerics.scale_bits import ScaleDtype
from .base import AbstractFormat, Blocks, check_stored_float, Scales, StoredFloat
from .floating import FP8


class AbstractCodebook(AbstractFormat):
    """Codes index `codebook`, a sorted table of values.

    The scale maps the largest magnitude of a block onto the largest of the table.
    """

    # Whether a value above zero takes at least the lowest level above zero.
    keeps_nonzero: ClassVar[bool] = False
    # Whether the value of largest magnitude takes the lowest level whatever its sign: the scale has the sign then.
    signed_scale: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def codebook(self) -> tuple[float, ...]:
        """The levels, sorted."""

    def choose_scale(self, blocks: Blocks) -> Scales:
        if self.signed_scale:
            return signed_absmax(blocks) / self.codebook[0]
        return absmax(blocks) / max(abs(self.codebook[0]), abs(self.codebook[-1]))

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        table = np.asarray(self.codebook, np.float32)
        # The nearest entry; a value on the midpoint takes the lower one, as bitsandbytes does.
        codes = _count_below(table[1:] / 2 + table[:-1] / 2, values)
        if self.keeps_nonzero:
            zero = int(np.searchsorted(table, 0.0))
            codes = jnp.where((values > 0) & (codes <= zero), jnp.uint8(zero + 1), codes)
        return codes

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return _lookup(np.asarray(self.codebook, np.float32), codes)


def _count_below(thresholds: np.ndarray, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """Returns how many of the sorted thresholds each value exceeds."""
    if len(thresholds) > 15:
        first, crowd = _bins(tuple(map(float, thresholds)))
        # The first bits of a float tell which thresholds it lies between, except for the few that share those bits.
        bits = jax.lax.bitcast_convert_type(values, jnp.uint32)
        count = jnp.asarray(first)[bits >> _BIN_SHIFT]
        padded = jnp.append(jnp.asarray(thresholds), jnp.float32(jnp.inf))
        more = lambda _, n: n + (values > padded[n]).astype(jnp.uint8)
        return jax.lax.fori_loop(0, crowd, more, count, unroll=crowd <= 4)
    # Unrolled: one fused pass of comparisons, where a binary search would gather.
    count = jnp.zeros(values.shape, jnp.uint8)
    for threshold in thresholds:
        count = count + (values > threshold).astype(jnp.uint8)
    return count


_BIN_SHIFT = 15  # bins of 8 bits of mantissa, an exponent and a sign


@ft.lru_cache
def _bins(thresholds: tuple[float, ...]) -> tuple[np.ndarray, int]:
    """Returns how many thresholds lie below each bin of floats, and the most within a bin.

    A bin holds the floats with the same first bits.
    """
    prefixes = np.arange(2 ** (32 - _BIN_SHIFT), dtype=np.uint32) << _BIN_SHIFT
    one_end, other_end = prefixes.view(np.float32), (prefixes | (2**_BIN_SHIFT - 1)).view(np.float32)
    below = lambda x: np.searchsorted(np.asarray(thresholds, np.float32), np.nan_to_num(x, nan=0.0), side="left")
    # `fmin` and `fmax` pick the infinite end of a bin whose other end is a NaN.
    first, last = below(np.fmin(one_end, other_end)), below(np.fmax(one_end, other_end))
    return first.astype(np.uint8), int((last - first).max())


def _lookup(table: np.ndarray, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return jnp.asarray(table).at[codes].get(mode="clip")


class NF4(AbstractCodebook):
    r"""4-bit NormalFloat: sixteen levels of equal probability, one of them zero.

    Weights are taken to be normally distributed.

    $s = \max|x|$ per block, and each value takes the nearest $s \cdot c_i$. Codes, scales and values match
    bitsandbytes bit for bit. `double_quant` also quantizes the scales, to eight bits in blocks of 256.

    !!! Example

        ```python
        q = eqq.quantize(w, eqq.NF4(double_quant=True))
        model = eqq.quantize_tree(model, "nf4")
        ```

    ??? cite

        [QLoRA: Efficient Finetuning of Quantized LLMs](https://arxiv.org/abs/2305.14314)

    **Arguments:**

    - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"`
        for one for each matrix.
    - `double_quant`: whether to quantize the scales too, which saves about 0.37 bits per weight at block size 64.
    - `scale_dtype`: the dtype of scales that are not quantized, `"float32"`, `"float16"` or `"bfloat16"`.
    """

    block_size: BlockSize = eqx.field(static=True, default=64)
    double_quant: bool = eqx.field(static=True, default=False)
    scale_dtype: StoredFloat = eqx.field(static=True, default="float32")  # pyright: ignore
    bits = 4

    def __check_init__(self) -> None:
        check_stored_float(self)
        if self.double_quant and self.scale_dtype != "float32":
            raise ValueError(
                "`scale_dtype` of NF4 must be float32 with `double_quant`, which stores scales in eight bits. Got "
                f"{self.scale_dtype!r}."
            )

    @property
    def codebook(self) -> tuple[float, ...]:
        return _NF4

    @property
    def scale_format(self) -> AbstractFormat | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # Scales are positive and may differ by orders of magnitude within a row, so they are floats without a sign:
        # the paper's signed 8-bit floats would waste a bit, and evenly spaced levels would round small scales to zero.
        return FP8("ue4m4", block_size=256) if self.double_quant else None


class Dynamic8(AbstractCodebook):
    r"""Eight-bit dynamic numbers, for optimizer state.

    Seven decades, each with twice the levels of the one below.

    The decade up to $10^{-k}$, for $k = 0 \ldots 6$, is cut into $2^{6-k}$ intervals. Their means, with either sign,
    are the levels, together with zero and one. $s = \max|x|$ per block.

    The unsigned form is for second moments: it cuts each decade into $2^{7-k}$ intervals, and its levels are squares.
    An optimizer divides by the square root, which must not be zero where the first moment is not. So a value above zero
    never becomes zero: it takes at least the lowest level. (The paper does not square its levels. An optimizer then
    divides by zero if gradients within a block differ by more than a factor of about 2000.)

    !!! Example

        ```python
        optim = eqq.quantize_state(optax.adam(1e-3), eqq.Dynamic8())
        ```

    ??? cite

        [8-bit Optimizers via Block-wise Quantization](https://arxiv.org/abs/2110.02861)

    **Arguments:**

    - `signed`: whether half of the levels are negative. If `False`, levels are squares, and negative values become
        zero.
    - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel, `"tensor"`
        for one for each matrix.
    """

    signed: bool = eqx.field(static=True, default=True)
    block_size: BlockSize = eqx.field(static=True, default=256)
    bits = 8

    @property
    def codebook(self) -> tuple[float, ...]:
        return _dynamic_codebook(self.signed)

    @property
    def keeps_nonzero(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.signed


@ft.cache
def _dynamic_codebook(signed: bool) -> tuple[float, ...]:
    levels = [0.0, 1.0]
    for decade in range(7):
        edges = 10.0 ** (decade - 6) * np.linspace(0.1, 1, 2**decade * (1 if signed else 2) + 1)
        means = (edges[1:] + edges[:-1]) / 2
        levels += [*means, *-means] if signed else [*means**2]
    return tuple(float(level) for level in np.sort(np.asarray(levels, np.float32)))


class Codebook(AbstractCodebook):
    """Your own table of 2 to 256 values. Codes take the fewest bits that can index it.

    !!! Example

        ```python
        powers_of_two = eqq.Codebook([-1, -0.5, -0.25, -0.125, 0, 0.125, 0.25, 0.5, 1])
        ```
    """

    values: tuple[float, ...] = eqx.field(static=True)
    block_size: BlockSize = eqx.field(static=True, default=64)
    scale_dtype: ScaleDtype = eqx.field(static=True, default="float32")

    def __init__(
        self,
        values: Sequence[float | int] | np.ndarray,
        block_size: BlockSize = 64,
        scale_dtype: StoredFloat = "float32",
    ) -> None:
        r"""**Arguments:**

        - `values`: the levels: two to 256 different finite numbers, in any order. Rounds them to float32.
        - `block_size`: how many values along the quantized axis share a scale; `None` for one scale per channel,
            `"tensor"` for one for each matrix.
        - `scale_dtype`: the dtype of stored scales, `"float32"`, `"float16"` or `"bfloat16"`.
        """
        with np.errstate(over="ignore"):
            table = np.unique(np.asarray(values).astype(np.float32))
        if not (2 <= len(table) <= 256 and len(table) == len(values) and np.isfinite(table).all()):
            raise ValueError(
                f"`values` must be 2 to 256 different finite numbers. Got {len(values)} of which {len(table)} differ."
            )
        self.values = tuple(table.tolist())
        self.block_size = block_size
        self.scale_dtype = scale_dtype  # pyright: ignore[reportIncompatibleVariableOverride]

    def __check_init__(self) -> None:
        check_stored_float(self)

    @property
    def codebook(self) -> tuple[float, ...]:
        return self.values

    @property
    def bits(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (len(self.codebook) - 1).bit_length()

    def __repr__(self) -> str:
        """One line, for tables and messages: a long table in part."""
        levels = [f"{value:.4g}" for value in self.values]
        levels = levels if len(levels) <= 8 else [*levels[:3], "...", levels[-1]]
        others = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)[1:]]
        shown = [f", {name}={value!r}" for name, value, default in others if value != default]
        return f"{type(self).__name__}([{', '.join(levels)}]{''.join(shown)})"


_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
