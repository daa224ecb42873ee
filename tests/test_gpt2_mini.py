"""The shipped gpt2-mini and its random twin: offline, complete, trained, and described by numbers that agree."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import socket
import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2LMHeadModel
from typer.testing import CliRunner

import lipscope
from gpt2_mini.books import encode
from gpt2_mini.export import model_card
from gpt2_mini.probe import probe_tokens, total_loss, windows
from lipscope.cli.main import app
from lipscope.models import checkpoints
from lipscope.models.corpora import CORPORA, read_text
from lipscope.models.load import GPT2_MINI, ZOO, load_named
from lipscope.models.model import Model

NAMES = ("gpt2-mini", "gpt2-mini-random")
FACTS = json.loads((GPT2_MINI / "training.json").read_text())
LOGS = Path(__file__).parent.parent / "docs" / "concepts"
PASSAGE = (
    "Alice was beginning to get very tired of sitting by her sister on the\n"
    "bank, and of having nothing to do: once or twice she had peeped into the\n"
    "book her sister was reading, but it had no pictures or conversations in\n"
    "it, 'and what is the use of a book,' thought Alice 'without pictures or\n"
    "conversation?'\n"
)
needs_alice = pytest.mark.skipif(not CORPORA["alice"].available, reason="requirements-offline.txt is not installed")


@pytest.fixture(scope="module")
def loaded() -> dict[str, Model]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was used"))
        return {name: lipscope.load(name) for name in NAMES}


@torch.no_grad()
def nats_per_token(model: Model, text: str) -> float:
    """Mean −ln p of every token after the first, written out: logits are last hidden states against the tied embedding."""
    ids = torch.tensor([model.tokenizer(text)["input_ids"]])
    hidden = model.model(input_ids=ids).last_hidden_state
    log_p = torch.log_softmax(hidden @ model.model.wte.weight.T, -1)
    return -float(log_p[:, :-1].gather(-1, ids[:, 1:, None]).mean())


def test_both_load_without_a_network_and_say_what_they_are(loaded):
    for name, model in loaded.items():
        assert ZOO[name].missing is None
        assert (len(model.layers), model.layers[0].heads, model.model.config.n_embd) == (4, 8, 256)
        assert model.dtype == torch.float32
        assert sum(p.numel() for p in model.model.parameters()) == FACTS["parameters"]
    assert loaded["gpt2-mini"].notes == ("trained by lipscope, float16 weights",)
    assert loaded["gpt2-mini-random"].notes[0].startswith("random weights, seed 0")


def test_its_files_are_read_as_transformers_reads_them(loaded):
    """It is built straight from its files; nothing in it is drawn at random."""
    own, ours = checkpoints.auto_model(GPT2_MINI, dtype=torch.float32).state_dict(), loaded["gpt2-mini"].model.state_dict()
    assert own.keys() == ours.keys()
    assert all(torch.equal(own[key], ours[key]) for key in own)
    tokenizer = checkpoints.auto_tokenizer(GPT2_MINI)
    assert tokenizer(PASSAGE) == loaded["gpt2-mini"].tokenizer(PASSAGE)
    assert tokenizer.special_tokens_map == loaded["gpt2-mini"].tokenizer.special_tokens_map


def test_the_random_twin_is_seeded_and_leaves_the_random_state_alone():
    state = torch.get_rng_state()
    first, second = (load_named("gpt2-mini-random").model.state_dict() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], second[key]) for key in first)


@settings(deadline=None, max_examples=60)
@given(text=st.text(max_size=60))
def test_the_tokenizer_gives_every_text_back(loaded, text):
    for model in loaded.values():
        assert model.tokenizer.decode(model.tokenizer(text)["input_ids"]) == text


def test_a_held_out_passage_is_likely_to_the_trained_model_only(loaded):
    trained, random = (nats_per_token(loaded[name], PASSAGE) for name in NAMES)
    assert random == pytest.approx(math.log(4096), abs=0.3)
    unigram = FACTS["held_out"]["alice"]["unigram"]["nats_per_token"]
    assert trained < unigram - 0.3
    assert trained < random - 2


def test_the_loss_above_is_that_of_the_language_model(loaded):
    model = GPT2LMHeadModel.from_pretrained(GPT2_MINI, dtype=torch.float32).eval()
    ids = torch.tensor([loaded["gpt2-mini"].tokenizer(PASSAGE)["input_ids"]])
    nats, count = total_loss(model, ids)
    assert nats / count == pytest.approx(nats_per_token(loaded["gpt2-mini"], PASSAGE), rel=1e-5)


def test_the_card_and_the_files_agree_with_the_metadata():
    card = (GPT2_MINI / "README.md").read_text()
    assert card == model_card(FACTS)
    for text in ("alice", "tails"):
        for who in ("trained", "random", "unigram"):
            assert f"{FACTS['held_out'][text][who]['nats_per_token']:.3f}" in card
    assert f"{FACTS['steps']:,} steps" in card
    weights = (GPT2_MINI / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == FACTS["sha256"]
    assert sum(path.stat().st_size for path in GPT2_MINI.iterdir()) <= 10_000_000
    assert FACTS["steps"] * FACTS["settings"]["tokens_per_step"] == FACTS["tokens"]
    assert FACTS["knots"][-1] == [FACTS["steps"], 1.0]
    assert "carroll-alice" not in FACTS["train_books"]


@needs_alice
def test_the_loss_on_the_card_is_that_of_the_shipped_weights(loaded):
    """On some of its windows; the whole text is the slow test below."""
    found = loss_on_alice(loaded["gpt2-mini"], most=12)
    assert found == pytest.approx(FACTS["held_out"]["alice"]["trained"]["nats_per_token"], rel=0.04)


@needs_alice
@pytest.mark.slow
def test_the_loss_on_the_card_is_exact(loaded):
    for name, who in zip(NAMES, ("trained", "random"), strict=True):
        found = loss_on_alice(loaded[name], most=None)
        assert found == pytest.approx(FACTS["held_out"]["alice"][who]["nats_per_token"], rel=1e-4)


def loss_on_alice(handle: Model, most: int | None) -> float:
    model = GPT2LMHeadModel(handle.model.config).eval()
    model.transformer.load_state_dict(handle.model.state_dict())
    model.tie_weights()
    nats, count = total_loss(model, windows(encode(read_text("alice"), handle.tokenizer), 512, most))
    return nats / count


@needs_alice
def test_the_logged_sigma_starts_at_the_twin_and_ends_at_the_shipped_model(loaded):
    with (LOGS / "gpt2-mini-sigma.csv").open(encoding="utf-8", newline="") as file:
        log = list(csv.DictReader(file))
    ids = probe_tokens(read_text("alice")[0], loaded["gpt2-mini"].tokenizer)
    # The end is rounded to float16 when it is shipped, which moves σ a little.
    for name, step, closeness in (("gpt2-mini-random", 0, 1e-3), ("gpt2-mini", FACTS["steps"], 5e-3)):
        logged = [float(row["estimate"]) for row in log if int(row["step"]) == step]
        assert [r["estimate"] for r in loaded[name].record(input_ids=ids).rows()] == pytest.approx(logged, rel=closeness)


def test_what_the_page_says_is_what_the_log_shows():
    with (LOGS / "gpt2-mini-sigma.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = sorted({int(row["step"]) for row in rows})
    medians = {
        layer: [
            statistics.median(float(r["estimate"]) for r in rows if (int(r["layer"]), int(r["step"])) == (layer, step))
            for step in steps
        ]
        for layer in range(4)
    }
    growth = {layer: values[-1] / values[0] for layer, values in medians.items()}
    assert min(growth.values()) == growth[0] > 1
    assert max(growth.values()) == growth[2]
    assert all(medians[0][-1] < 0.2 * medians[layer][-1] for layer in (1, 2, 3))
    peak = medians[2].index(max(medians[2]))
    assert steps[peak] < 0.5 * steps[-1]
    assert medians[2][-1] < 0.9 * medians[2][peak]


@needs_alice
def test_the_scan_command_reads_alice():
    result = CliRunner().invoke(app, ["scan", "gpt2-mini", "--text", "alice", "--lengths", "16", "--inputs", "1", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["layer"] for row in rows] == [0, 1, 2, 3]
    for row in rows:
        assert row["notes"] == "trained by lipscope, float16 weights"
        assert row["mask"] == "causal"
        assert 0 < row["lower"] <= row["estimate"] <= row["upper"]


def test_the_list_of_models_names_both():
    printed = CliRunner().invoke(app, ["models"], env={"COLUMNS": "300"}).stdout
    for name in NAMES:
        assert re.search(rf"^\W*{name}\W.*\byes\b", printed, flags=re.MULTILINE), printed
