"""Draws the pictures of the pages, each for light and for dark pages: `python docs/pictures`.

Needs `pip install "eqquant[plot]"`. Pictures go to `docs/images/`. `--model` draws also those that need the weights of
all-MiniLM-L6-v2 (`examples/minilm.py` says where they are); `--check` draws without writing. Both fail if texts overlap
or leave their picture. `docs/pictures/measure.py` measures what the others show.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import charts
import diagrams
from style import collisions, dress, figure, Theme, THEMES, write


ROOT = Path(__file__).parents[2]
MOST_BYTES = 100_000


def from_model() -> Mapping[str, Callable[[Theme], Any]]:
    """What the plots of the library show, of a real model."""
    sys.path.append(str(ROOT / "examples"))
    import minilm

    import eqquant as eqq

    model = minilm.load_model()
    weight = model.layers[0].up.weight
    reports = {
        "histogram": (eqq.analysis.analyze_error(weight, eqq.quantize(weight, "nf4")), 3.2),
        "front": (eqq.analysis.compare_formats(weight), 6.0),
        "layers": (eqq.analysis.analyze_tree(model, "int4"), 7.2),
    }

    def draw(report: Any, height: float) -> Callable[[Theme], Any]:
        def drawn(theme: Theme) -> Any:
            fig = figure(height)
            # Dressed before, since the library writes names in the colors that axes have, and where they fit.
            report.plot(dress(fig.subplots(), theme, grid=""))
            return fig

        return drawn

    return {name: draw(*given) for name, given in reports.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", nargs="*", metavar="NAME")
    given = parser.parse_args()
    pictures = {**charts.ALL, **diagrams.ALL, **(from_model() if given.model else {})}
    wrong = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if given.check else ROOT / "docs" / "images"
        for name, draw in pictures.items():
            if given.only and name not in given.only:
                continue
            for theme in THEMES[: 1 if given.check else 2]:
                path = folder / f"{name}-{theme.name}.svg"
                fig = draw(theme)
                if theme is THEMES[0]:  # the other has the same layout
                    wrong += [f"{name}: {problem}" for problem in collisions(fig)]
                write(fig, path, theme)
                if path.stat().st_size > MOST_BYTES:
                    wrong.append(f"{path.name} has {path.stat().st_size:,} bytes")
    if wrong:
        sys.exit("\n".join(dict.fromkeys(wrong)))
    print(f"{len(pictures)} pictures, each for light and dark pages.")


if __name__ == "__main__":
    warnings.simplefilter("error")
    main()
