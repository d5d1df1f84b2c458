"""The architecture of the package: levels of modules, allowed imports, documentation of public names."""

import ast
import functools as ft
import importlib
import inspect
import operator
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import eqquant as eqq
from eqquant import reference


ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "eqquant"
MODULES = sorted(PACKAGE.rglob("*.py"))


def read_levels(page):
    """The rooms of each level, from the table of a page: rows `| L0 | `_room`, ... | what they know |`."""
    rows = re.findall(r"^\| L(\d+) \| ([^|]*) \|", page, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(rows))), "levels must be numbered from 0"
    return tuple(tuple(re.findall(r"`(\w+)`", rooms)) for _, rooms in rows)


# A module imports modules of lower levels, and of its own room.
REFERENCE = [line for page in (ROOT / "docs" / "reference").glob("*.md") for line in page.read_text().splitlines()]
LEVELS = read_levels((ROOT / "docs" / "design.md").read_text())
LEVEL_OF = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}


def module_name(path):
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


def find_level(name):
    assert name.split(".")[0] in LEVEL_OF, f"{name} has no level: add it to the table of docs/design.md"
    return LEVEL_OF[name.split(".")[0]]


def list_imports(path):
    """The modules of this package that a file imports, wherever in it the import stands."""
    name = module_name(path)
    package = ["eqquant", *name.split(".")]
    package = package if path.name == "__init__.py" and name != "__init__" else package[:-1]
    for node in parse_nodes(path):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found = [f"{module}.{alias.name}" for alias in node.names] if module.startswith("eqquant") else [module]
        else:
            continue
        for target in found:
            if target == "eqquant" or target.startswith("eqquant."):
                yield resolve(target)


def resolve(target):
    """`_numerics.blocks` for `eqquant._numerics.blocks.BlockSize`: the module that holds a name."""
    parts = target.split(".")[1:]
    for n in range(len(parts), 0, -1):
        path = PACKAGE.joinpath(*parts[:n])
        if path.with_suffix(".py").exists() or (path / "__init__.py").exists():
            return ".".join(parts[:n])
    return "__init__"


@ft.cache
def parse_nodes(path):
    return list(ast.walk(ast.parse(path.read_text())))


def each_module(find):
    """A test that `find` finds nothing in any module."""

    @ft.wraps(find)
    def test():
        found = {module_name(path): find(path) for path in MODULES}
        assert {name: what for name, what in found.items() if what} == {}

    del test.__wrapped__  # pytest would look for a fixture `path`
    return test


def each_name(names):
    """A test that a check passes for each of the names: one case, so that all of them run in each sample."""

    def decorate(check):
        @ft.wraps(check)
        def test():
            for name in names:
                try:
                    check(name)
                except AssertionError as error:
                    error.add_note(name)
                    raise

        del test.__wrapped__  # pytest would look for a fixture `name`
        return test

    return decorate


# Modules


def test_levels():
    assert LEVELS[0][0] == "_compat" and LEVELS[-1] == ("__init__", "__main__")
    assert len(LEVEL_OF) == sum(map(len, LEVELS)), "a room has one level"
    assert {module_name(path).split(".")[0] for path in MODULES} <= LEVEL_OF.keys()


@each_module
def test_imports_point_down(path):
    """`test_no_cycles` orders the files of a room."""
    room = module_name(path).split(".")[0]
    others = [target for target in list_imports(path) if target.split(".")[0] != room]
    return [target for target in others if find_level(target) >= find_level(room)]


def test_the_check_sees_the_imports():
    assert "_numerics.minifloats" in set(list_imports(PACKAGE / "_numerics" / "scale_bits.py"))
    assert {"_formats.base", "_numerics.blocks"} <= set(list_imports(PACKAGE / "_formats" / "codebook.py"))
    assert {"_array.array", "_formats", "_tree.quantize"} <= set(list_imports(PACKAGE / "__init__.py"))


def test_no_cycles():
    graph = {module_name(path): set(list_imports(path)) for path in MODULES}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert graph == {}


@each_module
def test_kernels_know_no_formats(path):
    is_kernel = module_name(path).startswith("_matmul.kernels")
    return is_kernel and {target.split(".")[0] for target in list_imports(path)} & {"_array", "_formats"}


@each_module
def test_nothing_needs_the_reference(path):
    return "reference" in set(list_imports(path))


@each_module
def test_internals_of_jax_are_in_one_file(path):
    guesses = [node.lineno for node in parse_nodes(path) if isinstance(node, ast.Name) and node.id == "hasattr"]
    return module_name(path) != "_compat" and (guesses or "jax._src" in path.read_text())


@ft.cache
def list_definitions(room):
    """The names that a room defines: of functions, classes and variables, and of attributes that it assigns."""
    nodes = [n for path in MODULES if module_name(path).split(".")[0] == room for n in parse_nodes(path)]
    stored = [n for n in nodes if isinstance(n, ast.Attribute | ast.Name) and isinstance(n.ctx, ast.Store)]
    defined = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return defined | {n.attr if isinstance(n, ast.Attribute) else n.id for n in stored}


