"""What several commands take: formats as text, rules, paths to write."""

from __future__ import annotations

import ast
import difflib
import fnmatch
import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TYPE_CHECKING

import typer


if TYPE_CHECKING:
    import eqquant as eqq
    from eqquant._tree.report import TreeReport


_SOURCE = "A .safetensors or .gguf file, a folder, or an index of several files."
_OUTPUT = "The .safetensors or .gguf file to write, or a folder, for layouts of others too."
_DIALECT = "gguf, bitsandbytes, compressed-tensors, fp8, gptq, mlx or modelopt: a layout. A .gguf output means gguf."
# Names in capitals: else the usage line shows `{source}`.
Source = Annotated[Path, typer.Argument(metavar="SOURCE", help=_SOURCE)]
Dialect = Annotated[str | None, typer.Option(help=_DIALECT)]
Output = Annotated[Path, typer.Argument(metavar="OUTPUT", help=_OUTPUT)]
Rules = Mapping[str, "eqq.extend.AbstractFormat | eqq.QuantConfig | None"]
Json = Annotated[bool, typer.Option("--json", help="Prints JSON.")]
Axis = Annotated[int | None, typer.Option(help="The input axis of weights: -2 for those stored as (in, out).")]


def formats_by_name() -> dict[str, type[eqq.extend.AbstractFormat]]:
    """Returns the classes of formats by their lower-case names."""
    import eqquant as eqq

    return {
        name.lower(): cls
        for name, cls in {**vars(eqq), **vars(eqq.formats)}.items()
        if isinstance(cls, type) and issubclass(cls, eqq.extend.AbstractFormat) and not name.startswith("Abstract")
    }


def parse_format(text: str) -> eqq.extend.AbstractFormat:
    """Returns the format that a text names: `nf4`, `int4(32)`, `int4(block_size=32, symmetric=False)`."""
    import eqquant as eqq

    known, (name, bracket, rest) = formats_by_name(), text.strip().partition("(")
    if not bracket or name.lower() not in known:
        return eqq.QuantConfig(name).format  # raises for an unknown name, with the nearest one
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or any(k.arg is None for k in call.keywords):
            raise ValueError
        args = [ast.literal_eval(a) for a in call.args]
        kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(
            f"A format must read like 'nf4' or 'int4(block_size=32, symmetric=False)'. Got {text!r}. Quote it, since "
            "the shell reads brackets itself."
        ) from None
    try:
        return known[name.lower()](*args, **kwargs)
    except TypeError:
        fields = ", ".join(inspect.signature(known[name.lower()]).parameters) or "no fields"
        raise ValueError(f"{name} takes {fields}. Got {text!r}.") from None


# The default format of each layout: 4 bits in blocks of 64 or 32.
_DEFAULTS = {
    "gguf": "q4_0",
    "bitsandbytes": "nf4",
    "compressed-tensors": "int4",
    "fp8": "fp8(block_size=(128, 128))",
    "gptq": "int4",
    "mlx": "mlx",
    "modelopt": "nvfp4",
}


def choose_format(
    format: str | None, bits: int | None, group_size: int | None, dialect: str | None = None
) -> eqq.extend.AbstractFormat:
    """Returns the format of `--format`, or `--bits` and `--group-size`, or the default of `--dialect`."""
    if format is not None and (bits is not None or group_size is not None):
        spelled = f"--format '{format}(block_size={group_size or 64})'"
        raise typer.BadParameter(f"--format says both already. Write {spelled}, or --bits without --format.")
    if format is not None:
        return parse_format(format)
    if bits is None:
        if group_size is not None:
            raise typer.BadParameter(f"--group-size goes with --bits. Write --format 'nf4({group_size})' for NF4.")
        return parse_format("nf4" if dialect is None else _DEFAULTS[dialect])
    if not 2 <= bits <= 8 or bits == 7:
        raise typer.BadParameter(f"--bits must be 2, 3, 4, 5, 6 or 8. Got {bits}.")
    block_size = 64 if group_size is None else group_size
    return parse_format(f"mlx({bits}, {block_size})" if dialect == "mlx" else f"int{bits}({block_size})")


# Loaders of these layouts support quantized weights in linear layers only, except in the last.
_LINEAR_ALONE = {"bitsandbytes", "compressed-tensors", "fp8", "gptq", "modelopt"}
_OTHERS = ("*embed*", "*wte*", "*wpe*", "*lm_head*")


def parse_rules(
    format: eqq.extend.AbstractFormat | None,
    rule: Sequence[str],
    skip: Sequence[str],
    names: Iterable[str] = (),
    dialect: str | None = None,
) -> dict[str, eqq.extend.AbstractFormat | None]:
    """Returns the rules of `--skip`, then of `--rule`, and then `format` for all others.

    Embeddings and the last layer among the weights `names` stay in float if the library `dialect` loads them only so.
    """
    rules: dict[str, eqq.extend.AbstractFormat | None] = dict.fromkeys(skip)
    for text in rule:
        pattern, equals, spelled = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"Write it as 'PATTERN=FORMAT', such as 'layers.0.*=int8'. Got {text!r}.")
        rules.setdefault(pattern, None if spelled.lower() in ("none", "float") else parse_format(spelled))
    if "*" in rules:
        return rules
    names = left(names, rules) if dialect in _LINEAR_ALONE else []
    others = [pattern for pattern in _OTHERS if any(fnmatch.fnmatchcase(name, pattern) for name in names)]
    return {**rules, **dict.fromkeys(others), **({} if format is None else {"*": format})}


def left(names: Iterable[str], rules: Iterable[str]) -> list[str]:
    """Returns the names that no rule matches."""
    return [name for name in names if not any(fnmatch.fnmatchcase(name, pattern) for pattern in rules)]


