"""Plans as TOML text: the standard library reads TOML but does not write it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_toml(document: Mapping[str, Any]) -> str:
    """TOML of a dictionary; a list of dictionaries at the top level becomes an array of tables.

    Example:
        >>> print(to_toml({"threads": 1, "block": [{"models": ["a"], "rtol": 1e-3}]}), end="")
        threads = 1
        <BLANKLINE>
        [[block]]
        models = ["a"]
        rtol = 0.001
    """
    lines, tables = [], []
    for name, value in document.items():
        if isinstance(value, (list, tuple)) and value and all(isinstance(v, Mapping) for v in value):
            tables += [(name, table) for table in value]
        else:
            lines.append(f"{name} = {_value(value)}")
    for name, table in tables:
        lines += ["", f"[[{name}]]", *(f"{key} = {_value(entry)}" for key, entry in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # A JSON string is a basic TOML string but for the characters above the basic plane, which stay as they are.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(_value(entry) for entry in value) + "]"
        case Mapping():
            return "{" + ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items()) + "}"
        case _:
            raise ValueError(f"{value!r} cannot be written in a plan: use numbers, strings, true/false, lists and tables")


def _key(key: str) -> str:
    return key if key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key) else json.dumps(key)
