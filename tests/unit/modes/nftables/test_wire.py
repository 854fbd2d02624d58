"""Messages of nf_tables: elements packed, found and taken apart."""

from __future__ import annotations

import pytest

from steersman.host.nlmsg import attr, message, nested, text
from steersman.model.names import Family
from steersman.modes.nftables import wire
from steersman.modes.nftables.layout import Form
from steersman.modes.nftables.wire import encode
from steersman.netfilter.nft import wire as nft


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
        Form.VERDICTS: wire.verdict(b"lb-4") + nft.userdata(b"words", wire.ELEMENT_USERDATA),
        Form.SET: nft.userdata(b"words", wire.ELEMENT_USERDATA),
    }[form]
    assert packed == nested(1, begin, b"" if keys_only and form is not Form.INTERVALS else rest)


@pytest.mark.parametrize(
    ("form", "values"),
    [
        (Form.SET, [b"", b"words"]),
        (Form.VERDICTS, [b"lb-4\0words", b"lb-4\0", b"drop\0words", b"continue\0"]),
        (Form.ENDPOINTS, [b"addrpor1", b"addrpor0"]),
        (Form.INTERVALS, [b"last"]),
    ],
)
def test_elements_are_read_back_as_they_were_sent(form: Form, values: list[bytes]) -> None:
    pairs = [(bytes((number,)) * 12, value) for number, value in enumerate(values)]
    items = wire.encode(form, pairs, keys_only=False)
    answer = wire.elements(nft.NEWSETELEM, Family.IPV4, "some", items).payload
    key, value = wire.key_getter(12), wire.value_getter(form, 12, 4)
    contents = list(wire.element_contents(answer))
    assert [(key(content), value(content)) for content in contents] == pairs


def test_a_verdict_of_another_program_is_unknown() -> None:
    jump = nested(wire.ELEMENT_DATA, nested(2, attr(1, b"\xff\xff\xff\xfb")))  # NFT_RETURN
    content = nested(wire.ELEMENT_KEY, attr(1, b"k" * 12)) + jump
    assert wire.value_getter(Form.VERDICTS, 12, 4)(content) == b"?\0"


def test_comments_come_back() -> None:
    assert nft.comment_of(nft.userdata(b"ns/name", 6)[4:]) == b"ns/name"
    assert nft.comment_of(b"") == nft.comment_of(b"\1\2x\0") == b""


def test_the_rejected_element_is_found_by_its_offset() -> None:
    pairs = [(bytes((10, 96, 0, n)), b"c" * n) for n in range(9)]
    items = encode(Form.SET, pairs, keys_only=False)
    request = wire.elements(nft.NEWSETELEM, Family.IPV4, "some", items)
    sent = message(request.kind, request.flags, 1, request.payload)
    places = [sent.index(item) for item in items]
    assert [wire.element_at(request, place) for place in places] == list(range(9))
    assert wire.element_at(request, places[3] + 4) == -1


def test_malformed_answers_are_read_as_far_as_possible() -> None:
    listed = nested(3, nested(1, b"ab"), nested(1, b"cdef"))
    assert list(wire.element_contents(bytes(4) + text(1, "table") + listed)) == [b"ab", b"cdef"]
    assert list(wire.element_contents(bytes(4) + attr(3, nested(1, b"ab") + bytes(4)))) == [b"ab"]


@pytest.mark.parametrize("family", list(Family))
def test_every_request_names_our_table(family: Family) -> None:
    requests = (
        nft.delete_table(wire.OURS[family]),
        nft.new_chain(wire.OURS[family], "chain"),
        nft.delete_chain(wire.OURS[family], "chain"),
        nft.flush_chain(wire.OURS[family], "chain"),
        wire.flush_set(family, "set"),
        wire.delete_set(family, "set"),
        wire.new_members_set(family, "set"),
        wire.new_affinity_map(family, "map"),
    )
    assert {nft.table_of(request.payload) for request in requests} == {"kube-proxy"}
