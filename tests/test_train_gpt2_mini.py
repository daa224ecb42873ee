"""``examples/train_gpt2_mini.py`` on a tiny setting: resuming, measuring, planning and exporting keep their promises."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipscope
from dense_oracle import Oracle
from gpt2_mini import books, export, probe
from gpt2_mini.plan import Plan
from gpt2_mini.step import next_token_loss
from lipscope.models.corpora import read_text
from train_gpt2_mini import Settings, Trainer, build_model

TINY = Settings(
    layers=2, width=16, heads=2, positions=64, vocabulary=300, tokens_per_step=128, warmup=3, peak_rate=0.02, threads=2,
    log_every=5, save_every=3, replan_every=2, held_out_windows=2,
)  # fmt: skip
STEPS = 12
pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Muon comes with torch 2.9")


@pytest.fixture(scope="module", autouse=True)
def small_probe() -> Iterator[None]:
    """σ of fewer and shorter inputs than a training of hours follows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "PROBE_INPUTS", 2)
        patch.setattr(probe, "PROBE_LENGTH", 32)
        yield


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("books")
    text = "\n".join(read_text("python-docs"))
    for place, name in enumerate(("carroll-alice", "melville-moby_dick", "blake-poems")):
        (folder / f"{name}.txt").write_text(text[place * 9000 : place * 9000 + 9000], encoding="utf-8")
    (folder / "old.txt").write_bytes("Caesar é\n".encode("latin-1") * 40)
    return folder


def trainer(library: Path, out: Path, setting: Settings = TINY, steps: int = STEPS) -> Trainer:
    return Trainer(setting, Plan.of_steps(steps, setting.peak_rate, setting.warmup), out, library)


