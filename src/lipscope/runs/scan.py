"""``scan``: σ of every layer (and head) of a model on a text, over a range of lengths."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lipscope.measure.memory import MemoryPlan, read_bytes
from lipscope.models import load as model_loading
from lipscope.models.corpora import read_text
from lipscope.models.inputs import check_length, require_tokenizer
from lipscope.models.memory import batch_size, plan_layers, recorded_bytes
from lipscope.models.model import Model
from lipscope.models.packing import measure_packed, packed_chunks
from lipscope.models.text import Chunker, excerpt_for, input_batches, parse_lengths
from lipscope.models.tokens import TokenView
from lipscope.rounding import interval
from lipscope.runs.fit import GrowthFit, fit_growth
from lipscope.runs.worst_tokens import worst_views
from lipscope.spectral.solvers import Auto, Solver, triplets, within

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Scan:
    """Rows of a scan: plain dictionaries with the same keys, one per layer, head and input.

    ``lower``, ``estimate`` and ``upper`` are σ, beside them stand bounds, token norms and what attention looks like:
    ``lipscope.measure.columns.COLUMNS`` says what every key means.

    Attributes:
        rows: the rows.
        about: what was asked for, as JSON values: text, lengths, inputs, seed, solver, …
        views: the worst places token by token, when they were asked for.
    """

    rows: tuple[dict[str, Any], ...]
    about: Mapping[str, Any] = field(default_factory=dict)
    views: tuple[TokenView, ...] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def to_pandas(self) -> Any:
        """The rows as a pandas ``DataFrame``; needs ``lipscope[report]``."""
        return import_module("pandas").DataFrame(list(self.rows))

    def csv_text(self) -> str:
        """The rows as CSV."""
        file = io.StringIO()
        writer = csv.DictWriter(file, fieldnames=list(self.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return file.getvalue()

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as CSV."""
        Path(path).write_text(self.csv_text(), encoding="utf-8")

    def to_json(self) -> str:
        """The rows as JSON."""
        return json.dumps(list(self.rows), indent=1)

    def fit(self, *, level: float = 0.95, seed: int = 0) -> dict[tuple[int, int | None], GrowthFit]:
        """σ against n for every (layer, head): a power law, and a saturating curve to compare; see ``fit_growth``."""
        groups = self._groups()
        return {
            key: fit_growth([r["n"] for r in rows], [r["estimate"] for r in rows], level=level, seed=seed)
            for key, rows in groups.items()
        }

    def plot(self, ax: Any = None) -> Any:
        """σ against n on logarithmic axes, one line per layer or head through the medians; needs ``lipscope[report]``.

        Args:
            ax: matplotlib axes to draw on; new ones by default.

        Returns:
            The axes.
        """
        axes = ax if ax is not None else import_module("matplotlib.pyplot").subplots()[1]
        for (layer, head), rows in self._groups().items():
            lengths = sorted({row["n"] for row in rows})
            at = [[row["estimate"] for row in rows if row["n"] == n] for n in lengths]
            (line,) = axes.plot(
                lengths, [statistics.median(values) for values in at], marker="o",
                label=f"layer {layer}" + ("" if head is None else f", head {head}"),
            )  # fmt: skip
            axes.fill_between(lengths, list(map(min, at)), list(map(max, at)), color=line.get_color(), alpha=0.15)
        first = self.rows[0]
        notes = f"\n{first['notes']}" if first["notes"] else ""
        axes.set(
            xscale="log", yscale="log", xlabel="tokens n", ylabel=f"σ, scope {first['scope']}",
            title=f"{first['model']}, mask {first['mask']}{notes}",
        )  # fmt: skip
        axes.legend(fontsize="small")
        return axes

    def worst(self) -> list[dict[str, Any]]:
        """One summary per (layer, head), the largest median σ at the longest length first."""
        summaries = []
        for (layer, head), rows in self._groups().items():
            longest = max(r["n"] for r in rows)
            at = [r for r in rows if r["n"] == longest]
            summaries.append(
                {
                    "layer": layer, "head": head, "n": longest, "inputs": len(at),
                    "median": statistics.median(r["estimate"] for r in at),
                    "lower": min(r["lower"] for r in at), "upper": max(r["upper"] for r in at),
                    "radius_rms": statistics.fmean(r["radius_rms"] for r in at),
                    "entropy": _mean(r["entropy"] for r in at), "sink_mass": _mean(r["sink_mass"] for r in at),
                }
            )  # fmt: skip
        return sorted(summaries, key=lambda s: -float(s["median"]))

    def __str__(self) -> str:
        if not self.rows:
            return "empty scan"
        first = self.rows[0]
        lines = [f"{first['model']}: {len(self.rows)} measurements of σ[{first['scope']}], {first['dtype']}"]
        lines += [f"  note: {first['notes']}"] if first["notes"] else []
        for s in self.worst()[:_SHOWN]:
            where = f"layer {s['layer']}" + ("" if s["head"] is None else f" head {s['head']}")
            lines.append(
                f"  {where}: median σ = {s['median']:.4g} at n = {s['n']}, all in {interval(s['lower'], s['upper'])}"
            )
        return "\n".join(lines)

    def _groups(self) -> dict[tuple[int, int | None], list[dict[str, Any]]]:
        groups: dict[tuple[int, int | None], list[dict[str, Any]]] = {}
        for row in self.rows:
            if row["document"] is None:
                groups.setdefault((row["layer"], row["head"]), []).append(row)
        return groups


_SHOWN = 24


