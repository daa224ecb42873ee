"""Which tokens carry the worst direction of a layer, and which pairs of tokens influence each other most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lipscope.measure.influence import influence
from lipscope.models.inputs import TokenArguments
from lipscope.models.model import Model
from lipscope.models.scopes import HeadsOperator
from lipscope.spectral.operator import Operator
from lipscope.spectral.result import SpectralNorm
from lipscope.spectral.solvers import Auto

_COPIES = 32
_POWER_STEPS = 60
_SINGULAR_VALUES = 8


@dataclass(frozen=True, eq=False)
class TokenView:
    """A layer seen token by token."""

    tokens: list[str]  # the tokens as the tokenizer writes them
    energy: Tensor  # share of each token in the worst input direction, summing to one
    influence: Tensor  # ‖∂out_i/∂x_j‖₂, rows are outputs
    result: SpectralNorm  # σ of the layer or head
    layer: int = 0
    head: int | None = None  # index of the head for scope ``head``, else None
    input: int | None = None  # index of the input in a scan, None for a text of its own

    def strongest_pairs(self, count: int = 10, *, apart: bool = True) -> list[tuple[int, int, float]]:
        """The pairs (output i, input j) with the largest influence; ``apart`` leaves out a token on itself."""
        values = self.influence.clone()
        if apart:
            values.fill_diagonal_(0)
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
    handle: Model, text: str | Sequence[int], layer: int, *, scope: str = "attention", head: int | None = None
) -> TokenView:
    """Look at one layer, or one head, of a model on one text; refuses texts that are empty or too long."""
    if head is not None:
        scope = "head"
    elif scope == "head":
        raise ValueError(
            "scope 'head' needs the index of a head; or take attention, norm+attention, attention+residual, block"
        )
    given: TokenArguments = {"text": text} if isinstance(text, str) else {"input_ids": torch.tensor([list(text)])}
    inputs = handle.token_inputs(**given)
    at = handle.record(inputs)[layer]
    heads = None if head is None else [head]
    result = at.sigma(scope, heads=heads, solver=Auto(k=_SINGULAR_VALUES))[0 if heads is None else (0, 0)]
    assert result.token_energy is not None
    plain = at.attention if scope in ("attention", "head") else None
    if plain is not None:
        matrix = influence(plain if head is None else plain.head(head), at.tokens(scope)[0])
    else:
        # The same input many times over: as many columns of the Jacobian per product.
        copies = handle.record({name: value.repeat_interleave(_COPIES, dim=0) for name, value in inputs.items()})
        operator = copies[layer].operator(scope, analytic=False)
        matrix = _influence_by_columns(operator if head is None else HeadsOperator.of(operator, [head], at.heads))
    readable = readable_tokens(handle.tokenizer, inputs["input_ids"][0].tolist())
    return TokenView(readable, result.token_energy, matrix, result, at.index, head)


def readable_tokens(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What tokens mean: bytes as the characters that they spell, a line break as a backslash and n.

    A character that several tokens share is shown in each of them, with … on the side where the rest is; bytes that spell no
    character are shown as numbers, ⟨E2⟩.
    """
    names = tokenizer.convert_ids_to_tokens(list(ids))
    special = {*getattr(tokenizer, "all_special_tokens", ())}
    alphabet = _byte_alphabet() if _is_byte_level(tokenizer) else {}
    shown = [""] * len(names)
    spelled = bytearray()
    owners: list[int] = []  # the token that each byte belongs to

    def say() -> None:
        for character, places in _characters(bytes(spelled)):
            first, last = owners[places.start], owners[places.stop - 1]
            for token in range(first, last + 1):
                shown[token] += ("…" if token > first else "") + character + ("…" if token < last else "")
        spelled.clear()
        owners.clear()

    for i, name in enumerate(names):
        found = None if name is None or name in special else _bytes_of(name, alphabet)
        if found is None:
            say()
            shown[i] = str(name)
        else:
            spelled += found
            owners += [i] * len(found)
    say()
    return shown


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether a tokenizer writes bytes as letters, as GPT-2's does: then it has the ones for a space and a line break."""
    known: dict[str, int] = getattr(tokenizer, "get_vocab", dict)()
    return "Ġ" in known and "Ċ" in known


def _byte_alphabet() -> dict[str, int]:
    """The letter of every byte in byte-level vocabularies: printable ones stand for themselves, the others follow U+0100."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _bytes_of(name: str, alphabet: dict[str, int]) -> bytes | None:
    """The bytes that a token stands for; None when it is not made of any."""
    if alphabet:
        return bytes(alphabet[letter] for letter in name) if all(letter in alphabet for letter in name) else None
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):  # SentencePiece's way to write a byte
        return bytes.fromhex(name[3:5])
    return name.replace("▁", " ").encode("utf-8", "surrogatepass")


def _characters(spelled: bytes) -> Iterator[tuple[str, range]]:
    """The characters of bytes, with where each stands; what is no UTF-8 comes byte by byte, as numbers."""
    start = 0
    while start < len(spelled):
        for width in range(1, 5):
            with suppress(UnicodeDecodeError):
                yield spelled[start : start + width].decode().replace("\n", "\\n"), range(start, start + width)
                break
        else:
            width = 1
            yield f"⟨{spelled[start]:02X}⟩", range(start, start + 1)
        start += width


def _influence_by_columns(operator: Operator) -> Tensor:
    """Block norms of one input's Jacobian from an operator that holds that input in every batch item."""
    n, d = operator.input_shape
    n_out, d_out = operator.output_shape
    result = torch.zeros(n_out, n, dtype=operator.dtype, device=operator.device)
    for j in range(n):
        columns = []
        for start in range(0, d, operator.batch):
            u = torch.zeros(operator.batch, n, d, dtype=operator.dtype, device=operator.device)
            count = min(operator.batch, d - start)
            u[torch.arange(count), j, start + torch.arange(count)] = 1
            columns.append(operator.matvec(u.flatten(1))[:count])
        blocks = torch.cat(columns).reshape(d, n_out, d_out).transpose(0, 1)
        result[:, j] = _spectral_norms(blocks)
    return result


def _spectral_norms(blocks: Tensor) -> Tensor:
    """Largest singular values of a stack of matrices, by power iteration from a fixed random start."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(blocks.shape[0], blocks.shape[2], 1, generator=generator, dtype=torch.float64).to(blocks)
    tiny = torch.finfo(blocks.dtype).tiny
    for _ in range(_POWER_STEPS):
        x = blocks.mT @ (blocks @ (x / x.norm(dim=1, keepdim=True).clamp_min(tiny)))
    norms: Tensor = (blocks @ (x / x.norm(dim=1, keepdim=True).clamp_min(tiny))).norm(dim=1)
    return norms[:, 0]


def _digits(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
