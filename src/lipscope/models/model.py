"""A loaded model: its layers, and their local Lipschitz constants on given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.attention.norms import Normalisation
from lipscope.measure.scopes import check_scope
from lipscope.models.affine import AffineParts, plain_attention
from lipscope.models.analytic import remembered, with_named_mask
from lipscope.models.anatomy import Layer, find_layers
from lipscope.models.capture import Recording, model_dtype, record, replaying
from lipscope.models.input_norm import comes_from, input_normalisations
from lipscope.models.inputs import (
    TokenArguments,
    check_length,
    packed_inputs,
    probe_inputs,
    require_tokenizer,
    runner,
    token_inputs,
)
from lipscope.models.refusals import backbone, in_dtype, refuse_activations_that_are_not_numbers, refuse_unmeasurable
from lipscope.models.scopes import scope_tokens
from lipscope.models.selftest import run_self_tests
from lipscope.models.solve import add_certificate, by_head, jacobian, solve_heads, solve_scope
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto, Solver

if TYPE_CHECKING:
    from lipscope.runs.scan import Scan


class Model:
    """A model ready to be measured.

    Args:
        model: a Hugging Face model, or a torch module that maps tokens to tokens; in eval mode.
        tokenizer: its tokenizer, needed for text.
        name: how rows call it.
        notes: remarks every row carries (random weights, de-quantised weights, …).
        part: ``"encoder"`` of an encoder–decoder model.
        dtype: dtype of the computation, float32 or float64; that of the model by default (float32 for half precision).
        check: run the self-tests.

    Attributes:
        layers: the attention layers, in order.
        model: the backbone (without a task head).

    Raises:
        ValueError: when the model cannot be measured.
        SelfTestError: when it does not behave as the measurement assumes.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        notes: Sequence[str] = (),
        part: str | None = None,
        dtype: torch.dtype | None = None,
        check: bool = True,
    ) -> None:
        model = backbone(model, part)
        refuse_unmeasurable(model)
        self.name = name or type(model).__name__
        self.notes = tuple(notes)
        self.tokenizer = tokenizer
        self.model = in_dtype(model, dtype)
        self._affine: dict[int, AffineParts | None] = {}
        self._known: dict[int, Attention] = {}
        self._descriptions: WeakKeyDictionary[Recording, dict[int, Attention | None]] = WeakKeyDictionary()
        self._norms: dict[int, Normalisation | None] | None = None
        inputs = probe_inputs(self.model)
        run = runner(self.model, inputs)
        with replaying(self.model):
            try:
                self.layers = find_layers(self.model, run)
            except ValueError:
                # Layers are found by comparing tensors, and NaN compares with nothing.
                refuse_activations_that_are_not_numbers(self.model, run)
                raise
        if not self.layers[0].through_seam and not isinstance(self.layers[0].out, nn.MultiheadAttention):
            self.notes += ("eager attention: this model does not use the transformers attention interface",)
        if check:
            run_self_tests(self.model, self.layers, self.record(inputs))

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the computation."""
        return model_dtype(self.model)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    @cached_property
    def probe_recording(self) -> Recording:
        """A pass on the fixed inputs of the self-tests."""
        return self.record(probe_inputs(self.model))

    def record(self, inputs: dict[str, Any], documents: Sequence[int] | None = None) -> Recording:
        """One forward pass on ``inputs`` (the model's keyword arguments), all layers recorded.

        Args:
            inputs: see ``token_inputs``; for packed documents see ``packed_inputs``.
            documents: lengths of the documents packed into each input; attention then never crosses a boundary.
        """
        if documents is not None and not all(layer.through_seam for layer in self.layers):
            raise ValueError(f"{self.name} keeps its own attention, so documents cannot be kept apart in it")
        padding = inputs.get("attention_mask")
        tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
        if not isinstance(padding, Tensor) or tokens is None or padding.shape != tokens.shape[:2]:
            padding = None
        return record(
            self.model, self.layers, runner(self.model, inputs), padding, None if documents is None else tuple(documents)
        )

    def layer(self, index: int) -> Layer:
        """One attention layer; negative indices count from the end."""
        if not -len(self.layers) <= index < len(self.layers):
            raise ValueError(f"layer must lie between 0 and {len(self.layers) - 1}, got {index}")
        return self.layers[index]

    def attention(self, layer: int, recording: Recording) -> Attention | None:
        """The layer as an analytic ``Attention`` when it provably is one at the recorded tokens, else None."""
        where = self.layer(layer)
        found = self._descriptions.setdefault(recording, {})
        if where.index not in found:
            if where.through_seam and where.batch_first and where.index not in self._affine:
                # The projections are found at fixed inputs, never at those of a measurement: rows must not depend, not
                # even in their last bit, on what was measured before them.
                plain_attention(self.model, where, self.probe_recording, self._affine)
            plain = plain_attention(self.model, where, recording, self._affine)
            if plain is not None:
                plain = remembered(with_named_mask(plain, where, recording), self._known, where.index)
            found[where.index] = plain
        return found[where.index]

    def normalisation(self, layer: int, recording: Recording) -> Normalisation | None:
        """The LayerNorm or RMSNorm whose output the layer's attention sees, or None; it bounds every token's norm."""
        if self._norms is None:
            self._norms = input_normalisations(self.model, self.layers, recording)
        return self._norms[self.layer(layer).index]

    def operator(self, layer: int, recording: Recording, scope: str = "attention", *, analytic: bool = True) -> Operator:
        """The Jacobian of a scope at the recorded tokens, one item per input (per input and head for ``head``)."""
        where = self.layer(layer)
        plain = self._attention_for(where, recording, scope, analytic)
        return jacobian(self.model, self.layers, where, recording, scope, plain)

    def solve(
        self,
        layer: int,
        recording: Recording,
        scope: str = "attention",
        *,
        heads: Sequence[int] | None = None,
        solver: Solver | None = None,
        analytic: bool = True,
        certificate: bool | None = None,
        memory: int | None = None,
    ) -> SpectralNorm:
        """σ of one layer at the recorded tokens.

        Args:
            layer: its index.
            recording: from ``record``.
            scope: see ``lipscope.models.scopes``.
            heads: head indices for scope ``head``, all by default.
            solver: ``Auto()`` by default.
            analytic: use the closed-form Jacobian of layers that are known as an ``Attention``.
            certificate: also compute the certified upper end and report the least; None: when it costs no more than the
                measurement, where the layer has one.
            memory: bytes that the matrices of the certificate may take; ``models.memory`` plans the rest.

        Returns:
            A ``SpectralNorm`` of shape (B,), or (B, heads) for scope ``head``.
        """
        where, solver = self.layer(layer), solver or Auto()
        check_scope(scope)
        chosen = self.check_heads(layer, heads) if scope == "head" else None
        operator = self.operator(layer, recording, scope, analytic=analytic)
        if chosen is None:
            result = solve_scope(operator, where, recording, solver, scope)
        else:
            result = solve_heads(operator, where, recording, solver, chosen)
        if certificate is not False:
            result = add_certificate(
                result,
                self.attention(layer, recording) if scope in _CERTIFIED else None,
                scope_tokens(where, recording, scope),
                heads=chosen,
                norm=self._norm_before(where, recording) if scope == "norm+attention" else None,
                wanted=certificate,
                memory=memory,
            )
        return by_head(result, None if chosen is None else len(chosen))

    def check_heads(self, layer: int, heads: Sequence[int] | None) -> list[int]:
        """The listed heads, all by default; refuses those that do not exist."""
        count = self.layer(layer).heads
        chosen = list(range(count)) if heads is None else [int(h) for h in heads]
        for h in chosen:
            if not 0 <= h < count:
                raise ValueError(f"head must lie between 0 and {count - 1} in layer {layer}, got {h}")
        return chosen

    def token_inputs(self, **tokens: Unpack[TokenArguments]) -> dict[str, Any]:
        """The model's keyword arguments for exactly these tokens; see ``TokenArguments``."""
        return token_inputs(self, tokens)

    def packed_inputs(self, documents: Sequence[Sequence[int]]) -> tuple[dict[str, Any], list[int]]:
        """Several documents (lists of token ids) in one sequence: the inputs, and the lengths for ``record``.

        Positions start again in every document, so each is measured as if it stood alone.
        """
        return packed_inputs(self, documents)

    def measure(
        self,
        *,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        scope: str = "attention",
        solver: Solver | None = None,
        certificate: bool | None = None,
        **tokens: Unpack[TokenArguments],
    ) -> Scan:
        """σ on exactly these tokens.

        Args:
            layers: layer indices, all by default.
            heads: head indices for scope ``head``, all by default.
            scope: see ``lipscope.models.scopes``.
            solver: ``Auto()`` by default.
            certificate: see ``solve``.
            **tokens: one of ``input_ids`` (B, n), ``inputs_embeds`` (B, n, d), ``text`` (one or more texts) and ``inputs``
                (the model's keyword arguments as they are: images, audio, …), and ``attention_mask`` for padding.

        Returns:
            A ``Scan``: one row per layer, head and input.
        """
        from lipscope.models.measure import measure_recording
        from lipscope.runs.scan import Scan

        check_scope(scope)
        recording = self.record(self.token_inputs(**tokens))
        rows: list[dict[str, Any]] = []
        for layer in self.check_layers(layers, scope):
            rows += measure_recording(
                self, recording, layer=layer, scope=scope, heads=heads, solver=solver, certificate=certificate
            )
        return Scan(tuple(rows))

    def check_lengths(self, lengths: Sequence[int]) -> None:
        """Refuse text of lengths that the model has no positions for, and all text when it has no tokenizer."""
        check_length(self, max(lengths))
        require_tokenizer(self)

    def check_layers(self, layers: Sequence[int] | None, scope: str) -> list[int]:
        """The listed layers, all by default; one for scope ``model``."""
        if scope == "model":
            return [0]
        return [self.layer(i).index for i in (range(len(self.layers)) if layers is None else layers)]

    def describe(self) -> str:
        """One paragraph on the model and a line per layer."""
        first = self.layers[0]
        core = "the lipscope attention core" if first.through_seam else (
            "torch's nn.MultiheadAttention" if _hides_heads(first) else "the model's own eager attention")  # fmt: skip
        lines = [f"{self.name}: {len(self.layers)} attention layers, through {core}, {str(self.dtype)[6:]}"]
        lines += [f"  note: {note}" for note in self.notes]
        for layer in self.layers:
            shared = f" on {layer.kv_heads} key heads" if layer.kv_heads not in (None, layer.heads) else ""
            norm = "pre-norm" if layer.normed else "no norm before attention"
            lines.append(f"  layer {layer.index}: {layer.name}, {layer.heads} heads{shared}, mask {layer.mask}, {norm}")
        return "\n".join(lines)

    def _norm_before(self, where: Layer, recording: Recording) -> Normalisation | None:
        """The normalisation between the block's tokens and attention's, when nothing else lies between them."""
        norm = self.normalisation(where.index, recording)
        before, after = (scope_tokens(where, recording, scope) for scope in ("norm+attention", "attention"))
        return norm if norm is not None and comes_from(norm, before, after) else None

    def _attention_for(self, where: Layer, recording: Recording, scope: str, analytic: bool) -> Attention | None:
        """The layer's description where its Jacobian is to be taken from it."""
        if scope not in ("attention", "head") or not (analytic or (scope == "head" and _hides_heads(where))):
            return None
        return self.attention(where.index, recording)


def _hides_heads(layer: Layer) -> bool:
    return isinstance(layer.out, nn.MultiheadAttention)


_CERTIFIED = ("attention", "head", "norm+attention")
