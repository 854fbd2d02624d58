"""nf_tables over netlink: messages for elements, sets, chains and the few rules nft cannot write.

Layouts are those of linux/netfilter/nf_tables.h. Attributes that hold numbers are in network byte
order; keys and values of elements are as the data path has them in its registers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from steersman.host.netlink import Request
from steersman.host.nlmsg import (
    HEADER,
    NLA_F_NESTED,
    NLM_F_ACK,
    NLM_F_APPEND,
    NLM_F_CREATE,
    attr,
    attributes,
    be32,
    iter_attributes,
    nested,
    string,
    text,
)
from steersman.model.names import Family
from steersman.modes.nftables.layout import DROP, REJECT, TABLE

_SUBSYSTEM = 10 << 8
NEWTABLE, GETTABLE, DELTABLE, NEWCHAIN, GETCHAIN, DELCHAIN, NEWRULE, GETRULE, DELRULE = range(9)
NEWSET, GETSET, DELSET, NEWSETELEM, GETSETELEM, DELSETELEM, NEWGEN, GETGEN = range(9, 17)
DESTROYTABLE, DESTROYSETELEM = 26, 30
"""Since kernel 6.3: deleting what is not there is no error."""
_BATCH_BEGIN, _BATCH_END = 16, 17

_NFPROTO = {Family.IPV4: 2, Family.IPV6: 10}
FAMILY_OF = {number: family for family, number in _NFPROTO.items()}
"""Families by their netfilter numbers."""
_LENGTH = struct.Struct("=H")
_NFGENMSG = struct.Struct("=BB2s")
_ELEMENTS = 3
_CHUNK = 60_000  # bytes of elements in a message: an attribute's length has 16 bits

ELEMENT_KEY, ELEMENT_DATA, ELEMENT_USERDATA, ELEMENT_EXPR, ELEMENT_KEY_END = 1, 2, 6, 7, 10
_DATA_VERDICT = 2
_GOTO = struct.pack(">i", -4)


def request(kind: int, family: Family | None, *attributes: bytes, flags: int = 0) -> Request:
    """Return a request of nf_tables; family None for all."""
    number = _NFPROTO[family] if family else 0
    return Request(
        _SUBSYSTEM | kind, _NFGENMSG.pack(number, 0, b"\0\0") + b"".join(attributes), flags
    )


def batch(requests: Sequence[Request]) -> list[Request]:
    """Return requests as one transaction; errors are answered, and the last one is."""
    edge = _NFGENMSG.pack(0, 0, b"\0\x0a")
    last = requests[-1]
    return [
        Request(_BATCH_BEGIN, edge),
        *requests[:-1],
        last._replace(flags=last.flags | NLM_F_ACK),
        Request(_BATCH_END, edge),
    ]


def table_of(payload: bytes) -> str:
    """Name of the table that a message of nf_tables (but for generations) is about."""
    return string(attributes(payload, 4).get(1, b""))


# -- elements ------------------------------------------------------------------------------


_PLAIN = {DROP: struct.pack(">i", 0), REJECT: struct.pack(">i", -1)}
_PLAIN_NAMES = {code: name for name, code in _PLAIN.items()}


def verdict(word: bytes) -> bytes:
    """Return the data of an element that goes to a chain, or is DROP or REJECT."""
    if word in _PLAIN:
        return nested(ELEMENT_DATA, nested(_DATA_VERDICT, attr(1, _PLAIN[word])))
    goto = nested(_DATA_VERDICT, attr(1, _GOTO), attr(2, word + b"\0"))
    return nested(ELEMENT_DATA, goto)


@lru_cache(maxsize=1024)
def verdict_word(data: bytes) -> bytes:
    """Read what `verdict` made."""
    found = attributes(attributes(data).get(_DATA_VERDICT, b""))
    return found.get(2, b"").rstrip(b"\0") or _PLAIN_NAMES.get(found.get(1, b""), b"?")


def userdata(comment: bytes, kind: int = ELEMENT_USERDATA) -> bytes:
    """Return a comment as nft's own type-length-value (libnftnl udata, type 0)."""
    if not comment:
        return b""
    return attr(kind, bytes((0, len(comment) + 1)) + comment + b"\0")


def comment_of(userdata: bytes) -> bytes:
    """Return the comment in user data; b"" where there is none."""
    if len(userdata) < 3 or userdata[0] != 0:
        return b""
    return userdata[2 : 1 + userdata[1]]


def elements(kind: int, family: Family, name: str, items: Sequence[bytes]) -> Request:
    """Return a request that adds or deletes elements; at most `room` of them."""
    head = text(1, TABLE) + text(2, name)
    flags = NLM_F_CREATE if kind == NEWSETELEM else 0
    return request(kind, family, head, attr(_ELEMENTS | NLA_F_NESTED, b"".join(items)), flags=flags)


