"""Fields of public modules, each replaced alone as `eqx.tree_at` replaces them: another shape or dtype is refused."""

import dataclasses
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
        if issubclass(cls, eqx.Module) and not inspect.isabstract(cls) and not getattr(cls, "deferred", False)
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


def calibrator(cls):
    return cls("int8", (LENGTH,), axis=-2).update(weights(jr.key(0), (ROWS, LENGTH)))


CALIBRATOR = [lambda c: c.update(jnp.ones((ROWS, LENGTH))), lambda c: c.range(), lambda c: c.result(), lambda c: c.merge(c)]


def trained(optimizer, model):
    optim = optimizer(optax.adam(1e-3))
    params = eqx.filter(model, eqx.is_array)
    update = lambda state: optim.update(jtu.tree_map(jnp.zeros_like, params), state, params)
    return optim.init(params), [update]


# Of each class, objects and what is done with them.
OBJECTS = {
    "QuantizedArray": lambda: [(stacked(f), ARRAY) for f in ("int8", eqq.Int4(64, symmetric=False), "q4_k", "nvfp4")],
    "QuantizedCache": lambda: [
        (cache(**options), CACHE)
        for options in ({"keys": "int8"}, {"keys": None, "window": 8}, {"keys": eqq.Int8(16), "per_channel": True})
    ],
    "ActivationQuantizedArray": lambda: [
        (eqq.quantize_activations(eqq.quantize_tree(linear(), "int8"), "int8").weight, ARRAY[:1])
    ],
    "LoraArray": lambda: [(eqq.loraify(linear(), rank=2, key=jr.key(0)).weight, ARRAY)],
    "FakeQuantizedArray": lambda: [
        (eqq.quantize_tree(linear(), "int4", simulate=True).weight, ARRAY),
        ],
    "LowPrecisionArray": lambda: [(eqq.low_precision_training(linear(), "fp8", delayed=True).weight, ARRAY[:1])],
    "ScaledArray": lambda: [(ScaledArray(stacked("int8"), jnp.ones((3, LENGTH))), ARRAY)],
    "RotatedArray": lambda: [(RotatedArray(stacked("int8"), 3), ARRAY)],
    "PermutedArray": lambda: [(PermutedArray(stacked("int8"), jnp.tile(jnp.arange(LENGTH, dtype=jnp.uint32), (3, 1))), ARRAY)],
    "SelectedArray": lambda: [(eqq.take_layer(stacked("int8"), jnp.int32(1)), ARRAY)],
    **{
        name: lambda name=name: [(calibrator(getattr(eqq.calibrate, name)), CALIBRATOR)]
        for name in ("MinMax", "MovingAverage", "Percentile", "MSERange")
    },
    "FloatMastersState": lambda: [trained(eqq.float_masters, eqq.quantize_tree(linear(), "int8"))],
    "DelayedScalingState": lambda: [trained(eqq.delayed_scaling, eqq.low_precision_training(linear(), "fp8", delayed=True))],
}


def others(leaf):
    """Structs that are not those of a leaf: longer, with fewer rows, one that `vmap` did not take apart, of another type."""
    struct = lambda shape, dtype=leaf.dtype: jax.ShapeDtypeStruct(shape, dtype)
    yield "stacked", struct((2, *leaf.shape))
    if leaf.ndim:
        yield "longer", struct((*leaf.shape[:-1], 2 * leaf.shape[-1]))
    if leaf.ndim > 1:
        yield "fewer", struct((1, *leaf.shape[1:]))
    yield "dtype", struct(leaf.shape, jnp.int32 if jnp.issubdtype(leaf.dtype, jnp.floating) else jnp.float32)


def test_x():
    print(names() - {*OBJECTS}, {*OBJECTS} - names())
    for name in OBJECTS:
        for obj, uses in OBJECTS[name]():
            assert name in str(type(obj)), type(obj)
            leaves, tree = jtu.tree_flatten_with_path(obj)
            for use in uses:
                jax.eval_shape(use, obj)
            for n, (path, leaf) in enumerate(leaves):
                for kind, other in others(leaf):
                    bad = jtu.tree_unflatten(tree, [other if n == m else x for m, (_, x) in enumerate(leaves)])
                    for k, use in enumerate(uses):
                        try:
                            r = jax.eval_shape(use, bad)
                            r = "SILENT" + str([x.shape for x in jtu.tree_leaves(r)])[:60]
                        except (TypeError, ValueError) as e:
                            r = type(e).__name__ + " " + str(e)[:90].replace("\n", " ")
                        print(name, jtu.keystr(path), leaf.shape, kind, k, "|", r)
