"""What the first call of a process costs, beside float32: `python benchmarks/first_call.py`, `--smoke` for one round.

Imports, then MiniLM from a file, and the first sentence that it embeds, which compiles it. Processes take turns; a
figure is the median of the rounds, and a ratio the median of the rounds' ratios.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
IMPORTS = {"Equinox, optax": "equinox, optax", "eqquant": "eqquant"}


def first_sentence(file: str) -> list[float]:
    """The seconds of loading a model, of its first sentence, and of the second."""
    import equinox as eqx
    import jax
    import jax.random as jr
    import minilm

    import eqquant as eqq

    inputs = minilm.tokenize(["A first sentence, which is neither long nor short."], 32)
    skeleton = eqx.filter_eval_shape(minilm.Encoder, jr.key(0))
    load = eqx.tree_deserialise_leaves if file.endswith(".eqx") else eqq.load
    times = [time.perf_counter()]
    model = load(file, skeleton)
    jax.block_until_ready(eqx.filter(model, eqx.is_array))
    times.append(time.perf_counter())
    for _ in range(2):
        jax.block_until_ready(minilm.embed(model, *inputs))
        times.append(time.perf_counter())
    return np.diff(times).tolist()


def write_models(folder: Path) -> dict[str, Path]:
    import equinox as eqx
    import minilm

    import eqquant as eqq

    model = minilm.load_model()
    files = {"float32": folder / "float32.eqx"}
    eqx.tree_serialise_leaves(files["float32"], model)
    for name in ("NF4", "Int8"):
        files[name] = folder / f"{name}.safetensors"
        eqq.save(files[name], eqq.quantize_tree(model, name.lower()))
    return files


def seconds_of(*arguments: str) -> list[float]:
    """What a new process prints, as JSON. It keeps no compiled programs."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    run = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="one round")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load is not None:
        print(json.dumps(first_sentence(arguments.load)))
        return
    rounds = range(1 if arguments.smoke else 7)
    table = Table("", "import ms", "load ms", "first sentence ms", "x float32", "second ms", title="First calls")
    code = "import time; start = time.perf_counter(); import {}; print([time.perf_counter() - start])"
    runs = [{name: seconds_of("-c", code.format(what)) for name, what in IMPORTS.items()} for _ in rounds]
    for name in IMPORTS:
        seconds = np.median([run[name][0] for run in runs])
        table.add_row(name, f"{1e3 * seconds:.0f}")
    ratio = np.median([run["eqquant"][0] / run["Equinox, optax"][0] for run in runs])
    with tempfile.TemporaryDirectory() as folder:
        files = write_models(Path(folder))
        turns = [{name: seconds_of(__file__, "--load", str(file)) for name, file in files.items()} for _ in rounds]
    for name in files:
        load, first, second = 1e3 * np.median([turn[name] for turn in turns], axis=0)
        beside = np.median([turn[name][1] / turn["float32"][1] for turn in turns])
        table.add_row(name, "", f"{load:.0f}", f"{first:.0f}", f"{beside:.2f}", f"{second:.1f}")
    Console(width=100).print(
        table, f"Importing eqquant takes {ratio:.2f} times as long as importing Equinox and optax."
    )


if __name__ == "__main__":
    main()
