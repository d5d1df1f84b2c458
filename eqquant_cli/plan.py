"""`eqquant plan`."""

import dataclasses
import math
from collections.abc import Collection
from typing import Annotated, Any, TYPE_CHECKING

import typer

from .arguments import Axis, Json, left, method_of, open_source, parse_format, Rules, Source, weights_of


if TYPE_CHECKING:
    import eqquant as eqq
    from eqquant.analysis import LeafSensitivity


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


# What a budget chooses from, by whose layout is written.
_CANDIDATES = {
    None: ("int2", "int4(32)", "nf4", "int8(64)"),
    "gguf": ("q2_k", "q3_k", "q4_0", "q4_k", "q5_0", "q6_k", "q8_0"),
    "bitsandbytes": ("nf4", "int8"),
    "compressed-tensors": ("int2", "int4(32)", "int4(128)", "int8(128)"),
    "gptq": ("int2(64)", "int3(64)", "int4(64)", "int8(64)"),
    "mlx": ("mlx(2)", "mlx(3)", "mlx(4)", "mlx(6)", "mlx(8)"),
}
_ALIKE = ("bitsandbytes", "gptq")  # these have one format for all that is quantized


def plan_of(
    checkpoint: "eqq.io.Checkpoint",
    budget: float,
    axis: int | None,
    method: "eqq.AbstractMethod | None",
    formats: list[str] | None = None,
    to: str | None = None,
    rules: Rules | None = None,
) -> Any:
    """Returns the plan for the weights that no rule matches, having read one array at a time.

    The weights that rules quantize count too, so that all that is quantized stays within the budget.
    """
    import eqquant as eqq
    from eqquant.analysis import plan_bits, SensitivityReport, weight_sensitivity
    from eqquant.io._convert import fitting

    from .output import Progress

    options, rules = [parse_format(f) for f in formats or _CANDIDATES[to]], rules or {}
    skeleton, weights = eqq.io.skeleton(checkpoint), left(weights_of(checkpoint), rules)
    ruled = (
        [leaf for leaf in eqq.plan_tree(skeleton, rules, axis=axis).leaves if leaf.format]
        if any(rules.values())
        else []
    )
    fits = {f: set(weights) if to is None else fitting(checkpoint, f, axis, to) for f in options}
    rows, stays = [], []
    with Progress("Measuring", len(weights)) as progress:
        for name in weights:
            x = eqq.dequantize(checkpoint[name])
            if offered := [f for f in options if name in fits[f]]:
                rows += weight_sensitivity({name: x}, offered, axis=axis, method=method).leaves
            else:  # it stays in float, which counts
                stays.append((name, x.nbytes, x.size))
            progress.counted(name, x, x)
    if not weights:
        return {}
    if not rows:
        raise ValueError(f"--to {to} must be able to hold a weight. Got none that it can, such as {weights[0]!r}.")
    size = sum(row.size for row in rows)
    given = sum(leaf.nbytes for leaf in ruled) + sum(nbytes for _, nbytes, _ in stays)
    total = size + sum(math.prod(leaf.shape) for leaf in ruled) + sum(count for *_, count in stays)
    mixes = [[f] for f in options] if to in _ALIKE else [options]
    reports = [SensitivityReport(0.0, tuple(_only(row, mix) for row in rows)) for mix in mixes]
    least = [
        8 * (given + sum(min(row.nbytes, default=row.dense_nbytes) for row in report.leaves)) / total
        for report in reports
    ]
    if not budget >= min(least):
        smallest = min((f for row in rows for f in row.formats), key=lambda f: f.bits)
        reach = f"{math.ceil(100 * min(least)) / 100:.2f} bits per weight"
        smaller = ", or let `eqquant plan` choose from smaller formats, such as --format binary" if to is None else ""
        floats = f", since {stays[0][0]!r} stays in float: --to {to} cannot hold it" if stays else ""
        raise ValueError(
            f"--budget must be at least {reach}, which {smallest} needs with its scales"
            f"{' beside the formats of --rule' if ruled else ''}{floats}. Got {budget}. Raise it{smaller}."
        )
    bits = (budget * total - 8 * given) / size
    plans = [plan_bits(skeleton, report, bits) for report, bound in zip(reports, least, strict=True) if budget >= bound]
    best = min(plans, key=lambda plan: plan.increase)
    if not ruled and not any(best.values()):
        raise ValueError(
            f"--budget must leave something to quantize. Got {budget}, within which all floats fit. Lower it."
        )
    return best


def _only(row: "LeafSensitivity", formats: "Collection[eqq.AbstractFormat]") -> "LeafSensitivity":
    """Returns what was measured of a weight with some of the formats."""
    kept = [n for n, f in enumerate(row.formats) if f in formats]
    of = lambda values: tuple(values[n] for n in kept)
    return dataclasses.replace(row, formats=of(row.formats), nbytes=of(row.nbytes), losses=of(row.losses))
