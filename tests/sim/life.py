"""A node's life: what happens to the cluster and the node, and what fails, as the dice say.

A life is a series of episodes: some calm time with changes, some trouble, then everything is
healed and, after the time that recovery may take, looked at. Canaries are Services that nothing
changes: their traffic must never notice any of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.apiserver_world import Object
from tests.sim.cluster import ApiServer, Etcd, Fault
from tests.sim.kernel import Fault as KernelFault
from tests.sim.netlink import Address
from tests.sim.node import HEALTH, NAME, SERVERS, Node
from tests.sim.oracle import Oracle
from tests.sim.universe import Universe

NOTHING = {"planned": 0, "rendered": 0, "written": 0, "lines": 0}
ONE_ENDPOINT = {"planned": 1, "rendered": 2, "written": 40, "lines": 2}
"""What may be done for noise, and for a change of one endpoint of one ServicePort."""
NODES = (NAME, "node-b", "node-c")
_READY = {"ready": True, "serving": True, "terminating": False}
_SLACK = 6.0
"""Seconds beside the retry interval that a recovery takes: queues, syncs, latencies."""


class Life:
    """One node in one cluster."""

    def __init__(self, universe: Universe, node: Node, hours: float) -> None:
        self.universe = universe
        self.dice = universe.dice
        self.node = node
        self.etcd = Etcd()
        self.servers = [ApiServer(universe, self.etcd, at) for at in SERVERS]
        self.oracle = Oracle(universe, self.etcd, node)
        self.hours = hours
        self.recovery = 0.0
        """Seconds that recovery from this episode's trouble may take beyond the retry interval."""
        self._heal: list[Callable[[], None]] = []
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
        for service, slices in canaries():
            self.etcd.put(service)
            for each in slices:
                self.etcd.put(each)
        keys = [key for key in self.etcd.objects["Service"] if key[0] == "canary"]
        names = {f"canary/{key[1]}" for key in keys}
        self.oracle.canaries = frozenset(names)
        for number in range(self.dice.randint(2, 10)):
            self.change_service(number)
        for server in self.servers:
            server.restart()

    # A life

    def live(self) -> None:
        """Live for so many hours; Violation if something is wrong."""
        self.node.start()
        self.universe.run(60.0)
        self.oracle.protect(anew=True)
        self.node.on_start = self.oracle.protect
        self.oracle.check()
        until = self.universe.now + self.hours * 3600
        while self.universe.now < until:
            self.episode()

    def episode(self) -> None:
        self.recovery = 0.0
        self._calm(self.dice.expovariate(1 / 200.0))
        for _ in range(self.dice.choice((0, 1, 1, 2, 3))):
            trouble = self.dice.choice(TROUBLES)
            self.universe.note(f"trouble: {trouble.__name__}")
            trouble(self)
            self._calm(self.dice.expovariate(1 / 20.0))
        self.heal()
        if self.dice.random() < 0.5:
            self._calm(self.dice.expovariate(1 / 5.0))
        self.universe.note("rest")
        self.oracle.protect()
        self.universe.run(self.node.period + _SLACK + self.recovery)
        self.oracle.check()
        self.oracle.protect(anew=True)
        if self.dice.random() < 0.3:
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

    def heal(self) -> None:
        self.universe.note("heal")
        heal, self._heal = self._heal, []
        for call in heal:
            call()

    def _calm(self, seconds: float) -> None:
        """Let time pass, with the changes that a cluster has."""
        until = self.universe.now + seconds
        while (wait := self.dice.expovariate(1 / 15.0)) < until - self.universe.now:
            self.universe.run(wait)
            for _ in range(self.dice.choice((1, 1, 1, 3, 10))):
                change = self.dice.choice(CHANGES)
                change(self)
            self.oracle.client_comes()
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
        self.oracle.facts()
        spec = {"cidrs": self.dice.choice((["10.96.0.0/16"], ["10.96.0.0/16", "fd00:10:96::/112"]))}
        self.etcd.put({"kind": "ServiceCIDR", "metadata": {"name": "kubernetes"}, "spec": spec})
        self.oracle.protect()


