"""The rules of primitives for our arrays.

Under [`eqquant.quaxify`][] a rule sees every call in which an operand is ours; under `quax.quaxify` only the first
operand is checked, or the first two with `any_operand`.
"""

import functools as ft
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import jax
import quax
from jax.extend.core import Primitive
from jaxtyping import ArrayLike

from .._array.moves import CannotMove
from .._array.value import AbstractArrayValue


# An array of ours, any other, or the shape and dtype of one.
Value: TypeAlias = AbstractArrayValue | ArrayLike | jax.ShapeDtypeStruct
_Rule = TypeVar("_Rule", bound=Callable[..., Any])

RULES: dict[Primitive, Callable[..., Any]] = {}  # those of `eqquant.quaxify`


def rule(primitive: Primitive, *, any_operand: bool = False) -> Callable[[_Rule], _Rule]:
    """Registers a function as the rule of a primitive.

    Where it raises `CannotMove`, operands are dequantized.

    **Arguments:**

    - `primitive`: the primitive.
    - `any_operand`: whether any operand may be one of our arrays. By default the rule runs only if the first operand,
        and no other, is ours.
    """

    def decorate(function: _Rule) -> _Rule:
        @ft.wraps(function)
        def apply_rule(*operands: Any, **params: Any) -> Any:
            ours = [isinstance(x, AbstractArrayValue) for x in operands]
            try:
                if any_operand or (ours[0] and not any(ours[1:])):
                    return function(*operands, **params)
            except CannotMove:
                pass
            return bind_dense(primitive, *operands, **params)

        # Narrower than the signatures of Quax's own rules of loops, so that none is ambiguous.
        def first_is_ours(w: AbstractArrayValue, *rest: AbstractArrayValue | ArrayLike, **params: Any) -> Any:
            return apply_rule(w, *rest, **params)

        def second_is_ours(
            x: ArrayLike, w: AbstractArrayValue, *rest: AbstractArrayValue | ArrayLike, **params: Any
        ) -> Any:
            return apply_rule(x, w, *rest, **params)

        RULES[primitive] = apply_rule
        quax.register(primitive)(first_is_ours)
        if any_operand:
            quax.register(primitive)(second_is_ours)
        return function

    return decorate


def bind_dense(primitive: Primitive, *operands: Value, **params: Any) -> Any:
    """Binds a primitive to the dequantized operands."""
    dense = (x.materialise() if isinstance(x, AbstractArrayValue) else x for x in operands)
    return primitive.bind(*dense, **params)
