"""`eqquant quantize`."""

from typing import Annotated

import typer

from . import arguments
from .arguments import Axis, Output, Source, To
from .output import Progress


def quantize(
    source: Source,
    output: Output,
    format: Annotated[str | None, typer.Option("--format", "-f", help="nf4, or 'int4(block_size=32)'.")] = None,
    bits: Annotated[int | None, typer.Option(help="Integers of so many bits, instead of --format.")] = None,
    group_size: Annotated[int | None, typer.Option(help="With --bits: how many weights share a scale.")] = None,
    budget: Annotated[float | None, typer.Option(help="Mixes formats within so many bits per weight.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="A pattern of names to leave as they are.")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="'PATTERN=FORMAT', before --format; the first wins.")] = None,
    method: Annotated[str | None, typer.Option(help="absmax, mse or hqq.")] = None,
    axis: Axis = None,
    to: To = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Shows the plan, and writes nothing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replaces the output if it exists.")] = False,
) -> None:
    """Quantizes a checkpoint.

    Takes one of any library, goes through it an array at a time, and saves it as a file of eqquant, or with --to as
    one of another library.

    Example: eqquant quantize model.safetensors model.nf4.safetensors --format nf4 --skip '*pooler*'
    """
    import eqquant as eqq

    checkpoint = arguments.open_source(source)
    arguments.check_checkpoint(output, checkpoint, to, force)
    found_by = arguments.method_of(method)
    arguments.check_patterns(checkpoint, rule or (), skip or ())
    weights = [row.name for row in checkpoint.rows if len(row.shape) > 1]
    if budget is not None:
        if format is not None or bits is not None or group_size is not None:
            raise typer.BadParameter("--budget chooses the formats. Leave out --format, --bits and --group-size.")
        from .plan import plan_of

        chosen = dict(plan_of(checkpoint, budget, axis, found_by))
        rules = arguments.rules_of(eqq.NF4(), rule or (), skip or (), weights, to)
        rules.pop("*", None)
        rules |= {name: chosen[name] for name in arguments.left(chosen, rules)}
    else:
        found = arguments.format_of(format, bits, group_size)
        rules = arguments.rules_of(found, rule or (), skip or (), weights, to)
    plan = eqq.plan_tree(eqq.io.skeleton(checkpoint), rules, axis=axis, method=found_by)
    if dry_run:
        typer.echo(plan)
        return
    with Progress("Quantizing", len(checkpoint)) as progress:
        report = eqq.io.convert(
            checkpoint, output, rules, axis=axis, method=found_by, dialect=to, each=progress.measured
        )
    typer.echo(f"{output}: {progress.headline(checkpoint.nbytes, report)}")
