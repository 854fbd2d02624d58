"""The ipvs mode under test. Its packets flow in the virtual machine only: tests/vm/guest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from steersman.host.exec import Exec, SubprocessExec
from steersman.model.names import Protocol
from steersman.model.plan import NodePlan
from steersman.modes.base import Mode
from steersman.modes.ipvs.mode import IpvsMode
from steersman.modes.ipvs.objects import MemberKey, Server, ServerKey, SetKey
from steersman.modes.specs import IpvsOptions
from tests.support.lab.sockets import Netns
from tests.support.modes.registry import ModeUnderTest

_FLAGS = {Protocol.TCP: "-t", Protocol.UDP: "-u", Protocol.SCTP: "--sctp-service"}


def mode_behind(execute: Exec, options: IpvsOptions | None = None) -> IpvsMode:
    """The mode, in the namespace that an Exec's prefix enters (`nsenter --net=PATH`)."""
    assert isinstance(execute, SubprocessExec)
    (path,) = (w.removeprefix("--net=") for w in execute.prefix if w.startswith("--net="))
    return IpvsMode(execute, options, Netns(path).call)


def _make(execute: Exec, _variant: str) -> Mode:
    offline = isinstance(execute, SubprocessExec) and not execute.prefix
    return IpvsMode(execute) if offline else mode_behind(execute)


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


IPVS = ModeUnderTest("ipvs", ("nft",), _make, None, _golden)
