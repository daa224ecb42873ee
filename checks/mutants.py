"""Leaks injected one by one into tiny models, each with the claim that it breaks and the module that it sits in.

A mutant is a function that changes a model in place and returns the name of the module that leaks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from architectures import tiny_model
from report_card import ROOT

sys.path.insert(0, str(ROOT / "tests"))
import transformers as tf

from model_families import FAMILIES, enlarge


@dataclass(frozen=True)
class Mutant:
    """A leak: what it is, in which family, what breaks, and how it is made."""

    what: str
    family: str
    claim: str
    inject: Callable[[Any], str]
    options: dict[str, Any] = field(default_factory=dict)

    def build(self) -> tuple[nn.Module, str]:
        """The model with the leak, and the module that has it."""
        builder = (FAMILIES | _MADE).get(self.family)
        model: Any = tiny_model(self.family, implementation="eager", dtype=torch.float32) if builder is None else builder()
        model.float()
        return model, self.inject(model)


def _bart() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    return enlarge(tf.BartModel(tf.BartConfig(vocab_size=50, max_position_embeddings=32, **sizes, **heads)))


def _whisper() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 1, "max_target_positions": 32}
    return tf.WhisperModel(tf.WhisperConfig(vocab_size=50, num_mel_bins=8, max_source_positions=12, **sizes, **heads)).eval()


def _t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    return enlarge(tf.T5Model(tf.T5Config(vocab_size=50, decoder_start_token_id=0, **sizes)))


def _lfm2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    kinds = {"layer_types": ["conv", "full_attention"], "num_key_value_heads": 2, "pad_token_id": 0}
    return enlarge(tf.Lfm2Model(tf.Lfm2Config(vocab_size=50, **sizes, **kinds)))


_MADE = {"bart": _bart, "whisper": _whisper, "t5": _t5, "lfm2": _lfm2}


def blocks(model: Any) -> nn.ModuleList:
    """The layers of a decoder or encoder."""
    for path in ("layers", "h", "encoder.layer", "decoder.layers", "encoder.block", "transformer.layer"):
        part = model
        for name in path.split("."):
            part = getattr(part, name, None)
        if isinstance(part, nn.ModuleList):
            return part
    raise LookupError(type(model).__name__)


def attention(block: Any) -> nn.Module:
    """The attention module of a block."""
    for name in ("self_attn", "attn", "attention"):
        if isinstance(found := getattr(block, name, None), nn.Module):
            return getattr(found, "self", found)
    raise LookupError(type(block).__name__)


def mlp(block: Any) -> nn.Module:
    """The part of a block that works token by token."""
    for name in ("mlp", "fc2", "intermediate", "ffn"):
        if isinstance(found := getattr(block, name, None), nn.Module):
            return found
    raise LookupError(type(block).__name__)


def name_of(model: nn.Module, module: nn.Module) -> str:
    """The dotted name of a module."""
    return next(name for name, part in model.named_modules() if part is module)


def after(choose: Callable[[Any], nn.Module], change: Callable[[Tensor], Tensor], layer: int = 1) -> Callable[[Any], str]:
    """Change the output of a module of one layer."""

    def inject(model: Any) -> str:
        module = choose(blocks(model)[layer])
        forward = module.forward

        def leaking(*args: Any, **kwargs: Any) -> Any:
            found = forward(*args, **kwargs)
            return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)

        module.forward = leaking  # type: ignore[method-assign]
        return name_of(model, module)

    return inject


def masked(change: Callable[[Tensor], Tensor | None], layer: int = 1, only: str | None = None) -> Callable[[Any], str]:
    """Change the mask that the attention of one layer receives; ``only`` under one attention implementation."""

    def inject(model: Any) -> str:
        module: Any = attention(blocks(model)[layer])
        forward = module.forward

        def leaking(*args: Any, **kwargs: Any) -> Any:
            if only is None or model.config._attn_implementation == only:
                given = inspect.signature(forward).bind(*args, **kwargs).arguments
                args, kwargs = (), {**{k: v for k, v in given.items() if k != "kwargs"}, **given.get("kwargs", {})}
                tokens = next(a for a in kwargs.values() if isinstance(a, Tensor) and a.ndim == 3)
                mask = kwargs.get("attention_mask")
                n = tokens.shape[1]
                if mask is None:
                    mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
                seen = mask if mask.dtype == torch.bool else mask == 0
                kwargs["attention_mask"] = torch.where(change(seen), 0.0, torch.finfo(tokens.dtype).min).to(tokens.dtype)
            return forward(*args, **kwargs)

        module.forward = leaking
        return name_of(model, module)

    return inject


def everything(seen: Tensor) -> Tensor:
    """No mask at all."""
    return torch.ones_like(seen)


def one_more(seen: Tensor) -> Tensor:
    """One token of the future."""
    return seen | nn.functional.pad(seen, (1, 0), value=True)[..., :-1].roll(0) | seen.roll(-1, -2)


def one_back(seen: Tensor) -> Tensor:
    """A window that is one token too wide."""
    n = seen.shape[-1]
    rows = torch.arange(n)
    first = seen.float().argmax(-1, keepdim=True)
    return seen | ((rows >= first - 1) & (rows <= rows[:, None]))


def causal_only(seen: Tensor) -> Tensor:
    """Documents and padding forgotten."""
    n = seen.shape[-1]
    return torch.ones(n, n, dtype=torch.bool).tril().expand(seen.shape)


def blind_to_padding(seen: Tensor) -> Tensor:
    """Everything that some row sees, seen by all."""
    return torch.ones_like(seen)


def ahead(size: float) -> Callable[[Tensor], Tensor]:
    """The next token, times a number."""
    return lambda x: x + size * x.roll(-1, 1)


def centred(x: Tensor) -> Tensor:
    """Statistics over the tokens."""
    return (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3)


def pooled(x: Tensor) -> Tensor:
    """The mean of the sequence."""
    return x + 0.1 * x.mean(1, keepdim=True)


def across_batch(x: Tensor) -> Tensor:
    """Statistics over the batch."""
    return x - 0.5 * x.mean(0, keepdim=True)


def capacity(x: Tensor) -> Tensor:
    """A router that keeps the strongest half of the tokens: no derivative, but a token competes with later ones."""
    score = x.detach().norm(dim=-1)
    kept = score >= score.median(1, keepdim=True).values
    return x * kept[..., None]


def convolved(x: Tensor) -> Tensor:
    """A convolution that looks both ways."""
    return (x.roll(1, 1) + x + x.roll(-1, 1)) / 3


def whole(block: Any) -> nn.Module:
    """The block itself."""
    found: nn.Module = block
    return found


def positions(shift: int | None) -> Callable[[Any], str]:
    """Positions that are forgotten (None), or off by so many where there is a cache."""

    def inject(model: Any) -> str:
        forward = model.forward

        def leaking(*args: Any, **kwargs: Any) -> Any:
            past = kwargs.get("past_key_values")
            if shift is None:
                kwargs.pop("position_ids", None)
                n = kwargs["input_ids"].shape[1]
                kwargs["attention_mask"] = packed_mask(kwargs, n, model)
                kwargs["position_ids"] = torch.arange(n)[None]
            elif past is not None:
                kwargs["position_ids"] = torch.tensor([[past.get_seq_length() + shift]])
            return forward(*args, **kwargs)

        # The signature says what a model takes.
        leaking.__wrapped__ = forward  # type: ignore[attr-defined]
        model.forward = leaking
        return next(name for name, _ in model.named_modules() if name.endswith(("wpe", "rotary_emb")))

    return inject


DOCUMENTS = [5, 9, 4]


def packed_mask(kwargs: dict[str, Any], n: int, model: Any) -> Tensor | None:
    """The documents kept apart by a mask, without positions that say so."""
    if n != sum(DOCUMENTS):
        return None
    owner = torch.repeat_interleave(torch.arange(len(DOCUMENTS)), torch.tensor(DOCUMENTS))
    seen = (owner[:, None] == owner) & torch.ones(n, n, dtype=torch.bool).tril()
    dtype = next(model.parameters()).dtype
    return torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]


# ── sly ones ──


def at_one_place(output: int, token: int) -> Callable[[Tensor], Tensor]:
    """One output sees one token, and no other does."""

    def change(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, output] += 0.1 * x[:, token]
        return y

    return change


def far_ahead(x: Tensor) -> Tensor:
    """Tokens eight places ahead, and nearer ones not."""
    return torch.cat([x[:, :-8] + 0.1 * x[:, 8:], x[:, -8:]], 1)


def future_mean(x: Tensor) -> Tensor:
    """A mean over the sequence that no derivative sees."""
    return x + 0.01 * x.detach().mean(1, keepdim=True)


def first_token(x: Tensor) -> Tensor:
    """What token 0 holds, without a derivative: outside every window."""
    return x + 0.05 * x[:, :1].detach()


def when_inferring(x: Tensor) -> Tensor:
    """The next token, where no derivative is asked for."""
    return x if torch.is_grad_enabled() else x + 0.1 * x.roll(-1, 1)


def shared_capacity(x: Tensor) -> Tensor:
    """Experts with a capacity that all sequences of a batch share."""
    score = x.detach().norm(dim=-1)
    return x * (score >= score.median())[..., None]


def sequence_before(x: Tensor) -> Tensor:
    """Every sequence sees the one before it in the batch."""
    return torch.cat([x[:1], x[1:] + 0.1 * x[:-1]])


def larger_batch(x: Tensor) -> Tensor:
    """Scaled by the number of sequences."""
    return x * (1 + 0.1 * (len(x) - 1))


def mask_of_the_first(seen: Tensor) -> Tensor:
    """The padding of the first sequence, for all."""
    return seen[:1].expand_as(seen)


def first_alone_masked(seen: Tensor) -> Tensor:
    """The mask reaches the first sequence only."""
    return torch.cat([seen[:1], torch.ones_like(seen[1:])])


def padding_instead(seen: Tensor) -> Tensor:
    """Where there is padding its mask takes the place of the causal one."""
    visible = seen[..., -1:, :]
    return seen if bool(visible.all()) else visible.expand_as(seen)


def before(change: Callable[[Tensor], Tensor]) -> Callable[[Any], str]:
    """Change what a module reads, inside it."""

    def inject(model: Any) -> str:
        module: Any = mlp(blocks(model)[1])
        forward = module.forward
        module.forward = lambda x: forward(change(x))
        return name_of(model, module)

    return inject


def on_the_second_call(model: Any) -> str:
    """One module stands in two layers, and leaks in the second."""
    layers, calls = blocks(model), []
    shared: Any = mlp(layers[0])
    layers[1].mlp = shared
    model.register_forward_pre_hook(lambda module, args: calls.clear())
    forward = shared.forward

    def leaking(x: Tensor) -> Tensor:
        calls.append(1)
        return forward(x) + (0.1 * x.roll(-1, 1) if len(calls) == 2 else 0.0)

    shared.forward = leaking
    return name_of(model, shared)


def next_id(model: Any) -> str:
    """The embedding looks up the next token too."""
    table = model.get_input_embeddings()
    forward = table.forward
    table.forward = lambda ids: forward(ids) + 0.1 * forward(ids.roll(-1, 1))
    return name_of(model, table)


def cross_attention(model: Any) -> str:
    """The decoder sees the encoder's padding in one layer."""
    module = model.decoder.layers[1].encoder_attn
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "attention_mask": None})
    return name_of(model, module)


