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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from lipscope.doors import fits, reading
from lipscope.measure.scopes import SCOPES, Certificate, check_certificate, check_scope
from lipscope.runs.registry import Trust, kind_path, known_path, quantity_path


@dataclass(frozen=True)
class ModelChoice:
    """A model of a plan and how to load it."""

    name: str  # what ``lipscope.load`` takes: a known name, a directory, a hub name
    part: str | None = None  # ``"encoder"`` of an encoder–decoder model
    allow_pickle: bool = False  # accept pickled weights; a plan file may only ask for it, see ``registry.Trust``
    trust_remote_code: bool = False  # run model code from the hub; likewise
    stream: bool = False  # read the weights of one layer at a time
    tokenizer: str | None = None  # the name or directory of another tokenizer than the model's own
    # A name or ``"package.module:function"`` that makes a ``lipscope.Model`` of the name and a dtype (or None), in place of
    # ``lipscope.load``; workers must be able to import it.
    loader: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"name of a model must be a string, got {self.name!r}")
        flags = ("allow_pickle", "trust_remote_code", "stream")
        for setting in ("part", "tokenizer", "loader", *flags):
            value, flag = getattr(self, setting), setting in flags
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
    signals: tuple[str, Sequence[Any]] | None = None  # a name and ``models.media.Signal``s, in place of documents


@dataclass(frozen=True)
class Block:
    """One product of a plan."""

    models: tuple[ModelChoice, ...]  # names, or ``ModelChoice``s
    texts: tuple[str, ...] = ()  # names of corpora, files or directories
    layers: tuple[int, ...] | str = "all"  # layer indices (negative ones count from the end), or ``"all"``
    heads: tuple[int, ...] | str = "all"  # head indices for scope ``head``, or ``"all"``
    scopes: tuple[str, ...] = ("attention",)  # which maps; see ``lipscope.measure.scopes``
    lengths: tuple[int, ...] | str = (16, 32, 64, 128)  # numbers of tokens, or a string such as ``"8:512:log"``
    inputs: int = 4  # inputs per length, disjoint in the text
    kind: str = "text"  # what a task does: ``"text"``, ``"packed"``, ``"package.module:Kind"``; see ``runs.registry``
    quantities: tuple[str, ...] = ()  # further columns for every row, by name or as ``"package.module:function"``
    options: Mapping[str, Any] = field(default_factory=dict)  # settings of the kind
    dtype: str | None = None  # ``"float32"`` or ``"float64"``; that of the weights by default
    seed: int = 0  # where in the text the inputs lie, and the solver's start
    rtol: float = 1e-3  # relative accuracy of the estimates
    delta: float = 1e-6  # allowed failure probability of a probabilistic upper end
    interval: float = 0.1  # widest relative interval to stop with; 0 switches this guard off
    max_steps: int = 300  # most operator pairs (J, Jᵀ) per input
    # Most tokens in one forward pass. Inputs that share a pass share matrix products: it is part of a row's identity.
    batch_tokens: int = 4096
    batch_size: int = 0  # inputs in one forward pass, whatever their length; 0: as ``batch_tokens`` says
    # Also compute certified upper ends: true, ``fast``, ``tight``, ``verified``; by default fast ones where they are cheap.
    certificate: Certificate = None
    memory: int | str | None = None  # most bytes above the weights, or a size such as ``"4GiB"``, certificates included
    views: int = 0  # look at so many of the worst layers or heads of every scope token by token; for kind ``text``
    live: Live | None = None  # objects in place of names, for a run in this process

    def __post_init__(self) -> None:
        for name in (*_WORDS, *_RANGES):
            if name != "threads":
                object.__setattr__(self, name, _coerced(name, getattr(self, name)))
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
        if self.views and self.kind not in ("text", "signals"):
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
        return tuple(_coerced("lengths", self.lengths))

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
        object.__setattr__(self, "threads", _coerced("threads", self.threads))
        if not self.blocks:
            raise ValueError("a plan needs at least one block")
        if not self.text and all(block.live is None or block.live.kept for block in self.blocks):
            object.__setattr__(self, "text", self._written())

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
        with reading(file):
            data = file.read_bytes()
        try:
            return cls.from_toml(data.decode("utf-8"), trust=trust)
        except UnicodeDecodeError:
            raise ValueError(f"the plan {path} is not UTF-8 text") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _written(self) -> str:
        lines = [f"threads = {self.threads}"]
        for block in self.blocks:
            settings = vars(block) | {"models": list(map(_plain_model, block.models)), "live": None}
            lines += ["", "[[block]]", *(f"{name} = {_toml(v)}" for name, v in settings.items() if v not in (None, {}))]
        return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """JSON with another sign after a name is TOML, but for a character that must be escaped."""
    return json.dumps(value, ensure_ascii=False, separators=(", ", " = ")).replace("\x7f", "\\u007f")


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