@pytest.fixture(scope="module")
def finished(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    run = trainer(library, tmp_path_factory.mktemp("whole"))
    run.run()
    return run


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


class Killed(BaseException):
    """What a kill looks like from inside."""


def killed_at(run: Trainer, step: int) -> None:
    update = run.update

    def dying() -> None:
        if run.step == step:
            raise Killed
        update()

    run.update = dying
    with pytest.raises(Killed):
        run.run()


@pytest.mark.parametrize("step", [2, 6, 11], ids=["before the first checkpoint", "right after one", "late"])
def test_killing_and_resuming_gives_the_same_weights_and_logs(library, finished, tmp_path, step):
    killed_at(trainer(library, tmp_path), step)
    with (tmp_path / "log.csv").open("a") as file:
        file.write("1")  # killed while writing
    again = trainer(library, tmp_path)
    assert again.step == step // 3 * 3
    again.run()
    assert same_weights(again.model, finished.model)
    assert not same_weights(again.model, build_model(TINY))
    for name in ("log.csv", "sigma.csv"):
        assert (tmp_path / name).read_bytes() == (finished.out / name).read_bytes()


def test_a_run_that_is_over_stays_as_it_is(library, finished):
    logs = (finished.out / "log.csv").read_bytes()
    again = trainer(library, finished.out)
    again.run()
    assert again.step == STEPS
    assert same_weights(again.model, finished.model)
    assert (finished.out / "log.csv").read_bytes() == logs
    with pytest.raises(ValueError, match="was started with"):
        trainer(library, finished.out, replace(TINY, seed=1))


def test_logging_does_not_touch_the_training(library, finished, tmp_path):
    silent = trainer(library, tmp_path)
    silent.log = lambda: None
    silent.run()
    assert same_weights(silent.model, finished.model)

    model = build_model(TINY).train()
    state, weights = torch.get_rng_state(), {k: v.clone() for k, v in model.state_dict().items()}
    probe.measure_sigma(model, finished.probe)
    probe.held_out_loss(model, probe.windows(finished.train_ids, 32, 2))
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_logged_sigma_is_that_of_the_dense_jacobian(finished):
    rows = [row for row in csv.DictReader((finished.out / "sigma.csv").open()) if int(row["step"]) == STEPS]
    assert len(rows) == TINY.layers * probe.PROBE_INPUTS
    model = copy.deepcopy(finished.model.transformer).double().eval()
    for row in rows[:: probe.PROBE_INPUTS]:
        ids = finished.probe[int(row["input"])][None]
        J = Oracle("gpt2", model, int(row["layer"]), {"input_ids": ids}).jacobian("attention")[0]
        sigma = float(torch.linalg.matrix_norm(J, 2))
        assert float(row["estimate"]) == pytest.approx(sigma, rel=1e-3)
        assert float(row["lower"]) <= sigma * (1 + 1e-5)
        assert sigma <= float(row["upper"]) * (1 + 1e-5)


def test_the_loss_falls(finished):
    rows = list(csv.DictReader((finished.out / "log.csv").open()))
    assert [int(row["step"]) for row in rows] == [0, 1, 4, 5, 10, STEPS]
    assert float(rows[0]["alice_loss"]) == pytest.approx(math.log(TINY.vocabulary), abs=0.15)
    assert float(rows[-1]["alice_loss"]) < float(rows[0]["alice_loss"]) - 0.3


def test_workers_add_up_to_the_gradient_of_the_whole_step(library, tmp_path):
    """Against float32 in one piece; three workers have shares of two, two and one of the rows."""
    setting = replace(TINY, tokens_per_step=320, short_until=0.0, weight_decay=0.0)
    whole = build_model(setting)
    inputs, targets = trainer(library, tmp_path / "1", setting).batches.at(0, 64)
    loss = next_token_loss(whole, inputs, targets)
    loss.backward()
    whole_gradient = torch.cat([p.grad.flatten() for p in whole.parameters()])
    for threads in (1, 2, 3):
        run = trainer(library, tmp_path / str(threads), replace(setting, threads=threads, clip=math.inf))
        run.update()
        gradient = torch.cat([p.grad.flatten() for p in run.model.parameters()])
        assert len(inputs) == 5
        assert run.losses == pytest.approx([loss.item()], rel=1e-3)
        assert torch.linalg.norm(gradient - whole_gradient) < 0.02 * torch.linalg.norm(whole_gradient)


def test_a_time_limit_only_chooses_the_steps(library, tmp_path, monkeypatch):
    """Ten seconds a step at first, five later: one hundred seconds are up after some 12 steps, and the knots say it all."""
    timed = trainer(library, tmp_path / "timed", steps=30)
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0 * min(timed.step, 8) + 5.0 * max(timed.step - 8, 0))
    timed.run(minutes=100 / 60)
    monkeypatch.undo()
    assert timed.plan.steps == timed.step != 30
    assert abs(timed.seconds - 100) <= 15
    knots = json.loads(json.dumps(timed.plan.knots))
    plan = Plan(tuple((int(s), float(p)) for s, p in knots), TINY.peak_rate, TINY.warmup)
    repeated = Trainer(TINY, plan, tmp_path / "repeated", library)
    repeated.run()
    assert same_weights(repeated.model, timed.model)


def test_the_rate_is_a_ramp_then_a_cosine():
    plan = Plan.of_steps(100, 2.0, 10)
    assert plan.rate(0) == pytest.approx(2 / 11)
    assert plan.rate(50) == pytest.approx(1.0)
    assert plan.rate(100) == 0
    assert plan.within(20, seconds_left=80, seconds_per_step=1.0) is plan
    later = plan.within(20, seconds_left=160, seconds_per_step=1.0)
    assert later.steps == 180
    assert later.progress(100) == pytest.approx(0.6)
    assert plan.within(20, seconds_left=-5, seconds_per_step=1.0).steps == 21
    with pytest.raises(ValueError, match="after step 20"):
        plan.end_at(20, 20)
    with pytest.raises(ValueError, match="at least 1"):
        Plan.of_steps(0, 1.0, 0)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 40), st.floats(-5, 200), st.floats(0.1, 5)), max_size=8))
def test_moving_the_end_never_moves_the_past(moves):
    plan, step = Plan.of_steps(60, 1.0, 5), 0
    for ahead, left, per_step in moves:
        step = min(step + ahead, plan.steps)
        moved = plan.within(step, left, per_step)
        assert [moved.rate(k) for k in range(step + 1)] == pytest.approx([plan.rate(k) for k in range(step + 1)], abs=1e-12)
        plan = moved
    path = [plan.progress(k) for k in range(plan.steps + 1)]
    assert all(a <= b for a, b in itertools.pairwise(path))
    assert (path[0], path[-1]) == (0, pytest.approx(1, abs=1e-12))