CHANGES: tuple[Callable[[Life], None], ...] = (
    *(Life.change_service, Life.change_slice, Life.change_slice, Life.change_slice),
    *(Life.delete_something, Life.flap, Life.pods, Life.pods, Life.heartbeat, Life.addresses),
    Life.service_cidr,
)


# Trouble: begins now, ends at the latest when `Life.heal` is called


def kernel_busy(life: Life) -> None:
    fault = KernelFault(life.dice.choice(("apply", "read", "fingerprint")), "busy", 10_000)
    life.node.kernel.faults.append(fault)
    life._heal.append(life.node.kernel.faults.clear)
    life._calm(life.dice.expovariate(1 / 40.0))


def cannot_write(life: Life) -> None:
    """A change waits for too long: the probes must tell, and say when it is over."""
    if life._heal or life.node.process is None:  # what else fails may keep the change from coming
        return
    life.node.kernel.faults.append(KernelFault("apply", "busy", 10_000))
    life._heal.append(life.node.kernel.faults.clear)
    life.change_probe()
    life.universe.run(2 * life.node.period + 5.0)
    if life.node.kernel.counts["apply"]:
        life.oracle.page(HEALTH, "/livez", 503)


def kernel_fails_once(life: Life) -> None:
    ways = ("busy", "refused", "again", "late", "lost", "partly", "partly_refused", "slow")
    for _ in range(life.dice.randint(1, 4)):
        fault = KernelFault("apply", life.dice.choice(ways), life.dice.randint(1, 2))
        life.node.kernel.faults.append(fault)
        life.change_slice()
        life.universe.run(life.dice.expovariate(1 / 10.0))
    life._heal.append(life.node.kernel.faults.clear)


def kernel_reads_fail(life: Life) -> None:
    for operation in ("read", "fingerprint", "probe"):
        what = life.dice.choice(("busy", "again", "slow"))
        life.node.kernel.faults.append(KernelFault(operation, what, life.dice.randint(1, 3)))
    life._heal.append(life.node.kernel.faults.clear)


def poison(life: Life) -> None:
    name = f"tenant/s{life.dice.randrange(14)}"
    life.node.kernel.poison.add(name)
    life._heal.append(life.node.kernel.poison.clear)
    life.change_slice(int(name.removeprefix("tenant/s")))


def strangers(life: Life) -> None:
    """Another program edits our rules."""
    kernel, dice = life.node.kernel, life.dice
    daemon = life.node.daemon
    if daemon is None or not kernel.tables:
        return
    name = max(kernel.tables, key=lambda table: len(kernel.tables[table]))
    kernel.deaf = dice.random() < 0.3

    def vandalize(table: dict[Any, Any]) -> None:
        keys = list(table)
        match dice.randrange(3):
            case 0:
                table.clear()
            case 1:
                for key in dice.sample(keys, min(len(keys), 5)):
                    del table[key]
            case _:
                if len(keys) > 2:
                    one, other = dice.sample(keys, 2)
                    table[one] = table[other]

    kernel.edit(name, vandalize)

    def hear() -> None:
        kernel.deaf = False

    life._heal.append(hear)


def netlink_fails(life: Life) -> None:
    faults = life.node.netlink.faults
    for what in ("emfile", "enobufs", "interrupted", "refused_delete", "lost_news"):
        if life.dice.random() < 0.5:
            faults[what] += life.dice.randint(1, 3)
    life.pods()
    life._heal.append(faults.clear)
    life.recovery = max(life.recovery, 130.0)


