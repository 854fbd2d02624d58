"""Laws of the ipvs mode's pure half."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from steersman.host.nlmsg import Message
from steersman.model.names import Protocol
from steersman.model.ruleset import diff
from steersman.modes.ipvs.changes import ChangeSet, assigned_addresses
from steersman.modes.ipvs.counters import Counted, MonotonicStats, ServerOwners
from steersman.modes.ipvs.objects import Server, ServerKey
from steersman.modes.ipvs.wire import Command, ServerStats, read_service, service
from tests.support.builders.plans import cluster_ip, endpoints, key, node_port, plan

PORTS = st.integers(1, 65535)
TARGETS = st.tuples(st.sampled_from(["10.244.0.1", "10.244.0.2", "fd00::3"]), PORTS)
KEYS = st.builds(
    ServerKey,
    st.sampled_from(list(Protocol)),
    st.sampled_from(["10.96.0.1", "10.96.0.2", "fd00:96::1"]),
    st.integers(1, 3),
)


@st.composite
def server(draw: st.DrawFn) -> Server:
    targets = tuple(sorted(draw(st.sets(TARGETS, max_size=3))))
    weight = st.integers(2, 9)
    weights = tuple(draw(weight) for _ in targets) if draw(st.booleans()) else ()
    scheduler, flags = draw(st.sampled_from(["rr", "mh"])), draw(st.sampled_from([0, 1, 0x10]))
    return Server(scheduler, flags, draw(st.integers(0, 9)), draw(st.booleans()), targets, weights)


RULESETS = st.dictionaries(KEYS, server(), max_size=6)


@given(RULESETS, RULESETS)
def test_growth_leads_from_what_is_held_to_what_is_wanted(
    have: dict[ServerKey, Server], want: dict[ServerKey, Server]
) -> None:
    held = assigned_addresses(have)
    held.update(ChangeSet(diff(have, want)).usage)
    assert +held == assigned_addresses(want)


@given(RULESETS, RULESETS)
def test_every_changed_server_is_told(
    have: dict[ServerKey, Server], want: dict[ServerKey, Server]
) -> None:
    change = diff(have, want)
    told = ChangeSet(change).servers
    assert {k: new for k, _, new in told} == {k: v for k, v in want.items() if have.get(k) != v}


@given(KEYS, server())
def test_a_server_is_read_as_it_was_written(where: ServerKey, wanted: Server) -> None:
    request = service(99, Command.NEW_SERVICE, where, wanted)
    listed = read_service(Message(99, 0, 1, request.payload))
    assert listed is not None
    assert (listed.key, (listed.scheduler, listed.flags, listed.timeout)) == (
        where,
        wanted.settings,
    )


PLAN = plan(
    key("shop/cart:http"), cluster_ip("10.96.0.1"), node_port(2), cluster=endpoints("10.244.0.1")
)
COUNTED = st.tuples(
    st.sampled_from([ServerKey(Protocol.TCP, f"10.96.0.{n}", p) for n, p in ((1, 80), (7, 2))]),
    st.sampled_from([None, ("10.244.0.1", 8080)]),
)
STATS = st.builds(ServerStats, *[st.integers(0, 9)] * 5)


@given(st.lists(st.dictionaries(COUNTED, STATS), max_size=6))
def test_counts_never_fall(scrapes: list[dict[Counted, ServerStats]]) -> None:
    totals, owners = MonotonicStats(), ServerOwners([PLAN])
    before: Counter[object] = Counter()
    for counts in scrapes:
        made = totals.update(counts, owners)
        now: Counter[object] = Counter(dict(made.frontends))
        now.update(dict(made.endpoints))
        assert now >= before
        before = now