# Seeds are 64-bit numbers for torch and for TOML. More inputs, steps and views than a million nobody waits for; more
# threads than this no machine has, and torch would try to start them all.
_RANGES = {
    **dict.fromkeys(("inputs", "max_steps"), (1, 1_000_000)),
    **dict.fromkeys(("views", "batch_size"), (0, 1_000_000)),
    "batch_tokens": (1, 2**63 - 1),
    "seed": (0, 2**63 - 1),
    "threads": (1, 4096),
}
_WORDS = {
    "models": "a list of models",
    **dict.fromkeys(("texts", "scopes", "quantities"), "a list of names"),
    **dict.fromkeys(("layers", "heads"), "'all' or a list of indices"),
    "lengths": "positive numbers of tokens, or a string such as '8:512:log'",
    **dict.fromkeys(("rtol", "delta", "interval"), "a number"),
    "memory": "a number of bytes or a size such as '4GiB'",
    "options": "a table",
}


def _coerced(name: str, value: Any) -> Any:
    """A setting as a plan holds it; raises ValueError for what it cannot be."""
    match name:
        case "models":
            return tuple(map(_model, _listed(value)))
        case "texts" | "scopes" | "quantities" if fits(names := _listed(value), list[str | os.PathLike[str]]):
            return tuple(dict.fromkeys(map(os.fspath, names)))
        case "layers" | "heads" if isinstance(value, str) and value == "all":
            return "all"
        case "layers" | "heads" if fits(value, Sequence[int]) and len(value):
            return tuple(dict.fromkeys(map(int, value)))
        case "lengths" if fits(value, Sequence[int] | str):
            from lipscope.models.text import check_lengths, parse_lengths

            return tuple(map(int, parse_lengths(value) if isinstance(value, str) else check_lengths(value)))
        case "rtol" | "delta" | "interval" if fits(value, float):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value!r}")
            return float(value)
        case "memory" if value is None:
            return None
        case "memory" if fits(value, float | str):
            from lipscope.measure.memory import read_bytes

            size = read_bytes(value)
            return value if isinstance(value, str) else size
        case "options" if isinstance(value, Mapping):
            _refuse_objects(value, name)
            return dict(value)
    if name in _WORDS:
        raise ValueError(f"{name} must be {_WORDS[name]}, got {value!r}")
    least, most = _RANGES[name]
    if not fits(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value!r}")
    return int(value)


def _refuse_objects(value: Any, where: str) -> None:
    """Refuse what TOML, or the JSON of a row's identity, cannot hold."""
    match value:
        case float() if not math.isfinite(value):
            raise ValueError(f"{where} must be finite, got {value!r}")
        case list() | tuple():
            for number, entry in enumerate(value):
                _refuse_objects(entry, f"{where}[{number}]")
        case Mapping():
            for key, entry in value.items():
                if not isinstance(key, str):
                    raise ValueError(f"names in {where} must be strings, got {key!r}")
                _refuse_objects(entry, f"{where}.{key}")
        case _ if not isinstance(value, (bool, int, float, str)):
            raise ValueError(f"{where} must be a number, string, true/false, list or table, got {value!r}")