def api_answers_badly(life: Life) -> None:
    ways = ("status", "html", "reset", "silence", "truncated", "malformed", "ended", "other_kind")
    for server in life.servers:
        for _ in range(life.dice.randint(1, 3)):
            code = life.dice.choice((401, 403, 404, 410, 429, 500, 503))
            fault = Fault(life.dice.choice(ways), life.dice.randint(1, 3), code=code)
            fault.retry_after = life.dice.choice((0, 1, 20))
            if code == 404:  # what is absent is asked for again five minutes later or so
                life.recovery = max(life.recovery, 480.0)
            server.faults.append(fault)
        server.drop()
        life._heal.append(server.faults.clear)
    life.recovery = max(life.recovery, 120.0)


def api_down(life: Life) -> None:
    for server in life.servers:
        if life.dice.random() < 0.7:
            server.up(False)
            life._heal.append(lambda s=server: s.up(True))  # type: ignore[misc]
    life.recovery = max(life.recovery, 120.0)


def api_silent(life: Life) -> None:
    for server in life.servers:
        if life.dice.random() < 0.7:
            server.silent(True)
            life._heal.append(lambda s=server: s.silent(False))  # type: ignore[misc]
    life.recovery = max(life.recovery, 400.0)


def api_slow(life: Life) -> None:
    server = life.dice.choice(life.servers)
    server.latency, server.delay = life.dice.uniform(0, 5), life.dice.uniform(0, 20)

    def heal() -> None:
        server.latency, server.delay = 0.0, 0.002

    life._heal.append(heal)
    life.recovery = max(life.recovery, 90.0)


def history_lost(life: Life) -> None:
    if life.dice.random() < 0.5:
        life.etcd.compact()
        for server in life.servers:
            life.dice.choice((server.expire, server.drop, server.restart))()
    else:
        life.etcd.restore(life.dice.choice((1, life.etcd.version + 5_000)))
    life.recovery = max(life.recovery, 120.0)


def node_deleted(life: Life) -> None:
    """The Node is deleted by mistake, or loses its addresses; a restart must find it whole."""
    if life.dice.random() < 0.5:
        life.etcd.delete("Node", ("", NAME))
    else:
        node = life.etcd.objects["Node"]["", NAME]
        life.etcd.put({**node, "status": {}})
    life._calm(life.dice.expovariate(1 / 60.0))
    life.put_node()


def clock_steps(life: Life) -> None:
    life.universe.step_wall_clock(life.dice.choice((-86_400.0, -60.0, 60.0, 86_400.0)))


def killed(life: Life) -> None:
    life.universe.run(life.dice.expovariate(20.0))
    life.node.kill()
    life.recovery = max(life.recovery, 60.0)


def terminated(life: Life) -> None:
    life.change_slice()
    life.universe.run(life.dice.expovariate(20.0))
    life.node.terminate()
    life.recovery = max(life.recovery, 60.0)


def reloaded(life: Life) -> None:
    """The configuration changes, is broken for a while, and changes again."""
    node = life.node
    if life.dice.random() < 0.3:
        node.write_config("{ broken")
        life.universe.run(life.dice.expovariate(1 / 10.0))
    masquerade = life.dice.random() < 0.5
    node.document["iptables"]["masqueradeAll"] = masquerade
    node.document["nftables"]["masqueradeAll"] = masquerade
    life.oracle.protect()
    node.write_config()
    life.change_slice()
    life.universe.run(life.dice.expovariate(5.0))


def mode_switch(life: Life) -> None:
    names = ("iptables", "nftables", "ipvs", "ebpf", "userspace")
    node = life.node
    node.mode = life.dice.choice(names)
    node.document["mode"] = node.mode
    node.write_config()
    life.oracle.protected.clear()
    node.terminate()
    life.recovery = max(life.recovery, 300.0)


TROUBLES: tuple[Callable[[Life], None], ...] = (
    *(
        cannot_write,
        kernel_busy,
        kernel_fails_once,
        kernel_fails_once,
        kernel_reads_fail,
        poison,
        strangers,
    ),
    *(netlink_fails, api_answers_badly, api_down, api_silent, api_slow, history_lost),
    *(node_deleted, clock_steps, killed, terminated, reloaded, mode_switch),
)


# Objects


