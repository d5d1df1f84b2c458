"""Files that say that they are a part, stand-ins for files, and arrays that cannot be read beside others that can."""

import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import eqquant as eqq

from .test_checkpoints import pack_words, write, write_torchao
from .test_cli import run  # noqa: F401
from .test_hostile_files import gguf, info, raw, tensor, text


# Parts


def gguf_part(folder, number, count, names, name=None, **more):
    metadata = {"split.no": np.uint16(number), "split.count": np.uint16(count), **more}
    path = folder / (name or f"m-{number + 1:05}-of-{count:05}.gguf")
    eqq.io.write(path, {n: np.full((2, 32), number, np.float32) for n in names}, "gguf", metadata=metadata)
    return path


def test_all_parts_of_a_gguf_file(tmp_path):
    more = {"general.architecture": "llama", "split.tensors.count": np.int32(4)}
    paths = [gguf_part(tmp_path, 0, 3, ["a", "b"], **more), gguf_part(tmp_path, 1, 3, ["c"])]
    paths.append(gguf_part(tmp_path, 2, 3, ["d"]))
    for where in (tmp_path, *paths):
        checkpoint = eqq.io.open(where)
        assert list(checkpoint) == ["a", "b", "c", "d"] and checkpoint.dialect == "gguf"
        assert checkpoint.metadata == {"general.architecture": "llama"}
        assert [float(checkpoint[name][0, 0]) for name in "abcd"] == [0, 0, 1, 2]
    eqq.io.convert(paths[1], tmp_path / "whole.out", {"*": "q8_0"}, dialect="gguf")
    whole = eqq.io.open(tmp_path / "whole.out")
    assert list(whole) == ["a", "b", "c", "d"] and whole.metadata == {"general.architecture": "llama"}
    assert whole["d"].format == eqq.formats.Q8_0() and float(whole["d"][0, 0]) == pytest.approx(2, rel=1e-3)


def test_one_part_alone_is_an_error(tmp_path):
    first, second = gguf_part(tmp_path, 0, 2, ["a"]), gguf_part(tmp_path, 1, 2, ["b"])
    second.rename(tmp_path / "kept")
    for where in (first, tmp_path):
        with pytest.raises(
            ValueError, match="m-00001-of-00002.gguf must have the other parts.*no m-00002-of-00002.gguf"
        ):
            eqq.io.open(where)
    with pytest.raises(ValueError, match="no m-00002-of-00002.gguf"):
        eqq.io.convert(first, tmp_path / "out", {"*": "q8_0"})
    assert not (tmp_path / "out").exists()
    first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ValueError, match="renamed.gguf must have a name such as .*`split.count` is 2"):
        eqq.io.open(tmp_path / "renamed.gguf")
    with pytest.raises(ValueError, match="renamed.gguf, other.gguf|other.gguf, renamed.gguf"):
        gguf_part(tmp_path, 0, 1, ["a"], "other.gguf")
        eqq.io.open(tmp_path)
    assert list(eqq.io.open(tmp_path / "other.gguf")) == ["a"]


def test_parts_of_different_files_are_an_error(tmp_path):
    gguf_part(tmp_path, 0, 2, ["a"])
    for second, message in (
        ((0, 2, ["b"]), "m-00002-of-00002.gguf must say that it is part 1 of 2, from zero"),
        ((1, 3, ["b"]), "must say that it is part 1 of 2"),
        ((1, 2, ["a"]), "m-00002-of-00002.gguf must not hold tensors of another part. Got 'a'"),
    ):
        gguf_part(tmp_path, *second, "m-00002-of-00002.gguf")
        with pytest.raises(ValueError, match=message):
            eqq.io.open(tmp_path / "m-00001-of-00002.gguf")
    gguf_part(tmp_path, 1, 2, ["b"])
    gguf_part(tmp_path, 0, 2, ["a"], **{"split.tensors.count": np.int32(3)})
    with pytest.raises(ValueError, match="all parts together hold 3 tensors. Got 2"):
        eqq.io.open(tmp_path)


