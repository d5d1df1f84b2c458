"""The quantized matmul: the rules of its primitive, and the function that users call.

One primitive, `x(*batch, m, k) . w(*batch, n, k)^T`, where `x` is float and `w` quantized; with `transpose`,
`x(*batch, m, n) . w(*batch, n, k)`. It is linear in `x`, so its tangent is itself and its transpose is itself with the
flag flipped; a `custom_vjp` would give up forward mode. `_dispatch.py` says what computes it.
"""

import dataclasses
import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from .. import _compat
from .._array.array import QuantizedArray
from .._array.primitive import quantized_matmul_p
from . import dispatch
from .partition import partitioned
from .problem import MatmulProblem, Target


def _abstract(x: Any, *leaves: Any, treedef: Any, transpose: bool, **params: Any) -> jax.core.ShapedArray:
    del params
    *batch, n, k = jtu.tree_unflatten(treedef, leaves).shape
    if x.shape[-1] != (n if transpose else k) or list(x.shape[:-2]) != batch:
        raise ValueError(f"quantized_matmul: shapes {x.shape} and {(*batch, n, k)} do not fit ({transpose=}).")
    return x.update(shape=(*x.shape[:-1], k if transpose else n))


def _run(
    target: Target,
    x: Array,
    *leaves: Array,
    treedef: Any,
    transpose: bool,
    precision: Any,
    implementation: str | None,
    devices: int = 1,
) -> Array:
    def run(x: Array, w: QuantizedArray) -> Array:
        n, k = w.shape[-2:]
        problem = MatmulProblem(x.shape[-2], n, k, jnp.dtype(x.dtype), w.format, transpose, precision)
        name, _ = dispatch.choose(target, problem, implementation)
        return dispatch.run(x, w, problem, target, name)

    # A master is where gradients go. It has no part in the value.
    w = dataclasses.replace(jtu.tree_unflatten(treedef, leaves), master=None)
    return run(x, w) if devices == 1 else partitioned(run, x, w, transpose=transpose)


def _lower(platform: str, context: Any, *args: Any, **params: Any) -> Any:
    devices = _compat.num_devices(context)
    why_none = {"cpu": _compat.no_cpu_kernels, "cuda": _compat.no_gpu_kernels}.get(platform, lambda _: None)
    no_kernels = why_none(context)
    if platform == "tpu" and devices > 1:
        # The compiler for TPUs does not call back to ask how an operation is divided, and does not divide kernels. It
        # divides `xla`, which is all operations that it knows.
        devices, no_kernels = 1, "the compiler for TPUs does not divide kernels among devices; in `shard_map` they run"
    target = Target(platform, _compat.device_kind(context), _compat.compute_capability(context), no_kernels)
    run = ft.partial(_run, target, devices=devices)
    return mlir.lower_fun(run, multiple_results=False)(context, *args, **params)


@ft.cache
def _jitted(**params: Any) -> Callable[..., Array]:
    return jax.jit(ft.partial(quantized_matmul_p.bind, **params))


def _impl(*args: Array, **params: Any) -> Array:
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        platform = next(iter(args[0].devices())).platform
        return _run(Target("cuda" if platform == "gpu" else str(platform)), *args, **params)
    return _jitted(**params)(*args)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    (x, *leaves), (dx, *d_leaves) = primals, tangents
    bind = ft.partial(quantized_matmul_p.bind, **params)
    y = bind(x, *leaves)
    dys = [] if type(dx) is ad.Zero else [bind(dx, *leaves)]
    # Of the weight only a master has a tangent; every other leaf is an unsigned integer.
    d_master = jtu.tree_unflatten(params["treedef"], d_leaves).master
    if d_master is not None and type(d_master) is not ad.Zero:
        dw = d_master.astype(x.dtype)
        dw = dw if params["transpose"] else jnp.swapaxes(dw, -1, -2)
        dys.append(jnp.matmul(x, dw, precision=params["precision"]))
    if not dys:
        return y, ad.Zero.from_primal_value(y)  # pyright: ignore[reportAttributeAccessIssue]
    return y, ft.reduce(ad.add_jaxvals, dys)


def _transpose(dy: Any, x: Any, *leaves: Any, transpose: bool, **params: Any) -> list[Any]:
    del x
    nothing = [None] * len(leaves)
    if type(dy) is ad.Zero:
        return [None, *nothing]
    return [quantized_matmul_p.bind(dy, *leaves, transpose=not transpose, **params), *nothing]


def _batch(args: Sequence[Any], dims: Sequence[Any], *, treedef: Any, transpose: bool, **params: Any) -> Any:
    (x, *leaves), (x_dim, *leaf_dims) = args, dims
    bind = ft.partial(quantized_matmul_p.bind, treedef=treedef, transpose=transpose, **params)
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    if all(d is None for d in leaf_dims):
        # One weight for the whole batch: its examples become rows. A `vmap` of a matvec is one matmul.
        x = jnp.moveaxis(x, x_dim, -3)
        *batch, _, m, inner = x.shape
        y = bind(x.reshape(*batch, size * m, inner), *leaves)
        return y.reshape(*batch, size, m, y.shape[-1]), len(batch)
    leaves = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(leaves, leaf_dims, strict=True)
    ]
    if x_dim is None and x.ndim == 2 and not transpose:
        # One input for many weights: their rows become the rows of one weight.
        y = bind(x, *(a.reshape(-1, a.shape[-1]) for a in leaves))
        return y.reshape(x.shape[0], size, y.shape[1] // size if size else 0), 1
    x = jnp.broadcast_to(x, (size, *x.shape)) if x_dim is None else jnp.moveaxis(x, x_dim, 0)
    return bind(x, *leaves), 0


quantized_matmul_p.def_abstract_eval(_abstract)
quantized_matmul_p.def_impl(_impl)
ad.primitive_jvps[quantized_matmul_p] = _jvp
ad.primitive_transposes[quantized_matmul_p] = _transpose
batching.primitive_batchers[quantized_matmul_p] = _batch
_compat.lower_with_devices(quantized_matmul_p)
for _platform in ("cpu", "cuda", "rocm", "tpu"):
    mlir.register_lowering(quantized_matmul_p, ft.partial(_lower, _platform), platform=_platform)
mlir.register_lowering(quantized_matmul_p, ft.partial(_lower, "default"))
