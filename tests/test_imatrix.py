"""Importance matrices of llama.cpp."""

import struct

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.io._tensors import NewTensor
from eqquant.io._writers import gguf

from .helpers import weights


SQUARES = np.arange(1, 257, dtype=np.float32)


def write_gguf(path, arrays):
    tensors = [NewTensor(name, "F32", x.shape, lambda x=x: x) for name, x in arrays.items()]
    gguf.write(path, tensors, {"general.type": "imatrix"})


def binary(*entries, number=None, tail=b""):
    body = b""
    for name, calls, values in entries:
        body += struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values)) + values.tobytes()
    return struct.pack("<i", len(entries) if number is None else number) + body + tail


def test_gguf(tmp_path):
    arrays = {"a.weight.in_sum2": 10 * SQUARES[None], "a.weight.counts": np.full((1, 1), 10, np.float32)}
    experts = np.stack([2 * SQUARES, 0 * SQUARES])
    arrays |= {"b.weight.in_sum2": experts, "b.weight.counts": np.array([[2], [0]], np.float32)}
    write_gguf(tmp_path / "i.gguf", arrays)
    found = eqq.io.read_imatrix(tmp_path / "i.gguf")
    assert [*found] == ["a.weight", "b.weight"]
    np.testing.assert_array_equal(found["a.weight"], SQUARES)
    np.testing.assert_array_equal(found["b.weight"], np.stack([SQUARES, 0 * SQUARES]))


def test_binary(tmp_path):
    # Newer programs add the last chunk and the name of the text.
    for tail in (b"", struct.pack("<ii", 7, 3) + b"txt"):
        (tmp_path / "i.dat").write_bytes(binary((b"a.weight", 7, 7 * SQUARES), (b"b.weight", 0, SQUARES), tail=tail))
        found = eqq.io.read_imatrix(tmp_path / "i.dat")
        assert [*found] == ["a.weight", "b.weight"]
        for squares in found.values():
            np.testing.assert_array_equal(squares, SQUARES)


@pytest.mark.long
def test_weighs_errors(tmp_path, getkey):
    squares = np.random.default_rng(0).exponential(size=256).astype(np.float32) ** 2
    (tmp_path / "i.dat").write_bytes(binary((b"blk.0.up.weight", 1, squares)))
    w = {"blk.0.up.weight": weights(getkey(), (16, 256))}
    loss = lambda q: float(jnp.sum(squares[None] * (w["blk.0.up.weight"] - q["blk.0.up.weight"].dequantize()) ** 2))
    imatrix = eqq.io.read_imatrix(tmp_path / "i.dat")
    for format in ("iq2_xs", "int3"):
        weighted = eqq.quantize_tree(w, format, method=eqq.MSE(imatrix))
        assert loss(weighted) < 0.97 * loss(eqq.quantize_tree(w, format, method=eqq.MSE()))
    with pytest.raises(ValueError, match="must hold statistics of every leaf"):
        eqq.quantize_tree({"other.weight": w["blk.0.up.weight"]}, "int3", method=eqq.MSE(imatrix))


GOOD = binary((b"a", 1, SQUARES))


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "hold the number of weights"),
        (b"12345678", "must be an importance matrix"),
        (binary(number=0), "must be an importance matrix"),
        (GOOD[:40], "truncated or damaged"),
        (binary((b"a", 1, SQUARES), number=3), "3 weights|truncated or damaged"),
        (binary((b"a", 1, SQUARES), (b"a", 1, SQUARES)), "each weight once"),
        (binary((b"a", -1, SQUARES)), "a number of calls"),
        (binary((b"a", 1, -SQUARES)), "squares of the inputs of 'a'"),
        (binary((b"a", 1, SQUARES * np.nan)), "negative, infinite or NaN"),
        (struct.pack("<ii", 1, -5) + b"x" * 20, "truncated or damaged"),
    ],
)
def test_damaged(tmp_path, content, message):
    (tmp_path / "i.dat").write_bytes(content)
    with pytest.raises(ValueError, match=f"i.dat .*({message})"):
        eqq.io.read_imatrix(tmp_path / "i.dat")


