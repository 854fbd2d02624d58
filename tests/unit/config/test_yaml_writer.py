"""YAML that is written: readers get back what was given, and people see few quotes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steersman.config.yaml_writer import dump_yaml, yaml_lines

WORDS = st.text("abefnoslyNtru0123456789 ./:-_x#,'\"é\n", max_size=8)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), WORDS
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4)
)


def written(value: Any) -> str:
    return "\n".join(yaml_lines(value))


@given(VALUES)
def test_every_value_is_read_back(value: Any) -> None:
    assert yaml.load(written(value), Loader=yaml.CSafeLoader) == value


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("forwarded", "forwarded"),
        ("shop/web", "shop/web"),
        ("to one of 2 endpoints", "to one of 2 endpoints"),
        ("10.96.0.10:80", "10.96.0.10:80"),
        ("in: ready", "'in: ready'"),
        ("yes", '"yes"'),
        ("10", '"10"'),
        ("1:30", '"1:30"'),
        ("", '""'),
        ("two\nlines", '"two\\nlines"'),
        ("\u202e", '"\\u202E"'),
    ],
)
def test_texts_have_quotes_only_if_they_need_them(text: str, line: str) -> None:
    assert written(text) == line


def test_lists_are_not_indented_and_keys_keep_their_order() -> None:
    value = {"b": [{"d": 1, "c": [[], {}]}, (2, 3)], "a": None}
    assert written(value) == "b:\n- d: 1\n  c:\n  - []\n  - {}\n- - 2\n  - 3\na: null"
    assert dump_yaml({"b": 1, "a": {}}) == "a: {}\nb: 1\n"
