"""Packed documents: σ of the chunk is the largest σ of a document, exactly, in every layer and scope."""

from __future__ import annotations

import pytest
import torch

import lipscope
from lipscope.models.load import ByteTokenizer
from lipscope.models.model import Model
from lipscope.models.text import packed_chunks
from lipscope.spectral.golub_kahan import GolubKahan
from model_families import FAMILIES

DOCUMENTS = [[5, 9, 12, 31], [7, 8], [44, 3, 17, 20, 11, 6]]


@pytest.mark.parametrize(
    "family", ["bert", "roberta", "gpt2", "opt", "llama", "mistral", "gemma2", "gpt_oss", "modernbert", "t5_encoder"]
)
def test_the_chunk_is_its_worst_document(family: str) -> None:
    handle = Model(FAMILIES[family]())
    inputs, lengths = handle.packed_inputs(DOCUMENTS)
    together = handle.record(inputs, documents=lengths)
    alone = [handle.record(handle.token_inputs(input_ids=torch.tensor(ids))) for ids in DOCUMENTS]
    solver = GolubKahan(rtol=1e-12)
    for scope in ("attention", "block"):
        for analytic in (True, False):
            chunk = float(together[1].sigma(scope, solver=solver, analytic=analytic).estimate)
            parts = [float(r[1].sigma(scope, solver=solver, analytic=analytic).estimate) for r in alone]
            assert chunk == pytest.approx(max(parts), rel=1e-9)
    J = together[1].operator("attention", analytic=False).to_dense()[0]
    blocks = J.reshape(12, 16, 12, 16).abs().amax((1, 3))
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    assert not blocks[document[:, None] != document[None]].any()


def test_models_with_their_own_attention_are_refused() -> None:
    handle = Model(FAMILIES["bloom"]())
    inputs, lengths = handle.packed_inputs(DOCUMENTS)
    with pytest.raises(ValueError, match="keeps its own attention"):
        handle.record(inputs, documents=lengths)


class Bracketed(ByteTokenizer):
    """Two special tokens around every text."""

    def __call__(self, text: str, add_special_tokens: bool = True, **_: object) -> dict[str, list[int]]:
        ids = list(text.encode())
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), Bracketed()])
def test_chunks_are_filled_exactly(tokenizer: ByteTokenizer) -> None:
    texts = ["abcdefg", "hij", "klmnopqrst", "uv", "wxyz", "hello world"] * 5
    for seed in range(20):
        for n, bundle in packed_chunks(texts, tokenizer, [16, 9], 2, seed).items():
            assert [sum(map(len, chunk)) for chunk in bundle] == [n, n]
            if isinstance(tokenizer, Bracketed):
                documents = [document for chunk in bundle for document in chunk]
                assert all(d[0] == 1 and d[-1] == 2 and len(d) >= 3 for d in documents)
    with pytest.raises(ValueError, match="the text has 37 tokens in 6 documents"):
        packed_chunks(texts[:6], ByteTokenizer(), [30], 2)


def test_a_packed_scan_reports_chunks_and_documents() -> None:
    model = FAMILIES["gpt2"]()
    model.resize_token_embeddings(256)
    handle = Model(model, ByteTokenizer())
    scan = lipscope.scan(handle, ["abcdefg", "hij", "klmnopqrst", "uv", "wxyz"], lengths=[12], inputs=2, pack=True)
    for which in (0, 1):
        for layer in (0, 1):
            rows = [row for row in scan.rows if (row["input"], row["layer"]) == (which, layer)]
            (chunk,) = [row for row in rows if row["document"] is None]
            assert chunk["mask"].startswith("causal&packed:")
            assert chunk["n"] == 12 == sum(row["n"] for row in rows if row["document"] is not None)
            worst = max(row["estimate"] for row in rows if row["document"] is not None)
            assert chunk["estimate"] == pytest.approx(worst, rel=1e-3)
