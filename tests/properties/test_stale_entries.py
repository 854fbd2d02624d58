"""Flows of UDP in a table that fails in every way: no wrong one stays, no right one goes."""

from __future__ import annotations

import asyncio
import errno
from typing import Any, NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from steersman.model.conntrack import Cleanup, Confirm, Stale, pack_socket
from steersman.model.errors import BusyError
from steersman.model.kube import KubeObject
from steersman.model.names import ObjectName
from steersman.model.plan import FrontendKind, ServicePlan
from tests.support.builders.store import replace_objects, service, slice_
from tests.support.modes.conntrack_world import World
from tests.support.parts import examples

NODE = "192.0.2.1"
NAMES = ("a", "b")
SHARED = ("198.51.100.1", NODE)
ENDPOINTS = ("10.1.0.1", "10.1.0.2", "10.1.0.3")
TARGETS = tuple((ip, port) for ip in ("10.96.0.1", "10.96.0.2", *SHARED) for port in (53, 30001))


class Flow(NamedTuple):
    """Where a client sends to, and who answers."""

    destination: tuple[str, int]
    source: tuple[str, int]


class Node:
    """A node whose conntrack table is a list of flows; all clients go on asking for ever."""

    def __init__(self) -> None:
        self.world = World()
        self.world.stale_entries._tables["conntrack"] = self.delete
        self.flows: dict[tuple[str, int], Flow] = {}
        self.faults: list[str] = []
        self.cut: list[Flow] = []
        """Flows that were right and had to go."""
        self.meanwhile: list[Any] = []
        """What happens during the next passes."""

    def service(self, name: str, external: str, node_port: bool) -> KubeObject:
        port: dict[str, Any] = {"port": 53, "protocol": "UDP"} | (
            {"nodePort": 30001} if node_port else {}
        )
        spec: dict[str, Any] = {"type": "NodePort" if node_port else "ClusterIP", "ports": [port]}
        address = f"10.96.0.{1 + NAMES.index(name)}"
        ips = [external] if external else []
        return service(name, clusterIP=address, externalIPs=ips, **spec)

    # The kernel

    def holder(self, destination: tuple[str, int]) -> ServicePlan | None:
        """The ServicePort that a destination leads to, by the rules in force."""
        plans = self.world.sync.state.plan.services.values()
        by_node_port = None
        for plan in plans:
            for frontend in plan.frontends:
                if (frontend.address, frontend.port) == destination:
                    return plan
                if frontend.kind is FrontendKind.NODE_PORT and (NODE, frontend.port) == destination:
                    by_node_port = plan
        return by_node_port

    def send(self, destination: tuple[str, int]) -> None:
        """A client sends: conntrack decides if it knows it, the rules if not."""
        plan = self.holder(destination)
        ends = plan.reachable if plan and self.world.kernel.kernel else ()
        source = (ends[0].ip, ends[0].port) if ends else destination
        self.flows.setdefault(destination, Flow(destination, source))

    def valid(self, flow: Flow) -> bool | None:
        """Whether a flow is where it should be; None if there is nowhere better."""
        plan = self.holder(flow.destination)
        if plan is None:
            return None if flow.source == flow.destination else False
        name = plan.key.name.object_name
        slices = self.world.store.snapshot.slices.get(name, ())
        ends = {e.addresses[0] for each in slices for e in each.endpoints or () if e.addresses}
        return flow.source in {(ip, 8080) for ip in ends} if ends else None

    async def delete(self, stale: Stale, confirm: Confirm) -> Cleanup:
        fault = self.faults.pop() if self.faults else ""
        if fault == "busy":
            raise BusyError("not now")
        if self.meanwhile:  # between the rules for the listing and the listing
            self.flows.clear()
            await self.step(self.meanwhile.pop())
            await self.step(SEND)
        found = [flow for flow in self.flows.values() if stale.contains(*packed(flow))]
        if fault in ("interrupted", "lost"):
            found = found[: len(found) // 2]
        fresh = await confirm()
        doomed = [flow for flow in found if fresh.contains(*packed(flow))]
        refused = doomed if fault == "refused" else []
        for flow in doomed:
            if self.valid(flow) is True:
                self.cut.append(flow)
            if not refused and self.flows.get(flow.destination) == flow:
                del self.flows[flow.destination]
        if fault == "lost":
            raise OSError(errno.ENOBUFS, "answers were lost")
        return Cleanup(len(doomed) - len(refused), len(refused), fault != "interrupted")

    # What happens

    async def step(self, step: tuple[Any, ...]) -> None:
        store = self.world.store
        match step:
            case ("service", name, external, node_port):
                store.upsert(self.service(name, external, node_port))
            case ("slice", name, ips):
                store.upsert(slice_(f"{name}-x", name, tuple(sorted(ips)), protocol="UDP"))
            case ("delete", kind, name):
                suffix = "-x" if kind == "EndpointSlice" else ""
                store.delete(kind, ObjectName("shop", name + suffix))
            case ("send", *destinations):
                for destination in destinations:
                    self.send(destination)
            case ("flush",):
                self.world.kernel.kernel.clear()
                self.flows.clear()  # all clients are new
                for destination in TARGETS:
                    self.send(destination)
                self.world.sync.suspect()
        self.world.kernel.busy = step == ("busy",)
        try:
            report = await self.world.sync.run()
        except BusyError:
            return
        if report is not None:
            self.world.stale_entries.note(report)

    async def live(self, turns: list[Any]) -> None:
        replace_objects(
            self.world.store, "Service", [self.service(name, SHARED[0], True) for name in NAMES]
        )
        ends = [
            slice_(f"{name}-x", name, (ip,), protocol="UDP")
            for name, ip in zip(NAMES, ENDPOINTS, strict=False)
        ]
        replace_objects(self.world.store, "EndpointSlice", ends)
        task = asyncio.create_task(self.world.stale_entries.run())
        await self.step(SEND)
        for faults, meanwhile, change, seconds in turns:
            await self.step(SEND)
            self.faults += faults
            self.meanwhile += meanwhile
            await self.step(change)
            await self.world.advance(seconds)
        await self.step(("end",))
        while self.world.stale_entries.owed:
            await self.world.advance(60.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def packed(flow: Flow) -> tuple[bytes, bytes]:
    return bytes((17,)) + pack_socket(*flow.destination), pack_socket(*flow.source)


SEND = ("send", *TARGETS)
_names = st.sampled_from(NAMES)
_changes = (
    st.tuples(st.just("service"), _names, st.sampled_from(["", *SHARED]), st.booleans())
    | st.tuples(st.just("slice"), _names, st.sets(st.sampled_from(ENDPOINTS), max_size=2))
    | st.tuples(st.just("delete"), st.sampled_from(["Service", "EndpointSlice"]), _names)
    | st.sampled_from([SEND, ("flush",), ("busy",)])
)
_faults = st.sampled_from(["busy", "lost", "interrupted", "refused"])
_turns = st.tuples(
    st.lists(_faults, max_size=2),
    st.lists(_changes, max_size=1),
    _changes,
    st.sampled_from([0.0, 1.0, 10.0]),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(_turns, max_size=6))
def test_flows_end_where_they_should(turns: list[Any]) -> None:
    node = Node()
    asyncio.run(node.live(turns))
    wrong = [flow for flow in node.flows.values() if node.valid(flow) is False]
    assert (wrong, node.cut) == ([], [])