def endpoint(address: str, node: str, conditions: Object | None = None) -> Object:
    return {"addresses": [address], "nodeName": node, "conditions": conditions or _READY}


def slice_of(namespace: str, owner: str, name: str, family: str, endpoints: list[Object]) -> Object:
    labels = {"kubernetes.io/service-name": owner}
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "addressType": family,
        "ports": [
            {"name": "web", "port": 8080, "protocol": "TCP"},
            {"name": "dns", "port": 5353, "protocol": "UDP"},
        ],
        "endpoints": endpoints,
    }


def service_of(namespace: str, name: str, ip: int, **spec: Any) -> Object:
    return {
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace, **spec.pop("metadata", {})},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": f"10.96.0.{ip}",
            "clusterIPs": [f"10.96.0.{ip}", f"fd00:10:96::{ip:x}"],
            "ipFamilies": ["IPv4", "IPv6"],
            "ports": [
                {"name": "web", "port": 80, "protocol": "TCP"},
                {"name": "dns", "port": 53, "protocol": "UDP"},
            ],
            **spec,
        },
    }


def canaries() -> list[tuple[Object, list[Object]]]:
    """Services that nothing changes."""
    ports = [
        {"name": "web", "port": 80, "protocol": "TCP", "nodePort": 30080},
        {"name": "dns", "port": 53, "protocol": "UDP", "nodePort": 30053},
    ]
    balanced = {"type": "LoadBalancer", "externalTrafficPolicy": "Local", "ports": ports}
    services = [
        service_of("canary", "plain", 201),
        service_of("canary", "sticky", 202, sessionAffinity="ClientIP"),
        service_of("canary", "outside", 203, externalIPs=["198.51.100.7"]),
        service_of("canary", "balanced", 204, **balanced, healthCheckNodePort=30999),
        service_of("canary", "idle", 205),
    ]
    services[3]["status"] = {"loadBalancer": {"ingress": [{"ip": "198.51.100.8"}]}}
    found = []
    for number, service in enumerate(services):
        name = service["metadata"]["name"]
        ends = (
            []
            if name == "idle"
            else [endpoint(f"10.244.{1 + i}.{240 + number}", NODES[i]) for i in range(3)]
        )
        found.append((service, [slice_of("canary", name, f"{name}-x", "IPv4", ends)]))
    return found


def stranger(dice: Any, number: int) -> Object:
    """A tenant's Service, who may want what others have."""
    ports = [
        {"name": "web", "port": dice.choice((80, 80, 8080)), "protocol": "TCP"},
        {"name": "dns", "port": 53, "protocol": "UDP"},
    ]
    spec: dict[str, Any] = {"ports": ports}
    kind = dice.choice(("ClusterIP", "ClusterIP", "NodePort", "LoadBalancer", "headless"))
    if kind in ("NodePort", "LoadBalancer"):
        spec["type"] = kind
        ports[0]["nodePort"] = dice.choice((30080, 31000 + number))
        ports[1]["nodePort"] = dice.choice((30053, 32000 + number))
        spec["externalTrafficPolicy"] = dice.choice(("Cluster", "Local"))
    if dice.random() < 0.3:
        addresses = ("198.51.100.7", "198.51.100.8", f"198.51.100.{20 + number}", "10.96.0.201")
        spec["externalIPs"] = [dice.choice(addresses)]
    if dice.random() < 0.2:
        spec["sessionAffinity"] = "ClientIP"
    service = service_of("tenant", f"s{number}", 10 + number, **spec)
    if kind == "headless":
        service["spec"] |= {"clusterIP": "None", "clusterIPs": ["None"]}
    if kind == "LoadBalancer":
        ip = dice.choice(("198.51.100.8", f"198.51.100.{60 + number}"))
        service["status"] = {"loadBalancer": {"ingress": [{"ip": ip}]}}
    if dice.random() < 0.1:
        service["metadata"]["annotations"] = {"steersman/close-connections": "true"}
    return service
