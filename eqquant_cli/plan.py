"""`eqquant plan`."""

import math
from typing import Annotated, Any

import typer

from .arguments import Axis, Json, method_of, open_source, parse_format, Source


def plan(
    source: Source,
    budget: Annotated[float, typer.Option(help="The bits per weight to stay within, scales included.")] = 4.5,
    formats: Annotated[list[str] | None, typer.Option("--format", "-f", help="A format to choose from.")] = None,
    method: Annotated[str | None, typer.Option(help="absmax, mse or hqq.")] = None,
    axis: Axis = None,
    json: Json = False,
) -> None:
    """Plans formats within a budget of bits.

    Judges by the errors of the weights alone. With data, `eqquant.analysis.sensitivity` measures what they do to a
    model.

    Example: eqquant plan model.safetensors --budget 4.2
    """
    chosen = plan_of(open_source(source), budget, axis, method_of(method), formats)
    typer.echo(chosen.to_json(indent=1) if json else chosen)


def plan_of(checkpoint: Any, budget: float, axis: int | None, method: Any, formats: list[str] | None = None) -> Any:
    """Returns the plan, having read one array at a time."""
    import eqquant as eqq
    from eqquant.analysis import plan_bits, SensitivityReport, weight_sensitivity

    from .output import Progress

    options = [parse_format(f) for f in formats or ("int2", "int4(32)", "nf4", "int8(64)")]
    weights = [leaf.path for leaf in eqq.plan_tree(eqq.io.skeleton(checkpoint), "nf4").leaves if leaf.format]
    rows = []
    with Progress("Measuring", len(weights)) as progress:
        for name in weights:
            x = eqq.dequantize(checkpoint[name])
            rows += weight_sensitivity({name: x}, options, axis=axis, method=method).leaves
            progress.counted(name, x, x)
    least = 8 * sum(min(row.nbytes) for row in rows) / max(sum(math.prod(row.shape) for row in rows), 1)
    if not budget >= least:
        smallest = min(options, key=lambda f: f.bits)
        reach = f"{math.ceil(100 * least) / 100:.2f} bits per weight"
        raise ValueError(
            f"--budget must be at least {reach}, which {smallest} needs with its scales. Got {budget}. Raise it, or "
            "let `eqquant plan` choose from smaller formats, such as --format binary."
        )
    return plan_bits(eqq.io.skeleton(checkpoint), SensitivityReport(0.0, tuple(rows)), budget)
