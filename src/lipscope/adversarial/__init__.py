"""Worst-case inputs: constructions, gradient ascent on σ, growth with the length, and token substitutions in a model.

``construct`` builds inputs at which σ is provably large, ``maximise`` climbs from them, ``growth`` follows the worst σ
over the number of tokens, ``attack_tokens`` looks for the words of a text whose replacement makes a layer least smooth.
"""

from typing import TYPE_CHECKING, Any

from lipscope.adversarial.ascent import Ascent, maximise
from lipscope.adversarial.constructions import NAMES, Construction, construct
from lipscope.adversarial.grouped import grouped_sigma
from lipscope.adversarial.growth import Growth, WorstInput, growth

if TYPE_CHECKING:
    from lipscope.adversarial.tokens import Substitution, TokenAttack, attack_tokens

__all__ = [
    "NAMES",
    "Ascent",
    "Construction",
    "Growth",
    "Substitution",
    "TokenAttack",
    "WorstInput",
    "attack_tokens",
    "construct",
    "grouped_sigma",
    "growth",
    "maximise",
]


def __getattr__(name: str) -> Any:
    # Only the attack on tokens needs transformers, which takes seconds to import.
    if name in ("Substitution", "TokenAttack", "attack_tokens"):
        from lipscope.adversarial import tokens

        return getattr(tokens, name)
    raise AttributeError(f"module 'lipscope.adversarial' has no attribute {name!r}")
