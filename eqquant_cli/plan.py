"""`eqquant plan`."""

import dataclasses
import math
from collections.abc import Collection
from typing import Annotated, TYPE_CHECKING

import typer

from .arguments import Axis, Json, left, list_weights, open_source, parse_format, parse_method, Rules, Source


if TYPE_CHECKING:
    import jax

    import eqquant as eqq
    from eqquant._types import PyTree
    from eqquant.analysis._plan import BitPlan
    from eqquant.analysis._sensitivity import LeafSensitivity


def plan(
    source: Source,
    budget: Annotated[float, typer.Option(help="The bits per weight to stay within, scales included.")] = 4.5,
    formats: Annotated[list[str] | None, typer.Option("--format", "-f", help="A format to choose from.")] = None,
    method: Annotated[str | None, typer.Option(help="absmax, mse, joint_mse or hqq.")] = None,
    axis: Axis = None,
    json: Json = False,
) -> None:
    """Plans formats within a budget of bits.

    Judges by the errors of the weights alone, and by their roles. With data, `eqquant.analysis.sensitivity` measures
    what they do to a model.

    Example: eqquant plan model.safetensors --budget 4.2
    """
    chosen = make_plan(open_source(source), budget, axis, parse_method(method), formats)
    typer.echo(chosen.to_json(indent=1) if json else chosen)


# The options of a budget, by layout.
_CANDIDATES = {
    "gguf": ("q2_k", "q3_k", "q4_0", "iq4_xs", "q4_k", "q5_0", "q5_k", "q6_k", "q8_0"),
    "bitsandbytes": ("nf4", "int8"),
    "compressed-tensors": (*(f"int{bits}({size})" for bits in (2, 3, 4, 5, 6) for size in (128, 32)), "int8(128)"),
    "fp8": ("fp8(block_size=(128, 128))",),
    "gptq": ("int2(64)", "int3(64)", "int4(64)", "int8(64)"),
    "modelopt": ("nvfp4", "fp8(block_size='tensor')"),
    "mlx": (*(f"mlx({bits}, {size})" for bits in (2, 3, 4, 5, 6) for size in (128, 64)), "mlx(8)"),
}
_ALIKE = ("bitsandbytes", "fp8", "gptq")  # layouts with a single format for all quantized weights


def make_plan(
    checkpoint: "eqq.io.Checkpoint",
    budget: float,
    axis: int | None,
    method: "eqq.extend.AbstractMethod | None",
    formats: list[str] | None = None,
    dialect: str | None = None,
    rules: Rules | None = None,
) -> "BitPlan":
    """Returns the plan for the weights that no rule matches. Reads one array at a time.

    The weights that rules quantize count too, so that all that is quantized stays within the budget.
    """
    import eqquant as eqq
    from eqquant.analysis import plan_bits
    from eqquant.analysis._sensitivity import ALL_WIDTHS, SensitivityReport
    from eqquant.io._convert import skeleton

    spelled, rules = formats or _CANDIDATES.get(dialect or "ours"), rules or {}
    options = list(dict.fromkeys(map(parse_format, spelled) if spelled else ALL_WIDTHS))
    shapes, weights = skeleton(checkpoint), left(list_weights(checkpoint), rules)
    ruled = []
    if any(rules.values()):
        ruled = [leaf for leaf in eqq.plan_tree(shapes, rules, axis=axis).leaves if leaf.format]
    rows = _measure_sensitivity(checkpoint, shapes, weights, options, axis, method, dialect)
    given, size = sum(leaf.nbytes for leaf in ruled), sum(row.size for row in rows)
    total = size + sum(math.prod(leaf.shape) for leaf in ruled)
    mixes = [[f] for f in options] if dialect in _ALIKE else [options]
    reports = [SensitivityReport(0.0, tuple(_only(row, mix) for row in rows), measured=False) for mix in mixes]
    least = [
        8 * (given + sum(min((*row.nbytes, row.dense_nbytes)) for row in report.leaves)) / total for report in reports
    ]
    if not budget >= min(least):
        smallest = min((f for f in options if any(f in row.formats for row in rows)), key=lambda f: f.bits)
        reach = f"{math.ceil(100 * min(least)) / 100:.2f} bits per weight"
        smaller = ", or let `eqquant plan` choose from smaller formats, such as --format binary"
        raise ValueError(
            f"--budget must be at least {reach}, which {smallest} needs with its scales"
            f"{' beside the formats of --rule' if ruled else ''}. Got {budget}. Raise it{'' if dialect else smaller}."
        )
    bits = (budget * total - 8 * given) / size
    plans = [plan_bits(shapes, report, bits) for report, bound in zip(reports, least, strict=True) if budget >= bound]
    best = min(plans, key=lambda plan: plan.increase)
    if not ruled and not any(best.values()):
        raise ValueError(
            f"--budget must leave something to quantize. Got {budget}, within which all floats fit. Lower it."
        )
    return best


def _measure_sensitivity(
    checkpoint: "eqq.io.Checkpoint",
    shapes: "PyTree",
    weights: list[str],
    options: "list[eqq.extend.AbstractFormat]",
    axis: int | None,
    method: "eqq.extend.AbstractMethod | None",
    dialect: str | None,
) -> "list[LeafSensitivity]":
    """Returns the errors of each weight in the formats that the layout `dialect` supports for it."""
    import eqquant as eqq
    from eqquant._tree.leaves import named_leaves
    from eqquant.analysis import weight_sensitivity
    from eqquant.io._convert import find_fitting

    from .output import Progress

    wanted = set(weights)
    fits = {f: wanted if dialect is None else find_fitting(checkpoint, f, axis, dialect) for f in options}
    for name in weights:
        if not any(name in names for names in fits.values()):
            raise ValueError(
                f"--budget must reach every weight, and the layout of {dialect} cannot hold {name!r}, whose shape is "
                f"{checkpoint.items_by_name[name].struct.shape}, in any of its formats. To leave it in float, "
                f"beside the budget: --skip '{name}'."
            )
    with Progress("Measuring", len(weights)) as progress:

        def read(name: str) -> "jax.Array":
            x = eqq.dequantize(checkpoint[name])
            progress.advance()
            return x

        def where(tree: "PyTree") -> "PyTree":
            return [leaf.value for leaf in named_leaves(tree) if leaf.path in wanted]

        report = weight_sensitivity(shapes, options, where=where, axis=axis, method=method, read=read)
    # The whole command has one method, so formats are enough.
    rows = [dataclasses.replace(row, formats=tuple(options)) for row in report.leaves]
    return [_only(row, [f for f in options if row.paths[0] in fits[f]]) for row in rows]


def _only(row: "LeafSensitivity", formats: "Collection[eqq.extend.AbstractFormat]") -> "LeafSensitivity":
    """Returns the sensitivity of a weight for some of the formats."""
    kept = [n for n, f in enumerate(row.formats) if f in formats]
    pick = lambda values: tuple(values[n] for n in kept)
    return dataclasses.replace(row, formats=pick(row.formats), nbytes=pick(row.nbytes), losses=pick(row.losses))
