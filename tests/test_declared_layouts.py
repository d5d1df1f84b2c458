"""Layouts that only the configuration tells apart, and scales under the names of other programs."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqquant as eqq
from eqquant.io import _safetensors
from eqquant.io._tensors import NewTensor

from .test_checkpoints import assert_bits, FP4, LEVELS, pack_words, small_bnb, write


# Zero points of GPTQ, GPTQModel and AutoRound


def gptq_tensors(stored, bits=4, out=32):
    """Codes that are all 9 of 4 bits (5 of 3 bits), with scales of one, and the zero points as they are stored."""
    code = 2 ** (bits - 1) + 1
    return {
        "l.qweight": pack_words(np.full((out, 64), code), bits).T,
        "l.qzeros": pack_words(np.broadcast_to(stored, (1, out)), bits),
        "l.scales": np.ones((1, out), np.float16),
    }


@pytest.mark.long
def test_autoround_stores_zero_points_in_two_ways(tmp_path):
    rng = np.random.default_rng(0)
    for bits in (2, 3, 4, 8):
        code, stored = 2 ** (bits - 1) + 1, rng.integers(0, 2**bits - 1, 32)
        for packing, minus_one in (
            *(("auto_round:auto_gptq", 1), ("auto_round:gptq", 1), ("auto_round:gptq:exllamav2", 1), ("auto_round", 0)),
            *(("auto_round:exllamav2", 0), ("auto_round:tritonv2", 0), ("auto_round:gptqmodel", 0)),
            ("autoround:exllamav2", 0),
        ):
            for method in ("auto-round", "intel/auto-round"):
                settings = {"quant_method": method, "packing_format": packing, "sym": False, "bits": bits}
                w = write(tmp_path, gptq_tensors(stored, bits), **settings)["l.weight"]
                np.testing.assert_array_equal(w[:, 0], (code - stored - minus_one).astype(np.float16))
    # The name of the field before version 0.3.
    w = write(tmp_path, gptq_tensors(8), quant_method="intel/auto-round", backend="auto_round:exllamav2")["l.weight"]
    assert w[0, 0] == 1


def test_autoround_of_some_layers(tmp_path):
    settings = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "sym": True, "group_size": 64}
    tensors = gptq_tensors(7) | {name.replace("l.", "k."): x for name, x in gptq_tensors(3).items()}
    with pytest.raises(ValueError, match="'k.qzeros': Got zero points other than the middle"):
        write(tmp_path, tensors, **settings)["k.weight"]
    checkpoint = write(tmp_path, tensors, **settings, extra_config={"k": {"sym": False}, "m": {"bits": 16}})
    assert checkpoint["l.weight"][0, 0] == 1 and checkpoint["k.weight"][0, 0] == 5
    assert write(tmp_path, tensors, **settings, dynamic={"+:k": {"sym": False}})["k.weight"][0, 0] == 5
    checkpoint = write(tmp_path, tensors, **settings | {"sym": False}, extra_config={"l": {"sym": True}})
    assert checkpoint["l.weight"].format.symmetric and not checkpoint["k.weight"].format.symmetric


@pytest.mark.parametrize(
    "settings, message",
    [
        ({}, "must say `quant_method`, and for gptq `checkpoint_format`"),
        ({"bits": 4}, "must say `quant_method`"),
        ({"quant_method": "auto-round"}, "`packing_format` of AutoRound that begins with auto_round, not 'None'"),
        ({"quant_method": "auto-round", "packing_format": "other"}, "not 'other'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "`checkpoint_format` gptq or gptq_v2, not 'marlin'"),
        ({"quant_method": "gptq", "format": "gptq_p"}, "not 'gptq_p'"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "not 'marlin'"),
        ({"quant_method": "exl2"}, "`quant_method` gptq, awq or auto-round, not 'exl2'"),
        ({"quant_method": "awq"}, "must have the shape of awq, as the configuration says"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}, "must have the shape of awq"),
    ],
)
def test_an_incomplete_configuration_is_an_error(tmp_path, settings, message):
    checkpoint = write(tmp_path, gptq_tensors(7) | {"b": np.ones(3, np.float32)}, **settings)
    assert list(checkpoint) == ["l.weight", "b"] and checkpoint["b"].shape == (3,)
    assert "cannot be read" in str(checkpoint) and "Cannot be read" in str(checkpoint)
    with pytest.raises(ValueError, match=f"model.safetensors must hold a valid 'l.qweight'.*{message}"):
        checkpoint["l.weight"]


def test_awq_has_one_layout(tmp_path):
    tensors = {
        "l.qweight": pack_words(np.full((64, 32), 9), 4),
        "l.qzeros": pack_words(np.full((1, 32), 8), 4),
        "l.scales": np.ones((1, 32), np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert eqq.io.open(tmp_path)["l.weight"][0, 0] == 1
    for settings in ({"quant_method": "awq", "version": "gemm"}, {"quant_method": "awq", "checkpoint_format": "gemm"}):
        assert write(tmp_path, tensors, **settings)["l.weight"][0, 0] == 1
    settings = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq"}
    assert write(tmp_path, tensors, **settings)["l.weight"][0, 0] == 1
    for settings, message in (
        ({"quant_method": "awq", "version": "gemv"}, "`version` gemm of AWQ, not 'gemv'"),
        ({"quant_method": "gptq"}, "must have the shape of gptq"),
    ):
        with pytest.raises(ValueError, match=message):
            write(tmp_path, tensors, **settings)["l.weight"]


def test_symmetric_zero_points_of_the_other_version(tmp_path):
    gptq = {"quant_method": "gptq", "sym": True}
    for settings in (gptq, gptq | {"checkpoint_format": "gptq"}):
        for stored in (7, 8):
            w = write(tmp_path, gptq_tensors(stored), **settings)["l.weight"]
            assert w.format.symmetric and w[0, 0] == 1
        with pytest.raises(ValueError, match="If their layout is gptq_v2, `checkpoint_format` must say so"):
            write(tmp_path, gptq_tensors(np.arange(32) % 2 + 7), **settings)["l.weight"]
    w = write(tmp_path, gptq_tensors(8, bits=4), quant_method="gptq", sym=False)["l.weight"]
    assert w[0, 0] == 0  # then the label decides


def test_reads_the_configuration_file_of_autogptq(tmp_path):
    save_file({k: np.ascontiguousarray(v) for k, v in gptq_tensors(5).items()}, tmp_path / "model.safetensors")
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 64, "sym": false, "desc_act": false}')
    assert eqq.io.open(tmp_path)["l.weight"][0, 0] == 3
    (tmp_path / "quantize_config.json").write_text('{"quant_method": "awq"}')
    with pytest.raises(ValueError, match="must have the shape of awq"):
        eqq.io.open(tmp_path)["l.weight"]


def test_ambiguous_bits_are_an_error(tmp_path):
    # MLX: 8 bits in groups of 32 have the shapes of 4 bits in groups of 64.
    tensors = {"l.weight": np.ones((4, 16), np.uint32), "l.scales": np.ones((4, 2), np.float16)}
    tensors["l.biases"] = tensors["l.scales"]
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    for settings in ({}, {"quantization": {"bits": 4}}, {"quantization": {"group_size": 64}}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(
            ValueError, match="'l.weight': `quantization` of `config.json` must say `bits` and `group_si"
        ):
            eqq.io.open(path)["l.weight"]
    for bits, group in ((4, 64), (8, 32)):
        (tmp_path / "config.json").write_text(json.dumps({"quantization": {"bits": bits, "group_size": group}}))
        assert eqq.io.open(path)["l.weight"].format == eqq.formats.MLX(bits, group)
    # compressed-tensors: rows of a few values.
    q = np.arange(6)[None] % 4
    tensors = {"l.weight_packed": pack_words(q, 3), "l.weight_scale": np.ones((1, 1), np.float32)}
    tensors["l.weight_shape"] = np.array([1, 6])
    for bits in (None, 7):
        groups = {"config_groups": {"g": {"weights": {"num_bits": bits}}}} if bits else {}
        with pytest.raises(ValueError, match="short rows if `config.json` says how many"):
            write(tmp_path, tensors, **groups)["l.weight"]
    w = write(tmp_path, tensors, config_groups={"g": {"weights": {"num_bits": 3}}})["l.weight"]
    np.testing.assert_array_equal(w, q - 4)


@pytest.mark.parametrize(
    "settings", [{"config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}, {"data_type": "mx_int4"}]
)
def test_integers_in_the_place_of_mxfp4(tmp_path, settings):
    tensors = {"l.weight_packed": np.ones((4, 32), np.uint8), "l.weight_scale": np.full((4, 2), 127, np.uint8)}
    assert write(tmp_path, tensors)["l.weight"].format == eqq.MXFP4()
    with pytest.raises(ValueError, match="reads small blocks of floats, and `config.json` says integers"):
        write(tmp_path, tensors, **settings)["l.weight"]
    tensors = {"l.weight_packed": np.ones((4, 32), np.uint8), "l.weight_scale": np.full((4, 4), 127, np.uint8)}
    with pytest.raises(ValueError, match="NVFP4 with scales of F8_E4M3, not U8"):
        write(tmp_path, tensors | {"l.weight_global_scale": np.ones(1, np.float32)})["l.weight"]


# Scales under other names


def write_typed(folder, tensors, **settings):
    to_write = [NewTensor(name, dtype, x.shape, lambda x=x: x) for name, (dtype, x) in tensors.items()]
    _safetensors.write(folder / "model.safetensors", to_write, {})
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return eqq.io.open(folder)


def fp8(shape, seed=0):
    return np.asarray(jnp.asarray(np.random.default_rng(seed).standard_normal(shape)).astype(jnp.float8_e4m3fn))


NAMES = [
    *(("l.weight", "l.weight_scale"), ("l.weight", "l.weight_scale_inv"), ("l.weight", "l.scale")),
    *(("l.weight", "l.weight.scale"), ("l.weight", "l.qscale_weight"), ("l.weight", "l.scale_weight")),
    *(("experts.down_proj", "experts.down_proj_scale_inv"), ("experts.up", "experts.up_scales_inv")),
]


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("name, scale", NAMES)
@pytest.mark.parametrize("kind", ["tensor", "scalar", "row", "tile", "powers"])
def test_names_of_scales(tmp_path, name, scale, kind, declared):
    shape = {"tensor": (1,), "scalar": (), "row": (200, 1)}.get(kind, (2, 3))
    s, w = np.random.default_rng(1).random(shape).astype(np.float32), fp8((200, 384))
    dtype = "F8_E8M0" if kind == "powers" else "F32"
    if kind == "powers":
        s = np.array([[120, 121, 122], [123, 124, 125]], np.uint8)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]} if declared else {}
    checkpoint = write_typed(
        tmp_path, {name: ("F8_E4M3", w), scale: (dtype, s), "l.bias": ("F32", np.ones(3, "f4"))}, **settings
    )
    assert set(checkpoint) == {name, "l.bias"}
    values = 2.0 ** (s.astype(np.float32) - 127) if kind == "powers" else s
    if values.shape == (2, 3):
        values = np.repeat(np.repeat(values, 128, 0)[:200], 128, 1)
    assert_bits(checkpoint[name].dequantize(), w.astype(np.float32) * values.astype(np.float32))


@pytest.mark.parametrize("shape", [(2, 2, 3), (2, 200, 1), (2, 200), (2,), (2, 1, 1), (1,), (1, 1, 1)])
def test_experts_in_eight_bits(tmp_path, shape):
    s = np.random.default_rng(1).random(shape).astype(np.float32)
    whole = s.reshape({1: (*shape, 1, 1), 2: (*shape, 1)}.get(len(shape), shape))
    spread = np.repeat(np.repeat(whole, 128, 1)[:, :200], 128, 2) if shape == (2, 2, 3) else whole
    w = fp8((2, 200, 384))
    got = write_typed(tmp_path, {"e.up": ("F8_E4M3", w), "e.up_scale_inv": ("F32", s)}, quant_method="fp8")["e.up"]
    assert got.shape == w.shape and got.format.bits == 8
    assert_bits(got.dequantize(), w.astype(np.float32) * spread)
    x = np.random.default_rng(2).integers(-127, 128, (2, 200, 384)).astype(np.int8)
    got = write_typed(tmp_path, {"e.weight": ("I8", x), "e.weight_scale": ("F32", s)}, quant_method="fp8")["e.weight"]
    assert_bits(got.dequantize(), x.astype(np.float32) * spread)


def test_tiles_of_the_configuration(tmp_path):
    w, s = fp8((96, 200)), np.random.default_rng(1).random((3, 4)).astype(np.float32)
    tensors = {"l.weight": ("F8_E4M3", w), "l.weight_scale_inv": ("F32", s)}
    expected = w.astype(np.float32) * np.repeat(np.repeat(s, 32, 0), 64, 1)[:, :200]
    for settings in (
        {"weight_block_size": [32, 64]},
        {"config_groups": {"g": {"weights": {"strategy": "block", "block_structure": [32, 64]}}}},
    ):
        assert_bits(write_typed(tmp_path, tensors, **settings)["l.weight"].dequantize(), expected)
    config = {"compression_config": {"weight_block_size": [32, 64]}}  # as llm-compressor once called it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_bits(eqq.io.open(tmp_path)["l.weight"].dequantize(), expected)
    # Tiles of one row, the last of which is shorter.
    rows = {"l.weight": ("F8_E4M3", w[:3]), "l.weight_scale_inv": ("F32", s[:, :2])}
    got = write_typed(tmp_path, rows, weight_block_size=[1, 128])["l.weight"]
    assert_bits(got.dequantize(), w[:3].astype(np.float32) * np.repeat(s[:, :2], 128, 1)[:, :200])
    with pytest.raises(ValueError, match="a scale for each row, or each 128 x 128 values"):
        write_typed(tmp_path, tensors, quant_method="fp8")["l.weight"]


@pytest.mark.parametrize("dtype", ["I8", "U8", "F4"])
def test_small_floats_with_other_names(tmp_path, dtype):
    """DeepSeek's experts, and ModelOpt's NVFP4."""
    rng = np.random.default_rng(0)
    q = rng.integers(0, 16, (6, 64))
    packed = (q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8)
    codes = q.astype(np.uint8).view(jnp.float4_e2m1fn) if dtype == "F4" else packed
    e, inner = rng.integers(120, 130, (6, 2)).astype(np.uint8), np.abs(fp8((6, 4)))
    w = write_typed(tmp_path, {"l.weight": (dtype, codes), "l.scale": ("F8_E8M0", e)}, quant_method="fp8")["l.weight"]
    assert w.format == eqq.MXFP4()
    expected = LEVELS[q] * np.repeat(2.0 ** (e.astype(np.float32) - 127), 32, axis=1)
    np.testing.assert_array_equal(np.asarray(w.dequantize(), np.float32), expected)
    tensors = {"l.weight": (dtype, codes), "l.weight_scale": ("F8_E4M3", inner)}
    outer = np.array(0.25, np.float32)
    w = write_typed(tmp_path, tensors | {"l.weight_scale_2": ("F32", outer)}, quant_method="modelopt")["l.weight"]
    assert w.format == eqq.NVFP4()
    expected = LEVELS[q] * np.repeat(inner.astype(np.float32) * 0.25, 16, axis=1)
    np.testing.assert_array_equal(np.asarray(w.astype(jnp.float32).dequantize()), expected)


def test_codes_without_a_scale(tmp_path):
    w, whole = fp8((4, 64)), np.ones((4, 64), np.float32)
    mask = np.ones((1, 1, 8, 8), np.uint8)
    tensors = {
        **{"a.weight": ("F8_E4M3", w), "a.weight_magic": ("F32", whole[:1, :1]), "b": ("F8_E5M2", w)},
        **{"c.weight": ("I8", whole.astype(np.int8)), "d.weight": ("U8", whole.astype(np.uint8))},
        **{
            "e.weight": ("F32", whole),
            "f.weight": ("I32", whole.astype(np.int32)),
            "ids": ("I64", np.arange(3)),
            "mask": ("U8", mask),
        },
    }
    codes = {"a.weight", "b", "c.weight", "d.weight", "f.weight"}
    for settings in ({"quant_method": "fp8"}, {"quant_method": "bitsandbytes"}):
        checkpoint = write_typed(tmp_path, tensors, **settings)
        assert {row.name for row in checkpoint.rows if row.problem} == codes and len(checkpoint) == 9
        for name in codes:
            with pytest.raises(ValueError, match=f"{re.escape(name)}': .*weights are {settings['quant_method']}, and"):
                checkpoint[name]
        assert_bits(checkpoint["e.weight"], whole)
        with pytest.raises(ValueError, match="'[af].weight': .*no scale"):
            eqq.io.convert(checkpoint, tmp_path / "out.safetensors", {"*": "int8"})
        assert not (tmp_path / "out.safetensors").exists()
    # Models for text and images say it one level below; and without a word about it, values are values.
    (tmp_path / "config.json").write_text('{"text_config": {"quantization_config": {"quant_method": "fp8"}}}')
    assert {row.name for row in eqq.io.open(tmp_path).rows if row.problem} == codes
    (tmp_path / "config.json").write_text("{}")
    assert_bits(eqq.io.open(tmp_path)["a.weight"], w)


def test_a_scale_without_its_weight(tmp_path):
    checkpoint = write_typed(tmp_path, {"l.weight_scale": ("F32", np.ones(4, "f4"))}, quant_method="fp8")
    with pytest.raises(ValueError, match="'l.weight_scale': It must belong to a weight with a scale"):
        checkpoint["l.weight"]


# compressed-tensors: experts in three axes, and one scale for all


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("strategy", ["group", "channel", "tensor"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_packed_experts_and_whole_tensors(tmp_path, bits, zeros, strategy, batch):
    rng = np.random.default_rng(0)
    shape = (*batch, 10, 96)
    scales = {"group": (*batch, 10, 3), "channel": (*batch, 10, 1), "tensor": (1,)}[strategy]
    q, z = rng.integers(0, 2**bits, shape), rng.integers(0, 2**bits, scales)
    s = rng.random(scales).astype(np.float32)
    tensors = {"l.weight_packed": pack_words(q, bits), "l.weight_scale": s, "l.weight_shape": np.array(shape)}
    if zeros and strategy == "tensor":
        tensors["l.weight_zero_point"] = (z - 2 ** (bits - 1)).astype(np.int8)
    elif zeros:
        tensors["l.weight_zero_point"] = pack_words(z.swapaxes(-1, -2), bits).swapaxes(-1, -2)
    weights = {"num_bits": bits, "strategy": strategy, "type": "int"}
    checkpoint = write(tmp_path, tensors, quant_method="compressed-tensors", config_groups={"g": {"weights": weights}})
    w = checkpoint["l.weight"]
    assert list(checkpoint) == ["l.weight"] and w.shape == shape and w.format.symmetric != zeros
    spread = lambda x: np.repeat(x, 32, axis=-1) if strategy == "group" else x
    zero = spread(z) if zeros else 2 ** (bits - 1)
    assert_bits(w.dequantize(), ((q - zero) * spread(s)).astype(np.float32))


def test_floats_of_experts(tmp_path):
    rng = np.random.default_rng(0)
    q, e = rng.integers(0, 16, (3, 6, 64)), rng.integers(120, 130, (3, 6, 2)).astype(np.uint8)
    packed = (q[..., ::2] | q[..., 1::2] << 4).astype(np.uint8)
    w = write(tmp_path, {"l.weight_packed": packed, "l.weight_scale": e})["l.weight"]
    expected = LEVELS[q] * np.repeat(2.0 ** (e.astype(np.float32) - 127), 32, axis=-1)
    np.testing.assert_array_equal(np.asarray(w.dequantize(), np.float32), expected)


# Parts that only some files have


def test_the_order_of_groups(tmp_path):
    """With int8 and fp8, as with packed integers."""
    rng = np.random.default_rng(0)
    group, s = rng.permutation(np.arange(128) % 2).astype(np.int32), rng.random((8, 2)).astype(np.float32)
    for dtype, x in (("I8", rng.integers(-9, 9, (8, 128)).astype(np.int8)), ("F8_E4M3", fp8((8, 128)))):
        tensors = {"l.weight": (dtype, x), "l.weight_scale": ("F32", s), "l.weight_g_idx": ("I32", group)}
        w = write_typed(tmp_path, tensors, quant_method="compressed-tensors")["l.weight"]
        assert_bits(w.dequantize(), x.astype(np.float32) * s[:, group])
        unset = tensors | {"l.weight_g_idx": ("I32", np.full(128, -1, np.int32))}
        w = write_typed(tmp_path, unset, quant_method="compressed-tensors")["l.weight"]
        assert_bits(w.dequantize(), x.astype(np.float32) * np.repeat(s, 64, axis=1))
    tensors = {
        "l.qweight": pack_words(np.full((64, 32), 9), 4),
        "l.qzeros": pack_words(np.full((2, 32), 8), 4),
        "l.scales": np.ones((2, 32), np.float16),
        "l.g_idx": np.arange(64, dtype=np.int32) // 32,
    }
    assert write(tmp_path, tensors, quant_method="awq")["l.weight"][0, 0] == 1
    with pytest.raises(ValueError, match="'l.g_idx': AWQ stores inputs in the order of the weight"):
        write(tmp_path, tensors | {"l.g_idx": np.arange(64, dtype=np.int32) % 2}, quant_method="awq")["l.weight"]


@pytest.mark.parametrize("part", ["weight_shape", "weight_shape_original"])
def test_padding_is_cut_off(tmp_path, part):
    rng = np.random.default_rng(0)
    scales, size = rng.random((2, 3)).astype(np.float32), ("I64", np.array([200, 140]))
    tensors = {"l.weight": ("F8_E4M3", fp8((256, 384))), "l.weight_scale": ("F32", scales), f"l.{part}": size}
    checkpoint = write_typed(tmp_path, tensors, quant_method="compressed-tensors")
    spread = np.repeat(np.repeat(scales, 128, 0), 128, 1)
    whole = tensors["l.weight"][1].astype(np.float32) * spread
    assert checkpoint.rows[0].shape == (200, 140)
    assert_bits(checkpoint["l.weight"].dequantize(), whole[:200, :140])
    q, inner = rng.integers(0, 256, (6, 32)).astype(np.uint8), ("F8_E4M3", np.abs(fp8((6, 4))))
    small = {"k.weight": ("U8", q), "k.weight_scale": inner, "k.weight_scale_2": ("F32", np.ones(1, np.float32))}
    whole = np.asarray(write_typed(tmp_path, small)["k.weight"].dequantize())
    cut = write_typed(tmp_path, small | {f"k.{part}": ("I64", np.array([5, 20]))})["k.weight"]
    assert_bits(cut.dequantize(), whole[:5, :20])
    for wrong in ([7, 20], [0, 20], [6, 65]):
        with pytest.raises(ValueError, match=f"'k.{part}': It must be the shape of the weight, or of two dim"):
            write_typed(tmp_path, small | {f"k.{part}": ("I64", np.array(wrong))})["k.weight"]


def test_a_scale_of_each_expert(tmp_path):
    """NVFP4 of compressed-tensors divides by them, and of ModelOpt multiplies."""
    rng = np.random.default_rng(0)
    q, inner = rng.integers(0, 16, (3, 6, 64)), np.abs(fp8((3, 6, 4)))
    packed, outer = (q[..., ::2] | q[..., 1::2] << 4).astype(np.uint8), np.array([0.5, 2, 8], np.float32)
    expected = LEVELS[q] * np.repeat(inner.astype(np.float32), 16, axis=-1)
    for weight, scale, factor in (("_packed", "_global_scale", 1 / outer), ("", "_scale_2", outer)):
        for shape in ((3,), (3, 1), (3, 1, 1)):
            tensors = {f"l.weight{weight}": ("U8", packed), "l.weight_scale": ("F8_E4M3", inner)}
            tensors[f"l.weight{scale}"] = ("F32", outer.reshape(shape))
            w = write_typed(tmp_path, tensors)["l.weight"].astype(jnp.float32)
            assert_bits(w.dequantize(), expected * factor[:, None, None])
        tensors[f"l.weight{scale}"] = ("F32", outer[:2])
        with pytest.raises(ValueError, match="one F32 number, or one for each expert"):
            write_typed(tmp_path, tensors)["l.weight"]


def test_values_beside_a_weight_are_checked(tmp_path):
    one, w = np.ones(1, np.float32), fp8((4, 64))
    scaled = {"l.weight": ("F8_E4M3", w), "l.weight_scale": ("F32", one)}
    int8 = {"l.weight": ("I8", np.ones((4, 64), np.int8)), "l.SCB": ("F32", np.ones(4, np.float32))}
    comfy = lambda about: {"l.comfy_quant": ("U8", np.frombuffer(json.dumps(about).encode(), np.uint8))}
    for tensors, good, bad, message in (
        (int8, {"l.weight_format": ("U8", np.array(0, np.uint8))}, {"l.weight_format": ("U8", np.array(3, np.uint8))},
         "'l.weight_format': It must be 0"),
        (scaled, {"l.weight_zero_point": ("F8_E4M3", np.zeros_like(w[:1, :1]))}, {"l.weight_zero_point": ("F32", one)},
         "'l.weight_zero_point': It must be zero beside F8_E4M3"),
        (scaled, comfy({"format": "float8_e4m3fn", "full_precision_matrix_mult": True}), comfy({"format": "nvfp4"}),
         "'l.comfy_quant': eqquant reads float8_e4m3fn"),
        (scaled, comfy({"format": "float8_e5m2"}), comfy({"format": "float8_e5m2", "convrot": 1}), "'l.comfy_quant'"),
    ):  # fmt: skip
        assert_bits(*(write_typed(tmp_path, x)["l.weight"].dequantize() for x in (tensors | good, tensors)))
        with pytest.raises(ValueError, match=message):
            write_typed(tmp_path, tensors | bad)["l.weight"]


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32])
def test_storage_of_bitsandbytes(tmp_path, dtype):
    """`bnb_4bit_quant_storage`: the same bytes under another dtype."""
    path = tmp_path / "model.safetensors"
    expected = small_bnb(path, (4, 128), 64, FP4)
    tensors = load_file(path)
    for size, right in ((256, True), (252, False)):
        stored = tensors["w"][:size, 0].view(dtype).reshape(-1, 1)
        save_file(tensors | {"w": stored}, path)
        if right:
            assert_bits(eqq.io.open(path)["w"].dequantize(), expected)
        else:
            with pytest.raises(ValueError, match=r"'w': It must be U8 of \[256, 1\], or floats of as many bytes"):
                eqq.io.open(path)["w"]
