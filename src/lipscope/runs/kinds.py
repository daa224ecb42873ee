"""The kinds of tasks that measure text: inputs of exactly n tokens, inputs packed with several documents, single tokens.

All that the driver asks of a model's layers stands here: recording a pass, and the rows of one layer on it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pkgutil import resolve_name
from typing import Any

import torch

from lipscope.attention.tiled import Tiling
from lipscope.measure.memory import read_bytes, within_memory
from lipscope.models.corpora import read_text
from lipscope.models.memory import batch_size, plan_layers, recorded_bytes
from lipscope.models.model import Model
from lipscope.models.recorded import Recorded
from lipscope.models.text import Chunker, excerpt_for, packed_chunks
from lipscope.models.tokens import token_view
from lipscope.runs.plan import Block
from lipscope.runs.registry import Measured, Pass, Row
from lipscope.runs.run import LIVE_DOCUMENTS
from lipscope.runs.schema import SHORT_DIGEST, digest
from lipscope.spectral.solvers import Auto, Solver, triplets, within

COORDINATES = ("layer", "head", "scope", "mask", "n", "input", "document")

Settings = tuple[dict[str, Any], ...]


class Text:
    """σ on disjoint pieces of a text, ``inputs`` of every length."""

    coordinates: tuple[str, ...] = COORDINATES
    effort = 1.0

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """One pass per batch of inputs; with limited memory one per batch and scope."""
        return _passes(block, handle, packed=False)

    def record(self, handle: Model, payload: dict[str, Any]) -> Recorded:
        """One forward pass."""
        with _tiling(payload):
            return handle.record(input_ids=torch.tensor(payload["ids"]))

    def measure(self, handle: Model, recorded: Recorded, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """The rows of one layer and scope, with the quantities asked for."""
        rows = measured_rows(recorded, payload, task, payload["first"])
        for row in rows:
            row["input_digest"] = digest(payload["ids"][row["input"] - payload["first"]])[:SHORT_DIGEST]
        return add_quantities(Measured(handle, recorded, task, rows))


class Signals(Text):
    """σ on clips, images or features, one pass each; for a run in this process, which holds them."""

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """One pass per input; with limited memory one per input and scope."""
        if block.live is None or block.live.signals is None:
            raise ValueError(
                "kind 'signals' is for lipscope.scan(…, audio=…, image=… or features=…), not for plans of names"
            )
        name, pieces = block.live.signals
        whole = digest([piece.digest for piece in pieces])
        for settings in _groups(block, handle):
            seen: Counter[int] = Counter()
            for piece in pieces:
                first, ids = seen[piece.n], [piece.digest]
                seen[piece.n] += 1
                identity = {"text": whole, "n": piece.n, "first": first, "batch": digest(ids)}
                payload: dict[str, Any] = {"ids": ids, "first": first, "signal": piece}
                if limit := _limit(block, handle, settings, piece.n, 1):
                    beside = max(1, limit["limit"] - recorded_bytes(handle, piece.n))
                    identity["memory"] = payload["memory"] = limit | {"certificate": beside}
                yield Pass(identity, payload, piece.n, 1, name, settings)

    def record(self, handle: Model, payload: dict[str, Any]) -> Recorded:
        with _tiling(payload):
            return handle.record(payload["signal"].inputs)


class Packed:
    """σ of inputs that hold several documents which do not see each other, and of each document alone.

    The Jacobian of such an input is block diagonal, so its σ is the largest one of its documents.
    """

    coordinates = COORDINATES
    effort = 2.0

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """One pass per packed chunk; with limited memory one per chunk and scope."""
        if block.quantities:
            raise ValueError("kind 'packed' measures no further quantities")
        return _passes(block, handle, packed=True)

    def record(self, handle: Model, payload: dict[str, Any]) -> list[tuple[int | None, Recorded]]:
        """The chunk (None), and each document alone (0, 1, …)."""
        with _tiling(payload):
            inputs, lengths = handle.packed_inputs(payload["ids"])
            together = handle.record(inputs, documents=lengths)
            alone = [handle.record(input_ids=torch.tensor(ids)) for ids in payload["ids"]]
        return [(None, together), *enumerate(alone)]

    def measure(self, handle: Model, recorded: Any, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """The rows of one layer and scope."""
        return [
            row | {"document": document, "input_digest": digest(payload["ids"])[:SHORT_DIGEST]}
            for document, recording in recorded
            for row in measured_rows(recording, payload, task, payload["first"])
        ]


class Tokens:
    """One layer or head at one input, token by token: who carries the worst direction, and who moves whom."""

    coordinates = COORDINATES

    def expand(self, block: Block, handle: Model) -> Iterator[Pass]:
        """Nothing: which inputs are the worst is known when a block is measured; see ``lipscope.runs.sweep``."""
        return iter(())

    def record(self, handle: Model, payload: dict[str, Any]) -> None:
        """A view records its own pass."""

    def measure(self, handle: Model, recorded: None, payload: dict[str, Any], task: dict[str, Any]) -> list[Row]:
        """The view, as a row of its own."""
        head = None if task["heads"] is None else task["heads"][0]
        view = token_view(handle, payload.get("signal", payload["ids"]), task["layer"], scope=task["scope"], head=head)
        return [view.to_dict() | {"input": payload["first"]}]


def _passes(block: Block, handle: Model, *, packed: bool) -> Iterator[Pass]:
    groups = _groups(block, handle)
    pieces: Mapping[int, Sequence[Any]]
    for name, documents, fingerprint in _texts(block, handle):
        if packed:
            pieces = packed_chunks(documents, handle.tokenizer, block.sizes, block.inputs, block.seed)
        else:
            pieces = Chunker(documents, handle.tokenizer).chunks(block.sizes, block.inputs, block.seed)
        for settings in groups:
            for n, inputs in pieces.items():
                together = batch_size(n, block.inputs, block.batch_tokens, packed, block.batch_size)
                limit = _limit(block, handle, settings, n, together)
                together = 1 if limit and limit["alone"] else together
                for first in range(0, len(inputs), together):
                    ids = inputs[first] if packed else inputs[first : first + together]
                    identity = {"text": fingerprint, "n": n, "first": first, "batch": digest(ids)}
                    payload: dict[str, Any] = {"ids": ids, "first": first}
                    if limit:  # a certificate may take what the passes leave: documents are recorded together, and alone
                        beside = max(1, limit["limit"] - recorded_bytes(handle, n, len(ids) + packed))
                        identity["memory"] = payload["memory"] = limit | {"certificate": beside}
                    yield Pass(identity, payload, n, 1 if packed else len(ids), name, settings)


def measured_rows(recording: Recorded, payload: dict[str, Any], task: dict[str, Any], first_input: int) -> list[Row]:
    """The rows of one layer and scope on a recorded pass, as the task says."""
    solver: Solver = payload["solver"] if "solver" in payload else Auto(**task["solver"])
    limit = task.get("memory")
    with _tiling(payload):
        return recording[task["layer"]].rows(
            task["scope"],
            heads=task["heads"],
            solver=within(solver, limit["room"]) if limit else solver,
            certificate=task.get("certificate"),
            memory=limit["certificate"] if limit else None,
            first_input=first_input,
        )


def add_quantities(at: Measured) -> list[Row]:
    """The rows with the columns of every quantity of the task."""
    rows = [dict(row) for row in at.rows]
    for path in at.settings["quantities"]:
        extra: Sequence[Row] = resolve_name(path)(at)
        if len(extra) != len(rows):
            raise ValueError(f"quantity {path} gave {len(extra)} rows for {len(rows)} measurements")
        for row, columns in zip(rows, extra, strict=True):
            if taken := row.keys() & columns.keys():
                raise ValueError(f"quantity {path} would overwrite {', '.join(sorted(taken))}")
            row.update(columns)
    return rows


def _groups(block: Block, handle: Model) -> list[Settings]:
    """The tasks that share a pass: all of them, or those of one scope where every scope has a memory plan of its own.

    Refuses layers, scopes and heads that the model does not have.
    """
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
    if block.memory is None:
        return [tuple(settings)]
    return [tuple(one for one in settings if one["scope"] == scope) for scope in block.scopes]


def _limit(block: Block, handle: Model, settings: Settings, n: int, inputs: int) -> dict[str, Any] | None:
    """How the layers of one scope keep to the memory of a block, as JSON values; None without a limit."""
    if block.memory is None:
        return None
    solver = block.live.solver if block.live is not None and block.live.solver is not None else Auto(**block.solver)
    layers, scope = [one["layer"] for one in settings], settings[0]["scope"]
    plan = plan_layers(handle, n, layers, inputs=inputs, scope=scope, memory=block.memory, triplets=triplets(solver))
    within(solver, plan.room)
    return {"limit": read_bytes(block.memory), "alone": plan.alone, "room": plan.room, "tiling": asdict(plan.tiling)}


def _tiling(payload: dict[str, Any]) -> AbstractContextManager[None]:
    """Inside, products are computed as planned; without a limit, as usual."""
    if "memory" not in payload:
        return nullcontext()
    return within_memory(payload["memory"]["limit"], Tiling(**payload["memory"]["tiling"]))


def _texts(block: Block, handle: Model) -> Iterator[tuple[str, list[str], str]]:
    handle.check_lengths(block.sizes)
    given: dict[str, list[str]] = {}
    if block.live is not None and block.live.documents is not None:
        given[LIVE_DOCUMENTS] = list(block.live.documents)
    elif not block.texts:
        raise ValueError(f"kind {block.kind!r} needs texts: names of corpora, files or directories")
    for name in given or block.texts:
        documents = given[name] if given else read_text(os.fspath(name))
        yield name, excerpt_for(documents, block.sizes, block.inputs, block.seed), digest(documents)