def test_every_epoch_shows_every_window_once():
    batches = books.Batches(torch.arange(1000), positions=8, windows=4, seed=3)
    rows = torch.cat([batches.at(step, 8)[0] for step in range(200)])[:, 0]
    first, second = (rows[k * batches.per_epoch : (k + 1) * batches.per_epoch] for k in (0, 1))
    for epoch in (first, second):
        assert torch.equal(epoch.sort().values.diff(), torch.full((batches.per_epoch - 1,), 8))
    assert not torch.equal(first, second)
    inputs, targets = batches.at(77, 8)
    assert torch.equal(targets, inputs + 1)
    fresh = books.Batches(torch.arange(1000), positions=8, windows=4, seed=3)
    assert torch.equal(fresh.at(77, 8)[0], inputs)
    assert torch.equal(fresh.at(77, 4)[0].flatten(), inputs.flatten())
    with pytest.raises(ValueError, match="fewer than one step"):
        books.Batches(torch.arange(20), positions=8, windows=4, seed=0)


def test_the_held_out_text_is_never_trained_on(library, finished):
    read = books.read_books(library)
    assert sorted(read.train) == ["blake-poems", "melville-moby_dick", "old"]
    assert "é" in read.train["old"]
    for name, text in read.train.items():
        if name != "old":
            assert text + read.tails[name] == (library / f"{name}.txt").read_text(encoding="utf-8")
            assert text.endswith("\n")
            assert 0 < len(read.tails[name]) <= 0.05 * 9000 + 1
    assert read.alice == (library / "carroll-alice.txt").read_text(encoding="utf-8")
    text = "".join(read.train.values())
    assert finished.tokenizer.decode(finished.train_ids.tolist()).replace(books.END_OF_TEXT, "") == text
    with pytest.raises(FileNotFoundError, match="must hold carroll-alice"):
        books.read_books(library.parent)


def test_losses_and_bytes_against_plain_arithmetic(finished):
    rows = probe.windows(finished.held_out["alice"], 64)
    with torch.no_grad():
        logits = finished.model(input_ids=rows[:, :-1]).logits.double()
    picked = torch.softmax(logits, -1).gather(-1, rows[:, 1:, None])
    nats, count = probe.total_loss(finished.model, rows, batch=3)
    assert count == rows[:, 1:].numel()
    assert nats == pytest.approx(float(-picked.log().sum()), rel=1e-5)
    text = "naïve — ☃ 'Alice'\n"
    ids = finished.tokenizer(text)["input_ids"]
    assert int(books.token_bytes(finished.tokenizer)[ids].sum()) == len(text.encode())
    unigram = export.unigram_loss(torch.tensor([0, 0, 1]), torch.tensor([0, 2]), 3)
    assert unigram == pytest.approx(-math.log(3 / 6) - math.log(1 / 6))


def test_the_export_loads_and_its_card_says_what_was_measured(finished):
    facts = export.export(finished, build_model(TINY))
    small, large = finished.out / "float16", finished.out / "float32"
    assert (small / "model.safetensors").stat().st_size < 0.6 * (large / "model.safetensors").stat().st_size
    loaded = lipscope.load(small, dtype=torch.float32)
    for ours, theirs in zip(loaded.model.parameters(), finished.model.transformer.parameters(), strict=True):
        assert torch.equal(ours, theirs.half().float())
    written = json.loads((small / "training.json").read_text())
    assert written["held_out"] == facts["held_out"]
    assert written["steps"] == STEPS
    card = (small / "README.md").read_text()
    alice = facts["held_out"]["alice"]
    assert alice["trained"]["nats_per_token"] < alice["random"]["nats_per_token"] - 0.3
    assert f"{alice['trained']['nats_per_token']:.3f} | {alice['trained']['bits_per_byte']:.3f}" in card
    assert alice["trained"]["bits_per_byte"] == pytest.approx(
        alice["trained"]["nats_per_token"] * alice["tokens"] / alice["bytes"] / math.log(2)
    )
