"""`eqquant inspect`."""

import typer

from .arguments import Json, open_source, Source


def inspect(path: Source, json: Json = False) -> None:
    """Lists the arrays of a checkpoint.

    Their shapes, formats, bits per weight and bytes, without reading them.

    Example: eqquant inspect model.gguf
    """
    checkpoint = open_source(path)
    typer.echo(checkpoint.to_json(indent=1) if json else str(checkpoint))
