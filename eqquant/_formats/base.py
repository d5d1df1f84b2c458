"""The interface of formats: how codes and values convert into each other."""

import abc
import dataclasses
import functools as ft
from typing import ClassVar, get_args, Literal, NoReturn, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from .._errors import check_keywords
from .._export import register_export
from .._native.weight import Codec
from .._numerics import packing
from .._numerics.blocks import BlockSize, tile_height
from .._numerics.constants import compute_now
from .._numerics.scale_bits import ScaleDtype


if TYPE_CHECKING:  # a type checker takes Equinox's own for a field of the dataclass
    from typing import ClassVar as AbstractClassVar
else:
    from equinox import AbstractClassVar


# The dtypes that a user may choose for scales.
StoredFloat = Literal["float32", "float16", "bfloat16"]

Blocks = Float32[Array, "*batch blocks block"]
Scales = Float32[Array, "*batch blocks"]

# Vector formats clip values to so many scales before they search, so that sums of squares stay finite.
SEARCH_LIMIT = 1e4

# The classes of formats that have been defined, by their lower-case names.
FORMATS: dict[str, type["AbstractFormat"]] = {}


class AbstractFormat(eqx.Module):
    """Defines what codes mean. Subclass it to make your own format.

    !!! Example

        ```python
        class Log4(eqq.extend.AbstractFormat):
            "Four bits: a sign, and zero or a power of two."

            block_size: int | None = eqx.field(static=True, default=32)
            bits = 4

            def choose_scale(self, blocks):
                return jnp.max(jnp.abs(blocks), axis=-1, initial=0)

            def encode(self, values):
                power = jnp.clip(jnp.round(7 + jnp.log2(jnp.abs(values) + 1e-9)), 0, 7)
                return power.astype(jnp.uint8) | (values < 0).astype(jnp.uint8) << 3

            def decode(self, codes):
                power = (codes & 7).astype(jnp.float32)
                magnitude = jnp.where(power == 0, 0.0, 2.0 ** (power - 7))
                return jnp.where(codes >> 3 == 1, -magnitude, magnitude)

        q = eqq.quantize(x, Log4())
        ```

    A subclass defines `block_size`, `bits`, `choose_scale`, `encode` and `decode`. That is enough for every method
    ([`eqquant.MSE`][] and the others), for stochastic rounding, for products and for training. All fields must be
    static, so that formats compare by value. Its lower-case class name becomes a name that
    [`eqquant.quantize`][] takes.

    - `block_size`: how many values along the quantized axis share a scale; `None` for all of them (one scale per
        channel), `"tensor"` for one scale for each matrix, a pair for a tile of so many rows and columns, the quantized
        axis last.
    - `bits`: 1 to 8, the width of a code. Codes of 1, 2, 4 and 8 bits have kernels.
    - `scale_dtype`: the dtype that scales are rounded to and stored as.
    - `scale_format`: the format that scales are quantized to, or `None` if they are not quantized.
    - `multiplies_by_reciprocal`: whether encoding multiplies values by the reciprocal of the scale before the scale is
        rounded to `scale_dtype`, as ggml does. Otherwise it divides them by the stored scale.
    """

    block_size: eqx.AbstractVar[BlockSize]
    if TYPE_CHECKING:  # a subclass may have fields of these names
        bits: int = eqx.field(init=False)
        scale_dtype: ClassVar[ScaleDtype] = "float32"
    else:  # an annotation would put the field of a subclass before its block size
        bits: AbstractClassVar[int]
        scale_dtype = "float32"
    scale_format: ClassVar["AbstractFormat | None"] = None
    multiplies_by_reciprocal: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        register_export(cls)
        if not cls.__name__.startswith(("Abstract", "_")):
            name, known = cls.__name__.lower(), FORMATS.get(cls.__name__.lower())
            # A notebook may define a user's class again; the library's own formats cannot be replaced.
            if known is None or not known.__module__.startswith("eqquant."):
                FORMATS[name] = cls

    if not TYPE_CHECKING:  # a type checker reads the fields

        def __new__(cls, *args: object, **fields: object) -> "AbstractFormat":
            check_keywords(cls, fields)
            return super().__new__(cls)

    def __check_init__(self) -> None:
        name = type(self).__name__
        for field in dataclasses.fields(self):
            if not field.metadata.get("static", False):
                raise TypeError(
                    f"Every field of a format must be static, so that formats compare by value. Got `{field.name}` of "
                    f"{name}, which is not. Write `{field.name}: ... = eqx.field(static=True)`."
                )
            # A default is an attribute of the class alone. Equinox marks a module without attributes of its own by
            # objects that a pickle copies, so that it would no longer equal itself.
            value = getattr(self, field.name)
            # A value that equals the default becomes the default: `repr` leaves out only that very object.
            same = type(value) is type(field.default) and value == field.default
            object.__setattr__(self, field.name, field.default if same else value)
        if self.bits not in range(1, 9):
            raise ValueError(f"`bits` of {name} must be from 1 to 8. Got {self.bits}.")
        if isinstance(self.block_size, np.integer):  # so that it prints, compares and is saved as the number that it is
            object.__setattr__(self, "block_size", int(self.block_size))
        size = self.block_size
        if size is None or (isinstance(size, str) and size == "tensor"):
            return
        unit = packing.num_planes(self.bits)
        tile = size if isinstance(size, tuple) else (1, size)
        whole = all(type(n) is int and n > 0 for n in tile)
        if len(tile) != 2 or not whole or tile[1] % unit != 0:
            raise ValueError(
                f'`block_size` of {name} must be None, "tensor" or a positive multiple of {unit}, so that blocks of '
                f"{self.bits}-bit codes fill bytes; or the rows and the columns of a tile, `(128, 128)`. Got "
                f"`block_size={size!r}`. Common sizes are 32, 64 and 128; None is one scale per channel."
            )
        if isinstance(size, tuple) and isinstance(self, AbstractVectorFormat):
            raise ValueError(
                f"`block_size` of {name} must be along the quantized axis alone. Got `block_size={size!r}`."
            )

    @abc.abstractmethod
    def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        """Returns the scale of each block. Its values are divided by the scale before [`encode`][].

        [`eqquant.AbsMax`][] uses this rule as it is; the other methods start from it. You need not handle NaN and
        infinity: a block that holds one gets a scale of NaN, whatever this returns.
        """

    @abc.abstractmethod
    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        """Returns the nearest code of each value, below `2**bits`.

        Values are already divided by the scale and shifted by the zero point. Values beyond the range take the nearest
        end.
        """

    @abc.abstractmethod
    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """Returns the values of codes, before scale and zero point or offset.

        The inverse of `encode`.
        """


