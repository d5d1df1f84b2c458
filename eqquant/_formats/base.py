"""What a format is: what codes mean."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, TYPE_CHECKING

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float32, UInt8

from .._numerics.blocks import BlockSize, divide
from .._numerics.scale_bits import ScaleDtype


if TYPE_CHECKING:  # to a type checker Equinox's own looks like a field of the dataclass
    from typing import ClassVar as AbstractClassVar
else:
    from equinox import AbstractClassVar


_FORMATS: dict[str, type["AbstractFormat"]] = {}


class AbstractFormat(eqx.Module):
    """What codes mean, and how the scale of a block is chosen. Subclass it to make a format of your own.

    !!! Example

        ```python
        class Log4(eqq.AbstractFormat):
            "Four bits: a sign, and zero or a power of two."

            block_size: int | None = eqx.field(static=True, default=32)
            bits = 4

            def choose_scale(self, blocks):
                return jnp.max(jnp.abs(blocks), axis=-1, initial=0)

            def encode(self, values, round=jnp.round):
                power = jnp.clip(round(7 + jnp.log2(jnp.abs(values) + 1e-9)), 0, 7)
                return power.astype(jnp.uint8) | (values < 0).astype(jnp.uint8) << 3

            def decode(self, codes):
                power = (codes & 7).astype(jnp.float32)
                magnitude = jnp.where(power == 0, 0.0, 2.0 ** (power - 7))
                return jnp.where(codes >> 3 == 1, -magnitude, magnitude)

        q = eqq.quantize(x, Log4())
        ```

    A subclass gives `block_size`, `bits`, `choose_scale`, `encode` and `decode`. All its fields are static, so formats
    compare by value. Its lower-case class name becomes a name that [`eqquant.quantize`][] takes.

    - `block_size`: how many values along the quantized axis share a scale; `None` for all of them (one scale per
        channel), `"tensor"` for one scale for the whole array.
    - `bits`: 1, 2, 4 or 8, the width of a code in memory.
    - `scale_dtype`: what scales are rounded to and stored as.
    - `scale_format`: the format that the scales are quantized with in their turn, or `None`.
    """

    block_size: eqx.AbstractVar[BlockSize]
    bits: AbstractClassVar[int]
    scale_dtype: ClassVar[ScaleDtype] = "float32"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.__name__.startswith(("Abstract", "_")):
            name, known = cls.__name__.lower(), _FORMATS.get(cls.__name__.lower())
            # A class of yours may be defined again, in a notebook say; ours cannot be taken over.
            if known is None or not known.__module__.startswith("eqquant."):
                _FORMATS[name] = cls

    def __check_init__(self) -> None:
        if self.bits not in (1, 2, 4, 8):
            raise ValueError(f"`bits` of {type(self).__name__} must be 1, 2, 4 or 8. Got {self.bits}.")
        size = self.block_size
        if size is None or size == "tensor":
            return
        unit = 8 // self.bits
        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % unit != 0:
            raise ValueError(
                f'`block_size` of {type(self).__name__} must be None, "tensor" or a positive multiple of {unit}, the '
                f"number of {self.bits}-bit codes in a byte. Got `block_size={size!r}`. Common sizes are 32, 64 and "
                "128; None is one scale per channel."
            )

    @property
    def scale_format(self) -> "AbstractFormat | None":
        return None

    @abc.abstractmethod
    def choose_scale(self, blocks: Float32[Array, "*batch blocks block"]) -> Float32[Array, "*batch blocks"]:
        """The scale of each block: what its values are divided by before [`encode`][]."""

    def choose_zero_point(
        self, blocks: Float32[Array, "*batch blocks block"], scale: Float32[Array, "*batch blocks"]
    ) -> UInt8[Array, "*batch blocks"] | None:
        """The code that stands for zero in each block, or `None` for a format without zero points."""
        del blocks, scale

    @abc.abstractmethod
    def encode(
        self, values: Float32[Array, "*shape"], round: Callable[[Array], Array] = jnp.round
    ) -> UInt8[Array, "*shape"]:
        """The codes of values that are already divided by their scale (and shifted by their zero point).

        `round` rounds to integers; it is replaced for stochastic rounding.
        """

    @abc.abstractmethod
    def decode(self, codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
        """The values that codes stand for, before scale and zero point. The inverse of `encode`."""

    def normalise(
        self, x: Float32[Array, "*shape"], scale: Float32[Array, "*shape"], stored_scale: Float32[Array, "*shape"]
    ) -> Float32[Array, "*shape"]:
        """Divides by the scale before `encode`: by the one that is stored, which decoding will multiply by."""
        del scale
        return divide(x, stored_scale)


def as_format(format: AbstractFormat | str) -> AbstractFormat:
    """A format from its lower-case name (`"nf4"`, `"int8"`, `"q4_0"`); a format is returned as it is."""
    if isinstance(format, AbstractFormat):
        return format
    if isinstance(format, type) and issubclass(format, AbstractFormat):
        raise TypeError(f"`format` must be an instance. Got the class {format.__name__}. Write `{format.__name__}()`.")
    if not isinstance(format, str):
        raise TypeError(f"`format` must be a format or the name of one. Got {format!r}. For instance `eqq.NF4()`.")
    cls = _FORMATS.get(format.lower())
    if cls is None:
        raise ValueError(f"`format` must be one of {', '.join(sorted(_FORMATS))}. Got {format!r}.")
    try:
        return cls()  # pyright: ignore[reportCallIssue]
    except TypeError:
        raise ValueError(
            f"`format` {format!r} has no defaults, so its name is not enough. Got {format!r}. Construct it: "
            f"`{cls.__name__}(...)`."
        ) from None
