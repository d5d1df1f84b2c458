"""Kernels of eqquant for the CPU: a shared library, which `eqquant` loads where it finds this package."""

import pathlib


__version__ = "0.1.11"
LIBRARY = pathlib.Path(__file__).parent / "kernels.lib"
