"""Penalties: gradients against finite differences, values against measured σ, and σ that falls when they are trained."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import cases
import lipscope
from lipscope.attention.variants import VARIANTS, variant
from lipscope.bounds import softmax_jacobian
from lipscope.training import penalties as regularise
from lipscope.training.penalties import ModelPenalty
from model_families import FAMILIES

NAMES = ("q", "k", "v", "out", "q_bias", "k_bias", "v_bias")
EXACT = lipscope.GolubKahan(rtol=1e-12, interval=None, max_steps=200)


def weights(layer) -> dict[str, torch.Tensor]:
    return {name: getattr(layer, name) for name in NAMES if getattr(layer, name) is not None}


def with_weights(layer, tensors):
    return dataclasses.replace(layer, **dict(zip(weights(layer), tensors, strict=True)))


def sigma(map_, X) -> float:
    return float(lipscope.local_lipschitz(map_, X, solver=lipscope.Dense(), certificate=False).estimate)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("extras", ["", "biases softcap", "biases sinks", "rotary biases", "score-bias no-out"])
def test_gradcheck_of_sigma(mask, extras):
    """The gradient with the pair detached is the gradient of σ itself, for every part of a layer."""
    layer = cases.layer(heads=2, kv_heads=1, extras=extras).with_mask(mask)
    X = cases.random(5, 6, seed=3)
    tensors = [t.clone().requires_grad_() for t in weights(layer).values()]
    assert torch.autograd.gradcheck(
        lambda *given: regularise.spectral_penalty(with_weights(layer, given), X, solver=EXACT), tensors, fast_mode=True
    )
    value = regularise.spectral_penalty(with_weights(layer, tensors), X, solver=EXACT)
    assert value.item() == pytest.approx(sigma(layer, X), rel=1e-9)
    assert regularise.spectral_penalty(with_weights(layer, tensors), X).item() <= value.item() * (1 + 1e-9)


@pytest.mark.parametrize("name", VARIANTS[3:])
def test_gradcheck_of_variants(name):
    layer = variant(name, cases.layer(heads=2, d=4, dk=2, dv=2), **({"eps": 0.5} if name in ("qk-norm", "cosine") else {}))
    X = cases.random(4, 4, seed=3)
    tensors = [t.clone().requires_grad_() for t in (layer.q, layer.v, layer.out)]

    def penalty(q, v, out):
        return regularise.spectral_penalty(dataclasses.replace(layer, q=q, v=v, out=out), X, solver=EXACT)

    assert torch.autograd.gradcheck(penalty, tensors, fast_mode=True)
    assert penalty(*tensors).item() == pytest.approx(sigma(layer, X), rel=1e-8)


def test_gradcheck_of_rows_logits_and_weights():
    layer = cases.layer(heads=2, extras="biases").with_mask("causal")
    X = cases.random(2, 5, 6, seed=3)
    tensors = [t.clone().requires_grad_() for t in weights(layer).values()]
    for penalty in (
        lambda at: regularise.jasmin_penalty(at, X),
        lambda at: regularise.jasmin_penalty(at, X, k=2),
        lambda at: regularise.max_logit_penalty(at, X, limit=0.5),
        regularise.weight_penalty,
    ):
        assert torch.autograd.gradcheck(lambda *given, f=penalty: f(with_weights(layer, given)), tensors, fast_mode=True)


def test_values_by_hand():
    P = torch.tensor([[[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [1.0, 0.0, 0.0]]], dtype=torch.float64)
    g1 = [0.6 * (1 - 0.6 + 0.3), 0.5 * (1 - 0.5 + 0.3)]
    g2 = [0.3 * (1 - 0.3 + 0.1), 0.3 * (1 - 0.3 + 0.2)]
    assert float(regularise.jasmin(P)) == pytest.approx(max(torch.tensor(g1).log().tolist()))
    assert float(regularise.jasmin(P, 2)) == pytest.approx(
        max((torch.tensor(g1) / torch.tensor(g2)).log().tolist()), rel=1e-6
    )
    torch.testing.assert_close(regularise.g_k(P), softmax_jacobian.g1(P))
    scores = torch.tensor([[[[3.0, -9.0], [4.0, 1.0]]]])
    visible = torch.tensor([[True, False], [True, True]])
    assert float(regularise.max_logit(scores, visible, limit=1.0)) == 9.0
    assert float(regularise.jasmin(torch.eye(3)[None])) == 0.0


def test_a_description_may_be_kept_while_its_tensors_change():
    layer = cases.layer(heads=2)
    X = cases.random(5, 6, seed=3)
    leaf = layer.v.clone().requires_grad_()
    kept = with_weights(layer, (layer.q, layer.k, leaf, layer.out))
    before = regularise.spectral_penalty(kept, X).item()
    kept.qkv  # noqa: B018 - fills the cache
    with torch.no_grad():
        leaf.mul_(2)
    assert regularise.spectral_penalty(kept, X).item() == pytest.approx(2 * before, rel=1e-6)


def descend(tensors, penalty, steps=12, rate=0.05) -> None:
    optimiser = torch.optim.Adam(tensors, lr=rate)
    for _ in range(steps):
        optimiser.zero_grad()
        penalty().backward()
        optimiser.step()


@pytest.mark.parametrize("kind", ["spectral", "jasmin", "max-logit", "weights"])
def test_training_lowers_sigma_of_a_layer(kind):
    layer = cases.layer(heads=2, sharp=2.0, d=6)
    X = 1.5 * cases.random(3, 8, 6, seed=4)
    tensors = [t.clone().requires_grad_() for t in weights(layer).values()]
    moving = with_weights(layer, tensors)
    penalty = {
        "spectral": lambda: regularise.spectral_penalty(moving, X),
        "jasmin": lambda: regularise.jasmin_penalty(moving, X),
        "max-logit": lambda: regularise.max_logit_penalty(moving, X),
        "weights": lambda: regularise.weight_penalty(moving),
    }[kind]
    before = lipscope.local_lipschitz(layer, X).estimate.mean()
    start = penalty().item()
    descend(tensors, penalty)
    after = lipscope.local_lipschitz(with_weights(layer, [t.detach() for t in tensors]), X).estimate.mean()
    assert penalty().item() < start
    assert float(after) < 0.95 * float(before)


def gpt2(seed=0, **changes) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=4, initializer_range=0.4, **changes)
    return GPT2LMHeadModel(config)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2, max_position_embeddings=32, initializer_range=0.4)
    )  # fmt: skip


IDS = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("make", [gpt2, llama])
def test_penalty_of_a_model_is_its_sigma(make):
    model = make().double()
    penalty = ModelPenalty(model, "spectral", solver=EXACT)
    value = penalty(input_ids=IDS)
    rows = lipscope.load(make().double().eval()).record(input_ids=IDS).rows()
    by_layer = [sum(r["estimate"] for r in rows if r["layer"] == i) / 2 for i in range(2)]
    assert penalty.values == pytest.approx(by_layer, rel=1e-4)
    assert float(value.detach()) == pytest.approx(sum(by_layer) / 2, rel=1e-4)


@pytest.mark.parametrize("kind", ["spectral", "jasmin", "max-logit", "weights"])
def test_gradients_in_a_model_are_those_of_finite_differences(kind):
    """The layer's tokens count as data, so the last layer's own weights are moved: nothing before it changes."""
    model = gpt2().double()
    penalty = ModelPenalty(model, kind, layers=[1], solver=EXACT)
    penalty(input_ids=IDS).backward()
    attention = model.transformer.h[1].attn
    for weight in (attention.c_attn.weight, attention.c_proj.weight):
        if weight.grad is None:
            assert kind != "spectral"
            continue
        direction = cases.random(*weight.shape, seed=5)
        slope = float((weight.grad * direction).sum())
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                weight.add_(direction, alpha=step)
                values.append(penalty(input_ids=IDS).item())
                weight.add_(direction, alpha=-step)
        assert slope == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5, abs=1e-8)
    assert all(p.grad is None for p in model.transformer.h[0].parameters())


def test_the_penalty_leaves_training_as_it_was():
    """Modes, random numbers, and gradients of a loss whose graph is already there."""
    model = gpt2().train()
    model.transformer.h[1].eval()
    modes = [part.training for part in model.modules()]
    penalty = ModelPenalty(model, "spectral")
    torch.manual_seed(3)
    loss = model(input_ids=IDS, labels=IDS).loss
    state = torch.get_rng_state()
    value = penalty(input_ids=IDS[:1, :6])
    assert torch.equal(torch.get_rng_state(), state)
    assert [part.training for part in model.modules()] == modes
    assert all(p.requires_grad for p in model.parameters())
    (loss + 0 * value).backward()
    together = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(3)
    model(input_ids=IDS, labels=IDS).loss.backward()
    for p, both in zip(model.parameters(), together, strict=True):
        torch.testing.assert_close(p.grad, both)


# JaSMin descends by small steps, many of them: the way down is then the same whatever the order of sums.
@pytest.mark.parametrize(
    ("kind", "steps", "rate"),
    [("spectral", 12, 0.02), ("jasmin", 40, 0.01), ("max-logit", 12, 0.02), ("weights", 12, 0.02)],
    ids=["spectral", "jasmin", "max-logit", "weights"],
)
def test_training_a_model_lowers_sigma(kind, steps, rate):
    model = gpt2()
    before = [r["estimate"] for r in lipscope.load(gpt2().eval()).record(input_ids=IDS).rows()]
    penalty = ModelPenalty(model, kind)
    descend(list(model.parameters()), lambda: penalty(input_ids=IDS), steps=steps, rate=rate)
    after = [r["estimate"] for r in lipscope.load(model.eval()).record(input_ids=IDS).rows()]
    assert sum(after) < 0.9 * sum(before)


def test_hidden_pairs_of_long_inputs_are_not_penalised():
    """From some length on masks stay rules; the largest logit of all is put where nobody sees it."""
    n = 520
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=n, n_embd=8, n_layer=1, n_head=2, initializer_range=0.5))
    ids = torch.randint(0, 40, (1, n), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        block, states = model.transformer.h[0], model.transformer.wte(ids) + model.transformer.wpe.weight[None]
        q, k, _ = block.attn.c_attn(block.ln_1(states)).split(8, -1)
        logits = (q.view(1, n, 2, 4).transpose(1, 2) @ k.view(1, n, 2, 4).transpose(1, 2).mT / 2).abs()
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    # One head with a large hidden logit is enough for a difference.
    expected = logits.masked_fill(~seen, 0.0).amax((-1, -2)).square().mean()
    assert logits.amax((-1, -2)).square().mean() > 1.01 * expected
    assert ModelPenalty(model, "max-logit")(input_ids=ids).item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["spectral", "jasmin", "max-logit"])
def test_padding_is_not_penalised(kind):
    """Padded queries see real keys, and may see them more sharply than any real query does."""
    model = gpt2()
    with torch.no_grad():
        model.transformer.wte.weight[0] *= 20
    ids = IDS[:1, :6].clamp_min(1)
    alone = ModelPenalty(model, kind)(input_ids=ids).item()
    padded = torch.cat([ids, torch.zeros(1, 6, dtype=torch.long)], 1)
    mask = torch.tensor([[1] * 6 + [0] * 6])
    assert ModelPenalty(model, kind)(input_ids=padded, attention_mask=mask).item() == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("kind", ["spectral", "jasmin", "max-logit", "weights"])
def test_penalties_are_not_rounded_by_autocast(kind):
    model = gpt2()
    penalty = ModelPenalty(model, kind)

    def value_and_gradient(enabled):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            value = penalty(input_ids=IDS)
        value.backward()
        return value.detach(), model.transformer.h[0].attn.c_attn.weight.grad.clone()

    for plain, inside in zip(value_and_gradient(False), value_and_gradient(True), strict=True):
        torch.testing.assert_close(inside, plain)


@pytest.mark.parametrize("kind", ["layer", "module"])
def test_sigma_is_not_rounded_by_autocast(kind):
    layer = cases.layer(sharp=2.0).to(torch.float32)
    X = cases.random(1, 5, 6, seed=3).float()
    if kind == "layer":
        attention = dataclasses.replace(layer, q=layer.q.clone().requires_grad_())
    else:
        attention = torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    expected = regularise.spectral_penalty(attention, X).item()
    with torch.autocast("cpu", torch.bfloat16):
        assert regularise.spectral_penalty(attention, X).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["jasmin", "max-logit", "weights"])
def test_the_cheaper_penalties_of_a_layer_are_not_rounded_by_autocast(kind):
    plain = cases.layer(sharp=2.0).to(torch.float32)
    X = cases.random(1, 5, 6, seed=3).float()

    def value_and_gradients(enabled):
        weights = [plain.q.clone().requires_grad_(), plain.k.clone().requires_grad_()]
        layer = dataclasses.replace(plain, q=weights[0], k=weights[1])
        penalties = {
            "jasmin": lambda: regularise.jasmin_penalty(layer, X),
            "max-logit": lambda: regularise.max_logit_penalty(layer, X),
            "weights": lambda: regularise.weight_penalty(layer),
        }
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            value = penalties[kind]()
        assert value.dtype == torch.float32
        return [value.detach(), *torch.autograd.grad(value, weights)]

    for expected, inside in zip(value_and_gradients(False), value_and_gradients(True), strict=True):
        assert torch.equal(inside, expected)


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_gradcheck_in_sinks_and_additive_bias(mask):
    layer = cases.layer(heads=2, extras="sinks").with_mask(mask)
    X = cases.random(5, 6, seed=3)
    tensors = [layer.sinks.clone().requires_grad_(), cases.random(2, 5, 5, seed=4).requires_grad_()]

    def penalty(sinks, bias):
        return regularise.spectral_penalty(dataclasses.replace(layer, sinks=sinks, bias=bias), X, solver=EXACT)

    assert torch.autograd.gradcheck(penalty, tensors, fast_mode=True)
    assert penalty(*tensors).item() == pytest.approx(
        sigma(dataclasses.replace(layer, sinks=tensors[0].detach(), bias=tensors[1].detach()), X), rel=1e-9
    )


@pytest.mark.parametrize(("family", "what"), [("t5_encoder", "position bias"), ("gpt_oss", "sink")])
@pytest.mark.parametrize("kind", ["spectral", "weights"])
def test_models_with_trained_score_terms_are_refused_at_once(family, what, kind):
    with pytest.raises(ValueError, match=f"which a penalty cannot differentiate: the {what}"):
        ModelPenalty(FAMILIES[family]().train().requires_grad_(True), kind)


def test_refusals():
    X = cases.random(5, 6, seed=3)
    layer = cases.layer()
    with pytest.raises(ValueError, match="requires gradients"):
        regularise.spectral_penalty(layer, X)
    with pytest.raises(ValueError, match="width 3, but the layer takes width 6"):
        regularise.spectral_penalty(layer, X[:, :3])
    with pytest.raises(ValueError, match="NaN"):
        regularise.spectral_penalty(layer, X * float("nan"))
    with pytest.raises(ValueError, match="k must be 0 or at least 2"):
        regularise.jasmin(torch.eye(2), 1)
    with pytest.raises(ValueError, match="kind must be one of spectral"):
        ModelPenalty(gpt2(), "sigma")
    with pytest.raises(ValueError, match="no parameter of model requires gradients"):
        ModelPenalty(gpt2().requires_grad_(False))
    with pytest.raises(ValueError, match="bfloat16"):
        ModelPenalty(gpt2().bfloat16())
    with pytest.raises(ValueError, match="keeps its own attention"):
        ModelPenalty(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
