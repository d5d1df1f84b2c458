"""`eqquant inspect`."""

import typer

from .arguments import Json, Source


def inspect(path: Source, json: Json = False) -> None:
    """Lists the arrays of a checkpoint.

    Their shapes, formats, bits per weight and bytes, without reading them.

    Example: eqquant inspect model.gguf
    """
    import eqquant as eqq

    checkpoint = eqq.io.open(path)
    typer.echo(checkpoint.to_json(indent=1) if json else str(checkpoint))
