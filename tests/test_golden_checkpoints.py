"""Checkpoints that other libraries wrote: every array dequantizes bit for bit as in that library, or within a rounding.

`tools/golden_checkpoints.py` wrote them.
"""

import json
import shutil
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._wrappers.permuted import PermutedArray
from eqquant.io import _safetensors
from eqquant.io._dialects._item import PARTS
from eqquant.io._dialects._settings import find_unknown
from eqquant.io._files import find_files
from eqquant.io._tensors import NewTensor


FOLDERS = sorted((Path(__file__).parent / "golden" / "checkpoints").iterdir())
EVERY = [*FOLDERS, Path(__file__).parent / "golden" / "mlx"]
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


def each_layout(golden):
    """One weight of each layout of a checkpoint, by name, and all their tensors."""
    checkpoint = eqq.io.open(golden)
    names = {row.stored_as: row.name for row in checkpoint.rows if row.format is not None}.values()
    return list(names), [t for name in names for t in checkpoint.items_by_name[name].tensors]


def write_with(folder, golden, tensors, more):
    to_write = [NewTensor(t.name, t.dtype, t.shape, t.array) for t in tensors]
    to_write += [NewTensor(name, "F32", (2,), lambda: np.full(2, 3, np.float32)) for name in more]
    _safetensors.write(folder / "model.safetensors", to_write, dict(find_files(golden).metadata))
    shutil.copy(golden / "config.json", folder)
    return eqq.io.open(folder)


@pytest.mark.parametrize("golden", EVERY, ids=lambda folder: folder.name)
def test_no_tensor_beside_a_weight_is_ignored(tmp_path, golden):
    """Each part that any reader knows, and unknown ones: it changes the weight, or reading is an error."""
    names, tensors = each_layout(golden)
    expected = {name: np.asarray(eqq.io.open(golden)[name], np.float32) for name in names}
    beside = lambda *parts: [name.removesuffix("weight") + part for name in names for part in parts]
    for part in (*PARTS, "weight_new", "weight.new"):
        more = {new: name for new, name in zip(beside(part), names, strict=True)}
        for t in tensors:
            more.pop(t.name, None)
        checkpoint = write_with(tmp_path, golden, tensors, more)
        for added, name in more.items():
            if name not in checkpoint:  # another library's file, of which these tensors are no weight
                assert added in checkpoint or added.startswith(tuple(checkpoint))
                continue
            try:
                got = np.asarray(checkpoint[name], np.float32)
            except ValueError as e:
                assert "model.safetensors must h" in str(e) and name.removesuffix("weight") in str(e)
            else:
                assert got.shape != expected[name].shape or (got != expected[name]).any(), f"{added} is ignored"
    # What belongs to activations, or to the layer, is an array of its own.
    others = beside("bias", "input_scale", "lora_A.weight", "weights.scale")
    checkpoint = write_with(tmp_path, golden, tensors, others)
    assert set(checkpoint) == {*names, *others}
    for name in names:
        np.testing.assert_array_equal(np.asarray(checkpoint[name], np.float32), expected[name])


@pytest.mark.parametrize("golden", EVERY, ids=lambda folder: folder.name)
def test_no_setting_is_ignored(tmp_path, golden):
    """A setting that no reader knows is an error; one that is not set, or says how a weight was made, is none."""
    (name, *_), tensors = each_layout(golden)
    write_with(tmp_path, golden, tensors, ())
    config = json.loads((golden / "config.json").read_text())
    ((key, settings),) = config.items()
    expected, groups = eqq.io.open(golden)[name], {"config_groups": {"g": {"weights": {"hadamard": 64}}}}
    for more, unknown in (
        ({"rotation": "hadamard"}, "rotation"),
        ({"layer": {"hadamard": 64}} if key == "quantization" else groups, "hadamard"),
        ({"rotation": None, "adapter": {}, "sparsity_config": {"format": "dense"}, "damp_percent": 0.1}, None),
    ):
        (tmp_path / "config.json").write_text(json.dumps({key: settings | more}))
        if unknown is None:
            assert eqx.tree_equal(eqq.io.open(tmp_path)[name], expected)
            continue
        with pytest.raises(ValueError, match=f"does not know the setting '{unknown}' of quantization"):
            eqq.io.open(tmp_path)[name]


# Settings as libraries write them, by the library.
SETTINGS = {
    "fp8": "activation_scheme dequantize fmt modules_to_not_convert scale_fmt weight_block_size",
    "fbgemm_fp8": "activation_scale_ub modules_to_not_convert",
    "mxfp4": "modules_to_not_convert",
    "compressed-tensors": """config_groups format global_compression_ratio ignore kv_cache_scheme quantization_status
        version""",
    "modelopt": "config_groups ignore kv_cache_scheme producer quant_algo",
    "bitsandbytes": """_load_in_4bit _load_in_8bit bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_quant_type
        bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_skip_modules
        llm_int8_threshold load_in_4bit load_in_8bit""",
    "gptq": """batch_size bits block_name_to_quantize cache_block_outputs checkpoint_format damp_percent dataset
        desc_act dynamic exllama_config group_size lm_head max_input_length meta model_seqlen pack_dtype pad_token_id
        module_name_preceding_first_block modules_in_block_to_quantize static_groups sym tokenizer true_sequential
        use_exllama""",
    "awq": "backend bits do_fuse exllama_config fuse_max_seq_len group_size modules_to_fuse version zero_point",
    "auto-round": """autoround_version bits block_name_to_quantize data_type enable_quanted_input extra_config
        group_size iters low_gpu_mem_usage nsamples packing_format seqlen sym""",
    "quark": """exclude export global_quant_config kv_cache_quant_config layer_quant_config layer_type_quant_config
        quant_mode softmax_quant_spec version""",
    "torchao": """include_input_output_embeddings modules_to_not_convert quant_type quant_type_kwargs
        untie_embedding_weights""",
}


@pytest.mark.parametrize("method", SETTINGS)
def test_settings_of_libraries_are_known(method):
    settings = dict.fromkeys(SETTINGS[method].split(), 1) | {"quant_method": method}
    assert find_unknown(settings) is None


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_goldens_are_small(folder):
    assert sum(p.stat().st_size for p in folder.iterdir()) < 100_000
