"""Every family: operators against dense Jacobians through the model's own eager attention, head sums, causality."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dense_oracle import CAUSAL, NORM_BEFORE_ATTENTION, PLACES, Oracle, jacobian
from lipscope.models.inputs import probe_inputs
from lipscope.models.model import Model
from lipscope.models.seam import NAME
from lipscope.spectral.golub_kahan import GolubKahan
from model_families import FAMILIES

TIGHT = {"rtol": 1e-9, "atol": 1e-10}
HUGGING_FACE = sorted(PLACES)
TORCH = sorted(set(FAMILIES) - set(PLACES) - {"albert"})


@cache
def loaded(family: str) -> tuple[Model, dict[str, Any]]:
    model = Model(FAMILIES[family](), name=family)
    inputs = probe_inputs(model.model)
    if "input_ids" in inputs:
        inputs = {"input_ids": inputs["input_ids"][:, :6]}
    return model, inputs


def sigma(J: Tensor) -> Tensor:
    return torch.linalg.svdvals(J)[:, 0]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("family", HUGGING_FACE)
def test_attention_jacobian_is_the_dense_one(family: str, layer: int) -> None:
    handle, inputs = loaded(family)
    expected = Oracle(family, handle.model, layer, inputs).jacobian("attention")
    recording = handle.record(inputs)
    for analytic in (False, True):
        operator = recording[layer].operator("attention", analytic=analytic)
        torch.testing.assert_close(operator.to_dense(), expected, **TIGHT)
        result = recording[layer].sigma("attention", analytic=analytic, solver=GolubKahan(rtol=1e-10))
        torch.testing.assert_close(result.estimate, sigma(expected), **TIGHT)
        assert bool((result.lower <= sigma(expected)).all() & (sigma(expected) <= result.upper).all())


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_heads_are_the_dense_ones_and_sum_to_the_layer(family: str) -> None:
    handle, inputs = loaded(family)
    oracle, recording, layer = Oracle(family, handle.model, 1, inputs), handle.record(inputs), handle.layers[1]
    J = oracle.jacobian("head")
    B, N = J.shape[0], J.shape[2]
    n = recording.hosts[1].tokens.shape[1]
    per_head = J.reshape(B, n, layer.heads, -1, N).movedim(2, 1).flatten(2, 3)
    expected = torch.stack([sigma(per_head[:, h]) for h in range(layer.heads)], dim=1)
    for analytic in (False, True):
        result = recording[1].sigma("head", analytic=analytic, solver=GolubKahan(rtol=1e-10))
        torch.testing.assert_close(result.estimate, expected, **TIGHT)

    weight = layer.out.weight.mT if type(layer.out).__name__ == "Conv1D" else layer.out.weight
    per_token = J.reshape(B, n, -1, N)
    parts = weight.reshape(weight.shape[0], layer.heads, -1).unbind(1)
    slices = per_token.reshape(B, n, layer.heads, -1, N).unbind(2)
    total = sum(W @ part for W, part in zip(parts, slices, strict=True))
    torch.testing.assert_close(total.reshape(B, -1, N), oracle.jacobian("attention"), **TIGHT)


@pytest.mark.parametrize("scope", ["norm+attention", "attention+residual", "block"])
@pytest.mark.parametrize("family", HUGGING_FACE)
def test_scopes_around_attention(family: str, scope: str) -> None:
    handle, inputs = loaded(family)
    recording = handle.record(inputs)
    if scope == "norm+attention" and family not in NORM_BEFORE_ATTENTION:
        with pytest.raises(ValueError, match="no normalisation before attention"):
            recording[1].operator(scope)
        return
    expected = Oracle(family, handle.model, 1, inputs).jacobian(scope)
    torch.testing.assert_close(recording[1].operator(scope).to_dense(), expected, **TIGHT)


@pytest.mark.parametrize("family", ["bert", "gpt2", "gemma2", "gpt_oss", "t5_encoder", "vit", "wav2vec2", "bloom"])
def test_whole_model_is_the_product_of_its_blocks(family: str) -> None:
    handle, inputs = loaded(family)
    recording = handle.record(inputs)
    J = recording[0].operator("model").to_dense()
    chain = Oracle(family, handle.model, 1, inputs).jacobian("block") @ Oracle(family, handle.model, 0, inputs).jacobian(
        "block"
    )
    final = {"gpt2": "ln_f", "gemma2": "norm", "gpt_oss": "norm", "t5_encoder": "encoder.final_layer_norm",
             "vit": "layernorm", "bloom": "ln_f"}  # fmt: skip
    if family in final:
        norm = handle.model.get_submodule(final[family])
        seen: list[Tensor] = []
        hook = norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        handle.record(inputs)
        hook.remove()
        from lipscope.models.capture import double_throughout

        with double_throughout(torch.float64):
            chain = jacobian(norm, seen[0]) @ chain
    torch.testing.assert_close(J, chain, **TIGHT)


@pytest.mark.parametrize("family", HUGGING_FACE)
def test_causal_families_leak_exactly_nothing(family: str) -> None:
    handle, inputs = loaded(family)
    recording = handle.record(inputs)
    assert {layer.causal for layer in handle.layers} == {family in CAUSAL}
    n = recording.hosts[1].tokens.shape[1]
    J = recording[1].operator("attention", analytic=False).to_dense()
    blocks = J.reshape(J.shape[0], n, -1, n, J.shape[2] // n).abs().amax((2, 4))
    if family in CAUSAL:
        assert float(blocks.triu(1).max()) == 0
    else:
        assert float(blocks.triu(1).max()) > 0


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3", "gpt_oss", "gpt_neo", "modernbert"])
def test_sliding_windows_hide_distant_tokens(family: str) -> None:
    handle, inputs = loaded(family)
    recording = handle.record(inputs)
    n = recording.hosts[0].tokens.shape[1]
    far = (torch.arange(n)[:, None] - torch.arange(n)[None]).abs() >= 3
    reached = []
    for layer in (0, 1):
        J = recording[layer].operator("attention", analytic=False).to_dense()
        blocks = J.reshape(J.shape[0], n, -1, n, J.shape[2] // n).abs().amax((0, 2, 4))
        reached.append(float(blocks[far].max()) > 0)
    both_windowed = family == "mistral"
    assert reached == [False, False] if both_windowed else sorted(reached) == [False, True]


@pytest.mark.parametrize("family", TORCH)
def test_torch_encoder_layers(family: str) -> None:
    handle, inputs = loaded(family)
    recording = handle.record(inputs)
    module = handle.model
    batch_first = module.self_attn.batch_first
    tokens = inputs["tokens"] if batch_first else inputs["tokens"].transpose(0, 1)

    def attend(x: Tensor) -> Tensor:
        # Written out by hand: nn.MultiheadAttention without its fused kernels.
        q, k, v = (x @ module.self_attn.in_proj_weight.mT + module.self_attn.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k, v))
        o = ((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return module.self_attn.out_proj(o)

    pre = module.norm_first
    x = module.norm1(tokens) if pre else tokens
    stream = (lambda u: u + attend(module.norm1(u))) if pre else (lambda u: module.norm1(u + attend(u)))

    def feed_forward(u: Tensor) -> Tensor:
        return module.linear2(nn.functional.relu(module.linear1(u)))

    def block(u: Tensor) -> Tensor:
        s = stream(u)
        return s + feed_forward(module.norm2(s)) if pre else module.norm2(s + feed_forward(s))

    for scope, function, at in (("attention", attend, x), ("attention+residual", stream, tokens), ("block", block, tokens)):
        expected = jacobian(function, at)
        torch.testing.assert_close(recording[0].operator(scope).to_dense(), expected, **TIGHT)
        torch.testing.assert_close(recording[0].operator(scope, analytic=False).to_dense(), expected, **TIGHT)
    heads = recording[0].sigma("head")
    assert heads.estimate.shape == (2, 4)


def test_shared_layers_are_told_apart() -> None:
    handle, inputs = loaded("albert")
    recording = handle.record(inputs)
    assert len(handle.layers) == 2
    first, second = (recording[i].sigma("attention").estimate for i in (0, 1))
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "bloom", "gpt_neo", "gpt_oss", "opt"])
def test_padding_changes_nothing(family: str) -> None:
    handle, inputs = loaded(family)
    ids = inputs["input_ids"][:1]
    alone = handle.token_inputs(input_ids=ids)
    for side in ("right", "left") if family in CAUSAL else ("right",):
        order = (ids, torch.full((1, 3), 7)) if side == "right" else (torch.full((1, 3), 7), ids)
        real = torch.cat([torch.full_like(part, int(part is ids)) for part in order], dim=1)
        padded = handle.token_inputs(input_ids=torch.cat(order, dim=1), attention_mask=real)
        for scope in ("attention", "block"):
            for analytic in (False, True):
                a = handle.record(alone)[1].sigma(scope, analytic=analytic, solver=GolubKahan(rtol=1e-12)).estimate
                b = handle.record(padded)[1].sigma(scope, analytic=analytic, solver=GolubKahan(rtol=1e-12)).estimate
                torch.testing.assert_close(a, b, rtol=1e-7, atol=0)


def test_the_analytic_path_is_taken_exactly_where_projections_are_affine() -> None:
    plain = {
        family for family in HUGGING_FACE if (pair := loaded(family)) and pair[0].record(pair[1])[1].attention is not None
    }
    assert plain == {
        "bert", "roberta", "distilbert", "gpt2", "opt", "t5_encoder", "vit", "whisper_encoder", "wav2vec2",
        "wav2vec2_pre_norm", "hubert", "modernbert", "gpt_neox", "llama", "mistral", "qwen2", "gemma2", "phi", "gpt_oss",
    }  # fmt: skip


def test_models_and_registries_are_left_as_they_were() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    model = FAMILIES["llama"]()
    before = (model.config._attn_implementation, model.config._experts_implementation_internal)
    handle = Model(model)
    handle.record({"input_ids": torch.tensor([[1, 2, 3]])})[0].sigma()
    assert (model.config._attn_implementation, model.config._experts_implementation_internal) == before
    assert NAME not in AttentionInterface()
    assert NAME not in AttentionMaskInterface()
    assert all(p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_loaded_model_is_loaded_already():
    import lipscope

    model = lipscope.load(FAMILIES["gpt2"]())
    assert lipscope.load(model) is model
