"""`eqquant convert`."""

from typing import Annotated

import typer

from . import arguments
from .arguments import Dialect, Output, Source
from .output import Progress


def convert(
    source: Source,
    output: Output,
    dialect: Dialect = None,
    force: Annotated[bool, typer.Option("--force", help="Replaces the output if it exists.")] = False,
) -> None:
    """Saves a checkpoint as a file of eqquant, or of another library.

    Takes one of any library. Quantized weights keep their values, and arrays their names. So the other library must
    have their formats; if it has not, quantize the float checkpoint.

    Example: eqquant convert model-gptq model-ct --dialect compressed-tensors
    """
    checkpoint = arguments.open_source(source)
    dialect = arguments.choose_dialect(dialect, output)
    arguments.check_checkpoint(output, checkpoint, dialect, force)
    with Progress("Converting", len(checkpoint)) as progress:
        report = arguments.write_checkpoint(checkpoint, output, dialect=dialect, each=progress.advance)
    typer.echo(f"{output}: {progress.headline(checkpoint.nbytes, report)}")
