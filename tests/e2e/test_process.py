"""The process as supervisors, operators and autoscalers meet it; in a network namespace."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from steersman import __version__
from tests.support.apiserver.reading import service
from tests.support.apiserver.server import ApiServer
from tests.support.builders import kube
from tests.support.lab.namespace import in_namespace, sh
from tests.support.processes.steersman import (
    FLAGS,
    NODE,
    Process,
    answers,
    command,
    get,
    in_rules,
    manifests,
    not_in_rules,
    rules,
    steersman,
    world,
)
from tests.support.waiting import until

pytestmark = pytest.mark.kernel

CONFIG = (
    "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
    "conntrack: {maxPerCore: 0}\nclusterCIDR: 10.244.0.0/16\n"
)
KUBE_PROXY = str(Path(sys.executable).with_name("kube-proxy"))


def node(**spec: Any) -> dict[str, Any]:
    return kube.node(NODE, "192.0.2.1", **spec)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_the_first_sync_ends_it_in_order(tmp_path: Path, number: int) -> None:
    async def body() -> None:
        async with ApiServer(world()) as server:  # noqa: SIM117 - the flag needs its URL
            async with steersman(tmp_path, f"--master={server.url}") as proxy:
                await until(lambda: watches(server))  # and no Node that it could start with
                assert await proxy.stop(number) == 0
                assert "stopping; the rules stay in force" in proxy.log.splitlines()[-1]
                assert "KUBE-" not in rules()

    in_namespace(body)


async def watches(server: ApiServer) -> bool:
    return len({request.kind for request in server.requests(verb="watch")}) == 4


@pytest.mark.parametrize("abstract", [False, True], ids=["file", "abstract"])
def test_systemd_is_told_when_the_rules_are_in_force(tmp_path: Path, abstract: bool) -> None:
    """The first sync reached the kernel; and it stops."""
    shown = f"@sm-{tmp_path.name}" if abstract else str(tmp_path / "notify")

    async def body() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
            supervisor.bind(shown.replace("@", "\0"))
            supervisor.settimeout(60)
            through = ("env", f"NOTIFY_SOCKET={shown}")
            folder = manifests(tmp_path / "m", *world())
            async with steersman(tmp_path, f"--manifests={folder}", through=through) as proxy:
                assert await asyncio.to_thread(supervisor.recv, 100) == b"READY=1"
                assert "KUBE-SVC" in rules()
                assert await proxy.stop() == 0
                assert supervisor.recv(100) == b"STOPPING=1"

    in_namespace(body)


def test_sighup_reads_the_configuration_again(tmp_path: Path) -> None:
    """The file is behind a link, as in a ConfigMap: its directory has no event."""

    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        (tmp_path / "data").mkdir()
        file, link = tmp_path / "data" / "config.yaml", tmp_path / "config.yaml"
        link.symlink_to(file)
        file.write_text(CONFIG)
        async with steersman(tmp_path, f"--manifests={folder}", f"--config={link}") as proxy:
            await proxy.said("sync 1 (start)")
            assert "! -s 10.244.0.0/16" in rules()
            file.write_text(CONFIG + "iptables: {masqueradeAll: true}\n")
            proxy.process.send_signal(signal.SIGHUP)
            await proxy.said("applied: iptables.masqueradeAll")
            await until(lambda: not_in_rules("! -s 10.244.0.0/16"))
            file.write_text(CONFIG + "iptables: {masqueradeBit: 99}\n")
            proxy.process.send_signal(signal.SIGHUP)
            await proxy.said("keeping the previous configuration")
            assert await proxy.stop() == 0

    in_namespace(body)


def test_sighup_without_a_file_is_only_said(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        async with steersman(tmp_path, f"--manifests={folder}") as proxy:
            await proxy.said("sync 1 (start)")
            proxy.process.send_signal(signal.SIGUSR1)  # upstream's runtime ignores it, too
            proxy.process.send_signal(signal.SIGHUP)
            await proxy.said("there is no configuration file to reload")
            assert await proxy.stop() == 0

    in_namespace(body)


CRASHING = """
import asyncio, os, sys
from steersman.cli.main import main
from steersman.source.files import FileSource

reading = FileSource.run

async def run(self, sink):
    work = asyncio.ensure_future(reading(self, sink))
    while not os.path.exists({trigger!r}):
        await asyncio.sleep(0.02)
    work.cancel()
    raise ValueError("out of cheese")

