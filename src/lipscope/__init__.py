"""lipscope: how smooth is attention? The local Lipschitz constant of attention, as an interval with its story.

The public names load on first use, so that ``lipscope --help`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lipscope.attention.layer import Attention
    from lipscope.attention.masks import (
        Causal,
        Explicit,
        Full,
        Mask,
        Packed,
        Padding,
        PrefixLM,
        Window,
        as_mask,
    )
    from lipscope.attention.norms import LayerNorm, RMSNorm
    from lipscope.attention.rotary import Rotary
    from lipscope.attention.variants import (
        CosineAttention,
        L2Attention,
        QKNormAttention,
        SigmoidAttention,
        SinkhornAttention,
    )
    from lipscope.bounds.ball import certify
    from lipscope.facade import local_lipschitz
    from lipscope.models.handle import Model
    from lipscope.models.load import load
    from lipscope.models.scan import Scan, scan
    from lipscope.smoothing.smooth import smooth
    from lipscope.spectral.autodiff import AutodiffOperator
    from lipscope.spectral.dense import Auto, Dense
    from lipscope.spectral.golub_kahan import GolubKahan
    from lipscope.spectral.norm import spectral_norm
    from lipscope.spectral.operator import DenseOperator, Operator
    from lipscope.spectral.output import Status
    from lipscope.spectral.power import Power
    from lipscope.spectral.result import SpectralNorm
    from lipscope.token_influence import influence

__version__ = "0.1.0"

_HOME = {
    "Attention": "attention.layer",
    "Auto": "spectral.dense",
    "AutodiffOperator": "spectral.autodiff",
    "Causal": "attention.masks",
    "CosineAttention": "attention.variants",
    "Dense": "spectral.dense",
    "DenseOperator": "spectral.operator",
    "Explicit": "attention.masks",
    "Full": "attention.masks",
    "GolubKahan": "spectral.golub_kahan",
    "L2Attention": "attention.variants",
    "LayerNorm": "attention.norms",
    "Mask": "attention.masks",
    "Model": "models.handle",
    "Operator": "spectral.operator",
    "Packed": "attention.masks",
    "Padding": "attention.masks",
    "Power": "spectral.power",
    "PrefixLM": "attention.masks",
    "QKNormAttention": "attention.variants",
    "RMSNorm": "attention.norms",
    "Rotary": "attention.rotary",
    "Scan": "models.scan",
    "SigmoidAttention": "attention.variants",
    "SinkhornAttention": "attention.variants",
    "SpectralNorm": "spectral.result",
    "Status": "spectral.output",
    "Window": "attention.masks",
    "as_mask": "attention.masks",
    "certify": "bounds.ball",
    "influence": "token_influence",
    "load": "models.load",
    "local_lipschitz": "facade",
    "scan": "models.scan",
    "smooth": "smoothing.smooth",
    "spectral_norm": "spectral.norm",
}

_ROOMS = ("adversarial", "bounds", "compare", "meanfield", "monitor", "paper", "regularise", "report", "sweep")

__all__ = [
    "Attention",
    "Auto",
    "AutodiffOperator",
    "Causal",
    "CosineAttention",
    "Dense",
    "DenseOperator",
    "Explicit",
    "Full",
    "GolubKahan",
    "L2Attention",
    "LayerNorm",
    "Mask",
    "Model",
    "Operator",
    "Packed",
    "Padding",
    "Power",
    "PrefixLM",
    "QKNormAttention",
    "RMSNorm",
    "Rotary",
    "Scan",
    "SigmoidAttention",
    "SinkhornAttention",
    "SpectralNorm",
    "Status",
    "Window",
    "__version__",
    "as_mask",
    "certify",
    "influence",
    "load",
    "local_lipschitz",
    "scan",
    "smooth",
    "spectral_norm",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(f"lipscope.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'lipscope' has no attribute {name!r}")
    return getattr(import_module(f"lipscope.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
