"""Tries what is installed as a new user would, in an empty folder: `python -I tools/try_release.py model.gguf`.

Runs the code of the README that the distribution holds, the command line on a file, and a product by native kernels.
Needs nothing of the repository but this file.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import metadata, version
from pathlib import Path


def main(file: str) -> None:
    names: dict[str, object] = {}
    readme = metadata("eqquant").get_payload()  # pyright: ignore[reportAttributeAccessIssue]
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    if not blocks:
        sys.exit("The README must have code. Got none.")
    for block in blocks:
        exec(compile(block, "README", "exec"), names)

    program = str(Path(sys.executable).with_name("eqquant"))
    shown = subprocess.run([program, "inspect", file, "--json"], check=True, capture_output=True, text=True)
    print(f"eqquant inspect: {len(json.loads(shown.stdout)['rows'])} arrays in {file}")
    print(subprocess.run([program, "--version"], check=True, capture_output=True, text=True).stdout)

    import jax
    import numpy as np

    import eqquant as eqq

    x, w = (jax.random.normal(jax.random.key(n), (n, 512)) for n in (3, 256))
    q = eqq.quantize(w, "nf4")
    told = eqq.explain_matmul(x, q.T)
    if told.implementation != "cpu" or f"eqquant-cpu {version('eqquant-cpu')}, " not in told.verdicts["cpu"]:
        sys.exit(f"Native kernels must take the product. Got:\n{told}")
    np.testing.assert_allclose(x @ q.T, x @ q.dequantize().T, rtol=1e-4, atol=1e-4)
    print(told)


with tempfile.TemporaryDirectory() as empty:
    os.chdir(empty)
    main(*sys.argv[1:])
