"""An API server that fails at random, and worlds compared."""

from __future__ import annotations

import asyncio
import errno
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from steersman.compile.planner import Planner, compile_all
from steersman.host.exec import Result, SubprocessExec
from steersman.host.facts import read_facts
from steersman.host.libbpf import call
from steersman.host.netlink import Netlink, NetlinkError
from steersman.model.errors import BusyError
from steersman.model.inputs import NodeConfig
from steersman.model.ruleset import Ruleset, diff
from steersman.modes.base import Mode, release
from steersman.run.sync.runner import Runner
from steersman.run.sync.sync import Sync
from steersman.source.apiserver import ApiServerSource
from steersman.source.kubeconfig import ClusterAccess
from steersman.source.store import Store
from tests.support.apiserver.reading import IMPATIENT, NODE, timing
from tests.support.apiserver.server import ApiServer
from tests.support.apiserver.world import Object
from tests.support.lab.namespace import sh
from tests.support.waiting import until

SERVICES = 12


CONFIG = NodeConfig(node_name=NODE, cluster_cidrs=("10.244.0.0/16",))


def service(number: int, dice: random.Random) -> Object:
    kind = dice.choice(["ClusterIP", "NodePort", "LoadBalancer"])
    ports: Object = {"name": "http", "port": 80, "protocol": dice.choice(["TCP", "UDP"])}
    spec: Object = {"type": kind, "clusterIP": f"10.96.0.{number + 1}", "ports": [ports]}
    status: Object = {}
    if kind != "ClusterIP":
        ports["nodePort"] = 30000 + number
        spec["externalTrafficPolicy"] = dice.choice(["Cluster", "Local"])
    if kind == "LoadBalancer":
        status = {"loadBalancer": {"ingress": [{"ip": f"198.51.100.{number + 1}"}]}}
        spec["loadBalancerSourceRanges"] = dice.choice([[], ["203.0.113.0/24"]])
    if dice.random() < 0.3:
        spec["sessionAffinity"] = "ClientIP"
        spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": 600}}
    meta = {"namespace": "chaos", "name": f"s{number}"}
    return {"kind": "Service", "metadata": meta, "spec": spec, "status": status}


def slice_(number: int, dice: random.Random) -> Object:
    protocol = dice.choice(["TCP", "UDP"])
    return {
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "metadata": {
            "namespace": "chaos",
            "name": f"s{number}-x",
            "labels": {"kubernetes.io/service-name": f"s{number}"},
        },
        "ports": [{"name": "http", "port": 8080, "protocol": protocol}],
        "endpoints": [
            {
                "addresses": [f"10.244.{number}.{last}"],
                "conditions": {"ready": dice.random() < 0.8},
                "nodeName": dice.choice([NODE, "elsewhere"]),
            }
            for last in range(1, dice.randint(1, 5))
        ],
    }


