"""Laws of the façade: what local_lipschitz and influence return for layers and for any torch map."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import cases
import lipscope
import reference

ALL = torch.ones(5, 5, dtype=torch.bool)


def sigma(function, X) -> float:
    return float(torch.linalg.svdvals(reference.jacobian(function, X))[0])


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 9),
    d=st.integers(1, 8),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    dk=st.integers(1, 4),
    dv=st.integers(1, 4),
    extras=st.sampled_from(list(cases.EXTRAS.values())),
    causal=st.booleans(),
    sharp=st.sampled_from([0.0, 1.0, 10.0]),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
# A soft-cap that is almost saturated.
@example(
    n=1, d=1, kv_heads=1, group=1, dk=2, dv=1, extras="biases softcap score-bias sinks scale", causal=False, sharp=10.0,
    seed=370, dtype=torch.float32,
)  # fmt: skip
def test_interval_contains_the_dense_value(n, d, kv_heads, group, dk, dv, extras, causal, sharp, seed, dtype):
    layer = cases.layer(
        heads=kv_heads * group, kv_heads=kv_heads, extras=extras, seed=seed, d=d, dk=dk, dv=dv, n=n, sharp=sharp, dtype=dtype
    ).for_input(0)
    X = cases.random(n, d, seed=seed + 99, dtype=dtype)
    visible = torch.ones(n, n, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    exact = layer.to(torch.float64)
    truth = sigma(lambda x: reference.attention(exact, x, visible), X.double())
    tight = lipscope.GolubKahan(interval=1e-3)
    smallest = torch.finfo(dtype).tiny  # a σ below it is 0 in this dtype: sinks can hide a token that well
    for solver, accuracy in ((lipscope.GolubKahan(), 0.11), (tight, 2e-3), (lipscope.Dense(), 1e-3)):
        result = lipscope.local_lipschitz(layer, X, mask="causal" if causal else "full", solver=solver)
        assert result.lower <= truth <= max(result.upper, smallest)
        assert result.estimate == pytest.approx(truth, rel=accuracy, abs=smallest)
    heads = lipscope.local_lipschitz(layer, X, scope="head", mask="causal" if causal else "full")
    for h in range(layer.heads):
        truth = sigma(lambda x, h=h: reference.head(exact, h, x, visible), X.double())
        assert heads.lower[h] <= truth <= max(heads.upper[h], smallest)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_float32_interval_contains_the_float64_value_at_gpt2_shape(mask):
    """The rounding allowance is enough for long inner products and sharp scores."""
    generator = torch.Generator().manual_seed(0)
    d = 768
    for sharp in (1.0, 4.0):
        qkv = torch.randn(3 * d, d, generator=generator) / d**0.5
        qkv[: 2 * d] *= sharp
        layer = lipscope.Attention.from_fused(qkv, torch.randn(d, d, generator=generator) / d**0.5, heads=12, mask=mask)
        X = torch.randn(2, 24, d, generator=generator)
        exactly = {"solver": lipscope.GolubKahan(rtol=1e-10), "certificate": False}
        truth = lipscope.local_lipschitz(layer, X.double(), **exactly).estimate
        result = lipscope.local_lipschitz(layer, X, certificate=False)
        assert (result.lower <= truth).all()
        assert (truth <= result.upper).all()
        torch.testing.assert_close(result.estimate, truth, rtol=2e-4, atol=0)


@pytest.mark.parametrize("case", ["score bias", "mask", "value bias", "tokens"])
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_float32_interval_survives_large_offsets(case, size):
    """A large common term cancels in exact arithmetic; what it costs in float32 is inside the interval."""
    for seed in range(10):
        layer = cases.layer(heads=2, extras="biases", d=16, dk=8, dv=8, d_out=16, n=12, seed=seed, dtype=torch.float32)
        X = cases.random(12, 16, seed=seed, dtype=torch.float32)
        mask = torch.full((12, 12), -size) if case == "mask" else "full"
        if case == "score bias":
            layer = dataclasses.replace(layer, bias=size + cases.random(12, 12, seed=seed, dtype=torch.float32))
        elif case == "value bias":
            layer = dataclasses.replace(layer, v_bias=size * layer.v_bias)
        elif case == "tokens":
            X = X * size**0.25
        exact = lipscope.local_lipschitz(layer, X, dtype=torch.float64, mask=mask, solver=lipscope.GolubKahan(rtol=1e-10))
        result = lipscope.local_lipschitz(layer, X, mask=mask)
        assert result.lower <= exact.estimate <= result.upper


@pytest.mark.parametrize("size", [1.0, 3.0, 10.0])
def test_float32_callables_know_their_rounding(size):
    """Sharp softmax attention as a plain function: even "exact" float32 intervals contain the float64 value."""
    for seed in range(5):
        q, k, v, out = (cases.random(16, 16, seed=seed + s) for s in range(4))
        X = size * cases.random(12, 16, seed=seed) / 4

        def function(x, q=q, k=k, v=v, out=out):
            scores = (x @ q.to(x).T) @ (x @ k.to(x).T).mT / 4
            return torch.softmax(scores, -1) @ (x @ v.to(x).T) @ out.to(x).T

        truth = sigma(function, X.float().double())
        for solver in (lipscope.Dense(), lipscope.GolubKahan()):
            result = lipscope.local_lipschitz(function, X.float(), solver=solver)
            assert result.lower <= truth <= result.upper


def test_maps_to_scalars_have_the_norm_of_their_gradient():
    X = cases.random(2, 3, 4, seed=0)
    result = lipscope.local_lipschitz(lambda x: x.square().sum((1, 2)), X)
    torch.testing.assert_close(result.estimate, 2 * X.flatten(1).norm(dim=1))


def test_the_wider_dtype_counts_and_is_said():
    X = cases.random(5, 6, seed=3, dtype=torch.float32)
    result = lipscope.local_lipschitz(cases.layer(), X)
    assert (result.dtype, result.input_dtype) == ("float64", "float32 tokens, float64 weights")
    result = lipscope.local_lipschitz(cases.layer(dtype=torch.bfloat16), X)
    assert (result.dtype, result.input_dtype) == ("float32", "float32 tokens, bfloat16 weights")


def test_uniform_attention_has_the_norm_of_its_values():
    """A = 0, unmasked: J = (1/n)11ᵀ ⊗ W_V, so σ = ‖W_V‖. Masked: the Cesàro matrix, 1.144…, 1.410…, 1.630…."""
    V = cases.random(3, 4, seed=0)
    layer = lipscope.Attention(torch.zeros(2, 4).double(), cases.random(2, 4, seed=1), V)
    for n in (1, 2, 10):
        result = lipscope.local_lipschitz(layer, cases.random(n, 4, seed=n))
        assert result.estimate == pytest.approx(float(torch.linalg.matrix_norm(V, 2)), rel=1e-10)
    identity = lipscope.Attention(
        torch.zeros(1, 1).double(), torch.ones(1, 1).double(), torch.ones(1, 1).double(), mask="causal"
    )
    for n, expected in ((2, 1.144), (10, 1.410), (100, 1.630)):
        cesaro = (1 / torch.arange(1, n + 1).double())[:, None] * torch.ones(n, n).double().tril()
        result = lipscope.local_lipschitz(identity, cases.random(n, 1, seed=n))
        assert result.estimate == pytest.approx(float(torch.linalg.matrix_norm(cesaro, 2)), rel=1e-9)
        assert result.estimate == pytest.approx(expected, abs=1e-3)


def test_one_token_has_a_linear_map():
    """n = 1: the softmax is constant, J = W_O W_V."""
    layer = cases.layer(heads=2, extras="biases")
    joined = torch.cat([layer.out[:, 3 * h : 3 * h + 3] @ layer.v[3 * h : 3 * h + 3] for h in range(2)], 1)
    expected = joined[:, :6] + joined[:, 6:]
    result = lipscope.local_lipschitz(layer, cases.random(1, 6, seed=4))
    assert result.estimate == pytest.approx(float(torch.linalg.matrix_norm(expected, 2)), rel=1e-10)


def test_token_permutation_equivariance_when_unmasked():
    layer = cases.layer(heads=2, extras="biases softcap sinks")
    X = cases.random(5, 6, seed=3)
    order = torch.tensor([3, 1, 4, 0, 2])
    one, other = (lipscope.local_lipschitz(layer, Y, solver=lipscope.Dense(vectors=True)) for Y in (X, X[order]))
    assert other.estimate == pytest.approx(one.estimate, rel=1e-12)
    torch.testing.assert_close(other.token_energy, one.token_energy[order])


def test_key_bias_cancels():
    layer = cases.layer(extras="biases")
    X = cases.random(5, 6, seed=3)
    shifted = lipscope.Attention(
        layer.q, layer.k, layer.v, layer.out, 2, q_bias=layer.q_bias, v_bias=layer.v_bias, k_bias=100 * layer.k_bias
    )
    ours = lipscope.local_lipschitz(layer, X).estimate
    assert lipscope.local_lipschitz(shifted, X).estimate == pytest.approx(ours, rel=1e-9)


def test_packed_is_the_maximum_over_documents():
    layer = cases.layer(heads=2, extras="biases")
    X = cases.random(9, 6, seed=7)
    for suffix, mask in (("", "causal"), (":both", "full")):
        packed = lipscope.local_lipschitz(layer, X, mask=f"packed:2,4,3{suffix}").estimate
        parts = [lipscope.local_lipschitz(layer, x, mask=mask).estimate for x in (X[:2], X[2:6], X[6:])]
        assert packed == pytest.approx(max(parts), rel=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_change_sigma(side):
    layer = cases.layer(heads=2, extras="biases")
    X = cases.random(5, 6, seed=7)
    junk = 1e3 * torch.ones(2, 6).double()
    padded = torch.cat([junk, X] if side == "left" else [X, junk])
    for base in ("full", "causal"):
        alone = lipscope.local_lipschitz(layer, X, mask=base).estimate
        assert lipscope.local_lipschitz(layer, padded, mask=f"{base}&pad-{side}:2").estimate == pytest.approx(
            alone, rel=1e-12
        )


@pytest.mark.parametrize("scope", ["attention", "head"])
def test_batch_equals_loop(scope):
    layer = cases.layer(heads=4, kv_heads=2, extras="biases", d=40, dk=8, dv=8, d_out=40)
    X = cases.random(3, 12, 40, seed=1)
    together = lipscope.local_lipschitz(layer, X, scope=scope, mask="causal")
    assert tuple(together.estimate.shape) == ((3,) if scope == "attention" else (3, 4))
    for b in range(3):
        alone = lipscope.local_lipschitz(layer, X[b], scope=scope, mask="causal")
        for name in ("estimate", "upper"):
            value = torch.as_tensor(getattr(alone, name), dtype=torch.float64)
            torch.testing.assert_close(value, getattr(together, name)[b], rtol=1e-6, atol=0)


def test_singular_vectors_attain_the_norm():
    """A finite step along the right vector moves the output by σ along the left vector; token energies are its rows."""
    layer = cases.layer(heads=2, extras="biases", d=40, dk=8, dv=8, d_out=40)
    X = cases.random(2, 12, 40, seed=1)
    for scope in ("attention", "head"):
        result = lipscope.local_lipschitz(
            layer, X, scope=scope, solver=lipscope.GolubKahan(rtol=1e-10, vectors=True, k=2), mask="causal"
        )
        index = (1,) if scope == "attention" else (1, 0)
        f = layer.with_mask("causal") if scope == "attention" else layer.head(0).with_mask("causal")
        v, u = result.right[index][0], result.left[index][0]
        h = 1e-5
        moved = (f(X[1] + h * v) - f(X[1] - h * v)) / (2 * h)
        torch.testing.assert_close(moved, result.estimate[index] * u, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(result.token_energy[index], v.square().sum(-1), rtol=1e-6, atol=1e-9)
        assert float(result.token_energy[index].sum()) == pytest.approx(1.0)


def test_half_precision_is_upcast_and_said():
    layer = cases.layer(dtype=torch.bfloat16)
    X = cases.random(5, 6, seed=3, dtype=torch.bfloat16)
    result = lipscope.local_lipschitz(layer, X)
    assert (result.dtype, result.input_dtype) == ("float32", "bfloat16")
    assert "float32 (from bfloat16)" in str(result)
    exact = lipscope.local_lipschitz(layer.to(torch.float64), X.double())
    assert result.lower <= exact.estimate <= result.upper
    module = nn.Linear(6, 6).to(torch.bfloat16).eval()
    assert lipscope.local_lipschitz(module, X).estimate == pytest.approx(
        float(torch.linalg.matrix_norm(module.weight.float(), 2).detach()), rel=1e-5
    )
    assert module.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("batched", [False, True])
def test_any_torch_map(batched):
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, dtype=torch.float64).eval()
    X = cases.random(3, 5, 8, seed=0)
    result = lipscope.local_lipschitz(block, X if batched else X[0], scope="block")
    truth = sigma(lambda x: block(x[None])[0], X[0])
    ours = result.estimate[0] if batched else result.estimate
    assert float(ours) == pytest.approx(truth, rel=1e-8)
    assert result.scope == "block"


def test_fused_attention_inside_a_map_is_switched_by_itself():
    def fused(x):
        return nn.functional.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]

    X = cases.random(2, 6, 4, seed=0)
    eye = torch.eye(4, dtype=torch.float64)
    ours = lipscope.local_lipschitz(lipscope.Attention(eye, eye, eye, mask="causal"), X)
    torch.testing.assert_close(lipscope.local_lipschitz(fused, X).estimate, ours.estimate)


def test_from_torch_is_the_same_map():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64).eval()
    layer = lipscope.Attention.from_torch(module)
    X = cases.random(2, 5, 8, seed=0)
    torch.testing.assert_close(layer(X), module(X, X, X)[0].detach())
    causal = lipscope.Attention.from_torch(module, mask="causal")
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(causal(X), module(X, X, X, attn_mask=hidden)[0].detach())
    with torch.no_grad():
        module.in_proj_weight.zero_()
    assert layer.q.any(), "the description is a copy"


def test_from_fused_reads_gpt2_weights():
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    torch.manual_seed(0)
    config = GPT2Config(n_embd=8, n_head=2, n_positions=16, attn_pdrop=0.0, attn_implementation="eager")
    module = GPT2Attention(config, layer_idx=0).double().eval()
    layer = lipscope.Attention.from_fused(
        module.c_attn.weight.data, module.c_proj.weight.data, heads=2, transposed=True,
        qkv_bias=module.c_attn.bias.data, out_bias=module.c_proj.bias.data, mask="causal",
    )  # fmt: skip
    X = cases.random(1, 5, 8, seed=0)
    hidden = torch.zeros(1, 1, 5, 5).double().masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(layer(X), module(X, attention_mask=hidden)[0].detach())


@pytest.mark.parametrize("mask", list(cases.masks()))
def test_influence_is_the_matrix_of_block_norms(mask):
    layer = cases.layer(heads=4, kv_heads=2, extras="biases softcap sinks score-bias")
    given_mask, visible, additive = cases.masks(heads=4)[mask]
    X = cases.random(3, 5, 6, seed=2)
    blocks = lipscope.influence(layer, X, mask=given_mask, rtol=1e-10)
    heads = lipscope.influence(layer, X, mask=given_mask, scope="head", rtol=1e-10)
    for b in range(3):
        extra = additive[b] if isinstance(additive, torch.Tensor) else 0.0
        J = reference.jacobian(lambda x, b=b, e=extra: reference.attention(layer, x, visible[b], e), X[b])
        expected = torch.linalg.svdvals(J.reshape(5, 4, 5, 6).transpose(1, 2))[..., 0]
        torch.testing.assert_close(blocks[b], expected, rtol=1e-7, atol=1e-10)
        for h in range(4):
            J = reference.jacobian(lambda x, b=b, e=extra, h=h: reference.head(layer, h, x, visible[b], e), X[b])
            expected = torch.linalg.svdvals(J.reshape(5, 3, 5, 6).transpose(1, 2))[..., 0]
            torch.testing.assert_close(heads[b, h], expected, rtol=1e-7, atol=1e-10)
    result = lipscope.local_lipschitz(layer, X, mask=given_mask)
    assert (blocks.amax((1, 2)) <= result.upper).all()
    assert (result.lower <= torch.linalg.matrix_norm(blocks, 2)).all()


@pytest.mark.parametrize("mask", ["window:1", "packed:1,1,1", "pad-right:2"])
def test_influence_without_pairs(mask):
    """Tokens that see only themselves, or nobody: the matrix is diagonal."""
    layer = cases.layer(heads=2, n=3)
    for scope in ("attention", "head"):
        found = lipscope.influence(layer, cases.random(2, 3, 6, seed=1), mask=mask, scope=scope)
        assert (found - torch.diag_embed(found.diagonal(dim1=-2, dim2=-1)) == 0).all()
        assert found.amax() > 0
    assert lipscope.influence(layer, cases.random(1, 6, seed=1)).shape == (1, 1)


def test_influence_with_a_shared_bias_and_vanishing_probabilities():
    bias = cases.random(1, 2, 5, 5, seed=0)
    layer = dataclasses.replace(cases.layer(heads=2), bias=bias)
    assert lipscope.influence(layer, cases.random(3, 5, 6, seed=1)).shape == (3, 5, 5)
    W = torch.eye(2)
    sharp = lipscope.influence(lipscope.Attention(46 * W, W, W, scale=1.0), torch.tensor([[1.0, 0], [-1.0, 0]]))
    assert sharp.isfinite().all()


def test_influence_of_a_callable():
    layer = cases.layer(heads=2)
    X = cases.random(2, 5, 6, seed=2)
    by_autodiff = lipscope.influence(lambda Y: torch.stack([reference.attention(layer, y, ALL) for y in Y]), X)
    torch.testing.assert_close(by_autodiff, lipscope.influence(layer, X, rtol=1e-10), rtol=1e-7, atol=1e-10)


def test_a_result_reads_well_and_becomes_rows():
    layer = cases.layer(heads=2, d=40, dk=8, dv=8, d_out=40)
    X = cases.random(2, 12, 40, seed=1)
    rows = lipscope.local_lipschitz(layer, X, scope="head", mask="causal").to_rows()
    assert [(row["input"], row["head"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(row["lower"] <= row["estimate"] <= row["upper"] for row in rows)
    assert {row["mask"] for row in rows} == {"causal"}
    text = str(lipscope.local_lipschitz(layer, X[0], certificate=False))
    for part in ("σ[attention]", "mask full", "n = 12", "float64", "fails with probability ≤ 1e-06", "steps", "converged"):
        assert part in text
    many = str(lipscope.local_lipschitz(layer, cases.random(40, 3, 40, seed=1)))
    assert "more; to_rows()" in many


def test_autograd_state_is_left_alone():
    weight = cases.random(6, 6, seed=0).requires_grad_()
    X = cases.random(5, 6, seed=1).requires_grad_()
    lipscope.local_lipschitz(lambda x: torch.tanh(x @ weight), X)
    lipscope.local_lipschitz(lipscope.Attention(weight, weight, weight), X)
    assert weight.grad is None
    assert X.grad is None
    with torch.no_grad():
        assert lipscope.local_lipschitz(torch.tanh, X).estimate > 0


def test_parts_of_a_batch_by_index():
    layer, X = cases.layer(heads=4), cases.random(3, 6, 6, seed=3)
    heads = lipscope.local_lipschitz(layer, X, scope="head", solver=lipscope.Auto(vectors=True, k=2))
    assert heads.batch_shape == (3, 4)
    row, one = heads[1], heads[1, 2]
    assert row.batch_shape == (4,)
    assert one.batch_shape == ()
    assert (one.estimate, one.iterations, one.status) == (
        float(heads.estimate[1, 2]),
        int(heads.iterations[1, 2]),
        heads.status[1][2],
    )
    assert torch.equal(one.right, heads.right[1, 2])
    assert torch.equal(one.singular_values, row.singular_values[2])
    assert row[2].to_rows() == one.to_rows() == [{k: v for k, v in heads.to_rows()[6].items() if k not in ("input", "head")}]
    with pytest.raises(IndexError, match=r"a result of shape \(\) has no item 0"):
        one[0]
    with pytest.raises(IndexError):
        heads[3]
