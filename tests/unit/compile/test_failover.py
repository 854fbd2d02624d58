"""Which endpoints failover watches."""

from __future__ import annotations

import pytest
from msgspec import structs

from steersman.compile.failover import ejects, read_check, watched_pools
from steersman.model.failover import Backend, Check
from steersman.model.kube import Annotations
from steersman.model.names import Family, Protocol
from tests.support.builders.objects import KEY, NODE, endpoint, port, service, slice_


@pytest.mark.parametrize(
    ("word", "default", "watched"),
    [
        (None, False, False),
        (None, True, True),
        ("true", False, True),
        ("false", True, False),
        ("yes", False, False),
        ("yes", True, True),
    ],
)
def test_an_annotation_overrides_the_default(
    word: str | None, default: bool, watched: bool
) -> None:
    obj = service()
    metadata = structs.replace(obj.metadata, annotations=Annotations(eject=word))
    assert ejects(structs.replace(obj, metadata=metadata), default) is watched


def test_services_without_annotations_follow_the_default() -> None:
    assert ejects(service(), True)
    assert not ejects(service(), False)


def test_ready_endpoints_are_watched_with_their_nodes() -> None:
    here = endpoint("10.0.0.1", NODE)
    nowhere = endpoint("10.0.0.2")
    not_ready = endpoint("10.0.0.3", NODE, ready=False)
    pools = watched_pools(service(), [slice_(here, nowhere, not_ready)], (Family.IPV4,), NODE)
    assert pools == {
        KEY: {
            Backend("10.0.0.1", 8080, Protocol.TCP): NODE,
            Backend("10.0.0.2", 8080, Protocol.TCP): "",
        }
    }


def test_a_port_without_endpoints_is_an_empty_pool() -> None:
    assert watched_pools(service(), [], (Family.IPV4,), NODE) == {KEY: {}}


@pytest.mark.parametrize(
    ("words", "check"),
    [
        ({"probe": "tcp"}, Check()),
        ({"probe": "http:/"}, Check("/")),
        (
            {
                "probe": "http:/healthz?full=1",
                "probe_interval": "1.5s",
                "probe_failures": "2",
                "probe_successes": "99",
            },
            Check("/healthz?full=1", 1.5, 2, 99),
        ),
        ({"probe": "tcp", "probe_interval": "1h"}, Check(interval=3600)),
        ({"probe": "tcp", "probe_interval": "1500ms"}, Check(interval=1.5)),
        ({}, None),
    ],
)
def test_a_service_asks_for_checks(words: dict[str, str], check: Check | None) -> None:
    obj = service()
    metadata = structs.replace(obj.metadata, annotations=Annotations(**words))
    obj = structs.replace(obj, metadata=metadata)
    assert read_check(obj) == (check, ())
    assert ejects(obj, False) is (check is not None)
    off = structs.replace(metadata, annotations=Annotations(eject="false", **words))
    assert not ejects(structs.replace(obj, metadata=off), True)


@pytest.mark.parametrize(
    ("words", "check", "field"),
    [
        ({"probe": "https:/"}, None, "probe"),
        ({"probe": "http:healthz"}, None, "probe"),
        ({"probe": "http:/a b"}, None, "probe"),
        ({"probe": "http:/a\r\nHost: x"}, None, "probe"),
        ({"probe": "http:/" + "a" * 1000}, None, "probe"),
        ({"probe": "TCP"}, None, "probe"),
        ({"probe_interval": "10s"}, None, "probe"),
        ({"probe": "tcp", "probe_interval": "999ms"}, Check(), "probe-interval"),
        ({"probe": "tcp", "probe_interval": "61m"}, Check(), "probe-interval"),
        ({"probe": "tcp", "probe_interval": "10"}, Check(), "probe-interval"),
        ({"probe": "tcp", "probe_failures": "0"}, Check(), "probe-failures"),
        ({"probe": "tcp", "probe_failures": "\u0663"}, Check(), "probe-failures"),
        ({"probe": "tcp", "probe_successes": "100"}, Check(), "probe-successes"),
    ],
)
def test_malformed_annotations_are_findings(
    words: dict[str, str], check: Check | None, field: str
) -> None:
    obj = service()
    metadata = structs.replace(obj.metadata, annotations=Annotations(**words))
    found, [finding] = read_check(structs.replace(obj, metadata=metadata))
    assert found == check
    assert finding.object == f"Service {obj.metadata.object_name}"
    assert finding.field == f"metadata.annotations[steersman/{field}]"
    assert "write " in finding.reason


def test_only_tcp_is_checked() -> None:
    obj = service(ports=[port(protocol="UDP")])
    metadata = structs.replace(obj.metadata, annotations=Annotations(probe="tcp"))
    _, [finding] = read_check(structs.replace(obj, metadata=metadata))
    assert "no TCP port" in finding.reason