@each_module
def test_private_attributes_are_read_in_their_room(path):
    if module_name(path) == "_compat":  # reads internals of JAX
        return None
    allowed = {"_replace", *list_definitions(module_name(path).split(".")[0])}  # named tuples have `_replace`
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in parse_nodes(path)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")) and node.attr not in allowed
    ]


@each_module
def test_no_asserts(path):
    return [node.lineno for node in parse_nodes(path) if isinstance(node, ast.Assert)]


@each_module
def test_length(path):
    return path.read_text().count("\n") >= 700


@each_module
def test_a_module_says_what_it_is(path):
    return path.name != "__init__.py" and not ast.get_docstring(parse_nodes(path)[0])


@each_module
def test_the_first_line_of_a_docstring_is_short(path):
    """One sentence under 90 characters, then a blank line: an editor shows nothing more."""
    documented = [n for n in parse_nodes(path) if isinstance(n, ast.FunctionDef | ast.ClassDef | ast.Module)]
    firsts = [line for node in documented for line in (ast.get_docstring(node) or "").splitlines()[:1]]
    return [line for line in firsts if len(line) >= 90]


# What is public


def list_reexports(package):
    """What the `__init__` of a package imports by its own name: `from ._x import y as y`."""
    return {
        alias.asname
        for node in parse_nodes(Path(package.__file__))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == alias.asname and not alias.name.startswith("_")
    }


SUBMODULES = ("analysis", "arrays", "calibrate", "extend", "formats", "io", "io.names", "transforms")
PACKAGES = {"": eqq, **{f"{n}.": operator.attrgetter(n)(eqq) for n in SUBMODULES}}
PUBLIC = [
    prefix + name
    for prefix, package in PACKAGES.items()
    for name in dir(package)
    if not name.startswith("_") and not isinstance(getattr(package, name), types.ModuleType)
    if prefix != "formats." or not hasattr(eqq, name)  # `eqquant.formats` repeats those on top
]
# The one public module that users import by itself: what it defines, and what it imports by its own name.
PUBLIC += [
    f"reference.{name}"
    for name, value in vars(reference).items()
    if not name.startswith("_")
    if getattr(value, "__module__", None) == "eqquant.reference" or name in list_reexports(reference)
]


def test_public_names_equal_the_init():
    packages = {prefix.rstrip(".") for prefix in PACKAGES if prefix}
    ours = {name for name in PUBLIC if not name.startswith("reference.")}
    found = {p + name for p in PACKAGES for name in list_reexports(PACKAGES[p])} - packages
    assert found - ours == {f"formats.{name}" for name in list_reexports(eqq.formats) & list_reexports(eqq)}
    assert ours <= found and list_reexports(eqq._formats) - list_reexports(eqq.formats) == {"AbstractCodebook"}
    assert {"quantize_tree", "NF4", "QuantizedArray", "analysis.plan_bits"} <= set(PUBLIC)


def test_few_public_names():
    # The formats of GGUF are rows of one table, so are the families of names; `reference` is for comparisons alone.
    counted = {re.sub(r"^(formats|io\.names|reference)\..*", r"\1", name) for name in PUBLIC}
    assert len(counted) <= 110, sorted(counted)


def test_no_name_means_two_things():
    names = [name.rpartition(".")[2] for name in PUBLIC if not name.startswith(("io.names.", "reference."))]
    assert len(names) == len(set(names)), "two public names are alike"


# Docstrings, read from the sources as an editor reads them


def find_definition(module, name):
    """The module that defines a name, through all imports, and the statement there that does."""
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in parse_nodes(path)[0].body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and name in [alias.asname for alias in node.names]:
            package = ["eqquant", *path.parent.relative_to(PACKAGE).parts]
            return find_definition(resolve(".".join([*package[: len(package) - node.level + 1], node.module])), name)
    return module, None  # an alias of a type has no docstring


def list_arguments(node):
    found = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
    return [argument.arg for argument in found if argument is not None and argument.arg != "self"]


def check_docstring(doc, arguments):
    """Raises unless the arguments are one list of bullets, which name each, with blank lines around it."""
    lines = doc.partition("**Arguments:**")[2].splitlines()[1:]
    section = lines[: next((n for n, line in enumerate(lines) if line.startswith("**")), len(lines))]
    bullets = [re.findall(r"`(\w+)`", line.split(":")[0]) for line in section if line.startswith("- `")]
    assert {name for names in bullets for name in names} == set(arguments)
    # What is no bullet goes on with one: Markdown would join them otherwise.
    assert section[0] == "" and all(not line or line.startswith(("- `", "    ")) for line in section)


