"""The theorems for n → ∞: searches for counter-examples, and measures that attain the lower bounds."""

import itertools
import math

import numpy as np
import pytest
import torch

import lipscope
from bound_cases import jacobian
from lipscope.bounds import pairs, sets
from lipscope.bounds.constants import Constants
from lipscope.bounds.pairs import PlainHead, lower_meanfield
from lipscope.masks import as_mask
from lipscope.studies.mean_field import MeanFieldAttention, Measure, local_constant
from lipscope.studies.mean_field.attention import mean_field_operator
from lipscope.studies.mean_field.study import set_bound
from lipscope.studies.worst_case import grouped_sigma, maximise
from measure_pairs import ascend, pair_ratio

ONE = torch.ones(1, 1, dtype=torch.float64)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(G, *shape):
    return torch.randn(*shape, generator=G, dtype=torch.float64)


def plain_layer(A, V, mask=None):
    return lipscope.Attention(A, torch.eye(len(A), dtype=torch.float64), V, scale=1.0, mask=mask)


def largest_norm(allowed, h, starts, steps=40):
    """Ascent on ‖P‖₂ over scores in [−h, h]."""
    best = 0.0
    for start in starts:
        free = start.clone().requires_grad_()
        optimiser = torch.optim.Adam([free], lr=0.1)
        for _ in range(steps):
            P = torch.softmax((h * torch.tanh(free)).masked_fill(~allowed, -math.inf), -1)
            norm = torch.linalg.matrix_norm(P, 2)
            best = max(best, norm.item())
            optimiser.zero_grad()
            (-norm).backward()
            optimiser.step()
    return best


