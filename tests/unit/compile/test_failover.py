"""Which endpoints failover watches."""

from __future__ import annotations

import pytest
from msgspec import structs

from steersman.compile.failover import ejects, watched_pools
from steersman.model.failover import Backend
from steersman.model.kube import Annotations
from steersman.model.names import Family, Protocol
from tests.support.builders.objects import KEY, NODE, endpoint, service, slice_


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
