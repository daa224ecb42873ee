"""The monitor: right numbers, training left alone to the last bit, and never a crash."""

from __future__ import annotations

import copy
import csv
import json
import pickle
import random
import re
import warnings

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

import lipscope
from dense_oracle import Oracle
from lipscope.training import Monitor, QKClip, Threshold
from lipscope.training.attach import undisturbed
from lipscope.training.readings import ALARM, COLUMNS
from model_families import FAMILIES, enlarge

GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}


def batches(count: int, rows: int = 3, n: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 50, (rows, n), generator=generator) for _ in range(count)]


def gpt2(**settings) -> nn.Module:
    torch.manual_seed(0)
    return tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2, **settings))


def bert(**settings) -> nn.Module:
    torch.manual_seed(0)
    config = tf.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        max_position_embeddings=32, **settings,
    )  # fmt: skip
    return tf.BertForMaskedLM(config)


def llama(**settings) -> nn.Module:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=24, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config)


def train(model: nn.Module, monitor: Monitor | None, *, steps: int = 5, accumulate: int = 2, autocast: bool = False):
    """A plain loop; returns the random numbers that come after it."""
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    records = []
    for ids in batches(steps):
        for part in ids.chunk(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=part, labels=part).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            records.append(monitor.step({"input_ids": ids}))
    return records, (torch.rand(3), np.random.rand(3), random.random())


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("build", [gpt2, bert, llama], ids=lambda f: f.__name__)
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16"])
def test_training_is_left_alone_to_the_last_bit(build, autocast):
    plain, watched = build(), build()
    # Hooks read gradients at every step where a threshold is about them, else where layers are looked at.
    always = {"thresholds": [Threshold("backward", above=1e9)]} if autocast else {}
    monitor = Monitor(watched, every=3, heads=not autocast, **always)
    _, after_plain = train(plain, None, steps=4, autocast=autocast)
    records, after_watched = train(watched, monitor, steps=4, autocast=autocast)
    assert monitor.reason is None
    assert [bool(r.readings) for r in records] == [True, False, True, False]
    # Every micro-batch sends gradients through every layer, which is read off.
    read = [r for r in records if r.backward]
    assert read == (records if autocast else records[::2])
    assert all(set(r.backward) == {0, 1} and min(r.backward.values()) > 0 for r in read)
    assert_same_weights(plain, watched)
    for a, b in zip(after_plain, after_watched, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    plain, watched, checkpointed = gpt2(), gpt2(), gpt2()
    for model in (watched, checkpointed):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    monitor, without = Monitor(watched, every=9), Monitor(plain, every=9)
    records, _ = train(watched, monitor)
    train(checkpointed, None)
    expected, _ = train(plain, without)
    assert_same_weights(watched, checkpointed)
    assert monitor.reason is None
    assert [r.backward for r in records] == [pytest.approx(e.backward, rel=1e-5) for e in expected]


def test_frozen_parameters_stay_frozen_and_are_fine():
    plain, watched = gpt2(), gpt2()
    for model in (plain, watched):
        for part in (model.transformer.wte, model.transformer.wpe, model.transformer.h[0]):
            part.requires_grad_(False)
    flags = [p.requires_grad for p in watched.parameters()]
    monitor = Monitor(watched, every=1)
    train(plain, None)
    records, _ = train(watched, monitor)
    assert monitor.reason is None
    assert [p.requires_grad for p in watched.parameters()] == flags
    # No gradient comes through layer 0, so there is nothing to read; σ is measured all the same.
    assert set(records[-1].backward) == {1}
    assert [r.layer for r in records[-1].readings] == [0, 1]
    assert_same_weights(plain, watched)


def test_many_gradients_at_once_do_not_stop_at_the_monitor():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    monitor = Monitor(layer)
    x = torch.randn(2, 5, 8, requires_grad=True)
    y = layer(x)
    g = torch.eye(y.numel())[:3].reshape(3, *y.shape)
    with pytest.warns(UserWarning, match="switched itself off"):
        (rows,) = torch.autograd.grad(y, x, g, is_grads_batched=True)
    assert rows.shape == (3, *x.shape)
    assert monitor.reason is not None


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama", "gemma2"])
def test_readings_agree_with_dense_jacobians(family):
    model = FAMILIES[family]()
    ids = batches(1, rows=2, n=6)[0]
    monitor = Monitor(model, heads=True, solver=lipscope.GolubKahan(rtol=1e-8))
    record = monitor.step(ids)
    monitor.close()
    for layer in (0, 1):
        J = Oracle(family, model, layer, {"input_ids": ids}).jacobian("attention")
        sigma = float(torch.linalg.matrix_norm(J, 2).max())
        (reading,) = [r for r in record.readings if r.layer == layer and r.head is None]
        assert reading.lower <= sigma * (1 + 1e-9)
        assert sigma <= reading.upper * (1 + 1e-9)
        assert reading.estimate == pytest.approx(sigma, rel=1e-6)
        assert reading.upper <= 1.3 * reading.lower
    rows = lipscope.load(model).record(input_ids=ids).rows(scope="head")
    for reading in (r for r in record.readings if r.head is not None):
        same = [row for row in rows if (row["layer"], row["head"]) == (reading.layer, reading.head)]
        assert reading.estimate == pytest.approx(max(row["estimate"] for row in same), rel=1e-4)
        assert reading.max_logit == pytest.approx(max(row["max_logit"] for row in same))
        assert reading.entropy == pytest.approx(sum(row["entropy"] for row in same) / 2)
        assert reading.sink_mass == pytest.approx(sum(row["sink_mass"] for row in same) / 2)


def test_readings_follow_the_weights_and_start_warm():
    model = gpt2()
    monitor = Monitor(model, every=1, tokens=12)
    train(model, monitor, steps=3)
    ids = monitor.probe_batch["input_ids"]
    record = monitor.measure()
    expected = lipscope.load(model.eval()).record(input_ids=ids).rows()
    for reading in record.readings:
        sigma = max(row["estimate"] for row in expected if row["layer"] == reading.layer)
        assert reading.lower <= sigma * 1.0001
        assert sigma <= reading.upper * 1.0001
        assert reading.estimate == pytest.approx(sigma, rel=2e-2)


def test_half_precision_weights_are_followed_in_a_copy():
    model = gpt2().bfloat16()
    monitor = Monitor(model, every=1)
    first = train(model, monitor, steps=1)[0][0]
    assert monitor.reason is None
    assert first.backward
    wide = gpt2().bfloat16()
    wide.load_state_dict(model.state_dict())
    exact = lipscope.load(wide.float().eval()).record(input_ids=monitor.probe_batch["input_ids"]).rows()
    for reading in first.readings:
        assert reading.estimate == pytest.approx(max(r["estimate"] for r in exact if r["layer"] == reading.layer), rel=2e-2)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


class _Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def test_a_model_without_attention_switches_the_monitor_off_once():
    with pytest.warns(UserWarning, match=r"switched itself off.*neither a transformers model nor"):
        monitor = Monitor(_Nothing())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert monitor.step(torch.ones(1, 4)).readings == ()
        assert monitor.step(torch.ones(1, 4)).readings == ()
    assert "attention" in monitor.reason.lower()


def test_a_probe_with_nan_switches_the_monitor_off():
    model = gpt2()
    embedded = torch.full((1, 4, 16), float("nan"))
    monitor = Monitor(model, probe={"inputs_embeds": embedded})
    with pytest.warns(UserWarning, match="probe batch holds NaN or infinite values in inputs_embeds"):
        records, _ = train(model, monitor)
    assert all(record.readings == () for record in records)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_weights_that_become_nan_raise_the_alarm_and_switch_the_monitor_off():
    model, heard = gpt2(), []
    lines = (*ALARM, Threshold("sigma", above=1e9, action="stop"))
    monitor = Monitor(model, every=1, thresholds=lines, on_alarm=heard.append)
    train(model, monitor, steps=1)
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[0, 0] = float("nan")
    with pytest.warns(UserWarning, match="NaN") as said:
        record = monitor.measure(step=2)
    words = [str(warning.message) for warning in said]
    assert "layer 1: what it gives is NaN or infinite since step 2, not at step 1: go back to a checkpoint" in words[0]
    assert re.search(r"switched itself off.*layer 1.*NaN", words[-1])
    # One alarm for each action that was asked for.
    assert [alarm.action for alarm in record.alarms] == [alarm.action for alarm in heard] == ["warn", "stop"]
    assert record.stop
    assert model.training
    assert monitor.step(step=3).alarms == ()


def test_logits_too_large_for_sigma_raise_the_alarm_all_the_same():
    model = llama()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p *= 1e6 if "q_proj" in name or "k_proj" in name else 1.0
    monitor = Monitor(model, every=1, backward=False, heads=True)
    with pytest.warns(UserWarning, match=r"max_logit is .*e\+.*, above 50 at the first reading"):
        records, _ = train(model, monitor, steps=2)
    assert monitor.reason is None
    reading = records[0].readings[0]
    assert reading.max_logit > 1e6
    assert reading.estimate is None
    assert "no digits of σ" in str(records[0])
    assert not any("sigma" in name for name in records[0].scalars())


def test_logits_are_looked_at_between_two_measurements_of_sigma(monkeypatch):
    model, heard = gpt2(), []
    line = Threshold("max_logit", above=20.0, action="save")
    (ids,) = batches(1)
    monitor = Monitor(model, probe=ids, every=20, thresholds=[line], on_alarm=heard.append)
    records = [monitor.step() for _ in range(6)]
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[:, :32] *= 30.0
    with pytest.warns(UserWarning, match="max_logit is"):
        records += [monitor.step() for _ in range(14)]
    assert [record.step for record in records if record.readings] == [1, 20]
    ((step, alarm),) = [(record.step, record.alarms[0]) for record in records if record.alarms]
    assert (step, alarm.layer, alarm.since, alarm.fine) == (10, 1, 10, 5)
    assert heard == [alarm]
    assert records[9].save


@pytest.mark.parametrize("always", [False, True])
def test_the_backward_bound_is_read_where_logits_are_looked_at_or_always(always):
    model = gpt2()
    lines = [Threshold("backward", above=1e9)] if always else ()
    records, _ = train(model, Monitor(model, every=30, thresholds=lines), steps=9)
    assert [record.step for record in records if record.backward] == ([*range(1, 10)] if always else [1, 5])


def test_thresholds_that_the_model_cannot_cross_are_said_once():
    torch.manual_seed(0)
    config = tf.BloomConfig(vocab_size=50, hidden_size=16, n_layer=1, n_head=2)
    model = tf.BloomForCausalLM(config)
    monitor = Monitor(model, every=1)
    with pytest.warns(UserWarning, match="say nothing") as said:
        train(model, monitor, steps=3)
    ours = [str(warning.message) for warning in said if "lipscope" in str(warning.message)]
    assert len(ours) == 1
    assert "thresholds on max_logit, logit_change say nothing" in ours[0]


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ("words", "must be a mapping of the model's arguments or a tensor"),
        (torch.zeros(0, 4, dtype=torch.long), "is empty"),
        (torch.full((1, 4), 77), "must lie between 0 and 49"),
        ({"input_ids": torch.ones(1, 4, dtype=torch.long), "attention_mask": torch.zeros(1, 4)}, "padding only"),
    ],
)
def test_useless_probes_switch_the_monitor_off(batch, reason):
    monitor = Monitor(gpt2(), probe=batch)
    with pytest.warns(UserWarning, match=reason):
        monitor.measure()


