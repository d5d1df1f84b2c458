"""Our own files: what is saved is what is loaded, to the bit, or an error that says what differs."""

import json
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqquant as eqq

from .helpers import arrays, assert_same, FORMATS, loss, mlp, weights


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def assert_equal_trees(actual, expected):
    """The same structure, types, dtypes and bits."""
    assert jtu.tree_structure(actual) == jtu.tree_structure(expected)
    for a, e in zip(jtu.tree_leaves(actual), jtu.tree_leaves(expected), strict=True):
        if not eqx.is_array(e) and not isinstance(e, (np.ndarray, np.generic)):
            assert (type(a), repr(a)) == (type(e), repr(e))
            continue
        assert isinstance(a, jax.Array) == isinstance(e, jax.Array) and a.dtype == e.dtype and a.shape == e.shape
        if jnp.issubdtype(e.dtype, jax.dtypes.prng_key):
            a, e = jr.key_data(a), jr.key_data(e)
        assert np.asarray(a).tobytes() == np.asarray(e).tobytes()


def skeleton(tree):
    """The template without values."""
    return jtu.tree_map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, tree)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(getkey, path, name):
    tree = {"w": eqq.quantize(weights(getkey(), (6, 130)), FORMATS[name].format), "b": jnp.ones(6)}
    eqq.save(path, tree)
    for like in (None, tree, skeleton(tree), {"w": jnp.zeros((6, 130)), "b": jnp.zeros(6)}):
        assert_equal_trees(eqq.load(path, like), tree)


def test_every_kind_of_leaf(path):
    tree = {
        "f16": jnp.arange(5, dtype=jnp.float16),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "bool": jnp.array([True, False]),
        "i4": jnp.arange(-3, 4).astype(jnp.int4),
        "u2": jnp.arange(4).astype(jnp.uint2),
        "f4": jnp.arange(6.0).astype(jnp.float4_e2m1fn),
        "f4_odd": jnp.arange(3.0).astype(jnp.float4_e2m1fn),
        "e8m0": jnp.array([1.0, 2.0]).astype(jnp.float8_e8m0fnu),
        "fp8": jnp.arange(6.0).astype(jnp.float8_e4m3fn).reshape(2, 3),
        "fp8_other": jnp.arange(6.0).astype(jnp.float8_e4m3b11fnuz),
        "c64": jnp.array([1 + 2j]),
        "nan": jnp.array([jnp.nan, -jnp.inf, -0.0]),
        "numpy": np.arange(3, dtype=np.float64),
        "c128": np.array([1 - 2j]),
        "big_endian": np.arange(3, dtype=">f4"),
        "transposed": np.arange(6.0).reshape(2, 3).T,
        "generic": np.float32(3),
        "scalar": jnp.float32(2.5),
        "key": jr.key(1),
        "keys": jr.split(jr.key(2, impl="rbg"), 3),
        "raw_key": jr.PRNGKey(3),
        "none": None,
        "int": 2**70,
        "negative": -3,
        "float": 0.1,
        "inf": float("-inf"),
        "bool_": True,
        "complex": 1 - 0.5j,
        "text": "a \"name\" \u00fc",
        "list": [jnp.ones(2), (1, jnp.zeros(1))],
    }
    eqq.save(path, tree)
    expected = {**tree, "big_endian": np.arange(3, dtype=np.float32)}
    assert_equal_trees(eqq.load(path, tree), expected)
    loaded = eqq.load(path)
    assert loaded.keys() == tree.keys() - {"none"} and loaded["list"].keys() == {"0", "1"}
    assert type(loaded["text"]) is str and type(loaded["generic"]) is np.float32
    assert_equal_trees(eqq.io.assign(tree, loaded), expected)
