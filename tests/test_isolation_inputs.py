"""``check`` on wrapped models, and on inputs and outputs that it reads otherwise or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lipscope
from lipscope.models.subject import CannotCheckError
from lipscope.models.verdicts import Verdict
from model_families import FAMILIES
from mutants import after, ahead, mlp

TOKENS = {"tokens": torch.randn(1, 12, 6, generator=torch.Generator().manual_seed(1))}


def verdict_on(claim: str, model: Any, **options: Any) -> Verdict:
    """What is found about one claim."""
    return next(v for v in lipscope.check(model, **options).verdicts if v.claim == claim)


def test_padding_on_the_left_is_tested_in_a_call_without_positions() -> None:
    model, ids = FAMILIES["gpt2"]().float(), torch.arange(10, 22)[None]
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids > 12).long()}
    verdict = verdict_on("padding left", model, inputs=given)
    assert (verdict.held, verdict.leak.module.split(" ")[0]) == (False, "wpe")
    assert verdict.remark == "held when position_ids are given"
    verdict = verdict_on("padding left", model, n=12)  # no call was given, and generate counts positions
    assert verdict.held
    assert verdict.remark.startswith("held when position_ids are given; without them outputs differ by ")
    counted = given | {"position_ids": (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)}
    assert verdict_on("padding left", model, inputs=counted).held
    for kind in ("llama", "opt"):  # the one turns by differences of positions, the other counts them from the mask
        assert verdict_on("padding left", FAMILIES[kind]().float(), inputs=given).held


def test_no_claim_about_padding_leaves_the_causal_test_as_it_is() -> None:
    model: Any = FAMILIES["llama"]().float()
    masks: list[Any] = []
    model.register_forward_pre_hook(lambda part, args, kw: masks.append(kw.get("attention_mask")), with_kwargs=True)

    def leaking(x: Tensor) -> Tensor:
        left = masks[-1] is not None and not bool(masks[-1][:, 0].all())
        return ahead(0.5)(x) if left else x

    after(mlp, leaking)(model)
    for side in (None, "none", "left"):
        assert verdict_on("causal", model, n=12, padding=side).held is False


class Passing(nn.Module):
    """Hands everything on."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)


@pytest.mark.parametrize("wrapped", [lambda model: torch.compile(model, backend="eager"), Passing])
def test_a_wrapped_model_has_the_claims_of_the_one_inside(wrapped: Callable[[Any], Any]) -> None:
    # Compiled for the first shapes, and not again for every other.
    with torch.compiler.set_stance("eager_on_recompile"):
        found = lipscope.check(wrapped(FAMILIES["llama"]().float()), n=4, cache=True)
    held = {"batch": True, "causal": True, "padding left": True, "cache": True}
    assert {v.claim: v.held for v in found.verdicts} == held, str(found)


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


IDS, PLACES = torch.arange(10, 22)[None], torch.arange(12)[None]


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        ("llama", {"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 5, 12])}, r"cu_seq_lens_q \(3,\) has no row"),
        ("llama", {"input_ids": IDS, "position_ids": PLACES.expand(3, 1, 12)}, r"position_ids \(3, 1, 12\) has no row"),
        ("llama", {"input_ids": [[1, 2, 3]]}, r"input_ids must be a tensor \(B, n\)"),
        (nn.Linear(6, 6), {"tokens": torch.randn(9, 6)}, r"tokens must be a tensor \(B, n, d\)"),
        (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), {"tokens": torch.randn(9, 1, 6)}, "sequence-first"),
        (nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0), None, "sequence-first"),
        (Lambda(torch.mean), TOKENS, "single numbers alone"),
    ],
)
def test_inputs_and_outputs_that_are_not_read_are_one_line(model: Any, inputs: Any, message: str) -> None:
    with pytest.raises(CannotCheckError, match=message):
        lipscope.check(FAMILIES[model]().float() if isinstance(model, str) else model, inputs=inputs, causal=True)


def test_no_claim_at_all_is_refused() -> None:
    with pytest.raises(CannotCheckError, match="no claim is left to test"):
        lipscope.check(FAMILIES["llama"]().float(), n=8, causal=False, batch=False, padding="none")


def test_numbers_that_say_never_do_not_hide_a_leak() -> None:
    def logits(x: Tensor) -> Tensor:
        leaking = x + 0.5 * x.detach().mean(1, keepdim=True)
        return leaking.masked_fill(torch.arange(x.shape[-1]) < 2, torch.finfo(x.dtype).min)

    for dtype in (torch.float32, torch.bfloat16):
        inputs = {"tokens": TOKENS["tokens"].to(dtype)}
        assert verdict_on("causal", Lambda(logits), inputs=inputs, causal=True).leak.instrument == "substitution"


def test_a_loss_before_the_outputs_is_not_watched() -> None:
    model = Lambda(lambda x: {"loss": x.mean(), "y": ahead(0.5)(x)})
    assert verdict_on("causal", model, inputs=TOKENS, causal=True).held is False


def test_a_name_claims_causality_and_the_configuration_can_deny_it() -> None:
    import transformers as tf

    class OwnConfig(tf.PreTrainedConfig):
        model_type, vocab_size, hidden_size = "own", 40, 6

    class OwnForCausalLM(tf.PreTrainedModel):
        config_class = OwnConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.embed, self.head = nn.Embedding(40, 6), nn.Linear(6, 40)
            self.post_init()

        def get_input_embeddings(self) -> nn.Module:
            return self.embed

        def forward(self, input_ids: Tensor) -> Any:
            return {"logits": self.head(ahead(0.5)(self.embed(input_ids)))}

    verdict = verdict_on("causal", OwnForCausalLM(OwnConfig()).eval(), n=8)
    assert (verdict.held, verdict.why) == (False, "OwnForCausalLM is a causal language model")
    model: Any = FAMILIES["llama"]().float()
    model.config.is_causal = False
    assert "causal" not in {v.claim for v in lipscope.check(model, n=8).verdicts}


def test_a_module_that_hands_on_the_tensor_of_its_child_is_named_itself() -> None:
    class Scaled(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            return y if len(x) == 1 else 1.5 * y

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Scaled(nn.Linear(6, 6)), nn.Linear(6, 6))
    assert verdict_on("batch", model, inputs=TOKENS).leak.module == "1 (Scaled)"
