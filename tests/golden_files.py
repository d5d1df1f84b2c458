"""Trees and arrays whose files of each released version lie in `tests/golden/files`, and what these hold.

    python -m tests.golden_files

writes those of this version, once, at a release: a file that is there already never changes. Add a case, and later
versions have to read it too.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

import eqquant as eqq
from eqquant._formats.base import AbstractVectorFormat
from eqquant._tree.leaves import named_leaves
from eqquant._wrappers.permuted import PermutedArray
from eqquant._wrappers.rotated import RotatedArray
from eqquant._wrappers.scaled import ScaledArray

from .helpers import FORMATS


FOLDER = Path(__file__).parent / "golden" / "files"
FP4 = np.array([0.0625, 2, 3, 4, 6, 8, 12], np.float32) / np.float32(12)  # the levels of bitsandbytes, without zero


def values(*shape: int) -> jax.Array:
    """Rows of different magnitudes, from NumPy, whose generators never change."""
    rng = np.random.default_rng(shape)
    return jnp.asarray(rng.standard_normal(shape) * np.exp(rng.standard_normal((*shape[:-1], 1))), jnp.float32)


# Our own files


def formats_of(family: str) -> Callable[[], Any]:
    """A ragged array in each format that is defined in one module."""
    rows = {name: row.format for name, row in FORMATS.items() if family_of(row.format) == family}
    return lambda: {name: eqq.quantize(values(2, 70), format) for name, format in rows.items()}


def family_of(format: eqq.extend.AbstractFormat) -> str:
    return type(format).__module__.rpartition(".")[2]


def leaves() -> Any:
    """Each kind of leaf that is no quantized array."""
    tied = values(3)
    return {
        "dtypes": {
            **{name: values(2, 3).astype(name) for name in ("float32", "float16", "bfloat16", "int8", "uint8", "bool")},
            **{name: values(2, 4).astype(name) for name in ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int4")},
            "empty": jnp.zeros((0, 3), jnp.int32),
            "complex64": jnp.asarray([1 - 2j], jnp.complex64),
        },
        "numpy": [np.arange(3, dtype=np.float64), np.float32(0.1)],
        "scalars": (True, -(2**70), 0.1, 1 - 2j, "\u00e4"),
        "key": jr.key(1),
        "tied": [tied, {"again": tied}],
    }


def layouts() -> Any:
    """Quantized arrays along other axes, of other dtypes, stacked, and in the order of act-order."""
    packed = eqq.quantize(values(4, 32), "int4")
    return {
        "rows": eqq.quantize(values(70, 3), "nf4", axis=0),
        "convolution": eqq.quantize(values(2, 3, 3, 3), "int4", axis=(-3, -2, -1)),
        "stack": eqq.quantize(values(2, 2, 33), "mxfp4", dtype=jnp.bfloat16),
        "row": eqq.quantize(values(64), "int8"),
        "half": eqq.quantize(values(2, 64).astype(jnp.float16), "fp8"),
        "permuted": PermutedArray(packed, jnp.asarray(np.random.default_rng(0).permutation(32), jnp.uint32)),
    }


def wrappers() -> Any:
    """Each array around another array, as functions make it."""
    w = values(4, 32)
    packed = eqq.quantize(w, "int4")
    return {
        "scaled": ScaledArray(packed, 1 + jnp.square(values(32))),
        "rotated": RotatedArray(packed, 3),
        "permuted": PermutedArray(packed, jnp.asarray(np.random.default_rng(1).permutation(32), jnp.uint32)),
        "selected": eqq.take_layer(eqq.quantize(values(3, 4, 32), "nf4"), jnp.asarray([2, 0])),
        "activations": eqq.arrays.ActivationQuantizedArray(eqq.quantize(w, "int8"), "int8"),
        "activations_static": eqq.arrays.ActivationQuantizedArray(eqq.quantize(w, "int8"), "int8", scale=0.25),
        "simulated": eqq.quantize_tree({"w": w}, "int4", method="mse", simulate=True),
        "low_precision": eqq.low_precision_training({"w": w}, "fp8"),
        "lora": eqq.loraify(eqq.quantize_tree({"w": w}, eqq.NF4(double_quant=True)), rank=2, key=jr.key(2)),
        "lora_scaled": eqq.arrays.LoraArray(ScaledArray(packed, jnp.ones(32)), values(2, 32), values(4, 2), 4.0, 1),
    }


def _steps(model: Any, optimizer: Any, loss: Callable[[Any], jax.Array]) -> Any:
    """A model and the state of its optimizer after two steps."""
    with jax.numpy_dtype_promotion("standard"):  # which optax needs
        state = optimizer.init(model)
        for _ in range(2):
            updates, state = optimizer.update(eqq.filter_grad(loss)(model), state, model)
            model = eqq.apply_updates(model, updates)
    return {"model": model, "state": state, "step": 2}


def _squares(model: Any) -> jax.Array:
    return jnp.sum(jnp.square(values(3, 70) @ model["w"].T + model["b"][None]))


def _floats() -> Any:
    return {"w": values(4, 70), "b": values(4)}


def masters() -> Any:
    model = eqq.quantize_tree(_floats(), "int4")
    return _steps(model, eqq.float_masters(optax.adam(1e-2), key=jr.key(3)), _squares)


def moments() -> Any:
    return _steps(_floats(), eqq.quantize_state(optax.adamw(1e-2), min_size=1), _squares)


def delayed() -> Any:
    model = eqq.low_precision_training(_floats(), "fp8", delayed=True, stochastic=False)
    return _steps(model, eqq.delayed_scaling(optax.adam(1e-2), history=3), _squares)


def caches() -> Any:
    """Caches with a token more than a window."""
    each = {
        "tokens": eqq.QuantizedCache.empty((2, 8, 32), "int8", "int4"),
        "channels": eqq.QuantizedCache.empty((2, 128, 4), "int4", per_channel=True, window=128),
        "floats": eqq.QuantizedCache.empty((2, 8, 4), None),
    }
    new = lambda cache: (cache.window + 1) if cache.window and cache.window < cache.context else 5
    return {
        name: cache.append(values(2, new(cache), size), values(2, new(cache), size)[::-1])
        for name, cache in each.items()
        if (size := cache.values.shape[-1])
    }


TREES: dict[str, Callable[[], Any]] = {
    **{f"formats_{family}": formats_of(family) for family in sorted({family_of(f) for f, *_ in FORMATS.values()})},
    "leaves": leaves,
    "layouts": layouts,
    "wrappers": wrappers,
    "masters": masters,
    "moments": moments,
    "delayed": delayed,
    "caches": caches,
}


# Files for other libraries


def _arrays(formats: dict[str, eqq.extend.AbstractFormat], *shape: int) -> Callable[[], dict[str, Any]]:
    packed = lambda: {f"{name}.weight": eqq.quantize(values(*shape), format) for name, format in formats.items()}
    return lambda: {**packed(), "norm.weight": values(5), "norm.bias": values(3).astype(jnp.bfloat16)}


def _act_order() -> dict[str, Any]:
    packed = eqq.quantize(values(16, 64), eqq.Int4(32))
    order = jnp.asarray(np.random.default_rng(2).permutation(64), jnp.uint32)
    return {"a.weight": PermutedArray(packed, order)}


_GGUF = {type(f).__name__: f for f, *_ in FORMATS.values() if family_of(f) == "gguf"}
_COMPRESSED = {
    "int4": eqq.Int4(16),
    "int4_affine": eqq.Int4(16, symmetric=False),
    "int3": eqq.Int3(None),
    "int5": eqq.Int5(16),
    "int6": eqq.Int6(None),
    "int8": eqq.Int8(),
    "int2": eqq.Int2(None, symmetric=False),
}

# By name: the dialect, the arrays, and more arguments of `eqq.io.write`.
WRITTEN: dict[str, tuple[str, Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "gguf": ("gguf", _arrays({**_GGUF, "MXFP4": eqq.MXFP4(), "TQ1_0": eqq.formats.TQ2_0()}, 2, 256), {}),
    "bitsandbytes_nf4": ("bitsandbytes", _arrays({"a": eqq.NF4(), "b": eqq.NF4()}, 2, 128), {}),
    "bitsandbytes_nested": ("bitsandbytes", _arrays({"a": eqq.NF4(32, double_quant=True)}, 3, 64), {}),
    "bitsandbytes_fp4": (
        "bitsandbytes",
        _arrays({"a": eqq.Codebook(np.array([*-FP4, 0, *FP4], np.float32))}, 2, 64),
        {},
    ),
    "bitsandbytes_int8": ("bitsandbytes", _arrays({"a": eqq.Int8()}, 3, 20), {}),
    "compressed_packed": ("compressed-tensors", _arrays(_COMPRESSED, 8, 32), {}),
    "compressed_fp8": ("compressed-tensors", _arrays({"a": eqq.FP8(), "b": eqq.FP8(block_size="tensor")}, 3, 20), {}),
    "compressed_mxfp4": ("compressed-tensors", _arrays({"a": eqq.MXFP4()}, 3, 64), {}),
    "fp8": ("fp8", _arrays({"a": eqq.FP8(block_size=(2, 16))}, 3, 20), {}),
    "gptq_2": ("gptq", _arrays({"a": eqq.Int2(32)}, 32, 64), {}),
    "gptq_4": ("gptq", _arrays({"a": eqq.Int4(32, symmetric=False)}, 16, 64), {}),
    "gptq_8": ("gptq", _arrays({"a": eqq.Int8(16)}, 4, 64), {}),
    "gptq_act_order": ("gptq", _act_order, {}),
    "modelopt": ("modelopt", _arrays({"a": eqq.NVFP4(), "b": eqq.FP8(block_size="tensor")}, 3, 32), {}),
    "mlx": ("mlx", _arrays({f"a{bits}": eqq.formats.MLX(bits, 32) for bits in (2, 3, 4, 5, 6, 8)}, 2, 64), {}),
    "mlx_mxfp4": ("mlx", _arrays({"a": eqq.MXFP4()}, 2, 64), {}),
    "mlx_mxfp8": ("mlx", _arrays({"a": eqq.MXFP8()}, 2, 64), {}),
}
WRITTEN["gguf"][2].update(types={"TQ1_0.*": "TQ1_0"}, metadata={"general.architecture": "llama", "n": 3, "t": ["a"]})


# What files hold


def contents(tree: Any) -> dict[str, np.ndarray]:
    """The values of all leaves as plain arrays by path, and `about`: dtypes, and the names of our classes."""
    out: dict[str, np.ndarray] = {}
    dtypes: dict[str, str] = {}
    for leaf in named_leaves(tree, eqq.is_quantized):
        x = leaf.value
        if eqq.is_quantized(x):
            codes = x.codes if isinstance(x.format, AbstractVectorFormat) else eqq.unpack(x)
            parts = {"codes": codes, "scale": x.scale, "zero_point": x.zero_point, "offset": x.offset}
            parts = {f"{leaf.path}:{name}": part for name, part in parts.items() if part is not None}
            parts[f"{leaf.path}:values"] = x.dequantize()
        elif callable(x):
            continue
        else:
            parts = {leaf.path: x}
        dtypes[leaf.path] = str(x.dtype) if hasattr(x, "dtype") else type(x).__name__
        out |= {path: plain(part) for path, part in parts.items()}
    about = {"dtypes": dtypes, "classes": sorted({*classes(tree)})}
    return {**out, "about": np.asarray(json.dumps(about, sort_keys=True))}


def plain(x: Any) -> np.ndarray:
    """An array of a dtype that NumPy has. Narrow floats and integers are exact in float32."""
    if isinstance(x, int) and not isinstance(x, bool):
        return np.asarray(str(x))
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jr.key_data(x)
    x = np.asarray(x)
    return x if x.dtype.isbuiltin == 1 or x.dtype.kind == "U" else x.astype(np.float32)


def classes(x: Any) -> Iterator[str]:
    """The names of the classes of this package of which a tree is made: arrays, formats, methods, states."""
    if isinstance(x, (dict, list, tuple)):
        children = x.values() if isinstance(x, dict) else x
    elif dataclasses.is_dataclass(x):
        children = vars(x).values()
    else:
        return
    if type(x).__module__.startswith("eqquant."):
        yield type(x).__name__
    for child in children:
        yield from classes(child)


def write_all(folder: Path) -> None:
    """Writes all files, with what they hold beside them. The same bytes each time."""
    folder.mkdir(parents=True)
    for name, make in TREES.items():
        tree = make()
        eqq.save(folder / f"{name}.safetensors", tree)
        np.savez_compressed(folder / f"{name}.npz", **contents(tree))
    shards = layouts()
    with mock.patch("secrets.token_hex", lambda n: "0" * 2 * n):
        eqq.save(folder / "shards", shards, shard_nbytes=200)
    np.savez_compressed(folder / "shards.npz", **contents(shards))
    eqx.tree_serialise_leaves(folder / "layouts.eqx", shards, eqq.serialise_filter_spec, is_leaf=eqq.is_quantized)
    for name, (dialect, make, options) in WRITTEN.items():
        path = folder / (f"{name}.gguf" if dialect == "gguf" else name)
        eqq.io.write(path, make(), dialect, **options)
        checkpoint = eqq.io.open(path)
        np.savez_compressed(folder / f"{name}.npz", **contents({key: checkpoint[key] for key in checkpoint}))


if __name__ == "__main__":
    write_all(FOLDER / eqq.__version__)
