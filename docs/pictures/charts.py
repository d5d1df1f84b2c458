"""Pictures of measurements, each from a committed file, from a table of the pages, or from the library itself."""

import json
import re
from pathlib import Path
from statistics import NormalDist
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator
from style import dress, figure, legend, mix, SMALL, TEXT, Theme, TITLE

import eqquant as eqq


ROOT = Path(__file__).parents[2]
MEASURED: dict[str, Any] = json.loads((ROOT / "benchmarks" / "pictures.json").read_text())
ACCURACY: dict[str, Any] = json.loads((ROOT / "benchmarks" / "accuracy.json").read_text())


def rows_of(page: str, pattern: str) -> list[tuple[str, ...]]:
    """What `pattern` finds in a page, whose tables may move to another."""
    found = re.findall(pattern, (ROOT / "docs" / page).read_text(), re.M)
    if not found:
        raise ValueError(f"docs/{page} has no rows like {pattern}: has its table moved?")
    return found


def block(theme: Theme) -> Any:
    """A block of weights, its codes, and what they stand for."""
    values = np.array(MEASURED["block"], np.float32)
    q = eqq.quantize(jnp.asarray(values), eqq.Int4(block_size=16))
    back, scale = np.asarray(q.dequantize()), float(q.scale[0])
    codes = np.rint(back / scale).astype(int)
    fig = figure(3.9)
    ax = dress(fig.subplots(), theme, "A block of 16 weights as Int4: 16 codes, one scale", grid="")
    for level in range(-7, 8):
        ax.axhline(level * scale, color=theme.faint, linewidth=0.6, zorder=0)
    places = np.arange(len(values))
    ax.vlines(places, values, back, color=theme.red, linewidth=2.5, zorder=2, label="error")
    ax.scatter(places, values, s=9, color=theme.blue, zorder=6, label="weight")
    ax.scatter(places, back, s=110, color=theme.orange, marker="_", linewidth=2, zorder=3, label="code x scale")
    ax.set_xticks(places, [f"{code}" for code in codes])
    ax.set_yticks([n * scale for n in (-7, 0, 7)], [f"-7 x {scale:.4f}", "0", f"7 x {scale:.4f}"])
    ax.tick_params(axis="x", colors=theme.text, length=0)
    ax.set_ylim(-7.7 * scale, 7.7 * scale)
    ax.set_xlabel("codes: four bits each, and 32 bits for the scale", color=theme.muted)
    legend(ax, theme, loc="upper center", bbox_to_anchor=(0.45, -0.17), ncols=3)
    return fig


def accuracy(theme: Theme) -> Any:
    """The distance of embeddings against bits per weight: one format for all weights, and the best at each size."""
    fig = figure(3.9)
    ax = dress(fig.subplots(), theme, "The size of all-MiniLM-L6-v2, and what it costs", "bits per weight")
    ax.set_ylabel("1 - mean cosine with float32", color=theme.muted)
    ax.set_yscale("log")
    # One format for all weights, and mixes by `plan_bits`: a table of the page on mixed precision.
    page = "mixed_precision.md"
    found = rows_of(page, r"\*\*mix\*\* \| \*\*([\d.]+)\*\* \| \*\*([\d.]+)")
    planned = [(float(bits), 1 - float(cosine)) for bits, cosine in found]
    found = rows_of(page, r"^\|.*?\| `((?:\w+)\(\))` \| ([\d.]+) \| ([\d.]+) \|")
    uniform = sorted((float(bits), 1 - float(cosine), name) for name, bits, cosine in found)
    ax.plot(
        *zip(*((x, y) for x, y, _ in uniform), strict=True),
        "s",
        color=theme.muted,
        markersize=3.5,
        label="one format for all",
    )
    for x, y, name in uniform:
        ax.annotate(
            name.removesuffix("()"),
            (x, y),
            xytext=(7, {"Q4_0": 4, "NF4": -4}.get(name.removesuffix("()"), 0)),  # the two are neighbors
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
            color=theme.muted,
        )
    ax.plot(*zip(*planned, strict=True), "v:", color=theme.purple, markersize=5, label="a mix by plan_bits")
    # Counted as here: codes, scales of 16 bits and zero points of all arrays of two and more dimensions.
    peers = sorted((float(key.split(",")[0]), 1 - y) for key, y in ACCURACY["peers"].items() if key[0].isdigit())
    ax.plot(*zip(*peers, strict=True), "D", color=theme.orange, markersize=5, label="the best of others, 128 sentences")
    recipes = {name: r for name, r in ACCURACY["recipes"].items() if name[0].isdigit()}
    mixes = {name: r for name, r in recipes.items() if name.endswith("seed 0")}
    informed = [rounds for name, rounds in mixes.items() if "no data" not in name]
    trellises = [r for name, r in ACCURACY["recipes"].items() if name.startswith("trellis") and name.endswith("seed 0")]
    for label, style, color, rounds in (
        ("a mix, no data", "^", theme.green, [r[0] for name, r in mixes.items() if "no data" in name]),
        ("a mix, 128 sentences", "s-", theme.red, [r[0] for name, r in recipes.items() if "128 sentences" in name]),
        ("a mix, 511 sentences", "o:", theme.blue, [r[0] for r in informed]),
        ("the same, then distill", "o-", theme.blue, [r[1] for r in informed if len(r) > 1]),
        ("a trellis, then distill", "*-", theme.green, [r[1] for r in trellises if len(r) > 1]),
    ):
        points = sorted((row["bits"], 1 - row["cosine"]) for row in rounds)
        ax.plot(*zip(*points, strict=True), style, color=color, markersize=5, label=label)
    ax.set_xlim(1.9, 8.6)
    ticks = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.yaxis.set_minor_locator(NullLocator())
    legend(ax, theme, loc="upper right")
    return fig


