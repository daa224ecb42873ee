"""Tiny random models, one per family: (name, builder). Weights are enlarged so that attention is far from uniform."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn

_TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
_ROPE = _TEXT | {"max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = _ROPE | {"num_key_value_heads": 2, "head_dim": 4}


def _hf(config: Any, model: Any, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        built: nn.Module = model(config(**settings))
        return enlarge(built)

    return build


def enlarge(model: nn.Module) -> nn.Module:
    """Random weights of size 0.02 make every softmax flat and every mistake in it invisible."""
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if p.ndim >= 2:
            p.data = torch.randn(p.shape, generator=generator) * (0.5 if p.ndim == 2 else 0.2)
        elif "norm" in name.lower() or "ln_" in name or "sink" in name:
            p.data = p.data + 0.3 * torch.randn(p.shape, generator=generator)
        else:
            p.data = 0.3 * torch.randn(p.shape, generator=generator)
    return model.double().eval()


def _torch_layer(norm_first: bool, batch_first: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return enlarge(nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, norm_first=norm_first, batch_first=batch_first))

    return build


_SPEECH = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 20,
    "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "layerdrop": 0.0,
}  # fmt: skip

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bert": _hf(tf.BertConfig, tf.BertModel, **_TEXT, max_position_embeddings=32),
    "roberta": _hf(tf.RobertaConfig, tf.RobertaModel, **_TEXT, max_position_embeddings=34),
    "distilbert": _hf(
        tf.DistilBertConfig, tf.DistilBertModel, vocab_size=50, dim=16, n_layers=2, n_heads=4, hidden_dim=24,
        max_position_embeddings=32,
    ),
    "modernbert": _hf(
        tf.ModernBertConfig, tf.ModernBertModel, **_ROPE, cls_token_id=1, sep_token_id=2, local_attention=4,
        global_attn_every_n_layers=2,
    ),
    "gpt2": _hf(
        tf.GPT2Config, tf.GPT2Model, vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=32, bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt_neo": _hf(
        tf.GPTNeoConfig, tf.GPTNeoModel, vocab_size=50, hidden_size=16, num_layers=2, num_heads=4, window_size=3,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=32, intermediate_size=24,
    ),
    "gpt_neox": _hf(tf.GPTNeoXConfig, tf.GPTNeoXModel, **_ROPE, rotary_pct=0.5),
    "opt": _hf(
        tf.OPTConfig, tf.OPTModel, vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, ffn_dim=24,
        max_position_embeddings=32, word_embed_proj_dim=16,
    ),
    "bloom": _hf(tf.BloomConfig, tf.BloomModel, vocab_size=50, hidden_size=16, n_layer=2, n_head=4),
    "llama": _hf(tf.LlamaConfig, tf.LlamaModel, **_GROUPED),
    "mistral": _hf(tf.MistralConfig, tf.MistralModel, **_GROUPED, sliding_window=3),
    "qwen2": _hf(tf.Qwen2Config, tf.Qwen2Model, **(_ROPE | {"num_key_value_heads": 2})),
    "qwen3": _hf(tf.Qwen3Config, tf.Qwen3Model, **_GROUPED),
    "gemma2": _hf(
        tf.Gemma2Config, tf.Gemma2Model, **_GROUPED, sliding_window=3, attn_logit_softcapping=2.0, query_pre_attn_scalar=4,
    ),
    "gemma3": _hf(
        tf.Gemma3TextConfig, tf.Gemma3TextModel, **_GROUPED, sliding_window=3, query_pre_attn_scalar=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "olmo2": _hf(tf.Olmo2Config, tf.Olmo2Model, **(_ROPE | {"num_key_value_heads": 2})),
    "phi": _hf(tf.PhiConfig, tf.PhiModel, **_ROPE, partial_rotary_factor=0.5),
    "gpt_oss": _hf(
        tf.GptOssConfig, tf.GptOssModel, **_GROUPED, num_local_experts=2, num_experts_per_tok=1, sliding_window=3,
    ),
    "t5_encoder": _hf(
        tf.T5Config, tf.T5EncoderModel, vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=16,
    ),
    "vit": _hf(
        tf.ViTConfig, tf.ViTModel, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24,
        image_size=8, patch_size=4, num_channels=3,
    ),
    "whisper_encoder": _hf(
        tf.WhisperConfig, lambda c: tf.WhisperModel(c).encoder, d_model=16, encoder_layers=2, encoder_attention_heads=4,
        encoder_ffn_dim=24, decoder_layers=1, decoder_attention_heads=4, decoder_ffn_dim=24, vocab_size=50,
        num_mel_bins=8, max_source_positions=6, max_target_positions=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "wav2vec2": _hf(tf.Wav2Vec2Config, tf.Wav2Vec2Model, **_SPEECH),
    "wav2vec2_pre_norm": _hf(
        tf.Wav2Vec2Config, tf.Wav2Vec2Model, **_SPEECH, do_stable_layer_norm=True, feat_extract_norm="layer",
    ),
    "hubert": _hf(tf.HubertConfig, tf.HubertModel, **_SPEECH),
    "albert": _hf(tf.AlbertConfig, tf.AlbertModel, **_TEXT, embedding_size=8, max_position_embeddings=32),
    "mpnet": _hf(tf.MPNetConfig, tf.MPNetModel, **_TEXT, max_position_embeddings=34),
    "torch_post_norm": _torch_layer(norm_first=False, batch_first=True),
    "torch_pre_norm": _torch_layer(norm_first=True, batch_first=False),
}  # fmt: skip
