"""Files of other libraries: every array dequantizes bit for bit as in that library."""

import json
import re
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqquant as eqq
from eqquant._formats.base import AbstractVectorFormat, find_levels
from eqquant._wrappers.permuted import PermutedArray
from eqquant.io import _repack, _safetensors
from eqquant.io._tensors import NewTensor

from .helpers import assert_same, outputs, weights


GOLDEN = Path(__file__).parent / "golden"
VECTORS = json.loads((GOLDEN / "oracle_vectors.json").read_text())
floats = lambda text: np.frombuffer(bytes.fromhex(text), "<f4")


def assert_bits(actual, expected):
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


# Plain and our own


def test_plain_files(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"a": np.arange(6, dtype=np.float16).reshape(2, 3), "b": np.array([1, 2], np.int8), "c": np.float32(3)}
    save_file({**tensors, "c": np.asarray(tensors["c"])}, path, {"format": "np"})
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for where in (path, tmp_path):
        checkpoint = eqq.io.open(where)
        assert checkpoint.dialect == "safetensors" and set(checkpoint) == set(tensors) and len(checkpoint) == 3
        assert checkpoint.metadata == {"format": "np"} and checkpoint.config == {"model_type": "bert"}
        for name, x in tensors.items():
            assert isinstance(checkpoint[name], jax.Array)
            assert_bits(checkpoint[name], np.asarray(x))
    with pytest.raises(KeyError, match="has no 'aa'. Did you mean 'a'"):
        checkpoint["aa"]


def test_files_of_our_writer_in_the_reference_reader(tmp_path):
    path = tmp_path / "model.safetensors"
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": np.arange(3, dtype=np.int64), "q": eqq.quantize(jnp.ones((2, 64)))}
    eqq.save(path, tree)
    loaded = load_file(path)
    assert loaded.keys() == {"a", "b", "q.codes", "q.scale_bits"}
    assert_bits(loaded["a"], np.asarray(tree["a"]))
    assert_bits(loaded["q.codes"], np.asarray(tree["q"].codes))
    checkpoint = eqq.io.open(path)
    assert checkpoint.dialect == "eqquant" and set(checkpoint) == {"a", "b", "q"}
    assert checkpoint["q"].format == eqq.NF4() and checkpoint.rows[2].bits == 4.5
    assert [row.stored_as for row in checkpoint.rows] == ["F32", "I64", "quantized"]
    assert isinstance(checkpoint["b"], np.ndarray)


def test_a_checkpoint_prints_as_a_table(tmp_path):
    checkpoint = eqq.io.open(GOLDEN / "model.gguf")
    text = str(checkpoint)
    assert re.search(r"gguf, 22 arrays, 17 of them quantized", text)
    assert re.search(r"blk.Q4_0.weight\W+2 x 3 x 128\W+Q4_0\W+Q4_0\(\)\W+4.50\W+432 B", text)
    assert re.search(r"blk.IQ2_XXS.weight\W+2 x 256\W+IQ2_XXS\W+IQ2_XXS\(\)\W+2.06", text)
    assert checkpoint.to_dict()["rows"][3]["format"] == "Q4_0()"
    eqq.save(tmp_path / "x.safetensors", {})
    assert "0 arrays" in str(eqq.io.open(tmp_path / "x.safetensors"))


def test_a_table_cannot_control_the_terminal(tmp_path):
    save_file({"a\x1b[2Jb\n\rc": np.ones(3, np.float32)}, tmp_path / "x.safetensors")
    assert r"a\x1b[2Jb\n\rc " in str(eqq.io.open(tmp_path / "x.safetensors"))


def test_a_mapping_that_reads_only_what_is_asked_for(monkeypatch):
    checkpoint = eqq.io.open(GOLDEN / "model.gguf")
    monkeypatch.setattr(type(checkpoint), "__getitem__", lambda self, name: pytest.fail(f"read {name}"))
    assert "blk.Q4_0.weight" in checkpoint and "other" not in checkpoint and 3 not in checkpoint
    assert checkpoint == checkpoint and checkpoint != eqq.io.open(GOLDEN / "model.gguf")
    assert hash(checkpoint) == hash(checkpoint)
    monkeypatch.undo()
    with pytest.raises(Exception, match="model.gguf has no 3|parameter 'name'"):
        checkpoint[3]


def test_other_files_are_refused(tmp_path):
    for content in (b"hello world", b"", b"[1]", b"PK\3\4" + bytes(100)):
        (tmp_path / "weights.npz").write_bytes(content)
        with pytest.raises(ValueError, match="weights.npz must be a .safetensors or .gguf file. Got another kind"):
            eqq.io.open(tmp_path / "weights.npz")
    # As the blobs of a cache, which have no suffix.
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "0a1b2c")
    assert eqq.io.open(tmp_path / "0a1b2c")["w"].shape == (3,)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin: pickles can run code, and are never opened"):
        eqq.io.open(tmp_path)
    with pytest.raises(ValueError, match="pickles can run code"):
        eqq.io.open(tmp_path / "pytorch_model.bin")
    for name, meant in (("pytorch_mode.bin", "Did you mean 'pytorch_model.bin'?"), ("none", "Got neither.")):
        with pytest.raises(FileNotFoundError, match=f"{name} must be a file or folder that exists. Got neither") as e:
            eqq.load(tmp_path / name)
        assert str(e.value).endswith(meant)
    with pytest.raises(FileNotFoundError, match="must be a file or folder that exists"):
        eqq.io.open(tmp_path / "no folder" / "model.safetensors")
    with pytest.raises(ValueError, match="must be written by `eqq.save`"):
        eqq.load(GOLDEN / "model.gguf")


# GGUF


@pytest.mark.long
def test_gguf():
    checkpoint = eqq.io.open(GOLDEN / "model.gguf")
    expected = np.load(GOLDEN / "model_gguf.npz")
    assert len(expected) == 19
    for name, values in expected.items():
        x = checkpoint[f"blk.{name}.weight"]
        np.testing.assert_array_equal(np.asarray(eqq.dequantize(x), np.float32), values)
        assert eqq.is_quantized(x) == (name not in ("F32", "F16", "BF16"))
        if eqq.is_quantized(x) and name != "TQ1_0":
            assert type(x.format).__name__ == name
            (in_file,) = (row.bits for row in checkpoint.rows if row.name == f"blk.{name}.weight")
            # The scale of a tensor is stored once per row, and NVFP4's file has none.
            assert 8 * x.nbytes / x.size == pytest.approx(in_file + (32 / 256 if name == "NVFP4" else 0))
    assert checkpoint["blk.Q4_0.weight"].format == eqq.formats.Q4_0()
    assert_bits(checkpoint["norm.weight"], jnp.arange(5.0))
    assert checkpoint.metadata["llama.block_count"] == 2 and len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 3
    assert checkpoint["blk.IQ2_XXS.weight"].format == eqq.formats.IQ2_XXS()


