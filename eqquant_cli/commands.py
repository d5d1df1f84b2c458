"""The commands, in the order in which `--help` lists them."""

import typer

from .bench import bench
from .compare import compare
from .convert import convert
from .explain import explain
from .formats import formats
from .inspect import inspect
from .plan import plan
from .quantize import quantize
from .report import report


app = typer.Typer(
    help="Quantizes checkpoints, and says what is in them.",
    epilog="Each command explains itself: eqquant quantize --help. `--debug` shows the traceback of an error.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (inspect, quantize, convert, compare, plan, explain, formats, bench, report):
    app.command()(command)


@app.callback(invoke_without_command=True)
def _version(version: bool = typer.Option(False, "--version", help="Prints what is installed.")) -> None:
    if version:
        from .main import describe_versions

        typer.echo(describe_versions())
        raise typer.Exit()
