"""Models with rotary embeddings are recognised as plain attention, and only where they are."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers as tf
from torch import nn

import lipscope
from lipscope.attention.operators import AttentionOperator, HeadOperator
from lipscope.models.affine import Layout, find_layout
from lipscope.models.model import Model
from lipscope.spectral.golub_kahan import GolubKahan
from model_families import FAMILIES, enlarge

_TINY = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
BUILD = {
    "cohere (neighbours)": lambda: tf.CohereModel(tf.CohereConfig(**_TINY, num_key_value_heads=1)),
    "glm (half, neighbours)": lambda: tf.GlmModel(
        tf.GlmConfig(**_TINY, num_key_value_heads=1, head_dim=8, partial_rotary_factor=0.5)
    ),
    "llama (yarn)": lambda: tf.LlamaModel(tf.LlamaConfig(**_TINY, num_key_value_heads=1, rope_parameters=_YARN)),
    "gemma": lambda: tf.GemmaModel(tf.GemmaConfig(**_TINY, num_key_value_heads=1, head_dim=8)),
}
IDS = torch.tensor([[5, 11, 7, 30, 2, 9, 41], [1, 3, 3, 8, 20, 6, 49]])


@cache
def loaded(name: str) -> Model:
    torch.manual_seed(0)
    return Model(enlarge(BUILD[name]()) if name in BUILD else FAMILIES[name](), name=name)


@pytest.mark.parametrize("name", [*BUILD, "llama", "gpt_neox"])
def test_the_analytic_operator_is_the_general_one(name):
    handle = loaded(name)
    recording = handle.record({"input_ids": IDS})
    layer = recording[1].attention
    assert layer is not None
    assert layer.rotary is not None
    operator = recording[1].operator("attention")
    assert isinstance(operator, AttentionOperator)
    dense = recording[1].operator("attention", analytic=False).to_dense()
    torch.testing.assert_close(operator.to_dense(), dense, rtol=1e-9, atol=1e-10)
    assert isinstance(recording[1].operator("head"), HeadOperator)


def test_layouts_are_what_the_architectures_say():
    def rotary(name):
        handle = loaded(name)
        return handle.record({"input_ids": IDS})[0].attention.rotary

    assert rotary("cohere (neighbours)").interleaved
    glm = rotary("glm (half, neighbours)")
    # A layout that also turns coordinates by angle 0 is the same map.
    assert glm.interleaved
    torch.testing.assert_close(glm.cos[..., 4:], torch.ones_like(glm.cos[..., 4:]))
    assert not rotary("llama").interleaved
    stretch = rotary("llama (yarn)")
    assert float((stretch.cos.square() + stretch.sin.square()).min()) > 0.9


def test_recordings_with_other_positions_share_the_projections():
    """Left padding, packed documents and another length, after the projections were found once."""
    handle = Model(FAMILIES["llama"]())
    # One token has no other places to be compared with: what it says of positions must not be believed later.
    assert handle.record({"input_ids": IDS[:1, :1]})[1].attention is not None
    exact = GolubKahan(rtol=1e-11)
    assert handle.record({"input_ids": IDS})[1].attention is not None
    known = handle.projections(handle.layer(1))[1]
    padded = handle.token_inputs(input_ids=IDS, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]))
    packed, lengths = handle.packed_inputs([[5, 11, 7, 30], [2, 9, 41]])
    shifted = {"input_ids": IDS, "position_ids": torch.arange(9, 16)[None]}
    short = {"input_ids": IDS[:1, :5]}
    for recording in (handle.record(packed, documents=lengths), *map(handle.record, (padded, short, shifted))):
        assert recording[1].attention is not None
        for scope in ("attention", "head"):
            fast, slow = (recording[1].sigma(scope, analytic=a, solver=exact).estimate for a in (True, False))
            torch.testing.assert_close(fast, slow, rtol=1e-8, atol=0)
    assert handle.projections(handle.layer(1))[1] is known


def test_single_precision_is_recognised_too():
    handle = Model(FAMILIES["llama"]().float())
    recording = handle.record({"input_ids": IDS})
    assert recording[1].attention is not None
    fast, slow = (recording[1].sigma(analytic=a).estimate for a in (True, False))
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=0)


class _Bent(nn.Module):
    """A projection with a small nonlinear part."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        return y + 1e-4 * torch.tanh(y)


