"""The ipvs mode in the namespace of a lab's node, and where its answers may differ."""

from __future__ import annotations

from steersman.host.exec import Exec, SubprocessExec
from steersman.modes.base import Mode
from steersman.modes.ipvs.mode import IpvsMode, IpvsOptions
from tests.lab_sockets import Netns
from tests.modes import ModeUnderTest


def mode_behind(execute: Exec, scheduler: str = "rr") -> IpvsMode:
    """The mode, in the namespace that an Exec's prefix enters (`nsenter --net=PATH`)."""
    assert isinstance(execute, SubprocessExec)
    (path,) = (w.removeprefix("--net=") for w in execute.prefix if w.startswith("--net="))
    return IpvsMode(execute, IpvsOptions(scheduler=scheduler), Netns(path).call)


def _make(execute: Exec, _variant: str) -> Mode:
    offline = isinstance(execute, SubprocessExec) and not execute.prefix
    return IpvsMode(execute) if offline else mode_behind(execute)


IPVS = ModeUnderTest("ipvs", ("nft",), _make, None, lambda _plan: "")
