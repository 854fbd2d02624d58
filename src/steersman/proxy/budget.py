"""How many descriptors connections may have, and whose gives way when none are left.

As long as there are descriptors, everybody gets what they ask for. When they are short, the rule is
max-min fairness, first between ServicePorts and then between the clients of one:

1. If another ServicePort has more than the newcomer's would have, the one with the most gives way.
2. Otherwise, if another client of the newcomer's ServicePort has more than the newcomer would have,
   the client with the most gives way.
3. Otherwise a UDP session that has not been used both ways gives way to a new one, oldest first.
4. Otherwise the newcomer is refused.

What gives way is the connection that has been silent for longest; of a ServicePort, one of the
client that has the most. UDP sessions have a limit of their own below that of all descriptors, and
one for each client of a ServicePort, to which the same rule applies.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from ipaddress import IPv6Address
from typing import Generic, TypeVar

from steersman.model.addresses import canonical_ip
from steersman.model.names import PlanKey, Protocol

K = TypeVar("K")
_SHARE_OF_DIALS = 8  # a quarter of the descriptors
SESSIONS = 65_536
"""UDP sessions at most, and at most half of the descriptors: about 2 KiB each."""
_SHARE_OF_CLIENT = 4  # of the UDP sessions, for one client of a ServicePort
_CLIENT_PREFIX = 64  # bits of an IPv6 address: whoever has one address has all of them


class Holding:
    """Descriptors of one connection or session."""

    __slots__ = ("client", "count", "give_way", "owner", "released")

    def __init__(self, owner: PlanKey, client: str, count: int) -> None:
        self.owner = owner
        self.client = client
        self.count = count
        self.give_way: Callable[[], object] = lambda: None
        """Closes the connection; called once the descriptors are no longer counted."""
        self.released = False


class Ranking(Generic[K]):
    """Counts, and which key has the highest; of equals, the one not used for longest."""

    def __init__(self) -> None:
        self._counts: dict[K, int] = {}
        self._levels: dict[int, OrderedDict[K, None]] = {}
        self._most = 0

    def __getitem__(self, key: K | None) -> int:
        """Return the count of a key, 0 if it has none."""
        return self._counts.get(key, 0) if key is not None else 0

    def add(self, key: K, count: int) -> None:
        """Add to the count of a key; it counts as used."""
        before = self._counts.pop(key, 0)
        if before:
            level = self._levels[before]
            del level[key]
            if not level:
                del self._levels[before]
        if before + count:
            self._counts[key] = before + count
            self._levels.setdefault(before + count, OrderedDict())[key] = None
        self._most = max(self._most, before + count)
        while self._most and self._most not in self._levels:
            self._most -= 1

    def use(self, key: K) -> None:
        """Note that a key is used."""
        self._levels[self._counts[key]].move_to_end(key)

    def first(self) -> K | None:
        """Return the key with the highest count, None if there are none."""
        return next(iter(self._levels[self._most])) if self._most else None


class _Share:
    """What the clients of one ServicePort hold."""

    def __init__(self) -> None:
        self.clients: Ranking[str] = Ranking()
        self.holdings: dict[str, OrderedDict[Holding, None]] = {}
        self.fresh: OrderedDict[Holding, None] = OrderedDict()
        """UDP sessions that have not been used both ways."""

    def victim(self, client: str, count: int) -> Holding | None:
        """Choose for a newcomer of this ServicePort; None if nobody has to give way."""
        first = self.clients.first()
        if first is not None and self.clients[first] > self.clients[client] + count:
            return next(iter(self.holdings[first]))
        return next(iter(self.fresh), None)

    def largest(self) -> Holding:
        """Choose for another ServicePort's newcomer."""
        first = self.clients.first()
        assert first is not None
        if len(self.holdings[first]) == 1 and self.fresh:
            return next(iter(self.fresh))
        return next(iter(self.holdings[first]))


