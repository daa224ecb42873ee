"""Cross-attention: σ in the decoder's tokens and in the encoder's, against dense Jacobians of the model's own attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from typer.testing import CliRunner

import lipscope
from lipscope.cli.main import app
from lipscope.models.capture import double_throughout
from lipscope.models.load import ByteTokenizer
from lipscope.models.tokens import token_view

CROSS = ("cross-queries", "cross-keys")
IDS = torch.arange(12).reshape(2, 6) * 7 % 250 + 5


def made(kind: str) -> Any:
    torch.manual_seed(0)
    size = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 2}
    size |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 260}
    match kind:
        case "t5":
            small = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "vocab_size": 260}
            model: Any = tf.T5Model(tf.T5Config(**small, num_layers=2, num_decoder_layers=3, decoder_start_token_id=0))
        case "whisper":
            places = {"max_source_positions": 9, "max_target_positions": 16, "num_mel_bins": 6}
            special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
            model = tf.WhisperModel(tf.WhisperConfig(**size | places | special))
        case _:
            model = tf.BartModel(tf.BartConfig(**size, max_position_embeddings=64))
    for p in model.parameters():  # larger weights: attention that is far from uniform
        p.data.mul_(3 if p.ndim > 1 else 1)
    return model.eval()


PLACES = {"t5": "decoder.block.{}.layer.1.EncDecAttention", "bart": "decoder.layers.{}.encoder_attn"}
PLACES["whisper"] = PLACES["bart"]


def given(kind: str) -> dict[str, Tensor]:
    if kind != "whisper":
        return {"input_ids": IDS, "decoder_input_ids": IDS[:, :4] + 3}
    return {"input_features": torch.randn(2, 6, 18, generator=torch.Generator().manual_seed(0)).double(),
            "decoder_input_ids": IDS[:, :4] + 3}  # fmt: skip


def dense(model: Any, place: str, inputs: dict[str, Tensor], which: str) -> list[Tensor]:
    """Jacobians of the module's eager output, of every input, in its queries' tokens or in its keys'."""
    model.set_attn_implementation("eager")
    module, calls = model.get_submodule(place), []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    with hook, double_throughout(torch.float64):
        model(**inputs, use_cache=False)
    (args, kwargs), found = calls[0], []
    hidden = args[0] if args else kwargs["hidden_states"]
    keys, rest = (
        kwargs["key_value_states"],
        {k: v for k, v in kwargs.items() if k not in ("hidden_states", "key_value_states")},
    )
    for b in range(len(hidden)):
        mine = {k: v[b : b + 1] if isinstance(v, Tensor) and len(v) == len(hidden) else v for k, v in rest.items()}
        here, there = hidden[b : b + 1].detach(), keys[b : b + 1].detach()

        def image(x: Tensor, mine: Any = mine, here: Tensor = here, there: Tensor = there) -> Tensor:
            queries, keys = (here, x) if which == "cross-keys" else (x, there)
            return module(queries, key_value_states=keys, **mine)[0]

        x = there if which == "cross-keys" else here
        with double_throughout(torch.float64):  # T5 makes its softmax in float32 otherwise
            found.append(torch.autograd.functional.jacobian(image, x).reshape(-1, x.numel()))
    return found


