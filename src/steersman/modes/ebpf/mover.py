"""Move connections that wait for an endpoint to another one.

A client outside sends its SYN to the Service again, so it is enough to delete the flow. A socket
of this node or of a pod sends it to the endpoint that was chosen when it connected, and cannot be
changed. But its packets can: they get a flow as if the endpoint were a Service, whose only
endpoint is another one.

    ingress  client -> endpoint        TO_ENDPOINT    destination := the other one
    egress   the other one -> client   FROM_SERVICE   source := the endpoint

The node's own packets have TO_ENDPOINT at egress, and FROM_SERVICE at ingress. Loopback has no
programs, so a socket of the node that connects to the node itself is destroyed instead: its owner
gets ECONNABORTED.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from steersman.host.netlink import Netlink
from steersman.model.failover import Backend
from steersman.model.names import Family, Protocol
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

_SO_NETNS_COOKIE = 71
_TCP = Protocol.TCP.number
_ONLY = layout.number_key(0)
_TRIES = 16
_NODE, _POD, _OTHERS = 1, 0, 2  # enum source_class
_ACTION_BITS = 4
_OVER = (CLOSING, RESET, REFUSED)
_DETECTORS = layout.CONFIG_DETECTOR_CIDR | layout.CONFIG_DETECTOR_DEVICE
_MAPS = (
    *("flows", "frontends", "services", "slots", "members", "config", "marks", "affinities"),
    *("seats", "crowded", "reverses"),
)


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
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                cookie = sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
            move = _Move(maps, netlink, int.from_bytes(cookie, layout.BYTE_ORDER), doomed)
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


def _packed(backend: Backend) -> bytes:
    return layout.pack_address(backend.ip) + backend.port.to_bytes(2, "big")


class _Move:
    """Moves sockets of one network namespace."""

    def __init__(
        self, maps: Mapping[str, int], netlink: Netlink, netns: int, doomed: Collection[bytes]
    ) -> None:
        self._maps = {name: HashMap(fd) for name, fd in maps.items() if name != "marks"}
        self._presence = PresenceFilter(maps["marks"])
        self._netlink = netlink
        self._netns = netns
        self._doomed = doomed
        config = layout.CONFIG.unpack(self._maps["config"].get(_ONLY) or bytes(layout.CONFIG.size))
        self._own = netns == config[0]
        self._class = _NODE if self._own else _POD if config[3] & _DETECTORS else _OTHERS

    def socket(self, sock: Socket, peer: Peer) -> bytes:
        """Move a socket, or destroy it if its packets pass no device.

        Returns:
            The packed endpoint that it connects to from now on; b"" if it stays as it is.
        """
        client, dead = sock.own, peer.endpoint
        if layout.address_of(client) == layout.address_of(dead):
            return dead if destroy_one(self._netlink, sock, _TCP) else b""
        there, back = (EGRESS, INGRESS) if self._own else (INGRESS, EGRESS)
        flows = self._maps["flows"]
        for service, session, end in self._candidates(peer.frontend):
            answers = layout.flow_key(end, client, _TCP, back)
            other = flows.get(answers)
            # The client may have a connection from this port to that endpoint, too.
            taken = other is not None and layout.flow_state(other) not in _OVER
            if end in self._doomed or taken or exists(self._netlink, client, end):
                continue
            waiting = layout.flow_key(client, dead, _TCP, there)
            self._presence.note((layout.address_of(client), key) for key in (answers, waiting))
            self._put(answers, dead, FROM_SERVICE, service)
            self._put(waiting, end, TO_ENDPOINT, service)
            if session:
                address, port = layout.address_of(end), end[layout.ADDRESS_SIZE :]
                value = layout.AFFINITY.pack(address, time.monotonic_ns(), port)
                self._maps["affinities"].put(session, value)
            return end
        return b""

    def _put(self, key: bytes, end: bytes, kind: int, service: int) -> None:
        address, port = layout.address_of(end), end[layout.ADDRESS_SIZE :]
        value = layout.FLOW.pack(address, time.monotonic_ns(), port, kind, OPENING, service)
        self._maps["flows"].put(key, value)

    def _candidates(self, frontend: bytes) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield endpoints of the Service that a socket has connected to, as c/balance.h chooses.

        Each comes with the number of the ServicePort, and the key of the client's session; b"" if
        it has no affinity.
        """
        address, port = layout.split_endpoint(frontend)
        family = Family.IPV4 if layout.is_ipv4(address) else Family.IPV6
        for at in (address, layout.UNSPECIFIED[family]):
            key = layout.FRONTEND_KEY.pack(at, port, _TCP)
            if value := self._maps["frontends"].get(key):
                break
        else:
            return
        service, actions, _ = layout.FRONTEND.unpack(value)
        record = self._maps["services"].get(layout.number_key(service))
        *pools, seconds, _ = layout.SERVICE.unpack(record or bytes(layout.SERVICE.size))
        local = bool(actions >> _ACTION_BITS * self._class & layout.ACTION_LOCAL)
        base, count = pools[2 * local : 2 * local + 2]
        session = layout.AFFINITY_KEY.pack(layout.netns_client(self._netns), service)
        if not seconds:
            session = b""
        elif known := self._maps["affinities"].get(session):
            own, _, own_port = layout.AFFINITY.unpack(known)
            member = layout.MEMBER_KEY.pack(service, own + own_port)
            in_pools = layout.read_number(self._maps["members"].get(member) or bytes(4))
            if in_pools & 1 << local:
                yield service, session, own + own_port
        for place in random.sample(range(count), min(count, _TRIES)):
            slot = self._maps["slots"].get(layout.number_key(base + place))
            yield service, session, layout.SLOT.unpack(slot or bytes(layout.SLOT.size))[0]
