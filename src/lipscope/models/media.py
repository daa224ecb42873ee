"""Inputs that are no text: a clip, an image or features become a model's own arguments, through its own processor."""

from __future__ import annotations

import hashlib
import math
import os
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lipscope.attention.io import load_tokens
from lipscope.doors import reading

if TYPE_CHECKING:
    from lipscope.models.model import Model

Medium = str | os.PathLike[str] | Tensor
# What a model's main input is called, what it is in words, and what it is given with.
HEARS, SEES = ("input_features", "input_values"), ("pixel_values",)
_TAKES = {
    **dict.fromkeys(HEARS, ("hears audio", "audio", "clip.wav")),
    "pixel_values": ("sees images", "image", "photo.png"),
}
# Files that are only decoded: EPS, which is among the others that Pillow knows, is a program and would be run.
_IMAGES = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@dataclass(frozen=True, eq=False)
class Signal:
    """One input of a model that reads no text."""

    inputs: dict[str, Tensor]  # the model's keyword arguments, a batch of one
    n: int  # tokens that its attention sees
    seconds: float | None = None  # of one token
    start: float = 0.0  # where in the clip it begins, in seconds
    grid: tuple[int, int] | None = None  # rows and columns of the patches, which are the last tokens
    note: str = ""  # what was done to the file

    @property
    def digest(self) -> str:
        """Hash of what the model is given."""
        state = hashlib.blake2b(digest_size=20)
        for name, tensor in sorted(self.inputs.items()):
            state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            state.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return state.hexdigest()

    @property
    def labels(self) -> list[str]:
        """Where every token lies: a time, or a row and a column; tokens before the patches have no place."""
        if self.seconds is not None:
            return [f"{self.start + k * self.seconds:.2f} s" for k in range(self.n)]
        if self.grid is None:
            return [f"token {k}" for k in range(self.n)]
        rows, columns = self.grid
        places = [f"row {row}, col {column}" for row in range(rows) for column in range(columns)]
        return [f"extra {k}" for k in range(self.n - len(places))] + places


def reads_text(handle: Model) -> bool:
    """Whether the model takes token ids."""
    return getattr(handle.model, "main_input_name", "input_ids") not in _TAKES


def how_to_ask(handle: Model) -> str:
    """What a model that reads no text takes, and how it is given that."""
    takes = getattr(handle.model, "main_input_name", "input_ids")
    words, option, file = _TAKES.get(takes, ("reads text", "text", "TEXT"))
    if takes not in _TAKES:
        return f"{handle.name} {words}: give it with --text TEXT (text=… in Python)"
    return (
        f"{handle.name} {words}, not text: `lipscope scan` and `tokens` take --{option} {file} ({option}=… in Python), or "
        f"its {takes} with --features x.safetensors (features=…)"
    )


def signals(
    handle: Model,
    *,
    audio: Medium | None = None,
    image: Medium | None = None,
    features: Medium | None = None,
    lengths: Sequence[int] | None = None,
    count: int | None = None,
) -> list[Signal]:
    """The inputs that a file, or a tensor, makes for a model.

    A clip is cut into windows where the model has one (Whisper: 30 s), the last padded with silence; else into ``count``
    pieces of each of the ``lengths`` in frames, by default one, the whole clip.

    Raises:
        FileNotFoundError: when there is no such file.
        ValueError: when the file, or the tensor, is not what the model takes; says what is.
    """
    takes = getattr(handle.model, "main_input_name", "input_ids")
    every = {"audio": audio, "image": image, "features": features}
    given = {name: value for name, value in every.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f"give exactly one of audio, image and features, got {' and '.join(given) or 'none'}")
    [(kind, value)] = given.items()
    if takes not in _TAKES or kind not in ("features", _TAKES[takes][1]):
        raise ValueError(f"{kind} is not for this model: {how_to_ask(handle)}")
    if not isinstance(value, Tensor) and not Path(value).expanduser().is_file():
        raise FileNotFoundError(f"there is no file {os.fspath(value)!r} for --{kind}")
    strides = getattr(getattr(handle.model, "config", None), "conv_stride", None) if takes == "input_values" else None
    if lengths is not None and (strides is None or kind != "audio"):
        raise ValueError(f"lengths cannot be chosen here: the number of tokens of {handle.name} is fixed by its {takes}")
    if kind == "audio":
        found = _heard(handle, takes, value, lengths, count)
    elif kind == "image":
        found = [_signal(handle, takes, _seen(handle, value))]
    else:
        tensor = value if isinstance(value, Tensor) else load_tokens(Path(value).expanduser())
        usual = handle.probe_inputs[takes]
        tensor = tensor[None] if tensor.ndim == usual.ndim - 1 else tensor
        found = [_signal(handle, takes, one[None]) for one in tensor]
    return found if count is None else found[: max(count, 1) * len(lengths or [0])]


