"""The ebpf mode's view of the machine: devices, timeouts, and what is said to be missing."""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steersman.host import nlmsg
from steersman.host.nlmsg import Message
from steersman.host.rtnetlink import Interface
from steersman.model.errors import ApplyError, BusyError
from steersman.modes.base import Support
from steersman.modes.ebpf import bpf, layout, probe
from steersman.modes.ebpf.devices import Found, after, describe
from steersman.modes.ebpf.features import FEATURES, Feature, lacking
from steersman.modes.ebpf.flows import Timeouts, read_timeouts
from steersman.modes.ebpf.mode import guarded

ETHER, TUNNEL = 1, 65534
NEWLINK, DELLINK = 16, 17
DEVICES = (
    Interface(2, "eth0", ETHER, 0),
    Interface(3, "cni0", ETHER, 0),
    Interface(4, "veth1", ETHER, 3),
    Interface(5, "wg0", TUNNEL, 0),
)


def packed(*addresses: str) -> tuple[bytes, ...]:
    return tuple(map(layout.pack_address, addresses))


FOUND = Found(DEVICES, {2: packed("192.0.2.1", "192.0.2.2"), 3: packed("10.0.0.1", "fd00::1")})


def flags(interface: str, prefix: str) -> dict[int, int]:
    found = describe(FOUND, interface, prefix)
    return {index: layout.DEVICE.unpack(value)[2] for index, value in found.items()}


def test_masquerading_takes_an_address_of_the_device_or_the_first_there_is() -> None:
    found = {i: layout.DEVICE.unpack(v)[:2] for i, v in describe(FOUND, "", "").items()}
    assert found == {
        2: packed("192.0.2.1", "fd00::1"),
        3: packed("10.0.0.1", "fd00::1"),
        4: packed("192.0.2.1", "fd00::1"),
        5: packed("192.0.2.1", "fd00::1"),
    }


def test_without_addresses_nothing_can_be_masqueraded() -> None:
    value = describe(Found(DEVICES[:1], {}), "", "")[2]
    assert layout.DEVICE.unpack(value)[:2] == (bytes(16), bytes(16))


@pytest.mark.parametrize(
    ("interface", "prefix", "pods"),
    [("", "", set()), ("cni0", "", {3, 4}), ("eth0", "", {2}), ("", "veth", {4})],
)
def test_pods_are_behind_the_detectors_devices(interface: str, prefix: str, pods: set[int]) -> None:
    found = flags(interface, prefix)
    assert {index for index, flag in found.items() if flag & layout.DEVICE_POD} == pods


def test_a_device_may_have_no_ethernet() -> None:
    bare = {index for index, flag in flags("", "").items() if flag & layout.DEVICE_NO_ETHERNET}
    assert bare == {5}


def link_news(device: Interface, kind: int = NEWLINK, family: int = socket.AF_UNSPEC) -> Message:
    """A notification of a device."""
    head = struct.pack("=BxHiII", family, device.kind, device.number, 0, 0)
    return Message(kind, 0, 0, head + nlmsg.text(3, device.name) + nlmsg.u32(10, device.master))


def address_news(index: int, scope: int) -> Message:
    """A notification of an address."""
    return Message(20, 0, 0, struct.pack("=BBBBI", socket.AF_INET6, 64, 0, scope, index))


def test_devices_come_go_and_are_renamed() -> None:
    new, renamed = Interface(9, "veth9", ETHER, 3), Interface(4, "pod4", ETHER, 0)
    found = after(FOUND, [link_news(new), link_news(renamed), link_news(DEVICES[3], DELLINK)])
    assert found
    assert set(found.devices) == {*DEVICES[:2], renamed, new}
    assert found.addresses == FOUND.addresses


def test_what_changes_nothing_leaves_the_list_as_it_is() -> None:
    loopback = Interface(1, "lo", 772, 0)
    port = link_news(DEVICES[2], DELLINK, socket.AF_BRIDGE)  # it has left its bridge
    news = [link_news(DEVICES[0]), link_news(loopback), port, address_news(4, scope=253)]
    assert after(FOUND, news) == FOUND


@pytest.mark.parametrize("news", [address_news(2, scope=0), link_news(DEVICES[0], DELLINK)])
def test_global_addresses_are_listed_again(news: Message) -> None:
    assert after(FOUND, [news]) is None


@given(st.lists(st.tuples(st.sampled_from([NEWLINK, DELLINK]), st.integers(4, 7))))
def test_notifications_lead_to_what_there_is(changes: list[tuple[int, int]]) -> None:
    there = {device.number: device for device in DEVICES}
    news = []
    for serial, (kind, number) in enumerate(changes):
        device = Interface(number, f"veth{serial}", ETHER, 0)
        news.append(link_news(device, kind))
        if kind == NEWLINK:
            there[number] = device
        else:
            there.pop(number, None)
    found = after(FOUND, news)
    assert found
    assert sorted(found.devices) == sorted(there.values())


