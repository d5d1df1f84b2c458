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
    *(eqq.FP8(block_size=(128, 128)), eqq.FP8(block_size=(32, 64))),
]


def open_folder(folder, arrays):
    """Writes a folder of compressed-tensors. Yields the name, array, tensors and settings of each quantized weight."""
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    eqq.io.write(folder, arrays, "compressed-tensors", config=llama.CONFIG.to_dict())
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (scheme,) = QuantizationConfig(**config).config_groups.values()
    for name, q in arrays.items():
        if eqq.is_quantized(q):
            layer = name.removesuffix("weight")
            assert layer[:-1] in scheme.targets
            yield name, q, {key.removeprefix(layer): x for key, x in stored.items() if key.startswith(layer)}, scheme


@pytest.mark.parametrize("format", ALONE, ids=str)
def test_decompressing_by_compressed_tensors_alone(tmp_path, format):
    """What transformers does not load into a float32 model: packed zero points, MXFP4 (bfloat16), and tiles."""
    from compressed_tensors.compressors import BaseCompressor

    for _, q, state, scheme in open_folder(tmp_path / "model", llama.quantize_model(format)):
        dense = BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"]
        np.testing.assert_array_equal(dense.float().numpy(), q.astype(jnp.float32).dequantize())


@pytest.mark.parametrize("size, tolerance", [(2.0**-9, 0), (3e-3, 3e-7)])
def test_nvfp4_of_compressed_tensors_and_of_modelopt(tmp_path, size, tolerance):
    """Weights are ours to the bit if the scale of a matrix is a power of two, whose reciprocal is exact.

    What its own converter makes of ModelOpt's file is what we write for compressed-tensors.
    """
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from safetensors.torch import load_file

    def rescale(q):  # the scale of a matrix follows from its amax
        return eqq.quantize(q.dequantize() * (size * 6 * 448 / jnp.abs(q.dequantize()).max()), eqq.NVFP4())

    arrays = {name: rescale(q) for name, q in llama.quantize_model(eqq.NVFP4()).items() if eqq.is_quantized(q)}
    eqq.io.write(tmp_path / "modelopt", arrays, "modelopt")
    converted = load_file(tmp_path / "modelopt" / "model.safetensors")
    converted = ModelOptNvfp4Converter(targets=["re:.*proj$"]).process(converted)
    for name, q, state, scheme in open_folder(tmp_path / "model", arrays):
        codes = unpack_fp4_from_uint8(state["weight_packed"], *q.shape, dtype=torch.float32)
        scales = {"scale": state["weight_scale"].float(), "global_scale": state["weight_global_scale"]}
        dense = dequantize(codes, **scales, args=scheme.weights, dtype=torch.float32)
        np.testing.assert_allclose(dense.numpy(), q.dequantize(), rtol=tolerance)
        for key, x in state.items():
            theirs = converted[f"{name.removesuffix('weight')}{key}"]
            assert theirs.dtype == x.dtype and bool((theirs.float() == x.float()).all())


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (64, 1000)])
def test_tiles_as_compressed_tensors_quantizes_them(tmp_path, shape):
    """Codes of its scheme FP8_BLOCK by the same scales, of tiles that may end beyond the weight.

    Our scales by amax may differ in the last bit: XLA multiplies by the rounded reciprocal of 448.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import FP8_BLOCK
    from compressed_tensors.quantization.utils import calculate_qparams, maybe_pad_tensor_for_block_quant

    args = FP8_BLOCK["weights"]
    x = torch.from_numpy(np.random.default_rng(0).standard_t(4, shape).astype(np.float32))
    padded = maybe_pad_tensor_for_block_quant(x, args.block_structure)
    tiles = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale, zero_point = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), args)
    state = {"weight": x, "weight_scale": scale, "weight_zero_point": zero_point}
    compressor = BaseCompressor.get_value_from_registry("float-quantized")
    theirs = compressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))
    quantize = lambda **given: eqq.quantize(jnp.asarray(x.numpy()), eqq.FP8(block_size=(128, 128)), **given)
    by_amax = quantize().scale_bits.view(jnp.float32)
    np.testing.assert_allclose(by_amax, scale.numpy(), rtol=1.2e-7)
    q = quantize(scale=jnp.asarray(scale.numpy()))
    ((_, _, ours, scheme),) = open_folder(tmp_path / "model", {"layer.weight": q})
    assert scheme.weights.strategy == args.strategy and scheme.weights.block_structure == args.block_structure
    for part in ("weight", "weight_scale"):
        assert ours[part].dtype == theirs[part].dtype and ours[part].shape == theirs[part].shape
        np.testing.assert_array_equal(ours[part].float().numpy(), theirs[part].float().numpy())


def test_compressed_tensors_of_several_formats(tmp_path):
    arrays = llama.quantize_model("int4") | {k: v for k, v in llama.quantize_model("fp8").items() if "mlp" in k}
    model = load(tmp_path / "model", arrays, "compressed-tensors")
    llama.assert_near(llama.compute_logits(model), llama.expected_logits(arrays), 1e-4)
