"""Views: how the axes of an array in a traced program correspond to the axes of a weight.

An index along an axis of a weight of length 12 that a program reshapes to `(3, 4)` has two digits: the first is the
index divided by 4, the second the remainder. Each axis of a `View` is a sequence of such digits.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


class Digit(NamedTuple):
    """The digit `index // stride % length` of the index along an axis of a weight.

    - `at`: the values of the digit, in order, where the array holds a selection of them; `None` for all of them.
        A selection may be traced.
    """

    axis: int
    length: int
    stride: int = 1
    at: Array | np.ndarray | None = None

    @property
    def size(self) -> int:
        """The number of values of the digit in the array."""
        return self.length if self.at is None else len(self.at)

    @property
    def values(self) -> Array | np.ndarray:
        """The values of the digit, in order."""
        return np.arange(self.length) if self.at is None else self.at

    @property
    def is_traced(self) -> bool:
        """Whether the selected values are known only when the program runs."""
        return isinstance(self.at, jax.Array)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for digits with the same values. A traced selection is equal to itself alone."""
        at = id(self.at) if self.at is None or self.is_traced else tuple(np.atleast_1d(self.at).tolist())
        return self.axis, self.length, self.stride, at


Digits = tuple[Digit, ...] | None  # the digits along one axis of an array; `None` if unknown


class View(NamedTuple):
    """An array that holds values of one weight, perhaps masked or scaled.

    - `weight`: the index of the weight.
    - `axes`: the digits along each axis: `()` if the array repeats along it, `None` if they are unknown.
    - `fixed`: digits with a single value, which have no axis in the array.
    - `looked_up`: whether the data selects among its values.
    - `added`: the indices of other weights whose values, arranged in the same way, are added.
    - `codes`: whether it holds codes of a quantized weight, which are not floats yet.
    """

    weight: int
    axes: tuple[Digits, ...]
    fixed: tuple[Digit, ...] = ()
    looked_up: bool = False
    added: tuple[int, ...] = ()
    codes: bool = False

    @property
    def terms(self) -> list["View"]:
        """The view of each weight in the sum."""
        return [self._replace(weight=n, added=()) for n in (self.weight, *self.added)]

    @property
    def arrangement(self) -> tuple[Any, ...]:
        """Equal for views that hold the values of their weights in the same places."""
        keys = [digits and tuple(digit.key for digit in digits) for digits in (*self.axes, self.fixed)]
        return len(self.axes), self.looked_up, keys


class Concatenated(NamedTuple):
    """A concatenation of arrays along an axis: the view of each, and its length along the axis."""

    axis: int
    parts: tuple[tuple["View | None", int], ...]


def view_weight(weight: int, shape: Sequence[int], codes: bool = False) -> View:
    """Returns the view of a whole weight, or of its codes."""
    return View(weight, tuple((Digit(axis, length),) for axis, length in enumerate(shape)), codes=codes)


def transpose(view: View, permutation: Sequence[int]) -> View:
    """Returns the view after `jax.lax.transpose`."""
    return view._replace(axes=tuple(view.axes[axis] for axis in permutation))


def transpose_concatenated(concatenated: Concatenated, permutation: Sequence[int]) -> Concatenated:
    """Returns the fact about concatenated arrays after `jax.lax.transpose`."""
    parts = tuple((view and transpose(view, permutation), length) for view, length in concatenated.parts)
    return Concatenated(list(permutation).index(concatenated.axis), parts)


def squeeze(view: View, dimensions: Sequence[int]) -> View:
    """Returns the view after `jax.lax.squeeze`."""
    fixed = [*view.fixed]
    for axis in dimensions:
        fixed += [_take_first(digit) for digit in view.axes[axis] or () if digit.length > 1]
    kept = tuple(digits for axis, digits in enumerate(view.axes) if axis not in dimensions)
    return view._replace(axes=kept, fixed=tuple(fixed))


def _take_first(digit: Digit) -> Digit:
    return digit._replace(at=jnp.asarray(digit.at)[0] if digit.is_traced else np.asarray(digit.values)[0])


def reshape(view: View, shape: Sequence[int], new_shape: Sequence[int]) -> View:
    """Returns the view after `jax.lax.reshape` from `shape` to `new_shape`."""
    view = squeeze(view, [axis for axis, length in enumerate(shape) if length == 1])
    lengths, wanted = [n for n in shape if n != 1], [n for n in new_shape if n != 1]
    axes: list[Digits] = []
    start, given = 0, 0
    while start < len(wanted):
        # Take axes from both shapes until their sizes are equal.
        stop, end, target, have = start + 1, given + 1, wanted[start], lengths[given]
        while target != have:
            if target < have:
                target *= wanted[stop]
                stop += 1
            else:
                have *= lengths[end]
                end += 1
        axes += _split_digits(_merge(view.axes[given:end]) if end > given + 1 else view.axes[given], wanted[start:stop])
        start, given = stop, end
    remaining = iter(axes)
    return view._replace(axes=tuple(() if n == 1 else next(remaining) for n in new_shape))