def test_warnings_as_errors_do_not_stop_training():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = Monitor(_Nothing())
    assert monitor.reason is not None


def test_an_error_inside_the_backward_pass_does_not_stop_it(monkeypatch):
    def broken(*_):
        raise RuntimeError("something odd")

    model = gpt2()
    monitor = Monitor(model)
    monkeypatch.setattr("lipscope.training.backward_bound.largest_gain", broken)
    with pytest.warns(UserWarning, match="something odd"):
        train(model, monitor, steps=2)
    assert monitor.reason == "something odd"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be at least 1"),
        ({"scope": "head"}, "scope must be one of attention"),
        ({"csv": "/nowhere/at/all.csv"}, "there is no directory"),
    ],
)
def test_bad_arguments_are_refused_before_training(options, message):
    with pytest.raises(ValueError, match=message):
        Monitor(gpt2(), **options)


def test_padding_is_left_out_of_the_probe():
    ids = batches(1, rows=3, n=8)[0]
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, 6:] = 0
    mask[2, 2:] = 0
    monitor = Monitor(gpt2(), inputs=2)
    monitor.step({"input_ids": ids, "attention_mask": mask, "labels": ids})
    assert monitor.reason is None
    assert torch.equal(monitor.probe_batch["input_ids"], torch.stack([ids[1, :5], ids[0, 3:]]))


