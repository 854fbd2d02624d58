"""ClientIP session affinity of one ServicePort: which objects it takes, and what they are called.

A client sticks to its endpoint whatever service IP it uses (behaviour 6), so the memory belongs to
the ServicePort: one map per pool in use, filled by the data path behind DNAT, where the endpoint is
known. Only members are learned: an endpoint that was just removed cannot come back.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping

from steersman.model.names import PlanKey
from steersman.modes.nftables.layout import Kind, named, prefix

_NAME_LIMIT = 200
_OTHERS = re.compile(r"[^\w./-]", re.ASCII)


def base_name(key: PlanKey) -> str:
    """Upstream's name of a ServicePort in chain names (behaviour 9): hash, then what it is.

    Kubernetes lets little else than letters, digits, `-` and `.` into names, up to 63 of them. A
    manifest may hold anything, but the kernel takes 255 bytes; the slash tells whose chain it is.
    """
    name = key.name
    full = f"{name.namespace}/{name.service}/{name.protocol.lower()}/{name.port}"
    digest = base64.b32encode(hashlib.sha256(full.encode(errors="replace")).digest()[:5]).decode()
    whole = f"{digest}-{_OTHERS.sub('_', full)}"
    return whole if len(whole) <= _NAME_LIMIT else whole[: _NAME_LIMIT - 4] + "/..."


LEARN_CHAIN = "affinity-learn"
"""Chain in which a connection's ServicePort is found; empty until there is one that learns."""
_LEARN = f"{LEARN_CHAIN}-"
POOLS = {False: "cluster", True: "local"}
"""Words for the pools in the values of chains, by whether it is Pool.LOCAL."""


def memory_name(base: str, local: bool) -> str:
    """Name of the map from clients to endpoints."""
    return f"affinity-{'local-' if local else ''}{base}"


def members_name(base: str, local: bool) -> str:
    """Name of the set of endpoints that may be learned."""
    return f"members-{'local-' if local else ''}{base}"


def base_of(chain: str) -> str:
    """Name of the ServicePort in the name of one of its chains."""
    return chain.partition(_LEARN if chain.startswith(_LEARN) else "affinity-")[2]


class AffinityNames:
    """Names of a ServicePort's affinity objects, and what is in them."""

    def __init__(self, key: PlanKey) -> None:
        self._family = key.family
        self._protocol = key.name.protocol.lower()
        self._base = base_name(key)
        self.learn = _LEARN + self._base

    def lookup(self, space: str, marking: str, local: bool, draw: str) -> tuple[bytes, bytes]:
        """Name and value of a chain that first looks the client up, else draws an endpoint.

        The value says what the rules do: protocol, chain that marks (`-` for none), pool, chain
        that draws. It is short, as it is kept in a comment.
        """
        pool = "local-" if local else ""
        mark = f"mark-{marking.rstrip('-')}" if marking else "-"
        name = f"{space}{marking}{pool}affinity-{self._base}"
        return name.encode(), f"lookup {self._protocol} {mark} {POOLS[local]} {draw}".encode()

    def render(
        self, seconds: int, pools: Mapping[bool, Iterable[bytes]]
    ) -> Iterator[tuple[bytes, bytes]]:
        """The objects, given the endpoints of the pools in use (True: of Pool.LOCAL)."""
        family = self._family
        for local, endpoints in sorted(pools.items()):
            members = members_name(self._base, local)
            yield named(Kind.AFFINITY, family, memory_name(self._base, local)), b""
            yield named(Kind.MEMBERS, family, members), b""
            start = prefix(Kind.MEMBER, family) + members.encode() + b"\0"
            for endpoint in endpoints:
                yield start + endpoint, b""
        value = f"learn {seconds} {' '.join(POOLS[local] for local in sorted(pools))}"
        yield named(Kind.CHAIN, family, self.learn), value.encode()
