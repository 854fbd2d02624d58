"""nf_tables over netlink: messages for our elements, and for sets of ServicePorts. Pure.

Keys and values of elements are as the data path has them in its registers. 100,000 elements pass
here at a start, so they are laid out by hand, at a tenth of the cost of nlmsg.nested (a test
compares the two):

    offset in an element's content   0     4          8     8 + size of key   + 8
                                     nest  attribute  key   nest, attribute   data (maps only)

Comments and names of chains vary in length; all else of one set has the same size.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter

from steersman.host.nlmsg import (
    HEADER,
    NLA_F_NESTED,
    NLM_F_CREATE,
    Request,
    attr,
    attributes,
    be32,
    iter_attributes,
    nested,
    text,
)
from steersman.model.names import Family
from steersman.modes.nftables.layout import DROP, REJECT, TABLE, Form, interval_end
from steersman.netfilter.nft import wire as nft

OURS = {family: nft.Table(nft.NFPROTO[family], TABLE) for family in Family}
"""Our tables."""
_LENGTH = struct.Struct("=H")
_ATTRIBUTE = struct.Struct("=HH")
_ELEMENTS = 3  # NFTA_SET_ELEM_LIST_ELEMENTS
_LIST_ELEM = 1  # NFTA_LIST_ELEM
_VALUE = 1  # NFTA_DATA_VALUE
_CHUNK = 60_000  # bytes of elements in a message: an attribute's length has 16 bits

_KEY_AT = 8  # offset of the key in an element's content
ELEMENT_KEY, ELEMENT_DATA, ELEMENT_USERDATA, ELEMENT_KEY_END = 1, 2, 6, 10  # NFTA_SET_ELEM_...
_DATA_VERDICT = 2  # NFTA_DATA_VERDICT
_VERDICT_CODE, _VERDICT_CHAIN = 1, 2  # NFTA_VERDICT_...
_GOTO = struct.pack(">i", -4)


_PLAIN = {DROP: struct.pack(">i", 0), REJECT: struct.pack(">i", -1)}
_PLAIN_NAMES = {code: name for name, code in _PLAIN.items()}


def verdict(word: bytes) -> bytes:
    """Return the data of an element with a verdict: goto a chain, DROP or REJECT."""
    if word in _PLAIN:
        return nested(ELEMENT_DATA, nested(_DATA_VERDICT, attr(_VERDICT_CODE, _PLAIN[word])))
    goto = (attr(_VERDICT_CODE, _GOTO), attr(_VERDICT_CHAIN, word + b"\0"))
    return nested(ELEMENT_DATA, nested(_DATA_VERDICT, *goto))


@lru_cache(maxsize=1024)
def _verdict_word(data: bytes) -> bytes:
    """Return the chain, DROP or REJECT in the data of an element; the inverse of `verdict`."""
    found = attributes(attributes(data).get(_DATA_VERDICT, b""))
    chain = found.get(_VERDICT_CHAIN, b"").rstrip(b"\0")
    return chain or _PLAIN_NAMES.get(found.get(_VERDICT_CODE, b""), b"?")


def elements(kind: int, family: Family, name: str, items: Sequence[bytes]) -> Request:
    """Return a request that adds or deletes elements; at most `room` of them."""
    listed = attr(_ELEMENTS | NLA_F_NESTED, b"".join(items))
    flags = NLM_F_CREATE if kind == nft.NEWSETELEM else 0
    return nft.about(OURS[family], kind, text(nft.SET_NAME, name), listed, flags=flags)


def room(items: Sequence[bytes]) -> int:
    """Return how many of these elements fit into one request."""
    return max(1, _CHUNK // max(map(len, items)))


def element_at(request: Request, offset: int) -> int:
    """Return the index of the element at an offset of a request's message; -1 for none."""
    at = HEADER.size + nft.HEAD.size
    for kind, value in iter_attributes(request.payload, nft.HEAD.size):
        at += 4  # the header of the attribute
        if kind == _ELEMENTS:
            for number, (_, content) in enumerate(iter_attributes(value)):
                if at == offset:
                    return number
                at += (len(content) + 7) & ~3  # with its header, padded to four bytes
        at += (len(value) + 3) & ~3
    return -1


def element_contents(payload: bytes) -> Iterator[bytes]:
    """Yield the content of each element in a GETSETELEM answer.

    The loop works like iter_attributes, at two thirds of the cost.
    """
    for kind, data in iter_attributes(payload, nft.HEAD.size):
        at, end = 0, len(data) if kind == _ELEMENTS else 0
        while at < end:
            (size,) = _LENGTH.unpack_from(data, at)
            if size < 4:  # malformed
                break
            yield data[at + 4 : at + size]
            at += (size + 3) & ~3


def key_getter(size: int) -> Callable[[bytes], bytes]:
    """Return a function from an element's content to its key, of so many bytes."""
    return itemgetter(slice(_KEY_AT, _KEY_AT + size))


def data_getter(key_size: int, size: int) -> Callable[[bytes], bytes]:
    """Return a function from an element's content to its data, of so many bytes."""
    start = behind_key(key_size) + _KEY_AT
    return itemgetter(slice(start, start + size))


def value_getter(form: Form, key_size: int, width: int) -> Callable[[bytes], bytes]:
    """Return a function from an element's content to its value in the Ruleset.

    Args:
        form: form of the set.
        key_size: size of its keys, in bytes.
        width: size of an address, in bytes.
    """
    behind = behind_key(key_size)

    def comment(content: bytes) -> bytes:
        if len(content) <= behind:
            return b""
        return nft.comment_of(attributes(content, behind).get(ELEMENT_USERDATA, b""))

    def verdict_and_comment(content: bytes) -> bytes:
        found = attributes(content, behind)
        word = _verdict_word(found.get(ELEMENT_DATA, b""))
        return word + b"\0" + nft.comment_of(found.get(ELEMENT_USERDATA, b""))

    def interval_end(content: bytes) -> bytes:
        return attributes(content, behind).get(ELEMENT_KEY_END, b"")[-width:]

    match form:
        case Form.ENDPOINTS:
            return data_getter(key_size, width + 4)
        case Form.VERDICTS:
            return verdict_and_comment
        case Form.INTERVALS:
            return interval_end
        case _:
            return comment


