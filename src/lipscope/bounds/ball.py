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
from dataclasses import dataclass

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.bounds.bound import OURS, Bound
from lipscope.bounds.certificates import certified_upper
from lipscope.bounds.constants import largest_interaction
from lipscope.bounds.head_core import HeadCore
from lipscope.bounds.spectral_upper import collatz_wielandt, matrix_norm_upper, perron_vector
from lipscope.bounds.verified import verified_upper
from lipscope.bounds.weights import HeadWeights, layer_weights, over_heads


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
    heads = _BallHeads.at(attention, X, verified)
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
    heads = _BallHeads.at(attention, X, verified)
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


@dataclass(frozen=True, eq=False)
class _BallHeads:
    """All heads at the centre of the ball, with and without W_O."""

    image: list[_BallHead]
    plain: list[_BallHead]
    out: float
    local: float

    @classmethod
    def at(cls, layer: Attention, X: Tensor, verified: bool) -> _BallHeads:
        if X.ndim != 2 or X.shape[1] != layer.width or not len(X):
            raise ValueError(f"X must have shape (n, {layer.width}), got {tuple(X.shape)}")
        if not bool(torch.isfinite(X).all()):
            raise ValueError("X holds NaN or infinite values")
        weights = layer_weights(layer)
        with torch.no_grad():
            precise, x = layer.to(torch.float64), X.detach().double()
            several = layer.heads > 1
            cores = [HeadCore.at(precise.head(h), x, w) for h, w in enumerate(weights.plain)]
            seen = [precise.head(h).score_rule(x.shape[0], 1).allowed for h in range(layer.heads)]
            visible = [None if t is None else t[0, 0] for t in seen]
            image = [_BallHead.at(*parts) for parts in zip(cores, weights.image, visible, strict=True)]
            plain = [_BallHead.at(*parts) for parts in zip(cores, weights.plain, visible, strict=True)] if several else image
            local = float(certified_upper(precise, x[None])[0])
            local = min(local, float(verified_upper(precise, x[None])[0])) if verified else local
        return cls(image, plain, weights.out if several else 1.0, local)

    def constant(self, radius: float) -> float:
        with torch.no_grad():
            image = [head.constant(radius) for head in self.image]
            # σ(X') ≤ σ(X) + ‖J(X') − J(X)‖, which makes the local certificate the limit for small ρ.
            near = self.local + sum(moves for _, moves in image)
            plain = [head.constant(radius)[0] for head in self.plain] if len(image) > 1 else [image[0][0]]
            return min(near, over_heads(plain, self.out, (constant for constant, _ in image)))


