"""Saves and loads quantized arrays with Equinox, and checks formats.

Equinox compares only shapes and dtypes, which different formats share. So a description of the format is saved before
the bytes.
"""

import dataclasses

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .._types import BinaryFile, PyTree
from .array import QuantizedArray


def serialise_filter_spec(f: BinaryFile, x: PyTree) -> None:
    """Saves a quantized array with its format, for `equinox.tree_serialise_leaves`.

    Saves any other leaf as Equinox does.

    !!! Example

        ```python
        eqx.tree_serialise_leaves(path, model, eqq.serialise_filter_spec, is_leaf=eqq.is_quantized)
        model = eqx.tree_deserialise_leaves(path, like, eqq.deserialise_filter_spec, is_leaf=eqq.is_quantized)
        ```

    Equinox's default also saves and loads quantized arrays, but compares only shapes and dtypes: it loads NF4 codes
    into a skeleton of `Int4`, with wrong values and without an error.

    **Arguments:**

    - `f`: the file, opened for writing bytes.
    - `x`: a [`eqquant.QuantizedArray`][], or any other leaf, which is saved as Equinox does by default.

    **Returns:**

    Nothing.
    """
    if isinstance(x, QuantizedArray):
        np.save(f, np.asarray(_describe_leaf(x)))
        for leaf in jtu.tree_leaves(x):
            eqx.default_serialise_filter_spec(f, leaf)
    else:
        eqx.default_serialise_filter_spec(f, x)


def deserialise_filter_spec(f: BinaryFile, x: PyTree) -> PyTree:
    """Loads a leaf for `equinox.tree_deserialise_leaves`.

    The inverse of [`eqquant.serialise_filter_spec`][].

    **Arguments:**

    - `f`: the file, opened for reading bytes.
    - `x`: the leaf of the skeleton to load into: a [`eqquant.QuantizedArray`][], of arrays or of
        `jax.ShapeDtypeStruct`s, or any other leaf.

    **Returns:**

    The loaded leaf.

    **Raises:**

    `ValueError` if the saved array has another format, quantized axis or shape, or is not quantized. (Equinox adds the
    path of the leaf.)
    """
    if not isinstance(x, QuantizedArray):
        return eqx.default_deserialise_filter_spec(f, x)
    saved, expected = np.load(f), _describe_leaf(x)
    if saved.dtype.kind != "U" or saved.ndim != 0:
        raise ValueError(
            f"The file must hold a quantized array here. Got {saved.dtype}{list(saved.shape)}. Save it with "
            "`filter_spec=eqq.serialise_filter_spec, is_leaf=eqq.is_quantized`, or load it with Equinox's default."
        )
    if str(saved) != expected:
        raise ValueError(
            f"The file must hold an array as in the skeleton: {expected}. Got {saved}. Quantize the skeleton as the "
            "saved model was, for instance within `eqx.filter_eval_shape`."
        )
    leaves, treedef = jtu.tree_flatten(x)
    return jtu.tree_unflatten(treedef, [eqx.default_deserialise_filter_spec(f, leaf) for leaf in leaves])


def _describe_leaf(q: QuantizedArray) -> str:
    """Describes everything on which the meaning of the bytes depends."""
    # Includes defaults, which a later version may change.
    fields = ", ".join(f"{field.name}={getattr(q.format, field.name)!r}" for field in dataclasses.fields(q.format))
    return f"{type(q.format).__name__}({fields}), axis={q.axis}, lengths={q.lengths}, shape={q.shape}"
