"""Which tokens carry the worst direction of a layer, and which pairs of tokens influence each other most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lipscope.measure.influence import influence
from lipscope.measure.scopes import CROSS_SCOPES
from lipscope.models.inputs import TokenArguments
from lipscope.models.media import Signal
from lipscope.models.model import Model
from lipscope.models.scopes import HeadsOperator
from lipscope.rounding import Shown, interval, printable
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto

_COPIES = 32
_POWER_STEPS = 60
_SINGULAR_VALUES = 8
# Of more tokens than this of a clip or image, their number squared would take hours.
_MOST_INFLUENCE = 256


@dataclass(frozen=True, eq=False, repr=False)
class TokenView(Shown):
    """A layer seen token by token."""

    tokens: list[str]  # the tokens as the tokenizer writes them
    energy: Tensor  # share of each token in the worst input direction, summing to one
    influence: Tensor  # ‖∂out_i/∂x_j‖₂, rows are outputs; empty for a clip or image of very many tokens
    result: SpectralNorm  # σ of the layer or head
    layer: int = 0
    head: int | None = None  # index of the head for scope ``head``, else None
    input: int | None = None  # index of the input in a scan, None for a text of its own

    def to_rows(self) -> list[dict[str, Any]]:
        """One per token: where it stands, and its share of the worst direction."""
        shares = enumerate(zip(self.tokens, self.energy.tolist(), strict=True))
        return [{"position": k, "token": token, "share": share} for k, (token, share) in shares]

    def __str__(self) -> str:
        where = f"layer {self.layer}" + ("" if self.head is None else f", head {self.head}")
        worst = sorted(self.to_rows(), key=lambda row: -row["share"])[:5]
        lines = [f"{where}, scope {self.result.scope}: σ ∈ {interval(self.result.lower, self.result.upper)}"]
        lines += [f"  {row['share']:.0%} of the worst direction on {row['token']!r} ({row['position']})" for row in worst]
        return printable("\n".join(lines))

    def strongest_pairs(self, count: int = 10) -> list[tuple[int, int, float]]:
        """The pairs (output i, input j) of two tokens with the largest influence."""
        if not self.influence.numel():
            return []
        values = self.influence.clone().fill_diagonal_(0)
        top = values.flatten().topk(min(count, values.numel()))
        n = values.shape[1]
        return [(int(k) // n, int(k) % n, float(v)) for v, k in zip(top.values, top.indices, strict=True) if float(v) > 0]

    def to_dict(self) -> dict[str, Any]:
        """The view as JSON values, to six significant digits; leading singular values come from below."""
        r = self.result
        return {
            "layer": self.layer, "head": self.head, "scope": r.scope, "n": len(self.tokens), "input": self.input,
            "lower": r.lower, "estimate": r.estimate, "upper": r.upper, "upper_kind": str(r.upper_kind), "delta": r.delta,
            "tokens": self.tokens, "energy": _digits(self.energy), "singular_values": _digits(r.singular_values),
            "influence": [_digits(row) for row in self.influence],
        }  # fmt: skip


def token_view(
    handle: Model, text: str | Sequence[int] | Signal, layer: int, *, scope: str = "attention", head: int | None = None
) -> TokenView:
    """Look at one layer, or one head, of a model on one text; refuses texts that are empty or too long."""
    if head is not None:
        scope = "head"
    elif scope == "head":
        raise ValueError(
            "scope 'head' needs the index of a head; or take attention, norm+attention, attention+residual, block"
        )
    if scope in CROSS_SCOPES:
        raise ValueError(f"scope {scope} has other tokens where it begins than where it ends: its σ is in lipscope scan")
    if isinstance(text, Signal):
        inputs = text.inputs
    else:
        given: TokenArguments = {"text": text} if isinstance(text, str) else {"input_ids": torch.tensor([list(text)])}
        inputs = handle.token_inputs(**given)
    at = handle.record(inputs)[layer]
    heads = None if head is None else [head]
    result = at.sigma(scope, heads=heads, solver=Auto(k=_SINGULAR_VALUES))[0 if heads is None else (0, 0)]
    assert result.token_energy is not None
    plain = at.attention if scope in ("attention", "head") else None
    if isinstance(text, Signal) and text.n > _MOST_INFLUENCE:
        matrix = result.token_energy.new_zeros(0, 0)
    elif plain is not None:
        matrix = influence(plain if head is None else plain.head(head), at.tokens(scope)[0])
    else:
        # The same input many times over: as many columns of the Jacobian per product.
        copies = handle.record({name: value.repeat_interleave(_COPIES, dim=0) for name, value in inputs.items()})
        operator = copies[layer].operator(scope, analytic=False)
        matrix = _influence_by_columns(operator if head is None else HeadsOperator.of(operator, [head], at.heads))
    if isinstance(text, Signal):
        readable = (
            text.labels if len(text.labels) == len(result.token_energy) else list(map(str, range(len(result.token_energy))))
        )
    else:
        readable = readable_tokens(handle.tokenizer, inputs.get("decoder_input_ids", inputs["input_ids"])[0].tolist())
    return TokenView(readable, result.token_energy, matrix, result, at.index, head)


def readable_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What tokens mean: bytes as the characters that they spell, a line break as a backslash and n.

    A character that several tokens share is shown in each of them, with … on the side where the rest is; bytes that spell no
    character are shown as numbers, ⟨E2⟩.
    """
    names = tokenizer.convert_ids_to_tokens(list(ids))
    special = {*getattr(tokenizer, "all_special_tokens", ())}
    known: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    # Byte-level vocabularies, such as GPT-2's, write bytes as letters: they have the ones for a space and a line break.
    alphabet: dict[int, str] = bytes_to_unicode() if "Ġ" in known and "Ċ" in known else {}  # type: ignore[no-untyped-call]
    letters = {letter: byte for byte, letter in alphabet.items()}
    shown = [""] * len(names)
    spelled = bytearray()
    owners: list[int] = []  # the token that each byte belongs to

    def say() -> None:
        places = iter(owners)
        for character in spelled.decode(errors="surrogateescape"):
            tokens = [next(places) for _ in character.encode(errors="surrogateescape")]
            escaped = ord(character) - 0xDC00  # what is no UTF-8 comes byte by byte
            word = f"⟨{escaped:02X}⟩" if 0x80 <= escaped <= 0xFF else character.replace("\n", "\\n")
            for token in range(tokens[0], tokens[-1] + 1):
                shown[token] += ("…" if token > tokens[0] else "") + word + ("…" if token < tokens[-1] else "")
        spelled.clear()
        owners.clear()

    for i, name in enumerate(names):
        found = None if name is None or name in special else _bytes_of(name, letters)
        if found is None:
            say()
            shown[i] = str(name)
        else:
            spelled += found
            owners += [i] * len(found)
    say()
    return shown


