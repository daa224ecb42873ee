"""‖J‖_F from random directions: its interval covers dense values; and where a layer stands in the atlas."""

from __future__ import annotations

import math

import pytest
import torch

import lipscope
from lipscope.measure import atlas, typical
from lipscope.report.summary import atlas_sentence, directions_sentence
from model_families import FAMILIES

SPECTRA = {
    "one": [1.0],
    "one and many small": [1.0] + [0.05] * 400,
    "two": [1.0, 1.0],
    "power": [1 / k for k in range(1, 200)],
    "flat": [1.0] * 50,
}


@pytest.mark.parametrize("m", [2, 8])
@pytest.mark.parametrize("name", SPECTRA)
def test_intervals_fail_no_more_often_than_they_say(name: str, m: int) -> None:
    squares = torch.tensor(SPECTRA[name], dtype=torch.float64).square()
    generator = torch.Generator().manual_seed(m)
    drawn = torch.randn(4000, m, len(squares), generator=generator, dtype=torch.float64).square()
    # An upper end of σ² that is 10 % too large, as solvers stop there; J has more values than are not zero.
    low, high = typical.interval((drawn * squares).sum(-1).mean(1), torch.full((4000,), 1.1, dtype=torch.float64), m, 1000)
    size = float(squares.sum().sqrt())
    missed = int(((low > size) | (high < size)).sum())
    assert missed <= 0.05 * 4000
    # It says something: no wider than a χ² law with as many degrees of freedom would have it at twice the deviation.
    if len(squares) == 50:
        assert float((high / low).median()) < 1 + 4 * math.sqrt(2 * 2 * math.log(40) / (m * 50))


@pytest.mark.parametrize(
    ("family", "scope"), [("gpt2", "attention+residual"), ("llama", "block"), ("bert", "model"), ("gpt2", "model")]
)
def test_scopes_of_models_against_dense_jacobians(family: str, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8], [9, 7, 9, 3, 2, 4, 6, 11]])
    layer = lipscope.load(FAMILIES[family]()).record(input_ids=ids)[0]
    J = layer.operator(scope).to_dense()
    exact = torch.linalg.matrix_norm(J) / J.shape[-1] ** 0.5
    missed = cases = 0
    found, operator = layer.sigma(scope, solver=lipscope.GolubKahan()), layer.operator(scope)
    assert found.typical_low is not None
    for seed in range(20):
        monkeypatch.setattr(typical, "SEED", seed)
        found = typical.with_typical(found, operator, J.shape[-1])
        missed += int(((found.typical_low > exact) | (found.typical_high < exact)).sum())
        cases += len(exact)
        assert bool((found.typical_low <= found.typical).all())
        assert bool((found.typical <= found.typical_high).all())
        torch.testing.assert_close(found.stable_rank, (found.typical / found.estimate).square() * J.shape[-1])
    assert missed <= 0.05 * cases
    dense = layer.sigma(scope, solver=lipscope.Dense())
    torch.testing.assert_close(dense.typical, exact, rtol=1e-9, atol=0)
    assert dense.typical_low is None


