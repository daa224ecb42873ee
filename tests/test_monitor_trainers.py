"""The callbacks: σ in the frameworks' own logs, identical weights, thresholds that save and stop."""

from __future__ import annotations

import importlib.machinery
import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import transformers as tf
from torch import nn

from lipscope.training import LipschitzCallback, Threshold

lightning = pytest.importorskip("lightning.pytorch")
pytest.importorskip("accelerate")

from lipscope.training.lightning import LipschitzCallback as LightningCallback  # noqa: E402

CONFIG = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}


class Sentences(torch.utils.data.Dataset):
    def __init__(self) -> None:
        self.ids = torch.randint(3, 50, (24, 10), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int):
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return tf.GPT2LMHeadModel(tf.GPT2Config(**CONFIG))


def trainer(path, callback=None, kind=tf.Trainer, **settings) -> tf.Trainer:
    arguments = tf.TrainingArguments(
        output_dir=str(path), max_steps=6, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-2,
        logging_steps=3, **{"save_strategy": "no"} | settings, report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
        dataloader_pin_memory=False,
    )  # fmt: skip
    return kind(
        gpt2(), arguments, train_dataset=Sentences(), eval_dataset=Sentences(),
        callbacks=[] if callback is None else [callback],
    )  # fmt: skip


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("settings", [{}, {"bf16": True, "gradient_checkpointing": True}], ids=["plain", "bf16"])
def test_trainer_trains_the_same_weights_and_logs(tmp_path, settings):
    callback = LipschitzCallback(every=2, heads=True)
    plain = trainer(tmp_path / "a", **settings)
    plain.train()
    watched = trainer(tmp_path / "b", callback, **settings)
    watched.train()
    assert callback.monitor.reason is None
    assert_same_weights(plain.model, watched.model)
    logged = {row["step"]: row for row in watched.state.log_history if "lipscope/layer_0/sigma" in row}
    assert list(logged) == [1, 2, 4, 6]
    last = logged[6]
    assert last["lipscope/layer_1/sigma_lower"] <= last["lipscope/layer_1/sigma"] <= last["lipscope/layer_1/sigma_upper"]
    names = ("sigma_backward", "max_logit", "entropy", "sink_mass", "head_3/sigma")
    assert all(f"lipscope/layer_1/{name}" in last for name in names)
    # The Trainer's own rows are what they were.
    own = [[row for row in t.state.log_history if "loss" in row] for t in (plain, watched)]
    assert [row["loss"] for row in own[0]] == [row["loss"] for row in own[1]]
    assert hooks(watched.model) == hooks(plain.model)
    # Training on begins with new hooks.
    callback.on_train_begin(watched.args, watched.state, watched.control, model=watched.model)
    assert hooks(watched.model) > hooks(plain.model)


def test_trainer_writes_to_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        LipschitzCallback(every=0)
    callback = LipschitzCallback(every=3)
    watched = trainer(tmp_path, callback)
    watched.add_callback(tf.integrations.TensorBoardCallback())
    watched.train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    scalars = events.Scalars("train/lipscope/layer_0/sigma")
    assert [event.step for event in scalars] == [1, 3, 6]
    assert scalars[-1].value == pytest.approx(callback.records[-1].readings[0].estimate, rel=1e-5)


class Counting(tf.Trainer):
    """Adds to every row what it has counted since the row before, as trainers of TRL do."""

    counted = 0

    def training_step(self, *args, **kwargs):
        self.counted += 1
        return super().training_step(*args, **kwargs)

    def log(self, logs, *args, **kwargs):
        super().log(logs | {"counted": self.counted}, *args, **kwargs)
        self.counted = 0


def test_what_a_trainer_counts_for_its_own_rows_is_left_alone(tmp_path):
    plain, watched = (
        trainer(tmp_path / name, callback, kind=Counting)
        for name, callback in (("a", None), ("b", LipschitzCallback(every=2)))
    )
    rows = []
    for one in (plain, watched):
        one.train()
        rows.append([row["counted"] for row in one.state.log_history if "counted" in row])
    assert rows[0] == rows[1] == [6, 6, 0]


