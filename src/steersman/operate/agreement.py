"""Which nodes serve something else than the others, from the digests in their states. Pure.

Each state has a digest of all Services and endpoints. Nodes see a change at slightly different
times, and states are sampled, so equal nodes show different digests for moments. A node agrees if
it has had, within the last seconds (the grace), some digest that is usual: one that most nodes have
had in that time. While everything changes all the time, no digest may be usual; what decides then
is the comparison Service by Service: what differs in the same way twice in a row does not merely
lag.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import TypeAlias

from steersman.operate.node_trouble import Disagreement

_REMEMBERED = 128
"""Digests of a node; four a second come at most."""
_MOST_CAMPS = 4

Digest: TypeAlias = str | int


class Agreement:
    """Remembers the digests of nodes for a while."""

    def __init__(self, grace: float = 15.0) -> None:
        """Create it without nodes.

        Args:
            grace: seconds in which a node may lag behind the others.
        """
        self._grace = grace
        self._held: dict[str, deque[tuple[float, str]]] = {}
        """Digests by node with the time when each was new, oldest first."""
        self._before: dict[tuple[str, str], dict[str, tuple[Digest, Digest]]] = {}

    def observe(self, node: str, digest: str, at: float) -> None:
        """Record the digest of a node at a time, in seconds."""
        held = self._held.setdefault(node, deque(maxlen=_REMEMBERED))
        if not held or held[-1][1] != digest:
            held.append((at, digest))

    def forget(self, node: str) -> None:
        """Drop a node that does not exist any more."""
        self._held.pop(node, None)

    def camps(self, now: float) -> tuple[Disagreement, ...]:
        """Return the nodes that do not agree with the others, the largest groups first.

        Those of a group have the same digest; one of them is to be compared with the reference.
        """
        current = {node: held[-1][1] for node, held in self._held.items()}
        if len(set(current.values())) < 2:
            self._before.clear()
            return ()
        recent: dict[str, set[str]] = {}
        for node, held in self._held.items():
            # The digest that was there when the window began counts, too.
            while len(held) > 1 and held[1][0] <= now - self._grace:
                held.popleft()
            recent[node] = {digest for _, digest in held}
        counts = Counter(digest for digests in recent.values() for digest in digests)
        usual = {digest for digest, number in counts.items() if 2 * number > len(recent)}
        if not usual:
            holders = Counter(current.values())
            usual = {max(sorted(holders), key=lambda digest: (holders[digest], counts[digest]))}
        agreeing = [node for node in sorted(recent) if recent[node] & usual]
        # A node whose digest is usual right now is the better reference.
        reference = next((node for node in agreeing if current[node] in usual), agreeing[0])
        groups: dict[str, list[str]] = {}
        for node in sorted(recent.keys() - set(agreeing)):
            groups.setdefault(current[node], []).append(node)
        largest = sorted(groups.values(), key=lambda nodes: (-len(nodes), nodes))[:_MOST_CAMPS]
        camps = tuple(Disagreement(tuple(nodes), reference) for nodes in largest)
        known = {(camp.nodes[0], reference) for camp in camps}
        self._before = {pair: was for pair, was in self._before.items() if pair in known}
        return camps

    def differing(
        self, camp: Disagreement, theirs: Mapping[str, Digest], usual: Mapping[str, Digest]
    ) -> tuple[str, ...]:
        """Return the Services that differ as they did at the last call for the same two nodes.

        Args:
            camp: whose first node and reference are compared.
            theirs: digests by Service of that node.
            usual: those of the reference.
        """
        pair = (camp.nodes[0], camp.reference)
        now = {
            name: (theirs.get(name, ""), usual.get(name, ""))
            for name in theirs.keys() | usual.keys()
            if theirs.get(name) != usual.get(name)
        }
        before = self._before.get(pair, {})
        self._before[pair] = now
        return tuple(sorted(name for name, both in now.items() if before.get(name) == both))
