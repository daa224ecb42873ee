"""How the worst σ grows, the figures, and the command."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import cases
import lipscope
from lipscope.bounds.domain import image as image_of
from lipscope.cli.main import app
from lipscope.models.load import ZOO, ByteTokenizer, Entry, Loaded
from lipscope.studies.worst_case import construct, growth
from model_families import FAMILIES

runner = CliRunner()
IDENTITY = torch.eye(2, dtype=torch.float64)
REPULSIVE = lipscope.Attention(-3 * IDENTITY, IDENTITY, IDENTITY, scale=1.0)


def test_square_root_growth_below_the_border_and_none_beyond():
    """R = √2: n·E ≪ e^E = e^{12}, so σ ~ √n; R = 0.7: e^{2.94} ≈ 19 ≪ n, σ has levelled off."""
    below = growth(REPULSIVE, [32, 64, 97, 160], radius=2**0.5)
    # √(n−1), and 1 + (1−p)E with (1−p)E ≤ 0.012.
    assert below.fit.alpha == pytest.approx(0.5, abs=0.02)
    assert below.fit.alpha_low <= below.fit.alpha <= below.fit.alpha_high
    beyond = growth(REPULSIVE, [64, 97, 160, 240], radius=0.7)
    assert abs(beyond.fit.alpha) < 0.03
    # The single token decays there, the groups do not.
    assert beyond.fits["pair"].alpha < -0.2
    assert abs(beyond.fits["groups"].alpha) < 0.03


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_worst_inputs_lie_between_constructions_and_bounds(mask):
    layer = REPULSIVE.with_mask(mask)
    real = cases.random(40, 2, seed=3)
    study = growth(layer, [2, 5, 9], radius=1.2, method="ascend", restarts=8, steps=25, starts=lambda n: 0.3 * real[:n])
    for w in study.worst:
        built = construct(layer, w.n, radius=1.2)
        assert all(float(w.sigma.estimate) >= float(c.sigma.estimate) * (1 - 1e-9) for c in built)
        assert all(float(w.sigma.lower) <= value * (1 + 1e-9) for value in w.bounds.values())
        assert w.source == "ascent"
        assert w.given is not None
        assert w.given <= float(w.sigma.estimate)
        assert "given" in w.ascent.labels
    assert "shorter" in study.worst[-1].ascent.labels
    curves = study.curves()
    assert {"worst", "ascent", "given", "pair", "castin2024.general"} <= curves.keys()
    assert all(len(values) == 3 for values in curves.values())
    rows = study.to_rows()
    assert sum(row["worst"] for row in rows) == 3
    assert json.dumps(rows)


def test_what_stands_in_is_not_named_as_the_worst():
    """A = −3I has no positive eigenvalue: ``proposition34.max`` is the general pair, under a name that is not its own."""
    study = growth(REPULSIVE, [4, 8, 16], radius=1.0)
    for w in study.worst:
        noted = {c.name for c in w.built if c.note}
        assert noted == {"proposition34.max"}
        assert w.source not in noted
        assert float(w.sigma.estimate) >= max(float(c.sigma.estimate) for c in w.built) * (1 - 1e-6)
    assert "proposition34.max" not in study.curves().keys() | study.fits.keys()
    assert {"pair", "groups", "proposition34.min"} <= study.curves().keys() & study.fits.keys()
    # The rows still show it, with its note.
    assert all(row["note"] for row in study.to_rows() if row["source"] == "proposition34.max")


def test_names_of_worst_inputs_stay_in_one_piece(weights, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    attractive = {"q": 3 * IDENTITY, "k": IDENTITY, "v": IDENTITY.clone()}
    save_file(attractive, weights)
    rows = json.loads(runner.invoke(app, ["attack", weights, "--radius", "2", "--lengths", "4,64", "--json"]).stdout)["rows"]
    shown = runner.invoke(app, ["attack", weights, "--radius", "2", "--lengths", "4,64"]).stdout
    names = {row["source"] for row in rows if row["worst"]}
    assert max(map(len, names)) >= len("proposition34.max")
    assert all(name in shown for name in names)


def test_bad_lengths_and_methods():
    for lengths, message in (([], "lengths is empty"), ([1, 2], "n must be an integer of at least 2")):
        with pytest.raises(ValueError, match=message):
            growth(REPULSIVE, lengths, radius=1.0)
    with pytest.raises(ValueError, match="method must be 'construct' or 'ascend', got 'climb'"):
        growth(REPULSIVE, [2], radius=1.0, method="climb")
    short = growth(REPULSIVE, [2, 3], radius=1.0)
    with pytest.raises(ValueError, match="a fit needs at least three lengths, this study has 2"):
        _ = short.fit
    silent = lipscope.Attention(IDENTITY, IDENTITY, 0 * IDENTITY)
    with pytest.raises(ValueError, match="σ is 0 at n = 2, 3, 4, and no power law"):
        _ = growth(silent, [2, 3, 4], radius=1.0).fit
    with pytest.raises(ValueError, match="names is empty; constructions are: proposition34"):
        construct(REPULSIVE, 4, radius=1.0, names=[])
    with pytest.raises(ValueError, match=r"radius must be at most 1e\+30"):
        growth(REPULSIVE, [2], radius=1e200)
    # At the limit the search still works, and the scores are refused by their size.
    with pytest.raises(FloatingPointError, match="leave no correct digits"):
        construct(REPULSIVE, 4, radius=1e30)


@pytest.mark.parametrize(
    ("name", "kind", "mask"),
    [("gpt2", "LayerNorm", "causal"), ("bert", "LayerNorm", "full"), ("opt", "LayerNorm", "causal")],
)
def test_layers_of_models_and_their_normalisation(name, kind, mask):
    handle = lipscope.load(FAMILIES[name]())
    ids = torch.tensor([7, 21, 33, 12, 45])
    for layer in (0, 1):
        at = handle.record(input_ids=ids)[layer]
        attention, X = at.weights(), at.tokens()[0]
        assert type(at.norm).__name__ == kind
        assert str(attention.mask) == mask
        # The activations lie in the image, and the layer is the model's.
        image = image_of(at.norm)
        assert float((image.tokens(image.coordinates(X)) - X).abs().max()) < 1e-9
        sigma = float(at.sigma(solver=lipscope.Dense()).estimate[0])
        assert lipscope.local_lipschitz(attention, X, solver=lipscope.Dense()).estimate == pytest.approx(sigma, rel=1e-8)
        whole = at.at_any_length
        assert str(whole.mask) == mask
        assert lipscope.local_lipschitz(whole, X, solver=lipscope.Dense()).estimate == pytest.approx(sigma, rel=1e-8)


def test_layers_without_weights_to_work_on_are_refused():
    handle = lipscope.load(FAMILIES["qwen3"]())  # QK-norm
    with pytest.raises(ValueError, match="--method tokens"):
        handle.record(input_ids=torch.tensor([7, 21, 33]))[0].weights()


@pytest.fixture
def _tiny(monkeypatch):
    def load(name, files):
        model = FAMILIES["gpt2"]()
        model.resize_token_embeddings(256)
        return Loaded(model, ByteTokenizer(), name, ())

    monkeypatch.setitem(ZOO, "tiny", Entry("tiny", "two layers", "none", "none", load))


@pytest.fixture
def weights(tmp_path):
    path = tmp_path / "layer.safetensors"
    save_file({"q": -2 * IDENTITY, "k": IDENTITY, "v": IDENTITY.clone()}, path)
    return str(path)


def test_attack_on_weights(weights, tmp_path):
    out = tmp_path / "out"
    search = ["--method", "ascend", "--restarts", "6", "--steps", "8"]
    result = runner.invoke(app, ["attack", weights, "--radius", "1", "--lengths", "4,8,16", *search, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "Worst inputs of layer.safetensors" in result.output
    assert "σ ≈" in result.output
    for name in ("growth.png", "growth.html", "ascent.png", "ascent.html", "rows.json"):
        assert (out / name).stat().st_size > 1000, name
    # Self-contained: no script is fetched from anywhere.
    assert '<script src="http' not in (out / "growth.html").read_text(encoding="utf-8")
    worst = load_file(out / "worst.safetensors")
    layer = lipscope.Attention(-2 * IDENTITY, IDENTITY, IDENTITY)
    rows = json.loads((out / "rows.json").read_text())
    best = next(row for row in rows if row["n"] == 16 and row["worst"])
    assert lipscope.local_lipschitz(layer, worst["n16"]).estimate == pytest.approx(best["estimate"], rel=1e-6)


def test_attack_as_json(weights):
    result = runner.invoke(app, ["attack", weights, "--radius", "1", "--lengths", "4,8,16", "--json"])
    content = json.loads(result.stdout)
    assert content["radius"] == 1.0
    assert {row["source"] for row in content["rows"]} == set(lipscope.studies.worst_case.NAMES)
    assert content["fits"]["worst"]["alpha_low"] <= content["fits"]["worst"]["alpha"]


@pytest.mark.usefixtures("_tiny")
def test_attack_on_a_model():
    result = runner.invoke(app, ["attack", "tiny", "--layer", "1", "--lengths", "4,6"])
    assert result.exit_code == 0, result.output
    assert "image of the layer's own LayerNorm" in result.output
    assert "image of LayerNorm" in result.output
    ball = runner.invoke(app, ["attack", "tiny", "--head", "1", "--lengths", "4", "--radius", "2", "--json"])
    assert json.loads(ball.stdout)["set"] == "tokens of norm ≤ 2"


@pytest.mark.usefixtures("_tiny")
def test_attack_on_tokens(tmp_path):
    arguments = ["attack", "tiny", "--method", "tokens", "--say", "hello", "--k", "2", "--candidates", "10", "--layer", "1"]
    result = runner.invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "before: hello" in result.output
    assert (tmp_path / "tokens.png").exists()
    content = json.loads((tmp_path / "substitutions.json").read_text(encoding="utf-8"))
    assert content["after"]["estimate"] > content["before"]["estimate"]
    # A text longer than any file name: the model, not the file system, says that it is too long.
    long = runner.invoke(app, [*arguments[:4], "--say", "hello " * 100])
    assert "n = 600 tokens are more than the 32 positions" in long.output
    corpus = runner.invoke(app, [*arguments[:4], "--text", "python-docs", "--n", "6", "--candidates", "4", "--json"])
    assert len(json.loads(corpus.stdout)["before_text"]) == 6


@pytest.mark.usefixtures("_tiny")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["W", "--radius", "0"], "radius must be positive and finite, got 0"),
        (["W"], "give a radius, the largest norm of a token"),
        (["W", "--radius", "1", "--layer", "7"], "--layer belongs to a model"),
        (["W", "--radius", "1", "--lengths", "1,2"], "n must be an integer of at least 2"),
        (["W", "--radius", "1", "--lengths", "a"], "lengths must look like"),
        (["W", "--method", "tokens"], "layer.safetensors has no vocabulary"),
        (["W", "--radius", "1", "--head", "3"], "head must lie between 0 and 0"),
        (["missing.safetensors", "--radius", "1"], "no such file"),
        (["tiny", "--layer", "9"], "layer must lie between 0 and 1"),
        (["tiny", "--method", "tokens", "--say", "hello", "--radius", "1"], "--radius does not apply"),
        (["tiny", "--lengths", "1,4"], "lengths must be at least 2"),
    ],
)
def test_attack_refuses_in_one_line(arguments, message, weights):
    result = runner.invoke(app, ["attack", *(weights if a == "W" else a for a in arguments)])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
