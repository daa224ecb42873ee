"""Public functions with arguments of the wrong kind, commands with hostile arguments, damaged files of a run, clips, images.

    python checks/fuzz.py [--seed 0] [--share 1.0] [--only api,cli,files,media]

Every case takes a call that works and spoils one thing in it. A refusal must come from the door: an error that lipscope
raises itself, in words, or that names a missing argument. A failure is an error from the inside (raised by Python, torch or
another library while working with the argument), or a call that takes longer than its time.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import linecache
import os
import random
import signal
import sys
import tempfile
import warnings
import wave
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers as tf
from PIL import Image
from torch import nn

import lipscope
from lipscope.runs.run import load_run
from lipscope.studies import mean_field, variants, worst_case

SOURCE = str(Path(lipscope.__file__).parent)
SECONDS = 30.0  # of one call, also on a busy machine


class TooLongError(BaseException):
    """A call that did not end in time."""


@dataclass(frozen=True)
class Case:
    """One spoiled call, and what became of it."""

    what: str
    error: BaseException | None

    @property
    def from_inside(self) -> bool:
        """Whether the error is none that lipscope raises itself, in words."""
        return self.error is not None and not raised_in_words(self.error)

    def __str__(self) -> str:
        return f"{self.what}: {type(self.error).__name__}: {' '.join(str(self.error).split())[:200]}"


def raised_in_words(error: BaseException) -> bool:
    """Whether the last line of the traceback is a ``raise`` in lipscope, or a call of a door that lacks an argument."""
    if isinstance(error, (TooLongError, AssertionError)) or not str(error).strip():
        return False
    if isinstance(error, SystemExit) or hasattr(error, "exit_code") or hasattr(error, "format_message"):  # the parser's
        return True
    if isinstance(error, OSError) and error.filename is not None:  # the system names the file and what is wrong with it
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    file, line = trace.tb_frame.f_code.co_filename, linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
    if file == __file__:  # nothing of lipscope was entered: Python itself names the argument that is missing or too many
        return isinstance(error, TypeError) and "argument" in str(error)
    return file.startswith(SOURCE) and line.lstrip().startswith("raise")


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Inside, whatever takes longer than ``SECONDS`` ends with ``TooLongError``."""
    seconds = SECONDS

    def late(signum: int, frame: FrameType | None) -> None:
        raise TooLongError(f"still running after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def tried(what: str, call: Callable[[], Any], directory: Path | None = None) -> Case:
    """Run a call in silence, in a directory where the files that it may write are in nobody's way."""
    silence = io.StringIO()
    try:
        with (
            contextlib.chdir(directory or "."),
            in_time(),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(silence),
            contextlib.redirect_stderr(silence),
        ):
            warnings.simplefilter("ignore")
            call()
    except (Exception, TooLongError, SystemExit) as error:
        return Case(what, error)
    return Case(what, None)


W = torch.eye(4, dtype=torch.float64)
X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)


def hostile(rng: random.Random) -> dict[str, Any]:
    """Values of every kind, most of them wrong wherever they come."""
    return {
        "None": None, "a word": "nonsense", "nothing": "", "bytes": b"\xff\x00", "true": True, "zero": 0, "minus one": -1,
        "a number": rng.randrange(2, 9), "huge": 2**70, "a fraction": 1.5, "nan": float("nan"), "inf": float("inf"),
        "tiny": 1e-320, "complex": 1j, "an empty list": [], "a list of words": ["a", "b"], "a list of None": [None],
        "nested lists": [[1.0, 2.0], [3.0]], "an empty table": {}, "a table": {"a": 1}, "an object": object(),
        "a class": int, "a function": lambda *given: given, "a path": Path("nowhere/at/all"), "a generator": iter(()),
        "numbers as text": "1,2", "integers": torch.arange(4), "an empty tensor": torch.empty(0, 4),
        "a tensor of nan": torch.full((3, 4), float("nan")), "a scalar tensor": torch.tensor(2.0), "a set": {1},
        "a wide tensor": torch.ones(3, 7, dtype=torch.float64), "a deep tensor": torch.ones(2, 2, 2, 2),
        "complex tensor": torch.ones(3, 4, dtype=torch.complex64), "an array": np.ones((3, 4)), "a dtype": torch.float64,
        "half": torch.ones(3, 4).half(), "a meta tensor": torch.ones(3, 4, device="meta"), "a module": nn.Linear(4, 4),
        "ünïcode": "\ud800\x00\x1b[31m", "a long word": "x" * 5000, "a big list": list(range(2000)),
    }  # fmt: skip


