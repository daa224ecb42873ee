"""A text as tokens: cut into disjoint chunks of exactly n tokens, for the lengths that are asked for.

A text is tokenised once. Chunks never overlap, neither within one length nor between lengths, and their places are drawn
from a seed. Special tokens are those of the model's tokenizer ([CLS] … [SEP], a leading <s>) and count towards n.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lipscope.models.inputs import check_length, refuse_unknown, require_tokenizer

if TYPE_CHECKING:
    from lipscope.models.model import Model


# More than a model reads, and more than anybody measures.
LONGEST, MOST_LENGTHS = 10**9, 10_000


class Chunker:
    """Token ids of a text, and disjoint chunks of them; a tokenizer is what maps a string to ``{"input_ids": …}``."""

    def __init__(self, documents: Sequence[str], tokenizer: Any) -> None:
        text = "\n\n".join(documents)
        if not text.strip():
            raise ValueError("text is empty")
        self.prefix, self.suffix = special_tokens(tokenizer)
        self.ids = refuse_unknown(tokenizer, bare_ids(tokenizer, text))

    def chunks(self, lengths: Sequence[int], inputs: int, seed: int = 0) -> dict[int, list[list[int]]]:
        """``inputs`` disjoint chunks of exactly n tokens for every length n; refuses a text that is too short for them."""
        extra = len(self.prefix) + len(self.suffix)
        for n in lengths:
            if n <= extra:
                raise ValueError(f"n = {n} leaves no room for text beside the {extra} special tokens of this model")
        needed = inputs * sum(n - extra for n in lengths)
        spare = len(self.ids) - needed
        if spare < 0:
            raise ValueError(
                f"the text has {len(self.ids)} tokens, but {inputs} disjoint inputs of each length "
                f"{', '.join(map(str, lengths))} take {needed}: use a longer text, fewer inputs or shorter lengths"
            )
        wanted = [n - extra for n in lengths for _ in range(inputs)]
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


def bare_ids(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text of any length, without special tokens."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast"):
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
    # Half of the time of calling the tokenizer, which also counts where every token stands in the text.
    backend.no_truncation()
    backend.no_padding()
    # Every part once: pieces of words or whole words where no token reaches across the end of one, else the text.
    apart = _ends_tokens_with_words(backend, text)
    pieces = apart and _cuts_as_gpt2(backend, text)
    parts = _pieces(text) if pieces else re.findall(r"\s*\S+|\s+", text) if apart else [text]
    once, known = {*parts}, dict[str, list[int]]()
    if pieces:
        tokenise = backend.model.tokenize
        known = {part: [token.id for token in tokenise(part.translate(_LETTERS))] for part in once if part.isascii()}
    others = list(once - known.keys())
    encoded = backend.encode_batch_fast(others, add_special_tokens=False)
    known |= {part: found.ids for part, found in zip(others, encoded, strict=True)}
    return [token for part in parts for token in known[part]]


# Words of ASCII in a row or one other word, with the white space before them; what GPT-2's rule cuts ASCII into; and the
# characters that stand for its bytes.
_RUNS = re.compile(r"(?:[ \t\n\r]*+[!-~]++(?!\S))++|\s*\S+|\s+")
_PIECES = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")
_LETTERS: dict[int, str] = bytes_to_unicode()  # type: ignore[no-untyped-call]


def _pieces(text: str) -> list[str]:
    """Words of ASCII in pieces, and whole other words."""
    found: list[str] = []
    for run in _RUNS.findall(text):
        found += _PIECES.findall(run) if run.isascii() else [run]
    return found


def _cuts_as_gpt2(backend: Any, text: str) -> bool:
    """Whether the tokenizer cuts the words of this text as GPT-2's does."""
    added = any(token.content in text for token in backend.get_added_tokens_decoder().values())
    return type(backend.pre_tokenizer).__name__ == "ByteLevel" and backend.normalizer is None and not added


def _ends_tokens_with_words(backend: Any, text: str) -> bool:
    """Whether the tokenizer cuts a text before white space: GPT-2's and BERT's rules do, unless an added token disagrees."""
    cutter = backend.pre_tokenizer
    rule = type(cutter).__name__
    by_words = rule == "BertPreTokenizer" or (rule == "ByteLevel" and cutter.use_regex and not cutter.add_prefix_space)
    added = backend.get_added_tokens_decoder().values()
    across = any(token.rstrip or re.search(r"\S\s", token.content) for token in added)
    # Control characters that are white space to Python are letters or nothing to some of these rules.
    strange = any(character in text for character in "\x0b\x0c\x1c\x1d\x1e\x1f\x85")
    plain = type(backend.normalizer).__name__ in ("NoneType", "BertNormalizer") and not strange
    return bool(by_words and plain and not across)


