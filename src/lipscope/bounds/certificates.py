"""Certified upper bounds for σ at one input, closed form and deterministic, of all heads together.

With the blocks J_ij = M_ij + K_ij + δ_ij Q_i of ``bounds.blocks``:

**Parts**: σ ≤ ‖M‖ + ‖K + Q‖. The mean part is M = Σ_h P^h ⊗ W_O^hW_V^h. With the singular value
decompositions W_O^hW_V^h = U_hS_hY_hᵀ and any p_h ≥ ‖P^h‖ it is the product of [U_h√(p_hS_h)], of a block-diagonal matrix of
the P^h/p_h, and of [Y_h√(p_hS_h)]ᵀ, so that

    ‖M‖ ≤ ‖[U_1√(p_1S_1), …]‖ · ‖[Y_1√(p_1S_1), …]‖

where heads enter by how much their ranges overlap, not by a sum. One direction t of the tokens, that of the average of the
P^h, is taken out first, ‖M‖² ≤ ‖M(ttᵀ ⊗ I)‖² + ‖M((I − ttᵀ) ⊗ I)‖²: the first is a matrix of d columns. The other part is at
most the norm of the n×n matrix of ‖K_ij‖_F + δ_ij‖Q_i‖_F: blocks by way of scores have few large directions.

**Row Gram**: with S_ij = M_ij + K_ij and any weights ω_ij, ω_i > 0, by Cauchy–Schwarz,

    ‖Σ_j S_ij ε_j + Q_i ε_i‖² ≤ λ_i( Σ_j ‖ε_j‖²/ω_ij + ‖ε_i‖²/ω_i ),    λ_i = ‖Σ_j ω_ij S_ijS_ijᵀ + ω_i Q_iQ_iᵀ‖

Sum over i and exchange the sums: σ² ≤ max_j ( Σ_i λ_i/ω_ij + λ_j/ω_j ). With N_ij ≥ ‖S_ij‖, any x > 0 and ω_ij = x_j/N_ij
the triangle inequality gives λ_i ≤ (Nx)_i and Collatz–Wielandt's bound for the norms of blocks; the norm of the sum itself
is smaller, since the blocks of a row point in different directions. N need not be a bound: any numbers near the norms of the
blocks, zero only with them, give good weights.

Everything is computed in float64, a strip of rows of the scores at a time, and rounded up by what ``bounds.blocks`` says of
its errors. Ours; proofs in docs/theory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.attention.norms import NormLinearisation
from lipscope.attention.validation import balanced, times_power
from lipscope.bounds import blocks
from lipscope.bounds.blocks import Blocks, Strip, frobenius
from lipscope.bounds.bound import OURS, Bound, bound
from lipscope.bounds.spectral_upper import Grams, best_vectors, matrix_norm_upper
from lipscope.bounds.weights import layer_weights

if TYPE_CHECKING:
    from lipscope.spectral.result import SpectralNorm

# Most passes over the scores for a bound by Collatz–Wielandt; the matrices of a single strip are kept between them.
PASSES = 40
# Choices of weights that row Grams are computed for.
ROUNDS = 2
# Operations of a row Gram up to which it is part of every certificate.
CHEAP = 1e9
# Tokens up to which all rows may be one strip.
DENSE = 2048


def certified_upper(
    layer: Attention,
    X: Tensor,
    scope: str = "attention",
    *,
    rung: str = "fast",
    gains: Tensor | None = None,
    offset: Tensor | None = None,
    height: int | None = None,
) -> Tensor:
    """A proven upper bound for σ at every input.

    The value covers the rounding of its own float64 computation, see ``head_rounding``; it is infinite when the relative
    margin of probabilities exceeds 0.1, that is when float64 does not resolve the scores.

    Args:
        layer: the attention layer: any mask, biases, soft-cap, grouped queries, sinks, rotary embeddings.
        X: tokens (B, n, d).
        scope: ``"attention"`` (all heads and W_O) or ``"head"`` (each head before W_O).
        rung: ``"fast"`` (parts; the row Gram of single heads and small layers) or ``"tight"`` (the row Gram besides).
        gains: (B, n), when token j of X is itself a function of its own input with Jacobian of norm gains_j: the bound is
            then for the composition.
        offset: (d,), to be added to all tokens.
        height: rows of the scores that are computed at a time, by default as many as keep to a fixed memory.

    Returns:
        Float64 bounds of shape (B,), or (B, H) for scope ``"head"``.

    Cost: ``"fast"`` about 4·H²·n²·(d_head + n) flops, with rotary embeddings 2·H²·n²·d_head² + 4·H²·n·d_head³; ``"tight"``
    besides, twice, 2·n²·d² + 12·n·d³.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = lipscope.Attention(q=0 * W, k=W, v=W)
        >>> round(float(certified_upper(layer, torch.randn(1, 5, 2, dtype=torch.float64))), 6)
        1.0
    """
    return certified_and_sized(layer, X, scope, rung=rung, gains=gains, offset=offset, height=height)[0]


def certified_and_sized(
    layer: Attention,
    X: Tensor,
    scope: str = "attention",
    *,
    rung: str | None = "fast",
    gains: Tensor | None = None,
    offset: Tensor | None = None,
    height: int | None = None,
    norm: NormLinearisation | None = None,
) -> tuple[Tensor, Tensor]:
    """What ``certified_upper`` says (infinity for ``rung`` None), and ‖J‖_F, from the same blocks.

    With ``norm``, of which X are the images g∘z before its offset, ‖J‖_F is that of attention behind it.
    """
    if scope not in ("attention", "head"):
        raise ValueError(f"no certificate for scope {scope!r}; there are certificates for: attention, head")
    offset, heads = None if offset is None else offset.double(), scope == "head"
    layer, X, offset, power = balanced(layer, X.detach().double(), offset, heads=heads)
    unit = 0
    if gains is not None:
        unit = math.frexp(float(gains.max()))[1]
        gains = times_power(gains.to(X), -unit)
    values: list[Any] = []
    with torch.no_grad():
        weights, precise = layer_weights(layer), layer.to(torch.float64)
        for b, x in enumerate(X):
            one = precise.for_input(b)
            gain = x.new_ones(x.shape[0]) if gains is None else gains[b]
            for single in [one.head(h) for h in range(layer.heads)] if heads else [one]:
                # The scale of a single head may be far from that of the others.
                scaled, tokens, shift, more = balanced(single, x, offset) if heads else (one, x, offset, 0)
                at = Blocks(scaled, tokens, offset=shift, weights=None if heads else weights)
                found = math.inf if rung is None else min(_candidates(at, gain, rung, height).values())
                before = None if norm is None else norm.select(torch.tensor([b], device=X.device))
                pair = torch.tensor([found, frobenius(at, before, height)[0]], dtype=torch.float64, device=X.device)
                values.append(times_power(pair, more, outwards=1))
    # Nine matrices as wide as all heads together: too much to keep for every layer of a model.
    weights.kept.clear()
    shape = (len(X), layer.heads) if heads else (len(X),)
    bounds, sizes = torch.stack(values).mT.reshape(2, *shape)
    return times_power(bounds, power + unit, outwards=1), times_power(sizes, power)


def affordable(layer: Attention, n: int, result: SpectralNorm, inputs: int, scope: str) -> bool:
    """Whether the fast certificate is estimated to cost no more than the measurement that gave ``result`` (a flat batch).

    Small certificates (below about a tenth of a second) always are; an exact result needs none. Float64 counts twice, and
    small batched products run at half the speed of large ones.
    """
    if "probabilistic" not in result.upper_kind:
        return False
    H, dk, d = layer.heads, layer.head_width, layer.width
    pairs = H if scope == "head" else H**2
    certificate = 2.0 * inputs * pairs * n**2 * (2 * dk**2 if layer.rotary is not None else 4 * (dk + min(n, dk**2 / 4)))
    if pairs // H * n**2 > blocks.ENTRIES:
        certificate *= PASSES / 2
    if scope == "head":
        certificate += 8.0 * inputs * H * (2 * n**2 * dk**2 + 16 * n * dk**3)
    width = 3 * dk if scope == "head" else d
    pair = 4 * n * width * (layer.q.shape[0] + layer.k.shape[0] + layer.v.shape[0]) + 16 * H * n**2 * dk
    if scope != "head" and layer.out is not None:
        pair += 4 * n * layer.out.numel()
    steps = float(result.iterations.sum()) / (H if scope == "head" else 1)
    return certificate <= max(steps * pair, 1e9)


@bound("certificates.row_gram", needs="x")
@bound("certificates.parts", needs="x")
def local_bounds(layer: Attention, x: Tensor, *, height: int | None = None) -> list[Bound]:
    """Every certificate of the whole layer at tokens x (n, d), each as a ``Bound``; ``height`` as in ``certified_upper``."""
    layer, x, _, power = balanced(layer, x.detach().double())
    with torch.no_grad():
        at = Blocks(layer.to(torch.float64), x, weights=layer_weights(layer))
        candidates = _candidates(at, x.new_ones(x.shape[0]), "tight", height)
        at.weights.kept.clear()
    given = {"n": x.shape[0], "heads": layer.heads}
    values = times_power(torch.tensor(list(candidates.values()), dtype=torch.float64), power, outwards=1).tolist()
    return [
        Bound(f"certificates.{name}", value, "local", "this input; any mask and score rule", OURS, given)
        for name, value in zip(candidates, values, strict=True)
    ]


def height_within(n: int, heads: int, width: int, memory: int) -> int | None:
    """Rows of a strip with which a certificate takes at most ``memory`` bytes, at least 16; None for no fewer than usual.

    Beside the strip there are about eight copies of the tokens and ten products of weights, d×d each.
    """
    memory -= 8 * width * (8 * n + 10 * width)
    if 16 * 8 * heads * n * n <= memory and n <= DENSE:
        return None
    return min(n, max(16, memory // (16 * 8 * heads * n)))


def _candidates(at: Blocks, gain: Tensor, rung: str, height: int | None) -> dict[str, float]:
    """The certificates of a rung, by name."""
    if at.margin >= 0.1:
        return {"parts": math.inf, "row_gram": math.inf}
    sizes, x = _block_sizes(at, gain, height)
    found = {"parts": _mean_part(at, gain, height) + sizes["K"]}
    if rung == "tight" or at.layer.heads == 1 or _row_gram_cost(at) <= CHEAP:
        found["row_gram"] = _row_gram(at, gain, x, height)
    least = at.underflow * float(gain.max())
    return {name: value * (1 + 4 * at.margin) + least for name, value in found.items()}


def _row_gram_cost(at: Blocks) -> float:
    """Floating-point operations of the row Gram."""
    side = at.layer.heads * at.layer.value_width
    return float(ROUNDS * (2 * at.n**2 * side**2 + 12 * at.n * side**3))


def _norms(
    at: Blocks, names: list[str], matrices: Callable[[Strip], dict[str, Tensor]], height: int | None
) -> dict[str, Any]:
    """Norms of nonnegative n×n matrices that are known strip by strip, each with the vector at which it was found."""

    def grams(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {name: torch.zeros_like(x) for name, x in vectors.items()}
        for strip in at.strips(height):
            for name, N in matrices(strip).items():
                if name in vectors:
                    found[name][strip.columns] += N.mT @ (N @ vectors[name][strip.columns])
        return found

    products: Grams = grams
    return best_vectors(products, {name: at.q.new_ones(at.n) for name in names}, PASSES)


def _block_sizes(at: Blocks, gain: Tensor, height: int | None) -> tuple[dict[str, float], Tensor]:
    """The norm of the matrix of ‖K_ij‖_F + δ_ij‖Q_i‖_F, and the leading vector of one near the norms of whole blocks."""

    def matrices(strip: Strip) -> dict[str, Tensor]:
        keys, whole, own = _near_norms(strip)
        for N in (keys, whole):
            strip.own(N).add_(own)
        return {"K": keys * gain[strip.columns], "N": whole * gain[strip.columns]}

    found = _norms(at, ["K", "N"], matrices, height)
    return {name: value for name, (value, _) in found.items()}, found["N"][1]


def _near_norms(strip: Strip) -> tuple[Tensor, Tensor, Tensor]:
    """Upper bounds for ‖K_ij‖_F, numbers near ‖M_ij + K_ij‖ that vanish only with them, and upper bounds for ‖Q_i‖_F."""
    _, off, own_off, _ = strip.errors
    keys = (strip.key.clamp_min(0) + off).sqrt()
    weights = strip.at.weights
    # The mean part has the directions of W_OW_V: its norm is about that share of its Frobenius norm.
    share = max(w.value / max(w.out_size * w.sizes[2], 1e-300) for w in weights.image)
    whole = keys + share * strip.mean.clamp_min(0).sqrt()
    if strip.at.head_norms is not None:
        whole = strip.at.head_norms[strip.rows, strip.columns].clone()
    return keys, whole, (strip.query.clamp_min(0) + own_off).sqrt()


def _mean_part(at: Blocks, gain: Tensor, height: int | None) -> float:
    """A bound for ‖M‖."""
    heads = [str(h) for h in range(at.layer.heads)]

    def matrices(strip: Strip) -> dict[str, Tensor]:
        P = strip.P * gain[strip.columns]
        return {"mean": P.mean(0)} | dict(zip(heads, P, strict=True))

    found = _norms(at, ["mean", *heads], matrices, height)
    t = torch.nn.functional.normalize(found["mean"][1], dim=0)
    images = gain.new_zeros(len(heads), at.n)
    for strip in at.strips(height):
        images[:, strip.rows] = (strip.P * gain[strip.columns]) @ t[strip.columns]

    def rest(strip: Strip) -> dict[str, Tensor]:
        # Columns that a strip does not hold have P = 0; what is taken from them is counted by ``outside``.
        inside = strip.P * gain[strip.columns] - images[:, strip.rows, None] * t[strip.columns]
        return dict(zip(heads, inside.abs(), strict=True))

    outside = [0.0] * len(heads)
    for strip in at.strips(height):
        away = float(t.square().sum() - t[strip.columns].square().sum())
        for h, image in enumerate(images[:, strip.rows]):
            outside[h] += max(0.0, away) * float(image.square().sum())
    left = _norms(at, heads, rest, height)
    whole = _overlap(at, [found[h][0] for h in heads])
    # ‖M‖² ≤ ‖M(ttᵀ ⊗ I)‖² + ‖M((I − ttᵀ) ⊗ I)‖² for a unit vector t of tokens.
    inner, grams = images @ images.mT, at.grams
    side = len(heads) * at.layer.value_width
    product = (grams.out * inner[:, :, None, None]).transpose(1, 2).reshape(side, side)
    V = at.layer.v.reshape(at.layer.kv_heads, -1, at.layer.width).repeat_interleave(
        at.layer.heads // at.layer.kv_heads, dim=0
    )
    V = V.flatten(0, 1)
    along = _root_norm(V.mT @ product @ V)
    cut = math.hypot(
        along, _overlap(at, [math.hypot(left[h][0], math.sqrt(out)) for h, out in zip(heads, outside, strict=True)])
    )
    return min(whole, cut)


def _overlap(at: Blocks, norms: list[float]) -> float:
    """‖[U_1√(p_1S_1), …]‖·‖[Y_1√(p_1S_1), …]‖ for norms p_h."""
    p = at.q.new_tensor(norms)
    left, right = (_root_norm(gram * (p[:, None] * p).sqrt()[:, None, :, None]) for gram in _balanced_grams(at))
    # What the rounding of the decompositions may have done.
    return left * right + 1e-12 * sum(
        size * w.out_size * w.sizes[2] for size, w in zip(norms, at.weights.image, strict=True)
    )


def _root_norm(gram: Tensor) -> float:
    side = math.isqrt(gram.numel())
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram.reshape(side, side))[-1]))) * (1 + 1e-12)


def _balanced_grams(at: Blocks) -> tuple[Tensor, Tensor]:
    """Gram matrices (H, dv, H, dv) of the matrices U_h√S_h and Y_h√S_h; kept for all inputs of a call."""
    kept, layer = at.weights.kept, at.layer
    if "balanced" not in kept:
        out = torch.eye(layer.output_width, dtype=layer.dtype, device=layer.device) if layer.out is None else layer.out
        sides: tuple[list[Tensor], list[Tensor]] = ([], [])
        for h, block in enumerate(out.split(layer.value_width, dim=1)):
            (Q, R), (Y, T) = (torch.linalg.qr(t) for t in (block, layer.head(h).v.mT))
            U, S, Z = torch.linalg.svd(R @ T.mT, full_matrices=False)
            for side, half in zip(sides, ((Q @ U), (Y @ Z.mT)), strict=True):
                side.append(torch.nn.functional.pad(half * S.sqrt(), (0, layer.value_width - len(S))))
        joined = [torch.cat(side, dim=1) for side in sides]
        kept["balanced"] = tuple((t.mT @ t).reshape(layer.heads, -1, layer.heads, layer.value_width) for t in joined)
    found: tuple[Tensor, Tensor] = kept["balanced"]
    return found


def _row_gram(at: Blocks, gain: Tensor, x: Tensor, height: int | None) -> float:
    """The least row-Gram bound over some choices of x, the first being the leading vector of the norms of the blocks."""
    best = math.inf
    for _ in range(ROUNDS):
        x = (x / x.max()).clamp_min(1e-100)
        sums = torch.zeros_like(x)
        for strip in at.strips(height):
            _, N, own = _near_norms(strip)
            column = x[strip.columns]
            weights = torch.where(N > 0, column / N.clamp_min(1e-280), 0.0)
            own_weights = torch.where(own > 0, x[strip.rows] / own.clamp_min(1e-280), 0.0)
            norms = _row_norms(strip, weights, own_weights)
            # Where N vanishes so do the blocks.
            sums[strip.columns] += (norms[:, None] * N).sum(0)
            sums[strip.rows] += norms * own
        value = float((gain.square() * sums / x).max()) * (1 + (2 * at.n + 8) * torch.finfo(x.dtype).eps)
        if not math.isfinite(value) or value == 0:
            return min(best, value)
        best = min(best, math.sqrt(value))
        x = sums * gain
    return best


def _row_norms(strip: Strip, weights: Tensor, own: Tensor) -> Tensor:
    """λ_i of every row, its rounding included."""
    (H, r, dv), c = strip.o.shape, strip.k.shape[1]
    step = strip.at.rows_of(H * dv * max(c, H * dv))
    found = []
    root = _output_root(strip.at)
    for start in range(0, r, step):
        part = slice(start, min(r, start + step))
        Z = _row_grams(strip, part, weights[part], own[part]).reshape(-1, H * dv, H * dv)
        Y = Z if root is None else root @ Z @ root.mT
        large = Y.shape[-1] > 64
        found.append(matrix_norm_upper((Y + Y.mT) / 2, 1 if large else None, symmetric=True, single=large))
    off, _, own_off, _ = strip.errors
    return torch.cat(found) + (weights * off).sum(-1) + own * own_off


def _output_root(at: Blocks) -> Tensor | None:
    """R with RᵀR = W_OᵀW_O, at most as tall as wide; None without W_O."""
    out = at.layer.out
    if out is None or out.shape[0] <= out.shape[1]:
        return out
    if "root" not in at.weights.kept:
        at.weights.kept["root"] = torch.linalg.qr(out, mode="r").R
    found: Tensor = at.weights.kept["root"]
    return found


def _row_grams(strip: Strip, part: slice, weights: Tensor, own: Tensor) -> Tensor:
    """Σ_j ω_ij (M_ij + K_ij)(M_ij + K_ij)ᵀ + ω_i Q_iQ_iᵀ before W_O for some rows, (rows, H, dv, H, dv)."""
    grams, heads = strip.at.grams, range(len(strip.W))
    P = strip.P[:, part].transpose(0, 1)
    D = (strip.W[:, part, :, None] * (strip.v[:, None] - strip.o[:, part, None])).transpose(0, 1)
    weighted = P * weights[:, None]
    Z = (weighted @ P.mT)[:, :, None, :, None] * grams.values.transpose(1, 2)
    if strip.at.rotation is None:
        q = strip.q[:, part]
        slopes = torch.stack([((q[g] @ grams.keys[g]) * q).sum(-1) for g in heads])
        joined = (D * weights.sqrt()[:, None, :, None]).transpose(1, 2).flatten(2)
        Z = Z + (joined.mT @ joined).reshape(Z.shape) * slopes.permute(2, 0, 1)[:, :, None, :, None]
        moved = weighted[:, None] @ D  # (rows, h, g, dv)
        image = torch.stack([q @ grams.value_key[g].mT for g in heads])  # (g, h, rows, dv)
        cross = image.permute(2, 0, 3, 1)[..., None] * moved.permute(0, 2, 1, 3)[:, :, None]
        Z = Z + cross + cross.permute(0, 3, 4, 1, 2)
    else:
        a = strip.a[:, part]
        for g in heads:
            slopes = ((a[g] @ grams.keys[g][:, None]) * a).sum(-1).transpose(0, 1) * weights[:, None]
            image = (a @ grams.value_key[g].mT[:, None]).transpose(0, 1) * weighted[:, g, None, :, None]
            Z[:, g] += (D[:, g].mT[:, None] @ (slopes[..., None] * D)).transpose(1, 2)
            cross = image.mT @ D
            Z[:, g] += cross.transpose(1, 2)
            Z[:, :, :, g] += cross.transpose(-1, -2)
    C = strip.covariances[:, part].transpose(0, 1)
    for g in heads:
        Z[:, g] += own[:, None, None, None] * ((C[:, g, None] @ grams.queries[g]) @ C.mT).transpose(1, 2)
    return Z
