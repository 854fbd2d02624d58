"""Which iptables to use: nft or legacy, for which families, and what it can do.

A machine may have both; rules in the one that nobody else uses still work, but nobody sees them
where they look, so the choice follows kubelet's and our own earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from steersman.host.exec import Exec
from steersman.host.process import NEEDS_NET_ADMIN
from steersman.model.names import Family
from steersman.modes.programs import reason

_VERSION = re.compile(r"v(\d+)\.(\d+)(?:\.(\d+))?(?:.*\((\w+)\))?")
_COMMANDS = {"": "iptables", "nft": "iptables-nft", "legacy": "iptables-legacy"}
_KUBELETS = ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY")
"""Chains that kubelet makes in the mangle table of the iptables that it was built for."""
_OURS = ("KUBE-PROXY-CANARY", "KUBE-SERVICES")
_LIST = ("-S", "POSTROUTING")
_BUSY = 4  # exit status
_NO_RIGHT = re.compile(r"you must be root|Permission denied|Operation not permitted")


class Tool(NamedTuple):
    """An iptables of one variant."""

    command: str
    """Name for IPv4 without `-save`, `-restore`."""
    variant: str
    """`nft` or `legacy`."""
    version: tuple[int, int, int]

    def of(self, family: int) -> str:
        """Name of the command for a family."""
        return self.command if family == Family.IPV4 else self.command.replace("ip", "ip6", 1)


class Choice(NamedTuple):
    """What was found."""

    tool: Tool | None
    families: tuple[Family, ...]
    """Those in which it works."""
    missing: tuple[str, ...]
    """What does not work and what to do, a sentence each."""


async def choose(execute: Exec, wanted: str, *, leftovers: bool = False) -> Choice:
    """Find the iptables to use.

    Args:
        execute: runs programs.
        wanted: `nft`, `legacy`, or "" for the one that this machine uses.
        leftovers: it is used only to remove what is left: no table is created by asking.
    """
    tools, problems = await _installed(execute, wanted)
    if not tools:
        what = f"iptables-{wanted}" if wanted else "iptables"
        missing = f"{what} is not installed; install the package iptables."
        return Choice(None, (), tuple(problems) or (missing,))
    problems = []
    for tool in await _by_preference(execute, tools):
        trouble = await _trouble(execute, tool, Family.IPV4, leftovers)
        if trouble:
            problems.append(f"{tool.command} does not work: {trouble}.")
            continue
        lacking = await _trouble(execute, tool, Family.IPV6, leftovers)
        if not lacking:
            return Choice(tool, (Family.IPV4, Family.IPV6), ())
        sentence = f"IPv6 Services are not served: {tool.of(Family.IPV6)}: {lacking}."
        return Choice(tool, (Family.IPV4,), (sentence,))
    return Choice(None, (), tuple(problems))


async def _saved(execute: Exec, argv: Sequence[str]) -> str:
    try:
        return (await execute.run(argv)).stdout.decode(errors="replace")
    except OSError:
        return ""


async def _installed(execute: Exec, wanted: str) -> tuple[list[Tool], list[str]]:
    """List the variants that are installed, the one that `iptables` means first, and problems."""
    found: dict[str, Tool] = {}
    problems: list[str] = []
    for name in dict.fromkeys((_COMMANDS[wanted], *_COMMANDS.values())):
        try:
            tool = await _version(execute, name)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{reason(name, 'iptables', error)}.")
            continue
        if tool and wanted in ("", tool.variant):
            found.setdefault(tool.variant, tool)
    return list(found.values()), problems


async def _version(execute: Exec, command: str) -> Tool | None:
    result = await execute.run([command, "--version"])
    found = _VERSION.search(result.stdout.decode(errors="replace"))
    if result.returncode or not found:
        return None
    major, minor, patch, kind = found.groups()
    variant = "nft" if kind == "nf_tables" else "legacy"  # before 1.8 it is not said
    return Tool(command, variant, (int(major), int(minor), int(patch or 0)))


async def _by_preference(execute: Exec, tools: Sequence[Tool]) -> list[Tool]:
    if len(tools) == 1:
        return list(tools)
    hints = {tool: await _hint(execute, tool) for tool in tools}
    return sorted(tools, key=lambda tool: -hints[tool])


async def _hint(execute: Exec, tool: Tool) -> int:
    """How much says that this variant is in use: 2 for kubelet's chains, 1 for ours."""
    argv = [f"{tool.command}-save"]
    if tool.variant == "nft":
        argv += ["-t", "mangle"]  # asking legacy for a table would create it
    text = await _saved(execute, argv)
    if any(f":{chain} " in text for chain in _KUBELETS):
        return 2
    return int(any(f":{chain} " in text for chain in _OURS))


async def _trouble(execute: Exec, tool: Tool, family: Family, leftovers: bool) -> str:
    """Say why a variant does not work in a family; "" where it does."""
    command = tool.of(family)
    try:
        for argv in ([f"{command}-restore", "--version"], [f"{command}-save", "--version"]):
            if (await execute.run(argv)).returncode:
                return f"{argv[0]} is not installed, install the package iptables"
        look = [f"{command}-save"] if leftovers else [*(command, "-w", "5", "-t", "nat"), *_LIST]
        result = await execute.run(look)
    except OSError as error:
        return reason(str(error.filename or command), "iptables", error).replace(";", ",")
    if _NO_RIGHT.search(result.message):
        return NEEDS_NET_ADMIN
    if result.returncode in (0, _BUSY):  # somebody holds the lock, so it works
        return ""
    return result.message or f"exit status {result.returncode}"