def test_a_slightly_bent_projection_is_not_plain():
    for bend in ("q_proj", "k_proj", "v_proj"):
        model = FAMILIES["llama"]()
        attention = model.layers[1].self_attn
        setattr(attention, bend, _Bent(getattr(attention, bend)))
        handle = Model(model)
        recording = handle.record({"input_ids": IDS})
        assert recording[1].attention is None
        assert recording[0].attention is not None


def test_positions_that_do_more_than_turn_pairs_are_not_plain():
    G = torch.Generator().manual_seed(0)
    reference = torch.randn(6, 8, generator=G, dtype=torch.float64)
    mixing = torch.linalg.qr(torch.randn(4, 8, 8, generator=G, dtype=torch.float64)).Q
    mixing[0] = torch.eye(8)
    seen = torch.einsum("tab,sb->sta", mixing, reference)[:, None]
    assert find_layout(seen, reference, 1e-9) is None
    angle = torch.arange(4, dtype=torch.float64)[:, None] * torch.tensor([0.3, 0.9], dtype=torch.float64)
    truth = Layout(4, interleaved=False)
    turn = truth.table(torch.polar(torch.ones_like(angle), angle)[None]).rotation(4, 1)
    seen = turn.apply(reference[:, None, None].expand(6, 1, 4, 8))
    assert find_layout(seen, reference, 1e-9) == truth
    assert find_layout(seen + 1e-6 * torch.randn(seen.shape, generator=G), reference, 1e-9) is None


def turning_llama() -> torch.nn.Module:
    """Queries and keys that are orthogonal at offset 0 and meet a quarter turn apart: offsets decide how large A_ij is."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=50, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, rope_theta=4.0,
    )  # fmt: skip
    model = tf.LlamaModel(config).eval().double()
    attention = model.layers[0].self_attn
    with torch.no_grad():
        for weight in (attention.q_proj.weight, attention.k_proj.weight):
            weight.normal_(0, 1e-3)
        attention.q_proj.weight[4, 0] = attention.k_proj.weight[0, 1] = 6
        for weight in (attention.v_proj.weight, attention.o_proj.weight):
            weight.copy_(torch.eye(8))
        model.embed_tokens.weight.normal_()
    return model


@pytest.mark.parametrize("real", [range(8, 12), range(4), (0, 1, 9, 11)], ids=["left", "right", "holes"])
def test_bounds_beside_padded_rows_count_every_offset(real):
    handle = lipscope.load(turning_llama())
    padding = torch.ones(2, 12, dtype=torch.long)
    padding[0] = 0
    padding[0, list(real)] = 1
    ids = torch.randint(1, 50, (2, 12), generator=torch.Generator().manual_seed(1))
    for row in handle.record(input_ids=ids, attention_mask=padding).rows(certificate=True):
        for column in ("certified", "refined", "castin2024", "refined_global", "castin2024_global"):
            assert row[column] >= row["lower"], (column, row["n"])


def test_pairs_of_weights_that_are_zero():
    """A pruned pair shows no rotation; the layer is measured all the same, by the analytic path."""
    model = turning_llama()
    with torch.no_grad():
        for weight in (model.layers[0].self_attn.q_proj.weight, model.layers[0].self_attn.k_proj.weight):
            weight[[1, 5]] = 0
    handle = lipscope.load(model)
    recording = handle.record(handle.token_inputs(input_ids=torch.arange(1, 7)))
    assert recording[0].attention is not None
    analytic, general = (recording[0].sigma(solver=lipscope.Dense(), analytic=choice).estimate for choice in (True, False))
    torch.testing.assert_close(analytic, general, rtol=1e-6, atol=0)