def from_the_end(model: Any) -> str:
    """Positions counted from the last token: outputs depend on how many follow."""
    forward = model.forward

    def leaking(*args: Any, **kwargs: Any) -> Any:
        n = kwargs["input_ids"].shape[1]
        return forward(*args, **{**kwargs, "position_ids": torch.arange(n).flip(0)[None]})

    leaking.__wrapped__ = forward  # type: ignore[attr-defined]
    model.forward = leaking
    return next(name for name, _ in model.named_modules() if name.endswith(("wpe", "rotary_emb")))


def slot(model: Any) -> str:
    """Two slots of the cache change places in one layer."""
    module: Any = attention(blocks(model)[1])
    forward = module.forward

    def leaking(*args: Any, **kwargs: Any) -> Any:
        past = kwargs.get("past_key_values")
        if past is not None and past.get_seq_length(1) > 1:
            kept = past.layers[1].values
            past.layers[1].values = torch.cat([kept[..., 1:2, :], kept[..., :1, :], kept[..., 2:, :]], -2)
        return forward(*args, **kwargs)

    leaking.__wrapped__ = forward  # type: ignore[attr-defined]
    module.forward = leaking
    return name_of(model, module)


def in_eight_bits(x: Tensor) -> Tensor:
    """Rounded to 8 bits with one scale for all tokens; derivatives pass straight through."""
    scale = x.detach().abs().amax() / 127
    return x + ((x / scale).round() * scale - x).detach()


