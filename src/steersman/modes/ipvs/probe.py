"""Whether this machine can do ipvs, and what is missing where it cannot."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable

from steersman.host.exec import Exec, failure_reason, run_program
from steersman.host.netlink import Netlink, NetlinkError
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Protocol
from steersman.modes.ipvs.apply import Servers
from steersman.modes.ipvs.names import Server, ServerKey
from steersman.modes.ipvs.wire import list_services, resolve

_TRIAL = ServerKey(Protocol.TCP, "198.51.100.0", 20000)
"""A virtual server that nobody uses (RFC 5737): making it loads the scheduler (behaviour 10)."""
_TRIAL_SET = "KUBE-IPVS-TRIAL"
_TRIAL_RULES = f"""*filter
:{_TRIAL_SET} - [0:0]
-A {_TRIAL_SET} -m set --match-set {_TRIAL_SET} dst -j RETURN
-A {_TRIAL_SET} -m bpf --bytecode "1,6 0 0 65535" -j RETURN
COMMIT
*filter
-F {_TRIAL_SET}
-X {_TRIAL_SET}
COMMIT
""".encode()
_IPSET = re.compile(r"v(\d+)\.(\d+)")


async def load_module(execute: Exec, name: str) -> str:
    """Ask for a kernel module; return why it cannot be had, "" where it could."""
    try:
        result = await execute.run(["modprobe", name])
    except OSError as error:
        return failure_reason("modprobe", "kmod", error)
    return "" if result.returncode == 0 else result.message or f"modprobe {name} failed"


async def find_family(execute: Exec, netlink: Netlink, *, loads: bool) -> tuple[int, str]:
    """Return the number of the IPVS family and "", or 0 and what is missing.

    Args:
        execute: runs modprobe.
        netlink: a socket of generic netlink.
        loads: whether to load the module where it is not there.
    """
    try:
        return resolve(netlink), ""
    except NetlinkError as error:
        if error.errno != errno.ENOENT:
            return 0, f"IPVS cannot be spoken to: {error.strerror}."
    why = await load_module(execute, "ip_vs") if loads else "it is not loaded"
    try:
        return resolve(netlink), ""
    except NetlinkError:
        said = f" ({why})" if why else ""
        return 0, f"The kernel has no ip_vs{said}; run `modprobe ip_vs` on the host."


async def check_ipset(execute: Exec) -> str:
    """Return what is wrong with ipset, "" where it works."""
    try:
        result = await execute.run(["ipset", "version"])
        found = _IPSET.search(result.stdout.decode(errors="replace"))
        if found and int(found[1]) < 6:
            return f"ipset {found[0]} is too old; 6.0 or newer is needed."
        if (await execute.run(["ipset", "save"])).returncode:
            return "The kernel has no ipset; run `modprobe ip_set` on the host."
    except OSError as error:
        return f"{failure_reason('ipset', 'ipset', error)}."
    return ""


async def check_matches(execute: Exec, iptables: str) -> str:
    """Return what is wrong with the matches that rules need, "" where the kernel has them.

    Rules with both, in a chain that nothing leads to, are made and removed in one run, and so is
    their set: `--test` does not ask the kernel.
    """
    try:
        create = ["ipset", "-exist", "create", _TRIAL_SET, "hash:ip"]
        made = await run_program(execute, create, package="ipset")
        restore = [f"{iptables}-restore", "--noflush"]
        result = await run_program(execute, restore, _TRIAL_RULES, package="iptables")
        await run_program(execute, ["ipset", "destroy", _TRIAL_SET], package="ipset")
    except BusyError as error:
        return f"{error}."
    if not (made.returncode or result.returncode):
        return ""
    said = result.message or made.message
    hint = "run `modprobe xt_set` and `modprobe xt_bpf` on the host"
    return f"{iptables} cannot match sets and BPF programs ({said}); {hint}."


def check_scheduler(
    netlink: Netlink, family: int, scheduler: str, inside: Callable[[Callable[[], str]], str]
) -> str:
    """Return what is wrong with a scheduler, "" where a virtual server can have it."""
    servers = Servers(netlink, family, inside)
    try:
        known = list(list_services(netlink, family))
        if any(listed.scheduler == scheduler for listed in known):
            return ""
        servers.write([(_TRIAL, None, Server(scheduler))])
        made = any(listed.key == _TRIAL for listed in list_services(netlink, family))
        servers.delete([_TRIAL])
    except ApplyError as error:
        hint = f"run `modprobe ip_vs_{scheduler}` on the host, or choose another one"
        return f"The scheduler {scheduler} cannot be used ({error}); {hint}."
    except NetlinkError as error:
        return f"IPVS cannot be asked for its virtual servers: {error.strerror}."
    return "" if made else "IPVS takes a virtual server and does not list it."
