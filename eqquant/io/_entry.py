"""Entries: descriptions of the leaves of a tree, apart from their values.

They say whether a saved leaf fits into a place.
"""

import dataclasses
import functools as ft
import math
from typing import Literal, TypeGuard

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding

from .._array.array import is_quantized, QuantizedArray
from .._array.codes import batch_of_scales
from .._array.value import AbstractArrayValue
from .._formats.base import AbstractFormat, has_offsets, has_zero_points, packed_length
from .._methods import AbstractMethod
from .._numerics.axes import as_axes, as_axis
from .._numerics.blocks import num_blocks
from .._tree.leaves import Leaf
from .._types import PyTree
from .._wrappers.permuted import PermutedArray
from ._tensors import NAME_OF


AnyArray = jax.Array | np.ndarray | np.generic | AbstractArrayValue
LeafKind = Literal["array", "numpy", "generic", "key", "quantized", "scalar"]
SCALARS: tuple[type, ...] = (bool, int, float, complex, str)
# Dtypes that safetensors lacks. They are stored as bytes.
_OTHER_DTYPES = (
    *("complex128", "int4", "uint4", "int2", "uint2", "float8_e4m3b11fnuz", "float8_e3m4", "float8_e4m3"),
    *("float6_e2m3fn", "float6_e3m2fn"),
)
DTYPE_NAMES = frozenset((*NAME_OF, *_OTHER_DTYPES))


@dataclasses.dataclass(frozen=True)
class Entry:
    """Describes a leaf.

    - `kind`: a JAX array, a NumPy array, a NumPy scalar, a PRNG key, a quantized array, or a Python scalar or string.
    - `dtype`: the (logical) dtype; for a Python scalar its type.
    - `gradient_of`: the dtype of that field of a quantized array, if it is not `None`.
    - `within`: the wrappers around it, such as an `eqquant.arrays.FakeQuantizedArray`: their fields that are no
        leaves, as text. `None` if no array is around it, or if that is not known.
    - `order`: of a `PermutedArray` its axis, and the shape of its order.
    """

    kind: LeafKind
    dtype: str
    shape: tuple[int, ...] = ()
    format: AbstractFormat | None = None
    axes: tuple[int, ...] = ()
    gradient_of: str | None = None
    within: str | None = None
    order: tuple[int, tuple[int, ...]] | None = None

    def __str__(self) -> str:
        return self._values() if self.within is None else f"{self._values()} within {self.within}"

    def _values(self) -> str:
        if self.kind == "scalar":
            return f"a Python {self.dtype}"
        array = f"{self.dtype}{list(self.shape)}"
        if self.kind == "key":
            return f"PRNG keys {array}"
        if self.format is None:
            return array
        axis = self.axes[0] if len(self.axes) == 1 else self.axes
        gradients = ", with `gradient_of`" if self.gradient_of else ""
        order = ", stored in another order" if self.order else ""
        return f"{array} in {_with_all_fields(self.format)}, axis={axis}{gradients}{order}"

    @property
    def struct(self) -> QuantizedArray | PermutedArray | jax.ShapeDtypeStruct:
        """The leaf that this describes, without values."""
        if self.format is None:
            return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))
        q = self.packed_struct()
        if self.order is None:
            return q
        axis, shape = self.order
        return jax.eval_shape(lambda q: PermutedArray(q, order=jnp.zeros(shape, jnp.uint32), axis=axis), q)

    def packed_struct(self, sharding: NamedSharding | None = None) -> QuantizedArray:
        """The quantized array of this entry without values, in the order in which it is stored."""
        if self.format is None:
            raise TypeError(f"Only a quantized array has packed parts. Got {self}.")
        gradient_of = None if self.gradient_of is None else jnp.dtype(self.gradient_of)
        return _structs(self.format, self.axes, self.shape, jnp.dtype(self.dtype), gradient_of, sharding)

    def goes_into(self, place: "Entry") -> bool:
        """Returns whether a saved leaf may stand where a template has `place`.

        A quantized array may stand in the place of a float one, and then keeps its format.
        """
        if None not in (self.within, place.within) and self.within != place.within:
            return False
        if place.kind == "quantized" or self.kind == "scalar" or place.kind == "scalar":
            return dataclasses.replace(self, within=place.within) == place
        if (self.kind == "key") != (place.kind == "key"):
            return False
        return (self.shape, self.dtype) == (place.shape, place.dtype)


def is_packed(x: object) -> TypeGuard[QuantizedArray | PermutedArray]:
    """Returns whether `x` is one leaf in a file: a quantized array.

    Its inputs may be stored in another order.
    """
    return is_quantized(x) or (isinstance(x, PermutedArray) and is_quantized(x.array))


def describe(x: object, path: str) -> Entry | None:
    """Describes a leaf: an array, a `jax.ShapeDtypeStruct` or a Python value.

    `None` for a leaf that is not saved.

    **Raises:**

    `TypeError` for an array of a dtype that no file can hold, `ValueError` for a damaged quantized array.
    """
    if is_packed(x):
        # `eqx.filter` leaves a quantized array without leaves, as it leaves `None` of an array.
        return _describe_quantized(x, path) if jtu.tree_leaves(x) else None
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct)) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return Entry("key", str(x.dtype), tuple(x.shape))
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic)):
        name = np.dtype(x.dtype).name
        if name not in DTYPE_NAMES:
            raise TypeError(f"{path} must hold numbers, booleans or PRNG keys. Got an array of {x.dtype}.")
        kind = "numpy" if isinstance(x, np.ndarray) else "generic" if isinstance(x, np.generic) else "array"
        return Entry(kind, name, tuple(x.shape))
    if type(x) in SCALARS:
        return Entry("scalar", type(x).__name__)
    return None


