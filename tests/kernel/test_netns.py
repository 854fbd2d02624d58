"""Network namespaces are listed, found by an address of theirs, and entered by one call only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from steersman.host.netns import call_inside, enter, find_namespace, namespaces
from tests.support.lab.cluster import Lab, Layout, Pod

pytestmark = pytest.mark.kernel

# Other tests run beside these, and have labs, too: the addresses are of this module alone.
NODE, POD, ELSEWHERE = "198.18.77.1", "10.251.77.5", "10.251.77.6"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    pods = (Pod(POD), Pod("fd00:10:251:77::5"))
    with Lab(Layout({"eth0": (f"{NODE}/24",)}, pods=pods)) as lab:
        yield lab


def same(one: str | Path, other: str | Path) -> bool:
    return os.stat(one).st_ino == os.stat(other).st_ino


@pytest.mark.parametrize("address", [NODE, POD, "fd00:10:251:77::5"])
def test_a_namespace_is_found_by_its_address(lab: Lab, address: str) -> None:
    found = find_namespace(address)
    assert found is not None
    assert same(found, lab.netns(address).path)


def test_of_pods_with_one_address_the_linked_one_is_found() -> None:
    layout = Layout({"eth0": (f"{NODE}/24",)}, pods=(Pod(POD),))
    with Lab(layout) as one, Lab(layout) as other:
        for each in (one, other):
            found = call_inside(Path(each.node.path), lambda: find_namespace(POD))
            assert found is not None
            assert same(found, each.netns(POD).path)


def test_an_address_of_nobody_is_not_found(lab: Lab) -> None:
    assert find_namespace(ELSEWHERE) is None
    # The node could bind it now, but does not have it.
    lab.sysctl("ipv4/ip_nonlocal_bind", "1")
    assert find_namespace(ELSEWHERE) is None


def test_every_namespace_is_listed_once(lab: Lab) -> None:
    found = [os.stat(path).st_ino for path in namespaces() if path.exists()]
    assert len(found) == len(set(found))
    assert {os.stat(lab.netns(a).path).st_ino for a in (NODE, POD)} <= set(found)


def test_only_the_called_function_is_inside(lab: Lab) -> None:
    here = os.stat("/proc/self/ns/net").st_ino
    inside = call_inside(
        Path(lab.netns(POD).path), lambda: os.stat("/proc/thread-self/ns/net").st_ino
    )
    assert inside == os.stat(lab.netns(POD).path).st_ino
    assert os.stat("/proc/thread-self/ns/net").st_ino == here


def test_what_is_no_namespace_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "missing"):
        with pytest.raises(OSError, match=name):
            enter(tmp_path / name)
