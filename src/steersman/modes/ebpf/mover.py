"""Move connections that wait for an endpoint to another one.

A client outside sends its SYN to the Service again, so it is enough to delete the flow. A socket
of this node or of a pod sends it to the endpoint that was chosen when it connected, and cannot be
changed. But its packets can: they get a flow as if the endpoint were a Service, whose only
endpoint is another one.

    ingress  client -> endpoint        TO_ENDPOINT    destination := the other one
    egress   the other one -> client   FROM_SERVICE   source := the endpoint

The node's own packets have TO_ENDPOINT at egress, and FROM_SERVICE at ingress. Loopback has no
programs, so a socket of the node that connects to the node itself is destroyed instead: its owner
gets ECONNABORTED. So is one whose client uses the same port at every other endpoint.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from steersman.host.netlink import Netlink
from steersman.model.failover import Backend
from steersman.model.names import Protocol
from steersman.model.plan import SourceClass
from steersman.modes.ebpf import layout
from steersman.modes.ebpf.bpf import HashMap, Object
from steersman.modes.ebpf.flows import (
    CLOSING,
    EGRESS,
    FROM_SERVICE,
    INGRESS,
    OPENING,
    REFUSED,
    RESET,
    TO_ENDPOINT,
    delete_unanswered,
)
from steersman.modes.ebpf.lookup import MAPS, Lookup
from steersman.modes.ebpf.netns import netns_cookie
from steersman.modes.ebpf.presence import PresenceFilter
from steersman.modes.ebpf.sockets import (
    Peer,
    Socket,
    connecting,
    destroy_one,
    exists,
    in_all_namespaces,
    read_peers,
)

_TCP = Protocol.TCP.number
_TRIES = 16
_OVER = (CLOSING, RESET, REFUSED)
_MAPS = {*MAPS, "flows", "marks", "seats", "crowded", "reverses"}


class Mover:
    """Moves connections that have no answer yet to other endpoints."""

    def __init__(self, maps: Path) -> None:
        """Open nothing yet.

        Args:
            maps: directory of the mode's pinned maps.
        """
        self._directory = maps
        self._moved: dict[int, bytes] = {}
        """Where sockets that still wait were moved to, by cookie."""

    def cut(self, backends: Collection[Backend]) -> int:
        """Move what waits for these endpoints; return the number of connections. It blocks.

        Raises:
            OSError: the maps are gone.
        """
        doomed = {(each.protocol.number, _packed(each)) for each in backends}
        pinned = {name: Object.pinned(self._directory / name) for name in _MAPS}
        try:
            maps = {name: each.fd for name, each in pinned.items()}
            cut = delete_unanswered(HashMap(maps["flows"]), doomed).connections
            return cut + self._move_sockets(maps, {end for number, end in doomed if number == _TCP})
        finally:
            for each in pinned.values():
                each.close()

    def _move_sockets(self, maps: Mapping[str, int], doomed: Collection[bytes]) -> int:
        wanted = {
            peer.cookie: peer
            for peer in read_peers(maps)
            if self._moved.get(peer.cookie, peer.endpoint) in doomed
        }
        if not wanted:
            return 0
        seen: dict[int, bytes] = {}

        def visit(netlink: Netlink) -> int:
            move = _Move(maps, netlink, netns_cookie(), doomed)
            moved = 0
            for each in list(connecting(netlink)):
                peer = wanted.get(each.cookie)
                if peer is None or peer.endpoint != each.peer:
                    if each.cookie in self._moved:
                        seen[each.cookie] = self._moved[each.cookie]
                elif to := move.socket(each, peer):
                    seen[each.cookie] = to
                    moved += 1
            return moved

        moved = in_all_namespaces(visit)
        self._moved = seen
        return moved


def _leads_to(flow: bytes, endpoint: bytes) -> bool:
    """Return whether packets of a flow get this address and port."""
    address, _, port, *_ = layout.FLOW.unpack(flow)
    return bool(address + port == endpoint)


def _packed(backend: Backend) -> bytes:
    return layout.pack_address(backend.ip) + backend.port.to_bytes(2, "big")


class _Move:
    """Moves sockets of one network namespace."""

    def __init__(
        self, maps: Mapping[str, int], netlink: Netlink, netns: int, doomed: Collection[bytes]
    ) -> None:
        self._lookup = Lookup(maps)
        self._flows = HashMap(maps["flows"])
        self._presence = PresenceFilter(maps["marks"])
        self._netlink = netlink
        self._client = layout.netns_client(netns)
        self._doomed = doomed
        self._class = self._lookup.class_of_socket(netns)
        self._own = self._class is SourceClass.NODE

    def socket(self, sock: Socket, peer: Peer) -> bytes:
        """Move a socket, or destroy it if it cannot be moved although there are endpoints.

        Returns:
            The packed endpoint that it connects to from now on; b"" if it stays as it is.
        """
        client, dead = sock.own, peer.endpoint
        if layout.address_of(client) == layout.address_of(dead):
            return dead if destroy_one(self._netlink, sock, _TCP) else b""
        there, back = (EGRESS, INGRESS) if self._own else (INGRESS, EGRESS)
        match = self._lookup.find_frontend(_TCP, peer.frontend, own=self._own)
        if match is None:
            return b""
        port_in_use = False
        for service, session, end in self._lookup.candidates(
            match, self._class, self._client, _TRIES
        ):
            if end in self._doomed:
                continue
            answers = layout.flow_key(end, client, _TCP, back)
            other = self._flows.get(answers)
            if other is not None and _leads_to(other, dead):
                return end  # the process before has moved it
            # The client may have a connection from this port to that endpoint, too.
            taken = other is not None and layout.flow_state(other) not in _OVER
            if taken or exists(self._netlink, client, end):
                port_in_use = True
                continue
            waiting = layout.flow_key(client, dead, _TCP, there)
            self._presence.note([layout.address_of(client)])
            self._put(answers, dead, FROM_SERVICE, service)
            self._put(waiting, end, TO_ENDPOINT, service)
            if session:
                address, port = layout.address_of(end), end[layout.ADDRESS_SIZE :]
                value = layout.AFFINITY.pack(address, time.monotonic_ns(), port)
                self._lookup.maps["affinities"].put(session, value)
            return end
        # It would wait until TCP gives up; its owner can connect from another port.
        return dead if port_in_use and destroy_one(self._netlink, sock, _TCP) else b""

    def _put(self, key: bytes, end: bytes, kind: int, service: int) -> None:
        address, port = layout.address_of(end), end[layout.ADDRESS_SIZE :]
        value = layout.FLOW.pack(address, time.monotonic_ns(), port, kind, OPENING, service)
        self._flows.put(key, value)