def working_calls(directory: Path) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Every public function, and every public class that users make, with arguments that work and are soon measured."""
    layer = lipscope.Attention(W, W, W, W, heads=2)
    head = lipscope.Attention(W, W, W)
    module = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double().eval()
    model = lipscope.load(module)
    decoder = lipscope.load(writing())
    row = {"model": "m", "layer": 0, "n": 8, "lower": 1.0, "estimate": 1.1, "upper": 1.2, "scope": "attention"}
    run = load_run(lipscope.Run((row, row | {"n": 16})))
    store, rows = directory / "run.db", directory / "rows.json"
    rows.write_text(json.dumps([row]))
    lipscope.runs.Store(store, write=True).__enter__().__exit__(None, None, None)
    plan = lipscope.runs.Plan.of(models=["no-such-model"], texts=["python-docs"])
    field = mean_field.MeanFieldAttention(head)
    points = mean_field.Measure(X)
    series = lipscope.report.Series("s", [1.0, 2.0], [1.0, 2.0])
    panel = lipscope.report.Panel([series], "x", "y")
    chart = lipscope.report.Chart("c", "t", [panel], "w")
    small: dict[str, Any] = {"n": 3, "radius": 1.0, "restarts": 1, "steps": 2, "seed": 0}
    calls: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "Attention": (lipscope.Attention, {
            "q": W, "k": W, "v": W, "out": W, "heads": 2, "kv_heads": 2, "q_bias": W[0], "k_bias": W[0], "v_bias": W[0],
            "out_bias": W[0], "scale": 0.5, "mask": "causal", "softcap": 20.0, "bias": W[:3, :3], "sinks": W[0, :2],
            "rotary": None,
        }),
        "Auto": (lipscope.Auto, {"rtol": 1e-3, "max_steps": 9, "delta": 1e-6, "k": 1, "vectors": False, "interval": 0.1,
                                 "seed": 0, "memory": 2**30, "dense_below": 128}),
        "GolubKahan": (lipscope.GolubKahan, {"rtol": 1e-3, "max_steps": 9, "delta": 1e-6, "k": 1, "vectors": False,
                                             "interval": 0.1, "seed": 0, "memory": 2**30}),
        "Dense": (lipscope.Dense, {"k": 1, "vectors": False}),
        "AutodiffOperator": (lipscope.AutodiffOperator, {"function": torch.tanh, "X": X[None], "batched": True}),
        "LayerNorm": (lipscope.LayerNorm, {"weight": W[0], "bias": W[0], "eps": 1e-5}),
        "RMSNorm": (lipscope.RMSNorm, {"weight": W[0], "eps": 1e-5}),
        "Rotary": (lipscope.Rotary, {"cos": torch.ones(3, 2), "sin": torch.zeros(3, 2), "interleaved": False}),
        "Model": (lipscope.Model, {"model": module, "tokenizer": None, "name": "m", "notes": (), "part": None, "dtype": None,
                                   "check": True}),
        "Run": (lipscope.Run, {"rows": (row,), "about": {}, "views": (), "name": "n", "left_out": 0}),
        "attack": (lipscope.attack, {"target": head, "lengths": [2, 3, 4], "radius": 1.0, "method": "construct",
                                     "restarts": 1, "steps": 2, "seed": 0, "head": 0}),
        "certify": (lipscope.certify, {"attention": layer, "X": X, "radius": 0.1}),
        "check": (lipscope.check, {"model": decoder, "n": 3, "inputs": None, "causal": None, "window": None, "seed": 0,
                                   "documents": None, "padding": None, "batch": True, "cache": False, "use_cache": None}),
        "sensitivity": (lipscope.sensitivity, {
            "model": decoder, "text": "python-docs", "perturb": "noise:0.01", "verify": False, "n": 3, "inputs": 1,
            "input_ids": torch.tensor([[1, 2, 3]]), "per_head": False, "damage": None, "probes": 2,
            "tokenizer": None, "seed": 0,
        }),
        "plot": (lipscope.plot, {"result": run, "title": ""}),
        "testing.assert_isolated": (lipscope.testing.assert_isolated, {"model": decoder, "inputs": None, "n": 3}),
        "influence": (lipscope.influence, {"map": layer, "X": X, "scope": "attention", "mask": "causal", "rtol": 1e-3}),
        "load": (lipscope.load, {"model": module, "tokenizer": None, "part": None, "dtype": None, "allow_pickle": False,
                                 "trust_remote_code": False, "revision": None, "attn_implementation": None,
                                 "device": None, "stream": False, "processor": None, "check": True}),
        "local_lipschitz": (lipscope.local_lipschitz, {
            "map": layer, "X": X, "scope": "attention", "mask": "causal", "solver": lipscope.Auto(), "dtype": torch.float64,
            "norm": None, "certificate": True, "memory": "1GiB",
        }),
        "scan": (lipscope.scan, {"model": model, "text": ["a few words"], "layers": [0], "heads": [0], "lengths": [2],
                                 "inputs": 1, "scope": "head", "solver": None, "seed": 0, "pack": False, "memory": None,
                                 "certificate": False, "batch_tokens": 64, "views": 0, "progress": None}),
        "smooth": (lipscope.smooth, {"model": module, "target": 1.0, "by": "max-logit", "layers": [0],
                                     "text": "python-docs", "heads": [0], "n": 4, "inputs": 1, "tokenizer": None,
                                     "inplace": False, "seed": 0, "solver": None, "input_ids": None}),
        "spectral_norm": (lipscope.spectral_norm, {"operator": lipscope.AutodiffOperator(torch.tanh, X[None]),
                                                   "solver": lipscope.Auto()}),
        "sweep": (lipscope.sweep, {"plan": plan, "store": store, "engine": None, "retry_failed": False, "progress": None}),
        "variant": (lipscope.variant, {"name": "l2", "layer": head}),
        "bounds.certified_radius": (lipscope.bounds.certified_radius, {"attention": layer, "X": X, "moves": 1.0}),
        "bounds.evaluate": (lipscope.bounds.evaluate, {"name": "refined.unmasked", "layer": head, "x": X, "radius": 2.0,
                                                       "n": 3}),
        "bounds.names": (lipscope.bounds.names, {"layer": layer}),
        "bounds.table": (lipscope.bounds.table, {"layer": head, "X": X, "radius": 2.0, "n": 3}),
        "bounds.table without tokens": (lipscope.bounds.table, {"layer": head, "radius": 2.0, "n": 3}),
        "masks.Explicit": (lipscope.masks.Explicit, {"tensor": torch.ones(3, 3).bool()}),
        "masks.Packed": (lipscope.masks.Packed, {"lengths": (1, 2), "causal": True}),
        "masks.Padding": (lipscope.masks.Padding, {"pads": (1,), "side": "left"}),
        "masks.PrefixLM": (lipscope.masks.PrefixLM, {"prefix": 2}),
        "masks.Window": (lipscope.masks.Window, {"width": 2, "causal": True}),
        "masks.as_mask": (lipscope.masks.as_mask, {"mask": "causal"}),
        "report.Chart": (lipscope.report.Chart, {"name": "c", "title": "t", "panels": [panel], "words": "w", "columns": 1}),
        "report.Panel": (lipscope.report.Panel, {"series": [series], "x": "x", "y": "y", "x_log": False, "x_ticks": ()}),
        "report.Series": (lipscope.report.Series, {"name": "s", "x": [1.0], "y": [2.0], "look": "line", "colour": "blue"}),
        "report.draw": (lipscope.report.draw, {"chart": chart}),
        "report.growth": (lipscope.report.growth, {"source": run}),
        "report.write_report": (lipscope.report.write_report, {"source": run, "out": directory / "page.html",
                                                               "compare": None}),
        "runs.Dask": (lipscope.runs.Dask, {"scheduler": "tcp://127.0.0.1:9", "workers": None, "timeout": 1.0}),
        "runs.InProcess": (lipscope.runs.InProcess, {"stop": False}),
        "runs.Plan": (lipscope.runs.Plan, {"blocks": plan.blocks, "threads": 1, "text": ""}),
        "runs.Plan.of": (lipscope.runs.Plan.of, {
            "models": ["a"], "texts": ["t"], "layers": [0], "heads": "all", "scopes": ["attention"], "lengths": [2],
            "inputs": 1, "kind": "text", "quantities": (), "options": {}, "dtype": None, "seed": 0, "rtol": 1e-3,
            "delta": 1e-6, "interval": 0.1, "max_steps": 9, "batch_tokens": 64, "certificate": None, "memory": None,
            "views": 0, "threads": 1,
        }),
        "runs.Plan.from_toml": (lipscope.runs.Plan.from_toml, {"text": 'models = "a"'}),
        "runs.Plan.read": (lipscope.runs.Plan.read, {"path": directory / "none.toml"}),
        "runs.Store": (lipscope.runs.Store, {"path": store, "write": False}),
        "runs.expand": (lipscope.runs.expand, {"plan": plan}),
        "runs.export": (lipscope.runs.export, {"store": store, "format": "csv", "out": None, "all_plans": False}),
        "training.ModelPenalty": (lipscope.training.ModelPenalty, {"model": module, "kind": "spectral", "layers": [0],
                                                                   "k": 0, "limit": 0.0, "solver": None}),
        "training.Monitor": (lipscope.training.Monitor, {"model": module, "every": 10, "heads": False, "layers": [0],
                                                         "inputs": 1, "tokens": 4, "thresholds": (), "scope": "attention"}),
        "training.Threshold": (lipscope.training.Threshold, {"quantity": "sigma", "above": 1.0, "below": None,
                                                             "action": "warn", "layers": None}),
        "training.QKClip": (lipscope.training.QKClip, {"model": decoder.model, "tau": 9.0, "every": 10, "layers": [0],
                                                        "inputs": 1, "tokens": 4, "base": False}),
        "training.QKClipCallback": (lipscope.training.QKClipCallback, {"tau": 9.0, "every": 10}),
        "training.LipschitzCallback": (lipscope.training.LipschitzCallback, {"every": 10, "heads": False, "thresholds": ()}),
        "training.jasmin_penalty": (lipscope.training.jasmin_penalty, {"attention": head, "X": X, "k": 0}),
        "training.max_logit_penalty": (lipscope.training.max_logit_penalty, {"attention": head, "X": X, "limit": 0.0}),
        "training.spectral_penalty": (lipscope.training.spectral_penalty, {"attention": head, "X": X, "solver": None}),
        "training.weight_penalty": (lipscope.training.weight_penalty, {"attention": head}),
        "worst_case.construct": (worst_case.construct, {"attention": head, "n": 3, "radius": 1.0, "norm": None,
                                                        "names": ["pair"], "head": 0, "solver": None}),
        "worst_case.grouped_sigma": (worst_case.grouped_sigma, {"layer": head, "tokens": X, "counts": [1.0, 2.0, 3.0]}),
        "worst_case.growth": (worst_case.growth, {"attention": head, "lengths": [2, 3, 4], "radius": 1.0, "head": 0,
                                                  "method": "construct", "restarts": 1, "steps": 2, "seed": 0}),
        "worst_case.maximise": (worst_case.maximise, {"attention": head, **small, "norm": None, "tolerance": 1e-3,
                                                      "patience": 2, "dtype": torch.float64}),
        "worst_case.attack_tokens": (worst_case.attack_tokens, {"handle": model, "text": "word", "layer": 0, "k": 1,
                                                                "candidates": 2, "beam": 1}),
        "mean_field.Ball": (mean_field.Ball, {"dimension": 2, "radius": 1.0}),
        "mean_field.Sphere": (mean_field.Sphere, {"dimension": 2, "radius": 1.0}),
        "mean_field.Gaussian": (mean_field.Gaussian, {"dimension": 2, "std": 1.0}),
        "mean_field.GaussianMixture": (mean_field.GaussianMixture, {"means": X, "stds": (1.0, 1.0, 1.0),
                                                                    "weights": torch.ones(3).double() / 3}),
        "mean_field.Empirical": (mean_field.Empirical, {"tokens": X}),
        "mean_field.Measure": (mean_field.Measure, {"points": X, "weights": torch.ones(3).double() / 3, "positions": None}),
        "mean_field.MeanFieldAttention": (mean_field.MeanFieldAttention, {"layer": head, "sink_length": None}),
        "mean_field.local_constant": (mean_field.local_constant, {"attention": field, "measure": points,
                                                                  "scope": "attention", "splitting": False}),
        "mean_field.wasserstein": (mean_field.wasserstein, {"mu": points, "nu": points, "p": 2.0}),
        "mean_field.convergence_study": (mean_field.convergence_study, {
            "attention": field, "law": mean_field.Ball(4, 1.0), "lengths": [2, 3], "repeats": 1, "seed": 0,
            "transport_up_to": 0,
        }),
        "variants.compare": (variants.compare, {"layer": head, "n": 3, "radius": 1.0, "lengths": [2, 3, 4], "inputs": 1,
                                                "search": 0, "names": ["dot-product"], "seed": 0, "tokens": None}),
        "variants.random_layer": (variants.random_layer, {"width": 4, "heads": 2, "mask": None, "seed": 0}),
        "variants.sphere_tokens": (variants.sphere_tokens, {"n": 3, "width": 4, "radius": 1.0, "inputs": 1, "seed": 0}),
        "paper.companion_estimator": (lipscope.studies.paper.companion_estimator, {"map": head, "X": X}),
    }  # fmt: skip
    recorded = model.record({"tokens": X[None]})
    methods: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "Attention.head": (layer.head, {"h": 0}),
        "Attention.with_mask": (layer.with_mask, {"mask": "causal"}),
        "Attention.__call__": (layer.__call__, {"X": X}),
        "Attention.from_torch": (lipscope.Attention.from_torch, {"module": nn.MultiheadAttention(4, 2).eval()}),
        "Model.record": (model.record, {"inputs_embeds": X[None]}),
        "Model.layer": (model.layer, {"index": 0}),
        "Recorded[]": (recorded.__getitem__, {"index": 0}),
        "RecordedLayer.sigma": (recorded[0].sigma, {"scope": "attention", "certificate": None}),
        "Run.read": (lipscope.Run.read, {"source": rows}),
        "Run.fit": (run.fit, {"level": 0.9, "seed": 0}),
    }
    return calls | methods


def _positional(function: Callable[..., Any], given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments as the function takes them: by name where it can, else by place."""
    parameters = list(inspect.signature(function).parameters.values())
    places = [p for p in parameters if p.kind is p.POSITIONAL_ONLY][: len(given)]
    named = {p.name for p in parameters} | ({*given} if any(p.kind is p.VAR_KEYWORD for p in parameters) else set())
    values = list(given.items())
    by_place = [value for _, value in values[: len(places)]]
    rest = values[len(places) :]
    if all(name in named for name, _ in rest):
        return by_place, dict(rest)
    return [*by_place, *(value for _, value in rest)], {}


