"""Files that nobody vouches for: an error that names the file, or a right result."""

import functools as ft
import json
import os
import random
import struct
import tempfile
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqquant as eqq
from eqquant.io import _gguf, _safetensors
from eqquant.io._tensors import MappedFile, NAME_OF, NewTensor

from .test_checkpoints import FP4, small_bnb


GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_truncated_at_every_byte(path):
    eqq.save(path, {"w": eqq.quantize(jnp.ones((2, 64)), "nf4"), "n": 3})
    whole = path.read_bytes()
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(ValueError, match="model.safetensors must "):
            eqq.io.open(path)
    gguf = (GOLDEN / "model.gguf").read_bytes()
    for n in [*range(0, 700, 5), len(gguf) - 13]:
        path.write_bytes(gguf[:n])
        with pytest.raises(ValueError, match="model.safetensors must "):
            eqq.io.open(path)


A = tensor(0, 4, [1])


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "8 bytes. Got 0 bytes: the file is truncated"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "header of at most 100000000 bytes"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "header of at most"),
        (raw(b" {}"), "starts with a brace"),
        (raw(b"{\xff}"), "valid JSON"),
        (raw(b"{" + b'"a":{' * 100_000), "nested more than|valid JSON"),
        (raw(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "nested more than"),
        (raw(b'{"a":' + b"[" * 30 + b"]" * 30 + b"}"), "nested more than 16"),
        (raw(b'{"a": NaN}'), "NaN is not a number"),
        (raw(b'{"a": ' + b"9" * 5000 + b"}"), "valid JSON"),
        (raw(b'{"a":%s,"a":%s}' % ((json.dumps(A).encode(),) * 2), b"1234"), "'a' stands there twice"),
        (raw({"__metadata__": {"a": 1}}), "maps names to text"),
        (raw({"__metadata__": [1]}), "maps names to text"),
        (raw({"a": 3}), "'a' by dtype, shape and data_offsets. Got other fields"),
        (raw({"a": {**A, "x": 1}}, b"1234"), "Got other fields"),
        (raw({"a": tensor(0, 4, [1], ["F32"])}, b"1234"), "the dtype"),
        (raw({"a": tensor(0, 4, [-1])}, b"1234"), "no list of numbers"),
        (raw({"a": tensor(0, 4, [True])}, b"1234"), "no list of numbers"),
        (raw({"a": tensor(0, 4, [1.0])}, b"1234"), "no list of numbers"),
        (raw({"a": tensor(0.0, 4, [1])}, b"1234"), "not two numbers"),
        (raw({"a": tensor(-4, 0, [1])}, b"1234"), "not two numbers"),
        (raw({"a": tensor(0, 4, [2])}, b"1234"), r"F32\[2\] takes 8"),
        (raw({"a": tensor(4, 0, [1])}, b"1234"), "takes 4"),
        (raw({"a": tensor(0, 10**4000, [1])}, b"1234"), "offsets that no file can have"),
        (raw({"a": tensor(0, 1, [1], "F4")}, b"1"), "no array can have"),
        (raw({"a": tensor(0, 0, [0, 2**62])}), "no array can have"),
        (raw({"a": tensor(0, 0, [0] * 40)}), "no array can have"),
        (raw({"a": tensor(0, 2**62, [2**60])}), "no array can have"),
        (raw({"a": tensor(0, 2**42, [2**40])}), "'a'.* it is truncated"),
        (raw({"a": A}, b"12345"), "1 bytes after 'a'"),
        (raw({"a": A, "b": A}, b"1234"), "'a' and 'b', which overlap"),
        (raw({"a": A, "b": tensor(8, 12, [1])}, b"1" * 12), "'a' and 'b', which leave a hole"),
        (raw({"a": tensor(4, 8, [1])}, b"1" * 8), "the header and 'a', which leave a hole"),
    ],
)
def test_corrupted_headers(path, content, message):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"model.safetensors .*({message})"):
        eqq.io.open(path)


