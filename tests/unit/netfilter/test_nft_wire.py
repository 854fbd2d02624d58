"""Requests and expressions of nf_tables, byte by byte."""

from __future__ import annotations

from steersman.host.nlmsg import NLM_F_CREATE, attributes, iter_attributes, string
from steersman.model.names import Family
from steersman.netfilter.nft import expressions, wire
from steersman.netfilter.nft.wire import HEAD, INET, Table


def test_a_new_table_belongs_to_its_socket() -> None:
    sent = wire.new_table(Table(INET, "trace"), flags=0x200)
    assert sent.kind == wire.SUBSYSTEM | wire.NEWTABLE
    assert sent.flags == NLM_F_CREATE | 0x200
    assert sent.payload[0] == INET
    found = attributes(sent.payload, HEAD.size)
    assert string(found[wire.TABLE_NAME]) == "trace"
    assert int.from_bytes(found[wire.TABLE_FLAGS], "big") == wire.OWNER


def test_a_field_is_loaded_and_compared() -> None:
    load, compare = expressions.field_is(Family.IPV4, "daddr", bytes((10, 96, 0, 1)))
    ((_, body),) = iter_attributes(load)
    parts = attributes(body)
    assert string(parts[1]) == "payload"
    numbers = {kind: int.from_bytes(value, "big") for kind, value in attributes(parts[2]).items()}
    assert numbers == {1: expressions.REGISTER, 2: expressions.NETWORK, 3: 16, 4: 4}
    ((_, body),) = iter_attributes(compare)
    parts = attributes(body)
    assert string(parts[1]) == "cmp"
    assert attributes(attributes(parts[2])[3]) == {1: bytes((10, 96, 0, 1))}
