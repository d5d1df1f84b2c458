"""`eqquant formats`."""

import inspect
import json as json_
import re

import typer

from .arguments import formats_by_name, Json
from .output import print_table


def formats(json: Json = False) -> None:
    """Lists the formats.

    For each: its name with its fields and their defaults, bits per weight, and a description.

    Example: eqquant formats
    """
    import jax
    import numpy as np

    import eqquant as eqq

    weight = {"w": jax.ShapeDtypeStruct((2, 4096), np.float32)}
    rows = []
    for name, cls in formats_by_name().items():
        fields = {name: p.default for name, p in inspect.signature(cls).parameters.items()}
        shown = ", ".join(f if v is inspect.Parameter.empty else f"{f}={v!r}" for f, v in fields.items())
        # The first sentence, without its formula.
        sentence = re.split(r"[:,] \$|\. |\n\n", inspect.getdoc(cls) or "")[0]
        what = re.sub(r"\[`eqquant\.(?:\w+\.)*(\w+)`\]\[\]", r"\1", sentence.replace("\n", " "))
        what = re.sub(r"[$\\]", "", what.replace(r"\ldots", "...")).rstrip(".")
        complete = inspect.Parameter.empty not in fields.values()
        bits = eqq.plan_tree(weight, name).quantized_bits if complete else None
        rows.append({"name": name, "fields": shown, "bits": bits, "what": what})
    rows.sort(key=lambda row: row["bits"] or 0)
    if json:
        typer.echo(json_.dumps(rows, indent=1))
        return
    shown = [(f"{row['name']}({row['fields']})", _bits(row["bits"]), row["what"]) for row in rows]
    print_table(("format", "bits/weight", "description"), shown, numeric=(1,))
    typer.echo("Bits per weight include scales, in a row of 4096 weights.")


def _bits(bits: float | None) -> str:
    return "" if bits is None else f"{bits:.2f}"
