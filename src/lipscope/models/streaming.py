"""A model that is never whole in memory: its weights are read from safetensors when a layer is called, and let go after it.

The skeleton (accelerate's ``init_empty_weights``) has parameters without storage. A hook of accelerate around every module
with weights brings those of its *unit* in: one element of the model's list of blocks, or one module outside of it. Two
things that off-loading by accelerate does not do are here: a unit stays until another one is called, as σ takes many
calls of one layer, and a forward pass stops behind a block and goes on later.

A pass goes on in the model's own code: calls of units that are done are answered from what they returned, so that masks,
positions and what else a model hands to its blocks need not be known. Of a list of blocks only the last answer is kept; the
others are tensors without storage, and a model that looks at one again fails instead of going on with wrong numbers.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lipscope.models.anatomy import Layer, Sighting, watching
from lipscope.models.capture import ReachedError, Recording, model_dtype, record_found, replaying
from lipscope.models.refusals import in_dtype
from lipscope.models.stored import Checkpoint

if TYPE_CHECKING:
    from lipscope.models.model import Model


def skeleton(checkpoint: Checkpoint, dtype: torch.dtype | None, **options: Any) -> nn.Module:
    """The model that a directory describes, its parameters without storage, in eval mode; buffers are real."""
    try:
        from accelerate import init_empty_weights  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError("streaming needs accelerate: pip install accelerate") from None
    import transformers
    from transformers.initialization import no_init_weights

    config = transformers.AutoConfig.from_pretrained(str(checkpoint.directory), local_files_only=True, **options)
    # First in the dtype of the checkpoint, like a model in memory: some buffers are rounded to it.
    options["dtype"] = getattr(config, "dtype", None) or checkpoint.dtype
    with init_empty_weights(include_buffers=False), no_init_weights():
        model: nn.Module = transformers.AutoModel.from_config(config, **options)  # type: ignore[no-untyped-call]
    made: Any = model
    made.initialize_weights()  # of parameters without storage nothing becomes; buffers are made as they are on loading
    return in_dtype(model, dtype).requires_grad_(False).eval()


def blocks_of(model: nn.Module) -> dict[nn.Module, str]:
    """The elements of the model's outermost lists, and their names."""
    blocks: dict[nn.Module, str] = {}
    for name, part in model.named_modules():
        if isinstance(part, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in blocks.values()):
            blocks |= {child: f"{name}.{key}" for key, child in part.named_children()}
    return blocks


class Stream:
    """Brings the weights of ``model``, the part that is measured of the skeleton ``whole``, to a device, unit by unit."""

    def __init__(self, whole: nn.Module, model: nn.Module, checkpoint: Checkpoint, device: torch.device) -> None:
        from accelerate.hooks import ModelHook, add_hook_to_module  # type: ignore[import-untyped]

        self.model, self.checkpoint, self.device = model, checkpoint, device
        self.keep: Path | None = None  # a file that holds how far the last pass came, so that another process can go on
        self.going: tuple[str, list[tuple[str, Any]]] = "", []  # the last pass and its answers: see ``StreamedPass``
        self.held: nn.Module | None = None
        self._whole, self._sources = whole, sources(whole, model, checkpoint)
        self.blocks = blocks_of(model)
        self._home = {part: block for block in self.blocks for part in block.modules()}
        self.names = {module: name for name, module in model.named_modules()}
        for full, buffer in model.named_buffers():
            owner, _, name = full.rpartition(".")
            value = self._read(full).to(buffer.dtype) if full in self._sources else buffer
            model.get_submodule(owner)._buffers[name] = value.to(device)
        stream = self

        class Hold(ModelHook):  # type: ignore[misc]
            def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                stream.hold(module)
                return args, kwargs

        for module in model.modules():
            if any(p is not None for p in module._parameters.values()):
                self._home.setdefault(module, module)
                add_hook_to_module(module, Hold())
        model.stream_device = device  # type: ignore[assignment]
        self.answered = False  # the pass that runs goes on: what was done is answered
        model.register_forward_pre_hook(self._begin)

    @property
    def fingerprint(self) -> str:
        """Stands for the model: its class, its configuration, and its files as they lie on the disk."""
        settings = getattr(self.model, "config", None)
        about = [type(self.model).__name__, str(settings), str(model_dtype(self.model)), self.checkpoint.identity]
        return hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()

    @property
    def units(self) -> dict[nn.Module, None]:
        """The units in the order of the model."""
        return dict.fromkeys(self._home.values())

    def unit(self, module: nn.Module) -> nn.Module:
        """The unit that a module belongs to; refuses one that spans several."""
        if module not in self._home:
            raise ValueError(
                f"{self.names[module]} ({type(module).__name__}) is in no list of blocks, so it cannot be streamed"
            )
        return self._home[module]

    def hold(self, module: nn.Module) -> None:
        """Bring in the unit of a module that is about to be called, in place of the one that is here."""
        if not any(p.is_meta for p in module.parameters(recurse=False)):
            return
        unit = self._home[module]
        self.release()
        for part in unit.modules():
            for name, empty in list(part.named_parameters(recurse=False)):
                if empty.is_meta:
                    self.bring(part, name, empty)
        self.held = unit

    def _begin(self, *_: Any) -> None:
        """Bring in the embedding, which comes first: some models look for the device of its weights (Llama 4)."""
        with suppress(AttributeError, NotImplementedError):
            embedding = self.model.get_input_embeddings()  # type: ignore[operator]
            if embedding in self._home and not self.answered:
                self.hold(embedding)

    def release(self, but: nn.Module | None = None) -> None:
        """Let the unit go, but for a part that is still measured.

        Vectors stay: the normalisation that closes a block belongs to the attention of the next one.
        """
        kept = set() if but is None else set(but.modules())
        for part in () if self.held is None else set(self.held.modules()) - kept:
            for name, tensor in list(part.named_parameters(recurse=False)):
                if tensor.ndim > 1:
                    part._parameters[name] = nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False)
        self.held = None if but is None else self.held

    def _read(self, full: str) -> Tensor:
        return self._sources[full].read(self.checkpoint, full, self._whole)

    def bring(self, part: nn.Module, name: str, empty: Tensor) -> None:
        """Read one parameter from its file into its module."""
        full = f"{self.names[part]}.{name}".removeprefix(".")
        if full in self._sources:
            file = self.checkpoint.tensors[self._sources[full].parts[0][1]].file
            try:
                value = self._read(full).to(self.device, empty.dtype).view(empty.shape)
            except RuntimeError as error:  # parts, or what they make, of another shape
                raise ValueError(f"{file}: {full} is not made of what is stored: {error}") from None
            if not bool(value.sum().isfinite()) and not bool(value.isfinite().all()):
                raise ValueError(f"{file}: {full} holds NaN or infinite values: the weights are damaged")
        else:
            # Heads may be missing, as nothing measured has them; should something have it, NaN is seen at once.
            value = torch.full(empty.shape, float("nan"), dtype=empty.dtype, device=self.device)
        part._parameters[name] = nn.Parameter(value, requires_grad=False)


