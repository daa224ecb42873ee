"""Certificates, bounds and statistics in the rows of a scan, each against an independent computation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lipscope
from lipscope.attention.norms import LayerNorm, RMSNorm
from lipscope.measure.columns import COLUMNS
from lipscope.models.affine import normalisation_of
from lipscope.models.model import Model
from lipscope.models.seam import plain_experts
from model_families import FAMILIES

IDS = torch.tensor([[5, 9, 2, 31, 7, 44], [3, 3, 12, 8, 40, 1]])


def projections(model: nn.Module, family: str) -> dict[str, Tensor]:
    """W_Q, W_K, W_V, W_O and b_Q of the second layer, taken from the modules by name."""
    model.requires_grad_(False)
    if family == "bert":
        inner, out = model.encoder.layer[1].attention.self, model.encoder.layer[1].attention.output.dense
        return {"q": inner.query.weight, "k": inner.key.weight, "v": inner.value.weight, "out": out.weight,
                "b": inner.query.bias}  # fmt: skip
    attention = model.h[1].attn
    q, k, v = attention.c_attn.weight.mT.split(16)
    return {"q": q, "k": k, "v": v, "out": attention.c_proj.weight.mT, "b": attention.c_attn.bias[:16]}


def by_hand(w: dict[str, Tensor], h: int, R: float, n: int, causal: bool) -> tuple[float, float]:
    """(refined, castin2024) of head h before W_O, from the formulas of docs/theory written out once more."""
    rows = slice(4 * h, 4 * h + 4)
    V = float(torch.linalg.svdvals(w["v"][rows])[0])
    A = float(torch.linalg.svdvals(w["k"][rows].mT @ w["q"][rows])[0]) / 2
    drift = A * R + float((w["k"][rows].mT @ w["b"][rows]).norm()) / 2
    half = drift * R
    q = math.exp(-2 * half)
    column = sum(1 / (1 + i * q) for i in range(n)) if causal else n / (1 + (n - 1) * q)
    refined = math.hypot(V, V * R * drift) * math.sqrt(column) + V * R * A * R
    general = math.sqrt(3 * (n * V**2 + 4 * n * (V * R * drift) ** 2 + (V * R * A * R) ** 2))
    meanfield = (V + 2 * V * R * drift + V * R * A * R) * math.exp(2 * half)
    if causal:
        free = (2 * V + 2 ** (5 / 3) * V * R * drift) * math.exp(half) + V * R * A * R
        return min(refined, free), general
    return refined, min(general, meanfield)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_bounds_of_heads_are_the_formulas(family: str) -> None:
    model = FAMILIES[family]()
    # Small weights, so that both members of every minimum matter.
    for scale, handle in ((1.0, Model(model)), (0.05, Model(_shrunk(FAMILIES[family](), 0.05)))):
        rows = handle.record(input_ids=IDS).rows(scope="head", layers=[1])
        assert len(rows) == 8
        w = projections(handle.model, family)
        for row in rows:
            assert row["lower"] <= row["estimate"] <= row["upper"]
            for column, R in (("", row["radius_max"]), ("_global", row["radius_norm"])):
                refined, castin = by_hand(w, row["head"], R, 6, family == "gpt2")
                assert row[f"refined{column}"] == pytest.approx(refined, rel=1e-4), (scale, column)
                assert row[f"castin2024{column}"] == pytest.approx(castin, rel=1e-6), (scale, column)
                assert row["estimate"] <= row[f"refined{column}"] <= row[f"castin2024{column}"] * (1 + 1e-9)


def _shrunk(model: nn.Module, factor: float) -> nn.Module:
    for name, p in model.named_parameters():
        if any(part in name for part in ("query", "key", "c_attn")):
            p.data *= factor
    return model


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5_encoder", "vit", "torch_pre_norm", "albert", "opt"])
def test_upper_ends_and_bounds_hold_for_the_dense_jacobian(family: str) -> None:
    handle = Model(FAMILIES[family]())
    recording = handle.record(_inputs(handle, family))
    for scope in ("attention", "head"):
        rows = recording[1 % len(handle.layers)].sigma(scope, certificate=True, solver=lipscope.GolubKahan()).to_rows()
        J = recording[1 % len(handle.layers)].operator("attention", analytic=False).to_dense()
        for row in rows:
            assert row["certified"] is not None
            if scope == "attention":
                exact = float(torch.linalg.svdvals(J[row["input"]])[0])
                assert row["lower"] <= exact * (1 + 1e-9)
                assert exact <= row["upper"] * (1 + 1e-9)
                assert exact <= row["certified"]
                assert row["upper"] <= row["certified"] * (1 + 1e-9)


def _inputs(handle: Model, family: str) -> dict[str, Tensor]:
    from lipscope.models.inputs import probe_inputs

    return {"input_ids": IDS} if family in ("bert", "gpt2", "t5_encoder", "albert", "opt") else probe_inputs(handle.model)


@pytest.mark.parametrize("family", ["gpt2", "vit", "t5_encoder"])
def test_certificates_reach_through_the_normalisation(family: str) -> None:
    handle = Model(FAMILIES[family]())
    recording = handle.record(_inputs(handle, family))
    result = recording[1].sigma("norm+attention", certificate=True)
    J = recording[1].operator("norm+attention").to_dense()
    exact = torch.linalg.svdvals(J)[:, 0]
    assert bool((exact <= result.certified).all())
    assert bool((result.certified <= 60 * exact).all())


NORMS = {
    "bert": LayerNorm, "gpt2": LayerNorm, "opt": LayerNorm, "gpt_neo": LayerNorm, "mpnet": LayerNorm, "vit": LayerNorm,
    "llama": RMSNorm, "gemma2": RMSNorm, "t5_encoder": RMSNorm, "modernbert": LayerNorm, "whisper_encoder": LayerNorm,
    "torch_pre_norm": LayerNorm, "olmo2": None, "albert": LayerNorm,
}  # fmt: skip


@pytest.mark.parametrize("family", NORMS)
def test_the_normalisation_before_attention_is_found(family: str) -> None:
    handle = Model(FAMILIES[family]())
    recording = handle.record(handle_inputs := _probe(handle))
    assert handle_inputs
    last = len(handle.layers) - 1
    norm = recording[last].norm
    if NORMS[family] is None:
        assert norm is None
        return
    assert isinstance(norm, NORMS[family])
    norms = recording.hosts[last].tokens.norm(dim=-1)
    # The tokens lie in the image of the normalisation, whose radius a search from many starts does not exceed.
    assert float(norms.max()) <= norm.image_radius() * (1 + 1e-9)
    far = norm(torch.randn(500, norm.weight.numel(), dtype=torch.float64) * norm.weight)
    assert float(far.norm(dim=-1).max()) <= norm.image_radius() * (1 + 1e-9)


def _probe(handle: Model) -> dict[str, Tensor]:
    from lipscope.models.inputs import probe_inputs

    return probe_inputs(handle.model)


def test_a_module_that_only_looks_like_a_normalisation_is_not_believed() -> None:
    class SoftNorm(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(super().forward(x))

    like = torch.randn(2, 3, 8, dtype=torch.float64)
    assert normalisation_of(SoftNorm(8).double(), like) is None
    assert normalisation_of(nn.LayerNorm(8, eps=0.1).double(), like).eps == 0.1
    assert normalisation_of(nn.BatchNorm1d(3).double().eval(), like) is None
    assert isinstance(normalisation_of(nn.RMSNorm(8, eps=1e-5).double(), like), RMSNorm)


def test_columns_are_all_there_and_padding_changes_nothing() -> None:
    handle = Model(FAMILIES["bert"]())
    padded = torch.tensor([[5, 9, 2, 31, 0, 0], [3, 3, 12, 8, 40, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    together = handle.record(input_ids=padded, attention_mask=mask).rows(layers=[1])
    alone = handle.record(input_ids=padded[:1, :4]).rows(layers=[1]) + handle.record(input_ids=padded[1:]).rows(layers=[1])
    for a, b in zip(together, alone, strict=True):
        assert list(a) == list(COLUMNS)
        for name in ("n", "estimate", "refined", "refined_global", "radius_max", "radius_rms", "radius_norm", "entropy",
                     "max_logit", "sink_mass"):  # fmt: skip
            assert a[name] == pytest.approx(b[name], rel=1e-7), name
        assert a["castin2024"] >= b["castin2024"] * (1 - 1e-9)
        assert a["seconds"] > 0


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "gpt2"])
def test_statistics_are_those_of_the_models_own_probabilities(family: str) -> None:
    """Against the probabilities and scores that transformers' eager attention computes."""
    model = FAMILIES[family]()
    handle = Model(model)
    rows = handle.record(input_ids=IDS).rows(scope="head", layers=[1])
    model.set_attn_implementation("eager")
    with torch.no_grad(), plain_experts(model):
        P = model(IDS, output_attentions=True, use_cache=False).attentions[1].double()
    for row in rows:
        p = P[row["input"], row["head"], :, : IDS.shape[1]]
        assert row["entropy"] == pytest.approx(float(-torch.special.xlogy(p, p).sum(-1).mean()), rel=1e-5)
        sink = float((1 - p.sum(-1)).mean()) if family == "gpt_oss" else 0.0
        assert row["sink_mass"] == pytest.approx(float(p[:, 0].mean()) + sink, rel=1e-5)
        assert row["lower"] <= row["estimate"] <= row["upper"]


