from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from steersman.host import linux
from steersman.host.facts import hostname, read_facts
from steersman.host.netlink import DumpInterruptedError
from steersman.host.nlmsg import Message, Request, attr, text
from steersman.host.process import set_oom_score_adjustment


@pytest.mark.parametrize(
    ("listed", "disabled", "expected"),
    [(True, "0", True), (True, "1", False), (False, "0", False), (True, None, True)],
)
def test_ipv6_is_there_unless_absent_or_disabled(
    tmp_path: Path, listed: bool, disabled: str | None, expected: bool
) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "sys/net/ipv6/conf/all").mkdir(parents=True)
    if listed:
        (tmp_path / "net/if_inet6").touch()
    if disabled is not None:
        (tmp_path / "sys/net/ipv6/conf/all/disable_ipv6").write_text(f"{disabled}\n")
    assert linux.has_ipv6(tmp_path) is expected


def test_the_hostname_is_made_a_node_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: " Node-1.Example ")
    assert hostname() == "node-1.example"


def test_the_oom_score_is_set_or_the_reason_told(tmp_path: Path) -> None:
    assert "could not be set to -999: No such file" in set_oom_score_adjustment(-999, tmp_path)
    (tmp_path / "self").mkdir()
    assert set_oom_score_adjustment(-999, tmp_path) == ""
    assert (tmp_path / "self/oom_score_adj").read_text() == "-999"


class Kernel:
    """Lists two links and three addresses; interrupts some of the lists."""

    def __init__(self, interruptions: int) -> None:
        self.interruptions = interruptions

    def __call__(self, _protocol: int, **_: int) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def dump(self, request: Request) -> Iterator[Message]:
        if request.kind == 18:
            for index, name in ((1, "lo"), (2, "eth0")):
                header = struct.pack("=BxHiII", 0, 1, index, 0, 0)
                yield Message(16, 0, 1, header + text(3, name))
        else:
            for family, index, packed in (
                (socket.AF_INET, 2, b"\xc0\0\2\1"),
                (socket.AF_INET, 9, b"\xc0\0\2\2"),
                (12, 2, b"\1\2"),
            ):
                header = struct.pack("=BBBBI", family, 24, 0, 0, index)
                yield Message(20, 0, 1, header + attr(1, packed))
        self.interruptions -= 1
        if self.interruptions >= 0:
            raise DumpInterruptedError(4, "changed")


@pytest.mark.parametrize("interruptions", [0, 1, 2, 1000])
async def test_interrupted_lists_are_read_again_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, interruptions: int
) -> None:
    monkeypatch.setattr(linux, "Netlink", Kernel(interruptions))
    assert (await read_facts()).interfaces == {"eth0": ("192.0.2.1/24",)}
