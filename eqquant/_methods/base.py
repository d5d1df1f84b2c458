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
from jaxtyping import Array, Bool, Float, Float32, PRNGKeyArray, UInt8

from .._formats.base import AbstractFormat, has_offsets, has_zero_points, is_ours
from .._numerics.blocks import divide, expand, not_finite, num_blocks, split_blocks
from .._numerics.scale_bits import bits_to_scale, scale_to_bits
from .inputs import check_statistic, statistic
from .stochastic import move_stochastically


# What is added to the weights of columns, relative to their mean.
_DAMPING = 0.01

Scales = Float32[Array, "*batch blocks"]
# Zero points, or for a format with offsets these.
ZeroPoints = UInt8[Array, "*batch blocks"] | Float32[Array, "*batch blocks"] | None


class Encoded(NamedTuple):
    """What a method returns: one code for each of `(*batch, length)` values, with the scales and zero points.

    `scale` holds the bits of the scales, or an `Encoded` if the format quantizes its scales; so does `offset`.
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
        them. It may map paths of leaves to statistics, like the result of [`eqquant.calibrate.collect_stats`][]; then
        [`eqquant.quantize_tree`][] passes each leaf its own. A weight that is looked up, such as an embedding, has no
        inputs: it is quantized without them, or by `method`, unless its statistics were collected with `lookups=True`.
    - `method`: another method, which quantizes what has no inputs. Declare it as a field if the method needs `inputs`.
    - `statistic`: which of the statistics the method takes, `"gram"` or `"second_moment"`, so that they are checked.
    """

    inputs: ClassVar[Any] = None
    method: ClassVar[Any] = None
    statistic: ClassVar[str | None] = None

    def __repr__(self) -> str:
        fields = [field for field in dataclasses.fields(self) if field.repr and field.name != "inputs"]
        shown = [f"{field.name}={eqx.tree_pformat(getattr(self, field.name))}" for field in fields]
        return f"{type(self).__name__}({', '.join(['...'] * (self.inputs is not None) + shown)})"

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
        own = self if self.method is None else self._with(method=self.method.for_leaf(path))
        if not isinstance(self.inputs, Mapping):
            return own
        if path not in self.inputs:
            raise ValueError(
                f"`inputs` of {type(self).__name__} must hold statistics of every leaf that it quantizes. Got none for "
                f"{path}. Collect them on the same model, or give this leaf another method."
            )
        inputs = self.inputs[path]
        if getattr(inputs, "looked_up", False) and inputs.axis is None:
            return own.without_inputs()
        return own._with(inputs=inputs)

    def without_inputs(self) -> "AbstractMethod":
        """Returns the method for a weight that is looked up, not multiplied."""
        if self.method is not None:
            return self.method.without_inputs()
        takes_inputs = any(field.name == "inputs" for field in dataclasses.fields(self))
        return self._with(inputs=None) if takes_inputs else self

    def _with(self, **changes: Any) -> "AbstractMethod":
        changes = {name: x for name, x in changes.items() if x is not getattr(self, name)}
        return dataclasses.replace(self, **changes) if changes else self  # pyright: ignore[reportArgumentType]

    def check(self, name: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
        """Raises if the statistics do not belong to an array, quantized along its axes. Errors call it `name`."""
        if self.statistic is not None and (self.inputs is not None or self.method is not None):
            check_statistic(self.inputs, self.statistic, type(self).__name__, name, shape, axes)


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

    - `choose_weighted`: as `choose_scales`, with the weights of the errors of all values in between. Define it if the
        method has `inputs`, whose mean squares are the weights.
    - `only_reduces`: whether `choose_scales` makes no array as large as `blocks`, for formats of this library, so that
        rows need not come in chunks.
    """

    choose_weighted: ClassVar[Callable[..., tuple[Array, Array | None]] | None] = None
    only_reduces: ClassVar[bool] = False

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
        scale, zero_point = self.choose_for_rows(rows, format, chunk=chunk)
        return _encode(rows, *store(scale, zero_point, format), format, key, chunk)

    def choose_for_rows(
        self, rows: Float[Array, "*batch length"], format: AbstractFormat, *, chunk: int | None = None
    ) -> tuple[Scales, ZeroPoints]:
        """Returns the scale and the zero point of each block of rows of values, NaN for a block that is not finite."""
        if self.inputs is None or self.choose_weighted is None:
            # Reductions need no memory, unless values are converted first, or a shorter last block is cut off.
            size = format.block_size
            in_place = rows.dtype == jnp.float32 and (not isinstance(size, int) or rows.shape[-1] % size == 0)
            only_reduces = self.only_reduces and is_ours(format, "choose_scale", "choose_zero_point", "choose_offset")
            chunk = None if only_reduces and in_place else chunk
            return choose_by_blocks(self.choose_scales, rows, format, chunk=chunk)
        moments = jnp.asarray(statistic(self.inputs, "second_moment"), jnp.float32)
        # About one, so that no product of a weight and a square overflows. A column without inputs counts a little.
        mean = jnp.mean(moments, axis=-1, keepdims=True)
        weights = jnp.where(mean > 0, moments / jnp.where(mean > 0, mean, 1), 1) + _DAMPING
        return _weighted_by_blocks(self.choose_weighted, rows, weights, format, chunk)


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


def _weighted_by_blocks(
    choose: Callable[[Array, Array, AbstractFormat], tuple[Array, Array | None]],
    rows: Float[Array, "*batch length"],
    weights: Float32[Array, "*stack length"],
    format: AbstractFormat,
    chunk: int | None,
) -> tuple[Scales, ZeroPoints]:
    """As `choose_by_blocks`, with the weights of columns. `stack` are the first axes of `batch`."""
    if weights.ndim > 1 and format.block_size != "tensor":
        return jax.vmap(lambda rows, weights: _weighted_by_blocks(choose, rows, weights, format, chunk))(rows, weights)

    def of_part(blocks: Array, format: AbstractFormat, part: int) -> tuple[Array, Array | None]:
        own = weights
        if format.block_size == "tensor":
            own = weights.reshape(*weights.shape[:-1], *[1] * (rows.ndim - weights.ndim), rows.shape[-1])
            own = jnp.broadcast_to(own, rows.shape)
        own = split_blocks(own, format.block_size)[part]
        own = own.reshape(*[1] * (blocks.ndim - own.ndim), *own.shape)
        scale, zero_point = choose(blocks, jnp.broadcast_to(own, blocks.shape), format)
        return _marked(scale, not_finite(blocks)), zero_point

    return _choose(of_part, rows, format, chunk, numbered=True)


def _choose(
    choose: Callable[..., tuple[Array, Array | None]],
    rows: Float[Array, "*batch length"],
    format: AbstractFormat,
    chunk: int | None,
    numbered: bool = False,
) -> tuple[Scales, ZeroPoints]:
    """Chooses for the whole blocks, and for a shorter last one; `choose` may be told which of the two it is."""
    *batch, length = rows.shape

    def of_rows(_: Any, rows: Array) -> tuple[Array, Array | None]:
        parts = split_blocks(rows.astype(jnp.float32), format.block_size)
        number = lambda n: (n,) if numbered else ()
        scales, zeros = zip(*(choose(part, format, *number(n)) for n, part in enumerate(parts)), strict=True)
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
    - `zero_point`: `uint8` of the same shape, below `2**bits`; for a format with offsets these, float32; for any other
        format `None`.
    - `format`: the format to quantize to.
    - `key`, `chunk`: as for [`eqquant.AbstractMethod.quantize_rows`][].

    **Returns:**

    An `Encoded`.
    """
    _check_scales(scale, zero_point, (*rows.shape[:-1], num_blocks(rows.shape[-1], format.block_size)), format)
    marks, _ = _choose(lambda blocks, _: (not_finite(blocks), None), rows, format, chunk)
    return _encode(rows, *store(_marked(scale, marks), zero_point, format), format, key, chunk)


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
    grid = _grid(kept_scale(stored, format), offset, stored, stored_offset, format)
    return _encode(rows, stored, stored_offset, grid, format, key, chunk)


def decode_rows(encoded: Encoded, format: AbstractFormat) -> Float32[Array, "*batch length"]:
    """Returns the values that codes stand for. For a method that compares candidates.

    **Arguments:**

    - `encoded`: what [`eqquant.encode_rows`][] returned.
    - `format`: the format of the codes.

    **Returns:**

    Float32 values of shape `(*batch, length)`.
    """
    return decode_by(encoded.codes, stored_grid(encoded, format), format)


def stored_grid(encoded: Encoded, format: AbstractFormat) -> "Grid":
    """Returns the levels of each block, by what is stored."""
    kept, offset = kept_scale(encoded.scale, format), encoded.offset
    offset = None if offset is None else kept_scale(offset, format)
    return Grid(kept, kept, encoded.zero_point, offset, offset)


class Grid(NamedTuple):
    """The levels of each block, to which values are rounded.

    - `scale`, `kept`: the scales as they were chosen, and as they are stored.
    - `offset`, `kept_offset`: what is subtracted before values are divided, and what is added after decoding.
    """

    scale: Scales
    kept: Scales
    zero_point: UInt8[Array, "*batch blocks"] | None = None
    offset: Scales | None = None
    kept_offset: Scales | None = None


def store(scale: Scales, zero_point: ZeroPoints, format: AbstractFormat) -> tuple[Any, Any, Grid]:
    """Returns scales and offsets as the format stores them, and the levels that follow."""
    stored = store_scale(scale, format)
    stored_offset = None
    if has_offsets(format) and zero_point is not None:
        stored_offset = store_scale(zero_point, format)  # pyright: ignore[reportArgumentType]
    elif zero_point is not None:
        # They are packed as codes are, so one that is too large would change its neighbours.
        zero_point = jnp.minimum(zero_point, 2**format.bits - 1).astype(jnp.uint8)
    return stored, stored_offset, _grid(scale, zero_point, stored, stored_offset, format)


def _grid(scale: Scales, zero_point: ZeroPoints, stored: Any, stored_offset: Any, format: AbstractFormat) -> Grid:
    if stored_offset is None:
        return Grid(scale, kept_scale(stored, format), zero_point)
    kept_offset = kept_scale(stored_offset, format)
    # ggml subtracts the offset as it is before it is rounded, as it multiplies by such a scale.
    offset = zero_point if format.multiplies_by_reciprocal else kept_offset
    return Grid(scale, kept_scale(stored, format), None, offset, kept_offset)


def decode_by(
    codes: UInt8[Array, "*batch length"], grid: Grid, format: AbstractFormat
) -> Float32[Array, "*batch length"]:
    """Returns the levels that codes stand for."""
    values, length = format.decode(codes), codes.shape[-1]
    if grid.zero_point is not None:
        values = values - expand(grid.zero_point.astype(jnp.float32), format.block_size, length)
    values = values * expand(grid.kept, format.block_size, length)
    return values if grid.kept_offset is None else values + expand(grid.kept_offset, format.block_size, length)


def encode_by(
    values: Float32[Array, "*batch length"], grid: Grid, format: AbstractFormat
) -> tuple[UInt8[Array, "*batch length"], Float32[Array, "*batch length"]]:
    """Returns the nearest codes of values, and the values in units of their scales that were rounded."""
    per_value = lambda x: expand(x.astype(jnp.float32), format.block_size, values.shape[-1])
    units = values if grid.offset is None else values - per_value(grid.offset)
    units = _in_units(units, grid.scale, grid.kept, format)
    units = units if grid.zero_point is None else units + per_value(grid.zero_point)
    codes = format.encode(units)
    if codes.dtype != jnp.uint8 or codes.shape != units.shape:
        raise TypeError(
            f"`{type(format).__name__}.encode` must return uint8 of the shape of its values, {units.shape}. Got "
            f"{codes.dtype} of shape {codes.shape}. End it with `.astype(jnp.uint8)`."
        )
    return codes, units


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
    stored: Any,
    stored_offset: Any,
    grid: Grid,
    format: AbstractFormat,
    key: PRNGKeyArray | None,
    chunk: int | None,
) -> Encoded:
    """Encodes values by what `store` returned, whose scales are NaN for every block that is not finite."""

    def of_rows(first: Any, rows: Array, grid: Grid) -> Array:
        codes, values = encode_by(rows.astype(jnp.float32), grid, format)
        if key is None:
            return codes
        return move_stochastically(codes, values, format, _uniform_by_row(key, first, values.shape))

    return Encoded(by_chunks(of_rows, chunk, rows, grid), stored, grid.zero_point, stored_offset)