def test_corrupted_values(path):
    path.write_bytes(raw({"a": tensor(0, 2, [2], "BOOL"), "b": tensor(2, 5, [4], "F6_E2M3")}, b"\x01\x02123"))
    checkpoint = eqq.io.open(path)
    assert "cannot be read" in str(checkpoint)
    with pytest.raises(ValueError, match="'a': Got a boolean stored as 2"):
        checkpoint["a"]
    with pytest.raises(ValueError, match="'b': No library agrees about the order of packed F6_E2M3"):
        checkpoint["b"]
    path.write_bytes(raw({"a": tensor(0, 2, [4], "F4"), "odd": tensor(2, 6, [1])}, b"\x21\x43\x00\x00\x80\x3f"))
    checkpoint = eqq.io.open(path)
    np.testing.assert_array_equal(np.asarray(checkpoint["a"], np.float32), [0.5, 1, 1.5, 2])
    assert checkpoint["odd"] == 1


def gguf(num_tensors=0, num_pairs=0, rest=b"", version=3, magic=b"GGUF"):
    return magic + struct.pack("<IQQ", version, num_tensors, num_pairs) + rest


def text(x):
    return struct.pack("<Q", len(x)) + x


def info(name, shape, kind, offset):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    "content, message",
    [
        (gguf(version=1), "version 2 or 3"),
        (gguf(10**9), "the 1000000000 tensors that it claims"),
        (gguf(0, 2**63), "pairs that it claims"),
        (gguf(0, 1, text(b"a") + struct.pack("<I", 99)), "a known type for 'a'"),
        (gguf(0, 1, struct.pack("<Q", 2**63) + b"1" * 20), "a key. Got"),
        (gguf(0, 1, text(b"\xff") + b"1" * 20), "a known type for '.udcff'"),
        (gguf(0, 2, (text(b"a") + struct.pack("<IB", 0, 1)) * 2), "each key once"),
        (gguf(0, 1, text(b"a") + struct.pack("<IIQ", 9, 0, 2**62)), "must hold 'a'"),
        (gguf(0, 1, text(b"a") + struct.pack("<IIQ", 9, 8, 2**40)), "an array of numbers or text"),
        (gguf(0, 1, text(b"a") + struct.pack("<IIQ", 9, 9, 1)), "an array of numbers or text"),
        (gguf(1, 0, info(b"a", (2**62, 4), 999, 0)), "'a' a shape"),
        (gguf(1, 0, info(b"a", (4,), 999, 64) + b"1" * 40), "must hold 'a', 0 bytes, 64 bytes after"),
        (gguf(1, 0, info(b"a", (4,) * 5, 0, 0)), "at most 4 dimensions"),
        (gguf(1, 0, info(b"a", (33,), 2, 0)), "whole blocks, 32 of Q4_0"),
        (gguf(1, 0, info(b"a", (), 2, 0)), "whole blocks"),
        (gguf(1, 0, info(b"a", (2**62, 2**62), 0, 0)), "whole blocks"),
        (gguf(1, 0, info(b"a", (4,), 0, 0)), "must hold 'a', 16 bytes"),
        (gguf(1, 0, info(b"a", (4,), 0, 2**63) + b"1" * 100), "must hold 'a'"),
        (gguf(1, 0, info(b"a", (4,), 0, 1) + b"1" * 100), "aligned to 32"),
        (gguf(2, 0, info(b"a", (4,), 0, 0) + info(b"a", (4,), 0, 32) + b"1" * 100), "each tensor once"),
        (gguf(2, 0, info(b"a", (4,), 0, 0) + info(b"b", (4,), 0, 0) + b"1" * 100), "'a' and 'b', which overlap"),
        (gguf(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 0)), "a power of two. Got 0"),
        (gguf(0, 1, text(b"general.alignment") + struct.pack("<If", 6, 32.0)), "a power of two"),
    ],
)
def test_corrupted_gguf_headers(path, content, message):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"model.safetensors .*({message})"):
        eqq.io.open(path)