def scan(
    model: str | os.PathLike[str] | nn.Module | Model,
    text: str | os.PathLike[str] | Sequence[str],
    *,
    layers: Sequence[int] | None = None,
    heads: bool | Sequence[int] = False,
    lengths: Sequence[int] | str = (16, 32, 64, 128),
    inputs: int = 4,
    scope: str | None = None,
    solver: Solver | None = None,
    seed: int = 0,
    pack: bool = False,
    certificate: bool | None = None,
    batch_tokens: int = 4096,
    memory: float | str | None = None,
    tokens: int = 0,
    progress: Progress | None = None,
    **load_options: Any,
) -> Scan:
    """σ of a model's layers on disjoint pieces of a text.

    Args:
        model: anything ``load`` takes, or a loaded model.
        text: a corpus name, a file or directory, or a list of documents.
        layers: layer indices, all by default.
        heads: True for every head on its own, or the head indices.
        lengths: numbers of tokens n, or a string such as ``"8:512:log"``.
        inputs: inputs per length, disjoint in the text.
        scope: ``"attention"`` by default, ``"head"`` when heads are asked for.
        solver: ``Auto()`` by default.
        seed: where in the text the inputs lie.
        pack: fill each input with several documents that do not see each other; rows of the chunk have ``document``
            None, rows of its documents their number. A text of one document is packed by paragraphs.
        certificate: also compute certified upper ends; None: where they cost no more than the measurement.
        batch_tokens: most tokens in one forward pass.
        memory: most bytes above the weights, a number or a size such as ``"4GiB"``, certificates included; see
            ``models.memory.plan_layers``. Looking at places token by token (``tokens``) is not planned.
        tokens: look at so many of the worst layers or heads token by token; not for packed inputs.
        progress: called with (measured, total, what) after each layer.
        **load_options: for ``load``.

    Returns:
        The rows.

    Raises:
        ValueError: when the text is too short, a length exceeds the model's positions, or a layer, head or scope does not
            exist.
        MemoryError: when ``memory`` is too small for one of the lengths.

    Example:
        >>> import lipscope
        >>> result = lipscope.scan("gpt2-random", "python-docs", layers=[0], lengths=[8], inputs=1)
        >>> [row["n"] for row in result.rows]
        [8]
    """
    handle = model_loading.load(model, **load_options) if not isinstance(model, Model) else model
    scope = scope or ("head" if heads else "attention")
    if heads and scope != "head":
        raise ValueError(f"heads are measured at scope 'head', but scope {scope!r} was asked for")
    chosen_heads = None if isinstance(heads, bool) else list(heads)
    sizes = parse_lengths(lengths) if isinstance(lengths, str) else sorted(set(lengths))
    check_length(handle, sizes[-1])
    tokenizer = require_tokenizer(handle)
    for argument, value, least in (("inputs", inputs, 1), ("tokens", tokens, 0)):
        if value < least:
            raise ValueError(f"{argument} must be at least {least}, got {value}")
    solver = solver or Auto()
    documents = read_text(os.fspath(text)) if isinstance(text, (str, os.PathLike)) else list(text)
    documents = excerpt_for(documents, sizes, inputs, seed)
    chosen = handle.check_layers(layers, scope)
    about = {
        "model": handle.name, "text": os.fspath(text) if isinstance(text, (str, os.PathLike)) else "a list of documents",
        "scope": scope, "layers": chosen, "lengths": sizes, "inputs": inputs, "seed": seed, "pack": pack,
        "solver": dataclasses.asdict(solver) if dataclasses.is_dataclass(solver) else str(solver),
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    done, total = 0, len(sizes) * inputs * len(chosen)
    plans: dict[int, MemoryPlan] = {}
    if memory is not None:
        # All of them before the first measurement: what does not fit is refused at once.
        plans = {
            n: plan_layers(
                handle, n, chosen, inputs=batch_size(n, inputs, batch_tokens, pack), scope=scope, memory=memory,
                triplets=triplets(solver),
            )
            for n in sizes
        }  # fmt: skip
    how: dict[str, Any] = {"scope": scope, "heads": chosen_heads, "certificate": certificate}
    if pack:
        for n, bundle in packed_chunks(documents, tokenizer, sizes, inputs, seed).items():
            for which, chunk in enumerate(bundle):
                with _limited(plans.get(n), solver) as limited:
                    left = _left(handle, n, len(chunk) + 1, memory)
                    rows += measure_packed(handle, chunk, layers=chosen, solver=limited, which=which, memory=left, **how)
                done += len(chosen)
                if progress is not None:
                    progress(done, total, f"n = {n}, {len(chunk)} documents")
        return Scan(tuple(rows), about)
    chunks = Chunker(documents, tokenizer).chunks(sizes, inputs, seed)
    for n, texts in chunks.items():
        together = n if n in plans and plans[n].alone else batch_tokens
        for _, first, ids in input_batches({n: texts}, together):
            with _limited(plans.get(n), solver) as limited:
                recording = handle.record(input_ids=torch.tensor(ids))
                left = _left(handle, n, len(ids), memory)
                for layer in chosen:
                    rows += recording[layer].rows(solver=limited, memory=left, first_input=first, **how)
                    done += len(ids)
                    if progress is not None:
                        progress(done, total, f"n = {n}, layer {layer}")
    views = worst_views(handle, rows, lambda n, which: chunks[n][which], tokens) if tokens else []
    return Scan(tuple(rows), about, tuple(views))


@contextmanager
def _limited(plan: MemoryPlan | None, solver: Solver | None) -> Iterator[Solver | None]:
    """The solver that keeps to a plan, with its tiling in force; without a plan the solver as it is."""
    if plan is None:
        yield solver
        return
    with plan.in_force():
        yield within(solver or Auto(), plan.room)


def _left(handle: Model, n: int, inputs: int, memory: float | str | None) -> int | None:
    """Bytes that a certificate may take beside the recorded passes of so many inputs."""
    return None if memory is None else max(1, read_bytes(memory) - recorded_bytes(handle, n, inputs))


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
