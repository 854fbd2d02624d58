"""Which iptables to use: nft or legacy, for which families, and what it can do.

A machine may have both; rules in the one that nobody else uses still work, but nobody sees them
where they look, so the choice follows kubelet's and our own earlier one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from steersman.host.exec import Exec
from steersman.model.names import Family

_VERSION = re.compile(r"v(\d+)\.(\d+)(?:\.(\d+))?(?:.*\((\w+)\))?")
_COMMANDS = {"": "iptables", "nft": "iptables-nft", "legacy": "iptables-legacy"}
_KUBELETS = ("KUBE-IPTABLES-HINT", "KUBE-KUBELET-CANARY")
"""Chains that kubelet makes in the mangle table of the iptables that it was built for."""
_OURS = ("KUBE-PROXY-CANARY", "KUBE-SERVICES")
_KUBERNETES = "\n:KUBE-"


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


async def choose(execute: Exec, wanted: str) -> Choice:
    """Find the iptables to use.

    Args:
        execute: runs programs.
        wanted: `nft`, `legacy`, or "" for the one that this machine uses.
    """
    tools = await _installed(execute, wanted)
    if not tools:
        what = f"iptables-{wanted}" if wanted else "iptables"
        return Choice(None, (), (f"{what} is not installed; install the package iptables.",))
    problems: list[str] = []
    for tool in await _by_preference(execute, tools):
        trouble = await _trouble(execute, tool, Family.IPV4)
        if trouble:
            problems.append(f"{tool.command} does not work: {trouble}.")
            continue
        lacking = await _trouble(execute, tool, Family.IPV6)
        if not lacking:
            return Choice(tool, (Family.IPV4, Family.IPV6), ())
        sentence = f"IPv6 Services are not served: {tool.of(Family.IPV6)}: {lacking}."
        return Choice(tool, (Family.IPV4,), (sentence,))
    return Choice(None, (), tuple(problems))


async def variants_in_use(execute: Exec) -> tuple[str, ...]:
    """Find the variants that hold chains of Kubernetes, without creating a table by asking."""
    in_use = []
    for tool in await _installed(execute, ""):
        texts = [await _saved(execute, [f"{tool.of(family)}-save"]) for family in Family]
        if any(_KUBERNETES in text for text in texts):
            in_use.append(tool.variant)
    return tuple(in_use)


async def _saved(execute: Exec, argv: Sequence[str]) -> str:
    try:
        return (await execute.run(argv)).stdout.decode(errors="replace")
    except OSError:
        return ""


async def _installed(execute: Exec, wanted: str) -> list[Tool]:
    """List the variants that are installed, the one that `iptables` means first."""
    found: dict[str, Tool] = {}
    for name in dict.fromkeys((_COMMANDS[wanted], *_COMMANDS.values())):
        tool = await _version(execute, name)
        if tool and wanted in ("", tool.variant):
            found.setdefault(tool.variant, tool)
    return list(found.values())


async def _version(execute: Exec, command: str) -> Tool | None:
    try:
        result = await execute.run([command, "--version"])
    except FileNotFoundError:
        return None
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


async def _trouble(execute: Exec, tool: Tool, family: Family) -> str:
    """Say why a variant does not work in a family; "" where it does."""
    command = tool.of(family)
    try:
        for argv in ([f"{command}-restore", "--version"], [f"{command}-save", "--version"]):
            if (await execute.run(argv)).returncode:
                return f"{argv[0]} is not installed, install the package iptables"
        result = await execute.run([command, "-w", "5", "-t", "nat", "-S", "POSTROUTING"])
    except FileNotFoundError as error:
        return f"{error.filename or command} is not installed, install the package iptables"
    if result.returncode in (0, 4):  # 4: somebody holds the lock, so it works
        return ""
    return result.message or f"exit status {result.returncode}"