def api(rng: random.Random, directory: Path, share: float = 1.0) -> Iterator[Case]:
    """Public functions, each argument in turn replaced by values of every kind."""
    for name, (function, given) in working_calls(directory).items():
        for argument in given:
            for kind, value in hostile(rng).items():
                if rng.random() < share:
                    args, kwargs = _positional(function, given | {argument: value})
                    yield tried(f"{name}({argument}={kind})", lambda f=function, a=args, k=kwargs: f(*a, **k), directory)


HOSTILE_WORDS = (
    "", "-1", "0", "99999999999999999999", "1e400", "nan", "inf", "-inf", "1.5", "nonsense", "0x10", "١٢", "/", "..", "~",
    "a" * 3000, "1:99999999999999999999:log", "1:1000000000000:1", "5:1:1", "1:9:0", "1,,2", ",", ":", "::", "1:2:3:4",
    "8:log", "[]", "{}", "null", "*", "$(id)", "%s%n", "/dev/null", "/proc/self/mem", "head", "block", "causal",
    "\x1b[31m", "window:99999999999999999999", "packed:1,x", "4GiB", "-4GiB", "1e99GiB",
)  # fmt: skip


def cli(rng: random.Random, directory: Path, count: int = 400) -> Iterator[Case]:
    """Commands whose options have hostile values; sizes stay small unless the value says otherwise."""
    import typer
    from typer.main import get_command
    from typer.testing import CliRunner

    from lipscope.cli.main import app

    (directory / "plan.toml").write_text('models = ["gpt2-mini"]\ntexts = ["python-docs"]\nlengths = [2]\nlayers = [0]\n')
    base: dict[str, list[str]] = {
        "scan": ["gpt2-mini", "--lengths", "4", "--inputs", "1", "--layers", "0"],
        "measure": ["random"], "tokens": ["gpt2-mini", "--n", "4"], "bounds": ["random", "--radius", "1", "--n", "4"],
        "attack": ["random", "--radius", "1", "--lengths", "4"],
        "compare-attention": ["random", "--n", "4", "--lengths", "4,6,8", "--inputs", "1", "--search", "0", "--kinds", "l2"],
        "meanfield": ["random", "--lengths", "4,6", "--repeats", "1", "--transport-up-to", "0"],
        "sweep": [str(directory / "plan.toml"), "--dry-run", "--store", str(directory / "none.db")],
        "report": [str(directory)], "export": [str(directory / "run.db")], "smooth": ["gpt2-mini", "--target", "1"],
        "corpora": [], "models": [], "describe": ["gpt2-mini"], "plan": [str(directory / "saved"), "--lengths", "4"],
        "check": ["gpt2-mini", "--n", "4"], "view": [str(directory / "none")], "paper": ["--quick", "--bert", "none"],
        "sensitivity": ["gpt2-mini", "--n", "4", "--inputs", "1", "--probes", "2"],
    }  # fmt: skip
    writing().save_pretrained(directory / "saved")
    skip = {"--out", "--store", "--save", "--csv", "--debug", "--help", "--workers", "--scheduler", "--open", "--refresh"}
    commands: Any = get_command(app)
    for _ in range(count):
        name = rng.choice(sorted(base))
        options = [p for p in commands.commands[name].params if isinstance(p, typer.core.TyperOption)]
        arguments = list(base[name])
        option = rng.choice(options) if options else None
        word = rng.choice(HOSTILE_WORDS)
        if option is not None and not option.is_flag and option.opts[0] not in skip:
            if option.opts[0] in arguments:
                arguments[arguments.index(option.opts[0]) + 1] = word
            else:
                arguments += [option.opts[0], word]
        elif arguments:
            arguments[0] = word
        line = [name, *arguments, "--debug"]

        def call(line: list[str] = line) -> None:
            done = CliRunner().invoke(app, line)
            if done.exception is not None and not isinstance(done.exception, SystemExit):
                raise done.exception

        yield tried("lipscope " + " ".join(line)[:200], call, directory)