def check_patterns(names: Iterable[str], rule: Sequence[str], skip: Sequence[str]) -> None:
    """Raises for a pattern of `--skip` or `--rule` that matches no array."""
    names = list(names)
    matches = lambda pattern: any(fnmatch.fnmatchcase(name, pattern) for name in names)
    given = [("--skip", pattern) for pattern in skip]
    given += [("--rule", text.partition("=")[0]) for text in rule if "=" in text]
    for option, pattern in given:
        if not matches(pattern):
            near = [f"*{pattern}*"] if matches(f"*{pattern}*") else difflib.get_close_matches(pattern, names, n=1)
            parts = difflib.get_close_matches(pattern.strip("*"), ".".join(names).split("."), n=1)
            hint = "".join(f" Did you mean '{guess}'?" for guess in [*near, *(f"*{part}*" for part in parts)][:1])
            shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
            raise ValueError(f"{option} '{pattern}' matches none of the {len(names)} arrays: {shown}.{hint}")


def list_weights(checkpoint: eqq.io.Checkpoint) -> list[str]:
    """Returns the names of the weights of a checkpoint. Raises if there are none."""
    import eqquant as eqq
    from eqquant.io._convert import skeleton

    try:
        plan = eqq.plan_tree(skeleton(checkpoint), "nf4")
    except ValueError:
        raise ValueError(
            f"{checkpoint.path} must hold weights to quantize: float arrays of two dimensions or more. Got "
            f"{len(checkpoint)} arrays, none of them such."
        ) from None
    return [leaf.path for leaf in plan.leaves if leaf.format is not None]


def parse_method(name: str | None) -> eqq.extend.AbstractMethod | None:
    """Returns the method of a name."""
    import eqquant as eqq

    methods = {"absmax": eqq.AbsMax, "mse": eqq.MSE, "joint_mse": eqq.JointMSE, "hqq": eqq.HQQ}
    if name is not None and name.lower() not in methods:
        raise typer.BadParameter(f"It must be one of {', '.join(methods)}. Got {name!r}.")
    return None if name is None else methods[name.lower()]()


def choose_dialect(dialect: str | None, path: Path) -> str | None:
    """Returns the layout of `--dialect` or of the suffix of the output; `None` for our own."""
    if dialect not in (None, *_DEFAULTS):
        raise typer.BadParameter(f"--dialect must be {', '.join(_DEFAULTS)}. Got {dialect!r}.")
    if path.suffix != ".gguf":
        return dialect
    if dialect not in (None, "gguf"):
        raise typer.BadParameter(f"--dialect {dialect} writes a folder. Got {str(path)!r}, the name of a GGUF file.")
    return "gguf"


def check_checkpoint(path: Path, source: eqq.io.Checkpoint, dialect: str | None, force: bool) -> None:
    """Raises unless a checkpoint may be written to `path`, in the layout `dialect`."""
    suffix = {None: ".safetensors" if _names_file(path) else "", "gguf": ".gguf"}.get(dialect, "")
    check_output(path, suffix, force, source)
    from eqquant.io._files import check_place, FILE

    check_place(path, None if suffix else FILE)


def _names_file(path: Path) -> bool:
    """Whether a path has the suffix of a file: letters, unlike the folder `Llama-3.2-1B-nf4`."""
    return path.suffix[1:].isalpha()


def write_checkpoint(
    source: eqq.io.Checkpoint, path: Path, rules: Rules | None = None, *, dialect: str | None, **options: Any
) -> TreeReport:
    """Writes a checkpoint to a file or folder, in our layout without `dialect`. Returns the report."""
    import eqquant as eqq
    from eqquant.io._convert import convert_into

    if dialect is None and not _names_file(path):
        return convert_into(source, path, rules, **options)
    return eqq.io.convert(source, path, rules, dialect=dialect, **options)


def check_output(path: Path, suffix: str, force: bool, *sources: eqq.io.Checkpoint) -> None:
    """Raises unless a file, or a folder without a suffix, may be written to `path`.

    No file that `sources` are read from may be replaced, under any of its names.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(
            f"The output must be a file or a folder. Got {str(path)!r}, a device or a pipe. "
            "`eqquant quantize --dry-run` writes nothing."
        )
    if suffix and path.suffix != suffix:
        hint = " Without a suffix it is a folder; `--dialect` writes other libraries'."
        other = hint if suffix == ".safetensors" else ""
        raise ValueError(f"The output must end in {suffix}. Got {str(path)!r}.{other}")
    if not path.parent.is_dir():
        raise ValueError(f"{path} must be in a folder that exists. Got {path.parent}, which does not.")
    if path.is_dir() == bool(suffix) and path.exists():
        raise ValueError(f"{path} must be a {'file. Got a folder' if suffix else 'folder. Got a file'}.")
    replaced = list(path.iterdir()) if path.is_dir() else [path]
    for file in {file for source in sources for file in _files(source)}:
        if any(p.exists() and p.samefile(file) for p in replaced):
            what = "be the input" if replaced == [path] else "be the folder of the input, or link to its files"
            raise ValueError(f"The output must not {what}. Got {path}, and {file}, which is read.")
    if path.exists() and not force:
        what = "file" if suffix else "folder"
        raise ValueError(f"The output must be a new {what}. Got {str(path)!r}, which exists. `--force` replaces it.")


def _files(source: eqq.io.Checkpoint) -> set[Path]:
    """Returns the paths of a checkpoint and of all files that its arrays are read from."""
    return {Path(source.path), *(t.file.path for item in source.items_by_name.values() for t in item.tensors)}


def open_source(path: Path) -> eqq.io.Checkpoint:
    """Opens a checkpoint. Raises if it does not exist."""
    import eqquant as eqq

    return eqq.io.open(path)
