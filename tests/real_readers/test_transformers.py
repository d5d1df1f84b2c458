"""Folders that we write, opened by transformers with the package that the layout belongs to."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import eqquant as eqq

from . import llama


FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
FP4 = eqq.Codebook(np.unique([*FP4, *-FP4]))


def load(folder, arrays, dialect):
    eqq.io.write(folder, arrays, dialect, config=llama.CONFIG.to_dict())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("format", [eqq.NF4(), eqq.NF4(128), eqq.NF4(32, double_quant=True), FP4], ids=str)
def test_four_bits_of_bitsandbytes(tmp_path, format):
    import bitsandbytes as bnb

    arrays = llama.quantize_model(format)
    model = load(tmp_path / "model", arrays, "bitsandbytes")
    name = "model.layers.0.mlp.down_proj.weight"
    layer = model.model.layers[0].mlp.down_proj
    assert isinstance(layer, bnb.nn.Linear4bit) and not isinstance(model.lm_head, bnb.nn.Linear4bit)
    dense = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    np.testing.assert_array_equal(dense.numpy(), arrays[name].dequantize())
    expected = llama.expected_logits(arrays)
    # On CPUs it multiplies in bfloat16 where they can; the weights themselves are the same. The first product packs
    # them for that, so another model is dequantized.
    llama.assert_near(llama.compute_logits(model), expected, 0.15)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    llama.assert_near(llama.compute_logits(other.dequantize()), expected, 1e-4)


def test_int8_rows_of_bitsandbytes(tmp_path):
    import bitsandbytes as bnb

    arrays = llama.quantize_model("int8")
    model = load(tmp_path / "model", arrays, "bitsandbytes")
    layer = model.model.layers[1].self_attn.q_proj
    assert isinstance(layer, bnb.nn.Linear8bitLt)
    dense = layer.weight.data.float() * layer.weight.SCB[:, None] / 127
    np.testing.assert_allclose(dense.numpy(), arrays["model.layers.1.self_attn.q_proj.weight"].dequantize(), rtol=3e-7)
    # It quantizes activations to eight bits too.
    llama.assert_near(llama.compute_logits(model), llama.expected_logits(arrays), 0.3)


FORMATS = [
    eqq.Int4(),
    eqq.Int4(None),
    eqq.Int2(),
    eqq.Int8(),
    eqq.Int8(64, symmetric=False),
    eqq.FP8(),
    eqq.FP8(block_size="tensor"),
    eqq.FP8(block_size=64),
]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_compressed_tensors(tmp_path, format):
    arrays = llama.quantize_model(format)
    model = load(tmp_path / "model", arrays, "compressed-tensors")
    logits = llama.compute_logits(model)  # decompresses
    name = "model.layers.0.mlp.gate_proj.weight"
    np.testing.assert_array_equal(
        model.model.layers[0].mlp.gate_proj.weight.detach().float().numpy(),
        arrays[name].astype(jnp.float32).dequantize(),
    )
    llama.assert_near(logits, llama.expected_logits(arrays), 1e-4)


ALONE = [
    *(eqq.Int4(32, symmetric=False), eqq.Int2(symmetric=False), eqq.MXFP4()),
    *(eqq.Int3(symmetric=False), eqq.Int5(), eqq.Int6(None), eqq.Int6(32, symmetric=False)),
]


@pytest.mark.parametrize("format", ALONE, ids=str)
def test_decompressing_by_compressed_tensors_alone(tmp_path, format):
    """What transformers does not load into a float32 model: packed zero points, and MXFP4, which is bfloat16."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    arrays = llama.quantize_model(format)
    eqq.io.write(tmp_path / "model", arrays, "compressed-tensors", config=llama.CONFIG.to_dict())
    stored = load_file(tmp_path / "model" / "model.safetensors")
    config = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig(**config).config_groups.values()
    for name, q in arrays.items():
        if eqq.is_quantized(q):
            layer = name.removesuffix("weight")
            assert layer[:-1] in scheme.targets
            state = {key.removeprefix(layer): x for key, x in stored.items() if key.startswith(layer)}
            dense = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]
            np.testing.assert_array_equal(dense.float().numpy(), q.astype(jnp.float32).dequantize())


def test_compressed_tensors_of_several_formats(tmp_path):
    arrays = llama.quantize_model("int4") | {k: v for k, v in llama.quantize_model("fp8").items() if "mlp" in k}
    model = load(tmp_path / "model", arrays, "compressed-tensors")
    llama.assert_near(llama.compute_logits(model), llama.expected_logits(arrays), 1e-4)
