"""`eqquant quantize`."""

import dataclasses
from typing import Annotated

import typer

from . import arguments
from .arguments import Axis, Dialect, Output, Source
from .output import Progress


def quantize(
    source: Source,
    output: Output,
    format: Annotated[str | None, typer.Option("--format", "-f", help="nf4, or 'int4(block_size=32)'.")] = None,
    bits: Annotated[int | None, typer.Option(help="Integers of so many bits, instead of --format.")] = None,
    group_size: Annotated[int | None, typer.Option(help="With --bits: how many weights share a scale.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Mixes formats within this many bits per weight, rules included.")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="A pattern of names to leave as they are.")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="'PATTERN=FORMAT', before --format; the first wins.")] = None,
    method: Annotated[str | None, typer.Option(help="absmax, mse, joint_mse or hqq.")] = None,
    axis: Axis = None,
    dialect: Dialect = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Shows the plan, and writes nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replaces the output if it exists.")] = False,
) -> None:
    """Quantizes a checkpoint.

    Takes one of any library, goes through it an array at a time, and saves it as a file of eqquant, or with --dialect
    as one of another library.

    Example: eqquant quantize model.safetensors model.nf4.safetensors --format nf4 --skip '*pooler*'
    """
    checkpoint = arguments.open_source(source)
    dialect = arguments.choose_dialect(dialect, output)
    arguments.check_checkpoint(output, checkpoint, dialect, force)
    found_by = arguments.parse_method(method)
    arguments.check_patterns(checkpoint, rule or (), skip or ())
    weights = arguments.list_weights(checkpoint)
    if budget is not None:
        if format is not None or bits is not None or group_size is not None:
            raise typer.BadParameter("--budget chooses the formats. Leave out --format, --bits and --group-size.")
        from .plan import make_plan

        rules = arguments.parse_rules(None, rule or (), skip or (), weights, dialect)
        if arguments.left(weights, rules):
            rules = {**rules, **make_plan(checkpoint, budget, axis, found_by, dialect=dialect, rules=rules)}
    else:
        found = arguments.choose_format(format, bits, group_size, dialect)
        rules = arguments.parse_rules(found, rule or (), skip or (), weights, dialect)
    if dry_run:
        from eqquant.io._convert import plan

        planned = plan(checkpoint, rules, axis=axis, method=found_by, dialect=dialect)
        stored = {row.name: row.nbytes for row in checkpoint.rows}
        leaves = tuple(leaf._replace(dense_nbytes=stored[leaf.path]) for leaf in planned.leaves)
        typer.echo(dataclasses.replace(planned, leaves=leaves))
        return
    with Progress("Quantizing", len(checkpoint)) as progress:
        report = arguments.write_checkpoint(
            checkpoint, output, rules, axis=axis, method=found_by, dialect=dialect, each=progress.advance_and_measure
        )
    typer.echo(f"{output}: {progress.headline(checkpoint.nbytes, report)}")
