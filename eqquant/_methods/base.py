"""The interface of methods, and what they share: storing scales, rounding and working in chunks.

Methods know nothing of `QuantizedArray`: they take rows of values, and return plain arrays of codes and scales.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray, UInt8

from .._formats.base import AbstractFormat, has_offsets, has_zero_points
from .._numerics.blocks import divide, expand, not_finite, num_blocks, split_blocks
from .._numerics.scale_bits import bits_to_scale, scale_to_bits
from .stochastic import move_stochastically


Scales = Float32[Array, "*batch blocks"]
# Zero points, or for a format with offsets these.
ZeroPoints = UInt8[Array, "*batch blocks"] | Float32[Array, "*batch blocks"] | None


class Encoded(NamedTuple):
    """What a method returns: one code for each of `(*batch, length)` values, with the scales and zero points.

    `scale` holds the bits of the scales, or an `Encoded` if the format quantizes its scales; `offset` is alike.
    """

    codes: UInt8[Array, "*batch length"]
    scale: Any  # UInt[Array, "*batch blocks"] | Encoded
    zero_point: UInt8[Array, "*batch blocks"] | None = None
    offset: Any = None


class AbstractMethod(eqx.Module):
    """Turns rows of values into codes and scales of a format.

    A quantized array does not remember its method. If your method only chooses scales and zero points, subclass the
    simpler [`eqquant.AbstractScaleMethod`][], which rounds to the nearest code for you.

    - `inputs`: statistics of the inputs that the weight is multiplied by. Declare it as a field if the method needs
        them. It may map paths of leaves to statistics, as [`eqquant.calibrate.collect_stats`][] returns them; then
        [`eqquant.quantize_tree`][] passes each leaf its own.
    """

    inputs: ClassVar[Any] = None

    @abc.abstractmethod
    def quantize_rows(
        self,
        rows: Float[Array, "*batch length"],
        format: AbstractFormat,
        *,
        key: PRNGKeyArray | None = None,
        chunk: int | None = None,
    ) -> Encoded:
        """Returns the codes and scales of rows of values.

        **Arguments:**

        - `rows`: floats, with the quantized axis last. Each row is quantized alone, unless `format` has one scale for
            the whole array.
        - `format`: the format to quantize to.
        - `key`: for stochastic rounding; `None` rounds to the nearest code.
        - `chunk`: how many rows to process at a time, to save memory; `None` for all. It never changes the result.

        **Returns:**

        An `Encoded`. Call [`eqquant.encode_rows`][] to make one from scales.
        """

    def for_leaf(self, path: str) -> "AbstractMethod":
        """Returns the method for one leaf of a tree, with the statistics of that leaf as `inputs`."""
        if not isinstance(self.inputs, Mapping):
            return self
        if path not in self.inputs:
            raise ValueError(
                f"`inputs` of {type(self).__name__} must hold statistics of every leaf that it quantizes. Got none for "
                f"{path}. Collect them on the same model, or give this leaf another method."
            )
        return dataclasses.replace(self, inputs=self.inputs[path])  # pyright: ignore[reportCallIssue]


class AbstractScaleMethod(AbstractMethod):
    """A method that chooses scales and zero points, and rounds values to the nearest code. Subclass it for your own.

    !!! Example

        ```python
        class Clip(eqq.AbstractScaleMethod):
            "Clips the largest tenth of the range."

            def choose_scales(self, blocks, format):
                scale, zero_point = eqq.AbsMax().choose_scales(blocks, format)
                return 0.9 * scale, zero_point

        q = eqq.quantize(w, "int4", method=Clip())
        ```
    """

    @abc.abstractmethod
    def choose_scales(
        self, blocks: Float32[Array, "*batch blocks block"], format: AbstractFormat
    ) -> tuple[Scales, ZeroPoints]:
        """Returns the scale and the zero point of each block.

        **Arguments:**

        - `blocks`: float32 values, cut into blocks. They may come from only some rows of the array, and from only some
            columns: a shorter last block comes alone. A block does not say which columns it holds, so for statistics of
            each input feature subclass [`eqquant.AbstractMethod`][].
        - `format`: the format to quantize to. `format.choose_scale(blocks)` returns its own choice.

        **Returns:**

        Float32 scales of shape `(*batch, blocks)`. And for a format with zero points these, `uint8` of the same
        shape; for a format with offsets these, float32 of the same shape; for any other `None`.
        """

    def quantize_rows(
        self,
        rows: Float[Array, "*batch length"],
        format: AbstractFormat,
        *,
        key: PRNGKeyArray | None = None,
        chunk: int | None = None,
    ) -> Encoded:
        scale, zero_point = choose_by_blocks(self.choose_scales, rows, format, chunk=chunk)
        return _encode(rows, scale, zero_point, format, key, chunk)


def choose_by_blocks(
    choose: Callable[[Array, AbstractFormat], tuple[Array, Array | None]],
    rows: Float[Array, "*batch length"],
    format: AbstractFormat,
    *,
    chunk: int | None = None,
) -> tuple[Scales, ZeroPoints]:
    """Cuts rows into blocks and chooses the scale and zero point of each. For your own [`eqquant.AbstractMethod`][].

    !!! Example

        ```python
        scale, zero_point = eqq.choose_by_blocks(eqq.AbsMax().choose_scales, rows, format)
        ```

    **Arguments:**

    - `choose`: a function of blocks and a format, as [`eqquant.AbstractScaleMethod.choose_scales`][]. It is called for
        whole blocks, and again for a shorter last block.
    - `rows`: floats of shape `(*batch, length)`, with the quantized axis last.
    - `format`: what to quantize to.
    - `chunk`: as for [`eqquant.AbstractMethod.quantize_rows`][].

    **Returns:**

    What `choose` returns, for all blocks: float32 scales of shape `(*batch, blocks)`, and zero points, offsets or
    `None`. The scale of a block that holds a NaN or an infinity is NaN.

    **Raises:**

    `TypeError` if `choose` returns other shapes, or zero points that do not suit the format.
    """

    def checked(blocks: Array, format: AbstractFormat) -> tuple[Array, Array | None]:
        scale, zero_point = choose(blocks, format)
        _check_scales(scale, zero_point, blocks.shape[:-1], format)
        return _marked(scale, not_finite(blocks)), zero_point

    return _choose(checked, rows, format, chunk)


def _choose(
    choose: Callable[[Array, AbstractFormat], tuple[Array, Array | None]],
    rows: Float[Array, "*batch length"],
    format: AbstractFormat,
    chunk: int | None,
) -> tuple[Scales, ZeroPoints]:
    *batch, length = rows.shape

    def of_rows(_: Any, rows: Array) -> tuple[Array, Array | None]:
        parts = split_blocks(rows.astype(jnp.float32), format.block_size)
        scales, zeros = zip(*(choose(part, format) for part in parts), strict=True)
        return jnp.concatenate(scales, axis=-1), None if zeros[0] is None else jnp.concatenate(zeros, axis=-1)

    scale, zero_point = by_chunks(of_rows, None if format.block_size == "tensor" else chunk, rows)
    blocks = (*batch, num_blocks(length, format.block_size))
    return jnp.broadcast_to(scale, blocks), None if zero_point is None else jnp.broadcast_to(zero_point, blocks)


def encode_rows(
    rows: Float[Array, "*batch length"],
    scale: Scales,
    zero_point: ZeroPoints,
    format: AbstractFormat,
    *,
    key: PRNGKeyArray | None = None,
    chunk: int | None = None,
) -> Encoded:
    """Encodes values with given scales: to the nearest codes, or with `key` by stochastic rounding.

    A block that holds a NaN or an infinity gets a scale of NaN, so it decodes to NaN.

    **Arguments:**

    - `rows`: floats of shape `(*batch, length)`, with the quantized axis last.
    - `scale`: float32, of shape `(*batch, blocks)`. Rounded to what `format` can store.
    - `zero_point`: `uint8` of the same shape; for a format with offsets these, float32; for any other format `None`.
    - `format`: the format to quantize to.
    - `key`, `chunk`: as for [`eqquant.AbstractMethod.quantize_rows`][].

    **Returns:**

    An `Encoded`.
    """
    _check_scales(scale, zero_point, (*rows.shape[:-1], num_blocks(rows.shape[-1], format.block_size)), format)
    marks, _ = _choose(lambda blocks, _: (not_finite(blocks), None), rows, format, chunk)
    return _encode(rows, _marked(scale, marks), zero_point, format, key, chunk)


def encode_stored(
    rows: Float[Array, "*batch length"],
    stored: Any,
    stored_offset: Any,
    format: AbstractFormat,
    key: PRNGKeyArray | None,
    chunk: int | None,
) -> Encoded:
    """As `encode_rows`, for scales and offsets as the format stores them, which stay as they are."""
    offset = None if stored_offset is None else kept_scale(stored_offset, format)
    return _encode(rows, kept_scale(stored, format), offset, format, key, chunk, stored, stored_offset)


def decode_rows(encoded: Encoded, format: AbstractFormat) -> Float32[Array, "*batch length"]:
    """Returns the values that codes stand for. For a method that compares candidates.

    **Arguments:**

    - `encoded`: what [`eqquant.encode_rows`][] returned.
    - `format`: the format of the codes.

    **Returns:**

    Float32 values of shape `(*batch, length)`.
    """
    values, length = format.decode(encoded.codes), encoded.codes.shape[-1]
    if encoded.zero_point is not None:
        values = values - expand(encoded.zero_point.astype(jnp.float32), format.block_size, length)
    values = values * expand(kept_scale(encoded.scale, format), format.block_size, length)
    if encoded.offset is None:
        return values
    return values + expand(kept_scale(encoded.offset, format), format.block_size, length)


def _marked(scale: Array, marks: Array) -> Array:
    return jnp.where(jnp.isnan(marks), jnp.nan, scale)  # not a sum, which would lose the sign of a zero


def _check_scales(scale: Array, zero_point: Array | None, shape: tuple[int, ...], format: AbstractFormat) -> None:
    if scale.shape != shape:
        raise TypeError(f"There must be one scale per block, {shape} for {format!r}. Got shape {scale.shape}.")
    name, dtype = ("Offsets", jnp.float32) if has_offsets(format) else ("Zero points", jnp.uint8)
    has_any = has_offsets(format) or has_zero_points(format)
    if has_any != (zero_point is not None):
        has, got = ("has", "none") if has_any else ("has no", "some")
        raise TypeError(f"{format!r} {has} {name.lower()}, and scales must come with as many. Got {got}.")
    if zero_point is not None and (zero_point.shape != shape or zero_point.dtype != dtype):
        raise TypeError(
            f"{name} must be {jnp.dtype(dtype)} of the shape of the scales, {shape}. Got {zero_point.dtype} of shape "
            f"{zero_point.shape}."
        )


def _encode(
    rows: Float[Array, "*batch length"],
    scale: Scales,
    zero_point: ZeroPoints,
    format: AbstractFormat,
    key: PRNGKeyArray | None,
    chunk: int | None,
    stored: Any = None,
    stored_offset: Any = None,
) -> Encoded:
    """As `encode_rows`, for scales that already are NaN for every block that is not finite.

    `stored`, `stored_offset`: how scales and offsets are stored, if that is known.
    """
    stored = store_scale(scale, format) if stored is None else stored
    kept = kept_scale(stored, format)
    offset = None
    if has_offsets(format) and zero_point is not None:
        stored_offset = store_scale(zero_point, format) if stored_offset is None else stored_offset
        # ggml subtracts the offset as it is before it is rounded, as it multiplies by such a scale.
        offset = zero_point if format.multiplies_by_reciprocal else kept_scale(stored_offset, format)
        zero_point = None

    def of_rows(first: Any, rows: Array, scale: Array, kept: Array, zero_point: Any, offset: Any) -> Array:
        values = rows.astype(jnp.float32)
        if offset is not None:
            values = values - expand(offset, format.block_size, rows.shape[-1])
        values = _in_units(values, scale, kept, format)
        if zero_point is not None:
            values = values + expand(zero_point.astype(jnp.float32), format.block_size, rows.shape[-1])
        codes = format.encode(values)
        if codes.dtype != jnp.uint8 or codes.shape != values.shape:
            raise TypeError(
                f"`{type(format).__name__}.encode` must return uint8 of the shape of its values, {values.shape}. Got "
                f"{codes.dtype} of shape {codes.shape}. End it with `.astype(jnp.uint8)`."
            )
        if key is None:
            return codes
        return move_stochastically(codes, values, format, _uniform_by_row(key, first, values.shape))

    codes = by_chunks(of_rows, chunk, rows, scale, kept, zero_point, offset)
    return Encoded(codes, stored, zero_point, stored_offset)


def _uniform_by_row(key: PRNGKeyArray, first: Any, shape: tuple[int, ...]) -> Float32[Array, "*batch length"]:
    """Numbers between zero and one that depend on a row and its number alone, not on the chunk that it is in."""
    *batch, length = shape
    of_row = lambda row: jax.random.uniform(jax.random.fold_in(key, row), (length,))
    return jax.vmap(of_row)(first + jnp.arange(math.prod(batch))).reshape(shape)


def _in_units(
    values: Float32[Array, "*batch length"], scale: Scales, kept: Scales, format: AbstractFormat
) -> Float32[Array, "*batch length"]:
    """Divides values by their scales: by the stored ones, since decoding multiplies by those."""
    per_value = lambda x: expand(x, format.block_size, values.shape[-1])
    divided = divide(values, per_value(kept))
    if not format.multiplies_by_reciprocal:
        return divided
    multiplied = values * per_value(divide(jnp.ones_like(scale), scale))
    # A scale beyond the range of its dtype is infinite or zero. Dividing makes the block saturate, or zero.
    usable = (jnp.abs(scale) <= float(jnp.finfo(jnp.dtype(format.scale_dtype)).max)) & (kept != 0)
    return jnp.where(per_value(usable), multiplied, divided)


def store_scale(scale: Scales, format: AbstractFormat) -> Any:
    """Returns scales or offsets as the format stores them: their bits, or an `Encoded` if it quantizes its scales."""
    if format.scale_format is None:
        return scale_to_bits(scale, format.scale_dtype)
    nested = format.scale_format
    outer, _ = choose_by_blocks(lambda blocks, f: (f.choose_scale(blocks), None), scale, nested)
    return _encode(scale, outer, None, nested, None, None)


def kept_scale(stored: Any, format: AbstractFormat) -> Scales:
    """Returns stored scales or offsets as floats."""
    if format.scale_format is None:
        return bits_to_scale(stored, format.scale_dtype)
    return decode_rows(stored, format.scale_format)


def by_chunks(function: Callable[..., Any], chunk: int | None, *arrays: Array | None) -> Any:
    """Returns `function(0, *arrays)`, computed a chunk of rows at a time: `function(first_row, *rows_of_arrays)`.

    All arrays share their batch axes; a row is the last axis. The last chunk overlaps the one before it.
    """
    batch = arrays[0].shape[:-1]  # pyright: ignore[reportOptionalMemberAccess]
    rows = math.prod(batch)
    if chunk is None or rows <= chunk:
        return function(0, *arrays)
    flat = jax.tree.map(lambda a: a.reshape(rows, a.shape[-1]), arrays)

    def of_chunk(n: Any) -> tuple[Any, Any]:
        start = jnp.minimum(n * chunk, rows - chunk)
        return start, function(start, *jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, chunk), flat))

    def write(n: Any, done: Any) -> Any:
        start, part = of_chunk(n)
        return jax.tree.map(lambda a, b: jax.lax.dynamic_update_slice_in_dim(a, b, start, 0), done, part)

    part = jax.eval_shape(lambda: of_chunk(0)[1])
    empty = jax.tree.map(lambda a: jnp.zeros((rows, *a.shape[1:]), a.dtype), part)
    done = jax.lax.fori_loop(0, -(-rows // chunk), write, empty)
    return jax.tree.map(lambda a: a.reshape(*batch, a.shape[-1]), done)
