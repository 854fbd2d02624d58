"""The wanted rules of userspace portals, with the ports that the kernel's rules lead to."""

from __future__ import annotations

import re
from typing import Any

import pytest

from steersman.host.exec import SubprocessExec
from steersman.host.worker import KernelWorker
from steersman.model.names import Family
from steersman.model.plan import FamilySettings, NodeSettings
from steersman.modes.userspace.iptables_portals import IptablesPortals
from steersman.modes.userspace.nft_portals import NftPortals
from steersman.modes.userspace.portals import Portals
from steersman.modes.userspace.render import Portal
from steersman.modes.userspace.words import UserspaceWords
from tests.support.builders.plans import simple

SETTINGS = NodeSettings(
    families=(Family.IPV4,),
    ipv4=FamilySettings(node_ip="192.168.0.2", local_addresses=("127.0.0.1", "192.168.0.2")),
)
BOTH = pytest.mark.parametrize(
    "portals",
    [NftPortals(SubprocessExec().run_tool), IptablesPortals(SubprocessExec())],
    ids=["nft", "ipt"],
)


def world(portals: Portals, services: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Some Services as they are rendered, and as the kernel has them."""
    rendered: dict[Any, Any] = {}
    kernel: dict[Any, Any] = {}
    for number in range(services):
        mine = portals.render_service(simple(number), SETTINGS)
        rendered |= mine
        for key, value in mine.items():
            if isinstance(value, Portal):
                found = portals.in_kernel(key, value, 20_000 + number)
                kernel |= dict.fromkeys(found, "")
    return rendered, kernel


@BOTH
def test_ports_of_many_listeners_are_found_at_once(
    portals: Portals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`doctor` and `dump` looked at each rule for each destination: minutes at 10,000."""
    rendered, kernel = world(portals, 2000)
    looks = 0

    class Counted:
        def fullmatch(self, text: str) -> re.Match[str] | None:
            nonlocal looks
            looks += 1
            return number.fullmatch(text)

    number = re.compile(r"(.*[^\d])(\d{1,5})")
    monkeypatch.setattr("steersman.modes.userspace.words._LAST_NUMBER", Counted())
    wanted = UserspaceWords(portals, KernelWorker()).wanted(rendered, kernel)
    assert kernel.keys() <= wanted.keys()
    assert all(wanted[key] == value for key, value in kernel.items())
    ports = {key.socket.port for key in wanted.keys() - kernel.keys()}
    assert ports == set(range(20_000, 22_000))
    assert looks == len(kernel)


@BOTH
def test_a_destination_without_a_rule_has_no_port(portals: Portals) -> None:
    rendered, kernel = world(portals, 3)
    gone = {key: value for key, value in kernel.items() if "10.96.0.1" not in key.text}
    wanted = UserspaceWords(portals, KernelWorker()).wanted(rendered, gone)
    ports = {key.socket.port for key in wanted if key[0] == "socket"}
    assert ports == {0, 20_000, 20_002}
