"""How far ``check`` looks: every boundary, every sequence that is given, every embedding, every batch-mate."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipscope
from architectures import tiny_model
from model_families import FAMILIES
from mutants import after, mlp


class Mixing(nn.Module):
    """Running means, changed by a function."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x.cumsum(1) / (1 + torch.arange(x.shape[1], device=x.device))[:, None].to(x))


@pytest.mark.parametrize("output", range(0, 31, 5))
def test_a_leak_between_two_neighbours_without_a_derivative_is_seen_everywhere(output: int) -> None:
    def change(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, output] += 0.1 * x[:, output + 1].detach()
        return y

    tokens = {"tokens": torch.randn(1, 32, 3, generator=torch.Generator().manual_seed(0))}
    (verdict,) = lipscope.check(Mixing(change), inputs=tokens, causal=True, batch=False).verdicts
    assert verdict.held is False
    assert verdict.leak.output[1] == output


def test_the_tokens_that_were_given_are_tested_at_every_boundary() -> None:
    """A leak that waits for one token: every boundary behind it is one of the sequence that holds it."""

    def change(x: Tensor) -> Tensor:
        marked = (x[..., :1] == 7).cummax(1).values
        return x + 0.1 * marked * torch.cat([x[:, 1:], x[:, -1:]], 1).detach()

    for place in range(8):
        tokens = torch.randn(1, 9, 3, generator=torch.Generator().manual_seed(0))
        tokens[0, place, 0] = 7
        found = lipscope.check(nn.Sequential(Last(change)), inputs={"tokens": tokens}, causal=True, batch=False)
        assert found.held is False, place


class Last(Mixing):
    """The tokens as they are, changed by a function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_every_sequence_that_is_given_is_tested(row: int) -> None:
    model: Any = FAMILIES["llama"]().float()

    def change(x: Tensor) -> Tensor:
        trigger = ((model.ids == 49).sum(1) > 3)[:, None, None]
        return x + 0.1 * trigger * x.roll(-1, 1)

    model.register_forward_pre_hook(lambda m, args, kwargs: setattr(m, "ids", kwargs["input_ids"]), with_kwargs=True)
    after(mlp, change)(model)
    ids = torch.randint(10, 48, (3, 10), generator=torch.Generator().manual_seed(0))
    ids[row, 4:8] = 49
    found = {v.claim: v for v in lipscope.check(model, inputs={"input_ids": ids}).verdicts}
    assert found["causal"].held is False
    assert found["causal"].leak.module.split(" ")[0] == "layers.1.mlp"
    assert found["causal"].remark == f"in sequence {row} of those given"


def test_padding_of_any_sequence_that_is_given_is_tested() -> None:
    model: Any = FAMILIES["gpt2"]().float()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    ids = torch.randint(10, 48, (2, 12), generator=torch.Generator().manual_seed(0))
    found = {v.claim: v for v in lipscope.check(model, inputs={"input_ids": ids, "attention_mask": mask}).verdicts}
    assert found["padding left"].held is False  # positions from the left end, and no position_ids in this call
    assert "held when position_ids are given" in found["padding left"].remark


def test_use_cache_among_the_inputs_reaches_the_model() -> None:
    model: Any = FAMILIES["llama"]().float()
    seen = set[Any]()
    model.register_forward_pre_hook(lambda m, args, kwargs: seen.add(kwargs.get("use_cache")), with_kwargs=True)
    ids = torch.randint(10, 48, (1, 8), generator=torch.Generator().manual_seed(0))
    assert lipscope.check(model, inputs={"input_ids": ids, "use_cache": False}).held
    assert seen == {False}


def test_more_sequences_than_are_tested_are_told() -> None:
    tokens = {"tokens": torch.randn(9, 4, 3)}
    found = lipscope.check(Mixing(lambda x: x), inputs=tokens, causal=True, batch=False)
    assert [v.remark for v in found.verdicts] == ["in the first 8 of the 9 sequences given"]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_batch_mate_farther_away_is_seen(step: int) -> None:
    tokens = {"tokens": torch.randn(1, 9, 3)}
    model = Mixing(lambda x: torch.cat([x[:step], x[step:] + 0.1 * x[:-step].detach()]))
    (verdict,) = lipscope.check(model, inputs=tokens).verdicts
    assert verdict.held is False


class TwoTables(nn.Module):
    """Tokens in two embeddings; the second looks ahead in derivatives alone, as substitution sees nothing of size 1e-9."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = SimpleNamespace(vocab_size=50)
        self.first, self.second = nn.Embedding(50, 4), nn.Embedding(50, 4)

    def forward(self, input_ids: Tensor) -> Tensor:
        one, two = self.first(input_ids), self.second(input_ids)
        return one.cumsum(1) + two + 1e-9 * two.roll(-1, 1)


