"""One reader of YAML: the scalars of Kubernetes, and limits for what people and tenants write."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from steersman.model.yaml_reader import BoundsError, Budget, YamlError, is_text, read_yaml


def read(text: str, nodes: int = 10_000, deepest: int = 20) -> Any:
    """The value of the only document."""
    (document,) = read_yaml(text, Budget(nodes, deepest))
    return document.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2024-01-01", "2024-01-01"),
        ("2026-11-21T03:38:27Z", "2026-11-21T03:38:27Z"),
        ("1:20:30", "1:20:30"),
        ("10.0.0.1", "10.0.0.1"),
        ("1.2.3", "1.2.3"),
        ("::1", "::1"),
        ("=", "="),
        ("y", "y"),
        ("yes", True),
        ("OFF", False),
        ("tRue", "tRue"),
        ("~", None),
        ("", None),
        ("Null", None),
        ("0", 0),
        ("-0", 0),
        ("+12", 12),
        ("1_000", 1000),
        ("010", 8),
        ("0o10", 8),
        ("-0x1F", -31),
        ("0b101", 5),
        ("09", 9.0),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("18446744073709551615", 2**64 - 1),
        ("18446744073709551616", float(2**64)),
        ("-9223372036854775809", -float(2**63)),
        ("1e999", "1e999"),
        (".inf", math.inf),
        ("-.Inf", -math.inf),
        (".", "."),
        ("-", [None]),
        ("'5'", "5"),
        ('"yes"', "yes"),
        ("|\n    5", "5\n"),
        ("!!str 5", "5"),
        ("! 5", 5),
        ("!mine 5", "5"),
        ("!!null x", None),
        ("!!bool yes", True),
        ("!!bool maybe", "maybe"),
        ("!!bool ~", "~"),
        ("!!int '5'", 5),
        ("!!float 5", 5.0),
        ("!!timestamp 2024-01-01", "2024-01-01"),
        ("!!python/object:os.system {a: 1}", {"a": 1}),
        ("!!set {a, b}", {"a": None, "b": None}),
    ],
)
def test_scalars_are_those_of_kubernetes(text: str, value: object) -> None:
    got = read(f"a:\n  {text}\n")["a"]
    assert (got, type(got)) == (value, type(value))


def test_what_is_no_number() -> None:
    assert math.isnan(read(".nan"))


def test_which_texts_need_quotes() -> None:
    words = ["", "~", "<<", "off", "5", "0x1", "1e3", ".inf", "1:30", "2024-01-01", "a", "1.2.3.4"]
    assert [word for word in words if is_text(word)] == ["1:30", "2024-01-01", "a", "1.2.3.4"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: !!int 1.5", "line 1: '1.5' is not a whole number"),
        ("a: !!int yes", "line 1: 'yes' is not a whole number"),
        ("a:\n- !!float x", "line 2: 'x' is not a number"),
        ("!!float yes", "line 1: 'yes' is not a number"),
        ("a: [\n", "line 2: "),
        ("a: 1\n\tb: 2", "line 2: "),
        ("a: 1\nb: *c", "line 2: found undefined alias 'c'"),
        ("a: &c 1\n---\nb: *c", "line 3: found undefined alias 'c'"),
        ("a: 1\n? [b]\n: c", "line 2: a key must be a scalar"),
        ("a: &a 5\n*a : b", "line 2: an alias that is a key must be of a text"),
        ("a: &a [1]\n*a : b", "line 2: an alias that is a key must be of a text"),
        ("a:\n  <<: 5", "line 2: map merge requires map or sequence of maps as the value"),
        ("a: b\n<<: [{}, 5]", "line 2: map merge requires"),
        ("a: \x01", "line 1: control characters are not allowed"),
        ("a: 1\nb: \ud800", "line 2: is not a text: surrogates not allowed"),
    ],
)
def test_what_is_not_yaml(text: str, problem: str) -> None:
    with pytest.raises(YamlError) as caught:
        list(read_yaml(text, Budget(100, 10)))
    assert str(caught.value).startswith(problem)
    assert not isinstance(caught.value, BoundsError)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "line 1: is nested too deeply"),
        ("{a: " * 100_000, "line 1: is nested too deeply"),
        ("- " * 21, "line 1: is nested too deeply"),
        (f"[\n{'1, ' * 10_000}]", "line 2: has too many values"),
        (f"[\n'{'x' * 700_000}']", "line 2: has too many values"),
        (f"'{'x' * 700_000}': 1", "line 1: has too many values"),
        ("[" + "[], " * 10_000 + "]", "line 1: has too many values"),
        ("&a [*a]", "line 1: 'a' holds itself by an alias"),
        ("b: &b {c: 1, d: [*b]}", "line 1: 'b' holds itself by an alias"),
        (f"- &a [{'1, ' * 99}]\n- [{'*a, ' * 200}]", "line 2: grows too large by its aliases"),
        (f"- &a '{'x' * 64_000}'\n- [{'*a, ' * 20}]", "line 2: grows too large by its aliases"),
        ("- &a [[[[[[[[[[1]]]]]]]]]]\n- [[[[[[[[[[*a]]]]]]]]]]", "line 2: is nested too deeply by"),
    ],
)
def test_limits(text: str, problem: str) -> None:
    with pytest.raises(BoundsError) as caught:
        read(text)
    assert str(caught.value).startswith(problem)


def test_a_budget_is_for_all_texts_together() -> None:
    budget = Budget(9, 2)
    assert [each.value for each in read_yaml("[1, 2, 3]", budget)] == [[1, 2, 3]]
    with pytest.raises(BoundsError, match="line 5"):
        list(read_yaml("[4]\n---\n[5,\n6,\n7]", budget))


def test_documents_and_their_lines() -> None:
    text = "# a\n\nkind: a\n---\n---\n# b\nitems:\n- 1\n\n- {}\n- x: 1\n  y: 2\n- *b\n"
    text = text.replace("kind: a", "items: &b []").replace("- *b\n", "")
    documents = list(read_yaml(text, Budget(100, 10)))
    assert [document.value for document in documents] == [
        {"items": []},
        None,
        {"items": [1, {}, {"x": 1, "y": 2}]},
    ]
    assert [document.line for document in documents] == [3, 5, 7]
    assert [document.item_lines for document in documents] == [(), (), (8, 10, 11)]
    assert list(read_yaml("# nothing\n", Budget(1, 1))) == []


def test_items_elsewhere_are_no_list() -> None:
    (document,) = read_yaml("a: {items: [1]}\nb: [items, [2]]\nitems: *x\n".replace("*x", "y"),
                            Budget(100, 10))  # fmt: skip
    assert document.item_lines == ()


def test_repeated_keys_are_told() -> None:
    (document,) = read_yaml("a: 1\nb:\n  é: 1\n  c: 2\n  é:\n    - 3\na: 4\n", Budget(100, 10))
    assert document.value == {"a": 4, "b": {"é": [3], "c": 2}}
    assert document.repeated == (
        'line 5: key "é" already set in map',
        'line 7: key "a" already set in map',
    )


def test_keys_are_texts() -> None:
    text = "k: &k name\n5: a\nyes: b\n~: c\n2024-01-01: d\n*k : e\n'<<': f\n"
    assert read(text) == {
        "k": "name", "5": "a", "yes": "b", "~": "c", "2024-01-01": "d", "name": "e", "<<": "f"
    }  # fmt: skip


def test_an_anchored_key() -> None:
    assert read("&a b: 1\nc: *a\n") == {"b": 1, "c": "b"}


def test_merge_keys() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {z: 3, <<: [*a, *b]}\nd: {<<: *b, <<: *a}\n"
    value = read(text)
    assert value["c"] == {"x": 1, "y": 1, "z": 3}
    assert value["d"] == {"x": 1, "y": 1, "z": 2}


def test_an_anchor_may_be_used_again() -> None:
    assert read("- &a 1\n- *a\n- &a 2\n- *a\n- &a [3]\n- *a") == [1, 1, 2, 2, [3], [3]]


def test_tags_of_collections_make_no_objects() -> None:
    text = "!!python/object/apply:os.system ['exit 1']"
    assert read(text) == ["exit 1"]


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["2024-01-01", "0o7", "1_0", "yes", "~", "<<", "1e3", "0x1", ".5", "1:30"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner,
                      max_size=3),
    max_leaves=12,
)  # fmt: skip


@given(VALUES)
def test_what_pyyaml_writes_is_read_again(value: Any) -> None:
    # Quotes for every text: PyYAML writes plain what only YAML 1.2 reads as a number.
    text = yaml.dump([value, value], default_style='"', allow_unicode=True)
    assert read(text) == [value, value]


@given(st.text("{}[]:,-&*!|>'\"#%@<~ \n\tab01.", max_size=40) | st.text(max_size=20))
def test_any_text_is_values_or_an_error(text: str) -> None:
    lines = 1 + sum(text.count(end) for end in "\n\r\x85\u2028\u2029")
    try:
        documents = list(read_yaml(text, Budget(100, 10)))
        # For libyaml, the missing value behind a last "---" is on a line of its own.
        found = [each.line for each in documents if each.value is not None]
    except YamlError as error:
        found = [error.line - 1]
    assert all(0 <= line <= lines for line in found)
