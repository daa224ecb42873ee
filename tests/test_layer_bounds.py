"""Bounds of a model's layers: σ at the text's tokens below every bound, the radius of the model's own normalisation."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

import lipscope
from lipscope.bounds.pairs import lower_measured
from lipscope.cli.main import app
from lipscope.models.checkpoints import Loaded
from lipscope.models.layer_bounds import layer_bounds
from lipscope.models.load import ZOO, ByteTokenizer, Entry
from lipscope.models.model import Model
from model_families import FAMILIES

IDS = torch.tensor([5, 9, 2, 31, 7, 44])


@pytest.mark.parametrize(("family", "head"), [("bert", None), ("bert", 2), ("gpt2", None), ("gpt2", 3), ("t5_encoder", 1)])
def test_every_bound_holds(family: str, head: int | None) -> None:
    handle = Model(FAMILIES[family]())
    found = layer_bounds(handle, 1, head=head, input_ids=IDS)
    recording = handle.record({"input_ids": IDS[None]})
    J = recording[1].operator("attention" if head is None else "head", analytic=False).to_dense()[0]
    if head is not None:
        J = J.reshape(6, 4, 4, -1)[:, head].reshape(24, -1)
    exact = float(torch.linalg.svdvals(J)[0])
    assert float(found.table.sigma.estimate) == pytest.approx(exact, rel=1e-4)
    norm = recording[1].norm
    assert found.radius_from == "normalisation"
    assert found.table.radius == pytest.approx(norm.image_radius())
    assert found.radius_tokens == pytest.approx(float(recording.hosts[1].tokens.norm(dim=-1).max()))
    ratios = 0
    for bound in found.table.bounds:
        ratio = found.table.ratio(bound)
        if ratio is not None:
            ratios += 1
            assert bound.value >= exact * (1 - 1e-9), bound.name
            assert ratio == pytest.approx(bound.value / exact, rel=1e-4)
    assert ratios >= 6
    names = [bound.name for bound in found.table.bounds]
    assert {"castin2024.general", "certificates.row_gram", "lower.measured"} <= set(names)
    rows = found.to_rows()
    assert [row["name"] for row in rows] == names
    assert rows[0]["layer"] == 1
    assert "which its own normalisation guarantees" in str(found)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_lower_bound_is_attained_inside_the_ball_and_below_the_upper_ones(family: str) -> None:
    handle = Model(FAMILIES[family]())
    recording = handle.record({"input_ids": IDS[None]})
    layer = recording[1].attention
    found = lower_measured(layer, 3.0, 6)
    assert float(found.tokens.norm(dim=-1).max()) <= 3.0 * (1 + 1e-9)
    J = torch.autograd.functional.jacobian(lambda x: layer(x), found.tokens).reshape(96, 96)
    exact = float(torch.linalg.svdvals(J)[0])
    assert exact * (1 - 1e-2) <= found.value <= exact * (1 + 1e-9)
    # As good as the search in all d dimensions.
    assert found.value >= 0.9 * lower_measured(layer, 3.0, 6).value
    uppers = [b.value for b in layer_bounds(handle, 1, n=6, radius=3.0).table.bounds if b.side == "upper" and b.kind == "set"
              and b.norm == "Frobenius"]  # fmt: skip
    assert found.value <= min(uppers)


def test_without_tokens_there_are_set_bounds_only() -> None:
    handle = Model(FAMILIES["gpt2"]())
    found = layer_bounds(handle, -1, n=9)
    assert found.table.sigma is None
    assert found.layer == 1
    assert {bound.kind for bound in found.table.bounds} == {"set"}
    assert {"refined.masked", "castin2024.general"} <= {bound.name for bound in found.table.bounds}
    # At the same radius, the same numbers as with tokens.
    with_tokens = layer_bounds(handle, -1, input_ids=torch.arange(9))
    assert found.table["refined.masked"].value == pytest.approx(with_tokens.table["refined.masked"].value)
    raw = lipscope.load(FAMILIES["torch_pre_norm"]())
    assert layer_bounds(raw, 0, n=3).radius_from == "normalisation"


def test_layers_without_closed_form_or_normalisation_say_so() -> None:
    with pytest.raises(ValueError, match="layer 1 of MPNetModel"):
        layer_bounds(Model(FAMILIES["mpnet"]()), 1, input_ids=IDS)
    raw = lipscope.load(FAMILIES["torch_post_norm"]())
    with pytest.raises(ValueError, match="nothing bounds its tokens"):
        layer_bounds(raw, 0, n=3)
    assert layer_bounds(raw, 0, n=3, radius=2.0).radius_from == "given"


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, files: object) -> Loaded:
        model = FAMILIES["bert"]()
        model.resize_token_embeddings(256)
        return Loaded(model, ByteTokenizer(), name, ("random weights",))

    monkeypatch.setitem(ZOO, "tiny", Entry("tiny", "two layers", "none", "none", load))


@pytest.mark.usefixtures("_tiny")
def test_command() -> None:
    run = CliRunner().invoke
    shown = run(app, ["bounds", "tiny", "--layer", "1"])
    assert shown.exit_code == 0, shown.output
    for word in ("tiny, layer 1", "measured σ", "python-docs", "castin2024.general", "random weights"):
        assert word in shown.output
    rows = json.loads(run(app, ["bounds", "tiny", "--layer", "-1", "--head", "2", "--n", "8", "--json"]).output)
    assert {row["sigma"] for row in rows} == {None}
    assert {(row["layer"], row["head"], row["n"]) for row in rows} == {(1, 2, 8)}
    rows = json.loads(run(app, ["bounds", "tiny", "--layer", "0", "--text", "python-docs", "--n", "8", "--json"]).output)
    assert all(row["sigma"] > 0 for row in rows)


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tiny", "--tokens", "x.safetensors"], "--tokens belongs to a weights file"),
        (["tiny", "--say", "hello", "--n", "5"], "--n belongs to a text, but --say gives the words themselves"),
        (["tiny", "--layer", "5"], "layer must lie between 0 and 1, got 5"),
        (["tiny", "--layer", "0", "--head", "9"], "head must lie between 0 and 3"),
        (["tiny", "--layer", "0", "--mask", "causal"], "--mask belongs to a weights file"),
        (["tiny", "--layer", "0", "--n", "500"], "32 positions"),
        (["tiny", "--layer", "0", "--n", "0"], "n must be at least 1"),
        (["tiny", "--layer", "0", "--radius", "-1"], "radius must be positive"),
        (["tiny", "--layer", "0", "--text", "nowhere"], "neither a corpus"),
        (["x.safetensors", "--layer", "0", "--head", "1"], "--layer belongs to a model"),
        (["x.safetensors"], "no such file"),
    ],
)
def test_one_clear_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bounds", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
