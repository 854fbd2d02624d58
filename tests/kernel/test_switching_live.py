"""`steersman switch` on a running process: every pair of modes, under new and old connections."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.machine import (
    MODES,
    WAIT,
    Machine,
    failed,
    open_connections,
    still_carry,
)
from tests.support.lab.switches import WAYS, Clients, ask, lab

__all__ = ["lab"]  # a fixture
pytestmark = MARKS

TOUR = (0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0)
"""Every ordered pair of modes once."""


@pytest.fixture
def machine(lab: Lab, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(lab, tmp_path)
    yield made
    made.close()


def test_no_connection_is_lost_between_any_two_modes(machine: Machine) -> None:
    process = machine.start(MODES[0])
    clients = Clients(machine.lab)
    try:
        for old, new in pairwise(MODES[number] for number in TOUR):
            live = open_connections(machine.lab)
            answer = machine.switch(new)
            result = answer["result"]
            assert (result["outcome"], result["mode"]) == ("switched", new), answer
            assert result["failedDials"] == 0, answer  # none took three seconds
            assert result["dials"] > 0
            before = clients.opened
            while clients.opened < before + 2 * len(WAYS):
                clients.pause()
            assert failed(clients) == [], (old, new, answer, machine.log.read_text())
            still_carry(live)
            for sock in live:
                sock.close()
            machine.until(lambda mode=new: machine.rules(mode))  # type: ignore[misc]
    finally:
        clients.close()
    assert len(clients.failed) <= len(TOUR), "packets sent again"
    # What the other modes left is gone once their connections have ended.
    for mode in MODES[1:]:
        machine.until(lambda mode=mode: not machine.rules(mode))  # type: ignore[misc]
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT) == 0


@pytest.mark.parametrize(("old", "new"), [("iptables", "nftables"), ("nftables", "userspace")])
def test_a_process_killed_in_the_middle_is_healed_by_the_next(
    machine: Machine, old: str, new: str
) -> None:
    process = machine.start(old)
    argv = [sys.executable, "-m", "steersman", "switch", f"--to={new}", "--watch-for=1m"]
    with subprocess.Popen(machine.lab.exec_argv(argv), stdout=subprocess.PIPE) as switch:
        assert switch.stdout
        for line in switch.stdout:
            if b"serves beside" in line:
                break
        process.kill()
        process.wait()
        switch.stdout.read()
    assert switch.returncode == 2
    machine.log.write_text("")
    machine.start(old)
    machine.until(lambda: machine.rules(old) and not machine.rules(new))


def test_a_mode_in_which_connections_fail_is_left_again(machine: Machine) -> None:
    """A firewall lets only translated packets reach the endpoints: sockets are not enough."""
    machine.start("nftables")
    machine.lab.run(
        "nft",
        "-f",
        "-",
        stdin="table ip firewall { chain out { type filter hook output priority 200;\n"
        "ip daddr 10.244.0.0/16 tcp dport 8080 ct status ! dnat drop\n}\n}\n",
    )
    answer = machine.switch("ebpf", "--watch-for=1m")
    assert answer["result"]["outcome"] == "back", answer
    assert answer["result"]["mode"] == "nftables"
    (why, *_) = [step["text"] for step in answer["steps"] if step["name"] == "back"]
    assert "new connections fail to shop/web" in why
    assert machine.rules("nftables")
    machine.until(lambda: not machine.rules("ebpf"))
    assert [way for way in WAYS if ask(machine.lab.socket(way[0], "TCP"), way)] == []


def test_a_second_switch_is_refused_and_a_dry_run_changes_nothing(machine: Machine) -> None:
    machine.start("iptables")
    answer = machine.switch("nftables", "--dry-run")
    assert answer["result"]["outcome"] == "checked"
    assert not machine.rules("nftables")
    argv = [sys.executable, "-m", "steersman", "switch", "--to=nftables", "--watch-for=30s"]
    with subprocess.Popen(machine.lab.exec_argv(argv), stdout=subprocess.PIPE) as switch:
        assert switch.stdout
        assert switch.stdout.readline()
        status, answer, errors = machine.steersman("switch", "--to=userspace")
        assert (status, answer) == (2, None)
        assert "another switch is under way" in errors
        switch.kill()
    machine.until(lambda: machine.rules("nftables") and not machine.rules("iptables"))
