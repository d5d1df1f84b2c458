"""`explain_matmul`: shows which implementation a product takes, and why."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from rich.table import Table

from .._array.array import QuantizedArray
from .._array.primitive import operands_of, quantized_matmul_p
from .._array.selected import SelectedArray
from .._report import Report, report_table
from .api import matmul
from .dispatch import choose, IMPLEMENTATIONS, refusal_of
from .problem import MatmulProblem, problem_of, Target


@dataclasses.dataclass(frozen=True, repr=False)
class MatmulExplanation(Report):
    """The implementation that a product takes, with the reasons. Prints as a table."""

    problem: MatmulProblem
    platform: str
    implementation: str
    verdicts: dict[str, str]

    def __rich__(self) -> Table:
        p = self.problem
        weight = f"({p.m}, {p.n}) . W({p.n}, {p.k})" if p.transpose else f"({p.m}, {p.k}) . W({p.n}, {p.k})^T"
        table = report_table("implementation", "verdict", text=2)
        table.title = f"{p.dtype}{weight}, {p.format!r}, on {self.platform}"
        for name, verdict in self.verdicts.items():
            table.add_row(name, verdict, style="bold" if name == self.implementation else None)
        return table


def explain_matmul(x: Any, w: Any, *, platform: str | None = None) -> MatmulExplanation:
    """Reports which implementation `x @ w` takes, and why it does not take the others.

    !!! Example

        ```python
        print(eqq.explain_matmul(x, q.T))
        ```

    **Arguments:**

    - `x`, `w`: as for [`eqquant.matmul`][], one of them quantized. Arrays of any kind, or `jax.ShapeDtypeStruct`s.
    - `platform`: `"cpu"`, `"cuda"`, `"tpu"` or `"rocm"`; by default, the platform of the default backend. The report
        is for a single device: on several TPUs, products outside `shard_map` take `"xla"`.

    **Returns:**

    An object with `.implementation`, `.verdicts` (one per implementation) and `.to_dict()`. Prints as a table.

    **Raises:**

    `TypeError` if neither operand is quantized. `ValueError` if the platform is unknown. The errors of `x @ w`.
    """
    is_quantized = lambda a: isinstance(a, (QuantizedArray, SelectedArray))
    q = w if is_quantized(w) else x
    if not is_quantized(q):
        raise TypeError("`explain_matmul` needs a quantized operand. Got none. Quantize `x` or `w` first.")
    platform = _platform(platform)
    known = lambda a: a if is_quantized(a) or isinstance(a, jax.ShapeDtypeStruct) else jnp.asarray(a)
    traced = jax.make_jaxpr(matmul)(known(x), known(w))
    product = next(_products(traced.jaxpr), None)
    if product is None:
        part = f"the sum is over a part of the quantized axes {q.axis}, or copies of the other operand would be larger"
        why = "it has one dimension" if q.ndim < 2 else part
        shape = math.prod(q.shape[:-1]), q.shape[-1]
        problem = MatmulProblem(1, *shape, traced.out_avals[0].dtype, q.format, False)
        return MatmulExplanation(problem, platform, "dense", {"dense": f"{why}: dequantize, then multiply"})
    problem = problem_of(*product)
    target = Target(platform)
    name, reason = choose(target, problem, None)
    verdicts = {other: refusal_of(target, problem, other) or "possible" for other in IMPLEMENTATIONS}
    return MatmulExplanation(problem, platform, name, {**verdicts, name: f"chosen: {reason}"})


def _products(jaxpr: Any) -> Iterator[tuple[Any, Any, bool, Any]]:
    """Yields the operands, `transpose` and `precision` of each quantized matmul in a jaxpr and its inner jaxprs."""
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive is quantized_matmul_p:
            operands = operands_of([v.aval for v in equation.invars], params["x_tree"], params["w_tree"])
            yield *operands, params["transpose"], params["precision"]
        for inner in jax.extend.core.jaxprs_in_params(params):
            yield from _products(inner)


def _platform(name: str | None) -> str:
    name = name or jax.default_backend()
    name = {"gpu": "cuda"}.get(name, name)
    if name not in ("cpu", "cuda", "rocm", "tpu"):
        raise ValueError(f"`platform` must be one of cpu, cuda, rocm, tpu. Got {name!r}.")
    return name
