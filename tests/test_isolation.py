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
from lipscope.cli.main import app
from lipscope.models.leaks import CannotCheckError
from lipscope.testing import assert_isolated
from model_families import FAMILIES
from mutants import MUTANTS, Mutant, ahead


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
    found = lipscope.check(model, n=16, cache=family in ("gpt2", "llama", "mistral", "gemma3"))
    assert found.held is True, str(found)
    claims = {verdict.claim for verdict in found.verdicts}
    assert ("causal" in claims) == (family in ("gpt2", "llama", "mistral", "gemma3"))
    assert found.forward_passes <= 40


def test_documents_are_kept_apart_by_positions_that_start_again() -> None:
    assert_isolated(FAMILIES["llama"]().float(), documents=[5, 9, 4], cache=True)


def test_an_encoder_is_not_causal_and_the_first_layer_is_named() -> None:
    found = lipscope.check(FAMILIES["bert"]().float(), n=12, causal=True)
    (verdict,) = [verdict for verdict in found.verdicts if verdict.claim == "causal"]
    assert verdict.held is False
    assert verdict.leak.module == "encoder.layer.0.attention.self (BertSelfAttention)"
    assert verdict.leak.layer == 0
    assert "■" in verdict.leak.picture
    with pytest.raises(AssertionError, match=r"encoder\.layer\.0"):
        assert_isolated(FAMILIES["bert"]().float(), causal=True, n=12)


def test_a_decoder_of_two_halves_is_causal_in_its_own_tokens() -> None:
    import transformers as tf

    torch.manual_seed(0)
    config = tf.T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0)
    found = lipscope.check(tf.T5Model(config).eval(), n=12)
    assert {verdict.claim: verdict.held for verdict in found.verdicts} == {"batch": True, "causal": True}


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
        ({"n": 8, "padding": "top"}, "left or right"),
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
    model.eval().h[0].mlp.c_fc.weight.data.fill_(float("nan"))
    with pytest.raises(CannotCheckError, match="NaN or infinite"):
        lipscope.check(model, n=8)


def test_the_command_line(tmp_path: Path) -> None:
    model: Any = FAMILIES["gpt2"]().float()
    model.save_pretrained(tmp_path / "model")
    runner = CliRunner()
    good = runner.invoke(app, ["check", str(tmp_path / "model"), "--n", "12", "--cache", "--json"])
    assert good.exit_code == 0, good.output
    assert {row["claim"]: row["held"] for row in json.loads(good.stdout)} == {
        "batch": True, "causal": True, "padding left": True, "cache": True,
    }  # fmt: skip
    FAMILIES["bert"]().float().save_pretrained(tmp_path / "encoder")
    bad = runner.invoke(app, ["check", str(tmp_path / "encoder"), "--n", "12", "--causal", "--attn-implementation", "eager"])
    assert bad.exit_code == 1
    assert "BROKEN" in bad.output
    none = runner.invoke(app, ["check", str(tmp_path / "model"), "--n", "1"])
    assert none.exit_code == 2
    assert "at least two tokens" in none.output
