"""Names of methods."""

import dataclasses
from collections.abc import Mapping

import equinox as eqx
import jax.tree_util as jtu

from .._errors import did_you_mean, name_type
from .._formats.base import AbstractFormat
from .absmax import AbsMax
from .base import AbstractMethod
from .hqq import HQQ
from .joint import JointMSE
from .mse import MSE


MethodLike = AbstractMethod | str
_METHODS = {"absmax": AbsMax, "mse": MSE, "joint_mse": JointMSE, "hqq": HQQ}
_NEED_INPUTS = {"gptq": "GPTQ", "learned_rounding": "LearnedRounding"}
# What changes the float model instead, by its name in lower case.
_TRANSFORMS = {
    "awq": "smooth(model, eqq.transforms.AWQ(stats))",
    "smoothquant": "smooth(model, eqq.transforms.SmoothQuant(stats))",
    "smooth": "smooth(model, eqq.transforms.AWQ(stats))",
    "rotate": "rotate(model)",
}


def as_method(method: object) -> AbstractMethod:
    """Returns a method, given one, its name, or `None` for the default.

    **Raises:**

    `ValueError` for the name of a method that needs statistics, and for an unknown name; `TypeError` for anything else.
    """
    if method is None:
        return AbsMax()
    if isinstance(method, str):
        return _find_method(method)
    if isinstance(method, type) and issubclass(method, AbstractMethod):
        raise TypeError(f"`method` must be an instance. Got the class {method.__name__}. Write `{method.__name__}()`.")
    if not isinstance(method, AbstractMethod):
        raise TypeError(f"`method` must be a method, such as `eqq.MSE()`. {_suggest_method(method)}")
    name, is_mapping = type(method).__name__, lambda x: isinstance(x, Mapping)
    for field in dataclasses.fields(method):
        if field.metadata.get("static", False):
            continue
        # A mapping holds statistics by path; `for_leaf` takes the statistics of one leaf.
        for leaf in jtu.tree_leaves(getattr(method, field.name), is_leaf=is_mapping):
            if not is_mapping(leaf) and not eqx.is_array_like(leaf):
                raise TypeError(
                    f"A field of a method must hold arrays, or be static. Got `{field.name}` of {name}, a "
                    f"{type(leaf).__name__}. Write `{field.name}: ... = eqx.field(static=True)`."
                )
    return method


def _suggest_transform(name: str) -> str | None:
    """Returns how to apply what changes the float model, such as AWQ; `None` for another name."""
    call = _TRANSFORMS.get(name.lower().replace("-", "").replace("_", ""))
    return call and f"That changes the float model: write `model = eqq.transforms.{call}` first."


def _suggest_method(x: object) -> str:
    """Describes an argument that is not a method, and says where it belongs."""
    if isinstance(x, AbstractFormat):
        return f"Got the format {x!r}. Pass it as `format`."
    if isinstance(x, Mapping):
        return f"Got {name_type(x)}. Statistics go into a method that uses them: `method=eqq.GPTQ(stats)`."
    name = getattr(x, "__name__", None)  # of a class or a function
    return f"Got {name or name_type(x)}. {_suggest_transform(name or type(x).__name__) or ''}".rstrip()


def _find_method(name: str) -> AbstractMethod:
    key = name.lower().replace("-", "_")
    if key in _METHODS:
        return _METHODS[key]()
    collect = "`stats = eqq.calibrate.collect_stats(model, batches, gram=True)`"
    if key in _NEED_INPUTS:
        raise ValueError(
            f"`method={name!r}` must come with statistics of the inputs of each weight. Got a name alone. Collect "
            f"them, {collect}, and pass `method=eqq.{_NEED_INPUTS[key]}(stats)`."
        )
    if (transform := _suggest_transform(name)) is not None:
        raise ValueError(f"`method` must be the name of a method. Got {name!r}. {transform}")
    known = (*_METHODS, *_NEED_INPUTS)
    raise ValueError(
        f"`method` must be one of {', '.join(known)}, or a method such as `eqq.MSE()`. Got {name!r}. "
        f"{did_you_mean(key, known)}".rstrip()
    )
