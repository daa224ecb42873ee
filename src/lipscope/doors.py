"""What comes in from outside, arguments of public functions and JSON files: refused here, by name, before it is used.

The public names of a package pass through ``attach``. Their functions, and the classes behind them, then compare what they
are given with their annotations; code inside lipscope imports the functions themselves, and is not slowed down.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, is_typeddict

import lazy_loader  # type: ignore[import-untyped]

Named = TypeVar("Named")
_doors: dict[Any, Any] = {}
_LOOKED_AT = 1000  # elements of a long list
_WORDS = {int: "an integer", float: "a number", str: "a string", bool: "True or False", type(None): "None", Path: "a path"}


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``lazy_loader.attach_stub`` for names that check what they are given."""
    get, names, every = lazy_loader.attach_stub(package, file)

    def door(name: str) -> Any:
        vars(sys.modules[package])[name] = found = checked(get(name))
        return found

    return door, names, every


def checked(item: Named) -> Named:
    """A function that refuses arguments of the wrong type; of a class, its public methods do, unless it is an operator."""
    if not getattr(item, "__module__", "").startswith("lipscope.") or hasattr(item, "__wrapped__"):
        return item
    if inspect.isfunction(item):
        return cast(Named, _doors.setdefault(item, _checking(item)))
    if inspect.isclass(item) and item not in _doors:
        _doors[item] = item
        for name, method in list(vars(item).items()):
            if isinstance(method, classmethod) and name[0] != "_":
                setattr(item, name, classmethod(_checking(method.__func__)))
            elif inspect.isfunction(method) and _is_door(item, name, method):
                setattr(item, name, _checking(method))
    return item


def _is_door(item: type, name: str, method: Callable[..., Any]) -> bool:
    """Left as they are: what solvers ask for thousands of times, what takes but tensors, what other libraries call."""
    if name in ("__init__", "__call__", "__getitem__"):
        return True
    asked = {hint for argument, hint in method.__annotations__.items() if argument != "return"}
    called_back = name.startswith("on_")
    return name[0] != "_" and not called_back and not hasattr(item, "matvec") and not asked <= {"Tensor", "slice"}


def _checking(function: Any) -> Any:
    signature = inspect.signature(function)
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    by_place = {name for name, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_ONLY}
    takes_more = inspect.Parameter.VAR_KEYWORD in kinds.values()
    hints: dict[str, Any] = {}

    @functools.wraps(function)
    def door(*args: Any, **kwargs: Any) -> Any:
        if kwargs.keys() & by_place and takes_more:  # a name of the further arguments, which ``bind`` would refuse
            return function(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__qualname__}: {error}") from None
        hints.update({} if hints else _hints(function, signature))
        for name, value in given.arguments.items():
            given.arguments[name] = _let_in(name, value, hints.get(name, Any))
        try:
            return function(*given.args, **given.kwargs)
        except (MemoryError, RuntimeError) as error:
            planned = isinstance(error, MemoryError) and "allocate memory" not in str(error) and str(error)
            if planned or type(error) not in (MemoryError, RuntimeError):
                raise
            if not str(error) or "allocate memory" in str(error):
                raise MemoryError(
                    f"not enough memory for {function.__name__} with these arguments: make them smaller"
                ) from error
            tensors = [
                f"{name} {tuple(v.shape)} {v.dtype}"
                for name, v in given.arguments.items()
                if hasattr(v, "dtype") and hasattr(v, "shape")
            ]
            raise ValueError(
                f"{function.__name__} cannot work with {', '.join(tensors) or 'these arguments'}: {error}"
            ) from error

    return door