def levels(theme: Theme) -> Any:
    """The values that each format can give to a block of normally distributed weights."""
    formats = [
        *(eqq.Binary(), eqq.Ternary(), eqq.Int2(), eqq.Int3()),
        *(eqq.Int4(), eqq.formats.Q4_0(), eqq.NF4(), eqq.formats.IQ4_NL(), eqq.MXFP4(), eqq.NVFP4()),
        *(eqq.Int5(), eqq.Int6(), eqq.FP8("e5m2"), eqq.FP8(), eqq.Dynamic8(), eqq.Int8()),
    ]
    fig = figure(5.4)
    curve, rows = fig.subplots(2, sharex=True, height_ratios=(1, 4.2))
    x = np.linspace(-3.2, 3.2, 201)
    y = np.exp(-(x**2) / 2)
    dress(curve, theme, "The levels of each format over a normal curve", grid="x")
    curve.fill_between(x, y, color=mix(theme.blue, theme.page, 0.25), linewidth=0)
    curve.plot(x, y, color=theme.blue)
    curve.set_yticks([])
    curve.spines["left"].set_visible(False)
    curve.set_ylim(0, 1.05)
    dress(rows, theme, x="weight, in standard deviations", grid="")
    # Quantiles stand for a block, so that no draw of chance moves the levels.
    spread = NormalDist()
    for n, format in enumerate(formats):
        size = format.block_size if isinstance(format.block_size, int) else 256
        sample = np.array([spread.inv_cdf((k + 0.5) / size) for k in range(size)], np.float32)
        q = eqq.quantize(jnp.asarray(sample), format)
        scale = float(np.asarray(q.scale, np.float32).ravel()[0])
        # Levels that values reach: not every code is one.
        codes = format.encode(jnp.linspace(sample[0], sample[-1], 20001, dtype=jnp.float32) / scale)
        found = np.unique(np.asarray(format.decode(codes), np.float32) * scale)
        # One path for all levels of a format, which keeps the file small.
        x = np.repeat(found, 3)
        y = np.tile([n - 0.34, n + 0.34, np.nan], len(found))
        color = theme.series[{1: 0, 2: 0, 3: 0, 4: 1, 5: 2, 6: 2, 8: 3}[format.bits]]
        rows.plot(x, y, color=color, linewidth=1.5 if format.bits < 6 else 0.6)
    names = [repr(format).replace("()", "").replace("(kind='e5m2')", ", e5m2") for format in formats]
    rows.set_yticks(range(len(formats)), names)
    rows.tick_params(axis="y", length=0, labelsize=SMALL)
    rows.set_ylim(len(formats) - 0.4, -0.6)
    rows.set_xlim(-3.2, 3.2)
    rows.spines["left"].set_visible(False)
    return fig


KINDS = {
    "attention.query": "query",
    "attention.key": "key",
    "attention.value": "value",
    "attention.output": "output",
    "up": "up",
    "down": "down",
}