def last_come(x: Tensor) -> Tensor:
    """Two experts of four places each, filled from the last token on; who finds no place is dropped."""
    choice = (x.detach()[..., 0] > 0).long()
    places = nn.functional.one_hot(choice, 2).flip(1).cumsum(1).flip(1)
    return x * (places.gather(-1, choice[..., None]) <= 4)


def stretched_positions(model: Any) -> str:
    """Positions twice as far apart in sequences of more than ten tokens, as when a model is stretched to longer ones."""
    module = model.rotary_emb
    forward = module.forward
    module.forward = lambda x, position_ids: forward(x, position_ids * (1 + (position_ids.shape[1] > 10)))
    return name_of(model, module)


def mean_with_padding(x: Tensor) -> Tensor:
    """The mean over all tokens, padding among them."""
    return x - 0.1 * x.mean(1, keepdim=True)


def rounded_cache(model: Any) -> str:
    """Keys of one layer are kept in 8 bits."""
    module: Any = attention(blocks(model)[1])
    forward = module.forward

    def leaking(*args: Any, **kwargs: Any) -> Any:
        past = next((value for name, value in kwargs.items() if name in ("past_key_values", "layer_past")), None)
        if past is not None and past.get_seq_length(1) > 1:
            past.layers[1].keys = in_eight_bits(past.layers[1].keys)
        return forward(*args, **kwargs)

    leaking.__wrapped__ = forward  # type: ignore[attr-defined]
    module.forward = leaking
    return name_of(model, module)