class Room:
    """Counts descriptors and decides who gets one."""

    def __init__(self, limit: int) -> None:
        """Take the limit; see `descriptor_limit`."""
        self.limit = limit
        self.used = 0
        self.refused = 0
        """Connections and datagrams that there was no room for."""
        self.gave_way = 0
        """Connections and sessions that were closed to make room."""
        self.sessions = 0
        """UDP sessions now."""
        self.most_sessions = max(min(limit // 2, SESSIONS), 1)
        self._shares: dict[PlanKey, _Share] = {}
        self._services: dict[bool, Ranking[PlanKey]] = {True: Ranking(), False: Ranking()}
        """By whether they are of UDP."""

    @property
    def share(self) -> int:
        """How many clients of one ServicePort may wait for endpoints to answer, at a time.

        So that one whose endpoints are silent leaves room for all others: each of its clients
        takes two descriptors for seconds.
        """
        return max(self.limit // _SHARE_OF_DIALS, 1)

    @property
    def is_short(self) -> bool:
        """Whether more than half is taken: nobody may wait for long."""
        return self.used * 2 > self.limit or self.sessions * 2 > self.most_sessions

    def has(self, count: int) -> bool:
        """Whether there is room for some more, with nobody giving way."""
        return self.used + count <= self.limit

    def take(self, owner: PlanKey, address: str, count: int) -> Holding | None:
        """Take descriptors for a new connection of a client; None if it is refused."""
        holding = Holding(owner, client_of(address), count)
        is_udp = owner.name.protocol is Protocol.UDP
        while not self._fits(holding, is_udp):
            victim = self._victim(holding, is_udp)
            if victim is None:
                self.refused += 1
                return None
            self.gave_way += 1
            self.release(victim)
            victim.give_way()
        share = self._shares.setdefault(owner, _Share())
        share.holdings.setdefault(holding.client, OrderedDict())[holding] = None
        if is_udp:
            share.fresh[holding] = None
            self.sessions += 1
        self._add(holding, count)
        return holding

    def _fits(self, holding: Holding, is_udp: bool) -> bool:
        if is_udp and (self.sessions >= self.most_sessions or self._is_full(holding)):
            return False
        return self.has(holding.count)

    def _is_full(self, holding: Holding) -> bool:
        """Whether a client has all the UDP sessions of a ServicePort that it may have."""
        share = self._shares.get(holding.owner)
        most = max(self.most_sessions // _SHARE_OF_CLIENT, 1)
        return share is not None and share.clients[holding.client] >= most

    def _victim(self, newcomer: Holding, is_udp: bool) -> Holding | None:
        share = self._shares.get(newcomer.owner)
        if is_udp and share is not None and self._is_full(newcomer):
            return next(iter(share.holdings[newcomer.client]))
        kinds = (True,) if is_udp and self.sessions >= self.most_sessions else (True, False)
        rankings = [self._services[kind] for kind in kinds]
        ranking = max(rankings, key=lambda ranking: ranking[ranking.first()])
        first = ranking.first()
        mine = self._services[is_udp][newcomer.owner]
        if first not in (None, newcomer.owner) and ranking[first] > mine + newcomer.count:
            assert first is not None
            return self._shares[first].largest()
        return share.victim(newcomer.client, newcomer.count) if share is not None else None

    def more(self, holding: Holding, count: int) -> bool:
        """Take more descriptors for a connection, if that makes nobody give way."""
        if holding.released or not self.has(count):
            return False
        holding.count += count
        self._add(holding, count)
        return True

    def less(self, holding: Holding, count: int) -> None:
        """Return what `more` has taken."""
        if not holding.released:
            holding.count -= count
            self._add(holding, -count)

    def use(self, holding: Holding) -> None:
        """Note that a connection is not silent."""
        if not holding.released:
            share = self._shares[holding.owner]
            share.holdings[holding.client].move_to_end(holding)
            share.clients.use(holding.client)
            if holding in share.fresh:
                share.fresh.move_to_end(holding)

    def prove(self, holding: Holding) -> None:
        """Note that a UDP session is used both ways."""
        if not holding.released:
            self._shares[holding.owner].fresh.pop(holding, None)

    def release(self, holding: Holding) -> None:
        """Return all descriptors of a connection."""
        if holding.released:
            return
        holding.released = True
        share = self._shares[holding.owner]
        held = share.holdings[holding.client]
        del held[holding]
        if not held:
            del share.holdings[holding.client]
        share.fresh.pop(holding, None)
        self.sessions -= holding.owner.name.protocol is Protocol.UDP
        self._add(holding, -holding.count)
        if not share.holdings:
            del self._shares[holding.owner]

    def _add(self, holding: Holding, count: int) -> None:
        self.used += count
        self._shares[holding.owner].clients.add(holding.client, count)
        is_udp = holding.owner.name.protocol is Protocol.UDP
        self._services[is_udp].add(holding.owner, count)


def client_of(address: str) -> str:
    """Return what counts as one client: an IPv4 address, or the /64 of an IPv6 address."""
    address = canonical_ip(address.partition("%")[0]) or address
    if ":" not in address:
        return address
    host = 128 - _CLIENT_PREFIX
    return str(IPv6Address(int(IPv6Address(address)) >> host << host))
