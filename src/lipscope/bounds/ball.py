"""A constant that holds on a whole ball: ‖f(X') − f(X'')‖_F ≤ L(ρ)‖X' − X''‖_F for all X', X'' within ρ of X.

From entrywise score intervals, with ‖e_i‖² + ‖e_j‖² ≤ ρ² and ‖A‖ the largest ‖A_ij‖ (rotary embeddings make it depend
on the pair),

    |s'_ij − s_ij| ≤ ρ√(‖a_ij‖² + ‖b_ij‖²) + ½ρ²‖A‖  (i ≠ j)        |s'_ii − s_ii| ≤ ρ‖a_ii + b_ii‖ + ρ²‖A‖

follows P⁻ ≤ P' ≤ P⁺, and the certificates of one input hold with P⁺, with second moments about the old o_i, and with
‖a'_ij‖ ≤ ‖a_ij‖ + ρ‖A‖. Besides, σ(X') ≤ σ(X) + ‖J(X') − J(X)‖, where the blocks of the difference have norms of at
most how far P, a and v − o move. L is increasing, and without a soft-cap it tends to the local certificate as ρ → 0.
Ours; proof in docs/theory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.blocks import Blocks
from lipscope.bounds.bound import OURS, Bound
from lipscope.bounds.certificates import certified_upper
from lipscope.bounds.constants import largest_interaction
from lipscope.bounds.head_blocks import HeadBlocks
from lipscope.bounds.products import Products
from lipscope.bounds.spectral_upper import collatz_wielandt, matrix_norm_upper, nonnegative_norms
from lipscope.bounds.verified import verified_upper
from lipscope.bounds.weights import layer_weights, over_heads


def certify(attention: Attention, X: Tensor, *, radius: float, verified: bool = False) -> Bound:
    """A Lipschitz constant of the layer on {X' : ‖X' − X‖_F ≤ ρ}.

    Any mask, biases, grouped queries, soft-cap, sinks, rotary embeddings; float64 with the rounding margin of the local
    certificates. Heads are combined by the least of Σ_h, ‖W_O‖·(root of squares), and the local certificate of the layer
    plus how far the heads' Jacobians move.

    Args:
        attention: the layer.
        X: tokens (n, d).
        radius: ρ ≥ 0, a Frobenius distance.
        verified: verify σ at the centre, so that for small ρ only how far J moves is lost; ``bounds.verified`` has the cost.

    Returns:
        A ball bound; the outputs of two inputs in the ball differ by at most its value times their distance.

    Raises:
        ValueError: when X is not (n, d) or the radius is negative.

    Example:
        >>> import torch, lipscope
        >>> W = torch.eye(2, dtype=torch.float64)
        >>> layer = lipscope.Attention(q=0 * W, k=W, v=W)
        >>> round(certify(layer, torch.zeros(3, 2, dtype=torch.float64), radius=1.0).value, 6)
        1.0
    """
    heads = _Ball(attention, X, verified)
    if not radius >= 0:
        raise ValueError(f"radius must not be negative, got {radius}")
    return Bound("ball.certify", heads.constant(radius), "ball", f"all inputs within Frobenius distance {radius:g}", OURS,
                 {"radius": radius, "n": X.shape[0]})  # fmt: skip


def certified_radius(attention: Attention, X: Tensor, *, moves: float, rtol: float = 1e-3, verified: bool = False) -> float:
    """The largest ρ (up to rtol, from below) for which ρ·L(ρ) ≤ η: within it the output provably moves at most η.

    Args:
        attention: the layer.
        X: tokens (n, d).
        moves: η > 0, the allowed Frobenius distance of the outputs.
        rtol: relative accuracy of the search.
        verified: as for ``certify``.

    Returns:
        ρ; infinite when no distance up to 1e12 moves the output by η.
    """
    if not moves > 0:
        raise ValueError(f"moves must be positive, got {moves}")
    heads = _Ball(attention, X, verified)
    local = heads.constant(0.0)
    if local == 0.0 and heads.constant(1e12) == 0.0:
        return math.inf
    high = min(moves / local, 1e12) if local > 0 else 1e12
    low = high
    while low * heads.constant(low) > moves:
        high, low = low, low / 2
        if low < 1e-300:
            return 0.0
    while high - low > rtol * high:
        middle = (low + high) / 2
        if middle * heads.constant(middle) <= moves:
            low = middle
        else:
            high = middle
    return low


class _Ball:
    """All heads at the centre of the ball, with and without W_O."""

    def __init__(self, layer: Attention, X: Tensor, verified: bool) -> None:
        if X.ndim != 2 or X.shape[1] != layer.width or not len(X):
            raise ValueError(f"X must have shape (n, {layer.width}), got {tuple(X.shape)}")
        if not bool(torch.isfinite(X).all()):
            raise ValueError("X holds NaN or infinite values")
        with torch.no_grad():
            precise, x, weights = layer.to(torch.float64), X.detach().double(), layer_weights(layer)
            # Strips refer to it without keeping it alive.
            self.centre = Blocks(precise, x, products=Products(precise, weights), height=len(x))
            (strip,) = self.centre.strips()
            visible = precise.score_rule(len(x), 1).allowed
            seen = torch.ones_like(strip.P, dtype=torch.bool) if visible is None else visible[0].expand_as(strip.P)
            self.image = _BallHeads(HeadBlocks(strip, weights.image), seen)
            self.plain = _BallHeads(HeadBlocks(strip, weights.plain), seen) if layer.heads > 1 else self.image
            self.local, self.out = float(certified_upper(precise, x[None])[0]), weights.out if layer.heads > 1 else 1.0
            if verified:
                self.local = min(self.local, float(verified_upper(precise, x[None])[0]))

    def constant(self, radius: float) -> float:
        with torch.no_grad():
            image, moves = self.image.constants(radius)
            # σ(X') ≤ σ(X) + ‖J(X') − J(X)‖, which makes the local certificate the limit for small ρ.
            plain = image if self.plain is self.image else self.plain.constants(radius)[0]
            return min(self.local + float(moves.sum()), over_heads(plain.tolist(), self.out, image.tolist()))


class _BallHeads:
    """Every head at the centre: distances of values, key gradients, and the norms at the centre; arrays are (H, n, n)."""

    def __init__(self, core: HeadBlocks, seen: Tensor) -> None:
        self.core, self.seen, strip, at = core, seen, core.strip, core.at
        self.v, self.o = (core.through(t if strip.sink_share is None else t + at.centre) for t in (strip.v, strip.o))
        q, k, P, R_Q, KQ = strip.q, strip.k, strip.P, core.stacked("R_Q"), core.stacked("KQ")
        delta, block = core.norms
        self.share = torch.where(P > 0, block / P.clamp_min(1e-300), core.value + delta * core.a)
        A = [w.interaction if at.rotation is None else largest_interaction(w, at.rotation) for w in core.heads]
        self.A = P.new_tensor(A)[:, None, None]
        # Query gradients are counted from their mean where a common shift of the keys cancels.
        centred = at.layer.softcap is None and at.layer.sinks is None
        if at.rotation is None:
            b = k @ R_Q.mT
            self.b = torch.linalg.vector_norm(b, dim=-1)[:, None]
            shift = P @ b if centred else torch.zeros_like(b)
            self.b_spread = torch.cdist(shift, b, compute_mode="donot_use_mm_for_euclid_dist")
            own_a, own_b = core.a[..., 0], self.b[:, 0]
        else:
            shift = P @ k if centred else torch.zeros_like(k)
            self.b, self.b_spread = torch.empty_like(P), torch.empty_like(P)
            for i in range(at.n):
                M = at.rotated(slice(i, i + 1)).apply(R_Q)
                b = k @ M.mT
                self.b[:, i] = torch.linalg.vector_norm(b, dim=-1)
                self.b_spread[:, i] = torch.linalg.vector_norm(b - shift[:, i : i + 1] @ M.mT, dim=-1)
            own_a, own_b = (t.diagonal(dim1=-2, dim2=-1) for t in (core.a, self.b))
            q, k = (at.rotation.transpose(t) for t in (q, k))
        inner, margin = ((q @ KQ) * k).sum(-1), core.margin[..., 0]
        self.own = ((own_a.square() + 2 * inner + own_b.square()).clamp_min(0) + margin * (own_a + own_b) ** 2).sqrt()
        x = nonnegative_norms(block + torch.diag_embed(core.queries))[1]
        self.x = x / x.amax(-1, keepdim=True)

    def constants(self, radius: float) -> tuple[Tensor, Tensor]:
        """Bounds for σ of every head on the ball, and for how far its Jacobian moves in it."""
        core, P, delta, shift = self.core, self.core.strip.P, self.core.norms[0], self.A * radius
        margin, softcapped = 1 + 4 * core.margin[:, 0, 0], core.at.layer.softcap is not None
        high, change, sink, sink_moves = self._enclosure(radius)
        value, a = core.value[..., 0], core.a + shift
        move, peak = value * radius, high.amax(-1).sqrt()
        o_norm = torch.linalg.vector_norm(self.o, dim=-1)
        # How far o_i moves: the probabilities change, and the values under them.
        o_moves = (change * delta).sum(-1) + sink_moves * o_norm + move * peak
        # Second moments about the old o_i, a sink being a token of value 0: the new covariance is no larger.
        z = torch.hypot(self._moments(high), sink.sqrt() * o_norm) + move * peak
        keys = z * a.amax(-1)
        # Without soft-cap and rotary embeddings ∂s_ij/∂x_j is the same for all j, and the two terms are orthogonal.
        orthogonal = not softcapped and core.at.rotation is None
        rho = (value.square() + keys.square()).sqrt() if orthogonal else value + keys
        B, moves = self._queries(radius, high, change, z, o_moves, peak)
        row_column = (rho.square()[:, None] @ high).amax((1, 2)).sqrt() + B.amax(-1)
        # ‖V + δ'a'ᵀ‖ ≤ ‖V + δaᵀ‖ + ‖δ' − δ‖‖a'‖ + ‖δ‖‖a' − a‖; the slope of a soft-cap may move, so it takes the plain sum.
        moved = move[..., None] + o_moves[..., None]
        drift = moved * a + delta * shift
        if softcapped:
            block = high * (core.value + (delta + moved) * a)
            distance = torch.full_like(row_column, math.inf)
        else:
            block = high * (self.share + drift)
            # P'M' − PM = (P' − P)M' + P(M' − M)
            distance = self._norms(change * (self.share + drift) + P * drift, moves) * margin
        found = torch.minimum(row_column, self._norms(block, B)) * margin
        return tuple(torch.where(margin < 1.4, t, math.inf) for t in (found, distance))  # type: ignore[return-value]

    def _norms(self, N: Tensor, own: Tensor) -> Tensor:
        """‖N + diag(own)‖₂ from vectors that do not depend on ρ, which keeps the bound increasing in ρ."""
        N = N + torch.diag_embed(own)
        found = [collatz_wielandt(N, x) for x in (self.x, torch.ones_like(self.x), self.x + 0.1)]
        return torch.stack(found).amin(0)

    def _enclosure(self, radius: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """P⁺ and max(P⁺ − P, P − P⁻) entrywise; the same for the share of the sink in every row."""
        strip, A, P = self.core.strip, self.A, self.core.strip.P
        moves = (radius * torch.hypot(self.core.a, self.b) + A * radius**2 / 2).expand_as(P).clone()
        moves.diagonal(dim1=-2, dim2=-1).copy_(radius * self.own + A[..., 0] * radius**2)
        # A visible entry may have underflowed to 0; beyond e^600 nothing is known of it but that it is at most 1.
        start = torch.where(self.seen, P.clamp_min(1e-300), P)
        up, down = start * torch.exp(moves.clamp(max=600.0)), P * torch.exp(-moves)
        eps = 4 * P.shape[-1] * torch.finfo(P.dtype).eps
        rest_low = (down.sum(-1, keepdim=True) * (1 - eps) - down).clamp_min(0)
        rest_high = up.sum(-1, keepdim=True) * (1 + eps) - up
        share = torch.zeros_like(P[..., :1]) if strip.sink_share is None else strip.sink_share
        high = up / (up + rest_low + share).clamp_min(1e-300)
        high = torch.where(moves > 600, torch.ones_like(P), torch.maximum(high, P)) * self.seen
        low, share = down / (down + rest_high + share).clamp_min(1e-300), share[..., 0]
        sink = share / (share + down.sum(-1)).clamp_min(1e-300)
        sink_low = share / (share + up.sum(-1)).clamp_min(1e-300)
        return high, torch.maximum(high - P, P - low).clamp_min(0), sink, torch.maximum(sink - share, share - sink_low)

    def _moments(self, high: Tensor) -> Tensor:
        """√‖Σ_j P⁺_ij (v_j − o_i)(v_j − o_i)ᵀ‖ for every row."""
        found, step = [], max(1, (1 << 22) // (self.v[0].numel() + self.v.shape[-1] ** 2))
        for v, o, weights in zip(self.v, self.o, high.sqrt(), strict=True):
            parts = zip(o.split(step), weights.split(step), strict=True)
            found.append(torch.cat([matrix_norm_upper((v - rows[:, None]) * w[..., None]) for rows, w in parts]))
        return torch.stack(found)

    def _queries(
        self, radius: float, high: Tensor, change: Tensor, z: Tensor, o_moves: Tensor, peak: Tensor
    ) -> tuple[Tensor, Tensor]:
        """‖B'_i‖, the least of √(second moments) and ‖B_i‖ plus how far a covariance can move; and that distance."""
        core, delta, shift = self.core, self.core.norms[0], self.A[..., 0] * radius
        b_root = (high * self.b_spread.square()).sum(-1).sqrt() + shift * peak
        cauchy = z * b_root
        if core.at.layer.softcap is not None:
            return cauchy, torch.full_like(cauchy, math.inf)
        # With a sink the gradients are not counted from their mean, and their mean is not small.
        b_moves = b_root if core.strip.sink_share is not None else (change * self.b_spread).sum(-1) + shift * peak
        v_root = (high * delta.square()).sum(-1).sqrt()
        moves = (change * delta * self.b_spread).sum(-1)
        moves = moves + core.value[..., 0] * radius * peak * b_root + v_root * shift * peak + o_moves * b_moves
        return torch.minimum(cauchy, core.queries + moves), moves
