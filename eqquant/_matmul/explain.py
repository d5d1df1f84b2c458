"""What a product would take, and why: `explain_matmul`."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from .._array.array import is_quantized
from .._report import Report
from .dispatch import choose, IMPLEMENTATIONS, refusal_of
from .problem import MatmulProblem, Target


@dataclasses.dataclass(frozen=True, repr=False)
class MatmulExplanation(Report):
    """Which implementation a product would take, and why. Prints as a table."""

    problem: MatmulProblem
    platform: str
    implementation: str
    verdicts: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        problem = {**self.problem._asdict(), "dtype": str(self.problem.dtype), "format": repr(self.problem.format)}
        return {**super().to_dict(), "problem": problem}

    def __rich__(self) -> Table:
        p = self.problem
        weight = f"({p.m}, {p.n}) . W({p.n}, {p.k})" if p.transpose else f"({p.m}, {p.k}) . W({p.n}, {p.k})^T"
        table = Table("implementation", "verdict", title=f"{p.dtype}{weight}, {p.format!r}, on {self.platform}")
        for name, verdict in self.verdicts.items():
            table.add_row(name, verdict, style="bold" if name == self.implementation else None)
        return table


def explain_matmul(x: Any, w: Any, *, platform: str | None = None) -> MatmulExplanation:
    """Says which implementation `x @ w` would take, and why not the others.

    !!! Example

        ```python
        print(eqq.explain_matmul(x, q.T))
        ```

    **Arguments:**

    - `x`, `w`: as for [`eqquant.matmul`][], one of them quantized. Arrays of any kind, or `jax.ShapeDtypeStruct`s.
    - `platform`: `"cpu"`, `"cuda"`, `"tpu"` or `"rocm"`; the default backend's unless given. One device of it is meant:
        on several TPUs, outside of `shard_map`, products are for `"xla"`.

    **Returns:**

    An object with `.implementation`, `.verdicts` (one per implementation) and `.to_dict()`, that prints as a table.

    **Raises:**

    `TypeError` if nothing is quantized, `ValueError` if contracted lengths differ or there is no such platform.
    """
    left = not is_quantized(w)
    q, other = (x, w) if left else (w, x)
    if not is_quantized(q):
        raise TypeError("`explain_matmul` needs a quantized operand. Got none. Quantize `x` or `w` first.")
    platform = _platform(platform)
    other = other if isinstance(other, jax.ShapeDtypeStruct) or is_quantized(other) else jnp.asarray(other)
    dtype = jnp.dtype(jnp.result_type(other.dtype, q.dtype))
    shape = (1, *other.shape) if len(other.shape) == 1 else other.shape
    if not q._multiplies or len(shape) < 2:
        why = "it has one dimension" if q.ndim < 2 else f"the quantized axis {q.axis} is not one of the last two"
        why = "the other operand is a scalar" if len(shape) < 2 else why
        problem = MatmulProblem(1, math.prod(q.shape[:-1]), q.shape[-1], dtype, q.format, False)
        return MatmulExplanation(problem, platform, "dense", {"dense": f"{why}: dequantize, then multiply"})
    contracted = q._contracted(other.shape, left=left)
    m = shape[-1] if left and len(other.shape) > 1 else shape[-2]
    rows = q._memory_order()
    if rows.ndim == 2:
        m *= math.prod(shape[:-2])
    precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    problem = MatmulProblem(m, rows.shape[-2], rows.shape[-1], dtype, q.format, q._axes != (contracted,), precision)
    target = Target(platform)
    name, reason = choose(target, problem, None)
    verdicts = {other_name: refusal_of(target, problem, other_name) or "possible" for other_name in IMPLEMENTATIONS}
    return MatmulExplanation(problem, platform, name, {**verdicts, name: f"chosen: {reason}"})


def _platform(name: str | None) -> str:
    name = name or jax.default_backend()
    name = {"gpu": "cuda"}.get(name, name)
    if name not in ("cpu", "cuda", "rocm", "tpu"):
        raise ValueError(f"`platform` must be one of cpu, cuda, rocm, tpu. Got {name!r}.")
    return name