def behind_key(key_size: int) -> int:
    """Return the offset of the attributes behind the key in an element's content."""
    return _KEY_AT + key_size


def encode(form: Form, pairs: Sequence[tuple[bytes, bytes]], *, keys_only: bool) -> list[bytes]:
    """Return elements of one set as attributes.

    Args:
        form: form of the set.
        pairs: keys as netfilter has them, all of one length, and values as the Ruleset has them.
        keys_only: True for a request that deletes or reads elements.
    """
    size = len(pairs[0][0])
    match form:
        case Form.INTERVALS:  # few, and both ends are in the request even to delete one
            return [
                nested(
                    _LIST_ELEM,
                    nested(ELEMENT_KEY, attr(_VALUE, key)),
                    nested(ELEMENT_KEY_END, attr(_VALUE, interval_end(key, value))),
                )
                for key, value in pairs
            ]
        case _ if keys_only:
            head = _element_head(size, 0)
            return [head + key for key, _ in pairs]
        case Form.ENDPOINTS:  # most elements: all heads are equal
            data = len(pairs[0][1])
            head = _element_head(size, data + 8)
            middle = _ATTRIBUTE.pack(data + 8, ELEMENT_DATA | NLA_F_NESTED)
            middle += _ATTRIBUTE.pack(data + 4, _VALUE)
            return [head + key + middle + value for key, value in pairs]
        case Form.VERDICTS:  # few chains, many comments
            items, chains = [], dict[bytes, bytes]()
            for key, value in pairs:
                chain, _, comment = value.partition(b"\0")
                rest = chains.get(chain)
                if rest is None:
                    rest = chains[chain] = verdict(chain)
                if comment:
                    before, behind = _around_comment(len(comment))
                    rest = rest + before + comment + behind
                items.append(_element_head(size, len(rest)) + key + rest)
            return items
        case _:
            rests = ((key, nft.userdata(comment, ELEMENT_USERDATA)) for key, comment in pairs)
            return [_element_head(size, len(rest)) + key + rest for key, rest in rests]


@lru_cache(maxsize=1024)
def _element_head(key: int, rest: int) -> bytes:
    """Return everything before the key, given the sizes of the key and of the rest."""
    return (
        _ATTRIBUTE.pack(12 + key + rest, _LIST_ELEM | NLA_F_NESTED)
        + _ATTRIBUTE.pack(8 + key, ELEMENT_KEY | NLA_F_NESTED)
        + _ATTRIBUTE.pack(4 + key, _VALUE)
    )


@lru_cache(maxsize=1024)
def _around_comment(size: int) -> tuple[bytes, bytes]:
    """Return the bytes that `userdata` puts before and behind a comment of a size above 0."""
    whole = nft.userdata(bytes(size), ELEMENT_USERDATA)
    return whole[:6], whole[6 + size :]


# Sets of a ServicePort

_IPV4_ADDR, _IPV6_ADDR, _INET_SERVICE = 7, 8, 13  # nft's own numbers of its data types
_CLIENTS = 262_144  # entries of one affinity map at most; the kernel allocates them as needed
_SET_MAP, _SET_TIMEOUT, _SET_EVAL = 0x8, 0x10, 0x20
# NFTA_SET_...: 3 flags, 4 and 5 type and size of the key, 6 and 7 of the data, 9 limit, 10 id, 17
# expressions of each element.


def new_members_set(family: Family, name: str) -> Request:
    """Add a set of endpoints (address . port) that counts how often each is found."""
    key_type, size = _endpoint_type(family)
    fields = (be32(4, key_type), be32(5, size), nested(17, text(1, "counter"), nested(2)))
    return _new_set(family, name, 0, fields)


def new_affinity_map(family: Family, name: str) -> Request:
    """Add a map from clients to endpoints that the data path fills, with a timeout each."""
    data_type, size = _endpoint_type(family)
    address = _IPV4_ADDR if family is Family.IPV4 else _IPV6_ADDR
    fields = (be32(4, address), be32(5, family.bits // 8), be32(6, data_type), be32(7, size))
    limit = nested(9, be32(1, _CLIENTS))
    return _new_set(family, name, _SET_MAP | _SET_TIMEOUT | _SET_EVAL, (*fields, limit))


def _endpoint_type(family: Family) -> tuple[int, int]:
    """Return nft's type of an address and a port, six bits each, and its size in bytes."""
    address = _IPV4_ADDR if family is Family.IPV4 else _IPV6_ADDR
    return address << 6 | _INET_SERVICE, family.bits // 8 + 4


def _new_set(family: Family, name: str, flags: int, fields: Iterable[bytes]) -> Request:
    what = text(nft.SET_NAME, name), be32(3, flags), *fields
    # An id is mandatory, but names refer to the set.
    return nft.about(OURS[family], nft.NEWSET, *what, be32(10, 1), flags=NLM_F_CREATE)


def flush_set(family: Family, name: str) -> Request:
    """Delete all elements of a set or map."""
    return nft.about(OURS[family], nft.DELSETELEM, text(nft.SET_NAME, name))


def delete_set(family: Family, name: str) -> Request:
    """Delete a set or map that no rule uses."""
    return nft.about(OURS[family], nft.DELSET, text(nft.SET_NAME, name))
