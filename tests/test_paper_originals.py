"""The paper's own models by name: tiny ones in exactly the layout of ``gpt2`` and ``bert-base-uncased`` on the hub.

The original tokenizers are read from ``tokenizers`` in the directory that the environment variable LIPSCOPE_ORIGINALS
names (``gpt2/vocab.json``, ``gpt2/merges.txt``, ``bert-base-uncased/vocab.txt``); without it those tests are skipped.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from typer.testing import CliRunner

import lipscope
from lipscope.cli.main import app
from lipscope.runs.store import Store
from lipscope.studies.paper.plan import MODES
from paper_cases import TINY, tiny_zoo

ORIGINALS = Path(os.environ.get("LIPSCOPE_ORIGINALS", ""), "tokenizers")
with_tokenizers = pytest.mark.skipif(
    "LIPSCOPE_ORIGINALS" not in os.environ, reason="LIPSCOPE_ORIGINALS names no directory with the original tokenizers"
)


def tiny(kind: str, vocabulary: int) -> Any:
    """Two layers of width 8, as the classes of the checkpoints on the hub make them."""
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=vocabulary, n_embd=8, n_layer=2, n_head=2, n_positions=64)
        return transformers.GPT2LMHeadModel(config).eval()
    config = transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.BertForPreTraining(config).eval()


def original_layout(kind: str, model: Any) -> dict[str, torch.Tensor]:
    """The tensors under the names that the files on the hub have.

    ``gpt2``: no prefix, the causal mask among the tensors, no head, as it is tied. ``bert-base-uncased``: gamma and beta for
    the normalisations, decoder tied and therefore absent.
    """
    state = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    if kind == "gpt2":
        renamed = {name.removeprefix("transformer."): t for name, t in state.items() if name != "lm_head.weight"}
        size = model.config.n_positions
        triangle = torch.tril(torch.ones(1, 1, size, size))
        return renamed | {f"h.{layer}.attn.bias": triangle.clone() for layer in range(2)}
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in state.items():
        ending = next((old for old in names if name.endswith(old)), None)
        renamed[name.replace(ending, names[ending]) if ending else name] = tensor
    return {name: t for name, t in renamed.items() if not name.startswith("cls.predictions.decoder") and "ids" not in name}


def written(directory: Path, kind: str, vocabulary: int) -> Any:
    directory.mkdir()
    model = tiny(kind, vocabulary)
    save_file(original_layout(kind, model), directory / "model.safetensors", metadata={"format": "pt"})
    named = {"gpt2": "GPT2LMHeadModel", "bert-base-uncased": "BertForMaskedLM"}[kind]
    config = model.config.to_dict() | {"architectures": [named]}
    (directory / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("kind", ["gpt2", "bert-base-uncased"])
def test_the_layout_of_the_hub_is_read_as_it_is(kind: str, tmp_path: Path) -> None:
    """Every parameter arrives, under the names of the hub: σ is that of the same weights in memory."""
    model = written(tmp_path / kind, kind, 50)
    ids = torch.arange(3, 15)[None]
    rows = []
    for found in (lipscope.load(str(tmp_path / kind)), lipscope.load(model)):
        rows.append([row["estimate"] for row in found.record(inputs={"input_ids": ids}).rows()])
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2


@with_tokenizers
def test_a_run_with_the_originals_bears_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of ``lipscope paper`` names the originals, and no sentence says that another model stood in for them."""
    tiny_zoo(monkeypatch)
    monkeypatch.setitem(MODES, "quick", TINY)
    for name in ("plan", "run"):
        monkeypatch.setattr(f"lipscope.studies.paper.{name}.paper_text", lambda: "python-docs")
    asked = []
    for kind, vocabulary in (("bert-base-uncased", 30522), ("gpt2", 50257)):
        written(tmp_path / kind, kind, vocabulary)
        for file in (ORIGINALS / kind).iterdir():
            shutil.copy(file, tmp_path / kind)
        asked += [f"--{kind.split('-')[0]}", str(tmp_path / kind)]
    done = CliRunner().invoke(app, ["paper", "--quick", "--workers", "1", "--out", str(tmp_path / "out"), *asked])
    assert done.exit_code == 0, done.output
    with Store(tmp_path / "out" / "RUN.db") as store:
        assert {"gpt2", "bert-base-uncased", "bert-base-uncased-causal"} < {row["model"] for row in store.rows()}
    for page in ("FINDINGS.md", "reproduction.md", "findings.html"):
        text = (tmp_path / "out" / page).read_text(encoding="utf-8")
        assert "stood in" not in text, page
        assert "stands in" not in text, page
        assert "stand-in" not in text, page
    assert "bert-base-uncased" in (tmp_path / "out" / "reproduction.md").read_text(encoding="utf-8")
