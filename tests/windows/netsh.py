"""Plays Windows' netsh for tests/windows/c/netsh.c: it changes interfaces of Linux.

What it prints is written after Microsoft's description of the command, not recorded.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.lab.namespace import sh

PORT = 7777
INTERFACES = {"Ethernet": ("eth0", 4), "vEthernet (HNS Internal NIC)": ("hns0", 22)}
"""Windows' names of interfaces: Linux' name, and the index."""
Answer = tuple[int, Sequence[str]]
WRONG: Answer = (1, ["The filename, directory name, or volume label syntax is incorrect.", ""])


def addresses(interface: str) -> list[tuple[str, int]]:
    """Return the addresses of an interface of Linux and the lengths of their prefixes."""
    links = json.loads(sh(f"ip -json address show dev {interface}"))
    return [(a["local"], a["prefixlen"]) for link in links for a in link["addr_info"]]


class Netsh:
    """Answers commands."""

    def __init__(self, drive: Path) -> None:
        self.calls: list[list[str]] = []
        self.refusals: list[str] = []
        """What it says instead of doing its work, once each."""
        self.processes = 0
        self._drive = drive
        self._batch: list[str] | None = None
        """Commands of `ip`, while a script runs."""
        self._present: dict[str, int] = {}
        """The addresses then, and the lengths of their prefixes."""

    def answer(self, words: list[str]) -> Answer:
        """Do what one command says."""
        if words[:1] == ["-f"]:
            script = words[1].replace("\\", "/").removeprefix("C:/").removeprefix("c:/")
            return 0, self._run_script((self._drive / script).read_text().splitlines())
        self.calls.append(words)
        if self.refusals and words[2] != "show":
            return 1, [self.refusals.pop(0), ""]
        ipv6 = words[1] == "ipv6"
        arguments = dict(word.split("=", 1) for word in words[4:])
        name = arguments.get("interface" if ipv6 else "name")
        if name is not None and name not in INTERFACES:
            return WRONG
        if words[2] == "show":
            lines: list[str] = []
            for each in INTERFACES if name is None else (name,):
                lines += self._shown(each, ipv6=ipv6, all_of_them=name is None)
            return 0, lines
        assert name is not None
        return self._change(words[2], INTERFACES[name][0], ipv6=ipv6, arguments=arguments)

    def _change(self, verb: str, device: str, *, ipv6: bool, arguments: dict[str, str]) -> Answer:
        address, _, length = arguments["address"].partition("/")
        present = dict(addresses(device)) if self._batch is None else self._present
        if verb == "delete":
            if address not in present:
                return 1, ["Element not found.", "", ""]
            self._ip(f"address del {address}/{present.pop(address)} dev {device}")
            return 0, [""]
        assert verb == "add"
        if address in present:
            return 1, ["The object already exists.", "", ""]
        present[address] = int(length or 64) if ipv6 else 32
        assert ipv6 or arguments["mask"] == "255.255.255.255"
        nodad = "nodad" if ipv6 else ""
        self._ip(f"address add {address}/{present[address]} dev {device} {nodad}")
        return 0, [""]

    def _ip(self, words: str) -> None:
        if self._batch is None:
            sh(f"ip {words}")
        else:
            self._batch.append(words)

    def _run_script(self, lines: list[str]) -> list[str]:
        """Do what the lines say, which are all about the interface for Services, by one `ip`."""
        said: list[str] = []
        self._present, self._batch = dict(addresses("hns0")), []
        try:
            for line in lines:
                said += self.answer(split(line))[1]
            subprocess.run(
                ["ip", "-batch", "-"], input="\n".join(self._batch), text=True, check=True
            )
        finally:
            self._batch = None
        return said

    def _shown(self, name: str, *, ipv6: bool, all_of_them: bool) -> list[str]:
        device, index = INTERFACES[name]
        lines = ["", f'Configuration for interface "{name}"', "    DHCP enabled:      No"]
        if ipv6:
            title = "Addr Type  DAD State   Valid Life Pref. Life Address"
            lines = ["", f"Interface {index}: {name}", "", title, "---------  ---------"]
            if not all_of_them:
                lines = []
        for address, length in addresses(device):
            if (":" in address) is not ipv6:
                continue
            scoped = f"{address}%{index}" if address.startswith("fe80") else address
            if not ipv6:
                network = ipaddress.ip_network(f"{address}/{length}", strict=False)
                lines.append(f"    IP Address:                           {address}")
                prefix = f"{network} (mask {network.netmask})"
                lines.append(f"    Subnet Prefix:                        {prefix}")
            elif all_of_them:
                lines.append(f"Manual     Preferred     infinite   infinite {scoped}")
            else:
                lines += ["", f"Address {scoped} Parameters", "DAD State          : Preferred"]
        return [*lines, "    InterfaceMetric:      25", ""]


def split(line: str) -> list[str]:
    """Split a line of a script; a word may have a part in quotes."""
    parts = line.split('"')
    for at in range(1, len(parts), 2):
        parts[at] = parts[at].replace(" ", "\0")
    return [word.replace("\0", " ") for word in "".join(parts).split()]


@asynccontextmanager
async def serving(drive: Path) -> AsyncIterator[Netsh]:
    """Serve in the namespace of this thread; `drive` is what Windows calls C:."""
    netsh = Netsh(drive)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        words = [word.decode() for word in (await reader.read()).split(b"\0")[:-1]]
        netsh.processes += 1
        status, lines = netsh.answer(words)
        writer.write(bytes([status]) + "\r\n".join(lines).encode("cp850", "replace"))
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", PORT, backlog=256)
    async with server:
        yield netsh
