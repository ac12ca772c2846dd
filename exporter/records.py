"""JSON files into frozen dataclasses and back; whatever does not fit exactly is refused in one line.

Manifests, golden sets and reports are read on machines that did not write them, and an exit code hangs on their
numbers. So nothing is converted, defaulted or ignored: a missing key, an unknown key, a duplicate key, a boolean for a
number, NaN, a number that overflows to infinity, and a file too large to be one of ours are faults.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, Union

from exporter.errors import BadInput
from exporter.files import read_bounded

Record = TypeVar("Record")

Json: TypeAlias = Any  # what json.loads gives and json.dumps takes
Hint: TypeAlias = Any  # a type hint; Python has no type for them

JSON_LIMIT = 16 << 20  # bytes; ours have some hundred kB, and Python needs about 30 times a JSON file's size

_SCALARS: dict[type, str] = {str: "a text", bool: "true or false", int: "an integer", float: "a number"}


def _shown(value: object) -> str:
    """Quote a value from a file, cut short, for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _reject_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a finite number")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("the same key stands twice in one object")
    return mapping


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """Parse one JSON object strictly.

    Args:
        data: UTF-8 text.
        where: what is being read, for messages.

    Returns:
        The object, made of dicts, lists, texts, finite numbers, booleans and None.

    Raises:
        BadInput: it is no JSON object, or one with duplicate keys or numbers that are not finite.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            parse_constant=_reject_constant,
            parse_float=_finite,
            object_pairs_hook=_unique_keys,
        )
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where} is damaged: {error}; write it again or fetch an intact copy") from error
    if not isinstance(value, dict):
        raise BadInput(f"{where} is damaged: it holds {_shown(value)} where an object belongs")
    return value


def decode(cls: type[Record], value: object, where: str) -> Record:
    """Make a dataclass from parsed JSON.

    Args:
        cls: the dataclass.
        value: what ``parse_json`` gave, or a part of it.
        where: path of the value, for messages.

    Returns:
        The instance, with nested dataclasses, tuples and enums in place.

    Raises:
        BadInput: a key is missing, unknown or of the wrong type, or the class refuses a value.
    """
    decoded: Record = _decode(cls, value, where)
    return decoded


def read_record(cls: type[Record], path: Path, schema_version: int) -> Record:
    """Read a JSON file with a ``schema_version`` into its dataclass.

    Args:
        cls: the dataclass.
        path: the file.
        schema_version: the only version that is read.

    Returns:
        The instance.

    Raises:
        BadInput: the file is missing, too large, damaged or of another schema version.
    """
    value = parse_json(read_bounded(path, JSON_LIMIT), str(path))
    found = value.get("schema_version")
    if type(found) is not int or found != schema_version:
        raise BadInput(
            f"{path} has schema version {_shown(found)}, this kvit-export reads {schema_version}; "
            "use the version that wrote it, or write it again"
        )
    return decode(cls, value, str(path))


def encode(value: object) -> Json:
    """Turn dataclasses, enums, tuples and mappings into what ``json`` writes.

    Args:
        value: a dataclass instance or a value of one of its fields.

    Returns:
        Dicts, lists and scalars.

    Raises:
        ValueError: a number is not finite; a value that cannot be a number is stored as None.
        TypeError: a type has no place in JSON.
    """
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {_text_key(key): encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} cannot be stored")
    if value is None or type(value) in _SCALARS:
        return value
    raise TypeError(f"{type(value).__name__} {_shown(value)} cannot be stored")


def to_text(value: object) -> str:
    """Write a dataclass or plain JSON value as indented JSON with a final newline.

    Args:
        value: what ``encode`` takes.

    Returns:
        The text, in ASCII.
    """
    return json.dumps(encode(value), indent=1, allow_nan=False) + "\n"


def _text_key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"the key {_shown(key)} is not a text")
    return key


def _decode(kind: Hint, value: object, where: str) -> Json:
    """Check ``value`` against a type hint and convert containers; the hints are those used in our dataclasses."""
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    origin: Hint = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        inner = [option for option in typing.get_args(kind) if option is not type(None)]
        return None if value is None else _decode(inner[0], value, where)
    if origin is Literal:
        if value not in typing.get_args(kind) or not isinstance(value, str):
            raise BadInput(f"{where}: {_shown(value)} is none of {', '.join(map(str, typing.get_args(kind)))}")
        return value
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, where)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _decode_mapping(typing.get_args(kind)[1], value, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _guard(lambda: kind(value), where)
    return _decode_scalar(kind, value, where)


def _decode_scalar(kind: Hint, value: object, where: str) -> object:
    if kind is float and type(value) is int:
        return _guard(lambda: float(value), where)
    if type(value) is not kind:
        raise BadInput(f"{where}: {_shown(value)} is not {_SCALARS[kind]}")
    return value


def _decode_tuple(kinds: tuple[Hint, ...], value: object, where: str) -> tuple[Json, ...]:
    if not isinstance(value, list):
        raise BadInput(f"{where}: {_shown(value)} is not a list")
    if kinds[-1] is Ellipsis:
        kinds = (kinds[0],) * len(value)
    if len(kinds) != len(value):
        raise BadInput(f"{where}: {len(value)} entries where {len(kinds)} belong")
    pairs = zip(kinds, value, strict=True)
    return tuple(_decode(kind, item, f"{where}[{index}]") for index, (kind, item) in enumerate(pairs))


def _decode_mapping(kind: Hint, value: object, where: str) -> dict[str, Json]:
    if not isinstance(value, dict):
        raise BadInput(f"{where}: {_shown(value)} is not an object")
    return {key: _decode(kind, item, f"{where}.{_shown(key)}") for key, item in value.items()}


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode_dataclass(cls: Hint, value: object, where: str) -> Json:
    if not isinstance(value, dict):
        raise BadInput(f"{where}: {_shown(value)} is not an object")
    names = [field.name for field in dataclasses.fields(cls)]
    missing = [name for name in names if name not in value]
    unknown = [key for key in value if key not in names]
    if missing:
        raise BadInput(f"{where}: {missing[0]!r} is missing")
    if unknown:
        raise BadInput(f"{where}: {_shown(unknown[0])} is not known to this version")
    hints = _hints(cls)
    fields = {name: _decode(hints[name], value[name], f"{where}.{name}") for name in names}
    return _guard(lambda: cls(**fields), where)


def _guard(make: Callable[[], Json], where: str) -> Json:
    """Turn the refusal of a constructor into a fault that says where the value stands."""
    try:
        return make()
    except (ValueError, OverflowError) as error:
        raise BadInput(f"{where}: {error}") from error