@pytest.mark.parametrize("n", [4, 30])
def test_no_causal_matrix_has_a_norm_above_twice_the_root_of_its_range(n):
    """‖P‖₂ ≤ 2e^h for the causal mask, also with a prefix that all see; the ascent comes near for flat scores only."""
    G, reached = generator(n), 0.0
    for name in ("causal", f"prefix:{n // 3}"):
        allowed = as_mask(name).allowed(n)[0, 0]
        for h in (0.01, 0.5, 2.0):
            first = torch.zeros(n, n, dtype=torch.float64)
            first[:, : max(1, n // 8)] = 2.0
            found = largest_norm(allowed, h, [first, normal(G, n, n), -first])
            assert found <= 2 * math.exp(h)
            reached = max(reached, found / (2 * math.exp(h)))
    assert reached > 0.5


def test_other_norms_of_a_causal_matrix():
    """‖P‖_p ≤ p'e^{2h/p}: random scores, and powers j^{−s}, which are nearly extremal for Hardy's inequality."""
    n, G = 300, generator(0)
    lower = torch.ones(n, n, dtype=torch.bool).tril()
    places = torch.arange(1, n + 1, dtype=torch.float64)
    for p in (1.2, 1.5, 2.0, 3.0, 8.0):
        for h in (0.0, 0.4, 1.5):
            for scores in (2 * torch.rand(n, n, generator=G, dtype=torch.float64) - 1, 2.0 * (places <= 9).double() - 1):
                P = torch.softmax((h * scores).expand(n, n).masked_fill(~lower, -math.inf), -1)
                for f in (places ** (-1 / p), (places <= 9).double(), normal(G, n).abs()):
                    gain = float((P @ f).norm(p=p) / f.norm(p=p))
                    assert gain <= p / (p - 1) * math.exp(2 * h / p)


@pytest.mark.parametrize("seed", range(3))
def test_ascent_stays_below_the_constant_for_every_n(seed):
    G = generator(seed)
    d, n = 1 + seed, 5 + 2 * seed
    layer = plain_layer(normal(G, d, d), normal(G, d, d), "causal")
    for R in (0.3, 0.8):
        found = maximise(layer, n, radius=R, restarts=2, steps=30, seed=seed)
        assert found.sigma.lower <= sets.refined_masked(layer, R).value
        assert sets.refined_masked(layer, R, n).value <= sets.refined_masked(layer, R).value


def causal_terms(a):
    """Upper and lower causal constants for A = −γ and V = 1, a = γR², and both for no mask."""
    upper, unmasked = (f(Constants.of_norms(1.0, a), 1.0).value for f in (sets.refined_masked, sets.refined_unmasked))
    closed = math.exp(a) * math.sqrt(1 + 2 * a + 4 / 3 * a * a)
    return upper, closed, unmasked


@pytest.mark.parametrize("a", [0.0, 1e-3, 0.03, 0.2, 0.37, 0.6, 1.0, 1.7, 3.0, 5.0, 9.0, 20.0, 60.0, 300.0])
def test_causal_constants_are_matched_and_above_the_unmasked_ones(a):
    upper, closed, unmasked = causal_terms(a)
    assert upper <= 2 ** (2 / 3) * math.sqrt(3) * closed * (1 + 1e-12)
    assert math.hypot(1, closed) > unmasked
    lower = lower_meanfield(PlainHead(-a * ONE, ONE, causal=True), 1.0).value
    full = lower_meanfield(PlainHead(-a * ONE, ONE), 1.0).value
    assert lower >= max(math.hypot(1, closed), 2 * full) * (1 - 1e-12)
    assert upper / 2.53 <= lower <= upper * (1 + 1e-12)
    assert lower > unmasked >= full * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_light_group_first_tends_to_the_closed_form(seed):
    """Groups of n tokens under the causal mask: σ itself at short n, the sum of their formula at long n, any A and V."""
    G = generator(seed)
    d = 1 + seed % 3
    A, V = normal(G, d, d), normal(G, d, d)
    u, w = pairs.best_pair(A, 0.9)
    S, E = torch.outer(V @ (u - w), A @ w), float((u - w) @ A @ w)
    gram = math.exp(E) * (V.T @ V + (V.T @ S + S.T @ V) / 2 + S.T @ S / 3)
    limit = math.sqrt(float(torch.linalg.eigvalsh(gram)[-1]))
    values = [pairs.causal_groups(A, V, u, w, n, m) for n, m in ((10**3, 10), (10**5, 100), (3 * 10**6, 300))]
    assert values[0] < values[1] < values[2] < limit
    assert values[2] > 0.99 * limit
    # σ at sixty tokens: the six of the group itself move too, and add VᵀV.
    X, m = pairs.tokens(u, w, 60, 6), 6
    J = jacobian(plain_layer(A, V, "causal"), X)[:, :, :m].sum(2).reshape(-1, d) / math.sqrt(m)
    rest = pairs.causal_groups(A, V, u, w, 60, m)
    assert float(torch.linalg.matrix_norm(J[m * d :], 2)) == pytest.approx(rest, rel=1e-10)
    assert torch.allclose(J[: m * d].T @ J[: m * d], V.T @ V, atol=1e-10)


def copies(mu, count, ratio):
    """The same cloud again and again at later and later positions, ``ratio`` times as heavy each time."""
    masses = ratio ** torch.arange(count, dtype=torch.float64)
    weights = (masses[:, None] * mu.weights).flatten()
    positions = torch.arange(1, count + 1, dtype=torch.float64) / count
    return Measure(mu.points.repeat(count, 1), weights / weights.sum(), positions.repeat_interleave(mu.size))


@pytest.mark.parametrize("seed", range(4))
def test_copies_of_a_cloud_double_what_it_does_without_a_mask(seed):
    """J = K + B without a mask; the causal J of the copies is C ⊗ K + I ⊗ B with C of norm → 2: it nears ‖2K + B‖."""
    G = generator(seed)
    d = 1 + seed % 2
    A, V = normal(G, d, d) - torch.eye(d, dtype=torch.float64), normal(G, d, d)
    head = PlainHead(A, V)
    u, w = pairs.best_pair(A, 1.0)
    light = 1 / (1 + 2 * math.exp(float((u - w) @ A @ w)))
    mu = Measure(torch.stack([u, w]), [light, 1 - light])
    full, causal = (MeanFieldAttention(plain_layer(A, V, mask)) for mask in (None, "causal"))
    sigma = local_constant(full, mu).estimate
    # B is what an atom does that falls apart: the parts move against each other.
    J = mean_field_operator(full, mu.split()).to_dense()[0].reshape(2, 2, d, 2, 2, d)
    B = (J[:, 0, :, :, 0] - J[:, 0, :, :, 1]).reshape(2 * d, 2 * d)
    whole = mean_field_operator(full, mu).to_dense()[0]
    doubled = float(torch.linalg.matrix_norm(2 * whole - B, 2))
    values = [local_constant(causal, copies(mu, count, r)).estimate for count, r in ((1, 2.0), (12, 1.5), (250, 1.15))]
    assert values[0] == pytest.approx(sigma)
    assert values[0] < values[1] < values[2]
    assert 0.94 * doubled < values[2] < sets.refined_masked(causal.constants, 1.0).value
    assert doubled >= 2 * sigma - float(torch.linalg.matrix_norm(B, 2)) - 1e-12
    assert 2 * head.limit(u, w) <= PlainHead(A, V, causal=True).limit(u, w) * (1 + 1e-12)


def test_the_share_of_the_keys_stays_below_its_hoelder_bound():
    """‖(P_ij|v_j − o_i|)_ij‖₂ ≤ 2^{5/3}e^h for values in [−1, 1]: ascent over scores and values."""
    n, G = 30, generator(3)
    lower, worst = torch.ones(n, n, dtype=torch.bool).tril(), 0.0
    for h in (0.1, 0.7, 1.5):
        for _ in range(3):
            scores, values = normal(G, n, n).requires_grad_(), normal(G, n).requires_grad_()
            optimiser = torch.optim.Adam([scores, values], lr=0.1)
            for _ in range(60):
                P = torch.softmax((h * torch.tanh(scores)).masked_fill(~lower, -math.inf), -1)
                v = torch.tanh(values)
                norm = torch.linalg.matrix_norm(P * (v - (P @ v)[:, None]).abs(), 2)
                worst = max(worst, norm.item() / math.exp(h))
                optimiser.zero_grad()
                (-norm).backward()
                optimiser.step()
    assert 0.5 < worst <= 2 ** (5 / 3)


@pytest.mark.parametrize("p", [1.0, 1.3, 2.0, 3.5, 20.0])
@pytest.mark.parametrize("mask", [None, "causal"])
def test_ratios_of_every_distance_stay_below_the_bound(p, mask):
    """Random weighted pairs, some of them ascended, on small heads."""
    largest = 0.0
    for seed in range(8):
        G = generator(seed)
        d, n = 1 + seed % 3, 2 + seed % 4
        F = MeanFieldAttention(plain_layer((0.05, 1.0)[seed % 2] * normal(G, d, d), normal(G, d, d), mask))
        X, step = normal(G, n, d) / 2, normal(G, n, d) * 10.0 ** (-1 - seed % 3)
        weights = torch.rand(n, generator=G, dtype=torch.float64) ** 3 + 1e-2
        places = None if mask is None else torch.arange(1, n + 1, dtype=torch.float64) / n
        mu = Measure(X, weights / weights.sum(), places)
        nu = mu.push(X + step)
        R = max(mu.radius, nu.radius)
        bound = set_bound(F, R, p)
        assert math.isinf(bound) == (mask is not None and p == 1)
        found = ascend(F, mu, nu, R, p, steps=15) if seed % 3 == 0 else pair_ratio(F, mu, nu, p)
        assert found.ratio <= bound * (1 + 1e-9)
        largest = max(largest, found.ratio / bound)
    assert largest > 0.2 or math.isinf(bound)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_two_diracs_attain_the_lower_bound_in_every_distance(p, seed):
    G = generator(seed)
    d = 1 + seed
    A, V = normal(G, d, d), normal(G, d, d)
    F = MeanFieldAttention(plain_layer(A, V))
    u, w = pairs.best_pair(A, 0.8)
    E, S = float((u - w) @ A @ w), torch.outer(V @ (u - w), A @ w)
    ratios, promises = [], []
    for q in (0.3, 0.6, 0.8, 0.999):
        light = 1 / (1 + math.exp(E) * q / (1 - q))
        mu = Measure(torch.stack([u, w]), [light, 1 - light])
        direction = torch.linalg.svd(V + q * S).Vh[0]
        nu = mu.push(mu.points - 1e-6 * torch.stack([direction, 0 * direction]))
        ratios.append(pair_ratio(F, mu, nu, p).ratio)
        promises.append(
            math.exp(E / p) * q ** (1 / p) * (1 - q) ** (1 - 1 / p) * float(torch.linalg.matrix_norm(V + q * S, 2))
        )
        assert ratios[-1] >= promises[-1] * (1 - 1e-4)
    assert max(ratios) <= set_bound(F, 0.8, p)
    assert max(promises) * (1 - 1e-3) <= PlainHead(A, V).limit(u, w, p)


@pytest.mark.parametrize("a", [1e-3, 0.1, 0.5, 1.0, 3.0, 10.0, 40.0])
def test_every_distance_is_matched_within_four(a):
    """Symmetric A with γ_min = −‖A‖ and V = I; for W_1 up to the last term."""
    norms, full, causal = Constants.of_norms(1.0, a), PlainHead(-a * ONE, ONE), PlainHead(-a * ONE, ONE, causal=True)
    for p in (1.0, 1.2, 1.6, 2.0, 2.7, 5.0, 50.0, math.inf):
        upper, lower = sets.refined_unmasked(norms, 1.0, p=p).value, lower_meanfield(full, 1.0, p=p).value
        assert 1 - 1e-12 <= upper / lower <= (2 if p == 2 else 4)
        if p > 1:
            upper, lower = sets.refined_masked(norms, 1.0, p=p).value, lower_meanfield(causal, 1.0, p=p).value
            assert 1 - 1e-12 <= upper / lower <= 5
    upper, lower = sets.refined_unmasked(norms, 1.0, p=1).value, lower_meanfield(full, 1.0, p=1).value
    assert lower == pytest.approx((1 + 2 * a) * math.exp(2 * a), rel=1e-12)
    assert upper == pytest.approx(lower + a, rel=1e-12)
    assert math.isinf(lower_meanfield(causal, 1.0, p=1).value)
    everywhere = sets.refined_masked(norms, 1.0, p=math.inf).value
    assert everywhere == pytest.approx(sets.block_inf_max_token(norms, 1.0).value)
    with pytest.raises(ValueError, match="p must be at least 1"):
        sets.refined_unmasked(norms, 1.0, p=0.5)


@pytest.mark.parametrize("p", [1.0, 1.2, 2.0, 4.0])
def test_several_heads_in_every_distance(p):
    """One head acts on one token, the other on all others: below p = 2 a root of squares is too little."""
    eye = torch.eye(2, dtype=torch.float64)
    q, v = torch.cat([0 * eye, 0.3 * eye]), torch.cat([eye, 0.02 * eye])
    layer = lipscope.Attention(q, torch.cat([eye, eye]), v, heads=2, scale=1.0)
    mu = Measure(torch.stack([0 * eye[0], eye[0], -eye[0]]), [1 / 2001, 1000 / 2001, 1000 / 2001])
    nu = mu.push(mu.points + 1e-6 * torch.stack([eye[0], 0 * eye[0], 0 * eye[0]]))
    ratio = pair_ratio(MeanFieldAttention(layer), mu, nu, p).ratio
    if p == 1:
        assert ratio == pytest.approx(1.00568, abs=1e-5)
    for bound in (sets.refined_unmasked(layer, 1.0, p=p), sets.castin2024_meanfield(layer, 1.0, p=p)):
        assert ratio <= bound.value
    assert ratio <= sets.refined_unmasked(layer, 1.0, 2001, p=p).value
    heads = [sets.refined_unmasked(layer.head(h), 1.0, p=p).value for h in (0, 1)]
    joined = sum(value ** min(p, 2.0) for value in heads) ** (1 / min(p, 2.0))
    assert sets.refined_unmasked(layer, 1.0, p=p).value == pytest.approx(joined, rel=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_independent_tokens_tend_to_the_derivative_at_their_law(seed):
    """Theorem 7 at laws of three points, where n tokens cost no more than three; the limit with code of its own."""
    G = generator(seed)
    A, V, x = normal(G, 2, 2), normal(G, 2, 2), normal(G, 3, 2)
    w = normal(G, 3).softmax(-1)
    P = torch.softmax(x @ A.mT @ x.mT + w.log(), -1)
    apart = (x @ V.mT)[None] - (P @ x @ V.mT)[:, None]
    K = torch.einsum("ij,ab->iajb", P, V) + torch.einsum("ij,ija,ib->iajb", P, apart, x @ A.mT)
    K = K * w.sqrt()[:, None, None, None] / w.sqrt()[None, None, :, None]
    B = torch.einsum("ij,ija,jb->iab", P, apart, x @ A)
    J = K.reshape(6, 6) + torch.block_diag(*B)
    limit = max(float(torch.linalg.matrix_norm(J, 2)), float(torch.linalg.matrix_norm(B, 2).max()))
    layer = plain_layer(A, V)
    assert local_constant(MeanFieldAttention(layer), Measure(x, w), splitting=True).estimate == pytest.approx(
        limit, rel=1e-9
    )
    n = 10**10
    drawn = np.random.default_rng(seed).multinomial(n, (w / w.sum()).numpy())
    assert grouped_sigma(layer, x, drawn.tolist()) == pytest.approx(limit, rel=1e-3)


def test_a_causal_sequence_never_becomes_smoother():
    """Theorem 8: σ of the first n tokens does not fall with n, whatever the tokens."""
    X, identity = 2 * normal(generator(0), 24, 2), torch.eye(2, dtype=torch.float64)
    layer = plain_layer(-identity, identity, "causal")
    values = [float(lipscope.local_lipschitz(layer, X[:n]).estimate) for n in range(1, 25)]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in itertools.pairwise(values))
