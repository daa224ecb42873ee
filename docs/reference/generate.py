"""Write the pages of docs/reference from the code: the commands, the public names, the statuses, the store's tables.

    python docs/reference/generate.py

The pages are committed, and tests/test_docs_reference.py compares them with what this script writes.
"""

from __future__ import annotations

import argparse
import sqlite3
from pathlib import Path
from typing import Any

NOTE = "Written by `docs/reference/generate.py`; do not edit it by hand."


def commands() -> str:
    """Every command with its arguments and options."""
    from typer.main import get_command

    from lipscope.cli import app

    parts = ["# Commands", f"{NOTE} `lipscope COMMAND --help` says the same.", "Every command ends with exit code 0 when "
             "all is well, 2 with one line on standard error when something is wrong with what it was given, and 1 when a "
             "sweep or a run has failed tasks. `--debug` shows the traceback."]  # fmt: skip
    group: Any = get_command(app)
    found = dict(sorted(group.commands.items()))
    parts.append("| command | what it does |\n|---|---|\n" + "\n".join(
        f"| [`lipscope {name}`](#lipscope-{name}) | {_cell(_summary(command))} |" for name, command in found.items()
    ))  # fmt: skip
    for name, command in found.items():
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        options = [p for p in command.params if p.param_type_name == "option"]
        usage = " ".join([*(a.make_metavar(_context(command)) for a in arguments), "[OPTIONS]"])
        parts += [f"## lipscope {name}", f"```text\nlipscope {name} {usage}\n```", command.help.strip()]
        rows = [f"| `{a.make_metavar(_context(command))}` | {'' if a.required else 'optional'} | {_cell(a.help)} |"
                for a in arguments]  # fmt: skip
        rows += [f"| {_switch(o)} | {_default(o)} | {_cell(o.help)} |" for o in options if not getattr(o, "hidden", False)]
        parts.append("\n".join(["| argument, option | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _context(command: Any) -> Any:
    import click

    return click.Context(command)


def _summary(command: Any) -> str:
    return str(command.help).strip().split("\n\n")[0].replace("\n", " ")


def _switch(option: Any) -> str:
    names = [f"`{name}`" for name in (*option.opts, *option.secondary_opts)]
    if option.is_flag:
        return " / ".join(names)
    choices = getattr(option.type, "choices", None)
    value = ", ".join(f"`{c}`" for c in choices) if choices else f"*{option.type.name}*"
    return f"{' '.join(names)} {value}"


def _default(option: Any) -> str:
    value = getattr(option.default, "value", option.default)
    if option.required:
        return "needed"
    if value is None or (option.is_flag and not value):
        return ""
    return f"`{value}`"


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def statuses() -> str:
    """What every status, kind of upper end and refusal means."""
    from lipscope.models.selftest import SelfTestError
    from lipscope.spectral.output import Status
    from lipscope.sweep import engines, errors

    parts = ["# What a status means", NOTE, "## How a measurement ended", "`status` of a result and of a row; "
             "`result.message` is the paragraph below it."]  # fmt: skip
    for status in Status:
        parts += [f"### `{status}`", status.explanation]
    parts += ["## What kind of upper end", "`upper_kind` of a result and of a row.",
              "\n".join(["| kind | meaning |", "|---|---|", *(f"| `{k}` | {v} |" for k, v in KINDS.items())])]  # fmt: skip
    parts += ["## How a task of a sweep ended", TASKS]
    parts += ["## Refusals that have a name", "Everything else that is wrong with what you hand in is a `ValueError` (or "
              "`TypeError`, `FileNotFoundError`) that names the argument, what is wrong with it and what would be right; "
              "on the command line it is that one line."]  # fmt: skip
    classes = [SelfTestError, engines.EngineError, *(
        item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)
    )]  # fmt: skip
    parts.append("\n".join(["| error | when |", "|---|---|", *(
        f"| `{item.__module__}.{item.__name__}` | {_cell((item.__doc__ or '').replace('``', '`'))} |" for item in classes
    )]))  # fmt: skip
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
    """The tables of a store as they are after all migrations."""
    from lipscope.sweep.schema import APPLICATION_ID, KEY_COLUMNS, VERSION, migrate

    connection = sqlite3.connect(":memory:")
    migrate(connection)
    parts = [
        "# The store", f"{NOTE} The tables are read from a new store, which has gone through all migrations of "
        "`lipscope.sweep.schema`.",
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
            facts += [f"default {default}"] * (default is not None) + [f"a {links[column]}"] * (column in links)
            rows.append(f"| `{column}` | {kind} | {', '.join(facts)} |")
        parts.append("\n".join(["| column | type | |", "|---|---|---|", *rows]))
    parts.append(f"A row is told apart by its key columns, {', '.join(f'`{c}`' for c in KEY_COLUMNS)}, and by all that its "
                 "task was measured with; `key` is the hash of all of it.")  # fmt: skip
    return "\n\n".join(parts) + "\n"


TABLES = {
    "plans": "What was asked for, as TOML.",
    "environments": "Where things ran: versions, processor, as JSON.",
    "runs": "Every start of a sweep on this store.",
    "tasks": "One task is one layer, scope, length and batch of inputs: what it is (`identity`, and `labels` for people, as "
    "JSON), how it ended, and what it cost.",
    "rows": "One row per measurement. `measured` holds everything that is not a key, as JSON; `checksum` covers all other "
    "columns.",
    "plan_tasks": "Which tasks a plan asks for, so that one store can serve several plans.",
}


def names() -> dict[str, str]:
    """The public names: one page for the package, one for each room."""
    import importlib

    import lipscope

    top = [name for name in lipscope.__all__ if name != "__version__"]
    groups = {
        "Verbs": [n for n in top if n[0].islower() and n != "as_mask"],
        "Layers": [n for n in ("Attention", "Rotary", "LayerNorm", "RMSNorm") if n in top],
        "Masks": ["as_mask", *(n for n in top if lipscope._HOME[n] == "attention.masks" and n != "as_mask")],
        "Results": [n for n in ("SpectralNorm", "Status", "Scan") if n in top],
        "Solvers": [n for n in ("Auto", "GolubKahan", "Power", "Dense") if n in top],
    }
    groups["Models and operators"] = [n for n in top if not any(n in group for group in groups.values())]
    rooms = {room: importlib.import_module(f"lipscope.{room}") for room in sorted(lipscope._ROOMS)}
    parts = ["# Python", f"{NOTE} The texts are the docstrings; their examples are run by `tests/test_package.py`.",
             "Everything below is a name of the package: `import lipscope`, then `lipscope.local_lipschitz(…)`. Further "
             "names are in " + ", ".join(f"[`lipscope.{room}`](api-{room}.md)" for room in rooms) + "."]  # fmt: skip
    for title, group in groups.items():
        parts += [f"## {title}", *(f"::: lipscope.{name}" for name in group)]
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
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, text in written().items():
        (out / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