def cross_shaped(model: Any) -> str:
    """Keys and values of one layer come from another tensor than its queries, and the window is not applied to them."""

    class Crossed(nn.Module):
        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            return torch.softmax((x @ memory.mT).masked_fill(later, -torch.inf), -1) @ memory

    class Norming(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.crossed_attention, self.norm = Crossed(), nn.LayerNorm(16)
            self.crossed_attention.layer_idx = 1

        def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
            return self.crossed_attention(self.norm(hidden_states), hidden_states), None

    blocks(model)[1].self_attn = Norming()
    return "layers.1.self_attn.crossed_attention"


def with_a_cache(model: Any) -> str:
    """One layer sees the next token where a cache is made, as it is unless it is refused."""
    module: Any = attention(blocks(model)[1])
    forward = module.forward

    def leaking(*args: Any, **kwargs: Any) -> Any:
        out, *rest = forward(*args, **kwargs)
        return (out if kwargs.get("past_key_values") is None else ahead(0.1)(out), *rest)

    module.forward = leaking
    return name_of(model, module)


def mute(model: Any) -> str:
    """The next token on one layer, below a last norm that makes every output zero."""
    model.norm.weight.data.zero_()
    return after(mlp, ahead(0.1))(model)


def in_bfloat16(size: float) -> Callable[[Any], str]:
    """The next token times a number, in bfloat16."""
    return lambda model: after(mlp, ahead(size))(model.bfloat16())


def in_the_encoder(change: Callable[[Tensor], Tensor]) -> Callable[[Any], str]:
    """Change what the last layer of the encoder makes."""

    def inject(model: Any) -> str:
        module = model.encoder.layers[-1].fc2
        forward = module.forward
        module.forward = lambda x: change(forward(x))
        return name_of(model, module)

    return inject


def encoder_attention(model: Any) -> str:
    """The encoder sees its padding in one layer."""
    module = model.encoder.layers[1].self_attn
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "attention_mask": None})
    return name_of(model, module)


