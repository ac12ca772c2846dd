"""JSON into dataclasses: nothing is converted, defaulted or ignored."""

from __future__ import annotations

import dataclasses
import enum
import json
import tracemalloc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exporter.errors import BadInput
from exporter.records import JSON_LIMIT, decode, encode, parse_json, read_record, to_text


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    value: float
    maybe: float | None


@dataclass(frozen=True)
class Sample:
    schema_version: int
    text: str
    flag: bool
    number: float
    colour: Colour
    choice: Literal["one", "two"]
    pair: tuple[int, int]
    inner: tuple[Inner, ...]
    mapping: Mapping[str, Inner]
    free: Mapping[str, Any]
    optional: Inner | None

    def __post_init__(self):
        if self.number < 0:
            raise ValueError("a negative number")


GOOD = Sample(
    1,
    "t\u00e9xt",
    True,
    0.1,
    Colour.RED,
    "two",
    (1, 2),
    (Inner(1e-300, None),),
    {"k": Inner(2.0, 3.5)},
    {"a": [1, None]},
    None,
)


def as_json(**changes):
    return json.loads(to_text(GOOD)) | changes


@given(
    st.floats(min_value=0, allow_infinity=False, allow_nan=False),
    st.text(),
    st.lists(st.floats(allow_nan=False, allow_infinity=False)),
)
def test_round_trip_is_exact(number, text, values):
    sample = dataclasses.replace(GOOD, number=number, text=text, inner=tuple(Inner(v, v) for v in values))
    assert decode(Sample, parse_json(to_text(sample).encode(), "x"), "x") == sample


BAD = {
    "text for number": {"number": "1"},
    "bool for number": {"number": True},
    "bool for integer": {"schema_version": True},
    "float for integer": {"pair": [1, 2.0]},
    "number for bool": {"flag": 1},
    "null": {"text": None},
    "short tuple": {"pair": [1]},
    "long tuple": {"pair": [1, 2, 3]},
    "object for list": {"inner": {"0": 1}},
    "list for object": {"mapping": []},
    "unknown choice": {"choice": "three"},
    "unhashable choice": {"choice": ["one"]},
    "unknown enum": {"colour": "blue"},
    "unhashable enum": {"colour": {}},
    "unknown key": {"extra": 1},
    "nested unknown key": {"optional": {"value": 1, "maybe": None, "more": 1}},
    "nested missing key": {"optional": {"value": 1}},
    "refused by the class": {"number": -1.0},
    "integer too large for a float": {"number": 10**400},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_a_wrong_value_is_named(change):
    key = next(iter(change))
    with pytest.raises(BadInput) as caught:
        decode(Sample, as_json(**change), "file.json")
    assert "file.json" in caught.value.format_message()
    assert key in caught.value.format_message()
    assert len(caught.value.format_message()) < 300


def test_a_missing_key_is_named():
    for key in as_json():
        value = as_json()
        del value[key]
        with pytest.raises(BadInput, match=f"'{key}' is missing"):
            decode(Sample, value, "file.json")


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b'{"a": 1e999}',
        b'{"a": 1, "a": 2}',
        b"[]",
        b"1",
        b"",
        b"{",
        b'{"a": "\xff"}',
        b"[" * 200_000,
        b'{"a": ' * 200_000,
        b'{"a": ' + b"9" * 5000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
    ids=lambda text: repr(text[:16]),
)
def test_damaged_json_is_refused_in_one_line(text):
    with pytest.raises(BadInput) as caught:
        parse_json(text, "file.json")
    assert caught.value.format_message().startswith("file.json is damaged")
    assert len(caught.value.format_message()) < 400


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_cannot_be_written(value):
    with pytest.raises(ValueError, match="cannot be stored"):
        encode(dataclasses.replace(GOOD, inner=(Inner(value, None),)))
    with pytest.raises(ValueError, match="cannot be stored"):
        encode({"a": [value]})


@pytest.mark.parametrize("value", [{1: 2}, {"a": object()}, b"bytes", {"a": {1, 2}}])
def test_what_has_no_place_in_json_cannot_be_written(value):
    with pytest.raises(TypeError):
        encode(value)


def test_reading_checks_the_schema_version_first(tmp_path):
    path = tmp_path / "file.json"
    for version in (0, 2, "1", 1.0, True, None, [1]):
        path.write_text(json.dumps(as_json(schema_version=version, extra="of another version")))
        with pytest.raises(BadInput, match="schema version"):
            read_record(Sample, path, 1)
    path.write_text(to_text(GOOD))
    assert read_record(Sample, path, 1) == GOOD


def test_a_giant_file_is_not_read(tmp_path):
    path = tmp_path / "file.json"
    with open(path, "wb") as file:
        file.truncate(4 << 30)  # sparse
    tracemalloc.start()
    with pytest.raises(BadInput, match="larger than"):
        read_record(Sample, path, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * JSON_LIMIT
