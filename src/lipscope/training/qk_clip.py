"""``QKClip``: while a model trains, rescale the queries and keys of heads whose largest logit passes τ.

    for batch in data:
        model(**batch).loss.backward(); optimizer.step(); optimizer.zero_grad()
        clip.step()

QK-clip (Kimi Team, *Kimi K2: Open Agentic Intelligence*, 2025, arXiv:2507.20534): the scores of a head whose largest logit m
is above τ are multiplied by τ/m, half of it in W_Q and half in W_K. Here m is measured after the step, on inputs that the
model has just seen, layer after layer, so that no head of any layer is above τ on them; heads below it keep every bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lipscope.doors import at_least
from lipscope.models.capture import model_dtype
from lipscope.models.inputs import probe_inputs
from lipscope.models.model import Model
from lipscope.training.attach import OwnHook, named_arguments, probe_batch, undisturbed, unwrapped
from lipscope.training.monitor import say
from lipscope.training.rescale import Projections, Rescaler, largest_logits, refuse_unscalable
from lipscope.training.smooth import language_loss, loss_kind


@dataclass(frozen=True)
class Clipped:
    """One head that was rescaled."""

    layer: int
    head: int
    factor: float  # what its scores were multiplied by
    before: float  # its largest logit
    after: float  # the same afterwards, at most τ


@dataclass(frozen=True)
class ClipRecord:
    """What one step of ``QKClip`` did."""

    step: int
    heads: tuple[Clipped, ...] = ()  # empty when no head was above τ, or nothing was looked at
    loss_before: float | None = None  # causal loss on the same inputs, where heads were rescaled and the model has one
    loss_after: float | None = None
    save = stop = False  # it asks for nothing

    def scalars(self, prefix: str = "lipscope") -> dict[str, float]:
        """Numbers for a logger: the factor of every head that was rescaled, and the loss on the inputs looked at."""
        losses = {"loss_before": self.loss_before, "loss_after": self.loss_after}
        return {f"{prefix}/layer_{c.layer}/head_{c.head}/qk_clip": c.factor for c in self.heads} | {
            f"{prefix}/qk_clip_{name}": value for name, value in losses.items() if value is not None
        }


class QKClip:
    """Holds the largest logit of every head at most τ, by rescaling W_Q and W_K after optimiser steps.

    Args:
        model: the model that is trained, also compiled; weights in float32 or float64 (autocast is fine).
        tau: what no logit may exceed.
        every: look at multiples of this many steps: one forward pass on a few inputs.
        layers: which layers, all by default.
        inputs: inputs of the batch that are looked at.
        tokens: tokens of each, without padding.
        part: ``"encoder"`` of an encoder–decoder model.
        base: of layers with low-rank adapters rescale W + s·BA as a whole, hence frozen base weights too. Adapters that are
            saved alone (PEFT, checkpoints of its Trainer) do not have that: save the merged model.

    Attributes:
        reason: why it has switched itself off, or None.

    Raises:
        ValueError: when W_Q and W_K of a layer cannot be rescaled: QK-norm, shared weights, adapters without ``base``.

    Example:
        >>> import torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16,
        ...                                  initializer_range=2.0, bos_token_id=1, eos_token_id=2)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> clip = QKClip(model, tau=1.0, every=1)
        >>> ids = torch.arange(10)[None]
        >>> _ = model(input_ids=ids)
        >>> [round(head.after, 3) for head in clip.step().heads]
        [1.0, 1.0]
        >>> clip.close()
    """

    def __init__(
        self,
        model: nn.Module,
        tau: float,
        *,
        every: int = 10,
        layers: Sequence[int] | None = None,
        inputs: int = 4,
        tokens: int = 256,
        part: str | None = None,
        base: bool = False,
    ) -> None:
        check_clip(tau, every=every, inputs=inputs, tokens=tokens)
        self.tau, self.every, self.inputs, self.tokens = tau, every, inputs, tokens
        self.model, _ = unwrapped(model)
        if model_dtype(self.model) not in (torch.float32, torch.float64):
            raise ValueError(
                f"QKClip needs weights in float32 or float64, got {model_dtype(self.model)}: rounding undoes it"
            )
        self.reason: str | None = None
        self.steps = 0
        self._call: Any = None  # arguments of the model's last call
        self._own = False
        with undisturbed(self.model):
            self._handle = Model(self.model, part=part)
            self.layers = sorted(self._handle.check_layers(layers, "attention"))
            self._known: dict[int, Projections] = {}
            work = Rescaler(self._handle, probe_inputs(self._handle.model), "max-logit", tau, known=self._known)
            for index in self.layers:
                # Refuse, before training, a layer whose scores W_Q and W_K do not scale; halving them shows it.
                refuse_unscalable(self._handle, index, base=base)
                core = (layer := self._handle.probe_recording[index]).core()
                q, k = (torch.full((x.shape[1],), 0.5, dtype=torch.float64) for x in (core.q, core.k))
                with ExitStack() as trial:
                    work.scaled(layer, core, q, k, trial)
        self._hook = self.model.register_forward_pre_hook(OwnHook(self.model, self._keep, compilable=True), with_kwargs=True)

    def step(self, batch: Any = None, *, step: int | None = None) -> ClipRecord:
        """Call it after every optimiser step; never raises.

        Args:
            batch: what to look at; by default what the model was called with last.
            step: number of the step; counted from 1 by default.
        """
        self.steps = self.steps + 1 if step is None else step
        if self.reason is not None or (batch is None and self._call is None) or self.steps % self.every:
            return ClipRecord(self.steps)
        self._own = True
        try:
            with undisturbed(self.model):
                given = named_arguments(self.model, *self._call) if batch is None else batch
                return self._clip(probe_batch(self._handle, given, self.inputs, self.tokens))
        except Exception as error:
            self.reason = " ".join(str(error).split()) or type(error).__name__
            self.close()
            say(f"QKClip has switched itself off, training goes on without it: {self.reason}")
            return ClipRecord(self.steps)
        finally:
            self._own = False

    def close(self) -> None:
        """Take its hook off the model."""
        self._hook.remove()
        self._call = None

    def _clip(self, inputs: dict[str, Any]) -> ClipRecord:
        work = Rescaler(self._handle, inputs, "max-logit", self.tau, known=self._known)
        recorded, found, before = work.record(), list[Clipped](), None
        ids: Any = inputs.get("input_ids")
        kind = None if ids is None or ids.shape[1] < 2 else loss_kind(self.model, None)
        with ExitStack() as undo:
            for index in self.layers:
                logits = largest_logits(recorded[index].core())
                above = [h for h, value in enumerate(logits.tolist()) if value > self.tau]
                if not above:
                    continue
                before = before if found else language_loss(self.model, ids, kind)
                factors = work.rescale(index, list(range(len(logits))), undo)
                recorded = work.record()
                after = largest_logits(recorded[index].core())
                found += [Clipped(index, h, float(factors[h]), float(logits[h]), float(after[h])) for h in above]
            undo.pop_all()
        return ClipRecord(self.steps, tuple(found), before, language_loss(self.model, ids, kind) if found else None)

    def _keep(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._own:
            self._call = args, kwargs


def check_clip(tau: float, *, every: int = 10, inputs: int = 4, tokens: int = 256, **_: Any) -> None:
    """Refuse what ``QKClip`` refuses, where it is said: not when training starts."""
    if not 0 < tau < float("inf"):
        raise ValueError(f"tau must be a positive number, got {tau}")
    at_least(1, every=every, inputs=inputs, tokens=tokens)
