"""Certificates a strip of rows at a time: the same numbers as from n×n matrices, in memory that grows like n."""

from __future__ import annotations

import pytest
import torch

import cases
import lipscope
import reference
from largest_tensor import LargestTensor
from lipscope.bounds import blocks
from lipscope.bounds.certificates import certified_upper, height_within, local_bounds

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


@pytest.mark.parametrize(
    ("mask", "part"), [*((mask, "plain") for mask in MASKS), *(("causal", part) for part in PARTS if part != "plain")]
)
def test_strips_equal_matrices(mask, part):
    """Every certificate of the layer, with grouped queries, and of every head; strips that do not divide the rows."""
    x = cases.random(N, 10, seed=3)
    subject = layer(MASKS[mask], kv_heads=2, **PARTS[part])
    whole = {bound.name: bound.value for bound in local_bounds(subject, x)}
    cut = {bound.name: bound.value for bound in local_bounds(subject, x, height=8)}
    assert len(whole) == 2
    assert cut == pytest.approx(whole, rel=1e-10)
    gains = torch.linspace(0.5, 2.0, N, dtype=torch.float64)[None]
    dense = certified_upper(subject, x[None], "head", gains=gains)
    torch.testing.assert_close(certified_upper(subject, x[None], "head", gains=gains, height=8), dense, rtol=1e-10, atol=0)


def test_gains_reach_the_strips():
    x, gains = cases.random(1, N, 10, seed=3), torch.linspace(0.5, 2.0, N, dtype=torch.float64)[None]
    dense = certified_upper(layer("causal"), x, gains=gains)
    torch.testing.assert_close(certified_upper(layer("causal"), x, gains=gains, height=8), dense, rtol=1e-10, atol=0)


def test_strips_are_above_sigma():
    """Not only equal to the matrices' bound: above the true norm, for inputs in the regime where the bound is tight."""
    for seed in range(4):
        x = 2.0 ** (seed - 2) * cases.random(14, 10, seed=seed)
        subject = layer("causal", rotary=lipscope.Rotary.from_base(2, n=14, dtype=torch.float64))
        sigma = lipscope.local_lipschitz(subject, x, solver=lipscope.Dense()).estimate
        assert sigma <= float(certified_upper(subject, x[None], height=6)) * (1 + 1e-9)


def drawn(seed: int) -> tuple[lipscope.Attention, torch.Tensor, torch.Tensor, int]:
    """A layer, its input, what is visible (n, n), written independently, and a height of strips."""
    g = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=g))]

    def random(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    n, d, dk = pick(3, 6, 9, 12), pick(2, 4, 6), pick(2, 4)
    heads = pick(1, 2, 4)
    kv_heads = pick(1, heads)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    kind = pick("full", "causal", "window:3", "window:2:both", "additive", "alibi", "hiding")
    visible, additive = torch.ones(n, n, dtype=torch.bool), torch.zeros(heads, n, n, dtype=torch.float64)
    if kind == "causal":
        visible = j <= i
    elif kind == "window:3":
        visible = (j <= i) & (i - j < 3)
    elif kind == "window:2:both":
        visible = (i - j).abs() < 2
    elif kind == "additive":
        additive = pick(0.1, 1.0, 30.0) * random(heads, n, n)
    elif kind == "alibi":
        additive = -(2.0 ** -torch.arange(heads, dtype=torch.float64))[:, None, None] * (i - j).abs() + 0 * additive
    elif kind == "hiding":
        additive = additive.masked_fill(j > i, -1e9)
    options = {"bias": additive} if kind in ("additive", "alibi", "hiding") else {"mask": kind}
    if pick(True, False, False):
        options["softcap"] = pick(0.5, 5.0)
    if pick(True, False, False):
        options["sinks"] = random(heads)
    if pick(True, False, False):
        options["rotary"] = lipscope.Rotary.from_base(2, n=n, dtype=torch.float64)
    if pick(True, False):
        options |= {"q_bias": random(heads * dk), "k_bias": random(kv_heads * dk), "v_bias": random(kv_heads * dk)}
    # From flat attention to one-hot rows, and tokens that coincide, where the certificates are tight.
    sharp, scale = pick(0.0, 0.1, 1.0, 3.0), pick(1e-3, 0.3, 1.0, 4.0, 1e3)
    X = scale * (random(n, d) if pick(True, True, False) else random(1, d) + 1e-3 * random(n, d))
    out = pick(None, random(d, heads * dk))
    subject = lipscope.Attention(
        sharp * random(heads * dk, d), random(kv_heads * dk, d), random(kv_heads * dk, d), out, heads, kv_heads, **options
    )
    return subject, X, visible, pick(1, 2, 5, n - 1)


def ratios(seed: int) -> list[tuple[float, str]]:
    """σ of the dense float64 Jacobian over the bound from strips, for the layer and each head, with what was drawn."""
    subject, X, visible, height = drawn(seed)
    J = reference.jacobian(lambda x: reference.attention(subject, x, visible), X)
    found = [(J, certified_upper(subject, X[None], rung=rung, height=height)[0]) for rung in ("fast", "tight")]
    heads = certified_upper(subject, X[None], "head", height=height)[0]
    for h in range(subject.heads):
        found.append((reference.jacobian(lambda x, h=h: reference.head(subject, h, x, visible), X), heads[h]))
    gains = torch.linspace(0.2, 3.0, len(X), dtype=torch.float64)
    scaled = J.reshape(-1, *X.shape) * gains[:, None]
    for rung in ("fast", "tight"):
        bound = certified_upper(subject, X[None], rung=rung, gains=gains[None], height=height)[0]
        found.append((scaled.reshape(J.shape), bound))
    words = f"seed {seed}: {subject}, height {height}"
    # Where a sink takes everything, both are zero.
    return [(float(torch.linalg.matrix_norm(J, 2) / bound) if bool(J.any()) else 0.0, words) for J, bound in found]


def worst_of(seeds) -> list[float]:
    found = [ratio for seed in seeds for ratio in ratios(seed)]
    # Tightness of 1 is reached; what is allowed above is the rounding of the Jacobian and of its SVD.
    for ratio, words in found:
        assert ratio <= 1 + 1e-12, (ratio, words)
    return sorted(ratio for ratio, _ in found)


def test_no_drawn_layer_exceeds_the_bound_from_strips():
    """Masks, additive terms, heads, sizes and scales at random; some of them reach the bound, so an error would show."""
    found = worst_of(range(16))
    assert found[-1] > 1 - 1e-6
    assert found[len(found) // 2] > 0.3


@pytest.mark.slow
def test_no_drawn_layer_exceeds_the_bound_from_strips_in_a_long_search():
    found = worst_of(range(1000, 9000))
    print(f"{len(found)} ratios, median {found[len(found) // 2]:.4f}, largest {found[-1]:.15f}")


def test_large_additive_terms_are_part_of_the_rounding():
    """A constant term changes nothing but the rounding of the scores, 1e-4 for a term of 1e12: the bound must cover it.

    Tokens whose values coincide: J is P times W_V, and the bound without the term is σ itself.
    """
    n, W, V = 6, torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0]]).double()
    ones = torch.ones(n, n, dtype=torch.float64)
    plain, shifted = (lipscope.Attention(W, W, V, bias=bias) for bias in (None, 1e12 * ones))
    hiding = lipscope.Attention(W, W, V, bias=-1e12 * ones.triu(1))
    for seed in range(8):
        x = torch.stack([cases.random(n, seed=seed), torch.ones(n, dtype=torch.float64)], dim=1)
        J = reference.jacobian(lambda x: reference.attention(plain, x, ones.bool()), x)
        sigma = float(torch.linalg.matrix_norm(J, 2))
        for height in (None, 4):
            exact, enlarged, hidden, causal = (
                float(certified_upper(layer, x[None], height=height))
                for layer in (plain, shifted, hiding, plain.with_mask("causal"))
            )
            assert exact == pytest.approx(sigma, rel=1e-5)
            assert sigma <= enlarged <= 1.01 * sigma
            # Far terms that are not seen cost nothing.
            assert hidden == pytest.approx(causal, rel=1e-11)


