"""How large σ could be: bounds on whole sets, at one input, and on a ball around one input.

Each source has its file; ``registry.TABLE`` says which bound holds for which mask and score rule, and ``table`` evaluates
all that apply. Proofs are in docs/theory.
"""

from lipscope.bounds import (
    block_inf,
    bounded_scores,
    castin2024,
    certificates,
    kim2021,
    large_radius,
    lower,
    nair2025,
    newhouse2025,
    normalisation,
    qi2023,
    ramapuram2024,
    refined,
    registry,
    sinkhorn,
    softmax_jacobian,
    yudin2025,
)
from lipscope.bounds.ball import certified_radius, certify
from lipscope.bounds.bound import Bound
from lipscope.bounds.certificates import certified_upper
from lipscope.bounds.constants import Constants, HeadConstants
from lipscope.bounds.table import BoundTable, table

__all__ = [
    "Bound",
    "BoundTable",
    "Constants",
    "HeadConstants",
    "block_inf",
    "bounded_scores",
    "castin2024",
    "certificates",
    "certified_radius",
    "certified_upper",
    "certify",
    "kim2021",
    "large_radius",
    "lower",
    "nair2025",
    "newhouse2025",
    "normalisation",
    "qi2023",
    "ramapuram2024",
    "refined",
    "registry",
    "sinkhorn",
    "softmax_jacobian",
    "table",
    "yudin2025",
]
