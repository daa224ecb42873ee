"""Memory that is planned: what a run is expected to take, what is done when that is too much, and the same numbers then."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import save_file

import cases
import lipscope
from command import run
from largest_tensor import LargestTensor
from lipscope.attention.operators import AttentionOperator
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import SMALL, TiledLinearisation, Tiling, using_tiling
from lipscope.measure import sigma as certifying
from lipscope.measure.memory import TYPICAL_PAIRS, TYPICAL_VECTORS, plan_memory
from lipscope.models.memory import HEAP, plan_layers, recorded_bytes
from lipscope.models.model import Model
from lipscope.spectral.bidiagonalisation import Bidiagonalisation
from model_families import FAMILIES

N, D, H = 700, 24, 4


@pytest.fixture(scope="module")
def layer() -> lipscope.Attention:
    weights = [cases.random(D, D, seed=s) / D**0.5 for s in range(4)]
    return lipscope.Attention(*weights, heads=H, mask="causal&pad-right:0,5").to(torch.float32)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return cases.random(2, N, D, seed=9).float()


@pytest.mark.parametrize("scope", ["attention", "head"])
def test_a_limit_changes_the_way_and_not_the_answer(layer, tokens, scope):
    free = plan_memory(layer, N, inputs=2, scope=scope)
    assert not free.alone
    options = {"scope": scope, "certificate": False, "solver": lipscope.GolubKahan(rtol=1e-5)}
    expected = lipscope.local_lipschitz(layer, tokens, **options)
    ways = set()
    for share in (1.1, 0.6, 0.3, 0.15):
        limit = int(share * free.total)
        plan = plan_memory(layer, N, inputs=2, scope=scope, limit=limit)
        assert plan.total <= limit
        ways.add((plan.alone, plan.tiling, plan.room))
        found = lipscope.local_lipschitz(layer, tokens, memory=limit, **options)
        torch.testing.assert_close(found.estimate, expected.estimate, rtol=3e-5, atol=0)
        assert bool((found.lower <= expected.upper).all() & (expected.lower <= found.upper).all())
        assert found.mask == expected.mask
        assert found.status == expected.status
    assert len(ways) == 4
    assert (True, SMALL) in {way[:2] for way in ways}


def test_what_is_planned_without_matrices_is_computed_without(layer, tokens):
    with LargestTensor(N) as seen:
        lipscope.local_lipschitz(layer, tokens, memory="12MiB", certificate=False)
    assert not seen.matrices


def test_too_little_is_refused_with_what_is_needed(layer, tokens):
    with pytest.raises(MemoryError, match=r"n = 700 tokens need at least [\d.]+ MiB above the weights.* limited to 1 MiB"):
        lipscope.local_lipschitz(layer, tokens, memory="1MiB")
    with pytest.raises(ValueError, match="memory must be a size such as 4GiB"):
        lipscope.local_lipschitz(layer, tokens, memory="much")
    with pytest.raises(ValueError, match="memory is planned for Attention layers only"):
        lipscope.local_lipschitz(torch.tanh, tokens, memory="1GiB")
    with pytest.raises(ValueError, match="Auto or GolubKahan, got Dense"):
        lipscope.local_lipschitz(layer, tokens, memory="1GiB", solver=lipscope.Dense())


def test_sizes_that_are_none_are_refused_at_the_door(layer, tokens):
    for size in (-5, 0, "0GiB"):
        with pytest.raises(ValueError, match="memory must be at least 1 byte"):
            lipscope.local_lipschitz(layer, tokens, memory=size)
    with pytest.raises(ValueError, match=r"memory must be a whole number of bytes, got 1000000000\.5"):
        lipscope.local_lipschitz(layer, tokens, memory=1e9 + 0.5)
    found = lipscope.local_lipschitz(layer, tokens, memory=4e9, certificate=False)
    assert torch.equal(found.estimate, lipscope.local_lipschitz(layer, tokens, certificate=False).estimate)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_what_is_kept_is_what_was_planned(softcap):
    """The exponentials of all tiles, and those with the slope of the soft-cap beside them."""
    weights = [cases.random(D, D, seed=s).float() / D**0.5 for s in range(4)]
    subject = lipscope.Attention(*weights, heads=H, mask="causal", softcap=softcap)
    plan = plan_memory(subject, N)
    core = AttentionOperator.at(subject, cases.random(1, N, D, seed=9).float(), tiled=True).core
    kept = {t.data_ptr(): t.numel() * t.element_size() for row in core.kept for pair in row for t in pair}
    assert sum(kept.values()) == plan.matrices - plan.tiling.scratch(1, 4)
    assert core.scratch * 4 == sum(kept.values())


@pytest.mark.parametrize(("n", "scope"), [(40, "attention"), (50, "attention"), (40, "head"), (400, "head")])
def test_bases_are_planned_as_the_solver_keeps_them(n, scope):
    """Both bases of small problems, the right one of large ones: compared with the bases of a solve of as many steps."""
    weights = [cases.random(D, D, seed=s).float() / D**0.5 for s in range(4)]
    subject = lipscope.Attention(*weights, heads=H, mask="causal")
    operator = subject.operator(cases.random(2, n, D, seed=1).float(), scope)
    run = Bidiagonalisation(lipscope.GolubKahan(rtol=1e-30, interval=1e-30), operator)
    M, N_ = operator.shape
    kept = operator.batch * 4 * (N_ + (0 if run.one_sided else M))
    assert run.one_sided == (min(M + 1, N_) > 1024)
    planned = plan_memory(subject, n, inputs=2, scope=scope).bases
    assert planned == kept * (TYPICAL_VECTORS if run.one_sided else TYPICAL_PAIRS + 1)


def test_the_command_says_what_it_will_take(tmp_path):
    weights = {name: torch.eye(8) for name in ("q", "k", "v", "out")}
    save_file(weights, tmp_path / "layer.safetensors")
    save_file({"x": cases.random(64, 8, seed=0).float()}, tmp_path / "tokens.safetensors")
    arguments = ["measure", tmp_path / "layer.safetensors", "--tokens", tmp_path / "tokens.safetensors", "--json"]
    limited = run(*arguments, "--memory", "1GiB")
    assert limited.returncode == 0, limited.stderr
    assert "n = 64: expected peak" in limited.stderr
    free = run(*arguments)
    assert "expected peak" not in free.stderr
    assert json.loads(limited.stdout)[0]["estimate"] == pytest.approx(json.loads(free.stdout)[0]["estimate"], rel=1e-6)
    refused = run(*arguments, "--memory", "2KiB")
    assert refused.returncode == 2
    assert "lipscope: n = 64 tokens need at least" in refused.stderr


@pytest.fixture(scope="module")
def alternating() -> Model:
    """Gemma-2: a layer with a sliding window, then one without; soft-caps."""
    torch.manual_seed(0)
    config = tf.Gemma2Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=16,
        vocab_size=100, sliding_window=128, max_position_embeddings=8192,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return lipscope.load(tf.Gemma2ForCausalLM(config).eval())


@pytest.mark.parametrize("layers", [[0, 1], [1, 0], [0]])
def test_one_plan_holds_for_layers_of_several_kinds(alternating, layers):
    """Whatever the limit, the tiling in force keeps every layer within it, also those that are only recorded."""
    n, tilings = 2048, set()
    for limit in range(20 << 20, 300 << 20, 20 << 20):
        try:
            plan = plan_layers(alternating, n, layers, memory=limit)
        except MemoryError:
            continue
        tilings.add(plan.tiling)
        assert plan.total <= limit
        with using_tiling(plan.tiling):
            each = [plan_layers(alternating, n, [layer]) for layer in (0, 1)]
        for layer in layers:
            one = each[layer]  # with what the heap keeps where there is no limit
            assert one.matrices + one.tokens - HEAP + min(one.bases, plan.room) <= limit, (limit >> 20, layer)
        assert all(one.matrices <= limit for one in each)
    assert len(tilings) >= 3


def test_the_tiling_of_alternating_layers_is_that_of_the_larger(alternating):
    """Under a limit that fits the window's kept tiles alone, the layer without a window keeps nothing either."""
    layers = [alternating.probe_recording[i].attention.with_mask(alternating.layer(i).mask) for i in (0, 1)]
    free = [plan_memory(layer, 2048).total + recorded_bytes(alternating, 2048) for layer in layers]
    limit = sum(free) // 2
    assert free[0] < limit < free[1]
    plan = plan_layers(alternating, 2048, [0, 1], memory=limit)
    ids = torch.randint(3, 100, (1, 2048), generator=torch.Generator().manual_seed(1))
    with using_tiling(plan.tiling):
        recording = alternating.record(alternating.token_inputs(input_ids=ids))
        kept = [recording[layer].operator().core.kept for layer in (0, 1)]
    assert kept == [None, None]


