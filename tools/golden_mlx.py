"""Writes `tests/golden/mlx` with MLX itself: a checkpoint of every mode and width, and what MLX dequantizes from it.

    pip install mlx[cpu] && python -m tools.golden_mlx

The tests need only the files.
"""

import json
from pathlib import Path

import mlx.core as mx
import numpy as np


GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "mlx"
AFFINE = ((2, 32), (3, 64), (4, 64), (5, 32), (6, 128), (8, 64))
FLOATS = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    dense = np.random.default_rng(0).standard_normal((3, 128)).astype(np.float32)
    settings: dict = {"group_size": 64, "bits": 4}
    tensors, expected = {"norm.weight": mx.ones(5)}, {"dense": dense}

    def add(name: str, x: mx.array, bits: int, group: int, mode: str) -> None:
        weight, scales, *biases = mx.quantize(x, group_size=group, bits=bits, mode=mode)
        parts = {"weight": weight, "scales": scales} | ({"biases": biases[0]} if biases else {})
        tensors.update({f"{name}.{part}": array for part, array in parts.items()})
        if (bits, group, mode) != (4, 64, "affine"):
            settings[name] = {"group_size": group, "bits": bits, "mode": mode}
        values = mx.dequantize(weight, scales, *biases, group_size=group, bits=bits, mode=mode)
        expected[name] = np.array(values.astype(mx.float32))

    for bits, group in AFFINE:
        for dtype in ("float32", "float16") if bits == 4 else ("float32",):
            add(f"affine.{bits}.{dtype}", mx.array(dense).astype(getattr(mx, dtype)), bits, group, "affine")
    for mode, (bits, group) in FLOATS.items():
        add(mode, mx.array(dense), bits, group, mode)
    mx.save_safetensors(str(GOLDEN / "model.safetensors"), tensors)
    (GOLDEN / "config.json").write_text(json.dumps({"quantization": settings}, indent=1) + "\n")
    np.savez_compressed(GOLDEN / "expected.npz", **expected)


if __name__ == "__main__":
    main()
