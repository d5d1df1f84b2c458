"""Quax's transform, of any function."""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax.tree_util as jtu
import quax


_Function = TypeVar("_Function", bound=Callable[..., Any])


def quaxify(fn: _Function, /, filter_spec: Any = True) -> _Function:
    """Runs any function with quantized operands, with [Quax](https://docs.kidger.site/quax/).

    Inside it, every `jax.lax.dot_general`, and so `jnp.matmul` and `jnp.einsum`, uses the quantized matmul where the
    dimensions allow it. Transposes, reshapes, slices and concatenations that are exact stay quantized. Everything else
    is dense.

    !!! Example

        ```python
        f = eqq.quaxify(lambda w, x: jnp.einsum("oi,bi->bo", w, x))
        y = f(q, x)
        ```

    It is `quax.quaxify`, with one difference: it takes pytrees whose nodes may only be made while JAX knows its trace,
    such as the state of a Flax NNX module.

    **Arguments:**

    - `fn`: the function to transform.
    - `filter_spec`: which arguments Quax sees; all of them unless given.

    **Returns:**

    A function of the same arguments, each of which may hold a [`eqquant.QuantizedArray`][].
    """
    if filter_spec is not True:
        return quax.quaxify(fn, filter_spec)
    return eqx.module_update_wrapper(_Quaxified(fn))  # pyright: ignore[reportReturnType]


class _Quaxified(eqx.Module):
    fn: Any

    @property
    def __wrapped__(self) -> Any:
        return self.fn

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Quax maps over its arguments while JAX has no current trace, which making a node may ask for (`_Quaxify` in
        # https://github.com/nstarman/quax/blob/main/src/quax/_quaxify.py). So it gets leaves; nodes are made inside.
        leaves, treedef = jtu.tree_flatten((self.fn, args, kwargs), is_leaf=_is_value)
        out_treedef = None

        def on_leaves(leaves: list[Any]) -> list[Any]:
            nonlocal out_treedef
            fn, args, kwargs = jtu.tree_unflatten(treedef, leaves)
            out, out_treedef = jtu.tree_flatten(fn(*args, **kwargs), is_leaf=_is_value)
            return out

        out = quax.quaxify(on_leaves)(leaves)
        return jtu.tree_unflatten(out_treedef, out)

    def __get__(self, instance: Any, owner: Any) -> Any:
        return self if instance is None else eqx.Partial(self, instance)


def _is_value(x: Any) -> bool:
    return isinstance(x, quax.Value)
