"""Replacing a table that is not ours: what goes into the one transaction that nft makes. Pure.

nft can write neither rules that match the destination before DNAT nor, in the same go, the chains
of session affinity; for the milliseconds until they are in, simpler elements stand in for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steersman.model.names import Family
from steersman.modes.nftables.layout import SETS, TABLE, Form, Kind, named
from steersman.modes.nftables.skeleton import HEADER
from steersman.modes.nftables.text import address

_LEARNED = (Kind.AFFINITY_IPS, Kind.AFFINITY_NODEPORTS)
_HAIRPINS = (Kind.HAIRPIN_SERVICES, Kind.HAIRPIN_NODEPORTS)


def loadable(family: Family, new: Mapping[bytes, Any]) -> dict[bytes, bytes]:
    """Elements of one family as nft can load them: without session affinity."""
    return {
        key: _plain(family, value, new) if SETS[key[0]].form is Form.VERDICTS else value
        for key, value in new.items()
        if key[0] in SETS and key[1] == family and key[0] not in _LEARNED
    }


def _plain(family: Family, value: bytes, new: Mapping[bytes, Any]) -> bytes:
    """Go where the ServicePort's own chain would go for a client that it does not know."""
    chain, _, comment = value.partition(b"\0")
    does = new.get(named(Kind.CHAIN, family, chain.decode()))
    if does is None:
        return value
    _, _, mark, _, draw = does.decode().split()
    space = "np-" if draw.startswith("np-") else ""
    marking = "" if mark == "-" else mark.removeprefix("mark-") + "-"
    return f"{space}{marking}{draw.removeprefix(space)}".encode() + b"\0" + comment


def hairpin_meanwhile(family: Family, loaded: Mapping[bytes, bytes]) -> str:
    """A rule that masquerades endpoints that reach themselves, whichever way they do."""
    width = family.bits // 8
    ips = {key[2 : 2 + width] for key in loaded if key[0] in _HAIRPINS and key[1] == family}
    if not ips:
        return ""
    header = HEADER[family]
    pairs = ", ".join(f"{ip} . {ip}" for ip in sorted(map(address, ips)))
    match = f"{header} saddr . {header} daddr {{ {pairs} }}"
    return f"add rule {header} {TABLE} hairpin {match} masquerade fully-random\n"
