"""When connections are forgotten: a connection is as young as the younger of its two ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from steersman.modes.ebpf import flows, layout
from steersman.modes.ebpf.flows import FROM_SERVICE, MASQUERADE, TO_CLIENT, TO_ENDPOINT, Timeouts
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.ebpf_packets import CLIENT, NODE, POD, VIP, Programs, loaded, programs
from tests.support.lab.frames import ACK, FIN, RST, SYN, TCP, UDP, packet, see
from tests.support.steps import result_of

__all__ = ["loaded", "programs"]  # fixtures
pytestmark = MARKS
THERE, BACK = (TO_ENDPOINT, MASQUERADE), (FROM_SERVICE, TO_CLIENT)
CLIENT_END, POD_END, NODE_END = (CLIENT, 4000), (POD, 8080), (NODE, 4000)
VIP_END = (VIP, 80)
TIMEOUTS = Timeouts(tcp_established=900, tcp_half_closed=300)
"""Machines may have booted just now."""
MARGIN = 20
"""Seconds for which a machine under load may stand still in a test."""


def there(programs: Programs, protocol: int, flags: int) -> tuple[tuple[str, int], ...]:
    return see(programs.through(packet(CLIENT_END, VIP_END, protocol, flags)))


def back(programs: Programs, protocol: int, flags: int) -> tuple[tuple[str, int], ...]:
    return see(programs.through(packet(POD_END, NODE_END, protocol, flags)))


def rest(programs: Programs, seconds: int, kinds: tuple[int, ...] = THERE + BACK) -> int:
    """Let time go by without packets of some kinds; how many entries are forgotten then."""
    for key, value in list(programs.flows.items()):
        address, last, port, kind, state, service = layout.FLOW.unpack(value)
        if kind in kinds:
            last -= seconds * 10**9
            programs.flows.put(key, layout.FLOW.pack(address, last, port, kind, state, service))
    return result_of(flows.collect(programs.flows, TIMEOUTS)).expired


def test_who_connects_and_then_is_silent_is_answered_later(programs: Programs) -> None:
    """An endpoint that says nothing before it is asked has sent no more than a SYN."""
    there(programs, TCP, SYN)
    back(programs, TCP, SYN | ACK)
    there(programs, TCP, ACK)
    assert rest(programs, TIMEOUTS.tcp_established - MARGIN) == 0
    assert there(programs, TCP, ACK) == (NODE_END, POD_END)
    assert back(programs, TCP, ACK) == (VIP_END, CLIENT_END)
    assert rest(programs, TIMEOUTS.tcp_established + 1) == 4


@pytest.mark.parametrize("silent", [THERE, BACK])
def test_datagrams_of_one_way_keep_the_other(programs: Programs, silent: tuple[int, ...]) -> None:
    there(programs, UDP, 0)
    back(programs, UDP, 0)
    assert rest(programs, TIMEOUTS.udp_stream + 1, silent) == 0
    assert there(programs, UDP, 0) == (NODE_END, POD_END)
    assert back(programs, UDP, 0) == (VIP_END, CLIENT_END)
    assert rest(programs, TIMEOUTS.udp_stream + 1) == 4


def test_what_nobody_answers_goes_whole(programs: Programs) -> None:
    there(programs, TCP, SYN)
    assert rest(programs, TIMEOUTS.tcp_opening - MARGIN) == 0
    assert rest(programs, MARGIN + 1) == 4


def test_half_a_connection_goes_on_as_netfilter_lets_it(programs: Programs) -> None:
    there(programs, TCP, SYN)
    back(programs, TCP, SYN | ACK)
    there(programs, TCP, FIN | ACK)
    back(programs, TCP, ACK)
    assert rest(programs, TIMEOUTS.tcp_half_closed - MARGIN) == 0
    assert back(programs, TCP, ACK) == (VIP_END, CLIENT_END)
    there(programs, TCP, FIN | ACK)  # repeated, which ends nothing
    assert result_of(flows.count_open(programs.flows, TIMEOUTS)) == 1
    assert rest(programs, TIMEOUTS.tcp_closing + 1) == 0
    back(programs, TCP, FIN | ACK)
    assert programs.states() == {flows.CLOSING}
    assert result_of(flows.count_open(programs.flows, TIMEOUTS)) == 0
    assert rest(programs, TIMEOUTS.tcp_closing + 1) == 4


@pytest.mark.parametrize("forged", [there, back])
def test_a_reset_whose_sender_goes_on_has_ended_nothing(
    programs: Programs, forged: Callable[..., object]
) -> None:
    open_connection(programs)
    forged(programs, TCP, RST)
    assert result_of(flows.count_open(programs.flows, TIMEOUTS)) == 0
    assert there(programs, TCP, ACK) == (NODE_END, POD_END)
    assert back(programs, TCP, ACK) == (VIP_END, CLIENT_END)
    assert programs.states() == {flows.ESTABLISHED}
    assert result_of(flows.count_open(programs.flows, TIMEOUTS)) == 1
    assert rest(programs, TIMEOUTS.tcp_closing + 1) == 0


@pytest.mark.parametrize(("sender", "other"), [(there, back), (back, there)])
def test_late_packets_of_the_other_side_do_not_undo_a_reset(
    programs: Programs, sender: Callable[..., object], other: Callable[..., object]
) -> None:
    open_connection(programs)
    sender(programs, TCP, RST)
    other(programs, TCP, ACK)
    sender(programs, TCP, RST)
    assert programs.states() == {flows.CLOSING, flows.RESET}
    assert rest(programs, TIMEOUTS.tcp_closing + 1) == 4


def open_connection(programs: Programs) -> None:
    there(programs, TCP, SYN)
    back(programs, TCP, SYN | ACK)
    there(programs, TCP, ACK)
    back(programs, TCP, ACK)
    assert programs.states() == {flows.ESTABLISHED}


def test_half_a_connection_does_not_stay_for_ever(programs: Programs) -> None:
    there(programs, TCP, SYN)
    back(programs, TCP, SYN | ACK)
    there(programs, TCP, ACK)
    back(programs, TCP, FIN | ACK)
    assert rest(programs, TIMEOUTS.tcp_half_closed + 1) == 4
