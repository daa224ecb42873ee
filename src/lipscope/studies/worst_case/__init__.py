"""Worst-case inputs: how large σ of a layer gets, by construction and by search.

``construct`` builds inputs at which σ is provably large, ``maximise`` climbs from them, ``growth`` follows the worst σ
over the number of tokens, ``regime_map`` says up to where it grows as √n, ``attack_tokens`` looks for the words of a text
whose replacement makes a layer least smooth.
"""

from lipscope.doors import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