@dataclass(frozen=True, eq=False)
class Source:
    """The stored tensors that a tensor of the model is made of, as transformers makes it."""

    converter: Any  # None: it is the only one, as it is stored
    parts: list[tuple[str, str]]  # the pattern of the converter that found it, and its name

    def read(self, checkpoint: Checkpoint, name: str, model: nn.Module) -> Tensor:
        """The tensor of this name."""
        if self.converter is None:
            return checkpoint.read(self.parts[0][1])
        converter = copy.deepcopy(self.converter)
        for pattern, stored in self.parts:
            converter.add_tensor(name, stored, pattern, partial(checkpoint.read, stored))
        made = converter.convert(name, model=model, config=model.config)
        value: Tensor = made[name][0] if isinstance(made[name], list) else made[name]
        return value


class NotStreamedError(ValueError):
    """A checkpoint that does not hold the weights of a model under names that are known."""


def sources(whole: nn.Module, model: nn.Module, checkpoint: Checkpoint) -> dict[str, Source]:
    """Where the tensors of ``model``, a part of ``whole``, are; refuses what is missing in blocks, or has another shape."""
    from transformers import conversion_mapping, core_model_loading

    wanted, prefix = whole.state_dict(), str(getattr(whole, "base_model_prefix", ""))
    rules = conversion_mapping.get_model_conversion_mapping(whole)  # type: ignore[arg-type]
    renaming = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
    converting = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
    known: dict[str, Source] = {}
    for stored in sorted(checkpoint.tensors, key=core_model_loading.dot_natural_key):  # experts in their order
        name, pattern = core_model_loading.rename_source_key(stored, renaming, converting, prefix, wanted)
        rule = next((rule for rule in converting if pattern in rule.source_patterns), None)
        targets = [name] if rule is None else [name.replace(rule.target_patterns[0], to) for to in rule.target_patterns]
        for target in targets:
            known.setdefault(target, Source(rule, [])).parts.append((pattern or "", stored))
    tied: dict[str, str] = getattr(whole, "all_tied_weights_keys", {})
    inner = next(f"{name}." if name else "" for name, part in whole.named_modules() if part is model)
    found, missing = {}, []
    for name, tensor in model.state_dict().items():
        source = known.get(f"{inner}{name}") or known.get(tied.get(f"{inner}{name}", ""))
        if source is None:
            missing.append(name)
            continue
        where, stored = checkpoint.tensors[source.parts[0][1]], source.parts[0][1]
        if source.converter is None and where.shape != tuple(tensor.shape):
            raise ValueError(
                f"{where.file}: {stored} has the shape {where.shape}, but config.json asks for {tuple(tensor.shape)}"
            )
        if tensor.is_floating_point() and not where.dtype.is_floating_point:
            raise ValueError(f"{where.file}: {stored} is stored as {where.dtype}, not as floating-point numbers")
        found[name] = source
    inside = [name for name in missing if any(part.isdigit() for part in name.split("."))]
    if inside or not found:
        raise NotStreamedError(
            f"{checkpoint.directory} does not hold {', '.join(inside[:4] or missing[:4])} under that name, so "
            f"{type(model).__name__} cannot be streamed from it: the file is damaged, belongs to another model, or stores "
            "its weights in a form that is not known here. Load it whole"
        )
    return found


