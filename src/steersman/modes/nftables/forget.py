"""Affinity to endpoints that are gone is deleted: what the data path remembers of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from steersman.host.netlink import Netlink, NetlinkError
from steersman.model.names import Family
from steersman.model.ruleset import Diff, Ruleset
from steersman.modes.nftables import wire
from steersman.modes.nftables.elements import encode
from steersman.modes.nftables.layout import Form, Kind
from steersman.modes.nftables.read import memory, service_memory
from steersman.modes.nftables.sender import Sender


def forgets(change: Diff) -> bool:
    """Whether clients may have to be forgotten, of whom there can be very many."""
    return any(key[0] == Kind.MEMBER for key in change.removed)


def forget(sender: Sender, removed: Ruleset) -> None:
    """Delete what is remembered of removed members."""
    gone: dict[tuple[Family, str], set[bytes]] = {}
    for key in removed:
        if key[0] == Kind.MEMBER:
            members, _, endpoint = key[2:].partition(b"\0")
            family = Family(key[1])
            if bytes((Kind.MEMBERS, family)) + members not in removed:
                name = service_memory(members)
                gone.setdefault((family, name), set()).add(endpoint)
    for (family, name), endpoints in gone.items():
        if clients := _clients(sender.netlink, family, name, endpoints):
            _delete_clients(sender, family, name, clients)


def _clients(netlink: Netlink, family: Family, name: str, endpoints: set[bytes]) -> list[bytes]:
    """Clients that stick to these endpoints, as far as they are seen.

    The transaction is in force and must not fail any more where others change the ruleset.
    """
    found = []
    with suppress(NetlinkError):
        for client, endpoint in memory(netlink, family, name):
            if endpoint in endpoints:
                found.append(client)
    return found


def _delete_clients(sender: Sender, family: Family, name: str, clients: Sequence[bytes]) -> None:
    kind = wire.DESTROYSETELEM if sender.destroys else wire.DELSETELEM
    together = len(clients) if sender.destroys else 1  # an expired one would refuse the rest
    for at in range(0, len(clients), together):
        pairs = [(client, b"") for client in clients[at : at + together]]
        items = encode(Form.SET, pairs, keys_only=True)
        room = wire.room(items)
        requests = [
            wire.elements(kind, family, name, items[first : first + room])
            for first in range(0, len(items), room)
        ]
        if not sender.netlink.batch(wire.batch(requests)):
            sender.made_transaction()
