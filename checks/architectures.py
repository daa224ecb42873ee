"""Every text architecture of the installed transformers that can be made tiny, with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "num_hidden_layers": 2,
    "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "intermediate_size": 48,
    "n_inner": 48, "d_ff": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "hidden_dim": 48,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64,
    "n_positions": 64, "n_ctx": 64, "embedding_size": 32, "word_embed_proj_dim": 32, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "rotary_dim": 4, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 6, "attention_dropout": 0.0, "first_k_dense_replace": 1,
    "attn_layer_period": 2, "attn_layer_offset": 1, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
    "indexer_budget": 8, "indexer_compress_ratio": 2,
}  # fmt: skip


def tiny_models(*, implementation: str, dtype: torch.dtype) -> Iterator[tuple[str, nn.Module | None, str]]:
    """Model type, the model, and why there is none."""
    from transformers.models.auto import modeling_auto as auto

    language = {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    for kind in sorted(language & {*auto.MODEL_MAPPING_NAMES}):
        try:
            yield kind, tiny_model(kind, implementation=implementation, dtype=dtype), ""
        except Exception as error:
            yield kind, None, f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"


def tiny_model(kind: str, *, implementation: str, dtype: torch.dtype) -> nn.Module:
    """A model of one type, with random weights."""
    import transformers

    config: Any = transformers.AutoConfig.for_model(kind)
    config = getattr(config, "get_text_config", lambda c=config: c)()
    chosen = {name: value for name, value in SMALL.items() if hasattr(config, name)}
    if "qk_rope_head_dim" in chosen:  # there the width of a head is that of its rotated part, and all keys are unpacked
        chosen["head_dim"] = chosen["qk_rope_head_dim"]
        chosen["num_key_value_heads"] = chosen.get("num_attention_heads", 4)
    kinds = vars(config).get("layer_types") or ["full_attention"]
    if kinds[0] == "linear_attention":  # two layers of that kind have no cache that counts tokens
        chosen["layer_types"] = [kinds[0], next(kind for kind in kinds if kind != kinds[0])]
    config = type(config)(**chosen)
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.AutoModel.from_config(config).parameters())
    if size > 3_000_000:
        raise ValueError("these settings do not make it small")
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModel.from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for p in model.parameters():
            if p.ndim >= 2:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model.to(dtype).eval()