def sensitivity(theme: Theme) -> Any:
    """How much the loss rises when one weight is quantized, for each weight and format."""
    formats, increases = MEASURED["sensitivity"]["formats"], MEASURED["sensitivity"]["increases"]
    table = np.array(
        [[increases[f"layers.{layer}.{kind}.weight"] for layer in range(6)] for kind in KINDS]
    )  # kinds, layers, formats
    fig = figure(4.9)
    panels = fig.subplots(2, 2, sharex=True, sharey=True)
    fig.suptitle("What each weight costs, quantized alone", fontsize=TITLE, color=theme.text, x=0.01, ha="left")
    norm = LogNorm(10 ** np.floor(np.log10(table.min())), 10 ** np.ceil(np.log10(table.max())))
    for n, (ax, format) in enumerate(zip(panels.flat, formats, strict=True)):
        image = ax.pcolormesh(table[..., n], norm=norm, cmap="viridis", edgecolor=theme.page, linewidth=1)
        dress(ax, theme, grid="", x="layer" if n >= 2 else "")
        ax.set_title(format.removesuffix("()"), fontsize=TEXT, color=theme.text)
        ax.set_xticks(np.arange(6) + 0.5, range(6))
        ax.set_yticks(np.arange(6) + 0.5, KINDS.values())
        ax.tick_params(length=0)
        ax.set_ylim(6, 0)
        for spine in ax.spines.values():
            spine.set_visible(False)
    bar = fig.colorbar(image, ax=panels, orientation="horizontal", aspect=40, pad=0.02)
    bar.set_label("increase of the loss, from 6e-15", color=theme.muted)
    powers = np.arange(np.log10(norm.vmin), np.log10(norm.vmax) + 1)
    bar.ax.xaxis.set_major_locator(FixedLocator(10.0**powers))
    bar.ax.xaxis.set_major_formatter(FixedFormatter([f"1e{int(power)}" for power in powers]))
    bar.ax.xaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(color=theme.muted, labelcolor=theme.muted)
    bar.outline.set_visible(False)
    return fig


def plan(theme: Theme) -> Any:
    """The bits that a plan gives to each weight."""
    table = {leaf["path"].removesuffix(".weight"): leaf for leaf in MEASURED["plan"]}
    found = sorted({(leaf["bits"], leaf["format"]) for leaf in table.values()})
    colors = dict(zip(dict.fromkeys(format for _, format in found), theme.series, strict=False))
    fig = figure(3.9)
    panels = fig.subplots(2, 4, sharey=True)
    title = f"A plan for {MEASURED['budget']:g} bits per weight: what each weight gets"
    fig.suptitle(title, fontsize=TITLE, color=theme.text, x=0.01, ha="left")
    groups = {name: {str(n): f"layers.{n}.{kind}" for n in range(6)} for kind, name in KINDS.items()}
    words = {"word": "word", "place": "position", "type": "token_type"}
    groups["embeddings"] = {short: f"embeddings.{name}" for short, name in words.items()}
    for n, (ax, (name, paths)) in enumerate(zip(panels.flat, groups.items(), strict=False)):
        dress(ax, theme, grid="y", x="layer" if n in (3, 4, 5) else "", y="" if n % 4 else "bits per weight")
        ax.set_title(name, fontsize=TEXT, color=theme.text)
        rows = [table[path] for path in paths.values()]
        ax.bar(
            range(len(rows)), [row["bits"] for row in rows], color=[colors[row["format"]] for row in rows], width=0.75
        )
        ax.set_xticks(range(len(rows)), paths, fontsize=SMALL)
        ax.set_yticks((0, 2, 4, 6, 8))
        ax.set_ylim(0, 8.6)
        for place, row in enumerate(rows):
            if row["bits"] > 8.6:
                ax.text(place, 7.9, f"{row['bits']:g}", color=theme.page, ha="center", fontsize=SMALL)
    panels[1, 3].set_axis_off()
    handles = [Patch(color=color) for color in colors.values()]
    names = ["float32" if format == "None" else format.removesuffix("()") for format in colors]
    panels[1, 3].legend(handles, names, loc="center", fontsize=SMALL, framealpha=0, labelcolor=theme.text)
    return fig


def memory(theme: Theme) -> Any:
    """The bytes that each way to train holds between steps, and its gradients."""
    ways = MEASURED["memory"]
    fig = figure(2.9)
    ax = dress(fig.subplots(), theme, "Memory to train all-MiniLM-L6-v2", "MB", grid="x")
    left = np.zeros(len(ways))
    for part, color in zip(("weights", "gradients", "optimizer state"), theme.series, strict=False):
        sizes = np.array([way[part] / 1e6 for way in ways.values()])
        ax.barh(range(len(ways)), sizes, left=left, color=color, label=part, height=0.65)
        left += sizes
    for row, total in enumerate(left):
        ax.text(total + 5, row, f"{total:.0f}", va="center", color=theme.text, fontsize=TEXT)
    ax.set_yticks(range(len(ways)), ways)
    ax.set_ylim(len(ways) - 0.5, -0.5)
    ax.set_xlim(0, 1.12 * left.max())
    ax.tick_params(axis="y", length=0, labelcolor=theme.text)
    legend(ax, theme, loc="upper center", bbox_to_anchor=(0.35, -0.2), ncols=3)
    return fig


