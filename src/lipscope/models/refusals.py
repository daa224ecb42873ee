"""What may be measured: the part of a model that counts, in a dtype that works, and clear refusals for the rest."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from lipscope.models.anatomy import decoder_of, watching
from lipscope.models.capture import last_hidden_state, model_dtype
from lipscope.rounding import counted
from lipscope.spectral.autodiff import refuse_training_dropout


def brought_in(model: nn.Module) -> nn.Module:
    """A copy with the weights that accelerate keeps elsewhere (``device_map="auto"``) in memory; itself without such."""
    if not any(p.is_meta and hasattr(part, "_hf_hook") for part in model.modules() for p in part.parameters(recurse=False)):
        return model
    from accelerate.hooks import ModelHook, remove_hook_from_module  # type: ignore[import-untyped]
    from accelerate.utils import align_module_device  # type: ignore[import-untyped]

    held: dict[str, Tensor] = {}
    for name, part in model.named_modules():
        with align_module_device(part, torch.device("cpu")):
            held |= {full: tensor.detach().cpu() for full, tensor in part.named_parameters(name, recurse=False)}
    # The hooks hold the weights too: they are not copied.
    hooks = [part._hf_hook for part in model.modules() if hasattr(part, "_hf_hook")]
    made: nn.Module = remove_hook_from_module(copy.deepcopy(model, {id(hook): ModelHook() for hook in hooks}), recurse=True)
    made.load_state_dict(held, strict=False, assign=True)
    return made


def refuse_unmeasurable(model: nn.Module) -> None:
    """Refuse sharded, off-loaded, damaged or training-mode models, and packed weights of unknown form, with the reason."""
    for name, p in model.named_parameters():
        if p.device.type == "meta" or type(p).__name__ == "DTensor":
            raise ValueError(
                f"parameter {name} is sharded or off-loaded: load the whole model on one device, or give its directory to "
                "lipscope.load(…, stream=True), which keeps one layer in memory (--stream)"
            )
        if not p.is_floating_point():
            raise ValueError(f"parameter {name} is {p.dtype}: quantised in a form that lipscope cannot de-quantise")
        # A sum is finite in one pass without copies; only one that is not, which may be overflow, is looked at closely.
        if not math.isfinite(float(p.detach().sum())) and not bool(torch.isfinite(p.detach()).all()):
            raise ValueError(f"parameter {name} holds NaN or infinite values: the weights are damaged")
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters, so no attention to measure")
    refuse_training_dropout(model)


def refuse_nan_activations(model: nn.Module, run: Callable[[], Any]) -> None:
    """Name the first module whose output is NaN or infinite when ``run()`` runs the model."""
    names = {module: name for name, module in model.named_modules()}
    with watching(model.modules()) as calls, torch.no_grad():
        run()
    damaged = [call for call in calls if call.output is not None and not bool(torch.isfinite(call.output).all())]
    if damaged:
        first = min(damaged, key=lambda call: call.exit).module
        raise FloatingPointError(
            f"{names[first] or 'the model'} ({type(first).__name__}) produces NaN or infinite values. The weights may be "
            "damaged or the dtype too narrow: try float64"
        )


def refuse_random_weights(model: nn.Module, drawn: Mapping[str, str], run: Callable[[], Any]) -> None:
    """Refuse weights that a checkpoint did not hold where the last hidden state of ``run()`` depends on them.

    ``drawn`` names such tensors of the model, and says why. Heads may be missing: nothing measured has them.
    """
    if not drawn:
        return
    used = _used_parameters(model, run)

    def is_used(name: str) -> bool:
        # An expert that these tokens did not reach stands beside others, of its name but for the number, that they did.
        place = _NUMBER.sub("#", name)
        if name in parameters:
            return place in used
        # A buffer is not in the graph: it is used where parameters beside it are.
        return any(other.startswith(place.rpartition(".")[0]) for other in used)

    parameters = dict(model.named_parameters(remove_duplicate=False))
    random = [f"{name} ({why})" for name, why in sorted(drawn.items()) if is_used(name)]
    if random:
        more = f" and {len(random) - _NAMED} more" if len(random) > _NAMED else ""
        raise ValueError(
            f"{counted(len(random), 'tensor')} that {type(model).__name__} computes with would be random numbers, as the "
            f"checkpoint does not hold them: {', '.join(random[:_NAMED])}{more}. The file is damaged, or belongs to a model "
            "of another kind or size than config.json says"
        )


def _used_parameters(model: nn.Module, run: Callable[[], Any]) -> set[str]:
    """Names, without their numbers, of the parameters that the last hidden state of ``run()`` depends on."""
    names = {id(p): _NUMBER.sub("#", name) for name, p in model.named_parameters()}
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    try:
        with torch.enable_grad():
            nodes: list[Any] = [last_hidden_state(run()).grad_fn]
        seen = set(nodes)
        for node in nodes:  # grows while it is walked through
            following = {after for after, _ in node.next_functions if after is not None} - seen
            seen |= following
            nodes += following
        return {names[id(node.variable)] for node in nodes if id(getattr(node, "variable", None)) in names}
    finally:
        for p in frozen:
            p.requires_grad_(False)


_NUMBER = re.compile(r"\d+")
_NAMED = 4


def backbone(model: nn.Module, part: str | None) -> nn.Module:
    """The model without its task head; the chosen part of an encoder–decoder model."""
    towers = {name: getattr(model, f"{name}_model", None) for name in ("text", "vision")}
    if all(isinstance(tower, nn.Module) for tower in towers.values()):
        if part not in towers:
            raise ValueError(f"{type(model).__name__} has two towers: say which, --part text or --part vision (part=…)")
        tower: Any = backbone(cast(nn.Module, towers[part]), None)
        tower.name_or_path = getattr(model, "name_or_path", "")  # where the processor of both lies
        return cast(nn.Module, tower)
    get_encoder: Any = getattr(model, "get_encoder", None)
    config = getattr(model, "config", None)
    # The encoder of T5 alone, saved and loaded again, is a whole T5 whose configuration knows of no decoder.
    if (
        config is not None
        and (decoder_of(model) or getattr(config, "is_encoder_decoder", False))
        and get_encoder is not None
    ):
        encoder: nn.Module = get_encoder()
        if encoder is model:
            return model
        if part is None:
            raise ValueError(
                f"{type(model).__name__} is an encoder–decoder model: say which part, --part encoder or decoder (part=…)"
            )
        if part not in ("encoder", "decoder"):
            raise ValueError(f"part must be 'encoder' or 'decoder', got {part!r}")
        whole = cast(nn.Module, getattr(model, "base_model", model))
        if part == "decoder" and (decoder_of(whole) is None or hasattr(whole, "lm_head")):
            raise ValueError(f"{type(whole).__name__} does not show a decoder without its head: load it without (AutoModel)")
        return encoder if part == "encoder" else whole
    if part is not None and part != "encoder":
        raise ValueError(f"part applies to encoder–decoder models; {type(model).__name__} has one part")
    base = getattr(model, "base_model", model)
    return base if isinstance(base, nn.Module) else model


def as_device(device: str | torch.device, dtype: torch.dtype | None = None) -> torch.device:
    """A device that exists here; ``"auto"`` is the first of CUDA, MPS and CPU."""
    there = ["cpu", *(["mps"] if torch.backends.mps.is_available() else [])]
    there += [f"cuda:{k}" for k in range(torch.cuda.device_count())]
    if str(device) == "auto":
        return torch.device("cuda:0" if "cuda:0" in there else there[-1])
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu, cuda, cuda:1 or mps, got {str(device)!r}") from None
    if f"{wanted.type}:{wanted.index or 0}" not in there and wanted.type not in there:
        raise ValueError(f"there is no device {str(device)!r} here; there are {', '.join(there)}")
    if wanted.type == "mps" and dtype == torch.float64:
        raise ValueError("device mps has no float64: measure in float32 there, or on the CPU")
    return wanted


def in_dtype(model: nn.Module, dtype: torch.dtype | None, device: torch.device | None = None) -> nn.Module:
    """The model in float32 or float64, on a device; its own dtype when that is one of them, and its own device."""
    current = model_dtype(model)
    wanted = dtype or (current if current in (torch.float32, torch.float64) else torch.float32)
    if wanted not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be float32 or float64, got {wanted}")
    # A copy: the caller's model keeps its dtype and stays where it is.
    same = wanted == current and device in (None, next(model.parameters()).device)
    return model if same else copy.deepcopy(model).to(device, wanted)


def check_ids(ids: Tensor, model: nn.Module) -> None:
    """Refuse token ids outside the vocabulary."""
    if ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"input_ids must be integers, got {ids.dtype}; embedded tokens go into inputs_embeds")
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(vocabulary, int) and (int(ids.min()) < 0 or int(ids.max()) >= vocabulary):
        raise ValueError(f"input_ids must lie between 0 and {vocabulary - 1}, got {int(ids.min())} … {int(ids.max())}")


def refuse_kernels_of_the_hub(attn_implementation: str | None) -> None:
    """Transformers would fetch and run the code that ``owner/name`` stands for."""
    if "/" in (attn_implementation or ""):
        raise ValueError(f"attn_implementation {attn_implementation!r} names code of the hub, which is not run")
