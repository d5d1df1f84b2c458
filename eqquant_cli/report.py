"""`eqquant report`."""

import html
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, cast, TYPE_CHECKING

import typer

from . import arguments
from .arguments import Axis, Source
from .output import draw_errors


if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure  # pyright: ignore[reportMissingImports]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; font-size: 0.85rem; }}
td, th {{ border-bottom: 1px solid #8886; padding: 0.2rem 0.8rem; text-align: left; }}
td:nth-child(n + 4), th:nth-child(n + 4) {{ text-align: right; font-variant-numeric: tabular-nums; }}
.scroll {{ overflow-x: auto; }}
svg {{ height: auto; max-width: 100%; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #111; color: #ddd; }} }}
</style></head><body>
<h1>{title}</h1><p>{head}</p>{body}</body></html>
"""


def report(
    source: Source,
    output: Annotated[Path, typer.Option("--output", "-o", help="The .html file to write.")],
    format: Annotated[str, typer.Option("--format", "-f", help="The format whose errors are shown.")] = "nf4",
    axis: Axis = None,
    force: Annotated[bool, typer.Option("--force", help="Replaces the output if it exists.")] = False,
) -> None:
    """Writes a page about a checkpoint.

    One file of HTML: sizes, the error of each weight, the values of the worst one, error against size.

    Example: eqquant report model.safetensors -o report.html
    """
    import eqquant as eqq
    from eqquant._report import show_bytes
    from eqquant.io._atomic import replace
    from eqquant.io._convert import skeleton

    checkpoint, picked = arguments.open_source(source), arguments.parse_format(format)
    arguments.check_output(output, ".html", force, checkpoint)
    plan = eqq.plan_tree(skeleton(checkpoint), picked, axis=axis)
    rows, worst = [], (0.0, "")
    for leaf in plan.leaves:
        stored_as, figures = leaf.reason, ("", "")
        if leaf.format is not None:
            w = eqq.dequantize(checkpoint[leaf.path])
            error = eqq.analysis.analyze_error(w, eqq.quantize(w, picked, axis=-1 if axis is None else axis))
            worst = max(worst, (error.relative_l2, leaf.path))
            stored_as, figures = repr(leaf.format), (f"{error.relative_l2:.4f}", f"{error.cosine:.6f}")
        rows.append((leaf.path, leaf.shape, stored_as, f"{leaf.bits:.2f}", f"{leaf.nbytes:,}", *figures))
    errors = {row[0]: float(row[5]) for row in rows if row[5]}
    w = eqq.dequantize(checkpoint[worst[1]])
    q = eqq.quantize(w, picked, axis=-1 if axis is None else axis)
    pictures = [
        ("The error of each weight", _svg(draw_errors(errors))),
        (f"The values of {worst[1]}, whose error is largest", _svg(eqq.analysis.analyze_error(w, q).plot().figure)),
        (f"Error against size, for {worst[1]}", _svg(eqq.analysis.compare_formats(w, axis=q.axis).plot().figure)),
    ]
    body = "".join(f"<h2>{html.escape(title)}</h2>{picture}" for title, picture in pictures)
    headers = ("array", "shape", "stored as", "bits/weight", "bytes", "relative error", "cosine")
    table = _row("th", headers) + "".join(_row("td", row) for row in rows)
    head = (
        f"{show_bytes(checkpoint.nbytes)} -> {show_bytes(plan.nbytes)} in {picked!r}, {plan.bits:.2f} bits per "
        f"weight, scales included. The largest relative error is {worst[0]:.4f}, in {worst[1]}."
    )
    body += f'<h2>All arrays</h2><div class="scroll"><table>{table}</table></div>'
    page = _PAGE.format(title=html.escape(source.name), head=html.escape(head), body=body)
    with replace(output) as new:
        new.write_bytes(page.encode())
    typer.echo(f"{output}: {head}")


def _row(tag: str, cells: Iterable[object]) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"


def _svg(figure: "Figure | SubFigure") -> str:
    """Returns a picture as text for a page, without the header of a file."""
    out = io.StringIO()
    cast("Figure", figure).savefig(out, format="svg")
    text = out.getvalue()
    return text[text.index("<svg") :]
