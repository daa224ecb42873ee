"""Attention on probability measures: token sequences of any length, weighted, infinitely many, compared by transport."""

from lipscope.doors import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
