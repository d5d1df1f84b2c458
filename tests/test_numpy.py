"""NumPy arrays that JAX refuses: converted if possible, or refused in the plan too."""

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import eqquant as eqq

from .helpers import assert_same


W = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
CONVERTED = {
    "big-endian float32": (W.astype(">f4"), "float32"),
    "big-endian float16": (W.astype(">f2"), "float16"),
    "big-endian float64": (W.astype(">f8"), "float32"),
    "longdouble": (W.astype(np.longdouble), "float32"),
    "a masked array without a mask": (np.ma.masked_array(W), "float32"),
    "a masked array of which nothing is masked": (np.ma.masked_array(W, mask=np.zeros(W.shape, bool)), "float32"),
    "a view backwards": (np.ascontiguousarray(W[::-1])[::-1], "float32"),
    "a record array": (W.view(np.recarray), "float32"),
}
MASKED = np.ma.masked_array(W, mask=np.eye(64, dtype=bool))


def multiply(model, x):
    return x @ model["w"].astype(jnp.float32).T


BY = {
    "quantize": lambda w: eqq.quantize(w, "int4"),
    "quantize_tree": lambda w: eqq.quantize_tree({"w": w}, "int4")["w"],
    "rotate": lambda w: eqq.transforms.rotate({"w": w})["w"],
    "collect_stats": lambda w: (
        eqq.calibrate.collect_stats({"w": w}, [jnp.ones((3, 64))], apply=multiply)["w"].second_moment
    ),
}


@pytest.fixture(autouse=True)
def unchecked():
    """What users see, since checks of annotations come first."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("kind", CONVERTED)
def test_convertible_dtypes_are_quantized(kind, by):
    w, dtype = CONVERTED[kind]
    assert_same(BY[by](w), BY[by](jnp.asarray(W, dtype)))


@pytest.mark.parametrize("kind", CONVERTED)
def test_the_plan_equals_the_result(kind):
    w, dtype = CONVERTED[kind]
    model = {"a": {"w": w}, "bias": w[0]}
    planned = eqq.plan_tree(model, "int4").to_dict()["leaves"]
    assert [leaf["format"] is not None for leaf in planned] == [True, False]
    done = eqq.quantize_tree(model, "int4")
    assert done["a"]["w"].dtype == jnp.dtype(dtype)
    assert done["bias"] is model["bias"]


@pytest.mark.parametrize("function", [eqq.plan_tree, eqq.quantize_tree])
def test_masked_values_are_refused_with_the_path(function):
    with pytest.raises(TypeError, match=r"a\.w must have all its values\. Got a masked array with 64 masked ones"):
        function({"a": {"w": MASKED}, "v": W}, "int4")
    with pytest.raises(TypeError, match="must have all its values"):
        eqq.quantize(MASKED, "int4")


@pytest.mark.parametrize("w", [W.astype(object), W.astype(str), W.view([("a", "f4")])], ids=["object", "str", "struct"])
def test_non_numeric_arrays_are_refused_in_the_plan(w):
    planned = {leaf.path: leaf for leaf in eqq.plan_tree({"v": W, "w": w}, "int4").leaves}
    assert planned["w"].format is None and planned["w"].reason != "a weight"
    assert eqq.quantize_tree({"v": W, "w": w}, "int4")["w"] is w
    with pytest.raises(TypeError, match=r"w: .*Select weights alone"):
        eqq.plan_tree({"v": W, "w": w}, "int4", where=lambda m: m["w"])
    with pytest.raises(TypeError, match=r"`x` must be a floating point array. Got dtype .* `x.astype\(np.float32\)`"):
        eqq.quantize(w, "int4")
    assert "astype" in planned["w"].reason or w.dtype != object


def test_one_array_in_two_places_stays_one():
    w = W.astype(">f4")
    done = eqq.quantize_tree({"a": w, "b": w}, "int4")
    assert done["a"] is done["b"]


def test_values_beyond_float32():
    w = W.astype(np.longdouble) * np.longdouble(10) ** 300 * np.longdouble(10) ** 300
    with pytest.raises(ValueError, match="w must be finite in float32"), np.errstate(over="ignore"):
        eqq.quantize_tree({"w": w}, "int4")


def test_float64_stays_float64():
    with jax.enable_x64(True):
        assert eqq.quantize(W.astype(">f8"), "int4").dtype == jnp.float64
