"""The documentation of each public name: an example, shapes of arrays, types. And names in pages exist."""

import ast
import functools as ft
import inspect
import operator
import pydoc
import re
import textwrap

import pytest

import eqquant as eqq

from .test_architecture import each_name, find_definition, MODULES, parse_nodes, PUBLIC, ROOT


DEFINED = [name for name in PUBLIC if name != "ArrayOrQuantized"]  # which is an alias of a type
# Annotations that stand for arrays, and words by which a text says something of their shapes and dtypes.
ARRAY = re.compile(r"\b(Array|ArrayLike|Bool|Float|Float32|Int|Int32|ndarray|Num|Shaped|UInt|UInt8|UInt32)\b")
SHAPE = re.compile(r"shape|dtype|ax[ie]s|dimension|scalar|float32|float64|u?int\d|bool|number|rows|floating|`\(|\(\*")


@ft.cache
def definition(name):
    """The statement that defines a public name."""
    package, _, last = name.rpartition(".")
    return find_definition(package, last)[1]


def constructor(node):
    return next((f for f in getattr(node, "body", []) if getattr(f, "name", "") == "__init__"), None)


def docstring(node):
    """The docstring of a function; of a class, with that of its constructor."""
    return "\n\n".join(ast.get_docstring(part) or "" for part in (node, constructor(node)) if part is not None)


def has_example(name):
    return "```python" in docstring(definition(name))


def annotations(node):
    """The annotated arguments of a function or constructor, or else the annotated fields of a class, as text."""
    function = node if isinstance(node, ast.FunctionDef) else constructor(node)
    if function is None:
        return {ast.unparse(f.target): ast.unparse(f.annotation) for f in node.body if isinstance(f, ast.AnnAssign)}
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return {a.arg: ast.unparse(a.annotation) for a in arguments if a.annotation is not None}


@each_name(DEFINED)
def test_an_example(name):
    """Each public name has one, or links to a name that has one, or to a page."""
    doc = docstring(definition(name))
    linked = [link for link in re.findall(r"\[`eqquant\.([\w.]+)`\]\[\]", doc) if link in DEFINED]
    assert has_example(name) or any(map(has_example, linked)) or re.search(r"\]\([^)]*\.md", doc)


def text_of_bullet(doc, name):
    bullets = re.split(r"\n(?=- |\*\*|\n)", doc)
    return "".join(bullet for bullet in bullets if bullet.startswith("- ") and f"`{name}`" in bullet.split(":")[0])


# Fields of a calibrator that hold its state: `__post_init__` makes them.
STATE = {("extend.AbstractCalibrator", "finite"), ("extend.AbstractCalibrator", "batches")}


@each_name(DEFINED)
def test_arrays_have_shapes(name):
    """Whatever is an array, argument, field or result, has words about its shape or dtype."""
    node = definition(name)
    doc = docstring(node)
    for argument, annotation in annotations(node).items():
        is_array = ARRAY.search(annotation) and not re.search("Callable|ClassVar", annotation)
        if is_array and (name, argument) not in STATE:
            assert SHAPE.search(text_of_bullet(doc, argument)), f"`{argument}` needs words about its shape"
    if isinstance(node, ast.FunctionDef) and node.returns is not None and ARRAY.search(ast.unparse(node.returns)):
        assert SHAPE.search(doc.partition("**Returns:**")[2].partition("**Raises")[0])


@pytest.mark.parametrize("field", ["axis", "block_size", "codes", "format", "lengths", "scale", "zero_point"])
def test_fields_of_a_quantized_array_have_text(field):
    """As the reference shows it: a string under the field, or the docstring of the property."""
    nodes = parse_nodes(ROOT / "eqquant" / "_array" / "codes.py")
    [cls] = [n for n in nodes if getattr(n, "name", "") == "AbstractCodes"]
    texts = {getattr(f, "name", ""): ast.get_docstring(f) for f in cls.body if isinstance(f, ast.FunctionDef)}
    for before, after in zip(cls.body, cls.body[1:], strict=False):
        if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            texts[ast.unparse(before.target)] = after.value.value
    assert texts[field] and len(texts[field].split()) > 8


# Types


def aliases():
    """The aliases of types in the package: assignments of names in capitals at the top of a module."""
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            for part in [*node.body, *node.orelse] if isinstance(node, ast.If) else [node]:
                targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
                yield from (t.id for t in targets if isinstance(t, ast.Name) and re.match(r"[A-Z]\w*[a-z]", t.id))


def test_types_in_signatures_are_explained():
    page = (ROOT / "docs" / "reference" / "types.md").read_text()
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^- (.*?):", page, flags=re.MULTILINE))))
    used = set()
    for node in map(definition, DEFINED):
        if isinstance(node, ast.FunctionDef) or constructor(node) is not None:
            used |= set(re.findall(r"[A-Za-z_]\w+", " ".join(annotations(node).values())))
    assert used & set(aliases()) - {"Scalar"} <= explained  # that is jaxtyping's


@each_name(DEFINED)
def test_no_argument_is_anything(name):
    found = annotations(definition(name))
    assert not [a for a, x in found.items() if re.search(r"\bAny\b", x) and "ClassVar" not in x]


@pytest.mark.parametrize("name", ["quantize_tree", "plan_tree", "quantize", "io.convert", "io.load_into"])
def test_help_fits_a_screen(name):
    """What `help` shows before the arguments: the signature, one paragraph or two, an example."""
    shown = pydoc.plain(pydoc.render_doc(operator.attrgetter(name)(eqq))).partition("**Arguments:**")[0]
    assert sum(len(textwrap.wrap(line, 100)) or 1 for line in shown.splitlines()) <= 60
    if name == "quantize_tree":
        assert sum(len(textwrap.wrap(line, 80)) or 1 for line in shown.splitlines()) <= 40
        assert len(str(inspect.signature(eqq.quantize_tree))) < 500


def test_names_in_the_pages_exist():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {
        (p.name, n) for p in pages for n in re.findall(r"(?<!\.)\beqq(?:uant)?\.([A-Za-z][\w.]*\w)", p.read_text())
    }
    assert {(page, n) for page, n in named if not resolves(n)} == set()


def resolves(name):
    try:
        operator.attrgetter(name)(eqq)
    except AttributeError:
        return False
    return True
