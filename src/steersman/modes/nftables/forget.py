"""Affinity to endpoints that are gone is deleted: what the data path remembers of them."""

from __future__ import annotations

from collections.abc import Iterable

from steersman.model.names import Family
from steersman.modes.diff import Ruleset
from steersman.modes.nftables import wire
from steersman.modes.nftables.elements import encode
from steersman.modes.nftables.layout import Form, Kind
from steersman.modes.nftables.read import memory, service_memory
from steersman.modes.nftables.sender import Sender


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
        known = memory(sender.netlink, family, name)
        clients = [client for client, endpoint in known if endpoint in endpoints]
        _delete_clients(sender, family, name, clients)


def _delete_clients(sender: Sender, family: Family, name: str, clients: Iterable[bytes]) -> None:
    kind = wire.DESTROYSETELEM if sender.destroys else wire.DELSETELEM
    for client in clients:  # one each: without DESTROY an expired one would refuse the rest
        items = encode(Form.SET, [(client, b"")], keys_only=True)
        if not sender.netlink.batch(wire.batch([wire.elements(kind, family, name, items)])):
            sender.made_transaction()
