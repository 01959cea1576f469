"""A task's arguments between a call and its run: checked by the handler's type hints, kept as JSON, given back as the
types the hints name.

What JSON has no word for is kept as text (times in ISO form, UUIDs, decimals, paths), bytes as base64, enums by their
value, dataclasses as objects. Pydantic models are used through their own methods, where the application has them;
rowmill does not depend on it. A parameter without a hint takes what JSON takes.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path, PurePath
from typing import Any, Literal, Union
from uuid import UUID

from ..errors import DeclarationError, WrongArguments

_PLAIN = (str, int, float, bool, type(None))
_BITS = 3300  # of the longest whole number: a thousand digits
#: Kept as text: how it is written, how it is read.
_AS_TEXT: dict[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    datetime: (datetime.isoformat, datetime.fromisoformat),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    UUID: (str, UUID),
    Decimal: (str, Decimal),
    bytes: (lambda value: base64.b64encode(value).decode("ascii"), base64.b64decode),
    Path: (str, Path),
    PurePath: (str, PurePath),
}


class UnknownArguments(WrongArguments):
    """Arguments of names that the handler does not take: those of a newer version of the task, perhaps."""


class Unfit(Exception):
    """A value that does not fit its hint; says what was wanted."""


def encode(value: Any, hint: Any = Any) -> Any:
    """A value as JSON takes it, if it fits the hint."""
    try:
        return _encode(value, hint)
    except RecursionError:
        raise Unfit("something less deeply nested") from None


def _encode(value: Any, hint: Any) -> Any:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty or isinstance(hint, typing.TypeVar):
        return _encode_plain(value)
    if origin is typing.Annotated:
        return _encode(value, inner[0])
    if hint is None or hint is type(None):
        return _fits(value, type(None))
    if origin in (Union, types.UnionType):
        return _first(lambda part: _encode(value, part), inner, value)
    if origin is Literal:
        if any(value == option and type(value) is type(option) for option in inner):
            return _encode_plain(value)
        raise Unfit(f"one of {', '.join(map(repr, inner))}")
    if hasattr(hint, "model_validate"):  # a pydantic model
        model = value if isinstance(value, hint) else _validated(hint, value)
        return model.model_dump(mode="json")
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint, include_extras=True)
        fields = {field.name for field in dataclasses.fields(_fits(value, hint)) if field.init}
        return {name: _encode(getattr(value, name), hints[name]) for name in fields}
    container = origin or hint
    if inspect.isclass(container):
        if issubclass(container, enum.Enum):
            return _encode_plain(_fits(value, container).value)
        if container is timedelta:
            return _fits(value, timedelta).total_seconds()
        if container in _AS_TEXT:
            if container is date and isinstance(value, datetime):
                raise Unfit("a date, not a datetime")
            return _AS_TEXT[container][0](_fits(value, container))
        if typing.is_typeddict(container):
            hints = typing.get_type_hints(container, include_extras=True)
            return {str(name): _encode(part, hints.get(name, Any)) for name, part in _fits(value, dict).items()}
        if issubclass(container, tuple):
            return _encode_tuple(value, container, inner)
        if issubclass(container, Mapping):
            key, part = inner or (Any, Any)
            return {_key(name, key): _encode(item, part) for name, item in _fits(value, Mapping).items()}
        if issubclass(container, (Set, Sequence)) and not issubclass(container, str):
            wanted = container if container not in (Sequence, Set) else (list, tuple, set, frozenset, container)
            if isinstance(value, (str, bytes)) or not isinstance(value, wanted):
                raise Unfit(f"a {container.__name__}")
            return [_encode(item, inner[0] if inner else Any) for item in value]
        if container is float and isinstance(value, int) and not isinstance(value, bool):
            return _number(value)
        if container in _PLAIN:
            if container is int and isinstance(value, bool):
                raise Unfit("an int, not a bool")
            return _number(_fits(value, container))
    raise Unfit(f"a type that can be stored as JSON; {_name(hint)} cannot (a dataclass or a pydantic model can)")


def decode(value: Any, hint: Any = Any) -> Any:
    """What ``encode`` made of a value of that hint, as it was."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is inspect.Parameter.empty or isinstance(hint, typing.TypeVar):
        return value
    if origin is typing.Annotated:
        return decode(value, inner[0])
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _first(lambda part: decode(value, part), [part for part in inner if part is not type(None)], value)
    if origin is Literal:
        return value
    if hasattr(hint, "model_validate"):
        return _validated(hint, value)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        hints = typing.get_type_hints(hint, include_extras=True)
        given = _fits(value, dict)
        known = {field.name for field in dataclasses.fields(hint) if field.init}
        return hint(**{name: decode(part, hints[name]) for name, part in given.items() if name in known})
    container = origin or hint
    if inspect.isclass(container):
        if issubclass(container, enum.Enum):
            return _by_value(container, value)
        if container is timedelta:
            return timedelta(seconds=value)
        if container in _AS_TEXT:
            return _AS_TEXT[container][1](_fits(value, str))
        if typing.is_typeddict(container):
            hints = typing.get_type_hints(container, include_extras=True)
            return {name: decode(part, hints.get(name, Any)) for name, part in _fits(value, dict).items()}
        if issubclass(container, tuple):
            return _decode_tuple(value, container, inner)
        if issubclass(container, Mapping):
            key, part = inner or (Any, Any)
            return {_unkey(name, key): decode(item, part) for name, item in _fits(value, dict).items()}
        if issubclass(container, (Set, Sequence)) and not issubclass(container, str):
            items = [decode(item, inner[0] if inner else Any) for item in _fits(value, list)]
            return items if inspect.isabstract(container) else container(items)  # type: ignore[call-arg]
        if container is float and isinstance(value, int):
            return float(value)
    return _fits(value, container) if container in _PLAIN else value


