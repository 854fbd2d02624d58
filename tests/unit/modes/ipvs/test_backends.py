"""How the ipvs mode tells the kernel: refusals, draining, addresses. The kernel is a fake one."""

from __future__ import annotations

import errno

import pytest

from steersman.host.nlmsg import NLM_F_ACK, Request
from steersman.host.tolerant import TolerantRequest, send
from steersman.model.errors import ApplyError, BusyError
from steersman.model.names import Protocol
from steersman.modes.ipvs.backends import Ipsets
from steersman.modes.ipvs.objects import Server, ServerKey
from steersman.modes.ipvs.wire import Command
from tests.support.modes.ipvs_fakes import FakeIpset, FakeNetlink, FakeServers

TCP = ServerKey(Protocol.TCP, "10.96.0.1", 80)
UDP = ServerKey(Protocol.UDP, "10.96.0.1", 53)
ONE, TWO = ("10.244.0.1", 8080), ("10.244.0.2", 8080)


def step(number: int, *harmless: int, instead: Request | None = None) -> TolerantRequest:
    request = Request(100 + number, b"", NLM_F_ACK)
    change = None if instead is None else lambda: instead
    return TolerantRequest(lambda: f"step {number}", request, harmless, change)


def deliver(kernel: FakeNetlink, *steps: TolerantRequest) -> list[int]:
    send(kernel, steps)  # type: ignore[arg-type]
    return [request.kind - 100 for request in kernel.seen]


def test_what_is_so_already_is_no_failure() -> None:
    kernel = FakeNetlink(n0=errno.ENOENT)
    assert deliver(kernel, step(1, errno.ENOENT), step(2)) == [1, 2]


def test_what_exists_is_changed_instead() -> None:
    kernel = FakeNetlink(n1=errno.EEXIST)
    assert deliver(kernel, step(1), step(2, instead=Request(109, b"")), step(3)) == [1, 2, 3, 9]


def test_a_refusal_names_the_object() -> None:
    with pytest.raises(ApplyError, match="step 2: refused"):
        deliver(FakeNetlink(n1=errno.EINVAL), step(1), step(2, errno.ENOENT))


def test_a_change_that_is_refused_as_well() -> None:
    with pytest.raises(ApplyError):
        deliver(FakeNetlink(n0=errno.EEXIST, n1=errno.EINVAL), step(1, instead=Request(109, b"")))


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOBUFS, errno.EINTR])
def test_what_the_kernel_has_no_memory_for_is_not_the_objects_fault(code: int) -> None:
    """A Service that is refused would not be tried again for a while, and named in a Finding."""
    with pytest.raises(BusyError, match="step 2: refused"):
        deliver(FakeNetlink(n1=code), step(1), step(2))


@pytest.mark.parametrize("failing", range(6))
def test_a_change_that_was_cut_short_can_be_sent_again(failing: int) -> None:
    """From the first: what has been done by then is there already, or gone."""
    old, new = Server("rr", targets=(ONE,)), Server("wlc", targets=(TWO,))
    changes = [(TCP, old, new), (UDP, None, new)]
    whole = FakeNetlink()
    FakeServers(whole).write(changes)
    broken = FakeNetlink(**{f"n{failing}": errno.ENOMEM})
    virtual = FakeServers(broken)
    if failing < len(whole.seen):
        with pytest.raises(BusyError):
            virtual.write(changes)
    broken.seen.clear()
    broken.refusals.clear()
    virtual.write(changes)
    assert sorted(map(repr, broken.seen)) == sorted(map(repr, whole.seen))


def test_many_go_in_batches() -> None:
    assert deliver(FakeNetlink(), *(step(number) for number in range(20, 270))) == list(
        range(20, 270)
    )


def write(key: ServerKey, old: Server | None, new: Server) -> list[Command]:
    kernel = FakeNetlink()
    FakeServers(kernel).write([(key, old, new)])
    return kernel.commands


def test_a_new_server_comes_with_its_endpoints() -> None:
    wanted = [Command.NEW_SERVICE, Command.NEW_DEST, Command.NEW_DEST]
    assert write(TCP, None, Server("rr", targets=(ONE, TWO))) == wanted


def test_only_what_differs_is_sent() -> None:
    old = Server("rr", targets=(ONE,))
    assert write(TCP, old, Server("rr", targets=(ONE,), assigned=False)) == []
    assert write(TCP, old, Server("wlc", targets=(ONE,))) == [Command.SET_SERVICE]
    assert write(TCP, old, Server("rr", targets=(ONE, TWO))) == [Command.NEW_DEST]


@pytest.mark.parametrize(("key", "command"), [(TCP, Command.SET_DEST), (UDP, Command.DEL_DEST)])
def test_an_endpoint_drains_but_not_for_udp(key: ServerKey, command: Command) -> None:
    both = Server("rr", targets=(ONE, TWO))
    assert write(key, both, Server("rr", targets=(ONE,))) == [command]


def test_one_that_returns_while_it_drains_gets_its_weight_back() -> None:
    both, one = Server("rr", targets=(ONE, TWO)), Server("rr", targets=(ONE,))
    kernel = FakeNetlink(n1=errno.EEXIST)
    virtual = FakeServers(kernel)
    virtual.write([(TCP, both, one)])
    virtual.write([(TCP, one, both)])
    assert kernel.commands == [Command.SET_DEST, Command.NEW_DEST, Command.SET_DEST]


def test_only_what_is_drained_and_ours_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "TCP  0A600001:0050 rr",
        "  -> 0AF40001:1F90 Masq 0 0 0",
        "  -> 0AF40002:1F90 Masq 0 1 0",
        "  -> 0AF40003:1F90 Masq 1 0 0",
        "TCP  C0000201:0050 rr",
        "  -> 0AF40009:1F90 Masq 0 0 0",
    ]
    kernel = FakeNetlink()
    virtual = FakeServers(kernel, "\n".join(["", "", "", *lines]))
    monkeypatch.setattr("steersman.modes.ipvs.backends.list_services", lambda *_: iter(()))
    virtual.read()
    virtual.end_drained([TCP])
    assert kernel.commands == [Command.DEL_DEST]
    virtual.end_drained([TCP])
    assert len(kernel.seen) == 1


def test_a_scheduler_that_is_missing_is_named() -> None:
    kernel = FakeNetlink(n0=errno.ENOENT)
    with pytest.raises(ApplyError, match=r"10\.96\.0\.1 port 80 with the scheduler dice: "):
        FakeServers(kernel).write([(TCP, None, Server("dice"))])


def test_ipset_that_refuses() -> None:
    with pytest.raises(ApplyError, match="no such set"):
        Ipsets(FakeIpset(1).run_tool).restore(["add S 10.0.0.1"])
    with pytest.raises(BusyError, match="no such set"):
        Ipsets(FakeIpset(1).run_tool).read()
