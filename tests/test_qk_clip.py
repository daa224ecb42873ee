"""QKClip: afterwards no logit is above τ, heads below keep every bit, and what cannot be rescaled is refused at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipscope.training import QKClip, QKClipCallback
from model_families import FAMILIES, enlarge
from test_smoothing import IDS, LAYOUTS, eager_logits, qkv

lightning = pytest.importorskip("lightning.pytorch")
pytest.importorskip("accelerate")

from lipscope.training.lightning import QKClipCallback as LightningClip  # noqa: E402
from test_monitor_trainers import Sentences, fit, gpt2, trainer  # noqa: E402


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_no_logit_is_above_tau_and_heads_below_keep_every_bit(family):
    model = FAMILIES[family]().train()
    before = [{n: t.detach().clone() for n, t in qkv(family, model, i).items()} for i in (0, 1)]
    logits = eager_logits(model.eval(), IDS)
    tau = float(torch.stack(logits)[0].median())
    clip = QKClip(model.train(), tau, every=1, inputs=len(IDS))
    record = clip.step({"input_ids": IDS})
    after = eager_logits(model.eval(), IDS)
    assert max(float(values.max()) for values in after) <= tau * (1 + 1e-12)
    clipped = {(c.layer, c.head): c for c in record.heads}
    assert {h for layer, h in clipped if layer == 0} == {h for h in range(4) if logits[0][h] > tau}
    for (layer, head), c in clipped.items():
        assert c.after == pytest.approx(float(after[layer][head]), rel=1e-6)
        assert 0 < c.factor < 1
    for layer in (0, 1):
        now = qkv(family, model, layer)
        assert torch.equal(now["v"], before[layer]["v"])
        for head in set(range(4)) - {h for i, h in clipped if i == layer}:
            key = head * now["k"].shape[0] // 4
            assert torch.equal(now["q"][head], before[layer]["q"][head])
            assert torch.equal(now["k"][key], before[layer]["k"][key])
    # Once more: nothing to do, and no bit moves.
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert clip.step({"input_ids": IDS}).heads == ()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("family", LAYOUTS)
def test_rotary_grouped_fused_and_capped_scores(family):
    import lipscope

    model = FAMILIES[family]()
    tau = 0.8 * max(row["max_logit"] for row in lipscope.load(model).record(input_ids=IDS).rows())
    assert QKClip(model, tau, every=1).step({"input_ids": IDS}).heads
    assert max(row["max_logit"] for row in lipscope.load(model).record(input_ids=IDS).rows()) <= tau * (1 + 1e-9)


@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("size", [1e3, 1e4, 1e5])
def test_keys_with_a_huge_common_part(size, made):
    """What a bfloat16 run drifts into: in (W z + b) − b such a bias leaves no digits of W."""
    model = FAMILIES["qwen2"]().float()
    biases = [block.self_attn.k_proj.bias for block in model.layers]
    clip = QKClip(model, 10.0, every=1, inputs=len(IDS)) if made == "before" else None
    with torch.no_grad():
        for bias in biases:
            bias.view(model.config.num_key_value_heads, -1)[:, -1] += size
    kept = [bias.detach().clone() for bias in biases]
    record = (clip or QKClip(model, 10.0, every=1, inputs=len(IDS))).step({"input_ids": IDS})
    assert record.heads
    assert max(float(values.max()) for values in eager_logits(model.eval(), IDS)) <= 10.0 * (1 + 1e-4)
    assert all(bool((bias.abs() <= old.abs()).all()) for bias, old in zip(biases, kept, strict=True))


class LoRA(nn.Linear):
    """W + BA, not merged."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__(inner.in_features, inner.out_features, dtype=inner.weight.dtype)
        self.load_state_dict(inner.state_dict())
        self.down = nn.Parameter(torch.randn(2, inner.in_features, dtype=inner.weight.dtype))
        self.up = nn.Parameter(torch.randn(inner.out_features, 2, dtype=inner.weight.dtype))

    def forward(self, x):
        return super().forward(x) + x @ self.down.mT @ self.up.mT


