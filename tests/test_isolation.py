"""``check``: every injected leak is caught and located, healthy models raise no alarm, and bad input is one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lipscope
from architectures import tiny_model
from lipscope.cli.main import app
from lipscope.models.subject import CannotCheckError
from lipscope.testing import assert_isolated
from model_families import FAMILIES
from mutants import MUTANTS, Mutant, after, ahead, mlp


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.what}, {m.family}")
def test_a_leak_is_caught_and_located(mutant: Mutant) -> None:
    model, place = mutant.build()
    options = dict(mutant.options)
    model.set_attn_implementation(options.pop("attn", "eager"))
    found = lipscope.check(model, n=18, **options)
    (verdict,) = [verdict for verdict in found.verdicts if verdict.claim == mutant.claim]
    assert verdict.held is False
    assert verdict.leak.module.split(" ")[0] == place
    assert found.held is False


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "mistral", "gemma3", "bert", "modernbert", "t5_encoder", "vit", "wav2vec2"]
)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_healthy_models_raise_no_alarm(family: str, implementation: str) -> None:
    model: Any = FAMILIES[family]().float()
    model.set_attn_implementation(implementation)
    side = "right" if family == "gpt2" else None  # it counts positions from the left end, padding or not
    found = lipscope.check(model, n=16, padding=side, cache=family in ("gpt2", "llama", "mistral", "gemma3"))
    assert found.held is True, str(found)
    claims = {verdict.claim for verdict in found.verdicts}
    assert ("causal" in claims) == (family in ("gpt2", "llama", "mistral", "gemma3"))
    assert found.forward_passes <= 40


# In bfloat16 the attention kernel rounds the same tokens differently at another length, by less than one unit in the last
# place. Then routers flip: in flex_olmo and jetmoe one token gets another expert, in phimoe a threshold between two tied
# experts halves a weight; hrm_text runs the same layers again and again.
@pytest.mark.parametrize("kind", ["flex_olmo", "jetmoe", "phimoe", "hrm_text"])
def test_rounding_that_later_layers_enlarge_is_no_leak(kind: str) -> None:
    model = tiny_model(kind, implementation="sdpa", dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = lipscope.check(model, n=16)
    assert found.held is True, str(found)
    after = model.state_dict()
    assert all(after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in before.items())


def test_a_choice_that_rounding_flips_is_told_from_a_leak() -> None:
    class Kernel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Rounds up by one unit in the last place in longer sequences."""
            return torch.where(x == x.amax(-1, keepdim=True), 1 + torch.finfo(x.dtype).eps * (x.shape[1] > 6), x.tanh())

    class Router(nn.Module):
        leak = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.where(x.amax(-1, keepdim=True) > 1.0001, x, -x) + self.leak * x.detach().mean(1, keepdim=True)

    model, tokens = nn.Sequential(Kernel(), Router()), {"tokens": torch.randn(1, 9, 3, dtype=torch.bfloat16)}
    (verdict,) = lipscope.check(model, inputs=tokens, causal=True, batch=False).verdicts
    assert verdict.held
    assert verdict.remark == "outputs differ by 2.0e+00 of the scale by rounding: not in float64"
    model[1].leak = 0.3
    (verdict,) = lipscope.check(model, inputs=tokens, causal=True, batch=False).verdicts
    assert verdict.leak.module == "1 (Router)"


def test_a_leak_in_half_precision_is_found_among_rounding() -> None:
    model: Any = tiny_model("jetmoe", implementation="sdpa", dtype=torch.bfloat16)
    after(mlp, lambda x: x + 0.3 * x.detach().mean(1, keepdim=True))(model)
    found = {verdict.claim: verdict for verdict in lipscope.check(model, n=16).verdicts}
    assert found["causal"].leak.module.split(" ")[0] == "layers.1.mlp"
    model = FAMILIES["gpt2"]().bfloat16()
    after(mlp, lambda x: x * (1 + 0.5 * (len(x) - 1)))(model)
    found = {verdict.claim: verdict for verdict in lipscope.check(model, n=16).verdicts}
    assert found["batch"].leak.module.split(" ")[0] == "h.1.mlp"


def test_a_leak_in_one_type_alone_is_a_leak() -> None:
    model: Any = FAMILIES["gpt2"]().bfloat16()
    after(mlp, lambda x: x + 3 * x.detach().mean(1, keepdim=True) if x.dtype == torch.bfloat16 else x)(model)
    found = {verdict.claim: verdict for verdict in lipscope.check(model, n=16).verdicts}
    assert found["causal"].leak.module.split(" ")[0] == "h.1.mlp"


def test_kernels_that_add_in_any_order_are_not_random() -> None:
    class Shaking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(1) * (1 + torch.finfo(x.dtype).eps * torch.randn(x.shape))

    assert lipscope.check(Shaking(), inputs={"tokens": torch.randn(1, 9, 3)}, causal=True).held is True


