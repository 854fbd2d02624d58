"""What the rules of a packet filter do to one packet, as far as rules alone can tell.

Rules come from iptables-save (from_iptables.py) or from `nft -j` (from_nft.py) in one form. A
match is true, false, or unknown: rates, sets by name, extensions and properties that the Packet
does not say. So a walk ends in one of three ways: the packet passes, it is certainly dropped, or it
may be dropped; on its way it meets rules that change it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from steersman.model.addresses import family_of, in_cidr, join_host_port
from steersman.model.names import Family, Protocol

_NAT = -100  # NF_IP_PRI_NAT_DST


class Packet(NamedTuple):
    """The first packet of a connection at one hook, or the answer to it."""

    family: Family
    protocol: Protocol
    destination: str
    """"" if it is not known, as all addresses and interfaces here."""
    port: int
    """Of the destination; 0 if it is not known."""
    source: str = ""
    came_in: str = ""
    """Interface by which it came."""
    goes_out: str = ""
    """Interface by which it leaves."""
    mark: int | None = None
    """None if it is not known."""
    unsure: int = 0
    """Bits of the mark that a rule may have changed."""
    translated: bool | None = None
    """Whether its destination was changed by NAT (conntrack's status DNAT)."""
    answer: bool = False
    """Whether conntrack has seen a packet of the connection: it is not new, but established."""

    def __str__(self) -> str:
        """Return it as in `192.0.2.1 to 10.0.0.5:80/TCP`."""
        if self.answer:
            return f"answers of {self.source} ({self.protocol})"
        source = self.source or "anyone"
        return f"{source} to {join_host_port(self.destination, self.port)}/{self.protocol}"


Match: TypeAlias = Callable[[Packet], bool | None]
Fate: TypeAlias = Literal["accept", "drop", "reject", "return", "jump", "goto", ""]
"""The verdict of a rule; "" if the walk continues."""
Hook: TypeAlias = Literal[
    "ingress", "prerouting", "input", "forward", "output", "postrouting", "egress"
]
"""A hook of routed packets; `ingress` and `egress` stand for all hooks of devices and bridges."""


class Effect(NamedTuple):
    """What a rule does to a packet, beside a verdict."""

    kind: Literal["destination", "source", "untracked", "zone", "mark", "hops", "program"]
    """What it changes: an address, whether or in which zone conntrack tracks it, the mark, the hops
    that are left; or `program`: it gives the packet to a program."""
    keep: int = 0
    """For a mark: the bits that stay."""
    flip: int = 0
    """For a mark: the bits that are inverted after that."""

    def marked(self, mark: int) -> int:
        """Return the mark of a packet that had `mark`."""
        return (mark & self.keep) ^ self.flip

    def done_to(self, packet: Packet) -> Packet:
        """Return the packet with the mark that it has after this."""
        if self.kind != "mark":
            return packet
        if packet.mark is None:
            return packet if self.keep else packet._replace(mark=self.flip)
        return packet._replace(mark=self.marked(packet.mark), unsure=packet.unsure & self.keep)


class Rule(NamedTuple):
    """A rule in a chain."""

    matches: tuple[Match, ...]
    fate: Fate
    place: str
    """How an operator finds it: its text, or `handle 7`."""
    target: str = ""
    """The chain that a jump leads to."""
    effect: Effect | None = None


class Chain(NamedTuple):
    """A chain; without a hook only jumps lead to it."""

    rules: Sequence[Rule]
    hook: str = ""
    priority: int = 0
    policy: Fate = "accept"
    nat: bool = False
    """Whether it only translates addresses: such a chain sees the first packet of a connection, and
    the packet as it is before NAT."""


class FilterTable(NamedTuple):
    """A table; its chains can jump to each other."""

    name: str
    """As in `inet firewall`, or `filter (iptables)`."""
    families: frozenset[Family]
    chains: Mapping[str, Chain]


class Met(NamedTuple):
    """A place where a packet ends, or a rule that changes it."""

    table: str
    chain: str
    place: str
    """The rule, or `policy drop`."""
    certain: bool
    """False if it depends on something that is not known."""
    fate: Fate = "drop"
    effect: Effect | None = None
    """What the rule changes; None where the packet ends."""
    priority: int = 0
    """Of the base chain of a rule that changes the packet."""

    def __str__(self) -> str:
        """Return it as in `inet firewall, chain forward: policy drop`."""
        return f"{self.table}, chain {self.chain}: {self.place}"


def met(
    tables: Iterable[FilterTable], hook: Hook, packet: Packet, before: Packet | None = None
) -> list[Met]:
    """Return where a packet ends or may end at a hook, and what changes it; the certain ones first.

    Every base chain of a hook sees the packet: an accept ends only the walk of its own chain.

    Args:
        tables: all tables.
        hook: the hook.
        packet: the packet.
        before: the packet as chains see it that come before NAT of destinations, if it differs.
    """
    found = []
    effects: list[tuple[Effect, bool]] = []
    for table, name, chain in _base_chains(tables, hook, packet):
        first = chain.priority < _NAT or (chain.nat and chain.priority <= _NAT)
        walk = _Walk(table, before if before and first else packet, effects)
        settled = walk.through(name, sure=True)
        if not settled and chain.policy == "drop":
            walk.ends(name, "policy drop", "drop")
        effects += walk.effects
        found += [change._replace(priority=chain.priority) for change in walk.changes]
        found += [walk.drop] if walk.drop and not chain.nat else []
    return sorted(found, key=lambda each: not each.certain)


def _base_chains(
    tables: Iterable[FilterTable], hook: Hook, packet: Packet
) -> list[tuple[FilterTable, str, Chain]]:
    """Return the chains of a hook that see a packet, in the order of their priorities."""
    chains = [
        (table, name, chain)
        for table in tables
        if packet.family in table.families
        for name, chain in table.chains.items()
        if chain.hook == hook and not (chain.nat and packet.answer)
    ]
    return sorted(chains, key=lambda each: each[2].priority)


class _Walk:
    """The way of one packet through the chains that a base chain leads to."""

    def __init__(
        self, table: FilterTable, packet: Packet, before: Iterable[tuple[Effect, bool]]
    ) -> None:
        """Begin where other chains have changed the packet, certainly or perhaps."""
        self.table = table
        self.packet = packet
        """As it is now: rules change its mark."""
        for effect, certain in before:
            self._change(effect, sure=certain)
        self.effects: list[tuple[Effect, bool]] = []
        self.drop: Met | None = None
        """The first place where it may end, or the one where it does."""
        self.changes: list[Met] = []
        """The rules that change it, up to there."""
        self._may_be_accepted = False
        self._inside: list[str] = []

    def ends(self, chain: str, place: str, fate: Fate, *, sure: bool = True) -> None:
        """Note that the packet ends, if it comes here."""
        certain = sure and not self._may_be_accepted
        if self.drop is None or (certain and not self.drop.certain):
            self.drop = Met(self.table.name, chain, place, certain, fate)

    def through(self, name: str, *, sure: bool) -> bool:
        """Walk a chain; return whether the fate of a packet that comes here is settled.

        Args:
            name: the chain.
            sure: whether it certainly comes here.
        """
        chain = self.table.chains.get(name)
        if chain is None or name in self._inside:  # the kernel refuses loops
            return False
        self._inside.append(name)
        left_early: list[Packet] = []
        try:
            for rule in chain.rules:
                hit = _all(match(self.packet) for match in rule.matches)
                if hit is False:
                    continue
                settled = self._meets(rule, name, hit=hit, sure=sure and hit is True)
                if hit is True and (settled or rule.fate in ("return", "goto")):
                    return settled and not left_early
                # The rest of this chain is reached only if these do not match.
                if rule.fate in ("return", "goto"):
                    sure = False
                    left_early.append(self.packet)
            return False
        finally:
            for packet in left_early:
                self.packet = _either_mark(self.packet, packet)
            self._inside.pop()

    def _meets(self, rule: Rule, chain: str, *, hit: bool | None, sure: bool) -> bool:
        """Do what a rule of a chain does; return whether it settles the fate if it matches."""
        if rule.effect:
            certain = sure and not self._may_be_accepted
            self.changes.append(Met(self.table.name, chain, rule.place, certain, "", rule.effect))
            self.effects.append((rule.effect, certain))
            self._change(rule.effect, sure=hit is True)
        if rule.fate in ("drop", "reject"):
            self.ends(chain, rule.place, rule.fate, sure=sure)
            return True
        if rule.fate == "accept":
            self._may_be_accepted = True
            return True
        if rule.fate not in ("jump", "goto"):
            return False
        before = self.packet
        settled = self.through(rule.target, sure=sure)
        if hit is None:
            self.packet = _either_mark(before, self.packet)
        return settled

    def _change(self, effect: Effect, *, sure: bool) -> None:
        """Change the mark of the packet, or some of its bits perhaps."""
        changed = effect.done_to(self.packet)
        self.packet = changed if sure else _either_mark(self.packet, changed)


def _either_mark(packet: Packet, other: Packet) -> Packet:
    """Return a packet that has the mark of one of two."""
    if packet.mark is None or other.mark is None:
        return packet._replace(mark=None)
    unsure = packet.unsure | other.unsure | (packet.mark ^ other.mark)
    return packet._replace(unsure=unsure)


def _all(hits: Iterable[bool | None]) -> bool | None:
    """Return False if one is false, else None if one is unknown, else True."""
    known = True
    for hit in hits:
        if hit is False:
            return False
        known = known and hit is not None
    return True if known else None


# Matches that both parsers need


def unknown_match(_: Packet) -> None:
    """Match maybe."""


def negated(match: Match) -> Match:
    """Return the opposite of a match; unknown stays unknown."""

    def opposite(packet: Packet) -> bool | None:
        hit = match(packet)
        return None if hit is None else not hit

    return opposite


def either(matches: Sequence[Match]) -> Match:
    """Match if one of several does."""

    def one(packet: Packet) -> bool | None:
        hits = [match(packet) for match in matches]
        return True if True in hits else None if None in hits else False

    return one


def on_interface(pattern: str, *, out: bool) -> Match:
    """Match the name of an interface; a trailing `+` or `*` stands for anything."""

    def named(packet: Packet) -> bool | None:
        name = packet.goes_out if out else packet.came_in
        if not name:
            return None
        if pattern.endswith(("+", "*")):
            return name.startswith(pattern[:-1])
        return name == pattern

    return named


def in_network(cidr: str, *, source: bool) -> Match:
    """Match an address in a canonical CIDR, of the source or of the destination."""

    def inside(packet: Packet) -> bool | None:
        if family_of(cidr) is not packet.family:
            return False
        address = packet.source if source else packet.destination
        return in_cidr(address, cidr) if address else None

    return inside


def to_ports(first: int, last: int) -> Match:
    """Match destination ports from `first` to `last`."""
    return lambda packet: first <= packet.port <= last if packet.port else None


def of_protocol(number: int) -> Match:
    """Match a protocol number; 0 matches all."""
    return lambda packet: number in (0, packet.protocol.number)


def with_mark(value: int, mask: int) -> Match:
    """Match a packet mark."""

    def marked(packet: Packet) -> bool | None:
        if packet.mark is None:
            return None
        if (packet.mark & mask ^ value) & ~packet.unsure:
            return False
        return None if packet.unsure & mask else True

    return marked


def translated(packet: Packet) -> bool | None:
    """Match connections whose destination was changed."""
    return packet.translated
