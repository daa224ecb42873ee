"""Certified upper bounds for σ at one input, closed form and deterministic, of all heads together.

With the blocks J_ij = M_ij + K_ij + δ_ij Q_i of ``bounds.blocks``:

**Parts**: σ is at most the norm of the n×n matrix of the norms of the blocks; and σ ≤ ‖M‖ + ‖K + Q‖, with that of
‖K_ij‖_F + δ_ij‖Q_i‖_F for the second. The numbers are those of ‖J‖_F. With A the average of the P^h, the mean part
M = Σ_h P^h ⊗ W_O^hW_V^h has

    ‖M‖ ≤ ‖W_O‖‖W_V‖ max_h‖P^h‖        ‖M‖ ≤ ‖A‖‖W_OW_V‖ + ‖W_O‖‖W_V‖ max_h‖|P^h − A|‖

For several heads ‖K‖ + ‖Q‖ may be less than ‖K + Q‖ by blocks: see ``bounds.joined``.

**Row Gram**: with S_ij = M_ij + K_ij and any weights ω_ij, ω_i > 0, by Cauchy–Schwarz,

    ‖Σ_j S_ij ε_j + Q_i ε_i‖² ≤ λ_i( Σ_j ‖ε_j‖²/ω_ij + ‖ε_i‖²/ω_i ),    λ_i = ‖Σ_j ω_ij S_ijS_ijᵀ + ω_i Q_iQ_iᵀ‖

Sum over i and exchange the sums: σ² ≤ max_j ( Σ_i λ_i/ω_ij + λ_j/ω_j ). With N_ij ≥ ‖S_ij‖, any x > 0 and ω_ij = x_j/N_ij
the triangle inequality gives λ_i ≤ (Nx)_i and Collatz–Wielandt's bound for the norms of blocks; the norm of the sum itself
is smaller, since the blocks of a row point in different directions; the least of both is taken for λ_i.

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
from lipscope.bounds.joined import estimate, joined_parts
from lipscope.bounds.products import PANEL, Products
from lipscope.bounds.spectral_upper import DIRECT, PASSES, best_vectors, matrix_norm_upper, top_eigenvalue
from lipscope.bounds.weights import layer_weights

if TYPE_CHECKING:
    from lipscope.spectral.result import SpectralNorm

# Matrices of several strips are kept between passes over the scores up to so many of the n×n arrays of a strip's height.
KEPT = 6
# Second moments of all heads are bounded where so many times their estimate is less than the norms of blocks, if these
# are so many times the mean part.
WASTE, DOMINANT = 1.4, 1.3
# Choices of weights that row Grams are computed for.
ROUNDS = 2
# Operations of a row Gram up to which it is part of every certificate.
CHEAP = 1.5e9
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

    Cost: ``"fast"`` about 4·H²·n²·(d_head + n) + 6·H·n²·d_head² + 16·H·n·d_head³ flops, with rotary embeddings
    2·H²·n²·d_head² + 4·H²·n·d_head³ in the place of the first; ``"tight"`` besides, twice, 2·n²·d² + 8·n·d³.

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
        precise, weights = layer.to(torch.float64), layer_weights(layer)
        singles = [precise.head(h) for h in range(layer.heads)] if heads else [precise]
        products = [Products(one, weights.head(h) if heads else weights) for h, one in enumerate(singles)]
        for b, x in enumerate(X):
            gain = x.new_ones(x.shape[0]) if gains is None else gains[b]
            for single, known in zip(singles, products, strict=True):
                # The scale of a single head may be far from that of the others.
                one = single.for_input(b)
                scaled, tokens, shift, more = balanced(one, x, offset) if heads else (one, x, offset, 0)
                at = Blocks(scaled, tokens, offset=shift, products=known if scaled is one else None, height=height)
                found = math.inf if rung is None else min(_candidates(at, gain, rung).values())
                before = None if norm is None else norm.select(torch.tensor([b], device=X.device))
                pair = torch.tensor([found, frobenius(at, before)[0]], dtype=torch.float64, device=X.device)
                values.append(times_power(pair, more, outwards=1))
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
    if pairs // H * n**2 > KEPT // 2 * blocks.ENTRIES:
        certificate *= PASSES / 2
    if scope == "head":
        certificate += 8.0 * inputs * H * (2 * n**2 * dk**2 + 16 * n * dk**3)
    elif H > 1:
        certificate += 4.0 * inputs * H * (6 * n**2 * dk**2 + 16 * n * dk**3)
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
        precise = layer.to(torch.float64)
        at = Blocks(precise, x, products=Products(precise, layer_weights(layer)), height=height)
        candidates = _candidates(at, x.new_ones(x.shape[0]), "tight")
    given = {"n": x.shape[0], "heads": layer.heads}
    values = times_power(torch.tensor(list(candidates.values()), dtype=torch.float64), power, outwards=1).tolist()
    return [
        Bound(f"certificates.{name}", value, "local", "this input; any mask and score rule", OURS, given)
        for name, value in zip(candidates, values, strict=True)
    ]


def height_within(layer: Attention, n: int, heads: int, memory: int) -> int | None:
    """Rows of a strip with which a certificate takes at most ``memory`` bytes, at least 4; None for no fewer than usual.

    Beside the strip there are about eight copies of the tokens, ten products of weights, d×d each, and products of the
    coordinates of values and keys, head by head. Of what a strip makes half as much again was measured as is kept, and 2 MiB
    lie in holes of the heap.
    """
    dk, dv = layer.head_width, layer.value_width
    memory -= (2 << 20) + 8 * (layer.width * (8 * n + 10 * layer.width) + 3 * n * dv * max(dk, dv))
    row = 8 * heads * (3 * (16 + KEPT) * n // 2 + 4 * dk * dv + (0 if layer.rotary is None else 4 * n * dk))
    if row * n <= memory and n <= DENSE:
        return None
    return min(n, max(4, memory // row))


def _candidates(at: Blocks, gain: Tensor, rung: str) -> dict[str, float]:
    """The certificates of a rung, by name: dear ones where they may be the least."""
    if at.margin >= 0.1:
        return {"parts": math.inf, "row_gram": math.inf}
    (H, n, _), own = at.q.shape, torch.full_like(gain, math.inf)
    side = H * at.layer.value_width
    gram = rung == "tight" or H == 1 or ROUNDS * (2 * n**2 * side**2 + 8 * n * side**3) <= CHEAP
    for strip in at.strips() if H == 1 and n**2 <= blocks.SMALL else ():
        own[strip.rows] = strip.image.queries[0]
    (near, whole), x = _block_sizes(at, gain, own)
    if H > 1:
        mean = _mean_part(at, gain)
        whole = min(whole, mean + near)
        # Second moments are dear, and less than norms of blocks where heads are many and the mean part is small.
        if whole > DOMINANT * mean and mean + WASTE * estimate(at, gain) < whole:
            whole = min(whole, mean + joined_parts(at, gain))
    found = {"parts": whole}
    if gram:
        found["row_gram"] = _row_gram(at, gain, x * gain, own)
    least = at.underflow * float(gain.max())
    return {name: value * (1 + 4 * at.margin) + least for name, value in found.items()}


def _norms(at: Blocks, count: int, matrices: Callable[[Strip], Tensor], rtol: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Norms (k,) of nonnegative n×n matrices known strip by strip, (k, r, c), with the vectors at which they were found."""
    # Kept between passes where they are small beside what a strip takes.
    small = at.single or count * at.n <= KEPT * len(at.q) * at.height
    kept = [(strip.columns, matrices(strip)) for strip in at.strips()] if small else None

    def grams(x: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for columns, N in kept or ((strip.columns, matrices(strip)) for strip in at.strips()):
            found[:, columns] += (N.mT @ (N @ x[:, columns, None]))[..., 0]
        return found

    return best_vectors(grams, at.q.new_ones(count, at.n), PASSES, rtol=rtol if small else 1e-3)


def _block_sizes(at: Blocks, gain: Tensor, own: Tensor) -> tuple[list[float], Tensor]:
    """Norms of the matrices of ‖K_ij + δ_ij Q_i‖ and of ‖J_ij‖, and the x of the second."""

    def matrices(strip: Strip) -> Tensor:
        keys, sizes, queries = _near_norms(strip, own)
        found = torch.stack([keys, sizes])
        diagonals = strip.own(found).add_(queries)
        # The weights of a single head's row Gram are the better ones without.
        if len(at.q) > 1:
            diagonals[1].copy_(torch.minimum(diagonals[1], strip.own_size))
        return found.mul_(gain[strip.columns])

    norms, vectors = _norms(at, 2, matrices, rtol=1e-6)
    return norms.tolist(), vectors[1]


def _near_norms(strip: Strip, own: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Upper bounds for ‖K_ij‖_F, ‖M_ij + K_ij‖ and ‖Q_i‖."""
    sizes, keys, queries = strip.part_sizes
    sizes = torch.minimum(sizes, strip.mean_norms + keys)
    if strip.head_norms is not None:
        sizes = torch.minimum(sizes, strip.head_norms)
    return keys, sizes, torch.minimum(queries, own[strip.rows])


def _mean_part(at: Blocks, gain: Tensor) -> float:
    """A bound for ‖M‖."""
    H, joint = at.layer.heads, at.weights.out * at.weights.values

    def matrices(strip: Strip) -> Tensor:
        return torch.cat([strip.P, strip.P.mean(0, keepdim=True)]).mul_(gain[strip.columns])

    def deviations(strip: Strip) -> Tensor:
        return (strip.P - strip.P.mean(0)).abs_().mul_(gain[strip.columns])

    norms = _norms(at, H + 1, matrices)[0]
    most, average = float(norms[:H].max()), float(norms[H]) * at.weights.total
    if average >= joint * most:
        return joint * most
    # Differences of probabilities are off by what both are off by.
    apart = float(_norms(at, H, deviations)[0].max()) + 2 * at.margin * most
    return min(joint * most, average + joint * apart)


def _row_gram(at: Blocks, gain: Tensor, x: Tensor, own: Tensor) -> float:
    """The least row-Gram bound over some choices of x, the first being the leading vector of the norms of the blocks."""
    best = math.inf
    for _ in range(ROUNDS):
        x = (x / x.max()).clamp_min(1e-100)
        sums = torch.zeros_like(x)
        for strip in at.strips():
            _, N, query = _near_norms(strip, own)
            column = x[strip.columns]
            # Any sizes give weights; none is below what rounding may do to its square, which counts more the smaller it is.
            query = torch.maximum(query, strip.errors[2][1].sqrt())
            weights = torch.where(N > 0, column / N.clamp_min(1e-280), 0.0)
            own_weights = torch.where(query > 0, x[strip.rows] / query.clamp_min(1e-280), 0.0)
            norms = _row_norms(strip, weights, own_weights)
            norms = torch.minimum(norms, N @ column + query * x[strip.rows])
            # Where N vanishes so do the blocks.
            sums[strip.columns] += (norms[:, None] * N).sum(0)
            sums[strip.rows] += norms * query
        value = float((gain.square() * sums / x).max()) * (1 + (2 * at.n + 8) * torch.finfo(x.dtype).eps)
        if not math.isfinite(value) or value == 0:
            return min(best, value)
        best = min(best, math.sqrt(value))
        x = sums * gain.square()
    return best


def _row_norms(strip: Strip, weights: Tensor, own: Tensor) -> Tensor:
    """λ_i of every row, its rounding included."""
    (H, r, dv), c = strip.o.shape, strip.k.shape[1]
    step = strip.at.rows_of(H * dv * max(c if strip.at.rotation is not None else 1, H * dv))
    found = []
    root = strip.at.products.root
    for start in range(0, r, step):
        part = slice(start, min(r, start + step))
        Z = _row_grams(strip, part, weights[part], own[part]).reshape(-1, H * dv, H * dv)
        if H == 1:
            # In the coordinates of the query parts.
            Y = strip.image.through(strip.image.through(Z).mT) + own[part, None, None] * strip.image.query_grams[0, part]
        else:
            Y = Z if root is None else _between(root, Z)
        Y = (Y + Y.mT) / 2
        if Y.shape[-1] > DIRECT:
            found.append(Y.new_tensor([top_eigenvalue(each) for each in Y]))
        else:
            found.append(matrix_norm_upper(Y, 1 if Y.shape[-1] > 64 else None, symmetric=True, single=Y.shape[-1] >= 32))
    (off, rounding), _, (own_off, own_rounding) = strip.errors
    _, keys, queries = strip.part_sizes
    # Squares of parts that are off: ‖SSᵀ − S'S'ᵀ‖ ≤ (2‖S‖ + ‖S − S'‖)‖S − S'‖.
    rounding = rounding + (2 * (strip.mean.clamp_min(0).sqrt() + keys) + off) * off
    return torch.cat(found) + (weights * rounding).sum(-1) + own * (own_rounding + (2 * queries + own_off) * own_off)


def _between(R: Tensor, Z: Tensor) -> Tensor:
    """R Z Rᵀ for an upper triangle R and symmetric matrices Z (k, m, m), without most of the products with zeros."""
    Y, step = Z.new_empty(len(Z), len(R), len(R)), max(PANEL, len(R) // 4)
    for start in range(0, len(R), step):
        rows = slice(start, start + step)
        T = R[rows, start:] @ Z[:, start:, start:]
        for other in range(start, len(R), step):
            columns = slice(other, other + step)
            block = T[:, :, other - start :] @ R[columns, other:].mT
            Y[:, rows, columns], Y[:, columns, rows] = block, block.mT
    return Y


def _row_grams(strip: Strip, part: slice, weights: Tensor, own: Tensor) -> Tensor:
    """Σ_j ω_ij (M_ij + K_ij)(M_ij + K_ij)ᵀ before W_O, (rows, H, dv, H, dv); of several heads with ω_i Q_iQ_iᵀ."""
    grams, root, (H, _, dv), v = strip.at.grams, strip.at.products.root, strip.o.shape, strip.v
    P, W, o, C = strip.P[:, part], strip.W[:, part], strip.o[:, part], strip.covariances[:, part]
    Z = weights.new_empty(len(weights), H, dv, H, dv)

    def cross(g: int, h: int) -> Tensor:
        """Σ_j ω_ij P_ij^g W_V^g a_ij^h W_ij^h (v_j − o_i)^hᵀ."""
        each, N = weights * P[g] * W[h], grams.pairs("vk")[g, h].mT
        if strip.at.rotation is None:
            return (strip.q[h, part] @ N)[..., None] * (each @ v[h] - each.sum(-1, keepdim=True) * o[h])[:, None]
        image = strip.image.gradients[0, part] if H == 1 and root is None else strip.a[h, part] @ N
        moved = (image * each[..., None]).mT @ torch.nn.functional.pad(v[h], (0, 1), value=1.0)
        return moved[..., :-1] - moved[..., -1:] * o[h, :, None]

    for g in range(H):
        for h in range(g, H):
            # Second moments about o_i from those about 0: no array has a vector for every pair of tokens.
            each = weights * W[g] * W[h] * strip.slopes[g, h, part]
            block = (each @ (v[g, :, :, None] * v[h, :, None]).flatten(1)).reshape(-1, dv, dv)
            block -= (each @ v[g])[..., None] * o[h, :, None]
            block += o[g, ..., None] * (each.sum(-1, keepdim=True) * o[h] - each @ v[h])[:, None]
            mixed = cross(g, h)
            mixed = mixed + (mixed if g == h else cross(h, g)).mT
            block += (weights * P[g] * P[h]).sum(-1)[:, None, None] * grams.pairs("vv")[g, h] + mixed
            if H > 1:
                block += own[:, None, None] * (C[g] @ grams.pairs("qq")[g, h] @ C[h].mT)
            Z[:, g, :, h], Z[:, h, :, g] = block, block.mT
    return Z
