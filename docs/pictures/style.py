"""What all pictures share: two themes, axes, boxes and arrows, and files that change only when the picture does."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text


# Inches, at 72 points each. A narrow phone shrinks 5.2 inches to 0.7 of their size, so no text is below 8 points.
WIDTH = 5.2
TITLE, TEXT, SMALL = 10.5, 9, 8

matplotlib.rcParams.update(
    {
        "font.size": TEXT,
        # Laid out in DejaVu Sans. Verdana has its widths, and other fonts are narrower.
        "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"],
        "svg.fonttype": "none",  # text stays text: a tenth of the size of outlines, and searchable
        "svg.hashsalt": "eqquant",
        "axes.unicode_minus": False,
    }
)


@dataclasses.dataclass(frozen=True)
class Theme:
    """Colors for one scheme of the site: those of Okabe and Ito, which the color-blind can tell apart, or lighter."""

    name: str
    text: str
    muted: str
    faint: str
    page: str
    blue: str
    orange: str
    green: str
    red: str
    purple: str

    @property
    def series(self) -> tuple[str, ...]:
        return self.blue, self.orange, self.green, self.purple, self.red


LIGHT = Theme(
    "light", "#20242c", "#5b6270", "#d5d9e0", "#ffffff", "#0072b2", "#e69f00", "#009e73", "#d55e00", "#b3588a"
)
DARK = Theme("dark", "#e4e7ee", "#a4acba", "#454c5a", "#1e2129", "#56b4e9", "#f0b429", "#2cc295", "#ff8552", "#e29bc6")
THEMES = LIGHT, DARK


def mix(color: str, with_: str, share: float) -> str:
    """`share` of one color and the rest of another. Opaque, unlike an alpha, so that lines behind do not show."""
    parts = [[int(c[n : n + 2], 16) for n in (1, 3, 5)] for c in (color, with_)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in zip(*parts, strict=True))


def figure(height: float, width: float = WIDTH) -> Figure:
    return Figure(figsize=(width, height), layout="constrained", facecolor="none")


def dress(ax: Any, theme: Theme, title: str = "", x: str = "", y: str = "", grid: str = "both") -> Any:
    """Gives axes the colors of the theme, a title and labels."""
    ax.set_facecolor("none")
    ax.title.set_color(theme.text)  # of the library's plots
    ax.set_title(title, fontsize=TITLE, color=theme.text, loc="left")
    ax.set_xlabel(x, color=theme.muted)
    ax.set_ylabel(y, color=theme.muted)
    ax.tick_params(which="both", color=theme.muted, labelcolor=theme.muted, labelsize=TEXT)
    ax.set_axisbelow(True)
    if grid:
        ax.grid(axis=grid, color=theme.faint, linewidth=0.6)
    for side, spine in ax.spines.items():
        spine.set_color(theme.muted)
        spine.set_visible(side in ("left", "bottom"))
    return ax


def legend(ax: Any, theme: Theme, **options: Any) -> None:
    ax.legend(**{"fontsize": SMALL, "framealpha": 0, "labelcolor": theme.text, **options})


def canvas(height: float, theme: Theme, title: str, width: float = WIDTH) -> Any:
    """Axes for a diagram: one unit is an inch, the origin is at the bottom left, and nothing is drawn but the title."""
    ax = Figure(figsize=(width, height), facecolor="none").add_axes((0, 0, 1, 1))
    ax.set_axis_off()
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.text(0.02, height - 0.08, title, fontsize=TITLE, color=theme.text, va="top")
    return ax


def box(
    ax: Any, theme: Theme, place: tuple[float, float, float, float], text: str = "", color: str = "", **options: Any
) -> None:
    """A box at `(x, y, width, height)`, filled with a light shade of its color, with text in the middle."""
    x, y, width, height = place
    color = color or theme.muted
    round_ = options.pop("round", 0.05)
    ax.add_patch(
        FancyBboxPatch(
            (x, y),
            width,
            height,
            boxstyle=f"round,pad=0,rounding_size={round_}" if round_ else "square,pad=0",
            facecolor=mix(color, theme.page, options.pop("shade", 0.2)),
            edgecolor=color,
            linewidth=options.pop("line", 1.0),
        )
    )
    style = {"fontsize": TEXT, "color": theme.text, "ha": "center", "va": "center", **options}
    ax.text(x + width / 2, y + height / 2, text, **style)


def arrow(ax: Any, theme: Theme, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": theme.muted, "linewidth": 1.1})


def write(figure: Figure, path: Path, theme: Theme) -> None:
    """Writes an SVG without a date and a version, and with names of clip paths that depend on the picture alone."""
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    text = path.read_text()
    text = re.sub(r"<\?xml.*?\?>\n|<!DOCTYPE.*?>\n|<!--.*?-->\n", "", text, flags=re.S)
    text = re.sub(r" <metadata>.*?</metadata>\n", "", text, flags=re.S)
    # The plots of the library have the colors of light pages, and gray.
    for field in ("blue", "orange", "green", "red"):
        text = text.replace(getattr(LIGHT, field), getattr(theme, field))
    text = text.replace("#808080", theme.muted)
    path.write_text("\n".join(line.strip() for line in text.splitlines()) + "\n")


def collisions(figure: Figure) -> list[str]:
    """Texts of the same axes that overlap, and texts that leave the picture."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer, edge, found = canvas.get_renderer(), figure.bbox, []
    for ax in figure.axes:
        texts = [*ax.texts, ax.title, ax._left_title]
        for axis in (ax.xaxis, ax.yaxis) if ax.axison else ():
            low, high = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
            texts += [tick.label1 for tick in ticks if tick.label1.get_visible()]
        # Of the text alone: that of an annotation includes its arrow.
        extent = lambda text: Text.get_window_extent(text, renderer).padded(-1)
        places = [(t.get_text(), extent(t)) for t in texts if t.get_text().strip()]
        for n, (text, a) in enumerate(places):
            if a.x0 < edge.x0 - 2 or a.x1 > edge.x1 + 2 or a.y0 < edge.y0 - 2 or a.y1 > edge.y1 + 2:
                found.append(f"{text!r} leaves the picture")
            found += [f"{text!r} and {other!r} overlap" for other, b in places[n + 1 :] if a.overlaps(b)]
    return found
