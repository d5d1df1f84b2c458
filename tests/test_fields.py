"""Fields of public modules, each replaced alone as `eqx.tree_at` replaces them: another shape or dtype is refused."""

import dataclasses
import functools as ft
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import optax
import pytest

import eqquant as eqq
from eqquant._array.value import AbstractArrayValue
from eqquant._wrappers.permuted import PermutedArray
from eqquant._wrappers.rotated import RotatedArray
from eqquant._wrappers.scaled import ScaledArray

from .helpers import weights


pytestmark = pytest.mark.usefixtures("without_type_checks")

ROWS, LENGTH = 4, 128
NAMESPACES = [eqq, eqq.arrays, eqq.calibrate, eqq.extend, eqq.formats, eqq.transforms]


def subclasses(cls):
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


def names():
    """Every module with fields that hold arrays, which users get by a public name or in a model."""
    public = {x for space in NAMESPACES for x in vars(space).values() if inspect.isclass(x)}
    return {
        cls.__name__
        for cls in public | subclasses(AbstractArrayValue)
        if issubclass(cls, eqx.Module)
        and not inspect.isabstract(cls)
        and cls.__module__.startswith("eqquant")
        and cls.__name__ != "MultipliedArray"
        if any(not field.metadata.get("static") for field in dataclasses.fields(cls))
    }


def linear():
    w = weights(jr.key(0), (ROWS, LENGTH))
    return eqx.tree_at(lambda layer: layer.weight, eqx.nn.Linear(LENGTH, ROWS, key=jr.key(1)), w)


def stacked(format, shape=(3, ROWS, LENGTH)):
    return eqq.quantize(weights(jr.key(0), shape), format)


def multiply(q):
    return jnp.ones((2, q.shape[-1])) @ q.mT


ARRAY = [multiply, lambda q: q.dequantize()]


def cache(**options):
    new = weights(jr.key(0), (2, 3, 2, 5, 32))
    return eqq.QuantizedCache.empty((3, 2, 32, 32), **options).append(*new)


CACHE = [
    lambda c: c.append(*jnp.ones((2, 3, 2, 5, 32))),
    lambda c: c.attend(jnp.ones((3, 2, 1, 32)), jnp.zeros((3, 1), int)),
    lambda c: c.scores(jnp.ones((3, 2, 1, 32))),
    lambda c: c.weighted_values(jnp.ones((3, 2, 1, 32 + c.window))),
    lambda c: c.truncate(3),
]


def trained(optimizer, model, gradient):
    optim = optimizer(optax.sgd(1e-3))
    loss = lambda model: jnp.sum(jax.vmap(model)(jnp.ones((2, LENGTH))) ** 2)
    gradients = gradient(loss)(model)
    params = eqx.filter(model, eqx.is_array)
    return optim.init(params), [lambda state: optim.update(gradients, state, params)]


def in_8_bits():
    return eqq.low_precision_training(linear(), "fp8", delayed=True)


def wrapped(array):
    return [(array, ARRAY)]


def calibrated(name):
    cal = getattr(eqq.calibrate, name)("int8", (LENGTH,), axis=-2).update(weights(jr.key(0), (ROWS, LENGTH)))
    return [(cal, [lambda c: c.update(jnp.ones((ROWS, LENGTH))), lambda c: c.result(), lambda c: c.merge(c)])]


