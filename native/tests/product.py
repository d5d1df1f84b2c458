"""Checks an installed wheel: it loads, and multiplies right on every instruction set of this machine."""

import os
import subprocess
import sys

import jax
import numpy as np

import eqquant as eqq
from eqquant._native import library as native


def check() -> None:
    if (why := native.refusal()) is not None:
        sys.exit(f"The native kernels do not load: {why}")
    for format in (eqq.NF4(), eqq.Int8(), eqq.MXFP4(), eqq.Int2(symmetric=False), eqq.Binary()):
        for m, k in ((1, 640), (5, 1030), (40, 512)):
            w, x = jax.random.normal(jax.random.key(m), (100, k)), jax.random.normal(jax.random.key(k), (m, k))
            q = eqq.quantize(w, format)
            y = eqq.matmul(x, q.T, implementation="cpu")
            expected = np.asarray(x, np.float64) @ np.asarray(q.dequantize(), np.float64).T
            error = float(np.linalg.norm(y - expected) / np.linalg.norm(expected))
            if not error < 1e-6:
                sys.exit(f"{native.isa()}: the product with {format!r} at {m} x {k} is off by {error:.2g}")
    print(f"{native.isa()}: right")


if os.environ.get("EQQUANT_CPU_ISA"):
    check()
else:
    for isa in native.instruction_sets() or sys.exit(f"The native kernels do not load: {native.refusal()}"):
        subprocess.run([sys.executable, __file__], check=True, env={**os.environ, "EQQUANT_CPU_ISA": isa})
