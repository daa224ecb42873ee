"""Names of task kinds and of quantities, and the protocols behind them.

A *kind* says how a block becomes forward passes and how a pass becomes rows: text cut into inputs, packed documents,
adversarial points. A *quantity* adds columns to the rows of a kind: another estimator, a bound. Both are known by an import
path ``"package.module:object"``, which is what tasks carry, so that a worker on another machine finds them by itself; short
names are for people.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lipscope.models.model import Model
    from lipscope.models.recorded import Recorded
    from lipscope.runs.plan import Block

Row = dict[str, Any]

KINDS = {"text": "lipscope.runs.kinds:Text", "packed": "lipscope.runs.kinds:Packed"}
QUANTITIES: dict[str, str] = {}
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
    """Rows of one layer, with all that a quantity needs to look again."""

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
        ...

    def record(self, handle: Model, payload: dict[str, Any]) -> Any:
        """Run the pass; what it returns serves every task on it."""
        ...

    def measure(self, handle: Model, recorded: Any, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """The rows of one task, deterministic in its arguments; ``task`` is its whole identity."""
        ...


class Quantity(Protocol):
    """Further columns for measured rows: one dictionary per row, in the same order."""

    def __call__(self, at: Measured) -> Sequence[Row]:
        """The columns."""
        ...


def register_kind(name: str, path: str) -> None:
    """Give a kind a short name."""
    KINDS[name] = _check_path(path)


def register_quantity(name: str, path: str) -> None:
    """Give a quantity a short name."""
    QUANTITIES[name] = _check_path(path)


def kind_path(name: str) -> str:
    """The import path of a kind; refuses what cannot be imported."""
    path = _path(name, KINDS, "kind")
    if name not in KINDS:
        kind = load_object(path)
        lacking = [part for part in _PARTS_OF_A_KIND if not hasattr(kind, part)]
        if not isinstance(kind, type) or lacking:
            raise ValueError(
                f"kind {name!r} must be a class with {', '.join(_PARTS_OF_A_KIND)}; "
                + (f"it lacks {', '.join(lacking)}" if lacking else f"it is a {type(kind).__name__}")
            )
    return path


def quantity_path(name: str) -> str:
    """The import path of a quantity; refuses what cannot be imported."""
    path = _path(name, QUANTITIES, "quantity")
    if name not in QUANTITIES and not _takes_one_argument(quantity := load_object(path)):
        raise ValueError(f"quantity {name!r} must be a function of one argument, Measured; got {quantity!r}")
    return path


def load_object(path: str) -> Any:
    """The object behind ``"package.module:object"``."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _path(name: str, known: dict[str, str], what: str) -> str:
    if not isinstance(name, str) or (name not in known and ":" not in name):
        choices = ", ".join(known) if known else "none by a short name"
        raise ValueError(f"unknown {what} {name!r}; known: {choices}; or give 'package.module:name'")
    if name in known:
        return known[name]
    try:
        load_object(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} {name!r} cannot be imported: {error}") from None
    return name


def _takes_one_argument(quantity: Any) -> bool:
    if not callable(quantity):
        return False
    try:
        inspect.signature(quantity).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C without a signature: only calling it would tell
        return True
    return True


def _check_path(path: str) -> str:
    if not all(path.partition(":")):
        raise ValueError(f"path must look like 'package.module:object', got {path!r}")
    return path