def files(rng: random.Random, directory: Path, count: int = 400) -> Iterator[Case]:
    """Run directories whose files hold other JSON than they should, read, fitted and shown."""
    row = {"model": "m", "text": "t", "layer": 0, "head": None, "n": 8, "lower": 1.0, "estimate": 1.1, "upper": 1.2,
           "scope": "attention", "document": None, "input": 0, "radius_rms": 1.0, "entropy": 0.5, "sink_mass": 0.1,
           "dtype": "float32", "notes": "", "mask": "causal"}  # fmt: skip
    good = {
        "rows.json": [row, row | {"n": 16}],
        "run.json": {"about": {"seed": 0, "text": "t", "solver": {"rtol": 1e-3, "delta": 1e-6}}, "command": "c",
                     "environment": {"versions": {}}, "created": "2026"},
        "tokens.json": [],
    }  # fmt: skip
    values = [None, 5, -1.5, "word", [], {}, [[]], [1], {"a": 1}, True, float("nan"), 10**400, "\ud800", "<script>"]
    for number in range(count):
        content = json.loads(json.dumps(good))
        name = rng.choice(sorted(content))
        text: str | None = None
        if rng.random() < 0.3:
            content[name] = rng.choice(values)
        elif rng.random() < 0.1:
            text = rng.choice(["", "{", "[" * 100_000, "nul", '{"a": }', "\x00", "[1,", '"' + "x" * 10**5])
        else:
            place = content[name]
            if isinstance(place, list):
                place = rng.choice(place) if place else content["rows.json"][0]
            key = rng.choice(sorted(place))
            if isinstance(place[key], dict) and place[key] and rng.random() < 0.5:
                place, key = place[key], rng.choice(sorted(place[key]))
            if rng.random() < 0.2:
                del place[key]
            else:
                place[key] = rng.choice(values)
        where = directory / f"run-{number}"
        where.mkdir()
        for file, told in content.items():
            written = text if text is not None and file == name else json.dumps(told)
            (where / file).write_text(written, encoding="utf-8", errors="surrogatepass")

        def call(where: Path = where) -> None:
            load_run(where)
            lipscope.report.write_report(where, where / "page.html")

        yield tried(f"run directory {number} ({name} spoiled: {str(content[name])[:160]})", call, directory)


