"""Where rows were measured: versions, threads and hardware."""

from __future__ import annotations

import os
import platform
import socket
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from lipscope import __version__

_PACKAGES = ("torch", "transformers", "numpy", "scipy", "safetensors", "dask", "distributed")


def environment(threads: int) -> dict[str, Any]:
    """Versions and hardware of this process, and the torch threads of its tasks."""
    return _fixed() | {"threads": threads}


@cache
def _fixed() -> dict[str, Any]:
    versions = {"lipscope": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "versions": versions, "host": socket.gethostname(), "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(), "processor": _processor(), "cores": os.cpu_count(), "memory_bytes": _memory(),
        "blas": _blas(),
    }  # fmt: skip


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _blas() -> str:
    import torch

    capability = torch.backends.cpu.get_cpu_capability()
    return f"{'MKL' if torch.backends.mkl.is_available() else 'no MKL'}, {capability}"
