"""The one place that touches JAX's internals or asks which version of JAX is running.

Everything here degrades: where a JAX release moves a piece, results stay right and only become dense.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.core
import jax.numpy


_T = TypeVar("_T")

_ARRAY_METHODS = "jax._src.numpy.array_methods"


def jax_array_is_hidden() -> bool:
    """Whether the running `__jax_array__` lookup was made by `jax.Array.__matmul__`, or by Quax.

    `x @ q` reaches `jax.Array.__matmul__` first. That asks its right operand for `__jax_array__` before anything
    else, and would multiply by the dense weight; `QuantizedArray.__rmatmul__` would never run. Where the attribute
    is missing it returns `NotImplemented`, and Python goes on to `__rmatmul__`. So the attribute hides from that one
    caller. Frames outside JAX (Equinox, type checkers) are passed over to find it.

    Quax takes whatever has `__jax_array__` for a dense array, and would lose the quantized result of a rule.
    """
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("jax."):
            return module == _ARRAY_METHODS and frame.f_code.co_name == "_operator_matmul"
        if module.startswith("quax."):
            return True
        if not module.startswith(("eqquant.", "equinox.", "beartype", "jaxtyping")):
            return False
        frame = frame.f_back
    return False


def is_constant_of_trace(weight: Any, x: Any) -> bool:
    """Whether a function that is being staged, the body of a `scan` say, closes over `weight`, but not over `x`."""
    innermost = jax.numpy.zeros(())
    if not isinstance(innermost, jax.core.Tracer) or not isinstance(x, jax.core.Tracer):
        return False
    trace = getattr(innermost, "_trace", None)
    if not isinstance(weight, jax.core.Tracer):
        return True
    outer = getattr(weight, "_trace", None)
    return type(weight) is type(innermost) and outer is not trace and outer is not getattr(x, "_trace", None)


def accept_in_jax_lax(cls: type[_T], to_dense: Callable[[_T], Any]) -> bool:
    """Lets every `jax.lax` function take a `cls` operand, which it sees as `to_dense(operand)`.

    Primitives canonicalise each operand through a table keyed by type; this adds one entry to it. It is what makes
    `eqx.nn.Conv`, which hands its weight straight to `jax.lax.conv_general_dilated`, run unchanged.

    **Returns:**

    Whether this JAX has that table. Where it has not, `jax.lax` refuses a `cls` operand as it did before, and
    [`eqquant.quaxify`][] is the way.
    """
    try:
        from jax._src.dtypes import register_canonicalize_value_handler
    except ImportError:  # pragma: no cover
        return False
    register_canonicalize_value_handler(cls, to_dense)
    return True


def vary_alike(tree: _T) -> _T:
    """Inside `shard_map`, gives all arrays of a tree the type of an array that varies along the axes that any does."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    varying = [getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset()) for x in leaves]
    all_axes = frozenset().union(*varying)
    leaves = [
        jax.lax.pcast(x, tuple(all_axes - axes), to="varying") if axes != all_axes else x
        for x, axes in zip(leaves, varying, strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, leaves)


def result_like(x: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of a result of a kernel: inside `shard_map` it varies along the axes that `x` varies along."""
    varying = getattr(jax.typeof(x), "manual_axis_type", None)
    if varying is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def lower_with_devices(primitive: Any) -> None:
    """Has JAX tell the lowering of a primitive which devices a program is for. See `num_devices`."""
    try:
        from jax._src.dispatch import prim_requires_devices_during_lowering
    except ImportError:  # pragma: no cover
        return
    prim_requires_devices_during_lowering.add(primitive)


def num_devices(context: Any) -> int:
    """How many devices a program that is being lowered will be divided among by the compiler.

    **Returns:**

    One if it is not known, as when a program is exported, or if it is already written for each device, as in
    `shard_map`.
    """
    manual = getattr(getattr(context.module_context, "axis_context", None), "manual_axes", None)
    return 1 if manual else max(len(_devices(context)), 1)


def spec_on_mesh(sharding: Any, mesh: Any) -> Any:
    """The `PartitionSpec` of a sharding that the compiler chose.

    **Returns:**

    An empty one, for undivided, if the mesh cannot express it: the compiler also divides by parts of a mesh axis.
    """
    try:
        from jax._src.sharding_impls import parse_flatten_op_sharding

        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(0), mesh)[0]
    except (ImportError, ValueError):
        return jax.sharding.PartitionSpec()


def device_kind(context: Any) -> str:
    """The name of the device that a program is lowered for, `"NVIDIA H100 80GB HBM3"` say, or "" if it is not known."""
    device = _device(context)
    return getattr(device, "device_kind", "")


def compute_capability(context: Any) -> float:
    """That of the NVIDIA GPU that a program is lowered for; 9.0 if it is not known."""
    capability = getattr(_device(context), "compute_capability", None)
    try:
        return float(capability or 9.0)
    except ValueError:  # a GPU of another maker
        return 9.0


def no_cpu_kernels(context: Any) -> str | None:
    """Why native kernels cannot be part of a program that is lowered for CPU, or `None` if they can."""
    if _for_export(context):
        return "an exported program may not call a library that the machine it runs on may lack"
    return None


def no_gpu_kernels(context: Any) -> str | None:
    """Why Pallas-Triton kernels cannot be part of a program that is lowered for GPU, or `None` if they can."""
    try:
        from jax._src.pallas.triton.gpu_info import get_gpu_info  # pyright: ignore[reportMissingImports]
    except ImportError:
        get_gpu_info = None  # before JAX 0.11 nothing needs to be known
    if compute_capability(context) < 8:
        return f"the device has compute capability {compute_capability(context)}, and kernels need 8.0"
    if _for_export(context):
        return "an exported program may not hold kernels for GPUs, which JAX does not promise to keep"
    try:
        if get_gpu_info is not None:
            get_gpu_info()
    except Exception:  # which one it is differs between releases
        return "it is not known which GPU the program is for"
    return None


def _for_export(context: Any) -> bool:
    return getattr(getattr(context.module_context, "lowering_parameters", None), "for_export", False)


def _device(context: Any) -> Any:
    return next(iter(_devices(context)), None)


def _devices(context: Any) -> Any:
    return getattr(getattr(context.module_context, "axis_context", None), "device_assignment", None) or ()


def expect_triton_warning() -> None:
    """Has Python ignore that Pallas-Triton is deprecated: nothing that a user of ours could act on.

    JAX warns when it lowers a kernel, which may be in a callback of the compiler. So this is called when one is traced,
    just before, and no context manager.
    """
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


def __getattr__(name: str) -> Any:
    """`pallas_triton`, when it is asked for: importing it takes as long as importing JAX. `None` once JAX drops it."""
    if name != "pallas_triton":
        raise AttributeError(name)
    try:
        from jax.experimental.pallas import triton
    except ImportError:  # pragma: no cover
        return None
    return triton