def packed_chunks(
    documents: Sequence[str], tokenizer: Any, lengths: Sequence[int], inputs: int, seed: int = 0
) -> dict[int, list[list[list[int]]]]:
    """``inputs`` chunks of exactly n tokens for every length, each a list of documents; the last one is cut to fit.

    A text of one document is packed paragraph by paragraph. Documents come in seeded random order and are used
    once; a text with too few tokens is refused, with their number.
    """
    if len(documents) == 1:
        documents = [part for part in re.split(r"\n\s*\n", documents[0]) if part.strip()]
    prefix, suffix = special_tokens(tokenizer)
    tokenised = [bare_ids(tokenizer, part) for part in documents]
    refuse_unknown(tokenizer, [i for ids in tokenised for i in ids])
    least = len(prefix) + len(suffix) + 1
    queue = [[*prefix, *ids, *suffix] for ids in tokenised if ids]
    available = sum(map(len, queue))
    random.Random(seed).shuffle(queue)
    result: dict[int, list[list[list[int]]]] = {}
    for n in lengths:
        result[n] = []
        for _ in range(inputs):
            chunk: list[list[int]] = []
            room = n
            while room:
                if not queue:
                    raise ValueError(
                        f"the text has {available} tokens in {len(tokenised)} documents, too few for {inputs} packed chunks "
                        f"of each length {', '.join(map(str, lengths))}"
                    )
                document = queue.pop()
                take = min(room, len(document))
                if 0 < room - take < least:
                    # What is left would not hold another document: leave more of it.
                    take = room - least
                if take < least:
                    continue
                if take < len(document):
                    # Cut inside the text, so that the closing special tokens stay.
                    document = [*document[: take - len(suffix)], *suffix]
                chunk.append(document)
                room -= len(document)
            result[n].append(chunk)
    return result


def chunks_of(handle: Model, documents: Sequence[str], n: int, inputs: int = 1, seed: int = 0) -> Tensor:
    """Token ids (inputs, n) of disjoint chunks of a text, as the model's tokenizer writes them."""
    check_length(handle, n)
    if inputs < 1:
        raise ValueError(f"inputs must be at least 1, got {inputs}")
    tokenizer = require_tokenizer(handle)
    return torch.tensor(Chunker(excerpt_for(documents, [n], inputs, seed), tokenizer).chunks([n], inputs, seed)[n])


def excerpt_for(documents: Sequence[str], lengths: Sequence[int], inputs: int, seed: int = 0) -> list[str]:
    """An excerpt with far more text than ``inputs`` chunks of every length need, and soon tokenised."""
    return excerpt(documents, max(1_000_000, 50 * inputs * sum(lengths)), seed)


def excerpt(documents: Sequence[str], characters: int, seed: int = 0) -> list[str]:
    """Documents with about this many characters together: a seeded draw, kept in order; all of them when they are fewer.

    A corpus of millions of words need not be tokenised for a few chunks of it.

    Example:
        >>> excerpt(["one", "two", "three"], 100)
        ['one', 'two', 'three']
    """
    generator = random.Random(seed)
    order = list(range(len(documents)))
    generator.shuffle(order)
    taken: dict[int, str] = {}
    left = characters
    for index in order:
        document = documents[index]
        if len(document) > left and len(document) > characters // 2:
            # A book: a piece of it, from a random place on.
            start = generator.randint(0, len(document) - left)
            document = document[start : start + left]
        taken[index] = document
        left -= len(document)
        if left <= 0:
            break
    return [taken[index] for index in sorted(taken)]


def special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    try:
        whole, bare = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    except (TypeError, KeyError, IndexError) as error:
        raise TypeError(
            f"tokenizer must map a string to {{'input_ids': …}}, as those of transformers do: {error}"
        ) from error
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
    reversed_range = False
    try:
        if ":" not in text:
            lengths: Sequence[int] = [int(part) for part in text.split(",")]
        else:
            first, last, step = text.split(":")
            low, high = int(first), int(last)
            reversed_range = low > high
            if step == "log":
                lengths = sorted({round(low * 2 ** (k / 2)) for k in range(64) if low * 2 ** (k / 2) < high} | {high})
            else:
                lengths = range(low, high + 1, int(step))
    except (ValueError, OverflowError):
        raise ValueError(f"lengths must look like 8,16,32 or 8:512:log or 8:64:8, got {text!r}") from None
    if reversed_range:
        raise ValueError(f"lengths must run from the least to the largest, as in {high}:{low}:{step}, got {text!r}")
    return check_lengths(lengths)


def check_lengths(lengths: Sequence[int]) -> list[int]:
    """Lengths in ascending order; refuses none, too many, and what no input has, before a range is written out."""
    try:
        count = len(lengths)
    except OverflowError:  # a range of more than 2^63 numbers
        count = MOST_LENGTHS + 1
    if count > MOST_LENGTHS:
        raise ValueError(f"lengths must be at most {MOST_LENGTHS} numbers: take larger steps, or log as in 8:512:log")
    if not count or min(lengths) < 1 or max(lengths) > LONGEST:
        raise ValueError(f"lengths must be positive numbers of tokens, at most {LONGEST}, got {list(lengths)[:8]}")
    return sorted(set(lengths))
