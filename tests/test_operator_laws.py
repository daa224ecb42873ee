"""One set of laws for every operator × mask × dtype × grouped/ungrouped × optional part."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import svds

import cases
import lipscope

MASKS = list(cases.masks())
KINDS = {
    "attention": cases.attention_case,
    "head": cases.head_case,
    "autodiff": cases.autodiff_case,
    "block-diagonal": lambda layer, mask: cases.block_case(layer, mask, diagonal=True),
    "block-off": lambda layer, mask: cases.block_case(layer, mask, diagonal=False),
}
GROUPS = {"ungrouped": (2, 0), "grouped": (4, 2), "multi-query": (3, 1)}
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5}


def build(kind, mask, extras, group, dtype) -> cases.Case:
    heads, kv_heads = GROUPS[group]
    return KINDS[kind](cases.layer(heads=heads, kv_heads=kv_heads, extras=cases.EXTRAS[extras], dtype=dtype), mask)


def combinations():
    """Every mask on every kind; every optional part and grouping on every kind, with two masks in turn.

    Single precision changes the rounding and not the products: it has every optional part on every kind. Automatic
    differentiation takes the oracle's map, and has every optional part once, precisions in turn.
    """
    ours = [kind for kind in KINDS if kind != "autodiff"]
    seen = {(kind, mask, "everything", "grouped", torch.float64) for kind in ours for mask in MASKS}
    for turn, (kind, extras, group) in enumerate(product(ours, cases.EXTRAS, GROUPS)):
        seen.add((kind, ("causal", "boolean-per-head")[turn % 2], extras, group, torch.float64))
    for turn, extras in enumerate(cases.EXTRAS):
        mask, group = ("causal", "boolean-per-head")[turn % 2], list(GROUPS)[turn % 3]
        seen.add(("autodiff", mask, extras, group, (torch.float64, torch.float32)[turn // 2 % 2]))
    seen |= {(kind, "causal", extras, "grouped", torch.float32) for kind in ours for extras in cases.EXTRAS}
    return sorted(seen, key=str)


def name(value) -> str:
    return str(value).removeprefix("torch.")


@pytest.mark.parametrize(("kind", "mask", "extras", "group", "dtype"), combinations(), ids=name)
def test_laws(kind, mask, extras, group, dtype):
    case = build(kind, mask, extras, group, dtype)
    op, tol = case.operator, TOLERANCE[dtype]
    M, N = op.shape
    size = max(1.0, float(case.dense.abs().max()))

    # Products agree with the dense Jacobian of the oracle, left and right.
    assert case.dense.shape == (op.batch, M, N)
    u = cases.random(op.batch, N, seed=1, dtype=dtype)
    g = cases.random(op.batch, M, seed=2, dtype=dtype)
    Ju, Jg = op.matvec(u), op.rmatvec(g)
    torch.testing.assert_close(
        Ju.double(), torch.einsum("bmn,bn->bm", case.dense, u.double()), rtol=tol, atol=10 * tol * size
    )
    torch.testing.assert_close(
        Jg.double(), torch.einsum("bmn,bm->bn", case.dense, g.double()), rtol=tol, atol=10 * tol * size
    )

    # The adjoint identity, and determinism: twice in a row is bit-identical.
    torch.testing.assert_close((Ju * g).sum(-1), (u * Jg).sum(-1), rtol=100 * tol, atol=100 * tol * size)
    assert torch.equal(op.matvec(u), Ju)
    assert torch.equal(op.rmatvec(g), Jg)

    # Linearity.
    w = cases.random(op.batch, N, seed=3, dtype=dtype)
    torch.testing.assert_close(op.matvec(2 * u - 3 * w), 2 * Ju - 3 * op.matvec(w), rtol=tol, atol=100 * tol * size)

    # Selecting items is the same as looking at their rows, in any order and with repeats.
    items = torch.tensor([op.batch - 1, 0, 0])
    picked = op.select(items)
    assert picked.batch == 3
    torch.testing.assert_close(picked.matvec(u[items]), Ju[items], rtol=tol, atol=tol * size)
    torch.testing.assert_close(picked.rmatvec(g[items]), Jg[items], rtol=tol, atol=tol * size)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", ["causal", "boolean-per-head"])
def test_to_dense_and_to_scipy(kind, mask):
    case = build(kind, mask, "everything", "grouped", torch.float64)
    torch.testing.assert_close(case.operator.to_dense(), case.dense, rtol=1e-10, atol=1e-11)
    last = case.operator.batch - 1
    scipy_operator = case.operator.to_scipy(last)
    M, N = case.operator.shape
    np.testing.assert_allclose(scipy_operator @ np.eye(N), case.dense[last].numpy(), atol=1e-11)
    np.testing.assert_allclose(scipy_operator.rmatvec(np.ones(M)), case.dense[last].numpy().T @ np.ones(M), atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "mask"),
    [*(("attention", mask) for mask in MASKS), ("head", "causal"), ("head", "packed-both"), ("autodiff", "causal")],
)
def test_every_solver_agrees_with_scipy(kind, mask):
    """SciPy's svds on the operator is the independent oracle; a dense SVD of the oracle's Jacobian is the second."""
    case = build(kind, mask, "everything", "grouped", torch.float64)
    truth = torch.linalg.svdvals(case.dense)[:, 0]
    op = case.operator
    scipy_values = [svds(op.to_scipy(b), k=1, return_singular_vectors=False, random_state=0)[0] for b in range(op.batch)]
    np.testing.assert_allclose(scipy_values, truth.numpy(), rtol=1e-9)
    for solver in (lipscope.Dense(), lipscope.GolubKahan(rtol=1e-9)):
        result = lipscope.spectral_norm(op, solver)
        np.testing.assert_allclose(result.estimate, truth, rtol=1e-7)
        assert (result.lower <= truth).all()
        assert (truth <= result.upper).all()


def test_causal_zeros():
    """With a causal mask no output depends on a later token, exactly."""
    layer = cases.layer(extras="biases softcap sinks")
    J = cases.attention_case(layer, "causal").operator.to_dense().reshape(cases.BATCH, 5, 4, 5, 6)
    for i in range(5):
        assert (J[:, i, :, i + 1 :] == 0).all()
        assert (J[:, i, :, i] != 0).any()


def test_head_sum():
    """Σ_h W_O^h J_h = J of the layer."""
    layer = cases.layer(heads=4, kv_heads=2, extras="biases", d=12)
    X = cases.random(1, 5, 12, seed=50)
    heads = lipscope.attention.operators.HeadOperator.at(layer, X)
    total = torch.zeros(5 * 4, 5 * 12, dtype=torch.float64)
    for h in range(4):
        back = torch.block_diag(*[heads.basis[h].mT] * 5)
        into = torch.block_diag(*[layer.out[:, 3 * h : 3 * h + 3]] * 5)
        total += into @ heads.to_dense()[h] @ back
    torch.testing.assert_close(total, lipscope.attention.operators.AttentionOperator.at(layer, X).to_dense()[0])


def test_head_cannot_be_mixed_up_with_another():
    """Each head equals the one-head layer cut out of the weights, so slices are rows and of the right head."""
    layer = cases.layer(heads=4, kv_heads=2, extras="everything biases softcap sinks score-bias")
    X = cases.random(5, 6, seed=50)
    together = lipscope.local_lipschitz(layer, X, scope="head")
    for h in range(4):
        alone = lipscope.local_lipschitz(layer.head(h), X)
        assert alone.estimate == pytest.approx(float(together.estimate[h]), rel=1e-10)
