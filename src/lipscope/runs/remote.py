"""What a Dask cluster sees of a job: bytes.

A scheduler unpickles what passes through it; with bytes it imports this small module and neither torch nor transformers.
"""

from __future__ import annotations

import pickle
from typing import Any


def run_packed_job(job: bytes) -> bytes:
    """Run a pickled job and pickle its outcomes."""
    from lipscope.runs.work import run_job

    return pickle.dumps(list(run_job(pickle.loads(job))))


def introduce() -> dict[str, Any]:
    """Versions and hardware of a worker that is ready to work: all that a job needs is imported."""
    import lipscope.runs.work  # noqa: F401
    from lipscope.runs.environment import environment

    return environment(1)
