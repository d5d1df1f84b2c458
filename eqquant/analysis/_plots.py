"""Pictures of results. Matplotlib is imported when one is drawn, and never needed otherwise."""

import types
from collections.abc import Sequence
from typing import Any

import numpy as np


# Okabe and Ito's colours, which the colour-blind tell apart.
BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#666666"
COLOURS = (BLUE, ORANGE, GREEN, RED, "#CC79A7", "#56B4E9", "#F0E442", "#000000")


def pyplot() -> types.ModuleType:
    try:
        import matplotlib.pyplot
    except ImportError as e:
        raise ImportError(
            "`plot` needs Matplotlib, which is not installed. Got no module named 'matplotlib'. Run "
            "`pip install matplotlib`."
        ) from e
    return matplotlib.pyplot


def axes_or_new(ax: Any, size: tuple[float, float]) -> Any:
    """The axes that were given, or those of a new figure."""
    return pyplot().subplots(figsize=size, layout="constrained")[1] if ax is None else ax


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
    ax = axes_or_new(ax, (7.0, 4.5))
    best = on_front(bits, errors)
    ax.plot([bits[n] for n in best], [errors[n] for n in best], color=BLUE, zorder=1, label="Pareto front")
    ax.scatter(bits, errors, s=22, color=[BLUE if n in best else GREY for n in range(len(bits))], zorder=2)
    for n, name in enumerate(names):
        place = {"xytext": (4, -3), "ha": "left", "va": "top"} if n not in best else {"xytext": (4, 4), "ha": "left"}
        ax.annotate(name, (bits[n], errors[n]), textcoords="offset points", fontsize=7, **place)
    ax.set_yscale("log")
    ax.margins(x=0.12)
    ax.set_xlabel("bits per weight, scales included")
    ax.set_ylabel(label)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return ax


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
