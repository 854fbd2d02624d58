"""The iptables programs of this machine: which variant to use, save, restore, failures.

A machine may have both iptables-nft and iptables-legacy. The kernel obeys rules of either, but
operators look into one only. So the choice follows kubelet, or our own earlier choice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias

from steersman.host.exec import Exec, Result, failure_reason, tool_result
from steersman.host.files import lock_holder
from steersman.host.process import NEEDS_NET_ADMIN
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Family
from steersman.netfilter.iptables.names import command_of
from steersman.netfilter.iptables.restore import Run
from steersman.netfilter.nft.tables import existing_chains, lookup_trouble

_VERSION = re.compile(r"v(\d+)\.(\d+)(?:\.(\d+))?(?:.*\((\w+)\))?")
_COMMANDS = {"": "iptables", "nft": "iptables-nft", "legacy": "iptables-legacy"}
_KUBELET_CHAINS = (("mangle", "KUBE-IPTABLES-HINT"), ("mangle", "KUBE-KUBELET-CANARY"))
"""Tables and names of chains that kubelet creates in the variant that it uses."""
_PROXY_CHAINS = (("mangle", "KUBE-PROXY-CANARY"), ("nat", "KUBE-SERVICES"))
_WAIT = ("-w", "5")
"""Options that wait for the lock of iptables-legacy: 5 s."""
_TIMEOUT = 125.0
"""Seconds in which iptables must have ended."""
_LIST_NAT = (*_WAIT, "-t", "nat", "-S", "POSTROUTING")
_NOT_PERMITTED = re.compile(r"you must be root|Permission denied|Operation not permitted")

_RESOURCE_PROBLEM = 4
"""Exit status of iptables if the lock is held or memory is short."""
_OBJECT_REFUSED = re.compile(r"[A-Z]+_[A-Z_]+ failed \((?!Resource temp|Cannot alloc|No buffer)")
"""iptables-nft also exits with 4 if the kernel rejected an object; then it names the operation."""
_SAVED_CHAIN = re.compile(r"^:(\S+) ", re.MULTILINE)
_BAD_LINE = re.compile(r"line:? (\d+)")
LOCK = "/run/xtables.lock"
"""The file that iptables-legacy locks while it reads and writes rules."""


NftChains: TypeAlias = Callable[[Iterable[tuple[str, str]], Family], list[str]]


class Tool(NamedTuple):
    """An installed iptables of one variant."""

    command: str
    """Name of the IPv4 command, without `-save` and `-restore`."""
    variant: str
    """`nft` or `legacy`."""
    version: tuple[int, int, int]

    def of(self, family: int) -> str:
        """Return the name of the command for a family."""
        return command_of(self.command, family)

    def save_of(self, family: int) -> str:
        """Return the name of the program that lists all rules of a family."""
        return f"{self.of(family)}-save"

    @property
    def random_fully(self) -> bool:
        """Whether MASQUERADE has --random-fully."""
        return self.version >= (1, 6, 2)


class ToolChoice(NamedTuple):
    """The iptables to use, if any works."""

    tool: Tool | None
    families: tuple[Family, ...]
    """Families in which it works."""
    missing: tuple[str, ...]
    """Problems and their remedies, a sentence each."""


def choose_tool(
    execute: Exec,
    wanted: str,
    *,
    leftovers: bool = False,
    nft_chains: NftChains = existing_chains,
) -> ToolChoice:
    """Find the iptables to use.

    Args:
        execute: runs programs.
        wanted: `nft`, `legacy`, or "" for this machine's default.
        leftovers: only to remove leftovers: do not create a table by listing it.
        nft_chains: returns the names of those chains of nf_tables that are there.

    Raises:
        BusyError: with `leftovers`, a program that is installed did not end in time.
    """
    tools, problems = _installed(execute, wanted)
    if not tools:
        what = f"iptables-{wanted}" if wanted else "iptables"
        missing = f"{what} is not installed; install the package iptables."
        return ToolChoice(None, (), tuple(problems) or (missing,))
    if len(tools) > 1:
        in_use = {tool: _in_use(execute, tool, nft_chains) for tool in tools}
        tools.sort(key=lambda tool: -in_use[tool])

    # Take the first that works for IPv4; IPv6 is optional.
    problems = []
    for tool in tools:
        trouble = _trouble(execute, tool, Family.IPV4, leftovers)
        if trouble:
            problems.append(f"{tool.command} does not work: {trouble}.")
            continue
        lacking = _trouble(execute, tool, Family.IPV6, leftovers)
        if not lacking:
            return ToolChoice(tool, (Family.IPV4, Family.IPV6), ())
        sentence = f"IPv6 Services are not served: {tool.of(Family.IPV6)}: {lacking}."
        return ToolChoice(tool, (Family.IPV4,), (sentence,))
    return ToolChoice(None, (), tuple(problems))


def _installed(execute: Exec, wanted: str) -> tuple[list[Tool], list[str]]:
    """List the installed variants, the default one first, and problems."""
    found: dict[str, Tool] = {}
    problems: list[str] = []
    for command in dict.fromkeys((_COMMANDS[wanted], *_COMMANDS.values())):
        try:
            result = execute.run_tool([command, "--version"])
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{failure_reason(command, 'iptables', error)}.")
            continue
        version = _VERSION.search(result.stdout.decode(errors="replace"))
        if result.returncode or not version:
            continue
        major, minor, patch, kind = version.groups()
        variant = "nft" if kind == "nf_tables" else "legacy"  # before 1.8 there is only legacy
        if wanted in ("", variant):
            tool = Tool(command, variant, (int(major), int(minor), int(patch or 0)))
            found.setdefault(variant, tool)
    return list(found.values()), problems


def _in_use(execute: Exec, tool: Tool, nft_chains: NftChains) -> int:
    """Rate the signs that a variant is in use: 2 for kubelet's chains, 1 for ours, 0 for none."""
    try:
        if tool.variant == "nft":  # iptables-nft would read all rules of all tables
            found = nft_chains((*_KUBELET_CHAINS, *_PROXY_CHAINS), Family.IPV4)
        else:
            saved = execute.run_tool([tool.save_of(Family.IPV4)]).stdout.decode(errors="replace")
            found = _SAVED_CHAIN.findall(saved)
    except OSError:
        return 0
    if any(chain in found for _, chain in _KUBELET_CHAINS):
        return 2
    return int(any(chain in found for _, chain in _PROXY_CHAINS))


