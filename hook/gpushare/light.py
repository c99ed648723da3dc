"""What the start path needs of typing, collections.abc, json and signal, without them (start path).

Importing those four takes longer than all the work of a start (12 to 15 ms: enum, re, functools and hundreds of classes
come with them). Type checkers see the real ones; at run time there are stand-ins:

    NamedTuple            the same class statement; fields, defaults, _replace, _asdict, comparison and repr as usual
    signal                the module in C behind it: numbers where signal has enums
    loads, dumps          the parser and encoder in C behind json, with json's values, text and errors
    Optional, Callable... nothing at all: annotations are never evaluated here
"""

from __future__ import annotations

TYPE_CHECKING = False  # mypy takes this name to be true, wherever it is defined

if TYPE_CHECKING:
    import signal as signal
    from collections.abc import Callable as Callable
    from collections.abc import Iterable as Iterable
    from collections.abc import Iterator as Iterator
    from collections.abc import Sequence as Sequence
    from types import TracebackType as TracebackType
    from typing import Any as Any
    from typing import NamedTuple as NamedTuple
    from typing import NoReturn as NoReturn
    from typing import Optional as Optional
    from typing import TypeVar as TypeVar
    from typing import Union as Union
else:
    import _signal as signal  # noqa: F401  for others
    from _collections import _tuplegetter

    class _Nothing:
        """Stands for every name of typing: can be called and subscripted, also in an alias."""

        def __getitem__(self, _):
            return self

        def __call__(self, *_, **__):
            return self

    Callable = Iterable = Iterator = Sequence = TracebackType = Any = NoReturn = Optional = TypeVar = Union = _Nothing()

    class _NamedTupleType(type):
        def __new__(cls, name, bases, namespace):
            fields = tuple(namespace.get("__annotations__", ()))
            if fields:
                namespace["_field_defaults"] = {f: namespace[f] for f in fields if f in namespace}
                namespace["_fields"] = namespace["__match_args__"] = fields
                for index, field in enumerate(fields):
                    namespace[field] = _tuplegetter(index, None)
            namespace["__slots__"] = ()
            return type.__new__(cls, name, bases, namespace)

    class NamedTuple(tuple, metaclass=_NamedTupleType):
        _fields = ()
        _field_defaults = {}

        def __new__(cls, *values, **named):
            if named or len(values) != len(cls._fields):
                values = _completed(cls, values, named)
            return tuple.__new__(cls, values)

        @classmethod
        def _make(cls, values):
            return cls(*values)

        def _replace(self, **named):
            values = [named.pop(field, value) for field, value in zip(self._fields, self)]
            if named:
                raise ValueError(f"Got unexpected field names: {list(named)!r}")
            return tuple.__new__(type(self), values)

        def _asdict(self):
            return dict(zip(self._fields, self))

        def __repr__(self):
            inside = ", ".join(f"{field}={value!r}" for field, value in zip(self._fields, self))
            return f"{type(self).__name__}({inside})"

        def __getnewargs__(self):
            return tuple(self)

    def _completed(cls, values, named):
        """The values of all fields, from those given in order, those given by name, and the defaults."""
        fields, defaults = cls._fields, cls._field_defaults
        found = list(values)
        for field in fields[len(values) :]:
            if field in named:
                found.append(named.pop(field))
            elif field in defaults:
                found.append(defaults[field])
            else:
                raise TypeError(f"{cls.__name__} is missing {field!r}")
        if named or len(found) != len(fields):
            raise TypeError(f"{cls.__name__} got {next(iter(named), 'too many values')!r}")
        return found


class _Parser:
    """The parser's settings: json.loads without arguments."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float = float
    parse_int = int
    parse_constant = {"-Infinity": -float("inf"), "Infinity": float("inf"), "NaN": float("nan")}.__getitem__
    memo: dict[str, str] = {}


def _default(value: object) -> object:
    raise TypeError(f"Object of type {value.__class__.__name__} is not JSON serializable")


try:
    import _json

    _parser: Any = _Parser
    _scan = _json.make_scanner(_parser)
    _text = _json.encode_basestring_ascii
    _json.make_encoder({}, _default, _text, None, ": ", ", ", False, False, True)
except (ImportError, AttributeError, TypeError):  # a Python that has it otherwise
    _json = None  # type: ignore[assignment]

_SPACE = " \t\n\r"


def loads(data: Union[str, bytes], made: Any = None) -> Any:
    """json.loads(data), also its errors: what the parser refuses is given to json for the message. `made`: as json's
    object_pairs_hook."""
    if _json is not None:
        try:
            text = (data if isinstance(data, str) else data.decode("utf-8")).lstrip(_SPACE)
            settings: Any = type("_", (_Parser,), {"object_pairs_hook": staticmethod(made)}) if made else None
            value, end = (_json.make_scanner(settings) if settings else _scan)(text, 0)
            if not text[end:].strip(_SPACE):
                return value
        except (
            ValueError,
            StopIteration,
            SystemError,
        ):  # C misses its exception while json is not loaded
            pass
    import json

    return json.loads(data, object_pairs_hook=made)


def dumps(value: object, item_separator: str = ", ", key_separator: str = ": ") -> str:
    """json.dumps(value, separators=...)."""
    if _json is not None:
        encode = _json.make_encoder({}, _default, _text, None, key_separator, item_separator, False, False, True)
        return "".join(encode(value, 0))
    import json

    return json.dumps(value, separators=(item_separator, key_separator))
