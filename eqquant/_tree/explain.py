"""`explain`: a report of how a call of a model uses each weight."""

import dataclasses
import os
from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import JaxprEqn
from jax.tree_util import KeyPath
from jaxtyping import Array
from rich.markup import escape
from rich.table import Table

from .._array.array import is_quantized
from .._array.value import AbstractArrayValue
from .._formats.base import AbstractFormat
from .._matmul.explain import find_implementation
from .._program.facts import AbstractFollower, Data, Fact, Parameter, Scales, UseSite
from .._program.follow import follow
from .._program.products import Product
from .._program.trace import trace
from .._program.views import view_weight
from .._report import Name, Report, report_table, show_bytes
from .._types import PyTree
from .config import QuantConfig
from .leaves import DenseArray, Leaf, named_leaves


@dataclasses.dataclass(frozen=True)
class WeightUse:
    """The use of one weight by a call.

    - `path`: the name of the weight.
    - `format`: the `repr` of its format; `None` for floats.
    - `nbytes`: its size.
    - `roles`: how it is used: `"packed"` (a product reads the codes), `"decoded"` (the whole weight is dequantized
        first), `"multiplied"` (a product of floats), `"looked up"`, `"added"`, `"scaled"` (multiplied value by value),
        `"used by <operation>"`; none if the call does not use it.
    - `implementations`: the implementations of its packed products.
    - `lines`: where it is decoded, and the operations on the floats: `file:line (operations)`.
    - `decoded_nbytes`: the size of the decoded floats.
    - `axis`: the axis (or axes) along which products of floats sum, to quantize along; `None` if there are none.
    - `windowed`: whether it is the kernel of a convolution with more than one position, or with groups.
    """

    path: str
    format: str | None
    nbytes: int
    roles: tuple[str, ...]
    implementations: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    decoded_nbytes: int = 0
    axis: int | tuple[int, ...] | None = None
    windowed: bool = False

    @property
    def remedy(self) -> str:
        """How to avoid that the weight is decoded; "" if it is not decoded."""
        if "decoded" not in self.roles:
            return ""
        if self.windowed:
            return (
                "a convolution with a window multiplies codes only if activations are quantized too, both to integers "
                f"without blocks: do that, and call `eqq.quaxify(f)`; or leave it in float: {{{self.path!r}: None, "
                "'*': ...}"
            )
        if "multiplied" in self.roles or "looked up" in self.roles:
            return "call `eqq.quaxify(f)`; if you already do, contract along the quantized axis, as `w @ x` does"
        return f"leave it in float: {{{self.path!r}: None, '*': ...}}"


@dataclasses.dataclass(frozen=True, repr=False)
class CallExplanation(Report):
    """The use of each weight of a model by a call. Prints as a table.

    - `weights`: a `WeightUse` for each quantized array, and each array of floats with two axes or more.
    """

    weights: tuple[WeightUse, ...]

    @property
    def decoded(self) -> tuple[WeightUse, ...]:
        """The quantized weights that the call decodes whole."""
        return tuple(weight for weight in self.weights if "decoded" in weight.roles)

    def rules(self, format: AbstractFormat | str = "nf4") -> dict[str, QuantConfig | None]:
        """Returns rules for [`eqquant.quantize_tree`][], from a call of a float model.

        Weights that the call multiplies or looks up get the format, along the axis of their inputs. All others stay in
        float: they are added, scaled value by value, exponentiated, or not used.

        !!! Example

            ```python
            model = eqq.quantize_tree(model, eqq.explain(model, x).rules("nf4"))
            ```

        **Arguments:**

        - `format`: the format of the weights, or its name.

        **Returns:**

        A dictionary from the path of each weight to an [`eqquant.QuantConfig`][], or to `None`. Other leaves match no
        rule.
        """
        quantizable = [w for w in self.weights if "multiplied" in w.roles or w.roles == ("looked up",)]
        uses = {w.path: QuantConfig(format, axis=w.axis) for w in quantizable}
        return {w.path: uses.get(w.path) for w in self.weights}

    def __rich__(self) -> Table:
        table = report_table("weight", "format", "use", "where", "remedy", "size", "decoded", text=5)
        for w in self.weights:
            use = ", ".join(w.roles) or "unused"
            use += f" ({', '.join(w.implementations)})" if w.implementations else ""
            decoded = show_bytes(w.decoded_nbytes) if w.decoded_nbytes else ""
            style = "bold" if w.remedy else None if w.format else "dim"
            texts = map(escape, (w.format or "float", use, "\n".join(map(os.path.basename, w.lines)), w.remedy))
            table.add_row(Name(w.path), *texts, show_bytes(w.nbytes), decoded, style=style)
        return table


