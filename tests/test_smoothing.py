"""Rescaled queries and keys: the target is met, nothing else changes, and nothing is overwritten."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
import transformers as tf
from torch import nn
from typer.testing import CliRunner

import lipscope
from lipscope.attention.scores import ScoreRule
from lipscope.cli.main import app
from lipscope.models.capture import double_throughout
from lipscope.models.checkpoints import Loaded
from lipscope.models.load import ZOO, ByteTokenizer, Entry
from lipscope.models.seam import CoreCall
from lipscope.training.rescale import factors_for_logits, largest_logits
from model_families import FAMILIES, enlarge
from reference import head as reference_head

IDS = torch.randint(10, 50, (2, 8), generator=torch.Generator().manual_seed(1))


def eager_logits(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    """Largest visible logit per layer and head (H,), from scores written out here."""
    seen: list[torch.Tensor] = []

    def spy(module, query, key, value, attention_mask, scaling=None, **kwargs):
        key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = scale * torch.einsum("bhid,bhjd->bhij", query, key)
        n = scores.shape[-1]
        visible = torch.ones(n, n, dtype=torch.bool)
        if getattr(module, "is_causal", False):
            visible = visible.tril()
        scores = scores.masked_fill(~visible, float("-inf"))
        seen.append(scores.amax((0, 2, 3)))
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    tf.AttentionInterface.register("spy", spy)
    before = model.config._attn_implementation
    try:
        model.config._attn_implementation_internal = "spy"
        with torch.no_grad(), double_throughout(torch.float64):
            model(input_ids=ids)
    finally:
        model.config._attn_implementation_internal = before
        tf.AttentionInterface._global_mapping.pop("spy")
    return seen


def qkv(name: str, model: nn.Module, layer: int) -> dict[str, torch.Tensor]:
    """Per-head weights and biases of one layer, sliced by hand: {"q": (H, dk, d), "q_bias": (H, dk), …}."""
    if name == "gpt2":
        c = model.h[layer].attn.c_attn
        parts = dict(zip("qkv", c.weight.T.reshape(3, 4, 4, 16), strict=True))
        return parts | {f"{n}_bias": b for n, b in zip("qkv", c.bias.reshape(3, 4, 4), strict=True)}
    if name == "bert":
        a = model.encoder.layer[layer].attention.self
        modules = {"q": a.query, "k": a.key, "v": a.value}
    else:
        a = (model.decoder if name == "opt" else model).layers[layer].self_attn
        modules = {"q": a.q_proj, "k": a.k_proj, "v": a.v_proj}
    found = {n: m.weight.reshape(-1, 4, 16) for n, m in modules.items()}
    return found | {f"{n}_bias": m.bias.reshape(-1, 4) for n, m in modules.items() if m.bias is not None}


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_the_largest_logit_meets_the_target_and_only_scores_change(family):
    model = FAMILIES[family]()
    state = {name: p.clone() for name, p in model.state_dict().items()}
    before = [{n: t.detach().clone() for n, t in qkv(family, model, i).items()} for i in (0, 1)]
    first = eager_logits(model, IDS)
    target = 0.5 * float(torch.stack(first).median())
    report = lipscope.smooth(model, target=target, input_ids=IDS)
    # The given model is untouched, to the last bit.
    assert all(torch.equal(p, state[name]) for name, p in model.state_dict().items())
    assert report.model is not model
    after = eager_logits(report.model, IDS)
    for layer in (0, 1):
        assert float(after[layer].max()) <= target * (1 + 1e-12)
        changes = [c for c in report.heads if c.layer == layer]
        assert [c.logit_before for c in changes] == pytest.approx(first[layer].tolist(), rel=1e-9)
        assert [c.logit_after for c in changes] == pytest.approx(after[layer].tolist(), rel=1e-9)
        gamma = torch.tensor([c.factor for c in changes], dtype=torch.float64)
        new = qkv(family, report.model, layer)
        groups = 4 // new["k"].shape[0]
        key = gamma.reshape(-1, groups).amax(1).sqrt()
        query = gamma / key.repeat_interleave(groups)
        for name, factor in (("q", query), ("k", key), ("v", torch.ones(len(key), dtype=torch.float64))):
            torch.testing.assert_close(new[name], factor[:, None, None] * before[layer][name], rtol=1e-12, atol=0)
            if f"{name}_bias" in new:
                expected = factor[:, None] * before[layer][f"{name}_bias"]
                torch.testing.assert_close(new[f"{name}_bias"], expected, rtol=1e-12, atol=0)
    # In the first layer, whose tokens are the same, a rescaled head meets the target exactly; others are left alone.
    for change in (c for c in report.heads if c.layer == 0):
        if change.logit_before > target:
            assert change.logit_after == pytest.approx(target, rel=1e-4)
        else:
            assert change.factor == 1
    untouched = [n for n, p in report.model.state_dict().items() if torch.equal(p, state[n])]
    assert len(untouched) == len(state) - {"gpt2": 4, "bert": 8, "llama": 4}[family]


def head_of(plain, h, visible, item, x):
    return reference_head(plain, h, x, visible, item=item)


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_sigma_of_heads_meets_the_target_and_the_dense_jacobian_agrees(family):
    model = FAMILIES[family]()
    handle = lipscope.load(model)
    rows = handle.record(input_ids=IDS).rows(scope="head")
    spread = sorted(row["estimate"] for row in rows)
    target = 0.85 * spread[-1]
    report = lipscope.smooth(model, target=target, by="sigma", input_ids=IDS)
    assert report.changed
    after = lipscope.load(report.model)
    recording = after.record(after.token_inputs(input_ids=IDS))
    visible = torch.ones(8, 8, dtype=torch.bool)
    if family != "bert":
        visible = visible.tril()
    for layer in (0, 1):
        plain = recording[layer].attention
        for h in range(4):
            change = next(c for c in report.heads if (c.layer, c.head) == (layer, h))
            exact = 0.0
            for b in range(2):
                x = recording.hosts[layer].tokens[b]
                function = partial(head_of, plain, h, visible, b)
                J = torch.autograd.functional.jacobian(function, x)
                exact = max(exact, float(torch.linalg.matrix_norm(J.reshape(8 * 4, -1), 2)))
            assert exact <= target
            assert change.sigma_after.lower <= exact * (1 + 1e-9)
            assert exact <= change.sigma_after.upper * (1 + 1e-9)


def test_one_head_of_one_layer():
    model = FAMILIES["llama"]()
    report = lipscope.smooth(model, target=0.1, input_ids=IDS, layers=[1], heads=[2])
    assert [(c.layer, c.head) for c in report.heads] == [(1, 2)]
    assert report.heads[0].logit_after == pytest.approx(0.1, rel=1e-4)
    old, new = qkv("llama", model, 1), qkv("llama", report.model, 1)
    # Heads 2 and 3 share a key head, so the query takes the whole factor.
    assert torch.equal(new["k"], old["k"])
    assert torch.equal(new["q"][[0, 1, 3]], old["q"][[0, 1, 3]])
    torch.testing.assert_close(new["q"][2], report.heads[0].factor * old["q"][2], rtol=1e-12, atol=0)


def test_loss_is_that_of_the_language_model():
    torch.manual_seed(0)
    config = tf.GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    model = enlarge(tf.GPT2LMHeadModel(config))
    report = lipscope.smooth(model, target=0.5, input_ids=IDS)
    for module, loss in ((model, report.loss_before), (report.model, report.loss_after)):
        with torch.no_grad():
            assert loss == pytest.approx(float(module(input_ids=IDS, labels=IDS).loss), rel=1e-6)
    assert report.loss_kind == "causal"
    assert "nats per token" in report.cost()
    with torch.no_grad():
        hidden, moved = (m.transformer(input_ids=IDS).last_hidden_state for m in (model, report.model))
    assert report.hidden_change == pytest.approx(float((moved - hidden).norm() / hidden.norm()), rel=1e-6)
    headless = lipscope.smooth(FAMILIES["bert"](), target=0.5, input_ids=IDS)
    assert headless.loss_before is None
    assert "no loss" in headless.cost()


def test_masked_language_models_have_a_loss_too():
    class Tokenizer:
        mask_token_id, all_special_ids = 4, [0, 1, 4]

    torch.manual_seed(0)
    config = tf.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=24)
    report = lipscope.smooth(enlarge(tf.BertForMaskedLM(config)), target=0.5, input_ids=IDS, tokenizer=Tokenizer())
    assert report.loss_kind == "masked"
    assert report.loss_before != report.loss_after
    assert 0 < report.loss_before < 50


def test_in_place_and_given_back_when_it_fails():
    model = FAMILIES["gpt2"]()
    state = {name: p.clone() for name, p in model.state_dict().items()}
    sigma = [row["estimate"] for row in lipscope.load(model).record(input_ids=IDS).rows(scope="head") if row["layer"] == 0]
    # Layer 0 can be brought there, layer 1 cannot: its values alone are larger.
    with torch.no_grad():
        model.h[1].attn.c_attn.weight[:, 32:] *= 100
    state = {name: p.clone() for name, p in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"cannot be reached: sigma of layer 1, head \d gets as low as .* W_V"):
        lipscope.smooth(model, target=0.9 * max(sigma), by="sigma", input_ids=IDS, inplace=True)
    assert all(torch.equal(p, state[name]) for name, p in model.state_dict().items())
    report = lipscope.smooth(model, target=0.2, input_ids=IDS, inplace=True)
    assert report.model is model
    assert max(float(v.max()) for v in eager_logits(model, IDS)) <= 0.2


def test_the_lowest_sigma_that_the_error_names_can_be_had():
    model = FAMILIES["gpt2"]()
    with pytest.raises(ValueError, match="gets as low as") as caught:
        lipscope.smooth(model, target=1e-3, by="sigma", input_ids=IDS, layers=[0], heads=[1])
    lowest = float(str(caught.value).split("as low as ")[1].split()[0])
    report = lipscope.smooth(model, target=1.01 * lowest, by="sigma", input_ids=IDS, layers=[0], heads=[1])
    assert report.heads[0].sigma_after.upper <= 1.01 * lowest


def test_logit_targets_without_a_position_bias_must_be_positive():
    with pytest.raises(ValueError, match=r"target -1 cannot be reached: max-logit of layer 0, head 0 gets as low as"):
        lipscope.smooth(FAMILIES["gpt2"](), target=-1.0, input_ids=IDS)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_factors_are_the_largest_that_meet_the_target(softcap):
    """Against a fine grid of factors, with position biases and a causal mask."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, generator=generator, dtype=torch.float64) * 2 for _ in range(3))
    additive = torch.randn(1, 3, 5, 5, generator=generator, dtype=torch.float64)
    rule = ScoreRule(softcap=softcap, additive=additive, allowed=torch.ones(5, 5, dtype=torch.bool).tril())
    call = CoreCall(nn.Identity(), q, k, v, rule)
    grid = torch.linspace(0, 1, 4001, dtype=torch.float64)
    values = torch.stack([largest_logits(call, g.expand(3)) for g in grid])
    some = 0
    for target in (-1.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 5.0, 50.0):
        found = factors_for_logits(call, target)
        for h in range(3):
            fits = grid[(values[:, h] <= target) & (grid > 0)]
            gamma = float(found.gamma[h])
            if len(fits) == 0:
                assert gamma == 0 or gamma < 1 / 4000
                assert float(found.lowest[h]) == pytest.approx(float(values[:, h].min()), abs=0.05)
            else:
                some += 1
                assert gamma == pytest.approx(float(fits.max()), abs=1 / 2000)
                assert float(largest_logits(call, found.gamma)[h]) <= target * (1 + 1e-12) + 1e-12
    assert some > 10


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("qwen3", r"normalises its queries and keys \(q_norm, k_norm\)"),
        ("olmo2", "normalises its queries and keys"),
        ("albert", "shares its weights with other layers"),
        ("bloom", "keeps its own attention"),
    ],
)
def test_models_whose_scores_cannot_be_rescaled_are_refused_by_name(family, message):
    with pytest.raises(ValueError, match=message):
        lipscope.smooth(FAMILIES[family](), target=1.0, input_ids=IDS)


