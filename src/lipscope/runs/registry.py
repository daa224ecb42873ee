"""Names of task kinds, quantities and loaders, the protocols behind them, and whose code a plan file may name.

A *kind* says how a block becomes forward passes and how a pass becomes rows: text cut into inputs, packed documents,
adversarial points. A *quantity* adds columns to the rows of a kind: another estimator, a bound. A *loader* makes a model of
a name. All are known by an import path ``"package.module:object"``, which is what tasks carry, so that a worker on another
machine finds them by itself. Short names are for people: those registered here, and those that installed packages declare as
entry points ``lipscope.kinds``, ``lipscope.quantities`` and ``lipscope.loaders``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lipscope.models.model import Model
    from lipscope.models.recorded import Recorded
    from lipscope.runs.plan import Block, ModelChoice

Row = dict[str, Any]

KINDS = {
    "text": "lipscope.runs.kinds:Text",
    "packed": "lipscope.runs.kinds:Packed",
    "signals": "lipscope.runs.kinds:Signals",
}
QUANTITIES: dict[str, str] = {}
LOADERS = {"causal-bert": "lipscope.studies.paper.cast:causal_bert"}
_GROUPS = {"kind": KINDS, "quantity": QUANTITIES, "loader": LOADERS}
_PARTS_OF_A_KIND = ("expand", "record", "measure", "coordinates", "effort")


@dataclass(frozen=True)
class Pass:
    """One forward pass and what is measured on it."""

    # What the pass is made of, as JSON values: n, the fingerprint of the text, a digest of the inputs, ….
    identity: dict[str, Any]
    payload: dict[str, Any]  # what a worker needs to run it, as JSON values
    n: int  # tokens per input
    inputs: int  # inputs in the pass
    text: str | None  # name of the text, or None
    settings: tuple[dict[str, Any], ...]  # one dictionary per task; each has at least ``layer``, ``scope`` and ``heads``


@dataclass(frozen=True)
class Measured:
    """Rows of one layer, with all that a quantity needs to look again: its function of this gives columns for every row."""

    handle: Model
    recording: Recorded
    settings: dict[str, Any]  # those of the task
    rows: Sequence[Row]  # what the kind measured


class TaskKind(Protocol):
    """How a block becomes passes, and a pass rows. Instances keep no state: they are made anew on every worker."""

    coordinates: tuple[str, ...]
    """Columns that tell the rows of one task apart."""
    effort: float
    """Work of a task relative to one measurement of σ; for estimates and progress only."""

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """The passes of one model; raises ValueError for settings that do not fit it."""

    def record(self, handle: Model, payload: dict[str, Any]) -> Any:
        """Run the pass; what it returns serves every task on it."""

    def measure(self, handle: Model, recorded: Any, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """The rows of one task, deterministic in its arguments; ``task`` is its whole identity."""


def kind_path(name: str) -> str:
    """The import path of a kind; refuses what cannot be imported."""
    path = known_path("kind", name)
    if path not in KINDS.values():
        kind = _imported("kind", path)
        lacking = [part for part in _PARTS_OF_A_KIND if not hasattr(kind, part)]
        if not isinstance(kind, type) or lacking:
            raise ValueError(
                f"kind {name!r} must be a class with {', '.join(_PARTS_OF_A_KIND)}; "
                + (f"it lacks {', '.join(lacking)}" if lacking else f"it is a {type(kind).__name__}")
            )
    return path


def quantity_path(name: str) -> str:
    """The import path of a quantity; refuses what cannot be imported."""
    path = known_path("quantity", name)
    if path not in QUANTITIES.values() and not _takes_one_argument(quantity := _imported("quantity", path)):
        raise ValueError(f"quantity {name!r} must be a function of one argument, Measured; got {quantity!r}")
    return path


def known_path(what: str, name: str) -> str:
    """The import path behind a short name of a ``"kind"``, ``"quantity"`` or ``"loader"``; a path is its own. No import."""
    known = _known(what, str(name))
    if isinstance(name, str) and name in known:
        return known[name]
    if not isinstance(name, str) or ":" not in name:
        choices = ", ".join(known) if known else "none by a short name"
        raise ValueError(f"unknown {what} {name!r}; known: {choices}; or give 'package.module:name'")
    if not all(name.partition(":")):
        raise ValueError(f"path must look like 'package.module:object', got {name!r}")
    return name


@dataclass(frozen=True)
class Trust:
    """What a plan file may do beyond measuring. It cannot grant itself anything: only who reads it can."""

    modules: tuple[str, ...] = ()  # modules or packages whose kinds, quantities and loaders it may name by import path
    allow_pickle: bool = False  # models of the plan may be pickled
    trust_remote_code: bool = False  # models of the plan may bring code

    def check(self, what: str, name: Any) -> None:
        """Refuse an import path that is neither registered, nor of an installed package's entry points, nor trusted."""
        if not isinstance(name, str) or ":" not in name or name in _known(what, name).values():
            return
        module = name.partition(":")[0]
        if not any(f"{module}.".startswith(f"{trusted}.") for trusted in self.modules):
            raise ValueError(
                f"{what} {name!r} is code that the plan wants to run, and a plan file cannot decide that. If you know it, "
                f"allow it with --trust-module {module}, or Plan.read(…, trust=Trust(modules=({module!r},)))"
            )

    def grant(self, model: ModelChoice) -> ModelChoice:
        """A model of a plan file with what was granted, which holds for all; refuses one that wants more."""
        self.check("loader", model.loader)
        flags = {flag: getattr(self, flag) for flag in ("allow_pickle", "trust_remote_code")}
        for flag, granted in flags.items():
            if getattr(model, flag) and not granted:
                raise ValueError(
                    f"the plan wants {flag} for model {model.name!r}, which can run code, and a plan file cannot decide that"
                    f". If you trust the model, add --{flag.replace('_', '-')}, or Plan.read(…, trust=Trust({flag}=True))"
                )
        return replace(model, **flags)


def _known(what: str, name: str) -> dict[str, str]:
    """The import paths by short name; installed packages are asked when our own names are not enough."""
    ours = _GROUPS[what]
    if name in ours or name in ours.values():
        return ours
    groups = {"kind": "kinds", "quantity": "quantities", "loader": "loaders"}
    return {entry.name: entry.value for entry in metadata.entry_points(group=f"lipscope.{groups[what]}")} | ours


def _imported(what: str, path: str) -> Any:
    try:
        return resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} {path!r} cannot be imported: {error}") from None


def _takes_one_argument(quantity: Any) -> bool:
    try:
        with suppress(ValueError):  # written in C without a signature: only calling it would tell
            inspect.signature(quantity).bind(None)
    except TypeError:  # also of what cannot be called
        return False
    return True
