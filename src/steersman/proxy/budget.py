"""The file descriptors that connections may take, and which connection yields if none are left.

While descriptors are free, every request is granted. If they run out, the rule is max-min fairness,
first between ServicePorts and then between the clients of one ServicePort:

1. If another ServicePort has more than the newcomer's would have, the one with the most is evicted
   from.
2. Otherwise, if another client of the newcomer's ServicePort has more than the newcomer would have,
   the client with the most is evicted from.
3. Otherwise the oldest UDP session that is not assured yields to a new one.
4. Otherwise the newcomer is refused.

The evicted connection is the one that was idle for longest; within a ServicePort, one of the client
that has the most. UDP sessions have a limit of their own below the limit for all descriptors, and
a limit for each client of a ServicePort. The same rule applies to both.

A UDP session is assured once it was used in both directions (conntrack has the same term).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address
from typing import Generic, TypeVar

from steersman.model.addresses import canonical_ip
from steersman.model.names import PlanKey, Protocol

K = TypeVar("K")
MAX_SESSIONS = 65_536
"""Limit of UDP sessions (about 2 KiB each); half of the descriptors if that is less."""
_DIAL_FRACTION = 8  # a client that waits for an endpoint has two descriptors: a quarter of them all
_CLIENT_FRACTION = 4  # of the UDP sessions, for one client of a ServicePort
_CLIENT_PREFIX = 64  # bits of an IPv6 address: a host can usually use its whole /64


class Reservation:
    """Descriptors of one connection or UDP session."""

    __slots__ = ("client", "count", "evict", "owner", "released")

    def __init__(self, owner: PlanKey, client: str, count: int) -> None:
        self.owner = owner
        self.client = client
        self.count = count
        self.evict: Callable[[], object] = lambda: None
        """Closes the connection. The budget calls it after it has released the descriptors."""
        self.released = False


class Ranking(Generic[K]):
    """Counts by key, with the highest count in O(1); of equal counts the least recently used."""

    def __init__(self) -> None:
        self._counts: dict[K, int] = {}
        self._levels: dict[int, OrderedDict[K, None]] = {}
        """Keys by count, least recently used first."""
        self._highest = 0

    def __getitem__(self, key: K | None) -> int:
        """Return the count of a key, 0 for an unknown one."""
        return self._counts.get(key, 0) if key is not None else 0

    def add(self, key: K, count: int) -> None:
        """Add to the count of a key and mark it as used."""
        counts, levels = self._counts, self._levels
        before = counts.get(key, 0)
        after = before + count
        if before:
            level = levels[before]
            del level[key]
            if not level:
                del levels[before]
        if after:
            counts[key] = after
            found = levels.get(after)
            if found is None:
                found = levels[after] = OrderedDict()
            found[key] = None
            self._highest = max(self._highest, after)
        else:
            counts.pop(key, None)
        # Counts change by a few at a time, so the next level is near.
        while self._highest and self._highest not in levels:
            self._highest -= 1

    def touch(self, key: K) -> None:
        """Mark a key as used."""
        self._levels[self._counts[key]].move_to_end(key)

    def first(self) -> K | None:
        """Return the key with the highest count, None if there are no keys."""
        return next(iter(self._levels[self._highest])) if self._highest else None


class _Share:
    """The reservations of one ServicePort, by client."""

    def __init__(self) -> None:
        self.clients: Ranking[str] = Ranking()
        self.reservations: dict[str, OrderedDict[Reservation, None]] = {}
        """Least recently used first."""
        self.unassured: OrderedDict[Reservation, None] = OrderedDict()
        """UDP sessions that were not used in both directions."""

    def victim_for(self, client: str, count: int) -> Reservation | None:
        """Choose for a newcomer of this ServicePort (rules 2 and 3)."""
        first = self.clients.first()
        if first is not None and self.clients[first] > self.clients[client] + count:
            return next(iter(self.reservations[first]))
        return next(iter(self.unassured), None)

    def victim_of_largest(self) -> Reservation:
        """Choose for a newcomer of another ServicePort (rule 1)."""
        first = self.clients.first()
        assert first is not None
        # If it has only one connection, an unassured session goes first.
        if len(self.reservations[first]) == 1 and self.unassured:
            return next(iter(self.unassured))
        return next(iter(self.reservations[first]))


class DescriptorBudget:
    """Counts descriptors, grants reservations and evicts connections."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Descriptors in all; see `sockets.descriptor_limit`."""
        self.used = 0
        self.refused = 0
        """Connections and datagrams that were refused."""
        self.evicted = 0
        """Connections and sessions that were closed for a newcomer."""
        self.sessions = 0
        """UDP sessions now."""
        self.max_sessions = max(min(limit // 2, MAX_SESSIONS), 1)
        self._shares: dict[PlanKey, _Share] = {}
        self._services: dict[bool, Ranking[PlanKey]] = {True: Ranking(), False: Ranking()}
        """ServicePorts by their descriptors; True for UDP."""

    @property
    def dial_limit(self) -> int:
        """Clients of one ServicePort that may wait for endpoints at a time.

        Each takes two descriptors for seconds. So a ServicePort with silent endpoints leaves three
        quarters of the descriptors to the others.
        """
        return max(self.limit // _DIAL_FRACTION, 1)

    @property
    def is_scarce(self) -> bool:
        """Whether more than half is taken, so that idle sessions should end soon."""
        return self.used * 2 > self.limit or self.sessions * 2 > self.max_sessions

    def has_free(self, count: int) -> bool:
        """Whether so many descriptors are free, without an eviction."""
        return self.used + count <= self.limit

    def reserve(self, owner: PlanKey, address: str, count: int) -> Reservation | None:
        """Reserve descriptors for a client's new connection; None if it is refused."""
        reservation = Reservation(owner, client_of(address), count)
        is_udp = owner.name.protocol is Protocol.UDP
        while not self.has_free(count) or (
            is_udp and (self.sessions >= self.max_sessions or self._is_full(reservation))
        ):
            victim = self._victim(reservation, is_udp)
            if victim is None:
                self.refused += 1
                return None
            self.evicted += 1
            self.release(victim)
            victim.evict()
        share = self._shares.get(owner)
        if share is None:
            share = self._shares[owner] = _Share()
        of_client = share.reservations.get(reservation.client)
        if of_client is None:
            of_client = share.reservations[reservation.client] = OrderedDict()
        of_client[reservation] = None
        if is_udp:
            share.unassured[reservation] = None
            self.sessions += 1
        self._add(reservation, count)
        return reservation

    def _is_full(self, newcomer: Reservation) -> bool:
        """Whether the client has its limit of UDP sessions of the ServicePort."""
        share = self._shares.get(newcomer.owner)
        limit = max(self.max_sessions // _CLIENT_FRACTION, 1)
        return share is not None and share.clients[newcomer.client] >= limit

    def _victim(self, newcomer: Reservation, is_udp: bool) -> Reservation | None:
        """Choose the reservation to evict (see the rules at the top); None to refuse."""
        # A client that is at its own limit evicts its own session.
        share = self._shares.get(newcomer.owner)
        if is_udp and share is not None and self._is_full(newcomer):
            return next(iter(share.reservations[newcomer.client]))
        # If sessions have run out and not descriptors, evicting a TCP connection would not help.
        kinds = (True,) if is_udp and self.sessions >= self.max_sessions else (True, False)
        rankings = [self._services[kind] for kind in kinds]
        ranking = max(rankings, key=lambda ranking: ranking[ranking.first()])
        # Rule 1: another ServicePort has more.
        first = ranking.first()
        mine = self._services[is_udp][newcomer.owner]
        if first not in (None, newcomer.owner) and ranking[first] > mine + newcomer.count:
            assert first is not None
            return self._shares[first].victim_of_largest()
        # Rules 2 to 4: within the newcomer's ServicePort.
        return share.victim_for(newcomer.client, newcomer.count) if share is not None else None

    def grow(self, reservation: Reservation, count: int) -> bool:
        """Reserve more for a connection; False if that would take an eviction."""
        if reservation.released or not self.has_free(count):
            return False
        reservation.count += count
        self._add(reservation, count)
        return True

    def shrink(self, reservation: Reservation, count: int) -> None:
        """Return descriptors that `grow` has reserved."""
        if not reservation.released:
            reservation.count -= count
            self._add(reservation, -count)

    def touch(self, reservation: Reservation) -> None:
        """Mark a connection as used now."""
        if not reservation.released:
            share = self._shares[reservation.owner]
            share.reservations[reservation.client].move_to_end(reservation)
            share.clients.touch(reservation.client)
            if reservation in share.unassured:
                share.unassured.move_to_end(reservation)

    def mark_assured(self, reservation: Reservation) -> None:
        """Note that a UDP session was used in both directions."""
        if not reservation.released:
            self._shares[reservation.owner].unassured.pop(reservation, None)

    def release(self, reservation: Reservation) -> None:
        """Return all descriptors of a connection. Idempotent."""
        if reservation.released:
            return
        reservation.released = True
        share = self._shares[reservation.owner]
        of_client = share.reservations[reservation.client]
        del of_client[reservation]
        if not of_client:
            del share.reservations[reservation.client]
        share.unassured.pop(reservation, None)
        self.sessions -= reservation.owner.name.protocol is Protocol.UDP
        self._add(reservation, -reservation.count)
        if not share.reservations:
            del self._shares[reservation.owner]

    def _add(self, reservation: Reservation, count: int) -> None:
        self.used += count
        self._shares[reservation.owner].clients.add(reservation.client, count)
        is_udp = reservation.owner.name.protocol is Protocol.UDP
        self._services[is_udp].add(reservation.owner, count)


def client_of(address: str) -> str:
    """Return the identity of a client: an IPv4 address, or the /64 of an IPv6 address."""
    address = canonical_ip(address.partition("%")[0]) or address
    if ":" not in address:
        return address
    host = 128 - _CLIENT_PREFIX
    return str(IPv6Address(int(IPv6Address(address)) >> host << host))