def test_parts_of_gguf():
    """Codes, scales and offsets where ggml has them: the values, computed in NumPy."""
    checkpoint, expected, tried = eqq.io.open(GOLDEN / "model.gguf"), np.load(GOLDEN / "model_gguf.npz"), 0

    def floats(stored, format):
        if not isinstance(stored, _repack.Nested):
            return 2.0 ** (stored - 127.0) if stored.dtype == np.uint8 else stored.astype(np.float64)
        inner = format.scale_format
        return find_levels(inner)[0][stored.codes] * spread(floats(stored.scale, inner), stored.codes.shape[-1])

    def spread(x, length):
        return np.repeat(x, length // x.shape[-1], axis=-1)

    for row in checkpoint.rows:
        name = row.name.removeprefix("blk.").removesuffix(".weight")
        if row.format is not None and not isinstance(row.format, AbstractVectorFormat) and name in expected:
            parts = checkpoint.items_by_name[row.name].load()
            codes = parts.codes(0, int(np.prod(row.shape[:-1]))).reshape(row.shape)
            found = find_levels(row.format)[0][codes] * spread(floats(parts.scale, row.format), row.shape[-1])
            if parts.offset is not None:
                found = found + spread(floats(parts.offset, row.format), row.shape[-1])
            np.testing.assert_allclose(found, expected[name], rtol=1e-5, atol=1e-6 * np.abs(expected[name]).max())
            tried += 1
    assert tried == 16


def test_scales_of_nvfp4_in_gguf(tmp_path):
    """ggml ignores the sign of a scale, and reads NaN as zero."""
    path = tmp_path / "model.gguf"
    path.write_bytes((GOLDEN / "model.gguf").read_bytes())
    checkpoint = eqq.io.open(path)
    expected = np.asarray(eqq.dequantize(checkpoint["blk.NVFP4.weight"])).reshape(-1)
    (t,) = checkpoint.items_by_name["blk.NVFP4.weight"].tensors
    with path.open("r+b") as f:
        f.seek(t.start)
        scales = f.read(4)
        f.seek(t.start)
        f.write(bytes([127, scales[1] | 128, 255, scales[3]]))
    w = np.asarray(eqq.dequantize(eqq.io.open(path)["blk.NVFP4.weight"])).reshape(-1)
    np.testing.assert_array_equal(w, expected * np.where(np.isin(np.arange(len(w)) // 16, [0, 2]), 0, 1))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"])
def test_quantizing_reproduces_the_gguf_file(name):
    checkpoint = eqq.io.open(GOLDEN / "model.gguf")
    dense = checkpoint["blk.ternary.float" if name.startswith("TQ") else "blk.F32.weight"]
    assert_same(eqq.quantize(dense, name.lower().replace("tq1", "tq2")), checkpoint[f"blk.{name}.weight"])


# bitsandbytes


def bnb_file(path, case, nested, name="layer.weight", kind="nf4"):
    """A file as bitsandbytes lays it out, of the codes and scales that bitsandbytes itself found."""
    of = case["bnb_nf4_b64_double" if nested else "bnb_nf4_b64"]
    codes = np.array([int(c, 16) for c in "".join(case["bnb_nf4_b64"]["codes"])], np.uint8)
    state = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": case["shape"]}
    tensors = {name: (codes[::2] << 4 | codes[1::2])[:, None]}
    tensors[f"{name}.quant_map"] = np.array(VECTORS["nf4_codebook_f32"], np.float32)
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(of["offset"])}
        tensors[f"{name}.absmax"] = np.array(of["absmax_u8"], np.uint8)
        tensors[f"{name}.nested_absmax"] = np.array(of["nested_absmax"], np.float32)
        tensors[f"{name}.nested_quant_map"] = DYNAMIC
    else:
        tensors[f"{name}.absmax"] = floats(of["absmax_f32_le_hex"]).copy()
    tensors[f"{name}.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    save_file({**tensors, "layer.bias": np.ones(2, np.float32)}, path)
    return floats(of["dequant_f32_le_hex"]).reshape(case["shape"])


def dynamic_table():
    """bitsandbytes' signed 8-bit table of nested scales, in float32 arithmetic as in `torch.linspace`."""
    levels = [0.0, 1.0]
    for decade in range(7):
        count, step = 2**decade + 1, np.float32(np.float32(1 - np.float32(0.1)) / np.float32(2**decade))
        up = np.float32(0.1) + step * np.arange(count, dtype=np.float32)
        down = np.float32(1) - step * np.arange(count, dtype=np.float32)[::-1]
        edges = np.where(np.arange(count) < count // 2, up, down)
        means = np.float32(10.0 ** (decade - 6)) * ((edges[1:] + edges[:-1]) / np.float32(2))
        levels += [*means, *-means]
    return np.sort(np.array(levels, np.float32))


DYNAMIC = dynamic_table()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["kind"])
def test_bitsandbytes(tmp_path, case, nested):
    path = tmp_path / "model.safetensors"
    expected = bnb_file(path, case, nested)
    checkpoint = eqq.io.open(path)
    assert checkpoint.dialect == "bitsandbytes" and list(checkpoint) == ["layer.weight", "layer.bias"]
    q = checkpoint["layer.weight"]
    assert q.format == eqq.NF4() and q.axis == -1
    assert_bits(q.dequantize(), expected)


def small_bnb(path, shape, block, table, dtype="float32"):
    rng = np.random.default_rng(1)
    size = int(np.prod(shape))
    codes, scales = rng.integers(0, 16, size), rng.random(-(-size // block)).astype(np.float32)
    padded = np.append(codes, [7] * (size % 2)).astype(np.uint8)
    state = {"quant_type": "fp4", "blocksize": block, "dtype": dtype, "shape": list(shape)}
    save_file(
        {
            "w": (padded[::2] << 4 | padded[1::2])[:, None],
            "w.absmax": scales,
            "w.quant_map": table,
            "w.quant_state.bitsandbytes__fp4": np.frombuffer(json.dumps(state).encode(), np.uint8),
        },
        path,
    )
    return (table[codes] * np.repeat(scales, block)[:size]).reshape(shape)


FP4 = np.array([0, 0.0052083, 0.6667, 1, 0.3333, 0.5, 0.1667, 0.25], np.float32)
FP4 = np.concatenate([FP4, -FP4])


@pytest.mark.parametrize("shape", [(3, 96), (5, 7), (1, 63), (4, 128), (2, 3, 64)])
def test_bitsandbytes_blocks_over_the_ends_of_rows_and_fp4(tmp_path, shape):
    path = tmp_path / "model.safetensors"
    expected = small_bnb(path, shape, 64, FP4)
    q = eqq.io.open(path)["w"]
    assert isinstance(q.format, eqq.Codebook) and q.format.bits == 4
    assert_bits(q.dequantize(), expected)
    assert eqx.tree_equal(eqq.io.open(path)["w"], q)


def test_bitsandbytes_int8_rows(tmp_path):
    path = tmp_path / "model.safetensors"
    rng = np.random.default_rng(0)
    w, scb = rng.integers(-127, 128, (4, 48)).astype(np.int8), rng.random(4).astype(np.float32)
    save_file({"l.weight": w, "l.SCB": scb, "l.weight_format": np.array(0, np.uint8)}, path)
    checkpoint = eqq.io.open(path)
    assert list(checkpoint) == ["l.weight"] and checkpoint["l.weight"].dtype == np.float16
    np.testing.assert_allclose(
        checkpoint["l.weight"].astype(jnp.float32).dequantize(), w * scb[:, None] / 127, rtol=3e-7
    )


def absent(part):
    return lambda tensors: tensors.pop(f"w.{part}")


def other(part, value):
    return lambda tensors: tensors.update({f"w.{part}" if part else "w": value})


def state(**changes):
    def change(tensors):
        name = "w.quant_state.bitsandbytes__fp4"
        fields = json.loads(tensors[name].tobytes()) | changes
        tensors[name] = np.frombuffer(json.dumps(fields).encode(), np.uint8)

    return change


@pytest.mark.parametrize(
    "change, message",
    [
        (absent("absmax"), "must have a companion 'absmax'"),
        (absent("quant_map"), "must have a companion 'quant_map'"),
        (other("absmax", np.full(8, np.nan, np.float32)), "'w': Got a scale that is not finite"),
        (other("absmax", np.ones(7, np.float32)), r"'w.absmax': It must be F32 of \[8\]"),
        (other("absmax", np.ones(8, np.float16)), "'w.absmax': It must be F32"),
        (other("quant_map", np.zeros(16, np.float32)), "at least 9 different values"),
        (other("", np.zeros((255, 1), np.uint8)), r"It must be U8 of \[256, 1\]"),
        (state(blocksize=0), "an even block size. Got 0"),
        (state(blocksize=True), "an even block size"),
        (state(shape=[2**40, 2**40]), "a shape that an array can have"),
        (state(shape=[9] * 20_000), "a shape that an array can have"),
        (state(shape=[4, 0]), "It must have a shape"),
        (state(blocksize=2**31), "an even block size"),
        (state(shape="x"), "It must have a shape"),
        (state(shape=[-4, -128]), "It must have a shape"),
        (state(dtype="object"), "It must have a dtype"),
    ],
)
def test_bitsandbytes_hostile(tmp_path, change, message):
    path = tmp_path / "model.safetensors"
    small_bnb(path, (4, 128), 64, FP4)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(ValueError, match=rf"model.safetensors must hold a valid .*{message}"):
        eqq.io.open(path)["w"]


@pytest.mark.parametrize("blocksize", [2**40, 10**30])
def test_a_block_of_nested_scales_costs_no_memory(tmp_path, blocksize):
    path = tmp_path / "model.safetensors"
    expected = small_bnb(path, (4, 128), 64, FP4)
    tensors = load_file(path)
    scales = tensors["w.absmax"]
    nested = {"absmax": np.arange(8, dtype=np.uint8), "nested_absmax": np.ones(1, np.float32)}
    for part, value in {**nested, "nested_quant_map": np.resize(scales, 256)}.items():
        other(part, value)(tensors)
    state(nested_blocksize=blocksize, nested_offset=0)(tensors)
    save_file(tensors, path)
    np.testing.assert_array_equal(eqq.io.open(path)["w"].dequantize(), expected)
    # Five scales share an outer one, and the other three.
    other("nested_absmax", np.array([1, 2], np.float32))(tensors)
    state(nested_blocksize=5, nested_offset=0)(tensors)
    save_file(tensors, path)
    w = np.asarray(eqq.io.open(path)["w"])
    np.testing.assert_array_equal(w.reshape(8, 64), expected.reshape(8, 64) * np.where(np.arange(8) < 5, 1, 2)[:, None])
    for offset in (10**400, True, "0"):
        state(nested_offset=offset)(tensors)
        save_file(tensors, path)
        with pytest.raises(ValueError, match="model.safetensors must hold a valid 'w.quant_state.*an offset"):
            eqq.io.open(path)["w"]


def words(*shape):
    return np.zeros(shape, np.int32)


def halves(*shape):
    return np.ones(shape, np.float16)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({"qweight": words(0, 32), "qzeros": words(2, 4), "scales": halves(2, 32)}, "divide 0 inputs"),
        ({"qweight": words(1, 32), "qzeros": words(8, 4), "scales": halves(8, 32)}, "no format. `block_size` of Int4"),
        (
            {"weight_packed": words(4, 1), "weight_scale": halves(4, 2), "weight_shape": np.array([4, 6])},
            "no format. `block_size` of Int4",
        ),
        ({"weight": np.zeros((4, 0), np.int8), "weight_scale": halves(4, 1)}, r"values along .* shape \[4, 0\]"),
        ({"weight": np.zeros((4, 0), np.int8), "weight_scale": halves(4, 2)}, "divide 0 values"),
        ({"weight": np.zeros((4, 0), np.int8), "SCB": np.ones(4, np.float32)}, r"values along .* shape \[4, 0\]"),
    ],
)
def test_bitsandbytes_empty_and_odd_blocks(tmp_path, tensors, message):
    path = tmp_path / "model.safetensors"
    save_file({f"l.{name}": x for name, x in tensors.items()}, path)
    groups = {"": {"weights": {"num_bits": 4}}}
    settings = {"quant_method": "gptq", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(ValueError, match=rf"model.safetensors must hold a valid 'l\..*{message}"):
        eqq.io.open(path)["l.weight"]


# GPTQ, AWQ, compressed-tensors, Hugging Face: the layouts written here word by word, in NumPy's integers


def pack_words(codes, bits):
    """Along the last axis, densely, the first code in the low bits of a 32-bit word."""
    bit = (codes[..., None] >> np.arange(bits)) & 1
    stream = bit.reshape(*codes.shape[:-1], -1).astype(np.uint64)
    stream = np.pad(stream, [(0, 0)] * (codes.ndim - 1) + [(0, -stream.shape[-1] % 32)])
    words = (stream.reshape(*stream.shape[:-1], -1, 32) << np.arange(32, dtype=np.uint64)).sum(-1)
    return words.astype(np.uint32).view(np.int32)


def write(folder, tensors, **settings):
    save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return eqq.io.open(folder)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version, sym", [("gptq", False), ("gptq_v2", False), ("gptq", True)])
def test_gptq(tmp_path, bits, version, sym):
    rng = np.random.default_rng(0)
    q, s = rng.integers(0, 2**bits, (128, 32)), rng.random((4, 32)).astype(np.float16)
    z = np.full((4, 32), 2 ** (bits - 1)) if sym else rng.integers(1, 2**bits, (4, 32))
    tensors = {
        "l.qweight": pack_words(q.T, bits).T,
        "l.qzeros": pack_words(z - (version == "gptq"), bits),
        "l.scales": s,
        "l.g_idx": np.arange(128, dtype=np.int32) // 32,
        "l.bias": np.zeros(32, np.float16),
    }
    checkpoint = write(tmp_path, tensors, quant_method="gptq", bits=bits, sym=sym, checkpoint_format=version)
    w = checkpoint["l.weight"]
    assert checkpoint.dialect == "gptq" and set(checkpoint) == {"l.weight", "l.bias"}
    assert w.format.symmetric == sym and w.format.block_size == 32 and w.dtype == np.float16
    group = np.arange(128) // 32
    assert_bits(w.dequantize(), (s[group] * (q - z[group]).astype(np.float16)).T)
    tensors["l.g_idx"] = np.zeros(128, np.int32)
    with pytest.raises(ValueError, match="'l.g_idx': It must give each of 4 groups 32 inputs"):
        write(tmp_path, tensors, quant_method="gptq")["l.weight"]
    with pytest.raises(ValueError, match="must have a companion 'qzeros'"):
        write(tmp_path, {k: v for k, v in tensors.items() if k != "l.qzeros"}, quant_method="gptq")["l.weight"]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("ordered", [True, False])
def test_gptq_in_chunks(tmp_path, monkeypatch, bits, ordered):
    monkeypatch.setattr(_repack, "_CHUNK", 1)  # so that rows are read 128 at a time
    rng = np.random.default_rng(0)
    q, s = rng.integers(0, 2**bits, (608, 320)), rng.random((19, 320)).astype(np.float16)
    z, group = rng.integers(1, 2**bits, (19, 320)), np.arange(608) // 32
    group = group if ordered else rng.permutation(group)
    tensors = {"l.qweight": pack_words(q.T, bits).T, "l.qzeros": pack_words(z - 1, bits), "l.scales": s}
    w = write(tmp_path, {**tensors, "l.g_idx": group.astype(np.int32)}, quant_method="gptq")["l.weight"]
    assert isinstance(w, PermutedArray) != ordered
    assert_bits(w.dequantize(), (s[group] * (q - z[group]).astype(np.float16)).T)


@pytest.mark.parametrize("shape", [(64, 24), (320, 264)])
def test_awq(tmp_path, monkeypatch, shape):
    monkeypatch.setattr(_repack, "_CHUNK", 1)
    rng = np.random.default_rng(0)
    groups = shape[0] // 32
    q, z = rng.integers(0, 16, shape), rng.integers(0, 16, (groups, shape[1]))
    s = rng.random((groups, shape[1])).astype(np.float16)
    columns = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    pack = lambda x: pack_words(x.reshape(len(x), -1, 8)[..., columns].reshape(x.shape), 4)
    tensors = {"l.qweight": pack(q), "l.qzeros": pack(z), "l.scales": s}
    checkpoint = write(tmp_path, tensors, quant_method="awq", sym=True)  # which is a word of GPTQ
    group = np.arange(shape[0]) // 32
    assert_bits(checkpoint["l.weight"].dequantize(), (s[group] * (q - z[group]).astype(np.float16)).T)


@pytest.mark.parametrize("awq", [False, True])
def test_group_size_of_the_configuration(tmp_path, awq):
    def open_bytes(groups, **settings):
        qweight = np.zeros((96, 1) if awq else (12, 8), np.int32)
        tensors = {"qweight": qweight, "qzeros": np.zeros((groups, 1), np.int32), "scales": np.ones((groups, 8), "f2")}
        method = "awq" if awq else "gptq"
        named = {f"l.{name}": x for name, x in tensors.items()}
        return write(tmp_path, named, quant_method=method, **settings)["l.weight"]

    for groups, size in [(2, 64), (1, 64), (3, 96)]:  # the last group of 64 would be half of one
        with pytest.raises(ValueError, match=f"'l.scales': .*configuration, {size}. Got groups of {96 // groups} inp"):
            open_bytes(groups, group_size=size)
    for groups, size in [(2, 48), (1, -1), (1, 128), (3, None)]:
        assert open_bytes(groups, group_size=size).shape == (8, 96)
    assert open_bytes(2, group_size=64, dynamic={"l": {"group_size": 48}}).shape == (8, 96)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_affine(tmp_path, bits):
    rng = np.random.default_rng(0)
    q = rng.integers(0, 2**bits, (10, 96))
    s, b = (rng.standard_normal((10, 3)).astype(np.float16) for _ in "sb")
    tensors = {"l.weight": pack_words(q, bits).view(np.uint32), "l.scales": s, "l.biases": b, "n.bias": s}
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization": {"group_size": 64, "bits": 4, "l": {"group_size": 32, "bits": bits}}})
    )
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = eqq.io.open(tmp_path)
    assert checkpoint.dialect == "mlx" and set(checkpoint) == {"l.weight", "n.bias"}
    w = checkpoint["l.weight"]
    assert w.format == eqq.formats.MLX(bits, 32) and w.dtype == np.float16
    spread = lambda x: np.repeat(x.astype(np.float32), 32, axis=-1)
    assert_bits(w.astype(jnp.float32).dequantize(), q.astype(np.float32) * spread(s) + spread(b))
    for wrong, message in (
        ({"bits": 7, "group_size": 64}, "2, 3, 4, 5, 6, 8 bits and a group size. Got 7 and 64"),
        ({"bits": bits, "group_size": 31}, "whole groups of 31|whole codes"),
        ({"bits": bits, "group_size": 32, "mode": "mxfp4"}, "in the mode mxfp4|must be U8"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"quantization": wrong}))
        with pytest.raises(ValueError, match=rf"model.safetensors must hold a valid 'l\..*({message})"):
            eqq.io.open(tmp_path)["l.weight"]
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"mode": "magic"}}))
    assert "modes affine, mxfp4" in eqq.io.open(tmp_path).rows[0].problem


