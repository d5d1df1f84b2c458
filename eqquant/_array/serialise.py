"""Saving and loading with Equinox, so that a file cannot be read into arrays of another format.

Formats of equal widths store arrays of equal shapes and dtypes, and these are all that Equinox compares. So what the
bytes mean is written in front of them.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax.tree_util as jtu
import numpy as np

from .array import QuantizedArray


def serialise_filter_spec(f: Any, x: Any) -> None:
    """Saves one leaf for `equinox.tree_serialise_leaves`: a quantized array together with what its bytes mean.

    !!! Example

        ```python
        eqx.tree_serialise_leaves(path, model, eqq.serialise_filter_spec, is_leaf=eqq.is_quantized)
        model = eqx.tree_deserialise_leaves(path, like, eqq.deserialise_filter_spec, is_leaf=eqq.is_quantized)
        ```

    Equinox's default saves and loads quantized arrays too, but only compares shapes and dtypes. Loading NF4 codes into
    a skeleton of `Int4` then gives wrong values without an error.

    **Arguments:**

    - `f`: the file, opened for writing bytes.
    - `x`: a [`eqquant.QuantizedArray`][], or any other leaf, which is saved as Equinox does by default.

    **Returns:**

    Nothing.
    """
    if isinstance(x, QuantizedArray):
        np.save(f, np.asarray(_meaning(x)))
        for leaf in jtu.tree_leaves(x):
            eqx.default_serialise_filter_spec(f, leaf)
    else:
        eqx.default_serialise_filter_spec(f, x)


def deserialise_filter_spec(f: Any, x: Any) -> Any:
    """Loads one leaf that [`eqquant.serialise_filter_spec`][] saved, for `equinox.tree_deserialise_leaves`.

    **Arguments:**

    - `f`: the file, opened for reading bytes.
    - `x`: the leaf of the skeleton that is loaded into: a [`eqquant.QuantizedArray`][], of arrays or of
        `jax.ShapeDtypeStruct`s, or any other leaf.

    **Returns:**

    The loaded leaf.

    **Raises:**

    `ValueError` if the file holds an array of another format, quantized axis or shape, or none of ours. (Equinox adds
    the path of the leaf.)
    """
    if not isinstance(x, QuantizedArray):
        return eqx.default_deserialise_filter_spec(f, x)
    saved, expected = np.load(f), _meaning(x)
    if saved.dtype.kind != "U" or saved.ndim != 0:
        raise ValueError(
            f"The file must hold a quantized array here. Got {saved.dtype}{list(saved.shape)}. Save it with "
            "`filter_spec=eqq.serialise_filter_spec, is_leaf=eqq.is_quantized`, or load it with Equinox's default."
        )
    if str(saved) != expected:
        raise ValueError(
            f"The file must hold what the skeleton has: {expected}. Got {saved}. Quantize the skeleton as the saved "
            "model was, for instance within `eqx.filter_eval_shape`."
        )
    leaves, treedef = jtu.tree_flatten(x)
    return jtu.tree_unflatten(treedef, [eqx.default_deserialise_filter_spec(f, leaf) for leaf in leaves])


def _meaning(q: QuantizedArray) -> str:
    """What must agree for bytes to mean the same values."""
    # With defaults, which a later version may change.
    fields = ", ".join(f"{field.name}={getattr(q.format, field.name)!r}" for field in dataclasses.fields(q.format))
    return f"{type(q.format).__name__}({fields}), axis={q.axis}, lengths={q.lengths}, shape={q.shape}"
