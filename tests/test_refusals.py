"""Models that cannot be measured are refused at the door, naming what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lipscope
from model_families import FAMILIES


def saved(directory: Path) -> Path:
    FAMILIES["bert"]().float().save_pretrained(directory)
    return directory


def test_quantised_directories(tmp_path: Path) -> None:
    config = saved(tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match=r"are quantised \(gptq\)"):
        lipscope.load(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    (saved(tmp_path) / "model.safetensors").write_bytes(b"garbage")
    with pytest.raises(ValueError, match="are damaged"):
        lipscope.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        lipscope.load(tmp_path)


def test_nan_weights_name_the_parameter() -> None:
    model = FAMILIES["bert"]()
    model.encoder.layer[1].attention.self.query.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"parameter encoder\.layer\.1\.attention\.self\.query\.weight holds NaN"):
        lipscope.load(model)


def test_overflowing_activations_name_the_module() -> None:
    model = FAMILIES["gpt2"]().float()
    model.h[1].attn.c_attn.weight.data *= 1e37
    with pytest.raises(FloatingPointError, match=r"h\.1\.attn\.c_attn|layer 1 \(h\.1\)"):
        lipscope.load(model)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="a model is a directory"):
        lipscope.load(tmp_path / "model.pt")


def test_certificates_that_do_not_exist_are_not_promised() -> None:
    handle = lipscope.load(FAMILIES["mpnet"]())
    recording = handle.record({"input_ids": torch.tensor([[3, 9, 20, 7]])})
    with pytest.raises(ValueError, match="no certificate for scope 'attention'"):
        recording[0].sigma(certificate=True)
    assert recording[0].sigma().certified is None
