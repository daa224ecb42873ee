"""Attention maps of the real GPT-2 on five prompts: softmax and scores, as the core makes them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lipscope.attention.masks import as_mask
from lipscope.attention.scores import ScoreRule

PROMPTS = Path(os.environ.get("LIPSCOPE_ORIGINALS", ""), "gpt2-reference-attention", "transformer-explainer-5-prompts.npz")


@pytest.mark.skipif(
    "LIPSCOPE_ORIGINALS" not in os.environ,
    reason="LIPSCOPE_ORIGINALS names no directory with the maps of the original GPT-2",
)
@pytest.mark.parametrize("prompt", range(5))
def test_the_core_makes_the_softmax_of_the_real_scores(prompt: int) -> None:
    with np.load(PROMPTS, allow_pickle=False) as maps:
        published, scores = (torch.from_numpy(maps[f"{name}{prompt}"]) for name in "PS")
        words = str(maps[f"prompt{prompt}"]).split()
    layers, heads, n, _ = scores.shape
    assert (layers, heads) == (12, 12)
    assert n >= len(words)
    ours, _ = ScoreRule(mask=as_mask("causal")).probabilities(scores.double())
    # What identities they can: rows sum to one, nothing looks ahead, and the softmax of the scores is the map.
    for P in (ours, published.double()):
        torch.testing.assert_close(P.sum(-1), torch.ones(P.shape[:-1], dtype=torch.float64), rtol=0, atol=1e-6)
        assert float(P.triu(1).abs().max()) == 0.0
    torch.testing.assert_close(ours, published.double(), rtol=0, atol=2e-6)
    # Scores above the diagonal are there, so the mask is what hides them.
    assert float((torch.softmax(scores.double(), -1) - ours).abs().max()) > 0.1
