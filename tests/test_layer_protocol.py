"""Layers answer for themselves: their operator, their bilinear form, and what is derived from them without a new check."""

from __future__ import annotations

import pytest
import torch

import lipscope
from lipscope.attention.layer import Attention, Layer
from lipscope.attention.norms import RMSNorm
from lipscope.attention.rotary import Rotary
from lipscope.attention.variants import VARIANTS, variant

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


ROTARY = Rotary.from_base(4, n=8, dtype=torch.float64)
PLAIN = Attention(random(8, 6), random(8, 6), random(8, 6), random(6, 8), heads=2, mask="causal")
RICH = Attention(
    random(8, 6), random(4, 6), random(4, 6), random(6, 8), heads=2, kv_heads=1, q_bias=random(8), k_bias=random(4),
    v_bias=random(4), out_bias=random(6), mask="causal", softcap=3.0, bias=random(2, 5, 5), sinks=random(2), rotary=ROTARY,
)  # fmt: skip
LAYERS = {name: variant(name, PLAIN.with_mask(None)) for name in VARIANTS} | {"plain": PLAIN, "rich": RICH}


@pytest.mark.parametrize("name", LAYERS)
def test_the_bilinear_form_is_that_of_the_operator(name: str) -> None:
    layer: Layer = LAYERS[name]
    X, u, v = random(3, 5, 6), random(3, 5, 6), random(3, 5, 6)
    J = layer.operator(X).to_dense()
    expected = torch.einsum("bm,bmn,bn->b", u.flatten(1), J, v.flatten(1))
    torch.testing.assert_close(layer.bilinear(X, u, v).detach(), expected)


@pytest.mark.parametrize("name", LAYERS)
def test_the_bilinear_form_can_be_differentiated_in_the_tokens(name: str) -> None:
    layer: Layer = LAYERS[name]
    X, u, v = random(1, 5, 6).requires_grad_(), random(1, 5, 6), random(1, 5, 6)
    (gradient,) = torch.autograd.grad(layer.bilinear(X, u, v).sum(), X)
    direction, step = random(1, 5, 6), 1e-5
    with torch.no_grad():
        ahead, behind = (layer.bilinear(X + sign * step * direction, u, v).sum() for sign in (1, -1))
    torch.testing.assert_close((gradient * direction).sum(), (ahead - behind).detach() / (2 * step), rtol=1e-6, atol=1e-6)


def test_operators_of_all_scopes() -> None:
    X, norm = random(2, 5, 6), RMSNorm(torch.ones(6, dtype=torch.float64))
    assert RICH.operator(X, "head").batch == 4
    assert RICH.operator(X, "norm+attention", norm).batch == 2
    with pytest.raises(ValueError, match="unknown scope 'block' for an Attention layer; scopes are: attention, head, norm"):
        RICH.operator(X, "block")
    with pytest.raises(ValueError, match="norm belongs to scope"):
        RICH.operator(X, "head", norm)
    with pytest.raises(ValueError, match="needs norm, a LayerNorm or an RMSNorm"):
        RICH.operator(X, "norm+attention")


def test_derived_layers_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    X, checked = random(2, 5, 6), []
    monkeypatch.setattr("lipscope.attention.validation.refuse_infinite", lambda name, tensor: checked.append(name))
    lipscope.local_lipschitz(RICH, X, mask="window:2", certificate=True)
    lipscope.local_lipschitz(RICH, X, scope="head", certificate=True)
    lipscope.local_lipschitz(LAYERS["cosine"], X)
    RICH.for_input(0).head(1).to(torch.float64)
    assert checked == []


def test_numbers_that_another_dtype_cannot_hold_are_refused() -> None:
    W = torch.eye(2, dtype=torch.float64)
    for layer in (Attention(W, W, 1e300 * W), variant("l2", Attention(W, W, 1e300 * W))):
        with pytest.raises(ValueError, match=r"v in torch\.float32 holds NaN or infinite values"):
            layer.to(torch.float32)


def test_what_is_derived_has_nothing_of_the_old_layer_in_its_cache() -> None:
    doubled = PLAIN.to(torch.float32)
    assert PLAIN.qkv.dtype == torch.float64
    assert doubled.qkv.dtype == torch.float32
    assert PLAIN.head(1).qkv.shape == (12, 6)