@pytest.mark.long
def test_files_written_by_mlx():
    checkpoint, expected = eqq.io.open(GOLDEN / "mlx"), np.load(GOLDEN / "mlx" / "expected.npz")
    assert checkpoint.dialect == "mlx" and len(checkpoint) == len(expected) == 11
    for name in set(expected) - {"dense"}:
        w = checkpoint[f"{name}.weight"]
        # MLX may round the product before it adds the bias; other values have nothing to round.
        ulp = {"affine.4.float16": 2e-3, "mxfp4": 0, "mxfp8": 0, "nvfp4": 0}.get(name, 3e-7)
        np.testing.assert_allclose(np.asarray(w.dequantize(), np.float32), expected[name], rtol=0, atol=ulp)
        if name.startswith("affine"):
            assert_same(eqq.quantize(jnp.asarray(expected["dense"], w.dtype), w.format), w)


def test_mlx_floats(tmp_path):
    rng = np.random.default_rng(0)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    q, q8 = rng.integers(0, 16, (4, 64)), rng.integers(0, 120, (4, 64))
    e, s = rng.integers(120, 130, (4, 2)).astype(np.uint8), rng.integers(1, 120, (4, 4)).astype(np.uint8)
    power = np.repeat(2.0 ** (e.astype(np.float32) - 127), 32, axis=-1)
    e4m3 = lambda x: x.astype(np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    for mode, group, codes, scales, expected in (
        ("mxfp4", 32, pack_words(q, 4), e, levels[q] * power),
        ("mxfp8", 32, pack_words(q8, 8), e, e4m3(q8) * power),
        ("nvfp4", 16, pack_words(q, 4), s, levels[q] * np.repeat(e4m3(s), 16, axis=-1)),
    ):
        settings = {"group_size": group, "bits": 8 if mode == "mxfp8" else 4, "mode": mode}
        (tmp_path / "config.json").write_text(json.dumps({"quantization": settings}))
        save_file({"l.weight": codes.view(np.uint32), "l.scales": scales}, tmp_path / "model.safetensors")
        w = eqq.io.open(tmp_path)["l.weight"]
        assert type(w.format).__name__.lower() == mode
        (tmp_path / "config.json").write_text(json.dumps({"quantization": {"mode": mode}}))  # its bits are known
        assert_same(eqq.io.open(tmp_path)["l.weight"], w)
        np.testing.assert_array_equal(np.asarray(w.astype(jnp.float32).dequantize()), expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("groups, zeros", [(1, False), (3, False), (3, True)])
def test_compressed_tensors_packed(tmp_path, bits, groups, zeros):
    rng = np.random.default_rng(0)
    q, z = rng.integers(0, 2**bits, (10, 48)), rng.integers(0, 2**bits, (10, groups))
    s = rng.random((10, groups)).astype(np.float32)
    tensors = {
        "l.weight_packed": pack_words(q, bits),
        "l.weight_scale": s,
        "l.weight_shape": np.array([10, 48]),
        **({"l.weight_zero_point": pack_words(z.T, bits).T} if zeros else {}),
    }
    w = write(tmp_path, tensors)["l.weight"]
    zero = np.repeat(z, 48 // groups, axis=1) if zeros else 2 ** (bits - 1)
    assert w.format.symmetric != zeros
    assert_bits(w.dequantize(), ((q - zero) * np.repeat(s, 48 // groups, axis=1)).astype(np.float32))


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(200, 1), (2, 3), (1, 1), (1,), (200, 3)])
def test_eight_bit_floats_and_integers(tmp_path, name, shape):
    rng = np.random.default_rng(0)
    s = rng.random(shape).astype(np.float32)
    fp8 = jnp.asarray(rng.standard_normal((200, 384))).astype(jnp.float8_e4m3fn)
    int8 = rng.integers(-127, 128, (200, 384)).astype(np.int8)
    rows, columns = (*shape, 1)[:2]
    spread = np.repeat(
        np.repeat(s.reshape(rows, columns), -(-200 // rows) if rows > 2 or rows == 1 else 128, 0)[:200],
        384 // columns,
        1,
    )
    for x in (np.asarray(fp8), int8):
        eqq.save(tmp_path / "x.safetensors", {"l.weight": x, f"l.{name}": s})
        # Without our manifest, as another library writes it.
        raw = (tmp_path / "x.safetensors").read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        del header["__metadata__"]
        text = json.dumps(header).encode()
        (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
        w = eqq.io.open(tmp_path / "x.safetensors")["l.weight"]
        assert w.format.bits == 8
        assert_bits(w.dequantize(), x.astype(np.float32) * spread)


def test_mxfp4_of_compressed_tensors_and_gpt_oss(tmp_path):
    rng = np.random.default_rng(0)
    levels = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
    q, e = rng.integers(0, 16, (2, 6, 64)), rng.integers(120, 130, (2, 6, 2)).astype(np.uint8)
    packed = (q[..., ::2] | q[..., 1::2] << 4).astype(np.uint8)
    expected = levels[q] * np.repeat(2.0 ** (e.astype(np.float32) - 127), 32, axis=-1)
    w = write(tmp_path, {"w_blocks": packed.reshape(2, 6, 2, 16), "w_scales": e})["w"]
    assert w.format == eqq.MXFP4() and w.shape == (2, 64, 6) and w.axis == -2
    np.testing.assert_array_equal(np.asarray(w.dequantize(), np.float32), expected.swapaxes(1, 2))
    w = write(tmp_path, {"l.weight_packed": packed[0], "l.weight_scale": e[0]})["l.weight"]
    np.testing.assert_array_equal(np.asarray(w.dequantize(), np.float32), expected[0])
    e[0, 0, 0] = 255
    with pytest.raises(ValueError, match="Got a scale that is not a number"):
        write(tmp_path, {"w_blocks": packed.reshape(2, 6, 2, 16), "w_scales": e})["w"]


def test_gptq_of_three_bits_by_gptqmodel(tmp_path):
    """GPTQModel subtracts one from zero points in its own words, with the bits in reverse order."""
    codes = pack_words(np.full((2, 32), 4), 3).view(np.uint32)
    words = [0b00100100100100100100100100100100, 0b10010010010010010010010010010010, 0b01001001001001001001001001001001]
    tensors = {
        "l.qweight": pack_words(np.zeros((32, 64), int), 3).T,
        "l.qzeros": (codes - np.array(words, np.uint32)).view(np.int32),
        "l.scales": np.ones((2, 32), np.float16),
    }
    settings = {"quant_method": "gptq", "sym": True, "checkpoint_format": "gptq"}
    with pytest.raises(ValueError, match="zero points other than the middle"):
        write(tmp_path, tensors, **settings)["l.weight"]
    w = write(tmp_path, tensors, **settings, meta={"quantizer": ["gptqmodel:5.0"]})["l.weight"]
    np.testing.assert_array_equal(np.asarray(w), -4)
    with pytest.raises(ValueError, match="zero points other than the middle"):  # since version 7 in order
        write(tmp_path, tensors, **settings, meta={"quantizer": ["gptqmodel:7.0"]})["l.weight"]


# Act-order


def act_order_file(path, length=128, out=32, groups=4, seed=0):
    rng = np.random.default_rng(seed)
    q, s = rng.integers(0, 16, (length, out)), rng.random((groups, out)).astype(np.float16)
    z, group = rng.integers(1, 16, (groups, out)), rng.permutation(np.repeat(np.arange(groups), length // groups))
    tensors = {
        "l.qweight": pack_words(q.T, 4).T,
        "l.qzeros": pack_words(z - 1, 4),
        "l.scales": s,
        "l.g_idx": group.astype(np.int32),
    }
    return write(path, tensors, quant_method="gptq"), (s[group] * (q - z[group]).astype(np.float16)).T


@pytest.mark.long
def test_act_order(tmp_path):
    checkpoint, expected = act_order_file(tmp_path)
    w = checkpoint["l.weight"]
    assert isinstance(w, PermutedArray) and w.shape == (32, 128) and w.array.format.block_size == 32
    assert "act-order" in str(checkpoint) and w.nbytes < 32 * 128
    assert_bits(w.dequantize(), expected)
    assert_bits(w.T.dequantize(), expected.T)
    assert_bits(w[3:5], expected[3:5])
    assert_bits(w[7], expected[7])
    assert_bits(w[jnp.array([1, 0])], expected[[1, 0]])
    assert_bits(w[2, 3], expected[2, 3])
    assert w.astype(jnp.float32).dtype == jnp.float32 and repr(w).startswith("PermutedArray(")
    w = w.astype(jnp.float32)
    dense = np.asarray(w.dequantize())  # `expected` without rounding to float16
    rng = np.random.default_rng(1)
    for shape in ((128,), (128, 5), (2, 128, 5)):
        x = rng.standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(w @ x, dense @ x, rtol=1e-4, atol=1e-3)
        y = np.swapaxes(x, -1, -2) if x.ndim > 1 else x
        np.testing.assert_allclose(y @ w.T, y @ dense.T, rtol=1e-4, atol=1e-3)
    for shape in ((32,), (32, 5), (2, 32, 5)):
        x = rng.standard_normal(shape).astype(np.float32)
        np.testing.assert_allclose(w.T @ x, dense.T @ x, rtol=1e-4, atol=1e-3)
        y = np.swapaxes(x, -1, -2) if x.ndim > 1 else x
        np.testing.assert_allclose(y @ w, y @ dense, rtol=1e-4, atol=1e-3)


@pytest.mark.long
def test_act_order_under_transformations_and_in_files(tmp_path):
    first, _ = act_order_file(tmp_path)
    second, _ = act_order_file(tmp_path, seed=1)
    # The file of the first is another now, but its map is still open.
    layers = [first["l.weight"].astype(jnp.float32), second["l.weight"].astype(jnp.float32)]
    one, two = (np.asarray(w.dequantize()) for w in layers)
    layer = eqx.nn.Linear(128, 32, key=jax.random.key(0))
    layer = eqx.tree_at(lambda m: m.weight, layer, layers[0])
    x = weights(jax.random.key(1), (3, 128))
    y = eqx.filter_jit(lambda layer, x: jax.vmap(layer)(x))(layer, x)
    np.testing.assert_allclose(y, x @ one.T + layer.bias[None], rtol=1e-4, atol=1e-3)
    grad = eqx.filter_jit(jax.grad(lambda x: jnp.sum(jax.vmap(layer)(x))))(x)
    np.testing.assert_allclose(grad, jnp.ones((3, 32)) @ one, rtol=1e-4, atol=1e-3)
    stack = jax.tree_util.tree_map(lambda *leaves: jnp.stack(leaves), *layers)
    _, ys = jax.lax.scan(lambda _, w: (None, w @ x[0]), None, stack)
    np.testing.assert_allclose(ys, np.stack([one, two]) @ x[0], rtol=1e-4, atol=1e-3)
    assert_bits(stack.dequantize(), np.stack([one, two]))
    assert_bits(stack.swapaxes(-1, -2).dequantize(), np.stack([one.T, two.T]))
    eqq.save(tmp_path / "ours.safetensors", layer)
    assert eqx.tree_equal(eqq.load(tmp_path / "ours.safetensors", layer), layer)
    assert "weight.array" in str(eqq.summary(layer))
    adapted = eqq.loraify(layer, rank=2, key=jax.random.key(2))
    np.testing.assert_allclose(outputs(adapted, x), y, rtol=1e-4, atol=1e-3)
    assert isinstance(adapted.weight.array, eqq.arrays.LoraArray)
    dense = eqq.merge_lora(adapted, dense=True)
    np.testing.assert_allclose(outputs(dense, x), y, rtol=1e-4, atol=1e-3)
    # Into a model, from the file, and divided by rows.
    template = eqx.nn.Linear(128, 32, use_bias=False, key=jax.random.key(0))
    loaded = eqq.io.load_into(template, second, {"l.weight": "weight"})
    assert eqx.tree_equal(loaded.weight, layers[1])
    assert "inputs reordered" in str(eqq.io.plan_load(template, second, {"l.weight": "weight"}))
    halves = {"a": jnp.ones((8, 128)), "b": jnp.ones((24, 128))}
    parts = eqq.io.load_into(halves, second, {"l.weight": ("a", "b")})
    assert_bits(parts["b"].dequantize(), two[8:])
    with pytest.raises(ValueError, match="orders of their own.*`dequantize=True`"):
        eqq.io.load_into({"w": jnp.ones((64, 128))}, {"a": layers[0], "b": layers[1]}, {("a", "b"): "w"})


def test_act_order_of_compressed_tensors(tmp_path):
    rng = np.random.default_rng(0)
    q, s = rng.integers(0, 16, (10, 48)), rng.random((10, 3)).astype(np.float32)
    group = rng.permutation(np.repeat(np.arange(3), 16)).astype(np.int32)
    tensors = {"l.weight_packed": pack_words(q, 4), "l.weight_scale": s, "l.weight_shape": np.array([10, 48])}
    checkpoint = write(tmp_path, {**tensors, "l.weight_g_idx": group})
    w = checkpoint["l.weight"]
    assert eqx.tree_equal(eqx.filter_eval_shape(lambda: w), checkpoint.items_by_name["l.weight"].struct)
    assert_bits(w.dequantize(), ((q - 8) * s[:, group]).astype(np.float32))
    assert eqq.is_quantized(write(tmp_path, {**tensors, "l.weight_g_idx": np.full(48, -1, np.int32)})["l.weight"])
    group[5] = -1
    with pytest.raises(ValueError, match="'l.weight_g_idx': It must give each of 3 groups 16 inputs"):
        write(tmp_path, {**tensors, "l.weight_g_idx": group})["l.weight"]


# torchao, and NVFP4 and MXFP8 of others


LEVELS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
bytes_of = lambda x: np.asarray(x).view(np.uint8)


def in_tiles(scales):
    """Scales as tensor cores take them: tiles of 128 x 4, whose row `r` is 4 bytes at `16 (r % 32) + 4 (r // 32)`."""
    rows, columns = -(-scales.shape[0] // 128), -(-scales.shape[1] // 4)
    out = np.zeros((rows, columns, 512), np.uint8)
    for (r, c), value in np.ndenumerate(scales):
        out[r // 128, c // 4, 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = value
    return out.reshape(-1)


def write_torchao(path, name, kind, parts, **attributes):
    """As `flatten_tensor_state_dict` of torchao names tensors and describes them."""
    layer, _, last = name.rpartition(".")
    about = {"_type": kind, "_data": attributes, "_tensor_data_names": list(parts)}
    metadata = {name: json.dumps(about), "l.bias": '{"_type": "Tensor"}', "tensor_names": json.dumps([name, "l.bias"])}
    to_write = [
        NewTensor(f"{layer}._{last}_{part}", dtype, x.shape, lambda x=x: x) for part, (dtype, x) in parts.items()
    ]
    bias = np.ones(2, np.float32)
    _safetensors.write(path, [*to_write, NewTensor("l.bias", "F32", (2,), lambda: bias)], metadata)
    checkpoint = eqq.io.open(path)
    assert checkpoint.dialect == "torchao" and set(checkpoint) == {name, "l.bias"}
    return checkpoint[name]


TORCH_FLOAT = {"_type": "torch.dtype", "_data": "float32"}


def test_torchao_integers_and_floats(tmp_path):
    path, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    q, s = rng.integers(-127, 128, (6, 64)).astype(np.int8), rng.random((6, 1)).astype(np.float32)
    w = write_torchao(path, "l.weight", "Int8Tensor", {"qdata": ("I8", q), "scale": ("F32", s)}, dtype=TORCH_FLOAT)
    assert w.format == eqq.Int8()
    assert_bits(w.dequantize(), q * s)
    # The dtype of the weight is not the one of its scales, and zero points lie in each row.
    z, half = rng.integers(-9, 9, (6, 1)).astype(np.int8), {"_type": "torch.dtype", "_data": "bfloat16"}
    parts = {"qdata": ("I8", q), "scale": ("F32", s), "zero_point": ("I8", z)}
    for kind in ("Int8Tensor", "IntxUnpackedToInt8Tensor"):  # eight bits, if it does not say how many
        w = write_torchao(path, "l.weight", kind, parts, dtype=half)
        assert w.format == eqq.Int8(symmetric=False) and w.dtype == jnp.bfloat16
        assert_bits(w.astype(jnp.float32).dequantize(), ((q.astype(np.int32) - z) * s).astype(np.float32))
    f = np.asarray(jnp.asarray(rng.standard_normal((6, 64))).astype(jnp.float8_e4m3fn))
    w = write_torchao(path, "l.weight", "Float8Tensor", {"qdata": ("F8_E4M3", f), "scale": ("F32", s)})
    assert_bits(w.dequantize(), f.astype(np.float32) * s)
    q, s = rng.integers(-8, 8, (6, 64)).astype(np.int8), rng.random((6, 2)).astype(np.float32)
    z = rng.integers(-8, 8, (6, 2)).astype(np.int8)
    for zero in (z, 0 * z):
        parts = {"qdata": ("I8", q), "scale": ("F32", s), "zero_point": ("I8", zero)}
        target = {"_type": "torch.dtype", "_data": "int4"}
        w = write_torchao(path, "l.weight", "IntxUnpackedToInt8Tensor", parts, target_dtype=target)
        assert w.format == eqq.Int4(32, symmetric=not zero.any())
        spread = lambda x: np.repeat(x, 32, 1)
        assert_bits(w.dequantize(), ((q.astype(np.int32) - spread(zero)) * spread(s)).astype(np.float32))
    zeros, scales = (rng.standard_normal((2, 6)).astype(np.float16) for _ in "zs")
    packed = (q[:, ::2] & 15 | q[:, 1::2] << 4).astype(np.int8)
    four = {"qdata": ("I8", packed), "scale": ("F16", scales), "zero_point": ("F16", zeros)}
    w = write_torchao(path, "l.weight", "Int4Tensor", four, block_size=[1, 32])
    assert w.format == eqq.formats.MLX(4, 32, "float32") and w.dtype == jnp.float16
    exact = q * spread(scales.T.astype(np.float64)) + spread(zeros.T.astype(np.float64))
    np.testing.assert_allclose(w.dequantize(), exact.astype(np.float16), rtol=1e-3, atol=1e-6)
    with pytest.raises(ValueError, match="l._weight_act_pre_scale': It stands beside 'l.weight'"):
        write_torchao(path, "l.weight", "Int4Tensor", four | {"act_pre_scale": ("F16", zeros)})
    with pytest.raises(ValueError, match="with `zero_point`"):
        write_torchao(path, "l.weight", "Int4Tensor", {name: four[name] for name in ("qdata", "scale")})
    with pytest.raises(ValueError, match="does not read torchao's Int4TilePackedTo4dTensor"):
        write_torchao(path, "l.weight", "Int4TilePackedTo4dTensor", parts)
    with pytest.raises(ValueError, match="must belong to a Int8Tensor with `qdata`"):
        write_torchao(path, "l.weight", "Int8Tensor", {"scale": ("F32", s)})


@pytest.mark.parametrize("blocked", [False, True])
def test_torchao_microscaling(tmp_path, blocked):
    path, rng = tmp_path / "model.safetensors", np.random.default_rng(0)
    q = rng.integers(0, 16, (129, 192))  # a row more than a tile has
    packed = (q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8)
    e = rng.integers(120, 130, (129, 6)).astype(np.uint8)
    stored = lambda scales: in_tiles(scales) if blocked else scales
    spread = lambda x, n: np.repeat(x, n, axis=1)
    parts = {"qdata": ("U8", packed), "scale": ("F8_E8M0", stored(e))}
    w = write_torchao(path, "l.weight", "MXTensor", parts, orig_dtype=TORCH_FLOAT, is_swizzled_scales=blocked)
    assert w.format == eqq.MXFP4()
    powers = 2.0 ** (e.astype(np.float32) - 127)
    assert_bits(w.dequantize(), LEVELS[q] * spread(powers, 32))
    f = np.asarray(jnp.asarray(rng.standard_normal((129, 192))).astype(jnp.float8_e4m3fn))
    parts = {"qdata": ("F8_E4M3", f), "scale": ("F8_E8M0", stored(e))}
    w = write_torchao(path, "l.weight", "MXTensor", parts, orig_dtype=TORCH_FLOAT, is_swizzled_scales=blocked)
    assert w.format == eqq.MXFP8()
    assert_bits(w.dequantize(), f.astype(np.float32) * spread(powers, 32))
    inner = np.asarray(jnp.asarray(rng.uniform(1, 400, (129, 12))).astype(jnp.float8_e4m3fn))
    outer = np.float32(0.37)
    parts = {"qdata": ("U8", packed), "_scale_e4m3": ("F8_E4M3", stored(bytes_of(inner)))}
    parts["_per_tensor_scale"] = ("F32", np.asarray(outer))
    w = write_torchao(path, "l.weight", "NVFP4Tensor", parts, _orig_dtype=TORCH_FLOAT, _is_swizzled_scales=blocked)
    assert w.format == eqq.NVFP4()
    assert_bits(w.dequantize(), LEVELS[q] * spread(inner.astype(np.float32) * outer, 16))
    del parts["_per_tensor_scale"]
    w = write_torchao(path, "l.weight", "NVFP4Tensor", parts, _orig_dtype=TORCH_FLOAT, _is_swizzled_scales=blocked)
    assert_bits(w.dequantize(), LEVELS[q] * spread(inner.astype(np.float32), 16))


def test_nvfp4_and_mxfp8_of_compressed_tensors(tmp_path):
    rng = np.random.default_rng(0)
    q = rng.integers(0, 16, (6, 64))
    inner = np.asarray(jnp.asarray(rng.uniform(1, 400, (6, 4))).astype(jnp.float8_e4m3fn))
    f = np.asarray(jnp.asarray(rng.standard_normal((6, 64))).astype(jnp.float8_e4m3fn))
    e = rng.integers(120, 130, (6, 2)).astype(np.uint8)
    tensors = {
        "l.weight_packed": ("U8", (q[:, ::2] | q[:, 1::2] << 4).astype(np.uint8)),
        "l.weight_scale": ("F8_E4M3", inner),
        "l.weight_global_scale": ("F32", np.array([512.0], np.float32)),
        "k.weight": ("F8_E4M3", f),
        "k.weight_scale": ("U8", e),
    }
    to_write = [NewTensor(name, dtype, x.shape, lambda x=x: x) for name, (dtype, x) in tensors.items()]
    _safetensors.write(tmp_path / "model.safetensors", to_write, {})
    checkpoint = eqq.io.open(tmp_path)
    assert checkpoint.dialect == "compressed-tensors" and set(checkpoint) == {"l.weight", "k.weight"}
    w = checkpoint["l.weight"].astype(jnp.float32)
    assert w.format == eqq.NVFP4()
    assert_bits(w.dequantize(), LEVELS[q] * np.repeat(inner.astype(np.float32) / 512, 16, axis=1))
    w = checkpoint["k.weight"].astype(jnp.float32)
    assert w.format == eqq.MXFP8()
    assert_bits(w.dequantize(), f.astype(np.float32) * np.repeat(2.0 ** (e.astype(np.float32) - 127), 32, axis=1))


def test_arrays_do_not_show_the_file(tmp_path):
    """Another program may write into the file while it is open here."""
    tensors = {
        "a.weight_packed": np.full((64, 512), 0x11, np.uint8),
        "a.weight_scale": np.full((64, 32), 127, np.uint8),
        "b": np.ones((64, 64), np.float32),
    }
    checkpoint = write(tmp_path, tensors)
    a, b = checkpoint["a.weight"], checkpoint["b"]
    path = tmp_path / "model.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as f:
        f.seek(int.from_bytes(f.read(8), "little") + 8)
        f.write(b"\0" * (size - f.tell()))
    np.testing.assert_array_equal(np.asarray(a, np.float32), 0.5)
    np.testing.assert_array_equal(b, 1)
