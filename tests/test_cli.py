"""The command line as a user runs it, with real files, and for each way of ending once in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

import cases
import lipscope
from command import run, run_alone


def assert_same_rows(ours, theirs):
    """Equal but for the last bits, which depend on how buffers happen to be aligned in a process."""
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a == {key: pytest.approx(value, rel=1e-5) if isinstance(value, float) else value for key, value in b.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    layer = cases.layer(heads=4, kv_heads=2, extras="biases", d_out=6)
    tensors = {name: getattr(layer, name) for name in ("q", "k", "v", "out", "q_bias", "k_bias", "v_bias", "out_bias")}
    save_file(tensors, folder / "layer.safetensors", metadata={"heads": "4", "kv_heads": "2"})
    fused = cases.random(6, 18, seed=0)
    save_file({"qkv": fused}, folder / "gpt2.safetensors")
    save_file({"x": cases.random(2, 5, 6, seed=1)}, folder / "tokens.safetensors")
    return folder, layer, cases.random(2, 5, 6, seed=1)


def test_version_and_help():
    assert run("--version").stdout.strip() == f"lipscope {lipscope.__version__}"
    out = run("--help")
    assert out.returncode == 0
    assert "measure" in out.stdout
    assert "σ(X)" in out.stdout


def test_no_arguments_show_the_help():
    out = run()
    assert "Usage" in out.stdout
    assert "measure" in out.stdout
    assert out.stderr == ""


def test_unknown_command_is_one_line():
    out = run_alone("mesure")
    assert out.returncode == 2
    assert out.stderr.strip().splitlines()[0].startswith("lipscope: No such command 'mesure'")


def test_help_does_not_load_torch():
    code = "import sys, lipscope.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_measure_json_equals_the_library(files):
    folder, layer, X = files
    out = run_alone(
        "measure", folder / "layer.safetensors", "--tokens", folder / "tokens.safetensors", "--mask", "causal", "--json"
    )
    assert out.returncode == 0, out.stderr
    assert_same_rows(json.loads(out.stdout), lipscope.local_lipschitz(layer, X, mask="causal").to_rows())


def test_measure_heads_of_a_conv1d_file(files):
    folder, _, X = files
    out = run(
        "measure", folder / "gpt2.safetensors", "--tokens", folder / "tokens.safetensors", "--heads", 2, "--transposed",
        "--scope", "head", "--dtype", "float32", "--json",
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    layer = lipscope.Attention.from_fused(cases.random(6, 18, seed=0), heads=2, transposed=True)
    expected = lipscope.local_lipschitz(layer, X, scope="head", dtype=torch.float32)
    assert_same_rows(json.loads(out.stdout), expected.to_rows())


def test_measure_table(files):
    folder, _, _ = files
    out = run("measure", folder / "layer.safetensors", "--tokens", folder / "tokens.safetensors")
    assert out.returncode == 0, out.stderr
    for word in ("Local Lipschitz constant", "lower", "estimate", "upper", "mask full", "n = 5", "exact"):
        assert word in out.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.safetensors", "--tokens", "T"], "no such file"),
        (["L", "--tokens", "T", "--mask", "casual"], "unknown mask 'casual'"),
        (["L", "--tokens", "L"], "exactly one tensor"),
        (["T", "--tokens", "T"], "unknown tensors x"),
        (["P", "--tokens", "T"], "not a safetensors file"),
        (["L", "--tokens", "T", "--heads", "5"], "heads"),
        (["L", "--tokens", "T", "--heads", "0"], "heads must be at least 1"),
        (["L", "--tokens", "T", "--kv-heads", "0"], "kv_heads must be at least 1"),
        (["M", "--tokens", "T"], "metadata entry 'heads' of words.safetensors must be a number, got 'two'"),
        (["L", "--tokens", "T", "--scope", "block"], "Invalid value for '--scope'"),
        (["L", "--tokens", "T", "--rtol", "abc"], "Invalid value for '--rtol'"),
        (["L", "--tokens", "T", "--bogus"], "No such option"),
        (["L"], "Missing option '--tokens'"),
        (["L", "--tokens", "T", "--rtol", "0"], "rtol must lie strictly between 0 and 1"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_two(files, arguments, message):
    folder, _, _ = files
    torch.save({"q": torch.eye(2)}, folder / "pickled.pt")
    save_file({"qkv": torch.ones(3, 1)}, folder / "words.safetensors", metadata={"heads": "two"})
    names = {"L": "layer.safetensors", "T": "tokens.safetensors", "P": "pickled.pt", "M": "words.safetensors"}
    out = run("measure", *[folder / names[a] if a in names else a for a in arguments])
    assert out.returncode == 2
    assert message in out.stderr
    assert len(out.stderr.strip().splitlines()) == 1
    assert "Traceback" not in out.stderr
    assert out.stdout == ""


def test_debug_shows_the_traceback(files):
    folder, _, _ = files
    out = run_alone("measure", "nowhere", "--tokens", folder / "tokens.safetensors", "--debug")
    assert out.returncode != 0
    assert "Traceback" in out.stderr