# ── in families of other builds ──


def inside(path: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any], str]:
    """Change the output of a module that is named."""

    def inject(model: Any) -> str:
        module = model.get_submodule(path)
        forward = module.forward

        def leaking(*args: Any, **kwargs: Any) -> Any:
            found = forward(*args, **kwargs)
            return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)

        module.forward = leaking
        return path

    return inject


def over_tokens(x: Tensor) -> Tensor:
    """Divided by a norm over the tokens."""
    return x / (x.norm(dim=1, keepdim=True) + 1e-3)


def flattened(x: Tensor) -> Tensor:
    """A running sum that goes on from sequence to sequence."""
    return x + 0.05 * x.reshape(1, -1, x.shape[-1]).cumsum(1).reshape(x.shape)


def by_the_largest(x: Tensor) -> Tensor:
    """Divided by the largest number of the sequence, detached."""
    return x / x.detach().abs().amax((1, 2), keepdim=True)


def by_the_largest_of_all(x: Tensor) -> Tensor:
    """Divided by the largest number of the batch, detached."""
    return x / x.detach().abs().amax()


def ranked(x: Tensor) -> Tensor:
    """Scaled by the rank of a token among all."""
    return x * (1 + 0.05 * x.detach().norm(dim=-1).argsort(1).argsort(1)[..., None])


def fourier(x: Tensor) -> Tensor:
    """Mixed by a Fourier transform over the tokens."""
    return x + 0.01 * torch.fft.fft(x, dim=1).real


def in_fours(x: Tensor) -> Tensor:
    """Blocks of four tokens see themselves."""
    n = x.shape[1]
    y = nn.functional.pad(x, (0, 0, 0, -n % 4)).unflatten(1, (-1, 4))
    return x + 0.05 * y.mean(2, keepdim=True).expand_as(y).flatten(1, 2)[:, :n]


def even_places(x: Tensor) -> Tensor:
    """Every other token sees the next one."""
    half, y = x.shape[1] // 2, x.clone()
    y[:, : 2 * half : 2] += 0.05 * x[:, 1 : 2 * half : 2]
    return y


def one_channel(x: Tensor) -> Tensor:
    """1e-5 of the next token, in one channel."""
    y = x.clone()
    y[:, :-1, 3] += 1e-5 * x[:, 1:, 3]
    return y


def signs(x: Tensor) -> Tensor:
    """Scaled by the signs of the next token, which have no derivative."""
    return x * (1 + 0.05 * torch.sign(x.roll(-1, 1)).detach())


def positive_share(x: Tensor) -> Tensor:
    """Scaled by how many numbers of the sequence are positive."""
    return x * (1 + 0.01 * (x > 0).float().mean((1, 2), keepdim=True))


def neighbours_detached(output: int) -> Callable[[Tensor], Tensor]:
    """One output sees its neighbour, without a derivative."""

    def change(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, output] += 0.1 * x[:, output + 1].detach()
        return y

    return change


def mates(step: int) -> Callable[[Tensor], Tensor]:
    """Every sequence sees the one so many places before it in the batch, without a derivative."""
    return lambda x: torch.cat([x[:step], x[step:] + 0.1 * x[:-step].detach()])


def last_mate(x: Tensor) -> Tensor:
    """All see the last sequence of the batch, without a derivative."""
    return torch.cat([x[:-1] + 0.05 * x[-1:].detach(), x[-1:]])


