"""``check`` runs the model as its user does, looks behind its outputs, and says what it could not test."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import lipscope
from architectures import tiny_model
from lipscope.cli.main import app
from lipscope.models.subject import CannotCheckError
from lipscope.models.verdicts import Verdict
from model_families import FAMILIES
from mutants import after, ahead, mlp

TOKENS = {"tokens": torch.randn(1, 12, 6, generator=torch.Generator().manual_seed(1))}


def verdict_on(claim: str, model: Any, **options: Any) -> Verdict:
    """What is found about one claim."""
    return next(v for v in lipscope.check(model, **options).verdicts if v.claim == claim)


# ── the user's own call ──


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_documents_that_a_cache_mixes_are_broken(implementation: str) -> None:
    model: Any = FAMILIES["llama"]().float()
    model.set_attn_implementation(implementation)
    verdict = verdict_on("documents", model, documents=[5, 9, 4])
    assert verdict.leak.module.split(" ")[0] == "layers.0.self_attn"
    assert verdict.remark == "held with use_cache=False"
    assert verdict_on("documents", model, documents=[5, 9, 4], use_cache=False).held
    model.config.use_cache = False
    assert verdict_on("documents", model, documents=[5, 9, 4]).held


def test_a_leak_where_a_cache_is_made_is_seen_by_default() -> None:
    model: Any = FAMILIES["gpt2"]().float()
    forward = model.h[1].attn.forward

    def leaking(x: Tensor, past_key_values: Any = None, **kwargs: Any) -> Any:
        out, *rest = forward(x, past_key_values, **kwargs)
        return (out if past_key_values is None else ahead(0.1)(out), *rest)

    model.h[1].attn.forward = leaking
    assert verdict_on("causal", model, n=9).leak.module.split(" ")[0] == "h.1.attn"
    assert verdict_on("causal", model, n=9, use_cache=False).held


def test_a_mask_among_the_inputs_says_where_padding_is() -> None:
    leaky, model = FAMILIES["bert"]().float(), FAMILIES["bert"]().float()
    ids = torch.arange(10, 22)[None]
    after(mlp, lambda x: x - 0.1 * x.mean(1, keepdim=True))(leaky)
    for mask in (torch.ones_like(ids), (ids < 18).long()):
        inputs = {"input_ids": ids, "attention_mask": mask}
        assert verdict_on("padding right", leaky, inputs=inputs).leak.module.startswith("encoder.layer.1.intermediate")
        assert verdict_on("padding right", model, inputs=inputs).held


def test_documents_by_a_mask_of_the_users_own() -> None:
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 4, 3]))
    seen = (owner[:, None] == owner) & torch.ones(12, 12, dtype=torch.bool).tril()
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    places = torch.cat([torch.arange(length) for length in (5, 4, 3)])[None]
    inputs = {"input_ids": torch.arange(10, 22)[None], "attention_mask": mask, "position_ids": places}
    model = FAMILIES["llama"]().float()
    assert lipscope.check(model, inputs=inputs, documents=[5, 4, 3], padding="none").held is True
    (said,) = [v.skipped for v in lipscope.check(model, inputs=inputs).verdicts if v.held is None]
    assert said == "the inputs hold an attention_mask that is not one of padding"


# ── windows ──


class Crossed(nn.Module):
    """Attention whose keys and values come from another tensor than its queries."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.window = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), window

    def forward(self, x: Tensor, memory: list[Tensor]) -> Tensor:
        at = torch.arange(x.shape[1])
        back = at[:, None] - at
        seen = (back >= 0) & (back < (self.window or len(at)))
        scores = self.q(x) @ self.k(memory[0]).mT
        return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ self.v(memory[0])