def describe_leaf(leaf: Leaf) -> Entry | None:
    """Describes a leaf of a tree, with the arrays of ours that it is a part of."""
    entry = describe(leaf.value, leaf.path)
    around = [_with_all_fields(node) for node in leaf.nodes if isinstance(node, AbstractArrayValue)]
    if entry is None or entry.kind == "scalar" or not around:
        return entry
    return dataclasses.replace(entry, within=", within ".join(reversed(around)))


def _with_all_fields(x: object) -> str:
    """Returns a description of `x` with all fields but leaves of the tree.

    Defaults are shown, since they may change.
    """
    if isinstance(x, np.dtype):
        return x.name
    if not isinstance(x, (AbstractFormat, AbstractMethod, AbstractArrayValue)):
        return repr(x)
    shown = []
    for field in dataclasses.fields(x):
        value = getattr(x, field.name)
        is_leaf = isinstance(x, AbstractArrayValue) and not field.metadata.get("static")
        arrays = (jax.Array, jax.ShapeDtypeStruct, np.ndarray)
        if isinstance(value, (AbstractFormat, AbstractMethod)) or not is_leaf:
            if not any(isinstance(leaf, arrays) for leaf in jtu.tree_leaves(value)):
                shown.append(f"{field.name}={_with_all_fields(value)}")
    return f"{type(x).__name__}({', '.join(shown)})"


def _describe_quantized(x: QuantizedArray | PermutedArray, path: str) -> Entry:
    q: QuantizedArray = x.array if isinstance(x, PermutedArray) else x
    gradient_of = None if q.gradient_of is None else np.dtype(q.gradient_of.dtype).name
    try:
        order = (x.axis, tuple(x.order.shape)) if isinstance(x, PermutedArray) else None
        entry = Entry("quantized", q.dtype.name, q.shape, q.format, as_axes(q.axis), gradient_of, order=order)
        expected, got = named_parts(entry.struct), named_parts(x)
        for name, part in expected.items():
            if name not in got or (got[name].shape, got[name].dtype) != (part.shape, part.dtype):
                raise ValueError(f"`{name}` must be {part.dtype}{list(part.shape)}. Got {got.get(name)}.")
    except (AttributeError, TypeError, ValueError) as e:
        raise ValueError(f"{path} must be a whole quantized array. {e}") from None
    return entry


_SCALE_BITS = {"float32": jnp.uint32, "float16": jnp.uint16, "bfloat16": jnp.uint16, "e8m0": jnp.uint8}


@ft.lru_cache(maxsize=1024)
def _structs(
    format: AbstractFormat,
    axes: tuple[int, ...],
    shape: tuple[int, ...],
    dtype: np.dtype,
    gradient_of: np.dtype | None = None,
    sharding: NamedSharding | None = None,
) -> QuantizedArray:
    """Returns a quantized array of `shape` whose leaves are `jax.ShapeDtypeStruct`s."""
    batch = tuple(n for i, n in enumerate(shape) if i - len(shape) not in axes)
    lengths = tuple(shape[a] for a in axes)

    def make(
        format: AbstractFormat,
        axis: int | tuple[int, ...],
        lengths: tuple[int, ...],
        dtype: np.dtype,
        batch: tuple[int, ...],
    ) -> QuantizedArray:
        length = math.prod(lengths)
        blocks, stored = num_blocks(length, format.block_size), batch_of_scales(format, batch)

        def per_block() -> jax.Array | QuantizedArray:
            if format.scale_format is None:
                return jnp.zeros((*stored, blocks), _SCALE_BITS[format.scale_dtype])
            return make(format.scale_format, -1, (blocks,), np.dtype(np.float32), stored)

        packed = (*stored, packed_length(format, blocks))
        zero_point = jnp.zeros(packed, jnp.uint8) if has_zero_points(format) else None
        codes = jnp.zeros((*batch, packed_length(format, length)), jnp.uint8)
        offset = per_block() if has_offsets(format) else None
        return QuantizedArray(codes, per_block(), zero_point, format, axis, lengths, dtype, offset_bits=offset)

    def whole() -> QuantizedArray:
        q = make(format, as_axis(axes), lengths, dtype, batch)
        floats = None if gradient_of is None else jnp.zeros((*batch, math.prod(lengths)), gradient_of)
        return dataclasses.replace(q, gradient_of=floats, logical_sharding=sharding)

    return jax.eval_shape(whole)


def named_parts(q: PyTree) -> dict[str, PyTree]:
    """Returns the leaves by name: `codes`, `scale_bits` and others.

    Nested ones are `scale_bits.codes` and so on.

    A `PermutedArray` has `order`, and these names after `array.`.
    """
    return {jtu.keystr(keys, simple=True, separator="."): leaf for keys, leaf in jtu.tree_flatten_with_path(q)[0]}
