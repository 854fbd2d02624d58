from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.source.framing import LineTooLongError
from steersman.source.wire import (
    ApiError,
    LineSplitter,
    Status,
    decode_event,
    decode_list,
    initial_end,
)


def page(**changes: Any) -> bytes:
    value = {"kind": "NodeList", "metadata": {"resourceVersion": "7"}, "items": []}
    return msgspec.json.encode(value | changes)


def test_an_empty_list_of_go_is_null() -> None:
    assert bytes(decode_list("Node", page(items=None)).items) == b"[]"
    assert bytes(decode_list("Node", page(items=[{}])).items) == b"[{}]"


@pytest.mark.parametrize("changes", [{"kind": "PodList"}, {"metadata": {}}, {"kind": "Node"}])
def test_what_is_no_list(changes: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        decode_list("Node", page(**changes))
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    ("code", "reason"),
    [(403, "http_403"), (599, "http_599"), (1234, "http_other"), (0, "http_other")],
)
def test_only_real_statuses_are_reasons_of_their_own(code: int, reason: str) -> None:
    assert Status(code=code).error().reason == reason


@pytest.mark.parametrize(
    ("meta", "reason"),
    [
        ({"resourceVersion": "7"}, "no_watch_list"),
        ({"resourceVersion": "7", "annotations": []}, "no_watch_list"),
        ({"annotations": {"k8s.io/initial-events-end": "true"}}, "malformed"),
    ],
)
def test_bookmarks_that_end_no_list(meta: dict[str, Any], reason: str) -> None:
    event = {"type": "BOOKMARK", "object": {"metadata": meta}}
    with pytest.raises(ApiError) as caught:
        initial_end(decode_event(msgspec.json.encode(event)))
    assert caught.value.reason == reason


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_lines_do_not_depend_on_the_chunks(text: bytes, cuts: list[int]) -> None:
    splitter = LineSplitter()
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    lines = [
        line for start, end in itertools.pairwise(bounds) for line in splitter.feed(text[start:end])
    ]
    *wanted, rest = text.split(b"\n")
    assert lines == [line for line in wanted if line.strip()]
    assert splitter.rest == rest


@pytest.mark.parametrize("chunks", [[b"x" * 11], [b"x" * 6, b"x" * 6], [b"x" * 11 + b"\n"],
                                    [b"x" * 6, b"x" * 6 + b"\n"]])  # fmt: skip
def test_a_line_that_is_too_long(chunks: list[bytes]) -> None:
    splitter = LineSplitter(max_line=10)
    with pytest.raises(LineTooLongError):
        [splitter.feed(chunk) for chunk in chunks]
