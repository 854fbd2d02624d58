"""Messages of nf_tables: elements packed, found and taken apart."""

from __future__ import annotations

import pytest

from steersman.host.nlmsg import attr, message, nested, text
from steersman.model.names import Family
from steersman.modes.nftables import wire
from steersman.modes.nftables.layout import Form
from steersman.modes.nftables.wire import encode


@pytest.mark.parametrize("keys_only", [False, True])
@pytest.mark.parametrize("form", list(Form))
def test_packed_elements_are_what_nested_attributes_make(form: Form, keys_only: bool) -> None:
    key, values = b"k" * 12, {Form.INTERVALS: b"e" * 4, Form.ENDPOINTS: b"d" * 8}
    value = values.get(form, b"lb-4\0words" if form is Form.VERDICTS else b"words")
    (packed,) = encode(form, [(key, value)], keys_only=keys_only)
    begin = nested(wire.ELEMENT_KEY, attr(1, key))
    rest = {
        Form.INTERVALS: nested(wire.ELEMENT_KEY_END, attr(1, key[:8] + value)),
        Form.ENDPOINTS: nested(wire.ELEMENT_DATA, attr(1, value)),
        Form.VERDICTS: wire.verdict(b"lb-4") + wire.userdata(b"words"),
        Form.SET: wire.userdata(b"words"),
    }[form]
    assert packed == nested(1, begin, b"" if keys_only and form is not Form.INTERVALS else rest)


def test_comments_come_back() -> None:
    assert wire.comment_of(wire.userdata(b"ns/name")[4:]) == b"ns/name"
    assert wire.comment_of(b"") == wire.comment_of(b"\1\2x\0") == b""


def test_the_element_that_is_to_blame_is_found_by_its_place() -> None:
    pairs = [(bytes((10, 96, 0, n)), b"c" * n) for n in range(9)]
    items = encode(Form.SET, pairs, keys_only=False)
    request = wire.elements(wire.NEWSETELEM, Family.IPV4, "some", items)
    sent = message(request.kind, request.flags, 1, request.payload)
    places = [sent.index(item) for item in items]
    assert [wire.element_at(request, place) for place in places] == list(range(9))
    assert wire.element_at(request, places[3] + 4) == -1


def test_answers_are_taken_apart_as_far_as_they_make_sense() -> None:
    listed = nested(3, nested(1, b"ab"), nested(1, b"cdef"))
    assert list(wire.element_contents(bytes(4) + text(1, "table") + listed)) == [b"ab", b"cdef"]
    assert list(wire.element_contents(bytes(4) + attr(3, nested(1, b"ab") + bytes(4)))) == [b"ab"]
