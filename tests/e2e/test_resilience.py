"""Half an hour of an unlucky control plane, in half a minute: three API servers on one world.

They restart, fail over, change their certificates and what tokens they take, lose their history,
hide EndpointSlices, ask to be left alone, while clocks jump and the proxy itself is restarted. At
the end the kernel has the rules of a fresh start, and the servers' logs show that nobody asked
while it had to wait. Delays are the true ones, in a time that runs 60 times as fast.
"""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import pytest

from steersman.compile.planner import Planner
from steersman.host.exec import Result, SubprocessExec
from steersman.host.facts import read_facts
from steersman.modes.iptables.mode import IptablesMode, create
from steersman.modes.specs import ModeOptions
from steersman.run.sync.runner import Runner
from steersman.run.sync.sync import Sync
from steersman.source.apiserver import ApiServerSource
from steersman.source.credentials import Credentials
from steersman.source.kubeconfig import ClusterAccess, ExecPlugin, Material
from steersman.source.store import Store
from tests.support.apiserver.certificates import Authority
from tests.support.apiserver.chaos import (
    CONFIG,
    SERVICES,
    Chaos,
    same_rules,
    same_world,
    service,
    slice_,
)
from tests.support.apiserver.reading import NODE
from tests.support.apiserver.server import ApiServer, Request
from tests.support.apiserver.world import World
from tests.support.lab.namespace import in_namespace, sh
from tests.support.modes.scripted import OnLoop
from tests.support.processes.fast_clock import SPEED, FastClock
from tests.support.waiting import until

MINUTE = 60.0
KINDS = ("Service", "EndpointSlice", "Node", "ServiceCIDR")
RETRY_AFTER = 40
CLOCK_ERROR = 0.001
"""Real seconds by which a timer of asyncio may be early."""


