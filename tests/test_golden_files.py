"""Files that released versions wrote, in `golden/files`: every later version reads them to the bit.

`golden_files.py` wrote them, and what they hold as plain arrays of NumPy.
"""

import json

import equinox as eqx
import numpy as np
import pytest

import eqquant as eqq
from eqquant.io._write import WRITERS

from .golden_files import contents, FOLDER, TREES, WRITTEN


EXPECTED = sorted(FOLDER.glob("*/*.npz"))
OWN = [path for path in EXPECTED if path.stem in TREES]
OTHERS = [path for path in EXPECTED if path.stem in WRITTEN]
case = lambda path: f"{path.parent.name}-{path.stem}"


def load_expected(path):
    with np.load(path) as arrays:
        return dict(arrays)


def assert_holds(tree, path, about=True):
    """`tree` holds what was written beside a file: the same leaves, dtypes, codes, scales and values."""
    got, expected = contents(tree), load_expected(path)
    was, now = (json.loads(str(found.pop("about"))) for found in (expected, got))
    assert was["dtypes"] == now["dtypes"]
    assert not about or was["classes"] == now["classes"]
    assert got.keys() == expected.keys()
    for name, array in expected.items():
        assert (got[name].dtype, got[name].shape) == (array.dtype, array.shape), name
        leaf, _, part = name.partition(":")
        # XLA may round a product before it adds an offset, or not.
        if part == "values" and f"{leaf}:offset" in expected:
            np.testing.assert_allclose(got[name], array, rtol=0, atol=2**-22 * np.abs(array).max())
        else:
            assert got[name].tobytes() == array.tobytes(), name


def template(name):
    """The structure of a tree; `leaves` has arrays of NumPy that `jax.eval_shape` makes narrower."""
    return TREES[name]() if name == "leaves" else eqx.filter_eval_shape(TREES[name])


def template_of_file(path):
    """As `template`, without formats that a version had not."""
    known = {name.partition(":")[0] for name in load_expected(path)}
    tree = template(path.stem)
    return {name: q for name, q in tree.items() if name in known} if path.stem.startswith("formats_") else tree


@pytest.mark.parametrize("path", OWN, ids=case)
def test_own_files(path):
    """Both without a template, and into the structure that the functions of today make."""
    file = path.with_suffix(".safetensors")
    assert_holds(eqq.load(file), path, about=False)
    assert_holds(eqq.load(file, template_of_file(path)), path)


@pytest.mark.parametrize("path", OTHERS, ids=case)
def test_files_for_other_libraries(path):
    dialect = WRITTEN[path.stem][0]
    checkpoint = eqq.io.open(path.with_suffix(".gguf" if dialect == "gguf" else ""))
    assert checkpoint.dialect == dialect
    assert_holds({name: checkpoint[name] for name in checkpoint}, path)


@pytest.mark.long
@pytest.mark.parametrize("folder", sorted(FOLDER.iterdir()), ids=lambda folder: folder.name)
def test_shards_and_files_from_equinox(folder):
    expected = folder / "shards.npz"
    assert_holds(eqq.load(folder / "shards"), expected, about=False)
    assert_holds(eqq.load(folder / "shards", template("layouts")), expected)
    from_equinox = eqx.tree_deserialise_leaves(
        folder / "layouts.eqx", template("layouts"), eqq.deserialise_filter_spec, is_leaf=eqq.is_quantized
    )
    assert_holds(from_equinox, expected)


def test_another_bit_is_found(tmp_path):
    """The comparison above sees the least change of a code, a scale or a float."""
    for name, change in (("codes", lambda x: x ^ 1), ("scale_bits", lambda x: x + 1)):
        tree = eqq.load(FOLDER / "0.1.0" / "layouts.safetensors")
        spoiled = eqx.tree_at(lambda tree, name=name: getattr(tree["row"], name), tree, replace_fn=change)
        with pytest.raises(AssertionError, match="row:"):
            assert_holds(spoiled, FOLDER / "0.1.0" / "layouts.npz", about=False)


def test_each_family_array_state_and_dialect_has_a_file():
    """A new one needs a case in `golden_files.py`. Before a release, remove the folder and write it anew."""
    assert {path.stem for path in EXPECTED} == {*TREES, *WRITTEN, "shards"}
    found = set()
    for path in EXPECTED:
        found |= {*json.loads(str(load_expected(path)["about"]))["classes"]}
    public = [name for name in vars(eqq.arrays) if name.endswith("Array")]
    states = ("QuantizedCache", "FloatMastersState", "DelayedScalingState", "QuantizedArray")
    assert {*public, *states} <= found
    assert {*WRITERS} <= {WRITTEN[path.stem][0] for path in OTHERS}


def test_golden_files_are_small():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 400_000 and max(p.stat().st_size for p in files) < 50_000
