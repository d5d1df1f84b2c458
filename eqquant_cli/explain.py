"""`eqquant explain`."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from .arguments import Json


_TARGET = (
    "module:function, where the module is a name or a .py file. The function takes nothing, and returns a model and "
    "the arguments of its call; or a function and its arguments, as `eqq.explain` takes them."
)
Target = Annotated[str, typer.Argument(metavar="TARGET", help=_TARGET)]


def explain(target: Target, json: Json = False) -> None:
    """Says how a call uses each weight of a model.

    Packed, decoded, looked up or added; where, and what to write instead. Traces the call, and computes nothing of it.

    Example: eqquant explain mymodel.py:example
    """
    import eqquant as eqq

    call = _function(target)()
    if not isinstance(call, tuple) or not call or not callable(call[0]):
        raise ValueError(
            f"{target} must return a tuple: a model or a function, and its arguments. Got {type(call).__name__}. Write "
            "`return model, x`, with a model that quantize_tree quantized."
        )
    found = eqq.explain(*call)
    typer.echo(found.to_json(indent=1) if json else str(found))


def _function(target: str) -> Callable[[], object]:
    """Returns the function that `module:function` names. Looks for modules beside the caller first, as `python -m`."""
    name, _, attribute = target.rpartition(":")
    if not name or not attribute:
        raise ValueError(f"The target must read like mymodel.py:example. Got {target!r}.")
    folder, file = os.path.split(name)
    is_file = file.endswith(".py")
    sys.path.insert(0, os.path.abspath(folder) if is_file else os.getcwd())
    try:
        module = importlib.import_module(file.removesuffix(".py") if is_file else name)
    except ModuleNotFoundError as e:
        raise ImportError(f"{name} cannot be imported: {e}.") from e
    finally:
        del sys.path[0]
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{name} has no function {attribute!r}. Write one that returns a model and its arguments.")
    return function
