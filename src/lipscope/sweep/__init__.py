"""Sweeps: many measurements that survive anything. A plan becomes tasks, an engine runs them, a store keeps every row."""

from lipscope.sweep.engines import Dask, EngineError, InProcess
from lipscope.sweep.errors import ForeignFileError, LockedStoreError, NewerStoreError, StoreError, StoreFullError
from lipscope.sweep.export import export
from lipscope.sweep.plan import Block, ModelChoice, Plan
from lipscope.sweep.registry import Kind, Measured, Pass, Quantity, register_kind, register_quantity
from lipscope.sweep.run import Summary, dry_run, run_plan
from lipscope.sweep.store import Store
from lipscope.sweep.tasks import expand

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
    "export",
    "register_kind",
    "register_quantity",
    "run_plan",
]
