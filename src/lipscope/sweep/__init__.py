"""Sweeps: many measurements that survive anything. A plan becomes tasks, an engine runs them, a store keeps every row.

The names load on first use: a plan is read, and refused, without waiting for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipscope.sweep.engines import Dask, EngineError, InProcess
    from lipscope.sweep.errors import ForeignFileError, LockedStoreError, NewerStoreError, StoreError, StoreFullError
    from lipscope.sweep.export import export_table
    from lipscope.sweep.plan import Block, ModelChoice, Plan
    from lipscope.sweep.registry import Kind, Measured, Pass, Quantity, register_kind, register_quantity
    from lipscope.sweep.run import Summary, dry_run, run_plan
    from lipscope.sweep.store import Store
    from lipscope.sweep.tasks import expand

_HOME = {
    "Block": "plan",
    "Dask": "engines",
    "EngineError": "engines",
    "ForeignFileError": "errors",
    "InProcess": "engines",
    "Kind": "registry",
    "LockedStoreError": "errors",
    "Measured": "registry",
    "ModelChoice": "plan",
    "NewerStoreError": "errors",
    "Pass": "registry",
    "Plan": "plan",
    "Quantity": "registry",
    "Store": "store",
    "StoreError": "errors",
    "StoreFullError": "errors",
    "Summary": "run",
    "dry_run": "run",
    "expand": "tasks",
    "export_table": "export",
    "register_kind": "registry",
    "register_quantity": "registry",
    "run_plan": "run",
}

__all__ = [
    "Block",
    "Dask",
    "EngineError",
    "ForeignFileError",
    "InProcess",
    "Kind",
    "LockedStoreError",
    "Measured",
    "ModelChoice",
    "NewerStoreError",
    "Pass",
    "Plan",
    "Quantity",
    "Store",
    "StoreError",
    "StoreFullError",
    "Summary",
    "dry_run",
    "expand",
    "export_table",
    "register_kind",
    "register_quantity",
    "run_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lipscope.sweep' has no attribute {name!r}")
    return getattr(import_module(f"lipscope.sweep.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