class Login(OnLoop):
    """An exec plugin: a token and a certificate that expire, both changed at will."""

    def __init__(self, clock: FastClock, authority: Authority) -> None:
        self.clock, self.authority = clock, authority
        self.token = "first"
        self.runs = 0

    async def run(
        self, argv: Sequence[str], stdin: bytes = b"", *, timeout: float = 60.0
    ) -> Result:
        self.runs += 1
        certificate, key = self.authority.issue(f"proxy-{self.token}")
        expires = datetime.fromtimestamp(self.clock.wall() + 10 * MINUTE, UTC)
        status = {
            "token": self.token,
            "clientCertificateData": certificate.decode(),
            "clientKeyData": key.decode(),
            "expirationTimestamp": expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        version = "client.authentication.k8s.io/v1"
        answer = {"apiVersion": version, "kind": "ExecCredential", "status": status}
        return Result(0, json.dumps(answer).encode(), b"")


class ControlPlane:
    """Three servers with TLS on one world."""

    def __init__(self, folder: Path, world: World) -> None:
        self.folder, self.world = folder, world
        self.authority = Authority("first")
        self.ca = folder / "ca.crt"
        self.ca.write_bytes(self.authority.pem)
        self.contexts: list[ssl.SSLContext] = []
        self.servers: list[ApiServer] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[ControlPlane]:
        async with AsyncExitStack() as stack:
            for _ in range(3):
                context = self.authority.server_context(self.folder)
                server = ApiServer(tls=context, world=self.world)
                server.bookmark_seconds = MINUTE / SPEED
                server.tokens = frozenset({"first"})
                self.contexts.append(context)
                self.servers.append(await stack.enter_async_context(server))
            yield self

    def requests(self, kind: str) -> list[Request]:
        found = (request for server in self.servers for request in server.requests(kind))
        return sorted(found, key=lambda request: request.time)

    def drop(self) -> None:
        for server in self.servers:
            server.drop()

    def rotate_authority(self) -> Authority:
        """Trust a second authority, too, and show certificates that it signed."""
        fresh = Authority("second")
        self.ca.write_bytes(self.authority.pem + fresh.pem)
        certificate, key = fresh.issue("apiserver", "127.0.0.1")
        (self.folder / "next.crt").write_bytes(certificate)
        (self.folder / "next.key").write_bytes(key)
        for context in self.contexts:
            context.load_cert_chain(self.folder / "next.crt", self.folder / "next.key")
            context.load_verify_locations(cadata=fresh.pem.decode())
        return fresh


class Resilience(Chaos):
    """What happens to the control plane, and the proxy that lives through it."""

    def __init__(self, plane: ControlPlane, mode: IptablesMode, dice: random.Random) -> None:
        super().__init__(plane.servers[0], mode, dice)
        self.plane = plane
        self.clock = FastClock(dice)
        self.login = Login(self.clock, plane.authority)

    async def start_proxy(self) -> None:
        self.runner = Runner(self._work, 0.01, 0.05, 3600.0)
        self.store = Store(NODE, on_change=self.runner.request, facts=await read_facts())
        self.sync = Sync(self.store, Planner(CONFIG, self.mode.traits), self.mode)
        access = ClusterAccess(
            servers=tuple(server.url for server in self.plane.servers),
            ca=Material(path=str(self.plane.ca)),
            exec_plugin=ExecPlugin("login"),
        )
        credentials = Credentials(access, self._login, self.clock.wall)
        self.source = ApiServerSource(
            access, NODE, timing=self.clock.timing(), credentials=credentials
        )
        self.tasks = [
            asyncio.create_task(self.source.run(self.store)),
            asyncio.create_task(self.runner.run()),
        ]

    def _login(self, environment: Mapping[str, str]) -> Login:
        return self.login

    async def weather(self) -> None:
        """Objects change all the time."""
        while True:
            await self.dice.choice([self.change, self.change, self.remove])()
            await self.clock.sleep(self.dice.uniform(1, 10))

    async def caught_up(self) -> None:
        """Until a change made now has come; Services and slices both."""
        await until(lambda: same_world(self))

    # What happens, in our minutes

    async def fail_over(self) -> None:
        for server in self.plane.servers:
            await server.stop_listening()
            await self.clock.sleep(MINUTE)
            await server.listen_again()

    async def rotate_token(self) -> None:
        """The servers change first; the plugin a minute later."""
        runs = self.login.runs
        for server in self.plane.servers:
            server.tokens = frozenset({"second"})
        self.plane.drop()
        await self.clock.sleep(MINUTE)
        assert not self.source.stats.connected
        self.login.token = "second"
        await until(self.connected)
        assert self.login.runs > runs

    async def rotate_certificates(self) -> None:
        self.login.authority = self.plane.rotate_authority()
        self.plane.drop()
        self.clock.step += 11 * MINUTE  # its own has expired now
        await self.clock.sleep(MINUTE)
        await until(self.connected)

    async def step_clocks(self) -> None:
        for seconds in (3600.0, -7200.0, 30.0):
            self.clock.step += seconds
            self.plane.drop()
            await self.clock.sleep(MINUTE / 2)
            await until(self.connected)

    async def partition(self) -> None:
        """EndpointSlices do not come through, Services do."""
        before = self.slices
        for server in self.plane.servers:
            server.fault("drop", kind="EndpointSlice", times=10)
            server.fault("status", kind="EndpointSlice", status=503, times=-1)
            server.drop("EndpointSlice")
        self.server.add(service(SERVICES, self.dice))
        self.server.add(slice_(SERVICES, self.dice))
        await until(self.has_new_service)
        await self.clock.sleep(3 * MINUTE)
        assert self.slices == before
        for server in self.plane.servers:
            server.clear_faults()

    async def restore(self) -> None:
        """etcd is restored from a backup: resourceVersions start again."""
        self.plane.drop()
        self.server.restore(self.dice)
        await self.clock.sleep(MINUTE)

    async def outage(self) -> None:
        """Every answer is 503 for five minutes; the logs are counted."""
        for server in self.plane.servers:
            server.fault("status", status=503, times=-1)
        self.plane.drop()
        since = time.monotonic()
        await self.clock.sleep(5 * MINUTE)
        asked = [len([r for r in self.plane.requests(k) if r.time > since]) for k in KINDS]
        # 0.25 + 0.5 + ... s at the least: at most 7 in the first 16 s, then one in 15 s.
        assert max(asked) <= 7 + 5 * MINUTE / 15
        assert min(asked[:2]) >= 5  # it does try on, every 45 s at the most
        for server in self.plane.servers:
            server.clear_faults()

    async def leave_alone(self) -> None:
        """429 with a wish for quiet, by one after the other."""
        for server in self.plane.servers:
            server.fault("status", kind="Service", status=429, retry_after=RETRY_AFTER)
        self.plane.drop()
        await self.clock.sleep(3 * MINUTE)
        assert 429 in {status for server in self.plane.servers for _, status in server.refused}
        for server in self.plane.servers:
            server.clear_faults()
        await until(self.connected)

    async def hide(self) -> None:
        """An optional kind is not shown for a while."""
        for server in self.plane.servers:
            server.forbidden = frozenset({"ServiceCIDR"})
            server.drop("ServiceCIDR")
        await self.clock.sleep(MINUTE)
        for server in self.plane.servers:
            server.forbidden = frozenset()

    # Expectations

    @property
    def slices(self) -> set[str]:
        slices = chain.from_iterable(self.store.snapshot.slices.values())
        return {each.metadata.name for each in slices}

    async def connected(self) -> bool:
        return self.source.stats.connected

    async def has_new_service(self) -> bool:
        return f"chaos/s{SERVICES}" in {str(name) for name in self.store.snapshot.services}


def least_wait(failures: int, status: int) -> float:
    """Seconds that have to pass after so many failures in a row, by the documented delays."""
    delay = 0.1 * min(2.0 ** (failures - 1), 30.0)
    return max(delay, RETRY_AFTER) if status == 429 else delay


def asked_too_soon(plane: ControlPlane, kind: str) -> list[str]:
    """Requests that came before the back-off of the one before was over, by the servers' logs.

    403 does not count: a list refused as a stream is requested in pages at once.
    """
    refused = {
        id(request): status for server in plane.servers for request, status in server.refused
    }
    found, failures, earliest = [], 0, 0.0
    for request in plane.requests(kind):
        if request.time < earliest:
            found.append(f"{kind} {request.verb}, {(earliest - request.time) * SPEED:.2f} s early")
        status = refused.get(id(request), 0)
        failures = failures + 1 if status in (401, 429, 503) else 0
        wait = least_wait(failures, status) if failures else 0.0
        earliest = request.time + wait / SPEED - CLOCK_ERROR
    return found


async def live_through(chaos: Resilience) -> None:
    """Each of them, with changes going on; the world is caught up with in between."""
    for event in (
        *(chaos.fail_over, chaos.rotate_token, chaos.step_clocks, chaos.rotate_certificates),
        *(chaos.restore, chaos.outage, chaos.leave_alone, chaos.restart_proxy, chaos.hide),
    ):
        weather = asyncio.create_task(chaos.weather())
        try:
            await event()
        finally:
            weather.cancel()
            await asyncio.gather(weather, return_exceptions=True)
        await chaos.caught_up()
        chaos.happened.add(event.__name__)
    await chaos.partition()
    await chaos.caught_up()


async def run(seed: int, folder: Path) -> None:
    dice = random.Random(seed)
    sh("ip addr add 192.0.2.1/24 dev lo")
    world = World()
    async with ControlPlane(folder, world).running() as plane:
        mode = create(SubprocessExec(), ModeOptions(iptables_variant="nft"))
        chaos = Resilience(plane, mode, dice)
        for number in range(SERVICES):
            world.put(service(number, dice))
            world.put(slice_(number, dice))
        begun = chaos.clock.begun
        await chaos.start_proxy()
        try:
            await chaos.caught_up()
            await live_through(chaos)
            reader = create(SubprocessExec(), ModeOptions(iptables_variant="nft"))
            await until(lambda: same_rules(chaos, reader))
        finally:
            await chaos.kill_proxy()
        assert len(chaos.happened) == 9
        assert (time.monotonic() - begun) * SPEED >= 20 * MINUTE
        assert not [line for kind in KINDS for line in asked_too_soon(plane, kind)]
        assert {r.subject for r in plane.requests("Service")} == {"proxy-first", "proxy-second"}


@pytest.mark.kernel
@pytest.mark.slow
def test_half_an_hour_of_faults_ends_in_the_rules_of_a_fresh_start() -> None:
    with tempfile.TemporaryDirectory() as folder:
        in_namespace(lambda: run(7, Path(folder)))
