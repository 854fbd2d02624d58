"""The policy of failover, step by step: when endpoints are probed, ejected and taken back."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from steersman.failover import tuning
from steersman.failover.policy import Policy
from steersman.model.failover import Backend, Observation, Settings
from steersman.model.names import Protocol
from tests.support.failover import endpoints

ANSWERED, SILENT, REFUSED = Observation.ANSWERED, Observation.SILENT, Observation.REFUSED
MEMBERS = endpoints(3)
A, B, C = MEMBERS_LIST = list(MEMBERS)
UDP = Backend("10.0.0.9", 53, Protocol.UDP)
SCTP = Backend("10.0.0.9", 9, Protocol.SCTP)


class Node:
    """A node on which the test decides what probes meet; time is a number."""

    def __init__(self, members: dict[Backend, str] | None = None, *, counts: bool = False) -> None:
        self.policy: Policy[str] = Policy(counts_answers=counts)
        self.members = MEMBERS if members is None else members
        self.down: dict[Backend, Observation] = {}
        self.probes: list[tuple[float, Backend]] = []
        self.now = 0.0
        self.policy.serve("pool", self.members)

    def until(self, when: float) -> None:
        """Let the policy do all that is due; a silent probe ends at its timeout, or with this."""
        results: list[tuple[float, Backend, Observation]] = []
        while True:
            due = [
                at
                for at in (self.policy.deadline, *(each[0] for each in results))
                if at is not None
            ]
            if not due or max(self.now, min(due)) > when:
                break
            self.now = max(self.now, min(due))
            for each in sorted(each for each in results if each[0] <= self.now):
                results.remove(each)
                self.policy.probed(*each)
            for backend, timeout, *_ in self.policy.advance(self.now):
                self.probes.append((self.now, backend))
                what = self.down.get(backend, ANSWERED)
                results.append((self.now + (timeout if what is SILENT else 0.001), backend, what))
        self.now = when
        for each in results:
            self.policy.probed(when, *each[1:])

    def fail(self, backends: Iterable[Backend], what: Observation = SILENT) -> None:
        self.down.update(dict.fromkeys(backends, what))

    def see(self, backend: Backend, what: Observation = SILENT, client: str = "") -> None:
        self.policy.observe(self.now, backend, what, client)

    @property
    def out(self) -> list[Backend]:
        return [each.backend for each in self.policy.ejected("pool")]

    def probed(self, backend: Backend, since: float) -> list[float]:
        return [round(at - since, 3) for at, each in self.probes if each == backend and at >= since]


@pytest.fixture
def node() -> Node:
    """Three endpoints that have answered a first probe."""
    node = Node()
    node.until(10)
    return node


def test_new_endpoints_are_probed_once_a_few_at_a_time() -> None:
    members = endpoints(25)
    node = Node(members)
    node.until(60)
    assert sorted(backend for _, backend in node.probes) == sorted(members)
    times = [round(at, 3) for at, _ in node.probes]
    assert times == [0.0] * 10 + [0.2] * 10 + [0.4] * 5
    assert node.policy.deadline is None


def test_a_new_endpoint_may_leave_before_it_is_probed() -> None:
    members = endpoints(11)
    node = Node(members)
    node.policy.advance(0)
    node.policy.serve("pool", dict(list(members.items())[:10]))
    assert node.policy.advance(1) == []


def test_a_silent_endpoint_is_ejected_after_three_probes(node: Node) -> None:
    node.fail([A])
    node.see(A)
    node.until(10.89)
    assert node.probed(A, 10) == [0.0, 0.3, 0.6]
    assert node.out == []
    node.until(10.9)
    assert node.out == [A]
    assert node.policy.take_changed() == ["pool"]
    [ejection] = node.policy.ejections
    assert (ejection.reason, ejection.since, ejection.until) == (SILENT, 10.9, 20.9)
    assert (ejection.strikes, ejection.confirmed) == (1, True)
    assert node.policy.take_changed() == []


def test_the_clock_moves_between_an_observation_and_the_first_probe(node: Node) -> None:
    node.fail([A])
    node.see(A)
    node.now += 0.01
    node.until(11)
    assert node.out == [A]


def test_a_refusal_needs_two_probes_a_tenth_of_a_second_apart(node: Node) -> None:
    node.fail([A], REFUSED)
    node.see(A, REFUSED)
    node.until(10.2)
    assert node.probed(A, 10) == [0.0, 0.101]
    assert node.out == [A]


def test_one_refusal_among_silent_probes_is_silence(node: Node) -> None:
    node.fail([A], REFUSED)
    node.see(A)
    node.until(10.05)
    node.fail([A])
    node.until(11)
    [ejection] = node.policy.ejections
    assert ejection.reason is SILENT


def test_a_probe_that_answers_clears_the_suspicion(node: Node) -> None:
    node.see(A)
    node.until(11)
    assert node.probed(A, 10) == [0.0]
    assert node.out == []


def test_after_a_wrong_suspicion_twice_the_probes_must_fail(node: Node) -> None:
    node.see(A)
    node.until(12)
    node.fail([A])
    node.see(A)
    node.until(13.7)
    assert node.out == []
    node.until(13.8)
    assert node.out == [A]
    assert len(node.probed(A, 12)) == 6


def lose_probes(node: Node, backend: Backend, seconds: float) -> None:
    """Let an endpoint be suspect, and answer only after some of its probes were lost."""
    node.fail([backend])
    node.see(backend)
    node.until(node.now + seconds)
    node.fail([backend], ANSWERED)
    node.until(node.now + 1)


def test_the_more_probes_of_living_endpoints_fail_the_more_must_fail() -> None:
    node = Node(endpoints(5))
    first, second, *_ = node.members
    node.until(10)
    lose_probes(node, second, 0.2)  # one of two fails: 20 in a row are one in a million
    node.fail([first])
    began = node.now
    node.see(first)
    node.until(began + 5.9)
    assert node.out == []
    node.until(began + 6.1)
    assert node.out == [first]
    assert len(node.probed(first, began)) == 20


def test_a_series_grows_if_others_lose_probes_meanwhile() -> None:
    node = Node(endpoints(5))
    first, second, *_ = node.members
    node.until(10)
    node.fail([first, second])
    node.see(first)
    node.until(10.1)
    node.see(second)
    node.until(10.5)
    node.fail([second], ANSWERED)
    node.until(11.5)
    assert node.out == []
    node.until(17)
    assert node.out == [first]


def test_nothing_silent_is_ejected_while_half_of_the_others_lose_probes() -> None:
    node = Node(endpoints(5))
    first, second, third, fourth, _ = node.members
    node.until(10)
    for backend in (second, third):
        lose_probes(node, backend, 0.2)
    node.fail([first])
    node.see(first)
    node.until(node.now + 10)
    assert node.out == []
    node.fail([fourth], REFUSED)
    node.see(fourth, REFUSED)
    node.until(node.now + 2)
    assert node.out == [fourth], "a refusal is no sign of too much load"
    node.until(node.now + 60)
    node.see(first)
    node.until(node.now + 10)
    assert set(node.out) == {first, fourth}


def test_suspicions_of_one_endpoint_have_a_rest_between_them(node: Node) -> None:
    for _ in range(10):
        node.see(A)
        node.until(node.now + 0.1)
    assert len(node.probed(A, 10)) == 2


def test_nothing_is_ejected_if_nobody_answers(node: Node) -> None:
    node.fail(MEMBERS)
    for backend in MEMBERS:
        node.see(backend)
    node.until(12)
    assert node.out == []
    assert list(node.policy.ejections) == []


def test_series_that_lead_to_nothing_become_rare(node: Node) -> None:
    node.fail(MEMBERS)
    for _ in range(600):
        node.see(A)
        node.until(node.now + 0.1)
    assert len(node.probed(A, 40)) <= 3 * 30 / 8 + 3


@pytest.mark.parametrize("what", [SILENT, REFUSED])
def test_an_endpoint_that_never_answered_needs_two_clients(what: Observation) -> None:
    node = Node()
    node.fail([A], what)
    node.until(10)
    for _ in range(4):
        node.see(A, what, client="10.0.9.1")
        node.until(node.now + 10)
    assert node.out == []
    node.see(A, what, client="10.0.9.2")
    node.until(node.now + 1)
    assert node.out == [A]


@pytest.mark.parametrize("what", [SILENT, REFUSED])
def test_if_a_service_denies_all_probes_they_say_nothing(what: Observation) -> None:
    """A policy may let only clients of its own reach the pods, whoever else tries."""
    node = Node({A: "node-0", B: "node-0"})
    node.policy.serve("others", {C: "node-1"})
    node.policy.serve("claimed by an attacker", {A: "node-0", C: "node-1"}, "attacker")
    node.fail([A, B], what)
    node.until(10)
    for client in ("10.0.9.1", "10.0.9.2", "10.0.9.3"):
        node.see(A, what, client=client)
        node.until(node.now + 10)
    assert node.out == []


def test_a_policy_that_denies_probes_from_now_on_ejects_nobody(node: Node) -> None:
    others = list(endpoints(9, nodes=9).items())[3:]
    node.policy.serve("others", dict(others))
    node.until(20)
    node.fail(MEMBERS)
    for number in range(20):
        node.see(MEMBERS_LIST[number % 3], client=f"10.0.9.{number}")
        node.until(node.now + 10)
    assert list(node.policy.ejections) == []


def test_an_ejection_is_in_force_where_another_one_answers(node: Node) -> None:
    """So nobody can have an endpoint ejected by claiming it for a Service of its own."""
    first, second = Backend("10.0.3.1", 80, Protocol.TCP), Backend("10.0.3.2", 80, Protocol.TCP)
    node.policy.serve("denied", {A: "node-0", first: "node-3", second: "node-4"})
    node.policy.serve("pool", {A: "node-0", B: "node-1"}, "attacker")
    node.until(20)
    node.fail([A, first, second])
    node.see(A)
    node.until(21)
    assert node.out == [A]
    assert node.policy.ejected("denied") == ()


def test_who_is_used_as_all_are_down_is_confirmed_when_one_returns(node: Node) -> None:
    node.fail([A, B], REFUSED)
    node.see(A, REFUSED)
    node.until(15)
    node.see(B, REFUSED)
    node.until(16)
    assert node.out == [A, B]
    node.policy.serve("pool", {A: "node-0", B: "node-1"})
    node.policy.take_changed()
    del node.down[A]
    node.until(21)  # A returns, 4 s before B is tried again
    assert node.out == [B]
    assert node.policy.take_changed() == ["pool"]
    [ejection] = node.policy.ejections
    assert ejection.strikes == 2


def test_who_has_recovered_meanwhile_stays_when_one_returns(node: Node) -> None:
    node.fail([A, B], REFUSED)
    node.see(A, REFUSED)
    node.until(15)
    node.see(B, REFUSED)
    node.until(16)
    node.policy.serve("pool", {A: "node-0", B: "node-1"})
    node.down.clear()
    while node.now < 30:
        assert node.out == []
        node.until(node.now + 0.1)
    assert list(node.policy.ejections) == []


def test_a_neighbour_that_denies_probes_stays_when_one_of_its_node_is_down() -> None:
    members = endpoints(9)
    first, second, third = (each for each, name in members.items() if name == "node-0")
    node = Node(members)
    node.fail([third])
    node.until(10)
    node.fail([first, second])
    node.see(first)
    node.until(20)
    assert node.out == [first, second]


def test_a_process_that_is_late_waits_for_its_probes(node: Node) -> None:
    node.see(A)
    assert {probe.backend for probe in node.policy.advance(10)} == {A, B, C}
    node.policy.probed(10.01, B, ANSWERED)
    # For two seconds it did nothing, and the answer of A has not been read yet.
    assert [probe.backend for probe in node.policy.advance(12)] == [A]
    assert [probe.backend for probe in node.policy.advance(12.3)] == [A]
    assert node.policy.advance(13) == []
    assert node.out == []
    node.policy.probed(13, A, SILENT)
    node.policy.probed(13, A, SILENT)
    assert node.out == []
    node.policy.probed(13, A, ANSWERED)
    node.until(20)
    assert node.out == []


def test_the_last_report_of_a_late_process_confirms(node: Node) -> None:
    node.see(A)
    node.policy.advance(10)
    node.policy.probed(10.01, B, ANSWERED)
    node.policy.advance(12)
    node.policy.advance(12.3)
    node.policy.advance(13)
    for _ in range(3):
        assert node.out == []
        node.policy.probed(13, A, SILENT)
    assert node.out == [A]


def test_one_client_suffices_if_this_node_opens_the_connections() -> None:
    node = Node()
    node.policy.of_this_node = True
    node.fail([A])
    node.until(10)
    node.see(A, client="10.0.9.1")
    node.until(node.now + 1)
    assert node.out == [A]


def test_a_dead_node_is_one_event() -> None:
    members = endpoints(9)
    node = Node(members)
    node.until(10)
    dead = [backend for backend, name in members.items() if name == "node-0"]
    node.fail(dead)
    node.see(dead[0])
    node.until(11.8)
    assert node.out == dead


def test_neighbours_that_answer_stay(node: Node) -> None:
    members = dict.fromkeys(endpoints(3), "node-0")
    node = Node(members)
    node.until(10)
    first = next(iter(members))
    node.fail([first])
    node.see(first)
    node.until(15)
    assert node.out == [first]


def test_silent_connections_before_an_answer_do_not_count() -> None:
    node = Node(counts=True)
    node.until(10)
    node.fail([A])
    node.see(A)
    node.see(A)
    node.until(10.2)
    node.see(A, ANSWERED)
    for when, out in ((11.8, []), (12.2, []), (12.25, [A])):
        node.until(when)
        assert node.out == []
        node.see(A)
        node.until(when + 0.01)
        assert node.out == out


def test_an_endpoint_that_has_gone_says_nothing_about_its_node() -> None:
    members = {**endpoints(9), UDP: "node-0"}
    gone, *dead = [each for each, name in members.items() if name == "node-0" and each != UDP]
    node = Node(members)
    node.until(10)
    node.policy.serve("pool", {each: name for each, name in members.items() if each != gone})
    node.fail([*dead, UDP])
    node.see(dead[0])
    node.until(15)
    assert set(node.out) == {*dead, UDP}


def test_udp_is_ejected_with_its_node_and_returns_with_it() -> None:
    members = {**endpoints(9), UDP: "node-0"}
    node = Node(members)
    node.until(10)
    dead = [backend for backend, name in members.items() if name == "node-0" and backend != UDP]
    node.fail([*dead, UDP])
    node.see(UDP)
    node.until(12)
    assert node.out == []
    node.see(dead[0])
    node.until(15)
    assert set(node.out) == {*dead, UDP}
    assert {each.node for each in node.policy.ejections} == {"", "node-0"}
    node.down.clear()
    node.until(40)
    assert node.out == []


def test_udp_stays_if_blackholes_of_others_are_on_its_node() -> None:
    mine = {Backend(f"10.0.0.{number}", 80, Protocol.TCP): "node-0" for number in (1, 2)}
    node = Node({UDP: "node-0"})
    node.policy.serve("attacker", {**mine, B: "node-1"}, "attacker")
    node.policy.serve("others", {C: "node-2"})
    node.until(10)
    node.fail([*mine, UDP])
    for backend in mine:
        node.see(backend)
    node.until(15)
    assert {each.backend for each in node.policy.ejections} == {*mine}


def test_silent_datagrams_and_one_refusal_eject_no_udp() -> None:
    mate = Backend("10.0.1.9", 53, Protocol.UDP)
    node = Node({UDP: "node-0", mate: "node-1"}, counts=True)
    node.fail([UDP])
    node.see(UDP, REFUSED)
    node.see(mate, REFUSED)
    node.until(0.1)
    for _ in range(3):
        node.see(UDP)
    node.until(0.35)
    node.see(UDP, REFUSED)
    assert node.out == []


def test_udp_of_a_dead_node_returns_when_none_of_its_node_is_down() -> None:
    members = {**endpoints(9), UDP: "node-0"}
    dead = [each for each, name in members.items() if name == "node-0" and each != UDP]
    for end in ("leave", "renew"):
        node = Node(members)
        node.until(10)
        node.fail([*dead, UDP])
        node.see(dead[0])
        node.until(15)
        assert set(node.out) == {*dead, UDP}
        if end == "leave":
            left = {each: name for each, name in members.items() if each not in dead}
            node.policy.serve("pool", left)
        else:
            for each in dead:
                node.policy.renew(each)
        assert node.out == []


def test_udp_of_a_dead_node_returns_on_another_node() -> None:
    members = {**endpoints(9), UDP: "node-0"}
    node = Node(members)
    node.until(10)
    dead = [each for each, name in members.items() if name == "node-0" and each != UDP]
    node.fail([*dead, UDP])
    node.see(dead[0])
    node.until(15)
    node.policy.serve("pool", {**members, UDP: "node-1"})
    assert node.out == dead


def test_a_thousand_ejections_in_a_row_are_held_as_long_as_one_may_be(node: Node) -> None:
    for _ in range(1100):
        node.policy.fail_check(node.now, A, SILENT)
        [ejection] = node.policy.ejections
        node.now = ejection.until
        node.policy.pass_check(node.now, A)
    assert (ejection.strikes, ejection.until - ejection.since) == (1100, 300)


def test_a_probe_without_a_result_proves_nothing(node: Node) -> None:
    node.see(A)
    node.policy.advance(node.now)
    node.policy.lose(node.now, A)
    node.policy.lose(node.now, UDP)  # it is not served
    node.until(20)
    assert node.out == []
    node.fail([A])
    node.see(A)
    node.until(21)
    assert node.out == [A], "no answer, so no doubt"


def test_a_first_probe_without_a_result_is_repeated() -> None:
    node = Node({A: "node-0"})
    [probe] = node.policy.advance(0)
    node.policy.lose(0.1, probe.backend)
    assert node.policy.deadline == 0.2
    assert [each.backend for each in node.policy.advance(0.2)] == [A]


@pytest.mark.parametrize("what", ["the return", "the confirmation"])
def test_a_probe_that_is_never_reported_is_lost_after_a_while(node: Node, what: str) -> None:
    """An endpoint stayed ejected for ever, or could never be ejected again."""
    if what == "the return":
        node.fail([A])
        node.see(A)
        node.until(20.8)
        assert node.out == [A]
        [probe] = node.policy.advance(20.9)
        assert probe.backend == A
        node.now = 20.9
        node.down.clear()
        node.until(31)
        assert node.out == [A]
        node.until(34)
        assert node.out == []
    else:
        node.see(A)
        assert len(node.policy.advance(10)) == 3
        node.fail([A])
        node.until(20.8)
        node.see(A)
        assert node.out == []
        for _ in range(3):
            node.until(node.now + 1)
            node.see(A)
        assert node.out == [A]


def test_a_return_waits_for_all_probes_of_its_endpoint_but_not_for_ever() -> None:
    node = Node()
    for probe in node.policy.advance(0):
        if probe.backend != A:  # this one is never reported
            node.policy.probed(0.1, probe.backend, ANSWERED)
    node.until(1)
    node.fail([A], REFUSED)
    for client in ("10.0.9.1", "10.0.9.2"):
        node.see(A, REFUSED, client=client)
    node.until(2)
    assert node.out == [A]
    node.until(21)
    assert len(node.probed(A, 11)) == 1
    node.until(24.5)
    assert len(node.probed(A, 22)) == 2
    node.down.clear()
    node.until(26)
    assert node.out == []


def test_a_refusal_says_that_the_node_lives() -> None:
    members = {**endpoints(9), UDP: "node-0"}
    node = Node(members)
    node.until(10)
    first, second, third = [t for t, name in members.items() if name == "node-0" and t != UDP]
    node.fail([first], REFUSED)
    node.fail([second, third])
    node.see(first, REFUSED)
    node.see(second)
    node.until(15)
    assert set(node.out) == {first, second, third}


def test_udp_is_ejected_if_nobody_listens() -> None:
    members = {UDP: "node-0", Backend("10.0.1.9", 53, Protocol.UDP): "node-1"}
    node = Node(members)
    node.fail([UDP], REFUSED)
    node.see(UDP, REFUSED)
    node.until(1)
    assert node.out == [UDP]
    node.down.clear()
    node.until(11.5)
    assert node.out == []


def test_udp_that_is_silent_once_refused_is_left_alone() -> None:
    members = {UDP: "node-0", **endpoints(3)}
    node = Node(members)
    node.until(5)
    node.fail([UDP])
    node.see(UDP, REFUSED)
    node.until(10)
    assert node.out == []


def test_sctp_is_left_alone() -> None:
    node = Node({SCTP: "node-0", **MEMBERS})
    node.until(5)
    node.fail([SCTP])
    node.see(SCTP)
    node.see(SCTP, REFUSED)
    node.until(10)
    assert node.probed(SCTP, 0) == []


def test_the_return_is_probed_every_second_after_the_hold(node: Node) -> None:
    node.fail([A])
    node.see(A)
    node.until(24.5)
    assert node.probed(A, 10.9) == [10.0, 11.0, 12.0, 13.0]
    node.down.clear()
    node.until(25)
    assert node.out == []
    node.until(60)
    assert node.policy.deadline is None


def test_the_return_of_an_endpoint_that_refuses_is_probed_every_second_too(node: Node) -> None:
    node.fail([A], REFUSED)
    node.see(A, REFUSED)
    node.until(22.3)
    assert len(node.probed(A, 19)) == 3


def test_the_hold_doubles_and_is_forgiven(node: Node) -> None:
    def eject() -> float:
        node.fail([A])
        while not node.out:
            node.see(A)
            node.until(node.now + 0.1)
        [ejection] = node.policy.ejections
        node.down.clear()
        node.until(ejection.until + 1)
        assert node.out == []
        return round(ejection.until - ejection.since)

    assert [eject() for _ in range(7)] == [10, 20, 40, 80, 160, 300, 300]
    node.until(node.now + 301)
    assert eject() == 10


def test_kubernetes_has_the_last_word(node: Node) -> None:
    node.fail([A])
    node.see(A)
    node.until(12)
    assert node.out == [A]
    node.policy.renew(A)
    assert node.out == []
    assert node.policy.take_changed() == ["pool"]
    node.policy.renew(UDP)
    node.see(A)
    node.until(13)
    [ejection] = node.policy.ejections
    assert ejection.strikes == 1


def test_an_endpoint_that_leaves_is_forgotten(node: Node) -> None:
    node.fail([A])
    node.see(A)
    node.until(12)
    node.policy.serve("pool", {B: "node-1", C: "node-2"})
    assert node.out == []
    node.policy.serve("pool", MEMBERS)
    assert node.out == []
    node.until(60)
    node.policy.serve("pool", {})
    assert node.policy.ejected("pool") == ()
    node.see(A)
    node.policy.probed(60, A, SILENT)
    assert node.policy.deadline is None


def test_an_endpoint_may_leave_while_it_is_probed(node: Node) -> None:
    node.fail([A])
    node.see(A)
    node.policy.advance(10)
    node.policy.serve("pool", {B: "node-1", C: "node-2"})
    node.policy.probed(11, A, SILENT)
    node.until(20)
    assert node.out == []


def test_an_endpoint_may_be_in_two_pools_and_change_its_node(node: Node) -> None:
    node.policy.serve("other", {A: "node-1", B: "node-1"})
    node.policy.serve("pool", {B: "node-1", C: "node-2"})
    node.fail([A])
    node.see(A)
    node.until(12)
    assert [each.backend for each in node.policy.ejected("other")] == [A]
    assert node.out == []


@pytest.mark.parametrize(("number", "most"), [(1, 0), (2, 1), (3, 2), (10, 9), (20, 18)])
def test_a_share_of_the_pool_always_stays(number: int, most: int) -> None:
    members = endpoints(number + 2, nodes=1)
    served = dict(list(members.items())[:number])
    node = Node(served)
    node.policy.serve("witnesses", dict(list(members.items())[number:]))
    node.until(10)
    dead = list(served)[: max(1, number - 1)]
    node.fail(dead, REFUSED)
    for backend in dead:
        node.see(backend, REFUSED)
    node.until(11)
    assert len(node.out) == most


def test_witnesses_are_on_other_nodes_if_possible() -> None:
    """One on the node of the suspect may be as dead as the suspect."""
    nodes = ["near"] * 5 + ["far-1", "far-2", "far-3"]
    members = dict(zip(endpoints(8), nodes, strict=True))
    suspect, *_ = members
    node = Node(members)
    node.until(10)
    node.probes.clear()
    node.fail([suspect])
    node.see(suspect)
    node.until(10.1)
    witnesses = {backend for _, backend in node.probes} - {suspect}
    assert {members[each] for each in witnesses} == {"far-1", "far-2", "far-3"}


def test_if_all_are_down_all_stay(node: Node) -> None:
    node.fail([A, B], REFUSED)
    node.see(A, REFUSED)
    node.see(B, REFUSED)
    node.until(11)
    assert node.out == [A, B]
    node.policy.serve("pool", {A: "node-0", B: "node-1"})
    assert node.out == []


def test_when_one_of_many_dead_is_back_the_others_leave_soon(node: Node) -> None:
    """It failed probes, and one that is dead answered not long ago: that is no loss of packets."""
    members = list(MEMBERS)
    node.fail(members)
    for second in range(11, 25):
        for backend in members:
            node.see(backend)
        node.until(second)
    assert node.out == []
    back = members[0]
    while len(node.probed(back, 24)) < 1:
        node.see(back)
        node.until(node.now + 0.1)
    del node.down[back]  # while it is probed
    end = node.now + 20
    while node.now < end:
        for backend in members[1:]:
            node.see(backend)
        node.until(node.now + 1)
    assert node.out == members[1:]


def test_parameters_may_change_at_work(node: Node) -> None:
    node.fail([A, B], REFUSED)
    node.see(A, REFUSED)
    node.see(B, REFUSED)
    node.until(12)
    assert node.out == [A, B]
    node.policy.take_changed()
    node.policy.configure(Settings())
    assert node.policy.take_changed() == []
    node.policy.configure(Settings(confirmed_share=0.5, probes=4))
    assert node.policy.take_changed() == ["pool"]
    assert node.out == [A]
    del node.down[B]
    node.policy.renew(B)
    node.fail([C])
    node.see(C)
    node.until(13.15)
    assert [each.backend for each in node.policy.ejections] == [A]
    node.until(13.25)
    assert [each.backend for each in node.policy.ejections] == [A, C]


@pytest.fixture
def one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one endpoint be confirmed at a time."""
    monkeypatch.setattr(tuning, "MOST_SUSPECTS", 1)


