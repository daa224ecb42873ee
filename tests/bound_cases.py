"""Layers and inputs that try to break a bound: random, clustered, constructed and gradient-ascended tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import lipscope
from lipscope.bounds.pairs import PlainHead, lower_groups, lower_pair, matrices

INPUTS = ("random", "clustered", "constructed", "ascended", "sphere", "equal")
FEATURES = ("query_bias", "key_bias", "value_bias", "softcap", "sinks", "additive", "grouped", "no_out", "scale", "rotary")
MASKS = ("full", "causal", "window:2", "window:3:both", "prefix:1", "hidden")


@dataclass(frozen=True)
class Problem:
    """A layer, tokens, and the radius of the smallest ball that holds them."""

    layer: lipscope.Attention
    X: Tensor
    label: str

    @property
    def radius(self) -> float:
        return float(self.X.norm(dim=-1).max()) * (1 + 1e-12)

    @property
    def sigma(self) -> float:
        return float(lipscope.local_lipschitz(self.layer, self.X, solver=lipscope.Dense(), certificate=False).estimate)


def problem(
    seed: int, *, n_max: int = 64, plain: bool = False, mask: str | None = None, kind: str | None = None,
    always: frozenset[str] = frozenset(),
) -> Problem:  # fmt: skip
    """Everything about the problem follows from the seed; ``always`` lists features that are there for sure."""
    G = torch.Generator().manual_seed(seed)

    def pick(options):
        return options[int(torch.randint(len(options), (), generator=G))]

    def normal(*shape):
        return torch.randn(*shape, generator=G, dtype=torch.float64)

    d, dh = pick(range(1, 9)), pick((2, 3, 4) if "rotary" in always else (1, 2, 3, 4))
    # Short sequences dominate, so that many cases are cheap; long ones appear in every run.
    n = min(n_max, pick((1, 2, 2, 3, 4, 5, 7, 8, 12, 16, 24, 64)))
    heads = 1 if plain else pick((1, 1, 2, 3))
    used = set() if plain else {name for name in FEATURES if float(torch.rand((), generator=G)) < 0.2} | always
    kv = 1 if "grouped" in used else heads
    sharp = 10 ** float(torch.rand((), generator=G) * 2.5 - 1.5)
    options = {}
    if "query_bias" in used:
        options["q_bias"] = normal(heads * dh)
    if "key_bias" in used:
        options["k_bias"] = normal(kv * dh)
    if "value_bias" in used:
        options["v_bias"] = normal(kv * dh)
    if "softcap" in used:
        options["softcap"] = float(torch.rand((), generator=G)) * 3 + 0.1
    if "sinks" in used:
        options["sinks"] = normal(heads)
    if "additive" in used:
        options["bias"] = normal(heads, n, n)
    if "scale" in used:
        options["scale"] = float(normal(()))
    if "rotary" in used and dh > 1:
        places = pick((torch.arange(n), 3 * torch.arange(n) + 5, torch.randint(0, 50, (n,), generator=G)))
        table = lipscope.Rotary.from_base(
            dh - dh % 2, base=pick((2.0, 100.0)), positions=places, interleaved=pick((False, True)), dtype=torch.float64
        )
        stretch = pick((1.0, 1.0, 0.7, 1.3))
        options["rotary"] = lipscope.Rotary(stretch * table.cos, stretch * table.sin, table.interleaved)
    out = None if "no_out" in used and not plain else normal(pick(range(1, 6)), heads * dh)
    name = mask or pick(MASKS)
    visible = name
    if name == "hidden":
        visible = torch.rand(n, n, generator=G) < 0.6
    q, k = sharp * normal(heads * dh, d), normal(kv * dh, d)
    if float(torch.rand((), generator=G)) < 0.3:
        # Repulsive heads: γ_min = −‖A‖, the worst case of the paper's lower bound.
        k = -q[: kv * dh].clone()
    layer = lipscope.Attention(q, k, normal(kv * dh, d), out, heads, kv, mask=visible, **options)
    how = kind or pick(INPUTS)
    X = _tokens(how, layer, n, d, pick, normal)
    return Problem(layer, X, f"seed {seed}: {how}, {layer}, features {sorted(used)}")


def _tokens(how, layer, n, d, pick, normal) -> Tensor:
    R = 10 ** float(pick((-1, -0.5, 0, 0, 0.3, 0.6)))
    if how == "clustered":
        centres = R * normal(2, d)
        return centres[torch.arange(n) % 2] + 1e-3 * R * normal(n, d)
    if how == "sphere":
        X = normal(n, d)
        return R * X / X.norm(dim=-1, keepdim=True)
    if how == "equal":
        return normal(1, d).repeat(n, 1) * R
    if how == "constructed" and n > 1:
        head = PlainHead(*matrices(layer, pick(range(layer.heads))))
        return pick((lower_groups, lower_pair))(head, R, n).tokens
    X = R * normal(n, d)
    if how == "ascended" and n * d <= 24:
        return ascend(layer, X, float(X.norm(dim=-1).max()))
    return X


def ascend(layer: lipscope.Attention, X: Tensor, radius: float, steps: int = 8) -> Tensor:
    """Gradient ascent on σ with the tokens kept in the ball; the best iterate."""
    best, best_sigma, x = X, -1.0, X.clone()
    for _ in range(steps):
        x = x.detach().requires_grad_(True)
        J = torch.autograd.functional.jacobian(layer, x, create_graph=True, vectorize=True).reshape(-1, x.numel())
        sigma = torch.linalg.matrix_norm(J, 2)
        if sigma.item() > best_sigma:
            best, best_sigma = x.detach(), sigma.item()
        (g,) = torch.autograd.grad(sigma, x)
        if not bool(torch.isfinite(g).all()) or float(g.norm()) == 0:
            break
        x = x.detach() + 0.3 * radius * g / g.norm()
        x = x * (radius / x.norm(dim=-1, keepdim=True).clamp_min(1e-300)).clamp(max=1)
    return best


def jacobian(layer, X: Tensor) -> Tensor:
    """Dense (n, d_out, n, d) Jacobian by autograd."""
    return torch.autograd.functional.jacobian(layer, X, vectorize=True)
