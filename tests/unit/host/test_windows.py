"""The whole process as on Windows, run on Linux: tests/support/processes/windows_child.py."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from steersman.host import facts, windows
from steersman.host.exec import Result
from steersman.host.windows import parse, read_network
from steersman.model.names import Family
from steersman.model.plan import Endpoint
from tests.support.builders import kube
from tests.support.http import free_ports
from tests.support.modes.scripted import OnLoop
from tests.support.modes.userspace_proxy import LOCAL, answering, ask, endpoint
from tests.support.waiting import PATIENCE

VIP, OTHER = "127.0.11.10", "127.0.11.11"
"""Every address of 127.0.0.0/8 can be bound without being added."""
INTERFACE = "vEthernet (HNS Internal NIC)"
NETSH = """#!/bin/sh
echo "$*" >> {state}/calls
mkdir -p {state}/held
if [ "$1" = -f ]; then
  while read -r line; do
    eval "set -- $line"
    "$0" "$@"
  done < "$2"
  exit
fi
[ "$2" = ipv4 ] || exit 0
address=${{6#address=}}
case $3 in
add) touch {state}/held/$address ;;
delete) rm -f {state}/held/$address ;;
show)
  echo
  echo 'Configuration for interface "vEthernet (HNS Internal NIC)"'
  echo '    DHCP enabled:                         No'
  for address in 127.0.9.9 $(ls {state}/held); do
    echo "    IP Address:                           $address"
    echo "    Subnet Prefix:                        $address/32 (mask 255.255.255.255)"
  done
  echo '    InterfaceMetric:                      5000' ;;
esac
"""
LISTED = {
    Family.IPV4: """
Konfiguration der Schnittstelle "Ethernet 2"
    DHCP aktiviert:                          Nein
    IP-Adresse:                              192.0.2.5
    Subnetzpraefix:                          192.0.2.0/24 (Maske 255.255.255.0)
    Standardgateway:                         192.0.2.1
    Gatewaymetrik:                           1
    Schnittstellenmetrik:                    25

Konfiguration der Schnittstelle "vEthernet (HNS Internal NIC)"
    DHCP aktiviert:                          Nein
    IP-Adresse:                              172.20.0.1
    Subnetzpraefix:                          172.20.0.0/16 (Maske 255.255.0.0)
    IP-Adresse:                              10.96.0.10
    Subnetzpraefix:                          10.96.0.10/32 (Maske 255.255.255.255)
    Schnittstellenmetrik:                    5000
""",
    Family.IPV6: """
Schnittstelle 12: Ethernet 2