class Wrapper(nn.Module):
    """A layer that normalises its queries alone."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(6), Crossed(window)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x), memory=[x])


def test_a_window_holds_for_keys_from_another_tensor() -> None:
    torch.manual_seed(0)
    verdict = verdict_on("window 3", Wrapper(None), inputs=TOKENS, window=3)
    assert verdict.leak.module == "attention (Crossed)"
    assert verdict.leak.picture.splitlines()[-2].split()[1:] in (["■"] * 9, ["■"] * 10)
    assert verdict_on("window 3", Wrapper(3), inputs=TOKENS, window=3).held


def test_a_window_is_tested_at_every_place() -> None:
    for place in range(4, 16):
        model: Any = FAMILIES["mistral"]().float()
        model.config.sliding_window = 4

        def seeing(part: nn.Module, args: Any, kwargs: Any, output: Any, place: int = place) -> Any:
            one = torch.zeros_like(output[0])
            one[:, place] = kwargs["hidden_states"][:, place - 4]
            return (output[0] + one, *output[1:])

        model.layers[1].self_attn.register_forward_hook(seeing, with_kwargs=True)
        leak = verdict_on("window 4", model, n=16, batch=False, causal=False, padding="none").leak
        assert (leak.output, leak.token, leak.layer) == ((0, place), (0, place - 4), 1)


def test_a_window_is_tested_beside_rotations_of_a_wider_type() -> None:
    model = tiny_model("olmo3", implementation="sdpa", dtype=torch.bfloat16)
    assert verdict_on("window 6", model, n=16).held is True


def test_the_windows_of_images_are_no_claim() -> None:
    import transformers as tf

    torch.manual_seed(0)
    sizes = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4}
    found = lipscope.check(tf.SwinModel(tf.SwinConfig(**sizes)).eval())
    assert {v.claim: v.held for v in found.verdicts} == {"batch": True}


def test_layers_that_are_local_have_a_window() -> None:
    model: Any = FAMILIES["gpt_neo"]().float()
    width = model.config.window_size = 4
    (mask,) = (part for name, part in model.h[1].named_buffers() if name.endswith("attn.attention.bias"))
    assert lipscope.check(model, n=9, padding="none").verdicts[2].claim == "window 4"
    places = torch.arange(mask.shape[-1])
    mask.copy_(((places[:, None] - places >= 0) & (places[:, None] - places < width))[None, None])
    assert verdict_on("window 4", model, n=9).held
    mask.copy_((places[:, None] >= places)[None, None])
    assert verdict_on("window 4", model, n=9).leak.layer == 1


def test_a_claim_of_the_configuration_that_is_not_tested_does_not_hold() -> None:
    model: Any = FAMILIES["mistral"]().float()
    model.config.sliding_window = 40
    found = lipscope.check(model, n=12)
    assert found.held is None
    assert found.verdicts[2].skipped == "a window of 40 tokens hides nothing in 12: use a larger n"
    assert lipscope.check(model, n=12, window=0).held is True
    for layer in model.layers:  # nothing says which modules have the window
        layer.self_attn.layer_idx = None
    model.config.sliding_window = 3
    assert lipscope.check(model, n=12, use_cache=False).verdicts[2].held is None


def test_the_exit_status_says_that_a_claim_was_not_tested(tmp_path: Any) -> None:
    model: Any = FAMILIES["mistral"]().float()
    model.config.sliding_window = 20
    model.save_pretrained(tmp_path / "model")
    command = ["check", str(tmp_path / "model"), "--n", "12"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 2, shown.output
    assert "not tested" in shown.output
    assert CliRunner().invoke(app, [*command, "--window", "0"]).exit_code == 0
    assert CliRunner().invoke(app, [*command, "--no-causal", "--padding", "none", "--no-batch"]).exit_code == 2


# ── other configurations ──


def test_a_multimodal_model_is_checked_by_its_text() -> None:
    import transformers as tf

    torch.manual_seed(0)
    text = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    text |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
    image = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = tf.LlavaConfig(
        text_config=tf.LlamaConfig(**text), vision_config=tf.CLIPVisionConfig(**image, image_size=16, patch_size=8),
        image_token_index=59,
    )  # fmt: skip
    model = tf.LlavaForConditionalGeneration(config).eval()
    assert {v.claim: v.held for v in lipscope.check(model, n=12).verdicts} == {
        "batch": True, "causal": True, "padding left": True,
    }  # fmt: skip
    layer = model.model.language_model.layers[1].mlp
    layer.register_forward_hook(lambda module, args, out: ahead(0.1)(out))
    leak = verdict_on("causal", model, n=12).leak
    assert leak.module.split(" ")[0] == "model.language_model.layers.1.mlp"


@pytest.mark.parametrize("kind", ["Qwen2VL", "PaliGemma", "CLIP", "Blip2", "Speech2Text"])
def test_what_cannot_be_made_up_is_one_line(kind: str) -> None:
    import transformers as tf

    torch.manual_seed(0)
    text: Any = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 4}
    text |= {"intermediate_size": 24, "num_key_value_heads": 2, "max_position_embeddings": 64}
    image = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    image |= {"image_size": 16, "patch_size": 8}
    model: Any
    if kind == "Qwen2VL":  # its vocabulary is that of its text, and so is what it claims
        turns = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}
        seer = {"depth": 1, "embed_dim": 16, "num_heads": 2, "hidden_size": 16, "patch_size": 8}
        special = {"image_token_id": 59, "video_token_id": 58, "vision_start_token_id": 57, "vision_end_token_id": 56}
        config: Any = tf.Qwen2VLConfig(text_config={**text, "rope_parameters": turns}, vision_config=seer, **special)
        model = tf.Qwen2VLForConditionalGeneration(config).eval()
        assert {v.claim: v.held for v in lipscope.check(model, n=12).verdicts}["causal"] is True
    elif kind == "PaliGemma":  # its configuration names more ids than it embeds
        config = tf.PaliGemmaConfig(text_config=tf.GemmaConfig(**text), vision_config=tf.SiglipVisionConfig(**image))
        model = tf.PaliGemmaForConditionalGeneration(config).eval()
        assert {v.claim: v.held for v in lipscope.check(model, n=12).verdicts}["batch"] is True
    else:
        model = {
            "CLIP": lambda: tf.CLIPModel(tf.CLIPConfig(text_config=text, vision_config=image)),
            "Blip2": lambda: tf.Blip2Model(
                tf.Blip2Config(vision_config=image, qformer_config=text, text_config={"model_type": "opt", **text})
            ),
            "Speech2Text": lambda: tf.Speech2TextModel(tf.Speech2TextConfig(vocab_size=50, d_model=16, encoder_layers=1)),
        }[kind]()
        with pytest.raises(CannotCheckError, match=r"^no inputs can be made up for"):
            lipscope.check(model.eval(), n=12)


# ── small leaks ──


def test_a_small_leak_without_a_derivative_is_seen_in_half_precision() -> None:
    model = FAMILIES["llama"]().bfloat16()
    after(mlp, lambda x: x + 0.01 * x.detach().roll(-1, 1))(model)
    leak = verdict_on("causal", model, n=9).leak
    assert leak.instrument == "substitution"
    assert leak.module.split(" ")[0] == "layers.1.mlp"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [5e-4, 1e-8])
def test_a_derivative_is_exactly_zero_or_a_leak(dtype: torch.dtype, size: float) -> None:
    if dtype == torch.float16 and size < 1e-7:
        pytest.skip("not a number of that type")
    model = FAMILIES["llama"]().to(dtype)
    after(mlp, ahead(size))(model)
    leak = verdict_on("causal", model, n=9).leak
    assert leak.instrument == "derivative" or size > 1e-5
    assert leak.module.split(" ")[0] == "layers.1.mlp"


def test_a_derivative_that_float64_does_not_have_is_rounding() -> None:
    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(context: Any, grad: Tensor) -> Tensor:
            return grad + 0.3 * torch.finfo(grad.dtype).eps * grad.roll(-1, 1)

    class Running(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Rounded.apply(x.cumsum(1))

    verdict = verdict_on("causal", Running(), inputs=TOKENS, causal=True, batch=False)
    assert verdict.held, verdict.leak
    assert "by rounding: not in float64" in verdict.remark


# ── what outputs hide ──


def test_a_constant_head_does_not_hide_a_leak() -> None:
    import transformers as tf

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 32}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    model: Any = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, tie_word_embeddings=False)).eval()
    assert lipscope.check(model, n=9, padding="right").held is True
    model.lm_head.weight.data.zero_()
    assert lipscope.check(model, n=9, padding="right").held is True
    after(mlp, ahead(0.1))(model.transformer)
    assert verdict_on("causal", model, n=9).leak.module.split(" ")[0] == "transformer.h.1.mlp"
    after(mlp, lambda x: x + 0.1 * x.mean(0))(model.transformer)
    assert verdict_on("batch", model, n=9).leak.module.split(" ")[0] == "transformer.h.1.mlp"


def test_outputs_that_do_not_belong_to_tokens_are_tested_on_what_they_are_made_of() -> None:
    import transformers as tf

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 32}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    model: Any = tf.GPT2ForSequenceClassification(tf.GPT2Config(**sizes, num_labels=3, pad_token_id=0)).eval()
    found = lipscope.check(model, n=9, padding="none")
    assert found.held is True, str(found)
    after(mlp, ahead(0.1))(model.transformer)
    verdict = verdict_on("causal", model, n=9)
    assert verdict.leak.module.split(" ")[0] == "transformer.h.1.mlp"
    assert verdict.remark == "outputs of shape (4, 3): tested on what they are made of"


def test_outputs_without_a_signal_are_refused() -> None:
    class Mute(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0 * x.mean(1, keepdim=True) + torch.ones_like(x)

    with pytest.raises(CannotCheckError, match="the outputs are the same for other tokens"):
        lipscope.check(Mute(), inputs=TOKENS, causal=True)


def test_channels_are_not_taken_for_tokens() -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Conv1d(12, 12, 3, padding=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.mT)[..., : x.shape[1]].mT

    torch.manual_seed(0)
    assert lipscope.check(Convolution(), inputs={"tokens": torch.randn(1, 12, 12)}, causal=True).held is True


# ── who lets it through ──


def whisper() -> Any:
    """A tiny model that listens."""
    import transformers as tf

    torch.manual_seed(0)
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 1, "max_target_positions": 32}
    return tf.WhisperModel(tf.WhisperConfig(vocab_size=50, num_mel_bins=8, max_source_positions=12, **sizes, **heads)).eval()


@pytest.mark.parametrize("leak", [lambda x: x + 0.1 * x.mean(0), lambda x: x * (1 + 0.1 * (len(x) - 1))])
@pytest.mark.parametrize("name", ["encoder.layers.1.fc2", "encoder.conv2", "decoder.layers.0.encoder_attn.out_proj"])
def test_a_leak_in_an_encoder_is_located_there(name: str, leak: Callable[[Tensor], Tensor]) -> None:
    model = whisper()
    model.get_submodule(name).register_forward_hook(lambda module, args, out: leak(out))
    assert verdict_on("batch", model, n=10).leak.module.split(" ")[0] == name
    if name.startswith("encoder"):
        name = name.removeprefix("encoder.")
        assert verdict_on("batch", model.encoder).leak.module.split(" ")[0] == name


class Pair(nn.Module):
    """Two layers; the second one reads what the first one made as its second argument."""

    def __init__(self, leak: str) -> None:
        super().__init__()
        self.a, self.b, self.leak = nn.Linear(6, 6), nn.Bilinear(6, 6, 6), leak

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = ahead(0.1)(y) if self.leak == "between" else y
        return self.b(x, y)


@pytest.mark.parametrize(("leak", "where"), [("between", "Pair"), ("a", "a (Linear)"), ("b", "b (Bilinear)")])
def test_a_second_argument_brings_a_leak_along(leak: str, where: str) -> None:
    torch.manual_seed(0)
    model = Pair(leak)
    if leak != "between":
        model.get_submodule(leak).register_forward_hook(lambda module, args, out: ahead(0.1)(out))
    assert verdict_on("causal", model, inputs=TOKENS, causal=True, batch=False).leak.module == where
    detached = Pair("")
    name = leak if leak != "between" else "a"
    detached.get_submodule(name).register_forward_hook(lambda module, args, out: out + 0.1 * out.detach().roll(-1, 1))
    assert verdict_on("causal", detached, inputs=TOKENS, causal=True, batch=False).leak.module.split(" ")[0] == name


def test_a_mask_that_one_of_two_passes_has_does_not_hide_the_place() -> None:
    model = FAMILIES["llama"]().float()
    after(mlp, lambda x: x + (0.1 if len(x) == 1 else 0.0) * x.roll(-1, 1))(model)
    found = lipscope.check(model, n=9)
    assert {v.leak.module.split(" ")[0] for v in found.verdicts} == {"layers.1.mlp"}


# ── state and chance ──


class Changing(nn.Module):
    """Another output in every pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.count, self.last = how, 0, torch.zeros(())
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "counter":
            self.count += 1
            return x * self.count
        if self.how == "statistics":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
            return x - self.mean
        if self.how == "other input":  # the same after the same
            y = x + self.last
            self.last = x.detach()[0, 0, 0] if x.shape[0] > 1 else self.last
            return y
        return x + (torch.rand(()) if self.how == "torch" else random.random())


@pytest.mark.parametrize("how", ["counter", "statistics", "other input", "torch", "python"])
def test_state_is_told_from_chance(how: str) -> None:
    said = "draws random numbers" if how in ("torch", "python") else "keeps state between calls"
    with pytest.raises(CannotCheckError, match=rf"1 \(Changing\) {said}"):
        lipscope.check(nn.Sequential(nn.Linear(6, 6), Changing(how)).eval(), inputs=TOKENS)


# ── the note on loading ──


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_blocks_that_see_themselves_are_noted(size: int) -> None:
    def blocks(x: Tensor) -> Tensor:
        parts = [part.mean(1, keepdim=True).expand_as(part) for part in x.split(size, 1)]
        return x + 0.1 * torch.cat(parts, 1)

    model: Any = FAMILIES["gpt2"]().float()
    after(mlp, blocks, 0)(model)
    assert any("its outputs depend on later tokens" in note for note in lipscope.load(model).notes)
