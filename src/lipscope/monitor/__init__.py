"""σ while training: every k steps on a small probe batch as an interval, and at every step a free lower bound.

``Monitor(model).step(batch)`` serves hand-written loops, ``LipschitzCallback`` the Hugging Face ``Trainer``, and
``lipscope.monitor.lightning.LipschitzCallback`` Lightning. Training goes on bit for bit as if nothing were watched.
"""

from typing import TYPE_CHECKING, Any

from lipscope.monitor.readings import Reading, Record
from lipscope.monitor.thresholds import Alarm, Threshold

if TYPE_CHECKING:
    from lipscope.monitor.huggingface import LipschitzCallback
    from lipscope.monitor.monitor import Monitor

__all__ = ["Alarm", "LipschitzCallback", "Monitor", "Reading", "Record", "Threshold"]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import.
    if name == "Monitor":
        from lipscope.monitor.monitor import Monitor

        return Monitor
    if name == "LipschitzCallback":
        from lipscope.monitor.huggingface import LipschitzCallback

        return LipschitzCallback
    raise AttributeError(f"module 'lipscope.monitor' has no attribute {name!r}")
