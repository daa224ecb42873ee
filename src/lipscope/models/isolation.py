"""``check``: does any output depend on a token it must not see? The claims, and what was found about each.

The model runs as it is, with its own attention implementation; ``lipscope.models.leaks`` has the instruments.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models.anatomy import watching
from lipscope.models.claims import claimed_windows, claims_causality
from lipscope.models.inputs import first_position
from lipscope.models.leaks import Again, agreed, by_derivative, by_substitution, compared, described, judged, refuse_unsteady
from lipscope.models.model import Model
from lipscope.models.subject import CannotCheckError, Cut, NoDerivativeError, Subject, Tally, accepts, chosen_output, line
from lipscope.models.verdicts import WITHOUT_PADDING, Isolation, Leak, Verdict


def check(
    model: str | os.PathLike[str] | nn.Module | Model,
    *,
    n: int | None = None,
    inputs: dict[str, Any] | None = None,
    causal: bool | None = None,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    padding: str | None = None,
    batch: bool = True,
    cache: bool = False,
    use_cache: bool | None = None,
    seed: int = 0,
) -> Isolation:
    """Test whether outputs depend on tokens they must not see.

    Args:
        model: a name, a directory or hub name, a Hugging Face model, or any module that maps tokens (B, n, d) to outputs
            (B, n, …); it runs as it is, with its own attention implementation.
        n: number of random tokens when ``inputs`` are not given, 32 by default or as many as the documents have.
        inputs: the model's keyword arguments for one sequence or more; for a plain module ``{"tokens": X}``.
        causal: no output sees a later token, or how many there are; by default what the configuration claims.
        window: no attention layer lets an output see a token ``window`` or more places back; by default what the
            configuration claims, 0 tests none.
        documents: lengths of documents that are packed into one sequence and must not see each other.
        padding: ``"left"`` or ``"right"``: real tokens must not see padding there; by default left for causal models and
            right for others that take an ``attention_mask``, ``"none"`` tests none.
        batch: one sequence of a batch must not see another.
        cache: decoding token by token with the cache gives the outputs of one pass without it.
        use_cache: what the model is told; by default nothing, and most make a cache in every pass.
        seed: of everything drawn.

    Returns:
        The verdicts, with the largest leak of every broken claim and the module that lets it through.

    Raises:
        CannotCheckError: when nothing can be compared: fewer than two tokens, dropout that is on, state that is kept
            between calls, outputs that are not finite or the same whatever the tokens.

    Example:
        >>> import torch, lipscope
        >>> mean = torch.nn.Linear(4, 4)
        >>> mean.register_forward_hook(lambda module, args, out: out + out.mean(1, keepdim=True)) and None
        >>> found = lipscope.check(mean, inputs={"tokens": torch.randn(1, 6, 4)}, causal=True)
        >>> found.verdicts[-1].held, found.verdicts[-1].leak.instrument
        (False, 'derivative and substitution')
    """
    if padding not in (None, "left", "right", "none"):
        raise CannotCheckError(f"padding must be left, right or none, got {padding!r}")
    name, module = _opened(model)
    tally = Tally(torch.Generator().manual_seed(seed))
    subjects = Subject.all_of(module, sum(documents or (32,)) if n is None else n, inputs, tally)
    told = {} if use_cache is None else {"use_cache": use_cache}
    tests = [_Tests(alone.like(**told), padding, inputs is not None) for alone in subjects[:_GIVEN]]
    said = f"in the first {_GIVEN} of the {len(subjects)} sequences given" if subjects[_GIVEN:] else ""
    try:
        refuse_unsteady(tests[0].alone, tests[0].many)
    except Exception as error:  # whatever its code raises
        kind = "" if isinstance(error, CannotCheckError) else "the model does not run on these inputs: "
        raise CannotCheckError(kind + line(error)) from error
    claims = zip(*(_claims(each, causal, window, documents, batch, cache) for each in tests), strict=True)
    verdicts = tuple(_verdict(rows[0][0], rows[0][1], [found for _, _, found in rows], said) for rows in claims)
    if not verdicts:
        raise CannotCheckError("no claim is left to test: ask for one, such as causal")
    return Isolation(name, subjects[0].shape[1], verdicts, tally.forwards, tally.backwards)


Found = tuple[int, Leak | None, str]  # how many boundaries were tested, the largest leak, and a remark
Claim = tuple[str, str, Iterator[Found]]  # its name, who makes it, and its tests one after the other
ASKED = "asked for"


def _verdict(claim: str, why: str, tests: Sequence[Iterator[Found]], said: str) -> Verdict:
    """What the tests of one claim find in one sequence after the other, up to the first leak."""
    boundaries, leak, remarks = 0, None, dict.fromkeys([said])
    try:
        for row, (more, leak, remark) in ((row, found) for row, each in enumerate(tests) for found in each):
            boundaries += more
            remarks[remark] = None
            if leak is not None:
                remarks |= {f"in sequence {row} of those given": None} if len(tests) > 1 else {}
                break
    except Exception as error:  # whatever its code raises
        kind = "" if isinstance(error, CannotCheckError) else f"the model raised {type(error).__name__}: "
        return Verdict(claim, why, 0, None, skipped=kind + line(error))
    return Verdict(claim, why, boundaries, leak, "; ".join(filter(None, remarks)))


def _opened(model: str | os.PathLike[str] | nn.Module | Model) -> tuple[str, nn.Module]:
    from lipscope.models.load import load_named

    if isinstance(model, nn.Module):
        return type(model).__name__, model
    found = model if isinstance(model, Model) else load_named(str(model))
    return found.name, found.model


def _claims(
    tests: _Tests, causal: bool | None, window: int | None, documents: Sequence[int] | None, batch: bool, cache: bool
) -> list[Claim]:
    """What was asked for, and what the configuration claims."""
    alone = tests.alone
    model, n, claimed = alone.model, alone.shape[1], claims_causality(alone.model)
    found: list[Claim] = [("batch", "every model owes it", tests.batch())] if batch else []
    if causal or (causal is None and claimed):
        found.append(("causal", ASKED if causal else str(claimed), tests.causal()))
    if window is not None and not 0 <= window < n:
        raise CannotCheckError(f"a window must lie between 1 and n - 1 = {n - 1}, got {window}; 0 tests none")
    wide, windows = claimed_windows(model, window)
    if wide:
        why = ASKED if window else "sliding_window of the configuration"
        found.append((f"window {wide}", why, _window(alone, windows, wide)))
    if documents is not None:
        lengths = [int(length) for length in documents]
        if len(lengths) < 2 or min(lengths) < 1 or sum(lengths) != n:
            raise CannotCheckError(f"documents must be two or more lengths that add up to n = {n}, got {lengths}")
        found.append(("documents", ASKED, _documents(alone, lengths)))
    asked = tests.padding_side in ("left", "right")
    if asked or (tests.padding_side is None and tests.source in _PADDED and accepts(model, "attention_mask")):
        why = ASKED if asked else "a model that takes an attention_mask owes it"
        found.append((f"padding {tests.side}", why, tests.padding()))
    return [*found, ("cache", ASKED, _cache(alone))] if cache else found


# ── one function per claim ──


def _tested(subject: Subject, cuts: Sequence[Cut], boundaries: int | None = None) -> Found:
    """Both instruments; substitution at a few of the boundaries when there are many, or where a derivative crosses one."""
    found, n = subject.seen[0], subject.shape[1]
    if not subject.ends(cuts[0], subject.seen):
        raise CannotCheckError(f"outputs of shape {tuple(found.shape)} do not belong to the {n} tokens one by one")
    count = len(cuts) if len(cuts) <= _ALL else _SUBSTITUTIONS
    few = {int(k) for k in torch.linspace(0, len(cuts) - 1, count).round()}
    try:
        leak, remark = by_derivative(subject, cuts)
    except (NoDerivativeError, RuntimeError) as error:  # kernels for inference alone have no derivative
        leak, remark = None, f"by substitution alone: {line(error)}"
    if leak is not None:
        few = {k for k, cut in enumerate(cuts) if bool(cut.watched[leak.output]) and bool(cut.hidden[leak.token])}
    try:
        other, noted = by_substitution(subject, [cuts[k] for k in sorted(few)[: None if leak is None else 1]])
    except CannotCheckError as error:
        if leak is None:
            raise
        other, noted = None, f"by derivative alone: {line(error)}"
    if leak is not None and other is not None:
        leak = replace(leak, instrument="derivative and substitution")
    whose = "outputs that are always the same" if subject.tally.mute else f"outputs of shape {tuple(found.shape)}"
    inner = "" if found is subject.ends(cuts[0], subject.seen)[0] else f"{whose}: tested on what they are made of"
    return boundaries or len(cuts), leak or other, "; ".join(filter(None, (inner, remark, noted)))


_ALL, _SUBSTITUTIONS = 8, 6  # so many passes with other tokens are all made, of more six
_EVERY = 128  # so many boundaries are all tested
_GIVEN = 8  # so many sequences of those given are tested: their passes are kept
_PADDED = ("input_ids", "inputs_embeds")


@dataclass
class _Tests:
    """The claims about a batch of a few sequences: the one that is tested, and others, some of them padded."""

    alone: Subject
    padding_side: str | None
    given: bool  # whether its tokens were

    @property
    def side(self) -> str:
        """Where padding stands."""
        left = claims_causality(self.alone.model) and self.alone.tokens != "decoder_input_ids"
        return self.padding_side if self.padding_side in ("left", "right") else "left" if left else "right"

    @property
    def source(self) -> str:
        """The tokens that padding stands beside: the encoder's where there are two halves."""
        first, *rest = self.alone.named
        return rest[0] if first == "decoder_input_ids" and rest else first

    @cached_property
    def many(self) -> Subject:
        """The sequence and others, a few hundred tokens in all."""
        wide = self.repeated
        others = torch.arange(wide.shape[0], device=wide.places.device)[:, None] > 0
        return wide.like(**{name: replace(wide, tokens=name).substituted(others) for name in wide.named})

    @property
    def repeated(self) -> Subject:
        """The sequence so many times."""
        count = min(max(512 // self.alone.shape[1], 2), 4)
        rows = {name: value for name, value in self.alone.inputs.items() if isinstance(value, Tensor) and value.ndim}
        return self.alone.like(**{name: torch.cat([value] * count) for name, value in rows.items()})

    @property
    def mask(self) -> Tensor | None:
        """The mask among the inputs, where it hides something."""
        mask = self.many.inputs.get("attention_mask")
        return mask if isinstance(mask, Tensor) and not bool(mask.all()) else None

    @cached_property
    def real(self) -> Tensor:
        """Where tokens are real, (B, n): everywhere in the first sequence, or where the mask that was given says."""
        source = replace(self.many, tokens=self.source)
        if self.mask is not None:
            if self.mask.shape != source.shape:
                raise CannotCheckError("the inputs hold an attention_mask that is not one of padding")
            return self.mask.bool()
        n, pads = source.shape[1], max(1, source.shape[1] // 4)
        inner = source.places >= pads if self.side == "left" else source.places < n - pads
        return torch.cat([torch.ones_like(inner), *[inner] * (source.shape[0] - 1)])

    @cached_property
    def padded(self) -> Subject:
        """The first sequence and padded ones in a plain call: positions are given only beside a mask that was given."""
        positions = None if self.mask is None else self.many.inputs.get("position_ids")
        return replace(self.many, tokens=self.source).like(attention_mask=self.real.long(), position_ids=positions)

    def batch(self) -> Iterator[Found]:
        """Half of the sequences and the tokens of the other half; the first one beside the others and alone.

        Any two are in different halves at some bit of their numbers.
        """
        output, at = self.many.seen[0], self.many.places
        rows = torch.arange(self.many.shape[0], device=at.device)[:, None]
        if output.shape[:1] != rows.shape[:1]:
            raise CannotCheckError(f"outputs of shape {tuple(output.shape)} do not belong to the sequences one by one")
        halves = [(rows >> bit) % 2 == side for bit in range((len(rows) - 1).bit_length()) for side in (0, 1)]
        for name in dict.fromkeys((self.alone.tokens, self.source)):
            two = self.many if name == self.many.tokens else replace(self.many, tokens=name)
            yield _tested(two, [Cut(~half.expand(two.shape), half.expand(output.shape[:2]), whole=True) for half in halves])
        yield _compared(self.alone, self.many, at[0] >= 0, "comparison with the sequence alone", whole=True)

    def causal(self) -> Iterator[Found]:
        """Outputs before t, tokens from t on; with padding too, whose mask may take the place of the causal one.

        A prefix alone has the outputs that it has in the whole sequence: the number of later tokens does not count either.
        """
        among = self.repeated if self.given else self.many
        (rows, n), at = among.shape, among.places
        ends = [place for k in range(n.bit_length()) for place in (2**k, n - 2**k) if 0 < place < n]
        drawn = (torch.randperm(n - 1, generator=self.alone.tally.generator) + 1).tolist()
        places = sorted(list(dict.fromkeys([*ends, *drawn]))[:_EVERY])
        # One boundary in every sequence of a pass.
        passes = [[*places[k : k + rows], *[places[-1]] * rows][:rows] for k in range(0, len(places), rows)]
        cuts = [torch.tensor(each, device=at.device)[:, None] for each in passes]
        yield _tested(among, [Cut(at >= t, at < t) for t in cuts], len(places))
        half = self.alone.places[0] < n // 2
        yield _compared(self.alone.part(0, half), self.alone, half, "comparison with the prefix alone")
        plain = self.source in _PADDED and self.source == self.alone.tokens
        plain = plain and (self.mask is None or self.mask.shape == self.many.shape)
        if plain and accepts(self.alone.model, "attention_mask"):
            yield _tested(self.padded, [Cut((at >= n // 2) & self.real, (at < n // 2) & self.real)])

    def padding(self) -> Iterator[Found]:
        """Real tokens and padding; real tokens beside padding and without."""
        if not accepts(self.alone.model, "attention_mask") or self.source not in _PADDED:
            raise CannotCheckError("the model takes no attention_mask beside its tokens")
        real, counted = self.real, (self.real.long().cumsum(-1) - 1).clamp_min(0) + first_position(self.alone.model)
        watched = real if self.source == self.alone.tokens else (self.many.places >= 0).expand(len(real), -1)

        def tests(padded: Subject) -> Iterator[Found]:
            yield _tested(padded, [Cut(~real, watched, real)])
            for row in (0, 1):
                alone = padded.part(row, real[row], attention_mask=None, position_ids=None)
                if bool(real[row].all()) and not {"attention_mask", "position_ids"} & {*self.alone.inputs}:
                    alone = self.alone if self.source == self.alone.tokens else alone
                yield _compared(alone, padded, real[row], WITHOUT_PADDING, row)

        # Some models count positions from the mask, some from the left end: where no call was given, either may be meant.
        remark, excused = "held when position_ids are given", self.mask is None
        yield from _unless(tests, self.padded, remark, excused, position_ids=counted)


def _unless(
    tests: Callable[[Subject], Iterator[Found]], plain: Subject, remark: str, excused: bool = False, **given: Any
) -> Iterator[Found]:
    """The tests of a plain call, and where it leaks a remark if all of them hold when more is given, which may excuse it."""
    for boundaries, leak, said in tests(plain):
        free = leak is not None and all(accepts(plain.model, name) and name not in plain.inputs for name in given)
        holds = free and all(other is None for _, other, _ in tests(plain.like(**given)))
        if holds and excused and leak is not None:
            yield boundaries, None, f"{remark}; without them outputs differ by {leak.size:.1e} of the scale"
            return
        yield boundaries, leak, remark if holds else said


def _documents(alone: Subject, lengths: list[int]) -> Iterator[Found]:
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(alone.places.device)
    restarted = {}
    if accepts(alone.model, "position_ids") and "position_ids" not in alone.inputs:
        starts = torch.cat([torch.arange(length) for length in lengths])[None].to(owner.device)
        restarted["position_ids"] = starts + first_position(alone.model)

    def tests(packed: Subject) -> Iterator[Found]:
        yield _tested(packed, [Cut(owner != k, owner == k) for k in range(len(lengths))])
        for k in range(min(len(lengths), _SUBSTITUTIONS) if alone.tokens in _PADDED else 0):
            mine = (owner == k)[0]
            yield _compared(packed.part(0, mine, position_ids=None), packed, mine, "comparison with the document alone")

    # Transformers reads positions that start again only where there is no cache.
    yield from _unless(tests, alone.like(**restarted), "held with use_cache=False", use_cache=False)


def _picked(tensor: Tensor, mine: Tensor, row: int = 0) -> Tensor:
    """One sequence, at the places ``mine`` (n,) where it has places."""
    tensor = tensor[row : row + 1] if tensor.shape[0] > 1 else tensor
    return tensor[:, mine] if tensor.shape[1] == len(mine) else tensor


def _compared(alone: Subject, among: Subject, mine: Tensor, instrument: str, row: int = 0, *, whole: bool = False) -> Found:
    """The same tokens alone and among others, where they stand in the places ``mine`` (n,) of a row."""
    one, other = alone.seen[0], among.seen[0]

    pick = partial(_picked, mine=mine, row=row)
    inner = torch.ones(alone.shape, dtype=torch.bool, device=one.device)
    held = one.shape[:2] if whole else alone.inputs.get("decoder_input_ids", inner).shape
    cut = Cut(~inner, torch.ones(held, dtype=torch.bool, device=one.device), inner, whole)
    if not alone.ends(cut, alone.seen) or (cut.rows(one) is not None and pick(other).shape != one.shape):
        raise CannotCheckError(f"outputs of shape {tuple(one.shape)} do not belong to the tokens one by one")
    leak, remark = agreed(alone, among, cut, instrument, pick)
    if leak is not None:
        place = int(mine.nonzero()[leak.output[1]]) if pick(other).shape[1] != other.shape[1] else leak.output[1]
        leak = replace(leak, output=(row, place), picture="")
    return 0, leak, remark


def _window(subject: Subject, windows: set[nn.Module], wide: int) -> Iterator[Found]:
    """Every attention module on its own: what a whole model sees is as wide as all its layers together.

    A causal layer sees ``wide`` tokens, its own among them; one that looks both ways sees so many on either side.
    """
    n, one_way = subject.shape[1], claims_causality(subject.model) is not None or subject.tokens == "tokens"
    reach = wide if one_way else wide + 1
    if reach >= n:
        raise CannotCheckError(f"a window of {wide} tokens hides nothing in {n}: use a larger n")
    at, events = subject.places, subject.seen[1]
    cuts = [Cut(at <= t - reach, at >= t) for t in range(reach, n)]
    cuts = [cuts[int(k)] for k in torch.linspace(0, len(cuts) - 1, min(len(cuts), _EVERY)).round()]
    called = [
        event for event in events
        if event.module in windows and event.tokens is not None and event.tokens.ndim > 2
        and cuts[0].rows(event.tokens) is not None
    ]  # fmt: skip
    if not called:
        raise CannotCheckError("no attention module with a window was called with tokens (B, n, d)")
    for event in called:
        again = Again(event)
        part = Subject(again, {"tokens": again.tokens}, "tokens", Tally(subject.tally.generator))
        boundaries, leak, remark = _tested(part, cuts)
        yield boundaries, leak and described(subject, leak, event, events, cuts[0]), remark


_DECODED = 6


def _cache(subject: Subject) -> Iterator[Found]:
    """Prefill, then one token at a time with the cache, against one pass."""
    if not accepts(subject.model, "past_key_values") or "input_ids" not in subject.tokens:
        raise CannotCheckError("the model takes no cache (past_key_values) beside its tokens")
    leak, remark = judged(_decoded, subject.like(use_cache=False) if accepts(subject.model, "use_cache") else subject)
    yield _DECODED + 1, leak and replace(leak, picture=""), remark


def _decoded(subject: Subject) -> tuple[Leak | None, bool]:
    """The first step of decoding whose outputs are not those of one pass."""
    n, past = subject.shape[1], None
    start = max(n - _DECODED, 1)
    for first, last in [(0, start), *((t, t + 1) for t in range(start, n))]:
        given = {
            name: subject.inputs[name][:, first:last] for name in (subject.tokens, "position_ids") if name in subject.inputs
        }
        if isinstance(mask := subject.inputs.get("attention_mask"), Tensor) and mask.shape == subject.shape:
            given["attention_mask"] = mask[:, :last]
        subject.tally.forwards += 1
        with torch.no_grad(), watching(subject.model.modules()) as events:
            output = subject.model(**subject.inputs | given | {"past_key_values": past, "use_cache": True})
        past = getattr(output, "past_key_values", None)
        if past is None:
            raise CannotCheckError("the model returns no cache")
        now = torch.ones(1, last - first, dtype=torch.bool, device=subject.places.device)
        mine = (subject.places[0] >= first) & (subject.places[0] < last)
        step, pick = (chosen_output(output), events), partial(_picked, mine=mine)
        leak, sudden = compared(subject, step, subject.seen, Cut(~now, now), "comparison without a cache", pick)
        if leak is not None:
            return replace(leak, output=(0, first + leak.output[1])), sudden
    return None, False
