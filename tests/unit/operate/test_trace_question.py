"""From the words of `steersman trace` to a packet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steersman.model.names import Protocol
from steersman.operate.answer import QuestionError
from steersman.operate.names import Names
from steersman.operate.trace_question import TraceQuestion, namespace_path, read_question
from tests.support.builders import kube
from tests.support.builders.asked import DEMO, NODE_A, NODE_B, POD_A, POD_C, asked

TWO_PORTS = kube.service("both", "10.96.0.20", ports=[{"name": "a", "port": 1}, {"port": 2}])
QUIET = kube.service("quiet", "None")
NAMES = Names(asked(*DEMO, TWO_PORTS, QUIET), "shop")


@pytest.mark.parametrize(
    ("client", "to", "question"),
    [
        ("", "shop/web:http", TraceQuestion("10.96.0.10", 80)),
        ("node", "web", TraceQuestion("10.96.0.10", 80)),
        ("node-a", "web.shop:80", TraceQuestion("10.96.0.10", 80)),
        ("shop/web-1", "web", TraceQuestion("10.96.0.10", 80, source=POD_A)),
        (POD_A, "10.96.0.10:53/udp", TraceQuestion("10.96.0.10", 53, Protocol.UDP, POD_A)),
        ("", ":30080", TraceQuestion(NODE_A, 30080)),
        ("", "[2001:db8::1]:30080", TraceQuestion("2001:db8::1", 30080)),
        ("", "both:a", TraceQuestion("10.96.0.20", 1)),
    ],
)
def test_names_become_addresses(client: str, to: str, question: TraceQuestion) -> None:
    assert read_question(NAMES, client, to) == question


@pytest.mark.parametrize(
    ("client", "source"),
    [("outside", ""), ("pod", ""), ("web-3", POD_C), ("node-b", NODE_B), ("node", "")],
)
def test_real_traffic_may_come_from_anywhere(client: str, source: str) -> None:
    found = read_question(NAMES, client, ":30080", wait=True, timeout=60)
    assert found == TraceQuestion(NODE_A, 30080, source=source, wait=True, timeout=60)


@pytest.mark.parametrize(
    ("client", "to", "why"),
    [
        ("", "both", "a packet goes to one port: write shop/both:a or shop/both:2"),
        ("", "10.96.0.10", "give a port, such as 10.96.0.10:80"),
        (
            "",
            "quiet",
            "shop/quiet has no address of its own: trace a connection to one of its pods",
        ),
        (POD_A, "[fd00::1]:80", "fd00::1 has no address in the client's family"),
        ("outside", "web", "--from outside: a probe is sent from this node or from a pod on it"),
        ("web-3", "web", "--from web-3: the pod runs on node-b: run the command there, or give"),
        ("node-b", "web", "--from node-b: this is node-a: run the command on node-b"),
        ("nobody", "web", "nobody"),
    ],
)
def test_other_questions_are_refused(client: str, to: str, why: str) -> None:
    with pytest.raises(QuestionError) as refused:
        read_question(NAMES, client, to)
    assert why in str(refused.value)


def test_namespaces_by_path_name_and_pid(tmp_path: Path) -> None:
    (tmp_path / "blue").touch()
    assert namespace_path("blue", tmp_path) == tmp_path / "blue"
    assert namespace_path(str(tmp_path / "blue")) == tmp_path / "blue"
    assert namespace_path(str(os.getpid())) == Path(f"/proc/{os.getpid()}/ns/net")
    with pytest.raises(QuestionError, match="--netns red: there is no network namespace"):
        namespace_path("red", tmp_path)
    found = read_question(NAMES, "web-3", "web", netns=str(tmp_path / "blue"))
    assert (found.source, found.netns) == (POD_C, tmp_path / "blue")
