"""Kernels of eqquant for the CPU: a shared library, which `eqquant` loads where it finds this package."""

import pathlib


LIBRARY = pathlib.Path(__file__).parent / "kernels.lib"