Adresstyp  DAD-Status  Gueltigkeit  Bevorzugt  Adresse
---------  ----------- ------------ ---------- ------------------------
Manuell    Bevorzugt     infinite   infinite 2001:db8::5
Andere     Bevorzugt     infinite   infinite fe80::1%12
""",
}


def write(folder: Path, to: Endpoint, *addresses: str, port: int) -> None:
    ports = [{"name": "http", "port": port}]
    service = kube.service("web", addresses[0], ports=ports, externalIPs=[*addresses[1:]])
    ends = [{"name": "http", "port": to.port}]
    slice_ = kube.endpoint_slice("web-1", "web", to.ip, ports=ends)
    folder.mkdir(exist_ok=True)
    (folder / ".new").write_text(yaml.safe_dump_all([service, slice_]))
    (folder / ".new").replace(folder / "world.yaml")


@asynccontextmanager
async def on_windows(tmp: Path, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process, with a netsh that keeps its addresses in files."""
    netsh = tmp / "netsh"
    netsh.write_text(NETSH.format(state=tmp))
    netsh.chmod(0o755)
    paths = {
        "PATH": f"{tmp}:{os.environ['PATH']}",
        "TRACE": str(tmp / "modules"),
        "ProgramFiles": str(tmp),
    }
    with (tmp / "log").open("w") as log:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "tests.support.processes.windows_child", "run", *flags],
            env={**os.environ, **paths},
            cwd=Path(__file__).parents[3],
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def answers(said: bytes, address: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        return await ask(port, b"!", address) == said
    return False


def said_in(log: Path) -> str:
    return log.read_text()


async def until_it_answers(
    process: asyncio.subprocess.Process, log: Path, said: bytes, address: str, port: int
) -> None:
    async with asyncio.timeout(PATIENCE):
        while not await answers(said, address, port):
            assert process.returncode is None, said_in(log)
            await asyncio.sleep(0.02)


async def test_the_whole_process_serves_where_linux_is_not(tmp_path: Path) -> None:
    (port, metrics), folder, log = free_ports(2), tmp_path / "m", tmp_path / "log"
    flags = (
        "--proxy-mode=winuserspace",
        f"--manifests={folder}",
        "--hostname-override=win-1",
        f"--metrics-bind-address={LOCAL}:{metrics}",
        "--healthz-bind-address=",
    )
    async with endpoint(answering(b"1")) as one, endpoint(answering(b"2")) as two:
        write(folder, one, VIP, port=port)
        async with on_windows(tmp_path, *flags) as process:
            await until_it_answers(process, log, b"1!", VIP, port)
            write(folder, two, VIP, OTHER, port=port)
            await until_it_answers(process, log, b"2!", OTHER, port)
            assert sorted(p.name for p in (tmp_path / "held").iterdir()) == [VIP, OTHER]
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{LOCAL}:{metrics}/metrics/services") as answer,
            ):
                assert f'steersman_connections_total{{endpoint="{two}"' in await answer.text()
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE):
                assert await process.wait() == 0, log.read_text()
    assert list((tmp_path / "held").iterdir()) == [], "its addresses stayed"
    words = f"interface ipv4 add address name={INTERFACE} address={VIP} mask=255.255.255.255"
    assert words in (tmp_path / "calls").read_text().splitlines()
    modules = (tmp_path / "modules").read_text().split()
    linux = ("netlink", "nlmsg", "rtnetlink", "linux")
    others = ("iptables.mode", "ipvs.mode", "nftables", "ebpf")
    bad = {f"steersman.host.{name}" for name in linux}
    bad |= {f"steersman.modes.{name}" for name in others}
    assert bad.isdisjoint(modules)
    assert "steersman.modes.userspace.windows" in modules
    assert all(name.startswith("steersman") for name in modules), "what only Linux has came back"
    assert "Traceback" not in log.read_text()


class Netsh(OnLoop):
    """Prints its list, by family."""

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        assert argv[3:] == ["show", "addresses"]
        return Result(0, LISTED[Family(int(argv[2][3]))].encode(), b"")


async def test_the_addresses_of_interfaces_are_found_in_any_language(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("INTERFACE_TO_ADD_SERVICE_IP", raising=False)
    facts = await read_network(Netsh())
    assert facts.ipv6
    assert facts.interfaces == {
        "Ethernet 2": ("192.0.2.5/24", "2001:db8::5/64", "fe80::1/64"),
        INTERFACE: ("172.20.0.1/16",),
    }


def test_what_is_before_the_first_interface_is_none() -> None:
    text = "    IP Address: 192.0.2.5\n    Subnet Prefix: 192.0.2.0/24\n"
    assert list(parse(text, Family.IPV4)) == []


async def test_changed_addresses_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netsh = tmp_path / "netsh"
    netsh.write_text(NETSH.format(state=tmp_path).replace("/32", "/24"))
    netsh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(facts, "read_network", windows.read_network)
    monkeypatch.setattr(facts, "address_changes", lambda: windows.address_changes(0.01))
    async with asyncio.timeout(PATIENCE):
        seen = facts.watch_addresses()
        assert (await anext(seen)).interfaces == {INTERFACE: ("127.0.9.9/24",)}
        (tmp_path / "held" / "127.0.9.10").touch()
        latest = await anext(seen)
        assert latest.interfaces == {INTERFACE: ("127.0.9.10/24", "127.0.9.9/24")}
