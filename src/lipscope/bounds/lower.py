"""Inputs at which σ is provably large. All for one unmasked head without biases, A = τW_KᵀW_Q, V = W_OW_V, tokens in B_R.

m tokens at u and n−m at w: with E = (u−w)ᵀAw and p = 1/(1 + ((n−m)/m)e^{−E}), moving the m tokens together gives

    σ ≥ √((n−m)/m)·p·‖V(I + (1−p)(u−w)(Aw)ᵀ)‖

``pair`` is m = 1; the paper's Proposition 3.4 takes u and w along an eigenvector of A; ``groups`` maximises over m and so
never decays as n grows; ``meanfield`` is its limit for n → ∞.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lipscope.bounds.bound import CASTIN, OURS, Bound

# Eigenvectors that are tried, those with the largest eigenvalues.
_EIGENVECTORS = 8


def two_groups(A: Tensor, V: Tensor, u: Tensor, w: Tensor, n: int, m: int = 1) -> float:
    """√((n−m)/m)·p·‖V(I + (1−p)(u−w)(Aw)ᵀ)‖ for m tokens at u and n−m at w; 0 when one group is empty."""
    if not 0 < m < n:
        return 0.0
    E = float((u - w) @ A @ w)
    ratio = (n - m) / m
    p = 1 / (1 + ratio * math.exp(min(-E, 600.0)))
    update = V + (1 - p) * torch.outer(V @ (u - w), A @ w)
    return math.sqrt(ratio) * p * float(torch.linalg.matrix_norm(update, 2))


def causal_groups(A: Tensor, V: Tensor, u: Tensor, w: Tensor, n: int, m: int = 1) -> float:
    """The same input under the causal mask, the m tokens at u first: ‖Σ_i p_i²M_iᵀM_i/m‖^½, M_i = V(I + (1−p_i)(u−w)(Aw)ᵀ).

    Row i > m sees m tokens at u and i−m at w, so p_i = 1/(1 + ((i−m)/m)e^{−E}); one common direction moves all m tokens.
    """
    if not 0 < m < n:
        return 0.0
    E = float((u - w) @ A @ w)
    seen = torch.arange(1, n - m + 1, dtype=torch.float64)
    p = 1 / (1 + seen / m * math.exp(min(-E, 600.0)))
    first, second = V, torch.outer(V @ (u - w), A @ w)
    # Σ p²(V + (1−p)S)ᵀ(V + (1−p)S), expanded so that no n×d×d tensor is formed.
    p2 = p.square()
    cross = first.mT @ second
    gram = p2.sum() * first.mT @ first + (p2 * (1 - p)).sum() * (cross + cross.mT)
    gram = gram + (p2 * (1 - p).square()).sum() * second.mT @ second
    return math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[-1])) / m)


def tokens(u: Tensor, w: Tensor, n: int, m: int = 1) -> Tensor:
    """The input: m rows u, then n−m rows w."""
    return torch.cat([u.expand(m, -1), w.expand(n - m, -1)])


def pair(A: Tensor, V: Tensor, radius: float, n: int, *, causal: bool = False) -> Bound:
    """One token at u, the others at w, with w maximising E = R‖Aw‖ − wᵀAw over B_R and u = R·Aw/‖Aw‖.

    No real eigenvalue of A is needed. Any u, w give a valid lower bound, so the maximisation need not be exact.

    Args:
        A: interaction matrix (d, d).
        V: value matrix (d_out, d).
        radius: R.
        n: number of tokens.
        causal: under the causal mask, with the token u first.

    Returns:
        A lower bound for the supremum of σ over B_R^n, with the tokens that attain it.
    """
    u, w = best_pair(A, radius)
    value = (causal_groups if causal else two_groups)(A, V, u, w, n)
    return _bound("lower.pair", value, radius, n, causal, OURS, tokens(u, w, n))


def proposition34(A: Tensor, V: Tensor, radius: float, n: int, *, causal: bool = False) -> Bound | None:
    """The paper's two cases, γ_max and γ_min the extreme real eigenvalues of A with eigenvector e.

    γ_max > −8γ_min: tokens (Re, Re/2, …, Re/2), E = γ_maxR²/4; else (−Re, Re, …, Re), E = 2|γ_min|R². Grows as √n as
    long as n−1 ≲ e^E, then decays.

    Args:
        A: interaction matrix (d, d).
        V: value matrix (d_out, d).
        radius: R.
        n: number of tokens.
        causal: under the causal mask.

    Returns:
        A lower bound for the supremum of σ over B_R^n; None when A has no real eigenvalue.
    """
    real = real_eigenvectors(A)
    if not real:
        return None
    high, low = max(real, key=lambda pair: pair[0]), min(real, key=lambda pair: pair[0])
    if high[0] > -8 * low[0]:
        u, w = radius * high[1], radius * high[1] / 2
    else:
        u, w = -radius * low[1], radius * low[1]
    value = (causal_groups if causal else two_groups)(A, V, u, w, n)
    return _bound("lower.proposition34", value, radius, n, causal, f"{CASTIN}, Proposition 3.4", tokens(u, w, n))


def groups(A: Tensor, V: Tensor, radius: float, n: int, *, causal: bool = False) -> Bound:
    """With m tokens at u and n−m at w: the best m and the best of the pairs above; it never decays in n.

    Args:
        A: interaction matrix (d, d).
        V: value matrix (d_out, d).
        radius: R.
        n: number of tokens.
        causal: under the causal mask.

    Returns:
        A lower bound for the supremum of σ over B_R^n, with the tokens that attain it.
    """
    candidates = [best_pair(A, radius)]
    leading = sorted(real_eigenvectors(A), key=lambda pair: -abs(pair[0]))[:_EIGENVECTORS]
    for _, e in leading:
        candidates += [(radius * e, radius * e / 2), (-radius * e, radius * e)]
    sizes = sorted({1, *(int(n * 2 ** (-step / 4)) for step in range(1, 4 * max(1, n.bit_length()) + 1))} - {0})
    value_of = causal_groups if causal else two_groups
    scored = [(value_of(A, V, u, w, n, m), index, m) for index, (u, w) in enumerate(candidates) for m in sizes]
    value, index, m = max(scored)
    return _bound("lower.groups", value, radius, n, causal, OURS, tokens(*candidates[index], n, min(m, n)), m=m)


def meanfield(A: Tensor, V: Tensor, radius: float) -> Bound | None:
    """‖Ve‖e^{γR²} max_{t>0} (√t/(1+t))(1 + tE/(1+t)), E = 2γR², γ = −γ_min: two Diracs at ±Re, unmasked, n → ∞.

    The supremum of σ over n and over B_R^n is at least this; with ``refined.unmasked`` it fixes the exponent e^{‖A‖R²}.

    Args:
        A: interaction matrix (d, d).
        V: value matrix (d_out, d).
        radius: R.

    Returns:
        A lower bound for the W_2-Lipschitz constant; None when A has no negative real eigenvalue.
    """
    negative = [(gamma, e) for gamma, e in real_eigenvectors(A) if gamma < 0]
    if not negative:
        return None
    gamma, e = min(negative, key=lambda pair: pair[0])
    E = -2 * gamma * radius**2
    t = torch.logspace(-8, 2, 2001, dtype=torch.float64)
    best = float((t.sqrt() / (1 + t) * (1 + t * E / (1 + t))).max())
    value = float(torch.linalg.vector_norm(V @ e)) * math.exp(min(E / 2, 700.0)) * best
    return Bound("lower.meanfield", value, "set", f"tokens of norm ≤ {radius:g}, supremum over n, unmasked", OURS,
                 {"R": radius, "E": E}, side="lower")  # fmt: skip


def best_pair(A: Tensor, radius: float, steps: int = 200, *, shift: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """u, w in B_R with large E = R‖Aw‖ − wᵀAw, u = R·Aw/‖Aw‖: projected gradient ascent from several starts.

    With ``shift`` c, the keys' side of a query bias, Aw + c stands for Aw.
    """
    c = A.new_zeros(A.shape[0]) if shift is None else shift
    basis = _span(A, c)
    if basis is not None:
        # E sees w through Aw, Aᵀw and c only.
        u, w = best_pair(basis.mT @ A @ basis, radius, steps, shift=basis.mT @ c)
        return basis @ u, basis @ w
    d = A.shape[0]
    generator = torch.Generator().manual_seed(0)
    starts = [torch.linalg.svd(A).Vh, -torch.eye(d, dtype=A.dtype), torch.linalg.eigh((A + A.mT) / 2).eigenvectors.mT]
    starts.append(torch.randn(8, d, generator=generator, dtype=A.dtype))
    W = torch.cat(starts)
    W = radius * W / torch.linalg.vector_norm(W, dim=-1, keepdim=True).clamp_min(1e-300)
    size = float(torch.linalg.matrix_norm(A, 2))
    step = 0.5 / max(size, 1e-300)

    def energy(W: Tensor) -> Tensor:
        images = W @ A.mT + c
        energies: Tensor = radius * torch.linalg.vector_norm(images, dim=-1) - (W * images).sum(-1)
        return energies

    best = W.clone()
    for _ in range(steps):
        images = W @ A.mT + c
        unit = images / torch.linalg.vector_norm(images, dim=-1, keepdim=True).clamp_min(1e-300)
        W = W + step * (radius * unit @ A - images - W @ A)
        norms = torch.linalg.vector_norm(W, dim=-1, keepdim=True)
        W = W * torch.clamp(radius / norms.clamp_min(1e-300), max=1.0)
        best = torch.where((energy(W) > energy(best))[:, None], W, best)
    w = best[energy(best).argmax()]
    image = A @ w + c
    norm = float(torch.linalg.vector_norm(image))
    return (radius * image / norm if norm > 0 else w), w


def _span(A: Tensor, c: Tensor) -> Tensor | None:
    """An orthonormal basis (d, r) of the rows and columns of A and of c; None when that is not much less than everything."""
    left, values, right = torch.linalg.svd(A)
    rank = int((values > 1e-13 * values[0]).sum())
    if 2 * rank + 1 > 0.75 * A.shape[0]:
        return None
    basis: Tensor = torch.linalg.qr(torch.cat([left[:, :rank], right[:rank].mT, c[:, None]], dim=1)).Q
    return basis


def real_eigenvectors(A: Tensor) -> list[tuple[float, Tensor]]:
    """Real eigenvalues of A with unit eigenvectors."""
    values, vectors = torch.linalg.eig(A.double())
    scale = float(values.abs().max())
    found = []
    for value, vector in zip(values, vectors.mT, strict=True):
        if abs(float(value.imag)) <= 1e-12 * max(scale, 1e-300):
            e = vector.real
            found.append((float(value.real), e / torch.linalg.vector_norm(e)))
    return found


def _bound(name: str, value: float, R: float, n: int, causal: bool, source: str, X: Tensor, **extra: int) -> Bound:
    mask = "causal mask" if causal else "unmasked"
    return Bound(name, value, "set", f"supremum over tokens of norm ≤ {R:g}, n = {n}, {mask}", source,
                 {"R": R, "n": n, **extra}, side="lower", tokens=X)  # fmt: skip