def test_damaged_gguf(tmp_path):
    path, one = tmp_path / "i.gguf", np.ones((1, 1), np.float32)
    for arrays, message in (
        ({"a": SQUARES}, "must hold an importance matrix. Got none"),
        ({"a.in_sum2": SQUARES[None]}, "'a.in_sum2': It must come with counts"),
        ({"a.in_sum2": SQUARES.reshape(2, -1), "a.counts": one}, "a count for each row. Got 1 for 2 rows"),
        ({"a.in_sum2": SQUARES[None] * np.inf, "a.counts": one}, "negative, infinite or NaN"),
    ):
        write_gguf(path, arrays)
        with pytest.raises(ValueError, match=message):
            eqq.io.read_imatrix(path)
    with pytest.raises(FileNotFoundError):
        eqq.io.read_imatrix(tmp_path / "none")


def collect(model, x, **options):
    return eqq.calibrate.collect_stats(model, [x], **options)


def test_written_statistics_are_read_back(tmp_path, getkey):
    class Model(eqx.Module):
        experts: jax.Array
        table: jax.Array
        up: jax.Array

        def __call__(self, x):
            return self.up @ (self.experts[0] @ x + self.experts[1, 0, 0] + self.table[0, 0])

    model = Model(weights(getkey(), (2, 8, 16)), weights(getkey(), (4, 4)), weights(getkey(), (4, 8)))
    stats = collect(model, weights(getkey(), (20, 16)))
    names = {"experts": "blk.0.ffn_up_exps.weight", "table": "token_embd.weight", "up": "output.weight"}
    path = tmp_path / "i.gguf"
    eqq.io.write(path, stats, "imatrix", names=names, metadata={"imatrix.datasets": ["a", "b"]})
    found = eqq.io.read_imatrix(path)
    assert [*found] == [names["experts"], names["up"]]
    np.testing.assert_allclose(found["output.weight"], stats["up"].second_moment, rtol=1e-6)
    np.testing.assert_allclose(found[names["experts"]], stats["experts"].second_moment, rtol=1e-6)
    checkpoint = eqq.io.open(path)
    assert [*checkpoint.metadata["imatrix.datasets"]] == ["a", "b"] and checkpoint.metadata["general.type"] == "imatrix"
    assert checkpoint[names["experts"] + ".counts"].tolist() == [[20], [0]]

    eqq.io.write(tmp_path / "again.gguf", found, "imatrix")
    again = eqq.io.read_imatrix(tmp_path / "again.gguf")
    assert all(np.array_equal(found[name], again[name]) for name in [*found, *again])


def test_nothing_is_written_of_anything_else(tmp_path):
    path = tmp_path / "i.gguf"
    for arrays, message, options in (
        ({"a": "squares"}, "'a' must have mean squares of its inputs", {}),
        ({"a": SQUARES.reshape(2, 2, -1)}, "'a' must have mean squares of its inputs", {}),
        ({"a": eqq.quantize(SQUARES, "int8")}, "'a' must have mean squares of its inputs", {}),
        ({"a": -SQUARES}, "'a' must have squares of inputs. Got one that is negative", {}),
        ({"a": SQUARES * np.nan}, "'a' must have squares of inputs", {}),
        ({"a" * 60: SQUARES}, "at most 63 bytes", {}),
        ({}, "must hold statistics of inputs. Got none", {}),
        ({"a": SQUARES}, "`types` are for weights", {"types": {"*": "TQ1_0"}}),
        ({"a": SQUARES}, "`config` is for folders", {"config": {}}),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            eqq.io.write(path, arrays, "imatrix", **options)
    assert not path.exists()


def test_any_bytes(tmp_path):
    rng = np.random.default_rng(0)
    for n in range(300):
        damaged = bytearray(GOOD[: rng.integers(0, len(GOOD) + 1)])
        for at in rng.integers(0, max(len(damaged), 1), min(3, len(damaged))):
            damaged[at] = rng.integers(0, 256)
        (tmp_path / f"{n}").write_bytes(damaged)
        try:
            eqq.io.read_imatrix(tmp_path / f"{n}")
        except ValueError:
            pass
