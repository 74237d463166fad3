"""Frozen records with named fields: dataclasses that take no time to define.

`dataclasses` writes source for every class and compiles it, and imports `inspect` to do so: half of
the time that a command took to start. What a record is to its users is the same: `replace`,
`asdict`, `fields`, `==`, `hash`, `repr`, `copy` and `pickle` know it as a frozen dataclass with
slots.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, TypeVar, dataclass_transform

    T = TypeVar("T")
else:

    def dataclass_transform(**_):
        return lambda decorator: decorator


_HOT = 20  # records of one class after which it is worth a constructor of its own


class _Factory:
    """The default of a field that every record gets its own of."""

    __slots__ = ("make",)

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make


_NO_DEFAULT = object()


def field(*, default_factory: Callable[[], Any]) -> Any:
    """As in `dataclasses`."""
    return _Factory(default_factory)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def record(cls: type[T]) -> type[T]:
    """Class decorator: `@dataclass(frozen=True, kw_only=True, slots=True)`."""
    return _made(cls, positional=False)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def positional_record(cls: type[T]) -> type[T]:
    """Class decorator: `@dataclass(frozen=True, slots=True)`."""
    return _made(cls, positional=True)


def replace(old: T, **changes: Any) -> T:
    """A copy with other values in some fields. Of records only; the copy is not built anew."""
    cls = type(old)
    new = object.__new__(cls)
    for name, put in cls.__fields__.items():  # type: ignore[attr-defined]
        put(new, changes.pop(name) if name in changes else getattr(old, name))
    if changes:
        raise TypeError(f"{cls.__name__} has no field {next(iter(changes))!r}")
    return new


def plain(a_record: object) -> dict[str, Any]:
    """Its values by the names of its fields."""
    return {name: getattr(a_record, name) for name in names(type(a_record))}


def names(cls: type) -> tuple[str, ...]:
    """The fields of a class of records."""
    return tuple(cls.__fields__)  # type: ignore[attr-defined]


def _made(cls: type[T], *, positional: bool) -> type[T]:
    own = tuple(
        name for name, kind in cls.__annotations__.items() if not str(kind).startswith("ClassVar")
    )
    space: dict[str, Any] = {
        name: value
        for name, value in cls.__dict__.items()
        if name not in own and name not in ("__dict__", "__weakref__")
    }
    defaults = {name: cls.__dict__.get(name, _NO_DEFAULT) for name in own}
    space |= {
        "__slots__": (*own, "_hash"),
        "__match_args__": own if positional else (),
        "__dataclass_fields__": _AsDataclass(defaults, kw_only=not positional),
        "__dataclass_params__": _Params,
        "__setattr__": _refuse_change,
        "__delattr__": _refuse_change,
        "__eq__": _equal,
        "__hash__": _hash,
        "__repr__": cls.__dict__.get("__repr__", _repr),
        "__getstate__": _values,
        "__setstate__": _fill,
        "__qualname__": cls.__qualname__,
    }
    kind: Any = type(cls)
    made = kind(cls.__name__, cls.__bases__, space)
    # Past `__setattr__`.
    made.__fields__ = {name: made.__dict__[name].__set__ for name in own}
    made.__init__ = _constructor(made, defaults, positional=positional)
    return made  # type: ignore[no-any-return]


def _constructor(cls: Any, defaults: dict[str, Any], *, positional: bool) -> Callable[..., None]:
    fields = [(name, put, defaults[name]) for name, put in cls.__fields__.items()]
    uses = 0

    def __init__(self: Any, *values: Any, **given: Any) -> None:
        nonlocal uses
        uses += 1
        if uses == _HOT:
            cls.__init__ = _own_constructor(cls, defaults, positional=positional)
        if values:
            _name_values(cls, values, given, positional)
        for name, put, default in fields:
            if name in given:
                put(self, given.pop(name))
            elif type(default) is _Factory:
                put(self, default.make())
            elif default is not _NO_DEFAULT:
                put(self, default)
            else:
                raise TypeError(f"{cls.__name__}() needs the argument {name!r}")
        if given:
            raise TypeError(f"{cls.__name__}() has no argument {next(iter(given))!r}")

    return __init__


def _own_constructor(cls: Any, defaults: dict[str, Any], *, positional: bool) -> Any:
    """What `dataclasses` would have written: four times as fast, but it takes time to compile."""
    space: dict[str, Any] = {}
    parameters, body = [], []
    for name, put in cls.__fields__.items():
        default, given = defaults[name], name
        space[f"_put_{name}"] = put
        if default is _NO_DEFAULT:
            parameters.append(name)
        else:
            space[f"_default_{name}"] = default
            parameters.append(f"{name}=_default_{name}")
        if type(default) is _Factory:
            space[f"_make_{name}"] = default.make
            given = f"_make_{name}() if {name} is _default_{name} else {name}"
        body.append(f"    _put_{name}(_self, {given})")
    marker = "" if positional else "*, "
    text = f"def __init__(_self, {marker}{', '.join(parameters)}):\n" + "\n".join(body)
    exec(text, space)
    return space["__init__"]


def _name_values(cls: Any, values: tuple[Any, ...], given: dict[str, Any], allowed: bool) -> None:
    if not allowed or len(values) > len(cls.__fields__):
        raise TypeError(f"{cls.__name__}() takes no such positional arguments")
    for name, value in zip(cls.__fields__, values, strict=False):
        if name in given:
            raise TypeError(f"{cls.__name__}() got {name!r} twice")
        given[name] = value


def _refuse_change(self: Any, name: str, value: object = None) -> None:
    from dataclasses import FrozenInstanceError

    raise FrozenInstanceError(f"cannot change field {name!r}")


def _values(self: Any) -> list[Any]:
    return [getattr(self, name) for name in type(self).__fields__]


def _fill(self: Any, values: list[Any]) -> None:
    for put, value in zip(type(self).__fields__.values(), values, strict=True):
        put(self, value)


def _equal(self: Any, other: object) -> Any:
    if type(other) is not type(self):
        return NotImplemented
    return _values(self) == _values(other)


def _hash(self: Any) -> int:
    try:
        known: int = self._hash
    except AttributeError:
        known = hash(tuple(_values(self)))
        object.__setattr__(self, "_hash", known)
    return known


def _repr(self: Any) -> str:
    shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in type(self).__fields__)
    return f"{type(self).__qualname__}({shown})"


class _Params:
    """What `dataclasses` asks a base class."""

    frozen = True


class _AsDataclass:
    """`__dataclass_fields__`, made when somebody asks: that takes importing `dataclasses`."""

    def __init__(self, defaults: Mapping[str, Any], *, kw_only: bool) -> None:
        self._defaults, self._kw_only = defaults, kw_only
        self._made: dict[str, Any] | None = None

    def __get__(self, instance: object, owner: type) -> dict[str, Any]:
        if self._made is None:
            import dataclasses

            made = {}
            for name, default in self._defaults.items():
                if type(default) is _Factory:
                    each: Any = dataclasses.field(default_factory=default.make)
                elif default is _NO_DEFAULT:
                    each = dataclasses.field()
                else:
                    each = dataclasses.field(default=default)
                each.name, each.type = name, owner.__annotations__[name]
                each.kw_only = self._kw_only
                each._field_type = dataclasses._FIELD  # type: ignore[attr-defined]
                made[name] = each
            self._made = made
        return self._made