def samples_for(config: Any, frames: int) -> int:
    """How many samples of sound become so many frames in the convolutions of a wav2vec2."""
    for stride, kernel in zip(reversed(config.conv_stride), reversed(config.conv_kernel), strict=True):
        frames = (frames - 1) * stride + kernel
    return frames


def _heard(handle: Model, takes: str, value: Medium, lengths: Sequence[int] | None, count: int | None) -> list[Signal]:
    processor = _processor(handle, "AutoFeatureExtractor", "audio")
    rate = int(processor.sampling_rate)
    sound, note = (_tensor_sound(value), "") if isinstance(value, Tensor) else read_wav(Path(value).expanduser(), rate)
    config: Any = handle.model.config
    window = getattr(processor, "n_samples", None) if takes == "input_features" else None
    if lengths is None:
        size = window or len(sound)
        places = [(start, size) for start in range(0, len(sound), size)]
    else:
        sizes = [samples_for(config, n) for n in lengths for _ in range(count or 1)]
        ends = np.cumsum(sizes).tolist()
        if ends[-1] > len(sound):
            raise ValueError(
                f"the clip has {len(sound) / rate:.2f} s, but {count or 1} disjoint pieces of each length "
                f"{', '.join(map(str, lengths))} take {ends[-1] / rate:.2f} s: "
                "use a longer clip, fewer inputs or shorter lengths"
            )
        places = [(end - size, size) for end, size in zip(ends, sizes, strict=True)]
    least = samples_for(config, 1) if window is None and hasattr(config, "conv_stride") else 1
    if len(sound) < least:
        raise ValueError(
            f"the clip has {len(sound)} samples, and one frame of {handle.name} takes {least}: use a longer clip"
        )
    found = []
    for start, size in places if count is None or lengths is not None else places[:count]:
        made = processor(sound[start : start + size], sampling_rate=rate, return_tensors="pt")
        one = _signal(handle, takes, made[takes])
        step = size / one.n if window else math.prod(config.conv_stride) if hasattr(config, "conv_stride") else size / one.n
        found.append(Signal(one.inputs, one.n, step / rate, start / rate, None, note))
    return found


def _tensor_sound(samples: Tensor) -> Any:
    if samples.ndim != 1 or not samples.is_floating_point() or not len(samples):
        raise ValueError(
            f"audio must be samples in one dimension, floating point, got {samples.dtype} {tuple(samples.shape)}"
        )
    return samples.detach().cpu().float().numpy()


