"""What a user should know about measurements that a run takes over from an earlier one.

A task is known by its content: measured before under another name, or by other versions, it is not measured again. The rows
then carry the old name, and digits beyond the tolerance may differ between versions, so both are said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipscope.runs.store import Store
    from lipscope.runs.tasks import Task

_TOLD = ("lipscope", "torch", "transformers")


def kept_notices(ledger: Store, tasks: Iterable[Task], here: dict[str, Any]) -> list[str]:
    """One sentence for every other name and every other version behind the tasks that are done already.

    Args:
        ledger: the store.
        tasks: what the plan asks for now.
        here: the environment of this run.

    Returns:
        The sentences; none when names and versions agree.
    """
    before = ledger.provenance()
    renamed: Counter[tuple[str, str, str]] = Counter()
    versions: Counter[tuple[str, str, str]] = Counter()
    for task in tasks:
        if task.key not in before:
            continue
        labels, environment = before[task.key]
        for what in ("model", "text"):
            old, new = labels.get(what), task.labels.get(what)
            if old is not None and new is not None and old != new:
                renamed[what, old, new] += 1
        for package in _TOLD:
            old, new = environment.get("versions", {}).get(package), here["versions"].get(package)
            if old is not None and new is not None and old != new:
                versions[package, old, new] += 1
    return [
        f"{count} tasks of {what} {new!r} were measured before as {old!r}, which has the same content: their rows keep "
        f"the name {old!r}"
        for (what, old, new), count in renamed.items()
    ] + [
        f"{count} tasks were measured before with {package} {old} (this run: {new}) and are kept; name another store to "
        "measure them again"
        for (package, old, new), count in versions.items()
    ]
