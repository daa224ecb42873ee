"""Penalties that make attention smoother while it is trained, all differentiable in the weights.

``spectral_penalty`` is σ itself; ``jasmin_penalty``, ``max_logit_penalty`` and ``weight_penalty`` are cheaper quantities
that bounds of σ are made of. ``ModelPenalty`` takes any of them over the layers of a Hugging Face model, inside a training
loop.
"""

from typing import TYPE_CHECKING, Any

from lipscope.regularise.layer import jasmin_penalty, max_logit_penalty, weight_penalty
from lipscope.regularise.rows import g_k, jasmin, max_logit
from lipscope.regularise.spectral import matrix_norm, spectral_penalty

if TYPE_CHECKING:
    from lipscope.regularise.model import ModelPenalty

__all__ = [
    "ModelPenalty",
    "g_k",
    "jasmin",
    "jasmin_penalty",
    "matrix_norm",
    "max_logit",
    "max_logit_penalty",
    "spectral_penalty",
    "weight_penalty",
]


def __getattr__(name: str) -> Any:
    # Only models need transformers, which takes seconds to import.
    if name == "ModelPenalty":
        from lipscope.regularise.model import ModelPenalty

        return ModelPenalty
    raise AttributeError(f"module 'lipscope.regularise' has no attribute {name!r}")
