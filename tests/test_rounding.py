"""Ends of intervals and certificates hold where offsets cancel and scales are extreme: against σ in a hundred digits."""

import math
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from mpmath import mpf

import lipscope
import rounding_cases
from lipscope.attention.norms import LayerNorm
from lipscope.attention.tiled import Tiling, using_tiling
from lipscope.attention.variants import CosineAttention, QKNormAttention
from lipscope.bounds.certificates import certified_upper, local_bounds
from lipscope.bounds.softmax_jacobian import yudin2025_improved, yudin2025_published
from lipscope.measure.sigma import certificate_at
from lipscope.spectral.result import Status
from lipscope.spectral.solvers import Auto, Dense, GolubKahan

TILES = Tiling(tile=(2, 2), dense=-1, keep=0)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def small(dtype=torch.float64, seed=0, **options):
    """Two heads of width 2 on tokens of width 3."""
    q, k, v, out = (normal(4, 3, seed=seed + s) for s in range(4))
    tensors = {name: t.to(dtype) if isinstance(t, torch.Tensor) else t for name, t in options.items()}
    return lipscope.Attention(*(t.to(dtype) for t in (q, k, v)), out=out.mT.to(dtype), heads=2, **tensors)


def measured(case, solver=None, **options):
    return lipscope.local_lipschitz(case.layer, case.X, scope=case.scope, norm=case.norm, solver=solver, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_intervals_hold_whatever_cancels(dtype):
    """Random masks, biases, sinks, soft-caps, rotations, norms, offsets and scales; dense, iterative and in tiles."""
    refused = 0
    for seed in range(20):
        case = rounding_cases.draw(seed, dtype)
        truth = rounding_cases.true_sigma(case.layer, case.X, case.norm)
        try:
            found = [measured(case, solver, certificate=False) for solver in (Auto(), GolubKahan())]
            with using_tiling(TILES):
                found.append(measured(case, Dense(), certificate=False))
        except FloatingPointError:
            refused += 1
            continue
        for one in found:
            assert mpf(one.lower) <= truth <= mpf(one.upper), (case.about, one.solver)
    assert refused <= 3


@pytest.mark.parametrize(
    ("offset", "dtype"), [(1e8, torch.float64), (1e16, torch.float64), (1e3, torch.float32), (1e6, torch.float32)], ids=str
)
def test_what_all_values_and_all_keys_share_is_left_out(offset, dtype):
    """Without sinks J does not depend on b_V, without soft-cap and rotations on b_K: not one digit of σ does."""
    X = normal(5, 3, seed=9, dtype=dtype)
    plain = small(dtype)
    shifted = replace(plain, v_bias=(offset * normal(4, seed=5)).to(dtype), k_bias=(offset * normal(4, seed=6)).to(dtype))
    assert lipscope.local_lipschitz(shifted, X).estimate == lipscope.local_lipschitz(plain, X).estimate
    assert torch.equal(lipscope.influence(shifted, X), lipscope.influence(plain, X))


def test_an_offset_of_all_tokens_costs_no_digits_of_values():
    """x_j = c + small: with W_Q = 0 attention averages and σ = ‖W_V‖/√n·…, and value differences are those of the tokens."""
    q, k, v = normal(3, 2, 2, seed=3)
    X = torch.tensor([[1.0, 2.0], [1.5, 2.5], [1.25, 3.0]], dtype=torch.float64) + 2.0**40
    layer = lipscope.Attention(q * 2.0**-40, k, v)
    found = lipscope.local_lipschitz(layer, X)
    truth = rounding_cases.true_sigma(layer, X)
    assert mpf(found.lower) <= truth <= mpf(found.upper)
    assert found.upper / found.lower < 1 + 1e-12


def test_a_saturated_sink_leaves_its_share_of_the_value_bias():
    """With a sink v_j − o_i = (v_j − v_m) − … + π b: π = 1 − ΣP has no digits as a difference when it is small."""
    layer = small(sinks=torch.tensor([-40.0, -38.0]), v_bias=normal(4, seed=5))
    layer = replace(layer, v=1e-20 * layer.v)
    X = normal(4, 3, seed=8)
    for tiling in (None, TILES):
        with using_tiling(tiling or Tiling()):
            found = lipscope.local_lipschitz(layer, X)
        truth = rounding_cases.true_sigma(layer, X)
        assert mpf(found.lower) <= truth <= mpf(found.upper)
        assert found.upper / found.lower < 1 + 1e-12


@pytest.mark.parametrize("offset", [1e3, 1e5])
def test_layer_norm_of_tokens_far_from_zero(offset):
    """The mean of entries around 1,000 is off by 1e-4 of their spread in float32; taken away twice it leaves all digits."""
    for seed in range(5):
        layer, norm = (
            small(torch.float32, seed),
            LayerNorm(normal(3, seed=seed + 7).float(), 100 * normal(3, seed=seed).float()),
        )
        X = (normal(4, 3, seed=seed) + offset).float()
        found = lipscope.local_lipschitz(layer, X, scope="norm+attention", norm=norm, certificate=False)
        truth = rounding_cases.true_sigma(layer, X, norm)
        assert mpf(found.lower) <= truth <= mpf(found.upper)
        assert abs(found.estimate / float(truth) - 1) < 1e-4


def test_a_norm_that_takes_everything_out_leaves_an_interval_from_zero():
    """Tokens of width 2 behind LayerNorm hardly move their output: J is rounding error, and the interval says so."""
    layer = lipscope.Attention(*normal(3, 2, 2, seed=1))
    norm, X = LayerNorm(torch.ones(2, dtype=torch.float64), eps=0.0), normal(4, 2, seed=2)
    found = lipscope.local_lipschitz(layer, X, scope="norm+attention", norm=norm)
    assert found.lower == 0 <= rounding_cases.true_sigma(layer, X, norm) <= found.upper < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", [Auto(), GolubKahan()])
def test_a_value_without_a_digit_is_not_called_converged(solver, dtype):
    # LayerNorm of two coordinates without ε is a sign: σ = 0, and what is measured is rounding.
    layer = lipscope.Attention(*(normal(2, 2, seed=seed, dtype=dtype) for seed in range(3)))
    norm = LayerNorm(torch.ones(2, dtype=dtype), None, 0.0)
    X = normal(3, 2, seed=3, dtype=dtype)
    found = lipscope.local_lipschitz(layer, X, scope="norm+attention", norm=norm, solver=solver, certificate=False)
    assert found.lower == 0.0 < found.upper
    assert found.status is Status.ESTIMATED
    assert not found.converged
    assert "no correct digit" in found.message
    # With an ε it has its digits.
    wide = LayerNorm(norm.weight, None, 1.0)
    assert lipscope.local_lipschitz(layer, X, scope="norm+attention", norm=wide, solver=solver, certificate=False).converged


@pytest.mark.parametrize("solver", [Dense(), GolubKahan()])
@pytest.mark.parametrize("seed", [54, 121, 221])
def test_heads_that_vanish_beside_others_have_an_interval(seed, solver):
    case = rounding_cases.draw(seed, torch.float64)
    found = lipscope.local_lipschitz(case.layer, case.X, scope="head", solver=solver, certificate=False)
    truths = [rounding_cases.true_sigma(case.layer, case.X, head=head) for head in range(case.layer.heads)]
    assert min(truths) < 1e-300
    for truth, lower, upper in zip(truths, found.lower, found.upper, strict=True):
        assert mpf(float(lower)) <= truth <= mpf(float(upper))
        assert float(upper) <= 1.01 * float(truth) + 1e-280


def test_norms_survive_any_scale_of_tokens():
    for dtype, scale in ((torch.float32, 1e-25), (torch.float32, 1e30), (torch.float64, 1e-170), (torch.float64, 1e200)):
        X, norm = (scale * normal(3, 4, seed=2)).to(dtype), LayerNorm(torch.ones(4, dtype=dtype), eps=0.0)
        expected = LayerNorm(torch.ones(4, dtype=torch.float64), eps=0.0)(normal(3, 4, seed=2))
        assert torch.allclose(norm(X).double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-12)
        assert math.isfinite(float(norm.linearise(X).s.sum()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_certificates_hold_whatever_cancels(dtype):
    """All rows at once and in strips, of the layer and of its heads."""
    for seed in range(24) if dtype == torch.float64 else range(20, 44):
        case = rounding_cases.draw(seed, dtype)
        truth = rounding_cases.true_sigma(case.layer, case.X, case.norm)
        for memory in (None, 1):
            (bound,) = certificate_at(case.layer, case.X[None], case.scope, case.norm, memory)[0].tolist()
            assert truth <= mpf(bound), (case.about, memory)
        if case.norm is None and seed < 32:
            for h, bound in enumerate(certified_upper(case.layer, case.X[None], "head")[0].tolist()):
                assert rounding_cases.true_sigma(case.layer, case.X, head=h) <= mpf(bound), case.about


@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e-90, 1e90, 1e160, 1e250])
def test_certificates_and_intervals_scale_with_the_values(scale):
    """Squares and fourth powers of the values leave the range of floats long before σ does."""
    layer, X = small(q_bias=normal(4, seed=7)), normal(4, 3, seed=8)
    power = 2.0 ** round(math.log2(scale))
    scaled = replace(layer, v=power * layer.v)
    for scope in ("attention", "head"):
        here, there = (lipscope.local_lipschitz(one, X, scope=scope, certificate=True) for one in (layer, scaled))
        for name in ("lower", "estimate", "upper", "certified"):
            expected = torch.as_tensor(getattr(here, name)) * power
            assert torch.allclose(torch.as_tensor(getattr(there, name)), expected, rtol=1e-15, atol=0.0), name
    for one, other in zip(local_bounds(layer, X), local_bounds(scaled, X), strict=True):
        assert other.value == pytest.approx(power * one.value, rel=1e-15, abs=0.0), one.name
    for bound in (yudin2025_published, yudin2025_improved):
        assert bound(scaled, X).value == pytest.approx(power * bound(layer, X).value, rel=1e-12, abs=0.0)


def test_float32_layers_may_have_any_unit():
    """W_O W_V below the least float32, tokens and weights far from one: σ is as if they were near it."""
    layer, X = small(torch.float32), normal(4, 3, seed=8).float()
    units = replace(layer, q=2.0**-70 * layer.q, k=2.0**-70 * layer.k, v=2.0**-90 * layer.v, out=2.0**-60 * layer.out)
    units = replace(units, scale=layer.tau * 2.0**30)
    here, there = lipscope.local_lipschitz(layer, X), lipscope.local_lipschitz(units, 2.0**55 * X)
    assert there.estimate == here.estimate * 2.0**-150
    assert (there.lower, there.upper) == (here.lower * 2.0**-150, here.upper * 2.0**-150)


def test_scores_without_digits_have_no_bound():
    """W_Q = 0 leaves scores b_Q·k_j, whose rounding counts although ‖W_Q‖ = 0; rotations keep b_K in them."""
    q, k, v = normal(3, 2, 2, seed=3)
    X = normal(4, 2, seed=4)
    turned = lipscope.Rotary.from_base(2, n=4, dtype=torch.float64)
    layer = lipscope.Attention(0 * q, k, v, q_bias=1e8 * q[0], k_bias=1e8 * k[0], rotary=turned)
    assert float(certified_upper(layer, X[None])) == math.inf
    assert yudin2025_improved(layer, X).value == math.inf
    plain = replace(layer, rotary=None, q=1e15 * q)
    assert yudin2025_published(plain, X).value == math.inf
    with pytest.raises(FloatingPointError, match="leave no correct digits"):
        lipscope.local_lipschitz(layer, X)


def test_an_output_that_kills_the_values_keeps_its_error():
    """W_O W_V = 0 up to the last digits: the bound covers what rounding left of the product, and σ is no larger."""
    a, b = normal(2, 3, seed=1)
    orthogonal = b - a * (a @ b) / (a @ a)
    layer = lipscope.Attention(*normal(2, 3, 3, seed=2), torch.outer(orthogonal, b), out=torch.outer(b, a))
    X = normal(4, 3, seed=5)
    found = lipscope.local_lipschitz(layer, X, certificate=True)
    truth = rounding_cases.true_sigma(layer, X)
    assert mpf(found.lower) <= truth <= mpf(found.upper) < 1e-12
    assert truth <= mpf(found.certified) < 1e-11


@pytest.mark.parametrize("mask", [None, "causal", "window:2"])
@pytest.mark.parametrize(
    "powers",
    [{"v": 530}, {"v": -565}, {"out": 530}, {"out": -565}, {"q": 560, "k": -560}, {"x": 300}, {"x": -300}],
    ids=str,
)
def test_bounds_do_not_depend_on_units(powers, mask):
    """In other units by powers of two every bound is the same number times that of σ, though its square is no float."""
    tokens, unit = powers.get("x", 0), 2.0 ** (powers.get("v", 0) + powers.get("out", 0))
    W = [normal(3, 3, seed=s) for s in range(4)]
    for layer in (small(mask=mask), lipscope.Attention(*W, mask=mask)):
        X = normal(4, 3, seed=9)
        given = {"q": -tokens, "k": -tokens} | {name: p for name, p in powers.items() if name != "x"}
        other = replace(layer, **{name: getattr(layer, name) * 2.0**p for name, p in given.items()})
        usual, found = lipscope.bounds.table(layer, X), lipscope.bounds.table(other, X * 2.0**tokens)
        # A limit that needs unique largest scores may say nothing, and a search may end elsewhere.
        for bound in (b for b in usual.bounds if b.name not in ("large_radius.limit", "lower.measured")):
            assert found[bound.name].value == pytest.approx(bound.value * unit, rel=1e-9, abs=0), bound.name
        assert found["lower.measured"].value >= 0.1 * unit * usual["lower.measured"].value
        assert found.sigma.lower <= usual.sigma.estimate * unit <= found.sigma.upper


def test_tokens_that_are_zero_have_bounds():
    """The ball of radius 0 is one input: what says nothing of it does not take the others along."""
    assert lipscope.bounds.table(small(), torch.zeros(4, 3, dtype=torch.float64))["refined.unmasked"].value > 0


@pytest.mark.parametrize("kind", [CosineAttention, QKNormAttention])
def test_normalised_features_know_what_cancels_in_them(kind):
    """Of dz − ẑ(ẑ·dz) little is left where |z|² ≫ ε, in one dimension almost nothing: float32 holds the σ of float64."""
    for seed in range(24):
        q, k, v = (10.0 * normal(2, 2, seed=4 * seed + s, dtype=torch.float32) for s in range(3))
        layer = kind(q=q, k=k, v=v / 10, out=normal(2, 2, seed=4 * seed + 3, dtype=torch.float32), heads=2)
        X = normal(6, 3, 2, seed=seed, dtype=torch.float32)
        X[1] = X[1, :1] + 0.01 * X[1]
        found = lipscope.local_lipschitz(layer, X, dtype=torch.float32)
        truth = lipscope.local_lipschitz(layer.to(torch.float64), X.double()).estimate
        assert bool(((found.lower <= truth) & (truth <= found.upper)).all()), seed
        assert float((found.upper / truth).median()) < 1.01


@pytest.mark.parametrize("case", ["matrices", "multiples", "layer norm"])
def test_what_cancels_inside_a_differentiated_map_is_allowed_for(case):
    """Linear parts do not feel the last digits of the input, and lose theirs all the same."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(64, 64, dtype=torch.float64, generator=generator)
    A, B = W.float(), (W + 0.01 * torch.linalg.qr(W).Q).float()
    X = torch.randn(8, 64, generator=generator)
    maps = {
        "matrices": lambda x: x @ B.to(x).T - x @ A.to(x).T,
        "multiples": lambda x: 1e5 * x - (1e5 - 1) * x,
        "layer norm": lambda x: torch.nn.functional.layer_norm(x + 1e4, (64,)),
    }
    exact = lipscope.local_lipschitz(maps[case], X.double(), solver=lipscope.GolubKahan(rtol=1e-9)).estimate
    found = lipscope.local_lipschitz(maps[case], X)
    assert found.lower <= exact <= found.upper
    assert found.rounding < 0.05


def cancelling_forwards(x, b=1.2345678e4):
    """x₀ − x₁ thrice: J·u adds and takes away b times its mean part, Jᵀ·g has it cancel exactly. σ = √6."""
    common = b * (x[..., 0, :] + x[..., 1, :])
    d = (x[..., 0, :] + common) - (x[..., 1, :] + common)
    return torch.stack([d, -d, d], -2)


def cancelling_backwards(x, b=1.2345678e4):
    more, less = b * x, -b * x
    return torch.stack([x[..., 0, :] + (more + less).sum(-2), (more + less)[..., 1, :] - x[..., 1, :]], -2)


def far_from_zero(x, b=1e4):
    """x + b has few digits of x, and the last digits of x are not among them."""
    z = x + b
    return (z - z.mean(-1, keepdim=True)) / (z.std(-1, keepdim=True) + 1)


@pytest.mark.parametrize("function", [cancelling_forwards, cancelling_backwards, far_from_zero])
@pytest.mark.parametrize("solver", [Auto(), Dense(), GolubKahan(interval=1e-3)], ids=lambda s: type(s).__name__)
def test_the_allowance_of_a_differentiated_map_sees_both_products_and_every_number(function, solver):
    for seed in range(4):
        X = normal(1, 2, 100, seed=seed, dtype=torch.float32)
        exact = lipscope.local_lipschitz(function, X.double(), solver=Dense()).estimate
        found = lipscope.local_lipschitz(function, X, solver=solver)
        assert found.lower <= exact <= found.upper
        assert float(found.rounding) < 0.09


@pytest.mark.parametrize("function", [torch.tanh, torch.sigmoid, lambda x: torch.softmax(x, -1)])
def test_the_slope_of_a_saturated_function_has_few_digits(function):
    """The way back uses the result that was kept: of y = tanh(x) it is 1 − y², which is rounded like 1 − y."""
    for far in torch.linspace(2, 7, 41).tolist():
        X = torch.tensor([[[far, -far]]])
        exact = lipscope.local_lipschitz(function, X.double(), solver=Dense()).estimate
        try:
            found = lipscope.local_lipschitz(function, X)
        except FloatingPointError:
            assert far > 4
        else:
            assert found.lower <= exact <= found.upper, far


@pytest.mark.parametrize("seed", [90, 97, 202])
def test_one_draw_of_last_digits_is_not_trusted(seed):
    """Where attention looks at one token, few numbers count, and each may keep its digits by chance."""
    Q, K, V = (normal(4, 4, seed=3 * seed + s, dtype=torch.float32) for s in range(3))

    def attention(x):
        x = torch.nn.functional.layer_norm(x + 1000, (4,), eps=1e-3)
        return torch.softmax(25 * (x @ Q.to(x)) @ (x @ K.to(x)).mT, -1) @ x @ V.to(x)

    X = normal(1, 8, 4, seed=seed, dtype=torch.float32)
    exact = lipscope.local_lipschitz(attention, X.double(), solver=Dense()).estimate
    try:
        found = lipscope.local_lipschitz(attention, X, solver=Dense())
    except FloatingPointError:  # no digits: so it is, the estimate is off by more than a hundredth
        return
    assert found.lower <= exact <= found.upper


MIXED = normal(4, 4, seed=5)


def sum_of_a_linear_layer(x, b=1e4):
    """Of a batch of tokens it is a view of the sum that was rounded."""
    return torch.sin(3 * (torch.nn.functional.linear(x, MIXED.to(x), x.new_full((4,), b)) - b))


def sum_in_place(x, b=1e4):
    h = x @ MIXED.to(x)
    h += b
    return torch.sin(3 * (h - b))


class KeptTanh(torch.autograd.Function):
    """A custom function whose slope comes from the result."""

    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


@pytest.mark.parametrize(
    "function",
    [sum_of_a_linear_layer, torch.vmap(sum_of_a_linear_layer), sum_in_place, lambda x: KeptTanh.apply(4 + 0.1 * x)],
    ids=["linear", "vmap", "in place", "custom"],
)
def test_sums_inside_layers_in_place_and_in_custom_functions_lose_digits_too(function):
    for seed in range(8):
        X = normal(2, 5, 4, seed=seed, dtype=torch.float32)
        exact = lipscope.local_lipschitz(function, X.double(), solver=Dense()).estimate
        found = lipscope.local_lipschitz(function, X, solver=Dense())
        assert bool(((found.lower <= exact) & (exact <= found.upper)).all()), seed


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.exp(x - x.amax(-1, keepdim=True)),
        lambda x: x / x.flatten(1).abs().amax(1)[:, None, None],
        lambda x: x / torch.linalg.vector_norm(x, ord=math.inf, dim=-1, keepdim=True),
        lambda x: x / torch.linalg.matrix_norm(x, 2)[:, None, None],
        lambda x: torch.zeros_like(x).scatter_reduce(1, torch.zeros_like(x).long(), 1.1 * x, "amax", include_self=False),
        lambda x: torch.stack([row / row.max() + row.median() for row in x]),
        lambda x: torch.arange(40).sin().to(x)[(3 * x).floor().long() + 20] * x,
    ],
    ids=["amax", "largest", "infinite order", "matrix norm", "scatter", "max", "floor"],
)
def test_what_picks_an_entry_or_rounds_to_an_integer_loses_no_digits(function):
    """The slope of a maximum asks which entry equals it, and an index must stay the same integer."""
    X = normal(2, 5, 4, dtype=torch.float32)
    exact = lipscope.local_lipschitz(function, X.double(), solver=Dense()).estimate
    found = lipscope.local_lipschitz(function, X, solver=Dense())
    assert bool(((found.lower <= exact) & (exact <= found.upper) & (found.rounding < 1e-4)).all())


def test_digits_are_lost_in_no_weight_and_in_nothing_that_a_module_keeps():
    class Named(torch.nn.Linear):
        def forward(self, x):
            return x @ torch.real(input=self.weight) @ attrgetter("_base")(self.weight.view(-1)) + torch.nn.Parameter(
                self.kept
            )

    class Updating(torch.nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                self.kept.addmv_(self.weight, torch.zeros(4))
            return super().forward(x)

    class Keeping(torch.nn.Linear):
        def forward(self, x):
            self.product = self.weight @ self.weight
            return x @ self.product

    X = normal(2, 5, 4, dtype=torch.float32)
    for kind in (Named, Updating, Keeping):
        module = kind(4, 4).eval()
        module.register_buffer("kept", normal(4, dtype=torch.float32))
        before = module.weight.detach().clone(), module.bias.detach().clone(), module.kept.clone(), X.clone()
        lipscope.local_lipschitz(module, X)
        assert all(map(torch.equal, before, (module.weight, module.bias, module.kept, X))), kind
    assert torch.equal(module.product, module.weight @ module.weight)


def test_maps_made_of_gradients_are_measured_and_complex_ones_refused():
    def force(x):
        return torch.autograd.grad(x.pow(4).sum(), x, create_graph=True)[0]

    X = torch.tensor([[[1.0, 2.0]]])
    found = lipscope.local_lipschitz(force, X)
    assert found.lower <= 48 <= found.upper
    with pytest.raises(ValueError, match="view_as_real"):
        lipscope.local_lipschitz(torch.fft.fft, X)


def test_other_last_digits_change_nothing_but_digits():
    """Maps that write in place, into views, by way of vmap or checkpoints are what they were."""
    from torch.utils.checkpoint import checkpoint

    def in_place(x):
        y = x.clone()
        y[:, 0] = 0
        y.view(len(y), -1).mul_(2)
        return torch.relu_(y)

    def masked(x):  # rows that see nobody: the least number stands for −∞
        return torch.softmax(x @ x.mT + torch.finfo(x.dtype).min, -1) @ x

    maps = (
        in_place,
        masked,
        torch.vmap(torch.func.grad(lambda x: x.pow(3).sum())),
        lambda x: checkpoint(torch.tanh, x, use_reentrant=False),
        lambda x: x.mT,
        (linear := torch.nn.Linear(8, 8)),
        lambda x: x @ (linear.weight + 0.0) + linear.weight.contiguous().to(x.dtype)[0],
    )
    X = normal(3, 6, 8, dtype=torch.float32)
    before = X.clone(), linear.weight.detach().clone()
    for function in maps:
        assert float(lipscope.local_lipschitz(function, X).rounding.max()) < 2e-5
    assert all(map(torch.equal, before, (X, linear.weight)))


@pytest.mark.parametrize("scale", [1e-42, 1e-30, 1e25, 1e36])
def test_differentiated_maps_of_any_scale(scale):
    found = lipscope.local_lipschitz(lambda x: scale * torch.tanh(x), torch.zeros(2, 4))
    assert found.lower <= float(torch.tensor(scale)) <= found.upper
    assert found.upper < 1.001 * scale


def test_the_interval_of_an_item_does_not_depend_on_the_others():
    """Tokens far from zero cost digits of their own item only."""
    X = normal(3, 4, 40, seed=1, dtype=torch.float32)
    X[1] += 1e4
    for solver in (Dense(), GolubKahan(), GolubKahan(k=2), GolubKahan(memory=1)):
        together = lipscope.local_lipschitz(far_from_zero_by_input, X, solver=solver)
        assert float(together.rounding[1]) > 10 * float(together.rounding[0])
        assert [row["rounding"] for row in together.to_rows()] == together.rounding.tolist()
        for b in range(3):
            alone = lipscope.local_lipschitz(far_from_zero_by_input, X[b : b + 1], solver=solver)
            for name in ("rounding", "lower", "upper"):
                torch.testing.assert_close(getattr(alone, name)[0], getattr(together, name)[b], rtol=2e-6, atol=0)


def far_from_zero_by_input(x):
    return far_from_zero(x, 0.0)


def test_a_map_whose_digits_all_cancel_is_refused_for_that():
    with pytest.raises(FloatingPointError, match=r"there are no digits to measure\. Compute in float64"):
        lipscope.local_lipschitz(
            lambda x: 1e7 * x - (1e7 - 1) * x, torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
        )