def room(items: Sequence[bytes]) -> int:
    """How many elements fit into a request: an attribute's length has 16 bits."""
    return max(1, _CHUNK // max(map(len, items)))


def element_at(request: Request, offset: int) -> int:
    """Which element of a request is at an offset of its message; -1 for none."""
    at = HEADER.size + _NFGENMSG.size
    for kind, value in iter_attributes(request.payload, _NFGENMSG.size):
        at += 4
        if kind == _ELEMENTS:
            for number, (_, content) in enumerate(iter_attributes(value)):
                if at == offset:
                    return number
                at += (len(content) + 7) & ~3
        at += (len(value) + 3) & ~3
    return -1


def element_lists(payload: bytes) -> Iterator[bytes]:
    """Take a GETSETELEM answer apart: the content of each element."""
    for kind, value in iter_attributes(payload, 4):
        if kind == _ELEMENTS:
            yield from _contents(value)


def _contents(data: bytes) -> Iterator[bytes]:
    """What is in attributes of one kind: iter_attributes at two thirds of the cost."""
    at, end = 0, len(data)
    while at < end:
        (size,) = _LENGTH.unpack_from(data, at)
        if size < 4:  # malformed
            return
        yield data[at + 4 : at + size]
        at += (size + 3) & ~3


# -- chains, sets, rules ---------------------------------------------------------------------


def new_chain(family: Family, name: str) -> Request:
    """Add a chain."""
    return request(NEWCHAIN, family, text(1, TABLE), text(3, name), flags=NLM_F_CREATE)


CHAIN_POLICY = 5
CHAIN_HOOK = (4, CHAIN_POLICY, 7, 10)
"""Attributes of a chain: hook and priority, policy, type, flags."""
ACCEPT = (1).to_bytes(4, "big")
"""As the policy of a chain of a hook."""


def new_base_chain(family: Family, name: str, kind: str, hook: int, priority: int) -> Request:
    """Add a chain that a hook of netfilter's calls; what it does not match passes.

    Args:
        family: whose table.
        name: of the chain.
        kind: `filter` or `nat`.
        hook: number of the hook, as in linux/netfilter.h (NF_INET_...).
        priority: among the chains of that hook; lower ones come first.
    """
    where = nested(4, be32(1, hook), attr(2, struct.pack(">i", priority)))
    what = (text(1, TABLE), text(3, name), where, attr(CHAIN_POLICY, ACCEPT), text(7, kind))
    return request(NEWCHAIN, family, *what, flags=NLM_F_CREATE)


def delete_chain(family: Family, name: str) -> Request:
    """Delete an empty chain."""
    return request(DELCHAIN, family, text(1, TABLE), text(3, name))


def flush_chain(family: Family, name: str) -> Request:
    """Delete all rules of a chain."""
    return request(DELRULE, family, text(1, TABLE), text(2, name))


def flush_set(family: Family, name: str) -> Request:
    """Delete all elements of a set or map."""
    return request(DELSETELEM, family, text(1, TABLE), text(2, name))


def delete_set(family: Family, name: str) -> Request:
    """Delete a set or map that no rule uses."""
    return request(DELSET, family, text(1, TABLE), text(2, name))


def delete_table(family: Family) -> Request:
    """Delete our table with all that is in it."""
    return request(DELTABLE, family, text(1, TABLE))


def new_rule(family: Family, chain: str, *expressions: bytes, comment: str = "") -> Request:
    """Append a rule."""
    return request(
        NEWRULE,
        family,
        text(1, TABLE),
        text(2, chain),
        nested(4, *expressions),
        userdata(comment.encode(), kind=7),
        flags=NLM_F_CREATE | NLM_F_APPEND,
    )


_IPV4_ADDR, _IPV6_ADDR, _INET_SERVICE = 7, 8, 13  # nft's own numbers of its data types
_SET_MAP, _SET_TIMEOUT, _SET_EVAL, _SET_CONCAT = 0x8, 0x10, 0x20, 0x80


def new_members(family: Family, name: str) -> Request:
    """Add a set of endpoints (address . port), each of which counts how often it is found."""
    key_type, size = _endpoint_type(family)
    fields = (be32(4, key_type), be32(5, size), nested(17, text(1, "counter"), nested(2)))
    return _new_set(family, name, 0, fields)


def new_memory(family: Family, name: str) -> Request:
    """Add a map from clients to endpoints that the data path fills, with a timeout for each."""
    data_type, size = _endpoint_type(family)
    address = _IPV4_ADDR if family is Family.IPV4 else _IPV6_ADDR
    fields = (be32(4, address), be32(5, family.bits // 8), be32(6, data_type), be32(7, size))
    limit = nested(9, be32(1, _CLIENTS))
    return _new_set(family, name, _SET_MAP | _SET_TIMEOUT | _SET_EVAL, (*fields, limit))


_CLIENTS = 262_144
"""Clients that one ServicePort remembers; the kernel only takes the memory that is used."""


def _endpoint_type(family: Family) -> tuple[int, int]:
    address = _IPV4_ADDR if family is Family.IPV4 else _IPV6_ADDR
    return address << 6 | _INET_SERVICE, family.bits // 8 + 4


def _new_set(family: Family, name: str, flags: int, fields: Iterable[bytes]) -> Request:
    return request(
        NEWSET,
        family,
        text(1, TABLE),
        text(2, name),
        be32(3, flags),
        *fields,
        be32(10, 1),  # an id is asked for; names serve
        flags=NLM_F_CREATE,
    )
