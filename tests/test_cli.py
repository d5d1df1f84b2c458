"""The command line, run within this process; `--help` in one of its own."""

import errno
import json
import os
import subprocess
import sys
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import eqquant as eqq
from eqquant_cli.main import main


@pytest.fixture
def checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    weights = {
        "embed.weight": rng.normal(size=(20, 64)),
        "layers.0.proj.weight": rng.normal(size=(32, 64)),
        "layers.0.proj.bias": rng.normal(size=32),
        "layers.1.proj.weight": rng.standard_t(2, size=(32, 64)),
        "layers.1.norm.weight": np.ones(64),
    }
    save_file({name: w.astype(np.float32) for name, w in weights.items()}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def run(capsys):
    def run(*arguments, code=0):
        with pytest.raises(SystemExit) as stopped:
            main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        assert stopped.value.code == code, (out, err)
        assert "Traceback" not in err
        return out if code == 0 else err

    return run


def test_inspect(run, checkpoint):
    assert "layers.0.proj.weight" in run("inspect", checkpoint)
    rows = json.loads(run("inspect", checkpoint, "--json"))["rows"]
    assert [row["shape"] for row in rows if row["name"] == "embed.weight"] == [[20, 64]]


def test_names_fold(run, tmp_path):
    name = "encoder.layer.0.attention.output.LayerNorm_of_the_output.weight"
    save_file({name: np.ones((1000, 384), np.float32)}, tmp_path / "a.safetensors")
    save_file({name: np.full((1000, 384), 1.5, np.float32)}, tmp_path / "b.safetensors")
    out = run("inspect", tmp_path / "a.safetensors")
    for lines in (out, run("compare", tmp_path / "a.safetensors", tmp_path / "b.safetensors")):
        assert name in "".join(line.split()[0] for line in lines.splitlines() if line.strip())
    assert max(map(len, out.splitlines())) <= 80
    run("quantize", tmp_path / "a.safetensors", tmp_path / "q.safetensors", "--format", "nf4")
    save_file({"embeddings.word_embeddings.weight": np.ones((30522, 384), np.float32)}, tmp_path / "c.safetensors")
    run("quantize", tmp_path / "c.safetensors", tmp_path / "d.safetensors", "--bits", 4, "--group-size", 32)
    assert max(map(len, run("inspect", tmp_path / "d.safetensors").splitlines())) <= 80
    assert "  NF4()  " in run("inspect", tmp_path / "q.safetensors")  # without the fields that are defaults


def test_quantize(run, checkpoint, tmp_path):
    out = tmp_path / "out.safetensors"
    options = ("--bits", 4, "--group-size", 32, "--skip", "layers.0.*", "--rule", "embed.*=int8")
    line = run("quantize", checkpoint, out, *options)
    assert line.count("\n") == 1 and "times smaller" in line and "in layers.1.proj.weight" in line
    assert ": 21.89 KB -> " in line
    loaded, floats = eqq.load(out), load_file(checkpoint)
    assert loaded["embed"]["weight"].format == eqq.Int8()
    assert loaded["layers"]["1"]["proj"]["weight"].format == eqq.Int4(32)
    np.testing.assert_array_equal(loaded["layers"]["0"]["proj"]["weight"], floats["layers.0.proj.weight"])
    # What `quantize` makes, to the bit.
    wanted = eqq.quantize(floats["layers.1.proj.weight"], eqq.Int4(32))
    assert eqx.tree_equal(loaded["layers"]["1"]["proj"]["weight"], wanted)


def test_into_a_model(run, tmp_path):
    model = eqx.nn.MLP(64, 4, 32, 1, key=jr.key(0))
    eqq.save(tmp_path / "float.safetensors", model)
    run("quantize", tmp_path / "float.safetensors", tmp_path / "nf4.safetensors", "--format", "nf4")
    loaded = eqq.load(tmp_path / "nf4.safetensors", model)
    assert eqx.tree_equal(loaded, eqq.quantize_tree(model, "nf4"))


def test_convert_keeps_bits(run, checkpoint, tmp_path):
    run("quantize", checkpoint, tmp_path / "a.safetensors", "--format", "nf4(double_quant=True)")
    run("convert", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_one_array_at_a_time(checkpoint, tmp_path):
    made, alive = [], []

    def each(name, before, after):
        import gc

        gc.collect()
        made.append(name)
        alive.append(sum(x.nbytes for x in jax.live_arrays()))

    before = sum(x.nbytes for x in jax.live_arrays())
    report = eqq.io.convert(checkpoint, tmp_path / "out.safetensors", "int8", each=each)
    assert sorted(made) == sorted(load_file(checkpoint))  # each of them once
    assert max(alive) - before <= 3 * 32 * 64 * 4
    assert report.nbytes == eqq.summary(eqq.load(tmp_path / "out.safetensors")).nbytes


def test_a_quantized_checkpoint_is_quantized_again(run, checkpoint, tmp_path):
    run("quantize", checkpoint, tmp_path / "a.safetensors", "--format", "int8")
    run(
        *("quantize", tmp_path / "a.safetensors", tmp_path / "c.safetensors", "--skip", "embed.*"),
        *("--rule", "layers.*.proj.*=nf4"),
    )
    loaded = eqq.load(tmp_path / "c.safetensors")
    assert loaded["embed"]["weight"].format == eqq.Int8()
    once = eqq.load(tmp_path / "a.safetensors")["layers"]["0"]["proj"]["weight"].dequantize()
    assert eqx.tree_equal(loaded["layers"]["0"]["proj"]["weight"], eqq.quantize(once, "nf4"))


def test_budget(run, checkpoint, tmp_path):
    plan = json.loads(run("plan", checkpoint, "--budget", 4.0, "--json"))
    assert 2.5 < plan["bits"] <= 4.0
    run("quantize", checkpoint, tmp_path / "out.safetensors", "--budget", 4.0)
    report = eqq.summary(eqq.load(tmp_path / "out.safetensors"))
    assert report.quantized_bits == pytest.approx(plan["bits"])
    for skip, left in (("embed.weight", "embed.weight"), ("layers.*", "layers.0.proj.weight")):
        out = tmp_path / f"{left}.safetensors"
        run("quantize", checkpoint, out, "--budget", 4.0, "--skip", skip)
        assert eqq.io.open(out).items_by_name[left].entry.format is None
    err = run("plan", checkpoint, "--budget", 1.0, code=1)
    assert "--budget must be at least" in err and "needs with its scales. Got 1.0" in err


@pytest.mark.parametrize(
    "to, budget",
    [("gguf", 5.0), ("bitsandbytes", 10.0), ("compressed-tensors", 4.6), ("gptq", 5.0), ("mlx", 4.0)],
)
def test_a_budget_in_the_layouts_of_others(run, checkpoint, tmp_path, to, budget):
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    options = ("--to", to, "--budget", budget, "--rule", "embed.*=none")
    run("quantize", checkpoint, out, *options, "--dry-run")
    run("quantize", checkpoint, out, *options)
    quantized = [row for row in eqq.io.open(out).rows if row.format is not None]
    assert quantized and 8 * sum(row.nbytes for row in quantized) <= budget * 64 * 64 + 1e4  # and small tables


def test_a_budget_counts_rows_of_4304_that_a_layout_cannot_hold(run, tmp_path):
    rng = np.random.default_rng(0)
    wide = {f"layers.{n}.proj.weight": rng.normal(size=(16, 4304)).astype(np.float32) for n in range(3)}
    wide["layers.0.up.weight"] = rng.normal(size=(16, 4096)).astype(np.float32)
    save_file(wide, tmp_path / "model.safetensors")
    command = ("quantize", tmp_path / "model.safetensors", tmp_path / "out.gguf", "--to", "gguf", "--budget")
    err = run(*command, 4.6, "--dry-run", code=1)
    assert "'layers.0.proj.weight' stays in float: --to gguf cannot hold it" in err and "Got 4.6" in err
    run(*command, 26)
    written = eqq.io.open(tmp_path / "out.gguf").rows
    assert 8 * sum(row.nbytes for row in written) <= 26 * sum(x.size for x in wide.values())


def test_a_budget_counts_the_weights_of_rules(run, checkpoint, tmp_path):
    options = ("--budget", 6.0, "--rule", "layers.0.proj.weight=int8")
    run("quantize", checkpoint, tmp_path / "out.safetensors", *options)
    loaded = eqq.load(tmp_path / "out.safetensors")
    assert loaded["layers"]["0"]["proj"]["weight"].format == eqq.Int8()
    assert eqq.summary(loaded).quantized_bits <= 6.0
    err = run("quantize", checkpoint, tmp_path / "b.safetensors", "--budget", 4.2, *options[2:], code=1)
    assert "beside the formats of --rule. Got 4.2" in err
    for command in (("plan", checkpoint), ("quantize", checkpoint, tmp_path / "b.safetensors")):
        assert "--budget must leave something to quantize. Got 40.0" in run(*command, "--budget", 40, code=1)


@pytest.mark.parametrize("to", ["gguf", "bitsandbytes", "compressed-tensors", "gptq", "mlx"])
def test_each_layout_has_a_format_of_its_own(run, checkpoint, tmp_path, to):
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    assert "1 of 5 quantized" in run(
        "quantize", checkpoint, out, "--to", to, "--skip", "layers.0.*", "--skip", "embed*", "--dry-run"
    )
    run("quantize", checkpoint, out, "--to", to, "--skip", "layers.0.*", "--skip", "embed*")
    assert sum(row.format is not None for row in eqq.io.open(out).rows) == 1


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_dry_run_refuses_what_the_real_run_refuses(run, checkpoint, tmp_path, monkeypatch, dry):
    def quantized(*_, **__):
        raise AssertionError("A weight was quantized before the error.")

    monkeypatch.setattr(eqq.io.Checkpoint, "__getitem__", quantized)
    (tmp_path / "folder").mkdir()
    quantize = ("quantize", checkpoint, tmp_path / "out")
    assert "--to must be" in run(*quantize, "--to", "onnx", *dry, code=2)
    for to in ("gptq", "mlx", "compressed-tensors"):
        err = run(*quantize, "--to", to, "--format", "nf4", *dry, code=1)
        assert "an array that the file can hold" in err and "or leave it in float with --skip" in err
    save_file({"w.weight": np.ones((96, 64), np.float32)}, tmp_path / "folder" / "w.safetensors")
    err = run("quantize", tmp_path / "folder", tmp_path / "out", "--to", "mlx", "--format", "nf4", *dry, code=1)
    assert "Got float32[96, 64] in NF4()" in err
    assert "same bits" in run(*quantize, "--to", "gptq", "--rule", "*.0.*=int8(64)", *dry, code=1)
    assert "must end in .safetensors" in run("quantize", checkpoint, tmp_path / "out.pt", *dry, code=1)
    assert "must not exist" in run("quantize", checkpoint, tmp_path / "folder", "--to", "mlx", *dry, code=1)
    assert "must not be the input" in run("quantize", checkpoint, checkpoint, "--force", *dry, code=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "model.safetensors"]


def test_sizes_of_a_dry_run_are_those_of_the_real_run(run, checkpoint, tmp_path):
    run("quantize", checkpoint, tmp_path / "a.safetensors", "--format", "nf4")
    again = ("quantize", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--format", "int8")
    planned, line = run(*again, "--dry-run"), run(*again)
    size = line.split(": ")[1].split(", ")
    assert f"{size[0]}, {size[1]}" in planned and "times larger" in size[1]


def test_nothing_to_quantize(run, tmp_path):
    for arrays in ({}, {"bias": np.zeros(3, np.float32)}):
        save_file(arrays, tmp_path / "few.safetensors")
        err = run("quantize", tmp_path / "few.safetensors", tmp_path / "out.safetensors", code=1)
        assert f"must hold weights to quantize: float arrays of two dimensions or more. Got {len(arrays)} arrays" in err


def test_dry_run_writes_nothing(run, checkpoint, tmp_path):
    assert "A plan" in run("quantize", checkpoint, tmp_path / "out.safetensors", "--dry-run")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_warnings_are_sentences(capsys, checkpoint, tmp_path):
    rules = ["--rule", "layers.*=int4", "--rule", "layers.0.*=int8"]
    with warnings.catch_warnings(), pytest.raises(SystemExit):
        warnings.simplefilter("always")
        main(["quantize", str(checkpoint), str(tmp_path / "out.safetensors"), "--format", "nf4", *rules])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("eqquant: Each pattern of") and "'layers.0.*' behind 'layers.*'" in line


def test_compare(run, checkpoint, tmp_path):
    run("quantize", checkpoint, tmp_path / "out.safetensors", "--format", "int8")
    found = json.loads(run("compare", checkpoint, tmp_path / "out.safetensors", "--json"))
    floats = load_file(checkpoint)
    for row in found["arrays"]:
        w = floats[row["name"]]
        error = np.linalg.norm(w - eqq.quantize(w, "int8").dequantize()) / np.linalg.norm(w)
        assert row["relative_l2"] == pytest.approx(error, rel=1e-4)
    assert (len(found["arrays"]), found["equal"], found["only_in_one"]) == (3, 2, [])
    assert "2 other arrays are equal" in run("compare", checkpoint, tmp_path / "out.safetensors")


def test_formats(run):
    rows = {row["name"]: row for row in json.loads(run("formats", "--json"))}
    assert rows["nf4"]["bits"] == 4.5 and rows["codebook"]["bits"] is None
    assert "nf4(block_size=64" in run("formats")
    assert not any(set(row["what"]) & set("\\$[") for row in rows.values())


def test_bench(run):
    out = run("bench", "--size", 64, "--rows", 1, "--rounds", 1, "--format", "int8")
    assert "float32" in out and "Int8()" in out and f" {os.cpu_count()} cores, JAX " in out.splitlines()[0]
    for rows in (0, -3):
        assert "--rows" in run("bench", "--size", 64, "--rows", rows, code=2)


def test_report(run, checkpoint, tmp_path):
    run("report", checkpoint, "-o", tmp_path / "out.html", "--format", "int4(32)")
    page = (tmp_path / "out.html").read_text()
    assert page.count("<svg") == 3 and "layers.1.proj.weight" in page and "http" not in page.split("<svg")[0]


WRONG = {
    "no file": (("inspect", "nowhere"), 1, "nowhere"),
    "a format": (("quantize", "model.safetensors", "out.safetensors", "--format", "nf5"), 1, "Did you mean 'nf4'?"),
    "fields": (
        ("quantize", "model.safetensors", "out.safetensors", "--format", "int4(block=3)"),
        1,
        "takes block_size, symmetric",
    ),
    "all skipped": (("quantize", "model.safetensors", "out.safetensors", "--skip", "*"), 1, "something to quantize"),
    "no fields": (
        ("quantize", "model.safetensors", "out.safetensors", "--format", "int4(x.y)"),
        1,
        "A format must read like",
    ),
    "a pattern": (
        ("quantize", "model.safetensors", "out.safetensors", "--skip", "head.*"),
        1,
        "--skip 'head.*' matches none of",
    ),
    "a part of names, misspelled": (
        ("quantize", "model.safetensors", "out.safetensors", "--skip", "prj"),
        1,
        "Did you mean '*proj*'?",
    ),
    "a part of names": (
        ("quantize", "model.safetensors", "out.safetensors", "--rule", "proj=int8"),
        1,
        "Did you mean '*proj*'?",
    ),
    "a budget": (
        ("quantize", "model.safetensors", "out.safetensors", "--budget", "1"),
        1,
        "--budget must be at least",
    ),
    "a rule": (("quantize", "model.safetensors", "out.safetensors", "--rule", "head.*"), 2, "PATTERN=FORMAT"),
    "both": (
        ("quantize", "model.safetensors", "out.safetensors", "--format", "nf4", "--bits", "4"),
        2,
        "--format says both",
    ),
    "a method": (("quantize", "model.safetensors", "out.safetensors", "--method", "gtpq"), 2, "absmax"),
    "bits": (("quantize", "model.safetensors", "out.safetensors", "--bits", "-4"), 2, "2, 3, 4, 5, 6 or 8"),
    "a group alone": (
        ("quantize", "model.safetensors", "out.safetensors", "--group-size", "32"),
        2,
        "goes with --bits",
    ),
    "a suffix": (("quantize", "model.safetensors", "out.gguf"), 1, "must end in .safetensors"),
    "onto itself": (("quantize", "model.safetensors", "./model.safetensors", "--force"), 1, "must not be the input"),
    "a page there": (("report", "model.safetensors", "-o", "model.safetensors", "--force"), 1, "must end in .html"),
    "a page nowhere": (("report", "model.safetensors", "-o", "no/r.html"), 1, "which does not"),
    "it exists": (("quantize", "model.safetensors", "other.safetensors"), 1, "`--force` replaces it"),
    "no folder": (("quantize", "model.safetensors", "no/such/folder.safetensors"), 1, "which does not"),
    "no input": (("inspect", "modl.safetensors"), 1, "Did you mean 'model.safetensors'?"),
    "no output": (("quantize", "model.safetensors"), 2, "Missing argument"),
    "no such command": (("quantise",), 2, "No such command"),
    "nothing shared": (("compare", "model.safetensors", "other.safetensors"), 1, "must have arrays of the names"),
}


@pytest.mark.parametrize("arguments, code, says", WRONG.values(), ids=WRONG)
def test_errors(run, checkpoint, monkeypatch, arguments, code, says):
    monkeypatch.chdir(checkpoint.parent)
    save_file({"x": np.zeros(2, np.float32)}, "other.safetensors")
    before = checkpoint.read_bytes()
    assert says in run(*arguments, code=code)
    assert sorted(p.name for p in checkpoint.parent.iterdir()) == ["model.safetensors", "other.safetensors"]
    assert checkpoint.read_bytes() == before


@pytest.fixture
def sources(checkpoint, tmp_path):
    """The folders of a checkpoint: one file, two shards with an index, one GGUF file; and a folder of links to it."""
    floats = load_file(checkpoint)
    for folder in ("one", "shards", "gguf", "links"):
        (tmp_path / folder).mkdir()
    save_file(floats, tmp_path / "one" / "model.safetensors")
    where = {name: f"model-{n % 2}.safetensors" for n, name in enumerate(floats)}
    for shard in set(where.values()):
        save_file({n: floats[n] for n in floats if where[n] == shard}, tmp_path / "shards" / shard)
    (tmp_path / "shards" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    eqq.io.write(tmp_path / "gguf" / "model.gguf", floats, "gguf")
    (tmp_path / "links" / "model.safetensors").symlink_to(tmp_path / "one" / "model.safetensors")
    (tmp_path / "again.safetensors").hardlink_to(tmp_path / "one" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    "source, output, options",
    [
        ("one", "one/model.safetensors", ()),
        ("one", "links/model.safetensors", ()),
        ("one", "again.safetensors", ()),
        ("one", "one", ("--to", "mlx")),
        ("one", "links", ("--to", "mlx")),
        ("links", "one/../one/model.safetensors", ()),
        ("shards", "shards/model-1.safetensors", ()),
        ("shards", "shards", ("--to", "gptq")),
        ("shards/model.safetensors.index.json", "shards/model-0.safetensors", ()),
        ("shards/model.safetensors.index.json", "shards", ("--to", "bitsandbytes")),
        ("gguf", "gguf/model.gguf", ("--to", "gguf")),
        ("gguf/model.gguf", "gguf", ("--to", "mlx")),
    ],
)
@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_no_file_of_the_input_is_replaced(run, sources, command, source, output, options):
    before = {p: p.read_bytes() for p in sources.rglob("*") if p.is_file()}
    err = run(command, sources / source, sources / output, *options, "--force", code=1)
    assert "The output must not be the" in err
    assert {p: p.read_bytes() for p in sources.rglob("*") if p.is_file()} == before


def test_no_picture_or_page_replaces_a_checkpoint(run, checkpoint, tmp_path):
    # Files are read by what they hold, whatever their name.
    for name in ("page.html", "a.svg", "b.png"):
        (tmp_path / name).write_bytes(checkpoint.read_bytes())
    a, b = tmp_path / "a.svg", tmp_path / "b.png"
    assert "must not be the input" in run(
        "report", tmp_path / "page.html", "-o", tmp_path / "page.html", "--force", code=1
    )
    for plot in (a, b):
        assert "must not be the input" in run("compare", a, b, "--plot", plot, "--force", code=1)
        assert plot.read_bytes() == checkpoint.read_bytes()
    assert ".svg, .png or .pdf" in run("compare", a, b, "--plot", tmp_path / "errors.jpg", code=1)


def test_values_that_are_not_finite(run, tmp_path):
    save_file({"a": np.full((4, 4), np.nan, np.float32)}, tmp_path / "nan.safetensors")
    (tmp_path / "out.safetensors").write_bytes(b"old")
    err = run("quantize", tmp_path / "nan.safetensors", tmp_path / "out.safetensors", "--force", code=1)
    assert (
        "a" in err
        and "finite" in err
        and "in float with --skip" in err
        and "jnp" not in err
        and (tmp_path / "out.safetensors").read_bytes() == b"old"
    )


def test_no_room_on_the_disk(run, checkpoint, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.safetensors")

    (tmp_path / "out.safetensors").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    err = run("quantize", checkpoint, tmp_path / "out.safetensors", "--force", code=1)
    assert "No space left on device" in err and "Traceback" not in err
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "out.safetensors"]


@pytest.mark.parametrize("to", ["gguf", "compressed-tensors"])
def test_what_cannot_be_written_whole_is_not_there(run, checkpoint, tmp_path, monkeypatch, to):
    original, files = os.fsync, []

    def full(file):
        files.append(file)
        if len(files) > (to != "gguf"):  # of a folder, the second file
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        original(file)

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    assert f"File too large: {out.resolve()}" in run("convert", checkpoint, out, "--to", to, code=1)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_picture_that_cannot_be_drawn(run, checkpoint, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def full(figure, file, **_):
        file.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    run("quantize", checkpoint, tmp_path / "out.safetensors")
    before = sorted(p.name for p in tmp_path.iterdir())
    compared = ("compare", checkpoint, tmp_path / "out.safetensors", "--plot", tmp_path / "errors.svg")
    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", full)
        assert "No space left" in run(*compared, code=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    run(*compared)
    assert "`--force` replaces it" in run(*compared, code=1)
    assert "<svg" in (tmp_path / "errors.svg").read_text()


def test_ctrl_c(run, checkpoint, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(eqq.io.Checkpoint, "__getitem__", interrupted)
    assert "stopped" in run("quantize", checkpoint, tmp_path / "out.safetensors", code=130)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_help_does_not_wait_for_jax():
    program = "import sys; sys.argv = ['eqquant', '--help']\nfrom eqquant_cli.main import main\n"
    program += "try:\n    main()\nfinally:\n    print(sorted({'jax', 'eqquant'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]" and "quantize" in done.stdout


def test_weight_sensitivity():
    model = {"a": jr.normal(jr.key(0), (8, 64)), "b": jr.normal(jr.key(1), (8, 64)) * 100}
    report = eqq.analysis.weight_sensitivity(model, ("int2", "int8"))
    for leaf in report.leaves:
        w = model[leaf.paths[0]]
        error = jnp.linalg.norm(w - eqq.quantize(w, "int2").dequantize()) / jnp.linalg.norm(w)
        assert leaf.losses[0] == pytest.approx(float(error) ** 2 * w.size, rel=1e-5)
        assert leaf.losses[1] < leaf.losses[0] / 100
    with pytest.raises(ValueError, match="at least one format"):
        eqq.analysis.weight_sensitivity(model, ())