def test_documents_are_kept_apart_by_positions_that_start_again() -> None:
    assert_isolated(FAMILIES["llama"]().float(), documents=[5, 9, 4], cache=True, use_cache=False)


def test_an_encoder_is_not_causal_and_the_first_layer_is_named() -> None:
    found = lipscope.check(FAMILIES["bert"]().float(), n=12, causal=True)
    (verdict,) = [verdict for verdict in found.verdicts if verdict.claim == "causal"]
    assert verdict.held is False
    assert verdict.leak.module == "encoder.layer.0.attention.self (BertSelfAttention)"
    assert verdict.leak.layer == 0
    assert "what its outputs depend on" in verdict.leak.picture
    with pytest.raises(AssertionError, match=r"encoder\.layer\.0"):
        assert_isolated(FAMILIES["bert"]().float(), causal=True, n=12)


def test_a_decoder_of_two_halves_is_causal_in_its_own_tokens() -> None:
    import transformers as tf

    torch.manual_seed(0)
    config = tf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0)
    found = lipscope.check(tf.T5Model(config).eval(), n=12)
    assert {verdict.claim: verdict.held for verdict in found.verdicts} == {
        "batch": True, "causal": True, "padding right": True,
    }  # fmt: skip


def test_the_picture_shows_the_mask_beside_what_outputs_depend_on() -> None:
    model: Any = FAMILIES["llama"]().float()
    model.set_attn_implementation("eager")
    attention = model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: (ahead(0.5)(forward(*args, **kwargs)[0]), None)
    found = lipscope.check(model, n=6)
    (leak,) = [verdict.leak for verdict in found.verdicts if verdict.claim == "causal"]
    assert leak.picture.splitlines() == [
        "what its outputs depend on, and the mask that it received",
        "(outputs down, tokens across: 0, 1, 2, 3, 4, 5)",
        "    0 ■ ■ · · · ·     ■ · · · · ·",
        "    1 ■ ■ ■ · · ·     ■ ■ · · · ·",
        "    2 ■ ■ ■ ■ · ·     ■ ■ ■ · · ·",
        "    3 ■ ■ ■ ■ ■ ·     ■ ■ ■ ■ · ·",
        "    4 ■ ■ ■ ■ ■ ■     ■ ■ ■ ■ ■ ·",
        "    5 ■ ■ ■ ■ ■ ■     ■ ■ ■ ■ ■ ■",
    ]


def test_a_module_of_several_layers_is_named_with_its_call() -> None:
    model: Any = FAMILIES["albert"]().float()
    found = lipscope.check(model, n=8, causal=True)
    (leak,) = [verdict.leak for verdict in found.verdicts if verdict.claim == "causal"]
    assert leak.module.endswith("(AlbertAttention), call 1 of 2")


@pytest.mark.parametrize("name", ["whisper", "bart"])
def test_two_halves_with_a_cache(name: str) -> None:
    import transformers as tf

    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 1}
    if name == "whisper":
        config: Any = tf.WhisperConfig(
            vocab_size=50, num_mel_bins=8, max_source_positions=12, max_target_positions=32, **sizes, **heads
        )
        model: Any = tf.WhisperModel(config).eval()
    else:
        model = tf.BartModel(tf.BartConfig(vocab_size=50, max_position_embeddings=32, **sizes, **heads)).eval()
    found = lipscope.check(model, n=10, cache=True)
    expected = {"batch": True, "causal": True, "cache": True} | ({"padding right": True} if name == "bart" else {})
    assert {verdict.claim: verdict.held for verdict in found.verdicts} == expected, str(found)


def test_what_was_asked_for_and_could_not_be_tested_has_not_held() -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean(1)

    tokens = {"tokens": torch.randn(1, 9, 3)}
    assert lipscope.check(Mean(), inputs=tokens).held is True
    found = lipscope.check(Mean(), inputs=tokens, causal=True)
    assert found.held is None
    assert "do not belong to the 9 tokens" in found.verdicts[-1].skipped


def test_tokens_without_an_embedding_are_tested_by_substitution_alone() -> None:
    class Table(nn.Module):
        config = type("Config", (), {"vocab_size": 20})()

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return torch.linspace(0, 1, 20)[input_ids][..., None].cumsum(1)

    (verdict,) = lipscope.check(Table(), inputs={"input_ids": torch.arange(2, 11)[None]}, causal=True, batch=False).verdicts
    assert verdict.held
    assert verdict.remark.startswith("by substitution alone")


