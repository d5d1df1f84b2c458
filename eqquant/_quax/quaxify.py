"""`quaxify`: a function whose products of quantized arrays are quantized matmuls."""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax.tree_util as jtu
import quax

from .._types import PyTree
from .multiply import MultipliedArray
from .trace import evaluate


_Function = TypeVar("_Function", bound=Callable[..., PyTree])


def quaxify(fn: _Function, /, filter_spec: PyTree = True) -> _Function:
    """Makes a function take quantized arrays, by [Quax](https://docs.kidger.site/quax/).

    Inside the function, every `jax.lax.dot_general`, and so `jnp.matmul` and `jnp.einsum`, uses the quantized matmul
    where the dimensions allow it. Transposes, reshapes, slices and concatenations stay quantized where that is exact.
    Everything else dequantizes, as do derivatives of functions with a `custom_vjp` or `custom_jvp`.

    !!! Example

        ```python
        f = eqq.quaxify(lambda w, x: jnp.einsum("oi,bi->bo", w, x))
        y = f(q, x)
        ```

    It differs from `quax.quaxify` in three ways: rules apply whichever operand is quantized; functions with a
    `custom_jvp` or `custom_vjp` take packed arrays; and so do pytrees whose nodes can be made only under a trace, such
    as the state of a Flax NNX module.

    **Arguments:**

    - `fn`: the function to transform.
    - `filter_spec`: selects the arguments that Quax sees; by default, all of them.

    **Returns:**

    A function of the same arguments, each of which may hold a [`eqquant.QuantizedArray`][].
    """
    return eqx.module_update_wrapper(_Quaxified(fn, filter_spec))  # pyright: ignore[reportReturnType]


class _Quaxified(eqx.Module):
    fn: Callable[..., PyTree]
    filter_spec: PyTree

    @property
    def __wrapped__(self) -> Callable[..., PyTree]:
        return self.fn

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        # Some nodes can be made only under a trace: pass leaves, and unflatten inside.
        arguments = (self.fn, args, kwargs)
        leaves, treedef = jtu.tree_flatten(arguments, is_leaf=_is_value)
        selected = None
        if self.filter_spec is not True:
            chosen = eqx.filter(arguments, self.filter_spec, is_leaf=_is_value)
            chosen = treedef.flatten_up_to(chosen)
            selected = [_is_value(x) for x in chosen]
        out_treedef = None

        def call_on_leaves(*leaves: PyTree) -> list[PyTree]:
            nonlocal out_treedef
            fn, args, kwargs = jtu.tree_unflatten(treedef, leaves)
            out, out_treedef = jtu.tree_flatten(fn(*args, **kwargs))
            return out

        out = evaluate(call_on_leaves, *leaves, selected=selected)
        out = [x.dequantize() if isinstance(x, MultipliedArray) else x for x in out]
        return jtu.tree_unflatten(out_treedef, out)

    def __get__(self, instance: object, owner: type | None) -> Callable[..., PyTree]:
        return self if instance is None else eqx.Partial(self, instance)


def _is_value(x: object) -> bool:
    return isinstance(x, quax.Value)
