"""How large σ could be: bounds on whole sets, at one input, and on a ball around one input.

``names`` lists the bounds that hold for a layer, ``evaluate`` computes one of them and ``table`` all that apply;
``certified_radius`` says how far an input may move. Which bound holds for which mask and score rule stands above each of
them as ``@bound(...)``. Proofs are in docs/theory.
"""

from lipscope.doors import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