@pytest.mark.usefixtures("one_place")
def test_more_suspects_than_are_confirmed_at_a_time_wait() -> None:
    members = endpoints(6, nodes=6)
    node = Node(members)
    node.until(5)
    first, second, third, *_ = members
    node.fail([first, second, third])
    for backend in (first, second, third):
        node.see(backend)
        node.see(backend)
    node.until(5.95)
    assert node.out == [first]
    node.policy.serve("pool", {each: name for each, name in members.items() if each != second})
    node.until(7)
    assert node.out == [first, third]


@pytest.mark.usefixtures("one_place")
def test_a_suspect_that_leaves_before_its_turn_is_forgotten() -> None:
    members = endpoints(6, nodes=6)
    node = Node(members)
    node.until(5)
    first, second, *_ = members
    node.fail([first, second])
    node.see(first)
    node.see(second)
    node.policy.serve("pool", {each: name for each, name in members.items() if each != second})
    node.until(7)
    assert node.out == [first]


# Modes that count successes


def test_three_silent_connects_suffice_if_successes_are_counted() -> None:
    node = Node(counts=True)
    node.until(10)
    node.fail([A])
    for _ in range(3):
        node.see(A)
        node.see(B, ANSWERED)
    node.until(10.25)
    assert node.out == []
    node.until(10.35)
    assert node.out == [A]
    [ejection] = node.policy.ejections
    assert not ejection.confirmed
    node.until(11)
    [ejection] = node.policy.ejections
    assert ejection.confirmed


