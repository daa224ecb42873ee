"""Write the pages of docs/reference from the code: the commands, the public names, the statuses, the store's tables.

    python docs/make_reference.py

The pages are committed, and tests/test_docs_reference.py compares them with what this script writes.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from typer.models import ArgumentInfo

NOTE = "Written by `docs/make_reference.py`; do not edit it by hand."


@dataclass(frozen=True)
class Parameter:
    """An argument or an option of a command.

    Attributes:
        names: ``("--layers",)``, ``("--pack", "--no-pack")``, or for an argument its place holder.
        value: what it takes, in Markdown; empty for a switch.
        default: in Markdown; empty when there is none.
        help: what it means.
        option: not an argument.
    """

    names: tuple[str, ...]
    value: str
    default: str
    help: str
    option: bool


def parameters(command: Callable[..., None]) -> list[Parameter]:
    """What a command takes, read from its signature."""
    hints = get_type_hints(command, include_extras=True)
    found = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind, info = get_args(hints[name])[:2]
        kinds = [part for part in get_args(kind) or (kind,) if part is not type(None)]
        # typer.Option("--json") in an annotation: the name comes where the default would be.
        given = [*([info.default] if isinstance(info.default, str) else []), *(info.param_decls or ())]
        declared = tuple(part for words in given for part in words.split("/"))
        needed = parameter.default is inspect.Parameter.empty
        default = getattr(parameter.default, "value", parameter.default)
        shown = "" if needed or default is None or default is False else f"`{default}`"
        if isinstance(info.show_default, str):
            shown = info.show_default
        if isinstance(info, ArgumentInfo):
            names: tuple[str, ...] = (info.metavar or name.upper(),)
        elif declared:
            names = declared
        else:
            dashed = name.replace("_", "-")
            names = (f"--{dashed}", f"--no-{dashed}") if kinds == [bool] else (f"--{dashed}",)
        option = not isinstance(info, ArgumentInfo)
        found.append(Parameter(names, _value(kinds[0]) if option else "", "needed" if needed and option else shown,
                               " ".join((info.help or "").split()), option))  # fmt: skip
    return found


def _value(kind: type) -> str:
    if issubclass(kind, Enum):
        return ", ".join(f"`{member.value}`" for member in kind)
    return {bool: "", int: "*integer*", float: "*number*", Path: "*path*"}.get(kind, "*text*")


def registered() -> dict[str, Callable[..., None]]:
    """The commands by name, in the order of the help."""
    from lipscope.cli.main import app

    found = {}
    for command in app.registered_commands:
        assert command.callback is not None
        found[command.name or command.callback.__name__.replace("_", "-")] = command.callback
    return found


def options() -> dict[str, set[str]]:
    """The names of all options of every command."""
    return {
        name: {"--help", *(word for p in parameters(command) for word in p.names)} for name, command in registered().items()
    }


def commands() -> str:
    """Every command with its arguments and options."""
    parts = ["# Commands", f"{NOTE} `lipscope COMMAND --help` says the same.", "Every command ends with exit code 0 when "
             "all is well, 2 with one line on standard error when something is wrong with what it was given, and 1 when a "
             "sweep or a run has failed tasks. `--debug` shows the traceback."]  # fmt: skip
    from lipscope.cli.main import PANELS

    found = registered()
    panels = [(panel, command.__name__.replace("_", "-")) for panel, group in PANELS.items() for command in group]
    parts.append(_table(["", "command", "what it does"], [
        [panel, f"[`lipscope {name}`](#lipscope-{name})", _paragraphs(found[name])[0]] for panel, name in panels
    ]))  # fmt: skip
    for name, command in found.items():
        takes = parameters(command)
        usage = " ".join([*(p.names[0] for p in takes if not p.option), "[OPTIONS]"])
        parts += [f"## lipscope {name}", f"```text\nlipscope {name} {usage}\n```", *_paragraphs(command)]
        rows = [[f"{_names(p)} {p.value}".strip(), p.default, p.help] for p in takes]
        parts.append(_table(["argument, option", "default", "meaning"], rows))
    return "\n\n".join(parts) + "\n"


def _names(parameter: Parameter) -> str:
    if not parameter.option:
        return " or ".join(f"`{name}`" for name in parameter.names[0].split("|"))
    return " / ".join(f"`{name}`" for name in parameter.names)


def _paragraphs(item: object) -> list[str]:
    return [" ".join(part.split()) for part in (inspect.getdoc(item) or "").replace("``", "`").split("\n\n")]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)])


def statuses() -> str:
    """What every status, kind of upper end and refusal means."""
    from lipscope.models.selftest import SelfTestError
    from lipscope.runs import engines
    from lipscope.runs import schema as errors
    from lipscope.spectral.result import Status

    parts = ["# What a status means", NOTE, "## How a measurement ended", "`status` of a result and of a row; "
             "`result.message` is the paragraph below it."]  # fmt: skip
    for status in Status:
        parts += [f"### `{status}`", status.explanation]
    parts += ["## What kind of upper end", "`upper_kind` of a result and of a row.",
              _table(["kind", "meaning"], [[f"`{kind}`", meaning] for kind, meaning in KINDS.items()])]  # fmt: skip
    parts += ["## How a task of a sweep ended", TASKS]
    parts += ["## Refusals that have a name", "Everything else that is wrong with what you hand in is a `ValueError` (or "
              "`TypeError`, `FileNotFoundError`) that names the argument, what is wrong with it and what would be right; "
              "on the command line it is that one line."]  # fmt: skip
    classes = [SelfTestError, engines.EngineError, *(
        item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)
    )]  # fmt: skip
    parts.append(_table(["error", "when"], [
        [f"`{item.__module__}.{item.__name__}`", _paragraphs(item)[0]] for item in classes
    ]))  # fmt: skip
    return "\n\n".join(parts) + "\n"


TASKS = (
    "`done`: all its rows are in the store. `failed`: its error and traceback are; the other tasks went on, the command's "
    "exit code is 1, and `--retry-failed` measures it again."
)

KINDS = {
    "exact": "the Jacobian was formed and decomposed; only rounding is left",
    "certified": "a closed form, deterministic, with its own rounding margin "
    "([proofs](../theory/bounds.md#2-at-one-input-ours))",
    "probabilistic": "fails with probability at most `delta` over the random start of the solver "
    "([proof](../theory/solver.md#the-upper-end))",
}


def store() -> str:
    """The tables of a store."""
    from lipscope.runs.schema import APPLICATION_ID, KEY_COLUMNS, VERSION, create

    connection = sqlite3.connect(":memory:")
    create(connection)
    parts = [
        "# The store", f"{NOTE} The tables are read from a new store, which `lipscope.runs.schema` makes.",
        f"A store is one SQLite file: schema version {VERSION} (`PRAGMA user_version`), application id "
        f"`0x{APPLICATION_ID:X}`, in write-ahead mode while a sweep runs. One process writes; any number may read. "
        "`lipscope export` flattens it into one table; [Sweep](../how-to/sweep.md#take-the-rows-elsewhere) says what the "
        "columns of an export mean, [Scan your model](../how-to/scan-your-model.md#what-a-row-says) what is in `measured`.",
    ]  # fmt: skip
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid").fetchall()
    for (name,) in tables:
        parts += [f"## {name}", TABLES[name]]
        rows = []
        links = {row[3]: f"`{row[2]}.{row[4]}`" for row in connection.execute(f"PRAGMA foreign_key_list({name})")}
        for _, column, kind, not_null, default, key in connection.execute(f"PRAGMA table_info({name})"):
            facts = ["primary key"] * bool(key) + ["never empty"] * bool(not_null and not key)
            facts += [f"default {default}"] if default is not None else []
            facts += [f"refers to {links[column]}"] if column in links else []
            rows.append([f"`{column}`", kind, ", ".join(facts)])
        parts.append(_table(["column", "type", ""], rows))
    parts.append(f"A row is told apart by its key columns, {', '.join(f'`{c}`' for c in KEY_COLUMNS)}, and by all that its "
                 "task was measured with; `key` is the hash of all of it.")  # fmt: skip
    return "\n\n".join(parts) + "\n"


TABLES = {
    "plans": "What was asked for, as TOML.",
    "environments": "Where things ran: versions, processor, as JSON.",
    "runs": "Every start of a sweep on this store.",
    "tasks": "One task is one layer, scope, length and batch of inputs: what it is (`identity`, and `labels` for people, as "
    "JSON), how it ended, and what it cost.",
    "rows": "One row per measurement. `measured` holds everything that is not a key, as JSON. `checksum`, here as in every "
    "table, covers all other columns.",
    "plan_tasks": "Which tasks a plan asks for, so that one store can serve several plans.",
}


# Rooms with a page of their own.
ROOMS = (
    "bounds",
    "masks",
    "report",
    "runs",
    "studies.mean_field",
    "studies.paper",
    "studies.variants",
    "studies.worst_case",
    "training",
)
# The verbs that a newcomer meets first; others follow in the order of the alphabet.
FIRST = " local_lipschitz load scan influence certify "


def names() -> dict[str, str]:
    """The public names: one page for the package, one for each room."""
    import lipscope

    top = [name for name in lipscope.__all__ if not _is_module(lipscope, name)]
    groups = {
        "Verbs": sorted((n for n in top if n[0].islower()), key=lambda n: (FIRST.find(f" {n} ") % 99, n)),
        "Layers": [n for n in ("Attention", "Rotary", "LayerNorm", "RMSNorm") if n in top],
        "Results": [n for n in ("SpectralNorm", "Run") if n in top],
        "Solvers": [n for n in ("Auto", "GolubKahan", "Dense") if n in top],
    }
    groups["Models and operators"] = [n for n in top if not any(n in group for group in groups.values())]
    rooms = {room: importlib.import_module(f"lipscope.{room}") for room in ROOMS}
    parts = ["# Python", f"{NOTE} The texts are the docstrings; their examples are run by `tests/test_package.py`.",
             "Everything below is a name of the package: `import lipscope`, then `lipscope.local_lipschitz(…)`. Further "
             "names are in " + ", ".join(f"[`lipscope.{room}`](api-{room}.md)" for room in rooms) + "."]  # fmt: skip
    for title, group in groups.items():
        # Layers and normalisations share bases that are no names of the package.
        shown = "\n    options:\n      inherited_members: true" if title == "Layers" else ""
        parts += [f"## {title}", *(f"::: lipscope.{name}{shown}" for name in group)]
    pages = {"api.md": "\n\n".join(parts) + "\n"}
    for room, module in rooms.items():
        public = sorted((n for n in module.__all__ if not _is_module(module, n)), key=lambda n: (n[0].isupper(), n))
        inner = sorted(n for n in module.__all__ if _is_module(module, n))
        text = [f"# lipscope.{room}", f"{NOTE}", (module.__doc__ or "").strip().replace("``", "`")]
        text += [f"::: lipscope.{room}.{name}\n    options:\n      heading_level: 2" for name in public]
        text += [f"::: lipscope.{room}.{name}\n    options:\n      heading_level: 2" for name in inner]
        pages[f"api-{room}.md"] = "\n\n".join(text) + "\n"
    return pages


def _is_module(module: Any, name: str) -> bool:
    import types

    return isinstance(getattr(module, name), types.ModuleType)


def written() -> dict[str, str]:
    """Every page by its file name."""
    return {"cli.md": commands(), "statuses.md": statuses(), "store.md": store(), **names()}


def main() -> None:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "reference")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in written().items():
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
