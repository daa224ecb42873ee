"""Studies that stand on everything else: worst-case inputs, the mean field, attention variants, the paper's experiments."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
