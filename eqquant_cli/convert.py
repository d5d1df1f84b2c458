"""`eqquant convert`."""

from pathlib import Path
from typing import Annotated

import typer

from . import arguments
from .arguments import Source
from .output import Progress


def convert(
    source: Source,
    output: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replaces the output if it exists.")] = False,
) -> None:
    """Saves a checkpoint as a file of eqquant.

    Takes one of any library. Quantized weights keep their values.

    Example: eqquant convert model.gguf model.safetensors
    """
    import eqquant as eqq

    arguments.check_output(output, source, ".safetensors", force)
    checkpoint = arguments.open_source(source)
    with Progress("Converting", len(checkpoint)) as progress:
        report = eqq.io.convert(checkpoint, output, each=progress.counted)
    typer.echo(f"{output}: {progress.headline(checkpoint.nbytes, report)}")
