"""Writes `tests/golden/model.gguf` with llama.cpp's own package, and what that package dequantizes from it.

    pip install gguf && python -m tools.golden_gguf

The tests need only the files.
"""

from pathlib import Path

import gguf
import numpy as np


GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q8_0", "MXFP4", "Q5_1")


def main() -> None:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(GOLDEN / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_token_list(["<unk>", "a", "\u00fc"])
    writer.add_array("some.numbers", [1, 2, 3])
    expected = {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        x = rng.standard_normal((2, 3, 128)).astype(np.float32)
        x[0, 0, :32] = 0
        data = gguf.quants.quantize(x, kind)
        writer.add_tensor(f"blk.{name}.weight", data, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(data, kind)
    writer.add_tensor("norm.weight", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.savez_compressed(GOLDEN / "model_gguf.npz", **expected)


if __name__ == "__main__":
    main()
