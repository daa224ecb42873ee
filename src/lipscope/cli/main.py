"""The command line: parses, calls, prints. Heavy imports happen inside the commands, so that --help answers at once."""

from __future__ import annotations

import errno
import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer

from lipscope import __version__
from lipscope.cli.bounds import attack, bounds
from lipscope.cli.check import check
from lipscope.cli.measure import measure, plan, scan, tokens
from lipscope.cli.options import Debug, Quiet
from lipscope.cli.show import corpora, describe, models, report, view
from lipscope.cli.smooth import smooth
from lipscope.cli.studies import compare_attention, meanfield, paper, sensitivity
from lipscope.cli.sweep import export, sweep
from lipscope.cli.terminal import echo, filtered_logs, quietly, told_warnings

app = typer.Typer(
    name="lipscope", no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip


def as_command(command: Callable[..., None]) -> Callable[..., None]:
    """The command as the parser sees it: groups spread out, ``--quiet`` and ``--debug`` added, errors as one clear line."""
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if name in groups:
            inner = get_type_hints(groups[name], include_extras=True)
            found = {f.name: (inner[f.name], f.default) for f in fields(groups[name])}
        else:
            found = {name: (hints[name], parameter.default)}
        for key, (hint, default) in found.items():
            parameters[key] = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=default)
    for name, hint in (("quiet", Quiet), ("debug", Debug)):
        parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=False)

    @functools.wraps(command)
    def run(*, debug: bool = False, quiet: bool = False, **given: Any) -> None:
        with _one_clear_line(debug), told_warnings(), quietly(quiet):
            for name, group in groups.items():
                given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
            try:
                command(**given)
            except KeyboardInterrupt:  # the parser would end without a word
                echo("lipscope: interrupted", err=True)
                raise typer.Exit(130) from None

    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


@contextmanager
def _one_clear_line(debug: bool) -> Iterator[None]:
    """Turns an error into one line on standard error and exit code 2; --debug lets the traceback through."""
    try:
        yield
    except Exception as error:
        if debug or isinstance(error, typer.Exit):
            raise
        message = str(error) or type(error).__name__
        if isinstance(error, OSError) and error.filename is not None and error.strerror:  # the system's own words
            why = "it is not a directory" if error.errno == errno.EEXIST else error.strerror
            message = f"{os.fspath(error.filename)!r} cannot be used: {why}"
        echo(f"lipscope: {' '.join(message.split())}", err=True)
        raise typer.Exit(2) from None


PANELS: dict[str, tuple[Callable[..., None], ...]] = {
    "Measure": (scan, plan, measure, tokens, sensitivity, sweep, check),
    "Bound": (bounds, attack, compare_attention, meanfield),
    "Show": (report, view, export),
    "Change": (smooth,),
    "Know": (describe, models, corpora, paper),
}
for panel, commands in PANELS.items():
    for command in commands:
        app.command(rich_help_panel=panel)(as_command(command))


def _version(value: bool) -> None:
    if value:
        echo(f"lipscope {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """How smooth is attention? Measure the local Lipschitz constant σ(X) = ‖J(X)‖₂ of attention, as an interval."""


def main() -> None:
    """Entry point of the ``lipscope`` command."""
    # Libraries that talk about missing kernels would drown the one clear line.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        with filtered_logs():
            code = app(standalone_mode=False)
    except KeyboardInterrupt:
        echo("lipscope: interrupted", err=True)
        sys.exit(130)
    except Exception as error:
        # The parser's own complaints (an unknown option, a missing argument) know how to put themselves into words.
        if not hasattr(error, "format_message"):  # only with --debug
            echo("".join(traceback.format_exception(error)), err=True)
            sys.exit(1)
        if message := " ".join(error.format_message().split()):  # empty when the help was printed instead
            echo(f"lipscope: {message}", err=True)
        sys.exit(2)
    sys.exit(code if isinstance(code, int) else 0)