# For each class, example instances and the operations that must reject a wrong field.
OBJECTS = {
    "QuantizedArray": lambda: [(stacked(f), ARRAY) for f in ("int8", eqq.Int4(64, symmetric=False), "q4_k", "nvfp4")],
    "QuantizedCache": lambda: (
        [
            (cache(**options), CACHE)
            for options in ({"keys": "int8"}, {"keys": None, "window": 8}, {"keys": eqq.Int8(16), "per_channel": True})
        ]
        + [(cache(keys="int8", ring=6, sinks=2), [CACHE[0], CACHE[2], CACHE[4]])]
    ),
    "ActivationQuantizedArray": lambda: [
        (eqq.quantize_tree(linear(), "int8", activations="int8").weight, ARRAY[:1]),
    ],
    "LoraArray": lambda: wrapped(eqq.loraify(linear(), rank=2, key=jr.key(0)).weight),
    "FakeQuantizedArray": lambda: [
        (eqq.quantize_tree(linear(), "int4", simulate=True, learn_scales=learned).weight, ARRAY)
        for learned in (False, True)
    ],
    "LowPrecisionArray": lambda: [(in_8_bits().weight, ARRAY[:1])],
    "ScaledArray": lambda: wrapped(ScaledArray(stacked("int8"), jnp.ones((3, LENGTH)))),
    "RotatedArray": lambda: wrapped(RotatedArray(stacked("int8"), 3)),
    "PermutedArray": lambda: wrapped(
        PermutedArray(stacked("int8"), jnp.tile(jnp.arange(LENGTH, dtype=jnp.uint32), (3, 1)))
    ),
    "SelectedArray": lambda: wrapped(eqq.take_layer(stacked("int8"), jnp.int32(1))),
    **{name: ft.partial(calibrated, name) for name in ("MinMax", "MovingAverage", "Percentile", "MSERange")},
    "FloatMastersState": lambda: [
        trained(eqq.float_masters, eqq.quantize_tree(linear(), "int8"), eqq.filter_grad),
    ],
    "DelayedScalingState": lambda: [trained(eqq.delayed_scaling, in_8_bits(), eqx.filter_grad)],
}
METHODS = {"GPTQ", "MSE", "JointMSE", "LearnedRounding", "AWQ", "SmoothQuant"}  # whose one field is of statistics
# Fields on which no other field depends, so that any other array is as good.
ALONE = {
    ("FakeQuantizedArray", ".master"),
    ("LowPrecisionArray", ".array"),
    ("SelectedArray", ".index"),
}
ACCEPTED = {
    "DelayedScalingState": {".history['.weight'] longer"},  # which every step keeps
}


def others(leaf):
    """Wrong shapes and dtypes: an extra leading axis, as of a `vmap` over the others; twice the length; one row."""
    yield "stacked", (2, *leaf.shape), leaf.dtype
    if leaf.ndim:
        yield "longer", (*leaf.shape[:-1], 2 * leaf.shape[-1]), leaf.dtype
    if leaf.ndim > 1:
        yield "fewer", (1, *leaf.shape[1:]), leaf.dtype
    yield "dtype", leaf.shape, jnp.int32 if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.float32


def accepted(use, leaves, tree, n, shape, dtype):
    new = [jax.ShapeDtypeStruct(shape, dtype) if m == n else leaf for m, leaf in enumerate(leaves)]
    try:
        jax.eval_shape(use, jtu.tree_unflatten(tree, new))
    except (TypeError, ValueError):
        return False
    return True


def test_every_module_is_here():
    assert names() <= {*OBJECTS} | METHODS


@pytest.mark.parametrize("name", OBJECTS)
def test_a_field_of_another_shape_or_dtype_is_refused(name):
    """Every operation must raise. Only shapes are traced."""
    found = set()
    for x, uses in OBJECTS[name]():
        assert type(x).__name__ == name
        paths, leaves = zip(*jtu.tree_leaves_with_path(x), strict=True)
        for use in uses:
            jax.eval_shape(use, x)
            for n, path in enumerate(map(jtu.keystr, paths)):
                if (name, path) not in ALONE and not path.startswith(".inner_state"):  # which is optax's
                    for kind, *other in others(leaves[n]):
                        if accepted(use, leaves, jtu.tree_structure(x), n, *other):
                            found.add(f"{path} {kind}")
    assert found == ACCEPTED.get(name, set())


@pytest.mark.parametrize("name", sorted(METHODS))
def test_statistics_of_another_weight_are_refused(name):
    model, other = linear(), eqx.nn.Linear(2 * LENGTH, ROWS, key=jr.key(1))
    stats, others = (
        eqq.calibrate.collect_stats(m, [jnp.ones(m.in_features)], apply=lambda m, x: m(x), gram=True)
        for m in (model, other)
    )
    smooths = name in ("AWQ", "SmoothQuant")
    cls = getattr(eqq.transforms if smooths else eqq, name)
    arguments = (stats, "int4") if name == "AWQ" else (stats,)
    use = lambda method: (
        eqq.transforms.smooth(model, method) if smooths else eqq.quantize_tree(model, eqq.Int4(64), method=method)
    )
    use(cls(*arguments))
    with pytest.raises(ValueError, match="weight"):
        use(dataclasses.replace(cls(*arguments), inputs=others))