def _trouble(execute: Exec, tool: Tool, family: Family, leftovers: bool) -> str:
    """Return why a variant does not work in a family, or ""."""
    command = tool.of(family)
    try:
        for argv in ([f"{command}-restore", "--version"], [f"{command}-save", "--version"]):
            if execute.run_tool(argv).returncode:
                return f"{argv[0]} is not installed, install the package iptables"
        if leftovers and tool.variant == "nft":
            return lookup_trouble(family)
        # iptables-legacy creates a table that it is told to list, but not if it lists all.
        look = [f"{command}-save"] if leftovers else [command, *_LIST_NAT]
        result = execute.run_tool(look)
    except OSError as error:
        if leftovers and isinstance(error, TimeoutError):
            raise BusyError(f"{error}: it begins again whenever a rule changes") from error
        reason = failure_reason(str(error.filename or command), "iptables", error)
        return reason.replace(";", ",")
    if _NOT_PERMITTED.search(result.message):
        return NEEDS_NET_ADMIN
    if result.returncode in (0, _RESOURCE_PROBLEM):  # another process holds the lock: it works
        return ""
    return result.message or f"exit status {result.returncode}"


class Iptables:
    """Runs iptables-save and iptables-restore of one variant."""

    def __init__(self, execute: Exec, tool: Tool) -> None:
        """Create a runner."""
        self.tool = tool
        self._execute = execute

    def save(self, family: int) -> str:
        """Return all tables as iptables-save prints them.

        Raises:
            BusyError: they cannot be read.
        """
        command = self.tool.save_of(family)
        result = self._run([command])
        if result.returncode:
            raise BusyError(f"{command}: {_message(result)}")
        return result.stdout.decode(errors="replace")

    def restore(self, run: Run) -> int:
        """Write rules; chains that the text does not name stay as they are.

        Returns:
            The process ID of the program that did it.

        Raises:
            ApplyError: a line was rejected.
            BusyError: the lock is held, or memory is short.
        """
        command = f"{self.tool.of(run.family)}-restore"
        argv = [command, *_WAIT, "--noflush", "--counters"]
        result = self._run(argv, run.text.encode())
        if not result.returncode:
            return result.pid
        message = _message(result)
        if "xtables lock" in message:
            path = os.environ.get("XTABLES_LOCKFILE", LOCK)
            holder = lock_holder(Path(path))
            raise BusyError(f"{command}: the xtables lock {path} is held{holder}")
        if result.returncode == _RESOURCE_PROBLEM and not _OBJECT_REFUSED.search(message):
            raise BusyError(f"{command}: {message}")
        if bad := _BAD_LINE.search(message):
            lines, number = run.text.split("\n"), int(bad[1])
            # iptables-legacy names the COMMIT, whichever line the kernel rejected
            if 0 < number <= len(lines) and lines[number - 1] != "COMMIT":
                message += f": {lines[number - 1]}"
        raise ApplyError(f"{command}: {message}")

    def knows_nfacct(self, family: int) -> bool:
        """Return whether iptables has `-m nfacct`; its help text touches no table."""
        return not self._run([self.tool.of(family), "-m", "nfacct", "-h"]).returncode

    def _run(self, argv: Sequence[str], stdin: bytes = b"") -> Result:
        return tool_result(
            self._execute.run_tool, argv, stdin, package="iptables", timeout=_TIMEOUT
        )


def _message(result: Result) -> str:
    return result.message or f"exit status {result.returncode}"


def legacy_tables(
    families: Iterable[Family], proc: Path = Path("/proc")
) -> dict[Family, list[str]]:
    """Return the tables of iptables-legacy, in the network namespace of this thread.

    Raises:
        OSError: they cannot be listed.
    """
    found: dict[Family, list[str]] = {}
    for family in families:
        name = "ip_tables_names" if family is Family.IPV4 else "ip6_tables_names"
        with suppress(FileNotFoundError):  # the module is not loaded
            found[family] = (proc / "thread-self/net" / name).read_text().split()
    return found


def legacy_left(families: Iterable[Family], proc: Path = Path("/proc")) -> str:
    """Return a sentence about tables of iptables-legacy, whose rules only it can list, or ""."""
    try:
        tables = sorted({*chain.from_iterable(legacy_tables(families, proc).values())})
    except PermissionError:
        return f"looking for tables {NEEDS_NET_ADMIN}"
    except OSError as error:
        return f"tables cannot be listed: {error.strerror}"
    return f"rules may be left in the tables {', '.join(tables)}" if tables else ""
