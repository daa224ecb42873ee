"""What a rescaling did: the factor of every head, σ and the largest logit before and after, and what it cost."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from lipscope.rounding import interval


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


@dataclass(frozen=True, eq=False)
class Smoothing:
    """The report of ``lipscope.smooth``. Nothing is written before ``save`` is called."""

    model: nn.Module
    tokenizer: Any  # its tokenizer, or None
    name: str  # what was loaded
    method: str  # how
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

    @property
    def changed(self) -> list[HeadChange]:
        """The heads whose scores were rescaled."""
        return [change for change in self.heads if change.factor is not None and change.factor < 1]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the model: numbers, strings and lists only."""
        kept = ("name", "method", "by", "target", "loss_before", "loss_after", "loss_kind", "hidden_change", "text")
        return {name: getattr(self, name) for name in kept} | {
            "notes": list(self.notes),
            "heads": [asdict(change) for change in self.heads],
            "layers": [asdict(change) for change in self.layers],
        }

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
