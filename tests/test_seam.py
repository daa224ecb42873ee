"""The attention core behind the transformers interface, and the self-tests that guard it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lipscope.attention.scores import ScoreRule
from lipscope.models import seam
from lipscope.models.capture import replaying
from lipscope.models.model import Model
from lipscope.models.seam import attention_core
from lipscope.models.selftest import SelfTestError
from model_families import FAMILIES, enlarge

B, H, HKV, N, D = 2, 4, 2, 5, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reference(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
    k, v = (t.repeat_interleave(H // HKV, dim=1) for t in (k, v))
    s = q @ k.mT
    if rule.softcap is not None:
        s = rule.softcap * torch.tanh(s / rule.softcap)
    if rule.additive is not None:
        s = s + rule.additive
    if rule.allowed is not None:
        s = s.masked_fill(~rule.allowed, -1e300)
    if rule.sinks is not None:
        s = torch.cat([s, rule.sinks[None, :, None, None].expand(B, H, N, 1)], dim=-1)
    return (s.softmax(-1)[..., :N] @ v).transpose(1, 2)


RULES = {
    "plain": ScoreRule(),
    "causal": ScoreRule(allowed=torch.ones(N, N, dtype=torch.bool).tril()),
    "softcap": ScoreRule(softcap=1.5),
    "bias": ScoreRule(additive=draw(1, H, N, N, seed=9)),
    "sinks": ScoreRule(sinks=draw(H, seed=8)),
    "all": ScoreRule(1.5, draw(B, H, N, N, seed=7), torch.ones(N, N, dtype=torch.bool).tril(), draw(H, seed=6)),
}


@pytest.mark.parametrize("name", RULES)
def test_backward_is_the_transpose_and_its_backward_the_jacobian(name: str) -> None:
    rule = RULES[name]
    points = [draw(B, h, N, D, seed=i).requires_grad_() for i, h in enumerate((H, HKV, HKV))]
    actual, expected = attention_core(*points, rule), reference(*points, rule)
    torch.testing.assert_close(actual, expected)
    g = draw(*actual.shape, seed=4).requires_grad_()
    pulled = torch.autograd.grad(actual, points, g, create_graph=True)
    wanted = torch.autograd.grad(expected, points, g, create_graph=True)
    for a, b in zip(pulled, wanted, strict=True):
        torch.testing.assert_close(a, b)
    u = [draw(*p.shape, seed=5 + i) for i, p in enumerate(points)]
    (pushed,) = torch.autograd.grad(pulled, g, u, retain_graph=True)
    torch.testing.assert_close(pushed, torch.autograd.grad(wanted, g, u)[0])
    # The second derivative is not provided, and says so.
    assert torch.autograd.grad(pulled, points[0], u)[0].isnan().all()


def test_hidden_rows_give_zero_and_zero_derivative() -> None:
    allowed = torch.ones(N, N, dtype=torch.bool)
    allowed[2] = False
    q, k, v = (draw(B, h, N, D, seed=i).requires_grad_() for i, h in enumerate((H, HKV, HKV)))
    o = attention_core(q, k, v, ScoreRule(allowed=allowed))
    assert not o[:, 2].any()
    (gradient,) = torch.autograd.grad(o[:, 2].sum(), v)
    assert not gradient.any()


def test_a_mask_written_with_the_lowest_float32_hides_in_float64_too() -> None:
    mask = torch.zeros(1, 1, N, N, dtype=torch.float32).masked_fill(~torch.ones(N, N).bool().tril(), -3.4028e38).double()
    rule = seam.score_rule(mask, None, None, None, torch.float64, N)
    assert torch.equal(rule.allowed[0, 0], torch.ones(N, N).bool().tril())
    assert rule.additive is None


def test_a_lost_causal_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(*args: Any, **kwargs: Any) -> Tensor:
        return torch.ones_like(mask(*args, **kwargs))

    mask = seam.seam_mask
    monkeypatch.setattr(seam, "seam_mask", everything)
    with pytest.raises(SelfTestError, match="claims to be causal, but output token"):
        Model(FAMILIES["gpt2"]())


def test_a_dropped_ingredient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = seam.seam_attention
    monkeypatch.setattr(seam, "seam_attention", lambda *a, **k: original(*a, **(k | {"softcap": None})))
    with pytest.raises(SelfTestError, match="does not hand over"):
        Model(FAMILIES["gemma2"]())


class _Wrapped(nn.Module):
    """W_O with something wrong about it."""

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.linear, self.kind, self.calls = linear, kind, 0
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        if self.kind == "random":
            return y + 1e-6 * torch.randn_like(y)
        return torch.tanh(y) if self.kind == "bent" else y + (self.calls > 1)


class WrappedLinear(_Wrapped):
    """Counted as a linear map by its name."""


@pytest.mark.parametrize(
    ("kind", "message"),
    [("random", "another answer when repeated"), ("bent", "sum over its 4 heads"), ("stateful", "replaying the recorded")],
)
def test_misbehaving_layers_are_refused(kind: str, message: str) -> None:
    model = FAMILIES["vit"]()
    attention = model.layers[1].attention
    attention.o_proj = WrappedLinear(attention.o_proj, kind)
    with pytest.raises(SelfTestError, match=message):
        Model(model)


def test_threads_take_turns_at_a_model() -> None:
    """What one thread puts up for its replays, another does not take down."""
    model, left, frozen = FAMILIES["gpt2"](), threading.Event(), list[bool]()

    def second() -> None:
        with replaying(model):
            left.wait(5)
            frozen.append(not any(p.requires_grad for p in model.parameters()))

    thread = threading.Thread(target=second)
    with replaying(model):
        thread.start()
        thread.join(0.1)
    left.set()
    thread.join(5)
    assert frozen == [True]


def test_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training mode with dropout"):
        Model(FAMILIES["bert"]().train())


def test_encoder_decoder_models_ask_which_part() -> None:
    import transformers as tf

    config = tf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
    model = enlarge(tf.T5Model(config))
    with pytest.raises(ValueError, match="say which part"):
        Model(model)
    assert len(Model(model, part="encoder").layers) == 2


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="neither a transformers model"):
        Model(nn.Sequential(nn.Linear(3, 3)))


def test_damaged_weights_name_the_layer() -> None:
    model = FAMILIES["bert"]()
    handle = Model(model)
    model.encoder.layer[1].attention.output.dense.weight.data[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"layer 1 \(encoder\.layer\.1\)"):
        handle.record({"input_ids": torch.tensor([[1, 2, 3]])})


def test_half_precision_models_are_measured_in_float32() -> None:
    model = FAMILIES["llama"]().bfloat16()
    handle = Model(model)
    assert handle.dtype == torch.float32
    assert next(model.parameters()).dtype == torch.bfloat16
