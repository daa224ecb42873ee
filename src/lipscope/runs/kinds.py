"""The two kinds of tasks that measure text: inputs of exactly n tokens, and inputs packed with several documents."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lipscope.models.corpora import read_text
from lipscope.models.model import Model
from lipscope.models.packing import measure_packed_recordings, packed_chunks, record_packed
from lipscope.models.recorded import Recorded
from lipscope.models.text import Chunker, excerpt_for, input_batches
from lipscope.runs.plan import Block
from lipscope.runs.registry import Measured, Pass, Row, load_object
from lipscope.runs.rows import SHORT_DIGEST, digest
from lipscope.spectral.solvers import Auto

COORDINATES = ("layer", "head", "scope", "mask", "n", "input", "document")


class Text:
    """σ on disjoint pieces of a text, ``inputs`` of every length."""

    coordinates: tuple[str, ...] = COORDINATES
    effort = 1.0

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """The same chunks and batches as ``lipscope.scan`` with the same seed."""
        settings = layer_settings(block, handle)
        for name, documents, fingerprint in _texts(block, handle):
            chunks = Chunker(documents, handle.tokenizer).chunks(block.sizes, block.inputs, block.seed)
            for n, first, ids in input_batches(chunks, block.batch_tokens):
                identity = {"text": fingerprint, "n": n, "first": first, "batch": digest(ids)}
                yield Pass(identity, {"ids": ids, "first": first}, n, len(ids), name, settings)

    def record(self, handle: Model, payload: dict[str, Any]) -> Recorded:
        """One forward pass."""
        return handle.record(handle.token_inputs(input_ids=torch.tensor(payload["ids"])))

    def measure(self, handle: Model, recorded: Recorded, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """The rows of one layer and scope, with the quantities asked for."""
        rows = recorded[task["layer"]].rows(
            task["scope"], heads=task["heads"], solver=Auto(**task["solver"]), first_input=payload["first"]
        )
        for row in rows:
            row["input_digest"] = digest(payload["ids"][row["input"] - payload["first"]])[:SHORT_DIGEST]
        return add_quantities(Measured(handle, recorded, task, rows))


class Packed:
    """σ of inputs that hold several documents which do not see each other, and of each document alone."""

    coordinates = COORDINATES
    effort = 2.0

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """One pass per packed chunk."""
        if block.quantities:
            raise ValueError("kind 'packed' measures no further quantities")
        settings = layer_settings(block, handle)
        for name, documents, fingerprint in _texts(block, handle):
            bundles = packed_chunks(documents, handle.tokenizer, block.sizes, block.inputs, block.seed)
            for n, bundle in bundles.items():
                for which, chunk in enumerate(bundle):
                    identity = {"text": fingerprint, "n": n, "first": which, "batch": digest(chunk)}
                    yield Pass(identity, {"chunk": chunk, "which": which}, n, 1, name, settings)

    def record(self, handle: Model, payload: dict[str, Any]) -> list[tuple[int | None, Recorded]]:
        """The chunk, and each document alone."""
        return record_packed(handle, payload["chunk"])

    def measure(self, handle: Model, recorded: Any, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """The rows of one layer and scope."""
        rows = measure_packed_recordings(
            handle, recorded, layers=[task["layer"]], scope=task["scope"], heads=task["heads"],
            solver=Auto(**task["solver"]), which=payload["which"],
        )  # fmt: skip
        return [row | {"input_digest": digest(payload["chunk"])[:SHORT_DIGEST]} for row in rows]


def layer_settings(block: Block, handle: Model) -> tuple[dict[str, Any], ...]:
    """Layer, scope and heads of every task; refuses those that the model does not have."""
    settings = []
    for scope in block.scopes:
        for layer in handle.check_layers(None if isinstance(block.layers, str) else block.layers, scope):
            heads = None
            if scope == "head":
                heads = handle.check_heads(layer, None if isinstance(block.heads, str) else block.heads)
            else:
                # Building the map says whether the layer has it; nothing is computed.
                handle.probe_recording[layer].map(scope)
            settings.append({"layer": layer, "scope": scope, "heads": heads})
    return tuple(settings)


def add_quantities(at: Measured) -> list[Row]:
    """The rows with the columns of every quantity of the task."""
    rows = [dict(row) for row in at.rows]
    for path in at.settings["quantities"]:
        extra: Sequence[Row] = load_object(path)(at)
        if len(extra) != len(rows):
            raise ValueError(f"quantity {path} gave {len(extra)} rows for {len(rows)} measurements")
        for row, columns in zip(rows, extra, strict=True):
            if taken := row.keys() & columns.keys():
                raise ValueError(f"quantity {path} would overwrite {', '.join(sorted(taken))}")
            row.update(columns)
    return rows


def _texts(block: Block, handle: Model) -> Iterator[tuple[str, list[str], str]]:
    handle.check_lengths(block.sizes)
    if not block.texts:
        raise ValueError(f"kind {block.kind!r} needs texts: names of corpora, files or directories")
    for name in block.texts:
        documents = read_text(os.fspath(name))
        yield name, excerpt_for(documents, block.sizes, block.inputs, block.seed), digest(documents)
