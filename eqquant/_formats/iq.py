"""The `IQ` types of GGUF of one to three bits, whose codes stand for eight or four values.

See https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c.

A code is the index of a vector in a codebook, which ggml calls a grid (`grids.py`), with a sign for each value, or one
shift for all. Values are small integers; scales are odd multiples of a float16 that 256 values share. All dequantize to
the values of ggml, bit for bit.
"""

import abc
import itertools as it
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt8

from .._native.weight import Codec
from .._numerics import packing
from .._numerics.blocks import absmax, absmean, BlockSize
from .._numerics.scale_bits import round_up_from_zero, ScaleDtype
from . import grids
from .base import AbstractFormat, AbstractVectorFormat, Blocks, Scales, SEARCH_LIMIT
from .grids import VectorGrid


# The codes of rows by the names of `CodePart`, each an array `(*batch, codes)` of int32.
_Codes = Mapping[str, Array]
_Parts: TypeAlias = "tuple[CodePart, ...]"


class _Odd(AbstractFormat):
    """The format of scales: odd multiples of `unit`, times a float16 for each block of scales."""

    bits: int = eqx.field(static=True)
    block_size: BlockSize = eqx.field(static=True)
    unit: float = eqx.field(static=True)
    scale_dtype: ClassVar[ScaleDtype] = "float16"

    def choose_scale(self, blocks: Blocks) -> Scales:
        largest = jnp.max(blocks, axis=-1, initial=0)
        return round_up_from_zero(largest / (self.unit * (2 ** (self.bits + 1) - 1)), self.scale_dtype)

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        return jnp.clip(jnp.round((values / self.unit - 1) / 2), 0, 2**self.bits - 1).astype(jnp.uint8)

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        return (2 * codes.astype(jnp.float32) + 1) * self.unit


class CodePart(NamedTuple):
    """Bits of codes that are packed together, as `CodecPart` in `native/src/core/problem.h`.

    - `name`: the kind of the codes: `"index"` of vectors; `"signs"` of eight values, one bit each; `"down"`, 1 where a
        group is shifted down.
    - `bits`, `low`: these are `bits` bits of each code, from bit `low` on.
    - `values`: how many values have one code together.
    """

    name: str
    bits: int
    values: int
    low: int = 0


