"""Fake backends of the ipvs mode, which record requests."""

from __future__ import annotations

from collections.abc import Sequence

from steersman.host.exec import Result
from steersman.host.netlink import NetlinkError
from steersman.host.nlmsg import NLM_F_ACK, Request
from steersman.modes.ipvs.backends import VirtualServers
from steersman.modes.ipvs.wire import Command
from tests.support.modes.scripted import InThread


class FakeNetlink:
    """Records requests, and refuses the n-th of all with an errno."""

    def __init__(self, **refusals: int) -> None:
        self.refusals = {int(number[1:]): code for number, code in refusals.items()}
        self.seen: list[Request] = []

    def batch(self, requests: Sequence[Request]) -> dict[int, NetlinkError]:
        assert len(requests) == 1 or requests[0].flags & NLM_F_ACK, "its error ends the wait"
        refused = {}
        for index, request in enumerate(requests):
            code = self.refusals.get(len(self.seen))
            if code:
                refused[index] = NetlinkError(code, "refused")
            self.seen.append(request)
        return refused

    @property
    def commands(self) -> list[Command]:
        return [Command(request.payload[0]) for request in self.seen]


class FakeServers(VirtualServers):
    """Virtual servers of a table that is given."""

    def __init__(self, netlink: FakeNetlink, table: str = "") -> None:
        super().__init__(netlink, 99)  # type: ignore[arg-type]
        self._listed = table

    def table(self) -> str:
        return self._listed


class FakeIpset(InThread):
    """Records what `ipset restore` reads."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.lines: list[str] = []

    def run_tool(self, argv: Sequence[str], stdin: bytes = b"", **_more: object) -> Result:
        self.lines += stdin.decode().splitlines()
        return Result(self.status, b"", b"no such set\n")
