"""``lipscope.attack``: the worst inputs of a layer over numbers of tokens, whether it is a model's or stands alone.

A model's layer is taken with the mask, the positions and the normalisation that it has on a text: the search stays in the
image of that normalisation, and may start from the layer's own tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lipscope.attention.layer import Attention
from lipscope.models.corpora import read_text
from lipscope.models.inputs import require_tokenizer
from lipscope.models.load import load
from lipscope.models.model import Model
from lipscope.models.recorded import RecordedLayer
from lipscope.models.text import Chunker, parse_lengths
from lipscope.studies.worst_case.ascent import Progress
from lipscope.studies.worst_case.growth_in_n import LENGTHS, Growth, Method, growth


def attack(
    target: str | os.PathLike[str] | Model | Attention,
    *,
    layer: int = 0,
    head: int | None = None,
    text: str | os.PathLike[str] = "python-docs",
    lengths: str | Sequence[int] = LENGTHS,
    radius: float | None = None,
    method: Method = "construct",
    restarts: int = 16,
    steps: int = 200,
    seed: int = 0,
    progress: Progress | None = None,
    notice: Callable[[str], None] | None = None,
) -> Growth:
    """The inputs at which a layer is least smooth: the worst σ found at every number of tokens, beside its bounds.

    Args:
        target: a model or its name, or an ``Attention`` layer.
        layer: of a model, which layer; negative ones count from the end.
        head: one head before W_O; the whole layer by default.
        text: of a model, where its masks and tokens come from: a name from ``lipscope corpora``, a file or a directory.
        lengths: numbers of tokens, each at least 2, or a string such as ``"2:97:log"``.
        radius: R, for all tokens of norm at most R; by default what comes out of the layer's own normalisation, or else
            the largest norm on the text. An ``Attention`` needs it.
        method: ``"construct"`` measures inputs with closed forms, ``"ascend"`` also climbs from them.
        restarts: see ``lipscope.studies.worst_case.maximise``.
        steps: see there.
        seed: of the search, and of where in the text the inputs lie.
        progress: a function of (lengths done, lengths, what).
        notice: called with what was chosen on the caller's behalf, in words.

    Returns:
        A ``Growth``: ``.worst`` has the worst input of every length, ``.fit`` the power law of its σ.

    Raises:
        ValueError: when a length is below 2, the layer has no weights to search by, or nothing says how long tokens are.

    Example:
        >>> import torch, lipscope
        >>> layer = lipscope.Attention(-3 * torch.eye(2), torch.eye(2), torch.eye(2), scale=1.0)
        >>> study = lipscope.attack(layer, lengths=[4, 8], radius=1.4)
        >>> study.worst[1].sigma.estimate > study.worst[0].sigma.estimate
        True
    """
    sizes = parse_lengths(lengths) if isinstance(lengths, str) else list(lengths)
    search: dict[str, Any] = {"method": method, "restarts": restarts, "steps": steps, "seed": seed, "progress": progress}
    if isinstance(target, Attention):
        if radius is None:
            raise ValueError("weights alone do not say how long tokens are: give a radius, the largest norm of a token")
        return growth(target if head is None else target.head(head), sizes, radius=radius, **search)
    say = notice or (lambda words: None)
    handle = target if isinstance(target, Model) else load(target)
    index = handle.layer(layer).index
    if head is not None:
        handle.check_heads(index, [head])
    if min(sizes, default=2) < 2:
        raise ValueError(f"lengths must be at least 2, got {min(sizes)}")
    chunker = Chunker(read_text(os.fspath(text)), require_tokenizer(handle))
    extra = len(chunker.prefix) + len(chunker.suffix)
    if skipped := [n for n in sizes if n <= extra]:
        sizes = [n for n in sizes if n > extra]
        if not sizes:
            raise ValueError(f"lengths must be more than the {extra} special tokens of {handle.name}, got {skipped}")
        say(f"lengths {skipped} leave no room for text beside {extra} special tokens: left out")
    chunks = chunker.chunks(sizes, 1, seed)

    @cache
    def at(n: int) -> RecordedLayer:
        return handle.record(input_ids=torch.tensor(chunks[n][0]))[index]

    def attention(n: int) -> Attention:
        whole = at(n).weights().for_input(0).to(torch.float64)
        return whole if head is None else whole.head(head)

    def tokens(n: int) -> Tensor:
        return at(n).tokens()[0].double()

    where: dict[str, Any] = {"radius": radius}
    if radius is None:
        norm = at(sizes[-1]).norm
        if norm is not None:
            where = {"norm": norm}
            say(f"tokens lie in the image of the layer's own {type(norm).__name__}")
        else:
            where = {"radius": max(float(tokens(n).norm(dim=-1).max()) for n in sizes)}
            say(f"no normalisation comes before this layer: the radius is the largest token norm on {text}")
    return growth(attention, sizes, **where, starts=tokens, **search)
