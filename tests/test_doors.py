"""The door of every public name: what is let in, what is refused, and in which words."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import fuzz
import lipscope
from lipscope.doors import checked, fits, read_json, refuse_shape, wording
from lipscope.models.text import Chunker

W = torch.eye(4, dtype=torch.float64)


@pytest.mark.parametrize(
    ("hint", "let_in", "refused"),
    [
        (int, [1, np.int64(2), torch.tensor(3)], [True, 1.0, "1", None, torch.tensor(1.0), torch.ones(2), int]),
        (float, [1, 1.5, np.float32(2), torch.tensor(3.0)], [True, "1", None, 1j, torch.ones(2), float]),
        (bool, [True], [1, "yes", None]),
        (str | None, ["a", None], [b"a", Path("a"), 1]),
        (Tensor, [W], [[1.0], np.ones(2), None]),
        (Sequence[int], [[1], (2,), range(3), [], torch.arange(3)], ["12", [1.5], [None], 3, {1}]),
        (tuple[int, ...], [(1, 2)], [[1], ("a",)]),
        (tuple[int, str], [(1, "a")], [(1,), (1, 2)]),
        (Mapping[str, Any], [{"a": 1}], [{1: 2}, [1]]),
        (Literal["max", "min"], ["max", "other"], [1, None]),
        (Callable[[int], int] | None, [len, None], [3, "len"]),
        (lipscope.Operator, [lipscope.AutodiffOperator(torch.tanh, W[None])], [W, 3, object()]),
        (Any, [object()], []),
    ],
)
def test_values_are_compared_with_annotations(hint: Any, let_in: list[Any], refused: list[Any]) -> None:
    assert all(fits(value, hint) for value in let_in)
    assert not any(fits(value, hint) for value in refused)


def test_what_is_asked_for_in_words() -> None:
    assert wording(int | None) == "an integer or None"
    assert wording(str | Sequence[float] | Tensor) == "a string, a list, each of it a number or a torch tensor"
    assert wording(lipscope.RMSNorm) == "an RMSNorm"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lipscope.bounds.table(3), "layer must be an Attention or a Variant, got 3"),
        (lambda: lipscope.scan("gpt2-mini", "alice", inputs="many"), "inputs must be an integer, got 'many'"),
        (lambda: lipscope.scan("gpt2-mini", "alice", lengths=["a"]), "lengths must be a list, each of it an integer, a"),
        (lambda: lipscope.scan("gpt2-mini"), "give exactly one of text, audio, image and features"),
        (lambda: lipscope.load(3), "model must be a string, a path, a Module or a Model, got 3"),
        (lambda: lipscope.Attention(W, W, W).head(None), "index must be an integer, got None"),
        (lambda: lipscope.runs.Plan.from_toml(b""), "text must be a string, got bytes"),
        (lambda: lipscope.load("a\0b"), "model holds a character that no name or text has"),
        (lambda: lipscope.Auto(seed=2**70), "seed must be a number of at most 64 bits"),
        (lambda: lipscope.local_lipschitz(torch.tanh, W.to("meta")), "X is on the meta device"),
        (lambda: Chunker(["words"], lambda *given, **more: given), "tokenizer must map a string to {'input_ids': …}"),
        (lambda: lipscope.training.LipschitzCallback(thresholds=3), "must be a list, each of it a Threshold, got 3"),
        (lambda: lipscope.training.QKClipCallback(9.0, every="a"), "every must be an integer, got 'a'"),
        (lambda: lipscope.testing.assert_isolated(torch.nn.Linear(4, 4), n={3}), "n must be an integer or None, got set"),
        (lambda: lipscope.check(-1), "model must be a string, a path, a Module or a Model, got -1"),
        (lambda: lipscope.load("gpt2-mini").record({"a": 1}), "inputs hold no tensor: give the model's keyword arguments"),
        (lambda: lipscope.load("gpt2-mini").record(input_ids=W * 1j), r"input_ids must be integers, got torch.complex"),
        (lambda: lipscope.training.weight_penalty(W), "attention must be an Attention, got Tensor"),
    ],
)  # fmt: skip
def test_the_door_names_the_argument(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_door_is_the_function_behind_it() -> None:
    from lipscope.runs.scan import scan

    assert lipscope.scan is lipscope.scan is checked(scan)
    assert lipscope.scan.__doc__ == scan.__doc__
    # Numbers of numpy and torch become Python's, so that they can be written down.
    layer = lipscope.Attention(W, W, W)
    assert type(lipscope.bounds.table(layer, radius=torch.tensor(1.0), n=np.int64(3)).n) is int


def test_memory_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(X: Tensor) -> Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    greedy.__module__ = "lipscope.studies.variants"
    with pytest.raises(MemoryError, match="not enough memory for greedy"):
        checked(greedy)(W)


def test_data_from_files(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for text, message in (("[]", "must hold an object of JSON, got list"), ("[" * 10**5, "not JSON that can be read")):
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_json(file, dict)
    with pytest.raises(ValueError, match=r"it\.json is damaged, .*: n must be an integer, got 'x'"):
        refuse_shape("it.json", {"n": "x"}, {"n": int})
    with pytest.raises(ValueError, match="n must be an integer, got None"):
        refuse_shape("it.json", {}, {"n": int}, whole=True)
    refuse_shape("it.json", {"more": object()}, {"n": int})


def test_nothing_raises_from_the_inside(tmp_path: Path) -> None:
    """A small part of ``checks/fuzz.py``."""
    rng = random.Random(7)
    places = [tmp_path / name for name in ("api", "files", "cli", "media")]
    for place in places:
        place.mkdir()
    cases = [*fuzz.api(rng, places[0], share=0.02), *fuzz.files(rng, places[1], 40), *fuzz.cli(rng, places[2], 6),
             *fuzz.media(rng, places[3], 60)]  # fmt: skip
    assert len(cases) > 250
    assert sum(case.error is not None for case in cases) > 150
    assert [str(case) for case in cases if case.from_inside] == []


def test_the_fuzz_tells_the_inside_from_the_door() -> None:
    layer = lipscope.Attention(W, W, W)
    assert fuzz.tried("inside", lambda: layer.split_heads(None)).from_inside
    assert not fuzz.tried("door", lambda: layer.head("x")).from_inside
    assert fuzz.tried("door", lambda: layer.head("x")).error is not None


def test_what_a_fuzz_found_is_said_in_words(tmp_path: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
    small = lipscope.Attention(*[torch.eye(4)] * 3)
    for expected, call in (
        (r"takes its tokens \(B, n, d\)", lambda: lipscope.load(layer).record({"a": 1})),
        (r"X must have shape", lambda: lipscope.certify(small, torch.empty(0, 4), radius=0.1)),
        (r"/mem cannot be read", lambda: lipscope.report.write_report("/proc/self/mem", tmp_path / "report.html")),
        (r"/mem cannot be read", lambda: lipscope.runs.Plan.read("/proc/self/mem")),
        (r"certificate must be true, false or one of", lambda: lipscope.runs.Plan.of(models="m", certificate=np.ones(2))),
        (r"x must have shape", lambda: lipscope.bounds.evaluate("refined.unmasked", small, x=torch.tensor(2.0))),
        (r"tokens must have shape", lambda: lipscope.studies.worst_case.grouped_sigma(small, torch.tensor(2.0), [1])),
        (r"tokenizer must be a tokenizer", lambda: lipscope.load(layer, int)),
        (r"X must have batch items first", lambda: lipscope.AutodiffOperator(torch.tanh, torch.tensor(2.0))),
        (r"X holds NaN", lambda: lipscope.certify(small, torch.full((3, 4), float("nan")), radius=0.1)),
        (r"certificate must be true, false or one of", lambda: lipscope.runs.Plan.of(models="m", certificate=["fast"])),
        (r"returned tuple, not a tensor", lambda: lipscope.training.spectral_penalty(lambda *x: x, torch.eye(4))),
        (r"attention must be an Attention", lambda: lipscope.studies.worst_case.growth(layer, [2, 3], radius=1.0)),
    ):
        with pytest.raises((TypeError, ValueError), match=expected):
            call()
