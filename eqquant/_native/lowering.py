"""Lowers primitives to native code on CPU where it may run, and to XLA elsewhere."""

from collections.abc import Callable, Sequence

from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxtyping import Array

from .. import _compat


def lower_on_cpu(primitive: Primitive, native: Callable[..., Array], by_xla: Callable[..., Array]) -> None:
    """Registers how a primitive is computed: by `native` on CPU, and by `by_xla` elsewhere.

    On CPU, XLA computes it in programs that may not call the library: exported programs, and programs whose arrays the
    compiler partitions among devices.
    """

    def lower(context: mlir.LoweringRuleContext, *args: object, **params: object) -> Sequence[mlir.Value]:
        alone = _compat.num_devices(context) == 1 and not _compat.is_partly_manual(context)
        function = native if alone and not _compat.is_for_export(context) else by_xla
        return mlir.lower_fun(function, multiple_results=False)(context, *args, **params)

    _compat.lower_with_devices(primitive)
    mlir.register_lowering(primitive, mlir.lower_fun(by_xla, multiple_results=False))
    mlir.register_lowering(primitive, lower, platform="cpu")
