"""What reports have in common: they print as the table that they are for rich, and become JSON."""

import json
import math
from typing import Any

from rich.console import Console


def as_text(report: Any, width: int) -> str:
    """What rich would print of a report."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(report)
    return capture.get().rstrip()


def as_json(plain: Any, indent: int | None) -> str:
    """Plain Python values as JSON. An infinity or a NaN, which JSON has no word for, becomes `null`."""
    return json.dumps(_finite(plain), indent=indent, allow_nan=False)


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {key: _finite(value) for key, value in x.items()}
    if isinstance(x, list):
        return [_finite(item) for item in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