def _merge(axes: Sequence[Digits]) -> Digits:
    """Returns the digits of several axes that become one axis, with adjacent digits merged."""
    merged: list[Digit] = []
    for digits in axes:
        if not digits:  # unknown, or repeated
            return None
        for digit in digits:
            major = merged[-1] if merged else None
            whole = major is not None and major.at is None and digit.at is None
            if major and whole and (major.axis, major.stride) == (digit.axis, digit.stride * digit.length):
                merged[-1] = Digit(digit.axis, major.length * digit.length, digit.stride)
            else:
                merged.append(digit)
    return tuple(merged)


def _split_digits(digits: Digits, lengths: Sequence[int]) -> list[Digits]:
    """Returns the digits of each axis that one axis is split into."""
    if len(lengths) == 1 or digits is None:
        return [digits] * len(lengths)
    remaining, axes = list(digits), []
    for length in lengths:
        selected: list[Digit] = []
        while (missing := length // math.prod(d.size for d in selected)) > 1 and remaining:
            digit = remaining.pop(0)
            if digit.size > missing:
                minor = digit.length // missing
                if digit.at is not None or digit.length % missing:
                    return [None] * len(lengths)
                selected.append(Digit(digit.axis, missing, digit.stride * minor))
                remaining.insert(0, Digit(digit.axis, minor, digit.stride))
                break
            selected.append(digit)
        if math.prod(d.size for d in selected) != length:
            return [None] * len(lengths)
        axes.append(tuple(selected))
    return axes if digits else [()] * len(lengths)


def broadcast(view: View, shape: Sequence[int], new_shape: Sequence[int], dimensions: Sequence[int]) -> View:
    """Returns the view after `jax.lax.broadcast_in_dim`."""
    repeated = [axis for axis, to in enumerate(dimensions) if shape[axis] != new_shape[to]]
    fixed = squeeze(view, repeated).fixed
    axes: list[Digits] = [()] * len(new_shape)
    for axis, to in enumerate(dimensions):
        axes[to] = () if axis in repeated else view.axes[axis]
    return view._replace(axes=tuple(axes), fixed=fixed)


def take(view: View, chosen: Mapping[int, Any], looked_up: bool = False) -> View:
    """Returns the view with a selection of the entries along some axes.

    **Arguments:**

    - `chosen`: for each axis a function from the values of a digit to the selected values.
    - `looked_up`: whether the data makes the selection.
    """
    axes = list(view.axes)
    for axis, choose in chosen.items():
        digits = axes[axis]
        if digits is not None and len(digits) == 1:
            axes[axis] = (digits[0]._replace(at=choose(digits[0].values)),)
        elif digits:
            axes[axis] = None
    return view._replace(axes=tuple(axes), looked_up=view.looked_up or looked_up)


def decode(view: View, ndim: int) -> View:
    """Returns the view of the floats that codes stand for. Their axes are unknown."""
    whole = [digits for digits in view.axes if any(digit.at is None and digit.length > 1 for digit in digits or ())]
    looked_up = view.looked_up and len(whole) < 2  # a matrix of a stack is no row of a table
    return view._replace(axes=(None,) * ndim, fixed=(), looked_up=looked_up, codes=False)


class Inputs(NamedTuple):
    """The input features of a product, in terms of the axes of a weight.

    - `axes`: the contracted axes of the weight.
    - `features`: the index of the input feature for each entry along the contracted axes.
    - `total`: the number of input features of the weight.
    """

    axes: tuple[int, ...]
    features: np.ndarray
    total: int


def find_inputs(view: View, contracted: Sequence[int], lengths: Sequence[int], shape: Sequence[int]) -> Inputs | None:
    """Returns the inputs of a product that contracts axes of a view; `None` if unknown.

    **Arguments:**

    - `contracted`: the axes of the view, in the order of `Inputs.features`.
    - `lengths`: their lengths.
    - `shape`: the shape of the weight.
    """
    groups = [view.axes[axis] for axis in contracted]
    digits = [digit for group in groups for digit in group or ()]
    if any(group is None for group in groups) or not digits:
        return None
    axes = sorted({digit.axis for digit in digits})
    fixed = [digit for digit in view.fixed if digit.axis in axes]
    if any(digit.is_traced for digit in (*digits, *fixed)):
        return None
    strides = {axis: math.prod(shape[other] for other in axes if other > axis) for axis in axes}
    step = lambda digit: digit.stride * strides[digit.axis]
    features = np.asarray(sum(np.asarray(digit.at, int) * step(digit) for digit in fixed))
    for digit in digits:
        features = features[..., None] + np.asarray(digit.values) * step(digit)
    sizes = [math.prod(digit.size for digit in group or ()) for group in groups]
    if sizes != list(lengths):  # the array repeats along an axis
        return None
    return Inputs(tuple(axes), features.reshape(sizes), math.prod(shape[axis] for axis in axes))
