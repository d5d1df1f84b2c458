"""Arrays whose inputs are stored in another order, in files of our own."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant._wrappers.permuted import PermutedArray
from eqquant.io import _safetensors
from eqquant.io._tensors import MappedFile, NewTensor

from .helpers import weights
from .test_hostile_files import act_order


@pytest.fixture
def weight():
    q = eqq.quantize(weights(jr.key(0), (8, 64)), eqq.Int4(32))
    return PermutedArray(q, jr.permutation(jr.key(1), 64).astype(jnp.uint32))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.mark.long
def test_into_every_kind_of_template(weight, path):
    tree = {"w": weight, "t": weight.T, "b": jnp.ones(8)}
    eqq.save(path, tree)
    floats = {"w": jax.ShapeDtypeStruct((8, 64), jnp.float32), "t": jnp.zeros((64, 8)), "b": jnp.zeros(8)}
    for like in (None, tree, eqx.filter_eval_shape(lambda: tree), floats):
        assert eqx.tree_equal(eqq.load(path, like), tree)
    assert eqx.tree_equal(eqq.io.assign(floats, eqq.load(path)), tree)
    checkpoint = eqq.io.open(path)
    assert eqx.tree_equal({name: checkpoint[name] for name in checkpoint}, tree)
    assert eqx.tree_equal(eqq.io.load_into(floats, path, lambda name: name), tree)
    assert eqx.tree_equal(eqq.io.load_into(tree, path, lambda name: name), tree)


def test_training_state(weight, path):
    with_gradient = dataclasses.replace(weight, array=dataclasses.replace(weight.array, gradient_of=jnp.ones((8, 64))))
    low_rank = dataclasses.replace(weight, array=eqq.loraify(weight.array, rank=2, key=jr.key(2), where=lambda w: w))
    for tree in ({"w": with_gradient}, {"w": low_rank}, [eqx.filter(weight, eqx.is_inexact_array), weight]):
        eqq.save(path, tree)
        assert eqx.tree_equal(eqq.load(path, tree), tree)
    name = next(iter(eqq.io.open(path)))
    assert eqx.tree_equal(jax.tree.structure(eqq.io.open(path)[name]), jax.tree.structure(weight))


def test_a_template_in_another_order(weight, path):
    eqq.save(path, [weight])
    with pytest.raises(ValueError, match="stored in another order in the file, .*axis=-1 in `like`"):
        eqq.load(path, [weight.array])
    with pytest.raises(ValueError, match=r"0: float32\[8, 64\] .*another order in the file"):
        eqq.load(path, [jnp.zeros((8, 65))])


@pytest.mark.parametrize(
    "order, indices, message",
    [([-3, 64], None, "arrays of .8, 64. do not have"), ([-1, 63], None, "do not have"), ([], None, "do not have")]
    + [([-1, 64], np.zeros(64, np.uint32), "every index once"), (["x"], None, "must be a list of int")],
)
def test_damaged_permutations_are_an_error(weight, path, order, indices, message):
    eqq.save(path, [weight])
    tensors, metadata = _safetensors.read(MappedFile(path))
    fields = json.loads(metadata["eqquant"])
    fields["leaves"][0]["order"] = order
    changed = {"0.order": indices} if indices is not None else {}
    read = lambda t: changed.get(t.name, t.array())
    parts = [NewTensor(t.name, t.dtype, t.shape, lambda t=t: read(t)) for t in tensors.values()]
    damaged = path.with_name("damaged.safetensors")
    _safetensors.write(damaged, parts, {"eqquant": json.dumps(fields)})
    with pytest.raises(ValueError, match=f"damaged.safetensors .*{message}"):
        eqq.load(damaged)


def test_convert_keeps_the_order(tmp_path):
    act_order(tmp_path / "gptq.safetensors")
    before = eqq.io.open(tmp_path / "gptq.safetensors")["l.weight"]
    report = eqq.io.convert(tmp_path / "gptq.safetensors", tmp_path / "ours.safetensors")
    assert [row.format for row in report.leaves] == [before.format]
    loaded = eqq.load(tmp_path / "ours.safetensors")["l"]["weight"]
    assert isinstance(loaded, PermutedArray) and eqx.tree_equal(loaded, before)
    eqq.io.convert(tmp_path / "gptq.safetensors", tmp_path / "nf4.safetensors", "nf4")
    again = eqq.load(tmp_path / "nf4.safetensors")["l"]["weight"]
    assert eqx.tree_equal(again, eqq.quantize(before.dequantize(), "nf4"))
