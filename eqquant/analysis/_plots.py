"""Plots of results. Imports Matplotlib, an optional dependency, only to draw one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TYPE_CHECKING

import numpy as np


if TYPE_CHECKING:
    from matplotlib.axes import Axes
else:
    Axes = Any  # Matplotlib may be missing

# Okabe and Ito's palette, for color-blind readers.
BLUE, ORANGE, GREEN, RED, GRAY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#808080"
COLORS = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9", "#F0E442", GRAY)
MARKERS = "osD^vPX*"


def make_axes(ax: Axes | None, size: tuple[float, float]) -> Axes:
    """Returns the given axes, or the axes of a new figure.

    A new figure is outside pyplot, so it opens no window and needs no closing. It has a transparent background and gray
    text, which is readable on light and on dark pages.
    """
    if ax is not None:
        return ax
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise ImportError(
            "`plot` needs Matplotlib, which is not installed. Got no module named 'matplotlib'. Run "
            '`pip install "eqquant[plot]"`.'
        ) from e
    ax = Figure(figsize=size, layout="constrained", facecolor="none").subplots()
    ax.set_facecolor("none")
    ax.tick_params(which="both", color=GRAY, labelcolor=GRAY)
    for text in (ax.title, ax.xaxis.label, ax.yaxis.label):
        text.set_color(GRAY)
    for side, spine in ax.spines.items():
        spine.set_color(GRAY)
        spine.set_visible(side in ("left", "bottom"))
    return ax


def _finish_axes(ax: Axes, title: str, grid: Literal["both", "x", "y"] = "both", **legend: Any) -> Axes:
    """Adds a title, a light grid and, if any artist has a label, a legend."""
    ax.set_title(title, fontsize=10)
    ax.grid(axis=grid, alpha=0.3)
    ax.set_axisbelow(True)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(**{"fontsize": 8, "framealpha": 0, "labelcolor": ax.xaxis.label.get_color(), **legend})
    return ax


def _name_rows(ax: Axes, names: Sequence[str]) -> None:
    """Labels each row, from the top down; only every n-th row if not all labels fit."""
    room = ax.get_window_extent().height * 72 / ax.figure.dpi
    every = max(math.ceil(len(names) * 9 / max(room, 9)), 1)
    shown = range(0, len(names), every)
    ax.set_yticks(shown, [names[n] for n in shown], fontsize=8)
    ax.set_ylim(len(names) - 0.4, -0.6)


def draw_bars(
    ax: Axes | None, names: Sequence[str], values: Sequence[float], labels: tuple[str, str], groups: Sequence[str]
) -> Axes:
    """Draws one bar for each name, colored by group.

    `labels` are the title and the label of the x-axis.
    """
    ax = make_axes(ax, (7.0, 1.2 + 0.2 * len(names)))
    for n, kind in enumerate(dict.fromkeys(groups)):
        rows = [row for row, group in enumerate(groups) if group == kind]
        # Matplotlib cannot draw a bar of infinite or NaN width.
        widths = [values[row] if np.isfinite(values[row]) else 0.0 for row in rows]
        ax.barh(rows, widths, color=COLORS[n % len(COLORS)], label=kind)
    _name_rows(ax, names)
    ax.set_xlabel(labels[1])
    # Below the axes, since bars may fill them: 36 points, which the label of the x-axis needs.
    legend_offset = -36 * ax.figure.dpi / 72 / ax.get_window_extent().height
    return _finish_axes(ax, labels[0], "x", loc="upper center", bbox_to_anchor=(0.5, legend_offset), ncols=3)


def draw_dots(
    ax: Axes | None, names: Sequence[str], groups: Mapping[str, Sequence[float]], labels: tuple[str, str]
) -> Axes:
    """Draws a dot for each name and group on a logarithmic axis, without values <= 0."""
    ax = make_axes(ax, (7.0, 1.2 + 0.2 * len(names)))
    for n, (group, values) in enumerate(groups.items()):
        positions = [(value, row) for row, value in enumerate(values) if np.isfinite(value) and value > 0]
        x, y = zip(*positions, strict=True) if positions else ((), ())
        ax.scatter(x, y, s=24, color=COLORS[n % len(COLORS)], marker=MARKERS[n % len(MARKERS)], label=group)
    if any(value > 0 for values in groups.values() for value in values):
        ax.set_xscale("log")
    _name_rows(ax, names)
    ax.set_xlabel(labels[1])
    return _finish_axes(ax, labels[0])


def draw_front(
    ax: Axes | None, names: Sequence[str], bits: Sequence[float], errors: Sequence[float], labels: tuple[str, str]
) -> Axes:
    """Draws the error against the bits. The line is the Pareto front."""
    ax = make_axes(ax, (7.5, 5.0))
    best = find_front(bits, errors)
    colors = [BLUE if n in best else GRAY for n in range(len(bits))]
    ax.plot([bits[n] for n in best], [errors[n] for n in best], color=BLUE, zorder=1, label="Pareto front")
    ax.scatter(bits, errors, s=22, color=colors, zorder=3)
    if min(errors) > 0:
        ax.set_yscale("log")
    ax.margins(x=0.08)
    ax.set_xlabel("bits per weight, scales included")
    ax.set_ylabel(labels[1])
    _finish_axes(ax, labels[0])
    _label_points(ax, names, np.array([bits, errors]).T, colors)
    return ax


def _label_points(ax: Axes, names: Sequence[str], points: np.ndarray, colors: Sequence[str]) -> None:
    """Writes the names of points toward the middle of the axes, stacked where points are near."""
    ax.figure.canvas.draw()  # the positions of points are known only after the layout
    to_points = 72 / ax.figure.dpi
    positions = ax.transData.transform(points) * to_points
    middle = ax.transAxes.transform((0.5, 0.5))[0] * to_points
    columns: list[list[int]] = []
    for n in map(int, np.argsort(positions[:, 0])):
        if not columns or positions[n, 0] - positions[columns[-1][-1], 0] >= 30:
            columns.append([])
        columns[-1].append(n)
    for column in columns:
        is_left = positions[column, 0].mean() > middle
        start = positions[column, 0].min() - 12 if is_left else positions[column, 0].max() + 12
        text = {"ha": "right" if is_left else "left", "va": "center", "fontsize": 8, "textcoords": "offset points"}
        arrow = {"arrowstyle": "-", "linewidth": 0.5, "relpos": (float(is_left), 0.5), "shrinkA": 0, "shrinkB": 0}
        for n, line in _spread(column, positions[:, 1], 10.0):
            offset, style = (start - positions[n, 0], line - positions[n, 1]), arrow | {"color": colors[n]}
            ax.annotate(names[n], points[n], xytext=offset, color=colors[n], arrowprops=style, **text)


def _spread(items: Sequence[int], wanted: np.ndarray, height: float) -> list[tuple[int, float]]:
    """Places lines of text near the wanted heights, from the top down, without overlap."""
    groups: list[list[int]] = []
    center = lambda group: float(wanted[group].mean())
    for n in sorted(items, key=lambda n: -wanted[n]):
        groups.append([n])
        while len(groups) > 1 and center(groups[-2]) - center(groups[-1]) < height * len(groups[-2] + groups[-1]) / 2:
            last = groups.pop()
            groups[-1] = groups[-1] + last
    return [(n, center(g) + height * ((len(g) - 1) / 2 - k)) for g in groups for k, n in enumerate(g)]


def find_front(bits: Sequence[float], errors: Sequence[float]) -> list[int]:
    """Returns the indices of the points of the Pareto front, in the order of bits."""
    front, best_error = [], np.inf
    for n in sorted(range(len(bits)), key=lambda n: (bits[n], errors[n])):
        if errors[n] < best_error:
            front.append(n)
            best_error = errors[n]
    return front


def draw_histogram(ax: Axes | None, values: np.ndarray, lines: np.ndarray, labels: tuple[str, str, str, str]) -> Axes:
    """Draws a histogram and vertical lines.

    `labels` name the figure, the values, the lines and the x-axis.
    """
    ax = make_axes(ax, (7.0, 3.5))
    for n, line in enumerate(lines):
        ax.axvline(line, color=ORANGE, linewidth=1.0, label=labels[2] if n == 0 else None)
    # The square root of the number of values, so that few values do not scatter over many empty bins.
    bins = int(np.clip(math.isqrt(values.size), 8, 200))
    ax.hist(values, bins=bins, color=BLUE, alpha=0.85, label=labels[1])
    ax.ticklabel_format(axis="x", useOffset=False)
    ax.locator_params(axis="x", nbins=6)
    ax.set_xlabel(labels[3])
    ax.set_ylabel(labels[1])
    return _finish_axes(ax, labels[0], "y")
