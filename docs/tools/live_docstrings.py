"""A Griffe extension: shows docstrings in the documentation as they are at run time.

Griffe reads sources. This extension takes docstrings that are assembled at import, and the `__init__` that an
`eqx.Module` derives from its fields, from the imported package.
"""

import importlib
import inspect
from typing import Any

import equinox as eqx
import griffe


class LiveDocstrings(griffe.Extension):
    """Replaces docstrings that differ at run time, and gives each module class its `__init__`."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **kwargs: Any) -> None:
        del loader, kwargs
        if pkg.name == "eqquant":
            self._visit(pkg)

    def _visit(self, node: griffe.Object) -> None:
        for name, member in list(node.members.items()):
            # No page shows private classes, and griffe takes functions within their `__init__` for methods.
            private = name.startswith("_") and not name.startswith("__")
            if member.is_alias or (private and not member.is_module):
                continue
            if member.is_module or member.is_class or member.is_function:
                self._update(member)
                self._visit(member)

    def _update(self, node: griffe.Object) -> None:
        live = _import(node)
        doc = inspect.getdoc(live) if not node.is_class else live.__dict__.get("__doc__")
        if doc and node.docstring and inspect.cleandoc(doc) != node.docstring.value:
            node.docstring.value = inspect.cleandoc(doc)
        if isinstance(live, type) and issubclass(live, eqx.Module) and "__init__" not in node.members:
            if "**Arguments:**" in (live.__dict__.get("__doc__") or ""):
                node["__init__"] = _init(node, live)


def _init(node: griffe.Object, cls: type) -> griffe.Function:
    parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
    for parameter in inspect.signature(cls).parameters.values():
        parameters.append(
            griffe.Parameter(
                parameter.name,
                annotation=node.all_members[parameter.name].annotation,  # of a base, perhaps
                kind=griffe.ParameterKind.positional_or_keyword,
                default=None if parameter.default is parameter.empty else repr(parameter.default),
            )
        )
    return griffe.Function("__init__", parameters=griffe.Parameters(*parameters))


def _import(node: griffe.Object) -> Any:
    live = importlib.import_module(node.module.path)
    for name in node.path.removeprefix(node.module.path).split(".")[1:]:
        live = inspect.getattr_static(live, name)
    return getattr(live, "fget", live)
