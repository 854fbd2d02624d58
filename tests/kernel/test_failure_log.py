"""Failing connections are seen where they fail, in each kind of rules; others are not."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from steersman.failover.watch import Failure
from steersman.model.failover import Backend, Observation
from steersman.model.names import Protocol
from steersman.netfilter.failure_log import FailureLog
from tests.support.builders import nftables_plans as make
from tests.support.lab.cluster import Lab
from tests.support.lab.switches import CLIENT, ENDS, NODE, OUTSIDE, mode_of
from tests.support.lab.traced import FRONTENDS, VIP, inside, service_lab, serving

pytestmark = pytest.mark.kernel
RULES = [("iptables", "nft"), ("iptables", "legacy"), ("nftables", "nft")]
END = ENDS[0]
BACKEND = Backend(END, 8080, Protocol.TCP)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with service_lab() as lab:
        yield lab


def firewall(lab: Lab, pod: str, action: str) -> None:
    """Let a pod treat connections to its port in some way."""
    rules = "table inet pod { chain input { type filter hook input priority 0; "
    rules += f"tcp dport 8080 {action}; }}; }}"
    argv = ["nsenter", f"--net={lab.netns(pod).path}", "nft", "-f", "-"]
    subprocess.run(argv, input=rules, text=True, check=True)


def seen(lab: Lab, clients: Callable[[], None], until: Callable[[Failure], bool]) -> list[Failure]:
    """Return the failures that are seen while clients connect, until one is enough or they end."""
    found: list[Failure] = []

    async def watch() -> None:
        log = FailureLog()
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()

        def run() -> None:
            clients()
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=run).start()

        async def follow() -> None:
            while not any(map(until, found)):
                found.extend(await log.receive())

        following = asyncio.create_task(follow())
        try:
            await asyncio.wait(
                [following, asyncio.create_task(ended.wait())],
                return_when=asyncio.FIRST_COMPLETED,
            )
            await ended.wait()
        finally:
            following.cancel()
            log.close()

    inside(lab, watch())
    return found


SERVICE = make.port([0], frontends=FRONTENDS)


@pytest.mark.parametrize(("name", "variant"), RULES)
@pytest.mark.parametrize("source", [CLIENT, "", OUTSIDE])
def test_a_silent_endpoint_is_seen_with_its_client(
    lab: Lab, name: str, variant: str, source: str
) -> None:
    serving(lab, mode_of(lab, name, variant), SERVICE)
    firewall(lab, END, "drop")
    address, port = (NODE, 30080) if source == OUTSIDE else (VIP, 80)
    failures = seen(
        lab,
        lambda: check(lab.probe(source, address, port, timeout=1.6).kind, "silence"),
        lambda failure: failure.backend == BACKEND,
    )
    [first, *_] = failures
    assert first.observation is Observation.SILENT
    assert first.backend == BACKEND
    if source:
        assert first.client == source


def check(kind: str, unexpected: str) -> None:
    assert kind != "answered", unexpected


@pytest.mark.parametrize(("name", "variant"), RULES)
@pytest.mark.parametrize("source", [CLIENT, ""])
@pytest.mark.parametrize(
    ("action", "observation"),
    [
        ("reject with tcp reset", Observation.REFUSED),
        ("reject with icmpx type port-unreachable", Observation.REFUSED),
        ("reject with icmpx type host-unreachable", Observation.UNREACHABLE),
    ],
)
def test_a_refusal_is_seen_at_once(
    lab: Lab, name: str, variant: str, source: str, action: str, observation: Observation
) -> None:
    serving(lab, mode_of(lab, name, variant), SERVICE)
    firewall(lab, END, action)
    failures = seen(
        lab,
        lambda: check(lab.probe(source, VIP, 80, timeout=1.5).kind, "refused"),
        lambda failure: failure.backend == BACKEND,
    )
    assert failures[0].backend == BACKEND
    assert failures[0].observation is observation


@pytest.mark.parametrize(("name", "variant"), RULES)
def test_healthy_connections_and_those_of_others_are_not_seen(
    lab: Lab, name: str, variant: str
) -> None:
    serving(lab, mode_of(lab, name, variant), SERVICE)
    firewall(lab, ENDS[1], "drop")

    def clients() -> None:
        for _ in range(50):
            for source in (CLIENT, ""):
                assert lab.probe(source, VIP, 80).kind == "answered"
        lab.probe(CLIENT, ENDS[1], 8080, timeout=1.5)  # silent, but not through a Service

    assert seen(lab, clients, lambda _: True) == []


def test_a_killed_process_leaves_no_rules(lab: Lab) -> None:
    serving(lab, mode_of(lab, "nftables", "nft"), SERVICE)
    seen(lab, lambda: None, lambda _: True)
    assert "steersman-failures" not in lab.run("nft", "list", "ruleset")
