"""Writes `tests/golden/model.gguf` with llama.cpp's own package, and what that package dequantizes from it.

    pip install gguf && python -m tools.golden_gguf

The tests need only the files.
"""

from pathlib import Path

import gguf
import numpy as np


GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
TERNARY = ("TQ1_0", "TQ2_0")
# Types that this package only dequantizes, and where the float16 numbers of their blocks are.
READ_ONLY = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "NVFP4": (),
    "IQ2_XXS": (0,),
}


def main() -> None:
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(GOLDEN / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_token_list(["<unk>", "a", "\u00fc"])
    writer.add_array("some.numbers", [1, 2, 3])
    expected = {}

    def add(name: str, data: np.ndarray) -> None:
        kind = gguf.GGMLQuantizationType[name]
        writer.add_tensor(f"blk.{name}.weight", data, raw_dtype=kind)
        expected[name] = gguf.quants.dequantize(data, kind)

    dense = rng.standard_normal((2, 3, 128)).astype(np.float32)
    dense[0, 0, :32] = 0
    for name in TYPES:
        add(name, gguf.quants.quantize(dense, gguf.GGMLQuantizationType[name]))
    dense = rng.standard_normal((2, 256)).astype(np.float32)
    writer.add_tensor("blk.ternary.float", dense)
    for name in TERNARY:
        add(name, gguf.quants.quantize(dense, gguf.GGMLQuantizationType[name]))
    for name, floats in READ_ONLY.items():
        values, nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
        blocks = rng.integers(0, 256, (2, 256 // values, nbytes)).astype(np.uint8)
        if name == "NVFP4":
            blocks[..., :4] &= 127  # its scales have no sign
        for at in floats:
            blocks[..., at : at + 2] = rng.standard_normal((*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
        add(name, blocks.reshape(2, -1))
    del expected["IQ2_XXS"]  # the test of a type that is not read
    writer.add_tensor("norm.weight", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.savez_compressed(GOLDEN / "model_gguf.npz", **expected)


if __name__ == "__main__":
    main()
