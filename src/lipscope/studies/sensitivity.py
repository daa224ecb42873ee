"""Which layer matters to what a model says: the damage that rounding or noise in each layer does, predicted and measured.

Add δ to what one layer's attention sees or puts out, to its keys, values or weights. The output distributions p then move by
KL(p‖p') ≈ ½ δᵀFδ, with F = JᵀΛJ the Fisher matrix: J is the Jacobian of the logits through the rest of the model, and
Λ = diag(p) − ppᵀ at every position. For ξ = √p∘z − p(√p·z) with z standard normal, E ξξᵀ = Λ. So one backward pass from ξ
gives g = Jᵀξ at every place of every layer, and ½ E⟨g, δ⟩² is the damage; ⟨g, δ⟩ is normal, so that the squares of R passes
follow a χ² law, which gives the interval. For isotropic noise of variance s² the damage is ½ s² E‖g‖².
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn

from lipscope.models.capture import Place, last_hidden_state, replaying, touching
from lipscope.models.checkpoints import Loaded
from lipscope.models.corpora import read_text
from lipscope.models.inputs import probe_inputs, runner
from lipscope.models.load import load_tokenizer, load_with_head, with_tied_head
from lipscope.models.model import Model
from lipscope.models.refusals import in_dtype
from lipscope.models.text import chunks_of
from lipscope.report.summary import LEVEL, carriers, correlations
from lipscope.rounding import Shown, counted
from lipscope.spectral.solvers import Auto
from lipscope.studies.rows import Row, study_row

__all__ = ["Perturbation", "Sensitivity", "correlations", "sensitivity"]

PLACES = {"k": ("k",), "v": ("v",), "kv": ("k", "v"), "input": ("input",), "output": ("output",), "weights": ("weights",)}
FLOATS = {"bf16": torch.bfloat16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
# The same rounding of keys and values in vLLM's words (vllm/config/cache.py: CacheDType, kv_cache_dtype_skip_layers).
VLLM = {"e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2", "int8": "int8_per_token_head"}
NOISE_DRAWS, SOLVER = 8, Auto(rtol=1e-3, interval=0.05)


@dataclass(frozen=True)
class Perturbation:
    """What is done to a layer, written ``KIND[-PLACE]``.

    Kinds: ``fp8`` (e4m3), ``e5m2``, ``bf16``; ``int8`` with one scale per row (a token of a head, a row of a weight matrix);
    ``noise:S``, normal, S times the root mean square of what it is added to; ``worst:S``, the input direction in which σ is
    attained, S times as long as the tokens. Places: ``k``, ``v``, ``kv``, ``input`` (what attention sees), ``output`` (what
    W_O puts out; the default) and ``weights`` (all matrices of the attention module).

    Example:
        >>> Perturbation.parse("fp8-kv")
        Perturbation(name='fp8-kv', kind='e4m3', places=('k', 'v'), size=0.0)
    """

    name: str
    kind: str
    places: tuple[str, ...]
    size: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Perturbation:
        """A perturbation as it is written."""
        found = re.fullmatch(r"(fp8|e4m3|e5m2|bf16|int8|(noise|worst):(0?\.\d+|\de-\d+))(?:-(\w+))?", text)
        known = found is not None and (found[4] or "k") in PLACES and float(found[3] or 1) > 0
        if found is None or not known or (found[2] == "worst" and found[4] not in (None, "input")):
            raise ValueError(
                "perturb must be fp8, e5m2, bf16, int8, noise:S or worst:S with 0 < S < 1, then -k, -v, -kv, -input, "
                f"-output or -weights (worst:S takes -input alone), as in fp8-kv or noise:0.01, got {text!r}"
            )
        kind = found[2] or found[1].replace("fp8", "e4m3")
        place = found[4] or ("input" if kind == "worst" else "output")
        return cls(text, kind, PLACES[place], float(found[3] or 0))

    def rounded(self, x: Tensor) -> Tensor:
        """A tensor as the format keeps it."""
        if self.kind == "int8":
            scale = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) / 127
            return (x / scale).round() * scale
        largest = torch.finfo(FLOATS[self.kind]).max  # as caches do: larger values become the largest, not infinite
        return x.clamp(-largest, largest).to(FLOATS[self.kind]).to(x.dtype)

    def spread(self, x: Tensor) -> float:
        """Standard deviation of the noise that is added to a tensor."""
        return self.size * float(x.norm()) / math.sqrt(x.numel())


def sensitivity(
    model: str | os.PathLike[str] | nn.Module | Model,
    text: str | os.PathLike[str] = "python-docs",
    *,
    perturb: str | Sequence[str] = "fp8-kv",
    verify: bool = False,
    n: int = 64,
    inputs: int = 4,
    input_ids: Tensor | dict[str, Any] | None = None,
    per_head: bool = False,
    damage: str | None = None,
    probes: int | None = 16,
    tokenizer: Any = None,
    seed: int = 0,
) -> Sensitivity:
    """The damage ½ δᵀFδ of a perturbation in every layer, beside σ, from a few backward passes for all layers together.

    Args:
        model: a name, a directory, a module in eval mode, or a loaded model. Its task head is kept where it has one.
        text: a name from ``lipscope corpora``, a file or a directory.
        perturb: one or more perturbations, as ``Perturbation`` describes them.
        verify: also perturb each layer, alone and together, and measure what that does.
        n: tokens of one input.
        inputs: how many disjoint inputs are cut from the text.
        input_ids: token ids (B, n) instead of a text, or the keyword arguments of the model as they are (images, …).
        per_head: every key head on its own; for keys and values.
        damage: ``kl``, the mean of KL(p‖p') over positions in nats, or ``hidden``, ‖H' − H‖²_F/‖H‖²_F of the last hidden
            state; by default ``kl`` where there are logits. Padding does not count.
        probes: backward passes; None for one per output number, which gives ½ δᵀFδ up to rounding.
        tokenizer: replaces the model's own.
        seed: of the place in the text, of probes and of noise.

    Raises:
        ValueError: when a perturbation changes nothing, the text is too short, or KL is asked of a model without logits.
        FloatingPointError: when a perturbation makes something infinite or NaN.

    Example:
        >>> import torch, transformers, lipscope
        >>> config = transformers.GPT2Config(vocab_size=20, n_embd=8, n_layer=2, n_head=2, n_positions=16,
        ...                                  bos_token_id=1, eos_token_id=2)
        >>> _ = torch.manual_seed(0)
        >>> model = transformers.GPT2LMHeadModel(config).double().eval()
        >>> found = lipscope.sensitivity(model, input_ids=torch.arange(10)[None], perturb="bf16-kv", verify=True, probes=64)
        >>> [row["predicted_low"] < row["measured"] < row["predicted_high"] for row in found.to_rows()]
        [True, True]
    """
    asked = [Perturbation.parse(name) for name in ([perturb] if isinstance(perturb, str) else perturb)]
    if not asked:
        raise ValueError("perturb must name a perturbation, as in fp8-kv or noise:0.01")
    if damage not in (None, "kl", "hidden"):
        raise ValueError(f"damage must be kl or hidden, got {damage!r}")
    if probes is not None and probes < 2:
        raise ValueError(f"probes must be at least 2, for an interval, got {probes}")
    if per_head and any(not set(p.places) <= {"k", "v"} for p in asked):
        raise ValueError("per_head takes perturbations of keys and values (-k, -v, -kv): elsewhere heads are already mixed")
    handle, module = _open(model, tokenizer, damage)
    about, source = "the given inputs", None
    if input_ids is None:
        source = os.fspath(text)
        input_ids = chunks_of(handle, read_text(source), n, inputs, seed)
        about = f"{counted(inputs, 'input')} of {n} tokens from {source}"
    given = (
        handle.token_inputs(inputs=input_ids) if isinstance(input_ids, dict) else handle.token_inputs(input_ids=input_ids)
    )
    work = _Work(handle, module, given, per_head, seed)
    rows: list[Row] = []
    together: dict[str, dict[str, float]] = {}
    with replaying(module), torch.no_grad():
        squares = work.predict(asked, probes, damage)
        for p in asked:
            mine = [row | {"text": source} for row in work.rows(p, squares[p.name], verify)]
            together |= {p.name: work.together(p, mine)} if verify else {}
            rows += mine
    return Sensitivity(handle.name, about, work.clean.words, tuple(rows), work.passes, together)


@dataclass(frozen=True, eq=False, repr=False)
class Sensitivity(Shown):
    """Damage by layer; every method takes the name of a perturbation, by default the first.

    Attributes:
        model: its name.
        text: what was read, in words.
        damage: the unit of damage, in words.
        rows: the columns of a scan at the input with the largest σ, then ``kind`` (the perturbation), ``shift`` ‖δ‖_F and
            ``size`` ‖δ‖_F/‖x‖_F, ``predicted`` with its 95 % interval ``predicted_low`` to ``predicted_high``, ``measured``,
            and their unit ``damage``.
            ``head`` counts key heads; σ is then the largest of the heads that share it.
        backward_passes: how many, for all layers and perturbations together.
        together: by perturbation, the damage measured with ``all`` layers perturbed, with the layers ``spared`` that matter,
            and ``spared_by_sigma``: as many, those with the largest σ.
    """

    model: str
    text: str
    damage: str
    rows: tuple[Row, ...]
    backward_passes: int
    together: dict[str, dict[str, float]]

    def to_rows(self, name: str | None = None) -> list[Row]:
        """One row per layer (and head): those of one perturbation, or all."""
        if name is not None and name not in {row["kind"] for row in self.rows}:
            raise ValueError(f"no perturbation {name!r} in {self!r}")
        return [row for row in self.rows if name in (None, row["kind"])]

    def correlations(self, name: str | None = None) -> dict[str, tuple[float, float, float]]:
        """Rank correlation of measured damage with each predictor, and its 95 % interval; see ``correlations``."""
        return correlations([self.to_rows(name or self.rows[0]["kind"])])

    def matter(self, name: str | None = None) -> list[int]:
        """The fewest layers that carry at least half of the predicted damage, most first."""
        return carriers(self.to_rows(name or self.rows[0]["kind"]))

    def vllm(self, name: str | None = None) -> str:
        """The options with which vLLM rounds its cache but spares the layers that matter.

        Raises:
            ValueError: when nothing was verified, vLLM has no such cache, or verification does not support the choice.
        """
        p = Perturbation.parse(name or self.rows[0]["kind"])
        if p.places != PLACES["kv"] or p.kind not in VLLM:
            raise ValueError(f"vLLM rounds keys and values together, to fp8, e5m2 or int8, as in fp8-kv, not {p.name}")
        if p.name not in self.together:
            raise ValueError("layers to spare are named only after verification: verify=True, --verify")
        found, spared = self.together[p.name], sorted(self.matter(p.name))
        if not found["spared"] < found["all"] * (1 - len(spared) / len({row["layer"] for row in self.rows})):
            raise ValueError(
                f"verification does not support it: with layers {spared} spared, {found['spared']:.3g} of "
                f"{found['all']:.3g} {self.damage} are left on {self.text}, no less than an equal share"
            )
        return f"--kv-cache-dtype {VLLM[p.kind]} --kv-cache-dtype-skip-layers {' '.join(map(str, spared))}"

    def to_dict(self) -> dict[str, Any]:
        """All that was found, as JSON values: by perturbation the layers that matter and, if verified, rank correlations."""
        found: dict[str, Any] = {
            name: {"matter": self.matter(name)} for name in dict.fromkeys(row["kind"] for row in self.rows)
        }
        found |= {name: found[name] | {"correlations": self.correlations(name), "together": self.together[name]}
                  for name in self.together}  # fmt: skip
        about = {name: value for name, value in vars(self).items() if name != "together"}
        return about | {"perturbations": found, "rows": self.to_rows()}

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(row["kind"] for row in self.rows))
        return f"Sensitivity({self.model}: {kinds}, on {self.text}, by {self.backward_passes} backward passes)"

    __repr__ = __str__


class _Clean:
    """The outputs of the unperturbed model, how far others are from them, and directions ξ with E⟨ξ, ·⟩² their distance."""

    def __init__(self, output: Any, real: Tensor | None, damage: str | None, model: str) -> None:
        self.kl, self.real = _has_distribution(output), real
        if damage == "kl" and not self.kl:
            raise ValueError(
                f"{model} has no logits that are one distribution, so there is no KL: give a model with such a head, or "
                "take damage hidden"
            )
        self.graph = self._read(output)
        self.values = self.graph.detach().double()
        if not bool(torch.isfinite(self.values).all()):
            raise FloatingPointError(f"{model} puts out NaN or infinite values on this input before anything is perturbed")
        self.scale, self.words = 1 / float(self.values.square().sum()), "squared relative change of the last hidden state"
        if self.kl:
            self.values = self.values.log_softmax(-1)
            self.root = (self.values / 2).exp().to(self.graph.dtype)
            self.scale, self.words = 0.5 / self.values[..., 0].numel(), "nats of KL per position"

    def _read(self, output: Any) -> Tensor:
        found: Tensor = output.logits if self.kl else last_hidden_state(output)
        # What a model puts out at padding is nobody's.
        return found if self.real is None or found.shape[:-1] != self.real.shape else found[self.real]

    def probe(self, number: int | None, generator: torch.Generator) -> Tensor:
        """A random ξ, or the one that belongs to an output number."""
        size, dtype = self.graph.numel(), self.graph.dtype
        unit = torch.randn(size, generator=generator, dtype=dtype) if number is None else torch.arange(size) == number
        z = unit.reshape(self.graph.shape).to(self.graph)
        return self.root * z - self.root.square() * (self.root * z).sum(-1, keepdim=True) if self.kl else z

    def damage(self, output: Any) -> float:
        other = self._read(output).double()
        if not self.kl:
            return float((other - self.values).square().sum()) * self.scale
        return float((self.values.exp() * (self.values - other.log_softmax(-1))).sum(-1).mean())


class _Work:
    """A model at its inputs: gradients at all layers from one pass, and passes in which some layers are perturbed."""

    def __init__(self, handle: Model, module: nn.Module, given: dict[str, Any], per_head: bool, seed: int) -> None:
        self.layers, self.name, self.run = handle.layers, handle.name, runner(module, given)
        recording = handle.record(given)
        self.per_head, self.seed, self.recorded, self.real = per_head, seed, list(recording), recording.real
        scope = "head" if per_head else "attention"
        self.sigmas = [layer.rows(scope, solver=SOLVER, certificate=False, typical=True) for layer in self.recorded]
        # By layer: what stands where; by perturbation too: what is added to it.
        self.values: list[dict[Place, Tensor]] = [{} for _ in self.layers]
        self.deltas: dict[str, list[dict[Place, Tensor]]] = {}

    def predict(self, asked: Sequence[Perturbation], probes: int | None, damage: str | None) -> dict[str, list[Tensor]]:
        """⟨g, δ⟩², or s²‖g‖² for noise, by perturbation and layer: (probes, inputs, heads)."""
        places = {place for p in asked for place in p.places}
        if places & {"k", "v"} and not all(layer.through_seam for layer in self.layers):
            raise ValueError(f"{self.name} keeps its own attention and does not show keys and values: take -output")
        leaves: list[dict[Place, Tensor]] = [{} for _ in self.layers]

        def touch(index: int, place: Place, x: Tensor) -> Tensor:
            if place[0] not in places:
                return x
            self.values[index][place] = x.detach()
            leaves[index][place] = torch.zeros_like(x).requires_grad_()
            return x + leaves[index][place]

        with touching(self.layers, touch), torch.enable_grad():
            self.clean = _Clean(self.run(), self.real, damage, self.name)
        for p in asked:
            self._find_deltas(p)
        flat = [leaf for found in leaves for leaf in found.values()]
        self.exact, self.passes = probes is None, probes or self.clean.graph.numel()
        generator = torch.Generator().manual_seed(self.seed)
        squares: dict[str, list[list[Any]]] = {p.name: [[] for _ in leaves] for p in asked}
        for number in range(self.passes):
            xi = self.clean.probe(number if self.exact else None, generator)
            grads = iter(torch.autograd.grad(self.clean.graph, flat, xi, retain_graph=True, materialize_grads=True))
            for index, there in enumerate(leaves):
                here = {place: next(grads) for place in there}
                for p in asked:
                    # Not as tensors: small ones among the freed gradients of a pass keep those from being used again.
                    squares[p.name][index].append(self._square(p, index, here).tolist())
        return {name: [torch.tensor(found, dtype=torch.float64) for found in layers] for name, layers in squares.items()}

    def _find_deltas(self, p: Perturbation) -> None:
        for index, values in enumerate(self.values):
            found = {place: self._perturbed(p, index, place, x) - x for place, x in values.items() if place[0] in p.places}
            self.deltas.setdefault(p.name, []).append(found)
        if not any(bool(delta.any()) for found in self.deltas[p.name] for delta in found.values()):
            raise ValueError(f"{p.name} changes nothing in {self.name}: it is below the last digit of what it touches")

    def _perturbed(self, p: Perturbation, index: int, place: Place, x: Tensor, draw: int = 0) -> Tensor:
        if p.kind == "noise":
            key = (self.seed % 2**64, draw, index, *place[0].encode(), place[1])
            generator = torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
            return x + torch.randn(x.shape, generator=generator, dtype=x.dtype).to(x.device) * p.spread(x)
        if p.kind != "worst":
            return p.rounded(x)
        if len(known := self.deltas.get(p.name, [])) > index:
            return x + known[index][place]
        layer = self.recorded[index]
        found, tokens = layer.sigma(solver=replace(SOLVER, vectors=True), certificate=False), layer.tokens()
        assert found.right is not None
        v: Tensor = found.right[:, 0].reshape(tokens.shape) * (p.size * tokens.flatten(1).norm(dim=1))[:, None, None]
        return x + (v if layer.layer.batch_first else v.transpose(0, 1)).reshape(x.shape)

    def _square(self, p: Perturbation, index: int, grads: dict[Place, Tensor]) -> Tensor:
        """By input and head; by neither for weights, which inputs and heads share."""
        total = torch.zeros((), dtype=torch.float64)
        for place, delta in self.deltas[p.name][index].items():
            g, x = grads[place], self.values[index][place]
            product = (g.square() * p.spread(x) ** 2 if p.kind == "noise" else g * delta).double().cpu()
            if place[0] in ("input", "output") and not self.layers[index].batch_first:
                product = product.transpose(0, 1)
            inputs = 1 if place[0] == "weights" else self.recorded[index].tokens().shape[0]
            total = total + product.reshape(inputs, product.shape[1] if self.per_head else 1, -1).sum(-1)
        return total if p.kind == "noise" else total.square()

    def rows(self, p: Perturbation, squares: Sequence[Tensor], verify: bool) -> Iterator[Row]:
        for index, (layer, found) in enumerate(zip(self.layers, self.sigmas, strict=True)):
            deltas, by_head = self.deltas[p.name][index], squares[index].unbind(-1)
            values = [self.values[index][place] for place in deltas]
            for h, mine in enumerate(by_head):
                head, part = (h, (slice(None), h)) if self.per_head else (None, ...)
                shift, norm = (torch.stack([x[part].norm() for x in xs]).norm().item() for xs in (deltas.values(), values))
                sigmas = [row for row in found if head is None or row["head"] * len(by_head) // layer.heads == h]
                worst = max(sigmas, key=lambda row: row["estimate"]) | {"head": head}
                ends = damage_interval(mine, draws=NOISE_DRAWS if p.kind == "noise" else None, exact=self.exact)
                value, low, high = (end * self.clean.scale for end in ends)
                own: Row = {"shift": shift, "size": shift / norm if norm else 0.0, "predicted": value, "predicted_low": low}
                own |= {"predicted_high": high, "measured": self.measure(p, {layer.index}, head) if verify else None}
                yield study_row(worst, kind=p.name, damage=self.clean.words, **own)

    def measure(self, p: Perturbation, layers: set[int], head: int | None = None) -> float:
        """The damage when these layers are perturbed; of noise, the mean over some draws."""
        draw = 0

        def touch(index: int, place: Place, x: Tensor) -> Tensor:
            if self.layers[index].index not in layers or place[0] not in p.places:
                return x
            new = self._perturbed(p, index, place, x, draw)
            return new if head is None else torch.cat([x[:, :head], new[:, head : head + 1], x[:, head + 1 :]], 1)

        found = []
        for draw in range(NOISE_DRAWS if p.kind == "noise" else 1):  # noqa: B007 - touch reads it
            with touching(self.layers, touch):
                found.append(self.clean.damage(self.run()))
        if not all(map(math.isfinite, found)):
            raise FloatingPointError(f"{p.name} in layers {sorted(layers)} makes the outputs infinite or NaN")
        return math.fsum(found) / len(found)

    def together(self, p: Perturbation, rows: Sequence[Row]) -> dict[str, float]:
        layers, spared = {row["layer"] for row in rows}, carriers(rows)
        ranked = dict.fromkeys(row["layer"] for row in sorted(rows, key=lambda row: -row["estimate"]))
        left = {"all": layers, "spared": layers - {*spared}, "spared_by_sigma": layers - {*list(ranked)[: len(spared)]}}
        return {name: self.measure(p, which) for name, which in left.items()}


def _open(model: Any, tokenizer: Any, damage: str | None) -> tuple[Model, nn.Module]:
    """The model to measure, and the module whose outputs count: with its head if that gives distributions."""
    if isinstance(model, Model):
        handle, module = model, model.model
        if handle.stream is not None:
            raise ValueError("sensitivity needs all layers at once, for products through the whole model: load it whole")
    else:
        given = isinstance(model, nn.Module)
        loaded = Loaded(model, None, type(model).__name__) if given else load_with_head(os.fspath(model))
        module = in_dtype(loaded.model, None)
        if isinstance(tokenizer, str | os.PathLike):
            tokenizer = load_tokenizer(os.fspath(tokenizer))
        handle = Model(module, tokenizer or loaded.tokenizer, name=loaded.name, notes=loaded.notes)
    if module is handle.model and handle.layers[0].causal:
        module = with_tied_head(module)
    with torch.no_grad():
        kept = damage != "hidden" and _has_distribution(runner(module, probe_inputs(handle.model))())
    # Labels that do not exclude each other are no distribution.
    labels = getattr(getattr(module, "config", None), "problem_type", None)
    return handle, module if kept and labels != "multi_label_classification" else handle.model


def _has_distribution(output: Any) -> bool:
    logits = getattr(output, "logits", None)
    return isinstance(logits, Tensor) and logits.shape[-1] > 1


def damage_interval(squares: Tensor, *, draws: int | None = None, exact: bool = False) -> tuple[float, float, float]:
    """The mean over probes of the sum over inputs, and where what is measured lies: of noise, the mean over ``draws``."""
    if exact or not bool(squares.any()):
        return (float(squares.sum()),) * 3
    probes, by_input, mean = len(squares), squares.mean(0), float(squares.sum(1).mean())
    tails = (1 - LEVEL) / 2, (1 + LEVEL) / 2
    if draws is None:
        # The χ² law with the same two moments (Satterthwaite 1946); exact at one input, where ⟨g, δ⟩ is normal.
        freedom = probes * mean**2 / float(by_input.square().sum())
        high, low = (mean * freedom / float(stats.chi2.ppf(tail, freedom)) for tail in tails)
    else:
        # ‖g‖² has the same variance 2‖F‖_F² over ξ as δᵀFδ over noise δ, so that means of the two have an F law as ratio.
        freedom = 2 * mean**2 / float(squares.sum(1).var())
        low, high = (mean * float(stats.f.ppf(tail, draws * freedom, probes * freedom)) for tail in tails)
    return mean, low, high
