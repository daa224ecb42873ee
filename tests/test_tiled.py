"""Tiles give the same products as n×n matrices, whatever the mask, the score rule and the size of the tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import cases
import lipscope
from lipscope.attention.core import Linearisation
from lipscope.attention.masks import RealTokens
from lipscope.attention.operators import AttentionOperator, HeadOperator
from lipscope.attention.scores import ScoreRule
from lipscope.attention.tiled import SMALL, TiledLinearisation, Tiling, current_tiling, prefers_tiles, using_tiling
from lipscope.measure.memory import plan_memory, read_bytes
from lipscope.models.seam import attention_core
from lipscope.rounding import show_bytes
from pairwise import pairwise

N, B, H = 37, 3, 4
BIAS = cases.random(B, H, N, N, seed=7)
MASKS = {
    "full": None,
    "causal": "causal",
    "window": "window:5",
    "window-both": "window:7:both",
    "prefix": "prefix:6",
    "padding": "pad-left:3,0,7",
    "causal-padding": "causal&pad-right:1,2,30",
    "packed": "packed:10,20,7",
    "packed-both": "packed:10,20,7:both",
    "boolean": BIAS > -0.5,
    "additive": BIAS.masked_fill(BIAS < 0, float("-inf")),
    "hidden-rows": (BIAS > -9) & (torch.arange(N)[:, None] % 5 != 0),
}
PARTS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": cases.random(H, seed=1)},
    "bias": {"bias": BIAS[0]},
    "bias-per-input": {"bias": BIAS},
    "rotary": {"rotary": lipscope.Rotary.from_base(2, n=N, dtype=torch.float64)},
}


def layer(mask, kv_heads=H, dtype=torch.float64, d=10, dh=3, **parts) -> lipscope.Attention:
    draw = iter(range(100))

    def random(*shape):
        return cases.random(*shape, seed=next(draw)).to(dtype)

    return lipscope.Attention(
        q=random(H * dh, d), k=random(kv_heads * dh, d), v=random(kv_heads * dh, d), out=random(d, H * dh), heads=H,
        kv_heads=kv_heads, q_bias=random(H * dh), k_bias=random(kv_heads * dh), v_bias=random(kv_heads * dh), mask=mask,
        **parts,
    )  # fmt: skip


@pytest.fixture(params=["rebuilt", "kept"])
def exponentials(request):
    return request.param


@pytest.fixture
def small_tiles(exponentials):
    """Tiles that do not divide the sequence, two items at a time, with and without kept exponentials."""
    with using_tiling(Tiling(tile=(8, 11), tile_bytes=2 * 8 * 11 * 8, keep={"rebuilt": 0, "kept": 1 << 30}[exponentials])):
        yield


@pytest.mark.parametrize(("mask", "part", "kv_heads", "exponentials"), pairwise(MASKS, PARTS, (4, 2), ("rebuilt", "kept")))
@pytest.mark.usefixtures("small_tiles")
def test_tiles_equal_matrices(mask, part, kv_heads):
    X = cases.random(B, N, 10, seed=3)
    subject = layer(MASKS[mask], kv_heads, **PARTS[part])
    for kind in (AttentionOperator, HeadOperator):
        dense, tiles = kind.at(subject, X, tiled=False), kind.at(subject, X, tiled=True)
        assert isinstance(dense.core, Linearisation)
        assert isinstance(tiles.core, TiledLinearisation)
        for chosen in (torch.arange(dense.batch), torch.tensor([2, 0])):
            one, other = dense.select(chosen), tiles.select(chosen)
            u, g = cases.random(one.batch, one.shape[1], seed=4), cases.random(one.batch, one.shape[0], seed=5)
            for expected, found in ((one.matvec(u), other.matvec(u)), (one.rmatvec(g), other.rmatvec(g))):
                torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11 * float(expected.abs().max()))


def test_tiles_in_float32():
    """At realistic size the two agree to 1e-5 relative, also with large scores."""
    for scale in (1.0, 6.0):
        subject = layer("causal", 2, torch.float32, d=64, dh=16)
        X = scale * cases.random(1, 600, 64, seed=0).float() / 8
        dense, tiles = AttentionOperator.at(subject, X, tiled=False), AttentionOperator.at(subject, X, tiled=True)
        u = cases.random(1, 600 * 64, seed=1).float()
        for expected, found in ((dense.matvec(u), tiles.matvec(u)), (dense.rmatvec(u), tiles.rmatvec(u))):
            assert float((found - expected).norm() / expected.norm()) < 1e-5


def test_hidden_tiles_are_not_visited():
    """Half of the entries under a causal mask, a band under a window, whatever way the mask is written."""
    n = 2048
    q, k, v = (cases.random(1, 2, n, 4, seed=s).float() for s in range(3))

    def visited(rule):
        return sum(strip.area for strip in TiledLinearisation.at(q, k, v, rule).strips) / n**2

    assert visited(ScoreRule()) == 1
    assert visited(ScoreRule(mask=lipscope.masks.as_mask("causal"))) < 0.6
    assert visited(ScoreRule(mask=lipscope.masks.as_mask("window:100"))) < 0.2
    assert visited(ScoreRule(mask=lipscope.masks.as_mask("packed:512,512,512,512"))) < 0.26
    assert visited(ScoreRule(allowed=torch.ones(n, n).tril().bool())) < 0.7


def test_tiles_are_chosen_where_they_pay():
    like = torch.zeros(1)
    causal, full = ScoreRule(mask=lipscope.masks.as_mask("causal")), ScoreRule()
    assert prefers_tiles(causal, 12, 1024, 1024, like)
    assert not prefers_tiles(full, 12, 1024, 1024, like)
    assert not prefers_tiles(causal, 12, 128, 128, like)
    assert prefers_tiles(full, 12, 4096, 4096, like)


@pytest.mark.usefixtures("small_tiles")
def test_the_core_of_models_uses_tiles():
    """The autograd core gives the same outputs, Jᵀ and J with tiles; keys may outnumber queries."""
    q, k, v = cases.random(2, 4, 9, 3, seed=0), cases.random(2, 2, 14, 3, seed=1), cases.random(2, 2, 14, 5, seed=2)
    rule = ScoreRule(allowed=cases.random(2, 1, 9, 14, seed=3) > -0.5, softcap=2.0)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    found = []
    for limit in (0, 1 << 40):
        with using_tiling(replace(current_tiling(), dense=limit)):
            o = attention_core(q, k, v, rule)
        g = cases.random(*o.shape, seed=4).requires_grad_()
        pulled = torch.autograd.grad(o, inputs, g, create_graph=True)
        directions = [cases.random(*t.shape, seed=5 + i) for i, t in enumerate(pulled)]
        (pushed,) = torch.autograd.grad(pulled, g, directions)
        found.append((o, *pulled, pushed))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_memory_is_planned():
    """Fewer Krylov vectors are kept when memory is short, and too little memory is refused with what is needed."""
    W = torch.zeros(64, 64)
    subject = lipscope.Attention(W, W, W, W, heads=4, mask="causal")
    free = plan_memory(subject, 5000)
    assert free.tiled
    assert free.tiling == Tiling()
    vector = 5000 * 64 * 4
    rebuilt = plan_memory(subject, 5000, limit=free.total - free.bases // 2)
    assert (rebuilt.tiling.keep, rebuilt.tiling.tile) == (0, Tiling().tile)
    smaller = plan_memory(subject, 5000, limit=rebuilt.total - rebuilt.bases // 2)
    assert smaller.tiling == SMALL
    tight = plan_memory(subject, 5000, limit=smaller.matrices + smaller.tokens + 10 * vector)
    assert tight.bases == tight.room == 10 * vector
    with pytest.raises(MemoryError, match=r"n = 5000 tokens need at least [\d.]+ MiB .* limited to 1 MiB"):
        plan_memory(subject, 5000, limit=1 << 20)


def test_sizes_are_read_and_shown():
    assert [read_bytes(text) for text in ("4GiB", "512 MiB", "1.5kb", "7")] == [4 << 30, 512 << 20, 1500, 7]
    assert [show_bytes(count) for count in (5 << 39, 3 << 30, 1536 << 10, 12)] == ["2.5 TiB", "3 GiB", "1.5 MiB", "12 B"]
    assert [read_bytes(number) for number in (7, 4e9, np.int64(5), np.float64(6.0))] == [7, 4 * 10**9, 5, 6]
    for text in ("4 apples", "-4GiB", "1e9", ""):
        with pytest.raises(ValueError, match="memory must be a size such as 4GiB or 512MiB, got"):
            read_bytes(text)
    for number in (0, -5, -1.0, "0GiB", "0.1B"):
        with pytest.raises(ValueError, match="memory must be at least 1 byte, got"):
            read_bytes(number)
    for number in (0.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="memory must be a whole number of bytes, got"):
            read_bytes(number)
    for wrong in (True, None, [1]):
        with pytest.raises(TypeError, match="memory must be a number of bytes or a size such as 4GiB, got"):
            read_bytes(wrong)
    with pytest.raises(ValueError, match="memory must be at least 1 byte, got 0"):
        lipscope.GolubKahan(memory=0)


@pytest.mark.parametrize(("hiding", "dtype"), [(-1e9, torch.float32), (-1e20, torch.float64)])
def test_entries_that_a_finite_term_hides_cost_no_digits(hiding, dtype):
    """−1e9 instead of −inf: tiles accept what matrices accept, with the same allowance and the same products."""
    additive = torch.zeros(N, N).masked_fill(torch.ones(N, N).triu(1).bool(), hiding)
    X = cases.random(B, N, 10, seed=3).to(dtype)
    u = cases.random(B, N * 10, seed=4).to(dtype)
    written = AttentionOperator.at(layer("causal", 2, dtype), X, tiled=False)
    for subject in (layer(additive, 2, dtype), layer(None, 2, dtype, bias=additive.to(dtype))):
        dense = AttentionOperator.at(subject, X, tiled=False)
        for keep in (0, 1 << 30):
            with using_tiling(Tiling(tile=(8, 11), keep=keep)):
                tiles = AttentionOperator.at(subject, X, tiled=True)
                heads = HeadOperator.at(subject, X, tiled=True)
            assert tiles.rounding_error == dense.rounding_error == heads.rounding_error == written.rounding_error
            assert float((tiles.matvec(u) - written.matvec(u)).norm() / written.matvec(u).norm()) < 1e-5


def test_far_entries_of_alibi_do_not_count():
    """A slope of 8 puts terms of thousands where nothing is seen; the allowance is that of what is seen, tiled or not."""
    n = 300
    distance = (torch.arange(n)[:, None] - torch.arange(n)).clamp_min(0).double()
    slopes = torch.tensor([8.0, 4.0, 2.0, 1.0]).double()
    X = cases.random(1, n, 10, seed=3)
    subject = layer("causal", bias=-slopes[:, None, None] * distance)
    dense, tiles = (AttentionOperator.at(subject, X, tiled=tiled).core.score_size for tiled in (False, True))
    plain = AttentionOperator.at(layer("causal"), X).core.score_size
    assert tiles == dense
    assert plain < tiles < plain + 8 * n / 4


@pytest.mark.parametrize("tiled", [False, True])
def test_terms_that_leave_no_digits_are_refused(tiled):
    """Where every entry of a row has the same huge term, the row's probabilities are rounding errors."""
    X = cases.random(1, N, 10, seed=3).float()
    additive = torch.zeros(N, N)
    additive[4] = -1e9
    with pytest.raises(FloatingPointError, match=r"scores of size 1.0e\+09 leave no correct digits"):
        AttentionOperator.at(layer(None, 2, torch.float32, bias=additive), X, tiled=tiled)