def read_wav(path: Path, rate: int) -> tuple[Any, str]:
    """The samples of a WAV file between −1 and 1 at a sampling rate, and a note when they were resampled for that."""
    try:
        with reading(path), wave.open(str(path), "rb") as file:
            channels, width, own, frames = file.getparams()[:4]
            data = file.readframes(frames)
        if width > 4 or not 1000 <= own <= 1_000_000:
            raise wave.Error(f"samples of {8 * width} bits at {own} Hz")
    except (wave.Error, EOFError, RuntimeError, OverflowError) as error:  # the last two: chunks of impossible sizes
        why = str(error) or "its parts have other sizes than it says"
        raise ValueError(f"{path} is no WAV file with PCM samples ({why}): save the clip as 16-bit PCM WAV") from None
    if channels != 1:
        raise ValueError(
            f"{path} has {channels} channels, and the model hears one: save one of them, or their mean, as mono"
        )
    if not data:
        raise ValueError(f"{path} holds no samples")
    if len(data) != frames * width:
        raise ValueError(f"{path} ends after {len(data) // width} of its {frames} samples: it was cut short")
    raw = np.frombuffer(data, np.uint8).reshape(-1, width).astype(np.int64)
    whole = sum(raw[:, k] << (8 * k) for k in range(width))
    half = 1 << (8 * width - 1)
    # Samples of one byte count from 0, wider ones from −half.
    signed = whole - half if width == 1 else np.where(whole >= half, whole - 2 * half, whole)
    sound = np.asarray(signed / half, np.float32)
    if own == rate:
        return sound, ""
    from scipy.signal import resample_poly

    common = math.gcd(own, rate)
    return resample_poly(sound, rate // common, own // common).astype(np.float32), f"resampled from {own} to {rate} Hz"


def _seen(handle: Model, value: Medium) -> Tensor:
    try:
        from PIL import Image
    except ImportError:
        raise ImportError("images need Pillow: pip install pillow") from None
    processor = _processor(handle, "AutoImageProcessor", "image")
    if isinstance(value, Tensor):
        if value.dtype != torch.uint8 or value.ndim != 3 or value.shape[-1] != 3:
            raise ValueError(f"image must be uint8 of shape (height, width, 3), got {value.dtype} {tuple(value.shape)}")
        picture = Image.fromarray(value.cpu().numpy())
    else:
        try:
            with Image.open(Path(value).expanduser(), formats=_IMAGES) as opened:
                picture = opened.convert("RGB")
        except Exception as error:  # every decoder has errors of its own
            raise ValueError(
                f"{os.fspath(value)} is no image that can be read ({error}): save it as one of {', '.join(_IMAGES)}"
            ) from None
    pixels: Tensor = processor(picture, return_tensors="pt")["pixel_values"]
    return pixels


def _processor(handle: Model, kind: str, option: str) -> Any:
    """What makes inputs of files: the one that the model came with, or that of its directory. No code of it is run."""
    if handle.processor is not None:
        return handle.processor
    import transformers

    source = getattr(handle.model, "name_or_path", "") or getattr(handle.model.config, "_name_or_path", "")
    try:
        if not source:
            raise OSError("it was made in memory")
        made = getattr(transformers, kind).from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        why = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{handle.name} has no processor for --{option} ({why}): put its preprocessor_config.json beside the weights, "
            "name one with load(…, processor=…) in Python, or give what it would make with --features x.safetensors"
        ) from None
    return made


def _signal(handle: Model, takes: str, tensor: Tensor) -> Signal:
    """The input, after a pass that says whether the model takes it and how many tokens it becomes."""
    usual = tuple(handle.probe_inputs[takes].shape)
    if not tensor.is_floating_point():
        raise ValueError(f"features must be floating point, got {tensor.dtype}")
    if not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{takes} hold NaN or infinite values")
    inputs = {takes: tensor.to(device=handle.device, dtype=handle.dtype)}
    try:
        if tensor.ndim != len(usual):
            raise ValueError("another number of dimensions")
        n = int(handle.record(inputs)[handle.layers[0].index].tokens().shape[1])
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"{handle.name} takes {takes} of a shape such as {usual[1:]}, got {tuple(tensor.shape[1:])}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    patch = getattr(getattr(handle.model, "config", None), "patch_size", None)
    grid = None
    if takes in SEES and isinstance(patch, int):
        rows, columns = tensor.shape[-2] // patch, tensor.shape[-1] // patch
        # Class and register tokens stand before the patches; windows and merged patches are no grid.
        grid = (rows, columns) if 0 <= n - rows * columns <= 8 else None
    return Signal(inputs, n, grid=grid)
