"""Pictures of structure: boxes and arrows."""

from typing import Any

from style import arrow, box, canvas, SMALL, TEXT, Theme, WIDTH


LEFT, RIGHT = 0.05, WIDTH - 0.05


def packing(theme: Theme) -> Any:
    """A segment of packed codes, for each width that shares bytes, and for three bits."""
    ax = canvas(5.75, theme, "A segment: codes that share a byte are 64 apart")
    label, across, high = 0.85, WIDTH - 0.95, 0.24
    top = 5.3
    for bits in (4, 2, 1):
        planes = 8 // bits
        name = f"{bits} bit{'s' * (bits > 1)}: {64 * planes} codes in 64 bytes, low bits left"
        ax.text(LEFT, top, name, color=theme.text)
        for n, byte in enumerate((0, 1, None, 63)):
            y = top - 0.12 - high * (n + 1)
            name = "..." if byte is None else f"byte {byte}"
            ax.text(label - 0.08, y + high / 2, name, color=theme.muted, ha="right", va="center", fontsize=SMALL)
            for plane in range(planes):
                text = "" if byte is None else str(64 * plane + byte)
                place = (label + across * plane / planes, y, across / planes, high)
                color = theme.series[plane % 4]
                box(ax, theme, place, text, color, round=0, line=0.8, fontsize=SMALL, shade=0.3 if plane < 4 else 0.15)
        top -= 1.5
    ax.text(LEFT, top, "3 bits: 512 codes, split in 2 + 1 bits", color=theme.text)
    y, share = top - 0.42, across / 3
    ax.text(label - 0.08, y + 0.14, "192 bytes", color=theme.muted, ha="right", va="center", fontsize=SMALL)
    box(ax, theme, (label, y, 2 * share, 0.28), "low bits: 2 segments of 64 bytes", theme.blue, round=0, fontsize=SMALL)
    box(ax, theme, (label + 2 * share, y, share, 0.28), "high bit: 64 bytes", theme.orange, round=0, fontsize=SMALL)
    return ax.figure


def sharding(theme: Theme) -> Any:
    """Which part of a product each of four devices holds, and what moves."""
    ax = canvas(5.0, theme, "y = x Wᵀ on four devices: who holds what, and what moves")
    devices = theme.series[:4]
    places = {"x": (1.25, 0.75), "W": (2.45, 0.75), "y": (3.75, 0.75)}
    for name, (x, width) in places.items():
        ax.text(x + width / 2, 4.5, name, color=theme.text, ha="center", fontsize=TEXT)
    cases = (
        # What is divided along which direction: rows (from the top), columns (from the left), or whole.
        ("data\nparallel", "rows", None, "rows", "nothing moves"),
        ("column\nparallel", None, "rows", "columns", "nothing moves"),
        ("row\nparallel", "columns", "columns", "sums", "all-reduce: partial sums of y"),
        ("fully\nsharded", "rows", "rows", "rows", "all-gather: W, packed"),
    )
    for n, (name, *split, moves) in enumerate(cases):
        y, high = 3.7 - 1.1 * n, 0.66
        ax.text(LEFT, y + high / 2, name, color=theme.text, va="center", fontsize=TEXT)
        for (x, width), kind in zip(places.values(), split, strict=True):
            if kind in (None, "sums"):
                box(ax, theme, (x, y, width, high), "all" if kind is None else "sum of 4", round=0, fontsize=SMALL)
            for part, color in enumerate(devices if kind in ("rows", "columns") else ()):
                place = (x, y + high * (3 - part) / 4, width, high / 4)
                if kind == "columns":
                    place = (x + width * part / 4, y, width / 4, high)
                box(ax, theme, place, "", color, round=0, shade=0.55, line=0.8)
        ax.text(2.23, y + high / 2, "·", color=theme.text, ha="center", va="center", fontsize=14)
        ax.text(3.48, y + high / 2, "=", color=theme.text, ha="center", va="center", fontsize=12)
        ax.text(1.25, y - 0.2, moves, color=theme.muted, va="center", fontsize=SMALL)
    for part, color in enumerate(devices):
        box(ax, theme, (4.68, 4.05 - 0.32 * part, 0.42, 0.24), f"{part}", color, round=0, shade=0.55, fontsize=SMALL)
    ax.text(4.68, 4.5, "device", color=theme.muted, fontsize=SMALL)
    return ax.figure


