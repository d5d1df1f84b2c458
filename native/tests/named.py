"""Builds the named tests in C++ with the compiler of the wheel, and runs them: `python native/tests/named.py`."""

import os
import subprocess
import tempfile
from pathlib import Path


with tempfile.TemporaryDirectory() as build:
    compiler = ["-DCMAKE_CXX_COMPILER=clang++"] if os.name == "nt" else []  # as pyproject.toml
    options = ("-DEQQUANT_TESTS=ON", "-DEQQUANT_LIBRARY=OFF", *compiler)
    source = str(Path(__file__).parents[1])
    subprocess.run(["cmake", "-G", "Ninja", "-S", source, "-B", build, *options], check=True)
    subprocess.run(["cmake", "--build", build, "--target", "unit"], check=True)
    subprocess.run([str(Path(build) / "unit")], check=True)