def test_modes_buffers_and_random_states_come_back():
    model = gpt2()
    model.transformer.h[0].eval()
    model.register_buffer("table", torch.arange(3.0))
    modes = [m.training for m in model.modules()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    with undisturbed(model):
        assert not any(m.training for m in model.modules())
        model.table.mul_(2)
        model.transformer.table = None
        torch.rand(3), np.random.rand(2), random.random()
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(model.table, torch.arange(3.0))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert random.getstate() == states[2]


def test_gradients_that_are_there_are_not_touched():
    model = gpt2()
    ids = batches(1)[0]
    model(input_ids=ids, labels=ids).loss.backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    Monitor(model, heads=True).step({"input_ids": ids})
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, before[name])


def test_wrapped_models_are_unwrapped():
    inner = gpt2()
    parallel = nn.DataParallel(inner)
    assert Monitor(parallel).model is inner
    compiled = torch.compile(gpt2(), backend="eager")
    monitor = Monitor(compiled)
    assert monitor.model is compiled._orig_mod
    assert "compiled" in monitor.notes[0]
    assert monitor.step(batches(1)[0]).readings
    holder = nn.Module()
    holder.lm = gpt2()
    assert Monitor(holder).model is holder.lm
    holder.second = gpt2()
    with pytest.warns(UserWarning, match="several transformers models"):
        Monitor(holder)