def test_no_matrix_is_formed_and_strips_keep_to_their_size(monkeypatch):
    monkeypatch.setattr(blocks, "ENTRIES", 1 << 12)
    monkeypatch.setattr(blocks, "SMALL", 0)
    n = 120  # a matrix would have 14,400 elements
    with LargestTensor(n) as seen:
        certified_upper(layer("causal"), cases.random(1, n, 10, seed=n))
    assert not seen.matrices
    assert seen.elements <= 1 << 13, seen.operation


def test_the_row_gram_of_a_head_keeps_to_the_height():
    """Differences of the values of all pairs of tokens would be n²·d_head numbers, whatever the height of the strips."""
    n, height = 200, 100
    single = layer("causal", heads=1, kv_heads=1, dh=8)
    with LargestTensor(n) as seen:
        certified_upper(single, cases.random(1, n, 10, seed=2), height=height)
    assert seen.elements <= 2 * n * height, seen.operation


def test_long_inputs_are_cut_by_themselves(monkeypatch):
    x = cases.random(1, 70, 10, seed=1)
    subject = layer("causal")
    expected = certified_upper(subject, x)
    monkeypatch.setattr(blocks, "ENTRIES", 1 << 13)
    torch.testing.assert_close(certified_upper(subject, x), expected, rtol=1e-10, atol=0)


def test_strips_keep_to_a_memory():
    plain = layer("causal", heads=12, kv_heads=12, d=96, dh=8)
    rotary = layer(
        "causal", heads=12, kv_heads=12, d=96, dh=8, rotary=lipscope.Rotary.from_base(8, n=1000, dtype=torch.float64)
    )
    assert height_within(plain, 100, 12, 1 << 30) is None
    rest = (62 << 20) - 8 * (96 * 8960 + 3 * 1000 * 64)
    assert height_within(plain, 1000, 12, 64 << 20) == rest // (8 * 12 * (33 * 1000 + 4 * 64))
    more, row = (256 << 20) - (64 << 20), 8 * 12 * (33 * 1000 + 4 * 64 + 4 * 1000 * 8)
    assert height_within(rotary, 1000, 12, 256 << 20) == (rest + more) // row
    assert height_within(plain, 16384, 12, 1) == 4


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


def test_set_bounds_compute_one_norm_of_all_heads_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from lipscope.bounds import weights
    from lipscope.bounds.registry import least

    computed: list[torch.Tensor] = []
    eigenvalue = weights.top_eigenvalue
    monkeypatch.setattr(weights, "top_eigenvalue", lambda gram: (computed.append(gram), eigenvalue(gram))[1])
    subject = layer("causal")
    assert least("refined", subject, 1.0, 6) is not None
    wide = [gram for gram in computed if len(gram) > subject.head_width]
    out = torch.linalg.matrix_norm(subject.out.double(), 2)
    assert [float(gram.trace() / eigenvalue(gram)) for gram in wide] == pytest.approx(
        [float(subject.out.double().square().sum() / out**2)], rel=1e-5
    )
    known, queries = weights.layer_weights(subject), torch.linalg.matrix_norm(subject.q.double(), 2)
    assert known.queries == pytest.approx(abs(subject.tau) * float(queries), rel=1e-5)
