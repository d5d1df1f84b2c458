"""`no_dense`: raises where a program decodes a whole weight."""

import contextlib
import linecache
from collections.abc import Callable, Iterator

import jax

from .. import _compat
from .._array.array import is_quantized
from .._array.contraction import AbstractOperand
from .._array.dense import refuse_dense
from .._types import PyTree
from .leaves import abbreviate_list, named_leaves


# Part of the key of JAX's caches, so that a function traced outside is traced again inside.
_inside = jax.make_user_context(False)


@contextlib.contextmanager
def no_dense(model: PyTree = None) -> Iterator[None]:
    """Raises an error where a whole quantized weight is decoded, not multiplied packed.

    Products with `@` and, under [`eqquant.quaxify`][], products of `jax.lax` stay packed where they can. Everything
    else decodes the weight: correct, but slower and larger. This context shows where.

    !!! Example

        ```python
        with eqq.no_dense(model):
            y = jax.jit(eqq.quaxify(forward))(model, x)
        ```

    Allowed are a lookup of rows, layers and experts by [`eqquant.take_layer`][], and the decoding inside an
    implementation of a product. A function under `jax.jit` raises when it is traced; one that was traced before is
    traced again. Contexts may be nested, and hold for the current thread alone. It also decorates a function:
    `@eqq.no_dense()`.

    **Arguments:**

    - `model`: a model whose leaves the error names. A weight is recognized by its shape and its format.

    **Returns:**

    A context manager.

    **Raises:**

    `RuntimeError` at the first weight that is decoded. The message names the weight, the operation and the line of
    code, and says what to write instead.
    """
    names: dict[tuple[object, ...], list[str]] = {}
    for leaf in named_leaves(model):
        if is_quantized(leaf.value):
            for shape in (leaf.value.shape, leaf.value.shape[1:]):  # also as a layer of a stack
                names.setdefault(_key(leaf.value, shape), []).append(leaf.float_path or leaf.path)
    with _inside(True), refuse_dense(_make_refusal(names)):
        yield


def _key(q: AbstractOperand, shape: tuple[int, ...]) -> tuple[object, ...]:
    return (*sorted(length for length in shape if length != 1), getattr(q, "format", None))


def _make_refusal(names: dict[tuple[object, ...], list[str]]) -> Callable[[AbstractOperand], None]:
    def refuse(q: AbstractOperand) -> None:
        found = names.get(_key(q, q.shape), [])
        weight = f"{q.dtype.name}[{','.join(map(str, q.shape))}] in {getattr(q, 'format', None)!r}"
        named = f"`{found[0]}`, " if len(found) == 1 else f"one of {abbreviate_list(found)}, " if found else ""
        line, operation = _compat.current_line(), _compat.find_quax_operation()
        by = "" if operation is None else f", by `{operation}`"
        if operation is None:
            remedy = "Call the function under `eqq.quaxify`, or write the product as `w @ x` or `x @ w`."
        else:
            remedy = (
                f"`{operation}` has no packed form here: apply it to activations, or keep the array in float by a "
                f"rule, `{{{found[0] if found else 'path'!r}: None}}`."
            )
        raise RuntimeError(
            f"Inside `no_dense` no whole weight may be decoded. Got {named}{weight}{by}{_describe_line(line)}. {remedy}"
        )

    return refuse


def _describe_line(line: _compat.Line | None) -> str:
    if line is None:
        return ""
    code = linecache.getline(line.file, line.number).strip()
    return f", at {line.file}:{line.number} in {line.function}" + (f": `{code}`" if code else "")