def rows(theme: Theme) -> Any:
    """The time of a product against the rows of `x`, relative to float32, from the table of the benchmarks."""
    cells = r" \| ([\d.]+), [\d.]+" * 3  # cold, then warm
    table = {
        name: [float(time) for time in cold] for name, *cold in rows_of("benchmarks.md", rf"^\| `(.+)`{cells} \|$")
    }
    fig = figure(3.6)
    ax = dress(fig.subplots(), theme, "Time of a product on CPU, relative to float32", "rows of x")
    styles = zip(("nf4", "int4", "int8", "int8 x int8"), ("o", "s", "^", "D"), theme.series, strict=False)
    for name, marker, color in styles:
        label = "int8 x int8: x quantized too" if " x " in name else name
        ax.plot((1, 16, 128), table[name], marker=marker, color=color, label=label, markersize=6)
    ax.axhline(1, color=theme.text, linewidth=1, linestyle="--")
    ax.text(1, 1.02, "float32", color=theme.text, va="bottom", fontsize=SMALL)
    ax.set_xscale("log", base=2)
    ax.set_xticks((1, 16, 128), ("1", "16", "128"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_ylim(0, 1.45)
    ax.text(1, 0.03, "below the dashed line is faster", color=theme.muted, fontsize=SMALL)
    legend(ax, theme, loc="lower right")
    return fig


def methods(theme: Theme) -> Any:
    """The error of what each layer returns, for methods that know its inputs and one that does not."""
    layers = ACCURACY["layers"]
    fig = figure(4.2)
    panels = fig.subplots(2, 3, sharex=True, sharey=True)
    title = "The error of each weight's outputs, in three bits"
    fig.suptitle(title, fontsize=TITLE, color=theme.text, x=0.01, ha="left")
    styles = zip(("MSE", "GPTQ", "LearnedRounding"), ("s", "^", "o"), theme.series, strict=False)
    lines = {name: {"marker": marker, "color": color, "markersize": 5} for name, marker, color in styles}
    for n, (ax, (path, kind)) in enumerate(zip(panels.flat, KINDS.items(), strict=True)):
        dress(ax, theme, x="layer" if n >= 3 else "", y="" if n % 3 else "relative squared error")
        ax.set_title(kind, fontsize=TEXT, color=theme.text)
        for name, style in lines.items():
            errors = [layers[f"layers.{layer}.{path}.weight"][name] for layer in range(6)]
            ax.plot(range(6), errors, label=name, **style)
        ax.set_yscale("log")
        ax.set_xticks(range(6))
        ticks = (0.001, 0.003, 0.01, 0.03)
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.yaxis.set_minor_locator(NullLocator())
    handles, names = panels[0, 0].get_legend_handles_labels()
    fig.legend(handles, names, loc="outside lower center", ncols=3, fontsize=SMALL, framealpha=0, labelcolor=theme.text)
    return fig


def language_model(theme: Theme) -> Any:
    """How far SmolLM2-135M is from its float model, against bits per weight: eqquant, and llama.cpp's quantizer."""
    models = json.loads((ROOT / "benchmarks" / "smollm2.json").read_text())["models"]
    # The file is in Q4_1, so llama.cpp's types with as many levels and more give it back.
    models = {name: x for name, x in models.items() if x["divergence"] > 0.02}
    fig = figure(3.9)
    ax = dress(
        fig.subplots(), theme, "SmolLM2-135M by its size: eqquant and llama.cpp", "bits per weight, embedding included"
    )
    ax.set_ylabel("divergence from the float model", color=theme.muted)
    ax.set_yscale("log")
    theirs = {name.removeprefix("llama.cpp "): x for name, x in models.items() if name.startswith("llama.cpp")}
    ours = {name: x for name, x in models.items() if not name.startswith("llama.cpp")}
    plain = {name: x for name, x in ours.items() if ", as in" in name}
    for label, style, color, found in (
        ("llama.cpp, importance matrix", "D-", theme.orange, theirs),
        ("rounding", "s", theme.muted, plain),
        ("eqquant, the same text", "o-", theme.blue, {name: x for name, x in ours.items() if name not in plain}),
    ):
        points = sorted((x["bits"], x["divergence"]) for x in found.values())
        best = [point for n, point in enumerate(points) if all(point[1] < y for _, y in points[:n])]
        ax.plot(*zip(*points, strict=True), style[0], color=color, markersize=5, label=label)
        if "-" in style:
            ax.plot(*zip(*best, strict=True), "-", color=color)
    ticks = (0.02, 0.05, 0.1, 0.2, 0.5, 1)
    ax.set_ylim(0.018, 1.4)
    ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.yaxis.set_minor_locator(NullLocator())
    legend(ax, theme, loc="lower left")
    return fig


ALL = {f.__name__: f for f in (block, accuracy, levels, sensitivity, plan, methods, memory, rows, language_model)}