def test_the_largest_logit_is_that_of_the_visible_scores() -> None:
    model = FAMILIES["gpt2"]()
    handle = Model(model)
    recording = handle.record({"input_ids": IDS})
    w = projections(model, "gpt2")
    bias = model.h[1].attn.c_attn.bias
    X = recording.hosts[1].tokens
    for row in handle.record(input_ids=IDS).rows(scope="head", layers=[1]):
        part, h = X[row["input"]], slice(4 * row["head"], 4 * row["head"] + 4)
        scores = (part @ w["q"][h].mT + bias[:16][h]) @ (part @ w["k"][h].mT + bias[16:32][h]).mT / 2
        seen = torch.ones(6, 6, dtype=torch.bool).tril()
        assert row["max_logit"] == pytest.approx(float(scores[seen].max()), rel=1e-9)


def test_the_how_to_explains_every_column() -> None:
    page = (Path(__file__).parent.parent / "docs" / "how-to" / "scan-your-model.md").read_text(encoding="utf-8")
    for name, meaning in COLUMNS.items():
        assert f"| `{name}` | {meaning} |" in page


def test_a_fresh_recording_looks_at_the_normalisation_again() -> None:
    model = FAMILIES["gpt2"]()
    handle = lipscope.load(model)
    before = handle.record(input_ids=IDS).rows(layers=[1])[0]["radius_norm"]
    with torch.no_grad():
        handle.layers[1].norm.weight.mul_(10)
    rows = handle.record({"input_ids": IDS}, fresh=True).rows(layers=[1])
    assert all(row["radius_norm"] >= row["radius_max"] * (1 - 1e-6) for row in rows)
    assert rows[0]["radius_norm"] > 5 * before


def test_who_sees_whom_is_counted_at_the_length_that_was_asked_for() -> None:
    weights = torch.eye(3, dtype=torch.float64)
    layer = lipscope.Attention(weights, weights, weights, mask=torch.ones(5, 5, dtype=torch.bool).tril())
    assert lipscope.bounds.evaluate("refined.visibility", layer, radius=1.0, n=5).value > 0
    with pytest.raises(ValueError, match="mask tensor is for n = 5 tokens"):
        lipscope.bounds.evaluate("refined.visibility", layer, radius=1.0, n=7)
