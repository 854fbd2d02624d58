"""What programs know of sockets: where each believes to be talking to, and where it is.

Connected sockets are in `seats` or `crowded` (c/peers.h). Those of UDP, connected or not, are in
`reverses` by their endpoint, too, until others drive them out of there (LRU).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from steersman.model.conntrack import Stale
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.flows import UDP, plain
from steersman.modes.ebpf.maps import ArrayMap, HashMap


class Peer(NamedTuple):
    """A socket's."""

    cookie: int
    frontend: bytes
    """Packed address and port, as everywhere here."""
    endpoint: bytes


def known(maps: Mapping[str, int]) -> Iterator[Peer]:
    """All of them, some twice; of connected sockets those of TCP as well.

    Args:
        maps: descriptors by name; they stay with their owner.
    """
    for key, value in HashMap(maps["reverses"]).items():
        cookie, endpoint = layout.REVERSE_KEY.unpack(key)
        (frontend,) = layout.REVERSE.unpack(value)
        yield Peer(cookie, frontend, endpoint)
    for key, value in HashMap(maps["crowded"]).items():
        endpoint, frontend, *ports = layout.PEER.unpack(value)
        cookie = int.from_bytes(key, layout.BYTE_ORDER)
        yield Peer(cookie, frontend + ports[1], endpoint + ports[0])
    for seat in layout.SEAT.iter_unpack(ArrayMap(maps["seats"]).whole()):
        cookie, endpoint, frontend, *ports = seat
        if cookie:
            yield Peer(cookie, frontend + ports[1], endpoint + ports[0])


def stale_sockets(peers: Iterable[Peer], stale: Stale) -> Iterator[Peer]:
    """Return the sockets of UDP whose endpoint is gone."""
    if UDP not in stale.protocols:
        return
    for peer in peers:
        if stale.contains(bytes((UDP,)) + plain(peer.frontend), plain(peer.endpoint)):
            yield peer
