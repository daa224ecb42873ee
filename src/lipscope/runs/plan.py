"""What a run measures: models × texts × layers × heads × scopes × lengths × inputs, as data.

A plan is a list of blocks; each block is one such product. It comes from Python, from a TOML file (written here, as the
standard library only reads TOML), or from the command line. What can be refused without loading a model is refused here;
``lipscope.runs.tasks`` refuses the rest.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from lipscope.measure.scopes import SCOPES, Certificate, check_certificate, check_scope
from lipscope.runs.registry import Trust, kind_path, known_path, quantity_path


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
            lines.append(f"{name} = {_value(value, name)}")
    for name, table in tables:
        lines += ["", f"[[{name}]]", *(f"{key} = {_value(entry, key)}" for key, entry in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any, where: str) -> str:
    """A value in TOML; refuses what TOML, or the JSON of a row's identity, cannot hold."""
    match value:
        case bool():
            return "true" if value else "false"
        case float() if not math.isfinite(value):
            raise ValueError(f"{where} must be finite, got {value!r}")
        case int() | float():
            return repr(value)
        case str():
            # A JSON string is a basic TOML string but for the characters above the basic plane, which stay as they are.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(_value(entry, f"{where}[{number}]") for number, entry in enumerate(value)) + "]"
        case Mapping():
            pairs = (f"{_key(key, where)} = {_value(entry, f'{where}.{key}')}" for key, entry in value.items())
            return f"{{{', '.join(pairs)}}}"
        case _:
            raise ValueError(f"{where} must be a number, string, true/false, list or table, got {value!r}")


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"names in {where} must be strings, got {key!r}")
    return key if key and all(c.isascii() and (c.isalnum() or c in "_-") for c in key) else json.dumps(key)


# Seeds are 64-bit numbers for torch and for TOML.
_LARGEST = 2**63 - 1
# Inputs, steps and views: more than anybody waits for.
_MOST = 1_000_000
# More than any machine has cores; torch would try to start them all.
_MOST_THREADS = 4096


@dataclass(frozen=True)
class ModelChoice:
    """A model of a plan and how to load it.

    Attributes:
        name: what ``lipscope.load`` takes: a known name, a directory, a hub name.
        part: ``"encoder"`` of an encoder–decoder model.
        allow_pickle: accept pickled weights; a plan file may only ask for it, see ``lipscope.runs.registry.Trust``.
        trust_remote_code: run model code from the hub; likewise.
        tokenizer: the name or directory of another tokenizer than the model's own.
        loader: a name or ``"package.module:function"`` that turns the name and a dtype (or None) into a
            ``lipscope.Model``, in place of ``lipscope.load``; workers must be able to import it.
    """

    name: str
    part: str | None = None
    allow_pickle: bool = False
    trust_remote_code: bool = False
    tokenizer: str | None = None
    loader: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name of a model must be a string, got {self.name!r}")
        for setting in ("part", "tokenizer", "loader", "allow_pickle", "trust_remote_code"):
            value, flag = getattr(self, setting), setting in ("allow_pickle", "trust_remote_code")
            if not isinstance(value, bool if flag else str | None):
                words = "true or false" if flag else "a string"
                raise ValueError(f"{setting} of model {self.name!r} must be {words}, got {value!r}")
        if self.loader is not None:
            object.__setattr__(self, "loader", known_path("loader", self.loader))


@dataclass(frozen=True)
class Live:
    """Objects in this process that stand for what a plan otherwise names. No worker gets such a plan.

    With ``kept`` its tasks are known by what the model is and not by its place in memory, so that a store can keep them.
    """

    model: Any  # a ``lipscope.Model``
    documents: Sequence[str] | None = None
    solver: Any = None
    kept: bool = False


