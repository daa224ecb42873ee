"""Certificates a strip of rows at a time: the same numbers as from n×n matrices, in memory that grows like n."""

from __future__ import annotations

import pytest
import torch

import cases
import lipscope
from largest_tensor import LargestTensor
from lipscope.bounds import certified_upper, strips
from lipscope.bounds.certificates import local_bounds

N, H = 19, 4
BIAS = cases.random(H, N, N, seed=7)
MASKS = {
    "full": None,
    "causal": "causal",
    "window": "window:5",
    "window-both": "window:7:both",
    "prefix": "prefix:6",
    "padding": "causal&pad-left:5",
    "packed": "packed:6,10,3",
    "boolean": BIAS[None] > -0.5,
    "additive": BIAS[:1].masked_fill(BIAS[:1] < 0, float("-inf")),
    "hidden-rows": (BIAS[0] > -9) & (torch.arange(N)[:, None] % 5 != 0),
}
PARTS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": cases.random(H, seed=1)},
    "bias": {"bias": BIAS},
    "rotary": {"rotary": lipscope.Rotary.from_base(2, n=N, dtype=torch.float64)},
    "everything": {
        "softcap": 2.0, "sinks": cases.random(H, seed=2), "rotary": lipscope.Rotary.from_base(2, n=N, dtype=torch.float64),
    },
}  # fmt: skip


def layer(mask, kv_heads=H, heads=H, d=10, dh=3, **parts) -> lipscope.Attention:
    draw = iter(range(100))

    def random(*shape):
        return cases.random(*shape, seed=next(draw)) / 2

    return lipscope.Attention(
        q=random(heads * dh, d), k=random(kv_heads * dh, d), v=random(kv_heads * dh, d), out=random(d, heads * dh),
        heads=heads, kv_heads=kv_heads, q_bias=random(heads * dh), k_bias=random(kv_heads * dh),
        v_bias=random(kv_heads * dh), mask=mask, **parts,
    )  # fmt: skip


@pytest.mark.parametrize(("mask", "part"), [*((mask, "plain") for mask in MASKS), *(("causal", part) for part in PARTS)])
def test_strips_equal_matrices(mask, part):
    """Every certificate of the layer, with grouped queries, and of every head; strips that do not divide the rows."""
    x = cases.random(N, 10, seed=3)
    subject = layer(MASKS[mask], kv_heads=2, **PARTS[part])
    whole = {bound.name: bound.value for bound in local_bounds(subject, x)}
    cut = {bound.name: bound.value for bound in local_bounds(subject, x, height=8)}
    assert len(whole) == 3
    assert cut == pytest.approx(whole, rel=1e-10)
    gains = torch.linspace(0.5, 2.0, N, dtype=torch.float64)[None]
    dense = certified_upper(subject, x[None], "head", gains=gains)
    torch.testing.assert_close(certified_upper(subject, x[None], "head", gains=gains, height=8), dense, rtol=1e-10, atol=0)


def test_gains_reach_the_strips():
    x, gains = cases.random(1, N, 10, seed=3), torch.linspace(0.5, 2.0, N, dtype=torch.float64)[None]
    dense = certified_upper(layer("causal"), x, gains=gains)
    torch.testing.assert_close(certified_upper(layer("causal"), x, gains=gains, height=8), dense, rtol=1e-10, atol=0)


@pytest.mark.parametrize("part", ["plain", "rotary"])
def test_one_head_and_pieces_of_columns(part, monkeypatch):
    """A layer of one head has the row-Gram certificate too; products over columns are cut into pieces."""
    x = cases.random(N, 10, seed=4)
    subject = layer("causal", heads=1, kv_heads=1, **PARTS[part])
    whole = {bound.name: bound.value for bound in local_bounds(subject, x)}
    monkeypatch.setattr("lipscope.bounds.head_core._COLUMNS", 7)
    monkeypatch.setattr(strips, "_COLUMNS", 5)
    cut = {bound.name: bound.value for bound in local_bounds(subject, x, height=6)}
    assert set(cut) == {"certificates.row_column", "certificates.block_norm", "certificates.row_gram"}
    assert cut == pytest.approx(whole, rel=1e-10)


def test_strips_are_above_sigma():
    """Not only equal to the matrices' bound: above the true norm, for inputs in the regime where the bound is tight."""
    for seed in range(4):
        x = 2.0 ** (seed - 2) * cases.random(14, 10, seed=seed)
        subject = layer("causal", rotary=lipscope.Rotary.from_base(2, n=14, dtype=torch.float64))
        sigma = lipscope.local_lipschitz(subject, x, solver=lipscope.Dense()).estimate
        assert sigma <= float(certified_upper(subject, x[None], height=6)) * (1 + 1e-9)


def test_no_matrix_is_formed_and_strips_keep_to_their_size(monkeypatch):
    monkeypatch.setattr(strips, "_STRIP", 1 << 13)
    monkeypatch.setattr(strips, "_COLUMNS", 32)
    monkeypatch.setattr(strips, "DENSE", 64)
    monkeypatch.setattr("lipscope.bounds.head_core._COLUMNS", 32)
    # Few small blocks are computed from the blocks themselves; long inputs never have few.
    monkeypatch.setattr("lipscope.bounds.head_core._SMALL", 0)
    for n in (80, 120):
        with LargestTensor(n) as seen:
            certified_upper(layer("causal"), cases.random(1, n, 10, seed=n))
        assert not seen.matrices
        assert seen.elements <= 1 << 13, seen.operation


def test_long_inputs_are_cut_by_themselves(monkeypatch):
    x = cases.random(1, 70, 10, seed=1)
    subject = layer("causal")
    expected = certified_upper(subject, x)
    monkeypatch.setattr(strips, "DENSE", 64)
    monkeypatch.setattr(strips, "_STRIP", 1 << 13)
    assert strips.strip_height(70, H) < 30
    torch.testing.assert_close(certified_upper(subject, x), expected, rtol=1e-10, atol=0)


def test_strips_keep_to_a_memory():
    assert strips.height_within(1000, 12, 1 << 30) is None
    assert strips.height_within(1000, 12, 16 << 20) == (16 << 20) // (68 * 8 * 1000)
    assert strips.height_within(16384, 12, 1 << 40) == strips.strip_height(16384, 12)
    assert strips.height_within(16384, 12, 1) == 16


def test_the_norms_of_weights_are_computed_once_for_the_same_tensors():
    """Padded inputs make a layer object each; their weights are the same tensors. A change in place is noticed."""
    from lipscope.bounds.weights import layer_weights

    subject = layer("causal&pad-right:1,2")
    first = layer_weights(subject)
    assert layer_weights(subject.for_input(1)) is first
    assert layer_weights(subject.with_mask("full")) is first
    assert layer_weights(layer("causal")) is not first
    subject.v.mul_(2.0)
    assert layer_weights(subject).plain[0].value == pytest.approx(2 * first.plain[0].value)