def test_any_module_on_tokens() -> None:
    class Running(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.cumsum(1)

    tokens = {"tokens": torch.randn(1, 9, 3)}
    assert lipscope.check(Running(), inputs=tokens, causal=True).held
    found = lipscope.check(Running(), inputs=tokens, window=2)
    assert found.verdicts[-1].held is None  # no attention inside to look at


def test_a_model_that_leaks_says_so_in_every_row() -> None:
    model: Any = FAMILIES["gpt2"]().float()
    block = model.h[0].mlp
    block.register_forward_hook(lambda module, args, out: ahead(0.5)(out))
    handle = lipscope.load(model)
    assert any("its outputs depend on later tokens" in note for note in handle.notes)
    (row, *_) = handle.record(input_ids=torch.arange(10, 18)).rows(layers=[1])
    assert "depend on later tokens" in row["notes"]
    assert not lipscope.load(FAMILIES["gpt2"]().float()).notes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 1}, "at least two tokens"),
        ({"n": 64}, "more than the 32 positions"),
        ({"n": 8, "window": 8}, "window must lie between"),
        ({"n": 8, "documents": [3]}, "add up to n"),
        ({"n": 8, "documents": [3, 4]}, "add up to n = 8"),
        ({"n": 8, "padding": "top"}, "left, right or none"),
        ({"inputs": {"words": 1}}, "none of the inputs holds tokens"),
    ],
)
def test_bad_input_is_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CannotCheckError, match=message):
        lipscope.check(FAMILIES["gpt2"]().float(), **options)


def test_dropout_and_non_finite_outputs_are_refused() -> None:
    model: Any = FAMILIES["gpt2"]().float()
    with pytest.raises(CannotCheckError, match=r"call model\.eval\(\) first"):
        lipscope.check(model.train(), n=8)
    model.eval().h[0].attn.resid_dropout.train()
    with pytest.raises(CannotCheckError, match=r"as h\.0\.attn\.resid_dropout is in training mode"):
        lipscope.check(model, n=8)
    model.eval().h[0].mlp.c_fc.weight.data.fill_(float("nan"))
    with pytest.raises(CannotCheckError, match="NaN or infinite"):
        lipscope.check(model, n=8)


def test_a_model_that_remembers_or_fails_is_refused() -> None:
    class Remembering(nn.Module):
        past = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.past
            self.past = x.mean()
            return y

    with pytest.raises(CannotCheckError, match="keeps state between calls"):
        lipscope.check(Remembering(), inputs={"tokens": torch.randn(1, 4, 3)})
    with pytest.raises(CannotCheckError, match="does not run on these inputs"):
        lipscope.check(nn.Linear(5, 5), inputs={"tokens": torch.randn(1, 4, 3)})


def test_the_command_line(tmp_path: Path) -> None:
    model: Any = FAMILIES["gpt2"]().float()
    model.save_pretrained(tmp_path / "model")
    runner = CliRunner()
    good = runner.invoke(app, ["check", str(tmp_path / "model"), "--n", "12", "--cache", "--padding", "right", "--json"])
    assert good.exit_code == 0, good.output
    assert {row["claim"]: row["held"] for row in json.loads(good.stdout)} == {
        "batch": True, "causal": True, "padding right": True, "cache": True,
    }  # fmt: skip
    FAMILIES["bert"]().float().save_pretrained(tmp_path / "encoder")
    page = tmp_path / "page.html"
    options = ["--n", "12", "--causal", "--attn-implementation", "eager", "--out", str(page)]
    bad = runner.invoke(app, ["check", str(tmp_path / "encoder"), *options])
    assert bad.exit_code == 1
    assert "BROKEN" in bad.output
    text = page.read_text(encoding="utf-8")
    assert "<h1>Does an output of encoder see a token that it must not?</h1>" in text
    assert "encoder.layer.0.attention.self" in text
    assert "<pre>what its outputs depend on" in text


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, and one whose weights are not finite."""
    place, model = tmp_path_factory.mktemp("models"), FAMILIES["gpt2"]().float()
    model.save_pretrained(place / "model")
    model.h[0].mlp.c_fc.weight.data.fill_(float("nan"))
    model.save_pretrained(place / "broken")
    return place


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("model", "--n 1", "a sequence needs at least two tokens, or there is nothing that must not be seen"),
        ("model", "--n 64", "n = 64 tokens are more than the 32 positions of the model"),
        ("model", "--n 8 --window 8", "a window must lie between 1 and n - 1 = 7, got 8"),
        ("model", "--n 8 --documents 3,4", "documents must be two or more lengths that add up to n = 8, got [3, 4]"),
        ("model", "--documents 3,x", "--documents must be lengths such as 5,9,4, got '3,x'"),
        ("model", "--documents all", "--documents must be lengths such as 5,9,4, got 'all'"),
        ("model", "--attn-implementation nowhere", "nowhere"),
        ("broken", "--n 8", "the outputs hold NaN or infinite values, so nothing can be compared"),
        ("absent", "", "no directory"),
    ],
)
def test_the_command_says_in_one_line_what_it_cannot_check(saved: Path, name: str, options: str, message: str) -> None:
    refused = CliRunner().invoke(app, ["check", str(saved / name), *options.split()])
    assert refused.exit_code == 2, refused.output
    assert message in refused.stderr
    assert refused.stdout == ""
    assert len(refused.stderr.splitlines()) == 1