def saved_and_loaded(model: nn.Module, path) -> nn.Module:
    torch.save(model, path)
    # Whoever loads it need not have lipscope.
    assert b"lipscope" not in path.read_bytes()
    return torch.load(path, weights_only=False)


@pytest.mark.parametrize("build", [gpt2, lambda: FAMILIES["torch_post_norm"]().float()], ids=["gpt2", "torch"])
@pytest.mark.parametrize("how", ["copied", "pickled", "saved", "saved twice"])
def test_a_copy_of_the_model_is_not_watched(build, how, tmp_path):
    model = build().eval()
    monitor = Monitor(model)
    other = copy.deepcopy(model) if how == "copied" else pickle.loads(pickle.dumps(model))
    if how.startswith("saved"):
        other = saved_and_loaded(model, tmp_path / "model.pt")
    if how == "saved twice":
        other = saved_and_loaded(other, tmp_path / "again.pt")
    batch = batches(1)[0] if build is gpt2 else torch.randn(2, 5, 16, requires_grad=True)
    for module, watched in ((other, False), (model, True)):
        output = module(batch)
        (output.logits if build is gpt2 else output).square().sum().backward()
        assert bool(monitor.backward_gains()) == watched
        assert (monitor.probe_batch is not None) == watched
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    monitor.close()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_evaluation_only():
    model = gpt2().eval()
    monitor = Monitor(model)
    with torch.inference_mode():
        model(input_ids=batches(1)[0])
        record = monitor.measure()
    assert monitor.reason is None
    assert [r.layer for r in record.readings] == [0, 1]
    assert record.backward == {}
    assert not model.training


def test_thresholds_warn_save_and_stop_once_per_crossing():
    model = enlarge(gpt2()).float()
    thresholds = [
        Threshold("sigma", above=1e-3),
        Threshold("entropy", below=100.0, action="save", layers=[1]),
        Threshold("max_logit", above=1e-3, action="stop"),
        Threshold("backward", above=1e9, action="stop"),
    ]
    monitor = Monitor(model, every=1, thresholds=thresholds)
    with pytest.warns(
        UserWarning, match=r"step 1: layer \d: σ is at least .* lower the learning rate.*and 1 more"
    ) as caught:
        first = monitor.step(batches(1)[0])
    assert first.save
    assert first.stop
    assert [a.layer for a in first.alarms] == [0, 1, 1, 0, 1]
    assert len(caught) == 3  # one line for every threshold, its worst place first
    # Still beyond the lines: no second alarm.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert monitor.step().alarms == ()


def test_an_alarm_says_where_what_since_when_and_what_to_do_and_not_too_often():
    from lipscope.training.readings import Guard, Reading, Record

    def at(step: int, *logits: float) -> Record:
        return Record(step, tuple(Reading(3, h, 1.0, 1.1, 1.2, 1e-6, x, None, None, 3) for h, x in enumerate(logits)))

    guard = Guard([Threshold("max_logit", above=50.0, pause=100)])
    assert guard.check(at(1, 20.0, 40.0)) == ()
    (alarm,) = guard.check(at(10, 20.0, 80.0))
    assert (alarm.since, alarm.fine, alarm.head) == (10, 1, 1)
    (line,) = guard.warnings((alarm,), 10)
    assert line == (
        "layer 3, head 1: max_logit is 80, above 50 since step 10, not at step 1: lower the learning rate, or use QK-norm; "
        "QKClip lessens it (here: the scores of head 1 times 0.625) [warn]"
    )
    # To and fro around the line: every crossing is an alarm, and a warning only after the pause.
    said = []
    for step in range(11, 400):
        said += [step] * len(guard.warnings(guard.check(at(step, 20.0, 80.0 if step % 2 else 20.0)), step))
    assert said == [111, 211, 311]
    # A checkpoint keeps where thresholds stand: nothing is new after it.
    state = json.loads(json.dumps(guard.state))
    resumed = Guard(guard.thresholds)
    resumed.state = state
    assert resumed.check(at(401, 20.0, 80.0)) == ()


