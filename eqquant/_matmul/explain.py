"""`explain_matmul`: reports which implementation a product takes, and why."""

import dataclasses
import functools as ft
import math
from collections.abc import Iterator

import jax
import jax.core
import jax.extend
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import JaxprEqn
from jax.lax import PrecisionLike
from rich.markup import escape
from rich.table import Table

from .. import _compat
from .._array.array import is_quantized, QuantizedArray
from .._array.contraction import matmul
from .._array.primitive import quantized_matmul_p, unflatten_operands
from .._array.value import AbstractArrayValue
from .._native import library
from .._report import Report, report_table
from .._types import PyTree
from .dispatch import choose, decode_reason, describe_types, find_refusal, IMPLEMENTATIONS
from .problem import describe_matmul, MatmulProblem, TargetDevice
from .rounded import compute_rounded, rounded_matmul_p
from .rows import Activations
from .selected import SelectedArray


@dataclasses.dataclass(frozen=True, repr=False)
class MatmulExplanation(Report):
    """The implementation that a product takes, with the reasons. Prints as a table."""

    problem: MatmulProblem
    platform: str
    implementation: str
    verdicts: dict[str, str]
    types: str  # the types that are multiplied, and the type of sums

    def __rich__(self) -> Table:
        p = self.problem
        weight = f"({p.m}, {p.n}) . W({p.n}, {p.k})" if p.transpose else f"({p.m}, {p.k}) . W({p.n}, {p.k})^T"
        table = report_table("implementation", "verdict", text=2)
        table.title = f"{p.dtype}{weight}, {p.format!r}, on {self.platform}"
        if p.activations is not None:
            table.title = f"{p.dtype}{weight}, {p.format!r} x {p.activations!r}, on {self.platform}: {self.types}"
        table.title = escape(table.title)
        by_verdict: dict[str, list[str]] = {}  # implementations with the same verdict share a row
        for name, verdict in self.verdicts.items():
            by_verdict.setdefault(verdict, []).append(name)
        for verdict, names in by_verdict.items():
            table.add_row(", ".join(names), escape(verdict), style="bold" if self.implementation in names else None)
        return table