def test_what_cannot_be_rescaled_is_refused_before_training():
    for family, message in (
        ("qwen3", "normalises its queries"),
        ("albert", "shares its weights"),
        ("bloom", "keeps its own"),
    ):
        with pytest.raises(ValueError, match=message):
            QKClip(FAMILIES[family](), 1.0)
    adapted = FAMILIES["bert"]()
    attention = adapted.encoder.layer[1].attention.self
    attention.query = LoRA(attention.query)
    with pytest.raises(ValueError, match=r"in none of its weight matrices.*merge adapters"):
        QKClip(adapted, 1.0)
    with pytest.raises(ValueError, match="needs weights in float32 or float64"):
        QKClip(FAMILIES["gpt2"]().bfloat16(), 1.0)
    for options in ({"tau": 0.0}, {"tau": float("nan")}, {"tau": 1.0, "every": 0}):
        for kind in (QKClipCallback, LightningClip):
            with pytest.raises(ValueError, match="must be"):
                kind(**options)


def test_a_failure_does_not_stop_training_and_leaves_the_weights_as_they_were(monkeypatch):
    model = FAMILIES["gpt2"]()
    weight = model.h[0].attn.c_attn.weight
    kept = weight.detach().clone()
    lost, broken = (QKClip(model, 0.5 * float(eager_logits(model, IDS)[0].max()), every=1) for _ in range(2))
    with torch.no_grad():
        weight[0, 0] = float("inf")
    with pytest.warns(UserWarning, match="QKClip has switched itself off.*NaN or infinite"):
        assert lost.step({"input_ids": IDS}).heads == ()
    with torch.no_grad():
        weight.copy_(kept)
    assert lost.step({"input_ids": IDS}).heads == ()

    def fail(*args):
        raise RuntimeError("does not fit")

    monkeypatch.setattr("lipscope.training.rescale.check_rescaled", fail)
    with pytest.warns(UserWarning, match="QKClip has switched itself off.*does not fit"):
        assert broken.step({"input_ids": IDS}).heads == ()
    assert torch.equal(weight, kept)  # what was half done is taken back


def test_gradients_modes_and_checkpointing_are_left_alone():
    model = enlarge(gpt2()).float().train()
    model.gradient_checkpointing_enable()
    clip = QKClip(torch.compile(model, backend="eager"), 0.1, every=2)
    ids = Sentences().ids[:3]
    for step in range(1, 5):
        model(input_ids=ids, labels=ids).loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        record = clip.step()  # what the model was called with
        assert bool(record.heads) == (step == 2)
        assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
        assert all(module.training for module in model.modules())
        model.zero_grad()
    clip.close()
    assert not model._forward_pre_hooks


def test_trainer_holds_the_logits(tmp_path):
    free, held, callback = trainer(tmp_path / "a"), trainer(tmp_path / "b"), QKClipCallback(0.05, every=1)
    held.add_callback(callback)
    held.add_callback(callback)  # twice: acts once
    for run in (free, held):
        run.train()
    assert callback.records
    assert all(head.after <= 0.05 for record in callback.records for head in record.heads)
    assert len({record.step for record in callback.records}) == len(callback.records)
    assert all(record.loss_before and record.loss_after for record in callback.records)
    logged = [name for row in held.state.log_history for name in row if name.endswith("/qk_clip")]
    assert len(logged) == sum(len(record.heads) for record in callback.records)
    losses = [row["lipscope/qk_clip_loss_after"] for row in held.state.log_history if "lipscope/qk_clip_loss_after" in row]
    assert losses == [record.loss_after for record in callback.records]
    assert not held.model._forward_pre_hooks
    two = QKClipCallback(1.0)
    with pytest.raises(ValueError, match="works in one process"):
        two.start(gpt2(), 2)


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
def test_lightning_holds_the_logits(tmp_path):
    callback = LightningClip(0.05, every=2)
    module, _ = fit(tmp_path, callback)
    assert {record.step for record in callback.records} <= {2, 4}
    assert all(head.after <= 0.05 for record in callback.records for head in record.heads)
    assert callback.records
    assert not module.lm._forward_pre_hooks
