"""Models on long inputs: masks stay rules, no scope forms an n×n float matrix, and the numbers are the dense ones."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers as tf
from transformers.models.llama.modeling_llama import LlamaAttention

from largest_tensor import LargestTensor
from lipscope.attention.masks import Causal, MaskFunction, Window
from lipscope.attention.tiled import Tiling, using_tiling
from lipscope.measure.scopes import CROSS_SCOPES
from lipscope.measure.scopes import SCOPES as MODEL_SCOPES
from lipscope.models import seam
from lipscope.models.model import Model
from lipscope.models.seam import SymbolicMask
from lipscope.spectral.golub_kahan import GolubKahan
from model_families import enlarge

LONG = 520
_SHAPE = {
    "vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = _SHAPE | {"num_key_value_heads": 2, "head_dim": 4}
MODELS = {
    "llama": lambda: tf.LlamaModel(tf.LlamaConfig(**_GROUPED)),
    "gemma2": lambda: tf.Gemma2Model(
        tf.Gemma2Config(**_GROUPED, sliding_window=70, attn_logit_softcapping=2.0, query_pre_attn_scalar=4)
    ),
    "qwen3": lambda: tf.Qwen3Model(tf.Qwen3Config(**_GROUPED)),
    "bert": lambda: tf.BertModel(tf.BertConfig(**_SHAPE)),
}
SMALL = Tiling(tile=(128, 256), tile_bytes=1 << 20, keep=0, dense=1 << 18)
DENSE = Tiling(dense=1 << 40, shortest_half=1 << 40)


@cache
def loaded(name: str) -> Model:
    torch.manual_seed(0)
    return Model(enlarge(MODELS[name]()).float(), name=name)


def inputs(handle: Model, padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 50, (2, LONG), generator=torch.Generator().manual_seed(1))
    if not padded:
        return handle.token_inputs(input_ids=ids[:1])
    real = torch.ones(2, LONG, dtype=torch.long)
    real[1, : LONG // 3] = 0
    return handle.token_inputs(input_ids=ids, attention_mask=real)


@pytest.mark.parametrize(
    ("name", "padded"),
    [("llama", False), ("qwen3", False), ("bert", False), ("gemma2", True), ("bert", True)],
)
def test_every_scope_without_matrices_and_with_them(name: str, padded: bool, monkeypatch) -> None:
    handle = loaded(name)
    given = inputs(handle, padded)
    with using_tiling(SMALL), LargestTensor(LONG) as seen:
        tiled, statistics = products(handle, given)
    assert not seen.matrices
    monkeypatch.setattr(seam, "LONG", 1 << 40)
    with using_tiling(DENSE), LargestTensor(LONG) as seen:
        dense, expected = products(handle, given)
    assert seen.matrices
    for scope in tiled:
        for one, other in zip(tiled[scope], dense[scope], strict=True):
            assert float((one - other).norm() / other.norm()) < 1e-5, scope
    for key, value in expected.items():
        torch.testing.assert_close(statistics[key], value, rtol=1e-5, atol=1e-6)


def products(handle: Model, given: dict[str, torch.Tensor]) -> tuple[dict[str, list[torch.Tensor]], dict[str, torch.Tensor]]:
    """J·u and Jᵀ·g of the last layer at every scope, and what attention looks like."""
    recording = handle.record(given)
    found = {}
    for scope in MODEL_SCOPES:
        if (scope == "norm+attention" and not handle.layers[1].normed) or scope in CROSS_SCOPES:
            continue
        operator = recording[1].operator(scope)
        M, N = operator.shape
        generator = torch.Generator().manual_seed(0)
        u, g = (torch.randn(operator.batch, size, generator=generator) for size in (N, M))
        found[scope] = [operator.matvec(u), operator.rmatvec(g)]
    return found, recording[1].statistics


def test_masks_are_called_by_name() -> None:
    handle = loaded("gemma2")
    recording = handle.record(inputs(handle, padded=False))
    masks = [recording[layer].attention.mask for layer in range(2)]
    assert masks == [Window(70), Causal()]
    assert isinstance(recording.hosts[0].kwargs["attention_mask"], SymbolicMask)


def test_rows_of_a_long_input_need_no_matrix() -> None:
    """All that a scan writes beside σ: bounds at the tokens' norms, and what attention looks like."""
    handle = loaded("llama")
    with using_tiling(SMALL), LargestTensor(LONG) as seen:
        recording = handle.record(inputs(handle, padded=False))
        (row,) = recording[1].rows(certificate=False)
    assert not seen.matrices
    assert row["n"] == LONG
    assert row["mask"] == "causal"
    assert row["upper"] <= row["refined"]