def test_callables_rows_and_what_has_no_estimate() -> None:
    W = torch.randn(24, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    X = torch.randn(6, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def map(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ W)

    exact = float(torch.autograd.functional.jacobian(map, X).norm()) / 12
    found = lipscope.local_lipschitz(map, X)
    (row,) = found.to_rows()
    assert row["typical_low"] < exact < row["typical_high"]
    assert row["typical"] == pytest.approx(exact, rel=0.2)
    assert lipscope.local_lipschitz(map, X, certificate=False).typical is None
    # No square leaves the range of floats, and zero is zero.
    tiny = lipscope.local_lipschitz(lambda x: 1e-200 * map(x), X)
    assert tiny.typical == pytest.approx(1e-200 * found.typical, rel=1e-6)
    nothing = lipscope.local_lipschitz(lambda x: 0 * map(x), X)
    assert (nothing.typical_low, nothing.typical, nothing.typical_high) == (0, 0, 0)


@pytest.mark.parametrize("scope", ["attention", "head", "attention+residual"])
def test_padding_is_no_input(scope: str) -> None:
    """An input of six tokens has the same typical gain alone and padded; it was √(6/10) of it."""
    handle, ids = lipscope.load(FAMILIES["bert"]()), torch.tensor([[3, 14, 15, 9, 26, 5, 0, 0, 0, 0]])
    mask = (torch.arange(10) < 6).long()[None]
    alone = handle.record(input_ids=ids[:, :6])[0].rows(scope, solver=lipscope.Dense())
    padded = handle.record(inputs={"input_ids": ids, "attention_mask": mask})[0]
    for row, short in zip(padded.rows(scope, solver=lipscope.Dense()), alone, strict=True):
        assert row["n"] == short["n"] == 6
        assert row["typical"] == pytest.approx(short["typical"], rel=1e-9)
        assert row["stable_rank"] == pytest.approx(short["stable_rank"], rel=1e-9)
    for row, short in zip(padded.rows(scope, solver=lipscope.GolubKahan()), alone, strict=True):
        exact = row["typical_low"] is None
        assert (row["typical_low"] or 0) <= short["typical"] * (1 + 1e-9)
        assert short["typical"] * (1 - 1e-9) <= (row["typical"] if exact else row["typical_high"])


def entry(model: str = "a", layer: int = 0, n: int = 64, lower: float = 1.0, upper: float = 1.1, weights: str = "trained"):
    known = {"model": model, "layer": layer, "n": n, "lower": lower, "upper": upper, "weights": weights}
    return {name: str(value) for name, value in known.items()}


def test_a_layer_counts_as_smaller_only_where_its_interval_lies_below(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [entry(layer=0), entry(layer=1, lower=2.0, upper=2.2), entry(layer=2, lower=3.0, upper=9.0)]
    monkeypatch.setattr(atlas, "entries", lambda: (*made, entry("b", weights="random")))
    said = atlas.standing("mine", "attention", 64, 2.1, 2.5)
    assert said is not None
    assert said.startswith("larger than 33 % (1 of 3) and smaller than 33 % (1 of 3) of the attention layers of 1 trained")
    assert "larger than 100 % (1 of 1) and smaller than 0 % (0 of 1) of the attention layers of 1 random model" in said
    # Its own layers do not vote, and a length beyond a factor of √2 is not similar.
    assert "trained" not in (atlas.standing("a", "attention", 64, 2.1, 2.5) or "")
    assert atlas.standing("mine", "attention", 91, 2.1, 2.5) is None
    assert atlas.standing("mine", "attention", 90, 2.1, 2.5) is not None


def test_every_layer_counts_once_at_its_nearest_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atlas, "entries", lambda: (entry(n=48, upper=1.1), entry(n=64, lower=5.0, upper=6.0)))
    assert "larger than 100 % (1 of 1)" in (atlas.standing("mine", "attention", 50, 2.0, 3.0) or "")
    assert "smaller than 100 % (1 of 1)" in (atlas.standing("mine", "attention", 60, 2.0, 3.0) or "")


def test_the_atlas_of_the_package_and_the_sentences_of_a_run() -> None:
    places = {(one["model"], one["layer"], one["n"]) for one in atlas.entries()}
    assert len(places) == len(atlas.entries()) > 100
    assert {one["weights"] for one in atlas.entries()} == {"trained", "random"}
    assert all(0 < float(one["lower"]) <= float(one["estimate"]) <= float(one["upper"]) for one in atlas.entries())
    row = {"model": "mine", "layer": 2, "n": 64, "scope": "attention", "lower": 9.0, "estimate": 9.5, "upper": 10.0,
           "typical": 0.5, "typical_low": None, "stable_rank": 20.0, "document": None}  # fmt: skip
    other = row | {"layer": 1, "lower": 1.0, "estimate": 1.5, "upper": 2.0}
    other |= {"typical": 0.1, "stable_rank": 32.0, "typical_low": 0.09}
    said = directions_sentence([row, other])
    assert said is not None
    assert "20.0 to 32.0 (1 of 2 estimated from random directions): about so many of 7,220 directions" in said
    assert (atlas_sentence(row, 2, 64, 9.0, 10.0) or "").startswith("σ of layer 2, the least smooth, is larger than")
    assert atlas_sentence(row | {"scope": "block"}, 2, 64, 9.0, 10.0) is None
    assert directions_sentence([row | {"stable_rank": None}]) is None