FileSource.run = run
sys.exit(main())
"""


@asynccontextmanager
async def crashing(tmp: Path, trigger: Path, *flags: str) -> AsyncIterator[Process]:
    """A steersman whose source raises as soon as a file is there."""
    program = CRASHING.format(trigger=str(trigger))
    with (tmp / "log").open("w") as file:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-c", program, "run", *FLAGS, *flags], stdout=file, stderr=file
        )
    running = Process(process, tmp / "log")
    try:
        yield running
    finally:
        await running.stop(signal.SIGKILL)


def test_a_crash_of_one_task_ends_the_process_and_names_it(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        trigger = tmp_path / "trigger"
        async with crashing(tmp_path, trigger, f"--manifests={folder}") as proxy:
            await proxy.said("sync 1 (start)")
            trigger.touch()
            async with asyncio.timeout(60):
                assert await proxy.process.wait() == 1
            assert "task 'source' crashed: ValueError: out of cheese; the process" in proxy.log
            assert "Traceback" in proxy.log
            last = proxy.log.splitlines()[-1]
            assert last == "steersman: task 'source' crashed: ValueError: out of cheese"
            assert "10.244.0.5:" in rules()

    in_namespace(body)


def test_an_address_that_must_be_bound_and_cannot_be_ends_it(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        flags = (f"--manifests={folder}", "--bind-address-hard-fail")
        with socket.create_server(("127.0.0.1", 10249)):
            async with steersman(tmp_path, *flags) as proxy:
                async with asyncio.timeout(60):
                    assert await proxy.process.wait() == 1
                last = proxy.log.splitlines()[-1]
                assert last.startswith("steersman: metrics: cannot listen on 127.0.0.1:10249: ")
                assert "Traceback" not in proxy.log

    in_namespace(body)


def test_who_must_bind_and_cannot_says_so_by_an_event_before_the_end(tmp_path: Path) -> None:
    async def body() -> None:
        async with ApiServer([*world(), node()]) as server:
            flags = (f"--master={server.url}", "--bind-address-hard-fail")
            with socket.create_server(("127.0.0.1", 10249)):
                async with steersman(tmp_path, *flags) as proxy, asyncio.timeout(60):
                    assert await proxy.process.wait() == 1
            assert "FailedToStartMetricServer" in reasons(server)

    in_namespace(body)


def test_init_only_sets_the_sysctls_and_writes_no_rule(tmp_path: Path) -> None:
    async def body() -> None:
        flags = ("--init-only", "--conntrack-tcp-timeout-established=2h")
        status, _, err = await command("run", *flags, *FLAGS)
        assert (status, "Traceback" in err) == (0, False)
        assert sh("cat /proc/sys/net/netfilter/nf_conntrack_tcp_timeout_established") == "7200\n"
        assert "KUBE-" not in rules()

    in_namespace(body)


def test_cleanup_removes_what_is_ours_and_nothing_else(tmp_path: Path) -> None:
    async def body() -> None:
        folder = manifests(tmp_path / "m", *world())
        async with steersman(tmp_path, f"--manifests={folder}") as proxy:
            await proxy.said("sync 1 (start)")
            await proxy.stop()
        sh("iptables -t nat -A POSTROUTING -s 203.0.113.9 -j ACCEPT; iptables -N MINE")
        status, out, _ = await command("run", "--cleanup", *FLAGS)
        assert status == 0
        assert "kernel objects removed" in out
        left = [line for line in (rules() + rules("filter")).splitlines() if "KUBE-SV" in line]
        assert not left
        assert "-s 203.0.113.9/32 -j ACCEPT" in rules()
        assert ":MINE" in rules("filter")
        again, out, _ = await command("run", "--cleanup", *FLAGS)
        assert (again, "iptables: 0 kernel objects removed" in out) == (0, True)

    in_namespace(body)


def kube_proxy(*words: str) -> str:
    return subprocess.run(
        [KUBE_PROXY, *words], check=True, text=True, capture_output=True, timeout=60
    ).stdout


def test_kube_proxy_says_its_version() -> None:
    assert kube_proxy("--version") == f"steersman {__version__}\n"
    assert kube_proxy("--version=raw") == f"{__version__}\n"


def test_kube_proxy_says_its_flags() -> None:
    text = kube_proxy("--help")
    assert text.startswith("Usage: kube-proxy")
    for flag in ("--config", "--proxy-mode", "--cluster-cidr", "--nodeport-addresses", "--cleanup"):
        assert flag in text


def test_a_new_address_gets_its_node_ports_at_once(tmp_path: Path) -> None:
    async def body() -> None:
        service, slice_ = world()
        service["spec"] |= {
            "type": "NodePort",
            "ports": [{"port": 80, "nodePort": 30080, "protocol": "TCP"}],
        }
        folder = manifests(tmp_path / "m", service, slice_)
        sh("ip addr add 192.0.2.1/24 dev lo")
        flags = (f"--manifests={folder}", "--nodeport-addresses=192.0.2.0/24")
        # Nothing else could bring the rule: no look for drift, no sync unasked.
        async with steersman(tmp_path, *flags, "--iptables-sync-period=1h") as proxy:
            await until(lambda: in_rules("-d 192.0.2.1/32"))
            assert "192.0.2.9" not in rules()
            sh("ip addr add 192.0.2.9/24 dev lo; ip addr add 198.51.100.9/24 dev lo")
            await until(lambda: in_rules("-d 192.0.2.9/32"))
            assert "198.51.100.9" not in rules()
            sh("ip addr del 192.0.2.9/24 dev lo")
            await until(lambda: not_in_rules("192.0.2.9"))
            assert "-d 192.0.2.1/32" in rules()
            assert await proxy.stop() == 0

    in_namespace(body)


def test_waiting_for_the_first_lists_is_no_reason_to_be_restarted(tmp_path: Path) -> None:
    async def body() -> None:
        async with ApiServer([*world(), node()]) as server:
            server.forbidden = frozenset({"EndpointSlice"})
            flags = (f"--master={server.url}", "--iptables-sync-period=100ms")
            async with steersman(tmp_path, *flags) as proxy:
                await proxy.said("Using iptables Proxier")
                await answers("/livez", 10256)
                for number in range(5):  # each waits for longer than may be
                    server.add(service(f"more-{number}", f"10.96.0.{20 + number}"))
                    await asyncio.sleep(0.25)
                    assert (await get("/livez", 10256))[0] == 200
                server.forbidden = frozenset()
                await until(lambda: in_rules("10.244.0.5:"))

    in_namespace(body)


def test_a_node_that_is_to_be_deleted_is_unhealthy_to_load_balancers(tmp_path: Path) -> None:
    async def body() -> None:
        async with ApiServer([*world(), node()]) as server:  # noqa: SIM117 - the flag needs its URL
            async with steersman(tmp_path, f"--master={server.url}"):
                await answers("/healthz", 10256)
                taint = {"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}
                server.add(node(taints=[taint]))
                await answers("/healthz", 10256, status=503)
                await answers("/livez", 10256)  # no reason to restart it
                server.add(node())
                await answers("/healthz", 10256)

    in_namespace(body)


def reasons(server: ApiServer) -> set[str]:
    return {event["reason"] for event in server.events}


def test_the_start_and_a_taken_health_check_port_are_events(tmp_path: Path) -> None:
    async def body() -> None:
        service, slice_ = world()
        service["spec"] |= {
            "type": "LoadBalancer",
            "externalTrafficPolicy": "Local",
            "healthCheckNodePort": 32100,
            "ports": [{"port": 80, "nodePort": 30080, "protocol": "TCP"}],
        }

        async def told() -> bool:
            return reasons(server) >= {"Starting", "FailedToStartServiceHealthcheck"}

        taken = socket.create_server(("0.0.0.0", 32100))
        async with ApiServer([service, slice_, node()]) as server:  # noqa: SIM117
            async with steersman(tmp_path, f"--master={server.url}") as proxy:
                await until(told)
                failed = server.events[-1]
                assert failed["regarding"]["kind"] == "Service"
                assert failed["regarding"]["name"] == "web"
                assert failed["regarding"]["namespace"] == failed["metadata"]["namespace"] == "shop"
                assert failed["type"] == "Warning"
                assert "32100" in failed["note"]
                await answers("/healthz", 10256)
                await until(lambda: in_rules("10.244.0.5:"))
                taken.close()
                server.add({**slice_, "endpoints": [{"addresses": ["10.244.0.6"]}]})
                await answers("/", 32100, status=503)  # listens now; no local endpoint
                assert await proxy.stop() == 0

    in_namespace(body)


def test_refused_events_change_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        async with ApiServer([*world(), node()]) as server:
            server.fault("status", kind="Event", verb="create", status=403, times=-1)
            async with steersman(tmp_path, f"--master={server.url}") as proxy:
                await proxy.said("event Starting could not be posted: 403")
                await until(lambda: in_rules("10.244.0.5:"))
                assert await proxy.stop() == 0

    in_namespace(body)