def test_a_symbolic_mask_is_a_matrix_for_those_who_compute_with_it() -> None:
    rule = MaskFunction(lambda b, h, q, k: (k <= q) & (k + b > 1), 2, 6)
    mask = SymbolicMask.of(rule, 2, 6)
    expected = rule.allowed(6)
    assert mask.shape == (2, 1, 6, 6)
    assert mask.dtype == torch.bool
    for passed in (mask.detach(), mask[:, :, :, :6], mask[:, :, :, : mask.shape[-1]]):
        assert isinstance(passed, SymbolicMask)
        assert passed.rule is rule
    for computed, plainly in (
        (mask[:, :, :3], expected[:, :, :3]), (~mask, ~expected), (mask.float(), expected.float()),
        (torch.where(mask, 1.0, 2.0), torch.where(expected, 1.0, 2.0)), (mask & mask, expected),
        (torch.zeros(6, 6).masked_fill(mask[0, 0], 3.0), torch.zeros(6, 6).masked_fill(expected[0, 0], 3.0)),
        (mask.any(-1), expected.any(-1)),
    ):  # fmt: skip
        assert not isinstance(computed, SymbolicMask)
        assert torch.equal(computed, plainly)
    assert torch.equal(torch.zeros(2, 1, 6, 6).masked_fill_(mask, 3.0), 3.0 * expected)
    assert torch.equal(rule.for_input(1).allowed(6), expected[1:])

    def cut(changed: torch.Tensor) -> None:
        changed[:, :, 2:, :1] = False

    def with_itself(changed: torch.Tensor) -> None:
        changed &= expected

    # A change would be made to a matrix that nobody keeps: the model that is measured would be another one.
    for change in (cut, with_itself, lambda m: m.logical_not_(), lambda m: m.masked_fill_(expected, False)):
        with pytest.raises(NotImplementedError, match="changes its attention mask in place"):
            change(mask)


VIEWS = {
    "slice": lambda m: m[:, :, 2:],
    "select": lambda m: m[0],
    "index": lambda m: m[..., 0],
    "of a view": lambda m: m[0][0][2:],
    "view": lambda m: m.view(2, 36),
    "reshape": lambda m: m.reshape(-1),
    "unsqueeze": lambda m: m.unsqueeze(0),
    "expand": lambda m: m.expand(2, 1, 6, 6),
    "transpose": lambda m: m.mT,
    "diagonal": lambda m: m.diagonal(dim1=-2, dim2=-1),
    "unbind": lambda m: m.unbind(0)[1],
    "split": lambda m: m.split(3, 2)[1],
    "chunk": lambda m: m.chunk(2, 2)[0],
    "flatten": lambda m: m.flatten(),
    "detach": lambda m: m.detach()[:, :, 2:],
    "data": lambda m: m.data[0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_a_write_through_a_view_of_a_symbolic_mask_is_noticed(view: str, mode) -> None:
    """Also when the view was taken long before: whoever uses the mask afterwards is told, and nobody gets the old rule."""
    with mode():
        mask = SymbolicMask.of(Causal(), 2, 6)
        passed, part = mask[:, :, :, :6], VIEWS[view](mask)
        assert mask.rule is passed.rule
        part[..., :1] = False
        for use in (lambda: mask.rule, lambda: passed.rule, mask.float, lambda: mask & mask, lambda: mask[:, :, :, :6]):
            with pytest.raises(NotImplementedError, match="changes its attention mask in place"):
                use()


def test_other_ways_to_write_into_a_symbolic_mask_are_refused() -> None:
    ones = torch.ones(2, 1, 6, 6, dtype=torch.bool)
    for change in (
        lambda m: torch.logical_and(ones, ones, out=m), lambda m: torch.zero_(m), lambda m: m.copy_(ones),
        lambda m: torch.ops.aten.index_put_(m, [torch.tensor([0])], torch.tensor(False)),
        lambda m: torch._foreach_zero_([ones, m]),
    ):  # fmt: skip
        mask = SymbolicMask.of(Causal(), 2, 6)
        with pytest.raises(NotImplementedError, match="changes its attention mask in place"):
            change(mask)
    for harmless in (
        lambda m: m.clone().fill_(False), lambda m: (~m).fill_(False), lambda m: m.float().zero_(),
        lambda m: torch.where(m, 0.0, 1.0).zero_(), lambda m: ones.clone().logical_and_(m),
    ):  # fmt: skip
        mask = SymbolicMask.of(Causal(), 2, 6)
        harmless(mask)
        assert mask.rule == Causal()


def test_a_model_that_cuts_its_mask_through_a_view_is_not_measured_without_the_cut(monkeypatch) -> None:
    handle, forward = loaded("llama"), LlamaAttention.forward

    def cutting(self, hidden_states, position_embeddings=None, attention_mask=None, **options):
        later = attention_mask[:, :, 200:]
        later[..., :100] = False
        return forward(self, hidden_states, position_embeddings, attention_mask, **options)

    monkeypatch.setattr(LlamaAttention, "forward", cutting)
    ids = torch.randint(3, 50, (1, LONG), generator=torch.Generator().manual_seed(1))
    with pytest.raises(NotImplementedError, match="changes its attention mask in place"):
        handle.record(handle.token_inputs(input_ids=ids))
    handle.record(handle.token_inputs(input_ids=ids[:, :300]))


def test_packed_documents_stay_apart_in_long_inputs() -> None:
    """σ(packed) = max over documents, and the rule is the packed mask."""
    handle = loaded("llama")
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randint(3, 50, (length,), generator=generator).tolist() for length in (350, 120, 50)]
    given, lengths = handle.packed_inputs(documents)
    solver = GolubKahan(rtol=1e-6)
    together = handle.record(given, documents=lengths)[0].sigma(solver=solver, certificate=False).estimate
    alone = [
        handle.record(handle.token_inputs(input_ids=torch.tensor(d)))[0].sigma(solver=solver, certificate=False)
        for d in documents
    ]
    assert float(together) == pytest.approx(max(float(result.estimate) for result in alone), rel=1e-5)


def test_the_threshold_is_where_masks_become_rules() -> None:
    assert seam.LONG == 512
