"""Worst-case inputs: constructions, gradient ascent on σ, growth with the length, and token substitutions."""

from lipscope.adversarial.ascent import Ascent, maximise
from lipscope.adversarial.constructions import NAMES, Construction, construct
from lipscope.adversarial.grouped import grouped_sigma

__all__ = ["NAMES", "Ascent", "Construction", "construct", "grouped_sigma", "maximise"]
