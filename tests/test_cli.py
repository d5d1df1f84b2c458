"""The command line, run within this process; `--help` in one of its own."""

import errno
import itertools as it
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
import weakref

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest
import typer
from safetensors.numpy import load_file, save_file

import eqquant as eqq
from eqquant._native import library
from eqquant._report import show_change
from eqquant_cli import arguments
from eqquant_cli.commands import app
from eqquant_cli.main import main


@pytest.fixture
def checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    weights = {
        "embed.weight": rng.normal(size=(32, 64)),
        "layers.0.proj.weight": rng.normal(size=(32, 64)),
        "layers.0.proj.bias": rng.normal(size=32),
        "layers.1.proj.weight": rng.standard_t(2, size=(32, 64)),
        "layers.1.norm.weight": np.ones(64),
    }
    save_file({name: w.astype(np.float32) for name, w in weights.items()}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def alike(tmp_path):
    """Weights of one shape, for which each format and method compiles once."""
    rng = np.random.default_rng(0)
    weights = {"a.weight": rng.normal(size=(32, 64)), "b.weight": rng.standard_t(2, size=(32, 64))}
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


def test_version_says_what_is_installed(run):
    lines = run("--version").splitlines()
    assert lines[0] == f"eqquant {eqq.__version__}" and lines[1] == library.describe()
    assert f"jax {jax.__version__}" in lines[2]


def test_inspect(run, checkpoint):
    assert "layers.0.proj.weight" in run("inspect", checkpoint)
    rows = json.loads(run("inspect", checkpoint, "--json"))["rows"]
    assert [row["shape"] for row in rows if row["name"] == "embed.weight"] == [[32, 64]]


@pytest.mark.long
def test_long_names_fold(run, tmp_path):
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
    options = ("--bits", 4, "--group-size", 32, "--rule", "embed.*=int8")
    # Neither rule wins: `--skip` comes before them, and of two rules the first.
    losing = ("--rule", "layers.0.proj.*=int8", "--rule", "embed.*=int6", "--skip", "layers.0.*")
    line = run("quantize", checkpoint, out, *options, *losing)
    assert line.count("\n") == 1 and "times smaller" in line and "in layers.1.proj.weight" in line
    assert ": 24.96 KB -> " in line
    loaded, floats = eqq.load(out), load_file(checkpoint)
    assert loaded["embed"]["weight"].format == eqq.Int8()
    assert loaded["layers"]["1"]["proj"]["weight"].format == eqq.Int4(32)
    np.testing.assert_array_equal(loaded["layers"]["0"]["proj"]["weight"], floats["layers.0.proj.weight"])
    # What `quantize` makes, to the bit.
    wanted = eqq.quantize(floats["layers.1.proj.weight"], eqq.Int4(32))
    assert eqx.tree_equal(loaded["layers"]["1"]["proj"]["weight"], wanted)


def test_load_a_converted_checkpoint_into_a_model(run, tmp_path):
    model = eqx.nn.MLP(64, 4, 32, 1, key=jr.key(0))
    eqq.save(tmp_path / "float.safetensors", model)
    run("quantize", tmp_path / "float.safetensors", tmp_path / "nf4.safetensors", "--format", "nf4")
    loaded = eqq.load(tmp_path / "nf4.safetensors", model)
    assert eqx.tree_equal(loaded, eqq.quantize_tree(model, "nf4"))


def test_convert_keeps_bits(run, checkpoint, tmp_path):
    run("quantize", checkpoint, tmp_path / "a.safetensors", "--format", "nf4(double_quant=True)")
    run("convert", tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.long
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


@pytest.mark.long
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
    [
        ("gguf", 5.0),
        ("bitsandbytes", 10.0),
        ("compressed-tensors", 4.6),
        ("gptq", 5.0),
        ("mlx", 4.0),
        ("modelopt", 6.0),
    ],
)
def test_a_budget_in_the_layouts_of_others(run, checkpoint, tmp_path, to, budget):
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    options = ("--dialect", to, "--budget", budget, "--rule", "embed.*=none")
    run("quantize", checkpoint, out, *options, "--dry-run")
    run("quantize", checkpoint, out, *options)
    quantized = [row for row in eqq.io.open(out).rows if row.format is not None]
    assert quantized and 8 * sum(row.nbytes for row in quantized) <= budget * 64 * 64 + 1e4  # and small tables


@pytest.mark.long
def test_a_budget_takes_a_method(run, alike, tmp_path):
    for method in ("mse", "hqq"):
        out = tmp_path / f"{method}.safetensors"
        run("quantize", alike, out, "--budget", 4.2, "--method", method)
        report = eqq.summary(eqq.load(out))
        assert 3.2 < report.quantized_bits <= 4.2
    plan = json.loads(run("plan", alike, "--budget", 4.2, "--method", "mse", "--json"))
    assert plan["increase"] < json.loads(run("plan", alike, "--budget", 4.2, "--json"))["increase"]


@pytest.mark.long
def test_a_budget_is_for_every_weight(run, tmp_path):
    weights = {"odd.weight": np.ones((8, 272)), "even.weight": np.random.default_rng(0).normal(size=(8, 256))}
    save_file({name: w.astype(np.float32) for name, w in weights.items()}, tmp_path / "model.safetensors")
    command = ("quantize", tmp_path / "model.safetensors", tmp_path / "out.gguf", "--budget", 4.6)
    for dry in ((), ("--dry-run",)):
        err = run(*command, *dry, code=1)
        assert "cannot hold 'odd.weight', whose shape is (8, 272)" in err and "--skip 'odd.weight'" in err
    run(*command, "--skip", "odd.weight")
    rows = {row.name: row for row in eqq.io.open(tmp_path / "out.gguf").rows}
    assert rows["odd.weight"].format is None and 8 * rows["even.weight"].nbytes <= 4.6 * 8 * 256


@pytest.mark.long
def test_a_budget_knows_roles_of_skipped_weights(run, tmp_path):
    """A table of tokens is the head too only if there is no head, and `--skip` does not take the head away."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=(64, 64)) for name in ("model.embed_tokens.weight", "model.layers.0.up.weight")}
    weights = {name: w.astype(np.float32) for name, w in weights.items()}
    bits = {}
    for name, more in (("tied", {}), ("head", {"lm_head.weight": weights["model.embed_tokens.weight"]})):
        save_file({**weights, **more}, tmp_path / f"{name}.safetensors")
        out = tmp_path / f"{name}.out.safetensors"
        run("quantize", tmp_path / f"{name}.safetensors", out, "--budget", 5, *(["--skip", "lm_head*"] if more else []))
        bits[name] = eqq.load(out)["model"]["embed_tokens"]["weight"].format.bits
    assert bits["tied"] > bits["head"]


@pytest.mark.long
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


@pytest.mark.parametrize("to", ["gguf", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mlx", "modelopt"])
def test_each_layout_has_a_format_of_its_own(run, checkpoint, tmp_path, to):
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    assert "1 of 5 quantized" in run(
        "quantize", checkpoint, out, "--dialect", to, "--skip", "layers.0.*", "--skip", "embed*", "--dry-run"
    )
    run("quantize", checkpoint, out, "--dialect", to, "--skip", "layers.0.*", "--skip", "embed*")
    assert sum(row.format is not None for row in eqq.io.open(out).rows) == 1


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_dry_run_refuses_what_the_real_run_refuses(run, checkpoint, tmp_path, monkeypatch, dry):
    def quantized(*_, **__):
        raise AssertionError("A weight was quantized before the error.")

    monkeypatch.setattr(eqq.io.Checkpoint, "__getitem__", quantized)
    (tmp_path / "folder").mkdir()
    quantize = ("quantize", checkpoint, tmp_path / "out")
    assert "--dialect must be" in run(*quantize, "--dialect", "onnx", *dry, code=2)
    for to in ("gptq", "mlx", "compressed-tensors"):
        err = run(*quantize, "--dialect", to, "--format", "nf4", *dry, code=1)
        assert "an array that the file can hold" in err and "or leave it in float with --skip" in err
    save_file({"w.weight": np.ones((96, 64), np.float32)}, tmp_path / "folder" / "w.safetensors")
    err = run("quantize", tmp_path / "folder", tmp_path / "out", "--dialect", "mlx", "--format", "nf4", *dry, code=1)
    assert "Got float32[96, 64] in NF4()" in err
    assert "same bits" in run(*quantize, "--dialect", "gptq", "--rule", "*.0.*=int8(64)", *dry, code=1)
    assert "must end in .safetensors" in run("quantize", checkpoint, tmp_path / "out.pt", *dry, code=1)
    assert "must be a new folder" in run("quantize", checkpoint, tmp_path / "folder", "--dialect", "mlx", *dry, code=1)
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


@pytest.mark.long
def test_formats(run):
    rows = {row["name"]: row for row in json.loads(run("formats", "--json"))}
    assert rows["nf4"]["bits"] == 4.5 and rows["codebook"]["bits"] is None
    assert "nf4(block_size=64" in run("formats")
    assert not any(set(row["what"]) & set("\\$[") for row in rows.values())


@pytest.mark.long
def test_bench(run):
    out = run("bench", "--size", 64, "--rows", 1, "--rounds", 1, "--format", "int8")
    assert "float32" in out and "Int8()" in out and f" {os.cpu_count()} cores, JAX " in out.splitlines()[0]
    for rows in (0, -3):
        assert "--rows" in run("bench", "--size", 64, "--rows", rows, code=2)


@pytest.mark.long
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
    "a suffix": (("quantize", "model.safetensors", "out.onnx"), 1, "must end in .safetensors"),
    "a folder named as a file": (
        ("quantize", "model.safetensors", "out.gguf", "--dialect", "mlx"),
        2,
        "writes a folder",
    ),
    "onto itself": (("quantize", "model.safetensors", "./model.safetensors", "--force"), 1, "must not be the input"),
    "a page there": (("report", "model.safetensors", "-o", "model.safetensors", "--force"), 1, "must end in .html"),
    "a page nowhere": (("report", "model.safetensors", "-o", "no/r.html"), 1, "which does not"),
    "it exists": (("quantize", "model.safetensors", "other.safetensors"), 1, "`--force` replaces it"),
    "no folder": (("quantize", "model.safetensors", "no/such/folder.safetensors"), 1, "which does not"),
    "no input": (("inspect", "modl.safetensors"), 1, "Did you mean 'model.safetensors'?"),
    "no output": (("quantize", "model.safetensors"), 2, "Missing argument"),
    "no such command": (("compress",), 2, "No such command"),
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
        ("one", "one", ("--dialect", "mlx")),
        ("one", "links", ("--dialect", "mlx")),
        ("links", "one/../one/model.safetensors", ()),
        ("shards", "shards/model-1.safetensors", ()),
        ("shards", "shards", ("--dialect", "gptq")),
        ("shards/model.safetensors.index.json", "shards/model-0.safetensors", ()),
        ("shards/model.safetensors.index.json", "shards", ("--dialect", "bitsandbytes")),
        ("gguf", "gguf/model.gguf", ("--dialect", "gguf")),
        ("gguf/model.gguf", "gguf", ("--dialect", "mlx")),
    ],
)
@pytest.mark.parametrize("command", ["quantize", "convert"])
def test_no_file_of_the_input_is_replaced(run, sources, command, source, output, options):
    before = {p: p.read_bytes() for p in sources.rglob("*") if p.is_file()}
    err = run(command, sources / source, sources / output, *options, "--force", code=1)
    assert "The output must not be the" in err
    assert {p: p.read_bytes() for p in sources.rglob("*") if p.is_file()} == before


def test_no_picture_or_page_replaces_a_checkpoint(run, checkpoint, tmp_path):
    # The content of a file tells its layout, whatever its name.
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
    save_file({"a": np.full((4, 8), np.nan, np.float32)}, tmp_path / "nan.safetensors")
    (tmp_path / "out.safetensors").write_bytes(b"old")
    err = run("quantize", tmp_path / "nan.safetensors", tmp_path / "out.safetensors", "--force", code=1)
    assert (
        "a" in err
        and "finite" in err
        and "in float with --skip" in err
        and "jnp" not in err
        and (tmp_path / "out.safetensors").read_bytes() == b"old"
    )


def test_a_full_disk_is_an_error(run, checkpoint, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.safetensors")

    (tmp_path / "out.safetensors").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full)
    err = run("quantize", checkpoint, tmp_path / "out.safetensors", "--force", code=1)
    assert "No space left on device" in err and "Traceback" not in err
    assert (tmp_path / "out.safetensors").read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "out.safetensors"]


@pytest.mark.parametrize("to", ["gguf", "compressed-tensors"])
def test_an_incomplete_output_is_removed(run, checkpoint, tmp_path, monkeypatch, to):
    original, files = os.fsync, []

    def full(file):
        files.append(file)
        if len(files) > (to != "gguf"):  # of a folder, the second file
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        original(file)

    monkeypatch.setattr(os, "fsync", full)
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    assert f"File too large: {out.resolve()}" in run("convert", checkpoint, out, "--dialect", to, code=1)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_picture_without_matplotlib(run, checkpoint, tmp_path, monkeypatch):
    run("quantize", checkpoint, tmp_path / "out.safetensors")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    compared = ("compare", checkpoint, tmp_path / "out.safetensors")
    assert 'pip install "eqquant[plot]"' in run(*compared, "--plot", tmp_path / "errors.svg", code=1)
    assert 'pip install "eqquant[plot]"' in run("report", checkpoint, "-o", tmp_path / "report.html", code=1)
    assert run(*compared) and not list(tmp_path.glob("*.svg"))


def test_a_picture_that_cannot_be_drawn(run, checkpoint, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    def full(figure, file, **_):
        file.write_bytes(b"half")
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


def test_interrupt_exits_without_a_traceback(run, checkpoint, tmp_path, monkeypatch):
    def raise_interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(eqq.io.Checkpoint, "__getitem__", raise_interrupt)
    assert "stopped" in run("quantize", checkpoint, tmp_path / "out.safetensors", code=130)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("output", [("out",), ("out.safetensors",), ("out", "--dialect", "mlx")])
def test_sigterm_leaves_nothing(run, checkpoint, tmp_path, monkeypatch, output):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(eqq.io.Checkpoint, "__getitem__", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert "stopped. No file was written." in run("quantize", checkpoint, tmp_path / output[0], *output[1:], code=143)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_within_a_callback_stops_too(run, checkpoint, tmp_path, monkeypatch):
    """Python discards what a weak reference's callback raises, and JAX's callbacks at garbage collections likewise."""

    class Object:
        pass

    def read(*_: object) -> None:
        thing = Object()
        _kept = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
        del thing
        for _ in range(300):  # the discarded exit comes again
            time.sleep(0.1)

    monkeypatch.setattr(eqq.io.Checkpoint, "__getitem__", read)
    assert "stopped. No file was written." in run("quantize", checkpoint, tmp_path / "out.safetensors", code=143)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_weights_that_would_not_be_read_are_not_written(run, sources, monkeypatch, dry):
    monkeypatch.setattr(eqq.io.Checkpoint, "__getitem__", None)  # nor quantized
    shards, before = sources / "shards", {p: p.read_bytes() for p in sources.rglob("*") if p.is_file()}
    for output in ("model.safetensors", "model.gguf"):
        err = run("quantize", sources / "one", shards / output, *dry, code=1)
        assert f"{output} must be in a folder without an index" in err
    for to in ((), ("--dialect", "mlx")):
        err = run("quantize", sources / "one", shards, *to, "--force", *dry, code=1)
        assert "must hold no other weights, which would be read instead. Got model-0.safetensors" in err
    assert {p: p.read_bytes() for p in sources.rglob("*") if p.is_file()} == before


@pytest.mark.skipif(os.name != "posix", reason="devices")
def test_no_device_is_replaced(run, checkpoint, tmp_path):
    link = tmp_path / "null.safetensors"
    link.symlink_to(os.devnull)
    for output in (os.devnull, link):
        for command in ("quantize", "convert"):
            err = run(command, checkpoint, output, "--force", code=1)
            assert f"Got '{output}', a device or a pipe. `eqquant quantize --dry-run` writes nothing." in err
    assert not os.path.isfile(os.devnull) and link.is_symlink()


def test_the_suffix_of_gguf_is_its_layout(run, checkpoint, tmp_path):
    run("quantize", checkpoint, tmp_path / "a.gguf")
    run("quantize", checkpoint, tmp_path / "b.gguf", "--dialect", "gguf")
    assert eqq.io.open(tmp_path / "a.gguf").dialect == "gguf"
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    run("convert", checkpoint, tmp_path / "c.gguf")
    assert eqq.io.open(tmp_path / "c.gguf").dialect == "gguf"


def test_nearly_equal_sizes_print_as_equal(run, checkpoint, tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    run("quantize", checkpoint, a, "--format", "int8")
    assert ", the same size, " in run("convert", a, b)
    assert show_change(1000, 990) == "1.00 KB -> 990 B, 1.0% smaller"
    assert show_change(1000, 1010) == "1.00 KB -> 1.01 KB, 1.0% larger"
    assert show_change(1000, 500) == "1.00 KB -> 500 B, 2.0 times smaller"


def test_an_output_that_exists(run, checkpoint, tmp_path):
    (tmp_path / "ct").mkdir()
    err = run("quantize", checkpoint, tmp_path / "ct", "--dialect", "compressed-tensors", code=1)
    assert "The output must be a new folder. Got " in err and "which exists. `--force` replaces it." in err


@pytest.mark.parametrize("command", [c.name or c.callback.__name__ for c in app.registered_commands])
def test_help_shows_names_of_arguments(run, command):
    usage = run(command, "--help").splitlines()[0]
    assert command in usage and usage.count("{") == len(re.findall(r"\{[A-Z]+\}", usage))


#
# Options, two at a time
#

OPTIONS = {
    "quantize": {
        "--format": ("int5",),
        "--bits": ("6",),
        "--group-size": ("32",),
        "--budget": ("6",),
        "--skip": ("layers.0.*",),
        "--rule": ("embed.*=int8",),
        "--method": ("mse",),
        "--axis": ("-2",),
        "--dialect": ("compressed-tensors",),
        "--dry-run": (),
        "--force": (),
    },
    "convert": {"--dialect": ("gguf",), "--force": ()},
    "compare": {"--json": (), "--plot": ("errors.svg",), "--force": ()},
    "plan": {
        "--budget": ("4.2",),
        "--format": ("int3(32, scale_dtype='float16')",),
        "--method": ("hqq",),
        "--axis": ("-2",),
        "--json": (),
    },
    "bench": {"--format": ("int8",), "--size": ("64",), "--rows": ("2",), "--rounds": ("1",)},
    "report": {"--format": ("int4",), "--axis": ("-2",), "--force": ()},
}
# Options that exclude each other, and the error.
EXCLUDE = {
    ("--format", "--bits"): "--format says both already",
    ("--format", "--group-size"): "--format says both already",
    ("--format", "--budget"): "--budget chooses the formats",
    ("--bits", "--budget"): "--budget chooses the formats",
    ("--group-size", "--budget"): "--budget chooses the formats",
}
PAIRS = [(command, *pair) for command, known in OPTIONS.items() for pair in it.combinations(known, 2)]


def test_formats_methods_and_rules_as_text():
    """What options mean: widths and groups, defaults of layouts, methods; `--skip` before `--rule` before the rest."""
    formats = eqq.formats
    for given, expected in (
        *(((None, 4, None), eqq.Int4(64)), ((None, 8, None), eqq.Int8(64)), ((None, 3, 32), eqq.Int3(32))),
        *(((None, 4, None, "mlx"), formats.MLX(4, 64)), ((None, 8, 128, "mlx"), formats.MLX(8, 128))),
        *(((None, None, None), eqq.NF4()), ((None, None, None, "bitsandbytes"), eqq.NF4())),
        *(((None, None, None, "gptq"), eqq.Int4()), ((None, None, None, "compressed-tensors"), eqq.Int4())),
        *(((None, None, None, "mlx"), formats.MLX()), ((None, None, None, "gguf"), formats.Q4_0())),
        (("int4(32, symmetric=False)", None, None), eqq.Int4(32, symmetric=False)),
    ):
        assert arguments.choose_format(*given) == expected
    methods = {"absmax": eqq.AbsMax, "mse": eqq.MSE, "joint_mse": eqq.JointMSE, "HQQ": eqq.HQQ}
    assert all(type(arguments.parse_method(name)) is cls for name, cls in methods.items())
    names = ("model.embed_tokens.weight", "a.weight", "b.weight", "lm_head.weight")
    rule, floats = ["a.*=int8", "b.*=none", "a.*=nf4"], ("*embed*", "*lm_head*")
    found = arguments.parse_rules(eqq.Int4(), rule, ["a.*"], names)
    assert list(found.items()) == [("a.*", None), ("b.*", None), ("*", eqq.Int4())]
    for dialect in (None, "gguf", "mlx", "bitsandbytes", "compressed-tensors", "gptq"):
        linear_alone = floats if dialect in ("bitsandbytes", "compressed-tensors", "gptq") else ()
        found = arguments.parse_rules(eqq.Int4(), rule, [], names, dialect)
        wanted = [("a.*", eqq.Int8()), ("b.*", None), *((pattern, None) for pattern in linear_alone), ("*", eqq.Int4())]
        assert list(found.items()) == wanted
    assert arguments.parse_rules(eqq.Int4(), ["*embed*=int8"], [], names, "gptq")["*embed*"] == eqq.Int8()


def test_every_option_is_in_a_pair():
    for command in app.registered_commands:
        known = {
            p.opts[0]
            for p in typer.main.get_command_from_info(
                command, pretty_exceptions_short=True, rich_markup_mode=None
            ).params
            if p.param_type_name == "option"
        }
        name = command.name or command.callback.__name__
        assert {o for o in known if o not in ("--output",)} <= {*OPTIONS.get(name, {}), "--json"}, name


@pytest.mark.parametrize("command, first, second", PAIRS, ids=["".join(pair) for pair in PAIRS])
def test_pairs_of_options(run, checkpoint, tmp_path, monkeypatch, command, first, second):
    monkeypatch.chdir(tmp_path)
    given = {option: OPTIONS[command][option] for option in (first, second)}
    spelled = [text for option, value in given.items() for text in (option, *value)]
    if "--group-size" in given and not {"--bits", "--format", "--budget"} & given.keys():
        assert "--group-size goes with --bits" in run(command, checkpoint, "out", *spelled, code=2)
        return
    if "--axis" in given and "--dialect" in given:  # blocks along the outputs, which that layout has not
        assert "an array that the file can hold" in run(command, checkpoint, "out", *spelled, code=1)
        return
    if (first, second) in EXCLUDE:
        assert EXCLUDE[first, second] in run(command, checkpoint, "out", *spelled, code=2)
        return
    if command == "bench":
        sizes = [] if "--size" in given else ["--size", 64]
        assert "float32" in run(command, *spelled, *sizes, *([] if "--rounds" in given else ["--rounds", 1]))
    elif command == "compare":
        run("quantize", checkpoint, "other.safetensors")
        out = run(command, checkpoint, "other.safetensors", *spelled)
        assert ("--json" in given) == out.startswith("{") and ("--plot" in given) == (tmp_path / "errors.svg").exists()
    elif command == "plan":
        out = run(command, checkpoint, *spelled)
        if "--json" in given:
            formats = {leaf["format"] for leaf in json.loads(out)["leaves"]} - {None}
            assert "--format" not in given or formats == {"Int3(block_size=32, scale_dtype='float16')"}
            assert "--budget" not in given or json.loads(out)["target_bits"] == 4.2
    elif command == "report":
        if "--force" in given:
            (tmp_path / "out.html").write_text("old")
        assert "<svg" not in run(command, checkpoint, "-o", "out.html", *spelled)
        assert "<svg" in (tmp_path / "out.html").read_text()
    else:
        check_written(run, checkpoint, tmp_path, command, given, spelled)


def check_written(run, checkpoint, folder, command, given, spelled):
    suffix = {None: ".safetensors", "gguf": ".gguf"}.get(given.get("--dialect", (None,))[0], "")
    out = folder / f"out{suffix}"
    if "--force" in given:
        out.write_bytes(b"old") if suffix else out.mkdir()
    line = run(command, checkpoint, out, *spelled)
    if "--dry-run" in given:
        assert "A plan" in line and (not out.exists() or "--force" in given)
        return
    opened = eqq.io.open(out)
    assert opened.dialect == given.get("--dialect", ("eqquant",))[0]
    quantized = {name: x for name, x in opened.items() if eqq.is_quantized(x)}
    if command == "convert":
        assert not quantized
        return
    assert ("layers.0.proj.weight" in quantized) == ("--skip" not in given)
    if "--rule" in given:
        assert (
            quantized["embed.weight"].format == eqq.Int8() if "--dialect" not in given else "embed.weight" in quantized
        )
    q = quantized["layers.1.proj.weight"]
    if "--format" in given or "--bits" in given:
        assert q.format.bits == (5 if "--format" in given else 6)
    if "--group-size" in given:
        assert q.format.block_size == 32
    assert "--axis" not in given or q.axis == -2
    if "--budget" in given:
        sizes = [(x.nbytes, x.size) for x in quantized.values()]
        assert 8 * sum(n for n, _ in sizes) <= 6 * sum(n for _, n in sizes)
    if "--method" in given:
        w, axis = load_file(checkpoint)["layers.1.proj.weight"], q.axis
        error = lambda q: np.linalg.norm(q.dequantize() - w)
        assert error(q) < error(eqq.quantize(w, q.format, axis=axis))


def test_help_does_not_wait_for_jax():
    program = "import sys; sys.argv = ['eqquant', '--help']\nfrom eqquant_cli.main import main\n"
    program += "try:\n    main()\nfinally:\n    print(sorted({'jax', 'eqquant'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "[]" and "quantize" in done.stdout


EXAMPLE = """
import equinox as eqx, jax, jax.numpy as jnp
import eqquant as eqq

def example():
    model = eqq.quantize_tree(eqx.nn.MLP(64, 64, 64, 1, key=jax.random.key(0)), "nf4")
    return model, jnp.ones(64)

def dense():
    return lambda model, x: jnp.tanh(model.layers[0].weight) @ x, *example()

def alone():
    return example()[0]

number = 3
"""


def test_explain(run, tmp_path, monkeypatch):
    file = tmp_path / "a_model_for_explain.py"
    file.write_text(EXAMPLE)
    out = run("explain", f"{file}:example")
    assert "layers.0.weight" in out and "packed" in out and "decoded" not in out.replace("decoded\n", "\n")
    monkeypatch.chdir(tmp_path)
    found = json.loads(run("explain", "a_model_for_explain:dense", "--json"))
    assert found["weights"][0]["roles"] == ["decoded", "used by tanh"] and found["weights"][1]["roles"] == []
    assert "return model, x" in run("explain", "a_model_for_explain:alone", code=1)
    assert "has no function 'number'" in run("explain", "a_model_for_explain:number", code=1)
    assert "no_such_module cannot be imported" in run("explain", "no_such_module:f", code=1)
    assert "mymodel.py:example" in run("explain", "a_model_for_explain", code=1)
