"""Finds the weights among the leaves of a model, and their input axes."""

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from .._array.array import is_quantized
from .._array.value import AbstractArrayValue
from .._errors import name_type
from .._types import PyTree
from .._wrappers.base import AbstractWrapper
from .._wrappers.mapped import AbstractMappedArray
from .leaves import DenseArray, is_mapped, key_name, Leaf
from .roles import elementwise_role, role_by_name, role_by_place


def ineligible_reason(x: PyTree) -> str | None:
    """Returns why a leaf can never be quantized, or `None` if it can."""
    if is_quantized(x):
        return f"already quantized, to {x.format!r}"
    if not isinstance(x, DenseArray):
        return "not an array"
    if x.dtype == object:
        return "an array of objects: convert it by `x.astype(np.float32)`"
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return "not floating point"
    return "a scalar" if x.ndim == 0 else None


def no_matrix_reason(x: PyTree) -> str | None:
    """Returns why a leaf is no matrix of floats, quantized or not, or `None`."""
    if not is_quantized(x) and (reason := ineligible_reason(x)) is not None:
        return reason
    return "it has one dimension" if x.ndim < 2 else None


def default_skip_reason(leaf: Leaf) -> str | None:
    """Returns why an eligible leaf stays in float by default, or `None` for a weight.

    A weight is a matrix, or a stack of matrices, that a product may use. It is not part of another array, not state,
    not a bias and not a parameter of a norm (`place_reason`), and its name does not imply that a model adds it,
    exponentiates it or multiplies by it elementwise (`role_by_name`). Whether quantizing makes it smaller depends on
    its format: `eqquant._tree.sizes` decides that.
    """
    return place_reason(leaf) or role_by_name(leaf)


def place_reason(leaf: Leaf) -> str | None:
    """Returns why a leaf is not a weight by its place in the model or its shape, or `None`."""
    if (reason := part_reason(leaf) or role_by_place(leaf)) is not None:
        return reason
    if sum(length > 1 for length in leaf.value.shape) < 2:
        return "fewer than two dimensions longer than one"
    return None


def part_reason(leaf: Leaf, wrapper: type[AbstractWrapper] = AbstractMappedArray) -> str | None:
    """Returns which array a leaf is a part of, or `None`; `None` for the array in `wrapper`."""
    if not isinstance(leaf.parent, AbstractArrayValue):
        return None
    is_whole = isinstance(leaf.parent, wrapper) and key_name(leaf.keys[-1]) == "array"
    return None if is_whole else f"part of {name_type(leaf.parent)}"


def is_embedding(leaf: Leaf) -> bool:
    """Whether a leaf is the table of an embedding layer."""
    return type(leaf.layer).__name__ in ("Embedding", "Embed") or leaf.name == "embedding"


def use_without_product(leaf: Leaf) -> str | None:
    """Returns how a model uses a leaf that is in no product, or `None` if products use it."""
    return "looked up" if is_embedding(leaf) else elementwise_role(leaf)


def convolved_axes(leaf: Leaf) -> tuple[int, ...] | None:
    """Returns the input axes of a convolution `(*stack, out, in, *kernel_size)`, or `None`."""
    sizes, shape = getattr(leaf.parent, "kernel_size", None), tuple(getattr(leaf.value, "shape", ()))
    sizes = (sizes,) * (len(shape) - 2) if isinstance(sizes, int) else sizes
    if leaf.name != "weight" or not isinstance(sizes, Sequence) or not 0 < len(sizes) < len(shape) - 1:
        return None
    return tuple(range(-len(sizes) - 1, 0)) if shape[-len(sizes) :] == tuple(sizes) else None


