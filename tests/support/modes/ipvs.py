"""The ipvs mode under test. Its packets flow in the virtual machine only: tests/vm/guest."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from steersman.host.exec import Exec
from steersman.host.worker import KernelWorker
from steersman.model.addresses import family_of, in_cidr, join_host_port
from steersman.model.names import Protocol
from steersman.model.plan import Frontend, FrontendKind, NodePlan, ServicePlan, SourceClass, Verdict
from steersman.modes.base import Mode
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.ipvs.objects import (
    ALLOWED,
    GUARDED,
    MemberKey,
    Server,
    ServerKey,
    SetKey,
    action_set,
    role_set,
)
from steersman.modes.ipvs.render import node_port_addresses
from steersman.modes.specs import IpvsOptions, ModeOptions
from tests.support.lab.inside import Inside
from tests.support.modes.flows import Answer, FlowCase
from tests.support.modes.registry import ModeUnderTest, render

P = ParamSpec("P")
T = TypeVar("T")
_FLAGS = {Protocol.TCP: "-t", Protocol.UDP: "-u", Protocol.SCTP: "--sctp-service"}


def mode_behind(execute: Exec, options: IpvsOptions | None = None) -> IpvsMode:
    """The mode, in the namespace in which an Exec runs programs."""
    own = options or IpvsOptions()
    mode = IpvsMode(execute, ModeOptions(asked_for=IpvsMode.name, ipvs=own))
    if isinstance(execute, Inside):
        mode.worker = KernelWorker(execute.netns)
    return mode


def call(mode: Mode, method: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a method of a mode in the mode's thread."""
    return asyncio.run(mode.worker.do(method, *args, **kwargs))


def _make(execute: Exec, _variant: str) -> Mode:
    return mode_behind(execute)


def _golden(plan: NodePlan) -> str:
    """The objects of a plan's Services, in the words of `ipvsadm -Sn` and `ipset save`."""
    mode, out = IPVS.offline(), dict[Any, Any]()
    for service in plan.services.values():
        out.update(mode.render_service(service, plan.settings))
    return "".join(f"{line}\n" for key in sorted(out, key=str) for line in _lines(key, out[key]))


def _lines(key: object, value: Any) -> Iterator[str]:
    match key, value:
        case ServerKey(protocol, address, port), Server():
            host = f"[{address}]" if ":" in address else address
            service = f"{_FLAGS[protocol]} {host}:{port}"
            persistence = f" -p {value.timeout}" if value.timeout else ""
            flags = f" flags {value.flags:#x}" if value.flags else ""
            device = "" if value.assigned else " (address of the node)"
            yield f"-A {service} -s {value.scheduler}{persistence}{flags}{device}"
            for (ip, target_port), weight in value.weight_of.items():
                to = f"[{ip}]" if ":" in ip else ip
                yield f"-a {service} -r {to}:{target_port} -m -w {weight}"
        case SetKey(name), _:
            yield f"create {name} {value}"
        case MemberKey(name, entry), _:
            yield f"add {name} {entry}"
        case _:
            raise AssertionError(f"unknown object of the ipvs mode: {key}")


def as_ipvs_serves(flows: tuple[FlowCase, ...], plan: NodePlan) -> tuple[FlowCase, ...]:
    """The flows as the mode's README says that they are served, told from the plan alone."""
    return tuple(_served(flow, plan) for flow in flows)


def _served(flow: FlowCase, plan: NodePlan) -> FlowCase:
    found = list(_frontends(flow, plan))
    family = family_of(flow.address)
    if not found and flow.address in plan.settings.family(family).local_addresses:
        return replace(flow, kind="untouched", endpoints=frozenset(), masquerade=False)
    held = {f.address for service in plan.services.values() for f in service.frontends}
    if not found and flow.address in held:  # at a port that no Service has there
        return replace(flow, kind="reject", endpoints=frozenset(), masquerade=False)
    if flow.source in held:
        return replace(flow, kind="drop", endpoints=frozenset(), masquerade=False)
    for service, frontend in found if flow.kind == "forward" else ():
        outside = frontend.action(SourceClass.EXTERNAL)
        if outside.verdict is Verdict.FORWARD:
            ends = frozenset(str(endpoint) for endpoint in service.pool(outside.pool))
            return replace(flow, endpoints=ends)
    return flow


def _frontends(flow: FlowCase, plan: NodePlan) -> Iterator[tuple[ServicePlan, Frontend]]:
    for key, service in plan.services.items():
        family = plan.settings.family(key.family)
        for frontend in service.frontends:
            held = frontend.kind is not FrontendKind.NODE_PORT
            addresses = (frontend.address,) if held else node_port_addresses(family)
            place = key.name.protocol, frontend.port
            if place == (Protocol(flow.protocol), flow.port) and flow.address in addresses:
                yield service, frontend


class Servers:
    """Walks through virtual servers and set entries, as the kernel does for a new connection."""

    def __init__(self, plan: NodePlan) -> None:
        ruleset = render(plan, IPVS.offline())
        self._settings = plan.settings
        self._servers = {k: v for k, v in ruleset.items() if isinstance(k, ServerKey)}
        self._assigned = {key.address for key, each in self._servers.items() if each.assigned}
        self._members: defaultdict[str, set[str]] = defaultdict(set)
        for key in ruleset:
            if isinstance(key, MemberKey):
                self._members[key.set].add(key.entry)

    def answer(self, flow: FlowCase) -> Answer:
        """Return what becomes of a connection."""
        family, protocol = family_of(flow.address), Protocol(flow.protocol)
        place = f"{flow.address},{protocol.number}:{flow.port}"
        if place in self._members[role_set(GUARDED, family)]:
            allowed = [entry.rpartition(",") for entry in self._members[role_set(ALLOWED, family)]]
            ranges = [cidr for start, _, cidr in allowed if start == place]
            if not any(
                in_cidr(flow.source, each) if "/" in each else flow.source == each
                for each in ranges
            ):
                return Answer("drop")
        client = self._settings.family(family).sources.classify(flow.source, flow.interface)
        for verdict in (Verdict.DROP, Verdict.REJECT):
            if place in self._members[action_set(client, verdict, family)]:
                return Answer(str(verdict))
        server = self._servers.get(ServerKey(protocol, flow.address, flow.port))
        if server is None:
            return Answer("reject" if flow.address in self._assigned else "untouched")
        masquerade = place in self._members[action_set(client, Verdict.FORWARD, family)]
        names = [join_host_port(*target) for target, weight in server.weight_of.items() if weight]
        return Answer(
            "forward", frozenset((name, masquerade or flow.calls_itself(name)) for name in names)
        )


IPVS = ModeUnderTest("ipvs", ("nft",), _make, None, _golden)
