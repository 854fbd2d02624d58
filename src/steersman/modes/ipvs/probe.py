"""Check whether this machine can run the ipvs mode, and what it lacks."""

from __future__ import annotations

import errno
import logging
import re

from steersman.host.exec import Exec, failure_reason, tool_result
from steersman.host.netlink import Netlink, NetlinkError
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family, Protocol
from steersman.modes.ipvs.backends import VirtualServers
from steersman.modes.ipvs.objects import Server, ServerKey
from steersman.modes.ipvs.wire import list_services, resolve
from steersman.netfilter.iptables.restore import Run
from steersman.netfilter.iptables.tool import Iptables

log = logging.getLogger(__name__)

_TRIAL = ServerKey(Protocol.TCP, "198.51.100.0", 20000)
"""An unused virtual server (RFC 5737); creating it loads its scheduler (behaviour 10)."""
_TRIAL_SET = "KUBE-IPVS-TRIAL"
_TRIAL_ATTEMPTS = 3
"""Each waits some seconds for the lock of iptables-legacy."""
_TRIAL_RULES = f"""*filter
:{_TRIAL_SET} - [0:0]
-A {_TRIAL_SET} -m set --match-set {_TRIAL_SET} dst -j RETURN
-A {_TRIAL_SET} -m bpf --bytecode "1,6 0 0 65535" -j RETURN
COMMIT
*filter
-F {_TRIAL_SET}
-X {_TRIAL_SET}
COMMIT
"""
_IPSET = re.compile(r"v(\d+)\.(\d+)")


def load_module(execute: Exec, name: str) -> str:
    """Load a kernel module; return why it cannot be loaded, or ""."""
    try:
        result = execute.run_tool(["modprobe", name])
    except OSError as error:
        return failure_reason("modprobe", "kmod", error)
    return "" if result.returncode == 0 else result.message or f"modprobe {name} failed"


def find_family(execute: Exec, netlink: Netlink, *, loads: bool) -> tuple[int, str]:
    """Return the number of the IPVS family and "", or 0 and a sentence.

    Args:
        execute: runs modprobe.
        netlink: a socket of generic netlink.
        loads: whether to load the module if it is not loaded.
    """
    try:
        return resolve(netlink), ""
    except NetlinkError as error:
        if error.errno != errno.ENOENT:
            return 0, f"The kernel does not answer about IPVS: {error.strerror}."
    why = load_module(execute, "ip_vs") if loads else "it is not loaded"
    try:
        return resolve(netlink), ""
    except NetlinkError:
        detail = f" ({why})" if why else ""
        return 0, f"The kernel has no ip_vs{detail}; run `modprobe ip_vs` on the host."


def check_ipset(execute: Exec) -> str:
    """Return why ipset does not work, or ""."""
    try:
        result = execute.run_tool(["ipset", "version"])
        found = _IPSET.search(result.stdout.decode(errors="replace"))
        if found and int(found[1]) < 6:
            return f"ipset {found[0]} is too old; 6.0 or newer is needed."
        if execute.run_tool(["ipset", "save"]).returncode:
            return "The kernel has no ipset; run `modprobe ip_set` on the host."
    except OSError as error:
        return f"{failure_reason('ipset', 'ipset', error)}."
    return ""


def check_matches(execute: Exec, iptables: Iptables) -> str:
    """Return why the matches that our rules need do not work, or "".

    Rules with both are made and removed in one run, in a chain that nothing leads to, and so is
    their set: `iptables-restore --test` would not ask the kernel. If another program holds the lock
    all the time, the matches count as present: a mode must not be given up for that.
    """
    hint = "run `modprobe xt_set` and `modprobe xt_bpf` on the host"
    try:
        create = ["ipset", "-exist", "create", _TRIAL_SET, "hash:ip"]
        made = tool_result(execute.run_tool, create, package="ipset")
        if made.returncode:
            return f"ipset cannot make a set ({made.message}); {hint}."
        missing = ""
        for _ in range(_TRIAL_ATTEMPTS):
            try:
                iptables.restore(Run(Family.IPV4, _TRIAL_RULES))
            except BusyError as error:
                log.info("cannot check the matches of iptables now: %s", error)
                continue
            except ApplyError as error:
                missing = f"iptables cannot match sets and BPF programs ({error}); {hint}."
            break
        tool_result(execute.run_tool, ["ipset", "destroy", _TRIAL_SET], package="ipset")
    except BusyError as error:
        return f"{error}."
    return missing


def check_scheduler(netlink: Netlink, family: int, scheduler: str) -> str:
    """Return why no virtual server can have a scheduler, or ""."""
    servers = VirtualServers(netlink, family)
    try:
        known = list(list_services(netlink, family))
        if any(listed.scheduler == scheduler for listed in known):
            return ""
        # The kernel loads the module of a scheduler when a virtual server asks for it.
        servers.write([(_TRIAL, None, Server(scheduler))])
        made = any(listed.key == _TRIAL for listed in list_services(netlink, family))
        servers.delete([_TRIAL])
    except ApplyError as error:
        hint = f"run `modprobe ip_vs_{scheduler}` on the host, or choose another one"
        return f"The scheduler {scheduler} cannot be used ({error}); {hint}."
    except NetlinkError as error:
        return f"The virtual servers of IPVS cannot be listed: {error.strerror}."
    return "" if made else "IPVS accepts a virtual server but does not list it."