class AbstractAffineFormat(AbstractFormat):
    """A format whose blocks may each have a zero point: the code that stands for zero.

    Besides the methods of [`eqquant.extend.AbstractFormat`][], whose example shows how to define one, it has
    `has_zero_points` and `choose_zero_point`.
    """

    @property
    @abc.abstractmethod
    def has_zero_points(self) -> bool:
        """Whether blocks have zero points."""

    @abc.abstractmethod
    def choose_zero_point(
        self, blocks: Float32[Array, "*batch blocks block"], scale: Float32[Array, "*batch blocks"]
    ) -> UInt8[Array, "*batch blocks"]:
        """Returns the code that stands for zero in each block, given the blocks' scales."""


class AbstractOffsetFormat(AbstractFormat):
    """A format whose blocks each have an offset: `decode(code) * scale + offset`.

    An offset is a float that is added last.

    Offsets are stored as scales are: in `scale_dtype`, or quantized to `scale_format`. A format has either offsets or
    zero points. Besides the methods of [`eqquant.extend.AbstractFormat`][], whose example shows how to define one, it
    has `choose_offset`.
    """

    @abc.abstractmethod
    def choose_offset(
        self, blocks: Float32[Array, "*batch blocks block"], scale: Float32[Array, "*batch blocks"]
    ) -> Float32[Array, "*batch blocks"]:
        """Returns the offset of each block, which is subtracted before dividing by the scale."""