@pytest.mark.parametrize("kind", PLACES)
def test_sigma_is_that_of_the_dense_jacobian_in_the_tokens_of_either_side(kind: str) -> None:
    model, inputs = made(kind).double(), given(kind)
    handle = lipscope.load(model, ByteTokenizer(), part="decoder")
    assert [(layer.index, layer.name.split(".")[0], layer.heads) for layer in handle.layers] == [
        (k, "decoder", 2 if kind == "t5" else 4) for k in range(3)
    ]
    recorded = handle.record(inputs)
    for scope, n in zip(CROSS, (4, 9 if kind == "whisper" else 6), strict=True):
        for layer in range(3):
            rows = recorded.rows(scope=scope, layers=[layer])
            assert [(row["layer"], row["n"], row["mask"], row["scope"]) for row in rows] == [(layer, n, "full", scope)] * 2
            for row, J in zip(rows, dense(model, PLACES[kind].format(layer), inputs, scope), strict=True):
                expected = float(torch.linalg.matrix_norm(J, 2))
                assert expected > 0
                assert row["lower"] <= expected * (1 + 1e-12)
                assert row["upper"] >= expected * (1 - 1e-12)
                assert row["estimate"] == pytest.approx(expected, rel=1e-3)
    # Beside them the decoder's own attention and its blocks, with what the encoder said held fixed.
    causal = recorded.rows(scope="attention") + recorded.rows(scope="block")
    assert {row["mask"] for row in causal} == {"causal"}


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_decoder_is_streamed_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    made(kind).bfloat16().save_pretrained(tmp_path, max_shard_size="5KB")
    for part in ("encoder", "decoder"):
        whole, streamed = (lipscope.load(tmp_path, ByteTokenizer(), part=part, stream=stream) for stream in (False, True))
        for scope in ("attention", "block", *(CROSS if part == "decoder" else ())):
            rows = [
                [{k: v for k, v in row.items() if k != "seconds"} for row in model.record(input_ids=IDS).rows(scope=scope)]
                for model in (whole, streamed)
            ]
            assert rows[0] == rows[1]


def test_the_decoder_of_a_text_is_to_say_what_the_encoder_reads() -> None:
    handle = lipscope.load(made("bart"), ByteTokenizer(), part="decoder")
    given = handle.token_inputs(text="abcd")
    assert given["decoder_input_ids"].tolist() == [[2, 97, 98, 99]]  # 2 starts a decoder of BART
    assert given["input_ids"].tolist() == [[97, 98, 99, 100]]


def test_what_a_decoder_does_not_take_is_refused(tmp_path: Path) -> None:
    handle = lipscope.load(made("bart"), ByteTokenizer(), part="decoder")
    for wrong in (
        lambda: handle.record(input_ids=IDS, attention_mask=torch.ones_like(IDS)),
        lambda: handle.record(text=["one", "another"]),
        lambda: handle.record(inputs_embeds=torch.ones(1, 3, 16)),
        lambda: handle.record({"input_ids": IDS, "decoder_input_ids": IDS}, documents=[3, 3]),
    ):
        with pytest.raises(ValueError, match="a decoder"):
            wrong()
    encoder = lipscope.load(made("bart"), part="encoder")
    with pytest.raises(ValueError, match="has no cross-attention"):
        encoder.record(input_ids=IDS)[0].sigma("cross-keys")
    with pytest.raises(ValueError, match="part must be 'encoder' or 'decoder'"):
        lipscope.load(made("bart"), part="middle")
    with pytest.raises(ValueError, match="without its head"):
        lipscope.load(tf.T5ForConditionalGeneration(made("t5").config).eval(), part="decoder")


def test_tokens_of_a_decoder_are_its_own() -> None:
    handle = lipscope.load(made("bart"), ByteTokenizer(), part="decoder")
    assert token_view(handle, "abcd", 1).tokens == ["\x02", "a", "b", "c"]
    with pytest.raises(ValueError, match="has other tokens where it begins"):
        token_view(handle, "abcd", 1, scope="cross-keys")


def test_a_scan_of_cross_attention(tmp_path: Path) -> None:
    made("t5").save_pretrained(tmp_path / "t5")
    (tmp_path / "text.txt").write_text("so it was indeed: she was now only ten inches high " * 20, encoding="utf-8")
    asked = ["scan", str(tmp_path / "t5"), "--part", "decoder", "--scope", "cross-keys", "--tokenizer", "bert-random"]
    asked += ["--text", str(tmp_path / "text.txt"), "--lengths", "8", "--inputs", "1", "--json"]
    told = CliRunner().invoke(app, asked)
    # The tokenizer knows more words than the model.
    assert told.exit_code == 2, told.output
    assert "input_ids must lie between 0 and 259" in told.output
    result = lipscope.scan(lipscope.load(tmp_path / "t5", ByteTokenizer(), part="decoder"),
                           tmp_path / "text.txt", scope="cross-keys", lengths=[8], inputs=2)  # fmt: skip
    assert [(row["layer"], row["n"]) for row in result.rows] == [(k, 8) for k in range(3) for _ in range(2)]