@pytest.mark.parametrize("sharp", [1.0, 8.0, 40.0])
def test_a_saturated_softcap_keeps_its_digits_in_float32(sharp):
    """1 − tanh² loses them where tanh is almost 1; there the slope is small but all that moves the output."""
    q, k, v = (sharp**0.5 * cases.random(2, 3, 40, 8, seed=s) for s in range(3))
    rule, tiling = ScoreRule(softcap=2.0), Tiling(tile=(16, 16))
    exact = Linearisation.at(q, k, v, rule).W
    single = [t.float() for t in (q, k, v)]
    held = exact > 1e-30  # float32 has no smaller numbers of full length
    error = Linearisation.at(*single, rule).W.double() / exact - 1
    assert float(error[held].abs().max()) < 1e-5 * sharp
    tiles = TiledLinearisation.at(*single, rule, tiling=tiling)
    assert tiles.kept is not None
    W = torch.cat([torch.cat([W for _, W in row], -1) for row in tiles.kept], -2).double() * tiles.scale.flatten(1, 2)
    assert float((W.reshape(exact.shape) / exact - 1)[held].abs().max()) < 1e-5 * sharp


def mask_bytes(core: TiledLinearisation) -> int:
    """What the masks of all tiles take."""
    factors = [f for strip in core.strips for tile in strip.tiles if tile.visible for f in tile.visible.factors]
    return sum(factor.untyped_storage().nbytes() for factor in factors)