def explain(f: Callable[..., PyTree], *args: PyTree, **kwargs: PyTree) -> CallExplanation:
    """Returns how a call uses each weight: multiplied packed, decoded, looked up, or added.

    Traces the call, and computes nothing. A product that reads codes needs a fraction of the memory traffic of one
    whose weight is decoded first; the report tells which product is which.

    !!! Example

        ```python
        print(eqq.explain(model, x))
        print(eqq.explain(lambda model, x: jax.vmap(model)(x), model, batch))
        print(eqq.explain(eqq.quaxify(lambda model, x: model(x)), model, x))
        ```

    **Arguments:**

    - `f`: the model, or a function that takes the model as an argument.
    - `args`, `kwargs`: its arguments. Arrays may be `jax.ShapeDtypeStruct`s. Equinox modules and trees with quantized
        arrays count as models, everything else as data. If none of these has weights, the first argument that
        has some counts as the model: a dictionary, a list, a state of Flax NNX.

    **Returns:**

    A report, which prints as a table. It has

    - `weights`: for each quantized array, and each array of floats with two axes or more: its `path`; its `format`, a
        `repr` or `None` for floats; its `nbytes`; its `roles`, a tuple of `"packed"` (a product reads the codes),
        `"decoded"` (the whole weight becomes floats first), `"multiplied"` (a product of floats), `"looked up"`,
        `"added"`, `"scaled"` (multiplied value by value), `"used by <operation>"`; the `implementations` of packed
        products; the `lines` where it is decoded, `file:line (operations)`, with `decoded_nbytes` of floats; the `axis`
        along which products of floats sum; and a `remedy`, which says how to keep it packed, or `""`.
    - `decoded`: the quantized weights that are decoded whole.
    - `.rules(format="nf4")`: rules for [`eqquant.quantize_tree`][] from a call of a float model. Weights that the call
        multiplies or looks up get the format, along the axis of their inputs; all others stay in float.
    - `.to_dict()`, `.to_json(indent=None)`: the same as plain Python, and as JSON.

    **Raises:**

    `ValueError` if there is no weight. The errors of `f(*args, **kwargs)`.
    """
    items, names = [f, *args, *kwargs.values()], list(kwargs)
    models = [n for n, tree in enumerate(items) if _is_model(tree)]
    weights = _list_weights(items, models)
    if not weights:  # a plain pytree does not say that it is a model
        trees = [n for n, tree in enumerate(items) if not isinstance(tree, DenseArray)]
        models = [n for n in trees if _list_weights(items, [n])][:1]
        weights = _list_weights(items, models)
    if not weights:
        raise ValueError(
            "`explain` needs a tree with weights, as the function or an argument. Got none. Pass the model: "
            "`eqq.explain(lambda model, x: jax.vmap(model)(x), model, x)`."
        )

    def call(f: Callable[..., PyTree], *others: PyTree) -> PyTree:
        positional = len(others) - len(names)
        return f(*others[:positional], **dict(zip(names, others[positional:], strict=True)))

    traced, recorder = trace(call, items), _Recorder()
    indices = {keys: n for n, (keys, _) in enumerate(weights)}

    def find_fact(keys: KeyPath, x: jax.ShapeDtypeStruct) -> Fact:
        n = next((indices[keys[:stop]] for stop in range(len(keys) + 1) if keys[:stop] in indices), None)
        if n is None:
            return Parameter if keys[0].idx in models else Data
        start, leaf = weights[n]
        if not is_quantized(leaf.value):
            return view_weight(n, x.shape)
        return view_weight(n, x.shape, codes=True) if keys == (*start, jtu.GetAttrKey("codes")) else Scales

    facts = [find_fact(keys, x) for keys, x in traced.arrays]
    shapes = [tuple(leaf.value.shape) for _, leaf in weights]
    run = lambda arrays: follow(traced.program, arrays, facts, shapes, recorder)
    jax.eval_shape(run, [x for _, x in traced.arrays])
    uses, inputs = recorder.uses, recorder.inputs
    return CallExplanation(
        tuple(_describe(leaf, uses.get(n, []), inputs.get(n)) for n, (_, leaf) in enumerate(weights))
    )


