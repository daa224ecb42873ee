"""A loaded model: its layers, and their local Lipschitz constants on given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from lipscope.attention.layer import Attention
from lipscope.attention.norms import Normalisation
from lipscope.models.affine import AffineParts, find_projections, normalisation_of, same_value
from lipscope.models.anatomy import Layer, decoder_of, find_layers
from lipscope.models.capture import double_throughout, model_device, model_dtype, record, record_found, replaying
from lipscope.models.checkpoints import not_in_checkpoint
from lipscope.models.claims import claims_causality, own_pass
from lipscope.models.inputs import (
    TokenArguments,
    check_length,
    packed_inputs,
    probe_inputs,
    require_tokenizer,
    runner,
    token_inputs,
)
from lipscope.models.quantised import dequantised
from lipscope.models.recorded import Recorded
from lipscope.models.refusals import (
    backbone,
    brought_in,
    in_dtype,
    refuse_nan_activations,
    refuse_random_weights,
    refuse_unmeasurable,
)
from lipscope.models.seam import KEEPS_ITS_OWN, plain_experts
from lipscope.models.selftest import check_layers, check_own_attention
from lipscope.models.streaming import Stream, streamed_recording
from lipscope.rounding import Shown, counted


class Model(Shown):
    """A model ready to be measured.

    Args:
        model: a Hugging Face model, or a torch module that maps tokens to tokens; in eval mode.
        tokenizer: its tokenizer, needed for text.
        name: how rows call it.
        notes: remarks every row carries (random weights, de-quantised weights, …).
        part: ``"encoder"`` or ``"decoder"`` of an encoder–decoder model.
        dtype: dtype of the computation, float32 or float64; that of the model by default (float32 for half precision).
        device: where to compute; where the model is by default.
        check: run the self-tests.
        stream: brings in the weights of a ``model`` that has none in memory.
        processor: makes inputs of clips or images; by default that of the model's directory.

    Attributes:
        layers: the attention layers, in order; of a model without attention, those of ``every``.
        every: with them the layers that mix tokens in another way (Mamba, linear attention, convolution), in order.
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
        device: torch.device | None = None,
        check: bool = True,
        stream: Stream | None = None,
        processor: Any = None,
    ) -> None:
        if isinstance(tokenizer, type):
            raise TypeError(f"tokenizer must be a tokenizer, got the class {tokenizer.__name__}")
        model = backbone(model, part)
        self.stream = stream
        self.name = name or type(model).__name__
        self.notes, drawn = tuple(notes), not_in_checkpoint(model)
        if stream is None:
            model, packed = dequantised(brought_in(model))
            self.notes += packed
            refuse_unmeasurable(model)
        self.tokenizer: Any = tokenizer
        self.processor: Any = processor
        self.model = in_dtype(model, dtype, device) if stream is None else model
        self._projections: dict[int, AffineParts | None] = {}
        self._known: dict[int, Attention] = {}
        self._norms: dict[nn.Module, Normalisation | None] = {}
        self.probe_inputs = inputs = probe_inputs(self.model)
        run = runner(self.model, inputs)
        if stream is None:  # else what is missing is refused when the stream is made
            refuse_random_weights(self.model, drawn, run)
        known = self.notes
        try:
            self._prepare(inputs, run, check)
        except NotImplementedError as error:
            KEEPS_ITS_OWN.add(self.model)
            self.notes = (*known, f"measured through the model's own attention: {error}")
            self._prepare(inputs, run, check)

    def _prepare(self, inputs: dict[str, Any], run: Callable[[], Any], check: bool) -> None:
        """Find the layers and test them."""
        with replaying(self.model):
            try:
                found, output = find_layers(self.model, run)
            except ValueError:
                # Layers are found by comparing tensors, and NaN compares with nothing.
                refuse_nan_activations(self.model, run)
                raise
            self.every = [seen.layer for seen in found]
            self.layers = [layer for layer in self.every if not layer.mixer] or self.every
            # A pass on the fixed inputs of the self-tests
            self.probe_recording = Recorded(**vars(record_found(found, output, run)), model=self, fresh=False)
            if check:
                check_layers(self.probe_recording)
        first = self.layers[0]
        if not first.through_seam and not first.mixer and not isinstance(first.out, nn.MultiheadAttention):
            own = self.model in KEEPS_ITS_OWN
            self.notes += () if own else ("eager attention: this model does not use the transformers attention interface",)
        if check or claims_causality(self.model) is not None:
            with torch.no_grad(), plain_experts(self.model), double_throughout(self.dtype):
                passed, claim = own_pass(self.model, inputs)
            if claim is not None:
                self.notes += (f"{claim}, but its outputs depend on later tokens: see `lipscope check`",)
            if check:
                check_own_attention(self.probe_recording, passed)

    @property
    def dtype(self) -> torch.dtype:
        """Floating type of the computation."""
        return model_dtype(self.model)

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return model_device(self.model)

    def record(
        self,
        inputs: dict[str, Any] | None = None,
        /,
        *,
        documents: Sequence[int] | None = None,
        fresh: bool = False,
        **tokens: Unpack[TokenArguments],
    ) -> Recorded:
        """One forward pass, all layers recorded; ``record(…)[3]`` is layer 3 at these tokens.

        Args:
            inputs: the model's keyword arguments as they are; for packed documents see ``packed_inputs``.
            documents: lengths of the documents packed into each input; attention then never crosses a boundary.
            fresh: the weights may have changed since the model was loaded (training, rescaling).
            **tokens: instead of ``inputs``, one of ``input_ids`` (B, n), ``inputs_embeds`` (B, n, d), ``text`` (one or
                more texts), ``audio``, ``image`` and ``features``, and ``attention_mask`` for padding; see
                ``TokenArguments``.
        """
        if isinstance(inputs, str):
            raise TypeError("inputs must be a table of the model's arguments, got a string: give a text as record(text=…)")
        inputs = self.token_inputs(**tokens) if inputs is None else self.token_inputs(inputs=inputs)
        if documents is not None and not all(layer.through_seam for layer in self.every):
            raise ValueError(f"{self.name} keeps its own attention, so documents cannot be kept apart in it")
        if decoder_of(self.model) and (documents is not None or {"attention_mask", "decoder_attention_mask"} & {*inputs}):
            raise ValueError("a decoder is measured without padding and packing: give texts of one length")
        padding, given, real = inputs.get("attention_mask"), inputs.get("input_ids", inputs.get("inputs_embeds")), None
        if isinstance(padding, Tensor) and given is not None and padding.shape == given.shape[:2] and not padding.all():
            real = padding.bool()
        lengths = None if documents is None else tuple(documents)
        run = runner(self.model, inputs)
        if self.stream is not None:
            recording = streamed_recording(self, inputs, run, real, lengths)
        else:
            recording = record(self.model, self.every, run, real, lengths)
        return Recorded(**vars(recording), model=self, fresh=fresh)

    def layer(self, index: int) -> Layer:
        """One layer by the number that the model gives its block; negative ones count from the end."""
        if -len(self.layers) <= index < 0:
            return self.layers[index]
        found = next((layer for layer in self.every if layer.index == index), None)
        if found is None:
            numbers = [layer.index for layer in self.every]
            if numbers != list(range(len(numbers))):
                raise ValueError(f"layer must be one with attention, {', '.join(map(str, numbers))}, got {index}")
            raise ValueError(f"layer must lie between 0 and {numbers[-1]}, got {index}")
        return found

    def projections(self, layer: Layer) -> dict[int, AffineParts | None]:
        """The affine projections of the layers that were asked for, this one's among them.

        They are found at fixed inputs, never at those of a measurement: rows must not depend, not even in their last bit, on
        what was measured before them.
        """
        if layer.through_seam and layer.batch_first and layer.index not in self._projections:
            self._projections[layer.index] = find_projections(self.model, self.probe_recording.hosts[layer.index])
        return self._projections

    def forget_layers(self) -> None:
        """Let go of what is known of single layers: of a streamed model, their weights are not to outlive them."""
        self._projections, self._known = {}, {}
        self.probe_recording.forget()

    def remembered(self, index: int, attention: Attention) -> Attention:
        """The description known of a layer when it is the same, else this one: bounds compute the norms of a layer once."""
        if index not in self._known or not same_value(self._known[index], attention):
            self._known[index] = attention
        return self._known[index]

    def normalisation(self, layer: Layer, like: Tensor, *, fresh: bool = False) -> Normalisation | None:
        """The LayerNorm or RMSNorm whose output attention sees, or None; ``like`` has the width and dtype of its tokens."""
        if layer.norm is None:
            return None
        if fresh or layer.norm not in self._norms:
            with replaying(self.model):
                self._norms[layer.norm] = normalisation_of(layer.norm, like)
        return self._norms[layer.norm]

    def check_heads(self, layer: int, heads: Sequence[int] | None) -> list[int]:
        """The listed heads, all by default; refuses those that do not exist."""
        count = self.layer(layer).heads
        chosen = list(range(count)) if heads is None else [int(h) for h in heads]
        for h in chosen:
            if not 0 <= h < count:
                raise ValueError(f"head must lie between 0 and {count - 1} in layer {layer}, got {h}")
        return chosen

    token_inputs = token_inputs
    packed_inputs = packed_inputs

    def check_lengths(self, lengths: Sequence[int]) -> None:
        """Refuse text of lengths that the model has no positions for, and all text when it has no tokenizer."""
        require_tokenizer(self)
        check_length(self, max(lengths))

    def check_layers(self, layers: Sequence[int] | None, scope: str) -> list[int]:
        """The listed layers, each once, all by default; one for scope ``model``."""
        if scope == "model":
            if self.stream is not None:
                raise ValueError("scope model needs all layers at once, for products through the whole model: load it whole")
            return [self.every[0].index]
        return list(dict.fromkeys(layer.index for layer in (self.layers if layers is None else map(self.layer, layers))))

    def to_rows(self) -> list[dict[str, Any]]:
        """One dictionary per layer."""
        names = ("index", "name", "heads", "kv_heads", "mask", "causal", "normed")
        return [{name: getattr(layer, name) for name in names} for layer in self.every]

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """One paragraph on the model and a line per layer."""
        first = self.layers[0]
        torch_module = isinstance(first.out, nn.MultiheadAttention)
        own = "torch's nn.MultiheadAttention" if torch_module else "the model's own eager attention"
        core = "the lipscope attention core" if first.through_seam else own
        found = f"{counted(len(self.layers), 'attention layer')}, through {core}"
        found = f"{counted(len(self.layers), 'layer')} without attention" if first.mixer else found
        lines = [f"{self.name}: {found}, {str(self.dtype)[6:]}"]
        lines += [f"  note: {note}" for note in self.notes]
        for layer in self.every:
            heads = counted(layer.heads, "head")
            if layer.kv_heads not in (None, layer.heads):
                heads += f" on {counted(layer.kv_heads, 'key head')}"
            norm = "pre-norm" if layer.normed else "no norm before attention"
            # The name is empty when the layer is the whole module.
            heads = f"{layer.mixer} as a whole" if layer.mixer else heads
            words = [layer.name, heads, layer.mask if layer.mask.startswith("no ") else f"mask {layer.mask}", norm]
            words += ["with cross-attention"] if layer.cross else []
            lines.append(f"  layer {layer.index}: {', '.join(filter(None, words))}")
        return "\n".join(lines)
