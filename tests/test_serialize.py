"""Files of Equinox: loaded trees equal saved trees, or an error."""

import copy
import io
import pickle
import re

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq

from .helpers import assert_same, FORMATS, weights


def save(tree):
    f = io.BytesIO()
    eqx.tree_serialise_leaves(f, tree, eqq.serialise_filter_spec, is_leaf=eqq.is_quantized)
    f.seek(0)
    return f


def load(f, like):
    return eqx.tree_deserialise_leaves(f, like, eqq.deserialise_filter_spec, is_leaf=eqq.is_quantized)


def reason(error):
    """The innermost error: Equinox wraps it in errors that name the leaf."""
    cause = error.value
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return str(cause)


@pytest.mark.parametrize("name", FORMATS)
def test_round_trip(getkey, name):
    tree = {"w": eqq.quantize(weights(getkey(), (6, 200)), FORMATS[name].format), "b": jnp.ones(6), "n": 3}
    like = eqx.filter_eval_shape(lambda: {**tree, "b": jnp.zeros(6)})
    for skeleton in (tree, like):
        loaded = load(save(tree), skeleton)
        assert_same(loaded["w"], tree["w"])
        assert loaded["n"] == 3 and jnp.all(loaded["b"] == 1)


@pytest.mark.parametrize(
    "like, got",
    [
        (lambda w: eqq.quantize(w, "int4"), r"must hold an array as in the skeleton: Int4\(.*Got NF4\("),
        (lambda w: eqq.quantize(w, eqq.NF4(block_size=32)), "block_size=32.*Got NF4.*block_size=64"),
        (lambda w: eqq.quantize(w, "nf4", axis=0), r"axis=-2.*Got NF4\(.*axis=-1"),
        (lambda w: eqq.quantize(w[:, :127], "nf4"), r"lengths=\(127,\).*Got NF4\(.*lengths=\(128,\)"),
    ],
)
def test_another_skeleton_is_refused(getkey, like, got):
    w = weights(getkey(), (128, 128))
    with pytest.raises(Exception) as error:
        load(save([eqq.quantize(w, "nf4")]), [like(w)])
    assert re.search(got, reason(error)), reason(error)


def test_files_without_a_description_are_refused(getkey):
    q = eqq.quantize(weights(getkey(), (8, 64)), "nf4")
    f = io.BytesIO()
    eqx.tree_serialise_leaves(f, q)
    f.seek(0)
    with pytest.raises(Exception) as error:
        load(f, q)
    assert "The file must hold a quantized array here. Got uint8[8, 32]" in reason(error)
    with pytest.raises(Exception):
        eqx.tree_deserialise_leaves(save(q), q)


def test_pickle_and_copy(getkey):
    q = eqq.quantize(weights(getkey(), (8, 64)), eqq.NF4(double_quant=True))
    for same in (pickle.loads(pickle.dumps(q)), copy.copy(q), copy.deepcopy(q), q.copy()):
        assert_same(same, q)


@pytest.mark.parametrize("module", [np, jnp])
def test_numpy_files_hold_the_dense_array(getkey, module):
    q = eqq.quantize(weights(getkey(), (8, 64)), "nf4")
    f = io.BytesIO()
    module.save(f, q)
    f.seek(0)
    np.testing.assert_array_equal(np.load(f), np.asarray(q.dequantize()))