@dataclass(frozen=True, eq=False)
class _BallHead:
    """One head at the centre: distances of values, key gradients, and the norms at the centre."""

    core: HeadCore
    weights: HeadWeights
    A: float
    v: Tensor
    o: Tensor
    delta: Tensor
    share: Tensor
    B: Tensor
    b: Tensor
    own: Tensor
    b_spread: Tensor
    seen: Tensor
    x: Tensor

    @classmethod
    def at(cls, core: HeadCore, w: HeadWeights, visible: Tensor | None) -> _BallHead:
        v, o = core.v, core.o
        if core.sink_share is not None:
            v, o = v + core.centre, o + core.centre
        if w.R_O is not None:
            v, o = v @ w.R_O.mT, o @ w.R_O.mT
        delta, block = core.block_norms(w)
        share = torch.where(core.P > 0, block / core.P.clamp_min(1e-300), w.value + delta * core.a)
        A = w.interaction if core.rotation is None else largest_interaction(w, core.rotation)
        B = core.query_norms(w)
        # Query gradients are counted from their mean where a common shift of the keys cancels.
        centred = not (core.softcapped or core.sink_share is not None)
        if core.rotation is None:
            b = core.k @ w.R_Q.mT
            b_norm = torch.linalg.vector_norm(b, dim=-1)[None]
            own_b, inner = b_norm[0], ((core.q @ w.KQ) * core.k).sum(-1)
            shift = core.P @ b if centred else torch.zeros_like(b)
            b_spread = torch.cdist(shift, b, compute_mode="donot_use_mm_for_euclid_dist")
            own_a = core.a[:, 0]
        else:
            shift = core.P @ core.k if centred else torch.zeros_like(core.k)
            b_norm, b_spread = core.query_gradients(w, shift)
            own_a, own_b = core.a.diagonal(), b_norm.diagonal()
            q, k = (core.rotation.transpose(t) for t in (core.q, core.k))
            inner = ((q @ w.KQ) * k).sum(-1)
        own = ((own_a.square() + 2 * inner + own_b.square()).clamp_min(0) + core.margin * (own_a + own_b) ** 2).sqrt()
        seen = torch.ones_like(core.P, dtype=torch.bool) if visible is None else visible.expand_as(core.P)
        x = perron_vector(block + torch.diag(B))
        return cls(core, w, A, v, o, delta, share, B, b_norm, own, b_spread, seen, x / x.max())

    def constant(self, radius: float) -> tuple[float, float]:
        """A bound for σ on the ball, and one for how far the Jacobian moves in it."""
        core, w = self.core, self.weights
        if core.margin >= 0.1:
            return math.inf, math.inf
        margin = 1 + 4 * core.margin
        high, change, sink, sink_moves = self._enclosure(radius)
        move = w.value * radius
        a = core.a + self.A * radius
        peak = high.amax(-1).sqrt()
        o_norm = torch.linalg.vector_norm(self.o, dim=-1)
        # How far o_i moves: the probabilities change, and the values under them.
        o_moves = (change * self.delta).sum(-1) + sink_moves * o_norm + move * peak
        # Second moments about the old o_i, a sink being a token of value 0: the new covariance is no larger.
        z = torch.hypot(self._moments(high), sink.sqrt() * o_norm) + move * peak
        keys = z * a.amax(-1)
        rho = (w.value**2 + keys.square()).sqrt() if core.orthogonal else w.value + keys
        B, moves = self._queries(radius, high, change, z, o_moves, peak)
        row_column = math.sqrt(float((rho.square() @ high).max())) + float(B.max())
        # ‖V + δ'a'ᵀ‖ ≤ ‖V + δaᵀ‖ + ‖δ' − δ‖‖a'‖ + ‖δ‖‖a' − a‖; the slope of a soft-cap may move, so it takes the plain sum.
        drift = (move + o_moves[:, None]) * a + self.delta * (self.A * radius)
        if core.softcapped:
            block = high * (w.value + (self.delta + move + o_moves[:, None]) * a)
            moved = math.inf
        else:
            block = high * (self.share + drift)
            # P'M' − PM = (P' − P)M' + P(M' − M)
            difference = change * (self.share + drift) + core.P * drift
            moved = self._norm(difference + torch.diag(moves)) * margin
        value = min(row_column, self._norm(block + torch.diag(B)))
        return value * margin, moved

    def _norm(self, N: Tensor) -> float:
        """‖N‖₂ from vectors that do not depend on ρ, which keeps the bound increasing in ρ."""
        return min(collatz_wielandt(N, x) for x in (self.x, torch.ones_like(self.x), self.x + 0.1))

    def _enclosure(self, radius: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """P⁺ and max(P⁺ − P, P − P⁻) entrywise; the same for the share of the sink in every row."""
        core, A, P = self.core, self.A, self.core.P
        moves = (radius * torch.hypot(core.a, self.b) + A * radius**2 / 2).expand_as(P).clone()
        moves.diagonal().copy_(radius * self.own + A * radius**2)
        # A visible entry may have underflowed to 0; beyond e^600 nothing is known of it but that it is at most 1.
        start = torch.where(self.seen, P.clamp_min(1e-300), P)
        up, down = start * torch.exp(moves.clamp(max=600.0)), P * torch.exp(-moves)
        eps = 4 * P.shape[1] * torch.finfo(P.dtype).eps
        rest_low = (down.sum(-1, keepdim=True) * (1 - eps) - down).clamp_min(0)
        rest_high = up.sum(-1, keepdim=True) * (1 + eps) - up
        share = P.new_zeros(P.shape[0]) if core.sink_share is None else core.sink_share
        high = up / (up + rest_low + share[:, None]).clamp_min(1e-300)
        high = torch.where(moves > 600, torch.ones_like(P), torch.maximum(high, P)) * self.seen
        low = down / (down + rest_high + share[:, None]).clamp_min(1e-300)
        sink = share / (share + down.sum(-1)).clamp_min(1e-300)
        sink_low = share / (share + up.sum(-1)).clamp_min(1e-300)
        return high, torch.maximum(high - P, P - low).clamp_min(0), sink, torch.maximum(sink - share, share - sink_low)

    def _moments(self, high: Tensor) -> Tensor:
        """√‖Σ_j P⁺_ij (v_j − o_i)(v_j − o_i)ᵀ‖ for every row."""
        size = self.v.shape[1]
        found = []
        for rows in torch.arange(self.v.shape[0], device=self.v.device).split(
            max(1, (1 << 22) // (self.v.numel() + size**2))
        ):
            Z = (self.v[None] - self.o[rows, None]) * high[rows].sqrt()[..., None]
            found.append(matrix_norm_upper(Z))
        return torch.cat(found)

    def _queries(
        self, radius: float, high: Tensor, change: Tensor, z: Tensor, o_moves: Tensor, peak: Tensor
    ) -> tuple[Tensor, Tensor]:
        """‖B'_i‖, the least of √(second moments) and ‖B_i‖ plus how far a covariance can move; and that distance."""
        w, core = self.weights, self.core
        shift = self.A * radius
        b_root = (high * self.b_spread.square()).sum(-1).sqrt() + shift * peak
        cauchy = z * b_root
        if core.softcapped:
            return cauchy, torch.full_like(cauchy, math.inf)
        # With a sink the gradients are not counted from their mean, and their mean is not small.
        b_moves = b_root if core.sink_share is not None else (change * self.b_spread).sum(-1) + shift * peak
        v_root = (high * self.delta.square()).sum(-1).sqrt()
        moves = (change * self.delta * self.b_spread).sum(-1)
        moves = moves + w.value * radius * peak * b_root + v_root * shift * peak + o_moves * b_moves
        return torch.minimum(cauchy, self.B + moves), moves
