"""Which leaves of a model are weights, and which of their axes are inputs."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._array.array import is_quantized
from .._array.value import AbstractArrayValue
from .leaves import Leaf


def ineligible_reason(x: Any) -> str | None:
    """Why a leaf cannot be quantized, whatever the rules say, or `None`."""
    if is_quantized(x):
        return f"already quantized, to {x.format!r}"
    dtype = getattr(x, "dtype", None)
    if not isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) or dtype is None:
        return "not an array"
    if not jnp.issubdtype(dtype, jnp.floating):
        return "not floating point"
    return "a scalar" if x.ndim == 0 else None


def default_skip_reason(leaf: Leaf) -> str | None:
    """Why an eligible leaf is left alone by default, or `None` for a weight."""
    if isinstance(leaf.parent, AbstractArrayValue):
        return f"part of a {type(leaf.parent).__name__}"
    if _is_norm_parameter(leaf):
        return "a parameter of a normalisation layer"
    if _is_bias(leaf):
        return "a bias"  # whatever its shape: those of stacked layers have two dimensions
    if sum(length > 1 for length in leaf.value.shape) < 2:
        return "fewer than two dimensions longer than one"
    return None


_BIAS = re.compile(r"(^|_)bias")
_HOLDS_BIASES = re.compile(r"(^|_)bias(es)?(_?\d+)?$")
# `LayerNorm_0`, `input_layernorm`, `ln_f`, `norm_out`, `bn1`; but not `norm_proj`.
_NORM = re.compile(
    r"(norms?|(^|_)(ln|bn|gn))"
    r"(_?\d+|_(f|final|in|out|pre|post|before|after|attn|attention|self|cross|mlp|ffn|q|k|v))?$"
)
_NORM_PARAMETERS = {"scale", "weight", "bias", "offset", "gain", "gamma", "beta", "g", "b", "mean", "var"}
# They normalise a weight, or stand around a layer: what they hold are real weights.
_NO_NORM = re.compile(r"(weight|spectral|pre|post|add)_?norms?(_?\d+)?$")


def _is_bias(leaf: Leaf) -> bool:
    held = any(_HOLDS_BIASES.search(name.lower()) for name, _ in leaf.ancestors())
    return _BIAS.search(leaf.name.lower()) is not None or held


def _is_norm_parameter(leaf: Leaf) -> bool:
    # By its class, or where a tree of parameters is a dictionary, by what both are called. Flax calls weights `kernel`.
    if leaf.name == "kernel":
        return False
    named = leaf.name in _NORM_PARAMETERS
    return any(_is_norm_layer(node) or (named and _is_norm_name(name)) for name, node in leaf.ancestors())


def _is_norm_layer(node: Any) -> bool:
    name = type(node).__name__
    return name.endswith("Norm") and _NO_NORM.search(name.lower()) is None


def _is_norm_name(name: str) -> bool:
    return _NORM.search(name.lower()) is not None and _NO_NORM.search(name.lower()) is None


def convolved_axes(leaf: Leaf) -> tuple[int, ...] | None:
    """The input axes of a convolution of Equinox, all but the first; `None` for any other weight."""
    layer = leaf.parent
    is_convolution = isinstance(layer, (eqx.nn.Conv, eqx.nn.ConvTranspose))
    return tuple(range(-layer.num_spatial_dims - 1, 0)) if is_convolution else None


def input_axis(leaf: Leaf) -> tuple[int | tuple[int, ...], bool]:
    """The input axes of a weight, and whether they are known. Where they are not, the last one."""
    if (axes := convolved_axes(leaf)) is not None:
        return axes, True
    names = None if leaf.parent is leaf.layer else getattr(leaf.parent, "axes", None)
    if names is not None:
        axes = _named_axes(leaf, names)
    elif leaf.name == "kernel":
        axes = _kernel_axes(leaf)
    else:
        return -1, True  # the convention of Equinox
    if axes is None:
        return -1, False
    return (axes[0] if len(axes) == 1 else axes), True


def _named_axes(leaf: Leaf, axes: Any) -> tuple[int, ...] | None:
    """Of an array of haliax, the axes that its layer names as its inputs; a lookup takes whole embeddings."""
    inputs = [getattr(leaf.layer, field, None) for field in ("In", "Spatial")]
    if inputs[0] is None:
        inputs = [getattr(leaf.layer, "Embed", None)]
    wanted = [axis for group in inputs if group is not None for axis in _several(group)]
    name = lambda axis: axis if isinstance(axis, str) else getattr(axis, "name", None)
    names = [name(axis) for axis in axes]
    if not wanted or len(names) != leaf.value.ndim or any(name(axis) not in names for axis in wanted):
        return None
    return tuple(sorted(names.index(name(axis)) - len(names) for axis in wanted))


def _kernel_axes(leaf: Leaf) -> tuple[int, ...] | None:
    """Of a kernel of Flax, which is `(*stack, *inputs, *outputs)`, the axes of the inputs.

    The layer says how many there are. Without a layer, in a tree of parameters, the bias does: it is
    `(*stack, *outputs)`.
    """
    layer, shape = leaf.layer, tuple(leaf.value.shape)
    features = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    if None not in features:
        inputs, outputs = (len(_several(f)) for f in features)
        inputs += len(_several(getattr(layer, "kernel_size", ())))
        return tuple(range(-inputs - outputs, -outputs)) if inputs + outputs <= len(shape) else None
    if len(shape) == 2:
        return (-2,)
    bias = _bias_shape(layer)
    if bias is None or len(bias) >= len(shape):
        return None
    outputs = [n for n in range(1, len(bias) + 1) if bias == shape[: len(bias) - n] + shape[-n:]]
    inputs = len(shape) - len(bias)
    return tuple(range(-inputs - outputs[0], -outputs[0])) if len(outputs) == 1 else None


def _bias_shape(layer: Any) -> tuple[int, ...] | None:
    try:
        bias = jtu.tree_leaves(layer["bias"])
    except (TypeError, KeyError, IndexError):
        return None
    return tuple(np.shape(bias[0])) if len(bias) == 1 else None


def _several(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)