class Chaos:
    """The world, the proxy in it, and what may happen to them."""

    def __init__(
        self,
        server: ApiServer,
        mode: Mode,
        dice: random.Random,
        make: Callable[[], Mode] | None = None,
        flushes: Sequence[str] = (),
    ) -> None:
        """Begin with a mode; `make`: makes another one for each life of the proxy."""
        self.server, self.mode, self.dice = server, mode, dice
        self._make = make
        self._flushes = flushes or FLUSHES
        self.tasks: list[asyncio.Task[None]] = []
        self.happened: set[str] = set()

    async def start_proxy(self) -> None:
        """A new life of the proxy: nothing is known but what the kernel and the server have."""
        await self.mode.worker.do(self.mode.probe)
        self.runner = Runner(self._work, 0.01, 0.05, 3600.0)
        self.store = Store(NODE, on_change=self.runner.request, facts=await read_facts())
        self.sync = Sync(self.store, Planner(CONFIG, self.mode.traits), self.mode)
        source = ApiServerSource(ClusterAccess(servers=(self.server.url,)), NODE, timing=IMPATIENT)
        self.tasks = [
            asyncio.create_task(source.run(self.store)),
            asyncio.create_task(self.runner.run()),
        ]

    async def kill_proxy(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def _work(self) -> None:
        await self.sync.run()

    # What may happen

    async def change(self) -> None:
        number = self.dice.randrange(SERVICES)
        make = self.dice.choice([service, slice_])
        self.server.add(make(number, self.dice))

    async def remove(self) -> None:
        number = self.dice.randrange(SERVICES)
        kind, name = self.dice.choice(
            [("Service", f"s{number}"), ("EndpointSlice", f"s{number}-x")]
        )
        self.server.delete(kind, name, "chaos")

    async def drop_watches(self) -> None:
        self.server.drop(self.dice.choice(["", "Service", "EndpointSlice"]))

    async def forget_history(self) -> None:
        self.server.expire()

    async def restart_server(self) -> None:
        self.server.restore(self.dice)

    async def server_down(self) -> None:
        await self.server.stop_listening()
        await asyncio.sleep(self.dice.random() * 0.3)
        await self.server.listen_again()

    async def faults(self) -> None:
        what: dict[str, Any] = self.dice.choice(FAULTS)
        self.server.fault(**what)

    async def stall(self) -> None:
        self.server.stall()
        await asyncio.sleep(self.dice.random())
        self.server.stall(False)
        self.server.drop()

    async def flush(self) -> None:
        command = self.dice.choice(self._flushes)
        await asyncio.to_thread(sh, f"{command} 2>/dev/null || true")

    async def check(self) -> None:
        with suppress(BusyError):
            await self.sync.check()

    async def restart_proxy(self) -> None:
        await self.kill_proxy()
        if self._make is not None:
            await release(self.mode)
            self.mode = self._make()
        await self.start_proxy()

    async def lack_memory(self) -> None:
        """The kernel has no memory for some of what is asked of it, for a while."""
        with no_memory(random.Random(self.dice.random())):  # threads ask it, in any order
            await self.change()
            await asyncio.sleep(self.dice.random() * 0.3)


FAULTS: list[dict[str, Any]] = [
    {"what": "status", "status": 500},
    {"what": "status", "status": 503, "retry_after": 1},
    {"what": "status", "status": 429, "retry_after": 1},
    {"what": "status", "status": 410},
    {"what": "status", "status": 403, "times": 3},
    {"what": "error_event", "status": 410},
    *({"what": what} for what in ("truncate", "html", "drop", "empty", "wrong_kind", "end")),
]


FLUSHES = (
    "iptables -w 5 -F",
    "iptables -w 5 -t nat -F",
    "iptables -w 5 -t nat -F KUBE-SERVICES",
    "iptables -w 5 -t nat -D PREROUTING 1",
    "iptables -w 5 -t nat -A KUBE-SERVICES -d 203.0.113.9 -j RETURN",
    "printf '*filter\\n:FORWARD ACCEPT [0:0]\\n-A FORWARD -s 192.0.2.7 -j DROP\\nCOMMIT\\n' "
    "| iptables-restore -w 5",
)


async def same_world(chaos: Chaos) -> bool:
    """Whether the Store has what the server has, and the proxy has synced it."""
    snapshot = chaos.store.snapshot
    services = {str(name) for name in snapshot.services}
    slices = {each.metadata.name for of in snapshot.slices.values() for each in of}
    told = {o["metadata"]["name"] for o in chaos.server.objects("EndpointSlice")}
    wanted = {f"chaos/{o['metadata']['name']}" for o in chaos.server.objects("Service")}
    return chaos.store.synced and services == wanted and slices == told


_NEED_MEMORY = ("bpf_map_create", "bpf_map_update_elem", "bpf_map_update_batch", "bpf_link_create")


@contextmanager
def no_memory(dice: random.Random) -> Iterator[None]:
    """Have every third write fail for lack of memory: of netlink, of bpf maps, and of programs."""
    send, run = Netlink._send, SubprocessExec.run_tool

    def refuses() -> bool:
        return dice.random() < 1 / 3

    def sending(self: Netlink, requests: Any) -> int:
        if refuses():
            raise NetlinkError(errno.ENOMEM, "the kernel refused: Cannot allocate memory")
        return send(self, requests)

    def calling(name: str, *arguments: object) -> int:
        if name in _NEED_MEMORY and refuses():
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return call(name, *arguments)

    def running(self: SubprocessExec, *given: Any, **more: Any) -> Result:
        if refuses():
            return Result(-signal.SIGKILL, b"", b"")  # as the OOM killer leaves it
        return run(self, *given, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Netlink, "_send", sending)
        patch.setattr("steersman.modes.ebpf.bpf.call", calling)
        patch.setattr(SubprocessExec, "run_tool", running)
        yield


async def same_rules(chaos: Chaos, reader: Mode | None = None) -> bool:
    """Whether, after a look for drift, the kernel has just what a fresh start would write.

    Another mode reads the kernel, if one is given: it knows nothing that it has not read.
    """
    with suppress(BusyError):
        await chaos.sync.check()
    if reader is None:
        want = await fresh_rules(chaos, chaos.mode)
        return not diff(await chaos.mode.worker.do(chaos.mode.read), want)
    reader.probe()
    want = await fresh_rules(chaos, reader)
    return not diff(reader.read(), want)


async def fresh_rules(chaos: Chaos, mode: Mode) -> Ruleset:
    """What a mode writes at a fresh start in the world of now."""
    fresh = Store(NODE)
    async with ApiServer() as other:
        other.load(o for kind in ("Service", "EndpointSlice") for o in chaos.server.objects(kind))
        reading = asyncio.create_task(
            ApiServerSource(ClusterAccess(servers=(other.url,)), NODE, timing=timing()).run(fresh)
        )
        await until(lambda: _is_synced(fresh))
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    plan = compile_all(fresh.snapshot, CONFIG, await read_facts(), mode.traits)
    want = dict(mode.render_node(plan.settings))
    for service_plan in plan.services.values():
        want.update(mode.render_service(service_plan, plan.settings))
    return want


async def _is_synced(store: Store) -> bool:
    return store.synced