@pytest.mark.parametrize("number", [2, 3, 4, 5])
def test_one_device_is_described_as_with_all_others(number: int) -> None:
    every = describe(FOUND, "cni0", "", {5})
    assert describe(FOUND, "cni0", "", {5}, [number]) == {number: every[number]}


def test_timeouts_are_those_of_netfilter(tmp_path: Path) -> None:
    (tmp_path / "nf_conntrack_udp_timeout").write_text("7\n")
    (tmp_path / "nf_conntrack_tcp_timeout_established").write_text("what?\n")
    assert read_timeouts(tmp_path) == Timeouts(udp=7)


OLD = Feature("maps", "5.5", lambda: False)
MILD = Feature("TCX", "6.6", lambda: False, "filters take its place")


def test_each_missing_feature_is_named_with_its_kernel() -> None:
    found = probe.probe(Path("/nowhere/steersman-el.o"), Path("/"), lambda: (OLD, MILD))
    assert "This kernel lacks maps, which came with Linux 5.5." in found.missing
    assert (
        "This kernel lacks TCX, which came with Linux 6.6; filters take its place." in found.missing
    )
    assert "steersman-el.o" in " ".join(found.missing)
    assert not found.usable


@pytest.fixture
def complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has all but a kernel with every feature."""
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr(probe, "library", lambda: None)


@pytest.mark.usefixtures("complete")
def test_a_new_kernel_lacks_nothing(tmp_path: Path) -> None:
    (tmp_path / "cgroup.procs").touch()
    assert probe.probe(tmp_path, tmp_path, tuple) == Support(usable=True)


@pytest.mark.usefixtures("complete")
def test_a_cgroup_that_is_named_must_be_one(tmp_path: Path) -> None:
    found = probe.probe(tmp_path, tmp_path, tuple)
    assert not found.usable
    assert "--ebpf-cgroup-root" in found.missing[0]


@pytest.mark.usefixtures("complete")
def test_a_part_of_the_hierarchy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probe, "cgroup_root", lambda: tmp_path)
    assert probe.probe(tmp_path, None, tuple) == Support(usable=True)
    (tmp_path / "cgroup.type").touch()
    found = probe.probe(tmp_path, None, tuple)
    assert found.usable
    assert "not the root of all cgroups" in found.missing[0]


CGROUP2 = "{0} 31 0:38 {1} {2} rw,relatime shared:9 - cgroup2 cgroup2 rw"


@pytest.mark.parametrize(
    ("mounts", "chosen"),
    [
        ([], None),
        ([("/", "/sys/fs/cgroup")], "/sys/fs/cgroup"),
        ([("/", "/run/other"), ("/", "/sys/fs/cgroup")], "/sys/fs/cgroup"),
        ([("/", "/sys/fs/cgroup"), ("/", "/run/other")], "/sys/fs/cgroup"),
        ([("/", "/run/other"), ("/", "/sys/fs/cgroup/unified")], "/sys/fs/cgroup/unified"),
        ([("/", "/run/whole"), ("/kubepods", "/run/part")], "/run/whole"),
        ([("/pod", "/run/with\\040space")], "/run/with space"),
    ],
)
def test_the_usual_mount_of_cgroup2_is_preferred(
    mounts: list[tuple[str, str]], chosen: str | None
) -> None:
    others = ["29 1 0:26 / /sys/fs/cgroup ro - tmpfs tmpfs ro", "30 1 0:5 / /x rw - cgroup cg rw"]
    lines = [CGROUP2.format(40 + n, *mount) for n, mount in enumerate(mounts)]
    found = probe.choose_mount("\n".join([*others, *lines]), "/sys/fs/cgroup")
    assert found == (Path(chosen) if chosen else None)


@pytest.mark.usefixtures("complete")
def test_it_runs_without_what_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probe, "cgroup_root", lambda: None)
    found = probe.probe(tmp_path, None, lambda: (MILD,))
    assert found.usable
    assert [sentence.split()[1] for sentence in found.missing] == ["kernel", "cgroup2"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOMEM, BusyError),
        (errno.EPERM, ApplyError),
        (errno.EMFILE, BusyError),
        (errno.EINVAL, ApplyError),
        (errno.E2BIG, ApplyError),
    ],
)
def test_only_what_is_about_an_object_is_its_fault(code: int, kind: type[Exception]) -> None:
    def work() -> None:
        raise OSError(code, os.strerror(code))

    with pytest.raises(kind, match=os.strerror(code)):
        guarded(work)


def test_what_is_not_permitted_is_not_taken_for_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(code: int) -> None:
        def call(*_: object) -> None:
            raise OSError(code, "refused")

        monkeypatch.setattr(bpf, "call", call)

    privileged = [each for each in FEATURES if "for processes" not in each.what]
    refuse(errno.EPERM)
    assert not lacking(privileged)
    refuse(errno.EINVAL)
    assert lacking(privileged) == tuple(privileged)
