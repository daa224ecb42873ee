"""Runs: many measurements that survive anything. A plan becomes tasks, an engine runs them, a store keeps every row.

The names load on first use: a plan is read, and refused, without waiting for torch.
"""

from lipscope.doors import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
