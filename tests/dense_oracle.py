"""An independent oracle: dense Jacobians by torch.autograd, through the model's own eager attention.

Nothing here goes through lipscope. Where a family keeps its block, its attention and its W_O is written down by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn


class Place(NamedTuple):
    """Where things are: names relative to the model (block) and to the block (the rest).

    style: how attention joins the residual stream: "pre": u + a, "post": norm(u + a), "branch": u + norm(a).
    """

    block: str
    host: str
    out: str
    style: str
    norm: str = ""


PLACES = {
    "bert": Place("encoder.layer.{}", "attention", "attention.output.dense", "post", "attention.output.LayerNorm"),
    "roberta": Place("encoder.layer.{}", "attention", "attention.output.dense", "post", "attention.output.LayerNorm"),
    "distilbert": Place("transformer.layer.{}", "attention", "attention.out_lin", "post", "sa_layer_norm"),
    "modernbert": Place("layers.{}", "attn", "attn.Wo", "pre"),
    "gpt2": Place("h.{}", "attn", "attn.c_proj", "pre"),
    "gpt_neo": Place("h.{}", "attn", "attn.attention.out_proj", "pre"),
    "gpt_neox": Place("layers.{}", "attention", "attention.dense", "pre"),
    "opt": Place("decoder.layers.{}", "self_attn", "self_attn.out_proj", "pre"),
    "bloom": Place("h.{}", "self_attention", "self_attention.dense", "pre"),
    "llama": Place("layers.{}", "self_attn", "self_attn.o_proj", "pre"),
    "mistral": Place("layers.{}", "self_attn", "self_attn.o_proj", "pre"),
    "qwen2": Place("layers.{}", "self_attn", "self_attn.o_proj", "pre"),
    "qwen3": Place("layers.{}", "self_attn", "self_attn.o_proj", "pre"),
    "gemma2": Place("layers.{}", "self_attn", "self_attn.o_proj", "branch", "post_attention_layernorm"),
    "gemma3": Place("layers.{}", "self_attn", "self_attn.o_proj", "branch", "post_attention_layernorm"),
    "olmo2": Place("layers.{}", "self_attn", "self_attn.o_proj", "branch", "post_attention_layernorm"),
    "phi": Place("layers.{}", "self_attn", "self_attn.dense", "pre"),
    "gpt_oss": Place("layers.{}", "self_attn", "self_attn.o_proj", "pre"),
    "t5_encoder": Place("encoder.block.{}", "layer.0.SelfAttention", "layer.0.SelfAttention.o", "pre"),
    "vit": Place("layers.{}", "attention", "attention.o_proj", "pre"),
    "whisper_encoder": Place("layers.{}", "self_attn", "self_attn.out_proj", "pre"),
    "wav2vec2": Place("encoder.layers.{}", "attention", "attention.out_proj", "post", "layer_norm"),
    "wav2vec2_pre_norm": Place("encoder.layers.{}", "attention", "attention.out_proj", "pre"),
    "hubert": Place("encoder.layers.{}", "attention", "attention.out_proj", "post", "layer_norm"),
    "mpnet": Place("encoder.layer.{}", "attention.attn", "attention.attn.o", "post", "attention.LayerNorm"),
}

NORM_BEFORE_ATTENTION = {
    "modernbert", "gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3",
    "phi", "gpt_oss", "t5_encoder", "vit", "whisper_encoder", "wav2vec2_pre_norm",
}  # fmt: skip

CAUSAL = {
    "gpt2", "gpt_neo", "gpt_neox", "opt", "bloom", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "olmo2",
    "phi", "gpt_oss",
}  # fmt: skip


@contextmanager
def eager_in_double(model: nn.Module) -> Iterator[None]:
    """The model's eager attention, without its casts to float32."""
    to, single, softmax = Tensor.to, Tensor.float, nn.functional.softmax

    def kept(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def cast(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64:
            args, kwargs = tuple(map(kept, args)), {name: kept(value) for name, value in kwargs.items()}
        return to(self, *args, **kwargs)

    def wide_softmax(x: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
        return softmax(x, dim, dtype=x.dtype)

    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}.values()
    before = [(c, c._attn_implementation_internal, c._experts_implementation_internal) for c in configs]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", cast)
        patch.setattr(Tensor, "float", lambda self: self if self.dtype == torch.float64 else single(self))
        patch.setattr(nn.functional, "softmax", wide_softmax)
        try:
            for c, _, _ in before:
                c._attn_implementation_internal = c._experts_implementation_internal = "eager"
            yield
        finally:
            for c, attention, experts in before:
                c._attn_implementation_internal, c._experts_implementation_internal = attention, experts


class Oracle:
    """Dense Jacobians of one layer of a model, at the tokens the model itself produces from ``inputs``."""

    def __init__(self, family: str, model: nn.Module, layer: int, inputs: dict[str, Any]) -> None:
        self.model, self.inputs, self.place = model, inputs, PLACES[family]
        self.block = model.get_submodule(self.place.block.format(layer))
        self.host, self.out = (self.block.get_submodule(name) for name in self.place[1:3])
        self.calls: dict[nn.Module, tuple[Any, Any]] = {}
        handles = [m.register_forward_pre_hook(self._note, with_kwargs=True) for m in (self.block, self.host)]
        with eager_in_double(model), torch.no_grad():
            model(**inputs)
        for handle in handles:
            handle.remove()

    def _note(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        without_cache = tuple(None if "Cache" in type(value).__name__ else value for value in args)
        self.calls.setdefault(module, (without_cache, dict(kwargs)))

    def tokens(self, module: nn.Module) -> Tensor:
        args, kwargs = self.calls[module]
        return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def run(self, module: nn.Module, x: Tensor, *, seen: nn.Module, before: bool = False) -> Tensor:
        """Call ``module`` on x; what ``seen`` returns (or takes) meanwhile."""
        args, kwargs = self.calls[module]
        kwargs = {name: None if "past" in name else value for name, value in kwargs.items()}
        if "hidden_states" in kwargs:
            kwargs = kwargs | {"hidden_states": x}
        else:
            args = (x, *args[1:])
        found: list[Tensor] = []

        def note(_: nn.Module, given: Any, output: Any) -> None:
            value = given[0] if before else output
            found.append(value[0] if isinstance(value, tuple) else value)

        handle = seen.register_forward_hook(note)
        with eager_in_double(self.model):
            module(*args, **kwargs)
        handle.remove()
        return found[0].reshape(*x.shape[:2], -1)

    def map(self, scope: str) -> tuple[Callable[[Tensor], Tensor], Tensor]:
        u, x = self.tokens(self.block), self.tokens(self.host)
        norm = self.block.get_submodule(self.place.norm) if self.place.norm else self.block
        match scope:
            case "attention":
                return lambda z: self.run(self.host, z, seen=self.out), x
            case "head":
                return lambda z: self.run(self.host, z, seen=self.out, before=True), x
            case "norm+attention":
                return lambda z: self.run(self.block, z, seen=self.out), u
            case "block":
                return lambda z: self.run(self.block, z, seen=self.block), u
        assert scope == "attention+residual"
        if self.place.style == "post":
            return lambda z: self.run(self.block, z, seen=norm), u
        seen = self.out if self.place.style == "pre" else norm
        return lambda z: z + self.run(self.block, z, seen=seen), u

    def jacobian(self, scope: str) -> Tensor:
        """(B, M, N)."""
        function, x = self.map(scope)
        return jacobian(function, x)


def jacobian(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Dense Jacobians (B, M, N) of a map that treats batch items independently."""
    x = x.detach().clone().requires_grad_(True)
    y = function(x)
    # One direction per row, the same for every item, and all rows in one pass.
    g = torch.eye(y[0].numel(), dtype=y.dtype).reshape(-1, 1, *y.shape[1:]).expand(-1, *y.shape)
    (rows,) = torch.autograd.grad(y, x, g, is_grads_batched=True)
    return rows.flatten(2).transpose(0, 1)
