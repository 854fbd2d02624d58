"""Write a Diff as input of ipset, iptables-restore, ip and ipvsadm, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from steersman.model.addresses import family_of, join_host_port
from steersman.model.names import Protocol
from steersman.model.ruleset import Diff, Ruleset, patch
from steersman.modes.ipvs.changes import ChangeSet, address_entries, assigned_addresses
from steersman.modes.ipvs.objects import (
    DEVICE,
    Server,
    ServerKey,
    SetKey,
    role_set,
)

_OPTION = {Protocol.TCP: "-t", Protocol.UDP: "-u", Protocol.SCTP: "--sctp-service"}
_PERSISTENT = 0x1
_FLAGS = ((0x8, "flag-1"), (0x10, "flag-2"))
"""Flags of schedulers by their bits, in ipvsadm's words for all schedulers."""


class Texts(NamedTuple):
    """Lines of each program, in the order in which they are to run."""

    sets: list[str]
    """For `ipset restore`: sets and entries to make."""
    rules: Diff
    """For iptables-restore."""
    addresses: list[str]
    """For `ip -batch -`."""
    servers: list[str]
    """For `ipvsadm -R`."""
    sets_gone: list[str]
    """For `ipset restore`: entries and sets that go."""


def texts(have: Ruleset, change: Diff) -> Texts:
    """Return the lines that carry out a Diff; `have` is in the kernel."""
    changes = ChangeSet(change)
    bind, unbind = changes.addresses(assigned_addresses(have))
    addresses = [f"link add {DEVICE} type dummy"] if changes.makes_device else []
    addresses += [f"address add {_with_length(a)} dev {DEVICE}" for a in bind]
    if changes.drops_device:
        addresses.append(f"link delete {DEVICE}")
    else:
        addresses += [f"address delete {_with_length(a)} dev {DEVICE}" for a in unbind]
    servers = [line for key, old, new in changes.servers for line in _server_lines(key, old, new)]
    servers += [f"-D {_where(key)}" for key in changes.servers_gone]
    sets = {key.set for key in patch(have, change) if isinstance(key, SetKey)}
    marks = [a for a in unbind if role_set("ADDRESSES", family_of(a)) in sets]
    return Texts(
        [*changes.sets, *address_entries("add", bind)],
        changes.rules,
        addresses,
        servers,
        [*address_entries("del", marks), *changes.sets_gone],
    )


def _with_length(address: str) -> str:
    return f"{address}/{family_of(address).bits}"


def _where(key: ServerKey) -> str:
    return f"{_OPTION[key.protocol]} {join_host_port(key.address, key.port)}"


def _server_lines(key: ServerKey, old: Server | None, new: Server) -> Iterator[str]:
    """Yield the lines that make or change a virtual server and its real servers."""
    where = _where(key)
    if old is None or old.settings != new.settings:
        options = f" -p {new.timeout}" if new.flags & _PERSISTENT else ""
        flags = ",".join(name for bit, name in _FLAGS if new.flags & bit)
        options += f" -b {flags}" if flags else ""
        yield f"{'-A' if old is None else '-E'} {where} -s {new.scheduler}{options}"
    present, wanted = old.weight_of if old else {}, new.weight_of
    for target, weight in wanted.items():
        real = f"{where} -r {join_host_port(*target)} -m -w {weight}"
        if target not in present:
            yield f"-a {real}"
        elif present[target] != weight:
            yield f"-e {real}"
    for target in present.keys() - wanted.keys():
        # A real server of TCP keeps its connections, and gets no new ones.
        real = f"{where} -r {join_host_port(*target)}"
        yield f"-d {real}" if key.protocol is Protocol.UDP else f"-e {real} -m -w 0"
