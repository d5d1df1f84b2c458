"""The rules of the primitive that dequantizes.

On CPU the native kernels decode codes of fewer than eight bits several times faster than XLA, whose loop handles one
code at a time. Everywhere else it is operations of XLA: on other platforms, in exported programs, and where the
compiler divides the array among devices.
"""

from typing import Any

import jax
import jax.core
import jax.tree_util as jtu
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from .. import _compat
from .._array.array import clips, dense_rows, QuantizedArray
from .._array.primitive import dequantize_p
from .._native import library
from .._numerics.primitives import along_first, compiled, without_tangent
from . import dispatch
from .problem import has_plain_scales, layout_of


def _abstract(*args: Any, tree: Any) -> jax.core.ShapedArray:
    q = jtu.tree_unflatten(tree, args)
    return args[0].update(shape=q.shape, dtype=q.dtype)


def _by_xla(*args: Array, tree: Any) -> Array:
    return dense_rows(jtu.tree_unflatten(tree, args))


def _on_cpu(*args: Array, tree: Any) -> Array:
    from .kernels import cpu

    q: QuantizedArray = jtu.tree_unflatten(tree, args)
    layout = layout_of(q.format, q._length, has_plain_scales(q))
    if cpu.decodes(layout, q.dtype) is not None or q.size == 0:
        return dense_rows(q)
    return cpu.decode(dispatch.stored_arrays(q), layout, q.dtype, clip=clips(q))


dequantize_p.def_abstract_eval(_abstract)
dequantize_p.def_impl(compiled(dequantize_p, _by_xla, ["tree"]))
ad.primitive_jvps[dequantize_p] = without_tangent(dequantize_p)
batching.primitive_batchers[dequantize_p] = along_first(dequantize_p)
_compat.lower_with_devices(dequantize_p)
mlir.register_lowering(dequantize_p, mlir.lower_fun(_by_xla, multiple_results=False))
mlir.register_lowering(dequantize_p, library.lowering(_on_cpu, _by_xla), platform="cpu")