def test_an_ejection_that_is_not_confirmed_ends_with_an_answer() -> None:
    node = Node(counts=True)
    node.until(10)
    node.fail([A])
    for _ in range(3):
        node.see(A)
        node.see(B, ANSWERED)
    node.until(10.5)
    assert node.out == [A]
    node.down.clear()
    node.until(10.7)
    assert node.out == []


def test_an_ejection_that_cannot_be_confirmed_ends_with_an_answer_too() -> None:
    """Half of the others lost probes meanwhile, so those that it lost prove nothing."""
    node = Node(endpoints(5), counts=True)
    first, second, third, *_ = node.members
    node.until(10)
    node.fail([first, second, third])
    for _ in range(3):
        node.see(first)
    for backend in (second, third):
        node.see(backend)
    node.until(10.55)
    assert node.out == [first]
    node.fail([second, third], ANSWERED)
    node.until(11)
    [ejection] = node.policy.ejections
    assert not ejection.confirmed
    node.until(15)
    assert node.out == [first]
    node.see(first, ANSWERED)
    assert node.out == []


def test_silent_connects_alone_eject_nobody_who_answers_probes() -> None:
    """As an attacker has them, whose packets a policy drops."""
    node = Node(counts=True)
    node.until(10)
    for _ in range(100):
        for _ in range(10):
            node.see(A)
            node.see(B, ANSWERED)
            assert node.out == []
        node.until(node.now + 0.1)


