"""Ascent on σ: its gradient is that of a dense SVD, it never loses to a start, and it beats brute force."""

import pytest
import torch

import cases
import lipscope
import reference
from lipscope.attention.operators import AttentionOperator
from lipscope.bounds.domain import ball, image
from lipscope.measure.gradient import sigma_gradient
from lipscope.spectral.basis import random_direction
from lipscope.spectral.operator import DenseOperator
from lipscope.studies.worst_case import construct, growth, maximise
from lipscope.studies.worst_case.ascent import cold_pair, warm_pair

LAYER_NORM = lipscope.LayerNorm(cases.random(6, seed=9).abs() + 0.1, 0.3 * cases.random(6, seed=8))


def oracle(layer, X, mask_name):
    """Singular values of the independent dense Jacobian."""
    _, visible, additive = cases.masks(X.shape[0], 1, layer.heads)[mask_name]
    extra = additive if isinstance(additive, float) else additive[0]
    J = reference.jacobian(lambda x: reference.attention(layer, x, visible[0], extra), X)
    return torch.linalg.svd(J)


@pytest.mark.parametrize(
    ("extras", "mask_name"),
    [*((extras, "full" if i % 2 else "causal") for i, extras in enumerate(cases.EXTRAS)),
     ("plain", "full"), ("plain", "additive"), ("biases", "window-both"), ("softcap", "all-hidden-row"),
     ("everything", "causal"), ("everything", "boolean-per-head")],
)  # fmt: skip
def test_gradient_equals_finite_differences_of_the_dense_svd(extras, mask_name):
    heads, kv_heads = (4, 2) if extras in ("biases", "everything") else (2, 0)
    layer = cases.layer(heads=heads, kv_heads=kv_heads, extras=cases.EXTRAS[extras]).for_input(0)
    X, direction = 0.7 * cases.random(5, 6, seed=3), cases.random(5, 6, seed=8)
    U, S, Vh = oracle(layer, X, mask_name)
    assert float(S[0] - S[1]) > 1e-3 * float(S[0])  # σ is simple here, so it is differentiable
    masked = layer.with_mask(cases.masks(5, 1, heads)[mask_name][0])
    operator = AttentionOperator.at(masked, X[None])
    gradient = sigma_gradient(operator, U[None, :, 0], Vh[None, 0])
    h = 2e-5

    def difference(step):
        return float(
            oracle(layer, X + step * direction, mask_name)[1][0] - oracle(layer, X - step * direction, mask_name)[1][0]
        )

    # Fourth order, so that the error of the quotient is far below the tolerance.
    slope = (8 * difference(h) - difference(2 * h)) / (12 * h)
    assert float((gradient[0] * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-8 * float(S[0]))


def test_gradient_through_a_normalisation():
    layer, domain = cases.layer(extras="biases"), image(LAYER_NORM)
    z = domain.project(cases.random(1, 5, 6, seed=3))
    step = cases.random(1, 5, 6, seed=4)
    step = step - step.mean(-1, keepdim=True)

    def sigma(z):
        return float(oracle(layer, domain.tokens(z)[0], "full")[1][0])

    U, _, Vh = oracle(layer, domain.tokens(z)[0], "full")
    gradient = sigma_gradient(AttentionOperator.at(layer, domain.tokens(z)), U[None, :, 0], Vh[None, 0])
    slope = (sigma(z + 1e-5 * step) - sigma(z - 1e-5 * step)) / 2e-5
    assert float((domain.pull_back(gradient) * step).sum()) == pytest.approx(slope, rel=1e-6)


def test_gradient_is_batched():
    layer = cases.layer(heads=4, kv_heads=2, extras="biases softcap")
    X = cases.random(3, 5, 6, seed=1)
    operator = AttentionOperator.at(layer, X)
    pair = cold_pair(operator)
    together = sigma_gradient(operator, pair.left, pair.right)
    for b in range(3):
        one = sigma_gradient(AttentionOperator.at(layer, X[b : b + 1]), pair.left[b : b + 1], pair.right[b : b + 1])
        torch.testing.assert_close(together[b], one[0], rtol=1e-10, atol=1e-12)


def test_warm_pairs_are_valid_and_close():
    layer = cases.layer(heads=2, d=16, dk=8, dv=8, d_out=16)
    X = 0.3 * cases.random(4, 12, 16, seed=1)
    operator = AttentionOperator.at(layer, X)
    start = cold_pair(operator, rtol=1e-8)
    near = AttentionOperator.at(layer, X + 1e-3 * cases.random(4, 12, 16, seed=2))
    exact = torch.linalg.svdvals(near.to_dense())[:, 0]
    warm = warm_pair(near, start.right, 4)
    assert bool((warm.theta <= exact * (1 + 1e-12)).all())
    torch.testing.assert_close(warm.theta, exact, rtol=1e-6, atol=0)
    # θ = ⟨u, Jv⟩ for the returned unit vectors, and never below what the start attains.
    torch.testing.assert_close((warm.left * near.matvec(warm.right)).sum(-1), warm.theta, rtol=1e-10, atol=0)
    assert bool((warm.theta >= near.matvec(start.right).norm(dim=-1) * (1 - 1e-12)).all())
    # A map of rank one exhausts the space at once.
    ones = DenseOperator(torch.ones(1, 3, 3, dtype=torch.float64))
    assert float(warm_pair(ones, torch.full((1, 3), 3**-0.5, dtype=torch.float64), 4).theta) == pytest.approx(3.0)


@pytest.mark.parametrize("mask", ["full", "causal", "window:3"])
@pytest.mark.parametrize(
    ("where", "heads", "kv_heads", "extras"),
    [("ball", 1, 0, ""), ("ball", 4, 2, "biases softcap sinks"), ("norm", 2, 0, "biases")],
)
def test_ascent_never_loses_to_a_construction_or_a_start(mask, where, heads, kv_heads, extras):
    layer = cases.layer(heads=heads, kv_heads=kv_heads, extras=extras).with_mask(mask)
    domain = ball(1.2) if where == "ball" else image(LAYER_NORM)
    given = {"radius": 1.2} if where == "ball" else {"norm": LAYER_NORM}
    activations = domain.tokens(domain.coordinates(cases.random(2, 7, 6, seed=5)))
    found = maximise(layer, 7, **given, restarts=10, steps=30, starts=activations, solver=lipscope.Dense())
    for c in construct(layer, 7, **given, solver=lipscope.Dense()):
        assert found.sigma.estimate >= c.sigma.estimate * (1 - 1e-9), c.name
    for X in activations:
        assert found.sigma.estimate >= lipscope.local_lipschitz(layer, X, solver=lipscope.Dense()).estimate
    # It stays in the set, its value is that of the dense Jacobian, and σ never falls along the way.
    assert float((domain.tokens(domain.coordinates(found.tokens)) - found.tokens).norm()) < 1e-9
    J = AttentionOperator.at(layer, found.tokens[None]).to_dense()
    assert found.sigma.estimate == pytest.approx(float(torch.linalg.svdvals(J)[0, 0]), rel=1e-9)
    assert bool((found.history.diff(dim=0) >= 0).all())
    assert bool((found.history[-1] <= found.ends * (1 + 1e-9)).all())
    assert bool((found.ends >= found.starts).all())
    assert {"given 0", "given 1", "pair", "groups"} <= set(found.labels)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_ascent_beats_a_brute_force_search(mask):
    """Small enough for 20,000 random inputs to come close: two tokens of width 2, or three of width 1."""
    for d, n in ((2, 2), (1, 3)):
        layer = cases.layer(heads=1, d=d, dk=d, dv=d, d_out=d, seed=7).with_mask(mask)
        found = maximise(layer, n, radius=1.5, restarts=12, steps=80, solver=lipscope.Dense())
        Z = cases.random(20_000, n, d, seed=1)
        lengths = torch.rand(20_000, n, 1, generator=torch.Generator().manual_seed(2), dtype=torch.float64).pow(1 / d)
        # Half of them on the surface, where the worst inputs tend to lie.
        lengths[::2] = 1.0
        X = 1.5 * lengths * Z / Z.norm(dim=-1, keepdim=True)
        # All Jacobians at once, column by column.
        columns = torch.eye(n * d, dtype=torch.float64)
        operator = AttentionOperator.at(layer, X)
        J = torch.stack([operator.matvec(column.expand(len(X), -1)) for column in columns], dim=-1)
        best = float(torch.linalg.matrix_norm(J, 2).max())
        assert found.sigma.estimate >= best * (1 - 1e-6)
        # And the brute force is no straw man: it gets within a few per cent.
        assert best >= 0.93 * found.sigma.estimate


def test_clustered_singular_values_do_not_stop_the_ascent():
    """At equal tokens J is a Kronecker product with every singular value repeated: σ has no gradient there."""
    W = torch.eye(3, dtype=torch.float64)
    layer = lipscope.Attention(-W, W, W, scale=1.0)
    same = torch.full((6, 3), 0.3, dtype=torch.float64)
    found = maximise(layer, 6, radius=1.0, restarts=8, steps=60, starts=same)
    index = found.labels.index("given")
    assert bool((found.history.diff(dim=0) >= 0).all())
    assert float(found.ends[index]) > 1.2 * float(found.starts[index])


def test_early_stop_seed_and_progress():
    layer = cases.layer(heads=1, d=2, dk=2, dv=2, d_out=2)
    reports = []
    found = maximise(layer, 3, radius=0.5, steps=400, restarts=8, progress=lambda *what: reports.append(what))
    assert found.stopped == "converged"
    assert len(found.history) - 1 == len(reports) < 400
    assert reports[-1][1] == 400
    assert "σ ≥" in reports[-1][2]
    again = maximise(layer, 3, radius=0.5, steps=400, restarts=8)
    assert again.tokens.equal(found.tokens)
    assert not maximise(layer, 3, radius=0.5, steps=5, restarts=8, seed=1).inputs.equal(found.inputs)
    assert "worst σ found on tokens of norm ≤ 0.5, n = 3" in str(found)
    assert len(found.labels) == len(found.starts) == len(found.ends)


def test_float32_search_is_measured_in_float64():
    layer = cases.layer(heads=2, dtype=torch.float32)
    found = maximise(layer, 5, radius=1.0, steps=20, restarts=8, dtype=torch.float32)
    assert found.sigma.dtype == "float64"
    assert found.tokens.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 1, "radius": 1.0}, "n must be an integer of at least 2"),
        ({"n": 4, "radius": 0.0}, "radius must be positive and finite, got 0"),
        ({"n": 4, "radius": float("inf")}, "radius must be positive and finite, got inf"),
        ({"n": 4}, "give either radius"),
        ({"n": 4, "radius": 1.0, "restarts": 0}, "restarts must be at least 1, got 0"),
        ({"n": 4, "radius": 1.0, "steps": 0}, "steps must be at least 1, got 0"),
        ({"n": 4, "radius": 1.0, "tolerance": 0.0}, "tolerance must lie strictly between 0 and 1"),
        ({"n": 4, "radius": 1.0, "dtype": torch.float16}, "dtype must be float32 or float64"),
        ({"n": 4, "radius": 1.0, "starts": torch.ones(3, 6)}, r"starts must have shape \(4, 6\)"),
        ({"n": 4, "radius": 1.0, "starts": torch.full((4, 6), float("nan"))}, "NaN"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        maximise(cases.layer(), **arguments)


def adapted_to(seed, n, d):
    """Uniform averaging, whose Jacobian is the same everywhere, with values chosen after the start vector of a seed.

    σ = ‖W_V‖ = 1.5 in a direction that is at right angles to what the mean of that vector's tokens shows of it.
    """
    mean = random_direction(n * d, seed, torch.zeros(0, dtype=torch.float64)).reshape(n, d).sum(0)
    drawn = cases.random(d, d, seed=3)
    hidden = drawn[:, :1] - mean[:, None] * (mean @ drawn[:, :1]) / (mean @ mean)
    basis = torch.linalg.qr(torch.cat([hidden, mean[:, None] + 0.2 * drawn[:, 1:2], drawn[:, 2:]], 1)).Q
    gains = torch.tensor([1.5, 1.0, *torch.linspace(0.2, 0.01, d - 2).tolist()], dtype=torch.float64)
    W = torch.eye(d, dtype=torch.float64)
    return lipscope.Attention(0 * W, W, (basis * gains) @ basis.mT)


def test_what_a_search_found_is_measured_with_a_start_vector_it_has_not_seen():
    n = d = 16
    layer = adapted_to(0, n, d)
    deceived = lipscope.local_lipschitz(layer, cases.random(n, d, seed=1), solver=lipscope.GolubKahan(), certificate=False)
    assert deceived.upper < 1.01
    found, again = (maximise(layer, n, radius=1.0, restarts=4, steps=2) for _ in range(2))
    assert float(found.ends.max()) < 1.01  # the search itself saw nothing
    for one in (found, again):
        assert one.sigma.lower <= 1.5 <= one.sigma.upper
    assert (
        found.start_seed == again.start_seed != maximise(adapted_to(1, n, d), n, radius=1.0, restarts=4, steps=2).start_seed
    )
    repeated = lipscope.local_lipschitz(layer, found.tokens, solver=lipscope.Auto(seed=found.start_seed), certificate=True)
    assert (repeated.lower, repeated.upper) == (found.sigma.lower, found.sigma.upper)
    (worst,) = (row for row in growth(layer, [n], radius=1.0, method="ascend", restarts=4, steps=2).to_rows()
                if row["source"] == "ascent")  # fmt: skip
    assert worst["start_seed"] > 0
    assert worst["lower"] <= 1.5 <= worst["upper"]
