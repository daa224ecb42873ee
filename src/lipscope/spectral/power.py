"""Power iteration on JᵀJ: the textbook method, kept for comparison.

After k steps, ‖(JᵀJ)^k v₁‖ ≥ γ·σ^{2k} with the overlap γ of the start with the top right singular vector, hence
σ ≤ (‖(JᵀJ)^k v₁‖ / g(δ))^{1/2k} except with probability δ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lipscope.spectral.basis import scaled_norm, unit_rows
from lipscope.spectral.operator import Operator
from lipscope.spectral.output import SolverOutput, Status
from lipscope.spectral.start import check_delta, overlap_quantile, random_unit_vector


@dataclass(frozen=True)
class Power:
    """Power iteration on JᵀJ, stopped when ‖Jv‖ grows by less than ``rtol`` relative to itself in one step.

    A slow growth does not mean a small error: prefer :class:`GolubKahan`, which needs a fraction of the products.

    Attributes:
        rtol: relative growth of ‖Jv‖ at which an item stops.
        max_steps: most operator pairs (J, Jᵀ).
        delta: allowed probability that ``upper`` fails.
        vectors: also return the singular vectors.
        seed: seed of the start vector.
    """

    rtol: float = 1e-4
    max_steps: int = 1000
    delta: float = 1e-6
    vectors: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.rtol < 1:
            raise ValueError(f"rtol must lie strictly between 0 and 1, got {self.rtol}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, got {self.max_steps}")
        check_delta(self.delta)

    def solve(self, operator: Operator) -> SolverOutput:
        """Largest singular value of every item of ``operator``."""
        _, N = operator.shape
        out = SolverOutput.empty(operator, 1, self.vectors, "power", self.delta)
        v = random_unit_vector(operator, self.seed).expand(operator.batch, N)
        overlap = math.log(overlap_quantile(N, self.delta))
        log_growth = torch.zeros(operator.batch, dtype=torch.float64, device=operator.device)
        previous = torch.zeros_like(log_growth)
        for step in range(1, self.max_steps + 1):
            u = operator.matvec(v)
            theta = scaled_norm(u)
            if not bool(torch.isfinite(theta).all()):
                raise FloatingPointError("A product with the Jacobian returned NaN or infinity: does the map overflow here?")
            u = unit_rows(u, theta)
            w = operator.rmatvec(u)
            growth = scaled_norm(w)
            log_growth = log_growth + theta.log() + growth.log()
            done = (theta - previous) <= self.rtol * theta
            leaving = (done | (step == self.max_steps)) & (out.iterations == 0)
            items = leaving.nonzero()[:, 0]
            if items.numel():
                out.estimate[items] = theta[items]
                out.singular_values[items, 0] = theta[items]
                out.upper[items] = torch.maximum(((log_growth[items] - overlap) / (2 * step)).exp(), theta[items])
                out.iterations[items] = step
                out.residual[items] = scaled_norm(w[items].double() - theta[items, None] * v[items].double())
                out.converged[items] = done[items]
                for item in items.tolist():
                    out.status[item] = Status.CONVERGED if bool(done[item]) else Status.MAX_STEPS
                out.record_energy(items, operator.token_energy(v[items]))
                if self.vectors:
                    out.record_vectors(items, v[items, None], u[items, None])
            if bool((out.iterations > 0).all()):
                break
            previous = theta
            v = unit_rows(w, growth)
        return out
