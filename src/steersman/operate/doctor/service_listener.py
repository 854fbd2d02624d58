"""Doctor's checks of what else on this machine has the ports and addresses of the Service."""

from __future__ import annotations

import asyncio

from steersman.host.listening import listening_sockets
from steersman.model.addresses import join_host_port
from steersman.model.plan import FrontendKind
from steersman.operate.doctor.context import Context
from steersman.operate.doctor.processes import ELSEWHERE, Owner, socket_owners
from steersman.operate.doctor.result import (
    CheckResult,
    Found,
    Verdict,
    error,
    ok,
    result_of,
    skipped,
    unknown,
    warning,
)

_PROXIES = ("steersman", "kube-proxy")
"""Programs that hold the node ports of Services themselves, as they should."""


async def ports(context: Context) -> Found:
    """Find processes of others that listen on a node port of the Service."""
    ports = {
        (plan.key.name.protocol, frontend.port)
        for plan in context.plans
        for frontend in plan.frontends
        if not frontend.address
    }
    if not ports:
        return skipped("the Service has no node port")
    proc = context.path("proc")
    # Another process may have another network namespace: /proc/net is that of the reader.
    listening = await asyncio.to_thread(listening_sockets, proc)
    found = {s: inode for s, inode in listening.items() if (s.protocol, s.port) in ports}
    owners = await asyncio.to_thread(socket_owners, frozenset(found.values()), proc)
    out = []
    for sock, inode in found.items():
        owner = owners.get(inode)
        where = f"{join_host_port(sock.address, sock.port)}/{sock.protocol}"
        if owner is None and context.world.process and not context.server_pid:
            # From a container beside steersman's own, its sockets are those of a stranger.
            out.append(unknown(f"who listens on {where} cannot be seen: {ELSEWHERE}"))
        elif owner is None or not any(name in owner.command for name in _PROXIES):
            out.append(conflict(context, where, owner))
    words = ", ".join(f"{port}/{protocol}" for protocol, port in sorted(ports))
    return out or ok(f"no other process of this node listens on {words}")


def conflict(context: Context, where: str, owner: Owner | None) -> CheckResult:
    """Say what comes of a process that listens on a node port."""
    who = str(owner or "a process that cannot be seen")
    text = f"{who} listens on {where}, a node port of {context.question.service}"
    evidence = f"ss -lnp: {where} users: {who}"
    remedy = "give the process, or the Service, another port"
    if context.world.plan.settings.traits.terminates_connections:
        return error(f"{text}: the proxy cannot listen there itself", evidence, remedy=remedy)
    return warning(
        f"{text}: where node ports are served its clients get the Service, elsewhere clients of "
        "the Service get that process",
        evidence,
        remedy=f"{remedy}; keep node ports out of net.ipv4.ip_local_port_range",
        suspect=True,
    )


async def addresses(context: Context) -> Found:
    """Find cluster IPs of the Service that this machine has as addresses, too."""
    wanted = {
        frontend.address
        for plan in context.plans
        for frontend in plan.frontends
        if frontend.kind is FrontendKind.CLUSTER_IP
    }
    results = []
    for name, addresses in context.world.facts.interfaces.items():
        for address in sorted(wanted & {each.partition("/")[0] for each in addresses}):
            text = (
                f"the cluster IP {address} is an address of this node, too, on {name}: ports that "
                "the Service does not have are this node's (a DNS cache on each node is set up so)"
            )
            remedy = f"unless a DNS cache needs it: `ip addr del {address} dev {name}`"
            shows = f"ip addr show dev {name}"
            results.append(result_of(Verdict.NOTICE, text, shows, remedy=remedy))
    return results or ok("no cluster IP is an address of this node")
