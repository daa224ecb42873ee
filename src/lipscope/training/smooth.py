"""``smooth``: rescale W_Q and W_K of single heads until their logits, or σ, stay below a target on a calibration text.

Multiplying W_Q^h, b_Q^h, W_K^h and b_K^h by √γ multiplies the scores of head h by γ, whatever rotations come in between
(QK-clip, Kimi Team, *Kimi K2: Open Agentic Intelligence*, 2025, arXiv:2507.20534, uses the step while training). Query heads
that share a key head agree on its factor: the key takes √max γ, each query the remaining factor. Layers are treated in
order, each on what the smoothed ones before it put out, so that the target holds for all of them at once.

What it costs is told by the language-model loss on the calibration text. Causal models: mean −ln p(next token) in nats.
Masked models: the same at 15 % of the tokens, drawn from a seed and hidden. A model without a head has no loss; the relative
change of its last hidden state stands in.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models.capture import model_dtype
from lipscope.models.checkpoints import Loaded
from lipscope.models.corpora import read_text
from lipscope.models.load import load_with_head
from lipscope.models.model import Model
from lipscope.models.recorded import Recorded
from lipscope.models.text import chunks_of
from lipscope.rounding import Shown, interval
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto, Solver
from lipscope.training.rescale import Rescaler, largest_logits, refuse_unscalable

QUANTITIES = ("max-logit", "sigma")


@dataclass(frozen=True)
class Span:
    """σ as an interval."""

    lower: float  # σ is at least this
    estimate: float  # best estimate
    upper: float  # σ is at most this

    def __str__(self) -> str:
        return interval(self.lower, self.upper)


@dataclass(frozen=True)
class HeadChange:
    """One head, or one layer (``head`` None), on the calibration text: largest values over its inputs."""

    layer: int
    head: int | None  # index of the head, or None for the whole layer (scope attention)
    factor: float | None  # γ, what its scores were multiplied by; None for a layer
    logit_before: float  # largest visible logit before
    logit_after: float  # the same after
    sigma_before: Span  # σ before, scope head (attention for a layer)
    sigma_after: Span  # σ after


@dataclass(frozen=True, eq=False, repr=False)
class Smoothing(Shown):
    """The report of ``lipscope.smooth``. Nothing is written before ``save`` is called."""

    model: nn.Module
    tokenizer: Any  # its tokenizer, or None
    name: str  # what was loaded
    by: str  # what the target is for: ``max-logit`` or ``sigma``
    target: float  # what no head exceeds on the calibration text
    heads: Sequence[HeadChange]  # one entry per head that was looked at
    layers: Sequence[HeadChange]  # one entry per layer
    loss_before: float | None  # loss in nats per token on the calibration text, or None
    loss_after: float | None  # the same after
    loss_kind: str | None  # ``causal``, ``masked``, or None when the model has no head for it
    hidden_change: float  # ‖h' − h‖/‖h‖ of the last hidden state over the whole text
    text: str  # the calibration text in words
    notes: Sequence[str] = field(default=())  # remarks
    method = "clip-qk"  # how

    @property
    def changed(self) -> list[HeadChange]:
        """The heads whose scores were rescaled."""
        return [change for change in self.heads if change.factor is not None and change.factor < 1]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model: numbers, strings and lists only."""
        kept = ("name", "method", "by", "target", "loss_before", "loss_after", "loss_kind", "hidden_change", "text")
        return {name: getattr(self, name) for name in kept} | {
            "notes": list(self.notes),
            "heads": self.to_rows(),
            "layers": [asdict(change) for change in self.layers],
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """One per head that was looked at."""
        return [asdict(change) for change in self.heads]

    def cost(self) -> str:
        """The change of the loss, or of the hidden state, in one sentence."""
        moved = f"last hidden state moved by {self.hidden_change:.2%}"
        if self.loss_before is None or self.loss_after is None:
            return f"no loss: the model has no language-model head; its {moved}"
        return (
            f"{self.loss_kind} loss {self.loss_before:.4f} → {self.loss_after:.4f} nats per token "
            f"({self.loss_after - self.loss_before:+.4f}); {moved}"
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the model (safetensors), its tokenizer and ``smoothing.json`` into a new directory; overwrites nothing."""
        directory = Path(path)
        if directory.exists() or directory.is_symlink():
            raise FileExistsError(f"{directory} exists, and a checkpoint is never overwritten: choose another directory")
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Beside its place and then renamed, so that no half-written checkpoint is ever found there.
        unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
        try:
            save_pretrained: Any = getattr(self.model, "save_pretrained", None)
            if save_pretrained is not None:
                save_pretrained(unfinished)
            else:
                from safetensors.torch import save_model

                save_model(self.model, str(unfinished / "model.safetensors"))
            if hasattr(self.tokenizer, "save_pretrained"):
                self.tokenizer.save_pretrained(unfinished)
            (unfinished / "smoothing.json").write_text(json.dumps(self.to_dict(), indent=1), encoding="utf-8")
            unfinished.chmod(0o755)
            unfinished.rename(directory)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return directory

    def __str__(self) -> str:
        lines = [f"{self.name}, {self.method}: {self.by} ≤ {self.target:g} on {self.text}"]
        lines += [f"  note: {note}" for note in self.notes]
        for change in self.changed:
            lines.append(
                f"  layer {change.layer} head {change.head}: scores × {change.factor:.4g}, largest logit "
                f"{change.logit_before:.4g} → {change.logit_after:.4g}, σ {change.sigma_before} → {change.sigma_after}"
            )
        lines.append(f"  {len(self.changed)} of {len(self.heads)} heads rescaled")
        return "\n".join([*lines, f"  {self.cost()}"])


def smooth(
    model: str | os.PathLike[str] | nn.Module,
    *,
    target: float,
    by: str = "max-logit",
    text: str | os.PathLike[str] = "python-docs",
    input_ids: Tensor | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    n: int = 128,
    inputs: int = 4,
    tokenizer: Any = None,
    inplace: bool = False,
    seed: int = 0,
    solver: Solver | None = None,
) -> Smoothing:
    """Rescale queries and keys so that no head exceeds ``target`` on a calibration text.

    Args:
        model: a name, a directory, or a module in eval mode; a module is copied unless ``inplace``.
        target: what no chosen head may exceed on the text.
        by: ``max-logit``, the largest visible logit of a head, or ``sigma``, the upper end of σ of a head (scope head).
        text: a name from ``lipscope corpora``, a file or a directory.
        input_ids: calibration tokens (B, n) instead of a text.
        layers: layers to rescale, all by default.
        heads: heads of these layers, all by default.
        n: tokens of one calibration input.
        inputs: how many inputs are cut from the text.
        tokenizer: replaces the model's own.
        inplace: change the given module itself.
        seed: where in the text the inputs lie.
        solver: accuracy of σ.

    Returns:
        A ``Smoothing``: the rescaled model, what changed, and ``save``. Nothing is written.

    Raises:
        ValueError: when the target cannot be met (says how low the head gets), or the model's scores cannot be rescaled.

    Example:
        >>> import torch, transformers, lipscope
        >>> config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16,
        ...                                  initializer_range=2.0, bos_token_id=1, eos_token_id=2)
        >>> _ = torch.manual_seed(0)
        >>> report = lipscope.smooth(transformers.GPT2LMHeadModel(config).eval(), target=1.0,
        ...                          input_ids=torch.arange(10)[None])
        >>> all(change.logit_after <= 1.0 for change in report.heads)
        True
    """
    if by not in QUANTITIES:
        raise ValueError(f"by must be one of {', '.join(QUANTITIES)}, got {by!r}")
    if not target < float("inf") or target != target:
        raise ValueError(f"target must be a finite number, got {target}")
    opened = _open(model, tokenizer, inplace)
    module, tokenizer = opened.model, opened.tokenizer
    handle = Model(module, tokenizer, name=opened.name, notes=opened.notes)
    if input_ids is None:
        ids = chunks_of(handle, read_text(os.fspath(text)), n, inputs, seed)
        about = f"{inputs} inputs of {n} tokens from {text}"
    else:
        ids = input_ids if input_ids.ndim == 2 else input_ids[None]
        if ids.ndim != 2:
            raise ValueError(f"input_ids must have shape (n,) or (B, n), got {tuple(input_ids.shape)}")
        about = f"{ids.shape[0]} given inputs of {ids.shape[1]} tokens"
    work = Rescaler(handle, handle.token_inputs(input_ids=ids), by, target, solver or Auto(rtol=1e-3, interval=0.05))
    loss = partial(language_loss, module, work.inputs["input_ids"], kind := loss_kind(module, tokenizer), tokenizer)
    if kind == "causal" and ids.shape[1] < 2:
        raise ValueError(
            "inputs of 1 token have no next token, so the model has no loss on them: "
            "give input_ids, or n, of at least 2 tokens"
        )
    chosen = {index: handle.check_heads(index, heads) for index in handle.check_layers(layers, "attention")}
    for index in chosen:
        refuse_unscalable(handle, index)
    before, loss_before = work.record(), loss()
    found = _measured(work, before, chosen)
    # When something fails, a module changed in place is given back as it was.
    with ExitStack() as undo:
        gamma = {index: work.rescale(index, chosen[index], undo) for index in sorted(chosen)}
        after, loss_after = work.record(), loss()
        reached = _measured(work, after, chosen)
        undo.pop_all()
    changes = [
        HeadChange(index, h, None if h is None else float(gamma[index][h]), logit, logit_after, span, span_after)
        for ((index, h), (logit, span)), (logit_after, span_after) in zip(found.items(), reached.values(), strict=True)
    ]
    moved = float((after.last_hidden - before.last_hidden).norm() / before.last_hidden.norm())
    return Smoothing(
        model=module, tokenizer=handle.tokenizer, name=handle.name, by=by, target=target,
        heads=[c for c in changes if c.head is not None], layers=[c for c in changes if c.head is None],
        loss_before=loss_before, loss_after=loss_after, loss_kind=kind, hidden_change=moved, text=about, notes=handle.notes,
    )  # fmt: skip


def _measured(
    work: Rescaler, recorded: Recorded, chosen: dict[int, list[int]]
) -> dict[tuple[int, int | None], tuple[float, Span]]:
    """Largest logit and σ of every layer and of the chosen heads."""
    found: dict[tuple[int, int | None], tuple[float, Span]] = {}
    for index, heads in chosen.items():
        layer = recorded[index]
        logits = largest_logits(layer.core())
        whole = layer.sigma(solver=work.solver, certificate=False)
        parts = layer.sigma("head", solver=work.solver, certificate=False)
        found[index, None] = float(logits.max()), _span(whole, slice(None))
        found |= {(index, h): (float(logits[h]), _span(parts, (slice(None), h))) for h in heads}
    return found


def loss_kind(model: nn.Module, tokenizer: Any) -> str | None:
    """``causal``, ``masked``, or None when the model has no language-model head that can be used."""
    name = type(model).__name__
    if name.endswith(("LMHeadModel", "ForCausalLM")):
        return "causal"
    if name.endswith("ForMaskedLM") and getattr(tokenizer, "mask_token_id", None) is not None:
        return "masked"
    return None


@torch.no_grad()
def language_loss(model: nn.Module, ids: Tensor, kind: str | None, tokenizer: Any = None) -> float | None:
    """Mean loss in nats per predicted token on inputs (B, n); None for a model without one."""
    if kind is None:
        return None
    if kind == "causal":
        logits = model(input_ids=ids, use_cache=False).logits
        return float(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()))
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.15
    hidden &= ~torch.isin(ids.cpu(), torch.tensor(sorted(tokenizer.all_special_ids)))
    if not bool(hidden.any()):
        hidden[:, ids.shape[1] // 2] = True
    hidden = hidden.to(ids.device)
    logits = model(input_ids=ids.masked_fill(hidden, tokenizer.mask_token_id)).logits
    return float(nn.functional.cross_entropy(logits[hidden].float(), ids[hidden]))


def _open(model: Any, tokenizer: Any, inplace: bool) -> Loaded:
    """The module that may be changed, with its name, tokenizer and remarks."""
    if isinstance(model, Model):
        raise TypeError(
            "model must be a name, a directory or a module: smooth changes weights, and a loaded Model is shared"
        )
    if not isinstance(model, nn.Module):
        loaded = load_with_head(os.fspath(model))
        return replace(loaded, tokenizer=tokenizer or loaded.tokenizer)
    dtype = model_dtype(model)
    half = dtype not in (torch.float32, torch.float64)
    if half and inplace:
        raise ValueError(f"inplace=True needs weights in float32 or float64, got {dtype}: rounding would undo it")
    module = model if inplace else copy.deepcopy(model)
    if not half:
        return Loaded(module, tokenizer, type(model).__name__)
    return Loaded(module.float(), tokenizer, type(model).__name__, (f"weights widened from {str(dtype)[6:]} to float32",))


def _span(result: SpectralNorm, items: Any) -> Span:
    """The largest σ over the inputs."""
    return Span(*(float(values[items].max()) for values in (result.lower, result.estimate, result.upper)))