def _encode_plain(value: Any) -> Any:
    """Without a hint: what comes back from JSON as it went in. Anything else needs a hint to come back as itself."""
    if isinstance(value, dict):
        return {_key(name, Any): _encode_plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode_plain(part) for part in value]
    if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
        return _number(value)
    raise Unfit(f"a type hint: without one a {type(value).__name__} would come back as text")


def _number(value: Any) -> Any:
    """JSON has no word for some numbers, and Python none for writing the longest out."""
    if isinstance(value, float) and not math.isfinite(value):
        raise Unfit(f"a number that JSON has, not {value}")
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise Unfit("a number of fewer than 1,000 digits")
    return value


def _encode_tuple(value: Any, container: Any, inner: tuple[Any, ...]) -> list[Any]:
    items = _fits(value, (tuple, list))
    if hasattr(container, "_fields"):  # a NamedTuple
        hints = typing.get_type_hints(container, include_extras=True)
        return [encode(item, hints.get(name, Any)) for name, item in zip(container._fields, items, strict=True)]
    hints_of = _items(inner, len(items))
    return [encode(item, hint) for item, hint in zip(items, hints_of, strict=True)]


def _decode_tuple(value: Any, container: Any, inner: tuple[Any, ...]) -> Any:
    items = _fits(value, list)
    if hasattr(container, "_fields"):
        hints = typing.get_type_hints(container, include_extras=True)
        return container(*[decode(i, hints.get(name, Any)) for name, i in zip(container._fields, items, strict=True)])
    return tuple(decode(item, hint) for item, hint in zip(items, _items(inner, len(items)), strict=True))


def _items(inner: tuple[Any, ...], count: int) -> Sequence[Any]:
    """The hints of a tuple's items: ``tuple[int, ...]``, ``tuple[int, str]``, or none."""
    if not inner:
        return [Any] * count
    if len(inner) == 2 and inner[1] is Ellipsis:
        return [inner[0]] * count
    if len(inner) != count:
        raise Unfit(f"a tuple of {len(inner)}")
    return inner


def _key(name: Any, hint: Any) -> str:
    """An object's keys are text in JSON; those of a hinted type are written so that they can be read again."""
    if hint is not Any:
        kept = encode(name, hint)
        if not isinstance(kept, str):
            kept = json.dumps(kept)
        return kept
    if not isinstance(name, str):
        raise Unfit("keys that are text; for others give the dict a hint: dict[int, ...]")
    return name


def _unkey(name: str, hint: Any) -> Any:
    if hint in (int, float, bool):
        return decode(json.loads(name), hint)
    if inspect.isclass(hint) and issubclass(hint, enum.Enum):
        return _by_value(hint, name)
    return decode(name, hint)


def _by_value(kind: Any, value: Any) -> Any:
    for member in kind:
        if member.value == value or json.dumps(member.value, default=str) == value:
            return member
    raise Unfit(f"a value of {kind.__name__}")


def _first(convert: Callable[[Any], Any], hints: Sequence[Any], value: Any) -> Any:
    for hint in hints:
        try:
            return convert(hint)
        except (Unfit, ValueError, TypeError):
            continue
    raise Unfit(" or ".join(_name(hint) for hint in hints))