def test_a_relative_bias_is_planned_for_the_tokens_that_are_asked_for():
    handle = lipscope.load(FAMILIES["t5_encoder"]())
    for n in (32, 64):
        for limit in (None, "1GiB"):
            plan = plan_layers(handle, n, [0, 1], memory=limit)
            assert plan.matrices >= 4 * n * n * 8  # heads, numbers of float64
    with pytest.raises(MemoryError, match="limited to"):
        plan_layers(handle, 512, [0, 1], memory=4 * 512 * 512 * 8)


def test_a_limit_binds_the_certificates_of_scans(monkeypatch):
    """Strips whose height follows from the limit, less what the recorded pass takes; the same bounds."""
    handle = lipscope.load("gpt2-mini")
    asked = []

    def watched(layer, n, heads, memory):
        asked.append(memory)
        return 48

    monkeypatch.setattr(certifying, "height_within", watched)
    options = {"layers": [0], "lengths": [128], "inputs": 1, "certificate": True}
    free = lipscope.scan(handle, "python-docs", **options)
    assert not asked
    tight = lipscope.scan(handle, "python-docs", memory="12MiB", **options)
    assert asked == [(12 << 20) - recorded_bytes(handle, 128)]
    assert tight.rows[0]["certified"] == pytest.approx(free.rows[0]["certified"], rel=1e-9)
    packed = lipscope.scan(handle, ["some words of a text " * 10] * 20, memory="12MiB", pack=True, **options)
    assert len(asked) == 1 + len(packed.rows)