def test_silent_connects_of_one_client_do_not_suffice_if_probes_were_never_answered() -> None:
    node = Node(counts=True)
    node.fail([A])
    node.until(10)
    for _ in range(50):
        node.see(A, client="10.0.9.1")
        node.see(B, ANSWERED)
        node.until(node.now + 0.1)
    assert node.out == []
    node.see(A, client="10.0.9.2")
    node.until(node.now + 1)
    assert node.out == [A]


def test_the_next_silent_connect_after_the_first_probe_ejects() -> None:
    node = Node(counts=True)
    node.until(10)
    node.fail([A])
    node.see(A)
    node.see(A)
    node.until(10.35)
    node.see(B, ANSWERED)
    assert node.out == []
    node.see(A)
    assert node.out == [A]


def test_silent_connects_do_not_suffice_if_others_are_silent_or_it_answers() -> None:
    node = Node(counts=True)
    node.until(10)
    for _ in range(5):
        node.see(A)
    assert node.out == []
    node.see(A, ANSWERED)
    for _ in range(5):
        node.see(A)
        node.see(B, ANSWERED)
    assert node.out == []


def test_half_a_pool_stays_if_ejections_are_not_confirmed() -> None:
    members = endpoints(4, nodes=4)
    node = Node(members, counts=True)
    node.until(10)
    first, second, third, last = members
    for backend in (first, second, third):
        for _ in range(3):
            node.see(backend)
            node.see(last, ANSWERED)
    node.fail([first, second, third])
    node.until(10.35)
    assert node.out == [first, second]
    assert len(list(node.policy.ejections)) == 3


