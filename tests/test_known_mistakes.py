"""One regression test per mistake seen in the wild: each shows that the mistake changes the number, and that we avoid it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cases
import lipscope
import reference
from lipscope.spectral.operator import DenseOperator
from lipscope.studies.paper import companion_estimator

LOWER = torch.ones(5, 5, dtype=torch.bool).tril()


@pytest.fixture(scope="module")
def setting():
    """A causal layer, tokens, its dense Jacobian and the true σ."""
    layer = cases.layer(heads=2, extras="biases", d_out=6).with_mask("causal")
    X = cases.random(5, 6, seed=21)
    J = reference.jacobian(lambda x: reference.attention(layer, x, LOWER), X)
    return layer, X, J, float(torch.linalg.svdvals(J)[0])


def ours(layer, X, **options) -> float:
    return lipscope.local_lipschitz(layer, X, **options).estimate


def test_primal_taken_for_the_tangent(setting):
    """torch.func.jvp(...)[0] is f(X), not J·u: the loop then returns √‖Jᵀf(X)‖."""
    layer, X, J, truth = setting
    function = lambda x: reference.attention(layer, x, LOWER)  # noqa: E731
    u = cases.random(5, 6, seed=0)
    for _ in range(30):
        u = u / u.norm()
        wrong = torch.func.jvp(function, (X,), (u,))[0]
        u = torch.func.vjp(function, X)[1](wrong)[0]
    looped = float(u.norm().sqrt())
    assert looped == pytest.approx(float((J.T @ function(X).flatten()).norm().sqrt()), rel=1e-12)
    assert companion_estimator(layer, X) == pytest.approx(looped, rel=1e-12)
    assert companion_estimator(layer, X[None]).item() == pytest.approx(looped, rel=1e-12)
    assert abs(looped / truth - 1) > 0.05
    assert ours(layer, X) == pytest.approx(truth, rel=1e-9)


def test_jacobian_iterated_instead_of_its_gram_matrix():
    """Iterating u ← Ju finds an eigenvalue; a nilpotent Jacobian has none but zero, and σ is not zero."""
    A = torch.tensor([[0.0, 5.0], [0.0, 0.0]], dtype=torch.float64)
    u = torch.ones(2, dtype=torch.float64)
    for _ in range(2):
        u = A @ u
    assert float(u.norm()) == 0.0
    assert lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan()).estimate == pytest.approx(5.0)


def test_per_token_gain_is_not_a_bound(setting):
    """max_i ‖g_i J‖/‖g_i‖ over tokens is neither above nor equal to σ; the whole-tensor ratio is a lower bound."""
    _, _, J, truth = setting
    per_token = max(float(torch.linalg.svdvals(J[6 * i : 6 * i + 6])[0]) for i in range(5))
    assert per_token < truth * (1 - 1e-3)
    g = cases.random(30, seed=5)
    backward = J.T @ g
    assert float(backward.norm() / g.norm()) <= truth
    worst = max(
        float(((J.T @ h).reshape(5, 6).norm(dim=-1) / h.reshape(5, 6).norm(dim=-1)).max())
        for h in torch.randn(200, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )
    assert worst > truth, "a per-token ratio can exceed σ, so it is no lower bound either"


def test_one_token_block_is_not_the_constant(setting):
    layer, X, _, truth = setting
    blocks = lipscope.influence(layer, X)
    assert float(blocks.max()) < truth * (1 - 1e-3)


def test_lost_mask(setting):
    layer, X, _, truth = setting
    assert abs(ours(layer, X, mask="full") / truth - 1) > 0.01
    assert ours(layer, X) == pytest.approx(truth, rel=1e-9)


def test_dropout_left_on():
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True).train()
    with pytest.raises(ValueError, match=r"training mode with dropout 0\.1"):
        lipscope.local_lipschitz(block, torch.randn(1, 4, 8))
    with pytest.raises(ValueError, match="the map is random"):
        lipscope.local_lipschitz(lambda x: nn.functional.dropout(x, 0.1), torch.randn(1, 4, 8))
    lipscope.local_lipschitz(block.eval(), torch.randn(1, 4, 8))


def test_rows_sliced_where_heads_are_columns():
    """GPT-2 stores (in, out): slicing its rows as if they were heads gives another layer."""
    W = cases.random(6, 18, seed=0)
    X = cases.random(4, 6, seed=1)
    right = lipscope.Attention.from_fused(W, heads=2, transposed=True)
    torch.testing.assert_close(right.head(1).q, W[:, 3:6].T)
    square = cases.random(6, 6, seed=2)
    as_stored = lipscope.Attention(square, square, square, heads=2)
    transposed = lipscope.Attention(square.T, square.T, square.T, heads=2)
    assert abs(ours(as_stored, X) / ours(transposed, X) - 1) > 0.01
    with pytest.raises(ValueError, match="transposed=True"):
        lipscope.Attention.from_fused(cases.random(8, 24, seed=0), heads=3)


def test_absolute_tolerance():
    """|σ²_k − σ²_{k−1}| < 1e-4 stops a small map at once: c·f gets another relative error than f."""

    def textbook(A):
        v, previous = torch.ones(A.shape[1], dtype=A.dtype), 0.0
        for _ in range(1000):
            v = v / v.norm()
            v = A.T @ (A @ v)
            if abs(float(v.norm()) - previous) < 1e-4:
                break
            previous = float(v.norm())
        return float(v.norm().sqrt())

    A = cases.random(40, 40, seed=3)
    truth = float(torch.linalg.svdvals(A)[0])
    assert textbook(A) == pytest.approx(truth, rel=1e-3)
    assert abs(textbook(1e-3 * A) / (1e-3 * truth) - 1) > 0.1
    for factor in (1.0, 1e-3):
        result = lipscope.spectral_norm(DenseOperator(factor * A), lipscope.GolubKahan())
        assert result.estimate == pytest.approx(factor * truth, rel=1e-3)


def test_residual_does_not_certify_the_largest():
    """A start orthogonal to the top vector converges with residual 0 to a smaller value; the interval covers that."""
    A = torch.diag(torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64))
    v = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    assert float((A.T @ (A @ v) - v).norm()) == 0.0
    result = lipscope.spectral_norm(DenseOperator(A), lipscope.GolubKahan(max_steps=1))
    assert result.upper >= 2.0
