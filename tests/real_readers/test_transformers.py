"""Folders that we write, opened by transformers with the package that the layout belongs to."""

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

    arrays = llama.quantized(format)
    model = load(tmp_path / "model", arrays, "bitsandbytes")
    name = "model.layers.0.mlp.down_proj.weight"
    layer = model.model.layers[0].mlp.down_proj
    assert isinstance(layer, bnb.nn.Linear4bit) and not isinstance(model.lm_head, bnb.nn.Linear4bit)
    dense = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    np.testing.assert_array_equal(dense.numpy(), arrays[name].dequantize())
    llama.assert_near(llama.logits_of(model), llama.expected_logits(arrays), 1e-4)


def test_int8_rows_of_bitsandbytes(tmp_path):
    import bitsandbytes as bnb

    arrays = llama.quantized("int8")
    model = load(tmp_path / "model", arrays, "bitsandbytes")
    layer = model.model.layers[1].self_attn.q_proj
    assert isinstance(layer, bnb.nn.Linear8bitLt)
    dense = layer.weight.data.float() * layer.weight.SCB[:, None] / 127
    np.testing.assert_allclose(dense.numpy(), arrays["model.layers.1.self_attn.q_proj.weight"].dequantize(), rtol=3e-7)
    # It quantizes activations to eight bits too.
    llama.assert_near(llama.logits_of(model), llama.expected_logits(arrays), 0.15)


FORMATS = [
    eqq.Int4(),
    eqq.Int4(None),
    eqq.Int4(32, symmetric=False),
    eqq.Int2(),
    eqq.Int8(),
    eqq.Int8(64, symmetric=False),
    eqq.FP8(),
    eqq.FP8(block_size="tensor"),
    eqq.FP8(block_size=64),
    eqq.MXFP4(),
]


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_compressed_tensors(tmp_path, format):
    arrays = llama.quantized(format)
    model = load(tmp_path / "model", arrays, "compressed-tensors")
    logits = llama.logits_of(model)  # decompresses
    name = "model.layers.0.mlp.gate_proj.weight"
    np.testing.assert_array_equal(
        model.model.layers[0].mlp.gate_proj.weight.detach().float().numpy(),
        arrays[name].astype(jnp.float32).dequantize(),
    )
    llama.assert_near(logits, llama.expected_logits(arrays), 1e-4)


def test_compressed_tensors_of_several_formats(tmp_path):
    arrays = llama.quantized("int4") | {k: v for k, v in llama.quantized("fp8").items() if "mlp" in k}
    model = load(tmp_path / "model", arrays, "compressed-tensors")
    llama.assert_near(llama.logits_of(model), llama.expected_logits(arrays), 1e-4)
