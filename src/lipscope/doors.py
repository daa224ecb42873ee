"""What comes in from outside, arguments of public functions and JSON files: refused here, by name, before it is used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path, kind: type) -> Any:
    """The content of a JSON file, which must be of this kind, ``dict`` or ``list``."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON that can be read: {error}") from None
    if not isinstance(found, kind):
        words = "an object" if kind is dict else "a list"
        raise ValueError(f"{path} must hold {words} of JSON, got {type(found).__name__}")
    return found