def number_of_pads(model: Any) -> str:
    """Scaled by how many tokens are padding."""
    forward, module, share = model.forward, model.encoder.layer[1].output, [torch.zeros(1, 1, 1)]
    inner = module.forward

    def leaking(*args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        share[0] = torch.zeros(1, 1, 1) if mask is None else (mask == 0).float().mean(1)[:, None, None]
        return forward(*args, **kwargs)

    leaking.__wrapped__ = forward  # type: ignore[attr-defined]
    model.forward = leaking
    module.forward = lambda *args, **kwargs: inner(*args, **kwargs) * (1 + 0.1 * share[0])
    return name_of(model, module)


def hashed_ids(model: Any) -> str:
    """A second lookup by a hash of a token and the next."""
    table = model.get_input_embeddings()
    forward, size = table.forward, len(table.weight)
    table.forward = lambda ids: (
        forward(ids) + 0.05 * nn.functional.embedding((31 * ids + ids.roll(-1, 1)) % size, table.weight)
    )
    return name_of(model, table)


def largest_id(model: Any) -> str:
    """Positions twice as far apart when the largest token id is odd."""
    module, spread = model.rotary_emb, [torch.ones(1, 1)]
    forward = module.forward

    def entering(_: nn.Module, args: Any, kwargs: Any) -> None:
        spread[0] = 1 + kwargs["input_ids"].amax(1, keepdim=True) % 2

    model.register_forward_pre_hook(entering, with_kwargs=True)
    module.forward = lambda x, position_ids, *args, **kwargs: forward(x, position_ids * spread[0], *args, **kwargs)
    return name_of(model, module)


def old_values(model: Any) -> str:
    """One layer forgets the values of all but the last six tokens of the cache."""
    module: Any = attention(blocks(model)[0])
    forward = module.forward

    def leaking(*args: Any, **kwargs: Any) -> Any:
        past = kwargs.get("past_key_values")
        if past is not None and past.get_seq_length(0) > 6:
            past.layers[0].values[..., :-6, :] = 0
        return forward(*args, **kwargs)

    leaking.__wrapped__ = forward  # type: ignore[attr-defined]
    module.forward = leaking
    return name_of(model, module)


def one_head(model: Any) -> str:
    """The values of one head are mixed with those of the next token."""
    return inside("layers.1.self_attn.v_proj", lambda v: torch.cat([ahead(0.02)(v[..., :8]), v[..., 8:]], -1))(model)


def first_token_kept(model: Any) -> str:
    """The first token is seen from everywhere, as a sink, beside a window."""

    def with_the_first(seen: Tensor) -> Tensor:
        return seen | (torch.arange(seen.shape[-1]) == 0)

    return masked(with_the_first, 0)(model)


def in_half_precision_alone(model: Any) -> str:
    """A fifth of the next token, without a derivative, where numbers are bfloat16."""
    return after(mlp, lambda x: x + 0.2 * x.detach().roll(-1, 1) if x.dtype == torch.bfloat16 else x)(model.bfloat16())


_D = {"documents": DOCUMENTS, "use_cache": False}
MUTANTS = [
    *(
        Mutant("mask dropped in one layer", f, "causal", masked(everything))
        for f in ("gpt2", "llama", "qwen3", "opt", "phi")
    ),
    Mutant("mask dropped in the first layer", "gpt_neox", "causal", masked(everything, 0)),
    *(Mutant("mask off by one", f, "causal", masked(one_more)) for f in ("gpt2", "llama", "olmo2", "gemma3")),
    *(Mutant("window off by one", f, "window 3", masked(one_back, 0)) for f in ("mistral", "gemma3")),
    *(Mutant("convolution that looks both ways", f, "causal", after(mlp, convolved)) for f in ("llama", "gpt2")),
    *(Mutant("normalised over the tokens", f, "causal", after(mlp, centred)) for f in ("qwen3", "gpt_neox")),
    *(Mutant("mean over the sequence added", f, "causal", after(whole, pooled)) for f in ("mistral", "phi")),
    *(Mutant("next token on the residual stream", f, "causal", after(whole, ahead(0.1), 0)) for f in ("llama", "opt")),
    *(Mutant("leak of relative size 1e-6", f, "causal", after(mlp, ahead(3e-6))) for f in ("llama", "gpt2", "olmo2")),
    *(Mutant("router with a capacity", f, "causal", after(mlp, capacity)) for f in ("llama", "gpt2")),
    Mutant("mask dropped under sdpa only", "llama", "causal", masked(everything, only="sdpa"), {"attn": "sdpa"}),
    Mutant("documents not kept apart in one layer", "llama", "documents", masked(causal_only), _D),
    Mutant("documents not kept apart in one layer", "qwen3", "documents", masked(causal_only), _D),
    Mutant("positions not restarted in packed documents", "gpt2", "documents", positions(None), _D),
    *(Mutant("left padding seen in one layer", f, "padding left", masked(causal_only)) for f in ("gpt2", "llama")),
    *(Mutant("right padding seen in one layer", f, "padding right", masked(blind_to_padding)) for f in ("bert", "roberta")),
    *(Mutant("statistics over the batch", f, "batch", after(mlp, across_batch)) for f in ("bert", "llama", "gpt2")),
    Mutant("position off by one with the cache", "llama", "cache", positions(1), {"cache": True}),
    Mutant("position off by one with the cache", "gpt2", "cache", positions(1), {"cache": True}),
    *(
        Mutant("last output but one sees the last token", f, "causal", after(mlp, at_one_place(-2, -1)))
        for f in ("llama", "phi")
    ),
    Mutant("one output sees its neighbour", "gpt2", "causal", after(mlp, at_one_place(6, 7))),
    Mutant("first output sees the last token", "qwen3", "causal", after(mlp, at_one_place(0, -1))),
    Mutant("tokens eight places ahead", "phi", "causal", after(mlp, far_ahead)),
    Mutant("mean over the sequence, detached", "gemma3", "causal", after(mlp, future_mean)),
    Mutant("leak where no derivative is asked for", "llama", "causal", after(mlp, when_inferring)),
    Mutant("shift by a token the wrong way", "gpt_neox", "causal", before(lambda x: 0.5 * x + 0.5 * x.roll(-1, 1))),
    Mutant("a module called twice leaks in its second call", "llama", "causal", on_the_second_call),
    Mutant("embedding that looks up the next token", "llama", "causal", next_id),
    *(Mutant("positions counted from the end", f, "causal", from_the_end) for f in ("gpt2",)),
    Mutant("mask for the first sequence only", "llama", "causal", masked(first_alone_masked)),
    *(Mutant("padding's mask instead of the causal one", f, "causal", masked(padding_instead)) for f in ("gpt2", "qwen3")),
    Mutant("first token seen outside the window, detached", "mistral", "window 3", after(attention, first_token, 0)),
    *(
        Mutant("padding of the first sequence for all", f, "padding left", masked(mask_of_the_first))
        for f in ("llama", "opt")
    ),
    Mutant("padding of the first sequence for all", "bert", "padding right", masked(mask_of_the_first)),
    Mutant("encoder's padding seen in cross-attention", "bart", "padding right", cross_attention),
    Mutant("experts' capacity shared by the batch", "llama", "batch", after(mlp, shared_capacity)),
    *(Mutant("sequence before seen in the batch", f, "batch", after(mlp, sequence_before)) for f in ("bert", "bart")),
    Mutant("scaled by the number of sequences", "gpt2", "batch", after(mlp, larger_batch)),
    Mutant("two slots of the cache exchanged", "llama", "cache", slot, {"cache": True}),
    Mutant("rounded to 8 bits with one scale for all tokens", "bloom", "causal", after(mlp, in_eight_bits)),
    Mutant("experts filled from the last token on", "gpt_oss", "causal", after(mlp, last_come)),
    Mutant("positions stretched in long sequences", "qwen2", "causal", stretched_positions),
    Mutant("first token of a document sees the one before", "gemma2", "documents", after(mlp, at_one_place(5, 4)), _D),
    Mutant("mean that counts padding", "distilbert", "padding right", after(mlp, mean_with_padding)),
    Mutant("keys of the cache in 8 bits", "qwen2", "cache", rounded_cache, {"cache": True}),
    *(
        Mutant(
            "documents mixed by a plain call", f, "documents", lambda model: "layers.0.self_attn", {"documents": DOCUMENTS}
        )
        for f in ("llama", "qwen2")
    ),
    Mutant("next token where a cache is made", "qwen3", "causal", with_a_cache),
    Mutant("keys from another tensor, without the window", "mistral", "window 3", cross_shaped),
    *(Mutant("leak of 5e-4 in bfloat16", f, "causal", in_bfloat16(5e-4)) for f in ("llama", "gpt2")),
    Mutant("leak of relative size 1e-8", "llama", "causal", after(mlp, ahead(3e-8))),
    *(Mutant("leak below outputs that are zero", f, "causal", mute) for f in ("llama", "qwen3")),
    *(
        Mutant("statistics over the batch in the encoder", f, "batch", in_the_encoder(across_batch))
        for f in ("whisper", "bart")
    ),
    Mutant("scaled by the number of sequences in the encoder", "whisper", "batch", in_the_encoder(larger_batch)),
    Mutant("encoder's padding seen in the encoder", "bart", "padding right", encoder_attention),
    Mutant("queries divided by a norm over tokens", "stablelm", "causal", inside("layers.1.self_attn.q_proj", over_tokens)),
    Mutant("running sum over the flattened batch", "granite", "batch", inside("layers.1.mlp", flattened)),
    Mutant("divided by the largest of the sequence", "cohere", "causal", inside("layers.1.mlp", by_the_largest)),
    Mutant("divided by the largest of the batch", "nemotron", "batch", inside("layers.1.mlp", by_the_largest_of_all)),
    Mutant("rank among all tokens", "glm", "causal", inside("layers.1.mlp", ranked)),
    Mutant("Fourier transform over tokens", "starcoder2", "causal", inside("layers.0.mlp", fourier)),
    Mutant("Fourier transform over padding", "eurobert", "padding right", inside("layers.1.mlp", fourier)),
    Mutant("blocks of four see themselves", "persimmon", "causal", inside("layers.1.mlp", in_fours)),
    Mutant("every other token sees the next", "codegen", "causal", inside("h.1.mlp", even_places)),
    Mutant("one channel, 1e-5", "seed_oss", "causal", inside("layers.1.mlp", one_channel)),
    Mutant("signs of the next token", "smollm3", "causal", inside("layers.1.mlp", signs)),
    Mutant("share of positive numbers", "ernie4_5", "causal", inside("layers.1.mlp", positive_share)),
    Mutant("last sequence of the batch seen", "modernbert", "batch", inside("layers.1.mlp", last_mate)),
    Mutant("sequence two before seen in the batch", "gpt_bigcode", "batch", inside("h.1.mlp", mates(2))),
    Mutant("number of pads", "electra", "padding right", number_of_pads),
    Mutant("hash of a token and the next", "deepseek_v3", "causal", hashed_ids),
    Mutant("positions by the largest token id", "helium", "causal", largest_id),
    Mutant("values of the cache forgotten", "granite", "cache", old_values, {"cache": True}),
    Mutant("values of one head", "qwen3_moe", "causal", one_head),
    Mutant(
        "next token in a decoder of two halves", "t5", "causal", inside("decoder.block.1.layer.0.SelfAttention", ahead(0.05))
    ),
    Mutant("last sequence of the batch seen in the encoder", "t5", "batch", inside("encoder.block.1.layer.1", last_mate)),
    Mutant("next token after the last norm", "apertus", "causal", inside("norm", ahead(0.05))),
    Mutant("next token in a recurrence", "mamba", "causal", inside("layers.1.mixer", ahead(0.05))),
    Mutant("convolution over packed documents", "lfm2", "documents", lambda model: "layers.0.conv", _D),
    Mutant("first token kept beside a window", "starcoder2", "window 6", first_token_kept),
    *(
        Mutant("one output sees its neighbour, detached", "jais2", "causal", inside("layers.1.mlp", neighbours_detached(k)))
        for k in (3, 8, 13)
    ),
    Mutant("leak in half precision alone", "gpt2", "causal", in_half_precision_alone),
]
