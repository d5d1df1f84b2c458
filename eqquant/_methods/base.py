"""The interface of methods: rows of values in, codes and scales out, all plain arrays."""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TYPE_CHECKING, TypeVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from .._export import register_export
from .._formats.base import AbstractFormat, AbstractVectorFormat, is_ours, Scales
from .._numerics.blocks import block_length, has_blocks
from .choose import broadcast_weights, choose_by_blocks, choose_by_weights, Rows, ZeroPoints
from .fingerprint import check_same_weight
from .grid import encode_by_chunks, EncodedRows, Grid, ScaleBits, store
from .statistics import check_statistic, InputsError, LeafStats, share_inputs, weigh_columns


_Method = TypeVar("_Method", bound="AbstractMethod")


class AbstractMethod(eqx.Module):
    """Turns rows of values into codes and scales of a format.

    A quantized array does not remember its method. If your method only chooses scales and zero points, subclass the
    simpler [`eqquant.extend.AbstractScaleMethod`][], which rounds to the nearest code for you.

    - `inputs`: statistics of the inputs that the weight is multiplied by. Declare it as a field if the method needs
        them. It may map paths of leaves to statistics, like the result of [`eqquant.calibrate.collect_stats`][]; then
        [`eqquant.quantize_tree`][] passes each leaf its own. A weight that is looked up, such as an embedding, or
        added, has no inputs: it is quantized without them, or by `method`. Lookups have statistics nevertheless if
        they were collected with `lookups=True`.
    - `method`: another method, for weights without inputs. Declare it as a field if the method needs `inputs`.
    - `statistic`: which of the statistics the method takes, `"gram"` or `"second_moment"`, so that they are checked.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        register_export(cls)

    if TYPE_CHECKING:  # a subclass may have fields of these names
        inputs: Any = eqx.field(init=False)
        method: Any = eqx.field(init=False)
    else:
        inputs = method = None
    statistic: ClassVar[str | None] = None
    # The vector formats that it takes; none if it rounds value by value.
    vector_formats: ClassVar[tuple[type[AbstractFormat], ...]] = (AbstractVectorFormat,)

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
    ) -> EncodedRows:
        """Returns the codes and scales of rows of values.

        **Arguments:**

        - `rows`: floats, with the quantized axis last. Each row is quantized alone, unless `format` has one scale for
            each matrix, the last two axes, or each tile.
        - `format`: the format to quantize to.
        - `key`: for stochastic rounding; `None` rounds to the nearest code.
        - `chunk`: how many rows to process at a time, to save memory; `None` for all. It never changes the result.

        **Returns:**

        An `EncodedRows`. Call [`eqquant.extend.encode_rows`][] to make one from scales.
        """

    def for_leaf(self, path: str) -> "AbstractMethod":
        """Returns the method for one leaf of a tree, with the statistics of that leaf as `inputs`.

        Without its inputs, as `without_inputs` does, if no product used the leaf.
        """
        own, inner = self, self.method
        if inner is not None and (own_inner := inner.for_leaf(path)) is not inner:
            own = dataclasses.replace(self, method=own_inner)
        if not isinstance(self.inputs, Mapping):
            return own
        if path not in self.inputs:
            if (base := path.removesuffix(".array")) in self.inputs:
                raise InputsError(
                    f"`inputs` of {type(self).__name__} must be statistics of this model as it is now",
                    f"statistics of {base} from before `smooth` or `rotate`",
                    "Collect them again, on the model that you quantize.",
                )
            raise InputsError(
                f"`inputs` of {type(self).__name__} must hold statistics of every leaf that it quantizes",
                f"none for {path}",
                "Collect them on the same model, or give these another method by a rule with `eqq.QuantConfig`.",
            )
        inputs = self.inputs[path]
        if isinstance(inputs, LeafStats):
            return own.without_inputs() if inputs.axis is None else own.with_inputs(share_inputs(inputs))
        return own.with_inputs(inputs)

    def statistics_for(self, path: str) -> LeafStats | None:
        """Returns the statistics of one leaf, from this method or from `method`, or `None`."""
        inputs = self.inputs.get(path) if isinstance(self.inputs, Mapping) else None
        if isinstance(inputs, LeafStats):
            return inputs
        return None if self.method is None else self.method.statistics_for(path)

    def without_inputs(self) -> "AbstractMethod":
        """Returns the method for a weight that no product uses.

        Such a weight is looked up, added or never reached.

        It is `method`, if there is one.
        """
        if self.method is not None:
            return self.method.without_inputs()
        return self.with_inputs(None)

    def with_inputs(self: _Method, inputs: object) -> _Method:
        """Returns the method with other statistics."""
        return self if inputs is self.inputs else dataclasses.replace(self, inputs=inputs)

    def lacks_inputs(self) -> bool:
        """Returns whether the method takes statistics, and has none."""
        return any(field.name == "inputs" for field in dataclasses.fields(self)) and self.inputs is None

    def check(self, name: str, shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
        """Raises if the statistics are not for an array, quantized along these axes.

        Errors call it `name`.
        """
        if self.statistic is not None and (self.inputs is not None or self.method is not None):
            check_statistic(self.inputs, self.statistic, type(self).__name__, name, shape, axes)

    def check_weight(self, name: str, x: object) -> None:
        """Raises if statistics were collected with other values of the array `x`, called `name`."""
        check_same_weight(self.inputs, f"`inputs` of {type(self).__name__}", name, x)
        if self.method is not None:
            self.method.check_weight(name, x)


class AbstractScaleMethod(AbstractMethod):
    """A method that chooses scales and zero points, and rounds to the nearest code.

    Subclass it for your own.

    !!! Example

        ```python
        class Clip(eqq.extend.AbstractScaleMethod):
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
            each input feature subclass [`eqquant.extend.AbstractMethod`][].
        - `format`: the format to quantize to. `format.choose_scale(blocks)` returns its own choice.

        **Returns:**

        Float32 scales of shape `(*batch, blocks)`. And for a format with zero points these, `uint8` of the same
        shape; for a format with offsets these, float32 of the same shape; for any other `None`.
        """

    def quantize_rows(
        self, rows: Rows, format: AbstractFormat, *, key: PRNGKeyArray | None = None, chunk: int | None = None
    ) -> EncodedRows:
        return encode_by_chunks(rows, *self.choose_grid(rows, format, chunk), format, key, chunk)

    def choose_grid(
        self, rows: Rows, format: AbstractFormat, chunk: int | None
    ) -> tuple[ScaleBits, ScaleBits | None, Grid]:
        """Returns the scales and offsets of rows as they are stored, and the grid that they give."""
        scale, zero_point = self.choose_for_rows(rows, format, chunk=chunk)
        stored, stored_offset, grid = store(rows, scale, zero_point, format, chunk)
        if self.inputs is None or self.choose_weighted is None or not isinstance(format, AbstractVectorFormat):
            return stored, stored_offset, grid
        # Vectors are chosen by weighted errors.
        return stored, stored_offset, grid._replace(weights=broadcast_weights(weigh_columns(self.inputs), rows))

    def choose_for_rows(
        self, rows: Rows, format: AbstractFormat, *, chunk: int | None = None
    ) -> tuple[Scales, ZeroPoints]:
        """Returns the scale and the zero point of each block of rows.

        The scale of a block that is not finite is NaN.
        """
        if self.inputs is None or self.choose_weighted is None:
            # Reductions need no memory, unless values are converted first, or a shorter last block is cut off.
            size = format.block_size
            in_place = rows.dtype == jnp.float32 and (
                not has_blocks(size) or rows.shape[-1] % block_length(size, 1) == 0
            )
            only_reduces = self.only_reduces and is_ours(format, "choose_scale", "choose_zero_point", "choose_offset")
            chunk = None if only_reduces and in_place else chunk
            return choose_by_blocks(self.choose_scales, rows, format, chunk=chunk)
        return choose_by_weights(self.choose_weighted, rows, weigh_columns(self.inputs), format, chunk)
