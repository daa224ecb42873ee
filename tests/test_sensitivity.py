"""What a perturbation of one layer does to the outputs: predicted by the Fisher matrix, and measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from typer.testing import CliRunner

import lipscope
from lipscope.cli.main import app
from lipscope.models.capture import double_throughout
from lipscope.models.inputs import probe_inputs
from lipscope.models.load import load_with_head, with_tied_head
from lipscope.report.page import Page
from lipscope.report.settings import report_data
from lipscope.runs.run import load_run
from lipscope.spectral.solvers import Auto
from lipscope.studies.sensitivity import NOISE_DRAWS, Perturbation, correlations, damage_interval
from model_families import FAMILIES, enlarge

IDS = torch.tensor([[3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9, 3]])
ONE = IDS[:1]
GPT2 = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}


def gpt2(**changes) -> nn.Module:
    torch.manual_seed(0)
    return enlarge(tf.GPT2LMHeadModel(tf.GPT2Config(**GPT2 | changes)))


def llama() -> nn.Module:
    torch.manual_seed(0)
    return enlarge(tf.LlamaForCausalLM(FAMILIES["llama"]().config))


def bert(head=tf.BertForMaskedLM, **changes) -> nn.Module:
    config = FAMILIES["bert"]().config
    config.update(changes)
    torch.manual_seed(0)
    return enlarge(head(config))


def dense_damage(model, ids, add, delta: Tensor) -> float:
    """½ δᵀFδ per position from a dense Jacobian of the logits, with nothing of lipscope in it.

    ``add`` puts a tensor into the model's pass with a hook, and returns the hook.
    """
    for p in model.parameters():
        p.requires_grad_(False)
    model.config._attn_implementation = "eager"

    def logits(d: Tensor) -> Tensor:
        hook = add(d)
        try:
            with double_throughout(torch.float64):  # Llama's own code rounds to float32 on the way
                return model(input_ids=ids).logits
        finally:
            hook.remove()

    zero = torch.zeros_like(delta)
    p = logits(zero).softmax(-1).reshape(-1, model.config.vocab_size)
    J = torch.autograd.functional.jacobian(logits, zero).reshape(*p.shape, -1)
    moved = J @ delta.reshape(-1)
    quadratic = (p * moved.square()).sum(-1) - (p * moved).sum(-1).square()
    return 0.5 * float(quadratic.mean())


def recorded(model, module: nn.Module, ids, before: bool = False) -> Tensor:
    """What a module puts out, or takes in."""
    seen = []
    hook = module.register_forward_hook(lambda _, args, output: seen.append(args[0] if before else output))
    with torch.no_grad(), double_throughout(torch.float64):
        model(input_ids=ids)
    hook.remove()
    return seen[0]


def adding_to_output(module: nn.Module, place: slice = slice(None)):
    def add(d: Tensor):
        def hook(_, __, output):
            grown = torch.zeros_like(output)
            grown[..., place] = d
            return output + grown

        return module.register_forward_hook(hook)

    return add


def adding_to_input(module: nn.Module):
    def add(d: Tensor):
        return module.register_forward_pre_hook(lambda _, args: (args[0] + d, *args[1:]))

    return add


class Fragile(nn.Module):
    """Finite as long as nothing moves below ``floor``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.floor = FAMILIES["torch_post_norm"](), -1e9

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) - self.floor).log()


def rounding_error(x: Tensor) -> Tensor:
    return x.bfloat16().double() - x


@pytest.mark.parametrize("place", ["k", "v", "kv", "output", "input"])
def test_the_expected_damage_is_that_of_a_dense_fisher_matrix(place):
    model = gpt2()
    found = lipscope.sensitivity(model, input_ids=ONE, perturb=f"bf16-{place}", probes=None)
    assert found.backward_passes == 6 * 50
    for row, block in zip(found.to_rows(), model.transformer.h, strict=True):
        delta, add = error_at(model, block.attn, place)
        assert row["predicted"] == pytest.approx(dense_damage(model, ONE, add, delta), rel=1e-9)
        assert row["shift"] == pytest.approx(float(delta.norm()), rel=1e-9)


def error_at(model, attention, place):
    """The error of rounding at a place of GPT-2, and how it is added there by hand."""
    joined = recorded(model, attention.c_attn, ONE)
    where = {"k": slice(16, 32), "v": slice(32, 48), "kv": slice(16, 48)}
    if place in where:
        delta, add = rounding_error(joined)[..., where[place]], adding_to_output(attention.c_attn, where[place])
    elif place == "output":
        delta, add = rounding_error(recorded(model, attention.c_proj, ONE)), adding_to_output(attention.c_proj)
    else:
        delta = rounding_error(recorded(model, attention.c_attn, ONE, before=True))
        add = adding_to_input(attention.c_attn)
    return delta, add


