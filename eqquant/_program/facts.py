"""What is known of the values of a traced program: which are views of a weight, and which depend on the data."""

import abc
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from jax.extend.core import Jaxpr, JaxprEqn
from jaxtyping import Array

from .. import _compat
from .products import Product
from .views import Joined, View


class Data:
    """Known of a value that depends on the data."""


class Parameter:
    """Known of a value that depends on parameters of the model alone, and is a view of no weight."""


Fact: TypeAlias = View | Joined | type[Data] | type[Parameter]


class SeenUse(NamedTuple):
    """One use of a weight.

    - `weight`: the number of the weight.
    - `kind`: the name of the primitive; `"lookup"` for a selection of entries.
    - `with_data`: whether other operands depend on the data.
    - `equation`: the operation.
    - `around`: the calls and loops that it stands in, from the outermost.
    """

    weight: int
    kind: str
    with_data: bool
    equation: JaxprEqn
    around: tuple[JaxprEqn, ...] = ()

    @property
    def line(self) -> str:
        """Where the operation stands in the user's code; "" if unknown. Inside a `jit` JAX knows the call alone."""
        lines = map(_compat.line_of_equation, (self.equation, *reversed(self.around)))
        return next((f"{line.file}:{line.number}" for line in lines if line is not None), "")


class AbstractFollower(abc.ABC):
    """Gets every use of weights that a program makes, while it runs."""

    @abc.abstractmethod
    def multiply(self, product: Product, use: SeenUse) -> Array:
        """Returns the other operand of a product of floats, `product.x`, before it is multiplied."""

    @abc.abstractmethod
    def use(self, use: SeenUse) -> None:
        """Gets a use that is no product."""


Result: TypeAlias = tuple[list[Array], list[Fact]]


class AbstractRun(abc.ABC):
    """A run of a program, as the rules of its operations see it."""

    @abc.abstractmethod
    def run(self, jaxpr: Jaxpr, inputs: Sequence[Array], facts: Sequence[Fact]) -> Result:
        """Returns the results of a program, and what is known of each."""

    @abc.abstractmethod
    def use(self, equation: JaxprEqn, facts: Sequence[Fact], *, besides: View | None = None) -> None:
        """Tells the follower that an operation uses weights in another way than as a product."""


def views_of(fact: Fact) -> list[View]:
    if isinstance(fact, View):
        return [fact]
    return [part for part, _ in fact.parts if part is not None] if isinstance(fact, Joined) else []


def plain_fact(facts: Sequence[Fact]) -> type[Data] | type[Parameter]:
    """Returns what is known of a result that is a view of no weight."""
    depends = lambda fact: fact is Data or any(view.looked_up for view in views_of(fact))
    return Data if any(map(depends, facts)) else Parameter


def bind(equation: JaxprEqn, values: Sequence[Array]) -> list[Array]:
    return _compat.bind_equation(equation, values)
