"""The rules of the primitive `quantized_matmul`: JVP, transpose, batching and lowering.

The primitive computes `x(*batch, m, k) . w(*batch, n, k)^T`, where `x` is float and `w` quantized; with `transpose`,
`x(*batch, m, n) . w(*batch, n, k)`. It is linear in `x`, so its JVP and its transpose are the primitive again (the
transpose flips the flag). A `custom_vjp` would lose forward mode. `dispatch.py` chooses the implementation.

Where `x` is quantized too, its rounding passes gradients straight through: the JVP is the primitive on the tangent of
`x`, which is float.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.interpreters import ad, batching, mlir
from jax.lax import PrecisionLike
from jaxtyping import Array

from .. import _compat
from .._array.array import QuantizedArray
from .._array.dense import allow_dense
from .._array.primitive import quantized_matmul_p, unflatten_operands
from .._numerics.primitives import batch_axis_size, jit_impl, move_batch_axis, Primal, Tangent
from .._types import PyTreeDef
from . import dispatch
from .partition import partition_matmul
from .problem import describe_matmul, TargetDevice
from .selected import SelectedArray


def _abstract_eval(
    *args: jax.core.ShapedArray, x_tree: PyTreeDef, w_tree: PyTreeDef, transpose: bool, **params: object
) -> jax.core.ShapedArray:
    del params
    x, w = unflatten_operands(args, x_tree, w_tree)
    *batch, n, k = w.shape
    if x.shape[-1] != (n if transpose else k) or list(x.shape[:-2]) != batch:
        raise ValueError(f"quantized_matmul: shapes {x.shape} and {(*batch, n, k)} do not fit ({transpose=}).")
    return args[0].update(shape=(*x.shape[:-1], k if transpose else n), dtype=x.dtype)


def _compute(
    target: TargetDevice,
    *args: Array,
    x_tree: PyTreeDef,
    w_tree: PyTreeDef,
    transpose: bool,
    precision: PrecisionLike,
    implementation: str | None,
    column_major: tuple[bool, bool],
    num_devices: int = 1,
) -> Array:
    x, w = unflatten_operands(args, x_tree, w_tree)
    # `gradient_of` does not affect the value.
    x, w = (dataclasses.replace(a, gradient_of=None) if isinstance(a, QuantizedArray) else a for a in (x, w))
    if isinstance(w, SelectedArray):
        w = dataclasses.replace(w, stack=dataclasses.replace(w.stack, gradient_of=None))
    if any(isinstance(length, int) and length == 0 for length in (*x.shape, *w.shape)):
        return jnp.zeros((*x.shape[:-1], w.shape[-1 if transpose else -2]), x.dtype)  # an empty sum
    describe = ft.partial(describe_matmul, transpose=transpose, precision=precision, column_major=column_major)
    with allow_dense():
        if num_devices == 1:
            return dispatch.run_implementation(x, w, describe(x, w), target, implementation)
        run = lambda x, w: dispatch.run_implementation(x, w, describe(x, w), target, implementation)
        w = w.gather() if isinstance(w, SelectedArray) else w
        return partition_matmul(run, x, w, transpose=transpose)  # pyright: ignore[reportArgumentType]


def _lower(platform: str, context: mlir.LoweringRuleContext, *args: object, **params: object) -> Sequence[mlir.Value]:
    num_devices, x_tree = _compat.num_devices(context), params["x_tree"]
    kernel_refusal = None
    if platform == "tpu" and num_devices > 1:
        # The TPU compiler does not support `custom_partitioning` (https://github.com/jax-ml/jax/issues/38196), and does
        # not partition kernels. It can partition the operations of `xla`.
        kernel_refusal = "the compiler for TPUs does not divide kernels among devices; in `shard_map` they run"
        num_devices = 1
    if num_devices > 1 and not jtu.treedef_is_leaf(x_tree):
        num_devices = 1
        kernel_refusal = "the compiler divides products of codes among devices, which kernels hide from it"
    if _compat.is_partly_manual(context):
        # The compiler would gather the operands of a kernel, and every device would compute the whole product.
        kernel_refusal = "in a `shard_map` over some axes of a mesh the compiler divides the product along the others"
    device = _compat.target_device(context)
    kind, capability = getattr(device, "device_kind", ""), _compat.compute_capability(device)
    target = TargetDevice(platform, kind, capability, kernel_refusal, _compat.is_for_export(context), compiles=True)
    run = ft.partial(_compute, target, num_devices=num_devices)
    return mlir.lower_fun(run, multiple_results=False)(context, *args, **params)


def _impl(*args: Array, **params: object) -> Array:
    device = next(iter(args[0].devices()))
    platform = "cuda" if device.platform == "gpu" else str(device.platform)
    return _compute(TargetDevice(platform, capability=_compat.compute_capability(device)), *args, **params)  # pyright: ignore[reportArgumentType]


def _jvp(primals: Sequence[Array], tangents: Sequence[Tangent], **params: object) -> tuple[Array, Tangent]:
    x, w = unflatten_operands(primals, params["x_tree"], params["w_tree"])
    dx, dw = unflatten_operands(tangents, params["x_tree"], params["w_tree"])
    y = quantized_matmul_p.bind(*primals, **params)
    # A quantized operand has one float leaf, `gradient_of`; only that has a tangent.
    x_is_quantized = not jtu.treedef_is_leaf(params["x_tree"])
    dx = dx.gradient_of if x_is_quantized else dx
    dys = []
    if dx is not None and not isinstance(dx, ad.Zero):
        # A chosen implementation that multiplies codes by codes cannot take floats.
        float_params = {"x_tree": jtu.tree_structure(0), "implementation": None} if x_is_quantized else {}
        dys.append(quantized_matmul_p.bind(dx.astype(x.dtype), *jtu.tree_leaves(w), **{**params, **float_params}))
    gradient_of = dw.stack.gradient_of if isinstance(dw, SelectedArray) else dw.gradient_of
    if gradient_of is not None and not isinstance(gradient_of, ad.Zero):
        dw_dense = gradient_of.astype(x.dtype)
        dw_dense = dw_dense if params["transpose"] else jnp.swapaxes(dw_dense, -1, -2)
        with allow_dense():
            values = x.dequantize() if x_is_quantized else x
        product = ft.partial(jnp.matmul, precision=params["precision"])  # pyright: ignore[reportArgumentType]
        selected = isinstance(w, SelectedArray)
        dys.append(_multiply_selected(product, values, dw_dense, w.index) if selected else product(values, dw_dense))
    if not dys:
        return y, _compat.zero_tangent(y)
    return y, ft.reduce(ad.add_jaxvals, dys)


def _multiply_selected(product: Callable[[Array, Array], Array], x: Array, stack: Array, index: Array) -> Array:
    """Returns `product(x, stack[index])`, and never copies more arrays than the stack holds."""
    if index.size <= stack.shape[0]:
        return product(x, stack[index])

    @jax.checkpoint
    def multiply_one(i: Array, w: Array) -> Array:
        return product(jnp.where((index == i)[..., None, None], x, jnp.zeros_like(x)), w)

    def add_one(y: Array, indexed: tuple[Array, Array]) -> tuple[Array, None]:
        return y + multiply_one(*indexed), None

    zeros = jnp.zeros((*x.shape[:-1], stack.shape[-1]), x.dtype)
    indices = jnp.arange(stack.shape[0], dtype=index.dtype)
    return jax.lax.scan(add_one, zeros, (indices, stack))[0]


def _transpose(
    cotangent: Tangent, *args: Primal, transpose: bool, column_major: tuple[bool, bool], **params: object
) -> list[Array | None]:
    no_gradients = [None] * (len(args) - 1)
    if isinstance(cotangent, ad.Zero):
        return [None, *no_gradients]
    flipped = {"transpose": not transpose, "column_major": column_major[::-1]}
    return [quantized_matmul_p.bind(cotangent, *args[1:], **flipped, **params), *no_gradients]


def _batch(
    args: Sequence[Array],
    dims: Sequence[int | None],
    *,
    x_tree: PyTreeDef,
    w_tree: PyTreeDef,
    transpose: bool,
    **params: object,
) -> tuple[Array, int]:
    bind = ft.partial(quantized_matmul_p.bind, x_tree=x_tree, w_tree=w_tree, transpose=transpose, **params)
    size = batch_axis_size(args, dims)
    count = x_tree.num_leaves
    x_leaves, w_leaves = list(zip(args, dims, strict=True))[:count], list(zip(args, dims, strict=True))[count:]
    if all(d is None for _, d in w_leaves):
        # All examples share the weight: they become rows, so a `vmap` of matvecs is one matmul.
        examples = [move_batch_axis(a, d, size, to=-3) for a, d in x_leaves]
        m = examples[0].shape[-2]
        rows = [jax.lax.reshape(a, (*a.shape[:-3], size * m, a.shape[-1])) for a in examples]
        y = bind(*rows, *(a for a, _ in w_leaves), column_major=(False, False))  # no longer column-major
        return jax.lax.reshape(y, (*y.shape[:-2], size, m, y.shape[-1])), y.ndim - 2
    selected = _batch_selections(w_leaves, w_tree, size)
    if selected is not None:
        return bind(*(move_batch_axis(a, d, size) for a, d in x_leaves), *selected), 0
    weights = [move_batch_axis(a, d, size) for a, d in w_leaves]
    if all(d is None for _, d in x_leaves) and args[0].ndim == 2 and not transpose:
        # All weights share the input: their rows become the rows of one weight.
        n = weights[0].shape[1]
        y = bind(*(a for a, _ in x_leaves), *(a.reshape(size * n, a.shape[-1]) for a in weights))
        return y.reshape(y.shape[0], size, n), 1
    return bind(*(move_batch_axis(a, d, size) for a, d in x_leaves), *weights), 0


def _batch_selections(w_leaves: Sequence[tuple[Array, int | None]], w_tree: PyTreeDef, size: int) -> list[Array] | None:
    """Returns the leaves of a batch of selections, or `None` if `w` is no selection."""
    w = jtu.tree_unflatten(w_tree, [a for a, _ in w_leaves])
    if not isinstance(w, SelectedArray):
        return None
    *stack, (index, dim) = w_leaves
    index = move_batch_axis(index, dim, size)
    if any(d is not None for _, d in stack):
        # Each example has a stack of its own: concatenate them, and offset the indices.
        stacks = [move_batch_axis(a, d, size) for a, d in stack]
        offset = jnp.arange(size, dtype=index.dtype) * stacks[0].shape[1]
        index = index + offset.reshape(-1, *[1] * (index.ndim - 1))
        return [*(a.reshape(-1, *a.shape[2:]) for a in stacks), index]
    return [*(a for a, _ in stack), index]


quantized_matmul_p.def_abstract_eval(_abstract_eval)
quantized_matmul_p.def_impl(
    jit_impl(
        quantized_matmul_p,
        _impl,
        ["x_tree", "w_tree", "transpose", "precision", "implementation", "column_major"],
        column_major=(False, False),  # outside `jit`, `x` is in memory by rows
    )
)
ad.primitive_jvps[quantized_matmul_p] = _jvp
ad.primitive_transposes[quantized_matmul_p] = _transpose
batching.primitive_batchers[quantized_matmul_p] = _batch
_compat.lower_with_devices(quantized_matmul_p)
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(quantized_matmul_p, ft.partial(_lower, _platform), platform=_platform)
mlir.register_lowering(quantized_matmul_p, ft.partial(_lower, "default"))