def test_shards_of_safetensors(tmp_path):
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for n, name in enumerate(names):
        save_file({f"w{n}": np.full(3, n, np.float32)}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    for indexed in (False, True):
        for where in (tmp_path, *(tmp_path / name for name in names)):
            checkpoint = eqq.io.open(where)
            assert list(checkpoint) == ["w0", "w1"] and checkpoint["w1"][0] == 1
        index.write_text(json.dumps({"weight_map": {f"w{n}": name for n, name in enumerate(names)}}))
    (tmp_path / names[1]).unlink()
    for where in (tmp_path, tmp_path / names[0]):
        with pytest.raises(ValueError, match=f"index.json lists the file '{names[1]}'.*Got none"):
            eqq.io.open(where)
    index.unlink()
    with pytest.raises(ValueError, match=f"{names[0]} must have the other parts in its folder. Got part 1 of 2"):
        eqq.io.open(tmp_path)


def test_one_shard_of_ours_opens_all(tmp_path):
    model = {"a": jnp.ones((4, 64)), "b": jnp.zeros((4, 64))}
    eqq.save(tmp_path / "m", model, shard_nbytes=1024)
    for shard in (tmp_path / "m").glob("*.safetensors"):
        assert eqq.io.open(shard).dialect == "eqquant" and set(eqq.load(shard)) == {"a", "b"}


# What lies in the place of a file


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"


@pytest.mark.parametrize(
    "content, message",
    [
        (POINTER, "a Git LFS pointer, of a clone without its large files: run `git lfs pull`"),
        (b"<!DOCTYPE html>\n<html><body>Sign in</body></html>", r"a web page \(HTML\)"),
        (b"\n <html lang='en'>", "a web page"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "a web page"),
        (bytes(1000), "zeros: its download did not finish"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf", "config.json", "model.safetensors.index.json"])
def test_placeholder_files_are_an_error(tmp_path, content, message, name):
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "whole.safetensors")
    (tmp_path / name).write_bytes(content)
    where = tmp_path / ("whole.safetensors" if name == "config.json" else name)
    with pytest.raises(ValueError, match=f"{name} must be the file itself. Got {message}"):
        eqq.io.open(where)


def test_shards_that_are_pointers(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(POINTER)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"w": "a.safetensors"}}')
    with pytest.raises(ValueError, match="a.safetensors must be the file itself. Got a Git LFS pointer"):
        eqq.io.open(tmp_path)


def test_unfinished_downloads(tmp_path):
    path = tmp_path / "model.safetensors.incomplete"
    path.write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match="Got model.safetensors.incomplete, an unfinished download"):
        eqq.io.open(tmp_path)
    save_file({"w": np.ones(300, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.aria2").write_bytes(b"x")
    with pytest.raises(ValueError, match="model.safetensors must be whole. Got an unfinished download: model.*aria2"):
        eqq.io.open(tmp_path)
    (tmp_path / "model.safetensors.aria2").unlink()
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="cut.safetensors .*it is truncated"):
        eqq.io.open(tmp_path / "cut.safetensors")
    eqq.io.write(tmp_path / "x.gguf", {"w": np.ones((2, 32), np.float32)}, "gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "x.gguf").read_bytes()[:-100])
    with pytest.raises(ValueError, match="cut.gguf must hold 'w'.*truncated"):
        eqq.io.open(tmp_path / "cut.gguf")
    for content in (b"", b"hello, I am no GGUF file"):
        (tmp_path / "cut.gguf").write_bytes(content)
        with pytest.raises(ValueError, match="cut.gguf must (hold the magic bytes. Got 0 bytes|start with GGUF)"):
            eqq.io.open(tmp_path / "cut.gguf")


# One array that cannot be read


ONES = np.ones((4, 64), np.float32)


def write_damaged(tmp_path, kind):
    """Returns a checkpoint with one array that cannot be read, and its name; another array is `good`."""
    scales, order = np.ones((1, 32), np.float16), np.zeros(64, np.int32)
    awq = {"q.qweight": pack_words(np.ones((64, 32), int), 4), "q.qzeros": np.zeros((1, 4), np.int32)}
    if kind == "compressed-tensors":
        parts = {"weight_packed": np.zeros((4, 8), np.int32), "weight_shape": np.array([4, 64])}
        return write(tmp_path, {"good": ONES, **{f"q.{name}": x for name, x in parts.items()}}), "q.weight"
    if kind == "odd tile":
        parts = {"q.weight": np.ones((4, 64), np.int8), "q.weight_scale": np.ones((3, 5), np.float32)}
        return write(tmp_path, {"good": ONES, **parts}), "q.weight"
    if kind == "gptq":
        return write(tmp_path, {"good": ONES, **awq, "q.g_idx": order}, quant_method="awq"), "q.weight"
    if kind == "mlx":
        parts = {"q.weight": np.ones((4, 8), np.uint32), "q.scales": scales}
        return write(tmp_path, {"good": ONES, **parts}, bits=4, group_size=64), "q.weight"
    if kind == "bitsandbytes":
        state = np.frombuffer(b"{not JSON", np.uint8)
        return write(tmp_path, {"good": ONES, "q.quant_state.bitsandbytes__nf4": state}), "q"
    if kind == "gpt-oss":
        parts = {"q_blocks": np.ones((2, 4, 2, 15), np.uint8), "q_scales": np.ones((2, 4, 2), np.uint8)}
        return write(tmp_path, {"good": ONES, **parts}), "q"
    if kind == "dtype":
        content = raw({"good": tensor(0, 4, [1]), "q": tensor(4, 7, [2, 4], "U3")}, struct.pack("<f", 1) + b"123")
        (tmp_path / "model.safetensors").write_bytes(content)
        return eqq.io.open(tmp_path), "q"
    rest = info(b"q", (64,), 99, 0) + info(b"good", (4,), 0, 64)
    head = gguf(2, 0, rest)
    (tmp_path / "model.gguf").write_bytes(head + b"\0" * (-len(head) % 32) + b"1" * 64 + np.ones(4, "<f4").tobytes())
    return eqq.io.open(tmp_path), "q"


KINDS = ["compressed-tensors", "odd tile", "gptq", "mlx", "bitsandbytes", "gpt-oss", "dtype", "gguf"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_unreadable_array(tmp_path, kind, run):  # noqa: F811
    checkpoint, name = write_damaged(tmp_path, kind)
    assert set(checkpoint) == {name, "good"}
    (row,) = (row for row in checkpoint.rows if row.problem)
    assert row.name == name and row.format is None
    assert np.asarray(checkpoint["good"]).ravel()[0] == 1
    with pytest.raises(ValueError, match="model.(safetensors|gguf) must"):
        checkpoint[name]
    assert "cannot be read" in str(checkpoint)
    assert "color: #800000" in checkpoint._repr_html_()
    out = " ".join(run("inspect", checkpoint.path).split())
    assert "cannot be read" in out and "good" in out and "Cannot be read:" in out
    assert json.loads(run("inspect", checkpoint.path, "--json"))["rows"]
    for command in (("convert",), ("quantize", "--format", "int8")):
        err = run(command[0], checkpoint.path, tmp_path / "out.safetensors", *command[1:], code=1)
        assert "must" in err and not (tmp_path / "out.safetensors").exists()
    plan = eqq.io.plan_load({"x": jnp.ones(1)}, checkpoint, {name: "x", "good": None})
    assert "cannot be read" in str(plan)


def test_torchao_metadata_of_one_array(tmp_path):
    parts = {"qdata": ("I8", np.ones((4, 32), np.int8)), "scale": ("F32", np.ones((3, 2), np.float32))}
    with pytest.raises(ValueError, match="must have a scale for each row"):
        write_torchao(tmp_path / "x.safetensors", "l.weight", "Int8Tensor", parts)


def test_gguf_text_that_is_not_utf8(tmp_path, run):  # noqa: F811
    """Latin-1 in a key, a value, and the name of a tensor: everything can be read, and pairs can be written again."""
    pair = lambda key, value: text(key) + struct.pack("<I", 8) + text(value)
    tokens = text(b"tokens") + struct.pack("<IIQ", 9, 8, 2) + text(b"\xff\xfe") + text(b"a")
    head = gguf(
        1, 3, pair(b"general.name", b"Andr\xe9") + pair(b"k\xe9y", b"x") + tokens + info(b"caf\xe9", (4,), 0, 0)
    )
    path = tmp_path / "a.gguf"
    path.write_bytes(head + b"\0" * (-len(head) % 32) + np.arange(4, dtype="<f4").tobytes())
    checkpoint = eqq.io.open(path)
    (name,) = checkpoint
    np.testing.assert_array_equal(checkpoint[name], np.arange(4))
    assert "caf" in run("inspect", path) and str(checkpoint).encode()
    assert json.loads(run("inspect", path, "--json"))["rows"][0]["name"] == name
    assert len(checkpoint.metadata["tokens"]) == 2 and checkpoint.metadata["tokens"][1] == "a"
    with pytest.raises(ValueError, match="A name in the file must be text"):
        eqq.io.convert(path, tmp_path / "b.gguf", dialect="gguf")
    eqq.io.write(tmp_path / "b.gguf", {"x": checkpoint[name]}, "gguf", metadata=checkpoint.metadata)
    again = eqq.io.open(tmp_path / "b.gguf")
    assert again.metadata["general.name"] == checkpoint.metadata["general.name"]
    written = (tmp_path / "b.gguf").read_bytes()
    assert b"Andr\xe9" in written and b"k\xe9y" in written and b"\xff\xfe" in written
