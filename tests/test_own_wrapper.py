"""A wrapper that the library does not have: a bias after the product."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

import eqquant as eqq
from eqquant._array.contraction import as_matrices, get_constraints, linear
from eqquant._wrappers.base import AbstractMatmulOverride

from .helpers import weights


class BiasArray(AbstractMatmulOverride):
    """A weight whose products add a bias to each row of results."""

    array: object
    bias: Float[Array, "*stack rows"]

    lost_in_jax = "its products add no bias"

    @property
    def products(self):
        return "add a bias"

    def leaf_axes(self, leaf):
        return tuple(range(leaf.ndim))

    def transpose(self, *axes):
        return self.dequantize().transpose(*axes)

    def reshape(self, *shape, **kwargs):
        return self.dequantize().reshape(*shape, **kwargs)

    def _rewrap(self, array):
        return dataclasses.replace(self, array=array)

    @property
    def constraints(self):
        return get_constraints(self.array)._replace(stack=self.bias.ndim - 1)

    def as_matrices(self, axes):
        bias = self.bias.reshape(axes.shape(self.shape)[:-1])
        return dataclasses.replace(self, array=as_matrices(self.array, axes), bias=bias)

    def linear(self, x, options):
        return linear(self.array, x, options) + self.bias[..., None, :]


@pytest.fixture
def model(getkey):
    stack = eqq.quantize(weights(getkey(), (3, 48, 64)), "nf4")
    return {
        "one": BiasArray(stack.reshape(3 * 48, 64), jnp.arange(144.0)),
        "stack": BiasArray(stack, jnp.ones((3, 48))),
    }


def test_products(model, getkey):
    w, x = model["one"], weights(getkey(), (2, 64))
    expected = x @ w.array.dequantize().T + w.bias[None]
    np.testing.assert_allclose((w @ x.T).T, expected, rtol=1e-5, atol=1e-4)
    with eqq.no_dense():
        y = eqq.quaxify(lambda w, x: jnp.einsum("oi,bi->bo", w, x))(w, x)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-4)


def test_vmap_and_scan(model, getkey):
    w, x = model["stack"], weights(getkey(), (64,))
    expected = w.array.dequantize() @ x + 1
    np.testing.assert_allclose(eqx.filter_vmap(lambda w: w @ x)(w), expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(jax.lax.scan(lambda n, w: (n, w @ x), 0, w)[1], expected, rtol=1e-5, atol=1e-4)


def test_moves_under_quax(model, getkey):
    x = weights(getkey(), (64,))
    moved = eqq.quaxify(lambda w: (w[1], w[:2], jnp.concatenate([w, w])))(model["stack"])
    assert [type(w) for w in moved] == [BiasArray] * 3
    for w, expected in zip(moved, (np.s_[1], np.s_[:2], np.r_[0, 1, 2, 0, 1, 2]), strict=True):
        np.testing.assert_allclose(w @ x, (model["stack"] @ x)[expected], rtol=1e-5, atol=1e-4)


def test_reports(model, getkey):
    report = eqq.summary(model)
    assert {leaf.path: leaf.reason for leaf in report.leaves} == {
        "one.array": "quantized; its products add a bias",
        "one.bias": "a part of BiasArray",
        "stack.array": "quantized; its products add a bias",
        "stack.bias": "a part of BiasArray",
    }
    assert report.nbytes == eqq.tree_nbytes(model)
    assert not eqq.explain(lambda model, x: model["one"] @ x, model, weights(getkey(), (64,))).decoded


def test_a_dense_weight_is_not_lost_in_silence(model):
    with pytest.warns(UserWarning, match="add no bias"):
        jnp.tanh(model["one"])


def test_dequantized(model, getkey):
    x, dense = weights(getkey(), (64,)), eqq.dequantize_tree(model)
    assert isinstance(dense["one"].array, jax.Array)
    np.testing.assert_allclose(dense["one"] @ x, model["one"] @ x, rtol=1e-5, atol=1e-4)
    twice = eqq.quaxify(lambda w, x: (2 * w) @ x)(model["one"], x)
    np.testing.assert_allclose(twice, 2 * model["one"].array.dequantize() @ x + model["one"].bias, rtol=1e-5, atol=1e-4)


def test_save_and_load(model, tmp_path):
    eqq.save(tmp_path / "model.safetensors", model)
    loaded = eqq.load(tmp_path / "model.safetensors", model)
    assert eqx.tree_equal(loaded, model)
