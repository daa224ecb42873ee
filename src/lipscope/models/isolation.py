"""``check``: does any output depend on a token it must not see? The claims, and what was found about each.

The model runs as it is, with its own attention implementation; ``lipscope.models.leaks`` has the instruments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lipscope.models.anatomy import first_tensor, watching
from lipscope.models.capture import Call
from lipscope.models.inputs import accepts, first_position, position_limit, probe_inputs
from lipscope.models.leaks import (
    CannotCheckError,
    Cut,
    Subject,
    by_derivative,
    by_substitution,
    chosen_output,
    derivative_leak,
    described,
    difference,
    doubled,
    located,
    refuse_random,
    seen_pass,
)
from lipscope.models.verdicts import Isolation, Leak, Verdict


def check(
    model: Any,
    *,
    n: int = 32,
    inputs: dict[str, Any] | None = None,
    causal: bool | None = None,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    padding: str | None = None,
    batch: bool = True,
    cache: bool = False,
    seed: int = 0,
) -> Isolation:
    """Test whether outputs depend on tokens they must not see.

    Args:
        model: a name, a directory or hub name, a Hugging Face model, or any module that maps tokens (B, n, d) to outputs
            (B, n, …); it runs as it is, with its own attention implementation.
        n: number of tokens, of random ones when ``inputs`` are not given.
        inputs: the model's keyword arguments for one sequence or more; for a plain module ``{"tokens": X}``.
        causal: no output sees a later token; by default what the configuration claims.
        window: no attention layer lets an output see a token ``window`` or more places back; by default what the
            configuration claims.
        documents: lengths of documents that are packed into one sequence and must not see each other.
        padding: ``"left"`` or ``"right"``: real tokens must not see padding there; by default left for causal models and
            right for others that take an ``attention_mask``.
        batch: one sequence of a batch must not see another.
        cache: decoding token by token with the cache gives the outputs of one pass.
        seed: of everything drawn.

    Returns:
        The verdicts, with the largest leak of every broken claim and the module that lets it through.

    Raises:
        CannotCheckError: when nothing can be compared: fewer than two tokens, dropout that is on, non-finite outputs.

    Example:
        >>> import torch, lipscope
        >>> mean = torch.nn.Linear(4, 4)
        >>> mean.register_forward_hook(lambda module, args, out: out + out.mean(1, keepdim=True)) and None
        >>> found = lipscope.check(mean, inputs={"tokens": torch.randn(1, 6, 4)}, causal=True)
        >>> found.verdicts[-1].held, found.verdicts[-1].leak.instrument
        (False, 'derivative')
    """
    name, module = _opened(model)
    n = sum(documents) if documents is not None and inputs is None else n
    subject = _subject(module, n, inputs, torch.Generator().manual_seed(seed))
    refuse_random(subject)
    parts = [subject]

    def on(**changed: Any) -> Subject:
        parts.append(parts[0].like(**changed))
        return parts[-1]

    verdicts = []
    for claim in _claims(module, subject, causal, window, documents, padding, batch, cache):
        try:
            verdicts.append(Verdict(claim.name, claim.why, *claim.test(on)))
        except CannotCheckError as error:
            verdicts.append(Verdict(claim.name, claim.why, 0, None, str(error)))
        if claim.name == "batch" and verdicts[-1].held:
            subject.kernel_noise = _kernel_noise(on)
    forwards, backwards = (sum(getattr(part, what) for part in parts) for what in ("forwards", "backwards"))
    return Isolation(name, subject.shape[1], tuple(verdicts), forwards, backwards)


On = Callable[..., Subject]  # the model on its inputs, with some of them changed
Found = tuple[int, Leak | None]  # how many boundaries were tested, and the largest leak


@dataclass(frozen=True)
class _Claim:
    name: str
    why: str
    test: Callable[[On], Found]


def _opened(model: Any) -> tuple[str, nn.Module]:
    from lipscope.models.load import load_named
    from lipscope.models.model import Model

    if isinstance(model, Model):
        return model.name, model.model
    if isinstance(model, nn.Module):
        return type(model).__name__, model
    found = load_named(str(model))
    return found.name, found.model


def _subject(model: nn.Module, n: int, inputs: dict[str, Any] | None, generator: torch.Generator) -> Subject:
    config: Any = getattr(model, "config", None)
    if inputs is None:
        room = position_limit(model)
        if room is not None and n > room:
            raise CannotCheckError(f"n = {n} tokens are more than the {room} positions of the model")
        takes_ids = config is not None and getattr(model, "main_input_name", "input_ids") == "input_ids"
        inputs = probe_inputs(model, max(n, 1) if takes_ids else None)
        if "input_ids" in inputs and accepts(model, "decoder_input_ids"):
            # Of another length than the encoder's, so that the two are told apart where they share an embedding.
            given = inputs["input_ids"]
            inputs = {
                "input_ids": given[:, : max(n - 1, 1)],
                "decoder_input_ids": (given.flip(1) + 1) % config.vocab_size,
            }
    names = ("decoder_input_ids", "tokens", "input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values")
    tokens = next((known for known in names if known in inputs), None)
    if tokens is None:
        raise CannotCheckError(f"none of the inputs holds tokens: {', '.join(inputs)}")
    if inputs[tokens].ndim < 2 or inputs[tokens].shape[1] < 2:
        raise CannotCheckError("a sequence needs at least two tokens, or there is nothing that must not be seen")
    one = {key: value[:1] if isinstance(value, Tensor) and value.ndim else value for key, value in inputs.items()}
    return Subject(model, one, tokens, generator)


def _claims(
    model: nn.Module, subject: Subject, causal: bool | None, window: int | None, documents: Sequence[int] | None,
    padding: str | None, batch: bool, cache: bool,
) -> list[_Claim]:  # fmt: skip
    """What was asked for, and what the configuration claims; the batch first, as it says how much kernels round."""
    n, asked, claimed = subject.shape[1], "asked for", claims_causality(model)
    found = [_Claim("batch", "every model owes it", _batch)] if batch else []
    if causal or (causal is None and claimed):
        found.append(_Claim("causal", asked if causal else str(claimed), _causal))
    wide, windows = _windows(model, window)
    if window is not None and not 0 < window < n:
        raise CannotCheckError(f"a window must lie between 1 and n - 1 = {n - 1}, got {window}")
    if windows or window is not None:
        why = asked if window else "sliding_window of the configuration"
        found.append(_Claim(f"window {wide}", why, lambda on: _window(on, windows, wide)))
    if documents is not None:
        lengths = [int(length) for length in documents]
        if len(lengths) < 2 or min(lengths) < 1 or sum(lengths) != n:
            raise CannotCheckError(f"documents must be two or more lengths that add up to n = {n}, got {lengths}")
        found.append(_Claim("documents", asked, lambda on: _documents(on, lengths)))
    if padding not in (None, "left", "right"):
        raise CannotCheckError(f"padding must be left or right, got {padding!r}")
    if padding or (subject.tokens in ("input_ids", "inputs_embeds") and accepts(model, "attention_mask")):
        side = padding or ("left" if claimed else "right")
        why = asked if padding else "a model that takes an attention_mask owes it"
        found.append(_Claim(f"padding {side}", why, lambda on: _padding(on, side)))
    return [*found, _Claim("cache", asked, _cache)] if cache else found


def claims_causality(model: nn.Module) -> str | None:
    """Why a model is taken to be causal: what its configuration says; None when it is not."""
    config = getattr(model, "config", None)
    if config is None or getattr(config, "use_bidirectional_attention", False):
        return None
    if getattr(config, "is_encoder_decoder", False):
        return "the decoder of an encoder–decoder model" if accepts(model, "decoder_input_ids") else None
    if getattr(config, "is_decoder", False):
        return "is_decoder in the configuration"
    from transformers.models.auto import modeling_auto as auto

    kind = str(getattr(config, "model_type", ""))
    masked = {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES}
    if kind not in masked and {kind, kind.removesuffix("_text")} & {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}:
        return f"{kind} is a causal language model"
    return None


def leaks_the_future(model: nn.Module, inputs: dict[str, Any], output: Any) -> str | None:
    """Why a model should be causal, when its ``output`` on these inputs changes with later tokens nonetheless; else None."""
    claim = claims_causality(model)
    if claim is None or "input_ids" not in inputs or inputs["input_ids"].shape[1] < 2:
        return None
    subject = Subject(model, inputs, "input_ids", torch.Generator().manual_seed(0))
    later = torch.arange(subject.shape[1], device=subject.device).expand(subject.shape) >= subject.shape[1] // 2
    try:
        with torch.no_grad():
            other = subject.run(subject.substituted(later))
        return None if difference(subject, chosen_output(output), other, ~later, "substitution") is None else claim
    except CannotCheckError:  # non-finite outputs are refused elsewhere, by name
        return None


# ── one function per claim ──


def _tested(subject: Subject, cuts: Sequence[Cut]) -> Found:
    """Both instruments; substitution at a few of the boundaries when there are many."""
    found, events = seen_pass(subject)
    if found.ndim < 2 or tuple(found.shape[:2]) != subject.shape:
        raise CannotCheckError(
            f"outputs of shape {tuple(found.shape)} do not belong to the {subject.shape[1]} tokens one by one"
        )
    few = sorted({int(k) for k in torch.linspace(0, len(cuts) - 1, min(len(cuts), _SUBSTITUTIONS)).round()})
    leak, other = by_derivative(subject, cuts), by_substitution(subject, [cuts[k] for k in few], found, events)
    return len(cuts), leak or other


_SUBSTITUTIONS = 3
_DRAWN = 4


def _causal(on: On) -> Found:
    """Outputs before t, tokens from t on: at the ends, at powers of two from both, at quarters, and at random places."""
    subject = on()
    n = subject.shape[1]
    powers = [2**k for k in range(n.bit_length())]
    places = {*powers, *(n - p for p in powers), n // 4, n // 2, 3 * n // 4}
    places |= {*torch.randint(1, n, (_DRAWN,), generator=subject.generator).tolist()}
    at = torch.arange(n, device=subject.device)[None]
    return _tested(subject, [Cut(at >= t, at < t) for t in sorted(places) if 0 < t < n])


def _batch(on: On) -> Found:
    one = on()
    everything = torch.ones(one.shape, dtype=torch.bool, device=one.device)
    pairs = [torch.cat([one.inputs[one.tokens], one.substituted(everything)]) for _ in range(2)]
    two = on(**{key: doubled(value) for key, value in one.inputs.items()} | {one.tokens: pairs[0]})
    mine = torch.tensor([[True], [False]], device=one.device)
    with torch.no_grad():
        found = two.run()
        if found.ndim > 1 and tuple(found.shape[:2]) == two.shape:
            return _tested(two, [Cut(~mine.expand(two.shape), mine.expand(two.shape))])
        if found.shape[:1] != (2,):
            raise CannotCheckError(f"outputs of shape {tuple(found.shape)} do not belong to the sequences one by one")
        other = two.run(pairs[1])  # outputs that are not one per token are watched as a whole
    flat = found.reshape(2, -1, 1)
    return 1, difference(two, flat, other.reshape(2, -1, 1), mine.expand(flat.shape[:2]), "substitution")


def _kernel_noise(on: On) -> float:
    """How much the outputs of a sequence differ, relative to the largest, in a batch of two and alone."""
    alone = on()
    pair = on(**{key: doubled(value) for key, value in alone.inputs.items()})
    with torch.no_grad():
        one, two = alone.run().double(), pair.run()[:1].double()
    return float((one - two).abs().max() / one.abs().max().clamp_min(1e-300))


def _padding(on: On, side: str) -> Found:
    plain = on()
    if not accepts(plain.model, "attention_mask") or plain.tokens not in ("input_ids", "inputs_embeds"):
        raise CannotCheckError("the model takes no attention_mask beside its tokens")
    n, pads = plain.shape[1], max(1, plain.shape[1] // 4)
    at = torch.arange(n, device=plain.device)[None]
    real = at >= pads if side == "left" else at < n - pads
    positions = None
    if side == "left" and accepts(plain.model, "position_ids"):
        positions = (real.long().cumsum(-1) - 1).clamp_min(0) + first_position(plain.model)
    padded = on(attention_mask=real.long(), position_ids=positions)
    boundaries, leak = _tested(padded, [Cut(~real, real)])
    if leak is None and (side == "right" or positions is not None):
        leak = _compared(
            on(**{plain.tokens: plain.inputs[plain.tokens][:, real[0]]}), padded, real[0], "comparison without padding"
        )
    return boundaries, leak


def _documents(on: On, lengths: list[int]) -> Found:
    plain = on()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(plain.device)
    restarted = {}
    if accepts(plain.model, "position_ids") and "position_ids" not in plain.inputs:
        starts = torch.cat([torch.arange(length) for length in lengths])[None].to(plain.device)
        restarted["position_ids"] = starts + first_position(plain.model)
    packed = on(**restarted)
    boundaries, leak = _tested(packed, [Cut(owner != k, owner == k) for k in range(len(lengths))])
    for k in range(len(lengths) if plain.tokens == "input_ids" and leak is None else 0):
        mine = (owner == k)[0]
        alone = on(**{plain.tokens: plain.inputs[plain.tokens][:, mine], "position_ids": None})
        leak = leak or _compared(alone, packed, mine, "comparison with the document alone")
    return boundaries, leak


def _compared(alone: Subject, among: Subject, mine: Tensor, instrument: str) -> Leak | None:
    """The same tokens alone and among others, where they stand in the places ``mine`` (n,)."""
    (one, before), (other, after) = seen_pass(alone), seen_pass(among)
    seen = torch.ones(one.shape[:2], dtype=torch.bool, device=one.device)
    leak = difference(among, one, other[:, mine], seen, instrument)
    if leak is None:
        return None

    def pick(tensor: Tensor) -> Tensor:
        return tensor[:, mine] if tensor.shape[1] == len(mine) else tensor

    place = int(mine.nonzero()[leak.output[1]])
    return replace(located(among, leak, before, after, Cut(~seen, seen), pick), output=(0, place), picture="")


def _windows(model: nn.Module, window: int | None) -> tuple[int, set[nn.Module]]:
    """How far attention looks back, and in which modules: all when a window is asked for, else as the configuration says."""
    config = getattr(model, "config", None)
    wide = window if window is not None else getattr(config, "sliding_window", None)
    if not isinstance(wide, int) or (window is None and getattr(config, "use_sliding_window", True) is False):
        return 0, set()
    kinds = getattr(config, "layer_types", None)
    found = set()
    for name, module in model.named_modules():
        number = getattr(module, "layer_idx", None)
        sliding = isinstance(number, int) and (kinds is None or kinds[number] == "sliding_attention")
        if _ATTENTION.search(f"{name.rpartition('.')[2]} {type(module).__name__}") and (window is not None or sliding):
            found.add(module)
    return wide, found


_ATTENTION = re.compile("attn|attention", re.IGNORECASE)


def _window(on: On, windows: set[nn.Module], wide: int) -> Found:
    """Every attention module on its own: what a whole model sees is as wide as all its layers together.

    A causal layer sees ``wide`` tokens, its own among them; one that looks both ways sees so many on either side.
    """
    subject = on()
    n, one_way = subject.shape[1], claims_causality(subject.model) is not None or subject.tokens == "tokens"
    reach = wide if one_way else wide + 1
    if reach >= n:
        raise CannotCheckError(f"a window of {wide} tokens hides nothing in {n}: use a larger n")
    _, events = seen_pass(subject)
    worst, boundaries = None, 0
    for event in events:
        if event.module not in windows or event.tokens is None or tuple(event.tokens.shape[:2]) != subject.shape:
            continue
        leaf = event.tokens.detach().clone().requires_grad_()
        with torch.enable_grad():
            output = first_tensor(Call.record(event.module, event.args, event.kwargs)(leaf))
        if output is None or tuple(output.shape[:2]) != subject.shape:
            continue
        at = torch.arange(n, device=leaf.device)[None]
        for t in {reach, (reach + n - 1) // 2, n - 1}:
            boundaries += 1
            leak, place = derivative_leak(subject, output, leaf, Cut(at <= t - reach, at >= t))
            if leak is not None and (worst is None or leak.size > worst.size):
                worst = described(subject, leak, event, place)
    if not boundaries:
        raise CannotCheckError("no attention module with a window was called with tokens (B, n, d)")
    return boundaries, worst


_DECODED = 6


def _cache(on: On) -> Found:
    """Prefill, then one token at a time with the cache, against one pass."""
    subject = on()
    if not accepts(subject.model, "past_key_values") or subject.tokens != "input_ids":
        raise CannotCheckError("the model takes no cache (past_key_values) beside its tokens")
    n, ids = subject.shape[1], subject.inputs["input_ids"]
    start, past, steps = max(n - _DECODED, 1), None, []
    whole, before = seen_pass(subject)
    with torch.no_grad():
        for first, last in ((0, start), *((t, t + 1) for t in range(start, n))):
            subject.forwards += 1
            with watching(subject.model.modules()) as after:
                output = subject.model(input_ids=ids[:, first:last], past_key_values=past, use_cache=True)
            past = getattr(output, "past_key_values", None)
            if past is None:
                raise CannotCheckError("the model returns no cache")
            steps.append(chosen_output(output))
    everywhere = torch.ones(1, n, dtype=torch.bool, device=ids.device)
    leak = difference(subject, torch.cat(steps, 1), whole, everywhere, "comparison without a cache")
    if leak is not None:
        last_one = Cut(~everywhere[:, :1], everywhere[:, :1])
        leak = located(subject, leak, after, before, last_one, lambda tensor: tensor[:, -1:])
    return n - start + 1, leak and replace(leak, picture="")
