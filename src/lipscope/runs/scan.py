"""``scan``: σ of every layer (and head) of a model on a text, over a range of lengths. It is a plan of one block."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lipscope.measure.columns import COLUMNS
from lipscope.measure.scopes import Certificate
from lipscope.models import load as model_loading
from lipscope.models.media import Medium, signals
from lipscope.models.model import Model
from lipscope.runs.engines import InProcess
from lipscope.runs.plan import Block, Live, Plan
from lipscope.runs.run import LIVE_DOCUMENTS, Provenance, Run
from lipscope.runs.store import Store
from lipscope.runs.sweep import Step, run_plan
from lipscope.runs.tasks import expand
from lipscope.spectral.solvers import Auto, Solver


def scan(
    model: str | os.PathLike[str] | nn.Module | Model,
    text: str | os.PathLike[str] | Sequence[str] | None = None,
    *,
    layers: Sequence[int] | None = None,
    heads: bool | Sequence[int] = False,
    audio: Medium | None = None,
    image: Medium | None = None,
    features: Medium | None = None,
    lengths: Sequence[int] | str | None = None,
    inputs: int = 4,
    scope: str | None = None,
    solver: Solver | None = None,
    seed: int = 0,
    pack: bool = False,
    certificate: Certificate = None,
    batch_tokens: int = 4096,
    batch_size: int = 0,
    memory: float | str | None = None,
    views: int = 0,
    store: str | os.PathLike[str] | Store | None = None,
    partial: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
    **load_options: Any,
) -> Run:
    """σ of a model's layers on disjoint pieces of a text.

    Args:
        model: anything ``load`` takes, or a loaded model.
        text: a corpus name, a file or directory, or a list of documents.
        audio: in place of a text, for a model that hears: a WAV file, or samples; a clip longer than the model's window is
            cut into windows, of which ``inputs`` are measured.
        image: for a model that sees: an image file, or pixels (height, width, 3) as uint8.
        features: what the model's processor would make, a tensor or a safetensors file.
        layers: layer indices, all by default; one that is named twice is measured once.
        heads: True for every head on its own, or the head indices.
        lengths: numbers of tokens n, or a string such as ``"8:512:log"``; 16, 32, 64 and 128 of a text, all of a clip.
        inputs: inputs per length, disjoint in the text.
        scope: ``"attention"`` by default, ``"head"`` when heads are asked for.
        solver: ``Auto()`` by default.
        seed: where in the text the inputs lie.
        pack: fill each input with several documents that do not see each other; rows of the chunk have ``document``
            None, rows of its documents their number. A text of one document is packed by paragraphs.
        certificate: also compute certified upper ends: ``"fast"`` (or True), ``"tight"`` or ``"verified"``; None: fast ones
            where they cost no more than the measurement.
        batch_tokens: most tokens in one forward pass.
        batch_size: inputs in one forward pass; 0: as many as ``batch_tokens`` allow.
        memory: most bytes above the weights, a number or a size such as ``"4GiB"``, certificates included; see
            ``models.memory.plan_layers``. Looking at places token by token (``views``) is not planned.
        views: look at so many of the worst layers or heads token by token; not for packed inputs.
        store: a file that keeps every row as it is measured; the same scan into it goes on where it was stopped.
        partial: when the scan is interrupted or fails, return what was measured; ``about["stopped"]`` then says why.
        progress: called with (measured, total, what) after each layer.
        **load_options: for ``load``.

    Raises:
        ValueError: when the text is too short, a length exceeds the model's positions, or a layer, head or scope does not
            exist.
        MemoryError: when ``memory`` is too small for one of the lengths.

    Example:
        >>> import lipscope
        >>> result = lipscope.scan("gpt2-mini", "python-docs", layers=[0], lengths=[8], inputs=1)
        >>> [row["n"] for row in result.rows]
        [8]
    """
    handle = model_loading.load(model, **load_options)
    media: dict[str, Any] = {"audio": audio, "image": image, "features": features}
    media = {name: value for name, value in media.items() if value is not None}
    if (text is not None) + len(media) != 1:
        raise ValueError("give exactly one of text, audio, image and features")
    if media and pack:
        raise ValueError("pack is for texts: it fills inputs with documents")
    named, documents, held = None, None, None
    if media:
        kind, value = next(iter(media.items()))
        named = kind if isinstance(value, torch.Tensor) else f"{kind} {os.fspath(value)}"
        cut = None if lengths is None else Block(models=(handle.name,), lengths=lengths).sizes  # type: ignore[arg-type]
        held = (named, signals(handle, **media, lengths=cut, count=inputs))
        lengths = sorted({piece.n for piece in held[1]})
    elif isinstance(text, (str, os.PathLike)):
        named = os.fspath(text)
    else:
        documents = list(text or ())
    lengths = (16, 32, 64, 128) if lengths is None else lengths
    solver = solver or Auto()
    scope = scope or ("head" if heads else "attention")
    if heads and scope != "head":
        raise ValueError(f"heads are measured at scope 'head', but scope {scope!r} was asked for")
    block = Block(
        models=(handle.name,),  # type: ignore[arg-type]
        texts=() if named is None or held is not None else (named,),
        layers="all" if layers is None else tuple(map(int, layers)),
        heads="all" if isinstance(heads, bool) else tuple(map(int, heads)),
        scopes=(scope,),
        lengths=lengths if isinstance(lengths, (str, range)) else tuple(map(int, lengths)),  # type: ignore[arg-type]
        inputs=inputs,
        kind="packed" if pack else "text" if held is None else "signals",
        seed=seed,
        batch_tokens=batch_tokens,
        batch_size=batch_size,
        certificate=certificate,
        memory=memory,  # type: ignore[arg-type]
        views=0 if pack else views,
        live=Live(handle, documents, solver, kept=store is not None, signals=held),
    )
    expansion = expand(Plan((block,), threads=torch.get_num_threads()))
    keys = {task.key for task in expansion.tasks}
    stopped = {}
    with nullcontext(store) if isinstance(store, Store) else Store(store, write=store is not None) as ledger:
        counted = _counted(progress, [task for task in expansion.tasks if task.key not in ledger.tasks("done")])
        if handle.stream is not None and ledger.path.exists():
            handle.stream.keep = ledger.path.with_suffix(".pass")
        try:
            run_plan(expansion, ledger, engine=InProcess(stop=True), progress=counted)
        except (KeyboardInterrupt, Exception) as error:
            if not partial or not ledger.rows_of(keys):
                raise
            stopped = {"stopped": str(error) or "interrupted"}
        if handle.stream is not None and handle.stream.keep is not None and not stopped:
            handle.stream.keep.unlink(missing_ok=True)
        measured, looks = ledger.rows_of(keys), ledger.views()
    about = stopped | {
        "model": handle.name,
        "text": named if named is not None else LIVE_DOCUMENTS,
        "scope": scope,
        "layers": handle.check_layers(layers, scope),
        "lengths": list(block.sizes),
        "inputs": inputs,
        "seed": seed,
        "pack": pack,
        "solver": block.solver if "solver" not in block.solver else str(solver),
    }
    rows = [{name: row[name] for name in COLUMNS} for task in expansion.tasks for row in measured.get(task.key, ())]
    return Run(tuple(rows), about, tuple(looks), provenance=Provenance.of_scan({"about": about}))


def _counted(progress: Callable[[int, int, str], None] | None, tasks: Sequence[Any]) -> Callable[[Step], None] | None:
    """Progress in measured inputs instead of tasks."""
    if progress is None:
        return None
    total, done = sum(task.work.inputs for task in tasks), 0

    def told(step: Step) -> None:
        nonlocal done
        if step.task is not None:
            done += step.task.work.inputs
            progress(done, total, f"n = {step.task.identity['n']}, layer {step.task.identity['layer']}")

    return told
