"""What a Diff asks of each virtual to the kernel."""

from __future__ import annotations

from steersman.model.names import Protocol
from steersman.model.ruleset import Diff, diff
from steersman.modes.ipvs.changes import (
    ChangeSet,
    address_entries,
    assigned_addresses,
    rule_steps,
)
from steersman.modes.ipvs.objects import MemberKey, Server, ServerKey, SetKey

VIP = ServerKey(Protocol.TCP, "10.96.0.1", 80)
ONE, TWO = ("10.244.0.1", 8080), ("10.244.0.2", 8080)
SERVER = Server("rr", targets=(ONE,))
MARK = MemberKey("KUBE-IPVS-ADDRESSES", "10.96.0.1")
RULE = (4, "nat", "KUBE-IPVS-SERVICES", "")


def test_a_change_of_endpoints_is_about_nothing_else() -> None:
    wanted = Server("rr", targets=(TWO,))
    work = ChangeSet(diff({VIP: SERVER}, {VIP: wanted}))
    assert work.servers == [(VIP, SERVER, wanted)]
    others = (work.servers_gone, work.usage, work.orphans, work.rules, work.sets, work.sets_gone)
    assert not any(others)
    assert (work.makes_device, work.drops_device) == (False, False)


def test_sets_and_their_entries() -> None:
    objects = {
        MemberKey("S", "10.0.0.1"): "",
        SetKey("S"): "hash:ip family inet",
        SetKey("P"): "bitmap:port range 0-65535",
    }
    work = ChangeSet(Diff(added=objects))
    assert work.sets[-1] == "add S 10.0.0.1"
    assert set(work.sets[:2]) == {
        "create S hash:ip family inet maxelem 1048576",
        "create P bitmap:port range 0-65535",
    }
    assert ChangeSet(Diff(removed=objects)).sets_gone == ["destroy P", "destroy S"]
    assert ChangeSet(Diff(removed={MemberKey("S", "1"): ""})).sets_gone == ["del S 1"]
    assert not ChangeSet(
        Diff(changed={MemberKey("S", "1"): ("", "")})
    ).sets  # it changed hands only


def test_rules_are_kept_together() -> None:
    other = (4, "nat", "KUBE-IPVS-MARK-MASQ", "")
    change = Diff({RULE: "-A X"}, {other: "-A Y"}, {(6, *RULE[1:]): ("-A X", "-A Y")})
    assert ChangeSet(change).rules == change


def test_addresses() -> None:
    assert ChangeSet(Diff(removed={MARK: ""})).orphans == {"10.96.0.1"}
    assert ChangeSet(Diff(added={VIP: SERVER})).usage == {"10.96.0.1": 1}
    assert ChangeSet(Diff(removed={VIP: SERVER})).usage == {"10.96.0.1": -1}
    assert assigned_addresses({VIP: SERVER, RULE: "-A X"}) == {"10.96.0.1": 1}
    assert address_entries("add", ["10.96.0.1", "fd00::1"]) == [
        "add KUBE-IPVS-ADDRESSES 10.96.0.1",
        "add KUBE-6-IPVS-ADDRESSES fd00::1",
    ]


def test_chains_come_before_jumps_to_them_and_go_after() -> None:
    jump = (4, "nat", "PREROUTING", "jumps")
    line = "-A PREROUTING -j KUBE-IPVS-SERVICES"
    added = rule_steps(Diff(added={jump: line, RULE: "-A KUBE-IPVS-SERVICES -j RETURN"}))
    jumps, chain = added[4]
    assert (jumps.insert, jumps.delete) == ([line], [])
    assert chain.declare == "KUBE-IPVS-SERVICES"
    assert chain.phase < jumps.phase
    removed = rule_steps(Diff(removed={jump: line, RULE: ""}))
    jumps, chain = removed[4]
    assert (jumps.delete, chain.remove) == ([line], "KUBE-IPVS-SERVICES")
    assert jumps.phase < chain.phase