def test_nan_scales_are_an_error(path):
    kind = {name: number for number, (name, *_) in _gguf.TYPES.items()}
    for name, block in (("Q4_0", b"\x00\x7e" + b"1" * 16), ("MXFP4", b"\xff" + b"1" * 16)):
        head = gguf(1, 0, info(b"a", (32,), kind[name], 0))
        path.write_bytes(head + b"\0" * (-len(head) % 32) + block)
        with pytest.raises(ValueError, match="must hold a valid 'a': Got a scale"):
            eqq.io.open(path)["a"]


def manifest(change):
    def damage(path):
        tensors, metadata = _safetensors.read(MappedFile(path))
        fields = json.loads(metadata["eqquant"])
        change(fields)
        arrays = {name: t.array() for name, t in tensors.items()}  # before the file is written again
        parts = [NewTensor(t.name, t.dtype, t.shape, ft.partial(arrays.get, name)) for name, t in tensors.items()]
        _safetensors.write(path, parts, {"eqquant": json.dumps(fields)})

    return damage


def change_leaf(**fields):
    return manifest(lambda m: m["leaves"][0].update(fields))


NF4 = {"name": "NF4", "fields": {"block_size": 64, "double_quant": False, "scale_dtype": "float32"}}


@pytest.mark.parametrize(
    "damage, message",
    [
        (manifest(lambda m: m.update(version=2)), "a newer eqquant wrote it"),
        (manifest(lambda m: m.pop("leaves")), "list its leaves"),
        (manifest(lambda m: m["leaves"].append(3)), "Got no object"),
        (manifest(lambda m: m["leaves"].append(m["leaves"][0])), "'w' twice|use each tensor once"),
        (manifest(lambda m: m["leaves"].append({"path": "x", "keys": [], "tied_to": "y"})), "no leaf before it"),
        # None of these may take time or memory beyond the size of the file.
        (change_leaf(shape=[10**4000] * 3000), "which no array can have"),
        (change_leaf(keys=["k"] * 100_000), "100000 keys. It must have at most 500"),
        (change_leaf(axis=[10**4000] * 100), "which it does not have"),
        (manifest(lambda m: m["leaves"].append({"path": "y", "keys": [], "tied_to": "w"})), "keys that nest"),
        (change_leaf(within=3), "for `within`, which must be a str"),
        (manifest(lambda m: m["leaves"].pop(0)), "'w.codes', which it does not mention"),
        (change_leaf(shape=[2, 65]), "its tensors must be"),
        (change_leaf(shape=[2, 2**70]), "no array can have"),
        (change_leaf(axis=[0]), "which it does not have"),
        (change_leaf(axis=[-1, -1]), "which it does not have"),
        (change_leaf(axis="x"), "must be a list"),
        (change_leaf(dtype="int8"), "quantized arrays are floating point"),
        (change_leaf(dtype="O"), "which neither NumPy nor JAX has"),
        (change_leaf(kind="pickle"), "the kind 'pickle'"),
        (change_leaf(kind="array"), "its tensors must be"),
        (change_leaf(format={**NF4, "name": "os.system"}), "the format 'os.system', which is not defined"),
        (change_leaf(format={"name": "NF4", "fields": {"block_size": 64, "double_quant": False, "x": 1}}), "made"),
        (change_leaf(format={"name": "NF4", "fields": {"block_size": -3, "double_quant": False}}), "does not take"),
        (change_leaf(format={"name": "NF4", "fields": {**NF4["fields"], "block_size": 32}}), "its tensors must be"),
        (change_leaf(format={"name": "FP8", "fields": {"kind": [], "block_size": None}}), "does not take|its tensors"),
        (change_leaf(format={"name": "AbstractFormat", "fields": {}}), "not defined"),
        (change_leaf(tensors={"codes": "w.codes", "scale_bits": "x"}), "a tensor that the file does not have"),
        (change_leaf(tensors={"codes": "w.codes", "scale_bits": []}), "a tensor that the file does not have"),
        (change_leaf(tensors={"codes": "w.codes"}), "its tensors must be"),
        (change_leaf(kind="key", impl="x", dtype="key<fry>"), "JAX does not know"),
        (change_leaf(kind="scalar", dtype="int", value="zz"), "no int"),
        (change_leaf(kind="scalar", dtype="object", value="zz"), "the type 'object'"),
    ],
)
def test_corrupted_manifests(path, damage, message):
    eqq.save(path, {"w": eqq.quantize(jnp.ones((2, 64)), "nf4"), "x": 3})
    damage(path)
    with pytest.raises(ValueError, match=f"model.safetensors .*({message})"):
        eqq.load(path)