def test_an_alarm_names_the_head_whose_logits_are_largest():
    model = gpt2()
    with torch.no_grad():
        # Queries of head 2 in layer 1.
        model.transformer.h[1].attn.c_attn.weight[:, 8:12] *= 200.0
    heard = []
    monitor = Monitor(model, every=1, on_alarm=heard.append, thresholds=[Threshold("max_logit", above=1.0)])
    with pytest.warns(UserWarning, match=r"layer 1, head 2: max_logit is .*the scores of head 2 times"):
        record = monitor.step(batches(1)[0])
    assert [(alarm.layer, alarm.head, alarm.worst_head) for alarm in heard] == [(1, None, 2)]
    heads = Monitor(model, probe=batches(1)[0], heads=True, thresholds=()).step().readings
    loudest = max(
        (reading for reading in heads if reading.layer == 1 and reading.head is not None), key=lambda r: r.max_logit
    )
    assert (record.readings[1].logit_head, record.readings[1].max_logit) == (loudest.head, loudest.max_logit)


def test_what_is_called_on_an_alarm_may_fail():
    heard = []

    def broken(alarm):
        raise RuntimeError("no network")

    monitor = Monitor(enlarge(gpt2()).float(), every=1, thresholds=[Threshold(above=0.0)], on_alarm=[heard.append, broken])
    with pytest.warns(UserWarning, match="on_alarm failed: no network"):
        record = monitor.step(batches(1)[0])
    assert heard == list(record.alarms)
    assert monitor.reason is None


def test_a_loss_that_is_not_finite_leaves_the_monitor_on():
    model = gpt2()
    monitor = Monitor(model, every=1, thresholds=[Threshold("backward", above=1e9)])
    ids = batches(1)[0]
    for factor in (1.0, float("nan"), float("inf"), 1.0):
        (model(input_ids=ids, labels=ids).loss * factor).backward()
        model.zero_grad()  # such a step is skipped
        record = monitor.step()
        assert all((gain > 0) == (factor == 1.0) for gain in record.backward.values())
        assert all(np.isfinite(value) for value in record.scalars().values())
    assert monitor.reason is None


def test_two_monitors_read_the_same_and_training_is_left_alone():
    plain, watched = gpt2(), gpt2()
    first, second = Monitor(watched, every=2), Monitor(watched, every=2)
    train(plain, None)
    train(watched, _Both(first, second))
    assert_same_weights(plain, watched)
    for a, b in zip(first.seen, second.seen, strict=True):
        assert a.readings == b.readings
        assert a.backward == b.backward


class _Both:
    """Two monitors in the place of one."""

    def __init__(self, first: Monitor, second: Monitor) -> None:
        self.monitors = (first, second)
        first.seen, second.seen = [], []

    def step(self, *args, **kwargs):
        for monitor in self.monitors:
            monitor.seen.append(monitor.step(*args, **kwargs))
        return self.monitors[0].seen[-1]

    def close(self):
        for monitor in self.monitors:
            monitor.close()


