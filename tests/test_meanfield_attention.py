"""F(μ) and F^m(μ̄): finite attention on uniform clouds, a map on measures and not on lists of atoms, and its derivative."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import cases
import lipscope
import reference
from lipscope.bounds.constants import Constants
from lipscope.bounds.pairs import PlainHead, lower_meanfield
from lipscope.bounds.sets import refined_masked, refined_unmasked
from lipscope.spectral.operator import DenseOperator
from lipscope.studies.mean_field import MeanFieldAttention, Measure, local_constant, wasserstein
from lipscope.studies.mean_field.attention import WeightedOperator, mean_field_operator

N = 5
EXTRAS = ("", "biases", "softcap biases", "no-out biases", "scale")
GROUPS = ((2, 0), (4, 2), (1, 0))


def tokens(n=N, d=cases.WIDTH, seed=3):
    return cases.random(n, d, seed=seed)


def random_weights(n=N, seed=4):
    w = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.05
    return w / w.sum()


def positions(n=N, seed=5):
    """Positions in no order, with two ties."""
    s = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).double()
    s[s == 1] = 2
    return s / n


def visible(measure):
    n = measure.size
    if measure.positions is None:
        return torch.ones(n, n, dtype=torch.bool)
    return measure.positions[None, :] <= measure.positions[:, None]


def oracle(layer, measure, X):
    """Γ at the points by the reference attention, with log-weights as an additive term."""
    additive = measure.weights.log().expand(layer.heads, X.shape[0], X.shape[0])
    return reference.attention(dataclasses.replace(layer, mask=None), X, visible(measure), additive)


def measures(n=N, d=cases.WIDTH):
    return {
        "full": Measure(tokens(n, d), random_weights(n)),
        "causal": Measure(tokens(n, d), random_weights(n), positions(n)),
    }


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("group", GROUPS)
def test_uniform_clouds_give_finite_attention_bit_by_bit(mask, extras, group):
    layer = cases.layer(heads=group[0], kv_heads=group[1], extras=extras).with_mask(mask)
    F, X = MeanFieldAttention(layer), tokens()
    assert torch.equal(F(F.measure_of(X)).points, layer(X))


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("group", GROUPS)
def test_weighted_clouds_agree_with_the_reference(mask, extras, group):
    layer = cases.layer(heads=group[0], kv_heads=group[1], extras=extras).with_mask(mask)
    mu = measures()[mask]
    torch.testing.assert_close(MeanFieldAttention(layer)(mu).points, oracle(layer, mu, mu.points), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_rational_weights_are_repeated_tokens(mask):
    """Weights (2, 1, 3)/6 are the sequence x0 x0 x1 x2 x2 x2, all copies of a token at one position."""
    layer = cases.layer(extras="biases").with_mask(mask)
    X, copies = tokens(3), torch.tensor([2, 1, 3])
    weights = copies.double() / 6
    F, index = MeanFieldAttention(layer), torch.repeat_interleave(torch.arange(3), copies)
    repeated = reference.attention(layer, X[index], torch.ones(6, 6, dtype=torch.bool) if mask == "full" else
                                   index[None, :] <= index[:, None])  # fmt: skip
    place = torch.arange(1, 4).double() / 3
    mu = Measure(X, weights) if mask == "full" else Measure(X, weights, place)
    torch.testing.assert_close(F(mu).points[index], repeated, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_splitting_and_merging_change_nothing(mask):
    F, mu = MeanFieldAttention(cases.layer(extras="softcap biases").with_mask(mask)), measures()[mask]
    for split in (mu.split(), mu.split(3, atoms=[1, -1])):
        image, same = F(mu), F(split)
        origin = torch.cdist(split.points, mu.points).argmin(-1)
        torch.testing.assert_close(same.points, image.points[origin], rtol=1e-13, atol=1e-13)
        merged = split.merge()
        assert merged.size == mu.size
        order = torch.cdist(merged.points, mu.points).argmin(-1)
        torch.testing.assert_close(merged.weights, mu.weights[order], rtol=1e-15, atol=0)


def test_atoms_may_come_in_any_order():
    F = MeanFieldAttention(cases.layer().with_mask("causal"))
    mu, order = Measure.from_tokens(tokens(), ordered=True), torch.tensor([3, 0, 4, 1, 2])
    shuffled = Measure(mu.points[order], mu.weights[order], mu.positions[order])
    torch.testing.assert_close(F(shuffled).points, F(mu).points[order], rtol=1e-13, atol=1e-13)


def test_weight_zero_means_absent():
    for mask, mu in measures().items():
        F = MeanFieldAttention(cases.layer().with_mask(mask))
        w = mu.weights.clone()
        w[2] = 0
        with_ghost = dataclasses.replace(mu, weights=w / w.sum())
        kept = [0, 1, 3, 4]
        torch.testing.assert_close(F(with_ghost).points[kept], F(with_ghost.support()).points, rtol=1e-13, atol=1e-13)
        assert bool(torch.isfinite(F(with_ghost).points).all())
        assert local_constant(F, with_ghost).estimate == local_constant(F, with_ghost.support()).estimate


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_sinks_count_as_one_token_among_sink_length(mask):
    layer, X = cases.layer(extras="sinks biases").with_mask(mask), tokens()
    F = MeanFieldAttention(layer, sink_length=N)
    assert torch.equal(F(F.measure_of(X)).points, layer(X))
    split = F.measure_of(X).split()
    torch.testing.assert_close(F(split).points[::2], layer(X), rtol=1e-13, atol=1e-13)
    uneven = dataclasses.replace(F.measure_of(X), weights=random_weights())
    torch.testing.assert_close(F(uneven.split()).points[::2], F(uneven).points, rtol=1e-13, atol=1e-13)


def test_what_has_no_mean_field_meaning_is_refused_by_name():
    with pytest.raises(ValueError, match=r"additive score bias .* no mean-field meaning"):
        MeanFieldAttention(cases.layer(extras="score-bias"))
    for mask in ("window:2", "prefix:1", "packed:2,3", "causal&pad-left:1", torch.ones(5, 5, dtype=torch.bool)):
        with pytest.raises(ValueError, match="no mean-field meaning"):
            MeanFieldAttention(cases.layer().with_mask(mask))
    with pytest.raises(ValueError, match="sinks need sink_length"):
        MeanFieldAttention(cases.layer(extras="sinks"))
    with pytest.raises(ValueError, match="sink_length belongs to layers with sinks"):
        MeanFieldAttention(cases.layer(), sink_length=4)
    with pytest.raises(ValueError, match="sink_length must be at least 1"):
        MeanFieldAttention(cases.layer(extras="sinks"), sink_length=0)
    with pytest.raises(TypeError, match=r"layer must be an Attention, got Identity"):
        MeanFieldAttention(torch.nn.Identity())
    full, causal = MeanFieldAttention(cases.layer()), MeanFieldAttention(cases.layer().with_mask("causal"))
    with pytest.raises(TypeError, match="space_marginal"):
        full(Measure.from_tokens(tokens(), ordered=True))
    with pytest.raises(TypeError, match="from_tokens"):
        local_constant(causal, Measure(tokens()))
    with pytest.raises(ValueError, match=r"R\^2, but the layer takes width 6"):
        full(Measure(torch.zeros(3, 2)))
    with pytest.raises(ValueError, match="unknown scope 'block'"):
        local_constant(full, Measure(tokens()), scope="block")


def dense_weighted(layer, mu):
    """D_w^{1/2} J D_w^{−1/2} by autograd through the reference, and the blocks of J."""
    J = reference.jacobian(lambda x: oracle(layer, mu, x), mu.points)
    n, out = mu.size, J.shape[0] // mu.size
    roots = mu.weights.sqrt()
    return roots.repeat_interleave(out)[:, None] * J / roots.repeat_interleave(J.shape[1] // n)[None, :]


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("group", GROUPS)
def test_operator_is_the_dense_jacobian_in_the_weighted_metric(mask, extras, group):
    layer = cases.layer(heads=group[0], kv_heads=group[1], extras=extras).with_mask(mask)
    mu, F = measures()[mask], MeanFieldAttention(layer)
    dense, op = dense_weighted(layer, mu), mean_field_operator(F, mu)
    torch.testing.assert_close(op.to_dense()[0], dense, rtol=1e-11, atol=1e-12)
    u, g = cases.random(1, op.shape[1], seed=1), cases.random(1, op.shape[0], seed=2)
    torch.testing.assert_close(op.matvec(u)[0], dense @ u[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(op.rmatvec(g)[0], dense.T @ g[0], rtol=1e-11, atol=1e-12)
    twice = op.select(torch.tensor([0, 0]))
    torch.testing.assert_close(twice.matvec(u.expand(2, -1)), op.matvec(u).expand(2, -1), rtol=1e-13, atol=1e-13)
    exact = float(torch.linalg.matrix_norm(dense, 2))
    for solver in (
        lipscope.Dense(),
        lipscope.GolubKahan(rtol=1e-8, interval=1e-3),
    ):
        result = local_constant(F, mu, solver=solver)
        assert result.estimate == pytest.approx(exact, rel=1e-6)
        assert result.lower <= exact * (1 + 1e-12)
        assert exact <= result.upper * (1 + 1e-12)


def test_worst_direction_lies_in_the_metric_of_the_measure():
    layer, mu = cases.layer(), measures()["full"]
    result = local_constant(MeanFieldAttention(layer), mu, solver=lipscope.Dense(vectors=True))
    epsilon = result.right[0]
    assert float((mu.weights[:, None] * epsilon.square()).sum()) == pytest.approx(1, rel=1e-12)
    torch.testing.assert_close(result.token_energy, mu.weights * epsilon.square().sum(-1), rtol=1e-10, atol=1e-14)
    step = 1e-6
    moved = oracle(layer, mu, mu.points + step * epsilon) - oracle(layer, mu, mu.points)
    assert float((mu.weights[:, None] * moved.square()).sum().sqrt()) / step == pytest.approx(result.estimate, rel=1e-5)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_uniform_weights_give_the_local_lipschitz_constant(mask):
    layer, X = cases.layer(extras="biases").with_mask(mask), tokens()
    F = MeanFieldAttention(layer)
    sigma = lipscope.local_lipschitz(layer, X, solver=lipscope.Dense())
    assert local_constant(F, F.measure_of(X)).estimate == pytest.approx(sigma.estimate, rel=1e-12)
    heads = lipscope.local_lipschitz(layer, X, scope="head", solver=lipscope.Dense()).estimate
    per_head = local_constant(F, F.measure_of(X), scope="head")
    torch.testing.assert_close(per_head.estimate, heads, rtol=1e-12, atol=0)
    for h in range(layer.heads):
        assert local_constant(F.head(h), F.measure_of(X)).estimate == pytest.approx(float(heads[h]), rel=1e-12)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("seed", range(8))
def test_splitting_adds_the_diagonal_blocks_and_nothing_else(mask, seed):
    """σ(split) = max(σ, max‖B_i‖), B_i = ∂Γ(x_i)/∂x with the measure held fixed."""
    layer = cases.layer(seed=10 * seed, sharp=1 + seed % 3).with_mask(mask)
    mu = measures(n=3 + seed % 3)[mask]
    F = MeanFieldAttention(layer)
    whole = local_constant(F, mu).estimate

    def at_query(i):
        """x ↦ Γ_μ(x) for a ghost of weight zero that sits at atom i."""
        additive = torch.cat([mu.weights.log(), torch.tensor([-math.inf])])

        def function(x):
            X = torch.cat([mu.points, x[None]])
            seen = torch.cat([visible(mu)[i], torch.tensor([False])])
            rows = torch.zeros(len(X), len(X), dtype=torch.bool)
            rows[-1] = seen
            safe = additive.clone()
            safe[-1] = 0
            return reference.attention(layer, X, rows, safe.expand(layer.heads, len(X), len(X)))[-1]

        return float(torch.linalg.matrix_norm(reference.jacobian(function, mu.points[i]), 2))

    blocks = [at_query(i) for i in range(mu.size)]
    assert local_constant(F, mu.split()).estimate == pytest.approx(max(whole, *blocks), rel=1e-10)
    assert local_constant(F, mu, splitting=True).estimate == pytest.approx(max(whole, *blocks), rel=1e-10)
    assert local_constant(F, mu.split(4, atoms=[0])).estimate == pytest.approx(max(whole, blocks[0]), rel=1e-10)
    # A second splitting finds nothing new.
    assert local_constant(F, mu.split(), splitting=True).estimate == pytest.approx(max(whole, *blocks), rel=1e-10)


@pytest.mark.parametrize(("n", "norm"), [(2, 1.144), (10, 1.410), (100, 1.630)])
def test_masked_without_interaction_is_the_cesaro_operator(n, norm):
    d = 2
    I = torch.eye(d, dtype=torch.float64)  # noqa: E741
    F = MeanFieldAttention(lipscope.Attention(0 * I, I, I, mask="causal"))
    cesaro = torch.ones(n, n, dtype=torch.float64).tril() / torch.arange(1, n + 1, dtype=torch.float64)[:, None]
    measured = local_constant(F, F.measure_of(tokens(n, d)))
    assert measured.lower <= float(torch.linalg.matrix_norm(cesaro, 2)) <= measured.upper
    assert measured.estimate == pytest.approx(norm, abs=5e-4)
    # Hardy: below 2 for every n, hence so is the bound that does not depend on n.
    assert measured.upper < 2 <= refined_masked(Constants.of_norms(1.0, 0.0), 1.0).value


def symmetric_head(seed, d=3):
    """Symmetric A with γ_min = −‖A‖, and V = I."""
    Q = torch.linalg.qr(cases.random(d, d, seed=seed)).Q
    A = Q @ torch.diag(torch.tensor([-1.0, 0.7, -0.2], dtype=torch.float64)) @ Q.T
    identity = torch.eye(d, dtype=torch.float64)
    return A, Q[:, 0], lipscope.Attention(A, identity, identity, scale=1.0)


@pytest.mark.parametrize("a", [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.8, 1, 1.5, 2, 3, 4, 5, 7, 10, 14, 20])
def test_upper_and_lower_mean_field_constants_are_within_a_factor_two(a):
    A, e, layer = symmetric_head(seed=1)
    R = math.sqrt(a)
    upper = refined_unmasked(layer, R).value
    found = lower_meanfield(PlainHead(A, layer.v), R)
    assert 1 <= upper / found.value <= 2.01
    # The lower constant is attained: two Diracs at ±Re, however small the lighter one has to be.
    t = torch.logspace(-3, 2, 2001, dtype=torch.float64)
    t = float(t[(t.sqrt() / (1 + t) * (1 + 2 * a * t / (1 + t))).argmax()])
    light = 1 / (1 + t * math.exp(2 * a))
    diracs = Measure(torch.stack([-R * e, R * e]), [light, 1 - light])
    measured = local_constant(MeanFieldAttention(layer), diracs)
    assert found.value * (1 - 1e-4) <= measured.lower
    assert measured.upper <= upper


def test_small_displacements_of_a_weighted_cloud_attain_the_constant_in_w2():
    layer, mu = cases.layer(), measures()["full"]
    F = MeanFieldAttention(layer)
    result = local_constant(F, mu, solver=lipscope.Dense(vectors=True))
    nearby = mu.push(mu.points + 1e-5 * result.right[0])
    assert wasserstein(F(mu), F(nearby)) / wasserstein(mu, nearby) == pytest.approx(result.estimate, rel=1e-4)


def test_weighted_operator_refuses_what_it_cannot_scale():
    base = mean_field_operator(MeanFieldAttention(cases.layer()), Measure(tokens())).base
    with pytest.raises(ValueError, match="weights must be positive"):
        WeightedOperator(base, torch.tensor([0.5, 0.5, 0, 0, 0]))
    with pytest.raises(ValueError, match="base must map n tokens to n tokens"):
        WeightedOperator(DenseOperator(torch.eye(3)), torch.ones(3) / 3)
