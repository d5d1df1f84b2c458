"""Pictures of results. Matplotlib is imported when one is drawn, and never needed otherwise."""

from collections.abc import Sequence
from typing import Any

import numpy as np


# Okabe and Ito's colours, which the colour-blind tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
COLOURS = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9", "#F0E442", "#000000")


def axes_or_new(ax: Any, size: tuple[float, float]) -> Any:
    """The axes that were given, or those of a new figure, which pyplot does not know: no window, nothing to close."""
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]
    except ImportError as e:
        raise ImportError(
            "`plot` needs Matplotlib, which is not installed. Got no module named 'matplotlib'. Run "
            "`pip install eqquant[plot]`."
        ) from e
    return Figure(figsize=size, layout="constrained").subplots()


def draw_bars(
    ax: Any, names: Sequence[str], values: Sequence[float], label: str, groups: Sequence[str] | None = None
) -> Any:
    """One bar for each name, from the top down; coloured by group, with a legend where there are several groups."""
    ax = axes_or_new(ax, (7.0, 0.8 + 0.2 * len(names)))
    groups = [""] * len(names) if groups is None else groups
    kinds = list(dict.fromkeys(groups))
    for n, kind in enumerate(kinds):
        rows = [row for row, group in enumerate(groups) if group == kind]
        # A value that is not finite has no bar.
        widths = [values[row] if np.isfinite(values[row]) else 0.0 for row in rows]
        ax.barh(rows, widths, color=COLOURS[n % len(COLOURS)], label=kind)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.invert_yaxis()
    ax.margins(y=0.01)
    ax.set_xlabel(label)
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    if len(kinds) > 1:
        ax.legend(fontsize=8)
    return ax


def draw_front(ax: Any, names: Sequence[str], bits: Sequence[float], errors: Sequence[float], label: str) -> Any:
    """Error against bits. The line joins those that nothing with as few bits beats: the Pareto front."""
    ax = axes_or_new(ax, (7.5, 5.0))
    best = on_front(bits, errors)
    colours = [BLUE if n in best else GREY for n in range(len(bits))]
    ax.plot([bits[n] for n in best], [errors[n] for n in best], color=BLUE, zorder=1, label="Pareto front")
    ax.scatter(bits, errors, s=22, color=colours, zorder=3)
    ax.set_yscale("log")
    ax.margins(x=0.08)
    ax.set_xlabel("bits per weight, scales included")
    ax.set_ylabel(label)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    _label_points(ax, names, np.array([bits, errors]).T, colours)
    return ax


def _label_points(ax: Any, names: Sequence[str], points: np.ndarray, colours: Sequence[str]) -> None:
    """Names beside points, towards the middle of the axes. Those of points side by side are below one another."""
    ax.figure.canvas.draw()  # the layout decides where points are
    to_points = 72 / ax.figure.dpi
    places = ax.transData.transform(points) * to_points
    middle = ax.transAxes.transform((0.5, 0.5))[0] * to_points
    columns: list[list[int]] = []
    for n in np.argsort(places[:, 0]):
        if columns and places[n, 0] - places[columns[-1][-1], 0] < 30:
            columns[-1].append(int(n))
        else:
            columns.append([int(n)])
    for column in columns:
        left = places[column, 0].mean() > middle
        start = places[column, 0].min() - 12 if left else places[column, 0].max() + 12
        for n, line in _spread(column, places[:, 1], 9.0):
            ax.annotate(
                names[n],
                points[n],
                xytext=(start - places[n, 0], line - places[n, 1]),
                textcoords="offset points",
                ha="right" if left else "left",
                va="center",
                fontsize=7,
                color=colours[n],
                bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.7},
                arrowprops={
                    "arrowstyle": "-",
                    "color": colours[n],
                    "linewidth": 0.5,
                    "relpos": (float(left), 0.5),
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
            )


def _spread(items: Sequence[int], wanted: np.ndarray, height: float) -> list[tuple[int, float]]:
    """Lines of text at about the wanted heights, from the top down, without overlap."""
    groups: list[list[int]] = []
    centre = lambda group: float(wanted[group].mean())
    for n in sorted(items, key=lambda n: -wanted[n]):
        groups.append([n])
        while len(groups) > 1 and centre(groups[-2]) - centre(groups[-1]) < height * len(groups[-2] + groups[-1]) / 2:
            last = groups.pop()
            groups[-1] = groups[-1] + last
    return [(n, centre(g) + height * ((len(g) - 1) / 2 - k)) for g in groups for k, n in enumerate(g)]


def on_front(bits: Sequence[float], errors: Sequence[float]) -> list[int]:
    """The places of those with a smaller error than all that take as few bits, in the order of their bits."""
    front, least = [], np.inf
    for n in sorted(range(len(bits)), key=lambda n: (bits[n], errors[n])):
        if errors[n] < least:
            front.append(n)
            least = errors[n]
    return front


def draw_histogram(ax: Any, values: np.ndarray, lines: np.ndarray, labels: tuple[str, str, str]) -> Any:
    """A histogram of values, and vertical lines; `labels` are those of the values, the lines and the axis."""
    ax = axes_or_new(ax, (7.0, 3.5))
    for n, line in enumerate(lines):
        ax.axvline(line, color=ORANGE, linewidth=1.0, label=labels[1] if n == 0 else None)
    ax.hist(values, bins=200, color=BLUE, alpha=0.85, label=labels[0])
    ax.set_xlabel(labels[2])
    ax.set_ylabel("values")
    ax.legend(fontsize=8)
    return ax
