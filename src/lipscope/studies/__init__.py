"""Studies that stand on everything else: worst-case inputs, the mean field, attention variants, the paper's experiments."""

from lipscope.doors import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
