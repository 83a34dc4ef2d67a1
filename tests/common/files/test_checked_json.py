"""JSON from files: what passes has the type and the range that was asked for; all else is a ValueError."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.common.files.checked_json import fields, integer, items, mapping, number, parse_json, text, to_json

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(VALUES, st.sampled_from([None, 2]))
def test_what_is_written_is_read(value, indent):
    assert parse_json(to_json(value, indent)) == value


def test_compact_json_has_no_spaces():
    assert to_json({"name": ["é", 1]}) == '{"name":["é",1]}'.encode()


def test_what_is_no_json_is_not_written():
    for value in [math.nan, math.inf, {"x": [-math.inf]}, "\ud800", {"\udfff": 1}]:
        with pytest.raises(ValueError):  # noqa: PT011
            to_json(value)


def test_what_is_no_json_is_not_read():
    for data in [b"", b"\xff\xfe[\x00]\x00", b"NaN", b"[Infinity]", b"-Infinity", b"{'a': 1}", b"1 2"]:
        with pytest.raises(ValueError):  # noqa: PT011
            parse_json(data)


CHECKS: dict[str, Any] = {
    "integer": (lambda value: integer(value, -3, 4), lambda one: type(one) is int and -3 <= one <= 4),
    "number": (lambda value: number(value, -3, 4), lambda one: type(one) is float and -3 <= one <= 4),
    "any number": (number, lambda one: type(one) is float and math.isfinite(one)),
    "text": (lambda value: text(value, 3), lambda one: type(one) is str and len(one) <= 3),
    "pattern": (lambda value: text(value, 9, "[ab]+"), lambda one: bool(one) and set(one) <= {"a", "b"}),
    "items": (lambda value: items(value, 2), lambda one: type(one) is list and len(one) <= 2),
    "pair": (lambda value: items(value, length=2), lambda one: type(one) is list and len(one) == 2),
    "mapping": (mapping, lambda one: type(one) is dict),
    "fields": (lambda value: fields(value, ["a"], ["b"]), lambda one: type(one) is list and len(one) == 2),
}
LIKELY = [True, 0, -3, 4, 5, -4, 2.5, 1e308, 10**400, "", "ab", "a\n", "abab", [], [1], [1, 2], [1, 2, 3]]
LIKELY += [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "c": 2}]
FITTING = {
    "integer": [0, -3, 4],
    "number": [0, -3, 4, 2.5],
    "any number": [0, -3, 4, 5, -4, 2.5, 1e308],
    "text": ["", "ab", "a\n"],
    "pattern": ["ab", "abab"],
    "items": [[], [1], [1, 2]],
    "pair": [[1, 2]],
    "mapping": [{}, {"a": 1}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "c": 2}],
    "fields": [{"a": 1}, {"a": 1, "b": 2}],
}


def test_which_values_pass():
    for name in CHECKS:
        check, fits = CHECKS[name]
        passed = []
        for value in LIKELY:
            try:
                assert fits(check(value))
            except ValueError:
                continue
            passed.append(value)
        assert [json.dumps(one) for one in passed] == [json.dumps(one) for one in FITTING[name]]


@given(st.sampled_from(sorted(CHECKS)), VALUES)
def test_any_value_passes_or_is_refused(name, value):
    check, fits = CHECKS[name]
    reason = ""
    try:
        assert fits(check(value))
    except ValueError as error:
        reason = str(error)
    assert len(reason) < 200


def test_half_of_a_surrogate_pair_is_no_text():
    with pytest.raises(ValueError, match="surrogates"):
        text(parse_json(b'"\\ud800"'), 10)


def test_fields_come_in_order_and_missing_ones_are_named():
    value = {"x": 1, "y": [2], "later": 3}
    assert fields(value, ["y", "x"], ["z"], closed=False) == [[2], 1, None]
    with pytest.raises(ValueError, match="a, b missing"):
        fields(value, ["a", "x", "b"], closed=False)
    with pytest.raises(ValueError, match="unknown field 'later'"):
        fields(value, ["x", "y"])