def test_an_ejected_endpoint_is_not_suspected_again(node: Node) -> None:
    node.fail([A])
    node.see(A)
    node.until(12)
    before = len(node.probes)
    node.see(A, client="10.0.9.1")
    node.until(13)
    assert len(node.probes) == before


def test_a_refusal_of_the_last_probe_alone_confirms_nothing() -> None:
    node = Node()
    node.fail([A])
    node.see(A)
    node.until(0.5)
    node.fail([A], REFUSED)
    node.until(10)
    assert node.out == []


def test_endpoints_without_a_node_have_no_neighbours() -> None:
    members = dict.fromkeys(MEMBERS, "")
    node = Node(members)
    node.until(10)
    node.fail([A, B])
    node.see(A)
    node.until(12)
    assert node.out == [A]


def test_serving_the_same_again_changes_nothing(node: Node) -> None:
    node.policy.take_changed()
    node.policy.serve("pool", MEMBERS)
    assert node.policy.take_changed() == []


def test_one_of_two_neighbours_may_leave() -> None:
    members = endpoints(6)
    node = Node(members)
    node.until(5)
    _, *rest = members
    node.policy.serve("pool", {each: members[each] for each in rest})
    node.fail(rest[:1])
    node.see(rest[0])
    node.until(7)
    assert node.out == rest[:1]
