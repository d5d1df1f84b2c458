"""`quaxify`: a function whose products of quantized arrays are quantized matmuls."""

from collections.abc import Callable
from typing import TypeVar

import equinox as eqx
import jax.tree_util as jtu
import quax

from .._array.value import AbstractArrayValue
from .._types import PyTree


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

    The same as `quax.quaxify`, except that it also takes pytrees whose nodes can only be made under a JAX trace, like
    the state of a Flax NNX module.

    **Arguments:**

    - `fn`: the function to transform.
    - `filter_spec`: selects the arguments that Quax sees; by default, all of them.

    **Returns:**

    A function of the same arguments, each of which may hold a [`eqquant.QuantizedArray`][].
    """
    if filter_spec is not True:
        return quax.quaxify(fn, filter_spec)
    return eqx.module_update_wrapper(_Quaxified(fn))  # pyright: ignore[reportReturnType]


class _Quaxified(eqx.Module):
    fn: Callable[..., PyTree]

    @property
    def __wrapped__(self) -> Callable[..., PyTree]:
        return self.fn

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        # Some nodes can only be made under a trace, and Quax maps over its arguments outside of one (`_Quaxify` in
        # https://github.com/nstarman/quax/blob/main/src/quax/_quaxify.py). So pass it leaves, and make nodes inside.
        leaves, treedef = jtu.tree_flatten((self.fn, args, kwargs), is_leaf=_is_value)
        out_treedef = None

        def call_on_leaves(leaves: list[PyTree]) -> list[PyTree]:
            nonlocal out_treedef
            fn, args, kwargs = jtu.tree_unflatten(treedef, leaves)
            out, out_treedef = jtu.tree_flatten(fn(*args, **kwargs), is_leaf=_is_value)
            return out

        out = map(_dequantize_deferred, quax.quaxify(call_on_leaves)(leaves))
        return jtu.tree_unflatten(out_treedef, out)

    def __get__(self, instance: object, owner: type | None) -> Callable[..., PyTree]:
        return self if instance is None else eqx.Partial(self, instance)


def _dequantize_deferred(x: PyTree) -> PyTree:
    """Computes a deferred operation, such as a weight times a scalar."""
    return x.dequantize() if isinstance(x, AbstractArrayValue) and x.deferred else x


def _is_value(x: object) -> bool:
    return isinstance(x, quax.Value)
