"""Weights where they lie: the headers of safetensors files, single tensors of them, and whether they fit into memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipscope.models.checkpoints import parts_of, refuse_damaged

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # first byte in the file
    size: int  # bytes


class Checkpoint:
    """The tensors in the safetensors files of a directory, by the names under which they are stored.

    Files are read, not mapped into memory: one that is cut short while it is read is then an error and not the end of the
    process, and pages of the file do not count as memory of the process.

    Raises:
        ValueError: when a file is missing, cut short, or holds what is no floating-point tensor; names the file.
    """

    def __init__(self, directory: Path) -> None:
        indices = sorted(directory.glob("*.safetensors.index.json"))
        files = map(directory.joinpath, sorted(parts_of(indices[0]))) if indices else sorted(directory.glob("*.safetensors"))
        self.directory = directory
        self.tensors: dict[str, Stored] = {}
        self._seen: dict[Path, tuple[int, int]] = {}
        for file in files:
            if not file.is_file():
                raise ValueError(f"{directory} names {file.name} as a part of its weights, but there is no such file")
            self._seen[file] = _state(file)
            self.tensors |= _header(file)

    @property
    def identity(self) -> list[Any]:
        """What tells the files from others: names, shapes and places of the tensors, sizes and times of the files."""
        held = [[name, str(t.dtype), t.shape, t.start] for name, t in sorted(self.tensors.items())]
        return [held, [[file.name, *state] for file, state in self._seen.items()]]

    @property
    def dtype(self) -> torch.dtype:
        """The floating type of the weights."""
        return next((t.dtype for t in self.tensors.values() if t.dtype.is_floating_point), torch.float32)

    def read(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        where = self.tensors[name]
        if _state(where.file) != self._seen[where.file]:
            raise ValueError(f"{where.file} changed while it was read: measure again, from the start")
        # Products of matrices round differently at other alignments: as in a file that is mapped into memory.
        data = torch.empty(where.size + 64, dtype=torch.uint8)
        shift = (where.start - data.data_ptr()) % 64
        data = data[shift if shift % where.dtype.itemsize == 0 else 0 :][: where.size]
        with where.file.open("rb") as file:
            file.seek(where.start)
            view: Any = data.numpy()
            if file.readinto(view) < where.size:
                raise ValueError(f"{where.file} ends inside {name}: it was cut short")
        return data.view(where.dtype).reshape(where.shape)


def _state(file: Path) -> tuple[int, int]:
    try:
        about = file.stat()
    except OSError as error:
        raise ValueError(f"{file} cannot be read any more: {error.strerror}") from None
    return about.st_size, about.st_mtime_ns


def _header(file: Path) -> dict[str, Stored]:
    refuse_damaged(file)
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        entries = json.loads(opened.read(length))
    entries.pop("__metadata__", None)
    found = {}
    for name, entry in entries.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{file}: {name} is stored as {entry['dtype']}; streaming takes {', '.join(_DTYPES)}")
        start, end = entry["data_offsets"]
        found[name] = Stored(file, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + length + start, end - start)
    return found


def fits(directory: Path, dtype: torch.dtype | None = None, device: torch.device | None = None) -> bool:
    """Whether the weights of a directory, with the copy that is made on loading, fit into the memory that is free now.

    On a device of its own, its memory has to hold them too, without that copy.
    """
    free, there = free_memory(), free_memory(device)
    if free is None or not any(directory.glob("*.safetensors")):
        return True
    checkpoint = Checkpoint(directory)
    wanted = dtype or (torch.float64 if checkpoint.dtype == torch.float64 else torch.float32)
    held = [(t.size, t.size // t.dtype.itemsize * wanted.itemsize, t.dtype != wanted) for t in checkpoint.tensors.values()]
    here = sum(size + copied * wide for size, wide, copied in held) < free
    return here and (there is None or sum(wide for _, wide, _ in held) < there)


def free_memory(device: torch.device | None = None) -> int | None:
    """Bytes that this process could still take, here or on a GPU, or None when the system does not say."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None
