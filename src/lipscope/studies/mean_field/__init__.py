"""Attention on probability measures: token sequences of any length, weighted, infinitely many, compared by transport."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
