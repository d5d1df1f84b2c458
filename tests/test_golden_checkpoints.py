"""Checkpoints that other libraries wrote: every array dequantizes bit for bit as in that library, or within a rounding.

`tools/golden_checkpoints.py` wrote them.
"""

from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._wrappers.permuted import PermutedArray


FOLDERS = sorted((Path(__file__).parent / "golden" / "checkpoints").iterdir())
ARRAYS = [(folder, name) for folder in FOLDERS for name in np.load(folder / "expected.npz")]


@pytest.mark.parametrize("folder, name", ARRAYS, ids=[f"{folder.name}-{name}" for folder, name in ARRAYS])
def test_the_same_bits(folder, name):
    checkpoint = eqq.io.open(folder)
    assert {row.name for row in checkpoint.rows} == set(np.load(folder / "expected.npz").files)
    expected, q = np.load(folder / "expected.npz")[name], checkpoint[name]
    assert (eqq.is_quantized(q) or isinstance(q, PermutedArray)) and q.shape == expected.shape
    # What is known of it without reading it.
    assert eqx.tree_equal(eqx.filter_eval_shape(lambda: q), checkpoint.items_by_name[name].struct)
    if folder.name == "llm_int8":  # bitsandbytes multiplies by the float32 reciprocal of 127
        np.testing.assert_allclose(q.astype(jnp.float32).dequantize(), expected, rtol=3e-7)
    elif name.startswith("affine"):  # MLX rounds `code * scale` before it adds the offset; XLA may round the sum alone
        # The product is at most twice the largest magnitude: its rounding is 2**-23 of that. Each sum is rounded too.
        largest = np.abs(expected).max()
        dense = np.asarray(q.dequantize(), np.float32)
        np.testing.assert_allclose(dense, expected, rtol=2**-23, atol=1.01 * 2**-23 * largest)
    else:
        np.testing.assert_array_equal(np.asarray(q.dequantize(), np.float32), expected)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_goldens_are_small(folder):
    assert sum(p.stat().st_size for p in folder.iterdir()) < 100_000
