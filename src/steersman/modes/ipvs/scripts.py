"""Write a Diff as input of ipset, iptables-restore, ip and ipvsadm, for people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from steersman.model.addresses import family_of, join_host_port
from steersman.model.names import Protocol
from steersman.model.ruleset import Diff, Ruleset, Script, patch
from steersman.modes.ipvs.changes import (
    ChangeSet,
    ServerChange,
    address_entries,
    assigned_addresses,
    rule_steps,
    target_changes,
)
from steersman.modes.ipvs.objects import ADDRESSES, DEVICE, ServerKey, SetKey, role_set
from steersman.netfilter.iptables.restore import UNCUT, restore_scripts, write_steps

_IPSET = ("ipset", "-exist", "restore")
_OPTION = {Protocol.TCP: "-t", Protocol.UDP: "-u", Protocol.SCTP: "--sctp-service"}
_VERBS = {"add": "-a", "change": "-e", "delete": "-d"}
_PERSISTENT = 0x1
_FLAGS = ((0x8, "flag-1"), (0x10, "flag-2"))
"""Flags of schedulers by their bits, in ipvsadm's words for all schedulers."""


def scripts(have: Ruleset, change: Diff, iptables: str) -> tuple[Script, ...]:
    """Return what carries out a Diff, in the order in which it is to run.

    Args:
        have: the objects in the kernel.
        change: the Diff.
        iptables: name of the iptables to use.
    """
    changes = ChangeSet(change)
    bind, unbind = changes.addresses(assigned_addresses(have))
    addresses = [f"link add {DEVICE} type dummy"] if changes.makes_device else []
    addresses += [f"address add {_with_length(a)} dev {DEVICE}" for a in bind]
    if changes.drops_device:
        addresses.append(f"link delete {DEVICE}")
    else:
        addresses += [f"address delete {_with_length(a)} dev {DEVICE}" for a in unbind]
    servers = [line for each in changes.servers for line in _server_lines(each)]
    servers += [f"-D {_where(key)}" for key in changes.servers_gone]
    sets = {key.set for key in patch(have, change) if isinstance(key, SetKey)}
    marks = [a for a in unbind if role_set(ADDRESSES, family_of(a)) in sets]
    gone = [*address_entries("del", marks), *changes.sets_gone]
    found = (
        _script(_IPSET, [*changes.sets, *address_entries("add", bind)]),
        *restore_scripts(write_steps(rule_steps(changes.rules), UNCUT, {}), iptables),
        _script(("ip", "-batch", "-"), addresses),
        _script(("ipvsadm", "-R"), servers),
        _script(_IPSET, gone),
    )
    return tuple(each for each in found if each.text)


def _script(argv: tuple[str, ...], lines: Iterable[str]) -> Script:
    return Script(argv[0], argv, "".join(f"{line}\n" for line in lines))


def _with_length(address: str) -> str:
    return f"{address}/{family_of(address).bits}"


def _where(key: ServerKey) -> str:
    return f"{_OPTION[key.protocol]} {join_host_port(key.address, key.port)}"


def _server_lines(change: ServerChange) -> Iterator[str]:
    """Yield the lines that make or change a virtual server and its real servers."""
    key, old, new = change
    where = _where(key)
    if old is None or old.settings != new.settings:
        options = f" -p {new.timeout}" if new.flags & _PERSISTENT else ""
        flags = ",".join(name for bit, name in _FLAGS if new.flags & bit)
        options += f" -b {flags}" if flags else ""
        yield f"{'-A' if old is None else '-E'} {where} -s {new.scheduler}{options}"
    for verb, target, weight in target_changes(change):
        options = "" if verb == "delete" else f" -m -w {weight}"
        yield f"{_VERBS[verb]} {where} -r {join_host_port(*target)}{options}"
