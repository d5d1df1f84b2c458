"""Facts about the values of a traced program: a view of a weight, or a dependence on data."""

import abc
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, TypeGuard

from jax.extend.core import JaxprEqn
from jaxtyping import Array

from .. import _compat
from .products import Product
from .views import Concatenated, View


class Data:
    """The fact that a value depends on the data."""


class Parameter:
    """The fact that a value depends on parameters alone, and is not a view of a weight."""


class Scales(Parameter):
    """The fact that a value holds scales or zero points of a quantized weight, or a selection."""


Fact: TypeAlias = View | Concatenated | type[Data] | type[Parameter]


class UseSite(NamedTuple):
    """One use of a weight.

    - `weight`: the index of the weight.
    - `kind`: the name of the primitive; `"lookup"` for a selection of entries.
    - `equation`: the operation.
    - `enclosing`: the calls and loops around the operation, outermost first.
    - `reads_codes`: whether it reads codes, not floats.
    """

    weight: int
    kind: str
    equation: JaxprEqn
    enclosing: tuple[JaxprEqn, ...] = ()
    reads_codes: bool = False

    @property
    def line(self) -> str:
        """The line of user code, as `file:line`; "" if unknown.

        Inside a `jit` JAX knows only the line of the call.
        """
        lines = map(_compat.find_line, (self.equation, *reversed(self.enclosing)))
        return next((f"{line.file}:{line.number}" for line in lines if line is not None), "")


class AbstractFollower(abc.ABC):
    """A visitor of every use of a weight in a program, called while the program runs."""

    @abc.abstractmethod
    def multiply(self, product: Product, use: UseSite) -> Array:
        """Visits a product of floats, and returns its other operand, usually `product.x`."""

    @abc.abstractmethod
    def use(self, use: UseSite) -> None:
        """Visits a use that is not a product."""


Result: TypeAlias = tuple[list[Array], list[Fact]]


def find_views(fact: Fact) -> list[View]:
    """Returns the views of weights in a fact; a sum or a concatenation has several."""
    if isinstance(fact, View):
        return fact.terms
    if isinstance(fact, Concatenated):
        return [view for part, _ in fact.parts if part is not None for view in part.terms]
    return []


def is_codes(fact: Fact) -> TypeGuard[View]:
    """Whether a value holds codes of a quantized weight."""
    return isinstance(fact, View) and fact.codes


def combine_facts(facts: Sequence[Fact]) -> type[Data] | type[Parameter]:
    """Returns the fact about a result that is not a view of a weight, from its operands."""
    if facts and facts[0] is Scales:
        return Scales
    depends = lambda fact: fact is Data or any(view.looked_up for view in find_views(fact))
    return Data if any(map(depends, facts)) else Parameter
