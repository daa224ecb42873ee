"""Models with low-rank adapters: adapted layers only, σ beside the base model's, and changes per step.

PEFT is not installed here. ``LoraLinear`` has the structure and the names that PEFT gives an adapted layer.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lipscope
from lipscope.training import Monitor, QKClip
from model_families import enlarge
from test_monitor import assert_same_weights, batches, llama, train
from test_smoothing import eager_logits

NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")
SOLVER = lipscope.GolubKahan(rtol=1e-8)


class LoraLinear(nn.Module):
    """W x + s B A x."""

    def __init__(self, base: nn.Linear, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_layer = base
        generator = torch.Generator().manual_seed(seed)
        down, up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        for part in (down, up):
            nn.init.normal_(part.weight, std=0.5, generator=generator)
        self.lora_A, self.lora_B = nn.ModuleDict({"default": down}), nn.ModuleDict({"default": up})
        self.lora_dropout = nn.ModuleDict({"default": nn.Dropout(dropout) if dropout else nn.Identity()})
        self.scaling = {"default": 2.0}

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.lora_A["default"](self.lora_dropout["default"](x))
        return self.base_layer(x) + self.scaling["default"] * self.lora_B["default"](low)

    def merged(self) -> nn.Linear:
        found = copy.deepcopy(self.base_layer)
        with torch.no_grad():
            found.weight += self.scaling["default"] * self.lora_B["default"].weight @ self.lora_A["default"].weight
        return found


class Adapted(LoraLinear):
    """The same under a name that does not say what it is, as adapters of quantised layers have (``Linear4bit``)."""


class Magnitudes(LoraLinear):
    """Rows of a length of their own, as in DoRA: their direction alone comes from W and B A."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        merged = self.merged().weight
        return super().forward(x) / merged.norm(dim=1)


def put(model: nn.Module, layers: list[int], names: tuple[str, ...], make) -> nn.Module:
    for index in layers:
        attention = model.model.layers[index].self_attn
        for name in names:
            setattr(attention, name, make(getattr(attention, name)))
    return model


@pytest.mark.parametrize("kind", [LoraLinear, Adapted])
@pytest.mark.parametrize("names", [("q_proj", "v_proj"), NAMES])
def test_adapted_layers_only_beside_the_base_model(names, kind):
    base = enlarge(llama()).float()
    adapted = put(copy.deepcopy(base), [1], names, lambda inner: kind(inner, seed=3))
    merged = put(copy.deepcopy(adapted), [1], names, lambda inner: inner.merged())
    probe = batches(1)[0]
    monitor = Monitor(adapted.requires_grad_(False), probe=probe, every=1, solver=SOLVER)
    (reading,) = monitor.step().readings
    assert monitor.reason is None
    assert reading.layer == 1
    of_base, of_merged = (
        Monitor(model, probe=probe, layers=[1], solver=SOLVER).step().readings[0].estimate for model in (base, merged)
    )
    assert reading.sigma_base == pytest.approx(of_base, rel=1e-5)
    assert reading.estimate == pytest.approx(of_merged, rel=1e-5)
    # The adapters do something, and are switched on again.
    assert abs(of_merged / of_base - 1) > 0.01
    assert adapted.model.layers[1].self_attn.q_proj.scaling == {"default": 2.0}
    assert f"σ ≈ {of_base:.3g} without adapters" in str(monitor.measure())


@pytest.mark.parametrize(("kind", "dropout"), [(LoraLinear, 0.0), (Adapted, 0.1)])
def test_training_adapters_is_left_alone_to_the_last_bit(dropout, kind):
    plain, watched = (
        put(enlarge(llama()).float(), [0, 1], NAMES, lambda inner: kind(inner, seed=3, dropout=dropout)) for _ in range(2)
    )
    for _ in range(8):
        # Wide enough that the order of sums shows.
        monitor = Monitor(watched, every=2)
        train(plain, None), train(watched, monitor)
        assert monitor.reason is None
        assert_same_weights(plain, watched)
    # With dropout inside an adapter there is no backward bound, and a note says so.
    assert bool(monitor.notes) == bool(dropout)


@pytest.mark.parametrize("kind", [LoraLinear, Adapted])
def test_the_backward_bound_of_adapted_layers_is_that_of_merged_ones(kind):
    adapted = put(enlarge(llama()).float(), [0, 1], NAMES, lambda inner: kind(inner, seed=3))
    merged = put(copy.deepcopy(adapted), [0, 1], NAMES, lambda inner: inner.merged())
    ids, gains = batches(1)[0], []
    for model in (adapted, merged):
        monitor = Monitor(model)
        model(input_ids=ids, labels=ids).loss.backward()
        gains.append(monitor.backward_gains())
    assert gains[0].keys() == gains[1].keys() == {0, 1}
    for layer, gain in gains[0].items():
        assert gain == pytest.approx(gains[1][layer], rel=1e-4)