class AbstractGridFormat(AbstractVectorFormat):
    """A format whose codes are indices of vectors, packed in segments of 256 values."""

    block_size: BlockSize = eqx.field(static=True, default=32, init=False)
    segment = 256
    grid: ClassVar[VectorGrid]
    step: ClassVar[int] = 1  # values are `step` times the numbers of the grid
    even: ClassVar[bool] = False  # whether an even number of eight signs is negative, so that seven are stored
    # The parts of a segment, in the order of its bytes.
    parts: ClassVar[_Parts]
    # How many values share signs or a shift, and so are encoded together.
    together: ClassVar[int] = 8
    # The mean magnitude of normally distributed values, in units of their best scale.
    mean_level: ClassVar[float]
    # The amax of a block is at most so many times the outermost level.
    reach: ClassVar[float]

    @abc.abstractmethod
    def _decode_codes(self, codes: _Codes) -> Float32[Array, "*batch values"]:
        """Returns the values of codes; a last code may have more values than the row."""

    @abc.abstractmethod
    def _find_codes(
        self, values: Float32[Array, "*batch groups values"], weights: Float32[Array, "*batch groups values"] | None
    ) -> _Codes:
        """Returns the codes of the nearest vectors."""

    @property
    def codec(self) -> Codec:
        kinds = {"index": 0, "signs": 1 + self.even, "down": 3}  # `PartKind` in `native/src/core/problem.h`
        parts = ((kinds[name], bits, low, values) for name, bits, values, low in self.parts)
        vectors = (self.step * self.grid.vectors).tobytes()
        # As few bits as the levels need: the end of their range is the largest value that kernels allow for.
        size = int(self.levels[-1]).bit_length()
        return Codec("grid", (self.grid.size, *it.chain(*parts)), vectors, size + 1, -(2**size))

    def choose_scale(self, blocks: Blocks) -> Scales:
        # The mean magnitude alone would clip outliers too much.
        return jnp.maximum(absmean(blocks) / self.mean_level, absmax(blocks) / (self.reach * self.levels[-1]))

    def packed_length(self, length: int) -> int:
        whole, rest = divmod(length, self.segment)
        return whole * sum(self._count_bytes(self.segment)) + sum(self._count_bytes(rest))

    def decode_row(self, packed: UInt8[Array, "*batch bytes"], length: int) -> Float32[Array, "*batch length"]:
        if length == 0:
            return jnp.zeros(packed.shape, jnp.float32)
        count, rest = divmod(length, self.segment)
        size = self.packed_length(self.segment)

        def decode(packed: UInt8[Array, "*batch bytes"]) -> Float32[Array, "*batch values"]:
            # A last segment with as many bytes as a whole one is packed in the same way.
            values = self.segment if packed.shape[-1] == size else rest
            return self._decode_codes(self._unpack(packed, values))[..., :values]

        return packing.by_segments(decode, packed, count, size)[..., :length]

    def encode_row(
        self, values: Float32[Array, "*batch length"], weights: Float32[Array, "*batch length"] | None = None
    ) -> UInt8[Array, "*batch bytes"]:
        *batch, length = values.shape
        pad = [(0, 0)] * len(batch) + [(0, -length % self.together)]
        in_groups = lambda x: jnp.pad(x, pad).reshape(*batch, -(-length // self.together), self.together)
        values = in_groups(jnp.clip(values, -SEARCH_LIMIT, SEARCH_LIMIT))
        codes = self._find_codes(values, None if weights is None else in_groups(weights))
        return self._pack(codes, length)

    def _count_bytes(self, length: int) -> list[int]:
        """Returns the number of bytes of each part of a segment."""
        return [packing.packed_length(-(-length // part.values), part.bits) for part in self.parts]

    def _unpack(self, packed: UInt8[Array, "*batch bytes"], length: int) -> _Codes:
        """Unpacks the codes of a segment of `length` values."""
        codes: dict[str, Array] = {}
        start = 0
        for part, nbytes in zip(self.parts, self._count_bytes(length), strict=True):
            stop = start + nbytes
            bits = packing.unpack(packed[..., start:stop], part.bits, -(-length // part.values)).astype(jnp.int32)
            codes[part.name] = codes[part.name] | bits << part.low if part.low else bits
            start = stop
        return codes

    def _pack(self, codes: _Codes, length: int) -> UInt8[Array, "*batch bytes"]:
        """Packs the codes of rows of `length` values."""
        whole, rest = divmod(length, self.segment)

        def pack_part(part: CodePart, count: int, size: int, start: int) -> UInt8[Array, "*batch segments bytes"]:
            bits = codes[part.name] >> part.low & 2**part.bits - 1
            each, first = -(-size // part.values), start // part.values
            bits = bits[..., first : first + count * each].astype(jnp.uint8)
            return packing.pack(bits.reshape(*bits.shape[:-1], count, each), part.bits)

        packed = []
        for count, size, start in ((whole, self.segment, 0), (1, rest, whole * self.segment)):
            segments = jnp.concatenate([pack_part(part, count, size, start) for part in self.parts], axis=-1)
            packed.append(segments.reshape(*segments.shape[:-2], segments.shape[-2] * segments.shape[-1]))
        return jnp.concatenate(packed, axis=-1)


# How many vectors are compared in one pass over the values.
_TILE = 8


def _find_nearest(
    values: Float32[Array, "*batch groups values"],
    weights: Float32[Array, "*batch groups values"] | None,
    vectors: np.ndarray,
) -> tuple[Int32[Array, "*batch indices"], Float32[Array, "*batch indices"]]:
    """Returns indices of the nearest vectors, and squared errors without the squares of values."""
    tiles = jnp.asarray(vectors, jnp.float32).reshape(-1, _TILE, vectors.shape[-1])
    # `(size, all indices)`: elementwise operations on long arrays, which are read once for each tile of vectors.
    by_place = lambda x: jnp.moveaxis(x.reshape(-1, vectors.shape[-1]), -1, 0)
    twice = by_place(2 * values if weights is None else 2 * values * weights)
    each = None if weights is None else by_place(weights)

    def error(vector: Float32[Array, " size"]) -> Float32[Array, " all"]:
        if each is None:
            return jnp.sum(jnp.square(vector)) - sum(vector[n] * twice[n] for n in range(len(vector)))
        terms = [vector[n] * (vector[n] * each[n] - twice[n]) for n in range(len(vector))]
        return sum(terms[1:], terms[0])

    def step(best: tuple[Array, Array], tile: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        index, least = best
        first, vectors = tile
        for n in range(_TILE):
            new = error(vectors[n])
            index, least = jnp.where(new < least, first + n, index), jnp.minimum(new, least)
        return (index, least), None

    start = (jnp.zeros(twice.shape[1:], jnp.int32), jnp.full(twice.shape[1:], jnp.inf))
    firsts = jnp.arange(tiles.shape[0], dtype=jnp.int32) * _TILE
    index, least = jax.lax.scan(step, start, (firsts, tiles))[0]
    shape = (*values.shape[:-2], values.shape[-2] * values.shape[-1] // vectors.shape[-1])
    return index.reshape(shape), least.reshape(shape)


def _look_up(grid: VectorGrid, index: Int32[Array, "*batch groups"]) -> Int32[Array, "*batch values"]:
    """Returns the vectors of indices, concatenated.

    A gather takes XLA on CPU far longer than arithmetic. So it gathers one integer for each vector, and unpacks that.
    """
    words = jnp.asarray(grid.words).at[index].get(mode="clip")
    digits = words[..., None] >> grid.bits * _iota(index.ndim + 1, grid.size) & 2**grid.bits - 1
    first, step = grid.levels[0], grid.levels[1] - grid.levels[0]
    values = first + step * digits
    for n, level in enumerate(grid.levels):
        if level != first + step * n:  # all levels but one are evenly spaced
            values = jnp.where(digits == n, level, values)
    return values.reshape(*index.shape[:-1], index.shape[-1] * grid.size)


def _iota(ndim: int, size: int = 8) -> Int32[Array, "..."]:
    """Returns the numbers from zero on along the last axis."""
    return jnp.arange(size, dtype=jnp.int32).reshape(*[1] * (ndim - 1), size)


class AbstractSignedGrid(AbstractGridFormat):
    """Vectors of magnitudes, with eight signs for eight values, or seven if `even`."""

    @property
    def levels(self) -> tuple[float, ...]:
        magnitudes = [float(level) for level in self.grid.levels]
        return (*(-level for level in reversed(magnitudes)), *magnitudes)

    def _decode_codes(self, codes: _Codes) -> Float32[Array, "*batch values"]:
        magnitudes, signs = _look_up(self.grid, codes["index"]), codes["signs"]
        if self.even:
            parity = signs ^ signs >> 4
            parity = parity ^ parity >> 2
            signs = signs | ((parity ^ parity >> 1) & 1) << 7
        negative = (signs[..., None] >> _iota(signs.ndim + 1) & 1).reshape(*signs.shape[:-1], signs.shape[-1] * 8)
        magnitudes, negative = (x[..., : min(magnitudes.shape[-1], negative.shape[-1])] for x in (magnitudes, negative))
        return jnp.where(negative == 1, -magnitudes, magnitudes).astype(jnp.float32)

    def _find_codes(
        self, values: Float32[Array, "*batch groups values"], weights: Float32[Array, "*batch groups values"] | None
    ) -> _Codes:
        negative, magnitudes = values < 0, jnp.abs(values)
        if self.even:
            # If the number of negative signs is odd, the sign whose change costs least is stored wrong.
            costs = magnitudes if weights is None else magnitudes * weights
            odd = jnp.sum(negative, axis=-1, keepdims=True) % 2 == 1
            wrong = odd & (_iota(values.ndim) == jnp.argmin(costs, axis=-1, keepdims=True).astype(jnp.int32))
            negative, magnitudes = negative ^ wrong, jnp.where(wrong, -magnitudes, magnitudes)
        signs = jnp.sum(negative.astype(jnp.int32) << _iota(values.ndim), axis=-1)
        index, _ = _find_nearest(magnitudes, weights, self.grid.vectors)
        return {"index": index, "signs": signs & 127 if self.even else signs}


class AbstractShiftedGrid(AbstractGridFormat):
    """Vectors of -1, 0 and 1, all shifted by 1/8 up or down. Values are in units of 1/8."""

    grid: ClassVar[VectorGrid] = grids.IQ1_S
    step: ClassVar[int] = 8

    @property
    def levels(self) -> tuple[float, ...]:
        return (-9.0, -7.0, -1.0, 1.0, 7.0, 9.0)

    def _decode_codes(self, codes: _Codes) -> Float32[Array, "*batch values"]:
        values = self.step * _look_up(self.grid, codes["index"])
        down = jnp.repeat(codes["down"], self.together, axis=-1)
        values, down = (x[..., : min(values.shape[-1], down.shape[-1])] for x in (values, down))
        return (values + jnp.where(down == 1, -1, 1)).astype(jnp.float32)

    def _find_codes(
        self, values: Float32[Array, "*batch groups values"], weights: Float32[Array, "*batch groups values"] | None
    ) -> _Codes:
        count = self.together // self.grid.size

        def find_shifted(shift: int) -> tuple[Array, Array]:
            index, errors = _find_nearest(values, weights, self.step * self.grid.vectors + np.int8(shift))
            return index, jnp.sum(errors.reshape(*values.shape[:-1], count), axis=-1)

        (up, error_up), (down, error_down) = find_shifted(1), find_shifted(-1)
        is_down = error_down < error_up
        index = jnp.where(jnp.repeat(is_down, count, axis=-1), down, up)
        return {"index": index, "down": is_down.astype(jnp.int32)}


class IQ2_XXS(AbstractSignedGrid):
    r"""GGUF's IQ2_XXS: eight values are one of 256 vectors; 2.0625 bits per weight.

    Vectors hold magnitudes. Eight values have seven signs, and an even number of the eight is negative. Magnitudes are
    8, 25 and 43. Scales of blocks of 32 have four bits: odd multiples of a float16 for 256 weights. No level is zero.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "iq2_xxs", method=eqq.MSE(stats))
        ```

    **Arguments:** none; the block size is set by definition.
    """

    bits = 2
    grid: ClassVar[VectorGrid] = grids.IQ2_XXS
    parts: ClassVar[_Parts] = (CodePart("index", 8, 8), CodePart("signs", 7, 8))
    even = True
    mean_level: ClassVar[float] = 17.5
    reach: ClassVar[float] = 1.3
    scale_format: ClassVar[AbstractFormat | None] = _Odd(bits=4, block_size=8, unit=1 / 8)


class IQ2_XS(AbstractSignedGrid):
    r"""GGUF's IQ2_XS: eight values are one of 512 vectors; 2.3125 bits per weight.

    As [`eqquant.formats.IQ2_XXS`][], with scales of blocks of 16.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "iq2_xs", method=eqq.MSE(stats))
        ```

    **Arguments:** none; the block size is set by definition.
    """

    block_size: BlockSize = eqx.field(static=True, default=16, init=False)
    bits = 2
    grid: ClassVar[VectorGrid] = grids.IQ2_XS
    parts: ClassVar[_Parts] = (CodePart("index", 8, 8), CodePart("index", 1, 8, low=8), CodePart("signs", 7, 8))
    even = True
    mean_level: ClassVar[float] = 17.0
    reach: ClassVar[float] = 1.3
    scale_format: ClassVar[AbstractFormat | None] = _Odd(bits=4, block_size=16, unit=1 / 8)


class IQ2_S(AbstractSignedGrid):
    r"""GGUF's IQ2_S: eight values are one of 1024 vectors; 2.5625 bits per weight.

    Vectors hold magnitudes, and each value has a sign. Magnitudes are 8, 25 and 43. Scales of blocks of 16 have four
    bits: odd multiples of a float16 for 256 weights. No level is zero.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "iq2_s", method=eqq.MSE(stats))
        ```

    **Arguments:** none; the block size is set by definition.
    """

    block_size: BlockSize = eqx.field(static=True, default=16, init=False)
    bits = 2
    grid: ClassVar[VectorGrid] = grids.IQ2_S
    parts: ClassVar[_Parts] = (CodePart("index", 8, 8), CodePart("index", 2, 8, low=8), CodePart("signs", 8, 8))
    mean_level: ClassVar[float] = 17.8
    reach: ClassVar[float] = 1.3
    scale_format: ClassVar[AbstractFormat | None] = _Odd(bits=4, block_size=16, unit=1 / 8)


class IQ3_XXS(AbstractSignedGrid):
    r"""GGUF's IQ3_XXS: four values are one of 256 vectors; 3.0625 bits per weight.

    Vectors hold magnitudes. Eight values have seven signs, and an even number of the eight is negative. Magnitudes are
    eight integers from 4 to 62. Scales of blocks of 32 have four bits: odd multiples of a float16 for 256 weights. No
    level is zero.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "iq3_xxs", method=eqq.MSE(stats))
        ```

    **Arguments:** none; the block size is set by definition.
    """

    bits = 3
    grid: ClassVar[VectorGrid] = grids.IQ3_XXS
    parts: ClassVar[_Parts] = (CodePart("index", 8, 4), CodePart("signs", 7, 8))
    even = True
    mean_level: ClassVar[float] = 21.0
    reach: ClassVar[float] = 1.1
    scale_format: ClassVar[AbstractFormat | None] = _Odd(bits=4, block_size=8, unit=1 / 4)


class IQ3_S(AbstractSignedGrid):
    r"""GGUF's IQ3_S: four values are one of 512 vectors; 3.4375 bits per weight.

    Vectors hold magnitudes, and each value has a sign. Magnitudes are the odd numbers from 1 to 15. Scales of blocks of
    32 have four bits: odd multiples of a float16 for 256 weights. No level is zero.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "iq3_s", method=eqq.MSE(stats))
        ```

    **Arguments:** none; the block size is set by definition.
    """

    bits = 3
    grid: ClassVar[VectorGrid] = grids.IQ3_S
    parts: ClassVar[_Parts] = (CodePart("index", 8, 4), CodePart("index", 1, 4, low=8), CodePart("signs", 8, 8))
    mean_level: ClassVar[float] = 4.9
    reach: ClassVar[float] = 1.1
    scale_format: ClassVar[AbstractFormat | None] = _Odd(bits=4, block_size=8, unit=1.0)


class IQ1_S(AbstractShiftedGrid):
    r"""GGUF's IQ1_S: eight values are one of 2048 vectors; 1.5625 bits per weight.

    Vectors hold -1, 0 and 1. All values of a block of 32 are moved by 1/8, up or down. Scales have three bits: odd
    multiples of a float16 for 256 weights. No level is zero.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "iq1_s", method=eqq.MSE(stats))
        ```

    **Arguments:** none; the block size is set by definition.
    """

    bits = 1
    parts: ClassVar[_Parts] = (CodePart("index", 8, 8), CodePart("index", 3, 8, low=8), CodePart("down", 1, 32))
    together = 32
    mean_level: ClassVar[float] = 5.2
    reach: ClassVar[float] = 2.0
    scale_format: ClassVar[AbstractFormat | None] = _Odd(bits=3, block_size=8, unit=1 / 8)


class IQ1_M(AbstractShiftedGrid):
    r"""GGUF's IQ1_M: eight values are one of 2048 vectors; 1.75 bits per weight.

    As [`eqquant.formats.IQ1_S`][], with a direction for every eight values, and scales of blocks of 16.

    !!! Example

        ```python
        model = eqq.quantize_tree(model, "iq1_m", method=eqq.MSE(stats))
        ```

    **Arguments:** none; the block size is set by definition.
    """

    block_size: BlockSize = eqx.field(static=True, default=16, init=False)
    bits = 1
    parts: ClassVar[_Parts] = (CodePart("index", 8, 8), CodePart("index", 3, 8, low=8), CodePart("down", 1, 8))
    mean_level: ClassVar[float] = 5.2
    reach: ClassVar[float] = 2.0
    scale_format: ClassVar[AbstractFormat | None] = _Odd(bits=3, block_size=16, unit=1 / 8)