LAYOUTS = ["gpt_neox", "qwen2", "opt", "t5_encoder", "gemma2"]


@pytest.mark.parametrize("family", LAYOUTS)
def test_other_layouts(family):
    model = FAMILIES[family]()
    handle = lipscope.load(model)
    rows = handle.record(input_ids=IDS).rows()
    target = 0.8 * max(row["max_logit"] for row in rows)
    report = lipscope.smooth(model, target=target, input_ids=IDS)
    assert report.changed
    after = lipscope.load(report.model).record(input_ids=IDS).rows()
    assert max(row["max_logit"] for row in after) <= target * (1 + 1e-9)


def test_half_precision_is_widened():
    model = FAMILIES["gpt2"]().to(torch.bfloat16)
    report = lipscope.smooth(model, target=0.5, input_ids=IDS)
    assert "bfloat16" in report.notes[0]
    assert all(c.logit_after <= 0.5 for c in report.heads)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="inplace=True needs"):
        lipscope.smooth(model, target=0.5, input_ids=IDS, inplace=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "mood"}, "by must be one of max-logit, sigma"),
        ({"target": float("nan")}, "target must be a finite number"),
        ({"layers": [7]}, "layer must lie between 0 and 1"),
        ({"heads": [9]}, "head must lie between 0 and 3"),
        ({"input_ids": None, "n": 8}, "no tokenizer"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        lipscope.smooth(FAMILIES["gpt2"](), **{"target": 1.0, "input_ids": IDS} | options)


def test_save_never_overwrites(tmp_path):
    report = lipscope.smooth(FAMILIES["gpt2"]().float(), target=0.5, input_ids=IDS)
    place = report.save(tmp_path / "deep" / "smooth")
    again = lipscope.load(place).record(input_ids=IDS).rows()
    assert max(row["max_logit"] for row in again) <= 0.5 * (1 + 1e-6)
    said = json.loads((place / "smoothing.json").read_text())
    assert said["target"] == 0.5
    assert len(said["heads"]) == 8
    weights = (place / "model.safetensors").read_bytes()
    for taken in (place, tmp_path):
        with pytest.raises(FileExistsError, match="never overwritten"):
            report.save(taken)
    assert (place / "model.safetensors").read_bytes() == weights
    assert sorted(p.name for p in (tmp_path / "deep").iterdir()) == ["smooth"]


def test_command(tmp_path, monkeypatch):
    def load(name: str, files: object) -> Loaded:
        model = FAMILIES["gpt2"]().float()
        model.resize_token_embeddings(256)
        return Loaded(model, ByteTokenizer(), name, ("random weights",))

    monkeypatch.setitem(ZOO, "tiny", Entry("tiny", "two layers", "none", "none", load))
    run = CliRunner().invoke
    command = ["smooth", "tiny", "--target", "0.5", "--text", "python-docs", "--n", "16", "--inputs", "2"]
    shown = run(app, [*command, "--layers", "1", "--head", "2", "--out", str(tmp_path / "new")])
    assert shown.exit_code == 0, shown.output
    assert "heads rescaled" in shown.output
    assert "no loss" in shown.output
    assert (tmp_path / "new" / "model.safetensors").exists()
    twice = run(app, [*command, "--out", str(tmp_path / "new")])
    assert twice.exit_code == 2
    assert "never overwritten" in twice.output
    as_json = run(app, [*command, "--json"])
    assert json.loads(as_json.stdout)["by"] == "max-logit"
    assert "--head needs --layers" in run(app, [*command, "--head", "1"]).output
    unreachable = run(app, ["smooth", "tiny", "--target", "1e-6", "--by", "sigma", "--n", "16"])
    assert unreachable.exit_code == 2
    assert "gets as low as" in unreachable.output


def test_gpt2_mini_has_its_loss():
    report = lipscope.smooth("gpt2-mini", target=4.0, text="alice", n=32, inputs=1, layers=[0])
    assert report.loss_kind == "causal"
    assert 2 < report.loss_before < 7
    assert all(c.logit_after <= 4.0 for c in report.heads)


@pytest.mark.parametrize("equal", ["keys and queries", "heads of keys", "values and queries", "all three", "rows of zeros"])
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt"])
def test_rows_that_look_the_same_are_rescaled_one_by_one(family, equal):
    """Fused, with shared keys (queries and keys then have other factors), and with keys before values before queries."""
    model = FAMILIES[family]()
    state = {name: p.clone() for name, p in model.state_dict().items()}
    with torch.no_grad():
        first = qkv(family, model, 0)
        rows = first["k"].shape[0]
        if equal in ("keys and queries", "all three"):
            first["k"].copy_(first["q"][:rows])
        if equal == "heads of keys":
            first["k"][1].copy_(first["k"][0])
        if equal in ("values and queries", "all three"):
            first["v"].copy_(first["q"][:rows])
        if equal == "rows of zeros":
            for name in "qkv":
                first[name][:, 1] = 0
        if equal == "all three" and "q_bias" in first:
            for name in "kv":
                first[f"{name}_bias"].copy_(first["q_bias"][:rows])
    assert any(not torch.equal(p, state[name]) for name, p in model.state_dict().items())
    before = {name: t.detach().clone() for name, t in qkv(family, model, 0).items()}
    target = 0.3 * float(eager_logits(model, IDS)[0].max())
    report = lipscope.smooth(model, target=target, input_ids=IDS, layers=[0])
    assert float(eager_logits(report.model, IDS)[0].max()) <= target * (1 + 1e-9)
    gamma = torch.tensor([change.factor for change in report.heads], dtype=torch.float64)
    assert len(set(gamma.tolist())) > 1
    groups = 4 // rows
    key = gamma.reshape(-1, groups).amax(1).sqrt()
    factors = {"q": gamma / key.repeat_interleave(groups), "k": key, "v": torch.ones(rows, dtype=torch.float64)}
    for name, found in qkv(family, report.model, 0).items():
        factor = factors[name[0]].reshape(-1, *[1] * (found.ndim - 1))
        torch.testing.assert_close(found, factor * before[name], rtol=1e-12, atol=0)


def test_a_parameter_that_serves_as_query_and_key_is_refused_by_name():
    model = FAMILIES["opt"]()
    attention = model.decoder.layers[0].self_attn
    attention.k_proj = attention.q_proj
    with pytest.raises(ValueError, match=r"layer 0 .* gives a query and a key, so they cannot be rescaled apart"):
        lipscope.smooth(model, target=0.1, input_ids=IDS, layers=[0])


def test_sigma_of_huge_scores_is_brought_down_to_what_even_attention_has():
    """With scores of thousands, even 1/256 of them is far from even attention: the search goes on."""
    model = FAMILIES["gpt2"]()
    with torch.no_grad():
        model.h[0].attn.c_attn.weight[:, :32] *= 300
    flat = lipscope.smooth(model, target=1e-4, input_ids=IDS, layers=[0], heads=[0])
    target = 1.05 * flat.heads[0].sigma_after.upper
    report = lipscope.smooth(model, target=target, by="sigma", input_ids=IDS, layers=[0], heads=[0])
    assert report.heads[0].factor < 1 / 256
    assert report.heads[0].sigma_after.upper <= target


def test_one_token_has_no_loss():
    config = tf.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=4, n_positions=32, bos_token_id=1, eos_token_id=2)
    model = enlarge(tf.GPT2LMHeadModel(config))
    with pytest.raises(ValueError, match=r"inputs of 1 token have no next token.* at least 2 tokens"):
        lipscope.smooth(model, target=0.5, input_ids=IDS[:, :1])
    # Without a loss there is nothing to refuse.
    report = lipscope.smooth(FAMILIES["gpt2"](), target=0.1, input_ids=IDS[:, :1])
    assert all(change.logit_after <= 0.1 for change in report.heads)