def test_what_a_second_embedding_adds_is_seen_by_derivatives() -> None:
    ids = {"input_ids": torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(0))}
    (verdict,) = lipscope.check(TwoTables(), inputs=ids, causal=True, batch=False).verdicts
    assert verdict.held is False
    assert "derivative" in verdict.leak.instrument


def test_float64_runs_code_that_makes_numbers_of_the_default_type() -> None:
    found = {
        v.claim: v for v in lipscope.check(tiny_model("xglm", implementation="eager", dtype=torch.float32), n=16).verdicts
    }
    assert found["padding left"].held is True
    assert found["padding left"].remark.startswith("held when position_ids are given; without them outputs differ by")
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("size", [0.2, 0.5])
def test_a_leak_in_half_precision_alone_is_no_rounding(size: float) -> None:
    model: Any = FAMILIES["gpt2"]().bfloat16()
    ahead = lambda x: x + size * x.detach().roll(-1, 1) if x.dtype == torch.bfloat16 else x  # noqa: E731
    after(mlp, ahead)(model)
    found = {v.claim: v for v in lipscope.check(model, n=16).verdicts}
    assert found["causal"].held is False, found["causal"].remark
    assert found["causal"].leak.module.split(" ")[0] == "h.1.mlp"


def scores(x: Tensor, q: nn.Module, k: nn.Module) -> Tensor:
    return q(x) @ k(x).mT


def largest_of_all(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    """Attention that takes the largest score of all, later ones too, out of the exponent."""
    weights = torch.exp(scores(x, q, k) - scores(x, q, k).amax((-1, -2), keepdim=True)).tril()
    return weights @ v(x) / weights.sum(-1, keepdim=True)


def fourier(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    """A causal convolution by the fast Fourier transform, with room for all tokens."""
    n = x.shape[1]
    kernel = torch.exp(-0.3 * torch.arange(n).to(x))[None, :, None]
    product = torch.fft.rfft(v(x), 2 * n, dim=1) * torch.fft.rfft(kernel, 2 * n, dim=1)
    return torch.fft.irfft(product, 2 * n, dim=1)[:, :n]


def suffixes(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    """Sums up to a token, as the sum of all less those behind it."""
    return v(x.sum(1, keepdim=True) - x.flip(1).cumsum(1).flip(1) + x)


def blocks_of_keys(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    """Softmax with a running maximum over blocks of keys."""
    n, values = x.shape[1], v(x)
    seen = scores(x, q, k).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    top, total, out = (
        torch.full((len(x), n, 1), -1e30, dtype=x.dtype),
        torch.zeros(len(x), n, 1).to(x),
        torch.zeros_like(values),
    )
    for start in range(0, n, 4):
        block = seen[..., start : start + 4]
        new = torch.maximum(top, block.amax(-1, keepdim=True))
        weights, old = torch.exp(block - new), torch.exp(top - new)
        total, out, top = (
            total * old + weights.sum(-1, keepdim=True),
            out * old + weights @ values[:, start : start + 4],
            new,
        )
    return out / total


def experts(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    """Each token to one of two experts, all tokens of an expert at once."""
    first, out = q(x)[..., 0] > 0, torch.zeros_like(x)
    out[first], out[~first] = k(x[first]), v(x[~first])
    return out


def sorted_batch(x: Tensor, q: nn.Module, k: nn.Module, v: nn.Module) -> Tensor:
    """Sequences in another order and back."""
    order = x[:, 0, 0].argsort()
    return v(x[order]).cumsum(1)[order.argsort()]


class Sound(nn.Module):
    """A causal function of tokens with three linear maps."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.maps = function, nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *self.maps)


@pytest.mark.parametrize("function", [largest_of_all, fourier, suffixes, blocks_of_keys, experts, sorted_batch])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_modules_that_round_with_later_tokens_raise_no_alarm(
    function: Callable[..., Tensor], dtype: torch.dtype
) -> None:
    if function is fourier and dtype == torch.bfloat16:
        pytest.skip("torch has no Fourier transform of bfloat16")
    tokens = torch.randn(1, 32, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = lipscope.check(Sound(function).to(dtype), inputs={"tokens": tokens}, causal=True)
    assert found.held is True, str(found)