def logged_by(monkeypatch, name: str) -> tuple[tf.TrainerCallback, list, list]:
    """The Trainer's own integration with a stand-in for the package, what is logged there, and its alerts."""
    logged, alerts = [], []
    package = ModuleType(name)
    package.__spec__ = importlib.machinery.ModuleSpec(name, None)
    package.log = logged.append
    package.alert = lambda **words: alerts.append(words)
    package.log_metrics = lambda metrics, step: logged.append(metrics | {"train/global_step": step})
    package.active_run, package.run = lambda: None, SimpleNamespace(summary={})
    limits = {"MAX_PARAM_VAL_LENGTH": 250, "MAX_PARAMS_TAGS_PER_BATCH": 100}
    package.utils = SimpleNamespace(validation=SimpleNamespace(**limits))
    monkeypatch.setitem(sys.modules, name, package)
    for known in ("is_wandb_available", "is_mlflow_available", "is_trackio_available"):
        monkeypatch.setattr(f"transformers.integrations.integration_utils.{known}", lambda: True)
    kind = {"wandb": "WandbCallback", "mlflow": "MLflowCallback", "trackio": "TrackioCallback"}[name]
    made = getattr(tf.integrations, kind, None) or getattr(tf.integrations.integration_utils, kind)
    monkeypatch.setattr(made, "setup", lambda self, *args, **kwargs: vars(self).update(_async_log=False))
    monkeypatch.setattr(made, "on_train_end", lambda self, *args, **kwargs: None)
    return made(), logged, alerts


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
@pytest.mark.filterwarnings("ignore:lipscope.training, step")
def test_readings_reach_the_loggers_of_the_trainer_and_alarms_trackio(tmp_path, monkeypatch, name):
    integration, logged, alerts = logged_by(monkeypatch, name)
    callback = LipschitzCallback(every=3, thresholds=[Threshold("max_logit", above=0.0, layers=[1])])
    watched = trainer(tmp_path, callback)
    watched.add_callback(integration)
    watched.add_callback(callback)
    watched.args.report_to = [name]
    watched.train()
    prefix = "" if name == "mlflow" else "train/"
    found = {row["train/global_step"]: row[f"{prefix}lipscope/layer_0/sigma"] for row in logged
             if f"{prefix}lipscope/layer_0/sigma" in row}  # fmt: skip
    assert found == {record.step: record.readings[0].estimate for record in callback.records}
    told = [{"title": "lipscope: max_logit above 0", "text": callback.records[0].alarms[0].message}]
    assert alerts == (told if name == "trackio" else [])


def test_a_trainer_that_compiles_is_watched_without_breaking_its_graph(tmp_path):
    callback = LipschitzCallback(every=3)
    settings = {"torch_compile": True, "torch_compile_backend": "eager"}
    plain = trainer(tmp_path / "a", **settings)
    plain.train()
    watched = trainer(tmp_path / "b", callback, **settings)
    watched.train()
    assert_same_weights(plain.model, watched.model)
    assert [record.step for record in callback.records] == [1, 3, 6]
    assert "compiled" in callback.monitor.notes[0]


