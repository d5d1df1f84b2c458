"""The configuration of one leaf or one rule: format, method, activations and axis."""

import dataclasses
from collections.abc import Mapping, Sequence

from .._formats.base import AbstractFormat
from .._formats.names import as_format
from .._methods import AbstractMethod
from .._methods.names import as_method, MethodLike
from .._methods.statistics import LeafStats
from .._types import PyTree


Axis = int | Sequence[int] | None
# A format of activations, its name, or statistics of inputs by the paths of weights.
ActivationsLike = AbstractFormat | str | Mapping[str, PyTree]


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """The configuration of a weight: format, method, activations and axis.

    It is a rule of [`eqquant.quantize_tree`][] or, without activations, an option of `plan_bits`.

    !!! Example

        ```python
        eqq.quantize_tree(model, {"*.down.*": eqq.QuantConfig("int4", eqq.MSE()), "*": "int8"})
        eqq.quantize_tree(model, {"*.mlp.*": eqq.QuantConfig("int8", activations="int8"), "*": "int8"})
        eqq.quantize_tree(model, {"*.proj": eqq.QuantConfig("int4", axis=-2), "*": "int4"})  # used as `x @ proj`
        ```

    **Arguments:**

    - `format`: a format, or its lower-case name.
    - `method`: the method that chooses scales and codes; `None` uses the method of the whole call.
    - `activations`: the format of activations, or its name (dynamic quantization, per token), or statistics of inputs
        (static quantization); as in [`eqquant.quantize_tree`][]. `None` uses the one of the whole call.
    - `axis`: the axis (or axes, quantized as one) along which blocks run, for a model with weights of both orders: `-2`
        for `x @ w`. `None` uses the one of the whole call, or the input axes of each weight.

    **Raises:**

    `TypeError` if `axis` is not a whole number or a sequence of whole numbers.
    """

    format: AbstractFormat
    method: AbstractMethod | None = None
    activations: AbstractFormat | Mapping[str, LeafStats] | None = None
    axis: Axis = None

    def __init__(
        self,
        format: AbstractFormat | str,
        method: MethodLike | None = None,
        activations: ActivationsLike | None = None,
        axis: Axis = None,
    ) -> None:
        object.__setattr__(self, "format", as_format(format))
        object.__setattr__(self, "method", None if method is None else as_method(method))
        object.__setattr__(self, "activations", as_activations(activations))
        object.__setattr__(self, "axis", _as_axis(axis))

    def __hash__(self) -> int:
        return hash((self.format, type(self.method), self.axis))  # a method may hold arrays

    def __repr__(self) -> str:
        by_activations = "" if self.activations is None else f" x {self.activations!r}"
        along = "" if self.axis is None else f" along {self.axis}"
        return f"{self.format!r}{by_activations}{along}" + ("" if self.method is None else f" by {self.method!r}")


def _as_axis(axis: Axis) -> int | tuple[int, ...] | None:
    if axis is None or (isinstance(axis, int) and not isinstance(axis, bool)):
        return axis
    several = tuple(axis) if isinstance(axis, Sequence) and not isinstance(axis, str) else ()
    if not several or not all(isinstance(a, int) for a in several):
        raise TypeError(f"`axis` must be a whole number, or several. Got {axis!r}. For `x @ w` pass -2.")
    return several


def as_activations(x: ActivationsLike | None) -> AbstractFormat | Mapping[str, LeafStats] | None:
    """Returns a format, or statistics by path, of activations; `None` for floats."""
    if isinstance(x, Mapping) and (not x or any(isinstance(v, (AbstractFormat, str, QuantConfig)) for v in x.values())):
        raise TypeError(
            "`activations` must be one format, its name, or the result of `eqq.calibrate.collect_stats`. Got "
            f"{dict(x)!r}. To choose by rule, write `eqq.QuantConfig` in the rules of `format`: "
            '`{"layers.0.*": eqq.QuantConfig("int8", activations="int8"), "*": "int8"}`.'
        )
    return x if x is None or isinstance(x, Mapping) else as_format(x, "activations")


def as_config(x: PyTree) -> QuantConfig:
    """Returns a format, its name, or a `QuantConfig`, as a `QuantConfig`."""
    return x if isinstance(x, QuantConfig) else QuantConfig(x)
