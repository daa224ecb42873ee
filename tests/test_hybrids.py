"""Attention that the core does not know, and layers without any: σ against dense Jacobians of the model's own code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from typer.testing import CliRunner

import lipscope
from families import MADE, TEXT, built, row
from lipscope.cli.main import app
from lipscope.models.model import Model

SOME = {
    "lfm2 (hybrid)": ("0, 1, 2", "autodiff, Lfm2ShortConv as a whole (0, 2); autodiff on the core (1)"),
    "jamba (hybrid)": ("0, 1, 2", "autodiff, JambaMambaMixer as a whole (0, 2); closed form (1)"),
    "mamba": ("0, 1", "autodiff, MambaMixer as a whole"),
    "fnet": ("0, 1", "autodiff, FNetFourierTransform as a whole"),
    "rwkv": ("0, 1", "autodiff, RwkvSelfAttention as a whole"),
    "jetmoe": ("0, 1", "autodiff, JetMoeAttention as a whole"),  # W_O is a mixture of experts
    "deberta": ("0, 1", "autodiff, own attention"),
    "diffllama": ("0, 1", "autodiff, own attention"),  # two softmaxes in a layer
    "doge": ("0, 1", "autodiff, own attention"),  # a mask made of the values
    "big_bird": ("0, 1", "autodiff, own attention"),  # attention that is put in place by the first call
    "esm": ("0, 1", "closed form"),  # a normalisation between the attention module and the module around W_O
    "roberta-prelayernorm": ("0, 1", "closed form"),
    "moshi": ("0, 1", "autodiff on the core"),
    "ibert": ("0, 1", "autodiff, own attention"),
    "clip, text": ("0, 1", "closed form"),
    "clip, vision": ("0, 1", "closed form"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", SOME)
def test_sigma_is_that_of_the_dense_jacobian(kind: str) -> None:
    _, layers, path, attention, block = row(kind)
    assert (layers, path) == SOME[kind]
    assert max(float(attention), float(block)) < 1e-9


def test_there_are_enough_architectures() -> None:
    assert len({*TEXT, *MADE}) >= 40


@pytest.fixture(scope="module")
def hybrid() -> Model:
    return lipscope.load(built("lfm2 (hybrid)")[0])


def test_a_layer_without_attention_says_so(hybrid: Model) -> None:
    assert [layer.index for layer in hybrid.layers] == [1]
    assert next(row["mask"] for row in hybrid.to_rows()) == "no softmax attention seen (Lfm2ShortConv)"
    assert "layer 0: layers.0, Lfm2ShortConv as a whole, no softmax attention seen" in hybrid.describe()
    recorded = hybrid.record(input_ids=torch.arange(5, 11)[None])
    assert [row["layer"] for row in recorded.rows()] == [1]
    found = recorded.rows(layers=[0, 2], scope="block")
    assert [(row["layer"], row["mask"]) for row in found] == [
        (k, "no softmax attention seen (Lfm2ShortConv)") for k in (0, 2)
    ]
    with pytest.raises(ValueError, match="is a Lfm2ShortConv without heads"):
        recorded[0].sigma("head")
    assert recorded[0].attention is None


def test_scope_model_starts_at_the_first_block_of_a_hybrid(hybrid: Model) -> None:
    recorded = hybrid.record(input_ids=torch.arange(5, 11)[None])
    dense = recorded[0].operator("model").to_dense()
    product = torch.eye(dense.shape[-1], dtype=dense.dtype)
    for layer in (0, 1, 2):
        product = recorded[layer].operator("block").to_dense() @ product
    norm = hybrid.model.embedding_norm
    seen = recorded.blocks[2](recorded.blocks[2].tokens)
    product = torch.autograd.functional.jacobian(norm, seen).reshape(product.shape[-2], -1) @ product
    torch.testing.assert_close(dense, product, rtol=1e-5, atol=1e-6)


def test_what_only_feeds_forward_is_no_layer() -> None:
    """A mixture of experts adds up in another order when one token changes: rounding is no dependence."""
    config = tf.NemotronHConfig(
        vocab_size=96, hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=4,
        layers_block_type=["attention", "moe"], n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        moe_shared_expert_intermediate_size=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = lipscope.load(tf.NemotronHModel(config).eval())
    assert [(layer.index, layer.mixer) for layer in model.every] == [(0, "")]


def test_describe_works_for_a_hybrid(tmp_path: Path) -> None:
    built("jamba (hybrid)")[0].save_pretrained(tmp_path / "jamba")
    said = CliRunner().invoke(app, ["describe", str(tmp_path / "jamba")])
    assert said.exit_code == 0, said.output
    assert "σ of all 1 layer on one input, scope attention" in said.output


def test_a_model_without_attention_is_described_and_planned_in_words(tmp_path: Path) -> None:
    config = tf.MambaConfig(vocab_size=96, hidden_size=16, num_hidden_layers=2, state_size=4)
    tf.MambaModel(config).save_pretrained(tmp_path / "mamba")
    said = CliRunner().invoke(app, ["describe", str(tmp_path / "mamba")]).output
    assert "mamba: 2 layers without attention, float32" in said
    assert "head: no, layer 0 (layers.0) is a MambaMixer without heads" in said
    assert CliRunner().invoke(app, ["plan", str(tmp_path / "mamba"), "--lengths", "8"]).exit_code == 0
    tf.SegformerModel(tf.SegformerConfig(hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2])).save_pretrained(
        tmp_path / "segformer"
    )
    refused = CliRunner().invoke(app, ["plan", str(tmp_path / "segformer")])
    assert refused.exit_code == 2
    assert "no plan can be made of SegformerModel, whose configuration gives no one hidden_size" in refused.stderr


def test_a_mask_that_says_what_is_hidden_is_read_as_such() -> None:
    """MPT hands its own attention a mask with True at what is hidden."""
    model = lipscope.load(tf.MptModel(tf.MptConfig(vocab_size=50, d_model=16, n_layers=2, n_heads=4, max_seq_len=32)).eval())
    assert {layer.mask for layer in model.layers} == {"causal (the model's own)"}
    assert "block=" not in repr(model.layers[0])
    assert repr(model.layers[0]) == "<Layer 0: blocks.0, 4 heads, mask causal (the model's own)>"
