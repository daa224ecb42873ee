"""Rotary embeddings: the tables, what a layer does with them, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file

import cases
import lipscope
import reference
from lipscope.attention.io import load_layer

EVERYTHING = torch.ones(5, 5, dtype=torch.bool)


def test_the_usual_table_is_the_formula():
    table = lipscope.Rotary.from_base(4, base=100.0, n=3, dtype=torch.float64)
    for p in range(3):
        for m, angle in enumerate((p * 1.0, p * 0.1)):
            assert table.cos[p, m] == table.cos[p, m + 2] == pytest.approx(math.cos(angle), abs=1e-15)
            assert table.sin[p, m] == table.sin[p, m + 2] == pytest.approx(math.sin(angle), abs=1e-15)
    woven = lipscope.Rotary.from_base(4, base=100.0, n=3, interleaved=True, dtype=torch.float64)
    assert torch.equal(woven.cos, table.cos[:, [0, 0, 1, 1]])
    assert str(woven) == "rotary(4, interleaved)"


def test_the_table_and_its_use_are_those_of_llama():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = LlamaConfig(hidden_size=12, num_attention_heads=2, max_position_embeddings=16)
    positions = torch.tensor([[0, 1, 2, 7]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 4, 12), positions)
    ours = lipscope.Rotary.from_base(6, positions=positions)
    torch.testing.assert_close(ours.cos, cos)
    q = cases.random(1, 2, 4, 6, seed=0, dtype=torch.float32)
    expected, _ = apply_rotary_pos_emb(q, q, cos, sin)
    torch.testing.assert_close(ours.rotation(4, 1).apply(q), expected)


@pytest.mark.parametrize("extras", ["rotary", "turned"])
def test_the_layer_is_the_reference(extras):
    layer = cases.layer(heads=4, kv_heads=2, extras=f"{extras} biases")
    X = cases.random(3, 5, 6, seed=50)
    expected = torch.stack([reference.attention(layer, x, EVERYTHING, item=b) for b, x in enumerate(X)])
    torch.testing.assert_close(layer(X), expected)
    for b, x in enumerate(X):
        torch.testing.assert_close(layer.for_input(b)(x), expected[b])


@pytest.mark.parametrize("extras", ["rotary", "turned"])
def test_influence_is_the_matrix_of_dense_block_norms(extras):
    layer = cases.layer(heads=2, extras=f"{extras} biases")
    X = cases.random(3, 5, 6, seed=50)
    found = lipscope.influence(layer, X, rtol=1e-8)
    for b, x in enumerate(X):
        J = reference.jacobian(lambda y, b=b: reference.attention(layer, y, EVERYTHING, item=b), x)
        blocks = J.reshape(5, -1, 5, 6).transpose(1, 2)
        torch.testing.assert_close(found[b], torch.linalg.svdvals(blocks)[..., 0], rtol=1e-6, atol=1e-9)


def test_only_differences_of_positions_matter():
    W = [cases.random(8, 6, seed=s) for s in range(3)]
    X = cases.random(5, 6, seed=50)

    def sigma(positions):
        table = lipscope.Rotary.from_base(4, positions=positions, dtype=torch.float64)
        return lipscope.local_lipschitz(lipscope.Attention(*W, heads=2, rotary=table), X).estimate

    plain, shifted, other = (sigma(p) for p in (torch.arange(5), torch.arange(5) + 40, 2 * torch.arange(5)))
    assert shifted == pytest.approx(plain, rel=1e-11)
    assert other != pytest.approx(plain, rel=1e-3)
    still = lipscope.local_lipschitz(lipscope.Attention(*W, heads=2), X).estimate
    assert sigma(torch.full((5,), 7)) == pytest.approx(still, rel=1e-11)


def test_a_batch_with_positions_of_its_own_is_its_inputs_one_by_one():
    layer = cases.layer(heads=4, kv_heads=2, extras="turned biases")
    X = cases.random(3, 5, 6, seed=50)
    for scope in ("attention", "head"):
        together = lipscope.local_lipschitz(layer, X, scope=scope).estimate
        alone = [lipscope.local_lipschitz(layer.for_input(b), x[None], scope=scope).estimate for b, x in enumerate(X)]
        torch.testing.assert_close(together, torch.cat(alone))
    for h in range(4):
        one = lipscope.local_lipschitz(layer.head(h), X).estimate
        torch.testing.assert_close(one, lipscope.local_lipschitz(layer, X, scope="head").estimate[:, h])


def test_a_rotary_layer_from_a_file(tmp_path):
    layer = cases.layer(heads=2, extras="rotary")
    tensors = {"q": layer.q, "k": layer.k, "v": layer.v, "out": layer.out}
    tensors |= {"rotary_cos": layer.rotary.cos, "rotary_sin": layer.rotary.sin}
    X = cases.random(5, 6, seed=50)
    save_file(tensors, tmp_path / "layer.safetensors", metadata={"heads": "2"})
    assert torch.equal(load_layer(tmp_path / "layer.safetensors")(X), layer(X))
    woven = lipscope.Rotary.from_base(6, n=5, interleaved=True, dtype=torch.float64)
    tensors |= {"rotary_cos": woven.cos, "rotary_sin": woven.sin}
    save_file(tensors, tmp_path / "woven.safetensors", metadata={"heads": "2", "rotary_interleaved": "true"})
    assert load_layer(tmp_path / "woven.safetensors").rotary.interleaved
    save_file(tensors, tmp_path / "typo.safetensors", metadata={"rotary_interleaved": "yes"})
    with pytest.raises(ValueError, match=r"'rotary_interleaved' of typo\.safetensors must be true or false, got 'yes'"):
        load_layer(tmp_path / "typo.safetensors")
    tensors.pop("rotary_sin")
    save_file(tensors, tmp_path / "half.safetensors")
    with pytest.raises(ValueError, match="lacks rotary_sin"):
        load_layer(tmp_path / "half.safetensors")


def test_what_is_refused():
    one = torch.ones(5, 4)
    for cos, sin, message in (
        (torch.ones(5, 3), torch.ones(5, 3), "r must be even, got r = 3"),
        (torch.ones(4), torch.ones(4), r"must be \(n_max, r\) or \(B, n, r\)"),
        (one, torch.ones(5, 2), "cos and sin must agree"),
        (one * float("nan"), one, "cos holds NaN"),
        (one, torch.arange(20.0).reshape(5, 4), "both coordinates of a pair the same number"),
    ):
        with pytest.raises(ValueError, match=message):
            lipscope.Rotary(cos, sin)
    with pytest.raises(TypeError, match="cos must be a torch tensor, got list"):
        lipscope.Rotary([1.0], one)
    for options, message in (
        ({"width": 3, "n": 4}, "width must be a positive even number, got 3"),
        ({"width": 4}, "exactly one of n and positions"),
        ({"width": 4, "n": 0}, "n must be at least 1"),
        ({"width": 4, "n": 4, "base": -1.0}, "base must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            lipscope.Rotary.from_base(**options)
    W, table = torch.eye(4), lipscope.Rotary.from_base(4, n=5)
    with pytest.raises(ValueError, match="rotary rotates 4 coordinates, but queries have width 2"):
        lipscope.Attention(W, W, W, heads=2, rotary=table)
    with pytest.raises(ValueError, match=r"rotary is torch.float32 .* but q is torch.float64"):
        lipscope.Attention(W.double(), W.double(), W.double(), rotary=table)
    with pytest.raises(TypeError, match=r"rotary must be a Rotary or None, got 10000"):
        lipscope.Attention(W, W, W, rotary=1e4)
    layer = lipscope.Attention(W, W, W, rotary=table)
    with pytest.raises(ValueError, match="rotary has positions for n_max = 5 tokens, but the input has n = 6"):
        layer(torch.ones(6, 4))
    per_input = lipscope.Attention(W, W, W, rotary=lipscope.Rotary(table.cos[None], table.sin[None]))
    with pytest.raises(ValueError, match="rotary is for 1 inputs of n = 5 tokens"):
        per_input(torch.ones(2, 4, 4))
