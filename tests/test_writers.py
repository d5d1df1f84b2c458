"""Files for other libraries: written arrays are read back bit for bit, or refused.

`tests/real_readers/` lets those libraries read them.
"""

import json
import re
import struct
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.io._write import WRITERS
from eqquant.io._writers import _layout

from .helpers import weights


GOLDEN = Path(__file__).parent / "golden"
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
FP4 = eqq.Codebook(np.unique([*FP4, *-FP4]))
TILES = [eqq.FP8(block_size=(4, 32)), eqq.FP8(block_size=(8, 32))]


def weight(*shape, dtype=jnp.float32):
    # Different magnitudes, so that no two scales are equal by chance.
    x = weights(jr.key(sum(shape)), shape) * jnp.exp(weights(jr.key(1), (*shape[:-1], 1)))
    return (x.at[0].set(0) if len(shape) > 1 and shape[0] > 2 else x).astype(dtype)


def write(tmp_path, arrays, dialect, **kwargs):
    path = tmp_path / ("model.gguf" if dialect == "gguf" else "model")
    eqq.io.write(path, arrays, dialect, **kwargs)
    checkpoint = eqq.io.open(path)
    assert checkpoint.dialect == dialect
    return checkpoint


def assert_same(actual, expected):
    """The same codes, scales, zero points and values. A block as long as a row may have become the whole row."""
    assert type(actual.format) is type(expected.format) and actual.axis == expected.axis
    leaves = lambda q: [*jtu.tree_leaves((q.codes, q.zero_point_bits)), q.scale]
    for x, y in zip(leaves(actual), leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    assert actual.shape == expected.shape
    in_float32 = lambda q: np.asarray(q.astype(jnp.float32).dequantize()).tobytes()
    assert in_float32(actual) == in_float32(expected)


def sweep(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    ("gguf", eqq.formats.Q4_0(), (5, 96)),
    ("gguf", eqq.formats.Q8_0(), (5, 96)),
    ("gguf", eqq.MXFP4(), (5, 96)),
    ("gguf", eqq.formats.Q4_K(), (2, 3, 512)),
    *(
        sweep("gguf", format(), (3, 512))
        for format in (
            eqq.formats.Q4_1,
            eqq.formats.Q5_0,
            eqq.formats.Q5_1,
            eqq.formats.Q2_K,
            eqq.formats.Q3_K,
            eqq.formats.Q5_K,
            eqq.formats.Q6_K,
            eqq.formats.IQ4_NL,
            eqq.formats.IQ4_XS,
        )
    ),
    sweep("gguf", eqq.formats.Q4_0(), (2, 3, 32)),
    sweep("gguf", eqq.formats.Q8_0(), (64,)),
    sweep("bitsandbytes", eqq.NF4(32), (3, 96)),
    sweep("bitsandbytes", eqq.NF4(), (6, 128)),
    sweep("bitsandbytes", eqq.NF4(), (2, 3, 64)),
    ("bitsandbytes", FP4, (4, 192)),
    ("compressed-tensors", eqq.Int4(16), (10, 48)),
    sweep("compressed-tensors", eqq.Int4(16, symmetric=False), (10, 48)),
    sweep("compressed-tensors", eqq.Int4(None), (9, 7)),
    sweep("compressed-tensors", eqq.Int4("tensor"), (9, 8)),
    sweep("compressed-tensors", eqq.Int4(None, symmetric=False), (10, 48)),
    ("compressed-tensors", eqq.Int2(None, symmetric=False), (3, 37)),
    ("compressed-tensors", eqq.Int3(None, symmetric=False), (7, 37)),
    ("compressed-tensors", eqq.Int5(16), (3, 48)),
    ("compressed-tensors", eqq.Int6(None), (5, 96)),
    ("compressed-tensors", eqq.Int6(None), (5, 9)),  # whose words are as many as those of four or five bits
    sweep("compressed-tensors", eqq.Int2(None), (3, 37)),
    sweep("compressed-tensors", eqq.Int8(), (9, 7)),
    ("compressed-tensors", eqq.Int8(16, symmetric=False), (4, 48)),
    ("compressed-tensors", eqq.FP8(), (200, 256)),
    sweep("compressed-tensors", eqq.FP8(block_size=128), (200, 256)),
    sweep("compressed-tensors", eqq.FP8(block_size=64), (200, 256)),
    sweep("compressed-tensors", eqq.FP8(block_size="tensor"), (200, 256)),
    sweep("compressed-tensors", eqq.MXFP4(), (5, 96)),
    ("fp8", eqq.FP8(block_size=(128, 128)), (200, 300)),
    sweep("fp8", eqq.FP8(block_size=(16, 32)), (50, 96)),
    ("modelopt", eqq.NVFP4(), (5, 96)),
    sweep("modelopt", eqq.NVFP4(), (3, 5, 96)),
    sweep("modelopt", eqq.FP8(block_size="tensor"), (200, 256)),
    sweep("mlx", eqq.formats.MLX(3, 32), (5, 96)),
    *(sweep("mlx", eqq.formats.MLX(bits, 64), (2, 3, 128)) for bits in (2, 4, 5, 6, 8)),
    sweep("mlx", eqq.MXFP4(), (5, 96)),
    sweep("mlx", eqq.MXFP8(), (5, 96)),
    ("gptq", eqq.Int4(32), (16, 64)),
    sweep("gptq", eqq.Int4(None, symmetric=False), (16, 64)),
    ("gptq", eqq.Int2(), (32, 128)),
    ("gptq", eqq.Int8(16, symmetric=False), (4, 64)),
]


@pytest.mark.parametrize("dialect, format, shape", CASES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_written_files_are_read_back(tmp_path, dialect, format, shape, dtype):
    q = eqq.quantize(weight(*shape, dtype=dtype), format)
    x = weight(3, 5, dtype=dtype)
    checkpoint = write(tmp_path, {"l.weight": q, "norm.weight": x}, dialect)
    assert list(checkpoint) == ["l.weight", "norm.weight"]
    assert_same(checkpoint["l.weight"], q)
    assert eqx.tree_equal(checkpoint["norm.weight"], x)
    if dialect in ("compressed-tensors", "gptq") and format != eqq.MXFP4() and dtype == "float32":
        assert checkpoint["l.weight"].dtype == dtype
    # What was read is written again as the same file.
    again = tmp_path / "again"
    again.mkdir()
    write(again, checkpoint, dialect)
    for path in (p for p in tmp_path.rglob("*") if p.is_file() and again not in p.parents):
        assert path.read_bytes() == (again / path.relative_to(tmp_path)).read_bytes()


def test_scales_of_128_by_128_values(tmp_path):
    codes = weights(jr.key(0), (300, 384)).astype(jnp.float8_e4m3fn)
    scale = np.random.default_rng(0).random((3, 3)).astype(np.float32)
    q = eqq.quantize(codes.astype(jnp.float32), eqq.FP8(block_size=128))
    spread = jnp.repeat(jnp.asarray(scale), 128, axis=0)[:300]
    q = eqx.tree_at(lambda q: q.scale_bits, q, jax.lax.bitcast_convert_type(spread, jnp.uint32))
    checkpoint = write(tmp_path, {"l.weight": q}, "compressed-tensors")
    assert checkpoint.rows[0].nbytes == 300 * 384 + 9 * 4
    assert checkpoint.config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] == "block"
    assert_same(checkpoint["l.weight"], q)
    # One row with a scale of its own.
    q = eqx.tree_at(lambda q: q.scale_bits, q, q.scale_bits.at[5, 1].add(1))
    (tmp_path / "rows").mkdir()
    assert_same(write(tmp_path / "rows", {"l.weight": q}, "compressed-tensors")["l.weight"], q)


def test_scales_that_the_dtype_of_the_weight_cannot_hold(tmp_path):
    """They stay in float32. In float16 the first would be zero."""
    for dtype, value in (("float16", 6e-8), ("bfloat16", 1)):
        q = eqq.quantize(jnp.full((16, 64), value, dtype), eqq.Int4(32))
        for dialect in ("compressed-tensors", "gptq"):
            folder = tmp_path / f"{dialect}-{dtype}"
            folder.mkdir()
            assert_same(write(folder, {"l.weight": q}, dialect)["l.weight"], q)


@pytest.mark.parametrize(
    "shape, block, nested",
    [((3, 2048), 32, True), ((1, 8500), 32, True), ((2, 16_384), 32, True), ((3, 192), 32, False)],
)
def test_scales_of_scales_of_bitsandbytes(tmp_path, shape, block, nested):
    q = eqq.quantize(weight(*shape), eqq.NF4(block, double_quant=True))
    checkpoint = write(tmp_path, {"l.weight": q}, "bitsandbytes")
    assert checkpoint.rows[0].stored_as == ("nf4, nested" if nested else "nf4")
    assert checkpoint.config["quantization_config"]["bnb_4bit_use_double_quant"] is nested
    np.testing.assert_array_equal(checkpoint["l.weight"].dequantize(), q.dequantize())
    if nested and shape[0] > 1:
        assert checkpoint.rows[0].nbytes < q.nbytes + 2_000


def test_int8_rows_of_bitsandbytes(tmp_path):
    q = eqq.quantize(weight(700, 50), "int8")
    read = write(tmp_path, {"l.weight": q}, "bitsandbytes")["l.weight"]
    assert read.format == eqq.Int8() and eqx.tree_equal(read.codes, q.codes)
    np.testing.assert_allclose(read.scale, q.scale, rtol=1.2e-7)
    huge = eqx.tree_at(lambda q: q.scale_bits, q, jnp.full_like(q.scale_bits, 0x7F000000))
    with pytest.raises(ValueError, match="its largest magnitudes must be finite"):
        write(tmp_path, {"l.weight": huge}, "bitsandbytes")


@pytest.mark.parametrize("shape, axis", [((5, 7), (-2, -1)), ((1, 63), -1)])
def test_a_weight_of_bitsandbytes_in_one_row(tmp_path, shape, axis):
    q = eqq.quantize(weight(*shape), eqq.NF4(128), axis=axis)
    read = write(tmp_path, {"w": q}, "bitsandbytes")["w"]
    assert read.axis == (-2, -1) and eqx.tree_equal(read.codes.reshape(-1), q.codes.reshape(-1))
    np.testing.assert_array_equal(read.dequantize(), q.dequantize())


@pytest.mark.long
def test_a_model_under_other_names(tmp_path):
    model = eqq.quantize_tree(eqx.nn.MLP(64, 32, 128, 2, key=jr.key(0)), "q8_0")
    name_of = lambda path: None if "bias" in path else f"blk.{path.split('.')[1]}.ffn.weight"
    checkpoint = write(tmp_path, model, "gguf", names=name_of)
    assert list(checkpoint) == ["blk.0.ffn.weight", "blk.1.ffn.weight", "blk.2.ffn.weight"]
    assert_same(checkpoint["blk.1.ffn.weight"], model.layers[1].weight)
    renamed = write(tmp_path, checkpoint, "gguf", names={name: name.upper() for name in checkpoint})
    assert list(renamed) == [name.upper() for name in checkpoint]


class Lazy(dict):
    """Counts the arrays that were read and are still alive."""

    def __init__(self, shape):
        super().__init__({f"{n}.weight": n for n in range(6)})
        self.reads, self.shape = 0, shape

    def __getitem__(self, name):
        self.reads += 1
        return eqq.quantize(jnp.full(self.shape, super().__getitem__(name), jnp.float32), "int4")


@pytest.mark.parametrize("dialect", ["compressed-tensors", "gptq"])
def test_each_array_is_read_twice_and_dropped(tmp_path, dialect):
    arrays = Lazy((64, 128))
    checkpoint = write(tmp_path, arrays, dialect)
    assert arrays.reads == 12
    np.testing.assert_array_equal(checkpoint["5.weight"].dequantize(), np.full((64, 128), 5))


def test_strided_and_big_endian_arrays(tmp_path):
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    arrays = {
        "transposed": x.T,
        "big": x.astype(">f4"),
        "strided": x[::2, ::3],
        "scalar": np.float32(3),
        "half": jnp.ones(3, jnp.bfloat16),
        "whole": np.arange(3, dtype=np.int64),
    }
    for dialect in WRITERS:
        if dialect == "gguf":
            checkpoint = write(tmp_path, arrays, dialect)
        else:  # without a quantized array it is nobody's
            eqq.io.write(tmp_path / dialect, arrays, dialect)
            checkpoint = eqq.io.open(tmp_path / dialect)
            assert checkpoint.config == {} and checkpoint.metadata["format"] == ("mlx" if dialect == "mlx" else "pt")
        for name, array in arrays.items():
            np.testing.assert_array_equal(checkpoint[name], array)


# GGUF


@pytest.mark.long
def test_a_file_of_gguf_is_written_again_as_it_was(tmp_path):
    golden = eqq.io.open(GOLDEN / "model.gguf")
    names = [row.name for row in golden.rows if row.problem is None]
    kept = {name: name if name in names else None for name in golden}
    checkpoint = write(tmp_path, golden, "gguf", names=kept, types={"*.TQ1_0.*": "TQ1_0"})
    assert len(names) > 16
    for name in names:
        (old,), (new,) = (c.items_by_name[name].tensors for c in (golden, checkpoint))
        assert (old.dtype, old.shape) == (new.dtype, new.shape)
        assert old.bytes().tobytes() == new.bytes().tobytes(), name


# What ggml itself makes of one row.
_OF_GGML = {
    "Q1_0": "4e3ea4a52d6d69494b5b5ad2d29696b4b4a5553e2d2d69694b4b5adad29296b6b4a5252d",
    "Q2_0": "404214491649924592659164912459244916404249164992459264916451245924491649"
    "404296459245926491245924592449164992404245924591649124592459164916499245",
}


@pytest.mark.parametrize("name, block, bits", [("Q1_0", 128, 1), ("Q2_0", 64, 2)])
def test_the_lowest_bits_of_gguf(tmp_path, name, block, bits):
    """As ggml lays them out: a float16, and then codes from the lowest bits of each byte on."""
    x = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    q = eqq.quantize(jnp.asarray(x), name.lower())
    (t,) = write(tmp_path, {"w": q}, "gguf").items_by_name["w"].tensors
    raw = t.bytes().reshape(3, -1, 2 + block * bits // 8)
    blocks = x.reshape(3, -1, block)
    sizes = np.abs(blocks)
    scale = raw[..., :2].copy().view(np.float16)[..., 0]
    np.testing.assert_allclose(scale, sizes.mean(-1) if bits == 1 else sizes.max(-1), rtol=1e-3)
    codes = np.packbits if bits == 1 else lambda c, axis, bitorder: np.sum(c.reshape(3, -1, 16, 4) << [0, 2, 4, 6], -1)
    wanted = blocks >= 0 if bits == 1 else np.round(blocks / sizes.max(-1, keepdims=True)).astype(np.uint8) + 1
    np.testing.assert_array_equal(raw[..., 2:], codes(wanted, axis=-1, bitorder="little"))
    row = jnp.asarray((np.arange(256) * 37 % 101 - 50) / 16, jnp.float32)
    (t,) = write(tmp_path, {"w": eqq.quantize(row, name.lower())}, "gguf").items_by_name["w"].tensors
    assert t.bytes().tobytes().hex() == _OF_GGML[name]
    y = x[0] * np.float32(8)
    np.testing.assert_allclose(y @ q.T, y @ np.asarray(q.dequantize()).T, rtol=1e-4, atol=1e-2)


@pytest.mark.long
def test_types_of_gguf(tmp_path):
    codes = np.random.default_rng(0).integers(0, 3, (3, 512))
    arrays = {"a.w": eqq.quantize(jnp.asarray(codes - 1.0), "tq2_0"), "b.w": eqq.quantize(jnp.ones((2, 256)), "q4_0")}
    checkpoint = write(tmp_path, arrays, "gguf", types={"a.*": "TQ1_0"})
    assert [row.stored_as for row in checkpoint.rows] == ["TQ1_0", "Q4_0"]
    assert_same(checkpoint["a.w"], arrays["a.w"])
    # Between GGUF files types stay, except of arrays that are quantized again.
    for format, stored in (
        (None, "TQ1_0"),
        ({"b.*": "q8_0", "*": None}, "TQ1_0"),
        ({"a.*": "q8_0", "*": None}, "Q8_0"),
    ):
        eqq.io.convert(checkpoint, tmp_path / "again.gguf", format, dialect="gguf")
        again = eqq.io.open(tmp_path / "again.gguf")
        assert again.rows[0].stored_as == stored
        if stored == "TQ1_0":
            assert_same(again["a.w"], arrays["a.w"])
    spoiled = eqx.tree_at(lambda q: q.codes, arrays["a.w"], arrays["a.w"].codes | 3)
    for bad, types, dialect, message in [
        (arrays, {"*": "TQ1_0"}, "gguf", "'b.w' .*only TQ2_0 fits the type TQ1_0"),
        ({"a.w": jnp.ones(256)}, {"a.w": "TQ1_0"}, "gguf", "'a.w' must be in TQ2_0 for the type TQ1_0. Got float32"),
        (arrays, {"a.w": "Q8_0"}, "gguf", "`types` must be TQ1_0. Got 'Q8_0'"),
        (arrays, {"c.*": "TQ1_0"}, "gguf", "Got 'c.\\*', which matches none"),
        (arrays, {"a.w": "TQ1_0"}, "mlx", "`types` are for GGUF. Got some for 'mlx'"),
        ({"a.w": spoiled}, {"a.w": "TQ1_0"}, "gguf", "'a.w' must be ternary .*Got a code of 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            eqq.io.write(tmp_path / "bad", bad, dialect, types=types)
    with pytest.raises(TypeError, match="(?s)types.*'TQ1_0'"):
        eqq.io.write(tmp_path / "bad", arrays, "gguf", types="TQ1_0")
    assert not (tmp_path / "bad").exists()


def settings_of(checkpoint, name):
    """What `config.json` says of a weight."""
    about, layer = next(iter(checkpoint.config.values())), name.removesuffix(".weight")
    groups = [g for g in about.get("config_groups", {}).values() if layer in g["targets"]]
    own = groups[0]["weights"] | {"format": groups[0]["format"]} if groups else about.get(layer, {})
    return {key: value for key, value in (about | own).items() if not isinstance(value, dict)}


@pytest.mark.long
def test_checkpoints_of_libraries_are_written_again_as_they_were(tmp_path, monkeypatch):
    """The tensors that the library itself wrote, byte by byte, and its words in `config.json`."""
    monkeypatch.setattr(_layout, "_CHUNK", 1)  # so that rows are written one by one
    for folder, names in (
        ("mlx", ".*"),
        *(("compressed_tensors", "int4_group_asym|i8_channel_asym|f8_tensor"), ("mxfp4", ".*")),
        *(("gptq_v2", "int4"), ("bitsandbytes", "nf4_[56]"), ("llm_int8", ".*")),
    ):
        golden = eqq.io.open(GOLDEN / "checkpoints" / folder)
        (tmp_path / folder).mkdir()
        checkpoint = write(
            tmp_path / folder, golden, golden.dialect, names={n: n if re.match(names, n) else None for n in golden}
        )
        for name in checkpoint:
            tensors = [sorted(c.items_by_name[name].tensors, key=lambda t: t.name) for c in (golden, checkpoint)]
            for old, new in zip(*tensors, strict=True):
                assert (old.name, old.dtype, old.shape) == (new.name, new.dtype, new.shape)
                if old.name == "l.SCB":  # it is read as the scale, which is a 127th
                    np.testing.assert_allclose(old.array(), new.array(), rtol=1.2e-7)
                elif "quant_state" in old.name:
                    assert json.loads(old.bytes().tobytes()) == json.loads(new.bytes().tobytes())
                else:
                    assert old.bytes().tobytes() == new.bytes().tobytes(), old.name
            old, new = settings_of(golden, name), settings_of(checkpoint, name)
            assert {key: new.get(key) for key in old.keys() - {"meta"}} == {k: old[k] for k in old.keys() - {"meta"}}
            if isinstance(size := checkpoint[name].format.block_size, int) and golden.dialect != "bitsandbytes":
                assert new["group_size"] == size


def test_the_pairs_of_gguf(tmp_path):
    pairs = {
        "general.architecture": "llama",
        "general.alignment": 64,
        "n": 3,
        "minus": -3,
        "large": 2**40,
        "eps": 1e-6,
        "flag": True,
        "wide": np.float64(0.1),
        "byte": np.uint8(7),
        "tokens": ["<s>", "\u00fc", ""],
        "scores": [0.5, 1],
        "types": np.array([1, 2], np.int32),
        "none": np.zeros(0, np.float32),
    }
    w = eqq.quantize(weight(3, 32), "q4_0")
    checkpoint = write(tmp_path, {"w": w, "x": jnp.ones(5), "v": w}, "gguf", metadata=pairs)
    assert_same(checkpoint["v"], w)
    for key, value in pairs.items():
        if isinstance(value, (list, np.ndarray)):
            assert list(checkpoint.metadata[key]) == list(value)
        else:
            assert checkpoint.metadata[key] == (np.float32(value) if key == "eps" else value)
    raw = (tmp_path / "model.gguf").read_bytes()
    key = lambda text: struct.pack("<Q", len(text)) + text.encode()
    for name, kind in (("n", 4), ("minus", 5), ("large", 10), ("eps", 6), ("flag", 7), ("wide", 12), ("byte", 0)):
        assert key(name) + struct.pack("<I", kind) in raw
    assert key("types") + struct.pack("<IIQ2i", 9, 5, 2, 1, 2) in raw
    assert len(raw) % 64 == 0 and all(
        t.start % 64 == 0 for item in checkpoint.items_by_name.values() for t in item.tensors
    )


@pytest.mark.parametrize("value", [None, object(), {}, [], [1, "a"], [[1]], 2**70, np.zeros((2, 2)), 1j, np.float16(1)])
def test_pairs_that_gguf_cannot_hold(tmp_path, value):
    with pytest.raises(TypeError, match="`metadata` must hold text, numbers"):
        write(tmp_path, {"x": jnp.ones(3)}, "gguf", metadata={"k": value})
    assert not list(tmp_path.iterdir())


def test_other_errors_of_gguf(tmp_path):
    x = {"x": jnp.ones(3)}
    for alignment in (0, 3, True, 2**40, "32"):
        with pytest.raises(ValueError, match="align to a power of two"):
            write(tmp_path, x, "gguf", metadata={"general.alignment": alignment})
    for key in ("", "k" * 2**16):
        with pytest.raises(ValueError, match="Keys of `metadata` must be text"):
            write(tmp_path, x, "gguf", metadata={key: 1})
    with pytest.raises(ValueError, match="at most 63 bytes"):
        write(tmp_path, {"x" * 64: jnp.ones(3)}, "gguf")
    with pytest.raises(ValueError, match="at most 4 dimensions, none of them empty"):
        write(tmp_path, {"x": jnp.ones((1, 1, 1, 1, 1))}, "gguf")
    with pytest.raises(ValueError, match="none of them empty"):
        write(tmp_path, {"x": jnp.ones((3, 0))}, "gguf")
    with pytest.raises(TypeError, match="'x' must be of a dtype that the file can hold: .* Got bool"):
        write(tmp_path, {"x": np.ones(3, bool)}, "gguf")
    with pytest.raises(ValueError, match="`config` is for folders"):
        write(tmp_path, x, "gguf", config={})
    write(tmp_path, x, "gguf", metadata={"tokens": ["a"]})
    metadata = eqq.io.open(tmp_path / "model.gguf").metadata
    assert list(write(tmp_path, x, "gguf", metadata=metadata).metadata["tokens"]) == ["a"]


# config.json


def test_contents_of_config_json(tmp_path):
    config = {"model_type": "llama", "quantization_config": {"old": 1}}
    config["text_config"] = {"hidden_size": 64, "quantization": {"old": 2}}
    w = weight(32, 64)
    arrays = {"a.weight": eqq.quantize(w, "int4"), "norm.weight": w[0]}
    written = write(tmp_path, arrays, "gptq", config=config, metadata={"by": "me"})
    assert written.metadata == {"format": "pt", "by": "me"} and written.config["model_type"] == "llama"
    assert written.config["text_config"] == {"hidden_size": 64}
    assert written.config["quantization_config"] == {
        "quant_method": "gptq",
        "checkpoint_format": "gptq_v2",
        "desc_act": False,
        "lm_head": False,
        "bits": 4,
        "group_size": 64,
        "sym": True,
    }
    more = {"b.weight": eqq.quantize(w, "int8"), "c.weight": eqq.quantize(w, "int4")}
    groups = write(tmp_path, arrays | more, "compressed-tensors").config["quantization_config"]["config_groups"]
    assert [g["targets"] for g in groups.values()] == [["a", "c"], ["b"]]
    assert [g["format"] for g in groups.values()] == ["pack-quantized", "int-quantized"]
    nf4 = {"a.weight": eqq.quantize(w, "nf4"), "lm_head.weight": w}
    written = write(tmp_path, nf4, "bitsandbytes").config["quantization_config"]
    assert written == {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "llm_int8_skip_modules": ["lm_head"],
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "uint8",
    }


@pytest.mark.parametrize(
    "dialect, a, b", [("gptq", "int4", "int8"), ("bitsandbytes", "nf4", "int8"), ("fp8", TILES[0], TILES[1])]
)
def test_a_model_of_two_kinds(tmp_path, dialect, a, b):
    arrays = {"a.weight": eqq.quantize(weight(8, 64), a), "b.weight": eqq.quantize(weight(8, 64), b)}
    with pytest.raises(ValueError, match=r"must (be of one kind|have the same (bits|tiles)).*b.weight"):
        write(tmp_path, arrays, dialect)


# What is refused


REFUSED = [
    *(("gguf", "nf4", (4, 64), -1), ("gguf", "q4_0", (4, 33), -1), ("gguf", "q4_0", (32, 64), -2)),
    *(("gguf", "q4_k", (4, 128), -1), ("gguf", eqq.NVFP4(), (4, 32), -1)),
    *(
        ("bitsandbytes", "int4", (4, 64), -1),
        ("bitsandbytes", "nf4", (4, 65), -1),
        ("bitsandbytes", "nf4", (64, 64), 0),
    ),
    *(("bitsandbytes", eqq.NF4(None), (4, 64), -1), ("bitsandbytes", eqq.NF4(48), (4, 48), -1)),
    ("bitsandbytes", eqq.Codebook([-1, 0, 1, *range(2, 12)]), (4, 64), -1),
    *(("bitsandbytes", "int8", (2, 3, 64), -1), ("bitsandbytes", "int8", (4, 64), -2)),
    *(("compressed-tensors", "nf4", (4, 64), -1), ("compressed-tensors", "int4", (4, 65), -1)),
    *(("compressed-tensors", "int4", (2, 4, 64), -1), ("compressed-tensors", "int4", (64, 64), -2)),
    *(("compressed-tensors", eqq.FP8("e5m2"), (4, 64), -1), ("compressed-tensors", "mxfp4", (4, 80), -1)),
    *(("fp8", "fp8", (4, 64), -1), ("fp8", eqq.FP8("e5m2", (4, 4)), (4, 64), -1), ("fp8", TILES[0], (2, 4, 64), -1)),
    *(("gptq", "nf4", (32, 64), -1), ("gptq", "int4", (31, 64), -1), ("gptq", eqq.Int4(None), (32, 63), -1)),
    *(("gptq", eqq.Int4(48), (32, 64), -1), ("gptq", "int4", (2, 32, 64), -1), ("gptq", "int4", (64, 64), -2)),
    *(("mlx", "int4", (4, 64), -1), ("mlx", eqq.formats.MLX(4, 16), (4, 64), -1), ("mlx", "mxfp4", (4, 80), -1)),
    *(("mlx", "mxfp4", (64, 64), -2), ("mlx", eqq.MXFP8("e5m2"), (4, 64), -1)),
]


def test_an_array_that_does_not_fit(tmp_path):
    for dialect, format, shape, axis in REFUSED:
        q = eqx.filter_eval_shape(eqq.quantize, jax.ShapeDtypeStruct(shape, jnp.float32), format, axis=axis)
        along = f".*, along axis {q.axis}" * (q.axis != -1)
        with pytest.raises(ValueError, match=rf"'l.weight' must .* exactly: .* Got float32\[.*\){along}\. Quantize"):
            WRITERS[dialect].layout("l.weight", q)
    with pytest.raises(ValueError, match="'l.weight' must be an array that the file can hold exactly"):
        write(tmp_path, {"l.weight": eqq.quantize(weight(32, 63), eqq.Int4(None))}, "gptq")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "dialect, format", [("gguf", "q4_0"), ("bitsandbytes", "nf4"), ("compressed-tensors", "mxfp4"), ("gptq", "int4")]
)
def test_nan_scales_are_an_error(tmp_path, dialect, format):
    q = eqq.quantize(weight(32, 64), format)
    q = eqx.tree_at(lambda q: q.scale_bits, q, jnp.full_like(q.scale_bits, -1))  # all bits set
    with pytest.raises(ValueError, match="all its scales must be finite"):
        write(tmp_path, {"l.weight": q}, dialect)


def test_hostile_arguments(tmp_path):
    x = jnp.ones((4, 64))
    q = eqq.quantize(x, "nf4")
    bad = lambda arrays, **kwargs: write(tmp_path, arrays, kwargs.pop("dialect", "bitsandbytes"), **kwargs)
    with pytest.raises(ValueError, match="Did you mean 'gptq'"):
        bad({"x": x}, dialect="gptk")
    with pytest.raises(ValueError, match=r"must differ. Got 'y' for 'a' and for 'b'"):
        bad({"a": x, "b": x}, names=lambda name: "y")
    with pytest.raises(ValueError, match=r"must differ. Got 'w.absmax' as a part of 'w.absmax' and of 'w'"):
        bad({"w": q, "w.absmax": x})
    with pytest.raises(ValueError, match="must have all arrays; .* Got none for b"):
        bad({"a": x, "b": x}, names={"a": "y"})
    for name in ("", "__metadata__", "a\0b", "\ud800", 3):
        with pytest.raises(ValueError, match="A name in the file must be text"):
            bad({"a": x}, names=lambda _, name=name: name)
    for value in (None, 3, "text", jax.ShapeDtypeStruct((3,), "float32"), jr.key(0), [x], object()):
        with pytest.raises(TypeError, match="'a' must|a must"):
            bad({"a": value})
    with pytest.raises(ValueError, match="'a' must have values"):
        bad({"a": eqq.quantize(jnp.ones((0, 64)), "nf4")})
    with pytest.raises(TypeError, match="`config` must hold values that JSON can hold"):
        bad({"a": x}, config={"x": object()})
    with pytest.raises(TypeError, match="must map text to text"):
        bad({"a": x}, metadata={"x": 1})
    with pytest.raises(ValueError, match="must stand alone"):
        bad(eqq.loraify([{"weight": q}], rank=2, key=jr.key(0)))
    assert not list(tmp_path.iterdir())


def test_invalid_output_paths(tmp_path):
    arrays = {"a": jnp.ones(3)}
    with pytest.raises(ValueError, match="`path` must be a folder"):
        eqq.io.write(tmp_path / "x.safetensors", arrays, "gptq")
    with pytest.raises(FileNotFoundError):
        eqq.io.write(tmp_path / "none" / "x.gguf", arrays, "gguf")
    with pytest.raises(IsADirectoryError):
        eqq.io.write(tmp_path, arrays, "gguf")
    eqq.save(tmp_path / "other.safetensors", arrays)
    with pytest.raises(ValueError, match="must hold no other weights.*other.safetensors"):
        eqq.io.write(tmp_path, arrays, "gptq")
    assert [p.name for p in tmp_path.iterdir()] == ["other.safetensors"]


@pytest.mark.parametrize("dialect", WRITERS)
def test_a_failed_write_leaves_the_old_file(tmp_path, dialect):
    class Fails(dict):
        reads = 0

        def __getitem__(self, name):
            self.reads += 1
            if self.reads == 3:
                raise RuntimeError("the disk is gone")
            return super().__getitem__(name)

    path = tmp_path / ("model.gguf" if dialect == "gguf" else "model")
    eqq.io.write(path, {"a": jnp.ones(3), "b": jnp.ones(3)}, dialect)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(RuntimeError, match="the disk is gone"):
        eqq.io.write(path, Fails(a=jnp.zeros(3), b=jnp.zeros(3)), dialect)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_an_example_of_each_format_is_named(tmp_path):
    for writer in WRITERS.values():
        names = re.findall(r"\b(?:Q\d_\d|MXFP4|NF4|Int\d|FP8)\b", writer.FITS)
        assert names and all(hasattr(eqq, name) or hasattr(eqq.formats, name) for name in names)


def test_config_json_is_text_that_a_person_can_read(tmp_path):
    write(tmp_path, {"a.weight": eqq.quantize(weight(4, 64), "nf4")}, "bitsandbytes", config={"a": 1})
    assert json.loads((tmp_path / "model" / "config.json").read_text())["a"] == 1
