"""Pairs a format with a method, for one leaf or one rule."""

import dataclasses
from typing import Any

from .._array.quantize import as_method
from .._formats.base import AbstractFormat, as_format
from .._methods import AbstractMethod


@dataclasses.dataclass(frozen=True)
class Use:
    """A format with a method, for a rule of [`eqquant.quantize_tree`][] or an option of `plan_bits`.

    !!! Example

        ```python
        eqq.quantize_tree(model, {"*.down.*": eqq.Use("int4", eqq.MSE()), "*": "int8"})
        ```

    **Arguments:**

    - `format`: a format, or its lower-case name.
    - `method`: the method that chooses scales and codes; `None` uses the method of the whole call.
    """

    format: AbstractFormat
    method: AbstractMethod | None = None

    def __init__(self, format: AbstractFormat | str, method: AbstractMethod | None = None) -> None:
        object.__setattr__(self, "format", as_format(format))
        object.__setattr__(self, "method", None if method is None else as_method(method))

    def __hash__(self) -> int:
        return hash((self.format, type(self.method)))  # a method may hold arrays

    def __repr__(self) -> str:
        return repr(self.format) if self.method is None else f"{self.format!r} by {self.method!r}"


def as_use(x: Any) -> Use:
    """Returns a format, its name, or a `Use`, as a `Use`."""
    return x if isinstance(x, Use) else Use(x)
