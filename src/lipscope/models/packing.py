"""Packed documents: several documents in one chunk, attention never crossing a boundary.

The Jacobian is block diagonal, so σ(chunk) = max over documents of σ(document): the length of the documents, not that of
the chunk, sets the constant.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import torch

from lipscope.models.model import Model
from lipscope.models.recorded import Recorded
from lipscope.models.text import special_tokens
from lipscope.spectral.solvers import Solver

Rows = list[dict[str, Any]]


def packed_chunks(
    documents: Sequence[str], tokenizer: Any, lengths: Sequence[int], inputs: int, seed: int = 0
) -> dict[int, list[list[list[int]]]]:
    """``inputs`` chunks of exactly n tokens for every length, each a list of documents; the last one is cut to fit.

    A text of one document is packed paragraph by paragraph. Documents come in seeded random order and are used once.

    Raises:
        ValueError: when the text has too few tokens; says how many there are.
    """
    if len(documents) == 1:
        documents = [part for part in re.split(r"\n\s*\n", documents[0]) if part.strip()]
    prefix, suffix = special_tokens(tokenizer)
    tokenised = [tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"] for part in documents]
    least = len(prefix) + len(suffix) + 1
    queue = [[*prefix, *ids, *suffix] for ids in tokenised if ids]
    available = sum(map(len, queue))
    random.Random(seed).shuffle(queue)
    result: dict[int, list[list[list[int]]]] = {}
    for n in lengths:
        result[n] = []
        for _ in range(inputs):
            chunk: list[list[int]] = []
            room = n
            while room:
                if not queue:
                    raise ValueError(
                        f"the text has {available} tokens in {len(tokenised)} documents, too few for {inputs} packed chunks "
                        f"of each length {', '.join(map(str, lengths))}"
                    )
                document = queue.pop()
                take = room if len(document) >= room else len(document)
                if 0 < room - take < least:
                    # What is left would not hold another document: leave more of it.
                    take = room - least
                if take < least:
                    continue
                if take < len(document):
                    # Cut inside the text, so that the closing special tokens stay.
                    document = [*document[: take - len(suffix)], *suffix]
                chunk.append(document)
                room -= len(document)
            result[n].append(chunk)
    return result


def measure_packed(
    handle: Model,
    chunk: Sequence[Sequence[int]],
    *,
    layers: Sequence[int],
    scope: str,
    heads: Sequence[int] | None = None,
    solver: Solver | None = None,
    certificate: bool | None = None,
    memory: int | None = None,
    which: int = 0,
) -> Rows:
    """Rows of a packed chunk (``document`` None) and of each of its documents alone (``document`` 0, 1, …)."""
    return measure_packed_recordings(
        handle,
        record_packed(handle, chunk),
        layers=layers,
        scope=scope,
        heads=heads,
        solver=solver,
        certificate=certificate,
        memory=memory,
        which=which,
    )


def record_packed(handle: Model, chunk: Sequence[Sequence[int]]) -> list[tuple[int | None, Recorded]]:
    """The forward pass of a packed chunk (``None``) and those of its documents alone (0, 1, …)."""
    inputs, lengths = handle.packed_inputs(chunk)
    together = handle.record(inputs, documents=lengths)
    alone = [handle.record(input_ids=torch.tensor(list(document))) for document in chunk]
    return [(None, together), *enumerate(alone)]


def measure_packed_recordings(
    handle: Model,
    recordings: Sequence[tuple[int | None, Recorded]],
    *,
    layers: Sequence[int],
    scope: str,
    heads: Sequence[int] | None = None,
    solver: Solver | None = None,
    certificate: bool | None = None,
    memory: int | None = None,
    which: int = 0,
) -> Rows:
    """The rows of ``measure_packed`` from recorded passes."""
    rows: Rows = []
    for layer in layers:
        for document, recording in recordings:
            for row in recording[layer].rows(
                scope, heads=heads, solver=solver, certificate=certificate, memory=memory, first_input=which
            ):
                rows.append(row | {"document": document})
    return rows