@dataclass(frozen=True)
class Block:
    """One product of a plan.

    Attributes:
        models: names, or ``ModelChoice``s.
        texts: names of corpora, files or directories.
        layers: layer indices (negative ones count from the end), or ``"all"``.
        heads: head indices for scope ``head``, or ``"all"``.
        scopes: which maps; see ``lipscope.measure.scopes``.
        lengths: numbers of tokens, or a string such as ``"8:512:log"``.
        inputs: inputs per length, disjoint in the text.
        kind: what a task does: ``"text"``, ``"packed"``, or ``"package.module:Kind"``; see ``lipscope.runs.registry``.
        quantities: further columns to measure for every row, by name or as ``"package.module:function"``.
        options: settings of the kind.
        dtype: ``"float32"`` or ``"float64"``; that of the weights by default.
        seed: where in the text the inputs lie, and the solver's start.
        rtol: relative accuracy of the estimates.
        delta: allowed failure probability of a probabilistic upper end.
        interval: widest relative interval to stop with; 0 switches this guard off.
        max_steps: most operator pairs (J, Jᵀ) per input.
        batch_tokens: most tokens in one forward pass. Inputs that share a pass share matrix products, so it is part of a
            row's identity.
        certificate: also compute certified upper ends, true, ``fast``, ``tight`` or ``verified``; by default fast ones where
            they cost no more than the measurement.
        memory: most bytes above the weights, a number or a size such as ``"4GiB"``, certificates included.
        views: look at so many of the worst layers or heads of every scope token by token; for kind ``text``.
        live: objects in place of names, for a run in this process; see ``Live``.
    """

    models: tuple[ModelChoice, ...]
    texts: tuple[str, ...] = ()
    layers: tuple[int, ...] | str = "all"
    heads: tuple[int, ...] | str = "all"
    scopes: tuple[str, ...] = ("attention",)
    lengths: tuple[int, ...] | str = (16, 32, 64, 128)
    inputs: int = 4
    kind: str = "text"
    quantities: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    seed: int = 0
    rtol: float = 1e-3
    delta: float = 1e-6
    interval: float = 0.1
    max_steps: int = 300
    batch_tokens: int = 4096
    certificate: Certificate = None
    memory: int | str | None = None
    views: int = 0
    live: Live | None = None

    def __post_init__(self) -> None:
        for name, coerce in _COERCIONS.items():
            object.__setattr__(self, name, coerce(name, getattr(self, name)))
        if not self.models:
            raise ValueError("models must name at least one model")
        if not self.scopes:
            raise ValueError(f"scopes must name at least one of {', '.join(SCOPES)}")
        for scope in self.scopes:
            check_scope(scope)
        if self.heads != "all" and "head" not in self.scopes:
            raise ValueError(f"heads are measured at scope 'head', but the scopes are {', '.join(self.scopes)}")
        if not isinstance(self.dtype, str | None) or self.dtype not in (None, "float32", "float64"):
            raise ValueError(f"dtype must be float32 or float64, got {self.dtype!r}")
        check_certificate(self.certificate)
        if self.views and self.kind != "text":
            raise ValueError(f"views exist for kind 'text', not for {self.kind!r}")
        kind_path(self.kind)
        for quantity in self.quantities:
            quantity_path(quantity)
        if self.live is None or self.live.solver is None:
            from lipscope.spectral.solvers import Auto

            # The solver knows what it can do; asked now, a wrong setting fails here and not in every task.
            Auto(**self.solver)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The lengths in ascending order."""
        return _lengths("lengths", self.lengths)

    @property
    def solver(self) -> dict[str, Any]:
        """Options of the solver: of ``Auto``, unless the block holds another one."""
        if self.live is not None and self.live.solver is not None:
            given = self.live.solver
            return asdict(given) if is_dataclass(given) and not isinstance(given, type) else {"solver": str(given)}
        names = ("rtol", "delta", "interval", "max_steps", "seed")
        return {name: getattr(self, name) for name in names} | {"interval": self.interval or None}


@dataclass(frozen=True)
class Plan:
    """What a sweep measures.

    Attributes:
        blocks: the products; a measurement that several blocks ask for is done once.
        threads: torch threads of every task. Sums depend on it in their last bits, so it belongs to the plan.
        text: the plan as it was written; written anew for a plan that was made in Python, empty for one with live objects.

    Example:
        >>> plan = Plan.of(models=["gpt2-random"], texts=["python-docs"], layers=[0], lengths=[8, 16], inputs=2)
        >>> plan.blocks[0].lengths
        (8, 16)
        >>> Plan.from_toml(plan.text) == plan
        True
    """

    blocks: tuple[Block, ...]
    threads: int = 1
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "threads", _whole(1, _MOST_THREADS)("threads", self.threads))
        if not self.blocks:
            raise ValueError("a plan needs at least one block")
        if not self.text and all(block.live is None or block.live.kept for block in self.blocks):
            object.__setattr__(self, "text", to_toml(self._as_dictionary()))

    @property
    def is_live(self) -> bool:
        """Whether it holds objects of this process instead of names."""
        return any(block.live is not None for block in self.blocks)

    @classmethod
    def of(cls, *, threads: int = 1, **settings: Any) -> Plan:
        """A plan of one block; see ``Block`` for the settings."""
        return cls((Block(**settings),), threads)

    @classmethod
    def from_toml(cls, text: str, *, trust: Trust = Trust()) -> Plan:  # noqa: B008
        """A plan from TOML: the settings of ``Block`` at the top, then any number of ``[[block]]`` that change some.

        Args:
            text: the plan.
            trust: whose code it may name, and what its models may do; by default only what lipscope and installed packages
                register.

        Raises:
            ValueError: when the text is not TOML, or a setting is unknown, wrong or not granted; says which.
        """
        try:
            given = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"the plan is not valid TOML: {error}") from None
        threads = given.pop("threads", 1)
        tables = given.pop("block", [{}])
        if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
            raise ValueError("blocks are written as [[block]], each with its settings below")
        blocks, known = [], [f.name for f in fields(Block) if f.name != "live"]
        for number, table in enumerate(tables, start=1):
            where = f"block {number}: " if "block" in text and len(tables) > 1 else ""
            settings = {"models": (), **given, **table}
            for name in settings:
                if name not in known:
                    raise ValueError(f"{where}unknown setting {name!r}; a plan has: threads, {', '.join(known)}")
            try:
                trust.check("kind", settings.get("kind"))
                for quantity in _listed(settings.get("quantities")):
                    trust.check("quantity", quantity)
                settings["models"] = [trust.grant(_model(model)) for model in _listed(settings["models"])]
                blocks.append(Block(**settings))
            except ValueError as error:
                raise ValueError(f"{where}{error}") from None
        return cls(tuple(blocks), threads, text)

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, trust: Trust = Trust()) -> Plan:  # noqa: B008
        """A plan from a TOML file, see ``from_toml``. Relative paths in it start where the command runs."""
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(f"there is no plan {str(path)!r}")
        try:
            return cls.from_toml(file.read_text(encoding="utf-8"), trust=trust)
        except UnicodeDecodeError:
            raise ValueError(f"the plan {path} is not UTF-8 text") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _as_dictionary(self) -> dict[str, Any]:
        blocks = [vars(block) | {"models": list(map(_plain_model, block.models)), "live": None} for block in self.blocks]
        tables = [{name: value for name, value in block.items() if value not in (None, {})} for block in blocks]
        return {"threads": self.threads, "block": tables}


def _model(given: Any) -> ModelChoice:
    if isinstance(given, ModelChoice):
        return given
    if isinstance(given, (str, os.PathLike)):
        return ModelChoice(os.fspath(given))
    known = [f.name for f in fields(ModelChoice)]
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str) or not set(given) <= set(known):
        raise ValueError(f"a model is a name, or a table with name and some of {', '.join(known[1:])}; got {given!r}")
    return ModelChoice(**given)


def _plain_model(model: ModelChoice) -> str | dict[str, Any]:
    given = {f.name: getattr(model, f.name) for f in fields(model) if getattr(model, f.name) != f.default}
    return model.name if len(given) == 1 else given


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _strings(name: str, value: Any) -> tuple[str, ...]:
    values = (value,) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, (str, os.PathLike)) for v in values):
        raise ValueError(f"{name} must be a list of names, got {value!r}")
    return tuple(dict.fromkeys(os.fspath(v) for v in values))


def _indices(name: str, value: Any) -> tuple[int, ...] | str:
    if isinstance(value, str) and value == "all":
        return "all"
    if not isinstance(value, (list, tuple, range)) or not value or not all(type(v) is int for v in value):
        raise ValueError(f"{name} must be 'all' or a list of indices, got {value!r}")
    return tuple(dict.fromkeys(value))


def _lengths(name: str, value: Any) -> tuple[int, ...]:
    from lipscope.models.text import check_lengths, parse_lengths

    if isinstance(value, str):
        return tuple(parse_lengths(value))
    if not isinstance(value, range) and not (isinstance(value, (list, tuple)) and all(type(v) is int for v in value)):
        raise ValueError(f"{name} must be positive numbers of tokens, or a string such as '8:512:log', got {value!r}")
    return tuple(check_lengths(value))


def _whole(least: int, most: int = _LARGEST) -> Callable[[str, Any], int]:
    def coerce(name: str, value: Any) -> int:
        if type(value) is not int or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
        if value > most:
            raise ValueError(f"{name} must be at most {most}, got {value!r}")
        return value

    return coerce


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {value!r}")
    return float(value)


def _memory(name: str, value: Any) -> int | str | None:
    from lipscope.measure.memory import read_bytes

    if not isinstance(value, int | float | str | None):
        raise ValueError(f"{name} must be a number of bytes or a size such as '4GiB', got {value!r}")
    if value is not None:
        read_bytes(value)
    return value if value is None or isinstance(value, str) else int(value)


def _options(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a table, got {value!r}")
    _value(value, name)
    return value


_COERCIONS: dict[str, Callable[[str, Any], Any]] = {
    "models": lambda name, value: tuple(map(_model, _listed(value))),
    **dict.fromkeys(("texts", "scopes", "quantities"), _strings),
    **dict.fromkeys(("layers", "heads"), _indices),
    "lengths": _lengths,
    **dict.fromkeys(("inputs", "max_steps"), _whole(1, _MOST)),
    "batch_tokens": _whole(1),
    "seed": _whole(0),
    "views": _whole(0, _MOST),
    **dict.fromkeys(("rtol", "delta", "interval"), _number),
    "memory": _memory,
    "options": _options,
}
