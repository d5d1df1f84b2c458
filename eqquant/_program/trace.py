"""Traces a function of pytrees to a program of arrays."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.extend.core import ClosedJaxpr
from jax.tree_util import KeyPath
from jaxtyping import Array

from .._types import PyTree


class Traced(NamedTuple):
    """A function, traced for arguments of some shapes.

    - `program`: from the arrays of the arguments to the arrays of the outputs.
    - `arrays`: the key path and the shape and dtype of each array of the arguments.
    - `outputs`: makes the output pytree from the arrays that the program returns.
    """

    program: ClosedJaxpr
    arrays: list[tuple[KeyPath, jax.ShapeDtypeStruct]]
    outputs: Callable[[Sequence[Array]], PyTree]


def trace(run: Callable[..., PyTree], arguments: Sequence[PyTree]) -> Traced:
    """Traces `run(*arguments)`. Arrays may be `jax.ShapeDtypeStruct`s."""
    nodes, treedef = jtu.tree_flatten_with_path(arguments)
    is_array = [eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct) for _, x in nodes]
    found: list[Callable[[Sequence[Array]], PyTree]] = []

    def run_flat(arrays: Sequence[Array]) -> list[Array]:
        remaining = iter(arrays)
        leaves = [next(remaining) if array else x for (_, x), array in zip(nodes, is_array, strict=True)]
        out, rest = eqx.partition(run(*jtu.tree_unflatten(treedef, leaves)), eqx.is_array)
        outputs, tree = jtu.tree_flatten(out)
        found[:] = [lambda outputs: eqx.combine(jtu.tree_unflatten(tree, outputs), rest)]
        return outputs

    arrays = [(keys, jax.ShapeDtypeStruct(x.shape, x.dtype)) for keys, x in itertools.compress(nodes, is_array)]
    program = jax.make_jaxpr(run_flat)([x for _, x in arrays])
    return Traced(program, arrays, found[0])
