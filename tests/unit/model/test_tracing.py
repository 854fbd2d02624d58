"""What the kernel did with a packet, as values."""

import pytest

from steersman.model.names import Family, Protocol
from steersman.model.tracing import TraceStep, TrackedConnection, WatchedFlow


@pytest.mark.parametrize(
    ("flow", "text", "family"),
    [
        (WatchedFlow(Protocol.TCP, "10.96.0.1", 80), "any to 10.96.0.1:80/TCP", Family.IPV4),
        (
            WatchedFlow(Protocol.UDP, "fd00::1", 53, "fd00:1::5", 4242),
            "[fd00:1::5]:4242 to [fd00::1]:53/UDP",
            Family.IPV6,
        ),
    ],
)
def test_a_flow_is_printed_as_addresses_are(flow: WatchedFlow, text: str, family: Family) -> None:
    assert (str(flow), flow.family) == (text, family)


@pytest.mark.parametrize(
    ("verdict", "ends"), [("drop", True), ("reject", True), ("accept", False), ("return", False)]
)
def test_a_packet_ends_where_it_is_dropped_or_rejected(verdict: str, ends: bool) -> None:
    assert TraceStep("forward", "FORWARD", "", verdict).ends is ends


def test_a_connection_is_masqueraded_if_the_endpoint_sees_another_client() -> None:
    seen = [
        TrackedConnection("10.1.0.9", 40000, "10.96.0.1", 80, "10.1.0.5", 8080, source, 40000)
        for source in ("10.1.0.9", "192.0.2.1")
    ]
    assert [each.masqueraded for each in seen] == [False, True]


@pytest.mark.parametrize(
    ("connection", "text"),
    [
        (
            TrackedConnection(
                "10.1.0.9", 40000, "10.96.0.1", 80, "10.1.0.5", 8080, "192.0.2.1", 1024, "replied"
            ),
            "10.1.0.9:40000 to 10.96.0.1:80, carried to 10.1.0.5:8080, which sees 192.0.2.1:1024"
            " (replied)",
        ),
        (
            TrackedConnection("10.1.0.9", 1, "10.1.0.5", 80, "10.1.0.5", 80, "10.1.0.9", 1),
            "10.1.0.9:1 to 10.1.0.5:80",
        ),
    ],
)
def test_connections_in_words(connection: TrackedConnection, text: str) -> None:
    assert str(connection) == text
