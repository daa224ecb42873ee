"""Masks as objects. Everywhere a mask is taken, a short string such as ``"causal&pad-left:3"`` or a tensor does as well."""

from lipscope.attention.masks import Causal, Explicit, Full, Mask, Packed, Padding, PrefixLM, Window, as_mask
from lipscope.doors import checked

__all__ = ["Causal", "Explicit", "Full", "Mask", "Packed", "Padding", "PrefixLM", "Window", "as_mask"]

for _mask in (Explicit, Packed, Padding, PrefixLM, Window):
    checked(_mask)
