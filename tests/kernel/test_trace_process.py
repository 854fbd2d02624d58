"""`steersman trace` as a program, beside a running process; and killed while it waits."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from steersman.host.exec import SubprocessExec
from steersman.model.names import Protocol
from steersman.model.tracing import WatchedFlow
from steersman.modes.netfilter_tracer import NetfilterTracer
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import command, manifests, steersman, world
from tests.support.waiting import until

pytestmark = pytest.mark.kernel
LOGGER = Path("/proc/sys/net/netfilter/nf_log/2")
POD = "10.244.0.5"


def an_endpoint() -> None:
    """Give the namespace routes, and the address of an endpoint."""
    sh("ip link add eth0 type bridge && ip link set eth0 up && ip addr add 192.0.2.1/24 dev eth0")
    sh(f"ip route add default dev eth0 && ip addr add {POD}/32 dev lo")


def in_kernel() -> str:
    """The logger of packets, and the tables of traces."""
    tables = [line for line in sh("nft list tables").splitlines() if "steersman-trace" in line]
    return " ".join([LOGGER.read_text().strip(), *tables])


@pytest.mark.parametrize(
    "flags",
    [
        ("--proxy-mode=nftables", "nftables"),
        ("--proxy-mode=iptables", "iptables"),
        ("--proxy-mode=userspace", "userspace"),
    ],
)
def test_the_running_process_is_traced_by_name(flags: tuple[str, str], tmp_path: Path) -> None:
    async def run() -> None:
        an_endpoint()
        files = manifests(tmp_path / "files", *world(POD))
        before = in_kernel()
        server = await asyncio.start_server(lambda _, writer: writer.close(), POD, 8080)
        async with server, steersman(tmp_path, f"--manifests={files}", flags[0]) as proxy:
            answer: dict[str, Any] = {}

            async def works() -> bool:
                status, out, err = await command("trace", "node", "shop/web", "-o", "json")
                assert status != 2 or "no steersman runs" in err or "Traceback" not in err, err
                answer.update(json.loads(out) if out else {})
                return status == 0

            await until(works, 60)
            assert proxy.process.returncode is None
        assert answer["mode"] == flags[1]
        assert answer["endpoint"] == f"{POD}:8080"
        assert answer["differences"] == []
        assert answer["source"].startswith("the running process (pid ")
        assert in_kernel() == before

    in_namespace(run)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_nothing_stays_when_a_trace_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    async def run() -> None:
        an_endpoint()
        sh("iptables-legacy -A FORWARD -j ACCEPT")  # so that the logger is changed, too
        before = in_kernel()
        files = manifests(tmp_path / "files", *world(POD))
        words = ["--manifests", str(files), "--hostname-override=node-a", "--to", "shop/web"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "steersman", "trace", "--wait", "--timeout=5m", *words),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )

        async def traces() -> bool:
            assert process.returncode is None
            return f"table inet steersman-trace-{process.pid}" in in_kernel()

        async def is_as_before() -> bool:
            return in_kernel() == before

        try:
            await until(traces, 60)
            assert in_kernel().startswith("nfnetlink_log ")
            assert not before.startswith("nfnetlink_log")
        finally:
            process.send_signal(number)
            await process.wait()
        await until(is_as_before, 60)

    in_namespace(run)


def test_a_second_trace_of_legacy_rules_is_refused(tmp_path: Path) -> None:
    async def run() -> None:
        an_endpoint()
        sh("iptables-legacy -A FORWARD -j ACCEPT")
        files = manifests(tmp_path / "files", *world(POD))
        words = ["--manifests", str(files), "--hostname-override=node-a", "--to", "shop/web"]
        waiting = asyncio.create_task(command("trace", "--wait", "--timeout=20s", *words))

        async def traces() -> bool:
            return "steersman-trace" in in_kernel()

        await until(traces, 60)
        status, _, err = await command("trace", *words)
        assert status == 2
        assert "another program (ulogd? another trace?) listens to NFLOG group 0" in err
        status, _, err = await waiting
        assert (status, "came within 20 s" in err) == (2, True)

    in_namespace(run)


@pytest.mark.parametrize("tool", ["nft", "ip6tables-legacy", "ip6tables-nft"])
def test_packets_of_ipv6_are_followed(tool: str) -> None:
    async def run() -> None:
        if tool == "nft":
            sh(
                "nft 'table ip6 fw { chain out { type nat hook output priority -100;"
                " tcp dport 98 dnat to [::1]:99; }; }'"
            )
        else:
            sh(f"{tool} -t nat -A OUTPUT -p tcp --dport 98 -j DNAT --to [::1]:99")
        tracer = NetfilterTracer(SubprocessExec(), lambda *_: False)
        server = await asyncio.start_server(lambda _, writer: writer.close(), "::1", 99)
        async with server:
            try:
                await tracer.start(WatchedFlow(Protocol.TCP, "::1", 98))
                _, writer = await asyncio.open_connection("::1", 98)
                flow = await tracer.first_packet()
                steps = await tracer.steps()
                connection = await tracer.connection(flow)
            finally:
                await tracer.aclose()
            assert flow.source == "::1"
            assert flow.source_port == writer.get_extra_info("sockname")[1]
            writer.close()
        translating = [step for step in steps if step.note == "the destination is now [::1]:99"]
        assert [(step.hook, step.endpoint) for step in translating] == [("output", "[::1]:99")]
        assert "dnat" in translating[0].rule.lower()
        assert connection is not None
        assert (connection.endpoint_port, connection.state) == (99, "replied")

    in_namespace(run)
