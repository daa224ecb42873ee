"""Which attention is smoothest? Every kind of attention with the same weights on the same tokens, by the same ruler."""

from lipscope.compare.study import Comparison, Kind, compare, random_layer, sphere_tokens

__all__ = ["Comparison", "Kind", "compare", "random_layer", "sphere_tokens"]
