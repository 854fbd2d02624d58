"""`steersman connections` in each mode: who talks to a Service, by real connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.builders import kube
from tests.support.lab.cluster import Lab
from tests.support.lab.ebpf_node import MARKS
from tests.support.lab.machine import MODES, Machine, open_connections
from tests.support.lab.switches import CLIENT, ENDS, WAYS, lab

__all__ = ["lab"]  # a fixture
pytestmark = MARKS
PORT = 5353
VIP = "10.96.0.53"


@pytest.fixture
def machine(lab: Lab, tmp_path: Path) -> Iterator[Machine]:
    made = Machine(lab, tmp_path)
    ports = [{"name": "dns", "port": 53, "targetPort": PORT, "protocol": "UDP"}]
    objects = [
        kube.service("dns", cluster_ip=VIP, ports=ports),
        kube.endpoint_slice(
            "dns",
            "dns",
            {
                "addresses": [ENDS[0]],
                "nodeName": "here",
                "targetRef": {"kind": "Pod", "namespace": "shop", "name": "dns-1"},
            },
            ports=[{"name": "dns", "port": PORT, "protocol": "UDP"}],
        ),
    ]
    (tmp_path / "objects" / "dns.yaml").write_text(yaml.safe_dump_all(objects))
    yield made
    made.close()


def asked(machine: Machine, *words: str) -> dict[str, Any]:
    status, answer, errors = machine.steersman("connections", *words)
    assert status == 0, errors
    assert isinstance(answer, dict)
    return answer


def ends_of(answer: dict[str, Any]) -> dict[str, tuple[str, str, str]]:
    """Frontend, endpoint and state by client."""
    return {
        row["client"]: (row["frontend"], row["endpoint"], row["state"])
        for row in answer["connections"]
    }


def printed(sock: socket.socket) -> str:
    return ":".join(map(str, sock.getsockname()))


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("mode", MODES)
def test_connections_are_listed_with_their_endpoints(machine: Machine, mode: str) -> None:
    lab = machine.lab
    machine.start(mode, "--udp-timeout=60s")
    lab.serve(ENDS[0], PORT, "UDP")
    live = open_connections(lab)
    try:
        answer = asked(machine, "shop/web")
        found = ends_of(answer)
        for way, sock in zip(WAYS, live, strict=True):
            frontend, endpoint, state = found[printed(sock)]
            assert (frontend, state) == (f"{way[1]}:{way[2]}", "open")
            assert endpoint in {f"{end}:8080" for end in ENDS}
        counts = {each["endpoint"]: each["connections"] for each in answer["endpoints"]}
        assert counts.keys() == {f"{end}:8080" for end in ENDS}
        assert sum(counts.values()) >= len(live)
        assert answer["mode"] == mode
        assert all(row["idle"] is not None for row in answer["connections"])

        # A limit, and one port of the Service
        few = asked(machine, "shop/web:80", "--limit=2")
        assert len(few["connections"]) == 2
        assert few["matching"] >= len(live)
    finally:
        for sock in live:
            sock.close()

    def closed() -> bool:
        listed = ends_of(asked(machine, "shop/web"))
        return not any(listed[client][2] == "open" for client in listed.keys() & found.keys())

    machine.until(closed)

    # Datagrams, and a Service that nobody has used
    unused = asked(machine, "shop/dns")
    assert not unused["connections"]
    assert [(each["pod"], each["connections"]) for each in unused["endpoints"]] == [
        ("shop/dns-1", 0)
    ]
    with lab.socket(CLIENT, "UDP") as sock:
        sock.settimeout(60)
        sock.bind((CLIENT, 0))
        sock.connect((VIP, 53))
        sock.send(b"question")
        sock.recv(100)
        answer = asked(machine, "shop/dns:dns/udp")
        (row,) = answer["connections"]
        assert (row["client"], row["frontend"], row["endpoint"], row["protocol"], row["state"]) == (
            *(printed(sock), f"{VIP}:53", f"{ENDS[0]}:{PORT}", "UDP", "open"),
        )
