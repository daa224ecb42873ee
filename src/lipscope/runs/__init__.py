"""Runs: many measurements that survive anything. A plan becomes tasks, an engine runs them, a store keeps every row.

The names load on first use: a plan is read, and refused, without waiting for torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
