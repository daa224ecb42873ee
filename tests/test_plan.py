"""``lipscope plan``: what a scan would take, from a configuration and headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import command
from lipscope.models.stored import Checkpoint, fits
from lipscope.runs.estimate import ways
from test_streaming import LAYERS, made, saved


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("plan") / "llama", "llama")


def test_a_plan_reads_headers_only_and_says_what_scan_would_do(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(*_: Any) -> None:
        raise AssertionError("a plan reads no weights")

    monkeypatch.setattr("lipscope.models.stored.Checkpoint.read", reading)
    for free, way in ((1 << 40, "in memory"), (1000, "streamed")):
        monkeypatch.setattr("lipscope.models.stored.free_memory", lambda device=None, free=free: free)
        told = command.run("plan", str(llama), "--lengths", "16,64")
        assert told.returncode == 0, told.stderr
        words = " ".join(told.stdout.split())
        count = sum(p.numel() for p in made("llama").model.parameters())
        assert f"{count:,} parameters in {LAYERS} layers" in words
        assert f"lipscope scan takes it {way}" in words
        assert words.count("in memory") == 2 + (way == "in memory")


def test_a_plan_is_made_of_every_model_that_is_scanned(tmp_path: Path) -> None:
    mamba = transformers.MambaConfig(hidden_size=32, num_hidden_layers=3, vocab_size=260, state_size=8)
    transformers.MambaForCausalLM(mamba).save_pretrained(tmp_path / "mamba")
    saved(tmp_path / "t5", "t5")
    encoder = made("t5").encoder
    for words, expected in (
        (["mamba"], "in 3 layers"),
        (["t5", "--part", "encoder"], f"{sum(p.numel() for p in encoder.parameters()):,} parameters in {LAYERS} layers"),
    ):
        told = command.run("plan", str(tmp_path / words[0]), *words[1:])
        assert told.returncode == 0, told.stderr
        assert expected in " ".join(told.stdout.split())


def test_a_plan_refuses_what_a_scan_would_refuse(tmp_path: Path) -> None:
    directory, name = saved(tmp_path / "llama", "llama"), "model.layers.3.self_attn.q_proj.weight"
    shard = directory / json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"][name]
    saved(tmp_path / "t5", "t5")
    for words, expected in (
        (["gpt2-mini"], "lipscope describe gpt2-mini"),
        ([str(tmp_path / "t5")], "say which part"),
        ([str(directory), "--inputs", "0"], "inputs must be at least 1, got 0"),
        ([str(directory), "--device", "nonsense"], "device must be auto, cpu"),
    ):
        told = command.run("plan", *words)
        assert told.returncode == 2
        assert expected in " ".join(told.stderr.split())
    good = load_file(shard)
    save_file(good | {name: good[name][:-1].contiguous()}, shard)
    assert f"{shard.name}: {name} has the shape (47, 48)" in " ".join(command.run("plan", str(directory)).stderr.split())
    save_file({k: v for k, v in good.items() if k != name}, shard)
    told = " ".join(command.run("plan", str(directory)).stdout.split())
    assert "does not hold layers.3.self_attn.q_proj.weight" in told
    assert "streamed " not in told.replace("cannot be streamed", "")


def test_a_gpu_has_to_hold_the_weights_too(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    wide = 2 * sum(t.size for t in Checkpoint(llama).tensors.values())
    for free, expected in ((wide + 1, True), (wide, False)):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device, free=free: (free, 1 << 40))
        assert fits(llama, device=gpu) == expected
    assert fits(llama)


def test_larger_models_and_longer_inputs_are_planned_with_more() -> None:
    small, large = (made("llama", hidden_size=width).model for width in (64, 128))
    for way in ("in memory", "streamed"):
        cases = [(model, n) for model in (small, large) for n in (64, 4096)]
        planned = [ways(model, sum(p.numel() * 2 for p in model.parameters()), n, 1, 1e9)[way] for model, n in cases]
        for less, more in ((0, 1), (0, 2), (1, 3), (2, 3)):
            assert planned[less][0] < planned[more][0]
            assert planned[less][1] < planned[more][1]
