"""What to do with a leaf: a format, with the method that finds its codes."""

import dataclasses
from typing import Any

from .._array.quantize import as_method
from .._formats.base import AbstractFormat, as_format
from .._methods import AbstractMethod


@dataclasses.dataclass(frozen=True)
class Use:
    """A format together with a method, for a rule of [`eqquant.quantize_tree`][] or a choice of `plan_bits`.

    !!! Example

        ```python
        eqq.quantize_tree(model, {"*.down.*": eqq.Use("int4", eqq.MSE()), "*": "int8"})
        ```

    **Arguments:**

    - `format`: a format, or its lower-case name.
    - `method`: how codes are found; `None` takes the one that the whole tree is quantized with.
    """

    format: AbstractFormat
    method: AbstractMethod | None = None

    def __init__(self, format: AbstractFormat | str, method: AbstractMethod | None = None) -> None:
        object.__setattr__(self, "format", as_format(format))
        object.__setattr__(self, "method", None if method is None else as_method(method))

    def __repr__(self) -> str:
        return repr(self.format) if self.method is None else f"{self.format!r} by {self.method!r}"


def as_use(x: Any) -> Use:
    """Returns a format, its name, or a `Use`, as a `Use`."""
    return x if isinstance(x, Use) else Use(x)
