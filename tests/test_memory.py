"""Memory that is planned: what a run is expected to take, what is done when that is too much, and the same numbers then."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import cases
import lipscope
from largest_tensor import LargestTensor
from lipscope.attention.memory import plan_memory
from lipscope.attention.tiling import SMALL
from lipscope.models.memory import plan_layers, plan_scan
from test_cli import run

N, D, H = 700, 24, 4


@pytest.fixture(scope="module")
def layer() -> lipscope.Attention:
    weights = [cases.random(D, D, seed=s) / D**0.5 for s in range(4)]
    return lipscope.Attention(*weights, heads=H, mask="causal&pad-right:0,5").to(torch.float32)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return cases.random(2, N, D, seed=9).float()


@pytest.mark.parametrize("scope", ["attention", "head"])
def test_a_limit_changes_the_way_and_not_the_answer(layer, tokens, scope):
    free = plan_memory(layer, N, inputs=2, scope=scope)
    assert not free.alone
    options = {"scope": scope, "certificate": False, "solver": lipscope.GolubKahan(rtol=1e-5)}
    expected = lipscope.local_lipschitz(layer, tokens, **options)
    ways = set()
    for share in (1.1, 0.6, 0.3, 0.15):
        limit = int(share * free.total)
        plan = plan_memory(layer, N, inputs=2, scope=scope, limit=limit)
        assert plan.total <= limit
        ways.add((plan.alone, plan.tiling, plan.room))
        found = lipscope.local_lipschitz(layer, tokens, memory=limit, **options)
        torch.testing.assert_close(found.estimate, expected.estimate, rtol=3e-5, atol=0)
        assert bool((found.lower <= expected.upper).all() & (expected.lower <= found.upper).all())
        assert found.mask == expected.mask
        assert found.status == expected.status
    assert len(ways) == 4
    assert (True, SMALL) in {way[:2] for way in ways}


def test_what_is_planned_without_matrices_is_computed_without(layer, tokens):
    with LargestTensor(N) as seen:
        lipscope.local_lipschitz(layer, tokens, memory="12MiB", certificate=False)
    assert not seen.matrices


def test_too_little_is_refused_with_what_is_needed(layer, tokens):
    with pytest.raises(MemoryError, match=r"n = 700 tokens need at least [\d.]+ MiB above the weights.* limited to 1 MiB"):
        lipscope.local_lipschitz(layer, tokens, memory="1MiB")
    with pytest.raises(ValueError, match="memory must be a size such as 4GiB"):
        lipscope.local_lipschitz(layer, tokens, memory="much")
    with pytest.raises(ValueError, match="memory is planned for Attention layers only"):
        lipscope.local_lipschitz(torch.tanh, tokens, memory="1GiB")
    with pytest.raises(ValueError, match="Auto or GolubKahan, got Dense"):
        lipscope.local_lipschitz(layer, tokens, memory="1GiB", solver=lipscope.Dense())


def test_the_command_says_what_it_will_take(tmp_path):
    weights = {name: torch.eye(8) for name in ("q", "k", "v", "out")}
    save_file(weights, tmp_path / "layer.safetensors")
    save_file({"x": cases.random(64, 8, seed=0).float()}, tmp_path / "tokens.safetensors")
    arguments = ["measure", tmp_path / "layer.safetensors", "--tokens", tmp_path / "tokens.safetensors", "--json"]
    limited = run(*arguments, "--memory", "1GiB")
    assert limited.returncode == 0, limited.stderr
    assert "n = 64: expected peak" in limited.stderr
    free = run(*arguments)
    assert "expected peak" not in free.stderr
    assert json.loads(limited.stdout)[0]["estimate"] == pytest.approx(json.loads(free.stdout)[0]["estimate"], rel=1e-6)
    refused = run(*arguments, "--memory", "2KiB")
    assert refused.returncode == 2
    assert "lipscope: n = 64 tokens need at least" in refused.stderr


def test_scans_are_planned_before_they_start():
    handle = lipscope.load("gpt2-mini")
    free = plan_scan(handle, 128, inputs=4)
    deep = plan_scan(handle, 128, inputs=4, scope="model")
    assert deep.tokens > free.tokens
    limit = free.total // 2
    tight = plan_layers(handle, 128, [0, 1], inputs=4, memory=limit)
    assert tight.alone
    assert tight.total <= limit
    options = {"layers": [0], "lengths": [128], "inputs": 4, "certificate": False}
    expected = lipscope.scan(handle, "python-docs", **options)
    limited = lipscope.scan(handle, "python-docs", memory=limit, **options)
    for one, other in zip(expected.rows, limited.rows, strict=True):
        assert other["estimate"] == pytest.approx(one["estimate"], rel=2e-4)
        assert (other["input"], other["n"]) == (one["input"], one["n"])
    with pytest.raises(MemoryError, match="n = 128 tokens need at least"):
        lipscope.scan(handle, "python-docs", memory=1000, **options)