def media(rng: random.Random, directory: Path, count: int = 400) -> Iterator[Case]:
    """Sound and images with other bytes than they should have, cut short, or with absurd numbers in their headers."""
    sound, pixels = io.BytesIO(), np.arange(432, dtype=np.uint8).reshape(12, 12, 3)
    with wave.open(sound, "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(bytes(range(256)) * 6)
    good = {"WAV": sound.getvalue()}
    for name in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "DDS", "EPS", "ICO", "TGA"):
        written = io.BytesIO()
        Image.fromarray(pixels).save(written, name)
        good[name] = written.getvalue()
    models = {"audio": hearing(), "image": seeing()}
    for number in range(count):
        name = "WAV" if rng.random() < 0.5 else rng.choice(sorted(good))
        option = "audio" if name == "WAV" else "image"
        content = bytearray(good[name])
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(max(len(content), 1))
            match rng.randrange(4):
                case 0:
                    content[place % 60 : place % 60 + 1] = bytes([rng.randrange(256)])
                case 1:
                    del content[max(place, 8) :]
                case 2:
                    place = 4 * rng.randrange(10)
                    content[place : place + 4] = rng.choice([0, 1, 2**31 - 1, 2**32 - 1, 65_537, 10**9]).to_bytes(
                        4, "little"
                    )
                case 3:
                    content[place : place + 1] = bytes([rng.randrange(256)])
        path = directory / f"{option}-{number}"
        path.write_bytes(content)

        def call(option: str = option, path: Path = path) -> None:
            models[option].record(**{option: path})

        yield tried(f"{option} {number} ({name}, {len(content)} bytes: {bytes(content[:48])!r})", call, directory)