def test_all_layers_where_no_attention_is_adapted_or_where_they_are_asked_for():
    model = enlarge(llama()).float()
    mlp = model.model.layers[1].mlp
    mlp.up_proj = LoraLinear(mlp.up_proj, seed=0)
    assert [r.layer for r in Monitor(model, probe=batches(1)[0]).step().readings] == [0, 1]
    put(model, [1], ("q_proj",), lambda inner: LoraLinear(inner, seed=3))
    assert [r.layer for r in Monitor(model, probe=batches(1)[0], layers=[0, 1]).step().readings] == [0, 1]


@pytest.mark.parametrize("kind", [LoraLinear, Adapted])
@pytest.mark.parametrize("names", [("q_proj", "v_proj"), NAMES])
def test_qk_clip_rescales_the_product_of_weights_and_adapters_where_it_may(names, kind):
    adapted = put(enlarge(llama()).float(), [0, 1], names, lambda inner: kind(inner, seed=3))
    up = [p for name, p in adapted.named_parameters() if "lora_B" in name]
    kept = [p.detach().clone() for p in up]
    with torch.no_grad():
        for p in up:
            p.zero_()  # as training begins
    with pytest.raises(ValueError, match=r"has low-rank adapters.*saved alone.*base=True"):
        QKClip(adapted, 1.0)
    ids = batches(1)[0]
    clip = QKClip(adapted, 5.0, every=1, inputs=len(ids), base=True)
    with torch.no_grad():
        for p, content in zip(up, kept, strict=True):
            p.copy_(content)

    def merged() -> nn.Module:
        return put(copy.deepcopy(adapted), [0, 1], names, lambda inner: inner.merged()).eval()

    before = merged()
    record = clip.step({"input_ids": ids})
    assert clip.reason is None
    assert {head.layer for head in record.heads} == {0, 1}
    after = merged()
    assert max(float(values.max()) for values in eager_logits(after.model, ids)) <= 5.0 * (1 + 1e-6)
    # W_Q and W_K as wholes: every row is the old one times its factor, the values are the old ones.
    for layer, head in ((layer, head) for layer in (0, 1) for head in range(4)):
        (factor,) = [c.factor for c in record.heads if (c.layer, c.head) == (layer, head)] or [1.0]
        old, new = (model.model.layers[layer].self_attn for model in (before, after))
        products = []
        for part in (old, new):
            keys = part.k_proj.weight.unflatten(0, (-1, part.head_dim))
            query = part.q_proj.weight.unflatten(0, (-1, part.head_dim))[head]
            products.append(query.mT @ keys[head * len(keys) // 4])
        torch.testing.assert_close(products[1], factor * products[0], rtol=1e-4, atol=1e-4 * float(products[0].abs().max()))
        assert torch.equal(old.v_proj.weight, new.v_proj.weight)


def test_qk_clip_refuses_adapters_that_take_the_factor_back():
    adapted = put(enlarge(llama()).float(), [1], ("q_proj",), lambda inner: Magnitudes(inner, seed=3))
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    with pytest.raises(ValueError, match=r"layer 1 .*did not rescale its queries.*DoRA"):
        QKClip(adapted, 1.0, base=True)
    assert all(torch.equal(value, before[name]) for name, value in adapted.state_dict().items())


def test_changes_are_per_step_and_go_on_in_a_resumed_training():
    model = enlarge(llama()).float()
    probe = batches(1)[0]
    monitor = Monitor(model, probe=probe, every=5, layers=[1], solver=SOLVER)
    (first,) = monitor.step(step=5).readings
    assert first.sigma_change is first.logit_change is first.sigma_base is None
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight *= 2
    resumed = Monitor(model, probe=probe, every=5, layers=[1], solver=SOLVER)
    resumed.load_state_dict(monitor.state_dict())
    for watched in (monitor, resumed):
        (second,) = watched.step(step=15).readings
        assert second.logit_change == pytest.approx((second.max_logit - first.max_logit) / 10)
        assert second.sigma_change == pytest.approx((second.estimate - first.estimate) / 10)
        assert second.max_logit > first.max_logit
    # A second look at the same step has no change per step.
    assert monitor.measure(step=15).readings[0].logit_change is None