def input_axis(leaf: Leaf) -> tuple[int | tuple[int, ...], bool]:
    """Returns the input axes of a weight (else the last axis), and whether they are known."""
    if (axes := convolved_axes(leaf)) is not None:
        return axes, True
    if is_mapped(leaf):
        return leaf.parent.axis, True
    names = None if leaf.parent is leaf.layer else getattr(leaf.parent, "axes", None)
    if names is not None:
        axes = _find_haliax_axes(leaf, names)
    elif leaf.name == "kernel":
        axes = _find_kernel_axes(leaf)
    else:
        return -1, True  # Equinox convention: the inputs are last
    if axes is None:
        return -1, False
    return (axes[0] if len(axes) == 1 else axes), True


def _find_haliax_axes(leaf: Leaf, axes: Iterable[object]) -> tuple[int, ...] | None:
    """Returns the input axes of a haliax array; for an embedding, the embedding axes."""
    inputs = [getattr(leaf.layer, field, None) for field in ("In", "Spatial")]
    if inputs[0] is None:
        inputs = [getattr(leaf.layer, "Embed", None)]
    wanted = [axis for group in inputs if group is not None for axis in _as_tuple(group)]
    name = lambda axis: axis if isinstance(axis, str) else getattr(axis, "name", None)
    names = [name(axis) for axis in axes]
    if not wanted or len(names) != leaf.value.ndim or any(name(axis) not in names for axis in wanted):
        return None
    return tuple(sorted(names.index(name(axis)) - len(names) for axis in wanted))


def _find_kernel_axes(leaf: Leaf) -> tuple[int, ...] | None:
    """Returns the input axes of a Flax kernel, whose shape is `(*stack, *inputs, *outputs)`.

    The layer gives the number of input axes. In a tree of parameters, without a layer, it follows from the bias, whose
    shape is `(*stack, *outputs)`.
    """
    layer, shape = leaf.layer, tuple(leaf.value.shape)
    features = getattr(layer, "in_features", None), getattr(layer, "out_features", None)
    if None not in features:
        inputs, outputs = (len(_as_tuple(f)) for f in features)
        inputs += len(_as_tuple(getattr(layer, "kernel_size", ())))
        return tuple(range(-inputs - outputs, -outputs)) if inputs + outputs <= len(shape) else None
    if len(shape) == 2:
        return (-2,)
    bias = _bias_shape(layer)
    if bias is None or len(bias) >= len(shape):
        return None
    outputs = [n for n in range(1, len(bias) + 1) if bias == shape[: len(bias) - n] + shape[-n:]]
    inputs = len(shape) - len(bias)
    return tuple(range(-inputs - outputs[0], -outputs[0])) if len(outputs) == 1 else None


def _bias_shape(layer: PyTree) -> tuple[int, ...] | None:
    try:
        bias = jtu.tree_leaves(layer["bias"])
    except (TypeError, KeyError, IndexError):
        return None
    return tuple(np.shape(bias[0])) if len(bias) == 1 else None


def _as_tuple(x: object) -> tuple[object, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def unmappable_reason(leaf: Leaf) -> str | None:
    """Returns why the inputs of a leaf cannot be transformed, or `None`."""
    if (reason := _no_inputs_reason(leaf)) is not None:
        return reason
    return None if input_axis(leaf)[0] in (-1, -2) else "its inputs are not one of its last two axes"


def _no_inputs_reason(leaf: Leaf) -> str | None:
    if (reason := ineligible_reason(leaf.value)) is not None:
        return reason
    if convolved_axes(leaf) is not None:
        return "a convolution, whose inputs have several axes"
    return "fewer than two dimensions, so it has no inputs" if leaf.value.ndim < 2 else None


def mapped_axis(leaf: Leaf, axis: int | None = None) -> int | None:
    """Returns the input axis of a weight, given or inferred; `None` if it has none."""
    if _no_inputs_reason(leaf) is not None:
        return None
    found = input_axis(leaf)[0] if axis is None else axis
    return found if found in (-1, -2) else None


def unmapped_reason(leaf: Leaf) -> str | None:
    """Returns why the inputs of a weight are not transformed by default, or `None`."""
    if is_mapped(leaf):
        return "its inputs are transformed already"
    return "an embedding" if is_embedding(leaf) else default_skip_reason(leaf)
