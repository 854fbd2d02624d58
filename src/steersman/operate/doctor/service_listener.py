"""Doctor's check of processes of this machine that listen on a node port of the Service."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from steersman.host.listening import ListeningSocket, listening_sockets
from steersman.model.addresses import join_host_port
from steersman.operate.doctor.check import (
    Cause,
    Check,
    CheckResult,
    Context,
    both,
    error,
    ok,
    on_the_node,
    skipped,
    warning,
    with_service,
)

_PROXIES = ("steersman", "kube-proxy")
"""Programs that hold the node ports of Services themselves, as they should."""


class Owner(NamedTuple):
    """The process that has a socket."""

    pid: int
    command: str


async def node_port_listeners(context: Context) -> Iterable[CheckResult]:
    """Find processes of others that listen on a node port of the Service."""
    ports = {
        (plan.key.name.protocol, frontend.port)
        for plan in context.plans
        for frontend in plan.frontends
        if not frontend.address
    }
    if not ports:
        return [skipped("the Service has no node port")]
    proc = context.path("proc")
    # Another process may have another network namespace: /proc/net is that of the reader.
    listening = await asyncio.to_thread(listening_sockets, proc)
    found = {s: inode for s, inode in listening.items() if (s.protocol, s.port) in ports}
    owners = await asyncio.to_thread(socket_owners, frozenset(found.values()), proc)
    out = []
    for sock, inode in found.items():
        owner = owners.get(inode)
        if owner is None or not any(name in owner.command for name in _PROXIES):
            out.append(conflict(context, sock, owner))
    words = ", ".join(f"{port}/{protocol}" for protocol, port in sorted(ports))
    return out or [ok(f"no other process of this node listens on {words}")]


def conflict(context: Context, sock: ListeningSocket, owner: Owner | None) -> CheckResult:
    """Say what comes of a process that listens on a node port."""
    who = f"pid {owner.pid} ({owner.command})" if owner else "a process that cannot be seen"
    where = f"{join_host_port(sock.address, sock.port)}/{sock.protocol}"
    text = f"{who} listens on {where}, a node port of {context.question.service}"
    evidence = f"ss -lnp: {where} users: {who}"
    if context.world.plan.settings.traits.terminates_connections:
        return error(
            f"{text}: the proxy cannot listen there itself",
            evidence,
            remedy="give the process, or the Service, another port",
        )
    return warning(
        f"{text}: where node ports are served its clients get the Service, elsewhere clients of "
        "the Service get that process",
        evidence,
        remedy="give the process, or the Service, another port; keep node ports out of "
        "net.ipv4.ip_local_port_range",
        suspect=True,
    )


def socket_owners(inodes: frozenset[int], proc: Path = Path("/proc")) -> dict[int, Owner]:
    """Return the process that has each socket, as far as processes can be seen; it blocks.

    Args:
        inodes: of the sockets.
        proc: where proc is mounted.
    """
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, Owner] = {}
    if not wanted:
        return found
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        with suppress(OSError):  # it ended, or belongs to another user
            for link in os.listdir(proc / name / "fd"):
                with suppress(OSError):
                    inode = wanted.get(os.readlink(proc / name / "fd" / link))
                    if inode is not None and inode not in found:
                        words = (proc / name / "cmdline").read_bytes().split(b"\0")
                        command = b" ".join(words[:4]).decode(errors="replace").strip()
                        found[inode] = Owner(int(name), command)
    return found


LISTENER_CHECKS = (
    Check(
        "node-port-listener",
        "processes on the node port",
        node_port_listeners,
        both(with_service, on_the_node),
        Cause.NODE + 5,
    ),
)