def test_grouped_values_behind_rotary_embeddings_and_a_masked_model():
    model = llama()
    values = model.model.layers[0].self_attn.v_proj
    expected = dense_damage(model, ONE, adding_to_output(values), rounding_error(recorded(model, values, ONE)))
    rows = lipscope.sensitivity(model, input_ids=ONE, perturb="bf16-v", probes=None).to_rows()
    assert rows[0]["predicted"] == pytest.approx(expected, rel=1e-9)
    model = bert()
    keys = model.bert.encoder.layer[1].attention.self.key
    expected = dense_damage(model, ONE, adding_to_output(keys), rounding_error(recorded(model, keys, ONE)))
    rows = lipscope.sensitivity(model, input_ids=ONE, perturb="bf16-k", probes=None).to_rows()
    assert rows[1]["predicted"] == pytest.approx(expected, rel=1e-9)


def test_single_heads():
    model = llama()
    values = model.model.layers[1].self_attn.v_proj
    delta = rounding_error(recorded(model, values, ONE))
    rows = lipscope.sensitivity(model, input_ids=ONE, perturb="bf16-v", probes=None, per_head=True, verify=True).to_rows()
    assert [(row["layer"], row["head"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for row, place in zip(rows[2:], (slice(0, 4), slice(4, 8)), strict=True):
        expected = dense_damage(model, ONE, adding_to_output(values, place), delta[..., place])
        assert row["predicted"] == pytest.approx(expected, rel=1e-9)
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.05)
    # σ of a key head is the largest of the query heads that share it.
    sigmas = lipscope.load(model).record(input_ids=ONE)[0].sigma("head").estimate[0].reshape(2, 2).amax(1)
    assert [row["estimate"] for row in rows[:2]] == pytest.approx(sigmas.tolist(), rel=2e-3)


def test_noise_is_a_trace():
    model = gpt2()
    projection = model.transformer.h[1].attn.c_proj
    x = recorded(model, projection, ONE)
    variance = (0.01 * float(x.norm())) ** 2 / x.numel()
    rows = lipscope.sensitivity(model, input_ids=ONE, perturb="noise:0.01", probes=None, verify=True).to_rows()
    assert rows[1]["predicted"] == pytest.approx(dense_trace(model, projection, x) * variance, rel=1e-9)
    assert rows[1]["size"] == pytest.approx(0.01, rel=0.3)  # of one draw
    assert rows[1]["measured"] == pytest.approx(rows[1]["predicted"], rel=0.7)  # the mean over 8 draws


def dense_trace(model, module, x: Tensor) -> float:
    def logits(d: Tensor) -> Tensor:
        hook = adding_to_output(module)(d)
        try:
            return model(input_ids=ONE).logits
        finally:
            hook.remove()

    p = logits(torch.zeros_like(x)).softmax(-1).reshape(-1, 50)
    J = torch.autograd.functional.jacobian(logits, torch.zeros_like(x)).reshape(*p.shape, -1)
    quadratic = (p[..., None] * J.square()).sum(1) - (p[..., None] * J).sum(1).square()
    return 0.5 * float(quadratic.detach().sum()) / len(p)


def test_the_worst_direction_is_that_of_sigma():
    model = gpt2()
    layer = lipscope.load(model).record(input_ids=ONE)[1]
    right = layer.sigma(solver=Auto(vectors=True)).right
    delta = right[0, 0].reshape(1, 6, 16) * 0.001 * layer.tokens().norm()
    expected = dense_damage(model, ONE, adding_to_input(model.transformer.h[1].attn.c_attn), delta)
    row = lipscope.sensitivity(model, input_ids=ONE, perturb="worst:0.001", probes=None, verify=True).to_rows()[1]
    assert row["predicted"] == pytest.approx(expected, rel=1e-6)
    assert row["measured"] == pytest.approx(expected, rel=0.05)
    assert row["size"] == pytest.approx(0.001)


def test_probes_estimate_it_within_their_interval():
    exact = lipscope.sensitivity(gpt2(), input_ids=IDS[:, :3], perturb=["bf16-kv", "noise:0.001-v"], probes=None)
    found = lipscope.sensitivity(gpt2(), input_ids=IDS[:, :3], perturb=["bf16-kv", "noise:0.001-v"], probes=400, verify=True)
    for truth, row in zip(exact.to_rows(), found.to_rows(), strict=True):
        assert row["predicted"] == pytest.approx(truth["predicted"], rel=5 * math.sqrt(2 / 400))
        assert row["predicted_low"] < row["predicted"] < row["predicted_high"]
        assert row["predicted_low"] < row["measured"] < row["predicted_high"]
        assert truth["predicted_low"] == truth["predicted"] == truth["predicted_high"]


@pytest.mark.parametrize("shares", [[1.0], [0.4, 0.3, 0.2, 0.1]])
@pytest.mark.parametrize("probes", [4, 16])
def test_intervals_cover_as_often_as_they_say(shares, probes):
    generator = torch.Generator().manual_seed(0)
    trials = torch.randn(2000, probes, len(shares), generator=generator, dtype=torch.float64).square() * torch.tensor(shares)
    ends = [damage_interval(trial)[1:] for trial in trials]
    covered = sum(low <= 1.0 <= high for low, high in ends)
    assert 0.93 <= covered / 2000 <= 0.97


@pytest.mark.parametrize("rank", [1, 10, 100])
def test_the_mean_over_draws_of_noise_lies_where_it_is_said_to(rank):
    """δᵀFδ with F a projection: the interval of the expectation alone covered half of the means over eight draws."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(1000, 48 + NOISE_DRAWS, rank, generator=generator, dtype=torch.float64).square().sum(-1)
    ends = [damage_interval(trial[:48, None], draws=NOISE_DRAWS)[1:] for trial in made]
    measured = made[:, 48:].mean(1).tolist()
    covered = sum(low <= value <= high for (low, high), value in zip(ends, measured, strict=True))
    assert 0.92 <= covered / 1000 <= 0.98


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "bert", "gemma2", "gpt_oss", "t5_encoder", "albert", "vit", "torch_post_norm",
               "torch_pre_norm", "gpt_neo"],
)  # fmt: skip
def test_prediction_and_measurement_agree_in_every_kind_of_layer(family):
    model = FAMILIES[family]()
    handle = lipscope.load(model)
    given = probe_inputs(handle.model)
    if family != "torch_pre_norm":  # its tokens are (n, B, d)
        given = {name: value[:1] for name, value in given.items()}
    through_seam = handle.layers[0].through_seam
    names = ["bf16-output", "bf16-input", "bf16-weights", *(["bf16-k", "bf16-v"] if through_seam else [])]
    found = lipscope.sensitivity(handle, input_ids=given, perturb=names, probes=None, damage="hidden", verify=True)
    assert len(found.rows) == len(names) * len(handle.layers)
    for row in found.to_rows():
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.1), (row["kind"], row["layer"])
        assert row["measured"] > 0
    assert "last hidden state" in found.damage


def test_the_hidden_state_is_measured_before_the_head():
    whole = gpt2()
    names = {"perturb": "bf16", "damage": "hidden", "probes": 3, "verify": True}
    rows, alone = (lipscope.sensitivity(model, input_ids=IDS, **names).to_rows() for model in (whole, whole.transformer))
    assert [row["measured"] for row in rows] == [row["measured"] for row in alone]
    # A head without one distribution per position does not count either.
    answers = bert(tf.BertForQuestionAnswering)
    found = lipscope.sensitivity(answers, input_ids=IDS, **names | {"damage": None})
    assert "last hidden state" in found.damage
    inner = lipscope.sensitivity(answers.bert, input_ids=IDS, **names)
    assert [row["measured"] for row in found.to_rows()] == [row["measured"] for row in inner.to_rows()]


def test_the_model_is_left_as_it_was():
    model = gpt2().requires_grad_(True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    lipscope.sensitivity(model, input_ids=IDS, perturb=["int8-weights", "fp8-kv", "bf16"], verify=True, probes=2)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad and isinstance(p, nn.Parameter) for p in model.parameters())
    assert model.config._attn_implementation == implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.slow
def test_gpt2_mini_agrees_on_text():
    names = ["fp8-k", "int8-v", "bf16-weights"]
    found = lipscope.sensitivity("gpt2-mini", "alice", perturb=names, n=32, inputs=4, probes=96, verify=True)
    small = [row for row in found.to_rows() if row["measured"] < 1e-3]
    close = [row for row in small if abs(row["predicted"] - row["measured"]) < 0.25 * row["measured"]]
    assert len(close) >= 0.9 * len(small) > 0


def test_classes_instead_of_tokens(tmp_path):
    model = bert(tf.BertForSequenceClassification, num_labels=3).float()
    model.save_pretrained(tmp_path / "saved")
    found = lipscope.sensitivity(tmp_path / "saved", input_ids=IDS, perturb="bf16", verify=True, probes=None)
    assert found.damage == "nats of KL per position"
    assert found.backward_passes == 2 * 3
    assert all(row["measured"] == pytest.approx(row["predicted"], rel=0.05) for row in found.to_rows())


def test_labels_that_do_not_exclude_each_other_are_no_distribution():
    model = bert(tf.BertForSequenceClassification, num_labels=3, problem_type="multi_label_classification")
    found = lipscope.sensitivity(model, input_ids=IDS, perturb="bf16", probes=3)
    assert "last hidden state" in found.damage
    with pytest.raises(ValueError, match="no logits that are one distribution"):
        lipscope.sensitivity(model, input_ids=IDS, perturb="bf16", damage="kl")


@pytest.mark.parametrize("damage", ["kl", "hidden"])
def test_padding_suffers_no_damage(damage):
    model = bert()
    padded = torch.cat([ONE, torch.zeros(1, 4, dtype=torch.long)], 1)
    given = {"input_ids": padded, "attention_mask": (torch.arange(10) < 6).long()[None]}
    how = {"perturb": ["bf16-kv", "bf16-weights"], "damage": damage, "probes": None, "verify": True}
    alone, among = (lipscope.sensitivity(model, input_ids=ids, **how).to_rows() for ids in (ONE, given))
    for one, other in zip(alone, among, strict=True):
        assert other["predicted"] == pytest.approx(one["predicted"], rel=1e-6)
        assert other["measured"] == pytest.approx(one["measured"], rel=1e-6)


def test_a_layer_that_puts_out_nothing_suffers_nothing():
    model = gpt2()
    nn.init.zeros_(model.transformer.h[0].attn.c_proj.weight)
    nn.init.zeros_(model.transformer.h[0].attn.c_proj.bias)
    rows = lipscope.sensitivity(model, input_ids=ONE, perturb=["bf16", "noise:0.01"], verify=True, probes=2).to_rows()
    assert [(row["size"], row["predicted"], row["measured"]) for row in rows[::2]] == [(0, 0, 0)] * 2
    assert all(row["size"] > 0 for row in rows[1::2])


def test_heads_of_checkpoints(tmp_path):
    gpt2().save_pretrained(tmp_path / "head")
    assert type(load_with_head(str(tmp_path / "head")).model) is tf.GPT2LMHeadModel
    gpt2().transformer.save_pretrained(tmp_path / "none")
    backbone = load_with_head(str(tmp_path / "none")).model
    assert type(backbone) is tf.GPT2Model
    whole = with_tied_head(backbone)
    assert whole.lm_head.weight is backbone.wte.weight
    assert torch.equal(whole(IDS).logits, gpt2()(IDS).logits.to(backbone.dtype)) or backbone.dtype != torch.float64
    assert with_tied_head(llama().model) is not None
    untied = llama()
    assert with_tied_head(untied.model) is untied.model


def test_correlations():
    rows = [{"estimate": 4.0 - i, "shift": 1.0, "predicted": i**2, "measured": i + 1.0, "max_logit": None} for i in range(4)]
    found = correlations([rows, rows])
    assert found["estimate"][0] == pytest.approx(-1)
    assert found["predicted"][0] == pytest.approx(1)
    assert not {"max_logit", "typical"} & set(found)
    swapped = [rows[i] | {"measured": m} for i, m in enumerate((1.0, 3.0, 2.0, 4.0))]
    value, low, high = correlations([swapped])["predicted"]
    assert value == pytest.approx(0.8)
    assert low < value <= high


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"perturb": "fp4-kv"}, "perturb must be fp8"),
        ({"perturb": "noise:2"}, "0 < S < 1"),
        ({"perturb": "noise:0.00-v"}, "0 < S < 1"),
        ({"perturb": []}, "perturb must name a perturbation"),
        ({"perturb": "worst:0.1-kv"}, "-input alone"),
        ({"damage": "loss"}, "damage must be kl or hidden"),
        ({"probes": 1}, "probes must be at least 2"),
        ({"perturb": "bf16", "per_head": True}, "heads are already mixed"),
        ({"input_ids": IDS + 100}, "input_ids must lie between"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        lipscope.sensitivity(gpt2(), **{"input_ids": IDS} | options)


def test_what_cannot_be_answered_says_so_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="BertModel has no logits"):
        lipscope.sensitivity(FAMILIES["bert"](), input_ids=IDS, damage="kl", perturb="bf16")
    with pytest.raises(ValueError, match="keeps its own attention and does not show keys and values"):
        lipscope.sensitivity(FAMILIES["gpt_neo"](), input_ids=IDS)
    rounded = gpt2().bfloat16().double()
    with pytest.raises(ValueError, match="bf16-weights changes nothing"):
        lipscope.sensitivity(rounded, input_ids=IDS, perturb="bf16-weights")
    fragile = Fragile()
    handle, tokens = lipscope.load(fragile), torch.randn(1, 5, 16, dtype=torch.float64)
    fragile.floor = float(fragile.layer(tokens).detach().min()) - 1e-12
    with pytest.raises(FloatingPointError, match=r"fp8-input in layers \[0\] makes the outputs infinite or NaN"):
        lipscope.sensitivity(handle, input_ids={"tokens": tokens}, perturb="fp8-input", verify=True)
    (tmp_path / "short.txt").write_text("a few words", encoding="utf-8")
    with pytest.raises(ValueError, match="the text has"):
        lipscope.sensitivity("gpt2-mini", tmp_path / "short.txt", n=64)
    found = lipscope.sensitivity(gpt2(), input_ids=IDS, perturb="fp8-kv")
    with pytest.raises(ValueError, match="only after verification"):
        found.vllm()
    with pytest.raises(ValueError, match="no perturbation 'int8-kv'"):
        found.matter("int8-kv")


def test_only_a_verified_choice_is_emitted():
    found = lipscope.sensitivity(gpt2(), input_ids=IDS, perturb="fp8-kv", verify=True, probes=64)
    spared = found.matter()
    left = found.together["fp8-kv"]
    assert left["all"] > left["spared"] > 0
    worse = lipscope.studies.sensitivity.Sensitivity(
        **vars(found) | {"together": {"fp8-kv": {"all": 1.0, "spared": 0.9, "spared_by_sigma": 0.1}}}
    )
    with pytest.raises(ValueError, match="verification does not support it"):
        worse.vllm()
    better = lipscope.studies.sensitivity.Sensitivity(**vars(found) | {"together": {"fp8-kv": {"all": 1.0, "spared": 0.1}}})
    assert better.vllm() == f"--kv-cache-dtype fp8_e4m3 --kv-cache-dtype-skip-layers {spared[0]}"


def test_layers_of_a_hybrid_have_the_numbers_of_their_blocks(tmp_path):
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    config = tf.Lfm2Config(hidden_size=16, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
                           num_hidden_layers=4, layer_types=kinds)  # fmt: skip
    torch.manual_seed(0)
    model = enlarge(tf.Lfm2ForCausalLM(config))
    found = lipscope.sensitivity(model, input_ids=ONE, perturb="int8-kv", probes=None, verify=True)
    assert [row["layer"] for row in found.to_rows()] == [1, 3]
    for row in found.to_rows():
        assert row["measured"] == pytest.approx(row["predicted"], rel=0.2)
    assert found.vllm() == f"--kv-cache-dtype int8_per_token_head --kv-cache-dtype-skip-layers {found.matter()[0]}"
    model.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="load it whole"):
        lipscope.sensitivity(lipscope.load(tmp_path / "saved", stream=True), input_ids=ONE)


def test_rounding():
    x = torch.tensor([[1.0, -127.0, 0.6], [0.0, 0.0, 0.0]])
    assert torch.allclose(Perturbation.parse("int8").rounded(x), torch.tensor([[1.0, -127.0, 1.0], [0.0, 0.0, 0.0]]))
    assert Perturbation.parse("fp8").rounded(torch.tensor([1.05, 300.0, -1e6])).tolist() == [1.0, 288.0, -448.0]
    assert Perturbation.parse("e5m2-v").rounded(torch.tensor([1.1])).tolist() == [1.0]
    assert Perturbation.parse("noise:1e-3").size == 0.001


def test_the_report_says_what_a_perturbation_does_to_the_outputs(tmp_path):
    found = lipscope.sensitivity(gpt2(), input_ids=ONE, perturb=["bf16-k", "bf16"], verify=True, probes=4)
    page = Page(report_data([load_run(lipscope.Run(found.rows))]))
    captions = [page.charts[f"{k}-damage"]["caption"] for k in range(2)]
    for name, caption in zip(("bf16", "bf16-k"), captions, strict=True):
        layers = sorted(found.matter(name))
        assert f"Half of the predicted damage of {name} is in {len(layers)} of 2 layers ({layers[0]}" in caption
        rows = found.to_rows(name)
        inside = sum(row["predicted_low"] <= row["measured"] <= row["predicted_high"] for row in rows)
        assert f"interval of the prediction in {inside} of 2 places" in caption
        assert f"Fisher prediction {found.correlations(name)['predicted'][0]:.2f} [" in caption
    # Rows of others may lack anything.
    lacking = [{k: v for k, v in row.items() if k not in ("shift", "measured", "damage")} for row in found.rows]
    assert "Rank" not in Page(report_data([load_run(lipscope.Run(lacking))])).charts["0-damage"]["caption"]
    odd = [row | {"shift": None, "predicted": 0.0, "measured": float("inf")} for row in found.rows]
    assert "0-damage" in Page(report_data([load_run(lipscope.Run(odd))])).charts
    plain = [row | {"predicted_low": None} for row in found.rows]
    assert "0-damage" not in Page(report_data([load_run(lipscope.Run(plain))])).charts


def test_command(tmp_path):
    run = CliRunner().invoke
    command = ["sensitivity", "gpt2-mini", "--text", "alice", "--n", "16", "--inputs", "2", "--probes", "4"]
    shown = run(app, [*command, "--verify"], env={"COLUMNS": "140"})
    assert shown.exit_code == 0, shown.output
    for words in (
        "4 backward passes for all layers",
        "nats of KL per position",
        "Rank correlation with it, and its 95 % interval: σ -",
        "Half of the predicted damage of fp8-kv is in",
    ):
        assert words in " ".join(shown.output.split())
    written = run(app, [*command, "--perturb", "bf16-k,noise:0.01", "--json", "--out", str(tmp_path / "rows")])
    found = json.loads(written.stdout)
    assert found == json.loads((tmp_path / "rows/sensitivity.json").read_text())
    assert found["backward_passes"] == 4
    assert set(found["perturbations"]) == {"bf16-k", "noise:0.01"}
    rows = found["rows"]
    assert {row["kind"] for row in rows} == {"bf16-k", "noise:0.01"}
    assert rows == json.loads((tmp_path / "rows/rows.json").read_text())
    assert run(app, ["report", str(tmp_path / "rows"), "--out", str(tmp_path / "page.html")]).exit_code == 0
    assert "noise:0.01" in (tmp_path / "page.html").read_text()
    both = json.loads(run(app, [*command, "--verify", "--emit", "vllm", "--json"]).stdout)
    assert both["vllm"].startswith("--kv-cache-dtype fp8_e4m3")
    about = both["perturbations"]["fp8-kv"]
    assert about["matter"] == [int(layer) for layer in both["vllm"].split("layers ")[1].split()]
    assert set(about["correlations"]) == {"estimate", "sigma_shift", "typical", "stable_rank", "max_logit", "predicted"}
    assert about["together"]["spared"] < about["together"]["all"]
    tf.T5ForConditionalGeneration(FAMILIES["t5_encoder"]().config).save_pretrained(tmp_path / "t5")
    refused = run(app, ["sensitivity", str(tmp_path / "t5"), "--perturb", "bf16"])
    assert "--part encoder" in " ".join(refused.output.split())
    asked = run(app, ["sensitivity", str(tmp_path / "t5"), "--perturb", "bf16", "--part", "encoder"])
    assert "with --tokenizer NAME_OR_DIR" in " ".join(asked.output.split())
    gpt2(vocab_size=8192).save_pretrained(tmp_path / "bare")
    words = Path(lipscope.models.__file__).parent / "data/gpt2-mini"
    given = run(app, ["sensitivity", str(tmp_path / "bare"), "--n", "8", "--probes", "2", "--tokenizer", str(words)])
    assert "half of" in given.output.lower()
    emitted = run(app, [*command, "--verify", "--emit", "vllm"])
    assert "--kv-cache-dtype fp8_e4m3 --kv-cache-dtype-skip-layers" in emitted.output
    assert "verified on 32 tokens of alice, and on nothing else" in " ".join(emitted.output.split())
    assert "only after verification" in run(app, [*command, "--emit", "vllm"]).output
    assert "--emit must be vllm" in run(app, [*command, "--emit", "ollama"]).output