def test_a_compiled_model_is_measured_like_itself():
    model = enlarge(gpt2()).float().eval()
    compiled = torch.compile(model, backend="eager")
    ids = batches(1)[0]
    a, b = (Monitor(one, every=1, probe=ids).step() for one in (model, compiled))
    assert a.readings == b.readings


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("make", [lambda model: Monitor(model, every=2), lambda model: QKClip(model, 1e-3, every=1)])
def test_a_model_in_training_may_be_compiled_before_or_after_it_is_watched(make, after):
    plain, watched = gpt2().transformer, gpt2().transformer
    compiled = torch.compile(watched, backend="eager", fullgraph=True)
    work = make(watched if after else compiled)
    for ids in batches(3):
        watched.load_state_dict(plain.state_dict())
        for model in (plain, compiled):
            torch.manual_seed(0)
            model(input_ids=ids).last_hidden_state.square().mean().backward()
        with torch.no_grad():
            for p, q in zip(plain.parameters(), watched.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
                p -= p.grad
                p.grad = q.grad = None
        assert work.step() is not None
    assert work.reason is None
    if isinstance(work, Monitor):
        assert "compiled" in work.notes[0]
        assert torch.equal(work.probe_batch["input_ids"], batches(1)[0][:2])


def test_thresholds_use_the_safe_end_of_the_interval():
    from lipscope.training.readings import Reading, Record

    record = Record(1, (Reading(0, None, 1.0, 1.1, 1.2, 1e-6, None, None, None, 3),))
    assert Threshold(above=0.9).values(record) == [(0, None, 1.0)]
    assert Threshold(below=1.3).values(record) == [(0, None, 1.2)]
    assert Threshold("entropy", below=1.0).values(record) == []
    for bad in ({"quantity": "mood", "above": 1.0}, {"action": "cry", "above": 1.0}, {}, {"above": 1.0, "below": 0.0}):
        with pytest.raises(ValueError, match=r"must be one of|exactly one of"):
            Threshold(**bad)


def test_csv_and_summary_writer(tmp_path):
    class Writer:
        def __init__(self):
            self.seen = {}

        def add_scalar(self, tag, scalar_value, global_step):
            self.seen[tag, global_step] = scalar_value

    writer, file = Writer(), tmp_path / "sigma.csv"
    model = gpt2()
    always = [Threshold("backward", above=1e9)]
    records, _ = train(model, Monitor(model, every=2, csv=file, writer=writer, thresholds=always))
    rows = list(csv.DictReader(file.open()))
    assert list(rows[0]) == list(COLUMNS)
    assert [(int(r["step"]), int(r["layer"])) for r in rows] == [(s, i) for s in (1, 2, 4) for i in (0, 1)]
    assert float(rows[0]["lower"]) <= float(rows[0]["estimate"]) <= float(rows[0]["upper"])
    assert writer.seen["lipscope/layer_1/sigma", 4] == records[3].readings[1].estimate
    # The backward bound of a measurement is the largest since the one before.
    peak = max(records[2].backward[0], records[3].backward[0])
    assert writer.seen["lipscope/layer_0/sigma_backward", 4] == peak
    # A resumed training goes on in the same file; any other file is left alone.
    Monitor(model, csv=file).step(batches(1)[0])
    assert len(list(csv.DictReader(file.open()))) == 8
    (tmp_path / "other.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="no file of this monitor"):
        Monitor(model, csv=tmp_path / "other.csv")
    assert "σ ∈ [" in str(records[1])


@pytest.mark.parametrize("scope", ["norm+attention", "attention+residual", "block"])
def test_the_backward_bound_is_not_attached_to_other_scopes(scope):
    """It bounds σ of attention from below, which may lie above σ of a block that ends with a normalisation."""
    model = gpt2()
    ids = batches(1)[0]
    monitor = Monitor(model, scope=scope, probe={"input_ids": ids})
    model(input_ids=ids, labels=ids).loss.backward()
    record = monitor.step()
    assert record.readings
    assert not record.backward
    assert "in training" not in str(record)
    assert all(row["backward"] is None for row in record.rows())
    assert monitor.notes == [f"no backward bound: it is for scope attention, and σ is measured for scope {scope}"]
    monitor.close()
    with pytest.raises(ValueError, match="a threshold on backward needs scope attention"):
        Monitor(model, scope=scope, thresholds=[Threshold("backward", above=1.0)])


@pytest.mark.parametrize("shape", ["tensor", "dictionary"])
def test_a_mask_that_is_no_padding_switches_the_monitor_off(shape):
    """Without its mask the probe would run through another map than training does."""
    ids = batches(1)[0]
    mask = torch.zeros(3, 1, 12, 12).masked_fill(~torch.eye(12, dtype=torch.bool), torch.finfo(torch.float32).min)
    monitor = Monitor(gpt2(), probe={"input_ids": ids, "attention_mask": mask if shape == "tensor" else {"full": mask}})
    with pytest.warns(UserWarning, match="the attention_mask of the probe batch"):
        record = monitor.step()
    assert not record.readings
    assert ("(3, 1, 12, 12)" if shape == "tensor" else "got dict") in monitor.reason


def test_a_monitor_says_what_it_is():
    monitor = Monitor(FAMILIES["gpt2"](), every=7)
    assert repr(monitor) == "<Monitor of GPT2Model, scope attention: every 7 steps, 0 seen>"
    monitor.close()
    assert repr(monitor) == "<Monitor of GPT2Model, scope attention: closed>"