class Passing(dict[int, Any]):
    """What was recorded of the one layer where a pass stands; asking for another moves the pass."""

    def __init__(self, go: Callable[[int], None]) -> None:
        super().__init__()
        self._go = go

    def __missing__(self, index: int) -> Any:
        self._go(index)
        return self[index]


class StreamedPass:
    """A forward pass that stops behind the block of one layer, and goes on from there."""

    def __init__(self, handle: Model, run: Callable[[], Any], documents: tuple[int, ...] | None, key: str) -> None:
        assert handle.stream is not None
        self.handle, self.stream, self.run, self.documents, self.key = handle, handle.stream, run, documents, key
        self.hosts, self.blocks, self.outputs, self.crosses = (Passing(self.go_to) for _ in range(4))
        # The list of the block that gave it, if one did, and what it was. A worker gets a pass layer by layer, and goes on.
        if self.stream.going[0] != key:
            self.stream.going = key, self._kept()
        self.answers: list[tuple[str, Any]] = self.stream.going[1]

    def go_to(self, index: int) -> None:
        """Record a layer; the pass starts again when it is further already."""
        layer = self.handle.layer(index)
        self.handle.forget_layers()
        seen = self._advance(layer)
        if seen is None:
            self.answers.clear()
            seen = self._advance(layer)
        assert seen is not None
        found = record_found([seen], torch.empty(0), self.run)
        for name in ("hosts", "blocks", "outputs", "crosses"):
            mine: Passing = getattr(self, name)
            mine.clear()
            mine.update(getattr(found, name))

    def _advance(self, layer: Layer) -> Sighting | None:
        """Go on until the layer's block has returned; None when that call is behind us."""
        home, calls = self.stream.unit(layer.block), Counter[nn.Module]()
        position = count()

        def called(unit: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            here, wanted = next(position), unit is home and calls[unit] == layer.occurrence
            calls[unit] += 1
            if here < len(self.answers):
                if wanted:
                    raise ReachedError(None)
                return tree_map_only(Tensor, lambda t: t if t.is_meta else t.clone(), self.answers[here][1])
            if wanted:
                self._keep()
            output = forward(*args, **kwargs)
            self._answer(unit, output)
            if wanted:
                raise ReachedError(output)
            return output

        parts = layer.parts
        with replaying(self.handle.model, self.documents), watching(parts) as events, ExitStack() as intercepted:
            for unit in self.stream.units:
                intercepted.callback(setattr, unit, "forward", unit.forward)
                unit.forward = partial(called, unit, unit.forward)
            self.stream.answered = bool(self.answers)
            intercepted.callback(setattr, self.stream, "answered", False)
            try:
                with torch.no_grad():
                    self.run()
            except ReachedError as reached:
                if reached.found is None:
                    return None
                last = {event.module: event for event in events}
                return Sighting(layer, *(last[part] for part in parts))
        raise RuntimeError(f"the pass never reached layer {layer.index} ({layer.name})")

    def _answer(self, unit: nn.Module, output: Any) -> None:
        blocks = self.stream.blocks.get(unit, "").rpartition(".")[0]
        for k, (known, answer) in enumerate(self.answers if blocks else ()):
            if known == blocks:
                self.answers[k] = (blocks, tree_map_only(Tensor, partial(torch.empty_like, device="meta"), answer))
        self.answers.append((blocks, tree_map_only(Tensor, Tensor.detach, output)))

    def _keep(self) -> None:
        """Write down where the pass stands, for another process."""
        if self.stream.keep is None or not self.answers:
            return
        written = self.stream.keep.with_suffix(".tmp")
        try:
            torch.save({"pass": self.key, "answers": self.answers}, written)
            written.replace(self.stream.keep)
        except (OSError, RuntimeError) as error:
            raise OSError(f"the state of the pass cannot be written to {self.stream.keep}: {error}") from None

    def _kept(self) -> list[tuple[str, Any]]:
        """The answers that were written down for these inputs, if there are any; a damaged file only costs time."""
        try:
            assert self.stream.keep is not None
            kept = torch.load(self.stream.keep, map_location=self.stream.device, weights_only=True)
            return list(kept["answers"]) if kept["pass"] == self.key else []
        except Exception:
            return []


def streamed_recording(
    handle: Model, inputs: dict[str, Any], run: Callable[[], Any], real: Tensor | None, documents: tuple[int, ...] | None
) -> Recording:
    """A forward pass of a streamed model on these inputs, recorded layer by layer as they are asked for."""
    assert handle.stream is not None
    key = hashlib.blake2b(repr((handle.stream.fingerprint, documents)).encode())
    for name, value in sorted(inputs.items()):
        key.update(f"{name} {value.tolist() if isinstance(value, Tensor) else value!r}".encode())
    going = StreamedPass(handle, run, documents, key.hexdigest())
    return Recording(going.hosts, going.blocks, going.outputs, torch.empty(0), real, run, documents, going.crosses)