class AbstractVectorFormat(AbstractFormat):
    """A format whose codes each stand for several values, as in vector quantization.

    A code is the index of a vector in a codebook, for instance, with the signs of its values. The format packs rows
    itself, in segments of `segment` values; scales are as in any other format. `bits` is the number of bits of a value,
    rounded down.

    A subclass defines `block_size`, `bits`, `segment`, `levels`, `codec`, `choose_scale`, `packed_length`, `decode_row`
    and `encode_row`. Native kernels read a format of this library by its `codec`; products with others take `xla`.
    """

    segment: AbstractClassVar[int]
    # The methods that take the format, for errors.
    methods: ClassVar[str] = "AbsMax, MSE, JointMSE and HQQ"

    @property
    @abc.abstractmethod
    def levels(self) -> tuple[float, ...]:
        """All values that `decode_row` can return, ascending."""

    @property
    @abc.abstractmethod
    def codec(self) -> Codec | None:
        """The packing of rows, for native kernels; `None` if they cannot decode it."""

    @abc.abstractmethod
    def packed_length(self, length: int) -> int:
        """Returns the number of bytes of a row of `length` values.

        Segments are packed one after another; the last may be shorter.
        """

    @abc.abstractmethod
    def decode_row(self, packed: UInt8[Array, "*batch bytes"], length: int) -> Float32[Array, "*batch length"]:
        """Returns the values of packed rows, before the scale. All bytes decode to finite values."""

    @abc.abstractmethod
    def encode_row(
        self, values: Float32[Array, "*batch length"], weights: Float32[Array, "*batch length"] | None = None
    ) -> UInt8[Array, "*batch bytes"]:
        """Returns packed codes of values near the given ones, which are divided by the scale.

        `weights` say how much the squared error of each value counts; `None` if all count alike.
        """

    def encode(self, values: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
        self.refuse()

    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        self.refuse()

    def refuse(self, leaf: str = "") -> NoReturn:
        """Raises an error about a use that needs a code for each value, of a leaf if it is named."""
        raise ValueError(
            f"{leaf and f'{leaf}: '}`format` must have a code for each value, since each value is rounded alone here. "
            f"Got {self!r}, whose codes stand for several values. It takes the methods {self.methods}, and always "
            'rounds to nearest, without `key`. For anything else take a format such as "q2_k" or "int3".'
        )


class AbstractSequenceFormat(AbstractVectorFormat):
    """A vector format whose codes a search finds, one value of a row after another.

    So the search can correct the error of each value in the values that follow, for [`eqquant.GPTQ`][]. An example is
    trellis-coded quantization.
    """

    methods: ClassVar[str] = "AbsMax, MSE, JointMSE, HQQ and GPTQ"

    @abc.abstractmethod
    def encode_row(
        self,
        values: Float32[Array, "*batch length"],
        weights: Float32[Array, "*batch length"] | None = None,
        feedback: Float32[Array, "length length"] | None = None,
    ) -> UInt8[Array, "*batch bytes"]:
        """As `AbstractVectorFormat.encode_row`.

        `feedback[i, j]` says how much of the error of value `i` is subtracted from value `j`; only `j > i` counts. With
        it a row has at most `segment` values.
        """


def packed_length(format: AbstractFormat, length: int) -> int:
    """Returns the number of bytes of a row of `length` values."""
    if isinstance(format, AbstractVectorFormat):
        return format.packed_length(length)
    return packing.packed_length(length, format.bits)


def segment_length(format: AbstractFormat) -> int:
    """Returns how many values are packed together. A row can be cut only between segments."""
    return format.segment if isinstance(format, AbstractVectorFormat) else packing.segment_length(format.bits)


def decode_packed(
    format: AbstractFormat, packed: UInt8[Array, "*batch bytes"], length: int
) -> Float32[Array, "*batch length"]:
    """Returns the values of packed rows, before scale and zero point or offset."""
    if isinstance(format, AbstractVectorFormat):
        return format.decode_row(packed, length)
    return format.decode(packing.unpack(packed, format.bits, length))


def pack_codes(format: AbstractFormat, codes: UInt8[Array, "*batch codes"]) -> UInt8[Array, "*batch bytes"]:
    """Packs the codes of single values; a vector format has packed its codes itself."""
    return codes if isinstance(format, AbstractVectorFormat) else packing.pack(codes, format.bits)


def round_to_levels(
    format: AbstractFormat,
    values: Float32[Array, "*batch length"],
    weights: Float32[Array, "*batch length"] | None = None,
) -> Float32[Array, "*batch length"]:
    """Returns the levels of the nearest codes.

    `weights` say how much the squared error of each value counts, for a vector format.
    """
    if isinstance(format, AbstractVectorFormat):
        return format.decode_row(format.encode_row(values, weights), values.shape[-1])
    return format.decode(format.encode(values))


def check_stored_float(format: AbstractFormat) -> None:
    """Raises if `scale_dtype` of a format is not one of the choices."""
    if format.scale_dtype not in get_args(StoredFloat):
        raise ValueError(
            f"`scale_dtype` of {type(format).__name__} must be one of {', '.join(get_args(StoredFloat))}. Got "
            f"{format.scale_dtype!r}."
        )


def has_zero_points(format: AbstractFormat) -> bool:
    """Returns whether blocks in a format have zero points."""
    return isinstance(format, AbstractAffineFormat) and format.has_zero_points


def has_one_scale(format: AbstractFormat) -> bool:
    """Returns whether a row has one scale, stored as it is: no blocks, no nested scales."""
    return format.block_size in (None, "tensor") and format.scale_format is None


def spans_rows(format: AbstractFormat) -> bool:
    """Returns whether rows that are quantized together share a scale, or a scale of scales."""
    nested = format.scale_format
    sizes = (format.block_size, None if nested is None else nested.block_size)
    return "tensor" in sizes or tile_height(format.block_size) > 1


def check_no_tiles(format: AbstractFormat, argument: str) -> AbstractFormat:
    """Returns the format of rows that come one by one.

    Raises for tiles, and names the `argument`.
    """
    if isinstance(format.block_size, tuple):
        raise ValueError(
            f"`{argument}` must have scales of their own for each row. Got {format!r}, whose tiles span rows. Take "
            f"`block_size={format.block_size[1]}`."
        )
    return format


def has_offsets(format: AbstractFormat) -> bool:
    """Returns whether blocks in a format have offsets."""
    return isinstance(format, AbstractOffsetFormat)


def is_ours(format: AbstractFormat, *methods: str) -> bool:
    """Returns whether none of these methods of a format is a user's, which may do anything."""
    found = (getattr(type(format), name, None) for name in methods)
    return all(method is None or method.__module__.startswith("eqquant.") for method in found)


@ft.lru_cache
def find_levels(format: AbstractFormat) -> tuple[np.ndarray, np.ndarray]:
    """Returns the level of each code, and whether any value encodes to it.

    Ternary uses only three of its four codes.

    **Arguments:**

    - `format`: any format.

    **Returns:**

    A float32 and a boolean array of `2**bits` entries each. For a vector format its `levels`, all of them used.
    """
    if isinstance(format, AbstractVectorFormat):
        return np.asarray(format.levels, np.float32), np.ones(len(format.levels), bool)

    @jax.jit  # one small program, where each operation would be compiled alone
    def round_trip(codes: UInt8[Array, " codes"]) -> tuple[Array, Array]:
        values = format.decode(codes)
        back = format.encode(jnp.where(jnp.isfinite(values), values, 0))
        return values, (back == codes) & jnp.isfinite(values)

    with compute_now():
        values, used = round_trip(jnp.asarray(np.arange(2**format.bits, dtype=np.uint8)))
        return np.asarray(values), np.asarray(used)


@ft.lru_cache
def check_codes(format: AbstractFormat) -> None:
    """Raises if a user's `encode` returns codes that need more bits than the format has.

    They would change other codes.
    """
    if is_ours(format, "encode"):
        return
    sizes = np.exp2(np.arange(-20, 20, 0.25))
    values = np.concatenate([-sizes, [0], sizes]).astype(np.float32)
    with compute_now():
        codes = np.asarray(jax.jit(format.encode)(values))
    if (too_large := codes >= 2**format.bits).any():
        raise ValueError(
            f"`encode` of {type(format).__name__} must return codes below {2**format.bits}, since `bits` is "
            f"{format.bits}. Got {codes[too_large][0]} for {values[too_large][0]:g}. Clip values to the nearest end."
        )