def _uniform_by_row(key: PRNGKeyArray, first: Any, shape: tuple[int, ...]) -> Float32[Array, "*batch length"]:
    """Numbers between zero and one that depend on a row and its number alone, not on the chunk that it is in."""
    *batch, length = shape
    of_row = lambda row: jax.random.uniform(jax.random.fold_in(key, row), (length,), jnp.float32)
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
    return jnp.where(per_value(multiplies(scale, kept, format)), multiplied, divided)


def multiplies(scale: Scales, kept: Scales, format: AbstractFormat) -> Bool[Array, "*batch blocks"]:
    """Returns for which blocks of a format that multiplies by reciprocals values are really multiplied."""
    # A scale beyond the range of its dtype is infinite or zero. Dividing makes the block saturate, or zero.
    return (jnp.abs(scale) <= float(jnp.finfo(jnp.dtype(format.scale_dtype)).max)) & (kept != 0)


def store_scale(scale: Scales, format: AbstractFormat) -> Any:
    """Returns scales or offsets as the format stores them: their bits, or an `Encoded` if it quantizes its scales."""
    if format.scale_format is None:
        return scale_to_bits(scale, format.scale_dtype)
    nested = format.scale_format
    outer, _ = choose_by_blocks(lambda blocks, f: (f.choose_scale(blocks), None), scale, nested)
    return _encode(scale, *store(outer, None, nested), nested, None, None)


def kept_scale(stored: Any, format: AbstractFormat) -> Scales:
    """Returns stored scales or offsets as floats."""
    if format.scale_format is None:
        return bits_to_scale(stored, format.scale_dtype)
    return decode_rows(stored, format.scale_format)


def by_chunks(function: Callable[..., Any], chunk: int | None, *arrays: Any) -> Any:
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
