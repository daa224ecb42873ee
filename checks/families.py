"""Architectures of the installed transformers, tiny and with random weights: what is found in them, and is σ right?

    python checks/families.py                print the table; about three minutes
    python checks/families.py KIND …         only these
    python checks/families.py --write        into docs/families.md

σ of every layer, at scopes attention and block, is compared with the largest singular value of a dense float64 Jacobian: one
backward pass per output through the whole model on its own eager attention, with the tokens of the layer put in by a hook.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

import lipscope
from architectures import tiny_model
from lipscope.models.anatomy import Layer, first_tensor, tokens_of
from lipscope.models.capture import double_throughout
from lipscope.models.inputs import probe_inputs, runner
from lipscope.models.model import Model
from lipscope.models.seam import plain_experts
from lipscope.spectral.solvers import Dense

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
TEXT = [
    "albert", "bart", "bert", "big_bird", "bigbird_pegasus", "biogpt", "bloom", "codegen",
    "cohere", "cohere2", "convbert", "ctrl", "deberta", "deberta-v2", "deepseek_v2", "deepseek_v3",
    "diffllama", "distilbert", "doge", "esm", "eurobert", "exaone4", "flaubert", "fnet", "gemma",
    "gemma2", "gemma3_text", "glm", "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite",
    "granitemoe", "ibert", "jetmoe", "llama", "llama4_text",
    "longcat_flash", "mamba", "megatron-bert", "minicpm3", "minimax", "minimax_m2",
    "mistral", "mixtral", "mobilebert", "modernbert", "moshi", "mpnet", "mpt", "mra", "nanochat", "nemotron",
    "nomic_bert", "nystromformer", "olmo", "olmo2", "olmo_hybrid", "olmoe", "openai-gpt", "opt", "persimmon",
    "phi", "phi3", "phimoe", "qwen2", "qwen3", "qwen3_moe", "rembert", "roberta",
    "roberta-prelayernorm", "roformer", "rwkv", "smollm3", "squeezebert", "stablelm", "starcoder2",
    "xlm", "xlm-roberta-xl", "yoso",
]  # fmt: skip
_SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
_HYBRID = _SIZE | {"num_hidden_layers": 3, "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0}
_TOWERS = {"text_config": _SIZE | {"vocab_size": 96}, "vision_config": _SIZE | {"image_size": 8, "patch_size": 4}}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
_SPEECH = {
    "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "layerdrop": 0.0, "vocab_size": 20,
}  # fmt: skip
# Hybrids, towers, vision and speech: class, settings, part.
MADE: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "lfm2 (hybrid)": ("Lfm2", _HYBRID | {"layer_types": ["conv", "full_attention", "conv"]}, None),
    "jamba (hybrid)": ("Jamba", _HYBRID | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4,
                                           "use_mamba_kernels": False, "num_experts": 2, "expert_layer_period": 2}, None),
    "qwen3_next (hybrid)": ("Qwen3Next", _HYBRID | _DELTA | {"head_dim": 4, "num_experts": 2, "num_experts_per_tok": 1,
        "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"]}, None),
    "clip, text": ("CLIP", _TOWERS, "text"),
    "clip, vision": ("CLIP", _TOWERS, "vision"),
    "siglip, vision": ("Siglip", _TOWERS, "vision"),
    "vit": ("ViT", _SIZE | {"image_size": 8, "patch_size": 4}, None),
    "dinov2": ("Dinov2", _SIZE | {"image_size": 8, "patch_size": 4}, None),
    "wav2vec2": ("Wav2Vec2", _SIZE | _SPEECH, None),
    "hubert": ("Hubert", _SIZE | _SPEECH, None),
    "t5, encoder": ("T5", {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 96},
                    "encoder"),
    "gpt_neo": ("GPTNeo", {"hidden_size": 16, "num_layers": 2, "num_heads": 4, "window_size": 3, "vocab_size": 96,
                           "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 32}, None),
}  # fmt: skip


def built(kind: str) -> tuple[nn.Module, str | None]:
    """A tiny model with its own eager attention in float64, and the part to measure."""
    if kind in TEXT:
        model = tiny_model(kind, implementation="eager", dtype=torch.float64)
        return model, "encoder" if getattr(model.config, "is_encoder_decoder", False) else None
    name, settings, part = MADE[kind]
    torch.manual_seed(0)
    model = getattr(tf, f"{name}Model")._from_config(getattr(tf, f"{name}Config")(**settings), attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.ndim >= 2:
            p.data = torch.randn(p.shape, generator=generator) * 0.3
    return model.double().eval(), part


def dense_sigma(model: nn.Module, run: Callable[[], Any], layer: Layer, scope: str) -> float:
    """σ of the first input from a dense Jacobian, without the attention core, the replay and the products of lipscope."""
    start, end = (layer.host, layer.out) if scope == "attention" else (layer.block, layer.block)
    seen: dict[str, Tensor] = {}
    number = {"start": 0, "end": 0}

    def function(x: Tensor | None) -> Tensor:
        def entering(_: nn.Module, args: Any, kwargs: Any) -> Any:
            number["start"] += 1
            if number["start"] - 1 != layer.occurrence:
                return None
            tokens = tokens_of(args, kwargs)
            assert tokens is not None
            seen["tokens"] = tokens
            new = tokens if x is None else torch.cat([x[None], tokens[1:]])
            return tuple(new if v is tokens else v for v in args), {k: new if v is tokens else v for k, v in kwargs.items()}

        def leaving(_: nn.Module, args: Any, output: Any) -> None:
            number["end"] += 1
            found = first_tensor(output)
            if number["end"] - 1 == layer.occurrence and found is not None:
                seen["output"] = found

        number.update(start=0, end=0)
        with ExitStack() as hooks, plain_experts(model), double_throughout(torch.float64):
            hooks.enter_context(start.register_forward_pre_hook(entering, with_kwargs=True))
            hooks.enter_context(end.register_forward_hook(leaving))
            run()
        return seen["output"].reshape(len(seen["tokens"]), -1)[0]

    with torch.no_grad():
        function(None)
    J = torch.autograd.functional.jacobian(function, seen["tokens"][0].clone())
    return float(torch.linalg.svdvals(J.reshape(J.shape[0], -1))[0])


def path(handle: Model, layer: Layer) -> str:
    """How σ of scope attention is had."""
    if handle.probe_recording[layer.index].attention is not None:
        return "closed form"
    if layer.mixer:
        return f"autodiff, {layer.mixer} as a whole"
    return "autodiff on the core" if layer.through_seam else "autodiff, own attention"


def row(kind: str) -> list[str]:
    """What is found in a model, and by how much σ is off."""
    try:
        model, part = built(kind)
    except Exception as error:  # settings of another version of transformers
        return [kind, "", f"not made: {type(error).__name__}", "", ""]
    off = {"attention": 0.0, "block": 0.0}
    try:
        handle = lipscope.load(model, part=part)
        run = runner(handle.model, probe_inputs(handle.model))
        for layer in handle.every:
            for scope in off:
                at = handle.probe_recording[layer.index]
                found = float(at.sigma(scope, solver=Dense(), certificate=False).estimate[0])
                off[scope] = max(off[scope], abs(found / dense_sigma(handle.model, run, layer, scope) - 1))
    except (ValueError, RuntimeError, FloatingPointError) as error:
        reason = str(error).replace("\n", " ")
        return [kind, "", f"refused: {reason if len(reason) < 160 else reason[:157] + '…'}", "", ""]
    paths: dict[str, list[int]] = {}
    for layer in handle.every:
        paths.setdefault(path(handle, layer), []).append(layer.index)
    words = [f"{way}{f' ({join(numbers)})' if len(paths) > 1 else ''}" for way, numbers in paths.items()]
    return [
        kind,
        join([layer.index for layer in handle.every]),
        "; ".join(words),
        *(f"{value:.0e}" for value in off.values()),
    ]


def join(numbers: list[int]) -> str:
    """Numbers with commas."""
    return ", ".join(map(str, numbers))


def table(kinds: list[str]) -> Iterator[list[str]]:
    """A row per architecture."""
    for kind in kinds:
        yield row(kind)


def page(rows: list[list[str]]) -> str:
    """The page of the docs."""
    measured = [r for r in rows if r[1]]
    worst = max(float(value) for r in measured for value in r[3:])
    return f"""# Architectures

Written by `checks/families.py` with transformers {tf.__version__}: {len(rows)} architectures with tiny random weights in
float64, of which {len(measured)} are measured. Layers have the numbers that the model gives its blocks, and those without
softmax attention (Mamba, linear attention, convolution, Fourier) are among them: `model.every` lists them, and they are
measured when `--layers` names them. *Closed form*: the layer is an `Attention`, with bounds and certificates. *Autodiff on
the core*: σ alone, on lipscope's attention core inside the model's code. *Own attention*: the model's eager code.

The last two columns are the largest relative difference, over the layers, between σ and that of a dense Jacobian of the
model on its own eager attention, made by one backward pass per output. The largest of all is {worst:.0e}.

| family | layers | path | scope attention | scope block |
|---|---|---|---|---|
{chr(10).join(f"| {' | '.join(r)} |" for r in rows)}
"""


def main() -> None:
    """Print the table, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"such as {TEXT[0]}")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    tf.logging.set_verbosity_error()
    rows = []
    for found in table(asked.kinds or sorted([*TEXT, *MADE])):
        rows.append(found)
        print(f"| {' | '.join(found)} |", flush=True)
    if asked.write:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
