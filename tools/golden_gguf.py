"""Writes `model.gguf` and `vectors.gguf` of `tests/golden` with llama.cpp's package, and what it dequantizes from them.

    pip install gguf && python -m tools.golden_gguf

The tests need only the files.
"""

from pathlib import Path

import gguf
import numpy as np


GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
VECTORS = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
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
    del expected["IQ2_XXS"]  # `vectors.gguf` tests its values
    writer.add_tensor("norm.weight", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.savez_compressed(GOLDEN / "model_gguf.npz", **expected)


def write_vectors() -> None:
    """Types whose codes stand for several values: blocks of any bytes, with finite scales."""
    rng = np.random.default_rng(35)
    writer, expected = gguf.GGUFWriter(GOLDEN / "vectors.gguf", "llama"), {}
    for name in VECTORS:
        kind = gguf.GGMLQuantizationType[name]
        blocks = rng.integers(0, 256, (2, 2, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        scale = rng.normal(size=(2, 2)).astype(np.float16).view(np.uint16)
        if name == "IQ1_M":  # four bits of the scale in each of the last words
            words = blocks[..., 48:].copy().view(np.uint16)
            words = words & 0xFFF | (scale[..., None] >> 4 * np.arange(4, dtype=np.uint16) & 15) << 12
            blocks[..., 48:] = words.astype(np.uint16).view(np.uint8)
        else:
            blocks[..., :2] = scale[..., None].view(np.uint8)
        rows = blocks.reshape(2, -1)
        expected[name] = gguf.quants.dequantize(rows, kind)
        writer.add_tensor(f"blk.{name}.weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    np.savez_compressed(GOLDEN / "vectors_gguf.npz", **expected)


if __name__ == "__main__":
    main()
    write_vectors()
