"""LayerNorm and RMSNorm: the map, its Jacobian, its local norm, the radius of its image, scope norm+attention."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipscope
from lipscope.attention.norms import LayerNorm, RMSNorm
from lipscope.bounds.sets import refined_masked, refined_unmasked


def norms(seed, d, eps=1e-5, *, flat=False):
    G = torch.Generator().manual_seed(seed)
    g = torch.ones(d, dtype=torch.float64) if flat else torch.randn(d, generator=G, dtype=torch.float64)
    return LayerNorm(g, torch.randn(d, generator=G, dtype=torch.float64), eps), RMSNorm(g, eps)


def tokens(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)


def test_the_maps_are_those_of_torch():
    layer_norm, rms_norm = norms(0, 6)
    x = tokens(0, 2, 3, 6)
    expected = torch.nn.functional.layer_norm(x, (6,), layer_norm.weight, layer_norm.bias, 1e-5)
    assert torch.allclose(layer_norm(x), expected, rtol=1e-12)
    expected = torch.nn.functional.rms_norm(x, (6,), rms_norm.weight, 1e-5)
    assert torch.allclose(rms_norm(x), expected, rtol=1e-12)
    module = torch.nn.LayerNorm(6).double()
    assert torch.allclose(LayerNorm.from_torch(module)(x), module(x), rtol=1e-12)


cases = (st.integers(0, 10**6), st.integers(1, 8), st.sampled_from((0.0, 1e-5, 1.0, 10.0)), st.booleans())


@settings(max_examples=80, deadline=None)
@given(*cases)
def test_jacobian_products_and_local_norm(seed, d, eps, flat):
    x = tokens(seed, 1, 3, d)
    for norm in norms(seed, d, eps, flat=flat):
        if d == 1 and norm.centred and eps == 0.0:
            continue
        at = norm.linearise(x)
        dense = torch.stack([torch.autograd.functional.jacobian(norm, token) for token in x[0]])
        u, w = tokens(seed + 5, 1, 3, d), tokens(seed + 6, 1, 3, d)
        assert torch.allclose(at.jvp(u)[0], torch.einsum("nij,nj->ni", dense, u[0]), rtol=1e-8, atol=1e-10)
        assert torch.allclose(at.vjp(w)[0], torch.einsum("nij,ni->nj", dense, w[0]), rtol=1e-8, atol=1e-10)
        exact = torch.linalg.matrix_norm(dense, 2)
        simple = float(norm.weight.abs().max()) / at.s[0, :, 0]
        excess = (at.local_norm()[0].square() - exact.square()) / simple.square()
        assert bool(((excess >= 9e-13) & (excess <= 1.1e-12)).all())
        assert bool((at.local_norm()[0] <= simple * (1 + 1e-9)).all())


@pytest.mark.parametrize("d", [2, 3, 5])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e3])
@pytest.mark.parametrize("gain", [1.0, 1e-7, 1e-9])
def test_the_local_norm_is_never_below_the_norm(d, scale, gain):
    """Also where the derivative nearly vanishes: in two dimensions it is ε/s³, and small gains leave little."""
    g = torch.tensor([1.0, 1.0, *[gain] * (d - 2)], dtype=torch.float64)
    for seed in range(3):
        x = scale * tokens(seed, d)
        for norm in (LayerNorm(g), RMSNorm(g)):
            found = norm.linearise(x[None, None])
            with mpmath.workdps(50):
                entries = [mpmath.mpf(value) for value in x.tolist()]
                about = [e - (sum(entries) / d if norm.centred else 0) for e in entries]
                s = mpmath.sqrt(sum(e**2 for e in about) / d + mpmath.mpf(norm.eps))
                rows = [[((i == j) - mpmath.mpf(norm.centred) / d - about[i] * about[j] / s**2 / d) * g[i].item() / s
                         for j in range(d)] for i in range(d)]  # fmt: skip
                exact = mpmath.svd_r(mpmath.matrix(rows), compute_uv=False)[0]
                assert exact <= found.local_norm().item() <= exact + 1.1e-6 / s


@settings(max_examples=60, deadline=None)
@given(*cases)
def test_image_radius_is_the_largest_norm(seed, d, eps, flat):
    for norm in norms(seed, d, eps, flat=flat):
        if eps == 0.0 and norm.centred:
            continue
        R = norm.image_radius()
        closed_form = math.sqrt(d) * float(norm.weight.abs().max())
        closed_form += 0.0 if norm.bias is None else float(norm.bias.norm())
        assert closed_form * (1 + 1e-12) >= R
        outputs = norm(1e3 * tokens(seed, 500, d))
        assert float(outputs.norm(dim=-1).max()) <= R * (1 + 1e-9)


def test_image_radius_is_attained():
    """g = (1, 3, 1), β = 0: the largest ‖g∘z‖ over mean-zero z of norm √3, found by brute force on the circle."""
    norm = LayerNorm(torch.tensor([1.0, 3.0, 1.0], dtype=torch.float64), eps=0.0)
    angle = torch.linspace(0, 2 * math.pi, 100_001, dtype=torch.float64)[:, None]
    first = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64) / math.sqrt(2)
    second = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64) / math.sqrt(6)
    brute = norm(angle.cos() * first + angle.sin() * second).norm(dim=-1).max()
    assert norm.image_radius() == pytest.approx(float(brute), rel=1e-6)
    assert norm.image_radius() < math.sqrt(3) * 3


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.sampled_from((None, "causal")), st.booleans())
def test_norm_and_attention_composed(seed, n, mask, centred):
    d = 4
    G = torch.Generator().manual_seed(seed)
    W = [torch.randn(d, d, generator=G, dtype=torch.float64) for _ in range(4)]
    layer = lipscope.Attention(*W, heads=2, mask=mask)
    norm = norms(seed, d)[0 if centred else 1]
    U = tokens(seed, n, d)
    result = lipscope.local_lipschitz(
        layer, U, scope="norm+attention", norm=norm, solver=lipscope.Dense(vectors=True), certificate=True
    )
    J = torch.autograd.functional.jacobian(lambda u: layer(norm(u)), U).reshape(n * d, n * d)
    sigma = float(torch.linalg.matrix_norm(J, 2))
    assert result.estimate == pytest.approx(sigma, rel=1e-8)
    assert sigma <= result.certified * (1 + 1e-9)
    # The radius of the normalisation makes the set bound a global constant of attention behind it.
    attention = lipscope.local_lipschitz(layer, norm(U), solver=lipscope.Dense()).estimate
    bound = (refined_masked if mask else refined_unmasked)(layer, norm.image_radius(), n).value
    assert attention <= bound * (1 + 1e-9)
    assert sigma <= bound * float(norm.linearise(U[None]).local_norm().max()) * (1 + 1e-9)


def test_batches_and_iterative_solver():
    d = 12
    W = [tokens(s, d, d) for s in range(4)]
    layer, norm = lipscope.Attention(*W, heads=3, mask="causal"), norms(3, d)[0]
    U = tokens(9, 3, 15, d)
    together = lipscope.local_lipschitz(layer, U, scope="norm+attention", norm=norm, solver=lipscope.GolubKahan(rtol=1e-8))
    for b in range(3):
        alone = lipscope.local_lipschitz(layer, U[b], scope="norm+attention", norm=norm, solver=lipscope.Dense())
        assert float(together.estimate[b]) == pytest.approx(alone.estimate, rel=1e-6)


def test_bad_arguments_are_refused():
    W = torch.eye(3)
    layer = lipscope.Attention(W, W, W)
    with pytest.raises(ValueError, match="needs norm"):
        lipscope.local_lipschitz(layer, torch.ones(2, 3), scope="norm+attention")
    with pytest.raises(ValueError, match="belongs to scope"):
        lipscope.local_lipschitz(layer, torch.ones(2, 3), norm=RMSNorm(torch.ones(3)))
    with pytest.raises(ValueError, match="width 3"):
        RMSNorm(torch.ones(4))(torch.ones(2, 3))
    with pytest.raises(ValueError, match="negative"):
        RMSNorm(torch.ones(4), eps=-1.0)
    with pytest.raises(ValueError, match="bias has shape"):
        LayerNorm(torch.ones(4), torch.ones(3))