def writing() -> tf.GPT2LMHeadModel:
    """A tiny random GPT-2."""
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=9, n_positions=8, n_embd=4, n_layer=1, n_head=1)).eval()


def hearing() -> lipscope.Model:
    """A tiny random wav2vec2."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = tf.Wav2Vec2Config(**small, conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=8,
                               num_conv_pos_embedding_groups=2)  # fmt: skip
    return lipscope.load(tf.Wav2Vec2Model(config).eval(), processor=tf.Wav2Vec2FeatureExtractor())


def seeing() -> lipscope.Model:
    """A tiny random ViT."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = tf.ViTConfig(**small, image_size=8, patch_size=4)
    return lipscope.load(tf.ViTModel(config).eval(), processor=tf.ViTImageProcessorPil(size={"height": 8, "width": 8}))


def main() -> int:
    """Run all, and list what came from the inside."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the cases, drawn from the seed")
    parser.add_argument("--only", default="api,cli,files,media")
    asked = parser.parse_args()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="lipscope-fuzz-") as name:
        for which in asked.only.split(","):
            rng, directory = random.Random(f"{asked.seed} {which}"), Path(name) / which
            directory.mkdir()
            attack = {"api": lambda r, d: api(r, d, asked.share), "cli": lambda r, d: cli(r, d, int(400 * asked.share)),
                      "files": lambda r, d: files(r, d, int(400 * asked.share)),
                      "media": lambda r, d: media(r, d, int(400 * asked.share))}[which]  # fmt: skip
            cases = list(attack(rng, directory))
            inside = [case for case in cases if case.from_inside]
            failed += len(inside)
            for case in inside:
                print(case)
            kinds = Counter(type(case.error).__name__ for case in inside)
            print(f"{which}: {len(cases)} cases, {len(inside)} from the inside {dict(kinds)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