def architecture(theme: Theme) -> Any:
    """The rooms of the package, by levels."""
    ax = canvas(6.28, theme, "The rooms of eqquant: each imports from below")
    rows = (
        ("L13", (("the public names: eqq.quantize, eqq.quantize_tree, ...", 4, ""),)),
        (
            "L11",
            (
                ("calibrate\nranges from data", 1.2, ""),
                ("transforms\nAWQ, rotations", 1.2, ""),
                ("analysis\nerrors, plans", 1, ""),
                ("io\nfiles", 0.6, ""),
            ),
        ),
        ("L10", (("_training: masters, simulation, optimizer state", 4, ""),)),
        ("L9", (("_tree: leaves, rules, reports", 2, ""), ("_cache: keys, values", 1.6, ""))),
        ("L8", (("_quax: quaxify, and its rules", 4, ""),)),
        ("L7", (("_wrappers: arrays around arrays", 4, ""),)),
        (
            "L6",
            (
                (
                    "_matmul: how a product is computed\n"
                    "xla  cpu  cpu_int8  mosaic_gpu  pallas_gpu  pallas_tpu  scaled_matmul",
                    4,
                    "green",
                ),
            ),
        ),
        ("L5", (("_array: QuantizedArray\ncodes, scales, zero points, a format", 4, "blue"),)),
        ("L4", (("_methods: how codes are found\nAbsMax, MSE, HQQ, GPTQ, ...", 4, "orange"),)),
        ("L3", (("_formats: what codes mean\nNF4, Int8, MXFP4, ...", 4, "purple"),)),
        ("L2", (("_numerics: packing, blocks, rounding", 4, ""),)),
        ("L1", (("_native: eqquant-cpu", 2, ""), ("_mesh: shardings", 1.6, ""))),
        ("L0", (("_compat, _errors, _report, _types", 4, ""),)),
    )
    y, left = 5.88, 0.42
    for level, boxes in rows:
        high = 0.44 if any("\n" in text for text, _, _ in boxes) else 0.29
        y -= high + 0.09
        ax.text(LEFT, y + high / 2, level, color=theme.muted, va="center", fontsize=SMALL)
        unit = (RIGHT - left - 0.08 * (len(boxes) - 1)) / sum(share for _, share, _ in boxes)
        x = left
        for text, share, color in boxes:
            color = getattr(theme, color) if color else ""
            box(ax, theme, (x, y, share * unit, high), text, color, fontsize=SMALL, shade=0.28 if color else 0.12)
            x += share * unit + 0.08
    return ax.figure


def choose(theme: Theme) -> Any:
    """A flow chart that ends at a format."""
    ax = canvas(5.75, theme, "Which format?")
    steps = (
        ("Is the checkpoint\nquantized already?", "its own format\neqq.io keeps it packed", "muted"),
        ("Must it lose\nnext to nothing?", "Int8()\nsimilar size: Q8_0(), FP8()", "blue"),
        ("Do four bits\nsuffice?", "NF4()\nheavy tails: NVFP4()", "green"),
        ("Can you measure\na loss on some data?", "a mix of formats\nsensitivity, plan_bits", "orange"),
        ("Can you\ntrain?", "Int2(), Ternary()\nwith float_masters: QAT", "purple"),
    )
    y, high, x, width = 4.75, 0.6, 0.1, 1.95
    results = 2.75
    for n, (question, result, color) in enumerate(steps):
        box(ax, theme, (x, y, width, high), question, theme.muted, shade=0.1, round=0.28)
        box(ax, theme, (results, y, RIGHT - results, high), result, getattr(theme, color), shade=0.28)
        arrow(ax, theme, (x + width, y + high / 2), (results, y + high / 2))
        ax.text((x + width + results) / 2, y + high / 2 + 0.06, "yes", color=theme.muted, ha="center", fontsize=SMALL)
        arrow(ax, theme, (x + width / 2, y), (x + width / 2, y - 0.35))
        ax.text(x + width / 2 + 0.07, y - 0.24, "no", color=theme.muted, fontsize=SMALL)
        y -= high + 0.35
    box(ax, theme, (x, y + 0.1, width, 0.5), "Int3() by a method:\nMSE(), HQQ()", theme.red, shade=0.28)
    hint = "A better method improves any format\nat no extra bits. With examples of the\ninputs: statistics, GPTQ()."
    ax.text(results, y + 0.35, hint, color=theme.muted, va="center", fontsize=SMALL)
    return ax.figure


ALL = {f.__name__: f for f in (packing, sharding, architecture, choose)}
