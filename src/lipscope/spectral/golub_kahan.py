"""The Golub–Kahan–Lanczos solver: its options, how a batch is divided to fit into memory, and several values.

The iteration itself, and why its interval holds, is in ``spectral.bidiagonalisation``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lipscope.spectral.basis import check_delta, pairs_within, together_within
from lipscope.spectral.bidiagonalisation import Bidiagonalisation
from lipscope.spectral.deflation import leading
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SolverOutput


@dataclass(frozen=True)
class GolubKahan:
    """Golub–Kahan–Lanczos, re-orthogonalised as far as ``memory`` reaches; every batch item stops on its own.

    An item stops when the estimated relative error of its ``k`` leading Ritz values is below ``rtol`` and its interval is
    no wider than ``interval``. The error estimate is min(r, r²/2gap)/θ with the residual r = ‖Jᵀu − θv‖ and the gap to
    the next Ritz value; it is relative, so c·f stops where f does. ``lower`` and ``upper`` are valid at every step.

    Attributes:
        rtol: requested relative accuracy of the estimate.
        max_steps: most operator pairs (J, Jᵀ) spent on one item.
        delta: allowed probability that ``upper`` fails.
        k: number of leading singular triplets. Repeated values count as often as they occur: with k > 1 a further solve
            of the deflated operator looks for copies that one start vector cannot see. Values below the rounding of the
            products are 0. The interval is that of the largest; the others come with the error estimate alone.
        vectors: also return singular vectors.
        interval: widest relative interval upper/lower − 1 to stop with. It also guards against a start that happens to be
            almost orthogonal to the top singular vector, which a residual cannot see. None switches the guard off.
        seed: seed of the start vector; the same for every item, so results do not depend on how inputs are batched (but
            for rounding).
        memory: bytes for Krylov bases; singular vectors that are found come on top. A batch whose first 32 vectors of both
            sides need more is solved in turns. A problem whose bases grow beyond it keeps what fits, its singular vectors
            come from short recurrences, and several values (k > 1) one by one.
    """

    rtol: float = 1e-4
    max_steps: int = 300
    delta: float = 1e-6
    k: int = 1
    vectors: bool = False
    interval: float | None = 0.1
    seed: int = 0
    memory: int = 1 << 30

    def __post_init__(self) -> None:
        if not 0 < self.rtol < 1:
            raise ValueError(f"rtol must lie strictly between 0 and 1, got {self.rtol}")
        check_delta(self.delta)
        if self.interval is not None and not self.interval > 0:
            raise ValueError(f"interval must be positive or None, got {self.interval}")
        if self.k < 1:
            raise ValueError(f"k must be at least 1, got {self.k}")
        if self.memory < 1:
            raise ValueError(f"memory must be at least 1 byte, got {self.memory}")
        if self.max_steps < self.k:
            raise ValueError(f"max_steps must be at least 1 and at least k = {self.k}, got {self.max_steps}")

    def solve(self, operator: Operator, start: Tensor | None = None) -> SolverOutput:
        """Leading singular values of every item of ``operator``.

        Args:
            operator: the maps.
            start: directions (B, N) believed close to the top right singular vectors, say those of a nearby problem.
        """
        M, N = operator.shape
        if self.k > min(M, N):
            raise ValueError(f"k = {self.k} singular values were asked of a {M}×{N} operator")
        if start is not None and start.shape != (operator.batch, N):
            raise ValueError(f"start has shape {tuple(start.shape)}, but the operator needs {(operator.batch, N)}")
        together = together_within((M, N), operator.dtype.itemsize, self.memory)
        if operator.batch <= together:
            return self._together(operator, start)
        parts = torch.arange(operator.batch, device=operator.device).split(together)
        return SolverOutput.cat(
            [self._together(operator.select(part), None if start is None else start[part]) for part in parts]
        )

    def _together(self, operator: Operator, start: Tensor | None) -> SolverOutput:
        if self.k == 1:
            return Bidiagonalisation(self, operator, start).solve()

        def solve(deflated: Operator, number: int) -> SolverOutput:
            return Bidiagonalisation(self._for_one(number), deflated).solve()

        found = leading(operator, self._first(operator, start), self.rtol, solve)
        return found if self.vectors else replace(found, right=None, left=None)

    def _for_one(self, number: int) -> GolubKahan:
        """The options for one value and its vectors, with a start that does not depend on what was found before."""
        return replace(self, vectors=True, k=1, seed=self.seed + self.max_steps + number)

    def _first(self, operator: Operator, start: Tensor | None) -> SolverOutput:
        """All values at once where whole bases fit; of the items for which they do not, the largest value alone."""
        fitting = pairs_within(operator.shape, operator.batch, operator.dtype.itemsize, self.memory) - 1
        if fitting >= self.max_steps:
            return Bidiagonalisation(replace(self, vectors=True), operator, start, whole=True).solve()
        found = SolverOutput.empty(operator, self.k, True, "golub_kahan", self.delta)
        if fitting >= self.k:
            short = replace(self, vectors=True, max_steps=fitting)
            found = Bidiagonalisation(short, operator, start, whole=True).solve()
            start = found.vectors[0][:, 0]
        cut = (~found.converged).nonzero()[:, 0]
        if cut.numel():
            items = operator if cut.numel() == operator.batch else operator.select(cut)
            found.restart(cut, Bidiagonalisation(self._for_one(0), items, None if start is None else start[cut]).solve())
        return found
