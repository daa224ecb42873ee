"""The example that packs documents in three ways: the same documents for all, masks that hold, sentences by rule."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch

import train_packed_gpt2 as example
from gpt2_mini.books import Books
from gpt2_mini.step import seeded_gpt2
from lipscope.models.corpora import read_text

SETTINGS = example.Settings(
    layers=1, width=16, heads=2, window=16, positions=64, vocabulary=300, shortest=4, windows_per_step=2,
    steps_per_group=3, steps=6, warmup=1, lengths=(4, 8, 16, 32, 64), inputs=3, held_out=6,
)  # fmt: skip


@pytest.fixture(scope="module")
def data() -> example.Data:
    texts = read_text("python-docs")
    words = "\n\n".join(" ".join(texts[k].split()[: 1 + k % 5]) for k in range(40))
    return example.prepare(SETTINGS, Books({"a": words}, {"a": words}, texts[1]))


def pairs(batches: list[example.Batch]) -> Counter[tuple[int, int]]:
    """Every (token, next token) that is trained on."""
    found: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        kept = batch.targets != example.IGNORED
        found.update(zip(batch.ids[kept].tolist(), batch.targets[kept].tolist(), strict=True))
    return found


def test_all_ways_train_on_the_same_documents(data: example.Data) -> None:
    size = SETTINGS.steps_per_group * SETTINGS.windows_per_step * SETTINGS.window + 1
    group = next(example.groups(data.train, size, 0))
    assert sum(map(len, group)) == size
    inside: Counter[tuple[int, int]] = Counter()
    for document in group:
        inside.update(pairwise(document))
    masked, buckets = example.windows_of(group, SETTINGS, True), example.buckets_of(group, SETTINGS, 0)
    assert len(masked) == len(buckets) == SETTINGS.steps_per_group
    assert pairs(masked) == pairs(buckets) == inside
    stream = [token for document in group for token in document]
    assert pairs(example.windows_of(group, SETTINGS, False)) == Counter(pairwise(stream))


@torch.no_grad()
def test_masked_windows_look_at_no_other_document(data: example.Data) -> None:
    model = seeded_gpt2(SETTINGS).eval()
    for parameter in model.parameters():
        parameter.mul_(10)  # so that attention matters
    size = SETTINGS.steps_per_group * SETTINGS.windows_per_step * SETTINGS.window + 1
    batch = example.windows_of(next(example.groups(data.train, size, 1)), SETTINGS, True)[0]
    assert batch.documents is not None
    assert max(len(row.unique()) for row in batch.documents) > 1
    alone = []
    for ids, targets, owner in zip(batch.ids, batch.targets, batch.documents, strict=True):
        for document in owner.unique():
            here = owner == document
            kept = targets[here] != example.IGNORED
            logits = model(input_ids=ids[here][None]).logits[0][kept]
            alone.append(torch.nn.functional.cross_entropy(logits, targets[here][kept], reduction="none"))
    assert float(example.loss_of(model, batch)) == pytest.approx(float(torch.cat(alone).mean()), rel=1e-5)
    across = example.Batch(batch.ids, batch.targets, batch.places)
    assert float(example.loss_of(model, across)) != pytest.approx(float(torch.cat(alone).mean()), rel=1e-3)


def test_runs_are_kept_and_sentences_follow_their_rule(data: example.Data, tmp_path: Any) -> None:
    runs = [example.kept_run(SETTINGS, way, tmp_path, data)[0] for way in example.WAYS]
    assert example.kept_run(SETTINGS, "masked", tmp_path, None)[0] == runs[1]
    other = example.Settings(**{**vars(SETTINGS), "steps": 5})
    with pytest.raises(ValueError, match="was trained with steps = 6, not 5"):
        example.kept_run(other, "masked", tmp_path, None)
    text = example.tables(runs)
    assert f"| masked | 0 | {runs[1]['train_loss']:.3f} |" in text
    # σ of one way halved on every input, with some scatter: below, with the whole interval.
    smaller = json.loads(json.dumps(runs[0])) | {"way": "masked"}
    for k, row in enumerate(smaller["rows"]):
        row["estimate"] *= 0.5 + 0.01 * (k % 3)
    text = example.tables([runs[0], smaller, runs[0] | {"way": "buckets"}])
    assert "- `masked` against `across`, n = 16, by layer: σ below in 0." in text
    assert "- `buckets` against `across`, n = 16, by layer: σ undecided in 0." in text
    assert "so in the one seed" in text
    assert example.chart(runs).panels[0].series[0].name == "across, seed 0"
