"""A node's life: what happens to the cluster and the node, and what fails, as the dice say.

A life is a series of episodes: some calm time with changes, some trouble, then everything is
healed and, after the time that recovery may take, looked at. Canaries are Services that nothing
changes: their traffic must never notice any of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.sim.cluster import ApiServer, Etcd
from tests.sim.netlink import Address
from tests.sim.node import NAME, SERVERS, Node
from tests.sim.objects import NODES, canaries, endpoint, service_of, slice_of, steady, stranger
from tests.sim.oracle import Oracle
from tests.sim.universe import Universe
from tests.support.apiserver.world import Object

NOTHING = {"planned": 0, "rendered": 0, "written": 0, "lines": 0}
ONE_ENDPOINT = {"planned": 1, "rendered": 2, "written": 40, "lines": 3}
"""What may be done for noise, and for a change of one endpoint of one ServicePort. The lines are
that of the sync, that of the Service and one about conntrack."""
_SLACK = 6.0
"""Seconds beside the retry interval that a recovery takes: queues, syncs, latencies."""


class Life:
    """One node in one cluster."""

    def __init__(
        self,
        universe: Universe,
        node: Node,
        hours: float,
        troubles: Sequence[Callable[[Life], None]],
    ) -> None:
        self.universe = universe
        self.dice = universe.dice
        self.node = node
        self.etcd = Etcd()
        self.servers = [ApiServer(universe, self.etcd, at) for at in SERVERS]
        self.oracle = Oracle(universe, self.etcd, node)
        self.hours = hours
        self._troubles = troubles
        self.recovery = 0.0
        """Seconds that recovery from this episode's trouble may take beyond the retry interval."""
        self.heals: list[Callable[[], None]] = []
        self.lasting: list[Callable[[], None]] = []
        """What ends with the next episode, after a look at rest."""
        self.started = 0.0
        self._veths: list[str] = []
        self._pods = self._probes = 0
        self._begin()

    def _begin(self) -> None:
        links = self.node.netlink.links
        links.add("lo", "127.0.0.1/8", "::1/128")
        links.add("eth0", "192.0.2.10/24", "2001:db8::10/64", "fe80::10/64")
        links.add("cni0", "10.244.1.1/24", "fd00:10:244:1::1/64", "fe80::11/64")
        self.put_node()
        ports = [{"name": "dns", "port": 53, "protocol": "UDP", "nodePort": 30990}]
        self.etcd.put(service_of("probe", "probe", 220, type="NodePort", ports=ports))
        ends = [endpoint(f"fd00:10:244:2::{number}", "node-b") for number in (1, 2)]
        self.etcd.put(slice_of("probe", "probe", "probe-6", "IPv6", ends))
        for obj in steady():
            self.etcd.put(obj)
        for service, slices in canaries():
            self.etcd.put(service)
            for each in slices:
                self.etcd.put(each)
        keys = [key for key in self.etcd.objects["Service"] if key[0] == "canary"]
        names = {f"canary/{key[1]}" for key in keys}
        self.oracle.canaries = frozenset(names)
        for number in range(self.dice.randint(2, 10)):
            self.change_service(number)
        if self.dice.random() < 0.02:  # a larger cluster
            self.oracle.crowded = True
            for number in range(300):
                address = f"10.244.2.{1 + number % 250}"
                labels = (f"c{number}", f"c{number}-x")
                self.etcd.put(service_of("crowd", labels[0], 0, 100 + number))
                ends = [endpoint(address, "node-b")]
                self.etcd.put(slice_of("crowd", *labels, "IPv4", ends))
        for server in self.servers:
            server.restart()

    # A life

    def live(self) -> None:
        """Live for so many hours; Violation if something is wrong."""
        self.node.start()
        self.universe.run(60.0)
        self.oracle.protect(reset=True)
        self.node.on_start = self._process_starts
        self.oracle.check()
        until = self.universe.now + self.hours * 3600
        while self.universe.now < until:
            self.episode()

    def episode(self) -> None:
        self.recovery = 0.0
        self.end_lasting()
        self.calm(self.dice.expovariate(1 / 200.0))
        for _ in range(self.dice.choice((0, 1, 1, 2, 3))):
            trouble = self.dice.choice(self._troubles)
            self.universe.note(f"trouble: {trouble.__name__}")
            trouble(self)
            self.calm(self.dice.expovariate(1 / 20.0))
        self.heal()
        if self.dice.random() < 0.5:
            self.calm(self.dice.expovariate(1 / 5.0))
        self.universe.note("rest")
        self.oracle.protect()
        self.universe.run(self.node.period + _SLACK + self.recovery)
        self.oracle.check()
        self.oracle.protect(reset=True)
        if self.dice.random() < 0.3 and not self.oracle.ejects():
            self.probe_costs()
        if self.dice.random() < 0.5:  # a quiet night
            self.universe.run(self.dice.expovariate(1 / (600 * self.hours)))

    def probe_costs(self) -> None:
        """See that noise costs nothing, and that a change costs what it changes.

        Raises:
            Violation: they cost more.
        """
        before = self.oracle.costs()
        for _ in range(20):
            self.dice.choice((self.pods, self.heartbeat, self.idle_slice))()
            self.universe.run(1.0)
        self.universe.run(3.0)
        self.oracle.spent(before, NOTHING, "noise")
        before = self.oracle.costs()
        self.change_probe()
        self.universe.run(5.0)
        self.oracle.spent(before, ONE_ENDPOINT, "one endpoint")

    def change_probe(self) -> None:
        """One Service of two ports gets another endpoint."""
        self._probes += 1
        ends = [endpoint(f"10.244.2.{self._probes % 250 + 1}", "node-b")]
        self.etcd.put(slice_of("probe", "probe", "probe-x", "IPv4", ends))

    def idle_slice(self) -> None:
        """A slice is written again without anything new in it."""
        key = ("canary", "plain-x")
        obj = self.etcd.objects["EndpointSlice"][key]
        notes = {"endpoints.kubernetes.io/last-change-trigger-time": "2027-01-01T00:00:00Z"}
        self.etcd.put({**obj, "metadata": {**obj["metadata"], "annotations": notes}})

    def end_lasting(self) -> None:
        calls, self.lasting = self.lasting, []
        for call in calls:
            call()

    def _process_starts(self) -> None:
        """A new process knows only the Node that there is now."""
        self.started = self.universe.now
        self.oracle.last_node = self.etcd.objects["Node"].get(("", NAME))
        self.oracle.protect()

    def heal(self) -> None:
        self.universe.note("heal")
        self.node.kernel.endpoints.heal()
        heal, self.heals = self.heals, []
        for call in heal:
            call()

    def calm(self, seconds: float) -> None:
        """Let time pass, with the changes that a cluster has."""
        until = self.universe.now + seconds
        while (wait := self.dice.expovariate(1 / 15.0)) < until - self.universe.now:
            self.universe.run(wait)
            for _ in range(self.dice.choice((1, 1, 1, 3, 10))):
                change = self.dice.choice(CHANGES)
                change(self)
            self.oracle.client_comes()
            if self.node.daemon is not None:
                self.node.kernel.endpoints.connect(self.node.daemon.sync.state.plan)
        self.universe.run(max(0.0, until - self.universe.now))

    # Changes of the cluster and the node

    def put_node(self, **more: Any) -> None:
        """Create or replace this node's object."""
        node = {
            "kind": "Node",
            "metadata": {"name": NAME, "labels": {"topology.kubernetes.io/zone": "zone-1"}},
            "spec": {"podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"]},
            "status": {
                "addresses": [
                    {"type": "InternalIP", "address": "192.0.2.10"},
                    {"type": "InternalIP", "address": "2001:db8::10"},
                ]
            },
            **more,
        }
        self.etcd.put(node)
        node = self.etcd.objects["Node"]["", NAME]
        if node["status"].get("addresses"):
            self.oracle.last_node = node
            if self.started:
                self.oracle.protect()

    def heartbeat(self) -> None:
        node = self.etcd.objects["Node"].get(("", NAME))
        if node is not None:
            when = f"{self.universe.now}"
            status = {**node["status"], "conditions": [{"type": "Ready", "last": when}]}
            self.etcd.put({**node, "status": status})

    def change_service(self, number: int | None = None) -> None:
        chosen = self.dice.randrange(14) if number is None else number
        self.etcd.put(stranger(self.dice, chosen))
        if number is not None or self.dice.random() < 0.5:
            self.change_slice(chosen)

    def change_slice(self, number: int | None = None) -> None:
        chosen = self.dice.randrange(14) if number is None else number
        family = self.dice.choice(("IPv4", "IPv4", "IPv6"))
        owner = f"s{chosen}"
        endpoints = [self._endpoint(family) for _ in range(self.dice.choice((0, 1, 2, 3, 8)))]
        name = f"{owner}-{family.lower()}-{self.dice.randrange(2)}"
        self.etcd.put(slice_of("tenant", owner, name, family, endpoints))

    def _endpoint(self, family: str) -> Object:
        number = self.dice.randrange(1, 200)
        address = f"10.244.{1 + number % 3}.{number}"
        if family == "IPv6":
            address = f"fd00:10:244:{1 + number % 3}::{number:x}"
        ready = self.dice.random() < 0.8
        conditions = {
            "ready": ready,
            "serving": ready or self.dice.random() < 0.3,
            "terminating": not ready and self.dice.random() < 0.5,
        }
        return endpoint(address, NODES[number % 3], conditions)

    def delete_something(self) -> None:
        kind = self.dice.choice(("Service", "EndpointSlice", "EndpointSlice"))
        keys = [key for key in self.etcd.objects[kind] if key[0] == "tenant"]
        if keys:
            self.etcd.delete(kind, self.dice.choice(keys))

    def flap(self) -> None:
        """An endpoint goes and comes, a few times."""
        keys = [key for key in self.etcd.objects["EndpointSlice"] if key[0] == "tenant"]
        if keys:
            key = self.dice.choice(keys)
            obj = self.etcd.objects["EndpointSlice"][key]
            for _ in range(self.dice.randint(1, 4)):
                self.etcd.put({**obj, "endpoints": []})
                self.universe.run(self.dice.expovariate(2.0))
                self.etcd.put(obj)

    def pods(self) -> None:
        """Pods come and go, each with a veth."""
        links = self.node.netlink.links
        for _ in range(self.dice.randint(1, 10)):
            if self._veths and self.dice.random() < 0.5:
                links.remove(self._veths.pop(self.dice.randrange(len(self._veths))))
            else:
                self._pods += 1
                name = f"veth{self._pods:x}"
                links.add(name)
                self._veths.append(name)
                address = f"fe80::{self._pods + 256:x}/64"
                self.universe.after(1.5, lambda n=name, a=address: self._dad_done(n, a))  # type: ignore[misc]

    def _dad_done(self, name: str, address: str) -> None:
        if name in self.node.netlink.links.names():
            self.node.netlink.links.add(name, address)

    def addresses(self) -> None:
        """The node gets an address, or loses it."""
        links = self.node.netlink.links
        extra = Address("eth0", "192.0.2.77", 24)
        if extra in links.addresses:
            links.drop(extra)
        else:
            links.add("eth0", "192.0.2.77/24")
        self.oracle.protect()

    def service_cidr(self) -> None:
        spec = {"cidrs": self.dice.choice((["10.96.0.0/16"], ["10.96.0.0/16", "fd00:10:96::/112"]))}
        self.etcd.put({"kind": "ServiceCIDR", "metadata": {"name": "kubernetes"}, "spec": spec})
        self.oracle.protect()


CHANGES: tuple[Callable[[Life], None], ...] = (
    *(Life.change_service, Life.change_slice, Life.change_slice, Life.change_slice),
    *(Life.delete_something, Life.flap, Life.pods, Life.pods, Life.heartbeat, Life.addresses),
    Life.service_cidr,
)
