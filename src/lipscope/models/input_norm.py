"""The normalisation whose output is what a layer's attention sees: it bounds the norm of every token, whatever the text.

Found by watching, not by architecture: in one forward pass, the module whose output *is* the attention's tokens. In a
pre-norm block that is its own normalisation, in a post-norm block the one that closes the block before (or the embedding).
Its weights are believed only when a ``LayerNorm`` or ``RMSNorm`` made of them reproduces the module, also far from the
recorded tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lipscope.attention.norms import LayerNorm, Normalisation, RMSNorm
from lipscope.models.anatomy import Layer, first_tensor, same
from lipscope.models.capture import Recording, replaying


def input_normalisations(model: nn.Module, layers: list[Layer], recording: Recording) -> dict[int, Normalisation | None]:
    """By layer index: the normalisation that attention's tokens come from, or None when there is none.

    Args:
        model: the model.
        layers: its attention layers.
        recording: a recorded forward pass; the model is run on its inputs once more.
    """
    wanted = {layer.index: recording.hosts[layer.index].tokens for layer in layers}
    sources: dict[int, nn.Module] = {}

    def leaving(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        tensor = first_tensor(output)
        for index, tokens in wanted.items():
            if same(tensor, tokens):
                sources[index] = module

    hooks = [part.register_forward_hook(leaving) for part in model.modules() if "norm" in type(part).__name__.lower()]
    found: dict[nn.Module, Normalisation | None] = {}
    with replaying(model, recording.documents), torch.no_grad():
        try:
            recording.run()
        finally:
            for hook in hooks:
                hook.remove()
        for index, module in sources.items():
            if module not in found:
                found[module] = describe(module, wanted[index])
    return {layer.index: found.get(sources[layer.index]) if layer.index in sources else None for layer in layers}


def describe(module: nn.Module, like: Tensor) -> Normalisation | None:
    """The module as a ``LayerNorm`` or ``RMSNorm``, or None when it is neither.

    Args:
        module: a normalisation of any library.
        like: a tensor of tokens (…, d) of the right width, dtype and device.
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    gain = weight.detach() if isinstance(weight, Tensor) else like.new_ones(like.shape[-1])
    offset = bias.detach() if isinstance(bias, Tensor) else None
    if gain.shape != like.shape[-1:]:
        return None
    eps = next((float(value) for name in _EPSILONS if isinstance(value := getattr(module, name, None), (int, float))), 0.0)
    candidates: list[Normalisation] = [LayerNorm(gain, offset, eps)]
    if offset is None:
        # Gemma stores g − 1.
        candidates += [RMSNorm(gain, eps), RMSNorm(1 + gain, eps)]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 4, like.shape[-1], generator=generator, dtype=torch.float64).to(like)
    # Large, ordinary, off-centre and tiny tokens: the last ones show ε.
    probes = torch.cat([100 * noise, noise, noise + 3, 1e-3 * noise], dim=1)
    with torch.no_grad():
        wanted = module(probes)
        return next((norm for norm in candidates if _close(norm(probes), wanted)), None)


def comes_from(norm: Normalisation, u: Tensor, tokens: Tensor) -> bool:
    """Whether ``tokens`` are ``norm(u)``, up to rounding."""
    return u.shape == tokens.shape and _close(norm(u), tokens)


_EPSILONS = ("eps", "variance_epsilon", "epsilon")


def _close(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) <= 4096 * torch.finfo(b.dtype).eps * max(float(b.abs().max()), 1e-30)
