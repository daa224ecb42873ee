"""Worst-case inputs: how large σ of a layer gets, by construction and by search.

``construct`` builds inputs at which σ is provably large, ``maximise`` climbs from them, ``growth`` follows the worst σ
over the number of tokens, ``attack_tokens`` looks for the words of a text whose replacement makes a layer least smooth.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
