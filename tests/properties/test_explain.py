"""`explain` answers every question about every world, and never another thing than `trace`."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from steersman.cli.output import plain_lines
from steersman.compile.planner import compile_all
from steersman.compile.trace import Flow, trace
from steersman.model.inputs import NodeConfig
from steersman.model.kube import KubeObject
from steersman.model.names import Protocol
from steersman.model.plan import SourceClass, Traits
from steersman.model.world import Origin, World
from steersman.operate.answer import QuestionError
from steersman.operate.explain import Question, answer_question
from steersman.operate.explain_flow import FlowAnswer
from steersman.operate.names import Names
from steersman.source.store import Store
from tests.support.builders.objects import FACTS, NODE
from tests.support.builders.strategies import ADDRESSES, CONFIGS, NUMBERS, OBJECTS, TRAITS
from tests.support.parts import examples

WORDS = st.sampled_from(
    [
        *("shop/a", "svc/shop/b", "a.shop", "c.shop.svc.cluster.local:http", "shop/d:80"),
        *("10.0.0.1", "10.0.0.2:8080", "10.96.0.1", "fd00::1", "[fd00::1]:80", "192.168.0.2"),
        *("192.168.0.2:30000/udp", NODE, f"{NODE}:30000", ":30001", "other", "127.0.0.1:30000"),
        *("pod", "node", "outside", "nonsense", "", "pod/shop/x", "10.0.0.1:0", "::1"),
    ]
)


def asked(events: list[KubeObject], config: NodeConfig, traits: Traits) -> World:
    store = Store(NODE)
    for event in events:
        store.upsert(event)
    snapshot = store.detailed_snapshot
    plan = compile_all(snapshot, config, FACTS, traits)
    return World(
        Origin("manifests", "test"),
        snapshot,
        plan,
        "memory",
        config=config,
        facts=FACTS,
        findings=plan.findings,
        nodes=store.nodes,
        unserved=store.unserved,
    )


@settings(max_examples=examples(300), deadline=None)
@given(
    st.lists(OBJECTS, max_size=8),
    CONFIGS,
    TRAITS,
    st.builds(Question, what=WORDS, client=WORDS, to=WORDS, node=WORDS, problems=st.booleans()),
)
def test_every_question_has_an_answer_or_an_error(
    events: list[KubeObject], config: NodeConfig, traits: Traits, question: Question
) -> None:
    try:
        question.check()
        answer = answer_question(Names(asked(events, config, traits)), question)
    except QuestionError:
        return
    assert list(plain_lines(answer.blocks(True)))
    assert answer.exit_code in (0, 1)
    msgspec.json.encode(answer.data)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(OBJECTS, max_size=8),
    TRAITS,
    st.sampled_from([*SourceClass, "10.0.0.1", "192.168.0.2", "203.0.113.5"]),
    ADDRESSES | st.sampled_from(["192.168.0.2", "127.0.0.1", "::1"]),
    NUMBERS,
    st.sampled_from(Protocol),
)
def test_explain_agrees_with_trace(
    events: list[KubeObject],
    traits: Traits,
    source: str,
    destination: str,
    number: int,
    protocol: Protocol,
) -> None:
    config = NodeConfig(node_name=NODE, cluster_cidrs=("10.0.0.0/8", "fd00:10::/64"))
    world = asked(events, config, traits)
    host = f"[{destination}]" if ":" in destination else destination
    question = Question(client=source, to=f"{host}:{number}/{protocol}", node=NODE)
    try:
        answer = answer_question(Names(world), question)
    except QuestionError:
        assert destination == "bad" or not 0 < number < 65536 or source not in tuple(SourceClass)
        return
    assert isinstance(answer, FlowAnswer)
    (flow,) = answer.flows
    hop, expected = flow.hops[0], trace(world.plan, Flow(source, destination, number, protocol))
    assert (hop.verdict, hop.masquerade) == (expected.verdict, expected.masquerade)
    assert [each.address for each in hop.endpoints] == [str(each) for each in expected.endpoints]
    assert hop.reasons[: len(expected.reasons)] == expected.reasons
    assert msgspec.to_builtins(hop)["service"] == (
        str(expected.plan.name) if expected.plan else None
    )
