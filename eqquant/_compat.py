"""The one module that uses internals of JAX, or depends on its version.

If a JAX release moves an internal, results stay correct: products only become dense.
"""

import functools as ft
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any, NamedTuple, TypeVar

import jax
import jax.core
import jax.extend
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, mlir
from jaxtyping import Array, ArrayLike, DTypeLike


_T = TypeVar("_T")


def _primitive(module: str, name: str) -> Primitive:
    """Returns a primitive of JAX, or an unused one if this release has it elsewhere.

    The rule of an unused primitive is never called, and operands become dense.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return Primitive(name)


jit_p = _primitive("jax._src.pjit", "jit_p")
name_p = _primitive("jax._src.ad_checkpoint", "name_p")
remat_p = _primitive("jax._src.ad_checkpoint", "remat_p")
stop_gradient_p = _primitive("jax._src.ad_util", "stop_gradient_p")
ragged_dot_general_p = _primitive("jax._src.lax.lax", "ragged_dot_general_p")

try:  # the trace of Quax, its tracer and its dense value
    from jax._src.core import TraceTag as TraceTag
    from quax._trace import _QuaxTrace as QuaxTrace, _QuaxTracer as QuaxTracer
    from quax._values import _DenseArrayValue
except ImportError:  # pragma: no cover
    TraceTag: Any = object  # `eqquant.quaxify` is that of Quax then
    QuaxTracer = _DenseArrayValue = QuaxTrace = TraceTag

_ARRAY_METHODS = "jax._src.numpy.array_methods"


def jax_array_is_hidden() -> bool:
    """Returns whether `jax.Array.__matmul__` or Quax is looking up `__jax_array__` now.

    `x @ q` calls `jax.Array.__matmul__` first (`_operator_matmul` in
    https://github.com/jax-ml/jax/blob/main/jax/_src/numpy/array_methods.py). It looks up `__jax_array__` of its right
    operand, and would multiply by the dense weight without ever calling `QuantizedArray.__rmatmul__`. If the attribute
    is missing, it returns `NotImplemented` and Python calls `__rmatmul__`. So the attribute hides from that one
    caller, which is found by skipping the frames of Equinox and type checkers.

    Quax treats any object with `__jax_array__` as a dense array, and would lose the quantized result of a rule.
    """
    for frame in _callers():
        module = frame.f_globals.get("__name__", "")
        if module.startswith("jax."):
            return module == _ARRAY_METHODS and frame.f_code.co_name == "_operator_matmul"
        if module.startswith("quax."):
            return True
        if not module.startswith(("eqquant.", "equinox.", "beartype", "jaxtyping")):
            return False
    return False


def _callers() -> Iterator[FrameType]:
    """Yields the frames on the stack, from the function that calls this one outwards."""
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_called_inside(cls: type) -> bool:
    """Returns whether a method of an instance of a class is on the stack."""
    return any(isinstance(f.f_locals.get("self"), cls) for f in _callers())


def is_constant_of_trace(weight: Array, x: Array) -> bool:
    """Returns whether a traced function, such as a `scan` body, closes over `weight` only."""
    innermost = jnp.zeros(())
    if not isinstance(innermost, jax.core.Tracer) or not isinstance(x, jax.core.Tracer):
        return False
    trace = getattr(innermost, "_trace", None)
    if not isinstance(weight, jax.core.Tracer):
        return True
    outer = getattr(weight, "_trace", None)
    return type(weight) is type(innermost) and outer is not trace and outer is not getattr(x, "_trace", None)


def accept_in_jax_lax(cls: type[_T], to_dense: Callable[[_T], Array]) -> bool:
    """Lets every `jax.lax` function take a `cls` operand, by converting it with `to_dense`.

    Primitives canonicalize each operand by a table keyed by type (`register_canonicalize_value_handler` in
    https://github.com/jax-ml/jax/blob/main/jax/_src/dtypes.py); this adds an entry. So `eqx.nn.Conv`, which passes its
    weight straight to `jax.lax.conv_general_dilated`, runs unchanged.

    **Returns:**

    Whether this JAX has that table. Without it, `jax.lax` refuses a `cls` operand: use [`eqquant.quaxify`][].
    """
    try:
        from jax._src.dtypes import register_canonicalize_value_handler
    except ImportError:  # pragma: no cover
        return False
    register_canonicalize_value_handler(cls, to_dense)
    return True


def open_jaxpr(program: ClosedJaxpr | Jaxpr) -> tuple[Jaxpr, list[Array]]:
    """Returns a traced program and its constants. JAX 0.12 has one class for both programs."""
    consts = getattr(program, "consts", ())
    jaxpr: Jaxpr = getattr(program, "jaxpr", program)  # pyright: ignore[reportAssignmentType]
    return jaxpr, [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in consts]


def inner_jaxpr(equation: JaxprEqn) -> tuple[Jaxpr, list[Array]]:
    """Returns the program that an equation calls, such as the body of a `jit`."""
    programs = (equation.params[name] for name in ("jaxpr", "call_jaxpr", "fun_jaxpr") if name in equation.params)
    return open_jaxpr(next(programs))


def result_shape(equation: JaxprEqn) -> tuple[int, ...]:
    """Returns the shape of the first result of an equation of a traced program."""
    return equation.outvars[0].aval.shape  # pyright: ignore[reportAttributeAccessIssue]


def bind_equation(equation: JaxprEqn, values: Sequence[ArrayLike]) -> list[Array]:
    """Returns the results of an equation of a traced program."""
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # separate functions before JAX 0.11
    result = equation.primitive.bind(*functions, *values, **params)
    return list(result) if equation.primitive.multiple_results else [result]


def call_in_shard_map(f: Callable[..., list[Array]], values: Sequence[Array], params: dict[str, Any]) -> list[Array]:
    """Calls a function of parts of arrays, as an equation of a `shard_map` does."""
    kept = {name: params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    return list(jax.shard_map(lambda *parts: tuple(f(*parts)), axis_names=params["newly_manual_axes"], **kept)(*values))


def scan_operands(operands: Sequence[_T], params: dict[str, Any]) -> tuple[list[_T], list[_T], list[_T]]:
    """Returns the operands of a `scan` as `consts`, `carry` and `xs`.

    Operands may be anything, such as one fact per array.
    """
    if "ft_in" in params:  # since JAX 0.11
        consts, carry, xs = (list(group.vals) for group in params["ft_in"].update(operands).unpack())
        return consts, carry, xs
    start = params["num_consts"]
    stop = start + params["num_carry"]
    return list(operands[:start]), list(operands[start:stop]), list(operands[stop:])


def scan_params(params: dict[str, Any], consts: int, carry: int, xs: int, ys: int) -> dict[str, Any]:
    """Returns the parameters of a `scan` with other counts of operands and outputs."""
    if "ft_in" not in params:
        return {**params, "num_consts": consts, "num_carry": carry}
    from jax._src import flattree  # pyright: ignore[reportAttributeAccessIssue]  # since JAX 0.11

    pack = lambda *counts: flattree.pack(tuple(map(flattree.nones, counts)))
    return {**params, "ft_in": pack(consts, carry, xs), "ft_out": pack(carry, ys)}


def trace_context() -> Hashable:
    """Returns what JAX's caches of traced functions depend on, besides functions and arguments."""
    try:
        from jax._src.config import trace_context as context
    except ImportError:  # pragma: no cover
        return object()  # equal to no other
    return context()


def varying_axes(x: Any) -> frozenset[str]:
    """Returns the mesh axes that an array varies along inside `shard_map`."""
    return getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", frozenset())


def vary_alike(tree: _T) -> _T:
    """Returns the arrays of a tree, all varying along the same mesh axes inside `shard_map`."""
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    varying = [varying_axes(x) for x in leaves]
    all_axes = frozenset().union(*varying)
    leaves = [
        jax.lax.pcast(x, tuple(all_axes - axes), to="varying") if axes != all_axes else x
        for x, axes in zip(leaves, varying, strict=True)
    ]
    return jax.tree_util.tree_unflatten(treedef, leaves)


def zero_tangent(y: Array) -> ad.Zero:
    """Returns the zero tangent of a value that is not differentiable."""
    return ad.Zero(jax.typeof(y).to_tangent_aval())


def result_like(x: Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Returns the result type of a kernel, with the varying mesh axes of `x`."""
    varying = getattr(jax.typeof(x), "manual_axis_type", None)
    if varying is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)


def lower_with_devices(primitive: Primitive) -> None:
    """Makes JAX pass the devices of a program to the lowering of `primitive`."""
    try:
        from jax._src.dispatch import prim_requires_devices_during_lowering
    except ImportError:  # pragma: no cover
        return
    prim_requires_devices_during_lowering.add(primitive)


def num_devices(context: mlir.LoweringRuleContext) -> int:
    """Returns the number of devices that the compiler will shard the program over.

    **Returns:**

    One if the count is unknown, as in export, or if the program is already written per device, as in `shard_map`.
    """
    manual = getattr(getattr(context.module_context, "axis_context", None), "manual_axes", None)
    return 1 if manual else max(len(_devices(context)), 1)


def is_partly_manual(context: mlir.LoweringRuleContext) -> bool:
    """Returns whether a program is in a `shard_map` over only some axes of a mesh."""
    axis_context = getattr(context.module_context, "axis_context", None)
    manual = getattr(axis_context, "manual_axes", None)
    sizes = axis_context.mesh.shape if axis_context is not None and manual else {}
    return any(size > 1 for name, size in sizes.items() if name not in manual)


def spec_on_mesh(sharding: jax.sharding.Sharding, mesh: jax.sharding.Mesh) -> jax.sharding.PartitionSpec:
    """Returns the `PartitionSpec` of a sharding that the compiler chose.

    **Returns:**

    An empty spec (not divided) if the mesh cannot express the sharding: the compiler may divide by part of a mesh axis.
    """
    try:
        from jax._src.sharding_impls import parse_flatten_op_sharding

        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(0), mesh)[0]
    except (ImportError, ValueError):
        return jax.sharding.PartitionSpec()


def target_device(context: mlir.LoweringRuleContext) -> Any:
    """Returns the first device that a program is compiled for, or `None` if unknown."""
    return next(iter(_devices(context)), None)


def compute_capability(device: Any) -> float:
    """Returns the compute capability of an NVIDIA GPU; 9.0 if unknown."""
    capability = getattr(device, "compute_capability", None)
    try:
        return float(capability or 9.0)
    except ValueError:  # not an NVIDIA GPU
        return 9.0


def pallas_backend(name: str) -> ModuleType | None:
    """Returns a backend of Pallas, such as `"triton"`, or `None` if JAX does not have it."""
    try:
        return importlib.import_module(f"jax.experimental.pallas.{name}")
    except ImportError:
        return None


def pallas_knows_gpu(backend: str) -> bool:
    """Returns whether a backend of Pallas can find out the target GPU, where it must."""
    try:
        information = importlib.import_module(f"jax._src.pallas.{backend}.gpu_info")
    except ImportError:
        return True  # it needs no such information, as before JAX 0.11
    try:
        information.get_gpu_info()
    except Exception:  # its type differs between releases
        return False
    return True


def is_for_export(context: mlir.LoweringRuleContext) -> bool:
    """Returns whether a program is exported, perhaps to run on another machine."""
    return getattr(getattr(context.module_context, "lowering_parameters", None), "for_export", False)


def _devices(context: mlir.LoweringRuleContext) -> Any:
    return getattr(getattr(context.module_context, "axis_context", None), "device_assignment", None) or ()


def make_function(jaxpr: Any) -> Callable[..., list[Any]]:
    """Returns a jaxpr without constants, closed or not, as a function."""
    closed = jax.extend.core.ClosedJaxpr
    return jax.extend.core.jaxpr_as_fun(jaxpr if isinstance(jaxpr, closed) else closed(jaxpr, ()))


def bind_checkpoint(f: Callable[..., list[Any]], args: list[Any], params: dict[str, Any]) -> list[Any]:
    """Calls a function under `jax.checkpoint`, with the parameters of its primitive."""
    try:
        from jax._src.interpreters.partial_eval import convert_constvars_jaxpr
    except ImportError:  # pragma: no cover
        return f(*args)  # saves all residuals

    jaxpr, consts = open_jaxpr(jax.make_jaxpr(f)(*args))
    return remat_p.bind(*consts, *args, jaxpr=convert_constvars_jaxpr(jaxpr), **params)


def is_inlined_early(inline: Any) -> bool:
    """Returns whether `jit` asks to be inlined when it is traced. A boolean before JAX 0.11."""
    return inline is True or getattr(inline, "name", "") == "JAX_EARLY"


def unwrap_quax(x: Any) -> Any:
    """Returns the array in a dense value of Quax, or any other value itself."""
    return x.materialise() if isinstance(x, _DenseArrayValue) else x


def find_quax_operation() -> str | None:
    """Returns the name of the primitive that Quax is evaluating, or `None`."""
    for frame in _callers():
        in_rules = frame.f_globals.get("__name__") in ("quax._trace", "eqquant._quax.trace")
        if in_rules and "primitive" in frame.f_locals:
            return str(frame.f_locals["primitive"])
    return None


class Line(NamedTuple):
    """A line of the user's code."""

    file: str
    number: int
    function: str


@ft.cache
def _library_folders() -> tuple[str, ...]:
    """Returns the folders of libraries, besides JAX and Python, that are not user code."""
    names = ("eqquant", "beartype", "equinox", "jaxtyping", "plum", "quax")
    found = (importlib.util.find_spec(name) for name in names)
    return tuple(os.path.dirname(spec.origin) + os.sep for spec in found if spec is not None and spec.origin)


def _is_user_file(file: str) -> bool:
    return not file.startswith(("<", *_library_folders()))


def find_line(equation: JaxprEqn) -> Line | None:
    """Returns the line of user code of an equation of a traced program; `None` if unknown."""
    return _first_line(equation.source_info.traceback)


def _first_line(traceback: Any) -> Line | None:
    try:
        from jax._src.source_info_util import user_frames
    except ImportError:  # pragma: no cover
        return None
    lines = (Line(frame.file_name, frame.start_line, frame.function_name) for frame in user_frames(traceback))
    return next((line for line in lines if _is_user_file(line.file)), None)


def current_line() -> Line | None:
    """Returns the line of user code that JAX runs or traces now; `None` if unknown.

    In a function under `jit`, it is the line inside the function, also when a transformation traces it again.
    """
    try:
        from jax._src.source_info_util import current, is_user_filename

        # For an equation that is evaluated again, this is the line of its first trace.
        if (found := _first_line(current().traceback)) is not None:
            return found
    except (ImportError, AttributeError, TypeError):  # pragma: no cover
        return None
    # JAX's own tracebacks end at a function under `jit`.
    for frame in _callers():
        code = frame.f_code
        if _is_user_file(code.co_filename) and is_user_filename(code.co_filename):
            return Line(code.co_filename, frame.f_lineno, code.co_name)
    return None