# Mutations


def mutate(rng, content):
    """A few changed, inserted or removed bytes, mostly in the header, and numbers that are likely to matter."""
    out = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(out), 3000) if rng.random() < 0.8 else len(out))
        kind = rng.randrange(6)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at : at + 8] = rng.choice((0, 1, 2**31, 2**32, 2**63, 2**64 - 1, len(out))).to_bytes(8, "little")
        elif kind == 2:
            del out[at : at + rng.randint(1, 9)]
        elif kind == 3:
            out[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 9)))
        elif kind == 4:
            out[at : at + 1] = rng.choice((b"9", b"0", b"-", b"[", b"{", b'"', b",", b"e"))
        else:
            other = rng.randrange(len(out))
            out[at : at + 16] = out[other : other + 16]
        out = out or bytearray(b"x")
    return bytes(out)


def ours(path):
    eqq.save(path, {"w": eqq.quantize(jnp.ones((16, 64)), eqq.NF4(double_quant=True)), "b": jnp.ones(3), "n": 3.5})


def golden_gguf(path):
    path.write_bytes((GOLDEN / "model.gguf").read_bytes())


def vectors_gguf(path):
    path.write_bytes((GOLDEN / "vectors.gguf").read_bytes())


def settings(path, **quantization):
    """Writes the configuration of the quantization."""
    (path.parent / "config.json").write_text(json.dumps({"quantization_config": quantization}))


def gptq(path):
    settings(path, quant_method="gptq")
    words = lambda *shape: np.arange(np.prod(shape), dtype=np.int32).reshape(shape) * 1_234_567
    scales, order = np.ones((2, 8), np.float16), np.repeat(np.arange(2, dtype=np.int32), 32)
    save_file({"l.qweight": words(8, 8), "l.qzeros": words(2, 1), "l.scales": scales, "l.g_idx": order}, path)


def mlx(path):
    settings(path, bits=4, group_size=64)
    words = lambda *shape: np.arange(np.prod(shape), dtype=np.uint32).reshape(shape) * np.uint32(1_234_567)
    scales = np.ones((4, 2), np.float16)
    tensors = {"l.weight": words(4, 16), "l.scales": scales, "l.biases": scales, "n.weight": np.ones(5, np.float32)}
    save_file(tensors, path)


def write_tensors(path, tensors):
    to_write = lambda name, x: NewTensor(name, NAME_OF[x.dtype.name], x.shape, lambda: x)
    _safetensors.write(path, [to_write(name, x) for name, x in tensors.items()], {})


def compressed(path):
    words = lambda *shape: np.arange(np.prod(shape), dtype=np.int32).reshape(shape) * 1_234_567
    tensors = {
        **{"a.weight_packed": words(4, 8), "a.weight_scale": np.ones((4, 2), np.float32)},
        **{"a.weight_shape": np.array([4, 64]), "a.weight_zero_point": words(1, 2)},
        **{"b.weight": np.ones((4, 32), np.int8), "b.weight_scale_inv": np.ones((4, 1), np.float32)},
    }
    write_tensors(path, tensors)


def small_floats(path):
    tensors = {
        **{"d.weight_packed": np.ones((4, 16), np.uint8), "d.weight_scale": np.ones((4, 2), jnp.float8_e4m3fn)},
        **{"d.weight_global_scale": np.ones(1, np.float32), "e.weight_scale": np.full((4, 2), 127, np.uint8)},
        **{"e.weight": np.ones((4, 64), jnp.float8_e4m3fn)},
    }
    write_tensors(path, tensors)


def gpt_oss(path):
    scales = np.full((2, 2, 1), 127, np.uint8)
    write_tensors(path, {"c_blocks": np.ones((2, 2, 1, 16), np.uint8), "c_scales": scales})