def refuse_options(target: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse options that a function or class will be given later: those it does not have, and values of the wrong type."""
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    signature = inspect.signature(function)
    hints = _hints(inspect.unwrap(function), signature)
    for name, value in options.items():
        if name not in signature.parameters:
            raise TypeError(f"{name!r} is no option of {target.__qualname__}")
        _let_in(name, value, hints.get(name, Any))


def _let_in(name: str, value: Any, hint: Any) -> Any:
    """The value of an argument, numbers of numpy and torch as Python's; refuses what its annotation does not ask for."""
    if not fits(value, hint):
        shown = repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
        raise TypeError(f"{name} must be {wording(hint)}, got {shown[:80]}")
    if getattr(value, "is_meta", False):
        raise ValueError(f"{name} is on the meta device, where tensors hold no numbers")
    if isinstance(value, str) and not _is_text(value):
        raise ValueError(f"{name} holds a character that no name or text has: {value[:80]!r}")
    kinds = (hint, *get_args(hint))
    if getattr(value, "ndim", 0) == 1 and type(value) not in kinds and any(get_origin(kind) is Sequence for kind in kinds):
        return value.tolist()
    if isinstance(value, (bool, float)) or not (int in kinds or float in kinds) or not fits(value, int | float):
        return value
    try:
        number = operator.index(value) if int in kinds and hasattr(value, "__index__") else float(value)
    except OverflowError:
        number = 1 << 63
    if isinstance(number, int) and abs(number) >= 1 << 63:
        raise ValueError(f"{name} must be a number of at most 64 bits, got one that is larger")
    return number


def _is_text(value: str) -> bool:
    try:
        return b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def _hints(function: Callable[..., Any], signature: inspect.Signature) -> dict[str, Any]:
    """Annotations as objects; what a module imports for annotations only is looked for where it is defined."""
    found = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) or parameter.annotation is parameter.empty:
            continue
        hint = parameter.annotation
        with contextlib.suppress(NameError):
            found[name] = eval(hint, vars(sys.modules[function.__module__])) if isinstance(hint, str) else hint
    return found


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the type that an annotation asks for. Numbers of numpy and torch pass for numbers."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any or origin is Annotated:  # which says that the function converts what it is given
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) for part in parts)
    if hint in (int, float):
        if isinstance(value, (bool, type)) or getattr(value, "ndim", 0) != 0 or not hasattr(value, "__float__"):
            return False
        with contextlib.suppress(TypeError):  # a tensor says only when it is asked whether it is an integer
            return hint is float or operator.index(value) is not None
        return False
    if origin is not None and isinstance(origin, type) and issubclass(origin, Iterable):
        if isinstance(value, (str, bytes)) or not (
            isinstance(value, origin) or (origin is Sequence and getattr(value, "ndim", 0) == 1)
        ):
            return False
        if issubclass(origin, Mapping):
            return all(fits(key, parts[0]) for key in itertools.islice(value, _LOOKED_AT))
        if issubclass(origin, tuple) and parts[-1] is not ...:
            return len(value) == len(parts) and all(map(fits, value, parts))
        return not isinstance(value, Collection) or all(fits(part, parts[0]) for part in itertools.islice(value, _LOOKED_AT))
    if getattr(hint, "_is_protocol", False):
        # Tensors have names for everything, and are none of ours.
        return not hasattr(value, "ndim") and all(hasattr(value, name) for name in vars(hint) if name[0] != "_")
    if origin is Callable:
        return callable(value) and not isinstance(value, type)
    known = dict if is_typeddict(hint) else origin or hint
    return not isinstance(known, type) or isinstance(value, known)


def wording(hint: Any) -> str:
    """What an annotation asks for, in words."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        words = list(dict.fromkeys(wording(part) for part in parts))
        return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin is not None and isinstance(origin, type) and issubclass(origin, Iterable) and not issubclass(origin, Mapping):
        return f"a list, each of it {wording(parts[0])}"
    if hint in _WORDS:
        return _WORDS[hint]
    name = getattr(origin or hint, "__name__", str(hint))
    known = {"Tensor": "a torch tensor", "PathLike": "a path", "Callable": "a callable", "Layer": "an Attention"}
    known |= dict.fromkeys(("Mapping", "dict"), "a table")
    return known.get(name, f"{'an' if name[0] in 'AEIOU' or name.startswith('RMS') else 'a'} {name}")


def at_least(least: int, **numbers: float) -> None:
    """Refuse numbers that are too small, by name."""
    for name, number in numbers.items():
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")


def positive(**numbers: float) -> None:
    """Refuse numbers that are not positive and finite, by name."""
    for name, number in numbers.items():
        if not 0 < number < float("inf"):
            raise ValueError(f"{name} must be positive and finite, got {number:g}")


def refuse_shape(where: str, found: Any, shape: Mapping[str, Any], *, whole: bool = False) -> None:
    """Refuse data whose entries are not of the types in ``shape``. All of them must be there if ``whole``; others may be."""
    try:
        _let_in("it", found, dict[str, Any])
        for name in shape if whole else found.keys() & shape.keys():
            _let_in(name, found.get(name), shape[name])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where} is damaged, or was not written by lipscope: {error}") from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Inside, a file that is there and cannot be read is named with the reason."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def read_json(path: Path, kind: type) -> Any:
    """The content of a JSON file, which must be of this kind, ``dict`` or ``list``."""
    try:
        with reading(path):
            found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON that can be read: {error}") from None
    if not isinstance(found, kind):
        words = "an object" if kind is dict else "a list"
        raise ValueError(f"{path} must hold {words} of JSON, got {type(found).__name__}")
    return found