def test_masks_of_padded_batches_stay_small():
    """A boundary per input, not a matrix per input and head, and nothing is copied for chosen inputs and single heads."""
    n, many, real = 1024, 6, torch.ones(6, 1024, dtype=torch.bool)
    real[1, :200] = real[2, 700:] = real[3, ::3] = False
    sizes = {}
    for name, mask in {
        "causal": "causal", "left": "causal&pad-left:0,100,200,300,400,500", "right": "pad-right:0,100,200,300,400,500",
        "holes": lipscope.masks.as_mask("causal") & RealTokens(real, keys_only=True),
    }.items():  # fmt: skip
        subject = layer(mask, 2, torch.float32, d=4, dh=1)
        core = AttentionOperator.at(subject, cases.random(many, n, 4, seed=3).float(), tiled=True).core
        for other in (core, core.per_head(H), core.select(torch.tensor([3, 1]))):
            sizes[name, other.layout.items] = mask_bytes(other)
    assert max(sizes.values()) <= sizes["causal", many * 2] + 64 * n, sizes


def test_masks_that_are_matrices_are_not_copied():
    """Boolean masks per input and per head stay the tensors that were given; so do additive terms."""
    n = 100
    for shape in ((3, 1, n, n), (1, H, n, n), (3, H, n, n)):
        allowed, additive = cases.random(*shape, seed=1) > -1, cases.random(*shape, seed=2)
        q, k, v = (cases.random(3, heads, n, 3, seed=s) for s, heads in enumerate((H, 2, 2)))
        rule = ScoreRule(allowed=allowed, additive=additive)
        core = TiledLinearisation.at(q, k, v, rule, tiling=Tiling(tile=(16, 32), keep=0))
        for other in (core, core.per_head(H), core.select(torch.tensor([2, 0])), core.per_head(H).select(torch.tensor([5]))):
            assert other.additive.matrices.data_ptr() == additive.data_ptr()
            for strip in other.strips:
                for tile in strip.tiles:
                    (own,) = tile.visible.factors
                    assert own.untyped_storage().data_ptr() == allowed.untyped_storage().data_ptr()


def test_terms_that_are_the_same_for_all_queries():
    """An additive term and a mask over keys alone, as models hand them over for padding."""
    q, k, v = (cases.random(2, 3, 20, 4, seed=s) for s in range(3))
    rule = ScoreRule(additive=cases.random(2, 1, 1, 20, seed=3), allowed=cases.random(2, 1, 1, 20, seed=4) > -1)
    dense, tiles = Linearisation.at(q, k, v, rule), TiledLinearisation.at(q, k, v, rule, tiling=Tiling(tile=(6, 7)))
    torch.testing.assert_close(tiles.o, dense.o)
    for one, other in zip(dense.vjp(dense.o), tiles.vjp(dense.o), strict=True):
        torch.testing.assert_close(other, one)
