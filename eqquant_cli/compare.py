"""`eqquant compare`."""

import json as json_
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, TYPE_CHECKING

import typer

from .arguments import check_output, Json, open_source, Source
from .output import draw_errors, print_table


if TYPE_CHECKING:
    import eqquant as eqq
    from eqquant.io._lazy import LazyMapping


def compare(
    a: Source,
    b: Annotated[Path, typer.Argument(metavar="OTHER", help="The checkpoint to compare with it.")],
    json: Json = False,
    plot: Annotated[Path | None, typer.Option(help="Draws the errors into an .svg, .png or .pdf file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replaces the picture if it exists.")] = False,
) -> None:
    """Compares two checkpoints.

    Prints how far the arrays of one are from the arrays of the same names in the other.

    Example: eqquant compare model.safetensors model.nf4.safetensors
    """
    import jax.numpy as jnp
    import numpy as np

    import eqquant as eqq
    from eqquant.io._atomic import replace

    one, other = open_source(a), open_source(b)
    if plot is not None:
        if plot.suffix not in _PICTURES:
            raise ValueError(
                f"The picture must end in {', '.join(_PICTURES[:-1])} or {_PICTURES[-1]}. Got {str(plot)!r}."
            )
        check_output(plot, plot.suffix, force, one, other)
    shared = _list_common(one, other)
    if not shared:  # a folder, and its conversion for llama.cpp
        one, other = _rename_paths(one, other), _rename_paths(other, one)
        shared = _list_common(one, other)
    if not shared:
        raise ValueError(f"{b} must have arrays of the names of {a}. Got none, such as {next(iter(other), 'none')!r}.")
    rows: list[dict[str, Any]] = []
    equal = 0
    for name in shared:
        stored = other[name]
        x, y = eqq.dequantize(one[name]), eqq.dequantize(stored)
        if x.shape != y.shape:
            raise ValueError(f"{name} must have one shape. Got {x.shape} in {a}, {y.shape} in {b}.")
        if np.array_equal(x, y, equal_nan=True):
            equal += 1
            continue
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be equal in both, since it holds no floats. Got other values.")
        try:
            error = eqq.analysis.analyze_error(x, y)
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from None
        stored_as = repr(stored.format) if eqq.is_quantized(stored) else str(stored.dtype)
        rows.append({"name": name, "stored_as": stored_as, **{k: v for k, v in error.to_dict().items() if k in _SHOWN}})
    missing = sorted({*one, *other} - set(shared))
    if plot is not None:
        figure = draw_errors({row["name"]: row["relative_l2"] for row in rows})
        with replace(plot) as new:
            figure.savefig(new, format=plot.suffix[1:])
    if json:
        typer.echo(json_.dumps({"arrays": rows, "equal": equal, "only_in_one": missing}, indent=1))
        return
    shown = [(row["name"], row["stored_as"], *(f"{row[key]:.4g}" for key in _SHOWN)) for row in rows]
    print_table(("array", f"in {b.name}", *_SHOWN.values()), shown, numeric=range(2, 6))
    if equal:
        typer.echo(f"{equal} other arrays are equal.")
    if missing:
        typer.echo(f"{len(missing)} arrays are in one of them only: {', '.join(missing[:10])}")


def _list_common(one: Iterable[str], other: Iterable[str]) -> list[str]:
    theirs = set(other)  # `in` of a mapping would read each array
    return [name for name in one if name in theirs]


def _rename_paths(checkpoint: "eqq.io.Checkpoint", other: "eqq.io.Checkpoint") -> "eqq.io.Checkpoint | LazyMapping":
    """Returns a checkpoint, with the names of llama.cpp if `other` is a GGUF file."""
    from eqquant.io._llama_cpp import for_llama_cpp

    return for_llama_cpp(checkpoint, checkpoint)[0] if other.dialect == "gguf" else checkpoint


_PICTURES = (".svg", ".png", ".pdf")
_SHOWN = {"relative_l2": "relative\nerror", "cosine": "cosine", "sqnr_db": "SQNR,\ndB", "max_error": "largest\nerror"}
