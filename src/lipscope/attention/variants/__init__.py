"""Attention with other scores or other weights, made to be smoother: L2, cosine, QK-normalised, sigmoid and Sinkhorn."""

from lipscope.attention.variants.family import VARIANTS, family, variant
from lipscope.attention.variants.layer import Variant
from lipscope.attention.variants.sigmoid import SigmoidAttention
from lipscope.attention.variants.sinkhorn import SinkhornAttention
from lipscope.attention.variants.softmax import CosineAttention, L2Attention, QKNormAttention

__all__ = [
    "VARIANTS",
    "CosineAttention",
    "L2Attention",
    "QKNormAttention",
    "SigmoidAttention",
    "SinkhornAttention",
    "Variant",
    "family",
    "variant",
]
