"""A loaded model: its layers, and their local Lipschitz constants on given tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.attention.operator import AttentionOperator, HeadOperator
from lipscope.models.admission import backbone, check_ids, in_dtype, refuse_unmeasurable
from lipscope.models.anatomy import Layer, find_layers
from lipscope.models.capture import Recording, model_dtype, record, replaying
from lipscope.models.plain import AffineParts, plain_attention
from lipscope.models.probe import first_position, position_limit, probe_inputs
from lipscope.models.scopes import MODEL_SCOPES, HeadOfOperator, scope_operator, scope_tokens
from lipscope.models.selftest import run_self_tests
from lipscope.spectral.dense import Auto
from lipscope.spectral.norm import Solver
from lipscope.spectral.operator import Operator
from lipscope.spectral.output import SolverOutput
from lipscope.spectral.result import SpectralNorm, dtype_name, reshape_batch, summarise

if TYPE_CHECKING:
    from lipscope.models.scan import Scan


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
        inputs = probe_inputs(self.model)
        with replaying(self.model):
            self.layers = find_layers(self.model, self._runner(inputs))
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
            self.model, self.layers, self._runner(inputs), padding, None if documents is None else tuple(documents)
        )

    def layer(self, index: int) -> Layer:
        """One attention layer; negative indices count from the end."""
        if not -len(self.layers) <= index < len(self.layers):
            raise ValueError(f"layer must lie between 0 and {len(self.layers) - 1}, got {index}")
        return self.layers[index]

    def attention(self, layer: int, recording: Recording) -> Attention | None:
        """The layer as an analytic ``Attention`` when it provably is one at the recorded tokens, else None."""
        where = self.layer(layer)
        if where.through_seam and where.batch_first and where.index not in self._affine:
            # The projections are found at fixed inputs, never at those of a measurement: rows must not depend, not even
            # in their last bit, on what was measured before them.
            plain_attention(self.model, where, self.probe_recording, self._affine)
        return plain_attention(self.model, where, recording, self._affine)

    def operator(self, layer: int, recording: Recording, scope: str = "attention", *, analytic: bool = True) -> Operator:
        """The Jacobian of a scope at the recorded tokens, one item per input (per input and head for ``head``)."""
        where = self.layer(layer)
        if scope not in MODEL_SCOPES:
            raise ValueError(f"unknown scope {scope!r}; scopes of a model are: {', '.join(MODEL_SCOPES)}")
        if scope in ("attention", "head"):
            plain = self.attention(layer, recording) if analytic or _hides_heads(where) else None
            if plain is not None and (analytic or scope == "head"):
                X = scope_tokens(where, recording, scope).contiguous()
                return AttentionOperator(plain, X) if scope == "attention" else HeadOperator(plain, X)
        return scope_operator(self.model, where, recording, scope, self.layers)

    def solve(
        self,
        layer: int,
        recording: Recording,
        scope: str = "attention",
        *,
        heads: Sequence[int] | None = None,
        solver: Solver | None = None,
        analytic: bool = True,
    ) -> SpectralNorm:
        """σ of one layer at the recorded tokens.

        Returns:
            A ``SpectralNorm`` of shape (B,), or (B, heads) for scope ``head``.
        """
        where, solver = self.layer(layer), solver or Auto()
        operator = self.operator(layer, recording, scope, analytic=analytic)
        mask = where.mask if recording.real is None else f"{where.mask}&padding"
        if recording.documents is not None:
            mask += "&packed:" + ",".join(map(str, recording.documents))
        if scope != "head":
            result = summarise(solver.solve(operator), operator, scope=scope, mask=mask, input_dtype=dtype_name(self.dtype))
            return reshape_batch(result, (operator.batch,))
        chosen = self.check_heads(layer, heads)
        if isinstance(operator, HeadOperator):
            inputs = operator.batch // where.heads
            items = torch.tensor([[b * where.heads + h for h in chosen] for b in range(inputs)], device=operator.device)
            operator = operator.select(items.flatten())
            output = solver.solve(operator)
        else:
            inputs = operator.batch
            parts = [solver.solve(HeadOfOperator(operator, h, where.heads)) for h in chosen]
            output = _interleave(parts, inputs)
            # Only its shape, batch and rounding are read below: one item per input and head.
            items = torch.arange(inputs, device=operator.device).repeat_interleave(len(chosen))
            operator = HeadOfOperator(operator.select(items), 0, where.heads)
        result = summarise(output, operator, scope=scope, mask=mask, input_dtype=dtype_name(self.dtype))
        return reshape_batch(result, (inputs, len(chosen)))

    def check_heads(self, layer: int, heads: Sequence[int] | None) -> list[int]:
        """The listed heads, all by default; refuses those that do not exist."""
        count = self.layer(layer).heads
        chosen = list(range(count)) if heads is None else [int(h) for h in heads]
        for h in chosen:
            if not 0 <= h < count:
                raise ValueError(f"head must lie between 0 and {count - 1} in layer {layer}, got {h}")
        return chosen

    def token_inputs(
        self,
        *,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        text: str | Sequence[str] | None = None,
        attention_mask: Tensor | None = None,
        inputs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The model's keyword arguments for exactly these tokens; give one of the first three, or ``inputs`` verbatim."""
        given = [name for name, value in (("input_ids", input_ids), ("inputs_embeds", inputs_embeds), ("text", text),
                                          ("inputs", inputs)) if value is not None]  # fmt: skip
        if len(given) != 1:
            raise ValueError(f"give exactly one of input_ids, inputs_embeds, text or inputs, got {given or 'none'}")
        if inputs is not None:
            return inputs
        if text is not None:
            input_ids, attention_mask = self._tokenise(text)
        tokens = input_ids if input_ids is not None else inputs_embeds
        assert tokens is not None
        dimensions = 2 if input_ids is not None else 3
        tokens = tokens[None] if tokens.ndim == dimensions - 1 else tokens
        if tokens.ndim != dimensions or 0 in tokens.shape:
            raise ValueError(f"{given[0]} must hold at least one token, with shape (n, …) or (B, n, …)")
        limit = position_limit(self.model)
        if limit is not None and tokens.shape[1] > limit:
            raise ValueError(f"n = {tokens.shape[1]} tokens are more than the {limit} positions of {self.name}")
        if input_ids is not None:
            check_ids(tokens, self.model)
        else:
            tokens = tokens.to(self.dtype)
        result: dict[str, Any] = {given[0] if text is None else "input_ids": tokens.to(self.device)}
        if attention_mask is not None:
            attention_mask = attention_mask.reshape(tokens.shape[:2]).to(self.device)
            result["attention_mask"] = attention_mask
            if self.layers[0].causal and not bool(attention_mask[:, 0].all()) and self._accepts("position_ids"):
                # Left padding: positions count real tokens, as generation does.
                result["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
        return result

    def packed_inputs(self, documents: Sequence[Sequence[int]]) -> tuple[dict[str, Any], list[int]]:
        """Several documents (lists of token ids) in one sequence: the inputs, and the lengths for ``record``.

        Positions start again in every document, so each is measured as if it stood alone.
        """
        lengths = [len(document) for document in documents]
        if not lengths or min(lengths) < 1:
            raise ValueError("every packed document needs at least one token")
        ids = torch.tensor([[i for document in documents for i in document]], device=self.device)
        check_ids(ids, self.model)
        inputs: dict[str, Any] = {"input_ids": ids}
        if self._accepts("position_ids"):
            start = first_position(self.model)
            positions = torch.cat([torch.arange(length) for length in lengths]) + start
            inputs["position_ids"] = positions[None].to(self.device)
        return inputs, lengths

    def measure(
        self,
        *,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        text: str | Sequence[str] | None = None,
        attention_mask: Tensor | None = None,
        inputs: dict[str, Any] | None = None,
        layers: Sequence[int] | None = None,
        heads: Sequence[int] | None = None,
        scope: str = "attention",
        solver: Solver | None = None,
    ) -> Scan:
        """σ on exactly these tokens.

        Args:
            input_ids: token ids (n,) or (B, n).
            inputs_embeds: embedded tokens (n, d) or (B, n, d).
            text: one or more texts, tokenised as the model expects.
            attention_mask: 1 at real tokens, 0 at padding, (B, n).
            inputs: the model's keyword arguments as they are (images, audio, …).
            layers: layer indices, all by default.
            heads: head indices for scope ``head``, all by default.
            scope: see ``lipscope.models.scopes``.
            solver: ``Auto()`` by default.

        Returns:
            A ``Scan``: one row per layer, head and input.
        """
        from lipscope.models.measure import measure_recording
        from lipscope.models.scan import Scan

        given = self.token_inputs(
            input_ids=input_ids, inputs_embeds=inputs_embeds, text=text, attention_mask=attention_mask, inputs=inputs
        )
        recording = self.record(given)
        rows: list[dict[str, Any]] = []
        for layer in self.check_layers(layers, scope):
            rows += measure_recording(self, recording, layer=layer, scope=scope, heads=heads, solver=solver)
        return Scan(tuple(rows))

    def check_lengths(self, lengths: Sequence[int]) -> None:
        """Refuse text of lengths that the model has no positions for, and all text when it has no tokenizer."""
        limit = position_limit(self.model)
        if limit is not None and max(lengths) > limit:
            raise ValueError(f"n = {max(lengths)} tokens are more than the {limit} positions of {self.name}")
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer, so it cannot read text; use .measure(input_ids=…)")

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

    def _runner(self, inputs: dict[str, Any]) -> Any:
        if "tokens" in inputs:
            return lambda: self.model(inputs["tokens"])
        extra = {"use_cache": False} if self._accepts("use_cache") else {}
        return lambda: self.model(**inputs, **extra)

    def _accepts(self, argument: str) -> bool:
        return argument in inspect.signature(self.model.forward).parameters

    def _tokenise(self, text: str | Sequence[str]) -> tuple[Tensor, Tensor | None]:
        if self.tokenizer is None:
            raise ValueError(f"{self.name} has no tokenizer: pass input_ids or inputs_embeds, or load it with a tokenizer")
        texts = [text] if isinstance(text, str) else list(text)
        if not texts or not all(t.strip() for t in texts):
            raise ValueError("text is empty")
        rows = [self.tokenizer(t)["input_ids"] for t in texts]
        if min(map(len, rows)) == 0:
            raise ValueError("text has no tokens")
        longest = max(map(len, rows))
        if min(map(len, rows)) == longest:
            return torch.tensor(rows), None
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def _hides_heads(layer: Layer) -> bool:
    return isinstance(layer.out, nn.MultiheadAttention)


def _interleave(parts: list[SolverOutput], inputs: int) -> SolverOutput:
    """Outputs ordered (head, input) → (input, head)."""
    order = [h * inputs + b for b in range(inputs) for h in range(len(parts))]
    joined = SolverOutput.cat(parts)
    for name, value in vars(joined).items():
        if isinstance(value, Tensor):
            setattr(joined, name, value[order])
        elif isinstance(value, list):
            setattr(joined, name, [value[i] for i in order])
    return joined
