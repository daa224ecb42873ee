"""Tiny models under the names that the paper's run asks for, tiny settings, and synthetic rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from lipscope.models.checkpoints import Loaded
from lipscope.models.load import ZOO, ByteTokenizer, Entry
from lipscope.runs.plan import ModelChoice
from lipscope.studies.paper.cast import Cast, Member
from lipscope.studies.paper.plan import QUICK, Settings
from model_families import FAMILIES

TINY: Settings = dataclasses.replace(
    QUICK, lengths=(2, 4, 8), long_lengths=(12,), adversarial_lengths=(2, 4, 7), ascent_lengths=(4,), ascent_steps=2,
    radii=(1.0,), norm_layers=2, norm_lengths=(4,), norm_inputs=1, difference_length=6, difference_inputs=2, threads=1,
)  # fmt: skip


def tiny_zoo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two-layer models in place of the large ones; no hub, no other pretrained model."""

    def entry(name: str, family: str, seed: int) -> Entry:
        def load(name: str, files: Any) -> Loaded:
            model = FAMILIES[family]()
            model.resize_token_embeddings(256, mean_resizing=False)
            torch.manual_seed(seed)
            torch.nn.init.normal_(model.get_input_embeddings().weight)
            return Loaded(model, ByteTokenizer(), name, ("tiny",))

        return Entry(name, "two layers", "none", "none", load)

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("LIPSCOPE_ORIGINALS", raising=False)
    for name in reversed(list(ZOO)):  # so that undoing it keeps their order
        monkeypatch.delitem(ZOO, name)
    for seed, (name, family) in enumerate((("bert-random", "bert"), ("gpt2-random", "gpt2"), ("smollm2-135m", "llama"))):
        monkeypatch.setitem(ZOO, name, entry(name, family, seed))


CAST = Cast(
    (
        Member(ModelChoice("bert-random"), "bert-random", "bert", "random"),
        Member(ModelChoice("gpt2-random"), "gpt2-random", "gpt2", "random"),
        Member(ModelChoice("minilm-l6"), "minilm-l6", "bert", "pretrained", stands_for="bert-base-uncased"),
    )
)


def text_rows(model: str, layer: int, factor: float, alpha: float, *, companion: tuple[float, float] | None = None,
              lengths: tuple[int, ...] = (4, 8, 16, 32, 64), **columns: Any) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of real text on an exact power law, the companion estimator on another."""
    rows = []
    for n in lengths:
        for i in range(3):
            sigma = factor * n**alpha * (1 + 0.01 * (i - 1))
            row = {"experiment": "growth", "model": model, "layer": layer, "mask": "full", "scope": "attention", "n": n,
                   "input": i, "text": "alice", "lower": 0.99 * sigma, "estimate": sigma, "upper": 1.1 * sigma,
                   "converged": True, "radius_max": 3.0, "radius_rms": 2.0, "notes": "", "width": 8}  # fmt: skip
            if companion is not None:
                row["companion"] = companion[0] * n ** companion[1]
            rows.append(row | columns)
    return rows