def _bytes_of(name: str, letters: dict[str, int]) -> bytes | None:
    """The bytes that a token stands for; None when it is not made of any."""
    if letters:
        return bytes(map(letters.__getitem__, name)) if letters.keys() >= set(name) else None
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):  # SentencePiece's way to write a byte
        return bytes.fromhex(name[3:5])
    return name.replace("▁", " ").encode("utf-8", "surrogatepass")


def _influence_by_columns(operator: Operator) -> Tensor:
    """Block norms of one input's Jacobian from an operator that holds that input in every batch item."""
    n, d = operator.input_shape
    n_out, d_out = operator.output_shape
    result = torch.zeros(n_out, n, dtype=operator.dtype, device=operator.device)
    for j in range(n):
        columns = []
        for directions in torch.eye(d).split(operator.batch):
            u = torch.zeros(operator.batch, n, d, dtype=operator.dtype, device=operator.device)
            u[: len(directions), j] = directions.to(u)
            columns.append(operator.matvec(u.flatten(1))[: len(directions)])
        result[:, j] = _spectral_norms(torch.cat(columns).reshape(d, n_out, d_out).transpose(0, 1))
    return result


def _spectral_norms(blocks: Tensor) -> Tensor:
    """Largest singular values of a stack of matrices, by power iteration from a fixed random start."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(blocks.shape[0], blocks.shape[2], 1, generator=generator, dtype=torch.float64).to(blocks)
    x = normalize(x, dim=1, eps=torch.finfo(x.dtype).tiny)
    for _ in range(_POWER_STEPS):
        x = normalize(blocks.mT @ (blocks @ x), dim=1, eps=torch.finfo(x.dtype).tiny)
    norms: Tensor = (blocks @ x).norm(dim=1)
    return norms[:, 0]


def _digits(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