def _validated(model: Any, value: Any) -> Any:
    try:
        return model.model_validate(value)
    except ValueError as error:
        raise Unfit(f"a {model.__name__}: {error}") from error


def _fits(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        names = kind if isinstance(kind, tuple) else (kind,)
        raise Unfit(" or ".join("None" if k is type(None) else k.__name__ for k in names))
    return value


def _name(hint: Any) -> str:
    if hint is type(None):
        return "None"
    return hint.__name__ if inspect.isclass(hint) and not typing.get_args(hint) else str(hint).replace("typing.", "")


class Signature:
    """What a handler takes from a call: its parameters without the job and the resources."""

    def __init__(self, handler: Callable[..., Any], skip: Callable[[inspect.Parameter], bool]) -> None:
        self._handler = handler
        whole = inspect.signature(handler)
        self._whole = whole.replace(parameters=[p for p in whole.parameters.values() if not skip(p)])
        kinds = {p.kind for p in self._whole.parameters.values()}
        #: Given by position: what has no name, and all that stands before ``*args``.
        by_place: set[Any] = {inspect.Parameter.POSITIONAL_ONLY}
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            by_place.add(inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._leading = [p.name for p in self._whole.parameters.values() if p.kind in by_place]
        self.hints = self._hints()
        self._prepare()

    def _prepare(self) -> None:
        #: Nothing to translate: every parameter is one that JSON has, so the arguments are taken as they come.
        self._trivial = not self._leading and all(
            p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and self.hints.get(p.name, Any) in (str, int, bool, Any)
            for p in self._whole.parameters.values()
        )

        parameters = self._whole.parameters.values()
        self._wanted = {p.name: self.hints.get(p.name, Any) for p in parameters}
        self._by_place = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._names = frozenset(self._wanted)
        self._required = {p.name for p in parameters if p.default is p.empty}

    def take_lists(self, where: str) -> None:
        """The handler of a chunk: each parameter is a list with a value for each job, and a call gives one value."""
        for parameter in self._whole.parameters.values():
            plain = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            hint = self.hints.get(parameter.name, Any)
            if not plain or parameter.default is not parameter.empty or (hint is not Any and not _is_list(hint)):
                raise DeclarationError(
                    f"{where}: {parameter} is not a list. With chunk= each parameter is a list, one value for each job",
                    hint=f"{parameter.name}: list[{_name(hint) if plain and hint is not Any else 'str'}], without a"
                    " default; put what a call may leave out into a dataclass",
                )
        self.hints = {name: _item(hint) for name, hint in self.hints.items()}
        items = {name: self.hints.get(name, p.empty) for name, p in self._whole.parameters.items()}
        self._whole = self._whole.replace(
            parameters=[p.replace(annotation=items[name]) for name, p in self._whole.parameters.items()]
        )
        self._prepare()

    @property
    def names(self) -> Sequence[str]:
        """The parameters that a call fills, in order."""
        return tuple(self._wanted)

    def _hints(self) -> dict[str, Any]:
        function = inspect.unwrap(self._handler)
        while hasattr(function, "func"):
            function = function.func
        try:
            return typing.get_type_hints(function, include_extras=True)
        except Exception:  # a hint for type checkers only: that parameter, and the others, take what JSON takes
            return {}

    @property
    def returns(self) -> Any:
        """The hint of what the handler returns."""
        return self.hints.get("return", Any)

    def pack(self, where: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by name, as JSON takes them; raises WrongArguments."""
        if self._trivial and (plain := self._packed_plainly(args, kwargs)) is not None:
            return plain
        try:
            bound = self._whole.bind(*args, **kwargs)
        except TypeError as error:
            raise WrongArguments(f"{where}: {error}", hint=f"its handler takes {self}") from None
        packed = {}
        for name, value in bound.arguments.items():
            kind = self._whole.parameters[name].kind
            hint = self.hints.get(name, Any)
            try:
                if kind is inspect.Parameter.VAR_KEYWORD:
                    if twice := [key for key in value if key in self._whole.parameters]:
                        # Arguments are kept by name, and this one names two.
                        raise WrongArguments(
                            f"{where}: {twice[0]!r} is a parameter of its handler, and cannot be one of its"
                            f" **{name}, too",
                            hint=f"its handler takes {self}",
                        )
                    packed.update({key: encode(part, hint) for key, part in value.items()})
                elif kind is inspect.Parameter.VAR_POSITIONAL:
                    packed[name] = [encode(part, hint) for part in value]
                else:
                    packed[name] = encode(value, hint)
            except Unfit as unfit:
                raise WrongArguments(
                    f"{where}: {name}={_shown(value)} does not fit: expected {unfit}", hint=f"its handler takes {self}"
                ) from None
        return packed

    def _packed_plainly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """A call of which every argument already is what its hint says, and JSON has: most of them. Else None."""
        if len(args) > len(self._by_place):
            return None
        packed = dict(zip(self._by_place, args, strict=False))
        for name, value in kwargs.items():
            if name in packed or name not in self._wanted:
                return None
            packed[name] = value
        if not self._required <= packed.keys():
            return None
        for name, value in packed.items():
            kind = type(value)
            if kind is not self._wanted[name] or (kind is int and value.bit_length() > _BITS):
                return None
        return packed

    def packed_alike(self, calls: Sequence[Any]) -> list[dict[str, Any]] | None:
        """Many calls that give all arguments in the same way, each already what its hint says: looked at argument by
        argument, not call by call. None where they are not all of that kind.
        """
        names, kinds = self._by_place, {type(call) for call in calls}
        if not names or not self._trivial or len(names) < len(self._wanted) or kinds not in ({tuple}, {dict}):
            return None
        if {len(call) for call in calls} != {len(names)}:
            return None
        try:
            given = [tuple([call[at] for call in calls]) for at in (range(len(names)) if kinds == {tuple} else names)]
        except KeyError:
            return None
        for name, values in zip(names, given, strict=True):
            kind = self._wanted[name]
            if set(map(type, values)) != {kind} or (kind is int and max(map(int.bit_length, values)) > _BITS):
                return None
        return [dict(zip(names, values, strict=True)) for values in zip(*given, strict=True)]

    def needs(self) -> list[str]:
        """Names of the arguments that a call must give."""
        many = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return [n for n, p in self._whole.parameters.items() if p.default is p.empty and p.kind not in many]

    def takes_as_it_is(self, packed: Any) -> bool:
        """Packed arguments that the handler can be called with, by name, just as they are."""
        return type(packed) is dict and self._trivial and self._names.issuperset(packed)

    def unpack(self, packed: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Packed arguments as the handler takes them; raises WrongArguments where they do not fit its hints."""
        if self.takes_as_it_is(packed):
            return [], dict(packed)
        if not isinstance(packed, Mapping):
            raise WrongArguments(f"args is {_shown(packed)}, and must be an object: it takes {self}")
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        rest = dict(packed)
        known = self.known()
        if known is not None and (unknown := [name for name in rest if name not in known]):
            raise UnknownArguments(f"the handler takes no {', '.join(map(repr, unknown))}: it takes {self}")
        for parameter in self._whole.parameters.values():
            hint = self.hints.get(parameter.name, Any)
            if parameter.kind is parameter.VAR_KEYWORD:
                kwargs.update({name: self._unpacked(name, part, hint) for name, part in rest.items()})
                rest = {}
            elif parameter.name not in rest:
                continue
            elif parameter.kind is parameter.VAR_POSITIONAL:
                args += [self._unpacked(parameter.name, part, hint) for part in rest.pop(parameter.name)]
            else:
                value = self._unpacked(parameter.name, rest.pop(parameter.name), hint)
                if parameter.name in self._leading:
                    args.append(value)
                else:
                    kwargs[parameter.name] = value
        return args, kwargs

    def known(self) -> frozenset[str] | None:
        """The names of the arguments that the handler takes; None where it takes any."""
        anything = any(p.kind is p.VAR_KEYWORD for p in self._whole.parameters.values())
        return None if anything else self._names

    @staticmethod
    def _unpacked(name: str, value: Any, hint: Any) -> Any:
        try:
            return decode(value, hint)
        except (Unfit, ValueError, TypeError, ArithmeticError) as error:
            raise WrongArguments(f"{name}={_shown(value)} does not fit {_name(hint)}: {error}") from None

    def __str__(self) -> str:
        return str(self._whole.replace(return_annotation=inspect.Signature.empty)).replace("'", "")


def _is_list(hint: Any) -> bool:
    container = typing.get_origin(hint) or hint
    return inspect.isclass(container) and issubclass(list, container) and container is not object


def _item(hint: Any) -> Any:
    """Of a list, or of a mapping by id: what it holds for each job."""
    container, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if not inspect.isclass(container):
        return Any
    if issubclass(container, Mapping):
        return inner[1] if len(inner) == 2 else Any
    return inner[0] if inner and (issubclass(list, container) or issubclass(container, tuple)) else Any


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # too deep, or too long a number
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:59]}…"