def _is_model(tree: PyTree) -> bool:
    nodes = jtu.tree_leaves(tree, is_leaf=lambda x: isinstance(x, AbstractArrayValue))
    return isinstance(tree, eqx.Module) or any(isinstance(x, AbstractArrayValue) for x in nodes)


def _list_weights(items: Sequence[PyTree], models: Sequence[int]) -> list[tuple[KeyPath, Leaf]]:
    """Returns each weight, with its key path in the list of items.

    If several items have weights, paths begin with the item, such as `args[0]`.
    """

    def is_weight(x: PyTree) -> bool:
        is_floats = isinstance(x, DenseArray) and x.ndim > 1 and jnp.issubdtype(x.dtype, jnp.floating)
        return is_quantized(x) or is_floats

    found = {n: [leaf for leaf in named_leaves(items[n]) if is_weight(leaf.value)] for n in models}
    found = {n: leaves for n, leaves in found.items() if leaves}
    name = lambda n, leaf: leaf.path if len(found) == 1 else f"args[{n - 1}].{leaf.path}" if n else f"f.{leaf.path}"
    return [
        ((jtu.SequenceKey(n), *leaf.keys), dataclasses.replace(leaf, path=name(n, leaf)))
        for n, leaves in found.items()
        for leaf in leaves
    ]


class _Recorder(AbstractFollower):
    """Records the uses of each weight, by its index."""

    def __init__(self) -> None:
        self.uses: dict[int, list[UseSite]] = {}
        self.inputs: dict[int, tuple[int, ...]] = {}

    def multiply(self, product: Product, use: UseSite) -> Array:
        self.inputs.setdefault(product.view.weight, product.inputs.axes)
        if not product.view.looked_up:
            self.use(use)
        return product.x

    def use(self, use: UseSite) -> None:
        self.uses.setdefault(use.weight, []).append(use)


_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_ROLES = {
    **dict.fromkeys(_PRODUCTS, "multiplied"),
    **dict.fromkeys(("add", "sub", "add_any"), "added"),
    "mul": "scaled",
    "lookup": "looked up",
    "quantized_matmul": "packed",
}


def _describe(leaf: Leaf, uses: Sequence[UseSite], inputs: tuple[int, ...] | None) -> WeightUse:
    x, quantized = leaf.value, is_quantized(leaf.value)
    roles = list(dict.fromkeys(_ROLES.get(use.kind, f"used by {use.kind}") for use in uses))
    packed = [find_implementation(use.equation) for use in uses if use.kind == "quantized_matmul"]
    dense: dict[str, dict[str, None]] = {}  # operations on the decoded floats, by line
    for use in uses:
        if quantized and not use.reads_codes:
            dense.setdefault(use.line, {})[use.kind] = None
    axes = None if quantized or inputs is None else tuple(axis - x.ndim for axis in inputs)
    return WeightUse(
        leaf.path,
        repr(x.format) if quantized else None,
        x.nbytes if quantized else x.size * x.dtype.itemsize,
        tuple(["decoded", *roles] if dense else roles),
        tuple(dict.fromkeys(packed)),
        tuple(f"{line} ({', '.join(names)})".lstrip() for line, names in dense.items()),
        x.size * x.dtype.itemsize if dense else 0,
        axes[0] if axes is not None and len(axes) == 1 else axes,
        any(_is_windowed(use.equation) for use in uses),
    )


def _is_windowed(equation: JaxprEqn) -> bool:
    """Returns whether an operation is a convolution over several positions, or in groups."""
    if equation.primitive.name != "conv_general_dilated":
        return False
    shape, params = equation.invars[1].aval.shape, equation.params  # pyright: ignore[reportAttributeAccessIssue]
    groups = params["feature_group_count"], params["batch_group_count"]
    window = [shape[axis] for axis in params["dimension_numbers"].rhs_spec[2:]]
    return any(length != 1 for length in (*window, *groups))