def test_trainer_saves_and_stops(tmp_path):
    thresholds = [Threshold("sigma", above=0.0, action="save"), Threshold("entropy", below=100.0, action="stop", layers=[0])]
    watched = trainer(tmp_path, LipschitzCallback(every=2, thresholds=thresholds))
    with pytest.warns(UserWarning, match="σ is at least"):
        watched.train()
    assert watched.state.global_step == 1
    assert (tmp_path / "checkpoint-1" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", [LipschitzCallback, LightningCallback])
def test_callbacks_refuse_options_when_they_are_made(kind):
    for options, error, message in (
        ({"every": 0}, ValueError, "every must be at least 1"),
        ({"scope": "head"}, ValueError, "scope must be one of"),
        ({"thresholds": ["sigma"]}, TypeError, "thresholds must be a list, each of it a Threshold"),
        ({"evry": 3}, TypeError, "'evry' is no option"),
    ):
        with pytest.raises(error, match=message):
            kind(**options)


def test_a_callback_that_is_attached_twice_counts_once(tmp_path):
    callback = LipschitzCallback(every=2)
    watched = trainer(tmp_path, callback)
    watched.add_callback(callback)
    watched.train()
    assert [record.step for record in callback.records] == [1, 2, 4, 6]


def test_a_resumed_training_goes_on_with_its_probe_and_its_thresholds(tmp_path):
    line = Threshold("max_logit", above=0.0)
    keep = {"save_strategy": "steps", "save_steps": 2}
    whole, resumed = (LipschitzCallback(every=2, thresholds=[line]) for _ in range(2))
    with pytest.warns(UserWarning, match="at the first reading"):
        trainer(tmp_path, whole, **keep).train()
    again = trainer(tmp_path, resumed, **keep)
    with warnings.catch_warnings():
        # What was beyond its line before the checkpoint is no news.
        warnings.filterwarnings("error", message="lipscope")
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [record.step for record in resumed.records] == [3, 4, 6]
    assert all(not record.alarms for record in resumed.records)
    assert torch.equal(resumed.monitor.probe_batch["input_ids"], whole.monitor.probe_batch["input_ids"])
    for a, b in zip(whole.records[-2:], resumed.records[-2:], strict=True):
        assert [r.estimate for r in a.readings] == pytest.approx([r.estimate for r in b.readings], rel=0.02)
    # A checkpoint from elsewhere may hold anything.
    with pytest.warns(UserWarning, match="cannot be read, it starts anew"):
        resumed.monitor.load_state_dict({"probe": {}, "thresholds": 3})


def test_trainer_evaluates_only(tmp_path):
    callback = LipschitzCallback()
    watched = trainer(tmp_path, callback)
    watched.evaluate()
    assert [reading.layer for reading in callback.records[0].readings] == [0, 1]
    assert "lipscope/sigma_max" in watched.state.log_history[-1]


def test_trainer_goes_on_without_attention(tmp_path):
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 4)

        def forward(self, input_ids, labels=None):
            return {"loss": self.embedding(input_ids).square().sum()}

    arguments = tf.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    callback = LipschitzCallback(every=1)
    with pytest.warns(UserWarning, match="switched itself off"):
        watched = tf.Trainer(Net(), arguments, train_dataset=Sentences(), callbacks=[callback])
    with warnings.catch_warnings():
        # One warning, not two.
        warnings.filterwarnings("error", message="lipscope")
        watched.train()
    assert watched.state.global_step == 2
    assert callback.records == []


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lm = gpt2()

    def training_step(self, batch, batch_idx):
        return self.lm(**batch).loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.lm(**batch).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(
    path, callback=None, logger=False, precision="32-true", validate=False, steps=4, checkpoint=None
) -> tuple[Module, object]:
    lightning.seed_everything(3, verbose=False)
    module = Module()
    run = lightning.Trainer(
        max_steps=steps, accelerator="cpu", accumulate_grad_batches=2, logger=logger, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=path, precision=precision,
        callbacks=callback, num_sanity_val_steps=0,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    data = torch.utils.data.DataLoader(Sentences(), batch_size=3, shuffle=True, generator=generator)
    if validate:
        run.validate(module, data, verbose=False)
    else:
        run.fit(module, data, ckpt_path=checkpoint)
    return module, run


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning_trains_the_same_weights_and_logs(tmp_path, precision):
    from lightning.pytorch.loggers import CSVLogger

    callback = LightningCallback(every=2)
    plain, _ = fit(tmp_path, precision=precision)
    watched, run = fit(tmp_path, callback, CSVLogger(tmp_path), precision)
    assert callback.monitor.reason is None
    assert_same_weights(plain, watched)
    assert [record.step for record in callback.records] == [1, 2, 4]
    assert float(run.callback_metrics["lipscope/sigma_max"]) == pytest.approx(
        max(r.estimate for r in callback.records[-1].readings), rel=1e-5
    )
    text = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "lipscope/layer_1/sigma_backward" in text.splitlines()[0]
    assert hooks(watched) == hooks(plain)


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
def test_lightning_saves_stops_and_validates(tmp_path):
    thresholds = [Threshold("sigma", above=0.0, action="save"), Threshold("entropy", below=100.0, action="stop", layers=[0])]
    with pytest.warns(UserWarning, match="σ is at least"):
        _, run = fit(tmp_path, LightningCallback(every=2, thresholds=thresholds))
    assert run.global_step == 1
    assert (tmp_path / "lipscope-step=1.ckpt").exists()
    callback = LightningCallback()
    fit(tmp_path, callback, validate=True)
    assert callback.monitor.reason is None
    assert [reading.layer for reading in callback.records[0].readings] == [0, 1]


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
def test_a_lightning_callback_that_is_attached_twice_counts_once(tmp_path):
    callback, other = LightningCallback(every=2), LightningCallback(every=2)
    module, run = fit(tmp_path, [callback, callback, other])
    run.save_checkpoint(tmp_path / "twice.ckpt")
    for each in (callback, other):
        assert [record.step for record in each.records] == [1, 2, 4]
    assert hooks(module) == hooks(Module())


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
def test_a_resumed_lightning_training_goes_on_with_its_probe_and_its_thresholds(tmp_path):
    line = Threshold("max_logit", above=0.0)
    whole, resumed = (LightningCallback(every=2, thresholds=[line]) for _ in range(2))
    with pytest.warns(UserWarning, match="at the first reading"):
        _, run = fit(tmp_path, whole)
    run.save_checkpoint(tmp_path / "whole.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lipscope")
        fit(tmp_path, resumed, steps=6, checkpoint=tmp_path / "whole.ckpt")
    assert [record.step for record in resumed.records] == [5, 6]
    assert all(not record.alarms for record in resumed.records)
    assert torch.equal(resumed.monitor.probe_batch["input_ids"], whole.monitor.probe_batch["input_ids"])
    # The change per step since the reading before the checkpoint.
    before, after = whole.records[-1].readings[0], resumed.records[0].readings[0]
    assert after.logit_change == pytest.approx(after.max_logit - before.max_logit)


@pytest.mark.filterwarnings("ignore:lipscope.training, step 1")
def test_trainer_of_several_processes_keeps_a_wish_until_all_can_follow(monkeypatch):
    """The first measurement is at step 1, where the other processes do not wait for a decision."""
    asked = []
    monkeypatch.setattr("lipscope.training.readings.together", lambda *wish: asked.append(wish[:2]) or wish)
    thresholds = [Threshold("sigma", above=0.0, action="save", layers=[0]), Threshold("sigma", above=0.0, action="stop")]
    callback, model = LipschitzCallback(every=3, thresholds=thresholds), gpt2()
    state, control = tf.TrainerState(is_world_process_zero=True), tf.TrainerControl()
    arguments = SimpleNamespace(world_size=2, report_to=[])
    callback.on_train_begin(arguments, state, control, model=model)
    ids = Sentences().ids[:2]
    wishes = []
    for step in range(1, 7):
        control.should_save = control.should_training_stop = False
        model(input_ids=ids, labels=ids).loss.backward()
        state.global_step = step
        callback.on_step_end(arguments, state, control)
        wishes.append((control.should_save, control.should_training_stop))
    callback.on_train_end(arguments, state, control)
    assert wishes == [(step == 3, step == 3) for step in range(1, 7)]
    assert asked == [(True, True), (False, False)]


@pytest.mark.filterwarnings("ignore:lipscope.training, step 1")
def test_lightning_of_several_processes_keeps_a_wish_until_all_can_follow(tmp_path, monkeypatch):
    monkeypatch.setattr("lipscope.training.readings.together", lambda *wish: wish)
    saved = []
    run = SimpleNamespace(
        world_size=2, is_global_zero=True, global_step=0, default_root_dir=tmp_path, loggers=[], should_stop=False,
        save_checkpoint=lambda path: saved.append(path.name),
    )  # fmt: skip
    thresholds = [Threshold("sigma", above=0.0, action="save", layers=[0]), Threshold("sigma", above=0.0, action="stop")]
    callback, module = LightningCallback(every=3, thresholds=thresholds), Module()
    module.log_dict = lambda *args, **options: None
    callback.setup(run, module, "fit")
    callback.on_train_start(run, module)
    ids = Sentences().ids[:2]
    for step in range(1, 7):
        module.lm(input_ids=ids, labels=ids).loss.backward()
        run.global_step = step
        callback.on_train_batch_end(run, module, None, {"input_ids": ids}, step)
        assert run.should_stop == (step >= 3)
    callback.teardown(run, module, "fit")
    assert saved == ["lipscope-step=3.ckpt"]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """What two processes of a training wrote, one after the other."""
    directory = tmp_path_factory.mktemp("together")
    program = Path(__file__).with_name("joint_decision.py")
    subprocess.run([sys.executable, program, directory], check=True, timeout=240)
    return [json.loads((directory / str(rank)).read_text()) for rank in range(2)]


def test_two_processes_follow_a_wish_of_any_of_them_at_the_same_step(two_processes):
    """The second process crosses its line at step 1, and both stop at step 2; after that nobody asks for anything."""
    assert [found["decisions"] for found in two_processes] == [[[False, False], [False, True], [False, False]]] * 2
    assert [found["own alarms"] for found in two_processes] == [0, 1]


def test_two_processes_reduce_once_per_reading_to_the_largest_bound(two_processes):
    first, second = two_processes
    assert first["reductions"] == second["reductions"] == 1
    # Data-parallel training itself reduces gradients, in buckets of its own; nothing else is sent.
    assert first["other messages"] == second["other messages"] == 0
    assert first["measured"] == 2
    assert second["measured"] == 0
    for layer, gain in first["reduced"].items():
        assert gain == max(first["own"][layer], second["own"][layer])
    assert any(second["own"][layer] > first["own"][layer] for layer in first["own"])


def test_sharded_weights_are_refused_with_the_reason_and_training_goes_on(two_processes):
    for found in two_processes:
        assert "is sharded over processes" in found["sharded monitor"]
        assert "is sharded over processes" in found["sharded clip"]
        assert found["sharded loss after"] < found["sharded loss before"]
