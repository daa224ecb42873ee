"""The free lower bound from the backward pass: whole tensors give a bound, single tokens do not."""

from __future__ import annotations

import pytest
import torch

import lipscope
from dense_oracle import Oracle
from lipscope.models.seam import plain_experts
from lipscope.training import Monitor
from lipscope.training.backward_bound import largest_gain
from model_families import FAMILIES

PLAIN = ["gpt2", "bert", "llama", "qwen3", "gemma2", "gpt_oss", "phi", "t5_encoder", "modernbert"]


def backward(model, ids, seed):
    """A backward pass with a random loss on the last hidden state."""
    with plain_experts(model):
        hidden = model(input_ids=ids).last_hidden_state
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed), dtype=hidden.dtype)
    (hidden * weights).sum().backward()
    model.zero_grad()


@pytest.mark.parametrize("family", PLAIN)
def test_the_gain_is_a_lower_bound_of_sigma(family):
    model = FAMILIES[family]()
    ids = torch.randint(10, 50, (2, 6), generator=torch.Generator().manual_seed(3))
    sigma = {}
    for layer in (0, 1):
        J = Oracle(family, model, layer, {"input_ids": ids}).jacobian("attention")
        sigma[layer] = float(torch.linalg.matrix_norm(J, 2).max())
    monitor = Monitor(model, backward=True)
    assert monitor.reason is None
    for seed in range(4):
        backward(model, ids, seed)
        gains = monitor.backward_gains()
        assert set(gains) == {0, 1}, monitor.notes
        for layer, gain in gains.items():
            # The oracle does without casts to float32, the model itself casts in places: hence not the last digits.
            assert 0 < gain <= sigma[layer] * (1 + 1e-5)


def test_the_gain_is_exactly_that_of_the_cotangent():
    """‖Jᵀg‖/‖g‖ with the dense Jacobian and the gradient at the output of attention, input by input."""
    model = FAMILIES["bert"]()
    ids = torch.randint(10, 50, (2, 6), generator=torch.Generator().manual_seed(3))
    J = Oracle("bert", model, 1, {"input_ids": ids}).jacobian("attention")
    monitor, seen = Monitor(model), []
    hook = model.encoder.layer[1].attention.output.dense.register_forward_hook(
        lambda module, args, output: output.register_hook(seen.append) and None
    )
    backward(model, ids, 0)
    hook.remove()
    g = seen[0].flatten(1)
    ratios = torch.einsum("bmn,bm->bn", J, g).norm(dim=1) / g.norm(dim=1)
    assert monitor.backward_gains()[1] == pytest.approx(float(ratios.max()), rel=1e-6)


def test_the_ratio_of_single_tokens_is_not_a_bound():
    """Tokens that all look at the first one send it their gradients: its own ratio exceeds σ without limit."""
    identity = torch.eye(2, dtype=torch.float64)
    n = 8
    X = torch.zeros(n, 2, dtype=torch.float64)
    X[0] = torch.tensor([4.0, 0.0])
    X[1:, 0] = 2.0
    layer = lipscope.Attention(identity, identity, identity, identity, heads=1, scale=4.0)
    x = X.clone().requires_grad_(True)
    P = torch.softmax(4.0 * x @ x.T, dim=-1)
    y = P @ x
    g = torch.zeros_like(y)
    g[1:, 1] = 1.0
    # Token 0 itself is hardly looked at by the loss, but the others pass their gradient on to it.
    g[0, 1] = 1e-3
    (gx,) = torch.autograd.grad(y, x, g)
    J = torch.autograd.functional.jacobian(lambda z: torch.softmax(4 * z @ z.T, -1) @ z, X).reshape(2 * n, 2 * n)
    sigma = float(torch.linalg.matrix_norm(J, 2))
    assert lipscope.local_lipschitz(layer, X).estimate == pytest.approx(sigma)
    per_token = gx.norm(dim=-1) / g.norm(dim=-1)
    assert float(per_token.max()) > 100 * sigma
    assert float(largest_gain(gx[None], g[None])) <= sigma


def test_every_input_bounds_on_its_own_and_all_together_bound_less():
    generator = torch.Generator().manual_seed(0)
    J = torch.randn(3, 12, 12, generator=generator, dtype=torch.float64)
    g = torch.randn(3, 4, 3, generator=generator, dtype=torch.float64) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    gx = torch.einsum("bmn,bm->bn", J, g.reshape(3, 12)).reshape(3, 4, 3)
    sigma = torch.linalg.matrix_norm(J, 2).max()
    assert gx.norm() / g.norm() <= largest_gain(gx, g) <= sigma
    assert torch.equal(largest_gain(gx.transpose(0, 1), g.transpose(0, 1), batch_dim=1), largest_gain(gx, g))
    # Inputs without a gradient, and overflowed ones, say nothing.
    g[0] = 0
    gx[1] = float("inf")
    assert largest_gain(gx, g) == gx[2].norm() / g[2].norm()
    assert largest_gain(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2)) == 0


def test_shared_layers_have_no_bound_and_say_so():
    monitor = Monitor(FAMILIES["albert"]())
    assert monitor.reason is None
    assert "no backward bound for layers 0, 1" in monitor.notes[0]


@pytest.mark.parametrize("family", ["torch_post_norm", "torch_pre_norm"])
def test_torch_modules(family):
    model = FAMILIES[family]()
    monitor = Monitor(model)
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    model(x).square().sum().backward()
    record = monitor.step()
    assert monitor.reason is None
    assert 0 < record.backward[0] <= record.readings[0].upper


@pytest.mark.parametrize("size", [1.0, 1e-19, 1e-22, 1e-30])
def test_the_gain_of_tiny_gradients(size):
    """Squares below 1e-38 are lost in float32: the ratio would be 0, or too large."""
    generator = torch.Generator().manual_seed(0)
    gy, gx = torch.randn(2, 1, 8, 4, generator=generator)
    expected = float(gx.double().norm() / gy.double().norm())
    assert float(largest_gain(size * gx, size * gy)) == pytest.approx(expected, rel=1e-6)