def act_order(path):
    gptq(path)
    tensors = load_file(path)
    save_file({**tensors, "l.g_idx": np.tile(np.arange(2, dtype=np.int32), 32)}, path)


def awq(path):
    words = lambda *shape: np.arange(np.prod(shape), dtype=np.int32).reshape(shape) * 1_234_567
    save_file({"l.qweight": words(64, 2), "l.qzeros": words(2, 2), "l.scales": np.ones((2, 16), np.float16)}, path)


def torchao(path):
    about = lambda kind, **data: json.dumps({"_type": kind, "_data": data, "_tensor_data_names": []})
    parts = {
        **{"a._w_qdata": ("I8", np.ones((4, 32), np.int8)), "a._w_scale": ("F32", np.ones((4, 1), np.float32))},
        **{"b._w_qdata": ("U8", np.ones((4, 32), np.uint8)), "b._w_scale": ("F8_E8M0", np.full(512, 127, np.uint8))},
        **{
            "c._w_qdata": ("U8", np.ones((4, 32), np.uint8)),
            "c._w__scale_e4m3": ("F8_E4M3", np.ones((4, 4), np.uint8)),
        },
        "c._w__per_tensor_scale": ("F32", np.ones(1, np.float32)),
    }
    metadata = {
        "tensor_names": '["a.w", "b.w", "c.w"]',
        "a.w": about("IntxUnpackedToInt8Tensor", target_dtype={"_data": "int4"}),
        "b.w": about("MXTensor", is_swizzled_scales=True),
        "c.w": about("NVFP4Tensor"),
    }
    to_write = [NewTensor(name, dtype, x.shape, lambda x=x: x) for name, (dtype, x) in parts.items()]
    _safetensors.write(path, to_write, metadata)


SEEDS = {
    "eqquant": ours,
    "gguf": golden_gguf,
    "vectors": vectors_gguf,
    "bitsandbytes": lambda path: small_bnb(path, (4, 64), 64, FP4),
    "gptq": gptq,
    "mlx": mlx,
    "act-order": act_order,
    "awq": awq,
    "torchao": torchao,
    "compressed-tensors": compressed,
    "small-floats": small_floats,
    "gpt-oss": gpt_oss,
}


@pytest.fixture
def in_memory():
    """A path on a file system in memory, where there is one: 10,000 files would wear out a disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder) / "model.safetensors"


# Ten thousand files, in parts that take less than a minute: reading GGUF compiles a program for many of them.
PARTS = [pytest.param(100, seed, marks=(pytest.mark.slow, pytest.mark.long)) for seed in range(100)]


@pytest.mark.parametrize("count, seed", [(60, 60), *PARTS])
@pytest.mark.parametrize("dialect", SEEDS)
def test_mutated_files(in_memory, dialect, count, seed):
    path = in_memory
    SEEDS[dialect](path)
    content, rng, outcomes = path.read_bytes(), random.Random(seed), {"read": 0, "refused": 0}
    tracemalloc.start()
    for n in range(count):
        path.unlink()  # a mapped file must not shrink
        path.write_bytes(mutate(rng, content) if n > 0 else content)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            checkpoint = eqq.io.open(path)
            str(checkpoint)
            assert n or dialect == "gguf" or all(row.problem is None for row in checkpoint.rows)
            for name in checkpoint:
                if checkpoint.items_by_name[name].problem is not None:
                    with pytest.raises(ValueError, match="model.safetensors"):
                        checkpoint[name]
                else:
                    x, item = checkpoint[name], checkpoint.items_by_name[name]
                    assert (x.shape, x.dtype) == (item.entry.shape, item.entry.dtype)
                    assert jax.tree_util.tree_structure(x) == jax.tree_util.tree_structure(item.struct)
            outcomes["read"] += 1
        except ValueError as e:
            assert "model.safetensors" in str(e), repr(e)
            outcomes["refused"] += 1
        # What JAX traces for the first time takes a few megabytes, and more in a new process.
        assert n == 0 or tracemalloc.get_traced_memory()[1] - before < 50 * len(content) + 2**23
    tracemalloc.stop()
    assert min(outcomes.values()) > count / 1000, outcomes