@each_name(PUBLIC)
def test_docstring_in_the_source(name):
    package, _, last = name.rpartition(".")
    _, node = find_definition(package, last)
    if node is None:
        return
    doc = ast.get_docstring(node)
    assert doc and not doc.startswith(("**", "!!!", "???")), "a docstring begins with what the name does"
    assert not re.search(r"^\s*\{\w+\}$", doc, flags=re.MULTILINE), "a place where text would be filled in"
    if isinstance(node, ast.FunctionDef):
        assert "\n\n**Returns:**\n\n" in doc
        check_docstring(doc, list_arguments(node))
        return
    init = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
    if init is not None and (arguments := list_arguments(init)):
        check_docstring(f"{doc}\n\n{ast.get_docstring(init) or ''}", arguments)


@each_module
def test_docstrings_are_literal(path):
    targets = [
        target
        for node in parse_nodes(path)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return [t.lineno for t in targets if isinstance(t, ast.Attribute) and t.attr == "__doc__"]


@each_name(PUBLIC)
def test_documented(name):
    assert f"::: eqquant.{name}" in REFERENCE
    value = operator.attrgetter(name)(eqq)
    if isinstance(value, type) and issubclass(value, eqq.extend.AbstractFormat) and not inspect.isabstract(value):
        assert "**Arguments:**" in f"{inspect.getdoc(value)}{value.__init__.__doc__}"


def test_every_documented_name_exists():
    documented = [line.removeprefix("::: eqquant.") for line in REFERENCE if line.startswith("::: eqquant.")]
    assert len(documented) == len(set(documented))
    assert set(documented) == set(PUBLIC)


# Importing


def run(program, **env):
    """The outcome of a program in an interpreter of its own, where warnings are errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **env},
    )


@pytest.mark.long
def test_import_is_quiet_and_light():
    # beartype comes with plum, which Quax needs.
    optional = ["optax", "matplotlib", "hypothesis", "pytest", "safetensors", "torch", "pandas"]
    optional.append("eqquant.reference")
    done = run(f"import sys, eqquant; print([name for name in {optional} if name in sys.modules])")
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "[]")


@pytest.mark.long
def test_missing_jax_primitives_are_tolerated():
    """Without the modules of JAX that keep some primitives, everything imports, and operands become dense."""
    program = """if True:
        import importlib, sys
        import equinox, jax, quax
        import jax.numpy as jnp
        find = importlib.import_module
        def hide(name, *args):
            if name.startswith("jax._src"):
                raise ImportError(name)
            return find(name, *args)
        importlib.import_module = hide
        import eqquant as eqq
        importlib.import_module = find
        w, x = eqq.quantize(jnp.eye(64).reshape(2, 32, 64), "int8"), jnp.ones((2, 64))
        ragged = lambda w, x: jax.lax.ragged_dot(x, jnp.swapaxes(w, 1, 2), jnp.array([1, 1]))
        for f in (jax.checkpoint(lambda w, x: x @ w[0].T), ragged, lambda w, x: x @ jax.lax.stop_gradient(w[0]).T):
            print(bool(jnp.allclose(eqq.quaxify(f)(w, x), f(w.dequantize(), x), atol=1e-2)))
    """
    done = run(program, JAX_PLATFORMS="cpu")
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["True"] * 3)


@pytest.mark.long
def test_import_starts_no_backend():
    # A platform that does not exist is an error as soon as JAX starts one.
    assert run("import eqquant", JAX_PLATFORMS="no_such_platform").returncode == 0
    started = run("import eqquant, jax; jax.devices()", JAX_PLATFORMS="no_such_platform")
    assert started.returncode != 0 and "no_such_platform" in started.stderr


# Classes


def classes():
    """Every class of the package that is defined in a module, private classes included."""
    for path in MODULES:
        module = importlib.import_module("eqquant." + module_name(path) if path.stem != "__init__" else "eqquant")
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__:
                yield value


def concrete_methods(cls):
    """The methods and properties that a class defines itself, without abstract ones."""
    for name, value in vars(cls).items():
        is_method = isinstance(value, types.FunctionType | property | staticmethod | classmethod)
        if is_method and not getattr(value, "__isabstractmethod__", False):
            yield name


def test_a_concrete_method_is_never_overridden():
    """Abstract or final, as https://docs.kidger.site/equinox/pattern/ has it."""
    ours = set(classes())
    special = {
        "__init__",
        "__replace__",
        "__init_subclass__",
        "__check_init__",
        "__post_init__",
        "__repr__",
        "__str__",
        "__rich__",
        "__subclasshook__",
    }
    overridden = [
        f"{cls.__name__}.{name} overrides that of {base.__name__}"
        for cls in ours
        for base in cls.__mro__[1:]
        if base in ours
        for name in set(concrete_methods(cls)) & set(concrete_methods(base)) - special
    ]
    assert sorted(overridden) == []