def test_scans_are_planned_before_they_start():
    handle = lipscope.load("gpt2-mini")
    free = plan_layers(handle, 128, [0], inputs=4)
    deep = plan_layers(handle, 128, [0], inputs=4, scope="model")
    assert deep.tokens > free.tokens
    limit = free.total // 2
    tight = plan_layers(handle, 128, [0, 1], inputs=4, memory=limit)
    assert tight.alone
    assert tight.total <= limit
    options = {"layers": [0], "lengths": [128], "inputs": 4, "certificate": False}
    expected = lipscope.scan(handle, "python-docs", **options)
    limited = lipscope.scan(handle, "python-docs", memory=limit, **options)
    for one, other in zip(expected.rows, limited.rows, strict=True):
        assert other["estimate"] == pytest.approx(one["estimate"], rel=2e-4)
        assert (other["input"], other["n"]) == (one["input"], one["n"])
    with pytest.raises(MemoryError, match="n = 128 tokens need at least"):
        lipscope.scan(handle, "python-docs", memory=1000, **options)


# Small tiles, so that little of what is planned is their scratch.
TILES = {"tile": (128, 256), "tile_bytes": 1 << 20}


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
@pytest.mark.parametrize("what", ["layers", "scans"])
def test_measured_peaks_stay_within_the_plan_and_near_it(what):
    """Kept exponentials of one input, of several and of padded ones, with a soft-cap, rebuilt ones, and n×n matrices; then
    several values and vectors, under a limit that leaves as much as is planned or less. Then scans."""
    causal, full = {"heads": 8, "mask": "causal"}, {"heads": 8, "mask": "full"}
    problems = [
        {"layer": causal, "width": 64, "tiling": TILES},
        {"layer": causal, "width": 32, "inputs": 4, "tiling": TILES},
        {"layer": causal | {"mask": "causal&pad-left:0,200"}, "width": 32, "inputs": 2, "tiling": TILES},
        {"layer": causal | {"softcap": 5.0}, "width": 64, "tiling": TILES},
        {"layer": causal | {"kv_heads": 1}, "width": 128, "tiling": TILES},
        {"layer": causal | {"kv_heads": 1}, "width": 128, "tiling": TILES | {"keep": 0}},
        {"layer": full, "width": 64},
        {"layer": full | {"softcap": 5.0}, "width": 64},
        # Lengths at which the heap keeps holes between the matrices, and a layer that is wider than its input is long.
        {"layer": full, "width": 64, "tokens": 768},
        {"layer": full | {"softcap": 5.0}, "width": 64, "tokens": 768},
        {"layer": full, "width": 512, "tokens": 128},
        {"layer": causal, "width": 512, "tokens": 128, "share": 0.8},
    ]
    values = [({"k": 1, "vectors": True}, (0.7, 1.0)), ({"k": 2}, (0.9,)), ({"k": 6, "vectors": True}, (0.7, 1.0))]
    limited = [
        {"layer": causal, "width": 128, "tokens": 384, "solver": solver, "share": share}
        for solver, shares in values
        for share in shares
    ]
    # Mostly copies of tokens and projections: half of those that are counted would be too few.
    wide = {"layer": full | {"heads": 2}, "width": 256, "tokens": 320, "share": 0.7}
    # Certificates keep to the limit in strips.
    certified = [
        {"layer": {"heads": 8, "mask": mask}, "width": 128, "tokens": tokens, "share": 0.6, "certificate": True}
        for mask, tokens in (("causal", 512), ("full", 512), ("full", 768))
    ]
    # Scans: products in closed form, head by head, and by autograd, which keeps the activations of a block.
    scans = [{"scope": scope, "inputs": 2} for scope in ("head", "block")]
    # Short ones, whose peaks differ most from run to run.
    scans += 2 * [{"scope": "attention", "inputs": 2, "tokens": 256}]
    chosen = scans if what == "scans" else (*problems, *limited, wide, *certified)
    cases = [{"tokens": 512} | problem for problem in chosen]
    strange = [
        (peak >> 10, planned >> 10, case)
        for case, (peak, planned) in zip(cases, measured(cases), strict=True)
        if not 0.4 * planned < peak < planned
    ]
    assert not strange


def measured(cases: list[dict[str, object]]) -> list[list[int]]:
    """Peak and plan of each case, in bytes, measured by a program of its own, whose heap is that of any user."""
    command = [sys.executable, Path(__file__).with_name("measured_memory.py")]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    found: list[list[int]] = json.loads(done.stdout)
    return found


def test_items_that_go_on_are_copied_once():
    """Without a soft-cap the weights of the products are the exponentials themselves, also after a selection."""
    q, k, v = (torch.randn(3, 2, 40, 4, generator=torch.Generator().manual_seed(s)) for s in range(3))
    core = TiledLinearisation.at(q, k, v, ScoreRule(), tiling=Tiling(tile=(16, 16))).select(torch.tensor([0, 2]))
    assert core.kept is not None
    assert all(E is W for row in core.kept for E, W in row)