def explain_matmul(x: PyTree, w: PyTree, *, platform: str | None = None) -> MatmulExplanation:
    """Reports which implementation `x @ w` takes, and why it does not take the others.

    !!! Example

        ```python
        print(eqq.explain_matmul(x, q.T))
        ```

    **Arguments:**

    - `x`, `w`: as for [`eqquant.matmul`][], at least one of them quantized. Arrays of any kind, or
        `jax.ShapeDtypeStruct`s.
    - `platform`: `"cpu"`, `"cuda"`, `"tpu"` or `"rocm"`; by default, the platform of the default backend. The report
        is for a single device: on several TPUs, products outside `shard_map` take `"xla"`.

    **Returns:**

    A report, which prints as a table. It has

    - `implementation`: the name of the one that runs, such as `"xla"`; `platform`: where.
    - `verdicts`: a dictionary from the name of each implementation to the reason why it runs, or not.
    - `types`: the types that are multiplied, and the type of sums, such as `"int8 x int8, sums in int32"`.
    - `.to_dict()`, `.to_json(indent=None)`: the same as plain Python, and as JSON.

    **Raises:**

    `TypeError` if neither operand is quantized. `ValueError` if the platform is unknown. The errors of `x @ w`.
    """
    q = w if isinstance(w, AbstractArrayValue) else x
    if not isinstance(q, AbstractArrayValue):
        raise TypeError("`explain_matmul` needs a quantized operand. Got none. Quantize `x` or `w` first.")
    platform = _check_platform(platform)
    as_operand = lambda a: a if isinstance(a, (AbstractArrayValue, jax.ShapeDtypeStruct)) else jnp.asarray(a)
    operands = as_operand(x), as_operand(w)
    try:
        traced, result = jax.make_jaxpr(matmul, return_shape=True)(*operands)
    except (TypeError, ValueError) as e:
        weight = next(filter(is_quantized, jtu.tree_leaves(q, is_leaf=is_quantized)), q)
        if not isinstance(axes := getattr(weight, "axis", None), tuple):
            raise
        raise ValueError(
            "`explain_matmul` explains matmuls alone, and these shapes fit none. Got "
            f"{' @ '.join(str(tuple(a.shape)) for a in operands)}, and a weight quantized along {axes}, as a "
            "convolution has. To see the products of a convolution, `print(jax.make_jaxpr(eqq.quaxify(layer))(x))`."
        ) from e
    product = next(_find_products(traced.jaxpr), None)
    if product is None:
        axes = getattr(q, "axis", "")
        partial = f"the sum is over a part of the quantized axes {axes}, or copies of the other operand would be larger"
        why = "it has one dimension" if q.ndim < 2 else partial
        shape, dtype = (math.prod(q.shape[:-1]), q.shape[-1]), result.dtype
        problem = MatmulProblem(1, *shape, dtype, getattr(q, "format", None), False)  # pyright: ignore
        verdicts = {"dense": f"{why}: dequantize, then multiply"}
        return MatmulExplanation(problem, platform, "dense", verdicts, f"{dtype} x {dtype}")
    problem = describe_matmul(*product)
    target = _target(platform)
    name, reason = choose(target, problem, None)
    decoded = decode_reason(problem, target, name)
    reason = reason if decoded is None else f"{reason}. Activations are decoded: {decoded}"
    if isinstance(x if q is w else w, AbstractArrayValue) and problem.activations is None:
        reason = f"{reason}. One operand is dequantized: both must have blocks along the sum to multiply codes"
    if name in ("cpu", "cpu_int8"):
        reason = f"{reason} ({library.describe()})"
    verdicts = {other: find_refusal(target, problem, other) or "possible" for other in IMPLEMENTATIONS}
    return MatmulExplanation(
        problem, platform, name, {**verdicts, name: f"chosen: {reason}"}, describe_types(problem, target, name)
    )


def find_implementation(equation: JaxprEqn) -> str:
    """Returns the implementation of a traced quantized matmul on the default backend."""
    params = equation.params
    operands = unflatten_operands([v.aval for v in equation.invars], params["x_tree"], params["w_tree"])
    problem = describe_matmul(*operands, params["transpose"], params["precision"])
    return choose(_target(_check_platform(None)), problem, params["implementation"])[0]


def _find_products(
    jaxpr: jax.extend.core.Jaxpr,
) -> Iterator[tuple[Activations | jax.core.ShapedArray, QuantizedArray | SelectedArray, bool, PrecisionLike]]:
    """Yields operands, `transpose` and `precision` of each quantized matmul in a jaxpr."""
    for equation in jaxpr.eqns:
        params = equation.params
        if equation.primitive is quantized_matmul_p:
            operands = unflatten_operands([v.aval for v in equation.invars], params["x_tree"], params["w_tree"])
            yield *operands, params["transpose"], params["precision"]
        if equation.primitive is rounded_matmul_p:
            rounded = jax.make_jaxpr(ft.partial(compute_rounded, **params))(*(v.aval for v in equation.invars))
            yield from _find_products(rounded.jaxpr)
        for inner in jax.extend.core.jaxprs_in_params(params):
            yield from _find_products(inner)


def _target(platform: str) -> TargetDevice:
    return TargetDevice(platform, capability=_compat.compute_capability(jax.devices()[0]))


def _check_platform(name: str | None) -> str:
    name = name or jax.default_backend()
    name = {"gpu": "cuda"}.get(name, name)
    if name not in ("cpu", "cuda", "rocm", "tpu"):
        raise ValueError(f"`platform` must be one of cpu, cuda, rocm, tpu. Got {name!r}.")
    return name
