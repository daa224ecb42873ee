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
    assert found["causal"].remark == f"in sequence {row} of the 3 given"


def test_padding_of_any_sequence_that_is_given_is_tested() -> None:
    model: Any = FAMILIES["gpt2"]().float()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    ids = torch.randint(10, 48, (2, 12), generator=torch.Generator().manual_seed(0))
    found = {v.claim: v for v in lipscope.check(model, inputs={"input_ids": ids, "attention_mask": mask}).verdicts}
    assert found["padding left"].held is False  # positions from the left end, and no position_ids in this call
    assert "held when position_ids are given" in found["padding left"].remark


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
