"""Which tokens of a text, replaced by which others, make attention least smooth?

σ of a layer depends on the token at position i through its embedding e_i, by way of all layers before. To first order,
putting word w there changes σ by

    ⟨∂σ/∂e_i, E_w − e_i⟩

for the whole vocabulary at once, one product. A substitution is a large step and σ is curved, so the scores only choose
candidates: each is measured exactly, and the best are kept, round by round, at most k tokens in all.

With the top singular pair (u, v) of the layer's Jacobian J and s(x) = ⟨u, attention(x)⟩ at the tokens x that the layer sees,

    ∂σ/∂x = ∂⟨u, J(x)v⟩/∂x = (Hessian of s at x)·v        ∂σ/∂e = (∂x/∂e)ᵀ ∂σ/∂x

The Hessian product comes from differentiating twice through a plain-torch attention core fed with the model's own queries,
keys and values (so rotary embeddings and QK-norm count); the pull-back to the embeddings is one backward pass through the
model.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lipscope.doors import at_least
from lipscope.models.capture import Place, ReachedError, replaying, touching
from lipscope.models.model import Model
from lipscope.models.recorded import RecordedLayer
from lipscope.models.text import bare_ids
from lipscope.rounding import Shown
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto
from lipscope.studies.rows import Row, sigma_row
from lipscope.studies.worst_case.ascent import Progress, unseen

_BATCH = 32
# Candidates are compared with one another: their upper ends do not matter.
_RANKING = Auto(rtol=1e-4, interval=None)


@dataclass(frozen=True)
class Substitution:
    """One replaced token."""

    position: int  # where
    before: str  # the token that was there, as text
    after: str  # the token that is there now
    predicted: float  # first-order change of σ
    sigma: float  # σ measured after this and all earlier substitutions


@dataclass(frozen=True)
class Trial:
    """One measured candidate."""

    round: int  # from 0
    position: int
    word: int  # id of the word put there
    before: float  # σ without it
    predicted: float  # first-order change of σ
    sigma: float  # measured σ


@dataclass(frozen=True, eq=False, repr=False)
class TokenAttack(Shown):
    """The worst text found."""

    before: SpectralNorm  # σ of the text as given, one item
    after: SpectralNorm  # σ of the worst text
    substitutions: tuple[Substitution, ...]  # in the order in which they were made; empty when nothing raised σ
    before_text: str  # the text as given
    after_text: str  # the worst text
    before_ids: Tensor  # token ids of the text as given (n,)
    after_ids: Tensor  # those of the worst text, which reading it anew need not give back
    retokenises: bool | None  # whether the tokenizer turns the new text into the new ids; None without a tokenizer
    tried: tuple[Trial, ...]  # every measured candidate
    start_seed: int  # seed of the start vector that measured ``after``, unknown to the search; that of ``before`` is 0

    def steps(self) -> list[dict[str, Any]]:
        """One plain dictionary per substitution."""
        return [{"round": i + 1, **vars(s)} for i, s in enumerate(self.substitutions)]

    def to_rows(self) -> list[Row]:
        """Two rows with the columns of a scan: σ of the text as given, and of the worst text."""
        return [
            sigma_row(self.before, kind="text as given", words=self.before_text, start_seed=0),
            sigma_row(self.after, kind="worst text", words=self.after_text, start_seed=self.start_seed),
        ]


class _Path(NamedTuple):
    ids: Tensor
    sigma: float
    made: tuple[Substitution, ...]


def attack_tokens(
    handle: Model,
    text: str | None = None,
    *,
    input_ids: Tensor | None = None,
    layer: int,
    head: int | None = None,
    k: int = 1,
    candidates: int = 64,
    beam: int = 1,
    progress: Progress | None = None,
) -> TokenAttack:
    """Replace at most k tokens so that σ of a layer becomes as large as possible.

    Args:
        handle: a model from ``lipscope.load``.
        text: the text, tokenised as the model expects; or
        input_ids: token ids (n,).
        layer: layer index; σ is that of scope ``attention``.
        head: measure this head alone, before W_O.
        k: most tokens to replace. Special tokens are neither replaced nor put in.
        candidates: substitutions measured per round and path.
        beam: paths kept from round to round; 1 is greedy.
        progress: called with (rounds done, rounds, what).

    Returns:
        A ``TokenAttack``; every σ in it was measured, none is an extrapolation.

    Raises:
        ValueError: when the model has no tokens, the text is empty or too long, or nothing in it may be replaced.

    Example:
        >>> import torch, lipscope, transformers
        >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
        >>> config = transformers.BertConfig(vocab_size=20, max_position_embeddings=8, **sizes)
        >>> model = lipscope.load(transformers.BertModel(config).eval())
        >>> found = attack_tokens(model, input_ids=torch.tensor([5, 6, 7]), layer=0, k=1)
        >>> bool(found.after.estimate[0] >= found.before.estimate[0])
        True
    """
    at_least(1, k=k, candidates=candidates, beam=beam)
    given: Any = {"text": text, "input_ids": input_ids}
    start = handle.token_inputs(**{name: value for name, value in given.items() if value is not None})["input_ids"]
    if len(start) != 1:
        raise ValueError(f"input_ids holds {len(start)} texts, but one is attacked at a time: pass ids of shape (n,)")
    if head is not None:
        handle.check_heads(layer, [head])
    words = Vocabulary(handle)
    if not bool(words.replaceable(start[0]).any()):
        raise ValueError("the text holds special tokens only: there is nothing to replace")
    before = _sigma(handle.record(input_ids=start)[layer], head, Auto())
    best = _Path(start[0], float(before.estimate.flatten()[0]), ())
    paths = [best]
    tried: list[Trial] = []
    for number in range(k):
        following = [
            longer for path in paths for longer in _successors(handle, path, words, layer, head, candidates, number, tried)
        ]
        # The same text reached in another order counts once.
        ranked = sorted(following, key=lambda path: -path.sigma)
        paths = list({tuple(path.ids.tolist()): path for path in reversed(ranked)}.values())[::-1][:beam]
        best = max(best, *paths[:1], key=lambda path: path.sigma) if paths else best
        if progress is not None:
            progress(number + 1, k, f"σ = {best.sigma:.4g}")
        if not paths:
            break
    # A text that was chosen by measuring is measured with a start vector that did not choose it.
    same = best.ids.equal(start[0])
    seed = 0 if same else unseen(best.ids, torch.tensor([trial.sigma for trial in tried], dtype=torch.float64))
    after = before if same else _sigma(handle.record(input_ids=best.ids)[layer], head, Auto(seed=seed))
    old, new = words.write(start[0]), words.write(best.ids)
    ids = (start[0].cpu(), best.ids.cpu())
    return TokenAttack(before, after, best.made, old, new, *ids, words.reads_back(new, best.ids), tuple(tried), seed)


def _successors(
    handle: Model, path: _Path, words: Vocabulary, layer: int, head: int | None, candidates: int, number: int,
    tried: list[Trial],
) -> list[_Path]:  # fmt: skip
    """Paths one substitution longer that raise σ, each measured."""
    gradient = embedding_gradient(handle.record(input_ids=path.ids)[layer], head)
    g, e = gradient.at_embeddings[0], gradient.embeddings[0]
    scores = (g @ words.embeddings.mT - (g * e).sum(-1, keepdim=True)).double()
    open_rows = words.replaceable(path.ids)
    open_rows[[s.position for s in path.made]] = False
    scores[~open_rows] = -torch.inf
    scores[:, ~words.usable] = -torch.inf
    scores[torch.arange(len(path.ids)), path.ids] = -torch.inf
    chosen = _choose(scores, candidates)
    batch, sigmas, found = path.ids.repeat(len(chosen), 1), list[float](), []
    for row, (i, w) in zip(batch, chosen, strict=True):
        row[i] = w
    for part in batch.split(_BATCH) if chosen else ():
        sigmas += _sigma(handle.record(input_ids=part)[layer], head, _RANKING).estimate.flatten().tolist()
    for ids, (i, w), sigma in zip(batch, chosen, sigmas, strict=True):
        predicted = float(scores[i, w])
        tried.append(Trial(number, i, w, path.sigma, predicted, sigma))
        if sigma > path.sigma:
            step = Substitution(i, words.write(path.ids[i : i + 1]), words.write(ids[i : i + 1]), predicted, sigma)
            found.append(_Path(ids, sigma, (*path.made, step)))
    return found


def _choose(scores: Tensor, count: int) -> list[tuple[int, int]]:
    """The best word of as many positions as half the count allows, then the best scores anywhere."""
    n, V = scores.shape
    tops = scores.max(-1)
    rows = tops.values.argsort(descending=True)[: max(1, count // 2)].tolist()
    chosen = dict.fromkeys((i, int(tops.indices[i])) for i in rows if bool(torch.isfinite(tops.values[i])))
    flat = scores.flatten().topk(min(count, n * V))
    for value, index in zip(flat.values.tolist(), flat.indices.tolist(), strict=True):
        if len(chosen) >= count or value == -torch.inf:
            break
        chosen.setdefault((index // V, index % V))
    return list(chosen)


def _sigma(layer: RecordedLayer, head: int | None, solver: Auto) -> SpectralNorm:
    scope, heads = ("attention", None) if head is None else ("head", [head])
    return layer.sigma(scope, heads=heads, solver=solver)


class Vocabulary:
    """The words a model knows: their names and embeddings, and which may be put into a text."""

    def __init__(self, handle: Model) -> None:
        tokenizer = self._tokenizer = handle.tokenizer
        table = embedding_table(handle)
        ids = torch.arange(int(table.weight.shape[0]), device=handle.device)  # type: ignore[index]
        with torch.no_grad():
            # Through the module, not its weight: some models scale what they look up.
            self.embeddings: Tensor = table(ids[None])[0]
        self.names = _names(tokenizer, len(ids))
        special = set(getattr(tokenizer, "all_special_ids", None) or [])
        special |= {*getattr(tokenizer, "get_added_vocab", dict)().values()}
        for name in ("pad", "bos", "eos", "cls", "sep", "mask", "unk"):
            found = getattr(getattr(handle.model, "config", None), f"{name}_token_id", None)
            special |= set(found if isinstance(found, list) else [found]) - {None}
        self._special = torch.tensor(sorted(special), dtype=torch.int64, device=handle.device)
        writable = [name is not None and not _UNUSED.fullmatch(name) for name in self.names]
        self.usable = torch.tensor(writable, device=handle.device) & self.replaceable(ids)

    def replaceable(self, ids: Tensor) -> Tensor:
        """True at positions that hold no special token."""
        return ~torch.isin(ids, self._special)

    def write(self, ids: Tensor) -> str:
        """The ids as text."""
        if self._tokenizer is None:
            return str(ids.tolist())
        decode = getattr(self._tokenizer, "decode", lambda ids: "".join(self.names[i] or "" for i in ids))
        return str(decode(ids.tolist()))

    def reads_back(self, text: str, ids: Tensor) -> bool | None:
        """Whether the tokenizer gives these ids for this text."""
        return None if self._tokenizer is None else bare_ids(self._tokenizer, text) == ids.tolist()


_UNUSED = re.compile(r"\[unused\d+\]|<unused\d+>|<\|reserved[^>]*>")


def _names(tokenizer: Any, size: int) -> list[str | None]:
    """How the tokenizer writes each id; None for ids that it cannot write."""
    if tokenizer is None:
        return [str(i) for i in range(size)]

    def written(ids: list[int]) -> list[str | None]:
        try:
            return list(tokenizer.convert_ids_to_tokens(ids))
        except (ValueError, IndexError, KeyError, TypeError, OverflowError):
            return [None] if len(ids) == 1 else [name for i in ids for name in written([i])]

    return written(list(range(size)))


class EmbeddingGradient(NamedTuple):
    """Gradients of σ of a layer at recorded tokens."""

    at_layer: Tensor  # ∂σ/∂x at the tokens that attention sees, (B, n, d)
    at_embeddings: Tensor  # ∂σ/∂e at the output of the embedding table, (B, n, d_e)
    embeddings: Tensor  # that output


def embedding_gradient(layer: RecordedLayer, head: int | None = None) -> EmbeddingGradient:
    """∂σ/∂e of a layer (scope ``attention``), or of one head before W_O, at a recorded forward pass on token ids.

    Refuses a model without embedding table, and a layer that does more between its core and W_O than a linear map.
    """
    sigma = _sigma(layer, head, Auto(vectors=True))
    assert sigma.left is not None
    assert sigma.right is not None
    B, n = layer.tokens().shape[:2]
    left, right = (vectors.reshape(B, -1, n, vectors.shape[-1])[:, 0] for vectors in (sigma.left, sigma.right))
    at_layer = _hessian_product(layer, left, right, sigma.estimate.reshape(B), head)
    x, e = _from_embeddings(layer)
    (at_embeddings,) = torch.autograd.grad(x, e, at_layer.to(x))
    return EmbeddingGradient(at_layer, at_embeddings, e.detach())


def _hessian_product(layer: RecordedLayer, left: Tensor, right: Tensor, values: Tensor, head: int | None) -> Tensor:
    with torch.enable_grad():
        x = layer.tokens().detach().clone().requires_grad_()
        seam, cotangent = layer.layer.through_seam, left
        outputs = layer.joined_heads(x) if seam else layer.map("attention" if head is None else "head")(x)
        if head is not None:
            outputs = outputs.unflatten(2, (layer.heads, -1))[:, :, head]
        elif seam:  # u as the heads see it, through W_Oᵀ
            with replaying(layer.model.model):
                joined = torch.zeros_like(outputs).requires_grad_()
                (cotangent,) = torch.autograd.grad(layer.layer.out(joined), joined, left.to(outputs))
        (slope,) = torch.autograd.grad(outputs, x, cotangent.to(outputs), create_graph=True)
        along = (slope * right).sum((1, 2))
        (gradient,) = torch.autograd.grad(along.sum(), x)
    # ⟨u, Jv⟩ = σ: holds only if what was differentiated is the map that was measured.
    if bool(((along.detach().double() - values).abs() > 1e-3 * values).any()):
        raise NotImplementedError(
            f"layer {layer.index} ({layer.layer.name}) does more than a linear map between attention and its output "
            "projection, so the gradient of its σ is not available"
        )
    return gradient


def embedding_table(handle: Model) -> nn.Module:
    """The module that turns token ids into vectors."""
    try:
        table = handle.model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        table = None
    if not isinstance(table, nn.Module) or not isinstance(getattr(table, "weight", None), Tensor):
        raise ValueError(f"{handle.name} has no token embeddings, so there are no tokens to substitute")
    return table


def _from_embeddings(layer: RecordedLayer) -> tuple[Tensor, Tensor]:
    """The tokens that the layer's attention sees, as a function of the embeddings: both tensors, in one graph."""
    embeddings: list[Tensor] = []
    model, reached = layer.model, None

    def embedded(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        embeddings.append(output.detach().clone().requires_grad_())
        return embeddings[-1]

    def entering(index: int, place: Place, x: Tensor) -> Tensor:
        if place[0] == "input":
            raise ReachedError(x)
        return x

    # The table may sit in several modules that share its weights; the one that is called counts.
    weight = embedding_table(model).weight
    tables = [part for part in model.model.modules() if isinstance(part, nn.Embedding) and part.weight is weight]
    with ExitStack() as hooks, replaying(model.model, layer.recorded.documents), torch.enable_grad():
        for part in tables:
            hooks.enter_context(part.register_forward_hook(embedded))
        try:
            with touching([layer.layer], entering):
                layer.recorded.run()
        except ReachedError as stopped:
            reached = stopped.found
    if len(embeddings) != 1 or reached is None:
        raise ValueError(f"{model.name} does not embed its tokens once: substitutions cannot be scored")
    return reached, embeddings[0]
